//! Flush cycles: which rows fold in which step, simulated on the host by the library's own rule of positions.
//!
//! What a step costs differs from step to step, so that times and floors are averages over whole cycles. Steps accept a part of their
//! tokens, by a cycle of counts; rows and steps are in the same place again after a number of steps that the simulation finds.
// SPDX-License-Identifier: MIT OR Apache-2.0

use crate::replay::position::{Rule, StepView};

/// Steps whose inputs and counts differ; afterwards the same ones come again.
pub const PHASES: usize = 4;

/// Steps after which a search for a cycle is given up.
const LONGEST: usize = 4096;

/// How many of a step's tokens are accepted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Acceptance {
    counts: [i32; PHASES],
}

impl Acceptance {
    /// Of steps of `tokens` tokens: all at 1, else three quarters on average, one fewer and one more in turns. 4: 2, 3, 4, 3; 8: 5, 6, 7, 6.
    pub fn of(tokens: usize) -> Self {
        let tokens = tokens as i32;
        let mean = (3 * tokens + 2) / 4;
        let counts = [mean - 1, mean, mean + 1, mean].map(|count| count.clamp(1, tokens));
        Acceptance { counts }
    }

    /// All tokens of every step.
    pub fn all(tokens: usize) -> Self {
        Acceptance { counts: [tokens as i32; PHASES] }
    }

    /// Accepted tokens of a row in a phase. With `spread`, neighbouring rows are in different places of the cycle.
    pub fn count(&self, phase: usize, row: usize, spread: bool) -> i32 {
        self.counts[(phase + if spread { row } else { 0 }) % PHASES]
    }

    /// On average.
    pub fn mean(&self) -> f64 {
        f64::from(self.counts.iter().sum::<i32>()) / PHASES as f64
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Row {
    position: i64,
    tag: i64,
    flush_before: i64,
}

/// What rows do in one step, together.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Seen {
    /// Rows that fold.
    pub folding: usize,
    /// Records that are folded.
    pub folded: u64,
    /// Records behind the checkpoint that are not folded: the readout's history.
    pub history: u64,
}

/// Positions and checkpoints of a batch's rows, from a reset on.
#[derive(Debug, Clone)]
pub struct Simulation {
    rule: Rule,
    rows: Vec<Row>,
    tokens: usize,
    acceptance: Acceptance,
    spread: bool,
    step: usize,
}

impl Simulation {
    /// Rows 0, 1, ... on the rings of these numbers, reset to position 0.
    pub fn new(rule: Rule, rows: usize, tokens: usize, acceptance: Acceptance, spread: bool) -> Self {
        let row = |ring| Row { position: 0, tag: 0, flush_before: rule.flush_before(0, ring as i64) };
        Simulation { rule, rows: (0..rows).map(row).collect(), tokens, acceptance, spread, step: 0 }
    }

    /// A step and its commit.
    pub fn step(&mut self) -> Seen {
        let mut seen = Seen::default();
        for (i, row) in self.rows.iter_mut().enumerate() {
            let Row { position, tag, flush_before } = *row;
            let view = StepView { position, tag, tokens: self.tokens as i64, flush_before, flush: false };
            let folds = self.rule.folds(view);
            seen.folding += usize::from(folds > 0);
            seen.folded += folds as u64;
            row.tag += folds;
            seen.history += (position - row.tag) as u64;
            row.position += i64::from(self.acceptance.count(self.step % PHASES, i, self.spread));
        }
        self.step += 1;
        seen
    }

    /// What decides about all that follows.
    fn place(&self) -> Vec<(i64, i64)> {
        let of = |row: &Row| (row.position - row.tag, (row.flush_before - row.tag).max(0));
        self.rows.iter().map(of).collect()
    }
}

/// A whole flush cycle of a batch.
#[derive(Debug, Clone, PartialEq)]
pub struct Cycle {
    /// Steps in front of it, from a reset on.
    pub warm_up: usize,
    /// Its steps, from then on: what rows do in each.
    pub steps: Vec<Seen>,
    /// Whether rows are then where they were. If not, it is a long run of steps.
    pub is_whole: bool,
    rows: usize,
}

impl Cycle {
    /// Finds the cycle behind two windows of steps.
    pub fn find(mut simulation: Simulation) -> Self {
        let warm_up = (2 * simulation.rule.window as usize).next_multiple_of(PHASES);
        for _ in 0..warm_up {
            simulation.step();
        }
        let begin = simulation.place();
        let mut steps = Vec::new();
        let rows = simulation.rows.len();
        while steps.len() < LONGEST {
            steps.push(simulation.step());
            if steps.len().is_multiple_of(PHASES) && simulation.place() == begin {
                return Cycle { warm_up, steps, is_whole: true, rows };
            }
        }
        steps.truncate(2 * warm_up);
        Cycle { warm_up, steps, is_whole: false, rows }
    }

    fn mean(&self, of: impl Fn(&Seen) -> f64) -> f64 {
        self.steps.iter().map(of).sum::<f64>() / (self.steps.len() * self.rows) as f64
    }

    /// Share of rows that fold in a step.
    pub fn folding(&self) -> f64 {
        self.mean(|seen| seen.folding as f64)
    }

    /// Records of a row that are folded, on average per step.
    pub fn folded(&self) -> f64 {
        self.mean(|seen| seen.folded as f64)
    }

    /// Records of a row that its readout sees beside the step's own, on average per step.
    pub fn history(&self) -> f64 {
        self.mean(|seen| seen.history as f64)
    }
}
