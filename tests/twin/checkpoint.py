"""Reads a checkpoint's tensors with numpy: manifest.json and safetensors files, as evidence/definitions.md has them."""

from __future__ import annotations

import json
from math import prod
from pathlib import Path

import numpy as np

TYPES = {"F64": "<f8", "F32": "<f4", "F16": "<f2"}


def read(folder: Path, kind: str) -> dict[str, np.ndarray]:
    """Name → whole tensor of a kind: ``weight`` (masters under half precision), ``exp_avg``, ``exp_avg_sq`` or
    ``ema``."""
    pieces = json.loads((folder / "manifest.json").read_text())["manifest"]["pieces"]
    out: dict[str, np.ndarray] = {}
    for piece in pieces:
        if piece["kind"] != kind:
            continue
        whole = out.setdefault(piece["name"], np.full(piece["global_shape"], np.nan))
        box = tuple(slice(o, o + n) for o, n in zip(piece["offset"], piece["shape"]))
        local = whole[box].reshape(-1)
        start = piece["flat_start"]
        local[start : start + piece["numel"]] = values(folder / piece["file"], piece["key"])
        whole[box] = local.reshape(piece["shape"])
    for name, whole in out.items():
        assert prod(whole.shape) and not np.isnan(whole).any(), f"{name} is not covered"
    return out


def values(file: Path, key: str) -> np.ndarray:
    """One tensor of a safetensors file, as stored."""
    raw = file.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    entry = json.loads(raw[8 : 8 + length])[key]
    first, last = entry["data_offsets"]
    return np.frombuffer(raw[8 + length + first : 8 + length + last], TYPES[entry["dtype"]])
