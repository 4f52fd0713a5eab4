//! Where things run and how long they take: the processor by the wall clock, a GPU by events between graphs.
// SPDX-License-Identifier: MIT OR Apache-2.0

use std::cell::UnsafeCell;
use std::ptr::null_mut;
use std::time::Instant;

use super::Result;
use super::api::Context;
use crate::backend::cuda::bench::{Gpu, Graph, Memory};
use crate::ffi::replayssm_exec;

/// How calls are to run.
#[derive(Debug, Clone, Copy)]
pub struct Exec {
    flags: u32,
    stream: usize,
}

impl Exec {
    /// The same with flags of the C interface.
    pub fn with(self, flags: u32) -> Self {
        Exec { flags, ..self }
    }

    /// As the C interface takes it.
    pub fn descriptor(&self) -> replayssm_exec {
        replayssm_exec {
            struct_size: size_of::<replayssm_exec>() as u32,
            flags: self.flags,
            stream: if self.stream == 0 { null_mut() } else { self.stream as *mut _ },
            part: 0,
            n_parts: 0,
        }
    }
}

/// Memory of the machine that the library works on.
#[derive(Debug)]
pub struct Buffer {
    place: Place,
    bytes: usize,
}

#[derive(Debug)]
enum Place {
    /// Aligned to 16 bytes, and written by the library through addresses.
    Host(Vec<UnsafeCell<u128>>),
    Device(Memory),
}

impl Buffer {
    /// The address of a byte.
    pub fn at(&self, byte: usize) -> *mut u8 {
        match &self.place {
            Place::Host(words) => words.as_ptr().cast::<u8>().cast_mut().wrapping_add(byte),
            Place::Device(memory) => (memory.address() as *mut u8).wrapping_add(byte),
        }
    }

    /// Bytes that it has.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// A GPU's memory.
    pub fn device(&self) -> Result<&Memory> {
        match &self.place {
            Place::Host(_) => Err("expected memory of a GPU".into()),
            Place::Device(memory) => Ok(memory),
        }
    }

    /// Writes its first bytes. Nothing that uses it may be running.
    pub fn write(&self, from: &[u8]) -> Result<()> {
        assert!(from.len() <= self.bytes, "{} bytes into a buffer of {}", from.len(), self.bytes);
        match &self.place {
            // SAFETY: no longer than the buffer; calls that use it have returned, and it is used by one thread.
            Place::Host(_) => unsafe { std::ptr::copy_nonoverlapping(from.as_ptr(), self.at(0), from.len()) },
            Place::Device(memory) => memory.write(from).map_err(|why| why.to_string())?,
        }
        Ok(())
    }

    /// All of its bytes. Nothing that writes it may be running.
    pub fn read(&self) -> Result<Vec<u8>> {
        match &self.place {
            Place::Host(_) => {
                let mut to = vec![0; self.bytes];
                // SAFETY: as for writing.
                unsafe { std::ptr::copy_nonoverlapping(self.at(0), to.as_mut_ptr(), self.bytes) };
                Ok(to)
            }
            Place::Device(memory) => memory.read().map_err(|why| why.to_string()),
        }
    }
}

/// Work that can be run again and again.
pub struct Recording<'a> {
    run: Box<dyn Fn() -> Result<()> + 'a>,
    /// What was captured of it.
    graph: Option<Graph>,
}

/// A machine with a context of the library.
#[derive(Debug)]
pub struct Machine {
    /// Of the library.
    pub context: Context,
    /// The GPU; none: the processor.
    pub gpu: Option<Gpu>,
    /// As "NVIDIA H200", or the processor.
    pub name: String,
    /// Instruction set or architecture, threads or multiprocessors, caches, driver.
    pub details: String,
    /// Of the CPU backend.
    pub threads: usize,
    /// States that are together at least so large leave nothing in a cache for the next step.
    pub cold_bytes: usize,
    /// The most layers that a model step has for that.
    pub most_layers: usize,
}

impl Machine {
    /// The CPU backend; 0 threads: all that the process may use.
    pub fn cpu(threads: usize, quick: bool) -> Result<Self> {
        let context = Context::cpu(threads as i32)?;
        let (n_threads, isa) = context.query()?;
        let threads = n_threads as usize;
        let cache = last_level_cache(threads);
        Ok(Machine {
            context,
            gpu: None,
            name: processor(),
            details: format!("{isa}, {threads} threads, {} MiB of last-level cache", cache >> 20),
            threads,
            cold_bytes: if quick { 1 << 20 } else { (4 * cache).max(192 << 20) },
            most_layers: if quick { 4 } else { 512 },
        })
    }

    /// The CUDA backend on a device.
    pub fn cuda(device: i32, quick: bool) -> Result<Self> {
        let gpu = Gpu::open(device).map_err(|why| why.to_string())?;
        let details = gpu.details().map_err(|why| why.to_string())?;
        let cache = gpu.cache_bytes().map_err(|why| why.to_string())?.unwrap_or(0) as usize;
        Ok(Machine {
            context: Context::cuda(device)?,
            name: gpu.name().to_owned(),
            details,
            gpu: Some(gpu),
            threads: 0,
            cold_bytes: if quick { 1 } else { (8 * cache).max(600_000_000) },
            most_layers: if quick { 2 } else { 96 },
        })
    }

    /// Whether it is a GPU.
    pub fn is_cuda(&self) -> bool {
        self.gpu.is_some()
    }

    /// As options name it.
    pub fn backend(&self) -> &'static str {
        if self.is_cuda() { "cuda" } else { "cpu" }
    }

    /// Layers of a step, so that its states are cold in the next.
    pub fn layers(&self, bytes_per_layer: usize) -> usize {
        self.cold_bytes.div_ceil(bytes_per_layer.max(1)).clamp(2, self.most_layers)
    }

    /// Zeroed memory.
    pub fn buffer(&self, bytes: usize) -> Result<Buffer> {
        let words = bytes.div_ceil(16).max(1);
        let place = match &self.gpu {
            Some(gpu) => Place::Device(gpu.allocate(bytes).map_err(|why| why.to_string())?),
            None => Place::Host((0..words).map(|_| UnsafeCell::new(0)).collect()),
        };
        Ok(Buffer { place, bytes })
    }

    /// Memory with these bytes.
    pub fn buffer_of(&self, bytes: &[u8]) -> Result<Buffer> {
        let buffer = self.buffer(bytes.len())?;
        buffer.write(bytes)?;
        Ok(buffer)
    }

    /// Memory with these numbers.
    pub fn buffer_of_i32(&self, numbers: impl Iterator<Item = i32>) -> Result<Buffer> {
        self.buffer_of(&numbers.flat_map(i32::to_ne_bytes).collect::<Vec<_>>())
    }

    /// Memory with these numbers.
    pub fn buffer_of_i64(&self, numbers: impl Iterator<Item = i64>) -> Result<Buffer> {
        self.buffer_of(&numbers.flat_map(i64::to_ne_bytes).collect::<Vec<_>>())
    }

    /// Memory with these numbers.
    pub fn buffer_of_f32(&self, numbers: impl Iterator<Item = f32>) -> Result<Buffer> {
        self.buffer_of(&numbers.flat_map(f32::to_ne_bytes).collect::<Vec<_>>())
    }

    /// How calls run here.
    pub fn exec(&self) -> Exec {
        Exec { flags: 0, stream: self.gpu.as_ref().map_or(0, Gpu::stream) }
    }

    /// Waits for all that was enqueued.
    pub fn finish(&self) -> Result<()> {
        self.gpu.as_ref().map_or(Ok(()), |gpu| gpu.wait().map_err(|why| why.to_string()))
    }

    /// Makes work repeatable: on a GPU, a graph is captured from it.
    pub fn record<'a>(&self, work: impl Fn() -> Result<()> + 'a) -> Result<Recording<'a>> {
        let Some(gpu) = &self.gpu else { return Ok(Recording { run: Box::new(work), graph: None }) };
        gpu.begin_capture().map_err(|why| why.to_string())?;
        let result = work();
        // A capture ends, whatever came of it.
        let graph = gpu.end_capture().map_err(|why| why.to_string());
        result?;
        Ok(Recording { run: Box::new(work), graph: Some(graph?) })
    }

    /// Runs recordings, those of these numbers one after the other, and says how many microseconds each took.
    pub fn time(&self, recordings: &[Recording], order: impl Iterator<Item = usize>) -> Result<Vec<f64>> {
        let Some(gpu) = &self.gpu else { return time_on_the_processor(recordings, order) };
        let text = |why: crate::error::Error| why.to_string();
        let mut events = vec![gpu.event().map_err(text)?];
        for number in order {
            let graph = recordings[number].graph.as_ref().ok_or("a recording without a graph")?;
            gpu.launch(graph).map_err(text)?;
            events.push(gpu.event().map_err(text)?);
        }
        gpu.wait().map_err(text)?;
        events.windows(2).map(|two| two[1].since(&two[0]).map_err(text)).collect()
    }
}

fn time_on_the_processor(recordings: &[Recording], order: impl Iterator<Item = usize>) -> Result<Vec<f64>> {
    let mut times = Vec::new();
    for number in order {
        let begin = Instant::now();
        (recordings[number].run)()?;
        times.push(begin.elapsed().as_secs_f64() * 1e6);
    }
    Ok(times)
}

/// Bytes of all last-level caches that this process may use, as Linux tells them; 32 MiB where it does not.
fn last_level_cache(threads: usize) -> usize {
    let read = |cpu: usize, file: &str| {
        std::fs::read_to_string(format!("/sys/devices/system/cpu/cpu{cpu}/cache/index3/{file}")).ok()
    };
    let mut caches: Vec<(String, usize)> = (0..threads)
        .filter_map(|cpu| {
            let size = read(cpu, "size")?.trim().strip_suffix('K')?.parse::<usize>().ok()?;
            Some((read(cpu, "shared_cpu_list")?, size << 10))
        })
        .collect();
    caches.sort();
    caches.dedup();
    caches.iter().map(|(_, size)| size).sum::<usize>().max(32 << 20)
}

/// The processor's name, where Linux tells it.
fn processor() -> String {
    let info = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let name = info.lines().find_map(|line| line.strip_prefix("model name")?.split_once(':'));
    name.map_or("unknown processor".into(), |(_, name)| name.trim().into())
}
