"""The model's file: tensors by name, metadata. README.md lists them."""

import base64
import json
import os

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from model import MODEL


def export_tensors(model):
    """The file's tensors: matrices as bf16, vectors as f32; Mamba-2's A = -exp(A_log)."""
    out = {"embedding": model.embedding, "norm": model.norm.weight}
    for i, layer in enumerate(model.layers):
        for name, p in layer.named_parameters():
            name = name.removesuffix("norm.weight") + "norm" if name.endswith("norm.weight") else name.removesuffix(".weight")
            out[f"layers.{i}.{name}"] = p
        if MODEL["layers"][i] == "M":
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
    metadata = {"config": json.dumps(MODEL), "license": "MIT OR Apache-2.0"} | {k: str(v) for k, v in metadata.items()}
    partial = path.with_suffix(".partial")
    save_file(tensors, partial, metadata=metadata)
    os.chmod(partial, 0o644)
    os.replace(partial, path)


def read_file(path):
    with safe_open(path, "pt") as f:
        return {k: f.get_tensor(k) for k in f.keys()}, f.metadata()


def base64_of(array):
    return base64.b64encode(np.ascontiguousarray(array).tobytes()).decode()
