//! NVRTC, loaded from wherever it is: compiles one source to one cubin.

use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::path::{Path, PathBuf};
use std::{env, fs};

type Program = *mut c_void;

type Strings = *const *const c_char;
type Create = unsafe extern "C" fn(*mut Program, *const c_char, *const c_char, c_int, Strings, Strings) -> c_int;
type Destroy = unsafe extern "C" fn(*mut Program) -> c_int;
type Compile = unsafe extern "C" fn(Program, c_int, Strings) -> c_int;
type Size = unsafe extern "C" fn(Program, *mut usize) -> c_int;
type Get = unsafe extern "C" fn(Program, *mut c_char) -> c_int;
type Version = unsafe extern "C" fn(*mut c_int, *mut c_int) -> c_int;

/// A loaded compiler.
pub struct Nvrtc {
    create: Create,
    destroy: Destroy,
    compile: Compile,
    log: (Size, Get),
    cubin: (Size, Get),
    ptx: (Size, Get),
    /// As 12 and 9.
    pub version: (i32, i32),
    /// Size of its file, which tells patches of a version apart; 0 where the loader found it.
    pub bytes: u64,
}

/// What came of a compilation.
pub struct Output {
    /// A cubin, or PTX for a virtual architecture; none if there are errors.
    pub code: Option<Vec<u8>>,
    /// What the compiler said.
    pub log: String,
}

/// Where NVRTC may be: REPLAYSSM_NVRTC, the wheel that `make` fetches, a CUDA toolkit, the system's loader path.
fn candidates(root: &Path) -> Vec<PathBuf> {
    if let Some(path) = env::var_os("REPLAYSSM_NVRTC") {
        return vec![path.into()];
    }
    let mut list = vec![root.join("build/nvrtc/nvidia/cuda_nvrtc/lib/libnvrtc.so.12")];
    let toolkits = ["CUDA_HOME", "CUDA_PATH"].iter().filter_map(env::var_os).map(PathBuf::from);
    for toolkit in toolkits.chain(["/usr/local/cuda".into()]) {
        for lib in ["lib64", "lib", "targets/x86_64-linux/lib"] {
            // Code of 12.x loads on every driver that the library takes.
            for version in ["12", "13"] {
                list.push(toolkit.join(lib).join(format!("libnvrtc.so.{version}")));
            }
        }
    }
    list.retain(|path| path.exists());
    list.extend(["libnvrtc.so.12".into(), "libnvrtc.so.13".into()]);
    list
}

impl Nvrtc {
    /// The first usable compiler of version 12.8 or later; or what is wrong with each that was tried.
    pub fn find(root: &Path) -> Result<Self, String> {
        let mut tried = Vec::new();
        for path in candidates(root) {
            match Self::load(&path) {
                Ok(nvrtc) if nvrtc.version >= (12, 8) => return Ok(nvrtc),
                Ok(nvrtc) => tried.push(format!("{} is {}.{}", path.display(), nvrtc.version.0, nvrtc.version.1)),
                Err(reason) => tried.push(reason),
            }
        }
        Err(format!("no NVRTC of version 12.8 or later: {}", tried.join("; ")))
    }

    fn load(path: &Path) -> Result<Self, String> {
        let name = CString::new(path.to_string_lossy().as_bytes()).map_err(|e| e.to_string())?;
        // SAFETY: a library's initialisation runs; it is NVIDIA's.
        let library = unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
        if library.is_null() {
            // SAFETY: dlopen has failed, so there is a text.
            let text = unsafe { libc::dlerror() };
            // SAFETY: as above, and it ends with a zero.
            return Err(unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned());
        }
        macro_rules! function {
            ($name:literal, $ty:ty) => {{
                // SAFETY: the library is open, the name ends with a zero.
                let at = unsafe { libc::dlsym(library, concat!($name, "\0").as_ptr().cast()) };
                if at.is_null() {
                    return Err(format!("{} has no {}", path.display(), $name));
                }
                // SAFETY: the function has the type that NVRTC documents.
                unsafe { std::mem::transmute::<*mut c_void, $ty>(at) }
            }};
        }
        let version = function!("nvrtcVersion", Version);
        let (mut major, mut minor) = (0, 0);
        // SAFETY: both are locals.
        unsafe { version(&mut major, &mut minor) };
        Ok(Nvrtc {
            create: function!("nvrtcCreateProgram", Create),
            destroy: function!("nvrtcDestroyProgram", Destroy),
            compile: function!("nvrtcCompileProgram", Compile),
            log: (function!("nvrtcGetProgramLogSize", Size), function!("nvrtcGetProgramLog", Get)),
            cubin: (function!("nvrtcGetCUBINSize", Size), function!("nvrtcGetCUBIN", Get)),
            ptx: (function!("nvrtcGetPTXSize", Size), function!("nvrtcGetPTX", Get)),
            version: (major, minor),
            bytes: fs::metadata(path).map_or(0, |file| file.len()),
        })
    }

    /// Compiles a file, for a virtual architecture to PTX. Headers are found beside it.
    pub fn compile(&self, file: &Path, name: &str, options: &[String], ptx: bool) -> Result<Output, String> {
        let source = fs::read_to_string(file).map_err(|e| format!("{}: {e}", file.display()))?;
        let text = |s: String| CString::new(s).map_err(|e| e.to_string());
        let (source, name) = (text(source)?, text(name.to_owned())?);
        let options = options.iter().cloned().map(text).collect::<Result<Vec<_>, _>>()?;
        let pointers: Vec<_> = options.iter().map(|o| o.as_ptr()).collect();
        let mut program = std::ptr::null_mut();
        // SAFETY: all pointers live until the call returns, and so below.
        if unsafe { (self.create)(&mut program, source.as_ptr(), name.as_ptr(), 0, std::ptr::null(), std::ptr::null()) }
            != 0
        {
            return Err("nvrtcCreateProgram failed".into());
        }
        // SAFETY: as above.
        let status = unsafe { (self.compile)(program, pointers.len() as c_int, pointers.as_ptr()) };
        let log = bytes(program, self.log);
        let code = (status == 0).then(|| bytes(program, if ptx { self.ptx } else { self.cubin }));
        // SAFETY: the program is not used any more.
        unsafe { (self.destroy)(&mut program) };
        let log = String::from_utf8_lossy(&log).trim_end_matches('\0').to_owned();
        Ok(Output { code, log })
    }
}

fn bytes(program: Program, (size, get): (Size, Get)) -> Vec<u8> {
    let mut n = 0;
    // SAFETY: a live program; n is a local.
    unsafe { size(program, &mut n) };
    let mut bytes = vec![0u8; n];
    // SAFETY: as many bytes as it asked for.
    unsafe { get(program, bytes.as_mut_ptr().cast()) };
    bytes
}
