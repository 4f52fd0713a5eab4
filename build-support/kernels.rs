//! Compiles the kernels of `cuda/` into one file that the library embeds, and a table of what lies where in it.

use std::collections::{BTreeSet, HashMap};
use std::fmt::Write as _;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::time::Duration;
use std::{env, fs, thread};

use crate::instances::{ARCHITECTURES, Key, PTX};
use crate::nvrtc::Nvrtc;

/// What every kernel is compiled with. Contraction would change results.
pub const OPTIONS: [&str; 7] = [
    "-std=c++17",
    "-default-device",
    "--fmad=false",
    "--ftz=false",
    "--prec-div=true",
    "--prec-sqrt=true",
    "--ptxas-options=-v",
];

/// One kernel for one architecture.
struct Job {
    key: usize,
    arch: u32,
    /// Of the source, below `cuda/`.
    name: &'static str,
    file: PathBuf,
    options: Vec<String>,
    /// Compressed cubin, and what the compiler said of it.
    cached: PathBuf,
}

/// How the build treats CUDA: REPLAYSSM_CUDA=require|auto|off.
pub fn build(root: &Path, out: &Path) {
    println!("cargo::rerun-if-env-changed=REPLAYSSM_CUDA");
    println!("cargo::rerun-if-env-changed=REPLAYSSM_CUDA_ARCHS");
    println!("cargo::rerun-if-env-changed=REPLAYSSM_NVRTC");
    println!("cargo::rerun-if-env-changed=REPLAYSSM_KERNEL_CACHE");
    println!("cargo::rerun-if-env-changed=CUDA_HOME");
    println!("cargo::rerun-if-env-changed=CUDA_PATH");
    println!("cargo::rerun-if-changed=cuda");
    // A path that is not there would run the build script every time: `make` touches build.rs when it has fetched the compiler.
    println!("cargo::rerun-if-changed={}", if root.join("build/nvrtc").exists() { "build/nvrtc" } else { "build.rs" });
    let mode = env::var("REPLAYSSM_CUDA").unwrap_or_else(|_| "auto".into());
    let nvrtc = match mode.as_str() {
        "off" => Err("REPLAYSSM_CUDA=off".to_owned()),
        "auto" | "require" => Nvrtc::find(root),
        other => panic!("REPLAYSSM_CUDA is '{other}'; expected require, auto or off"),
    };
    let (summary, table, image) = match nvrtc {
        Ok(nvrtc) => compile(&nvrtc, root, out),
        Err(reason) if mode == "require" => panic!("REPLAYSSM_CUDA=require, and there is {reason}"),
        Err(reason) => {
            if mode == "auto" {
                println!("cargo::warning=built for the CPU alone: {reason}");
            }
            (format!("none ({})", reason.lines().next().unwrap_or_default()), "&[]".to_owned(), Vec::new())
        }
    };
    fs::write(out.join("kernels.bin"), image).expect("OUT_DIR can be written");
    fs::write(out.join("kernels.rs"), table).expect("OUT_DIR can be written");
    println!("cargo::rustc-env=REPLAYSSM_CUDA_SUMMARY={summary}");
}

fn architectures() -> Vec<u32> {
    let Ok(list) = env::var("REPLAYSSM_CUDA_ARCHS") else { return ARCHITECTURES.to_vec() };
    list.split([',', ';', ' '])
        .filter(|arch| !arch.is_empty())
        .map(|arch| {
            let number = if arch == "ptx" { Some(PTX) } else { arch.parse().ok().filter(|&arch| arch != PTX) };
            let known = number.filter(|arch| ARCHITECTURES.contains(arch));
            known.unwrap_or_else(|| {
                panic!("REPLAYSSM_CUDA_ARCHS has '{arch}'; expected some of 80, 90, 100, 120 and ptx")
            })
        })
        .collect()
}

fn compile(nvrtc: &Nvrtc, root: &Path, out: &Path) -> (String, String, Vec<u8>) {
    // All builds of a checkout share their kernels, and all that name one folder; elsewhere, all profiles of one target folder do.
    let cache = match env::var_os("REPLAYSSM_KERNEL_CACHE") {
        Some(folder) => PathBuf::from(folder),
        None if root.join("Makefile").exists() => root.join("build/kernels"),
        None => out.ancestors().nth(4).unwrap_or(out).join("kernels"),
    };
    // Sources may lie where nothing can be written.
    let cache = if fs::create_dir_all(&cache).is_ok() { cache } else { out.join("kernels") };
    fs::create_dir_all(&cache).expect("OUT_DIR can be written");
    let (keys, archs) = (Key::all(), architectures());
    let mut jobs = Vec::new();
    let mut sources = HashMap::new();
    for (number, key) in keys.iter().enumerate() {
        let file = root.join("cuda").join(key.source());
        let source = sources.entry(file.clone()).or_insert_with(|| with_includes(&file)).clone();
        for &arch in archs.iter().filter(|&&arch| if arch == PTX { key.has_ptx() } else { key.runs_on(arch) }) {
            let mut options: Vec<String> = OPTIONS.iter().map(|o| (*o).to_owned()).collect();
            options.push(match arch {
                // The oldest that knows all that the sources use; the driver compiles it for whatever comes later.
                PTX => "--gpu-architecture=compute_90".to_owned(),
                arch => format!("--gpu-architecture=sm_{arch}"),
            });
            options.extend(key.defines(arch).iter().map(|define| format!("-D{define}")));
            let mut hasher = DefaultHasher::new();
            (nvrtc.version, nvrtc.bytes, &source, &options).hash(&mut hasher);
            // Behind the hash: where the sources lie makes no difference.
            options.push(format!("-I{}", file.parent().expect("a file in a folder").display()));
            let cached = cache.join(format!("{}_{arch}_{:016x}", key.name(), hasher.finish()));
            jobs.push(Job { key: number, arch, name: key.source(), file: file.clone(), options, cached });
        }
    }
    compile_missing(nvrtc, &jobs, &keys);
    remove_old(&cache, &jobs);
    let (table, image) = table(&jobs, &keys);
    let names: Vec<_> =
        archs.iter().map(|&arch| if arch == PTX { "PTX".into() } else { format!("sm_{arch}") }).collect();
    let (major, minor) = nvrtc.version;
    (format!("{} kernels for {}, NVRTC {major}.{minor}", keys.len(), names.join(" ")), table, image)
}

/// A source with all that it includes, each file once.
fn with_includes(file: &Path) -> String {
    fn visit(file: &Path, seen: &mut BTreeSet<PathBuf>, text: &mut String) {
        let file = file.canonicalize().unwrap_or_else(|e| panic!("{}: {e}", file.display()));
        if !seen.insert(file.clone()) {
            return;
        }
        let source = fs::read_to_string(&file).unwrap_or_else(|e| panic!("{}: {e}", file.display()));
        for line in source.lines() {
            if let Some(name) = line.strip_prefix("#include \"").and_then(|rest| rest.split('"').next()) {
                visit(&file.parent().expect("a file in a folder").join(name), seen, text);
            }
        }
        text.push_str(&source);
    }
    let (mut seen, mut text) = (BTreeSet::new(), String::new());
    visit(file, &mut seen, &mut text);
    text
}

/// Compiles what is not in the cache, on as many threads as cargo allows.
fn compile_missing(nvrtc: &Nvrtc, jobs: &[Job], keys: &[Key]) {
    let missing: Vec<_> = jobs.iter().filter(|job| !job.cached.exists()).collect();
    let threads = env::var("NUM_JOBS").ok().and_then(|n| n.parse().ok()).unwrap_or(1usize).max(1);
    let (next, failures) = (AtomicUsize::new(0), Mutex::new(Vec::new()));
    thread::scope(|scope| {
        for _ in 0..threads.min(missing.len()) {
            scope.spawn(|| {
                while let Some(job) = missing.get(next.fetch_add(1, Relaxed)) {
                    if let Err(reason) = compile_one(nvrtc, job) {
                        let text = format!("{} for sm_{}: {reason}", keys[job.key].name(), job.arch);
                        failures.lock().expect("no thread panics").push(text);
                    }
                }
            });
        }
    });
    let failures = failures.into_inner().expect("no thread panics");
    assert!(failures.is_empty(), "kernels that did not compile:\n{}", failures.join("\n"));
}

fn compile_one(nvrtc: &Nvrtc, job: &Job) -> Result<(), String> {
    let output = nvrtc.compile(&job.file, job.name, &job.options, job.arch == PTX)?;
    let Some(cubin) = output.code else { return Err(output.log) };
    let usage = usage(&output.log)?;
    let mut bytes = format!("{} {} {}\n", usage.registers, usage.local, cubin.len()).into_bytes();
    bytes.extend(miniz_oxide::deflate::compress_to_vec(&cubin, 9));
    // Whole or not at all: a build that is stopped leaves no half of a file.
    let draft = job.cached.with_extension(format!("draft{}", std::process::id()));
    fs::write(&draft, bytes).and_then(|()| fs::rename(&draft, &job.cached)).map_err(|e| e.to_string())
}

struct Usage {
    registers: u32,
    local: u32,
}

/// Registers and bytes of local memory, from the assembler's report. Any other line of a log is an error.
fn usage(log: &str) -> Result<Usage, String> {
    let mut usage = Usage { registers: 0, local: 0 };
    let before = |line: &str, unit: &str| -> u32 {
        let number = line.split(unit).next().and_then(|rest| rest.split_whitespace().next_back()?.parse().ok());
        number.unwrap_or(0)
    };
    for line in log.lines().map(str::trim).filter(|line| !line.is_empty()) {
        let Some(info) = line.strip_prefix("ptxas").map(str::trim_start) else { return Err(log.to_owned()) };
        if info.contains("bytes stack frame") {
            usage.local = usage.local.max(before(info, " bytes stack frame"));
        } else if !info.starts_with("info") {
            return Err(log.to_owned());
        } else if info.contains(" registers") {
            usage.registers = usage.registers.max(before(info, " registers"));
        }
    }
    Ok(usage)
}

/// Takes kernels out of the cache that no build has made for a while.
fn remove_old(cache: &Path, jobs: &[Job]) {
    const WHILE: Duration = Duration::from_secs(14 * 24 * 3600);
    let kept: BTreeSet<_> = jobs.iter().map(|job| job.cached.clone()).collect();
    for entry in fs::read_dir(cache).into_iter().flatten().flatten() {
        let age = entry.metadata().and_then(|m| m.modified()).ok().and_then(|made| made.elapsed().ok());
        if !kept.contains(&entry.path()) && age.is_some_and(|age| age > WHILE) {
            let _ = fs::remove_file(entry.path());
        }
    }
}

fn table(jobs: &[Job], keys: &[Key]) -> (String, Vec<u8>) {
    let (mut table, mut image) = ("&[\n".to_owned(), Vec::new());
    for job in jobs {
        let bytes = fs::read(&job.cached).unwrap_or_else(|e| panic!("{}: {e}", job.cached.display()));
        let end = bytes.iter().position(|&b| b == b'\n').expect("a line of numbers in front");
        let line = String::from_utf8_lossy(&bytes[..end]).into_owned();
        let [registers, local, size] = line.split(' ').collect::<Vec<_>>()[..] else { panic!("three numbers") };
        let compressed = &bytes[end + 1..];
        writeln!(
            table,
            "    // {}\n    Image {{ key: {}, arch: {}, registers: {registers}, local_bytes: {local}, size: {size}, begin: {}, end: {} }},",
            keys[job.key].name(),
            job.key,
            job.arch,
            image.len(),
            image.len() + compressed.len()
        )
        .expect("strings grow");
        image.extend_from_slice(compressed);
    }
    table.push(']');
    (table, image)
}
