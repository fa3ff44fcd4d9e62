"""Checks: every illegal layout of a grid is refused with its numbers and a neighbour that passes; legal ones pass."""

from __future__ import annotations

import itertools
import re
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_port.cli.config import field_texts
from megatron_port.core.config.checks import check, problems, resolve, topology_sizes
from megatron_port.core.config.choices import CHOICES
from megatron_port.core.config.layout import divisors, legal_tensor_sizes, nearest, with_values
from megatron_port.core.config.loader import load, shipped_names
from megatron_port.core.config.schema import RunConfig
from megatron_port.core.errors import ConfigError
from megatron_port.ext.advice.nearest_layout import legal_neighbour

BASE = with_values(
    RunConfig(), {"data.synthetic": True, "model.hidden_size": 48, "model.seq_length": 16, "precision.dtype": "fp32"}
)


def made(**changes: object) -> RunConfig:
    """BASE with ``table__key=value`` changes."""
    return with_values(BASE, {k.replace("__", "."): v for k, v in changes.items()})


def one(config: RunConfig, world: int | None = None) -> str:
    found = problems(config, world_size=world)
    assert len(found) == 1, found
    return found[0]


def numbers(text: str) -> set[int]:
    digits = "".join(c if c.isdigit() else " " for c in text)
    return {int(word) for word in digits.split()}


def is_legal(world: int, tp: int, pp: int, dp: int, batch: int, layers: int, heads: int, vocab: int) -> bool:
    """The rules, written down a second time for this grid (hidden 48, MLP 192, micro-batch 2)."""
    replicas = dp or (world // (tp * pp) if world % (tp * pp) == 0 else 0)
    return (
        replicas > 0 and tp * pp * replicas == world and 48 % heads == 0 and heads % tp == 0 and 192 % tp == 0
        and layers >= pp and vocab >= tp and batch % (2 * replicas) == 0
    )


GRID = list(itertools.product(
    (1, 2, 6, 8, 12), (1, 2, 3, 5), (1, 2, 4), (0, 2, 3), (4, 7, 12), (1, 4), (4, 5, 12), (2, 97),
))[::7]  # prime to the number of values of each, so that none is left out


def test_grid_of_layouts() -> None:
    legal = illegal = 0
    for world, tp, pp, dp, batch, layers, heads, vocab in GRID:
        config = made(
            layout__tensor_parallel_size=tp, layout__pipeline_parallel_size=pp, layout__data_parallel_size=dp,
            batch__micro_batch_size=2, batch__global_batch_size=batch, model__num_layers=layers,
            model__num_attention_heads=heads, model__vocab_size=vocab,
        )
        found = problems(config, world_size=world)
        if is_legal(world, tp, pp, dp, batch, layers, heads, vocab):
            legal += 1
            assert not found, (config, found)
            assert topology_sizes(config, world) == (tp, pp, world // (tp * pp))
            continue
        illegal += 1
        assert found, (world, tp, pp, dp, batch, layers, heads, vocab)
        asked = {world, tp, pp, dp, batch, layers, heads, vocab}
        for text in found:
            assert numbers(text.partition("\n")[0].partition(";")[0]) & asked, text
        near = legal_neighbour(config, world)
        assert near is not None and f"{near}" in found[-1]
        assert near.tp * near.pp * near.dp == world
        check(near.apply(config), world_size=world)
    assert legal > 20 and illegal > 400, (legal, illegal)


LAYOUTS = st.fixed_dictionaries({
    "model.num_layers": st.integers(-1, 9), "model.hidden_size": st.integers(0, 60),
    "model.num_attention_heads": st.integers(-1, 13), "model.num_query_groups": st.integers(-1, 5),
    "model.head_dim": st.sampled_from([0, 0, -1, 3, 8]), "model.ffn_hidden_size": st.sampled_from([0, 0, -2, 30]),
    "model.vocab_size": st.integers(-1, 40), "model.seq_length": st.integers(0, 20),
    "model.position_embedding": st.sampled_from(["learned", "rope"]),
    "layout.tensor_parallel_size": st.integers(-1, 9), "layout.pipeline_parallel_size": st.integers(-1, 9),
    "layout.data_parallel_size": st.integers(-1, 9), "layout.sequence_parallel": st.booleans(),
    "layout.pipeline_split": st.lists(st.integers(-1, 4), max_size=3).map(tuple),
    "batch.micro_batch_size": st.integers(-1, 5), "batch.global_batch_size": st.integers(-1, 40),
    "batch.rampup_start": st.sampled_from([0, 0, -1, 2, 8]), "batch.rampup_increment": st.integers(-1, 4),
    "batch.rampup_samples": st.integers(-1, 50), "cluster.gpus_per_node": st.integers(-1, 8),
    "cluster.nodes": st.sampled_from([0, 0, -1, 1, 2]),
})


@settings(max_examples=400, deadline=None)
@given(LAYOUTS, st.one_of(st.none(), st.integers(-1, 30)))
def test_any_layout_is_legal_or_has_a_legal_neighbour(changes: dict[str, object], world: int | None) -> None:
    config = with_values(BASE, changes)
    if not problems(config, world_size=world):
        resolve(config, world)
        return
    near = legal_neighbour(config, world)
    assert near is not None
    check(near.apply(config), world_size=world if world is None or world > 0 else None)


def test_a_legal_layout_is_its_own_neighbour() -> None:
    near = legal_neighbour(made(layout__tensor_parallel_size=2, layout__pipeline_parallel_size=2), 8)
    assert near is not None
    assert (near.tp, near.pp, near.dp, near.micro_batch, near.global_batch, near.other) == (2, 2, 2, 1, 8, ())


def test_heads_of_no_elements() -> None:
    """Found by the test above: a fault of the rotary options was looked for in a head of size 0."""
    found = problems(made(model__hidden_size=1, model__num_attention_heads=2, model__position_embedding="rope"))
    assert any(text.startswith("hidden_size 1 does not divide by num_attention_heads 2") for text in found)


def test_heads_over_tp() -> None:
    text = one(made(model__num_attention_heads=12, model__ffn_hidden_size=60, layout__tensor_parallel_size=5), 5)
    assert text.startswith("num_attention_heads 12 does not divide by tensor_parallel_size 5; use 4 or 6\n")


def test_batch_of_8000_on_six_replicas() -> None:
    """The paper's strong-scaling batch: ceil(8000/6) = 1334 micro-batches make 8004."""
    config = load("runs/frontier-1t", ["batch.global_batch_size=8000", "layout.data_parallel_size=6"]).config
    text = one(config, 3072)
    words = "global_batch_size 8000 does not divide by micro_batch_size 1 × data_parallel_size 6 = 6; use 7998 or 8004"
    assert words in text
    assert "global_batch_size 7998" in text.partition("\n")[2]
    check(with_values(config, {"batch.global_batch_size": 8004}), world_size=3072)


def test_a_smaller_micro_batch_before_another_global_batch() -> None:
    near = legal_neighbour(made(batch__micro_batch_size=3, layout__data_parallel_size=2), 2)
    assert near is not None and (near.micro_batch, near.global_batch, near.dp) == (2, 8, 2)


LAYOUT_FAULTS: list[tuple[dict[str, object], int | None, str]] = [
    ({"model__num_attention_heads": 5}, 1, "hidden_size 48 does not divide by num_attention_heads 5; use 4 or 6 heads"),
    ({"model__num_query_groups": 3}, 1, "num_attention_heads 4 does not divide by num_query_groups 3; use 2 or 4"),
    ({"model__num_attention_heads": 16, "model__position_embedding": "rope"}, 1, "the head size is 3"),
    ({"model__num_attention_heads": 12, "model__num_query_groups": 6, "layout__tensor_parallel_size": 4}, 4,
     "num_query_groups 6 and tensor_parallel_size 4: one must be a multiple of the other (above the groups, ranks "
     "share a key/value head); use 3 or 6"),
    ({"model__ffn_hidden_size": 33, "layout__tensor_parallel_size": 2}, 2,
     "ffn_hidden_size 33 does not divide by tensor_parallel_size 2; use 1"),
    ({"model__seq_length": 15, "layout__sequence_parallel": True, "layout__tensor_parallel_size": 2}, 2,
     "seq_length (sequence_parallel) 15 does not divide by tensor_parallel_size 2"),
    ({"layout__pipeline_parallel_size": 4}, 4, "num_layers 2 is fewer than pipeline_parallel_size 4"),
    ({"layout__pipeline_parallel_size": 2, "layout__pipeline_split": (2,)}, 2,
     "[2] has 1 entries that sum to 2 (smallest 2); it must have 2 of at least 1 that sum to num_layers 2"),
    ({"layout__pipeline_parallel_size": 2, "layout__pipeline_split": (1, 2)}, 2,
     "leave it [] (balanced) or use [1, 1]"),
    ({"layout__pipeline_parallel_size": 2, "layout__pipeline_split": (2, 0)}, 2, "smallest 0"),
    ({"layout__data_parallel_size": 3}, 2,
     "× data_parallel_size 3 = 3 ranks, but the world has 2; use data_parallel_size 2"),
    ({"layout__tensor_parallel_size": 4}, 6, "a world of 6 ranks does not divide by tensor_parallel_size 4"),
    ({"cluster__nodes": 2}, 8, "cluster.nodes 2 × gpus_per_node 8 = 16 ranks, but the world has 8"),
    ({"cluster__gpus_per_node": 2, "layout__tensor_parallel_size": 4}, 8,
     "tensor_parallel_size 4 is larger than a node of 2 ranks; use 2"),
    ({"batch__rampup_start": 4, "batch__rampup_increment": 3, "batch__rampup_samples": 9}, 1,
     "= 4 does not divide by rampup_increment 3; use 2 or 4"),
    ({"batch__rampup_start": 8}, 1, "rampup_start 8 is not below global_batch_size 8"),
    ({"batch__rampup_start": 4}, 1, "needs rampup_increment and rampup_samples of at least 1 (they are 0 and 0)"),
    ({"batch__rampup_samples": 4}, 1, "need rampup_start"),
    ({}, 0, "the world has 0 ranks; it must have at least 1"),
]


@pytest.mark.parametrize(("changes", "world", "words"), LAYOUT_FAULTS)
def test_layout_faults(changes: dict[str, object], world: int | None, words: str) -> None:
    config = made(**changes)
    text = "\n".join(problems(config, world_size=world))
    assert words in text and "The nearest layout that is legal: tensor_parallel_size" in text
    if words.startswith(("the world has 0",)):
        return
    near = legal_neighbour(config, world)
    assert near is not None
    check(near.apply(config), world_size=world)


NATIVE = {"engine": "native", "layout__zero_stage": 0}
# Of engine deepspeed, unless they name the other.
OTHER_FAULTS: list[tuple[dict[str, object], str]] = [
    ({"layout__virtual_pipeline_size": 2}, "'1f1b' with virtual_pipeline_size 2; use '1f1b' with 1"),
    ({"layout__pipeline_schedule": "gpipe"}, "cannot run layout.pipeline_schedule 'gpipe'"),
    ({"precision__dtype": "fp64"}, "precision.dtype fp64 is refused; use engine native"),
    ({"layout__zero_stage": 0, "model__num_layers": 2}, "layout.zero_stage 0"),
    ({"layout__zero_stage": 2}, "its pipelines take stages 0 and 1 only; use zero_stage 1, or engine = \"native\""),
    ({**NATIVE, "layout__zero_stage": 2, "layout__pipeline_schedule": "zb-h1"},
     "use zero_stage 1, or the schedule '1f1b'"),
    ({"layout__zero_stage": 3}, "engine deepspeed with layout.zero_stage 3: its pipelines take stages 0 and 1 only"),
    ({"layout__reshard": "step"}, "zero_stage 1, which keeps whole weights; use zero_stage 3"),
    ({"layout__zero_stage": 0, "precision__dtype": "bf16"}, "it refuses bf16"),
    ({"layout__zero_stage": 0, "precision__dtype": "fp16"}, "it trains wrongly under fp16"),
    ({**NATIVE, "layout__pipeline_schedule": "zb-v"}, "virtual_pipeline_size is 1; use 2"),
    ({**NATIVE, "layout__pipeline_schedule": "zb-h1", "layout__virtual_pipeline_size": 2, "model__num_layers": 4},
     "use 1, or the schedule '1f1b' (interleaved) or 'zb-v'"),
    ({"precision__grad_reduce_dtype": "bf16"}, "is for engine native; use 'fp32'"),
    ({"model__attention_dropout": 0.1, "backend__attention": "sdpa"}, "attention_dropout 0.1 needs backend.attention"),
    ({"backend__attention": "flash_attn"}, "flash_attn needs precision.dtype fp16 or bf16, not 'fp32'"),
    ({"backend__device": "cpu", "backend__norm": "apex"}, "backend.norm apex needs a GPU"),
    ({"data__synthetic": False}, "data.train is empty"),
    ({"data__train": ("a", " ")}, "empty name"),
    ({"data__train": ("a", "b"), "data__weights": (1.0,)}, "data.weights has 1 entries for 2 corpora"),
    ({"data__train": ("a",), "data__weights": (0.0,)}, "each must be above 0"),
    ({"data__split": (0.5, 0.4, 0.2)}, "sums to 1.1"),
    ({"data__split": (1.5, -0.5, 0.0)}, "three fractions"),
    ({"data__split": (1.0,)}, "three fractions"),
    ({"data__train": ("a",), "data__synthetic": False, "data__split": (0.0, 1.0, 0.0)}, "nothing for training"),
    ({"data__train": ("a",), "data__synthetic": False, "data__split": (1.0, 0.0, 0.0), "training__eval_batches": 3},
     "eval_batches is 3"),
    ({"data__train": ("a",), "data__synthetic": False, "data__tokenizer": "gpt2", "model__vocab_size": 257},
     "vocab_size 257 is smaller than the gpt2 tokenizer's 50257"),
    ({"data__train": ("a",), "data__synthetic": False, "data__order": "megatron", "seed": 2**32},
     "seed is 4294967296; data.order megatron shuffles as Megatron-LM does"),
    ({"training__eval_interval": 5}, "eval_batches is 0"),
    ({"optimizer__min_lr": 1.0}, "min_lr 1.0 is above lr 0.0003"),
    ({"optimizer__warmup_steps": 100}, "warmup_steps 100 is not below training.steps 100"),
    ({"optimizer__warmup_steps": 9, "optimizer__decay_steps": 9},
     "warmup_steps 9 is not below optimizer.decay_steps 9"),
    ({"precision__min_loss_scale": 1e6}, "initial_loss_scale 65536.0 is below min_loss_scale 1000000.0"),
    ({"optimizer__beta2": 1.0}, "optimizer.beta2 is 1.0; it must be at least 0 and below 1"),
    ({"optimizer__lr": 0.0}, "optimizer.lr is 0.0; it must be above 0"),
    ({"name": "a/b"}, "name is 'a/b'; it must be a folder name"),
    ({"checkpoint__resume": ""}, "checkpoint.resume is ''"),
]


CONTEXT = {"layout__context_parallel_size": 4, "engine": "native", "model__num_attention_heads": 6}
METHOD_FAULTS = [
    ({"layout__cp_method": "ring", "backend__attention": "sdpa", "model__sliding_window": 3},
     "sdpa cannot serve a window"),
    ({"layout__cp_method": "ring", "backend__attention": "own", "model__attention_dropout": 0.1},
     "under layout.cp_method \"ring\" needs backend.attention auto or math"),
    ({"layout__cp_method": "heads"},
     "context_parallel_size 4 must divide the 6 key/value heads of a rank (tensor_parallel_size 1), or be a multiple "
     "of them that divides its 6 query heads; use context_parallel_size 2, 3, 6 or cp_method \"gather\""),
    ({"layout__cp_method": "heads", "layout__tensor_parallel_size": 2, "model__num_query_groups": 2},
     "must divide the 1 key/value heads of a rank (tensor_parallel_size 2), or be a multiple of them that divides its "
     "3 query heads; use context_parallel_size 3 or"),
]


@pytest.mark.parametrize(("changes", "words"), METHOD_FAULTS)
def test_methods_of_context_parallelism_that_do_not_fit(changes: dict[str, object], words: str) -> None:
    """And none is refused that fits: copies of key/value heads, and what the other methods serve."""
    assert words in one(made(**CONTEXT, **changes))
    fitting = changes | {"layout__context_parallel_size": 3 if changes["layout__cp_method"] == "heads" else 4}
    method = "gather" if fitting["layout__context_parallel_size"] == 4 else "heads"
    assert not problems(made(**CONTEXT | fitting | {"layout__cp_method": method, "model__seq_length": 24}))


@pytest.mark.parametrize(("changes", "words"), OTHER_FAULTS)
def test_other_faults(changes: dict[str, object], words: str) -> None:
    text = one(made(**{"engine": "deepspeed", **changes}))
    assert words in text and "nearest" not in text


def test_pairs_that_are_allowed() -> None:
    check(made(model__attention_dropout=0.1, backend__attention="math"))
    check(made(**NATIVE, precision__dtype="fp64", layout__pipeline_schedule="gpipe"))
    check(made(**NATIVE, layout__pipeline_schedule="1f1b", layout__pipeline_parallel_size=2), world_size=4)
    check(made(optimizer__warmup_steps=500, optimizer__decay="constant"))
    check(made(data__train=("a",), data__synthetic=False, data__order="megatron", seed=2**32 - 1))
    check(made(data__train=("a",), data__synthetic=False, seed=2**62))
    check(made(batch__rampup_start=2, batch__rampup_increment=2, batch__rampup_samples=100), world_size=2)
    check(made(layout__pipeline_parallel_size=2, layout__pipeline_split=(1, 1)), world_size=2)
    check(made(layout__tensor_parallel_size=8, model__num_attention_heads=8), world_size=8)


@pytest.mark.parametrize("name", CHOICES)
def test_choices(name: str) -> None:
    default: object = BASE
    for key in name.split("."):
        default = getattr(default, key)
    assert default in CHOICES[name]
    bad = "mat" if isinstance(default, str) else 7
    text = problems(with_values(BASE, {name: bad}))[0]
    assert text.startswith(f"{name} {bad!r} is unknown; use {CHOICES[name][0]}")


def test_everything_is_reported_at_once() -> None:
    config = made(
        optimizer__lr=-1.0, layout__tensor_parallel_size=5, data__split=(1.0,), engine="other",
        batch__global_batch_size=7,
    )
    found = problems(config, world_size=10)
    for word in ("engine 'other'", "optimizer.lr is -1.0", "tensor_parallel_size 5", "data.split", "batch_size 7"):
        assert any(word in text for text in found), word
    with pytest.raises(ConfigError) as caught:
        check(config, world_size=10)
    assert caught.value.problems == found and caught.value.exit_code == 2


def test_resolve_and_sizes() -> None:
    done = resolve(made(layout__tensor_parallel_size=2, training__steps=7), 8)
    assert (done.layout.data_parallel_size, done.optimizer.decay_steps) == (4, 7)
    assert (done.model.num_query_groups, done.model.head_dim, done.model.ffn_hidden_size) == (4, 12, 192)
    assert resolve(done, 8) == done
    assert topology_sizes(made(cluster__nodes=2), None) == (1, 1, 16)
    assert topology_sizes(BASE, None) == (1, 1, 1)
    assert topology_sizes(made(layout__tensor_parallel_size=2, layout__context_parallel_size=2), 16) == (2, 1, 4)
    with pytest.raises(ConfigError, match="a world of 8 ranks"):
        topology_sizes(made(layout__tensor_parallel_size=3), 8)
    with pytest.raises(ConfigError, match=r"12 ranks does not .* × context_parallel_size 8 = 8; use .* tp × pp × cp"):
        topology_sizes(made(layout__context_parallel_size=8), 12)


@pytest.mark.parametrize("name", [n for n in shipped_names() if n.startswith("runs/")])
def test_shipped_runs_are_legal(name: str) -> None:
    check(load(name).config)


def test_the_papers_run() -> None:
    config = load("runs/frontier-1t").config
    assert topology_sizes(config, 3072) == (8, 64, 6) and config.batch.global_batch_size == 9600
    assert (config.precision.dtype, config.activations.policy, config.training.steps) == ("fp16", "full", 10)
    check(with_values(config, {"model.num_attention_heads": 200}), world_size=3072)


@given(st.integers(1, 5000), st.integers(1, 5000))
@settings(max_examples=60, deadline=None)
def test_divisors_and_nearest(n: int, k: int) -> None:
    every = [d for d in range(1, n + 1) if n % d == 0]
    assert divisors(n) == every
    below, above = [d for d in every if d < k], [d for d in every if d > k]
    assert nearest(k, every) == ([max(below)] if below else []) + ([min(above)] if above else [])


def test_absurd_sizes_are_answered_quickly() -> None:
    config = replace(BASE, layout=replace(BASE.layout, tensor_parallel_size=2**61 - 1, pipeline_parallel_size=10**18))
    assert problems(config, world_size=2**62)
    assert problems(made(model__hidden_size=2**62 + 1, model__num_attention_heads=2**40), world_size=10**15)


def test_tensor_sizes_divide_the_key_value_heads_or_are_multiples_of_them() -> None:
    def sizes(heads: int, groups: int) -> list[int]:
        return legal_tensor_sizes(made(model__num_attention_heads=heads, model__num_query_groups=groups), None)

    assert sizes(24, 2) == [1, 2, 4, 6, 8, 12, 24]
    assert sizes(12, 6) == [1, 2, 3, 6, 12]
    assert sizes(12, 1) == [1, 2, 3, 4, 6, 12] == sizes(12, 12)


def test_a_help_that_lists_values_belongs_to_a_literal() -> None:
    """One source: what the reference documents as ``a | b | c`` comes from the field's type or its registry."""
    open_ended = {"data.tokenizer", "checkpoint.resume"}  # also a file or a path
    listed = {name for name, text in field_texts().items() if re.match(r"\w[\w-]*( \([^)]*\))? \| ", text)}
    assert listed - open_ended <= set(CHOICES) and open_ended <= listed and len(CHOICES) > 30


def test_a_pattern_of_norms_says_it_alone() -> None:
    assert not problems(made(model__norm_pattern=("pre", "post", "sandwich")))
    assert one(made(model__norm_pattern=("pre", "post"), model__norm_placement="sandwich")) == (
        'model.norm_pattern says where the norms of all layers are; leave out model.norm_placement "sandwich"')
    shared = {"model__parallel_residual": True, "model__shared_norm": True, "model__position_embedding": "rope"}
    assert "there is no norm of the input" in one(made(model__norm_pattern=("pre", "post"), **shared))
    assert not problems(made(model__norm_pattern=("pre", "sandwich"), **shared))
    assert one(made(model__latent_norm_epsilon=1e-6)).endswith("norm_epsilon = 1e-06 needs kv_lora_rank, e.g. 512")
