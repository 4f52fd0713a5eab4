//! A small model of all families: a convolution in front of two Mamba-2 layers, a GDN and a KDA layer, each in a pool of its own on one
//! slots handle. Everything that a batch consists of lies in blocks of exactly its size, in a context's memory or on the host.

use std::cell::Cell;
use std::ptr::{null, null_mut};
use std::rc::Rc;

use super::common::gpu::{self, Block, Gpu};
use super::common::{ABSENT, Rng, address, components, encode, message, size_of_dtype};
use super::desc;
use replayssm::ffi::*;

pub const SLOTS: usize = 14;
pub const RINGS: usize = 13;
/// A slot that is padding.
pub const NULL_ID: i32 = 13;
pub const ROWS: usize = 12;
pub const T_MAX: usize = 6;
pub const KEEP: i32 = 2;
/// Token rows of the packed tensors.
pub const TOKENS: usize = 24;
/// Rows and tokens of an extend.
const EXTENDED: [usize; 2] = [2, 8];
const TAIL: i32 = 3;

const WIDTH: usize = 4;
const MAMBA: [usize; 4] = [4, 24, 40, 2];
const MAMBA_LAYERS: usize = 2;
const CHANNELS: usize = MAMBA[0] * MAMBA[1] + 2 * MAMBA[3] * MAMBA[2];
/// Query heads, value heads, K, V.
const GDN: [usize; 4] = [1, 2, 64, 48];
const KDA: [usize; 4] = [2, 2, 32, 40];

/// The ring of a slot.
pub fn ring_of(slot: usize) -> usize {
    (slot * 5 + 3) % RINGS
}

/// How a model differs from the others.
#[derive(Clone, Copy, Default)]
pub struct Options {
    /// Of the library's context: the calling thread's instead of the primary one.
    pub current: bool,
    /// Addresses aligned to 2 bytes alone, odd strides.
    pub odd: bool,
    /// Threads of the CPU backend.
    pub threads: i32,
}

/// A strided tensor with the axes token, head and element, and not a byte behind its last element.
struct Field {
    block: Block,
    dtype: i32,
    heads: usize,
    inner: usize,
    lead: usize,
    head: usize,
    token: usize,
}

impl Field {
    fn new(gpu: Option<Gpu>, odd: bool, dtype: i32, tokens: usize, heads: usize, inner: usize) -> Self {
        let gap = usize::from(odd);
        let head = inner + gap;
        let token = (heads * head) | gap;
        let elements = gap + (tokens - 1) * token + (heads - 1) * head + inner;
        let block = Block::new(gpu, elements * size_of_dtype(dtype));
        Field { block, dtype, heads, inner, lead: gap, head, token }
    }

    /// A part of each token, seen as heads; `row` tokens to a row.
    fn part(&self, row: usize, first: usize, head: usize) -> replayssm_tensor {
        replayssm_tensor {
            data: self.block.part((self.lead + first) * size_of_dtype(self.dtype)),
            stride_row: (row * self.token) as i64,
            stride_token: self.token as i64,
            stride_head: head as i64,
            dtype: self.dtype,
            reserved: 0,
        }
    }

    fn view(&self, row: usize) -> replayssm_tensor {
        self.part(row, 0, self.head)
    }

    fn parameter(&self) -> replayssm_tensor {
        replayssm_tensor { stride_row: 0, stride_token: 0, ..self.view(0) }
    }

    fn elements(&self) -> usize {
        self.heads * self.inner
    }

    /// Overwrites the live elements; the others are NaN.
    fn write(&self, values: &[u32]) {
        let size = size_of_dtype(self.dtype);
        let mut bytes = vec![0xFF; self.block.bytes];
        for (i, value) in values.iter().enumerate() {
            let (token, head, element) = (i / self.elements(), i % self.elements() / self.inner, i % self.inner);
            let at = (self.lead + token * self.token + head * self.head + element) * size;
            bytes[at..at + size].copy_from_slice(&value.to_le_bytes()[..size]);
        }
        self.block.write(&bytes);
    }

    /// The live elements, and what stands between them.
    fn read(&self) -> (Vec<u8>, Vec<u8>) {
        let (bytes, size) = (self.block.read(), size_of_dtype(self.dtype));
        let (mut live, mut gaps) = (Vec::new(), Vec::new());
        for (i, element) in bytes.chunks(size).enumerate() {
            let place = i.checked_sub(self.lead).map(|i| (i % self.token / self.head, i % self.token % self.head));
            match place {
                Some((head, at)) if head < self.heads && at < self.inner => live.extend_from_slice(element),
                _ => gaps.extend_from_slice(element),
            }
        }
        (live, gaps)
    }
}

/// What all models on one slots handle share.
struct Handles {
    context: *mut replayssm_context,
    slots: *mut replayssm_slots,
    pools: Vec<*mut replayssm_layers>,
}

impl Drop for Handles {
    fn drop(&mut self) {
        self.pools.iter().for_each(|&pool| replayssm_layers_destroy(pool));
        replayssm_slots_destroy(self.slots);
        replayssm_context_destroy(self.context);
    }
}

/// A call was accepted.
#[track_caller]
pub fn accepted(status: i32) {
    assert_eq!(status, REPLAYSSM_OK, "{}", message());
}

/// The sentence of a call that was refused with a status.
#[track_caller]
pub fn refused(status: i32, expected: i32) -> String {
    assert_eq!(status, expected, "{}", message());
    message()
}

pub fn context(gpu: Option<Gpu>, options: Options) -> *mut replayssm_context {
    let desc = desc!(replayssm_context_desc {
        backend: if gpu.is_some() { REPLAYSSM_BACKEND_CUDA } else { REPLAYSSM_BACKEND_CPU },
        device: if options.current { -1 } else { 0 },
        n_threads: if gpu.is_some() { 0 } else { options.threads },
    });
    let mut context = null_mut();
    // SAFETY: the descriptor and the out-parameter are locals.
    accepted(unsafe { replayssm_context_create(&desc, &mut context) });
    context
}

pub fn slots_desc() -> replayssm_slots_desc {
    desc!(replayssm_slots_desc {
        n_slots: SLOTS as i32,
        n_rings: RINGS as i32,
        window: 16,
        max_step_tokens: T_MAX as i32,
        min_rewind: KEEP,
    })
}

/// The pools: convolution, Mamba-2, GDN, KDA.
pub fn pool_descs() -> [replayssm_pool_desc; 4] {
    let [heads, headdim, dstate, groups] = MAMBA.map(|n| n as i32);
    let delta = |family, [h, hv, k, v]: [usize; 4], format, readout| {
        desc!(replayssm_pool_desc {
            family: family,
            n_layers: 1,
            io: REPLAYSSM_DTYPE_BF16,
            format: format,
            readout: readout,
            H: h as i32,
            HV: hv as i32,
            K: k as i32,
            V: v as i32,
        })
    };
    [
        desc!(replayssm_pool_desc {
            family: REPLAYSSM_FAMILY_CONV1D,
            n_layers: 1,
            io: REPLAYSSM_DTYPE_BF16,
            channels: CHANNELS as i32,
            width: WIDTH as i32,
        }),
        desc!(replayssm_pool_desc {
            family: REPLAYSSM_FAMILY_MAMBA2,
            n_layers: MAMBA_LAYERS as i32,
            io: REPLAYSSM_DTYPE_BF16,
            out: REPLAYSSM_DTYPE_F32,
            nheads: heads,
            headdim: headdim,
            dstate: dstate,
            ngroups: groups,
        }),
        delta(REPLAYSSM_FAMILY_GDN, GDN, REPLAYSSM_FORMAT_F32, REPLAYSSM_READOUT_EXACT),
        delta(REPLAYSSM_FAMILY_KDA, KDA, REPLAYSSM_FORMAT_SPLIT32, REPLAYSSM_READOUT_FULL),
    ]
}

impl Handles {
    fn new(gpu: Option<Gpu>, options: Options, lent: &[replayssm_lent]) -> Self {
        let context = context(gpu, options);
        let mut slots = null_mut();
        // SAFETY: the descriptor and the out-parameter are locals, and so below.
        accepted(unsafe { replayssm_slots_create(context, &slots_desc(), &mut slots) });
        let pools = pool_descs().map(|desc| {
            let mut pool = null_mut();
            let lent = if desc.family == REPLAYSSM_FAMILY_MAMBA2 { lent } else { &[] };
            // SAFETY: as above; the list has as many elements as it says.
            accepted(unsafe { replayssm_layers_create(slots, &desc, lent.as_ptr(), lent.len() as i32, &mut pool) });
            pool
        });
        Handles { context, slots, pools: pools.into() }
    }
}

/// Where the work of another kernel stands between the calls of a model step.
#[derive(Clone, Copy, PartialEq)]
pub enum Gap {
    /// In front of the convolution, whose inputs it may write.
    Inputs,
    /// In front of the commit, whose counts it may write.
    Counts,
}

/// Something that is compared: its name, whether both backends have the same bytes of it, and the bytes.
pub struct Part {
    pub name: String,
    pub on_both: bool,
    pub bytes: Vec<u8>,
}

/// Everything is equal by bytes.
#[track_caller]
pub fn same(what: &str, one: &[Part], other: &[Part]) {
    same_where(what, one, other, |_| true);
}

#[track_caller]
pub fn same_where(what: &str, one: &[Part], other: &[Part], of: impl Fn(&Part) -> bool) {
    assert_eq!(one.len(), other.len());
    for (a, b) in one.iter().zip(other).filter(|(a, _)| of(a)) {
        let differs = a.bytes.iter().zip(&b.bytes).position(|(a, b)| a != b);
        assert!(
            differs.is_none() && a.bytes.len() == b.bytes.len(),
            "{what}: {} differs from byte {differs:?} of {} on",
            a.name,
            a.bytes.len()
        );
    }
}

pub struct Model {
    pub gpu: Option<Gpu>,
    handles: Rc<Handles>,
    options: Options,
    /// Slots whose rings the cursors are read of.
    n_cursors: Cell<usize>,
    cu: Block,
    slots: Block,
    rings: Block,
    flush: Block,
    generation: Block,
    pub counts: Block,
    reset: [Block; 4],
    rewind: [Block; 4],
    cursors: [Block; 3],
    extended: [Block; 2],
    pub x: Block,
    fields: Fields,
    states: Vec<Block>,
    positions: Block,
}

/// Inputs, parameters and outputs.
struct Fields {
    x: Field,
    weight: Field,
    bias: Field,
    xbc: Field,
    z: Field,
    dt: Field,
    a: Field,
    dt_bias: Field,
    d: Field,
    y: Vec<Field>,
    gdn: Delta,
    kda: Delta,
}

struct Delta {
    dims: [usize; 4],
    kda: bool,
    qkv: Field,
    g: Field,
    beta: Field,
    a_log: Field,
    dt_bias: Field,
    out: Field,
}

fn draw(rng: &mut Rng, dtype: i32, n: usize, value: impl Fn(f64) -> f64) -> Vec<u32> {
    (0..n).map(|_| encode(dtype, value(rng.normal()))).collect()
}

impl Delta {
    fn new(gpu: Option<Gpu>, odd: bool, dims: [usize; 4], kda: bool, rng: &mut Rng) -> Self {
        let [h, hv, k, v] = dims;
        let gates = if kda { k } else { 1 };
        let field = |dtype, tokens, heads, inner| Field::new(gpu, odd, dtype, tokens, heads, inner);
        let delta = Delta {
            dims,
            kda,
            qkv: field(REPLAYSSM_DTYPE_BF16, TOKENS, 1, 2 * h * k + hv * v),
            g: field(REPLAYSSM_DTYPE_F32, TOKENS, hv, gates),
            beta: field(REPLAYSSM_DTYPE_BF16, TOKENS, hv, 1),
            a_log: field(REPLAYSSM_DTYPE_F32, 1, hv, 1),
            dt_bias: field(REPLAYSSM_DTYPE_BF16, 1, hv, gates),
            out: field(REPLAYSSM_DTYPE_BF16, TOKENS, hv, v),
        };
        delta.a_log.write(&draw(rng, REPLAYSSM_DTYPE_F32, hv, |n| 0.3 * n));
        delta.dt_bias.write(&draw(rng, REPLAYSSM_DTYPE_BF16, hv * gates, |n| 0.3 * n - 3.0));
        delta
    }

    fn inputs(&self) -> [&Field; 3] {
        [&self.qkv, &self.g, &self.beta]
    }

    fn args(&self, row: usize) -> replayssm_delta_args {
        let [h, _, k, v] = self.dims;
        desc!(replayssm_delta_args {
            q: self.qkv.part(row, 0, k),
            k: self.qkv.part(row, h * k, k),
            v: self.qkv.part(row, 2 * h * k, v),
            g: self.g.view(row),
            beta: self.beta.view(row),
            A_log: self.a_log.parameter(),
            dt_bias: if self.kda { self.dt_bias.parameter() } else { ABSENT },
            out: self.out.view(row),
        })
    }
}

impl Fields {
    fn new(gpu: Option<Gpu>, odd: bool) -> Self {
        let mut rng = Rng(11);
        let [heads, headdim, _, _] = MAMBA;
        let field = |dtype, tokens, heads, inner| Field::new(gpu, odd, dtype, tokens, heads, inner);
        let fields = Fields {
            x: field(REPLAYSSM_DTYPE_BF16, TOKENS, 1, CHANNELS),
            weight: field(REPLAYSSM_DTYPE_F32, 1, CHANNELS, WIDTH),
            bias: field(REPLAYSSM_DTYPE_BF16, 1, CHANNELS, 1),
            xbc: field(REPLAYSSM_DTYPE_BF16, TOKENS, 1, CHANNELS),
            z: field(REPLAYSSM_DTYPE_BF16, TOKENS, heads, headdim),
            dt: field(REPLAYSSM_DTYPE_F32, TOKENS, heads, 1),
            a: field(REPLAYSSM_DTYPE_F32, 1, heads, 1),
            dt_bias: field(REPLAYSSM_DTYPE_BF16, 1, heads, 1),
            d: field(REPLAYSSM_DTYPE_F32, 1, heads, 1),
            y: (0..MAMBA_LAYERS).map(|_| field(REPLAYSSM_DTYPE_F32, TOKENS, heads, headdim)).collect(),
            gdn: Delta::new(gpu, odd, GDN, false, &mut rng),
            kda: Delta::new(gpu, odd, KDA, true, &mut rng),
        };
        fields.weight.write(&draw(&mut rng, REPLAYSSM_DTYPE_F32, CHANNELS * WIDTH, |n| n));
        fields.bias.write(&draw(&mut rng, REPLAYSSM_DTYPE_BF16, CHANNELS, |n| 0.1 * n));
        fields.a.write(&draw(&mut rng, REPLAYSSM_DTYPE_F32, heads, |n| -(0.5 * n).exp()));
        fields.dt_bias.write(&draw(&mut rng, REPLAYSSM_DTYPE_BF16, heads, |n| 0.3 * n - 3.0));
        fields.d.write(&draw(&mut rng, REPLAYSSM_DTYPE_F32, heads, |n| n));
        fields
    }

    fn inputs(&self) -> Vec<&Field> {
        let mut inputs = vec![&self.x, &self.z, &self.dt];
        inputs.extend(self.gdn.inputs());
        inputs.extend(self.kda.inputs());
        inputs
    }

    /// What is written, by name; whether both backends have the same bytes of it.
    fn outputs(&self) -> Vec<(&'static str, &Field, bool)> {
        vec![
            ("the convolution's output", &self.xbc, true),
            ("output of Mamba-2 layer 0", &self.y[0], false),
            ("output of Mamba-2 layer 1", &self.y[1], false),
            ("output of GDN", &self.gdn.out, true),
            ("output of KDA", &self.kda.out, false),
        ]
    }
}

/// The data of a model step.
#[derive(Clone)]
pub struct Round {
    pub cu: Vec<i32>,
    pub slots: Vec<i64>,
    pub rings: Vec<i32>,
    pub flush: Vec<u8>,
    pub generation: Vec<u32>,
    pub counts: Vec<i32>,
    /// Slot and ring, generation, position.
    pub resets: Vec<([i64; 2], u32, i64)>,
    /// Slot, ring, tokens.
    pub rewinds: Vec<(i64, i64, i32)>,
    pub inputs: Vec<Vec<u32>>,
}

pub const RESETS: usize = 2;
pub const REWINDS: usize = 1;

/// Draws rounds on some slots and their rings.
pub struct Script {
    rng: Rng,
    slots: Vec<usize>,
    generations: Vec<u32>,
    number: usize,
}

impl Script {
    pub fn new(seed: u64, slots: impl IntoIterator<Item = usize>) -> Self {
        Script { rng: Rng(seed), slots: slots.into_iter().collect(), generations: vec![0; RINGS], number: 0 }
    }

    fn lengths(&mut self) -> Vec<usize> {
        match self.number {
            // What is captured, and what is to run from it.
            0 => vec![1; ROWS],
            1 | 8 => [6, 6].into_iter().chain([0; ROWS - 2]).collect(),
            2 => vec![0; ROWS],
            _ => {
                let mut left = TOKENS;
                let most = 1 + self.rng.below(T_MAX);
                let lengths = (0..ROWS).map(|_| {
                    let n = self.rng.below(most + 1).min(left);
                    left -= n;
                    n
                });
                lengths.collect()
            }
        }
    }

    pub fn next(&mut self, model: &Model) -> Round {
        let lengths = self.lengths();
        let rng = &mut self.rng;
        for i in (1..self.slots.len()).rev() {
            self.slots.swap(i, rng.below(i + 1));
        }
        let some = |rng: &mut Rng, one_in: usize| rng.below(one_in) == 0;
        let mut resets = Vec::new();
        for i in 0..RESETS {
            let slot = self.slots[i % self.slots.len()];
            let ring = ring_of(slot);
            let wanted = self.number > 3 && i < self.slots.len() && some(rng, 6);
            let id = if wanted { [slot as i64, ring as i64] } else { [-1, 5] };
            if wanted {
                self.generations[ring] += 3;
            }
            let position = if some(rng, 2) { 0 } else { rng.below(100_000) as i64 };
            resets.push((id, self.generations[ring], position));
        }
        let rewinds = (0..REWINDS)
            .map(|_| {
                let slot = self.slots[rng.below(self.slots.len())];
                let id = if some(rng, 3) { slot as i64 } else { -1 };
                (id, ring_of(slot) as i64, rng.below(KEEP as usize + 1) as i32)
            })
            .collect();
        // The batch's order is another one than the resets'.
        self.slots.rotate_left(1);
        let mut round = Round {
            cu: vec![0],
            slots: vec![],
            rings: vec![],
            flush: vec![],
            generation: vec![],
            counts: vec![],
            resets,
            rewinds,
            inputs: model.fields.inputs().iter().map(|f| draw(rng, f.dtype, TOKENS * f.elements(), |n| n)).collect(),
        };
        // Some rounds are half padding.
        let real = if self.number > 2 && some(rng, 4) { rng.below(ROWS) } else { ROWS };
        for (r, &len) in lengths.iter().enumerate() {
            let pair = self.slots.get(r).map(|&slot| (slot as i64, ring_of(slot)));
            let (slot, ring) = match pair.filter(|_| r < real && (self.number < 3 || !some(rng, 8))) {
                Some((slot, ring)) => (slot, ring as i32),
                None => [(-1, 2), (4, -1), (NULL_ID.into(), 3)][rng.below(3)],
            };
            let generation = usize::try_from(ring).map_or(0, |ring| self.generations[ring]);
            round.cu.push(round.cu[r] + len as i32);
            round.slots.push(slot);
            round.rings.push(ring);
            round.flush.push(some(rng, 8).into());
            round.generation.push(if some(rng, 10) { generation.wrapping_sub(1) } else { generation });
            round.counts.push(rng.below(len + 1) as i32);
        }
        self.number += 1;
        round
    }
}

fn bytes<T: Copy>(values: &[T]) -> &[u8] {
    // SAFETY: integers without padding.
    unsafe { std::slice::from_raw_parts(values.as_ptr().cast(), size_of_val(values)) }
}

fn ids(block: &Block, dtype: i32, stride: i64) -> replayssm_ids {
    replayssm_ids { data: block.part(0), stride, dtype, reserved: 0 }
}

impl Model {
    pub fn new(gpu: Option<Gpu>, options: Options) -> Self {
        Self::on_lent(gpu, options, &[])
    }

    /// With memory for components of the Mamba-2 pool.
    pub fn on_lent(gpu: Option<Gpu>, options: Options, lent: &[replayssm_lent]) -> Self {
        Self::on(gpu, options, Rc::new(Handles::new(gpu, options, lent)))
    }

    /// Another batch on the same handles.
    pub fn beside(&self) -> Self {
        Self::on(self.gpu, self.options, self.handles.clone())
    }

    fn on(gpu: Option<Gpu>, options: Options, handles: Rc<Handles>) -> Self {
        let block = |bytes| Block::new(gpu, bytes);
        let [rows, tokens] = EXTENDED;
        let entries = |n: usize| n * rows * 4;
        let [heads, headdim, dstate, _] = MAMBA;
        let delta = |[_, hv, k, v]: [usize; 4]| entries(hv * k * v);
        let fields = Fields::new(gpu, options.odd);
        assert!(rows * tokens <= TOKENS);
        Model {
            gpu,
            handles,
            options,
            n_cursors: Cell::new(RINGS),
            cu: block((ROWS + 1) * 4),
            slots: block(ROWS * 8),
            // Every second element.
            rings: block((2 * ROWS - 1) * 4),
            flush: block(ROWS),
            generation: block(ROWS * 4),
            counts: block(ROWS * 4),
            reset: [block(RESETS * 8), block(RESETS * 8), block(RESETS * 4), block(RESETS * 8)],
            rewind: [block(REWINDS * 8), block(REWINDS * 8), block(REWINDS * 4), block(REWINDS * 4)],
            cursors: [
                Block::of(gpu, bytes(&[0i64; RINGS])),
                Block::of(gpu, bytes(&(0..RINGS as i64).collect::<Vec<_>>())),
                block(RINGS * size_of::<replayssm_cursor>()),
            ],
            extended: [
                Block::of(gpu, bytes(&[7i64, 2])),
                Block::of(gpu, bytes(&[ring_of(7) as i32, ring_of(2) as i32])),
            ],
            x: block(fields.x.block.bytes),
            fields,
            states: [
                entries(CHANNELS * (WIDTH - 1)),
                entries(MAMBA_LAYERS * heads * headdim * dstate),
                delta(GDN),
                delta(KDA),
            ]
            .map(|bytes| Block::of(gpu, &vec![0; bytes]))
            .into(),
            positions: Block::of(gpu, bytes(&[40i64, 50])),
        }
    }

    pub fn slots_handle(&self) -> *mut replayssm_slots {
        self.handles.slots
    }

    pub fn pools(&self) -> &[*mut replayssm_layers] {
        &self.handles.pools
    }

    /// Reads only the cursors of the rings of some slots.
    pub fn read_cursors_of(&self, slots: &[usize]) {
        let rings: Vec<i64> = slots.iter().map(|&slot| ring_of(slot) as i64).collect();
        self.cursors[1].write(bytes(&rings));
        self.n_cursors.set(slots.len());
    }

    /// Brings a round's data to where the calls read it. No work may be under way.
    pub fn load(&self, round: &Round) {
        self.cu.write(bytes(&round.cu));
        self.slots.write(bytes(&round.slots));
        let spread: Vec<i32> = round.rings.iter().flat_map(|&ring| [ring, i32::MAX]).collect();
        self.rings.write(bytes(&spread[..2 * ROWS - 1]));
        self.flush.write(&round.flush);
        self.generation.write(bytes(&round.generation));
        self.counts.write(bytes(&round.counts));
        let resets = &round.resets;
        self.reset[0].write(bytes(&resets.iter().map(|r| r.0[0]).collect::<Vec<_>>()));
        self.reset[1].write(bytes(&resets.iter().map(|r| r.0[1]).collect::<Vec<_>>()));
        self.reset[2].write(bytes(&resets.iter().map(|r| r.1).collect::<Vec<_>>()));
        self.reset[3].write(bytes(&resets.iter().map(|r| r.2).collect::<Vec<_>>()));
        self.rewind[0].write(bytes(&round.rewinds.iter().map(|r| r.0).collect::<Vec<_>>()));
        self.rewind[1].write(bytes(&round.rewinds.iter().map(|r| r.1).collect::<Vec<_>>()));
        self.rewind[2].write(bytes(&round.rewinds.iter().map(|r| r.2).collect::<Vec<_>>()));
        for (field, values) in self.fields.inputs().iter().zip(&round.inputs) {
            field.write(values);
        }
        self.fields.outputs().iter().for_each(|(_, field, _)| field.block.fill(0xFF));
        self.cursors[2].fill(0xFF);
        self.rewind[3].fill(0xFF);
    }

    /// The convolution's inputs are elsewhere, and NaN stands in their place; the counts are negative. Where they go and lie, and their
    /// bytes.
    pub fn hide_inputs_and_counts(&self, counts: &Block) -> [[usize; 3]; 2] {
        let x = &self.fields.x.block;
        self.x.write(&x.read());
        counts.write(&self.counts.read());
        x.fill(0xFF);
        self.counts.fill(0xFF);
        [[x.at, self.x.at, x.bytes], [self.counts.at, counts.at, self.counts.bytes]]
    }

    pub fn batch(&self) -> replayssm_batch {
        desc!(replayssm_batch {
            flags: REPLAYSSM_BATCH_NULL_ID,
            n_rows: ROWS as i32,
            null_id: NULL_ID,
            n_tokens: TOKENS as i64,
            slots: ids(&self.slots, REPLAYSSM_DTYPE_I64, 1),
            rings: ids(&self.rings, REPLAYSSM_DTYPE_I32, 2),
            cu_seqlens: self.cu.part(0).cast(),
            flush: self.flush.part(0).cast(),
            generation: self.generation.part(0).cast(),
        })
    }

    pub fn exec(&self, stream: usize, flags: u32) -> replayssm_exec {
        desc!(replayssm_exec { flags: flags, stream: stream as *mut _ })
    }

    pub fn conv_args(&self, row: usize) -> replayssm_conv1d_args {
        let f = &self.fields;
        desc!(replayssm_conv1d_args {
            x: f.x.view(row),
            out: f.xbc.view(row),
            weight: f.weight.parameter(),
            bias: f.bias.parameter(),
        })
    }

    fn mamba_args(&self, layer: usize, row: usize) -> replayssm_mamba2_args {
        let f = &self.fields;
        let [heads, headdim, dstate, groups] = MAMBA;
        desc!(replayssm_mamba2_args {
            x: f.xbc.part(row, 0, headdim),
            B: f.xbc.part(row, heads * headdim, dstate),
            C: f.xbc.part(row, heads * headdim + groups * dstate, dstate),
            dt: f.dt.view(row),
            A: f.a.parameter(),
            dt_bias: f.dt_bias.parameter(),
            D: f.d.parameter(),
            z: f.z.view(row),
            out: f.y[layer].view(row),
        })
    }

    /// All layers of a batch.
    fn layers(&self, batch: &replayssm_batch, exec: &replayssm_exec) {
        let [conv, mamba, gdn, kda] = self.handles.pools[..] else { unreachable!("four pools") };
        let extend = batch.flags & REPLAYSSM_BATCH_EXTEND != 0;
        let row = batch.tokens as usize;
        // SAFETY: everything lives until the work has run, here and below.
        unsafe {
            let args = self.conv_args(row);
            accepted(if extend {
                replayssm_conv1d_extend(conv, 0, batch, &args, exec)
            } else {
                replayssm_conv1d_step(conv, 0, batch, &args, exec)
            });
            for layer in 0..MAMBA_LAYERS {
                let args = self.mamba_args(layer, row);
                accepted(if extend {
                    replayssm_mamba2_extend(mamba, layer as i32, batch, &args, exec)
                } else {
                    replayssm_mamba2_step(mamba, layer as i32, batch, &args, exec)
                });
            }
            for (pool, delta) in [(gdn, &self.fields.gdn), (kda, &self.fields.kda)] {
                let args = delta.args(row);
                accepted(if extend {
                    replayssm_delta_extend(pool, 0, batch, &args, exec)
                } else {
                    replayssm_delta_step(pool, 0, batch, &args, exec)
                });
            }
        }
    }

    fn list(n: usize, slots: &Block, rings: &Block) -> replayssm_list {
        desc!(replayssm_list {
            n: n as i32,
            place: REPLAYSSM_WHERE_DEVICE,
            slots: ids(slots, REPLAYSSM_DTYPE_I64, 1),
            rings: ids(rings, REPLAYSSM_DTYPE_I64, 1),
        })
    }

    /// A model step: resets, all layers, the commit, a rewind, cursors.
    pub fn enqueue(&self, stream: usize, flags: u32) {
        self.enqueue_with(stream, flags, REPLAYSSM_COUNTS_ACCEPTED, &|_| ());
    }

    pub fn enqueue_with(&self, stream: usize, flags: u32, convention: i32, gap: &dyn Fn(Gap)) {
        let (slots, batch, exec) = (self.handles.slots, self.batch(), self.exec(stream, flags));
        let [of_slots, of_rings, generation, position] = &self.reset;
        let args =
            desc!(replayssm_reset_args { position: position.part(0).cast(), generation: generation.part(0).cast() });
        // SAFETY: everything lives until the work has run, here and below.
        accepted(unsafe { replayssm_reset(slots, &Self::list(RESETS, of_slots, of_rings), &args, &exec) });
        gap(Gap::Inputs);
        self.layers(&batch, &exec);
        gap(Gap::Counts);
        let args = desc!(replayssm_commit_args { convention: convention, counts: self.counts.part(0).cast() });
        // SAFETY: as above.
        accepted(unsafe { replayssm_commit(slots, &batch, &args, &exec) });
        let [of_slots, of_rings, n, done] = &self.rewind;
        let list = Self::list(REWINDS, of_slots, of_rings);
        // SAFETY: as above.
        accepted(unsafe { replayssm_rewind(slots, &list, n.part(0).cast(), done.part(0).cast(), &exec) });
        let [zeros, rings, cursors] = &self.cursors;
        let list = Self::list(self.n_cursors.get(), zeros, rings);
        // SAFETY: as above.
        accepted(unsafe { replayssm_read_cursors(slots, &list, cursors.part(0).cast(), &exec) });
    }

    /// Everything else that can be called between creating and destroying, on two slots: resets and imports by host and device lists, an
    /// extend that keeps a tail, exports, a rewind.
    pub fn life(&self, stream: usize) {
        let (slots, exec) = (self.handles.slots, self.exec(stream, 0));
        let [rows, tokens] = EXTENDED;
        let of_host = [7i64, 2];
        let rings = of_host.map(|slot| ring_of(slot as usize) as i64);
        let on_host = |ids: &[i64]| replayssm_ids {
            data: ids.as_ptr().cast(),
            stride: 1,
            dtype: REPLAYSSM_DTYPE_I64,
            reserved: 0,
        };
        let host = desc!(replayssm_list {
            n: 2,
            place: REPLAYSSM_WHERE_HOST,
            slots: on_host(&of_host),
            rings: on_host(&rings)
        });
        let [of_slots, of_rings] = &self.extended;
        let device = desc!(replayssm_list {
            n: rows as i32,
            place: REPLAYSSM_WHERE_DEVICE,
            slots: ids(of_slots, REPLAYSSM_DTYPE_I64, 1),
            rings: ids(of_rings, REPLAYSSM_DTYPE_I32, 1),
        });
        let batch = desc!(replayssm_batch {
            flags: REPLAYSSM_BATCH_EXTEND,
            n_rows: rows as i32,
            tokens: tokens as i32,
            keep_tail: TAIL,
            slots: ids(of_slots, REPLAYSSM_DTYPE_I64, 1),
            rings: ids(of_rings, REPLAYSSM_DTYPE_I32, 1),
        });
        // SAFETY: everything lives until the work has run; host lists are read before a call returns.
        unsafe {
            accepted(replayssm_reset(slots, &host, null(), &exec));
            for (pool, state) in self.handles.pools.iter().zip(&self.states) {
                let state = self.state(state);
                accepted(replayssm_import(*pool, &device, self.positions.part(0).cast(), &state, &exec));
                accepted(replayssm_import(*pool, &host, [40i64, 50].as_ptr(), &state, &exec));
            }
            self.layers(&batch, &exec);
            accepted(replayssm_commit(slots, &batch, null(), &exec));
            accepted(replayssm_rewind(slots, &host, [1, 2].as_ptr(), null_mut(), &exec));
            for (pool, state) in self.handles.pools.iter().zip(&self.states) {
                let state = self.state(state);
                accepted(replayssm_export(*pool, &device, null(), &state, &exec));
                accepted(replayssm_export(*pool, &host, [45i64, 55].as_ptr(), &state, &exec));
            }
        }
    }

    fn state(&self, block: &Block) -> replayssm_state {
        desc!(replayssm_state { dtype: REPLAYSSM_DTYPE_F32, layer: -1, data: block.part(0) })
    }

    /// What the calls have written for the caller.
    pub fn outputs(&self) -> Vec<Part> {
        let mut parts = Vec::new();
        for (name, field, on_both) in self.fields.outputs() {
            let (bytes, gaps) = field.read();
            assert!(gaps.iter().all(|&byte| byte == 0xFF), "{name}: something was written between the elements");
            parts.push(Part { name: name.into(), on_both, bytes });
        }
        let mut other = |name: &str, block: &Block| {
            parts.push(Part { name: name.into(), on_both: true, bytes: block.read() });
        };
        other("what the rewind has done", &self.rewind[3]);
        other("cursors", &self.cursors[2]);
        for (i, state) in self.states.iter().enumerate() {
            other(&format!("exported states of pool {i}"), state);
        }
        parts
    }

    /// The library's memory.
    pub fn memory(&self) -> Vec<Part> {
        let mut parts = Vec::new();
        for (i, &pool) in self.handles.pools.iter().enumerate() {
            for c in components(pool) {
                for layer in 0..if i == 1 { MAMBA_LAYERS } else { 1 } {
                    for index in 0..if c.per_ring == 1 { RINGS } else { SLOTS } {
                        parts.push(Part {
                            name: format!("pool {i}, component {}, layer {layer}, slot or ring {index}", c.kind),
                            on_both: c.kind != REPLAYSSM_COMPONENT_U,
                            bytes: gpu::read(self.gpu, address(&c, layer, index), c.bytes as usize),
                        });
                    }
                }
            }
        }
        parts
    }

    /// The cursor of a slot's ring, on the CPU.
    pub fn cursor(&self, slot: usize) -> replayssm_cursor {
        let (zero, ring) = ([0i64], [ring_of(slot) as i64]);
        let list = desc!(replayssm_list {
            n: 1,
            place: REPLAYSSM_WHERE_HOST,
            slots: replayssm_ids { data: zero.as_ptr().cast(), stride: 1, dtype: REPLAYSSM_DTYPE_I64, reserved: 0 },
            rings: replayssm_ids { data: ring.as_ptr().cast(), stride: 1, dtype: REPLAYSSM_DTYPE_I64, reserved: 0 },
        });
        // SAFETY: a cursor is plain data.
        let mut cursor: replayssm_cursor = unsafe { std::mem::zeroed() };
        // SAFETY: everything lives until the call returns.
        accepted(unsafe { replayssm_read_cursors(self.handles.slots, &list, &mut cursor, null()) });
        cursor
    }

    pub fn report(&self, clear: bool) -> replayssm_report {
        let mut report = desc!(replayssm_report {});
        // SAFETY: the report is a local.
        accepted(unsafe { replayssm_check(self.handles.slots, clear.into(), &mut report) });
        report
    }

    /// A round from start to end.
    pub fn run(&self, round: &Round, stream: usize) {
        self.load(round);
        self.enqueue(stream, 0);
        self.sync();
    }

    #[track_caller]
    pub fn sync(&self) {
        if let Some(gpu) = self.gpu {
            gpu.sync();
        }
    }
}

/// What a snapshot, a flush and copies behind a model step take.
pub struct Copies {
    at: Block,
    dst: Block,
    /// Slot and ring of the flushes, and of a copy's source and target.
    flushed: [Block; 3],
    from: [Block; 2],
    to: [Block; 2],
    stored: Block,
}

impl Copies {
    pub fn new(gpu: Option<Gpu>) -> Self {
        let block = |n: usize| Block::new(gpu, n * 8);
        Copies {
            at: block(ROWS),
            dst: block(ROWS),
            flushed: [block(2), block(2), block(2)],
            from: [block(1), block(1)],
            to: [block(1), block(1)],
            stored: block(1),
        }
    }

    /// at and dst of rows; slots to flush, with positions for later; source and target of a fork, and where the source is stored.
    pub fn load(&self, at: &[i64], dst: &[i64], flushed: [i64; 2], later: [i64; 2], copied: [i64; 3]) {
        let ring = |slot: i64| if slot < 0 { slot } else { ring_of(slot as usize) as i64 };
        self.at.write(bytes(at));
        self.dst.write(bytes(dst));
        self.flushed[0].write(bytes(&flushed));
        self.flushed[1].write(bytes(&flushed.map(ring)));
        self.flushed[2].write(bytes(&later));
        for (block, slot) in [(&self.from, copied[0]), (&self.to, copied[1])] {
            block[0].write(bytes(&[slot]));
            block[1].write(bytes(&[ring(slot)]));
        }
        self.stored.write(bytes(&copied[2..]));
    }

    pub fn enqueue(&self, model: &Model, stream: usize) {
        let (slots, batch, exec) = (model.handles.slots, model.batch(), model.exec(stream, 0));
        let snapshot =
            desc!(replayssm_snapshot_args { at: self.at.part(0).cast(), dst: ids(&self.dst, REPLAYSSM_DTYPE_I64, 1) });
        let [of_slots, of_rings, later] = &self.flushed;
        let flushed = Model::list(2, of_slots, of_rings);
        let later = desc!(replayssm_flush_args { later: 1, position: later.part(0).cast() });
        let (from, to) = (Model::list(1, &self.from[0], &self.from[1]), Model::list(1, &self.to[0], &self.to[1]));
        let stored = Model::list(1, &self.stored, &self.to[1]);
        let store = desc!(replayssm_copy_args { kind: REPLAYSSM_COPY_STORE });
        // SAFETY: everything lives until the work has run.
        unsafe {
            accepted(replayssm_snapshot(slots, &batch, &snapshot, &exec));
            accepted(replayssm_copy(slots, &from, &to, null(), &exec));
            accepted(replayssm_flush(slots, &flushed, null(), &exec));
            accepted(replayssm_flush(slots, &flushed, &later, &exec));
            accepted(replayssm_copy(slots, &from, &stored, &store, &exec));
        }
    }
}
