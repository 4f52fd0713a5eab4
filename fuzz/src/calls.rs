//! Any calls of the C interface in any order, with any handles, descriptors, numbers and device arrays. What an engine is trusted with is kept:
//! addresses are valid for what a descriptor claims, by exactly so many bytes, wherever its claim can be accepted.
//!
//! After every call: its status is one of the header's, and not that of a defect; a refused one left a sentence, its outputs and every slot
//! as they were; an accepted one has changed the slots and rings alone that an id of its arrays names, and no input.

use std::collections::BTreeMap;
use std::ffi::{c_char, c_void};
use std::ptr::{null, null_mut};
use std::sync::Mutex;

use replayssm::ffi::*;

use crate::common::device::peek;
use crate::common::{Rng, address, components};
use crate::desc;
use crate::memory::{Arena, Block, LIMIT, TooLarge, size_of_dtype, values};
use crate::source::{Source, refused};

const MOST_CALLS: usize = 40;
/// Bytes of a pool: all of them are compared around every call.
const MOST_MEMORY: u64 = 24 << 10;

type Fallible<T> = Result<T, TooLarge>;

/// Calls by name: refused and accepted ones.
pub static TALLY: Mutex<BTreeMap<&'static str, [u64; 2]>> = Mutex::new(BTreeMap::new());

fn tally(name: &'static str, accepted: bool) {
    TALLY.lock().expect("no panic").entry(name).or_default()[usize::from(accepted)] += 1;
}

struct Context {
    handle: *mut replayssm_context,
    is_alive: bool,
}

struct Slots {
    handle: *mut replayssm_slots,
    is_alive: bool,
    desc: replayssm_slots_desc,
    n_slots: usize,
    n_rings: usize,
    t_max: i64,
}

struct Pool {
    handle: *mut replayssm_layers,
    is_alive: bool,
    slots: usize,
    desc: replayssm_pool_desc,
    sections: Vec<i32>,
    components: Vec<replayssm_component>,
    /// Lent memory.
    lent: Vec<Block>,
}

impl Pool {
    /// Heads, rows and columns of a state; of a convolution one head of channels.
    fn shape(&self) -> [i64; 3] {
        let d = &self.desc;
        let shape = match d.family {
            REPLAYSSM_FAMILY_MAMBA2 => [d.nheads, d.headdim, d.dstate],
            REPLAYSSM_FAMILY_CONV1D => [1, d.channels, d.width - 1],
            _ => [d.HV, d.V, d.K],
        };
        shape.map(i64::from)
    }

    fn out(&self) -> i32 {
        if self.desc.out == 0 { self.desc.io } else { self.desc.out }
    }
}

/// Whose memory a section of the world is.
#[derive(Clone, Copy, PartialEq, Debug)]
enum Owner {
    Slot(usize),
    Ring(usize),
    /// Faults and counters.
    All,
}

/// What can be seen of a slots handle and its pools.
#[derive(PartialEq)]
struct Section {
    slots: usize,
    owner: Owner,
    bytes: Vec<u8>,
}

struct World<'a> {
    input: Source<'a>,
    rng: Rng,
    contexts: Vec<Context>,
    slots: Vec<Slots>,
    pools: Vec<Pool>,
    /// Saved slots.
    blobs: Vec<Vec<u8>>,
    arena: Arena,
    /// Ids of all arrays of the call.
    named: Vec<i64>,
}

extern "C" fn log(_: *mut c_void, _: i32, text: *const c_char) {
    assert!(!text.is_null());
}

/// A claim of a strided array: where its first byte is behind its lowest one, and bytes. None: it fits no address space.
fn reach(axes: &[(i64, i64)], inner: i64, size: usize) -> Fallible<Option<(usize, usize)>> {
    let (mut low, mut high, mut sum) = (0i128, 0i128, 0i128);
    if inner <= 0 || axes.iter().any(|&(extent, _)| extent <= 0) {
        return Ok(Some((0, 0)));
    }
    for &(extent, stride) in axes {
        let end = i128::from(extent - 1) * i128::from(stride);
        low += end.min(0);
        high += end.max(0);
        sum += end.abs();
    }
    let bytes = (high - low + i128::from(inner)) * size as i128;
    if bytes <= LIMIT {
        return Ok(Some(((-low) as usize * size, bytes as usize)));
    }
    if (sum + i128::from(inner)) * size as i128 > i128::from(i64::MAX) { Ok(None) } else { Err(TooLarge) }
}

impl World<'_> {
    // ---- Numbers ----

    /// Mostly the usual number; else one at an edge, or any.
    fn number(&mut self, usual: i32) -> i32 {
        match self.input.byte() {
            0..=239 => usual,
            240..=242 => usual.wrapping_add(1),
            243..=245 => usual.wrapping_sub(1),
            246 => -1,
            247 => 0,
            248 => i32::MAX,
            249 => i32::MIN,
            250 => 1 << 20,
            251 => i32::from(self.input.byte()),
            252 => 256 + i32::from(self.input.byte()),
            _ => self.input.u64() as i32,
        }
    }

    fn bits(&mut self, usual: u32) -> u32 {
        self.number(usual as i32) as u32
    }

    fn position(&mut self) -> i64 {
        match self.input.byte() {
            n @ 0..=199 => i64::from(n % 50),
            200..=219 => -1,
            220..=229 => (1 << 60) - i64::from(self.input.byte() % 64),
            230..=239 => (1 << 60) + 1,
            240..=244 => i64::MAX,
            245..=247 => i64::MIN,
            _ => self.input.u64() as i64,
        }
    }

    /// An id for as many, or one that is none.
    fn id(&mut self, n: usize) -> i64 {
        let id = match self.input.byte() {
            b @ 0..=223 => usize::from(b) as i64 % n.max(1) as i64,
            224..=239 => -1,
            240..=245 => n as i64,
            246 => i64::MAX,
            247 => i64::MIN,
            248 => 1 << 32,
            249 => i64::from(i32::MAX),
            _ => self.input.u64() as i64,
        };
        self.named.push(id);
        self.named.push(i64::from(id as i32));
        id
    }

    // ---- Memory ----

    /// A descriptor of this version or another, or something that is none.
    fn descriptor<T: Copy>(&mut self, value: T) -> *const T {
        self.place(value, false).cast_const()
    }

    /// One that the call writes.
    fn out_descriptor<T: Copy>(&mut self, value: T) -> *mut T {
        self.place(value, true)
    }

    fn place<T: Copy>(&mut self, value: T, out: bool) -> *mut T {
        // SAFETY: a descriptor has no padding.
        let known = unsafe { std::slice::from_raw_parts((&raw const value).cast::<u8>(), size_of::<T>()) };
        let mut bytes = known.to_vec();
        let mut shift = 0;
        match self.input.byte() {
            0..=238 => {}
            239..=241 => return null_mut(),
            242..=245 => bytes.resize(known.len() + 4 + self.input.below(16) * 4, 0),
            246 | 247 => bytes.resize(known.len() + 4 + self.input.below(16) * 4, self.input.byte()),
            248 | 249 => bytes.truncate((self.input.below(known.len()) / 4 * 4).max(4)),
            250 => bytes.truncate(self.input.below(known.len()).max(4)),
            251 => shift = 1 + self.input.below(7),
            252 => {
                // A size that no descriptor has; nothing behind it can be read.
                bytes.truncate(4);
                bytes.copy_from_slice(&((1 << 16) + 4 + self.input.u64() as u32 / 2).to_le_bytes());
            }
            253 => bytes.resize(1 << 16, 0),
            _ => bytes.resize(known.len() + 1, 0),
        }
        if bytes.len() != known.len() && bytes.len() >= 4 && bytes.len() <= 1 << 16 && bytes[..4] == known[..4] {
            let size = bytes.len() as u32;
            bytes[..4].copy_from_slice(&size.to_le_bytes());
        }
        if out { self.arena.both(&bytes, shift).cast() } else { self.arena.input(&bytes, shift).cast() }
    }

    /// An array of the call's: NULL or misaligned at times.
    fn array<T: Copy>(&mut self, values: &[T], can_be_null: bool) -> *const T {
        // SAFETY: integers, or addresses.
        let bytes = unsafe { std::slice::from_raw_parts(values.as_ptr().cast::<u8>(), size_of_val(values)) };
        match self.input.byte() {
            250..=252 if can_be_null => null(),
            253 => null(),
            254 if align_of::<T>() > 1 => self.arena.input(bytes, 1).cast(),
            _ => self.arena.input(bytes, 0).cast(),
        }
    }

    /// As many ids, in an array of any type and stride.
    fn ids(&mut self, n: i64, of: usize) -> Fallible<replayssm_ids> {
        let dtype = if self.input.below(2) == 0 { REPLAYSSM_DTYPE_I64 } else { REPLAYSSM_DTYPE_I32 };
        let dtype = self.number(dtype);
        let stride = match self.input.byte() {
            0..=159 => 1,
            160..=199 => 0,
            200..=219 => 3,
            220..=239 => -2,
            240..=242 => i64::MAX,
            243..=245 => i64::MIN,
            246 => i64::MAX / 8,
            _ => i64::from(self.input.byte() as i8),
        };
        let size = size_of_dtype(dtype);
        let step = if stride == 0 { 1 } else { stride };
        let reserved = self.bits(0);
        let data = match reach(&[(n, step)], 1, size)? {
            None => self.arena.input(&[0; 8], 0),
            Some((first, bytes)) => {
                let mut array = vec![0xEE; bytes];
                for i in 0..n.max(0) {
                    let id = self.id(of).to_le_bytes();
                    let at = (first as i64 + i * step * size as i64) as usize;
                    array[at..at + size].copy_from_slice(&id[..size]);
                }
                let at = self.arena.input(&array, 0);
                match self.input.byte() {
                    252 => null_mut(),
                    253 => self.arena.input(&array, 2).wrapping_add(first),
                    _ => at.wrapping_add(first),
                }
            }
        };
        Ok(replayssm_ids { data: data.cast_const().cast(), stride, dtype, reserved })
    }

    /// Strides of a tensor: dense, with gaps, of a broadcast, backwards, heads in front, or any.
    fn strides(&mut self, extents: [i64; 3], inner: i64, out: bool) -> [i64; 3] {
        let [_, tokens, heads] = extents.map(|n| n.max(1));
        let token = heads.saturating_mul(inner);
        let row = tokens.saturating_mul(token);
        let dense = [row, token, inner];
        match self.input.byte() {
            0..=119 => dense,
            120..=159 => [row.saturating_mul(2), token.saturating_add(2), inner],
            160..=179 if !out => [0, token, inner],
            180..=199 if !out => [row, token, 0],
            160..=209 => [-row, -token, inner],
            210..=219 => [row, inner, inner.saturating_mul(tokens)],
            220..=229 => [row, -token, -inner],
            230..=234 => [i64::MAX, token, inner],
            235..=239 => [row, i64::MIN, inner],
            240..=244 => [row, token, i64::MAX / 2],
            _ => {
                let mut any = dense;
                any[self.input.below(3)] = i64::from(self.input.u16() as i16) >> self.input.below(16);
                any
            }
        }
    }

    fn tensor(&mut self, extents: [i64; 3], inner: i64, dtype: i32, out: bool) -> Fallible<replayssm_tensor> {
        let strides = self.strides(extents, inner, out);
        self.tensor_with(strides, extents, inner, dtype, out)
    }

    fn tensor_with(
        &mut self,
        strides: [i64; 3],
        extents: [i64; 3],
        inner: i64,
        dtype: i32,
        out: bool,
    ) -> Fallible<replayssm_tensor> {
        let dtype = self.number(dtype);
        let size = size_of_dtype(dtype);
        let axes: [(i64, i64); 3] = std::array::from_fn(|i| (extents[i], strides[i]));
        let shift = if self.input.byte() == 255 { 1 } else { 0 };
        let mut data = match reach(&axes, inner, size)? {
            None => self.arena.input(&[0; 16], 0),
            Some((first, bytes)) if out => {
                let at = self.arena.output(bytes, shift).wrapping_add(first);
                let [rows, tokens, heads] = extents.map(|n| n.max(0));
                if rows.saturating_mul(tokens).saturating_mul(heads) <= 4096 && bytes > 0 {
                    let mut parts = Vec::new();
                    for (r, t, h) in
                        (0..rows).flat_map(|r| (0..tokens).flat_map(move |t| (0..heads).map(move |h| (r, t, h))))
                    {
                        let at = shift as i64
                            + first as i64
                            + (r * strides[0] + t * strides[1] + h * strides[2]) * size as i64;
                        parts.push((at as usize, inner as usize * size));
                    }
                    self.arena.only(parts.into_iter());
                }
                at
            }
            Some((first, bytes)) => {
                let any = self.input.byte() > 247;
                let bytes = values(&mut self.rng, dtype, bytes / size, any);
                self.arena.input(&bytes, shift).wrapping_add(first)
            }
        };
        if self.input.byte() > 252 {
            data = null_mut();
        }
        let [stride_row, stride_token, stride_head] = strides;
        Ok(replayssm_tensor { data: data.cast(), stride_row, stride_token, stride_head, dtype, reserved: self.bits(0) })
    }

    /// One that may be absent.
    fn option(&mut self, extents: [i64; 3], inner: i64, dtype: i32) -> Fallible<replayssm_tensor> {
        if self.input.below(3) == 0 { Ok(crate::common::ABSENT) } else { self.tensor(extents, inner, dtype, false) }
    }

    fn any_dtype(&mut self) -> i32 {
        self.input.of(&[REPLAYSSM_DTYPE_F32, REPLAYSSM_DTYPE_BF16, REPLAYSSM_DTYPE_F16])
    }

    // ---- Handles ----

    /// Not one of the right kind: of another, destroyed, or any bits.
    fn wrong<H>(&mut self, right: usize) -> *mut H {
        match self.input.below(5) {
            0 => null_mut(),
            1 => self.contexts.first().map_or(null_mut(), |c| c.handle.cast()),
            2 => self.slots.first().map_or(null_mut(), |s| s.handle.cast()),
            3 => (right ^ 1 << self.input.below(64)) as *mut H,
            _ => self.input.u64() as usize as *mut H,
        }
    }

    /// A handle, and what it stands for if it stands for something.
    fn context(&mut self) -> *mut replayssm_context {
        let i = self.input.below(self.contexts.len());
        let handle = self.contexts.get(i).map_or(null_mut(), |c| c.handle);
        if self.input.byte() > 247 { self.wrong(handle as usize) } else { handle }
    }

    fn slots(&mut self) -> (*mut replayssm_slots, Option<usize>) {
        let i = self.input.below(self.slots.len());
        let handle = self.slots.get(i).map_or(null_mut(), |s| s.handle);
        let handle = if self.input.byte() > 247 { self.wrong(handle as usize) } else { handle };
        (handle, self.slots.iter().position(|s| s.is_alive && s.handle == handle))
    }

    fn pool(&mut self) -> (*mut replayssm_layers, Option<usize>) {
        let i = self.input.below(self.pools.len());
        let handle = self.pools.get(i).map_or(null_mut(), |p| p.handle);
        let handle = if self.input.byte() > 247 { self.wrong(handle as usize) } else { handle };
        (handle, self.pools.iter().position(|p| p.is_alive && p.handle == handle))
    }

    /// Slots and rings of a handle; some, if it stands for nothing.
    fn counts(&self, slots: Option<usize>) -> (usize, usize) {
        slots.map_or((4, 4), |i| (self.slots[i].n_slots, self.slots[i].n_rings))
    }

    fn exec(&mut self) -> *const replayssm_exec {
        if self.input.below(4) < 3 {
            return null();
        }
        let n_parts = self.input.of(&[0, 1, 1, 2, 3]);
        let part = if n_parts == 0 { 0 } else { self.input.below(n_parts as usize) as i32 };
        let exec = desc!(replayssm_exec {
            flags: self.bits(0),
            stream: if self.input.byte() > 250 { 8 as *mut _ } else { null_mut() },
            part: self.number(part),
            n_parts: self.number(n_parts),
        });
        self.descriptor(exec)
    }

    // ---- What there is ----

    /// Everything that can be seen of a slots handle.
    fn sections(&self) -> Vec<Section> {
        let mut all = Vec::new();
        for pool in self.pools.iter().filter(|pool| pool.is_alive) {
            let s = &self.slots[pool.slots];
            for c in &pool.components {
                let n = if c.per_ring == 1 { s.n_rings } else { s.n_slots };
                for index in 0..n {
                    let mut bytes = Vec::new();
                    for layer in 0..pool.desc.n_layers as usize {
                        bytes.extend_from_slice(&peek(address(c, layer, index), c.bytes as usize));
                    }
                    let owner = if c.per_ring == 1 { Owner::Ring(index) } else { Owner::Slot(index) };
                    all.push(Section { slots: pool.slots, owner, bytes });
                }
            }
        }
        for (slots, s) in self.slots.iter().enumerate().filter(|(_, s)| s.is_alive) {
            let ids: Vec<i32> = (0..s.n_rings as i32).collect();
            // SAFETY: a cursor is plain data.
            let mut cursors = vec![unsafe { std::mem::zeroed::<replayssm_cursor>() }; s.n_rings];
            let ids = replayssm_ids { data: ids.as_ptr().cast(), stride: 1, dtype: REPLAYSSM_DTYPE_I32, reserved: 0 };
            let zeros = vec![0i32; s.n_rings];
            let slot_ids = replayssm_ids { data: zeros.as_ptr().cast(), ..ids };
            let list = desc!(replayssm_list { n: s.n_rings as i32, slots: slot_ids, rings: ids });
            // SAFETY: the arrays have an element for each ring.
            let status = unsafe { replayssm_read_cursors(s.handle, &list, cursors.as_mut_ptr(), null()) };
            assert_eq!(status, REPLAYSSM_OK, "{}", crate::common::message());
            for (ring, c) in cursors.iter().enumerate() {
                let words = [
                    c.position as u64,
                    c.flush_before as u64,
                    c.seed,
                    u64::from(c.generation) << 32 | u64::from(c.committed),
                ];
                let bytes = words.iter().flat_map(|word| word.to_le_bytes()).collect();
                all.push(Section { slots, owner: Owner::Ring(ring), bytes });
            }
            let (mut report, mut stats) = (desc!(replayssm_report {}), desc!(replayssm_stats {}));
            // SAFETY: locals.
            let status = unsafe { replayssm_check(s.handle, 0, &mut report) };
            assert_eq!(status, REPLAYSSM_OK, "{}", crate::common::message());
            // SAFETY: a local.
            let status = unsafe { replayssm_stats_read(s.handle, &mut stats) };
            assert_eq!(status, REPLAYSSM_OK, "{}", crate::common::message());
            let words = [
                report.bits.into(),
                report.count,
                stats.steps,
                stats.rows,
                stats.tokens,
                stats.accepted,
                stats.flushes,
            ];
            let bytes = words.iter().flat_map(|word: &u64| word.to_le_bytes()).collect();
            all.push(Section { slots, owner: Owner::All, bytes });
        }
        all
    }

    /// Makes a call and judges it. `on` is the slots handle that it may change, in the slots and rings that were
    /// named; faults and counters are anybody's.
    fn judge(&mut self, name: &'static str, on: Option<usize>, call: impl FnOnce() -> i32) -> bool {
        let before = self.sections();
        let status = call();
        let accepted = status == REPLAYSSM_OK;
        if !accepted {
            refused(status);
        }
        self.arena.check(accepted);
        let after = self.sections();
        assert_eq!(before.len(), after.len());
        for (old, new) in before.iter().zip(&after) {
            assert!(accepted || old == new, "a refused call changed {:?} of slots {}", old.owner, old.slots);
            let is_named = match old.owner {
                Owner::Slot(i) | Owner::Ring(i) => self.named.contains(&(i as i64)),
                Owner::All => true,
            };
            let may = old.owner == Owner::All || Some(old.slots) == on && is_named;
            assert!(may || old == new, "{:?} of slots {} changed, and was not named", old.owner, old.slots);
        }
        tally(name, accepted);
        accepted
    }

    /// One that creates or destroys.
    fn judge_alone(&mut self, name: &'static str, call: impl FnOnce() -> i32) -> bool {
        let status = call();
        if status != REPLAYSSM_OK {
            refused(status);
        }
        self.arena.check(status == REPLAYSSM_OK);
        tally(name, status == REPLAYSSM_OK);
        status == REPLAYSSM_OK
    }

    // ---- Creating and destroying ----

    fn create_context(&mut self) {
        let desc = desc!(replayssm_context_desc {
            backend: self.number(REPLAYSSM_BACKEND_CPU),
            device: self.number(0),
            n_threads: self.input.of(&[1, 1, 1, 1, 1, 2, 3, -1, 1025, i32::MAX]),
            flags: self.bits(0),
            reserved: self.bits(0),
            log: if self.input.below(2) == 0 { Some(log) } else { None },
            log_level: self.input.of(&[0, 0, 1, 2, 3, -1]),
            log_reserved: self.bits(0),
        });
        // With NULL, or a descriptor that says so, there are as many threads as the process may use.
        let desc = self.descriptor(desc);
        let mut out = 8 as *mut replayssm_context;
        // SAFETY: the arena's.
        let accepted =
            self.judge_alone("replayssm_context_create", || unsafe { replayssm_context_create(desc, &mut out) });
        assert_eq!(accepted, !out.is_null(), "a handle on success alone");
        if accepted {
            self.contexts.push(Context { handle: out, is_alive: true });
        }
    }

    fn slots_desc(&mut self) -> replayssm_slots_desc {
        let window = 1 + self.input.below(20) as i32;
        let t_max = 1 + self.input.below(window as usize) as i32;
        desc!(replayssm_slots_desc {
            n_slots: 1 + self.input.below(4) as i32,
            n_rings: self.input.of(&[0, 0, 3, 5]),
            window: window,
            max_step_tokens: t_max,
            min_rewind: self.input.of(&[0, 0, 1, 4]),
            schedule: self.input.of(&[0, 1, 2]),
            flags: self.input.of(&[0, 1]),
        })
    }

    /// With a field that may be wrong.
    fn odd_slots_desc(&mut self) -> replayssm_slots_desc {
        let d = self.slots_desc();
        desc!(replayssm_slots_desc {
            n_slots: self.number(d.n_slots),
            n_rings: self.number(d.n_rings),
            window: self.number(d.window),
            max_step_tokens: self.number(d.max_step_tokens),
            min_rewind: self.number(d.min_rewind),
            schedule: self.number(d.schedule),
            flags: self.bits(d.flags),
        })
    }

    fn create_slots(&mut self) {
        let context = self.context();
        let desc = self.odd_slots_desc();
        if !fits(&desc, &[]) {
            return;
        }
        let place = self.descriptor(desc);
        let mut out = 8 as *mut replayssm_slots;
        // SAFETY: the arena's.
        let accepted =
            self.judge_alone("replayssm_slots_create", || unsafe { replayssm_slots_create(context, place, &mut out) });
        assert_eq!(accepted, !out.is_null(), "a handle on success alone");
        if accepted {
            // SAFETY: it was accepted, so it is all there; its size may be that of another version.
            let desc = replayssm_slots_desc {
                struct_size: size_of::<replayssm_slots_desc>() as u32,
                ..unsafe { place.read() }
            };
            self.add_slots(out, desc);
        }
    }

    fn add_slots(&mut self, handle: *mut replayssm_slots, desc: replayssm_slots_desc) {
        let t_max = if desc.max_step_tokens == 0 { 1 } else { desc.max_step_tokens };
        let n_slots = desc.n_slots as usize;
        let n_rings = if desc.n_rings == 0 { n_slots } else { desc.n_rings as usize };
        self.slots.push(Slots { handle, is_alive: true, desc, n_slots, n_rings, t_max: t_max.into() });
    }

    /// A pool that can be had, and its sections.
    fn pool_desc(&mut self) -> (replayssm_pool_desc, Vec<i32>) {
        let family = 1 + self.input.below(4) as i32;
        let mut d = desc!(replayssm_pool_desc {
            family: family,
            n_layers: 1 + self.input.below(2) as i32,
            io: self.any_dtype()
        });
        d.out = if self.input.below(2) == 0 { 0 } else { self.any_dtype() };
        let mut sections = Vec::new();
        if family == REPLAYSSM_FAMILY_CONV1D {
            d.width = 2 + self.input.below(3) as i32;
            sections = (0..self.input.below(4)).map(|_| 1 + self.input.below(20) as i32).collect();
            d.channels = if sections.is_empty() { 1 + self.input.below(140) as i32 } else { sections.iter().sum() };
            d.n_sections = sections.len() as i32;
            return (d, sections);
        }
        d.format = self.input.below(5) as i32;
        d.readout = self.input.of(&[0, 2, 3, 1]);
        if d.readout == 1 && matches!(d.format, 2 | 4) {
            d.readout = 0;
        }
        d.stochastic_rounding = i32::from(d.format > 2 && self.input.below(2) == 0);
        let groups = 1 + self.input.below(2) as i32;
        let heads = groups * (1 + self.input.below(2) as i32);
        let (rows, columns) = (1 + self.input.below(20) as i32, 1 + self.input.below(20) as i32);
        if family == REPLAYSSM_FAMILY_MAMBA2 {
            (d.nheads, d.headdim, d.dstate, d.ngroups) = (heads, rows, columns, groups);
        } else {
            (d.HV, d.V, d.K, d.H) = (heads, rows, columns, groups);
            d.head_map = self.input.below(2) as i32;
            d.u_dtype = if d.readout == 3 { 0 } else { self.input.of(&[0, 1, 0, 2]) };
        }
        (d, sections)
    }

    fn odd_pool_desc(&mut self) -> (replayssm_pool_desc, Vec<i32>) {
        let (mut d, mut sections) = self.pool_desc();
        for field in [
            &mut d.family,
            &mut d.n_layers,
            &mut d.io,
            &mut d.out,
            &mut d.format,
            &mut d.readout,
            &mut d.stochastic_rounding,
            &mut d.nheads,
            &mut d.headdim,
            &mut d.dstate,
            &mut d.ngroups,
            &mut d.H,
            &mut d.HV,
            &mut d.K,
            &mut d.V,
            &mut d.head_map,
            &mut d.u_dtype,
            &mut d.channels,
            &mut d.width,
            &mut d.n_sections,
        ] {
            // Fewer of them at a time: each may be wrong once in a few pools.
            if self.input.byte() > 248 {
                *field = self.number(255);
            }
        }
        d.reserved = self.bits(0);
        for channels in &mut sections {
            if self.input.byte() > 250 {
                *channels = self.number(0);
            }
        }
        // As many as the descriptor claims, if it can be accepted.
        if (0..=1 << 16).contains(&d.n_sections) {
            sections.resize(d.n_sections as usize, 1);
        }
        (d, sections)
    }

    /// With its array of sections.
    fn with_sections(&mut self, mut d: replayssm_pool_desc, sections: &[i32]) -> replayssm_pool_desc {
        d.section_channels = if sections.is_empty() { null() } else { self.array(sections, false) };
        d
    }

    fn odd_pool(&mut self) -> replayssm_pool_desc {
        let (d, sections) = self.odd_pool_desc();
        self.with_sections(d, &sections)
    }

    /// Memory for some of the components that a pool will have.
    fn lend(
        &mut self,
        slots: &replayssm_slots_desc,
        desc: &replayssm_pool_desc,
    ) -> Fallible<(Vec<replayssm_lent>, Vec<Block>)> {
        let mut planned = vec![desc!(replayssm_component {}); 8];
        let mut n = 0;
        // SAFETY: locals, and sections that are the arena's.
        let status = unsafe { replayssm_plan_components(slots, desc, planned.as_mut_ptr(), 8, &mut n) };
        planned.truncate(if status == REPLAYSSM_OK { n as usize } else { 0 });
        let (n_slots, n_rings) =
            (i64::from(slots.n_slots), i64::from(if slots.n_rings == 0 { slots.n_slots } else { slots.n_rings }));
        let wanted: Vec<i32> = planned.iter().filter(|_| self.input.below(3) == 1).map(|c| c.kind).collect();
        let (mut list, mut blocks) = (Vec::new(), Vec::new());
        for kind in wanted {
            let size = |kind: i32| {
                let c = planned.iter().find(|c| c.kind == kind);
                c.map_or((64, n_slots), |c| (c.bytes as i64, if c.per_ring == 1 { n_rings } else { n_slots }))
            };
            let (bytes, n) = size(kind);
            let dense = (bytes + 15) / 16 * 16;
            let slot = match self.input.byte() {
                0..=159 => 0,
                160..=219 => dense + 32,
                220..=229 => dense - 16,
                230..=239 => i64::MAX - 15,
                _ => i64::from(self.input.u16() as i16),
            };
            let layer = match self.input.byte() {
                0..=199 => 0,
                200..=229 => (if slot == 0 { dense } else { slot }).saturating_mul(n).saturating_add(16),
                230..=239 => i64::MIN + 16,
                _ => i64::from(self.input.u16() as i16),
            };
            let offset = match self.input.byte() {
                0..=199 => 0,
                200..=239 => 64,
                240..=244 => i64::MAX - 63,
                _ => i64::from(self.input.byte() as i8),
            };
            let layers = i64::from(desc.n_layers);
            let one_by_one = self.input.below(4) == 3 && (1..=4).contains(&layers);
            let mut lent = desc!(replayssm_lent {
                kind: self.number(kind),
                layer_stride_bytes: if one_by_one { 0 } else { layer },
                slot_stride_bytes: slot,
                offset_bytes: offset,
            });
            // It may have become another kind: memory is lent for what is said.
            let (bytes, n) = size(lent.kind);
            let apart = if slot == 0 { (bytes + 15) / 16 * 16 } else { slot };
            let between = if layer == 0 { apart.saturating_mul(n) } else { layer };
            let axes = if one_by_one { vec![(n, apart)] } else { vec![(layers, between), (n, apart)] };
            let mut room = |world: &mut Self| -> Fallible<*mut c_void> {
                let Some((first, all)) = reach(&axes, bytes, 1)? else {
                    return Ok(world.arena.input(&[0; 64], 0).cast());
                };
                if !(0..=4096).contains(&offset) {
                    return if offset < 0 || i128::from(offset) > i128::from(i64::MAX) - LIMIT {
                        Ok(64 as *mut c_void)
                    } else {
                        Err(TooLarge)
                    };
                }
                let at = world.arena.undefined(offset as usize + all);
                blocks.extend(world.arena.take_last());
                Ok(at.wrapping_add(first).cast())
            };
            if one_by_one {
                let bases = (0..layers).map(|_| room(self)).collect::<Fallible<Vec<_>>>()?;
                lent.layer_bases = self.array(&bases, false).cast();
            } else {
                lent.base = room(self)?;
            }
            list.push(lent);
        }
        Ok((list, blocks))
    }

    fn create_pool(&mut self) -> Fallible<()> {
        let (slots, on) = self.slots();
        let (d, sections) = self.odd_pool_desc();
        let d = self.with_sections(d, &sections);
        let of = match on {
            Some(i) => self.slots[i].desc,
            None => self.slots_desc(),
        };
        if !fits(&of, &[d]) {
            return Ok(());
        }
        let (lent, blocks) = if self.input.below(3) == 2 { self.lend(&of, &d)? } else { (vec![], vec![]) };
        let n_lent = lent.len() as i32;
        let list = if lent.is_empty() { null() } else { self.array(&lent, false) };
        let n_lent = if n_lent == 0 { self.input.of(&[0, 0, 0, 0, 0, -1, 17, i32::MAX]) } else { n_lent };
        let desc = self.descriptor(d);
        let mut out = 8 as *mut replayssm_layers;
        // SAFETY: the arena's.
        let accepted = self.judge_alone("replayssm_layers_create", || unsafe {
            replayssm_layers_create(slots, desc, list, n_lent, &mut out)
        });
        assert_eq!(accepted, !out.is_null(), "a handle on success alone");
        if accepted {
            // SAFETY: it was accepted, so it is all there.
            let desc = replayssm_pool_desc {
                struct_size: size_of::<replayssm_pool_desc>() as u32,
                section_channels: null(),
                ..unsafe { desc.read() }
            };
            self.add_pool(out, on.expect("a slots handle"), desc, sections, blocks);
        }
        Ok(())
    }

    fn add_pool(
        &mut self,
        handle: *mut replayssm_layers,
        slots: usize,
        desc: replayssm_pool_desc,
        sections: Vec<i32>,
        lent: Vec<Block>,
    ) {
        let components = components(handle);
        self.pools.push(Pool { handle, is_alive: true, slots, desc, sections, components, lent });
    }

    fn rebind(&mut self) -> Fallible<()> {
        let (handle, on) = self.pool();
        let Some(i) = on else {
            // SAFETY: nothing is read.
            self.judge_alone("replayssm_layers_rebind", || unsafe { replayssm_layers_rebind(handle, null(), 0) });
            return Ok(());
        };
        let owned = self.pools[i].lent.is_empty();
        let slots = self.slots[self.pools[i].slots].desc;
        let sections = self.pools[i].sections.clone();
        let desc = self.pools[i].desc;
        let desc = self.with_sections(desc, &sections);
        let (lent, blocks) = if owned { (vec![], vec![]) } else { self.lend(&slots, &desc)? };
        let list = if lent.is_empty() { null() } else { self.array(&lent, true) };
        // SAFETY: the arena's, and the pool's from now on.
        if self.judge_alone("replayssm_layers_rebind", || unsafe {
            replayssm_layers_rebind(handle, list, lent.len() as i32)
        }) {
            self.pools[i].lent = blocks;
            self.pools[i].components = components(handle);
        }
        Ok(())
    }

    fn destroy(&mut self) {
        match self.input.below(8) {
            0 => {
                let handle = self.context();
                replayssm_context_destroy(handle);
                self.contexts.iter_mut().filter(|c| c.handle == handle).for_each(|c| c.is_alive = false);
            }
            1 | 2 => {
                let (handle, on) = self.slots();
                replayssm_slots_destroy(handle);
                on.into_iter().for_each(|i| self.slots[i].is_alive = false);
            }
            _ => {
                let (handle, on) = self.pool();
                replayssm_layers_destroy(handle);
                on.into_iter().for_each(|i| (self.pools[i].is_alive, self.pools[i].lent) = (false, vec![]));
            }
        }
    }

    // ---- Questions ----

    fn question(&mut self) -> Fallible<()> {
        match self.input.below(8) {
            0 => {
                let handle = self.context();
                let out = desc!(replayssm_context_info {});
                let out = self.out_descriptor(out);
                // SAFETY: the arena's.
                self.judge("replayssm_context_query", None, || unsafe { replayssm_context_query(handle, out) });
            }
            1 => {
                let context = self.context();
                let d = self.odd_pool();
                let d = self.descriptor(d);
                let tokens = self.number(1);
                // SAFETY: the arena's.
                self.judge("replayssm_supports", None, || unsafe { replayssm_supports(context, d, tokens) });
            }
            2 | 3 => {
                let slots = self.odd_slots_desc();
                let slots = self.descriptor(slots);
                let pools: Vec<_> = (0..self.input.below(3)).map(|_| self.odd_pool()).collect();
                let n = pools.len() as i32;
                let list = if n == 0 { null() } else { self.array(&pools, false) };
                let n = if n == 0 { self.input.of(&[0, 0, 0, -1, 4097]) } else { n };
                let args = desc!(replayssm_plan_args {
                    batch: self.number(3),
                    tokens: self.number(1),
                    reserved: self.bits(0),
                    budget_bytes: if self.input.below(2) == 0 { 0 } else { self.input.u64() },
                });
                let args = self.descriptor(args);
                let out = desc!(replayssm_plan_info {});
                let out = self.out_descriptor(out);
                // SAFETY: the arena's.
                self.judge("replayssm_plan", None, || unsafe { replayssm_plan(slots, list, n, args, out) });
            }
            4 | 5 => {
                let mut n = -7;
                let capacity = self.input.of(&[0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, -1]);
                let size = size_of::<replayssm_component>() + self.input.of(&[0usize, 0, 8, 64]);
                let mut bytes = vec![0xAA; size * capacity.max(0) as usize];
                if let Some(first) = bytes.get_mut(..4) {
                    first.copy_from_slice(&(size as u32).to_le_bytes());
                }
                let out = if bytes.is_empty() { null_mut() } else { self.arena.both(&bytes, 0).cast() };
                let count = if self.input.byte() > 250 { null_mut() } else { &raw mut n };
                if self.input.below(2) == 0 {
                    let (pool, _) = self.pool();
                    // SAFETY: the arena's, and a local.
                    self.judge("replayssm_layers_components", None, || unsafe {
                        replayssm_layers_components(pool, out, capacity, count)
                    });
                } else {
                    let slots = self.odd_slots_desc();
                    let slots = self.descriptor(slots);
                    let d = self.odd_pool();
                    let d = self.descriptor(d);
                    // SAFETY: as above.
                    self.judge("replayssm_plan_components", None, || unsafe {
                        replayssm_plan_components(slots, d, out, capacity, count)
                    });
                }
            }
            6 => {
                let (pool, _) = self.pool();
                let (batch, tokens) = (self.number(4), self.number(1));
                let capacity = self.input.of(&[0, 1, 100, 5000]);
                let text = self.arena.undefined(capacity);
                let text = if self.input.byte() > 250 { null_mut() } else { text.cast() };
                // SAFETY: the arena's.
                self.judge("replayssm_explain", None, || unsafe {
                    replayssm_explain(pool, batch, tokens, text, capacity)
                });
            }
            _ => {
                let (slots, on) = self.slots();
                let clear = self.number(0);
                let (report, stats) = (desc!(replayssm_report {}), desc!(replayssm_stats {}));
                let report = self.out_descriptor(report);
                // SAFETY: the arena's.
                self.judge("replayssm_check", on, || unsafe { replayssm_check(slots, clear, report) });
                self.arena = Arena::default();
                let stats = self.out_descriptor(stats);
                // SAFETY: the arena's.
                self.judge("replayssm_stats_read", None, || unsafe { replayssm_stats_read(slots, stats) });
            }
        }
        Ok(())
    }

    fn acquire(&mut self) {
        let (slots, on) = self.slots();
        if self.input.below(2) == 0 {
            let n = self.number(2);
            let room = n.clamp(0, 300) as usize * 4;
            // More than there are slots is refused before anything is written.
            let ids = self.arena.output(room, 0);
            let generations = if self.input.below(2) == 0 { null_mut() } else { self.arena.output(room, 0) };
            // SAFETY: the arena's.
            self.judge("replayssm_acquire", None, || unsafe {
                replayssm_acquire(slots, n, ids.cast(), generations.cast())
            });
        } else {
            let n = self.input.below(5);
            let (n_slots, _) = self.counts(on);
            let ids: Vec<i32> = (0..n).map(|_| self.id(n_slots) as i32).collect();
            let ids = self.array(&ids, n == 0);
            let n = if self.input.byte() > 250 { -1 } else { n as i32 };
            // SAFETY: the arena's.
            self.judge("replayssm_release", None, || unsafe { replayssm_release(slots, n, ids) });
        }
    }

    // ---- Steps ----

    /// A batch, and the extents of its tensors.
    fn batch(&mut self, on: Option<usize>, extend: bool) -> Fallible<(replayssm_batch, i64, i64)> {
        let (n_slots, n_rings) = self.counts(on);
        let t_max = on.map_or(2, |i| self.slots[i].t_max);
        let usual = self.input.below(5) as i32;
        let n_rows = self.number(usual);
        let n = i64::from(n_rows);
        let most = if extend { 12 } else { t_max as usize };
        let packed = self.input.below(3) == 2;
        let usual = if packed { 0 } else { self.input.below(most + 1) as i32 };
        let mut b = desc!(replayssm_batch {
            flags: self.input.of(&[0, 0, 0, 1, 2, 3]) | if extend { REPLAYSSM_BATCH_EXTEND } else { 0 },
            n_rows: n_rows,
            tokens: self.number(usual),
            max_tokens: self.number(0),
            null_id: self.number(1),
            keep_tail: if extend { self.input.below(6) as i32 } else { 0 },
            reserved: self.bits(0),
        });
        b.flags = self.bits(b.flags);
        b.keep_tail = self.number(b.keep_tail);
        b.slots = self.ids(n, n_slots)?;
        b.rings = if self.input.below(2) == 0 { crate::common::no_ids() } else { self.ids(n, n_rings)? };
        if n > 1 << 12 {
            return Err(TooLarge);
        }
        let rows = n.max(0) as usize;
        let mut tokens = i64::from(b.tokens);
        if packed {
            let mut cu = vec![0i32];
            for _ in 0..rows {
                let step = self.input.below(most + 1) as i32;
                let step = self.number(step);
                cu.push(cu[cu.len() - 1].wrapping_add(step));
            }
            cu[0] = self.number(0);
            tokens = match self.input.byte() {
                0..=199 => i64::from(*cu.last().expect("an element")).clamp(0, 60),
                200..=239 => i64::from(self.input.byte() % 50),
                240..=245 => i64::MAX,
                _ => self.input.u64() as i64,
            };
            b.n_tokens = tokens;
            b.cu_seqlens = self.array(&cu, false);
            if b.cu_seqlens.is_null() {
                tokens = b.tokens.into();
            }
        }
        let flags: Vec<u8> = (0..rows).map(|_| self.input.byte() & 1).collect();
        b.flush = if self.input.below(2) == 0 { null() } else { self.array(&flags, true) };
        let generations: Vec<u32> = (0..rows).map(|_| u32::from(self.input.byte() & 3)).collect();
        b.generation = if self.input.below(2) == 0 { null() } else { self.array(&generations, true) };
        let is_packed = !b.cu_seqlens.is_null();
        Ok((b, if is_packed { 1 } else { n }, tokens))
    }

    fn layer_call(&mut self) -> Fallible<()> {
        let (handle, on) = self.pool();
        let slots = on.map(|i| self.pools[i].slots);
        let extend = self.input.below(3) == 2;
        let (batch, rows, tokens) = self.batch(slots, extend)?;
        let n_layers = on.map_or(1, |i| self.pools[i].desc.n_layers);
        let layer = self.input.below(n_layers as usize) as i32;
        let layer = self.number(layer);
        let (d, out) = on.map_or((self.pool_desc().0, 1), |i| (self.pools[i].desc, self.pools[i].out()));
        // A call of another family is refused, whatever it claims.
        let family = if self.input.byte() > 250 { 1 + self.input.below(4) as i32 } else { d.family };
        let (io, all) = (d.io, |n: i32| [rows, tokens, i64::from(n)]);
        let one = |n: i32| [1, 1, i64::from(n)];
        let batch = self.descriptor(batch);
        match family {
            REPLAYSSM_FAMILY_MAMBA2 => {
                let (h, dim, g, n) = (d.nheads, i64::from(d.headdim), d.ngroups, i64::from(d.dstate));
                let per_element = self.input.below(2) as i32;
                let types: [i32; 4] = std::array::from_fn(|_| self.any_dtype());
                let mut args = desc!(replayssm_mamba2_args {
                    no_softplus: self.number(0),
                    x: self.tensor(all(h), dim, io, false)?,
                    B: self.tensor(all(g), n, io, false)?,
                    C: self.tensor(all(g), n, io, false)?,
                    dt: self.tensor(all(h), 1, types[0], false)?,
                    A: self.tensor(one(h), 1, types[1], false)?,
                    dt_bias: self.option(one(h), 1, types[2])?,
                    D: self.option(one(h), if per_element == 1 { dim } else { 1 }, types[3])?,
                    D_per_element: per_element,
                    reserved: self.bits(0),
                    z: self.option(all(h), dim, io)?,
                });
                args.out = self.tensor(all(h), dim, out, true)?;
                let (args, exec) = (self.descriptor(args), self.exec());
                let (name, call): (_, unsafe extern "C" fn(_, _, _, _, _) -> _) = if extend {
                    ("replayssm_mamba2_extend", replayssm_mamba2_extend)
                } else {
                    ("replayssm_mamba2_step", replayssm_mamba2_step)
                };
                // SAFETY: the arena's.
                self.judge(name, slots, || unsafe { call(handle, layer, batch, args, exec) });
            }
            REPLAYSSM_FAMILY_CONV1D => {
                let sections = on.map_or(vec![], |i| self.pools[i].sections.clone());
                let widest = i64::from(sections.iter().copied().max().unwrap_or(d.channels));
                let extents = all(sections.len().max(1) as i32);
                let types: [i32; 2] = std::array::from_fn(|_| self.any_dtype());
                let mut args = desc!(replayssm_conv1d_args {
                    no_silu: self.number(0),
                    x: self.tensor(extents, widest, io, false)?,
                    weight: self.tensor(one(d.channels), d.width.into(), types[0], false)?,
                    bias: self.option(one(d.channels), 1, types[1])?,
                });
                args.out = self.tensor(extents, widest, out, true)?;
                let (args, exec) = (self.descriptor(args), self.exec());
                let (name, call): (_, unsafe extern "C" fn(_, _, _, _, _) -> _) = if extend {
                    ("replayssm_conv1d_extend", replayssm_conv1d_extend)
                } else {
                    ("replayssm_conv1d_step", replayssm_conv1d_step)
                };
                // SAFETY: the arena's.
                self.judge(name, slots, || unsafe { call(handle, layer, batch, args, exec) });
            }
            _ => {
                let (h, hv, k, v) = (d.H, d.HV, i64::from(d.K), i64::from(d.V));
                let gates = if d.family == REPLAYSSM_FAMILY_KDA { k } else { 1 };
                let gate = self.input.of(&[0, 0, 2, if d.family == REPLAYSSM_FAMILY_KDA { 1 } else { 0 }]);
                let types: [i32; 4] = std::array::from_fn(|_| self.any_dtype());
                let mut args = desc!(replayssm_delta_args {
                    gate: self.number(gate),
                    q: self.tensor(all(h), k, io, false)?,
                    k: self.tensor(all(h), k, io, false)?,
                    v: self.tensor(all(hv), v, io, false)?,
                    g: self.tensor(all(hv), gates, types[0], false)?,
                    beta: self.tensor(all(hv), 1, types[1], false)?,
                    A_log: if gate == 2 { crate::common::ABSENT } else { self.tensor(one(hv), 1, types[2], false)? },
                    dt_bias: if gate == 2 { crate::common::ABSENT } else { self.option(one(hv), gates, types[3])? },
                    lower_bound: if gate == 1 { -5.0 } else { self.input.of(&[0.0, 0.0, 0.0, 0.0, -1.0, f32::NAN]) },
                    scale: self.input.of(&[0.0, 0.5, 0.0, f32::INFINITY]),
                    l2norm_eps: self.input.of(&[0.0, 0.0, 1e-3, 0.0, f32::NAN, -1.0]),
                    no_l2norm: self.number(0),
                    beta_processed: self.number(1),
                    reserved: self.bits(0),
                });
                args.out = self.tensor(all(hv), v, out, true)?;
                let (args, exec) = (self.descriptor(args), self.exec());
                let (name, call): (_, unsafe extern "C" fn(_, _, _, _, _) -> _) = if extend {
                    ("replayssm_delta_extend", replayssm_delta_extend)
                } else {
                    ("replayssm_delta_step", replayssm_delta_step)
                };
                // SAFETY: the arena's.
                self.judge(name, slots, || unsafe { call(handle, layer, batch, args, exec) });
            }
        }
        Ok(())
    }

    fn commit(&mut self) -> Fallible<()> {
        let (handle, on) = self.slots();
        let extend = self.input.below(4) == 3;
        let (batch, ..) = self.batch(on, extend)?;
        let n = batch.n_rows.max(0);
        let batch = self.descriptor(batch);
        let counts: Vec<i32> = (0..n)
            .map(|_| {
                let count = i32::from(self.input.byte() % 4);
                self.number(count)
            })
            .collect();
        let args = desc!(replayssm_commit_args {
            convention: self.input.below(3) as i32,
            counts: if extend || self.input.below(3) == 0 { null() } else { self.array(&counts, true) },
            // Others would be too large for any address space.
            counts_stride: self.input.of(&[0, 0, 1, 1, if n > 1 { i64::MAX } else { 1 }]),
        });
        let convention = self.number(args.convention);
        let args = self.descriptor(replayssm_commit_args { convention, ..args });
        let exec = self.exec();
        // SAFETY: the arena's.
        self.judge("replayssm_commit", on, || unsafe { replayssm_commit(handle, batch, args, exec) });
        Ok(())
    }

    // ---- Lists ----

    fn list(&mut self, on: Option<usize>, of_pools: bool) -> Fallible<(replayssm_list, usize)> {
        let (n_slots, n_rings) = self.counts(on);
        let usual = self.input.below(4) as i32;
        let n = self.number(usual);
        let place = self.input.of(&[REPLAYSSM_WHERE_DEVICE, REPLAYSSM_WHERE_HOST]);
        let mut list = desc!(replayssm_list { n: n, place: self.number(place), reserved: self.bits(0) });
        if i64::from(n) > 1 << 12 {
            return Err(TooLarge);
        }
        list.slots = self.ids(n.into(), n_slots)?;
        list.rings = if self.input.below(2) == 0 { crate::common::no_ids() } else { self.ids(n.into(), n_rings)? };
        if of_pools && self.input.below(4) == 3 {
            let count = self.input.below(4);
            let pools: Vec<*const replayssm_layers> = (0..count).map(|_| self.pool().0.cast_const()).collect();
            let ids = (0..count).map(|_| self.ids(n.into(), n_slots)).collect::<Fallible<Vec<_>>>()?;
            list.n_pools = count as i32;
            list.pools = self.array(&pools, false);
            list.pool_slots = self.array(&ids, false);
            if self.input.byte() > 250 {
                list.n_pools = self.input.of(&[-1, 65, i32::MAX]);
            }
            if self.input.below(2) == 0 {
                list.slots = crate::common::no_ids();
            }
        }
        list.pools_reserved = self.bits(0);
        Ok((list, n.max(0) as usize))
    }

    /// An array with a position for each entry, or none.
    fn positions(&mut self, n: usize) -> *const i64 {
        let positions: Vec<i64> = (0..n).map(|_| self.position()).collect();
        if self.input.below(2) == 0 { null() } else { self.array(&positions, true) }
    }

    fn generations(&mut self, n: usize) -> *const u32 {
        let generations: Vec<u32> = (0..n).map(|_| u32::from(self.input.byte())).collect();
        if self.input.below(2) == 0 { null() } else { self.array(&generations, true) }
    }

    fn state(&mut self, pool: Option<usize>, n: usize, out: bool) -> Fallible<*const replayssm_state> {
        let ([heads, rows, columns], n_layers) =
            pool.map_or(([1, 2, 3], 1), |i| (self.pools[i].shape(), i64::from(self.pools[i].desc.n_layers)));
        let dtype = self.any_dtype();
        let mut s = desc!(replayssm_state {
            dtype: self.number(dtype),
            orientation: self.number(0),
            layer: if self.input.below(2) == 0 { -1 } else { self.input.below(n_layers as usize) as i32 },
        });
        s.layer = self.number(s.layer);
        let (outer, inner) = if s.orientation == REPLAYSSM_STATE_COL_MAJOR { (columns, rows) } else { (rows, columns) };
        let layers = if s.layer == -1 { n_layers } else { 1 };
        let extents = [outer, heads, layers, n as i64];
        let mut dense = inner;
        let mut strides = [0; 4];
        let mut axes = [(0, 0); 4];
        for i in 0..4 {
            strides[i] = match self.input.byte() {
                0..=179 => 0,
                180..=219 => dense.saturating_add(3),
                220..=229 => dense.saturating_sub(1),
                230..=234 => i64::MAX,
                235..=239 => -1,
                _ => i64::from(self.input.byte()),
            };
            let real = if strides[i] == 0 { dense } else { strides[i] };
            axes[i] = (extents[i], real);
            dense = real.saturating_mul(extents[i].max(1));
        }
        [s.stride_row, s.stride_head, s.stride_layer, s.stride_entry] = strides;
        let size = size_of_dtype(s.dtype);
        s.data = match reach(&axes, inner, size)? {
            None => self.arena.input(&[0; 8], 0).cast(),
            Some((first, bytes)) if out => self.arena.output(bytes, 0).wrapping_add(first).cast(),
            Some((first, bytes)) => {
                let any = self.input.byte() > 247;
                let bytes = values(&mut self.rng, s.dtype, bytes / size, any);
                self.arena.input(&bytes, 0).wrapping_add(first).cast()
            }
        };
        if self.input.byte() > 252 {
            s.data = null_mut();
        }
        Ok(self.descriptor(s))
    }

    fn list_call(&mut self) -> Fallible<()> {
        let which = self.input.below(9);
        if which < 3 {
            let (handle, on) = self.pool();
            let slots = on.map(|i| self.pools[i].slots);
            let (list, n) = self.list(slots, false)?;
            let (list, at) = (self.descriptor(list), self.positions(n));
            let state = self.state(on, n, which == 0)?;
            let exec = self.exec();
            if which == 0 {
                // SAFETY: the arena's.
                self.judge("replayssm_export", None, || unsafe { replayssm_export(handle, list, at, state, exec) });
            } else {
                // SAFETY: the arena's.
                self.judge("replayssm_import", slots, || unsafe { replayssm_import(handle, list, at, state, exec) });
            }
            return Ok(());
        }
        let (handle, on) = self.slots();
        let (list, n) = self.list(on, which != 8)?;
        let list = self.descriptor(list);
        match which {
            3 | 4 => {
                let seeds: Vec<u64> = (0..n).map(|_| self.input.byte().into()).collect();
                let args = desc!(replayssm_reset_args {
                    keep_checkpoint: self.number(0),
                    convert: self.number(0),
                    reserved: self.bits(0),
                    position: self.positions(n),
                    generation: self.generations(n),
                    seed: if self.input.below(2) == 0 { null() } else { self.array(&seeds, true) },
                });
                let (args, exec) = (self.descriptor(args), self.exec());
                // SAFETY: the arena's.
                self.judge("replayssm_reset", on, || unsafe { replayssm_reset(handle, list, args, exec) });
            }
            5 => {
                let counts: Vec<i32> = (0..n)
                    .map(|_| {
                        let n = i32::from(self.input.byte() % 8);
                        self.number(n)
                    })
                    .collect();
                let counts = self.array(&counts, n == 0);
                let done = if self.input.below(2) == 0 { null_mut() } else { self.arena.output(n * 4, 0) };
                let exec = self.exec();
                // SAFETY: the arena's.
                self.judge("replayssm_rewind", on, || unsafe {
                    replayssm_rewind(handle, list, counts, done.cast(), exec)
                });
            }
            6 | 7 => {
                let args = desc!(replayssm_flush_args { later: self.number(0), position: self.positions(n) });
                let (args, exec) = (self.descriptor(args), self.exec());
                // SAFETY: the arena's.
                self.judge("replayssm_flush", on, || unsafe { replayssm_flush(handle, list, args, exec) });
            }
            _ => {
                let cursors = self.arena.output(n * size_of::<replayssm_cursor>(), 0);
                let exec = self.exec();
                // SAFETY: the arena's.
                self.judge("replayssm_read_cursors", None, || unsafe {
                    replayssm_read_cursors(handle, list, cursors.cast(), exec)
                });
            }
        }
        Ok(())
    }

    fn copy(&mut self) -> Fallible<()> {
        let (handle, on) = self.slots();
        let (src, n) = self.list(on, true)?;
        let (mut dst, _) = self.list(on, true)?;
        if self.input.below(8) != 7 {
            // Of one length at one place, its arrays as long.
            (dst.n, dst.place) = (src.n, src.place);
            let (n_slots, n_rings) = self.counts(on);
            (dst.slots, dst.rings) = (self.ids(n as i64, n_slots)?, self.ids(n as i64, n_rings)?);
            dst.n_pools = 0;
        }
        let (src, dst) = (self.descriptor(src), self.descriptor(dst));
        let kind = self.input.below(6) as i32;
        let args = desc!(replayssm_copy_args {
            kind: self.number(kind),
            position: if kind == REPLAYSSM_COPY_LOAD || kind == REPLAYSSM_COPY_STORE {
                self.positions(n)
            } else {
                null()
            },
            generation: if self.input.below(4) == 3 { self.generations(n) } else { null() },
        });
        let (args, exec) = (self.descriptor(args), self.exec());
        // SAFETY: the arena's.
        self.judge("replayssm_copy", on, || unsafe { replayssm_copy(handle, src, dst, args, exec) });
        Ok(())
    }

    fn snapshot(&mut self) -> Fallible<()> {
        let (handle, on) = self.slots();
        let extend = self.input.below(4) == 3;
        let (batch, ..) = self.batch(on, extend)?;
        let n = batch.n_rows.max(0) as usize;
        let (n_slots, _) = self.counts(on);
        let at: Vec<i64> = (0..n).map(|_| self.position()).collect();
        let mut args =
            desc!(replayssm_snapshot_args { at: self.array(&at, n == 0), dst: self.ids(n as i64, n_slots)? });
        if self.input.below(4) == 3 {
            let count = self.input.below(3);
            let pools: Vec<*const replayssm_layers> = (0..count).map(|_| self.pool().0.cast_const()).collect();
            args.n_pools = count as i32;
            args.pools = self.array(&pools, false);
            for array in [&mut args.pool_src, &mut args.pool_dst] {
                let ids = (0..count).map(|_| self.ids(n as i64, n_slots)).collect::<Fallible<Vec<_>>>()?;
                *array = self.array(&ids, false);
            }
        }
        let (batch, args, exec) = (self.descriptor(batch), self.descriptor(args), self.exec());
        // SAFETY: the arena's.
        self.judge("replayssm_snapshot", on, || unsafe { replayssm_snapshot(handle, batch, args, exec) });
        Ok(())
    }

    // ---- Blobs ----

    fn save(&mut self) -> Fallible<()> {
        let (handle, on) = self.slots();
        let (n_slots, n_rings) = self.counts(on);
        let (mut list, _) = self.list(on, true)?;
        if self.input.below(8) != 7 {
            (list.n, list.place, list.n_pools, list.reserved) = (1, REPLAYSSM_WHERE_HOST, 0, 0);
            (list.slots, list.rings) = (self.ids(1, n_slots)?, self.ids(1, n_rings)?);
        }
        let list = self.descriptor(list);
        let kind = self.input.below(3) as i32;
        let kind = self.number(kind);
        let mut needed = 0xA5A5;
        // SAFETY: a local.
        let known =
            self.judge("replayssm_save_bytes", None, || unsafe { replayssm_save_bytes(handle, kind, &mut needed) });
        assert!(known || needed == 0xA5A5, "a refused call wrote");
        let exec = self.exec();
        if self.input.below(2) == 0 {
            let capacity = match self.input.byte() {
                0..=219 => needed,
                220..=229 => needed - 1,
                230..=239 => 0,
                _ => u64::MAX,
            };
            let blob = self.arena.undefined(capacity.min(needed) as usize);
            let blob = if capacity == 0 { null_mut() } else { blob };
            // SAFETY: the arena's: as much as is needed, or the capacity.
            if self.judge("replayssm_save", None, || unsafe {
                replayssm_save(handle, list, kind, blob.cast(), capacity, exec)
            }) {
                // SAFETY: written just now.
                let saved = unsafe { std::slice::from_raw_parts(blob, needed as usize) };
                self.blobs.push(saved.to_vec());
            }
            return Ok(());
        }
        let i = self.input.below(self.blobs.len());
        let Some(mut blob) = self.blobs.get(i).cloned() else { return Ok(()) };
        if self.input.below(4) == 3 {
            let at = usize::from(self.input.u16()) % blob.len();
            blob[at] ^= self.input.byte();
            let end = blob.len() - 4;
            let checksum = crc32fast::hash(&blob[..end]).to_le_bytes();
            blob[end..].copy_from_slice(&checksum);
        }
        let bytes = if self.input.byte() > 250 { self.input.below(blob.len()) } else { blob.len() };
        let at = self.array(&blob[..bytes], false);
        let generation = self.input.byte().into();
        let args = desc!(replayssm_restore_args {
            reserved: self.bits(0),
            generation: if self.input.below(2) == 0 { null() } else { self.array(&[generation], true) },
        });
        let args = self.descriptor(args);
        // SAFETY: the arena's.
        self.judge("replayssm_restore", on, || unsafe {
            replayssm_restore(handle, list, at.cast(), bytes as u64, args, exec)
        });
        Ok(())
    }

    fn call(&mut self) {
        self.arena = Arena::default();
        self.named.clear();
        // Not too many of anything.
        let done = match self.input.below(32) {
            0 if self.contexts.len() < 3 => {
                self.create_context();
                Ok(())
            }
            1 if self.slots.len() < 4 => {
                self.create_slots();
                Ok(())
            }
            2 | 3 if self.pools.len() < 6 => self.create_pool(),
            4 => {
                self.destroy();
                Ok(())
            }
            5 => self.rebind(),
            6 | 7 => self.question(),
            8 => {
                self.acquire();
                Ok(())
            }
            9..=15 => self.layer_call(),
            16..=20 => self.commit(),
            21..=25 => self.list_call(),
            26 | 27 => self.copy(),
            28 | 29 => self.snapshot(),
            _ => self.save(),
        };
        // What cannot be kept valid is not called.
        let _: Fallible<()> = done;
    }
}

/// Whether what is to be created is small, or cannot be had at all.
fn fits(slots: &replayssm_slots_desc, pools: &[replayssm_pool_desc]) -> bool {
    let n_rings = u64::from((if slots.n_rings == 0 { slots.n_slots } else { slots.n_rings }).unsigned_abs());
    let n_slots = u64::from(slots.n_slots.unsigned_abs());
    let mut total = n_rings.saturating_mul(32);
    for pool in pools {
        let mut planned = [desc!(replayssm_component {}); 8];
        let mut n = 0;
        // SAFETY: locals, and sections of the arena's.
        let status = unsafe { replayssm_plan_components(slots, pool, planned.as_mut_ptr(), 8, &mut n) };
        if status != REPLAYSSM_OK {
            refused(status);
            continue;
        }
        for c in &planned[..n as usize] {
            let count = if c.per_ring == 1 { n_rings } else { n_slots };
            let layer = (c.slot_stride_bytes as u64).saturating_mul(count);
            total = total.saturating_add(layer.saturating_mul(pool.n_layers as u64));
        }
    }
    total <= MOST_MEMORY
}

/// One input.
pub fn run(data: &[u8]) {
    let input = Source::new(data);
    let mut world = World {
        input,
        rng: Rng(data.len() as u64),
        contexts: vec![],
        slots: vec![],
        pools: vec![],
        blobs: vec![],
        arena: Arena::default(),
        named: vec![],
    };
    world.begin();
    for _ in 0..MOST_CALLS {
        if world.input.is_empty() {
            break;
        }
        world.call();
    }
    world.end();
}

impl World<'_> {
    /// A context of one thread and a slots handle, so that most inputs have something to call.
    fn begin(&mut self) {
        let desc = desc!(replayssm_context_desc { backend: REPLAYSSM_BACKEND_CPU, n_threads: 1 });
        let mut context = null_mut();
        // SAFETY: locals.
        assert_eq!(unsafe { replayssm_context_create(&desc, &mut context) }, REPLAYSSM_OK);
        self.contexts.push(Context { handle: context, is_alive: true });
        let desc = self.slots_desc();
        let mut handle = null_mut();
        // SAFETY: locals.
        let status = unsafe { replayssm_slots_create(context, &desc, &mut handle) };
        assert_eq!(status, REPLAYSSM_OK, "{}", crate::common::message());
        self.add_slots(handle, desc);
        for _ in 0..1 + self.input.below(2) {
            self.arena = Arena::default();
            let (d, sections) = self.pool_desc();
            let with = self.with_sections(d, &sections);
            let mut pool = null_mut();
            if !fits(&desc, &[with]) {
                continue;
            }
            // SAFETY: locals, and the arena's.
            if unsafe { replayssm_layers_create(handle, &with, null(), 0, &mut pool) } == REPLAYSSM_OK {
                self.add_pool(pool, 0, d, sections, vec![]);
            }
        }
    }

    /// Destroys all that is left, in one order or the other.
    fn end(&mut self) {
        let parents_first = self.pools.len().is_multiple_of(2);
        if parents_first {
            self.contexts.iter().filter(|c| c.is_alive).for_each(|c| replayssm_context_destroy(c.handle));
            self.slots.iter().filter(|s| s.is_alive).for_each(|s| replayssm_slots_destroy(s.handle));
        }
        self.pools.iter().for_each(|p| replayssm_layers_destroy(p.handle));
        self.slots.iter().for_each(|s| replayssm_slots_destroy(s.handle));
        self.contexts.iter().for_each(|c| replayssm_context_destroy(c.handle));
    }
}
