//! A slot's life with a live ring: flushes outside of steps, snapshots, copies. Whatever is done to a slot, states and EXACT outputs go on by
//! bytes as those of an uninterrupted run.

#![allow(clippy::multiple_unsafe_ops_per_block, reason = "a test's calls share one promise")]

mod common;

use common::{FAMILIES, Rig, Rng, Row, Spec, Token, assert_same_state, hash, no_faults};
use replayssm::ffi::*;

#[global_allocator]
static HEAP: common::device::Heap = common::device::Heap::ON_CUDA;

const FORMATS: [(i32, bool); 6] = [
    (REPLAYSSM_FORMAT_SPLIT32, false),
    (REPLAYSSM_FORMAT_F32, false),
    (REPLAYSSM_FORMAT_BF16, false),
    (REPLAYSSM_FORMAT_BF16, true),
    (REPLAYSSM_FORMAT_F16, false),
    (REPLAYSSM_FORMAT_F16, true),
];

/// Small, of two layers, with a short last tile and odd rows.
fn small(family: i32, format: i32, stochastic: bool) -> Spec {
    Spec {
        family,
        format,
        stochastic,
        heads: 2,
        groups: 1,
        headdim: 20,
        dstate: 24,
        layers: 2,
        window: 8,
        t_max: 3,
        slots: 8,
        ..Spec::default()
    }
}

fn every_pool() -> impl Iterator<Item = Spec> {
    FAMILIES.into_iter().flat_map(|family| FORMATS.map(|(format, stochastic)| small(family, format, stochastic)))
}

/// How many tokens a request has when something is done to it: rings that are empty, have one token, are mid-window, full (a fold is
/// due in the next step), and wrapped a few times.
const MOMENTS: [usize; 6] = [0, 1, 4, 8, 13, 30];

fn rng_of(spec: &Spec) -> Rng {
    Rng(hash(format!("{spec:?}").bytes().map(u32::from)))
}

/// A step of some tokens of which some are accepted.
fn step(rig: &Rig, slot: usize, tokens: &[Vec<Token>], accepted: usize) -> Vec<Vec<u32>> {
    let row = Row::new(slot, tokens);
    let out = rig.step(std::slice::from_ref(&row)).remove(0);
    rig.commit(&[row], &[accepted as i32]);
    out
}

/// The same tokens on two slots of the same seed and schedule, in steps of one to three tokens with rejects; outputs and states have to be equal.
fn go_on_alike(rig: &Rig, a: usize, b: usize, rng: &mut Rng, tokens: usize) {
    let mut done = 0;
    while done < tokens {
        let n = 1 + rng.below(rig.spec.t_max);
        let (drafts, accepted) = (rig.tokens(rng, n), rng.below(n) + 1);
        assert_eq!(step(rig, a, &drafts, accepted), step(rig, b, &drafts, accepted), "outputs differ");
        done += accepted;
    }
    assert_same_state(rig, a, b);
    no_faults(rig);
}

/// Tokens in steps of up to three, all of them accepted.
fn feed(rig: &Rig, slot: usize, tokens: &[Vec<Token>]) {
    for some in tokens.chunks(2) {
        step(rig, slot, some, some.len());
    }
}

/// Seeds are made of ring ids: two slots that are to round alike start with one seed.
fn start(rig: &Rig, slots: &[usize]) {
    for &slot in slots {
        rig.reset_with_seed(slot, 0, 77);
    }
}

#[test]
fn a_flush_is_a_fold_like_a_steps() {
    for spec in every_pool() {
        for keep in [0, 2] {
            for n in MOMENTS {
                let rig = Rig::new(Spec { keep, schedule: REPLAYSSM_SCHEDULE_NONE, ..spec.clone() });
                let mut rng = rng_of(&rig.spec);
                start(&rig, &[2, 3]);
                let tokens = rig.tokens(&mut rng, n);
                feed(&rig, 2, &tokens);
                feed(&rig, 3, &tokens);
                // One slot folds in a step that is never committed, by its mask; the other outside.
                let mut row = Row::new(2, &rig.tokens(&mut rng, 1));
                row.flush = true;
                rig.step(&[row]);
                rig.flush(3, 3, None);
                let folded = n.saturating_sub(keep) as i64;
                for layer in 0..2 {
                    assert!(rig.tags(layer, 3).iter().all(|&tag| tag == folded), "all but the kept tokens are folded");
                }
                assert!(rig.bytes_of(2, false) == rig.bytes_of(3, false), "checkpoints differ");
                go_on_alike(&rig, 2, 3, &mut rng, 20);
            }
        }
    }
}

#[test]
fn a_snapshot_is_the_state_at_its_position() {
    for spec in every_pool() {
        let rig = Rig::new(spec);
        let mut rng = rng_of(&rig.spec);
        start(&rig, &[2, 3]);
        let mut position = 0i64;
        for round in 0..40 {
            let n = 1 + rng.below(3);
            let (drafts, accepted) = (rig.tokens(&mut rng, n), rng.below(n + 1));
            let row = Row::new(2, &drafts);
            rig.step(std::slice::from_ref(&row));
            rig.commit(std::slice::from_ref(&row), &[accepted as i32]);
            let (before, ring) = (rig.bytes_of(2, false), rig.bytes_of(2, true));
            // Every position around what was committed; only those that the commit reached leave something.
            for at in position - 1..=position + n as i64 + 1 {
                rig.fill_part(6, false, 0xEE);
                let poison = rig.bytes_of(6, false);
                rig.snapshot(std::slice::from_ref(&row), false, None, &[at], &[6]);
                let is_due = at > position && at <= position + accepted as i64;
                assert_eq!(
                    rig.bytes_of(6, false) != poison,
                    is_due,
                    "round {round}: at {at} of {position} + {accepted}"
                );
                if is_due {
                    for layer in 0..2 {
                        assert!(rig.tags(layer, 6).iter().all(|&tag| tag == at), "tags are the position");
                    }
                    if rig.spec.format == REPLAYSSM_FORMAT_SPLIT32 || rig.spec.format == REPLAYSSM_FORMAT_F32 {
                        for layer in 0..2 {
                            assert!(
                                rig.stored(layer, 6) == rig.export(layer, 2, 2, Some(at)),
                                "not the state at the position"
                            );
                        }
                    }
                }
                assert!(before == rig.bytes_of(2, false) && ring == rig.bytes_of(2, true), "the source changed");
            }
            position += accepted as i64;
        }
        no_faults(&rig);
    }
}

#[test]
fn a_fork_goes_on_as_its_source() {
    for spec in every_pool() {
        for n in MOMENTS {
            let rig = Rig::new(Spec { schedule: REPLAYSSM_SCHEDULE_NONE, ..spec.clone() });
            let mut rng = rng_of(&rig.spec);
            start(&rig, &[2]);
            let tokens = rig.tokens(&mut rng, n);
            feed(&rig, 2, &tokens);
            let before = (rig.bytes_of(2, false), rig.bytes_of(2, true), rig.cursor(2).position);
            let generation = rig.cursor(5).generation;
            rig.copy(REPLAYSSM_COPY_FORK, (2, 2), (5, 5), None);
            assert!(
                before == (rig.bytes_of(2, false), rig.bytes_of(2, true), rig.cursor(2).position),
                "the source changed"
            );
            assert!(before == (rig.bytes_of(5, false), rig.bytes_of(5, true), rig.cursor(5).position), "not a copy");
            assert_eq!((rig.cursor(5).seed, rig.cursor(5).generation), (77, generation + 1));
            go_on_alike(&rig, 2, 5, &mut rng, 20);
        }
    }
}
