//! AVX2 and AVX-512.

use std::arch::x86_64::*;

use crate::replay::lanes::{BLOCK, Lanes, Task};

/// AVX-512: a block is two registers.
#[derive(Clone, Copy)]
pub(in super::super) struct Avx512(());

impl Avx512 {
    /// # Safety
    /// The code is compiled for, and runs on a processor with, AVX-512 F, BW, DQ and VL.
    #[inline(always)]
    pub(in super::super) unsafe fn new() -> Self {
        Avx512(())
    }
}

/// Runs intrinsics. Two per register of a block, in most cases.
macro_rules! simd {
    ($($body:tt)*) => {
        // SAFETY: `self` is the proof that the processor has the instructions; addresses are those of whole arrays.
        unsafe { $($body)* }
    };
}

#[allow(clippy::multiple_unsafe_ops_per_block, reason = "intrinsics share one promise")]
impl Lanes for Avx512 {
    type V = [__m512; 2];

    #[inline(always)]
    fn run<T: Task>(self, task: T) -> T::Output {
        #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
        #[inline(never)]
        fn compiled<T: Task>(l: Avx512, task: T) -> T::Output {
            task.run(l)
        }
        // SAFETY: `self` is the proof that the processor has the instructions.
        unsafe { compiled(self, task) }
    }

    #[inline(always)]
    fn splat(self, x: f32) -> Self::V {
        simd! { [_mm512_set1_ps(x); 2] }
    }

    #[inline(always)]
    fn prefetch(self, at: *const u8) {
        simd! { _mm_prefetch::<_MM_HINT_T0>(at.cast()) }
    }

    #[inline(always)]
    fn load(self, from: &[f32; BLOCK]) -> Self::V {
        simd! { [_mm512_loadu_ps(from.as_ptr()), _mm512_loadu_ps(from.as_ptr().add(16))] }
    }

    #[inline(always)]
    fn store(self, v: Self::V, to: &mut [f32; BLOCK]) {
        simd! {
            _mm512_storeu_ps(to.as_mut_ptr(), v[0]);
            _mm512_storeu_ps(to.as_mut_ptr().add(16), v[1]);
        }
    }

    #[inline(always)]
    fn mul(self, a: Self::V, b: Self::V) -> Self::V {
        simd! { [_mm512_mul_ps(a[0], b[0]), _mm512_mul_ps(a[1], b[1])] }
    }

    #[inline(always)]
    fn fma(self, a: Self::V, b: Self::V, c: Self::V) -> Self::V {
        simd! { [_mm512_fmadd_ps(a[0], b[0], c[0]), _mm512_fmadd_ps(a[1], b[1], c[1])] }
    }

    #[inline(always)]
    fn or_minus_zero(self, a: Self::V, mask: Self::V) -> Self::V {
        simd! {
            let zero = _mm512_set1_ps(-0.0);
            [
                _mm512_or_ps(_mm512_and_ps(a[0], mask[0]), _mm512_andnot_ps(mask[0], zero)),
                _mm512_or_ps(_mm512_and_ps(a[1], mask[1]), _mm512_andnot_ps(mask[1], zero)),
            ]
        }
    }

    #[inline(always)]
    fn canonical(self, v: Self::V) -> Self::V {
        simd! {
            let nan = _mm512_set1_ps(f32::from_bits(crate::replay::numerics::CANONICAL_NAN));
            [
                _mm512_mask_mov_ps(v[0], _mm512_cmp_ps_mask::<_CMP_UNORD_Q>(v[0], v[0]), nan),
                _mm512_mask_mov_ps(v[1], _mm512_cmp_ps_mask::<_CMP_UNORD_Q>(v[1], v[1]), nan),
            ]
        }
    }

    #[inline(always)]
    fn load_bf16(self, from: &[u16; BLOCK]) -> Self::V {
        simd! {
            let at = from.as_ptr().cast::<__m256i>();
            [
                _mm512_castsi512_ps(_mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(_mm256_loadu_si256(at)))),
                _mm512_castsi512_ps(_mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(_mm256_loadu_si256(at.add(1))))),
            ]
        }
    }

    #[inline(always)]
    fn load_planes(self, high: &[u16; BLOCK], low: &[i16; BLOCK]) -> Self::V {
        let high = self.load_bf16(high);
        simd! {
            let at = low.as_ptr().cast::<__m256i>();
            let low = [_mm512_cvtepi16_epi32(_mm256_loadu_si256(at)), _mm512_cvtepi16_epi32(_mm256_loadu_si256(at.add(1)))];
            [
                _mm512_castsi512_ps(_mm512_add_epi32(_mm512_castps_si512(high[0]), low[0])),
                _mm512_castsi512_ps(_mm512_add_epi32(_mm512_castps_si512(high[1]), low[1])),
            ]
        }
    }

    #[inline(always)]
    fn store_planes(self, v: Self::V, high: &mut [u16; BLOCK], low: &mut [i16; BLOCK]) {
        simd! {
            let bits = [_mm512_castps_si512(v[0]), _mm512_castps_si512(v[1])];
            let half = _mm512_set1_epi32(0x8000);
            let rounded = [
                _mm512_srli_epi32::<16>(_mm512_add_epi32(bits[0], half)),
                _mm512_srli_epi32::<16>(_mm512_add_epi32(bits[1], half)),
            ];
            let (high, low) = (high.as_mut_ptr().cast::<__m256i>(), low.as_mut_ptr().cast::<__m256i>());
            _mm256_storeu_si256(high, _mm512_cvtepi32_epi16(rounded[0]));
            _mm256_storeu_si256(high.add(1), _mm512_cvtepi32_epi16(rounded[1]));
            // The low plane is the low half of the bits, whatever the high one is.
            _mm256_storeu_si256(low, _mm512_cvtepi32_epi16(bits[0]));
            _mm256_storeu_si256(low.add(1), _mm512_cvtepi32_epi16(bits[1]));
        }
    }

    #[inline(always)]
    fn high(self, v: Self::V) -> Self::V {
        simd! {
            let (half, mask) = (_mm512_set1_epi32(0x8000), _mm512_set1_epi32(0xFFFF_0000u32 as i32));
            [
                _mm512_castsi512_ps(_mm512_and_si512(_mm512_add_epi32(_mm512_castps_si512(v[0]), half), mask)),
                _mm512_castsi512_ps(_mm512_and_si512(_mm512_add_epi32(_mm512_castps_si512(v[1]), half), mask)),
            ]
        }
    }

    #[inline(always)]
    fn sums(self, classes: &[Self::V; 4]) -> [f32; 4] {
        simd! {
            // xor 4: lanes 2k and 2k + 1 of a row; then lane k has b of classes 8k to 8k + 7.
            let b = classes_pair(self, classes);
            // xor 2 and 1, four rows at a time.
            let (a02, a13) = (_mm512_unpacklo_ps(b[0], b[1]), _mm512_unpackhi_ps(b[0], b[1]));
            let (c02, c13) = (_mm512_unpacklo_ps(b[2], b[3]), _mm512_unpackhi_ps(b[2], b[3]));
            let (a, c) = (_mm512_add_ps(a02, a13), _mm512_add_ps(c02, c13));
            let sums = _mm512_add_ps(
                _mm512_shuffle_ps::<0b01_00_01_00>(a, c),
                _mm512_shuffle_ps::<0b11_10_11_10>(a, c),
            );
            // xor 8, then 16.
            let sums = _mm512_add_ps(sums, _mm512_shuffle_f32x4::<0b10_11_00_01>(sums, sums));
            let sums = _mm_add_ps(_mm512_castps512_ps128(sums), _mm512_extractf32x4_ps::<2>(sums));
            let mut out = [0f32; 4];
            _mm_storeu_ps(out.as_mut_ptr(), sums);
            out
        }
    }
}

/// The xor-4 sums of four rows.
#[inline(always)]
fn classes_pair(_proof: Avx512, rows: &[[__m512; 2]; 4]) -> [__m512; 4] {
    let mut out = rows.map(|row| row[0]);
    for (out, row) in out.iter_mut().zip(rows) {
        // SAFETY: the proof says that the processor has the instructions.
        let lower = unsafe { _mm512_shuffle_f32x4::<0b10_00_10_00>(row[0], row[1]) };
        // SAFETY: as above.
        let upper = unsafe { _mm512_shuffle_f32x4::<0b11_01_11_01>(row[0], row[1]) };
        // SAFETY: as above.
        *out = unsafe { _mm512_add_ps(lower, upper) };
    }
    out
}

/// AVX2 with FMA: a block is four registers.
#[derive(Clone, Copy)]
pub(in super::super) struct Avx2(());

impl Avx2 {
    /// # Safety
    /// The code is compiled for, and runs on a processor with, AVX2 and FMA.
    #[inline(always)]
    pub(in super::super) unsafe fn new() -> Self {
        Avx2(())
    }
}

/// A block made register by register: the body's value for each index.
macro_rules! each4 {
    ($i:ident => $($body:tt)*) => {
        // SAFETY: `self` is the proof that the processor has the instructions; addresses are those of whole arrays.
        unsafe { [
            { const $i: usize = 0; $($body)* },
            { const $i: usize = 1; $($body)* },
            { const $i: usize = 2; $($body)* },
            { const $i: usize = 3; $($body)* },
        ] }
    };
}

#[allow(clippy::multiple_unsafe_ops_per_block, reason = "intrinsics share one promise")]
impl Lanes for Avx2 {
    type V = [__m256; 4];

    #[inline(always)]
    fn run<T: Task>(self, task: T) -> T::Output {
        #[target_feature(enable = "avx2,fma,f16c")]
        #[inline(never)]
        fn compiled<T: Task>(l: Avx2, task: T) -> T::Output {
            task.run(l)
        }
        // SAFETY: `self` is the proof that the processor has the instructions.
        unsafe { compiled(self, task) }
    }

    #[inline(always)]
    fn splat(self, x: f32) -> Self::V {
        simd! { [_mm256_set1_ps(x); 4] }
    }

    #[inline(always)]
    fn prefetch(self, at: *const u8) {
        simd! { _mm_prefetch::<_MM_HINT_T0>(at.cast()) }
    }

    #[inline(always)]
    fn load(self, from: &[f32; BLOCK]) -> Self::V {
        each4! { I => _mm256_loadu_ps(from.as_ptr().add(8 * I)) }
    }

    #[inline(always)]
    fn store(self, v: Self::V, to: &mut [f32; BLOCK]) {
        each4! { I => _mm256_storeu_ps(to.as_mut_ptr().add(8 * I), v[I]) };
    }

    #[inline(always)]
    fn mul(self, a: Self::V, b: Self::V) -> Self::V {
        each4! { I => _mm256_mul_ps(a[I], b[I]) }
    }

    #[inline(always)]
    fn fma(self, a: Self::V, b: Self::V, c: Self::V) -> Self::V {
        each4! { I => _mm256_fmadd_ps(a[I], b[I], c[I]) }
    }

    #[inline(always)]
    fn or_minus_zero(self, a: Self::V, mask: Self::V) -> Self::V {
        each4! { I => _mm256_blendv_ps(_mm256_set1_ps(-0.0), a[I], mask[I]) }
    }

    #[inline(always)]
    fn canonical(self, v: Self::V) -> Self::V {
        each4! { I =>
            let nan = _mm256_set1_ps(f32::from_bits(crate::replay::numerics::CANONICAL_NAN));
            _mm256_blendv_ps(v[I], nan, _mm256_cmp_ps::<_CMP_UNORD_Q>(v[I], v[I]))
        }
    }

    #[inline(always)]
    fn load_bf16(self, from: &[u16; BLOCK]) -> Self::V {
        each4! { I =>
            let values = _mm_loadu_si128(from.as_ptr().add(8 * I).cast());
            _mm256_castsi256_ps(_mm256_slli_epi32::<16>(_mm256_cvtepu16_epi32(values)))
        }
    }

    #[inline(always)]
    fn load_planes(self, high: &[u16; BLOCK], low: &[i16; BLOCK]) -> Self::V {
        let high = self.load_bf16(high);
        each4! { I =>
            let low = _mm256_cvtepi16_epi32(_mm_loadu_si128(low.as_ptr().add(8 * I).cast()));
            _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(high[I]), low))
        }
    }

    #[inline(always)]
    fn store_planes(self, v: Self::V, high: &mut [u16; BLOCK], low: &mut [i16; BLOCK]) {
        let bits: [__m256i; 4] = each4! { I => _mm256_castps_si256(v[I]) };
        let rounded: [__m256i; 4] =
            each4! { I => _mm256_srli_epi32::<16>(_mm256_add_epi32(bits[I], _mm256_set1_epi32(0x8000))) };
        // The low plane is the low half of the bits, whatever the high one is.
        let lower: [__m256i; 4] = each4! { I => _mm256_and_si256(bits[I], _mm256_set1_epi32(0xFFFF)) };
        simd! {
            let (high, low) = (high.as_mut_ptr().cast::<__m256i>(), low.as_mut_ptr().cast::<__m256i>());
            for (to, [a, b, c, d]) in [(high, rounded), (low, lower)] {
                // A pack works within halves; the permutation puts the quarters in order.
                _mm256_storeu_si256(to, _mm256_permute4x64_epi64::<0b11_01_10_00>(_mm256_packus_epi32(a, b)));
                _mm256_storeu_si256(to.add(1), _mm256_permute4x64_epi64::<0b11_01_10_00>(_mm256_packus_epi32(c, d)));
            }
        }
    }

    #[inline(always)]
    fn high(self, v: Self::V) -> Self::V {
        each4! { I =>
            let rounded = _mm256_add_epi32(_mm256_castps_si256(v[I]), _mm256_set1_epi32(0x8000));
            _mm256_castsi256_ps(_mm256_and_si256(rounded, _mm256_set1_epi32(0xFFFF_0000u32 as i32)))
        }
    }

    #[inline(always)]
    fn sums(self, classes: &[Self::V; 4]) -> [f32; 4] {
        // xor 4: the halves of a register; then half k % 2 of register k / 2 has b of classes 8k to 8k + 7.
        let b: [[__m256; 2]; 4] = each4! { I =>
            let v = classes[I];
            [
                _mm256_add_ps(_mm256_permute2f128_ps::<0x20>(v[0], v[1]), _mm256_permute2f128_ps::<0x31>(v[0], v[1])),
                _mm256_add_ps(_mm256_permute2f128_ps::<0x20>(v[2], v[3]), _mm256_permute2f128_ps::<0x31>(v[2], v[3])),
            ]
        };
        simd! {
            // xor 2 and 1, four rows at a time; then xor 8, then 16.
            let [p, q, r, t] = b;
            let halves = [half(self, [p[0], q[0], r[0], t[0]]), half(self, [p[1], q[1], r[1], t[1]])];
            let mut out = [0f32; 4];
            _mm_storeu_ps(out.as_mut_ptr(), _mm_add_ps(halves[0], halves[1]));
            out
        }
    }
}

/// The xor-2, xor-1 and xor-8 sums of half of the classes of four rows.
#[allow(clippy::multiple_unsafe_ops_per_block, reason = "intrinsics share one promise")]
#[inline(always)]
fn half(_proof: Avx2, [p, q, r, t]: [__m256; 4]) -> __m128 {
    // SAFETY: the proof says that the processor has the instructions.
    unsafe {
        let a = _mm256_add_ps(_mm256_unpacklo_ps(p, q), _mm256_unpackhi_ps(p, q));
        let c = _mm256_add_ps(_mm256_unpacklo_ps(r, t), _mm256_unpackhi_ps(r, t));
        let sums = _mm256_add_ps(_mm256_shuffle_ps::<0b01_00_01_00>(a, c), _mm256_shuffle_ps::<0b11_10_11_10>(a, c));
        _mm_add_ps(_mm256_castps256_ps128(sums), _mm256_extractf128_ps::<1>(sums))
    }
}
