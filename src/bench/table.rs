//! What is printed and written.
// SPDX-License-Identifier: MIT OR Apache-2.0

use serde_json::{Value, json};

use super::Result;
use super::api;
use super::machine::Machine;
use super::options::Common;
use super::streams::Streams;
use super::svg::{self, Bar};

/// Aligned columns: the first to the left, numbers to the right, the last as it is.
#[derive(Debug)]
pub struct Table(Vec<Vec<String>>);

impl Table {
    /// With these heads of columns.
    pub fn new(heads: &[&str]) -> Self {
        Table(vec![heads.iter().map(|&head| head.to_owned()).collect()])
    }

    /// Appends a row, with a text for each column.
    pub fn row(&mut self, cells: Vec<String>) {
        self.0.push(cells);
    }

    /// All of it.
    pub fn text(&self) -> String {
        let n = self.0[0].len();
        let width = |column: usize| self.0.iter().map(|row| row[column].chars().count()).max().unwrap_or(0);
        let widths: Vec<_> = (0..n).map(width).collect();
        let mut text = String::new();
        for row in &self.0 {
            for (i, (cell, &width)) in row.iter().zip(&widths).enumerate() {
                let cell = if i == 0 {
                    format!("{cell:<width$}")
                } else if i + 1 == n {
                    format!("  {cell}")
                } else {
                    format!("  {cell:>width$}")
                };
                text.push_str(&cell);
            }
            text.truncate(text.trim_end().len());
            text.push('\n');
        }
        text
    }

    /// On stdout.
    pub fn print(&self) {
        print!("{}", self.text());
    }
}

/// Microseconds with three digits or so.
pub fn us(us: f64) -> String {
    if us < 10.0 {
        format!("{us:.2}")
    } else if us < 1000.0 {
        format!("{us:.1}")
    } else {
        format!("{us:.0}")
    }
}

/// Bytes per second.
pub fn rate(bytes: f64) -> String {
    if bytes >= 1e12 { format!("{:.2} TB/s", bytes / 1e12) } else { format!("{:.1} GB/s", bytes / 1e9) }
}

/// Where everything runs.
pub fn print_place(machine: &Machine) {
    println!("{}: {}", machine.name, machine.details);
    println!("lib{}", api::build_info());
}

/// Where everything runs, and what its memory can do.
pub fn print_machine(machine: &Machine, streams: &Streams) {
    print_place(machine);
    println!(
        "streams over {} MiB: read {}, read and write in place {} (both counted)\n",
        streams.bytes >> 20,
        rate(streams.read),
        rate(streams.update)
    );
}

/// Writes the file of `--json`, if there is to be one.
pub fn write_json(
    common: &Common,
    machine: &Machine,
    streams: Option<&Streams>,
    command: &str,
    result: Value,
) -> Result<()> {
    let Some(path) = &common.json else { return Ok(()) };
    let streams = streams.map(|streams| {
        json!({"bytes": streams.bytes, "read_bytes_per_second": streams.read, "update_bytes_per_second": streams.update})
    });
    let value = json!({
        "command": command,
        "quick": common.quick,
        "library": api::build_info(),
        "machine": {"backend": machine.backend(), "name": machine.name, "details": machine.details},
        "streams": streams,
        "result": result,
    });
    std::fs::write(path, format!("{value:#}\n")).map_err(|why| format!("--json is {}: {why}", path.display()))
}

/// Writes bars into the file of `--svg`, if there is to be one.
pub fn write_svg(common: &Common, machine: &Machine, streams: &Streams, title: &str, bars: &[Bar]) -> Result<()> {
    let lines = [
        format!("{}: {}", machine.name, machine.details),
        format!("read stream {}, read and write in place {}", rate(streams.read), rate(streams.update)),
        format!("libreplayssm {}", env!("CARGO_PKG_VERSION")),
    ];
    write_drawing(common, &svg::drawing(title, &lines, bars))
}

/// Writes a drawing into the file of `--svg`, if there is to be one.
pub fn write_drawing(common: &Common, drawing: &str) -> Result<()> {
    let Some(path) = &common.svg else { return Ok(()) };
    std::fs::write(path, drawing).map_err(|why| format!("--svg is {}: {why}", path.display()))
}
