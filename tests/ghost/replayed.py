"""Train on the ghost machine with numbers, once call by call and once in captured steps: every bit must be the same.

    python tests/ghost/replayed.py --python ENV/bin/python [--seconds 600] [--only 1x2x1] [--out FILE]

A case takes seven steps: three that warm up, one that captures, three replays; in some the number of micro-batches
changes meanwhile. Loss and gradient norm of every step and the files of the last checkpoint (weights, masters, moments)
are compared. A case that ended stays in benchmarks/results/ghost-replayed.jsonl and is not run again while it is there.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import random
import shutil
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from check import RUN
from computed import set_options, steps_of
from machine import Machine
from options import ROOT, chosen_torch, commit, machine, parser
from recorded import capture_faults

RECORD = ROOT / "benchmarks" / "results" / "ghost-replayed.jsonl"
STEPS = 7
VALUES: dict[str, tuple[str, ...]] = {
    "layout": ("1x1x1", "2x1x1", "1x1x2", "1x2x1", "2x1x2", "1x2x2", "2x2x1", "1x1x4", "4x1x1"),
    "schedule": ("1f1b", "gpipe", "1f1b-2", "zb-h1", "zb-v"),
    "zero": ("0", "1", "2", "1-hybrid"),
    "dtype": ("fp32", "bf16", "fp16"),
    "recompute": ("none", "selective", "full"),
    "model": ("gpt", "llama", "dropout", "documents"),
    "micro_batches": ("1", "2", "3", "5", "ramp"),
}
"""Of ``layout``: tp × pp × dp. ``ramp``: one micro-batch more each two steps."""
MORE = {
    "hybrid": ("layout.shard_size=2",),
    "dropout": ("model.hidden_dropout=0.1", "model.attention_dropout=0.1"),
    "llama": ("model.position_embedding=rope", "model.normalization=rmsnorm", "model.activation=swiglu",
              "model.num_query_groups=4", "model.tie_embeddings=false"),
    "documents": ("data.attention_documents=within",),
}


@dataclass(frozen=True)
class Case:
    """A run, by its values."""

    layout: str
    schedule: str
    zero: str
    dtype: str
    recompute: str
    model: str
    micro_batches: str

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Tensor, pipeline and data parallel sizes."""
        tp, pp, dp = map(int, self.layout.split("x"))
        return tp, pp, dp

    @property
    def name(self) -> str:
        """``2x1x1,1f1b,0,bf16,none,gpt,3``."""
        return ",".join(asdict(self).values())

    def legal(self) -> bool:
        """Whether the configuration allows it."""
        _, pp, dp = self.sizes
        return not any((
            pp == 1 and self.schedule != "1f1b", self.zero != "0" and dp == 1,
            self.zero == "2" and self.schedule.startswith("zb"), "hybrid" in self.zero and dp < 4,
            self.micro_batches == "ramp" and (pp > 1 or self.zero == "2"),
        ))

    @property
    def settings(self) -> list[str]:
        """What it sets."""
        tp, pp, dp = self.sizes
        chunks = 2 if self.schedule in ("1f1b-2", "zb-v") else 1
        most = 4 if self.micro_batches == "ramp" else int(self.micro_batches)
        out = [
            f"layout.tensor_parallel_size={tp}", f"layout.pipeline_parallel_size={pp}",
            f"layout.data_parallel_size={dp}", f"layout.sequence_parallel={str(tp > 1).lower()}",
            f"layout.pipeline_schedule={self.schedule.split('-2')[0]}", f"layout.virtual_pipeline_size={chunks}",
            f"layout.zero_stage={self.zero[0]}", f"precision.dtype={self.dtype}",
            f"activations.policy={self.recompute}", f"model.num_layers={max(2, pp * chunks)}",
            f"batch.global_batch_size={most * dp}", f"training.steps={STEPS}", "training.eval_interval=0",
            f"checkpoint.save_interval={STEPS}", "backend.own_kernels=on",
        ]
        if self.micro_batches == "ramp":
            out += [f"batch.rampup_start={dp}", f"batch.rampup_increment={dp}", f"batch.rampup_samples={12 * dp}"]
        for word in (self.zero.partition("-")[2], self.model):
            out += MORE.get(word, ())
        return out


def cases(count: int) -> list[Case]:
    """Return runs with every two values that may stand together, then further ones; the same each time."""
    chance, found = random.Random(0), dict[str, Case]()
    every = [case for values in itertools.product(*VALUES.values()) if (case := Case(*values)).legal()]
    chance.shuffle(every)
    missing = set().union(*(_pairs(case) for case in every))
    for case in _few_ranks_first(every):
        if len(found) >= count and not missing:
            break
        if _pairs(case) & missing or chance.random() < 0.25:
            found[case.name] = case
            missing -= _pairs(case)
    return list(found.values())


def _few_ranks_first(every: list[Case]) -> Iterator[Case]:
    """Yield the runs of one rank, of two and of four in turns, for as long as there are any."""
    lists = [[c for c in every if c.sizes[0] * c.sizes[1] * c.sizes[2] == ranks] for ranks in (1, 2, 4)]
    for row in itertools.zip_longest(*lists):
        yield from (case for case in row if case is not None)


def _pairs(case: Case) -> set[tuple[tuple[str, str], ...]]:
    return set(itertools.combinations(asdict(case).items(), 2))


def trained(made: Machine, case: Case, graphs: str, limit_s: float) -> tuple[list[Any], list[str]]:
    """Train; return loss and norm of each step with the digests of the last checkpoint, and what went wrong."""
    tp, pp, dp = case.sizes
    shutil.rmtree(made.scratch / "runs", ignore_errors=True)
    (made.scratch / "run.toml").write_text(RUN)
    sets = set_options([*case.settings, f"backend.graphs={graphs}"])
    ended = made.compute("train", "run.toml", "--nproc", str(tp * pp * dp), *sets, seconds=limit_s)
    if ended.code:
        return [], [f"{graphs}: exit {ended.code}: {' | '.join(ended.output.splitlines()[-3:])[:600]}"]
    wrong = [fault for log in ended.logs for fault in capture_faults(log)]
    if graphs == "step":
        wrong += [f"rank {log.rank} replayed nothing" for log in ended.logs if not log.counts()["graph begins"]]
        wrong += ["a replay differed from the step"] * ("the replay of a captured step has" in ended.output)
    folder = made.scratch / f"runs/run/checkpoints/step-{STEPS:08d}"
    files = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.glob("*.safetensors")}
    return [*steps_of(made.scratch), files], wrong + ([] if files else ["no checkpoint"])


def run_case(made: Machine, case: Case, limit_s: float) -> dict[str, Any]:
    """Return the record's line."""
    began = time.monotonic()
    called, wrong = trained(made, case, "off", limit_s)
    if not wrong:
        replayed, wrong = trained(made, case, "step", limit_s)
        if not wrong and replayed != called:
            at = next(i for i, pair in enumerate(zip(called, replayed)) if pair[0] != pair[1])
            wrong = [f"step {at} is {replayed[at]}, called {called[at]}" if at < STEPS else "the checkpoints differ"]
    return {"case": case.name, "ok": not wrong, "wrong": wrong[:3], "last": called[STEPS - 1] if called else None,
            "seconds": round(time.monotonic() - began, 1)}


def main() -> int:
    """Run the cases that the record lacks; 1 if one of them failed."""
    made = parser(__doc__)
    made.add_argument("--out", type=Path, default=RECORD)
    made.add_argument("--seconds", type=float, default=float("inf"), help="start no case after this long")
    made.add_argument("--limit", type=float, default=120.0, help="seconds for one run")
    made.add_argument("--count", type=int, default=320, help="cases, at least")
    made.add_argument("--only", default="", help="cases whose name contains this")
    a = made.parse_args()
    torch, began, bad = chosen_torch(a.python), time.monotonic(), 0
    rows = [json.loads(line) for line in a.out.read_text().splitlines()] if a.out.exists() else []
    done = {row["case"] for row in rows if row["ok"]}
    with machine(torch) as node:
        for case in (case for case in cases(a.count) if case.name not in done and a.only in case.name):
            if time.monotonic() - began > a.seconds:
                break
            row = run_case(node, case, a.limit) | {"commit": commit(), "torch": torch.version}
            if row["ok"]:
                with a.out.open("a") as out:
                    out.write(json.dumps(row) + "\n")
            bad += not row["ok"]
            print(f"{'ok  ' if row['ok'] else 'BAD '} {case.name}  {row['seconds']} s", *row["wrong"], sep="\n     ",
                  flush=True)
    print(f"{bad} bad")
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
