"""Settings that contradict recorded steps (``backend.graphs``)."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megatron_port.config.schema import RunConfig


def graph_problems(config: RunConfig) -> list[str]:
    """Return what in a configuration contradicts ``backend.graphs = "step"``: all that needs the host in a step, or
    that differs between steps in more than numbers."""
    if config.backend.graphs == "off":
        return []
    zero, kept = config.layout.zero_stage, config.activations
    open_plan = kept.policy not in ("none", "selective", "full") and not kept.layers
    found = {
        f'engine "{config.engine}", whose step the host drives; use engine = "native"': config.engine != "native",
        'backend.device "cpu", where nothing is launched; use a GPU': config.backend.device == "cpu",
        "backend.share_devices, whose collectives go through the host": config.backend.share_devices,
        f"layout.zero_stage {zero}, whose weights are gathered and freed by the host; use 0, 1 or 2": zero >= 3,
        f'offload.optimizer "{config.offload.optimizer}": the host updates': config.offload.optimizer != "none",
        f'activations.policy "{kept.policy}", by which tensors may be swapped; give activations.layers, or use another':
            open_plan,
        "activations.layers with :swap, whose copies the host drives; recompute or keep these sites":
            any(":swap" in sites for sites in kept.layers),
        f'optimizer.name "{config.optimizer.name}": only AdamW has an update that the host does not decide':
            config.optimizer.name != "adamw",
        f'backend.optimizer "{config.backend.optimizer}": the host decides on its updates; use own or auto':
            config.backend.optimizer not in ("auto", "own"),
        'precision.dtype "fp64", which the own optimizer kernel does not take': config.precision.dtype == "fp64",
        f"batch.rampup_start {config.batch.rampup_start}: the number of micro-batches changes":
            bool(config.batch.rampup_start),
        f'data.attention_documents "within" and backend.attention "{config.backend.attention}": flash-attn takes the '
        'lengths of documents from the host; use attention = "sdpa" or "math"':
            config.data.attention_documents == "within" and config.backend.attention not in ("sdpa", "math"),
        f"numerics.replay_interval {config.numerics.replay_interval}: a replay looks at every micro-batch from the "
        "host; use 0": bool(config.numerics.replay_interval),
    }
    return [f'backend.graphs "step" with {problem} (or graphs = "off")' for problem, there in found.items() if there]
