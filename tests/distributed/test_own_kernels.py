"""A whole model on the own kernels in half precision is as near to the exact gradients as one on torch's ops.

Single operations are held to this in tests/kernels; layouts, with the kernels on, to one process with the kernels on.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from cases import make_config, single_run

MODELS: dict[str, dict[str, Any]] = {
    "gpt": {"tie_embeddings": True},
    "llama": {"tie_embeddings": False, "num_query_groups": 2, "position_embedding": "rope", "normalization": "rmsnorm",
              "activation": "swiglu", "add_bias": False},
}


LATENT = {**MODELS["llama"], "num_query_groups": 0, "num_layers": 1, "kv_lora_rank": 12, "head_dim": 12,
          "qk_rope_head_dim": 4, "v_head_dim": 6, "rope_pattern": ("none",)}
"""No rotation: own attention takes the packed projection, whose values are padded to the size of a key."""


def gradients(model: dict, dtype: str, own: str) -> torch.Tensor:
    """All gradients of the first step, flat."""
    config = make_config(dtype=dtype, model={**model, "hidden_dropout": 0.1}, own_kernels=own)
    config = dataclasses.replace(config, precision=dataclasses.replace(config.precision, initial_loss_scale=1.0))
    run = single_run(config, steps=1)
    return torch.cat([run.gradients[0][name].double().flatten() for name in sorted(run.gradients[0])])


def test_latents_without_rotation_are_those_of_torchs_ops() -> None:
    own, eager = (gradients(LATENT, "fp32", k) for k in ("on", "off"))
    assert float((own - eager).norm() / eager.norm()) <= 1e-5


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("name", MODELS)
def test_own_kernels_are_no_further_from_the_exact_gradients(name: str, dtype: str) -> None:
    exact = gradients(MODELS[name], "fp64", "off")
    own, eager = (float((gradients(MODELS[name], dtype, k) - exact).norm() / exact.norm()) for k in ("on", "off"))
    assert 0.0 < own <= 1.1 * eager, f"{own:.3g} of the exact gradients' norm, torch's ops {eager:.3g}"
