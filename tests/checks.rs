//! Checks for finding defects (`REPLAYSSM_SLOTS_CHECKS`): each finds what it is for, names the place, and finds nothing where nothing is
//! wrong; the work is the same with and without.

#![allow(clippy::multiple_unsafe_ops_per_block, reason = "a test's calls share one promise")]

mod common;

use std::ptr::{null, null_mut};

use common::device::poke;
use common::{
    ABSENT, Array, BatchData, FAMILIES, Rig, Rng, Row, Skip, Spec, Token, address, encode, no_faults, ok, tensor,
};
use replayssm::ffi::*;

#[global_allocator]
static HEAP: common::device::Heap = common::device::Heap::ON_CUDA;

fn spec(family: i32) -> Spec {
    Spec { family, layers: 2, checks: true, skip: Skip::PerElement, window: 6, t_max: 3, ..Spec::default() }
}

/// Rows of slots 2, 5 and 3 with 3, 1 and 0 tokens, on rings 3, 6 and 4.
fn rows(rig: &Rig, rng: &mut Rng) -> Vec<Row> {
    let row = |slot: i64, n, rng: &mut Rng| Row { ring: slot + 1, ..Row::new(slot as usize, &rig.tokens(rng, n)) };
    vec![row(2, 3, rng), row(5, 1, rng), row(3, 0, rng)]
}

/// Runs layer 1 and takes the report.
fn report_of(rig: &Rig, rows: &[Row], extend: bool) -> replayssm_report {
    rig.layer(1, rows, extend, 0);
    rig.faults(true)
}

fn expect(rig: &Rig, rows: &[Row], bit: u32, count: u64, id: i64, row: i64) {
    for extend in [false, true] {
        let seen = report_of(rig, rows, extend);
        let place = (seen.first_slot, seen.first_row);
        // Rows that share a slot see each other's extend, too.
        if extend && bit == REPLAYSSM_FAULT_DUPLICATE {
            assert!(seen.bits & bit != 0 && place == (id, row), "{:?}", rig.spec);
        } else {
            assert_eq!((seen.bits, seen.count, place), (bit, count, (id, row)), "{:?}", rig.spec);
        }
        assert_eq!((seen.first_pool, seen.first_layer), (0, 1));
        // An extend that is not committed needs a reset.
        rows.iter().filter(|row| row.slot >= 0).for_each(|row| rig.reset(row.slot as usize, row.ring as usize, 0));
    }
}

#[test]
fn nothing_is_found_where_nothing_is_wrong_and_the_work_is_the_same() {
    for family in FAMILIES {
        for parts in [1, 3] {
            let checked = Rig::new(Spec { parts, ..spec(family) });
            let plain = Rig::new(Spec { checks: false, parts, ..spec(family) });
            let mut rng = Rng(3);
            for step in 0..24 {
                let rows = rows(&checked, &mut rng);
                assert_eq!(checked.step(&rows), plain.step(&rows), "step {step} of {:?}", checked.spec);
                let counts = [step % 4, 1, 0];
                checked.commit(&rows, &counts);
                plain.commit(&rows, &counts);
            }
            for (slot, ring) in [(2, 3), (5, 6)] {
                assert_eq!(checked.export(1, slot, ring, None), plain.export(1, slot, ring, None));
            }
            no_faults(&checked);
        }
    }
}

#[test]
fn rows_that_share_a_slot_or_a_ring() {
    for family in FAMILIES {
        let rig = Rig::new(spec(family));
        let mut rng = Rng(4);
        let mut rows = rows(&rig, &mut rng);
        rows.push(Row { slot: 5, ring: 0, ..rows[1].clone() });
        expect(&rig, &rows, REPLAYSSM_FAULT_DUPLICATE, 1, 5, 3);
        rows[3] = Row { slot: 0, ring: 3, ..rows[1].clone() };
        expect(&rig, &rows, REPLAYSSM_FAULT_DUPLICATE, 1, 3, 3);
        // Padding has no slot.
        rows[3] = Row { slot: -1, ring: -1, ..rows[1].clone() };
        rows.push(rows[3].clone());
        rig.layer(1, &rows, false, 0);
        no_faults(&rig);
    }
}

/// Vectors of a token, in an order.
fn vectors(token: &mut Token, family: i32) -> Vec<&mut Vec<u32>> {
    let mut all = vec![&mut token.x, &mut token.b, &mut token.c, &mut token.dt];
    all.push(if family == REPLAYSSM_FAMILY_MAMBA2 { &mut token.z } else { &mut token.beta });
    all
}

#[test]
fn infinities_and_nans_in_inputs_of_live_rows() {
    for family in FAMILIES {
        let rig = Rig::new(spec(family));
        let mut rng = Rng(5);
        let clean = rows(&rig, &mut rng);
        for which in 0..5 {
            for wild in [f64::INFINITY, f64::NAN] {
                let mut rows = clean.clone();
                let vector = &mut *vectors(&mut rows[0].tokens[2][1], family)[which];
                let dtype = match which {
                    0..3 => rig.spec.io,
                    3 => rig.spec.dt_dtype,
                    _ if family == REPLAYSSM_FAMILY_MAMBA2 => rig.spec.io,
                    _ => REPLAYSSM_DTYPE_F32,
                };
                *vector.last_mut().unwrap() = encode(dtype, wild);
                expect(&rig, &rows, REPLAYSSM_FAULT_NOT_FINITE, 1, 2, 0);
                // A null row's inputs are nobody's.
                rows[0].slot = -1;
                rig.layer(1, &rows, false, 0);
                no_faults(&rig);
                // Nor is another layer's.
                rows[0].slot = 2;
                rig.layer(0, &rows, false, 0);
                no_faults(&rig);
            }
        }
    }
}

#[test]
fn infinities_in_parameters() {
    for family in FAMILIES {
        for which in 0..3 {
            if which == 2 && family != REPLAYSSM_FAMILY_MAMBA2 {
                continue;
            }
            let mut rig = Rig::new(spec(family));
            let mut rng = Rng(6);
            let rows = rows(&rig, &mut rng);
            let params = &mut rig.params[1];
            let array = [&mut params.a, &mut params.bias, &mut params.d].into_iter().nth(which).unwrap();
            // Gaps between the elements are NaN.
            let n = (array.bytes.len() - 16) / common::size_of_dtype(array.dtype);
            let last = (0..n).rev().find(|&i| array.value(i).is_finite()).unwrap();
            array.set(last, encode(array.dtype, f64::NEG_INFINITY));
            expect(&rig, &rows, REPLAYSSM_FAULT_NOT_FINITE, 1, -1, -1);
        }
    }
}

#[test]
fn a_byte_beside_a_part() {
    for family in FAMILIES {
        let mut rng = Rng(8);
        for kind in Rig::new(spec(family)).components().iter().map(|c| c.kind) {
            let rig = Rig::new(spec(family));
            let rows = rows(&rig, &mut rng);
            let c = rig.component(kind);
            let id = if c.per_ring == 1 { 6 } else { 5 };
            assert!(c.slot_stride_bytes as u64 >= c.bytes + 64);
            let behind = address(&c, 1, id) + c.bytes as usize;
            poke(behind, &[0]);
            expect(&rig, &rows, REPLAYSSM_FAULT_CANARY, 1, id as i64, 1);
            poke(behind, &[0xC5]);
            poke(address(&c, 1, id) - 1, &[0]);
            expect(&rig, &rows, REPLAYSSM_FAULT_CANARY, 1, id as i64, 1);
            poke(address(&c, 1, id) - 1, &[0xC5]);
            // Beside others' parts, and in another layer.
            poke(address(&c, 1, 7) + c.bytes as usize, &[0]);
            poke(address(&c, 0, id) + c.bytes as usize, &[0]);
            rig.layer(1, &rows, false, 0);
            no_faults(&rig);
        }
    }
}

#[test]
fn sections_of_a_convolution() {
    let rig = Rig::new(spec(REPLAYSSM_FAMILY_MAMBA2));
    let widths = common::heap([2i32, 5, 3]);
    let desc = desc!(replayssm_pool_desc {
        family: REPLAYSSM_FAMILY_CONV1D,
        n_layers: 2,
        io: REPLAYSSM_DTYPE_F32,
        channels: 10,
        width: 4,
        n_sections: 3,
        section_channels: widths.as_ptr(),
    });
    let mut pool = null_mut();
    // SAFETY: the descriptor and the out-parameter are locals.
    ok(unsafe { replayssm_layers_create(rig.slots, &desc, null(), 0, &mut pool) });
    let mut rng = Rng(9);
    let rows = rows(&rig, &mut rng);
    // Sections 6 apart, with NaN between them; 20 to a token.
    let clean = || {
        let mut x = Array::poisoned(REPLAYSSM_DTYPE_F32, 80);
        for (t, section) in (0..4).flat_map(|t| (0..3).map(move |section| (t, section))) {
            (0..widths[section] as usize)
                .for_each(|i| x.set(t * 20 + section * 6 + i, encode(REPLAYSSM_DTYPE_F32, 0.5)));
        }
        x
    };
    let run = |x: &Array, weight: &Array| {
        let out = Array::poisoned(REPLAYSSM_DTYPE_F32, 80);
        let args = desc!(replayssm_conv1d_args {
            x: tensor(x, 0, 0, 20, 6),
            out: tensor(&out, 0, 0, 20, 6),
            weight: tensor(weight, 0, 0, 0, 4),
            bias: ABSENT,
        });
        let data = BatchData::new(&rig, &rows, false, 0);
        // SAFETY: everything lives until the call returns.
        ok(unsafe { replayssm_conv1d_step(pool, 1, &data.desc(), &args, null()) });
        rig.faults(true)
    };
    let mut weight = Array::poisoned(REPLAYSSM_DTYPE_F32, 40);
    (0..40).for_each(|i| weight.set(i, encode(REPLAYSSM_DTYPE_F32, 1.0)));
    assert_eq!(run(&clean(), &weight).bits, 0);
    for at in [0, 1, 6, 10, 12, 14] {
        let mut x = clean();
        x.set(3 * 20 + at, encode(REPLAYSSM_DTYPE_F32, f64::INFINITY));
        let seen = run(&x, &weight);
        assert_eq!((seen.bits, seen.count), (REPLAYSSM_FAULT_NOT_FINITE, 1), "element {at}");
        assert_eq!((seen.first_slot, seen.first_row, seen.first_pool, seen.first_layer), (5, 1, 1, 1));
    }
    weight.set(39, encode(REPLAYSSM_DTYPE_F32, f64::NAN));
    let seen = run(&clean(), &weight);
    assert_eq!((seen.bits, seen.count, seen.first_slot), (REPLAYSSM_FAULT_NOT_FINITE, 1, -1));
    replayssm_layers_destroy(pool);
}

/// A convolution may write its outputs where its inputs are: part 0 of several does not read there, since other parts write.
#[test]
fn inputs_in_whose_place_other_parts_write() {
    cpu_only!();
    let rig = Rig::new(spec(REPLAYSSM_FAMILY_MAMBA2));
    let desc = desc!(replayssm_pool_desc {
        family: REPLAYSSM_FAMILY_CONV1D,
        n_layers: 2,
        io: REPLAYSSM_DTYPE_F32,
        channels: 10,
        width: 4
    });
    let mut pool = null_mut();
    // SAFETY: the descriptor and the out-parameter are locals.
    ok(unsafe { replayssm_layers_create(rig.slots, &desc, null(), 0, &mut pool) });
    let rows = rows(&rig, &mut Rng(10));
    let mut weight = Array::poisoned(REPLAYSSM_DTYPE_F32, 40);
    (0..40).for_each(|i| weight.set(i, encode(REPLAYSSM_DTYPE_F32, 1.0)));
    for (in_place, parts, bits) in
        [(true, 1, REPLAYSSM_FAULT_NOT_FINITE), (true, 2, 0), (false, 2, REPLAYSSM_FAULT_NOT_FINITE)]
    {
        let mut x = Array::poisoned(REPLAYSSM_DTYPE_F32, 40);
        (0..40).for_each(|i| x.set(i, encode(REPLAYSSM_DTYPE_F32, if i == 33 { f64::INFINITY } else { 0.5 })));
        let out = Array::poisoned(REPLAYSSM_DTYPE_F32, 40);
        let args = desc!(replayssm_conv1d_args {
            x: tensor(&x, 0, 0, 10, 0),
            out: tensor(if in_place { &x } else { &out }, 0, 0, 10, 0),
            weight: tensor(&weight, 0, 0, 0, 4),
            bias: ABSENT,
        });
        let data = BatchData::new(&rig, &rows, false, 0);
        for i in 0..parts {
            let exec = desc!(replayssm_exec { part: i, n_parts: parts });
            // SAFETY: everything lives until the call returns.
            ok(unsafe { replayssm_conv1d_step(pool, 1, &data.desc(), &args, &exec) });
        }
        assert_eq!(rig.faults(true).bits, bits, "in place {in_place}, {parts} parts");
    }
    replayssm_layers_destroy(pool);
}

#[test]
fn another_flag_is_refused() {
    let rig = Rig::new(spec(REPLAYSSM_FAMILY_MAMBA2));
    let desc = desc!(replayssm_slots_desc { n_slots: 1, flags: 2 | REPLAYSSM_SLOTS_CHECKS });
    let mut slots = null_mut();
    // SAFETY: the descriptor and the out-parameter are locals.
    let status = unsafe { replayssm_slots_create(rig.context, &desc, &mut slots) };
    assert_eq!(status, REPLAYSSM_ERROR_UNSUPPORTED);
    assert!(common::message().contains("slots_desc.flags is 2"), "{}", common::message());
}
