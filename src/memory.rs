//! Host memory that may not be there.
//!
//! Whatever grows with a caller's numbers is allocated by [`collected`] and [`zeroed`], which say when that fails. What is small, as the objects
//! behind handles and the words of an error, is allocated as always in Rust, where a failure would end the process: there the library
//! has a reserve (`src/ffi/reserve.rs`). A call that needed it while it created something undoes that and fails ([`check`]), so that the
//! reserve is whole again when it returns.

use std::cell::Cell;

use crate::error::{Error, Result};

/// A vector of `n` items.
pub fn collected<T>(what: &'static str, n: usize, items: impl Iterator<Item = T>) -> Result<Vec<T>> {
    let mut list = room(what, n)?;
    list.extend(items.take(n));
    Ok(list)
}

/// The same of items that may not be had.
pub fn try_collected<T>(what: &'static str, n: usize, items: impl Iterator<Item = Result<T>>) -> Result<Vec<T>> {
    let mut list = room(what, n)?;
    for item in items.take(n) {
        list.push(item?);
    }
    Ok(list)
}

/// `n` bytes of zero.
pub fn zeroed(what: &'static str, n: usize) -> Result<Vec<u8>> {
    let mut list = room(what, n)?;
    list.resize(n, 0);
    Ok(list)
}

fn room<T>(what: &'static str, n: usize) -> Result<Vec<T>> {
    let mut list = Vec::new();
    let bytes = (n as u64).saturating_mul(size_of::<T>() as u64);
    list.try_reserve_exact(n).map_err(|_| Error::OutOfMemory { what: what.into(), bytes: Some(bytes) })?;
    Ok(list)
}

thread_local! {
    /// Whether the reserve has served this thread in the call that it is in. Without a destructor, it is there as long as the thread is.
    static SERVED: Cell<bool> = const { Cell::new(false) };
}

/// A call begins.
pub(crate) fn begin() {
    SERVED.set(false);
}

/// Refuses if what a call has made lies in the reserve.
pub(crate) fn check(what: &'static str) -> Result<()> {
    if SERVED.get() { Err(Error::OutOfMemory { what: what.into(), bytes: None }) } else { Ok(()) }
}

/// The reserve has served this thread.
#[cfg(any(test, not(debug_assertions)))]
pub(crate) fn note() {
    SERVED.set(true);
}
