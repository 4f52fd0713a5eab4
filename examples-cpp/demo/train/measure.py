"""Measures austen.safetensors on held-out text, on the CPU, and writes the figures into its metadata.

    python3 measure.py austen.npz out/austen.safetensors

From the file as written, one byte at a time: logits of the first 64 held-out bytes, bits per byte with states in
fp32, bf16 and fp64, accepted drafts per step at several temperatures, of which the model keeps one.
"""

import argparse
import base64
import math
import pathlib

import numpy as np
import torch
import torch.nn.functional as F

from export import base64_of, load_into, read_file, write_file
from model import MODEL, Model
from reference import Reference, accepted_drafts, generate, gumbel
from text import EXCERPT_BYTES

SEGMENT = 512           # bytes between two detachments of the carried state
BPB_BYTES = 16384       # held-out bytes that bits per byte is measured on, in one run from a zero state
MAX_FILE_BYTES = 4_000_000
BITS = 1 / math.log(2)


@torch.no_grad()
def parallel_bpb(model, streams, device):
    """Bits per byte of [b, n] bytes, each row from a zero state, over all but its first byte."""
    state, nats, n = model.zero_state(len(streams)), 0.0, 0
    for at in range(0, streams.shape[1] - SEGMENT + 1, SEGMENT):
        text = streams[:, at : at + SEGMENT + 1].to(device)
        hidden, state = model(text[:, :SEGMENT], state)
        m = text.shape[1] - 1
        nats += F.cross_entropy(model.logits(hidden[:, :m]).flatten(0, 1), text[:, 1:].flatten(), reduction="sum").item()
        n += m * len(text)
    return nats / n * BITS


@torch.no_grad()
def sequential_logits(ref, text):
    state = ref.zero_state(1)
    return torch.cat([ref.logits(ref.step(byte[None], state)) for byte in text])


def bits_per_byte(logits, text):
    """logits[t] was computed after text[t] and predicts text[t + 1]."""
    return F.cross_entropy(logits[:-1].double(), text[1:]).item() * BITS


def measure_drafts(args, ref, excerpt):
    """Accepted drafts per step at each temperature: prompts of the held-out novel, position-keyed noise."""
    rng = np.random.default_rng(1)
    at = rng.integers(0, len(excerpt) - 64, args.prompts)
    prompts = torch.stack([excerpt[a : a + 64] for a in at.tolist()])
    noise = torch.stack([gumbel(seed, range(64 + args.generate)) for seed in range(args.prompts)])
    results = {}
    for temperature in args.temperatures:
        text, hidden = generate(ref, prompts, args.generate, temperature, lambda p: noise[:, p])
        steps = accepted_drafts(ref, text, hidden, 63, temperature, noise)
        generated = bytes(text[:, 64:].flatten().tolist())
        repeated = 1 - len({generated[i : i + 40] for i in range(0, len(generated) - 40)}) / max(1, len(generated) - 40)
        results[temperature] = (float(np.mean(steps)), text[0])
        print(f"temperature {temperature}: {np.mean(steps):.3f} drafts accepted per step over {len(steps)} steps; "
              f"{100 * repeated:.1f} % of 40-byte strings repeat", flush=True)
    return results


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("data", help="the .npz of text.py")
    add("file", type=pathlib.Path, help="austen.safetensors, which is rewritten")
    add("--temperatures", type=float, nargs="+", default=[0.7, 0.6, 0.5, 0.4])
    add("--accept", type=float, default=2.25, help="drafts per step that the demo's temperature must reach here")
    add("--prompts", type=int, default=16)
    add("--generate", type=int, default=2000)
    add("--bpb-bytes", type=int, default=BPB_BYTES)
    args = parser.parse_args()
    torch.set_num_threads(1)  # one byte at a time, more threads only wait

    excerpt = torch.from_numpy(np.load(args.data)["heldout"][:EXCERPT_BYTES]).long()
    tensors, metadata = read_file(args.file)
    scored, ref = excerpt[: args.bpb_bytes], Reference(tensors, MODEL)
    rows = [("parameters", sum(v.numel() for v in tensors.values()))]

    # Parallel and sequential forms in fp64 are the same function; fp32 differs by what its rounding does to
    # values next to a bf16 tie, which is also what another fp32 implementation may differ by.
    double = load_into(Model().double().eval(), tensors)
    with torch.no_grad():
        hidden, state = double(excerpt[None, :SEGMENT], double.zero_state(1))
        hidden2, _ = double(excerpt[None, SEGMENT : 2 * SEGMENT], state)
        parallel = double.logits(torch.cat([hidden, hidden2], 1))[0]
    sequential = sequential_logits(Reference(tensors, MODEL, dtype=torch.float64), excerpt[: 2 * SEGMENT])
    difference = (parallel - sequential).abs().max().item()
    if difference > 1e-6:
        raise SystemExit(f"the parallel and the sequential form differ by {difference}")
    logits = sequential_logits(ref, scored)
    bpb = bits_per_byte(logits, scored)
    fp32 = (logits[: 2 * SEGMENT] - sequential[: len(logits)]).abs()
    rows += [("logits, parallel - sequential, fp64", f"{difference:.1e}"),
             ("logits, fp32 - fp64, largest, mean", f"{fp32.max():.1e}, {fp32.mean():.1e}"),
             (f"bits per byte, {len(scored)} bytes, one at a time", f"{bpb:.4f}")]

    exact = sequential_logits(Reference(tensors, MODEL, state="f64"), scored)
    for state in ("f32", "bf16"):
        other = logits if state == "f32" else sequential_logits(Reference(tensors, MODEL, state=state), scored)
        error = (other - exact).abs()
        rows.append((f"states in {state}: bits per byte; logits - with f64, largest, mean",
                     f"{bits_per_byte(other, scored):.4f}; {error.max():.2f}, {error.mean():.1e}"))
    excerpt_bpb = parallel_bpb(load_into(Model().eval(), tensors), excerpt[None], "cpu")
    rows.append((f"bits per byte, {len(excerpt)} bytes, parallel", f"{excerpt_bpb:.4f}"))

    drafts = measure_drafts(args, ref, excerpt)
    enough = [t for t in args.temperatures if drafts[t][0] >= args.accept]
    temperature = max(enough) if enough else max(args.temperatures, key=lambda t: drafts[t][0])
    accepted, sample = drafts[temperature]
    print("\nsample at temperature", temperature, "\n" + bytes(sample[:664].tolist()).decode("utf-8", "replace"), "\n")
    first = logits[:64].numpy().astype("<f4")
    metadata |= dict(temperature=temperature, bytes64=base64_of(excerpt[:64].numpy().astype(np.uint8)), logits64=base64_of(first),
                     bpb_bytes=len(scored), bpb=f"{bpb:.6f}", bpb_excerpt=f"{excerpt_bpb:.6f}", drafts_per_step=f"{accepted:.4f}")
    write_file(args.file, tensors, metadata)

    again, metadata = read_file(args.file)
    stored = np.frombuffer(base64.b64decode(metadata["logits64"]), "<f4").reshape(64, 256)
    reload_difference = np.abs(sequential_logits(Reference(again, MODEL), excerpt[:64]).numpy() - stored).max()
    size = args.file.stat().st_size
    rows += [*[(f"drafts accepted per step at temperature {t}", f"{v[0]:.3f}") for t, v in drafts.items()],
             ("temperature", temperature), ("file bytes", size), ("logits64 from the file again", f"{reload_difference:.1e}"),
             ("within limits", f"size {size <= MAX_FILE_BYTES}, drafts {accepted >= args.accept}, bits {bpb < 2.2}")]
    for name, value in rows:
        print(f"{name:72}{value}")


if __name__ == "__main__":
    main()
