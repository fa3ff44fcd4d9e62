"""Low-rank adapters: specs against the modules of every rank, products against matrices written out in torch."""

from __future__ import annotations

from dataclasses import replace
from math import prod
from typing import Any

import pytest
import torch
from torch import nn

from megatron_port.core.config.checks import problems
from megatron_port.core.config.features import FineTuningConfig
from megatron_port.core.config.model import MoEConfig
from megatron_port.core.config.schema import LayoutConfig, ModelConfig, RunConfig
from megatron_port.core.dist.collectives import recorded_buffers
from megatron_port.core.dist.groups import ParallelContext
from megatron_port.core.dist.mesh import Topology
from megatron_port.core.dist.record import ParameterRecord, StateReader, initial_reader, record_of
from megatron_port.core.engine.module import buffer_pieces
from megatron_port.core.layers.dropout import DropoutStream
from megatron_port.core.layers.linear import WgradAccumulator
from megatron_port.core.layers.providers import torch_providers
from megatron_port.core.layers.step import StepSlot
from megatron_port.core.model.build import BuildContext, BuildOptions
from megatron_port.core.model.decoder import GPTStage
from megatron_port.ext.weights.adapter_spec import adapter_parameters
from megatron_port.ext.weights.adapters import InitialAdapters, MergedWeights, freeze_all_but_adapters
from megatron_port.ext.weights.settings import targets_of
from megatron_port.run.build import state_records

LLAMA = ModelConfig(
    num_layers=2, hidden_size=48, num_attention_heads=4, num_query_groups=2, head_dim=24, vocab_size=53, seq_length=16,
    activation="swiglu", normalization="rmsnorm", position_embedding="rope", add_bias=True, ffn_hidden_size=64,
)
LORA = FineTuningConfig(method="lora", rank=3, alpha=5.0)
LATENT = replace(
    LLAMA, add_bias=False, num_query_groups=0, head_dim=12, kv_lora_rank=20, q_lora_rank=14, qk_rope_head_dim=4,
    v_head_dim=10,
)
DROPPED = replace(LORA, dropout=0.25)
DORA = replace(LORA, method="dora", rslora=True, targets=("query", "value", "output", "up", "down"))


def stage(
    tuning: FineTuningConfig, ctx: ParallelContext, *, sp: bool = False, model: ModelConfig = LLAMA
) -> GPTStage:
    """All layers on a rank in fp64."""
    build = BuildContext(
        model=model, layout=LayoutConfig(sequence_parallel=sp, vocab_padding_multiple=1 if ctx.size("tp") == 1 else 8),
        ctx=ctx, providers=torch_providers(), step=StepSlot(DropoutStream(0, ctx.device)), dtype=torch.float64,
        options=BuildOptions(fine_tuning=tuning),
    )
    made = GPTStage(build, start=0, stop=model.num_layers)
    freeze_all_but_adapters([made])
    return made


def trained(module: nn.Module) -> list[ParameterRecord]:
    """Records of what updates change."""
    return [record_of(p) for p in module.parameters() if p.requires_grad]


@pytest.mark.parametrize("tuning", [LORA, DORA], ids=["lora", "dora"])
@pytest.mark.parametrize(("model", "tp", "sp"), [
    (LLAMA, 1, False), (LLAMA, 2, True), (LLAMA, 4, False), (LATENT, 2, True), (LATENT, 2, False)
])
def test_every_rank_holds_what_the_specs_state(
    tuning: FineTuningConfig, model: ModelConfig, tp: int, sp: bool
) -> None:
    """On four ranks each key and value head is held by two."""
    topology = Topology(tp=tp, kv_copies=max(tp // 2, 1) if model is LLAMA else 1)
    tuning = tuning if model is LLAMA else replace(tuning, targets=())
    specs = adapter_parameters(model, tuning)
    for rank in range(tp):
        ctx = ParallelContext(topology, rank, torch.device("meta"), topology.coordinates(rank))
        records = {r.name: r for r in trained(stage(tuning, ctx, sp=sp, model=model))}
        assert records.keys() == specs.keys()
        for name, spec in specs.items():
            r = records[name]
            assert (r.shape, r.decay, r.init.kind, r.init.std) == (spec.shape, spec.decay, spec.init, spec.std), name
            assert prod(r.local_shape) == spec.local_numel(tp), name
            assert ("kv_copies" in r.partial_over) == bool(spec.shared_numel(tp)), name
            latents = any(part in name for part in ("query_down", "kv_down"))
            assert ("tp" in r.partial_over) == (spec.split is None and (sp if latents else tp > 1)), name


def test_router_experts_and_their_bias_are_frozen() -> None:
    """Adapters are beside attention, dense layers and the shared block; the bias that balances stays as it is, and
    nothing that is frozen is saved."""
    model = replace(LLAMA, add_bias=False, moe=MoEConfig(
        num_experts=4, ffn_hidden_size=8, shared_ffn_hidden_size=16, shared_gate=True, first_dense=1, balance_bias=True,
    ))
    made = stage(LORA, ParallelContext.single(), model=model)
    names = {record.name.rpartition(".lora")[0] for record in trained(made)}
    attention = ("attention.qkv.query", "attention.qkv.key", "attention.qkv.value", "attention.output")
    parts = [(i, part) for i in (0, 1) for part in attention]
    parts += [(i, f"mlp.{where}{part}") for i, where in enumerate(("", "shared.")) for part in
              ("up.gate", "up.up", "down")]
    assert names == {f"layers.{i}.{part}" for i, part in parts}
    assert set(state_records(model, LORA)) == set(adapter_parameters(model, LORA))
    counts = torch.zeros(2, 4, dtype=torch.int64)
    counts[1] = torch.tensor([8, 0, 0, 0])
    made.after_update({"expert_tokens": counts}, torch.zeros(()))
    ((record, bias),) = recorded_buffers(made)
    assert not bias.any() and list(buffer_pieces([(record, bias)], ParallelContext.single())) == []
    assert targets_of(replace(model, moe=replace(model.moe, first_dense=0, shared_ffn_hidden_size=0))) == (
        "query", "key", "value", "output")


def filled(tuning: FineTuningConfig) -> tuple[GPTStage, StateReader]:
    """A model whose adapters are far from zero, and a reader of its state."""
    made = stage(tuning, ParallelContext.single())
    base = initial_reader({record_of(p).name: record_of(p) for p in made.parameters()}, 7)
    begin = InitialAdapters(LLAMA, tuning, 7, base)
    generator = torch.Generator().manual_seed(3)
    state = {}
    for p in made.parameters():
        record = record_of(p)
        state[record.name] = begin(record.name, "weight", record.offset, record.extent).double() * 5
        if record.trainable:
            state[record.name] = state[record.name] + torch.randn(record.shape, generator=generator).double() * 0.1
        p.data.copy_(state[record.name])

    def read(
        name: str, kind: str, offset: tuple[int, ...], shape: tuple[int, ...], /, *, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        return state[name][tuple(slice(o, o + n) for o, n in zip(offset, shape))]

    return made, read


def effective(tuning: FineTuningConfig, made: GPTStage, linear: str) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The weight [out, in] that a layer's linear stands for, written out, and the leaves that it is made of."""
    module: Any = made.layers[0].get_submodule(linear)
    weight = module.weight.detach().flatten(0, -2)
    leaves = {
        record_of(p).name.removeprefix(f"layers.0.{linear}."): p.detach().clone().requires_grad_()
        for p in module.adapter.parameters()
    }
    d, rows = LLAMA.head_size, {}
    if linear == "attention.qkv":  # two groups: queries, queries, key, value
        numbers = torch.arange(weight.shape[0]).view(2, 4, d)
        rows = {"query.": numbers[:, :2].flatten(), "key.": numbers[:, 2].flatten(), "value.": numbers[:, 3].flatten()}
    elif linear == "mlp.up":
        rows = {"gate.": torch.arange(64), "up.": torch.arange(64, 128)}
    else:
        rows = {"": torch.arange(weight.shape[0])}
    out = weight
    factor = tuning.alpha / (tuning.rank**0.5 if tuning.rslora else tuning.rank)
    for part, where in rows.items():
        if f"{part}lora_a" not in leaves:
            continue
        block = weight[where] + factor * leaves[f"{part}lora_b"] @ leaves[f"{part}lora_a"]
        if tuning.method == "dora":
            block = block * (leaves[f"{part}magnitude"] / block.detach().norm(dim=1))[:, None]
        out = out.index_copy(0, where, block)
    return out, leaves


@pytest.mark.parametrize("linear", ["attention.qkv", "attention.output", "mlp.up", "mlp.down"])
@pytest.mark.parametrize("tuning", [LORA, DROPPED, DORA], ids=["lora", "dropout", "dora"])
def test_an_adapted_linear_is_the_matrix_written_out(tuning: FineTuningConfig, linear: str) -> None:
    """Dropout acts on what the adapter reads alone, forward and backward."""
    made, _ = filled(tuning)
    streams(made).set_micro_batch(3, (7, 9))
    module: Any = made.layers[0].get_submodule(linear)
    weight, leaves = effective(tuning, made, linear)
    x = torch.randn(5, 2, weight.shape[1], dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    mine, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    y = module(mine)
    drop = module.adapter.drop_for(5)
    kept = torch.ones_like(x) if drop is None else drop(torch.ones_like(x))
    assert bool((kept == 0).any()) is bool(tuning.dropout)
    frozen = module.weight.detach().flatten(0, -2)
    wanted = theirs @ frozen.t() + (theirs * kept) @ (weight - frozen).t()
    if linear in ("attention.qkv", "mlp.up"):  # the others' caller adds it
        wanted = wanted + module.bias.detach().flatten()
    assert (y - wanted).abs().max() <= 1e-13 * wanted.abs().max()
    direction = torch.randn(y.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    y.backward(direction)
    wanted.backward(direction)
    assert mine.grad is not None and theirs.grad is not None
    assert (mine.grad - theirs.grad).abs().max() <= 1e-13 * theirs.grad.abs().max()
    for p in module.adapter.parameters():
        leaf = leaves[record_of(p).name.removeprefix(f"layers.0.{linear}.")].grad
        assert p.grad is not None and leaf is not None
        assert (p.grad - leaf).abs().max() <= 1e-12 * leaf.abs().max(), record_of(p).name
    assert module.weight.grad is None


@pytest.mark.parametrize("linear", ["attention.qkv", "mlp.down"])
@pytest.mark.parametrize("tuning", [DROPPED, DORA], ids=["lora", "dora"])
def test_sums_of_gradients_in_fp16_are_wide(tuning: FineTuningConfig, linear: str) -> None:
    """Sums over a micro-batch's tokens that fp16 cannot hold, against autograd of the matrix written out in fp64."""
    made, _ = filled(tuning)
    weight, leaves = effective(tuning, made, linear)
    module: Any = made.layers[0].get_submodule(linear)
    adapter = module.adapter
    x = torch.ones(64, 16, weight.shape[1], dtype=torch.float16)  # every token adds alike
    streams(made).set_micro_batch(3, tuple(range(16)))
    drop = adapter.drop_for(64)
    kept = torch.ones_like(x, dtype=torch.float64) if drop is None else drop(x.double())
    frozen = module.weight.detach().flatten(0, -2)
    direction = torch.full((64, 16, weight.shape[0]), 300.0)
    direction[..., 1::3] = -200.0
    (x.double() @ frozen.t() + kept @ (weight - frozen).t()).backward(direction.double())
    sums = {id(p): torch.zeros_like(p, dtype=torch.float32) for p in adapter.parameters()}
    unwritten = {id(p): sums[id(p)].fill_(float("nan")) for p in adapter.parameters() if p.dim() == 2}
    accumulator = WgradAccumulator(
        lambda p: None, lambda p: sums[id(p)], lambda p: unwritten.pop(id(p), None)
    )
    made.half()
    for p in adapter.parameters():
        p.wgrad_accumulator = accumulator
    for _ in range(2):  # micro-batches
        module(x).backward(direction.half())
    largest = 0.0
    for p in adapter.parameters():
        leaf = leaves[record_of(p).name.removeprefix(f"layers.0.{linear}.")].grad
        assert p.grad is None and leaf is not None
        assert (sums[id(p)] - 2 * leaf).abs().max() <= 0.02 * leaf.abs().max(), record_of(p).name
        largest = max(largest, float(leaf.abs().max()))
    assert largest > 65504


@pytest.mark.parametrize("tuning", [LORA, DORA], ids=["lora", "dora"])
def test_merged_weights_are_the_matrices_written_out(tuning: FineTuningConfig) -> None:
    """Whole and in slices, as a rank reads them."""
    made, read = filled(tuning)
    merged = MergedWeights(LLAMA, tuning, read, read)
    for linear in ("attention.qkv", "attention.output", "mlp.up", "mlp.down"):
        module: Any = made.layers[0].get_submodule(linear)
        shape = tuple(module.weight.shape)
        wanted = effective(tuning, made, linear)[0].detach().view(shape)
        name = f"layers.0.{linear}.weight"
        assert (merged(name, "weight", (0,) * len(shape), shape) - wanted).abs().max() <= 1e-13
        offset = (*(0 for _ in shape[:-2]), shape[-2] // 3, shape[-1] // 4)
        size = (*shape[:-2], shape[-2] // 2, shape[-1] // 2)
        box = wanted[tuple(slice(o, o + n) for o, n in zip(offset, size))]
        assert (merged(name, "weight", offset, size) - box).abs().max() <= 1e-13
    for name in ("layers.0.attention.qkv.bias", "final_norm.weight"):
        assert torch.equal(merged(name, "weight", (0,), (5,)), read(name, "weight", (0,), (5,)))


def streams(made: GPTStage) -> DropoutStream:
    """The dropout of a stage."""
    return made.step.stream


def test_each_linear_of_each_layer_drops_other_elements_the_same_ones_wherever_they_lie() -> None:
    """A mask depends on step, sample, layer, linear and element; a rank's columns have those of the whole."""
    made = stage(DROPPED, ParallelContext.single())
    topology = Topology(tp=2)
    half = stage(DROPPED, ParallelContext(topology, 1, torch.device("cpu"), topology.coordinates(1)))
    masks = []
    for step, layer, linear in ((3, 0, "mlp.down"), (3, 1, "mlp.down"), (3, 0, "mlp.up"), (4, 0, "mlp.down")):
        for one in (made, half):
            streams(one).set_micro_batch(step, (7, 9))
        whole, mine = (one.layers[layer].get_submodule(linear).adapter.drop_for(8) for one in (made, half))  # type: ignore[operator,union-attr]
        width = 64 if linear == "mlp.down" else 48
        masks.append(whole(torch.ones(8, 2, width))[..., :48] > 0)
        if linear == "mlp.down":
            assert torch.equal(whole(torch.ones(8, 2, 64))[..., 32:], mine(torch.ones(8, 2, 32)))
    assert all(0.6 < m.double().mean() < 0.9 for m in masks)
    assert not any(torch.equal(a, b) for i, a in enumerate(masks) for b in masks[:i])


def test_adapters_begin_as_peft_draws_them() -> None:
    """A uniform within 1/√in, B zero, lengths those of the frozen rows: the product is the frozen one."""
    made, _ = filled(DORA)
    records = {record_of(p).name: record_of(p) for p in made.parameters()}
    base = initial_reader(records, 7)
    read = InitialAdapters(LLAMA, DORA, 7, base)
    a = read("layers.1.mlp.down.lora_a", "weight", (0, 0), (3, 64))
    assert 0.95 / 8 < a.abs().max() <= 1 / 8 and abs(a.var() - 1 / 192) < 5e-4
    assert torch.equal(read("layers.1.mlp.down.lora_a", "weight", (1, 32), (2, 32)), a[1:, 32:])
    assert not read("layers.1.mlp.down.lora_b", "weight", (0, 0), (48, 3)).any()
    up = base("layers.1.mlp.up.weight", "weight", (1, 0, 0), (1, 64, 48))[0]
    lengths = read("layers.1.mlp.up.up.magnitude", "weight", (8,), (20,))
    assert torch.allclose(lengths, up[8:28].double().norm(dim=1), rtol=1e-12)
    assert torch.equal(read("final_norm.weight", "weight", (0,), (48,)), torch.ones(48))


@pytest.mark.parametrize(("change", "word"), [
    ({"targets": ("q_proj",)}, "'q_proj' is unknown"), ({"targets": ("gate",)}, "has query, key, value, output, up"),
    ({"method": "dora", "dropout": 0.1}, "use dropout = 0"), ({"method": "none"}, "leave the section out"),
])
def test_what_contradicts_adapters_is_refused(change: dict[str, object], word: str) -> None:
    run = RunConfig(engine="native", fine_tuning=replace(LORA, **change))  # type: ignore[arg-type]
    assert any(word in problem for problem in problems(run))
    assert any('engine "deepspeed"' in problem for problem in problems(RunConfig(engine="deepspeed", fine_tuning=LORA)))
