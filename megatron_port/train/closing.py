"""What is printed when a run has ended: that it is finished, and how fast it was."""

from __future__ import annotations

import statistics

from megatron_port.config.schema import RunConfig
from megatron_port.model.flops import attention_counted
from megatron_port.optim.schedules import learning_rate
from megatron_port.session.folders import run_folder


def closing_lines(config: RunConfig, rates: list[tuple[float, float]], document: float = 0.0) -> str:
    """Return the speed of this attempt, as hardware and as model FLOPs, beside what was published.

    ``rates``: (hardware, model) TFLOP/s per device of each step. The median without the first step, which warms up.
    """
    later = rates[1:] or rates
    hardware, model = statistics.median(r[0] for r in later), statistics.median(r[1] for r in later)
    peak = config.cluster.peak_tflops

    def share(rate: float, name: str) -> str:
        return f" ({name} {100 * rate / peak:.2f} %)" if peak else ""

    lines = [
        f"TFLOP/s per {config.cluster.device_label}, median of {len(later)} step{'s' if len(later) > 1 else ''}: "
        f"hardware {hardware:.4g}{share(hardware, 'HFU')}, model {model:.4g}{share(model, 'MFU')}; "
        f"{attention_counted(config.model, document)}"
    ]
    published = config.telemetry.published_tflops
    if published:
        source = f", {config.telemetry.published_source}" if config.telemetry.published_source else ""
        lines.append(
            f"published: hardware {published:.4g}{share(published, 'HFU')}{source}; "
            f"this run reached {hardware / published:.4g} of it"
        )
    return "\n".join(lines)


def finished_line(config: RunConfig, step: int, begun_at: int) -> str:
    """Return a line on a run that has reached ``training.steps``; ``begun_at``: the step at which this start began."""
    further = f"to train further: --set training.steps={2 * max(step, 1)}"
    if not learning_rate(config.optimizer, step, 2 * max(step, 1)):  # the schedule has ended at 0
        further += f" --set optimizer.decay_steps={2 * max(step, 1)}"
    if begun_at >= step:
        return (f"nothing to do: {run_folder(config)} finished at step {step} of {config.training.steps} before this "
                f"start; {further}")
    return f"finished: step {step} of {config.training.steps}, in {run_folder(config)}; {further}"
