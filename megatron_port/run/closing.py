"""End of a run: its outcome, committed for the job script, and lines that say how far and how fast it went."""

from __future__ import annotations

import statistics
import time

from megatron_port.core.config.schema import RunConfig
from megatron_port.core.dist.launchers import attempt_name
from megatron_port.core.dist.process import block_signals
from megatron_port.core.model.flops import attention_counted
from megatron_port.core.optim.schedules import learning_rate
from megatron_port.core.train.agreement import check_lease
from megatron_port.core.train.folders import run_folder
from megatron_port.core.train.hooks import Ending, LoopHook, LoopState
from megatron_port.ext.telemetry.reporting import Reporting
from megatron_port.run.provenance import record_event
from megatron_port.run.run_files import FINISHED, SAVED, AttemptOutcome, write_outcome


class Closing(LoopHook):
    """Commit how the run ended, and print how far it came."""

    def __init__(self, state: LoopState, reporting: Reporting) -> None:
        super().__init__(state)
        self._reporting = reporting
        self._begun_at = 0

    def begin(self, *, again: bool = False) -> None:
        """Note the step at which this start begins."""
        if not again:
            self._begun_at = self.state.progress.step

    def finish(self, ending: Ending) -> None:
        """Commit the outcome, on rank 0. Raises LeaseLost on every rank if the folder is another attempt's."""
        block_signals()  # what comes now comes too late to matter, and must not kill a rank that has saved
        check_lease(self.state)
        if not self.state.session.is_rank_zero:
            return
        status, step, name = SAVED if ending.stopped else FINISHED, self.state.progress.step, ending.signal_name
        record_event(self.state.session, status, step, **({"signal": name} if name else {}))
        outcome = AttemptOutcome(attempt_name(), status, step, name, time.time())
        write_outcome(run_folder(self.state.config), outcome)

    def close(self, ending: Ending | None) -> None:
        """Print how far the run came and how fast it was; after an error nothing."""
        if ending is None:
            return
        c, step, log = self.state.config, self.state.progress.step, self.state.session.logger.log
        if ending.stopped:
            log(f"stopped by {ending.own_signal or 'another rank'} after step {step}")
        else:
            log(finished_line(c, step, self._begun_at))
        if self._reporting.rates:
            log(closing_lines(c, list(self._reporting.rates), self._reporting.document))


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
