"""A metric from outside the package: the L2 norm of all weights after each step.

A metric is declared once, here. The console, metrics.jsonl, TensorBoard and the trackers, the report and the live page
show it without further code. A hook of the loop measures it; an objective or an optimizer rule may declare metrics too.
"""

import math
from collections.abc import Mapping

import torch
import torch.distributed as dist

from megatron_port.core.dist.record import WEIGHT
from megatron_port.core.registry import LOOP_HOOKS
from megatron_port.core.train.hooks import LoopHook, TakenStep
from megatron_port.ext.telemetry.step_metrics import Metric, declare

declare(Metric(
    "weight_norm", float, label="weight norm", form="{:.4f}", tag="optimizer/weight_norm", chart="Weight norm",
    summary="last", help="L2 norm of all weights after the update, each logical parameter counted once.",
))


class WeightNorm(LoopHook):
    """Measure the norm from what each rank would save: over all ranks that is every weight once."""

    def measure(self, taken: TakenStep) -> Mapping[str, float]:
        """Return the norm. Collective."""
        total = torch.zeros((), dtype=torch.float64)
        for piece in self.state.engine.state_pieces():
            if piece.kind == WEIGHT:
                total += piece.tensor.detach().double().square().sum().cpu()
        if self.state.session.info.world_size > 1:
            dist.all_reduce(total, group=self.state.session.cpu_group)
        return {"weight_norm": math.sqrt(total.item())}


LOOP_HOOKS.add("weight-norm", WeightNorm)
