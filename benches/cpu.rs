//! The CPU backend against its own plain update: `cargo bench --bench cpu [-- --quick | --cycles N]`.
//!
//! In one process, on states that together are at least four times the last-level cache (slots rotate, so that each is cold when its
//! turn comes): `extend` at one token a step (the plain update: every state is read and written) and replay steps of one
//! token over whole flush cycles. Beside them, a read stream and a read-modify-write stream over as much memory. Times are
//! medians; the ratios are what counts.

#![allow(missing_docs, reason = "a program")]
#![allow(clippy::multiple_unsafe_ops_per_block, reason = "a benchmark's calls share one promise")]

use std::ptr::{null, null_mut};
use std::time::Instant;

use replayssm::ffi::*;

macro_rules! desc {
    ($ty:ident { $($field:ident: $value:expr),* $(,)? }) => {{
        let mut d: $ty = zeroed();
        d.struct_size = std::mem::size_of::<$ty>() as u32;
        $(d.$field = $value;)*
        d
    }};
}

/// A descriptor's defaults.
fn zeroed<T: Copy>() -> T {
    // SAFETY: used for descriptors only, of which all zero bytes are one.
    unsafe { std::mem::zeroed() }
}

fn ok(status: i32) {
    // SAFETY: the text lives until this thread's next failing call.
    let text = unsafe { std::ffi::CStr::from_ptr(replayssm_last_error_message()) };
    assert_eq!(status, REPLAYSSM_OK, "{text:?}");
}

#[derive(Clone, Copy)]
struct Shape {
    name: &'static str,
    family: i32,
    heads: usize,
    rows: usize,
    columns: usize,
    groups: usize,
}

const SHAPES: [Shape; 3] = [
    Shape { name: "Mamba-2 128x64x128 g8", family: REPLAYSSM_MAMBA2, heads: 128, rows: 64, columns: 128, groups: 8 },
    Shape { name: "GDN 16/64x128x128", family: REPLAYSSM_GDN, heads: 64, rows: 128, columns: 128, groups: 16 },
    Shape { name: "KDA 32x128x128", family: REPLAYSSM_KDA, heads: 32, rows: 128, columns: 128, groups: 32 },
];

const WINDOW: usize = 16;

struct Bench {
    shape: Shape,
    context: *mut replayssm_context,
    slots: *mut replayssm_slots,
    pool: *mut replayssm_layers,
    n_slots: usize,
    batch: usize,
    inputs: Vec<u16>,
    gates: Vec<f32>,
    params: Vec<f32>,
    out: Vec<u16>,
}

impl Drop for Bench {
    fn drop(&mut self) {
        replayssm_layers_destroy(self.pool);
        replayssm_slots_destroy(self.slots);
        replayssm_context_destroy(self.context);
    }
}

impl Bench {
    fn new(shape: Shape, format: i32, readout: i32, batch: usize, bytes: usize, threads: i32) -> Self {
        let state = shape.heads * shape.rows * shape.columns * 4;
        let n_slots = bytes.div_ceil(state).next_multiple_of(batch).max(batch);
        let (mut context, mut slots, mut pool) = (null_mut(), null_mut(), null_mut());
        let c = desc!(replayssm_context_desc { n_threads: threads });
        let s = desc!(replayssm_slots_desc { n_slots: n_slots as i32, window: WINDOW as i32 });
        let mut p = desc!(replayssm_pool_desc {
            family: shape.family,
            n_layers: 1,
            io: REPLAYSSM_BF16,
            format: format,
            readout: readout,
        });
        let [h, d, n, g] = [shape.heads, shape.rows, shape.columns, shape.groups].map(|x| x as i32);
        if shape.family == REPLAYSSM_MAMBA2 {
            (p.nheads, p.headdim, p.dstate, p.ngroups) = (h, d, n, g);
        } else {
            (p.HV, p.V, p.K, p.H) = (h, d, n, g);
        }
        // SAFETY: descriptors and out-parameters are locals.
        unsafe {
            ok(replayssm_context_create(&c, &mut context));
            ok(replayssm_slots_create(context, &s, &mut slots));
            ok(replayssm_layers_create(slots, &p, null(), 0, &mut pool));
        }
        let mut seed = 1u32;
        let mut draw = move || {
            seed = seed.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (seed >> 8) as f32 / (1 << 23) as f32 - 1.0
        };
        let width = shape.heads * shape.rows + 2 * shape.groups * shape.columns;
        let inputs = (0..batch * width).map(|_| half::bf16::from_f32(draw()).to_bits()).collect();
        let gates = (0..batch * shape.heads * (shape.columns + 1)).map(|_| -3.0 + draw()).collect();
        let params = (0..shape.heads).map(|_| if shape.family == REPLAYSSM_MAMBA2 { -1.0 } else { 0.0 }).collect();
        let out = vec![0; batch * shape.heads * shape.rows];
        Bench { shape, context, slots, pool, n_slots, batch, inputs, gates, params, out }
    }

    fn tensor(data: *const u16, row: usize, head: usize) -> replayssm_tensor {
        replayssm_tensor {
            data: data.cast_mut().cast(),
            stride_row: row as i64,
            stride_token: 0,
            stride_head: head as i64,
            dtype: REPLAYSSM_BF16,
            reserved: 0,
        }
    }

    fn gate(data: *const f32, row: usize, head: usize) -> replayssm_tensor {
        replayssm_tensor { dtype: REPLAYSSM_F32, ..Self::tensor(data.cast(), row, head) }
    }

    /// One model step of one layer on the rotation's next slots.
    fn step(&mut self, turn: usize, extend: bool) {
        let s = self.shape;
        let ids: Vec<i32> = (0..self.batch).map(|i| ((turn * self.batch + i) % self.n_slots) as i32).collect();
        let list = replayssm_ids { data: ids.as_ptr().cast(), stride: 1, dtype: REPLAYSSM_I32, reserved: 0 };
        let batch = desc!(replayssm_batch {
            flags: if extend { REPLAYSSM_BATCH_EXTEND } else { 0 },
            n_rows: self.batch as i32,
            tokens: 1,
            slots: list,
            rings: list,
        });
        let (hd, gn) = (s.heads * s.rows, s.groups * s.columns);
        let row = hd + 2 * gn;
        let x = self.inputs.as_ptr();
        let (b, c) = (x.wrapping_add(hd), x.wrapping_add(hd + gn));
        let out = Self::tensor(self.out.as_ptr(), hd, s.rows);
        // SAFETY: the buffers hold a batch of rows each and live until the calls return.
        unsafe {
            if s.family == REPLAYSSM_MAMBA2 {
                let args = desc!(replayssm_mamba2_args {
                    x: Self::tensor(x, row, s.rows),
                    B: Self::tensor(b, row, s.columns),
                    C: Self::tensor(c, row, s.columns),
                    dt: Self::gate(self.gates.as_ptr(), s.heads, 1),
                    A: Self::gate(self.params.as_ptr(), 0, 1),
                    out: out,
                });
                let call = if extend { replayssm_mamba2_extend } else { replayssm_mamba2_step };
                ok(call(self.pool, 0, &batch, &args, null()));
            } else {
                let per_head = if s.family == REPLAYSSM_KDA { s.columns } else { 1 };
                let beta = self.gates.as_ptr().wrapping_add(self.batch * s.heads * s.columns);
                let args = desc!(replayssm_delta_args {
                    q: Self::tensor(c, row, s.columns),
                    k: Self::tensor(b, row, s.columns),
                    v: Self::tensor(x, row, s.rows),
                    g: Self::gate(self.gates.as_ptr(), s.heads * per_head, per_head),
                    beta: Self::gate(beta, s.heads, 1),
                    A_log: Self::gate(self.params.as_ptr(), 0, 1),
                    out: out,
                });
                let call = if extend { replayssm_delta_extend } else { replayssm_delta_step };
                ok(call(self.pool, 0, &batch, &args, null()));
            }
            ok(replayssm_commit(self.slots, &batch, null(), null()));
        }
    }

    /// Bytes of states and rings that were loaded and stored so far.
    fn moved(&self) -> f64 {
        let mut s = desc!(replayssm_stats {});
        // SAFETY: the statistics are a local.
        ok(unsafe { replayssm_stats_read(self.slots, &mut s) });
        (s.checkpoint_bytes_read + s.checkpoint_bytes_written + s.ring_bytes_read + s.ring_bytes_written) as f64
    }

    /// Median seconds per step over whole flush cycles of every slot, and bytes moved per row and step in fp32 states.
    fn time(&mut self, extend: bool, cycles: usize) -> (f64, f64) {
        let turns = self.n_slots / self.batch;
        for turn in 0..turns * WINDOW {
            self.step(turn, extend);
        }
        let mut times = Vec::new();
        let before = self.moved();
        for _ in 0..cycles {
            let start = Instant::now();
            for turn in 0..turns * WINDOW {
                self.step(turn, extend);
            }
            times.push(start.elapsed().as_secs_f64() / (turns * WINDOW) as f64);
        }
        assert!(self.out.iter().all(|&b| half::bf16::from_bits(b).is_finite()));
        assert!(self.out.iter().any(|&b| b != 0));
        let mut report = desc!(replayssm_report {});
        // SAFETY: the report is a local.
        ok(unsafe { replayssm_check(self.slots, 0, &mut report) });
        assert_eq!(report.bits, 0);
        let state = (self.shape.heads * self.shape.rows * self.shape.columns * 4) as f64;
        let rows = (cycles * turns * WINDOW * self.batch) as f64;
        (median(times), (self.moved() - before) / rows / state)
    }
}

fn median(mut times: Vec<f64>) -> f64 {
    times.sort_by(f64::total_cmp);
    times[times.len() / 2]
}

/// Bytes per second of reading, and of reading and writing back (counting both), `threads` at a time.
fn streams(bytes: usize, threads: usize) -> (f64, f64) {
    let mut buffer = vec![1u64; bytes / 8];
    let chunk = buffer.len().div_ceil(threads);
    let run = |buffer: &mut [u64], write: bool| {
        let mut times = Vec::new();
        for _ in 0..7 {
            let start = Instant::now();
            std::thread::scope(|scope| {
                for part in buffer.chunks_mut(chunk) {
                    scope.spawn(move || {
                        if write {
                            part.iter_mut().for_each(|x| *x = x.wrapping_mul(3) ^ 1);
                        } else {
                            let mut sums = [0u64; 32];
                            for block in part.chunks_exact(32) {
                                sums.iter_mut().zip(block).for_each(|(s, x)| *s ^= x);
                            }
                            std::hint::black_box(sums);
                        }
                    });
                }
            });
            times.push(start.elapsed().as_secs_f64());
        }
        median(times)
    };
    let read = bytes as f64 / run(&mut buffer, false);
    let both = 2.0 * bytes as f64 / run(&mut buffer, true);
    (read, both)
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

fn main() {
    let quick = std::env::args().any(|a| a == "--quick");
    let threads = std::thread::available_parallelism().map_or(1, |n| n.get());
    let cache = last_level_cache(threads);
    let bytes = if quick { 64 << 20 } else { (4 * cache).max(192 << 20) };
    let cycles = std::env::args().skip_while(|a| a != "--cycles").nth(1).map(|n| n.parse().expect("--cycles N"));
    let cycles = cycles.unwrap_or(if quick { 1 } else { 5 });
    let (read, both) = streams(bytes, threads);
    println!("{}, {} MiB of last-level cache", processor(), cache >> 20);
    println!(
        "{threads} threads, {} MiB of states; streams: read {:.1} GB/s, read and write {:.1} GB/s",
        bytes >> 20,
        read / 1e9,
        both / 1e9
    );
    println!("\nTimes are microseconds per row and step; bytes are per row and step, in units of one fp32 state.");
    println!(
        "{:<23}{:>6}{:>11}{:>11}{:>21}{:>20}{:>20}{:>20}",
        "",
        "batch",
        "plain us",
        "of stream",
        "SPLIT32 HIGH: us, x",
        "F32 FULL x, bytes",
        "EXACT x, bytes",
        "BF16 HIGH x, bytes"
    );
    for shape in SHAPES {
        for batch in [1, 4, 16, 48] {
            let run = |format, readout, extend| {
                let mut bench = Bench::new(shape, format, readout, batch, bytes, threads as i32);
                let (seconds, moved) = bench.time(extend, cycles);
                (seconds / batch as f64, moved)
            };
            let state = (shape.heads * shape.rows * shape.columns * 4) as f64;
            let (plain, plain_bytes) = run(REPLAYSSM_FORMAT_F32, REPLAYSSM_READOUT_FULL, true);
            assert!((1.99..2.01).contains(&plain_bytes));
            let (high, high_bytes) = run(REPLAYSSM_FORMAT_SPLIT32, REPLAYSSM_READOUT_HIGH, false);
            let (full, full_bytes) = run(REPLAYSSM_FORMAT_F32, REPLAYSSM_READOUT_FULL, false);
            let (exact, exact_bytes) = run(REPLAYSSM_FORMAT_F32, REPLAYSSM_READOUT_EXACT, false);
            let (bf16, bf16_bytes) = run(REPLAYSSM_FORMAT_BF16, REPLAYSSM_READOUT_HIGH, false);
            println!(
                "{:<23}{:>6}{:>11.1}{:>10.0}%{:>8.1} {:>5.2} {:>6.3}{:>13.2} {:>6.3}{:>13.2} {:>6.3}{:>13.2} {:>6.3}",
                shape.name,
                batch,
                plain * 1e6,
                100.0 * 2.0 * state / both / plain,
                high * 1e6,
                plain / high,
                high_bytes,
                plain / full,
                full_bytes,
                plain / exact,
                exact_bytes,
                plain / bf16,
                bf16_bytes,
            );
        }
    }
}
