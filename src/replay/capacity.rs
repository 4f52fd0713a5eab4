//! What a whole model takes before any of it exists: memory, requests for a budget, bytes of a step, the window.

use super::config::{Family, MAX_COUNT, MAX_WINDOW, PoolConfig, SlotsConfig};
use super::launch::Cursor;
use super::layout::{COUNTER_BYTES, Component, components, records};
use super::plan::StepPlan;
use crate::error::{Error, Result};
use crate::memory::collected;

/// What is asked.
#[derive(Debug, Clone, Copy)]
pub struct Question {
    /// Rows of a step.
    pub batch: i64,
    /// Tokens of a row.
    pub tokens: i64,
    /// Bytes that there are.
    pub budget: Option<u64>,
}

/// What a model takes.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ModelPlan {
    /// The window with the fewest bytes per step, or nearly so.
    pub recommended_window: i32,
    /// Of a slot, all pools and layers.
    pub checkpoint_bytes: u64,
    /// Of a ring, all pools and layers.
    pub ring_bytes: u64,
    /// Positions and counters.
    pub fixed_bytes: u64,
    /// Of all slots and rings, and what is fixed.
    pub total_bytes: u64,
    /// The most slots, with as many rings, that the budget has room for.
    pub slots_in_budget: Option<i64>,
    /// Of a sequence where a state is kept for each token of a step instead of a ring.
    pub state_per_draft_bytes: u64,
    /// The most such sequences.
    pub slots_in_budget_state_per_draft: Option<i64>,
    /// That a row moves in a step, on average over a flush cycle.
    pub step_bytes: u64,
    /// That a row moves in the plain update of as many tokens.
    pub plain_step_bytes: u64,
    /// Rows that fold in a step, on average.
    pub flush_share: f64,
}

/// Positions of so many rings, and the counters.
fn fixed(n_rings: u64) -> u64 {
    n_rings * size_of::<Cursor>() as u64 + COUNTER_BYTES
}

fn too_large() -> Error {
    Error::unsupported("the size of the model", "more than an address space", "models below 2^63 bytes")
}

fn sum(parts: impl IntoIterator<Item = Option<u64>>) -> Result<u64> {
    let all = parts.into_iter().try_fold(0u64, |sum, part| sum.checked_add(part?));
    all.filter(|&bytes| bytes <= i64::MAX as u64).ok_or_else(too_large)
}

fn add(to: &mut u64, part: Option<u64>) -> Result<()> {
    *to = sum([Some(*to), part])?;
    Ok(())
}

impl ModelPlan {
    /// The plan of pools on one slots handle.
    pub fn new(slots: &SlotsConfig, pools: &[PoolConfig], question: Question) -> Result<Self> {
        let (mut checkpoint_bytes, mut ring_bytes, mut state_per_draft_bytes) = (0, 0, 0);
        let states = 1 + slots.max_step_tokens as u64;
        for pool in pools {
            let layers = pool.n_layers as u64;
            for c in components(slots, pool)? {
                c.total(slots, pool)?;
                let bytes = if c.per_ring { &mut ring_bytes } else { &mut checkpoint_bytes };
                add(bytes, c.stride.checked_mul(layers))?;
                match (c.component, &pool.family) {
                    (Component::Checkpoint, _) => {
                        add(&mut state_per_draft_bytes, c.stride.checked_mul(layers * states))?;
                    }
                    // Drafts lengthen a convolution's window; it is not kept once for each of them.
                    (Component::Conv, Family::Conv1d(dims)) => {
                        let rows = records(c.component, slots, pool).map_or(0, |(_, rows)| rows as u64);
                        let window = (dims.width - 1) as u64 + slots.max_step_tokens as u64;
                        add(&mut state_per_draft_bytes, (c.bytes / rows.max(1)).checked_mul(window * layers))?;
                    }
                    _ => {}
                }
            }
        }
        let (n_slots, n_rings) = (slots.n_slots as u64, slots.n_rings as u64);
        let fixed_bytes = fixed(n_rings);
        let total_bytes =
            sum([checkpoint_bytes.checked_mul(n_slots), ring_bytes.checked_mul(n_rings), Some(fixed_bytes)])?;
        let each = sum([Some(checkpoint_bytes), Some(ring_bytes), Some(size_of::<Cursor>() as u64)])?;
        let slots_in_budget =
            question.budget.map(|budget| (budget.saturating_sub(COUNTER_BYTES) / each).min(MAX_COUNT as u64) as i64);
        let slots_in_budget_state_per_draft =
            question.budget.map(|budget| (budget / state_per_draft_bytes.max(1)).min(MAX_COUNT as u64) as i64);
        let pools = &distinct(pools)?;
        let traffic = Moved::of(slots, pools, question)?;
        Ok(ModelPlan {
            recommended_window: recommended_window(slots, pools, question)?,
            checkpoint_bytes,
            ring_bytes,
            fixed_bytes,
            total_bytes,
            slots_in_budget,
            state_per_draft_bytes,
            slots_in_budget_state_per_draft,
            step_bytes: traffic.step.round() as u64,
            plain_step_bytes: traffic.plain.round() as u64,
            flush_share: traffic.flush_share,
        })
    }
}

/// Pools that differ in more than their layers, with the layers of all that are like them: a step of a layer is worked out once for each.
fn distinct(pools: &[PoolConfig]) -> Result<Vec<(&PoolConfig, f64)>> {
    let mut all: Vec<(&PoolConfig, f64)> = collected("the list of pools", pools.len(), std::iter::empty())?;
    for pool in pools {
        let layers = pool.n_layers as f64;
        match all.iter_mut().find(|(other, _)| are_alike(other, pool)) {
            Some((_, sum)) => *sum += layers,
            None => all.push((pool, layers)),
        }
    }
    Ok(all)
}

fn are_alike(a: &PoolConfig, b: &PoolConfig) -> bool {
    let PoolConfig { family, n_layers: _, io, out, format, readout, stochastic, u_dtype } = a;
    (family, io, out) == (&b.family, &b.io, &b.out)
        && (format, readout, stochastic, u_dtype) == (&b.format, &b.readout, &b.stochastic, &b.u_dtype)
}

/// Bytes of a row and step, on average over a flush cycle.
struct Moved {
    step: f64,
    plain: f64,
    flush_share: f64,
}

impl Moved {
    fn of(slots: &SlotsConfig, pools: &[(&PoolConfig, f64)], question: Question) -> Result<Self> {
        let mut moved = Moved { step: 0.0, plain: 0.0, flush_share: 0.0 };
        for (pool, layers) in pools {
            let plan = StepPlan::new(slots, pool, question.batch, question.tokens, 1)?;
            let steps = plan.cycle.len() as f64;
            let rows = question.batch as f64;
            moved.step += plan.cycle_traffic.total() as f64 / steps / rows * layers;
            moved.plain += plan.plain_traffic.total() as f64 / rows * layers;
            let folds = plan.cycle.iter().filter(|(_, folds)| *folds > 0).count() as f64;
            moved.flush_share = moved.flush_share.max(folds / steps);
        }
        Ok(moved)
    }
}

/// The smallest window whose bytes per step are within a hundredth of the fewest: a longer one costs memory.
fn recommended_window(slots: &SlotsConfig, pools: &[(&PoolConfig, f64)], question: Question) -> Result<i32> {
    let mut bytes = Vec::new();
    for window in slots.max_step_tokens..=MAX_WINDOW {
        let moved = Moved::of(&SlotsConfig { window, ..slots.clone() }, pools, question)?;
        bytes.push((window, moved.step));
    }
    let fewest = bytes.iter().fold(f64::INFINITY, |fewest, &(_, bytes)| fewest.min(bytes));
    let near = bytes.iter().find(|&&(_, bytes)| bytes <= fewest * 1.01);
    Ok(near.map_or(slots.window, |&(window, _)| window))
}
