/* libreplayssm: state updates of Mamba-2, Gated DeltaNet and Kimi Delta Attention layers by replay.
 * SPDX-License-Identifier: MIT OR Apache-2.0
 * Generated from src/ffi by cbindgen; `make header` renews it. C11 and C++17; needs no other header, CUDA's included.
 *
 * A recurrent layer's state is kept as it was some tokens ago (the checkpoint) together with the inputs of the tokens since then (the
 * ring). A step computes its outputs from both and appends to the ring; the state is rewritten only once per window. A commit
 * moves the position forward by the accepted tokens: rolling back rejected drafts is not moving it.
 *
 *   context -> slots -> layers      a backend; positions of all layers of a model; a pool of equal layers
 *   reset, import                   start a request
 *   step, step, ..., commit         one model step: every layer and convolution with ONE batch, then one commit
 *   extend, extend, ..., commit     the same for prompts: rows of any length, no rollback
 *   export, rewind, read_cursors    look, take back
 *   flush, snapshot, copy           fold now, keep the state at a position, fork and move
 *   save, restore                   a request in host memory, for later or for another machine
 *   plan                            what a model will take, before any of it exists
 *
 * Structs
 *   A descriptor starts with struct_size = sizeof(the struct) as the caller compiled it (REPLAYSSM_INIT does that). Zero is every field's
 *   default. Descriptors grow at the end only and have no padding; bytes beyond what the library knows must be zero,
 *   else REPLAYSSM_ERROR_UNSUPPORTED names the offset. replayssm_ids, replayssm_tensor and replayssm_cursor never change. Out-parameters are
 *   written on success only; handle out-parameters become NULL on failure.
 *
 * Handles
 *   Never dereferenced; NULL, destroyed and foreign ones give REPLAYSSM_ERROR_INVALID_HANDLE. Children keep their parents: a destroyed
 *   context or slots handle goes when its last child does.
 *
 * Memory
 *   Device arrays (everything but descriptors and host lists) lie in the context's memory: host memory on the CPU backend. They are
 *   the caller's and stay valid and unchanged until the work has run. Inputs are only read, although tensors are not const.
 *   Descriptors are read before a call returns.
 *
 * Threads and streams
 *   Calls that take a const handle may be made by any number of threads. The caller orders work on one slot (any two calls);
 *   work on disjoint slots of one handle may run at the same time. The CPU backend does its work before a call returns.
 *   Only calls that create, destroy, rebind, save, restore, plan, query or fail allocate. No call waits for another's work: while the CPU
 *   backend's threads work for one call, another does its own on its thread. The list of pools is read under a lock by reset, rewind, flush,
 *   snapshot and copy until their work is done or enqueued, and by save and restore, which copy it; creating and destroying a pool wait for
 *   that. Acquire and release take a lock. A call needs at most 256 KiB of its thread's stack.
 *
 * Errors
 *   A status says whether the call was accepted; on an error nothing was done. What only the device can see (ids, counts,
 *   lengths, positions) harms no slot: it sets bits that replayssm_check reads. Two rows of a batch on one slot leave
 *   that slot undefined, no other. Nothing aborts, unwinds or prints; no environment variable is read.
 *
 * Capture
 *   The calls of a model step, and all that take a list with REPLAYSSM_WHERE_DEVICE, are made to be captured in a CUDA graph: what differs
 *   between replays is device data. Destroy what a captured graph uses after the graph. Other calls may be made while another thread
 *   captures, in any mode; a call on a stream that captures is part of the graph, whole.
 *
 * What every function says
 *   NULL:     which pointers may be NULL. Any other gives INVALID_ARGUMENT, a handle INVALID_HANDLE.
 *   Owner:    whose the result is, and until when.
 *   Errors:   the statuses beside OK, without REPLAYSSM_ERROR_. INTERNAL is possible everywhere; last_error_message has the sentence.
 *   Threads:  who may call it while other calls run.
 *   Capture:  "enqueues": the call only puts work on the stream, and a graph can be captured from it. "host only": it works at once and
 *             enqueues nothing, also while a stream is captured. "never": it may allocate or wait, so not while one is captured. */


#ifndef REPLAYSSM_H
#define REPLAYSSM_H

#include <stddef.h>
#include <stdint.h>

#define REPLAYSSM_VERSION_MAJOR 0
#define REPLAYSSM_VERSION_MINOR 1
#define REPLAYSSM_VERSION_PATCH 0
#define REPLAYSSM_VERSION (REPLAYSSM_VERSION_MAJOR << 24 | REPLAYSSM_VERSION_MINOR << 12 | REPLAYSSM_VERSION_PATCH)

#if defined(_WIN32)
#define REPLAYSSM_API __declspec(dllimport)
#elif defined(__GNUC__)
#define REPLAYSSM_API __attribute__((visibility("default")))
#else
#define REPLAYSSM_API
#endif
/* [[nodiscard]] comes first: clang++ rejects it behind another attribute. */
#if defined(__cplusplus)
#define REPLAYSSM_CALL [[nodiscard]] REPLAYSSM_API
#elif defined(__GNUC__)
#define REPLAYSSM_CALL __attribute__((warn_unused_result)) REPLAYSSM_API
#else
#define REPLAYSSM_CALL REPLAYSSM_API
#endif

/* A descriptor with every default: replayssm_batch b = REPLAYSSM_INIT(replayssm_batch); */
#ifdef __cplusplus
extern "C++" { /* also where the header is included inside extern "C" */
template <class T>
inline T replayssm_init() {
  T descriptor{};
  descriptor.struct_size = static_cast<uint32_t>(sizeof(T));
  return descriptor;
}
}
#define REPLAYSSM_INIT(T) replayssm_init<T>()
#else
#define REPLAYSSM_INIT(T) ((T){.struct_size = (uint32_t)sizeof(T)})
#endif

/* What a call returns. Numbers are pinned; new ones fill the gaps. Treat an unknown number as an error. */
typedef int32_t replayssm_status;
/* The call was accepted. On the CPU its work is done; otherwise it is enqueued. */
#define REPLAYSSM_OK 0
/* A field has a value that can never be right; the message names it. */
#define REPLAYSSM_ERROR_INVALID_ARGUMENT 1
/* A handle is NULL, destroyed, of another type, or not a handle. */
#define REPLAYSSM_ERROR_INVALID_HANDLE 2
/* A position or a count lies outside what the slot holds; nothing changed. */
#define REPLAYSSM_ERROR_OUT_OF_RANGE 3
/* The buffer is too small; the message says what is needed. */
#define REPLAYSSM_ERROR_BUFFER_TOO_SMALL 4
/* The stream belongs to another context or device; the CPU backend takes none. */
#define REPLAYSSM_ERROR_WRONG_STREAM 5
/* An option, shape, dtype or descriptor of a newer header that this library does not know. */
#define REPLAYSSM_ERROR_UNSUPPORTED 20
/* No CUDA in this build, or no usable driver; the message says which. */
#define REPLAYSSM_ERROR_NO_CUDA 21
/* The library has no kernels for the device's architecture; the message says for which it has. */
#define REPLAYSSM_ERROR_NO_CODE_FOR_ARCH 22
/* An allocation failed; nothing changed. */
#define REPLAYSSM_ERROR_OUT_OF_MEMORY 40
/* The CUDA driver refused a call: replayssm_last_cuda_error has its CUresult, the message its name. An earlier failure of other work
 * on the same context may be the cause. */
#define REPLAYSSM_ERROR_CUDA 41
/* The CUDA context has failed for good, by whoever's work: an illegal address, a launch that timed out, uncorrectable memory.
 * From then on every call on the replayssm_context, and on handles made on it, gives this status, whatever it would give otherwise; destroying
 * works. Contexts on other devices and on the CPU go on. replayssm_last_cuda_error has the CUresult, the message the driver's call that told first. */
#define REPLAYSSM_ERROR_DEVICE_LOST 42
/* The stream captures, and the call waits for its work; the capture goes on. */
#define REPLAYSSM_ERROR_CAPTURING 60
/* A blob was cut off or changed, or is not one for this handle; the message says what differs. The slot is as it was. */
#define REPLAYSSM_ERROR_BAD_BLOB 61
/* A defect of this library was caught at the boundary. Reset the slots of the call. */
#define REPLAYSSM_ERROR_INTERNAL 90

/* Element type of a tensor or index array. */
typedef int32_t replayssm_dtype;
/* Where it is legal: the default. */
#define REPLAYSSM_DTYPE_NONE 0
/* IEEE binary32. */
#define REPLAYSSM_DTYPE_F32 1
/* bfloat16. */
#define REPLAYSSM_DTYPE_BF16 2
/* IEEE binary16. */
#define REPLAYSSM_DTYPE_F16 3
/* Signed 32-bit index. */
#define REPLAYSSM_DTYPE_I32 16
/* Signed 64-bit index. */
#define REPLAYSSM_DTYPE_I64 17

/* Where a context runs. */
typedef int32_t replayssm_backend;
/* CUDA for a thread that has a current CUDA context, whose memory is then meant; else the CPU. */
#define REPLAYSSM_BACKEND_AUTO 0
/* Host memory, the caller's and the library's threads. */
#define REPLAYSSM_BACKEND_CPU 1
/* Device memory and streams. */
#define REPLAYSSM_BACKEND_CUDA 2

/* Family of a pool. */
typedef int32_t replayssm_family;
/* Mamba-2; also linear attention with a fixed decay per head (a broadcast dt, no_softplus). */
#define REPLAYSSM_FAMILY_MAMBA2 1
/* Gated DeltaNet: one log decay per token and head. */
#define REPLAYSSM_FAMILY_GDN 2
/* Kimi Delta Attention: one log decay per token, head and key channel. */
#define REPLAYSSM_FAMILY_KDA 3
/* The depthwise causal convolution in front of such layers. */
#define REPLAYSSM_FAMILY_CONV1D 4

/* How a state lies in its checkpoint. */
typedef int32_t replayssm_format;
/* SPLIT32. */
#define REPLAYSSM_FORMAT_DEFAULT 0
/* A fp32 state as two 16-bit planes per head: bfloat16 values, then the rest of the bits. Lossless, 4 bytes an element. */
#define REPLAYSSM_FORMAT_SPLIT32 1
/* A fp32 state. */
#define REPLAYSSM_FORMAT_F32 2
/* A bfloat16 state, rounded whenever it is stored: to nearest even, or stochastically. */
#define REPLAYSSM_FORMAT_BF16 3
/* A binary16 state, rounded whenever it is stored: to nearest even, or stochastically. Overflow is infinite. */
#define REPLAYSSM_FORMAT_F16 4

/* How a step computes its outputs. A fp32 state is exact under every readout; a 16-bit state is that of the fp32
 * recurrence from the checkpoint as stored, rounded at every fold. */
typedef int32_t replayssm_readout;
/* HIGH for BF16, and for SPLIT32 with bfloat16 activations; else FULL. */
#define REPLAYSSM_READOUT_DEFAULT 0
/* From a bfloat16 view of the checkpoint: half the bytes of SPLIT32, all of BF16. Not for F32 and F16. */
#define REPLAYSSM_READOUT_HIGH 1
/* From the whole checkpoint, fp32 grade. */
#define REPLAYSSM_READOUT_FULL 2
/* By the plain update's own arithmetic: equal to `replayssm_*_extend`'s outputs by bytes, at any T. */
#define REPLAYSSM_READOUT_EXACT 3

/* Which query and key head a value head hv of a delta rule uses. */
typedef int32_t replayssm_head_map;
/* hv / (HV / H): neighbours share (vLLM, SGLang). */
#define REPLAYSSM_HEAD_MAP_GROUPED 0
/* hv % H (ggml). */
#define REPLAYSSM_HEAD_MAP_TILED 1

/* How a delta rule's log decay g comes. */
typedef int32_t replayssm_gate;
/* g = -exp(A_log) softplus(a + dt_bias), a being args.g. */
#define REPLAYSSM_GATE_SOFTPLUS 0
/* KDA: g = lower_bound sigmoid(exp(A_log) (a + dt_bias)). */
#define REPLAYSSM_GATE_LOWER_BOUND 1
/* args.g is the log decay itself, at most 0. */
#define REPLAYSSM_GATE_LOG_DECAY 2

/* When checkpoints are folded before the window forces it. */
typedef int32_t replayssm_schedule;
/* First folds are spread over a window by ring id, so that rows which start together do not fold in one step. */
#define REPLAYSSM_SCHEDULE_STAGGERED 0
/* Folds end at multiples of window - max_step_tokens + 1: a request folds at the same tokens whatever else runs. */
#define REPLAYSSM_SCHEDULE_BY_POSITION 1
/* Only when the window is full. */
#define REPLAYSSM_SCHEDULE_NONE 2

/* How commit counts are meant; all are clamped to 0 .. tokens of the row. */
typedef int32_t replayssm_counts;
/* Tokens accepted, the bonus token included (vLLM, SGLang). */
#define REPLAYSSM_COUNTS_ACCEPTED 0
/* Drafts accepted: one token less. */
#define REPLAYSSM_COUNTS_ACCEPTED_DRAFTS 1
/* Tokens rejected (llama.cpp). */
#define REPLAYSSM_COUNTS_REJECTED 2

/* Axis order of a dense state. */
typedef int32_t replayssm_orientation;
/* [headdim, dstate], delta rules [V, K]; a convolution: [channels, width - 1], oldest first. */
#define REPLAYSSM_STATE_ROW_MAJOR 0
/* [dstate, headdim], delta rules [K, V]; a convolution: [width - 1, channels]. */
#define REPLAYSSM_STATE_COL_MAJOR 1

/* Where arrays lie. */
typedef int32_t replayssm_where;
/* In the context's memory (host memory on the CPU backend), read when the work runs: a bad value sets a fault bit and
 * that entry is skipped. */
#define REPLAYSSM_WHERE_DEVICE 0
/* In host memory, read before the call returns: a bad value is an error and nothing happens. At most 256 entries. */
#define REPLAYSSM_WHERE_HOST 1

/* How much a line of the log matters. */
typedef int32_t replayssm_log_level;
/* No line. */
#define REPLAYSSM_LOG_NONE 0
/* What is right, but slower or larger than it could be. */
#define REPLAYSSM_LOG_WARNING 1
/* What was chosen, created and destroyed; warnings too. */
#define REPLAYSSM_LOG_INFO 2

/* Takes a line of the log: the desc's log_user, a level of REPLAYSSM_LOG_*, and a text of one line that lives for the call.
 * It runs on the thread of a call that creates or destroys, never in any other and never on the library's own threads; on several
 * threads at once where they make such calls. It must not call this library, throw, or leave by longjmp. */
typedef void (*replayssm_log)(void *user, replayssm_log_level level, const char *text);

/* A CUDA stream; the same type as CUstream and cudaStream_t. NULL on the CPU backend. */
typedef struct CUstream_st *replayssm_stream;

/* What a stream points to; defined by CUDA. */
typedef struct CUstream_st CUstream_st;

/* One backend on one device. Immutable after create. */
typedef struct replayssm_context replayssm_context;

/* Positions and schedule of all layers of a model on one device. */
typedef struct replayssm_slots replayssm_slots;

/* A pool: n_layers equal layers of one family on a slots handle. */
typedef struct replayssm_layers replayssm_layers;

/* An index array. A leaf: embedded in others, without struct_size, never changed. */
typedef struct replayssm_ids {
  /* Element 0, aligned to its type. */
  const void *data;
  /* Distance of neighbours in elements; 0 means 1. */
  int64_t stride;
  /* REPLAYSSM_DTYPE_I32 or REPLAYSSM_DTYPE_I64. */
  replayssm_dtype dtype;
  /* Zero. */
  uint32_t reserved;
} replayssm_ids;

/* A strided tensor with the axes row, token, head (or group, section, channel); the last axis is contiguous. Strides are in
 * elements, and 0 is 0: a broadcast input. A packed row of several inputs is several views of it. A leaf, never changed. */
typedef struct replayssm_tensor {
  /* Element 0, aligned to its type. NULL: absent, where that is legal. */
  void *data;
  /* Distance of batch rows; ignored with cu_seqlens. */
  int64_t stride_row;
  /* Distance of tokens. */
  int64_t stride_token;
  /* Distance of heads (groups, sections; for a parameter: of heads or channels). */
  int64_t stride_head;
  /* REPLAYSSM_DTYPE_F32, REPLAYSSM_DTYPE_BF16 or REPLAYSSM_DTYPE_F16. */
  replayssm_dtype dtype;
  /* Zero. */
  uint32_t reserved;
} replayssm_tensor;

/* What a context is to be. */
typedef struct replayssm_context_desc {
  /* sizeof(replayssm_context_desc). */
  uint32_t struct_size;
  /* REPLAYSSM_BACKEND_*. */
  replayssm_backend backend;
  /* CUDA: device ordinal, whose primary context is used; -1: the calling thread's current context, which must outlive the library's.
   * 0 on the CPU backend. */
  int32_t device;
  /* CPU: threads that work on a call, the calling one and n_threads - 1 of the library's own; up to 1024, 0 = as many as the
   * process may use. */
  int32_t n_threads;
  /* Zero. */
  uint32_t flags;
  /* Zero. */
  uint32_t reserved;
  /* Gets a line whenever something is created or destroyed on this context. NULL: nobody does. It and log_user must last until
   * the context and everything on it are gone. */
  replayssm_log log;
  /* Handed to log; the library does not look at it. */
  void *log_user;
  /* REPLAYSSM_LOG_*: lines of this level and of those below. 0: none. */
  replayssm_log_level log_level;
  /* Zero. */
  uint32_t log_reserved;
} replayssm_context_desc;

/* What a context is. Out. */
typedef struct replayssm_context_info {
  /* sizeof(replayssm_context_info), set by the caller. */
  uint32_t struct_size;
  /* REPLAYSSM_BACKEND_CPU or REPLAYSSM_BACKEND_CUDA. */
  replayssm_backend backend;
  /* Device ordinal; 0 on the CPU backend. */
  int32_t device;
  /* Threads that work on a call; 0 on CUDA. */
  int32_t n_threads;
  /* Name of the device or of the instruction set, with a final zero. */
  char name[64];
} replayssm_context_info;

/* Flag of a slots handle: steps and extends look for misuse before they work, and report it as faults with slot and layer (see
 * replayssm_check): DUPLICATE, CANARY, NOT_FINITE. (Ids, lengths, counts and positions are looked at without it too.) For finding
 * defects: it costs a second launch and a second reading of all inputs, and 64 to 191 bytes behind every slot's and ring's part of
 * owned memory. The work itself is the same, and its results too. Of a call that is done in parts (replayssm_exec.n_parts), part 0 looks
 * at everything; only a convolution's x that is its out as well, which other parts are writing by then, is not looked at for NOT_FINITE. */
#define REPLAYSSM_SLOTS_CHECKS 1

/* Sizes and rules of a slots handle. */
typedef struct replayssm_slots_desc {
  /* sizeof(replayssm_slots_desc). */
  uint32_t struct_size;
  /* Checkpoints: live ones and cached ones. At least 1. */
  int32_t n_slots;
  /* Rings: requests that can run at once, up to 2^20. 0 = n_slots. */
  int32_t n_rings;
  /* W, 1 to 256 and at least max_step_tokens. 0 = max(16, min(256, 8 max_step_tokens)). */
  int32_t window;
  /* T_max: the longest step, 1 to 256. 0 = 1. */
  int32_t max_step_tokens;
  /* Committed tokens that a rewind may always take back, 0 to 256: no step folds them. Adds rows to every ring. */
  int32_t min_rewind;
  /* REPLAYSSM_SCHEDULE_*. */
  replayssm_schedule schedule;
  /* REPLAYSSM_SLOTS_*. */
  uint32_t flags;
} replayssm_slots_desc;

/* What a pool is. Fields of other families are zero. */
typedef struct replayssm_pool_desc {
  /* sizeof(replayssm_pool_desc). */
  uint32_t struct_size;
  /* REPLAYSSM_FAMILY_MAMBA2, REPLAYSSM_FAMILY_GDN, REPLAYSSM_FAMILY_KDA or REPLAYSSM_FAMILY_CONV1D. */
  replayssm_family family;
  /* Layers, 1 to 2^20. */
  int32_t n_layers;
  /* Activation dtype of x, B, C, z or q, k, v. Gates and parameters carry their own. */
  replayssm_dtype io;
  /* Output dtype; 0 = io. */
  replayssm_dtype out;
  /* REPLAYSSM_FORMAT_*; 0 for a convolution. */
  replayssm_format format;
  /* REPLAYSSM_READOUT_*; 0 for a convolution. */
  replayssm_readout readout;
  /* BF16 and F16: 1 rounds stochastically (Philox4x32-10; key: the ring's seed; counter: position, layer, element / 4). */
  int32_t stochastic_rounding;
  /* Mamba-2: heads, up to 2^20, as all counts of heads, groups and channels. */
  int32_t nheads;
  /* Mamba-2: rows of a head's state, 1 to 256. */
  int32_t headdim;
  /* Mamba-2: columns of a head's state, 1 to 256. */
  int32_t dstate;
  /* Mamba-2: groups of heads that share B and C; divides nheads. */
  int32_t ngroups;
  /* GDN, KDA: query and key heads; divides HV. */
  int32_t H;
  /* GDN, KDA: value heads, those of the state. */
  int32_t HV;
  /* GDN, KDA: columns of a head's state, 1 to 256. */
  int32_t K;
  /* GDN, KDA: rows of a head's state, 1 to 256. */
  int32_t V;
  /* GDN, KDA: REPLAYSSM_HEAD_MAP_*. */
  replayssm_head_map head_map;
  /* GDN, KDA: dtype of the u records, which readouts alone use. 0 = bfloat16 for HIGH with bfloat16 activations, else fp32. */
  replayssm_dtype u_dtype;
  /* Convolution: channels of all sections. */
  int32_t channels;
  /* Convolution: taps, 2 to 4. */
  int32_t width;
  /* Convolution: sections of the channel axis, stride_head apart in x and out; 0 = one section, as for a packed row of x, B, C. */
  int32_t n_sections;
  /* Zero. */
  uint32_t reserved;
  /* Convolution: host array [n_sections] of the channels of each section; read before the call returns. */
  const int32_t *section_channels;
} replayssm_pool_desc;

/* A component of a pool's memory. */
typedef int32_t replayssm_component_kind;
/* States, per slot. F32, BF16, F16: [nheads, headdim, dstate] (delta rules [HV, V, K]). SPLIT32: per head a bfloat16 plane [headdim, dstate], then an
 * int16 plane of the same shape: value bits = (high << 16) + low. */
#define REPLAYSSM_COMPONENT_CHECKPOINT 1
/* Positions of 16-row checkpoint tiles, int64, per slot; for a convolution per ring. */
#define REPLAYSSM_COMPONENT_TAGS 2
/* Mamba-2 records of x, per ring: io [nheads, rows, headdim], rows = window + min_rewind + max_step_tokens. */
#define REPLAYSSM_COMPONENT_X 3
/* Mamba-2 records of B, per ring: io [ngroups, rows, dstate]. */
#define REPLAYSSM_COMPONENT_B 4
/* Mamba-2 records of dt and A dt, per ring: fp32 [nheads, rows, 2]. */
#define REPLAYSSM_COMPONENT_DT 5
/* Delta-rule records of k as it came, per ring: io [H, rows, K]. */
#define REPLAYSSM_COMPONENT_K 6
/* Delta-rule records of k's reciprocal norm, per ring: fp32 [H, rows]. */
#define REPLAYSSM_COMPONENT_KNORM 7
/* Delta-rule records of v, per ring: io [HV, rows, V]. */
#define REPLAYSSM_COMPONENT_V 8
/* Delta-rule records of the log decay, per ring: fp32 [HV, rows], KDA [HV, rows, K]. */
#define REPLAYSSM_COMPONENT_G 9
/* Delta-rule records of beta, per ring: fp32 [HV, rows]. */
#define REPLAYSSM_COMPONENT_BETA 10
/* Delta-rule readout records of u, per ring: u_dtype [HV, rows, V]; not with EXACT. */
#define REPLAYSSM_COMPONENT_U 11
/* Convolution inputs, per ring: io [width - 1 + min_rewind + max_step_tokens, channels]. */
#define REPLAYSSM_COMPONENT_CONV 12
/* A convolution's window as a snapshot or copy has stored it, per slot: io [width - 1, channels], oldest first. */
#define REPLAYSSM_COMPONENT_WINDOW 13
/* Position of that window, per slot: an int64 for each 128 channels; -1: there is none. */
#define REPLAYSSM_COMPONENT_WINDOW_TAGS 14

/* Memory that the caller lends for one component; what is not lent is allocated by the library. Strides are in bytes:
 * layer l of slot (or ring) s lies at base + offset_bytes + l * layer_stride_bytes + s * slot_stride_bytes, or at layer_bases[l] +
 * offset_bytes + s * slot_stride_bytes. Lent memory is not touched at create: reset or import each slot before its first step. */
typedef struct replayssm_lent {
  /* sizeof(replayssm_lent). */
  uint32_t struct_size;
  /* REPLAYSSM_COMPONENT_*, each at most once. */
  replayssm_component_kind kind;
  /* Layer 0 of slot 0; with offset_bytes aligned to 16 bytes (tags: 8, here and below). NULL with layer_bases. Stays the caller's,
   * and must outlive the pool, or its next rebind. */
  void *base;
  /* Multiple of 16; 0 = slot_stride_bytes times the number of slots (rings), and with layer_bases. */
  int64_t layer_stride_bytes;
  /* Multiple of 16, at least the component's bytes; 0 = dense. */
  int64_t slot_stride_bytes;
  /* Layers that were allocated one by one: host array [n_layers] of addresses in the context's memory, each slot 0 of a layer, with
   * offset_bytes aligned as base; read before the call returns. No slot of a layer may overlap one of another. The library keeps a table
   * of them, 8 bytes a layer, beside the memory that it owns. NULL: base. */
  void *const *layer_bases;
  /* Where the component begins in what base or layer_bases point to, such as a page that holds several; 0 or more. */
  int64_t offset_bytes;
} replayssm_lent;

/* Size and place of a component. Out. */
typedef struct replayssm_component {
  /* sizeof(replayssm_component), set by the caller in element 0; it is the element stride. */
  uint32_t struct_size;
  /* REPLAYSSM_COMPONENT_*. */
  replayssm_component_kind kind;
  /* 1: indexed by ring; 0: by slot. */
  int32_t per_ring;
  /* Zero. */
  uint32_t reserved;
  /* Bytes of one layer's part of one slot (or ring), contiguous. */
  uint64_t bytes;
  /* Layer 0 of slot 0; NULL before the pool exists. */
  void *base;
  /* Bytes from slot to slot. */
  int64_t slot_stride_bytes;
  /* Bytes from layer to layer; 0 where layers were lent by layer_bases. */
  int64_t layer_stride_bytes;
  /* Slot 0 of each layer: host array [n_layers], right however the layers lie. The library's, until the pool is destroyed; a rebind
   * changes its contents. NULL before the pool exists. */
  void *const *layer_bases;
} replayssm_component;

/* What is asked of a plan. NULL: all defaults. */
typedef struct replayssm_plan_args {
  /* sizeof(replayssm_plan_args). */
  uint32_t struct_size;
  /* Rows of a step, 1 to 2^20; 0 = 1. Bytes per row hardly depend on it. */
  int32_t batch;
  /* Tokens of a row in a step, 1 to max_step_tokens; 0 = max_step_tokens. */
  int32_t tokens;
  /* Zero. */
  uint32_t reserved;
  /* Memory that slots and rings may take, in bytes; 0: no budget. */
  uint64_t budget_bytes;
} replayssm_plan_args;

/* What a model takes, all pools and layers together. Out. */
typedef struct replayssm_plan_info {
  /* sizeof(replayssm_plan_info), set by the caller. */
  uint32_t struct_size;
  /* The window, max_step_tokens to 256, that moves the fewest bytes per step for this batch and these tokens; of windows within a
   * hundredth of that, the smallest, since rings cost memory. */
  int32_t recommended_window;
  /* Bytes of a slot: checkpoints and tags, each layer's part of a component padded to 128 bytes as owned memory has it, here and below. */
  uint64_t checkpoint_bytes;
  /* Bytes of a ring. */
  uint64_t ring_bytes;
  /* Bytes of the positions of all rings (32 each) and of the counters. */
  uint64_t fixed_bytes;
  /* n_slots * checkpoint_bytes + n_rings * ring_bytes + fixed_bytes: what creating all of it allocates in the context's memory. */
  uint64_t total_bytes;
  /* The largest n, up to 2^20, for which n slots and n rings have a total within the budget; -1 without a budget. */
  int64_t slots_in_budget;
  /* Bytes of a sequence where, instead of a ring, one whole state is kept for each token of a step beside the state itself:
   * 1 + max_step_tokens states, and convolution windows longer by max_step_tokens. To compare with checkpoint_bytes + ring_bytes. */
  uint64_t state_per_draft_bytes;
  /* The most such sequences in the budget, up to 2^20; -1 without a budget. */
  int64_t slots_in_budget_state_per_draft;
  /* Bytes that a row moves in a step, on average over a flush cycle, all tokens being accepted: those of replayssm_explain, which counts
   * reads of records as the CPU kernels make them. */
  uint64_t step_bytes;
  /* Bytes that a row moves where the plain update takes as many tokens. */
  uint64_t plain_step_bytes;
  /* Share of rows that fold in a step, on average, 0 to 1. */
  double flush_share;
} replayssm_plan_info;

/* What a saved slot is for. */
typedef int32_t replayssm_save_kind;
/* Checkpoint, ring and position as they are: goes on bit for bit on a handle of the same configuration, on any backend. */
#define REPLAYSSM_SAVE_LIVE 0
/* The fp32 states at the committed position and the convolution windows: goes on under any window, longest step, format, readout,
 * backend and split of layers into pools. 16-bit formats round when they are restored. */
#define REPLAYSSM_SAVE_PORTABLE 1
/* A slot without a ring, as a snapshot or REPLAYSSM_COPY_STORE leaves it: checkpoint, tags and stored windows, as they are. Goes on by
 * REPLAYSSM_COPY_LOAD, under any window, longest step, readout and backend; shapes, formats and split of layers are the same. */
#define REPLAYSSM_SAVE_STORED 2

/* What a restore sets beside what the blob has. */
typedef struct replayssm_restore_args {
  /* sizeof(replayssm_restore_args). */
  uint32_t struct_size;
  /* Zero. */
  uint32_t reserved;
  /* Host pointer to the generation of the ring from now on. NULL: one more than before. */
  const uint32_t *generation;
} replayssm_restore_args;

/* Flag of a call, CUDA: its kernels may begin while the work in front of them on the stream ends (programmatic dependent launch). They
 * wait for that work before they read or write anything, and let nothing begin behind them before they have ended. */
#define REPLAYSSM_EXEC_PDL 1
/* Flag of a call, with REPLAYSSM_EXEC_PDL: checkpoints may be brought near before that wait. The caller promises that the batch is not
 * being written by the work in front. */
#define REPLAYSSM_EXEC_PDL_PREFETCH 2

/* How a call is to run. NULL: all defaults. */
typedef struct replayssm_exec {
  /* sizeof(replayssm_exec). */
  uint32_t struct_size;
  /* REPLAYSSM_EXEC_*; 0 on the CPU backend. */
  uint32_t flags;
  /* The caller's stream, of the context's CUDA context (or of a green context on its device, with a driver for CUDA 12.5 or later);
   * NULL: its default stream, and on the CPU backend the only one. */
  replayssm_stream stream;
  /* CPU: do share part of n_parts of the work on the calling thread. The caller runs every part, in any order, at the
   * same time if it likes, and waits for all before the next call on the same slots. Its threads need stack as any caller's. */
  int32_t part;
  /* 0 or 1: the call does everything, with the library's threads. CUDA takes no other. */
  int32_t n_parts;
} replayssm_exec;

/* Flag of a batch: null_id is padding too. */
#define REPLAYSSM_BATCH_NULL_ID 1
/* Flag of a batch: leave outputs of null rows alone instead of writing zeros. */
#define REPLAYSSM_BATCH_KEEP_NULL_OUTPUTS 2
/* Flag of a batch: it goes to extend calls and their commit. Without it, to steps and their commit. */
#define REPLAYSSM_BATCH_EXTEND 4

/* One batch of a model step. The same descriptor goes to every layer, every convolution and the commit of the step, and what it
 * points to stays as it is until the commit has run. Arrays lie in the context's memory.
 *
 * A row is null iff its slot or ring id is negative, or its slot id is null_id (with the flag). An id at or above its
 * count, a row longer than max_tokens, and falling cu_seqlens also make a null row, and set a fault bit. Null rows
 * write zeros and touch no slot; their other id may be anything. A row of 0 tokens does nothing. No slot and no ring may be in a
 * batch twice, and rows of cu_seqlens may not overlap: the outputs of such rows are undefined. */
typedef struct replayssm_batch {
  /* sizeof(replayssm_batch). */
  uint32_t struct_size;
  /* REPLAYSSM_BATCH_*. */
  uint32_t flags;
  /* Rows, padding included; 0 is legal. */
  int32_t n_rows;
  /* Tokens of every row, up to max_step_tokens (extend: any number); 0 with cu_seqlens. */
  int32_t tokens;
  /* With cu_seqlens: no row is longer. 0 = max_step_tokens (extend: no limit). */
  int32_t max_tokens;
  /* With REPLAYSSM_BATCH_NULL_ID: this slot id is padding. */
  int32_t null_id;
  /* Extend: leave the last keep_tail tokens of each row in the ring, so that they can be taken back; up to window. */
  int32_t keep_tail;
  /* Zero. */
  uint32_t reserved;
  /* With cu_seqlens: token rows that the packed tensors have; cu_seqlens is clamped to it. */
  int64_t n_tokens;
  /* [n_rows] slot of each row. */
  struct replayssm_ids slots;
  /* [n_rows] ring of each row; data NULL: the same ids as slots. */
  struct replayssm_ids rings;
  /* [n_rows + 1]: row r has tokens cu_seqlens[r] .. cu_seqlens[r + 1] - 1 of the packed tensors. NULL: tokens. */
  const int32_t *cu_seqlens;
  /* [n_rows], nonzero: fold the row's committed history in this step. NULL: none. */
  const uint8_t *flush;
  /* [n_rows]: the commit skips rows whose ring is of another generation; steps and extends run them all the same. NULL: it skips
   * none. */
  const uint32_t *generation;
} replayssm_batch;

/* Inputs, parameters and output of a Mamba-2 call.
 *
 * Per head: dt = softplus(dt + dt_bias), g = A dt, S = e^g S + dt x B^T, y = S C + D x, out = y silu(z)
 * (Dao and Gu, "Transformers are SSMs", 2024; the state is [headdim, dstate], dstate contiguous). */
typedef struct replayssm_mamba2_args {
  /* sizeof(replayssm_mamba2_args). */
  uint32_t struct_size;
  /* 0: dt goes through softplus. 1: dt (with its bias) is used as it is. */
  int32_t no_softplus;
  /* io [.., nheads, headdim]. */
  struct replayssm_tensor x;
  /* io [.., ngroups, dstate]. */
  struct replayssm_tensor B;
  /* io [.., ngroups, dstate]. */
  struct replayssm_tensor C;
  /* Any dtype, [.., nheads]: a head axis, no channel axis. */
  struct replayssm_tensor dt;
  /* Any dtype, [nheads] along stride_head. Negative for a decay. */
  struct replayssm_tensor A;
  /* Any dtype, [nheads]; absent = 0. */
  struct replayssm_tensor dt_bias;
  /* Any dtype, [nheads], or with D_per_element [nheads, headdim]; absent = 0. */
  struct replayssm_tensor D;
  /* Whether D has an element per channel. */
  int32_t D_per_element;
  /* Zero. */
  uint32_t reserved;
  /* io [.., nheads, headdim]; absent = no gate. */
  struct replayssm_tensor z;
  /* Output dtype, [.., nheads, headdim]. Overlaps no input. */
  struct replayssm_tensor out;
} replayssm_mamba2_args;

/* Inputs, parameters and output of a Gated DeltaNet or Kimi Delta Attention call.
 *
 * Per value head, with its query and key head: q and k are L2-normalised, beta = sigmoid(b), S = S e^g (KDA: per key channel),
 * S = S + beta (v - S k) k^T, out = scale S q (Yang et al., "Gated Delta Networks", 2024; Kimi Team, "Kimi Linear", 2025; the state
 * is [V, K], K contiguous). */
typedef struct replayssm_delta_args {
  /* sizeof(replayssm_delta_args). */
  uint32_t struct_size;
  /* REPLAYSSM_GATE_*. */
  replayssm_gate gate;
  /* io [.., H, K]. */
  struct replayssm_tensor q;
  /* io [.., H, K]. */
  struct replayssm_tensor k;
  /* io [.., HV, V]. */
  struct replayssm_tensor v;
  /* Any dtype, raw a or log decay: GDN [.., HV], KDA [.., HV, K]. */
  struct replayssm_tensor g;
  /* Any dtype, [.., HV]: raw b, or beta itself with beta_processed. */
  struct replayssm_tensor beta;
  /* Any dtype, [HV]; absent with REPLAYSSM_GATE_LOG_DECAY. */
  struct replayssm_tensor A_log;
  /* Any dtype, GDN [HV], KDA [HV, K]; absent = 0, and with REPLAYSSM_GATE_LOG_DECAY. */
  struct replayssm_tensor dt_bias;
  /* With REPLAYSSM_GATE_LOWER_BOUND: below 0. */
  float lower_bound;
  /* Factor of the output; 0 = 1 / sqrt(K). */
  float scale;
  /* Inside the root of the norms of q and k; 0 = 1e-6. */
  float l2norm_eps;
  /* 1: q and k are used as they come. */
  int32_t no_l2norm;
  /* 1: beta does not go through the sigmoid. */
  int32_t beta_processed;
  /* Zero. */
  uint32_t reserved;
  /* Output dtype, [.., HV, V]. Overlaps no input. */
  struct replayssm_tensor out;
} replayssm_delta_args;

/* Inputs, parameters and output of a convolution call: out_t = silu(bias + sum_i weight_i x_{t - width + 1 + i}). */
typedef struct replayssm_conv1d_args {
  /* sizeof(replayssm_conv1d_args). */
  uint32_t struct_size;
  /* 0: SiLU follows. 1: it does not. */
  int32_t no_silu;
  /* io; head axis = section. */
  struct replayssm_tensor x;
  /* Output dtype; head axis = section. May be x itself if the dtypes are equal. */
  struct replayssm_tensor out;
  /* Any dtype, [channels, width]: channels are stride_head apart, taps contiguous, oldest first. */
  struct replayssm_tensor weight;
  /* Any dtype, [channels]: stride_head apart; absent = 0. */
  struct replayssm_tensor bias;
} replayssm_conv1d_args;

/* How many tokens of each row are accepted. */
typedef struct replayssm_commit_args {
  /* sizeof(replayssm_commit_args). */
  uint32_t struct_size;
  /* REPLAYSSM_COUNTS_ACCEPTED, REPLAYSSM_COUNTS_ACCEPTED_DRAFTS or REPLAYSSM_COUNTS_REJECTED. */
  replayssm_counts convention;
  /* [n_rows] in the context's memory; NULL: all tokens of each row. NULL for an extend. */
  const int32_t *counts;
  /* Distance of neighbours in elements; 0 = 1. */
  int64_t counts_stride;
} replayssm_commit_args;

/* A list of slots and rings. Entries with a negative id are skipped, their other values too. With host lists, calls that change what is
 * listed refuse an id that is named twice.
 *
 * An engine whose groups of layers have slot ids of their own names pools, for calls on a slots handle: a pool that is named has its slots
 * in pool_slots, a pool that is not has them in slots. An entry whose slot is negative in a pool is skipped there alone: position, generation
 * and all else that a ring has go by the ring id, even where every pool skips the entry; a negative ring id skips it as a whole. With every
 * pool of the handle named, slots may be absent. */
typedef struct replayssm_list {
  /* sizeof(replayssm_list). */
  uint32_t struct_size;
  /* Entries; 0 is legal. */
  int32_t n;
  /* Where the ids and all per-entry arrays of the call lie: REPLAYSSM_WHERE_DEVICE or REPLAYSSM_WHERE_HOST. */
  replayssm_where place;
  /* Zero. */
  uint32_t reserved;
  /* [n]. */
  struct replayssm_ids slots;
  /* [n]; data NULL: the same ids as slots. */
  struct replayssm_ids rings;
  /* Pools that have slot ids of their own, up to 64; 0 for a call on one pool and for read_cursors. */
  int32_t n_pools;
  /* Zero. */
  uint32_t pools_reserved;
  /* Host array [n_pools]: those pools, each once. */
  const struct replayssm_layers *const *pools;
  /* Host array [n_pools]: the slots [n] of each, which lie where the list lies. */
  const struct replayssm_ids *pool_slots;
} replayssm_list;

/* What a flush folds. Arrays have an element per list entry. */
typedef struct replayssm_flush_args {
  /* sizeof(replayssm_flush_args). */
  uint32_t struct_size;
  /* 0: fold now. 1: enqueue nothing but a wish: the first step that finds position[i] among the committed tokens that it may fold
   * (min_rewind of them it may not) folds, under every schedule. A reset, an import and an extend's commit forget it, as FORK, MOVE, LOAD
   * and a restore do for their target; SWAP takes it along. */
  int32_t later;
  /* Now: fold up to exactly here, also tokens that min_rewind would keep, which cannot be taken back then; at or before a checkpoint there
   * is nothing to do. NULL, with later 0: as a step's mask does, all but min_rewind committed tokens. */
  const int64_t *position;
} replayssm_flush_args;

/* Which rows of a batch leave a state behind, and where. */
typedef struct replayssm_snapshot_args {
  /* sizeof(replayssm_snapshot_args). */
  uint32_t struct_size;
  /* Pools that have slot ids of their own, up to 64. */
  int32_t n_pools;
  /* [n_rows] in the context's memory: the position whose state is wanted, if the last commit of the row reached it; negative: none. */
  const int64_t *at;
  /* [n_rows] slot that gets it. With every pool of the handle named, data may be NULL. */
  struct replayssm_ids dst;
  /* Host array [n_pools]: those pools, each once. */
  const struct replayssm_layers *const *pools;
  /* Host array [n_pools]: the slots [n_rows] of the batch in each. */
  const struct replayssm_ids *pool_src;
  /* Host array [n_pools]: the slots [n_rows] that get the states in each. */
  const struct replayssm_ids *pool_dst;
} replayssm_snapshot_args;

/* What a copy makes of its target. */
typedef int32_t replayssm_copy_kind;
/* What the source is: checkpoint, ring, position, seed. A source may have many targets. */
#define REPLAYSSM_COPY_FORK 0
/* The same; the source gets a new generation, so that late commits of its owner do nothing, and is undefined until a reset. */
#define REPLAYSSM_COPY_MOVE 1
/* Source and target change places; both rings get a new generation. */
#define REPLAYSSM_COPY_SWAP 2
/* A checkpoint without a ring: the exact state of the source at a position. */
#define REPLAYSSM_COPY_STORE 3
/* A live slot with an empty history, from a checkpoint without a ring that a snapshot or STORE has left. That has no seed: the target's
 * ring gets the one that is made from its id, as by a reset with seed NULL. */
#define REPLAYSSM_COPY_LOAD 4
/* A checkpoint without a ring, from another. */
#define REPLAYSSM_COPY_STORED 5

/* How a copy is to be made. Arrays have an element per list entry, where the lists lie. */
typedef struct replayssm_copy_args {
  /* sizeof(replayssm_copy_args). */
  uint32_t struct_size;
  /* REPLAYSSM_COPY_*. */
  replayssm_copy_kind kind;
  /* STORE: at which position, held as for replayssm_export; NULL: all committed tokens. LOAD: where the checkpoint stands, and the
   * target starts. NULL otherwise. */
  const int64_t *position;
  /* FORK, MOVE, LOAD: generation of the target's ring from now on; NULL: one more than before. NULL otherwise. */
  const uint32_t *generation;
} replayssm_copy_args;

/* What a reset sets. Arrays have an element per list entry. */
typedef struct replayssm_reset_args {
  /* sizeof(replayssm_reset_args). */
  uint32_t struct_size;
  /* 0: the state becomes zero. 1: it stays as it is (the caller has just written it in place; convolution windows
   * are to be imported). */
  int32_t keep_checkpoint;
  /* With keep_checkpoint: what stands there is fp32 [nheads, headdim, dstate] (delta rules [HV, V, K]); turn it into the pool's
   * format. Not with 16-bit formats, whose slots are too small for it. */
  int32_t convert;
  /* Zero. */
  uint32_t reserved;
  /* Tokens already in the state, 0 to 2^60, where positions end: a commit beyond sets FAULT_POSITION and moves nothing. NULL: 0. */
  const int64_t *position;
  /* Generation of the ring from now on. NULL: one more than before. */
  const uint32_t *generation;
  /* Key of stochastic rounding. NULL: made from the ring id. */
  const uint64_t *seed;
} replayssm_reset_args;

/* A dense state outside the library: row i belongs to entry i of a list. */
typedef struct replayssm_state {
  /* sizeof(replayssm_state). */
  uint32_t struct_size;
  /* REPLAYSSM_DTYPE_F32, REPLAYSSM_DTYPE_BF16 or REPLAYSSM_DTYPE_F16. */
  replayssm_dtype dtype;
  /* REPLAYSSM_STATE_ROW_MAJOR or REPLAYSSM_STATE_COL_MAJOR. */
  replayssm_orientation orientation;
  /* A layer, or -1: all layers, stride_layer apart. */
  int32_t layer;
  /* Element 0, in the context's memory. */
  void *data;
  /* Elements from entry to entry; 0 = dense, here and below: [entry, layer, head, row, column], layers only with layer -1. */
  int64_t stride_entry;
  /* Elements from layer to layer. */
  int64_t stride_layer;
  /* Elements from head to head. */
  int64_t stride_head;
  /* Elements from row to row (of the orientation); the last axis is contiguous. */
  int64_t stride_row;
} replayssm_state;

/* The state of a ring. Out; 32 bytes, frozen. */
typedef struct replayssm_cursor {
  /* Committed tokens, absolute. */
  int64_t position;
  /* The first step that finds this position among the committed tokens that it may fold does fold; 0: none is waited for. */
  int64_t flush_before;
  /* Key of stochastic rounding. */
  uint64_t seed;
  /* Counts resets and copies, or as given to them. */
  uint32_t generation;
  /* Tokens that the last commit added: 0 after a reset, an import, a copy, a rewind and the commit of a row without tokens. */
  uint32_t committed;
} replayssm_cursor;

/* Fault bit: a slot or ring id at or above its count. */
#define REPLAYSSM_FAULT_ID 1
/* Fault bit: a commit count outside 0 .. tokens of the row; it was clamped. */
#define REPLAYSSM_FAULT_COUNT 2
/* Fault bit: a row longer than max_tokens, or cu_seqlens that falls or leaves n_tokens. */
#define REPLAYSSM_FAULT_LENGTH 4
/* Fault bit: a checkpoint outside the window (after an uncommitted extend, or lent memory that was never reset), or a position
 * that is not held. Nothing was written; outputs are zero. */
#define REPLAYSSM_FAULT_POSITION 8
/* Fault bit, with checks: a row's slot or ring is that of an earlier row of the batch; what the two leave behind is undefined. */
#define REPLAYSSM_FAULT_DUPLICATE 16
/* Fault bit, with checks: bytes before or behind a row's part of owned memory were overwritten, by someone else's stray write or by this
 * library. What stands beside them cannot be trusted either. The bytes stay as they are, so later calls report them again. */
#define REPLAYSSM_FAULT_CANARY 32
/* Fault bit, with checks: an infinity or a NaN in an input of a row, or (first_slot and first_row -1) in a parameter. The row is worked
 * on all the same. */
#define REPLAYSSM_FAULT_NOT_FINITE 64
/* Fault bit: a rewind beyond what the slot holds; it did nothing. */
#define REPLAYSSM_FAULT_REWIND 128

/* What went wrong on the device so far. Out. All of first_* are -1 where the place of the first fault is not known: not yet, while the work
 * that saw it is still writing it down and another fault is already here, or no longer, where another call has just cleared it. */
typedef struct replayssm_report {
  /* sizeof(replayssm_report), set by the caller. */
  uint32_t struct_size;
  /* REPLAYSSM_FAULT_*, sticky until cleared. */
  uint32_t bits;
  /* Faults seen. */
  uint64_t count;
  /* Slot or ring id of the first; for LENGTH, its row. */
  int64_t first_slot;
  /* Batch row or list entry of the first. */
  int64_t first_row;
  /* Pool of the first, in order of creation; -1 where no pool was involved. */
  int32_t first_pool;
  /* Layer of the first; -1 where no layer was involved. */
  int32_t first_layer;
} replayssm_report;

/* Counters of a slots handle over all its pools, counted where the work is done. Out. */
typedef struct replayssm_stats {
  /* sizeof(replayssm_stats), set by the caller. */
  uint32_t struct_size;
  /* Zero. */
  uint32_t reserved;
  /* Commits. */
  uint64_t steps;
  /* Rows of one token or more that commits saw. */
  uint64_t rows;
  /* Their tokens. */
  uint64_t tokens;
  /* Tokens that became committed. */
  uint64_t accepted;
  /* Checkpoint tiles that steps and flushes rewrote. */
  uint64_t flushes;
  /* Bytes of checkpoint loaded. */
  uint64_t checkpoint_bytes_read;
  /* Bytes of checkpoint stored. */
  uint64_t checkpoint_bytes_written;
  /* Bytes of ring records and convolution windows loaded. */
  uint64_t ring_bytes_read;
  /* Bytes of ring records and convolution windows stored. */
  uint64_t ring_bytes_written;
} replayssm_stats;

#ifdef __cplusplus
extern "C" {
#endif

/* A static name of a status, as "REPLAYSSM_OK"; "unknown status" for a status of no name.
 *
 * Owner: the library; the text is never freed.
 * Threads: any. Capture: host only. */
REPLAYSSM_API const char *replayssm_status_string(replayssm_status status);

/* The sentence of this thread's last failed call: field, value and expectation. Empty if none failed.
 *
 * Owner: the library; the text is valid until this thread's next failed call.
 * Threads: any, each with a sentence of its own. Capture: host only. */
REPLAYSSM_API const char *replayssm_last_error_message(void);

/* The CUresult behind this thread's last call that failed with REPLAYSSM_ERROR_CUDA or _DEVICE_LOST; 0 if none did.
 *
 * Threads: any, each with a number of its own. Capture: host only. */
REPLAYSSM_API int32_t replayssm_last_cuda_error(void);

/* The library's version, major << 24 | minor << 12 | patch; compare with REPLAYSSM_VERSION.
 *
 * Threads: any. Capture: host only. */
REPLAYSSM_API uint32_t replayssm_version(void);

/* How the library was built, one line for bug reports: version, target, profile, compiler, backends with their instruction sets,
 * features. ASCII, no paths.
 *
 * Owner: the library; the text is never freed.
 * Threads: any. Capture: host only. */
REPLAYSSM_API
const char *replayssm_build_info(void);

/* Creates a context: one backend on one device, with threads and log as desc says.
 *
 * REPLAYSSM_BACKEND_AUTO is the calling thread's current CUDA context if it has one whose device there are kernels for, and n_threads is 0;
 * else the CPU.
 *
 * NULL: desc, which means all defaults; not out.
 * Owner: the caller, of *out (NULL on failure), until replayssm_context_destroy.
 * Errors: INVALID_ARGUMENT, UNSUPPORTED, NO_CUDA (a CUDA backend was asked for and cannot be had), NO_CODE_FOR_ARCH, CUDA,
 * OUT_OF_MEMORY (threads).
 * Threads: any. Capture: never. */
REPLAYSSM_CALL
replayssm_status replayssm_context_create(const struct replayssm_context_desc *desc,
                                          struct replayssm_context **out);

/* Destroys a context once the last slots handle on it is gone; its threads end then. A call that is inside finishes as usual.
 *
 * NULL: context may be NULL, stale or no handle; nothing happens then.
 * Owner: context is no handle any more when this returns.
 * Threads: any. Capture: never. */
REPLAYSSM_API
void replayssm_context_destroy(struct replayssm_context *context);

/* What a context is: backend, device, threads, name.
 *
 * NULL: neither context nor out; out->struct_size is set.
 * Errors: INVALID_HANDLE, INVALID_ARGUMENT.
 * Threads: any. Capture: host only. */
REPLAYSSM_CALL
replayssm_status replayssm_context_query(const struct replayssm_context *context,
                                         struct replayssm_context_info *out);

/* Creates a slots handle on a context: positions and schedule of all layers of a model on one device. All positions are 0.
 *
 * NULL: none of context, desc and out.
 * Owner: the caller, of *out (NULL on failure), until replayssm_slots_destroy. The context stays alive as long as the slots handle.
 * Errors: INVALID_HANDLE, INVALID_ARGUMENT, UNSUPPORTED, OUT_OF_MEMORY, CUDA.
 * Threads: any. Capture: never. */
REPLAYSSM_CALL
replayssm_status replayssm_slots_create(const struct replayssm_context *context,
                                        const struct replayssm_slots_desc *desc,
                                        struct replayssm_slots **out);

/* Destroys a slots handle once the last pool on it is gone. A call that is inside finishes as usual.
 *
 * NULL: slots may be NULL, stale or no handle; nothing happens then.
 * Owner: slots is no handle any more when this returns.
 * Threads: any. Capture: never. */
REPLAYSSM_API void replayssm_slots_destroy(struct replayssm_slots *slots);

/* Creates a pool on slots: n_layers equal layers of one family, as desc says. Owned memory is zero: the empty state at position 0. A
 * pool that joins slots whose positions have moved must be reset first.
 *
 * lent: host array [n_lent], 0 to 16, its elements each their struct_size apart; read before the call returns.
 * NULL: lent with n_lent 0; not slots, desc and out.
 * Owner: the caller, of *out (NULL on failure), until replayssm_layers_destroy; lent memory stays the caller's and must outlive the pool.
 * The slots handle stays alive as long as the pool.
 * Errors: INVALID_HANDLE, INVALID_ARGUMENT (also a field of another family that is not 0), UNSUPPORTED, OUT_OF_MEMORY,
 * CUDA.
 * Threads: any, but no other call may be inside slots. Capture: never. */
REPLAYSSM_CALL
replayssm_status replayssm_layers_create(struct replayssm_slots *slots,
                                         const struct replayssm_pool_desc *desc,
                                         const struct replayssm_lent *lent,
                                         int32_t n_lent,
                                         struct replayssm_layers **out);

/* Takes the lent components of a pool from where they are now: the engine has moved or reallocated them. Contents are the caller's
 * business. All or none.
 *
 * lent: host array [n_lent], as in replayssm_layers_create: exactly the kinds that were lent there, each checked as there; what the library
 * owns stays. Graphs that were captured before must not be launched any more.
 * NULL: not layers; lent with n_lent 0.
 * Errors: INVALID_HANDLE, INVALID_ARGUMENT, UNSUPPORTED, OUT_OF_MEMORY, CUDA; the pool is as before.
 * Threads: any, but no other call may be inside a call on layers or on its slots handle, and none enqueued or running. Capture: never. */
REPLAYSSM_CALL
replayssm_status replayssm_layers_rebind(struct replayssm_layers *layers,
                                         const struct replayssm_lent *lent,
                                         int32_t n_lent);

/* Destroys a pool and the memory that it owns. No call on it may be enqueued or running. CUDA: where it owns memory, it waits for the
 * work of its context.
 *
 * NULL: layers may be NULL, stale or no handle; nothing happens then.
 * Owner: layers is no handle any more when this returns; lent memory is the caller's alone.
 * Threads: any. Capture: never. */
REPLAYSSM_API
void replayssm_layers_destroy(struct replayssm_layers *layers);

/* Size and place of every component of a pool. out: array [capacity], its elements out[0].struct_size bytes apart. *n becomes the number
 * of components, also when BUFFER_TOO_SMALL is returned.
 *
 * NULL: out with capacity 0; not layers and n.
 * Errors: INVALID_HANDLE, INVALID_ARGUMENT, BUFFER_TOO_SMALL.
 * Threads: any. Capture: host only. */
REPLAYSSM_CALL
replayssm_status replayssm_layers_components(const struct replayssm_layers *layers,
                                             struct replayssm_component *out,
                                             int32_t capacity,
                                             int32_t *n);

/* What a model takes before any of it exists: bytes per slot and ring, the total, how many requests fit a budget, beside that what one
 * state per draft token would take; bytes per step; the window that moves the fewest. Needs no context: sizes are the same on every backend.
 *
 * slots_desc, pools: what would be created; pools is a host array [n_pools], 0 to 4096, its elements pools[0].struct_size apart, all on one
 * slots handle. args: batch, tokens, budget. out: the answer.
 * NULL: args, which means all defaults; pools with n_pools 0; not slots_desc and out.
 * Errors: INVALID_ARGUMENT, UNSUPPORTED, as creating would give them.
 * Threads: any. Capture: never. */
REPLAYSSM_CALL
replayssm_status replayssm_plan(const struct replayssm_slots_desc *slots_desc,
                                const struct replayssm_pool_desc *pools,
                                int32_t n_pools,
                                const struct replayssm_plan_args *args,
                                struct replayssm_plan_info *out);

/* The components that a pool would have, as replayssm_layers_components says them of one that exists: base and layer_bases NULL, strides as
 * owned memory will have them. Needs no context.
 *
 * slots_desc, pool_desc: what would be created. out: array [capacity], its elements out[0].struct_size bytes apart. *n becomes the number of
 * components, also when BUFFER_TOO_SMALL is returned.
 * NULL: out with capacity 0; not slots_desc, pool_desc and n.
 * Errors: INVALID_ARGUMENT, UNSUPPORTED, BUFFER_TOO_SMALL.
 * Threads: any. Capture: host only. */
REPLAYSSM_CALL
replayssm_status replayssm_plan_components(const struct replayssm_slots_desc *slots_desc,
                                           const struct replayssm_pool_desc *pool_desc,
                                           struct replayssm_component *out,
                                           int32_t capacity,
                                           int32_t *n);

/* Whether a pool as desc says can be had on context and take steps of max_tokens tokens (0 = 1): OK, or the status and the sentence with
 * which creating it, or slots for such steps, fails. Creates nothing. Whether there is memory enough, only creating tells.
 *
 * NULL: neither context nor desc.
 * Errors: INVALID_HANDLE, INVALID_ARGUMENT, UNSUPPORTED.
 * Threads: any. Capture: never. */
REPLAYSSM_CALL
replayssm_status replayssm_supports(const struct replayssm_context *context,
                                    const struct replayssm_pool_desc *desc,
                                    int32_t max_tokens);

/* Says in plain sentences what a step of batch rows of tokens tokens does on a pool: the kernel and why, when it folds, bytes per row and
 * step on average over a flush cycle beside those of the plain update, work items and threads, memory. For people: the words may change.
 * It takes all tokens as accepted, the rows as dense, and the work as done by the library's threads (no exec.n_parts).
 *
 * text: host memory of capacity bytes. It gets one line per sentence, ASCII, always with a final zero if capacity is not 0; what does not
 * fit is cut off, and the status is BUFFER_TOO_SMALL, whose sentence says how much is needed. 4096 bytes always suffice.
 * NULL: text with capacity 0; not layers.
 * Errors: INVALID_HANDLE, INVALID_ARGUMENT (batch below 1, tokens not in 1 .. max_step_tokens), BUFFER_TOO_SMALL.
 * Threads: any. Capture: never. */
REPLAYSSM_CALL
replayssm_status replayssm_explain(const struct replayssm_layers *layers,
                                   int32_t batch,
                                   int32_t tokens,
                                   char *text,
                                   size_t capacity);

/* One Mamba-2 layer of a model step: appends the batch's tokens behind the committed ones and writes their outputs; folds history into
 * the checkpoint when due. It may be run again or abandoned before the commit: nothing has moved.
 *
 * layer: 0 to n_layers - 1 of the pool that layers stands for. batch and args: shapes, dtypes and strides as their fields say. A row's
 * tokens see the committed tokens and the row's earlier ones. Faults on the device (see replayssm_check) leave a row's slot untouched
 * and its outputs zero.
 * NULL: exec; not layers, batch and args; tensors of args where their fields allow it, and all of them if there is no row or no token.
 * Errors: INVALID_HANDLE (also a pool of another family), INVALID_ARGUMENT, UNSUPPORTED, WRONG_STREAM; nothing was done then.
 * CUDA: what the call had enqueued before stays.
 * Threads: any, at the same time on disjoint slots. Capture: enqueues; on the CPU backend all is done on return. */
REPLAYSSM_CALL
replayssm_status replayssm_mamba2_step(const struct replayssm_layers *layers,
                                       int32_t layer,
                                       const struct replayssm_batch *batch,
                                       const struct replayssm_mamba2_args *args,
                                       const struct replayssm_exec *exec);

/* Rows of any length without rollback: folds history and then the row's tokens one by one into the checkpoint, by the plain update's
 * arithmetic, and writes every token's output. For prompts, and for comparison: this is the plain update.
 *
 * The batch has REPLAYSSM_BATCH_EXTEND, here and in its commit. Between the two, a step, another extend or an export on these slots
 * does nothing but set FAULT_POSITION, and a rewind fails; an extend that is not committed needs a reset or import. (Where
 * keep_tail covers all of a row, its tokens have only been recorded, and it may be abandoned like a step if they are max_step_tokens at
 * most: a convolution holds no more.)
 * layers, layer, batch, args, exec: otherwise as in replayssm_mamba2_step.
 * NULL: as replayssm_mamba2_step.
 * Errors: as replayssm_mamba2_step.
 * Threads: as replayssm_mamba2_step. Capture: enqueues; on the CPU backend all is done on return. */
REPLAYSSM_CALL
replayssm_status replayssm_mamba2_extend(const struct replayssm_layers *layers,
                                         int32_t layer,
                                         const struct replayssm_batch *batch,
                                         const struct replayssm_mamba2_args *args,
                                         const struct replayssm_exec *exec);

/* One Gated DeltaNet or Kimi Delta Attention layer of a model step.
 *
 * layers, layer, batch, args, exec: as in replayssm_mamba2_step, of a pool of GDN or KDA.
 * NULL: as replayssm_mamba2_step.
 * Errors: as replayssm_mamba2_step.
 * Threads: as replayssm_mamba2_step. Capture: enqueues; on the CPU backend all is done on return. */
REPLAYSSM_CALL
replayssm_status replayssm_delta_step(const struct replayssm_layers *layers,
                                      int32_t layer,
                                      const struct replayssm_batch *batch,
                                      const struct replayssm_delta_args *args,
                                      const struct replayssm_exec *exec);

/* Gated DeltaNet or Kimi Delta Attention over rows of any length without rollback.
 *
 * layers, layer, batch, args, exec: as in replayssm_mamba2_extend, of a pool of GDN or KDA.
 * NULL: as replayssm_mamba2_step.
 * Errors: as replayssm_mamba2_step.
 * Threads: as replayssm_mamba2_step. Capture: enqueues; on the CPU backend all is done on return. */
REPLAYSSM_CALL
replayssm_status replayssm_delta_extend(const struct replayssm_layers *layers,
                                        int32_t layer,
                                        const struct replayssm_batch *batch,
                                        const struct replayssm_delta_args *args,
                                        const struct replayssm_exec *exec);

/* One convolution of a model step. The window needs no fold.
 *
 * layers, layer, batch, args, exec: as in replayssm_mamba2_step, of a pool of convolutions.
 * NULL: as replayssm_mamba2_step.
 * Errors: as replayssm_mamba2_step.
 * Threads: as replayssm_mamba2_step. Capture: enqueues; on the CPU backend all is done on return. */
REPLAYSSM_CALL
replayssm_status replayssm_conv1d_step(const struct replayssm_layers *layers,
                                       int32_t layer,
                                       const struct replayssm_batch *batch,
                                       const struct replayssm_conv1d_args *args,
                                       const struct replayssm_exec *exec);

/* A convolution over rows of any length without rollback. Of keep_tail, at most min_rewind + max_step_tokens tokens can be taken back,
 * since the ring holds no more windows.
 *
 * layers, layer, batch, args, exec: as in replayssm_mamba2_extend, of a pool of convolutions.
 * NULL: as replayssm_mamba2_step.
 * Errors: as replayssm_mamba2_step.
 * Threads: as replayssm_mamba2_step. Capture: enqueues; on the CPU backend all is done on return. */
REPLAYSSM_CALL
replayssm_status replayssm_conv1d_extend(const struct replayssm_layers *layers,
                                         int32_t layer,
                                         const struct replayssm_batch *batch,
                                         const struct replayssm_conv1d_args *args,
                                         const struct replayssm_exec *exec);

/* Ends a model step: position += accepted, for every row of the batch. Once, after the last layer: a second commit, or one without steps,
 * would commit records that nothing wrote. Rolling back is accepting fewer. A row of another generation is skipped.
 *
 * args: counts [n_rows] of the batch, clamped to 0 .. tokens of the row; one outside sets FAULT_COUNT. An extend takes all tokens.
 * NULL: args, which means all tokens of each row, and exec; not slots and batch.
 * Errors: INVALID_HANDLE, INVALID_ARGUMENT, UNSUPPORTED, WRONG_STREAM; nothing was done then.
 * CUDA: what the call had enqueued before stays.
 * Threads: any, at the same time on disjoint rings. Capture: enqueues; on the CPU backend all is done on return. */
REPLAYSSM_CALL
replayssm_status replayssm_commit(const struct replayssm_slots *slots,
                                  const struct replayssm_batch *batch,
                                  const struct replayssm_commit_args *args,
                                  const struct replayssm_exec *exec);

/* Starts requests: position, generation and seed of the listed rings are set, their history becomes empty, and the listed slots of all
 * pools on slots become zero (or stay, with keep_checkpoint). Convolution windows become zero too, or are to be imported.
 *
 * list: 0 or more entries; args: arrays with an element per entry, where the list lies.
 * NULL: args, which means all defaults, and exec; not slots and list.
 * Errors: INVALID_HANDLE, INVALID_ARGUMENT (with host lists also an id or position out of range), UNSUPPORTED, WRONG_STREAM; nothing was
 * done then.
 * CUDA: what the call had enqueued before stays: reset (or import) those entries again.
 * Threads: any, at the same time on disjoint slots; it waits for a pool that is being created or destroyed. Capture: enqueues, with
 * REPLAYSSM_WHERE_DEVICE; on the CPU backend all is done on return. */
REPLAYSSM_CALL
replayssm_status replayssm_reset(const struct replayssm_slots *slots,
                                 const struct replayssm_list *list,
                                 const struct replayssm_reset_args *args,
                                 const struct replayssm_exec *exec);

/* Writes a pool's checkpoints (a convolution: windows) from a dense state and empties their history. Values are converted to fp32, NaNs
 * become canonical. Reset first, import after.
 *
 * position: int64 [n] tokens already in the state, where the list lies; the rings move there, so every pool on them must be imported or
 * reset to that position. src: a row per entry of list.
 * NULL: position, which means the rings' own positions, which stay, and exec; not layers, list and src.
 * Errors: as replayssm_reset.
 * Threads: any, at the same time on disjoint slots. Capture: enqueues, with REPLAYSSM_WHERE_DEVICE; on the CPU backend all is done on return. */
REPLAYSSM_CALL
replayssm_status replayssm_import(const struct replayssm_layers *layers,
                                  const struct replayssm_list *list,
                                  const int64_t *position,
                                  const struct replayssm_state *src,
                                  const struct replayssm_exec *exec);

/* Writes the exact state at a held position (a convolution: its window) into a dense buffer. The slot does not change.
 *
 * at: int64 [n] positions, where the list lies. A position is held from the checkpoint's to the committed one; another sets
 * FAULT_POSITION, and that entry's part of the buffer is left alone. dst: a row per entry of list.
 * NULL: at, which means all committed tokens, and exec; not layers, list and dst.
 * Errors: as replayssm_reset.
 * Threads: any, at the same time on disjoint slots. Capture: enqueues, with REPLAYSSM_WHERE_DEVICE; on the CPU backend all is done on return. */
REPLAYSSM_CALL
replayssm_status replayssm_export(const struct replayssm_layers *layers,
                                  const struct replayssm_list *list,
                                  const int64_t *at,
                                  const struct replayssm_state *dst,
                                  const struct replayssm_exec *exec);

/* Takes back n[i] committed tokens, down to the newest checkpoint of all pools. Up to min_rewind tokens that were committed by steps
 * since the last reset, import, extend, LOAD, portable restore or rewind can always be taken back, and, before the next step, those of the
 * last one; but none that a flush with a position has folded.
 *
 * n, done: int32 [n of list], where the list lies. done[i] becomes 1, or 0 for a skipped entry and for one that cannot be rewound, which
 * sets FAULT_REWIND and is left alone.
 * NULL: exec, and done (with a host list on the CPU backend, a rewind too deep is then OUT_OF_RANGE and nothing is rewound); not slots,
 * list and n. CUDA: done lies in memory that the device writes also with a host list.
 * Errors: as replayssm_reset; CPU: OUT_OF_RANGE; CUDA: UNSUPPORTED above 40 pools.
 * Threads: any, at the same time on disjoint rings; it waits for a pool that is being created or destroyed. Capture: enqueues, with
 * REPLAYSSM_WHERE_DEVICE; on the CPU backend all is done on return. */
REPLAYSSM_CALL
replayssm_status replayssm_rewind(const struct replayssm_slots *slots,
                                  const struct replayssm_list *list,
                                  const int32_t *n,
                                  int32_t *done,
                                  const struct replayssm_exec *exec);

/* Folds history into the checkpoints of the listed slots, outside of a step: all layers of all pools, by the step's own arithmetic, so that
 * later steps go on as if one of them had folded. Or tells later steps to fold. Convolutions have nothing to fold and are not looked at.
 *
 * list: 0 or more entries; args: arrays with an element per entry, where the list lies. A position beyond the committed one, or a
 * checkpoint that cannot be trusted, as after an uncommitted extend, sets FAULT_POSITION, and nothing is written there.
 * NULL: args, which means all defaults, and exec; not slots and list.
 * Errors: as replayssm_reset.
 * Threads: any, at the same time on disjoint slots; it waits for a pool that is being created or destroyed. Capture: enqueues, with
 * REPLAYSSM_WHERE_DEVICE; on the CPU backend all is done on return. */
REPLAYSSM_CALL
replayssm_status replayssm_flush(const struct replayssm_slots *slots,
                                 const struct replayssm_list *list,
                                 const struct replayssm_flush_args *args,
                                 const struct replayssm_exec *exec);

/* Behind the commit of a batch: rows whose last commit reached the position at[row], so that position - committed < at[row] <= position,
 * leave the exact state at that position in slot dst[row], a checkpoint without a ring, in the pools' own formats (a convolution: its
 * window). The rows' own slots and rings do not change. What a prefix cache needs at every so many tokens, whatever steps accept.
 *
 * batch: the one that was committed; rows of another generation leave nothing. args: at and dst have an element per row. A dst at or
 * above the number of slots sets FAULT_ID, a negative one is none. A position that is not held any more, inside an extend that folded beyond it, sets FAULT_POSITION in each layer
 * and part of a layer for itself; others are stored, and dst is undefined until a reset or another store (REPLAYSSM_SAVE_STORED and LOAD
 * refuse a slot that does not stand at one position). No two rows may have one dst, and no dst may be a slot of the batch.
 * NULL: exec; not slots, batch and args.
 * Errors: as replayssm_commit.
 * Threads: any, at the same time on disjoint slots; it waits for a pool that is being created or destroyed. Capture: enqueues; on the CPU
 * backend all is done on return. */
REPLAYSSM_CALL
replayssm_status replayssm_snapshot(const struct replayssm_slots *slots,
                                    const struct replayssm_batch *batch,
                                    const struct replayssm_snapshot_args *args,
                                    const struct replayssm_exec *exec);

/* Copies slots, with or without their rings, in all layers of all pools: entry i of src to entry i of dst. args.kind says what the target
 * becomes; see REPLAYSSM_COPY_*. A live slot may be copied at any moment, also between a step and its commit.
 *
 * src, dst: lists of one length at one place. A ring id is ignored, and its array may be absent, where the kind has no ring: dst of STORE,
 * src of LOAD, both of STORED. A target is named once, and nothing is source and target in one call; host lists are checked for both.
 * The target's ring gets a generation of its own, an empty last commit and, staggered, a first fold of its own.
 * Device: a source that cannot be trusted (an uncommitted extend), a position that is not held, and a stored checkpoint that does not stand
 * at the position of a LOAD set FAULT_POSITION, each layer and part of a layer for itself. The target then refuses steps until a reset. That
 * of a STORE has parts that were stored and parts that were not: it is undefined until a reset or another store, as with replayssm_snapshot.
 * SWAP and STORED look at no positions: two slots keep what they have in the other's place, and a stored one is copied as it is.
 * NULL: args, which means a fork, and exec; not slots, src and dst.
 * Errors: as replayssm_reset.
 * Threads: any, at the same time on disjoint slots; it waits for a pool that is being created or destroyed. Capture: enqueues, with
 * REPLAYSSM_WHERE_DEVICE; on the CPU backend all is done on return. */
REPLAYSSM_CALL
replayssm_status replayssm_copy(const struct replayssm_slots *slots,
                                const struct replayssm_list *src,
                                const struct replayssm_list *dst,
                                const struct replayssm_copy_args *args,
                                const struct replayssm_exec *exec);

/* Copies the state of the listed rings into dst [n of list], in stream order and without synchronising; entries with negative ids become
 * zero. dst lies in the context's memory, or (CUDA) in pinned host memory.
 *
 * NULL: exec, and dst if the list is empty; not slots and list.
 * Errors: as replayssm_reset.
 * Threads: any. Capture: enqueues, with REPLAYSSM_WHERE_DEVICE; on the CPU backend all is done on return. */
REPLAYSSM_CALL
replayssm_status replayssm_read_cursors(const struct replayssm_slots *slots,
                                        const struct replayssm_list *list,
                                        struct replayssm_cursor *dst,
                                        const struct replayssm_exec *exec);

/* Bytes of a saved slot: the same for every slot and ring of slots and every call, until a pool is created or destroyed.
 *
 * kind: REPLAYSSM_SAVE_*.
 * NULL: neither slots nor bytes.
 * Errors: INVALID_HANDLE, INVALID_ARGUMENT, UNSUPPORTED.
 * Threads: any; it waits for a pool that is being created or destroyed. Capture: host only. */
REPLAYSSM_CALL
replayssm_status replayssm_save_bytes(const struct replayssm_slots *slots,
                                      replayssm_save_kind kind,
                                      uint64_t *bytes);

/* Saves a slot with its ring, in all pools, to a blob in host memory, which another process or machine can restore. Right at any moment:
 * a step that is not committed is not in it, and is repeated after a restore. The slot does not change. Its format is docs/ABI.md's.
 *
 * list: one entry, REPLAYSSM_WHERE_HOST; pools may have slots of their own; REPLAYSSM_SAVE_STORED has no ring. kind: REPLAYSSM_SAVE_*. blob: host memory of capacity bytes, of which replayssm_save_bytes are written;
 * on an error they are undefined. Blobs of equal slots are equal.
 * NULL: exec, and blob with capacity 0 (BUFFER_TOO_SMALL says what is needed); not slots and list.
 * Errors: INVALID_HANDLE, INVALID_ARGUMENT, UNSUPPORTED, WRONG_STREAM, BUFFER_TOO_SMALL, OUT_OF_RANGE (a checkpoint that stands beyond the
 * position, as in an extend that is not committed, or too far behind it; with STORED, parts that do not all stand at one position),
 * CAPTURING, OUT_OF_MEMORY, CUDA.
 * Threads: any, at the same time on disjoint slots; it waits for a pool that is being created or destroyed, and for the work on its stream,
 * meanwhile not holding up others. It allocates, for a portable blob the fp32 state of a layer in the context's memory. Capture: never. */
REPLAYSSM_CALL
replayssm_status replayssm_save(const struct replayssm_slots *slots,
                                const struct replayssm_list *list,
                                replayssm_save_kind kind,
                                void *blob,
                                uint64_t capacity,
                                const struct replayssm_exec *exec);

/* Restores a slot with its ring, in all pools, from a blob. Everything about the blob is checked before the slot changes: it is whole and
 * unchanged, and it fits: a LIVE one the configuration of slots and its pools in the order of their creation, a STORED one shapes and formats
 * of those pools, a PORTABLE one the shapes of their layers, which are matched by family and shape, in the order of pools and layers.
 *
 * A LIVE restore brings back position, first fold and seed; a PORTABLE one position and seed, as a reset and imports do; a STORED one
 * touches no ring, and args has no meaning then.
 * list: one entry, REPLAYSSM_WHERE_HOST: where to; need not be where it was. blob: host memory of bytes bytes. args: the ring's generation.
 * NULL: args, which means all defaults, and exec; not slots, list and blob.
 * Errors: INVALID_HANDLE, INVALID_ARGUMENT, UNSUPPORTED, WRONG_STREAM, BAD_BLOB, CAPTURING, OUT_OF_MEMORY; the slot is as it was. CUDA (the
 * driver refused something midway, also for want of memory): it may be restored in part: reset it.
 * Threads: as replayssm_save, which says what it waits for and allocates. Capture: never. */
REPLAYSSM_CALL
replayssm_status replayssm_restore(const struct replayssm_slots *slots,
                                   const struct replayssm_list *list,
                                   const void *blob,
                                   uint64_t bytes,
                                   const struct replayssm_restore_args *args,
                                   const struct replayssm_exec *exec);

/* Takes n free ids of slots (and rings of the same numbers) from the library's list, most recently released first, each with a new
 * generation: pass it to reset_args.generation and batch.generation, so that late commits of a former owner do nothing. All or none.
 * Optional: engines with ids of their own never call it.
 *
 * ids: host int32 [n]; generations: host uint32 [n].
 * NULL: generations, and ids with n 0; not slots.
 * Errors: INVALID_HANDLE, INVALID_ARGUMENT, OUT_OF_RANGE if fewer are free.
 * Threads: one at a time per handle. Capture: host only. */
REPLAYSSM_CALL
replayssm_status replayssm_acquire(struct replayssm_slots *slots,
                                   int32_t n,
                                   int32_t *ids,
                                   uint32_t *generations);

/* Gives ids of slots back. All or none.
 *
 * ids: host int32 [n].
 * NULL: ids with n 0; not slots.
 * Errors: INVALID_HANDLE, INVALID_ARGUMENT, which names an id that is not acquired or named twice.
 * Threads: one at a time per handle. Capture: host only. */
REPLAYSSM_CALL replayssm_status replayssm_release(struct replayssm_slots *slots, int32_t n, const int32_t *ids);

/* What the device has found wrong on slots so far, without synchronising. clear: 0, or 1 to forget it. (CUDA:
 * a fault that comes at the very moment may be lost.)
 *
 * NULL: neither slots nor out; out->struct_size is set.
 * Errors: INVALID_HANDLE, INVALID_ARGUMENT, UNSUPPORTED.
 * Threads: any. Capture: host only: it sees work that has run. */
REPLAYSSM_CALL
replayssm_status replayssm_check(const struct replayssm_slots *slots,
                                 int32_t clear,
                                 struct replayssm_report *out);

/* Counters of slots over all its pools. CUDA: it waits for a copy on a stream of the library's own, and for no other work.
 *
 * NULL: neither slots nor out; out->struct_size is set.
 * Errors: INVALID_HANDLE, INVALID_ARGUMENT, CUDA.
 * Threads: any. Capture: host only: it sees work that has run. */
REPLAYSSM_CALL
replayssm_status replayssm_stats_read(const struct replayssm_slots *slots,
                                      struct replayssm_stats *out);

#ifdef __cplusplus
}
#endif 

#endif  /* REPLAYSSM_H */
