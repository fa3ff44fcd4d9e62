"""Loading the state of a run: which checkpoint fits it, and the first of several that proves whole."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_port.core.checkpoint.format import Manifest
from megatron_port.core.checkpoint.reader import Checkpoint, open_checkpoint
from megatron_port.core.config.dump import as_dict
from megatron_port.core.config.features import NO_SPARSITY
from megatron_port.core.config.schema import RunConfig
from megatron_port.core.data.objective import objective_of
from megatron_port.core.dist.agree import agree, agreed
from megatron_port.core.dist.record import BUFFER, WEIGHT, ParameterRecord
from megatron_port.core.engine.api import Engine
from megatron_port.core.engine.module import zero_moments
from megatron_port.core.errors import CheckpointError, ConfigError, DamagedCheckpoint, PortError
from megatron_port.core.model.shapes import parameter_shapes
from megatron_port.core.optim.rules import OptimizerRule, rule_of, state_kinds
from megatron_port.core.train.hooks import LoopState, Session
from megatron_port.ext.weights.adapter_spec import adapter_parameters
from megatron_port.run.build import state_records
from megatron_port.run.changes import changes_since, check_batch, check_data_fingerprint, starts_fresh
from megatron_port.run.same_model import model_differences, tuning_differences
from megatron_port.run.saved_model import model_of, tuning_of
from megatron_port.run.weights import base_identity, carry_companions, load_initial, resumed_reader


def of_this_model(
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
            fault = _shape_fault(checkpoint, adapters if tuning.enabled else parameter_shapes(model))
    except (PortError, ValueError, TypeError, ArithmeticError, RuntimeError, AssertionError) as error:
        fault = f"no model that can be built ({error})"
    if fault:
        raise DamagedCheckpoint(
            f"{checkpoint.path}: its configuration and its {names} tensors contradict each other: {fault}"
        )


def _shape_fault(checkpoint: Checkpoint, expected: Mapping[str, tuple[int, ...]]) -> str | None:
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
    records = state_records(config.model, config.fine_tuning)
    parameters = {name: record.shape for name, record in records.items() if record.kind == WEIGHT}
    rule = rule_of(config.optimizer)
    fault = _shape_fault(checkpoint, parameters)
    if fault is None and not fresh:
        fault = _state_fault(checkpoint, state_kinds(rule, records.values()))
    if fault:
        raise DamagedCheckpoint(f"{checkpoint.path}: {fault}")
    with_state = _has_optimizer_state(checkpoint.kinds()) and not fresh
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
    if not checkpoint.step and not _has_optimizer_state(checkpoint.kinds()):
        return None
    whole = [kind for kind in lost if kind not in have]
    if whole:
        return f"it is of step {checkpoint.step} and has no {' and no '.join(whole)}"
    kind, name = next(iter(lost.items()))
    return f"it is of step {checkpoint.step} and has no {kind} of {name}"


def _has_optimizer_state(kinds: Iterable[str]) -> bool:
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
            objective_of(session.config).check_resumed(checkpoint.extra, str(checkpoint.path))
        if not _has_optimizer_state(checkpoint.kinds()):  # an import of weights alone
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


def load_weights(state: LoopState) -> Checkpoint | None:
    """Load what the run starts from into its engine: the first whole checkpoint, which is returned closed, or
    ``checkpoint.initial_weights``. Collective; raises PortError alike on all ranks."""
    session, c = state.session, state.config
    state.base = agreed(lambda: base_identity(session))
    state.learns_from = agreed(lambda: objective_of(c).identity() if session.is_rank_zero else {})
    if not state.checkpoints:
        if c.checkpoint.initial_weights:
            session.logger.log(load_initial(state.engine, session))
        return None
    loaded = load_first_whole(state.engine, list(state.checkpoints), session)
    _resume(state, loaded)
    loaded.close()
    return loaded


def _resume(state: LoopState, loaded: Checkpoint) -> None:
    """Take the counters of a checkpoint that the engine has loaded; print lines on what differs."""
    session, p, log = state.session, state.progress, state.session.logger.log
    take_counters(state, loaded)
    carry_companions(loaded.path, session)
    log(f"resumed from {loaded.path} at step {p.step}, {p.samples} samples")
    # An older one than the newest may have been taken.
    check_batch(loaded.manifest, state.config, state.ctx.size("dp"), str(loaded.path))
    for line in [
        *changes_since(loaded.manifest, state.config, state.loaders.tokenizer_name, loaded.path.name),
        *check_data_fingerprint(loaded, state.config, state.loaders),
    ]:
        log(line)


def take_counters(state: LoopState, loaded: Checkpoint, *, medians_only: bool = False) -> None:
    """Set the counters of the run to those of a checkpoint. ``medians_only``: anomalies met since then still count."""
    p, saved = state.progress, loaded.manifest.state
    p.step, p.samples, p.skipped = saved.step, saved.samples, int(saved.extra.get("skipped_total", 0))
    state.numerics.load(saved.extra.get("numerics", {}), medians_only=medians_only)
    state.committer.resumed(loaded.manifest.lineage, saved.step)
