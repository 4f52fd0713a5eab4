//! The CUDA driver for tests that only make sense on it: contexts, streams, graphs, and memory of exactly the bytes that are asked for, so
//! that compute-sanitizer sees what is read or written beside it.

use std::ffi::{CStr, c_char, c_void};
use std::ptr::null_mut;
use std::sync::OnceLock;

use replayssm::ffi::*;

type Handle = *mut c_void;
type Out = *mut *mut c_void;

macro_rules! functions {
    ($($name:ident: $symbol:literal($($argument:ty),*);)*) => {
        /// What is called of the driver; [`Functions::has`] tells whether it has all that newer drivers do.
        pub struct Functions {
            $(pub $name: unsafe extern "C" fn($($argument),*) -> i32,)*
            missing: Option<&'static CStr>,
        }

        impl Functions {
            fn load(library: *mut c_void) -> Self {
                let mut missing = None;
                Functions {
                    $($name: {
                        // SAFETY: the library is open, the name ends with a zero.
                        let mut function = unsafe { libc::dlsym(library, $symbol.as_ptr()) };
                        if function.is_null() {
                            missing = Some($symbol);
                            // SAFETY: as above; this one every driver has. Nobody calls it by the other's name.
                            function = unsafe { libc::dlsym(library, c"cuInit".as_ptr()) };
                        }
                        // SAFETY: the function has this type, by the driver's interface.
                        unsafe { std::mem::transmute::<*mut c_void, unsafe extern "C" fn($($argument),*) -> i32>(function) }
                    },)*
                    missing,
                }
            }
        }
    };
}

functions! {
    init: c"cuInit"(u32);
    error_name: c"cuGetErrorName"(i32, *mut *const c_char);
    driver_version: c"cuDriverGetVersion"(*mut i32);
    device: c"cuDeviceGet"(*mut i32, i32);
    device_count: c"cuDeviceGetCount"(*mut i32);
    retain: c"cuDevicePrimaryCtxRetain"(Out, i32);
    context_create: c"cuCtxCreate_v2"(Out, u32, i32);
    context_destroy: c"cuCtxDestroy_v2"(Handle);
    set_current: c"cuCtxSetCurrent"(Handle);
    get_current: c"cuCtxGetCurrent"(Out);
    synchronize: c"cuCtxSynchronize"();
    exchange_capture_mode: c"cuThreadExchangeStreamCaptureMode"(*mut i32);
    allocate: c"cuMemAlloc_v2"(*mut u64, usize);
    free: c"cuMemFree_v2"(u64);
    memory_info: c"cuMemGetInfo_v2"(*mut usize, *mut usize);
    copy_to_host: c"cuMemcpyDtoH_v2"(*mut c_void, u64, usize);
    copy_to_device: c"cuMemcpyHtoD_v2"(u64, *const c_void, usize);
    fill: c"cuMemsetD8_v2"(u64, u8, usize);
    stream_create: c"cuStreamCreate"(Out, u32);
    stream_destroy: c"cuStreamDestroy_v2"(Handle);
    stream_synchronize: c"cuStreamSynchronize"(Handle);
    stream_query: c"cuStreamQuery"(Handle);
    stream_context: c"cuStreamGetCtx"(Handle, Out);
    capture_begin: c"cuStreamBeginCapture_v2"(Handle, i32);
    capture_end: c"cuStreamEndCapture"(Handle, Out);
    instantiate: c"cuGraphInstantiateWithFlags"(Out, Handle, u64);
    graph_launch: c"cuGraphLaunch"(Handle, Handle);
    graph_destroy: c"cuGraphDestroy"(Handle);
    executable_destroy: c"cuGraphExecDestroy"(Handle);
    module_load: c"cuModuleLoadData"(Out, *const c_void);
    module_function: c"cuModuleGetFunction"(Out, Handle, *const c_char);
    launch: c"cuLaunchKernelEx"(*const LaunchConfig, Handle, *mut *mut c_void, Out);
}

/// CUlaunchConfig.
#[repr(C)]
pub struct LaunchConfig {
    grid: [u32; 3],
    block: [u32; 3],
    shared_bytes: u32,
    stream: Handle,
    attributes: *mut LaunchAttribute,
    n_attributes: u32,
}

/// CUlaunchAttribute.
#[repr(C, align(8))]
pub struct LaunchAttribute {
    id: i32,
    pad: u32,
    value: [u32; 16],
}

/// CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION.
const DEPENDENT: i32 = 6;

/// CU_STREAM_NON_BLOCKING: a stream that does not wait for the default one.
const NON_BLOCKING: u32 = 1;

/// A context of device 0, and the driver.
#[derive(Clone, Copy)]
pub struct Gpu {
    pub f: &'static Functions,
    /// The driver's library, for what not every driver has.
    pub library: usize,
    pub context: usize,
    pub device: i32,
}

/// The primary context of device 0, or the library's own sentence why there is no CUDA.
pub fn primary() -> Result<Gpu, String> {
    static GPU: OnceLock<Result<Gpu, String>> = OnceLock::new();
    GPU.get_or_init(|| {
        let desc = crate::desc!(replayssm_context_desc { backend: REPLAYSSM_BACKEND_CUDA });
        let mut context = null_mut();
        // SAFETY: the descriptor and the out-parameter are locals.
        if unsafe { replayssm_context_create(&desc, &mut context) } != REPLAYSSM_OK {
            return Err(super::message());
        }
        replayssm_context_destroy(context);
        // SAFETY: NVIDIA's library initialises itself, and is never closed.
        let library = unsafe { libc::dlopen(c"libcuda.so.1".as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
        assert!(!library.is_null(), "the library has loaded it already");
        let functions = Functions::load(library);
        if let Some(name) = functions.missing {
            return Err(format!("the driver has no {}", name.to_string_lossy()));
        }
        let f: &'static Functions = Box::leak(Box::new(functions));
        let gpu = Gpu { f, library: library as usize, context: 0, device: 0 };
        let (mut context, mut device) = (null_mut(), 0);
        // SAFETY: out-parameters are locals.
        unsafe {
            gpu.check((f.init)(0), "cuInit");
            gpu.check((f.device)(&mut device, 0), "cuDeviceGet");
            gpu.check((f.retain)(&mut context, device), "cuDevicePrimaryCtxRetain");
        }
        Ok(Gpu { context: context as usize, device, ..gpu })
    })
    .clone()
}

impl Gpu {
    pub fn name_of(&self, status: i32) -> String {
        let mut name = std::ptr::null();
        // SAFETY: the driver's names are static; an unknown status leaves null.
        unsafe { (self.f.error_name)(status, &mut name) };
        // SAFETY: as above.
        if name.is_null() { status.to_string() } else { unsafe { CStr::from_ptr(name) }.to_string_lossy().into_owned() }
    }

    #[track_caller]
    pub fn check(&self, status: i32, call: &str) {
        assert!(status == 0, "{call}: {}", self.name_of(status));
    }

    /// A function that not every driver has.
    pub fn symbol(&self, name: &CStr) -> Option<*mut c_void> {
        // SAFETY: the library is open, the name ends with a zero.
        let at = unsafe { libc::dlsym(self.library as *mut c_void, name.as_ptr()) };
        (!at.is_null()).then_some(at)
    }

    /// Another context of the device, which becomes the calling thread's.
    pub fn another(&self) -> Gpu {
        let mut context = null_mut();
        // SAFETY: the out-parameter is a local.
        self.check(unsafe { (self.f.context_create)(&mut context, 0, self.device) }, "cuCtxCreate");
        Gpu { context: context as usize, ..*self }
    }

    /// Makes the context the calling thread's.
    pub fn enter(&self) {
        // SAFETY: the context lives as long as the process.
        self.check(unsafe { (self.f.set_current)(self.context as Handle) }, "cuCtxSetCurrent");
    }

    /// Leaves the calling thread without a context. There may be several, one upon the other.
    pub fn leave(&self) {
        while self.current() != 0 {
            // SAFETY: none is a context.
            self.check(unsafe { (self.f.set_current)(null_mut()) }, "cuCtxSetCurrent");
        }
    }

    /// The calling thread's context; 0: none.
    pub fn current(&self) -> usize {
        let mut context = null_mut();
        // SAFETY: the out-parameter is a local.
        self.check(unsafe { (self.f.get_current)(&mut context) }, "cuCtxGetCurrent");
        context as usize
    }

    /// Waits for all work of the context.
    #[track_caller]
    pub fn sync(&self) {
        self.enter();
        // SAFETY: waits.
        self.check(unsafe { (self.f.synchronize)() }, "cuCtxSynchronize");
    }

    /// Bytes that nobody has.
    pub fn free_bytes(&self) -> usize {
        self.enter();
        let (mut free, mut total) = (0, 0);
        // SAFETY: out-parameters are locals.
        self.check(unsafe { (self.f.memory_info)(&mut free, &mut total) }, "cuMemGetInfo");
        free
    }

    /// The thread's capture mode becomes another; what it was.
    pub fn exchange_capture_mode(&self, mode: i32) -> i32 {
        let mut mode = mode;
        // SAFETY: exchanges a local with the thread's mode.
        self.check(unsafe { (self.f.exchange_capture_mode)(&mut mode) }, "cuThreadExchangeStreamCaptureMode");
        mode
    }

    /// A stream of its own.
    pub fn stream(&self) -> Stream {
        self.enter();
        let mut at = null_mut();
        // SAFETY: the out-parameter is a local.
        self.check(unsafe { (self.f.stream_create)(&mut at, NON_BLOCKING) }, "cuStreamCreate");
        Stream { gpu: *self, at: at as usize }
    }

    /// The kernel of a PTX text.
    pub fn kernel(&self, ptx: &CStr, name: &CStr) -> usize {
        self.enter();
        let (mut module, mut function) = (null_mut(), null_mut());
        // SAFETY: the texts end with a zero; out-parameters are locals.
        unsafe {
            self.check((self.f.module_load)(&mut module, ptx.as_ptr().cast()), "cuModuleLoadData");
            self.check((self.f.module_function)(&mut function, module, name.as_ptr()), "cuModuleGetFunction");
        }
        function as usize
    }

    /// Enqueues a kernel of blocks of 256 threads whose parameters are 64-bit.
    pub fn launch(&self, function: usize, stream: usize, blocks: u32, dependent: bool, parameters: &[u64]) {
        let mut attribute = LaunchAttribute { id: DEPENDENT, pad: 0, value: [0; 16] };
        attribute.value[0] = 1;
        let config = LaunchConfig {
            grid: [blocks, 1, 1],
            block: [256, 1, 1],
            shared_bytes: 0,
            stream: stream as Handle,
            attributes: &mut attribute,
            n_attributes: dependent.into(),
        };
        let mut pointers: Vec<*mut c_void> =
            parameters.iter().map(|p| std::ptr::from_ref(p).cast_mut().cast()).collect();
        self.enter();
        // SAFETY: a kernel of as many parameters; the driver copies them before it returns.
        let status = unsafe { (self.f.launch)(&config, function as Handle, pointers.as_mut_ptr(), null_mut()) };
        self.check(status, "cuLaunchKernelEx");
    }
}

/// A stream that does not wait for the default one.
pub struct Stream {
    gpu: Gpu,
    pub at: usize,
}

impl Stream {
    /// A stream that somebody else has made.
    pub fn of(gpu: Gpu, at: usize) -> Self {
        Stream { gpu, at }
    }

    #[track_caller]
    pub fn sync(&self) {
        // SAFETY: a live stream.
        self.gpu.check(unsafe { (self.gpu.f.stream_synchronize)(self.at as Handle) }, "cuStreamSynchronize");
    }

    /// Whether all of its work has run.
    pub fn is_idle(&self) -> bool {
        // SAFETY: a live stream.
        unsafe { (self.gpu.f.stream_query)(self.at as Handle) == 0 }
    }

    /// The graph of what `enqueue` puts on the stream, captured in global mode.
    pub fn capture(&self, enqueue: impl FnOnce()) -> Graph {
        let f = self.gpu.f;
        self.gpu.enter();
        // SAFETY: a live stream that captures nothing yet.
        self.gpu.check(unsafe { (f.capture_begin)(self.at as Handle, 0) }, "cuStreamBeginCapture");
        enqueue();
        self.gpu.enter();
        let (mut graph, mut executable) = (null_mut(), null_mut());
        // SAFETY: out-parameters are locals.
        unsafe {
            self.gpu.check((f.capture_end)(self.at as Handle, &mut graph), "cuStreamEndCapture");
            self.gpu.check((f.instantiate)(&mut executable, graph, 0), "cuGraphInstantiate");
            self.gpu.check((f.graph_destroy)(graph), "cuGraphDestroy");
        }
        Graph { gpu: self.gpu, at: executable as usize }
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        self.gpu.enter();
        // SAFETY: destroyed once; its work runs to its end.
        unsafe { (self.gpu.f.stream_destroy)(self.at as Handle) };
    }
}

/// What was captured, ready to run.
pub struct Graph {
    gpu: Gpu,
    at: usize,
}

impl Graph {
    pub fn launch(&self, stream: &Stream) {
        self.gpu.enter();
        // SAFETY: both live.
        let status = unsafe { (self.gpu.f.graph_launch)(self.at as Handle, stream.at as Handle) };
        self.gpu.check(status, "cuGraphLaunch");
    }
}

impl Drop for Graph {
    fn drop(&mut self) {
        self.gpu.enter();
        // SAFETY: destroyed once.
        unsafe { (self.gpu.f.executable_destroy)(self.at as Handle) };
    }
}

/// Memory of exactly so many bytes, in a context or on the host.
pub struct Block {
    gpu: Option<Gpu>,
    pub at: usize,
    pub bytes: usize,
    host: Vec<u64>,
}

impl Block {
    /// All ones: NaN of every type, and ids that are padding.
    pub fn new(gpu: Option<Gpu>, bytes: usize) -> Self {
        let mut host = vec![];
        let at = match gpu {
            None => {
                host = vec![u64::MAX; bytes.div_ceil(8).max(1)];
                host.as_mut_ptr() as usize
            }
            Some(gpu) => {
                gpu.enter();
                let mut at = 0;
                // SAFETY: the out-parameter is a local.
                gpu.check(unsafe { (gpu.f.allocate)(&mut at, bytes.max(1)) }, "cuMemAlloc");
                at as usize
            }
        };
        let block = Block { gpu, at, bytes, host };
        block.fill(0xFF);
        block
    }

    pub fn of(gpu: Option<Gpu>, bytes: &[u8]) -> Self {
        let block = Block::new(gpu, bytes.len());
        block.write(bytes);
        block
    }

    pub fn fill(&self, byte: u8) {
        fill(self.gpu, self.at, byte, self.bytes);
    }

    /// Overwrites its first bytes; no work may use them.
    pub fn write(&self, bytes: &[u8]) {
        assert!(bytes.len() <= self.bytes);
        write(self.gpu, self.at, bytes);
    }

    /// All bytes, when no work writes them.
    pub fn read(&self) -> Vec<u8> {
        read(self.gpu, self.at, self.bytes)
    }

    /// An address in it.
    pub fn part(&self, first: usize) -> *mut c_void {
        (self.at + first) as *mut c_void
    }
}

impl Drop for Block {
    fn drop(&mut self) {
        if let Some(gpu) = self.gpu {
            gpu.enter();
            // SAFETY: freed once, when its work has run.
            unsafe { (gpu.f.free)(self.at as u64) };
        }
    }
}

pub fn read(gpu: Option<Gpu>, at: usize, bytes: usize) -> Vec<u8> {
    let mut copy = vec![0; bytes];
    let to = copy.as_mut_ptr();
    match gpu {
        // SAFETY: by the caller's promise, memory of so many bytes; the vector is as long.
        None => unsafe { std::ptr::copy_nonoverlapping(at as *const u8, to, bytes) },
        Some(gpu) => {
            gpu.enter();
            // SAFETY: as above.
            gpu.check(unsafe { (gpu.f.copy_to_host)(to.cast(), at as u64, bytes) }, "cuMemcpyDtoH");
        }
    }
    copy
}

pub fn write(gpu: Option<Gpu>, at: usize, bytes: &[u8]) {
    match gpu {
        // SAFETY: by the caller's promise, memory of so many bytes.
        None => unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), at as *mut u8, bytes.len()) },
        Some(gpu) => {
            gpu.enter();
            // SAFETY: as above.
            let status = unsafe { (gpu.f.copy_to_device)(at as u64, bytes.as_ptr().cast(), bytes.len()) };
            gpu.check(status, "cuMemcpyHtoD");
            // Small copies may still be on their way, and other streams do not wait for the default one.
            // SAFETY: waits.
            gpu.check(unsafe { (gpu.f.stream_synchronize)(null_mut()) }, "cuStreamSynchronize");
        }
    }
}

pub fn fill(gpu: Option<Gpu>, at: usize, byte: u8, bytes: usize) {
    match gpu {
        // SAFETY: by the caller's promise, memory of so many bytes.
        None => unsafe { std::ptr::write_bytes(at as *mut u8, byte, bytes) },
        Some(gpu) => {
            gpu.enter();
            // SAFETY: as above, and waits.
            unsafe {
                gpu.check((gpu.f.fill)(at as u64, byte, bytes), "cuMemsetD8");
                gpu.check((gpu.f.stream_synchronize)(null_mut()), "cuStreamSynchronize");
            }
        }
    }
}
