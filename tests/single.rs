//! Extends and EXACT steps of one token: inputs at multiples of 16 bytes, which a GPU has kernels of its own for, beside the same calls on inputs at
//! odd places, which it does not have them for, and beside the CPU. Outputs, memory, faults and counters are equal by bytes in any mix of
//! rows.

#![allow(clippy::multiple_unsafe_ops_per_block, reason = "a test's calls share one promise")]

mod common;

use common::{FAMILIES, Rig, Rng, Row, Skip, Spec, device, encode};
use replayssm::ffi::*;

#[global_allocator]
static HEAP: device::Heap = device::Heap::ON_CUDA;

const FORMATS: [i32; 3] = [REPLAYSSM_FORMAT_F32, REPLAYSSM_FORMAT_SPLIT32, REPLAYSSM_FORMAT_BF16];

fn aligned(family: i32, seed: u64) -> Spec {
    Spec {
        family,
        heads: 4,
        groups: 2,
        headdim: 32,
        dstate: 128,
        t_max: 1,
        contiguous: true,
        layers: 2,
        window: 6,
        slots: 6,
        seed,
        ..Spec::default()
    }
}

/// Launches of the kernels that this is about, by this thread.
fn launches() -> u64 {
    replayssm::backend::cuda::single_launches()
}

struct Rigs {
    spec: Spec,
    rigs: [Rig; 3],
    rng: Rng,
    round: usize,
}

impl Rigs {
    fn new(spec: Spec) -> Self {
        let odd = Spec { contiguous: false, ..spec.clone() };
        let cpu = Rig::on_backend(REPLAYSSM_BACKEND_CPU, spec.clone()).expect("a CPU rig");
        let rigs = [Rig::new(spec.clone()), Rig::new(odd), cpu];
        let mut all = Rigs { rng: Rng(spec.seed), spec, rigs, round: 0 };
        for slot in 0..all.spec.slots {
            all.reset(slot);
        }
        all
    }

    /// The same on all rigs, with equal results.
    fn same<T: PartialEq>(&self, what: &str, call: impl Fn(&Rig) -> T) -> T {
        let [one, other, cpu] = &self.rigs;
        let first = call(one);
        for (rig, name) in [(other, "at odd places"), (cpu, "on the CPU")] {
            assert!(call(rig) == first, "round {}: {what} {name}: {:?}", self.round, self.spec);
        }
        first
    }

    /// A request starts on a slot, now and then behind 2^32 tokens.
    fn reset(&mut self, slot: usize) {
        let far = if self.rng.below(3) == 0 { 1 << 40 } else { 0 };
        let position = far + self.rng.below(1000) as i64;
        self.same("a reset", |rig| rig.reset(slot, slot, position));
    }

    /// Rows of all requests but one, some of which have no token or no slot, in any order. Some gates decay fast.
    fn rows(&mut self) -> Vec<Row> {
        let mut slots: Vec<usize> = (0..self.spec.slots).collect();
        for i in (1..slots.len()).rev() {
            slots.swap(i, self.rng.below(i + 1));
        }
        let fast = if self.spec.raw_gates() || !self.spec.is_delta() { 4.0 } else { -3.0 };
        let (spec, rng, rig) = (&self.spec, &mut self.rng, &self.rigs[0]);
        let mut row = |slot: usize| {
            let mut tokens = rig.tokens(rng, usize::from(rng.clone().below(6) > 0));
            let scale = rng.below(3);
            for token in tokens.iter_mut().flatten() {
                for bits in &mut token.dt {
                    if scale == 0 && rng.below(4) == 0 {
                        *bits = encode(spec.dt_dtype, fast);
                    }
                }
            }
            // What is not finite stays in its own row of the state.
            if !spec.checks && rng.below(20) == 0 {
                for token in tokens.iter_mut().flatten() {
                    let i = rng.below(token.x.len());
                    token.x[i] = [0x7F80, 0xFFC1][rng.below(2)];
                }
            }
            let mut row = Row { flush: rng.below(9) == 0, ..Row::new(slot, &tokens) };
            if rng.below(8) == 0 {
                (row.slot, row.flush) = (-1, false);
            }
            row
        };
        slots[1..].iter().map(|&slot| row(slot)).collect()
    }

    fn layer(&self, layer: usize, rows: &[Row], extend: bool) {
        let before = launches();
        let outputs = self.same("outputs", |rig| rig.layer(layer, rows, extend, 0));
        // One of the three.
        let is_used = device::cuda() && rows.iter().any(|row| !row.tokens.is_empty());
        assert_eq!(launches() - before, u64::from(is_used), "launches: {:?}", self.spec);
        assert!(outputs.len() == rows.len());
    }

    /// All bytes, faults and what was counted.
    fn compare(&self) {
        for layer in 0..self.spec.layers {
            for c in self.rigs[0].components() {
                for index in 0..self.spec.slots {
                    self.same(&format!("component {} of layer {layer}, slot {index}", c.kind), |rig| {
                        rig.part(c.kind, layer, index)
                    });
                }
            }
        }
        self.same("faults", |rig| rig.faults(false).bits);
        self.same("flushed tiles", |rig| rig.stats().flushes);
        // The CPU counts as it reads.
        let [bytes, others] = [0, 1].map(|i| {
            let s = self.rigs[i].stats();
            [s.checkpoint_bytes_read, s.checkpoint_bytes_written, s.ring_bytes_read, s.ring_bytes_written]
        });
        assert!(bytes == others || !device::cuda(), "round {}: {bytes:?}, not {others:?}", self.round);
    }

    fn run(&mut self, rounds: usize) {
        for round in 0..rounds {
            self.round = round;
            let rows = self.rows();
            let extend = self.spec.readout != REPLAYSSM_READOUT_EXACT || self.rng.below(5) == 0;
            self.layer(0, &rows, extend);
            // An abandoned step of one layer now and then: tiles of layers stand apart.
            if extend || self.rng.below(7) > 0 {
                self.layer(1, &rows, extend);
                let counts: Vec<i32> =
                    rows.iter().map(|row| i32::from(!row.tokens.is_empty() && self.rng.below(5) > 0)).collect();
                self.same("a commit", |rig| {
                    rig.commit_batch(&rows, extend, 0, (!extend).then_some(&counts[..]));
                });
            }
            if self.rng.below(9) == 0 {
                let slot = self.rng.below(self.spec.slots);
                self.reset(slot);
            }
            if round % 5 == 0 {
                self.compare();
            }
        }
        self.compare();
        for layer in 0..self.spec.layers {
            self.same("states", |rig| rig.export(layer, 1, 1, None));
        }
        assert_eq!(self.rigs[0].faults(false).bits, 0);
    }
}

fn every_format(spec: &Spec, rounds: usize) {
    for format in FORMATS {
        Rigs::new(Spec { format, ..spec.clone() }).run(rounds);
    }
}

fn few(family: i32) {
    let spec = Spec { format: REPLAYSSM_FORMAT_SPLIT32, ..aligned(family, 8) };
    Rigs::new(Spec { heads: 2, groups: 1, slots: 3, ..spec }).run(24);
}

/// Needs the kernels of SPLIT32 alone.
#[test]
fn few_of_mamba2() {
    few(REPLAYSSM_FAMILY_MAMBA2);
}

/// As above.
#[test]
fn few_of_gdn() {
    few(REPLAYSSM_FAMILY_GDN);
}

/// As above.
#[test]
fn few_of_kda() {
    few(REPLAYSSM_FAMILY_KDA);
}

#[test]
fn steps_and_extends() {
    for family in FAMILIES {
        every_format(&aligned(family, 1), 40);
    }
}

/// Their steps go another way.
#[test]
fn extends_of_pools_with_other_readouts() {
    for family in FAMILIES {
        every_format(&Spec { readout: REPLAYSSM_READOUT_FULL, ..aligned(family, 2) }, 10);
    }
}

#[test]
fn rows_of_other_sizes() {
    for family in FAMILIES {
        for (headdim, heads, groups) in [(24, 3, 3), (8, 4, 1), (80, 2, 1), (128, 2, 2), (136, 2, 1)] {
            let format = FORMATS[headdim / 8 % 3];
            Rigs::new(Spec { headdim, heads, groups, slots: 4, format, ..aligned(family, 3) }).run(12);
        }
    }
}

#[test]
fn windows_and_kept_tokens() {
    for (window, keep, schedule) in [
        (1, 0, REPLAYSSM_SCHEDULE_STAGGERED),
        (5, 2, REPLAYSSM_SCHEDULE_BY_POSITION),
        (16, 0, REPLAYSSM_SCHEDULE_NONE),
        (17, 3, REPLAYSSM_SCHEDULE_BY_POSITION),
        (40, 5, REPLAYSSM_SCHEDULE_STAGGERED),
    ] {
        for (family, format) in FAMILIES.into_iter().zip([FORMATS, FORMATS].concat()) {
            let rounds = 2 * (window + keep) + 10;
            let spec = Spec { window, keep, schedule, format, headdim: 16, slots: 3, ..aligned(family, 4) };
            Rigs::new(spec).run(rounds);
        }
    }
}

#[test]
fn options() {
    let mamba2 = aligned(REPLAYSSM_FAMILY_MAMBA2, 5);
    let (dt_dtype, out) = (REPLAYSSM_DTYPE_BF16, REPLAYSSM_DTYPE_BF16);
    let mut specs = vec![
        Spec { skip: Skip::PerElement, out, ..mamba2.clone() },
        Spec { gate: false, skip: Skip::None, bias: false, out: REPLAYSSM_DTYPE_F16, ..mamba2.clone() },
        Spec { softplus: false, dt_dtype, param_dtype: REPLAYSSM_DTYPE_F16, bias: false, ..mamba2.clone() },
        Spec { ids: REPLAYSSM_DTYPE_I32, checks: true, ..mamba2 },
    ];
    for family in FAMILIES.into_iter().filter(|&family| family != REPLAYSSM_FAMILY_MAMBA2) {
        let delta = aligned(family, 6);
        // GDN has no such gate.
        let bounded =
            [REPLAYSSM_GATE_SOFTPLUS, REPLAYSSM_GATE_LOWER_BOUND][usize::from(family == REPLAYSSM_FAMILY_KDA)];
        specs.extend([
            Spec { gate_kind: REPLAYSSM_GATE_LOG_DECAY, l2norm: false, beta_processed: true, out, ..delta.clone() },
            Spec { gate_kind: bounded, dt_dtype, scale: 0.3, ..delta.clone() },
            Spec { bias: false, head_map: REPLAYSSM_HEAD_MAP_TILED, param_dtype: REPLAYSSM_DTYPE_F16, ..delta.clone() },
            Spec { ids: REPLAYSSM_DTYPE_I32, checks: true, ..delta },
        ]);
    }
    for (i, spec) in specs.into_iter().enumerate() {
        Rigs::new(Spec { format: FORMATS[i % 3], ..spec }).run(16);
    }
}

/// Between an extend and its commit tags stand past positions: a step writes zeros and nothing else.
#[test]
fn tags_that_cannot_be_trusted() {
    for family in FAMILIES {
        for format in FORMATS {
            let mut all = Rigs::new(Spec { format, ..aligned(family, 7) });
            let rows: Vec<Row> = (0..3).map(|slot| Row::new(slot, &all.rigs[0].tokens(&mut all.rng, 1))).collect();
            all.layer(0, &rows[..2], true);
            all.compare();
            for extend in [false, true] {
                all.layer(0, &rows, extend);
                all.compare();
                assert_eq!(all.rigs[0].faults(false).bits, REPLAYSSM_FAULT_POSITION);
            }
        }
    }
}
