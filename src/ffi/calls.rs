//! The exported functions. Their comments become the header's.
//!
//! SAFETY comments below say "by the caller's promise" where the header's rules for pointers are meant: a descriptor
//! pointer is NULL or points to `struct_size` bytes, and every pointer in it is valid for what its field says.

use std::ffi::{c_char, c_void};
use std::sync::Arc;

use super::convert;
use super::guard::{guard, last_cuda_error, last_error};
use super::handles::{Kind as HandleKind, insert, pin, remove};
use super::read::{
    Descriptor, array, bytes_mut, check_out, descriptor, optional, optional_pointer, required, write_descriptor,
    write_out, write_text,
};
use super::types::*;
use crate::backend::cpu::Cpu;
use crate::backend::cuda::Cuda;
use crate::dtype::IndexType;
use crate::error::{Error, Result};
use crate::memory::{collected, try_collected};
use crate::replay::blob::{Kind, kind_of};
use crate::replay::capacity::ModelPlan;
use crate::replay::config::PoolConfig;
use crate::replay::launch::{Address, Backend, Exec, Ids, Mode};
use crate::replay::layout::components;
use crate::replay::plan::supports;
use crate::replay::save::Pair;
use crate::replay::slots::{Context, Layers, Slots};

/// A static name of a status, as "REPLAYSSM_OK"; "unknown status" for a status of no name.
///
/// Owner: the library; the text is never freed.
/// Threads: any. Capture: host only.
///
/// cbindgen:prefix=REPLAYSSM_API
#[unsafe(no_mangle)]
pub extern "C" fn replayssm_status_string(status: replayssm_status) -> *const c_char {
    let text = match status {
        REPLAYSSM_OK => c"REPLAYSSM_OK",
        REPLAYSSM_ERROR_INVALID_ARGUMENT => c"REPLAYSSM_ERROR_INVALID_ARGUMENT",
        REPLAYSSM_ERROR_INVALID_HANDLE => c"REPLAYSSM_ERROR_INVALID_HANDLE",
        REPLAYSSM_ERROR_OUT_OF_RANGE => c"REPLAYSSM_ERROR_OUT_OF_RANGE",
        REPLAYSSM_ERROR_BUFFER_TOO_SMALL => c"REPLAYSSM_ERROR_BUFFER_TOO_SMALL",
        REPLAYSSM_ERROR_WRONG_STREAM => c"REPLAYSSM_ERROR_WRONG_STREAM",
        REPLAYSSM_ERROR_UNSUPPORTED => c"REPLAYSSM_ERROR_UNSUPPORTED",
        REPLAYSSM_ERROR_NO_CUDA => c"REPLAYSSM_ERROR_NO_CUDA",
        REPLAYSSM_ERROR_NO_CODE_FOR_ARCH => c"REPLAYSSM_ERROR_NO_CODE_FOR_ARCH",
        REPLAYSSM_ERROR_OUT_OF_MEMORY => c"REPLAYSSM_ERROR_OUT_OF_MEMORY",
        REPLAYSSM_ERROR_CUDA => c"REPLAYSSM_ERROR_CUDA",
        REPLAYSSM_ERROR_DEVICE_LOST => c"REPLAYSSM_ERROR_DEVICE_LOST",
        REPLAYSSM_ERROR_CAPTURING => c"REPLAYSSM_ERROR_CAPTURING",
        REPLAYSSM_ERROR_BAD_BLOB => c"REPLAYSSM_ERROR_BAD_BLOB",
        REPLAYSSM_ERROR_INTERNAL => c"REPLAYSSM_ERROR_INTERNAL",
        _ => c"unknown status",
    };
    text.as_ptr()
}

/// The sentence of this thread's last failed call: field, value and expectation. Empty if none failed.
///
/// Owner: the library; the text is valid until this thread's next failed call.
/// Threads: any, each with a sentence of its own. Capture: host only.
///
/// cbindgen:prefix=REPLAYSSM_API
#[unsafe(no_mangle)]
pub extern "C" fn replayssm_last_error_message() -> *const c_char {
    last_error()
}

/// The CUresult behind this thread's last call that failed with REPLAYSSM_ERROR_CUDA or _DEVICE_LOST; 0 if none did.
///
/// Threads: any, each with a number of its own. Capture: host only.
///
/// cbindgen:prefix=REPLAYSSM_API
#[unsafe(no_mangle)]
pub extern "C" fn replayssm_last_cuda_error() -> i32 {
    last_cuda_error()
}

/// The library's version, major << 24 | minor << 12 | patch; compare with REPLAYSSM_VERSION.
///
/// Threads: any. Capture: host only.
///
/// cbindgen:prefix=REPLAYSSM_API
#[unsafe(no_mangle)]
pub extern "C" fn replayssm_version() -> u32 {
    const fn number(digits: &str) -> u32 {
        let bytes = digits.as_bytes();
        let (mut value, mut i) = (0, 0);
        while i < bytes.len() {
            #[allow(clippy::indexing_slicing, reason = "evaluated at compile time")]
            let digit = bytes[i];
            value = value * 10 + (digit - b'0') as u32;
            i += 1;
        }
        value
    }
    const VERSION: u32 = number(env!("CARGO_PKG_VERSION_MAJOR")) << 24
        | number(env!("CARGO_PKG_VERSION_MINOR")) << 12
        | number(env!("CARGO_PKG_VERSION_PATCH"));
    VERSION
}

/// How the library was built, one line for bug reports: version, target, profile, compiler, backends with their instruction sets,
/// features. ASCII, no paths.
///
/// Owner: the library; the text is never freed.
/// Threads: any. Capture: host only.
///
/// cbindgen:prefix=REPLAYSSM_API
#[unsafe(no_mangle)]
pub extern "C" fn replayssm_build_info() -> *const c_char {
    const TEXT: &str = concat!(
        "replayssm ",
        env!("CARGO_PKG_VERSION"),
        ", ",
        env!("REPLAYSSM_TARGET"),
        ", ",
        env!("REPLAYSSM_PROFILE"),
        ", ",
        env!("REPLAYSSM_COMPILER"),
        ", backends: CPU (",
        env!("REPLAYSSM_INSTRUCTION_SETS"),
        "); CUDA (",
        env!("REPLAYSSM_CUDA_SUMMARY"),
        "), features: ",
        env!("REPLAYSSM_FEATURES"),
        "\0"
    );
    TEXT.as_ptr().cast()
}

/// Creates a context: one backend on one device, with threads and log as desc says.
///
/// REPLAYSSM_BACKEND_AUTO is the calling thread's current CUDA context if it has one whose device there are kernels for, and n_threads is 0;
/// else the CPU.
///
/// NULL: desc, which means all defaults; not out.
/// Owner: the caller, of *out (NULL on failure), until replayssm_context_destroy.
/// Errors: INVALID_ARGUMENT, UNSUPPORTED, NO_CUDA (a CUDA backend was asked for and cannot be had), NO_CODE_FOR_ARCH, CUDA,
/// OUT_OF_MEMORY (threads).
/// Threads: any. Capture: never.
///
/// # Safety
/// desc is NULL or a descriptor; out is valid for a write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn replayssm_context_create(
    desc: *const replayssm_context_desc,
    out: *mut *mut replayssm_context,
) -> replayssm_status {
    guard(|| {
        let out = Out::new(out)?;
        // SAFETY: by the caller's promise.
        let desc = unsafe { optional(desc) }?;
        out.give(Arc::new(create_context(&desc)?), Context::log_created)
    })
}

/// With the feature `fault-injection`, flags of a context: its commits panic, and its work items do.
const PANIC_ON_COMMIT: u32 = 1 << 31;
const PANIC_IN_ITEMS: u32 = 1 << 30;

fn create_context(desc: &replayssm_context_desc) -> Result<Context> {
    let faults = if cfg!(feature = "fault-injection") { PANIC_ON_COMMIT | PANIC_IN_ITEMS } else { 0 };
    convert::zero("context_desc.flags", desc.flags & !faults)?;
    convert::zero("context_desc.reserved", desc.reserved)?;
    let cuda = || {
        if desc.n_threads != 0 {
            return Err(Error::invalid("context_desc.n_threads", desc.n_threads, "0 on the CUDA backend"));
        }
        Cuda::new(desc.device).map_err(|error| match error {
            Error::NoCuda(reason) => Error::NoCuda(format!("context_desc.backend is CUDA, and {reason}")),
            other => other,
        })
    };
    let cpu = || {
        if desc.device != 0 {
            return Err(Error::invalid("context_desc.device", desc.device, "0 on the CPU backend"));
        }
        let mut backend = Cpu::new(desc.n_threads)?;
        backend.panic_in_items = desc.flags & PANIC_IN_ITEMS != 0;
        Ok(backend)
    };
    if desc.backend == REPLAYSSM_BACKEND_AUTO && desc.device != 0 {
        return Err(Error::invalid("context_desc.device", desc.device, "0 with REPLAYSSM_BACKEND_AUTO"));
    }
    let backend: Box<dyn Backend> = match desc.backend {
        // Whoever works with CUDA has a context, and device memory; nobody else has.
        REPLAYSSM_BACKEND_AUTO if desc.n_threads == 0 && Cuda::is_current() => Box::new(Cuda::new(-1)?),
        REPLAYSSM_BACKEND_AUTO => Box::new(cpu()?),
        REPLAYSSM_BACKEND_CPU => Box::new(cpu()?),
        REPLAYSSM_BACKEND_CUDA => Box::new(cuda()?),
        other => {
            return Err(Error::unsupported("context_desc.backend", other, "REPLAYSSM_BACKEND_AUTO, _CPU and _CUDA"));
        }
    };
    Ok(Context { backend, panic_on_commit: desc.flags & PANIC_ON_COMMIT != 0, log: convert::log(desc)? })
}

/// Destroys a context once the last slots handle on it is gone; its threads end then. A call that is inside finishes as usual.
///
/// NULL: context may be NULL, stale or no handle; nothing happens then.
/// Owner: context is no handle any more when this returns.
/// Threads: any. Capture: never.
///
/// cbindgen:prefix=REPLAYSSM_API
#[unsafe(no_mangle)]
pub extern "C" fn replayssm_context_destroy(context: *mut replayssm_context) {
    let _ = guard(|| {
        if let Some(context) = remove::<Context, _>(context) {
            context.log_destroyed();
        }
        Ok(())
    });
}

/// What a context is: backend, device, threads, name.
///
/// NULL: neither context nor out; out->struct_size is set.
/// Errors: INVALID_HANDLE, INVALID_ARGUMENT.
/// Threads: any. Capture: host only.
///
/// # Safety
/// out points to a descriptor.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn replayssm_context_query(
    context: *const replayssm_context,
    out: *mut replayssm_context_info,
) -> replayssm_status {
    guard(|| {
        let context = pin::<Context, _>(context, "context")?;
        let info = context.backend.info();
        let mut name = [0 as c_char; 64];
        for (to, from) in name.iter_mut().take(63).zip(info.name.bytes()) {
            *to = from as c_char;
        }
        let value = replayssm_context_info {
            struct_size: 0,
            backend: if info.device.is_some() { REPLAYSSM_BACKEND_CUDA } else { REPLAYSSM_BACKEND_CPU },
            device: info.device.unwrap_or(0),
            n_threads: info.n_threads,
            name,
        };
        // SAFETY: by the caller's promise.
        unsafe { write_descriptor(out, &value) }
    })
}

/// Creates a slots handle on a context: positions and schedule of all layers of a model on one device. All positions are 0.
///
/// NULL: none of context, desc and out.
/// Owner: the caller, of *out (NULL on failure), until replayssm_slots_destroy. The context stays alive as long as the slots handle.
/// Errors: INVALID_HANDLE, INVALID_ARGUMENT, UNSUPPORTED, OUT_OF_MEMORY, CUDA.
/// Threads: any. Capture: never.
///
/// # Safety
/// desc is a descriptor; out is valid for a write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn replayssm_slots_create(
    context: *const replayssm_context,
    desc: *const replayssm_slots_desc,
    out: *mut *mut replayssm_slots,
) -> replayssm_status {
    guard(|| {
        let out = Out::new(out)?;
        let context = pin::<Context, _>(context, "context")?;
        // SAFETY: by the caller's promise.
        let d = unsafe { descriptor(desc) }?;
        let config = convert::slots(&d)?;
        out.give(Slots::create(context.clone(), config)?, Slots::log_created)
    })
}

/// Destroys a slots handle once the last pool on it is gone. A call that is inside finishes as usual.
///
/// NULL: slots may be NULL, stale or no handle; nothing happens then.
/// Owner: slots is no handle any more when this returns.
/// Threads: any. Capture: never.
///
/// cbindgen:prefix=REPLAYSSM_API
#[unsafe(no_mangle)]
pub extern "C" fn replayssm_slots_destroy(slots: *mut replayssm_slots) {
    let _ = guard(|| {
        if let Some(slots) = remove::<Slots, _>(slots) {
            slots.log_destroyed();
        }
        Ok(())
    });
}

/// Creates a pool on slots: n_layers equal layers of one family, as desc says. Owned memory is zero: the empty state at position 0. A
/// pool that joins slots whose positions have moved must be reset first.
///
/// lent: host array [n_lent], 0 to 16, its elements each their struct_size apart; read before the call returns.
/// NULL: lent with n_lent 0; not slots, desc and out.
/// Owner: the caller, of *out (NULL on failure), until replayssm_layers_destroy; lent memory stays the caller's and must outlive the pool.
/// The slots handle stays alive as long as the pool.
/// Errors: INVALID_HANDLE, INVALID_ARGUMENT (also a field of another family that is not 0), UNSUPPORTED, OUT_OF_MEMORY,
/// CUDA.
/// Threads: any, but no other call may be inside slots. Capture: never.
///
/// # Safety
/// desc is a descriptor, lent an array as described; out is valid for a write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn replayssm_layers_create(
    slots: *mut replayssm_slots,
    desc: *const replayssm_pool_desc,
    lent: *const replayssm_lent,
    n_lent: i32,
    out: *mut *mut replayssm_layers,
) -> replayssm_status {
    guard(|| {
        let out = Out::new(out)?;
        let slots = pin::<Slots, _>(slots, "slots")?;
        // SAFETY: by the caller's promise.
        let config = unsafe { pool_config(desc) }?;
        // SAFETY: by the caller's promise.
        let lent = unsafe { lent_list(lent, n_lent, config.n_layers) }?;
        out.give(Layers::create(slots.clone(), config, &lent)?, Layers::log_created)
    })
}

/// # Safety
/// desc is NULL or a descriptor.
unsafe fn pool_config(desc: *const replayssm_pool_desc) -> Result<PoolConfig> {
    // SAFETY: by the caller's promise.
    let d = unsafe { descriptor(desc) }?;
    if !(0..=1 << 16).contains(&d.n_sections) {
        return Err(Error::invalid("pool_desc.n_sections", d.n_sections, "0 to 65536"));
    }
    // SAFETY: by the caller's promise.
    let sections = unsafe { array(d.section_channels, d.n_sections as usize, "pool_desc.section_channels") }?;
    PoolConfig::checked(&convert::pool(&d, sections)?)
}

/// # Safety
/// lent is NULL or an array of n descriptors, each its struct_size apart, for a pool of n_layers layers.
unsafe fn lent_list(lent: *const replayssm_lent, n: i32, n_layers: usize) -> Result<Vec<crate::replay::slots::Lent>> {
    if !(0..=16).contains(&n) {
        return Err(Error::invalid("n_lent", n, "0 to 16"));
    }
    let mut list = Vec::new();
    let mut at = lent;
    for _ in 0..n {
        // SAFETY: by the caller's promise.
        let one = unsafe { descriptor(at) }?;
        let bases = if one.layer_bases.is_null() {
            None
        } else {
            // SAFETY: by the caller's promise.
            let bases = unsafe { array(one.layer_bases, n_layers, "lent.layer_bases") }?;
            let addresses = bases.iter().map(|&base| Address(base as usize));
            Some(collected("the list of a pool's layers", bases.len(), addresses)?)
        };
        list.push(convert::lent(&one, bases)?);
        at = at.wrapping_byte_add(one.struct_size as usize);
    }
    Ok(list)
}

/// Takes the lent components of a pool from where they are now: the engine has moved or reallocated them. Contents are the caller's
/// business. All or none.
///
/// lent: host array [n_lent], as in replayssm_layers_create: exactly the kinds that were lent there, each checked as there; what the library
/// owns stays. Graphs that were captured before must not be launched any more.
/// NULL: not layers; lent with n_lent 0.
/// Errors: INVALID_HANDLE, INVALID_ARGUMENT, UNSUPPORTED, OUT_OF_MEMORY, CUDA; the pool is as before.
/// Threads: any, but no other call may be inside a call on layers or on its slots handle, and none enqueued or running. Capture: never.
///
/// # Safety
/// lent is an array as described.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn replayssm_layers_rebind(
    layers: *mut replayssm_layers,
    lent: *const replayssm_lent,
    n_lent: i32,
) -> replayssm_status {
    guard(|| {
        let layers = pin::<Layers, _>(layers, "layers")?;
        // SAFETY: by the caller's promise.
        layers.rebind(&unsafe { lent_list(lent, n_lent, layers.n_layers()) }?)
    })
}

/// Destroys a pool and the memory that it owns. No call on it may be enqueued or running. CUDA: where it owns memory, it waits for the
/// work of its context.
///
/// NULL: layers may be NULL, stale or no handle; nothing happens then.
/// Owner: layers is no handle any more when this returns; lent memory is the caller's alone.
/// Threads: any. Capture: never.
///
/// cbindgen:prefix=REPLAYSSM_API
#[unsafe(no_mangle)]
pub extern "C" fn replayssm_layers_destroy(layers: *mut replayssm_layers) {
    let _ = guard(|| {
        if let Some(layers) = remove::<Layers, _>(layers) {
            layers.log_destroyed();
        }
        Ok(())
    });
}

/// Size and place of every component of a pool. out: array [capacity], its elements out[0].struct_size bytes apart. *n becomes the number
/// of components, also when BUFFER_TOO_SMALL is returned.
///
/// NULL: out with capacity 0; not layers and n.
/// Errors: INVALID_HANDLE, INVALID_ARGUMENT, BUFFER_TOO_SMALL.
/// Threads: any. Capture: host only.
///
/// # Safety
/// out is an array as described; n is valid for a write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn replayssm_layers_components(
    layers: *const replayssm_layers,
    out: *mut replayssm_component,
    capacity: i32,
    n: *mut i32,
) -> replayssm_status {
    guard(|| {
        let layers = pin::<Layers, _>(layers, "layers")?;
        let list: Vec<_> = layers.components().map(|(layout, view)| convert::component(layout, view)).collect();
        // SAFETY: by the caller's promise.
        unsafe { write_list(&list, out, capacity, n) }
    })
}

/// Writes an array of out-descriptors and how many there are.
///
/// # Safety
/// out is an array of capacity descriptors, the first one's size apart; n is valid for a write.
unsafe fn write_list<T: Descriptor>(list: &[T], out: *mut T, capacity: i32, n: *mut i32) -> Result<()> {
    required(n.cast_const().cast(), "n", align_of::<i32>())?;
    if i64::from(capacity) < list.len() as i64 {
        // SAFETY: by the caller's promise.
        unsafe { write_out(n, list.len() as i32) };
        let (value, needed) = (capacity.max(0) as u64, list.len() as u64);
        return Err(Error::BufferTooSmall { field: "capacity".into(), value, needed });
    }
    // SAFETY: by the caller's promise.
    unsafe { check_out(out.cast_const()) }?;
    // SAFETY: by the caller's promise.
    unsafe { write_out(n, list.len() as i32) };
    // SAFETY: checked to be a descriptor, which starts with its size.
    let stride = unsafe { out.cast::<u32>().read() } as usize;
    for (i, value) in list.iter().enumerate() {
        let to = out.wrapping_byte_add(i * stride);
        // SAFETY: an element of the caller's array, whose elements all have the size of the first.
        unsafe { to.cast::<u32>().write(stride as u32) };
        // SAFETY: as above.
        unsafe { write_descriptor(to, value) }?;
    }
    Ok(())
}

/// What a model takes before any of it exists: bytes per slot and ring, the total, how many requests fit a budget, beside that what one
/// state per draft token would take; bytes per step; the window that moves the fewest. Needs no context: sizes are the same on every backend.
///
/// slots_desc, pools: what would be created; pools is a host array [n_pools], 0 to 4096, its elements pools[0].struct_size apart, all on one
/// slots handle. args: batch, tokens, budget. out: the answer.
/// NULL: args, which means all defaults; pools with n_pools 0; not slots_desc and out.
/// Errors: INVALID_ARGUMENT, UNSUPPORTED, as creating would give them.
/// Threads: any. Capture: never.
///
/// # Safety
/// Descriptors and the array are as described.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn replayssm_plan(
    slots_desc: *const replayssm_slots_desc,
    pools: *const replayssm_pool_desc,
    n_pools: i32,
    args: *const replayssm_plan_args,
    out: *mut replayssm_plan_info,
) -> replayssm_status {
    guard(|| {
        // SAFETY: by the caller's promise.
        let slots = convert::slots(&unsafe { descriptor(slots_desc) }?)?;
        // SAFETY: by the caller's promise.
        let pools = unsafe { pool_list(pools, n_pools) }?;
        // SAFETY: by the caller's promise.
        let question = convert::question(&unsafe { optional(args) }?, &slots)?;
        let plan = ModelPlan::new(&slots, &pools, question)?;
        // SAFETY: by the caller's promise.
        unsafe { write_descriptor(out, &convert::plan(&plan)) }
    })
}

/// # Safety
/// pools is NULL or an array of n descriptors, the first one's size apart.
unsafe fn pool_list(pools: *const replayssm_pool_desc, n: i32) -> Result<Vec<PoolConfig>> {
    if !(0..=4096).contains(&n) {
        return Err(Error::invalid("n_pools", n, "0 to 4096"));
    }
    if n == 0 {
        return Ok(Vec::new());
    }
    // SAFETY: by the caller's promise.
    let stride = unsafe { descriptor(pools) }?.struct_size as usize;
    let list = (0..n as usize).map(|i| {
        // SAFETY: by the caller's promise.
        unsafe { pool_config(pools.wrapping_byte_add(i * stride)) }
    });
    try_collected("the list of pools", n as usize, list)
}

/// The components that a pool would have, as replayssm_layers_components says them of one that exists: base and layer_bases NULL, strides as
/// owned memory will have them. Needs no context.
///
/// slots_desc, pool_desc: what would be created. out: array [capacity], its elements out[0].struct_size bytes apart. *n becomes the number of
/// components, also when BUFFER_TOO_SMALL is returned.
/// NULL: out with capacity 0; not slots_desc, pool_desc and n.
/// Errors: INVALID_ARGUMENT, UNSUPPORTED, BUFFER_TOO_SMALL.
/// Threads: any. Capture: host only.
///
/// # Safety
/// slots_desc and pool_desc are descriptors, out an array as described; n is valid for a write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn replayssm_plan_components(
    slots_desc: *const replayssm_slots_desc,
    pool_desc: *const replayssm_pool_desc,
    out: *mut replayssm_component,
    capacity: i32,
    n: *mut i32,
) -> replayssm_status {
    guard(|| {
        // SAFETY: by the caller's promise.
        let slots = convert::slots(&unsafe { descriptor(slots_desc) }?)?;
        // SAFETY: by the caller's promise.
        let pool = unsafe { pool_config(pool_desc) }?;
        let layouts = components(&slots, &pool)?;
        layouts.iter().try_for_each(|layout| layout.total(&slots, &pool).map(drop))?;
        let list: Vec<_> = layouts.iter().map(|c| convert::planned_component(c, &slots)).collect();
        // SAFETY: by the caller's promise.
        unsafe { write_list(&list, out, capacity, n) }
    })
}

/// Whether a pool as desc says can be had on context and take steps of max_tokens tokens (0 = 1): OK, or the status and the sentence with
/// which creating it, or slots for such steps, fails. Creates nothing. Whether there is memory enough, only creating tells.
///
/// NULL: neither context nor desc.
/// Errors: INVALID_HANDLE, INVALID_ARGUMENT, UNSUPPORTED.
/// Threads: any. Capture: never.
///
/// # Safety
/// desc is a descriptor.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn replayssm_supports(
    context: *const replayssm_context,
    desc: *const replayssm_pool_desc,
    max_tokens: i32,
) -> replayssm_status {
    guard(|| {
        let context = pin::<Context, _>(context, "context")?;
        // SAFETY: by the caller's promise.
        let pool = unsafe { pool_config(desc) }?;
        supports(&pool, max_tokens)?;
        context.backend.supports(&pool)
    })
}

/// Says in plain sentences what a step of batch rows of tokens tokens does on a pool: the kernel and why, when it folds, bytes per row and
/// step on average over a flush cycle beside those of the plain update, work items and threads, memory. For people: the words may change.
/// It takes all tokens as accepted, the rows as dense, and the work as done by the library's threads (no exec.n_parts).
///
/// text: host memory of capacity bytes. It gets one line per sentence, ASCII, always with a final zero if capacity is not 0; what does not
/// fit is cut off, and the status is BUFFER_TOO_SMALL, whose sentence says how much is needed. 4096 bytes always suffice.
/// NULL: text with capacity 0; not layers.
/// Errors: INVALID_HANDLE, INVALID_ARGUMENT (batch below 1, tokens not in 1 .. max_step_tokens), BUFFER_TOO_SMALL.
/// Threads: any. Capture: never.
///
/// # Safety
/// text is NULL or valid for writes of capacity bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn replayssm_explain(
    layers: *const replayssm_layers,
    batch: i32,
    tokens: i32,
    text: *mut c_char,
    capacity: usize,
) -> replayssm_status {
    guard(|| {
        let layers = pin::<Layers, _>(layers, "layers")?;
        if capacity > 0 {
            required(text.cast_const().cast(), "text", 1)?;
        }
        let whole = layers.explain(batch.into(), tokens.into())?;
        // SAFETY: by the caller's promise.
        unsafe { write_text(text, capacity, &whole) }
    })
}

macro_rules! layer_call {
    ($layers:ident, $batch:ident, $args:ident, $exec:ident, $convert:path, |$pool:ident, $b:ident, $a:ident, $e:ident| $call:expr) => {
        guard(|| {
            let $pool = pin::<Layers, _>($layers, "layers")?;
            // SAFETY: by the caller's promise.
            let $b = convert::batch(&unsafe { descriptor($batch) }?)?;
            // SAFETY: by the caller's promise.
            let $a = $convert(&unsafe { descriptor($args) }?, &$b)?;
            // SAFETY: by the caller's promise.
            let $e = unsafe { execution($exec) }?;
            $call
        })
    };
}

/// # Safety
/// exec is NULL or a descriptor.
unsafe fn execution(exec: *const replayssm_exec) -> Result<Exec> {
    // SAFETY: by the caller's promise.
    convert::exec(&unsafe { optional(exec) }?)
}

/// One Mamba-2 layer of a model step: appends the batch's tokens behind the committed ones and writes their outputs; folds history into
/// the checkpoint when due. It may be run again or abandoned before the commit: nothing has moved.
///
/// layer: 0 to n_layers - 1 of the pool that layers stands for. batch and args: shapes, dtypes and strides as their fields say. A row's
/// tokens see the committed tokens and the row's earlier ones. Faults on the device (see replayssm_check) leave a row's slot untouched
/// and its outputs zero.
/// NULL: exec; not layers, batch and args; tensors of args where their fields allow it, and all of them if there is no row or no token.
/// Errors: INVALID_HANDLE (also a pool of another family), INVALID_ARGUMENT, UNSUPPORTED, WRONG_STREAM; nothing was done then.
/// CUDA: what the call had enqueued before stays.
/// Threads: any, at the same time on disjoint slots. Capture: enqueues; on the CPU backend all is done on return.
///
/// # Safety
/// Descriptors and what they point to are valid as their fields say.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn replayssm_mamba2_step(
    layers: *const replayssm_layers,
    layer: i32,
    batch: *const replayssm_batch,
    args: *const replayssm_mamba2_args,
    exec: *const replayssm_exec,
) -> replayssm_status {
    layer_call!(layers, batch, args, exec, convert::mamba2, |pool, b, a, e| pool.mamba2(
        layer.into(),
        Mode::Step,
        b,
        &a,
        &e
    ))
}

/// Rows of any length without rollback: folds history and then the row's tokens one by one into the checkpoint, by the plain update's
/// arithmetic, and writes every token's output. For prompts, and for comparison: this is the plain update.
///
/// The batch has REPLAYSSM_BATCH_EXTEND, here and in its commit. Between the two, a step, another extend or an export on these slots
/// does nothing but set FAULT_POSITION, and a rewind fails; an extend that is not committed needs a reset or import. (Where
/// keep_tail covers all of a row, its tokens have only been recorded, and it may be abandoned like a step if they are max_step_tokens at
/// most: a convolution holds no more.)
/// layers, layer, batch, args, exec: otherwise as in replayssm_mamba2_step.
/// NULL: as replayssm_mamba2_step.
/// Errors: as replayssm_mamba2_step.
/// Threads: as replayssm_mamba2_step. Capture: enqueues; on the CPU backend all is done on return.
///
/// # Safety
/// As replayssm_mamba2_step.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn replayssm_mamba2_extend(
    layers: *const replayssm_layers,
    layer: i32,
    batch: *const replayssm_batch,
    args: *const replayssm_mamba2_args,
    exec: *const replayssm_exec,
) -> replayssm_status {
    layer_call!(layers, batch, args, exec, convert::mamba2, |pool, b, a, e| pool.mamba2(
        layer.into(),
        Mode::Extend,
        b,
        &a,
        &e
    ))
}

/// One Gated DeltaNet or Kimi Delta Attention layer of a model step.
///
/// layers, layer, batch, args, exec: as in replayssm_mamba2_step, of a pool of GDN or KDA.
/// NULL: as replayssm_mamba2_step.
/// Errors: as replayssm_mamba2_step.
/// Threads: as replayssm_mamba2_step. Capture: enqueues; on the CPU backend all is done on return.
///
/// # Safety
/// As replayssm_mamba2_step.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn replayssm_delta_step(
    layers: *const replayssm_layers,
    layer: i32,
    batch: *const replayssm_batch,
    args: *const replayssm_delta_args,
    exec: *const replayssm_exec,
) -> replayssm_status {
    layer_call!(layers, batch, args, exec, convert::delta, |pool, b, a, e| pool.delta(
        layer.into(),
        Mode::Step,
        b,
        &a,
        &e
    ))
}

/// Gated DeltaNet or Kimi Delta Attention over rows of any length without rollback.
///
/// layers, layer, batch, args, exec: as in replayssm_mamba2_extend, of a pool of GDN or KDA.
/// NULL: as replayssm_mamba2_step.
/// Errors: as replayssm_mamba2_step.
/// Threads: as replayssm_mamba2_step. Capture: enqueues; on the CPU backend all is done on return.
///
/// # Safety
/// As replayssm_mamba2_step.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn replayssm_delta_extend(
    layers: *const replayssm_layers,
    layer: i32,
    batch: *const replayssm_batch,
    args: *const replayssm_delta_args,
    exec: *const replayssm_exec,
) -> replayssm_status {
    layer_call!(layers, batch, args, exec, convert::delta, |pool, b, a, e| pool.delta(
        layer.into(),
        Mode::Extend,
        b,
        &a,
        &e
    ))
}

/// One convolution of a model step. The window needs no fold.
///
/// layers, layer, batch, args, exec: as in replayssm_mamba2_step, of a pool of convolutions.
/// NULL: as replayssm_mamba2_step.
/// Errors: as replayssm_mamba2_step.
/// Threads: as replayssm_mamba2_step. Capture: enqueues; on the CPU backend all is done on return.
///
/// # Safety
/// As replayssm_mamba2_step.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn replayssm_conv1d_step(
    layers: *const replayssm_layers,
    layer: i32,
    batch: *const replayssm_batch,
    args: *const replayssm_conv1d_args,
    exec: *const replayssm_exec,
) -> replayssm_status {
    layer_call!(layers, batch, args, exec, convert::conv1d, |pool, b, a, e| pool.conv1d(
        layer.into(),
        Mode::Step,
        b,
        &a,
        &e
    ))
}

/// A convolution over rows of any length without rollback. Of keep_tail, at most min_rewind + max_step_tokens tokens can be taken back,
/// since the ring holds no more windows.
///
/// layers, layer, batch, args, exec: as in replayssm_mamba2_extend, of a pool of convolutions.
/// NULL: as replayssm_mamba2_step.
/// Errors: as replayssm_mamba2_step.
/// Threads: as replayssm_mamba2_step. Capture: enqueues; on the CPU backend all is done on return.
///
/// # Safety
/// As replayssm_mamba2_step.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn replayssm_conv1d_extend(
    layers: *const replayssm_layers,
    layer: i32,
    batch: *const replayssm_batch,
    args: *const replayssm_conv1d_args,
    exec: *const replayssm_exec,
) -> replayssm_status {
    layer_call!(layers, batch, args, exec, convert::conv1d, |pool, b, a, e| pool.conv1d(
        layer.into(),
        Mode::Extend,
        b,
        &a,
        &e
    ))
}

/// Ends a model step: position += accepted, for every row of the batch. Once, after the last layer: a second commit, or one without steps,
/// would commit records that nothing wrote. Rolling back is accepting fewer. A row of another generation is skipped.
///
/// args: counts [n_rows] of the batch, clamped to 0 .. tokens of the row; one outside sets FAULT_COUNT. An extend takes all tokens.
/// NULL: args, which means all tokens of each row, and exec; not slots and batch.
/// Errors: INVALID_HANDLE, INVALID_ARGUMENT, UNSUPPORTED, WRONG_STREAM; nothing was done then.
/// CUDA: what the call had enqueued before stays.
/// Threads: any, at the same time on disjoint rings. Capture: enqueues; on the CPU backend all is done on return.
///
/// # Safety
/// As replayssm_mamba2_step.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn replayssm_commit(
    slots: *const replayssm_slots,
    batch: *const replayssm_batch,
    args: *const replayssm_commit_args,
    exec: *const replayssm_exec,
) -> replayssm_status {
    guard(|| {
        let slots = pin::<Slots, _>(slots, "slots")?;
        // SAFETY: by the caller's promise.
        let batch = convert::batch(&unsafe { descriptor(batch) }?)?;
        // SAFETY: by the caller's promise.
        let args = convert::commit(&unsafe { optional(args) }?, &batch)?;
        // SAFETY: by the caller's promise.
        slots.commit(batch, &args, &unsafe { execution(exec) }?)
    })
}

/// Starts requests: position, generation and seed of the listed rings are set, their history becomes empty, and the listed slots of all
/// pools on slots become zero (or stay, with keep_checkpoint). Convolution windows become zero too, or are to be imported.
///
/// list: 0 or more entries; args: arrays with an element per entry, where the list lies.
/// NULL: args, which means all defaults, and exec; not slots and list.
/// Errors: INVALID_HANDLE, INVALID_ARGUMENT (with host lists also an id or position out of range), UNSUPPORTED, WRONG_STREAM; nothing was
/// done then.
/// CUDA: what the call had enqueued before stays: reset (or import) those entries again.
/// Threads: any, at the same time on disjoint slots; it waits for a pool that is being created or destroyed. Capture: enqueues, with
/// REPLAYSSM_WHERE_DEVICE; on the CPU backend all is done on return.
///
/// # Safety
/// As replayssm_mamba2_step.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn replayssm_reset(
    slots: *const replayssm_slots,
    list: *const replayssm_list,
    args: *const replayssm_reset_args,
    exec: *const replayssm_exec,
) -> replayssm_status {
    guard(|| {
        let slots = pin::<Slots, _>(slots, "slots")?;
        // SAFETY: by the caller's promise.
        let list = unsafe { descriptor(list) }?;
        // SAFETY: by the caller's promise.
        let list = unsafe { convert::lists(&list, &slots) }?;
        // SAFETY: by the caller's promise.
        let args = convert::reset(&unsafe { optional(args) }?)?;
        // SAFETY: by the caller's promise.
        slots.reset(&list, &args, &unsafe { execution(exec) }?)
    })
}

/// Writes a pool's checkpoints (a convolution: windows) from a dense state and empties their history. Values are converted to fp32, NaNs
/// become canonical. Reset first, import after.
///
/// position: int64 [n] tokens already in the state, where the list lies; the rings move there, so every pool on them must be imported or
/// reset to that position. src: a row per entry of list.
/// NULL: position, which means the rings' own positions, which stay, and exec; not layers, list and src.
/// Errors: as replayssm_reset.
/// Threads: any, at the same time on disjoint slots. Capture: enqueues, with REPLAYSSM_WHERE_DEVICE; on the CPU backend all is done on return.
///
/// # Safety
/// As replayssm_mamba2_step.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn replayssm_import(
    layers: *const replayssm_layers,
    list: *const replayssm_list,
    position: *const i64,
    src: *const replayssm_state,
    exec: *const replayssm_exec,
) -> replayssm_status {
    guard(|| {
        let layers = pin::<Layers, _>(layers, "layers")?;
        // SAFETY: by the caller's promise.
        let list = convert::list(&unsafe { descriptor(list) }?)?;
        let position = optional_pointer(position.cast(), "position", 8)?.map(Address);
        // SAFETY: by the caller's promise.
        let src = convert::state(&unsafe { descriptor(src) }?, list.n)?;
        // SAFETY: by the caller's promise.
        layers.import(&list, position, src, &unsafe { execution(exec) }?)
    })
}

/// Writes the exact state at a held position (a convolution: its window) into a dense buffer. The slot does not change.
///
/// at: int64 [n] positions, where the list lies. A position is held from the checkpoint's to the committed one; another sets
/// FAULT_POSITION, and that entry's part of the buffer is left alone. dst: a row per entry of list.
/// NULL: at, which means all committed tokens, and exec; not layers, list and dst.
/// Errors: as replayssm_reset.
/// Threads: any, at the same time on disjoint slots. Capture: enqueues, with REPLAYSSM_WHERE_DEVICE; on the CPU backend all is done on return.
///
/// # Safety
/// As replayssm_mamba2_step.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn replayssm_export(
    layers: *const replayssm_layers,
    list: *const replayssm_list,
    at: *const i64,
    dst: *const replayssm_state,
    exec: *const replayssm_exec,
) -> replayssm_status {
    guard(|| {
        let layers = pin::<Layers, _>(layers, "layers")?;
        // SAFETY: by the caller's promise.
        let list = convert::list(&unsafe { descriptor(list) }?)?;
        let at = optional_pointer(at.cast(), "at", 8)?.map(Address);
        // SAFETY: by the caller's promise.
        let dst = convert::state(&unsafe { descriptor(dst) }?, list.n)?;
        // SAFETY: by the caller's promise.
        layers.export(&list, at, dst, &unsafe { execution(exec) }?)
    })
}

/// Takes back n[i] committed tokens, down to the newest checkpoint of all pools. Up to min_rewind tokens that were committed by steps
/// since the last reset, import, extend, LOAD, portable restore or rewind can always be taken back, and, before the next step, those of the
/// last one; but none that a flush with a position has folded.
///
/// n, done: int32 [n of list], where the list lies. done[i] becomes 1, or 0 for a skipped entry and for one that cannot be rewound, which
/// sets FAULT_REWIND and is left alone.
/// NULL: exec, and done (with a host list on the CPU backend, a rewind too deep is then OUT_OF_RANGE and nothing is rewound); not slots,
/// list and n. CUDA: done lies in memory that the device writes also with a host list.
/// Errors: as replayssm_reset; CPU: OUT_OF_RANGE; CUDA: UNSUPPORTED above 40 pools.
/// Threads: any, at the same time on disjoint rings; it waits for a pool that is being created or destroyed. Capture: enqueues, with
/// REPLAYSSM_WHERE_DEVICE; on the CPU backend all is done on return.
///
/// # Safety
/// As replayssm_mamba2_step.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn replayssm_rewind(
    slots: *const replayssm_slots,
    list: *const replayssm_list,
    n: *const i32,
    done: *mut i32,
    exec: *const replayssm_exec,
) -> replayssm_status {
    guard(|| {
        let slots = pin::<Slots, _>(slots, "slots")?;
        // SAFETY: by the caller's promise.
        let list = unsafe { descriptor(list) }?;
        // SAFETY: by the caller's promise.
        let list = unsafe { convert::lists(&list, &slots) }?;
        let n = required_for(n.cast(), "n", 4, list.list.n)?;
        let done = optional_pointer(done.cast_const().cast(), "done", 4)?.map(Address);
        // SAFETY: by the caller's promise.
        slots.rewind(&list, n, done, &unsafe { execution(exec) }?)
    })
}

/// Folds history into the checkpoints of the listed slots, outside of a step: all layers of all pools, by the step's own arithmetic, so that
/// later steps go on as if one of them had folded. Or tells later steps to fold. Convolutions have nothing to fold and are not looked at.
///
/// list: 0 or more entries; args: arrays with an element per entry, where the list lies. A position beyond the committed one, or a
/// checkpoint that cannot be trusted, as after an uncommitted extend, sets FAULT_POSITION, and nothing is written there.
/// NULL: args, which means all defaults, and exec; not slots and list.
/// Errors: as replayssm_reset.
/// Threads: any, at the same time on disjoint slots; it waits for a pool that is being created or destroyed. Capture: enqueues, with
/// REPLAYSSM_WHERE_DEVICE; on the CPU backend all is done on return.
///
/// # Safety
/// As replayssm_mamba2_step.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn replayssm_flush(
    slots: *const replayssm_slots,
    list: *const replayssm_list,
    args: *const replayssm_flush_args,
    exec: *const replayssm_exec,
) -> replayssm_status {
    guard(|| {
        let slots = pin::<Slots, _>(slots, "slots")?;
        // SAFETY: by the caller's promise.
        let list = unsafe { descriptor(list) }?;
        // SAFETY: by the caller's promise.
        let list = unsafe { convert::lists(&list, &slots) }?;
        // SAFETY: by the caller's promise.
        let args = convert::flush(&unsafe { optional(args) }?)?;
        // SAFETY: by the caller's promise.
        slots.flush(&list, &args, &unsafe { execution(exec) }?)
    })
}

/// Behind the commit of a batch: rows whose last commit reached the position at[row], so that position - committed < at[row] <= position,
/// leave the exact state at that position in slot dst[row], a checkpoint without a ring, in the pools' own formats (a convolution: its
/// window). The rows' own slots and rings do not change. What a prefix cache needs at every so many tokens, whatever steps accept.
///
/// batch: the one that was committed; rows of another generation leave nothing. args: at and dst have an element per row. A dst at or
/// above the number of slots sets FAULT_ID, a negative one is none. A position that is not held any more, inside an extend that folded beyond it, sets FAULT_POSITION in each layer
/// and part of a layer for itself; others are stored, and dst is undefined until a reset or another store (REPLAYSSM_SAVE_STORED and LOAD
/// refuse a slot that does not stand at one position). No two rows may have one dst, and no dst may be a slot of the batch.
/// NULL: exec; not slots, batch and args.
/// Errors: as replayssm_commit.
/// Threads: any, at the same time on disjoint slots; it waits for a pool that is being created or destroyed. Capture: enqueues; on the CPU
/// backend all is done on return.
///
/// # Safety
/// As replayssm_mamba2_step.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn replayssm_snapshot(
    slots: *const replayssm_slots,
    batch: *const replayssm_batch,
    args: *const replayssm_snapshot_args,
    exec: *const replayssm_exec,
) -> replayssm_status {
    guard(|| {
        let slots = pin::<Slots, _>(slots, "slots")?;
        // SAFETY: by the caller's promise.
        let batch = convert::batch(&unsafe { descriptor(batch) }?)?;
        // SAFETY: by the caller's promise.
        let args = unsafe { descriptor(args) }?;
        // SAFETY: by the caller's promise.
        let args = unsafe { convert::snapshot(&args, &batch, &slots) }?;
        // SAFETY: by the caller's promise.
        slots.snapshot(batch, &args, &unsafe { execution(exec) }?)
    })
}

/// Copies slots, with or without their rings, in all layers of all pools: entry i of src to entry i of dst. args.kind says what the target
/// becomes; see REPLAYSSM_COPY_*. A live slot may be copied at any moment, also between a step and its commit.
///
/// src, dst: lists of one length at one place. A ring id is ignored, and its array may be absent, where the kind has no ring: dst of STORE,
/// src of LOAD, both of STORED. A target is named once, and nothing is source and target in one call; host lists are checked for both.
/// The target's ring gets a generation of its own, an empty last commit and, staggered, a first fold of its own.
/// Device: a source that cannot be trusted (an uncommitted extend), a position that is not held, and a stored checkpoint that does not stand
/// at the position of a LOAD set FAULT_POSITION, each layer and part of a layer for itself. The target then refuses steps until a reset. That
/// of a STORE has parts that were stored and parts that were not: it is undefined until a reset or another store, as with replayssm_snapshot.
/// SWAP and STORED look at no positions: two slots keep what they have in the other's place, and a stored one is copied as it is.
/// NULL: args, which means a fork, and exec; not slots, src and dst.
/// Errors: as replayssm_reset.
/// Threads: any, at the same time on disjoint slots; it waits for a pool that is being created or destroyed. Capture: enqueues, with
/// REPLAYSSM_WHERE_DEVICE; on the CPU backend all is done on return.
///
/// # Safety
/// As replayssm_mamba2_step.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn replayssm_copy(
    slots: *const replayssm_slots,
    src: *const replayssm_list,
    dst: *const replayssm_list,
    args: *const replayssm_copy_args,
    exec: *const replayssm_exec,
) -> replayssm_status {
    guard(|| {
        let slots = pin::<Slots, _>(slots, "slots")?;
        // SAFETY: by the caller's promise.
        let args = convert::copy(&unsafe { optional(args) }?)?;
        // SAFETY: by the caller's promise.
        let (src, dst) = (unsafe { descriptor(src) }?, unsafe { descriptor(dst) }?);
        // SAFETY: by the caller's promise.
        let (from, to) = unsafe { convert::copy_lists(&src, &dst, args.kind, &slots) }?;
        // SAFETY: by the caller's promise.
        slots.copy(&from, &to, &args, &unsafe { execution(exec) }?)
    })
}

/// Copies the state of the listed rings into dst [n of list], in stream order and without synchronising; entries with negative ids become
/// zero. dst lies in the context's memory, or (CUDA) in pinned host memory.
///
/// NULL: exec, and dst if the list is empty; not slots and list.
/// Errors: as replayssm_reset.
/// Threads: any. Capture: enqueues, with REPLAYSSM_WHERE_DEVICE; on the CPU backend all is done on return.
///
/// # Safety
/// As replayssm_mamba2_step.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn replayssm_read_cursors(
    slots: *const replayssm_slots,
    list: *const replayssm_list,
    dst: *mut replayssm_cursor,
    exec: *const replayssm_exec,
) -> replayssm_status {
    guard(|| {
        let slots = pin::<Slots, _>(slots, "slots")?;
        // SAFETY: by the caller's promise.
        let list = convert::list(&unsafe { descriptor(list) }?)?;
        let dst = required_for(dst.cast_const().cast(), "dst", 8, list.n)?;
        // SAFETY: by the caller's promise.
        slots.read_cursors(&list, dst, &unsafe { execution(exec) }?)
    })
}

/// Bytes of a saved slot: the same for every slot and ring of slots and every call, until a pool is created or destroyed.
///
/// kind: REPLAYSSM_SAVE_*.
/// NULL: neither slots nor bytes.
/// Errors: INVALID_HANDLE, INVALID_ARGUMENT, UNSUPPORTED.
/// Threads: any; it waits for a pool that is being created or destroyed. Capture: host only.
///
/// # Safety
/// bytes is valid for a write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn replayssm_save_bytes(
    slots: *const replayssm_slots,
    kind: replayssm_save_kind,
    bytes: *mut u64,
) -> replayssm_status {
    guard(|| {
        let slots = pin::<Slots, _>(slots, "slots")?;
        required(bytes.cast_const().cast(), "bytes", align_of::<u64>())?;
        let needed = slots.save_bytes(convert::save_kind(kind)?)?;
        // SAFETY: by the caller's promise.
        unsafe { write_out(bytes, needed) };
        Ok(())
    })
}

/// Saves a slot with its ring, in all pools, to a blob in host memory, which another process or machine can restore. Right at any moment:
/// a step that is not committed is not in it, and is repeated after a restore. The slot does not change. Its format is docs/ABI.md's.
///
/// list: one entry, REPLAYSSM_WHERE_HOST; pools may have slots of their own; REPLAYSSM_SAVE_STORED has no ring. kind: REPLAYSSM_SAVE_*. blob: host memory of capacity bytes, of which replayssm_save_bytes are written;
/// on an error they are undefined. Blobs of equal slots are equal.
/// NULL: exec, and blob with capacity 0 (BUFFER_TOO_SMALL says what is needed); not slots and list.
/// Errors: INVALID_HANDLE, INVALID_ARGUMENT, UNSUPPORTED, WRONG_STREAM, BUFFER_TOO_SMALL, OUT_OF_RANGE (a checkpoint that stands beyond the
/// position, as in an extend that is not committed, or too far behind it; with STORED, parts that do not all stand at one position),
/// CAPTURING, OUT_OF_MEMORY, CUDA.
/// Threads: any, at the same time on disjoint slots; it waits for a pool that is being created or destroyed, and for the work on its stream,
/// meanwhile not holding up others. It allocates, for a portable blob the fp32 state of a layer in the context's memory. Capture: never.
///
/// # Safety
/// list is a descriptor, blob valid for writes of capacity bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn replayssm_save(
    slots: *const replayssm_slots,
    list: *const replayssm_list,
    kind: replayssm_save_kind,
    blob: *mut c_void,
    capacity: u64,
    exec: *const replayssm_exec,
) -> replayssm_status {
    guard(|| {
        let slots = pin::<Slots, _>(slots, "slots")?;
        let kind = convert::save_kind(kind)?;
        // SAFETY: by the caller's promise.
        let pair = unsafe { host_pair(list, &slots, kind) }?;
        // SAFETY: by the caller's promise.
        let exec = convert::whole(unsafe { execution(exec) }?)?;
        let room = |needed: u64| {
            if capacity < needed {
                return Err(Error::BufferTooSmall { field: "capacity".into(), value: capacity, needed });
            }
            // SAFETY: by the caller's promise.
            unsafe { bytes_mut(blob.cast(), needed as usize, "blob") }
        };
        slots.save(&pair, kind, room, &exec)
    })
}

/// Restores a slot with its ring, in all pools, from a blob. Everything about the blob is checked before the slot changes: it is whole and
/// unchanged, and it fits: a LIVE one the configuration of slots and its pools in the order of their creation, a STORED one shapes and formats
/// of those pools, a PORTABLE one the shapes of their layers, which are matched by family and shape, in the order of pools and layers.
///
/// A LIVE restore brings back position, first fold and seed; a PORTABLE one position and seed, as a reset and imports do; a STORED one
/// touches no ring, and args has no meaning then.
/// list: one entry, REPLAYSSM_WHERE_HOST: where to; need not be where it was. blob: host memory of bytes bytes. args: the ring's generation.
/// NULL: args, which means all defaults, and exec; not slots, list and blob.
/// Errors: INVALID_HANDLE, INVALID_ARGUMENT, UNSUPPORTED, WRONG_STREAM, BAD_BLOB, CAPTURING, OUT_OF_MEMORY; the slot is as it was. CUDA (the
/// driver refused something midway, also for want of memory): it may be restored in part: reset it.
/// Threads: as replayssm_save, which says what it waits for and allocates. Capture: never.
///
/// # Safety
/// list and args are descriptors, blob valid for reads of bytes bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn replayssm_restore(
    slots: *const replayssm_slots,
    list: *const replayssm_list,
    blob: *const c_void,
    bytes: u64,
    args: *const replayssm_restore_args,
    exec: *const replayssm_exec,
) -> replayssm_status {
    guard(|| {
        let slots = pin::<Slots, _>(slots, "slots")?;
        required(blob, "blob", 1)?;
        if bytes > isize::MAX as u64 {
            return Err(Error::bad_blob("bytes", bytes, "what fits an address space"));
        }
        // SAFETY: by the caller's promise.
        let blob = unsafe { array(blob.cast(), bytes as usize, "blob") }?;
        // SAFETY: by the caller's promise.
        let pair = unsafe { host_pair(list, &slots, kind_of(blob)) }?;
        // SAFETY: by the caller's promise.
        let args = unsafe { optional(args) }?;
        convert::zero("restore_args.reserved", args.reserved)?;
        // SAFETY: by the caller's promise.
        let generation = unsafe { one(args.generation, "restore_args.generation") }?;
        // SAFETY: by the caller's promise.
        let exec = convert::whole(unsafe { execution(exec) }?)?;
        slots.restore(&pair, blob, generation, &exec)
    })
}

/// The one slot and ring that a list names.
///
/// # Safety
/// list is a descriptor.
unsafe fn host_pair(list: *const replayssm_list, slots: &Slots, kind: Kind) -> Result<Pair> {
    // SAFETY: by the caller's promise.
    let list = unsafe { descriptor(list) }?;
    let id = |ids: &Ids| match ids.index {
        // SAFETY: not NULL and aligned, because the list has an entry; the caller's array is as long.
        IndexType::I32 => i64::from(unsafe { (ids.data.0 as *const i32).read() }),
        // SAFETY: as above.
        IndexType::I64 => unsafe { (ids.data.0 as *const i64).read() },
    };
    // SAFETY: by the caller's promise.
    unsafe { convert::pair(&list, slots, kind, id) }
}

/// A value that may be absent.
///
/// # Safety
/// from is NULL or valid for a read.
unsafe fn one<T: Copy>(from: *const T, field: &'static str) -> Result<Option<T>> {
    let at = optional_pointer(from.cast(), field, align_of::<T>())?;
    // SAFETY: not NULL, aligned, and valid by the caller's promise.
    Ok(at.map(|_| unsafe { from.read() }))
}

/// A pointer that may be NULL only if there is nothing to point to.
fn required_for(pointer: *const c_void, field: &'static str, alignment: usize, n: i64) -> Result<Address> {
    let at = if n == 0 {
        optional_pointer(pointer, field, alignment)?.unwrap_or(0)
    } else {
        required(pointer, field, alignment)?
    };
    Ok(Address(at))
}

/// Takes n free ids of slots (and rings of the same numbers) from the library's list, most recently released first, each with a new
/// generation: pass it to reset_args.generation and batch.generation, so that late commits of a former owner do nothing. All or none.
/// Optional: engines with ids of their own never call it.
///
/// ids: host int32 [n]; generations: host uint32 [n].
/// NULL: generations, and ids with n 0; not slots.
/// Errors: INVALID_HANDLE, INVALID_ARGUMENT, OUT_OF_RANGE if fewer are free.
/// Threads: one at a time per handle. Capture: host only.
///
/// # Safety
/// ids and generations are valid for writes of n elements.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn replayssm_acquire(
    slots: *mut replayssm_slots,
    n: i32,
    ids: *mut i32,
    generations: *mut u32,
) -> replayssm_status {
    guard(|| {
        let slots = pin::<Slots, _>(slots, "slots")?;
        let count = usize::try_from(n).map_err(|_| Error::invalid("n", n, "0 or more"))?;
        required_for(ids.cast_const().cast(), "ids", 4, n.into())?;
        optional_pointer(generations.cast_const().cast(), "generations", 4)?;
        slots.acquire(count, |i, id, generation| {
            // SAFETY: the caller's array has n elements.
            unsafe { write_out(ids.wrapping_add(i), id) };
            if !generations.is_null() {
                // SAFETY: the caller's array has n elements.
                unsafe { write_out(generations.wrapping_add(i), generation) };
            }
        })
    })
}

/// Gives ids of slots back. All or none.
///
/// ids: host int32 [n].
/// NULL: ids with n 0; not slots.
/// Errors: INVALID_HANDLE, INVALID_ARGUMENT, which names an id that is not acquired or named twice.
/// Threads: one at a time per handle. Capture: host only.
///
/// # Safety
/// ids is valid for reads of n elements.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn replayssm_release(slots: *mut replayssm_slots, n: i32, ids: *const i32) -> replayssm_status {
    guard(|| {
        let slots = pin::<Slots, _>(slots, "slots")?;
        let count = usize::try_from(n).map_err(|_| Error::invalid("n", n, "0 or more"))?;
        // SAFETY: by the caller's promise.
        slots.release(unsafe { array(ids, count, "ids") }?)
    })
}

/// What the device has found wrong on slots so far, without synchronising. clear: 0, or 1 to forget it. (CUDA:
/// a fault that comes at the very moment may be lost.)
///
/// NULL: neither slots nor out; out->struct_size is set.
/// Errors: INVALID_HANDLE, INVALID_ARGUMENT, UNSUPPORTED.
/// Threads: any. Capture: host only: it sees work that has run.
///
/// # Safety
/// out points to a descriptor.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn replayssm_check(
    slots: *const replayssm_slots,
    clear: i32,
    out: *mut replayssm_report,
) -> replayssm_status {
    guard(|| {
        let slots = pin::<Slots, _>(slots, "slots")?;
        // SAFETY: by the caller's promise.
        unsafe { check_out(out.cast_const()) }?;
        let clear = convert::switch("clear", clear)?;
        let report = convert::report(&slots.report(clear));
        // SAFETY: by the caller's promise.
        unsafe { write_descriptor(out, &report) }
    })
}

/// Counters of slots over all its pools. CUDA: it waits for a copy on a stream of the library's own, and for no other work.
///
/// NULL: neither slots nor out; out->struct_size is set.
/// Errors: INVALID_HANDLE, INVALID_ARGUMENT, CUDA.
/// Threads: any. Capture: host only: it sees work that has run.
///
/// # Safety
/// out points to a descriptor.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn replayssm_stats_read(
    slots: *const replayssm_slots,
    out: *mut replayssm_stats,
) -> replayssm_status {
    guard(|| {
        let slots = pin::<Slots, _>(slots, "slots")?;
        let stats = convert::stats(&slots.stats()?);
        // SAFETY: by the caller's promise.
        unsafe { write_descriptor(out, &stats) }
    })
}

/// A handle out-parameter: NULL until the call succeeds.
struct Out<H>(*mut *mut H);

impl<H> Out<H> {
    fn new(out: *mut *mut H) -> Result<Self> {
        required(out.cast_const().cast(), "out", align_of::<*mut H>())?;
        // SAFETY: valid for a write by the caller's promise.
        unsafe { write_out(out, std::ptr::null_mut()) };
        Ok(Out(out))
    }

    /// A new handle; the log hears of what there is, and not of what found no room for a handle.
    fn give<K: HandleKind>(&self, this: Arc<K>, log: impl FnOnce(&K)) -> Result<()> {
        let handle = insert(this.clone())?;
        log(&this);
        // SAFETY: valid for a write by the caller's promise.
        unsafe { write_out(self.0, handle) };
        Ok(())
    }
}
