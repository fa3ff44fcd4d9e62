"""From a large run to an exported half of it, as a user types it, with another layout for every step."""

from __future__ import annotations

import json
from pathlib import Path

import hf_models as hf
import numpy as np
import pytest
import torch
from commands import Commands

from megatron_port.ext.corpora.writer import IndexedWriter
from megatron_port.run.weights import open_weights
from megatron_port.tools.interop.hf_check import our_logits

RUN = """
[batch]
micro_batch_size = 1
global_batch_size = 4
[precision]
dtype = "fp64"
[training]
steps = 3
[optimizer]
lr = 1e-2
[telemetry]
replica_check_interval = 1
"""
MODEL = """
[model]
num_layers = 4
hidden_size = 32
num_attention_heads = 8
num_query_groups = 4
ffn_hidden_size = 64
vocab_size = 257
seq_length = 16
position_embedding = "rope"
normalization = "rmsnorm"
activation = "swiglu"
add_bias = false
tie_embeddings = false
[layout]
tensor_parallel_size = 2
pipeline_parallel_size = 2
vocab_padding_multiple = 8
"""


def test_trained_pruned_trained_on_and_exported_on_four_layouts(commands: Commands, tmp_path: Path) -> None:
    """The model learns from the run that it was cut from; its losses are one process's, its export transformers'."""
    def call(*argv: str) -> str:
        code, output = commands.run(*argv)
        assert code == 0, output
        return output

    def run_file(name: str, text: str) -> str:
        data = f'[data]\ntrain = ["{tmp_path}/corpus"]\nsplit = [1.0, 0.0, 0.0]\n'
        (tmp_path / f"{name}.toml").write_text(f'output_dir = "{tmp_path}"\nengine = "native"\n{text}\n{RUN}{data}')
        return str(tmp_path / f"{name}.toml")

    with IndexedWriter(tmp_path / "corpus", vocab_size=257) as writer:
        writer.add_document(np.random.default_rng(3).integers(0, 257, 500) // 7 * 7)
    large = run_file("large", f'name = "large"\n{MODEL}')
    call("train", large, "--nproc", "4")
    importance, half = str(tmp_path / "importance.safetensors"), tmp_path / "half"
    call("compress", "measure", str(tmp_path / "large"), "--data", str(tmp_path / "corpus"), "--samples", "8", "--out",
         importance, "--nproc", "2", "--set", "layout.context_parallel_size=2")
    call("compress", "run", str(tmp_path / "large"), str(half), "--layers", "3", "--groups", "2", "--ffn", "40",
         "--hidden", "24", "--importance", importance)
    small = run_file("small", f'extends = "{half}/model.toml"\nname = "small"\ncheckpoint.initial_weights = "{half}"\n'
                     f'distillation.teacher = "{tmp_path}/large"\nlayout.vocab_padding_multiple = 1')
    losses = {}
    for name, ranks, layout in (("alone", "1", ()), ("zero3", "2", ("--set", "layout.zero_stage=3"))):
        call("train", small, "--nproc", ranks, "--set", f"name={name}", *layout)
        lines = [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
        losses[name] = [(x["loss"], x["grad_norm"]) for x in lines if "learning_rate" in x]
        assert all(0 < x["teacher_kl"] < x["cross_entropy"] for x in lines if "learning_rate" in x)
    assert len(losses["alone"]) == 3
    assert np.array(losses["zero3"]) == pytest.approx(np.array(losses["alone"]), rel=1e-9)

    call("checkpoint", "export", str(tmp_path / "zero3" / "checkpoints" / "step-00000003"), str(tmp_path / "hf"),
         "--to", "hf")
    trained = open_weights(tmp_path / "zero3")
    tokens = torch.arange(32).view(2, 16) * 3 % 257
    with torch.no_grad():
        theirs = hf.loaded(tmp_path / "hf")(tokens).logits
    assert trained.model.num_layers == 3 and trained.model.head_size == 4
    assert hf.relative(our_logits(trained.read, trained.model, tokens), theirs) <= 1e-6
