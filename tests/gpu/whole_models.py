#!/usr/bin/env python3
# SPDX-License-Identifier: MIT OR Apache-2.0
"""Decode steps of whole hybrid models, random weights, with the plain update and with replay: milliseconds of a step, as CUDA graphs.

    python3 tests/gpu/whole_models.py libreplayssm.so [--quick] [--json FILE] [--models WORDS] [--batches 1,32] [--tokens 1,4] [--pdl]
    ... --tiny       on the processor, with small dimensions: a test of this program, its times mean nothing
    ... --break      one commit is left out: the check of outputs must fail

Needs a GPU and PyTorch, and for the default some 130 GB of device memory; what does not fit is left out and said. Takes some three minutes on an H200, --quick one.

Models have the published dimensions of Nemotron-3-Nano-4B (42 blocks: 21 Mamba-2, 17 MLPs, 4 attentions) and of Qwen3.5-4B (32 layers: 24 GDN, 8 attentions, an
MLP in each). A step: embedding, norms, projections, convolution, recurrent update, attention over a cache of 1024 tokens, MLPs, logits of all tokens; no
sampling. Dense parts are PyTorch's own kernels, one by one, the same ones in all variants, convolutions are the library's. At several tokens a row, these do not
mask each other in the attention, which costs the same.

Plain: the library's plain update (extend), which reads and writes each state in each step. For several tokens it is a lower bound of what engines do: they keep a
state per token, to be able to go back, and it writes one. Triton: a plain update of one token a row in Triton, the fastest of six launches, in the place of the
library's. Replay: at 4 tokens 2, 3, 4, 3 in turns are taken, by counts in device memory. Windows are 16 (one token) and 32; a round has whole windows of steps,
folds are staggered; variants take turns, and of three rounds the median counts.

The check, in front of each measurement: from empty states, recurrent layers get the same random inputs and all tokens are taken. Their outputs, bfloat16, may
round to the neighbour, 2^-7 at most, where the fp32 numbers behind them differ in their last bits; a readout or a state of eight bits may do as much once more:
2^-6. The logits of fp32 states differ as those of two bfloat16 computations do: some ten roundings of 2^-9 a block, sqrt(10 blocks) 2^-9 of their norm, of which
twice as much is allowed.
"""

import argparse
import json
import math
import os
import statistics
import sys
import time

import torch
import torch.nn.functional as F

ROOT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..")
sys.path.insert(0, os.path.join(ROOT, "examples-cpp", "adapters", "pytorch"))
sys.dont_write_bytecode = True

import replayssm_torch as replay  # noqa: E402

BF16 = torch.bfloat16
NEIGHBOUR = 2**-7
CHECKED = 5
OUT_OF_MEMORY = 40

MODELS = {
    "Nemotron-3-Nano-4B": dict(
        hidden=3136, vocab=131072, tied=False, blocks="M-M-M-MM-M-M*-M-M*-M-M-M*-M-M-MM*-MMM-M-M-", mlp=12544, gated_mlp=False,
        heads=40, kv_heads=8, head_dim=128, rotated=0, gated_attention=False, mamba=(96, 80, 128, 8), cache=1024,
    ),
    "Qwen3.5-4B": dict(
        hidden=2560, vocab=248320, tied=True, blocks="G-G-G-*-" * 8, mlp=9216, gated_mlp=True,
        heads=16, kv_heads=4, head_dim=256, rotated=64, gated_attention=True, delta=(16, 32, 128, 128), cache=1024,
    ),
}
TINY = {
    "tiny Nemotron-H": dict(
        hidden=64, vocab=101, tied=False, blocks="M-MM*-M-", mlp=96, gated_mlp=False,
        heads=4, kv_heads=2, head_dim=16, rotated=0, gated_attention=False, mamba=(4, 16, 32, 2), cache=24,
    ),
    "tiny Qwen3.5": dict(
        hidden=64, vocab=101, tied=True, blocks="G-G-G-*-", mlp=96, gated_mlp=True,
        heads=4, kv_heads=2, head_dim=16, rotated=8, gated_attention=True, delta=(2, 4, 32, 16), cache=24,
    ),
}

# name: format, readout, plain.
VARIANTS = {
    "plain F32": ("f32", "full", True),
    "F32 FULL": ("f32", "full", False),
    "SPLIT32 HIGH": ("split32", "high", False),
    "plain BF16": ("bf16", "high", True),
    "BF16 HIGH": ("bf16", "high", False),
}
TRITON = "Triton F32"
AGAINST = {"F32 FULL": "plain F32", "SPLIT32 HIGH": "plain F32", "BF16 HIGH": "plain BF16", TRITON: "plain F32"}


class Model:
    """Weights, and the dense parts of a step."""

    def __init__(self, c, batch, device):
        self.c, self.device = c, device
        self.ones = torch.ones(c["hidden"], device=device, dtype=BF16)
        self.recurrent = sum(b in "MG" for b in c["blocks"])
        if "mamba" in c:
            heads, dim, state, groups = c["mamba"]
            self.inner, self.channels = heads * dim, heads * dim + 2 * groups * state
            self.projected = self.inner + self.channels + heads
        else:
            H, HV, K, V = c["delta"]
            self.inner, self.channels = HV * V, 2 * H * K + HV * V
            self.projected = self.inner + self.channels + 2 * HV

        def weight(out, into):
            return (torch.randn(out, into, device=device, dtype=BF16) / into**0.5).contiguous()

        h, width = c["hidden"], c["heads"] * c["head_dim"]
        self.head = weight(c["vocab"], h)
        self.embedding = self.head if c["tied"] else weight(c["vocab"], h)
        self.blocks = []
        for kind in c["blocks"]:
            if kind == "-":
                ws = weight(c["mlp"] * (1 + c["gated_mlp"]), h), weight(h, c["mlp"])
            elif kind == "*":
                queries = width * (1 + c["gated_attention"])
                kv = torch.randn(2, batch, c["kv_heads"], c["cache"], c["head_dim"], device=device, dtype=BF16)
                ws = weight(queries + 2 * c["kv_heads"] * c["head_dim"], h), weight(h, width), kv
            else:
                ws = weight(self.projected, h), weight(h, self.inner), self.parameters()
            self.blocks.append((kind, *ws))
        angles = torch.arange(8, device=device)[:, None] * 1e4 ** -torch.linspace(0, 1, max(1, c["rotated"] // 2), device=device)
        self.cos, self.sin = angles.cos().to(BF16), angles.sin().to(BF16)
        self.bytes = sum(t.numel() * t.element_size() for t in {self.embedding, self.head} | {w for b in self.blocks for w in b[1:3]})
        self.kv_bytes = sum(b[3].numel() * 2 for b in self.blocks if b[0] == "*")

    def parameters(self):
        """Of a recurrent layer: decays of trained models' sizes."""
        heads = self.c["mamba"][0] if "mamba" in self.c else self.c["delta"][1]
        rate = 1 + 15 * torch.rand(heads, device=self.device)
        step = torch.exp(torch.rand(heads, device=self.device) * math.log(100) + math.log(1e-3))
        return {
            "conv": torch.randn(self.channels, 4, device=self.device, dtype=BF16) / 2,
            "conv_bias": torch.zeros(self.channels, device=self.device, dtype=BF16) if "mamba" in self.c else None,
            "A": -rate,
            "A_log": rate.log(),
            "dt_bias": step + torch.log(-torch.expm1(-step)),
            "D": torch.ones(heads, device=self.device),
        }

    def norm(self, x):
        return F.rms_norm(x, x.shape[-1:], self.ones[: x.shape[-1]], 1e-5)

    def rotate(self, x):
        """[row, token, head, head_dim], the first channels of a head."""
        n, tokens = self.c["rotated"] // 2, x.shape[1]
        cos, sin = self.cos[:tokens, None], self.sin[:tokens, None]
        a, b, rest = x[..., :n], x[..., n : 2 * n], x[..., 2 * n :]
        return torch.cat([a * cos - b * sin, b * cos + a * sin, rest], -1)

    def attention(self, x, rows, tokens, into, out, kv):
        c = self.c
        heads, of, dim = c["heads"], c["kv_heads"], c["head_dim"]
        q, k, v = F.linear(x, into).split([heads * dim * (1 + c["gated_attention"]), of * dim, of * dim], -1)
        q, k, v = q.view(rows, tokens, heads, -1), k.view(rows, tokens, of, dim), v.view(rows, tokens, of, dim)
        if c["gated_attention"]:
            q, gate = q.chunk(2, -1)
            q, k = self.norm(q), self.norm(k)
        if c["rotated"]:
            q, k = self.rotate(q), self.rotate(k)
        keys, values = kv[0, :rows], kv[1, :rows]
        keys[:, :, -tokens:].copy_(k.transpose(1, 2))
        values[:, :, -tokens:].copy_(v.transpose(1, 2))
        # Heads that share keys, and tokens, are the queries of one attention.
        q = q.reshape(rows, tokens, of, -1, dim).permute(0, 2, 3, 1, 4).reshape(rows, of, -1, dim)
        y = F.scaled_dot_product_attention(q, keys, values).view(rows, of, -1, tokens, dim).permute(0, 3, 1, 2, 4)
        y = y.reshape(rows, tokens, heads, dim)
        if c["gated_attention"]:
            y = y * torch.sigmoid(gate)
        return F.linear(y.reshape(rows, tokens, -1), out)

    def step(self, tokens, core):
        """Logits of tokens [row, token]; core: the recurrent layer i on its projected inputs."""
        x, i = F.embedding(tokens, self.embedding), 0
        for kind, into, out, *more in self.blocks:
            h = self.norm(x)
            if kind == "-":
                h = F.linear(h, into)
                if self.c["gated_mlp"]:
                    gate, h = h.chunk(2, -1)
                    h = F.silu(gate) * h
                else:
                    h = F.relu(h).square()
                x = x + F.linear(h, out)
            elif kind == "*":
                x = x + self.attention(h, *tokens.shape, into, out, more[0])
            else:
                projected = F.linear(h, into)
                y = core(i, projected, more[0])
                x = x + F.linear(self.after(y, projected), out)
                i += 1
        return F.linear(self.norm(x), self.head)

    def after(self, y, projected):
        """The norm behind a recurrent layer, y [row, token, head, channel]."""
        rows, tokens = y.shape[:2]
        if "mamba" in self.c:  # gated by the layer already; a norm per group
            return self.norm(y.view(rows, tokens, self.c["mamba"][3], -1)).view(rows, tokens, -1)
        return (self.norm(y) * F.silu(projected[..., self.channels : self.channels + self.inner].view(y.shape))).view(rows, tokens, -1)


class Recurrent:
    """The recurrent layers of a model in one variant, and what of the library is behind them."""

    def __init__(self, model, variant, rows, tokens, window, device, path, pdl):
        c, self.model = model.c, model
        fmt, readout, self.plain = VARIANTS["plain F32" if variant == TRITON else variant]
        self.slots = replay.Slots(rows, window, tokens, device=device, n_threads=0 if device is not None else 2, path=path)
        n = model.recurrent
        self.conv = replay.Conv1dLayers(self.slots, n, model.channels, 4)
        self.state = None
        if variant == TRITON:
            self.state = [torch.zeros(rows, *self.shape(c), device=model.device) for _ in range(n)]
        elif "mamba" in c:
            self.layers = replay.Mamba2Layers(self.slots, n, *c["mamba"], fmt=fmt, readout=readout)
        else:
            self.layers = replay.DeltaLayers(self.slots, n, *c["delta"], fmt=fmt, readout=readout)
        self.ids = torch.arange(rows, device=model.device, dtype=torch.int32)
        self.rows, self.tokens = rows, tokens
        self.batch = replay.Batch(self.ids, tokens=tokens, extend=self.plain)
        self.pdl = {"pdl": True, "prefetch": True} if pdl else {}
        # How many tokens of each row are taken, [turn, row].
        self.turn = torch.zeros(1, device=model.device, dtype=torch.int64)
        self.counts = torch.zeros(1, rows, device=model.device, dtype=torch.int32)
        self.table = None
        if tokens == 4:
            turns = torch.tensor([2, 3, 4, 3], device=model.device, dtype=torch.int32)
            self.table = turns[(torch.arange(4, device=model.device)[:, None] + self.ids) % 4].contiguous()
        self.reset()

    @staticmethod
    def shape(c):
        if "mamba" in c:
            return c["mamba"][:3]
        _, HV, K, V = c["delta"]
        return HV, V, K

    def reset(self):
        self.slots.reset(self.ids)
        for state in self.state or []:
            state.zero_()

    def core(self, i, projected, p):
        m, c, lead = self.model, self.model.c, (self.rows, self.tokens)
        z_first = "mamba" in c  # z | x B C | dt, and q k v | z | b a
        mixed = projected[..., m.inner : m.inner + m.channels] if z_first else projected[..., : m.channels]
        x = torch.empty(*lead, 1, m.channels, device=projected.device, dtype=BF16)
        self.conv.step(i, self.batch, mixed.unsqueeze(2), x, p["conv"], p["conv_bias"], **self.pdl)
        x = x.view(*lead, m.channels)
        if z_first:
            heads, dim, state, groups = c["mamba"]
            z, dt = projected[..., : m.inner].unflatten(-1, (heads, dim)), projected[..., m.inner + m.channels :]
            x, B, C = x.split([m.inner, groups * state, groups * state], -1)
            x, B, C = x.unflatten(-1, (heads, dim)), B.unflatten(-1, (groups, state)), C.unflatten(-1, (groups, state))
            out = torch.empty(*lead, heads, dim, device=x.device, dtype=BF16)
            if self.state:
                triton_mamba2(self.state[i], x, B, C, dt, p, z, out)
            else:
                self.layers.step(i, self.batch, x, B, C, dt, p["A"], D=p["D"], dt_bias=p["dt_bias"], z=z, out=out, **self.pdl)
            return out
        H, HV, K, V = c["delta"]
        q, k, v = x.split([H * K, H * K, HV * V], -1)
        q, k, v = q.unflatten(-1, (H, K)), k.unflatten(-1, (H, K)), v.unflatten(-1, (HV, V))
        b, a = projected[..., m.channels + m.inner :].split([HV, HV], -1)
        out = torch.empty(*lead, HV, V, device=x.device, dtype=BF16)
        if self.state:
            triton_gdn(self.state[i], q, k, v, a, b, p, out)
        else:
            self.layers.step(i, self.batch, q, k, v, a, b, p["A_log"], p["dt_bias"], out, **self.pdl)
        return out

    def commit(self, all_of_them=False):
        if self.plain or self.table is None or all_of_them:
            self.slots.commit(self.batch)
            return
        torch.index_select(self.table, 0, self.turn, out=self.counts)
        self.turn.add_(1).remainder_(4)
        self.slots.commit(self.batch, self.counts[0])

    def alone(self, projected):
        """Recurrent layers and convolutions of a step, nothing else, all on the same inputs."""
        layers = [b[3] for b in self.model.blocks if b[0] in "MG"]
        for i, p in enumerate(layers):
            self.core(i, projected, p)
        self.commit()


def triton_kernels():
    import triton
    import triton.language as tl

    @triton.jit
    def mamba2(S, x, B, C, dt, A, D, bias, z, out, heads, per_group, x_row, B_row, C_row, dt_row, z_row, DIM: tl.constexpr, N: tl.constexpr, BLOCK: tl.constexpr):
        row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
        i, n = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, N)
        live = i < DIM
        at = S + ((row * heads + head) * DIM + i)[:, None] * N + n[None, :]
        s = tl.load(at, mask=live[:, None], other=0.0)
        b = tl.load(B + row * B_row + (head // per_group) * N + n).to(tl.float32)
        c = tl.load(C + row * C_row + (head // per_group) * N + n).to(tl.float32)
        v = tl.load(x + row * x_row + head * DIM + i, mask=live, other=0.0).to(tl.float32)
        gate = tl.load(z + row * z_row + head * DIM + i, mask=live, other=0.0).to(tl.float32)
        step = tl.load(dt + row * dt_row + head).to(tl.float32) + tl.load(bias + head)
        step = tl.where(step > 20.0, step, tl.log(1.0 + tl.exp(step)))
        s = s * tl.exp(tl.load(A + head) * step) + (v * step)[:, None] * b[None, :]
        tl.store(at, s, mask=live[:, None])
        y = tl.sum(s * c[None, :], 1) + tl.load(D + head) * v
        y = y * gate / (1.0 + tl.exp(-gate))
        tl.store(out + (row * heads + head) * DIM + i, y.to(out.dtype.element_ty), mask=live)

    @triton.jit
    def gdn(S, q, k, v, a, b, A_log, bias, out, HV, share, q_row, v_row, a_row, b_row, scale, V: tl.constexpr, K: tl.constexpr, BLOCK: tl.constexpr):
        row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
        i, n = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, K)
        at = S + ((row * HV + head) * V + i)[:, None] * K + n[None, :]
        s = tl.load(at)
        key = tl.load(k + row * q_row + (head // share) * K + n).to(tl.float32)
        query = tl.load(q + row * q_row + (head // share) * K + n).to(tl.float32)
        key = key / tl.sqrt(tl.sum(key * key) + 1e-6)
        query = query / tl.sqrt(tl.sum(query * query) + 1e-6) * scale
        g = tl.load(a + row * a_row + head).to(tl.float32) + tl.load(bias + head)
        g = -tl.exp(tl.load(A_log + head)) * tl.where(g > 20.0, g, tl.log(1.0 + tl.exp(g)))
        beta = 1.0 / (1.0 + tl.exp(-tl.load(b + row * b_row + head).to(tl.float32)))
        s = s * tl.exp(g)
        u = beta * (tl.load(v + row * v_row + head * V + i).to(tl.float32) - tl.sum(s * key[None, :], 1))
        s = s + u[:, None] * key[None, :]
        tl.store(at, s)
        tl.store(out + (row * HV + head) * V + i, tl.sum(s * query[None, :], 1).to(out.dtype.element_ty))

    return mamba2, gdn


KERNELS = {}
SIDE = {}
LAUNCH = {"BLOCK": 16, "num_warps": 4}
LAUNCHES = [{"BLOCK": block, "num_warps": warps} for block, warps in ((4, 1), (8, 2), (16, 2), (16, 4), (32, 4), (64, 8))]


def triton_mamba2(S, x, B, C, dt, p, z, out):
    rows, heads, dim, n = S.shape
    block = LAUNCH["BLOCK"]
    KERNELS["mamba2"][(rows, heads, -(-dim // block))](
        S, x, B, C, dt, p["A"], p["D"], p["dt_bias"], z, out, heads, heads // B.shape[2], x.stride(0), B.stride(0), C.stride(0), dt.stride(0), z.stride(0),
        DIM=dim, N=n, BLOCK=block, num_warps=LAUNCH["num_warps"],
    )


def triton_gdn(S, q, k, v, a, b, p, out):
    rows, HV, V, K = S.shape
    block = min(LAUNCH["BLOCK"], V)
    KERNELS["gdn"][(rows, HV, V // block)](
        S, q, k, v, a, b, p["A_log"], p["dt_bias"], out, HV, HV // q.shape[2], q.stride(0), v.stride(0), a.stride(0), b.stride(0), K**-0.5, V=V, K=K, BLOCK=block,
        num_warps=LAUNCH["num_warps"],
    )


def tune(r, projected):
    """The fastest of a few launches for a shape and a batch."""
    times = []
    for launch in LAUNCHES:
        LAUNCH.update(launch)
        timed(lambda: r.alone(projected), 2, True)
        times.append(timed(lambda: r.alone(projected), 4, True))
    LAUNCH.update(LAUNCHES[times.index(min(times))])


def captured(call, cuda, memory):
    """The call as a graph."""
    if not cuda:
        return call
    side = SIDE.setdefault("stream", torch.cuda.Stream())
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        call()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=memory):
        call()
    return graph.replay


def timed(play, n, cuda):
    """Milliseconds of one of n plays."""
    if not cuda:
        start = time.perf_counter()
        for _ in range(n):
            play()
        return (time.perf_counter() - start) * 1e3 / n
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(n):
        play()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / n


def relative(seen, wanted):
    return float((seen.float() - wanted.float()).norm() / wanted.float().norm())


def check(model, variants, rows, tokens, broken):
    """Outputs of recurrent layers of each variant on the same inputs, and logits, against the plain update's."""
    torch.manual_seed(9)
    device, layers = model.device, [b[3] for b in model.blocks if b[0] in "MG"]
    worst = {}
    for turn in range(CHECKED):
        projected = torch.randn(rows, tokens, model.projected, device=device, dtype=BF16)
        wanted = None
        for name, r in variants.items():
            out = torch.stack([r.core(i, projected, p) for i, p in enumerate(layers)])
            if not (broken and turn == 1 and not r.plain):
                r.commit(all_of_them=True)
            wanted = out if wanted is None else wanted
            worst[name] = max(worst.get(name, 0.0), relative(out, wanted))
    for r in variants.values():
        r.reset()
    logits = {}
    for _ in range(CHECKED):
        ids = torch.randint(0, model.c["vocab"], (rows, tokens), device=device)
        for name in ("plain F32", "F32 FULL"):
            logits[name] = model.step(ids, variants[name].core)
            variants[name].commit(all_of_them=True)
    off, most = relative(logits["F32 FULL"], logits["plain F32"]), 2 * (10 * len(model.c["blocks"])) ** 0.5 * 2**-9
    for r in variants.values():
        r.reset()
        assert r.slots.check() == 0, f"faults {r.slots.check()}"
    for name, error in worst.items():
        bound = NEIGHBOUR if "F32" in name and "SPLIT" not in name else 2 * NEIGHBOUR
        if not error < bound:
            sys.exit(f"{name}: outputs are off by {error:.1e}, expected {bound:.1e}")
    if not off < most:
        sys.exit(f"F32 FULL: logits are off by {off:.1e}, expected {most:.1e}")
    return worst, off


def measure(model, label, rows, tokens, args, cuda):
    """A record for each variant."""
    window = 16 if tokens == 1 else 32
    state = math.prod(Recurrent.shape(model.c)) * model.recurrent
    names = [name for name in (TRITON, *VARIANTS) if name != TRITON or (tokens == 1 and KERNELS)]
    # Rings take up to a fifth of what fp32 states do, and logits are there three times.
    needed = rows * state * sum((2 if "BF16" in name else 4) * (1.1 if tokens == 1 else 1.25) for name in names) + rows * tokens * model.c["vocab"] * 6
    if cuda:
        torch.cuda.empty_cache()
        free = torch.cuda.mem_get_info()[0]
        if needed > free:
            print(f"{label}, batch {rows}, {tokens} tokens: left out, needs {needed / 1e9:.0f} GB of which {free / 1e9:.0f} are free", flush=True)
            return []
    variants = {name: Recurrent(model, name, rows, tokens, window, 0 if cuda else None, args.library, args.pdl and not VARIANTS.get(name, (0, 0, 1))[2])
                for name in sorted(names, key=lambda name: name != "plain F32")}
    worst, off = check(model, variants, rows, tokens, args.broken)
    taken = (free - torch.cuda.mem_get_info()[0]) / 1e9 if cuda else 0
    ids = torch.randint(0, model.c["vocab"], (rows, tokens), device=model.device)
    projected = torch.randn(rows, tokens, model.projected, device=model.device, dtype=BF16)

    if TRITON in variants and cuda:
        tune(variants[TRITON], projected)

    def whole(r):
        def call():
            model.step(ids, r.core)
            r.commit()

        return call

    memory = torch.cuda.graph_pool_handle() if cuda else None
    plays = {name: (captured(whole(r), cuda, memory), captured(lambda r=r: r.alone(projected), cuda, memory)) for name, r in variants.items()}
    times = {name: ([], []) for name in plays}
    for round_ in range(-1, args.rounds):
        for name, both in plays.items():
            for kept, play in zip(times[name], both):
                if round_ < 0:  # warm, and to know how many windows make a round
                    kept.append(timed(play, window, cuda))
                    continue
                if round_ == 0:
                    kept[:] = [max(1, min(8, round(args.round_ms / (window * kept[0]))))]
                n = window * int(kept[0])
                kept.append(timed(play, n, cuda))
    records = []
    for name, (steps, alone) in times.items():
        r = variants[name]
        assert r.slots.check() == 0, f"{name}: faults {r.slots.check()}"
        records.append({
            "model": label, "batch": rows, "tokens": tokens, "variant": name, "window": window, "step_ms": statistics.median(steps[1:]),
            "recurrent_ms": statistics.median(alone[1:]), "rounds_ms": steps[1:], "steps_per_round": window * int(steps[0]), "error": worst[name],
            "logits_error": off if name == "F32 FULL" else None, "state_bytes": rows * state * (2 if "BF16" in name else 4), "device_gb": taken,
        })
    del plays, variants
    return records


COLUMNS = ["plain F32", TRITON, "F32 FULL", "SPLIT32 HIGH", "plain BF16", "BF16 HIGH"]


def line(records, key):
    cells = []
    of = {r["variant"]: r for r in records}
    for name in COLUMNS:
        if name not in of:
            cells.append(" " * 17)
            continue
        ms = of[name][key]
        ratio = f"{of[AGAINST[name]][key] / ms:6.2f}x" if name in AGAINST else " " * 7
        cells.append(f"{ms:10.3f}{ratio}")
    first = records[0]
    return f"{first['model']:<20}{first['batch']:>6}{first['tokens']:>3}" + "".join(cells)


def heading(what):
    return f"{what:<20}{'batch':>6}{'T':>3}" + "".join(f"{name:>17}" for name in COLUMNS)


def main():
    parser = argparse.ArgumentParser(description="Times decode steps of whole hybrid models.")
    parser.add_argument("library")
    parser.add_argument("--quick", action="store_true", help="batches 1 and 128, one round")
    parser.add_argument("--json", help="file for the results")
    parser.add_argument("--models", default="", help="words of the names of models")
    parser.add_argument("--batches", help="rows, with commas")
    parser.add_argument("--tokens", default="1,4", help="tokens a row, with commas: 1 and 4")
    parser.add_argument("--pdl", action="store_true", help="replay steps as dependent launches")
    parser.add_argument("--no-triton", action="store_true", help="without the update in Triton")
    parser.add_argument("--tiny", action="store_true", help="on the processor, small dimensions")
    parser.add_argument("--break", dest="broken", action="store_true", help="leave a commit out")
    args = parser.parse_args()
    args.library = os.path.abspath(args.library)
    args.rounds, args.round_ms = (1, 0) if args.quick or args.tiny else (3, 100)
    cuda = not args.tiny
    if cuda and not torch.cuda.is_available():
        sys.exit("PyTorch has no GPU here; --tiny runs on the processor")
    device = "cuda" if cuda else "cpu"
    batches = [int(n) for n in (args.batches or ("1,3" if args.tiny else "1,128" if args.quick else "1,32,128,256")).split(",")]
    tokens = [int(n) for n in args.tokens.split(",")]
    if not {1, 4} >= set(tokens):
        sys.exit(f"--tokens is {args.tokens}; expected 1 and 4")
    if not args.no_triton and (cuda or os.environ.get("TRITON_INTERPRET") == "1"):
        try:
            KERNELS.update(zip(("mamba2", "gdn"), triton_kernels()))
        except ImportError as error:
            print(f"without Triton: {error}")
    known = TINY if args.tiny else MODELS
    if args.models and not any(word in label for word in args.models.split() for label in known):
        sys.exit(f"--models is {args.models!r}; expected words of {', '.join(known)}")
    began, results = time.time(), []
    torch.manual_seed(1)
    for label, c in known.items():
        if args.models and not any(word in label for word in args.models.split()):
            continue
        with torch.no_grad():
            model = Model(c, max(batches), device)
            state = math.prod(Recurrent.shape(c)) * model.recurrent
            where = f"{torch.cuda.get_device_name()}, PyTorch {torch.__version__}" if cuda else "the processor"
            print(f"\n{label} on {where}: weights {model.bytes / 1e9:.2f} GB, attention caches {model.kv_bytes / 1e9:.2f} GB; fp32 states {state * 4 / 1e6:.1f} MB a row, "
                  f"{state * 4 * max(batches) / 1e9:.2f} GB at batch {max(batches)}")
            print(heading("whole step, ms"), flush=True)
            mine = []
            for t in tokens:
                for rows in batches:
                    try:
                        records = measure(model, label, rows, t, args, cuda)
                    except (torch.OutOfMemoryError, replay.ReplayError) as error:
                        if getattr(error, "status", OUT_OF_MEMORY) != OUT_OF_MEMORY:
                            raise
                        print(f"{label}, batch {rows}, {t} tokens: left out, {error}", flush=True)
                        records = []
                    if records:
                        mine.append(records)
                        results += records
                        print(line(records, "step_ms"), flush=True)
                        if args.json:
                            with open(args.json, "w") as file:
                                json.dump({"device": where, "pdl": args.pdl, "results": results}, file, indent=1)
            print(heading("recurrent alone, ms"))
            for records in mine:
                print(line(records, "recurrent_ms"))
            print(f"{'share of a step':<20}{'batch':>6}{'T':>3}")
            for records in mine:
                of = {r["variant"]: r["recurrent_ms"] / r["step_ms"] for r in records}
                shares = "".join(f"{of[name]:>17.0%}" if name in of else " " * 17 for name in COLUMNS)
                print(f"{label:<20}{records[0]['batch']:>6}{records[0]['tokens']:>3}{shares}")
            flat = [r for records in mine for r in records]
            worst = {name: max(r["error"] for r in flat if r["variant"] == name) for name in COLUMNS if any(r["variant"] == name for r in flat)}
            off = max((r["logits_error"] for r in flat if r["logits_error"] is not None), default=0.0)
            print("checked against plain F32: outputs " + ", ".join(f"{name} {error:.1e}" for name, error in worst.items()) + f"; logits of F32 FULL {off:.1e}")
            if cuda and mine:
                print(f"device memory of all variants: up to {max(m[0]['device_gb'] for m in mine):.0f} GB")
            del model, mine
    print(f"\nwhole models: ok, {time.time() - began:.0f} s")


main()
