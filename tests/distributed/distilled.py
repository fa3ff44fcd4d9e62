"""Distillation on every kind of layout, and in random combinations, each against one process in fp64; resumable.

``python tests/distributed/distilled.py --out benchmarks/results/distillation.jsonl`` runs what the file lacks of the
matrix, ``--seeds 0-99`` of the draws (rows from 10,000 on).
"""

from __future__ import annotations

import atexit
import dataclasses
import itertools
import json
import random
import shutil
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import drawing
import xxhash
from cases import make_config, providers_of
from drawing import Draw
from fuzz import record, record_parser

from megatron_port.core.checkpoint.writer import save_checkpoint
from megatron_port.core.config.dump import as_dict
from megatron_port.core.config.features import DistillationConfig
from megatron_port.core.config.schema import ModelConfig, MoEConfig, RunConfig
from megatron_port.core.dist.groups import ParallelContext
from megatron_port.core.dist.mesh import Topology
from megatron_port.run.build import build_engine
from megatron_port.run.state import Position, saved_records, shapes_of, state_of

GPT: dict[str, Any] = {"hidden_dropout": 0.1}
LLAMA: dict[str, Any] = {
    "position_embedding": "rope", "normalization": "rmsnorm", "activation": "swiglu", "add_bias": False,
    "num_query_groups": 2, "ffn_hidden_size": 48, "tie_embeddings": False,
}
EXPERTS: dict[str, Any] = {
    **LLAMA, "moe": MoEConfig(num_experts=4, top_k=2, ffn_hidden_size=24, balance_loss="sequence", balance_bias=True),
}
WIDE: dict[str, Any] = {"hidden_size": 48, "num_attention_heads": 6, "init_std": 0.2}
"""A teacher's sizes; weights far from the model's initial ones."""
PAIRS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "gpt from llama": (GPT, {**LLAMA, **WIDE, "num_layers": 5, "num_query_groups": 6}),
    "llama from tied gpt": (LLAMA, {**WIDE, "num_layers": 4, "seq_length": 24}),
    "llama from experts": (LLAMA, {**EXPERTS, "num_layers": 4, "init_std": 0.2}),
    "experts from llama": (EXPERTS, {**LLAMA, **WIDE, "num_layers": 4}),
    "shared from shared": ({**GPT, "shared_layers": 2}, {**WIDE, "num_layers": 6, "shared_layers": 3}),
}
"""(the model, its teacher)"""
_FOLDER: list[Path] = []


def teacher_folder(model: ModelConfig) -> str:
    """A checkpoint of the initial weights of ``model``, the same folder for the same model."""
    if not _FOLDER:
        _FOLDER.append(Path(tempfile.mkdtemp(prefix="teachers-")))
        atexit.register(shutil.rmtree, _FOLDER[0], ignore_errors=True)
    folder = _FOLDER[0] / xxhash.xxh3_64_hexdigest(json.dumps(as_dict(model), sort_keys=True).encode())
    if not folder.exists():
        write_teacher(model, folder)
    return str(folder)


def write_teacher(model: ModelConfig, folder: Path) -> None:
    """Save the initial weights of ``model``, of another seed than any run's."""
    config = replace(make_config(dtype="fp32"), model=model, seed=77)
    engine = build_engine(config, ParallelContext.single(), providers_of(config))
    records = saved_records(config)
    state = state_of(engine, config, Position(step=0, samples=0, skipped=0), records)
    save_checkpoint(folder, state, engine.state_pieces(), expected=shapes_of(records))


@dataclass(frozen=True)
class DistilledDraw(Draw):
    """A combination with a teacher."""

    teacher: ModelConfig

    def describe(self) -> dict[str, object]:
        """For the results file."""
        d, keep = self.config.distillation, ("num_layers", "hidden_size", "num_attention_heads", "position_embedding")
        return {
            **super().describe(), "ep": self.topology.ep, "experts": self.config.model.moe.num_experts,
            "alpha": d.alpha, "temperature": d.temperature, "divergence": d.divergence,
            "teacher": {name: getattr(self.teacher, name) for name in keep},
            "teacher_experts": self.teacher.moe.num_experts,
        }


def distilled(
    number: int, pair: str, topology: Topology, *, data: dict[str, Any] | None = None, recompute: Any = "none",
    mask: bool = False, objective: tuple[float, float, Any] = (0.3, 2.0, "forward"), dtype: str = "fp64",
    **layout: Any,
) -> DistilledDraw:
    """A run of a pair on a layout."""
    model, teacher = PAIRS[pair]
    sizes = {
        "tensor_parallel_size": topology.tp, "pipeline_parallel_size": topology.pp,
        "data_parallel_size": topology.dp, "context_parallel_size": topology.cp, "expert_parallel_size": topology.ep,
    }
    stages = topology.pp * layout.get("virtual_pipeline_size", 1)
    config = make_config(dtype=dtype, model={**model, "num_layers": max(3, stages)}, mask_loss=mask, data=data,
                         layout={**sizes, "recompute": recompute, **layout})
    base = make_config(dtype="fp64", model={**teacher, "num_layers": max(teacher["num_layers"], stages)}).model
    alpha, temperature, divergence = objective
    config = replace(config, distillation=DistillationConfig(
        teacher=teacher_folder(base), alpha=alpha, temperature=temperature, divergence=divergence))
    return DistilledDraw(number, config, topology, base)


def matrix() -> list[DistilledDraw]:
    """Every layout of {1, 2}³, ZeRO stage and pair; cp 2 and ep 2 beside them; schedules, masks and so on in turn."""
    out: list[DistilledDraw] = []
    schedules = itertools.cycle((("1f1b", 1), ("gpipe", 1), ("zb-h1", 1), ("1f1b", 2), ("zb-v", 2)))
    turns = itertools.cycle(
        ((0.3, 2.0, "forward"), (0.5, 1.0, "reverse"), (0.0, 3.0, "forward"), (0.2, 0.7, "reverse")))
    recompute = itertools.cycle(("none", "full", "selective"))
    documents = itertools.cycle(({}, {"attention_documents": "within"}, {}))
    for pair, tp, pp, dp, zero in itertools.product(PAIRS, (1, 2), (1, 2), (1, 2), range(4)):
        for cp, ep in ((1, 1), (2, 1), (1, 2)):
            experts = "experts" in pair
            if tp * pp * dp * cp > 8 or (dp * cp == 1 and zero != 1) or (ep > 1 and (not experts or tp * dp < 2)):
                continue
            schedule, chunks = next(schedules) if pp > 1 else ("1f1b", 1)
            if schedule.startswith("zb-") and zero == 2:
                schedule, chunks = "1f1b", 1
            out.append(distilled(
                len(out), pair, Topology(tp=tp, pp=pp, dp=dp, cp=cp, ep=ep), zero_stage=zero,
                objective=next(turns), recompute=next(recompute), mask=len(out) % 3 == 1, data=next(documents),
                pipeline_schedule=schedule, virtual_pipeline_size=chunks,
                sequence_parallel=tp > 1 and len(out) % 2 == 0, vocab_padding_multiple=1 + 7 * (len(out) % 2),
                reshard=("forward", "step")[zero == 3 and len(out) % 2],
            ))
    return out


def draw(seed: int) -> DistilledDraw:
    """A run of the fuzz in engine native, fp64 or fp32, with a teacher of any shape that can be split likewise."""
    r = random.Random(f"distillation-{seed}")
    while True:
        one = drawing.draw(r.randrange(10_000_000))
        config, t = one.config, one.topology
        if config.engine == "native" and config.precision.dtype in ("fp64", "fp32") and not config.model.mtp_layers \
                and not config.fine_tuning.enabled:
            break
    config, teacher = with_drawn_teacher(r, config, t)
    return DistilledDraw(10_000 + seed, config, t, teacher)


def with_drawn_teacher(r: random.Random, config: RunConfig, t: Topology) -> tuple[RunConfig, ModelConfig]:
    """Return a run with a teacher of any shape that can be split likewise, and that."""
    if config.layout.zero_stage == 3:  # does not serve a teacher's head in chunks
        config = replace(config, activations=replace(config.activations, head_chunk=0))
    mine, stages = config.model, t.pp * config.layout.virtual_pipeline_size
    groups, llama = mine.kv_heads, r.random() < 0.5
    heads = groups * r.choice((1, 2)) if groups >= t.tp else t.tp * r.choice((1, 2))
    teacher = ModelConfig(
        name="teacher", num_layers=stages + r.choice((0, 1, 3)), hidden_size=8 * r.choice((3, 5, 6)),
        num_attention_heads=heads, num_query_groups=groups, head_dim=r.choice((4, 8)), vocab_size=mine.vocab_size,
        seq_length=mine.seq_length + r.choice((0, 5)), ffn_hidden_size=t.tp * r.choice((8, 20)), init_std=0.2,
        position_embedding="rope" if llama else "learned", normalization="rmsnorm" if llama else "layernorm",
        activation="swiglu" if llama else "gelu", add_bias=not llama, tie_embeddings=r.random() < 0.5,
    )
    without = dataclasses.replace(config.training, z_loss=0.0)  # it is no part of a distillation's loss
    config = dataclasses.replace(config, training=without, distillation=DistillationConfig(
        teacher=teacher_folder(teacher), alpha=r.choice((0.0, 0.3, 0.8)), temperature=r.choice((0.5, 1.0, 2.0)),
        divergence=r.choice(("forward", "reverse"))))
    return config, teacher


def main() -> int:
    """Run what a file lacks."""
    args = record_parser(main.__doc__).parse_args()
    return record([draw(seed) for seed in args.seeds] or matrix(), args, "distillation")


if __name__ == "__main__":
    sys.exit(main())
