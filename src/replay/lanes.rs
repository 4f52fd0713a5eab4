//! Blocks of 32 fp32 values, the unit of the update's arithmetic: what an instruction set has to offer.
//!
//! A block holds one value of each class of the canonical dot product, so that a row's product is one fused multiply-add
//! per block and one [`Lanes::sums`] at its end. Every implementation gives the same bytes.

use super::numerics::{CLASSES, canonical, from_bf16, join, reduce, split};

/// Values of a block.
pub const BLOCK: usize = CLASSES;

/// Work for an instruction set.
pub trait Task {
    /// What it returns.
    type Output;
    /// Does it.
    fn run<L: Lanes>(self, l: L) -> Self::Output;
}

/// An instruction set. A value of the type is the proof that the processor has it.
pub trait Lanes: Copy {
    /// A block in registers.
    type V: Copy;

    /// Runs a task as a function of its own, compiled for this instruction set.
    fn run<T: Task>(self, task: T) -> T::Output;

    /// All 32 values the same.
    fn splat(self, x: f32) -> Self::V;
    /// Begins to bring the cache line of an address near. Any address will do.
    fn prefetch(self, at: *const u8);
    /// From memory.
    fn load(self, from: &[f32; BLOCK]) -> Self::V;
    /// To memory.
    fn store(self, v: Self::V, to: &mut [f32; BLOCK]);
    /// `a b`.
    fn mul(self, a: Self::V, b: Self::V) -> Self::V;
    /// `a b + c`, rounded once.
    fn fma(self, a: Self::V, b: Self::V, c: Self::V) -> Self::V;
    /// `a` where `mask` has all bits set, else -0 where it has none: the addend that makes an fma either decay.
    fn or_minus_zero(self, a: Self::V, mask: Self::V) -> Self::V;
    /// NaNs get the canonical pattern.
    fn canonical(self, v: Self::V) -> Self::V;
    /// From bfloat16.
    fn load_bf16(self, from: &[u16; BLOCK]) -> Self::V;
    /// From planes.
    fn load_planes(self, high: &[u16; BLOCK], low: &[i16; BLOCK]) -> Self::V;
    /// To planes.
    fn store_planes(self, v: Self::V, high: &mut [u16; BLOCK], low: &mut [i16; BLOCK]);
    /// The values of the high plane.
    fn high(self, v: Self::V) -> Self::V;
    /// The canonical sums of four rows' classes: [`reduce`] of each.
    fn sums(self, classes: &[Self::V; 4]) -> [f32; 4];
}

/// Any processor. Slow: where the target has no fused multiply-add it is a library call for each value. Blocks are in memory,
/// and the operations out of line, since 32 registers are more than any such processor has.
#[derive(Debug, Clone, Copy)]
pub struct Portable;

#[allow(clippy::needless_range_loop, reason = "index loops over equal lengths are what the compiler vectorises")]
impl Lanes for Portable {
    type V = [f32; BLOCK];

    #[inline(never)]
    fn run<T: Task>(self, task: T) -> T::Output {
        task.run(self)
    }

    #[inline(always)]
    fn splat(self, x: f32) -> Self::V {
        [x; BLOCK]
    }

    #[inline(always)]
    fn prefetch(self, _at: *const u8) {}

    #[inline(always)]
    fn load(self, from: &[f32; BLOCK]) -> Self::V {
        *from
    }

    #[inline(always)]
    fn store(self, v: Self::V, to: &mut [f32; BLOCK]) {
        *to = v;
    }

    #[inline(never)]
    fn mul(self, mut a: Self::V, b: Self::V) -> Self::V {
        for i in 0..BLOCK {
            a[i] *= b[i];
        }
        a
    }

    #[inline(never)]
    fn fma(self, a: Self::V, b: Self::V, mut c: Self::V) -> Self::V {
        for i in 0..BLOCK {
            c[i] = a[i].mul_add(b[i], c[i]);
        }
        c
    }

    #[inline(never)]
    fn or_minus_zero(self, mut a: Self::V, mask: Self::V) -> Self::V {
        for i in 0..BLOCK {
            let mask = mask[i].to_bits();
            a[i] = f32::from_bits(a[i].to_bits() & mask | 0x8000_0000 & !mask);
        }
        a
    }

    #[inline(never)]
    fn canonical(self, mut v: Self::V) -> Self::V {
        for i in 0..BLOCK {
            v[i] = canonical(v[i]);
        }
        v
    }

    #[inline(never)]
    fn load_bf16(self, from: &[u16; BLOCK]) -> Self::V {
        let mut v = [0f32; BLOCK];
        for i in 0..BLOCK {
            v[i] = from_bf16(from[i]);
        }
        v
    }

    #[inline(never)]
    fn load_planes(self, high: &[u16; BLOCK], low: &[i16; BLOCK]) -> Self::V {
        let mut v = [0f32; BLOCK];
        for i in 0..BLOCK {
            v[i] = join(high[i], low[i]);
        }
        v
    }

    #[inline(never)]
    fn store_planes(self, v: Self::V, high: &mut [u16; BLOCK], low: &mut [i16; BLOCK]) {
        for i in 0..BLOCK {
            (high[i], low[i]) = split(v[i]);
        }
    }

    #[inline(never)]
    fn high(self, mut v: Self::V) -> Self::V {
        for i in 0..BLOCK {
            v[i] = from_bf16(split(v[i]).0);
        }
        v
    }

    #[inline(never)]
    fn sums(self, classes: &[Self::V; 4]) -> [f32; 4] {
        let [a, b, c, d] = classes;
        [reduce(a), reduce(b), reduce(c), reduce(d)]
    }
}
