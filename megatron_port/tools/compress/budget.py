"""Parameters, operations and memory of a model before and after compression, from its spec and the planner."""

from __future__ import annotations

from dataclasses import dataclass, replace

from megatron_port.core.config.schema import ModelConfig, RunConfig
from megatron_port.core.errors import CheckpointError, ConfigError
from megatron_port.core.model.decoder_spec import model_spec
from megatron_port.core.model.flops import model_flops, parameter_count
from megatron_port.tools.compress.plain import plain_model
from megatron_port.tools.interop.hf_config import family_for
from megatron_port.tools.plan.verdict import make_plan


@dataclass(frozen=True)
class Budget:
    """Size and cost of a model."""

    parameters: int
    forward_flops: float
    """Per token, of a sample of ``seq_length``: generation of a text of that length."""
    training_flops: float
    """Per token, forward and backward."""
    memory: float | None
    """Bytes of the fullest device of the run's layout in training, by the planner; None: it cannot be planned."""
    limit: float
    """Device memory in bytes; 0: unknown, the planner refuses this run."""
    step_seconds: float | None
    """Time of a training step of the run, by the planner; None: it cannot be planned."""
    unplanned: str
    """Why not."""
    family: str
    """Hugging Face family as which it is exported, factors multiplied out and shared layers copied; empty: none."""


def budget_of(config: RunConfig, model: ModelConfig) -> Budget:
    """Return what ``model`` takes in the run that ``config`` describes."""
    spec, seq = model_spec(model), model.seq_length
    forward = sum(unit.forward_flops(seq) for unit in spec.units) / seq
    memory, limit, seconds, unplanned = None, 0.0, None, ""
    try:
        plan = make_plan(replace(config, model=model), neighbours=False)
        memory, limit, seconds = plan.fullest.total, plan.limit, plan.step.seconds
    except ConfigError as error:
        unplanned = str(error)
    try:
        family = family_for(plain_model(model))
    except CheckpointError:
        family = ""
    return Budget(
        parameter_count(model), forward, model_flops(model) / seq, memory, limit, seconds, unplanned, family
    )


def rows_of(before: Budget, after: Budget) -> list[tuple[str, str, str, str]]:
    """Return a table: the head, then what, before, after, and after as a share of before."""
    rows = [("", "before", "after", "left")]
    for name, a, b in (
        ("parameters", before.parameters, after.parameters),
        ("forward FLOPs per token", before.forward_flops, after.forward_flops),
        ("training FLOPs per token", before.training_flops, after.training_flops),
    ):
        rows.append((name, f"{a:,.0f}", f"{b:,.0f}", f"{b / a:.1%}"))
    if before.memory is not None and after.memory is not None:
        rows.append((f"memory of the fullest device of {after.limit / 1e9:.1f} GB", f"{before.memory / 1e9:.2f}",
                     f"{after.memory / 1e9:.2f}", f"{after.memory / before.memory:.1%}"))
    if before.step_seconds is not None and after.step_seconds is not None:
        rows.append(("seconds per step", f"{before.step_seconds:.2f}", f"{after.step_seconds:.2f}",
                     f"{after.step_seconds / before.step_seconds:.1%}"))
    rows.append(("Hugging Face family", before.family or "none", after.family or "none", ""))
    return rows
