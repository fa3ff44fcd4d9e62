"""Attention providers against an fp64 reference, and the choice of device and providers."""

from __future__ import annotations

import dataclasses
import math
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.attention import SDPBackend, sdpa_kernel

from megatron_port.core.config.model import MoEConfig
from megatron_port.core.config.schema import BackendConfig
from megatron_port.core.dist.rank import DeviceInfo
from megatron_port.core.errors import EnvironmentFault
from megatron_port.core.layers.attention import AttentionMask, math_attention
from megatron_port.core.layers.fused import ProbabilityDropout, torch_layer_norm, torch_rms_norm, torch_split_rotary
from megatron_port.core.layers.providers import torch_providers
from megatron_port.ext.kernels import attention_choice as choose_attention
from megatron_port.ext.kernels import kernels
from megatron_port.ext.kernels.choose import choose_providers
from megatron_port.ext.kernels.choose_experts import own_experts
from megatron_port.ext.kernels.settings import CAUSAL, MaskNeeds
from megatron_port.ext.kernels.torch_attention import flash_attention, fold_batch, gpu_kernels, sdpa_attention
from megatron_port.run.device import Accelerators, choose_device, describe_device, identity_of

CPU = DeviceInfo("cpu", torch.device("cpu"), "gloo", "cpu", 0, "test")
GPU = DeviceInfo("cuda", torch.device("cuda", 0), "nccl", "H", 0, "test")
NO_GPU = Accelerators(None, 0, lambda i: ("", 0, ""))


def gpus(count: int, kind: str = "cuda") -> Accelerators:
    return Accelerators(kind, count, lambda i: (f"gpu {i}", 64 << 30, f"uuid-{i}"))


def reference(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> torch.Tensor:
    """Query by query, in fp64."""
    seq, batch, heads, size = q.shape
    rep = heads // k.shape[2]
    out = torch.zeros(seq, batch, heads, size, dtype=torch.float64)
    for b in range(batch):
        for h in range(heads):
            for i in range(seq):
                last = i + 1 if causal else k.shape[0]
                keys, values = (x[:last, b, h // rep].double() for x in (k, v))
                weights = torch.softmax(keys @ q[i, b, h].double() / math.sqrt(size), 0)
                out[i, b, h] = weights @ values
    return out.reshape(seq, batch, heads * size)


def inputs(seq: int, batch: int, groups: int, rep: int, size: int, dtype: torch.dtype) -> list[torch.Tensor]:
    gen = torch.Generator().manual_seed(seq * 100 + rep)
    return [torch.randn(seq, batch, n, size, generator=gen, dtype=torch.float64).to(dtype).requires_grad_()
            for n in (groups * rep, groups, groups)]


@settings(max_examples=12, deadline=None)
@given(
    st.integers(1, 9), st.integers(1, 2), st.integers(1, 3), st.integers(1, 3), st.sampled_from([1, 4, 5]),
    st.booleans(),
)
def test_providers_equal_the_reference_in_fp64(
    seq: int, batch: int, groups: int, rep: int, size: int, causal: bool
) -> None:
    q, k, v = inputs(seq, batch, groups, rep, size, torch.float64)
    expected = reference(q, k, v, causal)
    grads = torch.autograd.grad(expected.square().sum(), (q, k, v))
    for attention in (math_attention, sdpa_attention()):
        out = attention(q, k, v, causal=causal)
        torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(torch.autograd.grad(out.square().sum(), (q, k, v)), grads, rtol=1e-10, atol=1e-11)


def test_math_softmax_is_wide_in_bf16() -> None:
    q, k, v = inputs(64, 1, 1, 2, 16, torch.bfloat16)
    out = math_attention(q, k, v)
    assert out.dtype == torch.bfloat16
    error = (out.double() - reference(q, k, v, True)).abs().max()
    heads = [x.permute(1, 2, 0, 3) for x in (q, k, v)]
    eager = torch.nn.functional.scaled_dot_product_attention(
        heads[0], heads[1], heads[2], is_causal=True, enable_gqa=True
    ).permute(2, 0, 1, 3).reshape(64, 1, -1)
    assert error <= 2 * (eager.double() - reference(q, k, v, True)).abs().max() + 1e-3


def test_dropout_sees_and_changes_probabilities() -> None:
    q, k, v = inputs(4, 2, 2, 2, 3, torch.float64)
    seen: list[torch.Tensor] = []

    def double(probs: torch.Tensor) -> torch.Tensor:
        seen.append(probs)
        return probs * 2

    dropout = ProbabilityDropout(double, torch.empty(0, dtype=torch.int64), 0, 0.5, 0, 0)
    out = math_attention(q, k, v, dropout=dropout)
    assert seen[0].shape == (2, 4, 4, 4)
    torch.testing.assert_close(seen[0].sum(-1), torch.ones(2, 4, 4, dtype=torch.float64))
    assert torch.equal(seen[0].triu(1), torch.zeros_like(seen[0]))
    torch.testing.assert_close(out, 2 * math_attention(q, k, v))
    with pytest.raises(ValueError, match="use math"):
        sdpa_attention()(q, k, v, dropout=dropout)


def test_flash_attn_gets_one_sample_with_the_heads_of_all_and_nothing_is_copied() -> None:
    q, k, v = inputs(5, 2, 2, 2, 4, torch.float64)
    made: list[torch.Tensor] = []

    def function(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> torch.Tensor:
        assert q.shape == (1, 5, 8, 4) and k.shape == (1, 5, 4, 4) and causal
        back = [x.transpose(0, 1) for x in (q, k, v)]
        made.append(math_attention(*back).view(1, 5, 8, 4))
        return made[0]

    out = flash_attention(function)(q, k, v)
    torch.testing.assert_close(out, math_attention(q, k, v))
    assert out.data_ptr() == made[0].data_ptr() and out.is_contiguous()


def test_a_packed_projection_reaches_attention_as_views() -> None:
    packed = torch.randn(5, 3, 2, 3, 4)
    for x, y in zip(torch_split_rotary(packed, None, None), packed.unbind(3)):
        folded = fold_batch(x)
        assert folded.shape == (1, 5, 6, 4) and torch.equal(folded[0].view(5, 3, 2, 4), y)
        assert folded.data_ptr() == y.data_ptr()


def test_two_models_in_a_process_each_get_their_order_of_kernels() -> None:
    """torch keeps one order, and with it which kernels may run at all."""
    x = torch.randn(4, 1, 2, 8)
    first, second = (sdpa_attention([kernel]) for kernel in (SDPBackend.MATH, SDPBackend.FLASH_ATTENTION))
    with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.MATH], set_priority=True):  # restores what was before
        for attention, math_runs in ((first, True), (second, False), (second, False), (first, True)):
            attention(x, x, x)
            assert torch.backends.cuda.math_sdp_enabled() == math_runs
            assert torch.backends.cuda.flash_sdp_enabled() != math_runs
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):  # someone else's choice
            first(x, x, x)
            assert torch.backends.cuda.math_sdp_enabled()


def test_shapes_that_do_not_fit_are_refused() -> None:
    q, k, v = inputs(4, 1, 2, 1, 4, torch.float64)
    with pytest.raises(ValueError, match="do not fit"):
        math_attention(q, k[:, :, :, :2], v)
    with pytest.raises(ValueError, match="as many queries as keys"):
        sdpa_attention()(q[:2], k, v)


def test_norms() -> None:
    x = torch.randn(3, 2, 8, dtype=torch.float64)
    weight, bias = torch.randn(8, dtype=torch.float64), torch.randn(8, dtype=torch.float64)
    centred = x - x.mean(-1, keepdim=True)
    expected = centred / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight
    torch.testing.assert_close(torch_layer_norm(x, None, weight, bias, 1e-5)[0], expected + bias)
    torch.testing.assert_close(torch_layer_norm(x, None, weight, None, 1e-5)[0], expected)
    rms = x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight
    torch.testing.assert_close(torch_rms_norm(x, None, weight, None, 1e-6)[0], rms)


# ---------------------------------------------------------------- choosing


def test_the_device_is_the_local_rank_modulo_the_visible() -> None:
    picked = [choose_device("auto", local_rank=r, local_world_size=8, gpus=gpus(8)) for r in range(8)]
    assert [d.torch_device.index for d in picked] == list(range(8)) and picked[0].comm_backend == "nccl"
    one = choose_device("auto", local_rank=5, local_world_size=8, gpus=gpus(1, "rocm"))
    assert one.torch_device.index == 0 and one.kind == "rocm" and one.comm_backend == "nccl"
    assert one.identity == "uuid-0"
    shared = choose_device("cuda", local_rank=3, local_world_size=4, gpus=gpus(2), share=True)
    assert shared.torch_device.index == 1 and shared.comm_backend == "gloo" and "share 2 devices" in shared.why
    with pytest.raises(EnvironmentFault, match=r"4 ranks .* node of 2 GPUs; start at most 2 .*share_devices = true"):
        choose_device("cuda", local_rank=3, local_world_size=4, gpus=gpus(2))


def test_a_gpu_is_told_from_others_by_uuid_and_address() -> None:
    """GPUs of one UUID were taken for one GPU, and their ranks silently changed from NCCL to gloo."""
    zeros = "00000000-0000-0000-0000-000000000000"
    gpu = [SimpleNamespace(uuid=zeros, pci_domain_id=0, pci_bus_id=bus, pci_device_id=0) for bus in (0x1B, 0x43)]
    assert identity_of(gpu[0]) == f"{zeros} at 0000:1b:00" != identity_of(gpu[1])
    half = [SimpleNamespace(uuid=uuid, pci_domain_id=0, pci_bus_id=1, pci_device_id=0) for uuid in ("MIG-1", "MIG-2")]
    assert identity_of(half[0]) != identity_of(half[1])
    assert identity_of(SimpleNamespace(uuid="abc")) == "abc" and identity_of(SimpleNamespace()) == ""


@pytest.mark.parametrize(("kind", "backend", "world", "says"), [
    ("cuda", "nccl", 4, "cuda:0 H100 (auto); collectives: NCCL (GPU tensors), gloo (CPU tensors)"),
    ("rocm", "nccl", 4, "cuda:0 H100 (auto); collectives: RCCL (GPU tensors), gloo (CPU tensors)"),
    ("cuda", "gloo", 4, "cuda:0 H100 (auto); collectives: gloo, through host memory: ranks share a GPU"),
    ("cpu", "gloo", 2, "the CPU (auto); collectives: gloo"),
    ("cpu", "gloo", 1, "the CPU (auto); collectives: none (1 process)"),
])
def test_the_log_says_what_carries_the_collectives(kind: str, backend: str, world: int, says: str) -> None:
    device = DeviceInfo(kind, torch.device("cuda", 0), backend, "H100", 1, "auto")
    assert describe_device(device, backend, world) == f"device: {says}"


def test_without_a_gpu_auto_is_the_cpu_and_says_why() -> None:
    device = choose_device("auto", gpus=NO_GPU)
    assert (device.kind, device.comm_backend) == ("cpu", "gloo") and "CPU build" in device.why
    assert device.memory_bytes > 1 << 28
    assert "sees no GPU" in choose_device("auto", gpus=gpus(0)).why
    assert choose_device("cpu", gpus=gpus(8)).kind == "cpu"


@pytest.mark.parametrize(
    ("asked", "have", "says"),
    [("cuda", NO_GPU, "CPU build"), ("rocm", gpus(4), "built for cuda"), ("cuda", gpus(0), "CUDA_VISIBLE_DEVICES"),
     ("rocm", gpus(0, "rocm"), "ROCR_VISIBLE_DEVICES"), ("tpu", gpus(1), "not one of")],
)
def test_an_absent_device_is_refused_with_the_reason(asked: str, have: Accelerators, says: str) -> None:
    with pytest.raises(EnvironmentFault, match=says):
        choose_device(asked, gpus=have)


def choose(device: DeviceInfo = CPU, dtype: torch.dtype = torch.float32, *, dropout: float = 0.0,
           engine: str = "native", mask: MaskNeeds = CAUSAL, moe: MoEConfig | None = None, **config: Any):
    return choose_providers(
        BackendConfig(**config), device, dtype, engine=engine, attention_dropout=dropout, mask=mask, moe=moe
    )


def row(providers: Any, op: str) -> Any:
    return next(r for r in providers.table if r.op == op)


OPS = ["attention", "norm", "activation", "rotary", "dropout", "cross_entropy", "optimizer"]


def test_a_mask_is_served_or_refused_by_name() -> None:
    """Without own kernels torch's attention takes what it can, and math the rest."""
    window, sinks = MaskNeeds(window=True, documents=True), MaskNeeds(sinks=True, softcap=True)
    served = row(choose(dtype=torch.float64, mask=window), "attention")
    assert served.provider == "sdpa" and "computes all scores" in served.why
    skipped = row(choose(dtype=torch.float64, mask=sinks), "attention")
    assert skipped.provider == "math" and "sdpa cannot serve soft-capped scores (model.attention_softcap) and" in \
        skipped.why
    with pytest.raises(EnvironmentFault, match=r"attention = \"sdpa\" cannot serve: .*attention sinks \(model.att"):
        choose(attention="sdpa", mask=sinks)
    with pytest.raises(EnvironmentFault, match=r"fa3 cannot serve a window \(model.sliding_window\) and attention"):
        choose(attention="fa3", mask=window)


@pytest.fixture
def no_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if `make kernels` had never run."""
    monkeypatch.setattr(kernels, "kernels_status", lambda kind: ("", f"libmp_{kind}.so is not built; make kernels"))


def test_auto_without_own_kernels_and_its_table(no_library: None) -> None:
    chosen = choose()
    assert [r.op for r in chosen.table] == OPS
    assert [r.provider for r in chosen.table] == ["sdpa"] + ["torch"] * 6
    assert all("libmp_cpu.so is not built" in r.why for r in chosen.table)
    assert chosen.optimizer == "torch" and chosen.bias_dropout_add is None
    assert torch_providers().attention is math_attention
    assert [r.op for r in choose(attention="math").table][:2] == ["attention", "softmax"]
    with pytest.raises(EnvironmentFault, match=r"own_kernels = \"on\", but for softmax: libmp_cpu.so is not built"):
        choose(own_kernels="on")
    with pytest.raises(EnvironmentFault, match=r"backend.norm = \"own\" cannot serve: libmp_cpu.so is not built"):
        choose(norm="own")


def test_own_kernels_go_first_where_they_are_built_and_serve() -> None:
    if kernels.kernels_status("cpu")[1]:
        pytest.skip(kernels.kernels_status("cpu")[1])
    chosen = choose()
    assert [r.provider for r in chosen.table] == ["own"] * 7
    assert all("cpu v" in r.why or "cpu base" in r.why for r in chosen.table)
    assert chosen.packed_attention is not None and choose(attention="sdpa").packed_attention is None
    with_torch = ["sdpa"] + ["torch"] * 6
    without = choose(own_kernels="off")
    assert [r.provider for r in without.table] == with_torch and "own_kernels is off" in row(without, "attention").why
    assert [r.provider for r in choose(dtype=torch.float64).table] == with_torch
    with pytest.raises(EnvironmentFault, match="fp32, fp16 and bf16, not float64"):
        choose(dtype=torch.float64, attention="own")
    with pytest.raises(EnvironmentFault, match="fp32, fp16 and bf16, not float64"):
        choose(dtype=torch.float64, own_kernels="on")
    with pytest.raises(EnvironmentFault, match="own AdamW is for engine native"):
        choose(engine="deepspeed", optimizer="own")


def test_experts_are_chosen_where_a_model_has_some() -> None:
    moe = MoEConfig(num_experts=8)
    assert choose(moe=MoEConfig()).table == choose().table and choose().experts is None
    assert choose(moe=moe, own_kernels="off").experts is None
    assert row(choose(moe=moe, dtype=torch.float64), "experts").provider == "torch"
    if not kernels.kernels_status("cpu")[1]:
        assert choose(moe=moe).experts is own_experts and row(choose(moe=moe), "experts").provider == "own"
        assert choose(moe=moe, experts="torch").experts is None
        large = choose(moe=MoEConfig(num_experts=1024))
        assert large.experts is None and "at most 512 experts" in row(large, "experts").why
        with pytest.raises(EnvironmentFault, match=r"experts = \"own\" cannot serve: the own router takes at most 512"):
            choose(moe=MoEConfig(num_experts=1024), experts="own")
    with pytest.raises(EnvironmentFault, match="fp32, fp16 and bf16, not float64"):
        choose(moe=moe, dtype=torch.float64, experts="own")


def test_dropout_on_probabilities_needs_counters() -> None:
    without = choose(dropout=0.1, own_kernels="off")
    assert row(without, "attention").provider == "math" and "own_kernels is off" in row(without, "attention").why
    assert row(choose(dropout=0.1, attention="math"), "attention").provider == "math"
    if not kernels.kernels_status("cpu")[1]:
        assert row(choose(dropout=0.1), "attention").provider == "own"
    with pytest.raises(EnvironmentFault, match=r"attention_dropout is 0.1.*backend.attention = \"math\""):
        choose(dropout=0.1, attention="sdpa")


def test_dropout_on_a_gpu_is_inside_of_the_own_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where it can serve; math else, with the reason. Without dropout it is taken when asked for."""
    monkeypatch.setattr(kernels, "kernels_status", lambda kind: (f"libmp_{kind}.so: here", ""))
    monkeypatch.setattr(kernels, "load", lambda kind: f"libmp_{kind}.so: here")

    def chosen(
        dropout: float = 0.1, size: int = 64, dtype: torch.dtype = torch.bfloat16, mask: MaskNeeds = CAUSAL,
        **config: Any
    ) -> Any:
        return choose_providers(BackendConfig(**config), GPU, dtype, engine="native", attention_dropout=dropout,
                                shape=(size, 1024), mask=mask)

    served = chosen()
    assert row(served, "attention").provider == "own" and served.packed_attention is not None
    assert "attention_dropout 0.1, inside of the kernel; libmp_cuda.so" in row(served, "attention").why
    assert row(chosen(size=128, mask=MaskNeeds(window=True, documents=True, runs=True)), "attention").provider == "own"
    for refused, why in (
        ({"size": 200}, "heads of up to 128 elements, a multiple of 8, not 200"), ({"size": 68}, "not 68"),
        ({"dtype": torch.float32}, "takes fp16 and bf16, not float32"), ({"own_kernels": "off"}, "own_kernels is off"),
        ({"mask": MaskNeeds(runs=True, partials=True)}, "cannot serve partial results"),
        ({"mask": MaskNeeds(sinks=True)}, "cannot serve attention sinks"),
    ):
        found = row(chosen(**refused), "attention")
        assert found.provider == "math" and why in found.why, found
        with pytest.raises(EnvironmentFault, match=why):
            chosen(**refused, attention="own")
    assert row(chosen(dropout=0.0), "attention").provider == "sdpa"
    assert row(chosen(dropout=0.0, attention="own"), "attention").provider == "own"


def test_a_ring_on_a_gpu_is_fused_where_torch_can() -> None:
    ring = MaskNeeds(runs=True, partials=True)

    def chosen(mask: MaskNeeds = ring, size: int = 64, dtype: torch.dtype = torch.bfloat16, device: Any = GPU,
               **config: Any) -> Any:
        backend = BackendConfig(own_kernels="off", **config)
        return choose_providers(backend, device, dtype, shape=(size, 1024), mask=mask)

    for asked in ("auto", "sdpa"):
        served = chosen(attention=asked)
        assert row(served, "attention").provider == "sdpa" and "torch's flash" in row(served, "attention").why
        assert served.partial_attention == "partial attention, fused"
    assert chosen(dataclasses.replace(ring, sinks=True)).partial_attention == "partial attention, fused"
    for refused, why in (
        ({"mask": dataclasses.replace(ring, window=True)}, "cannot serve a window"),
        ({"mask": dataclasses.replace(ring, documents=True)}, "cannot serve attention within documents"),
        ({"mask": dataclasses.replace(ring, softcap=True)}, "cannot serve soft-capped"),
        ({"size": 68}, "a multiple of 8, not 68"), ({"size": 264}, "up to 256"), ({"dtype": torch.float32}, "float32"),
    ):
        found = chosen(**refused)
        assert row(found, "attention").provider == "math" and why in row(found, "attention").why
        assert found.partial_attention == "partial attention, math"
        with pytest.raises(EnvironmentFault, match=why):
            chosen(**refused, attention="sdpa")


def test_the_own_kernel_needs_matrix_instructions(monkeypatch: pytest.MonkeyPatch) -> None:
    there = dataclasses.replace(GPU, memory_bytes=1 << 30)
    for arch, serves in (("sm_75", False), ("sm_80", True), ("sm_120", True), ("gfx90a", True), ("gfx908", False),
                         ("gfx942", True), ("gfx1100", False)):
        monkeypatch.setattr(choose_attention, "arch_of", lambda device, arch=arch: arch)
        problem = choose_attention.own_gpu_limit(there, choose_attention.AttentionNeeds(torch.float16, head_size=64))
        assert (problem == "") == serves and (serves or f"not {arch}" in problem)


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"attention": "flash_attn"}, "needs a GPU"),
        ({"attention": "magic"}, "none of own, math"),
        ({"norm": "apex"}, "need a GPU"),
        ({"norm": "x"}, "none of own, apex, torch"),
        ({"optimizer": "apex"}, "need a GPU"),
        ({"optimizer": "deepspeed"}, "engine native"),
        ({"optimizer": "x"}, "none of own, deepspeed, apex, torch"),
        ({"attention": "fa3"}, "needs a GPU"),
    ],
)
def test_what_was_asked_for_and_cannot_serve_is_an_error(config: dict[str, Any], says: str) -> None:
    with pytest.raises(EnvironmentFault, match=says):
        choose(**config)


def test_on_a_gpu_missing_packages_are_named(monkeypatch: pytest.MonkeyPatch, no_library: None) -> None:
    for name in ("flash_attn", "fused_layer_norm_cuda"):
        monkeypatch.setitem(sys.modules, name, None)  # import raises ModuleNotFoundError
    chosen = choose(GPU, torch.bfloat16)
    assert row(chosen, "attention").provider == "sdpa" and "cudnn, flash" in row(chosen, "attention").why
    assert row(chosen, "norm").provider == "torch"
    assert "libmp_cuda.so is not built" in row(chosen, "norm").why
    assert "fused_layer_norm_cuda is not installed" in row(chosen, "norm").why
    with pytest.raises(EnvironmentFault, match="libmp_cuda.so is not built"):
        choose(GPU, torch.bfloat16, attention="own")
    assert row(choose(GPU, torch.bfloat16, dropout=0.1), "attention").provider == "math"
    with pytest.raises(EnvironmentFault, match="flash_attn is not installed"):
        choose(GPU, torch.bfloat16, attention="flash_attn")
    with pytest.raises(EnvironmentFault, match="not float32"):
        choose(GPU, torch.float32, attention="flash_attn")


def test_on_a_gpu_present_packages_serve(monkeypatch: pytest.MonkeyPatch, no_library: None) -> None:
    flash = ModuleType("flash_attn")
    flash.flash_attn_func = lambda q, k, v, causal: q  # type: ignore[attr-defined]
    apex, normalization, layer = (ModuleType(n) for n in ("apex", "apex.normalization", "fused_layer_norm"))
    layer.fused_layer_norm_affine = lambda x, w, b, shape, eps: F.layer_norm(x, shape, w, b, eps)  # type: ignore[attr-defined]
    layer.fused_rms_norm_affine = lambda x, w, shape, eps: F.rms_norm(x, shape, w, eps)  # type: ignore[attr-defined]
    for name, module in {"flash_attn": flash, "apex": apex, "apex.normalization": normalization,
                         "apex.normalization.fused_layer_norm": layer,
                         "fused_layer_norm_cuda": ModuleType("fused_layer_norm_cuda")}.items():
        monkeypatch.setitem(sys.modules, name, module)
    chosen = choose(GPU, torch.bfloat16, attention="flash_attn")
    assert row(chosen, "attention").provider == "flash_attn" and row(chosen, "norm").provider == "apex"
    x, w = torch.randn(2, 8), torch.ones(8)
    assert torch.equal(chosen.rms_norm(x, x, w, None, 1e-5)[0], F.rms_norm(2 * x, (8,), w, 1e-5))
    assert torch.equal(chosen.layer_norm(x, None, w, None, 1e-5)[0], F.layer_norm(x, (8,), w, None, 1e-5))
    assert row(choose(GPU, torch.bfloat16, norm="torch"), "norm").provider == "torch"


def test_kernel_order_by_device_and_determinism() -> None:
    cases = ((False, False), (False, True), (True, False))
    names = [[k.name for k in gpu_kernels(rocm=r, deterministic=d)] for r, d in cases]
    assert names[0][0] == "CUDNN_ATTENTION" and "CUDNN_ATTENTION" not in names[1] + names[2]
    assert all(n[-1] == "MATH" for n in names)


def test_cudnn_is_not_tried_under_a_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its gradient of the queries was NaN there; without a mask it is the first, also after a call with one."""
    kernels, tried = gpu_kernels(rocm=False, deterministic=False), []
    attend = F.scaled_dot_product_attention

    def noted(*args: Any, **options: Any) -> torch.Tensor:
        tried.append((torch.backends.cuda.cudnn_sdp_enabled(), torch._C._get_sdp_priority_order()[0]))
        return attend(*args, **options)

    monkeypatch.setattr(F, "scaled_dot_product_attention", noted)
    attention, (q, k, v) = sdpa_attention(kernels), (torch.randn(6, 2, 2, 8) for _ in range(3))
    ends = torch.arange(1, 7, dtype=torch.int32)
    masks = (None, AttentionMask(window=2), AttentionMask(first=torch.zeros(2, 6, dtype=torch.int32)),
             AttentionMask(window=3, end=ends, runs=((1, 6),)), None)
    with sdpa_kernel(kernels, set_priority=True):  # restores the process's order
        for mask in masks:
            attention(q, k, v, mask=mask)
    cudnn = SDPBackend.CUDNN_ATTENTION.value
    assert tried[0] == tried[-1] == (True, cudnn)
    assert [(enabled, first == cudnn) for enabled, first in tried[1:-1]] == [(False, False)] * 3
