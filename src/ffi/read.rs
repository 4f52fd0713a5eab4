//! Reads descriptors of any version: size first, the known part, and nothing but zeros behind it.

use std::borrow::Cow;
use std::ffi::{c_char, c_void};

use crate::error::{Error, Result};

/// A descriptor: plain data that starts with `uint32_t struct_size`, for which all zero bytes are a value.
///
/// # Safety
/// `repr(C)`, no padding, valid for every bit pattern, first field `struct_size: u32`.
pub(super) unsafe trait Descriptor: Copy {
    /// Its C name, for messages.
    const NAME: &'static str;
    /// Its size in the first version that had it.
    const FIRST_SIZE: usize = size_of::<Self>();
}

/// No descriptor is larger; a larger size is a mistake, not a newer header.
const LARGEST: usize = 1 << 16;

/// Copies a descriptor that the caller compiled, of this version or another.
///
/// # Safety
/// `from` is NULL or points to a descriptor of `struct_size` readable bytes.
pub(super) unsafe fn descriptor<T: Descriptor>(from: *const T) -> Result<T> {
    // SAFETY: the caller promises as much.
    let size = unsafe { checked_size(from) }?;
    let known = size.min(size_of::<T>());
    let mut value = std::mem::MaybeUninit::<T>::zeroed();
    // SAFETY: both sides have `known` bytes.
    unsafe { std::ptr::copy_nonoverlapping(from.cast::<u8>(), value.as_mut_ptr().cast::<u8>(), known) };
    for offset in known..size {
        // SAFETY: the caller's descriptor has `size` bytes.
        if unsafe { from.cast::<u8>().wrapping_add(offset).read() } != 0 {
            return Err(Error::unsupported(
                format!("the byte at offset {offset} of {}", T::NAME),
                "not 0",
                format!("the {} bytes it knows", size_of::<T>()),
            ));
        }
    }
    // SAFETY: zeroed and filled; every bit pattern is a T.
    Ok(unsafe { value.assume_init() })
}

/// As [`descriptor`], NULL being all defaults.
///
/// # Safety
/// As [`descriptor`].
pub(super) unsafe fn optional<T: Descriptor>(from: *const T) -> Result<T> {
    if from.is_null() {
        // SAFETY: all zero bytes are a T.
        return Ok(unsafe { std::mem::zeroed() });
    }
    // SAFETY: the caller promises as much.
    unsafe { descriptor(from) }
}

/// # Safety
/// As [`descriptor`].
unsafe fn checked_size<T: Descriptor>(from: *const T) -> Result<usize> {
    if from.is_null() {
        return Err(Error::invalid(T::NAME, "NULL", "a descriptor"));
    }
    if !(from as usize).is_multiple_of(align_of::<T>()) {
        return Err(Error::invalid(
            T::NAME,
            format!("{from:p}"),
            format!("an address aligned to {} bytes", align_of::<T>()),
        ));
    }
    // SAFETY: a descriptor begins with its size.
    let size = unsafe { from.cast::<u32>().read() } as usize;
    if size < T::FIRST_SIZE || size > LARGEST || !size.is_multiple_of(4) {
        return Err(Error::invalid(
            format!("{}.struct_size", T::NAME),
            size,
            format!("sizeof({}), which is {} here", T::NAME, size_of::<T>()),
        ));
    }
    Ok(size)
}

/// Writes an out-descriptor: the part that both sides know, zeros behind it, the caller's size kept.
///
/// # Safety
/// `to` is NULL or points to a descriptor of `struct_size` writable bytes.
pub(super) unsafe fn write_descriptor<T: Descriptor>(to: *mut T, value: &T) -> Result<()> {
    // SAFETY: the caller promises as much.
    let size = unsafe { checked_size(to) }?;
    let known = size.min(size_of::<T>());
    let first = size_of::<u32>();
    let source = std::ptr::from_ref(value).cast::<u8>();
    let target = to.cast::<u8>();
    // SAFETY: behind the size, both sides have `known` bytes.
    unsafe { std::ptr::copy_nonoverlapping(source.wrapping_add(first), target.wrapping_add(first), known - first) };
    // SAFETY: the caller's descriptor has `size` bytes.
    unsafe { std::ptr::write_bytes(target.wrapping_add(known), 0, size - known) };
    Ok(())
}

/// Checks an out-descriptor without writing it.
///
/// # Safety
/// As [`write_descriptor`].
pub(super) unsafe fn check_out<T: Descriptor>(to: *const T) -> Result<()> {
    // SAFETY: the caller promises as much.
    unsafe { checked_size(to) }.map(|_| ())
}

/// A pointer that must not be NULL and must be aligned to `alignment`.
pub(super) fn required(
    pointer: *const c_void,
    field: impl Into<Cow<'static, str>> + Clone,
    alignment: usize,
) -> Result<usize> {
    optional_pointer(pointer, field.clone(), alignment)?.ok_or_else(|| Error::invalid(field, "NULL", "a pointer"))
}

/// A pointer that may be NULL.
pub(super) fn optional_pointer(
    pointer: *const c_void,
    field: impl Into<Cow<'static, str>>,
    alignment: usize,
) -> Result<Option<usize>> {
    let at = pointer as usize;
    if !at.is_multiple_of(alignment) {
        return Err(Error::invalid(field, format!("{at:#x}"), format!("an address aligned to {alignment} bytes")));
    }
    Ok((at != 0).then_some(at))
}

/// Writes an out-parameter.
///
/// # Safety
/// `to` is valid for a write of a `T`.
pub(super) unsafe fn write_out<T>(to: *mut T, value: T) {
    // SAFETY: the caller promises validity.
    unsafe { to.write_unaligned(value) }
}

/// Writes as much of a text as fits, with a final zero.
///
/// # Safety
/// `to` is valid for writes of `capacity` bytes.
pub(super) unsafe fn write_text(to: *mut c_char, capacity: usize, text: &str) -> Result<()> {
    if let Some(room) = capacity.checked_sub(1) {
        let n = text.len().min(room);
        // SAFETY: n is below the capacity, and the caller promises that many bytes.
        unsafe { std::ptr::copy_nonoverlapping(text.as_ptr().cast::<c_char>(), to, n) };
        // SAFETY: as above.
        unsafe { to.wrapping_add(n).write(0) };
    }
    let needed = text.len() + 1;
    if capacity < needed {
        return Err(Error::BufferTooSmall { field: "capacity".into(), value: capacity as u64, needed: needed as u64 });
    }
    Ok(())
}

/// `n` bytes that the caller lends for the call to be written, zero at first.
///
/// # Safety
/// `to` is NULL, or valid for writes of `n` bytes for the call, and nothing else uses them meanwhile.
pub(super) unsafe fn bytes_mut<'a>(to: *mut u8, n: usize, field: &'static str) -> Result<&'a mut [u8]> {
    required(to.cast_const().cast(), field, 1)?;
    // SAFETY: not NULL, and valid for n bytes by the caller's promise.
    unsafe { to.write_bytes(0, n) };
    // SAFETY: as above, and written just now.
    Ok(unsafe { std::slice::from_raw_parts_mut(to, n) })
}

/// `n` elements that the caller lends for the call.
///
/// # Safety
/// `from` is NULL, or valid for reads of `n` elements for the call.
pub(super) unsafe fn array<'a, T>(from: *const T, n: usize, field: &'static str) -> Result<&'a [T]> {
    if n == 0 {
        return Ok(&[]);
    }
    required(from.cast(), field, align_of::<T>())?;
    // SAFETY: not NULL, aligned, and valid for n elements by the caller's promise.
    Ok(unsafe { std::slice::from_raw_parts(from, n) })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A descriptor that has grown by `later` since its first version.
    #[repr(C)]
    #[derive(Clone, Copy, Debug, PartialEq)]
    struct Grown {
        struct_size: u32,
        first: u32,
        later: u64,
    }

    // SAFETY: repr(C), integers without padding, the first field struct_size.
    unsafe impl Descriptor for Grown {
        const NAME: &'static str = "grown";
        const FIRST_SIZE: usize = std::mem::offset_of!(Grown, later);
    }

    #[test]
    fn a_descriptor_of_an_older_header_has_defaults_where_it_ends_and_is_not_written_behind_its_end() {
        const GARBAGE: u64 = 0x5A5A_5A5A_5A5A_5A5A;
        for (size, wanted) in
            [(8, Some(0)), (12, Some(0x5A5A_5A5A)), (16, Some(GARBAGE)), (4, None), (6, None), (0, None)]
        {
            let mut caller = Grown { struct_size: size, first: 7, later: GARBAGE };
            // SAFETY: a local with at least as many bytes as it says.
            let found = unsafe { descriptor(&raw const caller) };
            match wanted {
                Some(later) => assert_eq!(found.expect("accepted"), Grown { struct_size: size, first: 7, later }),
                None => assert!(found.expect_err("refused").to_string().starts_with("grown.struct_size is ")),
            }
            // SAFETY: as above.
            let written = unsafe { write_descriptor(&raw mut caller, &Grown { struct_size: 16, first: 8, later: 9 }) };
            assert_eq!(written.is_ok(), wanted.is_some());
            let later = match size {
                16 => 9,
                12 => GARBAGE >> 32 << 32 | 9,
                _ => GARBAGE,
            };
            let first = if wanted.is_some() { 8 } else { 7 };
            assert_eq!(caller, Grown { struct_size: size, first, later }, "size {size}");
        }
    }
}
