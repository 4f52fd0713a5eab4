//! The threads of a context: one loop at a time, its items handed out by a counter, the calling thread taking part.
//!
//! A loop allocates nothing, and waits for no thread that wakes up too late for it. Among crates, rayon allocates queue blocks,
//! paralight (0.0.12) an array per loop, and chili keeps its jobs in maps.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::ptr::null_mut;
use std::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release};
use std::sync::atomic::{AtomicBool, AtomicI64, AtomicPtr, AtomicU64, AtomicUsize};
use std::sync::{Arc, Condvar, Mutex, OnceLock, PoisonError};
use std::thread::{Builder, JoinHandle, Thread, park};

use crate::error::{Error, Result};
use crate::memory;
use crate::panic::Quiet;

/// Stack of a thread: eight times what callers' threads are told to have, since only touched pages are real.
const STACK_BYTES: usize = 2 << 20;

/// How often a thread looks again before it sleeps: some microseconds, about what waking it up costs.
const LOOKS: u32 = 100;

/// Threads that one thread wakes: the caller these, each of them as many others. Waking a sleeping thread takes 7 us (x86-64, in a
/// virtual machine): 15 of 16 threads would cost the caller more than its share of the work takes.
const FAN_OUT: usize = 2;

/// A loop over `0..n`, on the stack of its caller.
struct Job<'a> {
    work: &'a (dyn Fn(i64) + Sync),
    n: i64,
    next: AtomicI64,
    panic: Mutex<Option<Box<dyn Any + Send>>>,
}

impl Job<'_> {
    /// Takes part until no item is left, or until one panics.
    fn run(&self) {
        let items = || {
            loop {
                let i = self.next.fetch_add(1, Relaxed);
                if i >= self.n {
                    return;
                }
                (self.work)(i);
            }
        };
        if let Err(panic) = catch_unwind(AssertUnwindSafe(items)) {
            self.panic.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(panic);
        }
    }
}

/// The gate's word: in the upper half the number of the loop, below it whether threads may enter it, and how many are inside.
const OPEN: u64 = 1 << 31;
const INSIDE: u64 = OPEN - 1;

struct Shared {
    gate: AtomicU64,
    /// The loop behind the gate.
    job: AtomicPtr<Job<'static>>,
    /// Threads that have begun.
    begun: AtomicUsize,
    /// The caller sleeps here until all threads have begun, and until the last one has left a closed gate.
    leaving: Mutex<()>,
    empty: Condvar,
    ending: AtomicBool,
    threads: OnceLock<Vec<Thread>>,
}

impl Shared {
    /// Enters the loop behind the gate unless it is closed or was `served` already; gives its number.
    fn enter(&self, served: u64) -> Option<u64> {
        let new = |gate: u64| (gate & OPEN != 0 && gate >> 32 != served).then_some(gate + 1);
        self.gate.fetch_update(Acquire, Relaxed, new).ok().map(|gate| gate >> 32)
    }

    fn leave(&self) {
        // What this thread wrote is seen by who sees it gone.
        let gate = self.gate.fetch_sub(1, AcqRel) - 1;
        if gate & (OPEN | INSIDE) == 0 {
            // The caller is before its look at the gate, or asleep.
            drop(self.leaving.lock().unwrap_or_else(PoisonError::into_inner));
            self.empty.notify_one();
        }
    }

    /// Closes the gate and waits until nobody is inside.
    fn close(&self) {
        self.gate.fetch_and(!OPEN, Relaxed);
        let is_empty = || self.gate.load(Acquire) & INSIDE == 0;
        if soon(is_empty) {
            return;
        }
        let mut guard = self.leaving.lock().unwrap_or_else(PoisonError::into_inner);
        while !is_empty() {
            guard = self.empty.wait(guard).unwrap_or_else(PoisonError::into_inner);
        }
    }

    fn wake(&self, first: usize) {
        for thread in self.threads.get().into_iter().flatten().skip(first).take(FAN_OUT) {
            thread.unpark();
        }
    }

    /// The life of thread `index`.
    fn serve(&self, index: usize) {
        let _quiet = Quiet::begin();
        self.begun.fetch_add(1, Release);
        drop(self.leaving.lock().unwrap_or_else(PoisonError::into_inner));
        self.empty.notify_one();
        let mut served = 0;
        while !self.ending.load(Acquire) {
            if let Some(number) = self.enter(served) {
                served = number;
                self.wake((index + 1) * FAN_OUT);
                // SAFETY: the job is its caller's local, and the caller stays in `close` while a thread is inside.
                unsafe { &*self.job.load(Relaxed) }.run();
                self.leave();
            }
            let wanted = || {
                let gate = self.gate.load(Relaxed);
                gate & OPEN != 0 && gate >> 32 != served || self.ending.load(Relaxed)
            };
            if !soon(wanted) {
                park();
            }
        }
    }
}

/// Whether something comes true within a few microseconds.
fn soon(is_true: impl Fn() -> bool) -> bool {
    for _ in 0..LOOKS {
        if is_true() {
            return true;
        }
        std::hint::spin_loop();
    }
    false
}

/// Threads that wait for loops. They are gone when this is: after a destroy, the library may be unloaded.
pub(super) struct Threads {
    shared: Arc<Shared>,
    handles: Vec<JoinHandle<()>>,
    /// Held by the caller whose loop it is.
    turn: AtomicBool,
}

impl Threads {
    /// `n` threads in all, the calling one among them.
    pub(super) fn new(n: usize) -> Result<Self> {
        let shared = Arc::new(Shared {
            gate: AtomicU64::new(0),
            job: AtomicPtr::new(null_mut()),
            begun: AtomicUsize::new(0),
            leaving: Mutex::new(()),
            empty: Condvar::new(),
            ending: AtomicBool::new(false),
            threads: OnceLock::new(),
        });
        let mut threads = Threads { shared, handles: Vec::new(), turn: AtomicBool::new(false) };
        for index in 0..n - 1 {
            let shared = threads.shared.clone();
            // The stack's size is given, so that no environment variable is read.
            let builder = Builder::new().name(format!("replayssm-{index}")).stack_size(STACK_BYTES);
            let handle = builder.spawn(move || shared.serve(index)).map_err(|e| Error::OutOfMemory {
                what: format!("the threads of a context ({e})").into(),
                bytes: Some((n as u64 - 1) * STACK_BYTES as u64),
            })?;
            threads.handles.push(handle);
            memory::check("the threads of a context")?;
        }
        let _ = threads.shared.threads.set(threads.handles.iter().map(|handle| handle.thread().clone()).collect());
        // A thread allocates while it begins: that belongs to the creation of the context, and not to a later call.
        let shared = &threads.shared;
        let mut guard = shared.leaving.lock().unwrap_or_else(PoisonError::into_inner);
        while shared.begun.load(Acquire) < threads.handles.len() {
            guard = shared.empty.wait(guard).unwrap_or_else(PoisonError::into_inner);
        }
        drop(guard);
        Ok(threads)
    }

    /// Calls `work` for all of `0..n` on these threads and the calling one; a panic of an item becomes the caller's. Does nothing
    /// and returns false while the threads work for another call.
    pub(super) fn try_for_each(&self, n: i64, work: &(dyn Fn(i64) + Sync)) -> bool {
        if self.turn.swap(true, Acquire) {
            return false;
        }
        let job = Job { work, n, next: AtomicI64::new(0), panic: Mutex::new(None) };
        // The gate is closed and nobody inside, so nobody reads the job or writes the gate.
        self.shared.job.store(std::ptr::from_ref(&job).cast::<Job<'static>>().cast_mut(), Relaxed);
        let number = (self.shared.gate.load(Relaxed) >> 32).wrapping_add(1);
        self.shared.gate.store(number << 32 | OPEN, Release);
        self.shared.wake(0);
        job.run();
        self.shared.close();
        self.turn.store(false, Release);
        if let Some(panic) = job.panic.into_inner().unwrap_or_else(PoisonError::into_inner) {
            resume_unwind(panic);
        }
        true
    }
}

impl Drop for Threads {
    fn drop(&mut self) {
        self.shared.ending.store(true, Release);
        for handle in self.handles.drain(..) {
            handle.thread().unpark();
            let _ = handle.join();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;
    use std::sync::Barrier;

    use super::*;

    #[test]
    fn every_item_is_done_once() {
        let threads = Threads::new(3).unwrap();
        for n in (0..40).chain([1000]) {
            let done: Vec<AtomicI64> = (0..n).map(|_| AtomicI64::new(0)).collect();
            let add = |i: i64| {
                done[i as usize].fetch_add(i + 1, Relaxed);
            };
            assert!(threads.try_for_each(n, &add));
            assert!(done.iter().zip(1..).all(|(done, i)| done.load(Relaxed) == i), "{n} items");
        }
    }

    #[test]
    fn all_threads_take_part() {
        let threads = Threads::new(4).unwrap();
        for _ in 0..10 {
            // Nobody gets past before all are there.
            let (barrier, seen) = (Barrier::new(4), Mutex::new(HashSet::new()));
            let meet = |_| {
                barrier.wait();
                seen.lock().unwrap().insert(std::thread::current().id());
            };
            assert!(threads.try_for_each(4, &meet));
            assert_eq!(seen.into_inner().unwrap().len(), 4);
        }
    }

    #[test]
    fn a_second_loop_is_refused_while_one_runs() {
        let threads = Threads::new(2).unwrap();
        let nested = |_| assert!(!threads.try_for_each(1, &|_| panic!("must not run")));
        assert!(threads.try_for_each(10, &nested));
        // From any number of callers, each of which does its own work then.
        let sum = AtomicI64::new(0);
        let add = |i: i64| {
            sum.fetch_add(i, Relaxed);
        };
        std::thread::scope(|scope| {
            for _ in 0..3 {
                scope.spawn(|| {
                    for _ in 0..50 {
                        if !threads.try_for_each(8, &add) {
                            (0..8).for_each(add);
                        }
                    }
                });
            }
        });
        assert_eq!(sum.into_inner(), 3 * 50 * 28);
    }

    #[test]
    fn a_panic_reaches_the_caller_and_the_threads_go_on() {
        let threads = Threads::new(3).unwrap();
        let _quiet = Quiet::begin();
        for round in 0..10 {
            let fail = |i: i64| assert!(i != round, "item {i}");
            let panic = catch_unwind(AssertUnwindSafe(|| threads.try_for_each(10, &fail))).unwrap_err();
            assert_eq!(panic.downcast_ref::<String>(), Some(&format!("item {round}")));
            assert!(threads.try_for_each(10, &|_| ()));
        }
    }
}
