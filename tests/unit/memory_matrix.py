"""Planned against measured peaks of ranks of random layouts, resumable: every schedule, recompute, ZeRO stage, family.

``python tests/unit/memory_matrix.py --out FILE --count N`` measures what FILE lacks of the first N cases and prints how
far the plan is off; ``--replan`` plans the measured cases again. Case n is the same on every machine. One process is
one rank: the others answer at once, with zeros (``fake_ranks``); ``--ranks N`` measures N of the cases once more with
every rank a process of its own, and with the others fake but with the copies that gloo makes in a collective.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from rank_memory import measure, measure_among_others

from megatron_port.core.config.checks import problems
from megatron_port.core.config.schema import (
    ActivationsConfig,
    BackendConfig,
    BatchConfig,
    DataConfig,
    LayoutConfig,
    ModelConfig,
    PrecisionConfig,
    RunConfig,
)
from megatron_port.tools.plan.case import Machine, case_of
from megatron_port.tools.plan.memory import stage_memory

LLAMA = {
    "activation": "swiglu", "normalization": "rmsnorm", "position_embedding": "rope", "add_bias": False,
    "tie_embeddings": False,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "gpt": {}, "dropout": {"hidden_dropout": 0.1}, "attention dropout": {"attention_dropout": 0.1},
    "neox": {"position_embedding": "rope", "parallel_residual": True, "tie_embeddings": False},
    "llama": LLAMA, "grouped llama": {**LLAMA, "num_query_groups": 2},
    "qwen3": {**LLAMA, "num_query_groups": 2, "qk_norm": True},
}
SCHEDULES = (("gpipe", 1), ("1f1b", 1), ("1f1b", 2), ("1f1b", 3), ("zb-h1", 1), ("zb-v", 2))
MICRO_BATCHES = (*(8,) * 9, *(16,) * 5, *(32,) * 3, *(64,) * 2, 128)
"""Short steps are drawn more often: they hold as much as long ones, but under GPipe."""
BOUND = 0.02


def drawn(number: int) -> tuple[dict[str, Any], RunConfig, int]:
    """Return case ``number``: its choices, its run and the stage that is measured. Illegal draws are drawn again."""
    draw = random.Random(number)
    while True:
        schedule, chunks = SCHEDULES[number % len(SCHEDULES)]
        stages = 1 if schedule in ("gpipe", "1f1b") and chunks == 1 and draw.random() < 0.25 else draw.choice((2, 3, 4))
        tp, sequence = draw.choice(((1, False), (2, False), (2, True)))
        zero, dp = draw.choice(((0, 1), (1, 2), (2, 2), (3, 2), (1, 4)))
        count, micro = draw.choice(MICRO_BATCHES), draw.choice((1, 1, 2))
        choices = {
            "family": draw.choice(list(FAMILIES)), "dtype": draw.choice(("fp32", "bf16", "fp16")), "schedule": schedule,
            "vp": chunks, "pp": stages, "tp": tp, "sp": sequence, "zero": zero, "dp": dp, "m": count, "micro": micro,
            "recompute": draw.choice(("none", "selective", "full")), "seq": draw.choice((64, 128, 256)),
            "layers": stages * chunks * draw.choice((1, 1, 2)) + (draw.random() < 0.2),
            "hidden": draw.choice((64, 128, 192)), "vocab": draw.choice((500, 2000)),
        }
        config, stage = run_of(choices), draw.randrange(stages)
        if not problems(config, world_size=tp * stages * dp):
            return choices | {"stage": stage}, config, stage


def run_of(c: dict[str, Any]) -> RunConfig:
    """The run of a case's choices."""
    model = ModelConfig(
        num_layers=c["layers"], hidden_size=c["hidden"], num_attention_heads=4, vocab_size=c["vocab"],
        seq_length=c["seq"], **FAMILIES[c["family"]],
    )
    layout = LayoutConfig(
        tensor_parallel_size=c["tp"], pipeline_parallel_size=c["pp"], virtual_pipeline_size=c["vp"],
        data_parallel_size=c["dp"], sequence_parallel=c["sp"], zero_stage=c["zero"], pipeline_schedule=c["schedule"],
        vocab_padding_multiple=8,
    )
    return RunConfig(
        model=model, layout=layout, activations=ActivationsConfig(policy=c["recompute"]), engine="native",
        batch=BatchConfig(micro_batch_size=c["micro"], global_batch_size=c["micro"] * c["m"] * c["dp"]),
        precision=PrecisionConfig(dtype=c["dtype"]), data=DataConfig(synthetic=True),
        backend=BackendConfig(device="cpu", attention="math"),
    )


def compared(number: int, measured: dict[str, int] | None = None) -> dict[str, Any]:
    """Measure a case, or take what has been ``measured``: its choices, bytes, and by how much the plan is off."""
    choices, config, stage = drawn(number)
    case, _ = case_of(config)
    planned = stage_memory(case, Machine(cluster=config.cluster, hardware=config.hardware), stage)
    if measured is None:
        found = measure(config, stage * case.dp * case.tp)
        # The planner leaves the padding of buckets out, which is a rank's own arithmetic and known exactly.
        measured = {"measured": found.peak, "padding": round(found.held - planned.static)}
    total = planned.allocated + measured["padding"]
    return {
        "number": number, **choices, **measured, "planned": round(total), "off": total / measured["measured"] - 1,
        "at": planned.peak_at,
    }


def among_others(row: dict[str, Any]) -> dict[str, Any]:
    """Return a row with the peak of the same rank among real ones over gloo, and how far that is from the fake's."""
    _, config, stage = drawn(row["number"])
    case, _ = case_of(config)
    real = measure_among_others(config, stage * case.dp * case.tp, 29600 + row["number"]).peak
    return row | {"real_ranks": real, "fake_off": row["measured"] / real - 1}


def with_copies(row: dict[str, Any]) -> dict[str, Any]:
    """Return a row with the fake's peak when its collectives copy as gloo's do, and how far real ranks are from it."""
    _, config, stage = drawn(row["number"])
    case, _ = case_of(config)
    found = measure(config, stage * case.dp * case.tp, copies=True).peak
    return row | {"with_copies": found, "copies_off": found / row["real_ranks"] - 1}


def long_contexts() -> Iterator[str]:
    """Peaks of runs whose attention scores are most of a layer, and how many tensors of that size are alive there."""
    for family, dtype, recompute in (
        ("gpt", "fp32", "full"), ("gpt", "bf16", "full"), ("llama", "bf16", "full"), ("gpt", "fp32", "selective")
    ):
        config = run_of({
            "family": family, "dtype": dtype, "schedule": "1f1b", "vp": 1, "pp": 1, "tp": 1, "sp": False, "zero": 0,
            "dp": 1, "m": 2, "micro": 1, "recompute": recompute, "seq": 1024, "layers": 2, "hidden": 128, "vocab": 1000,
        })
        case, _ = case_of(config)
        planned = stage_memory(case, Machine(cluster=config.cluster, hardware=config.hardware), 0)
        found = measure(config, 0)
        alive = {width: found.alive.get(4 * 1024 * 1024 * width, 0) for width in sorted({case.width, case.wide})}
        copies = ", ".join(f"{count} of {width} bytes an element" for width, count in alive.items())
        yield (
            f"{family} {dtype} {recompute}: planned {planned.allocated / found.peak - 1:+.2%}; tensors as large as the "
            f"scores at the peak: {copies}; one in fp32 is {4 * 1024 * 1024 * 4 / found.peak:.1%} of it"
        )


def report(rows: Sequence[dict[str, Any]]) -> str:
    """Return the errors in one paragraph, and every case beyond the bound."""
    off = [abs(row["off"]) for row in rows]
    beyond = [row for row in rows if abs(row["off"]) > BOUND]
    lines = [
        f"{len(rows)} cases; off by {statistics.mean(off):.3%} on average, {max(off):.2%} at most; "
        f"{len(beyond)} beyond {BOUND:.0%}"
    ]
    if real := [abs(row["fake_off"]) for row in rows if "fake_off" in row]:
        lines.append(f"{len(real)} of them among real ranks: the fake is off by {max(real):.2%} at most")
    if copied := [abs(row["copies_off"]) for row in rows if "copies_off" in row]:
        lines.append(f"with gloo's copies by {max(copied):.2%} at most, {statistics.median(copied):.3%} in the median")
    return "\n".join([*lines, *(json.dumps(row) for row in beyond)])


def main() -> int:
    """Measure or report; 1 where a case is beyond the bound."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--long", action="store_true", help="long contexts, and what is alive at their peaks")
    parser.add_argument("--count", type=int, default=0)
    parser.add_argument("--replan", action="store_true")
    parser.add_argument("--ranks", type=int, default=0, help="so many short cases again, with real ranks over gloo")
    a = parser.parse_args()
    torch.set_num_threads(1)
    if a.long:
        print(*long_contexts(), sep="\n")
    if a.out is None:
        return 0
    rows = [json.loads(line) for line in a.out.read_text().splitlines()] if a.out.exists() else []
    if a.replan:
        rows = [r | compared(r["number"], {key: r[key] for key in ("measured", "padding")}) for r in rows]
        a.out.write_text("".join(json.dumps(row) + "\n" for row in rows))
    for row in [r for r in rows if r["m"] == 8 and 1 < r["tp"] * r["pp"] * r["dp"] <= 8][: a.ranks]:
        if "real_ranks" not in row:
            rows[rows.index(row)] = among_others(row)
            a.out.write_text("".join(json.dumps(one) + "\n" for one in rows))
    for i, row in enumerate(rows):
        if "real_ranks" in row and "copies_off" not in row:
            rows[i] = with_copies(row)
            a.out.write_text("".join(json.dumps(one) + "\n" for one in rows))
    with a.out.open("a") as out:
        for number in sorted(set(range(a.count)) - {row["number"] for row in rows}):
            rows.append(compared(number))
            out.write(json.dumps(rows[-1]) + "\n")
            out.flush()
    print(report(rows))
    return int(any(abs(row["off"]) > BOUND for row in rows))


if __name__ == "__main__":
    raise SystemExit(main())
