"""What a layout costs on a CPU, at the shape that `make quickstart` trains, and what the cost is made of.

    python benchmarks/layout_scaling.py --out benchmarks/results/layout-scaling-cpu.json

The same global batch of 4,096 tokens on 1, 2 and 8 ranks (gloo, one thread each), by processor time of all ranks
together: where ranks share cores, seconds by the wall measure the sharing. The lost time is split into

* pieces: one process alone does a rank's work without communication (its heads, its part of the MLP and vocabulary,
  its samples), times the ranks: narrower products, what tensor-parallel ranks all compute, a step's fixed costs;
* gloo: processor time of the process groups' own threads, which add and copy;
* rest: calls of collectives, copies for them, waiting that spins, the schedule.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from benchmarks.compare.results import hardware, write
from benchmarks.compare.sizes import Size, sizes
from megatron_port.core.config.schema import BackendConfig, RunConfig
from megatron_port.core.data.batch import MicroBatch
from megatron_port.core.dist.groups import ParallelContext
from megatron_port.ext.kernels.choose import choose_providers
from megatron_port.run.build import DTYPES, build_engine, topology_of
from megatron_port.run.device import choose_device

LAYOUTS: tuple[tuple[int, int, int], ...] = ((1, 1, 1), (1, 1, 2), (2, 1, 1), (1, 2, 1), (2, 2, 2))
"""(tp, pp, dp); with tp sequence parallelism, with dp ZeRO-1, as `make quickstart` has them."""


def size_of_step() -> Size:
    """What is trained."""
    return sizes()["quickstart"]


def config_of(size: Size, tp: int, pp: int, dp: int) -> RunConfig:
    """The run of one layout."""
    run = size.run_config()
    layout = replace(
        run.layout, tensor_parallel_size=tp, pipeline_parallel_size=pp, data_parallel_size=dp,
        sequence_parallel=tp > 1, zero_stage=1 if dp > 1 else 0,
    )
    batch = replace(run.batch, micro_batch_size=min(size.micro_batch, size.global_batch // dp))
    return replace(run, layout=layout, batch=batch)


def piece(size: Size, tp: int, dp: int) -> Size:
    """A rank's work, all stages, as a model of its own."""
    m = size.model
    model = replace(
        m, head_dim=m.head_size, num_attention_heads=m.num_attention_heads // tp, num_query_groups=m.kv_heads // tp,
        ffn_hidden_size=m.ffn_size // tp, vocab_size=-(-m.vocab_size // tp),
    )
    return replace(size, model=model, global_batch=size.global_batch // dp)


class Rank:
    """An engine and its data."""

    def __init__(self, config: RunConfig, ctx: ParallelContext) -> None:
        device = choose_device("cpu")
        providers = choose_providers(BackendConfig(device="cpu"), device, DTYPES["fp32"], engine="native")
        self.engine = build_engine(config, ctx, providers)
        b, s, topology = config.batch.micro_batch_size, config.model.seq_length, ctx.topology
        generator = torch.Generator().manual_seed(7)
        tokens = torch.randint(0, config.model.vocab_size, (config.batch.global_batch_size, s + 1), generator=generator)
        each = config.batch.global_batch_size // topology.dp
        mine = range(ctx.index("dp") * each, (ctx.index("dp") + 1) * each, b)
        self.batches = [
            MicroBatch(tuple(range(i, i + b)), tokens=tokens[i : i + b, :-1] if ctx.is_first_stage else None,
                       labels=tokens[i : i + b, 1:] if ctx.is_last_stage else None)
            for i in mine
        ]
        self.steps = 0

    def step(self) -> tuple[float, float, float, float]:
        """(wall seconds, processor seconds, those of this thread, loss) of one step."""
        wall, used, own = time.perf_counter(), time.process_time(), time.thread_time()
        loss = self.engine.train_step(self.batches, step=self.steps, lr=1e-3).loss
        self.steps += 1
        return time.perf_counter() - wall, time.process_time() - used, time.thread_time() - own, loss


def measured(rank: Rank, steps: int, barrier: Any) -> dict[str, Any]:
    """Medians of the steps after two."""
    rows = []
    for i in range(steps + 2):
        barrier()
        found = rank.step()
        if i >= 2:
            rows.append(found)
    wall, used, own, _ = (statistics.median(column) for column in zip(*rows))
    return {"wall": wall, "cpu": used, "main_thread": own, "loss": rows[-1][3]}


def rank_main(number: int, port: int, steps: int, folder: str, tp: int, pp: int, dp: int) -> None:
    """One rank of a layout."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=number, world_size=tp * pp * dp)
    config = config_of(size_of_step(), tp, pp, dp)
    ctx = ParallelContext.create(topology_of(config), torch.device("cpu"))
    found = measured(Rank(config, ctx), steps, dist.barrier)
    (Path(folder) / f"{number}.json").write_text(json.dumps(found))
    dist.barrier()
    ctx.close()
    dist.destroy_process_group()


def alone(steps: int, folder: str, tp: int, dp: int) -> None:
    """A rank's work in one process."""
    torch.set_num_threads(1)
    config = config_of(piece(size_of_step(), tp, dp), 1, 1, 1)
    found = measured(Rank(config, ParallelContext.single(torch.device("cpu"))), steps, lambda: None)
    (Path(folder) / "alone.json").write_text(json.dumps(found))


def _in_process(target: Any, *args: Any) -> None:
    process = mp.get_context("spawn").Process(target=target, args=args)
    process.start()
    process.join()
    if process.exitcode:
        raise SystemExit(f"error: {target.__name__}{args[1:]} ended with {process.exitcode}")


def measure(layout: tuple[int, int, int], steps: int, port: int) -> dict[str, Any]:
    """One row."""
    tp, pp, dp = layout
    world = tp * pp * dp
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(rank_main, args=(port, steps, folder, tp, pp, dp), nprocs=world)
        ranks = [json.loads((Path(folder) / f"{i}.json").read_text()) for i in range(world)]
        _in_process(alone, steps, folder, tp, dp)
        single = json.loads((Path(folder) / "alone.json").read_text())
    cpu = sum(r["cpu"] for r in ranks)
    return {
        "tp": tp, "pp": pp, "dp": dp, "ranks": world, "wall": max(r["wall"] for r in ranks), "cpu": cpu,
        "loss": ranks[-1]["loss"], "pieces": tp * dp * single["cpu"],
        "gloo": sum(r["cpu"] - r["main_thread"] for r in ranks) if world > 1 else 0.0, "by_rank": ranks,
    }


def table(rows: list[dict[str, Any]], tokens: int) -> str:
    """For people; shares are of one process' processor time."""
    base = rows[0]["cpu"]
    lines = [f"{'layout':<16}{'wall ms':>9}{'cpu ms':>9}{'tokens/cpu s':>14}{'of one':>8}{'lost':>8}{'pieces':>8}"
             f"{'gloo':>8}{'rest':>8}"]
    for r in rows:
        pieces, gloo = r["pieces"] / base - 1, r["gloo"] / base
        lost = r["cpu"] / base - 1
        name = f"tp {r['tp']} pp {r['pp']} dp {r['dp']}"
        lines.append(f"{name:<16}{r['wall'] * 1e3:>9.1f}{r['cpu'] * 1e3:>9.1f}{tokens / r['cpu']:>14.0f}"
                     f"{base / r['cpu']:>8.3f}{lost:>8.1%}{pieces:>8.1%}{gloo:>8.1%}{lost - pieces - gloo:>8.1%}")
    return "\n".join(lines)


def main() -> int:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=9, help="of each layout, after two that do not count")
    parser.add_argument("--repeats", type=int, default=3, help="rounds over all layouts; the best counts")
    parser.add_argument("--port", type=int, default=29671)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    best: dict[tuple[int, int, int], dict[str, Any]] = {}
    for i in range(args.repeats):
        for number, layout in enumerate(LAYOUTS):
            row = measure(layout, args.steps, args.port + i * len(LAYOUTS) + number)
            if layout not in best or row["cpu"] < best[layout]["cpu"]:
                row["pieces"] = min(row["pieces"], best.get(layout, row)["pieces"])
                best[layout] = row
            else:
                best[layout]["pieces"] = min(row["pieces"], best[layout]["pieces"])
    rows = [best[layout] for layout in LAYOUTS]
    print(table(rows, size_of_step().tokens))
    if args.out:
        write(args.out, {"command": " ".join(["python", *sys.argv]), "hardware": hardware("cpu", 1),
                         "load": os.getloadavg(), "tokens_per_step": size_of_step().tokens, "rows": rows})
        print(f"written: {args.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
