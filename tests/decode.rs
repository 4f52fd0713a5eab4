//! Steps of up to eight tokens with inputs and states at multiples of 16 bytes, as engines have them: what a GPU has kernels of their own for. In any mix of
//! rows, states (with their records folded) are those of an EXACT pool by bytes, and outputs near its.

#![allow(clippy::multiple_unsafe_ops_per_block, reason = "a test's calls share one promise")]

mod common;

use common::device::{self, peek, poke};
use common::oracle::relative;
use common::{FAMILIES, Rig, Rng, Row, Skip, Spec, address, decode, no_faults};
use replayssm::backend::cuda::{Preferred, direct_launches, prefer};
use replayssm::ffi::*;

#[global_allocator]
static HEAP: common::device::Heap = common::device::Heap::ON_CUDA;

/// Which kernels can take a step.
const KERNELS: [Preferred; 2] = [Preferred::Pipeline, Preferred::Direct];

/// Runs something with kernels that are preferred, which are to be those that work.
fn with<T>(preferred: Preferred, run: impl FnOnce() -> T) -> T {
    let before = direct_launches();
    prefer(preferred);
    let result = run();
    prefer(Preferred::Faster);
    let is_direct = preferred != Preferred::Pipeline && device::cuda();
    assert_eq!(direct_launches() > before, is_direct, "launches of blocks a head, {preferred:?}");
    result
}

fn aligned(seed: u64) -> Spec {
    Spec {
        heads: 8,
        groups: 2,
        headdim: 64,
        dstate: 128,
        t_max: 1,
        contiguous: true,
        layers: 2,
        seed,
        ..Spec::default()
    }
}

/// Rows of all requests but one, some of which have no token or no slot, in any order.
fn rows(rig: &Rig, rng: &mut Rng) -> Vec<Row> {
    let mut slots: Vec<usize> = (0..rig.spec.slots).collect();
    for i in (1..slots.len()).rev() {
        slots.swap(i, rng.below(i + 1));
    }
    let mut row = |slot: usize| {
        let n = if rng.below(6) > 0 { 1 + rng.below(rig.spec.t_max) } else { 0 };
        let mut row = Row { flush: rng.below(9) == 0, ..Row::new(slot, &rig.tokens(rng, n)) };
        if rng.below(8) == 0 {
            (row.slot, row.flush) = (-1, false);
        }
        row
    };
    slots[1..].iter().map(|&slot| row(slot)).collect()
}

/// Outputs of layer 1 in `rounds` rounds of `spec` and of an EXACT SPLIT32 pool: relative L2 distance. States are compared by bytes where they are
/// fp32.
fn distance(spec: Spec, rounds: usize) -> f64 {
    let of = |&preferred: &Preferred| with(preferred, || distance_with(spec.clone(), rounds, |_, g| g));
    KERNELS.iter().map(of).fold(0.0, f64::max)
}

/// The same with other log decays of the generator: by number and what they would be.
fn distance_with(spec: Spec, rounds: usize, decay: fn(usize, f64) -> f64) -> f64 {
    let (mut rig, exact) = (
        Rig::new(spec.clone()),
        Rig::new(Spec {
            format: REPLAYSSM_FORMAT_SPLIT32,
            readout: REPLAYSSM_READOUT_EXACT,
            u_dtype: 0,
            ..spec.clone()
        }),
    );
    for params in &mut rig.params {
        params.decay = params.decay.iter().enumerate().map(|(i, &g)| decay(i, g)).collect();
    }
    let mut rng = Rng(spec.seed);
    let (mut seen, mut wanted) = (Vec::new(), Vec::new());
    for round in 0..rounds {
        let rows = rows(&rig, &mut rng);
        rig.layer(0, &rows, false, 0);
        exact.layer(0, &rows, false, 0);
        // An abandoned step of one layer now and then: tiles of layers stand apart.
        if rng.below(7) > 0 {
            let (a, b) = (rig.layer(1, &rows, false, 0), exact.layer(1, &rows, false, 0));
            for ((row, a), b) in rows.iter().zip(&a).zip(&b) {
                let [a, b] = [a, b].map(|tokens| tokens.iter().flatten().map(|&bits| decode(spec.out, bits)));
                if row.slot < 0 {
                    assert!(a.eq(b), "round {round}: a null row of {spec:?}");
                } else {
                    seen.extend(a);
                    wanted.extend(b);
                }
            }
            let counts: Vec<i32> = rows
                .iter()
                .map(|row| {
                    rng.below(row.tokens.len() + 1).max(usize::from(!row.tokens.is_empty() && rng.below(5) > 0)) as i32
                })
                .collect();
            rig.commit(&rows, &counts);
            exact.commit(&rows, &counts);
        }
        if rng.below(12) == 0 {
            let slot = rng.below(spec.slots);
            let position = rng.below(1000) as i64;
            rig.reset(slot, slot, position);
            exact.reset(slot, slot, position);
        }
    }
    for (layer, slot) in [(0, 0), (1, 0), (0, 5), (1, 7)] {
        let (a, b) = (rig.export(layer, slot, slot, None), exact.export(layer, slot, slot, None));
        assert!(a == b || spec.format == REPLAYSSM_FORMAT_BF16, "layer {layer}, slot {slot} of {spec:?}");
    }
    no_faults(&rig);
    assert!(seen.iter().any(|&y| y != 0.0));
    relative(&seen, &wanted)
}

/// Ways to read a pool out, and the largest distance from an exact one: fp32 sums in another order; a state rounded to bfloat16 (2^-9 of each
/// element at most, and outputs are sums of many); a checkpoint rounded at each fold as well.
const WAYS: [(i32, i32, f64); 4] = [
    (REPLAYSSM_FORMAT_F32, REPLAYSSM_READOUT_FULL, 2e-6),
    (REPLAYSSM_FORMAT_SPLIT32, REPLAYSSM_READOUT_FULL, 2e-6),
    (REPLAYSSM_FORMAT_SPLIT32, REPLAYSSM_READOUT_HIGH, 1.0 / 512.0),
    (REPLAYSSM_FORMAT_BF16, REPLAYSSM_READOUT_HIGH, 3.0 / 512.0),
];

fn all_ways(spec: &Spec, rounds: usize) {
    some_ways(&WAYS, spec, rounds);
}

fn some_ways(ways: &[(i32, i32, f64)], spec: &Spec, rounds: usize) {
    for &(format, readout, limit) in ways {
        let spec = Spec { format, readout, ..spec.clone() };
        let distance = distance(spec.clone(), rounds);
        assert!(distance <= limit, "{distance:e} instead of {limit:e}: {spec:?}");
    }
}

/// Needs the kernels of SPLIT32 alone.
#[test]
fn few_of_split32() {
    some_ways(&WAYS[1..3], &Spec { heads: 4, ..aligned(8) }, 20);
}

/// The same of a delta rule.
#[test]
fn few_gdn_of_split32() {
    some_ways(&WAYS[1..3], &Spec { family: REPLAYSSM_FAMILY_GDN, heads: 4, ..aligned(11) }, 20);
}

/// The same with decays per column.
#[test]
fn few_kda_of_split32() {
    some_ways(&WAYS[1..3], &Spec { family: REPLAYSSM_FAMILY_KDA, heads: 4, ..aligned(16) }, 20);
}

/// The same with several tokens a row.
#[test]
fn few_several_of_split32() {
    some_ways(&WAYS[1..3], &Spec { t_max: 3, window: 9, heads: 4, ..aligned(12) }, 20);
}

/// The same with several tokens a row of a delta rule: k and q in one product, and in two.
#[test]
fn few_several_gdn_of_split32() {
    for t_max in [3, 6] {
        let spec = Spec { family: REPLAYSSM_FAMILY_GDN, t_max, window: 2 * t_max + 3, heads: 4, ..aligned(13) };
        some_ways(&WAYS[1..3], &spec, 16);
    }
}

/// The same with decays per column.
#[test]
fn few_several_kda_of_split32() {
    for t_max in [2, 4, 6] {
        let spec = Spec { family: REPLAYSSM_FAMILY_KDA, t_max, window: 2 * t_max + 3, heads: 4, ..aligned(17) };
        some_ways(&WAYS[1..3], &spec, 16);
    }
}

/// Blocks a head that wait until they know which rows of a ring they need, as where there are many of them.
#[test]
fn few_late_of_split32() {
    for (family, t_max) in [
        (REPLAYSSM_FAMILY_MAMBA2, 1),
        (REPLAYSSM_FAMILY_MAMBA2, 3),
        (REPLAYSSM_FAMILY_GDN, 2),
        (REPLAYSSM_FAMILY_KDA, 2),
    ] {
        let spec = Spec { family, t_max, window: 2 * t_max + 3, heads: 4, ..aligned(27) };
        for (format, readout, limit) in &WAYS[1..3] {
            let spec = Spec { format: *format, readout: *readout, ..spec.clone() };
            let distance = with(Preferred::DirectLate, || distance_with(spec.clone(), 16, |_, g| g));
            assert!(distance <= *limit, "{distance:e} instead of {limit:e}: {spec:?}");
        }
    }
}

/// A window that the pipeline has no space for goes to a block a head, as everything does on devices without a pipeline.
#[test]
fn few_long_windows() {
    for family in [REPLAYSSM_FAMILY_MAMBA2, REPLAYSSM_FAMILY_GDN] {
        let (format, readout, limit) = WAYS[2];
        let spec = Spec { family, format, readout, window: 100, heads: 4, ..aligned(28) };
        let before = direct_launches();
        prefer(Preferred::Pipeline);
        let distance = distance_with(spec.clone(), 8, |_, g| g);
        prefer(Preferred::Faster);
        assert_eq!(direct_launches() > before, device::cuda(), "{spec:?}");
        assert!(distance <= limit, "{distance:e} instead of {limit:e}: {spec:?}");
    }
}

/// Heads of which few fit a block's memory are worked on in halves, or quarters if their tiles divide.
#[test]
fn few_parts_of_heads() {
    let bounded = REPLAYSSM_GATE_LOWER_BOUND;
    for spec in [
        Spec { family: REPLAYSSM_FAMILY_GDN, t_max: 4, window: 19, keep: 2, headdim: 128, ..aligned(24) },
        Spec { family: REPLAYSSM_FAMILY_GDN, t_max: 6, window: 15, headdim: 96, ..aligned(25) },
        Spec { family: REPLAYSSM_FAMILY_KDA, t_max: 3, window: 17, headdim: 128, gate_kind: bounded, ..aligned(26) },
    ] {
        all_ways(&Spec { heads: 4, ..spec }, 9);
    }
}

/// Two rigs that were given the same five tokens, one of them EXACT, and a generator for more. t_max: of steps; one of a step's tokens is taken.
fn two_rigs(family: i32, readout: i32, t_max: usize, headdim: usize) -> (Rig, Rig, Rng) {
    let spec =
        Spec { family, readout, t_max, headdim, heads: 4, slots: 3, schedule: REPLAYSSM_SCHEDULE_NONE, ..aligned(14) };
    let exact = Spec { readout: REPLAYSSM_READOUT_EXACT, ..spec.clone() };
    let (rig, exact, mut rng) = (Rig::new(spec), Rig::new(exact), Rng(14));
    for slot in 0..3 {
        for rig in [&rig, &exact] {
            rig.reset(slot, slot, 7);
        }
    }
    for _ in 0..5 {
        step(&rig, &exact, &mut rng, false);
    }
    (rig, exact, rng)
}

/// Tokens for each of three rows, of which one is committed: outputs of both rigs.
fn step(rig: &Rig, exact: &Rig, rng: &mut Rng, flush: bool) -> [Vec<Vec<f64>>; 2] {
    let rows: Vec<Row> = (0..3).map(|slot| Row { flush, ..Row::new(slot, &rig.tokens(rng, rig.spec.t_max)) }).collect();
    [rig, exact].map(|rig| {
        rig.layer(0, &rows, false, 0);
        let outputs = rig.layer(1, &rows, false, 0);
        rig.commit(&rows, &[1; 3]);
        let values = |row: &Vec<Vec<u32>>| row.iter().flatten().map(|&bits| decode(rig.spec.out, bits)).collect();
        outputs.iter().map(values).collect()
    })
}

/// Tiles of a head may stand at different positions, as after a launch that did not end: each takes in its own records, and says so.
#[test]
fn tiles_that_stand_apart() {
    let single = FAMILIES.into_iter().flat_map(|f| WAYS[1..3].iter().map(move |&w| (f, w, 1, 64)));
    // Halves of heads.
    let halves = [REPLAYSSM_FAMILY_GDN, REPLAYSSM_FAMILY_KDA].map(|family| (family, WAYS[2], 2, 128));
    let all = single.chain(halves).flat_map(|case| KERNELS.map(|preferred| (case, preferred)));
    for ((family, (_, readout, limit), t_max, headdim), preferred) in all {
        prefer(preferred);
        let (rig, exact, mut rng) = two_rigs(family, readout, t_max, headdim);
        let (layer, tiles, tile_bytes) = (1, rig.spec.headdim / 16, 16 * rig.spec.dstate * 2);
        let (checkpoint, tags) =
            (rig.component(REPLAYSSM_COMPONENT_CHECKPOINT), rig.component(REPLAYSSM_COMPONENT_TAGS));
        // As they were before a fold: of slot 0 those behind the first tile of each head, of slot 1 the first.
        let is_behind = |slot: usize, tile: usize| [tile % 2 == 1, tile == 0, false][slot];
        let mut places = Vec::new();
        for (slot, head, tile) in
            (0..3).flat_map(|slot| (0..4).flat_map(move |head| (0..tiles).map(move |tile| (slot, head, tile))))
        {
            if is_behind(slot, tile) {
                // Both planes of a head.
                let at = address(&checkpoint, layer, slot) + (2 * head * tiles + tile) * tile_bytes;
                let tag = address(&tags, layer, slot) + (head * tiles + tile) * 8;
                places.extend([(at, tile_bytes), (at + tiles * tile_bytes, tile_bytes), (tag, 8)]);
            }
        }
        let before: Vec<Vec<u8>> = places.iter().map(|&(at, bytes)| peek(at, bytes)).collect();
        step(&rig, &exact, &mut rng, true);
        for (&(at, _), bytes) in places.iter().zip(&before) {
            poke(at, bytes);
        }
        assert_eq!(rig.tags(layer, 0)[..4], [12, 7, 12, 7]);
        let mut distance = |flush| {
            let [seen, wanted] = step(&rig, &exact, &mut rng, flush);
            for (seen, wanted) in seen.iter().zip(&wanted) {
                let distance = relative(seen, wanted);
                assert!(distance <= limit, "{distance:e} instead of {limit:e}: {:?}", rig.spec);
            }
        };
        distance(false);
        distance(false);
        assert_eq!(rig.tags(layer, 1)[..4], [7, 12, 12, 12]);
        // Some tiles of a head have nothing to fold up to the window's end, others have.
        for _ in 0..10 {
            distance(false);
        }
        assert_eq!(rig.tags(layer, 2)[..4], [12; 4]);
        assert!((0..2).all(|slot| (0..tiles).all(|tile| (rig.tags(layer, slot)[tile] > 12) == is_behind(slot, tile))));
        distance(true);
        distance(false);
        for slot in 0..3 {
            assert!(
                rig.export(layer, slot, slot, None) == exact.export(layer, slot, slot, None),
                "slot {slot} of {:?}",
                rig.spec
            );
        }
        no_faults(&rig);
    }
}

/// A tag that cannot be right: the head's outputs are zero, its checkpoint stays what it is, the fault says where, and all others are what
/// they would have been.
#[test]
fn tags_that_cannot_be_trusted() {
    let single = FAMILIES.into_iter().flat_map(|f| WAYS[1..3].iter().map(move |&w| (f, w, 1, 64)));
    // Of one half of a head.
    let half = (REPLAYSSM_FAMILY_GDN, WAYS[2], 2, 128);
    let all = single.chain([half]).flat_map(|case| KERNELS.map(|preferred| (case, preferred)));
    for ((family, (_, readout, limit), t_max, headdim), preferred) in all {
        prefer(preferred);
        let (rig, exact, mut rng) = two_rigs(family, readout, t_max, headdim);
        let (channels, tiles) = (rig.spec.headdim, rig.spec.headdim / 16);
        let tags = rig.component(REPLAYSSM_COMPONENT_TAGS);
        poke(address(&tags, 1, 1) + (2 * tiles + 3) * 8, &13i64.to_le_bytes());
        let before = rig.part(REPLAYSSM_COMPONENT_CHECKPOINT, 1, 1);
        let [seen, wanted] = step(&rig, &exact, &mut rng, false);
        for (row, head) in (0..3).flat_map(|row| (0..4).map(move |head| (row, head))) {
            for token in 0..t_max {
                let [seen, wanted] = [&seen, &wanted].map(|all| &all[row][(token * 4 + head) * channels..][..channels]);
                if (row, head) == (1, 2) {
                    assert!(seen.iter().all(|&y| y == 0.0), "{:?}", rig.spec);
                } else {
                    assert!(relative(seen, wanted) <= limit, "row {row}, head {head} of {:?}", rig.spec);
                }
            }
        }
        assert!(rig.part(REPLAYSSM_COMPONENT_CHECKPOINT, 1, 1) == before);
        let report = rig.faults(true);
        assert_eq!((report.bits, report.first_slot, report.first_layer), (REPLAYSSM_FAULT_POSITION, 1, 1));
    }
}

#[test]
fn every_family() {
    for family in FAMILIES {
        all_ways(&Spec { family, ..aligned(1) }, 18);
    }
}

#[test]
fn heads_of_other_sizes_and_groups() {
    for (headdim, heads, groups) in [(80, 6, 2), (24, 3, 3), (128, 4, 1), (8, 12, 1)] {
        all_ways(&Spec { headdim, heads, groups, ..aligned(2) }, 13);
    }
}

#[test]
fn options() {
    let options = [
        Spec { skip: Skip::PerElement, out: REPLAYSSM_DTYPE_BF16, ..aligned(3) },
        Spec { gate: false, skip: Skip::None, bias: false, out: REPLAYSSM_DTYPE_BF16, ..aligned(4) },
        Spec {
            softplus: false,
            dt_dtype: REPLAYSSM_DTYPE_BF16,
            param_dtype: REPLAYSSM_DTYPE_F16,
            out: REPLAYSSM_DTYPE_BF16,
            bias: false,
            ..aligned(5)
        },
        Spec { ids: REPLAYSSM_DTYPE_I32, checks: true, ..aligned(6) },
    ];
    for spec in options {
        // Outputs of 16 bits are rounded.
        let rounded = spec.out != REPLAYSSM_DTYPE_F32;
        for (format, readout, limit) in WAYS {
            let spec = Spec { format, readout, ..spec.clone() };
            let distance = distance(spec.clone(), 11);
            assert!(distance <= if rounded { limit + 1.0 / 256.0 } else { limit }, "{distance:e}: {spec:?}");
        }
    }
}

/// Several tokens a row: up to four with k and q in one product, and more.
#[test]
fn steps_of_several_tokens() {
    for (t_max, family) in [4, 8].into_iter().flat_map(|t_max| FAMILIES.map(|family| (t_max, family))) {
        let spec = Spec { t_max, family, window: 2 * t_max + 3, heads: 4, ..aligned(9) };
        all_ways(&spec, 6);
    }
    for (t_max, window, keep, headdim) in [(2, 40, 0, 80), (3, 17, 2, 24), (8, 64, 0, 64)] {
        all_ways(&Spec { t_max, window, keep, headdim, heads: 4, ..aligned(10) }, 14);
    }
}

#[test]
fn windows_and_kept_tokens() {
    for (window, keep, schedule) in [
        (1, 0, REPLAYSSM_SCHEDULE_STAGGERED),
        (5, 2, REPLAYSSM_SCHEDULE_BY_POSITION),
        (17, 0, REPLAYSSM_SCHEDULE_NONE),
        (28, 3, REPLAYSSM_SCHEDULE_STAGGERED),
        (31, 5, REPLAYSSM_SCHEDULE_STAGGERED),
    ] {
        all_ways(&Spec { window, keep, schedule, heads: 4, ..aligned(7) }, 30);
    }
}

/// Delta rules with other heads, gates and windows than `every_family` has, of one token and of a few.
#[test]
fn delta_rules() {
    for family in [REPLAYSSM_FAMILY_GDN, REPLAYSSM_FAMILY_KDA] {
        let of = |seed| Spec { family, heads: 4, ..aligned(seed) };
        for spec in [
            Spec { headdim: 24, groups: 1, head_map: REPLAYSSM_HEAD_MAP_TILED, ..of(18) },
            Spec { t_max: 2, window: 5, bias: false, gate_kind: REPLAYSSM_GATE_LOG_DECAY, l2norm: false, ..of(20) },
            Spec {
                window: 31,
                keep: 5,
                dt_dtype: REPLAYSSM_DTYPE_BF16,
                param_dtype: REPLAYSSM_DTYPE_F16,
                beta_processed: true,
                ..of(21)
            },
            Spec { window: 1, schedule: REPLAYSSM_SCHEDULE_BY_POSITION, dt_dtype: REPLAYSSM_DTYPE_F16, ..of(22) },
        ] {
            all_ways(&spec, 7);
        }
    }
}

/// Columns that decay fast among those that decay slowly, in a block of 32 and in whole ones, and columns that do not decay.
#[test]
fn slow_and_fast_decays() {
    fast_columns(&[WAYS[0], WAYS[3]]);
}

/// The same with the kernels of SPLIT32 alone.
#[test]
fn few_fast_columns_of_split32() {
    fast_columns(&WAYS[1..3]);
}

fn fast_columns(ways: &[(i32, i32, f64)]) {
    let decay = |i: usize, g: f64| match (i / 128 % 4, i % 128) {
        (0, column) if column % 5 == 0 => -1.5 * (1 + column % 3) as f64,
        (1, _) => -1.25,
        (2, 32..64) => -30.0,
        (3, column) if column % 2 == 1 => 0.0,
        _ => g,
    };
    for (t_max, &(format, readout, limit)) in
        [1, 3].into_iter().flat_map(|t_max| ways.iter().map(move |way| (t_max, way)))
    {
        let spec = Spec {
            family: REPLAYSSM_FAMILY_KDA,
            format,
            readout,
            t_max,
            heads: 4,
            bias: false,
            gate_kind: REPLAYSSM_GATE_LOG_DECAY,
            ..aligned(23)
        };
        for preferred in KERNELS {
            let distance = with(preferred, || distance_with(spec.clone(), 11, decay));
            assert!(distance <= limit, "{distance:e} instead of {limit:e}: {preferred:?}, {spec:?}");
        }
    }
}

/// replayssm_explain names the kernel of an aligned step and its launch, on devices that have such kernels, and of no other step.
#[test]
fn the_launch_is_explained() {
    let spec = Spec { readout: REPLAYSSM_READOUT_HIGH, t_max: 16, window: 32, ..aligned(15) };
    let rig = Rig::new(spec.clone());
    let exact = rig.beside(Spec { readout: REPLAYSSM_READOUT_EXACT, ..spec });
    let explain = |pool, tokens| {
        let mut text = [0 as std::ffi::c_char; 4096];
        // SAFETY: the buffer has as many bytes as it says.
        common::ok(unsafe { replayssm_explain(pool, 8, tokens, text.as_mut_ptr(), text.len()) });
        // SAFETY: the call put a final zero.
        unsafe { std::ffi::CStr::from_ptr(text.as_ptr()) }.to_str().expect("ASCII").to_owned()
    };
    let start = "With inputs and memory at multiples of 16 bytes instead: ";
    assert!(!explain(exact.pool, 1).contains(start) && !explain(rig.pool, 9).contains(start));
    let [one, eight] = [1, 8].map(|tokens| explain(rig.pool, tokens));
    if one.contains(start) {
        println!("{one}{eight}");
        for text in [one, eight] {
            assert!(
                text.contains(&format!("{start}mamba2_direct_split32_high_128 (with a gate z), blocks of ")),
                "{text}"
            );
        }
        prefer(Preferred::Pipeline);
        let [one, eight] = [1, 8].map(|tokens| explain(rig.pool, tokens));
        println!("{one}{eight}");
        assert!(one.contains(&format!("{start}mamba2_decode_split32_high_128 (with a gate z), blocks of ")), "{one}");
        assert!(
            eight.contains(&format!("{start}mamba2_verify_split32_high_128 (with a gate z), blocks of ")),
            "{eight}"
        );
    } else {
        println!("skipped: the_launch_is_explained because the device has no kernels for aligned steps");
    }
}
