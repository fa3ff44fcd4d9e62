"""What only a GPU can show, on one device. Several ranks share it over gloo, because NCCL refuses two ranks on one."""

from __future__ import annotations

import dataclasses
import itertools
import subprocess
import sys
import warnings
from functools import partial
from pathlib import Path
from typing import Any, Literal

import pytest
import torch

from megatron_port.core.config.schema import (
    BackendConfig,
    BatchConfig,
    ModelConfig,
    OptimizerConfig,
    PrecisionConfig,
    RunConfig,
)
from megatron_port.core.data.batch import MicroBatch
from megatron_port.core.dist.groups import ParallelContext
from megatron_port.core.dist.positions import Positions, Run
from megatron_port.core.dist.record import InitSpec, initial_values
from megatron_port.core.layers.attention import AttentionMask
from megatron_port.core.layers.dropout import DropoutStream
from megatron_port.core.layers.providers import torch_providers
from megatron_port.ext.context.attention import mask_of_rows
from megatron_port.ext.kernels.choose import choose_providers
from megatron_port.ext.kernels.choose_fp8 import choose_fp8, device_formats
from megatron_port.ext.kernels.fp8 import Fp8, quantise
from megatron_port.ext.kernels.packed_documents import pack_documents
from megatron_port.ext.kernels.settings import CAUSAL, MaskNeeds
from megatron_port.run.build import build_engine
from megatron_port.run.device import choose_device

Recipe = Literal["none", "tensorwise", "rowwise"]

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU that torch can use")]

RUN_FILE = """
name = "gpu-parity"
engine = "native"
[model]
num_layers = 4
hidden_size = 256
num_attention_heads = 8
vocab_size = 1009
seq_length = 128
hidden_dropout = 0.1
[layout]
zero_stage = 0
[batch]
micro_batch_size = 2
global_batch_size = 8
[optimizer]
eps = 1e-5
[training]
steps = 10
[data]
synthetic = true
tokenizer = "byte"
[backend]
share_devices = true
"""


def _device() -> torch.device:
    return choose_device("auto").torch_device


def test_weights_are_bit_equal_to_the_cpus() -> None:
    """Only + - x / and square roots: the same bits on any device."""
    box: dict[str, Any] = {"seed": 3, "name": "w", "init": InitSpec("normal", 0.02), "shape": (1000, 777),
                           "offset": (10, 5), "extent": (900, 700)}
    assert torch.equal(initial_values(**box, device="cpu"), initial_values(**box, device=_device()).cpu())


def test_dropout_masks_are_the_cpus() -> None:
    masks = []
    for device in (torch.device("cpu"), _device()):
        stream = DropoutStream(1, device)
        stream.set_micro_batch(5, (3, 4))
        masks.append(stream.dropout(torch.ones(16, 2, 64, device=device), 0.3, op="x", width=64).cpu())
    assert torch.equal(*masks)


def _mask(needs: MaskNeeds, heads: int, device: torch.device) -> AttentionMask | None:
    """A mask that has what is needed, of 2 samples of 256 tokens."""
    if not needs.any:
        return None
    starts = torch.tensor([[0] * 100 + [100] * 156, [0] + [1] * 200 + [201] * 55], dtype=torch.int32)
    return AttentionMask(
        window=70 if needs.window else 0, softcap=2.0 if needs.softcap else 0.0,
        sinks=torch.linspace(-1, 1, heads, device=device) if needs.sinks else None,
        first=starts.to(device) if needs.documents else None, documents=partial(pack_documents, starts, device),
    )


@pytest.mark.parametrize("needs", [
    CAUSAL, MaskNeeds(window=True), MaskNeeds(documents=True), MaskNeeds(window=True, sinks=True, softcap=True),
    MaskNeeds(runs=True), MaskNeeds(runs=True, window=True), MaskNeeds(runs=True, documents=True),
], ids=["causal", "window", "documents", "sinks", "runs", "runs of a window", "runs in documents"])
@pytest.mark.parametrize("heads,groups,size", [(8, 8, 64), (8, 2, 128), (4, 1, 96)])
def test_chosen_attention_is_as_exact_as_eager(heads: int, groups: int, size: int, needs: MaskNeeds) -> None:
    """Error against fp64 at most twice that of the math provider in the same dtype (three times for gradients)."""
    device = choose_device("auto")
    chosen = choose_providers(BackendConfig(), device, torch.bfloat16, engine="native", mask=needs).attention
    held = Positions((Run(64, 64), Run(190, 60))) if needs.runs else Positions.contiguous(256)
    mask = _mask(needs, heads, device.torch_device)
    mask = mask_of_rows(mask, held, device.torch_device) if needs.runs else mask
    eager = torch_providers().attention
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(256, 2, n, size, generator=generator, dtype=torch.float64) for n in (heads, groups, groups)]
    weight = torch.randn(256, 2, heads * size, generator=generator, dtype=torch.float64)
    inputs[0], weight = held.take(inputs[0]), held.take(weight)

    def run(function: object, dtype: torch.dtype) -> list[torch.Tensor]:
        leaves = [x.detach().to(device.torch_device, dtype).requires_grad_() for x in inputs]
        out = function(*leaves, mask=mask)  # type: ignore[operator]
        (out * weight.to(out)).sum().backward()
        return [out.detach().double(), *(x.grad.double() for x in leaves)]  # type: ignore[union-attr]

    exact = run(eager, torch.float64)
    ours, theirs = run(chosen, torch.bfloat16), run(eager, torch.bfloat16)
    for i, (a, b, reference) in enumerate(zip(ours, theirs, exact)):
        bound = (2.0 if i == 0 else 3.0) * float((b - reference).abs().max()) + 1e-6
        assert float((a - reference).abs().max()) <= bound, ("out", "dq", "dk", "dv")[i]


def _losses(
    device: torch.device, dtype: Literal["fp32", "bf16", "fp16"], steps: int, fp8: Recipe = "none"
) -> list[float]:
    config = RunConfig(
        engine="native",
        model=ModelConfig(num_layers=4, hidden_size=256, num_attention_heads=8, vocab_size=1009, seq_length=128,
                          hidden_dropout=0.1),
        batch=BatchConfig(micro_batch_size=4, global_batch_size=8),
        precision=PrecisionConfig(dtype=dtype, fp8=fp8), optimizer=OptimizerConfig(lr=1e-3),
    )
    providers = torch_providers() if fp8 == "none" else dataclasses.replace(torch_providers(), fp8=_fp8(fp8))
    engine = build_engine(config, ParallelContext.single(device), providers)
    out = []
    for step in range(steps):
        batches = []
        for m in range(2):
            generator = torch.Generator().manual_seed(m)
            tokens = torch.randint(0, 1009, (4, 129), generator=generator)
            batches.append(MicroBatch(tuple(range(4 * m, 4 * m + 4)), tokens[:, :-1], tokens[:, 1:]))
        out.append(engine.train_step(batches, step=step, lr=1e-3).loss)
    return out


def test_fp32_run_equals_the_cpus() -> None:
    allowed = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    try:
        assert _losses(_device(), "fp32", 5) == pytest.approx(_losses(torch.device("cpu"), "fp32", 5), rel=1e-4)
    finally:
        torch.backends.cuda.matmul.allow_tf32 = allowed


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_half_precision_learns(dtype: Literal["bf16", "fp16"]) -> None:
    losses = _losses(_device(), dtype, 30)
    assert losses[-1] < losses[0] - 0.5


def _fp8(recipe: str) -> Fp8:
    """Of this GPU; skips where it has none."""
    device = choose_device("auto")
    problem = device_formats(device)[1]
    if problem:
        pytest.skip(problem)
    return choose_fp8(BackendConfig(), recipe, device)[0]


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_8_bit_products_are_the_references(recipe: str) -> None:
    """Both dtypes of the left operand and of the result, odd numbers of rows; fp32 sums, or Hopper's own where fast."""
    fp8, device = _fp8(recipe), _device()
    rowwise = recipe == "rowwise"
    kinds = [(fp8.formats.precise, torch.bfloat16, True)]
    kinds += [] if rowwise else [(fp8.formats.wide, torch.float32, False), (fp8.formats.wide, torch.bfloat16, False)]
    for (rows, columns, inner), (left, out, fast) in itertools.product(((33, 48, 64), (4096, 1536, 4096)), kinds):
        generator = torch.Generator().manual_seed(rows)
        a, b = (torch.randn(n, inner, generator=generator).to(device, torch.bfloat16) for n in (rows, columns))
        bias = b[0, 0] * torch.ones(columns, device=device, dtype=out) if fast else None
        x, w = quantise(a, left, rowwise=rowwise), quantise(b, fp8.formats.precise, rowwise=rowwise)
        got = fp8.product(x, w, bias, out, fast).double()
        left_exact, right_exact = (q.values.double() * q.inverse.double() for q in (x, w))
        exact = left_exact @ right_exact.t() + (0.0 if bias is None else bias.double())
        size = left_exact.abs() @ right_exact.abs().t()
        # Sums inside Hopper's tensor cores keep about 14 bits; without ``fast`` they are added up in fp32 now and then.
        sums = (2.0**-10 if fast else 2.0**-12) * size
        unit = 2.0**-8 if out == torch.bfloat16 else 0.0
        assert bool(((got - exact).abs() <= unit * exact.abs() + sums).all()), (rows, left, out)


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_8_bit_training_learns_as_bf16_does(recipe: Recipe) -> None:
    _fp8(recipe)
    half, eight = (_losses(_device(), "bf16", 30, fp8=fp8) for fp8 in ("none", recipe))
    assert eight[0] == pytest.approx(half[0], rel=2e-3) and eight[-1] == pytest.approx(half[-1], abs=0.1)


@pytest.mark.parametrize("fp8", ["none", "tensorwise", "rowwise"])
def test_a_step_waits_for_the_gpu_once(fp8: Recipe) -> None:
    """Loss, norm and flag come back together at its end; micro-batches, masks, keys and scales make nothing wait."""
    if fp8 != "none":
        _fp8(fp8)
    config = RunConfig(
        engine="native",
        model=ModelConfig(num_layers=2, hidden_size=256, num_attention_heads=8, vocab_size=1009, seq_length=128,
                          hidden_dropout=0.1),
        batch=BatchConfig(micro_batch_size=2, global_batch_size=8), precision=PrecisionConfig(dtype="bf16", fp8=fp8),
        optimizer=OptimizerConfig(lr=1e-3),
    )
    device = choose_device("auto")
    providers = choose_providers(
        config.backend, device, torch.bfloat16, engine="native", attention_dropout=0.0, fp8=fp8
    )
    engine = build_engine(config, ParallelContext.single(device.torch_device), providers)
    tokens = torch.randint(0, 1009, (4, 2, 129))
    batches = [MicroBatch((2 * m, 2 * m + 1), t[:, :-1], t[:, 1:], torch.ones(2, 128)) for m, t in enumerate(tokens)]
    for step in range(2):
        engine.train_step(batches, step=step, lr=1e-3)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            engine.train_step(batches, step=2, lr=1e-3)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    waits = [f"{w.filename}:{w.lineno}" for w in caught if "synchroniz" in str(w.message)]
    # One more where torch's AdamW, which decides on the host, stands in for a kernel that is not built.
    assert len(waits) <= (1 if providers.optimizer == "own" else 2), waits


@pytest.mark.parametrize("settings", [
    ("layout.pipeline_schedule=zb-h1",), ("layout.pipeline_schedule=zb-v", "layout.virtual_pipeline_size=2"),
    ("layout.virtual_pipeline_size=2",), ("layout.zero_stage=2", "layout.reduce_bucket_size=20000"),
], ids=lambda s: " ".join(s))
def test_schedules_on_one_gpu(tmp_path: Path, settings: tuple[str, ...]) -> None:
    (tmp_path / "run.toml").write_text(RUN_FILE)
    changes = [word for setting in ("precision.dtype=fp32", *settings) for word in ("--set", setting)]
    done = subprocess.run(
        [sys.executable, "-m", "megatron_port", "parity", "run.toml", "--layouts", "tp1pp1dp1", "tp1pp2dp2", *changes],
        cwd=tmp_path, capture_output=True, text=True, timeout=280, check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("EQUAL within tolerance") == 1


@pytest.mark.parametrize("layouts", [("tp1pp1dp1", "tp2pp1dp1sp", "tp1pp2dp1", "tp2pp2dp2", "tp2pp1cp2dp1")])
def test_layouts_on_one_gpu(tmp_path: Path, layouts: tuple[str, ...]) -> None:
    """`parity` with all ranks on the one device; point-to-point goes through the host."""
    (tmp_path / "run.toml").write_text(RUN_FILE)
    done = subprocess.run(
        [sys.executable, "-m", "megatron_port", "parity", "run.toml", "--layouts", *layouts,
         "--set", "precision.dtype=fp32"],
        cwd=tmp_path, capture_output=True, text=True, timeout=280, check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("EQUAL within tolerance") == len(layouts) - 1
