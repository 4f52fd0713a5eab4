//! `model`: the recurrent layers of whole models, as a decode step runs them: all in one graph, with their commit.
// SPDX-License-Identifier: MIT OR Apache-2.0

use serde_json::json;

use super::Result;
use super::config::{Config, usual_window};
use super::kernel::progress;
use super::machine::Machine;
use super::options::{Common, ModelOptions};
use super::rig::{InputSet, Rig, Timed, Way};
use super::shape::{MODELS, Model};
use super::svg::Bar;
use super::table::{self, Table};
use super::{floor, streams};

/// A model's step.
struct Row {
    model: Model,
    config: Config,
    plain: Timed,
    replay: Timed,
    /// Per layer, where as many layers are stepped as states leave no cache.
    alone: Timed,
    floor_us: f64,
    failure: Option<String>,
}

fn measure(machine: &Machine, common: &Common, model: Model, layers: usize, config: &Config, read: f64) -> Result<Row> {
    let inputs = InputSet::new(machine, config)?;
    let repeats = common.repeats(machine);
    let time = |config: &Config, way, layers| -> Result<(Timed, Rig)> {
        let rig = Rig::new(machine, &inputs, config, way, layers)?;
        Ok((rig.time(repeats)?, rig))
    };
    let (plain, _) = time(&config.plain(), Way::Plain, layers)?;
    let cold = machine.layers(config.batch * config.shape.state() * config.format.bytes());
    let (alone, _) = time(config, Way::Staggered, cold)?;
    let (replay, rig) = time(config, Way::Staggered, layers)?;
    let floor_us = floor::replay(config, &rig.cycle).total() * config.batch as f64 / read * 1e6;
    let failure = rig.check()?.failure();
    Ok(Row { model, config: *config, plain, replay, alone, floor_us, failure })
}

/// Runs the command; false if a check has failed.
pub fn run(common: &Common, options: &ModelOptions) -> Result<bool> {
    let machine = common.machine()?;
    let known = || MODELS.into_iter().filter(|model| model.layers.is_some()).collect();
    let models: Vec<Model> = if options.model.is_empty() { known() } else { options.model.clone() };
    let (batches, tokens) = options.steps.sizes(&machine, common.quick);
    let mut todo = Vec::new();
    for &model in &models {
        let layers = options.layers.or(model.layers.map(|n| if common.quick { 2 } else { n })).ok_or_else(|| {
            format!("--model is {}, whose layers are not known; expected --layers beside it", model.name)
        })?;
        for &batch in &batches {
            for &tokens in &tokens {
                let window = options.window.unwrap_or(usual_window(tokens));
                if window < tokens {
                    return Err(format!("--window is {window}; expected at least --tokens, {tokens}"));
                }
                let shape = if common.quick { model.shape.few() } else { model.shape };
                todo.push((model, layers, options.steps.config(shape, batch, tokens, window)?));
            }
        }
    }
    let streams = streams::measure(&machine, common.quick)?;
    table::print_machine(&machine, &streams);
    let (bar, mut rows) = (progress(todo.len()), Vec::new());
    for (model, layers, config) in &todo {
        bar.set_message(format!("{}, batch {}, T {}", model.name, config.batch, config.tokens));
        let row = measure(&machine, common, *model, *layers, config, streams.read)
            .map_err(|why| format!("{}, batch {}, T {}: {why}", model.name, config.batch, config.tokens))?;
        rows.push(row);
        bar.inc(1);
    }
    bar.finish_and_clear();
    print(&rows);
    let all: Vec<_> = rows.iter().map(json_of).collect();
    table::write_json(common, &machine, Some(&streams), "model", json!({"rows": all}))?;
    let bars: Vec<_> = rows.iter().map(bar_of).collect();
    table::write_svg(common, &machine, &streams, "Recurrent layers of models", &bars)?;
    Ok(rows.iter().all(|row| row.failure.is_none()))
}

fn json_of(row: &Row) -> serde_json::Value {
    let Config { shape, batch, tokens, window, format, readout, .. } = row.config;
    json!({
        "model": row.model.name, "shape": shape.to_string(), "layers": row.replay.layers, "batch": batch, "tokens": tokens,
        "window": window, "format": format.name(), "readout": readout.name(),
        "plain_step_us": row.plain.us * row.plain.layers as f64, "step_us": row.replay.us * row.replay.layers as f64,
        "plain_layer_us": row.plain.us, "layer_us": row.replay.us, "layer_alone_us": row.alone.us, "peak": row.replay.peak,
        "floor_us": row.floor_us, "failure": row.failure,
    })
}

fn bar_of(row: &Row) -> Bar {
    Bar {
        group: format!("{}, {} layers", row.model.name, row.replay.layers),
        label: format!(
            "batch {}, T {}, {} {}",
            row.config.batch, row.config.tokens, row.config.format, row.config.readout
        ),
        us: row.replay.us,
        floor_us: row.floor_us,
        plain_us: row.plain.us,
    }
}

fn print(rows: &[Row]) {
    let mut table = Table::new(&[
        "model",
        "layers",
        "batch",
        "T",
        "W",
        "state",
        "plain step us",
        "step us",
        "x plain",
        "peak",
        "plain layer",
        "layer",
        "alone",
        "floor",
        "check",
    ]);
    for row in rows {
        let Config { batch, tokens, window, format, readout, .. } = row.config;
        let layers = row.replay.layers as f64;
        table.row(vec![
            row.model.name.to_owned(),
            row.replay.layers.to_string(),
            batch.to_string(),
            tokens.to_string(),
            window.to_string(),
            format!("{format} {readout}"),
            table::us(row.plain.us * layers),
            table::us(row.replay.us * layers),
            format!("{:.2}", row.plain.us / row.replay.us),
            format!("{:.2}", row.replay.peak),
            table::us(row.plain.us),
            table::us(row.replay.us),
            table::us(row.alone.us),
            table::us(row.floor_us),
            row.failure.clone().map_or("ok".into(), |why| format!("FAILED: {why}")),
        ]);
    }
    table.print();
    println!(
        "\nstep: all recurrent layers of the model and the commit. layer: of that, per layer. alone: per layer, with as many layers as leave \
         no cache to the next step, as `kernel` times it. A model whose states fit the cache may be faster than its floor."
    );
}
