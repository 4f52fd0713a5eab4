//! What `replayssm_explain` predicts is what the library then counts, to the byte: over whole flush cycles, for every family, format and
//! readout. An average is printed as a whole number, so a printed one may be half a byte off.

#![allow(clippy::multiple_unsafe_ops_per_block, reason = "a test's calls share one promise")]

mod common;

use std::ffi::CStr;
use std::ptr::{null, null_mut};

use common::{FAMILIES, Rig, Rng, Row, Spec, ids64, ok, tensor};
use replayssm::ffi::*;

#[global_allocator]
static HEAP: common::device::Heap = common::device::Heap::ON_CUDA;

fn explain(pool: *const replayssm_layers, rows: usize, tokens: usize) -> String {
    let mut text = [0 as std::ffi::c_char; 4096];
    // SAFETY: the buffer has as many bytes as it says.
    ok(unsafe { replayssm_explain(pool, rows as i32, tokens as i32, text.as_mut_ptr(), text.len()) });
    // SAFETY: the call put a final zero.
    unsafe { CStr::from_ptr(text.as_ptr()) }.to_str().expect("ASCII").to_owned()
}

/// The numbers of the line that starts so.
fn numbers(text: &str, start: &str) -> Vec<u64> {
    let line = text.lines().find(|line| line.starts_with(start)).unwrap_or_else(|| panic!("no {start} in\n{text}"));
    line.split(|c: char| !c.is_ascii_digit()).filter_map(|word| word.parse().ok()).collect()
}

/// Bytes moved: checkpoint read and written, ring read and written.
fn moved(after: &replayssm_stats, before: &replayssm_stats) -> [u64; 4] {
    [
        after.checkpoint_bytes_read - before.checkpoint_bytes_read,
        after.checkpoint_bytes_written - before.checkpoint_bytes_written,
        after.ring_bytes_read - before.ring_bytes_read,
        after.ring_bytes_written - before.ring_bytes_written,
    ]
}

/// Each printed average is the rounded one of what was counted in `per` rows and steps.
fn compare(printed: &[u64], counted: [u64; 4], per: u64, what: &str) {
    let average = |bytes: u64| (bytes + per / 2) / per;
    let wanted: Vec<u64> = counted.iter().copied().chain([counted.iter().sum()]).map(average).collect();
    assert_eq!(
        printed, wanted,
        "{what}: printed against counted per row and step (checkpoint read, written; ring read, written; all)"
    );
}

/// Runs a spec into its steady state, then one flush cycle, and compares; then the plain update.
fn check(spec: &Spec, tokens: usize) -> String {
    let rig = Rig::new(spec.clone());
    let what = format!("{tokens} tokens of {spec:?}");
    let mut rng = Rng(7);
    let text = explain(rig.pool, spec.slots, tokens);
    let numbers_of_step = numbers(&text, "Bytes per row, step and layer");
    let (cycle, printed) = (numbers_of_step[0], &numbers_of_step[1..]);
    let rows: Vec<Row> = (0..spec.slots).map(|slot| Row::new(slot, &rig.tokens(&mut rng, tokens))).collect();
    let steps = |n: usize| {
        for _ in 0..n {
            rig.step(&rows);
            rig.commit(&rows, &vec![tokens as i32; rows.len()]);
        }
    };
    steps((2 * spec.window + spec.keep) / tokens + 4);
    let before = rig.stats();
    steps(cycle as usize);
    compare(printed, moved(&rig.stats(), &before), cycle * spec.slots as u64, &what);

    let plain = numbers(&text, "Plain update");
    for slot in 0..spec.slots {
        rig.reset(slot, slot, 0);
    }
    let before = rig.stats();
    rig.extend(&rows, 0);
    compare(&plain[1..], moved(&rig.stats(), &before), spec.slots as u64, &what);
    text
}

const FORMATS: [(i32, &[i32]); 4] = [
    (REPLAYSSM_FORMAT_SPLIT32, &[REPLAYSSM_READOUT_HIGH, REPLAYSSM_READOUT_FULL, REPLAYSSM_READOUT_EXACT]),
    (REPLAYSSM_FORMAT_F32, &[REPLAYSSM_READOUT_FULL, REPLAYSSM_READOUT_EXACT]),
    (REPLAYSSM_FORMAT_BF16, &[REPLAYSSM_READOUT_HIGH, REPLAYSSM_READOUT_FULL, REPLAYSSM_READOUT_EXACT]),
    (REPLAYSSM_FORMAT_F16, &[REPLAYSSM_READOUT_FULL, REPLAYSSM_READOUT_EXACT]),
];

/// Every family, format and readout, activations of 16 bits and of 32.
fn specs() -> impl Iterator<Item = Spec> {
    FAMILIES.into_iter().flat_map(|family| {
        FORMATS.into_iter().flat_map(move |(format, readouts)| {
            readouts.iter().flat_map(move |&readout| {
                [REPLAYSSM_DTYPE_BF16, REPLAYSSM_DTYPE_F32].map(|io| Spec {
                    family,
                    format,
                    readout,
                    io,
                    slots: 3,
                    headdim: 36,
                    ..Spec::default()
                })
            })
        })
    })
}

#[test]
fn predicted_bytes_are_the_counted_ones_with_one_token_and_with_four() {
    cpu_only!();
    let mut cases = 0;
    for spec in specs() {
        for tokens in [1, 4] {
            check(&spec, tokens);
            cases += 1;
        }
    }
    assert_eq!(cases, 3 * 10 * 2 * 2);
}

#[test]
fn predicted_bytes_hold_for_other_windows_schedules_steps_and_shapes() {
    cpu_only!();
    for (window, t_max, keep, schedule, tokens) in [
        (16, 4, 3, REPLAYSSM_SCHEDULE_STAGGERED, 3),
        (16, 4, 0, REPLAYSSM_SCHEDULE_BY_POSITION, 4),
        (17, 4, 5, REPLAYSSM_SCHEDULE_BY_POSITION, 3),
        (5, 4, 0, REPLAYSSM_SCHEDULE_NONE, 4),
        (4, 4, 0, REPLAYSSM_SCHEDULE_NONE, 4),
        // Histories of more than one chunk of 16 records.
        (40, 4, 0, REPLAYSSM_SCHEDULE_NONE, 1),
        (50, 9, 20, REPLAYSSM_SCHEDULE_STAGGERED, 9),
        // More than one block of 8 tokens, and more than 16, where every readout is serial.
        (33, 16, 0, REPLAYSSM_SCHEDULE_NONE, 16),
        (40, 20, 2, REPLAYSSM_SCHEDULE_NONE, 18),
    ] {
        // Formats differ in the size of the checkpoint alone, and that in all steps alike.
        let formats = [REPLAYSSM_FORMAT_SPLIT32, REPLAYSSM_FORMAT_F16];
        for spec in specs().filter(|spec| spec.io == REPLAYSSM_DTYPE_BF16 && formats.contains(&spec.format)) {
            let spec = Spec { window, t_max, keep, schedule, slots: 2, heads: 6, groups: 2, ..spec };
            check(&spec, tokens);
            if spec.is_delta() {
                check(&Spec { head_map: REPLAYSSM_HEAD_MAP_TILED, ..spec.clone() }, tokens);
                check(&Spec { head_map: REPLAYSSM_HEAD_MAP_TILED, groups: 1, ..spec }, tokens);
            }
        }
    }
}

/// Where the work goes to several threads, a range's end cuts through the heads that share records: they are read twice then.
#[test]
fn predicted_bytes_hold_for_work_on_several_threads() {
    cpu_only!();
    for family in FAMILIES {
        for readout in [REPLAYSSM_READOUT_HIGH, REPLAYSSM_READOUT_EXACT] {
            for (threads, slots) in [(3, 3), (3, 5), (7, 1), (2, 64), (1, 64)] {
                let spec = Spec {
                    family,
                    readout,
                    threads,
                    slots,
                    heads: 10,
                    groups: 2,
                    headdim: 64,
                    dstate: 64,
                    window: 20,
                    ..Spec::default()
                };
                let text = check(&spec, 2);
                let work = numbers(&text, "Work:");
                assert_eq!(work[..3], [10 * slots as u64, 64 * 64 * 4, threads as u64], "{text}");
                // At least four ranges for each thread, where there are as many heads; 256 KiB of state at most.
                let items = 10 * slots as i32;
                let length = (items / (4 * threads)).clamp(1, 16);
                let ranges = (items + length - 1) / length;
                let expected = match threads {
                    1 => "the context has no other".to_owned(),
                    _ => format!("go out in {ranges} ranges"),
                };
                assert!(text.contains(&expected), "{text}");
            }
        }
    }
    // Just below what is worth waking a thread, and just there: 128 KiB.
    for (heads, shared) in [(31, false), (32, true)] {
        let spec = Spec { threads: 2, slots: 1, heads, groups: 1, headdim: 16, dstate: 64, ..Spec::default() };
        let text = check(&spec, 1);
        assert_eq!(text.contains("on 2 threads"), shared, "{text}");
        assert_eq!(text.contains("not worth waking"), !shared, "{text}");
    }
}

#[test]
fn predicted_bytes_of_a_convolution_are_the_counted_ones() {
    cpu_only!();
    let rig = Rig::new(Spec { t_max: 5, keep: 2, ..Spec::default() });
    for (io, channels, width, rows, tokens) in
        [(REPLAYSSM_DTYPE_BF16, 300, 4, 3, 1), (REPLAYSSM_DTYPE_F32, 128, 2, 2, 4), (REPLAYSSM_DTYPE_F16, 7, 3, 8, 5)]
    {
        let p = desc!(replayssm_pool_desc {
            family: REPLAYSSM_FAMILY_CONV1D,
            n_layers: 1,
            io: io,
            channels: channels,
            width: width
        });
        let mut pool = null_mut();
        // SAFETY: the descriptor and the out-parameter are locals.
        ok(unsafe { replayssm_layers_create(rig.slots, &p, null(), 0, &mut pool) });
        let text = explain(pool, rows, tokens);
        let c = channels as usize;
        let x = common::Array { dtype: io, bytes: vec![0; rows * tokens * c * 4 + 16] };
        let weight = common::Array { dtype: io, bytes: vec![0; c * width as usize * 4 + 16] };
        let all = tensor(&x, 0, tokens * c, c, c);
        let args = desc!(replayssm_conv1d_args { x: all, out: all, weight: tensor(&weight, 0, 0, 0, width as usize) });
        let ids: Vec<i64> = (0..rows as i64).collect();
        (0..rows).for_each(|slot| rig.reset(slot, slot, 0));
        for (start, flags) in [("Bytes per row, step and layer", 0), ("Plain update", REPLAYSSM_BATCH_EXTEND)] {
            let batch =
                desc!(replayssm_batch { n_rows: rows as i32, tokens: tokens as i32, slots: ids64(&ids), flags: flags });
            let before = rig.stats();
            let call = if flags == 0 { replayssm_conv1d_step } else { replayssm_conv1d_extend };
            // SAFETY: everything lives until the calls return.
            unsafe {
                ok(call(pool, 0, &batch, &args, null()));
                ok(replayssm_commit(rig.slots, &batch, null(), null()));
            }
            compare(&numbers(&text, start)[1..], moved(&rig.stats(), &before), rows as u64, &text);
        }
        replayssm_layers_destroy(pool);
    }
}

/// The reference shape of the README, whose row of the table this is: 0.64 states with HIGH.
#[test]
fn sentences_of_a_real_layer() {
    cpu_only!();
    let rig = Rig::new(Spec {
        heads: 128,
        headdim: 64,
        dstate: 128,
        groups: 8,
        readout: REPLAYSSM_READOUT_HIGH,
        slots: 1,
        t_max: 1,
        ..Spec::default()
    });
    let text = explain(rig.pool, 1, 1);
    println!("{text}");
    let state = 128 * 64 * 128 * 4;
    let bytes = numbers(&text, "Bytes per row, step and layer");
    let share = bytes[5] as f64 / f64::from(state);
    assert!((0.635..0.645).contains(&share), "{share}");
    assert_eq!(numbers(&text, "Plain update")[5], 2 * state as u64);
    for words in [
        "Pool: Mamba-2, 1 layer of 128 heads of 64 x 128 in 8 groups; bf16 in, fp32 out; SPLIT32 states; HIGH readout.\n",
        "parallel readout, because the readout is HIGH and the step has at most 16 tokens",
        "window 16, steps of up to 1 token, 0 tokens kept for rewind, first folds staggered by ring. With all tokens accepted, the checkpoint",
        "the checkpoint is rewritten in 1 of 16 steps, by 16 records.",
        "The step moves 0.319 of the plain update",
        "on 1 thread: the context has no other.",
    ] {
        assert!(text.contains(words), "{words:?} is not in\n{text}");
    }
    assert!(!text.contains("Note:"), "{text}");
    let memory = numbers(&text, "Memory:");
    let parts: Vec<u64> =
        [0, 1].map(|per_ring| rig.components().iter().filter(|c| c.per_ring == per_ring).map(|c| c.bytes).sum()).into();
    assert_eq!(memory[..2], parts);
}
