//! Blobs from anywhere. An input is a blob as it is, or changes of one that a model has saved, and their checksum is put right if the
//! input says so: it finds accidents, and whoever writes blobs can write it.
//!
//! A blob is refused with a sentence, and then nothing has changed; or the slot is what the blob says: it saves to the same blob, other
//! slots are as they were, and steps go on from it as from a second slot that was restored from its own save.

use std::cell::OnceCell;
use std::ops::Range;

use replayssm::ffi::*;

use crate::common::device::peek;
use crate::common::model::Model;
use crate::common::{FAMILIES, Rng, Spec, address, components, message};
use crate::source::{Source, refused};

/// Slots of every model, all of which have rings of the same numbers. What is restored goes to [`TARGET`] first.
const SLOTS: usize = 5;
const TARGET: usize = 2;
const TWIN: usize = 4;
/// A slot without a ring, as a store leaves it.
const STORED: usize = 3;

/// Where positions end; commits do nothing beyond.
const LAST: i64 = 1 << 60;

struct Case {
    model: Model,
    /// A LIVE, a PORTABLE and a STORED blob of the model, and one with an empty history.
    blobs: [Vec<u8>; 4],
    /// What [`TARGET`] is before every input.
    before: Vec<u8>,
    /// Of all pools, with the number of layers.
    components: Vec<(replayssm_component, usize)>,
}

impl Case {
    fn new(spec: &Spec) -> Self {
        let model = Model::new(spec);
        for slot in 0..STORED {
            model.run(slot, slot, &model.steps(&mut Rng(slot as u64), 5 + slot));
        }
        let rig = &model.rigs[0];
        rig.copy(REPLAYSSM_COPY_STORE, (1, 1), (STORED, STORED), None);
        let save = |kind, slot| rig.save(kind, slot, slot);
        let empty = {
            rig.reset(TWIN, TWIN, 0);
            save(REPLAYSSM_SAVE_LIVE, TWIN)
        };
        let blobs = [
            save(REPLAYSSM_SAVE_LIVE, 1),
            save(REPLAYSSM_SAVE_PORTABLE, 1),
            save(REPLAYSSM_SAVE_STORED, STORED),
            empty,
        ];
        let before = save(REPLAYSSM_SAVE_LIVE, TARGET);
        let pools = model.rigs.iter().map(|rig| (rig.pool, rig.spec.layers)).chain([(model.conv, 2)]);
        let components =
            pools.flat_map(|(pool, layers)| components(pool).into_iter().map(move |c| (c, layers))).collect();
        Case { model, blobs, before, components }
    }

    /// Everything of some slots and rings: memory and cursors.
    fn memory(&self, slots: Range<usize>) -> Vec<u8> {
        let mut all = Vec::new();
        for (c, layers) in &self.components {
            for (layer, slot) in (0..*layers).flat_map(|layer| slots.clone().map(move |slot| (layer, slot))) {
                all.extend_from_slice(&peek(address(c, layer, slot), c.bytes as usize));
            }
        }
        for ring in slots {
            let c = self.model.rigs[0].cursor(ring);
            let words = [
                c.position as u64,
                c.flush_before as u64,
                c.seed,
                u64::from(c.generation) << 32 | u64::from(c.committed),
            ];
            words.iter().for_each(|word| all.extend_from_slice(&word.to_le_bytes()));
        }
        all
    }

    fn restore(&self, slot: usize, blob: &[u8]) -> i32 {
        self.model.rigs[0].restore(slot, slot, blob)
    }

    fn check(&self, blob: &[u8], seed: u64) {
        assert_eq!(self.restore(TARGET, &self.before), REPLAYSSM_OK, "{}", message());
        let (target, others) = (self.memory(TARGET..TARGET + 1), self.memory(0..TARGET));
        let status = self.restore(TARGET, blob);
        assert!(self.memory(0..TARGET) == others, "a restore changed another slot");
        if status != REPLAYSSM_OK {
            refused(status);
            assert_eq!(status, REPLAYSSM_ERROR_BAD_BLOB, "{}", message());
            assert!(self.memory(TARGET..TARGET + 1) == target, "a blob was refused, and the slot changed");
            return;
        }
        let kind = i32::from(blob[12]);
        let rig = &self.model.rigs[0];
        let saved = rig.save(kind, TARGET, TARGET);
        assert_eq!(saved.len(), blob.len());
        if kind == REPLAYSSM_SAVE_STORED {
            assert!(saved == blob, "a stored slot is not what its blob says");
            let position = i64::from_le_bytes(blob[24..32].try_into().expect("8 bytes"));
            // A fork rounds by the same seed; what is loaded, by that of its own ring.
            rig.copy(REPLAYSSM_COPY_LOAD, (TARGET, TARGET), (0, 0), Some(position));
            rig.copy(REPLAYSSM_COPY_FORK, (0, 0), (1, 1), None);
            self.go_on([0, 1], position, seed);
            for slot in [0, 1] {
                assert_eq!(self.restore(slot, &self.blobs[0]), REPLAYSSM_OK, "{}", message());
            }
            return;
        }
        let cursor = rig.cursor(TARGET);
        assert_eq!(saved[24..48], blob[24..48], "position, first fold or seed");
        // Records that no history needs, and NaNs of a portable one, are not taken over: a blob of its save is the same.
        assert_eq!(self.restore(TWIN, &saved), REPLAYSSM_OK, "{}", message());
        let again = rig.save(kind, TWIN, TWIN);
        let body = |blob: &[u8]| [&blob[..48], &blob[52..blob.len() - 4]].concat();
        assert!(body(&again) == body(&saved), "a blob of a restored slot is another");
        self.go_on([TARGET, TWIN], cursor.position, seed);
    }

    /// Steps from both slots: the same outputs, and no fault but that positions end.
    fn go_on(&self, slots: [usize; 2], position: i64, seed: u64) {
        let rig = &self.model.rigs[0];
        rig.faults(true);
        let steps = self.model.steps(&mut Rng(seed), 3);
        let outputs = slots.map(|slot| self.model.run(slot, slot, &steps));
        assert!(outputs[0] == outputs[1], "equal slots go on differently");
        let allowed = if position > LAST - 100 { REPLAYSSM_FAULT_POSITION } else { 0 };
        assert_eq!(rig.faults(true).bits & !allowed, 0, "a blob that was accepted has no state to go on from");
        let [a, b] = slots.map(|slot| self.model.states(slot, slot));
        assert!(a == b, "equal slots have other states");
    }
}

fn cases() -> Vec<Case> {
    let small = |family| Spec {
        family,
        heads: 2,
        headdim: 3,
        dstate: 5,
        groups: 1,
        window: 5,
        t_max: 2,
        slots: SLOTS,
        layers: 2,
        ..Spec::default()
    };
    let mut cases: Vec<Case> = FAMILIES.iter().map(|&family| Case::new(&small(family))).collect();
    cases.push(Case::new(&Spec {
        format: REPLAYSSM_FORMAT_F32,
        keep: 3,
        window: 4,
        headdim: 17,
        ..small(REPLAYSSM_FAMILY_MAMBA2)
    }));
    let bf16 = Spec { format: REPLAYSSM_FORMAT_BF16, stochastic: true, checks: true, ..small(REPLAYSSM_FAMILY_GDN) };
    cases.push(Case::new(&Spec { schedule: REPLAYSSM_SCHEDULE_BY_POSITION, readout: REPLAYSSM_READOUT_HIGH, ..bf16 }));
    let f16 = Spec { format: REPLAYSSM_FORMAT_F16, io: REPLAYSSM_DTYPE_F16, ..small(REPLAYSSM_FAMILY_KDA) };
    cases.push(Case::new(&Spec { schedule: REPLAYSSM_SCHEDULE_NONE, readout: REPLAYSSM_READOUT_FULL, ..f16 }));
    cases
}

fn seal(blob: &mut [u8]) {
    if let Some((all, checksum)) = blob.split_last_chunk_mut::<4>() {
        *checksum = crc32fast::hash(all).to_le_bytes();
    }
}

/// Writes numbers that matter somewhere, or bytes, at a place of the head, of an entry or anywhere; or makes the blob longer or shorter.
fn change(input: &mut Source, blob: &mut Vec<u8>, other: &[u8]) {
    let at = match input.below(4) {
        0 => input.below(32) * 4,
        1 => blob.len().saturating_sub(4 + input.below(256) * 4),
        _ => usize::from(input.u16()) % blob.len().max(1),
    };
    let bytes: Vec<u8> = match input.below(6) {
        0 => vec![input.byte()],
        1 => input.u64().to_le_bytes()[..4].into(),
        2 => i64::from(input.byte() as i8).to_le_bytes().into(),
        3 => (LAST + 20 - i64::from(input.u16() % 300)).to_le_bytes().into(),
        4 => {
            let from = usize::from(input.u16()) % other.len();
            other[from..(from + input.below(256)).min(other.len())].into()
        }
        _ => {
            let bytes = usize::from(input.u16()) % (blob.len() + 64);
            blob.resize(bytes, 0);
            return;
        }
    };
    for (to, from) in blob.iter_mut().skip(at).zip(bytes) {
        *to = from;
    }
}

/// The length that a head says is that of the blob.
fn say_length(blob: &mut [u8]) {
    let bytes = blob.len() as u64;
    if let Some(to) = blob.get_mut(16..24) {
        to.copy_from_slice(&bytes.to_le_bytes());
    }
}

fn blob_of(input: &mut Source, case: &Case, kind: usize) -> Vec<u8> {
    let right = input.byte();
    let mut blob = if right & 3 == 3 {
        // All there is, behind the magic and the version.
        [&case.blobs[0][..12], input.rest()].concat()
    } else {
        let mut blob = case.blobs[kind].clone();
        for _ in 0..input.below(7) {
            let other = input.below(case.blobs.len());
            change(input, &mut blob, &case.blobs[other]);
        }
        blob
    };
    if right & 0x1C != 0x1C {
        say_length(&mut blob);
    }
    if right & 0xE0 != 0xE0 {
        seal(&mut blob);
    }
    blob
}

/// One input.
pub fn run(data: &[u8]) {
    thread_local!(static CASES: OnceCell<Vec<Case>> = const { OnceCell::new() });
    CASES.with(|cases| {
        let cases = cases.get_or_init(self::cases);
        let mut input = Source::new(data);
        let case = &cases[input.below(cases.len())];
        let kind = input.below(case.blobs.len());
        let seed = input.byte();
        case.check(&blob_of(&mut input, case, kind), seed.into());
    });
}
