"""torch's distributed checkpoints: written from ours, and read into it."""

from __future__ import annotations

import io
import os
import shutil
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch.distributed.checkpoint import FileSystemWriter, SavePlan, SavePlanner, save
from torch.distributed.checkpoint.default_planner import create_default_global_save_plan
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from megatron_port.core.checkpoint.format import SavedState, directory_name
from megatron_port.core.checkpoint.reader import Checkpoint
from megatron_port.core.checkpoint.shard import disk_error
from megatron_port.core.checkpoint.slices import FlatRange, cover_fault, slabs
from megatron_port.core.checkpoint.writer import save_checkpoint
from megatron_port.core.config.dump import as_dict
from megatron_port.core.config.schema import LayoutConfig, ModelConfig, OptimizerConfig, RunConfig
from megatron_port.core.dist.record import BUFFER, WEIGHT, StatePiece
from megatron_port.core.errors import CheckpointError, ConfigError
from megatron_port.core.io.files import free_bytes, fsync_directory, fsync_file
from megatron_port.core.model.shapes import buffer_shapes, model_records, parameter_shapes
from megatron_port.core.optim.rules import OptimizerRule, mixed_kinds, rule_of, state_shapes
from megatron_port.run.saved_model import model_of
from megatron_port.tools.interop.hf_check import MAX_BYTES, Inert, read_inert
from megatron_port.tools.interop.sidecar import read_sidecar, write_sidecar
from megatron_port.tools.interop.unpickle import check_torch_file, first_line

# Export to torch's distributed checkpoint (``torch.distributed.checkpoint``, "DCP").
#
# Keys are what a nested ``{"model": …, "optimizer": {"state": …}}`` flattens to::
#
#     model.layers.0.attention.qkv.weight                      float32 masters
#     optimizer.state.layers.0.attention.qkv.weight.exp_avg
#     optimizer.state.layers.0.attention.qkv.weight.exp_avg_sq
#     optimizer.state.layers.0.attention.qkv.weight.step       float32, 0-dim
#
# torch's own writer does the writing; our planner gives it chunks of at most :data:`CHUNK_BYTES` that are read from
# the checkpoint when their turn comes, and takes the memory of each back when the next is asked for. Peak memory is
# about two chunks, whatever the model. A folder that appears whole or not at all: built under a temporary name beside
# its place, fsynced, renamed.

def tagged_folder(source: Path, latest: str, wanted: Callable[[Path], bool]) -> Path | None:
    """Return ``source``, or the folder in it that its file ``latest`` names, whichever is ``wanted``; None: neither."""
    if wanted(source):
        return source
    path = source / latest
    if path.is_file() and path.stat().st_size < 4096:
        tag = path.read_text(errors="replace").strip()
        if tag and "/" not in tag and not tag.startswith(".") and wanted(source / tag):
            return source / tag
    return None


@contextmanager
def building(out: Path, needed: int) -> Iterator[Path]:
    """A temporary folder that becomes ``out`` when the body ends, and is removed when it fails.

    ``needed``: bytes that the body will write; checked against the free space first.

    Raises:
        CheckpointError: ``out`` exists, too little space is free, or the file system refused.
    """
    if out.exists() or out.is_symlink():
        raise CheckpointError(f"{out} exists; give a new name, or remove it first")
    free = free_bytes(out.absolute())
    if free is not None and free < needed:
        raise CheckpointError(
            f"{out}: {needed} bytes are needed, {free} are free; free some space or use another folder"
        )
    part = out.with_name(f".{out.name}.{os.getpid()}.part")
    try:
        try:
            out.parent.mkdir(parents=True, exist_ok=True)
            shutil.rmtree(part, ignore_errors=True)
            part.mkdir()
            yield part
            for folder, _, files in os.walk(part):
                for name in files:
                    fsync_file(Path(folder, name))
                fsync_directory(Path(folder))
            os.rename(part, out)
            fsync_directory(out.parent)
        except OSError as error:
            raise disk_error(error, out, needed) from error
    finally:
        shutil.rmtree(part, ignore_errors=True)


@contextmanager
def scratch(beside: Path, needed: int) -> Iterator[Path]:
    """A folder for ``needed`` bytes of intermediate files on the file system of ``beside``; removed in any case."""
    free = free_bytes(beside.absolute())
    if free is not None and free < needed:
        raise CheckpointError(
            f"{beside}: importing needs {needed} bytes of free space (a copy of the source and the result), "
            f"{free} are free; free some space or use another folder"
        )
    folder = beside.with_name(f".{beside.name}.{os.getpid()}.scratch")
    try:
        try:
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
        except OSError as error:
            raise disk_error(error, folder, needed) from error
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


CHUNK_BYTES = 1 << 26
_STEPS = "optimizer_steps"


def dcp_key(name: str, kind: str) -> str:
    """The key of one of our tensors; ``kind`` may also be ``step``."""
    return ".".join(dcp_path(name, kind))


def dcp_path(name: str, kind: str) -> tuple[str, ...]:
    """Return the path of a tensor in the nested state dict."""
    return ("model", name) if kind in (WEIGHT, BUFFER) else ("optimizer", "state", name, kind)


def export_dcp(checkpoint: Checkpoint, out: Path, *, chunk_bytes: int = CHUNK_BYTES) -> Path:
    """Write ``checkpoint`` to the new folder ``out``. Returns it.

    Raises:
        CheckpointError: the source is damaged, ``out`` exists, or the disk is full or refuses.
    """
    planner = _Planner(checkpoint, chunk_bytes)
    with building(out, planner.bytes) as part:
        try:
            # No overlap with a GPU copy: chunks are resolved one after the other, each after the last was written.
            writer = FileSystemWriter(part, per_thread_copy_ahead=0, sync_files=False)
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # one process is meant
                save({}, storage_writer=writer, planner=planner, no_dist=True)
        except Exception as error:  # DCP wraps what a rank raised
            _unwrap(error)
            raise
        write_sidecar(part, checkpoint, "canonical")
    return out


def _unwrap(error: Exception) -> None:
    """Raise what a planner or the file system raised inside torch's wrapper, if that is what it is."""
    failures = getattr(error, "failures", {})
    for inner in failures.values():
        cause: Any = inner[0] if isinstance(inner, tuple) else inner
        if isinstance(cause, (CheckpointError, OSError)):
            raise cause from None


class _Planner(SavePlanner):
    """One write item a chunk; data is read when the item is written."""

    def __init__(self, checkpoint: Checkpoint, chunk_bytes: int) -> None:
        self.checkpoint, self.chunk_bytes = checkpoint, chunk_bytes
        state = [kind for kind in checkpoint.kinds() if kind not in (WEIGHT, BUFFER)]
        self.kinds = [kind for kind in (WEIGHT, BUFFER, *state) if kind in checkpoint.kinds()]
        self.sources = {
            dcp_key(name, kind): (name, kind) for kind in self.kinds for name in checkpoint.names(kind)
        }
        self.steps = int(checkpoint.scalars.get(_STEPS, checkpoint.step))
        self.paths: dict[str, tuple[str, ...]] = {k: dcp_path(*source) for k, source in self.sources.items()}
        updated = dict.fromkeys(name for kind in state for name in checkpoint.names(kind))
        self.paths |= {dcp_key(name, "step"): dcp_path(name, "step") for name in updated}
        self.dtypes = {key: checkpoint.dtype(*source) for key, source in self.sources.items()}
        self.bytes = sum(prod(checkpoint.shape(*s)) * self.dtypes[k].itemsize for k, s in self.sources.items())
        self.last: torch.Tensor | None = None

    def set_up_planner(
        self, state_dict: Any, storage_meta: StorageMeta | None = None, is_coordinator: bool = False
    ) -> None:
        """Everything is known already."""

    def create_local_plan(self) -> SavePlan:
        """The chunks of every tensor."""
        items = [item for key in self.paths for item in self._items(key)]
        return SavePlan(items, planner_data=self.paths)

    def _items(self, key: str) -> Iterator[WriteItem]:
        source = self.sources.get(key)
        shape = self.checkpoint.shape(*source) if source else ()
        dtype = self.dtypes.get(key, torch.float32)
        for i, (offset, size) in enumerate(slabs(shape, max(1, self.chunk_bytes // dtype.itemsize))):
            chunk = ChunkStorageMetadata(offsets=torch.Size(offset), sizes=torch.Size(size))
            data = TensorWriteData(chunk=chunk, properties=TensorProperties(dtype=dtype), size=torch.Size(shape))
            yield WriteItem(index=MetadataIndex(key, offset, i), type=WriteItemType.SHARD, tensor_data=data)

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """torch's own, for one rank."""
        plans, metadata = create_default_global_save_plan(all_plans)
        return plans, replace(metadata, planner_data=self.paths)

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        """Nothing to add."""
        return new_plan

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor:
        """Read a chunk. torch's writer keeps a reference to every tensor that it wrote, so the last is emptied."""
        if self.last is not None:
            self.last.untyped_storage().resize_(0)
        key, data = write_item.index.fqn, write_item.tensor_data
        assert data is not None
        source = self.sources.get(key)
        if source is None:
            self.last = torch.tensor(float(self.steps))
        else:
            # A copy of our own: what a reader returns may lie in memory that cannot be given back early.
            self.last = self.checkpoint.read(*source, tuple(data.chunk.offsets), tuple(data.chunk.sizes)).clone()
        return self.last


# The end of every import: pieces of foreign tensors become a committed checkpoint of ours.

Note = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class Imported:
    """Contents of a foreign checkpoint."""

    model: ModelConfig
    pieces: list[StatePiece]
    step: int = 0
    samples: int = 0
    optimizer_steps: int | None = None
    """Updates that the moments have seen; None: as many as steps."""
    scalars: dict[str, float | int] | None = None
    """Our own scalars, where the source holds them."""
    config: dict[str, Any] | None = None
    """Our own configuration, where the source holds it."""
    extra: dict[str, Any] = field(default_factory=dict)
    tokens: int | None = None
    tokenizer: dict[str, Any] = field(default_factory=dict)
    """Tokenizer of the source, as checkpoints record it."""
    data: dict[str, Any] = field(default_factory=dict)


def commit_import(
    found: Imported, directory: Path, *, source: Path, weights_only: bool = False, note: Note = print
) -> Path:
    """Write ``directory/step-N`` from what was found.

    Without moments for every parameter, or with ``weights_only``, only weights are written, at step 0: training
    starts from them with a fresh optimizer.

    Raises:
        CheckpointError: the pieces do not make up the model, the step is there already, or the disk refuses.
    """
    records = model_records(found.model)
    buffers = buffer_shapes(found.model)
    expected = {name: record.shape for name, record in records.items()} | buffers
    wanted: dict[tuple[str, str], tuple[int, ...]] = {}
    shapes: dict[str, dict[str, tuple[int, ...]]] = {}
    if not weights_only:
        rule = saved_rule(found.config)
        wanted = {(r.name, kind.name): kind.shape(r) for r in records.values() for kind in rule.state(r)}
        shapes = state_shapes(rule, records.values())
    groups: dict[tuple[str, str], list[StatePiece]] = {}
    for piece in found.pieces:
        groups.setdefault((piece.name, piece.kind), []).append(piece)
    own = {name: BUFFER if name in buffers else WEIGHT for name in expected}
    _check_weights(groups, expected, own, source)
    lacking = [key for key, shape in wanted.items() if _fault(groups.get(key, []), shape)]
    if lacking:
        if len(lacking) < len(wanted):
            name, kind = lacking[0]
            fault = _fault(groups.get((name, kind), []), wanted[name, kind])
            raise CheckpointError(
                f"{source}: {kind} of {name}: {fault}; with --weights-only the optimizer's state is left out"
            )
        note("no optimizer state in the source: the weights are imported as step 0 of a new run")
    if lacking or weights_only:
        wanted, shapes, found = {}, {}, replace(found, step=0, samples=0, tokens=0, optimizer_steps=0, scalars={})
    if (directory / directory_name(found.step)).exists():
        raise CheckpointError(f"{directory / directory_name(found.step)} exists; give another folder, or remove it")
    steps = found.step if found.optimizer_steps is None else found.optimizer_steps
    config = found.config if found.config is not None else as_dict(RunConfig(model=found.model))
    state = SavedState(
        step=found.step, samples=found.samples,
        tokens=found.samples * found.model.seq_length if found.tokens is None else found.tokens,
        layout=LayoutConfig(), config=config,
        scalars={"optimizer_steps": steps} if found.scalars is None else found.scalars,
        extra={"imported_from": str(source), **found.extra}, tokenizer=found.tokenizer, data=found.data,
    )
    kept = dict.fromkeys([*own.items(), *wanted])
    kinds: dict[str, list[str]] = {}
    for name, kind in kept:
        kinds.setdefault(name, []).append(kind)
    state = replace(state, kinds=mixed_kinds(kinds), shapes=shapes)
    pieces: Iterable[StatePiece] = [p for key, group in groups.items() if key in kept for p in group]
    return save_checkpoint(directory, state, pieces, expected=expected, note=note)


def saved_rule(config: dict[str, Any] | None) -> OptimizerRule:
    """Return the optimizer rule of a saved configuration with its options; AdamW where there is none, or it names none.

    Raises:
        CheckpointError: this process knows no rule of that name.
    """
    table = (config or {}).get("optimizer", {})
    name = table.get("name", "adamw") if isinstance(table, dict) else "adamw"
    try:
        return rule_of(_options(table, name))
    except ConfigError as error:
        raise CheckpointError(f"the optimizer state cannot be read: {error}") from None


def _options(table: Any, name: str) -> OptimizerConfig:
    """The fields of a saved table of ``[optimizer]`` that this version knows; of a damaged one the name alone."""
    usual = OptimizerConfig(name=name)
    try:
        known = {f.name: table[f.name] for f in fields(OptimizerConfig) if f.name in table}
        made = {key: type(getattr(usual, key))(**v) if isinstance(v, dict) else v for key, v in known.items()}
        return OptimizerConfig(**made)
    except (TypeError, ValueError):
        return usual


def _check_weights(
    groups: dict[tuple[str, str], list[StatePiece]], expected: dict[str, tuple[int, ...]], own: dict[str, str],
    source: Path,
) -> None:
    """Every parameter and buffer of the model and no other, whole; ``own``: their kinds. Raises CheckpointError."""
    unknown = sorted({name for name, _ in groups} - set(expected))
    if unknown:
        raise CheckpointError(f"{source}: {unknown[0]} is not a parameter of the model; give its --model FILE.toml")
    for name, shape in expected.items():
        fault = _fault(groups.get((name, own[name]), []), shape)
        if fault:
            raise CheckpointError(
                f"{source}: {own[name]} of {name}, {shape} in the model: {fault}; check --model FILE.toml"
            )


def _fault(pieces: list[StatePiece], shape: tuple[int, ...]) -> str | None:
    """Return why pieces do not make up a tensor of ``shape``; None if they do."""
    if not pieces:
        return "not in the source"
    for p in pieces:
        if tuple(p.global_shape) != shape:
            return f"{tuple(p.global_shape)} in the source ({prod(p.global_shape)} elements)"
    return cover_fault([FlatRange(p.offset, p.shape, p.flat_start, p.tensor.numel()) for p in pieces], shape)


def whole(name: str, kind: str, shape: tuple[int, ...], tensor: Any) -> StatePiece:
    """A piece that is a whole tensor; ``tensor`` has as many elements as ``shape``, row-major."""
    return StatePiece(
        name=name, kind=kind, global_shape=shape, offset=(0,) * len(shape), shape=shape, flat_start=0,
        tensor=tensor.reshape(-1),
    )


# Intermediate tensors on disk: written in files of a bounded size, then seen through memory maps.
#
# An import hands the checkpoint writer all its tensors at once. Mapped files cost
# address space, not memory, so an import needs disk where it would need memory.

Shape = tuple[int, ...]
FILE_BYTES = 1 << 28


class Stage:
    """Slices of parameters put down in ``folder``, in files of about ``file_bytes``.

    ``put_down``: called with the bytes of each slice.
    """

    def __init__(
        self, folder: Path, *, file_bytes: int = FILE_BYTES, put_down: Callable[[int], None] = lambda amount: None
    ) -> None:
        self._folder, self._limit, self._put_down = folder, file_bytes, put_down
        self._waiting: dict[str, torch.Tensor] = {}
        self._bytes = 0
        self._files: list[Path] = []
        self._slices: list[tuple[str, str, Shape, Shape, Shape]] = []
        """(name, kind, global shape, offset, shape) of each tensor, whose place in the list is its key."""

    def put(self, name: str, kind: str, global_shape: Shape, offset: Shape, tensor: torch.Tensor) -> None:
        """Keep the slice of a parameter at ``offset``. At most ``file_bytes`` and one tensor wait in memory."""
        self._waiting[str(len(self._slices))] = tensor.contiguous()
        self._slices.append((name, kind, global_shape, offset, tuple(tensor.shape)))
        self._bytes += tensor.nbytes
        self._put_down(tensor.nbytes)
        if self._bytes >= self._limit:
            self._flush()

    def _flush(self) -> None:
        if self._waiting:
            self._files.append(self._folder / f"{len(self._files):06d}.safetensors")
            save_file(self._waiting, self._files[-1])
            self._waiting, self._bytes = {}, 0

    def pieces(self) -> list[StatePiece]:
        """Return all slices, each as a map of its file."""
        self._flush()
        out = []
        for path in self._files:
            with safe_open(path, framework="pt", device="cpu") as file:
                for key in sorted(file.keys(), key=int):
                    name, kind, global_shape, offset, shape = self._slices[int(key)]
                    out.append(StatePiece(name=name, kind=kind, global_shape=global_shape, offset=offset, shape=shape,
                                          flat_start=0, tensor=file.get_tensor(key).reshape(-1)))
        return out


# Import of our torch.distributed.checkpoint exports.
#
# ``.metadata`` is a pickle; it is read as data (``inert``), so nothing in it can
# run. Each chunk is a ``torch.save`` file inside a ``.distcp`` file and is read
# with ``weights_only=True``.

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
