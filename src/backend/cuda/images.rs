//! Compiled kernels, as the build embedded them.

use super::instances::Key;
use crate::error::{Error, Result};

/// One kernel for one architecture.
#[derive(Debug)]
pub struct Image {
    /// Number in [`Key::all`].
    pub key: usize,
    /// Compute capability times ten.
    pub arch: u32,
    /// Registers of a thread.
    pub registers: u32,
    /// Bytes of local memory of a thread.
    pub local_bytes: u32,
    /// Bytes of the cubin.
    pub size: usize,
    /// Where its compressed bytes lie.
    pub begin: usize,
    /// Where they end.
    pub end: usize,
}

/// All of them; none in a library for the CPU alone.
pub static IMAGES: &[Image] = include!(concat!(env!("OUT_DIR"), "/kernels.rs"));

static BYTES: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/kernels.bin"));

impl Image {
    /// The cubin.
    pub fn cubin(&self) -> Result<Vec<u8>> {
        let broken = || Error::Internal(format!("the kernel image of {} is broken", self.key));
        let bytes = BYTES.get(self.begin..self.end).ok_or_else(broken)?;
        let cubin = miniz_oxide::inflate::decompress_to_vec_with_limit(bytes, self.size).map_err(|_| broken())?;
        if cubin.len() == self.size { Ok(cubin) } else { Err(broken()) }
    }
}

/// The image of a kernel that runs on a device: of the same major architecture, and no newer minor one.
pub fn find(key: usize, arch: u32) -> Option<&'static Image> {
    IMAGES
        .iter()
        .filter(|image| image.key == key && image.arch / 10 == arch / 10 && image.arch <= arch)
        .max_by_key(|image| image.arch)
}

/// Architectures that there is code for.
pub fn architectures() -> Vec<u32> {
    let mut archs: Vec<_> = IMAGES.iter().map(|image| image.arch).collect();
    archs.sort_unstable();
    archs.dedup();
    archs
}

/// Number of a kernel in [`Key::all`].
pub fn number(keys: &[Key], key: Key) -> Option<usize> {
    keys.iter().position(|other| *other == key)
}
