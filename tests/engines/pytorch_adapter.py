# SPDX-License-Identifier: MIT OR Apache-2.0
"""The PyTorch adapter: descriptors against the header, then outputs and states against plain recurrences in fp64.

    python3 tests/engines/pytorch_adapter.py LIBRARY            on the processor, without PyTorch
    python3 tests/engines/pytorch_adapter.py LIBRARY --cuda     on a GPU, with PyTorch, model steps in CUDA graphs, too
    ... --break                                                 one token's counts are wrong: it must fail

fp32 inputs, F32 states: outputs differ from fp64 by the rounding of sums. 30 tokens with decays below 1 are at most some 30 roundings of 2^-24 of the state in front
of a dot product of 32 (128) terms: a relative L2 error of 1e-5 leaves a factor of five. bfloat16 inputs are exact in both, so on a GPU the same bound holds.
"""

import ctypes
import math
import os
import random
import shutil
import subprocess
import sys
import tempfile

ROOT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..")
sys.path.insert(0, os.path.join(ROOT, "examples-cpp", "adapters", "pytorch"))
sys.dont_write_bytecode = True

import replayssm_torch as replay  # noqa: E402

BOUND = 1e-5
NAN = float("nan")


class Host:
    """A tensor in host memory, as far as the adapter asks: fp32 or an integer type, values in a flat list."""

    device, strides = "cpu", None
    KINDS = {"float32": ctypes.c_float, "int32": ctypes.c_int32, "int64": ctypes.c_int64, "uint8": ctypes.c_uint8}

    def __init__(self, shape, values, dtype="float32", strides=None):
        self.shape, self.dtype, self.strides = tuple(shape), dtype, strides
        self.data = (self.KINDS[dtype] * max(1, math.prod(shape)))(*values)

    def data_ptr(self):
        return ctypes.addressof(self.data)

    def stride(self):
        if self.strides:
            return self.strides
        strides = [1]
        for size in reversed(self.shape[1:]):
            strides.insert(0, strides[0] * size)
        return tuple(strides)

    def values(self):
        return list(self.data)


def check_layout():
    """Offsets of all fields, as a C compiler has them."""
    compiler = os.environ.get("CC", "cc")
    if not shutil.which(compiler):
        return print("skipped: the comparison of descriptors with the header, because there is no C compiler")
    lines = ['#include <stddef.h>', '#include <stdio.h>', '#include "replayssm.h"', "int main(void) {"]
    wanted = []
    for name, structure in replay.STRUCTURES.items():
        lines.append(f'  printf("{name} %zu\\n", sizeof(struct replayssm_{name}));')
        wanted.append(f"{name} {ctypes.sizeof(structure)}")
        for field, _ in structure._fields_:
            lines.append(f'  printf("{name}.{field} %zu\\n", offsetof(struct replayssm_{name}, {field}));')
            wanted.append(f"{name}.{field} {getattr(structure, field).offset}")
    prefixes = {"_FAMILIES": "FAMILY_", "_FORMATS": "FORMAT_", "_READOUTS": "READOUT_", "_HEAD_MAPS": "HEAD_MAP_", "_GATES": "GATE_", "_SCHEDULES": "SCHEDULE_",
                "_COUNTS": "COUNTS_", "_COPIES": "COPY_"}
    numbers = {f"{prefix}{(name or 'default').upper()}": number for table, prefix in prefixes.items() for name, number in getattr(replay, table).items()}
    numbers |= {f"DTYPE_{name}": getattr(replay, name) for name in ("F32", "BF16", "F16", "I32", "I64")}
    numbers |= {"EXEC_PDL": replay._PDL, "EXEC_PDL_PREFETCH": replay._PDL_PREFETCH, "BATCH_NULL_ID": replay._NULL_ID, "BATCH_EXTEND": replay._EXTEND,
                "BATCH_KEEP_NULL_OUTPUTS": replay._KEEP_NULL_OUTPUTS, "BACKEND_CPU": 1, "BACKEND_CUDA": 2, "SLOTS_CHECKS": 1}
    for name, number in numbers.items():
        lines.append(f'  printf("{name} %d\\n", (int)REPLAYSSM_{name});')
        wanted.append(f"{name} {number}")
    with tempfile.TemporaryDirectory() as folder:
        source, program = os.path.join(folder, "layout.c"), os.path.join(folder, "layout")
        with open(source, "w") as file:
            file.write("\n".join(lines + ["  return 0;", "}"]))
        subprocess.run([compiler, "-std=c11", "-I", os.path.join(ROOT, "include"), source, "-o", program], check=True)
        seen = subprocess.run([program], check=True, capture_output=True, text=True).stdout.split("\n")
    for a, b in zip(seen, wanted, strict=False):
        if a != b:
            sys.exit(f"the header has {a}, the adapter {b}")
    assert len(seen) == len(wanted) + 1
    print(f"descriptors: {len(wanted)} sizes, offsets and numbers as in the header")


def softplus(x):
    return x if x > 20 else math.log1p(math.exp(x))


def silu(x):
    return x / (1 + math.exp(-x))


def sigmoid(x):
    return 1 / (1 + math.exp(-x))


class Mamba2Row:
    """One request in fp64. S [head][channel][state]."""

    def __init__(self, dims, parameters):
        self.heads, self.dim, self.width, self.groups = dims
        self.A, self.D, self.bias = parameters
        self.S = [[[0.0] * self.width for _ in range(self.dim)] for _ in range(self.heads)]

    def step(self, x, B, C, dt, z):
        out = []
        for h in range(self.heads):
            group = h // (self.heads // self.groups)
            d = softplus(dt[h] + self.bias[h])
            decay = math.exp(self.A[h] * d)
            b, c = (t[group * self.width : (group + 1) * self.width] for t in (B, C))
            for i in range(self.dim):
                row, xd = self.S[h][i], d * x[h * self.dim + i]
                y = 0.0
                for n in range(self.width):
                    row[n] = row[n] * decay + xd * b[n]
                    y += row[n] * c[n]
                out.append((y + self.D[h] * x[h * self.dim + i]) * silu(z[h * self.dim + i]))
        return out


class DeltaRow:
    """One request in fp64. S [value head][V][K]. kda: decays per column; bound: KDA's lower bound of their logarithms."""

    def __init__(self, dims, parameters, kda, bound=None):
        self.H, self.HV, self.K, self.V = dims
        self.A_log, self.bias = parameters
        self.kda, self.bound = kda, bound
        self.S = [[[0.0] * self.K for _ in range(self.V)] for _ in range(self.HV)]

    def decay(self, h, g):
        if self.bound is None:
            return math.exp(-math.exp(self.A_log[h]) * softplus(g))
        return math.exp(self.bound * sigmoid(math.exp(self.A_log[h]) * g))

    def step(self, q, k, v, g, beta):
        out = []
        for h in range(self.HV):
            key = h // (self.HV // self.H)
            qh, kh = (t[key * self.K : (key + 1) * self.K] for t in (q, k))
            qh, kh = ([e / math.sqrt(sum(f * f for f in t) + 1e-6) for e in t] for t in (qh, kh))
            width = self.K if self.kda else 1
            decays = [self.decay(h, g[h * width + i] + self.bias[h * width + i]) for i in range(width)]
            b = sigmoid(beta[h])
            for i in range(self.V):
                row = self.S[h][i]
                for n in range(self.K):
                    row[n] *= decays[n % width]
                u = b * (v[h * self.V + i] - sum(s * e for s, e in zip(row, kh)))
                for n in range(self.K):
                    row[n] += u * kh[n]
                out.append(sum(s * e for s, e in zip(row, qh)) / math.sqrt(self.K))
        return out


def relative(seen, wanted):
    return math.sqrt(sum((a - b) ** 2 for a, b in zip(seen, wanted)) / sum(b * b for b in wanted))


def clone(row):
    other = object.__new__(type(row))
    other.__dict__.update(row.__dict__)
    other.S = [[list(line) for line in head] for head in row.S]
    return other


def run(family, tensor, device, path, broken):
    """Twelve steps of up to four tokens of four rows, one of which is padding; between one and all tokens of a row are taken. Then states and a fork."""
    draw = random.Random(5)
    n_slots, tokens, rows = 6, 4, 4
    slots = replay.Slots(n_slots, window=9, max_step_tokens=tokens, device=device, n_threads=0 if device is not None else 1, path=path)
    if family == "mamba2":
        dims = heads, dim, width, groups = 4, 16, 32, 2
        layers = replay.Mamba2Layers(slots, 1, *dims, io="float32", fmt="f32")
        A, D, bias = ([make() for _ in range(heads)] for make in (lambda: -draw.uniform(1, 16), lambda: draw.gauss(0, 1), lambda: draw.gauss(-3, 1)))
        fresh = lambda: Mamba2Row(dims, (A, D, bias))  # noqa: E731
        widths = {"x": (heads, dim), "B": (groups, width), "C": (groups, width), "dt": (heads,), "z": (heads, dim)}
        shape = (heads, dim, width)
        named = {"A": tensor((heads,), A), "D": tensor((heads,), D), "dt_bias": tensor((heads,), bias)}
        channels = (heads, dim)
    else:
        dims = H, HV, K, V = 2, 4, 32, 16
        layers = replay.DeltaLayers(slots, 1, *dims, kind=family, io="float32", fmt="f32")
        width = K if family == "kda" else 1
        A_log = [math.log(draw.uniform(1, 16)) for _ in range(HV)]
        bias = [draw.gauss(-4, 1) for _ in range(HV * width)]
        fresh = lambda: DeltaRow(dims, (A_log, bias), family == "kda")  # noqa: E731
        gates = (HV, K) if family == "kda" else (HV,)
        widths = {"q": (H, K), "k": (H, K), "v": (HV, V), "g": gates, "beta": (HV,)}
        shape = (HV, V, K)
        named = {"A_log": tensor((HV,), A_log), "dt_bias": tensor(gates, bias)}
        channels = (HV, V)
    ids = [4, 0, -1, 2]
    models = {slot: fresh() for slot in range(n_slots)}
    slots.reset(tensor((n_slots,), range(n_slots), "int32"))
    seen, wanted = [], []
    for _ in range(12):
        inputs = {name: [draw.gauss(0, 1) for _ in range(rows * tokens * math.prod(w))] for name, w in widths.items()}
        held = {name: tensor((rows, tokens, *widths[name]), values) for name, values in inputs.items()}
        out = tensor((rows, tokens, *channels), [NAN] * (rows * tokens * math.prod(channels)))
        batch = replay.Batch(tensor((rows,), ids, "int32"), tokens=tokens)
        layers.step(0, batch, **held, **named, out=out)
        counts = [draw.randint(1, tokens) for _ in range(rows)]
        given = [count + (broken and i == 1 and count < tokens) for i, count in enumerate(counts)]
        slots.commit(batch, tensor((rows,), given, "int32"))
        values, size = out.values(), math.prod(channels)
        for row, slot in enumerate(ids):
            if slot < 0:
                assert not any(values[row * tokens * size : (row + 1) * tokens * size]), "padding's outputs are zero"
                continue
            trial = clone(models[slot])
            for t in range(tokens):
                at = row * tokens + t
                take = {name: v[at * math.prod(widths[name]) : (at + 1) * math.prod(widths[name])] for name, v in inputs.items()}
                wanted += trial.step(**take)
                seen += values[at * size : (at + 1) * size]
                if t + 1 == counts[row]:
                    models[slot] = clone(trial)
    error = relative(seen, wanted)
    assert error < BOUND, f"{family}: outputs are off by {error:.1e}, expected {BOUND}"
    # A fork has the state of what it was forked from; states go out and come in.
    slots.copy(tensor((1,), [4], "int32"), tensor((1,), [5], "int32"))
    state = tensor((2, *shape), [NAN] * (2 * math.prod(shape)))
    layers.save(0, tensor((2,), [5, 0], "int32"), state)
    wanted = [e for slot in (4, 0) for head in models[slot].S for line in head for e in line]
    off = relative(state.values(), wanted)
    assert off < BOUND, f"{family}: states are off by {off:.1e}, expected {BOUND}"
    layers.load(0, tensor((2,), [1, 3], "int32"), state)
    again = tensor((2, *shape), [NAN] * (2 * math.prod(shape)))
    layers.save(0, tensor((2,), [1, 3], "int32"), again)
    assert again.values() == state.values(), f"{family}: an imported state is another one"
    assert slots.check() == 0, f"{family}: faults {slots.check()}"
    print(f"{family}: outputs {error:.1e}, states {off:.1e}, bound {BOUND}")


def run_life(tensor, device, path):
    """A convolution of width 3 and Mamba-2 with one token a row, without an axis for it: rows of heads. Tokens are taken back and done again; a snapshot; states that
    come in at a position, transposed."""
    draw = random.Random(8)
    slots = replay.Slots(4, window=8, min_rewind=2, device=device, n_threads=0 if device is not None else 1, path=path)
    dims = heads, dim, width, groups = 2, 16, 32, 1
    layers = replay.Mamba2Layers(slots, 1, *dims, io="float32", fmt="f32")
    convolutions = replay.Conv1dLayers(slots, 1, heads * dim, 3, io="float32")
    A, D, bias = ([make() for _ in range(heads)] for make in (lambda: -draw.uniform(1, 16), lambda: draw.gauss(0, 1), lambda: draw.gauss(-3, 1)))
    weight = [draw.gauss(0, 1) for _ in range(heads * dim * 3)]
    named = {"A": tensor((heads,), A), "D": tensor((heads,), D), "dt_bias": tensor((heads,), bias)}
    held_weight = tensor((heads * dim, 3), weight)
    rows = [1, 3]
    ids = tensor((2,), rows, "int32")
    slots.reset(ids, position=tensor((2,), [100, 7], "int64"))
    models, windows = [Mamba2Row(dims, (A, D, bias)) for _ in rows], [[[0.0, 0.0] for _ in range(heads * dim)] for _ in rows]
    tokens = [[{n: [draw.gauss(0, 1) for _ in range(w)] for n, w in (("x", heads * dim), ("B", width), ("C", width), ("dt", heads), ("z", heads * dim))} for _ in rows]
              for _ in range(14)]
    seen, wanted, kept = [], [], []

    def step(inputs, last=False):
        batch = replay.Batch(ids, tokens=1)
        mixed = tensor((2, 1, heads * dim), [NAN] * (2 * heads * dim))
        convolutions.step(0, batch, tensor((2, 1, heads * dim), inputs[0]["x"] + inputs[1]["x"]), mixed, held_weight)
        out = tensor((2, heads, dim), [NAN] * (2 * heads * dim))
        given = {n: tensor((2, *s), inputs[0][n] + inputs[1][n]) for n, s in (("B", (groups, width)), ("C", (groups, width)), ("dt", (heads,)), ("z", (heads, dim)))}
        layers.step(0, batch, tensor((2, heads, dim), mixed.values()), **given, **named, out=out)
        slots.commit(batch)
        if last:
            slots.snapshot(batch, tensor((2,), [100 + len(kept), -1], "int64"), tensor((2,), [0, 2], "int32"))
        return out.values()

    def model(inputs):
        values = []
        for i, one in enumerate(inputs):
            mixed = []
            for c, x in enumerate(one["x"]):
                windows[i][c].append(x)
                mixed.append(silu(sum(w * e for w, e in zip(weight[3 * c : 3 * c + 3], windows[i][c][-3:]))))
            values += models[i].step(mixed, one["B"], one["C"], one["dt"], one["z"])
        return values

    for t, inputs in enumerate(tokens):
        if t == 9:
            # Two tokens that do not stay.
            step(tokens[0])
            step(tokens[1])
            done = tensor((2,), [-1, -1], "int32")
            slots.rewind(ids, tensor((2,), [2, 2], "int32"), done)
            assert done.values() == [1, 1], done.values()
        kept.append(t)
        seen += step(inputs, t + 1 == len(tokens))
        wanted += model(inputs)
    error = relative(seen, wanted)
    assert error < BOUND, f"after tokens were taken back: outputs are off by {error:.1e}, expected {BOUND}"
    state = tensor((1, heads, dim, width), [NAN] * (heads * dim * width))
    # What a snapshot has left is a slot without a ring, until it is loaded.
    slots.copy(tensor((1,), [0], "int32"), tensor((1,), [2], "int32"), kind="load", position=tensor((1,), [100 + len(tokens)], "int64"))
    layers.save(0, tensor((1,), [2], "int32"), state)
    off = relative(state.values(), [e for head in models[0].S for line in head for e in line])
    assert off < BOUND, f"a snapshot is off by {off:.1e}, expected {BOUND}"
    turned = tensor((1, heads, width, dim), [NAN] * (heads * dim * width))
    layers.load(0, tensor((1,), [2], "int32"), state, position=tensor((1,), [5], "int64"))
    layers.save(0, tensor((1,), [2], "int32"), turned, transposed=True)
    flat = state.values()
    assert turned.values() == [flat[(h * dim + i) * width + n] for h in range(heads) for n in range(width) for i in range(dim)], "a transposed state is another one"
    assert slots.check() == 0, f"faults {slots.check()}"
    print(f"a convolution, tokens taken back, a snapshot: outputs {error:.1e}, states {off:.1e}, bound {BOUND}")


def refused(calls):
    """Each call is refused with its words."""
    for make, words in calls:
        try:
            make()
        except (replay.ReplayError, TypeError, ValueError) as error:
            assert words in str(error), f"{error}; expected {words}"
        else:
            sys.exit(f"nothing was said; expected {words}")


def check_refusals(path):
    slots = replay.Slots(2, device=None, n_threads=1, path=path)
    layers, ids = replay.Mamba2Layers(slots, 1, 4, 16, 32, 2, io="float32"), Host((2,), [0, 1], "int32")
    calls = [
        (lambda: replay.Mamba2Layers(slots, 1, 4, 0, 32, 2), "headdim is 0"),
        (lambda: replay.Slots(0, device=None, path=path), "n_slots is 0"),
        (lambda: replay.Slots(2**32 + 1, device=None, path=path), "n_slots is 4294967297, which does not fit"),
        (lambda: replay.Batch(Host((1,), [0], "int32")), "tokens or cu_seqlens"),
        (lambda: replay.Batch(Host((1,), [0.0]), tokens=1), "slots is of float32; expected int32 or int64"),
        (lambda: replay.Batch(ids, tokens=1, flush=Host((1,), [1], "uint8")), "flush has the shape (1,); expected (2,)"),
        (lambda: replay.Batch(ids, cu_seqlens=Host((3,), [0, 1, 2], "int64"), n_tokens=2), "cu_seqlens is of int64; expected int32"),
        (lambda: replay.Batch(ids, cu_seqlens=Host((3,), [0, 1, 2], "int32")), "n_tokens is None; expected"),
        (lambda: replay.Batch(Host((), [0], "int32"), tokens=1), "slots has the shape (); expected one dimension"),
        (lambda: replay.Batch(ids, tokens=1.5), "batch.tokens is 1.5; expected a whole number"),
        (lambda: replay.Slots("8", device=None, path=path), "slots_desc.n_slots is '8'; expected a whole number"),
        (lambda: replay.Slots(8, device=None, path=path, schedule=["none"]), "schedule is ['none']; expected one of"),
        (lambda: replay.DeltaLayers(slots, 1, 2, 4, 32, 16, kind="mamba2"), "kind is 'mamba2'; expected one of 'gdn', 'kda'"),
        (lambda: layers.save(0, ids, Host((2, 4, 16, 32), [0] * 4096, strides=(0, 512, 32, 1))), "state has the strides (0, 512, 32, 1); expected 1 or more"),
        (lambda: layers.load("0", ids, Host((2, 4, 16, 32), [0] * 4096)), "layer is '0'; expected a whole number"),
        (lambda: slots.commit(replay.Batch(ids, tokens=1), Host((2,), [1, 1], "int64")), "counts is of int64; expected int32"),
        (lambda: replay.Mamba2Layers(slots, 1, 4, 16, 32, 2, fmt="fp32"), "fmt is 'fp32'; expected"),
        (lambda: layers.step(0, replay.Batch(ids, tokens=1), *[Host((2, 1, 4, 8), [0] * 64)] * 5), "x has the shape (2, 1, 4, 8); expected (2, 1, 4, 16)"),
        (lambda: layers.load(0, ids, Host((1, 4, 16, 32), [0] * 2048)), "state has the shape (1, 4, 16, 32)"),
        (lambda: layers.load(-1, ids, Host((2, 4, 16, 32), [0] * 4096)), "layer is -1; expected 0 or more"),
    ]
    refused(calls)
    elsewhere = Host((2,), [1, 1], "int32")
    elsewhere.device = "cuda:1"
    try:
        slots.commit(replay.Batch(ids, tokens=1), elsewhere)
    except ValueError as error:
        assert str(error) == "counts is on cuda:1; expected cpu", error
    else:
        sys.exit("a tensor of another device was taken")
    print("refusals: in words")


class OnDevice:
    """A tensor of PyTorch with what Host has."""

    def __init__(self, shape, values, dtype="float32"):
        import torch

        self.tensor = torch.tensor(list(values), dtype=getattr(torch, dtype)).reshape(tuple(shape)).cuda()
        self.shape, self.dtype = self.tensor.shape, self.tensor.dtype
        self.data_ptr, self.stride, self.device = self.tensor.data_ptr, self.tensor.stride, self.tensor.device

    def values(self):
        return self.tensor.flatten().tolist()


def run_graph(path, tokens):
    """Mamba-2 of a real head's size, bfloat16 in, fp32 out, a model step of two layers captured once: against fp64 in PyTorch. Of each row's tokens all but the
    row's number modulo tokens are taken, counts being device memory."""
    import torch

    torch.manual_seed(3)
    batch, layers_of, heads, dim, width, groups = 8, 2, 16, 64, 128, 2
    slots = replay.Slots(batch + 1, window=16, max_step_tokens=tokens, path=path)
    layers = replay.Mamba2Layers(slots, layers_of, heads, dim, width, groups, out="float32", fmt="f32")
    A, D = -1 - 15 * torch.rand(layers_of, heads, device="cuda"), torch.randn(layers_of, heads, device="cuda")
    bias = torch.randn(layers_of, heads, device="cuda") - 3
    # Slot 0 is padding, as engines have it.
    ids = torch.arange(1, batch + 1, device="cuda", dtype=torch.int64)
    ids[2] = 0
    counts = tokens - torch.arange(batch, device="cuda", dtype=torch.int32) % tokens
    slots.reset(ids)

    def empty(*shape, dtype=torch.bfloat16):
        return torch.zeros(layers_of, batch, tokens, *shape, device="cuda", dtype=dtype)

    x, B, C, z = empty(heads, dim), empty(groups, width), empty(groups, width), empty(heads, dim)
    dt, out = empty(heads, dtype=torch.float32), empty(heads, dim, dtype=torch.float32)
    rows = replay.Batch(ids, tokens=tokens, null_id=0)

    def model_step():
        for i in range(layers_of):
            layers.step(i, rows, x[i], B[i], C[i], dt[i], A[i], D=D[i], dt_bias=bias[i], z=z[i], out=out[i])
        slots.commit(rows, counts)

    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        model_step()
    S = torch.zeros(layers_of, batch, heads, dim, width, device="cuda", dtype=torch.float64)
    seen, wanted = [], []
    repeat = heads // groups
    for _ in range(40):
        for tensor in (x, B, C, z, dt):
            tensor.copy_(torch.randn(tensor.shape, device="cuda"))
        graph.replay()
        now = S.clone()
        for t in range(tokens):
            step = torch.nn.functional.softplus(dt[:, :, t].double() + bias[:, None].double())
            decay = torch.exp(A[:, None].double() * step)
            b, c = (v[:, :, t].double().repeat_interleave(repeat, dim=2) for v in (B, C))
            xd = step[..., None] * x[:, :, t].double()
            now = now * decay[..., None, None] + xd[..., None] * b[:, :, :, None, :]
            y = (now * c[:, :, :, None, :]).sum(-1) + D[:, None, :, None].double() * x[:, :, t].double()
            wanted.append(y * torch.nn.functional.silu(z[:, :, t].double()))
            seen.append(out[:, :, t].clone())
            taken = (counts == t + 1).view(1, -1, 1, 1, 1)
            S = torch.where(taken, now, S)
    seen, wanted = torch.stack(seen), torch.stack(wanted)
    assert not seen[:, :, 2].any(), "padding's outputs are zero"
    wanted[:, :, 2] = 0
    error = float((seen.double() - wanted).norm() / wanted.norm())
    assert error < BOUND, f"a graph of {tokens} tokens: outputs are off by {error:.1e}, expected {BOUND}"
    assert slots.check() == 0, f"faults {slots.check()}"
    print(f"a graph of model steps of {tokens} tokens: outputs {error:.1e}, bound {BOUND}")


def main():
    if len(sys.argv) < 2 or not {"--cuda", "--break"} >= set(sys.argv[2:]):
        sys.exit(f"usage: {sys.argv[0]} LIBRARY [--cuda] [--break]")
    path, switches = sys.argv[1], sys.argv[2:]
    on_gpu, broken = "--cuda" in switches, "--break" in switches
    check_layout()
    check_refusals(path)
    for family in ("mamba2", "gdn", "kda"):
        run(family, OnDevice if on_gpu else Host, 0 if on_gpu else None, path, broken)
    run_life(OnDevice if on_gpu else Host, 0 if on_gpu else None, path)
    if on_gpu:
        for tokens in (1, 4):
            run_graph(path, tokens)
    print("pytorch adapter: ok")


if __name__ == "__main__":
    main()
