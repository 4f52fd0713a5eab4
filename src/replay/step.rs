//! What a token does to a tile of state: the plain fp32 update, written once.
//!
//! A tile is up to 16 rows of one head's state. The functions here go over a tile block by block (32 columns) in the
//! caller's instruction set ([`Lanes`]), from and to wherever the rows are: a checkpoint in memory, or a [`Tile`] on the
//! stack between two calls. Every backend and instruction set gives the same bytes.
//!
//! A row's last block may be shorter than 32; it is computed on a copy padded with zeros, and the padding never takes part.

#![allow(clippy::needless_range_loop, reason = "index loops over equal lengths are what the compiler vectorises")]

use super::config::{MAX_DIM, TILE_ROWS};
use super::lanes::{BLOCK, Lanes, Task};
use super::numerics::{CLASSES, Decay, reduce};
use super::vector;

/// Widest padded row.
pub const MAX_COLUMNS: usize = MAX_DIM as usize;

/// Columns of a padded row.
#[inline(always)]
pub fn padded(columns: usize) -> usize {
    columns.next_multiple_of(BLOCK)
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

    /// Its blocks.
    #[inline(always)]
    fn blocks(&self) -> &[[f32; BLOCK]; MAX_COLUMNS / BLOCK] {
        const { assert!(MAX_COLUMNS.is_multiple_of(BLOCK)) };
        self.0.as_chunks().0.first_chunk().expect("as many blocks as there are")
    }
}

/// What happens to a tile's columns in front of a token.
#[allow(clippy::large_enum_variant, reason = "kept in arrays, which are as large as the largest anyway")]
pub enum Decays {
    /// One log decay for all.
    Head(Decay),
    /// One per column: the factors, and all bits set where the decay is slow, none where it is fast.
    Columns(Columns, Columns),
}

impl Decays {
    /// Becomes the decays of a token whose log decays per column are `g`.
    #[inline(always)]
    pub fn set_columns(&mut self, g: &[f32]) {
        if !matches!(self, Decays::Columns(..)) {
            *self = Decays::Columns(Columns::zero(), Columns::zero());
        }
        if let Decays::Columns(factors, slow) = self {
            let n = g.len().min(MAX_COLUMNS);
            let (factors, slow, g) = (&mut factors.0[..n], &mut slow.0[..n], &g[..n]);
            for i in 0..n {
                let d = Decay::new(g[i]);
                factors[i] = d.factor;
                slow[i] = f32::from_bits(if d.slow { u32::MAX } else { 0 });
            }
        }
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
    /// No rows of no columns, zero to the last byte.
    pub const EMPTY: Self = Tile { values: [0.0; TILE_ROWS * MAX_COLUMNS], rows: 0, columns: 0, padded: 0 };

    /// Makes an empty tile one of whole height, of zeros.
    #[inline(always)]
    pub fn begin(&mut self, columns: usize) {
        debug_assert!(self.columns == 0 && columns <= MAX_COLUMNS);
        (self.rows, self.columns, self.padded) = (TILE_ROWS, columns, padded(columns));
    }

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
}

/// Rows of state, wherever they are. `row` counts from the tile's first.
pub trait Memory {
    /// One of the rows.
    type Row<'r>: Row
    where
        Self: 'r;
    /// The row that begins at element `start`, of `columns` elements.
    fn row(&mut self, row: usize, columns: usize) -> Self::Row<'_>;
}

/// A row of state: whole blocks, and a rest that is shorter.
pub trait Row {
    /// Block `j`.
    fn block<L: Lanes>(&self, l: L, j: usize) -> L::V;
    /// The rest, and zeros.
    fn rest<L: Lanes>(&self, l: L) -> L::V;
    /// Writes block `j`.
    fn set_block<L: Lanes>(&mut self, l: L, j: usize, v: L::V);
    /// Writes the rest.
    fn set_rest(&mut self, v: &[f32; BLOCK]);
    /// Begins to bring near what will be read in block `j`'s place soon.
    #[inline(always)]
    fn prefetch<L: Lanes>(&self, _l: L, _j: usize) {}
}

/// Begins to bring a block near that lies `ahead` elements behind another.
#[inline(always)]
fn prefetch<L: Lanes, T>(l: L, from: &[T; BLOCK], ahead: usize) {
    const LINE: usize = 64;
    let at = from.as_ptr().wrapping_add(ahead).cast::<u8>();
    let mut line = 0;
    while line < size_of::<T>() * BLOCK {
        l.prefetch(at.wrapping_add(line));
        line += LINE;
    }
}

/// Part of a slice that holds a row.
#[inline(always)]
fn part<T>(data: &mut [T], row: usize, columns: usize) -> (&mut [[T; BLOCK]], &mut [T]) {
    data[row * columns..(row + 1) * columns].as_chunks_mut()
}

/// An fp32 checkpoint's rows, one behind the other.
pub struct F32Rows<'a> {
    /// The rows.
    pub data: &'a mut [f32],
}

/// A row of [`F32Rows`].
pub struct F32Row<'r> {
    blocks: &'r mut [[f32; BLOCK]],
    rest: &'r mut [f32],
}

impl Memory for F32Rows<'_> {
    type Row<'r>
        = F32Row<'r>
    where
        Self: 'r;

    #[inline(always)]
    fn row(&mut self, row: usize, columns: usize) -> F32Row<'_> {
        let (blocks, rest) = part(self.data, row, columns);
        F32Row { blocks, rest }
    }
}

impl Row for F32Row<'_> {
    #[inline(always)]
    fn block<L: Lanes>(&self, l: L, j: usize) -> L::V {
        l.load(&self.blocks[j])
    }

    #[inline(always)]
    fn rest<L: Lanes>(&self, l: L) -> L::V {
        let mut v = [0f32; BLOCK];
        v[..self.rest.len()].copy_from_slice(self.rest);
        l.load(&v)
    }

    #[inline(always)]
    fn set_block<L: Lanes>(&mut self, l: L, j: usize, v: L::V) {
        l.store(l.canonical(v), &mut self.blocks[j]);
    }

    #[inline(always)]
    fn set_rest(&mut self, v: &[f32; BLOCK]) {
        vector::store_f32(self.rest, v);
    }
}

/// A split checkpoint's rows, one behind the other in both planes.
pub struct PlaneRows<'a> {
    /// Rows of the high plane.
    pub high: &'a mut [u16],
    /// Rows of the low plane.
    pub low: &'a mut [i16],
}

/// A row of [`PlaneRows`].
pub struct PlaneRow<'r> {
    high: &'r mut [[u16; BLOCK]],
    low: &'r mut [[i16; BLOCK]],
    rest: (&'r mut [u16], &'r mut [i16]),
}

impl Memory for PlaneRows<'_> {
    type Row<'r>
        = PlaneRow<'r>
    where
        Self: 'r;

    #[inline(always)]
    fn row(&mut self, row: usize, columns: usize) -> PlaneRow<'_> {
        let ((high, rest_high), (low, rest_low)) = (part(self.high, row, columns), part(self.low, row, columns));
        PlaneRow { high, low, rest: (rest_high, rest_low) }
    }
}

impl Row for PlaneRow<'_> {
    #[inline(always)]
    fn block<L: Lanes>(&self, l: L, j: usize) -> L::V {
        l.load_planes(&self.high[j], &self.low[j])
    }

    #[inline(always)]
    fn rest<L: Lanes>(&self, l: L) -> L::V {
        let mut v = [0f32; BLOCK];
        vector::load_planes(&mut v, self.rest.0, self.rest.1);
        l.load(&v)
    }

    #[inline(always)]
    fn set_block<L: Lanes>(&mut self, l: L, j: usize, v: L::V) {
        l.store_planes(l.canonical(v), &mut self.high[j], &mut self.low[j]);
    }

    #[inline(always)]
    fn set_rest(&mut self, v: &[f32; BLOCK]) {
        vector::store_planes(self.rest.0, self.rest.1, v);
    }
}

/// bfloat16 rows, one behind the other, that are only read: a high plane, or a BF16 checkpoint.
pub struct Bf16Rows<'a> {
    /// The rows.
    pub data: &'a [u16],
    /// Distance of the rows to prefetch, in elements; 0 if there are none.
    pub ahead: usize,
}

/// A row of [`Bf16Rows`].
pub struct Bf16Row<'r> {
    blocks: &'r [[u16; BLOCK]],
    rest: &'r [u16],
    ahead: usize,
}

impl Memory for Bf16Rows<'_> {
    type Row<'r>
        = Bf16Row<'r>
    where
        Self: 'r;

    #[inline(always)]
    fn row(&mut self, row: usize, columns: usize) -> Bf16Row<'_> {
        let (blocks, rest) = self.data[row * columns..(row + 1) * columns].as_chunks();
        Bf16Row { blocks, rest, ahead: self.ahead }
    }
}

impl Row for Bf16Row<'_> {
    #[inline(always)]
    fn block<L: Lanes>(&self, l: L, j: usize) -> L::V {
        l.load_bf16(&self.blocks[j])
    }

    #[inline(always)]
    fn rest<L: Lanes>(&self, l: L) -> L::V {
        let mut v = [0f32; BLOCK];
        vector::load_bf16(&mut v, self.rest);
        l.load(&v)
    }

    #[inline(always)]
    fn set_block<L: Lanes>(&mut self, _l: L, _j: usize, _v: L::V) {
        debug_assert!(false, "these rows are only read");
    }

    #[inline(always)]
    fn set_rest(&mut self, _v: &[f32; BLOCK]) {
        debug_assert!(false, "these rows are only read");
    }

    #[inline(always)]
    fn prefetch<L: Lanes>(&self, l: L, j: usize) {
        if self.ahead > 0 {
            prefetch(l, &self.blocks[j], self.ahead);
        }
    }
}

/// A row of a [`Tile`]; its rest is a whole block with zeros behind.
pub struct TileRow<'r> {
    blocks: &'r mut [[f32; BLOCK]],
    whole: usize,
}

impl Memory for Tile {
    type Row<'r> = TileRow<'r>;

    #[inline(always)]
    fn row(&mut self, row: usize, columns: usize) -> TileRow<'_> {
        let (blocks, _) = part(&mut self.values, row, padded(columns));
        TileRow { blocks, whole: columns / BLOCK }
    }
}

impl Row for TileRow<'_> {
    #[inline(always)]
    fn block<L: Lanes>(&self, l: L, j: usize) -> L::V {
        l.load(&self.blocks[j])
    }

    #[inline(always)]
    fn rest<L: Lanes>(&self, l: L) -> L::V {
        l.load(&self.blocks[self.whole])
    }

    #[inline(always)]
    fn set_block<L: Lanes>(&mut self, l: L, j: usize, v: L::V) {
        l.store(v, &mut self.blocks[j]);
    }

    #[inline(always)]
    fn set_rest(&mut self, v: &[f32; BLOCK]) {
        self.blocks[self.whole] = *v;
    }
}

/// No rows: the memory of a call that only uses the tile.
pub struct NoMemory;

/// A row of [`NoMemory`].
pub struct NoRow;

impl Memory for NoMemory {
    type Row<'r> = NoRow;

    #[inline(always)]
    fn row(&mut self, _row: usize, _columns: usize) -> NoRow {
        NoRow
    }
}

impl Row for NoRow {
    #[inline(always)]
    fn block<L: Lanes>(&self, l: L, _j: usize) -> L::V {
        l.splat(0.0)
    }

    #[inline(always)]
    fn rest<L: Lanes>(&self, l: L) -> L::V {
        l.splat(0.0)
    }

    #[inline(always)]
    fn set_block<L: Lanes>(&mut self, _l: L, _j: usize, _v: L::V) {}

    #[inline(always)]
    fn set_rest(&mut self, _v: &[f32; BLOCK]) {}
}

/// Rows that are changed where they are.
struct InPlace<'a, M>(&'a mut M);

/// Rows that come from one place and go to another.
struct Moved<'a, A, B>(&'a mut A, &'a mut B);

/// Rows that are not written.
struct ReadOnly<'a, M>(&'a mut M);

/// A row of [`Moved`] and [`ReadOnly`].
struct Pair<A, B>(A, B);

impl<A: Row, B: Row> Row for Pair<A, B> {
    #[inline(always)]
    fn block<L: Lanes>(&self, l: L, j: usize) -> L::V {
        self.0.block(l, j)
    }

    #[inline(always)]
    fn rest<L: Lanes>(&self, l: L) -> L::V {
        self.0.rest(l)
    }

    #[inline(always)]
    fn set_block<L: Lanes>(&mut self, l: L, j: usize, v: L::V) {
        self.1.set_block(l, j, v);
    }

    #[inline(always)]
    fn set_rest(&mut self, v: &[f32; BLOCK]) {
        self.1.set_rest(v);
    }

    #[inline(always)]
    fn prefetch<L: Lanes>(&self, l: L, j: usize) {
        self.0.prefetch(l, j);
    }
}

impl<M: Memory> Memory for InPlace<'_, M> {
    type Row<'r>
        = M::Row<'r>
    where
        Self: 'r;

    #[inline(always)]
    fn row(&mut self, row: usize, columns: usize) -> M::Row<'_> {
        self.0.row(row, columns)
    }
}

impl<A: Memory, B: Memory> Memory for Moved<'_, A, B> {
    type Row<'r>
        = Pair<A::Row<'r>, B::Row<'r>>
    where
        Self: 'r;

    #[inline(always)]
    fn row(&mut self, row: usize, columns: usize) -> Self::Row<'_> {
        Pair(self.0.row(row, columns), self.1.row(row, columns))
    }
}

impl<M: Memory> Memory for ReadOnly<'_, M> {
    type Row<'r>
        = Pair<M::Row<'r>, NoRow>
    where
        Self: 'r;

    #[inline(always)]
    fn row(&mut self, row: usize, columns: usize) -> Self::Row<'_> {
        Pair(self.0.row(row, columns), NoRow)
    }
}

/// Size of a tile.
#[derive(Debug, Clone, Copy)]
pub struct Size {
    /// Rows, at most 16.
    pub rows: usize,
    /// Columns.
    pub columns: usize,
}

/// What a pass does to every block of a tile.
trait Change: Copy {
    /// What it does to a row.
    type Row<L: Lanes>: ChangeRow<L>;
    /// Gets ready for a row.
    fn row<L: Lanes>(self, l: L, row: usize) -> Self::Row<L>;
}

trait ChangeRow<L: Lanes> {
    /// The new values of block `j`.
    fn apply(&self, l: L, j: usize, s: L::V) -> L::V;
}

/// What a pass multiplies the new values with.
trait Against: Copy {
    /// Whether there is anything.
    const ANY: bool;
    /// Adds the block's products to the row's classes.
    fn add<L: Lanes>(self, l: L, j: usize, s: L::V, classes: L::V) -> L::V;
}

impl Against for () {
    const ANY: bool = false;

    #[inline(always)]
    fn add<L: Lanes>(self, _l: L, _j: usize, _s: L::V, classes: L::V) -> L::V {
        classes
    }
}

impl Against for &Columns {
    const ANY: bool = true;

    #[inline(always)]
    fn add<L: Lanes>(self, l: L, j: usize, s: L::V, classes: L::V) -> L::V {
        l.fma(s, l.load(&self.blocks()[j]), classes)
    }
}

/// As `&Columns`, of the values' high planes.
#[derive(Clone, Copy)]
struct HighPlane<'a>(&'a Columns);

impl Against for HighPlane<'_> {
    const ANY: bool = true;

    #[inline(always)]
    fn add<L: Lanes>(self, l: L, j: usize, s: L::V, classes: L::V) -> L::V {
        // As they are stored: canonical, so that no NaN's payload carries into the sign.
        l.fma(l.high(l.canonical(s)), l.load(&self.0.blocks()[j]), classes)
    }
}

/// Goes over a tile once: changes every block, and returns every new row's canonical dot product.
struct Pass<R, C, A> {
    size: Size,
    rows: R,
    change: C,
    against: A,
}

impl<R: Memory, C: Change, A: Against> Task for Pass<R, C, A> {
    type Output = [f32; TILE_ROWS];

    #[inline(always)]
    fn run<L: Lanes>(self, l: L) -> [f32; TILE_ROWS] {
        let Pass { size, mut rows, change, against } = self;
        let (columns, whole, rest) = (size.columns, (size.columns / BLOCK).min(MAX_BLOCKS), size.columns % BLOCK);
        let mut out = [0f32; TILE_ROWS];
        for (group, out) in out.as_chunks_mut::<4>().0.iter_mut().enumerate() {
            let first = 4 * group;
            if first >= size.rows {
                break;
            }
            let mut classes = [l.splat(0.0); 4];
            for i in 0..4.min(size.rows - first) {
                let (mut row, change) = (rows.row(first + i, columns), change.row(l, first + i));
                let mut sums = l.splat(0.0);
                for j in 0..whole {
                    row.prefetch(l, j);
                    let s = change.apply(l, j, row.block(l, j));
                    row.set_block(l, j, s);
                    sums = against.add(l, j, s, sums);
                }
                if rest > 0 {
                    let s = change.apply(l, whole, row.rest(l));
                    let mut values = [0f32; BLOCK];
                    l.store(s, &mut values);
                    // Whatever the inputs are, the padding stays zero.
                    values[rest..].fill(0.0);
                    row.set_rest(&values);
                    sums = against.add(l, whole, l.load(&values), sums);
                }
                classes[i] = sums;
            }
            if A::ANY {
                *out = l.sums(&classes);
            }
        }
        out
    }
}

const _: () = assert!(TILE_ROWS.is_multiple_of(4), "rows are summed four at a time");

/// Blocks of the widest row.
pub const MAX_BLOCKS: usize = MAX_COLUMNS / BLOCK;

#[inline(always)]
fn pass<L: Lanes>(l: L, size: Size, rows: impl Memory, change: impl Change, against: impl Against) -> [f32; TILE_ROWS] {
    l.run(Pass { size, rows, change, against })
}

/// Nothing changes.
#[derive(Clone, Copy)]
struct Same;

impl Change for Same {
    type Row<L: Lanes> = Same;

    #[inline(always)]
    fn row<L: Lanes>(self, _l: L, _row: usize) -> Same {
        self
    }
}

impl<L: Lanes> ChangeRow<L> for Same {
    #[inline(always)]
    fn apply(&self, _l: L, _j: usize, s: L::V) -> L::V {
        s
    }
}

/// Which values the outputs of a call see.
#[derive(Clone, Copy)]
pub enum Output<'a> {
    /// None are wanted.
    None,
    /// The dot product of each row with this.
    Value(&'a Columns),
    /// The same of the rows' high planes; of a 16-bit state, once it is rounded.
    High(&'a Columns),
}

impl<'a> Output<'a> {
    /// What is wanted of a state that is yet to be rounded.
    #[inline(always)]
    pub fn unrounded(self) -> Self {
        if matches!(self, Output::High(_)) { Output::None } else { self }
    }
}

/// Tokens that a Mamba-2 state takes in, oldest first.
#[derive(Clone, Copy)]
pub struct Mamba2Tokens<'a> {
    /// Decays, one for the head.
    pub decays: &'a [Decay],
    /// B, as many.
    pub b: &'a [Columns],
    /// `dt x` of the tile's rows, as many.
    pub xd: &'a [[f32; TILE_ROWS]],
}

impl<'a> Change for Mamba2Tokens<'a> {
    type Row<L: Lanes> = (Self, usize);

    #[inline(always)]
    fn row<L: Lanes>(self, _l: L, row: usize) -> (Self, usize) {
        (self, row % TILE_ROWS)
    }
}

impl<L: Lanes> ChangeRow<L> for (Mamba2Tokens<'_>, usize) {
    #[inline(always)]
    fn apply(&self, l: L, j: usize, mut s: L::V) -> L::V {
        let (Mamba2Tokens { decays, b, xd }, row) = *self;
        let n = decays.len();
        let (b, xd) = (&b[..n], &xd[..n]);
        for i in 0..n {
            let factor = l.splat(decays[i].factor);
            s = if decays[i].slow { l.fma(s, factor, s) } else { l.mul(s, factor) };
            s = l.fma(l.splat(xd[i][row]), l.load(&b[i].blocks()[j]), s);
        }
        s
    }
}

/// One token: its decay, and B with `dt x`.
#[derive(Clone, Copy)]
struct Mamba2Token<'a, D> {
    decay: D,
    b: &'a Columns,
    xd: &'a [f32; TILE_ROWS],
}

struct Mamba2Row<'a, D, V> {
    decay: D,
    b: &'a Columns,
    xd: V,
}

impl<'a, D: Change> Change for Mamba2Token<'a, D> {
    type Row<L: Lanes> = Mamba2Row<'a, D::Row<L>, L::V>;

    #[inline(always)]
    fn row<L: Lanes>(self, l: L, row: usize) -> Self::Row<L> {
        Mamba2Row { decay: self.decay.row(l, row), b: self.b, xd: l.splat(self.xd[row % TILE_ROWS]) }
    }
}

impl<L: Lanes, D: ChangeRow<L>> ChangeRow<L> for Mamba2Row<'_, D, L::V> {
    #[inline(always)]
    fn apply(&self, l: L, j: usize, s: L::V) -> L::V {
        l.fma(self.xd, l.load(&self.b.blocks()[j]), self.decay.apply(l, j, s))
    }
}

/// Tokens that the state of a delta rule takes in, oldest first.
#[derive(Clone, Copy)]
pub struct DeltaTokens<'a> {
    /// Decays.
    pub decays: &'a [Decays],
    /// Normalised keys, as many.
    pub k: &'a [Columns],
    /// Update strengths, as many.
    pub beta: &'a [f32],
    /// Values of the tile's rows, as many.
    pub v: &'a [[f32; TILE_ROWS]],
}

/// `S = fma(u, k, S)`, then a decay.
#[derive(Clone, Copy)]
struct RankOneThen<'a, D> {
    u: &'a [f32; TILE_ROWS],
    k: &'a Columns,
    decay: D,
}

struct RankOneRow<'a, D, V> {
    u: V,
    k: &'a Columns,
    decay: D,
}

impl<'a, D: Change> Change for RankOneThen<'a, D> {
    type Row<L: Lanes> = RankOneRow<'a, D::Row<L>, L::V>;

    #[inline(always)]
    fn row<L: Lanes>(self, l: L, row: usize) -> Self::Row<L> {
        RankOneRow { u: l.splat(self.u[row % TILE_ROWS]), k: self.k, decay: self.decay.row(l, row) }
    }
}

impl<L: Lanes, D: ChangeRow<L>> ChangeRow<L> for RankOneRow<'_, D, L::V> {
    #[inline(always)]
    fn apply(&self, l: L, j: usize, s: L::V) -> L::V {
        self.decay.apply(l, j, l.fma(self.u, l.load(&self.k.blocks()[j]), s))
    }
}

/// The decays of a token: `fma(S, f, S)`, `S f`, or either for each column.
#[derive(Clone, Copy)]
struct Slow(f32);
#[derive(Clone, Copy)]
struct Fast(f32);
#[derive(Clone, Copy)]
struct PerColumn<'a>(&'a Columns, &'a Columns);

struct SlowRow<V>(V);
struct FastRow<V>(V);

impl Change for Slow {
    type Row<L: Lanes> = SlowRow<L::V>;

    #[inline(always)]
    fn row<L: Lanes>(self, l: L, _row: usize) -> SlowRow<L::V> {
        SlowRow(l.splat(self.0))
    }
}

impl<L: Lanes> ChangeRow<L> for SlowRow<L::V> {
    #[inline(always)]
    fn apply(&self, l: L, _j: usize, s: L::V) -> L::V {
        l.fma(s, self.0, s)
    }
}

impl Change for Fast {
    type Row<L: Lanes> = FastRow<L::V>;

    #[inline(always)]
    fn row<L: Lanes>(self, l: L, _row: usize) -> FastRow<L::V> {
        FastRow(l.splat(self.0))
    }
}

impl<L: Lanes> ChangeRow<L> for FastRow<L::V> {
    #[inline(always)]
    fn apply(&self, l: L, _j: usize, s: L::V) -> L::V {
        l.mul(s, self.0)
    }
}

impl<'a> Change for PerColumn<'a> {
    type Row<L: Lanes> = PerColumn<'a>;

    #[inline(always)]
    fn row<L: Lanes>(self, _l: L, _row: usize) -> PerColumn<'a> {
        self
    }
}

impl<L: Lanes> ChangeRow<L> for PerColumn<'_> {
    /// `fma(s, f, s)` where slow; where fast, `fma(s, f, -0)`, which is `s f` to the last bit and sign.
    #[inline(always)]
    fn apply(&self, l: L, j: usize, s: L::V) -> L::V {
        let (factors, slow) = (&self.0.blocks()[j], &self.1.blocks()[j]);
        l.fma(s, l.load(factors), l.or_minus_zero(s, l.load(slow)))
    }
}

/// A pass that ends with a token's decay, and returns `S' . k`.
#[inline(always)]
fn decayed<L: Lanes>(
    l: L,
    size: Size,
    rows: impl Memory,
    before: Option<(&[f32; TILE_ROWS], &Columns)>,
    decays: &Decays,
    k: &Columns,
) -> [f32; TILE_ROWS] {
    match (before, decays) {
        (None, Decays::Head(d)) if d.slow => pass(l, size, rows, Slow(d.factor), k),
        (None, Decays::Head(d)) => pass(l, size, rows, Fast(d.factor), k),
        (None, Decays::Columns(f, slow)) => pass(l, size, rows, PerColumn(f, slow), k),
        (Some((u, last)), Decays::Head(d)) if d.slow => {
            pass(l, size, rows, RankOneThen { u, k: last, decay: Slow(d.factor) }, k)
        }
        (Some((u, last)), Decays::Head(d)) => pass(l, size, rows, RankOneThen { u, k: last, decay: Fast(d.factor) }, k),
        (Some((u, last)), Decays::Columns(f, slow)) => {
            pass(l, size, rows, RankOneThen { u, k: last, decay: PerColumn(f, slow) }, k)
        }
    }
}

/// Where a call's rows come from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Source {
    /// The checkpoint.
    Memory,
    /// The checkpoint as an earlier call has stored it, still in the nearest cache.
    Stored,
    /// The tile, which an earlier call has left.
    Tile,
}

/// Where a call's rows go.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Target {
    /// The checkpoint.
    Memory,
    /// The tile, for another call.
    Tile,
    /// Nowhere: only the output is wanted.
    Nowhere,
}

/// Mamba-2: `S = fma(xd, B, S')` for each token, S' the decayed state. Returns what `output` asks of the last state.
#[allow(clippy::too_many_arguments, reason = "a tile, where it is and what it takes in")]
#[inline(always)]
pub fn mamba2<L: Lanes>(
    l: L,
    size: Size,
    memory: &mut impl Memory,
    tile: &mut Tile,
    from: Source,
    to: Target,
    tokens: Mamba2Tokens<'_>,
    output: Output<'_>,
) -> [f32; TILE_ROWS] {
    let one = match (tokens.decays, tokens.b, tokens.xd) {
        ([d], [b], [xd]) => Some((d, b, xd)),
        _ => None,
    };
    match one {
        Some((d, b, xd)) if d.slow => {
            placed(l, size, memory, tile, from, to, Mamba2Token { decay: Slow(d.factor), b, xd }, output)
        }
        Some((d, b, xd)) => {
            placed(l, size, memory, tile, from, to, Mamba2Token { decay: Fast(d.factor), b, xd }, output)
        }
        None => placed(l, size, memory, tile, from, to, tokens, output),
    }
}

#[allow(clippy::too_many_arguments, reason = "a tile, where it is and what happens to it")]
#[inline(always)]
fn placed<L: Lanes>(
    l: L,
    size: Size,
    memory: &mut impl Memory,
    tile: &mut Tile,
    from: Source,
    to: Target,
    change: impl Change,
    output: Output<'_>,
) -> [f32; TILE_ROWS] {
    match (from, to) {
        (Source::Memory | Source::Stored, Target::Memory) => changed(l, size, InPlace(memory), change, output),
        (Source::Memory | Source::Stored, Target::Tile) => changed(l, size, Moved(memory, tile), change, output),
        (Source::Memory | Source::Stored, Target::Nowhere) => changed(l, size, ReadOnly(memory), change, output),
        (Source::Tile, Target::Memory) => changed(l, size, Moved(tile, memory), change, output),
        (Source::Tile, Target::Tile) => changed(l, size, InPlace(tile), change, output),
        (Source::Tile, Target::Nowhere) => changed(l, size, ReadOnly(tile), change, output),
    }
}

#[inline(always)]
fn changed<L: Lanes>(l: L, size: Size, rows: impl Memory, change: impl Change, output: Output<'_>) -> [f32; TILE_ROWS] {
    match output {
        Output::None => pass(l, size, rows, change, ()),
        Output::Value(c) => pass(l, size, rows, change, c),
        Output::High(c) => pass(l, size, rows, change, HighPlane(c)),
    }
}

/// Delta rules: `u = beta (v - S' . k)`, `S = fma(u, k, S')` for each token (at least one), S' the decayed state; between
/// tokens the state is in `tile`. Returns u of the last token, and what `output` asks of the last state.
#[allow(clippy::too_many_arguments, reason = "a tile, where it is and what it takes in")]
#[inline(always)]
pub fn delta<L: Lanes>(
    l: L,
    size: Size,
    memory: &mut impl Memory,
    tile: &mut Tile,
    from: Source,
    to: Target,
    tokens: DeltaTokens<'_>,
    output: Output<'_>,
) -> ([f32; TILE_ROWS], [f32; TILE_ROWS]) {
    let mut u = [0f32; TILE_ROWS];
    let mut last: Option<&Columns> = None;
    for (((decays, k), &beta), v) in tokens.decays.iter().zip(tokens.k).zip(tokens.beta).zip(tokens.v) {
        let predicted = match (last, from) {
            (Some(last), _) => decayed(l, size, InPlace(tile), Some((&u, last)), decays, k),
            (None, Source::Memory | Source::Stored) => decayed(l, size, Moved(memory, tile), None, decays, k),
            (None, Source::Tile) => decayed(l, size, InPlace(tile), None, decays, k),
        };
        for r in 0..TILE_ROWS {
            u[r] = beta * (v[r] - predicted[r]);
        }
        last = Some(k);
    }
    let Some(k) = last else { return (u, [0.0; TILE_ROWS]) };
    let change = RankOneThen { u: &u, k, decay: Same };
    let out = match to {
        Target::Memory => changed(l, size, Moved(tile, memory), change, output),
        Target::Tile => changed(l, size, InPlace(tile), change, output),
        Target::Nowhere => changed(l, size, ReadOnly(tile), change, output),
    };
    (u, out)
}

/// Canonical dot products of all rows with up to `vectors.len()` vectors; `out` has as many.
#[inline(always)]
pub fn dots<L: Lanes>(l: L, size: Size, rows: &mut impl Memory, vectors: &[&Columns], out: &mut [[f32; TILE_ROWS]]) {
    for (vectors, out) in vectors.chunks(2).zip(out.chunks_mut(2)) {
        match (vectors, out) {
            ([a, b], [to_a, to_b]) => l.run(TwoDots { size, rows, with: [a, b], to: [to_a, to_b] }),
            ([a], [to_a]) => *to_a = pass(l, size, ReadOnly(rows), Same, *a),
            _ => {}
        }
    }
}

struct TwoDots<'a, R> {
    size: Size,
    rows: &'a mut R,
    with: [&'a Columns; 2],
    to: [&'a mut [f32; TILE_ROWS]; 2],
}

impl<R: Memory> Task for TwoDots<'_, R> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes>(self, l: L) {
        let TwoDots { size, rows, with: [a, b], to: [to_a, to_b] } = self;
        let (columns, whole, rest) = (size.columns, (size.columns / BLOCK).min(MAX_BLOCKS), size.columns % BLOCK);
        let (a, b) = (a.blocks(), b.blocks());
        let to = to_a.as_chunks_mut::<4>().0.iter_mut().zip(to_b.as_chunks_mut::<4>().0.iter_mut());
        for (group, (to_a, to_b)) in to.enumerate() {
            let first = 4 * group;
            if first >= size.rows {
                break;
            }
            let (mut with_a, mut with_b) = ([l.splat(0.0); 4], [l.splat(0.0); 4]);
            for i in 0..4.min(size.rows - first) {
                let row = rows.row(first + i, columns);
                let (mut sum_a, mut sum_b) = (l.splat(0.0), l.splat(0.0));
                for j in 0..whole {
                    row.prefetch(l, j);
                    let s = row.block(l, j);
                    sum_a = l.fma(s, l.load(&a[j]), sum_a);
                    sum_b = l.fma(s, l.load(&b[j]), sum_b);
                }
                if rest > 0 {
                    let s = row.rest(l);
                    sum_a = l.fma(s, l.load(&a[whole]), sum_a);
                    sum_b = l.fma(s, l.load(&b[whole]), sum_b);
                }
                (with_a[i], with_b[i]) = (sum_a, sum_b);
            }
            (*to_a, *to_b) = (l.sums(&with_a), l.sums(&with_b));
        }
    }
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
    use crate::replay::lanes::Portable;

    #[test]
    fn an_infinite_input_does_not_leak_through_the_padding() {
        let mut tile = Tile::zero(2, 5);
        let mut b = Columns::zero();
        b.0[..5].fill(1.0);
        let mut xd = [0.0; TILE_ROWS];
        xd[0] = f32::INFINITY;
        let tokens = Mamba2Tokens { decays: &[Decay::new(-0.5)], b: &[b.clone()], xd: &[xd] };
        let size = Size { rows: 2, columns: 5 };
        let mut nothing = NoMemory;
        let out =
            mamba2(Portable, size, &mut nothing, &mut tile, Source::Tile, Target::Tile, tokens, Output::Value(&b));
        assert_eq!(out[..2], [f32::INFINITY, 0.0]);
        let mut again = [[0f32; TILE_ROWS]];
        dots(Portable, size, &mut tile, &[&b], &mut again);
        assert_eq!(again[0][..2], [f32::INFINITY, 0.0]);
    }

    #[test]
    fn a_nan_of_any_payload_is_read_out_of_the_high_plane_as_one() {
        for bits in [0x7FFF_FFFF, 0xFFFF_FFFF, 0x7FFF_E000, 0x7FC0_0000, 0x7FA0_0001] {
            let (mut high, mut low) = ([0u16; 2 * BLOCK], [0i16; 2 * BLOCK]);
            let (mut one, mut xd) = (Columns::zero(), [0.0; TILE_ROWS]);
            one.0[..BLOCK].fill(1.0);
            xd[1] = f32::from_bits(bits);
            let tokens = Mamba2Tokens { decays: &[Decay::new(-0.5)], b: &[one.clone()], xd: &[xd] };
            let size = Size { rows: 2, columns: BLOCK };
            let mut memory = PlaneRows { high: &mut high, low: &mut low };
            let (from, to) = (Source::Memory, Target::Memory);
            let mut tile = Tile::zero(2, BLOCK);
            let out = mamba2(Portable, size, &mut memory, &mut tile, from, to, tokens, Output::High(&one));
            assert!(out[0] == 0.0 && out[1].is_nan(), "{bits:08x}");
            assert!(high[BLOCK..].iter().zip(&low[BLOCK..]).all(|(&high, &low)| (high, low) == (0x7FC0, 0)));
        }
    }
}
