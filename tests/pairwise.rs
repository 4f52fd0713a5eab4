//! All options of all families, two at a time: a table of options and of what excludes what, the smallest set of models we find
//! in which every possible pair of values meets, and one generator that drives each of them through random steps, partial accepts,
//! repeats, aborts, rewinds and extends.
//!
//! What holds for each model, at every step: where a fold moved the checkpoint, it is the recurrence from the checkpoint before, rounded as
//! the format says; EXACT outputs are the recurrence's from the checkpoint as stored, by bytes; FULL and HIGH outputs are within their bounds
//! around fp64; the state is the recurrence's, and with a fp32 format that of `extend` over everything accepted so far.

#![allow(clippy::multiple_unsafe_ops_per_block, reason = "a test's calls share one promise")]

mod common;

use common::judge::{Judge, Stored, is_lossless, is_mixed};
use common::oracle::{relative, unit};
use common::{Rig, Rng, Row, Skip, Spec, Token, hash};
use replayssm::ffi::*;

#[global_allocator]
static HEAP: common::device::Heap = common::device::Heap::ON_CUDA;

/// Options and their values; the first is what an option has in a family that does not know it.
const OPTIONS: &[(&str, &[&str])] = &[
    ("family", &["Mamba-2", "GDN", "KDA"]),
    ("format", &["SPLIT32", "F32", "BF16", "F16"]),
    ("readout", &["EXACT", "FULL", "HIGH"]),
    ("rounding", &["nearest", "stochastic"]),
    ("io", &["bf16", "f16", "f32"]),
    ("out", &["f32", "bf16", "f16"]),
    ("gate dtype", &["f32", "bf16", "f16"]),
    ("parameters", &["f32 and bf16", "f32", "bf16", "f16"]),
    ("dims", &["20 x 40", "16 x 32", "17 x 33", "40 x 96", "5 x 7"]),
    ("heads / groups", &["4 / 2", "1 / 1", "3 / 3", "6 / 2"]),
    ("layers", &["1", "2"]),
    ("window", &["16", "1", "7", "32"]),
    ("T", &["4", "1", "7", "20"]),
    ("min_rewind", &["0", "3"]),
    ("schedule", &["staggered", "by position", "none"]),
    ("gate", &["softplus", "processed", "lower bound"]),
    ("bias", &["yes", "no"]),
    ("skip", &["none", "per head", "per element"]),
    ("z", &["no", "yes"]),
    ("norm", &["yes", "no"]),
    ("beta", &["raw", "processed"]),
    ("scale", &["default", "0.5"]),
    ("head map", &["grouped", "tiled"]),
    ("u", &["default", "f32", "bf16"]),
    ("ids", &["int64", "int32"]),
    ("rings", &["slots", "apart"]),
    ("batch", &["dense", "packed"]),
    ("memory", &["strided", "contiguous"]),
    ("checks", &["off", "on"]),
    ("threads", &["1", "3", "3 parts"]),
];

/// Values of two options that exclude each other.
const EXCLUDED: &[[&str; 4]] = &[
    ["family", "Mamba-2", "gate", "lower bound"],
    ["family", "Mamba-2", "norm", "no"],
    ["family", "Mamba-2", "beta", "processed"],
    ["family", "Mamba-2", "scale", "0.5"],
    ["family", "Mamba-2", "head map", "tiled"],
    ["family", "Mamba-2", "u", "f32|bf16"],
    ["family", "GDN|KDA", "skip", "per head|per element"],
    ["family", "GDN|KDA", "z", "yes"],
    ["family", "GDN", "gate", "lower bound"],
    // A processed log decay takes no bias, and a processed dt would become negative: a state that grows.
    ["gate", "processed", "bias", "yes"],
    ["format", "F32|F16", "readout", "HIGH"],
    ["format", "SPLIT32|F32", "rounding", "stochastic"],
    ["readout", "EXACT", "u", "f32|bf16"],
    ["readout", "FULL", "u", "bf16"],
    ["window", "1", "T", "4|7|20"],
    ["window", "7|16", "T", "20"],
];

/// A value for each option; while it is being made, for some.
type Choice = Vec<Option<usize>>;
/// Two values: option and value, option and value.
type Pair = [(usize, usize); 2];

fn excluded(a: (usize, usize), b: (usize, usize)) -> bool {
    let is = |name: &str, values: &str, (option, value): (usize, usize)| {
        OPTIONS[option].0 == name && values.split('|').any(|v| v == OPTIONS[option].1[value])
    };
    EXCLUDED.iter().any(|[p, u, q, v]| is(p, u, a) && is(q, v, b) || is(p, u, b) && is(q, v, a))
}

fn fits(choice: &Choice, new: (usize, usize)) -> bool {
    let chosen = choice.iter().enumerate().filter_map(|(option, value)| Some((option, (*value)?)));
    chosen.into_iter().all(|old| old.0 == new.0 || !excluded(old, new))
}

/// Chooses all that is open: an option with the fewest values that fit, of them the one that meets the most of `wanted`. None if
/// nothing fits.
fn complete(choice: Choice, wanted: &[Pair], rng: &mut Rng) -> Option<Choice> {
    let fitting =
        |option: usize| (0..OPTIONS[option].1.len()).filter(|&v| fits(&choice, (option, v))).collect::<Vec<_>>();
    let open = (0..OPTIONS.len()).filter(|&option| choice[option].is_none());
    let next = open.map(|option| (fitting(option), option)).min_by_key(|(values, _)| (values.len(), rng.next()));
    let Some((mut values, option)) = next else { return Some(choice) };
    values.sort_by_cached_key(|&v| {
        let gain = wanted.iter().filter(|[a, b]| {
            let met = |x: &(usize, usize), y: &(usize, usize)| *x == (option, v) && choice[y.0] == Some(y.1);
            met(a, b) || met(b, a)
        });
        (std::cmp::Reverse(gain.count()), rng.next())
    });
    values.into_iter().find_map(|v| {
        let mut choice = choice.clone();
        choice[option] = Some(v);
        complete(choice, wanted, rng)
    })
}

fn with(pair: &Pair) -> Choice {
    let mut choice = vec![None; OPTIONS.len()];
    pair.iter().for_each(|&(option, value)| choice[option] = Some(value));
    choice
}

fn all_pairs() -> Vec<Pair> {
    let values: Vec<_> = (0..OPTIONS.len()).flat_map(|o| (0..OPTIONS[o].1.len()).map(move |v| (o, v))).collect();
    let pairs = values.iter().flat_map(|&a| values.iter().map(move |&b| [a, b]));
    pairs.filter(|[a, b]| a.0 < b.0).collect()
}

/// The models: each possible pair of values is in one of them.
fn table() -> Vec<Choice> {
    let mut rng = Rng(2);
    let mut wanted: Vec<Pair> = all_pairs();
    wanted.retain(|[a, b]| !excluded(*a, *b) && complete(with(&[*a, *b]), &[], &mut rng).is_some());
    let mut table = Vec::new();
    while let Some(first) = wanted.first().copied() {
        let meets = |choice: &Choice| wanted.iter().filter(|p| p.iter().all(|&(o, v)| choice[o] == Some(v))).count();
        let candidates: Vec<_> = (0..10).filter_map(|_| complete(with(&first), &wanted, &mut rng)).collect();
        let best = candidates.into_iter().max_by_key(meets).expect("a model with a possible pair");
        wanted.retain(|p| !p.iter().all(|&(o, v)| best[o] == Some(v)));
        table.push(best);
    }
    table
}

/// Pairs are checked one by one against the table as it came out, with no use of how it was made.
#[test]
fn every_possible_pair_of_options_meets_in_a_model() {
    let table = table();
    for choice in &table {
        for (option, value) in choice.iter().enumerate() {
            assert!(fits(choice, (option, value.expect("a value for each option"))), "{}", name(choice));
        }
    }
    let (mut met, mut impossible) = (0, 0);
    for [a, b] in all_pairs() {
        let is_met = table.iter().any(|choice| choice[a.0] == Some(a.1) && choice[b.0] == Some(b.1));
        // Pairs that no line of EXCLUDED names follow from two of them.
        let follows = [[("u", "bf16"), ("format", "F32|F16")], [("u", "bf16"), ("skip", "per head|per element")]];
        let text = |(o, v): (usize, usize)| (OPTIONS[o].0, OPTIONS[o].1[v]);
        let none = excluded(a, b)
            || between_families(text(a), text(b))
            || follows.iter().any(|[p, q]| {
                let is = |x: (&str, &str), y: &(&str, &str)| x.0 == y.0 && y.1.split('|').any(|v| v == x.1);
                is(text(a), p) && is(text(b), q) || is(text(a), q) && is(text(b), p)
            });
        assert_eq!(is_met, !none, "{:?} with {:?}", text(a), text(b));
        *(if is_met { &mut met } else { &mut impossible }) += 1;
    }
    println!("{} models, {met} pairs of options, {impossible} pairs impossible", table.len());
}

/// Whether one value is of Mamba-2 alone and the other of the delta rules.
fn between_families(a: (&str, &str), b: (&str, &str)) -> bool {
    let mamba2 = |(option, value)| matches!((option, value), ("skip", "per head" | "per element") | ("z", "yes"));
    let delta = |(option, value)| {
        matches!(
            (option, value),
            ("gate", "lower bound")
                | ("norm", "no")
                | ("beta", "processed")
                | ("scale", "0.5")
                | ("head map", "tiled")
                | ("u", "f32" | "bf16")
        )
    };
    mamba2(a) && delta(b) || mamba2(b) && delta(a)
}

fn get(choice: &Choice, option: &str) -> &'static str {
    let i = OPTIONS.iter().position(|o| o.0 == option).expect("an option");
    OPTIONS[i].1[choice[i].expect("a value")]
}

fn name(choice: &Choice) -> String {
    OPTIONS.iter().map(|(option, _)| format!("{option} {}", get(choice, option))).collect::<Vec<_>>().join(", ")
}

fn dtype(value: &str) -> i32 {
    match value {
        "bf16" => REPLAYSSM_DTYPE_BF16,
        "f16" => REPLAYSSM_DTYPE_F16,
        "f32" => REPLAYSSM_DTYPE_F32,
        _ => 0,
    }
}

const SLOTS: usize = 9;

fn spec(choice: &Choice) -> Spec {
    let get = |option| get(choice, option);
    let numbers = |option| -> [usize; 2] {
        let (a, b) = get(option).split_once([' ']).expect("two numbers");
        [a, b.rsplit(' ').next().expect("a number")].map(|n| n.parse().expect("a number"))
    };
    let number = |option| get(option).parse().expect("a number");
    let ([headdim, dstate], [heads, groups]) = (numbers("dims"), numbers("heads / groups"));
    let (threads, parts) = match get("threads") {
        "3 parts" => (1, 3),
        n => (n.parse().expect("a number"), 1),
    };
    Spec {
        family: match get("family") {
            "Mamba-2" => REPLAYSSM_FAMILY_MAMBA2,
            "GDN" => REPLAYSSM_FAMILY_GDN,
            _ => REPLAYSSM_FAMILY_KDA,
        },
        format: match get("format") {
            "SPLIT32" => REPLAYSSM_FORMAT_SPLIT32,
            "F32" => REPLAYSSM_FORMAT_F32,
            "BF16" => REPLAYSSM_FORMAT_BF16,
            _ => REPLAYSSM_FORMAT_F16,
        },
        readout: match get("readout") {
            "EXACT" => REPLAYSSM_READOUT_EXACT,
            "FULL" => REPLAYSSM_READOUT_FULL,
            _ => REPLAYSSM_READOUT_HIGH,
        },
        schedule: match get("schedule") {
            "staggered" => REPLAYSSM_SCHEDULE_STAGGERED,
            "by position" => REPLAYSSM_SCHEDULE_BY_POSITION,
            _ => REPLAYSSM_SCHEDULE_NONE,
        },
        gate_kind: match get("gate") {
            "softplus" => REPLAYSSM_GATE_SOFTPLUS,
            "processed" => REPLAYSSM_GATE_LOG_DECAY,
            _ => REPLAYSSM_GATE_LOWER_BOUND,
        },
        skip: match get("skip") {
            "none" => Skip::None,
            "per head" => Skip::PerHead,
            _ => Skip::PerElement,
        },
        head_map: if get("head map") == "tiled" { REPLAYSSM_HEAD_MAP_TILED } else { REPLAYSSM_HEAD_MAP_GROUPED },
        ids: if get("ids") == "int32" { REPLAYSSM_DTYPE_I32 } else { REPLAYSSM_DTYPE_I64 },
        scale: if get("scale") == "default" { 0.0 } else { 0.5 },
        stochastic: get("rounding") == "stochastic",
        softplus: get("gate") == "softplus",
        bias: get("bias") == "yes",
        gate: get("z") == "yes",
        l2norm: get("norm") == "yes",
        beta_processed: get("beta") == "processed",
        contiguous: get("memory") == "contiguous",
        checks: get("checks") == "on",
        io: dtype(get("io")),
        out: dtype(get("out")),
        dt_dtype: dtype(get("gate dtype")),
        param_dtype: dtype(get("parameters")),
        u_dtype: dtype(get("u")),
        slots: SLOTS,
        rings: if get("rings") == "apart" { SLOTS + 4 } else { 0 },
        layers: number("layers"),
        window: number("window"),
        t_max: number("T"),
        keep: number("min_rewind"),
        headdim,
        dstate,
        heads,
        groups,
        threads,
        parts,
        seed: 3,
    }
}

/// A request, and for a fp32 state a twin on another slot that takes what was accepted by `extend`.
struct Request {
    slot: usize,
    twin: usize,
    log: Vec<Vec<Token>>,
    /// Tokens since the last extend or rewind.
    since: usize,
}

struct Run {
    rig: Rig,
    /// Of the last layer.
    judge: Judge,
    packed: bool,
    rng: Rng,
    requests: Vec<Request>,
}

impl Run {
    fn new(choice: &Choice) -> Self {
        let spec = spec(choice);
        let request = |slot, twin| Request { slot, twin, log: vec![], since: 0 };
        Run {
            judge: Judge::new(&spec),
            packed: get(choice, "batch") == "packed",
            rng: Rng(hash(name(choice).bytes().map(u32::from))),
            requests: vec![request(1, 0), request(4, 2), request(8, 5)],
            rig: Rig::new(spec),
        }
    }

    fn ring(&self, slot: usize) -> usize {
        if self.rig.spec.rings == 0 { slot } else { (slot * 5 + 3) % self.rig.spec.rings }
    }

    fn row(&self, slot: usize, tokens: &[Vec<Token>]) -> Row {
        Row { slot: slot as i64, ring: self.ring(slot) as i64, tokens: tokens.to_vec(), flush: false }
    }

    /// A row for each request, of 1 to `most` tokens (packed: each of its own number, none too), and perhaps a null row behind them.
    fn rows(&mut self, most: usize) -> Vec<Row> {
        let same = 1 + self.rng.below(most);
        let mut rows = Vec::new();
        for i in 0..4 {
            let n = if self.packed { self.rng.below(most + 1) } else { same };
            let tokens = self.rig.tokens(&mut self.rng, n);
            if let Some(request) = self.requests.get(i) {
                let flush = self.rng.below(10) == 0;
                rows.push(Row { flush, ..self.row(request.slot, &tokens) });
            } else if self.rng.below(2) == 0 {
                let (slot, ring) = if self.rig.spec.rings == 0 { (-1, -1) } else { (3, -2) };
                rows.push(Row { slot, ring, tokens, flush: false });
            }
        }
        rows
    }

    fn stored(&self, slot: usize) -> Stored {
        self.judge.stored(&self.rig, slot, self.ring(slot))
    }

    fn moved(&mut self, slot: usize, before: &Stored, log: &[Vec<Token>]) -> Stored {
        let ring = self.ring(slot);
        self.judge.moved(&self.rig, slot, ring, before, log)
    }

    fn step(&mut self) {
        let before: Vec<_> = self.requests.iter().map(|r| self.stored(r.slot)).collect();
        let most = self.rig.spec.t_max;
        if self.rng.below(4) == 0 {
            // Never committed, or dead between layers.
            let rows = self.rows(most);
            let last = if self.rng.below(2) == 0 { self.judge.layer } else { 0 };
            (0..=last).for_each(|layer| drop(self.rig.layer(layer, &rows, false, 0)));
        }
        let rows = self.rows(most);
        if self.rng.below(4) == 0 {
            self.rig.step(&rows);
        }
        let outputs = self.rig.step(&rows);
        let counts: Vec<_> = rows.iter().map(|r| self.rng.below(r.tokens.len() + 1)).collect();
        for i in 0..self.requests.len() {
            let log: Vec<_> = self.requests[i].log.iter().chain(&rows[i].tokens).cloned().collect();
            let now = self.moved(self.requests[i].slot, &before[i], &log);
            self.judge.check_outputs(&self.rig, &now, &log, &outputs[i]);
        }
        for (null, out) in rows.iter().zip(&outputs).skip(3) {
            assert!(out.iter().flatten().all(|&b| b == 0), "a null row's output, ring {}", null.ring);
        }
        self.rig.commit(&rows, &counts.iter().map(|&n| n as i32).collect::<Vec<_>>());
        for (i, n) in counts.iter().enumerate().take(3) {
            self.requests[i].since += n;
            self.requests[i].log.extend_from_slice(&rows[i].tokens[..*n]);
        }
        self.extend_twins(&rows.iter().zip(&counts).map(|(r, n)| r.tokens[..*n].to_vec()).collect::<Vec<_>>());
    }

    fn extend_twins(&mut self, tokens: &[Vec<Vec<Token>>]) {
        if is_lossless(&self.rig.spec) {
            let rows: Vec<_> = self.requests.iter().zip(tokens).map(|(r, tokens)| self.row(r.twin, tokens)).collect();
            self.rig.extend(&rows, 0);
        }
    }

    fn extend(&mut self) {
        let before: Vec<_> = self.requests.iter().map(|r| self.stored(r.slot)).collect();
        let most = 2 * self.rig.spec.window.min(12);
        let rows = self.rows(most);
        let tail = if self.rig.spec.parts > 1 { 0 } else { self.rng.below(self.rig.spec.window + 1) };
        let outputs = self.rig.extend(&rows, tail as i32);
        for i in 0..self.requests.len() {
            let log: Vec<_> = self.requests[i].log.iter().chain(&rows[i].tokens).cloned().collect();
            // Up to the new checkpoint from the old one; the tail from the new one, as it is stored.
            let now = self.moved(self.requests[i].slot, &before[i], &log);
            let (mut recurrence, _) = self.judge.recurrence(&before[i], &log, now.tag);
            recurrence.extend(self.judge.recurrence(&now, &log, log.len()).0);
            let first = recurrence.len() - outputs[i].len();
            assert!(outputs[i][..] == recurrence[first..], "extend's outputs are not the recurrence's");
            if !rows[i].tokens.is_empty() {
                self.requests[i].since = 0;
            }
            self.requests[i].log = log;
        }
        self.extend_twins(&rows.iter().map(|r| r.tokens.clone()).collect::<Vec<_>>());
    }

    fn rewind(&mut self) {
        let i = self.rng.below(self.requests.len());
        let n = self.rng.below(5).min(self.requests[i].log.len());
        let (slot, twin) = (self.requests[i].slot, self.requests[i].twin);
        let must = n <= self.requests[i].since.min(self.rig.spec.keep);
        let done = self.rig.rewind(slot, self.ring(slot), n as i32);
        assert!(done || !must, "a rewind of {n} within min_rewind");
        if !done {
            assert_eq!(self.rig.faults(true).bits, REPLAYSSM_FAULT_REWIND);
            return;
        }
        let request = &mut self.requests[i];
        request.since = 0;
        request.log.truncate(request.log.len() - n);
        if is_lossless(&self.rig.spec) {
            self.rig.reset(twin, self.ring(twin), 0);
            self.rig.extend(&[self.row(twin, &self.requests[i].log)], 0);
        }
    }

    fn check_states(&self) {
        for request in &self.requests {
            let export = |slot: usize| self.rig.export(self.judge.layer, slot, self.ring(slot), None);
            let got = export(request.slot);
            let (_, state) = self.judge.recurrence(&self.stored(request.slot), &request.log, request.log.len());
            assert!(got == state, "the state at {} is not the recurrence's", request.log.len());
            if is_lossless(&self.rig.spec) {
                assert!(got == export(request.twin), "the state at {} is not extend's", request.log.len());
            }
            assert_eq!(self.rig.cursor(self.ring(request.slot)).position, request.log.len() as i64);
        }
        assert_eq!(self.rig.faults(false).bits, 0);
    }
}

fn drive(choice: &Choice) {
    let mut run = Run::new(choice);
    for _ in 0..32 {
        match run.rng.below(10) {
            0 => run.extend(),
            1 => run.rewind(),
            _ => run.step(),
        }
        run.check_states();
    }
    assert!(run.judge.folds > 0, "nothing was folded");
    let [got, plain, truth] = &run.judge.outputs;
    let (error, recurrence) = (relative(got, truth), relative(plain, truth));
    // As in extend_is_the_delta_rule, plus the output's rounding.
    let grade = 5e-6 + if run.rig.spec.out == REPLAYSSM_DTYPE_F32 { 0.0 } else { unit(run.rig.spec.out) };
    assert!(recurrence <= grade, "the recurrence is {recurrence:.2e} from fp64");
    if run.rig.spec.readout == REPLAYSSM_READOUT_FULL && !is_mixed(&run.rig.spec) {
        assert!(error <= 2.0 * recurrence + 1e-6, "FULL {error:.2e}, plain {recurrence:.2e}");
    }
}

/// Each quarter of the table is a test, so that they share the processors.
fn quarter(n: usize) {
    // The models are small; with several threads, several are to work all the same.
    replayssm::backend::cpu::share_all();
    let table = table();
    for (i, choice) in table.iter().enumerate().filter(|(i, _)| i % 4 == n) {
        println!("model {i} of {}: {}", table.len(), name(choice));
        drive(choice);
    }
}

#[test]
fn pairs_of_options_first_quarter() {
    quarter(0);
}

#[test]
fn pairs_of_options_second_quarter() {
    quarter(1);
}

#[test]
fn pairs_of_options_third_quarter() {
    quarter(2);
}

#[test]
fn pairs_of_options_fourth_quarter() {
    quarter(3);
}
