"""Planner against the peak memory of Megatron-core's functional tests: `python benchmarks/plan_memory_mcore.py` writes
benchmarks/results/plan-memory-mcore.md.

The runs are toys on 8 GPUs; what counts is which tensors Megatron-core holds. The logged peak is of the last rank
(Megatron-core's tensorboard writer is there), so of the last stage.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from plan_accuracy_more import machine_named
from programs import MEGATRON_CORE, megatron_split
from published_split import Line, opened, used

from megatron_port.core.config.model import MoEConfig
from megatron_port.core.config.schema import ModelConfig
from megatron_port.core.io.files import write_text
from megatron_port.tools.plan.case import Case
from megatron_port.tools.plan.engines import ADAMW
from megatron_port.tools.plan.memory import StageMemory, stage_memory

RESULT = Path(__file__).resolve().parent / "results" / "plan-memory-mcore.md"
FILE = "mcore-memory.csv"
GIB = 2.0**30
WORLD = 8
"""GPUs of a functional test: one node; the releases' number is not in the table."""
RELEASES = {"gpt": 128, "mixtral": 128}
"""GPUs of releases, which the table does not have: sizes that their batches and experts divide by; an assumption."""
VOCABULARY = 50257
"""Of GPT-2's tokenizer, which the tests take where no size is given."""
NEMOTRON = 256000
"""Of nemotron_2_256k.model, which gpt3_15b's arguments name."""


@dataclass(frozen=True)
class Row:
    """A run and what is planned for its last stage."""

    line: Line
    case: Case
    planned: StageMemory

    @property
    def measured(self) -> float:
        """Peak bytes allocated."""
        return float(self.line.row["mem_max_alloc_GiB"]) * GIB

    @property
    def error(self) -> float:
        """Relative error of the planned peak."""
        return self.planned.allocated / self.measured - 1


def why_not(row: dict[str, str]) -> str:
    """Why a line is not compared; empty: it is."""
    if not row["mem_max_alloc_GiB"]:
        return "no peak"
    if row["case"].startswith(("hybrid/", "nemotron/")):
        return "layers of state spaces, which the model has not"
    if "grpo" in row["case"]:
        return "reinforcement learning: another program's memory besides"
    return ""


def _number(row: dict[str, str], key: str, default: int) -> int:
    return int(float(row[key])) if row[key] else default


def model_of(row: dict[str, str]) -> ModelConfig:
    """The model of a line, with Megatron-core's defaults for what it does not name."""
    hidden, heads, layers = (_number(row, k, 0) for k in ("hidden-size", "num-attention-heads", "num-layers"))
    layers = layers or 32  # of gpt3_15b, which its arguments take from a file
    ffn, experts = _number(row, "ffn-hidden-size", 4 * hidden), _number(row, "num-experts", 0)
    moe = MoEConfig()
    if experts:
        dense = row["moe-layer-freq"]
        moe = MoEConfig(
            num_experts=experts, top_k=_number(row, "moe-router-topk", 2),
            ffn_hidden_size=_number(row, "moe-ffn-hidden-size", ffn),
            shared_ffn_hidden_size=_number(row, "moe-shared-expert-intermediate-size", 0),
            first_dense=int(dense.split("*")[1].split("+")[0]) if dense else 0,
        )
    gated, large = row["swiglu"] == "true", hidden >= 4096
    latent: dict[str, int] = {}
    if row["multi-latent-attention"] == "true":  # the defaults of its arguments
        latent = {"kv_lora_rank": 512, "q_lora_rank": 0, "qk_rope_head_dim": 64, "v_head_dim": 128, "head_dim": 192}
    groups = 0 if row["num-query-groups"] in ("", str(heads)) else int(float(row["num-query-groups"]))
    if row["kv-channels"] and not latent:
        latent = {"head_dim": int(float(row["kv-channels"]))}
    rotary = gated or large or "rope" in row["case"]
    return ModelConfig(
        name=row["case"].split("/")[1][:60], num_layers=layers, hidden_size=hidden, num_attention_heads=heads,
        num_query_groups=groups, ffn_hidden_size=ffn,
        vocab_size=_number(row, "vocab-size", NEMOTRON if "gpt3_15b" in row["case"] else VOCABULARY),
        seq_length=_number(row, "seq-length", 1024), hidden_dropout=0.0 if large or gated else 0.1,
        attention_dropout=0.0 if large or gated else 0.1, activation="swiglu" if gated else "gelu",
        normalization="rmsnorm" if gated else "layernorm", position_embedding="rope" if rotary else "learned",
        add_bias=not (gated or large or "disable_bias" in row["case"]),
        tie_embeddings=not (gated or large or "untie" in row["case"]),
        mtp_layers=_number(row, "mtp-num-layers", 0), moe=moe, **latent,  # type: ignore[arg-type]
    )


def workspace_of(row: dict[str, str]) -> float:
    """Bytes that cuBLAS holds: 32 MiB for torch's products, which the tests set (CUBLAS_WORKSPACE_CONFIG=:4096:8), and
    Transformer Engine's own, 32 MiB from Hopper on and 4 MiB before (``get_cublas_workspace_size_bytes``)."""
    return (36 if "a100" in row["golden"] else 64) * 2.0**20


def case_of_row(row: dict[str, str]) -> Case:
    """The case that a line describes."""
    tp, pp, cp, ep = (_number(row, key, 1) for key in (
        "tensor-model-parallel-size", "pipeline-model-parallel-size", "context-parallel-size",
        "expert-model-parallel-size",
    ))
    model = model_of(row)
    world = RELEASES.get(row["case"].split("/")[0], WORLD) if "release" in row["case"] else WORLD
    dp = max(world // (tp * pp * cp), 1)
    per = _number(row, "num-layers-per-virtual-pipeline-stage", 0)
    vp = max(model.num_layers // (pp * per), 1) if per else 1
    micro = _number(row, "micro-batch-size", 1)
    batch = _number(row, "global-batch-size", micro * dp)
    experts, sharded = model.moe.enabled, row["use-distributed-optimizer"] == "true"
    fsdp = row["use-megatron-fsdp"] == "true"
    # --attention-backend: unfused stands in the arguments of tests of one start (Megatron-LM, tests/functional_tests);
    # those that resume leave the choice to Transformer Engine, and ranks that share sequences have no other.
    fused = cp > 1 or any(w in row["case"] for w in ("nondeterministic", "resume")) or model.attention_dropout == 0
    engine = replace(MEGATRON_CORE, bucket_bytes=0.0, workspace_bytes=workspace_of(row))
    etp = _number(row, "expert-tensor-parallel-size", tp) if experts else 1
    return Case(
        model=model, engine=engine, tp=tp, pp=pp, vp=vp, dp=dp, cp=cp, cp_method="ring", ep=ep, etp=etp,
        sequence_parallel=row["sequence-parallel"] == "true" and tp > 1, zero_stage=3 if fsdp else 1 if sharded else 0,
        group=5 if "tunable_overlap" in row["case"] else 0,  # its microbatch-group-size-per-virtual-pipeline-stage
        recompute={"full": "full"}.get(row["recompute-granularity"], "none"), micro_batch=micro,
        micro_batches=max(batch // (micro * dp), 1), global_batch=batch, dtype="bf16", flash=fused,
        rule=replace(ADAMW, state=1.0 if "muon" in row["case"] else 2.0), split=megatron_split(model, pp * vp),
    )


def row_of(line: Line) -> Row:
    """A line with its plan."""
    case = case_of_row(line.row)
    return Row(line, case, stage_memory(case, machine_named("dgx-h100"), case.pp - 1))


def rows(lines: Iterable[Line]) -> list[Row]:
    """Every line that is compared."""
    return [row_of(line) for line in lines if not why_not(line.row)]


def summary_lines(found: list[Row]) -> list[str]:
    """How many runs are within 10 %."""
    size = [abs(r.error) for r in found]
    return [
        f"{sum(e <= 0.1 for e in size)} of {len(found)} peaks within 10 %; mean error "
        f"{statistics.mean(r.error for r in found):+.1%}, mean absolute {statistics.mean(size):.1%}, median "
        f"{statistics.median(size):.1%}."
    ]


def report(found: list[Row]) -> str:
    """The whole page."""
    left = [f"line {x.number}: {why_not(x.row)}" for x in used(FILE) if why_not(x.row)]
    text = [
        "# Planned memory against Megatron-core's functional tests", "",
        "Written by `python benchmarks/plan_memory_mcore.py` from `configs/published/mcore-memory.csv`, set-aside rows",
        "left out. Peak bytes of torch's allocator on the last rank. Not compared: " + "; ".join(left) + ".", "",
        *summary_lines(found), "", "| line | case | layout | measured GiB | planned GiB | error |",
        "|---|---|---|---|---|---|",
    ]
    for r in found:
        text.append(
            f"| {r.line.number} | {r.line.row['case']}, {r.line.row['golden'].split('.')[0][-24:]} | "
            f"{r.case.label()} | "
            f"{r.measured / GIB:.3f} | {r.planned.allocated / GIB:.3f} | {r.error:+.1%} |"
        )
    return "\n".join(text) + "\n"


def main() -> None:
    """Write the table, or print the errors of the rows set aside."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--opening", help="entry of openings.jsonl: the set-aside rows instead, printed only")
    args = parser.parse_args()
    found = rows(opened(FILE, args.opening) if args.opening else used(FILE))
    if not args.opening:
        write_text(RESULT, report(found))
    print("\n".join(summary_lines(found)))


if __name__ == "__main__":
    main()
