"""The channel between engine and model: sums that count a micro-batch once, and who may be named."""

from __future__ import annotations

import pytest
import torch

from megatron_port.core.data.batch import MicroBatch
from megatron_port.core.layers.dropout import DropoutStream
from megatron_port.core.layers.step import AuxiliarySums, StepShared, StepSlot
from megatron_port.ext.memory.recompute import recompute

CPU = torch.device("cpu")


def test_a_recomputed_pass_adds_nothing_and_sees_the_same_micro_batch() -> None:
    slot, sums = StepSlot(DropoutStream(1, CPU)), AuxiliarySums(["a", "b"], CPU)
    bounds = torch.tensor([[0, 3]], dtype=torch.int32)
    seen = []

    def layer(x: torch.Tensor) -> torch.Tensor:
        now = slot.current
        assert now is not None
        told = now.loss_factor, now.global_tokens, now.document_starts is bounds
        seen.append((now.sample_ids, now.recomputing, *told))
        keys.append(now.samples.keys)
        now.add_auxiliary("b", x.sum())
        return x.sin()

    keys: list[torch.Tensor] = []
    x = torch.full((2,), 1.5, requires_grad=True)
    slot.announce(3, (7,), StepShared(loss_factor=0.25, global_tokens=4.0, auxiliary=sums), document_starts=bounds)
    y = recompute(layer, x, step=slot)
    slot.announce(3, (8,), StepShared(auxiliary=sums))
    y.sum().backward()
    assert seen == [((7,), False, 0.25, 4.0, True), ((7,), True, 0.25, 4.0, True)]
    assert keys[0] is keys[1], "the keys were copied to the device a second time"
    assert slot.current is not None and slot.current.sample_ids == (8,) and not slot.current.recomputing
    assert sums.values.tolist() == [0.0, 3.0] and sums.values.dtype == torch.float64
    sums.reset()
    assert sums.values.tolist() == [0.0, 0.0]


def test_a_sum_that_nobody_reads_is_not_made_and_one_without_a_name_is_refused() -> None:
    slot = StepSlot(DropoutStream(1, CPU))
    slot.announce(0, (1,))
    assert slot.current is not None
    slot.current.add_auxiliary("a", torch.ones(()))
    slot.announce(0, (1,), StepShared(auxiliary=AuxiliarySums(["a"], CPU)))
    with pytest.raises(ValueError, match=r"named 'b'; the model has \['a'\]"):
        slot.current.add_auxiliary("b", torch.ones(()))


def test_a_micro_batch_is_masked_where_the_mask_is_and_where_it_is_told() -> None:
    assert not MicroBatch((0,)).masked
    assert MicroBatch((0,), labels_masked=True).masked and MicroBatch((0,), loss_mask=torch.ones(1, 4)).masked
