//! Memory of exactly the bytes that a descriptor claims, so that a sanitizer sees every byte beside them.

use std::alloc::{Layout, alloc, dealloc, handle_alloc_error};

use replayssm::ffi::{REPLAYSSM_DTYPE_BF16, REPLAYSSM_DTYPE_F16, REPLAYSSM_DTYPE_I64};

use crate::common::Rng;

/// A call that claims more is not made: its addresses could not be kept valid.
pub const LIMIT: i128 = 1 << 18;

/// A claim that is neither small enough to be kept nor too large for any address space.
pub struct TooLarge;

/// What a call may do with a block.
enum Use {
    /// Read it. What it was.
    Read(Vec<u8>),
    /// Write it if the call is accepted, and then these bytes alone.
    Written(Option<Vec<bool>>),
    /// Write it if the call is accepted; what it was.
    Changed(Vec<u8>),
    /// Write it even if the call is refused.
    Undefined,
}

const FRESH: u8 = 0xC5;

pub struct Block {
    at: *mut u8,
    layout: Layout,
    usage: Use,
}

impl Block {
    /// A block at an address aligned to 64 bytes, so that what is written does not depend on where the heap has put it.
    fn new(bytes: usize, usage: Use) -> Self {
        let layout = Layout::from_size_align(bytes.max(1), 64).expect("a small block");
        // SAFETY: the size is not zero.
        let at = unsafe { alloc(layout) };
        if at.is_null() {
            handle_alloc_error(layout);
        }
        // SAFETY: as many bytes were allocated.
        unsafe { at.write_bytes(FRESH, layout.size()) };
        Block { at, layout, usage }
    }

    fn bytes(&self) -> &[u8] {
        // SAFETY: written when it was allocated, and nobody writes while this is looked at.
        unsafe { std::slice::from_raw_parts(self.at, self.layout.size()) }
    }

    fn write(&mut self, from: usize, bytes: &[u8]) {
        assert!(from + bytes.len() <= self.layout.size());
        // SAFETY: inside the block.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), self.at.add(from), bytes.len()) };
    }
}

impl Drop for Block {
    fn drop(&mut self) {
        // SAFETY: allocated with this layout.
        unsafe { dealloc(self.at, self.layout) };
    }
}

/// All that one call is given. It stays until the call is judged.
#[derive(Default)]
pub struct Arena {
    blocks: Vec<Block>,
}

impl Arena {
    /// Memory with these bytes behind `shift` others, which the call may only read; the address is aligned to 64 bytes and `shift` further on.
    pub fn input(&mut self, bytes: &[u8], shift: usize) -> *mut u8 {
        let mut block = Block::new(shift + bytes.len(), Use::Undefined);
        block.write(shift, bytes);
        block.usage = Use::Read(block.bytes().to_vec());
        self.keep(block, shift)
    }

    /// Memory that the call may write if it is accepted.
    pub fn output(&mut self, bytes: usize, shift: usize) -> *mut u8 {
        self.keep(Block::new(shift + bytes, Use::Written(None)), shift)
    }

    /// The same with something in it.
    pub fn both(&mut self, bytes: &[u8], shift: usize) -> *mut u8 {
        let mut block = Block::new(shift + bytes.len(), Use::Undefined);
        block.write(shift, bytes);
        block.usage = Use::Changed(block.bytes().to_vec());
        self.keep(block, shift)
    }

    /// Memory that the call may write in any case.
    pub fn undefined(&mut self, bytes: usize) -> *mut u8 {
        self.keep(Block::new(bytes, Use::Undefined), 0)
    }

    fn keep(&mut self, block: Block, shift: usize) -> *mut u8 {
        let at = block.at.wrapping_add(shift);
        self.blocks.push(block);
        at
    }

    /// The last block, for longer than the call.
    pub fn take_last(&mut self) -> Option<Block> {
        self.blocks.pop()
    }

    /// Of the last output, the call may write these parts (offset, bytes) alone.
    pub fn only(&mut self, parts: impl Iterator<Item = (usize, usize)>) {
        let Some(block) = self.blocks.last_mut() else { return };
        let mut may = vec![false; block.layout.size()];
        parts.for_each(|(at, n)| may[at..at + n].fill(true));
        block.usage = Use::Written(Some(may));
    }

    /// Nothing that was only to be read has changed, nor what lies between the elements of an output; and no output at all if the call was
    /// refused.
    pub fn check(&self, accepted: bool) {
        for block in &self.blocks {
            let now = block.bytes();
            match &block.usage {
                Use::Read(before) => assert!(before == now, "an input was written"),
                Use::Written(_) if !accepted => assert!(now.iter().all(|&b| b == FRESH), "a refused call wrote"),
                Use::Written(Some(may)) => {
                    let wrong = may.iter().zip(now).position(|(&may, &byte)| !may && byte != FRESH);
                    assert_eq!(wrong, None, "written between the elements of an output");
                }
                Use::Changed(before) if !accepted => assert!(before == now, "a refused call wrote"),
                Use::Written(None) | Use::Changed(_) | Use::Undefined => {}
            }
        }
    }
}

/// Bytes of an element of a tensor, or of an id; of a dtype that is none, 4.
pub fn size_of_dtype(dtype: i32) -> usize {
    match dtype {
        REPLAYSSM_DTYPE_BF16 | REPLAYSSM_DTYPE_F16 => 2,
        REPLAYSSM_DTYPE_I64 => 8,
        _ => 4,
    }
}

/// `n` values of a dtype: ordinary ones, or any bits.
pub fn values(rng: &mut Rng, dtype: i32, n: usize, any: bool) -> Vec<u8> {
    let size = size_of_dtype(dtype);
    let mut bytes = Vec::with_capacity(n * size);
    for _ in 0..n {
        let bits = match (any, dtype) {
            (true, _) => rng.next() as u32,
            (_, REPLAYSSM_DTYPE_BF16 | REPLAYSSM_DTYPE_F16) => crate::common::encode(dtype, rng.unit() - 0.5),
            _ => ((rng.unit() - 0.5) as f32).to_bits(),
        };
        bytes.extend_from_slice(&bits.to_le_bytes()[..size.min(4)]);
    }
    bytes.resize(n * size, 0);
    bytes
}
