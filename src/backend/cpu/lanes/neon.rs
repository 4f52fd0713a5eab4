//! NEON: a block is eight registers.

use std::arch::aarch64::*;

use crate::replay::lanes::{BLOCK, Lanes, Task};

/// NEON, which every aarch64 target of the standard library has.
#[derive(Clone, Copy)]
pub(in super::super) struct Neon;

/// A block made register by register: the body's value for each index.
macro_rules! each8 {
    ($i:ident => $($body:tt)*) => {
        // SAFETY: the target has NEON; addresses are those of whole arrays.
        unsafe { [
            { const $i: usize = 0; $($body)* },
            { const $i: usize = 1; $($body)* },
            { const $i: usize = 2; $($body)* },
            { const $i: usize = 3; $($body)* },
            { const $i: usize = 4; $($body)* },
            { const $i: usize = 5; $($body)* },
            { const $i: usize = 6; $($body)* },
            { const $i: usize = 7; $($body)* },
        ] }
    };
}

#[allow(clippy::multiple_unsafe_ops_per_block, reason = "intrinsics share one promise")]
impl Lanes for Neon {
    type V = [float32x4_t; 8];

    #[inline(never)]
    fn run<T: Task>(self, task: T) -> T::Output {
        task.run(self)
    }

    #[inline(always)]
    fn splat(self, x: f32) -> Self::V {
        // SAFETY: the target has NEON.
        [unsafe { vdupq_n_f32(x) }; 8]
    }

    #[inline(always)]
    fn prefetch(self, _at: *const u8) {}

    #[inline(always)]
    fn load(self, from: &[f32; BLOCK]) -> Self::V {
        each8! { I => vld1q_f32(from.as_ptr().add(4 * I)) }
    }

    #[inline(always)]
    fn store(self, v: Self::V, to: &mut [f32; BLOCK]) {
        each8! { I => vst1q_f32(to.as_mut_ptr().add(4 * I), v[I]) };
    }

    #[inline(always)]
    fn mul(self, a: Self::V, b: Self::V) -> Self::V {
        each8! { I => vmulq_f32(a[I], b[I]) }
    }

    #[inline(always)]
    fn fma(self, a: Self::V, b: Self::V, c: Self::V) -> Self::V {
        each8! { I => vfmaq_f32(c[I], a[I], b[I]) }
    }

    #[inline(always)]
    fn or_minus_zero(self, a: Self::V, mask: Self::V) -> Self::V {
        each8! { I => vbslq_f32(vreinterpretq_u32_f32(mask[I]), a[I], vdupq_n_f32(-0.0)) }
    }

    #[inline(always)]
    fn canonical(self, v: Self::V) -> Self::V {
        each8! { I =>
            let nan = vdupq_n_f32(f32::from_bits(crate::replay::numerics::CANONICAL_NAN));
            vbslq_f32(vceqq_f32(v[I], v[I]), v[I], nan)
        }
    }

    #[inline(always)]
    fn load_bf16(self, from: &[u16; BLOCK]) -> Self::V {
        each8! { I => vreinterpretq_f32_u32(vshll_n_u16::<16>(vld1_u16(from.as_ptr().add(4 * I)))) }
    }

    #[inline(always)]
    fn load_planes(self, high: &[u16; BLOCK], low: &[i16; BLOCK]) -> Self::V {
        let high = self.load_bf16(high);
        each8! { I =>
            let low = vreinterpretq_u32_s32(vmovl_s16(vld1_s16(low.as_ptr().add(4 * I))));
            vreinterpretq_f32_u32(vaddq_u32(vreinterpretq_u32_f32(high[I]), low))
        }
    }

    #[inline(always)]
    fn store_planes(self, v: Self::V, high: &mut [u16; BLOCK], low: &mut [i16; BLOCK]) {
        each8! { I =>
            let bits = vreinterpretq_u32_f32(v[I]);
            vst1_u16(high.as_mut_ptr().add(4 * I), vshrn_n_u32::<16>(vaddq_u32(bits, vdupq_n_u32(0x8000))));
            // The low plane is the low half of the bits, whatever the high one is.
            vst1_s16(low.as_mut_ptr().add(4 * I), vreinterpret_s16_u16(vmovn_u32(bits)));
        };
    }

    #[inline(always)]
    fn high(self, v: Self::V) -> Self::V {
        each8! { I =>
            let rounded = vaddq_u32(vreinterpretq_u32_f32(v[I]), vdupq_n_u32(0x8000));
            vreinterpretq_f32_u32(vandq_u32(rounded, vdupq_n_u32(0xFFFF_0000)))
        }
    }

    #[inline(always)]
    fn sums(self, classes: &[Self::V; 4]) -> [f32; 4] {
        // xor 4: registers 2k and 2k + 1 of a row, classes 8k to 8k + 7.
        let pairs = |row: &Self::V| {
            let [r0, r1, r2, r3, r4, r5, r6, r7] = *row;
            // SAFETY: the target has NEON.
            unsafe { [vaddq_f32(r0, r1), vaddq_f32(r2, r3), vaddq_f32(r4, r5), vaddq_f32(r6, r7)] }
        };
        // xor 2 and 1, four rows at a time.
        let sum = |a, b, c, d| {
            // SAFETY: the target has NEON.
            unsafe {
                let ab = vaddq_f32(vzip1q_f32(a, b), vzip2q_f32(a, b));
                let cd = vaddq_f32(vzip1q_f32(c, d), vzip2q_f32(c, d));
                let (ab, cd) = (vreinterpretq_f64_f32(ab), vreinterpretq_f64_f32(cd));
                let (even, odd) = (vzip1q_f64(ab, cd), vzip2q_f64(ab, cd));
                vaddq_f32(vreinterpretq_f32_f64(even), vreinterpretq_f32_f64(odd))
            }
        };
        let [a, b, c, d] = classes;
        let ([a0, a1, a2, a3], [b0, b1, b2, b3]) = (pairs(a), pairs(b));
        let ([c0, c1, c2, c3], [d0, d1, d2, d3]) = (pairs(c), pairs(d));
        let mut out = [0f32; 4];
        // SAFETY: the target has NEON; four values go to an array of four.
        unsafe {
            // xor 8, then 16.
            let low = vaddq_f32(sum(a0, b0, c0, d0), sum(a1, b1, c1, d1));
            let high = vaddq_f32(sum(a2, b2, c2, d2), sum(a3, b3, c3, d3));
            vst1q_f32(out.as_mut_ptr(), vaddq_f32(low, high));
        }
        out
    }
}
