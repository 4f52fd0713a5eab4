//! The report of faults, in memory that threads or a device write and the host reads at any time.
//!
//! Whoever sees a fault counts it, claims the place of the first one if nobody has, writes it and says so, and sets the fault's bit last.
//! `fault` in `cuda/common/batch.cuh` does the same.

use std::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release};
use std::sync::atomic::{AtomicI32, AtomicI64, AtomicU32, AtomicU64, fence};

use crate::replay::launch;

/// There is no first fault.
pub const PLACE_NONE: u32 = 0;
/// Whoever saw the first fault is writing its place, or a reader takes it away.
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
    /// How often a reader has taken a place away.
    pub clears: AtomicU32,
    pub reserved: u32,
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

impl Place {
    /// Not known.
    const UNKNOWN: Self = Place { id: -1, row: -1, pool: -1, layer: -1 };
}

impl Report {
    /// Records a fault. The place of the first one is kept.
    #[cold]
    pub fn fault(&self, bit: u32, place: Place) {
        self.count.fetch_add(1, Relaxed);
        if self.place.compare_exchange(PLACE_NONE, PLACE_CLAIMED, Acquire, Relaxed).is_ok() {
            // A reader of the place before this one sees that it was taken away.
            fence(Release);
            self.first_slot.store(place.id, Relaxed);
            self.first_row.store(place.row, Relaxed);
            self.first_pool.store(place.pool, Relaxed);
            self.first_layer.store(place.layer as i32, Relaxed);
            self.place.store(PLACE_WRITTEN, Release);
        }
        self.bits.fetch_or(bit, Release);
    }

    /// What has been seen so far; with `clear` it is forgotten. The place of the first fault is -1 where it is not known: somebody is still
    /// writing it, or another reader has just taken it away, or has while there were bits of another fault alone.
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
        let place = if clear { self.take_place() } else { self.seen_place() };
        launch::Report {
            bits,
            // Of two readers that clear at once, one may have had the other's count.
            count: count.max(1),
            first_slot: place.id,
            first_row: place.row,
            first_pool: place.pool,
            first_layer: place.layer as i32,
        }
    }

    fn place(&self) -> Place {
        Place {
            id: self.first_slot.load(Relaxed),
            row: self.first_row.load(Relaxed),
            pool: self.first_pool.load(Relaxed),
            layer: self.first_layer.load(Relaxed).into(),
        }
    }

    /// The place, for the next fault to write another. Of several readers one has it, and nobody writes until it is done. Whoever has
    /// claimed it goes on writing it: it is the next report's.
    fn take_place(&self) -> Place {
        if self.place.compare_exchange(PLACE_WRITTEN, PLACE_CLAIMED, Acquire, Relaxed).is_err() {
            return Place::UNKNOWN;
        }
        let place = self.place();
        // Behind the claim: who sees this sees that the place is taken.
        self.clears.fetch_add(1, Release);
        self.place.store(PLACE_NONE, Release);
        place
    }

    /// The place, which stays.
    fn seen_place(&self) -> Place {
        let clears = self.clears.load(Acquire);
        if self.place.load(Acquire) != PLACE_WRITTEN {
            return Place::UNKNOWN;
        }
        let place = self.place();
        // What was read of a later place was written behind a fence, behind the taking away of this one.
        fence(Acquire);
        if self.clears.load(Relaxed) == clears { place } else { Place::UNKNOWN }
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

    /// A reader that clears is stopped while it has the place: others do not know it, nobody writes it, and nobody else gives it back.
    #[test]
    fn a_place_is_taken_once() {
        let report = Report::default();
        report.fault(1, FIRST);
        report.place.store(PLACE_CLAIMED, Relaxed);
        for clear in [false, true] {
            let seen = report.read(clear);
            assert_eq!((seen.bits, place(&seen)), (1, (-1, -1, -1, -1)), "clear {clear}");
        }
        report.fault(4, SECOND);
        assert_eq!(report.place.load(Relaxed), PLACE_CLAIMED);
        assert_eq!(report.first_slot.load(Relaxed), FIRST.id);
        report.place.store(PLACE_NONE, Relaxed);
        report.fault(2, SECOND);
        let seen = report.read(true);
        assert_eq!((seen.bits, place(&seen)), (6, (8, 4, -1, -1)));
    }

    #[test]
    fn readers_see_whole_places_while_threads_write() {
        let (report, writing) = (Report::default(), AtomicU32::new(3));
        let read = |clear| {
            while writing.load(Acquire) > 0 {
                let seen = report.read(clear);
                let i = seen.first_slot;
                if seen.bits != 0 && i >= 0 {
                    assert_eq!(place(&seen), (i, 10 * i, 20 * i as i32, 30 * i as i32), "clear {clear}");
                }
            }
        };
        std::thread::scope(|scope| {
            for i in 0..3 {
                let (report, writing) = (&report, &writing);
                scope.spawn(move || {
                    for _ in 0..20_000 {
                        report.fault(1 << i, Place { id: i, row: 10 * i, pool: 20 * i as i32, layer: 30 * i });
                    }
                    writing.fetch_sub(1, Release);
                });
            }
            scope.spawn(|| read(true));
            scope.spawn(|| read(false));
            read(true);
        });
    }
}
