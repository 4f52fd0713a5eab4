//! Which instruction set the kernels use. Results do not depend on it; speed does.

use std::sync::atomic::{AtomicU8, Ordering};

/// An instruction set that kernels are compiled for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum Isa {
    /// The target's baseline. On x86-64 its fused multiply-add is a library call: right, and slow.
    Baseline = 1,
    /// AVX2 with FMA and F16C.
    Avx2 = 2,
    /// AVX-512 (F, BW, DQ, VL).
    Avx512 = 3,
    /// NEON, which every aarch64 target has.
    Neon = 4,
}

static FORCED: AtomicU8 = AtomicU8::new(0);

impl Isa {
    /// The best that this processor has.
    pub fn detect() -> Self {
        let best = Self::available().last().copied();
        match FORCED.load(Ordering::Relaxed) {
            1 => Isa::Baseline,
            2 => Isa::Avx2,
            3 => Isa::Avx512,
            4 => Isa::Neon,
            _ => best.unwrap_or(Isa::Baseline),
        }
    }

    /// All that this processor has, worst first.
    pub fn available() -> Vec<Self> {
        #[allow(unused_mut, reason = "other processors have only the baseline")]
        let mut list = vec![Isa::Baseline];
        #[cfg(target_arch = "x86_64")]
        {
            let avx2 =
                is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") && is_x86_feature_detected!("f16c");
            if avx2 {
                list.push(Isa::Avx2);
            }
            if avx2
                && is_x86_feature_detected!("avx512f")
                && is_x86_feature_detected!("avx512bw")
                && is_x86_feature_detected!("avx512dq")
                && is_x86_feature_detected!("avx512vl")
            {
                list.push(Isa::Avx512);
            }
        }
        #[cfg(target_arch = "aarch64")]
        list.push(Isa::Neon);
        list
    }

    /// Name for people.
    pub fn name(self) -> &'static str {
        match self {
            Isa::Baseline => "baseline",
            Isa::Avx2 => "AVX2",
            Isa::Avx512 => "AVX-512",
            Isa::Neon => "NEON",
        }
    }

    /// For tests: contexts created from now on use this set. It must be one of [`Isa::available`]; `None` undoes it.
    #[doc(hidden)]
    pub fn force(isa: Option<Isa>) {
        if let Some(isa) = isa {
            assert!(Self::available().contains(&isa), "{isa:?} is not available here");
        }
        FORCED.store(isa.map_or(0, |isa| isa as u8), Ordering::Relaxed);
    }
}

/// Calls `$body` compiled for the instruction set `$isa`, out of line. `$body` and all that it calls must be `inline(always)`,
/// but for what is dispatched itself.
macro_rules! dispatch {
    ($isa:expr, $body:path; $($arg:ident: $ty:ty),*) => { dispatch!($isa, $body; $($arg: $ty),* => ()) };
    ($isa:expr, $body:path; $($arg:ident: $ty:ty),* => $ret:ty) => {{
        #[cfg(target_arch = "x86_64")]
        #[target_feature(enable = "avx2,fma,f16c")]
        #[inline(never)]
        #[allow(clippy::too_many_arguments, reason = "the body's own arguments")]
        fn avx2($($arg: $ty),*) -> $ret {
            $body($($arg),*)
        }
        #[cfg(target_arch = "x86_64")]
        #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
        #[inline(never)]
        #[allow(clippy::too_many_arguments, reason = "the body's own arguments")]
        fn avx512($($arg: $ty),*) -> $ret {
            $body($($arg),*)
        }
        #[inline(never)]
        #[allow(clippy::too_many_arguments, reason = "the body's own arguments")]
        fn baseline($($arg: $ty),*) -> $ret {
            $body($($arg),*)
        }
        match $isa {
            #[cfg(target_arch = "x86_64")]
            // SAFETY: `Isa::detect` returns Avx512 only where the processor has these features.
            $crate::backend::cpu::isa::Isa::Avx512 => unsafe { avx512($($arg),*) },
            #[cfg(target_arch = "x86_64")]
            // SAFETY: `Isa::detect` returns Avx2 only where the processor has these features.
            $crate::backend::cpu::isa::Isa::Avx2 => unsafe { avx2($($arg),*) },
            _ => baseline($($arg),*),
        }
    }};
}
pub(super) use dispatch;

/// Floating-point control as the arithmetic needs it (round to nearest, subnormals kept, exceptions masked), put back
/// when dropped. Engines like to switch subnormals off in their own threads.
pub(crate) struct FloatControl {
    #[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
    saved: u64,
}

impl FloatControl {
    /// Saves the control word and sets ours.
    #[inline]
    pub(crate) fn set() -> Self {
        #[cfg(target_arch = "x86_64")]
        {
            let mut saved = 0u32;
            // SAFETY: stores MXCSR to a local of its size.
            unsafe { std::arch::asm!("stmxcsr [{}]", in(reg) &mut saved, options(nostack)) };
            let ours = 0x1F80u32;
            if saved & 0xFFC0 != ours {
                // SAFETY: 0x1F80 is the processor's reset value: all exceptions masked, nearest even, no FTZ, no DAZ.
                unsafe { std::arch::asm!("ldmxcsr [{}]", in(reg) &ours, options(nostack, readonly)) };
            }
            FloatControl { saved: saved.into() }
        }
        #[cfg(target_arch = "aarch64")]
        {
            let saved: u64;
            // SAFETY: reads FPCR.
            unsafe { std::arch::asm!("mrs {}, fpcr", out(reg) saved, options(nostack)) };
            // SAFETY: 0 is the reset value: nearest even, no flush to zero, no traps.
            unsafe { std::arch::asm!("msr fpcr, {}", in(reg) 0u64, options(nostack)) };
            FloatControl { saved }
        }
        #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
        FloatControl {}
    }
}

impl Drop for FloatControl {
    #[inline]
    fn drop(&mut self) {
        #[cfg(target_arch = "x86_64")]
        {
            let saved = self.saved as u32;
            if saved & 0xFFC0 != 0x1F80 {
                // SAFETY: the value was read from MXCSR in `set`.
                unsafe { std::arch::asm!("ldmxcsr [{}]", in(reg) &saved, options(nostack, readonly)) };
            }
        }
        #[cfg(target_arch = "aarch64")]
        // SAFETY: the value was read from FPCR in `set`.
        unsafe {
            std::arch::asm!("msr fpcr, {}", in(reg) self.saved, options(nostack))
        };
    }
}
