"""Megatron-core's own GPTModel on tp 2, with our weights: loss and every gradient by name; and its routers.

Megatron is written for CUDA and float32; here both sides compute in fp64 on the CPU, so that what differs is not
rounding. What it hard-codes is redirected: the device "cuda" to the CPU, ``Tensor.float()`` of fp64 to nothing.
"""

from __future__ import annotations

import importlib.util
import warnings
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hf_models import relative
from pool import RankPool
from torch.overrides import TorchFunctionMode

from megatron_port.core.config.model import MoEConfig
from megatron_port.core.config.schema import BatchConfig, LayoutConfig, ModelConfig, PrecisionConfig, RunConfig
from megatron_port.core.data.batch import MicroBatch
from megatron_port.core.dist.counter import key_of
from megatron_port.core.dist.groups import ParallelContext
from megatron_port.core.dist.mesh import Topology
from megatron_port.core.dist.positions import WHOLE_SEQUENCE
from megatron_port.core.dist.record import StateReader
from megatron_port.core.engine.native import NativeEngine
from megatron_port.core.layers.dropout import DropoutStream
from megatron_port.core.layers.providers import torch_providers
from megatron_port.core.layers.step import StepShared, StepSlot, Tallies
from megatron_port.core.model.build import BuildContext
from megatron_port.core.model.decoder_spec import model_spec
from megatron_port.core.model.shapes import parameter_shapes
from megatron_port.core.optim.gradients import LossScaler
from megatron_port.ext.experts.router import Router, tally_specs
from megatron_port.ext.experts.spec import moe_of
from megatron_port.run.build import build_engine

BASE: dict[str, Any] = {
    "num_layers": 3, "hidden_size": 32, "num_attention_heads": 4, "ffn_hidden_size": 48, "seq_length": 48,
    "vocab_size": 64,
}
LLAMA = {"position_embedding": "rope", "normalization": "rmsnorm", "activation": "swiglu", "add_bias": False,
         "tie_embeddings": False}
SHAPES: dict[str, tuple[dict[str, Any], bool]] = {
    "gpt-2": ({"activation": "gelu_tanh"}, False),
    "gpt-2, sequence parallel, odd vocabulary": ({"vocab_size": 53}, True),
    "llama, grouped queries": ({**LLAMA, "num_query_groups": 2, "rope_theta": 500.0}, False),
    "llama, sequence parallel, odd vocabulary": ({**LLAMA, "vocab_size": 61, "norm_epsilon": 1e-3}, True),
    "rope, biases, layernorm, untied, heads wider than hidden": (
        {"position_embedding": "rope", "tie_embeddings": False, "num_query_groups": 2, "head_dim": 12}, True,
    ),
}
"""Name → (model, sequence parallelism)."""
BOUND = 1e-11
"""Both sides' rope tables are float32 and equal to the bit, so nothing but fp64's rounding is left: 2e-14 measured."""


def config_of(model: dict[str, Any], sequence_parallel: bool) -> RunConfig:
    return RunConfig(
        engine="native", model=ModelConfig(**{**BASE, **model}), precision=PrecisionConfig(dtype="fp64"),
        layout=LayoutConfig(tensor_parallel_size=2, sequence_parallel=sequence_parallel, vocab_padding_multiple=4),
        batch=BatchConfig(micro_batch_size=3, global_batch_size=3),
    )


def reader(config: RunConfig) -> StateReader:
    """Weights by name: all of them, biases and norms too, far from where they start."""
    whole = parameter_shapes(config.model)

    def read(name: str, kind: str, offset: Any, shape: Any, /, *, out: Any = None) -> torch.Tensor:
        generator = torch.Generator().manual_seed(key_of(name) % (1 << 40))
        drawn = torch.randn(whole[name], generator=generator, dtype=torch.float64)
        drawn = 1 + 0.3 * drawn if "norm" in name and name.endswith("weight") else 0.15 * drawn
        return drawn[tuple(slice(o, o + n) for o, n in zip(offset, shape))]

    return read


class InFp64OnCpu(TorchFunctionMode):
    """Makes on the CPU what is asked for on "cuda", and keeps fp64 where it is told to become float32."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = "cpu"
        if func is torch.Tensor.float and args[0].dtype == torch.float64:
            return args[0]
        return func(*args, **kwargs)


class Norm:
    """torch's norms, as Megatron's specification builds them; its own refuse sequence parallelism without apex."""

    def __new__(cls, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> Any:
        kind = torch.nn.RMSNorm if config.normalization == "RMSNorm" else torch.nn.LayerNorm
        made = kind(hidden_size, eps=eps)
        for p in made.parameters():
            p.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]  # its reduction asks
        return made


def megatron_model(config: RunConfig) -> Any:
    """A GPTModel of its local layers."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
    from megatron.core.transformer.transformer_config import TransformerConfig

    m = config.model
    activation = {"swiglu": torch.nn.functional.silu, "gelu": torch.nn.functional.gelu}.get(
        m.activation, lambda x: torch.nn.functional.gelu(x, approximate="tanh")
    )
    theirs = TransformerConfig(
        num_layers=m.num_layers, hidden_size=m.hidden_size, num_attention_heads=m.num_attention_heads,
        num_query_groups=m.kv_heads, kv_channels=m.head_size, ffn_hidden_size=m.ffn_size,
        layernorm_epsilon=m.norm_epsilon, hidden_dropout=0.0, attention_dropout=0.0, params_dtype=torch.float64,
        add_bias_linear=m.add_bias, gated_linear_unit=m.activation == "swiglu", activation_func=activation,
        normalization="RMSNorm" if m.normalization == "rmsnorm" else "LayerNorm", tensor_model_parallel_size=2,
        sequence_parallel=config.layout.sequence_parallel, bias_dropout_fusion=False, masked_softmax_fusion=False,
        bias_activation_fusion=False, use_cpu_initialization=True, perform_initialization=False,
        gradient_accumulation_fusion=False, apply_rope_fusion=False,
    )
    layer = get_gpt_layer_local_spec()
    layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = Norm
    padded = -(-m.vocab_size // 8) * 8
    return GPTModel(
        config=theirs, transformer_layer_spec=TransformerBlockSubmodules([layer] * m.num_layers, layer_norm=Norm),
        vocab_size=padded, max_sequence_length=m.seq_length, parallel_output=True,
        position_embedding_type="learned_absolute" if m.position_embedding == "learned" else "rope",
        rotary_base=int(m.rope_theta), rotary_percent=m.rotary_percent,
        share_embeddings_and_output_weights=m.tie_embeddings,
    ).double()


NAMES = {
    "embedding.word.weight": "embedding.word_embeddings.weight", "head.weight": "output_layer.weight",
    "embedding.position.weight": "embedding.position_embeddings.weight",
}
INSIDE = {"attention.qkv": "self_attention.linear_qkv", "attention.output": "self_attention.linear_proj",
          "mlp.up": "mlp.linear_fc1", "mlp.down": "mlp.linear_fc2", "norm1": "input_layernorm",
          "norm2": "pre_mlp_layernorm"}


def megatron_name(name: str) -> str:
    """Its name of a parameter of ours."""
    if name in NAMES:
        return NAMES[name]
    module, _, kind = name.rpartition(".")
    if module == "final_norm":
        return f"decoder.final_layernorm.{kind}"
    _, index, part = module.split(".", 2)
    return f"decoder.layers.{index}.{INSIDE[part]}.{kind}"


def batch_of(config: RunConfig) -> tuple[torch.Tensor, torch.Tensor]:
    """(tokens [3, seq + 1], mask [3, seq])"""
    generator = torch.Generator().manual_seed(7)
    m = config.model
    tokens = torch.randint(0, m.vocab_size, (3, m.seq_length + 1), generator=generator)
    return tokens, (torch.rand(3, m.seq_length, generator=generator) < 0.7).float()


Result = tuple[float, dict[str, torch.Tensor]]


def ours(config: RunConfig, ctx: ParallelContext) -> tuple[Result, NativeEngine]:
    """Loss and this rank's gradients by name."""
    engine = build_engine(config, ctx, torch_providers(), initialise=False)
    assert isinstance(engine, NativeEngine)
    engine.load_weights(reader(config))
    found: dict[str, torch.Tensor] = {}
    engine.on_gradients = lambda pairs: found.update({r.name: g.clone() for r, g in pairs})
    tokens, mask = batch_of(config)
    result = engine.train_step(
        [MicroBatch((0, 1, 2), tokens=tokens[:, :-1], labels=tokens[:, 1:], loss_mask=mask)], step=0, lr=0.0
    )
    return (result.loss, found), engine


def theirs(config: RunConfig, weights: dict[str, torch.Tensor]) -> Result:
    """The same of Megatron's model, with its own reduction of what is partial under sequence parallelism."""
    from megatron.core.distributed.finalize_model_grads import _allreduce_non_tensor_model_parallel_grads
    from megatron.core.tensor_parallel import vocab_parallel_cross_entropy

    model, m = megatron_model(config), config.model
    parameters = dict(model.named_parameters())
    names = {name: megatron_name(name) for name in weights}
    assert set(names.values()) == set(parameters), set(names.values()) ^ set(parameters)
    with torch.no_grad():
        for name, value in weights.items():
            parameters[names[name]].copy_(value.reshape(parameters[names[name]].shape))
    tokens, mask = batch_of(config)
    positions = torch.arange(m.seq_length)[None].expand(3, -1)
    hidden = torch.ones(1, 1, m.seq_length, m.seq_length, dtype=torch.bool).triu(1)
    if m.vocab_size % 8 == 0:
        losses = model(tokens[:, :-1], positions, hidden, labels=tokens[:, 1:].contiguous())
    else:  # its padding takes part in the softmax; ours does not, so it is masked between its two functions
        logits = model(tokens[:, :-1], positions, hidden).transpose(0, 1)
        first = dist.get_rank() * logits.shape[-1]
        padding = torch.arange(first, first + logits.shape[-1]) >= m.vocab_size
        losses = vocab_parallel_cross_entropy(
            logits.masked_fill(padding, -1e30).contiguous(), tokens[:, 1:].t().contiguous()
        ).t()
    loss = (losses * mask.double()).sum() / mask.sum().double()
    loss.backward()
    model.ddp_config = SimpleNamespace(use_megatron_fsdp=False)
    _allreduce_non_tensor_model_parallel_grads([model], model.config)
    return float(loss.detach()), {name: parameters[names[name]].grad for name in weights}


def gradient_deviation(mine: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> dict[str, float]:
    """max |Δ| ÷ (rms of that gradient + 1e-3 × rms of all), by name (docs/parity.md)."""
    everything = torch.cat([g.reshape(-1) for g in other.values()])
    overall = float(everything.square().mean().sqrt())
    return {
        name: float((mine[name].reshape(-1) - g.reshape(-1)).abs().max()) / (float(g.square().mean().sqrt())
                                                                              + 1e-3 * overall)
        for name, g in other.items()
    }


def compared(shapes: dict[str, tuple[dict[str, Any], bool]]) -> dict[str, tuple[float, dict[str, float]]]:
    """Of each shape: deviation of the loss, and of each gradient by name."""
    warnings.simplefilter("ignore")  # on what is not installed
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import random

    torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment,return-value]
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    random.get_cuda_rng_tracker().fork = nullcontext  # nothing is dropped
    ctx = ParallelContext.create(Topology(tp=2), "cpu")
    out = {}
    for name, (model, sequence_parallel) in shapes.items():
        config = config_of(model, sequence_parallel)
        (loss, gradients), engine = ours(config, ctx)
        weights = {record.name: p.detach().clone() for record, p in engine.named_parameters()}
        with InFp64OnCpu():
            their_loss, their_gradients = theirs(config, weights)
        out[name] = abs(loss - their_loss) / their_loss, gradient_deviation(gradients, their_gradients)
    ctx.close()
    return out


@pytest.mark.skipif(not importlib.util.find_spec("megatron"), reason="megatron-core is not installed")
def test_gpt_models_are_megatron_cores(ranks: RankPool) -> None:
    results = ranks.run(2, compared, SHAPES, fresh=True)
    for found in results:
        assert list(found) == list(SHAPES)
        for name, (loss, gradients) in found.items():
            assert loss < BOUND, f"{name}: loss off by {loss:.1e}"
            bad = {parameter: f"{d:.1e}" for parameter, d in gradients.items() if not d < BOUND}
            assert not bad, f"{name}: {bad}"
            assert set(gradients) == set(parameter_shapes(config_of(*SHAPES[name]).model))


ROUTERS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "mixtral": ({"top_k": 2}, {}),
    "olmoe": ({"top_k": 3, "normalize": False}, {"use_pre_softmax": True}),
    "deepseek-v2": (
        {"top_k": 3, "normalize": False, "scale": 4.0, "groups": 4, "top_groups": 3, "group_score": "max"},
        {"use_pre_softmax": True, "num_groups": 4, "group_topk": 3, "scaling_factor": 4.0},
    ),
    "deepseek-v3": (
        {"top_k": 4, "score": "sigmoid", "scale": 2.5, "groups": 4, "top_groups": 2, "balance_bias": True},
        {"score_function": "sigmoid", "num_groups": 4, "group_topk": 2, "scaling_factor": 2.5},
    ),
}
"""Name → (our model.moe, arguments of their function)."""


def balance_of(probs: torch.Tensor, routed: torch.Tensor, moe: MoEConfig) -> torch.Tensor:
    """Megatron's balance loss of [positions, samples, E] without its factor, summed over samples."""
    from megatron.core.transformer.moe.moe_utils import switch_load_balancing_loss_func

    samples = zip(probs.unbind(1), routed.unbind(1))
    return torch.stack([
        switch_load_balancing_loss_func(p, r.sum(0), len(p), moe.top_k, moe.num_experts, 1.0) for p, r in samples
    ]).sum()


@pytest.mark.skipif(not importlib.util.find_spec("megatron"), reason="megatron-core is not installed")
@pytest.mark.parametrize("name", ROUTERS)
def test_routers_are_megatron_cores(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Experts equal token for token; weights, both losses, the gradient of the router, and the bias after a step."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from megatron.core.transformer.moe import moe_utils as theirs
    moe = MoEConfig(num_experts=16, balance_loss="sequence", balance_weight=0.3, z_weight=0.2, **ROUTERS[name][0])
    model = ModelConfig(**BASE, moe=moe)
    step, tallies = StepSlot(DropoutStream(0, torch.device("cpu"))), Tallies(tally_specs(3, 16), torch.device("cpu"))
    step.announce(0, (0, 1, 2), StepShared(tallies=tallies))
    build = BuildContext(model=model, layout=LayoutConfig(), ctx=ParallelContext.single(), providers=torch_providers(),
                         step=step, dtype=torch.float64)
    spec = moe_of(model_spec(model).layers[1])
    assert spec is not None
    router, generator = Router("layers.1", 1, spec, build, WHOLE_SEQUENCE), torch.Generator().manual_seed(3)
    with torch.no_grad():
        router.weight.copy_(torch.randn(16, 32, generator=generator))
    arguments, bias = dict(ROUTERS[name][1]), torch.zeros(16)
    if router.balance_bias is not None:
        router.balance_bias.copy_(bias := 0.1 * torch.randn(16, generator=generator))
        arguments["expert_bias"] = bias
    x = torch.randn(48, 3, 32, generator=generator, dtype=torch.float64)
    route = router(x)
    (0.0 * route.weights.sum()).backward()  # what is left is of the two losses

    weight = router.weight.detach().clone().requires_grad_()
    logits = (x @ weight.t()).flatten(0, 1)
    with InFp64OnCpu():
        probs, routed = theirs.topk_routing_with_score_function(logits, moe.top_k, **arguments)
        by_score, shares = theirs.compute_routing_scores_for_aux_loss(logits, moe.top_k, moe.score)
        z = theirs.z_loss_func(logits, 1.0)
    counted = by_score if moe.balance_bias else routed
    balance = balance_of(shares.unflatten(0, (48, 3)), counted.unflatten(0, (48, 3)), moe)
    (0.3 * balance + 0.2 * 3 * z).backward()
    assert torch.equal(route.experts, routed.nonzero()[:, 1].view(-1, moe.top_k))
    assert relative(route.weights, probs.gather(1, route.experts)) < 1e-6
    totals = tallies.totals(None)
    assert float(totals["balance_loss"][1]) == pytest.approx(float(balance), rel=1e-6)
    assert float(totals["z_loss"][1]) == pytest.approx(3 * 48 * float(z), rel=1e-6)
    assert router.weight.grad is not None and weight.grad is not None
    assert relative(router.weight.grad, weight.grad) < 1e-6
    router.after_update(totals, torch.tensor(0.0))
    if router.balance_bias is not None:
        monkeypatch.setattr(theirs.parallel_state, "get_tensor_and_data_parallel_group", lambda **_: None)
        monkeypatch.setattr(dist, "all_reduce", lambda *_, **__: None)
        assert torch.equal(router.balance_bias, theirs.get_updated_expert_bias(routed.sum(0), bias, moe.bias_rate))


@pytest.mark.skipif(not importlib.util.find_spec("megatron"), reason="megatron-core is not installed")
@pytest.mark.parametrize(("hysteresis", "window", "least"), [(1, 1, 1.0), (2, 3, 1.0), (3, 2, 256.0), (2, 1, 64.0)])
def test_the_loss_scale_is_megatron_cores(hysteresis: int, window: int, least: float) -> None:
    """Step by step over 200 steps, of which a third overflow, several in a row among them."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from megatron.core.optimizer.grad_scaler import DynamicGradScaler
    with InFp64OnCpu():
        theirs = DynamicGradScaler(1024.0, least, 2.0, 0.5, window, hysteresis)
    ours = LossScaler(PrecisionConfig(
        dtype="fp16", initial_loss_scale=1024.0, loss_scale_window=window, min_loss_scale=least,
        loss_scale_hysteresis=hysteresis, max_skipped_steps=1000,
    ))
    drawn = (torch.rand(200, generator=torch.Generator().manual_seed(window)) < 0.33).tolist()
    for step, overflow in enumerate(drawn):
        theirs.update(overflow)
        ours.account(1.0, float("inf") if overflow else 1.0, applied=not overflow)
        assert ours.scale == float(theirs.scale), step
