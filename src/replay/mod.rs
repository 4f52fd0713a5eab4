//! What a replay step means: configuration, layout, the position rule, numerics and the backend interface, in safe Rust.

pub mod blob;
pub mod capacity;
pub mod config;
pub mod explain;
pub mod lanes;
pub mod launch;
pub mod layout;
pub mod numerics;
pub mod plan;
pub mod position;
pub mod save;
pub mod slots;
pub mod step;
pub mod vector;
