//! What only makes sense on CUDA: graphs, contexts, streams, launches that depend on each other, addresses, and what a device does with
//! arrays that are wrong. Everything that a call reads or writes lies in device memory of exactly its size, so that compute-sanitizer sees
//! what is beside it.
//!
//! A test prints `skipped: ` and the library's own sentence where there is no CUDA backend. Tests run one after the other.

#![allow(clippy::multiple_unsafe_ops_per_block, reason = "a test's calls share one promise")]

mod common;
#[path = "cuda/model.rs"]
mod model;

use std::ffi::c_void;
use std::ptr::{null, null_mut};
use std::sync::mpsc::channel;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use common::gpu::{self, Block, Gpu, Graph, Stream};
use common::{address, components, message};
use model::{
    Copies, Gap, Model, NULL_ID, Options, Part, RINGS, ROWS, Round, SLOTS, Script, T_MAX, TOKENS, accepted, pool_descs,
    refused, ring_of, same, same_where, slots_desc,
};
use replayssm::backend::cuda::allocations;
use replayssm::ffi::*;

/// Tests count allocations and free memory: one at a time.
static ONE: Mutex<()> = Mutex::new(());

/// The device, or a line that says why the test is skipped.
fn device(what: &str) -> Option<(Gpu, MutexGuard<'static, ()>)> {
    let guard = ONE.lock().unwrap_or_else(PoisonError::into_inner);
    match gpu::primary() {
        Ok(gpu) => {
            gpu.enter();
            Some((gpu, guard))
        }
        Err(why) => {
            println!("skipped: {what} because {why}");
            None
        }
    }
}

/// Rounds of a long test: fewer under a sanitizer.
fn rounds(all: usize) -> usize {
    std::env::var("REPLAYSSM_CUDA_ROUNDS").ok().and_then(|n| n.parse().ok()).map_or(all, |most: usize| most.min(all))
}

/// Slots that are no padding.
fn all_slots() -> std::ops::Range<usize> {
    0..NULL_ID as usize
}

/// What the backends have in common.
fn same_on_both(what: &str, one: &[Part], other: &[Part]) {
    same_where(what, one, other, |part| part.on_both);
}

fn on(gpu: Gpu) -> Model {
    Model::new(Some(gpu), Options::default())
}

fn on_the_cpu() -> Model {
    Model::new(None, Options { threads: 1, ..Options::default() })
}

// ---- The model of these tests ----

/// On every machine: rounds are what they should be, and the model finds nothing where there is nothing.
#[test]
fn the_model_of_these_tests_is_sound() {
    let models = [1, 3].map(|threads| Model::new(None, Options { threads, ..Options::default() }));
    let odd = Model::new(None, Options { threads: 1, odd: true, ..Options::default() });
    let mut script = Script::new(3, all_slots());
    for round in 0..60 {
        let data = script.next(&models[0]);
        models.iter().for_each(|model| model.run(&data, 0));
        odd.run(&data, 0);
        same(&format!("round {round}, outputs"), &models[0].outputs(), &models[1].outputs());
        same(&format!("round {round}, memory"), &models[0].memory(), &models[1].memory());
        same(&format!("round {round}, odd outputs"), &models[0].outputs(), &odd.outputs());
        assert_eq!(models[0].report(false).bits & !REPLAYSSM_FAULT_REWIND, 0, "round {round}: {}", message());
    }
    models.iter().for_each(|model| model.life(0));
    same("outputs of everything else", &models[0].outputs(), &models[1].outputs());
    same("memory after everything else", &models[0].memory(), &models[1].memory());
    let mut stats = desc!(replayssm_stats {});
    // SAFETY: the stats are a local.
    accepted(unsafe { replayssm_stats_read(models[0].slots_handle(), &mut stats) });
    assert!(stats.flushes > 100 && stats.accepted > 100 && stats.accepted < stats.tokens, "too little happens");
}

// ---- Graphs ----

/// Cases 30, 32 and 33: captured once, replayed with other lengths, slots, rings, counts, masks, generations, padding, resets and rewinds.
#[test]
fn one_graph_serves_every_batch() {
    let Some((gpu, _guard)) = device("graphs") else { return };
    let (replayed, eager, host) = (on(gpu), on(gpu), on_the_cpu());
    let (stream, other) = (gpu.stream(), gpu.stream());
    let mut script = Script::new(30, all_slots());
    let first = script.next(&host);
    replayed.load(&first);
    gpu.sync();
    let graph = stream.capture(|| replayed.enqueue(stream.at, 0));
    let mut data = first;
    for round in 0..rounds(200) {
        for model in [&replayed, &eager, &host] {
            model.load(&data);
        }
        gpu.sync();
        graph.launch(&stream);
        eager.enqueue(other.at, 0);
        host.enqueue(0, 0);
        gpu.sync();
        let what = format!("round {round}");
        let outputs = replayed.outputs();
        same(&what, &outputs, &eager.outputs());
        same_on_both(&what, &outputs, &host.outputs());
        if round % 10 == 9 {
            let memory = replayed.memory();
            same(&what, &memory, &eager.memory());
            same_on_both(&what, &memory, &host.memory());
        }
        let bits = [&replayed, &eager, &host].map(|model| model.report(true).bits);
        assert_eq!(bits, [bits[0] & REPLAYSSM_FAULT_REWIND; 3], "{what}: faults");
        data = script.next(&host);
    }
}

/// Flushes, snapshots and copies behind every step: captured once, replayed with other rows, positions, sources and targets.
#[test]
fn one_graph_serves_every_snapshot_flush_and_copy() {
    let Some((gpu, _guard)) = device("graphs") else { return };
    let models = [on(gpu), on(gpu), on_the_cpu()];
    let [replayed, eager, host] = &models;
    let copies = [Copies::new(Some(gpu)), Copies::new(Some(gpu)), Copies::new(None)];
    let (stream, other) = (gpu.stream(), gpu.stream());
    // Requests have the first six slots; the others get what is copied.
    let mut script = Script::new(31, 0..6);
    let mut rng = common::Rng(32);
    let mut data = script.next(host);
    replayed.load(&data);
    copies[0].load(&[-1; ROWS], &[-1; ROWS], [-1; 2], [0; 2], [-1; 3]);
    gpu.sync();
    let graph = stream.capture(|| {
        replayed.enqueue(stream.at, 0);
        copies[0].enqueue(replayed, stream.at);
    });
    let mut stored = 0;
    for round in 0..rounds(100) {
        models.iter().for_each(|model| model.load(&data));
        // Positions as the step will find them, about.
        let cursors: Vec<_> = (0..6).map(|slot| host.cursor(slot)).collect();
        let target = |rng: &mut common::Rng| if rng.below(6) == 0 { -1 } else { 6 + rng.below(7) as i64 };
        let at: Vec<i64> = (0..ROWS)
            .map(|row| match usize::try_from(data.slots[row]) {
                Ok(slot) if slot < 6 => cursors[slot].position + rng.below(5) as i64,
                _ => 3,
            })
            .collect();
        let first = rng.below(7);
        let dst: Vec<i64> = (0..ROWS).map(|row| if row < 7 { 6 + ((first + row) % 7) as i64 } else { -1 }).collect();
        let flushed =
            [rng.below(3) as i64, 3 + rng.below(3) as i64].map(|slot| if rng.below(3) == 0 { -1 } else { slot });
        let later = flushed.map(|slot| usize::try_from(slot).map_or(0, |slot| cursors[slot].position + 5));
        let to = target(&mut rng);
        let copied = [rng.below(6) as i64, to, if to == 12 { 6 } else { to.max(5) + 1 }];
        copies.iter().for_each(|copies| copies.load(&at, &dst, flushed, later, copied));
        gpu.sync();
        graph.launch(&stream);
        for (model, copies, stream) in [(eager, &copies[1], other.at), (host, &copies[2], 0)] {
            model.enqueue(stream, 0);
            copies.enqueue(model, stream);
        }
        gpu.sync();
        let what = format!("round {round}");
        let (outputs, memory) = (replayed.outputs(), replayed.memory());
        same(&what, &outputs, &eager.outputs());
        same_on_both(&what, &outputs, &host.outputs());
        same(&what, &memory, &eager.memory());
        same_on_both(&what, &memory, &host.memory());
        let bits = models.each_ref().map(|model| model.report(true).bits);
        assert_eq!(bits, [bits[0] & REPLAYSSM_FAULT_REWIND; 3], "{what}: faults");
        stored += (0..6).filter(|&slot| host.cursor(slot).committed > 0).count();
        data = script.next(host);
    }
    assert!(stored > 10, "too little happens");
}

// ---- Allocations, contexts, capture modes ----

/// Between creating and destroying nothing is allocated, and the calling thread's context and capture mode stay what they are.
#[test]
fn calls_allocate_nothing_and_leave_the_thread_as_it_was() {
    let Some((gpu, _guard)) = device("allocations") else { return };
    let model = on(gpu);
    let other = gpu.another();
    let stream = gpu.stream();
    let mut script = Script::new(31, all_slots());
    let data = script.next(&model);
    model.load(&data);
    let calls = || {
        model.enqueue(stream.at, 0);
        model.enqueue(stream.at, REPLAYSSM_EXEC_PDL);
        model.life(stream.at);
        model.report(true);
        let mut stats = desc!(replayssm_stats {});
        // SAFETY: the stats are a local.
        accepted(unsafe { replayssm_stats_read(model.slots_handle(), &mut stats) });
    };
    calls();
    gpu.sync();
    let (before, free) = (allocations(), gpu.free_bytes());
    assert!(before >= 10, "{before} allocations: they are not counted");
    for n in 0..rounds(500) {
        // None, another context, and the library's own; every capture mode.
        let (context, mode) = ([0, other.context, gpu.context][n % 3], (n / 3 % 3) as i32);
        match n % 3 {
            0 => gpu.leave(),
            1 => other.enter(),
            _ => gpu.enter(),
        }
        let found = gpu.exchange_capture_mode(mode);
        calls();
        assert_eq!(gpu.current(), context, "the current context after calls, round {n}");
        assert_eq!(gpu.exchange_capture_mode(found), mode, "the capture mode after calls, round {n}");
        // The rings would run beyond what counts as held if nothing were waited for; and launches queue up.
        if n % 16 == 15 {
            gpu.sync();
        }
    }
    gpu.sync();
    assert_eq!(allocations(), before, "allocations");
    assert_eq!(gpu.free_bytes(), free, "free bytes of the device");
    assert_eq!(model.report(false).bits & !REPLAYSSM_FAULT_REWIND, 0);
    // Creating and destroying leave the thread alone, too.
    for (context, enter) in [(0, None), (other.context, Some(other))] {
        match enter {
            None => gpu.leave(),
            Some(other) => other.enter(),
        }
        let found = gpu.exchange_capture_mode(1);
        let handle = model::context(Some(gpu), Options::default());
        let mut slots = null_mut();
        // SAFETY: the descriptor and the out-parameter are locals.
        accepted(unsafe { replayssm_slots_create(handle, &slots_desc(), &mut slots) });
        let mut pools = pool_descs().map(|desc| {
            let mut pool = null_mut();
            // SAFETY: as above.
            accepted(unsafe { replayssm_layers_create(slots, &desc, null(), 0, &mut pool) });
            pool
        });
        pools.reverse();
        pools.iter().for_each(|&pool| replayssm_layers_destroy(pool));
        replayssm_slots_destroy(slots);
        replayssm_context_destroy(handle);
        assert_eq!(gpu.current(), context, "the current context after creating and destroying");
        assert_eq!(gpu.exchange_capture_mode(found), 1, "the capture mode after creating and destroying");
    }
    gpu.enter();
    // SAFETY: nothing uses the context any more.
    gpu.check(unsafe { (gpu.f.context_destroy)(other.context as *mut c_void) }, "cuCtxDestroy");
    gpu.enter();
}

/// A thread creates, uses and destroys handles while another captures in global mode: the capture survives, and the graph is right.
#[test]
fn handles_come_and_go_while_another_thread_captures() {
    let Some((gpu, _guard)) = device("creating while another thread captures") else { return };
    let (captured, eager) = (on(gpu), on(gpu));
    let stream = gpu.stream();
    let mut script = Script::new(33, all_slots());
    let data = script.next(&captured);
    captured.load(&data);
    eager.run(&data, 0);
    gpu.sync();
    let graph = stream.capture(|| {
        let (tell, told) = channel::<()>();
        std::thread::spawn(move || {
            gpu.enter();
            for _ in 0..2 {
                let context = model::context(Some(gpu), Options::default());
                let mut slots = null_mut();
                // SAFETY: the descriptor and the out-parameter are locals, here and below.
                accepted(unsafe { replayssm_slots_create(context, &slots_desc(), &mut slots) });
                for desc in pool_descs() {
                    let mut pool = null_mut();
                    // SAFETY: as above.
                    accepted(unsafe { replayssm_layers_create(slots, &desc, null(), 0, &mut pool) });
                    replayssm_layers_destroy(pool);
                }
                let mut stats = desc!(replayssm_stats {});
                // SAFETY: as above.
                accepted(unsafe { replayssm_stats_read(slots, &mut stats) });
                replayssm_slots_destroy(slots);
                replayssm_context_destroy(context);
            }
            tell.send(()).expect("the test waits");
        })
        .join()
        .expect("the other thread");
        told.recv().expect("it has told");
        captured.enqueue(stream.at, 0);
        // And this thread, whose own mode is global.
        let mut slots = null_mut();
        let context = model::context(Some(gpu), Options::default());
        // SAFETY: as above.
        accepted(unsafe { replayssm_slots_create(context, &slots_desc(), &mut slots) });
        replayssm_slots_destroy(slots);
        replayssm_context_destroy(context);
        captured.report(false);
    });
    graph.launch(&stream);
    gpu.sync();
    same("captured", &captured.outputs(), &eager.outputs());
    same("captured", &captured.memory(), &eager.memory());
}

/// Saving and restoring wait for their stream, so they refuse one that captures and leave the capture alone; on another stream they work
/// meanwhile. Behind enqueued work on a stream they see what it did.
#[test]
fn saving_waits_for_its_stream_and_refuses_one_that_captures() {
    let Some((gpu, _guard)) = device("saving") else { return };
    let (captured, eager) = (on(gpu), on(gpu));
    let (stream, other) = (gpu.stream(), gpu.stream());
    let mut script = Script::new(35, all_slots());
    let data = script.next(&captured);
    captured.load(&data);
    eager.load(&data);
    gpu.sync();
    let save = |model: &Model, kind: i32, stream: usize| {
        let (slot, ring) = ([0i64], [ring_of(0) as i64]);
        let (slots, rings) = (common::ids64(&slot), common::ids64(&ring));
        let list = desc!(replayssm_list { n: 1, place: REPLAYSSM_WHERE_HOST, slots: slots, rings: rings });
        let exec = model.exec(stream, 0);
        let mut bytes = 0;
        // SAFETY: everything lives until the call returns, here and below.
        accepted(unsafe { replayssm_save_bytes(model.slots_handle(), kind, &mut bytes) });
        let mut blob = vec![0u8; bytes as usize];
        let at = blob.as_mut_ptr().cast();
        // SAFETY: as above.
        let status = unsafe { replayssm_save(model.slots_handle(), &list, kind, at, bytes, &exec) };
        // Batches name generations, so the ring keeps its own, which is that of a new one.
        let kept = common::heap([0u32]);
        let args = desc!(replayssm_restore_args { generation: kept.as_ptr() });
        // SAFETY: as above.
        let back = || unsafe { replayssm_restore(model.slots_handle(), &list, at, bytes, &args, &exec) };
        (status, if status == REPLAYSSM_OK { back() } else { status }, blob)
    };
    let graph = stream.capture(|| {
        for kind in [REPLAYSSM_SAVE_LIVE, REPLAYSSM_SAVE_PORTABLE] {
            assert_eq!(save(&captured, kind, stream.at).0, REPLAYSSM_ERROR_CAPTURING);
        }
        assert!(message().contains("captures"), "{}", message());
        assert_eq!(save(&captured, REPLAYSSM_SAVE_LIVE, other.at).0, REPLAYSSM_OK, "{}", message());
        captured.enqueue(stream.at, 0);
    });
    graph.launch(&stream);
    eager.enqueue(other.at, 0);
    for kind in [REPLAYSSM_SAVE_LIVE, REPLAYSSM_SAVE_PORTABLE] {
        // No wait of ours between the work and these.
        let (one, two) = (save(&captured, kind, stream.at), save(&eager, kind, other.at));
        assert_eq!([one.0, one.1, two.0, two.1], [REPLAYSSM_OK; 4], "{}", message());
        assert!(one.2 == two.2, "kind {kind}");
    }
    gpu.sync();
    same("saved", &captured.outputs(), &eager.outputs());
}

/// Destroying handles behind enqueued work waits for it: memory and code go when nobody uses them any more.
#[test]
fn destroying_waits_for_work() {
    let Some((gpu, _guard)) = device("destroying") else { return };
    let late = gpu.kernel(PTX, c"late");
    let stream = gpu.stream();
    let context = model::context(Some(gpu), Options::default());
    let mut slots = null_mut();
    // SAFETY: descriptors and out-parameters are locals; the batch lives until the work has run.
    accepted(unsafe { replayssm_slots_create(context, &slots_desc(), &mut slots) });
    let block = Block::of(Some(gpu), &0i64.to_le_bytes());
    let ids = replayssm_ids { data: block.part(0), stride: 1, dtype: REPLAYSSM_DTYPE_I64, reserved: 0 };
    let batch = desc!(replayssm_batch { n_rows: 1, tokens: 1, slots: ids });
    let exec = desc!(replayssm_exec { stream: stream.at as *mut _ });
    // Some 50 ms.
    gpu.launch(late, stream.at, 1, false, &[0, 0, 0, 100_000_000]);
    // SAFETY: as above.
    accepted(unsafe { replayssm_commit(slots, &batch, null(), &exec) });
    assert!(!stream.is_idle(), "the work is to be under way");
    replayssm_slots_destroy(slots);
    assert!(stream.is_idle(), "work is under way on memory that is gone");
    replayssm_context_destroy(context);
    gpu.sync();
}

#[test]
fn two_contexts_of_one_process() {
    let Some((gpu, _guard)) = device("two contexts") else { return };
    let other = gpu.another();
    other.enter();
    {
        let mine = Model::new(Some(other), Options { current: true, ..Options::default() });
        let primary = on(gpu);
        let host = on_the_cpu();
        let (stream, others) = (gpu.stream(), other.stream());
        let mut script = Script::new(34, all_slots());
        for round in 0..rounds(30) {
            let data = script.next(&host);
            [&mine, &primary, &host].iter().for_each(|model| model.load(&data));
            other.sync();
            gpu.sync();
            // The calling thread's context is now one, now the other.
            if round % 2 == 0 {
                gpu.enter()
            } else {
                other.enter()
            }
            mine.enqueue(others.at, 0);
            primary.enqueue(stream.at, 0);
            host.enqueue(0, 0);
            other.sync();
            gpu.sync();
            let outputs = primary.outputs();
            same(&format!("round {round}"), &outputs, &mine.outputs());
            same_on_both(&format!("round {round}"), &outputs, &host.outputs());
        }
        let memory = primary.memory();
        same("memory", &memory, &mine.memory());
        same_on_both("memory", &memory, &host.memory());
        // A stream of the other context is refused by every call.
        let args = primary.conv_args(0);
        for (model, stream) in [(&primary, &others), (&mine, &stream)] {
            let exec = model.exec(stream.at, 0);
            let list = desc!(replayssm_list { n: 0 });
            let calls = [
                // SAFETY: everything lives until the calls return.
                unsafe { replayssm_commit(model.slots_handle(), &model.batch(), null(), &exec) },
                // SAFETY: as above.
                unsafe { replayssm_conv1d_step(model.pools()[0], 0, &model.batch(), &args, &exec) },
                // SAFETY: as above.
                unsafe { replayssm_reset(model.slots_handle(), &list, null(), &exec) },
            ];
            for status in calls {
                let sentence = refused(status, REPLAYSSM_ERROR_WRONG_STREAM);
                let begin = format!("exec.stream is {:#x}; a stream of ", stream.at);
                assert!(sentence.starts_with(&begin), "{sentence}");
            }
        }
        other.sync();
        gpu.sync();
        same("after refused calls", &memory, &primary.memory());
    }
    // SAFETY: nothing uses the context any more.
    gpu.check(unsafe { (gpu.f.context_destroy)(other.context as *mut c_void) }, "cuCtxDestroy");
    gpu.enter();
}

#[test]
fn devices_threads_and_parts_that_there_are_not() {
    let Some((gpu, _guard)) = device("wrong devices") else { return };
    let create = |device: i32, n_threads: i32| {
        let desc =
            desc!(replayssm_context_desc { backend: REPLAYSSM_BACKEND_CUDA, device: device, n_threads: n_threads });
        let mut context = null_mut();
        // SAFETY: the descriptor and the out-parameter are locals.
        let sentence =
            refused(unsafe { replayssm_context_create(&desc, &mut context) }, REPLAYSSM_ERROR_INVALID_ARGUMENT);
        assert!(context.is_null());
        sentence
    };
    let mut count = 0;
    // SAFETY: the out-parameter is a local.
    gpu.check(unsafe { (gpu.f.device_count)(&mut count) }, "cuDeviceGetCount");
    for device in [-2, count, i32::MAX, i32::MIN] {
        let sentence = create(device, 0);
        assert_eq!(sentence, format!("context_desc.device is {device}; expected -1 to {}", count - 1));
    }
    gpu.leave();
    assert_eq!(
        create(-1, 0),
        "context_desc.device is -1; expected an ordinal, because the calling thread has no current CUDA context"
    );
    gpu.enter();
    assert_eq!(create(0, 2), "context_desc.n_threads is 2; expected 0 on the CUDA backend");
    let model = on(gpu);
    model.load(&Script::new(35, all_slots()).next(&model));
    let exec = desc!(replayssm_exec { part: 1, n_parts: 2 });
    // SAFETY: everything lives until the call returns.
    let status = unsafe { replayssm_commit(model.slots_handle(), &model.batch(), null(), &exec) };
    assert_eq!(
        refused(status, REPLAYSSM_ERROR_INVALID_ARGUMENT),
        "exec.n_parts is 2; expected 0 or 1 on the CUDA backend"
    );
}

// ---- Streams ----

/// Four streams work on disjoint slots of one handle at the same time.
#[test]
fn streams_share_a_handle() {
    let Some((gpu, _guard)) = device("streams") else { return };
    let groups: Vec<Vec<usize>> = (0..4).map(|i| all_slots().filter(|slot| slot % 4 == i).collect()).collect();
    // Batches of one handle each.
    let batches = || {
        let first = on(gpu);
        let others: Vec<_> = (0..3).map(|_| first.beside()).collect();
        let all: Vec<_> = std::iter::once(first).chain(others).collect();
        all.iter().zip(&groups).for_each(|(batch, slots)| batch.read_cursors_of(slots));
        all
    };
    let (side_by_side, in_a_row) = (batches(), batches());
    let streams: Vec<_> = (0..4).map(|_| gpu.stream()).collect();
    // The default streams take their turns in the other handle.
    let defaults = [0, 1, 2];
    let mut scripts: Vec<_> =
        groups.iter().enumerate().map(|(i, slots)| Script::new(40 + i as u64, slots.clone())).collect();
    for round in 0..rounds(100) {
        for i in 0..4 {
            let data = scripts[i].next(&side_by_side[i]);
            side_by_side[i].load(&data);
            in_a_row[i].load(&data);
        }
        gpu.sync();
        // From threads of their own.
        std::thread::scope(|scope| {
            for (batch, stream) in side_by_side.iter().zip(&streams) {
                let batch = Shared(batch);
                scope.spawn(move || batch.get().enqueue(stream.at, 0));
            }
        });
        for batch in &in_a_row {
            gpu.enter();
            batch.enqueue(defaults[round % 3], 0);
        }
        gpu.sync();
        for i in 0..4 {
            same(&format!("round {round}, stream {i}"), &side_by_side[i].outputs(), &in_a_row[i].outputs());
        }
    }
    same("memory", &side_by_side[0].memory(), &in_a_row[0].memory());
    assert_eq!(side_by_side[0].report(false).bits & !REPLAYSSM_FAULT_REWIND, 0);
}

/// Something that another thread uses while this one waits.
#[derive(Clone, Copy)]
struct Shared<'a, T>(&'a T);
// SAFETY: the calls of a model step take const handles and may be made by any thread; nothing else of the model changes meanwhile.
unsafe impl<T> Send for Shared<'_, T> {}

impl<'a, T> Shared<'a, T> {
    fn get(self) -> &'a T {
        self.0
    }
}

/// A stream of a green context, which has a part of the multiprocessors; the first symbol that the driver lacks.
fn green_stream(gpu: Gpu) -> Result<(Stream, usize), String> {
    type Get = unsafe extern "C" fn(i32, *mut c_void, i32) -> i32;
    type Split = unsafe extern "C" fn(*mut c_void, *mut u32, *const c_void, *mut c_void, u32, u32) -> i32;
    type Describe = unsafe extern "C" fn(*mut *mut c_void, *mut c_void, u32) -> i32;
    type Create = unsafe extern "C" fn(*mut *mut c_void, *mut c_void, i32, u32) -> i32;
    type Enter = unsafe extern "C" fn(*mut *mut c_void, *mut c_void) -> i32;
    type Make = unsafe extern "C" fn(*mut *mut c_void, *mut c_void, u32, i32) -> i32;
    macro_rules! symbol {
        ($name:literal as $ty:ty) => {{
            let at = gpu.symbol($name).ok_or(format!("the driver has no {}", $name.to_string_lossy()))?;
            // SAFETY: the function has this type, by the driver's interface.
            unsafe { std::mem::transmute::<*mut c_void, $ty>(at) }
        }};
    }
    let get = symbol!(c"cuDeviceGetDevResource" as Get);
    let split = symbol!(c"cuDevSmResourceSplitByCount" as Split);
    let describe = symbol!(c"cuDevResourceGenerateDesc" as Describe);
    let create = symbol!(c"cuGreenCtxCreate" as Create);
    let enter = symbol!(c"cuCtxFromGreenCtx" as Enter);
    let make = symbol!(c"cuGreenCtxStreamCreate" as Make);
    const MULTIPROCESSORS: i32 = 1;
    const DEFAULT_STREAM: u32 = 1;
    // A resource has 144 bytes, or a few more in newer drivers.
    let [mut all, mut part, mut rest] = [[0u64; 64]; 3];
    let (mut groups, mut desc, mut green, mut context, mut stream) =
        (1, null_mut(), null_mut(), null_mut(), null_mut());
    // SAFETY: out-parameters are locals, as large as the driver's.
    unsafe {
        gpu.check(get(gpu.device, all.as_mut_ptr().cast(), MULTIPROCESSORS), "cuDeviceGetDevResource");
        let [all, part, rest] = [&mut all, &mut part, &mut rest].map(|r| r.as_mut_ptr().cast::<c_void>());
        gpu.check(split(part, &mut groups, all, rest, 0, 16), "cuDevSmResourceSplitByCount");
        gpu.check(describe(&mut desc, part, 1), "cuDevResourceGenerateDesc");
        gpu.check(create(&mut green, desc, gpu.device, DEFAULT_STREAM), "cuGreenCtxCreate");
        gpu.check(enter(&mut context, green), "cuCtxFromGreenCtx");
        gpu.check(make(&mut stream, green, 1, 0), "cuGreenCtxStreamCreate");
    }
    let mut seen = null_mut();
    // SAFETY: the out-parameter is a local.
    let status = unsafe { (gpu.f.stream_context)(stream, &mut seen) };
    println!(
        "of a green context's stream the driver says {}; that it is of the green context: {}, of the primary one: {}",
        gpu.name_of(status),
        seen == context,
        seen as usize == gpu.context
    );
    if let Some(at) = gpu.symbol(c"cuStreamGetCtx_v2") {
        type Of = unsafe extern "C" fn(*mut c_void, *mut *mut c_void, *mut *mut c_void) -> i32;
        // SAFETY: the function has this type, by the driver's interface.
        let of = unsafe { std::mem::transmute::<*mut c_void, Of>(at) };
        let (mut base, mut part) = (null_mut(), null_mut());
        // SAFETY: out-parameters are locals.
        let status = unsafe { of(stream, &mut base, &mut part) };
        println!(
            "its second version says {}; of the primary context: {}, of this green context: {}",
            gpu.name_of(status),
            base as usize == gpu.context,
            part == green
        );
    }
    Ok((Stream::of(gpu, stream as usize), context as usize))
}

/// Steps on a stream of a green context, eager and captured; and a library context on the green one.
#[test]
fn a_green_contexts_stream() {
    let Some((gpu, _guard)) = device("green contexts") else { return };
    let (stream, green) = match green_stream(gpu) {
        Ok(found) => found,
        Err(why) => return println!("skipped: green contexts because {why}"),
    };
    let green = Gpu { context: green, ..gpu };
    let (eager, replayed, plain) = (on(gpu), on(gpu), on(gpu));
    // The thread's current context is the green one when the library is asked for it.
    green.enter();
    let inside = Model::new(Some(green), Options { current: true, ..Options::default() });
    gpu.enter();
    let ours = gpu.stream();
    let mut script = Script::new(36, all_slots());
    let data = script.next(&plain);
    replayed.load(&data);
    let graph = stream.capture(|| replayed.enqueue(stream.at, 0));
    for round in 0..rounds(20) {
        let data = script.next(&plain);
        [&eager, &replayed, &plain, &inside].iter().for_each(|model| model.load(&data));
        gpu.sync();
        green.sync();
        gpu.enter();
        eager.enqueue(stream.at, 0);
        plain.enqueue(ours.at, 0);
        inside.enqueue(stream.at, 0);
        graph.launch(&stream);
        stream.sync();
        gpu.sync();
        let outputs = plain.outputs();
        same(&format!("round {round}, eager"), &outputs, &eager.outputs());
        same(&format!("round {round}, captured"), &outputs, &replayed.outputs());
        same(&format!("round {round}, on the green context"), &outputs, &inside.outputs());
    }
    same("memory", &plain.memory(), &eager.memory());
    same("memory", &plain.memory(), &inside.memory());
    // Still, a stream of another context is refused.
    let other = gpu.another();
    {
        let stream = other.stream();
        for model in [&plain, &inside] {
            let exec = model.exec(stream.at, 0);
            // SAFETY: everything lives until the call returns.
            let status = unsafe { replayssm_commit(model.slots_handle(), &model.batch(), null(), &exec) };
            refused(status, REPLAYSSM_ERROR_WRONG_STREAM);
        }
    }
    // SAFETY: nothing uses the context any more.
    gpu.check(unsafe { (gpu.f.context_destroy)(other.context as *mut c_void) }, "cuCtxDestroy");
    gpu.enter();
}

// ---- Programmatic dependent launch ----

/// `late` lets what is behind it begin at once, and writes its 16-bit elements late. `unlike` counts the 64-bit words that are not a
/// pattern.
const PTX: &std::ffi::CStr = c"
.version 7.8
.target sm_90
.address_size 64
.visible .entry late(.param .u64 to, .param .u64 from, .param .u64 n, .param .u64 cycles)
{
  .reg .pred %p;
  .reg .b16 %h;
  .reg .b32 %r<3>;
  .reg .b64 %d<12>;
  griddepcontrol.launch_dependents;
  griddepcontrol.wait;
  ld.param.u64 %d1, [to];
  ld.param.u64 %d2, [from];
  ld.param.u64 %d3, [n];
  ld.param.u64 %d4, [cycles];
  mov.u64 %d5, %clock64;
spin:
  mov.u64 %d6, %clock64;
  sub.u64 %d7, %d6, %d5;
  setp.lt.u64 %p, %d7, %d4;
  @%p bra spin;
  mov.u32 %r1, %tid.x;
  cvt.u64.u32 %d8, %r1;
  mov.u32 %r2, %ntid.x;
  cvt.u64.u32 %d9, %r2;
copy:
  setp.ge.u64 %p, %d8, %d3;
  @%p bra done;
  shl.b64 %d10, %d8, 1;
  add.u64 %d11, %d2, %d10;
  ld.global.u16 %h, [%d11];
  add.u64 %d11, %d1, %d10;
  st.global.u16 [%d11], %h;
  add.u64 %d8, %d8, %d9;
  bra copy;
done:
  ret;
}
.visible .entry unlike(.param .u64 from, .param .u64 n, .param .u64 pattern, .param .u64 count)
{
  .reg .pred %p, %q;
  .reg .b32 %r<5>;
  .reg .b64 %d<12>;
  ld.param.u64 %d1, [from];
  ld.param.u64 %d2, [n];
  ld.param.u64 %d3, [pattern];
  ld.param.u64 %d4, [count];
  mov.u32 %r1, %tid.x;
  mov.u32 %r2, %ctaid.x;
  mov.u32 %r3, %ntid.x;
  mov.u32 %r4, %nctaid.x;
  mul.wide.u32 %d5, %r2, %r3;
  cvt.u64.u32 %d6, %r1;
  add.u64 %d5, %d5, %d6;
  mul.wide.u32 %d7, %r4, %r3;
look:
  setp.ge.u64 %p, %d5, %d2;
  @%p bra done;
  shl.b64 %d8, %d5, 3;
  add.u64 %d8, %d1, %d8;
  ld.global.u64 %d9, [%d8];
  add.u64 %d5, %d5, %d7;
  setp.eq.u64 %q, %d9, %d3;
  @%q bra look;
  mov.u64 %d10, 1;
  red.global.add.u64 [%d4], %d10;
  bra look;
done:
  ret;
}
";

/// The inputs of a step come from a kernel that lets it begin early and writes them late; so do the counts of a commit, behind the steps.
#[test]
fn dependent_launches_equal_plain_ones() {
    let Some((gpu, _guard)) = device("programmatic dependent launch") else { return };
    let late = gpu.kernel(PTX, c"late");
    let counts = Block::new(Some(gpu), ROWS * 4);
    let graph_counts = Block::new(Some(gpu), ROWS * 4);
    for flags in [REPLAYSSM_EXEC_PDL, REPLAYSSM_EXEC_PDL | REPLAYSSM_EXEC_PDL_PREFETCH] {
        let (plain, dependent, replayed) = (on(gpu), on(gpu), on(gpu));
        let (stream, other) = (gpu.stream(), gpu.stream());
        let mut script = Script::new(37, all_slots());
        let enqueue = |model: &Model, stream: &Stream, hidden: [[usize; 3]; 2]| {
            model.enqueue_with(stream.at, flags, REPLAYSSM_COUNTS_ACCEPTED, &|gap| {
                let [to, from, bytes] = hidden[usize::from(gap == Gap::Counts)];
                gpu.launch(late, stream.at, 1, true, &[to as u64, from as u64, bytes as u64 / 2, 30_000]);
            });
        };
        let mut graph: Option<Graph> = None;
        for round in 0..rounds(100) {
            let data = script.next(&plain);
            [&plain, &dependent, &replayed].iter().for_each(|model| model.load(&data));
            let hidden = dependent.hide_inputs_and_counts(&counts);
            let of_graph = replayed.hide_inputs_and_counts(&graph_counts);
            gpu.sync();
            let graph = graph.get_or_insert_with(|| other.capture(|| enqueue(&replayed, &other, of_graph)));
            plain.enqueue(stream.at, 0);
            enqueue(&dependent, &stream, hidden);
            graph.launch(&other);
            gpu.sync();
            let (outputs, what) = (plain.outputs(), format!("flags {flags}, round {round}"));
            same(&format!("{what}, in a stream"), &outputs, &dependent.outputs());
            same(&format!("{what}, in a graph"), &outputs, &replayed.outputs());
        }
        let memory = plain.memory();
        same(&format!("flags {flags}, in a stream"), &memory, &dependent.memory());
        same(&format!("flags {flags}, in a graph"), &memory, &replayed.memory());
        assert_eq!(dependent.report(false).bits & !REPLAYSSM_FAULT_REWIND, 0);
    }
}

// ---- Addresses ----

/// Slots whose places are more than 2^31 elements, and 2^32 bytes, behind the first: right, and nothing else is touched.
#[test]
fn slots_far_beyond_two_to_the_31_elements() {
    let Some((gpu, _guard)) = device("far slots") else { return };
    const GIB: usize = 1 << 30;
    if gpu.free_bytes() < 40 * GIB {
        return println!("skipped: far slots because 40 GiB of the device are needed");
    }
    const PATTERN: u64 = 0x5A5A_5A5A_5A5A_5A5A;
    let plain = on(gpu);
    // Checkpoints and records of x, a slot (or ring) per GiB, a layer every 64 MiB.
    let blocks = [SLOTS, RINGS].map(|n| Block::new(Some(gpu), n * GIB));
    blocks.iter().for_each(|block| block.fill(0x5A));
    let lent = [REPLAYSSM_COMPONENT_CHECKPOINT, REPLAYSSM_COMPONENT_X].into_iter().zip(&blocks);
    let lent: Vec<_> = lent
        .map(|(kind, block)| {
            desc!(replayssm_lent {
                kind: kind,
                base: block.part(0),
                layer_stride_bytes: GIB as i64 / 16,
                slot_stride_bytes: GIB as i64,
            })
        })
        .collect();
    let far = Model::on_lent(Some(gpu), Options::default(), &lent);
    // Lent memory is not touched before a reset.
    let unlike = gpu.kernel(PTX, c"unlike");
    let count = Block::new(Some(gpu), 8);
    let differing = || {
        count.fill(0);
        for block in &blocks {
            gpu.launch(unlike, 0, 2048, false, &[block.at as u64, block.bytes as u64 / 8, PATTERN, count.at as u64]);
        }
        gpu.sync();
        u64::from_le_bytes(count.read().try_into().expect("eight bytes"))
    };
    assert_eq!(differing(), 0, "words that creating a pool has changed");
    for model in [&plain, &far] {
        let ids: Vec<i64> = (0..RINGS as i64).collect();
        let rings: Vec<i64> = ids.iter().map(|&slot| ring_of(slot as usize) as i64).collect();
        let list = desc!(replayssm_list {
            n: RINGS as i32,
            place: REPLAYSSM_WHERE_HOST,
            slots: common::ids64(&ids),
            rings: common::ids64(&rings),
        });
        // SAFETY: everything lives until the call returns.
        accepted(unsafe { replayssm_reset(model.slots_handle(), &list, null(), null()) });
    }
    let mut script = Script::new(38, all_slots());
    for round in 0..40 {
        let data = script.next(&plain);
        [&plain, &far].iter().for_each(|model| model.run(&data, 0));
        same(&format!("round {round}"), &plain.outputs(), &far.outputs());
    }
    [&plain, &far].iter().for_each(|model| model.life(0));
    gpu.sync();
    same("exports", &plain.outputs(), &far.outputs());
    // Ring rows that nothing has written are zero where the library owns them.
    let checkpoint = format!("component {REPLAYSSM_COMPONENT_CHECKPOINT},");
    let reset = |part: &Part| !part.name.contains("pool 1, component 3,") && !part.name.ends_with("slot or ring 13");
    same_where("memory", &plain.memory(), &far.memory(), reset);
    assert!(plain.memory().iter().any(|part| part.name.contains(&checkpoint) && reset(part)));
    // What belongs to the pool becomes the pattern again; then all is.
    assert!(differing() > 1000, "nothing was written");
    for c in components(far.pools()[1]) {
        for layer in 0..2 {
            for index in 0..if c.per_ring == 1 { RINGS } else { SLOTS } {
                let at = address(&c, layer, index);
                if blocks.iter().any(|block| (block.at..block.at + block.bytes).contains(&at)) {
                    gpu::fill(Some(gpu), at, 0x5A, c.bytes as usize);
                }
            }
        }
    }
    assert_eq!(differing(), 0, "words outside the pool's parts that were changed");
}

/// Rows of a dense batch more than 2^31 elements apart.
#[test]
fn rows_far_beyond_two_to_the_31_elements() {
    let Some((gpu, _guard)) = device("far rows") else { return };
    const FAR: usize = (1 << 31) + 24;
    if gpu.free_bytes() < 24 << 30 {
        return println!("skipped: far rows because 24 GiB of the device are needed");
    }
    let (near, far) = (on(gpu), on(gpu));
    const TOKENS_OF_A_ROW: usize = 2;
    let ids = Block::of(Some(gpu), &[1i64, 5, 9].map(i64::to_le_bytes).concat());
    let rings = Block::of(Some(gpu), &[1, 5, 9].map(|slot| ring_of(slot) as i64).map(i64::to_le_bytes).concat());
    let device_ids =
        |block: &Block| replayssm_ids { data: block.part(0), stride: 1, dtype: REPLAYSSM_DTYPE_I64, reserved: 0 };
    let batch = desc!(replayssm_batch {
        n_rows: 3,
        tokens: TOKENS_OF_A_ROW as i32,
        slots: device_ids(&ids),
        rings: device_ids(&rings),
    });
    near.load(&Script::new(39, all_slots()).next(&near));
    let mut args = near.conv_args(TOKENS_OF_A_ROW);
    let row = args.x.stride_row as usize * 2;
    // SAFETY: everything lives until the work has run, here and below.
    accepted(unsafe { replayssm_conv1d_step(near.pools()[0], 0, &batch, &args, null()) });
    gpu.sync();
    let (x, y) = (args.x.data as usize, args.out.data as usize);
    let blocks = [0, 1].map(|_| Block::new(Some(gpu), 2 * FAR * 2 + row));
    for r in 0..3 {
        gpu::write(Some(gpu), blocks[0].at + r * FAR * 2, &gpu::read(Some(gpu), x + r * row, row));
    }
    (args.x.data, args.x.stride_row) = (blocks[0].part(0), FAR as i64);
    (args.out.data, args.out.stride_row) = (blocks[1].part(0), FAR as i64);
    // SAFETY: as above.
    accepted(unsafe { replayssm_conv1d_step(far.pools()[0], 0, &batch, &args, null()) });
    gpu.sync();
    for r in 0..3 {
        let [near, far] = [y + r * row, blocks[1].at + r * FAR * 2].map(|at| gpu::read(Some(gpu), at, row));
        assert!(near == far, "row {r}");
        assert!(near.iter().any(|&byte| byte != 0xFF), "row {r}");
    }
    same("windows", &near.memory(), &far.memory());
}

/// Addresses aligned to an element alone, and odd strides.
#[test]
fn addresses_aligned_to_an_element_alone() {
    let Some((gpu, _guard)) = device("odd addresses") else { return };
    let even = on(gpu);
    let odd = Model::new(Some(gpu), Options { odd: true, ..Options::default() });
    let host = Model::new(None, Options { odd: true, threads: 1, ..Options::default() });
    let mut script = Script::new(39, all_slots());
    for round in 0..rounds(40) {
        let data = script.next(&even);
        [&even, &odd, &host].iter().for_each(|model| model.run(&data, 0));
        same(&format!("round {round}"), &even.outputs(), &odd.outputs());
        same_on_both(&format!("round {round}"), &even.outputs(), &host.outputs());
    }
    [&even, &odd, &host].iter().for_each(|model| model.life(0));
    gpu.sync();
    same("everything else", &even.outputs(), &odd.outputs());
    same("memory", &even.memory(), &odd.memory());
    same_on_both("everything else", &even.outputs(), &host.outputs());
    same_on_both("memory", &even.memory(), &host.memory());
}

// ---- What only the device can see ----

/// Waits, without synchronising, until the device has reported something.
fn poll(model: &Model) -> replayssm_report {
    let start = Instant::now();
    loop {
        let report = model.report(false);
        if report.bits != 0 {
            return report;
        }
        assert!(start.elapsed() < Duration::from_secs(20), "no fault bit came");
        std::thread::yield_now();
    }
}

/// A batch with some rows that are wrong, and the same with those rows empty.
struct Wrong {
    what: &'static str,
    bad: Round,
    good: Round,
    bits: u32,
    rows: Vec<i64>,
    /// Whether a wrong row's tokens are another's, whose outputs are undefined then.
    overlaps: bool,
    convention: i32,
}

fn wrong_batches(script: &mut Script, model: &Model) -> Vec<Wrong> {
    let mut base = || {
        let mut round = script.next(model);
        round.cu = (0..=ROWS as i32).map(|r| 2 * r).collect();
        for r in 0..ROWS {
            (round.slots[r], round.rings[r]) = (r as i64, ring_of(r) as i32);
            (round.generation[r], round.counts[r]) = (0, 1 + r as i32 % 2);
        }
        round.resets.iter_mut().for_each(|reset| reset.0[0] = -1);
        round.rewinds.iter_mut().for_each(|rewind| rewind.0 = -1);
        round
    };
    let mut all = Vec::new();
    let ids = base();
    let mut bad = ids.clone();
    let mut good = ids;
    let slots = [(1, SLOTS as i64), (4, i64::MAX), (6, 1 << 40), (7, 1 << 32)];
    for (r, slot) in slots {
        bad.slots[r] = slot;
    }
    bad.rings[9] = RINGS as i32;
    bad.rings[10] = i32::MAX;
    // Negative ones are padding and no fault.
    (bad.slots[2], bad.slots[3], bad.rings[11]) = (i64::MIN, -7, i32::MIN);
    [1, 4, 6, 7, 9, 10, 2, 3, 11].iter().for_each(|&r| good.slots[r] = -1);
    let rows = vec![1, 4, 6, 7, 9, 10];
    let convention = REPLAYSSM_COUNTS_ACCEPTED;
    all.push(Wrong { what: "ids", bad, good, bits: REPLAYSSM_FAULT_ID, rows, overlaps: false, convention });

    for convention in [REPLAYSSM_COUNTS_ACCEPTED, REPLAYSSM_COUNTS_ACCEPTED_DRAFTS, REPLAYSSM_COUNTS_REJECTED] {
        let good = base();
        let mut bad = good.clone();
        let values = [(0, i32::MIN), (2, -5), (3, 1000), (5, i32::MAX)];
        let mut good = good;
        for (r, value) in values {
            bad.counts[r] = value;
            let accepted = if (value > 0) == (convention != REPLAYSSM_COUNTS_REJECTED) { 2 } else { 0 };
            good.counts[r] = match convention {
                REPLAYSSM_COUNTS_ACCEPTED => accepted,
                REPLAYSSM_COUNTS_ACCEPTED_DRAFTS => accepted - 1,
                _ => 2 - accepted,
            };
        }
        // No drafts and no bonus token: -1 is 0 tokens.
        let rows = vec![0, 2, 3, 5];
        let bits = REPLAYSSM_FAULT_COUNT;
        if convention == REPLAYSSM_COUNTS_ACCEPTED_DRAFTS {
            // Counts of the other rows are drafts, too.
            for round in [&mut bad, &mut good] {
                for r in [1, 4, 6, 7, 8, 9, 10, 11] {
                    round.counts[r] = r as i32 % 2;
                }
            }
        }
        all.push(Wrong { what: "counts", bad, good, bits, rows, overlaps: false, convention });
    }

    let lengths = |cu: [i32; ROWS + 1], of_good: [i32; ROWS + 1], rows: Vec<i64>, what, overlaps, round: Round| {
        let (mut bad, mut good) = (round.clone(), round);
        bad.cu = cu.into();
        good.cu = of_good.into();
        rows.iter().for_each(|&r| good.slots[r as usize] = -1);
        for r in 0..ROWS {
            let len = good.cu[r + 1] - good.cu[r];
            good.counts[r] = good.counts[r].min(len.max(0));
        }
        bad.counts = good.counts.clone();
        let bits = REPLAYSSM_FAULT_LENGTH;
        Wrong { what, bad, good, bits, rows, overlaps, convention: REPLAYSSM_COUNTS_ACCEPTED }
    };
    let long = T_MAX as i32 + 1;
    let cu = [0, 2, 2 + long, 4 + long, 4 + 2 * long, 20, 20, 20, 20, 21, 22, 23, 24];
    all.push(lengths(cu, cu, vec![1, 3], "lengths above max_tokens", false, base()));
    let cu = [0, 3, -5, 3, 6, 6, 6, 7, 8, 9, 10, 11, 12];
    let good = [0, 3, 3, 3, 6, 6, 6, 7, 8, 9, 10, 11, 12];
    all.push(lengths(cu, good, vec![1, 2], "lengths that fall below zero", true, base()));
    let cu = [0, 3, i32::MAX, 3, 6, 6, i32::MIN, 6, 8, 9, 10, 11, 12];
    let good = [0, 3, 3, 3, 6, 6, 6, 6, 8, 9, 10, 11, 12];
    all.push(lengths(cu, good, vec![1, 2, 5, 6], "lengths that are huge", true, base()));
    let cu = [0, 4, 2, 6, 8, 10, 12, 14, 16, 18, 20, TOKENS as i32 - 1, TOKENS as i32 + 2];
    // Row 2's tokens are partly row 0's.
    all.push(lengths(cu, cu, vec![1, 11], "lengths that fall, and leave the end", true, base()));
    all
}

/// Sticky bits come by themselves, rows that are right are computed, and no other slot changes.
#[test]
fn wrong_arrays_harm_nobody_else() {
    let Some((gpu, _guard)) = device("faults") else { return };
    let (model, clean) = (on(gpu), on(gpu));
    let stream = gpu.stream();
    let mut script = Script::new(50, all_slots());
    for _ in 0..4 {
        let mut round = script.next(&model);
        round.rewinds[0].0 = -1;
        [&model, &clean].iter().for_each(|model| model.run(&round, 0));
    }
    assert_eq!(model.report(false).bits, 0);
    for wrong in wrong_batches(&mut script, &model) {
        let what = wrong.what;
        model.load(&wrong.bad);
        clean.load(&wrong.good);
        gpu.sync();
        model.enqueue_with(stream.at, 0, wrong.convention, &|_| ());
        let report = poll(&model);
        assert_eq!(report.bits & wrong.bits, report.bits, "{what}: bits");
        assert!(report.count > 0, "{what}");
        clean.enqueue_with(0, 0, wrong.convention, &|_| ());
        gpu.sync();
        let report = model.report(true);
        assert_eq!(report.bits, wrong.bits, "{what}: bits");
        assert!(report.count >= wrong.rows.len() as u64, "{what}: {} faults", report.count);
        assert!(wrong.rows.contains(&report.first_row), "{what}: first row {}", report.first_row);
        let named = match wrong.bits {
            REPLAYSSM_FAULT_LENGTH => report.first_row,
            REPLAYSSM_FAULT_COUNT => i64::from(wrong.bad.rings[report.first_row as usize]),
            _ => match wrong.bad.slots[report.first_row as usize] {
                slot if slot >= SLOTS as i64 => slot,
                _ => wrong.bad.rings[report.first_row as usize].into(),
            },
        };
        assert_eq!(report.first_slot, named, "{what}");
        let place = if wrong.bits == REPLAYSSM_FAULT_COUNT { -1 } else { 0 };
        assert_eq!([report.first_pool, report.first_layer], [place; 2], "{what}: pool and layer");
        if wrong.overlaps {
            // The convolution's output is undefined where tokens are zeroed for a wrong row, and so is what Mamba-2 makes of it.
            let defined = |part: &Part| !part.name.starts_with("pool 1");
            same_where(what, &clean.memory(), &model.memory(), defined);
        } else {
            same(what, &clean.outputs(), &model.outputs());
            same(what, &clean.memory(), &model.memory());
        }
        assert_eq!(model.report(false).bits, 0, "{what}: cleared");
        // A length is a fault in padding, too.
        let clean_bits = if wrong.bad.cu == wrong.good.cu { wrong.bits & REPLAYSSM_FAULT_LENGTH } else { 0 };
        assert_eq!(clean.report(true).bits, clean_bits, "{what}: the clean batch");
        if wrong.overlaps {
            // From one state again.
            let clear = |model: &&Model| {
                let ids: Vec<i64> = (0..RINGS as i64).collect();
                let rings: Vec<i64> = ids.iter().map(|&slot| ring_of(slot as usize) as i64).collect();
                let (slots, rings) = (common::ids64(&ids), common::ids64(&rings));
                let list =
                    desc!(replayssm_list { n: RINGS as i32, place: REPLAYSSM_WHERE_HOST, slots: slots, rings: rings });
                let generations = [0u32; RINGS];
                let args = desc!(replayssm_reset_args { generation: generations.as_ptr() });
                // SAFETY: everything lives until the call returns.
                accepted(unsafe { replayssm_reset(model.slots_handle(), &list, &args, null()) });
            };
            [&model, &clean].iter().for_each(clear);
            gpu.sync();
        }
        let mut round = wrong.good.clone();
        round.cu = (0..=ROWS as i32).map(|r| 2 * r).collect();
        round.slots = (0..ROWS as i64).collect();
        round.counts = vec![1; ROWS];
        [&model, &clean].iter().for_each(|model| model.run(&round, 0));
        same(&format!("{what}: the next batch"), &clean.outputs(), &model.outputs());
        assert_eq!(model.report(false).bits, 0, "{what}: the next batch");
    }
}

/// Lists in device memory with ids beyond the counts: skipped, reported, and everything else is done.
#[test]
fn wrong_lists_harm_nobody_else() {
    let Some((gpu, _guard)) = device("faults of lists") else { return };
    let (model, clean) = (on(gpu), on(gpu));
    let mut script = Script::new(51, all_slots());
    for _ in 0..4 {
        let mut round = script.next(&model);
        round.rewinds[0].0 = -1;
        [&model, &clean].iter().for_each(|model| model.run(&round, 0));
    }
    let block = |values: [i64; 4]| Block::of(Some(gpu), &values.map(i64::to_le_bytes).concat());
    let slots = block([3, SLOTS as i64, 5, i64::MAX]);
    let rings = block([ring_of(3) as i64, 0, RINGS as i64, 1 << 40]);
    let good = block([3, -1, -1, i64::MIN]);
    let ids = |block: &Block| replayssm_ids { data: block.part(0), stride: 1, dtype: REPLAYSSM_DTYPE_I64, reserved: 0 };
    let list = |slots: &Block| {
        desc!(replayssm_list { n: 4, place: REPLAYSSM_WHERE_DEVICE, slots: ids(slots), rings: ids(&rings) })
    };
    let n = Block::of(Some(gpu), &[1i32; 4].map(i32::to_le_bytes).concat());
    let run = |model: &Model, slots: &Block| {
        let done = Block::new(Some(gpu), 16);
        let cursors = Block::new(Some(gpu), 4 * size_of::<replayssm_cursor>());
        // The convolution's windows.
        let windows = Block::new(Some(gpu), 4 * 256 * 3 * 4);
        let state = desc!(replayssm_state { dtype: REPLAYSSM_DTYPE_F32, layer: 0, data: windows.part(0) });
        let (handle, list) = (model.slots_handle(), list(slots));
        // SAFETY: everything lives until the work has run.
        unsafe {
            accepted(replayssm_export(model.pools()[0], &list, null(), &state, null()));
            accepted(replayssm_rewind(handle, &list, n.part(0).cast(), done.part(0).cast(), null()));
            accepted(replayssm_read_cursors(handle, &list, cursors.part(0).cast(), null()));
            accepted(replayssm_reset(handle, &list, null(), null()));
            accepted(replayssm_import(model.pools()[0], &list, null(), &state, null()));
        }
        gpu.sync();
        [done.read(), cursors.read(), windows.read()]
    };
    let found = run(&model, &slots);
    let report = model.report(true);
    assert_eq!(report.bits & !REPLAYSSM_FAULT_REWIND, REPLAYSSM_FAULT_ID);
    assert!((1..4).contains(&report.first_row), "first entry {}", report.first_row);
    assert!(found == run(&clean, &good), "outputs");
    assert_eq!(clean.report(true).bits & !REPLAYSSM_FAULT_REWIND, 0);
    same("memory", &clean.memory(), &model.memory());
}

// ---- Without a device ----

/// Where there is no CUDA, the sentence says what is missing; where there is, there is nothing to say.
#[test]
fn what_is_missing_is_named() {
    use replayssm::backend::cuda::{IMAGES, probe};
    if let Err(error) = probe() {
        assert_eq!(error.status() as i32, REPLAYSSM_ERROR_NO_CUDA);
        let text = error.to_string();
        assert!(text.contains("NVIDIA driver") || text.contains("CUDA backend is for Linux"), "{text}");
        if let Err(why) = gpu::primary() {
            let missing = if IMAGES.is_empty() { "this library was built without CUDA kernels: " } else { &text };
            assert!(why.starts_with("context_desc.backend is CUDA, and "), "{why}");
            assert!(why.contains(missing), "{why}");
        }
    }
}

#[test]
fn an_architecture_without_code_is_named() {
    let error = replayssm::error::Error::NoCode {
        device: "NVIDIA Something".into(),
        arch: "sm_75".into(),
        expected: "sm_80, sm_90".into(),
    };
    assert_eq!(error.to_string(), "NVIDIA Something is sm_75; this library has kernels for sm_80, sm_90");
    assert_eq!(error.status() as i32, REPLAYSSM_ERROR_NO_CODE_FOR_ARCH);
}
