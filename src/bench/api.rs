//! The library as an engine calls it: its C functions, and handles that end with their owners.
//!
//! What is timed goes through here and through nothing else of the library. Device arrays are [`Buffer`]s, whose owners keep them until
//! all that was enqueued has run.
// SPDX-License-Identifier: MIT OR Apache-2.0

use std::ffi::CStr;
use std::ptr::{null, null_mut};

use super::Result;
use super::config::{Config, Format, Io, Readout};
use super::machine::{Buffer, Exec};
use super::shape::{Family, Shape};
use crate::ffi::*;

/// A descriptor with every default.
macro_rules! desc {
    ($ty:ident { $($field:ident: $value:expr),* $(,)? }) => {{
        let mut d: $ty = zeroed();
        d.struct_size = size_of::<$ty>() as u32;
        $(d.$field = $value;)*
        d
    }};
}

fn zeroed<T: Copy>() -> T {
    // SAFETY: used for descriptors of the C interface alone, of which all zero bytes are one.
    unsafe { std::mem::zeroed() }
}

/// The library's sentence for a failed call.
fn ok(status: i32) -> Result<()> {
    if status == REPLAYSSM_OK {
        return Ok(());
    }
    // SAFETY: a text with a final zero, which lives until this thread's next failing call.
    let text = unsafe { CStr::from_ptr(replayssm_last_error_message()) };
    Err(text.to_string_lossy().into_owned())
}

fn text(at: *const std::ffi::c_char) -> String {
    // SAFETY: only called with static texts of the library, which end with a zero.
    unsafe { CStr::from_ptr(at) }.to_string_lossy().into_owned()
}

/// How the library was built, beginning with its name and version.
pub fn build_info() -> String {
    text(replayssm_build_info())
}

/// One backend on one device.
#[derive(Debug)]
pub struct Context(*mut replayssm_context);

impl Context {
    /// The CPU backend with so many threads; 0: all.
    pub fn cpu(threads: i32) -> Result<Self> {
        Self::create(&desc!(replayssm_context_desc { backend: REPLAYSSM_BACKEND_CPU, n_threads: threads }))
    }

    /// The CUDA backend on a device's primary context.
    pub fn cuda(device: i32) -> Result<Self> {
        Self::create(&desc!(replayssm_context_desc { backend: REPLAYSSM_BACKEND_CUDA, device: device }))
    }

    fn create(desc: &replayssm_context_desc) -> Result<Self> {
        let mut context = null_mut();
        // SAFETY: both are locals.
        ok(unsafe { replayssm_context_create(desc, &mut context) })?;
        Ok(Context(context))
    }

    /// Threads that work on a call, and the name of the device or instruction set.
    pub fn query(&self) -> Result<(i32, String)> {
        let mut info = desc!(replayssm_context_info {});
        // SAFETY: the answer is a local.
        ok(unsafe { replayssm_context_query(self.0, &mut info) })?;
        // SAFETY: the library ends the name with a zero.
        let name = unsafe { CStr::from_ptr(info.name.as_ptr()) };
        Ok((info.n_threads, name.to_string_lossy().into_owned()))
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        replayssm_context_destroy(self.0);
    }
}

/// What a pool and its slots handle are to be.
#[derive(Debug, Clone, Copy)]
pub struct PoolDesc {
    /// Of a layer.
    pub shape: Shape,
    /// Equal layers.
    pub layers: usize,
    /// Slots, and rings.
    pub slots: usize,
    /// W.
    pub window: usize,
    /// The longest step.
    pub tokens: usize,
    /// Whether first folds are spread over a window.
    pub staggered: bool,
    /// Of checkpoints.
    pub format: Format,
    /// Of steps.
    pub readout: Readout,
    /// 16-bit formats: whether checkpoints are rounded stochastically, by the rings' own seeds.
    pub stochastic: bool,
    /// Of activations.
    pub io: Io,
    /// Of outputs.
    pub out: Io,
}

impl PoolDesc {
    /// One layer and a slot for each row of a configuration, rounded to nearest, with outputs as activations are.
    pub fn of(config: &Config) -> Self {
        let Config { shape, batch, tokens, window, format, readout, io, .. } = *config;
        PoolDesc {
            shape,
            layers: 1,
            slots: batch,
            window,
            tokens,
            staggered: true,
            format,
            readout,
            stochastic: false,
            io,
            out: io,
        }
    }

    fn slots(&self) -> replayssm_slots_desc {
        desc!(replayssm_slots_desc {
            n_slots: self.slots as i32,
            window: self.window as i32,
            max_step_tokens: self.tokens as i32,
            schedule: if self.staggered { REPLAYSSM_SCHEDULE_STAGGERED } else { REPLAYSSM_SCHEDULE_NONE },
        })
    }

    fn pool(&self) -> replayssm_pool_desc {
        let mut pool = desc!(replayssm_pool_desc {
            n_layers: self.layers as i32,
            io: self.io.number(),
            out: self.out.number(),
            format: self.format.number(),
            readout: self.readout.number(),
            stochastic_rounding: self.stochastic.into(),
        });
        let [heads, rows, columns, groups] =
            [self.shape.heads, self.shape.rows, self.shape.columns, self.shape.groups].map(|n| n as i32);
        if self.shape.family == Family::Mamba2 {
            (pool.nheads, pool.headdim, pool.dstate, pool.ngroups) = (heads, rows, columns, groups);
        } else {
            (pool.HV, pool.V, pool.K, pool.H) = (heads, rows, columns, groups);
        }
        pool.family = match self.shape.family {
            Family::Mamba2 => REPLAYSSM_FAMILY_MAMBA2,
            Family::Gdn => REPLAYSSM_FAMILY_GDN,
            Family::Kda => REPLAYSSM_FAMILY_KDA,
        };
        pool
    }

    /// The window that the library recommends for steps of so many tokens of all slots.
    pub fn recommended_window(&self) -> Result<i32> {
        let args = desc!(replayssm_plan_args { batch: self.slots as i32, tokens: self.tokens as i32 });
        let mut info = desc!(replayssm_plan_info {});
        let (slots, pool) = (self.slots(), self.pool());
        // SAFETY: descriptors and answer are locals.
        ok(unsafe { replayssm_plan(&slots, &pool, 1, &args, &mut info) })?;
        Ok(info.recommended_window)
    }

    /// Bytes of a ring row of each component that a ring has.
    pub fn record_bytes(&self) -> Result<u64> {
        let mut components = [desc!(replayssm_component {}); 16];
        let mut n = 0;
        let (slots, pool) = (self.slots(), self.pool());
        // SAFETY: descriptors and answers are locals; the array has as many elements as is said.
        ok(unsafe { replayssm_plan_components(&slots, &pool, components.as_mut_ptr(), 16, &mut n) })?;
        let rings: u64 = components.iter().filter(|c| c.per_ring != 0).map(|c| c.bytes).sum();
        Ok(rings / (self.window + self.tokens) as u64)
    }
}

/// A batch: rows of slots 0, 1, ..., with as many tokens each.
#[derive(Debug, Clone, Copy)]
pub struct Rows<'a> {
    /// int32 ids of slots and rings.
    pub ids: &'a Buffer,
    /// Rows.
    pub n: usize,
    /// Tokens of each.
    pub tokens: usize,
    /// For extends.
    pub extend: bool,
}

impl Rows<'_> {
    fn list(ids: &Buffer) -> replayssm_ids {
        replayssm_ids { data: ids.at(0).cast(), stride: 1, dtype: REPLAYSSM_DTYPE_I32, reserved: 0 }
    }

    fn batch(&self) -> replayssm_batch {
        desc!(replayssm_batch {
            flags: if self.extend { REPLAYSSM_BATCH_EXTEND } else { 0 },
            n_rows: self.n as i32,
            tokens: self.tokens as i32,
            slots: Self::list(self.ids),
        })
    }

    fn entries(&self) -> replayssm_list {
        desc!(replayssm_list { n: self.n as i32, slots: Self::list(self.ids) })
    }
}

/// A tensor in a buffer, by its first byte, strides in elements.
fn tensor(buffer: &Buffer, byte: usize, strides: [usize; 3], dtype: Io) -> replayssm_tensor {
    let [row, token, head] = strides.map(|stride| stride as i64);
    replayssm_tensor {
        data: buffer.at(byte).cast(),
        stride_row: row,
        stride_token: token,
        stride_head: head,
        dtype: dtype.number(),
        reserved: 0,
    }
}

/// Where a call's inputs, parameters and outputs lie. Rows and tokens of the inputs are dense: `[row, token, x | B | C | z]` in the dtype of
/// activations, and gates in fp32.
#[derive(Debug, Clone, Copy)]
pub struct Tensors<'a> {
    /// Of the layer.
    pub shape: Shape,
    /// Of activations.
    pub io: Io,
    /// Of outputs.
    pub out_io: Io,
    /// Whether outputs go through z.
    pub gate: bool,
    /// x (v), B (k), C (q), and z.
    pub packed: &'a Buffer,
    /// Raw gates.
    pub gates: &'a Buffer,
    /// Delta rules: raw b.
    pub beta: &'a Buffer,
    /// A (A_log), then biases of the gates; fp32.
    pub params: &'a Buffer,
    /// Outputs.
    pub out: &'a Buffer,
    /// Tokens of a row that lie one behind the other.
    pub row_tokens: usize,
    /// The first token of row 0.
    pub first: usize,
    /// Rows from one row of the call to the next.
    pub row_step: usize,
}

impl Tensors<'_> {
    fn width(&self) -> usize {
        self.shape.packed() + if self.gate { self.shape.heads * self.shape.rows } else { 0 }
    }

    /// A part of each token: elements of a token, where the part begins, distance of its heads.
    fn part(&self, buffer: &Buffer, dtype: Io, width: usize, begin: usize, head: usize) -> replayssm_tensor {
        let byte = (self.first * width + begin) * dtype.bytes();
        tensor(buffer, byte, [self.row_step * self.row_tokens * width, width, head], dtype)
    }

    fn mamba2(&self) -> replayssm_mamba2_args {
        let Shape { heads, rows, columns, groups, .. } = self.shape;
        let (width, hd, gn) = (self.width(), heads * rows, groups * columns);
        let packed = |begin, head| self.part(self.packed, self.io, width, begin, head);
        let mut args = desc!(replayssm_mamba2_args {
            x: packed(0, rows),
            B: packed(hd, columns),
            C: packed(hd + gn, columns),
            dt: self.part(self.gates, Io::F32, heads, 0, 1),
            A: tensor(self.params, 0, [0, 0, 1], Io::F32),
            dt_bias: tensor(self.params, heads * 4, [0, 0, 1], Io::F32),
            out: self.part(self.out, self.out_io, hd, 0, rows),
        });
        if self.gate {
            args.z = packed(hd + 2 * gn, rows);
        }
        args
    }

    fn delta(&self) -> replayssm_delta_args {
        let Shape { heads, rows, columns, groups, .. } = self.shape;
        let (width, hd, gn) = (self.width(), heads * rows, groups * columns);
        let packed = |begin, head| self.part(self.packed, self.io, width, begin, head);
        let gates = self.shape.gates();
        desc!(replayssm_delta_args {
            q: packed(hd + gn, columns),
            k: packed(hd, columns),
            v: packed(0, rows),
            g: self.part(self.gates, Io::F32, gates, 0, gates / heads),
            beta: self.part(self.beta, Io::F32, heads, 0, 1),
            A_log: tensor(self.params, 0, [0, 0, 1], Io::F32),
            dt_bias: tensor(self.params, heads * 4, [0, 0, gates / heads], Io::F32),
            out: self.part(self.out, self.out_io, hd, 0, rows),
        })
    }
}

/// What a slots handle has counted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Stats {
    /// Checkpoint tiles that were rewritten.
    pub flushes: u64,
    /// Bytes of checkpoints and rings, read and written.
    pub bytes: u64,
}

/// A pool with a slots handle of its own.
#[derive(Debug)]
pub struct Pool {
    layers: *mut replayssm_layers,
    slots: *mut replayssm_slots,
    shape: Shape,
}

impl Drop for Pool {
    fn drop(&mut self) {
        replayssm_layers_destroy(self.layers);
        replayssm_slots_destroy(self.slots);
    }
}

impl Pool {
    /// Creates both.
    pub fn new(context: &Context, desc: &PoolDesc) -> Result<Self> {
        let mut pool = Pool { layers: null_mut(), slots: null_mut(), shape: desc.shape };
        let (slots, layers) = (desc.slots(), desc.pool());
        // SAFETY: descriptors are locals, the answer is a field of one.
        ok(unsafe { replayssm_slots_create(context.0, &slots, &mut pool.slots) })?;
        // SAFETY: as above; nothing is lent.
        ok(unsafe { replayssm_layers_create(pool.slots, &layers, null(), 0, &mut pool.layers) })?;
        Ok(pool)
    }

    /// One layer of a step, or of an extend.
    pub fn step(&self, layer: usize, rows: &Rows, tensors: &Tensors, exec: &Exec) -> Result<()> {
        let (batch, exec) = (rows.batch(), exec.descriptor());
        if self.shape.family == Family::Mamba2 {
            let (args, call) =
                (tensors.mamba2(), if rows.extend { replayssm_mamba2_extend } else { replayssm_mamba2_step });
            // SAFETY: descriptors are locals; what they point to are buffers of the sizes that shape and rows say.
            return ok(unsafe { call(self.layers, layer as i32, &batch, &args, &exec) });
        }
        let (args, call) = (tensors.delta(), if rows.extend { replayssm_delta_extend } else { replayssm_delta_step });
        // SAFETY: as above.
        ok(unsafe { call(self.layers, layer as i32, &batch, &args, &exec) })
    }

    /// Commits as many tokens of each row as counts say, int32; all without them.
    pub fn commit(&self, rows: &Rows, counts: Option<&Buffer>, exec: &Exec) -> Result<()> {
        let counts = counts.map_or(null(), |counts| counts.at(0).cast_const().cast());
        let args = desc!(replayssm_commit_args { counts: counts });
        let (batch, exec) = (rows.batch(), exec.descriptor());
        // SAFETY: descriptors are locals; the counts are a buffer with an element per row.
        ok(unsafe { replayssm_commit(self.slots, &batch, &args, &exec) })
    }

    /// Empties slots, or (with positions, int64) makes them ready for an import.
    pub fn reset(&self, rows: &Rows, positions: Option<&Buffer>, exec: &Exec) -> Result<()> {
        let position = positions.map_or(null(), |positions| positions.at(0).cast_const().cast());
        let args = desc!(replayssm_reset_args { position: position });
        let (list, exec) = (rows.entries(), exec.descriptor());
        // SAFETY: descriptors are locals; lists and positions are buffers with an element per row.
        ok(unsafe { replayssm_reset(self.slots, &list, &args, &exec) })
    }

    fn dense(buffer: &Buffer, layer: usize) -> replayssm_state {
        desc!(replayssm_state { dtype: REPLAYSSM_DTYPE_F32, layer: layer as i32, data: buffer.at(0).cast() })
    }

    /// Writes a layer's states at the committed positions into a dense fp32 buffer.
    pub fn export(&self, layer: usize, rows: &Rows, to: &Buffer, exec: &Exec) -> Result<()> {
        let (list, state, exec) = (rows.entries(), Self::dense(to, layer), exec.descriptor());
        // SAFETY: descriptors are locals; the buffer holds a state per row.
        ok(unsafe { replayssm_export(self.layers, &list, null(), &state, &exec) })
    }

    /// The way back, behind a reset.
    pub fn import(&self, layer: usize, rows: &Rows, from: &Buffer, exec: &Exec) -> Result<()> {
        let (list, state, exec) = (rows.entries(), Self::dense(from, layer), exec.descriptor());
        // SAFETY: as for an export.
        ok(unsafe { replayssm_import(self.layers, &list, null(), &state, &exec) })
    }

    /// Snapshots of the rows whose last commit reached `at`, int64 per row, into their own slots' numbers.
    pub fn snapshot(&self, rows: &Rows, at: &Buffer, exec: &Exec) -> Result<()> {
        let args = desc!(replayssm_snapshot_args { at: at.at(0).cast_const().cast(), dst: Rows::list(rows.ids) });
        let (batch, exec) = (rows.batch(), exec.descriptor());
        // SAFETY: descriptors are locals; lists and positions are buffers with an element per row.
        ok(unsafe { replayssm_snapshot(self.slots, &batch, &args, &exec) })
    }

    /// An error if the device has found something wrong so far. What was enqueued must have run.
    pub fn check(&self) -> Result<()> {
        let mut report = desc!(replayssm_report {});
        // SAFETY: the answer is a local.
        ok(unsafe { replayssm_check(self.slots, 0, &mut report) })?;
        match report.bits {
            0 => Ok(()),
            bits => Err(format!("replayssm_check reports fault bits {bits:#x}, {} times", report.count)),
        }
    }

    /// What has been counted so far.
    pub fn stats(&self) -> Result<Stats> {
        let mut s = desc!(replayssm_stats {});
        // SAFETY: the answer is a local.
        ok(unsafe { replayssm_stats_read(self.slots, &mut s) })?;
        let bytes = s.checkpoint_bytes_read + s.checkpoint_bytes_written + s.ring_bytes_read + s.ring_bytes_written;
        Ok(Stats { flushes: s.flushes, bytes })
    }
}
