//! The types of the C interface. Their comments become the header's.

#![allow(non_camel_case_types, non_snake_case, reason = "these are the C names")]

use std::ffi::{c_char, c_void};

use super::read::Descriptor;

/// What a call returns. Numbers are pinned; new ones fill the gaps. Treat an unknown number as an error.
pub type replayssm_status = i32;
/// The call was accepted. On the CPU its work is done; otherwise it is enqueued.
pub const REPLAYSSM_OK: replayssm_status = 0;
/// A field has a value that can never be right; the message names it.
pub const REPLAYSSM_ERROR_INVALID_ARGUMENT: replayssm_status = 1;
/// A handle is NULL, destroyed, of another type, or not a handle.
pub const REPLAYSSM_ERROR_INVALID_HANDLE: replayssm_status = 2;
/// A position or a count lies outside what the slot holds; nothing changed.
pub const REPLAYSSM_ERROR_OUT_OF_RANGE: replayssm_status = 3;
/// The buffer is too small; the message says what is needed.
pub const REPLAYSSM_ERROR_BUFFER_TOO_SMALL: replayssm_status = 4;
/// The stream belongs to another context or device; the CPU backend takes none.
pub const REPLAYSSM_ERROR_WRONG_STREAM: replayssm_status = 5;
/// An option, shape, dtype or descriptor of a newer header that this library does not know.
pub const REPLAYSSM_ERROR_UNSUPPORTED: replayssm_status = 20;
/// No CUDA in this build, or no usable driver; the message says which.
pub const REPLAYSSM_ERROR_NO_CUDA: replayssm_status = 21;
/// The library has no kernels for the device's architecture; the message says for which it has.
pub const REPLAYSSM_ERROR_NO_CODE_FOR_ARCH: replayssm_status = 22;
/// An allocation failed; nothing changed.
pub const REPLAYSSM_ERROR_OUT_OF_MEMORY: replayssm_status = 40;
/// The CUDA driver refused a call: replayssm_last_cuda_error has its CUresult, the message its name. An earlier failure of other work
/// on the same context may be the cause.
pub const REPLAYSSM_ERROR_CUDA: replayssm_status = 41;
/// The CUDA context has failed for good, by whoever's work: an illegal address, a launch that timed out, uncorrectable memory.
/// From then on every call on the replayssm_context, and on handles made on it, gives this status, whatever it would give otherwise; destroying
/// works. Contexts on other devices and on the CPU go on. replayssm_last_cuda_error has the CUresult, the message the driver's call that told first.
pub const REPLAYSSM_ERROR_DEVICE_LOST: replayssm_status = 42;
/// The stream captures, and the call waits for its work; the capture goes on.
pub const REPLAYSSM_ERROR_CAPTURING: replayssm_status = 60;
/// A blob was cut off or changed, or is not one for this handle; the message says what differs. The slot is as it was.
pub const REPLAYSSM_ERROR_BAD_BLOB: replayssm_status = 61;
/// A defect of this library was caught at the boundary. Reset the slots of the call.
pub const REPLAYSSM_ERROR_INTERNAL: replayssm_status = 90;

/// Element type of a tensor or index array.
pub type replayssm_dtype = i32;
/// Where it is legal: the default.
pub const REPLAYSSM_DTYPE_NONE: replayssm_dtype = 0;
/// IEEE binary32.
pub const REPLAYSSM_DTYPE_F32: replayssm_dtype = 1;
/// bfloat16.
pub const REPLAYSSM_DTYPE_BF16: replayssm_dtype = 2;
/// IEEE binary16.
pub const REPLAYSSM_DTYPE_F16: replayssm_dtype = 3;
/// Signed 32-bit index.
pub const REPLAYSSM_DTYPE_I32: replayssm_dtype = 16;
/// Signed 64-bit index.
pub const REPLAYSSM_DTYPE_I64: replayssm_dtype = 17;

/// Where a context runs.
pub type replayssm_backend = i32;
/// CUDA for a thread that has a current CUDA context, whose memory is then meant; else the CPU.
pub const REPLAYSSM_BACKEND_AUTO: replayssm_backend = 0;
/// Host memory, the caller's and the library's threads.
pub const REPLAYSSM_BACKEND_CPU: replayssm_backend = 1;
/// Device memory and streams.
pub const REPLAYSSM_BACKEND_CUDA: replayssm_backend = 2;

/// Family of a pool.
pub type replayssm_family = i32;
/// Mamba-2; also linear attention with a fixed decay per head (a broadcast dt, no_softplus).
pub const REPLAYSSM_FAMILY_MAMBA2: replayssm_family = 1;
/// Gated DeltaNet: one log decay per token and head.
pub const REPLAYSSM_FAMILY_GDN: replayssm_family = 2;
/// Kimi Delta Attention: one log decay per token, head and key channel.
pub const REPLAYSSM_FAMILY_KDA: replayssm_family = 3;
/// The depthwise causal convolution in front of such layers.
pub const REPLAYSSM_FAMILY_CONV1D: replayssm_family = 4;

/// How a state lies in its checkpoint.
pub type replayssm_format = i32;
/// SPLIT32.
pub const REPLAYSSM_FORMAT_DEFAULT: replayssm_format = 0;
/// A fp32 state as two 16-bit planes per head: bfloat16 values, then the rest of the bits. Lossless, 4 bytes an element.
pub const REPLAYSSM_FORMAT_SPLIT32: replayssm_format = 1;
/// A fp32 state.
pub const REPLAYSSM_FORMAT_F32: replayssm_format = 2;
/// A bfloat16 state, rounded whenever it is stored: to nearest even, or stochastically.
pub const REPLAYSSM_FORMAT_BF16: replayssm_format = 3;
/// A binary16 state, rounded whenever it is stored: to nearest even, or stochastically. Overflow is infinite.
pub const REPLAYSSM_FORMAT_F16: replayssm_format = 4;

/// How a step computes its outputs. A fp32 state is exact under every readout; a 16-bit state is that of the fp32
/// recurrence from the checkpoint as stored, rounded at every fold.
pub type replayssm_readout = i32;
/// HIGH for BF16, and for SPLIT32 with bfloat16 activations; else FULL.
pub const REPLAYSSM_READOUT_DEFAULT: replayssm_readout = 0;
/// From a bfloat16 view of the checkpoint: half the bytes of SPLIT32, all of BF16. Not for F32 and F16.
pub const REPLAYSSM_READOUT_HIGH: replayssm_readout = 1;
/// From the whole checkpoint, fp32 grade.
pub const REPLAYSSM_READOUT_FULL: replayssm_readout = 2;
/// By the plain update's own arithmetic: equal to `replayssm_*_extend`'s outputs by bytes, at any T.
pub const REPLAYSSM_READOUT_EXACT: replayssm_readout = 3;

/// Which query and key head a value head hv of a delta rule uses.
pub type replayssm_head_map = i32;
/// hv / (HV / H): neighbours share (vLLM, SGLang).
pub const REPLAYSSM_HEAD_MAP_GROUPED: replayssm_head_map = 0;
/// hv % H (ggml).
pub const REPLAYSSM_HEAD_MAP_TILED: replayssm_head_map = 1;

/// How a delta rule's log decay g comes.
pub type replayssm_gate = i32;
/// g = -exp(A_log) softplus(a + dt_bias), a being args.g.
pub const REPLAYSSM_GATE_SOFTPLUS: replayssm_gate = 0;
/// KDA: g = lower_bound sigmoid(exp(A_log) (a + dt_bias)).
pub const REPLAYSSM_GATE_LOWER_BOUND: replayssm_gate = 1;
/// args.g is the log decay itself, at most 0.
pub const REPLAYSSM_GATE_LOG_DECAY: replayssm_gate = 2;

/// When checkpoints are folded before the window forces it.
pub type replayssm_schedule = i32;
/// First folds are spread over a window by ring id, so that rows which start together do not fold in one step.
pub const REPLAYSSM_SCHEDULE_STAGGERED: replayssm_schedule = 0;
/// Folds end at multiples of window - max_step_tokens + 1: a request folds at the same tokens whatever else runs.
pub const REPLAYSSM_SCHEDULE_BY_POSITION: replayssm_schedule = 1;
/// Only when the window is full.
pub const REPLAYSSM_SCHEDULE_NONE: replayssm_schedule = 2;

/// How commit counts are meant; all are clamped to 0 .. tokens of the row.
pub type replayssm_counts = i32;
/// Tokens accepted, the bonus token included (vLLM, SGLang).
pub const REPLAYSSM_COUNTS_ACCEPTED: replayssm_counts = 0;
/// Drafts accepted: one token less.
pub const REPLAYSSM_COUNTS_ACCEPTED_DRAFTS: replayssm_counts = 1;
/// Tokens rejected (llama.cpp).
pub const REPLAYSSM_COUNTS_REJECTED: replayssm_counts = 2;

/// Axis order of a dense state.
pub type replayssm_orientation = i32;
/// [headdim, dstate], delta rules [V, K]; a convolution: [channels, width - 1], oldest first.
pub const REPLAYSSM_STATE_ROW_MAJOR: replayssm_orientation = 0;
/// [dstate, headdim], delta rules [K, V]; a convolution: [width - 1, channels].
pub const REPLAYSSM_STATE_COL_MAJOR: replayssm_orientation = 1;

/// Where arrays lie.
pub type replayssm_where = i32;
/// In the context's memory (host memory on the CPU backend), read when the work runs: a bad value sets a fault bit and
/// that entry is skipped.
pub const REPLAYSSM_WHERE_DEVICE: replayssm_where = 0;
/// In host memory, read before the call returns: a bad value is an error and nothing happens. At most 256 entries.
pub const REPLAYSSM_WHERE_HOST: replayssm_where = 1;

/// How much a line of the log matters.
pub type replayssm_log_level = i32;
/// No line.
pub const REPLAYSSM_LOG_NONE: replayssm_log_level = 0;
/// What is right, but slower or larger than it could be.
pub const REPLAYSSM_LOG_WARNING: replayssm_log_level = 1;
/// What was chosen, created and destroyed; warnings too.
pub const REPLAYSSM_LOG_INFO: replayssm_log_level = 2;

/// Takes a line of the log: the desc's log_user, a level of REPLAYSSM_LOG_*, and a text of one line that lives for the call.
/// It runs on the thread of a call that creates or destroys, never in any other and never on the library's own threads; on several
/// threads at once where they make such calls. It must not call this library, throw, or leave by longjmp.
pub type replayssm_log =
    Option<unsafe extern "C" fn(user: *mut c_void, level: replayssm_log_level, text: *const c_char)>;

/// A CUDA stream; the same type as CUstream and cudaStream_t. NULL on the CPU backend.
pub type replayssm_stream = *mut CUstream_st;

/// What a stream points to; defined by CUDA.
pub enum CUstream_st {}

/// One backend on one device. Immutable after create.
pub enum replayssm_context {}
/// Positions and schedule of all layers of a model on one device.
pub enum replayssm_slots {}
/// A pool: n_layers equal layers of one family on a slots handle.
pub enum replayssm_layers {}

/// An index array. A leaf: embedded in others, without struct_size, never changed.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct replayssm_ids {
    /// Element 0, aligned to its type.
    pub data: *const c_void,
    /// Distance of neighbours in elements; 0 means 1.
    pub stride: i64,
    /// REPLAYSSM_DTYPE_I32 or REPLAYSSM_DTYPE_I64.
    pub dtype: replayssm_dtype,
    /// Zero.
    pub reserved: u32,
}

/// A strided tensor with the axes row, token, head (or group, section, channel); the last axis is contiguous. Strides are in
/// elements, and 0 is 0: a broadcast input. A packed row of several inputs is several views of it. A leaf, never changed.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct replayssm_tensor {
    /// Element 0, aligned to its type. NULL: absent, where that is legal.
    pub data: *mut c_void,
    /// Distance of batch rows; ignored with cu_seqlens.
    pub stride_row: i64,
    /// Distance of tokens.
    pub stride_token: i64,
    /// Distance of heads (groups, sections; for a parameter: of heads or channels).
    pub stride_head: i64,
    /// REPLAYSSM_DTYPE_F32, REPLAYSSM_DTYPE_BF16 or REPLAYSSM_DTYPE_F16.
    pub dtype: replayssm_dtype,
    /// Zero.
    pub reserved: u32,
}

/// What a context is to be.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct replayssm_context_desc {
    /// sizeof(replayssm_context_desc).
    pub struct_size: u32,
    /// REPLAYSSM_BACKEND_*.
    pub backend: replayssm_backend,
    /// CUDA: device ordinal, whose primary context is used; -1: the calling thread's current context, which must outlive the library's.
    /// 0 on the CPU backend.
    pub device: i32,
    /// CPU: threads that work on a call, the calling one and n_threads - 1 of the library's own; up to 1024, 0 = as many as the
    /// process may use.
    pub n_threads: i32,
    /// Zero.
    pub flags: u32,
    /// Zero.
    pub reserved: u32,
    /// Gets a line whenever something is created or destroyed on this context. NULL: nobody does. It and log_user must last until
    /// the context and everything on it are gone.
    pub log: replayssm_log,
    /// Handed to log; the library does not look at it.
    pub log_user: *mut c_void,
    /// REPLAYSSM_LOG_*: lines of this level and of those below. 0: none.
    pub log_level: replayssm_log_level,
    /// Zero.
    pub log_reserved: u32,
}

/// What a context is. Out.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct replayssm_context_info {
    /// sizeof(replayssm_context_info), set by the caller.
    pub struct_size: u32,
    /// REPLAYSSM_BACKEND_CPU or REPLAYSSM_BACKEND_CUDA.
    pub backend: replayssm_backend,
    /// Device ordinal; 0 on the CPU backend.
    pub device: i32,
    /// Threads that work on a call; 0 on CUDA.
    pub n_threads: i32,
    /// Name of the device or of the instruction set, with a final zero.
    pub name: [c_char; 64],
}

/// Flag of a slots handle: steps and extends look for misuse before they work, and report it as faults with slot and layer (see
/// replayssm_check): DUPLICATE, CANARY, NOT_FINITE. (Ids, lengths, counts and positions are looked at without it too.) For finding
/// defects: it costs a second launch and a second reading of all inputs, and 64 to 191 bytes behind every slot's and ring's part of
/// owned memory. The work itself is the same, and its results too. Of a call that is done in parts (replayssm_exec.n_parts), part 0 looks
/// at everything; only a convolution's x that is its out as well, which other parts are writing by then, is not looked at for NOT_FINITE.
pub const REPLAYSSM_SLOTS_CHECKS: u32 = 1;

/// Sizes and rules of a slots handle.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct replayssm_slots_desc {
    /// sizeof(replayssm_slots_desc).
    pub struct_size: u32,
    /// Checkpoints: live ones and cached ones. At least 1.
    pub n_slots: i32,
    /// Rings: requests that can run at once, up to 2^20. 0 = n_slots.
    pub n_rings: i32,
    /// W, 1 to 256 and at least max_step_tokens. 0 = max(16, min(256, 8 max_step_tokens)).
    pub window: i32,
    /// T_max: the longest step, 1 to 256. 0 = 1.
    pub max_step_tokens: i32,
    /// Committed tokens that a rewind may always take back, 0 to 256: no step folds them. Adds rows to every ring.
    pub min_rewind: i32,
    /// REPLAYSSM_SCHEDULE_*.
    pub schedule: replayssm_schedule,
    /// REPLAYSSM_SLOTS_*.
    pub flags: u32,
}

/// What a pool is. Fields of other families are zero.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct replayssm_pool_desc {
    /// sizeof(replayssm_pool_desc).
    pub struct_size: u32,
    /// REPLAYSSM_FAMILY_MAMBA2, REPLAYSSM_FAMILY_GDN, REPLAYSSM_FAMILY_KDA or REPLAYSSM_FAMILY_CONV1D.
    pub family: replayssm_family,
    /// Layers, 1 to 2^20.
    pub n_layers: i32,
    /// Activation dtype of x, B, C, z or q, k, v. Gates and parameters carry their own.
    pub io: replayssm_dtype,
    /// Output dtype; 0 = io.
    pub out: replayssm_dtype,
    /// REPLAYSSM_FORMAT_*; 0 for a convolution.
    pub format: replayssm_format,
    /// REPLAYSSM_READOUT_*; 0 for a convolution.
    pub readout: replayssm_readout,
    /// BF16 and F16: 1 rounds stochastically (Philox4x32-10; key: the ring's seed; counter: position, layer, element / 4).
    pub stochastic_rounding: i32,
    /// Mamba-2: heads, up to 2^20, as all counts of heads, groups and channels.
    pub nheads: i32,
    /// Mamba-2: rows of a head's state, 1 to 256.
    pub headdim: i32,
    /// Mamba-2: columns of a head's state, 1 to 256.
    pub dstate: i32,
    /// Mamba-2: groups of heads that share B and C; divides nheads.
    pub ngroups: i32,
    /// GDN, KDA: query and key heads; divides HV.
    pub H: i32,
    /// GDN, KDA: value heads, those of the state.
    pub HV: i32,
    /// GDN, KDA: columns of a head's state, 1 to 256.
    pub K: i32,
    /// GDN, KDA: rows of a head's state, 1 to 256.
    pub V: i32,
    /// GDN, KDA: REPLAYSSM_HEAD_MAP_*.
    pub head_map: replayssm_head_map,
    /// GDN, KDA: dtype of the u records, which readouts alone use. 0 = bfloat16 for HIGH with bfloat16 activations, else fp32.
    pub u_dtype: replayssm_dtype,
    /// Convolution: channels of all sections.
    pub channels: i32,
    /// Convolution: taps, 2 to 4.
    pub width: i32,
    /// Convolution: sections of the channel axis, stride_head apart in x and out; 0 = one section, as for a packed row of x, B, C.
    pub n_sections: i32,
    /// Zero.
    pub reserved: u32,
    /// Convolution: host array [n_sections] of the channels of each section; read before the call returns.
    pub section_channels: *const i32,
}

/// A component of a pool's memory.
pub type replayssm_component_kind = i32;
/// States, per slot. F32, BF16, F16: [nheads, headdim, dstate] (delta rules [HV, V, K]). SPLIT32: per head a bfloat16 plane [headdim, dstate], then an
/// int16 plane of the same shape: value bits = (high << 16) + low.
pub const REPLAYSSM_COMPONENT_CHECKPOINT: replayssm_component_kind = 1;
/// Positions of 16-row checkpoint tiles, int64, per slot; for a convolution per ring.
pub const REPLAYSSM_COMPONENT_TAGS: replayssm_component_kind = 2;
/// Mamba-2 records of x, per ring: io [nheads, rows, headdim], rows = window + min_rewind + max_step_tokens.
pub const REPLAYSSM_COMPONENT_X: replayssm_component_kind = 3;
/// Mamba-2 records of B, per ring: io [ngroups, rows, dstate].
pub const REPLAYSSM_COMPONENT_B: replayssm_component_kind = 4;
/// Mamba-2 records of dt and A dt, per ring: fp32 [nheads, rows, 2].
pub const REPLAYSSM_COMPONENT_DT: replayssm_component_kind = 5;
/// Delta-rule records of k as it came, per ring: io [H, rows, K].
pub const REPLAYSSM_COMPONENT_K: replayssm_component_kind = 6;
/// Delta-rule records of k's reciprocal norm, per ring: fp32 [H, rows].
pub const REPLAYSSM_COMPONENT_KNORM: replayssm_component_kind = 7;
/// Delta-rule records of v, per ring: io [HV, rows, V].
pub const REPLAYSSM_COMPONENT_V: replayssm_component_kind = 8;
/// Delta-rule records of the log decay, per ring: fp32 [HV, rows], KDA [HV, rows, K].
pub const REPLAYSSM_COMPONENT_G: replayssm_component_kind = 9;
/// Delta-rule records of beta, per ring: fp32 [HV, rows].
pub const REPLAYSSM_COMPONENT_BETA: replayssm_component_kind = 10;
/// Delta-rule readout records of u, per ring: u_dtype [HV, rows, V]; not with EXACT.
pub const REPLAYSSM_COMPONENT_U: replayssm_component_kind = 11;
/// Convolution inputs, per ring: io [width - 1 + min_rewind + max_step_tokens, channels].
pub const REPLAYSSM_COMPONENT_CONV: replayssm_component_kind = 12;
/// A convolution's window as a snapshot or copy has stored it, per slot: io [width - 1, channels], oldest first.
pub const REPLAYSSM_COMPONENT_WINDOW: replayssm_component_kind = 13;
/// Position of that window, per slot: an int64 for each 128 channels; -1: there is none.
pub const REPLAYSSM_COMPONENT_WINDOW_TAGS: replayssm_component_kind = 14;

/// Memory that the caller lends for one component; what is not lent is allocated by the library. Strides are in bytes:
/// layer l of slot (or ring) s lies at base + offset_bytes + l * layer_stride_bytes + s * slot_stride_bytes, or at layer_bases[l] +
/// offset_bytes + s * slot_stride_bytes. Lent memory is not touched at create: reset or import each slot before its first step.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct replayssm_lent {
    /// sizeof(replayssm_lent).
    pub struct_size: u32,
    /// REPLAYSSM_COMPONENT_*, each at most once.
    pub kind: replayssm_component_kind,
    /// Layer 0 of slot 0; with offset_bytes aligned to 16 bytes (tags: 8, here and below). NULL with layer_bases. Stays the caller's,
    /// and must outlive the pool, or its next rebind.
    pub base: *mut c_void,
    /// Multiple of 16; 0 = slot_stride_bytes times the number of slots (rings), and with layer_bases.
    pub layer_stride_bytes: i64,
    /// Multiple of 16, at least the component's bytes; 0 = dense.
    pub slot_stride_bytes: i64,
    /// Layers that were allocated one by one: host array [n_layers] of addresses in the context's memory, each slot 0 of a layer, with
    /// offset_bytes aligned as base; read before the call returns. No slot of a layer may overlap one of another. The library keeps a table
    /// of them, 8 bytes a layer, beside the memory that it owns. NULL: base.
    pub layer_bases: *const *mut c_void,
    /// Where the component begins in what base or layer_bases point to, such as a page that holds several; 0 or more.
    pub offset_bytes: i64,
}

/// Size and place of a component. Out.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct replayssm_component {
    /// sizeof(replayssm_component), set by the caller in element 0; it is the element stride.
    pub struct_size: u32,
    /// REPLAYSSM_COMPONENT_*.
    pub kind: replayssm_component_kind,
    /// 1: indexed by ring; 0: by slot.
    pub per_ring: i32,
    /// Zero.
    pub reserved: u32,
    /// Bytes of one layer's part of one slot (or ring), contiguous.
    pub bytes: u64,
    /// Layer 0 of slot 0; NULL before the pool exists.
    pub base: *mut c_void,
    /// Bytes from slot to slot.
    pub slot_stride_bytes: i64,
    /// Bytes from layer to layer; 0 where layers were lent by layer_bases.
    pub layer_stride_bytes: i64,
    /// Slot 0 of each layer: host array [n_layers], right however the layers lie. The library's, until the pool is destroyed; a rebind
    /// changes its contents. NULL before the pool exists.
    pub layer_bases: *const *mut c_void,
}

/// What is asked of a plan. NULL: all defaults.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct replayssm_plan_args {
    /// sizeof(replayssm_plan_args).
    pub struct_size: u32,
    /// Rows of a step, 1 to 2^20; 0 = 1. Bytes per row hardly depend on it.
    pub batch: i32,
    /// Tokens of a row in a step, 1 to max_step_tokens; 0 = max_step_tokens.
    pub tokens: i32,
    /// Zero.
    pub reserved: u32,
    /// Memory that slots and rings may take, in bytes; 0: no budget.
    pub budget_bytes: u64,
}

/// What a model takes, all pools and layers together. Out.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct replayssm_plan_info {
    /// sizeof(replayssm_plan_info), set by the caller.
    pub struct_size: u32,
    /// The window, max_step_tokens to 256, that moves the fewest bytes per step for this batch and these tokens; of windows within a
    /// hundredth of that, the smallest, since rings cost memory.
    pub recommended_window: i32,
    /// Bytes of a slot: checkpoints and tags, each layer's part of a component padded to 128 bytes as owned memory has it, here and below.
    pub checkpoint_bytes: u64,
    /// Bytes of a ring.
    pub ring_bytes: u64,
    /// Bytes of the positions of all rings (32 each) and of the counters.
    pub fixed_bytes: u64,
    /// n_slots * checkpoint_bytes + n_rings * ring_bytes + fixed_bytes: what creating all of it allocates in the context's memory.
    pub total_bytes: u64,
    /// The largest n, up to 2^20, for which n slots and n rings have a total within the budget; -1 without a budget.
    pub slots_in_budget: i64,
    /// Bytes of a sequence where, instead of a ring, one whole state is kept for each token of a step beside the state itself:
    /// 1 + max_step_tokens states, and convolution windows longer by max_step_tokens. To compare with checkpoint_bytes + ring_bytes.
    pub state_per_draft_bytes: u64,
    /// The most such sequences in the budget, up to 2^20; -1 without a budget.
    pub slots_in_budget_state_per_draft: i64,
    /// Bytes that a row moves in a step, on average over a flush cycle, all tokens being accepted: those of replayssm_explain, which counts
    /// reads of records as the CPU kernels make them.
    pub step_bytes: u64,
    /// Bytes that a row moves where the plain update takes as many tokens.
    pub plain_step_bytes: u64,
    /// Share of rows that fold in a step, on average, 0 to 1.
    pub flush_share: f64,
}

/// What a saved slot is for.
pub type replayssm_save_kind = i32;
/// Checkpoint, ring and position as they are: goes on bit for bit on a handle of the same configuration, on any backend.
pub const REPLAYSSM_SAVE_LIVE: replayssm_save_kind = 0;
/// The fp32 states at the committed position and the convolution windows: goes on under any window, longest step, format, readout,
/// backend and split of layers into pools. 16-bit formats round when they are restored.
pub const REPLAYSSM_SAVE_PORTABLE: replayssm_save_kind = 1;
/// A slot without a ring, as a snapshot or REPLAYSSM_COPY_STORE leaves it: checkpoint, tags and stored windows, as they are. Goes on by
/// REPLAYSSM_COPY_LOAD, under any window, longest step, readout and backend; shapes, formats and split of layers are the same.
pub const REPLAYSSM_SAVE_STORED: replayssm_save_kind = 2;

/// What a restore sets beside what the blob has.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct replayssm_restore_args {
    /// sizeof(replayssm_restore_args).
    pub struct_size: u32,
    /// Zero.
    pub reserved: u32,
    /// Host pointer to the generation of the ring from now on. NULL: one more than before.
    pub generation: *const u32,
}

/// Flag of a call, CUDA: its kernels may begin while the work in front of them on the stream ends (programmatic dependent launch). They
/// wait for that work before they read or write anything, and let nothing begin behind them before they have ended.
pub const REPLAYSSM_EXEC_PDL: u32 = 1;
/// Flag of a call, with REPLAYSSM_EXEC_PDL: checkpoints may be brought near before that wait. The caller promises that the batch is not
/// being written by the work in front.
pub const REPLAYSSM_EXEC_PDL_PREFETCH: u32 = 2;

/// How a call is to run. NULL: all defaults.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct replayssm_exec {
    /// sizeof(replayssm_exec).
    pub struct_size: u32,
    /// REPLAYSSM_EXEC_*; 0 on the CPU backend.
    pub flags: u32,
    /// The caller's stream, of the context's CUDA context (or of a green context on its device, with a driver for CUDA 12.5 or later);
    /// NULL: its default stream, and on the CPU backend the only one.
    pub stream: replayssm_stream,
    /// CPU: do share part of n_parts of the work on the calling thread. The caller runs every part, in any order, at the
    /// same time if it likes, and waits for all before the next call on the same slots. Its threads need stack as any caller's.
    pub part: i32,
    /// 0 or 1: the call does everything, with the library's threads. CUDA takes no other.
    pub n_parts: i32,
}

/// Flag of a batch: null_id is padding too.
pub const REPLAYSSM_BATCH_NULL_ID: u32 = 1;
/// Flag of a batch: leave outputs of null rows alone instead of writing zeros.
pub const REPLAYSSM_BATCH_KEEP_NULL_OUTPUTS: u32 = 2;
/// Flag of a batch: it goes to extend calls and their commit. Without it, to steps and their commit.
pub const REPLAYSSM_BATCH_EXTEND: u32 = 4;

/// One batch of a model step. The same descriptor goes to every layer, every convolution and the commit of the step, and what it
/// points to stays as it is until the commit has run. Arrays lie in the context's memory.
///
/// A row is null iff its slot or ring id is negative, or its slot id is null_id (with the flag). An id at or above its
/// count, a row longer than max_tokens, and falling cu_seqlens also make a null row, and set a fault bit. Null rows
/// write zeros and touch no slot; their other id may be anything. A row of 0 tokens does nothing. No slot and no ring may be in a
/// batch twice, and rows of cu_seqlens may not overlap: the outputs of such rows are undefined.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct replayssm_batch {
    /// sizeof(replayssm_batch).
    pub struct_size: u32,
    /// REPLAYSSM_BATCH_*.
    pub flags: u32,
    /// Rows, padding included; 0 is legal.
    pub n_rows: i32,
    /// Tokens of every row, up to max_step_tokens (extend: any number); 0 with cu_seqlens.
    pub tokens: i32,
    /// With cu_seqlens: no row is longer. 0 = max_step_tokens (extend: no limit).
    pub max_tokens: i32,
    /// With REPLAYSSM_BATCH_NULL_ID: this slot id is padding.
    pub null_id: i32,
    /// Extend: leave the last keep_tail tokens of each row in the ring, so that they can be taken back; up to window.
    pub keep_tail: i32,
    /// Zero.
    pub reserved: u32,
    /// With cu_seqlens: token rows that the packed tensors have; cu_seqlens is clamped to it.
    pub n_tokens: i64,
    /// [n_rows] slot of each row.
    pub slots: replayssm_ids,
    /// [n_rows] ring of each row; data NULL: the same ids as slots.
    pub rings: replayssm_ids,
    /// [n_rows + 1]: row r has tokens cu_seqlens[r] .. cu_seqlens[r + 1] - 1 of the packed tensors. NULL: tokens.
    pub cu_seqlens: *const i32,
    /// [n_rows], nonzero: fold the row's committed history in this step. NULL: none.
    pub flush: *const u8,
    /// [n_rows]: the commit skips rows whose ring is of another generation; steps and extends run them all the same. NULL: it skips
    /// none.
    pub generation: *const u32,
}

/// Inputs, parameters and output of a Mamba-2 call.
///
/// Per head: dt = softplus(dt + dt_bias), g = A dt, S = e^g S + dt x B^T, y = S C + D x, out = y silu(z)
/// (Dao and Gu, "Transformers are SSMs", 2024; the state is [headdim, dstate], dstate contiguous).
#[repr(C)]
#[derive(Clone, Copy)]
pub struct replayssm_mamba2_args {
    /// sizeof(replayssm_mamba2_args).
    pub struct_size: u32,
    /// 0: dt goes through softplus. 1: dt (with its bias) is used as it is.
    pub no_softplus: i32,
    /// io [.., nheads, headdim].
    pub x: replayssm_tensor,
    /// io [.., ngroups, dstate].
    pub B: replayssm_tensor,
    /// io [.., ngroups, dstate].
    pub C: replayssm_tensor,
    /// Any dtype, [.., nheads]: a head axis, no channel axis.
    pub dt: replayssm_tensor,
    /// Any dtype, [nheads] along stride_head. Negative for a decay.
    pub A: replayssm_tensor,
    /// Any dtype, [nheads]; absent = 0.
    pub dt_bias: replayssm_tensor,
    /// Any dtype, [nheads], or with D_per_element [nheads, headdim]; absent = 0.
    pub D: replayssm_tensor,
    /// Whether D has an element per channel.
    pub D_per_element: i32,
    /// Zero.
    pub reserved: u32,
    /// io [.., nheads, headdim]; absent = no gate.
    pub z: replayssm_tensor,
    /// Output dtype, [.., nheads, headdim]. Overlaps no input.
    pub out: replayssm_tensor,
}

/// Inputs, parameters and output of a Gated DeltaNet or Kimi Delta Attention call.
///
/// Per value head, with its query and key head: q and k are L2-normalised, beta = sigmoid(b), S = S e^g (KDA: per key channel),
/// S = S + beta (v - S k) k^T, out = scale S q (Yang et al., "Gated Delta Networks", 2024; Kimi Team, "Kimi Linear", 2025; the state
/// is [V, K], K contiguous).
#[repr(C)]
#[derive(Clone, Copy)]
pub struct replayssm_delta_args {
    /// sizeof(replayssm_delta_args).
    pub struct_size: u32,
    /// REPLAYSSM_GATE_*.
    pub gate: replayssm_gate,
    /// io [.., H, K].
    pub q: replayssm_tensor,
    /// io [.., H, K].
    pub k: replayssm_tensor,
    /// io [.., HV, V].
    pub v: replayssm_tensor,
    /// Any dtype, raw a or log decay: GDN [.., HV], KDA [.., HV, K].
    pub g: replayssm_tensor,
    /// Any dtype, [.., HV]: raw b, or beta itself with beta_processed.
    pub beta: replayssm_tensor,
    /// Any dtype, [HV]; absent with REPLAYSSM_GATE_LOG_DECAY.
    pub A_log: replayssm_tensor,
    /// Any dtype, GDN [HV], KDA [HV, K]; absent = 0, and with REPLAYSSM_GATE_LOG_DECAY.
    pub dt_bias: replayssm_tensor,
    /// With REPLAYSSM_GATE_LOWER_BOUND: below 0.
    pub lower_bound: f32,
    /// Factor of the output; 0 = 1 / sqrt(K).
    pub scale: f32,
    /// Inside the root of the norms of q and k; 0 = 1e-6.
    pub l2norm_eps: f32,
    /// 1: q and k are used as they come.
    pub no_l2norm: i32,
    /// 1: beta does not go through the sigmoid.
    pub beta_processed: i32,
    /// Zero.
    pub reserved: u32,
    /// Output dtype, [.., HV, V]. Overlaps no input.
    pub out: replayssm_tensor,
}

/// Inputs, parameters and output of a convolution call: out_t = silu(bias + sum_i weight_i x_{t - width + 1 + i}).
#[repr(C)]
#[derive(Clone, Copy)]
pub struct replayssm_conv1d_args {
    /// sizeof(replayssm_conv1d_args).
    pub struct_size: u32,
    /// 0: SiLU follows. 1: it does not.
    pub no_silu: i32,
    /// io; head axis = section.
    pub x: replayssm_tensor,
    /// Output dtype; head axis = section. May be x itself if the dtypes are equal.
    pub out: replayssm_tensor,
    /// Any dtype, [channels, width]: channels are stride_head apart, taps contiguous, oldest first.
    pub weight: replayssm_tensor,
    /// Any dtype, [channels]: stride_head apart; absent = 0.
    pub bias: replayssm_tensor,
}

/// How many tokens of each row are accepted.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct replayssm_commit_args {
    /// sizeof(replayssm_commit_args).
    pub struct_size: u32,
    /// REPLAYSSM_COUNTS_ACCEPTED, REPLAYSSM_COUNTS_ACCEPTED_DRAFTS or REPLAYSSM_COUNTS_REJECTED.
    pub convention: replayssm_counts,
    /// [n_rows] in the context's memory; NULL: all tokens of each row. NULL for an extend.
    pub counts: *const i32,
    /// Distance of neighbours in elements; 0 = 1.
    pub counts_stride: i64,
}

/// A list of slots and rings. Entries with a negative id are skipped, their other values too. With host lists, calls that change what is
/// listed refuse an id that is named twice.
///
/// An engine whose groups of layers have slot ids of their own names pools, for calls on a slots handle: a pool that is named has its slots
/// in pool_slots, a pool that is not has them in slots. An entry whose slot is negative in a pool is skipped there alone: position, generation
/// and all else that a ring has go by the ring id, even where every pool skips the entry; a negative ring id skips it as a whole. With every
/// pool of the handle named, slots may be absent.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct replayssm_list {
    /// sizeof(replayssm_list).
    pub struct_size: u32,
    /// Entries; 0 is legal.
    pub n: i32,
    /// Where the ids and all per-entry arrays of the call lie: REPLAYSSM_WHERE_DEVICE or REPLAYSSM_WHERE_HOST.
    pub place: replayssm_where,
    /// Zero.
    pub reserved: u32,
    /// [n].
    pub slots: replayssm_ids,
    /// [n]; data NULL: the same ids as slots.
    pub rings: replayssm_ids,
    /// Pools that have slot ids of their own, up to 64; 0 for a call on one pool and for read_cursors.
    pub n_pools: i32,
    /// Zero.
    pub pools_reserved: u32,
    /// Host array [n_pools]: those pools, each once.
    pub pools: *const *const replayssm_layers,
    /// Host array [n_pools]: the slots [n] of each, which lie where the list lies.
    pub pool_slots: *const replayssm_ids,
}

/// What a flush folds. Arrays have an element per list entry.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct replayssm_flush_args {
    /// sizeof(replayssm_flush_args).
    pub struct_size: u32,
    /// 0: fold now. 1: enqueue nothing but a wish: the first step that finds position[i] among the committed tokens that it may fold
    /// (min_rewind of them it may not) folds, under every schedule. A reset, an import and an extend's commit forget it, as FORK, MOVE, LOAD
    /// and a restore do for their target; SWAP takes it along.
    pub later: i32,
    /// Now: fold up to exactly here, also tokens that min_rewind would keep, which cannot be taken back then; at or before a checkpoint there
    /// is nothing to do. NULL, with later 0: as a step's mask does, all but min_rewind committed tokens.
    pub position: *const i64,
}

/// Which rows of a batch leave a state behind, and where.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct replayssm_snapshot_args {
    /// sizeof(replayssm_snapshot_args).
    pub struct_size: u32,
    /// Pools that have slot ids of their own, up to 64.
    pub n_pools: i32,
    /// [n_rows] in the context's memory: the position whose state is wanted, if the last commit of the row reached it; negative: none.
    pub at: *const i64,
    /// [n_rows] slot that gets it. With every pool of the handle named, data may be NULL.
    pub dst: replayssm_ids,
    /// Host array [n_pools]: those pools, each once.
    pub pools: *const *const replayssm_layers,
    /// Host array [n_pools]: the slots [n_rows] of the batch in each.
    pub pool_src: *const replayssm_ids,
    /// Host array [n_pools]: the slots [n_rows] that get the states in each.
    pub pool_dst: *const replayssm_ids,
}

/// What a copy makes of its target.
pub type replayssm_copy_kind = i32;
/// What the source is: checkpoint, ring, position, seed. A source may have many targets.
pub const REPLAYSSM_COPY_FORK: replayssm_copy_kind = 0;
/// The same; the source gets a new generation, so that late commits of its owner do nothing, and is undefined until a reset.
pub const REPLAYSSM_COPY_MOVE: replayssm_copy_kind = 1;
/// Source and target change places; both rings get a new generation.
pub const REPLAYSSM_COPY_SWAP: replayssm_copy_kind = 2;
/// A checkpoint without a ring: the exact state of the source at a position.
pub const REPLAYSSM_COPY_STORE: replayssm_copy_kind = 3;
/// A live slot with an empty history, from a checkpoint without a ring that a snapshot or STORE has left. That has no seed: the target's
/// ring gets the one that is made from its id, as by a reset with seed NULL.
pub const REPLAYSSM_COPY_LOAD: replayssm_copy_kind = 4;
/// A checkpoint without a ring, from another.
pub const REPLAYSSM_COPY_STORED: replayssm_copy_kind = 5;

/// How a copy is to be made. Arrays have an element per list entry, where the lists lie.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct replayssm_copy_args {
    /// sizeof(replayssm_copy_args).
    pub struct_size: u32,
    /// REPLAYSSM_COPY_*.
    pub kind: replayssm_copy_kind,
    /// STORE: at which position, held as for replayssm_export; NULL: all committed tokens. LOAD: where the checkpoint stands, and the
    /// target starts. NULL otherwise.
    pub position: *const i64,
    /// FORK, MOVE, LOAD: generation of the target's ring from now on; NULL: one more than before. NULL otherwise.
    pub generation: *const u32,
}

/// What a reset sets. Arrays have an element per list entry.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct replayssm_reset_args {
    /// sizeof(replayssm_reset_args).
    pub struct_size: u32,
    /// 0: the state becomes zero. 1: it stays as it is (the caller has just written it in place; convolution windows
    /// are to be imported).
    pub keep_checkpoint: i32,
    /// With keep_checkpoint: what stands there is fp32 [nheads, headdim, dstate] (delta rules [HV, V, K]); turn it into the pool's
    /// format. Not with 16-bit formats, whose slots are too small for it.
    pub convert: i32,
    /// Zero.
    pub reserved: u32,
    /// Tokens already in the state, 0 to 2^60, where positions end: a commit beyond sets FAULT_POSITION and moves nothing. NULL: 0.
    pub position: *const i64,
    /// Generation of the ring from now on. NULL: one more than before.
    pub generation: *const u32,
    /// Key of stochastic rounding. NULL: made from the ring id.
    pub seed: *const u64,
}

/// A dense state outside the library: row i belongs to entry i of a list.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct replayssm_state {
    /// sizeof(replayssm_state).
    pub struct_size: u32,
    /// REPLAYSSM_DTYPE_F32, REPLAYSSM_DTYPE_BF16 or REPLAYSSM_DTYPE_F16.
    pub dtype: replayssm_dtype,
    /// REPLAYSSM_STATE_ROW_MAJOR or REPLAYSSM_STATE_COL_MAJOR.
    pub orientation: replayssm_orientation,
    /// A layer, or -1: all layers, stride_layer apart.
    pub layer: i32,
    /// Element 0, in the context's memory.
    pub data: *mut c_void,
    /// Elements from entry to entry; 0 = dense, here and below: [entry, layer, head, row, column], layers only with layer -1.
    pub stride_entry: i64,
    /// Elements from layer to layer.
    pub stride_layer: i64,
    /// Elements from head to head.
    pub stride_head: i64,
    /// Elements from row to row (of the orientation); the last axis is contiguous.
    pub stride_row: i64,
}

/// The state of a ring. Out; 32 bytes, frozen.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct replayssm_cursor {
    /// Committed tokens, absolute.
    pub position: i64,
    /// The first step that finds this position among the committed tokens that it may fold does fold; 0: none is waited for.
    pub flush_before: i64,
    /// Key of stochastic rounding.
    pub seed: u64,
    /// Counts resets and copies, or as given to them.
    pub generation: u32,
    /// Tokens that the last commit added: 0 after a reset, an import, a copy, a rewind and the commit of a row without tokens.
    pub committed: u32,
}

/// Fault bit: a slot or ring id at or above its count.
pub const REPLAYSSM_FAULT_ID: u32 = 1;
/// Fault bit: a commit count outside 0 .. tokens of the row; it was clamped.
pub const REPLAYSSM_FAULT_COUNT: u32 = 2;
/// Fault bit: a row longer than max_tokens, or cu_seqlens that falls or leaves n_tokens.
pub const REPLAYSSM_FAULT_LENGTH: u32 = 4;
/// Fault bit: a checkpoint outside the window (after an uncommitted extend, or lent memory that was never reset), or a position
/// that is not held. Nothing was written; outputs are zero.
pub const REPLAYSSM_FAULT_POSITION: u32 = 8;
/// Fault bit, with checks: a row's slot or ring is that of an earlier row of the batch; what the two leave behind is undefined.
pub const REPLAYSSM_FAULT_DUPLICATE: u32 = 16;
/// Fault bit, with checks: bytes before or behind a row's part of owned memory were overwritten, by someone else's stray write or by this
/// library. What stands beside them cannot be trusted either. The bytes stay as they are, so later calls report them again.
pub const REPLAYSSM_FAULT_CANARY: u32 = 32;
/// Fault bit, with checks: an infinity or a NaN in an input of a row, or (first_slot and first_row -1) in a parameter. The row is worked
/// on all the same.
pub const REPLAYSSM_FAULT_NOT_FINITE: u32 = 64;
/// Fault bit: a rewind beyond what the slot holds; it did nothing.
pub const REPLAYSSM_FAULT_REWIND: u32 = 128;

/// What went wrong on the device so far. Out. All of first_* are -1 where the place of the first fault is not known: not yet, while the work
/// that saw it is still writing it down and another fault is already here, or no longer, where another call has just cleared it.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct replayssm_report {
    /// sizeof(replayssm_report), set by the caller.
    pub struct_size: u32,
    /// REPLAYSSM_FAULT_*, sticky until cleared.
    pub bits: u32,
    /// Faults seen.
    pub count: u64,
    /// Slot or ring id of the first; for LENGTH, its row.
    pub first_slot: i64,
    /// Batch row or list entry of the first.
    pub first_row: i64,
    /// Pool of the first, in order of creation; -1 where no pool was involved.
    pub first_pool: i32,
    /// Layer of the first; -1 where no layer was involved.
    pub first_layer: i32,
}

/// Counters of a slots handle over all its pools, counted where the work is done. Out.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct replayssm_stats {
    /// sizeof(replayssm_stats), set by the caller.
    pub struct_size: u32,
    /// Zero.
    pub reserved: u32,
    /// Commits.
    pub steps: u64,
    /// Rows of one token or more that commits saw.
    pub rows: u64,
    /// Their tokens.
    pub tokens: u64,
    /// Tokens that became committed.
    pub accepted: u64,
    /// Checkpoint tiles that steps and flushes rewrote.
    pub flushes: u64,
    /// Bytes of checkpoint loaded.
    pub checkpoint_bytes_read: u64,
    /// Bytes of checkpoint stored.
    pub checkpoint_bytes_written: u64,
    /// Bytes of ring records and convolution windows loaded.
    pub ring_bytes_read: u64,
    /// Bytes of ring records and convolution windows stored.
    pub ring_bytes_written: u64,
}

/// Descriptors; `from field` names the first field that the first released version did not have, where one has grown since (none yet).
macro_rules! descriptors {
    ($($ty:ident $(from $grown:ident)?),* $(,)?) => {
        $(
            // SAFETY: repr(C), integers and pointers only, no padding (asserted by the tests of the header), first
            // field struct_size.
            unsafe impl Descriptor for $ty {
                const NAME: &'static str = stringify!($ty);
                $(const FIRST_SIZE: usize = std::mem::offset_of!($ty, $grown);)?
            }
        )*
    };
}
descriptors!(
    replayssm_context_desc,
    replayssm_context_info,
    replayssm_slots_desc,
    replayssm_pool_desc,
    replayssm_lent,
    replayssm_component,
    replayssm_plan_args,
    replayssm_plan_info,
    replayssm_restore_args,
    replayssm_exec,
    replayssm_batch,
    replayssm_mamba2_args,
    replayssm_delta_args,
    replayssm_conv1d_args,
    replayssm_commit_args,
    replayssm_list,
    replayssm_flush_args,
    replayssm_snapshot_args,
    replayssm_copy_args,
    replayssm_reset_args,
    replayssm_state,
    replayssm_report,
    replayssm_stats,
);

/// The same numbers and layouts on both sides of the interface.
mod agreement {
    use std::mem::offset_of;

    use super::*;
    use crate::error::Status;
    use crate::log::Level;
    use crate::replay::launch::{Cursor, fault};

    const _: () = {
        assert!(Status::Ok as i32 == REPLAYSSM_OK);
        assert!(Status::InvalidArgument as i32 == REPLAYSSM_ERROR_INVALID_ARGUMENT);
        assert!(Status::InvalidHandle as i32 == REPLAYSSM_ERROR_INVALID_HANDLE);
        assert!(Status::OutOfRange as i32 == REPLAYSSM_ERROR_OUT_OF_RANGE);
        assert!(Status::BufferTooSmall as i32 == REPLAYSSM_ERROR_BUFFER_TOO_SMALL);
        assert!(Status::WrongStream as i32 == REPLAYSSM_ERROR_WRONG_STREAM);
        assert!(Status::Unsupported as i32 == REPLAYSSM_ERROR_UNSUPPORTED);
        assert!(Status::NoCuda as i32 == REPLAYSSM_ERROR_NO_CUDA);
        assert!(Status::NoCodeForArch as i32 == REPLAYSSM_ERROR_NO_CODE_FOR_ARCH);
        assert!(Status::OutOfMemory as i32 == REPLAYSSM_ERROR_OUT_OF_MEMORY);
        assert!(Status::Cuda as i32 == REPLAYSSM_ERROR_CUDA);
        assert!(Status::DeviceLost as i32 == REPLAYSSM_ERROR_DEVICE_LOST);
        assert!(Status::Capturing as i32 == REPLAYSSM_ERROR_CAPTURING);
        assert!(Status::BadBlob as i32 == REPLAYSSM_ERROR_BAD_BLOB);
        assert!(Status::Internal as i32 == REPLAYSSM_ERROR_INTERNAL);
        assert!(Level::Warning as i32 == REPLAYSSM_LOG_WARNING);
        assert!(Level::Info as i32 == REPLAYSSM_LOG_INFO);
        assert!(fault::ID == REPLAYSSM_FAULT_ID);
        assert!(fault::COUNT == REPLAYSSM_FAULT_COUNT);
        assert!(fault::LENGTH == REPLAYSSM_FAULT_LENGTH);
        assert!(fault::POSITION == REPLAYSSM_FAULT_POSITION);
        assert!(fault::DUPLICATE == REPLAYSSM_FAULT_DUPLICATE);
        assert!(fault::CANARY == REPLAYSSM_FAULT_CANARY);
        assert!(fault::NOT_FINITE == REPLAYSSM_FAULT_NOT_FINITE);
        assert!(fault::REWIND == REPLAYSSM_FAULT_REWIND);
        assert!(size_of::<Cursor>() == size_of::<replayssm_cursor>());
        assert!(offset_of!(Cursor, position) == offset_of!(replayssm_cursor, position));
        assert!(offset_of!(Cursor, flush_before) == offset_of!(replayssm_cursor, flush_before));
        assert!(offset_of!(Cursor, seed) == offset_of!(replayssm_cursor, seed));
        assert!(offset_of!(Cursor, generation) == offset_of!(replayssm_cursor, generation));
        assert!(offset_of!(Cursor, committed) == offset_of!(replayssm_cursor, committed));
    };
}
