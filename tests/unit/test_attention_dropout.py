"""Dropout of attention probabilities in the own kernels: masks and gradients of both passes, also under recompute."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Literal

import pytest
import torch
from twin.streams import dropout_factors

from megatron_port.core.config.schema import BackendConfig, LayoutConfig, ModelConfig
from megatron_port.core.dist.groups import ParallelContext
from megatron_port.core.dist.positions import Positions
from megatron_port.core.layers.attention import Attention, AttentionMask, math_attention, math_attention_with
from megatron_port.core.layers.dropout import DropoutStream
from megatron_port.core.layers.fused import ProbabilityDropout
from megatron_port.core.layers.providers import Providers, torch_providers
from megatron_port.core.layers.step import StepSlot
from megatron_port.core.model.attention import SelfAttention
from megatron_port.core.model.build import BuildContext, BuildOptions
from megatron_port.core.model.decoder_spec import attention_spec
from megatron_port.ext.kernels import kernels
from megatron_port.ext.kernels.choose import choose_providers
from megatron_port.ext.kernels.ops import attention as own
from megatron_port.ext.kernels.ops.softmax import causal_softmax
from megatron_port.run.device import choose_device

CPU = torch.device("cpu")
SEED, STEP, SAMPLES, P = 5, 9, (3, 1 << 33), 0.4
HEADS, HELD = 5, slice(2, 4)
"""Heads of the layer, and those of this rank."""


@pytest.fixture(autouse=True)
def library() -> None:
    if problem := kernels.kernels_status("cpu")[1]:
        pytest.skip(problem)
    kernels.load("cpu")


def _stream() -> DropoutStream:
    stream = DropoutStream(SEED, CPU)
    stream.set_micro_batch(STEP, SAMPLES)
    return stream


def _dropout(seq: int) -> ProbabilityDropout:
    return _stream().probability_dropout(
        P, op="a", head_offset=HELD.start, positions=Positions.contiguous(seq)
    )


def _packed(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, dropout: ProbabilityDropout) -> torch.Tensor:
    return own.packed_attention(torch.stack((q, k, v), dim=3), dropout=dropout)


WAYS: dict[str, Callable[..., torch.Tensor]] = {
    "in softmax": math_attention_with(causal_softmax), "attention": own.attention, "packed": _packed,
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("seq", [12, 13])
def test_both_passes_have_the_twins_mask(way: str, seq: int) -> None:
    """Equal scores: row i has probabilities 1 / (i + 1). Values that are the identity give the dropped probabilities
    back, and so does the gradient of the values; that of the queries is compared with torch's ops in fp64."""
    factors = dropout_factors(SEED, STEP, list(SAMPLES), "a", (HEADS, seq, seq), P)[:, HELD]
    want = factors * torch.ones(seq, seq).tril() / torch.arange(1, seq + 1).view(-1, 1)
    zeros = torch.zeros(seq, 2, 2, seq)
    values = torch.eye(seq).view(seq, 1, 1, seq).repeat(1, 2, 2, 1).requires_grad_()
    out = WAYS[way](zeros, zeros, values, dropout=_dropout(seq)).view(seq, 2, 2, seq)
    torch.testing.assert_close(out.detach().permute(1, 2, 0, 3).double(), want, rtol=1e-5, atol=0.0)
    (gradient,) = torch.autograd.grad(out, values, torch.eye(seq).view(seq, 1, 1, seq).expand_as(out))
    torch.testing.assert_close(gradient.permute(1, 2, 3, 0).double(), want, rtol=1e-5, atol=0.0)


@pytest.mark.parametrize("way", WAYS)
def test_gradients_are_those_of_torchs_ops(way: str) -> None:
    g = torch.Generator().manual_seed(3)
    given = [torch.randn(21, 2, 2, 8, generator=g) for _ in range(3)]
    found = []
    for function, dtype in ((WAYS[way], torch.float32), (math_attention, torch.float64)):
        leaves = [x.to(dtype).requires_grad_() for x in given]
        out = function(*leaves, dropout=_dropout(21))
        found.append(torch.autograd.grad(out.square().sum(), leaves))
    for mine, exact in zip(*found):
        torch.testing.assert_close(mine.double(), exact, rtol=1e-4, atol=1e-4)


def _gradient(providers: Providers, recompute: Literal["none", "selective"], rope: bool) -> torch.Tensor:
    """Gradient of a layer's attention whose stream has moved on to other samples before the backward pass."""
    model = ModelConfig(
        num_layers=1, hidden_size=24, num_attention_heads=2, vocab_size=50, seq_length=16, attention_dropout=P,
        position_embedding="rope" if rope else "learned",
    )
    stream = _stream()
    build = BuildContext(
        model=model, layout=LayoutConfig(vocab_padding_multiple=1), ctx=ParallelContext.single(),
        providers=providers, step=StepSlot(stream), dtype=torch.float32, options=BuildOptions(recompute=recompute),
    )
    attention = SelfAttention("layers.0", attention_spec(model, 0), build)
    y = torch.randn(16, 2, 2, 3, 12, generator=torch.Generator().manual_seed(1)).requires_grad_()
    packed = attention.providers.packed_attention is not None and not rope
    out = attention.attend_to(*((y,) if packed else attention.split(y)))
    stream.set_micro_batch(STEP + 1, (70, 71))
    (gradient,) = torch.autograd.grad(out, y, torch.ones_like(out))
    return gradient


@pytest.mark.parametrize("provider", ["own", "math"])
@pytest.mark.parametrize("rope", [False, True])
def test_the_masks_of_a_recomputed_layer_are_its_own_samples(provider: Literal["own", "math"], rope: bool) -> None:
    providers = choose_providers(
        BackendConfig(attention=provider), choose_device("cpu"), torch.float32, engine="native", attention_dropout=P
    )
    kept = _gradient(providers, "none", rope)
    assert torch.equal(_gradient(providers, "selective", rope), kept)
    torch.testing.assert_close(kept, _gradient(torch_providers(), "none", rope), rtol=1e-4, atol=1e-5)
    other = dataclasses.replace(providers, attention=_without(providers.attention), packed_attention=None)
    assert not torch.allclose(_gradient(other, "none", rope), kept, atol=1e-3)


def _without(attention: Attention) -> Attention:
    def plain(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool = True,
              dropout: ProbabilityDropout | None = None, mask: AttentionMask | None = None) -> torch.Tensor:
        return attention(q, k, v, causal=causal)

    return plain
