"""A recorded run on disk: what ``parity`` writes from every rank and compares afterwards."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from megatron_port.core.config.schema import RunConfig
from megatron_port.core.data.batch import MicroBatch
from megatron_port.core.data.loader import build_loaders
from megatron_port.core.dist.positions import sequence_partition
from megatron_port.core.dist.rank import ProcessInfo
from megatron_port.core.errors import CheckpointError
from megatron_port.core.io.files import read_regular
from megatron_port.core.io.typed_json import parse_json
from megatron_port.core.optim.schedules import BatchSchedule, learning_rate
from megatron_port.ext.kernels.step_inputs import tensors_of, with_tensors
from megatron_port.run.build import build_engine
from megatron_port.run.session import open_session
from megatron_port.tools.parity.comparison import Run
from megatron_port.tools.parity.emulation import Reordering, RoundingEmulation, RoundingNoise, apply_reduction_order
from megatron_port.tools.parity.run_record import RankTrace, Slice, record_run

MOST_BYTES = 1 << 30
Order = Reordering | RoundingEmulation | RoundingNoise | None
"""Reduction order of the reference process: another, that of a layout, with random errors, its own."""


def _pack(prefix: str, slices: list[Slice], tensors: dict[str, torch.Tensor], table: list[dict[str, Any]]) -> None:
    for name, shape, offset, tensor in slices:
        key = f"{prefix}/{name}/{'.'.join(map(str, offset))}"  # of a split name a rank may hold two slices
        tensors[key] = tensor.contiguous()
        table.append({"key": key, "prefix": prefix, "name": name, "shape": list(shape), "offset": list(offset)})


def _write(trace: RankTrace, info: ProcessInfo, out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    tensors: dict[str, torch.Tensor] = {}
    table: list[dict[str, Any]] = []
    for step, gradients in enumerate(trace.gradients):
        _pack(f"gradient{step}", gradients, tensors, table)
    _pack("weight", trace.weights, tensors, table)
    _pack("copy", trace.copies, tensors, table)
    if tensors:
        save_file(tensors, str(out / f"rank-{info.rank:05d}.safetensors"))
    meta = {"world": info.world_size, "losses": trace.losses, "grad_norms": trace.grad_norms, "slices": table}
    (out / f"rank-{info.rank:05d}.json").write_text(json.dumps(meta))


def regroup(batches: list[MicroBatch], reordering: Reordering) -> list[MicroBatch]:
    """Return a step's samples on one process in another order and other micro-batches."""
    ids = [i for b in batches for i in b.sample_ids]
    size, order = reordering.micro_batch_size(len(ids)), reordering.order(len(ids))

    parts = [tensors_of(batch) for batch in batches]
    everywhere = [name for name in parts[0] if all(name in part for part in parts)]
    whole = {name: torch.cat([part[name] for part in parts]) for name in everywhere}
    out = []
    for start in range(0, len(ids), size):
        pick = order[start : start + size]
        like = replace(batches[0], sample_ids=tuple(ids[i] for i in pick), labels_masked=False, division=None)
        out.append(with_tensors(like, {name: tensor[pick] for name, tensor in whole.items()}))
    return out


def _called(config: RunConfig) -> RunConfig:
    """Return the run without captured steps: what reorders or rounds sums decides on the host in every pass, and a
    replay would repeat the decisions of one."""
    return replace(config, backend=replace(config.backend, graphs="off"))


def record_orders(
    config: RunConfig, info: ProcessInfo, orders: Sequence[tuple[Order, Path]], *, steps: int
) -> None:
    """Train ``steps`` steps from the initial weights, once in each order of sums.

    This rank's trace of each goes into its folder.
    """
    with open_session(config, info, quiet=True) as session:
        ctx, c = session.ctx, session.config
        schedule = BatchSchedule(c.batch, ctx.size("dp"))
        loaders = build_loaders(
            c, dp_rank=ctx.index("dp"), dp_size=ctx.size("dp"), need_tokens=ctx.is_first_stage,
            need_labels=ctx.is_last_stage, train_samples=schedule.samples_before(steps),
            partition=sequence_partition(ctx.mesh, ctx.rank, order=c.layout.cp_order),
        )
        for order, folder in orders:
            engine = build_engine(_called(c) if order is not None else c, ctx, session.providers)
            if isinstance(order, Reordering):
                apply_reduction_order(engine.stage, order)  # type: ignore[attr-defined]
            elif order is not None:
                order.emulate_rounding(engine.stage)  # type: ignore[attr-defined]

            def batches(step: int, order: Order = order) -> list[MicroBatch]:
                mine = loaders.train.step(*schedule.step_plan(step))
                return regroup(mine, order) if isinstance(order, Reordering) else mine

            trace = record_run(
                engine, ctx, batches, steps=steps, lr=lambda step: learning_rate(c.optimizer, step, c.training.steps)
            )
            _write(trace, info, folder)


def read_recorded(folder: Path) -> Run:
    """Return the run of a folder. Raises CheckpointError when ranks are missing, or a file is not what was written."""
    try:
        return _recorded(folder)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, SafetensorError) as error:
        raise CheckpointError(
            f"{folder} is not a recorded run ({type(error).__name__}: {error}); record it again"
        ) from error


def _recorded(folder: Path) -> Run:
    files = sorted(folder.glob("rank-*.json"))
    traces = []
    for path in files:
        meta = parse_json(read_regular(path, MOST_BYTES))  # losses may be NaN here
        if meta["world"] != len(files):
            raise CheckpointError(
                f"{folder} holds {len(files)} ranks of {meta['world']}; is it on a disk that every node sees, and "
                "empty before the run?"
            )
        trace = RankTrace(losses=meta["losses"], grad_norms=meta["grad_norms"])
        by_prefix: dict[str, list[Slice]] = {}
        if meta["slices"]:
            with safe_open(str(path.with_suffix(".safetensors")), framework="pt") as f:
                for row in meta["slices"]:
                    by_prefix.setdefault(row["prefix"], []).append(
                        (row["name"], tuple(row["shape"]), tuple(row["offset"]), f.get_tensor(row["key"]))
                    )
        trace.weights, trace.copies = by_prefix.get("weight", []), by_prefix.get("copy", [])
        steps = sorted(p for p in by_prefix if p.startswith("gradient"))
        trace.gradients = [by_prefix[p] for p in steps] or [[]]
        traces.append(trace)
    if not traces:
        raise CheckpointError(f"{folder} holds no recorded run")
    return Run.of(traces)
