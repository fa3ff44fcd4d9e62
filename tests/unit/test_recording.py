"""What `parity` writes of a rank, read back."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_port.tools.parity.recording import _write, read_recorded
from megatron_port.tools.parity.run_record import RankTrace, Slice


def test_two_slices_of_one_name_are_two(tmp_path: Path) -> None:
    """A rank that shares key/value heads holds its query rows and the shared ones of the same matrix."""
    whole = torch.arange(12.0, dtype=torch.float64).view(6, 2)

    def cut(*ranges: tuple[int, int]) -> list[Slice]:
        return [("qkv.weight", (6, 2), (start, 0), whole[start:stop].clone()) for start, stop in ranges]

    for rank, ranges in enumerate([((0, 1), (2, 6)), ((1, 2),)]):
        info: Any = SimpleNamespace(rank=rank, world_size=2)
        trace = RankTrace([2.0], [1.0], gradients=[cut(*ranges)], weights=cut(*ranges), copies=cut(*ranges))
        _write(trace, info, tmp_path)
    run = read_recorded(tmp_path)
    assert torch.equal(run.gradients[0]["qkv.weight"], whole) and torch.equal(run.weights["qkv.weight"], whole)
    assert run.losses == (2.0,) and run.grad_norms == (pytest.approx(1.0),)
