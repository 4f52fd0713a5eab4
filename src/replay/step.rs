//! What a token does to a tile of state: the plain fp32 update, written once.
//!
//! A tile is up to 16 rows of one head's state, each padded with zeros to a multiple of 32 columns. The backends load
//! and store tiles; the arithmetic between is here, and every backend and instruction set gives the same bytes.

#![allow(clippy::needless_range_loop, reason = "index loops over equal lengths are what the compiler vectorises")]

use super::config::{MAX_DIM, TILE_ROWS};
use super::numerics::{CLASSES, Decay, decay, from_bf16, reduce, split};

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
        let n = n.min(MAX_COLUMNS);
        for i in 0..n {
            let d = Decay::new(g.0[i]);
            (factors.0[i], slow[i]) = (d.factor, d.slow);
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

    /// Makes this a tile of as many rows, whose contents are to be written. The padding stays zero.
    #[inline(always)]
    pub fn reshape(&mut self, rows: usize) {
        debug_assert!(rows <= TILE_ROWS);
        self.rows = rows;
    }

    /// Replaces every element by its high plane.
    #[inline(always)]
    pub fn to_high(&mut self) {
        for value in &mut self.values[..self.rows * self.padded] {
            *value = from_bf16(split(*value).0);
        }
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

    /// Mamba-2: `S = fma(xd, B, S')` with `xd = dt x` per row and S' the decayed state; returns `S . C`.
    #[inline(always)]
    pub fn update_dot(&mut self, d: Decay, xd: &[f32; TILE_ROWS], b: &Columns, c: &Columns) -> [f32; TILE_ROWS] {
        let (padded, columns) = (self.padded, self.columns);
        let mut out = [0f32; TILE_ROWS];
        for r in 0..self.rows.min(TILE_ROWS) {
            let row = &mut self.values[r * padded..(r + 1) * padded];
            out[r] = if d.slow {
                row_update_dot(row, columns, &b.0, &c.0, |s, b| xd[r].mul_add(b, s.mul_add(d.factor, s)))
            } else {
                row_update_dot(row, columns, &b.0, &c.0, |s, b| xd[r].mul_add(b, s * d.factor))
            };
        }
        out
    }

    /// Mamba-2 without an output.
    #[inline(always)]
    pub fn update(&mut self, d: Decay, xd: &[f32; TILE_ROWS], b: &Columns) {
        let (padded, columns) = (self.padded, self.columns);
        for r in 0..self.rows.min(TILE_ROWS) {
            let row = &mut self.values[r * padded..r * padded + columns];
            let b = &b.0[..columns];
            if d.slow {
                for i in 0..columns {
                    row[i] = xd[r].mul_add(b[i], row[i].mul_add(d.factor, row[i]));
                }
            } else {
                for i in 0..columns {
                    row[i] = xd[r].mul_add(b[i], row[i] * d.factor);
                }
            }
        }
    }

    /// Delta rule: `u = beta (v - S' . k)`, `S = fma(u, k, S')`. Returns u; k is normalised.
    #[inline(always)]
    pub fn delta(&mut self, d: &Decays, k: &Columns, beta: f32, v: &[f32; TILE_ROWS]) -> [f32; TILE_ROWS] {
        let (padded, columns) = (self.padded, self.columns);
        let mut u = [0f32; TILE_ROWS];
        for r in 0..self.rows.min(TILE_ROWS) {
            let row = &mut self.values[r * padded..(r + 1) * padded];
            let predicted = match d {
                Decays::Head(d) if d.slow => row_update_dot(row, columns, &k.0, &k.0, |s, _| s.mul_add(d.factor, s)),
                Decays::Head(d) => row_update_dot(row, columns, &k.0, &k.0, |s, _| s * d.factor),
                Decays::Columns(factors, slow) => {
                    for i in 0..columns {
                        row[i] = decay(row[i], Decay { factor: factors.0[i], slow: slow[i] });
                    }
                    dot(row, &k.0)
                }
            };
            u[r] = beta * (v[r] - predicted);
            let row = &mut row[..columns];
            let k = &k.0[..columns];
            for i in 0..columns {
                row[i] = u[r].mul_add(k[i], row[i]);
            }
        }
        u
    }

    /// The canonical dot product of every row with `c`.
    #[inline(always)]
    pub fn dot(&self, c: &Columns) -> [f32; TILE_ROWS] {
        let mut out = [0f32; TILE_ROWS];
        for r in 0..self.rows.min(TILE_ROWS) {
            out[r] = dot(&self.values[r * self.padded..(r + 1) * self.padded], &c.0);
        }
        out
    }
}

/// Changes the first `columns` elements of a padded row and returns its canonical dot product with `c`.
#[inline(always)]
fn row_update_dot(row: &mut [f32], columns: usize, b: &[f32], c: &[f32], update: impl Fn(f32, f32) -> f32) -> f32 {
    let mut classes = [0f32; CLASSES];
    let (row, b, c) = (row.as_chunks_mut::<CLASSES>().0, b.as_chunks::<CLASSES>().0, c.as_chunks::<CLASSES>().0);
    let whole = (columns / CLASSES).min(row.len()).min(b.len()).min(c.len());
    for j in 0..whole {
        let (row, b, c) = (&mut row[j], &b[j], &c[j]);
        for i in 0..CLASSES {
            let s = update(row[i], b[i]);
            row[i] = s;
            classes[i] = s.mul_add(c[i], classes[i]);
        }
    }
    // The last block keeps its padding at zero, whatever the inputs are.
    if whole < row.len() {
        let (row, b, c) = (&mut row[whole], &b[whole], &c[whole]);
        for i in 0..columns % CLASSES {
            row[i] = update(row[i], b[i]);
        }
        for i in 0..CLASSES {
            classes[i] = row[i].mul_add(c[i], classes[i]);
        }
    }
    reduce(&classes)
}

/// The canonical dot product: 32 classes, each an ascending fma chain from +0, added by butterflies. `a` has a multiple
/// of 32 elements, `b` at least as many.
#[inline(always)]
pub fn dot(a: &[f32], b: &[f32]) -> f32 {
    let mut classes = [0f32; CLASSES];
    let (a, b) = (a.as_chunks::<CLASSES>().0, b.as_chunks::<CLASSES>().0);
    for j in 0..a.len().min(b.len()) {
        let (a, b) = (&a[j], &b[j]);
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
