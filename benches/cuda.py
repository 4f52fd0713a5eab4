#!/usr/bin/env python3
# SPDX-License-Identifier: MIT OR Apache-2.0
"""Times steps of the CUDA backend: us per layer and step, in CUDA graphs, over whole flush cycles, with a cold L2.

    python3 benches/cuda.py target/release/libreplayssm.so

Needs a GPU and PyTorch (device memory, graphs, events). The table of docs/MEASUREMENTS.md comes from here.
"""

import ctypes as c
import sys

import torch

F32, BF16, I32 = 1, 2, 16
MAMBA2, GDN, KDA = 1, 2, 3
SPLIT32, FORMAT_F32 = 1, 2
HIGH, FULL, EXACT = 1, 2, 3
BACKEND_CUDA, BATCH_EXTEND = 2, 4
# States of all layers together: several times the L2.
COLD_BYTES = 600_000_000
ACCEPTED = {1: 1, 4: 3, 8: 6}


class Ids(c.Structure):
    _fields_ = [("data", c.c_void_p), ("stride", c.c_int64), ("dtype", c.c_int32), ("reserved", c.c_uint32)]


class Tensor(c.Structure):
    _fields_ = [("data", c.c_void_p), ("stride_row", c.c_int64), ("stride_token", c.c_int64), ("stride_head", c.c_int64),
                ("dtype", c.c_int32), ("reserved", c.c_uint32)]


def struct(name, fields):
    """A descriptor: `struct_size`, then fields as "i:name" (int32), "l:" (int64), "f:" (float), "p:" (pointer), "t:" (tensor), "d:" (ids)."""
    kinds = {"i": c.c_int32, "l": c.c_int64, "f": c.c_float, "p": c.c_void_p, "t": Tensor, "d": Ids}
    pairs = [field.split(":") for field in fields.split()]
    body = [("struct_size", c.c_uint32)] + [(field, kinds[kind]) for kind, field in pairs]
    return type(name, (c.Structure,), {"_fields_": body})


Context = struct("Context", "i:backend i:device i:n_threads i:flags i:reserved p:log p:log_user i:log_level i:log_reserved")
Slots = struct("Slots", "i:n_slots i:n_rings i:window i:max_step_tokens i:min_rewind i:schedule i:flags")
Pool = struct("Pool", "i:family i:n_layers i:io i:out i:format i:readout i:stochastic_rounding i:nheads i:headdim i:dstate "
              "i:ngroups i:H i:HV i:K i:V i:head_map i:u_dtype i:channels i:width i:n_sections i:reserved p:section_channels")
Exec = struct("Exec", "i:flags p:stream i:part i:n_parts")
Batch = struct("Batch", "i:flags i:n_rows i:tokens i:max_tokens i:null_id i:keep_tail i:reserved l:n_tokens d:slots d:rings "
               "p:cu_seqlens p:flush p:generation")
Mamba2 = struct("Mamba2", "i:no_softplus t:x t:B t:C t:dt t:A t:dt_bias t:D i:D_per_element i:reserved t:z t:out")
Delta = struct("Delta", "i:gate t:q t:k t:v t:g t:beta t:A_log t:dt_bias f:lower_bound f:scale f:l2norm_eps i:no_l2norm "
               "i:beta_processed i:reserved t:out")
Commit = struct("Commit", "i:convention p:counts l:counts_stride")
Snapshot = struct("Snapshot", "i:n_pools p:at d:dst p:pools p:pool_src p:pool_dst")


def filled(kind, **fields):
    value = kind(struct_size=c.sizeof(kind))
    for name, field in fields.items():
        setattr(value, name, field)
    return value


def strided(tensor, head):
    dtype = F32 if tensor.dtype == torch.float32 else BF16
    row, token = (tensor.stride(0), tensor.stride(1)) if tensor.dim() == 3 else (0, 0)
    return Tensor(tensor.data_ptr(), row, token, head, dtype, 0)


class Library:
    def __init__(self, path):
        self.lib = c.CDLL(path)
        self.lib.replayssm_last_error_message.restype = c.c_char_p

    def __call__(self, name, *arguments):
        if getattr(self.lib, "replayssm_" + name)(*arguments) != 0:
            raise RuntimeError(self.lib.replayssm_last_error_message().decode())

    def create(self, name, *arguments):
        handle = c.c_void_p()
        self(name + "_create", *arguments, c.byref(handle))
        return handle


def tensors(family, shape, batch, tokens):
    """Inputs and output of a call, and its arguments."""
    def draw(width, dtype=torch.bfloat16):
        return torch.randn(batch, tokens, width, device="cuda").to(dtype)

    if family == MAMBA2:
        heads, dim, state, groups = shape
        x, B, C, z = draw(heads * dim), draw(groups * state), draw(groups * state), draw(heads * dim)
        dt, A, D = draw(heads, torch.float32) - 3, -1 - 15 * torch.rand(heads, device="cuda"), torch.randn(heads, device="cuda")
        out = torch.empty_like(x)
        args = filled(Mamba2, x=strided(x, dim), B=strided(B, state), C=strided(C, state), dt=strided(dt, 1), A=strided(A, 1),
                      D=strided(D, 1), z=strided(z, dim), out=strided(out, dim))
        return [x, B, C, z, dt, A, D, out], args
    key_heads, heads, keys, values = shape
    gates = keys if family == KDA else 1
    q, k, v = draw(key_heads * keys), draw(key_heads * keys), draw(heads * values)
    g, beta, A = draw(heads * gates, torch.float32) - 3, draw(heads, torch.float32), torch.rand(heads, device="cuda")
    out = torch.empty_like(v)
    args = filled(Delta, q=strided(q, keys), k=strided(k, keys), v=strided(v, values), g=strided(g, gates), beta=strided(beta, 1),
                  A_log=strided(A, 1), out=strided(out, values))
    return [q, k, v, g, beta, A, out], args


def time_steps(library, family, shape, batch, tokens, window, fmt, readout, plain):
    """us per layer and step."""
    torch.cuda.synchronize()
    heads, rows, columns = shape[:3] if family == MAMBA2 else (shape[1], shape[3], shape[2])
    n_layers = min(96, max(2, -(-COLD_BYTES // (batch * heads * rows * columns * 4))))
    context = library.create("context", c.byref(filled(Context, backend=BACKEND_CUDA)))
    slots = library.create("slots", context, c.byref(filled(Slots, n_slots=batch, window=window, max_step_tokens=tokens)))
    pool = filled(Pool, family=family, n_layers=n_layers, io=BF16, format=fmt, readout=readout)
    names = ("nheads", "headdim", "dstate", "ngroups") if family == MAMBA2 else ("H", "HV", "K", "V")
    for name, value in zip(names, shape):
        setattr(pool, name, value)
    layers = library.create("layers", slots, c.byref(pool), None, 0)
    kept, args = tensors(family, shape, batch, tokens)
    ids = torch.arange(batch, device="cuda", dtype=torch.int32)
    counts = torch.full((batch,), ACCEPTED[tokens], device="cuda", dtype=torch.int32)
    rows_of = filled(Batch, n_rows=batch, tokens=tokens, slots=Ids(ids.data_ptr(), 1, I32, 0), flags=BATCH_EXTEND if plain else 0)
    commit = filled(Commit, counts=None if plain else counts.data_ptr())
    stream = torch.cuda.Stream()
    execution = filled(Exec, stream=stream.cuda_stream)
    call = ("mamba2" if family == MAMBA2 else "delta") + ("_extend" if plain else "_step")

    def model_step():
        for layer in range(n_layers):
            library(call, layers, layer, c.byref(rows_of), c.byref(args), c.byref(execution))
        library("commit", slots, c.byref(rows_of), c.byref(commit), c.byref(execution))

    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        model_step()
        torch.cuda.synchronize()
        graph.capture_begin()
        model_step()
        graph.capture_end()
        # Past the first, uneven cycle; then whole cycles.
        for _ in range(2 * window):
            graph.replay()
        steps = 4 * window
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        for _ in range(steps):
            graph.replay()
        end.record()
    torch.cuda.synchronize()
    if not torch.isfinite(kept[-1].float()).all():
        raise RuntimeError("outputs are not finite")
    del graph
    library.lib.replayssm_layers_destroy(layers)
    library.lib.replayssm_slots_destroy(slots)
    library.lib.replayssm_context_destroy(context)
    return begin.elapsed_time(end) * 1e3 / steps / n_layers


def time_bookkeeping(library, batch=512, repeats=50):
    """us of a commit, and of a snapshot of 24 layers with nothing due: many of them in one graph, and what an empty kernel takes."""
    context = library.create("context", c.byref(filled(Context, backend=BACKEND_CUDA)))
    slots = library.create("slots", context, c.byref(filled(Slots, n_slots=batch)))
    pool = filled(Pool, family=MAMBA2, n_layers=24, io=BF16, nheads=8, headdim=64, dstate=128, ngroups=8)
    layers = library.create("layers", slots, c.byref(pool), None, 0)
    ids, at = torch.arange(batch, device="cuda", dtype=torch.int32), torch.full((batch,), 1 << 40, device="cuda")
    of_ids = Ids(ids.data_ptr(), 1, I32, 0)
    rows = filled(Batch, n_rows=batch, tokens=1, slots=of_ids)
    snapshot = filled(Snapshot, at=at.data_ptr(), dst=of_ids)
    stream = torch.cuda.Stream()
    execution = filled(Exec, stream=stream.cuda_stream)
    empty = torch.zeros(1, device="cuda")
    calls = {"commit": lambda: library("commit", slots, c.byref(rows), None, c.byref(execution)),
             "snapshot": lambda: library("snapshot", slots, c.byref(rows), c.byref(snapshot), c.byref(execution)),
             "empty kernel": lambda: empty.add_(1)}
    times = {}
    for name, call in calls.items():
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(stream):
            call()
            torch.cuda.synchronize()
            graph.capture_begin()
            for _ in range(repeats):
                call()
            graph.capture_end()
            graph.replay()
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            for _ in range(20):
                graph.replay()
            end.record()
        torch.cuda.synchronize()
        times[name] = begin.elapsed_time(end) * 1e3 / 20 / repeats
        del graph
    library.lib.replayssm_layers_destroy(layers)
    library.lib.replayssm_slots_destroy(slots)
    library.lib.replayssm_context_destroy(context)
    return times


def read_stream():
    """TB/s of a sum over 2 GiB."""
    data = torch.ones(1 << 29, device="cuda")
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    data.sum()
    begin.record()
    for _ in range(10):
        data.sum()
    end.record()
    torch.cuda.synchronize()
    return 10 * data.numel() * 4 / (begin.elapsed_time(end) * 1e-3) / 1e12


WAYS = [("plain F32", 1, 16, FORMAT_F32, EXACT, True), ("F32 FULL", 1, 16, FORMAT_F32, FULL, False),
        ("HIGH", 1, 16, SPLIT32, HIGH, False), ("F32 EXACT", 1, 16, FORMAT_F32, EXACT, False),
        ("HIGH T 4", 4, 32, SPLIT32, HIGH, False), ("HIGH T 8", 8, 64, SPLIT32, HIGH, False)]
SHAPES = [("Mamba-2 128 x 64 x 128, 8 groups", MAMBA2, (128, 64, 128, 8)), ("GDN 16 / 64 x 128 x 128", GDN, (16, 64, 128, 128)),
          ("KDA 32 x 128 x 128", KDA, (32, 32, 128, 128))]


def main():
    torch.manual_seed(1)
    library = Library(sys.argv[1] if len(sys.argv) > 1 else "target/release/libreplayssm.so")
    print(f"{torch.cuda.get_device_name()}, read stream {read_stream():.2f} TB/s; us per layer and step")
    times = time_bookkeeping(library)
    print("batch 512: " + ", ".join(f"{name} {us:.2f}" for name, us in times.items()))
    print(f"{'':34}{'batch':>6}" + "".join(f"{name:>11}" for name, *_ in WAYS))
    for name, family, shape in SHAPES:
        for batch in (1, 32, 256):
            times = [time_steps(library, family, shape, batch, *way) for _, *way in WAYS]
            print(f"{name:34}{batch:6}" + "".join(f"{us:11.1f}" for us in times), flush=True)


if __name__ == "__main__":
    main()
