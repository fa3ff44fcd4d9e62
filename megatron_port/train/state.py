"""Saving and finding the state of a run."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_port.checkpoint.format import Manifest, SavedState, read_manifest, step_of
from megatron_port.checkpoint.lineage import Committer
from megatron_port.checkpoint.mirror import pull
from megatron_port.checkpoint.peers import peers_of
from megatron_port.checkpoint.reader import Checkpoint, checkpoints_in, open_checkpoint
from megatron_port.checkpoint.writer import save_checkpoint
from megatron_port.config.dump import as_dict, config_hash
from megatron_port.config.same_model import model_differences, tuning_differences
from megatron_port.config.schema import RunConfig
from megatron_port.config.sparsity import NO_SPARSITY
from megatron_port.config.urls import is_remote
from megatron_port.data.tokenizer import NAMES, identity
from megatron_port.engine.api import Engine
from megatron_port.engine.module import zero_moments
from megatron_port.errors import CheckpointError, ConfigError, DamagedCheckpoint, PortError
from megatron_port.interop.sidecar import model_of, tuning_of
from megatron_port.model.adapter_spec import adapter_parameters
from megatron_port.model.saved_state import state_records
from megatron_port.model.shapes import parameter_shapes
from megatron_port.optim.rules import OptimizerRule, mixed_kinds, rule_of, state_kinds, state_shapes
from megatron_port.optim.schedules import BatchSchedule, learning_rate
from megatron_port.parallel.record import ParameterRecord
from megatron_port.parallel.state import BUFFER, WEIGHT
from megatron_port.runtime.agreement import agree, agreed, broadcast_text
from megatron_port.session.changes import check_batch, check_rule, check_seed, ended_rampup, starts_fresh
from megatron_port.session.folders import FOLDER, run_folder
from megatron_port.session.identity import own_checkpoints
from megatron_port.session.session import Session
from megatron_port.session.teacher import check_teacher
from megatron_port.session.weights import resumed_reader


def find_checkpoints(session: Session) -> list[Path]:
    """Return the checkpoints to start from, as ``checkpoint.resume`` selects, best first; empty: start afresh.

    Rank 0 looks, all use what it found. The newest commit comes first; those after it are what to fall back on if
    its contents turn out damaged. The path of one checkpoint has no second choice. What can be said against resuming
    from the newest is said here, before the model is built.

    Raises:
        CheckpointError: on every rank: a path was given and nothing whole is there, there are checkpoints and every
            one is damaged (a run never starts over without being told to), or all are of another run.
        ConfigError: on every rank: the batch schedule, the seed or the optimizer's rule is not that of the newest.
    """
    def look() -> list[str]:
        if not session.is_rank_zero or session.config.checkpoint.resume == "never":
            return []
        whole = _look(session.config, session.logger.log)
        whole = _of_this_model(whole, session.config, session.logger.log)
        if whole:
            path, manifest = whole[0]
            check_batch(manifest, session.config, session.ctx.size("dp"), str(path))
            check_seed(manifest, session.config, str(path))
            check_rule(manifest, session.config, str(path))
        return [str(path) for path, _ in whole]

    found = agreed(look)
    return [Path(path) for path in json.loads(broadcast_text(json.dumps(found)) or "[]")]


def batch_schedule(session: Session, checkpoints: Sequence[Path]) -> BatchSchedule:
    """Return the batch of each step, on every rank; of a run whose ramp-up has ended and is no setting any more, too.

    ``checkpoints``: what :func:`find_checkpoints` found. Raises ConfigError on every rank.
    """
    config = session.config
    begun = None
    if checkpoints and not config.batch.rampup_start:
        own = agreed(lambda: ended_rampup(read_manifest(checkpoints[0]), config) if session.is_rank_zero else None)
        told = json.loads(broadcast_text(json.dumps(own)) or "null")
        begun = None if told is None else (int(told[0]), int(told[1]))
    return BatchSchedule(config.batch, session.ctx.size("dp"), begun)


def _of_this_model(
    whole: list[tuple[Path, Manifest]], config: RunConfig, note: Any
) -> list[tuple[Path, Manifest]]:
    """Return the checkpoints from the first that is consistent in itself, which must be of this model.

    Raises:
        CheckpointError: it is of another, or none is left.
    """
    fault: CheckpointError | None = None
    for i, (path, manifest) in enumerate(whole):
        try:
            check_same_model(manifest, config, path)
        except CheckpointError:
            try:
                _check_describes_itself(open_checkpoint(path))
            except DamagedCheckpoint as damage:
                note(f"passing over {path.name}: {damage}")
                fault = damage
                continue
            raise
        return whole[i:]
    if fault is not None:
        raise fault
    return []


def _look(config: RunConfig, note: Any) -> list[tuple[Path, Manifest]]:
    asked, automatic = Path(config.checkpoint.resume), config.checkpoint.resume == "auto"
    if is_remote(config.checkpoint.resume):
        pulled = pull(config.checkpoint.resume, run_folder(config) / "pulled", note)
        return [(pulled, read_manifest(pulled))]
    if automatic:
        places = [run_folder(config) / FOLDER]
    elif (asked / "manifest.json").is_file():
        return [(asked, read_manifest(asked))]
    else:
        places = [asked, asked / FOLDER]
    for place in places:
        found = checkpoints_in(place, note)
        if found:
            return own_checkpoints(run_folder(config), config, found, note) if automatic else found
    damaged = [p for place in places if place.is_dir() for p in place.iterdir() if step_of(p.name) is not None]
    if damaged:
        raise CheckpointError(
            f"checkpoint.resume = \"{config.checkpoint.resume}\": none of the {len(damaged)} checkpoints in "
            f"{damaged[0].parent} is whole (see above); restore one, or start afresh with checkpoint.resume = "
            "\"never\" or another name"
        )
    if config.checkpoint.resume != "auto":
        raise CheckpointError(
            f"checkpoint.resume = \"{asked}\": no whole checkpoint there; give a step folder, a folder of "
            'them, "auto" or "never"'
        )
    return []


def check_same_model(manifest: Manifest, config: RunConfig, path: Path) -> None:
    """Raise CheckpointError naming the model fields that differ; a layout may differ, a model may not."""
    if not manifest.state.config.get("model"):
        return
    different = model_differences(model_of(manifest.state.config, str(path)), config.model)
    if different:
        raise CheckpointError(f"{path} holds another model: " + "; ".join(different))
    other = tuning_differences(tuning_of(manifest.state.config, str(path)), config.fine_tuning)
    if other:
        raise CheckpointError(f"{path} holds the state of other trained parameters: " + "; ".join(other))
    _check_masks(manifest.state.config, config, path)


def _check_masks(saved: dict[str, Any], config: RunConfig, path: Path) -> None:
    """Raise CheckpointError if a run would continue with other masks than it has had: zeros in a checkpoint are those
    of its own ``[sparsity]``."""
    section = saved.get("sparsity")
    theirs, mine = section if isinstance(section, dict) else as_dict(NO_SPARSITY), as_dict(config.sparsity)
    differ = [f"sparsity.{name} is {theirs.get(name)!r} there and {value!r} here" for name, value in mine.items()
              if theirs.get(name) != value]
    if differ:
        raise CheckpointError(
            f"{path}: {'; '.join(differ)}. Begin another run with its weights: another name and "
            f'checkpoint.initial_weights = "{path}"'
        )


def _check_describes_itself(checkpoint: Checkpoint) -> None:
    """Raise DamagedCheckpoint if its tensors are not those of the model that its own manifest describes."""
    names = len(set(checkpoint.names()))
    try:
        model = model_of(checkpoint.manifest.state.config, str(checkpoint.path))
        fault = None
        if model.num_layers > names:  # before as many are built
            fault = f"{model.num_layers} layers"
        else:
            tuning = tuning_of(checkpoint.manifest.state.config, str(checkpoint.path))
            adapters = {name: spec.shape for name, spec in adapter_parameters(model, tuning).items()}
            fault = shape_fault(checkpoint, adapters if tuning.enabled else parameter_shapes(model))
    except (PortError, ValueError, TypeError, ArithmeticError, RuntimeError, AssertionError) as error:
        fault = f"no model that can be built ({error})"
    if fault:
        raise DamagedCheckpoint(
            f"{checkpoint.path}: its configuration and its {names} tensors contradict each other: {fault}"
        )


def shape_fault(checkpoint: Checkpoint, expected: Mapping[str, tuple[int, ...]]) -> str | None:
    """Return why a checkpoint's weights are not those of a model with these shapes; None if they are."""
    have = {name: checkpoint.shape(name) for name in checkpoint.names()}
    missing = [name for name in expected if name not in have]
    if missing:
        return f"it has no weight of {missing[0]} ({len(missing)} of {len(expected)} are missing)"
    unknown = [name for name in have if name not in expected]
    if unknown:
        return f"the model has no {unknown[0]} ({len(unknown)} such)"
    wrong = [name for name, shape in expected.items() if have[name] != tuple(shape)]
    return f"{wrong[0]} has shape {have[wrong[0]]}, the model's has {tuple(expected[wrong[0]])}" if wrong else None


def check_resumable(checkpoint: Checkpoint, config: RunConfig, *, fresh: bool = False) -> None:
    """Raise DamagedCheckpoint if a tensor of the model, or state that the optimizer's rule keeps, is not there.

    An import of weights alone is of step 0; what was trained and has lost its state would resume as another run.
    ConfigError: the state is of the same rule with options that give it another form. ``fresh``: only weights matter.
    """
    records = saved_records(config)
    parameters = {name: record.shape for name, record in records.items() if record.kind == WEIGHT}
    rule = rule_of(config.optimizer)
    fault = shape_fault(checkpoint, parameters)
    if fault is None and not fresh:
        fault = _state_fault(checkpoint, state_kinds(rule, records.values()))
    if fault:
        raise DamagedCheckpoint(f"{checkpoint.path}: {fault}")
    with_state = has_optimizer_state(checkpoint.kinds()) and not fresh
    if with_state and (other := _form_fault(checkpoint, rule, records)):
        raise ConfigError(
            f"{checkpoint.path}: {other}; put the options of [optimizer] back, or begin another run with its weights: "
            f'another name and checkpoint.initial_weights = "{checkpoint.path}"'
        )


def _form_fault(checkpoint: Checkpoint, rule: OptimizerRule, records: Mapping[str, ParameterRecord]) -> str | None:
    """Return which state has another shape, or is of other codes, than the rule keeps with this run's options."""
    for record in records.values():
        for kind in rule.state(record) if record.kind == WEIGHT else ():
            shape, dtype = checkpoint.shape(record.name, kind.name), checkpoint.dtype(record.name, kind.name)
            kept = dtype if kind.dtype is None else kind.dtype
            numbers = dtype.is_floating_point and kept.is_floating_point
            if shape != kind.shape(record) or (dtype != kept and not numbers):
                return (
                    f"{kind.name} of {record.name} is {dtype} {shape}, and the optimizer keeps {kept} "
                    f"{kind.shape(record)} with this run's options"
                )
    return None


def _state_fault(checkpoint: Checkpoint, wanted: Mapping[str, Sequence[str]]) -> str | None:
    """Why the optimizer cannot continue from a checkpoint; ``wanted``: kinds by parameter, the weight among them."""
    have = {kind: set(checkpoint.names(kind)) for kind in checkpoint.kinds()}
    lost = {kind: name for name, kinds in wanted.items() for kind in kinds if name not in have.get(kind, ())}
    if not lost:
        known = "optimizer_steps" in checkpoint.scalars
        return None if known else "it does not say how many steps the optimizer took"
    if not checkpoint.step and not has_optimizer_state(checkpoint.kinds()):
        return None
    whole = [kind for kind in lost if kind not in have]
    if whole:
        return f"it is of step {checkpoint.step} and has no {' and no '.join(whole)}"
    kind, name = next(iter(lost.items()))
    return f"it is of step {checkpoint.step} and has no {kind} of {name}"


def has_optimizer_state(kinds: Iterable[str]) -> bool:
    """Whether any of a checkpoint's kinds is an optimizer rule's."""
    return bool(set(kinds) - {WEIGHT, BUFFER})


def load_into(engine: Engine, path: Path, session: Session) -> Checkpoint:
    """Load a checkpoint of any layout into the engine. Collective; the same error on every rank.

    Raises:
        DamagedCheckpoint: on every rank, if what one of them read is not what was saved. The engine then holds a
            mixture: load another checkpoint into it, or let it go.
        CheckpointError: on every rank: it is of another model.
    """
    failure: PortError | None = None
    checkpoint: Checkpoint | None = None
    try:
        checkpoint = open_checkpoint(path)
        try:
            check_same_model(checkpoint.manifest, session.config, checkpoint.path)
        except CheckpointError:
            _check_describes_itself(checkpoint)
            raise
        fresh = starts_fresh(checkpoint.manifest, session.config)
        check_resumable(checkpoint, session.config, fresh=fresh)
        if session.is_rank_zero:
            check_teacher(checkpoint.extra, session.config, str(checkpoint.path))
        if not has_optimizer_state(checkpoint.kinds()):  # an import of weights alone
            engine.load_weights(checkpoint.read)
        else:
            read, close = resumed_reader(checkpoint, session)
            scalars = dict(checkpoint.scalars)
            if fresh:  # of the scalars, fp16's loss scale is not the rule's
                read, scalars = zero_moments(read), {k: v for k, v in scalars.items() if k.startswith("loss_scale")}
            engine.load_state(read, scalars)
            close()
    except PortError as error:
        failure = error
    try:
        agree(failure, where=str(session.ctx.coords))
    except PortError as error:
        if checkpoint is not None:
            checkpoint.close()
        if _only_damage(failure, session):
            raise DamagedCheckpoint(str(error)) from failure
        raise
    assert checkpoint is not None
    return checkpoint


def _only_damage(failure: PortError | None, session: Session) -> bool:
    """Return whether every failed rank met damage. All ranks call this after a failed agreement."""
    other = failure is not None and not isinstance(failure, DamagedCheckpoint)
    if session.cpu_group is None or session.info.world_size == 1:
        return not other
    flag = torch.tensor([int(other)])
    dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=session.cpu_group)
    return not int(flag)


def load_first_whole(engine: Engine, paths: list[Path], session: Session) -> Checkpoint:
    """Load the first of ``paths`` that proves complete while it is read; rank 0 announces each one passed over.

    Every rank verifies what it reads before it uses it, and all ranks agree on the checkpoint before training starts.
    A later one overwrites everything that a damaged one left in the engine.

    Raises:
        CheckpointError: the last one is damaged too, or one is of another model.
    """
    for path, following in zip(paths, [*paths[1:], None]):
        try:
            return load_into(engine, path, session)
        except DamagedCheckpoint as error:
            if following is None:
                passed = f" ({len(paths) - 1} newer ones were passed over)" if len(paths) > 1 else ""
                raise DamagedCheckpoint(
                    f"{path.name} is damaged, and there is none to fall back on{passed}: {error}. Nothing was trained; "
                    "restore a checkpoint, or start afresh with checkpoint.resume = \"never\" or another name"
                ) from error
            session.logger.log(f"{path.name} is damaged: {error}")
            session.logger.log(f"falling back from {path.name} to {following.name}; nothing of {path.name} is used")
    raise ValueError("no path was given")


@dataclass(frozen=True, kw_only=True)
class Position:
    """Position of a run, for its checkpoint."""

    step: int
    samples: int
    skipped: int
    tokenizer: str | None = None
    numerics: dict[str, Any] | None = None
    """State of the numerics guard."""
    tokenizer_identity: dict[str, Any] | None = None
    """``data.tokenizer.identity`` of the corpora's tokenizer, where it is known."""
    corpora: list[dict[str, Any]] | None = None
    """What the corpora are (``data.fingerprint``)."""
    base: dict[str, Any] | None = None
    """Which weights are frozen (``session.base_weights``); None: none are."""
    teacher: dict[str, Any] | None = None
    """Which model it learns from (``session.teacher``); None: from none."""


def state_of(
    engine: Engine, config: RunConfig, at: Position, records: Mapping[str, ParameterRecord] | None = None
) -> SavedState:
    """Return all of a checkpoint that is not a tensor.

    Args:
        records: of the whole model's parameters and buffers, on rank 0, whose state is the one that is written.
    """
    rule = rule_of(config.optimizer)
    schedule = {
        "step": at.step, "steps": config.training.steps,
        "decay_steps": config.optimizer.decay_steps or config.training.steps,
        "learning_rate": learning_rate(config.optimizer, at.step, config.training.steps),
        "samples": at.samples,
    }
    data = {
        "next_sample": at.samples, "order": config.data.order, "seed": config.seed, "train": list(config.data.train),
        "weights": list(config.data.weights), "split": list(config.data.split), "synthetic": config.data.synthetic,
        "corpora": at.corpora or [], "source": config.data.source,
    }
    rng = {"scheme": "counter", "seed": config.seed, "keys": ["step", "sample", "operation", "element"]}
    return SavedState(
        step=at.step, samples=at.samples, tokens=at.samples * config.model.seq_length, layout=config.layout,
        config=as_dict(config), scalars=engine.scalar_state(),
        extra={
            "skipped_total": at.skipped, "tokenizer": at.tokenizer, "numerics": at.numerics or {},
            **({"base": at.base} if at.base else {}), **({"teacher": at.teacher} if at.teacher else {}),
        },
        rng=rng, data=data, schedule=schedule, config_hash=config_hash(config),
        tokenizer=at.tokenizer_identity or (identity(at.tokenizer) if at.tokenizer in NAMES else {}),
        kinds=mixed_kinds(state_kinds(rule, (records or {}).values())),
        shapes=state_shapes(rule, (records or {}).values()),
    )


def save_state(engine: Engine, session: Session, at: Position, committer: Committer | None = None) -> Path:
    """Commit a checkpoint of the whole run, synchronously. Collective."""
    config = session.config
    records = saved_records(config) if session.is_rank_zero else None
    return save_checkpoint(
        run_folder(config) / FOLDER, state_of(engine, config, at, records), engine.state_pieces(),
        keep=config.checkpoint.keep, peers=peers_of(session.cpu_group),
        expected=shapes_of(records), note=session.logger.log, verify=config.checkpoint.verify_saves,
        compare=engine.state_check.interval > 0, committer=committer,
    )


def saved_records(config: RunConfig) -> dict[str, ParameterRecord]:
    """Return the records of all that a checkpoint of a run holds, by canonical name."""
    return state_records(config.model, config.fine_tuning)


def shapes_of(records: Mapping[str, ParameterRecord] | None) -> dict[str, tuple[int, ...]] | None:
    """Return the logical shape of all that a whole checkpoint has, by name; None on ranks without records."""
    return None if records is None else {name: record.shape for name, record in records.items()}
