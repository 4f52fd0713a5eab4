//! Sticky fault bits and statistics of a slots handle, added to as work runs.

use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;

pub(super) use crate::backend::report::Place;
use crate::backend::report::Report;
use crate::replay::launch::{self, SlotsView, Stats};

/// The counters in memory.
#[repr(C)]
pub(super) struct Counters {
    report: Report,
    steps: AtomicU64,
    rows: AtomicU64,
    tokens: AtomicU64,
    accepted: AtomicU64,
    flushes: AtomicU64,
    checkpoint_read: AtomicU64,
    checkpoint_written: AtomicU64,
    ring_read: AtomicU64,
    ring_written: AtomicU64,
}

/// What one work item moved, added to the counters once at its end.
#[derive(Debug, Default)]
pub(super) struct Tally {
    pub(super) flushes: u64,
    pub(super) checkpoint_read: u64,
    pub(super) checkpoint_written: u64,
    pub(super) ring_read: u64,
    pub(super) ring_written: u64,
}

impl Tally {
    /// Nothing yet.
    pub(super) const ZERO: Self =
        Tally { flushes: 0, checkpoint_read: 0, checkpoint_written: 0, ring_read: 0, ring_written: 0 };
}

impl Counters {
    /// The counters of a slots handle.
    pub(super) fn of(slots: &SlotsView) -> &Counters {
        // SAFETY: allocated by this backend with `counter_bytes`, zeroed, aligned to 128, owned by the slots handle
        // whose view this is, and only accessed as Counters.
        unsafe { &*(slots.counters.0 as *const Counters) }
    }

    /// Records a fault.
    pub(super) fn fault(&self, bit: u32, place: Place) {
        self.report.fault(bit, place);
    }

    pub(super) fn report(&self, clear: bool) -> launch::Report {
        self.report.read(clear)
    }

    pub(super) fn stats(&self) -> Stats {
        Stats {
            steps: self.steps.load(Relaxed),
            rows: self.rows.load(Relaxed),
            tokens: self.tokens.load(Relaxed),
            accepted: self.accepted.load(Relaxed),
            flushes: self.flushes.load(Relaxed),
            checkpoint_bytes_read: self.checkpoint_read.load(Relaxed),
            checkpoint_bytes_written: self.checkpoint_written.load(Relaxed),
            ring_bytes_read: self.ring_read.load(Relaxed),
            ring_bytes_written: self.ring_written.load(Relaxed),
        }
    }

    /// Counts a commit.
    pub(super) fn step(&self) {
        self.steps.fetch_add(1, Relaxed);
    }

    /// Counts a row of a commit.
    pub(super) fn committed(&self, tokens: i64, accepted: i64) {
        self.rows.fetch_add(1, Relaxed);
        self.tokens.fetch_add(tokens as u64, Relaxed);
        self.accepted.fetch_add(accepted as u64, Relaxed);
    }

    /// Adds what a work item moved.
    pub(super) fn add(&self, tally: &Tally) {
        for (counter, value) in [
            (&self.flushes, tally.flushes),
            (&self.checkpoint_read, tally.checkpoint_read),
            (&self.checkpoint_written, tally.checkpoint_written),
            (&self.ring_read, tally.ring_read),
            (&self.ring_written, tally.ring_written),
        ] {
            if value != 0 {
                counter.fetch_add(value, Relaxed);
            }
        }
    }
}
