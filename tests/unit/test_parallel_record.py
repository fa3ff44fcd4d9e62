"""Records: the slices of all ranks cover the logical tensor exactly, and padding lies behind them."""

from __future__ import annotations

from dataclasses import replace
from math import prod

import pytest
import torch
from contexts import slice_record
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from megatron_port.core.dist.record import InitSpec, ParameterRecord, attach, record_of
from megatron_port.core.engine.module import ScratchBuffer, logical_pieces, read_local, read_range, recorded_parameters

NORMAL = InitSpec("normal", 0.02)
Shape = tuple[int, ...]


@st.composite
def splits(draw: st.DrawFn) -> tuple[tuple[int, ...], int | None, int, int]:
    """(shape, split_dim, tp, padded size of dimension 0 or 0)."""
    shape = draw(st.lists(st.integers(1, 7), min_size=1, max_size=4))
    tp = draw(st.integers(1, 5))
    dim = draw(st.sampled_from([None, *range(len(shape))]))
    if dim is None:
        return tuple(shape), None, tp, 0
    if dim == 0 and draw(st.booleans()):
        multiple = draw(st.integers(1, 4)) * tp
        return tuple(shape), 0, tp, -(-shape[0] // multiple) * multiple
    shape[dim] *= tp
    return tuple(shape), dim, tp, 0


def records(shape: tuple[int, ...], dim: int | None, tp: int, padded: int) -> list[ParameterRecord]:
    return [
        slice_record("w", shape, init=NORMAL, decay=True, split_dim=dim, tp_rank=r, tp_size=tp, padded=padded)
        for r in range(tp)
    ]


@settings(max_examples=150, deadline=None)
@given(splits())
def test_slices_cover_the_logical_tensor_once(case: tuple[tuple[int, ...], int | None, int, int]) -> None:
    shape, dim, tp, padded = case
    logical = torch.arange(1, prod(shape) + 1).view(shape)
    count = torch.zeros(shape, dtype=torch.int64)
    for r in records(*case):
        assert r.shape == shape and r.numel == prod(shape) and r.split_dim == dim
        assert all(0 <= o <= o + e <= n for o, e, n in zip(r.offset, r.extent, shape))
        assert all(e <= size for e, size in zip(r.extent, r.local_shape))
        count[r.box()] += 1
        local = torch.zeros(r.local_shape, dtype=torch.int64)
        view = r.local_view(local)
        assert view.shape == r.extent
        view.copy_(logical[r.box()])
        # A view of the front: the rest of the tensor, the padding, is untouched.
        assert int((local != 0).sum()) == prod(r.extent) and torch.equal(r.local_view(local), logical[r.box()])
    if dim is None:
        assert bool((count == tp).all())
    else:
        assert bool((count == 1).all())
        assert sum(r.local_shape[dim] for r in records(*case)) == (padded or shape[dim])
        assert len({r.local_shape for r in records(*case)}) == 1, "ranks hold tensors of different shapes"


@settings(max_examples=80, deadline=None)
@given(splits(), st.data())
def test_pieces_of_a_flat_buffer_are_the_logical_elements(
    case: tuple[tuple[int, ...], int | None, int, int], data: st.DataObject
) -> None:
    """Any cut of the flattened local tensor (ZeRO's) gives ranges that put the logical tensor together again."""
    shape, dim, _, _ = case
    logical = torch.arange(1.0, prod(shape) + 1).view(shape)
    found = torch.zeros(shape)
    for r in records(*case) if dim is not None else records(*case)[:1]:
        local = torch.zeros(r.local_shape)
        read_local(
            lambda n, k, o, s, out=None: logical[tuple(slice(a, a + b) for a, b in zip(o, s))], r, "weight", local
        )
        flat = local.view(-1)
        cut = data.draw(st.integers(0, flat.numel()))
        box = torch.zeros(prod(r.extent))
        for start, part in ((0, flat[:cut]), (cut, flat[cut:])):
            for piece in logical_pieces(r, "weight", part, start):
                assert (piece.name, piece.kind, piece.global_shape) == ("w", "weight", shape)
                assert (piece.offset, piece.shape) == (r.offset, r.extent)
                box[piece.flat_start : piece.flat_start + piece.tensor.numel()] += piece.tensor
        found[r.box()] += box.view(r.extent)
    assert torch.equal(found, logical)


def test_ranks_without_a_real_row() -> None:
    """A vocabulary of 5 padded to 8 · 4: ranks 1 to 3 hold padding alone."""
    made = records((5, 3), 0, 4, 32)
    assert [r.extent for r in made] == [(5, 3), (0, 3), (0, 3), (0, 3)]
    assert {r.local_shape for r in made} == {(8, 3)}
    assert list(logical_pieces(made[1], "weight", torch.zeros(24), 0)) == []
    out = torch.ones(8, 3)
    read_local(lambda *_, **__: pytest.fail("read nothing"), made[1], "weight", out)
    assert torch.equal(out, torch.zeros(8, 3))


def test_read_local_clears_the_padding() -> None:
    r = records((5, 3), 0, 1, 8)[0]
    out = torch.full((8, 3), 9.0)
    read_local(lambda n, k, offset, extent, out=None: torch.ones(extent), r, "weight", out)
    assert torch.equal(out[:5], torch.ones(5, 3)) and torch.equal(out[5:], torch.zeros(3, 3))


def test_a_range_is_read_to_where_it_stays() -> None:
    """Whole: the reader is offered the very memory. A part: through the scratch. Padding is zero in both."""
    r = records((5, 3), 0, 1, 8)[0]
    logical = torch.arange(1.0, 16.0).view(5, 3)
    offered: list[int] = []

    def read(name: str, kind: str, offset: Shape, shape: Shape, /, *, out: torch.Tensor | None = None) -> torch.Tensor:
        assert out is not None and out.shape == shape and (name, kind) == ("w", "exp_avg")
        offered.append(out.data_ptr())
        return out.copy_(logical)

    scratch = ScratchBuffer(torch.float32)
    whole = torch.full((24,), 9.0)
    read_range(read, r, "exp_avg", whole, 0, scratch)
    part = torch.full((6,), 9.0)
    read_range(read, r, "exp_avg", part, 11, scratch)
    assert torch.equal(whole, torch.cat([logical.view(-1), torch.zeros(9)])) and torch.equal(part, whole[11:17])
    place = scratch.get((8, 3), part.device)
    assert offered == [whole.data_ptr(), place.data_ptr()]
    assert scratch.get((2, 2), part.device).data_ptr() == place.data_ptr()


def test_an_uneven_split_is_a_mistake() -> None:
    with pytest.raises(ValueError, match="w: dimension 1 has 9 elements, not divisible by tp 2"):
        slice_record("w", (4, 9), init=NORMAL, decay=True, split_dim=1, tp_rank=0, tp_size=2)


def test_inner_padding_is_a_mistake() -> None:
    r = slice_record("w", (4, 5), init=NORMAL, decay=True, split_dim=1, tp_size=2, padded=8)
    with pytest.raises(ValueError, match="padding along dimension 1"):
        list(logical_pieces(replace(r, extent=(4, 3)), "weight", torch.zeros(16), 0))


def test_attach_checks_the_shape() -> None:
    r = slice_record("w", (4, 2), init=NORMAL, decay=True)
    parameter = nn.Parameter(torch.zeros(4, 2))
    assert attach(parameter, r) is parameter and record_of(parameter) is r
    with pytest.raises(ValueError, match=r"w: tensor \(2, 4\), record \(4, 2\)"):
        attach(nn.Parameter(torch.zeros(2, 4)), r)
    with pytest.raises(AttributeError, match=r"shape \(3,\) has no ParameterRecord"):
        record_of(nn.Parameter(torch.zeros(3)))


def test_two_parameters_of_one_name_are_a_mistake() -> None:
    module = nn.Module()
    for attribute in ("a", "b"):
        record = slice_record("same", (2,), init=NORMAL, decay=False)
        module.register_parameter(attribute, attach(nn.Parameter(torch.zeros(2)), record))
    with pytest.raises(ValueError, match=r"share a canonical name: \['same'\]"):
        recorded_parameters(module)
