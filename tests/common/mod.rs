//! A model of equal layers on one slots handle, driven through the C interface, with inputs that are hard to get right by
//! accident: odd strides, NaN in everything that is not live, poisoned outputs.

#![allow(dead_code, missing_docs, reason = "each test program uses a part of it")]

pub mod device;
pub mod every_call;
pub mod gpu;
pub mod judge;
pub mod model;
pub mod oracle;

use std::ffi::{CStr, c_void};
use std::ptr::{null, null_mut};

use replayssm::ffi::*;

use device::{fill, peek};

/// SplitMix64: small, and the same everywhere.
#[derive(Clone)]
pub struct Rng(pub u64);

impl Rng {
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }
    /// 0 .. n - 1.
    pub fn below(&mut self, n: usize) -> usize {
        (self.next() % n as u64) as usize
    }
    /// Uniform in (0, 1).
    pub fn unit(&mut self) -> f64 {
        ((self.next() >> 11) as f64 + 0.5) / (1u64 << 53) as f64
    }
    /// Standard normal.
    pub fn normal(&mut self) -> f64 {
        (-2.0 * self.unit().ln()).sqrt() * (std::f64::consts::TAU * self.unit()).cos()
    }
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Skip {
    None,
    PerHead,
    PerElement,
}

/// Everything that can differ between two models. A delta rule has HV heads of V x K, and H groups.
#[derive(Clone, Debug)]
pub struct Spec {
    pub family: i32,
    pub heads: usize,
    pub headdim: usize,
    pub dstate: usize,
    pub groups: usize,
    pub layers: usize,
    pub io: i32,
    pub out: i32,
    pub format: i32,
    pub readout: i32,
    pub window: usize,
    pub t_max: usize,
    pub keep: usize,
    pub schedule: i32,
    pub slots: usize,
    pub rings: usize,
    pub softplus: bool,
    pub bias: bool,
    pub skip: Skip,
    pub gate: bool,
    pub dt_dtype: i32,
    /// Of A, the bias and D; 0: fp32, and bf16 for the bias.
    pub param_dtype: i32,
    pub stochastic: bool,
    /// Delta rules: how g comes, whether q and k are normalised, whether beta comes processed, and the rest.
    pub gate_kind: i32,
    pub l2norm: bool,
    pub beta_processed: bool,
    pub head_map: i32,
    pub scale: f32,
    pub u_dtype: i32,
    pub threads: i32,
    pub parts: i32,
    /// Of slot and ring ids. With 32 bits, ring ids that equal the slot ids are left out.
    pub ids: i32,
    /// Inputs and outputs without gaps, at even addresses.
    pub contiguous: bool,
    /// Whether calls look for misuse.
    pub checks: bool,
    pub seed: u64,
}

impl Default for Spec {
    fn default() -> Self {
        Spec {
            family: REPLAYSSM_FAMILY_MAMBA2,
            heads: 4,
            headdim: 20,
            dstate: 40,
            groups: 2,
            layers: 1,
            io: REPLAYSSM_DTYPE_BF16,
            out: REPLAYSSM_DTYPE_F32,
            format: REPLAYSSM_FORMAT_SPLIT32,
            readout: REPLAYSSM_READOUT_EXACT,
            window: 16,
            t_max: 4,
            keep: 0,
            schedule: REPLAYSSM_SCHEDULE_STAGGERED,
            slots: 8,
            rings: 0,
            softplus: true,
            bias: true,
            skip: Skip::PerHead,
            gate: true,
            dt_dtype: REPLAYSSM_DTYPE_F32,
            param_dtype: 0,
            stochastic: false,
            gate_kind: REPLAYSSM_GATE_SOFTPLUS,
            l2norm: true,
            beta_processed: false,
            head_map: REPLAYSSM_HEAD_MAP_GROUPED,
            scale: 0.0,
            u_dtype: 0,
            threads: 1,
            parts: 1,
            ids: REPLAYSSM_DTYPE_I64,
            contiguous: false,
            checks: false,
            seed: 1,
        }
    }
}

pub const FAMILIES: [i32; 3] = [REPLAYSSM_FAMILY_MAMBA2, REPLAYSSM_FAMILY_GDN, REPLAYSSM_FAMILY_KDA];

impl Spec {
    pub fn is_delta(&self) -> bool {
        self.family != REPLAYSSM_FAMILY_MAMBA2
    }

    /// Gates of a token: one per head, or per head and key channel.
    pub fn gates(&self) -> usize {
        self.heads * if self.family == REPLAYSSM_FAMILY_KDA { self.dstate } else { 1 }
    }

    /// Whether gates go through softplus or a sigmoid.
    pub fn raw_gates(&self) -> bool {
        if self.is_delta() { self.gate_kind != REPLAYSSM_GATE_LOG_DECAY } else { self.softplus }
    }

    /// The group of a head.
    pub fn group(&self, head: usize) -> usize {
        if self.is_delta() && self.head_map == REPLAYSSM_HEAD_MAP_TILED {
            head % self.groups
        } else {
            head / (self.heads / self.groups)
        }
    }
}

/// What `REPLAYSSM_GATE_LOWER_BOUND` is used with.
pub const LOWER_BOUND: f32 = -5.0;

pub fn size_of_dtype(dtype: i32) -> usize {
    if dtype == REPLAYSSM_DTYPE_F32 { 4 } else { 2 }
}

/// Rounds to a dtype and gives its bits.
pub fn encode(dtype: i32, value: f64) -> u32 {
    let value = value as f32;
    match dtype {
        REPLAYSSM_DTYPE_F32 => value.to_bits(),
        REPLAYSSM_DTYPE_BF16 => half::bf16::from_f32(value).to_bits().into(),
        REPLAYSSM_DTYPE_F16 => half::f16::from_f32(value).to_bits().into(),
        _ => panic!("dtype {dtype}"),
    }
}

pub fn decode(dtype: i32, bits: u32) -> f64 {
    match dtype {
        REPLAYSSM_DTYPE_F32 => f32::from_bits(bits).into(),
        REPLAYSSM_DTYPE_BF16 => half::bf16::from_bits(bits as u16).to_f64(),
        REPLAYSSM_DTYPE_F16 => half::f16::from_bits(bits as u16).to_f64(),
        _ => panic!("dtype {dtype}"),
    }
}

/// An array of elements of one dtype.
#[derive(Clone)]
pub struct Array {
    pub dtype: i32,
    pub bytes: Vec<u8>,
}

impl Array {
    /// All NaN.
    pub fn poisoned(dtype: i32, n: usize) -> Self {
        Array { dtype, bytes: vec![0xFF; n * size_of_dtype(dtype) + 16] }
    }
    pub fn set(&mut self, i: usize, bits: u32) {
        let size = size_of_dtype(self.dtype);
        self.bytes[i * size..][..size].copy_from_slice(&bits.to_le_bytes()[..size]);
    }
    pub fn get(&self, i: usize) -> u32 {
        let size = size_of_dtype(self.dtype);
        let mut bits = [0; 4];
        bits[..size].copy_from_slice(&self.bytes[i * size..][..size]);
        u32::from_le_bytes(bits)
    }
    pub fn value(&self, i: usize) -> f64 {
        decode(self.dtype, self.get(i))
    }
    pub fn at(&self, i: usize) -> *mut c_void {
        self.bytes[i * size_of_dtype(self.dtype)..].as_ptr() as *mut c_void
    }
}

/// The inputs of one token of one layer, as bits of their dtypes. For a delta rule x is v, b is k, c is q, dt is g, and z is not used.
#[derive(Clone, Debug, PartialEq)]
pub struct Token {
    pub beta: Vec<u32>,
    pub x: Vec<u32>,
    pub b: Vec<u32>,
    pub c: Vec<u32>,
    pub dt: Vec<u32>,
    pub z: Vec<u32>,
}

/// The parameters of one layer.
#[derive(Clone)]
pub struct Params {
    pub a: Array,
    pub bias: Array,
    pub d: Array,
    /// Of the generator: mean keys per key head, log decays per gate.
    pub mean: Vec<f64>,
    pub decay: Vec<f64>,
}

/// Values at addresses that a device can have: arrays on a thread's stack and constants are the host's alone.
pub fn heap<T, const N: usize>(values: [T; N]) -> Vec<T> {
    Vec::from(values)
}

/// A call was accepted; waits for its work.
pub fn ok(status: i32) {
    assert_eq!(status, REPLAYSSM_OK, "{}", message());
    device::sync();
}

pub fn message() -> String {
    // SAFETY: the library's text lives until this thread's next failing call.
    unsafe { CStr::from_ptr(replayssm_last_error_message()) }.to_string_lossy().into_owned()
}

fn silu(x: f64) -> f64 {
    x / (1.0 + (-x).exp())
}

/// One row of a batch: slot, ring and the tokens, each with an entry per layer.
#[derive(Clone)]
pub struct Row {
    pub slot: i64,
    pub ring: i64,
    pub tokens: Vec<Vec<Token>>,
    pub flush: bool,
}

impl Row {
    pub fn new(slot: usize, tokens: &[Vec<Token>]) -> Self {
        Row { slot: slot as i64, ring: slot as i64, tokens: tokens.to_vec(), flush: false }
    }
}

/// Outputs of one call: per row and token, the bits of `[H, D]`.
pub type Outputs = Vec<Vec<Vec<u32>>>;

pub struct Rig {
    /// Of the context; [`REPLAYSSM_BACKEND_CUDA`] has no threads and no parts, so the spec has none either.
    pub backend: i32,
    pub spec: Spec,
    pub params: Vec<Params>,
    pub context: *mut replayssm_context,
    pub slots: *mut replayssm_slots,
    pub pool: *mut replayssm_layers,
}

impl Drop for Rig {
    fn drop(&mut self) {
        replayssm_context_destroy(self.context);
        replayssm_slots_destroy(self.slots);
        replayssm_layers_destroy(self.pool);
    }
}

#[macro_export]
macro_rules! desc {
    ($ty:ident { $($field:ident: $value:expr),* $(,)? }) => {{
        // SAFETY: all zero bytes are a descriptor.
        let mut d: $ty = unsafe { std::mem::zeroed() };
        d.struct_size = std::mem::size_of::<$ty>() as u32;
        $(d.$field = $value;)*
        d
    }};
}

pub fn tensor(array: &Array, first: usize, row: usize, token: usize, head: usize) -> replayssm_tensor {
    replayssm_tensor {
        data: array.at(first),
        stride_row: row as i64,
        stride_token: token as i64,
        stride_head: head as i64,
        dtype: array.dtype,
        reserved: 0,
    }
}

pub const ABSENT: replayssm_tensor =
    replayssm_tensor { data: null_mut(), stride_row: 0, stride_token: 0, stride_head: 0, dtype: 0, reserved: 0 };

pub fn ids64(ids: &[i64]) -> replayssm_ids {
    replayssm_ids { data: ids.as_ptr().cast(), stride: 1, dtype: REPLAYSSM_DTYPE_I64, reserved: 0 }
}

pub fn ids32(ids: &[i32]) -> replayssm_ids {
    replayssm_ids { data: ids.as_ptr().cast(), stride: 1, dtype: REPLAYSSM_DTYPE_I32, reserved: 0 }
}

pub fn no_ids() -> replayssm_ids {
    replayssm_ids { data: null(), stride: 0, dtype: 0, reserved: 0 }
}

impl Rig {
    /// On the backend that the tests are for.
    pub fn new(spec: Spec) -> Self {
        Self::on_backend(device::backend(), spec).unwrap_or_else(|error| panic!("{error}"))
    }

    /// On a backend; the library's sentence if it cannot be had.
    pub fn on_backend(backend: i32, spec: Spec) -> Result<Self, String> {
        Self::lent_on(backend, spec, &[])
    }

    /// On the backend that the tests are for, with a part of its memory lent.
    pub fn lent(spec: Spec, lent: &[replayssm_lent]) -> Self {
        Self::lent_on(device::backend(), spec, lent).unwrap_or_else(|error| panic!("{error}"))
    }

    fn lent_on(backend: i32, spec: Spec, lent: &[replayssm_lent]) -> Result<Self, String> {
        let context = device::context(backend, spec.threads)?;
        let mut slots = null_mut();
        let s = Self::slots_desc(&spec);
        // SAFETY: the descriptor and the out-parameter are locals.
        ok(unsafe { replayssm_slots_create(context, &s, &mut slots) });
        Ok(Self::on_lent(backend, context, slots, spec, lent))
    }

    /// Another pool on this one's slots.
    pub fn beside(&self, spec: Spec) -> Self {
        Self::on_lent(self.backend, self.context, self.slots, spec, &[])
    }

    /// A pool of a rig, as it is described.
    pub fn pool_desc(spec: &Spec) -> replayssm_pool_desc {
        let mut p = desc!(replayssm_pool_desc {
            family: spec.family,
            n_layers: spec.layers as i32,
            io: spec.io,
            out: spec.out,
            format: spec.format,
            readout: spec.readout,
            stochastic_rounding: spec.stochastic.into(),
        });
        let [heads, headdim, dstate, groups] = [spec.heads, spec.headdim, spec.dstate, spec.groups].map(|n| n as i32);
        if spec.is_delta() {
            (p.HV, p.V, p.K, p.H) = (heads, headdim, dstate, groups);
            (p.head_map, p.u_dtype) = (spec.head_map, spec.u_dtype);
        } else {
            (p.nheads, p.headdim, p.dstate, p.ngroups) = (heads, headdim, dstate, groups);
        }
        p
    }

    /// The slots handle of a rig, as it is described.
    pub fn slots_desc(spec: &Spec) -> replayssm_slots_desc {
        desc!(replayssm_slots_desc {
            n_slots: spec.slots as i32,
            n_rings: spec.rings as i32,
            window: spec.window as i32,
            max_step_tokens: spec.t_max as i32,
            min_rewind: spec.keep as i32,
            schedule: spec.schedule,
            flags: if spec.checks { REPLAYSSM_SLOTS_CHECKS } else { 0 },
        })
    }

    fn on_lent(
        backend: i32,
        context: *mut replayssm_context,
        slots: *mut replayssm_slots,
        mut spec: Spec,
        lent: &[replayssm_lent],
    ) -> Self {
        if backend == REPLAYSSM_BACKEND_CUDA {
            (spec.threads, spec.parts) = (1, 1);
        }
        let mut rng = Rng(spec.seed ^ 0x5EED);
        let params = (0..spec.layers).map(|_| Params::random(&spec, &mut rng)).collect();
        let mut pool = null_mut();
        let p = Self::pool_desc(&spec);
        // SAFETY: descriptors and the out-parameter are locals.
        ok(unsafe { replayssm_layers_create(slots, &p, lent.as_ptr(), lent.len() as i32, &mut pool) });
        let rig = Rig { backend, spec, params, context, slots, pool };
        rig.poison_rings();
        rig
    }

    /// Fills every ring row with NaN: rows outside the history are never trusted.
    pub fn poison_rings(&self) {
        let n = if self.spec.rings == 0 { self.spec.slots } else { self.spec.rings };
        for c in self.components().iter().filter(|c| c.per_ring == 1) {
            for layer in 0..self.spec.layers {
                for ring in 0..n {
                    fill(address(c, layer, ring), 0xFF, c.bytes as usize);
                }
            }
        }
    }

    /// Takes lent memory from elsewhere.
    pub fn rebind(&self, lent: &[replayssm_lent]) -> i32 {
        // SAFETY: everything lives until the call returns.
        unsafe { replayssm_layers_rebind(self.pool, lent.as_ptr(), lent.len() as i32) }
    }

    pub fn components(&self) -> Vec<replayssm_component> {
        components(self.pool)
    }

    pub fn component(&self, kind: i32) -> replayssm_component {
        *self.components().iter().find(|c| c.kind == kind).expect("the component")
    }

    /// Bytes of one component's part.
    pub fn part(&self, kind: i32, layer: usize, index: usize) -> Vec<u8> {
        let c = self.component(kind);
        peek(address(&c, layer, index), c.bytes as usize)
    }

    /// Tags of a slot's tiles.
    pub fn tags(&self, layer: usize, slot: usize) -> Vec<i64> {
        let bytes = self.part(REPLAYSSM_COMPONENT_TAGS, layer, slot);
        bytes.as_chunks::<8>().0.iter().map(|b| i64::from_le_bytes(*b)).collect()
    }

    /// A fresh token: an entry per layer.
    pub fn token(&self, rng: &mut Rng) -> Vec<Token> {
        self.params.iter().map(|params| Token::random(&self.spec, params, rng)).collect()
    }

    pub fn tokens(&self, rng: &mut Rng, n: usize) -> Vec<Vec<Token>> {
        (0..n).map(|_| self.token(rng)).collect()
    }

    pub fn step(&self, rows: &[Row]) -> Outputs {
        let mut last = Vec::new();
        for layer in 0..self.spec.layers {
            last = self.layer(layer, rows, false, 0);
        }
        last
    }

    /// Extends rows in all layers and commits.
    pub fn extend(&self, rows: &[Row], keep_tail: i32) -> Outputs {
        let mut last = Vec::new();
        for layer in 0..self.spec.layers {
            last = self.layer(layer, rows, true, keep_tail);
        }
        self.commit_batch(rows, true, keep_tail, None);
        last
    }

    pub fn commit(&self, rows: &[Row], counts: &[i32]) {
        self.commit_batch(rows, false, 0, Some(counts));
    }

    pub fn commit_batch(&self, rows: &[Row], extend: bool, keep_tail: i32, counts: Option<&[i32]>) {
        let batch = BatchData::new(self, rows, extend, keep_tail);
        let counts = counts.map(<[i32]>::to_vec);
        let args = desc!(replayssm_commit_args { counts: counts.as_ref().map_or(null(), |counts| counts.as_ptr()) });
        self.in_parts(|exec| {
            // SAFETY: everything lives until the call returns.
            unsafe { replayssm_commit(self.slots, &batch.desc(), &args, exec) }
        });
    }

    /// How calls are made that have no parts.
    pub fn exec() -> replayssm_exec {
        desc!(replayssm_exec { stream: device::stream() })
    }

    fn in_parts(&self, call: impl Fn(&replayssm_exec) -> i32) {
        for part in 0..self.spec.parts {
            let exec = desc!(replayssm_exec { part: part, n_parts: self.spec.parts, stream: device::stream() });
            ok(call(&exec));
        }
    }

    /// One layer's step or extend, with all that surrounds the live elements poisoned.
    pub fn layer(&self, layer: usize, rows: &[Row], extend: bool, keep_tail: i32) -> Outputs {
        let s = &self.spec;
        let batch = BatchData::new(self, rows, extend, keep_tail);
        let io = Inputs::new(s, &self.params[layer], rows, layer);
        self.in_parts(|exec| io.call(self, layer, &batch.desc(), extend, exec));
        io.outputs(s, rows)
    }

    /// Exact state of a slot at a position (or all committed), fp32 bits `[H, D, N]`.
    pub fn export(&self, layer: usize, slot: usize, ring: usize, at: Option<i64>) -> Vec<u32> {
        let s = &self.spec;
        let n = s.heads * s.headdim * s.dstate;
        let mut data = vec![0x7FC0_1234u32; n];
        let (slot, ring) = ([slot as i64], [ring as i64]);
        let list =
            desc!(replayssm_list { n: 1, place: REPLAYSSM_WHERE_HOST, slots: ids64(&slot), rings: ids64(&ring) });
        let dst =
            desc!(replayssm_state { dtype: REPLAYSSM_DTYPE_F32, layer: layer as i32, data: data.as_mut_ptr().cast() });
        let at = at.map(|at| [at]);
        self.in_parts(|exec| {
            // SAFETY: everything lives until the call returns.
            unsafe { replayssm_export(self.pool, &list, at.as_ref().map_or(null(), |at| at.as_ptr()), &dst, exec) }
        });
        data
    }

    pub fn reset(&self, slot: usize, ring: usize, position: i64) {
        let (slot, ring, position) = ([slot as i64], [ring as i64], [position]);
        let list =
            desc!(replayssm_list { n: 1, place: REPLAYSSM_WHERE_HOST, slots: ids64(&slot), rings: ids64(&ring) });
        let args = desc!(replayssm_reset_args { position: position.as_ptr() });
        // SAFETY: everything lives until the call returns.
        ok(unsafe { replayssm_reset(self.slots, &list, &args, &Self::exec()) });
    }

    pub fn reset_with_seed(&self, slot: usize, position: i64, seed: u64) {
        let list = OneList::new(slot as i64, slot as i64);
        let (position, seed) = ([position], [seed]);
        let args = desc!(replayssm_reset_args { position: position.as_ptr(), seed: seed.as_ptr() });
        // SAFETY: everything lives until the call returns.
        ok(unsafe { replayssm_reset(self.slots, &list.desc(), &args, &Self::exec()) });
    }

    /// The state of a checkpoint without a ring that stands at a position, read from its bytes: of fp32 formats.
    pub fn stored(&self, layer: usize, slot: usize) -> Vec<u32> {
        let s = &self.spec;
        let bytes = self.part(REPLAYSSM_COMPONENT_CHECKPOINT, layer, slot);
        if s.format == REPLAYSSM_FORMAT_F32 {
            return bytes.as_chunks::<4>().0.iter().map(|b| u32::from_le_bytes(*b)).collect();
        }
        let n = s.headdim * s.dstate;
        let words: Vec<u16> = bytes.as_chunks::<2>().0.iter().map(|b| u16::from_le_bytes(*b)).collect();
        let heads = words.chunks(2 * n);
        let join = |head: &[u16], i: usize| (u32::from(head[i]) << 16).wrapping_add(head[n + i] as i16 as u32);
        heads.flat_map(|head| (0..n).map(|i| join(head, i)).collect::<Vec<_>>()).collect()
    }

    /// Fills a slot's (or ring's) part of every component with a byte.
    pub fn fill_part(&self, index: usize, per_ring: bool, byte: u8) {
        for c in self.components().iter().filter(|c| (c.per_ring == 1) == per_ring) {
            for layer in 0..self.spec.layers {
                fill(address(c, layer, index), byte, c.bytes as usize);
            }
        }
    }

    pub fn import(&self, layer: usize, slot: usize, ring: usize, position: Option<i64>, state: &[u32]) {
        let state = state.to_vec();
        let (slot, ring) = ([slot as i64], [ring as i64]);
        let list =
            desc!(replayssm_list { n: 1, place: REPLAYSSM_WHERE_HOST, slots: ids64(&slot), rings: ids64(&ring) });
        let src = desc!(replayssm_state {
            dtype: REPLAYSSM_DTYPE_F32,
            layer: layer as i32,
            data: state.as_ptr().cast_mut().cast(),
        });
        let at = position.map(|at| [at]);
        // SAFETY: everything lives until the call returns.
        ok(unsafe {
            replayssm_import(self.pool, &list, at.as_ref().map_or(null(), |at| at.as_ptr()), &src, &Self::exec())
        });
    }

    /// A slot with its ring, in all pools of the slots handle.
    pub fn save(&self, kind: i32, slot: usize, ring: usize) -> Vec<u8> {
        let mut bytes = 0;
        // SAFETY: the out-parameter is a local.
        ok(unsafe { replayssm_save_bytes(self.slots, kind, &mut bytes) });
        let mut blob = vec![0xAA; bytes as usize + 5];
        assert_eq!(self.try_save(kind, slot, ring, &mut blob), REPLAYSSM_OK, "{}", message());
        assert!(blob[bytes as usize..].iter().all(|&byte| byte == 0xAA), "written behind the blob");
        blob.truncate(bytes as usize);
        blob
    }

    pub fn try_save(&self, kind: i32, slot: usize, ring: usize, blob: &mut [u8]) -> i32 {
        let (slot, ring) = ([slot as i64], [ring as i64]);
        let list =
            desc!(replayssm_list { n: 1, place: REPLAYSSM_WHERE_HOST, slots: ids64(&slot), rings: ids64(&ring) });
        // SAFETY: everything lives until the call returns.
        unsafe { replayssm_save(self.slots, &list, kind, blob.as_mut_ptr().cast(), blob.len() as u64, &Self::exec()) }
    }

    pub fn restore(&self, slot: usize, ring: usize, blob: &[u8]) -> i32 {
        let (slot, ring) = ([slot as i64], [ring as i64]);
        let list =
            desc!(replayssm_list { n: 1, place: REPLAYSSM_WHERE_HOST, slots: ids64(&slot), rings: ids64(&ring) });
        // SAFETY: everything lives until the call returns.
        unsafe { replayssm_restore(self.slots, &list, blob.as_ptr().cast(), blob.len() as u64, null(), &Self::exec()) }
    }

    /// Folds history now, all of it or up to a position.
    pub fn flush(&self, slot: usize, ring: usize, position: Option<i64>) {
        self.flush_args(slot, ring, position, false);
    }

    /// Tells later steps to fold.
    pub fn flush_later(&self, slot: usize, ring: usize, position: i64) {
        self.flush_args(slot, ring, Some(position), true);
    }

    fn flush_args(&self, slot: usize, ring: usize, position: Option<i64>, later: bool) {
        let list = OneList::new(slot as i64, ring as i64);
        let position = position.map(Box::new);
        let position = position.as_ref().map_or(null(), |at| &raw const **at);
        let args = desc!(replayssm_flush_args { later: later.into(), position: position });
        // SAFETY: everything lives until the call returns.
        self.in_parts(|exec| unsafe { replayssm_flush(self.slots, &list.desc(), &args, exec) });
    }

    /// Copies a slot and ring (or what the kind has of them) to another.
    pub fn copy(&self, kind: i32, from: (usize, usize), to: (usize, usize), position: Option<i64>) {
        let (from, to) = (OneList::new(from.0 as i64, from.1 as i64), OneList::new(to.0 as i64, to.1 as i64));
        let position = position.map(Box::new);
        let position = position.as_ref().map_or(null(), |at| &raw const **at);
        let args = desc!(replayssm_copy_args { kind: kind, position: position });
        // SAFETY: everything lives until the call returns.
        self.in_parts(|exec| unsafe { replayssm_copy(self.slots, &from.desc(), &to.desc(), &args, exec) });
    }

    /// Copies between slots and rings of the same numbers, by lists.
    pub fn copy_lists(
        &self,
        kind: i32,
        from: &[i64],
        to: &[i64],
        position: Option<&[i64]>,
        generation: Option<&[u32]>,
    ) {
        let list = |ids: &[i64]| {
            desc!(replayssm_list {
                n: ids.len() as i32,
                place: REPLAYSSM_WHERE_HOST,
                slots: ids64(ids),
                rings: ids64(ids)
            })
        };
        let args = desc!(replayssm_copy_args {
            kind: kind,
            position: position.map_or(null(), <[i64]>::as_ptr),
            generation: generation.map_or(null(), <[u32]>::as_ptr),
        });
        // SAFETY: everything lives until the call returns.
        self.in_parts(|exec| unsafe { replayssm_copy(self.slots, &list(from), &list(to), &args, exec) });
    }

    pub fn copy_of_lists(&self, kind: i32, from: &PoolList, to: &PoolList, position: Option<i64>) {
        let position = position.map(Box::new);
        let position = position.as_ref().map_or(null(), |at| &raw const **at);
        let args = desc!(replayssm_copy_args { kind: kind, position: position });
        // SAFETY: everything lives until the call returns.
        self.in_parts(|exec| unsafe { replayssm_copy(self.slots, &from.desc(), &to.desc(), &args, exec) });
    }

    pub fn reset_list(&self, list: &PoolList) {
        // SAFETY: everything lives until the call returns.
        self.in_parts(|exec| unsafe { replayssm_reset(self.slots, &list.desc(), null(), exec) });
    }

    pub fn flush_list(&self, list: &PoolList) {
        // SAFETY: everything lives until the call returns.
        self.in_parts(|exec| unsafe { replayssm_flush(self.slots, &list.desc(), null(), exec) });
    }

    /// Whether the tokens could be taken back.
    pub fn rewind_list(&self, list: &PoolList, n: i32) -> bool {
        let (n, mut done) = (heap([n]), heap([-1]));
        // SAFETY: everything lives until the call returns.
        ok(unsafe { replayssm_rewind(self.slots, &list.desc(), n.as_ptr(), done.as_mut_ptr(), &Self::exec()) });
        done[0] == 1
    }

    /// Behind a commit of these rows: states at the given positions go to the given slots.
    pub fn snapshot(&self, rows: &[Row], extend: bool, generation: Option<&[u32]>, at: &[i64], dst: &[i64]) {
        let batch = BatchData::new(self, rows, extend, 0);
        let (at, dst, generation) = (at.to_vec(), dst.to_vec(), generation.map(<[u32]>::to_vec));
        let args = desc!(replayssm_snapshot_args { at: at.as_ptr(), dst: ids64(&dst) });
        let generation = generation.as_ref().map_or(null(), |g| g.as_ptr());
        let batch = replayssm_batch { generation, ..batch.desc() };
        // SAFETY: everything lives until the call returns.
        self.in_parts(|exec| unsafe { replayssm_snapshot(self.slots, &batch, &args, exec) });
    }

    /// Bytes of all components of a slot (or a ring) in all layers.
    pub fn bytes_of(&self, index: usize, per_ring: bool) -> Vec<u8> {
        let of_kind = self.components().into_iter().filter(|c| (c.per_ring == 1) == per_ring);
        of_kind
            .flat_map(|c| (0..self.spec.layers).flat_map(move |l| peek(address(&c, l, index), c.bytes as usize)))
            .collect()
    }

    /// Whether the tokens could be taken back.
    pub fn rewind(&self, slot: usize, ring: usize, n: i32) -> bool {
        let (slot, ring) = ([slot as i64], [ring as i64]);
        let list =
            desc!(replayssm_list { n: 1, place: REPLAYSSM_WHERE_HOST, slots: ids64(&slot), rings: ids64(&ring) });
        let mut done = Box::new(-1);
        // SAFETY: everything lives until the call returns.
        ok(unsafe { replayssm_rewind(self.slots, &list, &n, &mut *done, &Self::exec()) });
        *done == 1
    }

    pub fn cursor(&self, ring: usize) -> replayssm_cursor {
        let ids = [ring as i64];
        // Slots and rings may have different counts: slot 0 always exists.
        let slot = [0i64];
        let list = desc!(replayssm_list { n: 1, place: REPLAYSSM_WHERE_HOST, slots: ids64(&slot), rings: ids64(&ids) });
        // SAFETY: a cursor is plain data.
        let mut cursor: Box<replayssm_cursor> = Box::new(unsafe { std::mem::zeroed() });
        // SAFETY: everything lives until the call returns.
        ok(unsafe { replayssm_read_cursors(self.slots, &list, &mut *cursor, &Self::exec()) });
        *cursor
    }

    pub fn faults(&self, clear: bool) -> replayssm_report {
        let mut report = desc!(replayssm_report {});
        // SAFETY: the report is a local.
        ok(unsafe { replayssm_check(self.slots, clear.into(), &mut report) });
        report
    }

    pub fn stats(&self) -> replayssm_stats {
        let mut stats = desc!(replayssm_stats {});
        // SAFETY: the stats are a local.
        ok(unsafe { replayssm_stats_read(self.slots, &mut stats) });
        stats
    }
}

/// A host list of one entry.
struct OneList([i64; 1], [i64; 1]);

impl OneList {
    fn new(slot: i64, ring: i64) -> Self {
        OneList([slot], [ring])
    }

    fn desc(&self) -> replayssm_list {
        desc!(replayssm_list { n: 1, place: REPLAYSSM_WHERE_HOST, slots: ids64(&self.0), rings: ids64(&self.1) })
    }
}

/// A list of one ring, and of a slot in each of the pools.
pub struct PoolList {
    place: i32,
    pools: Vec<*const replayssm_layers>,
    slots: Vec<Vec<i64>>,
    ring: Vec<i64>,
    ids: Vec<replayssm_ids>,
}

impl PoolList {
    pub fn new(place: i32, pools: &[(*mut replayssm_layers, i64)], ring: i64) -> Self {
        let slots: Vec<Vec<i64>> = pools.iter().map(|&(_, slot)| vec![slot]).collect();
        let ids = slots.iter().map(|slot| ids64(slot)).collect();
        PoolList { place, pools: pools.iter().map(|p| p.0.cast_const()).collect(), slots, ring: vec![ring], ids }
    }

    pub fn desc(&self) -> replayssm_list {
        desc!(replayssm_list {
            n: 1,
            place: self.place,
            rings: ids64(&self.ring),
            n_pools: self.slots.len() as i32,
            pools: self.pools.as_ptr(),
            pool_slots: self.ids.as_ptr(),
        })
    }
}

/// Where a component's part of a layer and a slot (or ring) begins.
pub fn address(c: &replayssm_component, layer: usize, index: usize) -> usize {
    // SAFETY: an array of the library's with an element for each layer.
    let base = unsafe { c.layer_bases.add(layer).read() };
    (base as i64 + index as i64 * c.slot_stride_bytes) as usize
}

pub fn components(pool: *const replayssm_layers) -> Vec<replayssm_component> {
    let mut list = vec![desc!(replayssm_component {}); 8];
    let mut n = 0;
    // SAFETY: the array has as many elements as it says.
    ok(unsafe { replayssm_layers_components(pool, list.as_mut_ptr(), 8, &mut n) });
    list.truncate(n as usize);
    list
}

/// Ids, lengths and masks of a batch. Dense if all rows have one length, packed otherwise.
pub struct BatchData {
    slots: Vec<i64>,
    rings: Vec<i64>,
    /// The same in 32 bits, where the model has them.
    short: Option<[Vec<i32>; 2]>,
    cu: Vec<i32>,
    flush: Vec<u8>,
    dense: Option<i32>,
    extend: bool,
    keep_tail: i32,
}

impl BatchData {
    pub fn new(rig: &Rig, rows: &[Row], extend: bool, keep_tail: i32) -> Self {
        let short = |id: fn(&Row) -> i64| rows.iter().map(|r| id(r) as i32).collect::<Vec<_>>();
        let mut cu = vec![0];
        for row in rows {
            cu.push(cu.last().unwrap() + row.tokens.len() as i32);
        }
        BatchData {
            slots: rows.iter().map(|r| r.slot).collect(),
            rings: rows.iter().map(|r| r.ring).collect(),
            short: (rig.spec.ids == REPLAYSSM_DTYPE_I32).then(|| [short(|r| r.slot), short(|r| r.ring)]),
            flush: rows.iter().map(|r| r.flush.into()).collect(),
            dense: dense_length(rows).map(|t| t as i32),
            cu,
            extend,
            keep_tail,
        }
    }

    pub fn desc(&self) -> replayssm_batch {
        let (slots, rings) = match &self.short {
            None => (ids64(&self.slots), ids64(&self.rings)),
            Some([slots, rings]) if slots == rings => (ids32(slots), no_ids()),
            Some([slots, rings]) => (ids32(slots), ids32(rings)),
        };
        desc!(replayssm_batch {
            flags: if self.extend { REPLAYSSM_BATCH_EXTEND } else { 0 },
            n_rows: self.slots.len() as i32,
            tokens: self.dense.unwrap_or(0),
            cu_seqlens: if self.dense.is_some() { null() } else { self.cu.as_ptr() },
            // Rows of one token say so: there are kernels for them.
            max_tokens: i32::from(self.cu.windows(2).all(|row| row[1] - row[0] <= 1)),
            n_tokens: if self.dense.is_some() { 0 } else { i64::from(*self.cu.last().unwrap()) },
            slots: slots,
            rings: rings,
            flush: self.flush.as_ptr(),
            keep_tail: self.keep_tail,
        })
    }
}

fn dense_length(rows: &[Row]) -> Option<usize> {
    let first = rows.first()?.tokens.len();
    (first > 0 && rows.iter().all(|r| r.tokens.len() == first)).then_some(first)
}

/// A call's tensors: x, B, C and z are slices of one packed row with gaps of NaN (unless they are to be contiguous), dt has a row
/// stride of its own.
pub struct Inputs {
    packed: Array,
    dt: Array,
    beta: Array,
    out: Array,
    params: Params,
    /// Elements of a packed row, of a dt row, of an output row and of a beta row.
    strides: [usize; 4],
    offsets: [usize; 4],
    /// Elements of an output row in front of the live ones.
    lead: usize,
    dense: usize,
}

impl Inputs {
    pub fn new(s: &Spec, params: &Params, rows: &[Row], layer: usize) -> Self {
        let (hd, gn) = (s.heads * s.headdim, s.groups * s.dstate);
        // Odd gaps.
        let [gap, one, lead] = if s.contiguous { [0; 3] } else { [3, 1, 1] };
        let offsets = [gap, gap + hd + one, gap + hd + one + gn, 2 * gap + hd + one + 2 * gn];
        let strides = [offsets[3] + hd + gap, s.gates() + 2 * one, hd + 5 * one, s.heads + one];
        let n = rows.iter().map(|r| r.tokens.len()).sum::<usize>().max(1);
        let mut io = Inputs {
            packed: Array::poisoned(s.io, n * strides[0]),
            dt: Array::poisoned(s.dt_dtype, n * strides[1]),
            beta: Array::poisoned(REPLAYSSM_DTYPE_F32, n * strides[3]),
            out: Array::poisoned(s.out, n * strides[2]),
            params: params.clone(),
            strides,
            offsets,
            lead,
            dense: dense_length(rows).unwrap_or(0),
        };
        io.fill(rows, layer);
        io
    }

    /// Writes the rows' tokens, one behind the other.
    pub fn fill(&mut self, rows: &[Row], layer: usize) {
        let (strides, offsets) = (self.strides, self.offsets);
        for (t, token) in rows.iter().flat_map(|r| &r.tokens).map(|t| &t[layer]).enumerate() {
            for (offset, values) in offsets.iter().zip([&token.x, &token.b, &token.c, &token.z]) {
                for (i, &bits) in values.iter().enumerate() {
                    self.packed.set(t * strides[0] + offset + i, bits);
                }
            }
            for (h, &bits) in token.dt.iter().enumerate() {
                self.dt.set(t * strides[1] + h, bits);
            }
            for (h, &bits) in token.beta.iter().enumerate() {
                self.beta.set(t * strides[3] + h, bits);
            }
        }
    }

    /// A step or extend with these inputs.
    pub fn call(
        &self,
        rig: &Rig,
        layer: usize,
        batch: &replayssm_batch,
        extend: bool,
        exec: *const replayssm_exec,
    ) -> i32 {
        let (pool, layer) = (rig.pool, layer as i32);
        // SAFETY: everything lives until the call returns.
        unsafe {
            if rig.spec.is_delta() {
                let args = self.delta_args(&rig.spec);
                match extend {
                    true => replayssm_delta_extend(pool, layer, batch, &args, exec),
                    false => replayssm_delta_step(pool, layer, batch, &args, exec),
                }
            } else {
                let args = self.args(&rig.spec);
                match extend {
                    true => replayssm_mamba2_extend(pool, layer, batch, &args, exec),
                    false => replayssm_mamba2_step(pool, layer, batch, &args, exec),
                }
            }
        }
    }

    pub fn delta_args(&self, s: &Spec) -> replayssm_delta_args {
        let [p, d, o, beta] = self.strides;
        let row = self.dense;
        let [v, k, q, _] = self.offsets;
        let gates = s.gates() / s.heads;
        desc!(replayssm_delta_args {
            gate: s.gate_kind,
            q: tensor(&self.packed, q, row * p, p, s.dstate),
            k: tensor(&self.packed, k, row * p, p, s.dstate),
            v: tensor(&self.packed, v, row * p, p, s.headdim),
            g: tensor(&self.dt, 0, row * d, d, gates),
            beta: tensor(&self.beta, 0, row * beta, beta, 1),
            A_log: if s.raw_gates() { tensor(&self.params.a, 0, 0, 0, 2) } else { ABSENT },
            dt_bias: if s.raw_gates() && s.bias { tensor(&self.params.bias, 0, 0, 0, gates) } else { ABSENT },
            lower_bound: if s.gate_kind == REPLAYSSM_GATE_LOWER_BOUND { LOWER_BOUND } else { 0.0 },
            scale: s.scale,
            no_l2norm: i32::from(!s.l2norm),
            beta_processed: s.beta_processed.into(),
            out: tensor(&self.out, self.lead, row * o, o, s.headdim),
        })
    }

    pub fn args(&self, s: &Spec) -> replayssm_mamba2_args {
        let [p, d, o, _] = self.strides;
        let row = self.dense;
        let [x, b, c, z] = self.offsets;
        desc!(replayssm_mamba2_args {
            no_softplus: if s.softplus { 0 } else { 1 },
            x: tensor(&self.packed, x, row * p, p, s.headdim),
            B: tensor(&self.packed, b, row * p, p, s.dstate),
            C: tensor(&self.packed, c, row * p, p, s.dstate),
            dt: tensor(&self.dt, 0, row * d, d, 1),
            A: tensor(&self.params.a, 0, 0, 0, 2),
            dt_bias: if s.bias { tensor(&self.params.bias, 0, 0, 0, 1) } else { ABSENT },
            D: match s.skip {
                Skip::None => ABSENT,
                Skip::PerHead => tensor(&self.params.d, 0, 0, 0, s.headdim),
                Skip::PerElement => tensor(&self.params.d, 0, 0, 0, s.headdim),
            },
            D_per_element: i32::from(s.skip == Skip::PerElement),
            z: if s.gate { tensor(&self.packed, z, row * p, p, s.headdim) } else { ABSENT },
            out: tensor(&self.out, self.lead, row * o, o, s.headdim),
        })
    }

    /// Output of a token, counted over all rows.
    pub fn output(&self, s: &Spec, t: usize) -> Vec<u32> {
        (0..s.heads * s.headdim).map(|i| self.out.get(t * self.strides[2] + self.lead + i)).collect()
    }

    /// Outputs, after a check that nothing around them was written.
    pub fn outputs(&self, s: &Spec, rows: &[Row]) -> Outputs {
        let (hd, stride, lead) = (s.heads * s.headdim, self.strides[2], self.lead);
        let poison = Array::poisoned(s.out, 1).get(0);
        let mut t = 0;
        let mut all = Vec::new();
        for row in rows {
            let mut tokens = Vec::new();
            for _ in &row.tokens {
                for i in (0..lead).chain(lead + hd..stride) {
                    assert_eq!(self.out.get(t * stride + i), poison, "written around an output row");
                }
                tokens.push((0..hd).map(|i| self.out.get(t * stride + lead + i)).collect());
                t += 1;
            }
            all.push(tokens);
        }
        all
    }
}

impl Params {
    /// A (Mamba-2: minus U(1, 16), delta rules: the logarithm of U(1, 16)), biases, skips, mean keys and decays.
    pub fn random(s: &Spec, rng: &mut Rng) -> Self {
        let gates = s.gates() / s.heads;
        let [fp32, bf16] =
            [REPLAYSSM_DTYPE_F32, REPLAYSSM_DTYPE_BF16].map(|d| if s.param_dtype == 0 { d } else { s.param_dtype });
        let mut a = Array::poisoned(fp32, 2 * s.heads);
        let mut bias = Array::poisoned(bf16, s.gates());
        let mut d = Array::poisoned(fp32, s.heads * s.headdim);
        let mut mean = Vec::new();
        let mut decay = Vec::new();
        for h in 0..s.heads {
            let rate = 1.0 + 15.0 * rng.unit();
            a.set(2 * h, encode(fp32, if s.is_delta() { rate.ln() } else { -rate }));
            for i in 0..gates {
                bias.set(h * gates + i, encode(bf16, 0.3 * rng.normal()));
                // Decays log-uniform in [0.9, 0.9999].
                let slow = (1e-4f64.ln() + rng.unit() * (0.9f64.ln().abs().ln() - 1e-4f64.ln())).exp();
                decay.push(-slow);
            }
            for i in 0..s.headdim {
                d.set(h * s.headdim + i, encode(fp32, rng.normal()));
            }
        }
        if s.is_delta() {
            mean.extend((0..s.groups * s.dstate).map(|_| rng.normal()));
        }
        Params { a, bias, d, mean, decay }
    }
}

fn normalised(v: Vec<f64>) -> Vec<f64> {
    let norm = v.iter().map(|x| x * x).sum::<f64>().sqrt();
    v.into_iter().map(|x| x / norm).collect()
}

impl Token {
    /// The named generator. Mamba-2: dt log-normal around 0.05 (in front of the softplus if there is one), x, B, C SiLU of normal
    /// draws. Delta rules: k, q = normalise(sqrt(0.25) m_h + sqrt(0.75) n), v SiLU of normal draws, beta = sigmoid(normal), decays
    /// log-uniform per head (and key channel) in [0.9, 0.9999].
    pub fn random(s: &Spec, params: &Params, rng: &mut Rng) -> Self {
        let (hd, gn) = (s.heads * s.headdim, s.groups * s.dstate);
        let mut draw = |n: usize| (0..n).map(|_| encode(s.io, silu(rng.normal()))).collect::<Vec<_>>();
        if !s.is_delta() {
            let (x, b, c) = (draw(hd), draw(gn), draw(gn));
            let z = (0..hd).map(|_| encode(s.io, rng.normal())).collect();
            let dt = (0..s.heads)
                .map(|_| {
                    let dt = (0.05f64.ln() + 0.5 * rng.normal()).exp();
                    encode(s.dt_dtype, if s.softplus { dt.exp_m1().ln() } else { dt })
                })
                .collect();
            return Token { x, b, c, dt, z, beta: vec![] };
        }
        let x = draw(hd);
        let mut key = || -> Vec<u32> {
            (0..s.groups)
                .flat_map(|h| {
                    let mean = normalised(params.mean[h * s.dstate..][..s.dstate].to_vec());
                    let noise = normalised((0..s.dstate).map(|_| rng.normal()).collect());
                    let both = mean.iter().zip(&noise).map(|(m, n)| 0.5 * m + 0.75f64.sqrt() * n).collect();
                    normalised(both).into_iter().map(|k| encode(s.io, k)).collect::<Vec<_>>()
                })
                .collect()
        };
        let (b, c) = (key(), key());
        let gates = s.gates() / s.heads;
        let dt = (0..s.gates())
            .map(|i| {
                let g = params.decay[i];
                let rate = params.a.value(2 * (i / gates)).exp();
                let bias = if s.bias { params.bias.value(i) } else { 0.0 };
                let raw = match s.gate_kind {
                    REPLAYSSM_GATE_SOFTPLUS => (-g / rate).exp_m1().ln() - bias,
                    REPLAYSSM_GATE_LOWER_BOUND => {
                        let p = g / f64::from(LOWER_BOUND);
                        (p / (1.0 - p)).ln() / rate - bias
                    }
                    _ => g,
                };
                encode(s.dt_dtype, raw)
            })
            .collect();
        let beta = (0..s.heads)
            .map(|_| {
                let b = rng.normal();
                encode(REPLAYSSM_DTYPE_F32, if s.beta_processed { 1.0 / (1.0 + (-b).exp()) } else { b })
            })
            .collect();
        Token { x, b, c, dt, z: vec![], beta }
    }
}

/// Plain outputs of tokens on slot `slot`, from an empty state at position 0.
pub fn plain(rig: &Rig, slot: usize, tokens: &[Vec<Token>]) -> Vec<Vec<u32>> {
    rig.reset(slot, slot, 0);
    rig.extend(&[Row::new(slot, tokens)], 0).remove(0)
}

/// A step of one token, committed.
pub fn decode_one(rig: &Rig, slot: usize, token: &[Token]) -> Vec<u32> {
    let row = Row::new(slot, &[token.to_vec()]);
    let out = rig.step(std::slice::from_ref(&row)).remove(0).remove(0);
    rig.commit(&[row], &[1]);
    out
}

pub fn assert_same_state(rig: &Rig, a: usize, b: usize) {
    for layer in 0..rig.spec.layers {
        assert!(rig.export(layer, a, a, None) == rig.export(layer, b, b, None), "layer {layer}: states differ");
    }
}

pub fn no_faults(rig: &Rig) {
    assert_eq!(rig.faults(false).bits, 0);
}

/// A hash of bits, for equality over many values.
pub fn hash(bits: impl IntoIterator<Item = u32>) -> u64 {
    bits.into_iter().fold(0xCBF2_9CE4_8422_2325, |h, b| (h ^ u64::from(b)).wrapping_mul(0x0100_0000_01B3))
}
