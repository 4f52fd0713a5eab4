//! Slots saved to blobs and restored: in other slots, on other handles, in other processes.

#![allow(clippy::multiple_unsafe_ops_per_block, reason = "a test's calls share one promise")]

mod common;

use std::process::Command;

use common::model::{Model, Tokens};
use common::{FAMILIES, Outputs, Rig, Rng, Spec, hash, message, no_faults};
use replayssm::ffi::*;

#[global_allocator]
static HEAP: common::device::Heap = common::device::Heap::ON_CUDA;

/// What a head of a blob says of its ring's generation.
fn without_generation(mut blob: Vec<u8>) -> Vec<u8> {
    blob[48..52].fill(0);
    let end = blob.len() - 4;
    blob[end..].fill(0);
    blob
}

/// Whatever a slot and ring were used for before, and whatever step is not committed, equal requests have equal blobs.
#[test]
fn blobs_of_equal_requests_are_equal() {
    for family in FAMILIES {
        let spec = Spec {
            family,
            layers: 2,
            window: 12,
            t_max: 3,
            keep: 1,
            slots: 3,
            schedule: REPLAYSSM_SCHEDULE_NONE,
            readout: REPLAYSSM_READOUT_FULL,
            ..Spec::default()
        };
        let (fresh, used) = (Model::new(&spec), Model::new(&spec));
        let mut rng = Rng(31);
        used.run(1, 1, &used.steps(&mut rng, 30));
        used.rigs[0].reset(1, 1, 0);
        for round in 0..4 {
            let next = fresh.steps(&mut rng, 2);
            fresh.run(1, 1, &next);
            used.run(1, 1, &next);
            for kind in [REPLAYSSM_SAVE_LIVE, REPLAYSSM_SAVE_PORTABLE] {
                let blobs = [&fresh, &used].map(|model| without_generation(model.rigs[0].save(kind, 1, 1)));
                assert!(blobs[0] == blobs[1], "{spec:?}, round {round}, kind {kind}");
            }
        }
    }
}

fn specs() -> Vec<Spec> {
    let mut specs = Vec::new();
    for family in FAMILIES {
        for (format, readout) in [
            (REPLAYSSM_FORMAT_SPLIT32, REPLAYSSM_READOUT_HIGH),
            (REPLAYSSM_FORMAT_SPLIT32, REPLAYSSM_READOUT_EXACT),
            (REPLAYSSM_FORMAT_F32, REPLAYSSM_READOUT_FULL),
            (REPLAYSSM_FORMAT_F32, REPLAYSSM_READOUT_EXACT),
            (REPLAYSSM_FORMAT_BF16, REPLAYSSM_READOUT_HIGH),
            (REPLAYSSM_FORMAT_F16, REPLAYSSM_READOUT_EXACT),
        ] {
            let stochastic = matches!(format, REPLAYSSM_FORMAT_BF16 | REPLAYSSM_FORMAT_F16);
            specs.push(Spec {
                family,
                format,
                readout,
                stochastic,
                layers: 2,
                window: 7,
                t_max: 3,
                keep: 2,
                slots: 4,
                rings: 3,
                ..Spec::default()
            });
        }
    }
    specs
}

/// Steps after which rings are empty, hold one step, are in the middle of a window, full and about to flush, and wrapped.
const MOMENTS: [usize; 7] = [0, 1, 3, 5, 6, 9, 23];

#[test]
fn a_live_blob_goes_on_bit_for_bit() {
    for spec in specs() {
        let (from, to) = (Model::new(&spec), Model::new(&spec));
        for moment in MOMENTS {
            let mut rng = Rng(moment as u64 + 100);
            from.rigs[0].reset(1, 2, 0);
            from.run(1, 2, &from.steps(&mut rng, moment));
            let blob = from.rigs[0].save(REPLAYSSM_SAVE_LIVE, 1, 2);
            let generation = to.rigs[0].cursor(0).generation;
            assert_eq!(to.rigs[0].restore(3, 0, &blob), REPLAYSSM_OK, "{}", message());
            assert_eq!(to.rigs[0].cursor(0).generation, generation + 1);
            assert!(without_generation(to.rigs[0].save(REPLAYSSM_SAVE_LIVE, 3, 0)) == without_generation(blob.clone()));
            // A step that is not committed, of other tokens, is not in a blob; folds that were due may have happened.
            let lost = from.tokens(&mut rng, 3);
            from.step(1, 2, &lost, false);
            to.step(3, 0, &lost, false);
            let between = from.rigs[0].save(REPLAYSSM_SAVE_LIVE, 1, 2);
            assert_eq!(to.rigs[0].restore(2, 1, &between), REPLAYSSM_OK, "{}", message());
            let next = from.steps(&mut rng, 12);
            let wanted = from.run(1, 2, &next);
            assert!(to.run(3, 0, &next) == wanted, "{spec:?}, after {moment} steps");
            assert!(to.run(2, 1, &next) == wanted, "{spec:?}, after {moment} steps and one without its commit");
            assert!(to.states(3, 0) == from.states(1, 2));
            let end = from.rigs[0].save(REPLAYSSM_SAVE_LIVE, 1, 2);
            assert!(without_generation(to.rigs[0].save(REPLAYSSM_SAVE_LIVE, 3, 0)) == without_generation(end));
        }
        no_faults(&from.rigs[0]);
        no_faults(&to.rigs[0]);
    }
}

/// All of a model's outputs, those of its first pool's later layers last: as a split model has them.
fn as_split(spec: &Spec, outputs: Vec<Vec<Outputs>>) -> Vec<Vec<Outputs>> {
    let mut outputs = outputs;
    for layers in &mut outputs {
        let rest: Vec<_> = layers.drain(1..spec.layers).collect();
        layers.splice(2..2, rest);
    }
    outputs
}

#[test]
fn a_portable_blob_goes_on_exactly_under_any_window_format_and_split() {
    for family in FAMILIES {
        for (formats, schedule) in [
            ([REPLAYSSM_FORMAT_SPLIT32, REPLAYSSM_FORMAT_F32], REPLAYSSM_SCHEDULE_BY_POSITION),
            ([REPLAYSSM_FORMAT_F32, REPLAYSSM_FORMAT_SPLIT32], REPLAYSSM_SCHEDULE_NONE),
        ] {
            let spec = Spec {
                family,
                format: formats[0],
                layers: 3,
                window: 7,
                t_max: 3,
                keep: 2,
                slots: 4,
                rings: 3,
                ..Spec::default()
            };
            let other = Spec { format: formats[1], window: 20, t_max: 5, keep: 0, schedule, slots: 3, ..spec.clone() };
            let (from, to, split) = (Model::new(&spec), Model::new(&other), Model::split(&other));
            for moment in MOMENTS {
                let mut rng = Rng(moment as u64 + 7);
                from.rigs[0].reset(1, 2, 5);
                from.run(1, 2, &from.steps(&mut rng, moment));
                from.step(1, 2, &from.tokens(&mut rng, 2), false);
                let blob = from.rigs[0].save(REPLAYSSM_SAVE_PORTABLE, 1, 2);
                for model in [&to, &split] {
                    assert_eq!(model.rigs[0].restore(2, 0, &blob), REPLAYSSM_OK, "{}", message());
                    assert_eq!(model.rigs[0].cursor(0).position, from.rigs[0].cursor(2).position);
                    let again = model.rigs[0].save(REPLAYSSM_SAVE_PORTABLE, 2, 0);
                    assert!(without_generation(again) == without_generation(blob.clone()), "{spec:?}, {moment}");
                }
                assert!(to.states(2, 0) == from.states(1, 2));
                let next = from.steps(&mut rng, 12);
                let wanted = from.run(1, 2, &next);
                assert!(to.run(2, 0, &next) == wanted, "{spec:?}, after {moment} steps");
                let parts: Vec<_> = next.iter().map(|(t, accepted)| (Model::split_tokens(t), *accepted)).collect();
                assert!(split.run(2, 0, &parts) == as_split(&spec, wanted), "{spec:?}, after {moment} steps, split");
                assert!(to.states(2, 0) == from.states(1, 2));
            }
            [from, to, split].iter().for_each(|model| no_faults(&model.rigs[0]));
        }
    }
}

#[test]
fn a_portable_blob_of_a_sixteen_bit_state_rounds_once_when_it_is_restored() {
    let spec = Spec { format: REPLAYSSM_FORMAT_BF16, window: 7, t_max: 3, slots: 3, layers: 2, ..Spec::default() };
    let (from, exact) = (Model::new(&spec), Model::new(&Spec { format: REPLAYSSM_FORMAT_F32, ..spec.clone() }));
    from.run(1, 1, &from.steps(&mut Rng(4), 9));
    let blob = from.rigs[0].save(REPLAYSSM_SAVE_PORTABLE, 1, 1);
    assert_eq!(exact.rigs[0].restore(2, 2, &blob), REPLAYSSM_OK, "{}", message());
    assert!(exact.states(2, 2) == from.states(1, 1), "the fp32 state is the one with history taken in");
    assert_eq!(from.rigs[0].restore(2, 2, &blob), REPLAYSSM_OK, "{}", message());
    let rounded = |x: &u32| half::bf16::from_f32(f32::from_bits(*x)).to_f32().to_bits();
    let wanted: Vec<Vec<u32>> = from.states(1, 1).iter().map(|state| state.iter().map(rounded).collect()).collect();
    assert!(from.states(2, 2) == wanted);
}

/// A small model with something in every slot, and a blob of each kind.
fn small() -> (Model, [Vec<u8>; 2]) {
    let spec = Spec {
        heads: 2,
        headdim: 3,
        dstate: 5,
        groups: 1,
        window: 3,
        t_max: 2,
        slots: 3,
        layers: 2,
        ..Spec::default()
    };
    let model = Model::new(&spec);
    for slot in 0..3 {
        model.run(slot, slot, &model.steps(&mut Rng(slot as u64), 5 + slot));
    }
    let blobs = [REPLAYSSM_SAVE_LIVE, REPLAYSSM_SAVE_PORTABLE].map(|kind| model.rigs[0].save(kind, 1, 1));
    (model, blobs)
}

fn seal(blob: &mut [u8]) {
    let at = blob.len() - 4;
    let checksum = crc32fast::hash(&blob[..at]);
    blob[at..].copy_from_slice(&checksum.to_le_bytes());
}

#[test]
fn cases_14_and_36_no_flipped_cut_or_foreign_blob_changes_a_slot() {
    let (model, blobs) = small();
    let rig = &model.rigs[0];
    let before = rig.save(REPLAYSSM_SAVE_LIVE, 2, 2);
    for blob in &blobs {
        for at in 0..blob.len() {
            let mut changed = blob.clone();
            changed[at] ^= 1 << (at % 8);
            assert_eq!(rig.restore(2, 2, &changed), REPLAYSSM_ERROR_BAD_BLOB, "byte {at}");
        }
        for length in 1..blob.len() {
            assert_eq!(rig.restore(2, 2, &blob[..length]), REPLAYSSM_ERROR_BAD_BLOB, "{length} bytes");
        }
        let mut longer = blob.clone();
        longer.push(0);
        assert_eq!(rig.restore(2, 2, &longer), REPLAYSSM_ERROR_BAD_BLOB);
        assert!(message().starts_with("bytes is "), "{}", message());
    }
    // Right checksums around what no blob has.
    let change = |at: usize, bytes: &[u8]| {
        let mut blob = blobs[0].clone();
        blob[at..at + bytes.len()].copy_from_slice(bytes);
        seal(&mut blob);
        assert_eq!(rig.restore(2, 2, &blob), REPLAYSSM_ERROR_BAD_BLOB);
        message()
    };
    assert!(change(24, &0i64.to_le_bytes()).contains("a tag in the blob's pool"), "{}", message());
    assert!(change(24, &(1i64 << 50).to_le_bytes()).contains("a tag in the blob's pool"), "{}", message());
    assert!(change(52, &[9]).starts_with("the blob's window is 9; expected 3"), "{}", message());
    assert!(change(68, &[2]).starts_with("the blob's number of pools is 2; expected 3"), "{}", message());
    assert!(rig.save(REPLAYSSM_SAVE_LIVE, 2, 2) == before, "the slot was touched");
    // The whole of every family is in a blob, and every layer.
    assert!(blobs[0].len() > blobs[1].len() && blobs[1].len() > 84 + 4 * (2 * 2 * 3 * 5 + 2 * 16 * 5));
}

#[test]
fn a_blob_for_another_configuration_is_refused_by_name() {
    let (model, [live, portable]) = small();
    let spec = model.rigs[0].spec.clone();
    for (other, name) in [
        (Spec { window: 4, ..spec.clone() }, "the blob's window is 3; expected 4"),
        (Spec { t_max: 3, ..spec.clone() }, "the blob's max_step_tokens is 2; expected 3"),
        (Spec { keep: 1, ..spec.clone() }, "the blob's min_rewind is 0; expected 1"),
        (Spec { schedule: REPLAYSSM_SCHEDULE_NONE, ..spec.clone() }, "the blob's schedule is 0; expected 2"),
        (Spec { layers: 3, ..spec.clone() }, "n_layers of the blob's pool 0 is 2; expected 3"),
        (Spec { io: REPLAYSSM_DTYPE_F32, ..spec.clone() }, "io of the blob's pool 0 is 2; expected 1"),
        (Spec { format: REPLAYSSM_FORMAT_F32, ..spec.clone() }, "format of the blob's pool 0 is 1; expected 2"),
        (Spec { readout: REPLAYSSM_READOUT_FULL, ..spec.clone() }, "readout of the blob's pool 0 is 3; expected 2"),
        (Spec { family: REPLAYSSM_FAMILY_KDA, ..spec.clone() }, "family of the blob's pool 0 is 1; expected 3"),
        (Spec { dstate: 6, ..spec.clone() }, "dstate of the blob's pool 0 is 5; expected 6"),
        (Spec { groups: 2, ..spec.clone() }, "ngroups of the blob's pool 0 is 1; expected 2"),
    ] {
        let to = Model::new(&other);
        assert_eq!(to.rigs[0].restore(0, 0, &live), REPLAYSSM_ERROR_BAD_BLOB);
        assert!(message().starts_with(name), "{}", message());
        assert_eq!(to.rigs[0].cursor(0).position, 0);
    }
    for (other, name) in [
        (Spec { layers: 3, ..spec.clone() }, "n_layers of the blob's shape 0 is 2; expected 3"),
        (Spec { dstate: 6, ..spec.clone() }, "columns of the blob's shape 0 is 5; expected 6"),
        (Spec { io: REPLAYSSM_DTYPE_F32, ..spec.clone() }, "io of the blob's shape 2 is 2; expected 1"),
        (Spec { family: REPLAYSSM_FAMILY_GDN, ..spec }, "family of the blob's shape 0 is 1; expected 2"),
    ] {
        let to = Model::new(&other);
        assert_eq!(to.rigs[0].restore(0, 0, &portable), REPLAYSSM_ERROR_BAD_BLOB);
        assert!(message().starts_with(name), "{}", message());
    }
    let lone = Rig::new(Spec { seed: 3, ..model.rigs[0].spec.clone() });
    assert_eq!(lone.restore(0, 0, &live), REPLAYSSM_ERROR_BAD_BLOB);
    assert!(message().starts_with("the blob's number of pools is 3; expected 1"), "{}", message());
    assert_eq!(lone.restore(0, 0, &portable), REPLAYSSM_ERROR_BAD_BLOB);
    assert!(message().starts_with("the blob's number of shapes of layers is 3; expected 1"), "{}", message());
}

#[test]
fn a_slot_within_an_extend_is_not_saved_and_can_be_restored_over() {
    let (model, [live, portable]) = small();
    let rig = &model.rigs[0];
    let tokens = model.tokens(&mut Rng(8), 3);
    model.step(2, 2, &tokens, true);
    for kind in [REPLAYSSM_SAVE_LIVE, REPLAYSSM_SAVE_PORTABLE] {
        let mut blob = vec![0; live.len()];
        assert_eq!(rig.try_save(kind, 2, 2, &mut blob), REPLAYSSM_ERROR_OUT_OF_RANGE);
        assert!(message().contains("an extend that is not committed"), "{}", message());
    }
    for blob in [live, portable] {
        assert_eq!(rig.restore(2, 2, &blob), REPLAYSSM_OK, "{}", message());
        assert!(model.states(2, 2) == model.states(1, 1));
    }
    no_faults(rig);
}

#[test]
fn calls_on_what_cannot_be_saved_are_refused() {
    let (model, [live, _]) = small();
    let rig = &model.rigs[0];
    let mut blob = vec![0; live.len() - 1];
    assert_eq!(rig.try_save(REPLAYSSM_SAVE_LIVE, 1, 1, &mut blob), REPLAYSSM_ERROR_BUFFER_TOO_SMALL);
    assert!(message().ends_with(&format!("at least {} is needed", live.len())), "{}", message());
    let mut blob = live.clone();
    for (slot, ring) in [(3, 1), (1, 3), (usize::MAX, 1), (1, usize::MAX)] {
        assert_eq!(rig.try_save(REPLAYSSM_SAVE_LIVE, slot, ring, &mut blob), REPLAYSSM_ERROR_INVALID_ARGUMENT);
        assert_eq!(rig.restore(slot, ring, &live), REPLAYSSM_ERROR_INVALID_ARGUMENT);
        assert!(message().ends_with("expected 0 to 2"), "{}", message());
    }
    assert_eq!(rig.try_save(7, 1, 1, &mut blob), REPLAYSSM_ERROR_UNSUPPORTED);
}

/// What the child of the next test is told by: files of the two blobs.
const CHILD: &str = "REPLAYSSM_TEST_SAVED";

#[test]
fn a_blob_goes_on_in_another_process() {
    let run = |model: &Model| {
        let steps: Vec<(Tokens, i32)> = model.steps(&mut Rng(77), 10);
        let outputs = model.run(1, 1, &steps);
        hash(outputs.into_iter().flatten().flatten().flatten().flatten())
    };
    if let Some(folder) = std::env::var_os(CHILD) {
        let model = small().0;
        for name in ["live", "portable"] {
            let blob = std::fs::read(std::path::Path::new(&folder).join(name)).expect("the parent's blob");
            // Into a ring that is used already.
            assert_eq!(model.rigs[0].restore(1, 1, &blob), REPLAYSSM_OK, "{}", message());
            println!("child: {name} {:016x}", run(&model));
        }
        return;
    }
    let (model, [live, portable]) = small();
    // Further on than the child's own.
    model.run(1, 1, &model.steps(&mut Rng(78), 3));
    let folder = std::env::temp_dir().join(format!("replayssm-saved-{}", std::process::id()));
    std::fs::create_dir_all(&folder).expect("a folder for blobs");
    for (kind, name) in [(REPLAYSSM_SAVE_LIVE, "live"), (REPLAYSSM_SAVE_PORTABLE, "portable")] {
        std::fs::write(folder.join(name), model.rigs[0].save(kind, 1, 1)).expect("a blob written");
    }
    assert!(model.rigs[0].save(REPLAYSSM_SAVE_LIVE, 1, 1).len() == live.len() && !portable.is_empty());
    let wanted = run(&model);
    let child = Command::new(std::env::current_exe().expect("this program"))
        .args(["--exact", "a_blob_goes_on_in_another_process", "--nocapture"])
        .env(CHILD, &folder)
        .output()
        .expect("a child process");
    std::fs::remove_dir_all(&folder).expect("the folder removed");
    let said = String::from_utf8_lossy(&child.stdout).into_owned() + &String::from_utf8_lossy(&child.stderr);
    for name in ["live", "portable"] {
        assert!(said.contains(&format!("child: {name} {wanted:016x}")), "{name}, {wanted:016x}: {said}");
    }
}

/// A cached prefix leaves the device and comes back, in another slot and on a handle of another window, and a request goes on from it.
#[test]
fn a_stored_slot_comes_back_and_is_loaded() {
    for family in FAMILIES {
        for format in [REPLAYSSM_FORMAT_SPLIT32, REPLAYSSM_FORMAT_BF16] {
            let spec =
                Spec { family, format, layers: 2, window: 7, t_max: 3, keep: 2, slots: 4, rings: 2, ..Spec::default() };
            let other = Spec { window: 20, t_max: 5, keep: 0, rings: 3, ..spec.clone() };
            let (from, to) = (Model::new(&spec), Model::new(&other));
            let mut rng = Rng(3);
            from.run(0, 0, &from.steps(&mut rng, 9));
            let position = from.rigs[0].cursor(0).position;
            let mut blob = vec![0; 1 << 20];
            // A reset slot has no stored window.
            from.rigs[0].reset(2, 1, 0);
            assert_eq!(from.rigs[0].try_save(REPLAYSSM_SAVE_STORED, 2, 0, &mut blob), REPLAYSSM_ERROR_OUT_OF_RANGE);
            from.rigs[0].copy(REPLAYSSM_COPY_STORE, (0, 0), (2, 0), None);
            let blob = from.rigs[0].save(REPLAYSSM_SAVE_STORED, 2, 0);
            assert!(blob.len() < from.rigs[0].save(REPLAYSSM_SAVE_LIVE, 0, 0).len());
            let mut changed = blob.clone();
            // Of the position: tags stand elsewhere.
            changed[24] ^= 1;
            seal(&mut changed);
            assert_eq!(to.rigs[0].restore(3, 0, &changed), REPLAYSSM_ERROR_BAD_BLOB);
            assert!(message().contains("a tag in the blob's pool 0"), "{}", message());
            assert_eq!(to.rigs[0].restore(3, 0, &blob), REPLAYSSM_OK, "{}", message());
            assert!(to.rigs[0].save(REPLAYSSM_SAVE_STORED, 3, 0) == blob);
            to.rigs[0].copy(REPLAYSSM_COPY_LOAD, (3, 0), (1, 2), Some(position));
            // The original goes on from the same: its history is folded at the same position, so that a 16-bit state is rounded alike.
            from.rigs[0].copy(REPLAYSSM_COPY_LOAD, (2, 0), (1, 1), Some(position));
            assert!(to.states(1, 2) == from.states(1, 1));
            let next = from.steps(&mut rng, 6);
            let wanted = from.run(1, 1, &next[..1]);
            assert!(to.run(1, 2, &next[..1]) == wanted);
            no_faults(&from.rigs[0]);
            no_faults(&to.rigs[0]);
        }
    }
}

/// A position that states hold and windows do not: what a store leaves is no checkpoint, and is found out.
#[test]
fn a_slot_that_was_stored_in_part_is_refused() {
    let spec = Spec { layers: 2, window: 40, t_max: 3, schedule: REPLAYSSM_SCHEDULE_NONE, ..Spec::default() };
    let model = Model::new(&spec);
    let rig = &model.rigs[0];
    model.run(0, 0, &model.steps(&mut Rng(4), 12));
    let position = rig.cursor(0).position;
    assert!((8..40).contains(&position));
    let before = model.states(0, 0);
    rig.copy(REPLAYSSM_COPY_STORE, (0, 0), (2, 0), Some(1));
    let report = rig.faults(true);
    assert_eq!((report.bits, report.first_pool), (REPLAYSSM_FAULT_POSITION, 2));
    assert!(rig.tags(0, 2).iter().all(|&tag| tag == 1), "states are stored all the same");
    let mut blob = vec![0; 1 << 20];
    assert_eq!(rig.try_save(REPLAYSSM_SAVE_STORED, 2, 0, &mut blob), REPLAYSSM_ERROR_OUT_OF_RANGE);
    rig.copy(REPLAYSSM_COPY_LOAD, (2, 0), (1, 1), Some(1));
    assert_eq!(rig.faults(true).bits, REPLAYSSM_FAULT_POSITION);
    // Another store makes it whole.
    rig.copy(REPLAYSSM_COPY_STORE, (0, 0), (2, 0), None);
    rig.save(REPLAYSSM_SAVE_STORED, 2, 0);
    rig.copy(REPLAYSSM_COPY_LOAD, (2, 0), (1, 1), Some(position));
    assert!(model.states(1, 1) == before && model.states(0, 0) == before);
    no_faults(rig);
}

/// Pools whose slots have ids of their own: a blob does not know them.
#[test]
fn pools_with_slot_ids_of_their_own_are_saved_alike() {
    let spec = Spec { layers: 2, window: 7, t_max: 3, slots: 4, ..Spec::default() };
    let model = Model::new(&spec);
    model.run(1, 1, &model.steps(&mut Rng(9), 9));
    let rig = &model.rigs[0];
    let pools = [model.rigs[0].pool, model.rigs[1].pool, model.conv].map(<*mut replayssm_layers>::cast_const);
    let call = |ids: [i64; 3], ring: i64, blob: &mut Vec<u8>, back: bool, n_pools: i32| {
        let slot_ids = ids.each_ref().map(|id| common::ids64(std::slice::from_ref(id)));
        let ring = [ring];
        let list = desc!(replayssm_list {
            n: 1,
            place: REPLAYSSM_WHERE_HOST,
            rings: common::ids64(&ring),
            n_pools: n_pools,
            pools: pools.as_ptr(),
            pool_slots: slot_ids.as_ptr(),
        });
        let (at, bytes) = (blob.as_mut_ptr(), blob.len() as u64);
        // SAFETY: everything lives until the call returns.
        unsafe {
            if back {
                replayssm_restore(rig.slots, &list, at.cast(), bytes, std::ptr::null(), std::ptr::null())
            } else {
                let kind = REPLAYSSM_SAVE_LIVE;
                replayssm_save(rig.slots, &list, kind, at.cast(), bytes, std::ptr::null())
            }
        }
    };
    for kind in [REPLAYSSM_SAVE_LIVE, REPLAYSSM_SAVE_PORTABLE] {
        let mut blob = rig.save(kind, 1, 1);
        assert_eq!(call([3, 0, 2], 2, &mut blob, true, 3), REPLAYSSM_OK, "{}", message());
        assert!(rig.export(1, 3, 2, None) == rig.export(1, 1, 1, None));
        assert!(model.rigs[1].export(0, 0, 2, None) == model.rigs[1].export(0, 1, 1, None));
    }
    let mut blob = rig.save(REPLAYSSM_SAVE_LIVE, 1, 1);
    let wanted = without_generation(blob.clone());
    assert_eq!(call([3, 0, 2], 3, &mut blob, true, 3), REPLAYSSM_OK, "{}", message());
    assert_eq!(call([3, 0, 2], 3, &mut blob, false, 3), REPLAYSSM_OK, "{}", message());
    assert!(without_generation(blob.clone()) == wanted);
    assert_eq!(call([3, 0, 2], 3, &mut blob, false, 2), REPLAYSSM_ERROR_INVALID_ARGUMENT);
    assert!(message().starts_with("list.pools is without pool 2"), "{}", message());
    assert_eq!(call([3, 4, 2], 3, &mut blob, false, 3), REPLAYSSM_ERROR_INVALID_ARGUMENT);
    assert!(message().starts_with("list.pool_slots of pool 1, [0] is 4; expected 0 to 3"), "{}", message());
    no_faults(rig);
}
