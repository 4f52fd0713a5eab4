//! A model of any options and any order of operations, against the recurrence.
//!
//! At every moment: the checkpoint is the recurrence from the one before, rounded as its format says; outputs are EXACT ones by bytes, others
//! within their bounds around fp64; states that are exported, stored, copied, saved and restored are the recurrence's by bytes, and with a
//! lossless format those of `extend` taking one token at a time.

use replayssm::ffi::*;

use crate::common::judge::{Judge, Stored, is_lossless};
use crate::common::oracle::Oracle;
use crate::common::{Rig, Rng, Row, Skip, Spec, Token, message};
use crate::source::Source;

/// Requests: each has a slot and a ring of its own.
const REQUESTS: usize = 3;
/// A slot without a ring.
const SHELF: usize = 3;
const SLOTS: usize = 4;
const RINGS: usize = 6;
const MOST_OPERATIONS: usize = 24;

fn spec_of(input: &mut Source) -> Spec {
    let family = input.of(&[REPLAYSSM_FAMILY_MAMBA2, REPLAYSSM_FAMILY_GDN, REPLAYSSM_FAMILY_KDA]);
    let is_delta = family != REPLAYSSM_FAMILY_MAMBA2;
    let dtypes = [REPLAYSSM_DTYPE_BF16, REPLAYSSM_DTYPE_F16, REPLAYSSM_DTYPE_F32];
    let format =
        input.of(&[REPLAYSSM_FORMAT_SPLIT32, REPLAYSSM_FORMAT_F32, REPLAYSSM_FORMAT_BF16, REPLAYSSM_FORMAT_F16]);
    let has_high = matches!(format, REPLAYSSM_FORMAT_SPLIT32 | REPLAYSSM_FORMAT_BF16);
    let readout = input.of(&[REPLAYSSM_READOUT_EXACT, REPLAYSSM_READOUT_FULL, REPLAYSSM_READOUT_HIGH]);
    let readout = if readout == REPLAYSSM_READOUT_HIGH && !has_high { REPLAYSSM_READOUT_FULL } else { readout };
    let u_dtype = match (is_delta, readout) {
        (true, REPLAYSSM_READOUT_FULL) => input.of(&[0, REPLAYSSM_DTYPE_F32]),
        (true, REPLAYSSM_READOUT_HIGH) => input.of(&[0, REPLAYSSM_DTYPE_F32, REPLAYSSM_DTYPE_BF16]),
        _ => 0,
    };
    let gate_kind = match family {
        REPLAYSSM_FAMILY_KDA => {
            input.of(&[REPLAYSSM_GATE_SOFTPLUS, REPLAYSSM_GATE_LOG_DECAY, REPLAYSSM_GATE_LOWER_BOUND])
        }
        REPLAYSSM_FAMILY_GDN => input.of(&[REPLAYSSM_GATE_SOFTPLUS, REPLAYSSM_GATE_LOG_DECAY]),
        _ => 0,
    };
    let softplus = !is_delta && input.below(2) == 0;
    let raw = if is_delta { gate_kind != REPLAYSSM_GATE_LOG_DECAY } else { softplus };
    let groups = 1 + input.below(3);
    let window = 1 + input.below(24);
    Spec {
        family,
        groups,
        heads: groups * (1 + input.below(2)),
        headdim: 1 + input.below(24),
        dstate: 1 + input.below(48),
        layers: 1 + input.below(2),
        io: input.of(&dtypes),
        out: input.of(&[REPLAYSSM_DTYPE_F32, REPLAYSSM_DTYPE_BF16, REPLAYSSM_DTYPE_F16]),
        format,
        readout,
        u_dtype,
        window,
        t_max: 1 + input.below(window.min(8)),
        keep: input.of(&[0, 0, 1, 3, 6]),
        schedule: input.of(&[REPLAYSSM_SCHEDULE_STAGGERED, REPLAYSSM_SCHEDULE_BY_POSITION, REPLAYSSM_SCHEDULE_NONE]),
        slots: SLOTS,
        rings: RINGS,
        softplus,
        gate_kind,
        // A processed dt or log decay takes no bias: it would become negative, or above 0, and the state would grow.
        bias: raw && input.below(2) == 0,
        skip: if is_delta { Skip::None } else { input.of(&[Skip::None, Skip::PerHead, Skip::PerElement]) },
        gate: !is_delta && input.below(2) == 0,
        dt_dtype: input.of(&[REPLAYSSM_DTYPE_F32, REPLAYSSM_DTYPE_BF16, REPLAYSSM_DTYPE_F16]),
        param_dtype: input.of(&[0, REPLAYSSM_DTYPE_F32, REPLAYSSM_DTYPE_BF16, REPLAYSSM_DTYPE_F16]),
        stochastic: matches!(format, REPLAYSSM_FORMAT_BF16 | REPLAYSSM_FORMAT_F16) && input.below(2) == 0,
        l2norm: !is_delta || input.below(2) == 0,
        beta_processed: is_delta && input.below(2) == 0,
        head_map: if is_delta { input.of(&[REPLAYSSM_HEAD_MAP_GROUPED, REPLAYSSM_HEAD_MAP_TILED]) } else { 0 },
        scale: if is_delta { input.of(&[0.0, 0.5]) } else { 0.0 },
        threads: 1,
        parts: input.of(&[1, 1, 3]),
        ids: input.of(&[REPLAYSSM_DTYPE_I64, REPLAYSSM_DTYPE_I32]),
        contiguous: input.below(2) == 0,
        checks: input.below(4) == 1,
        seed: input.byte().into(),
    }
}

#[derive(Clone, Default)]
struct Request {
    log: Vec<Vec<Token>>,
    /// State at each position, as `extend` leaves it token by token; of lossless formats.
    states: Vec<Vec<u32>>,
    /// Tokens of steps that can be taken back at least, were min_rewind as many.
    since: usize,
}

struct Run {
    rig: Rig,
    judge: Judge,
    rng: Rng,
    requests: Vec<Request>,
    packed: bool,
    zero: Vec<u32>,
}

fn ring(request: usize) -> usize {
    // Not the slots' numbers.
    (request * 2 + 1) % RINGS
}

impl Run {
    fn new(spec: Spec, packed: bool) -> Self {
        let zero = vec![0; spec.heads * spec.headdim * spec.dstate];
        let empty = Request { states: vec![zero.clone()], ..Request::default() };
        let rng = Rng(spec.seed ^ 0xF0);
        Run { judge: Judge::new(&spec), rig: Rig::new(spec), rng, requests: vec![empty; REQUESTS], packed, zero }
    }

    fn lossless(&self) -> bool {
        is_lossless(&self.rig.spec)
    }

    fn stored(&self, i: usize) -> Stored {
        self.judge.stored(&self.rig, i, ring(i))
    }

    /// The oldest position that all layers of a request hold: a step that was given up has folded some of them.
    fn held(&self, i: usize) -> usize {
        let tags = (0..self.rig.spec.layers).flat_map(|layer| self.rig.tags(layer, i));
        tags.max().expect("a tile") as usize
    }

    fn moved(&mut self, i: usize, before: &Stored, log: &[Vec<Token>]) -> Stored {
        self.judge.moved(&self.rig, i, ring(i), before, log)
    }

    /// The state of a request at a position that it holds.
    fn state(&self, i: usize, at: usize) -> Vec<u32> {
        let state = self.judge.recurrence(&self.stored(i), &self.requests[i].log, at).1;
        assert!(!self.lossless() || state == self.requests[i].states[at], "the state at {at} is not extend's");
        state
    }

    /// Takes in tokens that are committed.
    fn accept(&mut self, i: usize, tokens: &[Vec<Token>]) {
        for token in tokens {
            let request = &self.requests[i];
            if self.lossless() {
                let at = Stored { tag: 0, state: request.states[request.log.len()].clone() };
                let state = self.judge.recurrence(&at, std::slice::from_ref(token), 1).1;
                self.requests[i].states.push(state);
            }
            self.requests[i].log.push(token.clone());
        }
    }

    fn truncate(&mut self, i: usize, to: usize) {
        self.requests[i].log.truncate(to);
        self.requests[i].states.truncate(to + 1);
        self.requests[i].since = 0;
    }

    /// A request whose checkpoint has just been imported.
    fn rewritten(&mut self, i: usize, state: &[u32]) {
        let at = self.requests[i].log.len();
        let stored = self.stored(i);
        assert_eq!(stored.tag, at, "the checkpoint's position");
        assert!(stored.state == Judge::imported(&self.rig.spec, state), "the state at {at}, as it is stored");
        self.requests[i].since = 0;
    }

    /// Checkpoints that a step has moved over committed tokens. The next may move them again, and round them again.
    fn folded(&mut self, before: &mut [Stored]) {
        for (i, before) in before.iter_mut().enumerate() {
            let log = self.requests[i].log.clone();
            *before = self.moved(i, before, &log);
        }
    }

    /// Rows of all requests: of one length, or each of its own.
    fn rows(&mut self, input: &mut Source, most: usize) -> Vec<Row> {
        let same = 1 + input.below(most);
        let flush = input.byte();
        (0..REQUESTS)
            .map(|i| {
                let n = if self.packed { input.below(most + 1) } else { same };
                let tokens = self.rig.tokens(&mut self.rng, n);
                Row { slot: i as i64, ring: ring(i) as i64, tokens, flush: flush >> i & 0x11 == 0x11 }
            })
            .collect()
    }

    fn faults(&self) -> u32 {
        self.rig.faults(true).bits
    }

    fn step(&mut self, input: &mut Source) {
        let how = input.byte();
        let mut before: Vec<_> = (0..REQUESTS).map(|i| self.stored(i)).collect();
        let most = self.rig.spec.t_max;
        if how & 3 == 3 {
            // Abandoned, perhaps between layers.
            let rows = self.rows(input, most);
            let last = if how & 4 == 0 { self.judge.layer } else { 0 };
            (0..=last).for_each(|layer| drop(self.rig.layer(layer, &rows, false, 0)));
            self.folded(&mut before);
        }
        let rows = self.rows(input, most);
        if how & 8 != 0 {
            self.rig.step(&rows);
            self.folded(&mut before);
        }
        let outputs = self.rig.step(&rows);
        for i in 0..REQUESTS {
            let log: Vec<_> = self.requests[i].log.iter().chain(&rows[i].tokens).cloned().collect();
            let now = self.moved(i, &before[i], &log);
            self.judge.check_outputs(&self.rig, &now, &log, &outputs[i]);
        }
        if how & 0x30 == 0x30 {
            return;
        }
        let counts: Vec<i32> = rows
            .iter()
            .map(|row| match input.byte() {
                255 => i32::MAX,
                254 => i32::MIN,
                n => i32::from(n) % (row.tokens.len() as i32 + 1),
            })
            .collect();
        self.rig.commit(&rows, &counts);
        let clamped = |row: &Row, n: i32| n.clamp(0, row.tokens.len() as i32) as usize;
        let wrong = rows.iter().zip(&counts).any(|(row, &n)| !row.tokens.is_empty() && clamped(row, n) as i32 != n);
        assert_eq!(self.faults(), if wrong { REPLAYSSM_FAULT_COUNT } else { 0 });
        for (i, (row, &n)) in rows.iter().zip(&counts).enumerate() {
            self.accept(i, &row.tokens[..clamped(row, n)]);
            self.requests[i].since += clamped(row, n);
        }
        if how & 0xC0 == 0xC0 {
            self.snapshot(input, &rows, &counts);
        }
    }

    /// Behind a commit: one row leaves a state on the shelf, which another request starts from.
    fn snapshot(&mut self, input: &mut Source, rows: &[Row], counts: &[i32]) {
        let i = input.below(REQUESTS);
        let added = counts[i].clamp(0, rows[i].tokens.len() as i32) as usize;
        if added == 0 {
            return;
        }
        let at = self.requests[i].log.len() - input.below(added);
        let state = self.state(i, at);
        let mut ats = [-1; REQUESTS];
        ats[i] = at as i64;
        self.rig.snapshot(rows, false, None, &ats, &[SHELF as i64; REQUESTS]);
        self.load(input, i, at, &state);
    }

    fn extend(&mut self, input: &mut Source) {
        let before: Vec<_> = (0..REQUESTS).map(|i| self.stored(i)).collect();
        let rows = self.rows(input, 12);
        let tail = if self.rig.spec.parts > 1 { 0 } else { input.below(self.rig.spec.window + 1) };
        let outputs = self.rig.extend(&rows, tail as i32);
        for i in 0..REQUESTS {
            let log: Vec<_> = self.requests[i].log.iter().chain(&rows[i].tokens).cloned().collect();
            let now = self.moved(i, &before[i], &log);
            let (mut recurrence, _) = self.judge.recurrence(&before[i], &log, now.tag);
            recurrence.extend(self.judge.recurrence(&now, &log, log.len()).0);
            let first = recurrence.len() - outputs[i].len();
            assert!(outputs[i][..] == recurrence[first..], "extend's outputs are not the recurrence's");
            self.accept(i, &rows[i].tokens);
            if !rows[i].tokens.is_empty() {
                self.requests[i].since = 0;
            }
        }
    }

    fn rewind(&mut self, input: &mut Source) {
        let (i, n) = (input.below(REQUESTS), input.below(14));
        let (held, length) = (self.held(i), self.requests[i].log.len());
        let must = n <= self.requests[i].since.min(self.rig.spec.keep);
        let possible = length >= n && length - n >= held;
        assert!(possible || !must, "{n} tokens of min_rewind are not held");
        assert_eq!(self.rig.rewind(i, ring(i), n as i32), possible, "a rewind of {n} to {held}");
        assert_eq!(self.faults(), if possible { 0 } else { REPLAYSSM_FAULT_REWIND });
        if possible {
            self.truncate(i, length - n);
        }
    }

    fn flush(&mut self, input: &mut Source) {
        let i = input.below(REQUESTS);
        let (before, length) = (self.stored(i), self.requests[i].log.len());
        let mut refused = false;
        match input.below(3) {
            0 => self.rig.flush(i, ring(i), None),
            1 => {
                let at = (length + 1).saturating_sub(input.below(30));
                self.rig.flush(i, ring(i), Some(at as i64));
                refused = at > length;
                self.requests[i].since = 0;
            }
            _ => self.rig.flush_later(i, ring(i), (length + input.below(60)).saturating_sub(30) as i64),
        }
        assert_eq!(self.faults(), if refused { REPLAYSSM_FAULT_POSITION } else { 0 });
        let log = self.requests[i].log.clone();
        self.moved(i, &before, &log);
    }

    fn export(&mut self, input: &mut Source) {
        let i = input.below(REQUESTS);
        let (held, length) = (self.stored(i).tag, self.requests[i].log.len());
        let at = (length + 2).saturating_sub(input.below(40));
        let got = self.rig.export(self.judge.layer, i, ring(i), Some(at as i64));
        if (held..=length).contains(&at) {
            assert!(got == self.state(i, at), "the export at {at}");
            assert_eq!(self.faults(), 0);
        } else {
            assert!(got.iter().all(|&bits| bits == 0x7FC0_1234), "an export at a position that is not held");
            assert_eq!(self.faults(), REPLAYSSM_FAULT_POSITION);
        }
    }

    /// A request goes on from what lies on the shelf: the state of request `from` at a position.
    fn load(&mut self, input: &mut Source, from: usize, at: usize, state: &[u32]) {
        let to = input.below(REQUESTS);
        // A 16-bit state is rounded when it is put there, by the seed of the ring that it came from; loading does not round again.
        let rounded = self.judge.rounded(&self.rig, ring(from), at, state);
        let shelf = (SHELF, 99);
        if self.lossless() {
            assert!(self.rig.stored(self.judge.layer, SHELF) == state, "what lies on the shelf");
        }
        self.rig.copy(REPLAYSSM_COPY_LOAD, shelf, (to, ring(to)), Some(at as i64));
        let mut request = self.requests[from].clone();
        request.log.truncate(at);
        request.states.truncate(at + 1);
        request.since = 0;
        self.requests[to] = request;
        let stored = self.stored(to);
        assert_eq!(stored.tag, at);
        assert!(stored.state == rounded, "the state that was loaded at {at}");
    }

    fn store(&mut self, input: &mut Source) {
        let i = input.below(REQUESTS);
        let (held, length) = (self.held(i), self.requests[i].log.len());
        let at = held + input.below(length - held + 1);
        let state = self.state(i, at);
        self.rig.copy(REPLAYSSM_COPY_STORE, (i, ring(i)), (SHELF, 99), Some(at as i64));
        self.load(input, i, at, &state);
    }

    fn copy(&mut self, input: &mut Source) {
        let (from, to) = (input.below(REQUESTS), input.below(REQUESTS));
        if from == to {
            return;
        }
        let before = [self.stored(from), self.stored(to)];
        let kind = input.of(&[REPLAYSSM_COPY_FORK, REPLAYSSM_COPY_MOVE, REPLAYSSM_COPY_SWAP]);
        self.rig.copy(kind, (from, ring(from)), (to, ring(to)), None);
        if kind == REPLAYSSM_COPY_SWAP {
            self.requests.swap(from, to);
            let now = self.stored(from);
            assert!((now.tag, &now.state) == (before[1].tag, &before[1].state), "a swapped checkpoint");
        } else {
            self.requests[to] = self.requests[from].clone();
        }
        let now = self.stored(to);
        assert!((now.tag, &now.state) == (before[0].tag, &before[0].state), "a copied checkpoint");
        if kind == REPLAYSSM_COPY_MOVE {
            self.reset(from);
        }
    }

    fn reset(&mut self, i: usize) {
        self.rig.reset(i, ring(i), 0);
        self.requests[i] = Request { states: vec![self.zero.clone()], ..Request::default() };
    }

    fn save(&mut self, input: &mut Source) {
        let (from, to) = (input.below(REQUESTS), input.below(REQUESTS));
        let kind = input.of(&[REPLAYSSM_SAVE_LIVE, REPLAYSSM_SAVE_PORTABLE]);
        let before = self.stored(from);
        let state = self.state(from, self.requests[from].log.len());
        let blob = self.rig.save(kind, from, ring(from));
        assert_eq!(self.rig.restore(to, ring(to), &blob), REPLAYSSM_OK, "{}", message());
        self.requests[to] = self.requests[from].clone();
        if kind == REPLAYSSM_SAVE_LIVE {
            let now = self.stored(to);
            assert!((now.tag, &now.state) == (before.tag, &before.state), "a restored checkpoint");
        } else {
            self.rewritten(to, &state);
        }
    }

    /// The state at its position, from outside.
    fn import(&mut self, input: &mut Source) {
        let i = input.below(REQUESTS);
        let length = self.requests[i].log.len();
        let state = self.state(i, length);
        let position = (input.below(2) == 0).then_some(length as i64);
        for layer in 0..self.rig.spec.layers {
            let of_layer = self.rig.export(layer, i, ring(i), None);
            self.rig.import(layer, i, ring(i), None, &of_layer);
        }
        if position.is_some() {
            self.rig.import(self.judge.layer, i, ring(i), position, &state);
        }
        self.rewritten(i, &state);
    }

    fn check(&mut self) {
        for i in 0..REQUESTS {
            let length = self.requests[i].log.len();
            let got = self.rig.export(self.judge.layer, i, ring(i), None);
            assert!(got == self.state(i, length), "the state at {length}");
            assert_eq!(self.rig.cursor(ring(i)).position, length as i64);
        }
        assert_eq!(self.faults(), 0);
    }

    /// Every token's roundings, 2^-20 of the state's and its own size together, for sums of up to 48 products in fp32; decays and keys of
    /// length 1 make no error larger. A token is at most the states before and after it.
    fn check_fp64(&self, request: &Request) {
        let mut oracle = Oracle::new(&self.rig.spec, &self.rig.params[self.judge.layer]);
        let norm = |v: &[f64]| v.iter().map(|x| x * x).sum::<f64>().sqrt();
        let mut largest = 0f64;
        for token in &request.log {
            oracle.token(&token[self.judge.layer]);
            largest = largest.max(norm(&oracle.state));
        }
        let got = request.states.last().expect("the first state");
        let error: Vec<f64> =
            got.iter().zip(&oracle.state).map(|(&s, truth)| f64::from(f32::from_bits(s)) - truth).collect();
        let allowed = request.log.len() as f64 * 2f64.powi(-19) * largest;
        assert!(norm(&error) <= allowed, "{:.2e} from fp64, allowed {allowed:.2e}", norm(&error));
    }
}

/// One input.
pub fn run(data: &[u8]) {
    let mut input = Source::new(data);
    let spec = spec_of(&mut input);
    let packed = input.below(2) == 1;
    // What a failure is about, where an input is run again.
    if !std::env::args().any(|argument| argument.starts_with("-max_total_time")) {
        println!("{spec:?}");
    }
    let mut run = Run::new(spec, packed);
    for _ in 0..MOST_OPERATIONS {
        if input.is_empty() {
            break;
        }
        match input.below(16) {
            0..=5 => run.step(&mut input),
            6 => run.extend(&mut input),
            7 | 8 => run.rewind(&mut input),
            9 => run.flush(&mut input),
            10 => run.export(&mut input),
            11 => run.store(&mut input),
            12 => run.copy(&mut input),
            13 => run.save(&mut input),
            14 => run.import(&mut input),
            _ => {
                let i = input.below(REQUESTS);
                run.reset(i);
            }
        }
        run.check();
    }
    if run.lossless() {
        run.requests.iter().for_each(|request| run.check_fp64(request));
    }
}
