"""Runs of the command line against ``tests/twin``: every field of metrics.jsonl, and the last checkpoint.

The twin shares no code with the program. The runs have everything that a schedule, an order of samples or a mask can
get wrong: warm-up, decay that ends before the run, a batch that grows, two corpora of which one is gone through more
than once, masked tokens, dropout, clipping in some steps and not in others, evaluations.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from commands import Commands
from twin import checkpoint
from twin.data import Blend
from twin.run import Twin

STEPS = 20
RANKS = 4
PEAK_TFLOPS = 0.25
TABLES: dict[str, dict[str, Any]] = {
    "batch": {"global_batch_size": 8, "rampup_start": 4, "rampup_samples": 40},
    "optimizer": {
        "lr": 4e-3, "min_lr": 4e-4, "beta1": 0.9, "beta2": 0.95, "eps": 1e-5, "weight_decay": 0.3, "clip_grad": 1.15,
        "decay": "cosine", "warmup_steps": 4, "decay_steps": 17,
    },
    "data": {"weights": [0.7, 0.3], "split": [0.7, 0.25, 0.05], "mask_eod_loss": True},
    "training": {"steps": STEPS, "eval_interval": 10, "eval_batches": 3},
    "telemetry": {"replica_check_interval": 5},
    "cluster": {"peak_tflops": PEAK_TFLOPS},
    "backend": {"device": "cpu"},
}
GPT: dict[str, Any] = {
    "num_layers": 3, "hidden_size": 32, "num_attention_heads": 4, "num_query_groups": 4, "ffn_hidden_size": 128,
    "vocab_size": 257, "seq_length": 32, "position_embedding": "learned", "normalization": "layernorm",
    "activation": "gelu", "add_bias": True, "tie_embeddings": True, "hidden_dropout": 0.1, "attention_dropout": 0.0,
    "init_std": 0.1, "norm_epsilon": 1e-5,
}
LLAMA: dict[str, Any] = {
    **GPT, "num_query_groups": 2, "ffn_hidden_size": 88, "position_embedding": "rope", "normalization": "rmsnorm",
    "activation": "swiglu", "add_bias": False, "tie_embeddings": False, "rope_theta": 500.0,
}


@dataclass(frozen=True)
class Case:
    """A run of four ranks and how near the twin it must be (relative)."""

    engine: str
    dtype: str
    model: dict[str, Any]
    layout: dict[str, Any]
    batch_unit: int
    """Micro-batch times replicas: what the batch grows by."""
    loss: float
    norm: float
    weights: float
    """Of each tensor of masters and moments: rms of the difference over the rms of what training made of it."""
    data: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Settings that only this case has, as in the next two."""
    optimizer: dict[str, Any] = dataclasses.field(default_factory=dict)
    training: dict[str, Any] = dataclasses.field(default_factory=dict)


CASES = {
    "native-fp64-tp2-dp2": Case(
        "native", "fp64", {**LLAMA, "mup_base_size": 16},
        {"tensor_parallel_size": 2, "sequence_parallel": True, "zero_stage": 2, "reduce_bucket_size": 16000,
         "recompute": "full", "vocab_padding_multiple": 8}, 4, 1e-9, 1e-9, 1e-7, {"attention_documents": "within"},
        {
            "clip_value": 0.03, "clip_zscore": 0.4, "clip_warmup": 3, "clip_decay": 0.8, "ema_decay": 0.8,
            "ema_evaluate": True, "groups": [
                {"match": "norm", "lr_factor": 0.5, "weight_decay": 0.2},
                {"match": "layers.*.mlp.down.*", "lr_factor": 2.0}, {"match": "matrix", "lr_factor": 0.7},
                {"match": "embedding", "weight_decay": 0.0},
            ],
        },
    ),
    "native-fp32-pp2-dp2": Case(
        "native", "fp32", GPT,
        {"pipeline_parallel_size": 2, "pipeline_schedule": "zb-h1", "zero_stage": 1, "recompute": "none",
         "vocab_padding_multiple": 8}, 2, 1e-5, 1e-4, 1e-3, {"attention_documents": "within", "position_reset": True},
        {
            "ema_decay": 0.9,
            "groups": [{"match": "embedding.position.*", "lr_factor": 0.0}, {"match": "bias", "lr_factor": 3.0}],
        },
    ),
    "deepspeed-fp32-tp2-pp2": Case(
        "deepspeed", "fp32", {**GPT, "attention_dropout": 0.1, "mup_base_size": 16},
        {"tensor_parallel_size": 2, "pipeline_parallel_size": 2, "sequence_parallel": True, "recompute": "none",
         "vocab_padding_multiple": 8}, 2, 1e-5, 1e-4, 1e-3, optimizer={
            "decay": "wsd", "wsd_steps": 7, "groups": [{"match": "matrix", "lr_factor": 1.5, "weight_decay": 0.1}],
        },
        training={"z_loss": 0.01},
    ),
}


def write_texts(folder: Path) -> list[Path]:
    """Two files of documents of very unequal length, so that a mean of means is not the mean."""
    random = np.random.default_rng(5)
    out = []
    for name, documents, letters in (("first", 60, "etaoin shrdlu"), ("second", 90, "0123456789 +-=")):
        lengths = np.where(random.random(documents) < 0.5, random.integers(1, 6, documents),
                           random.integers(20, 120, documents))
        texts = ["".join(random.choice(list(letters), n)) + "." for n in lengths]
        path = folder / f"{name}.jsonl"
        path.write_text("".join(json.dumps({"text": t}) + "\n" for t in texts))
        out.append(path)
    return out


@pytest.fixture(scope="module")
def corpora(tmp_path_factory: pytest.TempPathFactory, commands: Commands) -> list[str]:
    """Prefixes of the two corpora, made by the command line."""
    folder = tmp_path_factory.mktemp("twin")
    prefixes = []
    for path in write_texts(folder):
        prefix = str(path.with_suffix(""))
        code, output = commands.run("data", "prepare", prefix, "--input", str(path), "--tokenizer", "byte")
        assert code == 0, output
        prefixes.append(prefix)
    return prefixes


def toml(tables: dict[str, Any]) -> str:
    """A run file."""
    top = {k: v for k, v in tables.items() if not isinstance(v, dict)}
    lines = [f"{k} = {json.dumps(v)}" for k, v in top.items()]
    for name, table in tables.items():
        if isinstance(table, dict):
            lines += [f"[{name}]", *(f"{k} = {json.dumps(v)}" for k, v in table.items() if k != "groups")]
    for group in tables["optimizer"].get("groups", ()):
        lines += ["[[optimizer.groups]]", *(f"{k} = {json.dumps(v)}" for k, v in group.items())]
    return "\n".join(lines) + "\n"


def tables_of(case: Case, corpora: list[str]) -> dict[str, Any]:
    """The whole run file of a case."""
    tables = copy.deepcopy(TABLES)
    tables["data"] |= {"train": corpora, **case.data}
    tables["optimizer"] |= case.optimizer
    tables["training"] |= case.training
    replicas = RANKS // math.prod(v for k, v in case.layout.items() if k.endswith("parallel_size"))
    tables["batch"] |= {"micro_batch_size": case.batch_unit // replicas, "rampup_increment": case.batch_unit}
    layout = dict(case.layout)
    policy = layout.pop("recompute")
    return {
        "name": "run", "seed": 4321, "engine": case.engine, **tables, "model": case.model, "layout": layout,
        "activations": {"policy": policy},
        "precision": {"dtype": case.dtype},
    }


def close(ours: float, theirs: float, bound: float, what: str) -> None:
    assert abs(ours - theirs) <= bound * abs(theirs), f"{what}: {ours!r}, the twin has {theirs!r}"


TIMES = {"seconds", "time"}
EXACT = ("step", "skipped", "skipped_total", "anomalies_total", "samples", "tokens", "loss_scale")


def compare_step(ours: dict[str, Any], theirs: dict[str, Any], case: Case) -> None:
    """Every field of a step's line."""
    where = f"step {theirs['step']}"
    assert set(ours) == TIMES | set(EXACT) | {
        "loss", "learning_rate", "grad_norm", "tokens_per_second", "model_tflops_per_device",
        "hardware_tflops_per_device", "mfu", "hfu", "memory_bytes",
    }, where
    for field in EXACT:
        assert ours[field] == theirs[field] and type(ours[field]) is type(theirs[field]), f"{where}: {field}"
    close(ours["loss"], theirs["loss"], case.loss, f"{where}: loss")
    close(ours["grad_norm"], theirs["grad_norm"], case.norm, f"{where}: grad_norm")
    close(ours["learning_rate"], theirs["learning_rate"], 1e-12, f"{where}: learning_rate")
    seconds = ours["seconds"]
    assert 0 < seconds < 600 and ours["memory_bytes"] > 1 << 20
    close(ours["tokens_per_second"] * seconds, theirs["step_tokens"], 1e-9, f"{where}: tokens_per_second")
    for name, share, operations in (
        ("model_tflops_per_device", "mfu", theirs["model_operations"]),
        ("hardware_tflops_per_device", "hfu", theirs["hardware_operations"]),
    ):
        close(ours[name] * seconds * RANKS * 1e12, operations, 1e-9, f"{where}: {name}")
        close(ours[share] * PEAK_TFLOPS, ours[name], 1e-9, f"{where}: {share}")


def compare_weights(folder: Path, twin: Twin, case: Case) -> None:
    """Masters, moments and average of the last checkpoint, tensor by tensor."""
    start = Twin(twin.config).weights
    for kind, theirs in (
        ("weight", twin.weights), ("exp_avg", twin.adam.first), ("exp_avg_sq", twin.adam.second),
        ("ema", twin.average.weights),
    ):
        ours = checkpoint.read(folder, kind)
        assert set(ours) == set(theirs)
        for name, value in theirs.items():
            if name.endswith("attention.qkv.bias"):
                continue  # a third of it, the keys' part, has a zero gradient: Adam makes steps of its rounding noise
            want = value.numpy()
            moved = want - start[name].numpy() if kind in ("weight", "ema") else want
            off = np.sqrt(np.mean((ours[name] - want) ** 2))
            assert off <= case.weights * np.sqrt(np.mean(moved**2)), f"{kind} of {name}: off by {off:.2e}"


@pytest.mark.parametrize("name", CASES)
def test_every_field_is_the_twins(name: str, corpora: list[str], commands: Commands, tmp_path: Path) -> None:
    case = CASES[name]
    tables = tables_of(case, corpora)
    (tmp_path / "run.toml").write_text(toml({**tables, "output_dir": str(tmp_path)}))
    command = commands.start("train", str(tmp_path / "run.toml"), "--nproc", str(RANKS))
    twin = Twin(tables)
    want = twin.run()  # while the command starts
    assert command.wait(300) == 0, command.output()
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [line["step"] for line in want]
    times = [line["time"] for line in lines]
    assert times == sorted(times) and all(math.isfinite(t) for t in times)
    for ours, theirs in zip(lines, want):
        if "validation_loss" in theirs:
            assert set(ours) == TIMES | {"step", "validation_loss"} and ours["seconds"] > 0
            close(ours["validation_loss"], theirs["validation_loss"], case.loss, f"after step {ours['step']}")
        else:
            compare_step(ours, theirs, case)
    compare_weights(tmp_path / "run" / "checkpoints" / f"step-{STEPS:08d}", twin, case)
    if "clip_value" in case.optimizer:  # each kind of clipping decided something, and not everything
        assert 2 <= twin.clip.adapted < STEPS - 5
        assert 0 < twin.clip.cut < 0.1 * STEPS * sum(w.numel() for w in twin.weights.values())


def test_the_run_has_what_could_go_wrong(corpora: list[str]) -> None:
    """The case is worth comparing: each rule decides something in it."""
    twin = Twin(tables_of(CASES["deepspeed-fp32-tp2-pp2"], corpora))
    lines = twin.run()
    steps = [line for line in lines if "loss" in line]
    limit = TABLES["optimizer"]["clip_grad"]
    clipped = [line["grad_norm"] > limit for line in steps]
    assert any(clipped) and not all(clipped)
    rates = [line["learning_rate"] for line in steps]
    assert rates[3] < rates[4] == max(rates) and rates[17] == rates[19] == TABLES["optimizer"]["min_lr"]
    sizes = {line["step_tokens"] // GPT["seq_length"] for line in steps}
    assert sizes == {4, 6, 8}
    drawn, blend = steps[-1]["samples"], twin.train
    assert isinstance(blend, Blend)
    assert blend.counts[0] / blend.period * drawn > 1.5 * blend.parts[0].size, "no corpus is repeated"
    assert [line["step"] for line in lines if "validation_loss" in line] == [0, 10, 20]
    assert TABLES["training"]["eval_batches"] * 8 <= twin.valid.size
    masked = [float((twin.valid.stored(i).tokens[:-1] == 256).mean()) for i in range(24)]
    means = [np.mean(masked[i : i + 8]) for i in (0, 8, 16)]
    assert min(masked) == 0 and max(masked) > 0.1 and max(means) - min(means) > 1e-3
