"""A head in chunks of tokens on every kind of layout: steps in fp64 are those of one process with whole logits."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from cases import make_config, run_case, single_run
from distilled import distilled
from drawing import Draw
from fuzz import failures, plain, run_draws
from pool import RankPool
from test_preference_layouts import GPT as PAIRED_GPT
from test_preference_layouts import LLAMA as PAIRED_LLAMA
from test_preference_layouts import preferring, run_pairs

from megatron_port.core.config.features import FineTuningConfig
from megatron_port.core.config.schema import LayoutConfig, RunConfig
from megatron_port.core.dist.mesh import Topology
from megatron_port.tools.parity.comparison import FP64, Run, compare
from megatron_port.tools.parity.run_record import RankTrace

STEPS = 6
LLAMA = {"position_embedding": "rope", "normalization": "rmsnorm", "activation": "swiglu", "add_bias": False,
         "num_query_groups": 2, "tie_embeddings": False}
TIGHT = dataclasses.replace(FP64, loss=1e-12, grad_norm=1e-12, gradient=1e-12, key_bias=1e-12)
EARLY = tuple(f"step {step}," for step in range(4))
"""Steps whose gradients are compared so closely: Adam makes 1e-12 of the rounding of any layout by the tenth."""


def in_chunks(
    chunk: int, topology: Topology, model: dict[str, Any], *, z_loss: float = 0.0, masked: bool = False,
    dtype: str = "fp64", **layout: Any,
) -> tuple[RunConfig, Topology]:
    """A run whose head takes ``chunk`` of a micro-batch's tokens at a time."""
    sizes = {"tensor_parallel_size": topology.tp, "pipeline_parallel_size": topology.pp,
             "data_parallel_size": topology.dp, "context_parallel_size": topology.cp}
    stages = topology.pp * layout.get("virtual_pipeline_size", 1)
    config = make_config(
        dtype=dtype, model={"num_layers": max(2, stages), **model}, layout={**sizes, **layout}, mask_loss=masked,
        data={"attention_documents": "within"} if masked and topology.cp == 1 else None,
    )
    return dataclasses.replace(
        config, activations=dataclasses.replace(config.activations, head_chunk=chunk),
        training=dataclasses.replace(config.training, z_loss=z_loss),
    ), topology


CASES: dict[int, list[tuple[RunConfig, Topology]]] = {
    2: [
        in_chunks(5, Topology(tp=2), {}, z_loss=0.03, masked=True, sequence_parallel=True),
        in_chunks(7, Topology(tp=2), {**LLAMA, "logits_softcap": 2.0, "head_bias": True}, vocab_padding_multiple=8),
        in_chunks(6, Topology(pp=2), {}, masked=True, pipeline_schedule="zb-h1"),
        in_chunks(3, Topology(cp=2), LLAMA, z_loss=0.03, masked=True),
    ],
    4: [
        in_chunks(6, Topology(tp=2, pp=2), {**LLAMA, "mtp_layers": 1, "tie_embeddings": True}, masked=True,
                  sequence_parallel=True, pipeline_schedule="zb-h1"),
        in_chunks(5, Topology(tp=2, cp=2), LLAMA, masked=True, sequence_parallel=True, recompute="full"),
        in_chunks(3, Topology(pp=2, dp=2), {**LLAMA, "mtp_layers": 2}, pipeline_schedule="zb-v",
                  virtual_pipeline_size=2, zero_stage=3),
        in_chunks(9, Topology(pp=2, dp=2), {}, z_loss=0.03, pipeline_schedule="gpipe", zero_stage=3, reshard="step"),
        in_chunks(1, Topology(dp=4), {}, masked=True, zero_stage=2, reduce_bucket_size=500),
    ],
    8: [in_chunks(6, Topology(tp=2, pp=2, cp=2), {}, z_loss=0.03, masked=True, sequence_parallel=True, zero_stage=1)],
}
"""Of 32 tokens of two samples on a rank, 16 under context parallelism; sizes divide neither, but for 1."""


def run_all(cases: list[tuple[RunConfig, Topology]], steps: int) -> list[RankTrace]:
    return [run_case(config, topology, steps, steps) for config, topology in cases]


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.slow), 8])
def test_every_layout_trains_as_one_process_with_whole_logits(ranks: RankPool, world: int) -> None:
    results = ranks.run(world, run_all, CASES[world], STEPS, timeout=300.0)
    for number, (config, topology) in enumerate(CASES[world]):
        one = single_run(plain(config), steps=STEPS, gradient_steps=STEPS)
        run = Run.of([result[number] for result in results])
        found = [*compare(one, run, FP64, config.model, lr=1e-2), *(
            d for d in compare(one, run, TIGHT, config.model, lr=1e-2) if d.where.startswith(EARLY)
        )]
        assert not [str(d) for d in found if not d.ok], (topology, config.activations.head_chunk)


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_other_precisions_keep_their_bounds(ranks: RankPool, dtype: str) -> None:
    """The loss scale of fp16 too: gradients are made again with it in the backward pass."""
    cases = [
        in_chunks(5, Topology(tp=2), {}, z_loss=0.03, dtype=dtype, sequence_parallel=True),
        in_chunks(7, Topology(pp=2), LLAMA, dtype=dtype, masked=True),
    ]
    results = run_draws(ranks, [Draw(i, *case) for i, case in enumerate(cases)])
    assert len(results) == 2 and not failures(results), failures(results)


def test_one_chunk_changes_no_bit(ranks: RankPool) -> None:
    """Of all tokens: the same products and sums, in the same order."""
    of_all = in_chunks(32, Topology(tp=2), {}, z_loss=0.03, masked=True, dtype="fp32", sequence_parallel=True)
    whole = dataclasses.replace(of_all[0], activations=dataclasses.replace(of_all[0].activations, head_chunk=0))
    for first, second in ranks.run(2, run_all, [of_all, (whole, of_all[1])], 3):
        assert first.losses == second.losses and first.grad_norms == second.grad_norms


def test_a_teacher_is_seen_in_chunks_too(ranks: RankPool) -> None:
    draws = []
    for number, (pair, topology, divergence) in enumerate([
        ("gpt from llama", Topology(tp=2), "forward"), ("llama from tied gpt", Topology(pp=2), "reverse"),
    ]):
        one = distilled(
            number, pair, topology, mask=True, objective=(0.3, 2.0, divergence), sequence_parallel=topology.tp == 2)
        activations = dataclasses.replace(one.config.activations, head_chunk=5)
        draws.append(dataclasses.replace(one, config=dataclasses.replace(one.config, activations=activations)))
    results = run_draws(ranks, draws)
    assert len(results) == 2 and not failures(results), failures(results)


def test_pairs_and_adapters(ranks: RankPool) -> None:
    """A loss that is no sum over tokens, and a head that is not trained."""
    cases = []
    for config, topology in (
        (preferring(PAIRED_GPT, sequence_parallel=True), Topology(tp=2)),
        (preferring(PAIRED_LLAMA, tuning="lora", zero_stage=3), Topology(dp=2)),
    ):
        activations = dataclasses.replace(config.activations, head_chunk=7)
        cases.append((dataclasses.replace(config, activations=activations), topology))
    assert cases[1][0].fine_tuning != FineTuningConfig()
    results = ranks.run(2, run_pairs, cases, timeout=200)
    for number, (config, topology) in enumerate(cases):
        alone = dataclasses.replace(plain(config), layout=LayoutConfig(vocab_padding_multiple=1))
        (trace, _), = run_pairs([(alone, Topology())])
        traces = [result[number][0] for result in results]
        found = compare(Run.of([trace]), Run.of(traces), TIGHT, config.model, lr=1e-2)
        assert not [str(d) for d in found if not d.ok], topology
