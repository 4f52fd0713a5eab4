//! Loops over rows, written so that the compiler vectorises them in whatever instruction set the caller is compiled for.
//!
//! Iterator adapters that take closures (`for_each`, `fold`) are not used here: they may be compiled out of line, for the
//! target's baseline, where a fused multiply-add is a library call.

#![allow(clippy::needless_range_loop, reason = "index loops over equal lengths are what the compiler vectorises")]

use super::numerics::{canonical, from_bf16, join, split, to_bf16};

/// `y += w x`, one fma each.
#[inline(always)]
pub fn axpy(y: &mut [f32], w: f32, x: &[f32]) {
    let n = y.len().min(x.len());
    let (y, x) = (&mut y[..n], &x[..n]);
    for i in 0..n {
        y[i] = w.mul_add(x[i], y[i]);
    }
}

/// `y *= w`.
#[inline(always)]
pub fn scale(y: &mut [f32], w: f32) {
    for y in y {
        *y *= w;
    }
}

/// `y += x`.
#[inline(always)]
pub fn add(y: &mut [f32], x: &[f32]) {
    let n = y.len().min(x.len());
    let (y, x) = (&mut y[..n], &x[..n]);
    for i in 0..n {
        y[i] += x[i];
    }
}

/// `y = x`, as far as both go.
#[inline(always)]
pub fn copy(y: &mut [f32], x: &[f32]) {
    let n = y.len().min(x.len());
    y[..n].copy_from_slice(&x[..n]);
}

/// The same values as fp32.
#[inline(always)]
pub fn load_bf16(to: &mut [f32], from: &[u16]) {
    let n = to.len().min(from.len());
    let (to, from) = (&mut to[..n], &from[..n]);
    for i in 0..n {
        to[i] = from_bf16(from[i]);
    }
}

/// Nearest bfloat16s.
#[inline(always)]
pub fn store_bf16(to: &mut [u16], from: &[f32]) {
    let n = to.len().min(from.len());
    let (to, from) = (&mut to[..n], &from[..n]);
    for i in 0..n {
        to[i] = to_bf16(from[i]);
    }
}

/// The same values, NaNs canonical.
#[inline(always)]
pub fn store_f32(to: &mut [f32], from: &[f32]) {
    let n = to.len().min(from.len());
    let (to, from) = (&mut to[..n], &from[..n]);
    for i in 0..n {
        to[i] = canonical(from[i]);
    }
}

/// fp32 values from their planes.
#[inline(always)]
pub fn load_planes(to: &mut [f32], high: &[u16], low: &[i16]) {
    let n = to.len().min(high.len()).min(low.len());
    let (to, high, low) = (&mut to[..n], &high[..n], &low[..n]);
    for i in 0..n {
        to[i] = join(high[i], low[i]);
    }
}

/// The planes of fp32 values, NaNs canonical.
#[inline(always)]
pub fn store_planes(high: &mut [u16], low: &mut [i16], from: &[f32]) {
    let n = from.len().min(high.len()).min(low.len());
    let (high, low, from) = (&mut high[..n], &mut low[..n], &from[..n]);
    for i in 0..n {
        (high[i], low[i]) = split(canonical(from[i]));
    }
}
