//! Handles: generation-checked indices dressed as pointers.
//!
//! A handle's 64 bits are `magic:8 | kind:4 | generation:32 | index:20`; the magic makes it an address that no object of
//! the process can have, so that a foreign pointer is recognised without being followed. An entry's state word holds
//! its generation, whether it is alive, and how many calls are inside it: a call pins the entry by one atomic addition,
//! checks the generation it got back, and unpins at its end. Destroying marks the entry; the last one out frees the
//! object. So a call that races with a destroy of its own handle gets either the object or an error.

use std::cell::UnsafeCell;
use std::mem::ManuallyDrop;
use std::ops::Deref;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use crate::error::{Error, Result};
use crate::memory;
use crate::replay::launch::Backend;
use crate::replay::slots::{Context, Layers, Slots};

const MAGIC: u64 = 0xA5;
const INDEX_BITS: u32 = 20;
const CHUNK: usize = 256;
const CHUNKS: usize = (1 << INDEX_BITS) / CHUNK;

/// State word: generation in the upper half; below it these bits and the number of pins.
const LIVE: u64 = 1 << 31;
const DYING: u64 = 1 << 30;
const PINS: u64 = DYING - 1;

/// An object that a handle can stand for.
pub(super) enum Object {
    /// A context.
    Context(Arc<Context>),
    /// A slots handle.
    Slots(Arc<Slots>),
    /// A pool.
    Layers(Arc<Layers>),
}

/// A kind of object, for the type check of a handle.
pub(super) trait Kind: Sized {
    /// Number of the kind inside a handle.
    const NUMBER: u64;
    /// Name in messages.
    const NAME: &'static str;
    /// The object, if it is of this kind.
    fn of(object: &Object) -> Option<&Arc<Self>>;
    /// The other way.
    fn wrap(this: Arc<Self>) -> Object;
    /// What it runs on.
    fn runs_on(&self) -> &dyn Backend;
}

macro_rules! kind {
    ($ty:ident, $number:literal, $name:literal, $backend:expr) => {
        impl Kind for $ty {
            const NUMBER: u64 = $number;
            const NAME: &'static str = $name;
            fn of(object: &Object) -> Option<&Arc<Self>> {
                match object {
                    Object::$ty(this) => Some(this),
                    _ => None,
                }
            }
            fn wrap(this: Arc<Self>) -> Object {
                Object::$ty(this)
            }
            fn runs_on(&self) -> &dyn Backend {
                let of: fn(&Self) -> &dyn Backend = $backend;
                of(self)
            }
        }
    };
}
kind!(Context, 1, "replayssm_context", |context| context.backend.as_ref());
kind!(Slots, 2, "replayssm_slots", Slots::backend);
kind!(Layers, 3, "replayssm_layers", Layers::backend);

struct Entry {
    state: AtomicU64,
    object: UnsafeCell<Option<Object>>,
}

// SAFETY: `object` is written only by the one thread that takes a free entry (before LIVE is published) or that moves
// the state from DYING without pins to free; it is read only under a pin of a live generation.
unsafe impl Sync for Entry {}

static TABLE: [OnceLock<Box<[Entry; CHUNK]>>; CHUNKS] = [const { OnceLock::new() }; CHUNKS];
/// Which entries of the table are in use.
struct Entries {
    /// The first so many have been used.
    used: usize,
    /// Those of them that are not now.
    free: Vec<usize>,
}

static ENTRIES: Mutex<Entries> = Mutex::new(Entries { used: 0, free: Vec::new() });

fn give_back(index: usize) {
    ENTRIES.lock().unwrap_or_else(PoisonError::into_inner).free.push(index);
}

fn entry(index: usize) -> Option<&'static Entry> {
    TABLE.get(index / CHUNK)?.get()?.get(index % CHUNK)
}

/// A pinned object: it stays until this is dropped.
pub(super) struct Pin<K: Kind> {
    entry: &'static Entry,
    index: usize,
    object: ManuallyDrop<Arc<K>>,
}

impl<K: Kind> Deref for Pin<K> {
    type Target = Arc<K>;
    fn deref(&self) -> &Arc<K> {
        &self.object
    }
}

impl<K: Kind> Drop for Pin<K> {
    fn drop(&mut self) {
        unpin(self.entry, self.index);
    }
}

/// Leaves an entry; frees the object if it was dying and this was the last pin.
fn unpin(entry: &Entry, index: usize) {
    let mut state = entry.state.fetch_sub(1, Ordering::AcqRel) - 1;
    while state & DYING != 0 && state & PINS == 0 {
        let next = ((state >> 32).wrapping_add(1) & 0xFFFF_FFFF) << 32;
        match entry.state.compare_exchange(state, next, Ordering::AcqRel, Ordering::Acquire) {
            Ok(_) => {
                // SAFETY: this thread moved the state from dying to free, so it alone may touch the object.
                let object = unsafe { (*entry.object.get()).take() };
                give_back(index);
                drop(object);
                return;
            }
            Err(now) => state = now,
        }
    }
}

fn encode<K: Kind>(generation: u64, index: usize) -> u64 {
    MAGIC << 56 | K::NUMBER << 52 | generation << INDEX_BITS | index as u64
}

/// A new handle for an object.
pub(super) fn insert<K: Kind, H>(this: Arc<K>) -> Result<*mut H> {
    let full = || Error::OutOfMemory { what: "the table of handles".into(), bytes: None };
    let index = {
        let mut entries = ENTRIES.lock().unwrap_or_else(PoisonError::into_inner);
        // Room for all that there are and one more, so that destroying needs none. Twice as much, lest each needs more.
        let wanted = entries.used + 1;
        if entries.free.capacity() < wanted {
            let more = 2 * wanted - entries.free.len();
            entries.free.try_reserve(more).map_err(|_| full())?;
        }
        match entries.free.pop() {
            Some(index) => index,
            None if wanted > CHUNK * CHUNKS => return Err(full()),
            None => std::mem::replace(&mut entries.used, wanted),
        }
    };
    TABLE.get(index / CHUNK).ok_or_else(full)?.get_or_init(|| {
        Box::new(std::array::from_fn(|_| Entry { state: AtomicU64::new(0), object: UnsafeCell::new(None) }))
    });
    let entry = entry(index).ok_or_else(full)?;
    if let Err(error) = memory::check("a handle, and what it stands for,") {
        give_back(index);
        return Err(error);
    }
    // SAFETY: a free entry belongs to the thread that took its index from the free list.
    unsafe { *entry.object.get() = Some(K::wrap(this)) };
    // Stale handles may pin the entry for a moment meanwhile; the addition leaves their pins alone.
    let state = entry.state.fetch_add(LIVE, Ordering::Release);
    Ok(encode::<K>(state >> 32, index) as usize as *mut H)
}

fn invalid<K: Kind>(argument: &'static str, reason: &'static str) -> Error {
    Error::InvalidHandle { argument: argument.into(), expected: K::NAME.into(), reason: reason.into() }
}

/// Checks a handle's bits without following them: generation and index.
fn decode<K: Kind, H>(handle: *const H, argument: &'static str) -> Result<(u64, usize)> {
    let bits = handle as usize as u64;
    if bits == 0 {
        return Err(invalid::<K>(argument, "it is NULL"));
    }
    if bits >> 56 != MAGIC {
        return Err(invalid::<K>(argument, "it was not made by this library"));
    }
    if bits >> 52 & 0xF != K::NUMBER {
        return Err(invalid::<K>(argument, "it is a handle of another type"));
    }
    Ok((bits >> INDEX_BITS & 0xFFFF_FFFF, (bits & ((1 << INDEX_BITS) - 1)) as usize))
}

/// Pins the object of a handle, for a call: its device must be there.
pub(super) fn pin<K: Kind, H>(handle: *const H, argument: &'static str) -> Result<Pin<K>> {
    let pinned = pin_any::<K, H>(handle, argument)?;
    pinned.runs_on().check_alive()?;
    Ok(pinned)
}

fn pin_any<K: Kind, H>(handle: *const H, argument: &'static str) -> Result<Pin<K>> {
    let (generation, index) = decode::<K, H>(handle, argument)?;
    let entry = entry(index).ok_or_else(|| invalid::<K>(argument, "it was not made by this library"))?;
    let state = entry.state.fetch_add(1, Ordering::AcqRel);
    if state >> 32 == generation && state & LIVE != 0 {
        // SAFETY: the entry is live in this generation and pinned, so its object is there and nobody writes it.
        if let Some(object) = unsafe { (*entry.object.get()).as_ref() }.and_then(K::of) {
            // SAFETY: a bitwise copy that is never dropped; the original lives at least as long as the pin.
            let object = unsafe { std::ptr::read(object) };
            return Ok(Pin { entry, index, object: ManuallyDrop::new(object) });
        }
    }
    unpin(entry, index);
    Err(invalid::<K>(argument, "it has been destroyed"))
}

/// Destroys a handle; the object goes when the last call inside it returns and its last child is gone. Gives the object if it is
/// this call that destroys it; none for NULL and stale handles.
pub(super) fn remove<K: Kind, H>(handle: *mut H) -> Option<Pin<K>> {
    let pinned = pin_any::<K, H>(handle, "").ok()?;
    let marked = pinned.entry.state.fetch_update(Ordering::AcqRel, Ordering::Acquire, |state| {
        // The pin keeps the generation: another thread can at most have marked the entry first.
        (state & LIVE != 0).then_some(state & !LIVE | DYING)
    });
    marked.is_ok().then_some(pinned)
}
