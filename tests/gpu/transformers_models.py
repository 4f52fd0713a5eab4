#!/usr/bin/env python3
# SPDX-License-Identifier: MIT OR Apache-2.0
"""Models of the transformers package with random weights: their recurrent updates and convolutions answered by the library, token by token.

    python3 tests/gpu/transformers_models.py libreplayssm.so [--cpu] [--break] [Mamba-2 Nemotron-H Qwen3-Next "Kimi Linear"]

Needs a GPU, PyTorch, and transformers 5. --cpu: 24 tokens on the processor, some minutes. --break: one token of the replaced fp32 model is not committed; it must fail.

A prompt runs through the unmodified model, whose states are taken over; then 256 tokens are decoded greedily by it, and
by the same model with its layers' decoding replaced. In fp32 tokens are equal; in bfloat16 up to the first near-tie, of which the margin is printed: by how much
the unmodified model's logit of its token is above that of the other's. Up to there logits differ by rounding alone: some ten products a layer are rounded to 2^-9, eight
layers make that sqrt(80) 2^-9 = 1.7e-2 of their norm, of which twice as much is allowed.
"""

import os
import sys
import types

import torch
import transformers

ROOT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..")
sys.path.insert(0, os.path.join(ROOT, "examples-cpp", "adapters", "pytorch"))
sys.dont_write_bytecode = True

import replayssm_torch as replay  # noqa: E402

DEVICE = "cpu" if "--cpu" in sys.argv else "cuda"
ROWS, PROMPT, TOKENS = 4, 19, 256 if DEVICE == "cuda" else 24
ROUNDING = 3.5e-2
# Of fp32: sums in other orders, some 2^-24 each, through eight layers.
EXACT = 1e-5
# Behind this token nothing is committed.
LOST = TOKENS // 2 if "--break" in sys.argv else None


def mamba2():
    config = transformers.Mamba2Config(
        vocab_size=997, hidden_size=256, num_hidden_layers=4, num_heads=8, head_dim=64, state_size=128, n_groups=2, expand=2, chunk_size=16
    )
    return transformers.Mamba2ForCausalLM(config)


def qwen3_next():
    config = transformers.Qwen3NextConfig(
        vocab_size=997,
        hidden_size=256,
        intermediate_size=256,
        num_hidden_layers=8,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        linear_num_key_heads=4,
        linear_num_value_heads=8,
        linear_key_head_dim=128,
        linear_value_head_dim=128,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=128,
        shared_expert_intermediate_size=128,
        # Experts are chosen by a router, whose near-ties would be others.
        mlp_only_layers=list(range(8)),
    )
    return transformers.Qwen3NextForCausalLM(config)


def nemotron_h():
    config = transformers.NemotronHConfig(
        vocab_size=997,
        hidden_size=256,
        intermediate_size=512,
        layers_block_type=["linear_attention", "mlp", "linear_attention", "mlp", "full_attention", "mlp", "linear_attention", "mlp"],
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        mamba_num_heads=8,
        mamba_head_dim=80,
        n_groups=2,
        chunk_size=16,
    )
    return transformers.NemotronHForCausalLM(config)


def kimi_linear():
    config = transformers.KimiLinearConfig(
        vocab_size=997,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=8,
        num_attention_heads=4,
        num_key_value_heads=4,
        kv_lora_rank=64,
        qk_nope_head_dim=32,
        qk_rope_head_dim=16,
        v_head_dim=32,
        linear_num_heads=4,
        layer_types=(["linear_attention"] * 3 + ["full_attention"]) * 2,
        mlp_layer_types=["dense"] * 8,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    return transformers.KimiLinearForCausalLM(config)


MIXERS = ("Mamba2Mixer", "NemotronHMamba2Mixer", "Qwen3NextGatedDeltaNet", "KimiLinearDeltaAttention")


class Replaced:
    """The library's pools for a model's mixers, and what takes the place of their forward while `batch` is set."""

    def __init__(self, model, path):
        self.mixers = [m for m in model.modules() if type(m).__name__ in MIXERS]
        self.batch = None
        first, n = self.mixers[0], len(self.mixers)
        io = str(model.dtype).rsplit(".", 1)[-1]
        self.slots = replay.Slots(ROWS, window=16, device=None if DEVICE == "cpu" else 0, path=path)
        self.ids = torch.arange(ROWS, device=DEVICE, dtype=torch.int32)
        self.convolutions = replay.Conv1dLayers(self.slots, n, first.conv_dim, first.conv_kernel_size, io=io)
        fmt = "f32" if io == "float32" else None
        if type(first).__name__.endswith("Mamba2Mixer"):
            self.layers = replay.Mamba2Layers(self.slots, n, first.num_heads, first.head_dim, first.ssm_state_size, first.n_groups, io=io, fmt=fmt)
            forward = self.mamba2
        elif type(first).__name__ == "KimiLinearDeltaAttention":
            heads, width = first.num_heads, first.head_dim
            self.layers = replay.DeltaLayers(self.slots, n, heads, heads, width, width, kind="kda", io=io, fmt=fmt)
            forward = self.kimi
        else:
            self.layers = replay.DeltaLayers(
                self.slots, n, first.num_k_heads, first.num_v_heads, first.head_k_dim, first.head_v_dim, io=io, fmt=fmt
            )
            forward = self.delta
        for i, mixer in enumerate(self.mixers):
            mixer.forward = self.instead_of(mixer, mixer.forward, i, forward)

    def instead_of(self, mixer, original, i, forward):
        def choose(_self, hidden_states, *arguments, **named):
            if self.batch is None:
                return original(hidden_states, *arguments, **named)
            return forward(mixer, i, hidden_states)

        return types.MethodType(choose, mixer)

    def take_over(self, cache):
        """States and windows that a prompt has left, [entry, head, K, V] of delta rules."""
        self.slots.reset(self.ids)
        for i, mixer in enumerate(self.mixers):
            held = cache.layers[mixer.layer_idx]
            self.layers.load(i, self.ids, held.recurrent_states[0], transposed=isinstance(self.layers, replay.DeltaLayers))
            window = held.conv_states[0][:, None, :, 1 - mixer.conv_kernel_size :]
            self.convolutions.load(i, self.ids, window)
        self.batch = replay.Batch(self.ids, tokens=1)

    def convolve(self, mixer, i, x):
        x = x.contiguous()
        out = torch.empty_like(x)
        self.convolutions.step(i, self.batch, x[:, :, None], out[:, :, None], mixer.conv1d.weight.squeeze(1), mixer.conv1d.bias)
        return out

    def mamba2(self, m, i, hidden):
        gate, x, dt = m.in_proj(hidden).split([m.intermediate_size, m.conv_dim, m.num_heads], dim=-1)
        width = m.n_groups * m.ssm_state_size
        x, B, C = self.convolve(m, i, x).split([m.intermediate_size, width, width], dim=-1)
        heads, groups = (ROWS, 1, m.num_heads, m.head_dim), (ROWS, 1, m.n_groups, m.ssm_state_size)
        out = torch.empty(heads, device=DEVICE, dtype=hidden.dtype)
        A = -torch.exp(m.A_log.float())
        self.layers.step(i, self.batch, x.view(heads), B.view(groups), C.view(groups), dt, A, D=m.D, dt_bias=m.dt_bias, out=out)
        return m.out_proj(m.norm(out.view(ROWS, 1, -1), gate).to(hidden.dtype))

    def delta(self, m, i, hidden):
        q, k, v, z, b, a = m.fix_query_key_value_ordering(m.in_proj_qkvz(hidden), m.in_proj_ba(hidden))
        mixed = torch.cat([t.reshape(ROWS, 1, -1) for t in (q, k, v)], dim=-1)
        q, k, v = self.convolve(m, i, mixed).split([m.key_dim, m.key_dim, m.value_dim], dim=-1)
        keys, values = (ROWS, 1, m.num_k_heads, m.head_k_dim), (ROWS, 1, m.num_v_heads, m.head_v_dim)
        out = torch.empty(values, device=DEVICE, dtype=hidden.dtype)
        self.layers.step(i, self.batch, q.view(keys), k.view(keys), v.view(values), a.contiguous(), b.contiguous(), m.A_log, m.dt_bias, out)
        return m.out_proj(m.norm(out.reshape(-1, m.head_v_dim), z.reshape(-1, m.head_v_dim)).view(ROWS, 1, -1))

    def kimi(self, m, i, hidden):
        mixed = torch.cat([m.q_proj(hidden), m.k_proj(hidden), m.v_proj(hidden)], dim=-1)
        heads = (ROWS, 1, m.num_heads, m.head_dim)
        q, k, v = (t.view(heads) for t in self.convolve(m, i, mixed).split([m.qkv_dim] * 3, dim=-1))
        gate, of_heads = m.forget_gate, (m.num_heads, m.head_dim)
        g, beta = gate.f_b_proj(gate.f_a_proj(hidden)).view(heads), m.b_proj(hidden)
        out = torch.empty(heads, device=DEVICE, dtype=hidden.dtype)
        self.layers.step(i, self.batch, q, k, v, g, beta, gate.A_log.view(-1), gate.dt_bias.view(of_heads), out)
        return m.o_proj(m.o_norm(out, m.g_b_proj(m.g_a_proj(hidden)).view(heads)).reshape(ROWS, 1, -1))


@torch.no_grad()
def decode(model, prompt, replaced=None):
    """Tokens [row, token] and the logits that chose them."""
    result = model(prompt, use_cache=True)
    cache = getattr(result, "past_key_values", None)
    cache = cache if cache is not None else result.cache_params
    if replaced:
        replaced.take_over(cache)
    tokens, logits = [], []
    last = result.logits[:, -1]
    for t in range(TOKENS):
        logits.append(last.float())
        tokens.append(last.argmax(-1))
        name = "cache_params" if type(model).__name__.startswith("Mamba2") else "past_key_values"
        last = model(tokens[-1][:, None], use_cache=True, **{name: cache}).logits[:, -1]
        if replaced and t != LOST:
            replaced.slots.commit(replaced.batch)
    if replaced:
        assert replaced.slots.check() == 0, "faults"
        replaced.batch = None
    return torch.stack(tokens, 1), torch.stack(logits, 1)


def compare(name, make, dtype, path):
    torch.manual_seed(11)
    model = make().to(dtype).to(DEVICE).eval()
    # Logits of random weights lie close together: as far apart as those of trained ones.
    torch.nn.init.normal_(model.get_output_embeddings().weight, std=0.3)
    prompt = torch.randint(0, 997, (ROWS, PROMPT), device=DEVICE)
    wanted, logits = decode(model, prompt)
    seen, other = decode(model, prompt, Replaced(model, path))
    differ = (wanted != seen).int()
    shape = f"{name}, {str(dtype)[6:]}, {ROWS} rows of {TOKENS} tokens"
    if not differ.any():
        off = float((logits - other).norm() / logits.norm())
        print(f"{shape}: equal; logits differ by {off:.1e}")
        return off < (EXACT if dtype == torch.float32 else ROUNDING)
    good = dtype == torch.bfloat16
    for row in range(ROWS):
        at = int(differ[row].argmax()) if differ[row].any() else TOKENS - 1
        of, off = logits[row, at], float((logits[row, : at + 1] - other[row, : at + 1]).norm() / logits[row, : at + 1].norm())
        margin = float(of[wanted[row, at]] - of[seen[row, at]])
        good = good and off < ROUNDING
        print(f"{shape}: row {row} is equal up to token {at}; the margin there is {margin:.3f} of logits up to {float(of.max()):.2f}, which differ by {off:.1e} until then")
    return good


def main():
    models = {"Mamba-2": mamba2, "Nemotron-H": nemotron_h, "Qwen3-Next": qwen3_next, "Kimi Linear": kimi_linear}
    good, words = True, [word for word in sys.argv[1:] if word not in ("--cpu", "--break")]
    if not words or set(words[1:]) - set(models):
        sys.exit(f"usage: tests/gpu/transformers_models.py LIBRARY [--cpu] [--break] [{' '.join(map(repr, models))}]")
    path, *chosen = words
    for name, make in models.items():
        if chosen and name not in chosen:
            continue
        for dtype in (torch.float32, torch.bfloat16) if LOST is None else (torch.float32,):
            good = compare(name, make, dtype, os.path.abspath(path)) and good
    print("transformers: ok" if good else "transformers: tokens differ")
    sys.exit(0 if good else 1)


main()
