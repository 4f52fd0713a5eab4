use super::Cuda;
use crate::error::{Error, Result};
use crate::replay::launch::{CopyArgs, Exec, PoolLists, PoolView, SlotsView};
use std::sync::Arc;
pub(super) fn run(
    _: &Cuda,
    _: &SlotsView,
    _: &[Arc<PoolView>],
    _: &PoolLists,
    _: &PoolLists,
    _: &CopyArgs,
    _: &Exec,
) -> Result<()> {
    Err(Error::unsupported("copy", "CUDA", "CPU"))
}
