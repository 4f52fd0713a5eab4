"""Trains the demo's byte-level model on five Austen novels and writes austen.safetensors.

    python3 train.py austen.npz --out out --minutes 6

1. The model: AdamW over streams of text with carried state, cosine schedule over the time (or --steps) given,
   dropout, an average of the weights; the best average by validation text is kept and exported on the way.
   The draft head learns along by distillation; a small part of its gradient reaches the model.
2. The draft head alone, on text that the exported model generates at the temperatures of --temperatures.
3. From the file as written, one byte at a time on the CPU: bits per byte, logits of the first 64 held-out
   bytes, accepted drafts per step; into the file's metadata, and a table.
"""

import argparse
import base64
import json
import math
import os
import pathlib
import time

import numpy as np
import torch
import torch.nn.functional as F
from safetensors import safe_open
from safetensors.torch import save_file

from model import MODEL, Model
from reference import Reference, accepted_drafts, generate, gumbel
from text import EXCERPT_BYTES

SEGMENT = 512           # bytes between two detachments of the carried state
BPB_BYTES = 16384       # held-out bytes that bits per byte is measured on, in one run from a zero state
STREAM_SEGMENTS = 16    # a stream restarts elsewhere, from a zero state, after this many segments
TRUNK_SHARE = 0.8       # of the time given, the rest trains the draft head
VALIDATION_STREAM = 4096
MAX_FILE_BYTES = 3_000_000
BITS = 1 / math.log(2)


# ---- the file ---------------------------------------------------------------------------------------------

def export_tensors(model):
    """The file's tensors: matrices as bf16, vectors as f32; A = -exp(A_log). README.md lists names and shapes."""
    out = {"embedding": model.embedding, "norm": model.norm.weight}
    for i, layer in enumerate(model.layers):
        for name, p in layer.named_parameters():
            name = name.removesuffix("norm.weight") + "norm" if name.endswith("norm.weight") else name.removesuffix(".weight")
            out[f"layers.{i}.{name}"] = p
        if f"layers.{i}.A_log" in out:
            out[f"layers.{i}.A"] = -out.pop(f"layers.{i}.A_log").exp()
    for name, p in model.draft.named_parameters():
        out["draft." + name.removesuffix(".weight").replace(".bias", "_bias")] = p
    return {k: v.detach().cpu().to(torch.bfloat16 if v.dim() == 2 else torch.float32).contiguous() for k, v in out.items()}


def load_into(model, tensors):
    """The inverse of export_tensors: the model with the rounded weights."""
    params = dict(model.named_parameters())
    with torch.no_grad():
        for name, value in tensors.items():
            value = value.to(next(iter(params.values())).dtype)
            if name.endswith(".A"):
                name, value = name + "_log", (-value).log()
            target = name if name in params else name.replace("_bias", ".bias") if name == "draft.up_bias" else name + ".weight"
            params.pop(target).copy_(value)
    if params:
        raise ValueError(f"the file lacks {sorted(params)}")
    return model


def write_file(path, tensors, metadata):
    partial = path.with_suffix(".partial")
    save_file(tensors, partial, metadata=metadata)
    os.chmod(partial, 0o644)
    os.replace(partial, path)


def read_file(path):
    with safe_open(path, "pt") as f:
        return {k: f.get_tensor(k) for k in f.keys()}, f.metadata()


def base64_of(array):
    return base64.b64encode(np.ascontiguousarray(array).tobytes()).decode()


# ---- measures ---------------------------------------------------------------------------------------------

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


def precise(on):
    """TF32 is good enough to train with, not to measure with."""
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = not on


# ---- 1. the model -----------------------------------------------------------------------------------------

class Streams:
    """Batch rows that walk through the text; `keep` is 0 where a row starts afresh."""

    def __init__(self, text, batch, device):
        self.text, self.batch, self.device = text, batch, device
        self.at = torch.zeros(batch, dtype=torch.long)
        self.left = torch.zeros(batch, dtype=torch.long)
        self.first = True

    def next(self):
        fresh = self.left == 0
        n = int(fresh.sum())
        self.at[fresh] = torch.randint(len(self.text) - STREAM_SEGMENTS * SEGMENT - 1, (n,))
        self.left[fresh] = torch.randint(1, STREAM_SEGMENTS + 1, (n,)) if self.first else STREAM_SEGMENTS
        self.first = False
        at = self.at.to(self.device, non_blocking=True)
        text = self.text[at[:, None] + torch.arange(SEGMENT + 1, device=self.device)].long()
        self.at, self.left = self.at + SEGMENT, self.left - 1
        return text, (~fresh).float().to(self.device, non_blocking=True)


def draft_losses(draft, hidden, text, embedding, teacher, temperature=1.0):
    """Cross-entropy of the head to the model's own distribution of the byte it guesses, and total variation."""
    k, t = MODEL["draft_tokens"], hidden.shape[1]
    s, ce, tv = hidden[:, : t - k], 0.0, 0.0
    for i in range(1, k + 1):
        s, logits = draft(s, text[:, i : t - k + i], embedding)
        p, q = teacher[:, i : t - k + i], F.log_softmax(logits / temperature, -1)
        ce = ce - (p * q).sum(-1).mean() / k
        tv = tv + (p - q.exp()).abs().sum(-1).mean() / (2 * k)
    return ce, tv


def train_model(args, device, text, validation, export):
    torch.manual_seed(args.seed)
    model, average = Model(dropout=args.dropout).to(device), Model().to(device).eval()
    average.load_state_dict(model.state_dict())
    matrices = [p for n, p in model.named_parameters() if p.dim() == 2 and "conv" not in n]
    others = [p for n, p in model.named_parameters() if not (p.dim() == 2 and "conv" not in n)]
    optimizer = torch.optim.AdamW([dict(params=matrices, weight_decay=args.weight_decay), dict(params=others, weight_decay=0.0)],
                                  lr=args.lr, betas=(0.9, 0.98), fused=device == "cuda")
    forward = torch.compile(model) if args.compile else model

    def loss_of(text, state):
        hidden, state = forward(text[:, :SEGMENT], state, args.chunk)
        logits = model.logits(hidden)
        loss = F.cross_entropy(logits.flatten(0, 1), text[:, 1:].flatten())
        scaled = args.draft_gradient * hidden + (1 - args.draft_gradient) * hidden.detach()
        ce, _ = draft_losses(model.draft, scaled, text, model.embedding.detach(), logits.detach().softmax(-1))
        return loss, ce, state

    streams, state = Streams(text, args.batch, device), model.zero_state(args.batch)
    start, step, best, recent, draft_loss, next_evaluation = time.monotonic(), 0, (math.inf, None), [], None, 0.04
    while True:
        if device == "cuda" and step % 16 == 0:
            torch.cuda.synchronize()  # so that the clock sees the work, not its queue
        seconds = time.monotonic() - start
        done = step / args.steps if args.steps else seconds / (60 * args.minutes * TRUNK_SHARE)
        if done >= next_evaluation or done >= 1:
            next_evaluation = done + 0.04
            precise(True)
            bpb = parallel_bpb(average, validation, device)
            precise(False)
            train_bpb = torch.stack(recent).mean().item() * BITS
            recent.clear()
            print(f"step {step:6}  {seconds:6.1f} s  epochs {step * args.batch * SEGMENT / len(text):6.2f}  "
                  f"train {train_bpb:.4f} (draft {draft_loss.item() * BITS:.4f})  validation {bpb:.4f} bits per byte", flush=True)
            if bpb < best[0]:
                best = (bpb, {k: v.clone() for k, v in average.state_dict().items()})
                export(average)
            if done >= 1:
                break
        warmup = min(1.0, (step + 1) / 200) if not args.steps else min(1.0, (step + 1) / (0.05 * args.steps + 1))
        for group in optimizer.param_groups:
            group["lr"] = args.lr * warmup * (0.02 + 0.98 * (1 + math.cos(math.pi * min(done, 1))) / 2)

        batch, keep = streams.next()
        state = [[s.detach() * keep.view(-1, *[1] * (s.dim() - 1)) for s in layer] for layer in state]
        loss, draft_loss, state = loss_of(batch, state)
        (loss + draft_loss).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        with torch.no_grad():
            rate = min(args.average, (step + 1) / (step + 10))
            torch._foreach_lerp_(list(average.parameters()), list(model.parameters()), 1 - rate)
        recent.append(loss.detach())
        step += 1
    average.load_state_dict(best[1])
    return average, dict(steps=step, seconds=seconds, epochs=step * args.batch * SEGMENT / len(text), validation=best[0], train=train_bpb)


# ---- 2. the draft head ------------------------------------------------------------------------------------

def train_draft(args, device, model, text, export):
    """The model is fixed, as exported; its own generated text and hidden states are the data."""
    precise(True)
    start = time.monotonic()
    ref = Reference(export_tensors(model), MODEL, device)
    temperature = torch.tensor(args.temperatures, device=device).repeat(args.rows)[: args.rows, None]
    texts, hiddens = [], []
    for _ in range(args.rounds):
        at = torch.randint(len(text) - 65, (args.rows, 1), device=device)
        prompts = text[at + torch.arange(64, device=device)].long()
        noise = lambda position: -torch.log(-torch.log(torch.rand(args.rows, 256, device=device).clamp(1e-7, 1 - 1e-7)))
        t, h = generate(ref, prompts, args.row_bytes, temperature, noise)
        texts.append(t), hiddens.append(h)
    texts, hiddens, temperature = torch.cat(texts), torch.cat(hiddens), temperature.repeat(args.rounds, 1)
    print(f"generated {texts.numel()} bytes in {time.monotonic() - start:.1f} s", flush=True)

    precise(False)
    embedding, draft = ref.w["embedding"], model.draft
    optimizer = torch.optim.AdamW(draft.parameters(), lr=args.draft_lr, betas=(0.9, 0.99), weight_decay=0.01, fused=device == "cuda")
    held = max(1, len(texts) // 32)  # rows that only measure
    start, step = time.monotonic(), 0
    while True:
        if device == "cuda" and step % 16 == 0:
            torch.cuda.synchronize()
        done = step / args.draft_steps if args.steps else (time.monotonic() - start) / (60 * args.minutes * (1 - TRUNK_SHARE))
        training = done < 1
        rows = torch.randint(held, len(texts), (args.draft_rows,), device=device) if training else torch.arange(held, device=device)
        hidden, t = hiddens[rows], temperature[rows, None]
        teacher = (F.linear(hidden, embedding) / t).softmax(-1)
        ce, tv = draft_losses(draft, hidden, texts[rows], embedding, teacher, t)
        if not training or step % 1000 == 0:
            print(f"draft step {step:6}  cross-entropy {ce.item() * BITS:.4f} bits, total variation {tv.item():.4f}"
                  f"{'' if training else ' on unseen rows'}", flush=True)
        if not training:
            break
        for group in optimizer.param_groups:
            group["lr"] = args.draft_lr * min(1.0, (step + 1) / 100) * (0.02 + 0.98 * (1 + math.cos(math.pi * done)) / 2)
        (ce + tv).backward()
        torch.nn.utils.clip_grad_norm_(draft.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        step += 1
    export(model)
    return step


# ---- 3. the file as written -------------------------------------------------------------------------------

def measure_drafts(args, ref, excerpt):
    """Accepted drafts per step at each temperature: prompts of the held-out novel, position-keyed noise."""
    rng = np.random.default_rng(args.seed)
    at = rng.integers(0, len(excerpt) - 64, args.prompts)
    prompts = torch.stack([excerpt[a : a + 64] for a in at.tolist()])
    noise = torch.stack([gumbel(seed, range(64 + args.generate)) for seed in range(args.prompts)])
    results = {}
    for temperature in args.temperatures:
        text, hidden = generate(ref, prompts, args.generate, temperature, lambda p: noise[:, p])
        steps = accepted_drafts(ref, text, hidden, 63, temperature, noise)
        generated = bytes(text[:, 64:].flatten().tolist())
        repeated = 1 - len({generated[i : i + 40] for i in range(0, len(generated) - 40)}) / max(1, len(generated) - 40)
        results[temperature] = (float(np.mean(steps)), len(steps), repeated, text[0])
        print(f"temperature {temperature}: {np.mean(steps):.3f} drafts accepted per step over {len(steps)} steps; "
              f"{100 * repeated:.1f} % of 40-byte strings repeat", flush=True)
    return results


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("data", help="the .npz of text.py")
    add("--out", required=True, help="folder for austen.safetensors")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    add("--minutes", type=float, default=6.0, help="of training, model and draft head; measuring comes on top")
    add("--steps", type=int, help="of the model, instead of --minutes")
    add("--draft-steps", type=int, default=10000, help="of the draft head, with --steps")
    add("--batch", type=int, default=32)
    add("--chunk", type=int, default=64)
    add("--lr", type=float, default=3e-3)
    add("--weight-decay", type=float, default=0.1)
    add("--dropout", type=float, default=0.1)
    add("--average", type=float, default=0.998, help="rate of the weight average")
    add("--draft-gradient", type=float, default=0.1, help="share of the head's gradient that reaches the model")
    add("--draft-lr", type=float, default=2e-3)
    add("--draft-rows", type=int, default=64)
    add("--rows", type=int, default=2048, help="generated texts per round, for the head")
    add("--row-bytes", type=int, default=512)
    add("--rounds", type=int, default=3)
    add("--temperatures", type=float, nargs="+", default=[0.7, 0.6, 0.5, 0.4])
    add("--accept", type=float, default=1.95, help="drafts per step that the demo's temperature must reach here")
    add("--prompts", type=int, default=16)
    add("--generate", type=int, default=2000)
    add("--validation-streams", type=int, default=48)
    add("--compile", action="store_true")
    add("--seed", type=int, default=1)
    args = parser.parse_args()

    torch.set_num_threads(min(4, torch.get_num_threads()))  # one byte at a time, more threads only wait
    started, out = time.monotonic(), pathlib.Path(args.out)
    out.mkdir(parents=True, exist_ok=True)
    path, device = out / "austen.safetensors", args.device
    data = np.load(args.data)
    text = torch.from_numpy(data["train"]).to(device)
    excerpt = torch.from_numpy(data["heldout"][:EXCERPT_BYTES]).long()
    validation = torch.from_numpy(data["heldout"][EXCERPT_BYTES:]).long()
    n = min(args.validation_streams, len(validation) // VALIDATION_STREAM)
    validation = validation[: n * VALIDATION_STREAM].view(n, VALIDATION_STREAM)
    shown = {k: v for k, v in vars(args).items() if v != parser.get_default(k) and k not in ("data", "out", "device")}
    command = "train.py austen.npz --out OUT" + "".join(
        f" --{k.replace('_', '-')}" + ("" if v is True else f" {' '.join(map(str, v)) if isinstance(v, list) else v}") for k, v in shown.items())
    print(f"{command}\ntrain {len(text)} bytes, validation {validation.numel()}, excerpt {len(excerpt)}, on {device}", flush=True)

    def metadata_of(ref, temperature, **more):
        logits = sequential_logits(ref, excerpt[:64]).float().numpy()
        return dict(config=json.dumps(MODEL), temperature=str(temperature), training_command=command,
                    license="MIT OR Apache-2.0", bytes64=base64_of(excerpt[:64].numpy().astype(np.uint8)),
                    logits64=base64_of(logits.astype("<f4")), **{k: str(v) for k, v in more.items()})

    def export(model):
        tensors = export_tensors(model)
        write_file(path, tensors, metadata_of(Reference(tensors, MODEL), args.temperatures[-1]))

    precise(False)
    model, run = train_model(args, device, text, validation, export)
    run["draft_steps"] = train_draft(args, device, model, text, export)
    trained = time.monotonic() - started

    precise(True)
    tensors, _ = read_file(path)
    n_params = sum(v.numel() for v in tensors.values())
    rounded = load_into(Model().to(device).eval(), tensors)
    excerpt_bpb = parallel_bpb(rounded, excerpt[None], device)
    ref = Reference(tensors, MODEL)
    logits = sequential_logits(ref, excerpt[:BPB_BYTES])
    bpb = bits_per_byte(logits, excerpt[:BPB_BYTES])

    # Parallel and sequential forms in fp64 are the same function; fp32 differs by what its rounding does to
    # values next to a bf16 tie, which is also what another fp32 implementation may differ by.
    double = load_into(Model().double().eval(), tensors)
    with torch.no_grad():
        hidden, state = double(excerpt[None, :SEGMENT], double.zero_state(1))
        hidden2, _ = double(excerpt[None, SEGMENT : 2 * SEGMENT], state)
        parallel = double.logits(torch.cat([hidden, hidden2], 1))[0]
    sequential = sequential_logits(Reference(tensors, MODEL, dtype=torch.float64), excerpt[: 2 * SEGMENT])
    form_difference = (parallel - sequential).abs().max().item()
    fp32_difference = (logits[: 2 * SEGMENT] - sequential).abs()
    if form_difference > 1e-6:
        raise SystemExit(f"the parallel and the sequential form differ by {form_difference}")

    drafts = measure_drafts(args, ref, excerpt)
    enough = [t for t in args.temperatures if drafts[t][0] >= args.accept]
    temperature = max(enough) if enough else max(args.temperatures, key=lambda t: drafts[t][0])
    accepted, n_steps, repeated, sample = drafts[temperature]
    write_file(path, tensors, metadata_of(
        ref, temperature, bpb_bytes=BPB_BYTES, bpb=f"{bpb:.6f}", bpb_excerpt=f"{excerpt_bpb:.6f}", drafts_per_step=f"{accepted:.4f}"))

    again, metadata = read_file(path)
    stored = torch.from_numpy(np.frombuffer(base64.b64decode(metadata["logits64"]), "<f4").reshape(64, 256).copy())
    reload_difference = (sequential_logits(Reference(again, MODEL), excerpt[:64]) - stored).abs().max().item()
    size = path.stat().st_size
    print("\nsample at temperature", temperature, "\n" + bytes(sample[:664].tolist()).decode("utf-8", "replace"), "\n")
    rows = [
        ("parameters", n_params), ("file bytes", size),
        ("steps, epochs", f"{run['steps']}, {run['epochs']:.2f}"), ("draft steps", run["draft_steps"]),
        ("training seconds (all)", f"{trained:.0f}"), ("all seconds", f"{time.monotonic() - started:.0f}"),
        ("train bits per byte, last", f"{run['train']:.4f}"), ("validation bits per byte, best", f"{run['validation']:.4f}"),
        (f"held-out bits per byte, {BPB_BYTES} bytes, sequential", f"{bpb:.4f}"),
        (f"held-out bits per byte, {len(excerpt)} bytes, parallel", f"{excerpt_bpb:.4f}"),
        ("logits, parallel - sequential, fp64", f"{form_difference:.2e}"),
        ("logits, fp32 - fp64, largest / mean", f"{fp32_difference.max():.2e} / {fp32_difference.mean():.2e}"),
        ("logits64 from the file again", f"{reload_difference:.2e}"),
        *[(f"drafts accepted per step at temperature {t}", f"{v[0]:.3f}") for t, v in drafts.items()],
        ("temperature", temperature), ("within limits", f"size {size <= MAX_FILE_BYTES}, drafts {accepted >= args.accept}, bits {bpb < 2.2}"),
    ]
    for name, value in rows:
        print(f"{name:52}{value}")


if __name__ == "__main__":
    main()
