//! The list of kernels: which sources of `cuda/` are compiled with which macros. Shared with build.rs, so it names nothing of the crate.

/// What a kernel does.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Work {
    /// Mamba-2: extend, EXACT steps, steps of more than 16 tokens.
    Mamba2Serial,
    /// Mamba-2: FULL and HIGH steps.
    Mamba2Parallel,
}

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
        let mut keys = Vec::new();
        for columns in COLUMNS {
            for (format, _) in FORMATS {
                keys.push(Key { work: Work::Mamba2Serial, format, high: false, kda: false, columns });
                // A high plane, and the whole of a bf16 state, can be read out as bf16.
                for high in [false, true] {
                    if !high || matches!(format, 1 | 3) {
                        keys.push(Key { work: Work::Mamba2Parallel, format, high, kda: false, columns });
                    }
                }
            }
        }
        keys
    }

    /// A name, as `mamba2_parallel_split32_high_128`.
    pub fn name(&self) -> String {
        let mut name = match self.work {
            Work::Mamba2Serial => "mamba2_serial",
            Work::Mamba2Parallel => "mamba2_parallel",
        }
        .to_owned();
        if let Some((_, format)) = FORMATS.iter().find(|(number, _)| *number == self.format) {
            name = format!("{name}_{format}");
        }
        if self.work == Work::Mamba2Parallel {
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
            Work::Mamba2Parallel => "mamba2/parallel.cu",
        }
    }

    /// Macros of the source.
    pub fn defines(&self) -> Vec<String> {
        let wide = self.columns > 128;
        // Two blocks of 256 threads fit a multiprocessor with 128 registers a thread.
        let blocks = if self.work == Work::Mamba2Serial && !wide && self.format <= 2 { 2 } else { 1 };
        vec![
            format!("INSTANCE_FORMAT={}", self.format),
            format!("INSTANCE_HIGH={}", u8::from(self.high)),
            format!("INSTANCE_KDA={}", u8::from(self.kda)),
            format!("INSTANCE_COLUMNS={}", self.columns),
            format!("INSTANCE_HALVES={}", if wide { 1 } else { 2 }),
            format!("INSTANCE_BLOCKS={blocks}"),
        ]
    }
}

/// Architectures that are compiled for, as compute capability times ten: 80 serves all 8.x, 90 all 9.x and so on.
pub const ARCHITECTURES: [u32; 4] = [80, 90, 100, 120];
