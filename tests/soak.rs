//! A service that runs for long: requests on 64 slots of each of several pools, of all families, take steps of one to eight tokens of which any
//! number is accepted, are forked, taken back, flushed, stored, loaded, saved, evicted and resumed, in an order drawn by lot. Beside each pool
//! stands a shadow that does nothing of that: a fp32 pool that takes the accepted tokens by `extend`, one at a time. The states are the
//! same bytes whenever they are compared, and memory does not grow.
//!
//! A 16-bit state has no such shadow, since it is rounded at every fold, and folds depend on the order: `pairwise` follows those.
//!
//! An operation is one on one slot: a row of a step with its commit, a fork, a save and so on. `REPLAYSSM_SOAK` is their number,
//! or `REPLAYSSM_SOAK_SECONDS` the time.

#![allow(clippy::multiple_unsafe_ops_per_block, reason = "a test's calls share one promise")]

mod common;

use std::alloc::{GlobalAlloc, Layout};
use std::ptr::null;
use std::sync::atomic::{AtomicI64, Ordering::Relaxed};
use std::time::{Duration, Instant};

use common::{FAMILIES, Rig, Rng, Row, Spec, Token, device, ids64, message, no_faults, ok};
use replayssm::ffi::*;

/// Bytes that are allocated and not freed.
static LIVE: AtomicI64 = AtomicI64::new(0);

/// The tests' heap, counted.
struct Counting(device::Heap);

// SAFETY: hands everything to the other allocator.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        LIVE.fetch_add(layout.size() as i64, Relaxed);
        // SAFETY: the caller's promise is the other allocator's, here and below.
        unsafe { self.0.alloc(layout) }
    }
    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        LIVE.fetch_add(layout.size() as i64, Relaxed);
        // SAFETY: as above.
        unsafe { self.0.alloc_zeroed(layout) }
    }
    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        LIVE.fetch_sub(layout.size() as i64, Relaxed);
        // SAFETY: as above.
        unsafe { self.0.dealloc(at, layout) }
    }
    unsafe fn realloc(&self, at: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        LIVE.fetch_add(size as i64 - layout.size() as i64, Relaxed);
        // SAFETY: as above.
        unsafe { self.0.realloc(at, layout, size) }
    }
}

#[global_allocator]
static HEAP: Counting = Counting(device::Heap::ON_CUDA);

/// Slots of a pool that the library's list gives to requests.
const SLOTS: usize = 64;
/// Slots behind them, without rings, that snapshots and stores leave states in; the list gives out those that have a ring.
const SHELVES: usize = 2;
/// Of a shadow: requests' states, and as many slots to run ahead in.
const SHADOWS: usize = 2 * (SLOTS + SHELVES);
/// The newest tokens of a request, which its shadow has not taken in, since they may be taken back, or a snapshot may lie among them.
const LAG: usize = 8;
/// Saved requests that wait to be resumed.
const MOST_PARKED: usize = 12;
/// Different tokens of a pool: drawing them would take longer than the work itself.
const TOKENS: usize = 512;

/// A request. What its shadow has taken in is in the shadow's slot of the same number.
#[derive(Clone, Default)]
struct Request {
    generation: u32,
    position: usize,
    /// Tokens behind those of the shadow.
    behind: Vec<u16>,
    /// Tokens that can be taken back for certain, were min_rewind as many.
    since: usize,
}

/// A request that was evicted.
struct Parked {
    kind: i32,
    blob: Vec<u8>,
    shadow: Vec<u8>,
    request: Request,
}

struct Pool {
    rig: Rig,
    shadow: Rig,
    tokens: Vec<Vec<Token>>,
    /// By slot.
    live: Vec<Option<Request>>,
    parked: Vec<Parked>,
    rng: Rng,
    operations: u64,
    checked: u64,
}

fn list(slots: &[i64]) -> replayssm_list {
    desc!(replayssm_list {
        n: slots.len() as i32,
        place: REPLAYSSM_WHERE_HOST,
        slots: ids64(slots),
        rings: ids64(slots)
    })
}

impl Pool {
    fn new(spec: &Spec) -> Self {
        let spec = Spec { slots: SLOTS + SHELVES, rings: SLOTS, contiguous: true, ..spec.clone() };
        let shadow = Spec {
            format: REPLAYSSM_FORMAT_F32,
            readout: REPLAYSSM_READOUT_EXACT,
            window: 1,
            t_max: 1,
            keep: 0,
            schedule: REPLAYSSM_SCHEDULE_NONE,
            slots: SHADOWS,
            rings: 0,
            ..spec.clone()
        };
        let (rig, shadow) = (Rig::new(spec), Rig::new(shadow));
        let mut rng = Rng(rig.spec.seed);
        let tokens = rig.tokens(&mut rng, TOKENS);
        let mut pool =
            Pool { rig, shadow, tokens, live: vec![None; SLOTS], parked: vec![], rng, operations: 0, checked: 0 };
        while pool.slots_of(false).len() > SLOTS / 8 {
            pool.start();
        }
        pool
    }

    /// Slots with a request, or without one.
    fn slots_of(&self, live: bool) -> Vec<usize> {
        (0..SLOTS).filter(|&slot| self.live[slot].is_some() == live).collect()
    }

    /// A slot with a request.
    fn any(&mut self) -> usize {
        let slots = self.slots_of(true);
        slots[self.rng.below(slots.len())]
    }

    fn request(&mut self, slot: usize) -> &mut Request {
        self.live[slot].as_mut().expect("a request")
    }

    /// A slot and ring of the library's list, for a request that has none; none if all are in use.
    fn acquire(&mut self) -> Option<(usize, u32)> {
        let (mut id, mut generation) = ([-1], [0]);
        // SAFETY: arrays of one.
        let status = unsafe { replayssm_acquire(self.rig.slots, 1, id.as_mut_ptr(), generation.as_mut_ptr()) };
        if self.slots_of(false).is_empty() {
            assert_eq!(status, REPLAYSSM_ERROR_OUT_OF_RANGE, "{}", message());
            return None;
        }
        ok(status);
        let slot = id[0] as usize;
        assert!(self.live[slot].is_none(), "slot {slot} was given out twice");
        Some((slot, generation[0]))
    }

    fn release(&mut self, slot: usize) {
        let id = [slot as i32];
        // SAFETY: an array of one.
        ok(unsafe { replayssm_release(self.rig.slots, 1, id.as_ptr()) });
        self.live[slot] = None;
    }

    /// Tokens that requests bring: a row each.
    fn rows(&self, slots: &[usize], tokens: &[Vec<u16>], extra: usize) -> Vec<Row> {
        let of = |t: &u16| self.tokens[usize::from(*t)].clone();
        slots
            .iter()
            .zip(tokens)
            .map(|(&slot, tokens)| Row::new(slot + extra, &tokens.iter().map(of).collect::<Vec<_>>()))
            .collect()
    }

    /// The plain update of shadows, one token at a time: those of all slots at once.
    fn extend_shadows(&self, slots: &[usize], tokens: &[Vec<u16>], extra: usize) {
        let most = tokens.iter().map(Vec::len).max().unwrap_or(0);
        for t in 0..most {
            let due = |&(_, tokens): &(&usize, &Vec<u16>)| tokens.len() > t;
            let (slots, tokens): (Vec<usize>, Vec<Vec<u16>>) =
                slots.iter().zip(tokens).filter(due).map(|(&slot, tokens)| (slot, vec![tokens[t]])).unzip();
            self.shadow.extend(&self.rows(&slots, &tokens, extra), 0);
        }
    }

    /// Shadows take in what cannot be taken back any more.
    fn catch_up(&mut self, slots: &[usize]) {
        let mut tokens = Vec::new();
        for &slot in slots {
            let behind = &mut self.request(slot).behind;
            let n = behind.len().saturating_sub(LAG);
            tokens.push(behind.drain(..n).collect());
        }
        self.extend_shadows(slots, &tokens, 0);
    }

    // ---- Operations: each says how many ----

    fn start(&mut self) -> u64 {
        let Some((slot, generation)) = self.acquire() else { return 0 };
        let (ids, generations, position) = ([slot as i64], [generation], [0i64]);
        let args = desc!(replayssm_reset_args { position: position.as_ptr(), generation: generations.as_ptr() });
        // SAFETY: everything lives until the call returns.
        ok(unsafe { replayssm_reset(self.rig.slots, &list(&ids), &args, null()) });
        self.shadow.reset(slot, slot, 0);
        self.live[slot] = Some(Request { generation, ..Request::default() });
        // A prompt.
        let tokens = vec![(0..1 + self.rng.below(12)).map(|_| self.rng.below(TOKENS) as u16).collect::<Vec<_>>()];
        let tail = self.rng.below(1 + self.rig.spec.window.min(tokens[0].len()));
        self.rig.extend(&self.rows(&[slot], &tokens, 0), tail as i32);
        let request = self.request(slot);
        request.position = tokens[0].len();
        request.behind.extend(&tokens[0]);
        self.catch_up(&[slot]);
        1
    }

    /// A model step of a random part of the requests, or of all: steps, perhaps twice or with one that is given up in front, commit, and
    /// perhaps a snapshot.
    fn step(&mut self) -> u64 {
        let mut slots = self.slots_of(true);
        if self.rng.below(4) == 0 {
            slots.retain(|_| self.rng.below(3) > 0);
        }
        let most = self.rig.spec.t_max;
        // Of one length, as without drafts, or each of its own.
        let same = if self.rng.below(2) == 0 { Some(1 + self.rng.below(most)) } else { None };
        let draw = |rng: &mut Rng| -> Vec<Vec<u16>> {
            let of =
                |rng: &mut Rng| (0..same.unwrap_or(1 + rng.below(most))).map(|_| rng.below(TOKENS) as u16).collect();
            slots.iter().map(|_| of(rng)).collect()
        };
        if self.rng.below(8) == 0 {
            let lost = draw(&mut self.rng);
            self.rig.step(&self.rows(&slots, &lost, 0));
        }
        let tokens = draw(&mut self.rng);
        let mut rows = self.rows(&slots, &tokens, 0);
        rows.iter_mut().for_each(|row| row.flush = self.rng.below(64) == 0);
        self.rig.step(&rows);
        if self.rng.below(8) == 0 {
            self.rig.step(&rows);
        }
        let counts: Vec<i32> = tokens.iter().map(|t| self.rng.below(t.len() + 1) as i32).collect();
        self.rig.commit(&rows, &counts);
        for ((&slot, tokens), &n) in slots.iter().zip(&tokens).zip(&counts) {
            let request = self.request(slot);
            request.behind.extend(&tokens[..n as usize]);
            request.position += n as usize;
            request.since += n as usize;
        }
        if self.rng.below(8) == 0 {
            self.snapshot(&rows, &slots, &counts);
        }
        self.catch_up(&slots);
        slots.len() as u64
    }

    /// A request's last commit leaves a state on a shelf, and another request begins there.
    fn snapshot(&mut self, rows: &[Row], slots: &[usize], counts: &[i32]) {
        let i = self.rng.below(slots.len());
        if counts[i] == 0 {
            return;
        }
        let back = self.rng.below(counts[i] as usize);
        let from = self.live[slots[i]].clone().expect("a request");
        let at = from.position - back;
        let mut ats = vec![-1; rows.len()];
        ats[i] = at as i64;
        self.rig.snapshot(rows, false, None, &ats, &vec![SLOTS as i64; rows.len()]);
        self.load(slots[i], &from, SLOTS, at);
    }

    /// A request begins from what lies on a shelf: the state of another at a position among its newest tokens.
    fn load(&mut self, slot: usize, from: &Request, shelf: usize, at: usize) {
        let Some((to, generation)) = self.acquire() else { return };
        let behind = from.behind[..from.behind.len() - (from.position - at)].to_vec();
        let (shelf, ids, position, generations) = ([shelf as i64], [to as i64], [at as i64], [generation]);
        let args = desc!(replayssm_copy_args {
            kind: REPLAYSSM_COPY_LOAD,
            position: position.as_ptr(),
            generation: generations.as_ptr(),
        });
        let slots_alone = desc!(replayssm_list { n: 1, place: REPLAYSSM_WHERE_HOST, slots: ids64(&shelf) });
        // SAFETY: everything lives until the call returns.
        ok(unsafe { replayssm_copy(self.rig.slots, &slots_alone, &list(&ids), &args, null()) });
        self.shadow.copy(REPLAYSSM_COPY_FORK, (slot, slot), (to, to), None);
        self.live[to] = Some(Request { generation, position: at, behind, since: 0 });
        self.operations += 1;
    }

    fn store(&mut self) -> u64 {
        let slot = self.any();
        let from = self.live[slot].clone().expect("a request");
        let newest = from.since.min(self.rig.spec.keep).min(from.behind.len());
        let at = from.position - self.rng.below(newest + 1);
        let (ids, shelf, position) = ([slot as i64], [SLOTS as i64 + 1], [at as i64]);
        let args = desc!(replayssm_copy_args { kind: REPLAYSSM_COPY_STORE, position: position.as_ptr() });
        let slots_alone = desc!(replayssm_list { n: 1, place: REPLAYSSM_WHERE_HOST, slots: ids64(&shelf) });
        // SAFETY: everything lives until the call returns.
        ok(unsafe { replayssm_copy(self.rig.slots, &list(&ids), &slots_alone, &args, null()) });
        self.load(slot, &from, SLOTS + 1, at);
        1
    }

    /// Forks of some requests at once, into slots that are free.
    fn fork(&mut self) -> u64 {
        let n = (1 + self.rng.below(6)).min(self.slots_of(false).len());
        let (mut from, mut to, mut generations) = (vec![], vec![], vec![]);
        for _ in 0..n {
            let source = self.any();
            if to.contains(&(source as i64)) {
                continue;
            }
            let Some((slot, generation)) = self.acquire() else { break };
            from.push(source as i64);
            to.push(slot as i64);
            generations.push(generation);
            self.live[slot] = Some(Request { generation, ..self.live[source].clone().expect("a request") });
        }
        self.rig.copy_lists(REPLAYSSM_COPY_FORK, &from, &to, None, Some(&generations));
        self.shadow.copy_lists(REPLAYSSM_COPY_FORK, &from, &to, None, None);
        to.len() as u64
    }

    /// Two requests change places.
    fn swap(&mut self) -> u64 {
        let (a, b) = (self.any(), self.any());
        if a == b {
            return 0;
        }
        for rig in [&self.rig, &self.shadow] {
            rig.copy(REPLAYSSM_COPY_SWAP, (a, a), (b, b), None);
        }
        self.live.swap(a, b);
        for slot in [a, b] {
            let generation = self.rig.cursor(slot).generation;
            self.request(slot).generation = generation;
        }
        2
    }

    /// Rejected after all: what min_rewind promises can be taken back, of many requests at once.
    fn rewind(&mut self) -> u64 {
        let (mut slots, mut counts) = (vec![], vec![]);
        for slot in self.slots_of(true) {
            let keep = self.rig.spec.keep;
            let request = self.live[slot].as_ref().expect("a request");
            let most = request.since.min(keep).min(request.behind.len());
            if most > 0 && self.rng.below(4) == 0 {
                slots.push(slot as i64);
                counts.push(1 + self.rng.below(most) as i32);
            }
        }
        let mut done = vec![-1; slots.len()];
        // SAFETY: everything lives until the call returns.
        ok(unsafe { replayssm_rewind(self.rig.slots, &list(&slots), counts.as_ptr(), done.as_mut_ptr(), null()) });
        assert!(done.iter().all(|&done| done == 1), "tokens of min_rewind were not held");
        for (&slot, &n) in slots.iter().zip(&counts) {
            let request = self.request(slot as usize);
            request.behind.truncate(request.behind.len() - n as usize);
            request.position -= n as usize;
            request.since = 0;
        }
        slots.len() as u64
    }

    /// Folds now, or when a later step reaches a position.
    fn flush(&mut self) -> u64 {
        let mut slots = self.slots_of(true);
        slots.retain(|_| self.rng.below(4) == 0);
        let how = self.rng.below(3);
        let positions: Vec<i64> = slots
            .iter()
            .map(|&slot| {
                let position = self.live[slot].as_ref().expect("a request").position;
                if how == 1 { position - self.rng.below(3).min(position) } else { position + self.rng.below(9) }
            })
            .map(|at| at as i64)
            .collect();
        let later = i32::from(how == 2);
        let args =
            desc!(replayssm_flush_args { later: later, position: if how == 0 { null() } else { positions.as_ptr() } });
        let ids: Vec<i64> = slots.iter().map(|&slot| slot as i64).collect();
        // SAFETY: everything lives until the call returns.
        ok(unsafe { replayssm_flush(self.rig.slots, &list(&ids), &args, null()) });
        if how == 1 {
            slots.iter().for_each(|&slot| self.request(slot).since = 0);
        }
        slots.len() as u64
    }

    /// Saves a request and gives its slot to others.
    fn evict(&mut self) -> u64 {
        if self.parked.len() == MOST_PARKED || self.slots_of(true).len() < SLOTS / 4 {
            return self.resume();
        }
        let slot = self.any();
        let kind = [REPLAYSSM_SAVE_LIVE, REPLAYSSM_SAVE_PORTABLE][self.rng.below(2)];
        let blob = self.rig.save(kind, slot, slot);
        let shadow = self.shadow.save(REPLAYSSM_SAVE_LIVE, slot, slot);
        let request = self.live[slot].clone().expect("a request");
        self.parked.push(Parked { kind, blob, shadow, request });
        self.release(slot);
        1
    }

    fn resume(&mut self) -> u64 {
        if self.parked.is_empty() {
            return 0;
        }
        let Some((slot, generation)) = self.acquire() else { return 0 };
        let parked = self.parked.swap_remove(self.rng.below(self.parked.len()));
        let (ids, generations) = ([slot as i64], [generation]);
        let args = desc!(replayssm_restore_args { generation: generations.as_ptr() });
        let (at, bytes) = (parked.blob.as_ptr().cast(), parked.blob.len() as u64);
        // SAFETY: everything lives until the call returns.
        ok(unsafe { replayssm_restore(self.rig.slots, &list(&ids), at, bytes, &args, null()) });
        ok(self.shadow.restore(slot, slot, &parked.shadow));
        let since = if parked.kind == REPLAYSSM_SAVE_PORTABLE { 0 } else { parked.request.since };
        self.live[slot] = Some(Request { generation, since, ..parked.request });
        1
    }

    fn operation(&mut self) {
        let n = match self.rng.below(32) {
            0 => self.start(),
            1 => {
                // A request ends.
                let slot = self.any();
                if self.slots_of(true).len() > SLOTS / 4 {
                    self.release(slot);
                }
                1
            }
            2 | 3 => self.fork(),
            4 => self.swap(),
            5 | 6 => self.rewind(),
            7 | 8 => self.flush(),
            9 => self.store(),
            10 | 11 => self.evict(),
            12 => self.resume(),
            13 => {
                self.check();
                0
            }
            _ => self.step(),
        };
        self.operations += n;
    }

    /// States of all requests of a rig at some positions, or where they are: fp32 bits of all layers.
    fn export(&self, rig: &Rig, slots: &[usize], extra: usize, at: Option<&[i64]>) -> Vec<u32> {
        let s = &rig.spec;
        let mut data = vec![0x7FC0_1234u32; slots.len() * s.layers * s.heads * s.headdim * s.dstate];
        let ids: Vec<i64> = slots.iter().map(|&slot| (slot + extra) as i64).collect();
        let dst = desc!(replayssm_state { dtype: REPLAYSSM_DTYPE_F32, layer: -1, data: data.as_mut_ptr().cast() });
        let at = at.map_or(null(), <[i64]>::as_ptr);
        // SAFETY: everything lives until the call returns.
        ok(unsafe { replayssm_export(rig.pool, &list(&ids), at, &dst, null()) });
        data
    }

    /// Every request's state is its shadow's, by bytes; positions and generations are what was done.
    fn check(&mut self) {
        let slots = self.slots_of(true);
        let ids: Vec<i64> = slots.iter().map(|&slot| slot as i64).collect();
        let ahead: Vec<i64> = ids.iter().map(|id| id + SLOTS as i64).collect();
        let behind: Vec<Vec<u16>> = slots.iter().map(|&slot| self.request(slot).behind.clone()).collect();
        // Shadows run ahead in slots of their own.
        self.shadow.copy_lists(REPLAYSSM_COPY_FORK, &ids, &ahead, None, None);
        self.extend_shadows(&slots, &behind, SLOTS);
        let (got, wanted) = (self.export(&self.rig, &slots, 0, None), self.export(&self.shadow, &slots, SLOTS, None));
        let one = got.len() / slots.len();
        for (i, &slot) in slots.iter().enumerate() {
            let of = i * one..(i + 1) * one;
            assert!(got[of.clone()] == wanted[of], "slot {slot}: the state is not that of extend alone");
        }
        // And where shadows are themselves, as long as that is held.
        let keep = self.rig.spec.keep;
        let held: Vec<usize> = slots
            .iter()
            .copied()
            .filter(|&slot| {
                let request = self.live[slot].as_ref().expect("a request");
                request.behind.len() <= keep.min(request.since)
            })
            .collect();
        let at: Vec<i64> = held
            .iter()
            .map(|&slot| self.live[slot].as_ref().map_or(0, |r| (r.position - r.behind.len()) as i64))
            .collect();
        assert!(
            self.export(&self.rig, &held, 0, Some(&at)) == self.export(&self.shadow, &held, 0, None),
            "a state some tokens back is not that of extend alone"
        );
        // SAFETY: a cursor is plain data.
        let mut cursors = vec![unsafe { std::mem::zeroed::<replayssm_cursor>() }; slots.len()];
        // SAFETY: everything lives until the call returns.
        ok(unsafe { replayssm_read_cursors(self.rig.slots, &list(&ids), cursors.as_mut_ptr(), null()) });
        for (cursor, &slot) in cursors.iter().zip(&slots) {
            let request = self.live[slot].as_ref().expect("a request");
            assert_eq!((cursor.position, cursor.generation), (request.position as i64, request.generation));
        }
        no_faults(&self.rig);
        no_faults(&self.shadow);
        self.checked += slots.len() as u64;
    }

    /// Without what a round may have more or less of: blobs, and spare room of vectors.
    fn settle(&mut self) {
        self.parked.clear();
        self.parked.shrink_to_fit();
        self.live.iter_mut().flatten().for_each(|request| request.behind.shrink_to_fit());
    }

    /// Bytes of tokens that requests remember.
    fn remembered(&self) -> i64 {
        self.live.iter().flatten().map(|request| (request.behind.capacity() * 2) as i64).sum()
    }
}

fn pools() -> Vec<Pool> {
    let base = Spec { heads: 2, groups: 1, headdim: 16, dstate: 16, layers: 2, ..Spec::default() };
    let [mamba2, gdn, kda] = FAMILIES;
    let options = [
        (mamba2, REPLAYSSM_FORMAT_SPLIT32, REPLAYSSM_READOUT_HIGH, [16, 8, 8], REPLAYSSM_SCHEDULE_STAGGERED),
        (gdn, REPLAYSSM_FORMAT_SPLIT32, REPLAYSSM_READOUT_HIGH, [24, 4, 4], REPLAYSSM_SCHEDULE_STAGGERED),
        (kda, REPLAYSSM_FORMAT_SPLIT32, REPLAYSSM_READOUT_EXACT, [13, 5, 0], REPLAYSSM_SCHEDULE_BY_POSITION),
        (mamba2, REPLAYSSM_FORMAT_F32, REPLAYSSM_READOUT_EXACT, [9, 3, 2], REPLAYSSM_SCHEDULE_BY_POSITION),
        (gdn, REPLAYSSM_FORMAT_F32, REPLAYSSM_READOUT_FULL, [8, 8, 1], REPLAYSSM_SCHEDULE_NONE),
        (kda, REPLAYSSM_FORMAT_F32, REPLAYSSM_READOUT_FULL, [16, 1, 3], REPLAYSSM_SCHEDULE_STAGGERED),
    ];
    let mut pools = Vec::new();
    for (family, format, readout, [window, t_max, keep], schedule) in options {
        let seed = pools.len() as u64 + 1;
        pools.push(Pool::new(&Spec { family, format, readout, window, t_max, keep, schedule, seed, ..base.clone() }));
    }
    pools
}

/// Bytes of memory that the process has, as the system counts them.
fn resident() -> Option<i64> {
    let text = std::fs::read_to_string("/proc/self/statm").ok()?;
    let pages: i64 = text.split(' ').nth(1)?.parse().ok()?;
    Some(pages * 4096)
}

fn variable(name: &str) -> Option<u64> {
    std::env::var(name).ok().map(|value| value.parse().unwrap_or_else(|_| panic!("{name} is {value}, no number")))
}

// The only test of this program, because it counts what the whole process has allocated.
#[test]
fn states_equal_extend_alone_and_memory_is_flat() {
    let seconds = variable("REPLAYSSM_SOAK_SECONDS");
    let most = variable("REPLAYSSM_SOAK").unwrap_or(if seconds.is_some() { u64::MAX } else { 100_000 });
    let seed = variable("REPLAYSSM_TEST_SEED").unwrap_or(1);
    let start = Instant::now();
    let mut pools = pools();
    pools.iter_mut().enumerate().for_each(|(i, pool)| pool.rng = Rng(seed << 8 | i as u64));
    let run = |pools: &mut [Pool], most: u64| {
        let done = |pools: &[Pool]| pools.iter().map(|pool| pool.operations).sum::<u64>();
        while done(pools) < most && seconds.is_none_or(|s| start.elapsed() < Duration::from_secs(s)) {
            pools.iter_mut().for_each(Pool::operation);
        }
        for pool in pools.iter_mut() {
            pool.check();
            pool.settle();
        }
        let remembered: i64 = pools.iter().map(Pool::remembered).sum();
        (LIVE.load(Relaxed) - remembered, resident())
    };
    // Everything has been called by then, and every buffer has been as large as it gets.
    let (live, size) = run(&mut pools, (most / 4).min(20_000));
    let (live_now, size_now) = run(&mut pools, most);
    let operations: u64 = pools.iter().map(|pool| pool.operations).sum();
    let checked: u64 = pools.iter().map(|pool| pool.checked).sum();
    println!(
        "{operations} operations, {checked} states compared, in {:.1} s; bytes allocated {live} -> {live_now}, resident {size:?} -> {size_now:?}",
        start.elapsed().as_secs_f64()
    );
    // What the harness keeps of a line that was printed.
    assert!(live_now - live <= 4096, "{} bytes more are allocated", live_now - live);
    // The allocator keeps freed blocks between live ones. What lives at once apart from pools is the parked blobs and the buffers of a step, twice
    // that where sizes alternate; the rest is rounding: an arena's top of 128 KiB for each thread.
    let at_once: i64 = pools.iter().map(|pool| pool.rig.save(REPLAYSSM_SAVE_LIVE, 0, 0).len() as i64 * 2).sum();
    let allowed = 2 * at_once * MOST_PARKED as i64 + (4 << 20);
    if let (Some(size), Some(size_now)) = (size, size_now) {
        assert!(size_now - size <= allowed, "{} bytes more are resident, {allowed} allowed", size_now - size);
    }
}
