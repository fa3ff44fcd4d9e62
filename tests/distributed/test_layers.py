"""Each parallel layer against the unsplit one, in fp64: outputs, input gradients and parameter gradients.

A test draws about 25 shapes from a seed, sends them to the ranks in one call, computes the same on one process
here, and compares what the ranks' records put together. Odd sizes wherever the layout allows them; what lies in
the padding is garbage, so that a use of it shows.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from cases import make_batches, make_config, single_run
from layer_bench import DRAWS, Bench, Case, deviation, edge_ids, faults, on_rank, one_process
from pool import RankPool

from megatron_port.core.config.schema import ModelConfig
from megatron_port.core.dist.groups import ParallelContext
from megatron_port.core.dist.mesh import REPLICAS, Topology
from megatron_port.core.dist.record import ParameterRecord
from megatron_port.core.layers.providers import torch_providers
from megatron_port.run.build import build_engine
from megatron_port.tools.parity.comparison import FP64, Run, compare
from megatron_port.tools.parity.run_record import RankTrace, record_run


def check(ranks: RankPool, tp: int, cases: Sequence[Case]) -> None:
    wanted = one_process(cases)
    for case, parts in zip(cases, wanted):
        zero = [name for name, part in parts.items() if not float(part.tensor.abs().max()) > 0]
        # A token that sees itself alone has no gradient through its scores.
        assert not [name for name in zero if case.seq > 1 or ("query_norm" not in name and "key_norm" not in name)]
    bad = faults(cases, ranks.run(tp, on_rank, list(cases)), wanted)
    assert not bad, f"{len(bad)} of {len(cases)} cases:\n" + "\n".join(bad)


def draw(layer_name: str, tp: int, sizes: Callable[[random.Random, bool], dict[str, Any]]) -> list[Case]:
    """DRAWS cases: sequence parallel in every other one, where the sequence must divide by tp."""
    out = []
    for i in range(DRAWS):
        seed = int.from_bytes(f"{layer_name}{tp}{i}".encode()[-6:], "little")
        r = random.Random(seed)
        sp = i % 2 == 0
        seq = tp * r.randint(1, 4) if sp else r.choice([1, 3, 5, 7, 8])
        out.append(Case(layer_name, seed % (1 << 31), sp, seq, r.randint(1, 3), sizes(r, sp)))
    return out


both = pytest.mark.parametrize("tp", [2, 4])


@both
def test_column_parallel_linear(ranks: RankPool, tp: int) -> None:
    check(ranks, tp, draw("column", tp, lambda r, sp: {
        "n_in": r.choice([1, 3, 7, 13]), "n_out": tp * r.choice([1, 3, 5]), "packed": r.choice([1, 1, 2, 3]),
        "bias": r.random() < 0.6,
    }))


@both
def test_row_parallel_linear(ranks: RankPool, tp: int) -> None:
    check(ranks, tp, draw("row", tp, lambda r, sp: {
        "n_in": tp * r.choice([1, 3, 5]), "n_out": r.choice([1, 3, 7, 13]), "bias": r.random() < 0.8,
    }))


@both
def test_vocabulary_parallel_embedding(ranks: RankPool, tp: int) -> None:
    """Odd vocabularies; with a multiple of 8, ranks that hold padding alone."""
    cases = draw("embedding", tp, lambda r, sp: {
        "vocab": r.choice([tp + 1, 5, 7, 11, 53]), "hidden": r.choice([1, 3, 8]), "multiple": r.choice([1, 8]),
    })
    assert any(c.sizes["vocab"] <= 8 == c.sizes["multiple"] for c in cases)
    check(ranks, tp, cases)


@both
def test_vocabulary_parallel_cross_entropy(ranks: RankPool, tp: int) -> None:
    """Labels in every slice; logits so large that exp overflows without the maximum."""
    cases = draw("cross_entropy", tp, lambda r, sp: {
        "vocab": r.choice([tp + 1, 5, 7, 11, 53]), "multiple": r.choice([1, 8]), "scale": r.choice([1.0, 5.0, 1000.0]),
    })
    check(ranks, tp, cases)


def test_cross_entropy_is_torchs(ranks: RankPool) -> None:
    """The unsplit reference itself, against torch.nn.functional.cross_entropy."""
    cases = draw("cross_entropy", 2, lambda r, sp: {"vocab": 11, "multiple": r.choice([1, 8]), "scale": 3.0})
    for case, parts in zip(cases, one_process(cases)):
        b = Bench(case, ParallelContext.single())
        labels, logits = edge_ids(b, 11), (b.random(case.seq, case.batch, 11) * 3.0).requires_grad_()
        g = b.random(case.seq, case.batch)
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none").view_as(g)
        loss.backward(g)
        assert deviation(parts["output"].tensor, loss.detach()) < 1e-12
        assert deviation(parts["input gradient"].tensor, logits.grad) < 1e-12  # type: ignore[arg-type]


def model_sizes(r: random.Random, tp: int, **fixed: Any) -> ModelConfig:
    """A model with grouped heads, odd widths and, in half of the draws, dropout."""
    groups = tp * r.choice([1, 1, 2])
    norm_kind, position = r.choice(["layernorm", "rmsnorm"]), r.choice(["learned", "rope"])
    values: dict[str, Any] = {
        "num_layers": 2, "hidden_size": r.choice([3, 7, 12]), "num_query_groups": groups,
        "num_attention_heads": groups * r.choice([1, 2, 3]),
        "head_dim": r.choice([2, 4] if position == "rope" else [1, 3, 4]),
        "ffn_hidden_size": tp * r.choice([1, 3, 5]), "vocab_size": r.choice([tp + 1, 7, 23]),
        "seq_length": 16, "position_embedding": position, "normalization": norm_kind,
        "activation": r.choice(["gelu", "gelu_tanh", "swiglu"]), "add_bias": r.random() < 0.7,
        "hidden_dropout": r.choice([0.0, 0.3]), "attention_dropout": r.choice([0.0, 0.3]),
    }
    values["qk_norm"] = values["head_dim"] > 1 and r.random() < 0.5  # a norm of one element has no gradient
    return ModelConfig(**{**values, **fixed})


@both
@pytest.mark.parametrize("name", ["attention", "mlp", "norm", "model_embedding", "head"])
def test_blocks_of_the_model(ranks: RankPool, tp: int, name: str) -> None:
    """SelfAttention (1 to 3 query heads a group, rotary or not), MLP, both norms, embedding and head."""
    def sizes(r: random.Random, sp: bool) -> dict[str, Any]:
        layout: dict[str, Any] = {"vocab_padding_multiple": r.choice([1, 8])}
        recompute = r.choice(["none", "selective"]) if name == "attention" else "none"
        return {"model": model_sizes(r, tp), "layout": layout, "recompute": recompute}

    check(ranks, tp, draw(name, tp, sizes))


@both
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_transformer_layer(ranks: RankPool, tp: int, recompute: str) -> None:
    cases = draw("layer", tp, lambda r, sp: {"model": model_sizes(r, tp), "recompute": recompute})
    assert any(c.sizes["model"].hidden_dropout and c.sizes["model"].attention_dropout and c.sp for c in cases)
    check(ranks, tp, cases)


def test_recompute_changes_no_bit() -> None:
    """On one process: full and selective recompute give the very gradients of keeping all activations."""
    plain = draw("layer", 2, lambda r, sp: {"model": model_sizes(r, 2), "recompute": "none"})
    wanted = one_process(plain)
    for kind in ("selective", "full"):
        cases = [replace(c, sizes={**c.sizes, "recompute": kind}) for c in plain]
        for got, want in zip(one_process(cases), wanted):
            assert all(torch.equal(got[name].tensor, want[name].tensor) for name in want)


REDUCED = "megatron_port.ext.deepspeed.reduction.all_reduce_flat"
BROKEN = {
    "no sum of the input's gradients": ("column", False, "megatron_port.core.layers.linear.start_all_reduce"),
    "no sum of the outputs": ("row", False, "megatron_port.core.layers.linear.reduce_from_tp"),
    "no sum of the embeddings": ("embedding", False, "megatron_port.core.layers.embedding.reduce_from_tp"),
    "partial gradients of norms": ("norm", True, REDUCED),
    "partial gradients of biases": ("row", True, REDUCED),
    "partial gradients of positions": ("model_embedding", True, REDUCED),
    "no sum before the head": ("head", False, "megatron_port.core.layers.linear.start_all_reduce"),
}


@pytest.mark.parametrize("mistake", BROKEN)
def test_these_comparisons_can_fail(ranks: RankPool, mistake: str) -> None:
    """Each collective left out shows in every case that needs it."""
    name, sp, target = BROKEN[mistake]
    r = random.Random(3)
    model = model_sizes(r, 2, position_embedding="learned", normalization="layernorm", add_bias=True)
    sizes = {
        "n_in": 6, "n_out": 6, "packed": 1, "bias": True, "vocab": 11, "hidden": 3, "multiple": 1, "model": model,
        "layout": {},
    }
    cases = [Case(name, seed, sp, 4, 2, sizes) for seed in range(3)]
    wanted = one_process(cases)
    assert not faults(cases, ranks.run(2, on_rank, cases), wanted)
    module, _, function = target.rpartition(".")
    bad = faults(cases, ranks.run(2, on_rank, cases, (module, function)), wanted)
    assert {text.split(": Case")[1] for text in bad} == {repr(c).removeprefix("Case") for c in cases}


def train_without_partial_sums(config: Any, steps: int) -> RankTrace:
    """The native engine that does not know of a partial gradient."""
    ctx = ParallelContext.create(Topology(tp=2), "cpu")
    with mock.patch.object(ParameterRecord, "reduces_over", lambda record, mesh: mesh.dims(*REPLICAS)):
        engine = build_engine(config, ctx, torch_providers())
        return record_run(engine, ctx, make_batches(config, ctx), steps=steps, lr=lambda step: 1e-2, evaluate=True)


def test_an_engine_without_partial_sums_is_found_and_named(ranks: RankPool) -> None:
    """Sequence parallelism's silent error: the loss of the first step is right, the norms' gradients are not."""
    config = make_config(dtype="fp64", layout={"sequence_parallel": True})
    traces = ranks.run(2, train_without_partial_sums, config, 2)
    deviations = compare(single_run(config, steps=2), Run.of(traces), FP64, config.model, lr=1e-2)
    bad = {d.quantity: d for d in deviations if not d.ok}
    assert {"gradient", "grad norm", "weight / lr", "copies"} <= set(bad)
    assert abs(traces[0].losses[0] - single_run(config, steps=1).losses[0]) < 1e-12
    assert any(word in bad["gradient"].where for word in ("norm", "position", "bias")), bad["gradient"].where
