"""The bias of the fused projection, whose gradient the split gives where its kernel packs the others."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from megatron_port.core.config.schema import BackendConfig, LayoutConfig, ModelConfig
from megatron_port.core.dist.groups import ParallelContext
from megatron_port.core.layers.dropout import DropoutStream
from megatron_port.core.layers.providers import Providers, torch_providers
from megatron_port.core.layers.step import StepSlot
from megatron_port.core.model.attention import SelfAttention
from megatron_port.core.model.build import BuildContext
from megatron_port.core.model.decoder_spec import attention_spec
from megatron_port.ext.kernels import kernels
from megatron_port.ext.kernels.choose import choose_providers
from megatron_port.run.device import choose_device


def _gradients(providers: Providers, **options: Any) -> dict[str, torch.Tensor]:
    """Gradients of the input and of every parameter of one layer's attention."""
    model = ModelConfig(num_layers=1, hidden_size=24, num_attention_heads=4, vocab_size=50, seq_length=16, **options)
    build = BuildContext(
        model=model, layout=LayoutConfig(vocab_padding_multiple=1), ctx=ParallelContext.single(),
        providers=providers, step=StepSlot(DropoutStream(5, torch.device("cpu"))), dtype=torch.float32,
    )
    attention = SelfAttention("layers.0", attention_spec(model, 0), build)
    draw = torch.Generator().manual_seed(1)
    for parameter in attention.parameters():
        parameter.data.copy_(0.2 * torch.randn(parameter.shape, generator=draw))
    x = torch.randn(16, 2, 24, generator=draw).requires_grad_()
    (attention(x) * torch.randn(16, 2, 24, generator=draw)).sum().backward()
    wanted = [("x", x), *((name, p) for name, p in attention.named_parameters() if name != "output.bias")]
    return {name: t.grad for name, t in wanted if t.grad is not None}


@pytest.mark.parametrize("options, by_split", [
    ({}, True), ({"num_query_groups": 2}, True), ({"position_embedding": "rope"}, False), ({"qk_norm": True}, False),
])
def test_it_is_the_linear_layers(options: dict[str, Any], by_split: bool) -> None:
    if problem := kernels.kernels_status("cpu")[1]:
        pytest.skip(problem)
    chosen = choose_providers(BackendConfig(attention="sdpa"), choose_device("cpu"), torch.float32, engine="native")
    split, calls = chosen.split_bias, []
    assert split is not None and chosen.packed_attention is None

    def counted(qkv: torch.Tensor, bias: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        calls.append(bias.shape)
        return split(qkv, bias)

    found = _gradients(dataclasses.replace(chosen, split_bias=counted), **options)
    assert len(calls) == by_split
    for other in (dataclasses.replace(chosen, split_bias=None), torch_providers()):
        torch.testing.assert_close(found, _gradients(other, **options), rtol=1e-4, atol=1e-4)
