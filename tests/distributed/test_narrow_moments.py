"""AdamW with moments in bf16 and in 8 bits: layouts train as one process, and state moves between them by bits."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from cases import LR, make_batches, make_config, providers_of, run_cases, single_run
from pool import RankPool

from megatron_port.core.config.schema import RunConfig
from megatron_port.core.dist.groups import ParallelContext
from megatron_port.core.dist.mesh import Topology
from megatron_port.core.dist.record import StatePiece, StateReader
from megatron_port.run.build import build_engine
from megatron_port.tools.parity.comparison import FP64, Run, compare

STEPS = 4
RULES = ("adamw-bf16", "adamw-8bit")
MODEL: dict[str, Any] = {
    "num_layers": 2, "hidden_size": 128, "num_attention_heads": 4, "num_query_groups": 2, "head_dim": 64,
    "ffn_hidden_size": 256, "activation": "swiglu", "tie_embeddings": True,
}
LAYOUTS: tuple[tuple[Topology, dict[str, Any]], ...] = (
    (Topology(tp=2, pp=2), {"zero_stage": 0, "sequence_parallel": True, "vocab_padding_multiple": 8}),
    (Topology(tp=2, dp=2), {"zero_stage": 2, "vocab_padding_multiple": 8}),
    (Topology(dp=4), {"zero_stage": 3}),
)
State = dict[tuple[str, str], torch.Tensor]


def config_of(rule: str, layout: dict[str, Any] | None = None) -> RunConfig:
    config = make_config(dtype="fp64", model=MODEL, layout=layout, micro_batch_size=1, global_batch_size=4)
    return dataclasses.replace(config, optimizer=dataclasses.replace(config.optimizer, name=rule))


@pytest.mark.parametrize("rule", [
    pytest.param(r, marks=pytest.mark.slow) if r == "adamw-bf16" else r for r in RULES
])
def test_a_layout_changes_nothing(ranks: RankPool, rule: str) -> None:
    configs = [config_of(rule, dict(layout)) for _, layout in LAYOUTS]
    cases = [(config, topology, STEPS, 1) for config, (topology, _) in zip(configs, LAYOUTS)]
    results = ranks.run(4, run_cases, cases, timeout=240.0)
    alone = single_run(config_of(rule), steps=STEPS)
    for number, config in enumerate(configs):
        found = compare(alone, Run.of([r[number] for r in results]), FP64, config.model, lr=LR)
        assert found and not [str(d) for d in found if not d.ok], LAYOUTS[number]


def assembled(pieces: Iterable[StatePiece]) -> State:
    """Whole tensors of pieces that cover each element once."""
    out: State = {}
    counts: dict[tuple[str, str], int] = {}
    for p in pieces:
        whole = out.setdefault((p.name, p.kind), torch.zeros(p.global_shape, dtype=p.tensor.dtype))
        places = torch.arange(math.prod(p.global_shape)).view(p.global_shape)
        for d, (start, size) in enumerate(zip(p.offset, p.shape)):
            places = places.narrow(d, start, size)
        whole.view(-1)[places.flatten()[p.flat_start : p.flat_start + p.tensor.numel()]] = p.tensor
        counts[p.name, p.kind] = counts.get((p.name, p.kind), 0) + p.tensor.numel()
    assert all(counts[key] == whole.numel() for key, whole in out.items())
    return out


def reader(state: State) -> StateReader:
    def read(
        name: str, kind: str, offset: tuple[int, ...], shape: tuple[int, ...], /, *, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        found = state[name, kind]
        for d, (start, size) in enumerate(zip(offset, shape)):
            found = found.narrow(d, start, size)
        return found

    return read


def moved(
    config: RunConfig, topology: Topology, steps: int, given: tuple[State, dict[str, Any]] | None
) -> tuple[list[StatePiece], dict[str, Any]]:
    """Load a state on this rank, or begin, take steps, and return this rank's pieces."""
    ctx = ParallelContext.create(topology, "cpu")
    try:
        engine = build_engine(config, ctx, providers_of(config), initialise=given is None)
        if given is not None:
            engine.load_state(reader(given[0]), given[1])
        batches = make_batches(config, ctx)
        for step in range(steps):
            engine.train_step(batches(step), step=step, lr=LR)
        pieces = [dataclasses.replace(p, tensor=p.tensor.detach().clone()) for p in engine.state_pieces()]
        return pieces, engine.scalar_state()
    finally:
        ctx.close()


@pytest.mark.parametrize("rule", RULES)
def test_state_moves_between_layouts_by_bits(ranks: RankPool, rule: str) -> None:
    found = moved(config_of(rule), Topology(), 2, None)
    state, scalars = assembled(found[0]), found[1]
    codes = [key for key in state if key[1].endswith("_codes")]
    assert bool(codes) is (rule == "adamw-8bit") and all(state[key].any() for key in codes)
    for topology, layout in LAYOUTS:
        results = ranks.run(4, moved, config_of(rule, dict(layout)), topology, 0, (state, scalars), timeout=120.0)
        again = assembled(p for pieces, _ in results for p in pieces)
        assert again.keys() == state.keys()
        different = [key for key, whole in state.items() if not torch.equal(again[key], whole)]
        assert not different, (topology, different)
        state = again
