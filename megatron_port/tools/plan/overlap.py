"""Whether a run's tensor-parallel products are computed in parts, each beside the collective of another.

A function of the run's configuration alone, so that all ranks find the same. More parts hide more of a collective and
cost more of its latency, more launches, and products of fewer rows, which fill a device less. The planner's model of
the step (``plan.layer``) has all of that but one number: how much of a collective a product beside it really hides,
where both use the same cores. Where that was not measured (``calibration.overlap_share`` is 1), half is assumed, and
parts are only taken where a step gains :data:`LEAST_GAIN` even so.
"""

from __future__ import annotations

from dataclasses import replace

from megatron_port.core.config.checks import problems
from megatron_port.core.config.layout import with_values
from megatron_port.core.config.schema import RunConfig
from megatron_port.core.errors import ConfigError
from megatron_port.tools.plan.case import case_of, machine_of
from megatron_port.tools.plan.step import plan_step

PARTS = (2, 4, 8)
"""Values of layout.tp_overlap_chunks that are compared with 1."""
ASSUMED_SHARE = 0.5
"""Of what could be hidden, on a cluster where nobody measured it (unverified)."""
LEAST_GAIN = 0.01
"""Share of a step."""
SETTING = "layout.tp_overlap_chunks"


def with_tensor_chunks(
    config: RunConfig, world_size: int | None = None, *, allow_fractions: bool = False
) -> tuple[RunConfig, str]:
    """Return the run with ``layout.tp_overlap_chunks`` decided, and why; without a reason where nothing was open.

    ``allow_fractions``: as ``case_of``.
    """
    if config.layout.tp_overlap_chunks or config.layout.tensor_parallel_size == 1:
        return config, ""
    chunks, why = _chosen(config, world_size, allow_fractions=allow_fractions)
    how = "1 part" if chunks == 1 else f"{chunks} parts"
    return with_values(config, {SETTING: chunks}), f"tensor-parallel products in {how}: {why}"


def _chosen(config: RunConfig, world_size: int | None, *, allow_fractions: bool) -> tuple[int, str]:
    """The number of parts, and why."""
    name = config.cluster.name or "this cluster"
    if config.backend.device == "cpu" or config.hardware.is_host:
        return 1, "on a CPU nothing runs beside them"
    if config.layout.tp_exchange != "collective":
        return 1, f"layout.tp_exchange {config.layout.tp_exchange} divides them by ranks"
    if config.fine_tuning.enabled:
        return 1, "products with adapters have no parts"
    try:
        machine = machine_of(config)
        case, _ = case_of(config, world_size, allow_fractions=allow_fractions)
    except ConfigError:  # what is wrong is said elsewhere
        return 1, f"the run or the description of {name} says too little to plan"
    legal = [p for p in PARTS if not problems(with_values(config, {SETTING: p}), world_size=case.world)]
    if not legal:
        return 1, f"none of {', '.join(map(str, PARTS))} is legal for {case.label()}"
    share = machine.calibration.overlap_share
    if share == 1.0:
        share = ASSUMED_SHARE
        machine = replace(machine, calibration=replace(machine.calibration, overlap_share=share))
    times = {parts: plan_step(replace(case, tensor_chunks=parts), machine, quick=True).seconds
             for parts in (1, *legal)}
    return _best(times, f"{share:.0%} of a collective hidden behind products on {name}")


def _best(times: dict[int, float], basis: str) -> tuple[int, str]:
    """The fastest number of parts of planned seconds by parts, where it gains enough; and why."""
    best = min((parts for parts in times if parts > 1), key=times.__getitem__)
    gain = 1 - times[best] / times[1]
    found = f"a step in {best} is planned {abs(gain):.1%} {'shorter' if gain > 0 else 'longer'}, with {basis}"
    return (best, found) if gain >= LEAST_GAIN else (1, f"{found}; {LEAST_GAIN:.0%} is asked for")
