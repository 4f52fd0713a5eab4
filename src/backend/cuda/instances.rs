//! The list of kernels: which sources of `cuda/` are compiled with which macros. Shared with build.rs, so it names nothing of the crate.

/// What a kernel does.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Work {
    /// Mamba-2: extend, EXACT steps, steps of more than 16 tokens.
    Mamba2Serial,
    /// Mamba-2: extends and EXACT steps of one token, on aligned memory.
    Mamba2Single,
    /// Mamba-2: FULL and HIGH steps.
    Mamba2Parallel,
    /// Mamba-2: FULL and HIGH steps of one token, on aligned memory.
    Mamba2Decode,
    /// Mamba-2: FULL and HIGH steps of up to eight tokens, on aligned memory.
    Mamba2Verify,
    /// Mamba-2: FULL and HIGH steps of up to eight tokens, a block a head, on aligned memory.
    Mamba2Direct,
    /// Mamba-2: the tail of an extend.
    Mamba2Tail,
    /// Mamba-2: states at held positions.
    Mamba2Fold,
    /// Delta rules, as for Mamba-2.
    DeltaSerial,
    /// Delta rules, as for Mamba-2.
    DeltaSingle,
    /// Delta rules, as for Mamba-2.
    DeltaParallel,
    /// Delta rules, as for Mamba-2.
    DeltaDecode,
    /// Delta rules, as for Mamba-2; with decays per column of up to four tokens.
    DeltaVerify,
    /// Delta rules, as for Mamba-2.
    DeltaDirect,
    /// Delta rules, as for Mamba-2.
    DeltaTail,
    /// Delta rules, as for Mamba-2.
    DeltaFold,
    /// Convolutions: step and extend.
    Conv1d,
    /// Positions of a batch's rows.
    Commit,
    /// Checkpoints and tags of a reset.
    Reset,
    /// Cursors of a reset, an import, a copy or a flush that is to come.
    Cursors,
    /// Checkpoints of an import.
    Import,
    /// Windows of convolutions at held positions.
    Window,
    /// Committed tokens taken back.
    Rewind,
    /// Memory of copies.
    Copy,
    /// Cursors for the caller.
    ReadCursors,
    /// Checks before a step or extend, and guards of a new pool.
    Inspect,
    /// A stream of reads, to compare with.
    BenchRead,
    /// A stream of reads and writes in place, to compare with.
    BenchUpdate,
    /// A matrix product in front of a layer.
    BenchProduct,
}

/// Kernels that only `replayssm-bench` has: with the feature `bench`.
pub const BENCH: [Work; 3] = [Work::BenchRead, Work::BenchUpdate, Work::BenchProduct];

/// Kernels of which there is one.
pub const SINGLE: [Work; 11] = [
    Work::Mamba2Tail,
    Work::Conv1d,
    Work::Commit,
    Work::Reset,
    Work::Cursors,
    Work::Import,
    Work::Window,
    Work::Rewind,
    Work::Copy,
    Work::ReadCursors,
    Work::Inspect,
];

/// Checkpoint formats by number, as `Format` has them.
pub const FORMATS: [(u8, &str); 4] = [(1, "split32"), (2, "f32"), (3, "bf16"), (4, "f16")];

/// Widest state of a tuned kernel and of a generic one, in columns.
pub const COLUMNS: [u16; 2] = [128, 256];

/// One kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Key {
    /// What it does.
    pub work: Work,
    /// Checkpoint format; 0 where it does not matter.
    pub format: u8,
    /// Whether the readout is HIGH.
    pub high: bool,
    /// Whether decays are per column.
    pub kda: bool,
    /// Columns of the state at most; 0 where they do not matter.
    pub columns: u16,
}

impl Key {
    /// Every kernel, in the order of the compiled images.
    pub fn all() -> Vec<Key> {
        let mut keys: Vec<_> = SINGLE.into_iter().map(Key::single).collect();
        for columns in COLUMNS {
            let tail = |kda| Key { work: Work::DeltaTail, format: 0, high: false, kda, columns };
            keys.extend([tail(false), tail(true)]);
            for (format, _) in FORMATS {
                let key = |work, high, kda| Key { work, format, high, kda, columns };
                for (serial, parallel, kda) in [
                    (Work::Mamba2Serial, Work::Mamba2Parallel, false),
                    (Work::DeltaSerial, Work::DeltaParallel, false),
                    (Work::DeltaSerial, Work::DeltaParallel, true),
                ] {
                    keys.extend([key(serial, false, kda), key(parallel, false, kda)]);
                    // A high plane, and the whole of a bf16 state, can be read out as bf16.
                    if matches!(format, 1 | 3) {
                        keys.push(key(parallel, true, kda));
                    }
                }
                if columns == COLUMNS[0] {
                    for (work, kda) in [
                        (Work::Mamba2Decode, false),
                        (Work::Mamba2Verify, false),
                        (Work::DeltaDecode, false),
                        (Work::DeltaVerify, false),
                        (Work::DeltaDecode, true),
                        (Work::DeltaVerify, true),
                        (Work::Mamba2Direct, false),
                        (Work::DeltaDirect, false),
                        (Work::DeltaDirect, true),
                    ] {
                        keys.extend(matches!(format, 1 | 3).then(|| key(work, true, kda)));
                        keys.extend(matches!(format, 1 | 2).then(|| key(work, false, kda)));
                    }
                    if matches!(format, 1..=3) {
                        keys.push(key(Work::Mamba2Single, false, false));
                        keys.extend([false, true].map(|kda| key(Work::DeltaSingle, false, kda)));
                    }
                }
                keys.push(key(Work::Mamba2Fold, false, false));
                keys.extend([key(Work::DeltaFold, false, false), key(Work::DeltaFold, false, true)]);
            }
        }
        if cfg!(feature = "bench") {
            keys.extend(BENCH.map(Key::single));
        }
        keys
    }

    /// The kernel of a work of which there is one.
    pub const fn single(work: Work) -> Key {
        Key { work, format: 0, high: false, kda: false, columns: 0 }
    }

    /// Whether there is code of it for an architecture: decoding needs copies that arrive at barriers.
    pub fn runs_on(&self, arch: u32) -> bool {
        let is_pipeline =
            matches!(self.work, Work::DeltaDecode | Work::DeltaVerify | Work::Mamba2Decode | Work::Mamba2Verify);
        !is_pipeline || (arch >= 90 && arch != PTX)
    }

    /// Whether there is PTX of it: of all but the tuned ones.
    pub fn has_ptx(&self) -> bool {
        self.columns != COLUMNS[0]
    }

    /// A name, as `mamba2_parallel_split32_high_128`.
    pub fn name(&self) -> String {
        let mut name = match self.work {
            Work::Mamba2Serial => "mamba2_serial",
            Work::Mamba2Single => "mamba2_single",
            Work::Mamba2Parallel => "mamba2_parallel",
            Work::Mamba2Decode => "mamba2_decode",
            Work::Mamba2Verify => "mamba2_verify",
            Work::Mamba2Direct => "mamba2_direct",
            Work::Mamba2Tail => "mamba2_tail",
            Work::Mamba2Fold => "mamba2_fold",
            Work::DeltaDecode if self.kda => "kda_decode",
            Work::DeltaDecode => "gdn_decode",
            Work::DeltaVerify if self.kda => "kda_verify",
            Work::DeltaVerify => "gdn_verify",
            Work::DeltaDirect if self.kda => "kda_direct",
            Work::DeltaDirect => "gdn_direct",
            Work::DeltaTail if self.kda => "kda_tail",
            Work::DeltaTail => "gdn_tail",
            Work::DeltaSerial if self.kda => "kda_serial",
            Work::DeltaSerial => "gdn_serial",
            Work::DeltaSingle if self.kda => "kda_single",
            Work::DeltaSingle => "gdn_single",
            Work::DeltaParallel if self.kda => "kda_parallel",
            Work::DeltaParallel => "gdn_parallel",
            Work::DeltaFold if self.kda => "kda_fold",
            Work::DeltaFold => "gdn_fold",
            Work::Conv1d => "conv1d",
            Work::Commit => "commit",
            Work::Reset => "reset",
            Work::Cursors => "cursors",
            Work::Import => "import",
            Work::Window => "window",
            Work::Rewind => "rewind",
            Work::Copy => "copy",
            Work::ReadCursors => "read_cursors",
            Work::Inspect => "inspect",
            Work::BenchRead => "bench_read",
            Work::BenchUpdate => "bench_update",
            Work::BenchProduct => "bench_product",
        }
        .to_owned();
        if let Some((_, format)) = FORMATS.iter().find(|(number, _)| *number == self.format) {
            name = format!("{name}_{format}");
        }
        if matches!(
            self.work,
            Work::Mamba2Parallel
                | Work::Mamba2Decode
                | Work::Mamba2Verify
                | Work::Mamba2Direct
                | Work::DeltaParallel
                | Work::DeltaDecode
                | Work::DeltaVerify
                | Work::DeltaDirect
        ) {
            name += if self.high { "_high" } else { "_full" };
        }
        if self.columns > 0 {
            name = format!("{name}_{}", self.columns);
        }
        name
    }

    /// The source, below `cuda/`.
    pub fn source(&self) -> &'static str {
        match self.work {
            Work::Mamba2Serial => "mamba2/serial.cu",
            Work::Mamba2Single => "mamba2/single.cu",
            Work::Mamba2Parallel => "mamba2/parallel.cu",
            Work::Mamba2Decode | Work::Mamba2Verify => "mamba2/decode.cu",
            Work::Mamba2Direct => "mamba2/direct.cu",
            Work::Mamba2Tail => "mamba2/tail.cu",
            Work::Mamba2Fold => "mamba2/fold.cu",
            Work::DeltaDecode | Work::DeltaVerify => "delta/decode.cu",
            Work::DeltaDirect => "delta/direct.cu",
            Work::DeltaTail => "delta/tail.cu",
            Work::DeltaSerial => "delta/serial.cu",
            Work::DeltaSingle => "delta/single.cu",
            Work::DeltaParallel => "delta/parallel.cu",
            Work::DeltaFold => "delta/fold.cu",
            Work::Conv1d => "conv1d/conv1d.cu",
            Work::Commit => "slots/commit.cu",
            Work::Reset => "slots/reset.cu",
            Work::Cursors => "slots/cursors.cu",
            Work::Import => "slots/import.cu",
            Work::Window => "slots/window.cu",
            Work::Rewind => "slots/rewind.cu",
            Work::Copy => "slots/copy.cu",
            Work::ReadCursors => "slots/read_cursors.cu",
            Work::Inspect => "slots/inspect.cu",
            Work::BenchRead => "bench/read.cu",
            Work::BenchUpdate => "bench/update.cu",
            Work::BenchProduct => "bench/product.cu",
        }
    }

    /// Macros of the source for an architecture.
    pub fn defines(&self, arch: u32) -> Vec<String> {
        if self.columns == 0 {
            return Vec::new();
        }
        let wide = self.columns > COLUMNS[0];
        // Two blocks of 256 threads fit a multiprocessor with 128 registers a thread.
        let fits = match self.work {
            Work::Mamba2Serial => self.format <= 2 && arch < 100,
            Work::DeltaSerial => self.format == 2 && arch < 100,
            Work::Mamba2Single | Work::Mamba2Direct => true,
            // Beside a fp32 tile decays per column find no registers there.
            Work::DeltaDirect => !self.kda || self.high || arch < 100,
            Work::DeltaSingle => self.kda || self.format != 2 || arch == 90,
            Work::Mamba2Parallel => arch < 100,
            Work::DeltaParallel => self.kda,
            _ => false,
        };
        let blocks = if fits && !wide { 2 } else { 1 };
        vec![
            format!("INSTANCE_FORMAT={}", self.format),
            format!("INSTANCE_HIGH={}", u8::from(self.high)),
            format!("INSTANCE_KDA={}", u8::from(self.kda)),
            format!("INSTANCE_SINGLE={}", u8::from(matches!(self.work, Work::Mamba2Decode | Work::DeltaDecode))),
            format!("INSTANCE_COLUMNS={}", self.columns),
            format!("INSTANCE_HALVES={}", if wide { 1 } else { 2 }),
            format!("INSTANCE_BLOCKS={blocks}"),
        ]
    }
}

/// What is compiled for, as compute capability times ten: 80 serves all 8.x, 90 all 9.x and so on; [`PTX`] later ones.
pub const ARCHITECTURES: [u32; 5] = [80, 90, 100, 120, PTX];

/// Stands for PTX, which drivers compile for architectures that there is no code for.
pub const PTX: u32 = 0;
