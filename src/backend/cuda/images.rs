//! Compiled kernels, as the build embedded them.

use miniz_oxide::inflate::decompress_slice_iter_to_slice;

use super::instances::{COLUMNS, Key, PTX};
use crate::error::{Error, Result};
use crate::memory::zeroed;

/// One kernel for one architecture.
#[derive(Debug)]
pub struct Image {
    /// Number in [`Key::all`].
    pub key: usize,
    /// Compute capability times ten; [`PTX`]: of no architecture in particular.
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
        let mut cubin = zeroed("the code of a kernel", self.size)?;
        let inflated = decompress_slice_iter_to_slice(&mut cubin, std::iter::once(bytes), false, true);
        // PTX is a text that ends with a zero; NVRTC's does.
        if inflated == Ok(self.size) { Ok(cubin) } else { Err(broken()) }
    }
}

/// The image of a kernel that runs on a device: of the same major architecture, and no newer minor one; or PTX of the generic kernel that
/// does the same.
pub fn find(keys: &[Key], key: Key, arch: u32) -> Option<&'static Image> {
    let of = |key| IMAGES.iter().filter(move |image| keys.get(image.key) == Some(&key));
    let is_for = |image: &&Image| image.arch / 10 == arch / 10 && image.arch <= arch;
    let compiled = of(key).filter(is_for).max_by_key(|image| image.arch);
    let generic = Key { columns: if key.columns > 0 { COLUMNS[1] } else { 0 }, ..key };
    compiled.or_else(|| of(generic).find(|image| image.arch == PTX && arch >= PTX_FROM))
}

/// The oldest architecture that PTX is compiled for.
const PTX_FROM: u32 = 90;

/// Architectures that there is code for.
pub fn architectures() -> Vec<u32> {
    let mut archs: Vec<_> = IMAGES.iter().map(|image| image.arch).collect();
    archs.sort_unstable();
    archs.dedup();
    archs
}
