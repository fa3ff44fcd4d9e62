"""The end of every import: pieces of foreign tensors become a committed checkpoint of ours."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, fields, replace
from math import prod
from pathlib import Path
from typing import Any

from megatron_port.core.checkpoint.format import SavedState, directory_name
from megatron_port.core.checkpoint.slices import FlatRange, cover_fault
from megatron_port.core.checkpoint.writer import save_checkpoint
from megatron_port.core.config.dump import as_dict
from megatron_port.core.config.schema import LayoutConfig, ModelConfig, OptimizerConfig, RunConfig
from megatron_port.core.dist.state import BUFFER, WEIGHT, StatePiece
from megatron_port.core.errors import CheckpointError, ConfigError
from megatron_port.core.model.shapes import buffer_shapes, model_records
from megatron_port.core.optim.rules import OptimizerRule, mixed_kinds, rule_of, state_shapes

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
