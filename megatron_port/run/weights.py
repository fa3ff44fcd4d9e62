"""Where weights come from: a run, one of its checkpoints, an import, or a Hugging Face folder. Read slice by slice."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch

from megatron_port.core.checkpoint.reader import Checkpoint, open_checkpoint
from megatron_port.core.config.features import NO_ADAPTERS, NO_SPARSITY, NO_TEACHER
from megatron_port.core.config.loader import load
from megatron_port.core.config.schema import ModelConfig, RunConfig
from megatron_port.core.data.objective import objective_of
from megatron_port.core.dist.agree import agreed
from megatron_port.core.dist.record import StateReader
from megatron_port.core.engine.api import Engine
from megatron_port.core.errors import CheckpointError, DataError
from megatron_port.core.model.shapes import fingerprint, parameter_shapes
from megatron_port.core.registry import PARTS
from megatron_port.core.train.folders import FOLDER, run_folder
from megatron_port.ext.corpora.hf_tokenizer import KEPT, copy_companions, kept_files
from megatron_port.ext.corpora.pinned import (
    FILES,
    PinnedChat,
    Trained,
    end_ids,
    folder_chat,
    pinned_chat,
    pinned_file,
    tokenizer_in,
    trained_with,
)
from megatron_port.ext.corpora.tokenizer import Tokenizer, get_tokenizer, piece_named, settings_beside
from megatron_port.ext.corpora.tokenizer import load as load_tokenizer
from megatron_port.ext.experts.spec import LAST_STEP
from megatron_port.ext.experts.upcycled import UpcycledWeights
from megatron_port.ext.weights.adapter_spec import adapter_parameters
from megatron_port.ext.weights.adapters import InitialAdapters, MergedWeights, over_base
from megatron_port.ext.weights.readers import (
    AveragedCheckpoint,
    SparseWeights,
    check_base,
)
from megatron_port.run.document_starts import check_document_starts
from megatron_port.run.same_model import model_differences, upcycling_differences
from megatron_port.run.saved_model import checkpoint_at, model_of, nothing_at, tuning_of

if TYPE_CHECKING:
    from megatron_port.core.train.hooks import Session


@dataclass(frozen=True)
class Weights:
    """Open source of weights."""

    path: Path
    """The checkpoint or folder that is read."""
    model: ModelConfig
    read: StateReader
    run_file: Path | None
    """``config.toml`` of the run that wrote it."""
    tokenizer_name: str
    """As the data's sidecar said; empty: unknown."""
    tokenizer_folder: Path | None
    """With a Hugging Face tokenizer."""
    close: Callable[[], None]
    trained: Trained | None = None
    """The tokenizer that a checkpoint of ours records."""
    notes: tuple[str, ...] = ()
    """Sentences on what is left out of a Hugging Face folder, or read otherwise than it is written."""

    def tokenizer(self, asked: str = "auto") -> Tokenizer:
        """Return the tokenizer that ``data.tokenizer`` names, or the one that these weights were trained with.

        A file is the one with the hash that the checkpoint records. Raises CheckpointError: not known; DataError: not
        to be had, or exchanged.
        """
        name = asked if asked != "auto" else self.tokenizer_name
        recorded = self.trained is not None and self.trained.name
        if asked == "auto" and self.tokenizer_folder is not None and not recorded:
            return tokenizer_in(self.tokenizer_folder)
        if asked == "auto" and self.trained is not None and name == self.trained.name and self.trained.kind in FILES:
            path = pinned_file(self.trained, "or name another with --set data.tokenizer=hf:FILE")
            return self._as_trained(load_tokenizer(self.trained.kind, str(path), eod=self.trained.piece), self.trained)
        if not name or name == "auto":
            raise CheckpointError(
                f"{self.path} does not say which tokenizer its data used; pass --set data.tokenizer=byte, gpt2 or "
                "hf:FOLDER"
            )
        return get_tokenizer(name)

    def _as_trained(self, tokenizer: Any, trained: Trained) -> Tokenizer:
        """Return a tokenizer that begins texts as documents of training began."""
        tokenizer.added = trained.added(tokenizer)
        named = piece_named(settings_beside(self.tokenizer_folder / "tokenizer_config.json"), "bos_token") if (
            self.tokenizer_folder) else ""
        tokenizer.bos_id = tokenizer.special.get(named, next(iter(tokenizer.added.before), tokenizer.bos_id))
        return cast(Tokenizer, tokenizer)

    def stop_ids(self, tokenizer: Tokenizer) -> tuple[int, ...]:
        """Return the ids that end a text: the tokenizer's, and those of the folder's generation settings."""
        named = end_ids(self.tokenizer_folder) if self.tokenizer_folder else ()
        return tuple(dict.fromkeys((*named, *((tokenizer.eod_id,) if tokenizer.eod_id >= 0 else ()))))

    def chat(self, tokenizer: Tokenizer) -> PinnedChat:
        """Return the chat template that these weights were trained with, or that came with them.

        Raises DataError: there is none, or the one trained with was exchanged.
        """
        found = pinned_chat(self.trained, "or give the prompt as the model expects it") if self.trained else None
        if found is None and self.tokenizer_folder is not None:
            found = folder_chat(self.tokenizer_folder, tokenizer)
        if found is None:
            raise DataError(f"{self.path}: it was not trained on conversations, and no chat template came with it; "
                            "give the prompt as the model expects it, without --chat")
        return found


def open_weights(path: Path | str, *, base: str = "", averaged: bool = False) -> Weights:
    """Detect what is at ``path`` and open it. Of a checkpoint of adapters, the weights that they make of the frozen
    ones: those of ``base``, or of where the run had them. ``averaged``: those of optimizer.ema_decay.

    Raises:
        CheckpointError: nothing with weights is there, it is damaged, or the frozen weights are others.
    """
    path = Path(path)
    if averaged and (_is_hugging_face(path) or not path.exists()):
        raise CheckpointError(f"{path} is no checkpoint of a run, so it has no averaged weights; leave --ema out")
    if _is_hugging_face(path):
        folder = _hugging_face(path)
        return Weights(path, folder.model, folder.read, None, "", path, lambda: None, notes=tuple(folder.notes))
    found = checkpoint_at(path)
    if found is not None:
        return _of_checkpoint(_opened(found, averaged), base)
    if (path / "config.json").is_file():
        _hugging_face(path)  # says what is wrong with it
    raise nothing_at(path)


def _is_hugging_face(path: Path) -> bool:
    return bool(PARTS.function("is a Hugging Face folder")(path))


def _hugging_face(path: Path) -> Any:
    """Return the reader of a Hugging Face folder. Raises CheckpointError: it cannot be read."""
    return PARTS.function("Hugging Face folder")(path)


def _opened(path: Path, averaged: bool) -> Checkpoint:
    found = open_checkpoint(path)
    return AveragedCheckpoint(found) if averaged else found


def _of_checkpoint(checkpoint: Checkpoint, base: str) -> Weights:
    state = checkpoint.manifest.state
    saved = state.config if isinstance(state.config, dict) else {}
    run_file = checkpoint.path.parent.parent / "config.toml"
    kept = kept_files(checkpoint)
    data = saved.get("data", {})
    name = checkpoint.extra.get("tokenizer") or (data.get("tokenizer") if isinstance(data, dict) else "")
    model, tuning = model_of(saved, str(checkpoint.path)), tuning_of(saved, str(checkpoint.path))
    read: StateReader = checkpoint.read
    if tuning.enabled:
        read = MergedWeights(model, tuning, open_base(checkpoint, base).read, read)
    return Weights(
        checkpoint.path, model, read,
        run_file if run_file.is_file() else None, name if isinstance(name, str) and name != "auto" else "",
        kept if kept and any((kept / name).is_file() for name, _ in FILES.values()) else None, checkpoint.close,
        trained_with(checkpoint),
    )


def open_base(checkpoint: Checkpoint, base: str = "", *, verify: bool = True) -> Weights:
    """Open the frozen weights of a checkpoint of adapters, at ``base`` or where its run had them.

    Raises:
        CheckpointError: there are none, or others.
    """
    saved = checkpoint.manifest.state.config
    before = saved.get("checkpoint", {}).get("initial_weights", "")
    try:
        weights = open_weights(base or before)
    except CheckpointError as error:
        raise CheckpointError(
            f"{checkpoint.path} holds adapters, and the weights beside which they were trained are not at "
            f"{base or before}: {error}"
        ) from None
    if verify:
        model = model_of(saved, str(checkpoint.path))
        check_base(checkpoint.extra, model, weights.read, adapters=str(checkpoint.path), base=str(weights.path))
    return weights


def resumed_reader(checkpoint: Checkpoint, session: Session) -> tuple[StateReader, Callable[[], None]]:
    """Return the reader of a whole run's state, and what closes what it opened: under ``fine_tuning`` the frozen
    weights come from ``checkpoint.initial_weights``, which rank 0 checks.

    Raises:
        CheckpointError: they are not those that the adapters were trained beside.
    """
    config: RunConfig = session.config
    if not config.fine_tuning.enabled:
        return checkpoint.read, lambda: None
    base = open_base(checkpoint, config.checkpoint.initial_weights, verify=session.is_rank_zero)
    return over_base(base.read, checkpoint.read, adapter_parameters(config.model, config.fine_tuning)), base.close


def base_identity(session: Session) -> dict[str, str] | None:
    """Return which weights are frozen, on rank 0; None: none are, or another rank."""
    config: RunConfig = session.config
    if not config.fine_tuning.enabled or not session.is_rank_zero:
        return None
    weights = open_weights(config.checkpoint.initial_weights)
    found = {"fingerprint": fingerprint(config.model, weights.read), "path": config.checkpoint.initial_weights}
    weights.close()
    return found


def open_initial(config: RunConfig) -> Weights:
    """Open ``checkpoint.initial_weights``.

    Raises:
        CheckpointError: nothing usable there (of a Hugging Face folder the field that cannot be read is named), or of
            another model than the run's (the fields and both values).
    """
    asked, mine = config.checkpoint.initial_weights, config.model
    weights = open_weights(asked)
    upcycled = mine.moe.enabled and not weights.model.moe.enabled
    compared = upcycling_differences(weights.model, mine) if upcycled else model_differences(
        weights.model, mine, any_length=True
    )
    if compared:
        weights.close()
        what = "a dense model that experts cannot begin as copies of" if upcycled else "another model"
        raise CheckpointError(
            f'checkpoint.initial_weights = "{asked}" holds {what}: {"; ".join(compared)}. Set [model] to '
            "what is there (`megatron-port checkpoint import` writes it as model.toml)"
        )
    if upcycled:
        return replace(weights, model=mine, read=UpcycledWeights(mine, config.seed, weights.read))
    return replace(weights, read=_without_last_step(weights.read))


def _without_last_step(read: StateReader) -> StateReader:
    """Return a reader in which the step before the first counted nothing."""

    def fresh(
        name: str, kind: str, offset: tuple[int, ...], shape: tuple[int, ...], /, *, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        return torch.zeros(shape) if name.endswith(LAST_STEP) else read(name, kind, offset, shape, out=out)

    return fresh


def load_initial(engine: Engine, session: Session) -> str:
    """Load ``checkpoint.initial_weights`` into a fresh engine; return a line about it. Collective.

    Each rank reads its own slices only; moments, counters and the loss scale stay fresh.

    Raises:
        CheckpointError: on every rank, as :func:`open_initial`.
    """
    config: RunConfig = session.config

    def load_own() -> Weights:
        weights = open_initial(config)
        if session.is_rank_zero:
            check_document_starts(config.data.train, weights.tokenizer_folder, weights.trained)
        engine.load_weights(_with_adapters(config, weights.read))
        notes.append(objective_of(config).notes(weights.read, str(weights.path)) if session.is_rank_zero else "")
        weights.close()
        return weights

    notes: list[str] = []
    weights = agreed(load_own, where=str(session.ctx.coords))
    carry_companions(weights.path, session)
    return "\n".join((f"weights from {weights.path}; moments and counters start fresh{notes[0]}", *weights.notes))


def carry_companions(source: Path, session: Session) -> None:
    """Copy a model's tokenizer, chat template and generation settings beside the run's own checkpoints, where an export
    finds them. ``source``: a Hugging Face folder, or a checkpoint with such files beside it. Collective.

    Raises CheckpointError: on every rank: one of them is too large to be such a file.
    """
    found = source if _is_hugging_face(source) else source.parent / KEPT
    kept = run_folder(session.config) / FOLDER / KEPT

    def carry() -> None:
        if session.is_rank_zero and found.is_dir() and found.resolve() != kept.resolve():
            shutil.rmtree(kept, ignore_errors=True)  # of a run that was here before
            copy_companions(found, kept)

    agreed(carry, where=str(session.ctx.coords))


def _with_adapters(config: RunConfig, read: StateReader) -> StateReader:
    """Return a reader that also has the adapters with which a run begins, or in which what it leaves out is zero."""
    tuning = config.fine_tuning
    if config.sparsity.enabled:
        return SparseWeights(config.sparsity, parameter_shapes(config.model), read)
    if not tuning.enabled:
        return read
    begin = InitialAdapters(config.model, tuning, config.seed, read)
    if not tuning.adapters:
        return begin
    folder = PARTS.function("PEFT folder")(tuning.adapters, config.model, tuning)
    return over_base(begin, folder.read, folder.adapters)


def inference_config(weights: Weights, overrides: Sequence[str], world_size: int, *, micro_batch: int = 1) -> RunConfig:
    """Return the run that wrote the weights (or defaults for their model) on one process per replica, without dropout.

    ``overrides``: ``a.b=value``, applied last, e.g. another layout.

    Raises:
        ConfigError: an override is wrong.
        CheckpointError: the run file beside the weights describes another model.
    """
    neutral = [
        "engine=native", "layout.tensor_parallel_size=1", "layout.pipeline_parallel_size=1",
        "layout.virtual_pipeline_size=1", "layout.data_parallel_size=0", "layout.expert_parallel_size=1",
        "layout.context_parallel_size=1", "layout.cp_method=gather", "layout.sequence_parallel=false",
        "layout.tp_overlap_chunks=1", "layout.tp_exchange=collective",
        "layout.pipeline_split=[]", "layout.zero_stage=0", "layout.shard_size=0", "layout.reshard=forward",
        "layout.pipeline_schedule=1f1b", "activations.policy=none", "activations.head_chunk=0", "layout.elastic=false",
        "offload.optimizer=none", "offload.weights=none", "offload.fraction=1.0", "offload.nvme_path=",
        f"batch.micro_batch_size={micro_batch}", f"batch.global_batch_size={micro_batch * world_size}",
        "batch.rampup_start=0", "training.loss=cross_entropy",
    ]
    if weights.run_file is None:
        neutral += ["precision.dtype=fp32", "data.synthetic=true"]
    config = load(weights.run_file, [*neutral, *overrides]).config
    if weights.run_file is None:
        config = replace(config, model=weights.model)
    different = model_differences(weights.model, config.model, any_length=True)
    if different:
        raise CheckpointError(f"{weights.path} holds another model than {weights.run_file}: {'; '.join(different)}")
    model = replace(config.model, hidden_dropout=0.0, attention_dropout=0.0)
    # The weights are merged, the zeros are in them, and nobody learns.
    return replace(
        config, model=model, fine_tuning=NO_ADAPTERS, distillation=NO_TEACHER, sparsity=NO_SPARSITY
    )
