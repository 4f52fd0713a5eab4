//! The library's allocator: the system's, and a reserve for when that has nothing left.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::UnsafeCell;
use std::hint::spin_loop;
use std::ptr::null_mut;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};

use crate::memory::note;

#[cfg(not(debug_assertions))]
#[global_allocator]
static ALLOCATOR: Reserve = Reserve::new();

const PIECE: usize = 512;
const PIECES: usize = 512;

#[repr(align(512))]
struct Bytes(UnsafeCell<[u8; PIECE * PIECES]>);

// SAFETY: pieces are handed out to one owner each.
unsafe impl Sync for Bytes {}

static BYTES: Bytes = Bytes(UnsafeCell::new([0; PIECE * PIECES]));

/// The system's allocator, and behind it the reserve: 256 KiB of the library's own, in pieces of 512 bytes.
pub(super) struct Reserve {
    lock: AtomicBool,
    /// A bit for each piece that is taken.
    taken: UnsafeCell<[u64; PIECES / 64]>,
}

// SAFETY: `taken` is read and written by who holds the lock.
unsafe impl Sync for Reserve {}

impl Reserve {
    /// Whole.
    const fn new() -> Self {
        Reserve { lock: AtomicBool::new(false), taken: UnsafeCell::new([0; PIECES / 64]) }
    }

    fn locked<R>(&self, body: impl FnOnce(&mut [u64; PIECES / 64]) -> R) -> R {
        while self.lock.compare_exchange_weak(false, true, Acquire, Relaxed).is_err() {
            spin_loop();
        }
        // SAFETY: the lock is held, so nobody else has it.
        let result = body(unsafe { &mut *self.taken.get() });
        self.lock.store(false, Release);
        result
    }

    /// The first run of free pieces that is long enough.
    fn serve(&self, layout: Layout) -> *mut u8 {
        if layout.align() > PIECE || layout.size() > PIECE * PIECES {
            return null_mut();
        }
        let n = layout.size().div_ceil(PIECE).max(1);
        let first = self.locked(|taken| {
            let is_taken =
                |taken: &[u64; PIECES / 64], i: usize| taken.get(i / 64).is_none_or(|word| word >> (i % 64) & 1 != 0);
            let mut first = 0;
            while first + n <= PIECES {
                match (first..first + n).rev().find(|&i| is_taken(taken, i)) {
                    Some(i) => first = i + 1,
                    None => {
                        mark(taken, first, n);
                        return Some(first);
                    }
                }
            }
            None
        });
        let Some(first) = first else { return null_mut() };
        note();
        BYTES.0.get().cast::<u8>().wrapping_add(first * PIECE)
    }

    /// Takes pieces back; false if the block is not the reserve's.
    fn take_back(&self, at: *mut u8, layout: Layout) -> bool {
        let Some(first) = piece_of(at) else { return false };
        self.locked(|taken| mark(taken, first, layout.size().div_ceil(PIECE).max(1)));
        true
    }
}

/// The piece that a block of the reserve begins with; none if the block is the system's.
fn piece_of(at: *mut u8) -> Option<usize> {
    let offset = (at as usize).wrapping_sub(BYTES.0.get() as usize);
    (offset < PIECE * PIECES).then_some(offset / PIECE)
}

/// Changes the bits of `n` pieces: free ones become taken, and the other way.
fn mark(taken: &mut [u64; PIECES / 64], first: usize, n: usize) {
    for i in first..first + n {
        if let Some(word) = taken.get_mut(i / 64) {
            *word ^= 1 << (i % 64);
        }
    }
}

// SAFETY: blocks are the system's, or pieces of the reserve that have one owner each and are aligned to 512 bytes.
unsafe impl GlobalAlloc for Reserve {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        // SAFETY: the caller's promise is the system allocator's, here and below.
        let at = unsafe { System.alloc(layout) };
        if at.is_null() { self.serve(layout) } else { at }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        // SAFETY: as above.
        let at = unsafe { System.alloc_zeroed(layout) };
        if !at.is_null() {
            return at;
        }
        let at = self.serve(layout);
        if !at.is_null() {
            // SAFETY: a block of this size that is the caller's alone.
            unsafe { at.write_bytes(0, layout.size()) };
        }
        at
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        if !self.take_back(at, layout) {
            // SAFETY: as above: what the reserve does not know is the system's.
            unsafe { System.dealloc(at, layout) };
        }
    }

    unsafe fn realloc(&self, at: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        if piece_of(at).is_none() {
            // SAFETY: as above.
            let to = unsafe { System.realloc(at, layout, size) };
            if !to.is_null() {
                return to;
            }
        }
        let Ok(wanted) = Layout::from_size_align(size, layout.align()) else { return null_mut() };
        // SAFETY: as above; the size is not zero by the caller's promise.
        let to = unsafe { self.alloc(wanted) };
        if !to.is_null() {
            // SAFETY: two blocks of at least this size, which do not overlap, since one of them is new.
            unsafe { std::ptr::copy_nonoverlapping(at, to, size.min(layout.size())) };
            // SAFETY: the caller's block, which is no more.
            unsafe { self.dealloc(at, layout) };
        }
        to
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_reserve_serves_what_fits_and_is_whole_again() {
        let reserve = Reserve::new();
        let layout = |size, align| Layout::from_size_align(size, align).expect("a layout");
        let all = layout(PIECE * PIECES, 8);
        let at = reserve.serve(all);
        assert!(!at.is_null() && reserve.serve(layout(1, 1)).is_null());
        assert!(reserve.take_back(at, all));
        let sizes = [1, PIECE, PIECE + 1, 5000, 64];
        let blocks = sizes.map(|size| reserve.serve(layout(size, 512)));
        for (i, (&a, &n)) in blocks.iter().zip(&sizes).enumerate() {
            assert!(!a.is_null() && (a as usize).is_multiple_of(512));
            for &b in &blocks[i + 1..] {
                assert!(a as usize + n <= b as usize || b as usize >= a as usize + PIECE);
            }
        }
        // A gap is found again, and not by what does not fit it.
        assert!(reserve.take_back(blocks[1], layout(PIECE, 512)));
        assert_ne!(reserve.serve(layout(PIECE + 1, 8)), blocks[1]);
        assert_eq!(reserve.serve(layout(PIECE, 8)), blocks[1]);
        assert!(!reserve.take_back((&raw const sizes).cast_mut().cast(), layout(1, 1)));
        assert!(reserve.serve(layout(PIECE * PIECES + 1, 8)).is_null() && reserve.serve(layout(8, 1024)).is_null());
    }
}
