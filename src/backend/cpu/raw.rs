//! Typed access to addresses: the CPU backend's only way from an [`Address`] to memory.
//!
//! Three parties uphold what these functions need. The host side has checked alignment, dtype and reach of every
//! caller tensor against the batch's extents. `replay::layout` is the one source of offsets into a pool's memory, which
//! is at least as large as it says. The caller of the C interface promises that its pointers are valid for what their
//! descriptors say, and that no other thread writes what a call reads (header, "Threads").

use std::sync::atomic::{AtomicI64, AtomicU32, AtomicU64};

use half::f16;
use half::slice::{HalfBitsSliceExt, HalfFloatSliceExt};

use crate::dtype::{Dtype, IndexType};
use crate::replay::launch::{Address, Cursor, Ids};
use crate::replay::numerics::to_f16;
use crate::replay::vector;

/// Types for which every bit pattern is a value.
pub(in crate::backend) trait Plain: Copy {}
impl Plain for f32 {}
impl Plain for u8 {}
impl Plain for u16 {}
impl Plain for i16 {}
impl Plain for u32 {}
impl Plain for i32 {}
impl Plain for u64 {}
impl Plain for i64 {}

/// `n` elements at an address.
///
/// # Safety
/// The address is aligned for `T` and valid for reads of `n` elements for `'a`, and nothing writes them meanwhile.
#[inline(always)]
pub(super) unsafe fn slice<'a, T: Plain>(at: Address, n: usize) -> &'a [T] {
    debug_assert!(at.0 != 0 && at.0.is_multiple_of(align_of::<T>()));
    // SAFETY: the caller promises alignment, validity and quiet for 'a; every bit pattern is a T.
    unsafe { std::slice::from_raw_parts(at.0 as *const T, n) }
}

/// `n` elements at an address, to be written.
///
/// # Safety
/// As [`slice`], valid for writes, and nothing else reads or writes them for `'a`.
#[inline(always)]
pub(super) unsafe fn slice_mut<'a, T: Plain>(at: Address, n: usize) -> &'a mut [T] {
    debug_assert!(at.0 != 0 && at.0.is_multiple_of(align_of::<T>()));
    // SAFETY: the caller promises alignment, validity and sole access for 'a; every bit pattern is a T.
    unsafe { std::slice::from_raw_parts_mut(at.0 as *mut T, n) }
}

/// One element, at any alignment.
///
/// # Safety
/// The address is valid for a read of a `T`.
#[inline(always)]
pub(in crate::backend) unsafe fn read<T: Plain>(at: Address) -> T {
    // SAFETY: the caller promises validity; every bit pattern is a T.
    unsafe { (at.0 as *const T).read_unaligned() }
}

/// Writes one element, at any alignment.
///
/// # Safety
/// The address is valid for a write of a `T`.
#[inline(always)]
pub(super) unsafe fn write<T: Plain>(at: Address, value: T) {
    // SAFETY: the caller promises validity.
    unsafe { (at.0 as *mut T).write_unaligned(value) }
}

/// An id of an index array.
///
/// # Safety
/// Element `i` of the array is valid for reads.
#[inline(always)]
pub(in crate::backend) unsafe fn id(ids: &Ids, i: i64) -> i64 {
    let at = ids.data.offset(i * ids.stride * ids.index.size() as i64);
    match ids.index {
        // SAFETY: the caller promises that the element is valid.
        IndexType::I32 => i64::from(unsafe { read::<i32>(at) }),
        // SAFETY: the caller promises that the element is valid.
        IndexType::I64 => unsafe { read::<i64>(at) },
    }
}

/// Reads `out.len()` elements of any float dtype as fp32.
///
/// # Safety
/// As [`slice`] for `out.len()` elements of `dtype`.
#[inline(always)]
pub(super) unsafe fn load(at: Address, dtype: Dtype, out: &mut [f32]) {
    let n = out.len();
    match dtype {
        Dtype::F32 => {
            // SAFETY: the caller's promise is that of `slice`.
            out.copy_from_slice(unsafe { slice::<f32>(at, n) });
        }
        Dtype::Bf16 => {
            // SAFETY: the caller's promise is that of `slice`.
            vector::load_bf16(out, unsafe { slice::<u16>(at, n) });
        }
        Dtype::F16 => {
            // SAFETY: the caller's promise is that of `slice`.
            let source: &[f16] = unsafe { slice::<u16>(at, n) }.reinterpret_cast();
            source.convert_to_f32_slice(out);
        }
    }
}

/// One element of any float dtype as fp32.
///
/// # Safety
/// As [`slice`] for one element of `dtype`.
#[inline(always)]
pub(super) unsafe fn load_one(at: Address, dtype: Dtype) -> f32 {
    let mut out = [0f32];
    // SAFETY: the caller's promise is that of `load`.
    unsafe { load(at, dtype, &mut out) };
    let [value] = out;
    value
}

/// Writes fp32 values as any float dtype, rounded to nearest even, NaNs canonical.
///
/// # Safety
/// As [`slice_mut`] for `values.len()` elements of `dtype`.
#[inline(always)]
pub(super) unsafe fn store(at: Address, dtype: Dtype, values: &[f32]) {
    let n = values.len();
    match dtype {
        Dtype::F32 => {
            // SAFETY: the caller's promise is that of `slice_mut`.
            vector::store_f32(unsafe { slice_mut::<f32>(at, n) }, values);
        }
        Dtype::Bf16 => {
            // SAFETY: the caller's promise is that of `slice_mut`.
            vector::store_bf16(unsafe { slice_mut::<u16>(at, n) }, values);
        }
        Dtype::F16 => {
            // SAFETY: the caller's promise is that of `slice_mut`.
            let target = unsafe { slice_mut::<u16>(at, n) };
            for (t, &v) in target.iter_mut().zip(values) {
                *t = to_f16(v);
            }
        }
    }
}

/// Copies bytes between places that do not overlap.
///
/// # Safety
/// Both places are valid for `bytes` and do not overlap.
#[inline(always)]
pub(super) unsafe fn copy(from: Address, to: Address, bytes: usize) {
    // SAFETY: the caller promises validity and no overlap.
    unsafe { std::ptr::copy_nonoverlapping(from.0 as *const u8, to.0 as *mut u8, bytes) }
}

/// Writes zero bytes.
///
/// # Safety
/// The place is valid for writes of `bytes`.
#[inline(always)]
pub(super) unsafe fn zero(at: Address, bytes: usize) {
    // SAFETY: the caller promises validity.
    unsafe { std::ptr::write_bytes(at.0 as *mut u8, 0, bytes) }
}

/// A ring's state in memory. Fields are atomics because steps of several threads read what a commit writes; the order
/// between them is the caller's ("Threads"), so all accesses are relaxed.
#[repr(C)]
pub(super) struct SharedCursor {
    pub(super) position: AtomicI64,
    pub(super) flush_before: AtomicI64,
    pub(super) seed: AtomicU64,
    pub(super) generation: AtomicU32,
    pub(super) committed: AtomicU32,
}

const _: () = {
    use std::mem::offset_of;
    assert!(size_of::<SharedCursor>() == size_of::<Cursor>());
    assert!(offset_of!(SharedCursor, position) == offset_of!(Cursor, position));
    assert!(offset_of!(SharedCursor, flush_before) == offset_of!(Cursor, flush_before));
    assert!(offset_of!(SharedCursor, seed) == offset_of!(Cursor, seed));
    assert!(offset_of!(SharedCursor, generation) == offset_of!(Cursor, generation));
    assert!(offset_of!(SharedCursor, committed) == offset_of!(Cursor, committed));
};

/// The state of ring `ring`.
///
/// # Safety
/// `cursors` is the cursor memory of a slots handle that outlives `'a`, and `ring` is below its ring count.
#[inline(always)]
pub(super) unsafe fn cursor<'a>(cursors: Address, ring: i64) -> &'a SharedCursor {
    let at = cursors.offset(ring * size_of::<SharedCursor>() as i64);
    // SAFETY: the memory is aligned to a cache line, zeroed at create, and only accessed as SharedCursor.
    unsafe { &*(at.0 as *const SharedCursor) }
}

/// A tag in memory; atomic for the same reason as [`SharedCursor`].
///
/// # Safety
/// The address is that of a tag in a pool's memory, which outlives `'a`.
#[inline(always)]
pub(super) unsafe fn tag<'a>(at: Address) -> &'a AtomicI64 {
    // SAFETY: tags are 8-byte aligned (layout and lent strides). Calls access them as atomics, but for blobs, which move a slot's memory as
    // bytes: the caller keeps those apart from calls on the slot ("Threads").
    unsafe { &*(at.0 as *const AtomicI64) }
}
