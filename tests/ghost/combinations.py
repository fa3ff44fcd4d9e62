"""Runs for the ghost machine: combinations of layout, schedule, ZeRO, precision, memory and what follows the training.

Every pair of values of any two dimensions that may stand together is in one run at least; after that runs are drawn
until there are as many as asked for. Runs on divided sequences, with experts or of DeepSpeed's engine are drawn by
themselves, on fewer layouts, until with those of the record they have every pair that one of their own dimensions is
part of. Pure: the same lists every time.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass

LAYOUTS = ("1x1x1", "2x1x1", "4x1x1", "1x2x1", "1x4x1", "1x1x2", "1x1x3", "1x1x4", "2x2x1", "2x1x2", "1x2x2", "2x1x3",
           "1x2x3", "2x2x2", "4x2x1", "2x4x1", "1x4x2", "1x2x4", "4x1x2", "1x1x8")
"""tp × pp × dp, at most 8."""
FURTHER_LAYOUTS = ("1x1x1", "2x1x1", "4x1x1", "1x2x1", "1x4x1", "1x1x2", "1x1x4", "2x2x1", "2x1x2", "1x2x2", "2x2x2")
"""Of the runs that differ in FURTHER too, which have more ranks."""
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
FURTHER: dict[str, tuple[str, ...]] = {
    "context": ("1", "2-gather", "2-heads", "2-ring", "4-gather", "4-ring"),
    "experts": ("none", "1", "2", "4"),
    "engine": ("native", "deepspeed"),
}
"""Ranks that share a sequence and how they exchange; ranks that share four experts; who runs the step. Of each the
first is what the other runs have."""
MOST_RANKS = 8
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
    context: str = FURTHER["context"][0]
    experts: str = FURTHER["experts"][0]
    engine: str = FURTHER["engine"][0]

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Tensor, pipeline and data parallel sizes."""
        tp, pp, dp = map(int, self.layout.split("x"))
        return tp, pp, dp

    @property
    def world(self) -> int:
        """Ranks."""
        tp, pp, dp = self.sizes
        return tp * pp * dp * self.shares

    @property
    def shares(self) -> int:
        """Ranks that share a sequence."""
        return int(self.context[0])

    @property
    def most_waits(self) -> int | None:
        """How often the host may wait for the device in a step: at its end, and in each layer of experts of a
        micro-batch for the rows that are exchanged, in the first forward pass. None: any number, where state is updated
        on the host, torch's AdamW and norm ask for the clipping factor, or DeepSpeed looks at its own norm."""
        if self.offload != "none" or self.kernels == "off" or self.engine != "native":
            return None
        return 1 if self.experts == "none" else 1 + self.layers // self.sizes[1] * self.micro_batches

    @property
    def layers(self) -> int:
        """Layers of the model, alike on each stage."""
        return max(2, self.sizes[1] * self.stages)

    @property
    def micro_batches(self) -> int:
        """Micro-batches of a replica in a step."""
        return 2 if self.sizes[1] > 1 else 1

    @property
    def is_further(self) -> bool:
        """Whether it has a value of FURTHER that is not the first."""
        return self.name.count(",") >= len(VALUES)

    @property
    def stages(self) -> int:
        """Chunks of layers on each pipeline stage."""
        return 2 if self.schedule in ("1f1b-2", "zb-v") else 1

    @property
    def name(self) -> str:
        """``2x2x1,zb-v,1,bf16,…``; of FURTHER what is not the first, as ``context=2-ring``."""
        values = asdict(self)
        other = [f"{key}={values[key]}" for key, known in FURTHER.items() if values[key] != known[0]]
        return ",".join([*(values[key] for key in VALUES), *other])

    @classmethod
    def of(cls, name: str) -> Case:
        """Return the run of a :attr:`name`."""
        words = name.split(",")
        return cls(**dict(zip(VALUES, words)), **dict(word.split("=") for word in words[len(VALUES):]))

    @property
    def pairs(self) -> set[Pair]:
        """Every two of its values; of FURTHER those that are not the first."""
        values = [(key, value) for key, value in asdict(self).items() if value != FURTHER.get(key, ("",))[0]]
        return {(a, x, b, y) for (a, x), (b, y) in itertools.combinations(values, 2)}

    def legal(self) -> bool:
        """Whether the configuration allows it."""
        _, pp, dp = self.sizes
        stage, parts = int(self.zero[0]), dp * self.shares
        return self._further_legal() and not any((
            pp == 1 and self.schedule != "1f1b",
            stage > 0 and parts == 1,
            stage == 2 and self.schedule.startswith("zb"),
            "hybrid" in self.zero and dp not in (4, 8),
            self.offload != "none" and stage == 0,
            self.offload != "none" and self.kernels == "off",  # its AdamW is the own kernel
            self.offload == "weights" and stage != 3,
            self.offload == "nvme" and self.saving == "beside",
        ))

    def _further_legal(self) -> bool:
        """Whether sequences, experts and engine go with the rest."""
        tp, _, dp = self.sizes
        method, ep = self.context[2:], 1 if self.experts == "none" else int(self.experts)
        deepspeed = self.engine == "deepspeed"
        return self.world <= MOST_RANKS and not any((
            method == "heads" and 4 // tp % self.shares,
            tp * dp * self.shares % ep,
            deepspeed and (self.schedule != "1f1b" or self.zero != "1" or self.offload != "none" or ep > 1),
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
            "model.num_layers": self.layers, "batch.global_batch_size": self.micro_batches * dp,
        }
        if self.context != "1":
            out |= {"layout.context_parallel_size": self.shares, "layout.cp_method": self.context[2:]}
        if self.experts != "none":
            out |= {"model.moe.num_experts": 4, "layout.expert_parallel_size": self.experts}
        if self.engine != "native":
            out |= {"engine": self.engine}
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


def drawn(chance: random.Random, known: Mapping[str, tuple[str, ...]]) -> Iterator[Case]:
    """Yield legal runs of known values for ever, small layouts more often than large ones."""
    layouts = known["layout"]
    weights = [1.0 / (1 + Case(layout, *[""] * (len(VALUES) - 1)).world) for layout in layouts]
    while True:
        values = {name: chance.choice(values) for name, values in known.items()}
        values["layout"] = chance.choices(layouts, weights)[0]
        case = Case(**values)
        if case.legal():
            yield case


def possible_pairs(known: Mapping[str, tuple[str, ...]]) -> set[Pair]:
    """Return every two values that some legal run has."""
    draw = drawn(random.Random(1), known)
    return set().union(*(case.pairs for case in itertools.islice(draw, 20_000)))


def cases(count: int = 320) -> list[Case]:
    """Return the runs that differ in VALUES, those that add most pairs for their ranks first."""
    return _covering(possible_pairs(VALUES), drawn(random.Random(0), VALUES), count)


def further_cases(recorded: Iterable[str] = ()) -> list[Case]:
    """Return runs on divided sequences, with experts or of DeepSpeed's engine that have, with the recorded ones (by
    name), every pair that a value of theirs is part of. The list begins with the recorded ones."""
    known = VALUES | FURTHER | {"layout": FURTHER_LAYOUTS}
    had = [case for case in map(Case.of, recorded) if case.is_further and case.legal()]
    # A pair's second value is FURTHER's if one of them is.
    missing = {pair for pair in possible_pairs(known) if pair[2] in FURTHER}.difference(*(case.pairs for case in had))
    found = _covering(missing, drawn(random.Random(2), known), 0)
    return had + [case for case in found if case.is_further]


def _covering(missing: set[Pair], draw: Iterator[Case], count: int) -> list[Case]:
    """Return drawn runs until none of these pairs is missing and there are as many as asked for."""
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
