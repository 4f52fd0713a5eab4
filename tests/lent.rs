//! Memory that engines lend: layers anywhere, pages that hold several components, and moving all of it.

#![allow(clippy::multiple_unsafe_ops_per_block, reason = "a test's calls share one promise")]

mod common;

use std::ffi::c_void;
use std::ptr::null;

use common::{FAMILIES, Rig, Rng, Row, Spec, heap, message, no_faults};
use replayssm::ffi::*;

#[global_allocator]
static HEAP: common::device::Heap = common::device::Heap::ON_CUDA;

const LAYERS: usize = 3;

fn spec(family: i32, readout: i32) -> Spec {
    Spec { family, readout, layers: LAYERS, window: 6, t_max: 3, keep: 1, slots: 3, rings: 4, ..Spec::default() }
}

/// What a test lends for one component: a block for each layer, each with room to spare, all of it NaN.
struct Blocks {
    kind: i32,
    blocks: Vec<Vec<u8>>,
    bases: Vec<*mut c_void>,
    slot_stride: i64,
    bytes: usize,
    n: usize,
}

const OFFSET: usize = 48;

impl Blocks {
    /// Slots lie `spread` times as far apart as they need to.
    fn new(c: &replayssm_component, n: usize, layers: usize, spread: usize) -> Self {
        let stride = (c.bytes as usize).next_multiple_of(16) * spread;
        // Of different sizes, so that distances of layers differ, and not in order.
        let mut blocks: Vec<Vec<u8>> = (0..layers).map(|l| vec![0xFF; OFFSET + stride * n + 64 * (l + 1)]).collect();
        blocks.reverse();
        let bases =
            blocks.iter().map(|b| b.as_ptr().wrapping_add(b.as_ptr().align_offset(16)) as *mut c_void).collect();
        Blocks { kind: c.kind, blocks, bases, slot_stride: stride as i64, bytes: c.bytes as usize, n }
    }

    fn lent(&self) -> replayssm_lent {
        desc!(replayssm_lent {
            kind: self.kind,
            layer_bases: self.bases.as_ptr(),
            slot_stride_bytes: self.slot_stride,
            offset_bytes: OFFSET as i64,
        })
    }

    /// Nothing but the slots' parts was written.
    fn check_gaps(&self) {
        for (block, &base) in self.blocks.iter().zip(&self.bases) {
            let first = base as usize - block.as_ptr() as usize + OFFSET;
            let live = |at: usize| {
                let slot =
                    at.checked_sub(first).map(|at| (at / self.slot_stride as usize, at % self.slot_stride as usize));
                slot.is_some_and(|(slot, at)| slot < self.n && at < self.bytes)
            };
            assert!(block.iter().enumerate().all(|(at, &byte)| live(at) || byte == 0xFF), "kind {}", self.kind);
        }
    }
}

/// Everything that touches all layers or one, on two rigs: the bytes of outputs, states and blobs are equal.
fn live_alike(owned: &Rig, lent: &Rig, seed: u64) {
    let mut rng = Rng(seed);
    for slot in 0..3 {
        for rig in [owned, lent] {
            rig.reset(slot, slot + 1, 4);
        }
        let state = owned.export(1, slot, slot + 1, None);
        assert!(state.iter().all(|&bits| bits == 0));
        let random: Vec<u32> = state.iter().map(|_| (rng.normal() as f32).to_bits()).collect();
        for rig in [owned, lent] {
            (0..LAYERS).for_each(|layer| rig.import(layer, slot, slot + 1, None, &random));
        }
    }
    for round in 0..20 {
        let rows: Vec<Row> = (0..3)
            .map(|slot| {
                let n = rng.below(4);
                Row { ring: slot as i64 + 1, ..Row::new(slot, &owned.tokens(&mut rng, n)) }
            })
            .collect();
        let counts: Vec<i32> = rows.iter().map(|row| rng.below(row.tokens.len() + 1) as i32).collect();
        let outputs: Vec<_> = [owned, lent]
            .into_iter()
            .map(|rig| {
                let all: Vec<_> = (0..LAYERS).map(|layer| rig.layer(layer, &rows, false, 0)).collect();
                rig.commit(&rows, &counts);
                all
            })
            .collect();
        assert!(outputs[0] == outputs[1], "round {round}");
        for rig in [owned, lent] {
            match round {
                5 => rig.flush(1, 2, None),
                9 => rig.copy(REPLAYSSM_COPY_FORK, (0, 1), (2, 3), None),
                12 => rig.copy(REPLAYSSM_COPY_SWAP, (0, 1), (1, 2), None),
                15 => {
                    let position = rig.cursor(1).position;
                    rig.copy(REPLAYSSM_COPY_STORE, (0, 1), (2, 0), None);
                    rig.copy(REPLAYSSM_COPY_LOAD, (2, 0), (1, 2), Some(position));
                    rig.copy(REPLAYSSM_COPY_FORK, (1, 2), (2, 3), None);
                }
                _ => {}
            }
        }
        if round % 7 == 6 {
            assert_eq!(owned.rewind(round % 3, round % 3 + 1, 1), lent.rewind(round % 3, round % 3 + 1, 1));
        }
        for slot in 0..3 {
            for layer in 0..LAYERS {
                let [a, b] = [owned, lent].map(|rig| rig.export(layer, slot, slot + 1, None));
                assert!(a == b, "round {round}, slot {slot}, layer {layer}");
            }
        }
    }
    for kind in [REPLAYSSM_SAVE_LIVE, REPLAYSSM_SAVE_PORTABLE] {
        let blobs = [owned, lent].map(|rig| rig.save(kind, 1, 2));
        assert!(blobs[0] == blobs[1]);
        for rig in [owned, lent] {
            assert_eq!(rig.restore(2, 3, &blobs[0]), REPLAYSSM_OK, "{}", message());
        }
        assert!(owned.export(2, 2, 3, None) == lent.export(2, 2, 3, None));
    }
    no_faults(owned);
    no_faults(lent);
}

/// Lends all components of a pool like `owned`.
fn blocks_for(owned: &Rig, spread: usize) -> Vec<Blocks> {
    let count = |c: &replayssm_component| if c.per_ring == 1 { 4 } else { 3 };
    owned.components().iter().map(|c| Blocks::new(c, count(c), LAYERS, spread)).collect()
}

/// A rig whose only pool is lent.
fn lent_rig(spec: &Spec, lent: &[replayssm_lent]) -> Rig {
    Rig::lent(spec.clone(), lent)
}

#[test]
fn layers_that_lie_anywhere_are_like_owned_ones() {
    for family in FAMILIES {
        for readout in [REPLAYSSM_READOUT_EXACT, REPLAYSSM_READOUT_HIGH] {
            let spec = spec(family, readout);
            let owned = Rig::new(spec.clone());
            let blocks = blocks_for(&owned, 2);
            let lent: Vec<_> = blocks.iter().map(Blocks::lent).collect();
            let rig = lent_rig(&spec, &lent);
            for (c, b) in rig.components().iter().zip(&blocks) {
                assert_eq!((c.base as usize, c.layer_stride_bytes), (b.bases[0] as usize + OFFSET, 0));
            }
            live_alike(&owned, &rig, 3);
            blocks.iter().for_each(Blocks::check_gaps);
        }
    }
}

/// A page of a slot holds its checkpoint and its tags in one layer; pages of a slot are twice as large as they need to be, the other half
/// NaN. Rings are the library's.
#[test]
fn case_12_checkpoint_and_tags_in_one_lent_page_while_rings_are_owned() {
    for family in FAMILIES {
        for per_layer in [false, true] {
            let spec = spec(family, REPLAYSSM_READOUT_EXACT);
            let owned = Rig::new(spec.clone());
            let [checkpoint, tags] =
                [REPLAYSSM_COMPONENT_CHECKPOINT, REPLAYSSM_COMPONENT_TAGS].map(|kind| owned.component(kind));
            let tags_at = (checkpoint.bytes as usize).next_multiple_of(16);
            let page = 2 * (tags_at + tags.bytes as usize).next_multiple_of(16);
            let size = page * 3 * LAYERS + 16;
            let memory = heap([vec![0xFFu8; size]]).remove(0);
            let first = memory.as_ptr().align_offset(16);
            let base = memory.as_ptr().wrapping_add(first) as *mut c_void;
            // [slot][layer] pages.
            let bases: Vec<*mut c_void> = (0..LAYERS).map(|layer| base.wrapping_byte_add(layer * page)).collect();
            let lent = [(REPLAYSSM_COMPONENT_CHECKPOINT, 0), (REPLAYSSM_COMPONENT_TAGS, tags_at)].map(|(kind, at)| {
                let mut lent = desc!(replayssm_lent {
                    kind: kind,
                    slot_stride_bytes: (page * LAYERS) as i64,
                    offset_bytes: at as i64,
                });
                if per_layer {
                    lent.layer_bases = bases.as_ptr();
                } else {
                    (lent.base, lent.layer_stride_bytes) = (base, page as i64);
                }
                lent
            });
            let rig = lent_rig(&spec, &lent);
            live_alike(&owned, &rig, 4);
            let used = checkpoint.bytes as usize..tags_at + tags.bytes as usize;
            for (at, &byte) in memory.iter().enumerate() {
                let inside = at.checked_sub(first).filter(|at| *at < page * 3 * LAYERS).map(|at| at % page);
                let live = inside.is_some_and(|at| at < used.start || (tags_at..used.end).contains(&at));
                assert!(live || byte == 0xFF, "byte {at}");
            }
        }
    }
}

#[test]
fn a_pool_goes_on_where_its_memory_was_moved_to() {
    for family in FAMILIES {
        let spec = spec(family, REPLAYSSM_READOUT_HIGH);
        let owned = Rig::new(spec.clone());
        let blocks = blocks_for(&owned, 1);
        let lent: Vec<_> = blocks.iter().map(Blocks::lent).collect();
        let rig = lent_rig(&spec, &lent);
        live_alike(&owned, &rig, 5);
        // Other distances, and then one block for all layers.
        let there = blocks_for(&owned, 3);
        let mut one: Vec<(Vec<u8>, replayssm_lent)> = Vec::new();
        for c in owned.components() {
            let n = if c.per_ring == 1 { 4 } else { 3 };
            let stride = (c.bytes as usize).next_multiple_of(16);
            let block = vec![0xFFu8; stride * n * LAYERS + 16];
            let base = block.as_ptr().wrapping_add(block.as_ptr().align_offset(16)) as *mut c_void;
            one.push((block, desc!(replayssm_lent { kind: c.kind, base: base })));
        }
        let moves: [Vec<replayssm_lent>; 3] = [
            there.iter().map(Blocks::lent).collect(),
            one.iter().map(|(_, lent)| *lent).collect(),
            blocks.iter().rev().map(Blocks::lent).collect(),
        ];
        for (i, lent) in moves.iter().enumerate() {
            let parts = |rig: &Rig| {
                let mut all = Vec::new();
                for c in rig.components() {
                    for index in 0..if c.per_ring == 1 { 4 } else { 3 } {
                        all.extend((0..LAYERS).map(|layer| (c.kind, layer, index, rig.part(c.kind, layer, index))));
                    }
                }
                all
            };
            let before = parts(&rig);
            // What was left is not read again.
            for (kind, layer, index, bytes) in &before {
                common::device::fill(common::address(&rig.component(*kind), *layer, *index), 0xFF, bytes.len());
            }
            assert_eq!(rig.rebind(lent), REPLAYSSM_OK, "{}", message());
            for l in lent {
                // SAFETY: an array of the test's with an element for each layer.
                let base = if l.layer_bases.is_null() { l.base } else { unsafe { *l.layer_bases } };
                let wanted = base.wrapping_byte_add(l.offset_bytes as usize);
                assert_eq!(rig.component(l.kind).base, wanted, "kind {}", l.kind);
            }
            for (kind, layer, index, bytes) in &before {
                common::device::poke(common::address(&rig.component(*kind), *layer, *index), bytes);
            }
            assert!(parts(&rig) == before);
            live_alike(&owned, &rig, 6 + i as u64);
        }
    }
}

/// Layers may lie within each other's strides, if no part of one is where a part of another is.
#[test]
fn layers_that_overlap_in_any_slot_are_refused() {
    let spec = spec(REPLAYSSM_FAMILY_MAMBA2, REPLAYSSM_READOUT_EXACT);
    let owned = Rig::new(spec.clone());
    let blocks = blocks_for(&owned, 1);
    let mut lent: Vec<_> = blocks.iter().map(Blocks::lent).collect();
    let rig = lent_rig(&spec, &lent);
    // What is bound is not touched before a call works on it, and none does.
    let checkpoint = owned.component(REPLAYSSM_COMPONENT_CHECKPOINT);
    let part = (checkpoint.bytes as usize).next_multiple_of(16);
    let (first, n) = (1usize << 32, spec.slots);
    let mut bind = |stride: usize, at: [usize; LAYERS]| {
        let bases = heap(at.map(|at| (first + at) as *mut c_void));
        lent[0] = desc!(replayssm_lent {
            kind: REPLAYSSM_COMPONENT_CHECKPOINT,
            layer_bases: bases.as_ptr(),
            slot_stride_bytes: stride as i64,
        });
        rig.rebind(&lent)
    };
    // By trying every pair of parts.
    let overlap = |stride: usize, at: [usize; LAYERS]| {
        let parts: Vec<usize> = at.iter().flat_map(|at| (0..n).map(move |slot| at + slot * stride)).collect();
        let near = |i: usize| parts[..i].iter().any(|other| other.abs_diff(parts[i]) < checkpoint.bytes as usize);
        (1..parts.len()).any(near)
    };
    let mut rng = Rng(11);
    let mut seen = [0; 2];
    let mut check = |stride: usize, at: [usize; LAYERS]| {
        let wrong = overlap(stride, at);
        let wanted = if wrong { REPLAYSSM_ERROR_INVALID_ARGUMENT } else { REPLAYSSM_OK };
        assert_eq!(bind(stride, at), wanted, "stride {stride}, layers at {at:?}, parts of {part}");
        seen[usize::from(wrong)] += 1;
    };
    // Slot 1 of layer 0 is slot 0 of layer 1.
    check(part, [0, part, 9 * part]);
    assert!(message().starts_with("lent[0].layer_bases is with 0x100000000 and 0x"), "{}", message());
    check(3 * part, [0, part, 2 * part]);
    check(3 * part, [2 * part, 0, 4 * part]);
    // Behind the last slot a part may lie anywhere.
    check(3 * part, [0, 7 * part + 16, 30 * part]);
    check(3 * part, [0, 6 * part + 16, 30 * part]);
    for _ in 0..500 {
        let stride = part + 16 * rng.below(3 * part / 16);
        let quarters = [part / 4, part].map(|step| step / 16 * 16)[rng.below(2)];
        check(stride, [0; LAYERS].map(|_| rng.below(40) * quarters));
    }
    assert!(seen.iter().all(|&n| n > 50), "{seen:?}");
    // Where it was, so that the rig can go.
    let bound: Vec<_> = blocks.iter().map(Blocks::lent).collect();
    assert_eq!(rig.rebind(&bound), REPLAYSSM_OK, "{}", message());
}

#[test]
fn a_wrong_lending_is_refused_by_name() {
    let spec = spec(REPLAYSSM_FAMILY_MAMBA2, REPLAYSSM_READOUT_EXACT);
    let owned = Rig::new(spec.clone());
    let blocks = blocks_for(&owned, 1);
    let lent: Vec<_> = blocks[..2].iter().map(Blocks::lent).collect();
    let rig = lent_rig(&spec, &lent);
    let said = |change: &dyn Fn(&mut Vec<replayssm_lent>)| {
        let mut wrong = lent.clone();
        change(&mut wrong);
        assert_eq!(rig.rebind(&wrong), REPLAYSSM_ERROR_INVALID_ARGUMENT);
        message()
    };
    let near = heap([blocks[0].bases[0], blocks[0].bases[0].wrapping_byte_add(16), blocks[0].bases[2]]);
    let none = heap([blocks[0].bases[0], std::ptr::null_mut(), blocks[0].bases[2]]);
    let odd = heap([blocks[0].bases[0], blocks[0].bases[1].wrapping_byte_add(8), blocks[0].bases[2]]);
    type Change<'a> = &'a dyn Fn(&mut Vec<replayssm_lent>);
    let cases: [(Change<'_>, &str); 14] = [
        (&|l| l[0].base = near[0], "lent[0].base is 0x"),
        (&|l| l[0].layer_stride_bytes = 1 << 20, "lent[0].layer_stride_bytes is 1048576; expected 0 with layer_bases"),
        (&|l| l[0].offset_bytes = -16, "lent[0].offset_bytes is -16; expected 0 or more"),
        (&|l| l[0].offset_bytes = i64::MAX - 15, "lent[0].layer_bases[0] is 0x"),
        (&|l| l[0].offset_bytes = 8, "lent[0].layer_bases[0] is 0x"),
        (&|l| l[0].layer_bases = near.as_ptr(), "lent[0].layer_bases is with 0x"),
        (&|l| l[0].layer_bases = none.as_ptr(), "lent[0].layer_bases[1] is 0x0; expected"),
        (&|l| l[0].layer_bases = odd.as_ptr(), "lent[0].layer_bases[1] is 0x"),
        (&|l| l[0].layer_bases = null(), "lent[0].base is 0x0; expected"),
        (&|l| l[1].slot_stride_bytes = 12, "lent[1].slot_stride_bytes is 12; expected a multiple of 8"),
        (&|l| l[1].kind = l[0].kind, "lent[1].kind is Checkpoint; expected each kind once"),
        (&|l| l[1].kind = REPLAYSSM_COMPONENT_CONV, "lent[1].kind is Conv; expected a component of this family"),
        (&|l| l.truncate(1), "n_lent is 1; expected all 2 components that were lent at create: Tags is missing"),
        (&|l| l.push(blocks[2].lent()), "lent[2].kind is X; expected a component that was lent at create"),
    ];
    for (change, wanted) in cases {
        let text = said(change);
        assert!(text.starts_with(wanted), "{text}\ninstead of {wanted}");
    }
    // All of that changed nothing.
    live_alike(&owned, &rig, 9);
}
