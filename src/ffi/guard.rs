//! What surrounds every exported function: panics become `REPLAYSSM_ERROR_INTERNAL`, errors become a status and a sentence.

use std::any::Any;
use std::cell::{Cell, RefCell};
use std::ffi::{CStr, CString, c_char};
use std::panic::{AssertUnwindSafe, catch_unwind};

use super::types::{REPLAYSSM_OK, replayssm_status};
use crate::error::{Error, Result};
use crate::panic::Quiet;

thread_local! {
    static LAST_ERROR: RefCell<CString> = RefCell::new(CString::default());
    static LAST_CUDA_ERROR: Cell<i32> = const { Cell::new(0) };
}

/// Runs the body of an exported function.
pub(super) fn guard(body: impl FnOnce() -> Result<()>) -> replayssm_status {
    // Unwind safety: handles hold objects whose invariants are kept by finishing checks before changes.
    let result = catch_unwind(AssertUnwindSafe(|| {
        let _quiet = Quiet::begin();
        body()
    }));
    match result.unwrap_or_else(|panic| Err(Error::Internal(text_of(&*panic)))) {
        Ok(()) => REPLAYSSM_OK,
        Err(error) => {
            if let Error::Cuda { code, .. } | Error::DeviceLost { code, .. } = &error {
                let _ = LAST_CUDA_ERROR.try_with(|last| last.set(*code));
            }
            let text = error.to_string().replace('\0', "?");
            // A thread that is being torn down keeps no text.
            let _ = LAST_ERROR.try_with(|last| *last.borrow_mut() = CString::new(text).unwrap_or_default());
            error.status() as replayssm_status
        }
    }
}

fn text_of(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().map(|s| (*s).to_owned());
    text.or_else(|| panic.downcast_ref::<String>().cloned()).unwrap_or_else(|| "a panic without a message".to_owned())
}

/// The driver's status behind this thread's last CUDA error; 0 if there was none.
pub(super) fn last_cuda_error() -> i32 {
    LAST_CUDA_ERROR.try_with(Cell::get).unwrap_or(0)
}

/// The sentence of this thread's last error; empty if there was none.
pub(super) fn last_error() -> *const c_char {
    LAST_ERROR
        .try_with(|last| last.borrow().as_ptr())
        // A thread that is being torn down has no text left.
        .unwrap_or(CStr::as_ptr(c""))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ffi::types::REPLAYSSM_ERROR_INTERNAL;

    #[test]
    fn a_panic_becomes_internal_with_its_text() {
        assert_eq!(guard(|| panic!("number {}", 7)), REPLAYSSM_ERROR_INTERNAL);
        // SAFETY: the pointer is to this thread's text, which lives until the next error.
        let text = unsafe { CStr::from_ptr(last_error()) };
        assert_eq!(text.to_str(), Ok("internal error: number 7"));
        assert_eq!(guard(|| Ok(())), REPLAYSSM_OK);
    }
}
