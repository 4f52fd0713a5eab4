//! What surrounds every exported function: panics become `REPLAYSSM_ERROR_INTERNAL`, errors become a status and a sentence.

use std::any::Any;
use std::cell::{Cell, UnsafeCell};
use std::ffi::c_char;
use std::fmt::{self, Write};
use std::panic::{AssertUnwindSafe, catch_unwind};

use super::types::{REPLAYSSM_OK, replayssm_status};
use crate::backend::cpu::isa::FloatControl;
use crate::error::{Error, Result};
use crate::memory;
use crate::panic::Quiet;

/// A sentence with a zero behind it, in the thread's own memory: nothing is allocated for it, and nothing of it ends before the thread.
struct Sentence {
    text: UnsafeCell<[u8; 2048]>,
    length: Cell<usize>,
}

impl Write for &Sentence {
    /// What does not fit is left out.
    fn write_str(&mut self, part: &str) -> fmt::Result {
        // SAFETY: of this thread alone, which is in no other call of this function.
        let text = unsafe { &mut *self.text.get() };
        let room = text.len().saturating_sub(1);
        for byte in part.bytes() {
            // A zero would end it.
            let byte = if byte == 0 { b'?' } else { byte };
            if let Some(to) = text.get_mut(self.length.get()).filter(|_| self.length.get() < room) {
                *to = byte;
                self.length.set(self.length.get() + 1);
            }
        }
        if let Some(end) = text.get_mut(self.length.get()) {
            *end = 0;
        }
        Ok(())
    }
}

// Without destructors, they are there as long as the thread is.
thread_local! {
    static LAST_ERROR: Sentence = const { Sentence { text: UnsafeCell::new([0; 2048]), length: Cell::new(0) } };
    static LAST_CUDA_ERROR: Cell<i32> = const { Cell::new(0) };
}

/// Runs the body of an exported function.
pub(super) fn guard(body: impl FnOnce() -> Result<()>) -> replayssm_status {
    // Not the work alone: what is computed for it, as a scale or a plan, must not depend on the caller's rounding, nor trap.
    let _control = FloatControl::set();
    // Unwind safety: handles hold objects whose invariants are kept by finishing checks before changes.
    let result = catch_unwind(AssertUnwindSafe(|| {
        let _quiet = Quiet::begin();
        memory::begin();
        body()
    }));
    match result.unwrap_or_else(|panic| Err(Error::Internal(text_of(&*panic)))) {
        Ok(()) => REPLAYSSM_OK,
        Err(error) => {
            if let Error::Cuda { code, .. } | Error::DeviceLost { code, .. } = &error {
                LAST_CUDA_ERROR.set(*code);
            }
            LAST_ERROR.with(|mut last| {
                last.length.set(0);
                // Writing cannot fail.
                let _ = write!(last, "{error}");
            });
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
    LAST_CUDA_ERROR.get()
}

/// The sentence of this thread's last error; empty if there was none.
pub(super) fn last_error() -> *const c_char {
    LAST_ERROR.with(|last| last.text.get().cast_const().cast())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ffi::types::REPLAYSSM_ERROR_INTERNAL;

    #[test]
    fn a_panic_becomes_internal_with_its_text() {
        assert_eq!(guard(|| panic!("number {}", 7)), REPLAYSSM_ERROR_INTERNAL);
        // SAFETY: the pointer is to this thread's text, which lives until the next error.
        let text = unsafe { std::ffi::CStr::from_ptr(last_error()) };
        assert_eq!(text.to_str(), Ok("internal error: number 7"));
        assert_eq!(guard(|| Ok(())), REPLAYSSM_OK);
    }

    #[test]
    fn a_long_sentence_is_cut_off_and_a_zero_does_not_end_one() {
        let said = |text: String| {
            assert_eq!(guard(|| Err(Error::Internal(text))), REPLAYSSM_ERROR_INTERNAL);
            // SAFETY: as above.
            unsafe { std::ffi::CStr::from_ptr(last_error()) }.to_bytes().to_vec()
        };
        assert_eq!(said("a\0b".into()), b"internal error: a?b");
        let long = said("x".repeat(5000));
        assert!(long.len() == 2047 && long.ends_with(b"xxx"));
        assert_eq!(said("short".into()), b"internal error: short");
    }
}
