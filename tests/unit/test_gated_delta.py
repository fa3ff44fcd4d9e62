"""Gated DeltaNet: the recurrence in chunks against its definition, the mixer against the paper's formula and
transformers, documents, states between runs, settings."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rank_memory import events_of, most
from test_mixers import BATCH, inputs, layer_of

from megatron_port.core.config.checks import problems
from megatron_port.core.config.features import FineTuningConfig, QuantisationConfig, SparsityConfig
from megatron_port.core.config.model import RecurrentConfig
from megatron_port.core.config.schema import DataConfig, LayoutConfig, ModelConfig, PrecisionConfig, RunConfig
from megatron_port.core.dist.record import InitSpec, initial_values
from megatron_port.core.errors import ConfigError
from megatron_port.core.model.decoder_spec import model_spec
from megatron_port.core.model.layers import TransformerLayer
from megatron_port.ext.mixers.recurrence import Operands, convolve, in_chunks, in_steps, passage, passed
from megatron_port.ext.telemetry.flops import hardware_flops, model_flops
from megatron_port.tools.compress.selection import Sizes, check_sizes
from megatron_port.tools.inference.model import InferenceModel

MODEL = ModelConfig(
    num_layers=2, hidden_size=32, num_attention_heads=4, seq_length=21, vocab_size=100, mixer="gated_delta",
    normalization="rmsnorm", add_bias=False,
    recurrent=RecurrentConfig(heads=6, key_heads=3, key_size=5, value_size=7, chunk=4, segment=8),
)
RUN = RunConfig(model=MODEL, data=DataConfig(synthetic=True), engine="native")


def operands(seed: int, n: int, *, delta: bool, documents: float) -> Operands:
    """Random operands of 2 samples and 3 heads; ``documents``: share of the positions at which one begins."""
    g = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(2, 3, n, *shape, generator=g, dtype=torch.float64)

    keys = torch.nn.functional.normalize(draw(5), dim=-1)
    starts = torch.rand(2, n, generator=g) < documents if documents else None
    tensors = draw(5), keys, draw(4), -torch.nn.functional.softplus(4 * draw()), draw().sigmoid()
    q, k, v, decay, rate = (x.detach().requires_grad_() for x in tensors)
    return Operands(q, k, v, decay, rate if delta else None, starts)


def part(whole: Operands, start: int, stop: int) -> Operands:
    """The operands of some positions."""
    names = "queries", "keys", "values", "decay", "rate"
    found: dict[str, Any] = {n: getattr(whole, n)[:, :, start:stop] for n in names if getattr(whole, n) is not None}
    return replace(whole, starts=None if whole.starts is None else whole.starts[:, start:stop], **found)


def gradients(given: Operands, state: torch.Tensor, out: torch.Tensor, after: torch.Tensor) -> list[torch.Tensor]:
    weights = torch.Generator().manual_seed(9)
    loss = sum((x * torch.randn(x.shape, generator=weights, dtype=x.dtype)).sum() for x in (out, after))
    assert isinstance(loss, torch.Tensor)
    return list(torch.autograd.grad(loss, [*given.tensors, state]))


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 1000), n=st.integers(1, 40), chunk=st.integers(1, 17), delta=st.booleans(),
       documents=st.sampled_from((0.0, 0.15, 0.9)))
def test_chunks_give_what_steps_do(seed: int, n: int, chunk: int, delta: bool, documents: float) -> None:
    whole = operands(seed, n, delta=delta, documents=documents)
    state = torch.randn(2, 3, 5, 4, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    state.requires_grad_()
    want, found = in_steps(whole, state), in_chunks(whole, state, chunk=chunk)
    for a, b in zip((*want, *gradients(whole, state, *want)), (*found, *gradients(whole, state, *found)), strict=True):
        torch.testing.assert_close(b, a, rtol=1e-10, atol=1e-10)


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 1000), cuts=st.lists(st.integers(1, 9), min_size=1, max_size=5), delta=st.booleans(),
       documents=st.sampled_from((0.0, 0.2)))
def test_passages_compose(seed: int, cuts: list[int], delta: bool, documents: float) -> None:
    """What runs do to a state, one after another, is what all of their positions do."""
    whole = operands(seed, sum(cuts), delta=delta, documents=documents)
    runs, start = [], 0
    for length in cuts:
        runs.append(part(whole, start, start + length))
        start += length
    state: Any = torch.zeros(2, 3, 5, 4, dtype=torch.float64)
    for run, before in zip(runs, passed([passage(run, None, chunk=4) for run in runs], 4)[:-1], strict=True):
        torch.testing.assert_close(before, state, rtol=1e-11, atol=1e-11)
        _, state = in_steps(run, state)
    together = None
    for run in runs:  # one passage after another, from a state that is not zero
        together = passage(run, together, chunk=4)
    assert together is not None
    first = torch.randn(state.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    local, product = together.split((4, together.shape[-1] - 4), dim=-1)
    found = local + (product @ first if delta else product * first)
    torch.testing.assert_close(found, in_steps(whole, first)[1], rtol=1e-11, atol=1e-11)


def test_strong_decay_keeps_digits_in_single_precision() -> None:
    """exp of a sum of rates is 0, exp of its opposite infinite: no product of the two is made; nor are neighbours' sums
    subtracted in fp32."""
    whole = operands(3, 64, delta=True, documents=0.0)
    names = "queries", "keys", "values", "decay", "rate"
    narrow = Operands(*((getattr(whole, n) * (40 if n == "decay" else 1)).float().detach().requires_grad_()
                        for n in names))
    state = torch.zeros(2, 3, 5, 4, requires_grad=True)
    out = in_chunks(narrow, state, chunk=64)
    assert all(bool(x.isfinite().all()) for x in (*out, *gradients(narrow, state, *out)))
    torch.testing.assert_close(out, in_steps(narrow, state), rtol=1e-4, atol=1e-5)


def test_the_convolution_stays_within_documents() -> None:
    g = torch.Generator().manual_seed(0)
    x, before, weight, bias = (torch.randn(s, generator=g) for s in ((6, 2, 3), (3, 2, 3), (3, 4), (3,)))
    rows = torch.cat((before, x))
    reach = torch.tensor([[9, 1], [9, 2], [0, 3], [1, 0], [2, 0], [3, 1]])
    found, within = convolve(x, before, weight, bias), convolve(x, before, weight, bias, reach)
    for t in range(6):
        for b in range(2):
            every = sum(weight[:, 3 - j] * rows[3 + t - j, b] for j in range(4))
            own = sum(weight[:, 3 - j] * rows[3 + t - j, b] for j in range(min(4, int(reach[t, b]) + 1)))
            torch.testing.assert_close(found[t, b], every + bias)
            torch.testing.assert_close(within[t, b], own + bias)


@pytest.mark.parametrize(("keys", "each", "key_size", "value_size", "chunk"), [
    (2, 1, 64, 32, 64), (4, 2, 32, 64, 32), (2, 2, 48, 96, 64),
])
def test_memory_in_passing_is_as_stated(keys: int, each: int, key_size: int, value_size: int, chunk: int) -> None:
    """The allocator's peak in one pass of the mixer, of a sequence of several segments."""
    model = replace(MODEL, seq_length=512, recurrent=RecurrentConfig(
        heads=keys * each, key_heads=keys, key_size=key_size, value_size=value_size, chunk=chunk, segment=256))
    mixer: Any = layer_of(model, torch.float32).attention
    packed = torch.randn(512, BATCH, mixer.spec.packed.outputs).requires_grad_()
    found: dict[str, torch.Tensor] = {}

    def forward() -> None:
        found["out"] = mixer.mix(packed)

    def backward() -> None:
        found["out"].backward(torch.ones_like(found["out"]))

    def peak(step: Any) -> float:
        return most([event.nbytes() for event in events_of(step) if event.name() == "[memory]"]) / 4 / BATCH

    stated, out, grad = mixer.spec.scratch, 512 * keys * each * value_size, 512 * mixer.spec.packed.outputs
    assert peak(forward) == pytest.approx(256 * stated[0] + out, rel=0.08)
    assert peak(backward) == pytest.approx(256 * stated[1] + out + grad + grad / 2, rel=0.08)


# ---------------------------------------------------------------------------------------------------- the mixer


def starts_of(layer: TransformerLayer, documents: list[list[int]]) -> torch.Tensor:
    """Announce a micro-batch whose samples' documents begin at these positions; return where each position's does."""
    found = torch.zeros(BATCH, MODEL.seq_length, dtype=torch.int32)
    for row, firsts in zip(found, documents, strict=True):
        for first in firsts:
            row[first:] = first
    layer.step.announce(1, tuple(range(BATCH)), document_starts=found)
    return found


def by_formula(layer: TransformerLayer, x: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
    """The mixer's result [seq, batch, heads · value] as the paper has it, position by position and head by head."""
    a: Any = layer.attention
    r = MODEL.recurrent
    each, k, v = r.heads // r.key_heads, r.key_size, r.value_size
    rows = (x @ a.packed.weight.T).unflatten(-1, (r.key_heads, -1))
    weight, out = a.convolution[0].unflatten(0, (r.key_heads, -1)), []
    for b in range(BATCH):
        states, mixed = torch.zeros(r.heads, k, v, dtype=x.dtype), []
        for t in range(MODEL.seq_length):
            first, heads = int(starts[b, t]), []
            if first == t:
                states = torch.zeros_like(states)
            for group in range(r.key_heads):
                read = sum(weight[group, :, 3 - j] * rows[t - j, b, group, : 2 * k + each * v]
                           for j in range(4) if t - j >= first)
                assert isinstance(read, torch.Tensor)
                read = read * read.sigmoid()
                q, key, values = read[:k], read[k : 2 * k], read[2 * k :].view(each, v)
                q, key = (y / (y.square().sum() + 1e-6).sqrt() for y in (q, key))
                plain = rows[t, b, group, 2 * k + each * v :]
                gates, learn, forget = plain.split((each * v, each, each))
                for i in range(each):
                    head = group * each + i
                    rate = -a.own["decay"][head].exp() * (1 + (forget[i] + a.own["decay_bias"][head]).exp()).log()
                    kept = states[head] * rate.exp()
                    kept = kept + torch.outer(key, learn[i].sigmoid() * (values[i] - kept.T @ key))
                    states = torch.cat((states[:head], kept[None], states[head + 1 :]))
                    o = kept.T @ q / k**0.5
                    gate = gates[i * v : (i + 1) * v]
                    normed = o / (o.square().mean() + MODEL.norm_epsilon).sqrt() * a.own["norm"]
                    heads.append(normed * gate * gate.sigmoid())
            mixed.append(torch.cat(heads))
        out.append(torch.stack(mixed))
    return torch.stack(out, dim=1)


@pytest.mark.parametrize("documents", [[[0], [0]], [[0, 1, 8, 9, 20], [0, 7, 16]]], ids=["one", "several"])
def test_the_mixer_is_the_formula(documents: list[list[int]]) -> None:
    """With documents one token long, on a chunk's edge, and up to the last position; gradients too."""
    layer, x = layer_of(MODEL), inputs(MODEL)
    starts = starts_of(layer, documents)
    mixer: Any = layer.attention
    parameters = [*mixer.convolution, *mixer.own.values(), mixer.packed.weight]
    draws = torch.randn(MODEL.seq_length, BATCH, 42, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    found, want = [], []
    for kept, out in ((found, mixer.mix(mixer.packed(x))), (want, by_formula(layer, x, starts))):
        kept += [out, *torch.autograd.grad((out * draws).sum(), [x, *parameters])]
    for a, b in zip(found, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-11)


def test_the_mixer_is_what_transformers_computes() -> None:
    theirs = pytest.importorskip("transformers.models.qwen3_next.modeling_qwen3_next")
    r, layer, x = MODEL.recurrent, layer_of(MODEL), inputs(MODEL).detach()
    config = theirs.Qwen3NextConfig(
        hidden_size=32, linear_num_key_heads=3, linear_num_value_heads=6, linear_key_head_dim=5,
        linear_value_head_dim=7, linear_conv_kernel_dim=4, rms_norm_eps=MODEL.norm_epsilon,
    )
    module, mixer = theirs.Qwen3NextGatedDeltaNet(config, 0).double(), layer.attention
    rows = mixer.packed.weight.detach().unflatten(0, (3, -1)).split((2 * r.key_size + 28, 4), dim=1)
    channels = mixer.convolution[0].detach().unflatten(0, (3, -1)).split((5, 5, 14), dim=1)
    weights = {
        "in_proj_qkvz.weight": rows[0].flatten(0, 1), "in_proj_ba.weight": rows[1].flatten(0, 1),
        "conv1d.weight": torch.cat([c.flatten(0, 1) for c in channels])[:, None],
        "A_log": mixer.own["decay"].detach(), "dt_bias": mixer.own["decay_bias"].detach(),
        "norm.weight": mixer.own["norm"].detach(), "out_proj.weight": mixer.output.weight.detach(),
    }
    module.load_state_dict(weights)
    want = module(x.transpose(0, 1)).transpose(0, 1)
    found = mixer.output(mixer.mix(mixer.packed(x)))
    scale = float(want.detach().abs().max())
    torch.testing.assert_close(found, want, rtol=1e-4, atol=1e-5 * scale)  # it computes in fp32


def test_layers_follow_the_pattern() -> None:
    model = replace(MODEL, num_layers=5, mixer="attention", mixer_pattern=("gated_delta", "attention"))
    spec = model_spec(model)
    assert [layer.mixer.attention is None for layer in spec.layers] == [True, False, True, False, True]
    assert model.mixers == ("gated_delta", "attention")
    assert problems(replace(RUN, model=model)) == []


def test_decay_rates_start_uniform() -> None:
    found = initial_values(seed=0, name="w", init=InitSpec("decay rates"), shape=(4000,), offset=(0,), extent=(4000,))
    rates = found.exp()
    assert float(rates.min()) > 0 and float(rates.max()) < 16 and abs(float(rates.mean()) - 8) < 0.25
    later = initial_values(seed=0, name="w", init=InitSpec("decay rates"), shape=(4000,), offset=(9,), extent=(5,))
    assert torch.equal(later, found[9:14])


@pytest.mark.parametrize(("change", "said"), [
    ({"recurrent": replace(MODEL.recurrent, heads=7)},
     "model.recurrent.heads 7 does not divide by key_heads 3; each head of keys serves as many heads of values"),
    ({"mixer": "attention"}, "[model.recurrent] is of mixers with a state, and all layers have attention; leave it "
                             "out, or say model.mixer or model.mixer_pattern"),
    ({"mixer_pattern": ("attention",)},
     "model.mixer_pattern says the mixers of all layers; leave out model.mixer 'gated_delta'"),
    ({"qk_norm": True}, "model.qk_norm is of attention, and model.mixer 'gated_delta' does not read it; leave it out"),
])
def test_what_does_not_go_together_is_said(change: dict[str, Any], said: str) -> None:
    assert said in problems(replace(RUN, model=replace(MODEL, **change)))


def test_sizes_that_ranks_cannot_share_are_said() -> None:
    wide = replace(RUN, layout=LayoutConfig(tensor_parallel_size=2))
    assert problems(wide, world_size=2) == [
        "layout.tensor_parallel_size 2 does not divide model.recurrent.key_heads 3, which ranks share out; use 1 or 3"
    ]
    long = replace(
        RUN, model=replace(MODEL, seq_length=24, recurrent=replace(MODEL.recurrent, kernel=8)),
        layout=LayoutConfig(context_parallel_size=2),
    )
    assert problems(long, world_size=2) == [
        "model.seq_length 24 gives context-parallel ranks 6 neighbouring positions, and a convolution of "
        "model.recurrent.kernel 8 reads 7 before each; use fewer ranks"
    ]


@pytest.mark.parametrize(("change", "said"), [
    ({"precision": PrecisionConfig(fp8="tensorwise")},
     "precision.fp8 \"tensorwise\" is not built for model.mixer 'gated_delta'; use fp8 = \"none\""),
    ({"sparsity": SparsityConfig(method="2:4")},
     "a [sparsity] section is not built for model.mixer 'gated_delta'; use sparsity.method = \"none\""),
    ({"quantisation": QuantisationConfig(weights="int8")},
     "a [quantisation] section is not built for model.mixer 'gated_delta'; use quantisation.weights = \"none\""),
    ({"model": replace(MODEL, mup_base_size=16)},
     "model.mup_base_size 16 is not built for model.mixer 'gated_delta'; use 0"),
    ({"model": replace(MODEL, mixer="attention", mixer_pattern=("gated_delta", "attention"), shared_layers=2)},
     "model.shared_layers 2 is not built for model.mixer 'gated_delta'; use 1"),
    ({"fine_tuning": FineTuningConfig(method="lora")},
     "fine_tuning.method 'lora': projections of model.mixer 'gated_delta' have no adapters and stay frozen; name the "
     'matrices that are trained, e.g. targets = ["output", "up", "down"]'),
    ({"fine_tuning": FineTuningConfig(method="lora", targets=("query",))},
     "fine_tuning.targets 'query': this model has output, up, down"),
    ({"model": replace(MODEL, seq_length=4 * 1021), "data": DataConfig(synthetic=True, attention_documents="within"),
      "layout": LayoutConfig(context_parallel_size=2, cp_order="balanced")},
     'layout.cp_order "balanced" deals out blocks of 1 positions, and a convolution of model.recurrent.kernel 4 reads '
     '3 before each run; use cp_order = "zigzag"'),
])
def test_what_knows_attention_alone_is_said(change: dict[str, Any], said: str) -> None:
    run = replace(RUN, **change)
    found = problems(run, world_size=run.layout.context_parallel_size)
    assert any(text.startswith(said) for text in found), found


def test_the_layer_that_predicts_further_tokens_has_its_mixer_checked() -> None:
    model = replace(
        MODEL, num_layers=1, mixer="attention", mixer_pattern=("attention", "gated_delta"), mtp_layers=1,
        recurrent=replace(MODEL.recurrent, heads=7),
    )
    assert model.mixers == ("attention", "gated_delta")
    assert any("model.recurrent.heads 7 does not divide" in text for text in problems(replace(RUN, model=model)))


def test_short_texts_are_padded_to_what_a_convolution_reads() -> None:
    """On context-parallel ranks: a rank with fewer rows would fail, and the others wait for it."""
    model = InferenceModel.__new__(InferenceModel)
    model.model, chunks = MODEL, {"chunks": 4}
    model.stage = type("Stage", (), {"partition": type("Partition", (), chunks)})()  # type: ignore[assignment]
    assert [model.padded(n) for n in (1, 5, 12, 13)] == [12, 12, 12, 16]
    chunks["chunks"] = 1
    model.stage = type("Stage", (), {"partition": type("Partition", (), chunks)})()  # type: ignore[assignment]
    assert model.padded(1) == 1


def test_what_is_always_computed_again_counts_as_the_hardware_s() -> None:
    core = sum(layer.mixer.flops(MODEL.seq_length) for layer in model_spec(MODEL).layers)
    assert hardware_flops(MODEL, recompute="none") - model_flops(MODEL) == core > 0


def test_pruning_refuses_other_mixers_and_gates() -> None:
    with pytest.raises(ConfigError, match="model.mixer 'gated_delta': pruning knows attention alone"):
        check_sizes(MODEL, Sizes(layers=1), [0])
    gated = replace(MODEL, mixer="attention", recurrent=RecurrentConfig(), attention_gate=True)
    with pytest.raises(ConfigError, match="model.attention_gate: heads with gates are not pruned"):
        check_sizes(gated, Sizes(heads=2), [0, 1])
