//! How much stack a call needs: what the header says, whatever the family, format, readout, size and instruction set.

#![cfg(target_os = "linux")]
#![allow(clippy::multiple_unsafe_ops_per_block, reason = "a test's calls share one promise")]

mod common;

use std::ffi::c_void;
use std::ptr::null_mut;

use common::every_call::EveryCall;
use common::{FAMILIES, Spec};
use replayssm::backend::cpu::isa::Isa;
use replayssm::ffi::*;

/// What a caller's thread is told to have left for a call.
const DOCUMENTED: usize = 256 << 10;

const PAINT: u8 = 0xA5;

extern "C" fn run(calls: *mut c_void) -> *mut c_void {
    // SAFETY: the thread's argument, which its creator does not touch until it has ended.
    unsafe { &mut *calls.cast::<EveryCall>() }.run();
    null_mut()
}

extern "C" fn nothing(_: *mut c_void) -> *mut c_void {
    null_mut()
}

/// Bytes that a thread of `body` has written of its stack.
fn touched(body: extern "C" fn(*mut c_void) -> *mut c_void, argument: *mut c_void) -> usize {
    let mut stack = vec![[PAINT; 4096]; 1024];
    let size = size_of_val(stack.as_slice());
    // SAFETY: the stack is this function's, aligned or not; its thread has ended before it is read or freed.
    unsafe {
        let mut attributes = std::mem::zeroed();
        let mut thread = 0;
        assert_eq!(libc::pthread_attr_init(&mut attributes), 0);
        assert_eq!(libc::pthread_attr_setstack(&mut attributes, stack.as_mut_ptr().cast(), size), 0);
        assert_eq!(libc::pthread_create(&mut thread, &attributes, body, argument), 0);
        assert_eq!(libc::pthread_join(thread, null_mut()), 0);
    }
    let left = stack.as_flattened().iter().take_while(|&&byte| byte == PAINT).count();
    size - left
}

#[test]
fn a_call_needs_no_more_stack_than_the_header_says() {
    cpu_only!();
    let before = touched(nothing, null_mut());
    let mut most = 0;
    let formats = [
        (REPLAYSSM_FORMAT_SPLIT32, REPLAYSSM_READOUT_HIGH),
        (REPLAYSSM_FORMAT_F32, REPLAYSSM_READOUT_FULL),
        (REPLAYSSM_FORMAT_BF16, REPLAYSSM_READOUT_EXACT),
    ];
    for isa in Isa::available() {
        Isa::force(Some(isa));
        for family in FAMILIES {
            for (format, readout) in formats {
                let spec = Spec {
                    family,
                    format,
                    readout,
                    stochastic: format == REPLAYSSM_FORMAT_BF16,
                    heads: 2,
                    groups: 1,
                    headdim: 256,
                    dstate: 256,
                    window: 256,
                    t_max: 256,
                    keep: 256,
                    slots: 3,
                    ..Spec::default()
                };
                let mut calls = EveryCall::new(spec, 1, 300, &[256, 16, 1], 64, 32);
                let bytes = touched(run, (&raw mut calls).cast()) - before;
                println!("{isa:?}, family {family}, format {format}, readout {readout}: {bytes} bytes");
                most = most.max(bytes);
            }
        }
    }
    Isa::force(None);
    assert!(most <= DOCUMENTED, "{most} bytes");
}
