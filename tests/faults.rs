//! What happens when the driver fails: every call of it in turn while handles are created and while they are used, and its context for good.
//! On the emulated device, which fails when it is told to; on a GPU the context fails by a kernel of the test's own.

#![allow(clippy::multiple_unsafe_ops_per_block, reason = "a test's calls share one promise")]

mod common;

use std::cell::Cell;
use std::ffi::{CStr, c_long, c_void};
use std::process::Command;
use std::ptr::{null, null_mut};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};

use common::every_call::{Again, EveryCall};
use common::gpu::primary;
use common::{FAMILIES, Spec, message, ok};
use replayssm::ffi::*;

#[global_allocator]
static HEAP: common::device::Heap = common::device::Heap::ON_CUDA;

/// CUDA_ERROR_OUT_OF_MEMORY, _INVALID_CONTEXT, _NOT_SUPPORTED, which says nothing of the context, and _ILLEGAL_ADDRESS.
const OUT_OF_MEMORY: i32 = 2;
const INVALID_CONTEXT: i32 = 201;
const NOT_SUPPORTED: i32 = 801;
const ILLEGAL_ADDRESS: i32 = 700;

/// What the emulated device does beyond a driver.
struct Emulated {
    fail: unsafe extern "C" fn(c_long, i32, i32) -> i32,
    live: unsafe extern "C" fn() -> c_long,
}

impl Emulated {
    /// None if the driver is another, which does not fail when it is told to.
    fn find() -> Option<Self> {
        // SAFETY: opens it once more if the process has it; the names end with a zero.
        let [fail, live] = unsafe {
            let driver = libc::dlopen(c"libcuda.so.1".as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL);
            if driver.is_null() {
                return None;
            }
            [c"emulated_fail", c"emulated_live"].map(|name| libc::dlsym(driver, name.as_ptr()))
        };
        if fail.is_null() || live.is_null() {
            return None;
        }
        // SAFETY: functions of the emulated driver, of these types.
        unsafe {
            Some(Emulated {
                fail: std::mem::transmute::<*mut c_void, unsafe extern "C" fn(c_long, i32, i32) -> i32>(fail),
                live: std::mem::transmute::<*mut c_void, unsafe extern "C" fn() -> c_long>(live),
            })
        }
    }

    /// The driver's call with `after` others in front of it fails.
    fn fail(&self, after: usize, with: i32, for_good: bool) {
        // SAFETY: takes no pointer.
        unsafe { (self.fail)(after as c_long, with, for_good.into()) };
    }

    /// Nothing fails any more; whether something has.
    fn has_failed(&self) -> bool {
        // SAFETY: takes no pointer.
        unsafe { (self.fail)(-1, 0, 0) != 0 }
    }

    fn live(&self) -> i64 {
        // SAFETY: takes nothing.
        unsafe { (self.live)() }
    }
}

/// The device that fails, for one test at a time; none if there is none.
fn emulated(name: &str) -> Option<(&'static Emulated, MutexGuard<'static, ()>)> {
    static DRIVER: OnceLock<Option<Emulated>> = OnceLock::new();
    static TURN: Mutex<()> = Mutex::new(());
    let driver = if common::device::cuda() { DRIVER.get_or_init(Emulated::find).as_ref() } else { None };
    if driver.is_none() {
        println!("skipped: {name} because it needs the emulated device");
    }
    driver.map(|driver| (driver, TURN.lock().unwrap_or_else(PoisonError::into_inner)))
}

fn spec(family: i32) -> Spec {
    Spec {
        family,
        heads: 2,
        headdim: 24,
        dstate: 32,
        t_max: 3,
        window: 5,
        keep: 2,
        slots: 6,
        rings: 6,
        layers: 1,
        ..Spec::default()
    }
}

/// Creates a context, slots, a pool and a convolution, as far as that goes; then, behind `between`, destroys what there is. The first failure: status
/// and sentence.
fn create(family: i32, between: impl FnOnce()) -> Result<(), (i32, String)> {
    let (mut context, mut slots, mut pool, mut conv) = (null_mut(), null_mut(), null_mut(), null_mut());
    let context_desc = desc!(replayssm_context_desc { backend: REPLAYSSM_BACKEND_CUDA });
    let (spec, slots_desc) = (spec(family), common::Rig::slots_desc(&spec(family)));
    let pool_desc = common::Rig::pool_desc(&spec);
    let conv_desc = desc!(replayssm_pool_desc {
        family: REPLAYSSM_FAMILY_CONV1D,
        n_layers: 1,
        io: spec.io,
        channels: 100,
        width: 4,
    });
    let checked = |status: i32, is_null: bool| {
        assert_eq!(status != REPLAYSSM_OK, is_null, "a handle is there if and only if there is no error");
        if is_null { Err((status, message())) } else { Ok(()) }
    };
    // SAFETY: descriptors and out-parameters are locals.
    let result = unsafe {
        (|| {
            checked(replayssm_context_create(&context_desc, &mut context), context.is_null())?;
            checked(replayssm_slots_create(context, &slots_desc, &mut slots), slots.is_null())?;
            checked(replayssm_layers_create(slots, &pool_desc, null(), 0, &mut pool), pool.is_null())?;
            checked(replayssm_layers_create(slots, &conv_desc, null(), 0, &mut conv), conv.is_null())
        })()
    };
    between();
    replayssm_layers_destroy(conv);
    replayssm_layers_destroy(pool);
    replayssm_slots_destroy(slots);
    replayssm_context_destroy(context);
    result
}

#[test]
fn whatever_fails_in_creating_leaves_nothing_behind() {
    let Some((driver, _turn)) = emulated("creating") else { return };
    for family in FAMILIES {
        create(family, || ()).expect("nothing fails");
        let live = driver.live();
        for (with, wanted) in [(OUT_OF_MEMORY, REPLAYSSM_ERROR_OUT_OF_MEMORY), (NOT_SUPPORTED, REPLAYSSM_ERROR_CUDA)] {
            let mut n = 0;
            loop {
                driver.fail(n, with, false);
                let mut has_failed = false;
                let result = create(family, || has_failed = driver.has_failed());
                if !has_failed {
                    break;
                }
                let (status, text) = result.expect_err("the failure is told");
                assert_eq!(status, wanted, "call {n} of the driver: {text}");
                assert!(text.contains("cu") || text.contains("bytes"), "{text}");
                assert_eq!(driver.live(), live, "call {n} of the driver left something behind: {text}");
                n += 1;
            }
            println!("family {family}: {n} calls of the driver failed in turn with {with}");
            assert!(n > 50, "creating loads kernels");
            create(family, || ()).expect("nothing fails any more");
        }
    }
}

thread_local! {
    static DRIVER: Cell<Option<&'static Emulated>> = const { Cell::new(None) };
    /// Which of the driver's calls fails in each call of the library, and how many did.
    static WHICH: Cell<usize> = const { Cell::new(0) };
    static FAILED: Cell<usize> = const { Cell::new(0) };
}

/// Makes a call fail, then makes it again.
fn fail_then_make(again: Again, call: &mut dyn FnMut() -> i32) {
    let (driver, n) = (DRIVER.get().expect("set"), WHICH.get());
    // Behind the context a launch is the first thing to fail; behind that, something has been enqueued.
    if again == Again::Whole && n > 1 {
        return ok(call());
    }
    driver.fail(n, NOT_SUPPORTED, false);
    let status = call();
    if driver.has_failed() {
        assert_eq!(status, REPLAYSSM_ERROR_CUDA, "{}", message());
        assert!(message().starts_with("cu") && message().contains("failed"), "{}", message());
        assert_eq!(replayssm_last_cuda_error(), NOT_SUPPORTED);
        FAILED.set(FAILED.get() + 1);
        ok(call());
    } else {
        ok(status);
    }
}

#[test]
fn a_call_that_failed_can_be_made_again() {
    let Some((driver, _turn)) = emulated("calls that fail") else { return };
    DRIVER.set(Some(driver));
    for family in FAMILIES {
        let new =
            || EveryCall::new(Spec { readout: REPLAYSSM_READOUT_FULL, ..spec(family) }, 2, 70, &[2, 1, 3, 2], 5, 3);
        let mut wanted = new();
        wanted.run();
        let mut counts = Vec::new();
        loop {
            let mut calls = new();
            calls.make = fail_then_make;
            WHICH.set(counts.len());
            FAILED.set(0);
            calls.run();
            if FAILED.get() == 0 {
                break;
            }
            counts.push(FAILED.get());
            assert!(
                calls.left() == wanted.left(),
                "family {family}: call {} of the driver failed in each call",
                counts.len()
            );
        }
        println!("family {family}: calls that failed in the driver's n-th call: {counts:?}");
        assert!(counts.len() > 3 && counts[0] > 20);
    }
}

#[track_caller]
fn is_lost(status: i32) {
    assert_eq!(status, REPLAYSSM_ERROR_DEVICE_LOST, "{}", message());
    assert!(message().contains("is lost: cu"), "{}", message());
    assert_ne!(replayssm_last_cuda_error(), 0);
}

/// Makes every call on the handles of a lost context, each of which says so; then destroys them. Nothing else notices.
fn see_that_it_is_lost(mut calls: EveryCall) {
    calls.make = |_, call| is_lost(call());
    calls.all();
    let rig = &calls.rig;
    let (mut n, mut bytes) = (0, 0);
    let mut handle = [null_mut::<c_void>(); 2];
    let ids = [0i64];
    let list = desc!(replayssm_list {
        n: 1,
        place: REPLAYSSM_WHERE_HOST,
        slots: common::ids64(&ids),
        rings: common::ids64(&ids)
    });
    let mut info = desc!(replayssm_context_info {});
    let (slots_desc, pool_desc) = (common::Rig::slots_desc(&rig.spec), common::Rig::pool_desc(&rig.spec));
    let mut blob = [0u8; 64];
    let restored = desc!(replayssm_restore_args {});
    // SAFETY: descriptors, arrays and out-parameters are locals.
    unsafe {
        is_lost(replayssm_context_query(rig.context, &mut info));
        is_lost(replayssm_slots_create(rig.context, &slots_desc, (&raw mut handle[0]).cast()));
        is_lost(replayssm_layers_create(rig.slots, &pool_desc, null(), 0, (&raw mut handle[1]).cast()));
        is_lost(replayssm_layers_components(rig.pool, null_mut(), 0, &mut n));
        is_lost(replayssm_layers_rebind(rig.pool, null(), 0));
        is_lost(replayssm_explain(rig.pool, 1, 1, blob.as_mut_ptr().cast(), 64));
        is_lost(replayssm_save_bytes(rig.slots, REPLAYSSM_SAVE_LIVE, &mut bytes));
        is_lost(replayssm_save(rig.slots, &list, REPLAYSSM_SAVE_LIVE, blob.as_mut_ptr().cast(), 64, null()));
        is_lost(replayssm_restore(rig.slots, &list, blob.as_ptr().cast(), 64, &restored, null()));
    }
    assert_eq!(handle, [null_mut(); 2]);
    // The CPU goes on.
    let cpu = desc!(replayssm_context_desc { backend: REPLAYSSM_BACKEND_CPU, n_threads: 1 });
    let (mut context, mut slots) = (null_mut(), null_mut());
    // SAFETY: descriptors and out-parameters are locals.
    unsafe {
        assert_eq!(replayssm_context_create(&cpu, &mut context), REPLAYSSM_OK);
        assert_eq!(replayssm_slots_create(context, &slots_desc, &mut slots), REPLAYSSM_OK);
    }
    replayssm_slots_destroy(slots);
    replayssm_context_destroy(context);
    drop(calls);
}

fn calls(family: i32) -> EveryCall {
    EveryCall::new(spec(family), 2, 70, &[2, 1], 5, 3)
}

#[test]
fn a_lost_context_refuses_every_call_and_can_be_destroyed() {
    let Some((driver, _turn)) = emulated("a context that fails") else { return };
    let live = driver.live();
    for family in FAMILIES {
        let mut calls = calls(family);
        calls.run();
        driver.fail(3, ILLEGAL_ADDRESS, true);
        calls.make = |_, call| {
            // The first ones are in front of the failure.
            let status = call();
            assert!([REPLAYSSM_OK, REPLAYSSM_ERROR_DEVICE_LOST].contains(&status), "{}", message());
        };
        calls.all();
        see_that_it_is_lost(calls);
        assert!(driver.has_failed());
        assert_eq!(driver.live(), live, "what was in the context was freed");
        // A device that works again, with a context anew.
        self::calls(family).run();
    }
    // Somebody has destroyed it, as entering it tells once.
    let calls = calls(1);
    driver.fail(0, INVALID_CONTEXT, false);
    let mut stats = desc!(replayssm_stats {});
    // SAFETY: the out-parameter is a local.
    is_lost(unsafe { replayssm_stats_read(calls.rig.slots, &mut stats) });
    assert!(driver.has_failed());
    assert_eq!(replayssm_last_cuda_error(), INVALID_CONTEXT);
    see_that_it_is_lost(calls);
    assert_eq!(driver.live(), live);
    // A context that is lost already: created in vain.
    driver.fail(0, ILLEGAL_ADDRESS, true);
    create(1, || ()).expect_err("nothing works");
    assert!(driver.has_failed());
    assert_eq!(driver.live(), live);
}

/// What runs in a process of its own, whose context nobody else needs.
const ALONE: &str = "REPLAYSSM_TEST_ALONE";

#[test]
fn a_kernel_that_faults_ends_its_context_and_nothing_else() {
    if !common::device::cuda() || emulated_is_there() {
        return println!("skipped: a kernel that faults because it needs a GPU");
    }
    if std::env::var_os(ALONE).is_none() {
        let name = "a_kernel_that_faults_ends_its_context_and_nothing_else";
        let mut command = Command::new(std::env::current_exe().expect("a program"));
        let output = command.args(["--exact", name, "--show-output"]).env(ALONE, "1").output().expect("it runs");
        let text = String::from_utf8_lossy(&output.stdout);
        assert!(output.status.success() && text.contains("lost: seen"), "{text}");
        return;
    }
    let gpu = primary().expect("a GPU");
    let mut calls = calls(REPLAYSSM_FAMILY_GDN);
    calls.run();
    gpu.enter();
    let wild = gpu.kernel(WILD, c"wild");
    gpu.launch(wild, 0, 1, false, &[8]);
    // Until the kernel has run, calls are accepted.
    calls.make = |_, call| {
        let status = call();
        assert!([REPLAYSSM_OK, REPLAYSSM_ERROR_DEVICE_LOST].contains(&status), "{}", message());
    };
    for _ in 0..1000 {
        calls.all();
        let mut info = desc!(replayssm_context_info {});
        // SAFETY: the out-parameter is a local.
        if unsafe { replayssm_context_query(calls.rig.context, &mut info) } != REPLAYSSM_OK {
            break;
        }
    }
    assert_eq!(replayssm_last_cuda_error(), ILLEGAL_ADDRESS);
    see_that_it_is_lost(calls);
    create(1, || ()).expect_err("the process has lost the device");
    println!("lost: seen");
}

fn emulated_is_there() -> bool {
    Emulated::find().is_some()
}

/// Writes to an address that nobody has.
const WILD: &CStr = c"
.version 7.0
.target sm_80
.address_size 64
.visible .entry wild(.param .u64 to) {
  .reg .b64 %at;
  ld.param.u64 %at, [to];
  st.global.u64 [%at], %at;
  ret;
}
";
