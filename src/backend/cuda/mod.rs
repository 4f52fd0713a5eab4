//! The CUDA backend: the same interface on device pointers, in the order of the caller's stream.
//!
//! A call fills in the parameters of one kernel and enqueues it. Nothing is allocated, loaded or waited for after a pool was created, so
//! that every call can be captured in a graph. Kernels are the cubins that the build made of `cuda/`.

#[cfg(feature = "bench")]
pub mod bench;
mod choice;
mod conv1d;
mod copy;
mod decode;
mod delta;
mod direct;
mod driver;
mod fold;
mod images;
mod inspect;
pub mod instances;
mod life;
mod mamba2;
mod params;
mod single;

use std::collections::HashMap;
use std::sync::{Arc, OnceLock};

use self::direct::Turn;
use self::driver::{Device, DeviceMemory, HostMemory, Kernel, Shape};
use self::instances::{Key, PTX};
use self::params::Params;
use crate::error::{Error, Result};
use crate::replay::config::{PoolConfig, SlotsConfig};
use crate::replay::launch::{
    Address, Backend, BackendInfo, Batch, CommitArgs, ConvArgs, CopyArgs, DeltaArgs, Exec, FlushArgs, Input, List,
    Mamba2Args, Memory, Mode, PoolLists, PoolView, Report, ResetArgs, SlotsView, SnapshotArgs, StateTensor, Stats,
};
use crate::replay::layout::COUNTER_BYTES;

#[doc(hidden)]
pub use self::direct::{Preferred, launches as direct_launches, prefer};
pub use self::driver::{allocations, probe};
pub use self::images::{IMAGES, architectures};
#[doc(hidden)]
pub use self::single::launches as single_launches;

/// Registers and local bytes of every compiled kernel by name: for tests.
#[doc(hidden)]
pub fn usage() -> Vec<(String, u32, u32, u32)> {
    let keys = Key::all();
    let name = |image: &images::Image| keys.get(image.key).map_or_else(String::new, Key::name);
    IMAGES.iter().map(|image| (name(image), image.arch, image.registers, image.local_bytes)).collect()
}

/// The CUDA backend on one device.
pub struct Cuda {
    keys: Vec<Key>,
    kernels: HashMap<Key, OnceLock<Kernel>>,
    device: Arc<Device>,
}

impl Memory for DeviceMemory {
    fn address(&self) -> Address {
        Address(self.at as usize)
    }
}

/// Of a slots handle: faults in host memory, statistics in the device's.
struct Counters {
    host: HostMemory,
    _stats: DeviceMemory,
}

impl Memory for Counters {
    fn address(&self) -> Address {
        Address(self.host.at as usize)
    }
}

impl Cuda {
    /// A backend on a device; ordinal -1: on the calling thread's current context.
    pub fn new(ordinal: i32) -> Result<Self> {
        if IMAGES.is_empty() {
            return Err(Error::NoCuda(format!(
                "this library was built without CUDA kernels: {}",
                env!("REPLAYSSM_CUDA_SUMMARY")
            )));
        }
        let device = Device::open(ordinal)?;
        let keys = Key::all();
        if keys.first().is_none_or(|&key| images::find(&keys, key, device.arch).is_none()) {
            let name = |&arch: &u32| if arch == PTX { "later ones".to_owned() } else { format!("sm_{arch}") };
            let archs: Vec<_> = architectures().iter().map(name).collect();
            return Err(Error::NoCode {
                device: device.name.clone(),
                arch: format!("sm_{}", device.arch),
                expected: archs.join(", "),
            });
        }
        let kernels = keys.iter().map(|&key| (key, OnceLock::new())).collect();
        Ok(Cuda { keys, kernels, device })
    }

    /// Whether the calling thread has a current context that there are kernels for.
    pub fn is_current() -> bool {
        let arch = if IMAGES.is_empty() { None } else { driver::current_arch() };
        let keys = Key::all();
        arch.is_some_and(|arch| keys.first().is_some_and(|&key| images::find(&keys, key, arch).is_some()))
    }

    /// Dynamic shared memory that a launch of a loaded kernel may ask for.
    fn shared_limit(&self, key: Key) -> u32 {
        self.kernel(key).map_or(0, |kernel| kernel.shared_limit)
    }

    /// Blocks of a launch that looks for rows which are due, and hardly ever finds one: what runs at once.
    fn due_blocks(&self, threads: u32) -> i64 {
        i64::from(self.device.multiprocessors) * i64::from(256 / threads.max(1)).clamp(1, 2)
    }

    /// Blocks of a launch over a list, whose kernels share out what is to be done. Most entries may be padding, which a block for each layer
    /// and head of them would be started for; with so many to a multiprocessor the last ones are done at about the same time.
    fn list_blocks(&self, items: i64) -> i64 {
        items.min(i64::from(self.device.multiprocessors) * 32)
    }

    fn kernel(&self, key: Key) -> Result<&Kernel> {
        let kernel = self.kernels.get(&key).and_then(OnceLock::get);
        kernel.ok_or_else(|| Error::Internal(format!("kernel {} is not loaded", key.name())))
    }

    /// Whether there is code of a kernel for the device.
    fn has(&self, key: Key) -> bool {
        images::find(&self.keys, key, self.device.arch).is_some()
    }

    /// Loads a kernel if it is not there yet.
    fn load(&self, key: Key) -> Result<()> {
        let Some(place) = self.kernels.get(&key) else {
            return Err(Error::Internal(format!("there is no kernel {}", key.name())));
        };
        if place.get().is_some() {
            return Ok(());
        }
        let image = images::find(&self.keys, key, self.device.arch)
            .ok_or_else(|| Error::Internal(format!("there is no code of kernel {}", key.name())))?;
        let kernel = Kernel::load(&self.device, &image.cubin()?)?;
        // Another thread may have been faster; then this one is unloaded again.
        drop(place.set(kernel));
        Ok(())
    }

    /// Enqueues a kernel over `items` of work, in blocks of `threads` that each take one after the other.
    fn launch<P: Params>(
        &self,
        key: Key,
        exec: &Exec,
        items: i64,
        threads: u32,
        shared_bytes: u32,
        params: &P,
    ) -> Result<()> {
        let kernel = self.kernel(key)?;
        if shared_bytes > kernel.shared_limit {
            return Err(Error::Internal(format!(
                "kernel {} needs {shared_bytes} bytes of shared memory; there are {}",
                key.name(),
                kernel.shared_limit
            )));
        }
        let blocks = items.clamp(0, i32::MAX.into()) as u32;
        let shape = Shape { stream: exec.stream, blocks, threads, shared_bytes, dependent: exec.dependent };
        self.device.launch(kernel, &shape, params)
    }
}

impl Backend for Cuda {
    fn info(&self) -> BackendInfo {
        BackendInfo { name: self.device.name.clone(), n_threads: 0, device: Some(self.device.ordinal) }
    }

    fn check_alive(&self) -> Result<()> {
        self.device.check_alive()
    }

    fn aligned_launch(&self, slots: &SlotsConfig, pool: &PoolConfig, rows: i64, tokens: i64) -> Option<String> {
        let direct = |turn| direct::in_words(self, slots, pool, (rows, tokens), turn);
        let pipeline = || decode::in_words(self, slots, pool, rows, tokens);
        direct(Turn::First).or_else(pipeline).or_else(|| direct(Turn::Last))
    }

    fn allocate(&self, what: &'static str, bytes: u64) -> Result<Box<dyn Memory>> {
        Ok(Box::new(self.device.allocate(what, bytes)?))
    }

    fn write(&self, to: Address, bytes: &[u8]) -> Result<()> {
        self.device.write(to.0 as u64, bytes)
    }

    fn check_wait(&self, exec: &Exec) -> Result<()> {
        self.device.check_not_capturing(exec.stream)
    }

    fn read_runs(&self, from: Address, stride: i64, bytes: usize, into: &mut [u8], exec: &Exec) -> Result<()> {
        self.device.read_runs(exec.stream, from.0 as u64, stride, bytes, into)
    }

    fn write_runs(&self, to: Address, stride: i64, bytes: usize, from: &[u8], exec: &Exec) -> Result<()> {
        self.device.write_runs(exec.stream, to.0 as u64, stride, bytes, from)
    }

    fn allocate_counters(&self) -> Result<Box<dyn Memory>> {
        const { assert!(size_of::<params::Stats>() as u64 <= COUNTER_BYTES) };
        let stats = self.device.allocate("the counters", COUNTER_BYTES)?;
        let host = self.device.allocate_host("the counters", size_of::<params::Counters>() as u64)?;
        // SAFETY: a block of ours of this size, which nobody else knows yet.
        unsafe { (*host.at.cast::<params::Counters>()).stats = stats.at };
        Ok(Box::new(Counters { host, _stats: stats }))
    }

    fn supports(&self, pool: &PoolConfig) -> Result<()> {
        conv1d::supports(pool)
    }

    fn prepare(&self, slots: &SlotsConfig, pool: Option<&PoolConfig>) -> Result<()> {
        let Some(pool) = pool else {
            inspect::prepare(self, slots)?;
            return life::prepare(self);
        };
        mamba2::prepare(self, pool)?;
        delta::prepare(self, pool)?;
        conv1d::prepare(self, pool)
    }

    fn check_exec(&self, exec: &Exec) -> Result<()> {
        if exec.n_parts != 1 {
            return Err(Error::invalid("exec.n_parts", exec.n_parts, "0 or 1 on the CUDA backend"));
        }
        self.device.check_stream(exec.stream)
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
        mamba2::run(self, slots, pool, layer, mode, batch, args, exec)
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
        delta::run(self, slots, pool, layer, mode, batch, args, exec)
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
        conv1d::run(self, slots, pool, layer, mode, batch, args, exec)
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
        inspect::inspect(self, slots, pool, layer, batch, inputs, exec)
    }

    fn write_guards(&self, slots: &SlotsView, pool: &PoolView) -> Result<()> {
        inspect::write_guards(self, slots, pool)
    }

    fn commit(&self, slots: &SlotsView, batch: &Batch, args: &CommitArgs, exec: &Exec) -> Result<()> {
        life::commit(self, slots, batch, args, exec)
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
        life::rewind(self, slots, pools, lists, n, done, exec)
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
        fold::snapshot(self, slots, pools, batch, args, exec)
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
        life::read_cursors(self, slots, list, dst, exec)
    }

    fn report(&self, slots: &SlotsView, clear: bool) -> Report {
        let counters = slots.counters.0 as *const params::Counters;
        // SAFETY: counters of this backend, alive as long as the slots handle. The device may write the report, which is of atomics.
        unsafe { &(*counters).report }.read(clear)
    }

    fn stats(&self, slots: &SlotsView) -> Result<Stats> {
        let seen: params::Stats = self.device.read(params::Slots::of(slots).stats)?;
        Ok(Stats {
            steps: seen.steps,
            rows: seen.rows,
            tokens: seen.tokens,
            accepted: seen.accepted,
            flushes: seen.flushes,
            checkpoint_bytes_read: seen.checkpoint_read,
            checkpoint_bytes_written: seen.checkpoint_written,
            ring_bytes_read: seen.ring_read,
            ring_bytes_written: seen.ring_written,
        })
    }
}
