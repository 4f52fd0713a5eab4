"""The demo's model in its parallel form, for training: segments of text, state carried from one to the next.

Byte-level, tied embedding; blocks `h += block(rms_norm(h))` in the order MODEL["layers"] (M: Mamba-2,
A: attention); a final norm; and a draft head that guesses the bytes after the next one. reference.py says
the same one byte at a time, and is what the C++ program follows.
"""

import math

import torch
import torch.nn.functional as F
from torch import nn

MODEL = dict(
    vocab=256, d_model=192, layers="MMAMM",
    d_inner=384, headdim=64, nheads=6, dstate=64, ngroups=1, conv_width=4,
    attn_heads=3, attn_headdim=64, attn_window=256,
    draft_hidden=384, draft_tokens=3, norm_eps=1e-5,
)


def to_bf16(x):
    """The library takes bf16 activations: the value rounded, the gradient passed through."""
    return x.to(torch.bfloat16).to(x.dtype)


class RMSNorm(nn.Module):
    def __init__(self, dim, eps):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(dim)), eps

    def forward(self, x):
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps) * self.weight


def ssd(x, dt, A, B, C, S0, chunk):
    """S_t = exp(A dt_t) S_{t-1} + dt_t x_t B_t^T; y_t = S_t C_t, in chunks (Mamba-2's state space duality).

    x [b, t, h, p], dt [b, t, h], A [h], B and C [b, t, n] (one group), S0 [b, h, p, n]; t % chunk == 0.
    Returns y [b, t, h, p] and the last state.
    """
    b, t, h, p = x.shape
    c = t // chunk
    xd = (x * dt[..., None]).view(b, c, chunk, h, p)
    B, C = B.view(b, c, chunk, -1), C.view(b, c, chunk, -1)
    sums = (dt * A).view(b, c, chunk, h).permute(0, 3, 1, 2).cumsum(-1)  # [b, h, c, l]

    # Within a chunk: attention-like, with the decay between two tokens as the mask.
    future = torch.ones(chunk, chunk, dtype=torch.bool, device=x.device).triu(1)
    decay = (sums[..., :, None] - sums[..., None, :]).masked_fill(future, -torch.inf).exp()
    mixing = decay * torch.einsum("bcin,bcjn->bcij", C, B)[:, None]
    y = torch.einsum("bhcij,bcjhp->bcihp", mixing, xd)

    # Between chunks: each chunk's contribution to the state, then a short serial loop.
    tail = (sums[..., -1:] - sums).exp().permute(0, 2, 3, 1)[..., None]
    added = torch.einsum("bcln,bclhp->cbhpn", B, xd * tail)
    total = sums[..., -1].exp().permute(2, 0, 1)[..., None, None]  # [c, b, h, 1, 1]
    states, S = [], S0
    for i in range(c):
        states.append(S)
        S = S * total[i] + added[i]
    carried = torch.einsum("bcin,cbhpn->bcihp", C, torch.stack(states))
    y = y + carried * sums.exp().permute(0, 2, 3, 1)[..., None]
    return y.reshape(b, t, h, p), S


class Mamba2(nn.Module):
    def __init__(self, m):
        super().__init__()
        self.m, self.conv_dim = m, m["d_inner"] + 2 * m["dstate"]
        self.norm = RMSNorm(m["d_model"], m["norm_eps"])
        self.in_proj = nn.Linear(m["d_model"], m["d_inner"] + self.conv_dim + m["nheads"], bias=False)
        self.conv_weight = nn.Parameter(torch.empty(self.conv_dim, m["conv_width"]).uniform_(-0.5, 0.5))
        self.conv_bias = nn.Parameter(torch.zeros(self.conv_dim))
        dt = torch.exp(torch.empty(m["nheads"]).uniform_(math.log(1e-3), math.log(1e-1)))
        self.dt_bias = nn.Parameter(dt + torch.log(-torch.expm1(-dt)))  # softplus(dt_bias) = dt
        self.A_log = nn.Parameter(torch.empty(m["nheads"]).uniform_(1, 16).log())
        self.D = nn.Parameter(torch.ones(m["nheads"]))
        self.gate_norm = RMSNorm(m["d_inner"], m["norm_eps"])
        self.out_proj = nn.Linear(m["d_inner"], m["d_model"], bias=False)

    def zero_state(self, b, like):
        m = self.m
        return [like.new_zeros(b, m["conv_width"] - 1, self.conv_dim),
                like.new_zeros(b, m["nheads"], m["headdim"], m["dstate"])]

    def forward(self, h, state, chunk):
        m, (b, t, _) = self.m, h.shape
        z, xbc, dt = self.in_proj(self.norm(h)).split([m["d_inner"], self.conv_dim, m["nheads"]], -1)
        z, xbc = to_bf16(z), torch.cat([state[0], to_bf16(xbc)], 1)
        conv = self.conv_bias + sum(xbc[:, k : k + t] * self.conv_weight[:, k] for k in range(m["conv_width"]))
        x, B, C = to_bf16(F.silu(conv)).split([m["d_inner"], m["dstate"], m["dstate"]], -1)
        x = x.reshape(b, t, m["nheads"], m["headdim"])
        y, S = ssd(x, F.softplus(dt + self.dt_bias), -self.A_log.exp(), B, C, state[1], min(chunk, t))
        y = (y + self.D[:, None] * x).reshape(b, t, -1) * F.silu(z)
        return self.out_proj(self.gate_norm(y)), [xbc[:, t:], S]


class Attention(nn.Module):
    """Causal over the last attn_window tokens, itself included; no position encoding, the recurrent layers know."""

    def __init__(self, m):
        super().__init__()
        self.m, width = m, m["attn_heads"] * m["attn_headdim"]
        self.norm = RMSNorm(m["d_model"], m["norm_eps"])
        self.qkv_proj = nn.Linear(m["d_model"], 3 * width, bias=False)
        self.out_proj = nn.Linear(width, m["d_model"], bias=False)

    def zero_state(self, b, like):
        m = self.m
        past = like.new_zeros(b, m["attn_heads"], m["attn_window"], m["attn_headdim"])
        return [past, past.clone(), like.new_zeros(b, m["attn_window"])]  # keys, values, 1 where there is one

    def forward(self, h, state, chunk):
        m, (b, t, _), w = self.m, h.shape, self.m["attn_window"]
        qkv = self.qkv_proj(self.norm(h)).view(b, t, 3, m["attn_heads"], m["attn_headdim"])
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        k, v = torch.cat([state[0], k], 2), torch.cat([state[1], v], 2)
        there = torch.cat([state[2], state[2].new_ones(b, t)], 1)
        i, j = torch.arange(t, device=h.device)[:, None], torch.arange(w + t, device=h.device)
        seen = ((j > i) & (j <= i + w))[None, None] & (there > 0)[:, None, None]
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=seen)
        return self.out_proj(y.transpose(1, 2).reshape(b, t, -1)), [k[:, :, t:], v[:, :, t:], there[:, t:]]


class DraftHead(nn.Module):
    """s_0 = the final hidden state at byte t; s_i = s_{i-1} + MLP(s_{i-1}, byte t+i); s_i guesses byte t+i+1."""

    def __init__(self, m):
        super().__init__()
        d = m["d_model"]
        self.state_norm, self.byte_norm = RMSNorm(d, m["norm_eps"]), RMSNorm(d, m["norm_eps"])
        self.up = nn.Linear(2 * d, m["draft_hidden"])
        self.down = nn.Linear(m["draft_hidden"], d, bias=False)
        self.out_norm = RMSNorm(d, m["norm_eps"])

    def forward(self, s, byte, embedding):
        u = torch.cat([self.state_norm(s), self.byte_norm(F.embedding(byte, embedding))], -1)
        s = s + self.down(F.silu(self.up(u)))
        return s, F.linear(self.out_norm(s), embedding)


class Model(nn.Module):
    def __init__(self, m=MODEL, dropout=0.0):
        super().__init__()
        self.m = m
        self.embedding = nn.Parameter(torch.randn(m["vocab"], m["d_model"]) * 0.02)
        self.layers = nn.ModuleList({"M": Mamba2, "A": Attention}[kind](m) for kind in m["layers"])
        self.norm = RMSNorm(m["d_model"], m["norm_eps"])
        self.draft = DraftHead(m)
        self.dropout = nn.Dropout(dropout)
        for name, p in self.named_parameters():
            if name.endswith("_proj.weight") or name in ("draft.up.weight", "draft.down.weight"):
                nn.init.normal_(p, std=p.shape[1] ** -0.5)
            if name.endswith("out_proj.weight"):
                p.data /= math.sqrt(2 * len(m["layers"]))

    def zero_state(self, b):
        return [layer.zero_state(b, self.embedding) for layer in self.layers]

    def forward(self, byte, state, chunk=64):
        """byte [b, t], t % chunk == 0 -> final hidden states [b, t, d] and the state after the segment."""
        h, after = self.dropout(F.embedding(byte, self.embedding)), []
        for layer, before in zip(self.layers, state):
            y, new = layer(h, before, chunk)
            h = h + self.dropout(y)
            after.append(new)
        return self.norm(h), after

    def logits(self, hidden):
        return F.linear(hidden, self.embedding)
