//! When checkpoints are folded: how evenly over the steps of a batch, and whether that depends on who else is in it.

#![allow(clippy::multiple_unsafe_ops_per_block, reason = "a test's calls share one promise")]

mod common;

use common::{Rig, Rng, Row, Spec, no_faults};
use replayssm::ffi::*;

#[global_allocator]
static HEAP: common::device::Heap = common::device::Heap::ON_CUDA;

const BATCH: usize = 256;
const WINDOW: usize = 16;

fn small(schedule: i32, t_max: usize) -> Spec {
    Spec {
        heads: 1,
        groups: 1,
        headdim: 8,
        dstate: 8,
        gate: false,
        slots: BATCH,
        window: WINDOW,
        t_max,
        schedule,
        ..Spec::default()
    }
}

/// Tiles folded in each of `steps` steps of one token of all requests.
fn flushes(rig: &Rig, rng: &mut Rng, steps: usize) -> Vec<u64> {
    let mut before = rig.stats().flushes;
    let token = rig.tokens(rng, 1);
    let rows: Vec<Row> = (0..BATCH).map(|slot| Row::new(slot, &token)).collect();
    let mut count = || {
        rig.step(&rows);
        rig.commit(&rows, &[1; BATCH]);
        let now = rig.stats().flushes;
        let folded = now - before;
        before = now;
        folded
    };
    (0..steps).map(|_| count()).collect()
}

/// The most in one step over the mean.
fn peak(flushes: &[u64]) -> f64 {
    let mean = flushes.iter().sum::<u64>() as f64 / flushes.len() as f64;
    assert!((mean - BATCH as f64 / WINDOW as f64).abs() < 0.1, "{mean} on average");
    flushes.iter().copied().max().unwrap_or(0) as f64 / mean
}

#[test]
fn staggered_requests_fold_evenly() {
    let rig = Rig::new(small(REPLAYSSM_SCHEDULE_STAGGERED, 1));
    let mut rng = Rng(1);
    flushes(&rig, &mut rng, 1);
    let peak = peak(&flushes(&rig, &mut rng, 1000));
    assert!(peak <= 1.1, "{peak}");
    no_faults(&rig);
}

/// Without a schedule, requests that start together fold together: what the others avoid.
#[test]
fn without_a_schedule_all_fold_at_once() {
    let rig = Rig::new(small(REPLAYSSM_SCHEDULE_NONE, 1));
    let peak = peak(&flushes(&rig, &mut Rng(2), 1000)[40..40 + 60 * WINDOW]);
    assert!(peak > 15.9, "{peak}");
}

/// Forks have one history, whose space ends for all of them in one step at most; from then on they fold as evenly as others.
#[test]
fn forks_are_staggered_anew() {
    for history in [1, 5, 12] {
        let rig = Rig::new(small(REPLAYSSM_SCHEDULE_STAGGERED, 1));
        let mut rng = Rng(3 + history as u64);
        let tokens = rig.tokens(&mut rng, WINDOW + history);
        for token in &tokens {
            let row = [Row::new(0, std::slice::from_ref(token))];
            rig.step(&row);
            rig.commit(&row, &[1]);
        }
        let others: Vec<i64> = (1..BATCH as i64).collect();
        rig.copy_lists(REPLAYSSM_COPY_FORK, &vec![0; others.len()], &others, None, None);
        flushes(&rig, &mut rng, WINDOW);
        let peak = peak(&flushes(&rig, &mut rng, 1000));
        assert!(peak <= 1.1, "{peak} with a history of {history}");
        no_faults(&rig);
    }
}

/// Where the checkpoint of slot 7 stands after each of its steps, beside other requests that come, go and are accepted in part.
fn stands(others: usize, accepts: &[i32]) -> Vec<i64> {
    let rig = Rig::new(small(REPLAYSSM_SCHEDULE_BY_POSITION, 4));
    let mut rng = Rng(9 + others as u64);
    let tokens = rig.tokens(&mut rng, 4);
    let mut seen = Vec::new();
    for step in 0..120 {
        let mut rows = vec![Row::new(7, &tokens)];
        let mut counts = vec![accepts[step % accepts.len()]];
        for slot in 8..8 + others {
            if rng.below(3) == 0 {
                continue;
            }
            if rng.below(20) == 0 {
                rig.reset(slot, slot, rng.below(50) as i64);
            }
            let n = 1 + rng.below(4);
            rows.push(Row::new(slot, &tokens[..n]));
            counts.push(rng.below(n + 1) as i32);
        }
        rig.step(&rows);
        rig.commit(&rows, &counts);
        seen.extend(rig.tags(0, 7));
    }
    no_faults(&rig);
    seen
}

#[test]
fn by_position_a_request_folds_at_the_same_tokens_whoever_is_beside_it() {
    let alone = stands(0, &[3, 1, 4, 0, 2]);
    assert!(alone.iter().collect::<std::collections::BTreeSet<_>>().len() > 10);
    assert_eq!(alone, stands(1, &[3, 1, 4, 0, 2]));
    assert_eq!(alone, stands(40, &[3, 1, 4, 0, 2]));
    // Whatever is accepted, folds end at multiples of W - T_max + 1.
    let period = WINDOW as i64 - 3;
    for accepts in [[4, 4, 4, 4, 4], [1, 1, 1, 1, 1], [3, 1, 4, 0, 2]] {
        assert!(stands(5, &accepts).iter().all(|tag| tag % period == 0));
    }
}
