"""Masks and few bits on every kind of layout, and in random combinations, each against one process; resumable.

``python tests/distributed/compressed.py --out benchmarks/results/masks.jsonl [--seeds 0-99]`` runs what the file lacks,
``--few-bits --out benchmarks/results/few-bits.jsonl`` the same of weights on a grid, ``--combined --seeds 0-23 --out
benchmarks/results/combined.jsonl`` draws of factors or shared layers together with masks, few bits and teachers.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import random
import sys
from collections.abc import Callable, Collection
from typing import Any

import drawing
import factored
from cases import make_config
from contradictions import contradictions
from distilled import WIDE, teacher_folder, with_drawn_teacher
from drawing import Draw
from fuzz import record, record_parser

from megatron_port.core.config.checks import problems
from megatron_port.core.config.features import DistillationConfig, OffloadConfig
from megatron_port.core.config.schema import MoEConfig, QuantisationConfig, RunConfig, SparsityConfig
from megatron_port.core.dist.mesh import Topology
from megatron_port.ext.weights.settings import FEW_BITS as CONFLICTS
from megatron_port.ext.weights.settings import GROUP, inputs

GPT: dict[str, Any] = {"hidden_dropout": 0.1}
LLAMA: dict[str, Any] = {
    "position_embedding": "rope", "normalization": "rmsnorm", "activation": "swiglu", "add_bias": False,
    "num_query_groups": 2, "ffn_hidden_size": 36, "tie_embeddings": False,
}
"""Tensor-parallel ranks have 18 of the 36 inputs: they cut a group."""
EXPERTS: dict[str, Any] = {**LLAMA, "moe": MoEConfig(num_experts=4, top_k=2, ffn_hidden_size=24)}
MODELS = {"gpt": GPT, "llama": LLAMA, "experts": EXPERTS, "wide llama": {**LLAMA, "ffn_hidden_size": 64}}
RANKS = {"qkv_rank": 16, "output_rank": 8, "up_rank": 16, "down_rank": 16}
MODELS |= {
    "factored llama": {**MODELS["wide llama"], **RANKS}, "shared gpt": {**GPT, "num_layers": 4, "shared_layers": 3},
    "both": {**GPT, **RANKS, "num_layers": 4, "shared_layers": 3},
}
WIDER = ("gpt", "wide llama")
"""Whose sizes groups divide on two tensor-parallel ranks."""


class CompressedDraw(Draw):
    """A combination with masks or few bits."""

    def describe(self) -> dict[str, object]:
        """For the results file."""
        s, m = self.config.sparsity, self.config.model
        return {**super().describe(), "ep": self.topology.ep, "experts": m.moe.num_experts,
                "ranks": m.ranks, "shared_layers": m.shared_layers,
                "teacher": self.config.distillation.enabled, "sparsity": s.method, "ratio": s.ratio,
                "sparse": list(s.targets),
                "bits": self.config.quantisation.weights, "group": self.config.quantisation.group_size}


def on_layout(
    number: int, model: str, topology: Topology, change: Callable[[RunConfig], RunConfig], *, recompute: Any = "none",
    mask: bool = False, dtype: str = "fp64", **layout: Any,
) -> CompressedDraw:
    """A run of a model on a layout."""
    sizes = {
        "tensor_parallel_size": topology.tp, "pipeline_parallel_size": topology.pp,
        "data_parallel_size": topology.dp, "context_parallel_size": topology.cp, "expert_parallel_size": topology.ep,
    }
    stages = topology.pp * layout.get("virtual_pipeline_size", 1)
    config = make_config(dtype=dtype, model={"num_layers": max(2, stages), **MODELS[model]}, mask_loss=mask,
                         layout={**sizes, "recompute": recompute, **layout})
    return CompressedDraw(number, change(config), topology)


def sparse(method: Any, ratio: float = 0.5, *targets: str) -> Callable[[RunConfig], RunConfig]:
    """Return what gives a run masks."""
    return lambda c: dataclasses.replace(c, sparsity=SparsityConfig(method=method, ratio=ratio, targets=targets))


def few(kind: Any, group: int) -> Callable[[RunConfig], RunConfig]:
    """Return what lets a run compute with few bits."""
    return lambda c: dataclasses.replace(c, quantisation=QuantisationConfig(weights=kind, group_size=group))


def together(*changes: Callable[[RunConfig], RunConfig]) -> Callable[[RunConfig], RunConfig]:
    """Return what makes several changes."""
    return lambda c: functools.reduce(lambda config, change: change(config), changes, c)


def taught(config: RunConfig) -> RunConfig:
    """Return the run with a teacher."""
    teacher = make_config(dtype="fp64", model={**WIDE, "num_layers": 4}).model
    return dataclasses.replace(config, distillation=DistillationConfig(
        teacher=teacher_folder(teacher), alpha=0.3, temperature=2.0))


def hosted(config: RunConfig) -> RunConfig:
    """Return the run with its update on the host, to which gradients go while others are still reduced."""
    return dataclasses.replace(config, offload=OffloadConfig(optimizer="cpu", buffers=8), backend=dataclasses.replace(
        config.backend, own_kernels="on", optimizer="own"))


FEW_BITS: dict[str, Callable[[RunConfig], RunConfig]] = {
    "int8": few("int8", 4), "int4": few("int4", 16), "binary": few("binary", 8),
}
CHANGES: dict[str, Callable[[RunConfig], RunConfig]] = {
    "2:4": sparse("2:4"), "share": sparse("magnitude", 0.7), "some": sparse("magnitude", 0.3, "layers.*.mlp.*"),
}


def matrix(
    changes: dict[str, Callable[[RunConfig], RunConfig]] = CHANGES,
    models: Collection[str] = ("gpt", "llama", "experts"),
) -> list[CompressedDraw]:
    """Every layout of {1, 2}³ and ZeRO stage with each model and change; cp 2 and ep 2; schedules and so on in turn."""
    out: list[CompressedDraw] = []
    schedules = itertools.cycle((("1f1b", 1), ("gpipe", 1), ("zb-h1", 1), ("1f1b", 2), ("zb-v", 2)))
    recompute = itertools.cycle(("none", "full", "selective"))
    for change, model, tp, pp, dp, zero in itertools.product(
        changes.values(), models, (1, 2), (1, 2), (1, 2), range(4)
    ):
        for cp, ep in ((1, 1), (2, 1), (1, 2)):
            without = model != "experts" or tp * dp < 2
            if tp * pp * dp * cp > 8 or (dp * cp == 1 and zero != 1) or (ep > 1 and without):
                continue
            schedule, chunks = next(schedules) if pp > 1 else ("1f1b", 1)
            if schedule.startswith("zb-") and zero == 2:
                schedule, chunks = "1f1b", 1
            out.append(on_layout(
                len(out), model, Topology(tp=tp, pp=pp, dp=dp, cp=cp, ep=ep), change, zero_stage=zero,
                recompute=next(recompute), mask=len(out) % 3 == 1, pipeline_schedule=schedule,
                virtual_pipeline_size=chunks, sequence_parallel=tp > 1 and len(out) % 2 == 0,
                vocab_padding_multiple=1 + 7 * (len(out) % 2),
            ))
    return out


def draw(seed: int) -> CompressedDraw:
    """A run of the fuzz in engine native, fp64 or fp32, with masks."""
    r = random.Random(f"masks-{seed}")
    while True:
        one = drawing.draw(r.randrange(10_000_000))
        config = one.config
        if config.engine == "native" and config.precision.dtype in ("fp64", "fp32") and not config.fine_tuning.enabled \
                and config.optimizer.name != "muon" and config.offload.optimizer != "nvme":
            break
    whole = all(size % GROUP == 0 for size in inputs(config.model).values()) and not config.model.kv_lora_rank
    method = r.choice(("2:4", "magnitude") if whole else ("magnitude",))
    targets = r.choice(((), ("layers.*.attention.*",), ("layers.0.*", "*.mlp.down.*")))
    return CompressedDraw(10_000 + seed, sparse(method, r.choice((0.2, 0.5, 0.9)), *targets)(config), one.topology)


def few_draw(seed: int) -> CompressedDraw:
    """A run of the fuzz in engine native and fp64, with few bits: in fp32 a rounding may fall to the other side."""
    r = random.Random(f"few-bits-{seed}")
    while True:
        config, t = (one := drawing.draw(r.randrange(10_000_000))).config, one.topology
        kind, group = r.choice(("int8", "int4", "binary")), r.choice((2, 3, 4, 8))
        drawn = few(kind, group)(config)
        # Labels of tokens that see themselves alone: gradients of queries and keys are 0, and Lion's step is a sign.
        sign = config.optimizer.name == "lion"
        if sign and config.data.mask_eod_loss and config.data.attention_documents == "within":
            continue
        if config.engine == "native" and config.precision.dtype == "fp64" and not contradictions(CONFLICTS, drawn):
            return CompressedDraw(20_000 + seed, drawn, t)


def combined_draw(seed: int) -> CompressedDraw:
    """A run in fp64 of a factored model, or one whose layers share weights, with few bits, masks or both in turn; every
    other one has a teacher."""
    r = random.Random(f"combined-{seed}")
    changes = [
        *([sparse(r.choice(("2:4", "magnitude")), r.choice((0.2, 0.5, 0.9)))] if seed % 3 else []),
        *([few(r.choice(("int8", "int4", "binary") if seed % 3 == 0 else ("int8", "int4")), r.choice((2, 4)))]
          if seed % 3 != 1 else []),
    ]
    while True:
        one = factored.draw(r.randrange(10_000_000))
        config, t = one.config, one.topology
        if config.precision.dtype != "fp64":
            continue
        for change in changes:
            config = change(config)
        if seed % 2:
            config, _ = with_drawn_teacher(r, config, t)
        if set(problems(config, world_size=t.world_size)) <= set(problems(one.config, world_size=t.world_size)):
            return CompressedDraw(30_000 + seed, config, t)


def main() -> int:
    """Run what a file lacks."""
    parser = record_parser(main.__doc__)
    parser.add_argument("--few-bits", action="store_true", help="weights on a grid instead of masks")
    parser.add_argument("--combined", action="store_true", help="draws of several methods together")
    args = parser.parse_args()
    if args.combined and not args.seeds:
        parser.error("--combined needs --seeds")
    drawn = [(combined_draw if args.combined else few_draw if args.few_bits else draw)(seed) for seed in args.seeds]
    return record(drawn or (matrix(FEW_BITS, WIDER) if args.few_bits else matrix()), args, "compressed",
                  lambda c: c.sparsity.method)


if __name__ == "__main__":
    sys.exit(main())
