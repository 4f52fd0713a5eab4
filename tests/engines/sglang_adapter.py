# SPDX-License-Identifier: MIT OR Apache-2.0
"""SGLang's calls (examples-cpp/adapters/pytorch/replayssm_sglang.py) against plain recurrences in fp64.

    python3 tests/engines/sglang_adapter.py LIBRARY            on the processor, without PyTorch
    python3 tests/engines/sglang_adapter.py LIBRARY --torch    on the processor, with PyTorch's tensors
    python3 tests/engines/sglang_adapter.py LIBRARY --cuda     on a GPU, with PyTorch, and model steps in a CUDA graph
    ... --break NAME                                           a call is made wrongly: it must fail. rings, accepted, flush, bound, null, track

Requests run in slots and rings whose ids differ, verify drafts of which some stay, decode, are folded by force, leave their states at every eighth token, and are
taken up again from there.
Bounds are those of pytorch_adapter.py: fp32 inputs and states, some 60 tokens with decays below 1, outputs and states at most 1e-5 from fp64.
"""

import math
import random
import sys

sys.dont_write_bytecode = True

import pytorch_adapter as plain  # noqa: E402, puts the folder of the others on the path

import replayssm_sglang as sglang  # noqa: E402
import replayssm_torch as replay  # noqa: E402

BOUND, NAN = plain.BOUND, plain.NAN
BREAKS = ("rings", "accepted", "flush", "bound", "null", "track")
LOWER = -5.0
EVERY = 8
WIDTH = 3


class Host(plain.Host):
    """With the arithmetic of tensors that is asked for."""

    def combine(self, other, take):
        numbers = other.values() if isinstance(other, Host) else [other] * len(self.data)
        return Host(self.shape, [take(a, b) for a, b in zip(self.values(), numbers)], "int64")

    def __add__(self, other):
        return self.combine(other, lambda a, b: a + b)

    def __sub__(self, other):
        return self.combine(other, lambda a, b: a - b)

    def __mul__(self, other):
        return self.combine(other, lambda a, b: a * b)

    def __ge__(self, other):
        return self.combine(other, lambda a, b: a >= b)

    def __gt__(self, other):
        return self.combine(other, lambda a, b: a > b)

    def __ne__(self, other):
        return self.combine(other, lambda a, b: a != b)

    def long(self):
        return Host(self.shape, self.values(), "int64")

    def byte(self):
        return Host(self.shape, self.values(), "uint8")

    def new_empty(self, shape):
        return Host(shape, [NAN] * math.prod(shape))


def torch_on(device):
    import torch

    def make(shape, values, dtype="float32"):
        return torch.tensor(list(values), dtype=getattr(torch, dtype)).reshape(tuple(shape)).to(device)

    return make


def numbers(tensor):
    return tensor.values() if isinstance(tensor, Host) else tensor.flatten().tolist()


class Window:
    """A convolution of one request: the last inputs of each channel."""

    def __init__(self, channels, weight):
        self.channels, self.weight = channels, weight
        self.held = [[0.0] * (WIDTH - 1) for _ in range(channels)]

    def step(self, x):
        out = []
        for c in range(self.channels):
            taps = self.held[c] + [x[c]]
            self.held[c] = taps[1:]
            out.append(plain.silu(sum(w * e for w, e in zip(self.weight[WIDTH * c :], taps))))
        return out

    def clone(self):
        other = Window(self.channels, self.weight)
        other.held = [list(taps) for taps in self.held]
        return other


class Engine:
    """One pool of layers and one of convolutions, called as SGLang calls its own, and requests in fp64 beside them."""

    SLOTS, RINGS, TOKENS = 16, 6, 4

    def __init__(self, family, tensor, device, path, null, broken):
        self.draw, self.family, self.tensor, self.null, self.broken = random.Random(17), family, tensor, null, broken
        draw = self.draw
        self.slots = replay.Slots(self.SLOTS, 9, self.TOKENS, self.RINGS, device=device, n_threads=0 if device is not None else 1, path=path)
        if family == "mamba2":
            dims = heads, dim, width, groups = 4, 16, 32, 2
            pool = replay.Mamba2Layers(self.slots, 1, *dims, io="float32", fmt="f32")
            A, D, bias = ([make() for _ in range(heads)] for make in (lambda: -draw.uniform(1, 16), lambda: draw.gauss(0, 1), lambda: draw.gauss(-3, 1)))
            self.fresh = lambda: plain.Mamba2Row(dims, (A, D, bias))
            self.widths = {"x": (heads, dim), "B": (groups, width), "C": (groups, width), "dt": (heads,), "z": (heads, dim)}
            self.out, self.shape = (heads, dim), (heads, dim, width)
            # As SGLang has them: expanded over channels and columns.
            self.A, self.D, self.bias = expand(tensor((heads,), A), dim, width), expand(tensor((heads,), D), dim), expand(tensor((heads,), bias), dim)
        else:
            dims = H, HV, K, V = 2, 4, 32, 16
            pool = replay.DeltaLayers(self.slots, 1, *dims, kind=family, io="float32", fmt="f32")
            width = K if family == "kda" else 1
            self.bound = LOWER if family == "kda" else None
            A_log = [math.log(draw.uniform(1, 16)) for _ in range(HV)]
            bias = [draw.gauss(-4, 1) for _ in range(HV * width)]
            self.fresh = lambda: plain.DeltaRow(dims, (A_log, bias), family == "kda", self.bound)
            gates = (HV, K) if family == "kda" else (HV,)
            self.widths = {"q": (H, K), "k": (H, K), "v": (HV, V), "g": gates, "beta": (HV,)}
            self.out, self.shape = (HV, V), (HV, V, K)
            self.A_log, self.bias = tensor((1, 1, HV, 1), A_log), tensor((HV * width,), bias)
        self.channels = 24
        self.weight = [draw.gauss(0, 1) for _ in range(self.channels * WIDTH)]
        self.held_weight = tensor((self.channels, WIDTH), self.weight)
        self.state = sglang.State(pool, 0)
        self.conv = sglang.State(replay.Conv1dLayers(self.slots, 1, self.channels, WIDTH, io="float32"), 0)
        self.seen, self.wanted = [], []

    def request(self):
        return self.fresh(), Window(self.channels, self.weight)

    def array(self, values, dtype="int32"):
        return self.tensor((len(values),), values, dtype)

    def step(self, requests, slots, rings, tokens, force, idle=0):
        """One model step: what each request would be after each of its tokens. idle: padding behind the rows, without tokens, as in SGLang's graphs."""
        draw, n = self.draw, len(slots)
        inputs = {name: [draw.gauss(0, 1) for _ in range(n * tokens * math.prod(w))] for name, w in self.widths.items()}
        held = {name: self.tensor((n, tokens, *w) if self.family == "mamba2" else (1, n * tokens, *w), inputs[name]) for name, w in self.widths.items()}
        x = [draw.gauss(0, 1) for _ in range(n * tokens * self.channels)]
        ids, of_rings, mask = self.array(slots), self.array(rings, "int64"), None if force is None else self.array(force)
        mixed = turned(self.tensor((n, tokens, self.channels), x))
        null = -1 if self.broken == "null" else self.null
        sglang.causal_conv1d_update(mixed, self.conv, self.held_weight, None, "silu", conv_state_indices=ids, intermediate_state_indices=of_rings,
                                    pad_slot_id=null, force_flush=mask)
        size = math.prod(self.out)
        ends = self.array([tokens * i for i in range(n + 1)])
        verify = {"disable_state_update": True, "cache_steps": tokens} if tokens > 1 else {}
        if self.family == "mamba2":
            lead = (n, tokens) if tokens > 1 else (n,)
            given = {name: reshaped(tensor, (*lead, *self.widths[name])) for name, tensor in held.items()}
            out = self.tensor((*lead, *self.out), [NAN] * (n * tokens * size))
            sglang.selective_state_update(self.state, given["x"], expand(given["dt"], self.out[1]), self.A, given["B"], given["C"], self.D, given["z"], self.bias, True,
                                          ids, null, out, intermediate_state_indices=of_rings, force_flush=mask, **verify)
        elif tokens == 1:
            H, K, HV, V = *self.widths["q"], *self.widths["v"]
            wide = [e for i in range(n) for name, w in (("q", H * K), ("k", H * K), ("v", HV * V)) for e in inputs[name][i * w : (i + 1) * w]]
            packed = self.tensor((n, 2 * H * K + HV * V), wide)
            gates = reshaped(held["g"], (n, math.prod(self.widths["g"])))
            out = self.tensor((n, 1, *self.out), [NAN] * (n * size))
            sglang.fused_recurrent_linear_replayssm_decode(packed, gates, reshaped(held["beta"], (n, HV)), self.A_log, self.bias, K**-0.5, self.state, out=out,
                                                           ssm_state_indices=ids, force_flush=mask, use_qk_l2norm_in_kernel=True, is_kda=self.family == "kda",
                                                           ring_indices=of_rings, lower_bound=self.lower(), null_block_id=null)
        else:
            ids, of_rings = self.array(slots + [self.null] * idle), self.array(rings + [0] * idle, "int64")
            ends = self.array([tokens * min(i, n) for i in range(n + idle + 1)])
            out = sglang.fused_sigmoid_gating_delta_rule_update(
                self.A_log, held["g"], self.bias, 1.0, 20.0, held["q"], held["k"], held["v"], held["beta"], self.state, ids, None, True, ends, self.family == "kda",
                intermediate_state_indices=of_rings, lower_bound=self.lower(), force_flush=mask, null_block_id=null, **verify)
        answers, convolved, states = numbers(out), numbers(mixed), []
        for row, request in enumerate(requests):
            mine = slice(row * tokens * size, (row + 1) * tokens * size)
            if request is None:
                assert not any(answers[mine]), f"{self.family}: padding's outputs are not zero"
                states.append(None)
                continue
            model, window = plain.clone(request[0]), request[1].clone()
            behind = [(plain.clone(model), window.clone())]
            for t in range(tokens):
                at = row * tokens + t
                take = {name: v[at * math.prod(self.widths[name]) : (at + 1) * math.prod(self.widths[name])] for name, v in inputs.items()}
                self.wanted += model.step(**take)
                self.wanted += window.step(x[at * self.channels : (at + 1) * self.channels])
                # Channels are the second axis of a convolution's output, but the last one in memory.
                self.seen += answers[at * size : (at + 1) * size] + self.columns(convolved, row, t, tokens)
                behind.append((plain.clone(model), window.clone()))
            states.append(behind)
        return ids, of_rings, ends, null, states

    def columns(self, convolved, row, t, tokens):
        if self.tensor is Host:  # in the order of memory
            return convolved[(row * tokens + t) * self.channels : (row * tokens + t + 1) * self.channels]
        return [convolved[(row * self.channels + c) * tokens + t] for c in range(self.channels)]

    def lower(self):
        return LOWER + 1 if self.bound and self.broken == "bound" else self.bound

    def load(self, source, slot, ring, position):
        sglang.copy_from(self.slots, self.array([source], "int64"), self.array([slot]), prefix_lens=self.array([position]), ring_indices=self.array([ring]))

    def saved(self, slot, ring):
        state = self.tensor((1, *self.shape), [NAN] * math.prod(self.shape))
        self.state.layers.save(0, self.array([slot]), state, rings=self.array([ring]))
        return numbers(state)


def expand(tensor, *sizes):
    """With further axes of stride 0."""
    if not isinstance(tensor, Host):
        return tensor.reshape(*tensor.shape, *[1] * len(sizes)).expand(*tensor.shape, *sizes)
    other = reshaped(tensor, (*tensor.shape, *sizes))
    strides = tensor.stride() + (0,) * len(sizes)
    other.stride = lambda: strides
    return other


def reshaped(tensor, shape):
    if not isinstance(tensor, Host):
        return tensor.reshape(shape)
    other = object.__new__(Host)
    other.shape, other.dtype, other.data = tuple(shape), tensor.dtype, tensor.data
    return other


def turned(tensor):
    """[row, channel, token] of [row, token, channel]; one token: [row, channel]."""
    rows, tokens, channels = tensor.shape
    if tokens == 1:
        return reshaped(tensor, (rows, channels))
    if not isinstance(tensor, Host):
        return tensor.transpose(1, 2)
    other = reshaped(tensor, (rows, channels, tokens))
    other.stride = lambda: (tokens * channels, 1, channels)
    return other


def flat(model):
    return [e for head in model.S for line in head for e in line]


def run(family, tensor, device, path, null, broken):
    """Rows: four requests and a row of padding between them, whose slot is null and whose ring is that of a request. null 0: slot 0 is padding too."""
    engine = Engine(family, tensor, device, path, null, broken)
    draw, name = engine.draw, f"{family}, null block {null}"
    slots, rings = [7, 3, null, 9, 1 if null == 0 else 0], [2, 0, 3, 5, 3]
    kept_in = {0: (10, 11), 1: (12, 4), 3: (13, 5), 4: (14, 6)}  # slots for snapshots, in turns
    live = [r for r in range(5) if r != 2]
    requests = [engine.request() if r in live else None for r in range(5)]
    lengths, kept, folded = [0] * 5, {}, 0
    sglang.clear_slots(engine.slots, engine.array([slots[r] for r in live]), engine.array([rings[r] for r in live]))
    for i in range(24):
        tokens = (4, 1, 4, 1, 1)[i % 5]
        force = [int(draw.random() < 0.3) for _ in range(5)] if i % 2 else None
        given = list(rings)
        if broken == "rings" and i == 6:
            given[0], given[1] = given[1], given[0]
        ids, of_rings, ends, used_null, behind = engine.step(requests, slots, given, tokens, None if broken == "flush" else force)
        # What stays, and where a multiple of EVERY is crossed, as SGLang computes it.
        counts = [draw.randint(1, tokens) for _ in range(5)]
        after = [length + count for length, count in zip(lengths, counts)]
        steps = [b // EVERY * EVERY - a - 1 if a // EVERY != b // EVERY else -1 for a, b in zip(lengths, after)]
        targets = [kept_in[r][after[r] // EVERY % 2] if r in live else 15 for r in range(5)]
        common = {"ring_indices": of_rings, "null_block_id": used_null, "cu_seqlens": ends, "num_tokens": 5 * tokens}
        if tokens == 1:
            mask = engine.array([int(step == 0) for step in steps], "uint8")
            sglang.commit_decode(engine.slots, ids, mask, engine.array(targets, "int64"), seq_lens=engine.array(after, "int64"), **common)
        else:
            wrong = [count + (broken == "accepted" and r == 1 and count < tokens) for r, count in enumerate(counts)]
            tracked = engine.array([step - 1 if step > 0 and broken == "track" else step for step in steps], "int64")
            where = {"seq_lens": engine.array(lengths), "cache_steps": tokens, **common}
            if i % 2:
                sglang.commit_replayssm_after_verify(engine.slots, ids, where.pop("ring_indices"), engine.array(wrong), None, engine.array(targets, "int64"), tracked,
                                                     where.pop("null_block_id"), **where)
            else:
                last = engine.array([count - 1 for count in wrong], "int64")
                sglang.update_mamba_state_after_mtp_verify(engine.slots, last, engine.array(targets, "int64"), tracked, state_batch_indices=ids, **where)
        for r in live:
            if steps[r] >= 0:
                kept[targets[r]] = (after[r] // EVERY * EVERY, behind[r][steps[r] + 1])
            requests[r] = behind[r][counts[r]]
        before, lengths = lengths, after
        # A fold by force leaves the state in front of the step where it lies. A look at it costs the request its history: it goes on from a copy.
        for r in live:
            if force and force[r] and i % 6 == 5:
                spare = engine.array([8]), engine.array([4])
                engine.slots.copy(engine.array([slots[r]]), spare[0], source_rings=engine.array([rings[r]]), target_rings=spare[1])
                engine.slots.reset(*spare, position=engine.array([before[r]], "int64"), keep_checkpoint=True)
                off = plain.relative(engine.saved(8, 4), flat(behind[r][0][0]))
                assert off < BOUND, f"{name}: a fold by force has left a state that is off by {off:.1e}, expected {BOUND}"
                folded += 1
    error = plain.relative(engine.seen, engine.wanted)
    assert error < BOUND, f"{name}: outputs are off by {error:.1e}, expected {BOUND}"
    assert folded >= 3 and len(kept) >= 6, f"{folded} folds by force and {len(kept)} snapshots were looked at; expected 3 and 6"
    for r in live:
        off = plain.relative(engine.saved(slots[r], rings[r]), flat(requests[r][0]))
        assert off < BOUND, f"{name}: states are off by {off:.1e}, expected {BOUND}"
    worst = 0.0
    # Each cached prefix, in a slot and a ring of its own: the state there, then a verification and a token from it.
    for source, (position, request) in sorted(kept.items()):
        engine.load(source, 8, 4, position)
        off = plain.relative(engine.saved(8, 4), flat(request[0]))
        worst = max(worst, off)
        assert off < BOUND, f"{name}: the snapshot at {position} is off by {off:.1e}, expected {BOUND}"
        engine.seen, engine.wanted = [], []
        for tokens in (4, 1):
            ids, of_rings, ends, used_null, behind = engine.step([request], [8], [4], tokens, None, 2)
            common = {"ring_indices": of_rings, "null_block_id": used_null, "cu_seqlens": ends, "num_tokens": tokens}
            if tokens == 1:
                sglang.commit_decode(engine.slots, ids, **common)
            else:
                last = engine.array([1] * ids.shape[0])
                sglang.update_mamba_state_after_mtp_verify(engine.slots, last, None, None, state_batch_indices=ids, cache_steps=4, **common)
            request = behind[0][min(2, tokens)]
        off = plain.relative(engine.seen, engine.wanted)
        assert off < BOUND, f"{name}: outputs behind the snapshot at {position} are off by {off:.1e}, expected {BOUND}"
    assert engine.slots.check() == 0, f"{name}: faults {engine.slots.check()}"
    print(f"{name}: outputs {error:.1e}, {len(kept)} snapshots {worst:.1e}, {folded} folds by force, bound {BOUND}")


def check_refusals(tensor, device, path):
    engine = Engine("kda", tensor, device, path, -1, None)
    ids, a = engine.array([1]), tensor((1, 1, 4, 32), [0.0] * 128)
    q, v, b = tensor((1, 1, 2, 32), [1.0] * 64), tensor((1, 1, 4, 16), [1.0] * 64), tensor((1, 1, 4), [0.0] * 4)

    def update(beta=1.0, source=engine.state, gates=a, **named):
        named = {"is_kda": True, **named}
        return sglang.fused_sigmoid_gating_delta_rule_update(engine.A_log, gates, engine.bias, beta, 20.0, q, q, v, b, source, ids, **named)

    called, call = [], engine.slots.library.call
    engine.slots.library.call = lambda name, *arguments: (called.append(name), call(name, *arguments))[1]
    calls = [
        (lambda: update(2.0), "softplus_beta is 2.0; expected 1"),
        (lambda: update(source=a), "expected State(layers, layer)"),
        (lambda: update(source=engine.conv), "initial_state_source is of Conv1dLayers; expected DeltaLayers"),
        (lambda: update(gates=q), "a has the shape (1, 1, 2, 32); expected (1, 1, 4, 32)"),
        (lambda: update(is_kda=False), "is_kda is False; expected True"),
        (lambda: update(retrieve_parent_token=ids), "retrieve_parent_token is a tensor of the shape (1,); expected None"),
        (lambda: update(lower_bound=1.0), "lower_bound"),
        (lambda: sglang.causal_conv1d_update(v, engine.conv, engine.held_weight, conv_state_indices=ids), "expected (1, 24, 1), channels contiguous"),
        (lambda: sglang.causal_conv1d_update(v, engine.conv, engine.held_weight, activation="gelu"), "activation is 'gelu'; expected"),
        (lambda: sglang.update_mamba_state_after_mtp_verify(engine.slots, ids, ids, ids, state_batch_indices=ids, cache_steps=4), "seq_lens is None"),
        (lambda: sglang.update_mamba_state_after_mtp_verify(engine.slots, None, None, None, state_batch_indices=ids, cache_steps=4), "accept_lens and last_correct"),
        (lambda: sglang.commit_decode(engine.slots, ids, ids, [1], seq_lens=ids), "mamba_track_indices is [1]; expected a tensor"),
        (lambda: update(null_block_id=None), "null_block_id (pad_slot_id) is None; expected a whole number"),
        (lambda: update(gates=[0.0]), "a is [0.0]; expected a tensor"),
        (lambda: sglang.commit_decode(engine.slots, ids, ids), "mamba_track_indices is None"),
    ]
    plain.refused(calls)
    engine.slots.library.call = call
    assert "commit" not in called, "what was refused had been committed"
    print("refusals: in words")


def run_graph(path, device, capture):
    """A verification of two layers of GDN of real heads, bfloat16 in, fp32 out, with its commit and snapshots, captured once: against fp64 in PyTorch."""
    import torch

    torch.manual_seed(4)
    rows, T, H, HV, K, V, n = 8, 4, 4, 8, 128, 128, 2
    slots = replay.Slots(40, window=32, max_step_tokens=T, n_rings=16, device=0 if capture else None, path=path)
    pool = replay.DeltaLayers(slots, n, H, HV, K, V, out="float32", fmt="f32")

    def on(t):
        return t.to(device)

    A_log, bias = on(torch.rand(n, HV) * 2.7), on(torch.randn(n, HV) - 4)
    ids, rings = on(torch.tensor([9, 4, 0, 7, 2, 30, 0, 1], dtype=torch.int32)), on(torch.tensor([3, 1, 3, 0, 2, 5, 1, 4]))
    dead = ids == 0
    tracks = on(torch.arange(31, 31 + rows))
    lengths, counts = torch.zeros_like(ids), torch.zeros_like(ids)
    sglang.clear_slots(slots, ids[~dead], rings[~dead])
    shapes = {"q": (H, K), "k": (H, K), "v": (HV, V), "a": (HV,), "b": (HV,)}
    held = {name: on(torch.zeros(n, 1, rows * T, *shape, dtype=torch.bfloat16 if len(shape) == 2 else torch.float32)) for name, shape in shapes.items()}
    out = on(torch.zeros(n, 1, rows * T, HV, V))
    ends = on(torch.arange(0, rows * T + 1, T, dtype=torch.int32))
    steps = torch.zeros_like(rings)

    def model_step():
        for i in range(n):
            sglang.fused_sigmoid_gating_delta_rule_update(
                A_log[i], held["a"][i], bias[i], 1.0, 20.0, held["q"][i], held["k"][i], held["v"][i], held["b"][i], sglang.State(pool, i), ids,
                use_qk_l2norm_in_kernel=True, cu_seqlens=ends, intermediate_state_indices=rings, cache_steps=T, null_block_id=0, out=out[i])
        sglang.update_mamba_state_after_mtp_verify(slots, counts.long() - 1, tracks, steps, state_batch_indices=ids, ring_indices=rings, null_block_id=0, cache_steps=T,
                                                   seq_lens=lengths, cu_seqlens=ends)

    play = model_step
    if capture:
        # PyTorch's own kernels are loaded by a step in front.
        counts.fill_(1)
        model_step()
        sglang.clear_slots(slots, ids[~dead], rings[~dead])
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            model_step()
        play = graph.replay
    S = on(torch.zeros(n, rows, HV, V, K, dtype=torch.float64))
    seen, wanted, kept = [], [], {}
    for turn in range(24):
        for tensor in held.values():
            tensor.copy_(torch.randn(tensor.shape))
        counts.copy_(on((torch.arange(rows) + turn) % T + 1))
        after = lengths + counts
        crossed = after // EVERY != lengths // EVERY
        steps.copy_(torch.where(crossed, after // EVERY * EVERY - lengths - 1, -1))
        play()
        x = {name: t.view(n, rows, T, *shapes[name]).double() for name, t in held.items()}
        now = S
        for t in range(T):
            q, k = (x[name][:, :, t].repeat_interleave(HV // H, dim=2) for name in "qk")
            q, k = (e / (e.square().sum(-1, keepdim=True) + 1e-6).sqrt() for e in (q, k))
            g = -torch.exp(A_log[:, None].double()) * torch.nn.functional.softplus(x["a"][:, :, t] + bias[:, None].double())
            now = now * torch.exp(g)[..., None, None]
            u = torch.sigmoid(x["b"][:, :, t])[..., None] * (x["v"][:, :, t] - (now * k[..., None, :]).sum(-1))
            now = now + u[..., None] * k[..., None, :]
            wanted.append((now * q[..., None, :]).sum(-1) * K**-0.5)
            seen.append(out.view(n, rows, T, HV, V)[:, :, t].clone())
            S = torch.where((counts == t + 1).view(1, -1, 1, 1, 1), now, S)
            for row in (steps == t).nonzero().flatten().tolist():
                if not dead[row]:
                    kept[row] = (int(after[row]) // EVERY * EVERY, now[:, row])
        lengths.add_(counts)
    seen, wanted = torch.stack(seen).double(), torch.stack(wanted)
    assert not seen[:, :, dead].any(), "padding's outputs are not zero"
    wanted[:, :, dead] = 0
    error = float((seen - wanted).norm() / wanted.norm())
    assert error < BOUND, f"a graph of verifications: outputs are off by {error:.1e}, expected {BOUND}"
    worst = 0.0
    for row, (position, states) in kept.items():
        spare, ring = on(torch.tensor([39])), on(torch.tensor([15]))
        sglang.copy_from(slots, tracks[row : row + 1], spare, prefix_lens=on(torch.tensor([position])), ring_indices=ring)
        for i in range(n):
            state = on(torch.zeros(1, HV, V, K))
            pool.save(i, spare, state, rings=ring)
            worst = max(worst, float((state[0].double() - states[i]).norm() / states[i].norm()))
    assert len(kept) == rows - 2 and worst < BOUND, f"a graph of verifications: {len(kept)} snapshots are off by {worst:.1e}, expected {rows - 2} and {BOUND}"
    assert slots.check() == 0, f"faults {slots.check()}"
    print(f"a graph of verifications of {T} tokens: outputs {error:.1e}, {len(kept)} snapshots {worst:.1e}, bound {BOUND}")


def main():
    usage = f"usage: {sys.argv[0]} LIBRARY [--torch | --cuda] [--break {'|'.join(BREAKS)}]"
    words, broken = sys.argv[1:], None
    if "--break" in words[:-1]:
        at = words.index("--break")
        broken = words[at + 1]
        del words[at : at + 2]
    if not words or not {"--torch", "--cuda"} >= set(words[1:]) or broken not in (None, *BREAKS):
        sys.exit(usage)
    path, cuda, cpu = words[0], "--cuda" in words, "--torch" in words
    tensor, device = (torch_on("cuda" if cuda else "cpu") if cuda or cpu else Host), 0 if cuda else None
    check_refusals(tensor, device, path)
    for family in ("kda",) if broken == "bound" else ("mamba2", "gdn", "kda"):
        for null in (-1, 0):
            run(family, tensor, device, path, null, broken)
    if cuda or cpu:
        run_graph(path, "cuda" if cuda else "cpu", cuda)
    print("sglang adapter: ok")


main()
