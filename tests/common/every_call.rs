//! Every call that a model makes between creating and destroying, on buffers that exist before.

use std::ptr::{null, null_mut};

use super::device::peek;
use super::{Array, BatchData, Inputs, Rig, Rng, Row, Spec, address, components, encode, ids64, ok, tensor};
use crate::desc;
use Again::{Parts, Whole};
use replayssm::ffi::*;

const CONV_WIDTH: i32 = 4;

/// Inputs of one batch: of the rig's layer, and of a convolution.
struct Call {
    batch: BatchData,
    io: Inputs,
    conv: Array,
    tokens: usize,
}

/// A layer and a convolution on the same slots.
pub struct EveryCall {
    pub rig: Rig,
    pub conv: *mut replayssm_layers,
    channels: usize,
    weight: Array,
    steps: Vec<Call>,
    extend: Call,
    ids: Vec<i64>,
    /// Slots (and rings) behind those of the rows: as many, and as many again.
    spare: Vec<i64>,
    third: Vec<i64>,
    /// Where all of it ends.
    ends: Vec<i64>,
    state: Vec<u32>,
    window: Vec<u32>,
    cursors: Vec<replayssm_cursor>,
    positions: Vec<i64>,
    one: Vec<i32>,
    counts: Vec<i32>,
    done: Vec<i32>,
    acquired: Vec<i32>,
    generations: Vec<u32>,
    /// Makes a call: `ok` of it, unless a test has more in mind. A call that fails may be made again; if it is `Again::Whole`, only where nothing
    /// of it was enqueued.
    pub make: fn(Again, &mut dyn FnMut() -> i32),
}

/// Whether a call has the same effect if a part of it was done before.
#[derive(Clone, Copy, PartialEq)]
pub enum Again {
    Parts,
    Whole,
}

impl Drop for EveryCall {
    fn drop(&mut self) {
        replayssm_layers_destroy(self.conv);
    }
}

impl EveryCall {
    /// On `rows` rows: steps of as many tokens as given, then an extend of `extend` tokens that keeps `tail` in the ring.
    pub fn new(spec: Spec, rows: usize, channels: usize, steps: &[usize], extend: usize, tail: i32) -> Self {
        let (io, element) = (spec.io, spec.heads * spec.headdim * spec.dstate);
        let rig = Rig::new(spec);
        let mut conv = null_mut();
        let p = desc!(replayssm_pool_desc {
            family: REPLAYSSM_FAMILY_CONV1D,
            n_layers: 1,
            io: io,
            channels: channels as i32,
            width: CONV_WIDTH,
        });
        // SAFETY: the descriptor and the out-parameter are locals.
        ok(unsafe { replayssm_layers_create(rig.slots, &p, null(), 0, &mut conv) });
        let mut rng = Rng(7);
        let mut call = |tokens: usize, extend: bool, tail: i32| {
            let rows: Vec<Row> = (0..rows).map(|slot| Row::new(slot, &rig.tokens(&mut rng, tokens))).collect();
            Call {
                batch: BatchData::new(&rig, &rows, extend, tail),
                io: Inputs::new(&rig.spec, &rig.params[0], &rows, 0),
                conv: zeros(io, rows.len() * tokens * channels),
                tokens,
            }
        };
        EveryCall {
            steps: steps.iter().map(|&tokens| call(tokens, false, 0)).collect(),
            extend: call(extend, true, tail),
            conv,
            channels,
            weight: zeros(REPLAYSSM_DTYPE_F32, channels * CONV_WIDTH as usize),
            ids: (0..rows as i64).collect(),
            spare: (rows as i64..2 * rows as i64).collect(),
            third: (2 * rows as i64..3 * rows as i64).collect(),
            ends: vec![100 + (steps.len() + extend) as i64; rows],
            state: vec![0; rows * element],
            window: vec![0; rows * channels * CONV_WIDTH as usize],
            // SAFETY: a cursor is plain data.
            cursors: vec![unsafe { std::mem::zeroed() }; rows],
            positions: vec![100; rows],
            one: vec![1; rows],
            counts: vec![1; rows],
            done: vec![0; rows],
            acquired: vec![0; rows],
            generations: vec![0; rows],
            make: |_, call| ok(call()),
            rig,
        }
    }

    /// Makes every call; asserts that all were accepted and found no fault.
    pub fn run(&mut self) {
        assert_eq!(self.all(), 0, "faults");
        assert_eq!(self.done, self.one);
        let steps = self.steps.len() + self.extend.tokens;
        assert!(self.cursors.iter().all(|cursor| cursor.position == 100 + steps as i64 - 2));
    }

    /// Makes every call; the fault bits.
    pub fn all(&mut self) -> u32 {
        let (slots, pool, n, make) = (self.rig.slots, self.rig.pool, self.ids.len() as i32, self.make);
        let lossless = matches!(self.rig.spec.format, REPLAYSSM_FORMAT_SPLIT32 | REPLAYSSM_FORMAT_F32);
        let list = desc!(replayssm_list {
            n: n,
            place: REPLAYSSM_WHERE_HOST,
            slots: ids64(&self.ids),
            rings: ids64(&self.ids)
        });
        let state = desc!(replayssm_state { dtype: REPLAYSSM_DTYPE_F32, data: self.state.as_mut_ptr().cast() });
        let window = desc!(replayssm_state { dtype: REPLAYSSM_DTYPE_F32, data: self.window.as_mut_ptr().cast() });
        let list_of = |ids: &[i64]| {
            desc!(replayssm_list { n: n, place: REPLAYSSM_WHERE_HOST, slots: ids64(ids), rings: ids64(ids) })
        };
        let (spare, third) = (list_of(&self.spare), list_of(&self.third));
        let snapshot = desc!(replayssm_snapshot_args { at: self.ends.as_ptr(), dst: ids64(&self.spare) });
        let [fork, moved, swap, store, load, stored] = [0, 1, 2, 3, 4, 5].map(|kind| {
            let is_load = kind == REPLAYSSM_COPY_LOAD;
            desc!(replayssm_copy_args { kind: kind, position: if is_load { self.ends.as_ptr() } else { null() } })
        });
        let later = desc!(replayssm_flush_args { later: 1, position: self.ends.as_ptr() });
        let convert = desc!(replayssm_reset_args { keep_checkpoint: 1, convert: 1 });
        // SAFETY: everything belongs to this object and lives until the calls return.
        unsafe {
            make(Parts, &mut || replayssm_acquire(slots, n, self.acquired.as_mut_ptr(), self.generations.as_mut_ptr()));
            make(Parts, &mut || replayssm_reset(slots, &list, null(), null()));
            if lossless {
                make(Whole, &mut || replayssm_reset(slots, &list, &convert, null()));
            }
            make(Parts, &mut || replayssm_import(pool, &list, self.positions.as_ptr(), &state, null()));
            make(Parts, &mut || replayssm_import(self.conv, &list, null(), &window, null()));
        }
        for call in &self.steps {
            self.layers(call, false);
            let args = desc!(replayssm_commit_args { counts: self.counts.as_ptr() });
            // SAFETY: as above.
            make(Parts, &mut || unsafe { replayssm_commit(slots, &call.batch.desc(), &args, null()) });
        }
        self.layers(&self.extend, true);
        let mut report = desc!(replayssm_report {});
        let mut stats = desc!(replayssm_stats {});
        // SAFETY: as above.
        unsafe {
            make(Parts, &mut || replayssm_commit(slots, &self.extend.batch.desc(), null(), null()));
            make(Parts, &mut || replayssm_snapshot(slots, &self.extend.batch.desc(), &snapshot, null()));
            for (from, to, args) in [
                (&list, &spare, &store),
                (&spare, &third, &stored),
                (&list, &spare, &fork),
                (&list, &spare, &swap),
                (&third, &spare, &load),
                (&spare, &third, &moved),
            ] {
                let is_moved = args.kind == REPLAYSSM_COPY_MOVE || args.kind == REPLAYSSM_COPY_SWAP;
                make(if is_moved { Whole } else { Parts }, &mut || replayssm_copy(slots, from, to, args, null()));
            }
            make(Parts, &mut || replayssm_flush(slots, &spare, null(), null()));
            make(Parts, &mut || replayssm_flush(slots, &spare, &later, null()));
            make(Parts, &mut || replayssm_export(pool, &list, null(), &state, null()));
            make(Parts, &mut || replayssm_rewind(slots, &list, self.one.as_ptr(), self.done.as_mut_ptr(), null()));
            make(Parts, &mut || replayssm_rewind(slots, &list, self.one.as_ptr(), null_mut(), null()));
            make(Parts, &mut || replayssm_export(pool, &list, null(), &state, null()));
            make(Parts, &mut || replayssm_export(self.conv, &list, null(), &window, null()));
            make(Parts, &mut || replayssm_read_cursors(slots, &list, self.cursors.as_mut_ptr(), null()));
            make(Parts, &mut || replayssm_check(slots, 1, &mut report));
            make(Parts, &mut || replayssm_stats_read(slots, &mut stats));
            make(Parts, &mut || replayssm_release(slots, n, self.acquired.as_ptr()));
        }
        report.bits
    }

    fn layers(&self, call: &Call, extend: bool) {
        let batch = call.batch.desc();
        // An extend that keeps a tail is two launches, and the second one needs what was there before the first.
        (self.make)(if extend { Whole } else { Parts }, &mut || call.io.call(&self.rig, 0, &batch, extend, null()));
        let x = tensor(&call.conv, 0, call.tokens * self.channels, self.channels, self.channels);
        let args =
            desc!(replayssm_conv1d_args { x: x, out: x, weight: tensor(&self.weight, 0, 0, 0, CONV_WIDTH as usize) });
        let of_conv = if extend { replayssm_conv1d_extend } else { replayssm_conv1d_step };
        // SAFETY: as in `run`.
        (self.make)(Parts, &mut || unsafe { of_conv(self.conv, 0, &batch, &args, null()) });
    }

    /// All bytes of both pools, and the cursors.
    pub fn left(&self) -> Vec<Vec<u8>> {
        let mut left = Vec::new();
        for component in components(self.rig.pool).iter().chain(&components(self.conv)) {
            let n = if component.per_ring != 0 { self.rig.spec.rings } else { self.rig.spec.slots };
            left.extend((0..n).map(|i| peek(address(component, 0, i), component.bytes as usize)));
        }
        let words =
            |c: replayssm_cursor| [c.position, c.flush_before, c.seed as i64, c.generation.into(), c.committed.into()];
        left.extend((0..self.rig.spec.rings).map(|ring| words(self.rig.cursor(ring)).map(i64::to_ne_bytes).concat()));
        left
    }
}

fn zeros(dtype: i32, n: usize) -> Array {
    let mut array = Array::poisoned(dtype, n);
    for i in 0..n {
        array.set(i, encode(dtype, 0.0));
    }
    array
}
