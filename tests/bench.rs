//! The program `replayssm-bench`: its arithmetic against numbers counted by hand and against what the library counts, its fp64 recurrence
//! against the plain update, and its commands. Where `REPLAYSSM_TEST_BACKEND` is cuda, machines and commands are on CUDA.
// SPDX-License-Identifier: MIT OR Apache-2.0

#![cfg(feature = "bench")]

use std::path::PathBuf;
use std::process::{Command, Output};

use replayssm::bench::accuracy::Truth;
use replayssm::bench::api::PoolDesc;
use replayssm::bench::config::{Config, Format, Io, Readout};
use replayssm::bench::cycle::{Acceptance, Cycle, PHASES, Simulation};
use replayssm::bench::drift::{self, KINDS, Kind, Run, Window};
use replayssm::bench::floor::{self, Records};
use replayssm::bench::generator::{Generator, SEED, decode, encode};
use replayssm::bench::machine::Machine;
use replayssm::bench::rig::{Check, InputSet, Rig, Way};
use replayssm::bench::shape::{Family, MODELS, Shape, TINY, USUAL};
use replayssm::bench::svg::{self, Bar, Curve, Panel};
use replayssm::bench::table::Table;
use replayssm::replay::config::Schedule;
use replayssm::replay::position::Rule;
use serde_json::Value;

/// One token a step, window 16, batch 32.
fn config(shape: Shape, format: Format, readout: Readout) -> Config {
    Config { shape, batch: 32, tokens: 1, window: 16, format, readout, io: Io::Bf16, gate: false }
}

fn is_cuda() -> bool {
    std::env::var("REPLAYSSM_TEST_BACKEND").is_ok_and(|backend| backend == "cuda")
}

fn machine() -> Machine {
    if is_cuda() { Machine::cuda(0, true) } else { Machine::cpu(2, true) }.expect("a machine")
}

// ---- Flush cycles ----

fn rule(window: i64, tokens: usize, schedule: Schedule) -> Rule {
    Rule { window, keep: 0, max_step_tokens: tokens as i64, schedule }
}

/// Each row folds once in 16 steps, 16 records; between, it has 1 to 15 behind its checkpoint.
#[test]
fn steps_of_one_token_fold_once_a_window() {
    for (schedule, most) in [(Schedule::Staggered, 2), (Schedule::None, 32)] {
        let cycle = Cycle::find(Simulation::new(rule(16, 1, schedule), 32, 1, Acceptance::of(1), true));
        assert!(cycle.is_whole);
        assert_eq!(cycle.steps.len(), 16);
        assert_eq!(cycle.folding(), 1.0 / 16.0);
        assert_eq!(cycle.folded(), 1.0);
        assert_eq!(cycle.history(), f64::from((1..16).sum::<i32>()) / 16.0);
        assert_eq!(cycle.steps.iter().map(|seen| seen.folding).max(), Some(most));
    }
}

#[test]
fn every_accepted_token_is_folded_once() {
    for (tokens, window) in [(2, 16), (4, 32), (8, 64), (8, 8), (17, 136)] {
        for spread in [false, true] {
            let acceptance = Acceptance::of(tokens);
            let rule = rule(window, tokens, Schedule::Staggered);
            let cycle = Cycle::find(Simulation::new(rule, 40, tokens, acceptance, spread));
            assert!(cycle.is_whole, "T {tokens}, W {window}");
            assert!((cycle.folded() - acceptance.mean()).abs() < 1e-12, "T {tokens}, W {window}");
        }
    }
}

#[test]
fn three_quarters_of_drafts_are_accepted() {
    let counts = |tokens| (0..PHASES).map(|phase| Acceptance::of(tokens).count(phase, 0, true)).collect::<Vec<_>>();
    assert_eq!(counts(1), [1, 1, 1, 1]);
    assert_eq!(counts(4), [2, 3, 4, 3]);
    assert_eq!(counts(8), [5, 6, 7, 6]);
    assert_eq!(Acceptance::of(4).mean(), 3.0);
    assert_eq!(Acceptance::of(4).count(0, 2, true), 4);
    assert_eq!(Acceptance::of(4).count(0, 2, false), 2);
}

/// What the simulation says of each step, the library does: rows that fold, times the tiles of all layers.
#[test]
fn the_simulation_folds_when_the_library_does() {
    let machine = machine();
    for (tokens, window) in [(1, 8), (4, 9)] {
        for way in [Way::Staggered, Way::Aligned] {
            let shape = Shape { family: Family::Mamba2, heads: 2, rows: 24, columns: 8, groups: 1 };
            let config = Config { batch: 5, tokens, window, ..config(shape, Format::Split32, Readout::High) };
            let inputs = InputSet::new(&machine, &config).expect("inputs");
            let rig = Rig::new(&machine, &inputs, &config, way, 2).expect("a rig");
            let flushes = rig.flushes(3 * window + 2).expect("steps");
            let mut simulation = config.simulation(way == Way::Staggered);
            // Two layers of two heads, each of two tiles of 16 and 8 rows.
            let simulated: Vec<_> = flushes.iter().map(|_| 8 * simulation.step().folding as u64).collect();
            assert_eq!(flushes, simulated, "T {tokens}, {way:?}");
            assert!(flushes.iter().sum::<u64>() > 0);
        }
    }
}

// ---- Floors ----

fn cycle(config: &Config) -> Cycle {
    Cycle::find(config.simulation(true))
}

/// Mamba-2, 128 heads of 64 x 128, 8 groups, T 1, W 16.
#[test]
fn the_floor_of_a_mamba2_step_of_one_token() {
    let state = 4_194_304.0; // 128 * 64 * 128 * 4
    let record = 19_456.0; // (128 * 64 + 8 * 128) * 2 + 128 * 8
    let inputs = 20_992.0; // (128 * 64 + 2 * 8 * 128) * 2 + 128 * 4
    let outputs = 16_384.0; // 128 * 64 * 2
    let high = config(USUAL[0], Format::Split32, Readout::High);
    let bytes = floor::replay(&high, &cycle(&high));
    assert_eq!(bytes.checkpoint, state / 2.0);
    // One step in 16 reads the low plane and writes both.
    assert_eq!(bytes.folds, 1.5 * state / 16.0);
    // 1 to 15 records in 15 steps, and 16 in the one that folds.
    assert_eq!(bytes.history, 136.0 / 16.0 * record);
    assert_eq!((bytes.records, bytes.inputs, bytes.outputs), (record, inputs, outputs));
    assert_eq!(bytes.total(), 2_712_576.0);
    let full = config(USUAL[0], Format::F32, Readout::Full);
    let bytes = floor::replay(&full, &cycle(&full));
    assert_eq!((bytes.checkpoint, bytes.folds), (state, state / 16.0));
    assert_eq!(bytes.total(), 4_678_656.0);
    assert_eq!(floor::plain(&full).total(), 2.0 * state + inputs + outputs);
}

/// GDN, 16 key and 64 value heads of 128 x 128, T 1, W 16: readouts read u and no v, folds v and no u.
#[test]
fn the_floor_of_a_gdn_step_of_one_token() {
    let high = config(USUAL[1], Format::Split32, Readout::High);
    let keys = 16.0 * (128.0 * 2.0 + 4.0);
    let (v, u) = (64.0 * 128.0 * 2.0, 64.0 * 128.0 * 2.0);
    let (g, beta) = (64.0 * 4.0, 64.0 * 4.0);
    let bytes = floor::replay(&high, &cycle(&high));
    assert_eq!(bytes.records, keys + v + u + g + beta);
    assert_eq!(bytes.history, 7.5 * (keys + u + g) + 1.0 * (keys + v + g + beta));
    let exact = Config { readout: Readout::Exact, ..high };
    assert_eq!(floor::replay(&exact, &cycle(&exact)).history, 8.5 * (keys + v + g + beta));
}

/// The records of a token are as large as the library's rings say.
#[test]
fn records_are_those_of_the_rings() {
    for shape in MODELS.map(|model| model.shape) {
        for io in [Io::Bf16, Io::F32] {
            for (format, readout) in
                [(Format::Split32, Readout::High), (Format::F32, Readout::Full), (Format::F32, Readout::Exact)]
            {
                let desc = PoolDesc {
                    shape,
                    layers: 1,
                    slots: 1,
                    window: 16,
                    tokens: 1,
                    staggered: true,
                    format,
                    readout,
                    stochastic: false,
                    io,
                    out: io,
                };
                let records = Records::of(&shape, io, readout);
                assert_eq!(desc.record_bytes(), Ok(records.all as u64), "{shape} {io} {format} {readout}");
            }
        }
    }
}

// ---- Outputs ----

#[test]
fn generated_values_have_the_dtype_of_activations() {
    for shape in USUAL {
        for io in [Io::Bf16, Io::F16] {
            let token = Generator::new(shape.few(), io, SEED).token();
            for &value in token.x.iter().chain(&token.b).chain(&token.c) {
                let mut bytes = Vec::new();
                encode(io, value, &mut bytes);
                assert_eq!(decode(io, &bytes), value);
            }
        }
    }
}

/// The plain update is within 1e-6 of fp64 on the named generator (measured: 7e-8 to 4e-7 over 4096 tokens), so that the formulas are the same.
#[test]
fn the_recurrence_is_the_plain_updates() {
    let machine = machine();
    for shape in TINY {
        let config = Config { batch: 1, ..config(shape, Format::F32, Readout::Exact) };
        let truth = Truth::new(shape, Io::Bf16, 64);
        let error = truth.error(&machine, &config, true).expect("an extend");
        assert!(error > 0.0 && error < 1e-6, "{shape}: {error:.1e}");
        // EXACT steps are the plain update, whatever they accept.
        let steps = Config { tokens: 4, window: 16, ..config };
        assert_eq!(truth.error(&machine, &steps, false), Ok(error), "{shape}");
    }
}

/// What is wrong is said, a distance that is no number included.
#[test]
fn a_check_fails_for_each_of_its_reasons() {
    let right = Check { is_finite: true, error: 1e-3, bound: 2e-3, faults: None };
    assert_eq!(right.failure(), None);
    for (check, sentence) in [
        (Check { is_finite: false, ..right.clone() }, "outputs are not finite"),
        (Check { error: 3e-3, ..right.clone() }, "outputs are 3.0e-3 from the plain update's; expected at most 2.0e-3"),
        (
            Check { error: f64::NAN, ..right.clone() },
            "outputs are NaN from the plain update's; expected at most 2.0e-3",
        ),
        (Check { faults: Some("bits 8".into()), ..right }, "bits 8"),
    ] {
        assert_eq!(check.failure().as_deref(), Some(sentence));
    }
}

// ---- Long runs ----

/// A run of 100,000 tokens in windows of 1000, whose outputs and states have these errors, relative to a norm of 2.
fn long_run(kind: Kind, error: f64, state: f64) -> Run {
    let window = |n: usize| Window { end: 1000 * n, error: (2.0 * error) * (2.0 * error), norm: 4.0, state };
    Run { kind, windows: (1..=100).map(window).collect() }
}

/// The kind with this name.
fn kind(name: &str) -> Kind {
    KINDS.into_iter().find(|kind| kind.to_string() == name).unwrap_or_else(|| panic!("no kind is {name}"))
}

#[test]
fn windows_grow_up_to_a_hundredth_and_meet_tenths() {
    let ends = drift::ends(100_000);
    assert_eq!(ends[..4], [16, 18, 20, 22]);
    assert!((1..=100).all(|n| ends.contains(&(n * 1000))));
    assert!(ends.windows(2).all(|two| two[0] < two[1] && two[1] - two[0] <= 1000), "{ends:?}");
    assert_eq!(drift::ends(100), (1..=100).collect::<Vec<_>>());
}

#[test]
fn errors_of_windows_add_up_by_their_squares() {
    let mut run = long_run(KINDS[0], 3e-3, 1e-6);
    assert!((run.error(0, 100_000) - 3e-3).abs() < 1e-15);
    // One of ten windows of the second tenth is ten times as bad: sqrt((9 + 100) / 10) of 3e-3.
    run.windows[15].error *= 100.0;
    assert!((run.tenth(2) - 10.9f64.sqrt() * 3e-3).abs() < 1e-15);
    assert!((run.tenth(1) - 3e-3).abs() < 1e-15 && (run.tenth(10) - 3e-3).abs() < 1e-15);
}

/// Each rule about a run has a run that keeps to it by little, and one that does not.
#[test]
fn a_run_that_drifts_fails() {
    let plain = long_run(KINDS[0], 1e-7, 2e-7);
    let run = |name: &str, error| long_run(kind(name), error, 2e-7);
    /// A run whose last tenth is so many times worse.
    fn worse(mut run: Run, times: f64) -> Run {
        run.windows.iter_mut().filter(|w| w.end > 90_000).for_each(|w| w.error *= times * times);
        run
    }
    for right in [
        plain.clone(),
        run("SPLIT32 EXACT", 1e-7),
        // Twice plain and 1e-6.
        run("F32 FULL", 1.19e-6),
        run("SPLIT32 FULL", 1.19e-6),
        // A tenth is 625 views: 1 + 6 / 25.
        worse(run("SPLIT32 HIGH", 1e-3), 1.23),
        // At T 4 windows are 32: 1 + 6 / 17.7.
        worse(run("SPLIT32 HIGH, T 4", 1e-3), 1.33),
        // The same run ten times as fast: states are not full in its second tenth.
        Run {
            windows: worse(run("SPLIT32 HIGH", 1e-3), 2.0)
                .windows
                .iter()
                .map(|w| Window { end: w.end / 11, ..*w })
                .collect(),
            ..run("SPLIT32 HIGH", 1e-3)
        },
        // Nothing is promised of 16-bit states but numbers.
        worse(long_run(kind("BF16 HIGH"), 1e-3, 0.5), 9.0),
        long_run(kind("plain F16, stochastic"), 1e-3, 0.5),
    ] {
        assert_eq!(right.failure(&plain), None, "{}", right.kind);
    }
    let one = |mut run: Run, change: fn(&mut Window)| {
        change(&mut run.windows[95]);
        run
    };
    for (wrong, sentence) in [
        (
            one(run("F32 FULL", 1e-7), |w| w.state = 2.1e-7),
            "after 96000 tokens the state's error is 2.100e-7; expected 2.000e-7",
        ),
        (
            one(run("SPLIT32 HIGH", 1e-3), |w| w.state *= 1.0 - f64::EPSILON),
            "after 96000 tokens the state's error is 2.000e-7; expected 2.000e-7",
        ),
        (
            one(run("SPLIT32 EXACT", 1e-7), |w| w.error *= 1.0 + f64::EPSILON),
            "outputs of EXACT up to token 96000 are not the plain update's",
        ),
        (
            run("F32 FULL", 1.21e-6),
            "the last tenth's error is 1.21e-6; expected at most 1.20e-6, twice the plain update's and 1e-6",
        ),
        (
            worse(run("SPLIT32 HIGH", 1e-3), 1.25),
            "the last tenth's error is 1.25e-3; expected at most 1.24e-3, about that of the second tenth",
        ),
        (one(run("F16 FULL", 1e-3), |w| w.state = f64::INFINITY), "outputs or states are not finite"),
        (one(run("SPLIT32 HIGH", 1e-3), |w| w.error = f64::NAN), "outputs or states are not finite"),
    ] {
        assert_eq!(wrong.failure(&plain).as_deref(), Some(sentence), "{}", wrong.kind);
    }
}

#[test]
fn points_of_curves_lie_at_the_logarithms_of_their_values() {
    let curve = Curve { class: "high".into(), points: vec![(10.0, 1e-6), (100.0, 0.0), (1000.0, 1e-4)] };
    let panel = Panel { title: "a < b".into(), curves: vec![curve] };
    let text = svg::curves("t", &[], &[("outputs", vec![panel])], &[vec![("HIGH".into(), "high".into())]]);
    // 200 by 220 from (72, 76): from corner to corner, and nothing where there is no logarithm.
    assert!(text.contains(r#"points="72.0,296.0 272.0,76.0" class="curve high""#), "{text}");
    assert!(text.contains("a &lt; b") && text.contains(">1e-5<") && text.contains(">1e3<") && text.contains(">HIGH<"));
}

// ---- Shapes, options, tables ----

#[test]
fn few_heads_of_a_shape_are_a_shape() {
    for model in MODELS {
        let few = model.shape.few();
        assert!(few.heads.is_multiple_of(few.groups), "{few}");
        assert_eq!((few.rows, few.columns, few.family), (model.shape.rows, model.shape.columns, model.shape.family));
    }
}

#[test]
fn dimensions_come_in_the_order_of_each_family() {
    let gdn = Shape::parse(Family::Gdn, &[16, 64, 128, 96]).expect("a shape");
    assert_eq!((gdn.groups, gdn.heads, gdn.columns, gdn.rows), (16, 64, 128, 96));
    assert_eq!(Shape::parse(Family::Kda, &[32, 128, 96]).expect("a shape").groups, 32);
    assert!(Shape::parse(Family::Mamba2, &[128, 64, 128]).unwrap_err().contains("heads,headdim,dstate,groups"));
    assert!(Shape::parse(Family::Mamba2, &[128, 64, 128, 7]).unwrap_err().contains("divide"));
}

#[test]
fn columns_are_as_wide_as_their_widest_cell() {
    let mut table = Table::new(&["shape", "us", "check"]);
    table.row(vec!["a".into(), "10.5".into(), "ok".into()]);
    assert_eq!(table.text(), "shape    us  check\na      10.5  ok\n");
}

#[test]
fn a_bar_is_as_long_as_its_share_of_the_plain_update() {
    let bar = Bar { group: "a & b".into(), label: "HIGH".into(), us: 50.0, floor_us: 25.0, plain_us: 100.0 };
    let text = svg::drawing("t", &["one <line>".into()], &[bar]);
    assert!(text.contains(r#"width="230.0" height="14" class="measured""#), "{text}");
    assert!(text.contains(r#"width="115.0" height="6" class="floor""#), "{text}");
    assert!(text.contains("a &amp; b") && text.contains("one &lt;line&gt;"));
}

// ---- Commands ----

fn bench(arguments: &[&str]) -> Output {
    let backend = if is_cuda() { "cuda" } else { "cpu" };
    let mut command = Command::new(env!("CARGO_BIN_EXE_replayssm-bench"));
    command.args(arguments).args(["--backend", backend, "--quick"]);
    command.output().expect("the program starts")
}

fn file(name: &str) -> PathBuf {
    let backend = if is_cuda() { "cuda" } else { "cpu" };
    let folder = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(format!("bench-{backend}"));
    std::fs::create_dir_all(&folder).expect("a folder");
    folder.join(name)
}

/// Runs a command that succeeds: what it printed, its numbers and its drawing.
fn succeed(name: &str, arguments: &[&str]) -> (String, Value, String) {
    let (json, svg) = (file(&format!("{name}.json")), file(&format!("{name}.svg")));
    let (to_json, to_svg) = (json.to_str().expect("a path"), svg.to_str().expect("a path"));
    let output = bench(&[&[name], arguments, &["--json", to_json, "--svg", to_svg]].concat());
    assert!(output.status.success(), "{output:?}");
    let text = String::from_utf8(output.stdout).expect("a text");
    let read = |path| std::fs::read_to_string(path).expect("a file");
    let value = serde_json::from_str(&read(&json)).expect("a JSON file");
    (text, value, read(&svg))
}

fn positive(value: &Value, what: &str) -> f64 {
    let number = value.as_f64().unwrap_or_else(|| panic!("{what} is {value}; expected a number"));
    assert!(number > 0.0 && number.is_finite(), "{what} is {number}");
    number
}

#[test]
fn kernel_times_and_checks_all_families() {
    let (text, json, svg) =
        succeed("kernel", &["--batch", "2", "--tokens", "1,4", "--accuracy-tokens", "32", "--bookkeeping"]);
    assert!(text.contains("read and write in place") && text.contains("Mamba-2 4x32x64 g2"), "{text}");
    assert!(svg.starts_with("<svg") && svg.ends_with("</svg>\n"));
    assert!(json["machine"]["name"].is_string() && json["library"].is_string());
    positive(&json["streams"]["read_bytes_per_second"], "the read stream");
    positive(&json["result"]["bookkeeping"]["commit_us"], "a commit");
    let rows = json["result"]["rows"].as_array().expect("rows");
    // Four ways at one token, two at four.
    assert_eq!(rows.len(), 3 * (4 + 2));
    for row in rows {
        assert!(row["failure"].is_null(), "{row}");
        for timed in ["staggered", "aligned", "plain"] {
            positive(&row[timed]["us"], timed);
            assert!(positive(&row[timed]["peak"], timed) >= 1.0, "{row}");
            positive(&row[timed]["moved_bytes"], timed);
        }
        let parts = ["checkpoint", "folds", "history", "records", "inputs", "outputs"].map(|part| &row["bytes"][part]);
        let sum: f64 = parts.iter().map(|part| positive(part, "bytes")).sum();
        assert!((sum - positive(&row["bytes"]["total"], "bytes")).abs() < 1.0, "{row}");
        // The plain update reads and writes a fp32 state, and nothing else that the library counts.
        let state = ["heads", "rows", "columns"].map(|n| positive(&row[n], n)).iter().product::<f64>() * 4.0;
        assert_eq!(positive(&row["plain"]["moved_bytes"], "bytes"), 2.0 * state, "{row}");
        let limit = if row["readout"] == "HIGH" { 4e-3 } else { 2e-6 };
        assert!(positive(&row["error"], "the error") < limit, "{row}");
        if row["readout"] == "EXACT" {
            assert_eq!(row["distance"], 0.0, "{row}");
        }
    }
}

#[test]
fn model_times_all_layers_of_a_step() {
    let (text, json, _) = succeed("model", &["--model", "nemotron-3-super-120b", "--layers", "3"]);
    assert!(text.contains("nemotron-3-super-120b"), "{text}");
    let row = &json["result"]["rows"][0];
    assert_eq!((&row["layers"], &row["failure"]), (&Value::from(3), &Value::Null));
    let step = positive(&row["step_us"], "a step");
    assert!((step - 3.0 * positive(&row["layer_us"], "a layer")).abs() < 1e-6 * step);
}

#[test]
fn plan_names_a_window_that_it_has_timed() {
    let (text, json, _) = succeed("plan", &["--window", "4,8"]);
    assert!(text.contains("is the fastest here"), "{text}");
    for group in json["result"]["groups"].as_array().expect("groups") {
        assert!(group["recommended"] == 4 || group["recommended"] == 8, "{group}");
        // By bytes, a window of 4 folds twice as often as one of 8.
        let folding = |i: usize| positive(&group["windows"][i]["folding"], "rows that fold");
        assert_eq!((folding(0), folding(1)), (0.25, 0.125));
    }
}

#[test]
fn drift_follows_all_kinds_of_all_families() {
    let (text, json, svg) = succeed("drift", &["--tokens", "200"]);
    assert!(text.contains("200 tokens, bf16 activations") && text.contains("Mamba-2 4x32x64 g2, A/256"), "{text}");
    assert!(svg.starts_with("<svg") && svg.ends_with("</svg>\n") && svg.contains("prefers-color-scheme: dark"));
    let cases = json["result"]["cases"].as_array().expect("cases");
    assert_eq!(cases.len(), 4);
    // Of outputs eleven kinds are drawn, of states nine.
    assert_eq!(svg.matches("<polyline").count(), 4 * (11 + 9));
    for case in cases {
        let runs = case["runs"].as_array().expect("runs");
        assert_eq!(runs.len(), KINDS.len());
        for (run, kind) in runs.iter().zip(KINDS) {
            assert_eq!((&run["kind"], &run["failure"]), (&Value::from(kind.to_string()), &Value::Null));
            let windows = run["windows_end_error_state"].as_array().expect("windows");
            assert_eq!((windows.len(), &windows[99][0]), (100, &Value::from(200)));
            // Errors have the size of what is rounded: fp32; bf16, by a half of 2^-8; f16, by a half of 2^-11. Of a long memory that is
            // rounded at each token, 200 roundings stay.
            let (error, state) = (positive(&run["error"], "the error"), positive(&run["state"], "the state's"));
            let (least, most) = match (kind.format, kind.readout) {
                (Format::F32 | Format::Split32, Readout::High) => (1e-5, 4e-3),
                (Format::F32 | Format::Split32, _) => (1e-9, 2e-6),
                (Format::Bf16, _) => (1e-4, 200.0 / 256.0),
                (Format::F16, _) => (1e-5, 200.0 / 2048.0),
            };
            assert!(least < error && error < most, "{} {kind}: {error:.1e}", case["case"]);
            let exact = kind.format.is_lossless();
            assert!(
                if exact { state < 2e-6 } else { least < state && state < most },
                "{} {kind}: {state:.1e}",
                case["case"]
            );
        }
    }
}

#[test]
fn dependent_launches_are_timed_on_a_gpu_alone() {
    let few = ["kernel", "--family", "mamba2", "--dims", "2,16,32,1", "--batch", "2", "--tokens", "1", "--format"];
    let output = bench(&[&few[..], &["split32", "--accuracy-tokens", "0", "--pdl", "--hidden", "64"]].concat());
    let (text, error) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    if is_cuda() {
        assert!(output.status.success() && text.contains("PDL, PREFETCH"), "{text}{error}");
    } else {
        assert_eq!((output.status.code(), text.as_ref()), (Some(2), ""));
        assert_eq!(error, "replayssm-bench: --pdl is for a GPU; expected the cuda backend\n");
    }
}

/// Each sentence names the option, its value and what was expected.
#[test]
fn wrong_options_are_named() {
    for (arguments, sentence) in [
        (&["kernel", "--batch", "0"][..], "invalid value '0' for '--batch <N,..>': expected a whole number from 1 to"),
        (
            &["kernel", "--format", "fp8"],
            "invalid value 'fp8' for '--format <NAME,..>': expected split32, f32, bf16, f16",
        ),
        (&["kernel", "--model", "gpt"], "invalid value 'gpt' for '--model <NAME,..>': expected one of nemotron"),
        (&["kernel", "--family", "kda", "--dims", "8,16"], "--dims is 8,16; expected H,K,V for kda, as 32,128,128"),
        (
            &["kernel", "--format", "f32", "--readout", "high"],
            "--readout is high and --format F32; expected split32 or bf16",
        ),
        (&["kernel", "--tokens", "8", "--window", "4"], "--window is 4; expected at least --tokens, 8"),
        (&["kernel", "--hidden", "50"], "invalid value '50' for '--hidden <N>': expected a multiple of 32 up to 65536"),
        (
            &["kernel", "--tuning", "blocks=2,consumers=1"],
            "for '--tuning <NAME=N,..>': consumers is 1; expected a whole number from 2 to 16",
        ),
        (
            &["model", "--model", "one-group-hybrid"],
            "--model is one-group-hybrid, whose layers are not known; expected --layers",
        ),
        (&["plan", "--tokens", "8", "--window", "4"], "--window is [4]; expected one of at least --tokens, 8"),
        (&["drift", "--tokens", "250"], "invalid value '250' for '--tokens <N>': expected a multiple of 100 up to"),
        (&["drift", "--family", "rwkv"], "invalid value 'rwkv' for '--family <NAME,..>': expected mamba2, gdn or kda"),
        (&["drift", "--tokens", "100", "--family", "kda", "--svg", "/nowhere/x"], "--svg is /nowhere/x: "),
        (&["kernel", "--json", "/nowhere/x", "--accuracy-tokens", "0", "--batch", "1"], "--json is /nowhere/x: "),
    ] {
        let output = bench(arguments);
        let error = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{arguments:?}: {error}");
        assert!(error.contains(sentence), "{arguments:?}: {error}");
    }
}
