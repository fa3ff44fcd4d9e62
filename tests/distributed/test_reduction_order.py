"""The orders of sums that half precision is judged by: the same function, rounded elsewhere."""

from __future__ import annotations

import dataclasses

import pytest
from cases import REORDERINGS, Order, RoundingEmulation, make_config, single_run

from megatron_port.core.config.schema import QuantisationConfig
from megatron_port.tools.parity.emulation import Reordering

GPT = {"tie_embeddings": True, "hidden_dropout": 0.1, "shared_layers": 2}
LLAMA = {"activation": "swiglu", "normalization": "rmsnorm", "add_bias": False, "num_query_groups": 2,
         "position_embedding": "rope"}
FACTORED = {**LLAMA, "tie_embeddings": True, "qkv_rank": 8, "output_rank": 8, "up_rank": 8, "down_rank": 8}
"""With weights of few bits."""
ORDERS: list[Order] = [
    REORDERINGS[3], REORDERINGS[6], REORDERINGS[7],
    RoundingEmulation(2, 8, sequence_parallel=True),
    RoundingEmulation(4, 16, rounded_weight_gradients=True),  # 16, 16, 16 and 5 of 53 ids
    RoundingEmulation(rounded_weight_gradients=True, tied_in_the_dtype=True),
]


MODELS: dict[str, dict] = {"untied": {}, "gpt": GPT, "llama": LLAMA, "factored": FACTORED}


@pytest.mark.parametrize(("name", "number"), [
    pytest.param(name, i, marks=() if i % 2 == place % 2 or name == "gpt" else pytest.mark.slow, id=f"{name}-{order}")
    for place, name in enumerate(MODELS) for i, order in enumerate(ORDERS)
])
def test_an_order_changes_nothing_but_rounding(name: str, number: int) -> None:
    model, order = MODELS[name], ORDERS[number]
    config = make_config(dtype="fp64", model=model)
    if model is FACTORED:
        config = dataclasses.replace(config, quantisation=QuantisationConfig(weights="int4", group_size=4))
    plain, other = single_run(config, steps=2), single_run(config, steps=2, order=order)
    assert other.losses == pytest.approx(plain.losses, rel=1e-12)
    assert other.grad_norms == pytest.approx(plain.grad_norms, rel=1e-10)
    for key, gradient in plain.gradients[0].items():
        assert float((other.gradients[0][key] - gradient).abs().max()) <= 1e-10 * float(gradient.abs().max()) + 1e-15


def test_sums_are_cut_in_other_places_by_every_seed() -> None:
    """One sample a step and one micro-batch size, so that only the places can differ."""
    config = make_config(dtype="bf16", global_batch_size=2)
    norms = {single_run(config, steps=1, order=Reordering(2, seed, 2)).grad_norms for seed in (1, 2, 3)}
    again = single_run(config, steps=1, order=Reordering(2, 3, 2)).grad_norms
    assert len(norms) == 3 and again in norms
