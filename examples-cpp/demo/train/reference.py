"""The exported model, one byte at a time, from the tensors of the safetensors file alone.

This is the definition that the C++ program follows. Roundings: weights are bf16 in the file; the inputs of the
convolutions, their outputs (x, B, C; q, k, v) and Mamba-2's gate z are rounded to bf16, nothing else is.
"""

import numpy as np
import torch
import torch.nn.functional as F


class Reference:
    """state: what the recurrences compute in and keep. "f32", "f64", or "bf16": in fp32, rounded to bf16 after every token."""

    def __init__(self, tensors, m, device="cpu", dtype=torch.float32, state="f32"):
        self.w = {k: v.to(device=device, dtype=dtype) for k, v in tensors.items()}
        self.m, self.device, self.dtype, self.state = m, device, dtype, state
        self.state_dtype = torch.float64 if state == "f64" else dtype

    def round(self, x):
        return x.to(torch.bfloat16).to(x.dtype)

    def keep(self, S):
        return self.round(S) if self.state == "bf16" else S

    def norm(self, x, name):
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.m["norm_eps"]) * self.w[name]

    def delta_dims(self, kind):
        return [self.m[f"{'gdn' if kind == 'G' else 'kda'}_{x}"] for x in ("H", "HV", "K", "V")]

    def zero_state(self, b):
        m = self.m
        zeros = lambda *s, dtype=self.dtype: torch.zeros(b, *s, device=self.device, dtype=dtype)
        state = {"position": 0}
        for i, kind in enumerate(m["layers"]):
            if kind == "A":  # keys and values of token p in row p mod attn_window
                shape = (m["attn_heads"], m["attn_window"], m["attn_headdim"])
                state[i] = [zeros(*shape), zeros(*shape)]
                continue
            if kind == "M":
                channels, shape = m["d_inner"] + 2 * m["dstate"], (m["nheads"], m["headdim"], m["dstate"])
            else:
                H, HV, K, V = self.delta_dims(kind)
                channels, shape = 2 * H * K + HV * V, (HV, V, K)
            state[i] = [zeros(m["conv_width"] - 1, channels), zeros(*shape, dtype=self.state_dtype)]
        return state

    def conv(self, x, state, name):
        window = torch.cat([state[0], self.round(x)[:, None]], 1)  # oldest first
        state[0] = window[:, 1:]
        y = (window * self.w[f"{name}.conv_weight"].T).sum(1)
        return self.round(F.silu(y + self.w[f"{name}.conv_bias"] if f"{name}.conv_bias" in self.w else y))

    def mamba2(self, h, state, name):
        m, w, b = self.m, self.w, h.shape[0]
        u = F.linear(self.norm(h, f"{name}.norm"), w[f"{name}.in_proj"])
        z, xbc, dt = u.split([m["d_inner"], m["d_inner"] + 2 * m["dstate"], m["nheads"]], -1)
        xbc, dt = self.conv(xbc, state, name).to(self.state_dtype), dt.to(self.state_dtype)
        x, B, C = xbc.split([m["d_inner"], m["dstate"], m["dstate"]], -1)
        x = x.reshape(b, m["nheads"], m["headdim"])
        dt = F.softplus(dt + w[f"{name}.dt_bias"])
        decay = torch.exp(dt * w[f"{name}.A"])[..., None, None]
        S = state[1] * decay + (dt[..., None] * x)[..., None] * B[:, None, None]
        y = (S * C[:, None, None]).sum(-1) + w[f"{name}.D"][:, None] * x
        state[1] = self.keep(S)
        y = y.reshape(b, -1).to(self.dtype) * F.silu(self.round(z))
        return F.linear(self.norm(y, f"{name}.gate_norm"), w[f"{name}.out_proj"])

    def delta(self, h, state, name, kind):
        m, w, b, (H, HV, K, V) = self.m, self.w, h.shape[0], self.delta_dims(kind)
        u = F.linear(self.norm(h, f"{name}.norm"), w[f"{name}.in_proj"])
        z, qkv, beta, a = u.split([HV * V, 2 * H * K + HV * V, HV, HV if kind == "G" else m["kda_rank"]], -1)
        if kind == "K":
            a = F.linear(a, w[f"{name}.decay_proj"])
        qkv, beta, a = (x.to(self.state_dtype) for x in (self.conv(qkv, state, name), beta, a))
        q, k, v = qkv.split([H * K, H * K, HV * V], -1)
        normalised = lambda x: x * torch.rsqrt(x.square().sum(-1, keepdim=True) + m["l2norm_eps"])
        q, k = (normalised(x.reshape(b, H, K)).repeat_interleave(HV // H, 1)[:, :, None] for x in (q, k))
        g = -w[f"{name}.A_log"].exp()[:, None] * F.softplus(a + w[f"{name}.dt_bias"]).view(b, HV, -1)
        S = state[1] * g.exp()[:, :, None]
        S = S + (beta.sigmoid()[..., None] * (v.reshape(b, HV, V) - (S * k).sum(-1)))[..., None] * k
        o = (S * q).sum(-1) * K**-0.5
        state[1] = self.keep(S)
        z = z.reshape(b, HV, V)
        y = self.norm(o.to(self.dtype), f"{name}.gate_norm") * (F.silu(z) if kind == "G" else z.sigmoid())
        return F.linear(y.reshape(b, -1), w[f"{name}.out_proj"])

    def attention(self, h, state, name, position):
        m, w, b = self.m, self.w, h.shape[0]
        qkv = F.linear(self.norm(h, f"{name}.norm"), w[f"{name}.qkv_proj"])
        q, k, v = qkv.view(b, 3, m["attn_heads"], m["attn_headdim"]).unbind(1)
        row, n = position % m["attn_window"], min(position + 1, m["attn_window"])
        state[0][:, :, row], state[1][:, :, row] = k, v
        scores = (state[0][:, :, :n] * q[:, :, None]).sum(-1) * m["attn_headdim"] ** -0.5
        y = (scores.softmax(-1)[..., None] * state[1][:, :, :n]).sum(2)
        return F.linear(y.reshape(b, -1), w[f"{name}.out_proj"])

    def step(self, byte, state):
        """byte [b] -> final hidden state [b, d]; state moves on by one token, in place."""
        h = F.embedding(byte, self.w["embedding"])
        for i, kind in enumerate(self.m["layers"]):
            if kind == "M":
                h = h + self.mamba2(h, state[i], f"layers.{i}")
            elif kind == "A":
                h = h + self.attention(h, state[i], f"layers.{i}", state["position"])
            else:
                h = h + self.delta(h, state[i], f"layers.{i}", kind)
        state["position"] += 1
        return self.norm(h, "norm")

    def logits(self, hidden):
        return F.linear(hidden, self.w["embedding"])

    def draft(self, s, byte):
        """One step of the draft head: s [..., d], byte [...] -> new s and logits of the byte after."""
        w = self.w
        u = torch.cat([self.norm(s, "draft.state_norm"), self.norm(F.embedding(byte, w["embedding"]), "draft.byte_norm")], -1)
        s = s + F.linear(F.silu(F.linear(u, w["draft.up"], w["draft.up_bias"])), w["draft.down"])
        return s, F.linear(self.norm(s, "draft.out_norm"), w["embedding"])


def gumbel(seed, positions, vocab=256):
    """Noise of request `seed` at absolute positions, float32 [positions, vocab]: a function of nothing else.

    splitmix64's finaliser over (seed, position, byte); its upper 24 bits make u in (0, 1); -log(-log(u)).
    The byte at position p is argmax_v logits[v] / temperature + gumbel(seed, p, v).
    """
    with np.errstate(over="ignore"):
        x = (np.uint64(seed) * np.uint64(0x9E3779B97F4A7C15)
             + np.asarray(positions, np.uint64)[:, None] * np.uint64(256) + np.arange(vocab, dtype=np.uint64))
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
            x = (x ^ (x >> np.uint64(shift))) * np.uint64(factor)
        x = x ^ (x >> np.uint64(31))
    u = ((x >> np.uint64(40)).astype(np.float64) + 0.5) / 2**24
    return torch.from_numpy(-np.log(-np.log(u))).float()


@torch.no_grad()
def generate(ref, prompts, n, temperature, noise):
    """prompts [b, p]; noise(position) -> [b, vocab]. Returns bytes [b, p + n] and the hidden state at each but the last."""
    state, text, hiddens = ref.zero_state(len(prompts)), [*prompts.T], []
    for position in range(prompts.shape[1] + n - 1):
        hiddens.append(ref.step(text[position], state))
        if position + 1 >= prompts.shape[1]:
            text.append((ref.logits(hiddens[-1]) / temperature + noise(position + 1)).argmax(-1))
    return torch.stack(text, 1), torch.stack(hiddens, 1)


@torch.no_grad()
def accepted_drafts(ref, text, hidden, start, temperature, noise):
    """How many drafts a speculative decoder would accept at each of its steps from position `start` on, per row.

    A step at position p knows the hidden state of p and samples p+1 from it; the head drafts p+2 .. p+4, with the
    noise of those positions; the run of drafts that equal the text is accepted, and the next step starts behind it.
    """
    k, n = ref.m["draft_tokens"], text.shape[1]
    s, run = hidden[:, : n - k - 1], []
    for i in range(1, k + 1):  # as long as drafts are right, the head's own inputs are the text's bytes
        s, logits = ref.draft(s, text[:, i : n - k - 1 + i])
        guess = (logits / temperature + noise[:, i + 1 : n - k + i]).argmax(-1)
        right = guess == text[:, i + 1 : n - k + i]
        run.append(right if not run else run[-1] & right)
    accepted = torch.stack(run).sum(0)
    steps = []
    for row in accepted.tolist():
        p = start
        while p < len(row):
            steps.append(row[p])
            p += 1 + row[p]
    return steps
