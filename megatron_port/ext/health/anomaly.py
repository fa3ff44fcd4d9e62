"""Where an anomaly comes from: the step is run once more, looked at closely, and the finding is written down.

Nothing of this runs in a healthy step. The replay uses the same weights, samples and dropout, and is not applied. Of
all ranks the one where the trouble begins is found by a minimum over small numbers, and that rank alone tells the
others what it saw: nothing grows with the number of ranks.
"""

from __future__ import annotations

import json
import math
import socket
import struct
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_port.core.data.batch import MicroBatch
from megatron_port.core.dist.agree import broadcast_text
from megatron_port.core.dist.groups import ParallelContext
from megatron_port.core.dist.mesh import Coordinates
from megatron_port.core.engine.api import Engine, StepLimits, StepResult
from megatron_port.core.io.files import write_bytes
from megatron_port.core.io.typed_json import finite_or_text
from megatron_port.core.train.hooks import Anomaly, Session
from megatron_port.ext.health.probe import NOWHERE, Probe, StepDiagnostics, trace_diagnostics

TRANSIENT, REPRODUCIBLE = "transient", "reproducible"
LISTED = 200
"""Names, losses and sample ids of one kind that a report holds at most."""


def same_bits(a: StepResult, b: StepResult) -> bool:
    """Return whether loss and gradient norm are equal to the bit; all NaNs are."""

    def bits(x: float | None) -> bytes | None:
        return None if x is None else b"nan" if math.isnan(x) else struct.pack("<d", x)

    return bits(a.loss) == bits(b.loss) and bits(a.grad_norm) == bits(b.grad_norm)


def _finite_or_text(value: Any) -> Any:
    """Return a value with metrics.jsonl's strings for numbers that JSON does not have."""
    if isinstance(value, float):
        return finite_or_text(value)
    if isinstance(value, dict):
        return {k: _finite_or_text(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite_or_text(v) for v in value]
    return value


def describe(found: StepDiagnostics, micro_batches: Sequence[MicroBatch], ctx: ParallelContext) -> dict[str, Any]:
    """Return a rank's own diagnostics for the report. Which micro-batch: see :func:`chosen_micro_batch`."""
    m = chosen_micro_batch(found)
    at = ctx.coords
    out: dict[str, Any] = {
        "rank": ctx.rank, "host": socket.gethostname(), "pp": at.pp, "dp": at.dp, "cp": at.cp, "tp": at.tp,
        "micro_batch": m, "sample_ids": list(micro_batches[m].sample_ids)[:LISTED] if m is not None else None,
        "phase": found.phase or None, "module": found.module or None,
        "non_finite_gradients": found.nonfinite_gradients[:LISTED],
        "non_finite_gradient_count": len(found.nonfinite_gradients),
        "own_gradient_norm": found.gradient_norm, "largest_own_gradients": found.largest_gradients,
        "micro_batch_loss_sums": found.losses[:LISTED],
    }
    return {k: v for k, v in out.items() if v is not None}


def chosen_micro_batch(found: StepDiagnostics) -> int | None:
    """Return the first micro-batch that is not finite, otherwise the one with the largest known loss."""
    if found.micro_batch is not None or found.phase == "sum":
        return found.micro_batch
    return max(range(len(found.losses)), key=lambda m: found.losses[m]) if found.losses else None


def _least(value: float | int, dtype: torch.dtype, group: dist.ProcessGroup | None) -> Any:
    """Return the smallest value of any rank."""
    packed = torch.tensor([value], dtype=dtype)
    if group is not None:
        dist.all_reduce(packed, op=dist.ReduceOp.MIN, group=group)
    return packed.item()


def _culprit(found: StepDiagnostics, by: str, rank: int, group: dist.ProcessGroup | None) -> int | None:
    """Return the lowest rank where it begins; None: no rank saw anything.

    ``by``: finite (first number that is not) | loss (largest loss of a micro-batch) | norm (largest own gradient).
    """
    nobody = 1 << 40
    mine: float | int
    if by == "finite":
        best, mine = _least(found.order, torch.int64, group), found.order
        if best == NOWHERE:
            return None
    else:
        mine = -max(found.losses, default=-math.inf) if by == "loss" else -found.gradient_norm
        mine = mine if not math.isnan(mine) else -math.inf
        best = _least(mine, torch.float64, group)
        if best == math.inf or (by == "norm" and best == 0.0):
            return None  # nobody knows any
    lowest = int(_least(rank if mine == best else nobody, torch.int64, group))
    return lowest if lowest < nobody else None


def _tell(value: dict[str, Any], source: int, group: dist.ProcessGroup | None) -> dict[str, Any]:
    """Send a small JSON object of one rank to all."""
    own = json.dumps(_finite_or_text(value), allow_nan=False)
    told: dict[str, Any] = json.loads(broadcast_text(own, source=source, group=group) or "{}")
    return told


def _by(result: StepResult, limits: StepLimits) -> str:
    """Return the criterion that finds the rank of an anomaly with these numbers."""
    if not math.isfinite(result.loss) or result.grad_norm is None:
        return "finite"
    return "loss" if result.loss > limits.loss else "norm"


def investigate(
    engine: Engine, session: Session, micro_batches: Sequence[MicroBatch], result: StepResult, *, step: int, lr: float,
    limits: StepLimits, reason: str, first: int, count: int, run_folder: Path,
) -> Anomaly:
    """Replay the step, find the rank, write ``anomaly-STEP.json`` (rank 0). Collective; no weight changes.

    Args:
        step: the schedule's, from 0; the report and its file say ``step + 1``.
        limits: those that the step met.
        first, count: the step's samples, by position in the data's order.
    """
    ctx = session.ctx
    group = session.cpu_group if session.info.world_size > 1 else None
    before = trace_diagnostics(engine.micro_batch_losses(), engine.nonfinite_gradients(), stage=ctx.coords.pp)
    probe = Probe(stage=ctx.coords.pp, stages=ctx.topology.virtual_stages)
    again = engine.train_step(micro_batches, step=step, lr=lr, limits=limits, probe=probe)
    after = probe.diagnostics(len(micro_batches))
    recurs = not math.isfinite(again.loss) or again.grad_norm is None or (
        again.loss > limits.loss or again.grad_norm > limits.grad_norm
    )
    verdict = REPRODUCIBLE if recurs else TRANSIENT
    # What happened once can only be read from what the step itself left.
    found = after if recurs else before
    by = _by(again if recurs else result, limits)
    source = _culprit(found, by, ctx.rank, group)
    told = None if source is None else _tell(describe(found, micro_batches, ctx), source, group)
    equal = same_bits(result, again)
    summary = _summary(step + 1, reason, verdict, told, by, equal=equal)
    report = {
        "schema": 1, "step": step + 1, "time": time.time(), "reason": reason, "loss": result.loss,
        "grad_norm": result.grad_norm, "loss_scale": result.loss_scale, "loss_limit": limits.loss,
        "grad_norm_limit": limits.grad_norm, "first_sample": first, "samples": count, "verdict": verdict,
        "replay": {"loss": again.loss, "grad_norm": again.grad_norm, "same_bits": equal},
        "culprit": told, "layout": {axis: ctx.size(axis) for axis in ("tp", "pp", "dp", "cp")},
        "policy": session.config.numerics.on_anomaly, "summary": summary,
    }
    if session.is_rank_zero:
        _write(run_folder, report, session)
    return Anomaly(step + 1, reason, verdict, first, count, summary)


def _summary(
    step: int, reason: str, verdict: str, told: dict[str, Any] | None, by: str, *, equal: bool
) -> str:
    where = "no rank's own numbers show it: it arises in a sum over ranks, or left no trace"
    if told is not None:
        at = Coordinates(pp=told["pp"], dp=told["dp"], tp=told["tp"], cp=told.get("cp"))
        place = f"rank {told['rank']} on {told['host']} ({at})"
        batch = ""
        if "micro_batch" in told:
            ids = told["sample_ids"]
            batch = f", micro-batch {told['micro_batch']} (samples {ids[0]} to {ids[-1]})" if ids else ""
        what = {
            "forward": f"first in the forward pass of {told.get('module')}", "loss": "first in the loss",
            "backward": "first in the backward pass", "sum": "in the gradients that the replicas of",
            "": "with the largest loss" if by == "loss" else "with the largest own gradient",
        }[told.get("phase", "")]
        where = f"{what} {place} share" if told.get("phase") == "sum" else f"{what} on {place}{batch}"
        names = told.get("non_finite_gradients") or []
        if names:
            more = told["non_finite_gradient_count"] - 1
            where += f"; gradient of {names[0]}{f' and {more} more' if more else ''} not finite there"
    if verdict == REPRODUCIBLE:
        cause = "reproducible: data or model" + ("" if equal else " (other bits than before, and bad again)")
    else:
        cause = "transient: the same weights and samples gave other, sound numbers; suspect the hardware"
        if told is not None:
            cause += " of that rank, or of another of its replica"
    return f"step {step}: {reason}; the update was not applied. {where[0].upper()}{where[1:]}. Replayed: {cause}"


def _write(folder: Path, report: dict[str, Any], session: Session) -> None:
    """Write the report; a full disk must not end a run that can continue."""
    path = folder / f"anomaly-{report['step']}.json"
    count = 1
    while path.exists():  # the same step after a rewind
        count += 1
        path = folder / f"anomaly-{report['step']}-{count}.json"
    try:
        write_bytes(path, (json.dumps(_finite_or_text(report), indent=1, allow_nan=False) + "\n").encode())
    except OSError as error:
        session.logger.log(f"{path}: {error}; the report is lost, training continues")
