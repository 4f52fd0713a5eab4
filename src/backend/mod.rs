//! Where work is done. Each backend implements [`crate::replay::launch::Backend`].

pub mod cpu;
