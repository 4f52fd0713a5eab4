//! The three objects behind the handles: a context, the slots of a model on it, and pools of layers.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock, RwLockReadGuard};

use super::config::{Family, PoolConfig, SlotsConfig};
use super::explain;
use super::launch::{
    Address, Backend, Batch, Blocks, CommitArgs, ComponentView, ConvArgs, CopyArgs, Cursor, DeltaArgs, Exec, FlushArgs,
    Ids, Input, List, MAX_HOST_LIST, Mamba2Args, Memory, Mode, Named, PoolLists, PoolView, Report, ResetArgs, Site,
    SlotsView, SnapshotArgs, StateTensor, Stats, Where,
};
use super::layout::{Component, ComponentLayout, components};
use super::plan::{StepPlan, warnings};
use super::position::{Rule, default_seed};
use crate::error::{Error, Result};
use crate::log::{Level, Log};
use crate::memory::{check, collected, try_collected};

/// One backend on one device.
pub struct Context {
    /// The backend.
    pub backend: Box<dyn Backend>,
    /// Makes the next commit panic; see the feature `fault-injection`.
    pub panic_on_commit: bool,
    /// Where lines about what lives on it go.
    pub log: Log,
}

/// Positions and schedule of all layers of a model on one device.
pub struct Slots {
    // Memory goes before the context that it was allocated on: fields are dropped in this order.
    _cursors: Box<dyn Memory>,
    _counters: Box<dyn Memory>,
    context: Arc<Context>,
    pub(super) view: SlotsView,
    /// Of the pools that there are.
    pools: RwLock<Vec<Arc<PoolView>>>,
    free: Mutex<FreeList>,
}

/// A pool: equal layers of one family.
pub struct Layers {
    // Its memory goes before the slots handle, and with it the context.
    view: Arc<PoolView>,
    slots: Arc<Slots>,
    layouts: Vec<ComponentLayout>,
    /// Bytes that were allocated for it.
    owned: u64,
    /// Components that were lent.
    lent: Vec<Component>,
}

impl Context {
    /// Says what the context is.
    pub fn log_created(&self) {
        self.log.line(Level::Info, || {
            let info = self.backend.info();
            match info.device {
                Some(ordinal) => format!("context created: CUDA device {ordinal}, {}", info.name),
                None => format!("context created: {}, {} threads", info.name, info.n_threads),
            }
        });
        // On x86-64 alone: other targets have a fused multiply-add in their baseline.
        if cfg!(target_arch = "x86_64") && self.backend.info().name.ends_with("baseline") {
            self.log.line(Level::Warning, || {
                "context: this processor has no AVX2 with FMA and F16C: kernels are right, and many times slower".into()
            });
        }
    }

    /// Says that the context goes.
    pub fn log_destroyed(&self) {
        self.log.line(Level::Info, || "context destroyed".into());
    }
}

/// Memory that the caller lends for one component instead of letting the library allocate it.
#[derive(Debug, Clone)]
pub struct Lent {
    /// Which component.
    pub component: Component,
    /// Layer 0 of slot 0, without the offset.
    pub base: Address,
    /// Or slot 0 of each layer, without the offset.
    pub layer_bases: Option<Vec<Address>>,
    /// Bytes from there to the component.
    pub offset: i64,
    /// Bytes from layer to layer; 0 = all slots of a layer, densely.
    pub layer_stride: i64,
    /// Bytes from slot to slot; 0 = dense.
    pub slot_stride: i64,
}

/// Ids that no one has acquired, and the generation of each.
struct FreeList {
    free: Vec<i32>,
    generation: Vec<u32>,
    taken: Vec<bool>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // A panic while the list was locked left it whole: nothing panics between the first of a call's changes and the last.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Slots {
    /// Allocates positions and counters. All positions are 0.
    pub fn create(context: Arc<Context>, config: SlotsConfig) -> Result<Arc<Self>> {
        let n_rings = config.n_rings as usize;
        let bytes = n_rings as u64 * size_of::<Cursor>() as u64;
        let cursors = context.backend.allocate("the positions of the rings", bytes)?;
        let counters = context.backend.allocate_counters()?;
        context.backend.prepare(&config, None)?;
        let rule = Rule::new(&config);
        let view = SlotsView { rule, cursors: cursors.address(), counters: counters.address(), config };
        let n = view.config.n_slots.min(view.config.n_rings);
        let mut free = FreeList { free: Vec::new(), generation: Vec::new(), taken: Vec::new() };
        let oom = |_| Error::OutOfMemory { what: "the free list".into(), bytes: Some(n as u64 * 9) };
        free.free.try_reserve_exact(n as usize).map_err(oom)?;
        free.generation.try_reserve_exact(n as usize).map_err(oom)?;
        free.taken.try_reserve_exact(n as usize).map_err(oom)?;
        free.free.extend((0..n).rev());
        free.generation.resize(n as usize, 0);
        free.taken.resize(n as usize, false);
        let slots = Arc::new(Slots {
            context,
            view,
            pools: RwLock::new(Vec::new()),
            free: Mutex::new(free),
            _cursors: cursors,
            _counters: counters,
        });
        slots.start_schedule()?;
        Ok(slots)
    }

    /// Says what the slots handle is.
    pub fn log_created(&self) {
        self.context.log.line(Level::Info, || {
            let config = &self.view.config;
            format!(
                "slots created: {} slots, {} rings, {} bytes of positions; {}",
                config.n_slots,
                config.n_rings,
                config.n_rings as usize * size_of::<Cursor>(),
                explain::rules(config)
            )
        });
    }

    /// Says that the slots handle goes.
    pub fn log_destroyed(&self) {
        self.context.log.line(Level::Info, || format!("slots destroyed, pools still on them: {}", self.pools().len()));
    }

    /// Gives every ring its first fold point and its seed, as a reset at position 0 would, in generation 0.
    fn start_schedule(&self) -> Result<()> {
        const AT_A_TIME: i64 = 512;
        let n_rings = i64::from(self.view.config.n_rings);
        for first in (0..n_rings).step_by(AT_A_TIME as usize) {
            let bytes: Vec<u8> = (first..n_rings.min(first + AT_A_TIME))
                .flat_map(|ring| {
                    let flush_before = self.view.rule.flush_before(0, ring);
                    Cursor { flush_before, seed: default_seed(ring), ..Cursor::default() }.to_bytes()
                })
                .collect();
            let at = self.view.cursors.offset(first * size_of::<Cursor>() as i64);
            self.context.backend.write(at, &bytes)?;
        }
        Ok(())
    }

    /// What they run on.
    pub fn backend(&self) -> &dyn Backend {
        self.context.backend.as_ref()
    }

    pub(super) fn pools(&self) -> RwLockReadGuard<'_, Vec<Arc<PoolView>>> {
        self.pools.read().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds accepted tokens to the positions of a batch.
    pub fn commit(&self, batch: Batch, args: &CommitArgs, exec: &Exec) -> Result<()> {
        if self.context.panic_on_commit {
            panic!("asked for by REPLAYSSM_CONTEXT_PANIC_ON_COMMIT");
        }
        let batch = batch.checked(&self.view.config)?;
        if batch.extend && args.counts.is_some() {
            return Err(Error::invalid(
                "commit_args.counts",
                "not NULL",
                "NULL, because an extend cannot be taken back in part (see keep_tail)",
            ));
        }
        self.backend().check_exec(exec)?;
        self.backend().commit(&self.view, &batch, args, exec)
    }

    /// Starts requests on slots and rings.
    pub fn reset(&self, lists: &PoolLists, args: &ResetArgs, exec: &Exec) -> Result<()> {
        self.check_list(&lists.list)?;
        if args.convert && !args.keep_checkpoint {
            return Err(Error::invalid("reset_args.convert", 1, "0 unless keep_checkpoint is set"));
        }
        self.backend().check_exec(exec)?;
        let pools = self.pools();
        check_named("list", lists, &pools)?;
        if let Some(pool) = pools.iter().find(|p| args.convert && !p.config.format.is_lossless()) {
            return Err(Error::invalid(
                "reset_args.convert",
                1,
                format!("0, because pool {} has a 16-bit format: its slots are too small for a fp32 state", pool.index),
            ));
        }
        self.backend().reset(&self.view, &pools, lists, args, exec)
    }

    /// Takes back committed tokens.
    pub fn rewind(&self, lists: &PoolLists, n: Address, done: Option<Address>, exec: &Exec) -> Result<()> {
        self.check_list(&lists.list)?;
        self.backend().check_exec(exec)?;
        let pools = self.pools();
        check_named("list", lists, &pools)?;
        self.backend().rewind(&self.view, &pools, lists, n, done, exec)
    }

    /// Folds history into checkpoints, now or in a later step.
    pub fn flush(&self, lists: &PoolLists, args: &FlushArgs, exec: &Exec) -> Result<()> {
        self.check_list(&lists.list)?;
        if args.later && args.position.is_none() {
            return Err(Error::invalid("flush_args.position", "NULL", "an array, because later is set"));
        }
        self.backend().check_exec(exec)?;
        let pools = self.pools();
        check_named("list", lists, &pools)?;
        self.backend().flush(&self.view, &pools, lists, args, exec)
    }

    /// Stores the states that rows of a committed batch have just reached.
    pub fn snapshot(&self, batch: Batch, args: &SnapshotArgs, exec: &Exec) -> Result<()> {
        let batch = batch.checked(&self.view.config)?;
        self.backend().check_exec(exec)?;
        let pools = self.pools();
        if let Some(pool) = pools.iter().find(|pool| args.of(&batch, pool).is_none()) {
            return Err(Error::invalid(
                "snapshot_args.dst",
                "absent (data is NULL)",
                format!("ids, because pool {} is not named in snapshot_args.pools", pool.index),
            ));
        }
        self.backend().snapshot(&self.view, &pools, &batch, args, exec)
    }

    /// Copies slots and rings.
    pub fn copy(&self, from: &PoolLists, to: &PoolLists, args: &CopyArgs, exec: &Exec) -> Result<()> {
        self.check_list(&from.list)?;
        if (from.list.n, from.list.place) != (to.list.n, to.list.place) {
            return Err(Error::invalid(
                "dst",
                format!("a list of {} at place {:?}", to.list.n, to.list.place),
                format!("{} entries at place {:?}, as src has", from.list.n, from.list.place),
            ));
        }
        args.check()?;
        self.backend().check_exec(exec)?;
        let pools = self.pools();
        check_named("src", from, &pools)?;
        check_named("dst", to, &pools)?;
        self.backend().copy(&self.view, &pools, from, to, args, exec)
    }

    /// Copies ring states to memory of the caller.
    pub fn read_cursors(&self, list: &List, dst: Address, exec: &Exec) -> Result<()> {
        self.check_list(list)?;
        self.backend().check_exec(exec)?;
        self.backend().read_cursors(&self.view, list, dst, exec)
    }

    /// Faults so far.
    pub fn report(&self, clear: bool) -> Report {
        self.backend().report(&self.view, clear)
    }

    /// Counters so far.
    pub fn stats(&self) -> Result<Stats> {
        self.backend().stats(&self.view)
    }

    fn check_list(&self, list: &List) -> Result<()> {
        if list.n < 0 {
            return Err(Error::invalid("list.n", list.n, "0 or more"));
        }
        if list.place == Where::Host && list.n > MAX_HOST_LIST {
            return Err(Error::invalid("list.n", list.n, format!("at most {MAX_HOST_LIST} with host lists")));
        }
        Ok(())
    }

    /// Takes `n` free ids and hands each to `take` with its number and generation: the most recently released first. All or none.
    pub fn acquire(&self, n: usize, mut take: impl FnMut(usize, i32, u32)) -> Result<()> {
        let mut list = lock(&self.free);
        let list = &mut *list;
        if n > list.free.len() {
            return Err(Error::OutOfRange {
                field: "n".into(),
                value: n.to_string(),
                expected: format!("{} free ids", list.free.len()),
            });
        }
        for (i, id) in list.free.drain(list.free.len() - n..).rev().enumerate() {
            list.taken[id as usize] = true;
            let generation = &mut list.generation[id as usize];
            *generation = generation.wrapping_add(1);
            take(i, id, *generation);
        }
        Ok(())
    }

    /// Gives ids back. All or none.
    pub fn release(&self, ids: &[i32]) -> Result<()> {
        let mut list = lock(&self.free);
        for (i, &id) in ids.iter().enumerate() {
            match usize::try_from(id).ok().and_then(|id| list.taken.get_mut(id)) {
                // One that is named again is not taken any more.
                Some(taken) if *taken => *taken = false,
                _ => {
                    ids[..i].iter().for_each(|&id| list.taken[id as usize] = true);
                    return Err(Error::invalid(format!("ids[{i}]"), id, "an acquired id, named once"));
                }
            }
        }
        list.free.extend(ids);
        Ok(())
    }
}

/// A list without slots of its own is one of pools that all have theirs.
fn check_named(field: &'static str, lists: &PoolLists, pools: &[Arc<PoolView>]) -> Result<()> {
    let without = |pool: &&Arc<PoolView>| lists.named.of(pool.index).is_none();
    match pools.iter().find(without) {
        Some(pool) if lists.all_named => Err(Error::invalid(
            format!("{field}.slots"),
            "absent (data is NULL)",
            format!("ids, because pool {} is not named in {field}.pools", pool.index),
        )),
        _ => Ok(()),
    }
}

impl Layers {
    /// Adds this pool to those that have slot ids of their own.
    pub fn name_in(&self, named: &mut Named, slots: &Slots, field: &'static str, i: usize, ids: Ids) -> Result<()> {
        if !std::ptr::eq(self.slots.as_ref(), slots) {
            return Err(Error::invalid(format!("{field}[{i}]"), "a pool of another slots handle", "one of this"));
        }
        if !named.add(self.view.index, ids) {
            return Err(Error::invalid(format!("{field}[{i}]"), "a pool that is named before", "each pool once"));
        }
        Ok(())
    }

    /// Allocates a pool's memory, or takes what is lent. Owned memory is zero: an empty state at position 0.
    pub fn create(slots: Arc<Slots>, config: PoolConfig, lent: &[Lent]) -> Result<Arc<Self>> {
        let layouts = components(&slots.view.config, &config)?;
        slots.backend().prepare(&slots.view.config, Some(&config))?;
        let mut memory = Vec::new();
        let mut owned = 0;
        let mut views = Vec::new();
        let mut tables = Vec::new();
        let sites = lent_sites(&slots.view.config, &config, &layouts, lent)?;
        for (layout, site) in layouts.iter().zip(sites) {
            let total = layout.total(&slots.view.config, &config)?;
            let guarded = site.is_none() && slots.view.config.checks;
            let site = match site {
                Some(site) => site,
                None => {
                    let block = slots.backend().allocate("a pool", total)?;
                    let site = layout.site(&slots.view.config, &config, block.address())?;
                    memory.push(block);
                    owned += total;
                    site
                }
            };
            let table = table_of(slots.backend(), &site, &mut tables)?;
            views.push(ComponentView::new(layout, &site, table, guarded)?);
        }
        let mut pools = slots.pools.write().unwrap_or_else(PoisonError::into_inner);
        let index = pools.iter().map(|pool| pool.index).max().map_or(0, |i| i + 1);
        let (memory, tables) = (Blocks::new(memory), Blocks::new(tables));
        let view = Arc::new(PoolView { config, index, components: views, memory, tables });
        if slots.view.config.checks {
            slots.backend().write_guards(&slots.view, &view)?;
        }
        pools.try_reserve(1).map_err(|_| Error::OutOfMemory { what: "the list of pools".into(), bytes: None })?;
        pools.push(view.clone());
        drop(pools);
        let kinds = lent.iter().map(|l| l.component).collect();
        Ok(Arc::new(Layers { view, slots, layouts, owned, lent: kinds }))
    }

    /// What it runs on.
    pub fn backend(&self) -> &dyn Backend {
        self.slots.backend()
    }

    /// Says what the pool is.
    pub fn log_created(&self) {
        let (slots, config) = (&self.slots.view.config, &self.view.config);
        let (owned, n_lent) = (self.owned, self.lent.len());
        let log = &self.slots.context.log;
        log.line(Level::Info, || {
            let (slot, ring) = explain::sizes(&self.layouts);
            format!(
                "pool {} created: {}; {slot} bytes per slot and layer, {ring} per ring and layer, {owned} bytes allocated, {n_lent} components lent",
                self.view.index,
                explain::pool(config),
            )
        });
        for warning in warnings(slots, config, self.backend().info().device.is_some()) {
            log.line(Level::Warning, || format!("pool {}: {warning}", self.view.index));
        }
    }

    /// Says that the pool goes.
    pub fn log_destroyed(&self) {
        self.slots.context.log.line(Level::Info, || format!("pool {} destroyed", self.view.index));
    }

    /// What a step of `rows` rows of `tokens` tokens does, in sentences.
    pub fn explain(&self, rows: i64, tokens: i64) -> Result<String> {
        let backend = self.backend();
        let info = backend.info();
        let (slots, config) = (&self.slots.view.config, &self.view.config);
        let plan = StepPlan::new(slots, config, rows, tokens, info.n_threads)?;
        let aligned = backend.aligned_launch(slots, config, rows, tokens);
        Ok(explain::step(&info, slots, config, &self.layouts, (rows, tokens), &plan, aligned))
    }

    /// Size and place of every component.
    pub fn components(&self) -> impl ExactSizeIterator<Item = (&ComponentLayout, &ComponentView)> {
        self.layouts.iter().zip(&self.view.components)
    }

    /// Layers of the pool.
    pub fn n_layers(&self) -> usize {
        self.view.config.n_layers
    }

    /// Takes lent components from where they are now. All or none. Nothing may be using the pool.
    pub fn rebind(&self, lent: &[Lent]) -> Result<()> {
        let sites = lent_sites(&self.slots.view.config, &self.view.config, &self.layouts, lent)?;
        if let Some((i, l)) = lent.iter().enumerate().find(|(_, l)| !self.lent.contains(&l.component)) {
            let value = format!("{:?}", l.component);
            return Err(Error::invalid(format!("lent[{i}].kind"), value, "a component that was lent at create"));
        }
        if let Some(missing) = self.lent.iter().find(|component| !lent.iter().any(|l| l.component == **component)) {
            let expected =
                format!("all {} components that were lent at create: {missing:?} is missing", self.lent.len());
            return Err(Error::invalid("n_lent", lent.len(), expected));
        }
        let mut tables = Vec::new();
        let mut moves = Vec::new();
        for (view, site) in self.view.components.iter().zip(&sites) {
            if let Some(site) = site {
                moves.push((view, site, table_of(self.backend(), site, &mut tables)?));
            }
        }
        check("the addresses of a pool's layers")?;
        for (view, site, table) in moves {
            view.move_to(site, table);
        }
        self.view.tables.replace(tables);
        Ok(())
    }

    fn check_layer(&self, layer: i64) -> Result<()> {
        if (0..self.view.config.n_layers as i64).contains(&layer) {
            Ok(())
        } else {
            Err(Error::invalid("layer", layer, format!("0 to {}", self.view.config.n_layers - 1)))
        }
    }

    fn check_batch(&self, batch: Batch, mode: Mode) -> Result<Batch> {
        match (mode, batch.extend) {
            (Mode::Step, true) => {
                Err(Error::invalid("batch.flags", "with REPLAYSSM_BATCH_EXTEND", "a batch without it in a step"))
            }
            (Mode::Extend, false) => {
                Err(Error::invalid("batch.flags", "without REPLAYSSM_BATCH_EXTEND", "it in an extend and its commit"))
            }
            _ => batch.checked(&self.slots.view.config),
        }
    }

    /// With checks on, looks at what a step or extend is about to work with; says how it is to run behind that.
    fn inspect(&self, layer: i64, batch: &Batch, inputs: &mut dyn Iterator<Item = Input>, exec: &Exec) -> Result<Exec> {
        if !self.slots.view.config.checks {
            return Ok(*exec);
        }
        self.backend().inspect(&self.slots.view, &self.view, layer, batch, inputs, exec)?;
        Ok(exec.after_own_launch())
    }

    /// A Mamba-2 step or extend of one layer.
    pub fn mamba2(&self, layer: i64, mode: Mode, batch: Batch, args: &Mamba2Args, exec: &Exec) -> Result<()> {
        self.check_layer(layer)?;
        let batch = self.check_batch(batch, mode)?;
        if batch.is_empty() {
            return Ok(());
        }
        args.check(&self.view.config, &batch)?;
        let backend = self.backend();
        backend.check_exec(exec)?;
        let exec = &self.inspect(layer, &batch, &mut args.inputs(&self.view.config), exec)?;
        backend.mamba2(&self.slots.view, &self.view, layer, mode, &batch, args, exec)
    }

    /// A delta-rule step or extend of one layer.
    pub fn delta(&self, layer: i64, mode: Mode, batch: Batch, args: &DeltaArgs, exec: &Exec) -> Result<()> {
        self.check_layer(layer)?;
        let batch = self.check_batch(batch, mode)?;
        if batch.is_empty() {
            return Ok(());
        }
        args.check(&self.view.config, &batch)?;
        let args = &args.with_default_scale(&self.view.config);
        let backend = self.backend();
        backend.check_exec(exec)?;
        let exec = &self.inspect(layer, &batch, &mut args.inputs(&self.view.config), exec)?;
        backend.delta(&self.slots.view, &self.view, layer, mode, &batch, args, exec)
    }

    /// A convolution step or extend of one layer.
    pub fn conv1d(&self, layer: i64, mode: Mode, batch: Batch, args: &ConvArgs, exec: &Exec) -> Result<()> {
        self.check_layer(layer)?;
        let batch = self.check_batch(batch, mode)?;
        if batch.is_empty() {
            return Ok(());
        }
        args.check(&self.view.config, &batch)?;
        let backend = self.backend();
        backend.check_exec(exec)?;
        let exec = &self.inspect(layer, &batch, &mut args.inputs(&self.view.config), exec)?;
        backend.conv1d(&self.slots.view, &self.view, layer, mode, &batch, args, exec)
    }

    /// Writes checkpoints from a dense state.
    pub fn import(&self, list: &List, position: Option<Address>, src: StateTensor, exec: &Exec) -> Result<()> {
        self.slots.check_list(list)?;
        let src = src.checked(&self.view.config, list.n)?;
        let backend = self.backend();
        backend.check_exec(exec)?;
        backend.import(&self.slots.view, &self.view, list, position, &src, exec)
    }

    /// Reads states into a dense buffer.
    pub fn export(&self, list: &List, at: Option<Address>, dst: StateTensor, exec: &Exec) -> Result<()> {
        self.slots.check_list(list)?;
        let dst = dst.checked(&self.view.config, list.n)?;
        let backend = self.backend();
        backend.check_exec(exec)?;
        backend.export(&self.slots.view, &self.view, list, at, &dst, exec)
    }
}

impl Drop for Layers {
    fn drop(&mut self) {
        // Waits for a reset or rewind of all pools; then the memory may go, or when the last save or restore that has a copy of the list
        // is done.
        let mut pools = self.slots.pools.write().unwrap_or_else(PoisonError::into_inner);
        pools.retain(|view| !Arc::ptr_eq(view, &self.view));
    }
}

/// Where each component of a pool is lent, checked; none for those that the library is to own.
fn lent_sites(
    slots: &SlotsConfig,
    pool: &PoolConfig,
    layouts: &[ComponentLayout],
    lent: &[Lent],
) -> Result<Vec<Option<Site>>> {
    for (i, l) in lent.iter().enumerate() {
        let refused = |expected| Err(Error::invalid(format!("lent[{i}].kind"), format!("{:?}", l.component), expected));
        if !layouts.iter().any(|layout| layout.component == l.component) {
            return refused("a component of this family");
        }
        if lent.iter().take(i).any(|other| other.component == l.component) {
            return refused("each kind once");
        }
    }
    let site = |layout: &ComponentLayout| {
        let (i, l) = lent.iter().enumerate().find(|(_, l)| l.component == layout.component)?;
        let n = if layout.per_ring { slots.n_rings } else { slots.n_slots };
        Some(lent_site(i, l, layout, n.into(), pool.n_layers))
    };
    layouts.iter().map(|layout| site(layout).transpose()).collect()
}

/// Bases and strides of a lent component, checked against what the layout needs.
fn lent_site(i: usize, l: &Lent, layout: &ComponentLayout, n: i64, n_layers: usize) -> Result<Site> {
    let bytes = layout.bytes as i64;
    let layers = n_layers as i64;
    let alignment = if matches!(layout.component, Component::Tags | Component::WindowTags) { 8 } else { 16 };
    let name = |field: &str| format!("lent[{i}].{field}");
    let stride = if l.slot_stride == 0 { layout.bytes.next_multiple_of(16) as i64 } else { l.slot_stride };
    let dense_layer = stride
        .checked_mul(n)
        .ok_or_else(|| Error::invalid(name("slot_stride_bytes"), stride, "a stride that fits an address space"))?;
    if l.layer_bases.is_some() && l.layer_stride != 0 {
        return Err(Error::invalid(name("layer_stride_bytes"), l.layer_stride, "0 with layer_bases"));
    }
    let layer_stride = if l.layer_stride == 0 { dense_layer } else { l.layer_stride };
    for (field, stride, extent) in [("slot_stride_bytes", stride, n), ("layer_stride_bytes", layer_stride, layers)] {
        let reach = stride.checked_mul(extent);
        if stride % alignment != 0 || reach.is_none() || (extent > 1 && stride < bytes) {
            return Err(Error::invalid(
                name(field),
                stride,
                format!("a multiple of {alignment} of at least {bytes} bytes"),
            ));
        }
    }
    if l.offset < 0 {
        return Err(Error::invalid(name("offset_bytes"), l.offset, "0 or more"));
    }
    let place = |field: &str, base: Address| {
        let is_place =
            |sum: &usize| base.0 != 0 && *sum <= isize::MAX as usize && sum.is_multiple_of(alignment as usize);
        let sum = base.0.checked_add(l.offset as usize).filter(is_place);
        let plus = if l.offset == 0 { String::new() } else { format!(" once offset_bytes, {}, is added", l.offset) };
        sum.map(Address).ok_or_else(|| {
            Error::invalid(
                name(field),
                format!("{:#x}", base.0),
                format!("an address aligned to {alignment} bytes{plus}"),
            )
        })
    };
    if let Some(bases) = &l.layer_bases {
        if l.base.0 != 0 {
            return Err(Error::invalid(name("base"), format!("{:#x}", l.base.0), "NULL with layer_bases"));
        }
        let places = bases.iter().enumerate().map(|(k, &base)| place(&format!("layer_bases[{k}]"), base));
        let bases = try_collected("the list of a pool's layers", bases.len(), places)?;
        let mut sorted = collected("the list of a pool's layers", bases.len(), bases.iter().map(|base| base.0))?;
        sorted.sort_unstable();
        if let Some((a, b)) = overlapping(&sorted, n as usize, stride as usize, bytes as usize) {
            return Err(Error::invalid(
                name("layer_bases"),
                format!("with {a:#x} and {b:#x}"),
                format!("layers whose {n} parts of {bytes} bytes, {stride} bytes apart, do not overlap"),
            ));
        }
        return Ok(Site { bases, layer_stride: None, stride });
    }
    let slots_inside = layers == 1 || n == 1 || layer_stride >= dense_layer;
    let layers_inside = layer_stride.checked_mul(layers).is_some_and(|all| stride >= all);
    if !slots_inside && !layers_inside {
        return Err(Error::invalid(
            name("layer_stride_bytes"),
            layer_stride,
            format!("at least {dense_layer} (all slots of a layer), or slot_stride_bytes of all layers of a slot"),
        ));
    }
    Site::strided(place("base", l.base)?, layer_stride, n_layers, stride)
}

/// Two of these bases in order, with `n` parts of `bytes` bytes `stride` apart at each, whose parts overlap.
fn overlapping(bases: &[usize], n: usize, stride: usize, bytes: usize) -> Option<(usize, usize)> {
    let stride = if n == 1 { bytes } else { stride };
    let reach = (n - 1) * stride + bytes;
    // Bases whose last part ends behind the one at hand, by where they lie in a stride. None of them are near each other there, so
    // neighbours are all that need a look: 2^20 layers that share pages take a second and not a day.
    let mut open = BTreeMap::new();
    let mut ended = bases.iter().peekable();
    for &base in bases {
        while let Some(first) = ended.next_if(|&&first| base - first >= reach) {
            open.remove(&(first % stride));
        }
        let at = base % stride;
        let below = open.range(..=at).next_back().or_else(|| open.last_key_value());
        let above = open.range(at..).next().or_else(|| open.first_key_value());
        for (&other, &first) in [below, above].into_iter().flatten() {
            let apart = at.abs_diff(other);
            if apart.min(stride - apart) < bytes {
                return Some((first, base));
            }
        }
        open.insert(at, base);
    }
    None
}

/// The addresses of a site's layers in the backend's memory; address 0 where layers are at equal distances.
fn table_of(backend: &dyn Backend, site: &Site, tables: &mut Vec<Box<dyn Memory>>) -> Result<Address> {
    if site.layer_stride.is_some() {
        return Ok(Address(0));
    }
    const WHAT: &str = "the addresses of a pool's layers";
    let bytes = site.bases.iter().flat_map(|base| (base.0 as u64).to_ne_bytes());
    let bytes = collected(WHAT, site.bases.len() * size_of::<u64>(), bytes)?;
    let table = backend.allocate(WHAT, bytes.len() as u64)?;
    let at = table.address();
    backend.write(at, &bytes)?;
    tables.push(table);
    Ok(at)
}

impl PoolView {
    /// Tags of a slot that belong to one position: how many there are, and whether they lie with the ring.
    pub fn tag_count(&self) -> (usize, bool) {
        match &self.config.family {
            Family::Conv1d(c) => (c.tiles(), true),
            family => (family.state().map_or(0, |s| s.heads * s.tiles()), false),
        }
    }
}
