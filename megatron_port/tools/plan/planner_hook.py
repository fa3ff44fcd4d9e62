"""A run's plan of activations: measured in its first steps, agreed over the ranks, kept in its folder, used again."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace

import torch
import torch.distributed as dist

from megatron_port.core.dist.agree import broadcast_text
from megatron_port.core.dist.rank import LeaseLost
from megatron_port.core.engine.native import NativeEngine
from megatron_port.core.engine.native_passes import PassWatch
from megatron_port.core.errors import ConfigError
from megatron_port.core.model.layers import TransformerLayer
from megatron_port.core.train.folders import run_folder
from megatron_port.core.train.hooks import LoopHook, LoopState, TakenStep
from megatron_port.ext.memory.site_tape import ParkingPlaces, SiteClock, measured_gather
from megatron_port.ext.memory.sites import RECOMPUTED, SITES, decided
from megatron_port.ext.memory.swap import measured_copy
from megatron_port.run.provenance import record_event
from megatron_port.tools.plan import activation_file
from megatron_port.tools.plan.activation_file import PlanRecord, key_of
from megatron_port.tools.plan.activation_plan import ROW, StageMeasures, describe, plan_activations
from megatron_port.tools.plan.case import Machine, case_of

PROBE = 1 << 23
"""Bytes with which links are measured; the same on all ranks, which gather them together."""


class ActivationPlanner(LoopHook):
    """Plan of the activations of one rank's layers; ``state.choices`` are those of all layers, as they are now.

    Attributes:
        measured: steps that this start has measured.
    """

    def __init__(self, state: LoopState) -> None:
        super().__init__(state)
        self.session, self.config, self.ctx = state.session, state.config, state.ctx
        self._layers: list[TransformerLayer] = []
        self._clock: SiteClock | None = None
        self.measured = 0

    def begin(self, *, again: bool = False) -> None:
        """Take the plan of the run's folder, begin to measure, or write what was planned. Collective."""
        if again:
            return
        self._layers, policy, step = self._layers_of(), self.config.activations.policy, self.state.progress.step
        text = activation_file.text_in(run_folder(self.config)) if self.session.is_rank_zero else None
        text = broadcast_text(text, group=self.session.cpu_group)
        record, why = self._usable(text)
        if policy == "plan":
            planned = self._record("planned", step)
            if record is None or (record.layers != planned.layers and not self.session.plans_activations):
                self._keep(planned, step, f" ({why})" if why else "")
            elif record.layers != planned.layers:  # another version of the planner found them
                self._apply(record.layers)
                self._tell(record, step, " when the run began")
            return
        if record is not None:
            self._apply(record.layers)
            self._tell(record, step, f", measured in the run's first {record.step} steps")
            return
        steps = self.config.activations.measure
        self.session.logger.log(
            f"activations: every site is recomputed while {steps} steps are measured{f' ({why})' if why else ''}"
        )
        self._clock = self._places.clock = SiteClock(self.session.device.torch_device)
        self._watch_passes(self._clock)

    def after_step(self, taken: TakenStep) -> None:
        """Measure on, and after the last measured step solve, apply and write the plan. Collective then."""
        if self._clock is None:
            return
        step = taken.step
        self._clock.end_step()
        self.measured += 1
        if self.measured < self.config.activations.measure:
            return
        rows = self._agreed(self._measures(self._clock))
        self._clock = self._places.clock = None
        self._watch_passes(PassWatch())
        measures = [StageMeasures.of_row(row) for row in rows]
        case, _ = case_of(self.config, self.session.info.world_size)
        machine = Machine(cluster=self.config.cluster, hardware=self.config.hardware)
        found = plan_activations(
            case, machine, budget=self.config.activations.budget * 2**30, measures=measures
        )
        self._apply(tuple("+".join(sites) for sites in found))
        self._keep(self._record("measured", step, rows), step)

    # ------------------------------------------------------------------------------------------------------ parts

    def _watch_passes(self, watch: PassWatch) -> None:
        """Let ``watch`` look on at the engine's passes."""
        if isinstance(self.state.engine, NativeEngine):
            self.state.engine.forward_backward.watch = watch

    def _layers_of(self) -> list[TransformerLayer]:
        """Return this rank's layers, without those that predict further tokens."""
        engine = self.state.engine
        modules = engine.chunks if isinstance(engine, NativeEngine) else [getattr(engine, "stage", None)]
        return [
            layer for module in modules if isinstance(module, torch.nn.Module)
            for layer in module.modules()
            if isinstance(layer, TransformerLayer) and layer.index < self.config.model.num_layers
        ]

    @property
    def _places(self) -> ParkingPlaces:
        """Of all layers of this rank alike; one of its own where it has none."""
        return self._layers[0].parking if self._layers else ParkingPlaces()

    def _usable(self, text: str | None) -> tuple[PlanRecord | None, str]:
        """Return the plan that a file holds where it is for this run, and why not."""
        if text is None:
            return None, ""
        try:
            record = activation_file.parsed(text, num_layers=self.config.model.num_layers)
        except ConfigError as error:
            return None, f"{error}: solved anew"
        if record.key != key_of(self.config):
            return None, f"{activation_file.NAME} is for another model, layout or budget: solved anew"
        return record, ""

    def _apply(self, layers: tuple[str, ...]) -> None:
        """Let each layer do from now on what the plan says."""
        self.state.choices = tuple(tuple(filter(None, sites.split("+"))) for sites in layers)
        for layer in self._layers:
            layer.activations = decided(self.state.choices[layer.index])

    def _measures(self, clock: SiteClock) -> StageMeasures:
        """Return what this rank measured, and the links' rates. Collective over tensor-parallel ranks."""
        seconds = {site: clock.seconds(site) for site in RECOMPUTED}
        sizes = {site: clock.sizes.get(site, 0.0) for site in SITES}
        again = sum(seconds.values()) * len(self._layers)
        forward, backward, weights = (
            sum(clock.seconds(f"{kind} {chunk}") for chunk in range(self.ctx.topology.vp))
            for kind in ("forward", "backward", "weights")
        )
        device, group = self.session.device.torch_device, self._places.group
        return StageMeasures(
            seconds=seconds, sizes=sizes, forward=forward, backward=max(backward + weights - again, 0.0),
            copy=measured_copy(device, PROBE) if self.config.engine == "native" else 0.0,
            gather=0.0 if group is None else measured_gather(device, PROBE, group),
        )

    def _agreed(self, mine: StageMeasures) -> list[list[float]]:
        """Return the row of each stage, the largest of its ranks' numbers. One collective over all ranks."""
        rows = torch.zeros(self.ctx.topology.pp, ROW, dtype=torch.float64)
        rows[self.ctx.index("pp")] = torch.tensor(mine.row(), dtype=torch.float64)
        if self.session.info.world_size > 1:
            dist.all_reduce(rows, op=dist.ReduceOp.MAX, group=self.session.cpu_group)
        out: list[list[float]] = rows.tolist()
        return out

    def _record(self, source: str, step: int, rows: list[list[float]] | None = None) -> PlanRecord:
        case, _ = case_of(self.config, self.session.info.world_size)
        return PlanRecord(
            key=key_of(self.config), source="measured" if source == "measured" else "planned", step=step,
            layers=tuple("+".join(sites) for sites in self.state.choices),
            stages=tuple(describe(replace(case, dropped=self.state.choices))),
            measures=tuple(map(tuple, rows or ())),
        )

    def _keep(self, record: PlanRecord, step: int, why: str = "") -> None:
        """Write a plan into the run's folder, on rank 0, and show it. A file that cannot be written is passed over."""
        if self.session.is_rank_zero:
            with suppress(LeaseLost, OSError):
                activation_file.write(run_folder(self.config), record, self.session.fence.check)
        self._tell(record, step, why)

    def _tell(self, record: PlanRecord, step: int, why: str = "") -> None:
        """Show a plan in the log and, as an event, in the report."""
        lines = "; ".join(record.stages)
        self.session.logger.log(f"activations, {record.source}{why}: not kept, {lines}")
        record_event(self.session, "activations", step, message=f"{record.source}{why}: not kept, {lines}")
