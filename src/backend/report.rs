//! The report of faults, in memory that threads or a device write and the host reads at any time.
//!
//! Whoever sees a fault counts it, claims the place of the first one if nobody has, writes it and says so, and sets the fault's bit last.
//! `fault` in `cuda/common/batch.cuh` does the same.

use std::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release};
use std::sync::atomic::{AtomicI32, AtomicI64, AtomicU32, AtomicU64};

use crate::replay::launch;

/// There is no first fault.
pub const PLACE_NONE: u32 = 0;
/// Whoever saw the first fault is writing its place.
pub const PLACE_CLAIMED: u32 = 1;
/// The first fault's place is complete.
pub const PLACE_WRITTEN: u32 = 2;

/// Sticky faults. All zero: none.
#[repr(C)]
#[derive(Debug, Default)]
pub struct Report {
    pub bits: AtomicU32,
    /// One of `PLACE_*`.
    pub place: AtomicU32,
    pub count: AtomicU64,
    pub first_slot: AtomicI64,
    pub first_row: AtomicI64,
    pub first_pool: AtomicI32,
    pub first_layer: AtomicI32,
}

/// Where a fault was seen.
#[derive(Debug, Clone, Copy)]
pub struct Place {
    /// Slot or ring.
    pub id: i64,
    /// Batch row or list entry.
    pub row: i64,
    /// Pool, or -1.
    pub pool: i32,
    /// Layer, or -1.
    pub layer: i64,
}

impl Report {
    /// Records a fault. The place of the first one is kept.
    #[cold]
    pub fn fault(&self, bit: u32, place: Place) {
        self.count.fetch_add(1, Relaxed);
        if self.place.compare_exchange(PLACE_NONE, PLACE_CLAIMED, Acquire, Relaxed).is_ok() {
            self.first_slot.store(place.id, Relaxed);
            self.first_row.store(place.row, Relaxed);
            self.first_pool.store(place.pool, Relaxed);
            self.first_layer.store(place.layer as i32, Relaxed);
            self.place.store(PLACE_WRITTEN, Release);
        }
        self.bits.fetch_or(bit, Release);
    }

    /// What has been seen so far; with `clear` it is forgotten. Another fault may have its bits in it while the place of the first one is
    /// still being written: that is then -1.
    pub fn read(&self, clear: bool) -> launch::Report {
        let mut bits = self.bits.load(Acquire);
        // A fault that is just being written is the next reader's, whole.
        if bits == 0 {
            return launch::Report::default();
        }
        if clear {
            bits |= self.bits.swap(0, AcqRel);
        }
        let count = if clear { self.count.swap(0, Relaxed) } else { self.count.load(Relaxed) };
        let is_written = self.place.load(Acquire) == PLACE_WRITTEN;
        let place = |of: &AtomicI32| if is_written { of.load(Relaxed) } else { -1 };
        let wide = |of: &AtomicI64| if is_written { of.load(Relaxed) } else { -1 };
        let report = launch::Report {
            bits,
            // Of two readers that clear at once, one may have had the other's count.
            count: count.max(1),
            first_slot: wide(&self.first_slot),
            first_row: wide(&self.first_row),
            first_pool: place(&self.first_pool),
            first_layer: place(&self.first_layer),
        };
        // Whoever has claimed the place goes on writing it: it is the next report's.
        if clear && is_written {
            self.place.store(PLACE_NONE, Release);
        }
        report
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const FIRST: Place = Place { id: 7, row: 3, pool: 1, layer: 5 };
    const SECOND: Place = Place { id: 8, row: 4, pool: -1, layer: -1 };

    fn place(report: &launch::Report) -> (i64, i64, i32, i32) {
        (report.first_slot, report.first_row, report.first_pool, report.first_layer)
    }

    #[test]
    fn the_first_place_is_kept_until_it_is_cleared() {
        let report = Report::default();
        assert_eq!(report.read(true), launch::Report::default());
        report.fault(1, FIRST);
        report.fault(4, SECOND);
        let seen = report.read(true);
        assert_eq!((seen.bits, seen.count, place(&seen)), (5, 2, (7, 3, 1, 5)));
        assert_eq!(report.read(false), launch::Report::default());
        report.fault(8, SECOND);
        let seen = report.read(false);
        assert_eq!((seen.bits, seen.count, place(&seen)), (8, 1, (8, 4, -1, -1)));
    }

    /// A first fault is stopped at every point of its way, while a second one runs from end to end.
    #[test]
    fn a_place_is_complete_or_not_told() {
        for clear in [false, true] {
            let report = Report::default();
            report.count.fetch_add(1, Relaxed);
            assert_eq!(report.read(clear), launch::Report::default());
            report.place.store(PLACE_CLAIMED, Relaxed);
            report.first_slot.store(FIRST.id, Relaxed);
            report.fault(4, SECOND);
            let seen = report.read(clear);
            assert_eq!((seen.bits, seen.count, place(&seen)), (4, 2, (-1, -1, -1, -1)), "clear {clear}");
            report.first_row.store(FIRST.row, Relaxed);
            report.first_pool.store(FIRST.pool, Relaxed);
            report.first_layer.store(FIRST.layer as i32, Relaxed);
            report.place.store(PLACE_WRITTEN, Release);
            report.bits.fetch_or(1, Release);
            let seen = report.read(clear);
            assert_eq!((seen.bits, place(&seen)), (if clear { 1 } else { 5 }, (7, 3, 1, 5)), "clear {clear}");
        }
    }

    #[test]
    fn readers_see_whole_places_while_threads_write() {
        let report = Report::default();
        std::thread::scope(|scope| {
            let writers: Vec<_> = (0..3)
                .map(|i| {
                    let report = &report;
                    scope.spawn(move || {
                        for _ in 0..20_000 {
                            report.fault(1 << i, Place { id: i, row: 10 * i, pool: 20 * i as i32, layer: 30 * i });
                        }
                    })
                })
                .collect();
            while !writers.iter().all(|writer| writer.is_finished()) {
                let seen = report.read(true);
                let i = seen.first_slot;
                if seen.bits != 0 && i >= 0 {
                    assert_eq!(place(&seen), (i, 10 * i, 20 * i as i32, 30 * i as i32));
                }
            }
        });
    }
}
