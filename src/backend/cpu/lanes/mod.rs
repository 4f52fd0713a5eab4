//! Blocks of 32 values in the registers of each instruction set.

#[cfg(target_arch = "aarch64")]
mod neon;
#[cfg(target_arch = "x86_64")]
mod x86;

#[cfg(target_arch = "aarch64")]
pub(super) use neon::Neon;
#[cfg(target_arch = "x86_64")]
pub(super) use x86::{Avx2, Avx512};

/// Defines a function that runs its body in an instruction set, given first; in the body, `$l` is that set's lanes. It is
/// compiled out of line, once for each set, so what is in it never falls back to the target's baseline.
macro_rules! on_lanes {
    ($(#[$attribute:meta])* fn $name:ident<$m:ident: $bound:path>($l:ident; $($arg:ident: $ty:ty),* $(,)?) -> $ret:ty $body:block) => {
        $(#[$attribute])*
        #[allow(clippy::too_many_arguments, reason = "a tile, where it is and what happens to it")]
        #[inline(always)]
        fn $name<$m: $bound>(isa: $crate::backend::cpu::isa::Isa, $($arg: $ty),*) -> $ret {
            #[allow(clippy::too_many_arguments, reason = "as above")]
            #[inline(always)]
            fn body<L: $crate::replay::lanes::Lanes, $m: $bound>($l: L, $($arg: $ty),*) -> $ret $body

            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx2,fma,f16c")]
            #[allow(clippy::too_many_arguments, reason = "as above")]
            fn avx2<$m: $bound>($($arg: $ty),*) -> $ret {
                // SAFETY: this function is compiled for these instructions, and called where they are.
                body(unsafe { $crate::backend::cpu::lanes::Avx2::new() }, $($arg),*)
            }
            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
            #[allow(clippy::too_many_arguments, reason = "as above")]
            fn avx512<$m: $bound>($($arg: $ty),*) -> $ret {
                // SAFETY: this function is compiled for these instructions, and called where they are.
                body(unsafe { $crate::backend::cpu::lanes::Avx512::new() }, $($arg),*)
            }
            match isa {
                #[cfg(target_arch = "x86_64")]
                // SAFETY: `Isa::detect` returns Avx512 only where the processor has these features.
                $crate::backend::cpu::isa::Isa::Avx512 => unsafe { avx512($($arg),*) },
                #[cfg(target_arch = "x86_64")]
                // SAFETY: `Isa::detect` returns Avx2 only where the processor has these features.
                $crate::backend::cpu::isa::Isa::Avx2 => unsafe { avx2($($arg),*) },
                #[cfg(target_arch = "aarch64")]
                $crate::backend::cpu::isa::Isa::Neon => body($crate::backend::cpu::lanes::Neon, $($arg),*),
                _ => body($crate::replay::lanes::Portable, $($arg),*),
            }
        }
    };
}
pub(super) use on_lanes;

#[cfg(test)]
mod tests {
    use super::super::isa::Isa;
    use crate::replay::lanes::BLOCK;
    use crate::replay::numerics::reduce;

    /// What every operation makes of some blocks, bit by bit.
    struct Seen(Vec<u32>);

    fn pattern(seed: &mut u32) -> u32 {
        *seed = seed.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        match *seed >> 28 {
            0 => 0,
            1 => 0x8000_0000,
            2 => 0x7F80_0000,
            3 => seed.rotate_left(9) & 0x007F_FFFF,
            4 => [0x7FFF_FFFF, 0xFFFF_FFFF, 0x7FFF_E000, 0xFFA0_0001][(*seed >> 8) as usize % 4],
            _ => 0x3F00_0000 ^ (seed.rotate_left(13) & 0x81FF_FFFF),
        }
    }

    on_lanes! {
        fn see<M: Clone>(l; seed: M, from: u32, seen: &mut Seen) -> () {
            let _ = seed;
            let mut seed = from;
            let mut blocks = [[0f32; BLOCK]; 4];
            for block in &mut blocks {
                for x in block {
                    *x = f32::from_bits(pattern(&mut seed));
                }
            }
            let mut mask = [0f32; BLOCK];
            for (i, x) in mask.iter_mut().enumerate() {
                *x = f32::from_bits(if (seed >> i) & 1 == 0 { 0 } else { u32::MAX });
            }
            let mut halves = [0u16; BLOCK];
            for x in &mut halves {
                *x = pattern(&mut seed).rotate_left(11) as u16;
            }
            let lower = halves.map(|x| x.rotate_left(7) as i16);
            let [a, b, c, d] = [l.load(&blocks[0]), l.load(&blocks[1]), l.load(&blocks[2]), l.load(&blocks[3])];
            let results = [
                l.mul(a, b),
                l.fma(a, b, c),
                l.or_minus_zero(a, l.load(&mask)),
                l.splat(blocks[0][3]),
                l.load_bf16(&halves),
                l.load_planes(&halves, &lower),
                l.high(l.canonical(a)),
            ];
            for v in results {
                let mut out = [0f32; BLOCK];
                l.store(l.canonical(v), &mut out);
                seen.0.extend(out.map(f32::to_bits));
            }
            let (mut high, mut low) = ([0u16; BLOCK], [0i16; BLOCK]);
            l.store_planes(l.canonical(a), &mut high, &mut low);
            seen.0.extend(high.map(u32::from));
            seen.0.extend(low.map(|x| x as u32));
            let sums = l.sums(&[a, b, c, d]);
            for (sum, block) in sums.iter().zip(&blocks) {
                assert!(sum.to_bits() == reduce(block).to_bits() || sum.is_nan() && reduce(block).is_nan());
            }
            seen.0.extend(sums.map(|x| if x.is_nan() { 1 } else { x.to_bits() }));
        }
    }

    #[test]
    fn every_operation_is_the_same_in_every_instruction_set() {
        for seed in 0..2000u32 {
            let all = Isa::available().into_iter().map(|isa| {
                let mut seen = Seen(Vec::new());
                see(isa, (), seed.wrapping_mul(0x9E37_79B9), &mut seen);
                (isa, seen.0)
            });
            let all: Vec<_> = all.collect();
            for (isa, seen) in &all {
                assert!(seen == &all[0].1, "{isa:?}, seed {seed}");
            }
        }
    }
}
