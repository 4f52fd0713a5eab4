//! What a model step pays beside its layers: the commit, and a snapshot when nothing is due.
// SPDX-License-Identifier: MIT OR Apache-2.0

use super::Result;
use super::api::{Pool, PoolDesc, Rows};
use super::config::{Format, Io, Readout};
use super::machine::Machine;
use super::rig::median;
use super::shape::{Family, Shape};

/// Microseconds of a call, many of them one behind the other.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Bookkeeping {
    /// Rows.
    pub batch: usize,
    /// Layers of the snapshot.
    pub layers: usize,
    /// A commit.
    pub commit: f64,
    /// A snapshot of all layers with nothing due.
    pub snapshot: f64,
    /// On a GPU: a kernel of one block that reads 32 KiB, the gap behind it included.
    pub kernel: Option<f64>,
}

/// Measures them.
pub fn measure(machine: &Machine, quick: bool) -> Result<Bookkeeping> {
    let (batch, layers, calls, repeats) = if quick { (8, 2, 2, 2) } else { (512, 24, 50, 20) };
    let desc = PoolDesc {
        shape: Shape { family: Family::Mamba2, heads: 8, rows: 64, columns: 128, groups: 8 },
        layers,
        slots: batch,
        window: 16,
        tokens: 1,
        staggered: true,
        format: Format::Split32,
        readout: Readout::High,
        stochastic: false,
        io: Io::Bf16,
        out: Io::Bf16,
    };
    let (pool, exec) = (Pool::new(&machine.context, &desc)?, machine.exec());
    let ids = machine.buffer_of_i32(0..batch as i32)?;
    let never = machine.buffer_of_i64(std::iter::repeat_n(1 << 40, batch))?;
    let rows = Rows { ids: &ids, n: batch, tokens: 1, extend: false };
    let time = |call: &dyn Fn() -> Result<()>| -> Result<f64> {
        let recordings = [machine.record(|| (0..calls).try_for_each(|_| call()))?];
        machine.time(&recordings, std::iter::once(0))?;
        let times = machine.time(&recordings, std::iter::repeat_n(0, repeats))?;
        Ok(median(times) / calls as f64)
    };
    let commit = time(&|| pool.commit(&rows, None, &exec))?;
    let snapshot = time(&|| pool.snapshot(&rows, &never, &exec))?;
    let (memory, sink) = (machine.buffer(32768)?, machine.buffer(16)?);
    let kernel = match &machine.gpu {
        None => None,
        Some(gpu) => {
            let read = || gpu.stream_over(memory.device()?, sink.device()?, false).map_err(|why| why.to_string());
            Some(time(&|| read().map(drop))?)
        }
    };
    machine.finish()?;
    pool.check()?;
    Ok(Bookkeeping { batch, layers, commit, snapshot, kernel })
}
