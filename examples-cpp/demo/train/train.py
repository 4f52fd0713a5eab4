"""Trains the demo's byte-level model on five Austen novels and writes austen.safetensors.

    python3 train.py austen.npz --out out --minutes 7

1. The model: AdamW over streams of text with carried state, cosine schedule over the time (or --steps) given,
   dropout, an average of the weights; the best average by validation text is kept and exported on the way.
   The draft head learns along by distillation; a small part of its gradient reaches the model.
2. The draft head alone, on text that the exported model generates at the temperatures of --temperatures. With
   --draft-only FILE, only this, for the model of that file.

measure.py completes the file.
"""

import argparse
import math
import pathlib
import time

import numpy as np
import torch
import torch.nn.functional as F

from export import export_tensors, load_into, read_file, write_file
from measure import BITS, SEGMENT, parallel_bpb
from model import MODEL, Model
from reference import Reference, generate
from text import EXCERPT_BYTES

STREAM_SEGMENTS = 16    # a stream restarts elsewhere, from a zero state, after this many segments
TRUNK_SHARE = 0.8       # of the time given, the rest trains the draft head
VALIDATION_STREAM = 4096


def precise(on):
    """TF32 is good enough to train with, not to measure with."""
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = not on


def as_graph(run, device):
    """On a GPU, `run` as one CUDA graph: its kernels without the time that launching each takes."""
    if device != "cuda":
        return run
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay


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
    """Cross-entropy of the head to the model's own distribution of the byte it guesses, and the drafts accepted per step.

    Model and head sample with the same noise: P(both choose v) = 1 / sum_u max(p_u / p_v, q_u / q_v). `accepted` is their
    expected number on text that the model has sampled: m_1 + m_1 m_2 + m_1 m_2 m_3, m_i = P(the head chooses v | the model did).
    """
    k, t = MODEL["draft_tokens"], hidden.shape[1]
    s, ce, accepted, run = hidden[:, : t - k], 0.0, 0.0, 1.0
    for i in range(1, k + 1):
        s, logits = draft(s, text[:, i : t - k + i], embedding)
        p, q = teacher[:, i : t - k + i], F.log_softmax(logits / temperature, -1)
        ce = ce - (p * q).sum(-1).mean() / k
        v = text[:, i + 1 : t - k + i + 1, None]
        run = run / torch.maximum(p, p.gather(-1, v) * (q - q.gather(-1, v)).clamp(max=60).exp()).sum(-1)
        accepted = accepted + run.mean()
    return ce, accepted


def train_model(args, device, text, validation, export):
    torch.manual_seed(args.seed)
    model, average = Model(dropout=args.dropout).to(device), Model().to(device).eval()
    average.load_state_dict(model.state_dict())
    matrices = [p for n, p in model.named_parameters() if p.dim() == 2 and "conv" not in n]
    others = [p for n, p in model.named_parameters() if not (p.dim() == 2 and "conv" not in n)]
    optimizer = torch.optim.AdamW([dict(params=matrices, weight_decay=args.weight_decay), dict(params=others, weight_decay=0.0)],
                                  lr=args.lr, betas=(0.9, 0.98), fused=device == "cuda")
    if args.compile:
        for layer in model.layers:
            layer.compile()

    # What a step reads and leaves, at fixed places: a CUDA graph has no arguments.
    streams = Streams(text, args.batch, device)
    state, before = model.zero_state(args.batch), time.monotonic()
    batch, keep = torch.zeros(args.batch, SEGMENT + 1, dtype=torch.long, device=device), torch.zeros(args.batch, device=device)
    loss, draft_loss = torch.zeros(2, device=device)

    def gradients():
        optimizer.zero_grad(set_to_none=True)
        kept = [[s * keep.view(-1, *[1] * (s.dim() - 1)) for s in layer] for layer in state]
        hidden, after = model(batch[:, :SEGMENT], kept, args.chunk)
        logits = model.logits(hidden)
        ce = F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        scaled = args.draft_gradient * hidden + (1 - args.draft_gradient) * hidden.detach()
        draft_ce, _ = draft_losses(model.draft, scaled, batch, model.embedding.detach(), logits.detach().softmax(-1))
        (ce + draft_ce).backward()
        with torch.no_grad():
            for old, new in zip(state, after):
                torch._foreach_copy_(old, new)
            loss.copy_(ce), draft_loss.copy_(draft_ce)

    precise(False)
    run = as_graph(gradients, device)
    print(f"ready after {time.monotonic() - before:.1f} s", flush=True)
    start, step, best, recent, next_evaluation = time.monotonic(), 0, (math.inf, None), [], 0.05
    while True:
        if device == "cuda" and step % 16 == 0:
            torch.cuda.synchronize()  # so that the clock sees the work, not its queue
        seconds = time.monotonic() - start
        done = step / args.steps if args.steps else seconds / (60 * args.minutes * TRUNK_SHARE)
        if done >= next_evaluation or done >= 1:
            next_evaluation = done + 0.05
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

        for place, value in zip((batch, keep), streams.next()):
            place.copy_(value)
        run()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        with torch.no_grad():
            rate = min(args.average, (step + 1) / (step + 10))
            torch._foreach_lerp_(list(average.parameters()), list(model.parameters()), 1 - rate)
        recent.append(loss.clone())
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

    def losses(rows):
        hidden, t = hiddens[rows], temperature[rows, None]
        teacher = (F.linear(hidden, embedding) / t).softmax(-1)
        return draft_losses(draft, hidden, texts[rows], embedding, teacher, t)

    def gradients():
        optimizer.zero_grad(set_to_none=True)
        ce, accepted = losses(torch.randint(held, len(texts), (args.draft_rows,), device=device))
        (ce - accepted).backward()

    def report(step):
        with torch.no_grad():
            ce, accepted = losses(torch.arange(held, device=device))
        print(f"draft step {step:6}  on unseen rows: cross-entropy {ce.item() * BITS:.4f} bits, "
              f"{accepted.item():.4f} drafts accepted per position", flush=True)

    run = as_graph(gradients, device)
    seconds, start, step = 60 * args.minutes * (1 if args.draft_only else 1 - TRUNK_SHARE), time.monotonic(), 0
    while True:
        if device == "cuda" and step % 16 == 0:
            torch.cuda.synchronize()
        done = step / args.draft_steps if args.steps else (time.monotonic() - start) / seconds
        if step % 2000 == 0 or done >= 1:
            report(step)
        if done >= 1:
            break
        for group in optimizer.param_groups:
            group["lr"] = args.draft_lr * min(1.0, (step + 1) / 100) * (0.02 + 0.98 * (1 + math.cos(math.pi * done)) / 2)
        run()
        torch.nn.utils.clip_grad_norm_(draft.parameters(), 1.0)
        optimizer.step()
        step += 1
    export(model)
    return step


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("data", help="the .npz of text.py")
    add("--out", required=True, help="folder for austen.safetensors")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    add("--minutes", type=float, default=7.0, help="of training, model and draft head")
    add("--draft-only", type=pathlib.Path, metavar="FILE", help="train only the head of this file's model")
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
    add("--validation-streams", type=int, default=48)
    add("--compile", action="store_true")
    add("--seed", type=int, default=1)
    args = parser.parse_args()

    torch.set_num_threads(min(4, torch.get_num_threads()))
    started, out = time.monotonic(), pathlib.Path(args.out)
    out.mkdir(parents=True, exist_ok=True)
    path, device = out / "austen.safetensors", args.device
    data = np.load(args.data)
    text = torch.from_numpy(data["train"]).to(device)
    validation = torch.from_numpy(data["heldout"][EXCERPT_BYTES:]).long()
    n = min(args.validation_streams, len(validation) // VALIDATION_STREAM)
    validation = validation[: n * VALIDATION_STREAM].view(n, VALIDATION_STREAM)
    shown = {k: v for k, v in vars(args).items() if v != parser.get_default(k) and k not in ("data", "out", "device", "draft_only")}
    command = "train.py austen.npz --out OUT" + (" --draft-only FILE" if args.draft_only else "") + "".join(
        f" --{k.replace('_', '-')}" + ("" if v is True else f" {' '.join(map(str, v)) if isinstance(v, list) else v}") for k, v in shown.items())
    print(f"{command}\ntrain {len(text)} bytes, validation {validation.numel()}, on {device}", flush=True)
    export = lambda model: write_file(path, export_tensors(model), {"training_command": command})
    if args.draft_only:
        tensors, metadata = read_file(args.draft_only)
        command = f"{metadata['training_command']}; {command}"
        head_of = lambda model: {k: v for k, v in export_tensors(model).items() if k.startswith("draft.")}
        export = lambda model: write_file(path, tensors | head_of(model), {"training_command": command})
        train_draft(args, device, load_into(Model().to(device), tensors), text, export)
        return
    model, run = train_model(args, device, text, validation, export)
    draft_steps = train_draft(args, device, model, text, export)
    for name, value in [
        ("steps, epochs; draft steps", f"{run['steps']}, {run['epochs']:.2f}; {draft_steps}"),
        ("seconds: model; all", f"{run['seconds']:.0f}; {time.monotonic() - started:.0f}"),
        ("train bits per byte, last", f"{run['train']:.4f}"), ("validation bits per byte, best", f"{run['validation']:.4f}"),
        ("file bytes", path.stat().st_size),
    ]:
        print(f"{name:40}{value}")


if __name__ == "__main__":
    main()
