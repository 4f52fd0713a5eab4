//! `drift`: whether errors grow. One long sequence per family, token by token, through every way to keep a state, against fp64: outputs in
//! windows of tokens, and the state at the end of each.
// SPDX-License-Identifier: MIT OR Apache-2.0

use std::collections::BTreeSet;
use std::fmt;

use indicatif::ProgressBar;
use serde_json::json;

use super::Result;
use super::api::{Pool, PoolDesc};
use super::config::{Format, Io, Readout, usual_window};
use super::generator::{Generator, SEED};
use super::kernel::progress;
use super::machine::Machine;
use super::options::{Common, Drift};
use super::oracle::{Oracle, relative};
use super::shape::{Family, Shape, TINY, USUAL};
use super::stretch::{Stretch, floats};
use super::svg::{self, Curve, Panel};
use super::table::{self, Table};

/// What A is divided by in the second sequence of Mamba-2: with the named generator's own A a head has forgotten a token after one to
/// twenty others, and nothing could add up.
const SLOWER: f32 = 256.0;

/// How a state is kept, and outputs are computed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Kind {
    /// The plain update, which stores the state behind every token; else steps.
    pub plain: bool,
    /// Of a step, of which [`Acceptance`](super::cycle::Acceptance) says how many stay.
    pub tokens: usize,
    /// Of the state.
    pub format: Format,
    /// Of steps.
    pub readout: Readout,
    /// 16-bit states: rounded stochastically.
    pub stochastic: bool,
}

const fn plain(format: Format, stochastic: bool) -> Kind {
    Kind { plain: true, tokens: 1, format, readout: Readout::Exact, stochastic }
}

const fn step(format: Format, readout: Readout, stochastic: bool) -> Kind {
    Kind { plain: false, tokens: 1, format, readout, stochastic }
}

/// Steps with drafts.
const fn drafts(format: Format, readout: Readout) -> Kind {
    Kind { plain: false, tokens: DRAFTED, format, readout, stochastic: false }
}

/// Tokens of a step with drafts.
const DRAFTED: usize = 4;

/// All of them; the first is what the others are compared with.
pub const KINDS: [Kind; 15] = [
    plain(Format::F32, false),
    step(Format::F32, Readout::Full, false),
    step(Format::Split32, Readout::High, false),
    step(Format::Split32, Readout::Full, false),
    step(Format::Split32, Readout::Exact, false),
    drafts(Format::F32, Readout::Full),
    drafts(Format::Split32, Readout::High),
    step(Format::Bf16, Readout::High, false),
    step(Format::Bf16, Readout::High, true),
    plain(Format::Bf16, false),
    plain(Format::Bf16, true),
    step(Format::F16, Readout::Full, false),
    step(Format::F16, Readout::Full, true),
    plain(Format::F16, false),
    plain(Format::F16, true),
];

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Kind { plain, tokens, format, readout, stochastic } = *self;
        if plain {
            write!(f, "plain {format}")?
        } else {
            write!(f, "{format} {readout}")?
        }
        if tokens > 1 {
            write!(f, ", T {tokens}")?;
        }
        f.write_str(if stochastic { ", stochastic" } else { "" })
    }
}

impl Kind {
    /// Classes of its curve; none: not drawn, because another curve lies there.
    fn class(&self) -> Option<String> {
        let colour = match (self.plain, self.format, self.readout) {
            _ if self.tokens > 1 => return None,
            (true, Format::F32, _) => "fp32",
            (_, Format::Bf16, _) => "bf16",
            (_, Format::F16, _) => "f16",
            (_, Format::F32, Readout::Full) => "full",
            (_, Format::Split32, Readout::High) => "high",
            _ => return None,
        };
        let dashes = match (self.plain && !self.format.is_lossless(), self.stochastic) {
            (false, false) => "",
            (false, true) => " dashes",
            (true, false) => " dots",
            (true, true) => " both",
        };
        Some(format!("{colour}{dashes}"))
    }
}

/// Errors of some tokens.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Window {
    /// Tokens up to its end.
    pub end: usize,
    /// Squared distance of its outputs from fp64.
    pub error: f64,
    /// Squared norm of those.
    pub norm: f64,
    /// Relative L2 error of the state at its end.
    pub state: f64,
}

/// What became of a sequence.
#[derive(Debug, Clone, PartialEq)]
pub struct Run {
    /// How its state was kept.
    pub kind: Kind,
    /// From its begin to its end.
    pub windows: Vec<Window>,
}

impl Run {
    fn tokens(&self) -> usize {
        self.windows.last().map_or(0, |window| window.end)
    }

    /// Relative L2 error of outputs of the windows that end behind `from` and not behind `to`.
    pub fn error(&self, from: usize, to: usize) -> f64 {
        let inside = self.windows.iter().filter(|window| window.end > from && window.end <= to);
        let (error, norm) = inside.fold((0.0, 0.0), |(error, norm), w| (error + w.error, norm + w.norm));
        (error / norm).sqrt()
    }

    /// Of the tenth with this number, from 1 on.
    pub fn tenth(&self, number: usize) -> f64 {
        let tokens = self.tokens();
        self.error(tokens / 10 * (number - 1), tokens / 10 * number)
    }

    /// Of the state, at the end.
    fn state(&self) -> f64 {
        self.windows.last().map_or(f64::NAN, |window| window.state)
    }

    /// What is wrong with it beside the plain update of a fp32 state: numbers that are none; and where a fp32 state survives, a state that
    /// is another one, and outputs that are worse than the readout promises or that get worse.
    pub fn failure(&self, plain: &Run) -> Option<String> {
        if !self.windows.iter().all(|window| window.error.is_finite() && window.state.is_finite()) {
            return Some("outputs or states are not finite".into());
        }
        if !self.kind.format.is_lossless() {
            return None;
        }
        // The same bytes have the same error.
        for (window, other) in self.windows.iter().zip(&plain.windows) {
            if window.state != other.state {
                let (state, other, end) = (window.state, other.state, window.end);
                return Some(format!("after {end} tokens the state's error is {state:.3e}; expected {other:.3e}"));
            }
            if self.kind.readout == Readout::Exact && window.error != other.error {
                return Some(format!("outputs of EXACT up to token {} are not the plain update's", window.end));
            }
        }
        let (second, last) = (self.tenth(2), self.tenth(10));
        let (most, of) = match self.kind.readout {
            Readout::Exact => return None,
            // The readout's promise (docs/KERNELS.md).
            Readout::Full => (2.0 * plain.tenth(10) + 1e-6, "twice the plain update's and 1e-6"),
            // Before so many tokens states fill up.
            Readout::High if self.tokens() < 10_000 => return None,
            Readout::High => (self.growth() * second, "about that of the second tenth"),
        };
        (last > most).then(|| format!("the last tenth's error is {last:.2e}; expected at most {most:.2e}, {of}"))
    }

    /// How much worse HIGH may be in the last tenth than in the second, where states are as full. Its error is that of a view of an exact state,
    /// and a view lasts for a window: a tenth has so many of them. Were each a draw that varies as much as its own mean, squared errors of a
    /// tenth would vary by 1 / sqrt(views) of themselves, errors by half of that, and the ratio of two tenths by 0.71 / sqrt(views): this is
    /// eight times as much. At 100,000 tokens and T 1 it is 1.24. A view's error is a sum over thousands of elements, and varies less.
    fn growth(&self) -> f64 {
        1.0 + 6.0 / (self.tokens() as f64 / 10.0 / usual_window(self.kind.tokens) as f64).sqrt()
    }
}

/// Where windows end: they are a hundredth of the run, and at its begin as short as an eighth of what lies before them.
pub fn ends(tokens: usize) -> Vec<usize> {
    let hundredth = tokens / 100;
    let mut ends: BTreeSet<_> = (1..=100).map(|n| n * hundredth).collect();
    let mut end = 16;
    while end < 8 * hundredth {
        ends.insert(end);
        end += (end / 8).max(1);
    }
    ends.into_iter().collect()
}

/// A sequence.
#[derive(Debug, Clone)]
struct Case {
    shape: Shape,
    slower: bool,
}

impl fmt::Display for Case {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}{}", self.shape, if self.slower { ", A/256" } else { "" })
    }
}

impl Case {
    fn all(options: &Drift, quick: bool) -> Vec<Self> {
        let asked = |shape: &Shape| options.family.is_empty() || options.family.contains(&shape.family);
        let shapes = if quick { TINY } else { USUAL.map(|shape| shape.few()) };
        let mut cases = Vec::new();
        for shape in shapes.into_iter().filter(asked) {
            cases.push(Case { shape, slower: false });
            if shape.family == Family::Mamba2 {
                cases.push(Case { shape, slower: true });
            }
        }
        cases
    }

    fn generator(&self, io: Io) -> Generator {
        let mut generator = Generator::new(self.shape, io, SEED);
        if self.slower {
            generator.a.iter_mut().for_each(|a| *a /= SLOWER);
        }
        generator
    }
}

/// Runs a sequence all ways, side by side.
fn measure(machine: &Machine, case: &Case, io: Io, ends: &[usize], bar: &ProgressBar) -> Result<Vec<Run>> {
    let mut generator = case.generator(io);
    let mut oracle = Oracle::new(&generator);
    let (dense, exec) = (machine.buffer(case.shape.state() * 4)?, machine.exec());
    let (mut pools, mut runs) = (Vec::new(), Vec::new());
    for kind in KINDS {
        let desc = PoolDesc {
            shape: case.shape,
            layers: 1,
            slots: 1,
            window: usual_window(kind.tokens),
            tokens: kind.tokens,
            staggered: true,
            format: kind.format,
            readout: kind.readout,
            stochastic: kind.stochastic,
            io,
            out: Io::F32,
        };
        pools.push(Pool::new(&machine.context, &desc)?);
        runs.push(Run { kind, windows: Vec::new() });
    }
    let mut begin = 0;
    for &end in ends {
        let (tokens, mut truth): (Vec<_>, _) = ((begin..end).map(|_| generator.token()).collect(), Vec::new());
        tokens.iter().for_each(|token| oracle.token(token, &mut truth));
        let norm = truth.iter().map(|truth| truth * truth).sum();
        let stretch = Stretch::new(machine, &generator, io, &tokens, DRAFTED)?;
        for (pool, run) in pools.iter().zip(&mut runs) {
            let Kind { plain, tokens, .. } = run.kind;
            let out = stretch.run(pool, tokens, plain)?;
            let error = out.iter().zip(&truth).map(|(out, truth)| (out - truth) * (out - truth)).sum();
            pool.export(0, &stretch.rows(tokens, plain), &dense, &exec)?;
            machine.finish()?;
            pool.check()?;
            let state = relative(floats(&dense.read()?), oracle.state().iter().copied());
            run.windows.push(Window { end, error, norm, state });
        }
        bar.inc((end - begin) as u64);
        begin = end;
    }
    Ok(runs)
}

/// Runs the command; false if a check has failed.
pub fn run(common: &Common, options: &Drift) -> Result<bool> {
    let machine = common.machine()?;
    let tokens = options.tokens.unwrap_or(if common.quick { 100 } else { 100_000 });
    let (ends, cases) = (ends(tokens), Case::all(options, common.quick));
    table::print_place(&machine);
    println!(
        "{tokens} tokens, {} activations; T 1, W {}; T {DRAFTED}, W {}\n",
        options.io,
        usual_window(1),
        usual_window(DRAFTED)
    );
    let (bar, mut all) = (progress(cases.len() * tokens), Vec::new());
    for case in cases {
        bar.set_message(case.to_string());
        let runs = measure(&machine, &case, options.io, &ends, &bar).map_err(|why| format!("{case}: {why}"))?;
        all.push((case, runs));
    }
    bar.finish_and_clear();
    print(&all, tokens);
    let result: Vec<_> = all.iter().map(|(case, runs)| json_of(case, runs)).collect();
    table::write_json(
        common,
        &machine,
        None,
        "drift",
        json!({"tokens": tokens, "io": options.io.name(), "cases": result}),
    )?;
    table::write_drawing(common, &drawing(&machine, &all))?;
    Ok(all.iter().all(|(_, runs)| runs.iter().all(|run| run.failure(&runs[0]).is_none())))
}

fn print(all: &[(Case, Vec<Run>)], tokens: usize) {
    let first = format!("first {}", tokens / 100);
    let mut table = Table::new(&[
        "shape",
        "state",
        &first,
        "2nd tenth",
        "last tenth",
        "last/2nd",
        "all",
        "state at the end",
        "check",
    ]);
    for (case, runs) in all {
        for run in runs {
            let (second, last) = (run.tenth(2), run.tenth(10));
            table.row(vec![
                case.to_string(),
                run.kind.to_string(),
                format!("{:.2e}", run.error(0, tokens / 100)),
                format!("{second:.2e}"),
                format!("{last:.2e}"),
                format!("{:.2}", last / second),
                format!("{:.2e}", run.error(0, tokens)),
                format!("{:.2e}", run.state()),
                run.failure(&runs[0]).map_or("ok".into(), |why| format!("FAILED: {why}")),
            ]);
        }
    }
    table.print();
    println!(
        "\nRelative L2 errors of fp32 outputs against fp64, and of the state. plain: extend of one token, which stores the state behind each. A/256: \
         decays so near 1 that a head remembers up to 5000 tokens. At T 4 three quarters of the drafts stay. Checked: states of F32 and SPLIT32 are the plain update's, and so are outputs \
         of EXACT; FULL is within twice plain and 1e-6; SPLIT32 HIGH is no worse in the last tenth than in the second."
    );
}

fn json_of(case: &Case, runs: &[Run]) -> serde_json::Value {
    let of = |run: &Run| {
        let Kind { plain, tokens, format, readout, stochastic } = run.kind;
        let windows: Vec<_> = run.windows.iter().map(|w| json!([w.end, (w.error / w.norm).sqrt(), w.state])).collect();
        json!({
            "kind": run.kind.to_string(), "plain": plain, "tokens": tokens, "format": format.name(), "readout": readout.name(), "stochastic": stochastic,
            "first_hundredth": run.error(0, run.tokens() / 100), "second_tenth": run.tenth(2), "last_tenth": run.tenth(10),
            "error": run.error(0, run.tokens()), "state": run.state(), "failure": run.failure(&runs[0]),
            "windows_end_error_state": windows,
        })
    };
    json!({"case": case.to_string(), "family": case.shape.family.name(), "runs": runs.iter().map(of).collect::<Vec<_>>()})
}

/// Outputs above, states below. Windows are drawn together until they have grown by a quarter.
fn drawing(machine: &Machine, all: &[(Case, Vec<Run>)]) -> String {
    let panel = |case: &Case, runs: &[Run], states: bool| {
        let drawn = runs.iter().filter_map(|run| Some((run, run.kind.class()?)));
        let drawn = drawn.filter(|(run, _)| !states || run.kind == KINDS[0] || !run.kind.format.is_lossless());
        let curve = |(run, class): (&Run, String)| {
            let (mut points, mut begin) = (Vec::new(), 0);
            for window in run.windows.iter().filter(|w| w.end >= 10) {
                if 4 * window.end >= 5 * begin || window.end == run.tokens() {
                    let error = if states { window.state } else { run.error(begin, window.end) };
                    points.push((window.end as f64, error));
                    begin = window.end;
                }
            }
            Curve { class, points }
        };
        Panel { title: case.to_string(), curves: drawn.map(curve).collect() }
    };
    let panels = |states| all.iter().map(|(case, runs)| panel(case, runs, states)).collect::<Vec<_>>();
    let named = |range: std::ops::Range<usize>| -> Vec<_> {
        KINDS[range].iter().filter_map(|kind| Some((kind.to_string(), kind.class()?))).collect()
    };
    let lines = [
        format!("{}: {}; libreplayssm {}", machine.name, machine.details, env!("CARGO_PKG_VERSION")),
        "Relative L2 errors against fp64 over tokens; plain: the update that stores the state behind every token".to_owned(),
        "States of F32 and SPLIT32 are those of plain F32; outputs of SPLIT32 FULL lie on F32 FULL, those of EXACT on plain F32".to_owned(),
    ];
    svg::curves(
        "Errors over long runs",
        &lines,
        &[("outputs", panels(false)), ("states", panels(true))],
        &[named(0..7), named(7..11), named(11..15)],
    )
}
