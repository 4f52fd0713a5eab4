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
use super::numerics::{CLASSES, Decay, from_bf16, join, reduce, split};

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

    #[inline(always)]
    fn block(&self, j: usize) -> &[f32; BLOCK] {
        block(&self.0, j * BLOCK)
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
}

#[inline(always)]
fn block<T>(from: &[T], at: usize) -> &[T; BLOCK] {
    from[at..].first_chunk().expect("a block inside a row")
}

#[inline(always)]
fn block_mut<T>(from: &mut [T], at: usize) -> &mut [T; BLOCK] {
    from[at..].first_chunk_mut().expect("a block inside a row")
}

/// Prefetches a block `ahead` elements behind the one at `at`.
#[inline(always)]
fn prefetch<L: Lanes, T>(l: L, from: &[T], at: usize, ahead: usize) {
    if ahead == 0 {
        return;
    }
    let at = from.as_ptr().wrapping_add(at + ahead).cast::<u8>();
    for line in 0..(size_of::<T>() * BLOCK).div_ceil(LINE) {
        l.prefetch(at.wrapping_add(line * LINE));
    }
}

/// Bytes of a cache line.
const LINE: usize = 64;

/// Rows of state that can be read. `row` counts from the tile's first, `at` is a column.
pub trait Load {
    /// 32 columns.
    fn block<L: Lanes>(&self, l: L, row: usize, at: usize) -> L::V;
    /// Begins to bring near what will be read in this block's place when the next head has its turn.
    #[inline(always)]
    fn prefetch<L: Lanes>(&self, _l: L, _row: usize, _at: usize) {}
    /// The last `n` columns, and zeros.
    fn part<L: Lanes>(&self, l: L, row: usize, at: usize, n: usize) -> L::V;
}

/// Rows of state that can be written.
pub trait Store {
    /// 32 columns.
    fn set_block<L: Lanes>(&mut self, l: L, row: usize, at: usize, v: L::V);
    /// The last columns.
    fn set_part(&mut self, row: usize, at: usize, v: &[f32]);
}

/// An fp32 checkpoint: rows of `columns` elements.
pub struct F32Rows<'a> {
    /// The rows, one behind the other.
    pub data: &'a mut [f32],
    /// Elements of a row.
    pub columns: usize,
    /// Distance of the next head's rows to prefetch, in elements; 0 if there are none.
    pub ahead: usize,
}

impl Load for F32Rows<'_> {
    #[inline(always)]
    fn prefetch<L: Lanes>(&self, l: L, row: usize, at: usize) {
        prefetch(l, self.data, row * self.columns + at, self.ahead);
    }

    #[inline(always)]
    fn block<L: Lanes>(&self, l: L, row: usize, at: usize) -> L::V {
        l.load(block(self.data, row * self.columns + at))
    }

    #[inline(always)]
    fn part<L: Lanes>(&self, l: L, row: usize, at: usize, n: usize) -> L::V {
        let mut v = [0f32; BLOCK];
        let from = row * self.columns + at;
        v[..n].copy_from_slice(&self.data[from..from + n]);
        l.load(&v)
    }
}

impl Store for F32Rows<'_> {
    #[inline(always)]
    fn set_block<L: Lanes>(&mut self, l: L, row: usize, at: usize, v: L::V) {
        l.store(l.canonical(v), block_mut(self.data, row * self.columns + at));
    }

    #[inline(always)]
    fn set_part(&mut self, row: usize, at: usize, v: &[f32]) {
        let from = row * self.columns + at;
        super::vector::store_f32(&mut self.data[from..from + v.len()], v);
    }
}

/// A split checkpoint: rows of both planes.
pub struct PlaneRows<'a> {
    /// The high plane's rows.
    pub high: &'a mut [u16],
    /// The low plane's rows.
    pub low: &'a mut [i16],
    /// Elements of a row.
    pub columns: usize,
    /// Distance of the next head's rows to prefetch, in elements; 0 if there are none.
    pub ahead: usize,
}

impl Load for PlaneRows<'_> {
    #[inline(always)]
    fn prefetch<L: Lanes>(&self, l: L, row: usize, at: usize) {
        prefetch(l, self.high, row * self.columns + at, self.ahead);
        prefetch(l, self.low, row * self.columns + at, self.ahead);
    }

    #[inline(always)]
    fn block<L: Lanes>(&self, l: L, row: usize, at: usize) -> L::V {
        let from = row * self.columns + at;
        l.load_planes(block(self.high, from), block(self.low, from))
    }

    #[inline(always)]
    fn part<L: Lanes>(&self, l: L, row: usize, at: usize, n: usize) -> L::V {
        let mut v = [0f32; BLOCK];
        let from = row * self.columns + at;
        for i in 0..n {
            v[i] = join(self.high[from + i], self.low[from + i]);
        }
        l.load(&v)
    }
}

impl Store for PlaneRows<'_> {
    #[inline(always)]
    fn set_block<L: Lanes>(&mut self, l: L, row: usize, at: usize, v: L::V) {
        let from = row * self.columns + at;
        l.store_planes(l.canonical(v), block_mut(self.high, from), block_mut(self.low, from));
    }

    #[inline(always)]
    fn set_part(&mut self, row: usize, at: usize, v: &[f32]) {
        let from = row * self.columns + at;
        let to = from..from + v.len();
        super::vector::store_planes(&mut self.high[to.clone()], &mut self.low[to], v);
    }
}

/// bfloat16 rows, read only: a high plane, or a BF16 checkpoint.
pub struct Bf16Rows<'a> {
    /// The rows, one behind the other.
    pub data: &'a [u16],
    /// Elements of a row.
    pub columns: usize,
    /// Distance of the next head's rows to prefetch, in elements; 0 if there are none.
    pub ahead: usize,
}

impl Load for Bf16Rows<'_> {
    #[inline(always)]
    fn prefetch<L: Lanes>(&self, l: L, row: usize, at: usize) {
        prefetch(l, self.data, row * self.columns + at, self.ahead);
    }

    #[inline(always)]
    fn block<L: Lanes>(&self, l: L, row: usize, at: usize) -> L::V {
        l.load_bf16(block(self.data, row * self.columns + at))
    }

    #[inline(always)]
    fn part<L: Lanes>(&self, l: L, row: usize, at: usize, n: usize) -> L::V {
        let mut v = [0f32; BLOCK];
        let from = row * self.columns + at;
        super::vector::load_bf16(&mut v[..n], &self.data[from..from + n]);
        l.load(&v)
    }
}

impl Load for Tile {
    #[inline(always)]
    fn block<L: Lanes>(&self, l: L, row: usize, at: usize) -> L::V {
        l.load(block(&self.values, row * self.padded + at))
    }

    #[inline(always)]
    fn part<L: Lanes>(&self, l: L, row: usize, at: usize, _n: usize) -> L::V {
        self.block(l, row, at)
    }
}

impl Store for Tile {
    #[inline(always)]
    fn set_block<L: Lanes>(&mut self, l: L, row: usize, at: usize, v: L::V) {
        l.store(v, block_mut(&mut self.values, row * self.padded + at));
    }

    #[inline(always)]
    fn set_part(&mut self, row: usize, at: usize, v: &[f32]) {
        let from = row * self.padded + at;
        self.values[from..from + v.len()].copy_from_slice(v);
    }
}

/// Rows that can be both.
pub trait Memory: Load + Store {}

impl<M: Load + Store> Memory for M {}

/// Where rows come from and where they go.
pub trait Rows: Load + Store {}

/// Back to where they came from.
pub struct InPlace<'a, M>(pub &'a mut M);

/// To another place.
pub struct Moved<'a, A, B>(pub &'a A, pub &'a mut B);

/// Nowhere.
pub struct ReadOnly<'a, A>(pub &'a A);

macro_rules! rows {
    ($ty:ty, $($bounds:tt)*) => {
        impl<$($bounds)*> Load for $ty {
            #[inline(always)]
            fn block<L: Lanes>(&self, l: L, row: usize, at: usize) -> L::V {
                self.0.block(l, row, at)
            }

            #[inline(always)]
            fn part<L: Lanes>(&self, l: L, row: usize, at: usize, n: usize) -> L::V {
                self.0.part(l, row, at, n)
            }

            #[inline(always)]
            fn prefetch<L: Lanes>(&self, l: L, row: usize, at: usize) {
                self.0.prefetch(l, row, at);
            }
        }

        impl<$($bounds)*> Rows for $ty {}
    };
}
rows!(InPlace<'_, M>, M: Load + Store);
rows!(Moved<'_, A, B>, A: Load, B: Store);
rows!(ReadOnly<'_, A>, A: Load);

impl<M: Store> Store for InPlace<'_, M> {
    #[inline(always)]
    fn set_block<L: Lanes>(&mut self, l: L, row: usize, at: usize, v: L::V) {
        self.0.set_block(l, row, at, v);
    }

    #[inline(always)]
    fn set_part(&mut self, row: usize, at: usize, v: &[f32]) {
        self.0.set_part(row, at, v);
    }
}

impl<A, B: Store> Store for Moved<'_, A, B> {
    #[inline(always)]
    fn set_block<L: Lanes>(&mut self, l: L, row: usize, at: usize, v: L::V) {
        self.1.set_block(l, row, at, v);
    }

    #[inline(always)]
    fn set_part(&mut self, row: usize, at: usize, v: &[f32]) {
        self.1.set_part(row, at, v);
    }
}

impl<A> Store for ReadOnly<'_, A> {
    #[inline(always)]
    fn set_block<L: Lanes>(&mut self, _l: L, _row: usize, _at: usize, _v: L::V) {}

    #[inline(always)]
    fn set_part(&mut self, _row: usize, _at: usize, _v: &[f32]) {}
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
trait Change {
    /// The new values of 32 columns of a row.
    fn apply<L: Lanes>(&self, l: L, row: usize, j: usize, s: L::V) -> L::V;
}

/// What a pass multiplies the new values with.
trait Against {
    /// Whether there is anything.
    const ANY: bool;
    /// Adds the block's products to the row's classes.
    fn add<L: Lanes>(&self, l: L, j: usize, s: L::V, classes: L::V) -> L::V;
}

impl Against for () {
    const ANY: bool = false;

    #[inline(always)]
    fn add<L: Lanes>(&self, _l: L, _j: usize, _s: L::V, classes: L::V) -> L::V {
        classes
    }
}

impl Against for &Columns {
    const ANY: bool = true;

    #[inline(always)]
    fn add<L: Lanes>(&self, l: L, j: usize, s: L::V, classes: L::V) -> L::V {
        l.fma(s, l.load(self.block(j)), classes)
    }
}

/// As `&Columns`, of the values' high planes.
struct HighPlane<'a>(&'a Columns);

impl Against for HighPlane<'_> {
    const ANY: bool = true;

    #[inline(always)]
    fn add<L: Lanes>(&self, l: L, j: usize, s: L::V, classes: L::V) -> L::V {
        l.fma(l.high(s), l.load(self.0.block(j)), classes)
    }
}

/// Goes over a tile once: changes every block, and returns every new row's canonical dot product.
struct Pass<'a, R, C, A> {
    size: Size,
    rows: &'a mut R,
    change: &'a C,
    against: A,
}

impl<R: Rows, C: Change, A: Against> Task for Pass<'_, R, C, A> {
    type Output = [f32; TILE_ROWS];

    #[inline(always)]
    fn run<L: Lanes>(self, l: L) -> [f32; TILE_ROWS] {
        let (size, mut out) = (self.size, [0f32; TILE_ROWS]);
        let (whole, rest) = (size.columns / BLOCK, size.columns % BLOCK);
        for (group, out) in out.as_chunks_mut::<4>().0.iter_mut().enumerate() {
            let first = 4 * group;
            if first >= size.rows {
                break;
            }
            let mut classes = [l.splat(0.0); 4];
            for i in 0..4.min(size.rows - first) {
                let row = first + i;
                let mut sums = l.splat(0.0);
                for j in 0..whole {
                    self.rows.prefetch(l, row, j * BLOCK);
                    let s = self.change.apply(l, row, j, self.rows.block(l, row, j * BLOCK));
                    self.rows.set_block(l, row, j * BLOCK, s);
                    sums = self.against.add(l, j, s, sums);
                }
                if rest > 0 {
                    let at = whole * BLOCK;
                    let s = self.change.apply(l, row, whole, self.rows.part(l, row, at, rest));
                    let mut values = [0f32; BLOCK];
                    l.store(s, &mut values);
                    // Whatever the inputs are, the padding stays zero.
                    values[rest..].fill(0.0);
                    self.rows.set_part(row, at, &values[..rest]);
                    sums = self.against.add(l, whole, l.load(&values), sums);
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

#[inline(always)]
fn pass<L: Lanes>(
    l: L,
    size: Size,
    rows: &mut impl Rows,
    change: &impl Change,
    against: impl Against,
) -> [f32; TILE_ROWS] {
    l.run(Pass { size, rows, change, against })
}

/// Nothing changes.
struct Same;

impl Change for Same {
    #[inline(always)]
    fn apply<L: Lanes>(&self, _l: L, _row: usize, _j: usize, s: L::V) -> L::V {
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

impl Change for Mamba2Tokens<'_> {
    #[inline(always)]
    fn apply<L: Lanes>(&self, l: L, row: usize, j: usize, mut s: L::V) -> L::V {
        for ((d, b), xd) in self.decays.iter().zip(self.b).zip(self.xd) {
            let factor = l.splat(d.factor);
            s = if d.slow { l.fma(s, factor, s) } else { l.mul(s, factor) };
            s = l.fma(l.splat(xd[row % TILE_ROWS]), l.load(b.block(j)), s);
        }
        s
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
struct RankOneThen<'a, D> {
    u: &'a [f32; TILE_ROWS],
    k: &'a Columns,
    decay: D,
}

impl<D: Change> Change for RankOneThen<'_, D> {
    #[inline(always)]
    fn apply<L: Lanes>(&self, l: L, row: usize, j: usize, s: L::V) -> L::V {
        let s = l.fma(l.splat(self.u[row % TILE_ROWS]), l.load(self.k.block(j)), s);
        self.decay.apply(l, row, j, s)
    }
}

struct Slow(f32);
struct Fast(f32);
struct PerColumn<'a>(&'a Columns, &'a Columns);

impl Change for Slow {
    #[inline(always)]
    fn apply<L: Lanes>(&self, l: L, _row: usize, _j: usize, s: L::V) -> L::V {
        l.fma(s, l.splat(self.0), s)
    }
}

impl Change for Fast {
    #[inline(always)]
    fn apply<L: Lanes>(&self, l: L, _row: usize, _j: usize, s: L::V) -> L::V {
        l.mul(s, l.splat(self.0))
    }
}

impl Change for PerColumn<'_> {
    /// `fma(s, f, s)` where slow; where fast, `fma(s, f, -0)`, which is `s f` to the last bit and sign.
    #[inline(always)]
    fn apply<L: Lanes>(&self, l: L, _row: usize, j: usize, s: L::V) -> L::V {
        l.fma(s, l.load(self.0.block(j)), l.or_minus_zero(s, l.load(self.1.block(j))))
    }
}

/// A pass that ends with a token's decay, and returns `S' . k`.
#[inline(always)]
fn decayed<L: Lanes>(
    l: L,
    size: Size,
    rows: &mut impl Rows,
    before: Option<(&[f32; TILE_ROWS], &Columns)>,
    decays: &Decays,
    k: &Columns,
) -> [f32; TILE_ROWS] {
    match (before, decays) {
        (None, Decays::Head(d)) if d.slow => pass(l, size, rows, &Slow(d.factor), k),
        (None, Decays::Head(d)) => pass(l, size, rows, &Fast(d.factor), k),
        (None, Decays::Columns(f, slow)) => pass(l, size, rows, &PerColumn(f, slow), k),
        (Some((u, last)), Decays::Head(d)) if d.slow => {
            pass(l, size, rows, &RankOneThen { u, k: last, decay: Slow(d.factor) }, k)
        }
        (Some((u, last)), Decays::Head(d)) => {
            pass(l, size, rows, &RankOneThen { u, k: last, decay: Fast(d.factor) }, k)
        }
        (Some((u, last)), Decays::Columns(f, slow)) => {
            pass(l, size, rows, &RankOneThen { u, k: last, decay: PerColumn(f, slow) }, k)
        }
    }
}

/// Where a call's rows come from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Source {
    /// The checkpoint.
    Memory,
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
    match (from, to) {
        (Source::Memory, Target::Memory) => changed(l, size, &mut InPlace(memory), &tokens, output),
        (Source::Memory, Target::Tile) => changed(l, size, &mut Moved(memory, tile), &tokens, output),
        (Source::Memory, Target::Nowhere) => changed(l, size, &mut ReadOnly(memory), &tokens, output),
        (Source::Tile, Target::Memory) => changed(l, size, &mut Moved(tile, memory), &tokens, output),
        (Source::Tile, Target::Tile) => changed(l, size, &mut InPlace(tile), &tokens, output),
        (Source::Tile, Target::Nowhere) => changed(l, size, &mut ReadOnly(tile), &tokens, output),
    }
}

#[inline(always)]
fn changed<L: Lanes>(
    l: L,
    size: Size,
    rows: &mut impl Rows,
    change: &impl Change,
    output: Output<'_>,
) -> [f32; TILE_ROWS] {
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
            (Some(last), _) => decayed(l, size, &mut InPlace(tile), Some((&u, last)), decays, k),
            (None, Source::Memory) => decayed(l, size, &mut Moved(memory, tile), None, decays, k),
            (None, Source::Tile) => decayed(l, size, &mut InPlace(tile), None, decays, k),
        };
        for r in 0..TILE_ROWS {
            u[r] = beta * (v[r] - predicted[r]);
        }
        last = Some(k);
    }
    let Some(k) = last else { return (u, [0.0; TILE_ROWS]) };
    let change = &RankOneThen { u: &u, k, decay: Same };
    let out = match to {
        Target::Memory => changed(l, size, &mut Moved(tile, memory), change, output),
        Target::Tile => changed(l, size, &mut InPlace(tile), change, output),
        Target::Nowhere => changed(l, size, &mut ReadOnly(tile), change, output),
    };
    (u, out)
}

/// Canonical dot products of all rows with up to `vectors.len()` vectors; `out` has as many.
#[inline(always)]
pub fn dots<L: Lanes>(l: L, size: Size, rows: &impl Load, vectors: &[&Columns], out: &mut [[f32; TILE_ROWS]]) {
    for (vectors, out) in vectors.chunks(2).zip(out.chunks_mut(2)) {
        match (vectors, out) {
            ([a, b], [to_a, to_b]) => l.run(TwoDots { size, rows, with: [a, b], to: [to_a, to_b] }),
            ([a], [to_a]) => *to_a = pass(l, size, &mut ReadOnly(rows), &Same, *a),
            _ => {}
        }
    }
}

struct TwoDots<'a, R> {
    size: Size,
    rows: &'a R,
    with: [&'a Columns; 2],
    to: [&'a mut [f32; TILE_ROWS]; 2],
}

impl<R: Load> Task for TwoDots<'_, R> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes>(self, l: L) {
        let (size, [a, b], [to_a, to_b]) = (self.size, self.with, self.to);
        let (whole, rest) = (size.columns / BLOCK, size.columns % BLOCK);
        for (group, (to_a, to_b)) in
            to_a.as_chunks_mut::<4>().0.iter_mut().zip(to_b.as_chunks_mut::<4>().0.iter_mut()).enumerate()
        {
            let first = 4 * group;
            if first >= size.rows {
                break;
            }
            let (mut with_a, mut with_b) = ([l.splat(0.0); 4], [l.splat(0.0); 4]);
            for i in 0..4.min(size.rows - first) {
                let (mut sum_a, mut sum_b) = (l.splat(0.0), l.splat(0.0));
                for j in 0..whole {
                    self.rows.prefetch(l, first + i, j * BLOCK);
                    let s = self.rows.block(l, first + i, j * BLOCK);
                    sum_a = l.fma(s, l.load(a.block(j)), sum_a);
                    sum_b = l.fma(s, l.load(b.block(j)), sum_b);
                }
                if rest > 0 {
                    let s = self.rows.part(l, first + i, whole * BLOCK, rest);
                    sum_a = l.fma(s, l.load(a.block(whole)), sum_a);
                    sum_b = l.fma(s, l.load(b.block(whole)), sum_b);
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
        let mut nothing = Tile::zero(2, 5);
        let out =
            mamba2(Portable, size, &mut nothing, &mut tile, Source::Tile, Target::Tile, tokens, Output::Value(&b));
        assert_eq!(out[..2], [f32::INFINITY, 0.0]);
        let mut again = [[0f32; TILE_ROWS]];
        dots(Portable, size, &tile, &[&b], &mut again);
        assert_eq!(again[0][..2], [f32::INFINITY, 0.0]);
    }
}
