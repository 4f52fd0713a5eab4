# SPDX-License-Identifier: MIT OR Apache-2.0
"""SGLang's calls, answered by libreplayssm: its names and the order of its arguments, so that a call site maps line by line.

Where SGLang passes a layer's tensor of states (`temporal[layer]`, `conv[0][layer]`) stands `State(pool, layer)`. Its two arrays of ids are the library's: where a
request's state is kept (`mamba_cache_indices`: slots), and where its recent tokens are (`intermediate_state_indices`, `ring_indices`: rings). A ring belongs to a
request for as long as it runs, so it is what SGLang calls `req_pool_indices`, and not the number of its row in this batch; every call of a step names it, plain
decoding too.

Steps leave states as they are: after the last layer, `commit_decode` or `update_mamba_state_after_mtp_verify` moves the positions, once for all layers, and keeps
snapshots for the prefix cache. Positions are tokens in the state: SGLang's `seq_lens` before a verification, and in decoding, where it has counted the new token
already, after the step.

Other arguments of SGLang's are taken and have no meaning here: intermediate states, cursors and window caches are the library's own business.
"""

import math

from replayssm_torch import Batch, Conv1dLayers, DeltaLayers, Mamba2Layers
from replayssm_torch import _tensor as expect_tensor

PAD_SLOT_ID = -1
_SIZES = {"float32": 4, "bfloat16": 2, "float16": 2, "int32": 4, "int64": 8}


class State:
    """A layer of a pool."""

    def __init__(self, layers, layer):
        self.layers, self.layer = layers, layer

    def of(self, name, *kinds):
        if not isinstance(self.layers, kinds):
            raise TypeError(f"{name} is of {type(self.layers).__name__}; expected {' or '.join(kind.__name__ for kind in kinds)}")
        return self.layers


class _View:
    """A tensor with other axes, and an offset in elements: what the library reads, without a copy."""

    def __init__(self, tensor, shape, strides, offset=0, dtype=None):
        self.tensor, self.shape, self.strides = tensor, tuple(shape), tuple(strides)
        self.dtype, self.device = dtype or tensor.dtype, getattr(tensor, "device", None)
        self.offset = offset * _SIZES.get(_kind(tensor), 0)

    def data_ptr(self):
        return self.tensor.data_ptr() + self.offset

    def stride(self):
        return self.strides


def _kind(tensor):
    return str(tensor.dtype).rsplit(".", 1)[-1]


def _state(name, state, *kinds):
    if not isinstance(state, State):
        raise TypeError(f"{name} is {type(state).__name__}; expected State(layers, layer)")
    return state.of(name, *kinds)


def _shaped(name, tensor, lead, tail):
    """tensor as [*lead, *tail]: axes of one in front may be there, those of tail may be one axis, and row and token may be one."""
    if tensor is None:
        return None
    expect_tensor(name, tensor)
    lead, tail, shape, strides = tuple(lead), tuple(tail), tuple(tensor.shape), tuple(tensor.stride())
    inner = len(tail)
    if shape[len(shape) - inner :] != tail and shape[-1:] == (math.prod(tail),):
        dense = tuple(strides[-1] * math.prod(tail[i + 1 :]) for i in range(inner))
        shape, strides = shape[:-1] + tail, strides[:-1] + dense
    axes, steps = shape[: len(shape) - inner], strides[: len(shape) - inner]
    while len(axes) > len(lead) and axes[0] == 1:
        axes, steps = axes[1:], steps[1:]
    if len(lead) == 2 and axes == (lead[0] * lead[1],):
        axes, steps = lead, (steps[0] * lead[1], steps[0])
    if axes + shape[len(shape) - inner :] != lead + tail:
        raise ValueError(f"{name} has the shape {tuple(tensor.shape)}; expected {lead + tail}")
    return _View(tensor, lead + tail, steps + strides[len(shape) - inner :])


def _of_heads(name, tensor, lead, heads, expanded):
    """A tensor with an element a head, which SGLang has expanded over `expanded` more axes."""
    strides = tuple(expect_tensor(name, tensor).stride())
    n = len(tensor.shape) - expanded
    if n < 0 or any(strides[n:]):
        raise ValueError(f"{name} has the strides {strides}; expected 0 in the last {expanded}: an element a head, expanded")
    return _shaped(name, _View(tensor, tensor.shape[:n], strides[:n]), lead, (heads,))


def _mask(name, tensor):
    if tensor is None or _kind(expect_tensor(name, tensor)) in ("uint8", "bool"):
        return tensor
    nonzero = tensor != 0
    return nonzero if _kind(nonzero) in ("uint8", "bool") else nonzero.byte()


def _counts(tensor):
    """int32, of which int64 numbers are the low halves."""
    if tensor is None or _kind(tensor) != "int64":
        return tensor
    return _View(tensor, tensor.shape, [2 * stride for stride in tensor.stride()], dtype="int32")


def _long(tensor):
    return tensor if tensor is None or _kind(tensor) == "int64" else tensor.long()


def _current(execution):
    """Tensors are made on the current stream."""
    if execution.get("stream") is not None:
        raise ValueError(f"stream is {execution['stream']}; expected None: positions are computed on the current stream")


def _null(null_block_id):
    if not isinstance(null_block_id, int):
        raise TypeError(f"null_block_id (pad_slot_id) is {null_block_id!r}; expected a whole number")
    return null_block_id if null_block_id >= 0 else None


def _chains(**given):
    for name, tensor in given.items():
        if tensor is not None:
            raise ValueError(f"{name} is a tensor of the shape {tuple(tensor.shape)}; expected None: drafts are chains, of topk 1")


def _batch(slots, rings, tokens, null_block_id, cu_seqlens=None, num_tokens=None, force_flush=None):
    common = {"rings": rings, "null_id": _null(null_block_id), "flush": _mask("force_flush", force_flush)}
    if cu_seqlens is None:
        return Batch(slots, tokens=tokens, **common)
    return Batch(slots, cu_seqlens=cu_seqlens, n_tokens=slots.shape[0] * tokens if num_tokens is None else num_tokens, max_tokens=tokens, **common)


def selective_state_update(
    state,
    x,
    dt,
    A,
    B,
    C,
    D=None,
    z=None,
    dt_bias=None,
    dt_softplus=False,
    state_batch_indices=None,
    pad_slot_id=PAD_SLOT_ID,
    out=None,
    disable_state_update=False,
    intermediate_states_buffer=None,
    cache_steps=None,
    retrieve_parent_token=None,
    intermediate_state_indices=None,
    *,
    force_flush=None,
    **execution,
):
    """A layer of Mamba-2. x, z, out [row, head, headdim] or, to verify drafts, [row, token, head, headdim]; B and C likewise [.., group, dstate]. dt, A, D and
    dt_bias with an element a head, expanded or not; D may have one per channel."""
    layers = _state("state", state, Mamba2Layers)
    _chains(retrieve_parent_token=retrieve_parent_token)
    if state_batch_indices is None or out is None:
        raise ValueError(f"{'out' if out is None else 'state_batch_indices'} is None; expected a tensor")
    rows, heads = x.shape[0], layers.heads[0]
    lead = (rows, x.shape[1] if len(x.shape) == 4 else 1)
    batch = _batch(state_batch_indices, intermediate_state_indices, lead[1], pad_slot_id, force_flush=force_flush)
    per_channel = D is not None and len(D.shape) == 2 and D.stride()[1] != 0
    layers.step(
        state.layer,
        batch,
        x=_shaped("x", x, lead, layers.heads),
        B=_shaped("B", B, lead, layers.groups),
        C=_shaped("C", C, lead, layers.groups),
        dt=_of_heads("dt", dt, lead, heads, int(len(dt.shape) == len(x.shape))),
        A=_of_heads("A", A, (), heads, len(A.shape) - 1),
        D=D if D is None or per_channel else _of_heads("D", D, (), heads, len(D.shape) - 1),
        dt_bias=dt_bias if dt_bias is None else _of_heads("dt_bias", dt_bias, (), heads, len(dt_bias.shape) - 1),
        z=_shaped("z", z, lead, layers.heads),
        out=_shaped("out", out, lead, layers.heads),
        dt_softplus=dt_softplus,
        **execution,
    )


def fused_sigmoid_gating_delta_rule_update(
    A_log,
    a,
    dt_bias,
    softplus_beta,
    softplus_threshold,
    q,
    k,
    v,
    b,
    initial_state_source,
    initial_state_indices,
    scale=None,
    use_qk_l2norm_in_kernel=False,
    cu_seqlens=None,
    is_kda=False,
    disable_state_update=False,
    intermediate_states_buffer=None,
    intermediate_state_indices=None,
    cache_steps=None,
    retrieve_parent_token=None,
    lower_bound=None,
    *,
    force_flush=None,
    null_block_id=PAD_SLOT_ID,
    out=None,
    **execution,
):
    """A layer of Gated DeltaNet, or (is_kda) Kimi Delta Attention. q, k [1, token, key head, K] and v [1, token, value head, V] with cu_seqlens, or [row, token, ..];
    a [.., value head] (KDA: and K), b [.., value head]. cache_steps: tokens that a row has at most, 1 without. Returns out, [.., value head, V]."""
    layers = _state("initial_state_source", initial_state_source, DeltaLayers)
    _chains(retrieve_parent_token=retrieve_parent_token)
    for name, given, wanted in (("softplus_beta", softplus_beta, 1), ("softplus_threshold", softplus_threshold, 20)):
        if given != wanted:
            raise ValueError(f"{name} is {given}; expected {wanted}")
    kda = len(layers.gates) == 2
    if bool(is_kda) != kda:
        raise ValueError(f"is_kda is {is_kda}; expected {kda}, as the layers are")
    if lower_bound is not None and not kda:
        raise ValueError(f"lower_bound is {lower_bound}; expected None without is_kda")
    if cu_seqlens is None:
        lead = tuple(q.shape[:2])
        batch = _batch(initial_state_indices, intermediate_state_indices, lead[1], null_block_id, force_flush=force_flush)
    else:
        lead = (q.shape[1],)
        batch = _batch(initial_state_indices, intermediate_state_indices, cache_steps or 1, null_block_id, cu_seqlens, lead[0], force_flush)
    if out is None:
        out = v.new_empty(tuple(v.shape))
    heads = layers.values[:1]
    layers.step(
        initial_state_source.layer,
        batch,
        q=_shaped("q", q, lead, layers.keys),
        k=_shaped("k", k, lead, layers.keys),
        v=_shaped("v", v, lead, layers.values),
        g=_shaped("a", a, lead, layers.gates),
        beta=_shaped("b", b, lead, heads),
        A_log=_shaped("A_log", _flat(A_log), (), heads),
        dt_bias=_shaped("dt_bias", dt_bias, (), layers.gates),
        out=_shaped("out", out, lead, layers.values),
        gate="softplus" if lower_bound is None else "lower_bound",
        lower_bound=lower_bound or 0.0,
        scale=scale or 0.0,
        l2norm=use_qk_l2norm_in_kernel,
        **execution,
    )
    return out


def _flat(tensor):
    """[1, 1, head, 1] as [head]."""
    axes = [(size, stride) for size, stride in zip(tensor.shape, tensor.stride()) if size != 1]
    return tensor if len(axes) != 1 else _View(tensor, *zip(*axes))


def fused_recurrent_linear_replayssm_decode(
    mixed_qkv,
    a,
    b,
    A_log,
    dt_bias,
    scale,
    initial_state,
    d_cache=None,
    k_cache=None,
    g_cache=None,
    out=None,
    ssm_state_indices=None,
    write_pos=None,
    force_flush=None,
    use_qk_l2norm_in_kernel=False,
    is_kda=False,
    *,
    ring_indices=None,
    lower_bound=None,
    null_block_id=PAD_SLOT_ID,
    **execution,
):
    """One token a row, q, k and v side by side in mixed_qkv [row, 2 H K + HV V]; out [row, 1, HV, V]. force_flush: per row, nonzero to fold now."""
    layers = _state("initial_state", initial_state, DeltaLayers)
    (H, K), (HV, V) = layers.keys, layers.values
    rows, wide, (row, inner) = mixed_qkv.shape[0], 2 * H * K + HV * V, mixed_qkv.stride()
    if mixed_qkv.shape[1] != wide or inner != 1:
        raise ValueError(f"mixed_qkv has the shape {tuple(mixed_qkv.shape)} and strides {(row, inner)}; expected {(rows, wide)}, the last dimension contiguous")
    q, k = (_View(mixed_qkv, (rows, 1, H, K), (row, row, K, 1), offset) for offset in (0, H * K))
    v = _View(mixed_qkv, (rows, 1, HV, V), (row, row, V, 1), 2 * H * K)
    if out is None:
        out = mixed_qkv.new_empty((rows, 1, HV, V))
    return fused_sigmoid_gating_delta_rule_update(
        A_log, a, dt_bias, 1.0, 20.0, q, k, v, b, initial_state, ssm_state_indices, scale, use_qk_l2norm_in_kernel, is_kda=is_kda, lower_bound=lower_bound,
        intermediate_state_indices=ring_indices, force_flush=force_flush, null_block_id=null_block_id, out=out, **execution,
    )


def causal_conv1d_update(
    x,
    conv_state,
    weight,
    bias=None,
    activation=None,
    cache_seqlens=None,
    conv_state_indices=None,
    num_accept_tokens=None,
    intermediate_conv_window=None,
    intermediate_state_indices=None,
    retrieve_next_token=None,
    retrieve_next_sibling=None,
    retrieve_parent_token=None,
    pad_slot_id=PAD_SLOT_ID,
    *,
    force_flush=None,
    out=None,
    **execution,
):
    """The convolution in front. x [row, channel] or [row, channel, token], channels contiguous; returns out, or x itself, which then has become the output."""
    layers = _state("conv_state", conv_state, Conv1dLayers)
    _chains(
        cache_seqlens=cache_seqlens,
        num_accept_tokens=num_accept_tokens,
        retrieve_next_token=retrieve_next_token,
        retrieve_next_sibling=retrieve_next_sibling,
        retrieve_parent_token=retrieve_parent_token,
    )
    if activation not in (None, False, True, "silu", "swish"):
        raise ValueError(f"activation is {activation!r}; expected 'silu', 'swish' or None")
    out = x if out is None else out
    rows, tokens = conv_state_indices.shape[0], x.shape[2] if len(expect_tensor("x", x).shape) == 3 else 1

    def turned(name, tensor):
        shape, strides = tuple(expect_tensor(name, tensor).shape), tuple(tensor.stride())
        wanted = [(rows, layers.channels, tokens)] + [(rows, layers.channels)] * (tokens == 1)
        if shape not in wanted or (strides[1] != 1 and shape[1] > 1):
            raise ValueError(f"{name} has the shape {shape} and strides {strides}; expected {wanted[0]}, channels contiguous")
        return _View(tensor, (shape[0], tokens, 1, shape[1]), (strides[0], strides[2] if len(shape) == 3 else 0, 0, 1))

    batch = _batch(conv_state_indices, intermediate_state_indices, tokens, pad_slot_id, force_flush=force_flush)
    layers.step(conv_state.layer, batch, turned("x", x), turned("out", out), weight, bias, silu=bool(activation), **execution)
    return out


def commit_replayssm_after_verify(
    slots,
    state_batch_indices,
    ring_indices,
    accept_lens,
    last_correct_step_indices=None,
    mamba_track_indices=None,
    mamba_steps_to_track=None,
    null_block_id=PAD_SLOT_ID,
    *,
    cache_steps,
    seq_lens=None,
    cu_seqlens=None,
    num_tokens=None,
    **execution,
):
    """Behind the last layer of a verification of cache_steps tokens a row: accept_lens of each row are taken, the sampled one included, or else those up to
    last_correct_step_indices. With mamba_track_indices, rows whose mamba_steps_to_track is not negative leave the state behind that token of theirs in the slot given
    there; seq_lens: tokens in their states before the verification."""
    batch = _batch(state_batch_indices, ring_indices, cache_steps, null_block_id, cu_seqlens, num_tokens)
    counts, convention = (accept_lens, "accepted") if accept_lens is not None else (last_correct_step_indices, "accepted_drafts")
    if counts is None:
        raise ValueError("accept_lens and last_correct_step_indices are None; expected one of them")
    at = None
    if mamba_track_indices is not None:
        _current(execution)
        for name, given in (("mamba_steps_to_track", mamba_steps_to_track), ("seq_lens", seq_lens), ("mamba_track_indices", mamba_track_indices)):
            expect_tensor(name, given)
        steps = _long(mamba_steps_to_track)
        # -1 where nothing is wanted.
        at = (steps >= 0) * (mamba_track_indices > null_block_id) * (_long(seq_lens) + steps + 2) - 1
        slots.snapshot_args(batch, at, mamba_track_indices)
    slots.commit(batch, _counts(expect_tensor("accept_lens or last_correct_step_indices", counts)), convention, **execution)
    if at is not None:
        slots.snapshot(batch, at, mamba_track_indices, **execution)


def update_mamba_state_after_mtp_verify(
    slots, last_correct_step_indices, mamba_track_indices, mamba_steps_to_track, *, state_batch_indices, ring_indices=None, null_block_id=PAD_SLOT_ID, **named
):
    """The same by the number of the last token that was right: 0 where only the sampled one was."""
    commit_replayssm_after_verify(
        slots, state_batch_indices, ring_indices, None, last_correct_step_indices, mamba_track_indices, mamba_steps_to_track, null_block_id, **named
    )


def commit_decode(
    slots,
    cache_indices,
    mamba_track_mask=None,
    mamba_track_indices=None,
    *,
    seq_lens=None,
    ring_indices=None,
    null_block_id=PAD_SLOT_ID,
    cu_seqlens=None,
    num_tokens=None,
    **execution,
):
    """Behind the last layer of a decode step of one token a row. Rows of mamba_track_mask leave their states in the slots of mamba_track_indices; seq_lens: tokens,
    this one included."""
    batch = _batch(cache_indices, ring_indices, 1, null_block_id, cu_seqlens, num_tokens)
    at = None
    if mamba_track_mask is not None:
        _current(execution)
        for name, given in (("mamba_track_mask", mamba_track_mask), ("mamba_track_indices", mamba_track_indices), ("seq_lens", seq_lens)):
            expect_tensor(name, given)
        at = (mamba_track_mask != 0) * (mamba_track_indices > null_block_id) * (_long(seq_lens) + 1) - 1
        slots.snapshot_args(batch, at, mamba_track_indices)
    slots.commit(batch, **execution)
    if at is not None:
        slots.snapshot(batch, at, mamba_track_indices, **execution)


def clear_slots(slots, mamba_clear_indices, ring_indices=None, **execution):
    """Requests begin with nothing."""
    slots.reset(mamba_clear_indices, ring_indices, **execution)


def copy_from(slots, mamba_cow_src_indices, mamba_cow_dst_indices, *, prefix_lens, ring_indices=None, **execution):
    """Requests begin with cached prefixes: what a snapshot has left, in the slots src, of prefix_lens tokens. The cached slots stay as they are."""
    _current(execution)
    slots.copy(mamba_cow_src_indices, mamba_cow_dst_indices, "load", target_rings=ring_indices, position=_long(prefix_lens), **execution)
