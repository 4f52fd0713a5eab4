//! Pools, slots and steps in plain sentences: lines of the log, and the answer of `replayssm_explain`.

use super::config::{CONV_TILE, DeltaKind, Family, Format, HeadMap, PoolConfig, Readout, Schedule, SlotsConfig};
use super::launch::BackendInfo;
use super::layout::ComponentLayout;
use super::plan::{BLOCK, MAX_PARALLEL, MAX_WARPS, SHARED_BYTES, StepPlan, Traffic, warnings};
use super::position::Rule;
use crate::dtype::Dtype;

fn dtype(dtype: Dtype) -> &'static str {
    match dtype {
        Dtype::F32 => "fp32",
        Dtype::Bf16 => "bf16",
        Dtype::F16 => "fp16",
    }
}

fn format(format: Format) -> &'static str {
    match format {
        Format::Split32 => "SPLIT32",
        Format::F32 => "F32",
        Format::Bf16 => "BF16",
        Format::F16 => "F16",
    }
}

fn readout(readout: Readout) -> &'static str {
    match readout {
        Readout::High => "HIGH",
        Readout::Full => "FULL",
        Readout::Exact => "EXACT",
    }
}

fn count(n: i64, one: &str, many: &str) -> String {
    format!("{n} {}", if n == 1 { one } else { many })
}

/// A pool without its sizes in memory.
pub fn pool(pool: &PoolConfig) -> String {
    let layers = count(pool.n_layers as i64, "layer", "layers");
    let io = format!("{} in, {} out", dtype(pool.io), dtype(pool.out));
    let dims = match &pool.family {
        Family::Mamba2(d) => format!(
            "Mamba-2, {layers} of {} of {} x {} in {}",
            count(d.nheads as i64, "head", "heads"),
            d.headdim,
            d.dstate,
            count(d.ngroups as i64, "group", "groups"),
        ),
        Family::Delta(d) => format!(
            "{}, {layers} of {} of {} x {} with {}{}",
            if d.kind == DeltaKind::Gdn { "GDN" } else { "KDA" },
            count(d.v_heads as i64, "head", "heads"),
            d.v,
            d.k,
            count(d.qk_heads as i64, "key head", "key heads"),
            if d.head_map == HeadMap::Tiled { ", tiled" } else { "" },
        ),
        Family::Conv1d(c) => {
            return format!("convolution, {layers} of {} channels with {} taps; {io}", c.channels, c.width);
        }
    };
    let rounding = match (pool.format.is_lossless(), pool.stochastic) {
        (true, _) => "",
        (false, true) => ", rounded stochastically",
        (false, false) => ", rounded to nearest even",
    };
    let u = match &pool.family {
        Family::Delta(_) if pool.readout != Readout::Exact => format!(" with {} u records", dtype(pool.u_dtype)),
        _ => String::new(),
    };
    format!("{dims}; {io}; {} states{rounding}; {} readout{u}", format(pool.format), readout(pool.readout))
}

/// Window, step and schedule of a slots handle.
pub fn rules(slots: &SlotsConfig) -> String {
    let schedule = match slots.schedule {
        Schedule::Staggered => "first folds staggered by ring".to_owned(),
        Schedule::ByPosition => format!("folds at multiples of {} tokens", Rule::new(slots).period()),
        Schedule::None => "folds only when the window is full".to_owned(),
    };
    format!(
        "window {}, steps of up to {}, {} kept for rewind, {schedule}",
        slots.window,
        count(slots.max_step_tokens.into(), "token", "tokens"),
        count(slots.min_rewind.into(), "token", "tokens"),
    )
}

/// Bytes of one layer's part of a slot and of a ring.
pub fn sizes(layouts: &[ComponentLayout]) -> (u64, u64) {
    let sum = |per_ring| layouts.iter().filter(|l| l.per_ring == per_ring).map(|l| l.bytes).sum();
    (sum(false), sum(true))
}

/// Whole bytes per row and step.
fn average(bytes: u128, rows_and_steps: u128) -> u128 {
    (bytes + rows_and_steps / 2) / rows_and_steps
}

/// Everything about a step of `rows` rows of `tokens` tokens on a pool.
pub fn step(
    backend: &BackendInfo,
    slots: &SlotsConfig,
    config: &PoolConfig,
    layouts: &[ComponentLayout],
    (rows, tokens): (i64, i64),
    plan: &StepPlan,
    aligned: Option<String>,
) -> String {
    let mut text = String::new();
    let mut line = |sentence: String| {
        text.push_str(&sentence);
        text.push('\n');
    };
    line(format!("Pool: {}.", pool(config)));
    let is_conv = matches!(config.family, Family::Conv1d(_));
    let steps = plan.cycle.len() as u128;
    if is_conv {
        line(format!(
            "Kernel: {}; tokens one after the other, the window in registers; nothing is folded.",
            backend.name
        ));
    } else {
        let (name, format) = (readout(config.readout), format(config.format));
        let from = match (config.readout, config.format) {
            (Readout::High, Format::Split32) => "the bf16 plane of the checkpoint",
            _ => "the whole checkpoint",
        };
        line(if plan.parallel {
            format!(
                "Kernel: {}; parallel readout, because the readout is {name} and the step has at most {MAX_PARALLEL} tokens. \
                 It reads {from} ({format}) once for every {BLOCK} tokens.",
                backend.name
            )
        } else if config.readout == Readout::Exact {
            format!(
                "Kernel: {}; serial readout, because the readout is EXACT: tokens one after the other, by the plain update's \
                 arithmetic, from {from} ({format}).",
                backend.name
            )
        } else {
            format!(
                "Kernel: {}; serial readout, because the step has more than {MAX_PARALLEL} tokens, whatever the readout: tokens one \
                 after the other, by the plain update's arithmetic, from {from} ({format}).",
                backend.name
            )
        });
        let folded: Vec<i64> = plan.cycle.iter().map(|(_, folds)| *folds).filter(|folds| *folds > 0).collect();
        let (least, most) = (folded.iter().min().unwrap_or(&0), folded.iter().max().unwrap_or(&0));
        let records = if least == most { least.to_string() } else { format!("{least} to {most}") };
        line(format!(
            "Folds: {}. With all tokens accepted, the checkpoint is rewritten in {} of {}, by {records} records.",
            rules(slots),
            folded.len(),
            count(steps as i64, "step", "steps"),
        ));
    }
    let mut bytes = |name: &str, traffic: Traffic, n: u128| {
        line(format!(
            "{name}: checkpoint {} read, {} written; ring {} read, {} written; {} in all.",
            average(traffic.checkpoint_read, n),
            average(traffic.checkpoint_written, n),
            average(traffic.ring_read, n),
            average(traffic.ring_written, n),
            average(traffic.total(), n),
        ));
    };
    let per_step = steps * rows as u128;
    bytes(
        &format!("Bytes per row, step and layer, on average over a cycle of {}", count(steps as i64, "step", "steps")),
        plan.cycle_traffic,
        per_step,
    );
    let plain = format!("Plain update of {}, which cannot take any back", count(tokens, "token", "tokens"));
    bytes(&plain, plan.plain_traffic, rows as u128);
    line(format!(
        "The step moves {:.3} of the plain update's bytes.",
        plan.cycle_traffic.total() as f64 / per_step as f64 / (plan.plain_traffic.total() as f64 / rows as f64)
    ));
    if backend.device.is_some() {
        line(on_device(config, rows));
        if let Some(launch) = aligned {
            line(format!("With inputs and memory at multiples of 16 bytes instead: {launch}."));
        }
        return rest(text, slots, config, layouts, true);
    }
    let work = plan.work;
    let unit = if is_conv { "channel tiles" } else { "heads" };
    let why = match (backend.n_threads, work.ranges) {
        (1, _) => "the context has no other".to_owned(),
        (_, 1) if work.items <= 1 => "one item is not cut".to_owned(),
        (_, 1) => format!("less than {SHARED_BYTES} bytes are not worth waking another"),
        (n, ranges) => format!("{n} are there, and the items go out in {ranges} ranges"),
    };
    line(format!(
        "Work: {} (rows x {unit}) of {} bytes on {}: {why}.",
        count(work.items, "item", "items"),
        work.item_bytes,
        count(work.threads, "thread", "threads"),
    ));
    rest(text, slots, config, layouts, false)
}

/// How a launch shares out the work of `rows` rows.
fn on_device(config: &PoolConfig, rows: i64) -> String {
    let launch = |blocks: i64, threads: i64, what: &str| {
        format!("Work: one launch, {} of {threads} threads: {what}.", count(rows * blocks, "block", "blocks"))
    };
    match (&config.family, config.family.state()) {
        (Family::Conv1d(c), _) => launch(c.tiles() as i64, CONV_TILE as i64, "a block per row and 128 channels"),
        (_, Some(state)) => {
            let (tiles, warps) = (state.tiles() as i64, state.tiles().min(MAX_WARPS) as i64);
            let blocks = state.heads as i64 * ((tiles + warps - 1) / warps);
            launch(blocks, 32 * warps, "a block per row and head, a warp per 16 rows of the state")
        }
        (_, None) => launch(0, 0, "nothing"),
    }
}

/// Memory, and what makes steps slower than they could be.
fn rest(
    mut text: String,
    slots: &SlotsConfig,
    config: &PoolConfig,
    layouts: &[ComponentLayout],
    on_device: bool,
) -> String {
    let mut line = |sentence: String| {
        text.push_str(&sentence);
        text.push('\n');
    };
    let (slot, ring) = sizes(layouts);
    line(format!(
        "Memory: {slot} bytes per slot and layer, {ring} per ring and layer; {} per slot and {} per ring in {}.",
        slot * config.n_layers as u64,
        ring * config.n_layers as u64,
        count(config.n_layers as i64, "layer", "layers"),
    ));
    for warning in warnings(slots, config, on_device) {
        line(format!("Note: {warning}"));
    }
    text
}
