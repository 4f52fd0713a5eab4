use super::Cuda;
use crate::error::{Error, Result};
use crate::replay::launch::{Batch, Exec, FlushArgs, PoolLists, PoolView, SlotsView, SnapshotArgs};
use std::sync::Arc;
pub(super) fn flush(
    _: &Cuda,
    _: &SlotsView,
    _: &[Arc<PoolView>],
    _: &PoolLists,
    _: &FlushArgs,
    _: &Exec,
) -> Result<()> {
    Err(Error::unsupported("flush", "CUDA", "CPU"))
}
pub(super) fn snapshot(
    _: &Cuda,
    _: &SlotsView,
    _: &[Arc<PoolView>],
    _: &Batch,
    _: &SnapshotArgs,
    _: &Exec,
) -> Result<()> {
    Err(Error::unsupported("snapshot", "CUDA", "CPU"))
}
