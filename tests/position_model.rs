//! The position rule against an unbounded log: any order of steps, repeated steps, aborts, commits, flush marks, rewinds, resets, extends,
//! imports and exports, for odd capacities and wraps. After every operation the tags, the position and the exported state
//! are what the log says.

#![allow(clippy::multiple_unsafe_ops_per_block, reason = "a test's calls share one promise")]

mod common;

use common::device;
use common::{Rig, Rng, Row, Spec, Token};
use replayssm::ffi::*;

#[global_allocator]
static HEAP: common::device::Heap = common::device::Heap::ON_CUDA;

/// What the rule of folds says, written again from its definition.
struct Model {
    window: i64,
    keep: i64,
    t_max: i64,
    schedule: i32,
    rings: i64,
    position: i64,
    tag: i64,
    /// The first step that may fold this position does; of the staggered schedule, or of a flush that was left to it.
    flush_before: i64,
    generation: u32,
    /// Position 0 of `states`; positions before it were forgotten by a reset or an import.
    origin: i64,
    /// Exact state at every position of the log since the origin, and after the last committed token nothing.
    states: Vec<Vec<u32>>,
}

impl Model {
    fn folds(&self, tokens: i64, mask: bool) -> i64 {
        let foldable = (self.position - self.keep - self.tag).max(0);
        if foldable == 0 || tokens == 0 {
            return 0;
        }
        if mask || (self.tag < self.flush_before && self.flush_before <= self.position - self.keep) {
            return foldable;
        }
        if self.schedule == REPLAYSSM_SCHEDULE_BY_POSITION {
            let p = self.window - self.t_max + 1;
            let due = (self.position - self.keep).div_euclid(p);
            return if due > self.tag.div_euclid(p) { due * p - self.tag } else { 0 };
        }
        if foldable + tokens > self.window { foldable } else { 0 }
    }

    /// Whether a first fold is where the schedule puts it.
    fn check_first_fold(&self, name: &str) {
        let offset = self.flush_before - self.position;
        let is_right = if self.schedule == REPLAYSSM_SCHEDULE_STAGGERED {
            (1..=self.window).contains(&offset)
        } else {
            self.flush_before == 0
        };
        assert!(is_right, "{name}: flush_before is {offset} ahead");
    }

    fn restart(&mut self, position: i64, state: Vec<u32>) {
        (self.position, self.tag, self.origin) = (position, position, position);
        self.states = vec![state];
    }

    fn state(&self, position: i64) -> &Vec<u32> {
        &self.states[(position - self.origin) as usize]
    }
}

struct Run {
    rig: Rig,
    rng: Rng,
    model: Model,
    slot: usize,
    ring: usize,
    reference: usize,
    counts: std::collections::BTreeMap<&'static str, u32>,
}

impl Run {
    fn new(seed: u64, schedule: i32) -> Self {
        let mut rng = Rng(seed);
        let window = 1 + rng.below(20);
        let t_max = 1 + rng.below(window.min(8));
        let keep = [0, 0, 1, 3, 5, 11][rng.below(6)];
        let readout = [REPLAYSSM_READOUT_FULL, REPLAYSSM_READOUT_EXACT, REPLAYSSM_READOUT_HIGH][rng.below(3)];
        let spec = Spec {
            heads: 2,
            headdim: 18,
            dstate: 5,
            groups: 1,
            window,
            t_max,
            keep,
            schedule,
            readout,
            slots: 5,
            rings: 7,
            seed,
            ..Spec::default()
        };
        let rig = Rig::new(spec);
        let (slot, ring, reference) = (rng.below(4), rng.below(6), 4);
        let zero = vec![0u32; 2 * 18 * 5];
        let mut model = Model {
            window: window as i64,
            keep: keep as i64,
            t_max: t_max as i64,
            schedule,
            rings: 7,
            position: 0,
            tag: 0,
            flush_before: 0,
            generation: 0,
            origin: 0,
            states: vec![zero],
        };
        model.flush_before = rig.cursor(ring).flush_before;
        model.check_first_fold("create");
        assert!(model.rings > ring as i64);
        Run { rig, rng, model, slot, ring, reference, counts: Default::default() }
    }

    fn row(&self, tokens: Vec<Vec<Token>>, flush: bool) -> Row {
        Row { slot: self.slot as i64, ring: self.ring as i64, tokens, flush }
    }

    /// Appends the states after each token to the log, computed by the plain update from the state at the end.
    fn log(&mut self, tokens: &[Vec<Token>]) {
        let spare = 6usize;
        self.rig.reset(self.reference, spare, 0);
        let last = self.model.states.last().unwrap().clone();
        self.rig.import(0, self.reference, spare, None, &last);
        for token in tokens {
            let row =
                Row { slot: self.reference as i64, ring: spare as i64, tokens: vec![token.clone()], flush: false };
            self.rig.extend(&[row], 0);
            self.model.states.push(self.rig.export(0, self.reference, spare, None));
        }
    }

    fn operation(&mut self) {
        let spec = self.rig.spec.clone();
        let name = match self.rng.below(26) {
            0..=9 => {
                let n = self.rng.below(spec.t_max + 1);
                let flush = self.rng.below(6) == 0;
                let tokens = self.rig.tokens(&mut self.rng, n);
                let row = self.row(tokens, flush);
                self.step(&row, self.rng.clone().below(3) == 0);
                let accepted = self.rng.below(n + 1);
                self.rig.commit(std::slice::from_ref(&row), &[accepted as i32]);
                self.model.position += accepted as i64;
                self.log(&row.tokens[..accepted]);
                self.snapshot(&row, accepted as i64);
                "step and commit"
            }
            10..=11 => {
                let n = 1 + self.rng.below(spec.t_max);
                let tokens = self.rig.tokens(&mut self.rng, n);
                let row = self.row(tokens, self.rng.clone().below(4) == 0);
                self.step(&row, true);
                "step without commit"
            }
            12..=14 => {
                let n = self.rng.below(spec.window + 2) as i64;
                let target = self.model.position - n;
                let possible = target >= self.model.tag;
                let done = self.rig.rewind(self.slot, self.ring, n as i32);
                assert_eq!(done, possible, "a rewind of {n}");
                if done {
                    self.model.position = target;
                    let keep = (target - self.model.origin + 1) as usize;
                    self.model.states.truncate(keep);
                    "rewind"
                } else {
                    assert_eq!(self.rig.faults(true).bits, REPLAYSSM_FAULT_REWIND);
                    "rewind refused"
                }
            }
            15..=16 => {
                let n = 1 + self.rng.below(2 * spec.window);
                let tail = self.rng.below(spec.window + 1);
                let tokens = self.rig.tokens(&mut self.rng, n);
                let row = self.row(tokens.clone(), false);
                self.rig.extend(&[row], tail as i32);
                self.log(&tokens);
                self.model.position += n as i64;
                self.model.tag = self.model.position - tail.min(n) as i64;
                self.model.flush_before = self.rig.cursor(self.ring).flush_before;
                "extend"
            }
            17 => {
                let position = self.rng.below(1000) as i64;
                self.rig.reset(self.slot, self.ring, position);
                self.model.restart(position, vec![0; 2 * 18 * 5]);
                self.model.generation += 1;
                "reset"
            }
            18 => {
                let state: Vec<u32> = (0..2 * 18 * 5).map(|_| (self.rng.normal() as f32).to_bits()).collect();
                let position = (self.rng.below(2) == 0).then(|| self.rng.below(1000) as i64);
                self.rig.import(0, self.slot, self.ring, position, &state);
                self.model.restart(position.unwrap_or(self.model.position), state);
                "import"
            }
            20 => {
                self.rig.flush(self.slot, self.ring, None);
                self.model.tag = self.model.tag.max(self.model.position - self.model.keep);
                "flush"
            }
            21 => {
                let at = (self.model.position - self.rng.below(spec.window + 2) as i64 + 1).max(0);
                self.rig.flush(self.slot, self.ring, Some(at));
                if at <= self.model.position {
                    self.model.tag = self.model.tag.max(at);
                    "flush to a position"
                } else {
                    assert_eq!(self.rig.faults(true).bits, REPLAYSSM_FAULT_POSITION);
                    "flush refused"
                }
            }
            22 => {
                let at = (self.model.position + self.rng.below(2 * spec.window) as i64 - spec.window as i64).max(0);
                self.rig.flush_later(self.slot, self.ring, at);
                self.model.flush_before = at;
                "flush later"
            }
            23 | 24 => {
                let (slot, ring) = ((self.slot + 1 + self.rng.below(3)) % 4, (self.ring + 1 + self.rng.below(5)) % 6);
                let generation = self.rig.cursor(ring).generation;
                let name = if self.rng.below(2) == 0 {
                    self.rig.copy(REPLAYSSM_COPY_FORK, (self.slot, self.ring), (slot, ring), None);
                    "fork"
                } else {
                    let at =
                        self.model.tag + self.rng.below((self.model.position - self.model.tag + 1) as usize) as i64;
                    let state = self.model.state(at).clone();
                    self.rig.copy(REPLAYSSM_COPY_STORE, (self.slot, self.ring), (self.reference, 99), Some(at));
                    self.rig.copy(REPLAYSSM_COPY_LOAD, (self.reference, 99), (slot, ring), Some(at));
                    self.model.restart(at, state);
                    "load"
                };
                (self.slot, self.ring, self.model.generation) = (slot, ring, generation + 1);
                name
            }
            _ => {
                let at = self.model.position - self.rng.below(2 * spec.window + 4) as i64 + 1;
                let held = (self.model.tag..=self.model.position).contains(&at);
                let got = self.rig.export(0, self.slot, self.ring, Some(at));
                if held {
                    assert!(&got == self.model.state(at), "the state at {at}");
                    "export at a held position"
                } else {
                    assert!(got.iter().all(|&b| b == 0x7FC0_1234), "a refused export wrote");
                    assert_eq!(self.rig.faults(true).bits, REPLAYSSM_FAULT_POSITION);
                    "export refused"
                }
            }
        };
        *self.counts.entry(name).or_default() += 1;
        if matches!(name, "reset" | "import" | "extend" | "fork" | "load") {
            self.model.flush_before = self.rig.cursor(self.ring).flush_before;
            self.model.check_first_fold(name);
        }
    }

    /// A snapshot behind a commit, at a position around what it has reached.
    fn snapshot(&mut self, row: &Row, accepted: i64) {
        let at = self.model.position - self.rng.below(accepted as usize + 3) as i64 + 1;
        self.rig.fill_part(self.reference, false, 0xEE);
        self.rig.snapshot(std::slice::from_ref(row), false, None, &[at], &[self.reference as i64]);
        let stored = self.rig.stored(0, self.reference);
        if at > self.model.position - accepted && at <= self.model.position {
            assert!(&stored == self.model.state(at), "the snapshot at {at}");
        } else {
            assert!(stored.iter().all(|&bits| bits == 0xEEED_EEEE), "a snapshot that was not due");
        }
    }

    fn step(&mut self, row: &Row, again: bool) {
        self.model.tag += self.model.folds(row.tokens.len() as i64, row.flush);
        self.rig.step(std::slice::from_ref(row));
        if again {
            // A repeated step folds nothing more, unless its flush mask is the reason; then there is nothing left.
            self.model.tag += self.model.folds(row.tokens.len() as i64, row.flush);
            self.rig.step(std::slice::from_ref(row));
        }
    }

    fn check(&self) {
        let cursor = self.rig.cursor(self.ring);
        assert_eq!((cursor.position, cursor.generation), (self.model.position, self.model.generation));
        assert!(self.rig.tags(0, self.slot).iter().all(|&t| t == self.model.tag), "tags are not {}", self.model.tag);
        let faults = self.rig.faults(false);
        assert_eq!(faults.bits, 0, "faults {:#x}", faults.bits);
        let got = self.rig.export(0, self.slot, self.ring, None);
        assert!(&got == self.model.states.last().unwrap(), "the state at {}", self.model.position);
        assert!(self.model.position - self.model.tag <= self.model.window + self.model.keep);
    }
}

fn explore(schedule: i32) {
    let mut counts = std::collections::BTreeMap::<&str, u32>::new();
    // On a device every call is waited for.
    for seed in 0..if device::cuda() { 20 } else { 150 } {
        let mut run = Run::new(seed * 3 + schedule as u64, schedule);
        for _ in 0..120 {
            run.operation();
            run.check();
        }
        for (name, n) in run.counts {
            *counts.entry(name).or_default() += n;
        }
    }
    println!("{counts:?}");
    assert_eq!(counts.len(), 15, "every kind of operation was seen");
}

#[test]
fn any_order_of_operations_agrees_with_the_log_staggered() {
    explore(REPLAYSSM_SCHEDULE_STAGGERED);
}

#[test]
fn any_order_of_operations_agrees_with_the_log_by_position() {
    explore(REPLAYSSM_SCHEDULE_BY_POSITION);
}

#[test]
fn any_order_of_operations_agrees_with_the_log_without_schedule() {
    explore(REPLAYSSM_SCHEDULE_NONE);
}

/// Within min(min_rewind, tokens committed since the last import, reset, extend or rewind) a rewind cannot fail.
#[test]
fn a_rewind_within_min_rewind_always_succeeds() {
    let mut rng = Rng(11);
    for keep in [1, 2, 5, 9] {
        let rig = Rig::new(Spec { keep, window: 7, t_max: 4, ..Spec::default() });
        let mut since = 0;
        for _ in 0..400 {
            let n = 1 + rng.below(4);
            let row = Row::new(0, &rig.tokens(&mut rng, n));
            rig.step(std::slice::from_ref(&row));
            let accepted = rng.below(n + 1);
            rig.commit(&[row], &[accepted as i32]);
            since += accepted;
            if rng.below(5) == 0 {
                let back = rng.below(keep.min(since) + 1);
                assert!(rig.rewind(0, 0, back as i32), "{back} of {since} tokens, min_rewind {keep}");
                since = 0;
            }
        }
    }
}

/// A pool that only decodes, one token a step, flushes an even share of its rings in every step.
#[test]
fn staggered_flushes_are_even_over_rings() {
    let rig = Rig::new(Spec { slots: 32, t_max: 1, window: 16, heads: 1, groups: 1, headdim: 16, ..Spec::default() });
    let mut rng = Rng(3);
    let mut before = rig.stats().flushes;
    let mut flushes = Vec::new();
    for _ in 0..80 {
        let rows: Vec<Row> = (0..32).map(|slot| Row::new(slot, &rig.tokens(&mut rng, 1))).collect();
        rig.step(&rows);
        rig.commit(&rows, &[1; 32]);
        let now = rig.stats().flushes;
        flushes.push(now - before);
        before = now;
    }
    assert!(flushes[1..].iter().all(|&n| n == 2), "{flushes:?}");
}
