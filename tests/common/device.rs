//! Where tests run, and how they reach memory that may be a device's.
//!
//! With `REPLAYSSM_TEST_BACKEND=cuda` in the environment, rigs are on the CUDA backend. Tests hand their own vectors to the library as
//! device arrays all the same: the whole heap of the process ([`Heap`]) is one block then, which the driver makes visible to the device
//! at its own addresses. What the library allocates is the device's: [`peek`], [`poke`] and [`fill`] reach it. Work is waited for by
//! [`sync`], which `common::ok` calls behind every call.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::ffi::{CStr, c_char, c_void};
use std::ptr::null_mut;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::*};

use replayssm::ffi::*;

const VARIABLE: &CStr = c"REPLAYSSM_TEST_BACKEND";

/// Whether the tests of this process run on the CUDA backend.
pub fn cuda() -> bool {
    static CUDA: OnceLock<bool> = OnceLock::new();
    *CUDA.get_or_init(|| match std::env::var(VARIABLE.to_str().expect("ASCII")).as_deref() {
        Ok("cuda") => true,
        Err(_) | Ok("" | "cpu") => false,
        Ok(other) => panic!("REPLAYSSM_TEST_BACKEND is {other}; expected cpu or cuda"),
    })
}

/// The backend that tests are for.
pub fn backend() -> i32 {
    if cuda() { REPLAYSSM_BACKEND_CUDA } else { REPLAYSSM_BACKEND_CPU }
}

/// Leaves a test on the CUDA backend: it is about threads, instruction sets, stacks or caches of a processor.
#[macro_export]
macro_rules! cpu_only {
    () => {
        if $crate::common::device::cuda() {
            fn here() {}
            let name = std::any::type_name_of_val(&here);
            let test = name.strip_suffix("::here").unwrap_or(name).rsplit("::").next().unwrap_or(name);
            println!("skipped: {test} because it is about the CPU");
            return;
        }
    };
}

/// A context on a backend. On CUDA, the heap is made visible to the device with the first one.
pub fn context(backend: i32, threads: i32) -> Result<*mut replayssm_context, String> {
    let mut context = null_mut();
    let n_threads = if backend == REPLAYSSM_BACKEND_CUDA { 0 } else { threads };
    let desc = crate::desc!(replayssm_context_desc { n_threads: n_threads, backend: backend });
    // SAFETY: the descriptor and the out-parameter are locals.
    let status = unsafe { replayssm_context_create(&desc, &mut context) };
    if status != REPLAYSSM_OK {
        return Err(super::message());
    }
    if backend == REPLAYSSM_BACKEND_CUDA {
        DRIVER.get_or_init(|| Driver::open().unwrap_or_else(|error| panic!("{error}")));
    }
    Ok(context)
}

thread_local! {
    static STREAM: Cell<*mut c_void> = const { Cell::new(null_mut()) };
}

/// A stream that all calls of a thread's rigs go to as long as this lives. On the CPU backend there is none.
pub struct OwnStream;

impl OwnStream {
    pub fn begin() -> Self {
        if let Some(driver) = DRIVER.get() {
            let mut stream = null_mut();
            driver.sync();
            // SAFETY: the out-parameter is a local.
            driver.check(unsafe { (driver.functions.stream)(&mut stream, NON_BLOCKING) }, "cuStreamCreate");
            STREAM.set(stream);
        }
        OwnStream
    }
}

impl Drop for OwnStream {
    fn drop(&mut self) {
        let stream = STREAM.replace(null_mut());
        if let Some(driver) = DRIVER.get().filter(|_| !stream.is_null()) {
            // SAFETY: the stream was made by `begin`, and its thread waits for its work behind every call.
            driver.check(unsafe { (driver.functions.end_stream)(stream) }, "cuStreamDestroy");
        }
    }
}

/// The stream of this thread's calls.
pub fn stream() -> replayssm_stream {
    STREAM.get().cast()
}

/// Waits for everything that was enqueued: by this thread, if it has a stream of its own.
pub fn sync() {
    let Some(driver) = DRIVER.get() else { return };
    let stream = STREAM.get();
    if stream.is_null() {
        driver.sync();
    } else {
        // SAFETY: the stream lives as long as its owner.
        driver.check(unsafe { (driver.functions.wait_stream)(stream) }, "cuStreamSynchronize");
    }
}

/// The driver, if an address is one of device memory, after a wait for all work.
fn device_of(address: usize) -> Option<&'static Driver> {
    let driver = DRIVER.get()?;
    driver.sync();
    driver.is_device(address).then_some(driver)
}

/// Bytes of the library's memory.
pub fn peek(address: usize, bytes: usize) -> Vec<u8> {
    let mut copy = vec![0; bytes];
    let to = copy.as_mut_ptr();
    match device_of(address) {
        Some(driver) => {
            // SAFETY: by the caller's promise, a part of a component; the vector is as long.
            let status = unsafe { (driver.functions.copy_to_host)(to.cast(), address as u64, bytes) };
            driver.check(status, "cuMemcpyDtoH");
        }
        // SAFETY: as above, and no call is running.
        None => unsafe { std::ptr::copy_nonoverlapping(address as *const u8, to, bytes) },
    }
    copy
}

/// Overwrites bytes of the library's memory.
pub fn poke(address: usize, bytes: &[u8]) {
    match device_of(address) {
        Some(driver) => {
            // SAFETY: by the caller's promise, a part of a component, as long as the slice.
            let status =
                unsafe { (driver.functions.copy_to_device)(address as u64, bytes.as_ptr().cast(), bytes.len()) };
            driver.check(status, "cuMemcpyHtoD");
            driver.sync();
        }
        // SAFETY: as above, and no call is running.
        None => unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), address as *mut u8, bytes.len()) },
    }
}

/// Overwrites `n` bytes of the library's memory with one value.
pub fn fill(address: usize, byte: u8, n: usize) {
    match device_of(address) {
        Some(driver) => {
            // SAFETY: by the caller's promise, a part of a component.
            driver.check(unsafe { (driver.functions.fill)(address as u64, byte, n) }, "cuMemsetD8");
            driver.sync();
        }
        // SAFETY: as above, and no call is running.
        None => unsafe { std::ptr::write_bytes(address as *mut u8, byte, n) },
    }
}

static DRIVER: OnceLock<Driver> = OnceLock::new();

macro_rules! functions {
    ($($name:ident: $symbol:literal($($argument:ty),*);)*) => {
        /// What is called of the driver.
        struct Functions {
            $($name: unsafe extern "C" fn($($argument),*) -> i32,)*
        }

        impl Functions {
            fn load(library: *mut c_void) -> Result<Self, String> {
                Ok(Functions {
                    $($name: {
                        // SAFETY: the library is open, the name ends with a zero.
                        let function = unsafe { libc::dlsym(library, $symbol.as_ptr()) };
                        if function.is_null() {
                            return Err(format!("the driver has no {}", $symbol.to_string_lossy()));
                        }
                        // SAFETY: the function has this type, by the driver's interface.
                        unsafe { std::mem::transmute::<*mut c_void, unsafe extern "C" fn($($argument),*) -> i32>(function) }
                    },)*
                })
            }
        }
    };
}

functions! {
    init: c"cuInit"(u32);
    error_name: c"cuGetErrorName"(i32, *mut *const c_char);
    device: c"cuDeviceGet"(*mut i32, i32);
    retain: c"cuDevicePrimaryCtxRetain"(*mut *mut c_void, i32);
    enter: c"cuCtxSetCurrent"(*mut c_void);
    wait: c"cuCtxSynchronize"();
    stream: c"cuStreamCreate"(*mut *mut c_void, u32);
    wait_stream: c"cuStreamSynchronize"(*mut c_void);
    end_stream: c"cuStreamDestroy_v2"(*mut c_void);
    register: c"cuMemHostRegister_v2"(*mut c_void, usize, u32);
    address_of: c"cuMemHostGetDevicePointer_v2"(*mut u64, *mut c_void, u32);
    attribute: c"cuPointerGetAttribute"(*mut c_void, i32, u64);
    copy_to_host: c"cuMemcpyDtoH_v2"(*mut c_void, u64, usize);
    copy_to_device: c"cuMemcpyHtoD_v2"(u64, *const c_void, usize);
    fill: c"cuMemsetD8_v2"(u64, u8, usize);
}

/// The driver, in the primary context of device 0: that of the library.
struct Driver {
    functions: Functions,
    context: *mut c_void,
}

// SAFETY: the driver may be called from any thread; each makes the context its own first.
unsafe impl Send for Driver {}
// SAFETY: as above.
unsafe impl Sync for Driver {}

/// Does not wait for the default stream.
const NON_BLOCKING: u32 = 1;
/// Portable, mapped.
const REGISTER: u32 = 1 | 2;
const MEMORY_TYPE: i32 = 2;
const TYPE_OF_DEVICE: u32 = 2;

impl Driver {
    fn open() -> Result<Self, String> {
        let (base, bytes) =
            HEAP.range().ok_or("the heap is not one block: the test program lacks its global allocator")?;
        // SAFETY: NVIDIA's library initialises itself, and is never closed.
        let library = unsafe { libc::dlopen(c"libcuda.so.1".as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
        if library.is_null() {
            return Err("libcuda.so.1 cannot be loaded".into());
        }
        let functions = Functions::load(library)?;
        let (mut device, mut context, mut seen, heap) = (0, null_mut(), 0, base as *mut c_void);
        let mut driver = Driver { functions, context };
        let f = &driver.functions;
        // SAFETY: out-parameters are locals; the block is the process's and stays.
        unsafe {
            driver.check((f.init)(0), "cuInit");
            driver.check((f.device)(&mut device, 0), "cuDeviceGet");
            driver.check((f.retain)(&mut context, device), "cuDevicePrimaryCtxRetain");
            driver.check((f.enter)(context), "cuCtxSetCurrent");
            driver.check((f.register)(heap, bytes, REGISTER), "cuMemHostRegister");
            driver.check((f.address_of)(&mut seen, heap, 0), "cuMemHostGetDevicePointer");
        }
        if seen != base as u64 {
            return Err("the device sees host memory at other addresses than the host does".into());
        }
        driver.context = context;
        Ok(driver)
    }

    fn check(&self, status: i32, call: &str) {
        if status == 0 {
            return;
        }
        let mut name = c"an unknown error".as_ptr();
        // SAFETY: the driver's names are static; an unknown one leaves the default or null.
        let name = unsafe {
            (self.functions.error_name)(status, &mut name);
            if name.is_null() { c"an unknown error" } else { CStr::from_ptr(name) }
        };
        panic!("{call}: {} ({status})", name.to_string_lossy());
    }

    /// Makes the context the calling thread's and waits for all work in it.
    fn sync(&self) {
        // SAFETY: the context lives as long as the process.
        self.check(unsafe { (self.functions.enter)(self.context) }, "cuCtxSetCurrent");
        // SAFETY: waits.
        self.check(unsafe { (self.functions.wait)() }, "cuCtxSynchronize");
    }

    fn is_device(&self, address: usize) -> bool {
        let mut kind = 0u32;
        // SAFETY: the out-parameter is a local of the attribute's type. Memory that the driver does not know is an error.
        let status = unsafe { (self.functions.attribute)((&raw mut kind).cast(), MEMORY_TYPE, address as u64) };
        status == 0 && kind == TYPE_OF_DEVICE
    }
}

/// The allocator of a test program. On the CUDA backend, or always, it serves from one block that a device can see; else it is the
/// system's.
pub struct Heap {
    always: bool,
}

impl Heap {
    /// One block if the tests are on the CUDA backend.
    pub const ON_CUDA: Heap = Heap { always: false };
    /// One block, for a program that uses both backends.
    pub const ALWAYS: Heap = Heap { always: true };

    fn arena(&self) -> Option<&'static Arena> {
        match HEAP.state.load(Acquire) {
            OFF => None,
            ON => Some(&HEAP),
            _ => HEAP.start(self.always),
        }
    }
}

// SAFETY: blocks are the system's, or parts of one block of the process's own that do not overlap.
unsafe impl GlobalAlloc for Heap {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        match self.arena() {
            Some(arena) => arena.allocate(layout),
            // SAFETY: the caller's promise is the system allocator's, here and below.
            None => unsafe { System.alloc(layout) },
        }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        let Some(arena) = self.arena() else {
            // SAFETY: as above.
            return unsafe { System.alloc_zeroed(layout) };
        };
        let at = arena.allocate(layout);
        if !at.is_null() {
            // SAFETY: a block of this size that is ours.
            unsafe { at.write_bytes(0, layout.size()) };
        }
        at
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        match self.arena() {
            Some(arena) => arena.free(at, layout),
            // SAFETY: as above.
            None => unsafe { System.dealloc(at, layout) },
        }
    }

    unsafe fn realloc(&self, at: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        let Some(arena) = self.arena() else {
            // SAFETY: as above.
            return unsafe { System.realloc(at, layout, size) };
        };
        let Ok(larger) = Layout::from_size_align(size, layout.align()) else { return null_mut() };
        if class(larger) == class(layout) {
            return at;
        }
        let to = arena.allocate(larger);
        if !to.is_null() {
            // SAFETY: two blocks of at least this size.
            unsafe { std::ptr::copy_nonoverlapping(at, to, size.min(layout.size())) };
            arena.free(at, layout);
        }
        to
    }
}

/// Blocks are powers of two, aligned to their size up to this; nothing may ask for more.
const MOST_ALIGNED: usize = 1 << 16;
const CLASSES: usize = 40;

/// The logarithm of a block's size.
fn class(layout: Layout) -> usize {
    layout.size().max(layout.align()).max(16).next_power_of_two().ilog2() as usize
}

const UNKNOWN: usize = 0;
const STARTING: usize = 1;
const OFF: usize = 2;
const ON: usize = 3;

/// One block of memory, and lists of the parts of it that were freed, by size.
struct Arena {
    state: AtomicUsize,
    begin: AtomicUsize,
    end: AtomicUsize,
    next: AtomicUsize,
    free: [List; CLASSES],
}

/// A list of free parts, each with the next one's address in it.
struct List {
    locked: AtomicBool,
    first: AtomicUsize,
}

static HEAP: Arena = Arena {
    state: AtomicUsize::new(UNKNOWN),
    begin: AtomicUsize::new(0),
    end: AtomicUsize::new(0),
    next: AtomicUsize::new(0),
    free: [const { List { locked: AtomicBool::new(false), first: AtomicUsize::new(0) } }; CLASSES],
};

/// A variable of the environment, without allocating.
fn variable(name: &CStr) -> Option<&'static CStr> {
    // SAFETY: the name ends with a zero; no test changes the environment.
    let value = unsafe { libc::getenv(name.as_ptr()) };
    // SAFETY: a variable's value ends with a zero.
    (!value.is_null()).then(|| unsafe { CStr::from_ptr(value) })
}

/// MiB of the block.
const SIZE: &CStr = c"REPLAYSSM_TEST_HEAP";
const DEFAULT_SIZE: usize = 3072;

impl Arena {
    /// Decides, with the first allocation of the process, where all of them come from.
    fn start(&'static self, always: bool) -> Option<&'static Arena> {
        if self.state.compare_exchange(UNKNOWN, STARTING, AcqRel, Acquire).is_ok() {
            let wanted = always || variable(VARIABLE).is_some_and(|value| value == c"cuda");
            self.state.store(if wanted && self.map() { ON } else { OFF }, Release);
        }
        while self.state.load(Acquire) == STARTING {
            std::thread::yield_now();
        }
        (self.state.load(Acquire) == ON).then_some(self)
    }

    fn map(&self) -> bool {
        let size = variable(SIZE).and_then(|value| value.to_str().ok()?.parse().ok()).unwrap_or(DEFAULT_SIZE) << 20;
        let access = libc::PROT_READ | libc::PROT_WRITE;
        let kind = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
        // SAFETY: fresh pages at an address of the system's choice.
        let at = unsafe { libc::mmap(null_mut(), size, access, kind, -1, 0) };
        if at == libc::MAP_FAILED {
            return false;
        }
        self.begin.store(at as usize, Relaxed);
        self.next.store(at as usize, Relaxed);
        self.end.store(at as usize + size, Relaxed);
        true
    }

    /// First byte and bytes.
    fn range(&self) -> Option<(usize, usize)> {
        let begin = self.begin.load(Relaxed);
        (self.state.load(Acquire) == ON).then(|| (begin, self.end.load(Relaxed) - begin))
    }

    fn allocate(&self, layout: Layout) -> *mut u8 {
        let class = class(layout);
        if layout.align() > MOST_ALIGNED || class >= CLASSES {
            return null_mut();
        }
        let recycled = self.free[class].pop();
        if recycled != 0 {
            return recycled as *mut u8;
        }
        let (size, end) = (1 << class, self.end.load(Relaxed));
        let place = |next: usize| next.next_multiple_of(size.min(MOST_ALIGNED));
        let fits = |next| Some(place(next) + size).filter(|&after| after <= end);
        self.next.fetch_update(Relaxed, Relaxed, fits).map_or(null_mut(), |next| place(next) as *mut u8)
    }

    fn free(&self, at: *mut u8, layout: Layout) {
        self.free[class(layout)].push(at as usize);
    }
}

impl List {
    fn with<T>(&self, change: impl FnOnce(&AtomicUsize) -> T) -> T {
        while self.locked.swap(true, Acquire) {
            std::thread::yield_now();
        }
        let result = change(&self.first);
        self.locked.store(false, Release);
        result
    }

    /// A free part, or 0.
    fn pop(&self) -> usize {
        self.with(|first| {
            let at = first.load(Relaxed);
            if at != 0 {
                // SAFETY: a free part, which holds the next one's address.
                first.store(unsafe { (at as *const usize).read() }, Relaxed);
            }
            at
        })
    }

    fn push(&self, at: usize) {
        self.with(|first| {
            // SAFETY: a part that nobody uses any more, of at least 16 bytes.
            unsafe { (at as *mut usize).write(first.load(Relaxed)) };
            first.store(at, Relaxed);
        });
    }
}
