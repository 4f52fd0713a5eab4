//! A slot's life with a live ring: flushes outside of steps, snapshots, copies. Whatever is done to a slot, states and EXACT outputs go on by
//! bytes as those of an uninterrupted run.

#![allow(clippy::multiple_unsafe_ops_per_block, reason = "a test's calls share one promise")]

mod common;

use std::ptr::null;

use common::{FAMILIES, Rig, Rng, Row, Spec, Token, assert_same_state, hash, heap, ids64, no_faults, ok};
use replayssm::ffi::*;
use replayssm::replay::position::default_seed;

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

#[test]
fn one_source_has_many_forks() {
    for family in FAMILIES {
        let rig =
            Rig::new(Spec { schedule: REPLAYSSM_SCHEDULE_NONE, ..small(family, REPLAYSSM_FORMAT_SPLIT32, false) });
        let mut rng = rng_of(&rig.spec);
        start(&rig, &[1]);
        let tokens = rig.tokens(&mut rng, 13);
        feed(&rig, 1, &tokens);
        // In the middle of a step: it has run, and is committed by everyone for himself.
        let row = Row::new(1, &rig.tokens(&mut rng, 3));
        let outputs = rig.step(std::slice::from_ref(&row));
        let lists = ([1i64, 1, -1, 1], [2i64, 6, 3, 4]);
        rig.copy_lists(REPLAYSSM_COPY_FORK, &lists.0, &lists.1, None, Some(&[9, 9, 9, 9]));
        for (slot, accepted) in [(1, 3), (2, 1), (4, 2), (6, 3)] {
            rig.commit(&[Row { slot, ring: slot, ..row.clone() }], &[accepted]);
        }
        assert_eq!(rig.cursor(3).position, 0, "a skipped entry");
        assert_eq!(rig.cursor(4).generation, 9);
        // Each goes on as a request that has taken just its tokens.
        for (slot, accepted) in [(1, 3), (2, 1), (4, 2), (6, 3)] {
            rig.reset_with_seed(7, 0, 77);
            feed(&rig, 7, &tokens);
            let twin = rig.step(&[Row { slot: 7, ring: 7, ..row.clone() }]);
            assert!(twin == outputs, "outputs of the source and of a twin");
            rig.commit(&[Row { slot: 7, ring: 7, ..row.clone() }], &[accepted]);
            go_on_alike(&rig, slot, 7, &mut rng, 12);
        }
    }
}

#[test]
fn a_move_and_a_swap_keep_everything() {
    for spec in every_pool() {
        for n in MOMENTS {
            let rig = Rig::new(Spec { schedule: REPLAYSSM_SCHEDULE_NONE, ..spec.clone() });
            let mut rng = rng_of(&rig.spec);
            start(&rig, &[2, 3, 4]);
            let (tokens, others) = (rig.tokens(&mut rng, n), rig.tokens(&mut rng, 5));
            feed(&rig, 2, &tokens);
            feed(&rig, 3, &tokens);
            feed(&rig, 4, &others);
            let other = (rig.bytes_of(4, false), rig.bytes_of(4, true));
            let generations = (rig.cursor(2).generation, rig.cursor(4).generation);
            rig.copy(REPLAYSSM_COPY_SWAP, (2, 2), (4, 4), None);
            assert!(other == (rig.bytes_of(2, false), rig.bytes_of(2, true)), "not swapped");
            assert_eq!((rig.cursor(2).position, rig.cursor(4).position), (5, n as i64));
            assert_eq!((rig.cursor(2).generation, rig.cursor(4).generation), (generations.0 + 1, generations.1 + 1));
            go_on_alike(&rig, 4, 3, &mut rng, 7);
            let generation = rig.cursor(4).generation;
            rig.copy(REPLAYSSM_COPY_MOVE, (4, 4), (6, 6), None);
            assert_eq!(rig.cursor(4).generation, generation + 1, "late commits of the source do nothing");
            go_on_alike(&rig, 6, 3, &mut rng, 14);
        }
    }
}

#[test]
fn a_stored_checkpoint_is_what_a_flush_would_leave() {
    for spec in every_pool() {
        for n in MOMENTS {
            for back in [0, 1, 2] {
                let Some(at) = n.checked_sub(back) else { continue };
                let rig = Rig::new(Spec { keep: 2, schedule: REPLAYSSM_SCHEDULE_NONE, ..spec.clone() });
                let mut rng = rng_of(&rig.spec);
                start(&rig, &[2]);
                let tokens = rig.tokens(&mut rng, n);
                feed(&rig, 2, &tokens);
                let before = (rig.bytes_of(2, false), rig.bytes_of(2, true));
                rig.fill_part(5, false, 0xEE);
                // There is no ring 99: it does not count.
                rig.copy(REPLAYSSM_COPY_STORE, (2, 2), (5, 99), Some(at as i64));
                assert!(before == (rig.bytes_of(2, false), rig.bytes_of(2, true)), "the source changed");
                rig.copy(REPLAYSSM_COPY_STORED, (5, 99), (6, 99), None);
                rig.flush(2, 2, Some(at as i64));
                assert!(rig.bytes_of(5, false) == rig.bytes_of(2, false), "stored at {at} of {n}");
                assert!(rig.bytes_of(6, false) == rig.bytes_of(2, false), "a copy of what is stored");
                no_faults(&rig);
                // Loaded, it goes on like the one that was flushed, once that has been brought back to the position. Of tokens that were
                // committed behind it nothing is left.
                if back > 0 || rig.spec.stochastic {
                    continue;
                }
                rig.copy(REPLAYSSM_COPY_LOAD, (6, 99), (3, 3), Some(at as i64));
                assert_eq!(rig.cursor(3).position, at as i64);
                go_on_alike(&rig, 2, 3, &mut rng, 20);
            }
        }
    }
}

#[test]
fn a_checkpoint_that_stands_elsewhere_is_not_loaded() {
    for family in FAMILIES {
        let rig = Rig::new(small(family, REPLAYSSM_FORMAT_SPLIT32, false));
        let mut rng = rng_of(&rig.spec);
        start(&rig, &[2, 3]);
        let tokens = rig.tokens(&mut rng, 9);
        feed(&rig, 2, &tokens);
        rig.copy(REPLAYSSM_COPY_STORE, (2, 2), (5, 5), Some(8));
        rig.copy(REPLAYSSM_COPY_LOAD, (5, 5), (3, 3), Some(9));
        assert_eq!(rig.faults(true).bits, REPLAYSSM_FAULT_POSITION);
        assert!(rig.tags(0, 3).iter().all(|&tag| tag == -1));
        // Nothing computes with it.
        let out = rig.step(&[Row::new(3, &rig.tokens(&mut rng, 1))]);
        assert!(out[0][0].iter().all(|&bits| bits == 0));
        assert_eq!(rig.faults(true).bits, REPLAYSSM_FAULT_POSITION);
        rig.copy(REPLAYSSM_COPY_LOAD, (5, 5), (3, 3), Some(8));
        no_faults(&rig);
    }
}

#[test]
fn a_prefix_is_cached_and_continued() {
    // A block of 8 tokens stands for one of 512.
    for family in FAMILIES {
        for schedule in [REPLAYSSM_SCHEDULE_STAGGERED, REPLAYSSM_SCHEDULE_BY_POSITION, REPLAYSSM_SCHEDULE_NONE] {
            let rig = Rig::new(Spec { schedule, ..small(family, REPLAYSSM_FORMAT_SPLIT32, false) });
            let mut rng = rng_of(&rig.spec);
            start(&rig, &[2]);
            let tokens = rig.tokens(&mut rng, 30);
            let (mut position, mut outputs) = (0, Vec::new());
            while position < 30 {
                let n = (1 + rng.below(3)).min(30 - position);
                let accepted = 1 + rng.below(n);
                let row = Row::new(2, &tokens[position..position + n]);
                let out = rig.step(std::slice::from_ref(&row)).remove(0);
                rig.commit(std::slice::from_ref(&row), &[accepted as i32]);
                // The next end of a block, whether it has been reached or not.
                let end = (position / 8 + 1) * 8;
                rig.snapshot(&[row], false, None, &[end as i64], &[3 + end as i64 / 8]);
                outputs.extend_from_slice(&out[..accepted]);
                position += accepted;
            }
            for block in 1..=3 {
                rig.reset_with_seed(7, 0, 77);
                rig.copy(REPLAYSSM_COPY_LOAD, (3 + block, 3 + block), (7, 7), Some(8 * block as i64));
                assert_eq!(rig.cursor(7).seed, default_seed(7));
                for (t, token) in tokens.iter().enumerate().skip(8 * block) {
                    assert_eq!(step(&rig, 7, std::slice::from_ref(token), 1)[0], outputs[t], "token {t}");
                }
                assert_same_state(&rig, 2, 7);
            }
            no_faults(&rig);
        }
    }
}

#[test]
fn a_flush_may_be_left_to_a_later_step() {
    for schedule in [REPLAYSSM_SCHEDULE_STAGGERED, REPLAYSSM_SCHEDULE_BY_POSITION, REPLAYSSM_SCHEDULE_NONE] {
        for family in FAMILIES {
            let spec = Spec { schedule, keep: 2, t_max: 2, window: 12, ..small(family, REPLAYSSM_FORMAT_F32, false) };
            let rig = Rig::new(spec);
            let mut rng = rng_of(&rig.spec);
            start(&rig, &[2, 3]);
            if schedule != REPLAYSSM_SCHEDULE_STAGGERED {
                assert_eq!(rig.cursor(2).flush_before, 0, "nothing is waited for");
            }
            rig.flush_later(2, 2, 5);
            rig.flush_later(3, 3, 1 << 40);
            let mut position = 0;
            while position < 40 {
                let token = rig.tokens(&mut rng, 1);
                assert_eq!(step(&rig, 2, &token, 1), step(&rig, 3, &token, 1));
                let tag = rig.tags(0, 2)[0];
                // At position 7, 5 is the first token that is not kept.
                match position {
                    0..=6 => assert_eq!(tag, 0, "at {position}"),
                    7..=9 => assert_eq!(tag, 5, "at {position}"),
                    _ if schedule == REPLAYSSM_SCHEDULE_BY_POSITION => {
                        assert!(tag == 5 || tag % 11 == 0, "at {position}: {tag}")
                    }
                    _ => {}
                }
                position += 1;
            }
            go_on_alike(&rig, 2, 3, &mut rng, 10);
        }
    }
}

#[test]
fn case_27_a_flush_with_nothing_to_fold_changes_nothing() {
    for spec in every_pool() {
        let rig = Rig::new(Spec { keep: 3, schedule: REPLAYSSM_SCHEDULE_NONE, ..spec });
        let mut rng = rng_of(&rig.spec);
        start(&rig, &[2]);
        let tokens = rig.tokens(&mut rng, 7);
        feed(&rig, 2, &tokens);
        rig.flush(2, 2, Some(6));
        let (before, flushes) = ((rig.bytes_of(2, false), rig.bytes_of(2, true)), rig.stats().flushes);
        for position in [None, Some(0), Some(5), Some(6)] {
            rig.flush(2, 2, position);
        }
        assert!(before == (rig.bytes_of(2, false), rig.bytes_of(2, true)));
        assert_eq!(rig.stats().flushes, flushes);
        no_faults(&rig);
        // Beyond what is committed there is nothing that could be folded.
        rig.flush(2, 2, Some(8));
        assert_eq!(rig.faults(true).bits, REPLAYSSM_FAULT_POSITION);
        assert!(before == (rig.bytes_of(2, false), rig.bytes_of(2, true)));
        // Tokens that were kept until now cannot be taken back.
        assert!(!rig.rewind(2, 2, 2));
        rig.faults(true);
        assert!(rig.rewind(2, 2, 1));
        assert_eq!(rig.cursor(2).committed, 0);
    }
}

#[test]
fn case_10_another_request_leaves_no_snapshot() {
    let rig = Rig::new(small(REPLAYSSM_FAMILY_GDN, REPLAYSSM_FORMAT_SPLIT32, false));
    let mut rng = rng_of(&rig.spec);
    start(&rig, &[2]);
    let generation = rig.cursor(2).generation;
    let row = Row::new(2, &rig.tokens(&mut rng, 3));
    rig.step(std::slice::from_ref(&row));
    rig.commit(std::slice::from_ref(&row), &[2]);
    assert_eq!(rig.cursor(2).committed, 2);
    rig.fill_part(5, false, 0xEE);
    let poison = rig.bytes_of(5, false);
    rig.snapshot(std::slice::from_ref(&row), false, Some(&[generation + 1]), &[2], &[5]);
    rig.snapshot(std::slice::from_ref(&row), false, Some(&[generation]), &[2], &[-1]);
    no_faults(&rig);
    rig.snapshot(std::slice::from_ref(&row), false, Some(&[generation]), &[2], &[8]);
    assert_eq!(rig.faults(true).bits, REPLAYSSM_FAULT_ID);
    assert!(rig.bytes_of(5, false) == poison);
    // Whatever comes between, the last commit is what counts: a row without tokens reaches nothing.
    let none = Row::new(2, &[]);
    rig.step(std::slice::from_ref(&none));
    rig.commit(std::slice::from_ref(&none), &[0]);
    assert_eq!(rig.cursor(2).committed, 0);
    rig.snapshot(&[row], false, None, &[2], &[5]);
    assert!(rig.bytes_of(5, false) == poison);
    no_faults(&rig);
}

#[test]
fn an_extend_leaves_a_snapshot_where_it_ends() {
    for family in FAMILIES {
        for tail in [0, 3] {
            let rig = Rig::new(small(family, REPLAYSSM_FORMAT_SPLIT32, false));
            let mut rng = rng_of(&rig.spec);
            start(&rig, &[2]);
            let row = Row::new(2, &rig.tokens(&mut rng, 21));
            rig.extend(std::slice::from_ref(&row), tail);
            rig.fill_part(5, false, 0xEE);
            let poison = rig.bytes_of(5, false);
            // Inside of what is folded nothing is held.
            rig.snapshot(std::slice::from_ref(&row), true, None, &[17], &[5]);
            assert_eq!(rig.faults(true).bits, REPLAYSSM_FAULT_POSITION);
            assert!(rig.bytes_of(5, false) == poison);
            for at in 21 - i64::from(tail)..=21 {
                rig.snapshot(std::slice::from_ref(&row), true, None, &[at], &[5]);
                assert!(rig.stored(1, 5) == rig.export(1, 2, 2, Some(at)));
            }
            no_faults(&rig);
        }
    }
}

#[test]
fn what_cannot_be_trusted_is_not_folded_and_makes_no_better_copy() {
    for family in FAMILIES {
        let rig = Rig::new(small(family, REPLAYSSM_FORMAT_SPLIT32, false));
        let mut rng = rng_of(&rig.spec);
        start(&rig, &[2]);
        // An extend that is not committed.
        for layer in 0..2 {
            rig.layer(layer, &[Row::new(2, &rig.tokens(&mut rng, 5))], true, 0);
        }
        let before = rig.bytes_of(2, false);
        rig.fill_part(5, false, 0xEE);
        let poison = rig.bytes_of(5, false);
        rig.flush(2, 2, None);
        rig.copy(REPLAYSSM_COPY_STORE, (2, 2), (5, 5), None);
        assert_eq!(rig.faults(true).bits, REPLAYSSM_FAULT_POSITION);
        assert!(rig.bytes_of(2, false) == before && rig.bytes_of(5, false) == poison);
        rig.copy(REPLAYSSM_COPY_FORK, (2, 2), (6, 6), None);
        assert_eq!(rig.faults(true).bits, REPLAYSSM_FAULT_POSITION);
        let out = rig.step(&[Row::new(6, &rig.tokens(&mut rng, 1))]);
        assert!(out[0][0].iter().all(|&bits| bits == 0));
        assert_eq!(rig.faults(true).bits, REPLAYSSM_FAULT_POSITION);
        start(&rig, &[6]);
        rig.step(&[Row::new(6, &rig.tokens(&mut rng, 1))]);
        no_faults(&rig);
    }
}

#[test]
fn pools_have_slot_ids_of_their_own() {
    // Slot 2 of one pool and slot 5 of the other belong to ring 1; slots 3 and 6 to ring 0, which takes the same tokens.
    let base = small(REPLAYSSM_FAMILY_MAMBA2, REPLAYSSM_FORMAT_SPLIT32, false);
    let spec = Spec { keep: 2, rings: 3, schedule: REPLAYSSM_SCHEDULE_NONE, ..base };
    let a = Rig::new(spec.clone());
    let b = std::mem::ManuallyDrop::new(a.beside(Spec { family: REPLAYSSM_FAMILY_KDA, layers: 1, ..spec }));
    let mut rng = rng_of(&a.spec);
    for place in [REPLAYSSM_WHERE_HOST, REPLAYSSM_WHERE_DEVICE] {
        let all =
            |ring: i64, [of_a, of_b]: [i64; 2]| common::PoolList::new(place, &[(a.pool, of_a), (b.pool, of_b)], ring);
        a.reset_list(&all(1, [2, 5]));
        a.reset_list(&all(0, [3, 6]));
        let feed = |tokens: [&[Vec<Token>]; 2], ring: i64, [of_a, of_b]: [i64; 2]| {
            let row = |slot, tokens: &[Vec<Token>]| Row { slot, ring, tokens: tokens.to_vec(), flush: false };
            let outputs = (a.step(&[row(of_a, tokens[0])]), b.step(&[row(of_b, tokens[1])]));
            a.commit(&[row(of_a, tokens[0])], &[tokens[0].len() as i32]);
            outputs
        };
        let alike = |rng: &mut Rng, n: usize, one: (i64, [i64; 2]), two: (i64, [i64; 2])| {
            for _ in 0..n {
                let tokens = (a.tokens(rng, 2), b.tokens(rng, 2));
                let of_one = feed([&tokens.0, &tokens.1], one.0, one.1);
                assert!(of_one == feed([&tokens.0, &tokens.1], two.0, two.1), "outputs differ");
            }
            for (rig, k) in [(&a, 0), (&*b, 1)] {
                let state = |(ring, slots): (i64, [i64; 2])| rig.export(0, slots[k] as usize, ring as usize, None);
                assert!(state(one) == state(two), "states differ");
            }
        };
        alike(&mut rng, 5, (1, [2, 5]), (0, [3, 6]));
        a.flush_list(&all(1, [2, 5]));
        for (rig, slot) in [(&a, 2), (&*b, 5)] {
            assert!(rig.tags(0, slot).iter().all(|&tag| tag == 8));
        }
        assert!(a.tags(0, 3).iter().all(|&tag| tag == 0), "the other's");
        alike(&mut rng, 1, (1, [2, 5]), (0, [3, 6]));
        assert!(a.rewind_list(&all(1, [2, 5]), 2), "down to the kept tokens");
        assert!(a.rewind_list(&all(0, [3, 6]), 2));
        alike(&mut rng, 3, (1, [2, 5]), (0, [3, 6]));
        // Another ring, and slots that are exchanged between the pools.
        a.copy_of_lists(REPLAYSSM_COPY_FORK, &all(1, [2, 5]), &all(2, [5, 2]), None);
        alike(&mut rng, 3, (2, [5, 2]), (0, [3, 6]));
        // Slots without rings: the list itself has no ids that count.
        let position = a.cursor(2).position;
        a.copy_of_lists(REPLAYSSM_COPY_STORE, &all(2, [5, 2]), &all(99, [1, 4]), None);
        a.copy_of_lists(REPLAYSSM_COPY_STORED, &all(99, [1, 4]), &all(99, [4, 1]), None);
        a.copy_of_lists(REPLAYSSM_COPY_LOAD, &all(99, [4, 1]), &all(1, [2, 5]), Some(position));
        alike(&mut rng, 3, (1, [2, 5]), (0, [3, 6]));
        no_faults(&a);
    }
    replayssm_layers_destroy(b.pool);
}

/// Where pools have slots of their own, what a ring has goes by the ring id alone, whatever slots the entry has.
#[test]
fn rings_go_by_ring_ids_where_pools_are_named() {
    let base = small(REPLAYSSM_FAMILY_MAMBA2, REPLAYSSM_FORMAT_SPLIT32, false);
    let spec = Spec { keep: 2, rings: 3, schedule: REPLAYSSM_SCHEDULE_NONE, ..base };
    let a = Rig::new(spec.clone());
    let b = std::mem::ManuallyDrop::new(a.beside(Spec { family: REPLAYSSM_FAMILY_KDA, layers: 1, ..spec }));
    let mut rng = rng_of(&a.spec);
    for place in [REPLAYSSM_WHERE_HOST, REPLAYSSM_WHERE_DEVICE] {
        // The list's own slot, which is b's, that of a, and the ring.
        let with = |[slot, of_a, ring]: [i64; 3], call: &dyn Fn(&replayssm_list) -> i32| {
            let (slots, of_a, rings) = (heap([slot]), heap([of_a]), heap([ring]));
            let (pools, pool_slots) = ([a.pool.cast_const()], [ids64(&of_a)]);
            let list = desc!(replayssm_list {
                n: 1,
                place: place,
                slots: ids64(&slots),
                rings: ids64(&rings),
                n_pools: 1,
                pools: pools.as_ptr(),
                pool_slots: pool_slots.as_ptr(),
            });
            let status = call(&list);
            // The device reads the ids.
            common::device::sync();
            status
        };
        let reset = |ids: [i64; 3], position: i64| {
            let position = heap([position]);
            let args = desc!(replayssm_reset_args { position: position.as_ptr() });
            // SAFETY: everything lives until the call returns.
            ok(with(ids, &|list| unsafe { replayssm_reset(a.slots, list, &args, null()) }));
        };
        let state = || (a.tags(0, 2)[0], b.tags(0, 5)[0], a.cursor(1).position);
        reset([5, 2, 1], 0);
        reset([-1, 2, 1], 100);
        assert_eq!(state(), (100, 0, 100), "skipped in one pool");
        reset([5, -1, 1], 50);
        assert_eq!(state(), (100, 50, 50), "skipped in the other");
        reset([-1, -1, 1], 7);
        assert_eq!(state(), (100, 50, 7), "skipped in both");
        reset([5, 2, -1], 9);
        assert_eq!(state(), (100, 50, 7), "skipped as a whole");
        // What is loaded has no ring.
        let position = heap([30i64]);
        let args = desc!(replayssm_copy_args { kind: REPLAYSSM_COPY_LOAD, position: position.as_ptr() });
        let load = |from: [i64; 3], to: [i64; 3]| {
            with(from, &|from| {
                // SAFETY: everything lives until the call returns.
                with(to, &|to| unsafe { replayssm_copy(a.slots, from, to, &args, null()) })
            })
        };
        ok(load([-1, -1, -1], [-1, -1, 1]));
        assert_eq!(state(), (100, 50, 30));
        ok(load([-1, -1, -1], [-1, -1, -1]));
        no_faults(&a);

        reset([5, 2, 1], 0);
        let row = Row { slot: 2, ring: 1, tokens: a.tokens(&mut rng, 3), flush: false };
        a.step(std::slice::from_ref(&row));
        a.commit(&[row], &[3]);
        let rewind = |ids: [i64; 3]| {
            let (n, mut done) = (heap([1]), heap([-1]));
            let done_at = done.as_mut_ptr();
            // SAFETY: everything lives until the call returns.
            let status = with(ids, &|list| unsafe { replayssm_rewind(a.slots, list, n.as_ptr(), done_at, null()) });
            // Waits for the work.
            (status, a.cursor(1).position, done[0])
        };
        assert_eq!(rewind([-1, 2, 1]), (REPLAYSSM_OK, 2, 1));
        no_faults(&a);
        for (ids, pool) in [([5, 99, 1], 0), ([99, 2, 1], 1)] {
            let before = a.cursor(1).position;
            let (status, position, done) = rewind(ids);
            if place == REPLAYSSM_WHERE_HOST {
                assert_eq!((status, position, done), (REPLAYSSM_ERROR_INVALID_ARGUMENT, before, -1));
                continue;
            }
            // The others' tags decide.
            assert_eq!((status, position, done), (REPLAYSSM_OK, before - 1, 1));
            let report = a.faults(true);
            let seen = (report.bits, report.count, report.first_slot, report.first_row, report.first_pool);
            assert_eq!(seen, (REPLAYSSM_FAULT_ID, 1, 99, 0, pool));
        }
        no_faults(&a);
    }
    replayssm_layers_destroy(b.pool);
}
