//! What the build has made of `cuda/`. Runs on every machine; where the library has no kernels, or there is no compiler, it says so.

#![allow(dead_code, missing_docs, reason = "the build's own sources are parts of this program")]

#[path = "../src/backend/cuda/instances.rs"]
mod instances;
#[path = "../build-support/kernels.rs"]
mod kernels;
#[path = "../build-support/nvrtc.rs"]
mod nvrtc;

use std::collections::HashMap;
use std::path::Path;

use instances::PTX;
use nvrtc::Nvrtc;
use replayssm::backend::cuda::instances::{COLUMNS, Key};
use replayssm::backend::cuda::{IMAGES, usage};

/// The most that a thread can have.
const MOST_REGISTERS: u32 = 255;
/// Tuned kernels and single ones, of each architecture.
const MOST_TUNED: usize = 120;

/// Leaves a test if there are no kernels.
macro_rules! needs_kernels {
    () => {
        if IMAGES.is_empty() {
            return println!("skipped: kernels because {}", why());
        }
    };
}

/// The library's own sentence.
fn why() -> String {
    use replayssm::ffi::*;
    // SAFETY: static texts, with a final zero.
    let info = unsafe { std::ffi::CStr::from_ptr(replayssm_build_info()) }.to_string_lossy().into_owned();
    format!("this library was built without them: {info}")
}

/// The compiler that the build uses.
fn compiler() -> Option<Nvrtc> {
    Nvrtc::find(Path::new(env!("CARGO_MANIFEST_DIR")))
        .map_err(|why| println!("skipped: compiling because there is {why}"))
        .ok()
}

fn architectures() -> Vec<u32> {
    replayssm::backend::cuda::architectures().into_iter().filter(|&arch| arch != PTX).collect()
}

#[test]
fn no_kernel_has_local_memory_or_too_many_registers() {
    needs_kernels!();
    for (name, arch, registers, local) in usage().into_iter().filter(|kernel| kernel.1 != PTX) {
        assert_eq!(local, 0, "{name} for sm_{arch}: bytes of local memory");
        assert!((8..=MOST_REGISTERS).contains(&registers), "{name} for sm_{arch}: {registers} registers");
    }
}

#[test]
fn every_kernel_is_there_for_every_architecture() {
    needs_kernels!();
    let keys = Key::all();
    for arch in architectures() {
        for (i, key) in keys.iter().enumerate() {
            let n = IMAGES.iter().filter(|image| image.key == i && image.arch == arch).count();
            assert_eq!(n, usize::from(key.runs_on(arch)), "images of {} for sm_{arch}", key.name());
        }
        let tuned = keys.iter().filter(|key| key.columns == 0 || key.columns == COLUMNS[0]).count();
        assert!(tuned <= MOST_TUNED, "{tuned} tuned and single kernels for sm_{arch}");
    }
    let mut names = HashMap::new();
    for key in &keys {
        assert!(names.insert(key.name(), *key).is_none(), "two kernels are called {}", key.name());
    }
}

/// Generic kernels, for architectures that come later.
#[test]
fn every_generic_kernel_has_ptx() {
    needs_kernels!();
    if IMAGES.iter().all(|image| image.arch != PTX) {
        return println!("skipped: PTX because this library was built for some architectures alone");
    }
    for (i, key) in Key::all().iter().enumerate() {
        let n = IMAGES.iter().filter(|image| image.key == i && image.arch == PTX).count();
        assert_eq!(n, usize::from(key.has_ptx()), "PTX of {}", key.name());
    }
}

// ---- Instructions ----

const MULTIPLY: u64 = 0x020;
const ADD: u64 = 0x021;
const FUSED: u64 = 0x023;

/// How often fp32 instructions stand in a cubin's code. Since sm_70, instructions have 16 bytes, their low 9 bits say what they do, and the 3
/// bits above where the operands come from.
fn count(cubin: &[u8], operation: u64) -> usize {
    let code = sections(cubin);
    assert!(!code.is_empty(), "a cubin without code");
    let instructions = code.iter().flat_map(|code| code.as_chunks::<16>().0);
    instructions.filter(|i| u64::from_le_bytes(i[..8].try_into().expect("half")) & 0x1FF == operation).count()
}

/// The executable sections of an ELF file.
fn sections(elf: &[u8]) -> Vec<&[u8]> {
    let number = |at: usize, bytes: usize| {
        let mut wide = [0; 8];
        wide[..bytes].copy_from_slice(&elf[at..at + bytes]);
        u64::from_le_bytes(wide) as usize
    };
    assert_eq!(&elf[..4], b"\x7FELF", "a cubin is an ELF file");
    let (first, size, n) = (number(0x28, 8), number(0x3A, 2), number(0x3C, 2));
    const EXECUTABLE: usize = 4;
    (0..n)
        .map(|i| first + i * size)
        .filter(|&at| number(at + 8, 8) & EXECUTABLE != 0)
        .map(|at| &elf[number(at + 0x18, 8)..][..number(at + 0x20, 8)])
        .collect()
}

/// Compiles a text as the build does, with some options changed.
fn compile(compiler: &Nvrtc, source: &str, arch: u32, change: impl Fn(&str) -> String) -> Vec<u8> {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("probe-{}-{arch}", std::process::id()));
    std::fs::create_dir_all(&folder).expect("a folder");
    let file = folder.join("probe.cu");
    std::fs::write(&file, source).expect("a file");
    let mut options: Vec<String> = kernels::OPTIONS.iter().map(|option| change(option)).collect();
    options.push(format!("--gpu-architecture=sm_{arch}"));
    let output = compiler.compile(&file, "probe.cu", &options, false).expect("a compilation");
    std::fs::remove_dir_all(&folder).expect("the folder");
    output.code.unwrap_or_else(|| panic!("{}", output.log))
}

/// With the build's options a product and a sum stay two instructions, each rounded: contraction would change results. The same source
/// with contraction on shows that this test can fail.
#[test]
fn the_builds_options_fuse_nothing() {
    needs_kernels!();
    let Some(compiler) = compiler() else { return };
    let source = "extern \"C\" __global__ void probe(float *x) { x[0] = x[1] * x[2] + x[3]; }";
    for arch in architectures() {
        let cubin = compile(&compiler, source, arch, str::to_owned);
        assert_eq!([MULTIPLY, ADD, FUSED].map(|o| count(&cubin, o)), [1, 1, 0], "sm_{arch}: product, sum, fused");
        let fused = compile(&compiler, source, arch, |option| option.replace("--fmad=false", "--fmad=true"));
        assert_eq!([MULTIPLY, ADD, FUSED].map(|o| count(&fused, o)), [0, 0, 1], "sm_{arch}: product, sum, fused");
    }
}

/// And the sources leave nothing to fuse: with contraction on, kernels are the same, byte by byte. The single ones, and a tuned one of each
/// work.
#[test]
fn the_sources_leave_nothing_to_fuse() {
    needs_kernels!();
    let Some(compiler) = compiler() else { return };
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("cuda");
    let archs = architectures();
    let all = Key::all();
    let wanted = |key: &Key| key.columns == 0 || (key.columns == COLUMNS[0] && key.format <= 1);
    let keys: Vec<_> = all.iter().enumerate().filter(|(_, key)| wanted(key)).collect();
    let next = std::sync::atomic::AtomicUsize::new(0);
    let check = |i: usize, key: &Key| {
        // Not every kernel is there for the first one.
        let Some(&arch) = archs.iter().find(|&&arch| key.runs_on(arch)) else { return };
        let image = IMAGES.iter().find(|image| image.key == i && image.arch == arch).expect("an image");
        let file = root.join(key.source());
        let mut options: Vec<_> = kernels::OPTIONS.iter().map(|o| o.replace("--fmad=false", "--fmad=true")).collect();
        options.push(format!("--gpu-architecture=sm_{arch}"));
        options.extend(key.defines(arch).iter().map(|define| format!("-D{define}")));
        options.push(format!("-I{}", file.parent().expect("a folder").display()));
        let output = compiler.compile(&file, key.source(), &options, false).expect("a compilation");
        let contracted = output.code.unwrap_or_else(|| panic!("{}", output.log));
        let cubin = image.cubin().expect("an image");
        assert_eq!(count(&contracted, FUSED), count(&cubin, FUSED), "{}: fused operations", key.name());
        assert!(contracted == cubin, "{}: contraction makes another kernel", key.name());
    };
    std::thread::scope(|scope| {
        for _ in 0..std::thread::available_parallelism().map_or(1, usize::from) {
            scope.spawn(|| {
                while let Some((i, key)) = keys.get(next.fetch_add(1, std::sync::atomic::Ordering::Relaxed)) {
                    check(*i, key);
                }
            });
        }
    });
}
