# SPDX-License-Identifier: MIT OR Apache-2.0
"""libreplayssm for PyTorch: tensors and the current stream, by way of ctypes.

A model has one `Slots` (positions of its requests) and a pool of layers for each kind of them. A model step makes one `Batch`, gives it to every layer, and
commits it once tokens are sampled:

    slots = Slots(n_slots=512, window=16, device=0)
    layers = Mamba2Layers(slots, n_layers=48, nheads=128, headdim=64, dstate=128, ngroups=8)
    slots.reset(ids)                                             # requests begin
    batch = Batch(ids, tokens=1)                                 # int32 tensor on the device, a slot per row
    layers.step(layer, batch, x, B, C, dt, A, D=D, dt_bias=dt_bias, z=z, out=out)
    slots.commit(batch)                                          # or counts=..., how many of each row's tokens are taken

Steps, commits and calls on lists of slots copy nothing to or from the host, wait for nothing, and can be captured in a CUDA graph. Tensors stay the caller's; a batch and what it was made of stay untouched until its
commit has run. Errors of the library are `ReplayError`, with its sentence.

A tensor is anything with `data_ptr()`, `stride()`, `shape` and `dtype`, as torch's have it. On the CPU (`device=None`) they are in host memory.
"""

import ctypes
import os

# Major and minor version of the interface, as replayssm_version has them.
VERSION = 0 << 12 | 1
F32, BF16, F16, I32, I64 = 1, 2, 3, 16, 17
_DTYPES = {"float32": F32, "bfloat16": BF16, "float16": F16, "int32": I32, "int64": I64}
_FAMILIES = {"mamba2": 1, "gdn": 2, "kda": 3, "conv1d": 4}
_FORMATS = {None: 0, "split32": 1, "f32": 2, "bf16": 3, "f16": 4}
_READOUTS = {None: 0, "high": 1, "full": 2, "exact": 3}
_HEAD_MAPS = {"grouped": 0, "tiled": 1}
_GATES = {"softplus": 0, "lower_bound": 1, "log_decay": 2}
_SCHEDULES = {"staggered": 0, "by_position": 1, "none": 2}
_COUNTS = {"accepted": 0, "accepted_drafts": 1, "rejected": 2}
_COPIES = {"fork": 0, "move": 1, "swap": 2, "store": 3, "load": 4, "stored": 5}
_PDL, _PDL_PREFETCH = 1, 2
_NULL_ID, _KEEP_NULL_OUTPUTS, _EXTEND = 1, 2, 4


class ReplayError(RuntimeError):
    """What the library says is wrong. `status`: its number."""

    def __init__(self, status, message):
        super().__init__(message)
        self.status = status


class _Ids(ctypes.Structure):
    _fields_ = [("data", ctypes.c_void_p), ("stride", ctypes.c_int64), ("dtype", ctypes.c_int32), ("reserved", ctypes.c_uint32)]


class _Tensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("stride_row", ctypes.c_int64),
        ("stride_token", ctypes.c_int64),
        ("stride_head", ctypes.c_int64),
        ("dtype", ctypes.c_int32),
        ("reserved", ctypes.c_uint32),
    ]


_KINDS = {
    "i": ctypes.c_int32,
    "u": ctypes.c_uint32,
    "l": ctypes.c_int64,
    "f": ctypes.c_float,
    "p": ctypes.c_void_p,
    "t": _Tensor,
    "d": _Ids,
}

# Descriptors of replayssm.h behind their struct_size: kinds of fields, and their names.
DESCRIPTORS = {
    "context_desc": "i:backend i:device i:n_threads u:flags u:reserved p:log p:log_user i:log_level u:log_reserved",
    "slots_desc": "i:n_slots i:n_rings i:window i:max_step_tokens i:min_rewind i:schedule u:flags",
    "pool_desc": "i:family i:n_layers i:io i:out i:format i:readout i:stochastic_rounding i:nheads i:headdim i:dstate i:ngroups i:H i:HV i:K i:V"
    " i:head_map i:u_dtype i:channels i:width i:n_sections u:reserved p:section_channels",
    "exec": "u:flags p:stream i:part i:n_parts",
    "batch": "u:flags i:n_rows i:tokens i:max_tokens i:null_id i:keep_tail u:reserved l:n_tokens d:slots d:rings p:cu_seqlens p:flush p:generation",
    "mamba2_args": "i:no_softplus t:x t:B t:C t:dt t:A t:dt_bias t:D i:D_per_element u:reserved t:z t:out",
    "delta_args": "i:gate t:q t:k t:v t:g t:beta t:A_log t:dt_bias f:lower_bound f:scale f:l2norm_eps i:no_l2norm i:beta_processed u:reserved t:out",
    "conv1d_args": "i:no_silu t:x t:out t:weight t:bias",
    "commit_args": "i:convention p:counts l:counts_stride",
    "list": "i:n i:place u:reserved d:slots d:rings i:n_pools u:pools_reserved p:pools p:pool_slots",
    "flush_args": "i:later p:position",
    "snapshot_args": "i:n_pools p:at d:dst p:pools p:pool_src p:pool_dst",
    "copy_args": "i:kind p:position p:generation",
    "reset_args": "i:keep_checkpoint i:convert u:reserved p:position p:generation p:seed",
    "state": "i:dtype i:orientation i:layer p:data l:stride_entry l:stride_layer l:stride_head l:stride_row",
    "report": "u:bits l:count l:first_slot l:first_row i:first_pool i:first_layer",
}


def _structure(name):
    pairs = [field.split(":") for field in DESCRIPTORS[name].split()]
    fields = [("struct_size", ctypes.c_uint32)] + [(field, _KINDS[kind]) for kind, field in pairs]
    return type(name, (ctypes.Structure,), {"_fields_": fields})


STRUCTURES = {name: _structure(name) for name in DESCRIPTORS}


def _make(name, **fields):
    value = STRUCTURES[name](struct_size=ctypes.sizeof(STRUCTURES[name]))
    for field, given in fields.items():
        try:
            setattr(value, field, given)
        except TypeError:
            raise TypeError(f"{name}.{field} is {given!r}; expected a {'number' if dict(value._fields_)[field] is ctypes.c_float else 'whole number'}") from None
        # ctypes keeps the low bits of a number that is too large.
        if isinstance(given, int) and (getattr(value, field) or 0) != given:
            raise ValueError(f"{name}.{field} is {given}, which does not fit; expected at most {ctypes.sizeof(dict(value._fields_)[field])} bytes")
    return value


def _number(name, value):
    if not isinstance(value, int):
        raise TypeError(f"{name} is {value!r}; expected a whole number")
    number = ctypes.c_int32(value)
    if number.value != value:
        raise ValueError(f"{name} is {value}; expected a number of 32 bits")
    return number


def _name(dtype):
    return str(dtype).rsplit(".", 1)[-1]


def _choice(what, table, value):
    if not isinstance(value, (str, type(None))) or value not in table:
        raise ValueError(f"{what} is {value!r}; expected one of {', '.join(map(repr, table))}")
    return table[value]


def _tensor(name, tensor):
    if not hasattr(tensor, "data_ptr"):
        raise TypeError(f"{name} is {tensor!r}; expected a tensor")
    return tensor


def _length(name, tensor):
    """Of an array in one dimension."""
    if len(_tensor(name, tensor).shape) != 1:
        raise ValueError(f"{name} has the shape {tuple(tensor.shape)}; expected one dimension")
    return tensor.shape[0]


def _dtype(name, tensor, names=tuple(_DTYPES)):
    found = _name(_tensor(name, tensor).dtype)
    if found not in names:
        raise TypeError(f"{name} is of {found}; expected {' or '.join(names)}")
    return _DTYPES.get(found, 0)


def _line(name, tensor, n, names):
    """Address and stride of an array of n elements in one dimension. None: absent."""
    if tensor is None:
        return None, 0
    _dtype(name, tensor, names)
    if len(tensor.shape) != 1 or (n is not None and tensor.shape[0] < n):
        raise ValueError(f"{name} has the shape {tuple(tensor.shape)}; expected ({'any' if n is None else n},)")
    stride = tensor.stride()[0]
    if stride < 1 and tensor.shape[0] > 1:
        raise ValueError(f"{name} has a stride of {stride}; expected 1 or more")
    return tensor.data_ptr(), max(1, stride)


def _array(name, tensor, n, *names):
    """Address of an array without gaps."""
    data, stride = _line(name, tensor, n, names)
    if stride > 1 and n != 1:
        raise ValueError(f"{name} has a stride of {stride}; expected 1")
    return data


def _ids(name, tensor, n=None):
    """An index array, in any stride."""
    if tensor is None:
        return _Ids()
    return _Ids(*_line(name, tensor, n, ("int32", "int64")), _dtype(name, tensor), 0)


def _vectors(name, tensor, lead, tail):
    """A tensor of the axes in lead (row and token, or token, or none for a parameter) and those in tail (head, and the values of one)."""
    if tensor is None:
        return _Tensor()
    dtype = _dtype(name, tensor, ("float32", "bfloat16", "float16"))
    shape, strides = tuple(tensor.shape), list(tensor.stride())
    if len(lead) == 2 and lead[1] == 1 and shape == (lead[0], *tail):  # one token a row: the axis may be missing
        strides.insert(1, strides[0])
    elif len(lead) == 1 and shape == (1, *lead, *tail):
        del strides[0]
    elif shape != (*lead, *tail):
        raise ValueError(f"{name} has the shape {shape}; expected {(*lead, *tail)}")
    if len(tail) == 2 and strides.pop() != 1 and tail[1] > 1:
        raise ValueError(f"{name} has a stride of {tensor.stride()[-1]} in its last dimension; expected 1")
    return _Tensor(tensor.data_ptr(), *[0] * (3 - len(strides)), *strides, dtype, 0)


def _find():
    name = os.path.join("lib", "libreplayssm.so")
    here = os.path.dirname(os.path.abspath(__file__))
    for folder in (here, os.path.join(here, "..", "..", "..", "build", "install")):
        if os.path.exists(os.path.join(folder, name)):
            return os.path.join(folder, name)
    return "libreplayssm.so"


class Library:
    """The shared library, loaded once for a path."""

    _loaded = {}

    def __new__(cls, path=None):
        path = path or _find()
        if path not in cls._loaded:
            library = super().__new__(cls)
            library._functions = ctypes.CDLL(path)
            if not hasattr(library._functions, "replayssm_last_error_message"):
                raise OSError(f"{path} is not libreplayssm")
            found = library._functions.replayssm_version() >> 12
            if found != VERSION:
                raise OSError(f"{path} is of version {found >> 12}.{found & 0xFFF}; expected {VERSION >> 12}.{VERSION & 0xFFF}")
            library._functions.replayssm_last_error_message.restype = ctypes.c_char_p
            cls._loaded[path] = library
        return cls._loaded[path]

    def call(self, name, *arguments):
        status = getattr(self._functions, "replayssm_" + name)(*arguments)
        if status != 0:
            raise ReplayError(status, self._functions.replayssm_last_error_message().decode())

    def destroy(self, name, handle):
        getattr(self._functions, f"replayssm_{name}_destroy")(handle)


class Slots:
    """Positions of all requests of a model, and what its layers share. device: number of a GPU, or None for the CPU (n_threads: 0 for all of its cores).

    window: tokens that a ring holds before they are folded into the checkpoint; max_step_tokens: of a step's row at most (1 + drafts); min_rewind: committed
    tokens that `rewind` can always take back.
    """

    _context = _slots = None  # until a constructor is through

    def __init__(self, n_slots, window=16, max_step_tokens=1, n_rings=0, min_rewind=0, schedule="staggered", device=0, n_threads=0, checks=False, path=None):
        self.library = Library(path)
        if device is not None and not isinstance(device, int):
            raise TypeError(f"device is {device!r}; expected the number of a GPU, or None for the CPU")
        self.device = device
        context = _make("context_desc", backend=1 if device is None else 2, device=device or 0, n_threads=n_threads)
        self._context = self._create("context", ctypes.byref(context))
        description = _make(
            "slots_desc",
            n_slots=n_slots,
            n_rings=n_rings,
            window=window,
            max_step_tokens=max_step_tokens,
            min_rewind=min_rewind,
            schedule=_choice("schedule", _SCHEDULES, schedule),
            flags=1 if checks else 0,
        )
        self._slots = self._create("slots", self._context, ctypes.byref(description))

    def _create(self, name, *arguments):
        handle = ctypes.c_void_p()
        self.library.call(name + "_create", *arguments, ctypes.byref(handle))
        return handle

    def __del__(self):
        for name, handle in (("slots", self._slots), ("context", self._context)):
            if handle:
                self.library.destroy(name, handle)

    def execution(self, stream=None, pdl=False, prefetch=False):
        """How a call runs: on the current stream, or the one that is given. pdl: as a launch that may begin before the one in front of it has ended; prefetch:
        with the promise that checkpoints do not depend on that one."""
        if self.device is not None and stream is None:
            import torch

            stream = torch.cuda.current_stream(self.device).cuda_stream
        flags = (_PDL if pdl or prefetch else 0) | (_PDL_PREFETCH if prefetch else 0)
        return ctypes.byref(_make("exec", stream=stream, flags=flags))

    def expect_here(self, **tensors):
        """Tensors of another device are refused: the library takes addresses."""
        here = "cpu" if self.device is None else "cuda"
        for name, tensor in tensors.items():
            device = getattr(tensor, "device", None)
            if device is None:
                continue
            index = getattr(device, "index", None)
            if getattr(device, "type", str(device)) != here or (self.device is not None and index not in (None, self.device)):
                raise ValueError(f"{name} is on {device}; expected {here if self.device is None else f'{here}:{self.device}'}")

    def _list(self, slots, rings=None):
        self.expect_here(slots=slots, rings=rings)
        n = _length("slots", slots)
        return _make("list", n=n, slots=_ids("slots", slots), rings=_ids("rings", rings, n))

    def commit(self, batch, counts=None, convention="accepted", **execution):
        """Takes tokens of a batch over, all of them or (counts: int32, a row each) so many; convention: accepted counts the token that is always taken,
        accepted_drafts does not, rejected counts those that are not taken."""
        self.expect_here(counts=counts, **batch.kept)
        data, stride = _line("counts", counts, batch.rows, ("int32",))
        args = _make("commit_args", convention=_choice("convention", _COUNTS, convention), counts=data, counts_stride=stride)
        self.library.call("commit", self._slots, ctypes.byref(batch.batch), ctypes.byref(args), self.execution(**execution))

    def reset(self, slots, rings=None, position=None, generation=None, keep_checkpoint=False, **execution):
        """Requests begin: states are zero, or (keep_checkpoint) what an engine has written to its own memory of them. position: int64 per entry, 0 without."""
        self.expect_here(position=position, generation=generation)
        n = _length("slots", slots)
        args = _make(
            "reset_args",
            keep_checkpoint=int(keep_checkpoint),
            position=_array("position", position, n, "int64"),
            generation=_array("generation", generation, n, "uint32", "int32"),
        )
        self.library.call("reset", self._slots, ctypes.byref(self._list(slots, rings)), ctypes.byref(args), self.execution(**execution))

    def snapshot_args(self, batch, at, targets):
        """What snapshot is called with, checked: before the commit that it follows."""
        self.expect_here(at=at, targets=targets, **batch.kept)
        wanted, target = _array("at", _tensor("at", at), batch.rows, "int64"), _ids("targets", _tensor("targets", targets), batch.rows)
        return _make("snapshot_args", at=wanted, dst=target)

    def snapshot(self, batch, at, targets, **execution):
        """For rows whose last commit has reached position at[row] (int64; negative: no), the exact state there is left in slot targets[row]."""
        args = self.snapshot_args(batch, at, targets)
        self.library.call("snapshot", self._slots, ctypes.byref(batch.batch), ctypes.byref(args), self.execution(**execution))

    def copy(self, sources, targets, kind="fork", source_rings=None, target_rings=None, position=None, generation=None, **execution):
        """Forks, moves, swaps, stores or loads requests. position: int64 per entry, where a stored state is to stand, or (load) stands."""
        self.expect_here(position=position, generation=generation)
        n = _length("targets", targets)
        if _length("sources", sources) != n:
            raise ValueError(f"sources has the shape {tuple(sources.shape)}; expected ({n},)")
        args = _make(
            "copy_args",
            kind=_choice("kind", _COPIES, kind),
            position=_array("position", position, n, "int64"),
            generation=_array("generation", generation, n, "uint32", "int32"),
        )
        source, target = self._list(sources, source_rings), self._list(targets, target_rings)
        self.library.call("copy", self._slots, ctypes.byref(source), ctypes.byref(target), ctypes.byref(args), self.execution(**execution))

    def flush(self, slots, rings=None, later=False, **execution):
        """Folds all records now, or (later) in the next step."""
        args = _make("flush_args", later=int(later))
        self.library.call("flush", self._slots, ctypes.byref(self._list(slots, rings)), ctypes.byref(args), self.execution(**execution))

    def rewind(self, slots, n, done=None, rings=None, **execution):
        """Takes n[entry] committed tokens back (int32). done[entry] becomes 1 where that was done, 0 where they cannot be had any more."""
        self.expect_here(n=n, done=done)
        listed = self._list(slots, rings)
        # A bare number would be passed as 32 bits.
        arrays = [ctypes.c_void_p(_array(name, tensor, listed.n, "int32")) for name, tensor in (("n", n), ("done", done))]
        self.library.call("rewind", self._slots, ctypes.byref(listed), *arrays, self.execution(**execution))

    def check(self, clear=False):
        """Bits of faults that steps have found so far (REPLAYSSM_FAULT_...), without waiting for any; 0: none."""
        report = _make("report")
        self.library.call("check", self._slots, ctypes.c_int32(clear), ctypes.byref(report))
        return report.bits


class Batch:
    """Rows of a model step: a slot each, and so many tokens.

    slots: int32 or int64 per row, negative (or null_id, if given) for rows that are padding; rings: where their ids differ from slots'. tokens: of every row;
    or cu_seqlens (int32, rows + 1) with max_tokens, rows one behind the other: then tensors have the axis token in front instead of row and token.
    flush: uint8 per row, nonzero to fold now; generation: uint32 per row, of the request that a commit is for. keep_outputs: outputs of padding are left alone
    instead of becoming zero. extend: tokens of a prompt, all of which are taken, without rollback; of these the last keep_tail stay records.
    """

    def __init__(
        self,
        slots,
        tokens=None,
        rings=None,
        cu_seqlens=None,
        n_tokens=None,
        max_tokens=0,
        null_id=None,
        flush=None,
        generation=None,
        keep_outputs=False,
        extend=False,
        keep_tail=0,
    ):
        if (tokens is None) == (cu_seqlens is None):
            raise ValueError("a batch has tokens or cu_seqlens; expected one of them")
        flags = (_NULL_ID if null_id is not None else 0) | (_KEEP_NULL_OUTPUTS if keep_outputs else 0) | (_EXTEND if extend else 0)
        # They are read until the commit has run.
        self.kept = {"slots": slots, "rings": rings, "cu_seqlens": cu_seqlens, "flush": flush, "generation": generation}
        self.rows = _length("slots", slots)
        if (cu_seqlens is None) != (n_tokens is None):
            raise ValueError(f"n_tokens is {n_tokens}; expected the tokens that packed tensors have with cu_seqlens, None without")
        self.lead = (self.rows, tokens) if cu_seqlens is None else (n_tokens,)
        self.batch = _make(
            "batch",
            flags=flags,
            n_rows=self.rows,
            tokens=tokens or 0,
            max_tokens=max_tokens,
            null_id=null_id or 0,
            keep_tail=keep_tail,
            n_tokens=n_tokens or 0,
            slots=_ids("slots", slots),
            rings=_ids("rings", rings, self.rows),
            cu_seqlens=_array("cu_seqlens", cu_seqlens, self.rows + 1, "int32"),
            flush=_array("flush", flush, self.rows, "uint8", "bool"),
            generation=_array("generation", generation, self.rows, "uint32", "int32"),
        )
        self.is_extend = extend


def _lead(batch):
    if not isinstance(batch, Batch):
        raise TypeError(f"batch is {batch!r}; expected a Batch")
    return batch.lead


class _Layers:
    _handle = None  # until a constructor is through

    def __init__(self, slots, family, n_layers, io, out, fmt, readout, **dims):
        if not isinstance(slots, Slots):
            raise TypeError(f"slots is {slots!r}; expected Slots")
        self.slots = slots
        description = _make(
            "pool_desc",
            family=_choice("kind", _FAMILIES, family),
            n_layers=n_layers,
            io=_choice("io", _DTYPES, _name(io)),
            out=_choice("out", _DTYPES, _name(out)) if out else 0,
            format=_choice("fmt", _FORMATS, fmt),
            readout=_choice("readout", _READOUTS, readout),
            **dims,
        )
        self._handle = slots._create("layers", slots._slots, ctypes.byref(description), None, ctypes.c_int32(0))

    def __del__(self):
        if self._handle:
            self.slots.library.destroy("layers", self._handle)

    def _run(self, name, layer, batch, args, execution, **tensors):
        self.slots.expect_here(**batch.kept, **tensors)
        _number("layer", layer)
        name += "_extend" if batch.is_extend else "_step"
        self.slots.library.call(
            name, self._handle, _number("layer", layer), ctypes.byref(batch.batch), ctypes.byref(args), self.slots.execution(**execution)
        )

    def load(self, layer, slots, state, rings=None, position=None, transposed=False, **execution):
        """Takes states over that lie outside: state [entry, head, row, column] of the family ([entry, head, column, row] if transposed), of any of the dtypes;
        position: int64 per entry, the ring's own without."""
        self._state("import", layer, slots, state, rings, position, transposed, execution)

    def save(self, layer, slots, state, rings=None, position=None, transposed=False, **execution):
        """The exact states at the committed position, or at a held one, into state."""
        self._state("export", layer, slots, state, rings, position, transposed, execution)

    def _state(self, name, layer, slots, state, rings, position, transposed, execution):
        _number("layer", layer)
        if layer < 0:  # to the library: all layers
            raise ValueError(f"layer is {layer}; expected 0 or more")
        n, shape = _length("slots", slots), self.state_shape
        shape = (n, shape[0], shape[2], shape[1]) if transposed else (n, *shape)
        if tuple(_tensor("state", state).shape) != shape or state.stride()[3] != 1:
            raise ValueError(
                f"state has the shape {tuple(state.shape)} and strides {tuple(state.stride())}; expected {shape}, the last dimension contiguous"
            )
        self.slots.expect_here(state=state, position=position)
        strides = state.stride()
        if any(size > 1 and stride < 1 for size, stride in zip(shape, strides)):  # to the library 0 is: without gaps
            raise ValueError(f"state has the strides {tuple(strides)}; expected 1 or more")
        described = _make(
            "state",
            dtype=_dtype("state", state, ("float32", "bfloat16", "float16")),
            orientation=int(transposed),
            layer=layer,
            data=state.data_ptr(),
            stride_entry=strides[0],
            stride_head=strides[1],
            stride_row=strides[2],
        )
        self.slots.library.call(
            name,
            self._handle,
            ctypes.byref(self.slots._list(slots, rings)),
            ctypes.c_void_p(_array("position", position, n, "int64")),  # a bare number would be passed as 32 bits
            ctypes.byref(described),
            self.slots.execution(**execution),
        )


class Mamba2Layers(_Layers):
    """Layers of Mamba-2. fmt: split32 (the default), f32, bf16, f16; readout: high, full, exact; see docs/KERNELS.md."""

    def __init__(self, slots, n_layers, nheads, headdim, dstate, ngroups, io="bfloat16", out=None, fmt=None, readout=None):
        super().__init__(slots, "mamba2", n_layers, io, out, fmt, readout, nheads=nheads, headdim=headdim, dstate=dstate, ngroups=ngroups)
        self.heads, self.groups, self.state_shape = (nheads, headdim), (ngroups, dstate), (nheads, headdim, dstate)

    def step(self, layer, batch, x, B, C, dt, A, D=None, dt_bias=None, z=None, out=None, dt_softplus=True, **execution):
        """x, z, out [row, token, head, headdim]; B, C [row, token, group, dstate]; dt [row, token, head] raw; A, dt_bias [head]; D [head] or [head, headdim]."""
        per_element = D is not None and len(_tensor("D", D).shape) == 2
        args = _make(
            "mamba2_args",
            no_softplus=int(not dt_softplus),
            x=_vectors("x", x, _lead(batch), self.heads),
            B=_vectors("B", B, _lead(batch), self.groups),
            C=_vectors("C", C, _lead(batch), self.groups),
            dt=_vectors("dt", dt, _lead(batch), self.heads[:1]),
            A=_vectors("A", A, (), self.heads[:1]),
            dt_bias=_vectors("dt_bias", dt_bias, (), self.heads[:1]),
            D=_vectors("D", D, (), self.heads if per_element else self.heads[:1]),
            D_per_element=int(per_element),
            z=_vectors("z", z, _lead(batch), self.heads),
            out=_vectors("out", out, _lead(batch), self.heads),
        )
        self._run("mamba2", layer, batch, args, execution, x=x, B=B, C=C, dt=dt, A=A, D=D, dt_bias=dt_bias, z=z, out=out)


class DeltaLayers(_Layers):
    """Layers of Gated DeltaNet (kind gdn) or Kimi Delta Attention (kda): H key heads of K, HV value heads of V."""

    def __init__(self, slots, n_layers, H, HV, K, V, kind="gdn", head_map="grouped", io="bfloat16", out=None, fmt=None, readout=None):
        _choice("kind", {"gdn": 2, "kda": 3}, kind)
        super().__init__(slots, kind, n_layers, io, out, fmt, readout, H=H, HV=HV, K=K, V=V, head_map=_choice("head_map", _HEAD_MAPS, head_map))
        self.keys, self.values, self.state_shape = (H, K), (HV, V), (HV, V, K)
        self.gates = (HV, K) if kind == "kda" else (HV,)

    def step(
        self,
        layer,
        batch,
        q,
        k,
        v,
        g,
        beta,
        A_log=None,
        dt_bias=None,
        out=None,
        gate="softplus",
        lower_bound=0.0,
        scale=0.0,
        l2norm=True,
        l2norm_eps=0.0,
        beta_sigmoid=True,
        **execution,
    ):
        """q, k [row, token, key head, K]; v, out [row, token, value head, V]; g [row, token, value head] (KDA: and K): what gates are made of, or with gate
        log_decay their logarithms; beta [row, token, value head]; A_log [value head]; dt_bias [value head] (KDA: and K). scale 0: K^-1/2."""
        heads = self.values[:1]
        args = _make(
            "delta_args",
            gate=_choice("gate", _GATES, gate),
            q=_vectors("q", q, _lead(batch), self.keys),
            k=_vectors("k", k, _lead(batch), self.keys),
            v=_vectors("v", v, _lead(batch), self.values),
            g=_vectors("g", g, _lead(batch), self.gates),
            beta=_vectors("beta", beta, _lead(batch), heads),
            A_log=_vectors("A_log", A_log, (), heads),
            dt_bias=_vectors("dt_bias", dt_bias, (), self.gates),
            lower_bound=lower_bound,
            scale=scale,
            l2norm_eps=l2norm_eps,
            no_l2norm=int(not l2norm),
            beta_processed=int(not beta_sigmoid),
            out=_vectors("out", out, _lead(batch), self.values),
        )
        self._run("delta", layer, batch, args, execution, q=q, k=k, v=v, g=g, beta=beta, A_log=A_log, dt_bias=dt_bias, out=out)


class Conv1dLayers(_Layers):
    """Depthwise causal convolutions of width 2 to 4 in front of such layers."""

    def __init__(self, slots, n_layers, channels, width, io="bfloat16", out=None):
        super().__init__(slots, "conv1d", n_layers, io, out, None, None, channels=channels, width=width)
        self.channels, self.width, self.state_shape = channels, width, (1, channels, width - 1)

    def step(self, layer, batch, x, out, weight, bias=None, silu=True, **execution):
        """x, out [row, token, 1, channels]; weight [channels, width]; bias [channels]."""
        args = _make(
            "conv1d_args",
            no_silu=int(not silu),
            x=_vectors("x", x, _lead(batch), (1, self.channels)),
            out=_vectors("out", out, _lead(batch), (1, self.channels)),
            weight=_vectors("weight", weight, (), (self.channels, self.width)),
            bias=_vectors("bias", bias, (), (self.channels,)),
        )
        self._run("conv1d", layer, batch, args, execution, x=x, out=out, weight=weight, bias=bias)
