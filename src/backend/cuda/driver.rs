//! The CUDA driver: the only file that names cudarc.
//!
//! Functions are looked up by name in the libcuda.so.1 that is loaded once, and called through a table of ours; cudarc says what they take.
//! Its own wrappers might load another library, panic where it lacks a function, and return an enumeration, where a driver may
//! return a status that is newer than the bindings. Every call runs in the context it belongs to, which is taken off again: a caller's
//! current context stays as it was.

use std::ffi::{CStr, c_char, c_int, c_uchar, c_uint, c_void};
use std::ptr::{null, null_mut};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, OnceLock};

use cudarc::driver::sys::{
    self, CUDA_MEMCPY2D, CUcontext, CUdevice, CUdevice_attribute, CUdeviceptr, CUfunction, CUfunction_attribute,
    CUgreenCtx, CUjit_option, CUkernel, CUlaunchAttribute, CUlaunchAttributeID, CUlaunchConfig, CUlibrary,
    CUlibraryOption, CUresult, CUstream, CUstreamCaptureMode,
};

use super::params::Params;
use crate::error::{Error, Result};

/// The oldest driver that loads these kernels.
const OLDEST_DRIVER: i32 = 12_000;

/// What functions return: a `CUresult`, or a number that only a newer driver knows.
type Status = u32;

const SUCCESS: Status = CUresult::CUDA_SUCCESS as Status;
const OUT_OF_MEMORY: Status = CUresult::CUDA_ERROR_OUT_OF_MEMORY as Status;
const INVALID_CONTEXT: Status = CUresult::CUDA_ERROR_INVALID_CONTEXT as Status;
const DEINITIALIZED: Status = CUresult::CUDA_ERROR_DEINITIALIZED as Status;

/// Whether a context can do nothing any more once a call in it has returned this. The driver's documentation says so of most ("any further
/// CUDA work will return the same error" or the like); after uncorrectable errors of memory or NVLink nothing in it can be trusted.
fn ends_context(status: Status) -> bool {
    use CUresult as R;
    let known = [
        R::CUDA_ERROR_CONTEXT_IS_DESTROYED,
        R::CUDA_ERROR_ECC_UNCORRECTABLE,
        R::CUDA_ERROR_NVLINK_UNCORRECTABLE,
        R::CUDA_ERROR_CONTAINED,
        R::CUDA_ERROR_ILLEGAL_ADDRESS,
        R::CUDA_ERROR_LAUNCH_TIMEOUT,
        R::CUDA_ERROR_ASSERT,
        R::CUDA_ERROR_HARDWARE_STACK_ERROR,
        R::CUDA_ERROR_ILLEGAL_INSTRUCTION,
        R::CUDA_ERROR_MISALIGNED_ADDRESS,
        R::CUDA_ERROR_INVALID_ADDRESS_SPACE,
        R::CUDA_ERROR_INVALID_PC,
        R::CUDA_ERROR_LAUNCH_FAILED,
        R::CUDA_ERROR_TENSOR_MEMORY_LEAK,
        R::CUDA_ERROR_EXTERNAL_DEVICE,
        R::CUDA_ERROR_MPS_CLIENT_TERMINATED,
    ];
    known.iter().any(|&known| known as Status == status)
}

macro_rules! functions {
    (
        $(#[$doc:meta])* $table:ident;
        as_bound: { $($name:ident($($ty:ty),*);)* }
        with_numbers: { $($other:ident($($other_ty:ty),*);)* }
        not_in_every_driver: { $($maybe:ident($($maybe_ty:ty),*);)* }
    ) => {
        $(#[$doc])*
        #[allow(non_snake_case, reason = "the driver's own names")]
        #[derive(Debug)]
        struct $table {
            $($name: unsafe extern "C" fn($($ty),*) -> Status,)*
            $($other: unsafe extern "C" fn($($other_ty),*) -> Status,)*
            $($maybe: Option<unsafe extern "C" fn($($maybe_ty),*) -> Status>,)*
        }

        // Arguments are those of the bindings.
        const _: () = {
            $(let _: unsafe fn($($ty),*) -> CUresult = sys::$name;)*
            $(let _: unsafe fn($($maybe_ty),*) -> CUresult = sys::$maybe;)*
        };

        #[cfg(unix)]
        impl $table {
            /// Looks the functions up in an open library; the name of one that it lacks.
            fn find(library: Library) -> std::result::Result<Self, &'static str> {
                Ok($table {
                    $($name: {
                        let at = library.symbol(concat!(stringify!($name), "\0")).ok_or(stringify!($name))?;
                        // SAFETY: the driver's function of this name takes this, and returns an int.
                        unsafe { std::mem::transmute::<*mut c_void, unsafe extern "C" fn($($ty),*) -> Status>(at) }
                    },)*
                    $($other: {
                        let at = library.symbol(concat!(stringify!($other), "\0")).ok_or(stringify!($other))?;
                        // SAFETY: as above.
                        unsafe { std::mem::transmute::<*mut c_void, unsafe extern "C" fn($($other_ty),*) -> Status>(at) }
                    },)*
                    $($maybe: library.symbol(concat!(stringify!($maybe), "\0")).map(|at| {
                        // SAFETY: as above.
                        unsafe { std::mem::transmute::<*mut c_void, unsafe extern "C" fn($($maybe_ty),*) -> Status>(at) }
                    }),)*
                })
            }
        }
    };
}

functions! {
    /// The driver's functions, by the names of their symbols.
    Driver;
    as_bound: {
        cuInit(c_uint);
        cuDriverGetVersion(*mut c_int);
        cuDeviceGet(*mut CUdevice, c_int);
        cuDeviceGetCount(*mut c_int);
        cuDeviceGetName(*mut c_char, c_int, CUdevice);
        cuDeviceGetAttribute(*mut c_int, CUdevice_attribute, CUdevice);
        cuDevicePrimaryCtxRetain(*mut CUcontext, CUdevice);
        cuDevicePrimaryCtxRelease_v2(CUdevice);
        cuCtxGetCurrent(*mut CUcontext);
        cuCtxGetDevice(*mut CUdevice);
        cuCtxPushCurrent_v2(CUcontext);
        cuCtxPopCurrent_v2(*mut CUcontext);
        cuMemAlloc_v2(*mut CUdeviceptr, usize);
        cuMemFree_v2(CUdeviceptr);
        cuMemHostAlloc(*mut *mut c_void, usize, c_uint);
        cuMemFreeHost(*mut c_void);
        cuMemsetD8Async(CUdeviceptr, c_uchar, usize, CUstream);
        cuMemcpyDtoHAsync_v2(*mut c_void, CUdeviceptr, usize, CUstream);
        cuMemcpyHtoDAsync_v2(CUdeviceptr, *const c_void, usize, CUstream);
        cuMemcpy2DAsync_v2(*const CUDA_MEMCPY2D, CUstream);
        cuStreamCreate(*mut CUstream, c_uint);
        cuStreamDestroy_v2(CUstream);
        cuStreamGetCtx(CUstream, *mut CUcontext);
        cuStreamSynchronize(CUstream);
        cuLibraryLoadData(
            *mut CUlibrary, *const c_void, *mut CUjit_option, *mut *mut c_void, c_uint, *mut CUlibraryOption,
            *mut *mut c_void, c_uint
        );
        cuLibraryUnload(CUlibrary);
        cuLibraryGetKernel(*mut CUkernel, CUlibrary, *const c_char);
        cuKernelGetFunction(*mut CUfunction, CUkernel);
        cuKernelGetAttribute(*mut c_int, CUfunction_attribute, CUkernel, CUdevice);
        cuKernelSetAttribute(CUfunction_attribute, c_int, CUkernel, CUdevice);
        cuLaunchKernelEx(*const CUlaunchConfig, CUfunction, *mut *mut c_void, *mut *mut c_void);
    }
    // Where the bindings have an enumeration for a number that comes from the driver.
    with_numbers: {
        cuGetErrorName(Status, *mut *const c_char);
        cuGetErrorString(Status, *mut *const c_char);
        cuStreamIsCapturing(CUstream, *mut c_uint);
        cuThreadExchangeStreamCaptureMode(*mut c_uint);
    }
    not_in_every_driver: {
        // Since CUDA 12.5.
        cuStreamGetCtx_v2(CUstream, *mut CUcontext, *mut CUgreenCtx);
    }
}

/// Allocations so far, of all contexts: for tests.
static ALLOCATIONS: AtomicU64 = AtomicU64::new(0);

/// Allocations of device and pinned memory so far in this process.
pub fn allocations() -> u64 {
    ALLOCATIONS.load(Relaxed)
}

/// NVIDIA's library, open.
#[cfg(unix)]
#[derive(Clone, Copy)]
struct Library(*mut c_void);

#[cfg(unix)]
impl Library {
    /// Opens it; with `RTLD_NOLOAD` only if the process has it. It is never closed: the driver does not bear that.
    fn open(flags: c_int) -> Option<Self> {
        // SAFETY: NVIDIA's library initialises itself; the name ends with a zero.
        let library = unsafe { libc::dlopen(c"libcuda.so.1".as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL | flags) };
        (!library.is_null()).then_some(Library(library))
    }

    /// The address of a function whose name ends with a zero.
    fn symbol(self, name: &'static str) -> Option<*mut c_void> {
        // SAFETY: the library is open, the name ends with a zero.
        let at = unsafe { libc::dlsym(self.0, name.as_ptr().cast()) };
        (!at.is_null()).then_some(at)
    }
}

/// The driver, looked for once: libcuda, its functions, its version.
fn driver() -> Result<&'static Driver> {
    static DRIVER: OnceLock<std::result::Result<Driver, String>> = OnceLock::new();
    DRIVER.get_or_init(start).as_ref().map_err(|why| Error::NoCuda(why.clone()))
}

/// Whether a driver can be used.
pub fn probe() -> Result<()> {
    driver().map(drop)
}

#[cfg(unix)]
fn start() -> std::result::Result<Driver, String> {
    let library = Library::open(0).ok_or("no NVIDIA driver: libcuda.so.1 cannot be loaded")?;
    let driver = Driver::find(library).map_err(|name| format!("the NVIDIA driver is too old: it has no {name}"))?;
    // SAFETY: takes no pointer.
    let status = unsafe { (driver.cuInit)(0) };
    if status != SUCCESS {
        return Err(format!("the NVIDIA driver does not start: {}", driver.name_of(status)));
    }
    let mut version = 0;
    // SAFETY: the version is a local.
    unsafe { (driver.cuDriverGetVersion)(&mut version) };
    if version < OLDEST_DRIVER {
        let (major, minor) = (version / 1000, version % 1000 / 10);
        return Err(format!("the NVIDIA driver serves CUDA {major}.{minor}; expected 12.0 or later"));
    }
    Ok(driver)
}

#[cfg(not(unix))]
fn start() -> std::result::Result<Driver, String> {
    Err("the CUDA backend is for Linux".into())
}

#[cfg(unix)]
fn is_loaded() -> bool {
    Library::open(libc::RTLD_NOLOAD).is_some()
}

#[cfg(not(unix))]
fn is_loaded() -> bool {
    false
}

impl Driver {
    /// The driver's name and sentence for a status.
    fn name_of(&self, status: Status) -> String {
        let text = |get: unsafe extern "C" fn(Status, *mut *const c_char) -> Status| {
            let mut at = std::ptr::null();
            // SAFETY: the driver's texts are static.
            unsafe { get(status, &mut at) };
            // SAFETY: a static text, or null for a status that the driver does not know.
            (!at.is_null()).then(|| unsafe { CStr::from_ptr(at) }.to_string_lossy().into_owned())
        };
        match (text(self.cuGetErrorName), text(self.cuGetErrorString)) {
            (Some(name), Some(sentence)) => format!("{name} ({sentence})"),
            _ => format!("status {status}"),
        }
    }

    fn check(&self, status: Status, call: &'static str) -> Result<()> {
        if status == SUCCESS { Ok(()) } else { Err(self.refused(status, call)) }
    }

    #[cold]
    fn refused(&self, status: Status, call: &'static str) -> Error {
        match status {
            OUT_OF_MEMORY => Error::OutOfMemory { what: format!("what {call} needs").into(), bytes: None },
            _ => Error::Cuda { call: call.into(), code: status as i32, text: self.name_of(status) },
        }
    }

    fn attribute_of(&self, device: CUdevice, attribute: CUdevice_attribute) -> Result<u32> {
        let mut value = 0;
        // SAFETY: the out-parameter is a local.
        let status = unsafe { (self.cuDeviceGetAttribute)(&mut value, attribute, device) };
        self.check(status, "cuDeviceGetAttribute")?;
        Ok(value as u32)
    }

    /// Compute capability times ten.
    fn arch_of(&self, device: CUdevice) -> Result<u32> {
        use CUdevice_attribute as A;
        let major = self.attribute_of(device, A::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?;
        Ok(major * 10 + self.attribute_of(device, A::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?)
    }

    /// The context whose memory and code a stream has. Of a green context's stream it is the primary one, which the first version of
    /// the driver's function does not say.
    fn context_of(&self, stream: CUstream) -> (Status, CUcontext) {
        let (mut context, mut green) = (null_mut(), null_mut());
        let status = match self.cuStreamGetCtx_v2 {
            // SAFETY: by the caller's promise, a stream; the driver refuses what it does not know. Out-parameters are locals.
            Some(get) => unsafe { get(stream, &mut context, &mut green) },
            // SAFETY: as above.
            None => unsafe { (self.cuStreamGetCtx)(stream, &mut context) },
        };
        (status, context)
    }
}

/// Compute capability times ten of the device of the calling thread's current context.
pub fn current_arch() -> Option<u32> {
    // A process that has not loaded the driver has no context: it is not to be loaded for that.
    if !is_loaded() {
        return None;
    }
    let driver = driver().ok()?;
    let (mut context, mut device) = (null_mut(), 0);
    // SAFETY: the out-parameter is a local, here and below.
    driver.check(unsafe { (driver.cuCtxGetCurrent)(&mut context) }, "cuCtxGetCurrent").ok()?;
    if context.is_null() {
        return None;
    }
    // SAFETY: as above.
    driver.check(unsafe { (driver.cuCtxGetDevice)(&mut device) }, "cuCtxGetDevice").ok()?;
    driver.arch_of(device).ok()
}

/// A device and the context that everything here runs in.
#[derive(Debug)]
pub struct Device {
    driver: &'static Driver,
    context: CUcontext,
    /// Set if the device's primary context was retained.
    primary: Option<CUdevice>,
    /// A stream of our own, that waits for no other.
    side: CUstream,
    /// Whose memory and code it has: the context, or of a green one the primary.
    base: CUcontext,
    /// What told first that the context has failed for good, and which call.
    lost: OnceLock<(Status, &'static str)>,
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
    driver: &'static Driver,
    capture: c_uint,
}

impl Inside {
    fn enter(device: &Device) -> Result<Self> {
        device.check_alive()?;
        Inside::enter_any(device).map_err(|status| match status {
            // Somebody has destroyed it, or the driver ends with the process.
            INVALID_CONTEXT | DEINITIALIZED => device.lose(status, "cuCtxPushCurrent"),
            _ => device.refused(status, "cuCtxPushCurrent"),
        })
    }

    /// Of a context that may have failed, to free what is in it.
    fn enter_any(device: &Device) -> std::result::Result<Self, Status> {
        let driver = device.driver;
        // SAFETY: a context that was live when the device was opened; the driver refuses one that is not.
        let status = unsafe { (driver.cuCtxPushCurrent_v2)(device.context) };
        if status != SUCCESS {
            return Err(status);
        }
        let mut capture = CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED as c_uint;
        // SAFETY: exchanges a local with the thread's mode.
        unsafe { (driver.cuThreadExchangeStreamCaptureMode)(&mut capture) };
        Ok(Inside { driver, capture })
    }
}

impl Drop for Inside {
    fn drop(&mut self) {
        let mut popped = null_mut();
        // SAFETY: gives the thread back its mode.
        unsafe { (self.driver.cuThreadExchangeStreamCaptureMode)(&mut self.capture) };
        // SAFETY: takes off what `enter` pushed.
        unsafe { (self.driver.cuCtxPopCurrent_v2)(&mut popped) };
    }
}

impl Device {
    /// The primary context of a device; ordinal -1: the calling thread's current context.
    pub fn open(ordinal: i32) -> Result<Arc<Self>> {
        let driver = driver()?;
        let (context, primary, device) = if ordinal == -1 {
            let mut context = null_mut();
            // SAFETY: the out-parameter is a local, here and below.
            driver.check(unsafe { (driver.cuCtxGetCurrent)(&mut context) }, "cuCtxGetCurrent")?;
            if context.is_null() {
                return Err(Error::invalid(
                    "context_desc.device",
                    -1,
                    "an ordinal, because the calling thread has no current CUDA context",
                ));
            }
            let mut device = 0;
            // SAFETY: as above.
            driver.check(unsafe { (driver.cuCtxGetDevice)(&mut device) }, "cuCtxGetDevice")?;
            (context, None, device)
        } else {
            let (mut count, mut device, mut context) = (0, 0, null_mut());
            // SAFETY: as above.
            driver.check(unsafe { (driver.cuDeviceGetCount)(&mut count) }, "cuDeviceGetCount")?;
            if count == 0 {
                return Err(Error::NoCuda("the NVIDIA driver has no device".into()));
            }
            if !(0..count).contains(&ordinal) {
                return Err(Error::invalid("context_desc.device", ordinal, format!("-1 to {}", count - 1)));
            }
            // SAFETY: as above.
            driver.check(unsafe { (driver.cuDeviceGet)(&mut device, ordinal) }, "cuDeviceGet")?;
            // SAFETY: as above.
            let status = unsafe { (driver.cuDevicePrimaryCtxRetain)(&mut context, device) };
            driver.check(status, "cuDevicePrimaryCtxRetain")?;
            (context, Some(device), device)
        };
        let mut this = Device {
            driver,
            context,
            primary,
            side: null_mut(),
            base: null_mut(),
            lost: OnceLock::new(),
            ordinal: device,
            name: String::new(),
            arch: 0,
            multiprocessors: 0,
            shared_bytes: 0,
        };
        this.look(device)?;
        Ok(Arc::new(this))
    }

    /// Refuses once the context has failed for good, as far as a call of ours has been told.
    pub fn check_alive(&self) -> Result<()> {
        self.lost.get().map_or(Ok(()), |&(status, call)| Err(self.is_lost(status, call)))
    }

    #[cold]
    fn is_lost(&self, status: Status, call: &'static str) -> Error {
        Error::DeviceLost { device: self.ordinal, call, code: status as i32, text: self.driver.name_of(status) }
    }

    /// What a call in the context has returned.
    fn check(&self, status: Status, call: &'static str) -> Result<()> {
        if status == SUCCESS { Ok(()) } else { Err(self.refused(status, call)) }
    }

    #[cold]
    fn refused(&self, status: Status, call: &'static str) -> Error {
        if ends_context(status) { self.lose(status, call) } else { self.driver.refused(status, call) }
    }

    /// The context has failed for good; what was told first stays.
    fn lose(&self, status: Status, call: &'static str) -> Error {
        let &(status, call) = self.lost.get_or_init(|| (status, call));
        self.is_lost(status, call)
    }

    fn look(&mut self, device: CUdevice) -> Result<()> {
        let _inside = Inside::enter(self)?;
        let attribute = |attribute| self.driver.attribute_of(device, attribute);
        use CUdevice_attribute as A;
        self.arch = self.driver.arch_of(device)?;
        self.multiprocessors = attribute(A::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?;
        self.shared_bytes = attribute(A::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)?;
        let mut name = [0; 256];
        // SAFETY: the array has as many bytes as it says.
        let status = unsafe { (self.driver.cuDeviceGetName)(name.as_mut_ptr(), 255, device) };
        self.check(status, "cuDeviceGetName")?;
        // SAFETY: the driver ends the name with a zero, and there is one behind it.
        self.name = unsafe { CStr::from_ptr(name.as_ptr()) }.to_string_lossy().into_owned();
        let flags = sys::CUstream_flags::CU_STREAM_NON_BLOCKING as u32;
        // SAFETY: the out-parameter is a field of ours.
        let status = unsafe { (self.driver.cuStreamCreate)(&mut self.side, flags) };
        self.check(status, "cuStreamCreate")?;
        let (status, base) = self.driver.context_of(self.side);
        self.base = base;
        self.check(status, "cuStreamGetCtx")
    }

    /// Zeroed device memory.
    pub fn allocate(self: &Arc<Self>, what: &'static str, bytes: u64) -> Result<DeviceMemory> {
        let _inside = Inside::enter(self)?;
        let mut at = 0;
        // SAFETY: the out-parameter is a local.
        let status = unsafe { (self.driver.cuMemAlloc_v2)(&mut at, bytes.max(1) as usize) };
        if status == OUT_OF_MEMORY {
            return Err(Error::OutOfMemory { what: what.into(), bytes: Some(bytes) });
        }
        self.check(status, "cuMemAlloc")?;
        ALLOCATIONS.fetch_add(1, Relaxed);
        let memory = DeviceMemory { device: self.clone(), at };
        // SAFETY: the whole of the block, which nobody uses yet.
        let status = unsafe { (self.driver.cuMemsetD8Async)(at, 0, bytes as usize, self.side) };
        self.check(status, "cuMemsetD8Async")?;
        // SAFETY: a stream of ours.
        self.check(unsafe { (self.driver.cuStreamSynchronize)(self.side) }, "cuStreamSynchronize")?;
        Ok(memory)
    }

    /// Zeroed host memory at an address that is the device's too.
    pub fn allocate_host(self: &Arc<Self>, what: &'static str, bytes: u64) -> Result<HostMemory> {
        let _inside = Inside::enter(self)?;
        let mut at = null_mut();
        let flags = sys::CU_MEMHOSTALLOC_DEVICEMAP | sys::CU_MEMHOSTALLOC_PORTABLE;
        // SAFETY: the out-parameter is a local.
        let status = unsafe { (self.driver.cuMemHostAlloc)(&mut at, bytes as usize, flags) };
        if status == OUT_OF_MEMORY {
            return Err(Error::OutOfMemory { what: what.into(), bytes: Some(bytes) });
        }
        self.check(status, "cuMemHostAlloc")?;
        ALLOCATIONS.fetch_add(1, Relaxed);
        // SAFETY: as many bytes as were asked for.
        unsafe { std::ptr::write_bytes(at.cast::<u8>(), 0, bytes as usize) };
        Ok(HostMemory { device: self.clone(), at })
    }

    /// Reads device memory, beside whatever streams do.
    pub fn read<T: Params + Default>(&self, at: u64) -> Result<T> {
        let _inside = Inside::enter(self)?;
        let mut value = T::default();
        // SAFETY: a value of plain fields, overwritten whole.
        let status =
            unsafe { (self.driver.cuMemcpyDtoHAsync_v2)((&raw mut value).cast(), at, size_of::<T>(), self.side) };
        self.check(status, "cuMemcpyDtoHAsync")?;
        // SAFETY: a stream of ours.
        self.check(unsafe { (self.driver.cuStreamSynchronize)(self.side) }, "cuStreamSynchronize")?;
        Ok(value)
    }

    /// Writes device memory that no work uses yet.
    pub fn write(&self, at: u64, bytes: &[u8]) -> Result<()> {
        let _inside = Inside::enter(self)?;
        // SAFETY: a part of a block of this device, as long as the bytes.
        let status = unsafe { (self.driver.cuMemcpyHtoDAsync_v2)(at, bytes.as_ptr().cast(), bytes.len(), self.side) };
        self.check(status, "cuMemcpyHtoDAsync")?;
        // SAFETY: a stream of ours.
        self.check(unsafe { (self.driver.cuStreamSynchronize)(self.side) }, "cuStreamSynchronize")
    }

    /// The stream of our own, for launches that nobody else's work is to wait for.
    pub fn side(&self) -> usize {
        self.side as usize
    }

    /// Waits for the stream of our own.
    pub fn wait_for_side(&self) -> Result<()> {
        let _inside = Inside::enter(self)?;
        // SAFETY: a stream of ours.
        self.check(unsafe { (self.driver.cuStreamSynchronize)(self.side) }, "cuStreamSynchronize")
    }

    /// Copies runs of device memory, `stride` apart, into `into`, behind the work on a stream, and waits for that.
    pub fn read_runs(&self, stream: usize, at: u64, stride: i64, bytes: usize, into: &mut [u8]) -> Result<()> {
        let host = Host::To(into.as_mut_ptr());
        self.copy_runs(stream, at, stride, bytes, host, into.len())
    }

    /// The way back.
    pub fn write_runs(&self, stream: usize, at: u64, stride: i64, bytes: usize, from: &[u8]) -> Result<()> {
        self.copy_runs(stream, at, stride, bytes, Host::From(from.as_ptr()), from.len())
    }

    fn copy_runs(&self, stream: usize, at: u64, stride: i64, bytes: usize, host: Host, all: usize) -> Result<()> {
        if bytes == 0 || all < bytes {
            return Ok(());
        }
        let _inside = Inside::enter(self)?;
        let runs = all / bytes;
        // No device takes longer pitches; far apart, runs are copied one by one.
        let pitch = usize::try_from(stride).ok().filter(|&pitch| pitch >= bytes && pitch < 1 << 31);
        let enqueue = |copy: CUDA_MEMCPY2D| {
            // SAFETY: runs of a pool's memory, and host memory of as many bytes, which stays until the stream has been waited for.
            let status = unsafe { (self.driver.cuMemcpy2DAsync_v2)(&copy, stream as CUstream) };
            self.check(status, "cuMemcpy2DAsync")
        };
        let result = match pitch {
            Some(pitch) if runs > 1 => enqueue(copy_2d(at, pitch, bytes, host, runs)),
            _ => (0..runs).try_for_each(|run| {
                let at = at.wrapping_add_signed(run as i64 * stride);
                enqueue(copy_2d(at, bytes, bytes, host.further(run * bytes), 1))
            }),
        };
        // What was enqueued ends before the host's memory goes back to the caller, also where a later copy was refused.
        // SAFETY: the caller's stream.
        let status = unsafe { (self.driver.cuStreamSynchronize)(stream as CUstream) };
        let waited = self.check(status, "cuStreamSynchronize");
        result.and(waited)
    }

    /// Refuses a stream that captures: the capture goes on.
    pub fn check_not_capturing(&self, stream: usize) -> Result<()> {
        let _inside = Inside::enter(self)?;
        let mut capturing = 0;
        // SAFETY: a stream of this context; the out-parameter is a local.
        let status = unsafe { (self.driver.cuStreamIsCapturing)(stream as CUstream, &mut capturing) };
        // The legacy stream would wait for one that captures.
        if status == CUresult::CUDA_ERROR_STREAM_CAPTURE_IMPLICIT as Status || capturing != 0 {
            return Err(Error::Capturing { value: format!("{stream:#x}") });
        }
        self.check(status, "cuStreamIsCapturing")
    }

    /// Refuses a stream of another context.
    pub fn check_stream(&self, stream: usize) -> Result<()> {
        // The default streams belong to whatever context is current, which is this one when work is enqueued.
        if stream <= 2 {
            return Ok(());
        }
        let _inside = Inside::enter(self)?;
        let (status, context) = self.driver.context_of(stream as CUstream);
        if status == SUCCESS && context == self.base {
            return Ok(());
        }
        // What is wrong may be another thing than the stream: a capture that was broken, work that has failed.
        use CUresult as R;
        let of_the_stream = [
            R::CUDA_SUCCESS,
            R::CUDA_ERROR_INVALID_VALUE,
            R::CUDA_ERROR_INVALID_HANDLE,
            R::CUDA_ERROR_INVALID_CONTEXT,
            R::CUDA_ERROR_CONTEXT_IS_DESTROYED,
        ];
        if !of_the_stream.map(|known| known as Status).contains(&status) {
            return self.check(status, "cuStreamGetCtx");
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
        let _inside = Inside::enter(self)?;
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
        let status = unsafe {
            (self.driver.cuLaunchKernelEx)(&config, kernel.handle as CUfunction, arguments.as_mut_ptr(), null_mut())
        };
        self.check(status, "cuLaunchKernelEx")
    }
}

/// The host's side of a copy.
#[derive(Clone, Copy)]
enum Host {
    To(*mut u8),
    From(*const u8),
}

impl Host {
    fn further(self, bytes: usize) -> Self {
        match self {
            Host::To(at) => Host::To(at.wrapping_add(bytes)),
            Host::From(at) => Host::From(at.wrapping_add(bytes)),
        }
    }
}

/// Describes a copy of runs `pitch` apart on the device, dense on the host.
fn copy_2d(at: u64, pitch: usize, bytes: usize, host: Host, runs: usize) -> CUDA_MEMCPY2D {
    use sys::CUmemorytype as M;
    let (device, dense) = (M::CU_MEMORYTYPE_UNIFIED, M::CU_MEMORYTYPE_HOST);
    // Out of the device's memory; the other way is the same with its sides exchanged.
    let copy = CUDA_MEMCPY2D {
        srcXInBytes: 0,
        srcY: 0,
        srcMemoryType: device,
        srcHost: null(),
        srcDevice: at,
        srcArray: null_mut(),
        srcPitch: pitch,
        dstXInBytes: 0,
        dstY: 0,
        dstMemoryType: dense,
        dstHost: null_mut(),
        dstDevice: 0,
        dstArray: null_mut(),
        dstPitch: bytes,
        WidthInBytes: bytes,
        Height: runs,
    };
    match host {
        Host::To(to) => CUDA_MEMCPY2D { dstHost: to.cast(), ..copy },
        Host::From(from) => CUDA_MEMCPY2D {
            srcMemoryType: dense,
            srcHost: from.cast(),
            srcDevice: 0,
            srcPitch: bytes,
            dstMemoryType: device,
            dstDevice: at,
            dstPitch: pitch,
            ..copy
        },
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        if let (false, Ok(_inside)) = (self.side.is_null(), Inside::enter_any(self)) {
            // SAFETY: a stream of ours, used no more.
            unsafe { (self.driver.cuStreamDestroy_v2)(self.side) };
        }
        if let Some(device) = self.primary {
            // SAFETY: retained once, released once.
            unsafe { (self.driver.cuDevicePrimaryCtxRelease_v2)(device) };
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
        if let Ok(_inside) = Inside::enter_any(&self.device) {
            // Whatever still uses the memory ends first: the driver waits. cuCtxSynchronize would end other threads' captures.
            // SAFETY: allocated in this context, freed once.
            unsafe { (self.device.driver.cuMemFree_v2)(self.at) };
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
        if let Ok(_inside) = Inside::enter_any(&self.device) {
            // Waits, as for device memory.
            // SAFETY: allocated in this context, freed once.
            unsafe { (self.device.driver.cuMemFreeHost)(self.at) };
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
        let _inside = Inside::enter(device)?;
        let driver = device.driver;
        let (mut library, mut handle, mut function) = (null_mut(), null_mut(), null_mut());
        // SAFETY: a cubin in memory; the driver copies what it keeps. No options.
        let status = unsafe {
            (driver.cuLibraryLoadData)(
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
        device.check(status, "cuLibraryLoadData")?;
        let mut kernel = Kernel { device: device.clone(), library, handle, shared_limit: 0 };
        // SAFETY: a live library; the name ends with a zero.
        let status = unsafe { (driver.cuLibraryGetKernel)(&mut handle, library, c"replayssm_kernel".as_ptr()) };
        device.check(status, "cuLibraryGetKernel")?;
        kernel.handle = handle;
        // Loads it now, where loading is lazy.
        // SAFETY: a live kernel.
        device.check(unsafe { (driver.cuKernelGetFunction)(&mut function, handle) }, "cuKernelGetFunction")?;
        let mut ordinal = 0;
        // SAFETY: the out-parameter is a local.
        device.check(unsafe { (driver.cuCtxGetDevice)(&mut ordinal) }, "cuCtxGetDevice")?;
        let (mut fixed, attribute) = (0, CUfunction_attribute::CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES);
        // SAFETY: a live kernel; the out-parameter is a local.
        let status = unsafe { (driver.cuKernelGetAttribute)(&mut fixed, attribute, handle, ordinal) };
        device.check(status, "cuKernelGetAttribute")?;
        // What a launch asks for begins at a multiple of 128 bytes.
        kernel.shared_limit = device.shared_bytes.saturating_sub(fixed as u32) / 128 * 128;
        let attribute = CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
        // SAFETY: a live kernel.
        let status = unsafe { (driver.cuKernelSetAttribute)(attribute, kernel.shared_limit as i32, handle, ordinal) };
        device.check(status, "cuKernelSetAttribute")?;
        Ok(kernel)
    }
}

impl Drop for Kernel {
    fn drop(&mut self) {
        if let Ok(_inside) = Inside::enter_any(&self.device) {
            // This does not wait; the memory of each slots handle, which went before, did.
            // SAFETY: loaded once, unloaded once.
            unsafe { (self.device.driver.cuLibraryUnload)(self.library) };
        }
    }
}

// ---- Streams, graphs and events, for replayssm-bench: the library itself has its caller's ----

#[cfg(feature = "bench")]
pub use self::timing::{Event, Graph, Stream, version_and_cache};

#[cfg(feature = "bench")]
mod timing {
    use cudarc::driver::sys::{CUevent, CUgraph, CUgraphExec};

    use super::*;

    functions! {
        /// The driver's functions that time takes.
        Timing;
        as_bound: {
            cuStreamBeginCapture_v2(CUstream, CUstreamCaptureMode);
            cuStreamEndCapture(CUstream, *mut CUgraph);
            cuGraphInstantiateWithFlags(*mut CUgraphExec, CUgraph, u64);
            cuGraphLaunch(CUgraphExec, CUstream);
            cuGraphExecDestroy(CUgraphExec);
            cuGraphDestroy(CUgraph);
            cuEventCreate(*mut CUevent, c_uint);
            cuEventDestroy_v2(CUevent);
            cuEventRecord(CUevent, CUstream);
            cuEventSynchronize(CUevent);
        }
        // The bindings have its second version alone, which older drivers have not.
        with_numbers: {
            cuEventElapsedTime(*mut f32, CUevent, CUevent);
        }
        not_in_every_driver: {}
    }

    #[cfg(unix)]
    fn timing() -> Result<&'static Timing> {
        static TIMING: OnceLock<std::result::Result<Timing, String>> = OnceLock::new();
        let find = || {
            let library = Library::open(0).ok_or("no NVIDIA driver: libcuda.so.1 cannot be loaded")?;
            Timing::find(library).map_err(|name| format!("the NVIDIA driver is too old: it has no {name}"))
        };
        TIMING.get_or_init(find).as_ref().map_err(|why| Error::NoCuda(why.clone()))
    }

    #[cfg(not(unix))]
    fn timing() -> Result<&'static Timing> {
        Err(Error::NoCuda("the CUDA backend is for Linux".into()))
    }

    /// CUDA version that a driver serves, times a thousand, and bytes of a device's L2.
    pub fn version_and_cache(device: &Device) -> Result<(u32, Option<u32>)> {
        let (driver, mut version) = (device.driver, 0);
        // SAFETY: the version is a local.
        device.check(unsafe { (driver.cuDriverGetVersion)(&mut version) }, "cuDriverGetVersion")?;
        let bytes = driver.attribute_of(device.ordinal, CUdevice_attribute::CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE);
        Ok((version as u32, bytes.ok()))
    }

    /// A stream of our own.
    #[derive(Debug)]
    pub struct Stream {
        device: Arc<Device>,
        timing: &'static Timing,
        at: CUstream,
    }

    impl Stream {
        /// Creates it; it waits for no other.
        pub fn new(device: &Arc<Device>) -> Result<Self> {
            let (timing, _inside) = (timing()?, Inside::enter(device)?);
            let (driver, mut at) = (device.driver, null_mut());
            let flags = sys::CUstream_flags::CU_STREAM_NON_BLOCKING as u32;
            // SAFETY: the out-parameter is a local.
            device.check(unsafe { (driver.cuStreamCreate)(&mut at, flags) }, "cuStreamCreate")?;
            Ok(Stream { device: device.clone(), timing, at })
        }

        /// As the library takes it.
        pub fn handle(&self) -> usize {
            self.at as usize
        }

        /// Waits for all its work.
        pub fn wait(&self) -> Result<()> {
            let _inside = Inside::enter(&self.device)?;
            let driver = self.device.driver;
            // SAFETY: a stream of ours.
            self.device.check(unsafe { (driver.cuStreamSynchronize)(self.at) }, "cuStreamSynchronize")
        }

        /// From here on, work on it is captured.
        pub fn begin_capture(&self) -> Result<()> {
            let _inside = Inside::enter(&self.device)?;
            let mode = CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
            // SAFETY: a stream of ours.
            let status = unsafe { (self.timing.cuStreamBeginCapture_v2)(self.at, mode) };
            self.device.check(status, "cuStreamBeginCapture")
        }

        /// Ends the capture: a graph of all that came since.
        pub fn end_capture(&self) -> Result<Graph> {
            let _inside = Inside::enter(&self.device)?;
            let timing = self.timing;
            let (mut graph, mut exec) = (null_mut(), null_mut());
            // SAFETY: a stream of ours that captures; the out-parameter is a local.
            self.device.check(unsafe { (timing.cuStreamEndCapture)(self.at, &mut graph) }, "cuStreamEndCapture")?;
            // SAFETY: a live graph; the out-parameter is a local.
            let status = unsafe { (timing.cuGraphInstantiateWithFlags)(&mut exec, graph, 0) };
            // SAFETY: what was instantiated stays without it.
            unsafe { (timing.cuGraphDestroy)(graph) };
            self.device.check(status, "cuGraphInstantiate")?;
            Ok(Graph { device: self.device.clone(), timing, exec })
        }
    }

    impl Drop for Stream {
        fn drop(&mut self) {
            if let Ok(_inside) = Inside::enter_any(&self.device) {
                // SAFETY: a stream of ours, used no more.
                unsafe { (self.device.driver.cuStreamDestroy_v2)(self.at) };
            }
        }
    }

    /// Captured work.
    #[derive(Debug)]
    pub struct Graph {
        device: Arc<Device>,
        timing: &'static Timing,
        exec: CUgraphExec,
    }

    impl Graph {
        /// Enqueues it.
        pub fn launch(&self, stream: &Stream) -> Result<()> {
            let _inside = Inside::enter(&self.device)?;
            // SAFETY: both are live; whoever captured the graph keeps what it works on.
            let status = unsafe { (self.timing.cuGraphLaunch)(self.exec, stream.at) };
            self.device.check(status, "cuGraphLaunch")
        }
    }

    impl Drop for Graph {
        fn drop(&mut self) {
            if let Ok(_inside) = Inside::enter_any(&self.device) {
                // SAFETY: instantiated once, destroyed once; the driver lets a launch that runs end first.
                unsafe { (self.timing.cuGraphExecDestroy)(self.exec) };
            }
        }
    }

    /// A point of a stream, with a time.
    #[derive(Debug)]
    pub struct Event {
        device: Arc<Device>,
        timing: &'static Timing,
        at: CUevent,
    }

    impl Event {
        /// Creates it.
        pub fn new(device: &Arc<Device>) -> Result<Self> {
            let (timing, _inside) = (timing()?, Inside::enter(device)?);
            let mut at = null_mut();
            // SAFETY: the out-parameter is a local.
            device.driver.check(unsafe { (timing.cuEventCreate)(&mut at, 0) }, "cuEventCreate")?;
            Ok(Event { device: device.clone(), timing, at })
        }

        /// Becomes the point of a stream behind its work so far.
        pub fn record(&self, stream: &Stream) -> Result<()> {
            let _inside = Inside::enter(&self.device)?;
            // SAFETY: both are live.
            let status = unsafe { (self.timing.cuEventRecord)(self.at, stream.at) };
            self.device.check(status, "cuEventRecord")
        }

        /// Microseconds since another event; waits for this one.
        pub fn since(&self, begin: &Event) -> Result<f64> {
            let _inside = Inside::enter(&self.device)?;
            // SAFETY: a live event.
            self.device.check(unsafe { (self.timing.cuEventSynchronize)(self.at) }, "cuEventSynchronize")?;
            let mut ms = 0.0;
            // SAFETY: live events; the out-parameter is a local.
            let status = unsafe { (self.timing.cuEventElapsedTime)(&mut ms, begin.at, self.at) };
            self.device.check(status, "cuEventElapsedTime")?;
            Ok(f64::from(ms) * 1e3)
        }
    }

    impl Drop for Event {
        fn drop(&mut self) {
            if let Ok(_inside) = Inside::enter_any(&self.device) {
                // SAFETY: created once, destroyed once.
                unsafe { (self.timing.cuEventDestroy_v2)(self.at) };
            }
        }
    }
}
