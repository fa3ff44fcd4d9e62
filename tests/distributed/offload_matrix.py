"""Runs with and without offload, 20 steps each, compared to the bit: every dtype, ZeRO stage and place of the state.

``python tests/distributed/offload_matrix.py --out FILE`` appends a line for each case that the file lacks.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from cases import LR, make_batches, make_config, providers_of
from contradictions import contradictions
from pool import RankPool

from megatron_port.core.config.features import OffloadConfig
from megatron_port.core.config.schema import RunConfig
from megatron_port.core.dist.groups import ParallelContext
from megatron_port.core.dist.mesh import Topology
from megatron_port.core.engine.native import NativeEngine
from megatron_port.ext.memory.settings import OFFLOAD
from megatron_port.run.build import build_engine

STEPS = 20
Steps = list[tuple[Any, ...]]
State = dict[tuple[Any, ...], list[float]]


RULES = ("adamw-bf16", "adamw-8bit", "lion", "sgd", "adagrad")
"""Beside AdamW: those that an offload serves."""
STRIPES: dict[str, Any] = {"num_layers": 2, "hidden_size": 128, "ffn_hidden_size": 128, "head_dim": 32}
"""A model whose rows are whole blocks of 8-bit state."""


def case(
    dtype: str, zero: int, *, dp: int = 2, micro_batches: int = 2, rule: str = "adamw", **layout: Any
) -> RunConfig:
    shape = STRIPES if rule == "adamw-8bit" else {"num_layers": 3}
    config = make_config(
        dtype=dtype, micro_batch_size=1, global_batch_size=micro_batches * dp, own_kernels="on",
        model={**shape, "hidden_dropout": 0.1, "tie_embeddings": layout.pop("tied", True)},
        layout={"zero_stage": zero, "reduce_bucket_size": 4000, "data_parallel_size": dp, **layout},
    )
    if dtype == "fp16":  # the first steps overflow
        precision = dataclasses.replace(
            config.precision, initial_loss_scale=2.0**24, loss_scale_hysteresis=1, loss_scale_window=3
        )
        config = dataclasses.replace(config, precision=precision)
    return dataclasses.replace(config, optimizer=dataclasses.replace(config.optimizer, name=rule))


def offloaded(config: RunConfig, folder: str = "", **offload: Any) -> RunConfig:
    """The same run with ``[offload]``."""
    where = {"optimizer": "cpu", "buffers": 2, **offload}
    if where["optimizer"] == "nvme":
        where["nvme_path"] = folder
    checkpoint = dataclasses.replace(config.checkpoint, asynchronous=False)
    config = dataclasses.replace(config, offload=OffloadConfig(**where), checkpoint=checkpoint)
    assert not contradictions(OFFLOAD, config)
    return config


# ---------------------------------------------------------------- on the ranks


@contextmanager
def engine_of(config: RunConfig, topology: Topology, *, initialise: bool = True) -> Iterator[NativeEngine]:
    layout = config.layout
    ctx = ParallelContext.create(
        dataclasses.replace(topology, vp=layout.virtual_pipeline_size, shard=layout.shard_size), "cpu"
    )
    try:
        engine = build_engine(config, ctx, providers_of(config), initialise=initialise)
        assert isinstance(engine, NativeEngine)
        yield engine
    finally:
        ctx.close()


def advance(engine: NativeEngine, steps: range) -> Steps:
    """What each step returned."""
    batches = make_batches(engine.config, engine.ctx)
    out: Steps = []
    for step in steps:
        found = engine.train_step(batches(step), step=step, lr=LR)
        out.append((found.loss, found.grad_norm, found.skipped, found.loss_scale))
        assert engine.state_damage() is None
    return out


def state_of(engine: NativeEngine) -> State:
    return {(p.name, p.kind, p.offset, p.flat_start): p.tensor.tolist() for p in engine.state_pieces()}


def train(config: RunConfig, topology: Topology, steps: int) -> tuple[Steps, State]:
    """What each step returned, and masters and moments at the end."""
    with engine_of(config, topology) as engine:
        results = advance(engine, range(steps))
        results.append((engine.eval_step(make_batches(config, engine.ctx)(steps)).loss,))
        state = state_of(engine)
        assert engine.state_damage(now=True) is None
        return results, state


def matrix(folder: str) -> dict[str, tuple[RunConfig, RunConfig, Topology]]:
    """Pairs of runs by name: without offload, and with it."""
    out = {}
    for dtype in ("fp32", "bf16", "fp16"):
        for zero in (1, 2, 3):
            for where in ("cpu", "nvme"):
                options: list[dict[str, Any]] = [{"fraction": 1.0}, {"fraction": 0.5}]
                options += [{"weights": "cpu"}] if zero == 3 else []
                for option in options:
                    plain = case(dtype, zero, tied=where == "cpu")
                    name = f"{dtype} zero-{zero} {where} " + " ".join(f"{k} {v}" for k, v in option.items())
                    out[name] = (plain, offloaded(plain, folder, optimizer=where, **option), Topology(1, 1, 2))
    layouts: dict[str, dict[str, Any]] = {
        "tp 2": {"tensor_parallel_size": 2, "sequence_parallel": True}, "pp 2": {"pipeline_parallel_size": 2},
        "pp 2 zb-h1": {"pipeline_parallel_size": 2, "pipeline_schedule": "zb-h1"},
    }
    for name, layout in layouts.items():
        plain = case("bf16", 1, **layout)
        topology = Topology(layout.get("tensor_parallel_size", 1), layout.get("pipeline_parallel_size", 1), 2)
        out[f"bf16 zero-1 nvme {name}"] = (plain, offloaded(plain, folder, optimizer="nvme"), topology)
    for rule in RULES:
        for dtype, zero, offload in (
            ("bf16", 1, {"optimizer": "cpu"}), ("fp32", 2, {"optimizer": "nvme", "fraction": 0.5}),
            ("fp16", 3, {"optimizer": "nvme", "weights": "cpu"}),
        ):
            plain = case(dtype, zero, rule=rule, tied=zero != 3)
            name = f"{rule} {dtype} zero-{zero} " + " ".join(f"{k} {v}" for k, v in offload.items())
            out[name] = (plain, offloaded(plain, folder, **offload), Topology(1, 1, 2))
    return out


def compare(plain: RunConfig, other: RunConfig, topology: Topology) -> dict[str, Any]:
    """On a rank: what differs between two runs, and what shows that they did something."""
    one, two = train(plain, topology, STEPS), train(other, topology, STEPS)
    steps = one[0][:-1]
    return {
        "equal_steps": sum(a == b for a, b in zip(one[0], two[0])), "equal_state": one[1] == two[1],
        "skipped": sum(bool(step[2]) for step in steps), "losses": len({step[0] for step in steps}),
        "elements": sum(len(values) for values in one[1].values()),
    }


def main() -> int:
    """Run what is missing; 1 if anything differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop after this long; resume later")
    args = parser.parse_args()
    from offload_matrix import compare  # ranks import it by this name, not from __main__

    done = {json.loads(line)["case"] for line in args.out.read_text().splitlines()} if args.out.exists() else set()
    ranks, started, bad = RankPool(), time.monotonic(), 0
    with tempfile.TemporaryDirectory() as folder:
        for name, (plain, other, topology) in matrix(folder).items():
            if name in done or time.monotonic() - started > args.seconds:
                continue
            found = ranks.run(topology.world_size, compare, plain, other, topology, timeout=600.0)
            ok = all(r["equal_steps"] == STEPS + 1 and r["equal_state"] for r in found)
            bad += not ok
            with args.out.open("a") as file:
                file.write(json.dumps({"case": name, "ok": ok, "steps": STEPS, "ranks": found}) + "\n")
            print(name, "equal to the bit" if ok else f"DIFFERS {found}", flush=True)
    ranks.close()
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
