//! `libreplayssm`: state updates of Mamba-2, Gated DeltaNet and Kimi Delta Attention layers by replay.
//!
//! Replay keeps the recurrent state of a sequence as it was some tokens ago (the *checkpoint*) and the inputs of the
//! tokens since then in a small *ring*; outputs are computed from both, and the state is written only once per window.
//! Rolling back rejected draft tokens is not moving a position forward.
//!
//! The product is the C interface of [`ffi`], documented in `include/replayssm.h`. [`replay`] says what a step means in
//! safe Rust; [`backend`] does it.

#[cfg(not(target_pointer_width = "64"))]
compile_error!("replayssm needs 64-bit pointers: handles carry a generation in their upper half");

pub mod backend;
#[cfg(feature = "bench")]
pub mod bench;
pub mod dtype;
pub mod error;
pub mod ffi;
pub mod log;
pub mod memory;
mod panic;
pub mod replay;
