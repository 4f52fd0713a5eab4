//! Saves a slot with its ring to a blob in host memory, and restores it.
//!
//! Everything about a blob is checked before the first byte of a slot changes.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::blob::{self, Entry, Kind, Opened, Purpose, Ring};
use super::config::Family;
use super::launch::{
    Address, ComponentView, Cursor, Exec, Ids, List, Memory, Named, PoolLists, PoolView, ResetArgs, StateShape,
    StateTensor, Where, Which,
};
use super::layout::{Component, ComponentLayout, components, conv_rows, records};
use super::position::MAX_POSITION;
use super::slots::Slots;
use crate::dtype::{Dtype, IndexType};
use crate::error::{Error, Result};
use crate::memory::{collected, zeroed};

/// A slot and a ring.
#[derive(Debug, Clone)]
pub struct Pair {
    /// The slot; none if all pools have slots of their own.
    pub slot: Option<i64>,
    /// The ring; none where none is meant.
    pub ring: Option<i64>,
    /// Slots of pools that have ids of their own, by the pools' indices.
    pub named: Vec<(i32, i64)>,
}

impl Pair {
    fn slot(&self, pool: &PoolView) -> i64 {
        let named = self.named.iter().find(|(index, _)| *index == pool.index).map(|(_, slot)| *slot);
        named.or(self.slot).unwrap_or(-1)
    }

    fn ring(&self) -> i64 {
        self.ring.unwrap_or(-1)
    }

    /// Where a component's part is.
    fn index(&self, pool: &PoolView, layout: &ComponentLayout) -> i64 {
        if layout.per_ring { self.ring() } else { self.slot(pool) }
    }
}

/// Ids of a pair in memory of their own, and lists of them.
struct Lists {
    ids: Vec<i64>,
    named: Vec<i32>,
}

impl Lists {
    fn new(pair: &Pair) -> Self {
        let ids = [pair.slot.unwrap_or(-1), pair.ring()];
        let named = pair.named.iter();
        Lists {
            ids: ids.into_iter().chain(named.clone().map(|(_, slot)| *slot)).collect(),
            named: named.map(|(pool, _)| *pool).collect(),
        }
    }

    fn lists(&self) -> PoolLists {
        let id = |i: usize| Ids {
            data: Address(self.ids.as_ptr() as usize).offset(i as i64 * 8),
            stride: 1,
            index: IndexType::I64,
        };
        let mut named = Named::NONE;
        for (i, &pool) in self.named.iter().enumerate() {
            named.add(pool, id(2 + i));
        }
        let all_named = self.ids.first().is_some_and(|slot| *slot < 0);
        let which = if all_named { Which::Rings } else { Which::Both };
        PoolLists { list: List { n: 1, place: Where::Host, slots: id(0), rings: id(1), which }, named, all_named }
    }
}

/// Pools with layers of equal shape, shape by shape.
fn shapes(pools: &[Arc<PoolView>]) -> BTreeMap<Entry, Vec<&PoolView>> {
    let mut shapes: BTreeMap<Entry, Vec<&PoolView>> = BTreeMap::new();
    for pool in pools {
        shapes.entry(blob::shape_entry(&pool.config)).or_default().push(pool);
    }
    shapes
}

/// Layers in the order of a portable blob.
fn layers_by_shape(pools: &[Arc<PoolView>]) -> impl Iterator<Item = (&PoolView, i64)> {
    let layers = |pool: &PoolView| 0..pool.config.n_layers as i64;
    shapes(pools).into_values().flatten().flat_map(move |pool| layers(pool).map(move |layer| (pool, layer)))
}

/// Bytes of a layer in a portable blob.
fn portable_bytes(pool: &PoolView) -> usize {
    let shape = StateShape::of(&pool.config);
    let element = if matches!(pool.config.family, Family::Conv1d(_)) { pool.config.io.size() } else { 4 };
    (shape.heads * shape.rows * shape.columns) as usize * element
}

impl Slots {
    fn purpose(&self, kind: Kind, pools: &[Arc<PoolView>]) -> Purpose {
        match kind {
            Kind::Live => Purpose::live(&self.view.config, pools.iter().map(|pool| &pool.config)),
            Kind::Stored => {
                let entries = pools.iter().map(|pool| blob::stored_entry(&pool.config)).collect();
                Purpose { kind, rule: [0; 4], entries }
            }
            Kind::Portable => {
                let mut entries: Vec<Entry> = Vec::new();
                for (mut entry, alike) in shapes(pools) {
                    let [_, n_layers, ..] = &mut entry;
                    *n_layers = alike.iter().map(|pool| pool.config.n_layers as u32).sum();
                    entries.push(entry);
                }
                Purpose { kind, rule: [0; 4], entries }
            }
        }
    }

    /// The components of a pool that a blob has as they are.
    fn saved(&self, kind: Kind, pool: &PoolView) -> Result<Vec<ComponentLayout>> {
        let mut list = components(&self.view.config, &pool.config)?;
        let is_window = |component| matches!(component, Component::Window | Component::WindowTags);
        list.retain(|layout| match kind {
            Kind::Live => !is_window(layout.component),
            Kind::Stored => !layout.per_ring,
            Kind::Portable => false,
        });
        Ok(list)
    }

    /// A copy: whoever creates or destroys a pool must not wait for the work on this call's stream, nor others for them.
    fn copy_of_pools(&self) -> Result<Vec<Arc<PoolView>>> {
        let pools = self.pools();
        collected("the list of pools", pools.len(), pools.iter().cloned())
    }

    fn payload_bytes(&self, kind: Kind, pools: &[Arc<PoolView>]) -> Result<u64> {
        let mut bytes = 0u64;
        for pool in pools {
            let layer: u64 = match kind {
                Kind::Live | Kind::Stored => self.saved(kind, pool)?.iter().map(|layout| layout.bytes).sum(),
                Kind::Portable => portable_bytes(pool) as u64,
            };
            let sum = layer.checked_mul(pool.config.n_layers as u64).and_then(|all| bytes.checked_add(all));
            bytes = sum.filter(|&sum| sum <= i64::MAX as u64).ok_or_else(|| {
                Error::unsupported("the size of a saved slot", "more than an address space", "blobs below 2^63 bytes")
            })?;
        }
        Ok(bytes)
    }

    /// Bytes of every blob of a kind.
    pub fn save_bytes(&self, kind: Kind) -> Result<u64> {
        let pools = self.pools();
        Ok(self.purpose(kind, &pools).blob_bytes(self.payload_bytes(kind, &pools)?))
    }

    fn check_pair(&self, pair: &Pair, kind: Kind, pools: &[Arc<PoolView>]) -> Result<()> {
        let check = |field: String, id: i64, n: i32| {
            let fine = (0..i64::from(n)).contains(&id);
            if fine { Ok(()) } else { Err(Error::invalid(field, id, format!("0 to {}", n - 1))) }
        };
        let config = &self.view.config;
        if let Some(slot) = pair.slot {
            check("list.slots[0]".into(), slot, config.n_slots)?;
        }
        for (pool, slot) in &pair.named {
            check(format!("list.pool_slots of pool {pool}, [0]"), *slot, config.n_slots)?;
        }
        let named = |pool: &PoolView| pair.named.iter().any(|(index, _)| *index == pool.index);
        if let Some(pool) = pools.iter().find(|pool| pair.slot.is_none() && !named(pool)) {
            let value = format!("without pool {}", pool.index);
            return Err(Error::invalid("list.pools", value, "all pools, because list.slots is absent"));
        }
        match (kind, pair.ring) {
            (Kind::Stored, _) => Ok(()),
            (_, Some(ring)) => check("list.rings[0]".into(), ring, config.n_rings),
            (_, None) => Err(Error::invalid("list.rings", "absent", "a ring")),
        }
    }

    /// Writes a slot and its ring to a blob, for which `room` gives as many bytes as it is told: [`Slots::save_bytes`] of the pools that
    /// there are now, which others may destroy meanwhile.
    pub fn save<'a>(
        &self,
        pair: &Pair,
        kind: Kind,
        room: impl FnOnce(u64) -> Result<&'a mut [u8]>,
        exec: &Exec,
    ) -> Result<()> {
        self.backend().check_exec(exec)?;
        self.backend().check_wait(exec)?;
        let pools = self.copy_of_pools()?;
        self.check_pair(pair, kind, &pools)?;
        let purpose = self.purpose(kind, &pools);
        let blob = room(purpose.blob_bytes(self.payload_bytes(kind, &pools)?))?;
        let payload = blob::payload_mut(blob, &purpose);
        let ring = if kind == Kind::Stored {
            let position = self.stored_position(&pools, pair, exec)?;
            self.save_parts(kind, &pools, pair, position, &[], payload, exec)?;
            Ring { position, flush_before: 0, seed: 0, generation: 0 }
        } else {
            let Cursor { position, flush_before, seed, generation, .. } = self.read_cursor(pair.ring(), exec)?;
            let oldest = self.oldest_tags(&pools, pair, position, exec)?;
            if kind == Kind::Live {
                self.save_parts(kind, &pools, pair, position, &oldest, payload, exec)?;
                Ring { position, flush_before, seed, generation }
            } else {
                self.save_portable(&pools, pair, position, payload, exec)?;
                Ring { position, flush_before: 0, seed, generation }
            }
        };
        blob::write_head(blob, &purpose, &ring);
        blob::seal(blob);
        Ok(())
    }

    /// The position at which all of a stored slot stands.
    fn stored_position(&self, pools: &[Arc<PoolView>], pair: &Pair, exec: &Exec) -> Result<i64> {
        let mut position = None;
        for pool in pools {
            for layout in self.saved(Kind::Stored, pool)?.iter().filter(|layout| is_tags(layout)) {
                let mut bytes = zeroed("the tags of a slot", layout.bytes as usize * pool.config.n_layers)?;
                self.read_component(pool, layout, pair, &mut bytes, exec)?;
                for tag in blob::tags(&bytes) {
                    let wanted = *position.get_or_insert(tag);
                    if tag != wanted || !(0..=MAX_POSITION).contains(&tag) {
                        return Err(Error::OutOfRange {
                            field: format!("the position of pool {} in the stored slot", pool.index).into(),
                            value: tag.to_string(),
                            expected: "no stored slots but those that a snapshot or a copy has left at one position"
                                .into(),
                        });
                    }
                }
            }
        }
        Ok(position.unwrap_or(0))
    }

    fn read_cursor(&self, ring: i64, exec: &Exec) -> Result<Cursor> {
        let mut bytes = [0; size_of::<Cursor>()];
        let at = self.view.cursors.offset(ring * size_of::<Cursor>() as i64);
        self.backend().read_runs(at, 0, bytes.len(), &mut bytes, exec)?;
        Ok(Cursor::from_bytes(&bytes))
    }

    /// The oldest tag of every layer of every pool.
    fn oldest_tags(&self, pools: &[Arc<PoolView>], pair: &Pair, position: i64, exec: &Exec) -> Result<Vec<Vec<i64>>> {
        let mut all = Vec::new();
        for pool in pools {
            let mut oldest = collected("the tags of a slot", pool.config.n_layers, std::iter::empty())?;
            for layout in self.saved(Kind::Live, pool)?.iter().filter(|layout| is_tags(layout)) {
                let mut tags = zeroed("the tags of a slot", layout.bytes as usize * pool.config.n_layers)?;
                self.read_component(pool, layout, pair, &mut tags, exec)?;
                for (layer, tags) in tags.chunks_exact(layout.bytes as usize).enumerate() {
                    oldest.push(self.oldest_tag(pool, layout, position, tags).map_err(|tag| Error::OutOfRange {
                        field: format!("the tag of pool {}, layer {layer}", pool.index).into(),
                        value: tag.to_string(),
                        expected: format!(
                            "{position} tokens committed, and a slot with an extend that is not committed, or one that was never reset, cannot be saved"
                        ),
                    })?);
                }
            }
            all.push(oldest);
        }
        Ok(all)
    }

    fn oldest_tag(
        &self,
        pool: &PoolView,
        layout: &ComponentLayout,
        position: i64,
        tags: &[u8],
    ) -> std::result::Result<i64, i64> {
        let (count, is_conv) = (pool.tag_count().0, layout.per_ring);
        blob::oldest(&self.view.rule, position, is_conv, tags.get(..count * 8).unwrap_or(tags))
    }

    /// Tokens whose records a layer's history consists of.
    fn live(pool: &PoolView, oldest: i64, position: i64) -> std::ops::Range<i64> {
        match &pool.config.family {
            Family::Conv1d(c) => oldest - (c.width as i64 - 1)..position,
            _ => oldest..position,
        }
    }

    fn component<'a>(&self, pool: &'a PoolView, layout: &ComponentLayout) -> Result<&'a ComponentView> {
        pool.component(layout.component).ok_or_else(|| Error::Internal(format!("no component {:?}", layout.component)))
    }

    /// All layers of a component of a slot or ring, one behind the other.
    fn read_component(
        &self,
        pool: &PoolView,
        layout: &ComponentLayout,
        pair: &Pair,
        into: &mut [u8],
        exec: &Exec,
    ) -> Result<()> {
        let view = self.component(pool, layout)?;
        let (index, bytes) = (pair.index(pool, layout), layout.bytes as usize);
        if view.table().is_none() {
            let first = view.base(0).offset(index * view.stride());
            return self.backend().read_runs(first, view.layer_stride(), bytes, into, exec);
        }
        for (layer, part) in into.chunks_exact_mut(bytes).enumerate() {
            let at = view.base(layer as i64).offset(index * view.stride());
            self.backend().read_runs(at, 0, bytes, part, exec)?;
        }
        Ok(())
    }

    /// The way back.
    fn write_component(
        &self,
        pool: &PoolView,
        layout: &ComponentLayout,
        pair: &Pair,
        from: &[u8],
        exec: &Exec,
    ) -> Result<()> {
        let view = self.component(pool, layout)?;
        let (index, bytes) = (pair.index(pool, layout), layout.bytes as usize);
        if view.table().is_none() {
            let first = view.base(0).offset(index * view.stride());
            return self.backend().write_runs(first, view.layer_stride(), bytes, from, exec);
        }
        for (layer, part) in from.chunks_exact(bytes).enumerate() {
            let at = view.base(layer as i64).offset(index * view.stride());
            self.backend().write_runs(at, 0, bytes, part, exec)?;
        }
        Ok(())
    }

    #[allow(clippy::too_many_arguments, reason = "what is saved, from where and to where")]
    fn save_parts(
        &self,
        kind: Kind,
        pools: &[Arc<PoolView>],
        pair: &Pair,
        position: i64,
        oldest: &[Vec<i64>],
        mut payload: &mut [u8],
        exec: &Exec,
    ) -> Result<()> {
        for (i, pool) in pools.iter().enumerate() {
            for layout in self.saved(kind, pool)? {
                let bytes = layout.bytes as usize * pool.config.n_layers;
                let (parts, rest) = payload.split_at_mut(bytes);
                payload = rest;
                self.read_component(pool, &layout, pair, parts, exec)?;
                let Some(shape) = records(layout.component, &self.view.config, &pool.config) else { continue };
                let oldest = oldest.get(i).into_iter().flatten();
                for (part, &oldest) in parts.chunks_exact_mut(layout.bytes as usize).zip(oldest) {
                    blob::clear_records(part, shape, Self::live(pool, oldest, position));
                }
            }
        }
        Ok(())
    }

    /// Memory of the backend for the largest layer's fp32 state; none where there is no state.
    fn scratch(&self, pools: &[Arc<PoolView>]) -> Result<Option<Box<dyn Memory>>> {
        let states = pools.iter().filter(|pool| pool.config.family.state().is_some());
        let largest = states.map(|pool| portable_bytes(pool)).max();
        largest.map(|bytes| self.backend().allocate("a layer's state", bytes as u64)).transpose()
    }

    fn state(data: Address, layer: i64, pool: &PoolView) -> Result<StateTensor> {
        let layer = Some(layer as usize);
        let dense = StateTensor {
            data,
            dtype: Dtype::F32,
            transposed: false,
            layer,
            entry: 0,
            layer_stride: 0,
            head: 0,
            row: 0,
        };
        dense.checked(&pool.config, 1)
    }

    /// Addresses of the rows of a layer's convolution window, oldest first, and their bytes.
    fn window_rows(&self, pool: &PoolView, layer: i64, ring: i64, position: i64) -> (Vec<Address>, usize) {
        let Family::Conv1d(dims) = &pool.config.family else { return (Vec::new(), 0) };
        let (rows, bytes) = (conv_rows(&self.view.config, dims.width) as i64, dims.channels * pool.config.io.size());
        let base = pool.part(Component::Conv, layer, ring);
        let row = |p: i64| base.offset(p.rem_euclid(rows) * bytes as i64);
        ((position - (dims.width as i64 - 1)..position).map(row).collect(), bytes)
    }

    fn save_portable(
        &self,
        pools: &[Arc<PoolView>],
        pair: &Pair,
        position: i64,
        mut payload: &mut [u8],
        exec: &Exec,
    ) -> Result<()> {
        let scratch = self.scratch(pools)?;
        let ids = Lists::new(pair);
        let lists = ids.lists();
        for (pool, layer) in layers_by_shape(pools) {
            let (part, rest) = payload.split_at_mut(portable_bytes(pool));
            payload = rest;
            if let (Some(scratch), Some(_)) = (&scratch, pool.config.family.state()) {
                let dst = Self::state(scratch.address(), layer, pool)?;
                self.backend().export(&self.view, pool, &lists.of(pool), None, &dst, exec)?;
                self.backend().read_runs(scratch.address(), 0, part.len(), part, exec)?;
            } else {
                let (rows, bytes) = self.window_rows(pool, layer, pair.ring(), position);
                for (at, part) in rows.into_iter().zip(part.chunks_exact_mut(bytes)) {
                    self.backend().read_runs(at, 0, bytes, part, exec)?;
                }
            }
        }
        Ok(())
    }

    /// Reads a slot and its ring back from a blob. The ring gets a generation, or one more than it had.
    pub fn restore(&self, pair: &Pair, blob: &[u8], generation: Option<u32>, exec: &Exec) -> Result<()> {
        self.backend().check_exec(exec)?;
        self.backend().check_wait(exec)?;
        let pools = self.copy_of_pools()?;
        self.check_pair(pair, blob::kind_of(blob), &pools)?;
        let opened = blob::open(blob)?;
        let kind = opened.purpose.kind;
        opened.check_purpose(&self.purpose(kind, &pools))?;
        let wanted = self.payload_bytes(kind, &pools)?;
        if opened.payload.len() as u64 != wanted {
            return Err(Error::bad_blob("the blob's payload in bytes", opened.payload.len(), wanted.to_string()));
        }
        match kind {
            Kind::Live | Kind::Stored => self.restore_parts(&pools, pair, &opened, generation, exec),
            Kind::Portable => self.restore_portable(&pools, pair, &opened, generation, exec),
        }
    }

    fn restore_parts(
        &self,
        pools: &[Arc<PoolView>],
        pair: &Pair,
        opened: &Opened<'_>,
        generation: Option<u32>,
        exec: &Exec,
    ) -> Result<()> {
        let Ring { position, flush_before, seed, .. } = opened.ring;
        let kind = opened.purpose.kind;
        let mut parts = Vec::new();
        let mut payload = opened.payload;
        for pool in pools {
            for layout in self.saved(kind, pool)? {
                let (part, rest) = payload.split_at(layout.bytes as usize * pool.config.n_layers);
                payload = rest;
                if is_tags(&layout) {
                    let wrong = match kind {
                        Kind::Stored => blob::tags(part).find(|&tag| tag != position),
                        _ => part
                            .chunks_exact(layout.bytes as usize)
                            .find_map(|tags| self.oldest_tag(pool, &layout, position, tags).err()),
                    };
                    if let Some(tag) = wrong {
                        return Err(Error::bad_blob(
                            format!("a tag in the blob's pool {}", pool.index),
                            tag,
                            format!("one within the window of position {position}"),
                        ));
                    }
                }
                parts.push((pool, layout, part));
            }
        }
        if kind == Kind::Stored {
            let mut parts = parts.into_iter();
            let write =
                |(pool, layout, part): (&Arc<PoolView>, _, _)| self.write_component(pool, &layout, pair, part, exec);
            return parts.try_for_each(write).map_err(half_restored);
        }
        let next = self.read_cursor(pair.ring(), exec)?.generation.wrapping_add(1);
        let generation = generation.unwrap_or(next);
        let no_windows = self.no_windows(pools)?;
        // From here on the slot is neither the old nor the new one until all is written.
        let cursor = Cursor { position, flush_before, seed, generation, committed: 0 }.to_bytes();
        let at = self.view.cursors.offset(pair.ring() * size_of::<Cursor>() as i64);
        let written = parts
            .into_iter()
            .try_for_each(|(pool, layout, part)| self.write_component(pool, &layout, pair, part, exec))
            .and_then(|()| {
                no_windows
                    .iter()
                    .try_for_each(|(pool, layout, none)| self.write_component(pool, layout, pair, none, exec))
            })
            .and_then(|()| self.backend().write_runs(at, 0, cursor.len(), &cursor, exec));
        written.map_err(half_restored)
    }

    /// As a reset does: the windows that a slot kept without a ring are those of no position any more. The tags that say so.
    fn no_windows<'a>(&self, pools: &'a [Arc<PoolView>]) -> Result<Vec<(&'a PoolView, ComponentLayout, Vec<u8>)>> {
        let mut all = Vec::new();
        for pool in pools {
            for layout in self.saved(Kind::Stored, pool)? {
                if layout.component == Component::WindowTags {
                    let mut none = zeroed("the tags of a slot", layout.bytes as usize * pool.config.n_layers)?;
                    none.fill(0xFF);
                    all.push((pool.as_ref(), layout, none));
                }
            }
        }
        Ok(all)
    }

    fn restore_portable(
        &self,
        pools: &[Arc<PoolView>],
        pair: &Pair,
        opened: &Opened<'_>,
        generation: Option<u32>,
        exec: &Exec,
    ) -> Result<()> {
        let scratch = self.scratch(pools)?;
        let ids = Lists::new(pair);
        let lists = ids.lists();
        let (position, seed, generation) = ([opened.ring.position], [opened.ring.seed], generation.map(|g| [g]));
        let args = ResetArgs {
            keep_checkpoint: true,
            convert: false,
            position: Some(Address(position.as_ptr() as usize)),
            generation: generation.as_ref().map(|generation| Address(generation.as_ptr() as usize)),
            seed: Some(Address(seed.as_ptr() as usize)),
        };
        let write = || -> Result<()> {
            self.backend().reset(&self.view, pools, &lists, &args, exec)?;
            let mut payload = opened.payload;
            for (pool, layer) in layers_by_shape(pools) {
                let (part, rest) = payload.split_at(portable_bytes(pool));
                payload = rest;
                if let (Some(scratch), Some(_)) = (&scratch, pool.config.family.state()) {
                    self.backend().write_runs(scratch.address(), 0, part.len(), part, exec)?;
                    let src = Self::state(scratch.address(), layer, pool)?;
                    self.backend().import(&self.view, pool, &lists.of(pool), None, &src, exec)?;
                } else {
                    let (rows, bytes) = self.window_rows(pool, layer, pair.ring(), opened.ring.position);
                    for (at, part) in rows.into_iter().zip(part.chunks_exact(bytes)) {
                        self.backend().write_runs(at, 0, bytes, part, exec)?;
                    }
                }
            }
            // The last import is waited for: its source is about to go.
            self.read_cursor(pair.ring(), exec).map(drop)
        };
        write().map_err(half_restored)
    }
}

/// Whether a component is the positions of others.
fn is_tags(layout: &ComponentLayout) -> bool {
    matches!(layout.component, Component::Tags | Component::WindowTags)
}

/// What a backend refused midway.
fn half_restored(error: Error) -> Error {
    const NOW: &str = "the slot is restored in part: reset it";
    match error {
        Error::Cuda { call, code, text } => Error::Cuda { call, code, text: format!("{text}; {NOW}") },
        // That status says that nothing changed. 2 is CUDA's number for it.
        Error::OutOfMemory { .. } => {
            Error::Cuda { call: "a copy of the restore".into(), code: 2, text: format!("{error}; {NOW}") }
        }
        other => other,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::Status;

    #[test]
    fn what_fails_midway_does_not_say_that_nothing_changed() {
        let failed = Error::Cuda { call: "cuMemcpyHtoDAsync".into(), code: 700, text: "an address".into() };
        let full = Error::OutOfMemory { what: "what cuMemcpyHtoDAsync needs".into(), bytes: None };
        for (error, code) in [(failed, 700), (full, 2)] {
            let error = half_restored(error);
            assert_eq!(error.status(), Status::Cuda);
            assert!(matches!(error, Error::Cuda { code: c, .. } if c == code));
            let text = error.to_string();
            assert!(
                text.contains("cuMemcpyHtoDAsync") && text.ends_with("; the slot is restored in part: reset it"),
                "{text}"
            );
        }
        // Refused before anything was written.
        let other = Error::invalid("blob", 1, "2");
        assert_eq!(half_restored(other.clone()), other);
    }
}
