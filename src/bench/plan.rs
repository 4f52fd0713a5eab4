//! `plan`: which window is best on this machine. A long window folds seldom and reads many records; the cost model says what that is in
//! bytes, and the measurement what it is in time.
// SPDX-License-Identifier: MIT OR Apache-2.0

use serde_json::json;

use super::Result;
use super::api::PoolDesc;
use super::config::Config;
use super::kernel::progress;
use super::options::{Common, Plan, given_or};
use super::rig::{InputSet, Rig, Timed, Way};
use super::shape::{Shape, TINY, USUAL};
use super::svg::Bar;
use super::table::{self, Table};
use super::{floor, streams};

/// A window of a configuration.
struct Row {
    config: Config,
    bytes: f64,
    floor_us: f64,
    timed: Timed,
    folding: f64,
}

/// All windows of a configuration.
struct Group {
    rows: Vec<Row>,
    plain: Timed,
    /// The window that the library recommends, all tokens being accepted.
    library: i32,
}

impl Group {
    fn best(&self, of: impl Fn(&Row) -> f64) -> usize {
        let best = self.rows.iter().min_by(|a, b| of(a).total_cmp(&of(b)));
        best.map_or(0, |row| row.config.window)
    }

    fn measured(&self) -> usize {
        self.best(|row| row.timed.us)
    }

    fn by_bytes(&self) -> usize {
        self.best(|row| row.bytes)
    }
}

/// Runs the command.
pub fn run(common: &Common, options: &Plan) -> Result<bool> {
    let machine = common.machine()?;
    let usual = if common.quick { &TINY } else { &USUAL };
    let shapes: Vec<Shape> =
        if options.model.is_empty() { usual.to_vec() } else { options.model.iter().map(|model| model.shape).collect() };
    let (batches, tokens) = options.steps.sizes(&machine, common.quick);
    let windows: &[usize] = if common.quick { &[8, 16] } else { &[8, 12, 16, 24, 32, 48, 64, 96] };
    let mut groups = Vec::new();
    for shape in shapes {
        for &batch in &batches {
            for &tokens in &tokens {
                let windows = given_or(&options.window, windows);
                let fitting: Vec<_> = windows.iter().copied().filter(|&window| window >= tokens).collect();
                if fitting.is_empty() {
                    return Err(format!("--window is {windows:?}; expected one of at least --tokens, {tokens}"));
                }
                let configs = fitting.iter().map(|&window| options.steps.config(shape, batch, tokens, window));
                groups.push(configs.collect::<Result<Vec<_>>>()?);
            }
        }
    }
    let streams = streams::measure(&machine, common.quick)?;
    table::print_machine(&machine, &streams);
    let repeats = common.repeats(&machine);
    let bar = progress(groups.iter().map(Vec::len).sum());
    let mut measured = Vec::new();
    for configs in groups {
        let config = configs[0];
        let inputs = InputSet::new(&machine, &config)?;
        let time = |config: &Config, way| -> Result<(Timed, Rig)> {
            let layers = machine.layers(config.batch * config.shape.state() * config.format.bytes());
            let rig = Rig::new(&machine, &inputs, config, way, layers)?;
            Ok((rig.time(repeats)?, rig))
        };
        let (plain, _) = time(&config.plain(), Way::Plain)?;
        let mut rows = Vec::new();
        for config in configs {
            bar.set_message(format!("{}, batch {}, W {}", config.shape, config.batch, config.window));
            let (timed, rig) = time(&config, Way::Staggered)?;
            let bytes = floor::replay(&config, &rig.cycle).total();
            let floor_us = bytes * config.batch as f64 / streams.read * 1e6;
            rows.push(Row { config, bytes, floor_us, timed, folding: rig.cycle.folding() });
            bar.inc(1);
        }
        measured.push(Group { rows, plain, library: PoolDesc::of(&config).recommended_window()? });
    }
    bar.finish_and_clear();
    print(&measured);
    let all: Vec<_> = measured.iter().map(json_of).collect();
    table::write_json(common, &machine, Some(&streams), "plan", json!({"groups": all}))?;
    let bars: Vec<_> = measured.iter().flat_map(bars_of).collect();
    table::write_svg(common, &machine, &streams, "Steps by window", &bars)?;
    Ok(true)
}

fn json_of(group: &Group) -> serde_json::Value {
    let Config { shape, batch, tokens, format, readout, .. } = group.rows[0].config;
    let rows: Vec<_> = group
        .rows
        .iter()
        .map(|row| {
            json!({"window": row.config.window, "bytes": row.bytes, "floor_us": row.floor_us, "us": row.timed.us,
                "peak": row.timed.peak, "folding": row.folding})
        })
        .collect();
    json!({
        "shape": shape.to_string(), "batch": batch, "tokens": tokens, "format": format.name(), "readout": readout.name(),
        "plain_us": group.plain.us, "windows": rows, "recommended": group.measured(), "by_bytes": group.by_bytes(),
        "library": group.library,
    })
}

fn bars_of(group: &Group) -> Vec<Bar> {
    let bar = |row: &Row| Bar {
        group: format!("{}, batch {}, T {}", row.config.shape, row.config.batch, row.config.tokens),
        label: format!("W {}", row.config.window),
        us: row.timed.us,
        floor_us: row.floor_us,
        plain_us: group.plain.us,
    };
    group.rows.iter().map(bar).collect()
}

fn print(groups: &[Group]) {
    let mut table = Table::new(&[
        "shape",
        "batch",
        "T",
        "state",
        "W",
        "KB per row",
        "folding rows",
        "floor us",
        "us",
        "peak",
        "x plain",
        "",
    ]);
    for group in groups {
        for row in &group.rows {
            let Config { shape, batch, tokens, window, format, readout, .. } = row.config;
            table.row(vec![
                shape.to_string(),
                batch.to_string(),
                tokens.to_string(),
                format!("{format} {readout}"),
                window.to_string(),
                format!("{:.0}", row.bytes / 1e3),
                format!("{:.1}%", 100.0 * row.folding),
                table::us(row.floor_us),
                table::us(row.timed.us),
                format!("{:.2}", row.timed.peak),
                format!("{:.2}", group.plain.us / row.timed.us),
                if window == group.measured() { "best" } else { "" }.to_owned(),
            ]);
        }
    }
    table.print();
    println!();
    for group in groups {
        let Config { shape, batch, tokens, .. } = group.rows[0].config;
        println!(
            "{shape}, batch {batch}, T {tokens}: window {} is the fastest here, {} moves the fewest bytes; replayssm_plan, with all tokens \
             accepted, says {}.",
            group.measured(),
            group.by_bytes(),
            group.library
        );
    }
}
