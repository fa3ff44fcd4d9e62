"""What a wrong tensor is of the right one: relations made on purpose, on any ranks, are what is said."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megatron_port.core.errors import ConfigError
from megatron_port.tools.foreign.adapter import Shard
from megatron_port.tools.foreign.outputs import first_difference
from megatron_port.tools.foreign.placement import by_content, by_shape, described, ranges, sharded, stated, whole
from megatron_port.tools.foreign.positions import Cell, divisions
from megatron_port.tools.foreign.process import disturbed
from megatron_port.tools.foreign.record import Output, Part, Record, read
from megatron_port.tools.foreign.relations import Wrong, relate

AXES = st.dictionaries(st.sampled_from(["dp", "cp", "tp"]), st.sampled_from([2, 3]), min_size=1, max_size=2)


def drawn(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def ranks_of(axes: dict[str, int]) -> list[dict[str, int]]:
    """The place of each rank on each axis."""
    places = itertools.product(*(range(n) for n in axes.values()))
    return [dict(zip(axes, place, strict=True)) for place in places]


def wrong(axes: dict[str, int], right: Tensor, value: Callable[[dict[str, int], Tensor], Tensor], **more: Any) -> Wrong:
    """A tensor that is sharded over tp, where there is one, and copied over the rest. ``value``: what a rank has, from
    its place and what it should have."""
    parts, bad = {}, []
    for rank, place in enumerate(ranks_of(axes)):
        index = whole(right.shape)
        if "tp" in axes:
            index = sharded(index, Shard(0, place["tp"], axes["tp"]))
        expected = right.flatten()[index]
        parts[rank] = Part(value(place, expected.clone()), index)
        if not torch.equal(parts[rank].value, expected):
            bad.append(rank)
    numbers = {f"the size of {axis}": float(n) for axis, n in axes.items()}
    return Wrong(name="w", right=right, parts=parts, ranks=bad, axes=axes, tolerance=1e-9, floor=0.0, numbers=numbers,
                 **more)


@settings(max_examples=60, deadline=None)
@given(AXES, st.integers(0, 10**6))
def test_a_sum_that_is_missing_is_named_with_its_axis(axes: dict[str, int], seed: int) -> None:
    shared = [axis for axis in axes if axis != "tp"]
    if not shared:
        return
    over, r = random.Random(seed).choice(shared), drawn(seed, 12, 5)

    def addend(place: dict[str, int], expected: Tensor) -> Tensor:
        """Parts by place on the axis that add up, the same for all other places but the shard."""
        noise = [drawn(seed + 1 + i + 100 * place.get("tp", 0), *expected.shape) for i in range(axes[over] - 1)]
        return [*noise, expected - sum(noise)][place[over]]

    found = relate(wrong(axes, r, addend))
    assert found.kind == "not reduced" and found.words.startswith(f"is not summed over {over}:"), found

    found = relate(wrong(axes, r, lambda place, expected: addend(place, expected) * axes[over]))
    assert found.words.startswith(f"is not averaged over {over}:"), found


@settings(max_examples=60, deadline=None)
@given(AXES, st.integers(0, 10**6), st.booleans())
def test_a_factor_is_named_by_the_axis_that_has_its_size(axes: dict[str, int], seed: int, up: bool) -> None:
    over = random.Random(seed).choice(list(axes))
    factor = axes[over] if up else 1 / axes[over]
    found = relate(wrong(axes, drawn(seed, 12, 5), lambda place, expected: expected * factor))
    assert found.kind == "factor" and f"the size of {over}" in found.words, found
    assert f"is {'' if up else '1/'}{axes[over]} (" in found.words
    assert "divided" in found.cause


def test_a_tied_weight_of_the_first_and_the_last_stage_is_not_summed() -> None:
    right, first = drawn(1, 12, 5), drawn(2, 12, 5)
    case = wrong({"pp": 4}, right, lambda place, expected: first if place["pp"] == 0 else right - first)
    case.parts, case.ranks = {stage: case.parts[stage] for stage in (0, 3)}, [0, 3]
    assert relate(case).words == "is not summed over pp: the sum over its ranks is the right one"


SAMPLES, COUNTS = drawn(5, 8, 60), [3, 5, 8, 9, 12, 13, 14, 16]


def weighted(weights: list[float]) -> Tensor:
    return (torch.tensor(weights, dtype=torch.float64)[:, None] * SAMPLES).sum(0).reshape(12, 5)


RIGHT = weighted([n / sum(COUNTS) for n in COUNTS])


@pytest.mark.parametrize(("weights", "words"), [
    ([1 / 8] * 8, "is a mean of means: each 1 samples are divided by their own labels"),
    ([n / sum(COUNTS[i // 2 * 2 : i // 2 * 2 + 2]) / 4 for i, n in enumerate(COUNTS)], "each 2 samples"),
    ([n / sum(COUNTS[i % 4 :: 4]) / 4 for i, n in enumerate(COUNTS)], "each 2 samples"),
    ([n / sum(COUNTS) * (i != 5) for i, n in enumerate(COUNTS)], "leaves out samples 5 of 0-7"),
    ([n / sum(COUNTS) * (1 + (i == 3)) for i, n in enumerate(COUNTS)], "weighs samples differently: sample 3 2 times"),
    ([n / sum(COUNTS) * (2 if i == 3 else i != 4) for i, n in enumerate(COUNTS)],
     "leaves out samples 4 of 0-7, and counts 3 more than once"),
])
def test_weights_of_samples_are_named(weights: list[float], words: str) -> None:
    case = wrong({"dp": 2}, RIGHT, lambda place, expected: weighted(weights), samples=SAMPLES, counts=COUNTS)
    found = relate(case)
    assert found.kind == "samples" and words in found.words, found


def test_each_rank_s_own_samples_are_named() -> None:
    def own(place: dict[str, int], expected: Tensor) -> Tensor:
        mine = range(place["dp"] * 4, place["dp"] * 4 + 4)
        total = sum(COUNTS[i] for i in mine)
        return weighted([COUNTS[i] / total if i in mine else 0.0 for i in range(8)])

    found = relate(wrong({"dp": 2}, RIGHT, own, samples=SAMPLES, counts=COUNTS))
    assert "rank 0 counts samples 0-3; rank 1 counts samples 4-7, divided by their own labels" in found.words, found


LABELS = [3, 4, 1, 2, 4, 4, 2, 1, 1, 3, 4, 4, 2, 1, 3, 1]
CELLS = [Cell(sample, block, LABELS[4 * sample + block]) for sample in range(4) for block in range(4)]
BY_CELL = drawn(6, 16, 60)
"""Gradients of each cell, a mean over its labels."""


OWN = "a mean of means: each cp rank divides by its own number of labels"


def of_labels(over: Callable[[Cell], int]) -> Tensor:
    """The sum over all labels, each over a number of its own."""
    parts = [gradient * cell.labels / over(cell) for cell, gradient in zip(CELLS, BY_CELL, strict=True)]
    return sum(parts, torch.zeros(60, dtype=torch.float64)).reshape(12, 5)


@pytest.mark.parametrize(("held", "samples", "words"), [
    ([(0, 1), (2, 3)], 4, " (rank 0 of cp 0-7; rank 1 of cp 8-15)"),
    ([(0, 3), (1, 2)], 4, " (rank 0 of cp 0-3, 12-15; rank 1 of cp 4-11)"),
    ([(0, 3), (1, 2)], 2, ", 2 samples at a time (rank 0 of cp 0-3, 12-15; rank 1 of cp 4-11)"),
    ([(0, 1), (2, 3)], 1, ", 1 samples at a time (rank 0 of cp 0-7; rank 1 of cp 8-15)"),
])
def test_ranks_that_divide_by_their_own_labels_are_named(held: list[tuple[int, int]], samples: int, words: str) -> None:
    def own(cell: Cell) -> int:
        mine = next(blocks for blocks in held if cell.block in blocks)
        return sum(c.labels for c in CELLS if c.block in mine and c.sample // samples == cell.sample // samples)

    right, shares = of_labels(lambda cell: sum(c.labels for c in CELLS)), 2 * 4 // samples
    for factor, said in ((1.0, "is "), (2.0, "is 2 (the size of cp) times ")):
        made = factor / shares * of_labels(own)
        found = relate(wrong({"cp": 2}, right, lambda place, expected, made=made: made.clone(),  # type: ignore[misc]
                             counts=[1] * 4, by_cell=BY_CELL, cells=CELLS, divisions=list(divisions(2, 16, 4))))
        assert found.kind == "positions" and found.words == said + OWN + words, found
    other = wrong({"cp": 2}, right, lambda place, expected: of_labels(lambda cell: 1 + cell.block),
                  counts=[1] * 4, by_cell=BY_CELL, cells=CELLS, divisions=list(divisions(2, 16, 4)))
    assert relate(other).kind == "unlike"


@pytest.mark.parametrize(("value", "kind", "words"), [
    (lambda e: torch.zeros_like(e), "zero", "is zero"),
    (lambda e: e * math.nan, "not finite", "60 elements"),
    (lambda e: -e, "factor", "-1 times"),
    (lambda e: e.roll(1, 0), "permuted", "shifted by -1 along dimension 0"),
    (lambda e: e[:, [1, 0, 2, 3, 4]], "permuted", "row 0 is that of 1, 2 of 5 moved"),
    (lambda e: torch.cat([e[:3] * 3, e[3:]]), "slices", "0-2 of 12 along dimension 0 is 3 times the right one"),
    (lambda e: torch.cat([e[:, :1] * 0, e[:, 1:]], 1), "slices", "0 of 5 along dimension 1 is zero"),
    (lambda e: e.masked_fill(drawn(3, 12, 5) > 0.5, 0), "masked", "of 60 elements that are zero"),
    (lambda e: e.bfloat16().double(), "rounded", "is rounded to bf16"),
    (lambda e: e.half().double(), "rounded", "is rounded to fp16"),
    (lambda e: e * (1 + 1e-2 * drawn(4, 12, 5)), "imprecise", "bf16"),
    (lambda e: e + drawn(4, 12, 5), "unlike", "cosine"),
])
def test_other_relations_are_named(value: Callable[[Tensor], Tensor], kind: str, words: str) -> None:
    found = relate(wrong({"dp": 2}, drawn(1, 12, 5), lambda place, expected: value(expected)))
    assert found.kind == kind and words in found.words, found


def test_relations_that_need_more_than_one_tensor() -> None:
    right, before = drawn(1, 12, 5), drawn(2, 12, 5)
    stale = wrong({"dp": 2}, right, lambda place, expected: before.clone(), earlier=before)
    assert relate(stale).kind == "stale"
    added = wrong({"dp": 2}, right, lambda place, expected: expected + before, earlier=before)
    assert relate(added).words == "has that of the step before added"
    swapped = wrong({"tp": 2}, right, lambda place, expected: right[6:] if place["tp"] == 0 else right[:6])
    assert "rank 0 has that of rank 1, rank 1 has that of rank 0" in relate(swapped).words
    one = wrong({"dp": 3}, right, lambda place, expected: expected + (place["dp"] == 1) * drawn(9, 12, 5))
    assert relate(one).words == "is right on ranks 0, 2, which hold the same part"
    square = drawn(6, 6, 6)
    assert relate(wrong({"dp": 2}, square, lambda place, expected: expected.T.clone())).words == "is transposed"


@settings(max_examples=80, deadline=None)
@given(st.integers(0, 10**6))
def test_placements_are_found_in_what_was_loaded(seed: int) -> None:
    """Rows and columns in any order, with padding, from their values alone."""
    r = random.Random(seed)
    shape = [r.randint(2, 9) for _ in range(r.randint(1, 3))]
    full = drawn(seed, *shape).float()
    index = whole(shape)
    for dim, size in enumerate(shape):
        pick = r.sample(range(size), r.randint(1, size))
        index = index.index_select(dim, torch.tensor(pick))
    if r.random() < 0.5:
        index = torch.cat([index, torch.full((2, *index.shape[1:]), -1)])
    part = full.flatten()[index.clamp(min=0)].masked_fill(index < 0, 0)
    assert torch.equal(by_content("w", part, full), index)
    assert described(index, shape)


def test_placements_are_found_where_values_occur_twice() -> None:
    full = drawn(1, 2048).bfloat16()
    assert len(full.unique()) < 2048
    assert torch.equal(by_content("w", full[1024:], full), whole((2048,))[1024:])
    matrix = drawn(2, 64, 48).half()
    assert torch.equal(by_content("w", matrix[:, 24:].contiguous(), matrix), whole((64, 48))[:, 24:])
    assert torch.equal(by_content("w", matrix.flatten()[100:200], matrix), whole((3072,))[100:200])
    with pytest.raises(ConfigError, match="values occur twice in it"):
        by_content("w", full[::2], full)


def test_a_placement_that_cannot_be_known_is_refused() -> None:
    part = torch.zeros(4, 6)
    assert torch.equal(by_shape("w", part, (8, 6), {"tp": (1, 2), "dp": (0, 4)}), whole((8, 6))[4:])
    with pytest.raises(ConfigError, match=r"w: this rank has \[4, 6\] of \[8, 6\], which could be .* along dp or tp"):
        by_shape("w", part, (8, 6), {"tp": (1, 2), "dp": (0, 2)})
    with pytest.raises(ConfigError, match="is no equal part along one axis"):
        by_shape("w", part, (9, 6), {"tp": (1, 2)})
    with pytest.raises(ConfigError, match="is not made of rows and columns of the whole"):
        by_content("w", torch.randn(4, 6), torch.randn(8, 6))
    packed = stated(Shard(0, 1, 2, interleaved=3), (12, 1)).flatten().tolist()
    assert packed == [2, 3, 6, 7, 10, 11]
    assert ranges([8, 0, 1, 2, 9, 11]) == "0-2, 8-9, 11"


def test_no_weight_hides_what_is_wrong() -> None:
    """A norm that is left out is seen where its weight is not 1, a bias where it is not 0; and a seed changes all."""
    for name, start in (("norm.weight", torch.ones(32)), ("bias", torch.zeros(32)), ("matrix", torch.zeros(32, 32))):
        found = [disturbed(name, start, seed) for seed in (0, 0, 1)]
        assert torch.equal(found[0], found[1]) and not torch.equal(found[0], found[2])
        assert float((found[0] - start).abs().mean()) > 0.03 and len(found[0].unique()) == found[0].numel()


def outputs(module: str, value: Tensor) -> Output:
    return Output(module, 0, 0, value)


def test_the_first_module_that_differs_is_named() -> None:
    table, hidden = drawn(1, 16, 8), drawn(2, 4, 16, 8)
    reference = [outputs("positions", table), outputs("first", hidden), outputs("second", hidden + 1)]

    def rank(number: int, *found: tuple[str, Tensor]) -> Record:
        return Record(number, outputs=[outputs(*one) for one in found])

    halves = [rank(i, ("positions", table[8 * i : 8 * i + 8]), ("first", hidden[:, 8 * i : 8 * i + 8]),
                   ("second", hidden[:, 8 * i : 8 * i + 8] + 1)) for i in range(2)]
    assert first_difference(reference, halves, 1e-9) is None
    columns = [rank(i, ("first", hidden[..., 4 * i : 4 * i + 4])) for i in range(2)]
    assert first_difference(reference, columns, 1e-9) is None
    partial = [rank(0, ("first", hidden - 3.0)), rank(1, ("first", hidden * 0 + 3.0))]
    assert first_difference(reference, partial, 1e-9) is None
    anew = [halves[0], rank(1, ("positions", table[:8]), ("first", hidden[:, :8]))]
    found = first_difference(reference, anew, 1e-9)
    assert found is not None and found.module == "positions"
    assert "8 of 16 that one process has are on no rank" in found.words
    spoiled = hidden[:, 8:].clone()
    spoiled[1, 2, 5] = math.nan
    found = first_difference(reference, [halves[0], rank(1, ("positions", table[8:]), ("first", spoiled))], 1e-9)
    assert found is not None and found.words == "1 of 32 rows on rank 1 have NaN, the first in row 10, column 5"
    masked = [outputs("mask", hidden.masked_fill(hidden > 0, -math.inf)), *reference]
    assert first_difference(masked, [rank(0, ("mask", hidden), ("first", hidden))], 1e-9) is None
    scaled = [halves[0], rank(1, ("positions", table[8:]), ("first", 2 * hidden[:, 8:]))]
    found = first_difference(reference, scaled, 1e-9)
    assert found is not None and (found.module, found.before) == ("first", "positions")
    assert "64 of 64 rows on rank 1" not in found.words and "2 times such rows" in found.words, found


def test_records_are_read_as_they_were_written(tmp_path: Any) -> None:
    part = Part(drawn(1, 2, 3), whole((2, 3)))
    record = Record(3, losses=[1.5, None], norms=[None, 2.0], gradients=[{"w": part}, {}],
                    absent=[[], ["w"]], weights=[{"w": part}], outputs=[outputs("m", drawn(2, 2, 2))])
    record.write(tmp_path)
    found = read(tmp_path, 3)
    assert (found.losses, found.norms, found.absent) == ([1.5, None], [None, 2.0], [[], ["w"]])
    assert torch.equal(found.gradients[0]["w"].value, part.value) and found.gradients[1] == {}
    assert torch.equal(found.outputs[0].value, record.outputs[0].value)
