//! `kernel`: steps of one layer shape after the other.
// SPDX-License-Identifier: MIT OR Apache-2.0

use indicatif::{ProgressBar, ProgressStyle};
use serde_json::json;

use super::Result;
use super::accuracy::Accuracy;
use super::bookkeeping::{self, Bookkeeping};
use super::config::{Config, Format};
use super::floor::{self, Bytes};
use super::machine::Machine;
use super::options::{Common, Kernel, Kernels};
use super::products::Products;
use super::rig::{Check, InputSet, Rig, Timed, Way};
use super::shape::USUAL;
use super::streams::{self, Streams};
use super::svg::Bar;
use super::table::{self, Table};
use crate::backend::cuda::{self, Preferred};
use crate::ffi::{REPLAYSSM_EXEC_PDL, REPLAYSSM_EXEC_PDL_PREFETCH};

/// More than these are not drawn, but a choice of them.
const MOST_BARS: usize = 60;

/// A row of the table.
#[derive(Debug, Clone)]
pub struct Row {
    /// What was timed.
    pub config: Config,
    /// Steps of replay, folds spread.
    pub staggered: Timed,
    /// All rows folding in one step.
    pub aligned: Timed,
    /// The plain update of as many tokens.
    pub plain: Timed,
    /// What a step must move.
    pub bytes: Bytes,
    /// Share of rows that fold in a step.
    pub folding: f64,
    /// Records behind the checkpoint, on average.
    pub history: f64,
    /// Against fp64.
    pub error: Option<f64>,
    /// Against the plain update.
    pub check: Check,
    /// Behind matrix products.
    pub behind: Option<Behind>,
}

/// Layers behind matrix products that write their inputs: microseconds of a pair, less those of the product alone.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Behind {
    /// Of the product alone.
    pub product: f64,
    /// Without flags, with PDL, with PDL and PREFETCH.
    pub us: [f64; 3],
}

impl Row {
    /// Microseconds that the bytes of all rows take in a read stream.
    pub fn floor_us(&self, streams: &Streams) -> f64 {
        self.bytes.total() * self.config.batch as f64 / streams.read * 1e6
    }

    /// The plain update's bytes over its time, as a share of the stream that reads and writes.
    pub fn plain_of_stream(&self, streams: &Streams) -> f64 {
        floor::plain(&self.config).total() * self.config.batch as f64 / (self.plain.us * 1e-6) / streams.update
    }

    fn json(&self, streams: &Streams) -> serde_json::Value {
        let Config { shape, batch, tokens, window, format, readout, io, gate } = self.config;
        let timed = |t: &Timed| {
            json!({"us": t.us, "mean_us": t.mean_us, "peak": t.peak, "steps": t.steps, "repeats": t.repeats, "layers": t.layers,
                "moved_bytes": t.moved})
        };
        let Bytes { checkpoint, folds, history, records, inputs, outputs } = self.bytes;
        json!({
            "shape": shape.to_string(), "family": shape.family.name(), "heads": shape.heads, "rows": shape.rows,
            "columns": shape.columns, "groups": shape.groups,
            "batch": batch, "tokens": tokens, "window": window, "format": format.name(), "readout": readout.name(),
            "io": io.name(), "gate": gate,
            "staggered": timed(&self.staggered), "aligned": timed(&self.aligned), "plain": timed(&self.plain),
            "floor_us": self.floor_us(streams), "of_floor": self.floor_us(streams) / self.staggered.us,
            "times_plain": self.plain.us / self.staggered.us, "plain_of_stream": self.plain_of_stream(streams),
            "bytes": {"checkpoint": checkpoint, "folds": folds, "history": history, "records": records, "inputs": inputs,
                "outputs": outputs, "total": self.bytes.total()},
            "folding": self.folding, "history": self.history,
            "error": self.error, "distance": self.check.error, "distance_bound": self.check.bound,
            "failure": self.check.failure(),
            "behind_product": self.behind.map(|behind| {
                let [none, pdl, prefetch] = behind.us;
                json!({"product_us": behind.product, "no_flags": none, "pdl": pdl, "pdl_prefetch": prefetch})
            }),
        })
    }

    fn bar(&self, streams: &Streams) -> Bar {
        let Config { shape, batch, tokens, format, readout, .. } = self.config;
        Bar {
            group: shape.to_string(),
            label: format!("batch {batch}, T {tokens}, {format} {readout}"),
            us: self.staggered.us,
            floor_us: self.floor_us(streams),
            plain_us: self.plain.us,
        }
    }
}

/// Inputs and plain updates that several rows have in common.
#[derive(Default)]
struct Shared {
    inputs: Option<InputSet>,
    plain: Option<(Config, Timed)>,
}

/// Times one configuration, and checks it.
fn measure(machine: &Machine, common: &Common, config: &Config, shared: &mut Shared) -> Result<Row> {
    let inputs = match shared.inputs.take() {
        Some(inputs) if inputs.is_for(config) => inputs,
        _ => InputSet::new(machine, config)?,
    };
    let inputs = shared.inputs.insert(inputs);
    let repeats = common.repeats(machine);
    let time = |config: &Config, way| -> Result<(Timed, Rig)> {
        let layers = machine.layers(config.batch * config.shape.state() * config.format.bytes());
        let rig = Rig::new(machine, inputs, config, way, layers)?;
        Ok((rig.time(repeats)?, rig))
    };
    let plain_config = config.plain();
    let plain = match shared.plain {
        Some((of, timed)) if of == plain_config => timed,
        _ => time(&plain_config, Way::Plain)?.0,
    };
    shared.plain = Some((plain_config, plain));
    let (aligned, _) = time(config, Way::Aligned)?;
    let (staggered, rig) = time(config, Way::Staggered)?;
    let (folding, history) = (rig.cycle.folding(), rig.cycle.history());
    let bytes = floor::replay(config, &rig.cycle);
    let check = rig.check()?;
    Ok(Row { config: *config, staggered, aligned, plain, bytes, folding, history, error: None, check, behind: None })
}

/// Layers behind products, three ways.
fn behind(machine: &Machine, common: &Common, config: &Config, hidden: usize) -> Result<Behind> {
    let layers = machine.layers(config.batch * config.shape.state() * config.format.bytes());
    let products = Products::new(machine, config, hidden, layers)?;
    products.check()?;
    // Products write these inputs.
    let inputs = InputSet::new(machine, config)?;
    let rig = Rig::new(machine, &inputs, config, Way::Staggered, layers)?;
    let flags = [0, REPLAYSSM_EXEC_PDL, REPLAYSSM_EXEC_PDL | REPLAYSSM_EXEC_PDL_PREFETCH];
    let (pairs, product) = rig.time_behind_products(&products, &flags, common.repeats(machine))?;
    let us = [0, 1, 2].map(|way: usize| pairs[way].us - product);
    Ok(Behind { product, us })
}

/// A bar on the terminal, if there is one.
pub fn progress(n: usize) -> ProgressBar {
    let bar = ProgressBar::new(n as u64);
    let style = ProgressStyle::with_template("{elapsed_precise} {bar:40} {pos}/{len} {msg}");
    bar.set_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()));
    bar
}

/// Runs the command; false if a check has failed.
pub fn run(common: &Common, options: &Kernel) -> Result<bool> {
    let machine = common.machine()?;
    let configs = options.configs(&machine, common.quick)?;
    if options.pdl && !machine.is_cuda() {
        return Err("--pdl is for a GPU; expected the cuda backend".into());
    }
    if let Some(kernels) = options.kernels {
        if !machine.is_cuda() {
            return Err("--kernels is for a GPU; expected the cuda backend".into());
        }
        cuda::prefer(match kernels {
            Kernels::Pipeline => Preferred::Pipeline,
            Kernels::Direct => Preferred::Direct,
        });
    }
    if let Some(tuning) = options.tuning {
        if !machine.is_cuda() {
            return Err("--tuning is for a GPU; expected the cuda backend".into());
        }
        tuning.try_out().map_err(|why| format!("--tuning: {why}"))?;
    }
    let streams = streams::measure(&machine, common.quick)?;
    table::print_machine(&machine, &streams);
    let (mut shared, mut accuracy, mut rows) = (Shared::default(), Accuracy::default(), Vec::new());
    let n_tokens = if common.quick { options.accuracy_tokens.min(128) } else { options.accuracy_tokens };
    let bar = progress(configs.len());
    for config in &configs {
        bar.set_message(format!("{}, batch {}, T {}", config.shape, config.batch, config.tokens));
        let mut row = measure(&machine, common, config, &mut shared)
            .map_err(|why| format!("{}, batch {}, T {}: {why}", config.shape, config.batch, config.tokens))?;
        if n_tokens > 0 {
            row.error = Some(accuracy.error(&machine, config, n_tokens)?);
        }
        if options.pdl {
            row.behind = Some(behind(&machine, common, config, options.hidden)?);
        }
        rows.push(row);
        bar.inc(1);
    }
    bar.finish_and_clear();
    print(&rows, &streams);
    if options.pdl {
        print_behind(&rows, options.hidden);
    }
    let bookkeeping =
        if options.bookkeeping || options.all { Some(bookkeeping::measure(&machine, common.quick)?) } else { None };
    if let Some(Bookkeeping { batch, layers, commit, snapshot, kernel }) = bookkeeping {
        let (commit, snapshot) = (table::us(commit), table::us(snapshot));
        let kernel = kernel.map_or(String::new(), |us| format!("; a kernel that reads 32 KiB {} us", table::us(us)));
        println!(
            "\nbatch {batch}: a commit {commit} us, a snapshot of {layers} layers with nothing due {snapshot} us{kernel}"
        );
    }
    let all: Vec<_> = rows.iter().map(|row| row.json(&streams)).collect();
    let result = json!({
        "rows": all, "accuracy_tokens": n_tokens, "hidden": options.hidden,
        "kernels": options.kernels.map(|kernels| format!("{kernels:?}").to_lowercase()),
        "tuning": options.tuning.map(|t| json!({
            "blocks": t.blocks, "producers": t.producers, "consumers": t.consumers, "folders": t.folders,
            "plane_bytes": t.plane_bytes, "keys": t.keys, "heads_per_item": t.heads_per_item, "items_of_two": t.items_of_two, "items_of_four": t.items_of_four,
        })),
        "bookkeeping": bookkeeping.map(|b| json!({
            "batch": b.batch, "layers": b.layers, "commit_us": b.commit, "snapshot_us": b.snapshot, "kernel_us": b.kernel,
        })),
    });
    table::write_json(common, &machine, Some(&streams), "kernel", result)?;
    // A page's worth of them: of many, a shape of each family, in the format and readout that the library takes by itself.
    let is_usual = |config: &Config| {
        let usual = (Format::Split32, Format::Split32.readout(config.io));
        USUAL.contains(&config.shape) && (config.format, config.readout) == usual
    };
    let drawn = rows.iter().filter(|row| rows.len() <= MOST_BARS || is_usual(&row.config));
    let bars: Vec<_> = drawn.map(|row| row.bar(&streams)).collect();
    table::write_svg(common, &machine, &streams, "Steps of recurrent layers", &bars)?;
    Ok(rows.iter().all(|row| row.check.failure().is_none()))
}

fn print_behind(rows: &[Row], hidden: usize) {
    let mut table = Table::new(&["shape", "batch", "T", "product us", "no flags", "PDL", "PDL, PREFETCH", "state"]);
    for (row, behind) in rows.iter().filter_map(|row| Some((row, row.behind?))) {
        let Config { shape, batch, tokens, format, readout, .. } = row.config;
        let mut cells = vec![shape.to_string(), batch.to_string(), tokens.to_string(), table::us(behind.product)];
        cells.extend(behind.us.map(table::us));
        cells.push(format!("{format} {readout}"));
        table.row(cells);
    }
    println!(
        "\nEach layer behind a matrix product of {hidden} elements a token that writes its inputs; us of a pair less the product alone:"
    );
    table.print();
}

/// Columns of the table.
const COLUMNS: [&str; 15] = [
    "shape", "batch", "T", "W", "state", "plain us", "of r/w", "us", "x plain", "peak", "aligned", "peak", "floor us",
    "of floor", "error",
];

fn print(rows: &[Row], streams: &Streams) {
    let mut table = Table::new(&[&COLUMNS[..], &["KB", "moved KB", "check"]].concat());
    for row in rows {
        let Config { shape, batch, tokens, window, format, readout, .. } = row.config;
        let floor = row.floor_us(streams);
        table.row(vec![
            shape.to_string(),
            batch.to_string(),
            tokens.to_string(),
            window.to_string(),
            format!("{format} {readout}"),
            table::us(row.plain.us),
            format!("{:.0}%", 100.0 * row.plain_of_stream(streams)),
            table::us(row.staggered.us),
            format!("{:.2}", row.plain.us / row.staggered.us),
            format!("{:.2}", row.staggered.peak),
            table::us(row.aligned.us),
            format!("{:.2}", row.aligned.peak),
            table::us(floor),
            format!("{:.0}%", 100.0 * floor / row.staggered.us),
            row.error.map_or("-".into(), |error| format!("{error:.1e}")),
            format!("{:.0}", row.bytes.total() / 1e3),
            format!("{:.0}", row.staggered.moved / 1e3),
            row.check.failure().map_or("ok".into(), |why| format!("FAILED: {why}")),
        ]);
    }
    table.print();
    println!(
        "\nus: per layer and step, a share of the commit included, over whole flush cycles. plain: the plain update (extend) of as many tokens \
         on a fp32 state; of r/w: its bytes, of the stream that reads and writes. peak: the slowest step over the average one. aligned: all \
         rows fold in one step. floor: the fewest bytes, KB per row, over the read stream. moved: of checkpoints and rings, per row, as the library counts them. error: relative L2, fp32 outputs against fp64."
    );
}
