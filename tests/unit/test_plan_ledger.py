"""The replay of a stage's memory: what a schedule holds and when, apart from bytes; those are in test_plan_ranks.py."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from memory_matrix import BOUND, compared

from megatron_port.core.config.schema import ModelConfig
from megatron_port.core.pipeline.schedules import make_schedule
from megatron_port.ext.pipeline.checks import peak_in_flight
from megatron_port.tools.plan import chunk
from megatron_port.tools.plan.case import Case
from megatron_port.tools.plan.chunk import chunk_bytes
from megatron_port.tools.plan.engines import Engine
from megatron_port.tools.plan.ledger import Moment, occupancy, peak_of, quick_occupancy, steady_count
from megatron_port.tools.plan.operations import Block, Meter, Tape, Value

RECORD = Path(__file__).resolve().parents[2] / "benchmarks" / "results" / "memory-ledger.jsonl"
SCHEDULES = [("gpipe", 1), ("1f1b", 1), ("1f1b", 2), ("1f1b", 3), ("zb-h1", 1), ("zb-v", 2)]


def held(moments: tuple[Moment, ...]) -> int:
    """The most pairs of a micro-batch and a chunk that are held at once."""
    return max(moment.micro_batches for moment in moments)


@pytest.mark.parametrize(("name", "chunks"), SCHEDULES)
@pytest.mark.parametrize(("stages", "count"), [(1, 4), (2, 4), (4, 4), (4, 16)])
def test_micro_batches_in_flight_are_the_schedules(name: str, chunks: int, stages: int, count: int) -> None:
    for stage in range(stages):
        plan = make_schedule(name, stages, count, chunks).plans[stage]
        assert held(occupancy(name, stages, count, chunks, stage)) == peak_in_flight(plan)
        assert held(quick_occupancy(name, stages, count, chunks, stage)) == peak_in_flight(plan)


def fullest(moments: tuple[Moment, ...]) -> int:
    """Return the most that is held, a micro-batch in a chunk being worth ten messages."""
    return max(10 * m.micro_batches + m.inputs + m.messages for m in moments)


def outweighed(moments: tuple[Moment, ...], by: tuple[Moment, ...]) -> bool:
    """Whether each moment of the first has one of the same pass in the second with counts as large."""
    return all(
        any(b.kind is a.kind and b.chunk == a.chunk and all(x <= y for x, y in zip(a.counts(), b.counts())) for b in by)
        for a in moments
    )


@settings(max_examples=40, deadline=None)
@given(
    schedule=st.sampled_from(SCHEDULES[1:]), stages=st.integers(1, 6), groups=st.integers(3, 9), rest=st.integers(0, 5),
)
def test_longer_steps_hold_nothing_more(schedule: tuple[str, int], stages: int, groups: int, rest: int) -> None:
    """After ``STEADY`` groups of p micro-batches the same passes repeat, with as much held."""
    name, chunks = schedule
    count = groups * stages + rest % stages
    short = steady_count(name, stages, count)
    assert short <= 3 * stages + rest % stages
    for stage in range(stages):
        whole, cut = (occupancy(name, stages, n, chunks, stage) for n in (count, short))
        if name == "zb-v":  # its list schedule is not periodic: as many are held, messages differ by one or two
            assert abs(fullest(whole) - fullest(cut)) <= 2
        else:
            assert outweighed(whole, cut)


@pytest.mark.parametrize(("name", "chunks"), SCHEDULES)
def test_the_search_counts_messages_within_three(name: str, chunks: int) -> None:
    for stages in (2, 4, 8):
        for stage in range(stages):
            exact, quick = (fullest(f(name, stages, 2 * stages, chunks, stage)) for f in (occupancy, quick_occupancy))
            assert abs(exact - quick) <= 3


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("splits", [False, True])
def test_layers_that_are_not_run_count_as_if_they_were(
    recompute: str, splits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = ModelConfig(num_layers=9, hidden_size=64, num_attention_heads=4, vocab_size=256, seq_length=32)
    case = Case(model=model, engine=Engine(name="x"), recompute=recompute, kernels="torch", flash=False)
    short = chunk_bytes(case, 0, 9, splits)
    monkeypatch.setattr(chunk, "ALIKE", 9)
    chunk._run.cache_clear()
    assert short == chunk_bytes(case, 0, 9, splits)
    chunk._run.cache_clear()


def test_a_schedule_with_split_backward_passes_holds_what_weight_products_read() -> None:
    model = ModelConfig(num_layers=8, hidden_size=64, num_attention_heads=4, vocab_size=256, seq_length=32)
    case = Case(model=model, engine=Engine(name="x"), pp=4, micro_batches=8, schedule="zb-h1")
    split = chunk_bytes(case, 2, 4, True)
    assert chunk_bytes(case, 2, 4, False).deferred == 0.0
    # Of each layer: the inputs of its four products and the gradients of their outputs; two of those are the stream's.
    tokens, h, f = 32, 64, model.ffn_size
    inputs = tokens * (h + h + h + f) * 2
    gradients = tokens * (3 * h + h + f + h) * 2
    assert split.deferred == 2 * (inputs + gradients)
    assert peak_of(case, 3).in_flight > peak_of(replace(case, schedule="1f1b"), 3).in_flight


def test_blocks_count_until_nothing_refers_to_them() -> None:
    meter = Meter()
    tape = Tape(meter)
    x = Value(Block(meter, 8.0))
    y = tape.note(tape.block(4.0), [x], lambda grad, saved: [tape.block(8.0)], [x.block])
    assert (meter.now, meter.peak) == (12.0, 12.0)
    tape.seed(y, Block(meter, 4.0))
    del x, y
    assert meter.now == 12.0  # what is saved, and the gradient
    meter.mark()
    tape.run()
    assert (meter.now, meter.peak) == (8.0, 20.0)


def test_the_recorded_peaks_are_planned_within_two_per_cent() -> None:
    """benchmarks/results/memory-ledger.jsonl: peaks of real ranks, planned again here. All schedules and policies."""
    rows = [json.loads(line) for line in RECORD.read_text().splitlines()]
    assert len(rows) >= 300
    variety = {"schedule": 4, "vp": 3, "m": 5, "recompute": 3, "zero": 4, "family": 7, "dtype": 3, "sp": 2, "stage": 4}
    assert {name: len({row[name] for row in rows}) for name in variety} == variety
    for row in rows:
        again = compared(row["number"], {key: row[key] for key in ("measured", "padding")})
        assert abs(again["off"]) <= BOUND, again
