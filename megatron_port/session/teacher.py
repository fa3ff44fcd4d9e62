"""The teacher of a run ([distillation]): where its weights are, whether it fits the run, and its share on each rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from megatron_port.config.checks import problems
from megatron_port.config.distillation import as_teacher, teacher_run
from megatron_port.config.model import ModelConfig
from megatron_port.config.schema import RunConfig
from megatron_port.data.teacher_file import StoredLogits
from megatron_port.errors import CheckpointError, ConfigError
from megatron_port.model.distilled import PREFIX
from megatron_port.parallel.state import StateReader
from megatron_port.session.base_weights import fingerprint

if TYPE_CHECKING:
    from megatron_port.session.weights import Weights


def open_teacher(config: RunConfig) -> Weights:
    """Open ``distillation.teacher``; its model predicts one token ahead, whatever was trained with it.

    Raises:
        CheckpointError: nothing usable is there.
        ConfigError: it has another vocabulary, reads shorter sequences, or cannot be split as the run is.
    """
    from megatron_port.session.weights import open_weights  # reads every format; most runs have no teacher

    asked = config.distillation.teacher
    try:
        weights = open_weights(asked)
    except CheckpointError as error:
        raise CheckpointError(f'distillation.teacher = "{asked}": {error}') from None
    weights = replace(weights, model=as_teacher(weights.model))
    found = teacher_problems(config, weights.model)
    if found:
        weights.close()
        raise ConfigError([f'distillation.teacher = "{asked}": {problem}' for problem in found])
    return weights


def teacher_problems(config: RunConfig, teacher: ModelConfig) -> list[str]:
    """Return why a model cannot teach a run."""
    mine, layout = config.model, config.layout
    out = []
    if teacher.vocab_size != mine.vocab_size:
        out.append(
            f"its vocabulary has {teacher.vocab_size} tokens and the model's {mine.vocab_size}: their predictions can "
            "only be compared token by token; train the model with the teacher's tokenizer and model.vocab_size"
        )
    if teacher.seq_length < mine.seq_length:
        out.append(
            f"it reads sequences of {teacher.seq_length} tokens, and model.seq_length is {mine.seq_length}; use "
            f"model.seq_length = {teacher.seq_length} or less"
        )
    stages = layout.pipeline_parallel_size * layout.virtual_pipeline_size
    if teacher.num_layers < stages:
        out.append(
            f"it has {teacher.num_layers} layers for {stages} stages (layout.pipeline_parallel_size × "
            f"virtual_pipeline_size), each of which holds some; use {teacher.num_layers} or fewer"
        )
    tp = layout.tensor_parallel_size
    copies = [model.kv_heads_held(tp) // model.kv_heads for model in (teacher, mine)]
    if copies[0] != copies[1]:
        out.append(
            f"with layout.tensor_parallel_size {tp}, {copies[0]} ranks hold the same of its {teacher.kv_heads} "
            f"key/value heads and {copies[1]} the same of the model's {mine.kv_heads}: one mesh has one number; use at "
            f"most {min(teacher.kv_heads, mine.kv_heads)}"
        )
    if layout.expert_parallel_size > 1 and not (teacher.moe.enabled or mine.moe.enabled):
        out.append(f"layout.expert_parallel_size {layout.expert_parallel_size}: neither has experts to divide; use 1")
    if out:
        return out
    alone = teacher_run(config, replace(teacher, seq_length=mine.seq_length))  # the sequences are the run's
    return [f"split as the run is: {problem}" for problem in problems(alone) if problem not in problems(config)]


def teacher_state(config: RunConfig) -> Callable[[StateReader], AbstractContextManager[StateReader]]:
    """Return what puts the teacher's weights beside a reader of the model's, for as long as something is loaded."""

    @contextmanager
    def beside(read: StateReader) -> Iterator[StateReader]:
        weights = open_teacher(config)

        def both(
            name: str, kind: str, offset: tuple[int, ...], shape: tuple[int, ...], /, *,
            out: torch.Tensor | None = None,
        ) -> torch.Tensor:
            if name.startswith(PREFIX):
                return weights.read(name.removeprefix(PREFIX), kind, offset, shape, out=out)
            return read(name, kind, offset, shape, out=out)

        try:
            yield both
        finally:
            weights.close()

    return beside


def teacher_identity(config: RunConfig) -> dict[str, str] | None:
    """Return which teacher a run has, for its checkpoints: a fingerprint of its values, and where they were; None: it
    has none.

    Raises:
        CheckpointError, ConfigError, DataError: as :func:`open_teacher`; the folder of its logits has no whole header.
    """
    d = config.distillation
    if d.logits:
        header = StoredLogits(d.logits).header
        return {"fingerprint": header.fingerprint, "path": header.teacher}
    if not d.teacher:
        return None
    weights = open_teacher(config)
    try:
        return {"fingerprint": fingerprint(weights.model, weights.read), "path": d.teacher}
    finally:
        weights.close()


def check_teacher(extra: Mapping[str, Any], config: RunConfig, where: str) -> None:
    """Check that a run continues with the teacher of the checkpoint whose extra state this is, or without any.

    Raises:
        CheckpointError: it has another one.
    """
    saved, mine = extra.get("teacher"), teacher_identity(config)
    if not isinstance(saved, dict) or mine is None or saved.get("fingerprint") == mine["fingerprint"]:
        return
    raise CheckpointError(
        f"{where} was trained with the teacher {saved.get('path')} (fingerprint {str(saved.get('fingerprint'))[:12]}), "
        f"and [distillation] names {mine['path']} (fingerprint {mine['fingerprint'][:12]}): name that teacher, or "
        "begin another run with these weights (checkpoint.initial_weights)"
    )
