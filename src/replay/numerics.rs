//! The fp32 arithmetic that every family, backend and instruction set shares.
//!
//! Results must be the same bytes everywhere, so nothing here calls a math library: each function is a fixed sequence
//! of IEEE-754 binary32 additions, multiplications, divisions, square roots and fused multiply-adds, rounded to nearest
//! even, with subnormals. Device code repeats these sequences operation by operation.
//!
//! [`exp`], [`expm1`], [`log1p`], [`sigmoid`] and [`rsqrt`] are within 2 ulp of the true value (measured on a dense
//! sample of all arguments by the tests of this file; the worst case of each is printed there).

/// Number of accumulators of a dot product: element `i` belongs to class `i % CLASSES`.
pub const CLASSES: usize = 32;

/// The one bit pattern under which a NaN is written.
pub const CANONICAL_NAN: u32 = 0x7FC0_0000;

const LOG2_E: f32 = std::f32::consts::LOG2_E;
/// ln 2 = LN2_HI + LN2_LO; LN2_HI has 15 trailing zero bits, so that k * LN2_HI is exact for every exponent k.
const LN2_HI: f32 = f32::from_bits(0x3F31_7200);
const LN2_LO: f32 = f32::from_bits(0x35BF_BE8E);
/// 1.5 * 2^23: adding it rounds to an integer, which then stands in the low bits.
const ROUND: f32 = 12_582_912.0;
const ROUND_BITS: u32 = 0x4B40_0000;
/// The bits of sqrt(1/2): mantissas are reduced to [sqrt(1/2), sqrt(2)).
const SQRT_HALF_BITS: u32 = 0x3F35_04F3;

#[inline(always)]
fn fma(a: f32, b: f32, c: f32) -> f32 {
    a.mul_add(b, c)
}

/// 2^n for -126 <= n <= 127; other n give garbage, never a panic.
#[inline(always)]
fn pow2(n: i32) -> f32 {
    f32::from_bits((n.wrapping_add(127) as u32) << 23)
}

/// x * 2^n, rounded once, for x in [1/2, 2): the first product is exact.
#[inline(always)]
fn scale(x: f32, n: i32) -> f32 {
    let half = n >> 1;
    x * pow2(half) * pow2(n.wrapping_sub(half))
}

/// Splits x = n ln 2 + r, |r| <= 0.35, and returns (n, r, e^r - 1 - r).
#[inline(always)]
fn reduced_exp(x: f32) -> (i32, f32, f32) {
    let t = fma(x, LOG2_E, ROUND);
    let n = t.to_bits().wrapping_sub(ROUND_BITS) as i32;
    let k = t - ROUND;
    let r = fma(k, -LN2_LO, fma(k, -LN2_HI, x));
    // Taylor to r^7: the first term left out is below r * 1.5e-8.
    let p = fma(r, 1.0 / 5040.0, 1.0 / 720.0);
    let p = fma(r, p, 1.0 / 120.0);
    let p = fma(r, p, 1.0 / 24.0);
    let p = fma(r, p, 1.0 / 6.0);
    let p = fma(r, p, 0.5);
    (n, r, r * r * p)
}

#[inline(always)]
fn clamp(x: f32, low: f32, high: f32) -> f32 {
    // Comparisons are written so that a NaN passes through.
    let x = if x < low { low } else { x };
    if x > high { high } else { x }
}

/// e^x. Subnormal results are rounded once; above 88.73 the result is infinite, below -103.98 it is zero.
#[inline(always)]
pub fn exp(x: f32) -> f32 {
    let (n, r, q) = reduced_exp(clamp(x, -104.0, 89.0));
    // 1 + r + q with the rounding of 1 + r given back.
    let head = 1.0 + r;
    scale(head + ((r - (head - 1.0)) + q), n)
}

/// e^x - 1, without cancellation near zero.
#[inline(always)]
pub fn expm1(x: f32) -> f32 {
    // Below -20 the result is -1; above 20 the -1 is far below half an ulp, and exp is taken.
    let (n, r, q) = reduced_exp(clamp(x, -20.0, 20.0));
    let s = pow2(n);
    let near = fma(s, r + q, s - 1.0);
    if x > 20.0 { exp(x) } else { near }
}

/// ln(1 + y) for y >= -1, without cancellation near zero.
#[inline(always)]
pub fn log1p(y: f32) -> f32 {
    let u = 1.0 + y;
    // What 1 + y lost in rounding, exactly.
    let lost = if y < 1.0 { y - (u - 1.0) } else { 1.0 - (u - y) };
    let bits = u.to_bits().wrapping_add(0x3F80_0000 - SQRT_HALF_BITS);
    let k = ((bits >> 23) as i32).wrapping_sub(127) as f32;
    let f = f32::from_bits((bits & 0x007F_FFFF).wrapping_add(SQRT_HALF_BITS)) - 1.0;
    // ln(1+f) = f - f^2/2 + s (f^2/2 + R), s = f / (2 + f), R = 2/3 s^2 + 2/5 s^4 + ...
    let s = f / (2.0 + f);
    let z = s * s;
    let r = fma(z, 2.0 / 9.0, 2.0 / 7.0);
    let r = fma(z, r, 2.0 / 5.0);
    let r = fma(z, r, 2.0 / 3.0);
    let r = z * r;
    let half_square = 0.5 * f * f;
    let low = fma(k, LN2_LO, lost / u);
    let tail = half_square - fma(s, half_square + r, low);
    let value = fma(k, LN2_HI, f - tail);
    if y == f32::INFINITY {
        f32::INFINITY
    } else if y == -1.0 {
        f32::NEG_INFINITY
    } else if y < -1.0 {
        f32::NAN
    } else {
        value
    }
}

/// softplus(x) = x for x > 20, else ln(1 + e^x).
#[inline(always)]
pub fn softplus(x: f32) -> f32 {
    if x > 20.0 { x } else { log1p(exp(x)) }
}

/// 1 / (1 + e^-x).
#[inline(always)]
pub fn sigmoid(x: f32) -> f32 {
    let e = exp(-x.abs());
    let numerator = if x < 0.0 { e } else { 1.0 };
    let sum = 1.0 + e;
    let lost = e - (sum - 1.0);
    // One correction of the quotient for its own rounding and for what the sum lost.
    let q = numerator / sum;
    let rest = fma(-q, lost, fma(-q, sum, numerator));
    q + rest / sum
}

/// x sigmoid(x), the gate of Mamba-2 and of the short convolutions.
#[inline(always)]
pub fn silu(x: f32) -> f32 {
    // -inf * 0 would be a NaN; the limit is 0.
    if x == f32::NEG_INFINITY { 0.0 } else { x * sigmoid(x) }
}

/// 1 / sqrt(x).
#[inline(always)]
pub fn rsqrt(x: f32) -> f32 {
    1.0 / x.sqrt()
}

/// How a state element S decays by a log decay g: `g > -1 ? fma(S, expm1(g), S) : S * exp(g)`. With slow decays the first form keeps
/// the error of 4096 steps at 1e-6 where a rounded exp(g) gives 3e-5.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Decay {
    /// expm1(g) for a slow decay, exp(g) for a fast one.
    pub factor: f32,
    /// Whether g > -1.
    pub slow: bool,
}

impl Decay {
    /// The decay of one token with log decay g.
    #[inline(always)]
    pub fn new(g: f32) -> Self {
        let slow = g > -1.0;
        Decay { factor: if slow { expm1(g) } else { exp(g) }, slow }
    }
}

/// Adds the 32 class sums of a dot product: butterflies over the class index, xor 4, 2, 1, 8, 16 in this order.
///
/// A GPU lane that holds eight neighbouring elements of every fourth 16-byte chunk does the first three in registers
/// and needs two shuffles for the rest.
#[allow(clippy::needless_range_loop, reason = "index loops are what the compiler vectorises")]
#[inline(always)]
pub fn reduce(classes: &[f32; CLASSES]) -> f32 {
    // Both sides of a butterfly hold the same sum, so only the lower side is kept up.
    let mut b = [0f32; 16];
    for k in 0..4 {
        for j in 0..4 {
            b[4 * k + j] = classes[8 * k + j] + classes[8 * k + j + 4];
        }
    }
    let mut c = [0f32; 4];
    for k in 0..4 {
        c[k] = (b[4 * k] + b[4 * k + 2]) + (b[4 * k + 1] + b[4 * k + 3]);
    }
    (c[0] + c[1]) + (c[2] + c[3])
}

/// A NaN of any payload becomes [`CANONICAL_NAN`]; everything else stays.
#[inline(always)]
pub fn canonical(x: f32) -> f32 {
    if x.is_nan() { f32::from_bits(CANONICAL_NAN) } else { x }
}

/// Nearest bfloat16, ties to even; overflow to infinity; NaN to 7FC0.
#[inline(always)]
pub fn to_bf16(x: f32) -> u16 {
    let bits = x.to_bits();
    let rounded = bits.wrapping_add(0x7FFF + ((bits >> 16) & 1)) >> 16;
    if x.is_nan() { 0x7FC0 } else { rounded as u16 }
}

/// The binary32 with the value of a bfloat16.
#[inline(always)]
pub fn from_bf16(x: u16) -> f32 {
    f32::from_bits((x as u32) << 16)
}

/// Nearest binary16, ties to even; overflow to infinity; NaN to 7E00.
#[inline(always)]
pub fn to_f16(x: f32) -> u16 {
    if x.is_nan() { 0x7E00 } else { half::f16::from_f32(x).to_bits() }
}

/// The binary32 with the value of a binary16.
#[inline(always)]
pub fn from_f16(x: u16) -> f32 {
    half::f16::from_bits(x).to_f32()
}

/// The two planes of a binary32: a bfloat16 rounded half away from zero, and the rest of the bit pattern.
/// [`join`] gives the pattern back, for every pattern.
#[inline(always)]
pub fn split(x: f32) -> (u16, i16) {
    let bits = x.to_bits();
    let high = bits.wrapping_add(0x8000) >> 16;
    (high as u16, bits.wrapping_sub(high << 16) as i16)
}

/// The binary32 whose planes are `high` and `low`.
#[inline(always)]
pub fn join(high: u16, low: i16) -> f32 {
    f32::from_bits(((high as u32) << 16).wrapping_add(low as i32 as u32))
}

/// Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011).
#[inline(always)]
pub fn philox(key: u64, counter: [u32; 4]) -> [u32; 4] {
    let [mut k0, mut k1] = [key as u32, (key >> 32) as u32];
    let [mut c0, mut c1, mut c2, mut c3] = counter;
    for _ in 0..10 {
        let p0 = u64::from(c0) * 0xD251_1F53;
        let p1 = u64::from(c2) * 0xCD9E_8D57;
        (c0, c1, c2, c3) = ((p1 >> 32) as u32 ^ c1 ^ k0, p1 as u32, (p0 >> 32) as u32 ^ c3 ^ k1, p0 as u32);
        k0 = k0.wrapping_add(0x9E37_79B9);
        k1 = k1.wrapping_add(0xBB67_AE85);
    }
    [c0, c1, c2, c3]
}

/// The random words of state elements `4 block .. 4 block + 3` of a layer, whose state is stored at `position`.
#[inline(always)]
pub fn rounding_words(seed: u64, position: i64, layer: u32, block: u32) -> [u32; 4] {
    philox(seed, [position as u32, (position >> 32) as u32, layer, block])
}

/// bfloat16 by stochastic rounding: up with the probability of what is cut off, by the lower half of `word`.
#[inline(always)]
pub fn to_bf16_stochastic(x: f32, word: u32) -> u16 {
    if x.is_nan() {
        return 0x7FC0;
    }
    if x.is_infinite() {
        return (x.to_bits() >> 16) as u16;
    }
    // The carry of a large value runs into the exponent: it overflows to infinity.
    (x.to_bits().wrapping_add(word & 0xFFFF) >> 16) as u16
}

/// binary16 by stochastic rounding. The magnitude in units of its last place is an integer and a fraction of up to 31
/// bits, which the upper bits of `word` round.
#[inline(always)]
pub fn to_f16_stochastic(x: f32, word: u32) -> u16 {
    if x.is_nan() {
        return 0x7E00;
    }
    let sign = ((x.to_bits() >> 16) & 0x8000) as u16;
    let magnitude = x.to_bits() & 0x7FFF_FFFF;
    let exponent = magnitude >> 23;
    if exponent >= 143 {
        // 2^16 and more.
        return sign | 0x7C00;
    }
    if exponent >= 113 {
        let rounded = (magnitude + (word >> 19)) >> 13;
        // 65504 and a carry give 7C00, infinity.
        return sign | (rounded - (112 << 10)) as u16;
    }
    // Subnormal results, units of 2^-24.
    let shift = 126 - exponent;
    if exponent == 0 || shift > 31 {
        return sign;
    }
    let mantissa = (magnitude & 0x007F_FFFF) | 0x0080_0000;
    let rounded = (u64::from(mantissa) + u64::from(word >> (32 - shift))) >> shift;
    sign | rounded as u16
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Distance from the true value in units of the last place of the rounded true value.
    fn ulps(got: f32, truth: f64) -> f64 {
        if truth.abs() > f32::MAX as f64 * (1.0 + 2f64.powi(-25)) {
            return if got.is_infinite() && (got > 0.0) == (truth > 0.0) { 0.0 } else { f64::INFINITY };
        }
        let exponent = (truth.abs() as f32).max(f32::MIN_POSITIVE).log2().floor() as i32;
        (got as f64 - truth).abs() / 2f64.powi(exponent - 23)
    }

    fn worst(name: &str, f: impl Fn(f32) -> f32, truth: impl Fn(f64) -> f64, inside: impl Fn(f32) -> bool) {
        let (mut worst, mut at, mut seen) = (0.0, 0.0, 0u32);
        // A stride that is coprime to 2^32 walks through every exponent and dense mantissas: 15 million arguments.
        let mut bits = 0u32;
        for _ in 0..15_000_000 {
            bits = bits.wrapping_add(0x9E37_79B1);
            let x = f32::from_bits(bits);
            if !inside(x) {
                continue;
            }
            seen += 1;
            let error = ulps(f(x), truth(x as f64));
            if error > worst {
                (worst, at) = (error, x);
            }
        }
        println!("{name}: worst {worst:.3} ulp at {at:e} of {seen} arguments");
        assert!(seen > 1_000_000, "{name}: only {seen} arguments lie in the domain");
        assert!(worst <= 2.0, "{name} is {worst} ulp off at {at:e}");
    }

    #[test]
    fn exp_is_within_two_ulp() {
        worst("exp", exp, f64::exp, |x| !x.is_nan() && x > -103.9);
    }

    #[test]
    fn expm1_is_within_two_ulp() {
        worst("expm1", expm1, f64::exp_m1, |x| !x.is_nan());
    }

    #[test]
    fn log1p_is_within_two_ulp() {
        worst("log1p", log1p, f64::ln_1p, |x| x > -1.0 && x.is_finite());
    }

    #[test]
    fn softplus_is_within_three_ulp_below_20_and_the_identity_above() {
        let truth = |x: f64| if x > 20.0 { x } else { x.exp().ln_1p() };
        let mut worst = 0f64;
        for i in 0..4_000_000 {
            let x = -104.0 + i as f32 * (130.0 / 4_000_000.0);
            worst = worst.max(ulps(softplus(x), truth(x as f64)));
        }
        println!("softplus: worst {worst:.3} ulp");
        assert!(worst <= 3.0, "exp and log1p add up to at most 2 + 1 ulp, got {worst}");
    }

    #[test]
    fn sigmoid_is_within_two_ulp() {
        worst("sigmoid", sigmoid, |x| 1.0 / (1.0 + (-x).exp()), |x| !x.is_nan() && x > -87.0);
    }

    #[test]
    fn rsqrt_is_within_two_ulp() {
        worst("rsqrt", rsqrt, |x| 1.0 / x.sqrt(), |x| x > 0.0 && x.is_finite());
    }

    #[test]
    fn special_values() {
        assert_eq!(exp(f32::NEG_INFINITY), 0.0);
        assert_eq!(exp(f32::INFINITY), f32::INFINITY);
        assert!(exp(f32::NAN).is_nan() && expm1(f32::NAN).is_nan() && sigmoid(f32::NAN).is_nan());
        assert!(log1p(f32::NAN).is_nan() && log1p(-2.0).is_nan());
        assert_eq!(expm1(f32::NEG_INFINITY), -1.0);
        assert_eq!(log1p(-1.0), f32::NEG_INFINITY);
        assert_eq!(sigmoid(f32::NEG_INFINITY), 0.0);
        assert_eq!(sigmoid(f32::INFINITY), 1.0);
        assert_eq!(silu(f32::NEG_INFINITY), 0.0);
        assert!(exp(-100.0) > 0.0 && exp(-100.0) < f32::MIN_POSITIVE);
        assert!(softplus(-100.0) > 0.0, "a subnormal positive");
        assert_eq!(softplus(1e4), 1e4);
        assert_eq!(canonical(f32::from_bits(0xFFC1_2345)).to_bits(), CANONICAL_NAN);
        assert_eq!(to_bf16(f32::from_bits(0xFF80_0001)), 0x7FC0);
        assert_eq!(to_f16(f32::from_bits(0xFF80_0001)), 0x7E00);
    }

    #[test]
    fn split_is_lossless_for_every_bit_pattern() {
        for bits in 0..=u32::MAX {
            let (high, low) = split(f32::from_bits(bits));
            let back = ((high as u32) << 16).wrapping_add(low as i32 as u32);
            assert!(back == bits, "{bits:08x} came back as {back:08x}");
        }
        assert!(from_bf16(split(3.397e38).0).is_infinite());
    }

    #[test]
    fn bf16_rounds_to_nearest_even_like_the_half_crate() {
        let mut bits = 0u32;
        for _ in 0..4_000_000 {
            bits = bits.wrapping_add(0x9E37_79B1);
            let x = f32::from_bits(bits);
            if !x.is_nan() {
                assert_eq!(to_bf16(x), half::bf16::from_f32(x).to_bits(), "{x:e}");
            }
        }
    }

    /// Known answers of the generator's authors (Random123, philox4x32-10).
    #[test]
    fn philox_known_answers() {
        assert_eq!(philox(0, [0; 4]), [0x6627_E8D5, 0xE169_C58D, 0xBC57_AC4C, 0x9B00_DBD8]);
        let ones = u32::MAX;
        assert_eq!(philox(u64::MAX, [ones; 4]), [0x408F_276D, 0x41C8_3B0E, 0xA20B_C7C6, 0x6D54_51FD]);
    }

    /// The two neighbours alone, each with the probability of its distance: 65536 words cover every fraction evenly.
    #[test]
    fn stochastic_rounding_is_unbiased() {
        let mut seed = 7u32;
        for case in 0..300 {
            seed = seed.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            // Magnitudes from 2^-26 to 2^17 for f16, subnormal ones among them.
            let x = f32::from_bits((((seed >> 8) % 44 + 101) << 23) | (seed & 0x007F_FFFF))
                * if case % 2 == 0 { 1.0 } else { -1.0 };
            type Round = fn(f32, u32) -> u16;
            type Back = fn(u16) -> f32;
            for (round, back, limit) in
                [(to_bf16_stochastic as Round, from_bf16 as Back, f32::MAX), (to_f16_stochastic, from_f16, 65504.0)]
            {
                if x.abs() > limit {
                    continue;
                }
                let mut values: Vec<f32> = Vec::new();
                let mut sum = 0f64;
                for i in 0..1 << 16 {
                    // Evenly spread in the upper bits and in the lower ones.
                    let word = (i << 16) | i;
                    let y = back(round(x, word));
                    if !values.contains(&y) {
                        values.push(y);
                    }
                    sum += f64::from(y);
                }
                assert!(values.len() <= 2 && values.iter().all(|y| y.is_finite()), "{x:e}: {values:?}");
                let spread = values.iter().fold(0f64, |s, y| s.max((f64::from(*y) - f64::from(x)).abs()));
                let bias = (sum / 65536.0 - f64::from(x)).abs();
                assert!(bias <= spread * 2f64.powi(-15) + 1e-12, "{x:e}: bias {bias:e} of {spread:e}");
            }
        }
        assert_eq!(to_f16_stochastic(65535.0, u32::MAX), 0x7C00);
        assert_eq!(to_f16_stochastic(-1e30, 0), 0xFC00);
        assert_eq!(to_f16_stochastic(1e-30, u32::MAX), 0);
        assert_eq!(to_bf16_stochastic(f32::NEG_INFINITY, u32::MAX), 0xFF80);
        assert_eq!(to_bf16_stochastic(f32::NAN, 0), 0x7FC0);
    }

    #[test]
    fn reduction_is_the_butterfly_of_the_design() {
        let mut seed = 1u32;
        for _ in 0..1000 {
            let mut lanes = [0f32; CLASSES];
            for lane in &mut lanes {
                seed = seed.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                *lane = f32::from_bits(0x3F00_0000 | (seed >> 9)) * if seed & 1 == 0 { 1.0 } else { -1e3 };
            }
            let sum = reduce(&lanes);
            for mask in [4, 2, 1, 8, 16] {
                let before = lanes;
                for i in 0..CLASSES {
                    lanes[i] = before[i] + before[i ^ mask];
                }
            }
            assert!(lanes.iter().all(|lane| lane.to_bits() == sum.to_bits()));
        }
    }
}
