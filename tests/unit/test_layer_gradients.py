"""A layer with own kernels has the gradients of torch's ops in fp64, whatever its norm, dropout and residual."""

from __future__ import annotations

from typing import Any, Literal

import pytest
import torch

from megatron_port.core.config.schema import BackendConfig, LayoutConfig, ModelConfig
from megatron_port.core.dist.groups import ParallelContext
from megatron_port.core.layers.dropout import DropoutStream
from megatron_port.core.layers.providers import Providers, torch_providers
from megatron_port.core.layers.step import StepSlot
from megatron_port.core.model.build import BuildContext
from megatron_port.core.model.decoder_spec import model_spec
from megatron_port.core.model.layers import TransformerLayer
from megatron_port.ext.kernels import kernels
from megatron_port.ext.kernels.choose import choose_providers
from megatron_port.run.device import choose_device

SEQ, BATCH, HIDDEN = 12, 3, 24
MODELS: dict[str, dict[str, Any]] = {
    "gpt": {}, "dropout": {"hidden_dropout": 0.3}, "parallel residual": {"parallel_residual": True},
    "rms, dropout": {"normalization": "rmsnorm", "activation": "swiglu", "add_bias": False, "hidden_dropout": 0.3},
}


def _gradients(name: str, providers: Providers, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Output, gradient of the input and of every parameter in fp64."""
    model = ModelConfig(
        num_layers=1, hidden_size=HIDDEN, num_attention_heads=2, vocab_size=50, seq_length=SEQ, attention_dropout=0.0,
        **{"hidden_dropout": 0.0, **MODELS[name]},
    )
    stream = DropoutStream(3, torch.device("cpu"))
    stream.set_micro_batch(7, tuple(range(40, 40 + BATCH)))
    build = BuildContext(
        model=model, layout=LayoutConfig(vocab_padding_multiple=1), ctx=ParallelContext.single(), providers=providers,
        step=StepSlot(stream), dtype=dtype,
    )
    layer = TransformerLayer(0, model_spec(model).layers[0], build)
    draw = torch.Generator().manual_seed(1)
    make = lambda *shape: torch.randn(*shape, generator=draw)  # noqa: E731
    for parameter in layer.parameters():
        parameter.data.copy_(0.3 * make(*parameter.shape) + (1.0 if parameter.ndim == 1 else 0.0))
    x = make(SEQ, BATCH, HIDDEN).to(dtype).requires_grad_()
    out = layer(x)
    out.backward(make(SEQ, BATCH, HIDDEN).to(dtype))
    found = {name: p.grad for name, p in layer.named_parameters()} | {"input": x.grad, "output": out.detach()}
    return {name: t.double() for name, t in found.items() if t is not None}


@pytest.mark.parametrize("attention", ["own", "sdpa"])
@pytest.mark.parametrize("name", MODELS)
def test_gradients_are_those_of_torch_in_fp64(name: str, attention: Literal["own", "sdpa"]) -> None:
    if problem := kernels.kernels_status("cpu")[1]:
        pytest.skip(problem)
    own = choose_providers(
        BackendConfig(own_kernels="on", attention=attention), choose_device("cpu"), torch.float32, engine="native"
    )
    assert own.bias_dropout_add_norm is not None
    wanted, found = _gradients(name, torch_providers(), torch.float64), _gradients(name, own, torch.float32)
    assert wanted.keys() == found.keys() and len(found) >= 8
    for key, exact in wanted.items():
        # Key biases have a zero gradient in exact arithmetic, so the scale is that of all.
        scale = exact.square().mean().sqrt() + 1e-3
        assert float((found[key] - exact).abs().max() / scale) < 2e-5, key
