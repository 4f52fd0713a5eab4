//! What the machine's memory can do: a stream of reads, and one that reads, changes and writes back in place. Measured in the process
//! that measures all else.
// SPDX-License-Identifier: MIT OR Apache-2.0

use std::time::Instant;

use super::Result;
use super::machine::Machine;

/// How often each is run.
const PASSES: usize = 7;

/// Bytes per second.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Streams {
    /// Of the memory that was read.
    pub bytes: usize,
    /// Read.
    pub read: f64,
    /// Read and written, both counted.
    pub update: f64,
}

/// Measures both; the best of several passes, which is the machine's limit.
pub fn measure(machine: &Machine, quick: bool) -> Result<Streams> {
    match (machine.is_cuda(), quick) {
        (true, false) => on_a_gpu(machine, 2 << 30),
        (true, true) => on_a_gpu(machine, 1 << 20),
        (false, false) => Ok(on_the_processor(machine.cold_bytes, machine.threads)),
        (false, true) => Ok(on_the_processor(4 << 20, machine.threads)),
    }
}

/// Several launches in a graph, so that the gap between graphs is none of theirs.
fn on_a_gpu(machine: &Machine, bytes: usize) -> Result<Streams> {
    const LAUNCHES: usize = 4;
    let (memory, sink) = (machine.buffer(bytes)?, machine.buffer(16)?);
    let gpu = machine.gpu.as_ref().ok_or("expected a GPU")?;
    let fastest = |writes| -> Result<f64> {
        let launch = || gpu.stream_over(memory.device()?, sink.device()?, writes).map_err(|why| why.to_string());
        let recording = machine.record(move || (0..LAUNCHES).try_for_each(|_| launch().map(drop)))?;
        let times = machine.time(&[recording], std::iter::repeat_n(0, PASSES))?;
        Ok(times.into_iter().fold(f64::INFINITY, f64::min) * 1e-6 / LAUNCHES as f64)
    };
    // Reads first: what is read must be zero.
    let (read, update) = (fastest(false)?, fastest(true)?);
    Ok(Streams { bytes, read: bytes as f64 / read, update: 2.0 * bytes as f64 / update })
}

fn on_the_processor(bytes: usize, threads: usize) -> Streams {
    let mut buffer = vec![1u64; bytes / 8];
    let chunk = buffer.len().div_ceil(threads);
    let mut fastest = |write: bool| {
        let pass = |buffer: &mut [u64]| {
            let begin = Instant::now();
            std::thread::scope(|scope| {
                for part in buffer.chunks_mut(chunk) {
                    scope.spawn(move || if write { update(part) } else { read(part) });
                }
            });
            begin.elapsed().as_secs_f64()
        };
        (0..PASSES).map(|_| pass(&mut buffer)).fold(f64::INFINITY, f64::min)
    };
    Streams { bytes, read: bytes as f64 / fastest(false), update: 2.0 * bytes as f64 / fastest(true) }
}

fn read(part: &[u64]) {
    let mut sums = [0u64; 32];
    for block in part.chunks_exact(32) {
        for (sum, x) in sums.iter_mut().zip(block) {
            *sum ^= x;
        }
    }
    std::hint::black_box(sums);
}

fn update(part: &mut [u64]) {
    for x in part {
        *x = x.wrapping_mul(3) ^ 1;
    }
}
