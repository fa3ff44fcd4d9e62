"""One trial: a few real steps of a layout in processes of its own. What goes wrong there is data, not an error."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_port.core.config.dump import toml_value
from megatron_port.core.config.schema import RunConfig
from megatron_port.core.dist.launchers import current_job
from megatron_port.core.errors import EXIT_INTERRUPTED, ConfigError, EnvironmentFault
from megatron_port.core.io.logging import redact
from megatron_port.core.model.flops import document_of, model_flops
from megatron_port.ext.telemetry.metrics import FILE_NAME, read_metrics
from megatron_port.tools.plan.search import Candidate
from megatron_port.tools.tune.results import FAILED, OK, OUT_OF_MEMORY, TIMEOUT, Trial, key_of
from megatron_port.tools.tune.strategies import parameters

_MEMORY = re.compile(
    r"out of memory|OutOfMemory|can't allocate memory|Cannot allocate memory|oom[-_ ]kill|killed by SIGKILL"
    r"|std::bad_alloc|cannot fit", re.IGNORECASE,
)
_KILLED = {-signal.SIGKILL, 128 + signal.SIGKILL}
ERROR_CHARACTERS = 600


@dataclass(frozen=True, kw_only=True)
class Launcher:
    """Launcher of ranks: ``--nproc`` on this machine, or srun inside an allocation."""

    nproc: int = 0
    """Processes on this machine; 0: srun."""
    python: str = sys.executable

    def command(self, config: RunConfig, arguments: Sequence[str], world: int) -> list[str]:
        """Return the command that starts ``train`` with ``arguments`` on ``world`` ranks."""
        train = [self.python, "-m", "megatron_port", "train", *arguments]
        if self.nproc:
            return [*train, "--nproc", str(world)]
        cluster = config.cluster
        tasks = min(world, cluster.gpus_per_node)
        words = ["srun", "--export=ALL", "--kill-on-bad-exit=1", f"--nodes={-(-world // cluster.gpus_per_node)}",
                 f"--ntasks={world}", f"--ntasks-per-node={tasks}"]
        words += [f"--cpus-per-task={cluster.cores_per_task}"] if cluster.cores_per_task else []
        return [*words, *cluster.srun_options, *train]


def choose_launcher(nproc: int | None) -> Launcher:
    """Choose the launcher: ``--nproc`` wins; inside an allocation srun. Raises ConfigError where neither is there."""
    if nproc is not None:
        if nproc < 1:
            raise ConfigError(f"--nproc {nproc}: at least 1")
        return Launcher(nproc=nproc)
    if current_job() is not None:
        return Launcher()
    raise ConfigError(
        "nothing to measure on: this is no SLURM allocation (SLURM_JOB_ID is not set) and --nproc is not given; start "
        "it inside an allocation (salloc, sbatch), or give --nproc N, or --plan-only for the model's ranking alone"
    )


def trial_overrides(config: RunConfig, settings: dict[str, Any], *, steps: int, folder: Path, name: str) -> list[str]:
    """Return ``a.b=value`` that make a trial of a run: its layout, a few steps, nothing saved, a folder of its own."""
    warm = config.optimizer.decay_steps or config.training.steps
    fixed: dict[str, Any] = {
        "name": name, "output_dir": str(folder), "training.steps": steps, "training.eval_interval": 0,
        "training.eval_batches": 0, "training.log_interval": 1, "optimizer.decay_steps": max(warm, steps),
        "checkpoint.save_interval": 0, "checkpoint.save_final": False, "checkpoint.resume": "never",
        "batch.rampup_start": 0, "batch.rampup_increment": 0, "batch.rampup_samples": 0, "layout.elastic": False,
        "telemetry.tensorboard": False, "telemetry.replica_check_interval": 0,
    }
    return [f"{k}={toml_value(v)}" for k, v in {**fixed, **settings}.items()]


def run_trial(
    run_file: str, overrides: Sequence[str], config: RunConfig, candidate: Candidate, settings: dict[str, Any], *,
    launcher: Launcher, steps: int, warm_up: int, timeout_s: float, folder: Path,
    note: Callable[[int], None] = lambda session: None,
) -> Trial:
    """Measure one layout.

    ``run_file``, ``overrides``: the run as it was named; ``config``: what they give. ``warm_up``: first steps that do
    not count. ``note``: told the number of the session in which the trial's processes run.

    Raises:
        KeyboardInterrupt: it was interrupted; nothing is known then.
        EnvironmentFault: the launcher is not there.
    """
    world = candidate.case.world
    key = key_of(settings, world)
    trial_overrides_ = trial_overrides(config, settings, steps=steps, folder=folder, name=key)
    arguments = [run_file]
    for text in [*overrides, *trial_overrides_]:
        arguments += ["--set", text]
    command = launcher.command(config, arguments, world)
    log = folder / f"{key}.log"
    metrics = folder / key / FILE_NAME
    folder.mkdir(parents=True, exist_ok=True)
    metrics.unlink(missing_ok=True)
    started = time.monotonic()
    code, timed_out = _run(command, log, timeout_s, note)
    common: dict[str, Any] = {
        "key": key, "world": world, "parameters": parameters(candidate.case), "settings": settings,
        "planned_seconds": candidate.step.seconds, "planned_bytes": candidate.memory.total,
        "command": redact(shlex.join(command)), "wall_seconds": time.monotonic() - started, "time": time.time(),
    }
    text = log.read_text(encoding="utf-8", errors="replace")
    if timed_out:
        return Trial(**common, status=TIMEOUT, error=f"no end within {timeout_s:g} s; {_last_words(text)}")
    if code == EXIT_INTERRUPTED:
        raise KeyboardInterrupt
    if code:
        status = OUT_OF_MEMORY if code in _KILLED or _MEMORY.search(text) else FAILED
        return Trial(**common, status=status, error=f"exit {code}: {_last_words(text)}")
    seconds, memory = read_steps(metrics, warm_up)
    if not seconds:
        return Trial(**common, status=FAILED, error=f"exit 0, but {metrics} has no step after the first {warm_up}")
    median = statistics.median(seconds)
    batch = candidate.case.global_batch
    flops = model_flops(config.model, config.fine_tuning, document_of(config.data))
    return Trial(
        **common, status=OK, seconds=median, runs=(median,), spread=(max(seconds) - min(seconds)) / median,
        memory_bytes=memory,
        model_tflops=flops * batch / median / world / 1e12,
        tokens_per_second=batch * config.model.seq_length / median,
    )


def _run(command: Sequence[str], log: Path, timeout_s: float, note: Callable[[int], None]) -> tuple[int, bool]:
    """Return the exit code, and whether the time was over; whatever the command started is gone afterwards. ``note`` is
    told the number of its session."""
    with open(log, "wb") as stream:
        try:
            process = subprocess.Popen(
                list(command), stdin=subprocess.DEVNULL, stdout=stream, stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        except OSError as error:
            raise EnvironmentFault(f"{command[0]} cannot be started: {error.strerror or error}") from None
        try:
            note(process.pid)
            return process.wait(timeout_s), False
        except subprocess.TimeoutExpired:
            return 0, True
        finally:
            _end(process)


def _end(process: subprocess.Popen[bytes], grace_s: float = 10.0) -> None:
    """End the process and all of its session: first by asking (srun then ends its tasks), then by force."""
    for number, wait in ((signal.SIGTERM, grace_s), (signal.SIGKILL, grace_s)):
        if process.poll() is None or number == signal.SIGKILL:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(wait)


def _last_words(text: str) -> str:
    """Return the first line that contains ``error``, else the last line."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [i for i, line in enumerate(lines) if re.match(r"(error|\w*(Error|Fault|Exception))\b", line)]
    words = " ".join(lines[errors[0] : errors[0] + 3]) if errors else (lines[-1] if lines else "no output")
    return redact(words)[:ERROR_CHARACTERS]


def read_steps(metrics: Path, warm_up: int) -> tuple[list[float], int | None]:
    """Return a metrics.jsonl's seconds of every step after the first ``warm_up``, and its largest memory (bytes)."""
    seconds: dict[int, float] = {}
    memory: int | None = None
    if not metrics.is_file():
        return [], None
    for record in read_metrics(metrics):
        if "loss" in record and "seconds" in record:
            seconds[int(record["step"])] = float(record["seconds"])
        if "memory_bytes" in record:
            memory = max(memory or 0, int(record["memory_bytes"]))
    return [s for step, s in sorted(seconds.items()) if step > warm_up], memory
