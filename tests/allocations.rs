//! No call of a model step allocates on the caller's thread.

#![allow(clippy::multiple_unsafe_ops_per_block, reason = "a test's calls share one promise")]

mod common;

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::ptr::null;

use common::{BatchData, FAMILIES, Inputs, Rig, Rng, Row, Spec, ok};
use replayssm::ffi::*;

thread_local! {
    static ALLOCATIONS: Cell<u64> = const { Cell::new(0) };
}

struct Counting;

// SAFETY: hands everything to the system's allocator.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        let _ = ALLOCATIONS.try_with(|n| n.set(n.get() + 1));
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

#[test]
fn a_model_step_does_not_allocate() {
    for family in FAMILIES {
        for readout in [REPLAYSSM_READOUT_HIGH, REPLAYSSM_READOUT_FULL, REPLAYSSM_READOUT_EXACT] {
            let rig = Rig::new(Spec { family, readout, layers: 1, window: 5, ..Spec::default() });
            let mut rng = Rng(1);
            for round in 0..12 {
                let rows: Vec<Row> = (0..4).map(|slot| Row::new(slot, &rig.tokens(&mut rng, 2))).collect();
                let io = Inputs::new(&rig.spec, &rig.params[0], &rows, 0);
                let extend = round % 4 == 3;
                let batch = BatchData::new(&rig, &rows, extend, 0);
                let before = ALLOCATIONS.get();
                ok(io.call(&rig, 0, &batch.desc(), extend, null()));
                // SAFETY: everything lives until the call returns.
                ok(unsafe { replayssm_commit(rig.slots, &batch.desc(), null(), null()) });
                assert_eq!(ALLOCATIONS.get() - before, 0, "family {family}, readout {readout}, round {round}");
            }
            assert!(ALLOCATIONS.get() > 0, "the counter counts");
        }
    }
}
