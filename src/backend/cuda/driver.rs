//! The CUDA driver: the only file that names cudarc.
//!
//! cudarc loads libcuda when the first function is called and panics where it, or a function, is missing; so [`probe`] looks for both
//! before anything else here can run. Every call runs in the context it belongs to, which is taken off again: a caller's current context
//! stays as it was.

use std::ffi::{CStr, c_void};
use std::ptr::null_mut;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, OnceLock};

use cudarc::driver::sys::{
    self, CUcontext, CUdevice, CUdevice_attribute, CUfunction, CUfunction_attribute, CUkernel, CUlaunchAttribute,
    CUlaunchAttributeID, CUlaunchConfig, CUlibrary, CUresult, CUstream, CUstreamCaptureMode,
};

use super::params::Params;
use crate::error::{Error, Result};

/// The oldest driver that loads these kernels.
const OLDEST_DRIVER: i32 = 12_000;

/// Functions that are called.
const FUNCTIONS: [&CStr; 33] = [
    c"cuInit",
    c"cuDriverGetVersion",
    c"cuGetErrorName",
    c"cuGetErrorString",
    c"cuDeviceGet",
    c"cuDeviceGetCount",
    c"cuDeviceGetName",
    c"cuDeviceGetAttribute",
    c"cuDevicePrimaryCtxRetain",
    c"cuDevicePrimaryCtxRelease_v2",
    c"cuCtxGetCurrent",
    c"cuCtxGetDevice",
    c"cuCtxPushCurrent_v2",
    c"cuCtxPopCurrent_v2",
    c"cuMemAlloc_v2",
    c"cuMemFree_v2",
    c"cuMemHostAlloc",
    c"cuMemFreeHost",
    c"cuMemsetD8Async",
    c"cuMemcpyDtoHAsync_v2",
    c"cuMemcpyHtoDAsync_v2",
    c"cuStreamCreate",
    c"cuStreamDestroy_v2",
    c"cuStreamGetCtx",
    c"cuStreamSynchronize",
    c"cuThreadExchangeStreamCaptureMode",
    c"cuLibraryLoadData",
    c"cuLibraryUnload",
    c"cuLibraryGetKernel",
    c"cuKernelGetFunction",
    c"cuKernelGetAttribute",
    c"cuKernelSetAttribute",
    c"cuLaunchKernelEx",
];

/// Allocations so far, of all contexts: for tests.
static ALLOCATIONS: AtomicU64 = AtomicU64::new(0);

/// Allocations of device and pinned memory so far in this process.
pub fn allocations() -> u64 {
    ALLOCATIONS.load(Relaxed)
}

/// Whether a driver can be used: libcuda, its functions, its version.
pub fn probe() -> Result<()> {
    static RESULT: OnceLock<std::result::Result<(), String>> = OnceLock::new();
    RESULT.get_or_init(try_probe).clone().map_err(Error::NoCuda)
}

#[cfg(unix)]
fn try_probe() -> std::result::Result<(), String> {
    // SAFETY: NVIDIA's library initialises itself. It is never closed: the driver does not bear that.
    let library = unsafe { libc::dlopen(c"libcuda.so.1".as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
    if library.is_null() {
        return Err("no NVIDIA driver: libcuda.so.1 cannot be loaded".into());
    }
    for name in FUNCTIONS {
        // SAFETY: the library is open, the name ends with a zero.
        if unsafe { libc::dlsym(library, name.as_ptr()) }.is_null() {
            return Err(format!("the NVIDIA driver is too old: it has no {}", name.to_string_lossy()));
        }
    }
    // SAFETY: the function exists.
    let status = unsafe { sys::cuInit(0) };
    if status != CUresult::CUDA_SUCCESS {
        return Err(format!("the NVIDIA driver does not start: {}", name_of(status)));
    }
    let mut version = 0;
    // SAFETY: the version is a local.
    unsafe { sys::cuDriverGetVersion(&mut version) };
    if version < OLDEST_DRIVER {
        let (major, minor) = (version / 1000, version % 1000 / 10);
        return Err(format!("the NVIDIA driver serves CUDA {major}.{minor}; expected 12.0 or later"));
    }
    Ok(())
}

#[cfg(not(unix))]
fn try_probe() -> std::result::Result<(), String> {
    Err("the CUDA backend is for Linux".into())
}

/// The driver's name and sentence for a status.
fn name_of(status: CUresult) -> String {
    let text = |get: unsafe fn(CUresult, *mut *const std::ffi::c_char) -> CUresult| {
        let mut at = std::ptr::null();
        // SAFETY: the driver's texts are static.
        unsafe { get(status, &mut at) };
        // SAFETY: a static text, or null for a status that the driver does not know.
        (!at.is_null()).then(|| unsafe { CStr::from_ptr(at) }.to_string_lossy().into_owned())
    };
    match (text(sys::cuGetErrorName), text(sys::cuGetErrorString)) {
        (Some(name), Some(sentence)) => format!("{name} ({sentence})"),
        _ => format!("status {}", status as u32),
    }
}

fn check(status: CUresult, call: &'static str) -> Result<()> {
    if status == CUresult::CUDA_SUCCESS {
        return Ok(());
    }
    if status == CUresult::CUDA_ERROR_OUT_OF_MEMORY {
        return Err(Error::OutOfMemory { what: format!("what {call} needs").into(), bytes: 0 });
    }
    Err(Error::Cuda { call: call.into(), code: status as i32, text: name_of(status) })
}

#[cfg(unix)]
fn is_loaded() -> bool {
    // SAFETY: loads nothing; the name ends with a zero. The handle keeps what is loaded anyway.
    !unsafe { libc::dlopen(c"libcuda.so.1".as_ptr(), libc::RTLD_NOW | libc::RTLD_NOLOAD) }.is_null()
}

#[cfg(not(unix))]
fn is_loaded() -> bool {
    false
}

/// Compute capability times ten of the device of the calling thread's current context.
pub fn current_arch() -> Option<u32> {
    // A process that has not loaded the driver has no context: it is not to be loaded for that.
    if !is_loaded() {
        return None;
    }
    probe().ok()?;
    let (mut context, mut device) = (null_mut(), 0);
    // SAFETY: the out-parameter is a local, here and below.
    check(unsafe { sys::cuCtxGetCurrent(&mut context) }, "cuCtxGetCurrent").ok()?;
    if context.is_null() {
        return None;
    }
    // SAFETY: as above.
    check(unsafe { sys::cuCtxGetDevice(&mut device) }, "cuCtxGetDevice").ok()?;
    use CUdevice_attribute as A;
    let [major, minor] =
        [A::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, A::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR]
            .map(|attribute| attribute_of(device, attribute));
    Some(major.ok()? * 10 + minor.ok()?)
}

fn attribute_of(device: CUdevice, attribute: CUdevice_attribute) -> Result<u32> {
    let mut value = 0;
    // SAFETY: the out-parameter is a local.
    check(unsafe { sys::cuDeviceGetAttribute(&mut value, attribute, device) }, "cuDeviceGetAttribute")?;
    Ok(value as u32)
}

/// A device and the context that everything here runs in.
#[derive(Debug)]
pub struct Device {
    context: CUcontext,
    /// Set if the device's primary context was retained.
    primary: Option<CUdevice>,
    /// A stream of our own, that waits for no other.
    side: CUstream,
    /// Whose memory and code it has: the context, or of a green one the primary.
    base: CUcontext,
    /// Ordinal.
    pub ordinal: i32,
    /// As "NVIDIA H200".
    pub name: String,
    /// Compute capability times ten.
    pub arch: u32,
    /// Multiprocessors.
    pub multiprocessors: u32,
    /// Shared memory that a block can have, in bytes.
    pub shared_bytes: u32,
}

// SAFETY: contexts and streams may be used from any thread; the driver locks where it must.
unsafe impl Send for Device {}
// SAFETY: as for Send.
unsafe impl Sync for Device {}

/// While it lives, calls of this thread run in a context, and (relaxed) do not end another thread's capture.
struct Inside {
    capture: CUstreamCaptureMode,
}

impl Inside {
    fn enter(context: CUcontext) -> Result<Self> {
        // SAFETY: a live context.
        check(unsafe { sys::cuCtxPushCurrent_v2(context) }, "cuCtxPushCurrent")?;
        let mut capture = CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
        // SAFETY: exchanges a local with the thread's mode.
        unsafe { sys::cuThreadExchangeStreamCaptureMode(&mut capture) };
        Ok(Inside { capture })
    }
}

impl Drop for Inside {
    fn drop(&mut self) {
        let mut popped = null_mut();
        // SAFETY: gives the thread back its mode.
        unsafe { sys::cuThreadExchangeStreamCaptureMode(&mut self.capture) };
        // SAFETY: takes off what `enter` pushed.
        unsafe { sys::cuCtxPopCurrent_v2(&mut popped) };
    }
}

impl Device {
    /// The primary context of a device; ordinal -1: the calling thread's current context.
    pub fn open(ordinal: i32) -> Result<Arc<Self>> {
        probe()?;
        let (context, primary, device) = if ordinal == -1 {
            let mut context = null_mut();
            // SAFETY: the out-parameter is a local, here and below.
            check(unsafe { sys::cuCtxGetCurrent(&mut context) }, "cuCtxGetCurrent")?;
            if context.is_null() {
                return Err(Error::invalid(
                    "context_desc.device",
                    -1,
                    "an ordinal, because the calling thread has no current CUDA context",
                ));
            }
            let mut device = 0;
            // SAFETY: as above.
            check(unsafe { sys::cuCtxGetDevice(&mut device) }, "cuCtxGetDevice")?;
            (context, None, device)
        } else {
            let (mut count, mut device, mut context) = (0, 0, null_mut());
            // SAFETY: as above.
            check(unsafe { sys::cuDeviceGetCount(&mut count) }, "cuDeviceGetCount")?;
            if count == 0 {
                return Err(Error::NoCuda("the NVIDIA driver has no device".into()));
            }
            if !(0..count).contains(&ordinal) {
                return Err(Error::invalid("context_desc.device", ordinal, format!("-1 to {}", count - 1)));
            }
            // SAFETY: as above.
            check(unsafe { sys::cuDeviceGet(&mut device, ordinal) }, "cuDeviceGet")?;
            // SAFETY: as above.
            check(unsafe { sys::cuDevicePrimaryCtxRetain(&mut context, device) }, "cuDevicePrimaryCtxRetain")?;
            (context, Some(device), device)
        };
        let mut this = Device {
            context,
            primary,
            side: null_mut(),
            base: null_mut(),
            ordinal: device,
            name: String::new(),
            arch: 0,
            multiprocessors: 0,
            shared_bytes: 0,
        };
        this.look(device)?;
        Ok(Arc::new(this))
    }

    fn look(&mut self, device: CUdevice) -> Result<()> {
        let _inside = Inside::enter(self.context)?;
        let attribute = |attribute| attribute_of(device, attribute);
        use CUdevice_attribute as A;
        self.arch = attribute(A::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)? * 10
            + attribute(A::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?;
        self.multiprocessors = attribute(A::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?;
        self.shared_bytes = attribute(A::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)?;
        let mut name = [0; 256];
        // SAFETY: the array has as many bytes as it says.
        check(unsafe { sys::cuDeviceGetName(name.as_mut_ptr(), 255, device) }, "cuDeviceGetName")?;
        // SAFETY: the driver ends the name with a zero, and there is one behind it.
        self.name = unsafe { CStr::from_ptr(name.as_ptr()) }.to_string_lossy().into_owned();
        let flags = sys::CUstream_flags::CU_STREAM_NON_BLOCKING as u32;
        // SAFETY: the out-parameter is a field of ours.
        check(unsafe { sys::cuStreamCreate(&mut self.side, flags) }, "cuStreamCreate")?;
        let (status, base) = context_of(self.side);
        self.base = base;
        check(status, "cuStreamGetCtx")
    }

    /// Zeroed device memory.
    pub fn allocate(self: &Arc<Self>, what: &'static str, bytes: u64) -> Result<DeviceMemory> {
        let _inside = Inside::enter(self.context)?;
        let mut at = 0;
        // SAFETY: the out-parameter is a local.
        let status = unsafe { sys::cuMemAlloc_v2(&mut at, bytes.max(1) as usize) };
        if status == CUresult::CUDA_ERROR_OUT_OF_MEMORY {
            return Err(Error::OutOfMemory { what: what.into(), bytes });
        }
        check(status, "cuMemAlloc")?;
        ALLOCATIONS.fetch_add(1, Relaxed);
        let memory = DeviceMemory { device: self.clone(), at };
        // SAFETY: the whole of the block, which nobody uses yet.
        check(unsafe { sys::cuMemsetD8Async(at, 0, bytes as usize, self.side) }, "cuMemsetD8Async")?;
        // SAFETY: a stream of ours.
        check(unsafe { sys::cuStreamSynchronize(self.side) }, "cuStreamSynchronize")?;
        Ok(memory)
    }

    /// Zeroed host memory at an address that is the device's too.
    pub fn allocate_host(self: &Arc<Self>, what: &'static str, bytes: u64) -> Result<HostMemory> {
        let _inside = Inside::enter(self.context)?;
        let mut at = null_mut();
        let flags = sys::CU_MEMHOSTALLOC_DEVICEMAP | sys::CU_MEMHOSTALLOC_PORTABLE;
        // SAFETY: the out-parameter is a local.
        let status = unsafe { sys::cuMemHostAlloc(&mut at, bytes as usize, flags) };
        if status == CUresult::CUDA_ERROR_OUT_OF_MEMORY {
            return Err(Error::OutOfMemory { what: what.into(), bytes });
        }
        check(status, "cuMemHostAlloc")?;
        ALLOCATIONS.fetch_add(1, Relaxed);
        // SAFETY: as many bytes as were asked for.
        unsafe { std::ptr::write_bytes(at.cast::<u8>(), 0, bytes as usize) };
        Ok(HostMemory { device: self.clone(), at })
    }

    /// Reads device memory, beside whatever streams do.
    pub fn read<T: Params + Default>(&self, at: u64) -> Result<T> {
        let _inside = Inside::enter(self.context)?;
        let mut value = T::default();
        // SAFETY: a value of plain fields, overwritten whole.
        let status = unsafe { sys::cuMemcpyDtoHAsync_v2((&raw mut value).cast(), at, size_of::<T>(), self.side) };
        check(status, "cuMemcpyDtoHAsync")?;
        // SAFETY: a stream of ours.
        check(unsafe { sys::cuStreamSynchronize(self.side) }, "cuStreamSynchronize")?;
        Ok(value)
    }

    /// Writes device memory that no work uses yet.
    pub fn write(&self, at: u64, bytes: &[u8]) -> Result<()> {
        let _inside = Inside::enter(self.context)?;
        // SAFETY: a part of a block of this device, as long as the bytes.
        let status = unsafe { sys::cuMemcpyHtoDAsync_v2(at, bytes.as_ptr().cast(), bytes.len(), self.side) };
        check(status, "cuMemcpyHtoDAsync")?;
        // SAFETY: a stream of ours.
        check(unsafe { sys::cuStreamSynchronize(self.side) }, "cuStreamSynchronize")
    }

    /// The stream of our own, for launches that nobody else's work is to wait for.
    pub fn side(&self) -> usize {
        self.side as usize
    }

    /// Waits for the stream of our own.
    pub fn wait_for_side(&self) -> Result<()> {
        let _inside = Inside::enter(self.context)?;
        // SAFETY: a stream of ours.
        check(unsafe { sys::cuStreamSynchronize(self.side) }, "cuStreamSynchronize")
    }

    /// Refuses a stream of another context.
    pub fn check_stream(&self, stream: usize) -> Result<()> {
        // The default streams belong to whatever context is current, which is this one when work is enqueued.
        if stream <= 2 {
            return Ok(());
        }
        let _inside = Inside::enter(self.context)?;
        let (status, context) = context_of(stream as CUstream);
        if status == CUresult::CUDA_SUCCESS && context == self.base {
            return Ok(());
        }
        // What is wrong may be another thing than the stream: a capture that was broken, work that has failed.
        use CUresult as R;
        if !matches!(
            status,
            R::CUDA_SUCCESS
                | R::CUDA_ERROR_INVALID_VALUE
                | R::CUDA_ERROR_INVALID_HANDLE
                | R::CUDA_ERROR_INVALID_CONTEXT
                | R::CUDA_ERROR_CONTEXT_IS_DESTROYED
        ) {
            return check(status, "cuStreamGetCtx");
        }
        Err(Error::WrongStream {
            value: format!("{stream:#x}"),
            expected: format!("a stream of the context on device {} is expected", self.ordinal).into(),
        })
    }

    /// Enqueues a kernel.
    pub fn launch<P: Params>(&self, kernel: &Kernel, shape: &Shape, params: &P) -> Result<()> {
        if shape.blocks == 0 {
            return Ok(());
        }
        let _inside = Inside::enter(self.context)?;
        // SAFETY: all zero is an attribute; its kind is set below.
        let mut attribute: CUlaunchAttribute = unsafe { std::mem::zeroed() };
        attribute.id = CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION;
        attribute.value.programmaticStreamSerializationAllowed = 1;
        let config = CUlaunchConfig {
            gridDimX: shape.blocks,
            gridDimY: 1,
            gridDimZ: 1,
            blockDimX: shape.threads,
            blockDimY: 1,
            blockDimZ: 1,
            sharedMemBytes: shape.shared_bytes,
            hStream: shape.stream as CUstream,
            attrs: &mut attribute,
            numAttrs: shape.dependent.into(),
        };
        let mut arguments = [std::ptr::from_ref(params).cast_mut().cast::<c_void>()];
        // SAFETY: the kernel takes one struct of this type by value (the layout is checked when it is compiled), which the driver
        // copies before it returns. A kernel handle may stand for a function in any context of its device.
        let status =
            unsafe { sys::cuLaunchKernelEx(&config, kernel.handle as CUfunction, arguments.as_mut_ptr(), null_mut()) };
        check(status, "cuLaunchKernelEx")
    }
}

/// The context whose memory and code a stream has. Of a green context's stream it is the primary one, which the first version of the
/// driver's function does not say.
fn context_of(stream: CUstream) -> (CUresult, CUcontext) {
    type GetContexts = unsafe extern "C" fn(CUstream, *mut CUcontext, *mut *mut c_void) -> CUresult;
    static GET: OnceLock<Option<GetContexts>> = OnceLock::new();
    let get = *GET.get_or_init(|| {
        let at = symbol(c"cuStreamGetCtx_v2")?;
        // SAFETY: the function has this type, by the driver's interface.
        Some(unsafe { std::mem::transmute::<*mut c_void, GetContexts>(at) })
    });
    let (mut context, mut green) = (null_mut(), null_mut());
    let status = match get {
        // SAFETY: by the caller's promise, a stream; the driver refuses what it does not know. Out-parameters are locals.
        Some(get) => unsafe { get(stream, &mut context, &mut green) },
        // SAFETY: as above.
        None => unsafe { sys::cuStreamGetCtx(stream, &mut context) },
    };
    (status, context)
}

/// A function that not every driver has. It is open: [`probe`] was here before.
#[cfg(unix)]
fn symbol(name: &CStr) -> Option<*mut c_void> {
    // SAFETY: NVIDIA's library, which is never closed.
    let library = unsafe { libc::dlopen(c"libcuda.so.1".as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
    if library.is_null() {
        return None;
    }
    // SAFETY: the library is open, the name ends with a zero.
    let at = unsafe { libc::dlsym(library, name.as_ptr()) };
    (!at.is_null()).then_some(at)
}

#[cfg(not(unix))]
fn symbol(_: &CStr) -> Option<*mut c_void> {
    None
}

impl Drop for Device {
    fn drop(&mut self) {
        if let (false, Ok(_inside)) = (self.side.is_null(), Inside::enter(self.context)) {
            // SAFETY: a stream of ours, used no more.
            unsafe { sys::cuStreamDestroy_v2(self.side) };
        }
        if let Some(device) = self.primary {
            // SAFETY: retained once, released once.
            unsafe { sys::cuDevicePrimaryCtxRelease_v2(device) };
        }
    }
}

/// How a kernel is launched.
#[derive(Debug, Clone, Copy)]
pub struct Shape {
    /// The caller's stream.
    pub stream: usize,
    /// Blocks; 0: nothing is launched.
    pub blocks: u32,
    /// Threads of a block.
    pub threads: u32,
    /// Dynamic shared memory of a block.
    pub shared_bytes: u32,
    /// May begin before the work in front of it has ended: it waits itself.
    pub dependent: bool,
}

/// A block of device memory, freed when dropped.
#[derive(Debug)]
pub struct DeviceMemory {
    device: Arc<Device>,
    /// First byte.
    pub at: u64,
}

impl Drop for DeviceMemory {
    fn drop(&mut self) {
        if let Ok(_inside) = Inside::enter(self.device.context) {
            // Whatever still uses the memory ends first: the driver waits. cuCtxSynchronize would end other threads' captures.
            // SAFETY: allocated in this context, freed once.
            unsafe { sys::cuMemFree_v2(self.at) };
        }
    }
}

/// A block of host memory that the device sees, freed when dropped.
#[derive(Debug)]
pub struct HostMemory {
    device: Arc<Device>,
    /// First byte, for host and device.
    pub at: *mut c_void,
}

// SAFETY: an address; accesses are ordered by who makes them.
unsafe impl Send for HostMemory {}
// SAFETY: as for Send.
unsafe impl Sync for HostMemory {}

impl Drop for HostMemory {
    fn drop(&mut self) {
        if let Ok(_inside) = Inside::enter(self.device.context) {
            // Waits, as for device memory.
            // SAFETY: allocated in this context, freed once.
            unsafe { sys::cuMemFreeHost(self.at) };
        }
    }
}

/// A loaded kernel.
#[derive(Debug)]
pub struct Kernel {
    device: Arc<Device>,
    library: CUlibrary,
    handle: CUkernel,
    /// Dynamic shared memory that a launch may ask for.
    pub shared_limit: u32,
}

// SAFETY: handles may be used from any thread.
unsafe impl Send for Kernel {}
// SAFETY: as for Send.
unsafe impl Sync for Kernel {}

impl Kernel {
    /// Loads a cubin and its kernel `replayssm_kernel`, so that a launch has nothing left to load.
    pub fn load(device: &Arc<Device>, cubin: &[u8]) -> Result<Self> {
        let _inside = Inside::enter(device.context)?;
        let (mut library, mut handle, mut function) = (null_mut(), null_mut(), null_mut());
        // SAFETY: a cubin in memory; the driver copies what it keeps. No options.
        let status = unsafe {
            sys::cuLibraryLoadData(
                &mut library,
                cubin.as_ptr().cast(),
                null_mut(),
                null_mut(),
                0,
                null_mut(),
                null_mut(),
                0,
            )
        };
        check(status, "cuLibraryLoadData")?;
        let mut kernel = Kernel { device: device.clone(), library, handle, shared_limit: 0 };
        // SAFETY: a live library; the name ends with a zero.
        let status = unsafe { sys::cuLibraryGetKernel(&mut handle, library, c"replayssm_kernel".as_ptr()) };
        check(status, "cuLibraryGetKernel")?;
        kernel.handle = handle;
        // Loads it now, where loading is lazy.
        // SAFETY: a live kernel.
        check(unsafe { sys::cuKernelGetFunction(&mut function, handle) }, "cuKernelGetFunction")?;
        let mut ordinal = 0;
        // SAFETY: the out-parameter is a local.
        check(unsafe { sys::cuCtxGetDevice(&mut ordinal) }, "cuCtxGetDevice")?;
        let (mut fixed, attribute) = (0, CUfunction_attribute::CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES);
        // SAFETY: a live kernel; the out-parameter is a local.
        let status = unsafe { sys::cuKernelGetAttribute(&mut fixed, attribute, handle, ordinal) };
        check(status, "cuKernelGetAttribute")?;
        kernel.shared_limit = device.shared_bytes.saturating_sub(fixed as u32);
        let attribute = CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
        // SAFETY: a live kernel.
        let status = unsafe { sys::cuKernelSetAttribute(attribute, kernel.shared_limit as i32, handle, ordinal) };
        check(status, "cuKernelSetAttribute")?;
        Ok(kernel)
    }
}

impl Drop for Kernel {
    fn drop(&mut self) {
        if let Ok(_inside) = Inside::enter(self.device.context) {
            // This does not wait; the memory of each slots handle, which went before, did.
            // SAFETY: loaded once, unloaded once.
            unsafe { sys::cuLibraryUnload(self.library) };
        }
    }
}
