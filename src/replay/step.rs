//! What a token does to a tile of state: the plain fp32 update, written once.
//!
//! A tile is up to 16 rows of one head's state, each padded with zeros to a multiple of 32 columns. The backends load
//! and store tiles; the arithmetic between is here, and every backend and instruction set gives the same bytes.

use super::config::{MAX_DIM, TILE_ROWS};
use super::numerics::{CLASSES, Decay, decay, reduce};

/// What happens to a tile's columns in front of a token.
#[allow(clippy::large_enum_variant, reason = "lives on the stack for one token")]
pub enum Decays {
    /// One log decay for all.
    Head(Decay),
    /// One per column: the factors, and for each whether it is slow.
    Columns(Columns, [bool; MAX_COLUMNS]),
}

impl Decays {
    /// The decays of a token whose log decays per column are `g`.
    #[inline(always)]
    pub fn columns(g: &Columns, n: usize) -> Self {
        let mut factors = Columns::zero();
        let mut slow = [false; MAX_COLUMNS];
        for ((factor, slow), &g) in factors.0.iter_mut().zip(&mut slow).zip(&g.0).take(n) {
            let d = Decay::new(g);
            (*factor, *slow) = (d.factor, d.slow);
        }
        Decays::Columns(factors, slow)
    }
}

/// Widest padded row.
pub const MAX_COLUMNS: usize = MAX_DIM as usize;

/// Columns of a padded row.
#[inline(always)]
pub fn padded(columns: usize) -> usize {
    columns.next_multiple_of(CLASSES)
}

/// A vector over a head's columns, zero behind its end.
#[derive(Clone)]
#[repr(C, align(64))]
pub struct Columns(pub [f32; MAX_COLUMNS]);

impl Columns {
    /// All zero.
    #[inline(always)]
    pub fn zero() -> Self {
        Columns([0.0; MAX_COLUMNS])
    }
}

/// A tile of state in fp32.
#[repr(C, align(64))]
pub struct Tile {
    values: [f32; TILE_ROWS * MAX_COLUMNS],
    rows: usize,
    columns: usize,
    padded: usize,
}

impl Tile {
    /// A tile of zeros.
    #[inline(always)]
    pub fn zero(rows: usize, columns: usize) -> Self {
        debug_assert!(rows <= TILE_ROWS && columns <= MAX_COLUMNS);
        Tile { values: [0.0; TILE_ROWS * MAX_COLUMNS], rows, columns, padded: padded(columns) }
    }

    /// Makes this a tile of other dimensions; its padding is zero again.
    #[inline(always)]
    pub fn reshape(&mut self, rows: usize) {
        debug_assert!(rows <= TILE_ROWS);
        self.rows = rows;
    }

    /// Rows in use.
    #[inline(always)]
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// One row, without padding.
    #[inline(always)]
    pub fn row(&self, row: usize) -> &[f32] {
        let start = row * self.padded;
        &self.values[start..start + self.columns]
    }

    /// One row, without padding.
    #[inline(always)]
    pub fn row_mut(&mut self, row: usize) -> &mut [f32] {
        let start = row * self.padded;
        &mut self.values[start..start + self.columns]
    }

    /// Mamba-2: `S = fma(xd, B, S')` with `xd = dt x` per row and S' the decayed state.
    #[inline(always)]
    pub fn update(&mut self, d: Decay, xd: &[f32; TILE_ROWS], b: &Columns) {
        let (padded, columns) = (self.padded, self.columns);
        for (row, &xd) in self.values.chunks_exact_mut(padded).zip(xd).take(self.rows) {
            // The padding stays zero: an infinite xd times a padding zero would be a NaN.
            for (s, &b) in row[..columns].iter_mut().zip(&b.0) {
                *s = xd.mul_add(b, decay(*s, d));
            }
        }
    }

    /// Delta rule: `u = beta (v - S' . k)`, `S = fma(u, k, S')`. Returns u; k is normalised.
    #[inline(always)]
    pub fn delta(&mut self, d: &Decays, k: &Columns, beta: f32, v: &[f32; TILE_ROWS]) -> [f32; TILE_ROWS] {
        let (padded, columns) = (self.padded, self.columns);
        let mut u = [0f32; TILE_ROWS];
        for ((row, u), &v) in self.values.chunks_exact_mut(padded).zip(&mut u).zip(v).take(self.rows) {
            match d {
                Decays::Head(d) => row[..columns].iter_mut().for_each(|s| *s = decay(*s, *d)),
                Decays::Columns(factors, slow) => {
                    for ((s, &factor), &slow) in row[..columns].iter_mut().zip(&factors.0).zip(slow) {
                        *s = decay(*s, Decay { factor, slow });
                    }
                }
            }
            *u = beta * (v - dot(row, &k.0));
            for (s, &k) in row[..columns].iter_mut().zip(&k.0) {
                *s = u.mul_add(k, *s);
            }
        }
        u
    }

    /// The canonical dot product of every row with `c`.
    #[inline(always)]
    pub fn dot(&self, c: &Columns) -> [f32; TILE_ROWS] {
        let mut out = [0f32; TILE_ROWS];
        for (row, out) in self.values.chunks_exact(self.padded).zip(&mut out).take(self.rows) {
            *out = dot(row, &c.0);
        }
        out
    }
}

/// The canonical dot product: 32 classes, each an ascending fma chain from +0, added by butterflies. `a` has a multiple
/// of 32 elements, `b` at least as many.
#[inline(always)]
pub fn dot(a: &[f32], b: &[f32]) -> f32 {
    let mut classes = [0f32; CLASSES];
    for (a, b) in a.as_chunks::<CLASSES>().0.iter().zip(b.as_chunks::<CLASSES>().0) {
        for i in 0..CLASSES {
            classes[i] = a[i].mul_add(b[i], classes[i]);
        }
    }
    reduce(&classes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_infinite_input_does_not_leak_through_the_padding() {
        let mut tile = Tile::zero(2, 5);
        let mut b = Columns::zero();
        b.0[..5].fill(1.0);
        let mut xd = [0.0; TILE_ROWS];
        xd[0] = f32::INFINITY;
        tile.update(Decay::new(-0.5), &xd, &b);
        assert_eq!(tile.dot(&b)[0], f32::INFINITY);
        assert_eq!(tile.dot(&b)[1], 0.0);
    }
}
