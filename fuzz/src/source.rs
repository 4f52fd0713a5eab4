//! An input's bytes as numbers. What is behind its end is zero, so that every input means something, and the shorter one the simpler.

use replayssm::ffi::replayssm_status;

pub struct Source<'a>(&'a [u8]);

impl<'a> Source<'a> {
    pub fn new(data: &'a [u8]) -> Self {
        Source(data)
    }

    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub fn byte(&mut self) -> u8 {
        let Some((first, rest)) = self.0.split_first() else { return 0 };
        self.0 = rest;
        *first
    }

    pub fn u16(&mut self) -> u16 {
        u16::from_le_bytes([self.byte(), self.byte()])
    }

    pub fn u64(&mut self) -> u64 {
        u64::from_le_bytes(std::array::from_fn(|_| self.byte()))
    }

    /// 0 .. n - 1, of a byte.
    pub fn below(&mut self, n: usize) -> usize {
        usize::from(self.byte()) % n.max(1)
    }

    /// One of these.
    pub fn of<T: Copy>(&mut self, values: &[T]) -> T {
        values[self.below(values.len())]
    }

    /// All that is left.
    pub fn rest(&mut self) -> &'a [u8] {
        std::mem::take(&mut self.0)
    }
}

/// A failing call has one of the header's numbers, which is not that of a defect, and a sentence.
pub fn refused(status: replayssm_status) {
    use replayssm::ffi::*;
    let known = [
        REPLAYSSM_ERROR_INVALID_ARGUMENT,
        REPLAYSSM_ERROR_INVALID_HANDLE,
        REPLAYSSM_ERROR_OUT_OF_RANGE,
        REPLAYSSM_ERROR_BUFFER_TOO_SMALL,
        REPLAYSSM_ERROR_WRONG_STREAM,
        REPLAYSSM_ERROR_UNSUPPORTED,
        REPLAYSSM_ERROR_NO_CUDA,
        REPLAYSSM_ERROR_OUT_OF_MEMORY,
        REPLAYSSM_ERROR_BAD_BLOB,
    ];
    let text = crate::common::message();
    assert!(known.contains(&status), "status {status}: {text}");
    assert!(!text.is_empty(), "status {status} without a sentence");
}
