"""Every optimizer rule gives, on any layout, the run of one process: losses, norms and every gradient by name."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cases import make_config, run_case, run_cases, single_run
from drawing_rules import RATES
from pool import RankPool

from megatron_port.core.config.optimizer import AdafactorOptions, AdagradOptions
from megatron_port.core.config.schema import MoEConfig, OptimizerConfig, RunConfig
from megatron_port.core.dist.groups import ParallelContext
from megatron_port.core.dist.mesh import Topology
from megatron_port.core.dist.record import InitSpec, ParameterRecord, Shard, StatePiece, attach, make_record
from megatron_port.core.engine.native_state import load_state, state_pieces
from megatron_port.core.engine.native_update import make_update
from megatron_port.core.model.attention import rank_rows
from megatron_port.core.model.spec import Groups
from megatron_port.core.optim.rules import StepNumbers, StepValues, rule_of
from megatron_port.core.optim.sharded import ShardedParameters, ShardSettings
from megatron_port.tools.parity.comparison import FP64, Run, compare
from megatron_port.tools.plan.case import case_of
from megatron_port.tools.plan.step import matrix_bytes

STEPS = 3
SHAPES = {
    "layers.0.attention.qkv.weight": (24, 10), "layers.0.mlp.up.weight": (2, 8, 10),
    "layers.0.mlp.down.weight": (10, 8), "layers.0.mlp.up.bias": (2, 8),
    "final_norm.weight": (10,), "embedding.tokens.weight": (13, 10),
}
"""Of the parameters that are updated without a model."""
LLAMA: dict[str, Any] = {
    "position_embedding": "rope", "normalization": "rmsnorm", "activation": "swiglu", "add_bias": False,
    "num_query_groups": 2, "num_attention_heads": 4, "hidden_size": 32, "ffn_hidden_size": 40,
}
TIED: dict[str, Any] = {"tie_embeddings": True}
ONE_HEAD: dict[str, Any] = {**LLAMA, "num_query_groups": 1, "qk_norm": True, "qk_norm_over": "projection"}
"""Norms of keys of which every tensor-parallel rank has all."""
EXPERTS: dict[str, Any] = {
    **LLAMA, "moe": MoEConfig(num_experts=4, top_k=2, ffn_hidden_size=24, balance_loss="sequence"),
}
LAYOUTS: dict[str, tuple[dict[str, Any], Topology, dict[str, Any]]] = {
    "zero1-tp2-sp": (LLAMA, Topology(tp=2, dp=2), {"zero_stage": 1, "sequence_parallel": True}),
    "zero3-dp4": (LLAMA, Topology(dp=4), {"zero_stage": 3}),
    "zero2-pp2-tied-padded": (TIED, Topology(pp=2, dp=2), {"zero_stage": 2, "vocab_padding_multiple": 16}),
    "zero0-tp4-kv-copies": (LLAMA, Topology(tp=4), {"zero_stage": 0, "vocab_padding_multiple": 16}),
    "hybrid-dp4": ({}, Topology(dp=4), {"zero_stage": 1, "shard_size": 2}),
    "cp2-tp2": (LLAMA, Topology(tp=2, cp=2), {"zero_stage": 1, "context_parallel_size": 2}),
    "ep2-tp2-dp2": (EXPERTS, Topology(tp=2, dp=2, ep=2), {"zero_stage": 1, "expert_parallel_size": 2}),
    "zero1-tp2-one-head": (ONE_HEAD, Topology(tp=2), {"zero_stage": 1}),
    "zb-pp2-tp2": (TIED, Topology(tp=2, pp=2), {"zero_stage": 1, "pipeline_schedule": "zb-h1"}),
}
RULES = tuple(RATES)
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "adafactor, averaged": ("adafactor", {"adafactor": AdafactorOptions(momentum=0.9, relative=False)}),
    "adagrad, averaged": ("adagrad", {"adagrad": AdagradOptions(momentum=0.9, initial_accumulator=0.1)}),
}
"""Rules with options that add state: the name of the rule, and its options."""


def config_of(rule: str, model: dict[str, Any], layout: dict[str, Any], topology: Topology) -> RunConfig:
    """A run of one rule in fp64."""
    sizes = {"tensor_parallel_size": topology.tp, "pipeline_parallel_size": topology.pp,
             "data_parallel_size": topology.dp}
    config = make_config(dtype="fp64", model=model, layout={**sizes, **layout})
    name, options = VARIANTS.get(rule, (rule, {}))
    optimizer: OptimizerConfig = dataclasses.replace(
        config.optimizer, name=name, lr=config.optimizer.lr * RATES[name], beta2=0.9, **options,
    )
    return dataclasses.replace(config, optimizer=optimizer)


@functools.lru_cache(maxsize=64)
def reference(config: RunConfig) -> Run:
    return single_run(config, steps=STEPS)


PAIRS = {
    "zero1-tp2-sp": ("adafactor", "muon"), "zero3-dp4": ("came", "sgd"), "zero2-pp2-tied-padded": ("lamb",),
    "zero0-tp4-kv-copies": ("muon",), "hybrid-dp4": ("sm3",), "cp2-tp2": ("lion",),
    "ep2-tp2-dp2": ("muon", "adafactor, averaged"), "zb-pp2-tp2": ("adagrad, averaged",),
    "zero1-tp2-one-head": ("came",),
}
"""What the suite runs of each layout; all of them: ``python tests/distributed/rules_matrix.py``."""


QUICK = ("zero1-tp2-sp", "zero3-dp4", "zero2-pp2-tied-padded", "ep2-tp2-dp2", "zb-pp2-tp2")
"""Between them every axis and ZeRO stage; the fuzz draws rules too."""


@pytest.mark.parametrize("name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in PAIRS])
def test_a_layout_changes_nothing(ranks: RankPool, name: str) -> None:
    model, topology, layout = LAYOUTS[name]
    configs = [config_of(rule, model, layout, topology) for rule in PAIRS[name]]
    cases = [(config, topology, STEPS, 1) for config in configs]
    traces = ranks.run(topology.world_size, run_cases, cases, timeout=240.0)
    for i, config in enumerate(configs):
        found = compare(reference(config), Run.of([trace[i] for trace in traces]), FP64, config.model,
                        lr=config.optimizer.lr)
        assert not [str(d) for d in found if not d.ok], config.optimizer.name


State = dict[tuple[str, str], torch.Tensor]


def parts(ctx: ParallelContext) -> list[ParameterRecord]:
    """The records of this rank's slices; on four tensor-parallel ranks two share each key and value."""
    tp = ctx.size("tp")
    split = {"up": 1, "down": 1, "qkv": 0, "embedding": 0}
    out = []
    for name, shape in SHAPES.items():
        dim = next((d for key, d in split.items() if key in name), None)
        more: dict[str, Any] = {"row_runs": (6, 3, 3)} if "qkv" in name else {}
        if "qkv" in name and tp > 2:
            own, shared = rank_rows(Groups(heads=4, groups=2, head_size=3), tp, ctx.index("tp"))
            for rows in (own, shared):
                p = rows.parameter(name, shape, InitSpec("zeros"), torch.float64, ctx.device, more["row_runs"])
                out.append(p.record)  # type: ignore[attr-defined]
            continue
        more |= {"padded": 16} if "embedding" in name else {}
        shards = () if dim is None else (Shard(dim, ("tp",)),)
        decays = "bias" not in name and "norm" not in name
        out.append(make_record(name, shape, ctx, init=InitSpec("zeros"), decay=decays, shards=shards, **more))
    return out


def updated(
    topology: Topology, configs: Sequence[OptimizerConfig], split_state: bool, before: Sequence[State] = (),
) -> list[list[StatePiece]]:
    """Update parameters with given gradients, and return this rank's pieces of all state; the function for ranks.

    ``before``: of each rule, what to continue from, after as many updates.
    """
    ctx = ParallelContext.create(topology, "cpu") if topology.world_size > 1 else ParallelContext.single()
    out = []
    try:
        for number, config in enumerate(configs):
            pairs = [(r, attach(torch.nn.Parameter(torch.zeros(r.local_shape, dtype=torch.float64)), r))
                     for r in parts(ctx)]
            sharded = ShardedParameters([[pairs]], ctx, ShardSettings(
                master_dtype=torch.float64, split_state=split_state, capacity=150), rule=rule_of(config))
            update, values = make_update("torch", sharded, config), StepValues(ctx.device)
            if before:
                load_state(sharded, pairs, Held(before[number]))
                update.restore(STEPS)
            for step in range(STEPS, 2 * STEPS) if before else range(-1, STEPS):
                for piece in sharded.pieces:
                    whole = torch.zeros(piece.record.local_shape, dtype=torch.float64)
                    piece.record.local_view(whole).copy_(given(piece.record, step)[piece.record.box()])
                    mine = whole.view(-1)[piece.start : piece.start + piece.master.numel()]
                    (piece.master if step < 0 else piece.gradient).copy_(mine)
                if step >= 0:
                    values.set(StepNumbers(lr=0.1))
                    update.step(torch.ones((), dtype=torch.float64), values, skip=torch.zeros(()))
            out.append([replace(p, tensor=p.tensor.clone()) for p in state_pieces(sharded)])
    finally:
        ctx.close()
    return out


class Held:
    """Reader of logical tensors in memory."""

    def __init__(self, tensors: State) -> None:
        self.tensors = tensors

    def __call__(
        self, name: str, kind: str, offset: tuple[int, ...], shape: tuple[int, ...], /, *,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        return self.tensors[name, kind][tuple(slice(o, o + n) for o, n in zip(offset, shape))]


def given(record: ParameterRecord, step: int) -> torch.Tensor:
    """The logical gradient of a parameter at a step; at -1 its weights."""
    generator = torch.Generator().manual_seed(len(record.name) * 100 + step)
    return torch.randn(record.shape, dtype=torch.float64, generator=generator)


def assembled(pieces: Sequence[StatePiece]) -> State:
    """The logical tensors, by name and kind; every element is in one piece."""
    out: State = {}
    for p in pieces:
        whole = out.setdefault((p.name, p.kind), torch.full(p.global_shape, torch.nan, dtype=torch.float64))
        slice_ = torch.full(p.shape, torch.nan, dtype=torch.float64)
        slice_.view(-1)[p.flat_start : p.flat_start + p.tensor.numel()] = p.tensor
        box = whole[tuple(slice(o, o + n) for o, n in zip(p.offset, p.shape))]
        assert not (~box.isnan() & ~slice_.isnan()).any(), (p.name, p.kind)
        box.copy_(torch.where(slice_.isnan(), box, slice_))
    assert not any(t.isnan().any() for t in out.values())
    return out


@pytest.mark.parametrize(("topology", "split_state"), [
    (Topology(tp=2, dp=2), True), (Topology(dp=3), True), (Topology(tp=4, kv_copies=2), False),
    (Topology(tp=4, kv_copies=2, dp=2), True), (Topology(dp=4, shard=2), True), (Topology(tp=2, cp=2), True),
], ids=str)
def test_weights_and_state_are_those_of_one_process(ranks: RankPool, topology: Topology, split_state: bool) -> None:
    """Of the same gradients, and continued from one process's state: to the bit where nothing is summed, SM3's maxima
    among them."""
    rules = [(rule, {}) for rule in RULES] + list(VARIANTS.values())
    configs = [OptimizerConfig(name=rule, clip_grad=0.0, lr=0.1, **options) for rule, options in rules]
    first = [assembled(pieces) for pieces in updated(Topology(), configs, True)]
    then = [assembled(pieces) for pieces in updated(Topology(), configs, True, first)]
    there = ranks.run(topology.world_size, updated, topology, configs, split_state, timeout=240.0)
    again = ranks.run(topology.world_size, updated, topology, configs, split_state, first, timeout=240.0)
    cases = [*((c, w, i, there) for i, (c, w) in enumerate(zip(configs, first))),
             *((c, w, i, again) for i, (c, w) in enumerate(zip(configs, then)))]
    for config, want, i, pieces in cases:
        found = assembled([p for rank in pieces for p in rank[i]])
        assert want.keys() == found.keys()
        for key, tensor in want.items():
            if config.name in ("lion", "sgd", "adagrad", "sm3"):
                assert torch.equal(found[key], tensor), (config.name, key)
            else:
                torch.testing.assert_close(found[key], tensor, rtol=1e-11, atol=1e-11, msg=f"{config.name} {key}")


def test_half_precision_trains_alike_and_copies_stay_equal(ranks: RankPool) -> None:
    """In bf16, with Muon's products and journeys in bf16: tied tables, norms and heads that ranks share keep one value,
    and losses stay near one process's."""
    topology = Topology(tp=2, pp=2, dp=2)
    layout = {"zero_stage": 1, "sequence_parallel": True, "vocab_padding_multiple": 16}
    configs = []
    for rule in ("adafactor", "muon"):
        config = config_of(rule, {**LLAMA, **TIED, "num_query_groups": 1}, layout, topology)
        configs.append(replace(
            config, precision=replace(config.precision, dtype="bf16"), optimizer=replace(config.optimizer, lr=3e-3)
        ))
    traces = ranks.run(8, run_cases, [(config, topology, STEPS, 1) for config in configs], timeout=240.0)
    for i, config in enumerate(configs):
        found, alone = Run.of([trace[i] for trace in traces]), single_run(config, steps=STEPS)
        assert not found.differing_copies, config.optimizer.name
        assert found.losses == pytest.approx(alone.losses, rel=1e-2), config.optimizer.name


def sent_bytes(config: RunConfig, topology: Topology) -> int:
    """Train a step and count what this rank sends to others to bring matrices together; the function for ranks."""
    total, real, here = 0, dist.all_to_all_single, dist.get_rank

    def counted(out: torch.Tensor, given: torch.Tensor, sizes: list[int], counts: list[int], group: Any = None) -> Any:
        nonlocal total
        total += (sum(counts) - counts[here(group)]) * given.element_size()
        return real(out, given, sizes, counts, group=group)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "all_to_all_single", counted)
        run_case(config, topology, 1)
    return total


def test_muon_moves_what_the_planner_says(ranks: RankPool) -> None:
    topology = Topology(tp=2, dp=2)
    model = {**LLAMA, "num_layers": 6, "num_query_groups": 4}  # enough matrices that owners have like shares
    config = config_of("muon", model, {"zero_stage": 1}, topology)
    moved = sum(ranks.run(4, sent_bytes, config, topology, timeout=120.0))
    assert moved == pytest.approx(4 * sum(matrix_bytes(case_of(config)[0])), rel=0.03)
