//! Keeps panics quiet where a caller must not see them printed.

use std::cell::Cell;
use std::panic::{set_hook, take_hook};
use std::sync::Once;

thread_local! {
    static QUIET: Cell<bool> = const { Cell::new(false) };
}

static HOOK: Once = Once::new();

/// While this lives, a panic of its thread prints nothing and reads no environment variable. Panics elsewhere go where they went
/// before.
pub(crate) struct Quiet {
    outer: bool,
}

impl Quiet {
    /// Begins. Must not be called by a thread that is panicking.
    pub(crate) fn begin() -> Self {
        HOOK.call_once(|| {
            let previous = take_hook();
            set_hook(Box::new(move |info| {
                if !QUIET.try_with(Cell::get).unwrap_or(true) {
                    previous(info);
                }
            }));
        });
        Quiet { outer: QUIET.try_with(|quiet| quiet.replace(true)).unwrap_or(true) }
    }
}

impl Drop for Quiet {
    fn drop(&mut self) {
        let _ = QUIET.try_with(|quiet| quiet.set(self.outer));
    }
}
