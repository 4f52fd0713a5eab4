//! A GPU for `replayssm-bench`: memory, a stream, graphs, events, and kernels to compare steps with.
// SPDX-License-Identifier: MIT OR Apache-2.0

use std::sync::Arc;

use super::driver::{self, Device, DeviceMemory, Kernel, Shape, Stream};
use super::images;
use super::instances::{Key, Work};
use super::params::Params;
use crate::error::{Error, Result};

pub use super::choice::Tuning;
pub use super::driver::{Event, Graph};

/// Bytes that a block of a stream moves, and its threads.
const STREAM_BYTES: u64 = 32768;
const STREAM_THREADS: u32 = 256;

/// Rows and columns of a product that a block computes, and its threads.
const SIDE: u32 = 16;
const PRODUCT_THREADS: u32 = 256;

/// As `cuda/bench/params.cuh` has them.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
struct StreamParams {
    data: u64,
    sink: u64,
}

#[repr(C)]
#[derive(Debug, Clone, Copy)]
struct ProductParams {
    activations: u64,
    weights: u64,
    out: u64,
    batch: i32,
    hidden: i32,
    n: i32,
    reserved: i32,
}

impl Params for StreamParams {}
impl Params for ProductParams {}

/// A product's sizes: [batch, hidden] by [n, hidden].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Product {
    /// Rows.
    pub batch: u32,
    /// Elements of a row, a multiple of 32.
    pub hidden: u32,
    /// Columns, a multiple of 16.
    pub n: u32,
}

/// Memory of a GPU.
#[derive(Debug)]
pub struct Memory {
    memory: DeviceMemory,
    device: Arc<Device>,
    bytes: usize,
}

impl Memory {
    /// Its first byte.
    pub fn address(&self) -> u64 {
        self.memory.at
    }

    /// Bytes that it has.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Writes its first bytes. No work may be using them.
    pub fn write(&self, from: &[u8]) -> Result<()> {
        if from.len() > self.bytes {
            return Err(Error::Internal(format!("{} bytes do not fit memory of {}", from.len(), self.bytes)));
        }
        self.device.write(self.memory.at, from)
    }

    /// All of its bytes. No work may be writing them.
    pub fn read(&self) -> Result<Vec<u8>> {
        let mut to = vec![0; self.bytes];
        // As rows of a copy, whose length is limited.
        const ROW: usize = 1 << 20;
        for (i, row) in to.chunks_mut(ROW).enumerate() {
            let bytes = row.len();
            self.device.read_runs(self.device.side(), self.memory.at + (i * ROW) as u64, 0, bytes, row)?;
        }
        Ok(to)
    }
}

/// A GPU, with a stream on which everything runs.
#[derive(Debug)]
pub struct Gpu {
    device: Arc<Device>,
    stream: Stream,
    read: Kernel,
    update: Kernel,
    product: Kernel,
}

impl Gpu {
    /// A device's primary context, as the library takes it.
    pub fn open(ordinal: i32) -> Result<Self> {
        let device = Device::open(ordinal)?;
        let keys = Key::all();
        let load = |work| {
            let key = Key::single(work);
            let image = images::find(&keys, key, device.arch).ok_or_else(|| Error::NoCode {
                device: device.name.clone(),
                arch: format!("sm_{}", device.arch),
                expected: "an architecture that the library was built for".into(),
            })?;
            Kernel::load(&device, &image.cubin()?)
        };
        let (read, update, product) = (load(Work::BenchRead)?, load(Work::BenchUpdate)?, load(Work::BenchProduct)?);
        Ok(Gpu { stream: Stream::new(&device)?, device, read, update, product })
    }

    /// As "NVIDIA H200".
    pub fn name(&self) -> &str {
        &self.device.name
    }

    /// Architecture, multiprocessors, cache and driver, in words.
    pub fn details(&self) -> Result<String> {
        let (version, cache) = driver::version_and_cache(&self.device)?;
        let cache = cache.map_or(String::new(), |bytes| format!(", {} MiB of L2", bytes >> 20));
        // The CUDA driver does not tell its own version.
        let text = std::fs::read_to_string("/proc/driver/nvidia/version").unwrap_or_default();
        let is_version = |word: &&str| word.contains('.') && word.starts_with(|c: char| c.is_ascii_digit());
        let driver = text.split_whitespace().find(is_version).map_or(String::new(), |word| format!(" {word}"));
        Ok(format!(
            "sm_{}, {} multiprocessors{cache}, driver{driver} for CUDA {}.{}",
            self.device.arch,
            self.device.multiprocessors,
            version / 1000,
            version % 1000 / 10
        ))
    }

    /// Bytes of the L2, where the driver tells them.
    pub fn cache_bytes(&self) -> Result<Option<u32>> {
        Ok(driver::version_and_cache(&self.device)?.1)
    }

    /// Zeroed memory.
    pub fn allocate(&self, bytes: usize) -> Result<Memory> {
        let memory = self.device.allocate("what is timed", bytes as u64)?;
        Ok(Memory { memory, device: self.device.clone(), bytes })
    }

    /// The stream, as the library takes it.
    pub fn stream(&self) -> usize {
        self.stream.handle()
    }

    /// Waits for all that was enqueued.
    pub fn wait(&self) -> Result<()> {
        self.stream.wait()
    }

    /// From here on, what is enqueued is captured.
    pub fn begin_capture(&self) -> Result<()> {
        self.stream.begin_capture()
    }

    /// Ends the capture: a graph of all that came since.
    pub fn end_capture(&self) -> Result<Graph> {
        self.stream.end_capture()
    }

    /// Enqueues a graph.
    pub fn launch(&self, graph: &Graph) -> Result<()> {
        graph.launch(&self.stream)
    }

    /// A point behind all that was enqueued so far.
    pub fn event(&self) -> Result<Event> {
        let event = Event::new(&self.device)?;
        event.record(&self.stream)?;
        Ok(event)
    }

    /// Enqueues a stream over memory, in whole blocks: of reads, or of reads and writes in place. Bytes that it covers.
    pub fn stream_over(&self, memory: &Memory, sink: &Memory, writes: bool) -> Result<u64> {
        let blocks = memory.bytes as u64 / STREAM_BYTES;
        let kernel = if writes { &self.update } else { &self.read };
        let params = StreamParams { data: memory.address(), sink: sink.address() };
        self.device.launch(kernel, &self.shape(blocks as u32, STREAM_THREADS), &params)?;
        Ok(blocks * STREAM_BYTES)
    }

    /// Enqueues a product: activations, weights and out are bfloat16 and dense.
    pub fn product(&self, sizes: Product, activations: &Memory, weights: &Memory, out: &Memory) -> Result<()> {
        let Product { batch, hidden, n } = sizes;
        let params = ProductParams {
            activations: activations.address(),
            weights: weights.address(),
            out: out.address(),
            batch: batch as i32,
            hidden: hidden as i32,
            n: n as i32,
            reserved: 0,
        };
        let blocks = batch.div_ceil(SIDE) * (n / SIDE);
        self.device.launch(&self.product, &self.shape(blocks, PRODUCT_THREADS), &params)
    }

    fn shape(&self, blocks: u32, threads: u32) -> Shape {
        Shape { stream: self.stream.handle(), blocks, threads, shared_bytes: 0, dependent: false }
    }
}
