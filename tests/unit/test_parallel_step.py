"""The channel between engine and model: sums that count a micro-batch once, and who may be named."""

from __future__ import annotations

import pytest
import torch

from megatron_port.data.batch import MicroBatch
from megatron_port.model.recompute import recompute
from megatron_port.parallel.random import DropoutStream
from megatron_port.parallel.step import AuxiliarySums

CPU = torch.device("cpu")


def test_a_recomputed_pass_adds_nothing_and_sees_the_same_micro_batch() -> None:
    stream, sums = DropoutStream(1, CPU), AuxiliarySums(["a", "b"], CPU)
    bounds = torch.tensor([[0, 3]], dtype=torch.int32)
    seen = []

    def layer(x: torch.Tensor) -> torch.Tensor:
        now = stream.current
        assert now is not None
        told = now.loss_factor, now.global_tokens, now.document_starts is bounds
        seen.append((now.sample_ids, now.recomputing, *told))
        keys.append(now.samples.keys)
        now.add_auxiliary("b", x.sum())
        return x.sin()

    keys: list[torch.Tensor] = []
    x = torch.full((2,), 1.5, requires_grad=True)
    stream.set_micro_batch(3, (7,), loss_factor=0.25, global_tokens=4.0, document_starts=bounds, auxiliary=sums)
    y = recompute(layer, x, stream=stream)
    stream.set_micro_batch(3, (8,), auxiliary=sums)
    y.sum().backward()
    assert seen == [((7,), False, 0.25, 4.0, True), ((7,), True, 0.25, 4.0, True)]
    assert keys[0] is keys[1], "the keys were copied to the device a second time"
    assert stream.current is not None and stream.current.sample_ids == (8,) and not stream.current.recomputing
    assert sums.values.tolist() == [0.0, 3.0] and sums.values.dtype == torch.float64
    sums.reset()
    assert sums.values.tolist() == [0.0, 0.0]


def test_a_sum_that_nobody_reads_is_not_made_and_one_without_a_name_is_refused() -> None:
    stream = DropoutStream(1, CPU)
    stream.set_micro_batch(0, (1,))
    assert stream.current is not None
    stream.current.add_auxiliary("a", torch.ones(()))
    stream.set_micro_batch(0, (1,), auxiliary=AuxiliarySums(["a"], CPU))
    with pytest.raises(ValueError, match=r"named 'b'; the model has \['a'\]"):
        stream.current.add_auxiliary("b", torch.ones(()))


def test_a_micro_batch_is_masked_where_the_mask_is_and_where_it_is_told() -> None:
    assert not MicroBatch((0,)).masked
    assert MicroBatch((0,), labels_masked=True).masked and MicroBatch((0,), loss_mask=torch.ones(1, 4)).masked
