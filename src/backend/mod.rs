//! Where work is done. Each backend implements [`crate::replay::launch::Backend`].

#![deny(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)]
#![cfg_attr(test, allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing))]

pub mod cpu;
pub mod cuda;
mod report;
