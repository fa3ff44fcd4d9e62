"""Import of our torch.distributed.checkpoint exports.

``.metadata`` is a pickle; it is read as data (``inert``), so nothing in it can
run. Each chunk is a ``torch.save`` file inside a ``.distcp`` file and is read
with ``weights_only=True``.
"""

from __future__ import annotations

import io
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch

from megatron_port.core.config.schema import ModelConfig
from megatron_port.core.dist.record import BUFFER, WEIGHT
from megatron_port.core.errors import CheckpointError
from megatron_port.core.model.shapes import buffer_shapes, model_records, parameter_shapes
from megatron_port.run.saved_model import model_of
from megatron_port.tools.interop.export_dcp import Imported, dcp_key, saved_rule
from megatron_port.tools.interop.inert import MAX_BYTES, Inert, read_inert
from megatron_port.tools.interop.sidecar import read_sidecar
from megatron_port.tools.interop.staged import Stage
from megatron_port.tools.interop.unpickle import check_torch_file, first_line

METADATA = ".metadata"
_MAX_CHUNK = 1 << 33


@dataclass(frozen=True)
class _Chunk:
    """Location of one slice of a tensor."""

    offset: tuple[int, ...]
    file: str
    start: int
    length: int


@dataclass(frozen=True)
class _Entry:
    shape: tuple[int, ...]
    sizes: dict[tuple[int, ...], tuple[int, ...]]
    """Offset → shape of each box."""


def is_dcp(source: Path) -> bool:
    """Whether this folder looks like one."""
    return (source / METADATA).is_file()


def read_dcp(source: Path, stage: Stage, model: ModelConfig | None = None) -> Imported:
    """Read a checkpoint with our keys (``export_dcp``). Tensors go through ``stage``.

    Raises:
        CheckpointError: files are missing or damaged, or tensors do not fit the model.
    """
    entries, chunks = _metadata(source / METADATA)
    sidecar = read_sidecar(source)
    model = model or model_of(sidecar.config if sidecar else {}, str(source))
    rule = saved_rule(sidecar.config if sidecar else None)
    wanted = [(r.name, {WEIGHT: r.shape} | {k.name: k.shape(r) for k in rule.state(r)})
              for r in model_records(model).values()]
    wanted += [(name, {BUFFER: shape}) for name, shape in buffer_shapes(model).items()]
    for name, shapes in wanted:
        for kind, shape in shapes.items():
            entry = entries.get(dcp_key(name, kind))
            if entry is None:
                continue
            if entry.shape != shape:
                raise CheckpointError(
                    f"{source}: {dcp_key(name, kind)} has shape {entry.shape}; {name} of the model has {shape}"
                )
            for chunk in chunks.get(dcp_key(name, kind), []):
                size = entry.sizes.get(chunk.offset)
                tensor = _load(source, chunk, size, dcp_key(name, kind))
                stage.put(name, kind, shape, chunk.offset, tensor)
    pieces = stage.pieces()
    if sidecar is None:
        return Imported(model=model, pieces=pieces, optimizer_steps=_steps(source, model, chunks))
    return Imported(
        model=model, pieces=pieces, step=sidecar.step, samples=sidecar.samples, tokens=sidecar.tokens,
        scalars=sidecar.scalars, config=sidecar.config, extra=sidecar.extra,
    )


def _steps(source: Path, model: ModelConfig, chunks: dict[str, list[_Chunk]]) -> int | None:
    for name in parameter_shapes(model):
        for chunk in chunks.get(dcp_key(name, "step"), []):
            return int(_load(source, chunk, (), dcp_key(name, "step")))
    return None


def _load(source: Path, chunk: _Chunk, size: tuple[int, ...] | None, key: str) -> torch.Tensor:
    path = source / chunk.file
    if size is None:
        raise CheckpointError(f"{source / METADATA}: damaged: {key} has no box at {chunk.offset}")
    try:
        have = path.stat().st_size
        if chunk.start + chunk.length > have or chunk.length > _MAX_CHUNK:
            raise CheckpointError(
                f"{path}: {key} lies at {chunk.start} + {chunk.length} bytes, the file has {have}; it is damaged"
            )
        with open(path, "rb") as stream:
            stream.seek(chunk.start)
            data = stream.read(chunk.length)
        check_torch_file(io.BytesIO(data))
        tensor = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror or error}") from None
    except CheckpointError:
        raise
    except Exception as error:  # torch's readers raise many kinds
        raise CheckpointError(f"{path}: {key} cannot be read: {first_line(error)}") from None
    if not isinstance(tensor, torch.Tensor) or tuple(tensor.shape) != size:
        shape = tuple(tensor.shape) if isinstance(tensor, torch.Tensor) else type(tensor).__name__
        raise CheckpointError(f"{path}: {key} at {chunk.offset} is {shape}, {METADATA} says {size}; it is damaged")
    return tensor


def _metadata(path: Path) -> tuple[dict[str, _Entry], dict[str, list[_Chunk]]]:
    try:
        if path.stat().st_size > MAX_BYTES:
            raise CheckpointError(f"{path}: {path.stat().st_size} bytes; metadata has at most {MAX_BYTES}")
        data = path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror or error}") from None
    try:
        state = read_inert(data, str(path)).state
        entries = {key: _entry(v) for key, v in state["state_dict_metadata"].items() if "size" in v.state}
        chunks: dict[str, list[_Chunk]] = {}
        for index, info in state["storage_data"].items():
            key = _text(index.state["fqn"])
            file = _text(info.state["relative_path"])
            if "/" in file or "\\" in file or file.startswith("."):
                raise CheckpointError(f"{path}: file name {file!r:.100} is not allowed")
            if index.state.get("offset") is None or info.state.get("transform_descriptors"):
                continue
            chunks.setdefault(key, []).append(
                _Chunk(_sizes(index.state["offset"]), file, _count(info.state["offset"]), _count(info.state["length"]))
            )
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path}: damaged, or of another version of torch: {first_line(error)}") from None
    return entries, chunks


def _entry(value: Inert) -> _Entry:
    sizes = {_sizes(c.state["offsets"]): _sizes(c.state["sizes"]) for c in value.state["chunks"]}
    return _Entry(_sizes(value.state["size"]), sizes)


def _sizes(value: Any) -> tuple[int, ...]:
    """A ``torch.Size``: an inert call with one tuple."""
    items = value.args[0] if isinstance(value, Inert) and value.args else () if isinstance(value, Inert) else value
    sizes = tuple(_count(n) for n in items)
    if prod(sizes) >= 1 << 63:
        raise ValueError(f"{sizes} elements")
    return sizes


def _count(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 1 << 63:
        raise ValueError(f"{value!r:.60} is no size")
    return value


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r:.60} is no name")
    return value
