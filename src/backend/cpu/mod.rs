//! The CPU backend: the same interface on host pointers, work done when a call returns.

mod conv1d;
mod copy;
mod counters;
mod delta;
mod fold;
mod inspect;
pub mod isa;
mod lanes;
pub(super) mod life;
mod mamba2;
pub(super) mod raw;
pub(super) mod rows;
mod threads;
mod tiles;

use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::cell::Cell;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::atomic::{AtomicBool, AtomicI64};

use self::counters::Counters;
use self::isa::{FloatControl, Isa};
use self::threads::Threads;
use crate::error::{Error, Result};
use crate::replay::launch::{
    Address, Backend, BackendInfo, Batch, CommitArgs, ConvArgs, CopyArgs, DeltaArgs, Exec, FlushArgs, Input, List,
    Mamba2Args, Memory, Mode, PoolLists, PoolView, Report, ResetArgs, SlotsView, SnapshotArgs, StateTensor, Stats,
};
use crate::replay::layout::{ALIGNMENT, COUNTER_BYTES};
use crate::replay::plan::{SHARED_BYTES, range_length};

static SHARE_ALL: AtomicBool = AtomicBool::new(false);

/// For tests: contexts of several threads share out all work, however little it is.
#[doc(hidden)]
pub fn share_all() {
    SHARE_ALL.store(true, Relaxed);
}

thread_local! {
    static ALLOCATED: Cell<u64> = const { Cell::new(0) };
}

/// For tests: bytes that calls of this thread have allocated for slots and pools so far.
#[doc(hidden)]
pub fn allocated() -> u64 {
    ALLOCATED.get()
}

/// Gives a thread the next range of items.
type Ranges<'a> = &'a mut dyn FnMut() -> Option<Range<i64>>;

/// The CPU backend.
pub struct Cpu {
    threads: Option<Threads>,
    n_threads: i32,
    isa: Isa,
    /// Makes every work item panic; see the feature `fault-injection`.
    pub panic_in_items: bool,
}

impl Cpu {
    /// A backend on `n_threads` threads, the calling one among them; 0 = as many as the process may use.
    pub fn new(n_threads: i32) -> Result<Self> {
        let n_threads = match n_threads {
            0 => std::thread::available_parallelism().map_or(1, |n| n.get().min(1024) as i32),
            1..=1024 => n_threads,
            other => return Err(Error::invalid("context_desc.n_threads", other, "0 to 1024")),
        };
        let threads = if n_threads == 1 { None } else { Some(Threads::new(n_threads as usize)?) };
        Ok(Cpu { threads, n_threads, isa: Isa::detect(), panic_in_items: false })
    }

    #[allow(clippy::panic, reason = "what the feature is for")]
    fn fail_if_asked(&self) {
        if cfg!(feature = "fault-injection") && self.panic_in_items {
            panic!("asked for by the flag of the feature fault-injection");
        }
    }

    /// Shares out a call's items: `work` runs once on each thread and asks for ranges until there are none. With parts, or where
    /// the items' bytes are few, it runs on the calling thread alone.
    fn share_out(&self, exec: &Exec, items: i64, bytes: i64, work: impl Fn(Ranges<'_>) + Sync + Send) {
        let (begin, end) = exec.share(items);
        let is_enough = items.saturating_mul(bytes) >= SHARED_BYTES || SHARE_ALL.load(Relaxed);
        let is_shared = self.n_threads > 1 && exec.n_parts == 1 && end - begin > 1 && is_enough;
        let threads = self.threads.as_ref().filter(|_| is_shared);
        let length = if is_shared { range_length(end - begin, bytes, self.n_threads) } else { i64::MAX };
        let next = AtomicI64::new(begin);
        let serve = |_| {
            let _control = FloatControl::set();
            let mut take = || {
                let first =
                    next.fetch_update(Relaxed, Relaxed, |i| (i < end).then(|| i.saturating_add(length))).ok()?;
                self.fail_if_asked();
                Some(first..first.saturating_add(length).min(end))
            };
            work(&mut take);
        };
        // No more threads than ranges.
        let wanted = i64::from(self.n_threads).min((end - begin - 1) / length + 1);
        if !threads.is_some_and(|threads| threads.try_for_each(wanted, &serve)) {
            serve(0);
        }
    }

    /// Runs `work` on every item of this call's share, as [`Cpu::share_out`] does for items of `bytes`.
    fn for_each(&self, exec: &Exec, items: i64, bytes: i64, work: impl Fn(i64) + Sync + Send) {
        self.share_out(exec, items, bytes, |next| {
            while let Some(range) = next() {
                range.for_each(&work);
            }
        });
    }
}

struct Block {
    at: *mut u8,
    layout: Layout,
}

// SAFETY: a block is an address and a size; what happens at the address is ordered by the callers of the C interface.
unsafe impl Send for Block {}
// SAFETY: as for Send.
unsafe impl Sync for Block {}

impl Memory for Block {
    fn address(&self) -> Address {
        Address((self.at as usize).next_multiple_of(ALIGNMENT as usize))
    }
}

impl Drop for Block {
    fn drop(&mut self) {
        // SAFETY: allocated in `Cpu::allocate` with this layout, and freed once.
        unsafe { dealloc(self.at, self.layout) }
    }
}

/// Asks for huge pages behind large blocks: states are read in long streams, and each page begins with a slow walk.
fn advise_huge_pages(at: *mut u8, bytes: usize) {
    #[cfg(target_os = "linux")]
    {
        const HUGE: usize = 2 << 20;
        let first = (at as usize).next_multiple_of(HUGE);
        let last = (at as usize + bytes) / HUGE * HUGE;
        if first < last {
            // SAFETY: whole pages inside a block of ours, whose contents the advice does not change. Its failure does no harm.
            unsafe { libc::madvise(first as *mut libc::c_void, last - first, libc::MADV_HUGEPAGE) };
        }
    }
    #[cfg(not(target_os = "linux"))]
    let _ = (at, bytes);
}

impl Backend for Cpu {
    fn info(&self) -> BackendInfo {
        BackendInfo { name: format!("CPU, {}", self.isa.name()), n_threads: self.n_threads, device: None }
    }

    fn allocate(&self, what: &'static str, bytes: u64) -> Result<Box<dyn Memory>> {
        let oom = || Error::OutOfMemory { what: what.into(), bytes: Some(bytes) };
        let size = usize::try_from(bytes).ok().and_then(|bytes| bytes.checked_add(ALIGNMENT as usize));
        // The allocator zeroes pages when they are first touched only if it need not align them itself.
        let layout = Layout::from_size_align(size.ok_or_else(oom)?, 8).map_err(|_| oom())?;
        // SAFETY: the size is not zero.
        let at = unsafe { alloc_zeroed(layout) };
        if at.is_null() {
            return Err(oom());
        }
        advise_huge_pages(at, layout.size());
        ALLOCATED.set(ALLOCATED.get().wrapping_add(bytes));
        Ok(Box::new(Block { at, layout }))
    }

    fn write(&self, to: Address, bytes: &[u8]) -> Result<()> {
        // SAFETY: a part of a block of this backend, which nobody else uses yet.
        unsafe { raw::slice_mut(to, bytes.len()) }.copy_from_slice(bytes);
        Ok(())
    }

    fn read_runs(&self, from: Address, stride: i64, bytes: usize, into: &mut [u8], _: &Exec) -> Result<()> {
        for (i, run) in into.chunks_exact_mut(bytes.max(1)).enumerate() {
            // SAFETY: a run of this backend's memory, which the caller's order of calls keeps quiet.
            run.copy_from_slice(unsafe { raw::slice(from.offset(i as i64 * stride), bytes) });
        }
        Ok(())
    }

    fn write_runs(&self, to: Address, stride: i64, bytes: usize, from: &[u8], _: &Exec) -> Result<()> {
        for (i, run) in from.chunks_exact(bytes.max(1)).enumerate() {
            // SAFETY: a run of this backend's memory, which the caller's order of calls keeps for this call alone.
            unsafe { raw::slice_mut(to.offset(i as i64 * stride), bytes) }.copy_from_slice(run);
        }
        Ok(())
    }

    fn allocate_counters(&self) -> Result<Box<dyn Memory>> {
        const { assert!(size_of::<Counters>() as u64 <= COUNTER_BYTES) };
        self.allocate("the counters", COUNTER_BYTES)
    }

    fn check_exec(&self, exec: &Exec) -> Result<()> {
        if exec.dependent {
            return Err(Error::unsupported("exec.flags", "REPLAYSSM_EXEC_PDL", "0 on the CPU backend"));
        }
        if exec.stream != 0 {
            return Err(Error::WrongStream {
                value: format!("{:#x}", exec.stream),
                expected: "NULL is expected on the CPU backend".into(),
            });
        }
        Ok(())
    }

    fn mamba2(
        &self,
        slots: &SlotsView,
        pool: &PoolView,
        layer: i64,
        mode: Mode,
        batch: &Batch,
        args: &Mamba2Args,
        exec: &Exec,
    ) -> Result<()> {
        mamba2::run(self, slots, pool, layer, mode, batch, args, exec);
        Ok(())
    }

    fn delta(
        &self,
        slots: &SlotsView,
        pool: &PoolView,
        layer: i64,
        mode: Mode,
        batch: &Batch,
        args: &DeltaArgs,
        exec: &Exec,
    ) -> Result<()> {
        delta::run(self, slots, pool, layer, mode, batch, args, exec);
        Ok(())
    }

    fn conv1d(
        &self,
        slots: &SlotsView,
        pool: &PoolView,
        layer: i64,
        mode: Mode,
        batch: &Batch,
        args: &ConvArgs,
        exec: &Exec,
    ) -> Result<()> {
        conv1d::run(self, slots, pool, layer, mode, batch, args, exec);
        Ok(())
    }

    fn inspect(
        &self,
        slots: &SlotsView,
        pool: &PoolView,
        layer: i64,
        batch: &Batch,
        inputs: &mut dyn Iterator<Item = Input>,
        exec: &Exec,
    ) -> Result<()> {
        inspect::inspect(self, slots, pool, layer, batch, inputs, exec);
        Ok(())
    }

    fn write_guards(&self, slots: &SlotsView, pool: &PoolView) -> Result<()> {
        inspect::write_guards(slots, pool);
        Ok(())
    }

    fn commit(&self, slots: &SlotsView, batch: &Batch, args: &CommitArgs, exec: &Exec) -> Result<()> {
        life::commit(slots, batch, args, exec);
        Ok(())
    }

    fn reset(
        &self,
        slots: &SlotsView,
        pools: &[Arc<PoolView>],
        lists: &PoolLists,
        args: &ResetArgs,
        exec: &Exec,
    ) -> Result<()> {
        life::reset(self, slots, pools, lists, args, exec)
    }

    fn import(
        &self,
        slots: &SlotsView,
        pool: &PoolView,
        list: &List,
        position: Option<Address>,
        src: &StateTensor,
        exec: &Exec,
    ) -> Result<()> {
        life::import(self, slots, pool, list, position, src, exec)
    }

    fn export(
        &self,
        slots: &SlotsView,
        pool: &PoolView,
        list: &List,
        at: Option<Address>,
        dst: &StateTensor,
        exec: &Exec,
    ) -> Result<()> {
        fold::export(self, slots, pool, list, at, dst, exec)
    }

    fn rewind(
        &self,
        slots: &SlotsView,
        pools: &[Arc<PoolView>],
        lists: &PoolLists,
        n: Address,
        done: Option<Address>,
        exec: &Exec,
    ) -> Result<()> {
        life::rewind(slots, pools, lists, n, done, exec)
    }

    fn flush(
        &self,
        slots: &SlotsView,
        pools: &[Arc<PoolView>],
        lists: &PoolLists,
        args: &FlushArgs,
        exec: &Exec,
    ) -> Result<()> {
        fold::flush(self, slots, pools, lists, args, exec)
    }

    fn snapshot(
        &self,
        slots: &SlotsView,
        pools: &[Arc<PoolView>],
        batch: &Batch,
        args: &SnapshotArgs,
        exec: &Exec,
    ) -> Result<()> {
        fold::snapshot(self, slots, pools, batch, args, exec);
        Ok(())
    }

    fn copy(
        &self,
        slots: &SlotsView,
        pools: &[Arc<PoolView>],
        from: &PoolLists,
        to: &PoolLists,
        args: &CopyArgs,
        exec: &Exec,
    ) -> Result<()> {
        copy::run(self, slots, pools, from, to, args, exec)
    }

    fn read_cursors(&self, slots: &SlotsView, list: &List, dst: Address, exec: &Exec) -> Result<()> {
        life::read_cursors(slots, list, dst, exec)
    }

    fn report(&self, slots: &SlotsView, clear: bool) -> Report {
        Counters::of(slots).report(clear)
    }

    fn stats(&self, slots: &SlotsView) -> Result<Stats> {
        Ok(Counters::of(slots).stats())
    }
}
