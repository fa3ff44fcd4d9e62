"""The reorderings that half precision is judged by: the same function, rounded elsewhere."""

from __future__ import annotations

import pytest
from cases import REORDERINGS, make_config, single_run

from megatron_port.train.reorder import Reordering

LLAMA = {"activation": "swiglu", "normalization": "rmsnorm", "add_bias": False, "num_query_groups": 2}


@pytest.mark.parametrize("model", [{}, {**LLAMA, "tie_embeddings": True}], ids=["gpt", "llama"])
@pytest.mark.parametrize("reordering", [REORDERINGS[3], REORDERINGS[6], REORDERINGS[7]], ids=str)
def test_a_reordering_changes_nothing_but_rounding(model: dict, reordering: Reordering) -> None:
    config = make_config(dtype="fp64", model=model)
    plain, other = single_run(config, steps=2), single_run(config, steps=2, order=reordering)
    assert other.losses == pytest.approx(plain.losses, rel=1e-12)
    assert other.grad_norms == pytest.approx(plain.grad_norms, rel=1e-10)
    for name, gradient in plain.gradients[0].items():
        assert float((other.gradients[0][name] - gradient).abs().max()) <= 1e-10 * float(gradient.abs().max()) + 1e-15


def test_sums_are_cut_in_other_places_by_every_seed() -> None:
    """One sample a step and one micro-batch size, so that only the places can differ."""
    config = make_config(dtype="bf16", global_batch_size=2)
    norms = {single_run(config, steps=1, order=Reordering(2, seed, 2)).grad_norms for seed in (1, 2, 3)}
    again = single_run(config, steps=1, order=Reordering(2, 3, 2)).grad_norms
    assert len(norms) == 3 and again in norms
