//! Threads on one context: each on slots of its own, with the bytes that one thread gives; and threads that create, use and destroy each
//! other's handles.
//!
//! Run plain, on the CUDA backend with a stream for each thread, and under ThreadSanitizer (tests/tsan.sh), where fewer rounds are enough:
//! what it finds does not depend on who comes first.

#![allow(clippy::multiple_unsafe_ops_per_block, reason = "a test's calls share one promise")]

mod common;

use std::process::Command;
use std::ptr::{null, null_mut};
use std::sync::Barrier;
use std::sync::atomic::AtomicPtr;
use std::sync::atomic::Ordering::Relaxed;

use common::device::{OwnStream, backend, context, cuda, stream, sync};
use common::model::Model;
use common::{Array, Outputs, Rig, Rng, Row, Spec, encode, hash, heap, ids32, message, ok, tensor};
use replayssm::ffi::*;

#[global_allocator]
static HEAP: common::device::Heap = common::device::Heap::ON_CUDA;

const THREADS: usize = 8;
/// Slots and rings of a thread.
const OWN: usize = 6;

/// Something that several threads use.
struct Shared<'a, T>(&'a T);
// SAFETY: of what is shared, threads use const handles, each on slots of its own, which the interface allows; the rest they only read.
unsafe impl<T> Sync for Shared<'_, T> {}

/// Does something on all threads at once, each with a stream of its own.
fn on_threads<T, R: Send>(shared: &T, work: impl Fn(&T, usize) -> R + Sync) -> Vec<R> {
    let (shared, barrier) = (Shared(shared), Barrier::new(THREADS));
    std::thread::scope(|scope| {
        let (shared, barrier, work) = (&shared, &barrier, &work);
        let start = |thread: usize| {
            scope.spawn(move || {
                let _stream = OwnStream::begin();
                assert_eq!(stream().is_null(), !cuda());
                barrier.wait();
                work(shared.0, thread)
            })
        };
        let threads: Vec<_> = (0..THREADS).map(start).collect();
        threads.into_iter().map(|thread| thread.join().expect("a thread")).collect()
    })
}

/// Rounds of a test: a part of them with REPLAYSSM_TEST_ROUNDS, in percent.
fn rounds(all: usize) -> usize {
    let percent = std::env::var("REPLAYSSM_TEST_ROUNDS").map_or(100, |n| n.parse().expect("a number"));
    (all * percent).div_ceil(100)
}

/// A model of all families, on a context of several threads, of which calls share out all work.
fn model() -> Model {
    replayssm::backend::cpu::share_all();
    let first = Spec {
        heads: 2,
        groups: 1,
        headdim: 18,
        dstate: 24,
        window: 10,
        t_max: 3,
        keep: 2,
        slots: THREADS * OWN,
        readout: REPLAYSSM_READOUT_FULL,
        threads: 3,
        ..Spec::default()
    };
    let gdn = Spec { family: REPLAYSSM_FAMILY_GDN, readout: REPLAYSSM_READOUT_EXACT, seed: 2, ..first.clone() };
    let kda = Spec { family: REPLAYSSM_FAMILY_KDA, readout: REPLAYSSM_READOUT_HIGH, seed: 3, ..first.clone() };
    let first = Rig::new(first);
    let others = [gdn, kda].map(|spec| first.beside(spec));
    Model::of(std::iter::once(first).chain(others).collect())
}

fn bits(outputs: &[Outputs]) -> u64 {
    hash(outputs.iter().flatten().flatten().flatten().copied())
}

fn bytes(blob: &[u8]) -> u64 {
    hash(blob.iter().map(|&byte| byte.into()))
}

/// What a thread does with its slots, by its own lots: every operation, and a hash of what came of it.
fn script(model: &Model, thread: usize, rounds: usize) -> Vec<(String, u64)> {
    let rig = &model.rigs[0];
    let mut rng = Rng(1000 + thread as u64);
    let first = thread * OWN;
    let mut log = Vec::new();
    // Slots that have a request; others hold a checkpoint without a ring, or nothing.
    let mut live = [true; OWN];
    (first..first + OWN).for_each(|slot| rig.reset(slot, slot, 0));
    for _ in 0..rounds {
        let Some(from) = (0..OWN).cycle().skip(rng.below(OWN)).take(OWN).find(|&slot| live[slot]) else {
            unreachable!()
        };
        let to = (from + 1 + rng.below(OWN - 1)) % OWN;
        let (slot, other) = (first + from, first + to);
        let cursor = rig.cursor(slot);
        let (what, result) = match rng.below(20) {
            0 => {
                let blob = rig.save(REPLAYSSM_SAVE_LIVE, slot, slot);
                ok(rig.restore(other, other, &blob));
                live[to] = true;
                ("save and restore", bytes(&blob))
            }
            1 => {
                let blob = rig.save(REPLAYSSM_SAVE_PORTABLE, slot, slot);
                ok(rig.restore(other, other, &blob));
                live[to] = true;
                ("save and restore elsewhere", bytes(&blob))
            }
            2 => {
                rig.copy(REPLAYSSM_COPY_FORK, (slot, slot), (other, other), None);
                live[to] = true;
                ("fork", bits_of(model, other))
            }
            3 => {
                rig.copy(REPLAYSSM_COPY_STORE, (slot, slot), (other, other), None);
                rig.copy(REPLAYSSM_COPY_LOAD, (other, other), (slot, slot), Some(cursor.position));
                live[to] = false;
                ("store and load", bits_of(model, slot))
            }
            4 => {
                rig.copy(REPLAYSSM_COPY_MOVE, (slot, slot), (other, other), None);
                (live[from], live[to]) = (false, true);
                ("move", bits_of(model, other))
            }
            5 => {
                rig.flush(slot, slot, None);
                ("flush", bits_of(model, slot))
            }
            6 => {
                rig.flush_later(slot, slot, cursor.position + 2);
                ("flush later", bits_of(model, slot))
            }
            7 if cursor.position > 0 => {
                let done = rig.rewind(slot, slot, 1);
                ("rewind", bits_of(model, slot) ^ u64::from(done))
            }
            8 => {
                rig.reset(slot, slot, 0);
                ("reset", bits_of(model, slot))
            }
            9 => {
                let tokens = model.tokens(&mut rng, 7);
                let outputs = model.step(slot, slot, &tokens, true);
                rig.commit_batch(&[Row::new(slot, &tokens.pools[0])], true, 0, None);
                ("extend", bits(&outputs))
            }
            _ => {
                let n = 1 + rng.below(rig.spec.t_max);
                let tokens = model.tokens(&mut rng, n);
                let outputs = model.step(slot, slot, &tokens, false);
                let accepted = rng.below(n + 1);
                model.commit(slot, slot, &tokens, accepted as i32);
                let mut result = bits(&outputs);
                if accepted > 0 && !live[to] {
                    let rows = [Row::new(slot, &tokens.pools[0])];
                    let at = cursor.position + accepted as i64;
                    rig.snapshot(&rows, false, None, &[at], &[other as i64]);
                    result ^= bytes(&rig.save(REPLAYSSM_SAVE_STORED, other, other));
                }
                ("step", result)
            }
        };
        let after = rig.cursor(slot);
        let words =
            [after.position, after.flush_before, after.seed as i64, after.generation.into(), after.committed.into()];
        let result = result ^ hash(words.iter().flat_map(|&word| [word as u32, (word >> 32) as u32]));
        log.push((format!("{what} of slot {from} at {}, slot {to}", cursor.position), result));
    }
    log
}

/// A hash of a slot's states in all pools.
fn bits_of(model: &Model, slot: usize) -> u64 {
    hash(model.states(slot, slot).into_iter().flatten())
}

#[test]
fn threads_on_slots_of_their_own_give_the_bytes_of_one_thread() {
    let rounds = rounds(300);
    let (together, alone) = (model(), model());
    let found = on_threads(&together, |model, thread| script(model, thread, rounds));
    let wanted: Vec<_> = (0..THREADS).map(|thread| script(&alone, thread, rounds)).collect();
    for (thread, (found, wanted)) in found.iter().zip(&wanted).enumerate() {
        let first = found.iter().zip(wanted).position(|(a, b)| a != b);
        assert_eq!(first.map(|i| (i, &found[i], &wanted[i])), None, "thread {thread}");
        assert_eq!(found.len(), wanted.len());
    }
    // No count is lost, nothing is seen that is not there.
    let counts = |model: &Model| {
        let s = model.rigs[0].stats();
        [s.steps, s.rows, s.tokens, s.accepted, s.flushes, s.checkpoint_bytes_written, s.ring_bytes_written]
    };
    assert_eq!(counts(&together), counts(&alone));
    for model in [&together, &alone] {
        assert_eq!(model.rigs[0].faults(false).bits & !REPLAYSSM_FAULT_REWIND, 0);
    }
    if rounds >= 100 {
        assert!(counts(&alone).iter().all(|&n| n > 0), "{:?}", counts(&alone));
        for what in ["step", "extend", "save", "fork", "store", "move", "flush of", "flush later", "rewind", "reset"] {
            assert!(wanted.iter().flatten().any(|(name, _)| name.starts_with(what)), "no {what}");
        }
    }
}

/// Handles that all threads create, use and destroy. The header forbids to destroy a pool while a call on it is running; a program that does so
/// all the same gets a status, and no memory of another's.
struct Contested {
    context: *mut replayssm_context,
    slots: [AtomicPtr<replayssm_slots>; 2],
    pools: [AtomicPtr<replayssm_layers>; 4],
}

/// The inputs of a step of one token.
struct Step {
    slot: Vec<i32>,
    x: Array,
    gates: Array,
    out: Array,
}

impl Step {
    const HEADS: usize = 2;
    const DIM: usize = 8;

    fn new(thread: usize) -> Self {
        let of = |n: usize, value: f64| {
            let mut array = Array::poisoned(REPLAYSSM_DTYPE_F32, n);
            (0..n).for_each(|i| array.set(i, encode(REPLAYSSM_DTYPE_F32, value)));
            array
        };
        let n = Self::HEADS * Self::DIM;
        Step { slot: heap([thread as i32]), x: of(n, 0.25), gates: of(n, -0.5), out: of(n, 0.0) }
    }

    fn pool() -> replayssm_pool_desc {
        desc!(replayssm_pool_desc {
            family: REPLAYSSM_FAMILY_MAMBA2,
            n_layers: 1,
            io: REPLAYSSM_DTYPE_F32,
            nheads: Self::HEADS as i32,
            headdim: Self::DIM as i32,
            dstate: Self::DIM as i32,
            ngroups: 1,
        })
    }

    fn batch(&self) -> replayssm_batch {
        desc!(replayssm_batch { n_rows: 1, tokens: 1, slots: ids32(&self.slot) })
    }

    fn step(&self, pool: *const replayssm_layers) -> i32 {
        let row = |array: &Array, head: usize| tensor(array, 0, 0, 0, head);
        let args = desc!(replayssm_mamba2_args {
            x: row(&self.x, Self::DIM),
            B: row(&self.x, 0),
            C: row(&self.x, 0),
            dt: row(&self.gates, 1),
            A: row(&self.gates, 1),
            out: row(&self.out, Self::DIM),
        });
        // SAFETY: arrays live until the work is done; the handle may be anything.
        unsafe { replayssm_mamba2_step(pool, 0, &self.batch(), &args, &Rig::exec()) }
    }

    fn commit(&self, slots: *const replayssm_slots) -> i32 {
        // SAFETY: as above.
        unsafe { replayssm_commit(slots, &self.batch(), null(), &Rig::exec()) }
    }
}

fn slots_desc() -> replayssm_slots_desc {
    desc!(replayssm_slots_desc { n_slots: THREADS as i32, window: 4, max_step_tokens: 1 })
}

/// A thread's part: what statuses it saw, by how often: accepted, refused.
fn contend(at: &Contested, thread: usize, rounds: usize) -> [usize; 2] {
    let mut rng = Rng(2000 + thread as u64);
    let step = Step::new(thread);
    let mut seen = [0; 2];
    let mut expect = |status: i32, call: &str| {
        match status {
            REPLAYSSM_OK => seen[0] += 1,
            REPLAYSSM_ERROR_INVALID_HANDLE => {
                let said = message();
                assert!(said.contains("destroyed") || said.contains("NULL"), "{call}: {said}");
                seen[1] += 1;
            }
            other => panic!("{call}: {other}, {}", message()),
        }
        status == REPLAYSSM_OK
    };
    for _ in 0..rounds {
        let slots = &at.slots[rng.below(at.slots.len())];
        let pool = &at.pools[rng.below(at.pools.len())];
        match rng.below(10) {
            0 => {
                let mut made = null_mut();
                // SAFETY: descriptors and out-parameters are locals, here and below; handles may be anything.
                expect(unsafe { replayssm_slots_create(at.context, &slots_desc(), &mut made) }, "slots_create");
                replayssm_slots_destroy(slots.swap(made, Relaxed));
            }
            1 | 2 => {
                let mut made = null_mut();
                let parent = slots.load(Relaxed);
                // SAFETY: as above.
                let status = unsafe { replayssm_layers_create(parent, &Step::pool(), null(), 0, &mut made) };
                assert_eq!(made.is_null(), !expect(status, "layers_create"));
                replayssm_layers_destroy(pool.swap(made, Relaxed));
            }
            3 => {
                // Its own chain: children keep their parents.
                let (mut own, mut child) = (null_mut(), null_mut());
                // SAFETY: as above.
                ok(unsafe { replayssm_slots_create(at.context, &slots_desc(), &mut own) });
                // SAFETY: as above.
                ok(unsafe { replayssm_layers_create(own, &Step::pool(), null(), 0, &mut child) });
                ok(step.step(child));
                ok(step.commit(own));
                replayssm_slots_destroy(own);
                ok(step.step(child));
                assert_eq!(step.commit(own), REPLAYSSM_ERROR_INVALID_HANDLE);
                replayssm_layers_destroy(child);
                assert_eq!(step.step(child), REPLAYSSM_ERROR_INVALID_HANDLE);
            }
            4 => replayssm_slots_destroy(slots.load(Relaxed)),
            5 => replayssm_layers_destroy(pool.load(Relaxed)),
            6 => {
                let mut stats = desc!(replayssm_stats {});
                // SAFETY: as above.
                expect(unsafe { replayssm_stats_read(slots.load(Relaxed), &mut stats) }, "stats_read");
            }
            7 => _ = expect(step.commit(slots.load(Relaxed)), "commit"),
            _ => _ = expect(step.step(pool.load(Relaxed)), "step"),
        }
        // Arrays are this thread's, and live until its work is done.
        sync();
    }
    seen
}

#[test]
fn handles_that_others_destroy_work_or_are_invalid() {
    let context = context(backend(), 2).unwrap_or_else(|error| panic!("{error}"));
    let at = Contested { context, slots: Default::default(), pools: Default::default() };
    let rounds = rounds(if cuda() { 1000 } else { 10_000 });
    let seen = on_threads(&at, |at, thread| contend(at, thread, rounds));
    let all = seen.iter().fold([0, 0], |[a, b], [c, d]| [a + c, b + d]);
    println!("{} calls were accepted, {} refused", all[0], all[1]);
    assert!(all[0] > THREADS * rounds / 20 && all[1] > THREADS * rounds / 20, "{all:?}");
    // Whatever is left goes, the context first.
    replayssm_context_destroy(context);
    at.slots.iter().for_each(|slots| replayssm_slots_destroy(slots.load(Relaxed)));
    let mut info = desc!(replayssm_context_info {});
    // SAFETY: the descriptor is a local; the handle may be anything.
    assert_eq!(unsafe { replayssm_context_query(context, &mut info) }, REPLAYSSM_ERROR_INVALID_HANDLE);
    at.pools.iter().for_each(|pool| replayssm_layers_destroy(pool.load(Relaxed)));
}

/// In few rounds: valgrind runs one thread at a time, and tells what is read uninitialised, used after it was freed, or lost.
#[test]
fn threads_are_clean_under_valgrind() {
    cpu_only!();
    if !Command::new("valgrind").arg("--version").output().is_ok_and(|output| output.status.success()) {
        return println!("skipped: threads under valgrind because it is not installed");
    }
    let mut command = Command::new("valgrind");
    // What the harness's main thread has of its own is reachable to the end, by ways that valgrind does not see.
    command.args(["--quiet", "--error-exitcode=99", "--fair-sched=yes", "--leak-check=full"]);
    command.args(["--show-leak-kinds=definite", "--errors-for-leak-kinds=definite"]);
    command.arg(std::env::current_exe().expect("this program")).args(["give_the_bytes", "or_are_invalid"]);
    let output = command.env("REPLAYSSM_TEST_ROUNDS", "1").output().expect("valgrind runs");
    let said = String::from_utf8_lossy(&output.stdout) + String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && said.contains("2 passed"), "{said}");
}
