"""A wrong gradient norm of another trainer is named by what it counts otherwise."""

from __future__ import annotations

import math

import pytest
import torch

from megatron_port.tools.foreign.norms import of_norm, written
from megatron_port.tools.foreign.record import Part

AXES = {"pp": 2, "tp": 2}
WHOLE = torch.arange(4)


def part(values: list[float], index: torch.Tensor) -> Part:
    return Part(torch.tensor(values, dtype=torch.float64), index)


def ranks() -> list[dict[str, Part]]:
    """Of pp 2 and tp 2: a divided weight and a norm that both have, in each stage."""
    return [
        {f"layers.{stage}.weight": part([1.0 + stage + 2 * tp, 3.0 + tp], WHOLE[2 * tp :][:2]),
         f"layers.{stage}.norm": part([5.0, 0.5 + stage], WHOLE[:2])}
        for stage in range(2) for tp in range(2)
    ]


def squares(*parts: Part) -> float:
    return sum(float(p.value.square().sum()) for p in parts)


TABLES = ranks()
WEIGHTS = [table[f"layers.{rank // 2}.weight"] for rank, table in enumerate(TABLES)]
NORMS = [TABLES[0]["layers.0.norm"], TABLES[2]["layers.1.norm"]]
RIGHT = squares(*WEIGHTS, *NORMS)


@pytest.mark.parametrize(("total", "words"), [
    (squares(*WEIGHTS[:2], NORMS[0]), "it is not summed over pp"),
    (squares(WEIGHTS[0], WEIGHTS[2], *NORMS), "it is not summed over tp"),
    (squares(WEIGHTS[0], NORMS[0]), "it is that of this rank's tensors alone"),
    (squares(*WEIGHTS, *NORMS, *NORMS), "it is that of all ranks' tensors, copies counted"),
    (squares(*WEIGHTS), "layers.*.norm is not counted"),
    (squares(*WEIGHTS, *NORMS) + 3 * squares(*NORMS), "layers.*.norm is counted 4 times"),
    (1.7 * RIGHT, ""),
])
def test_what_a_norm_counts_is_named(total: float, words: str) -> None:
    _, found, cause = of_norm(math.sqrt(total), math.sqrt(RIGHT), TABLES, 0, AXES, 1e-9)
    assert found == words
    assert bool(cause) == bool(words)


def test_numbers_that_differ_late_are_written_so() -> None:
    assert written(1.5, 1.0) == "is 1.5, the right one 1"
    assert written(1.48509697, 1.48510104) == "is 1.48509697, the right one 1.48510104"
