//! The planner against what creating allocates, and the component list before and after.

#![allow(clippy::multiple_unsafe_ops_per_block, reason = "a test's calls share one promise")]

mod common;

use std::ptr::{null, null_mut};

use common::device::{backend, context};
use common::{FAMILIES, Rig, Spec, message, ok};
use replayssm::backend::cpu::allocated;
use replayssm::ffi::*;

#[global_allocator]
static HEAP: common::device::Heap = common::device::Heap::ON_CUDA;

fn conv(layers: i32, channels: i32) -> replayssm_pool_desc {
    desc!(replayssm_pool_desc {
        family: REPLAYSSM_FAMILY_CONV1D,
        n_layers: layers,
        io: REPLAYSSM_DTYPE_BF16,
        channels: channels,
        width: 4,
    })
}

fn plan(
    slots: &replayssm_slots_desc,
    pools: &[replayssm_pool_desc],
    args: &replayssm_plan_args,
) -> replayssm_plan_info {
    let mut out = desc!(replayssm_plan_info {});
    // SAFETY: everything lives until the call returns.
    let status = unsafe { replayssm_plan(slots, pools.as_ptr(), pools.len() as i32, args, &mut out) };
    assert_eq!(status, REPLAYSSM_OK, "{}", message());
    out
}

fn planned(slots: &replayssm_slots_desc, pool: &replayssm_pool_desc) -> Vec<replayssm_component> {
    let mut list = vec![desc!(replayssm_component {}); 16];
    let mut n = 0;
    // SAFETY: the array has as many elements as it says.
    ok(unsafe { replayssm_plan_components(slots, pool, list.as_mut_ptr(), 16, &mut n) });
    list.truncate(n as usize);
    list
}

/// Pools of several families, some with short rows whose parts are padded.
fn models() -> Vec<(replayssm_slots_desc, Vec<replayssm_pool_desc>)> {
    let mut models = Vec::new();
    for (i, family) in FAMILIES.into_iter().enumerate() {
        let spec = Spec { family, layers: 3, slots: 5 + i, rings: 3, t_max: 4, keep: i, ..Spec::default() };
        let other = Spec { family: REPLAYSSM_FAMILY_GDN, readout: REPLAYSSM_READOUT_FULL, headdim: 16, ..spec.clone() };
        let pools = vec![Rig::pool_desc(&spec), Rig::pool_desc(&other), conv(2, 150)];
        // Checks put guards between parts.
        models.push((Rig::slots_desc(&Spec { checks: true, ..spec.clone() }), pools.clone()));
        models.push((Rig::slots_desc(&spec), pools));
    }
    models
}

#[test]
fn the_total_is_what_create_allocates() {
    cpu_only!();
    for (slots, pools) in models() {
        let wanted = plan(&slots, &pools, &desc!(replayssm_plan_args {}));
        let context = context(backend(), 1).unwrap();
        let before = allocated();
        let mut handle = null_mut();
        let mut layers = vec![null_mut(); pools.len()];
        // SAFETY: descriptors and out-parameters live until the calls return.
        unsafe {
            ok(replayssm_slots_create(context, &slots, &mut handle));
            assert_eq!(allocated() - before, wanted.fixed_bytes);
            for (pool, out) in pools.iter().zip(&mut layers) {
                ok(replayssm_layers_create(handle, pool, null(), 0, out));
            }
        }
        assert_eq!(allocated() - before, wanted.total_bytes);
        let n = [i64::from(slots.n_slots), i64::from(slots.n_rings)].map(|n| n as u64);
        let sum = n[0] * wanted.checkpoint_bytes + n[1] * wanted.ring_bytes + wanted.fixed_bytes;
        assert_eq!(sum, wanted.total_bytes);
        layers.into_iter().for_each(|pool| replayssm_layers_destroy(pool));
        replayssm_slots_destroy(handle);
        replayssm_context_destroy(context);
    }
}

#[test]
fn components_before_create_are_those_after() {
    for family in FAMILIES {
        let spec = Spec { family, layers: 3, slots: 5, rings: 3, ..Spec::default() };
        let rig = Rig::new(spec.clone());
        let (before, after) = (planned(&Rig::slots_desc(&spec), &Rig::pool_desc(&spec)), rig.components());
        assert_eq!(before.len(), after.len());
        for (b, a) in before.iter().zip(&after) {
            assert!(b.base.is_null() && b.layer_bases.is_null() && !a.base.is_null());
            let fields =
                |c: &replayssm_component| (c.kind, c.per_ring, c.bytes, c.slot_stride_bytes, c.layer_stride_bytes);
            assert_eq!(fields(b), fields(a));
            for layer in 0..3 {
                // SAFETY: the library's array has an element for each layer.
                let base = unsafe { *a.layer_bases.add(layer) };
                assert_eq!(base as usize, a.base as usize + layer * a.layer_stride_bytes as usize);
            }
        }
    }
}

#[test]
fn case_19_the_budget_of_exactly_n_slots_gives_n_and_one_byte_less_gives_one_less() {
    for (slots, pools) in models() {
        for n in [1, 2, 17, 1000] {
            let slots = replayssm_slots_desc { n_slots: n, n_rings: n, ..slots };
            let total = plan(&slots, &pools, &desc!(replayssm_plan_args {})).total_bytes;
            let fit = |budget_bytes: u64| {
                let args = desc!(replayssm_plan_args { budget_bytes: budget_bytes });
                plan(&slots, &pools, &args).slots_in_budget
            };
            assert_eq!((fit(total), fit(total - 1), fit(total + 1)), (n.into(), i64::from(n) - 1, n.into()));
        }
    }
}

/// The whole of Nemotron-3-Super: 40 Mamba-2 layers of 128 heads of 64 x 128 with bf16 activations, T 8.
#[test]
fn case_18_a_slot_is_a_checkpoint_and_a_ring_and_not_a_state_per_draft() {
    let pool = desc!(replayssm_pool_desc {
        family: REPLAYSSM_FAMILY_MAMBA2,
        n_layers: 40,
        io: REPLAYSSM_DTYPE_BF16,
        nheads: 128,
        headdim: 64,
        dstate: 128,
        ngroups: 8,
    });
    let slots = desc!(replayssm_slots_desc { n_slots: 64, window: 16, max_step_tokens: 8 });
    let args = desc!(replayssm_plan_args { budget_bytes: 64 << 30, batch: 64 });
    let info = plan(&slots, &[pool], &args);
    let state = 40 * 128 * 64 * 128 * 4;
    assert_eq!(info.state_per_draft_bytes, 9 * state);
    // Tags of four tiles a head, records of 24 rows.
    assert_eq!(info.checkpoint_bytes, state + 40 * 128 * 4 * 8);
    assert_eq!(info.ring_bytes, 40 * 24 * (128 * 64 * 2 + 8 * 128 * 2 + 128 * 8));
    assert!(info.slots_in_budget > 7 * info.slots_in_budget_state_per_draft, "{}", info.slots_in_budget);
    assert_eq!(info.slots_in_budget_state_per_draft, (64 << 30) / (9 * state) as i64);
}

/// Shapes of published models, with bf16 activations: a whole model's recurrent layers and convolutions.
fn published() -> Vec<(&'static str, Vec<replayssm_pool_desc>)> {
    let mamba2 = |layers, nheads, headdim, ngroups| {
        let pool = desc!(replayssm_pool_desc {
            family: REPLAYSSM_FAMILY_MAMBA2,
            n_layers: layers,
            io: REPLAYSSM_DTYPE_BF16,
            nheads: nheads,
            headdim: headdim,
            dstate: 128,
            ngroups: ngroups,
        });
        vec![pool, conv(layers, nheads * headdim + 2 * ngroups * 128)]
    };
    let delta = |family, layers, h, hv| {
        let pool = desc!(replayssm_pool_desc {
            family: family,
            n_layers: layers,
            io: REPLAYSSM_DTYPE_BF16,
            H: h,
            HV: hv,
            K: 128,
            V: 128,
        });
        vec![pool, conv(layers, (2 * h + hv) * 128)]
    };
    vec![
        ("Nemotron-3-Nano-4B", mamba2(21, 96, 80, 8)),
        ("Nemotron-3-Super-120B", mamba2(40, 128, 64, 8)),
        ("Nemotron-Ultra-550B", mamba2(48, 256, 64, 8)),
        ("one group", mamba2(24, 80, 64, 1)),
        ("Qwen3.5-4B", delta(REPLAYSSM_FAMILY_GDN, 24, 16, 32)),
        ("Qwen3.5-122B", delta(REPLAYSSM_FAMILY_GDN, 36, 16, 64)),
        ("Kimi Linear", delta(REPLAYSSM_FAMILY_KDA, 20, 32, 32)),
    ]
}

#[test]
fn the_recommended_window_is_the_smallest_that_moves_nearly_the_fewest_bytes() {
    for (name, pools) in published() {
        let found = [1, 4, 8].map(|t| {
            let at = |window: i32| {
                let slots = desc!(replayssm_slots_desc { n_slots: 64, max_step_tokens: t, window: window });
                plan(&slots, &pools, &desc!(replayssm_plan_args { batch: 64 }))
            };
            let info = at(0);
            let best = at(info.recommended_window);
            assert!(best.step_bytes <= info.step_bytes + info.step_bytes / 100);
            if t == 1 {
                assert!(
                    best.step_bytes * 5 < best.plain_step_bytes * 2,
                    "{name}: well under half of the plain update's"
                );
                assert_eq!(info.flush_share, 1.0 / 16.0);
            }
            info.recommended_window
        });
        let wanted = match name {
            "Kimi Linear" => [11, 16, 16],
            "Qwen3.5-4B" => [14, 36, 56],
            "one group" => [15, 44, 64],
            "Nemotron-Ultra-550B" => [15, 40, 64],
            _ => [15, 40, 56],
        };
        assert_eq!(found, wanted, "{name}");
    }
    // Window by window, whatever window is asked about.
    let pools = published().remove(4).1;
    let at = |window: i32| {
        let slots = desc!(replayssm_slots_desc { n_slots: 64, max_step_tokens: 4, window: window });
        plan(&slots, &pools[..1], &desc!(replayssm_plan_args {}))
    };
    let all: Vec<(i32, replayssm_plan_info)> = (4..=256).map(|window| (window, at(window))).collect();
    let fewest = all.iter().map(|(_, info)| info.step_bytes).min().unwrap();
    // Within a hundredth, and a byte of rounding.
    let near = all.iter().find(|(_, info)| info.step_bytes <= fewest + fewest / 100 + 1).unwrap().0;
    assert!(all.iter().all(|(_, info)| info.recommended_window == near));
}

/// Pools that are equal but for their layers are worked out once: it makes no difference to what is said.
#[test]
fn a_model_may_be_split_into_any_pools() {
    let slots = desc!(replayssm_slots_desc { n_slots: 64, max_step_tokens: 4 });
    let args = desc!(replayssm_plan_args { batch: 8, budget_bytes: 64 << 30 });
    for (name, pools) in published() {
        let whole = plan(&slots, &pools, &args);
        let split: Vec<replayssm_pool_desc> = pools
            .iter()
            .flat_map(|pool| (0..pool.n_layers).map(|_| replayssm_pool_desc { n_layers: 1, ..*pool }))
            .collect();
        let said = |p: &replayssm_plan_info| {
            let bytes = [p.checkpoint_bytes, p.ring_bytes, p.total_bytes, p.plain_step_bytes, p.step_bytes];
            (bytes, p.recommended_window, p.slots_in_budget, p.flush_share)
        };
        assert_eq!(said(&plan(&slots, &split, &args)), said(&whole), "{name}");
    }
}

#[test]
fn defaults_are_one_row_of_the_longest_step_and_wrong_questions_are_refused() {
    let (slots, pools) = models().remove(0);
    let answer = plan(&slots, &pools, &desc!(replayssm_plan_args {}));
    assert_eq!(answer.slots_in_budget, -1);
    assert_eq!(answer.slots_in_budget_state_per_draft, -1);
    let same = plan(&slots, &pools, &desc!(replayssm_plan_args { batch: 1, tokens: 4 }));
    assert_eq!((answer.step_bytes, answer.flush_share), (same.step_bytes, same.flush_share));
    let nothing = plan(&slots, &[], &desc!(replayssm_plan_args { budget_bytes: 1 << 20 }));
    assert_eq!((nothing.checkpoint_bytes, nothing.ring_bytes, nothing.step_bytes), (0, 0, 0));
    let poor = plan(&slots, &pools, &desc!(replayssm_plan_args { budget_bytes: 1 }));
    assert_eq!((poor.slots_in_budget, poor.slots_in_budget_state_per_draft), (0, 0));
    let refused = |slots: &replayssm_slots_desc, n_pools: i32, args: replayssm_plan_args, wanted: &str| {
        let mut out = desc!(replayssm_plan_info { recommended_window: 77 });
        // SAFETY: everything lives until the call returns.
        let status = unsafe { replayssm_plan(slots, pools.as_ptr(), n_pools, &args, &mut out) };
        assert!(status != REPLAYSSM_OK && message().starts_with(wanted), "{status}: {}", message());
        assert_eq!(out.recommended_window, 77);
    };
    let args = desc!(replayssm_plan_args {});
    refused(&slots, -1, args, "n_pools is -1; expected 0 to 4096");
    refused(&slots, 3, replayssm_plan_args { batch: -1, ..args }, "plan_args.batch is -1; expected 0 to 1048576");
    refused(&slots, 3, replayssm_plan_args { tokens: 5, ..args }, "plan_args.tokens is 5; expected 0 to 4");
    refused(&slots, 3, replayssm_plan_args { reserved: 1, ..args }, "plan_args.reserved is 1;");
    refused(&replayssm_slots_desc { n_slots: 0, ..slots }, 3, args, "slots_desc.n_slots is 0;");
}

#[test]
fn components_beyond_an_address_space_are_refused() {
    let spec = Spec { layers: 1 << 20, heads: 1 << 10, groups: 1, headdim: 256, dstate: 256, ..Spec::default() };
    let slots = replayssm_slots_desc { n_slots: i32::MAX, n_rings: 1, ..Rig::slots_desc(&spec) };
    let mut list = vec![desc!(replayssm_component {}); 16];
    let mut n = 77;
    // SAFETY: the array has as many elements as it says.
    let status = unsafe { replayssm_plan_components(&slots, &Rig::pool_desc(&spec), list.as_mut_ptr(), 16, &mut n) };
    assert_eq!((status, n), (REPLAYSSM_ERROR_UNSUPPORTED, 77), "{}", message());
}
