//! Prints a line for every kernel that the library embeds for one architecture: name, source below `cuda/`, architecture, bytes and hash of
//! the compiled image, macros. From it the emulated device is built, which knows a kernel by its image.

use replayssm::backend::cuda::IMAGES;
use replayssm::backend::cuda::instances::{Key, PTX};

/// FNV-1a.
fn hash(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0xCBF2_9CE4_8422_2325, |h, &b| (h ^ u64::from(b)).wrapping_mul(0x0100_0000_01B3))
}

fn main() {
    let archs = IMAGES.iter().map(|image| image.arch).filter(|&arch| arch != PTX);
    // Where there are several, the one that most devices have.
    let Some(arch) = archs.min_by_key(|arch| arch.abs_diff(90)) else { return };
    let keys = Key::all();
    for image in IMAGES.iter().filter(|image| image.arch == arch) {
        let (key, cubin) = (keys[image.key], image.cubin().expect("a whole image"));
        let (name, source, defines) = (key.name(), key.source(), key.defines(arch).join(" "));
        println!("{name} {source} {arch} {} {:016x} {defines}", cubin.len(), hash(&cubin));
    }
}
