"""The demo's model in its parallel form, for training: segments of text, state carried from one to the next.

Byte-level, tied embedding; blocks `h += block(rms_norm(h))` in the order MODEL["layers"] (M: Mamba-2, G: Gated
DeltaNet, K: Kimi Delta Attention, A: attention); a final norm; and a draft head that guesses the bytes after the
next one. reference.py says the same one byte at a time, and is what the C++ program follows.
"""

import math

import torch
import torch.nn.functional as F
from torch import nn

MODEL = dict(
    vocab=256, d_model=192, layers="MGKAMGK", conv_width=4,
    d_inner=384, headdim=64, nheads=6, dstate=64, ngroups=1,
    gdn_H=2, gdn_HV=4, gdn_K=64, gdn_V=64,
    kda_H=4, kda_HV=4, kda_K=64, kda_V=64, kda_rank=32, l2norm_eps=1e-6,
    attn_heads=3, attn_headdim=64, attn_window=256,
    draft_hidden=512, draft_tokens=3, norm_eps=1e-5,
)


BLOCK = 16  # tokens of a chunk between which KDA's decays are taken one by one


def to_bf16(x):
    """The library takes bf16 activations: the value rounded, the gradient passed through."""
    return x.to(torch.bfloat16).to(x.dtype)


def decay_parameters(n):
    """Initial A_log and dt_bias: time constants from 1 / (16 * 0.1) to 1 / (1 * 0.001) tokens."""
    dt = torch.exp(torch.empty(n).uniform_(math.log(1e-3), math.log(1e-1)))
    return torch.empty(n).uniform_(1, 16).log(), dt + torch.log(-torch.expm1(-dt))  # softplus(dt_bias) = dt


def short_conv(x, window, weight, bias=None):
    """r(silu(conv(r(x)))) over tokens, oldest tap first, and the window of the last inputs for the next segment."""
    t, x = x.shape[1], torch.cat([window, to_bf16(x)], 1)
    y = sum(x[:, k : k + t] * weight[:, k] for k in range(weight.shape[1]))
    return to_bf16(F.silu(y if bias is None else y + bias)), x[:, t:]


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
        self.A_log, self.dt_bias = map(nn.Parameter, decay_parameters(m["nheads"]))
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
        xbc, window = short_conv(xbc, state[0], self.conv_weight, self.conv_bias)
        x, B, C = xbc.split([m["d_inner"], m["dstate"], m["dstate"]], -1)
        x = x.reshape(b, t, m["nheads"], m["headdim"])
        y, S = ssd(x, F.softplus(dt + self.dt_bias), -self.A_log.exp(), B, C, state[1], min(chunk, t))
        y = (y + self.D[:, None] * x).reshape(b, t, -1) * F.silu(to_bf16(z))
        return self.out_proj(self.gate_norm(y)), [window, S]


class UnitInverse(torch.autograd.Function):
    """(I + A)^-1 of strictly lower triangular A [.., l, l], l a power of two: from inverses of diagonal blocks of
    1, 2, 4, ..; with blocks T1, T2 on the diagonal, the block below is -T2 A21 T1. No power of A, so nothing cancels."""

    @staticmethod
    def forward(ctx, A):
        i = torch.arange(A.shape[-1], device=A.device)
        T, size = torch.eye(len(i), dtype=A.dtype, device=A.device).expand_as(A), 1
        while size < len(i):
            block = i // size
            below = (block[:, None] == block[None, :] + 1) & (block[:, None] % 2 == 1)
            T, size = T - T @ (A * below) @ T, 2 * size
        ctx.save_for_backward(T)
        return T

    @staticmethod
    def backward(ctx, grad):
        T, = ctx.saved_tensors
        return -(T.mT @ grad @ T.mT).tril(-1)


def decayed_products(x, k, sums):
    """[.., i, j] = sum_d x_id k_jd exp(sums_id - sums_jd) for j <= i, else 0; sums [.., l, 1] or, per channel, [.., l, K].

    Per channel, the decay between two blocks of tokens is a product of two that are at most 1, split where the later block
    begins; within a block every pair has its own.
    """
    l = x.shape[-2]
    future = torch.ones(l, l, dtype=torch.bool, device=x.device).triu(1)
    if sums.shape[-1] == 1:
        return (sums - sums.mT).masked_fill(future, -torch.inf).exp() * (x @ k.mT)
    n = l // BLOCK
    x, kb, cb = (y.unflatten(-2, (n, BLOCK)) for y in (x, k, sums))
    start = F.pad(cb[..., :-1, -1, :], (0, 0, 1, 0))  # the sum before each block
    left = x * (cb - start[..., None, :]).exp()
    right = k[..., None, :, :] * (start[..., None, :] - sums[..., None, :, :]).clamp(max=0).exp()
    block = torch.arange(l, device=x.device) // BLOCK
    between = (left @ right.mT).flatten(-3, -2) * (block[:, None] > block)
    decay = (cb[..., :, None, :] - cb[..., None, :, :]).masked_fill(future[:BLOCK, :BLOCK, None], -torch.inf).exp()
    within = (x[..., :, None, :] * kb[..., None, :, :] * decay).sum(-1)
    same = torch.eye(n, dtype=x.dtype, device=x.device)[:, None, :, None]
    return between + (within[..., None, :] * same).flatten(-2).flatten(-3, -2)


def delta_rule(q, k, v, g, beta, S0, chunk):
    """S' = exp(g_t) S_{t-1}; u_t = beta_t (v_t - S' k_t); S_t = S' + u_t k_t^T; o_t = S_t q_t, in chunks (the WY form).

    q and k [b, t, h, K], v [b, t, h, V], g [b, t, h, 1] (GDN) or [b, t, h, K] (KDA), beta [b, t, h], S0 [b, h, V, K];
    t % chunk == 0. Returns o [b, t, h, V] and the last state.
    """
    b, t, h, _ = q.shape
    q, k, v, g, beta = (y.reshape(b, t // chunk, chunk, h, -1).permute(0, 3, 1, 2, 4) for y in (q, k, v, g, beta))
    sums = g.cumsum(-2)
    # Within a chunk: u = T beta (v - exp(sums) k S), where T solves for each u the part of the earlier ones in it.
    T = UnitInverse.apply(beta * decayed_products(k, k, sums).tril(-1))
    own, seen = T @ (beta * v), T @ (beta * k * sums.exp())
    added, total = k * (sums[..., -1:, :] - sums).exp(), sums[..., -1:, :].exp()
    states, us, S = [], [], S0
    for i in range(t // chunk):
        u = own[:, :, i] - seen[:, :, i] @ S.mT
        states.append(S), us.append(u)
        S = S * total[:, :, i] + u.mT @ added[:, :, i]
    o = (q * sums.exp()) @ torch.stack(states, 2).mT + decayed_products(q, k, sums) @ torch.stack(us, 2)
    return o.permute(0, 2, 3, 1, 4).reshape(b, t, h, -1), S


class Delta(nn.Module):
    """G: Gated DeltaNet, one decay a head, grouped heads, SiLU gate. K: Kimi Delta Attention, one decay a channel
    through a projection of low rank, sigmoid gate."""

    def __init__(self, m, kind):
        super().__init__()
        family = {"G": "gdn", "K": "kda"}[kind]
        self.m, self.kind = m, kind
        self.H, self.HV, self.K, self.V = (m[f"{family}_{x}"] for x in ("H", "HV", "K", "V"))
        rank, decays = (self.HV, self.HV) if kind == "G" else (m["kda_rank"], self.HV * self.K)
        self.sizes = [self.HV * self.V, 2 * self.H * self.K + self.HV * self.V, self.HV, rank]
        self.norm = RMSNorm(m["d_model"], m["norm_eps"])
        self.in_proj = nn.Linear(m["d_model"], sum(self.sizes), bias=False)
        self.conv_weight = nn.Parameter(torch.empty(self.sizes[1], m["conv_width"]).uniform_(-0.5, 0.5))
        if kind == "K":
            self.decay_proj = nn.Linear(rank, decays, bias=False)
        A_log, dt_bias = decay_parameters(decays)
        self.A_log, self.dt_bias = nn.Parameter(A_log[: self.HV].clone()), nn.Parameter(dt_bias)
        self.gate_norm = RMSNorm(self.V, m["norm_eps"])
        self.out_proj = nn.Linear(self.HV * self.V, m["d_model"], bias=False)

    def zero_state(self, b, like):
        return [like.new_zeros(b, self.m["conv_width"] - 1, self.sizes[1]), like.new_zeros(b, self.HV, self.V, self.K)]

    def forward(self, h, state, chunk):
        b, t, _ = h.shape
        z, qkv, beta, a = self.in_proj(self.norm(h)).split(self.sizes, -1)
        qkv, window = short_conv(qkv, state[0], self.conv_weight)
        q, k, v = qkv.split([self.H * self.K, self.H * self.K, self.HV * self.V], -1)
        normalised = lambda x: x * torch.rsqrt(x.square().sum(-1, keepdim=True) + self.m["l2norm_eps"])
        q, k = (normalised(x.reshape(b, t, self.H, self.K)).repeat_interleave(self.HV // self.H, 2) for x in (q, k))
        a = (a if self.kind == "G" else self.decay_proj(a)) + self.dt_bias
        g = -self.A_log.exp()[:, None] * F.softplus(a).view(b, t, self.HV, -1)
        o, S = delta_rule(q, k, v.reshape(b, t, self.HV, self.V), g, beta.sigmoid(), state[1], min(chunk, t))
        o, z = self.gate_norm(o * self.K**-0.5), z.reshape(o.shape)
        gate = F.silu(z) if self.kind == "G" else z.sigmoid()
        return self.out_proj((o * gate).reshape(b, t, -1)), [window, S]


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
        self.layers = nn.ModuleList(
            Mamba2(m) if kind == "M" else Attention(m) if kind == "A" else Delta(m, kind) for kind in m["layers"])
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
