"""Sites of a layer: what each keeps on a real layer against the planner, and gradients when any of them is dropped."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatron_port.core.config.model import RecurrentConfig
from megatron_port.core.config.schema import BackendConfig, LayoutConfig, ModelConfig
from megatron_port.core.dist.groups import ParallelContext
from megatron_port.core.layers.dropout import DropoutStream
from megatron_port.core.layers.step import StepSlot
from megatron_port.core.model.build import BuildContext, BuildOptions
from megatron_port.core.model.decoder_spec import model_spec
from megatron_port.core.model.layers import TransformerLayer
from megatron_port.core.model.ops import Site
from megatron_port.ext.kernels.choose import choose_providers
from megatron_port.ext.memory.site_tape import SiteTape
from megatron_port.ext.memory.sites import RECOMPUTED, REPLICATED, SITES, Decision, LayerActivations, decided
from megatron_port.run.device import choose_device
from megatron_port.tools.plan.case import Case
from megatron_port.tools.plan.chunk import site_bytes
from megatron_port.tools.plan.engines import Engine

LLAMA: dict[str, Any] = {
    "activation": "swiglu", "normalization": "rmsnorm", "position_embedding": "rope", "add_bias": False,
    "tie_embeddings": False, "num_query_groups": 2,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "gpt": {}, "gpt, dropout": {"hidden_dropout": 0.1, "attention_dropout": 0.1}, "llama": LLAMA,
    "gpt, relu2": {"activation": "relu2"}, "llama, relu2": {**LLAMA, "activation": "relu2"},
    "qwen3": {**LLAMA, "qk_norm": True}, "neox": {"parallel_residual": True, "position_embedding": "rope"},
    "llama, dropout": {**LLAMA, "hidden_dropout": 0.1},
    "latents": {
        **LLAMA, "num_query_groups": 0, "head_dim": 24, "kv_lora_rank": 32, "q_lora_rank": 48, "qk_rope_head_dim": 8,
        "v_head_dim": 16,
    },
    "llama, masked": {
        **LLAMA, "sliding_window": 20, "attention_sinks": True, "attention_softcap": 2.0,
        "activation": "swiglu_clamped",
    },
    "olmo2": {**LLAMA, "norm_placement": "post", "qk_norm": True, "qk_norm_over": "projection", "add_bias": True},
    "gemma": {**LLAMA, "norm_placement": "sandwich", "norm_zero_centered": True, "activation": "geglu_tanh"},
    "gated": {**LLAMA, "attention_gate": True, "qk_norm": True}, "gated, dropout": {
        "attention_gate": True, "hidden_dropout": 0.1, "attention_dropout": 0.1,
    },
    "beside": {
        **LLAMA, "mixer": "attention_mamba2", "mlp_multipliers": (0.5, 0.8), "recurrent": RecurrentConfig(
            heads=4, key_heads=2, key_size=24, value_size=40, gated_norm="none", attention_multiplier=0.7,
        ),
    },
    "gpt-j": {"parallel_residual": True, "shared_norm": True, "hidden_dropout": 0.1},
}
SEQ, BATCH = 64, 2
STARTS = (torch.arange(SEQ, dtype=torch.int32) // 24 * 24).repeat(BATCH, 1)
"""Documents of the micro-batch under dropout; another one is in flight when operations run again."""


def model_of(family: str, width: int = 64) -> ModelConfig:
    return ModelConfig(
        num_layers=1, hidden_size=width, num_attention_heads=4, seq_length=SEQ, vocab_size=100, **FAMILIES[family]
    )


def make_layer(
    family: str, own: bool, dtype: torch.dtype, activations: LayerActivations, width: int = 64
) -> TransformerLayer:
    model = model_of(family, width)
    backend = BackendConfig(
        device="cpu", own_kernels="on" if own else "off", attention="own" if own else "math"
    )
    providers = choose_providers(
        backend, choose_device("cpu"), dtype, engine="native", attention_dropout=model.attention_dropout
    )
    stream = DropoutStream(0, torch.device("cpu"))
    step = StepSlot(stream)
    step.announce(1, tuple(range(BATCH)), document_starts=STARTS if "dropout" in family else None)
    build = BuildContext(
        model=model, layout=LayoutConfig(vocab_padding_multiple=1), ctx=ParallelContext.single("cpu"),
        providers=providers, step=step, dtype=dtype,
        options=BuildOptions(layer_activations={0: activations}),
    )
    layer = TransformerLayer(0, model_spec(model).layers[0], build)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for p in layer.parameters():
            p.copy_(torch.randn(p.shape, generator=generator) * 0.1 + (p.dim() == 1))
    return layer


def source(dtype: torch.dtype, width: int = 64) -> torch.Tensor:
    return torch.randn(SEQ, BATCH, width, generator=torch.Generator().manual_seed(1)).to(dtype).requires_grad_()


def gradients(layer: TransformerLayer, dtype: torch.dtype) -> list[torch.Tensor]:
    """Result, gradient of the input and of every parameter, with another micro-batch in flight at the backward pass."""
    x = source(dtype)
    y = layer(x)
    assert layer.parking.swap is not None
    layer.parking.swap.let_go()  # as the next layer's forward pass does
    layer.step.announce(2, tuple(range(50, 50 + BATCH)))
    y.backward(torch.randn(y.shape, generator=torch.Generator().manual_seed(2)).to(dtype))
    assert x.grad is not None
    found = [p.grad for p in layer.parameters()]
    assert all(g is not None for g in found)
    return [y.detach(), x.grad, *(g for g in found if g is not None)]


def mixed(seed: int) -> LayerActivations:
    """Every site kept, recomputed, swapped or partitioned."""
    r = random.Random(seed)
    possible: dict[Site, list[Decision]] = {site: ["keep", "swap", "swap"] for site in SITES}
    for site in RECOMPUTED:
        possible[site].append("recompute")
    for site in REPLICATED:
        possible[site].append("partition")
    return LayerActivations({site: r.choice(ways) for site, ways in possible.items()})


def drops(sites: Any) -> LayerActivations:
    return LayerActivations(dict.fromkeys(sites, "recompute"))


def some_sets() -> list[tuple[Site, ...]]:
    """Every site alone, all of them, and a few sets."""
    r = random.Random(4)
    return [*((site,) for site in RECOMPUTED), RECOMPUTED,
            *(tuple(s for s in RECOMPUTED if r.random() < 0.5) for _ in range(5))]


@pytest.mark.parametrize(("own", "dtype"), [
    pytest.param(False, torch.float32, id="torch-fp32"), pytest.param(True, torch.bfloat16, id="own-bf16"),
    pytest.param(False, torch.bfloat16, id="torch-bf16", marks=pytest.mark.slow),
    pytest.param(True, torch.float32, id="own-fp32", marks=pytest.mark.slow),
])
@pytest.mark.parametrize("family", FAMILIES)
def test_no_bit_changes_whatever_is_dropped(family: str, own: bool, dtype: torch.dtype) -> None:
    wanted = gradients(make_layer(family, own, dtype, LayerActivations()), dtype)
    for sites in some_sets():
        got = gradients(make_layer(family, own, dtype, drops(sites)), dtype)
        assert all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True)), sites
    everything = LayerActivations(dict.fromkeys(SITES, "swap"))
    for activations in (everything, *map(mixed, range(6))):
        layer = make_layer(family, own, dtype, activations)
        got = gradients(layer, dtype)
        assert all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True)), activations
        # Without a norm of the input, some of these sets swap nothing of a layer that starts a stage.
        assert layer.parking.swap is not None and (layer.parking.swap.moved > 0 or layer.norm1 is None)


# ---------------------------------------------------------------- bytes


def constants(layer: TransformerLayer) -> set[int]:
    """Addresses of parameters and of the rotary tables, which all layers share."""
    tensors: list[torch.Tensor] = list(layer.parameters())
    if layer.attention.rotary is not None:
        tensors += layer.attention.rotary.rows(layer.attention._positions(SEQ), torch.device("cpu"))
    return {tensor.untyped_storage().data_ptr() for tensor in tensors}


class Counting:
    """Bytes of a layer's forward pass that autograd keeps, parameters left out, by who made the memory."""

    def __init__(self, layer: TransformerLayer) -> None:
        self.own = constants(layer)
        self.kept: dict[int, tuple[int, torch.Tensor]] = {}

    def pack(self, tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self.own:
            self.kept[storage.data_ptr()] = (storage.nbytes(), tensor)
        return tensor


WIDE = 512
"""Width at which a row's statistics are a small part of it."""


def by_site(family: str, own: bool) -> dict[Site, int]:
    """Bytes of each site: a storage is of the operation during which it was seen first, as result or as saved."""
    layer = make_layer(family, own, torch.bfloat16, LayerActivations(), WIDE)
    counting = Counting(layer)
    owner: dict[int, Site] = {}
    x = source(torch.bfloat16, WIDE)
    owner[x.untyped_storage().data_ptr()] = "input"
    results = [x]  # alive, so that no address has a second owner

    class Tape:
        """Operations run as they are, each watched."""

        def run(self, site: Site, function: Callable[..., Any], *inputs: torch.Tensor) -> Any:
            known = set(counting.kept)
            with torch.autograd.graph.saved_tensors_hooks(counting.pack, lambda t: t):
                out = function(*inputs)
            for tensor in out if isinstance(out, tuple) else (out,):
                owner.setdefault(tensor.untyped_storage().data_ptr(), site)
                results.append(tensor)
            for address in set(counting.kept) - known:
                owner.setdefault(address, site)
            return out

        def run_fused(self, function: Any, inputs: Any, made_by: Any) -> Any:
            if len(inputs) == 1:  # a norm
                site: Site = "norm2" if "core" in owner.values() else "norm1"
                return self.run(site, function, *inputs)
            total, y = self.run("residual", function, *inputs)
            owner[y.untyped_storage().data_ptr()] = "norm2"
            return total, y

    layer.program.run(layer, x, tape=Tape())  # type: ignore[arg-type]
    out: dict[Site, int] = dict.fromkeys(SITES, 0)
    for address, (size, _) in counting.kept.items():
        out[owner[address]] += size
    return out


def planned(family: str, own: bool) -> Case:
    return Case(
        model=model_of(family, WIDE), engine=Engine(name="native"), micro_batch=BATCH, flash=own,
        kernels="own" if own else "torch", dtype="bf16",
    )


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("own", [False, True], ids=["torch", "own"])
def test_what_each_site_really_keeps(family: str, own: bool) -> None:
    """Within 2 % of the layer; a norm's statistics and a kernel's keys are left out by the planner."""
    measured = by_site(family, own)
    expected = site_bytes(planned(family, own))
    whole = sum(measured.values())
    # torch's ops may keep a copy in place of their argument, which the planner counts as the argument.
    together: list[tuple[Site, ...]] = [(site,) for site in SITES] if own else [
        ("input", "norm1"), ("qkv",), ("core",), ("residual", "norm2"), ("hidden", "activation"), ("output",)
    ]
    for sites in together:
        off = sum(measured[site] - expected[site] for site in sites)
        assert abs(off) <= 0.01 * whole, sites
    assert sum(expected.values()) == pytest.approx(whole, rel=0.02)


def held(family: str, own: bool, sites: tuple[Site, ...]) -> int:
    """Bytes of tensors, parameters left out, that a layer's graph holds between forward and backward."""
    layer = make_layer(family, own, torch.bfloat16, drops(sites), WIDE)
    own_memory = constants(layer)
    leaf = source(torch.bfloat16, WIDE)
    own_memory.add(leaf.untyped_storage().data_ptr())
    made: dict[int, Any] = {}

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = function(*args, **(kwargs or {}))
            for tensor in tree_leaves(out):
                if isinstance(tensor, torch.Tensor):
                    storage = tensor.untyped_storage()
                    if storage.data_ptr() not in own_memory:
                        made[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
            return out

    with Watch():
        y = layer(leaf * 1.0)
    output = y.untyped_storage()._cdata
    return sum(size for key, (ref, size) in made.items() if not ref.expired() and key != output)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("own", [False, True], ids=["torch", "own"])
def test_what_is_dropped_is_freed(family: str, own: bool) -> None:
    case = planned(family, own)
    whole = held(family, own, ())
    freed = site_bytes(case)
    apart: list[tuple[Site, ...]] = [("qkv",), ("core",), ("residual",), ("hidden",)]
    if not own:  # an argument of which only a copy was kept has to be kept itself, or be dropped too
        apart = [("qkv", "core"), ("norm1", "residual", "norm2"), ("hidden", "activation")]
    for sites in [*apart, ("norm1",), ("norm2",), ("activation",), RECOMPUTED]:
        expected = sum(freed[site] for site in sites)
        assert whole - held(family, own, sites) == pytest.approx(expected, abs=0.02 * whole), sites


def test_an_operation_that_runs_again_is_told_so() -> None:
    """A module adds to the step's sums once per micro-batch: not while recomputing."""
    slot, seen = StepSlot(DropoutStream(0, torch.device("cpu"))), []
    slot.announce(1, (7, 8))

    def function(x: torch.Tensor) -> torch.Tensor:
        assert slot.current is not None and slot.stream.samples is slot.current.samples
        seen.append((slot.current.sample_ids, slot.current.recomputing, slot.stream.enabled))
        return torch.tanh(x)

    x = torch.ones(3, requires_grad=True)
    tape = SiteTape(decided(["activation"]), slot, x)
    y = tape.run("activation", function, x)
    tape.close()
    slot.announce(1, (9, 10))
    slot.stream.enabled = False
    y.sum().backward()
    assert seen == [((7, 8), False, True), ((7, 8), True, True)]
    assert slot.current is not None and slot.current.sample_ids == (9, 10) and not slot.stream.enabled
    assert slot.stream.samples is slot.current.samples
