"""Small checkpoints for the tests of ``interop``."""

from __future__ import annotations

from pathlib import Path

import torch

from megatron_port.checkpoint.format import SavedState
from megatron_port.checkpoint.reader import Checkpoint, open_checkpoint
from megatron_port.checkpoint.writer import save_checkpoint
from megatron_port.config.dump import as_dict
from megatron_port.config.schema import LayoutConfig, ModelConfig, RunConfig
from megatron_port.interop.commit import whole
from megatron_port.model.shapes import parameter_shapes

KINDS = ("weight", "exp_avg", "exp_avg_sq")
GPT2 = ModelConfig(num_layers=3, hidden_size=32, num_attention_heads=4, vocab_size=53, seq_length=16)
LLAMA = ModelConfig(
    num_layers=2, hidden_size=32, num_attention_heads=4, num_query_groups=2, ffn_hidden_size=48, vocab_size=53,
    seq_length=16, position_embedding="rope", normalization="rmsnorm", activation="swiglu", add_bias=False,
    tie_embeddings=False,
)


def random_state(model: ModelConfig, kinds: tuple[str, ...] = KINDS) -> dict[tuple[str, str], torch.Tensor]:
    """A random float32 tensor for every parameter and kind."""
    generator = torch.Generator().manual_seed(7)
    return {
        (name, kind): torch.randn(shape, generator=generator)
        for name, shape in parameter_shapes(model).items() for kind in kinds
    }


def saved(folder: Path, model: ModelConfig, kinds: tuple[str, ...] = KINDS) -> Checkpoint:
    """A committed checkpoint of a random state at step 12."""
    state = SavedState(
        step=12, samples=96, tokens=96 * model.seq_length,
        layout=LayoutConfig(), config=as_dict(RunConfig(model=model)),
        scalars={"optimizer_steps": 11, "loss_scale": 1024.0}, extra={"skipped_total": 1, "tokenizer": "byte"},
    )
    tensors = random_state(model, kinds)
    pieces = [whole(n, k, tuple(t.shape), t) for (n, k), t in tensors.items()]
    return open_checkpoint(save_checkpoint(folder, state, pieces, expected=parameter_shapes(model)))


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
