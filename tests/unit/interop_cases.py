"""Small checkpoints for the tests of ``interop``."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import torch

from megatron_port.core.checkpoint.format import SavedState
from megatron_port.core.checkpoint.reader import Checkpoint, open_checkpoint
from megatron_port.core.checkpoint.writer import save_checkpoint
from megatron_port.core.config.dump import as_dict
from megatron_port.core.config.schema import LayoutConfig, ModelConfig, MoEConfig, RunConfig
from megatron_port.core.dist.record import BUFFER
from megatron_port.core.model.shapes import buffer_shapes, parameter_shapes
from megatron_port.core.optim.rules import mixed_kinds
from megatron_port.tools.interop.dcp import whole

KINDS = ("weight", "exp_avg", "exp_avg_sq")
GPT2 = ModelConfig(num_layers=3, hidden_size=32, num_attention_heads=4, vocab_size=53, seq_length=16)
LLAMA = ModelConfig(
    num_layers=2, hidden_size=32, num_attention_heads=4, num_query_groups=2, ffn_hidden_size=48, vocab_size=53,
    seq_length=16, position_embedding="rope", normalization="rmsnorm", activation="swiglu", add_bias=False,
    tie_embeddings=False,
)
EXPERTS = dataclasses.replace(LLAMA, moe=MoEConfig(
    num_experts=4, ffn_hidden_size=24, shared_ffn_hidden_size=8, first_dense=1, balance_bias=True,
    balance_loss="previous_step",
))
"""Its router has both buffers."""


def random_state(model: ModelConfig, kinds: tuple[str, ...] = KINDS) -> dict[tuple[str, str], torch.Tensor]:
    """A random float32 tensor for every parameter and kind, and for every buffer."""
    generator = torch.Generator().manual_seed(7)
    shapes = {(name, kind): shape for name, shape in parameter_shapes(model).items() for kind in kinds}
    shapes |= {(name, BUFFER): shape for name, shape in buffer_shapes(model).items()}
    return {key: torch.randn(shape, generator=generator) for key, shape in shapes.items()}


def saved(folder: Path, model: ModelConfig, kinds: tuple[str, ...] = KINDS) -> Checkpoint:
    """A committed checkpoint of a random state at step 12."""
    tensors = random_state(model, kinds)
    by_name: dict[str, list[str]] = {}
    for name, kind in tensors:
        by_name.setdefault(name, []).append(kind)
    state = SavedState(
        step=12, samples=96, tokens=96 * model.seq_length,
        layout=LayoutConfig(), config=as_dict(RunConfig(model=model)),
        scalars={"optimizer_steps": 11, "loss_scale": 1024.0}, extra={"skipped_total": 1, "tokenizer": "byte"},
        kinds=mixed_kinds(by_name),
    )
    pieces = [whole(n, k, tuple(t.shape), t) for (n, k), t in tensors.items()]
    expected = parameter_shapes(model) | buffer_shapes(model)
    return open_checkpoint(save_checkpoint(folder, state, pieces, expected=expected))


def read_all(checkpoint: Checkpoint, kind: str = "weight") -> dict[str, torch.Tensor]:
    """Every tensor of one kind."""
    shapes = {name: checkpoint.shape(name, kind) for name in checkpoint.names(kind)}
    return {name: checkpoint.read(name, kind, (0,) * len(shape), shape) for name, shape in shapes.items()}


def same(a: Checkpoint, b: Checkpoint) -> None:
    """Equal to the bit: names, kinds, values and dtypes."""
    assert a.kinds() == b.kinds()
    for kind in a.kinds():
        one, two = read_all(a, kind), read_all(b, kind)
        assert one.keys() == two.keys()
        for name in one:
            assert one[name].dtype == two[name].dtype and torch.equal(one[name], two[name]), (name, kind)
