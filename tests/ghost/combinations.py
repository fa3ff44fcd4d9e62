"""Runs for the ghost machine: combinations of layout, schedule, ZeRO, precision, memory and what follows the training.

Every pair of values of any two dimensions that may stand together is in one run at least; after that runs are drawn
until there are as many as asked for. Pure: the same list every time.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from dataclasses import asdict, dataclass

LAYOUTS = ("1x1x1", "2x1x1", "4x1x1", "1x2x1", "1x4x1", "1x1x2", "1x1x3", "1x1x4", "2x2x1", "2x1x2", "1x2x2", "2x1x3",
           "1x2x3", "2x2x2", "4x2x1", "2x4x1", "1x4x2", "1x2x4", "4x1x2", "1x1x8")
"""tp × pp × dp, at most 8."""
VALUES: dict[str, tuple[str, ...]] = {
    "layout": LAYOUTS,
    "schedule": ("1f1b", "gpipe", "1f1b-2", "zb-h1", "zb-v"),
    "zero": ("0", "1", "2", "3", "3-step", "1-hybrid", "3-hybrid"),
    "dtype": ("fp32", "bf16", "fp16"),
    "recompute": ("none", "selective", "full"),
    "offload": ("none", "cpu", "half", "weights", "nvme"),
    "model": ("gpt", "llama", "dropout"),
    "saving": ("waits", "beside"),
    "kernels": ("on", "off"),
    "then": ("resume", "evaluate", "export", "generate"),
}
MOST_TRIES = 60
Pair = tuple[str, str, str, str]


@dataclass(frozen=True)
class Case:
    """One run and what is done with its checkpoint."""

    layout: str
    schedule: str
    zero: str
    dtype: str
    recompute: str
    offload: str
    model: str
    saving: str
    kernels: str
    then: str

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Tensor, pipeline and data parallel sizes."""
        tp, pp, dp = map(int, self.layout.split("x"))
        return tp, pp, dp

    @property
    def world(self) -> int:
        """Ranks."""
        tp, pp, dp = self.sizes
        return tp * pp * dp

    @property
    def stages(self) -> int:
        """Chunks of layers on each pipeline stage."""
        return 2 if self.schedule in ("1f1b-2", "zb-v") else 1

    @property
    def name(self) -> str:
        """``2x2x1,zb-v,1,bf16,…``."""
        return ",".join(asdict(self).values())

    @property
    def pairs(self) -> set[Pair]:
        """Every two of its values."""
        return {(a, x, b, y) for (a, x), (b, y) in itertools.combinations(asdict(self).items(), 2)}

    def legal(self) -> bool:
        """Whether the configuration allows it."""
        _, pp, dp = self.sizes
        stage = int(self.zero[0])
        return not any((
            pp == 1 and self.schedule != "1f1b",
            stage > 0 and dp == 1,
            stage == 2 and self.schedule.startswith("zb"),
            "hybrid" in self.zero and dp not in (4, 8),
            self.offload != "none" and stage == 0,
            self.offload != "none" and self.kernels == "off",  # its AdamW is the own kernel
            self.offload == "weights" and stage != 3,
            self.offload == "nvme" and self.saving == "beside",
        ))

    def settings(self, folder: str) -> dict[str, str]:
        """Return what the run sets. ``folder``: for files that are offloaded."""
        tp, pp, dp = self.sizes
        out = {
            "layout.tensor_parallel_size": tp, "layout.pipeline_parallel_size": pp, "layout.data_parallel_size": dp,
            "layout.sequence_parallel": str(tp > 1).lower(), "layout.pipeline_schedule": self.schedule.split("-2")[0],
            "layout.virtual_pipeline_size": self.stages * (pp > 1) or 1, "layout.zero_stage": self.zero[0],
            "precision.dtype": self.dtype, "activations.policy": self.recompute,
            "checkpoint.asynchronous": str(self.saving == "beside").lower(), "backend.own_kernels": self.kernels,
            "model.num_layers": max(2, pp * self.stages), "batch.global_batch_size": 2 * dp * (pp > 1) or dp,
        }
        more = {
            "hybrid": {"layout.shard_size": "2"}, "step": {"layout.reshard": "step"},
            "cpu": {"offload.optimizer": "cpu"}, "half": {"offload.optimizer": "cpu", "offload.fraction": "0.5"},
            "weights": {"offload.optimizer": "cpu", "offload.weights": "cpu"},
            "nvme": {"offload.optimizer": "nvme", "offload.nvme_path": folder},
            "dropout": {"model.hidden_dropout": "0.1", "model.attention_dropout": "0.1"},
            "llama": {"model.position_embedding": "rope", "model.normalization": "rmsnorm",
                      "model.activation": "swiglu", "model.num_query_groups": "4", "model.tie_embeddings": "false"},
        }
        found = {key: str(value) for key, value in out.items()}
        for word in (self.zero.partition("-")[2], self.offload, self.model):
            found |= more.get(word, {})
        return found


def drawn(chance: random.Random) -> Iterator[Case]:
    """Yield legal runs for ever, small layouts more often than large ones."""
    weights = [1.0 / (1 + Case(layout, *[""] * (len(VALUES) - 1)).world) for layout in LAYOUTS]
    while True:
        values = {name: chance.choice(values) for name, values in VALUES.items()}
        values["layout"] = chance.choices(LAYOUTS, weights)[0]
        case = Case(**values)
        if case.legal():
            yield case


def possible_pairs() -> set[Pair]:
    """Return every two values that some legal run has."""
    draw = drawn(random.Random(1))
    return set().union(*(case.pairs for case in itertools.islice(draw, 20_000)))


def cases(count: int = 320) -> list[Case]:
    """Return the runs, those that add most pairs for their ranks first."""
    missing, draw = possible_pairs(), drawn(random.Random(0))
    out: dict[str, Case] = {}
    while missing or len(out) < count:
        tried = [case for case in itertools.islice(draw, MOST_TRIES) if case.name not in out]
        if missing and max(len(case.pairs & missing) for case in tried) == 0:
            wanted = min(missing)  # a rare pair: draw until it comes
            tried = [next(case for case in draw if wanted in case.pairs)]
        best = max(tried, key=lambda case: (len(case.pairs & missing) + 0.5) / (2 + case.world))
        out[best.name] = best
        missing -= best.pairs
    return list(out.values())
