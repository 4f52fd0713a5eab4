//! No call between creating and destroying allocates, on any thread.

#![allow(clippy::multiple_unsafe_ops_per_block, reason = "a test's calls share one promise")]

mod common;

use std::alloc::{GlobalAlloc, Layout, System};
use std::fs;
use std::sync::atomic::{AtomicU64, Ordering::SeqCst};

use common::every_call::EveryCall;
use common::{FAMILIES, Spec};
use replayssm::ffi::*;

/// Allocations of all threads of the process.
static ALLOCATIONS: AtomicU64 = AtomicU64::new(0);

struct Counting;

// SAFETY: hands everything to the system's allocator.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.fetch_add(1, SeqCst);
        // SAFETY: the caller's promise is the system allocator's.
        unsafe { System.alloc(layout) }
    }
    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        // SAFETY: the caller's promise is the system allocator's.
        unsafe { System.dealloc(at, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// Nanoseconds that each of the library's own threads has run, where the system tells.
fn worked() -> Vec<u64> {
    let mut times = Vec::new();
    for task in fs::read_dir("/proc/self/task").into_iter().flatten().flatten() {
        let read = |name| fs::read_to_string(task.path().join(name)).unwrap_or_default();
        if read("comm").starts_with("replayssm-") {
            times.extend(read("schedstat").split(' ').next().and_then(|time| time.parse::<u64>().ok()));
        }
    }
    times
}

// The only test of this program, because it counts what all threads do.
#[test]
fn no_call_allocates() {
    cpu_only!();
    // A queue that grows now and then shows in 300 rounds.
    for (readout, rounds) in
        [(REPLAYSSM_READOUT_HIGH, 300), (REPLAYSSM_READOUT_FULL, 20), (REPLAYSSM_READOUT_EXACT, 20)]
    {
        for family in FAMILIES {
            let spec = Spec {
                family,
                readout,
                headdim: 64,
                dstate: 64,
                window: 5,
                keep: 2,
                slots: 12,
                threads: 3,
                ..Spec::default()
            };
            let mut calls = EveryCall::new(spec, 4, 8192, &[2, 1, 2, 2, 3, 2], 6, 3);
            let before = worked();
            for round in 0..rounds {
                let allocations = ALLOCATIONS.load(SeqCst);
                calls.run();
                assert_eq!(
                    ALLOCATIONS.load(SeqCst) - allocations,
                    0,
                    "family {family}, readout {readout}, round {round}"
                );
            }
            let shares: Vec<u64> = worked().iter().zip(&before).map(|(after, before)| after - before).collect();
            if shares.is_empty() {
                println!("skipped: which threads work (the system does not tell)");
                continue;
            }
            // A round wakes a thread some fifteen times, at a few microseconds each; its share of the work is far more.
            assert!(shares.len() == 2 && shares.iter().all(|&time| time > rounds * 100_000), "{shares:?} ns");
            println!("{shares:?} ns of {rounds} rounds");
        }
    }
    assert!(ALLOCATIONS.load(SeqCst) > 0, "the counter counts");
}
