"""8-bit products: quantisation, providers and whole linears against float64, what a step keeps, what is refused."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megatron_port.core.config.checks import problems
from megatron_port.core.config.loader import load
from megatron_port.core.config.schema import (
    ActivationsConfig,
    BackendConfig,
    BatchConfig,
    DataConfig,
    LayoutConfig,
    ModelConfig,
    OptimizerConfig,
    PrecisionConfig,
    RunConfig,
)
from megatron_port.core.data.batch import MicroBatch
from megatron_port.core.dist.groups import ParallelContext
from megatron_port.core.dist.rank import DeviceInfo
from megatron_port.core.engine.native import NativeEngine
from megatron_port.core.errors import ConfigError, EnvironmentFault
from megatron_port.core.layers.linear import PLAIN, WgradAccumulator, linear
from megatron_port.core.layers.providers import torch_providers
from megatron_port.ext.kernels.choose import choose_providers
from megatron_port.ext.kernels.choose_fp8 import choose_fp8, device_formats, torch_problem
from megatron_port.ext.kernels.fp8 import (
    FNUZ,
    OCP,
    Fp8,
    ScaledMM,
    quantise,
    quantise_columns,
    reference_scaled_mm,
    scale_of,
    torch_quantiser,
    torch_scaled_mm,
)
from megatron_port.ext.kernels.quantised import Quantised, QuantizedWeightCache
from megatron_port.run.build import build_engine
from megatron_port.run.device import choose_device
from megatron_port.tools.plan.case import case_of, machine_of
from megatron_port.tools.plan.layer import copy_bytes
from megatron_port.tools.plan.memory import plan_memory
from megatron_port.tools.plan.step import plan_step

CPU = choose_device("cpu")
RECIPES = ["tensorwise", "rowwise"]
RELATIVE = {torch.float8_e4m3fn: 2.0**-4, torch.float8_e5m2: 2.0**-3,
            torch.float8_e4m3fnuz: 2.0**-4, torch.float8_e5m2fnuz: 2.0**-3}
"""Half a unit in the last place of a normal number, over the number."""
SMALLEST = {torch.float8_e4m3fn: 2.0**-9, torch.float8_e5m2: 2.0**-16,
            torch.float8_e4m3fnuz: 2.0**-10, torch.float8_e5m2fnuz: 2.0**-17}
"""The smallest subnormal number."""


def providers() -> Iterator[tuple[str, ScaledMM]]:
    """Those that serve here, by recipe."""
    for recipe in RECIPES:
        yield recipe, reference_scaled_mm
        if not torch_problem(recipe, OCP, torch.device("cpu")):
            yield recipe, torch_scaled_mm


SERVING = [pytest.param(r, p, id=f"{r}-{p.__name__}") for r, p in providers()]


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.bfloat16, spread: float = 1.0) -> Tensor:
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(*shape, generator=g, dtype=torch.float64)
    return (x * torch.exp(spread * torch.randn(shape[0], *[1] * (len(shape) - 1), generator=g))).to(dtype)


def exact(q: Quantised) -> Tensor:
    return q.values.double() * q.inverse.double()


# ---- quantisation


@pytest.mark.parametrize("dtype", list(RELATIVE))
@pytest.mark.parametrize("rowwise", [False, True])
@pytest.mark.parametrize("size", [2.0**-60, 1e-3, 1.0, 448.0, 3e38])
def test_values_are_within_half_a_unit_and_scales_are_the_largest_powers_of_two(
    dtype: torch.dtype, rowwise: bool, size: float
) -> None:
    x = normal(24, 40)
    x = (x.double() / x.double().abs().max() * size).to(torch.bfloat16)
    q = quantise(x, dtype, rowwise=rowwise)
    assert q.values.dtype == dtype and q.inverse.shape == ((24, 1) if rowwise else (1, 1))
    mantissa, _ = torch.frexp(q.inverse)
    assert bool((mantissa == 0.5).all())
    largest = x.double().abs().amax(1, keepdim=True) if rowwise else x.double().abs().max().view(1, 1)
    scaled = largest / q.inverse.double()
    most = torch.finfo(dtype).max
    assert bool((scaled <= most).all()) and bool((2 * scaled > most).all())
    bound = torch.maximum(x.double().abs() * RELATIVE[dtype], SMALLEST[dtype] / 2 * q.inverse.double())
    assert bool(((exact(q) - x.double()).abs() <= bound).all())


def test_the_rounding_of_an_element_does_not_depend_on_its_neighbours() -> None:
    """Why tensor parallelism needs no collective for scales: halves scaled each by itself are rounded as the whole."""
    x = normal(64, 64, spread=1.5)
    large = x.abs() > x.abs().max() * 2.0**-13
    whole = exact(quantise(x, OCP.precise))
    halves = torch.cat([exact(quantise(half, OCP.precise)) for half in x.chunk(2, 1)], dim=1)
    assert torch.equal(whole[large], halves[large])
    small = (whole - halves)[~large].abs()
    assert float(small.max()) <= 2.0**-9 * float(quantise(x, OCP.precise).inverse)  # and the rest by a subnormal's unit
    rows = exact(quantise(x, OCP.precise, rowwise=True))
    assert torch.equal(rows[large], whole[large])


def test_columns_are_rows_of_the_transposed() -> None:
    x = normal(32, 48)
    a, b = quantise_columns(x, OCP.precise), quantise(x.t().contiguous(), OCP.precise, rowwise=True)
    assert torch.equal(a.values.view(torch.uint8), b.values.view(torch.uint8)) and torch.equal(a.inverse, b.inverse)
    assert a.values.is_contiguous() and a.inverse.stride() == b.inverse.stride() == (1, 1)
    assert torch.equal(exact(quantise(x, OCP.precise).transposed()), exact(quantise(x, OCP.precise)).t())


@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
@pytest.mark.parametrize("rowwise", [False, True])
def test_a_fault_does_not_hide(bad: float, rowwise: bool) -> None:
    x = normal(16, 32)
    x[3, 4] = bad
    a, b = quantise(x, OCP.precise, rowwise=rowwise), quantise(normal(16, 32), OCP.precise, rowwise=rowwise)
    y = reference_scaled_mm(a, b, None, torch.float32, True)
    assert bool(y[3].isnan().all()) and (not rowwise or bool(y[5].isfinite().all()))


def test_zeros_stay_zeros() -> None:
    x = torch.zeros(16, 32, dtype=torch.bfloat16)
    for rowwise in (False, True):
        q = quantise(x, OCP.precise, rowwise=rowwise)
        assert not q.values.float().any() and bool(q.inverse.isfinite().all())
    assert float(scale_of(x, OCP.precise)) > 0


# ---- products


@pytest.mark.parametrize("recipe, product", SERVING)
@pytest.mark.parametrize("out", [torch.bfloat16, torch.float32])
def test_products_are_those_of_the_8_bit_operands(recipe: str, product: ScaledMM, out: torch.dtype) -> None:
    """Exact but for the fp32 sum, and bf16's rounding of the result."""
    rowwise = recipe == "rowwise"
    left = quantise(normal(48, 64, seed=1), OCP.precise if rowwise else OCP.wide, rowwise=rowwise)
    right = quantise(normal(32, 64, seed=2), OCP.precise, rowwise=rowwise)
    bias = normal(32, seed=3) if out == torch.bfloat16 else None
    y = product(left, right, bias, out, True)
    assert y.dtype == out and y.shape == (48, 32)
    a, b = exact(left), exact(right)
    wanted = a @ b.t() + (0.0 if bias is None else bias.double())
    size = a.abs() @ b.abs().t() + (0.0 if bias is None else bias.double().abs())
    unit = 2.0**-8 if out == torch.bfloat16 else 0.0
    assert bool(((y.double() - wanted).abs() <= unit * wanted.abs() + 1e-6 * size).all())


# ---- whole linears


@dataclasses.dataclass
class Numbers:
    """Of a linear's passes over micro-batches, in float64."""

    outputs: list[Tensor]
    inputs: list[Tensor]
    weight: Tensor
    bias: Tensor


def run_linear(
    recipe: str, product: ScaledMM, *, how: str, keep: bool = True, micro_batches: int = 2
) -> tuple[Numbers, Numbers]:
    """(what came out, exact products of the bf16 operands). ``how``: autograd | gradients | held."""
    weight = nn.Parameter(normal(2, 24, 64, seed=5, spread=0.3))
    bias = nn.Parameter(normal(48, seed=6))
    main_grad, copies = torch.zeros(2, 24, 64), QuantizedWeightCache()
    gradients = WgradAccumulator(lambda w: None, lambda w: main_grad)
    weight.quantized_weight_cache = copies  # type: ignore[attr-defined]
    if how != "autograd":
        weight.wgrad_accumulator = gradients  # type: ignore[attr-defined]
    held: list = []
    gradients.deferred = held if how == "held" else None
    kernels = Fp8(recipe, OCP, product).linear_kernels()
    got, wanted = (Numbers([], [], torch.zeros(48, 64).double(), torch.zeros(48).double()) for _ in range(2))

    def passes() -> None:
        for i in range(micro_batches):
            x = normal(8, 4, 64, seed=10 + i, spread=0.5).requires_grad_()
            g = normal(8, 4, 48, seed=20 + i, spread=1.0)
            y = linear(x, weight, bias, kernels=kernels)
            y.backward(g)
            assert x.grad is not None and x.grad.dtype == y.dtype == torch.bfloat16
            matrix, rows = weight.detach().double().flatten(0, 1), g.double().flatten(0, 1)
            got.outputs.append(y.detach().double())
            got.inputs.append(x.grad.double())
            wanted.outputs.append(x.detach().double() @ matrix.t() + bias.detach().double())
            wanted.inputs.append((rows @ matrix).view(8, 4, 64))
            wanted.weight += rows.t() @ x.detach().double().flatten(0, 1)
            wanted.bias += rows.sum(0)

    if keep:
        with copies.active():
            passes()
            assert copies.bytes_held() == 2 * weight.numel()  # as it is and transposed, made once
    else:
        passes()
    assert copies.bytes_held() == 0
    gradients.deferred = None
    gradients.flush(held)
    total = weight.grad if how == "autograd" else main_grad
    assert total is not None and bias.grad is not None
    got.weight, got.bias = total.double().view(48, 64), bias.grad.double()
    return got, wanted


def relative(a: Tensor, b: Tensor) -> float:
    """||a - b|| over ||b||."""
    return float((a - b).norm() / b.norm())


@pytest.mark.parametrize("recipe, product", SERVING)
def test_errors_of_a_linear(recipe: str, product: ScaledMM) -> None:
    """Rounding to 4 significant bits is off by 0.026 on average, and there are two operands."""
    got, wanted = run_linear(recipe, product, how="gradients")
    for y, exact_y in zip(got.outputs, wanted.outputs):
        assert 0.01 < relative(y, exact_y) < 0.05
    for dx, exact_dx in zip(got.inputs, wanted.inputs):
        assert 0.01 < relative(dx, exact_dx) < (0.05 if recipe == "rowwise" else 0.08)  # e5m2: 3 significant bits
    off = relative(got.weight, wanted.weight)
    assert off < 1e-6 if recipe == "rowwise" else 0.01 < off < 0.08
    assert relative(got.bias, wanted.bias) < 0.01


@pytest.mark.parametrize("recipe, product", SERVING)
def test_every_way_to_the_gradient_is_the_same(recipe: str, product: ScaledMM) -> None:
    """Straight into fp32 sums, held back as zero-bubble schedules do, with weights quantised anew: equal bits."""
    first, _ = run_linear(recipe, product, how="gradients")
    for how, keep in (("held", True), ("held", False), ("gradients", False)):
        other, _ = run_linear(recipe, product, how=how, keep=keep)
        assert torch.equal(first.weight, other.weight) and torch.equal(first.bias, other.bias), how
        assert all(torch.equal(a, b) for a, b in zip(first.outputs + first.inputs, other.outputs + other.inputs)), how
    rounded, _ = run_linear(recipe, product, how="autograd")  # DeepSpeed's: a bf16 gradient per micro-batch
    assert 0 < relative(rounded.weight, first.weight) < 0.01


def test_providers_agree() -> None:
    for recipe in RECIPES:
        if torch_problem(recipe, OCP, torch.device("cpu")):
            continue
        a, b = (run_linear(recipe, p, how="gradients")[0] for p in (torch_scaled_mm, reference_scaled_mm))
        assert relative(a.weight, b.weight) < 1e-6
        assert all(relative(x, y) < 1e-3 for x, y in zip(a.outputs + a.inputs, b.outputs + b.inputs))


# ---- a whole model


def config(recipe: Any = "tensorwise", *, recompute: Any = "none", **layout: object) -> RunConfig:
    return RunConfig(
        engine="native",
        model=ModelConfig(num_layers=2, hidden_size=32, num_attention_heads=2, vocab_size=61, seq_length=16,
                          hidden_dropout=0.1),
        layout=LayoutConfig(vocab_padding_multiple=1, **layout),  # type: ignore[arg-type]
        batch=BatchConfig(micro_batch_size=2, global_batch_size=4), precision=PrecisionConfig(fp8=recipe),
        activations=ActivationsConfig(policy=recompute),
        optimizer=OptimizerConfig(clip_grad=0.5), data=DataConfig(synthetic=True),
        backend=BackendConfig(device="cpu", own_kernels="off", scaled_mm="reference"),
    )


def steps(run: RunConfig, count: int = 3) -> tuple[list[tuple[float, float | None]], dict[str, Tensor], NativeEngine]:
    torch.manual_seed(0)
    chosen = choose_providers(run.backend, CPU, torch.bfloat16, engine="native", fp8=run.precision.fp8)
    engine = build_engine(run, ParallelContext.single(), chosen)
    assert isinstance(engine, NativeEngine)
    out = []
    for step in range(count):
        tokens = torch.randint(0, 61, (2, 2, 17), generator=torch.Generator().manual_seed(step))
        batches = [MicroBatch((2 * i, 2 * i + 1), t[:, :-1], t[:, 1:]) for i, t in enumerate(tokens)]
        result = engine.train_step(batches, step=step, lr=1e-2)
        out.append((result.loss, result.grad_norm))
    return out, {record.name: p.detach().clone() for record, p in engine.named_parameters()}, engine


@pytest.mark.parametrize("recipe", RECIPES)
def test_recompute_changes_no_bit(recipe: str) -> None:
    first, weights, engine = steps(config(recipe))
    assert first != steps(config("none"))[0] and engine.chunks[0].weight_copies.bytes_held() == 0
    for recompute in ("selective", "full"):
        again, others, _ = steps(config(recipe, recompute=recompute))
        assert again == first and all(torch.equal(w, others[name]) for name, w in weights.items())
    zero_bubble, others, _ = steps(config(recipe, pipeline_schedule="zb-h1"))  # weight gradients apart
    assert zero_bubble == first and all(torch.equal(w, others[name]) for name, w in weights.items())


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("activation", ["gelu", "swiglu"])
def test_only_the_layers_linears_are_in_8_bits(recipe: str, activation: Any) -> None:
    run = config(recipe)
    run = dataclasses.replace(run, model=dataclasses.replace(run.model, activation=activation, ffn_hidden_size=64))
    _, _, engine = steps(run, 1)
    held: list[int] = []
    with engine.chunks[0].weight_copies.active():
        for name, module in engine.stage.named_modules():
            kernels = getattr(module, "kernels", None)
            narrow = name.endswith((".qkv", ".output", ".up", ".down"))
            assert (kernels is not None and kernels is not PLAIN) == narrow
        tokens = torch.zeros(2, 16, dtype=torch.int64)
        engine.stage(tokens).float().sum().backward()
        held.append(engine.chunks[0].weight_copies.bytes_held())
    case, _ = case_of(run)
    assert held == [int(copy_bytes(case, 0))]


def test_providers_chosen_for_another_precision_are_a_mistake() -> None:
    with pytest.raises(ValueError, match="chosen for another"):
        build_engine(config(), ParallelContext.single(), torch_providers())


# ---- what is refused


GPU = DeviceInfo("cuda", torch.device("cuda", 0), "nccl", "NVIDIA A100-SXM4-80GB", 0, "asked for")
AMD = DeviceInfo("rocm", torch.device("cuda", 0), "nccl", "AMD Instinct MI250X", 0, "asked for")


def test_devices_without_8_bit_products() -> None:
    with pytest.raises(EnvironmentFault, match=r'NVIDIA A100.*compute capability 8\.0.*set precision\.fp8 = "none"'):
        choose_fp8(BackendConfig(), "tensorwise", GPU, lambda device: ((8, 0), ""))
    with pytest.raises(EnvironmentFault, match=r'MI250X \(gfx90a\).*MI300.*set precision\.fp8 = "none"'):
        choose_fp8(BackendConfig(), "rowwise", AMD, lambda device: ((9, 0), "gfx90a"))
    for capability in ((8, 9), (9, 0), (10, 0)):
        assert device_formats(GPU, lambda device, c=capability: (c, "")) == (OCP, "")  # type: ignore[misc]
    assert device_formats(AMD, lambda device: ((9, 4), "gfx942")) == (FNUZ, "")
    assert device_formats(AMD, lambda device: ((9, 5), "gfx950")) == (OCP, "")


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_reference_is_taken_when_asked_for_only(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen, row = choose_fp8(BackendConfig(scaled_mm="reference"), recipe, CPU)
    assert chosen.product is reference_scaled_mm and row.provider == "reference" and "for tests" in row.why
    monkeypatch.setattr("megatron_port.ext.kernels.choose_fp8.torch_scaled_mm", _absent)
    for asked in ("auto", "torch"):
        with pytest.raises(EnvironmentFault, match=r'has no .* products on cpu: not here; .*scaled_mm = "reference"'):
            choose_fp8(BackendConfig(scaled_mm=asked), recipe, CPU)


def _absent(*args: object) -> Tensor:
    raise NotImplementedError("not here")


def test_the_table_has_a_row() -> None:
    chosen = choose_providers(
        BackendConfig(own_kernels="off", scaled_mm="reference"), CPU, torch.bfloat16, engine="native", fp8="rowwise"
    )
    assert [row.op for row in chosen.table[-2:]] == ["quantise", "scaled_mm"]
    assert isinstance(chosen.fp8, Fp8) and chosen.fp8.recipe == "rowwise" and chosen.fp8.quantiser is torch_quantiser
    assert choose_providers(BackendConfig(own_kernels="off"), CPU, torch.bfloat16, engine="native").fp8 is None


def test_own_casts_that_cannot_serve_are_an_error() -> None:
    backend = BackendConfig(own_kernels="off", scaled_mm="reference", quantise="own")
    with pytest.raises(EnvironmentFault, match="backend.quantise.*own_kernels is off"):
        choose_providers(backend, CPU, torch.bfloat16, engine="native", fp8="rowwise")


def changed(run: RunConfig, **parts: dict) -> RunConfig:
    return dataclasses.replace(
        run, **{name: dataclasses.replace(getattr(run, name), **values) for name, values in parts.items()}
    )


@pytest.mark.parametrize("dtype", ["fp32", "fp16", "fp64"])
def test_only_with_bf16(dtype: str) -> None:
    found = problems(changed(config(), precision={"dtype": dtype}))
    assert [p for p in found if "fp8" in p] == [
        f'precision.fp8 "tensorwise" needs precision.dtype "bf16", not "{dtype}"; use bf16, or fp8 = "none"'
    ]


@pytest.mark.parametrize(
    ("parts", "says", "fixed"),
    [
        ({"model": {"hidden_size": 72, "num_attention_heads": 6, "head_dim": 16}},
         "attention.qkv and mlp.up have hidden_size 72 inputs, not a multiple of 16; use hidden_size 64 or 80",
         {"hidden_size": 80}),
        ({"model": {"hidden_size": 56, "num_attention_heads": 4}},
         "use hidden_size 48 or 64", {"hidden_size": 64}),
        ({"model": {"hidden_size": 64, "num_attention_heads": 4, "num_query_groups": 1, "head_dim": 12}},
         "attention.qkv has (4 + 2 × 1) heads of 12 / tensor_parallel_size 1 = 72 outputs on a rank, not a multiple of "
         "16; use head_dim 16", {"head_dim": 16}),
        ({"model": {"hidden_size": 64, "ffn_hidden_size": 200}, "layout": {"tensor_parallel_size": 2}},
         "mlp.down has ffn_hidden_size 200 / tensor_parallel_size 2 = 100 inputs on a rank, not a multiple of 16; use "
         "ffn_hidden_size 192 or 224", {"ffn_hidden_size": 224}),
        ({"model": {"seq_length": 20}},
         "the weights' gradients sum over 20 positions × micro_batch_size 2 = 40 tokens, not a multiple of 16; use "
         "micro_batch_size 4", {"seq_length": 32}),
    ],
)
def test_sizes_that_are_no_multiples_of_16(parts: dict, says: str, fixed: dict) -> None:
    run = changed(config(), **parts)
    found = [p for p in problems(run) if "fp8" in p]
    assert len(found) == 1 and says in found[0]
    assert not [p for p in problems(changed(run, model=fixed)) if "fp8" in p]
    assert not [p for p in problems(changed(run, precision={"fp8": "none"})) if "16" in p]


def test_rowwise_takes_any_number_of_tokens() -> None:
    run = changed(config("rowwise"), model={"seq_length": 20})
    assert not problems(run)


# ---- the planner


def planned(fp8: str, *more: str) -> tuple[float, float]:
    """(seconds of a step, bytes of weights on a rank) of the 6.7B shape on one H200."""
    settings = [
        f"precision.fp8={fp8}", "engine=native", "model.num_layers=32", "model.hidden_size=4096",
        "model.num_attention_heads=32", "model.seq_length=2048", "layout.tensor_parallel_size=1",
        "layout.pipeline_parallel_size=1", "layout.data_parallel_size=1", "activations.policy=none", "cluster.nodes=0",
        "batch.micro_batch_size=2", "batch.global_batch_size=32", *more,
    ]
    base = load("clusters/h200").config
    run = dataclasses.replace(base, model=load("models/gpt-22b").config.model, data=DataConfig(synthetic=True))
    for setting in settings:
        name, _, value = setting.partition("=")
        table, _, key = name.rpartition(".")
        typed: Any = int(value) if value.isdigit() else value
        run = changed(run, **{table: {key: typed}}) if table else dataclasses.replace(run, **{key: typed})
    case, _ = case_of(run, 1)
    machine = machine_of(run)
    return plan_step(case, machine).seconds, plan_memory(case, machine)[0].weights


def test_the_plan_is_faster_and_counts_the_copies() -> None:
    bf16, weights = planned("none")
    tensorwise, copies = planned("tensorwise")
    rowwise, _ = planned("rowwise")
    assert max(tensorwise, rowwise) < bf16 / 1.1
    elements = 32 * 12 * 4096**2
    assert copies - weights == 2 * elements
    one, _ = planned("tensorwise", "batch.global_batch_size=2")
    assert one * 16 > tensorwise * 1.02  # with one micro-batch nobody shares the weights' casts


def test_own_casts_are_planned_faster() -> None:
    """The 6.7B shape on one H200, by bytes: what benchmarks/evidence/performance.md says."""
    bf16, _ = planned("none")
    gains = [bf16 / planned(recipe, f"backend.quantise={q}")[0] for recipe in RECIPES for q in ("torch", "own")]
    assert [round(gain, 2) for gain in gains] == [1.14, 1.24, 1.15, 1.24]
    # Without own kernels autograd adds gradients in passes of its own, in bf16 too; beyond that the casts are torch's.
    plain, _ = planned("none", "backend.own_kernels=off")
    cast, cast_peak = planned("tensorwise", "backend.own_kernels=off")
    torch_casts, torch_peak = planned("tensorwise", "backend.quantise=torch")
    assert plain > bf16 and cast - plain == pytest.approx(torch_casts - bf16, rel=1e-9)
    assert cast_peak == torch_peak


def test_no_plan_for_a_cluster_without_fp8() -> None:
    run = changed(load("clusters/frontier").config, precision={"fp8": "rowwise"})
    with pytest.raises(ConfigError, match=r'precision.fp8 "rowwise": .* has no 8-bit products .*fp8 = "none"'):
        machine_of(run)
