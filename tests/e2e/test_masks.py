"""2:4 as a user types it: 50 steps, resumed on another layout, exported; no group of four ever has three elements."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from commands import Commands
from safetensors.torch import load_file

RUN = """
name = "sparse"
engine = "native"
[model]
num_layers = 2
hidden_size = 24
num_attention_heads = 2
ffn_hidden_size = 36
vocab_size = 60
seq_length = 8
position_embedding = "rope"
normalization = "rmsnorm"
activation = "swiglu"
add_bias = false
tie_embeddings = false
[layout]
vocab_padding_multiple = 1
[batch]
global_batch_size = 2
[precision]
dtype = "bf16"
[optimizer]
lr = 1e-2
decay_steps = 50
[data]
synthetic = true
tokenizer = "byte"
[telemetry]
replica_check_interval = 10
"""


def test_2_of_4_hold_in_training_resuming_and_the_export(commands: Commands, tmp_path: Path) -> None:
    run = tmp_path / "run.toml"
    run.write_text(f'output_dir = "{tmp_path}"\n{RUN}\n[sparsity]\nmethod = "2:4"\n')

    def call(*argv: str, code: int = 0) -> str:
        found, output = commands.run(*argv)
        assert found == code, output
        return output

    call("train", str(run), "--nproc", "2", "--set", "training.steps=25", "--set", "layout.tensor_parallel_size=2")
    call("train", str(run), "--nproc", "2", "--set", "training.steps=50", "--set", "layout.zero_stage=3")
    assert "sparsity.method is '2:4' there and 'magnitude' here" in call(
        "train", str(run), "--set", "training.steps=51", "--set", "sparsity.method=magnitude", code=5)
    last = tmp_path / "sparse" / "checkpoints" / "step-00000050"
    call("checkpoint", "export", str(last), str(tmp_path / "hf"), "--to", "hf")
    tensors: dict[str, Any] = load_file(tmp_path / "hf" / "model.safetensors")
    checked = 0
    for name, x in tensors.items():
        if "proj" in name:
            groups = (x.unflatten(-1, (-1, 4)) != 0).sum(dim=-1)
            assert int(groups.max()) == 2 and float((groups == 2).float().mean()) > 0.99, name
            checked += 1
    assert checked == 14
