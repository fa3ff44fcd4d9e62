"""Random combinations of everything that can interact, each compared with one process.

``draw(seed)`` is a pure function, so a failure is named by its seed. Run many,
resumably, with ``python tests/distributed/fuzz.py --seeds 0-999 --out FILE``.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cases import Order, make_config, run_cases, single_run, within_rounding
from pool import RankPool

from megatron_port.config.schema import LayoutConfig, RunConfig
from megatron_port.parallel.topology import Topology
from megatron_port.train.parity import FP32, FP64, Deviation, Run, compare
from megatron_port.train.trace import RankTrace

STEPS = 3


@dataclass(frozen=True)
class Draw:
    """One combination."""

    seed: int
    config: RunConfig
    topology: Topology

    @property
    def case(self) -> tuple[RunConfig, Topology, int, int]:
        """What ``run_cases`` takes."""
        return self.config, self.topology, STEPS, 1

    def describe(self) -> dict[str, object]:
        """For the results file."""
        c, t = self.config, self.topology
        keep = ("num_layers", "hidden_size", "num_attention_heads", "num_query_groups", "vocab_size", "seq_length",
                "position_embedding", "normalization", "activation", "add_bias", "tie_embeddings", "hidden_dropout",
                "attention_dropout", "ffn_hidden_size")
        return {
            "seed": self.seed, "engine": c.engine, "dtype": c.precision.dtype, "tp": t.tp, "pp": t.pp, "dp": t.dp,
            "sequence_parallel": c.layout.sequence_parallel, "recompute": c.layout.recompute,
            "schedule": c.layout.pipeline_schedule, "vp": c.layout.virtual_pipeline_size,
            "zero_stage": c.layout.zero_stage, "bucket": c.layout.reduce_bucket_size,
            "padding": c.layout.vocab_padding_multiple,
            "micro_batch": c.batch.micro_batch_size, "mask_loss": c.data.mask_eod_loss,
            "own_kernels": c.backend.own_kernels,
            **{k: getattr(c.model, k) for k in keep},
        }


def draw(seed: int) -> Draw:
    """A legal combination; every run with the same seed gives the same."""
    r = random.Random(f"layout-{seed}")
    while True:
        tp, pp, dp = r.choice((1, 1, 2, 2, 4)), r.choice((1, 1, 2, 2, 3, 4)), r.choice((1, 1, 2, 2, 4))
        micro = r.choice((1, 2, 4))
        if 1 < tp * pp * dp <= 8 and 8 % (micro * dp) == 0:
            break
    engine = r.choice(("native", "native", "native", "deepspeed"))
    dtype = r.choice(("fp64", "fp32", "bf16", "fp16") if engine == "native" else ("fp32", "fp32", "bf16"))
    groups = tp * r.choice((1, 1, 2))
    heads = groups * r.choice((1, 2, 3))
    head_dim = r.choice((4, 6, 8))
    llama = r.random() < 0.4
    model: dict[str, Any] = {
        "num_layers": pp + r.choice((0, 1, 1, 2)), "hidden_size": r.choice((24, 32, 40)),
        "num_attention_heads": heads, "num_query_groups": groups, "head_dim": head_dim,
        "ffn_hidden_size": tp * r.choice((9, 16, 21)), "vocab_size": r.choice((7, 31, 53, 64, 97)),
        "seq_length": tp * r.choice((3, 4, 5)),
        "position_embedding": "rope" if llama or r.random() < 0.2 else "learned",
        "normalization": "rmsnorm" if llama else "layernorm",
        "activation": "swiglu" if llama else r.choice(("gelu", "gelu_tanh")),
        "add_bias": r.random() < (0.2 if llama else 0.85), "tie_embeddings": r.random() < 0.5,
        "hidden_dropout": r.choice((0.0, 0.1, 0.3)), "attention_dropout": r.choice((0.0, 0.0, 0.1)),
    }
    layout: dict[str, Any] = {
        "sequence_parallel": r.random() < 0.5, "recompute": r.choice(("none", "selective", "full")),
        "pipeline_schedule": "1f1b" if engine == "deepspeed" else r.choice(("gpipe", "1f1b")),
        "vocab_padding_multiple": r.choice((1, 1, 8)),
    }
    rest: dict[str, Any] = {
        "clip_grad": r.choice((0.0, 0.1, 0.5)), "mask_loss": r.random() < 0.3, "own_kernels": r.choice(("on", "off")),
    }
    # Drawn last, so that what was drawn before these options existed stays what it was.
    if engine == "native":
        schedule, chunks = r.choice((
            (layout["pipeline_schedule"], 1), ("1f1b", 2), ("zb-h1", 1), ("zb-v", 2),
        ))
        model["num_layers"] += pp * (chunks - 1)
        layout |= {
            "pipeline_schedule": schedule, "virtual_pipeline_size": chunks, "zero_stage": r.choice((0, 1, 1)),
            "reduce_bucket_size": r.choice((500, 4000, 1 << 25)),
        }
        if layout["zero_stage"] == 1 and not schedule.startswith("zb-") and r.random() < 0.5:
            layout["zero_stage"] = 2
    config = make_config(
        engine=engine, dtype=dtype, model=model, layout=layout, micro_batch_size=micro, **rest,
    )
    return Draw(seed, config, Topology(tp, pp, dp))


def plain(config: RunConfig) -> RunConfig:
    """The configuration without its layout and engine: one process.

    Nor, in fp32 and fp64, its own kernels: torch's ops are the reference for all. In half precision they stay. There
    the kernels round less often than torch's chains of ops, so the two differ by a bias that no reordering of
    either's sums shows (docs/parity.md).
    """
    half = config.precision.dtype in ("bf16", "fp16")
    backend = dataclasses.replace(config.backend, optimizer="auto")
    if not half:
        backend = dataclasses.replace(backend, own_kernels="off", attention="math")
    return dataclasses.replace(
        config, engine="native", layout=LayoutConfig(vocab_padding_multiple=1), backend=backend
    )


@functools.lru_cache(maxsize=256)
def reference_run(config: RunConfig, order: Order = None) -> Run:
    """The single-process run of a plain configuration."""
    return single_run(config, steps=STEPS, order=order)


def judge(one: Draw, traces: Sequence[RankTrace]) -> list[Deviation]:
    """Compare with the single process: gradients by name, norms, losses, copies."""
    config, run = plain(one.config), Run.of(traces)
    dtype = config.precision.dtype
    if dtype in ("bf16", "fp16"):
        return within_rounding(one.config, one.topology, run, functools.partial(reference_run, config))
    exact = dtype == "fp64"
    return compare(reference_run(config), run, FP64 if exact else FP32, config.model, lr=1e-2 if exact else 0.0)


def run_draws(ranks: RankPool, draws: Sequence[Draw]) -> list[tuple[Draw, list[Deviation]]]:
    """Run draws, those of one world and engine on the same ranks."""
    groups: dict[tuple[int, bool], list[Draw]] = {}
    for one in draws:
        groups.setdefault((one.topology.world_size, one.config.engine == "deepspeed"), []).append(one)
    out = []
    for (world, deepspeed), members in sorted(groups.items()):
        results = ranks.run(
            world, run_cases, [m.case for m in members], timeout=60.0 + 30.0 * len(members), deepspeed=deepspeed
        )
        for i, member in enumerate(members):
            out.append((member, judge(member, [result[i] for result in results])))
    return out


def failures(results: Sequence[tuple[Draw, list[Deviation]]]) -> str:
    """The failed draws with what differed; empty if none did."""
    lines = []
    for one, deviations in results:
        bad = [d for d in deviations if not d.ok]
        if bad:
            lines += [f"seed {one.seed}: {one.describe()}", *(f"  {d}" for d in bad)]
    return "\n".join(lines)


def _seeds(text: str) -> list[int]:
    first, _, last = text.partition("-")
    return list(range(int(first), int(last or first) + 1))


def run_resumable(draws: Sequence[Draw], out: Path, *, batch_size: int, seconds: float) -> int:
    """Run the draws that ``out`` (JSON lines) lacks, a batch at a time; 0 if none failed."""
    done = {json.loads(line)["seed"] for line in out.read_text().splitlines()} if out.exists() else set()
    todo = [one for one in draws if one.seed not in done]
    ranks, started, bad = RankPool(), time.monotonic(), 0
    try:
        while todo and time.monotonic() - started < seconds:
            batch, todo = todo[:batch_size], todo[batch_size:]
            results = run_draws(ranks, batch)
            with out.open("a") as f:
                for one, deviations in sorted(results, key=lambda x: x[0].seed):
                    row = {**one.describe(), "ok": all(d.ok for d in deviations)}
                    row["deviations"] = [
                        {**dataclasses.asdict(d), "value": float(f"{d.value:.3g}"), "bound": float(f"{d.bound:.3g}")}
                        for d in deviations
                    ]
                    f.write(json.dumps(row) + "\n")
            text = failures(results)
            bad += sum(not all(d.ok for d in deviations) for _, deviations in results)
            print(f"{len(draws) - len(todo)} of {len(draws)} done, {bad} bad", flush=True)
            if text:
                print(text, flush=True)
    finally:
        ranks.close()
    return 1 if bad else 0


def main() -> int:
    """Run a range of seeds, append a line each to a file, skip those that are in it."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--seeds", default="0-999", type=_seeds)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--batch", type=int, default=24)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop after this long; go on later")
    args = parser.parse_args()
    return run_resumable([draw(s) for s in args.seeds], args.out, batch_size=args.batch, seconds=args.seconds)


if __name__ == "__main__":
    sys.exit(main())
