"""Mixers from plugins: the example against a formula and transformers, its memory, what is refused; and an operation
that a plugin adds to a layer, in each place that reads the layer's list."""

from __future__ import annotations

import importlib
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_port.core.config.checks import problems
from megatron_port.core.config.loader import load
from megatron_port.core.config.model import MixerKind
from megatron_port.core.config.schema import BackendConfig, DataConfig, LayoutConfig, ModelConfig, RunConfig
from megatron_port.core.dist.groups import ParallelContext
from megatron_port.core.errors import CheckpointError, ConfigError
from megatron_port.core.layers.dropout import DropoutStream
from megatron_port.core.layers.step import StepSlot
from megatron_port.core.model.attention import SelfAttention
from megatron_port.core.model.build import BuildContext, BuildOptions
from megatron_port.core.model.decoder_spec import attention_spec, model_spec
from megatron_port.core.model.layers import TransformerLayer
from megatron_port.core.model.ops import Op
from megatron_port.core.model.spec import GroupedAttentionSpec
from megatron_port.core.registry import MIXERS
from megatron_port.ext.kernels.choose import choose_providers
from megatron_port.ext.memory.sites import SITES, LayerActivations
from megatron_port.ext.telemetry.flops import causal_flops, model_flops, parameter_count
from megatron_port.run.device import choose_device
from megatron_port.tools.inference.generation import Generator, Sampling
from megatron_port.tools.interop.hf_config import family_for
from megatron_port.tools.parity.emulation import RoundingEmulation
from megatron_port.tools.plan.case import Case, case_of, machine_of
from megatron_port.tools.plan.chunk import layer_bytes, site_bytes
from megatron_port.tools.plan.engines import Engine
from megatron_port.tools.plan.memory import stage_memory
from megatron_port.tools.plan.step import plan_step

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "mixer"
MODEL = ModelConfig(num_layers=2, hidden_size=64, num_attention_heads=4, seq_length=12, vocab_size=100)
BATCH = 2


@pytest.fixture
def delta() -> Iterator[ModelConfig]:
    """A model with the example's mixer, which is registered meanwhile."""
    sys.path.insert(0, str(EXAMPLE))
    try:
        module = importlib.import_module("gated_delta_net")
        MIXERS._added.setdefault("gated_delta_net", MixerKind(module.gated_delta_net))
        yield replace(MODEL, mixer="gated_delta_net")
    finally:
        sys.path.remove(str(EXAMPLE))
        MIXERS._added.pop("gated_delta_net", None)


def layer_of(
    model: ModelConfig, dtype: torch.dtype = torch.float64, activations: LayerActivations | None = None
) -> TransformerLayer:
    backend = BackendConfig(device="cpu", own_kernels="off", attention="math")
    stream = DropoutStream(0, torch.device("cpu"))
    step = StepSlot(stream)
    step.announce(1, tuple(range(BATCH)))
    build = BuildContext(
        model=model, layout=LayoutConfig(vocab_padding_multiple=1), ctx=ParallelContext.single("cpu"),
        providers=choose_providers(backend, choose_device("cpu"), dtype, engine="native"), step=step, dtype=dtype,
        options=BuildOptions(layer_activations={} if activations is None else {0: activations}),
    )
    layer = TransformerLayer(0, model_spec(model).layers[0], build)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for p in layer.parameters():
            p.copy_(torch.randn(p.shape, generator=generator) * 0.3 + (p.dim() == 1))
    return layer


def inputs(model: ModelConfig, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    shape = model.seq_length, BATCH, model.hidden_size
    return torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype).requires_grad_()


# ------------------------------------------------------------------------------------------------ the example


def of_heads(layer: TransformerLayer, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """q, k, v [batch, seq, heads, d], the logarithm of the decay and the rate [batch, seq, heads]."""
    a: Any = layer.attention
    rows = (x @ a.packed.weight.T).view(*x.shape[:2], MODEL.num_attention_heads, -1).transpose(0, 1)
    d = MODEL.head_size
    decay = -a.decay.exp() * torch.nn.functional.softplus(rows[..., 3 * d] + a.decay_bias)
    return rows[..., :d], rows[..., d : 2 * d], rows[..., 2 * d : 3 * d], decay, rows[..., 3 * d + 1].sigmoid()


def test_the_example_is_the_formula(delta: ModelConfig) -> None:
    """S = a (I - b k kᵀ) S + b k vᵀ, written as in the paper, for one head of one sample at a time."""
    layer, x = layer_of(delta), inputs(delta).detach()
    q, k, v, decay, rate = of_heads(layer, x)
    d = delta.head_size
    found = layer.attention.mix(layer.attention.packed(x)).view(*x.shape[:2], -1, d)
    for sample in range(BATCH):
        for head in range(delta.num_attention_heads):
            state = torch.zeros(d, d, dtype=torch.float64)
            for t in range(delta.seq_length):
                key, query = (y[sample, t, head] / y[sample, t, head].norm() for y in (k, q))
                b, value = rate[sample, t, head], v[sample, t, head]
                hold = torch.eye(d, dtype=torch.float64) - b * torch.outer(key, key)
                state = decay[sample, t, head].exp() * hold @ state + b * torch.outer(key, value)
                torch.testing.assert_close(found[t, sample, head], query @ state / d**0.5, rtol=1e-11, atol=1e-12)


def test_the_example_is_what_transformers_computes(delta: ModelConfig) -> None:
    theirs = pytest.importorskip("transformers.models.qwen3_next.modeling_qwen3_next")
    layer, x = layer_of(delta), inputs(delta).detach()
    q, k, v, decay, rate = of_heads(layer, x)
    want, _ = theirs.torch_recurrent_gated_delta_rule(q, k, v, decay, rate, use_qk_l2norm_in_kernel=True)
    found = layer.attention.mix(layer.attention.packed(x)).view(*x.shape[:2], -1, delta.head_size).transpose(0, 1)
    torch.testing.assert_close(found.float(), want.float(), rtol=1e-4, atol=1e-5)  # it computes in fp32


def kept_bytes(layer: TransformerLayer, x: torch.Tensor) -> int:
    """Bytes that autograd keeps of a forward pass, parameters left out."""
    own = {p.untyped_storage().data_ptr() for p in layer.parameters()}
    kept: dict[int, torch.Tensor] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.untyped_storage().data_ptr() not in own:
            kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        out = layer(x)
    assert out.shape == x.shape
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())


def planned(model: ModelConfig) -> Case:
    return Case(
        model=model, engine=Engine(name="native"), micro_batch=BATCH, flash=False, kernels="torch", dtype="fp32",
    )


def test_a_mixer_is_planned_from_its_own_statement(delta: ModelConfig) -> None:
    model = replace(delta, hidden_size=256)
    kept = kept_bytes(layer_of(model, torch.float32), inputs(model, torch.float32))
    assert layer_bytes(planned(model), 0) == pytest.approx(kept, rel=0.02)
    sites = site_bytes(planned(model))
    assert sum(sites.values()) == pytest.approx(kept, rel=0.02)
    rows = model.seq_length * BATCH * 4 * model.num_attention_heads
    assert (sites["qkv"], sites["core"]) == (rows * (3 * model.head_size + 2), rows * model.head_size)


def test_counts_and_seconds_follow_the_statement(delta: ModelConfig) -> None:
    per_layer = 4 * (3 * 16 + 2) * 64 - 4 * 3 * 16 * 64 - 3 * 64 + 8 - 64  # against GPT's: two rows a head, no biases
    assert parameter_count(delta) - parameter_count(MODEL) == 2 * per_layer
    assert causal_flops(delta) == model_flops(delta) and causal_flops(MODEL) < model_flops(MODEL)
    config = RunConfig(model=replace(delta, num_layers=4), data=DataConfig(synthetic=True), engine="native")
    frontier = load("clusters/frontier").config
    case, machine = case_of(config)[0], machine_of(frontier)
    assert stage_memory(case, machine, 0).allocated > 0 and plan_step(case, machine).seconds > 0


def test_planning_needs_no_torch() -> None:
    code = (
        "import sys; from megatron_port.core.config.loader import load; "
        "from megatron_port.tools.plan.case import case_of; "
        "from megatron_port.tools.plan.chunk import layer_bytes; "
        f"c = load('{EXAMPLE / 'gated_delta_net.toml'}').config; layer_bytes(case_of(c)[0], 0); "
        "print('torch' in sys.modules)"
    )
    path = f"{EXAMPLE.parents[1]}:{EXAMPLE}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env={"PYTHONPATH": path})
    assert done.stdout.strip() == "False", done.stderr


def test_what_a_mixer_cannot_do_is_refused_by_name(delta: ModelConfig) -> None:
    run = RunConfig(model=delta, data=DataConfig(synthetic=True), engine="native")
    assert problems(run) == []
    divided = replace(run, layout=LayoutConfig(context_parallel_size=2))
    assert problems(divided, world_size=2) == [
        "model.mixer 'gated_delta_net' does not divide positions over context-parallel ranks; set "
        "layout.context_parallel_size = 1"
    ]
    within = replace(run, data=DataConfig(synthetic=True, attention_documents="within"))
    assert "model.mixer 'gated_delta_net' does not stop at the start of a document; " \
        'set data.attention_documents = "across"' in problems(within)
    dropping = replace(run, model=replace(delta, attention_dropout=0.1, qk_norm=True))
    assert problems(dropping) == [
        f"model.{name} is of attention, and model.mixer 'gated_delta_net' does not read it; leave it out"
        for name in ("attention_dropout", "qk_norm")
    ]
    with pytest.raises(CheckpointError, match="model.mixer 'gated_delta_net' has no Hugging Face form"):
        family_for(delta)
    generator = Generator.__new__(Generator)
    generator.model = type("Model", (), {"model": delta})()
    with pytest.raises(ConfigError, match="'gated_delta_net' has no cache of earlier tokens, which generation needs"):
        generator.generate([[1]], Sampling())
    unknown = replace(run, model=replace(delta, mixer="hyena"))
    assert problems(unknown) == [f"model.mixer 'hyena' is unknown; use {', '.join(MIXERS.names)}"]
    pattern = replace(run, model=replace(MODEL, mixer_pattern=("attention", "hyena")))
    assert problems(pattern) == [f"model.mixer_pattern names 'hyena', which no mixer is; use {', '.join(MIXERS.names)}"]


# ------------------------------------------------------------------------------------------------ an added operation


class Squaring(SelfAttention):
    """Attention whose mixed values are squared before the output projection."""

    calls = 0

    def squared(self, mixed: torch.Tensor) -> torch.Tensor:
        Squaring.calls += 1
        return mixed.square()


@dataclass(frozen=True, kw_only=True)
class SquaredAttentionSpec(GroupedAttentionSpec):
    def ops(self, source: str) -> tuple[Op, ...]:
        heads, scores = super().ops(source)
        square = Op(
            kind="square", run="attention.squared", site="core", reads=("values",), writes=("mixed",),
            features=self.mixed_features, keeps=("values",),
        )
        return heads, replace(scores, writes=("values",)), square

    def build(self, layer: str, build: BuildContext) -> SelfAttention:
        return Squaring(layer, self, build)


@pytest.fixture
def squared() -> Iterator[ModelConfig]:
    def spec(model: ModelConfig, index: int) -> SquaredAttentionSpec:
        usual = attention_spec(model, index)
        assert isinstance(usual, GroupedAttentionSpec)
        return SquaredAttentionSpec(**vars(usual))

    MIXERS._added["squared"] = MixerKind(spec)
    Squaring.calls = 0
    yield replace(MODEL, mixer="squared")
    del MIXERS._added["squared"]


def gradients(layer: TransformerLayer, x: torch.Tensor) -> list[torch.Tensor]:
    layer(x).square().sum().backward()
    return [g for g in (x.grad, *(p.grad for p in layer.parameters())) if g is not None]


def test_an_added_operation_is_run_and_recomputed(squared: ModelConfig) -> None:
    plain, layer, x = layer_of(MODEL), layer_of(squared), inputs(MODEL).detach()
    assert plain.norm1 is not None and plain.norm2 is not None
    out, mixed = layer(x), plain.attention.attend_to(*plain.attention.core_arguments(plain.norm1(x)))
    sum_ = x + plain.attention.output(mixed.square()) + plain.attention.output.bias
    torch.testing.assert_close(out, sum_ + plain.mlp(plain.norm2(sum_)) + plain.mlp.bias)
    want, calls = gradients(layer_of(squared), inputs(squared)), Squaring.calls
    for sites in (("core",), ("qkv", "core"), ("norm1", "qkv", "core", "residual", "norm2", "hidden", "activation")):
        before = Squaring.calls
        dropped = LayerActivations(dict.fromkeys(sites, "recompute"))
        again = gradients(layer_of(squared, activations=dropped), inputs(squared))
        assert all(torch.equal(a, b) for a, b in zip(again, want, strict=True)), sites
        assert Squaring.calls == before + 2 and calls == 2  # its result was dropped and made again
    swapped = gradients(layer_of(squared, activations=LayerActivations(dict.fromkeys(SITES, "swap"))), inputs(squared))
    assert all(torch.equal(a, b) for a, b in zip(swapped, want, strict=True))


def test_an_added_operation_is_planned(squared: ModelConfig) -> None:
    more = layer_bytes(planned(squared), 0) - layer_bytes(planned(MODEL), 0)
    wanted = [kept_bytes(layer_of(m, torch.float32), inputs(m, torch.float32)) for m in (squared, MODEL)]
    assert more == wanted[0] - wanted[1] == MODEL.seq_length * BATCH * MODEL.hidden_size * 4


def test_an_added_operation_is_run_where_rounding_is_emulated(squared: ModelConfig) -> None:
    layer, x = layer_of(squared, torch.bfloat16), inputs(squared, torch.bfloat16).detach()
    plain = layer(x)
    RoundingEmulation(tensor_parallel_size=2, sequence_parallel=True).emulate_rounding(layer)
    calls, cut = Squaring.calls, layer(x)
    assert Squaring.calls == calls + 1 and not torch.equal(cut, plain)
    torch.testing.assert_close(cut, plain, rtol=0.1, atol=0.3)
