"""Families with layers of experts: what differs from dense ones, by transformers' own classes."""

from __future__ import annotations

import pytest
import torch

from megatron_port.backend.providers import torch_providers
from megatron_port.model.mlp import activate

transformers = pytest.importorskip("transformers")


def test_the_clamped_gate_is_gpt_oss_own() -> None:
    """Values, and gradients within, at and beyond the bounds of gate and input."""
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

    sizes = {"num_local_experts": 1, "hidden_size": 8, "intermediate_size": 64, "num_attention_heads": 1}
    theirs = GptOssExperts(transformers.GptOssConfig(num_hidden_layers=1, **sizes))
    halves = 6 * torch.randn(2, 40, 64, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    halves[:, :, :2] = torch.tensor([7.0, -7.0], dtype=torch.float64)
    assert (halves.abs() > 7).any() and (halves.abs() < 7).any()
    mine, other = torch.cat(tuple(halves), dim=-1).requires_grad_(), halves.clone().requires_grad_()
    ours = activate(mine, "swiglu_clamped", torch_providers())
    out = theirs._apply_gate(other.permute(1, 2, 0).flatten(1))
    assert torch.allclose(ours, out, rtol=1e-15, atol=1e-14)
    ((ours + out) * torch.arange(64).double().sin()).sum().backward()
    assert mine.grad is not None and other.grad is not None
    assert torch.allclose(mine.grad, torch.cat(tuple(other.grad), dim=-1), rtol=1e-14, atol=1e-14)
