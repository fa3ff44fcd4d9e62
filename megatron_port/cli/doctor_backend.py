"""Checks of the device, of the providers that a run would have, and of what is compiled; they import torch."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from megatron_port.cli import doctor_machine as machine
from megatron_port.cli.doctor_machine import CheckResult
from megatron_port.core.config.schema import RunConfig
from megatron_port.core.dist.collectives import widening_addmm
from megatron_port.core.dist.rank import DeviceInfo
from megatron_port.core.errors import PortError
from megatron_port.core.io.variables import variables
from megatron_port.core.layers.providers import ProviderRow
from megatron_port.ext.deepspeed.prepare import prepare_deepspeed
from megatron_port.ext.kernels import kernels
from megatron_port.ext.kernels.attention_choice import AttentionNeeds, shape_here
from megatron_port.ext.kernels.choose import Chooser
from megatron_port.ext.kernels.choose_experts import choose_exchange, choose_ops
from megatron_port.ext.kernels.choose_fp8 import choose_fp8, choose_quantiser
from megatron_port.ext.kernels.choose_products import lt_row
from megatron_port.ext.kernels.jit_guard import (
    install_guard,
    prebuild_command,
    prebuilt_deepspeed_ops,
)
from megatron_port.ext.kernels.kernels import optional_import
from megatron_port.ext.kernels.settings import MaskNeeds
from megatron_port.run.device import Accelerators, choose_device, describe_policy, installed_accelerators

EXTENSIONS = {
    "flash-attn": {"flash_attn_2_cuda": "fwd"},
    "apex": {"amp_C": "multi_tensor_scale", "fused_layer_norm_cuda": "forward_affine"},
}
"""Package → its compiled modules that a GPU run may use, and a function of each: ROCm's apex has a stand-in for every
module, which imports, and compiles at the first use."""
DEVICE_FILES = {"/dev/nvidia0": "an NVIDIA", "/dev/kfd": "an AMD"}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp64": torch.float64}


def devices(
    config: RunConfig, *, installed_only: bool = False, gpus: Accelerators | None = None
) -> tuple[DeviceInfo | None, list[CheckResult]]:
    """Return the chosen device, and results on the GPUs that torch sees, the device and its collective library.

    ``installed_only``: a torch built for ``backend.device`` is enough, no GPU need be visible.
    """
    gpus = gpus or installed_accelerators()
    build = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPU"
    if torch.version.hip:
        build = f"HIP {torch.version.hip}"
    findings = [CheckResult("devices", "torch build", build)]
    for i in range(gpus.count):
        name, memory, _ = gpus.describe(i)
        findings.append(CheckResult("devices", f"gpu {i}", f"{name}, {machine.gib(memory)}"))
    kind = config.backend.device
    if installed_only and not gpus.count and kind == gpus.kind:
        why = "none visible; what is installed for it is checked"
        device = DeviceInfo(kind, torch.device("cuda", 0), "nccl", "none visible", 0, why)
        if not variables(("DS_ACCELERATOR",)):  # DeepSpeed would take the CPU where it sees no GPU
            os.environ["DS_ACCELERATOR"] = "cuda"
    else:
        try:
            device = choose_device(kind, gpus=gpus)
        except PortError as error:
            return None, [*findings, CheckResult("devices", "chosen", "none", "wrong", str(error))]
    findings.append(CheckResult("devices", "chosen", f"{device.kind} ({device.why}), {device.comm_backend}"))
    findings += _unused(config, device)
    if not torch.distributed.is_available() or not torch.distributed.is_gloo_available():
        findings.append(CheckResult("devices", "gloo", "not in this torch", "wrong", "install a torch built with gloo"))
    if device.comm_backend == "nccl" and not torch.distributed.is_nccl_available():
        remedy = "install a torch with NCCL or RCCL"
        findings.append(CheckResult("devices", "nccl", "not in this torch", "wrong", remedy))
    elif device.comm_backend == "nccl":
        streams = describe_policy(config.backend.collective_priority)
        findings.append(CheckResult("devices", "collectives' streams", streams))
    return device, findings


def _unused(config: RunConfig, device: DeviceInfo) -> Iterator[CheckResult]:
    """Yield a result for each GPU of this machine that ``auto`` passed over."""
    if device.is_gpu or config.backend.device != "auto":
        return
    for path, maker in DEVICE_FILES.items():
        if Path(path).exists():
            yield CheckResult("devices", path, f"{maker} GPU is here and not used ({device.why})", "slow",
                          "install torch and this program for it (make setup DEVICE=cuda or rocm), or set "
                          "backend.device = \"cpu\"")


def needed_op(config: RunConfig, device: DeviceInfo) -> str:
    """Return the DeepSpeed op that the run's optimizer needs; empty: none."""
    if config.engine != "deepspeed" or config.precision.dtype == "fp64":
        return ""
    if config.backend.optimizer not in ("auto", "deepspeed"):
        return ""
    return "fused_adam" if device.is_gpu else "cpu_adam"


def version_problem(built: dict[str, str], torch_version: str, cuda: str | None, hip: str | None) -> str:
    """Return why DeepSpeed would refuse its ops with this torch; empty: it would not. ``built``: its ``torch_info``."""
    def short(text: str | None) -> str:
        return ".".join((text or "0.0").split("+")[0].split(".")[:2])

    pairs = [("torch", built.get("version", ""), torch_version)]
    if cuda or hip:
        pairs.append(("HIP", built.get("hip_version", ""), hip or "") if hip else
                     ("CUDA", built.get("cuda_version", ""), cuda or ""))
    return "; ".join(f"built with {name} {was}, and {short(now)} is here" for name, was, now in pairs
                     if was != short(now))


def deepspeed(config: RunConfig, device: DeviceInfo | None) -> Iterator[CheckResult]:
    """Check DeepSpeed: its import, its accelerator, its prebuilt ops, and whether the run's own op is among them."""
    if machine.version("deepspeed") is None:
        return
    try:
        prepare_deepspeed()
    except PortError as error:
        yield CheckResult("deepspeed", "import", "fails", "wrong", str(error))
        return
    from deepspeed.accelerator import get_accelerator
    from deepspeed.git_version_info import accelerator_name, torch_info

    ops = prebuilt_deepspeed_ops()
    installed = f"{get_accelerator()._name}; installed for {accelerator_name or 'none'}"
    yield CheckResult("deepspeed", "accelerator", installed)
    built = [op for op, done in ops.items() if done]
    yield CheckResult("deepspeed", "prebuilt ops", ", ".join(built) or "none")
    yield CheckResult("deepspeed", "not built", ", ".join(op for op in ops if op not in built) or "none")
    op = needed_op(config, device) if device is not None else ""
    if not op or device is None:
        return
    command = prebuild_command(op, "cuda" if device.is_gpu else "cpu")
    if op not in built:
        yield CheckResult("deepspeed", op, "this run asks for it, and it is not built ahead of time", "slow", command)
        return
    problem = version_problem(torch_info, torch.__version__, torch.version.cuda, torch.version.hip)
    if not problem:
        problem = optional_import(f"deepspeed.ops.adam.{op}_op")[1]
    yield CheckResult("deepspeed", op, problem or "loads", "wrong" if problem else "ok", command if problem else "")


def providers(config: RunConfig, device: DeviceInfo) -> Iterator[CheckResult]:
    """Yield one line per op, with its provider and why, or why the chosen one cannot serve; and the JIT guard."""
    dtype = DTYPES.get(config.precision.dtype, torch.float32)
    model, tp = config.model, max(config.layout.tensor_parallel_size, 1)
    heads = (max(model.num_attention_heads // tp, 1), max(model.kv_heads // tp, 1), model.head_size)
    visible = not device.is_gpu or device.memory_bytes > 0
    shape = shape_here(device, dtype, (model.head_size, model.seq_length))
    needs = AttentionNeeds(
        dtype, model.attention_dropout, model.head_size, heads if visible else None, shape, MaskNeeds.of(config)
    )
    chooser = Chooser(config.backend, device, dtype, config.engine, needs, load=visible, rule=config.optimizer.name)
    picks: dict[str, Callable[[], ProviderRow]] = {
        "attention": lambda: chooser.attend(chooser.softmax()[0])[1],
        "norm": lambda: chooser.norm()[1],
        "activation": lambda: chooser.activation()[1],
        "rotary": lambda: chooser.rotary()[1],
        "dropout": lambda: chooser.dropout()[1],
        "softmax": lambda: chooser.softmax()[1],
        "cross_entropy": lambda: chooser.cross_entropy()[1],
        "optimizer": lambda: chooser.optimizer()[1],
    }
    if model.moe.enabled:
        picks["experts"] = lambda: choose_ops(chooser, model.moe)[1]
        picks["experts_exchange"] = lambda: choose_exchange(config.backend, device, dtype)[1]
    if config.precision.fp8 != "none" and visible:
        picks["quantise"] = lambda: choose_quantiser(chooser)[1]
        picks["scaled_mm"] = lambda: choose_fp8(config.backend, config.precision.fp8, device)[1]
    if visible and (device.is_gpu or config.backend.products == "lt"):
        picks["products"] = lambda: lt_row(config, device)[0]
    for op, pick in picks.items():
        try:
            row = pick()
        except PortError as error:
            yield CheckResult("providers", op, "none", "wrong", str(error))
            continue
        why, _, remedy = row.why.partition("; build it: ")
        yield CheckResult("providers", op, f"{row.provider} ({why})", "note" if remedy else "ok", remedy)
    if visible:
        yield wgrad_sums(device, dtype)
    if config.backend.allow_jit:
        yield CheckResult("providers", "jit guard", "off: ops may be compiled while training", "slow",
                      "backend.allow_jit = false")
    else:
        yield CheckResult("providers", "jit guard", "on: an op that is not built ahead of time is an error")


def wgrad_sums(device: DeviceInfo, dtype: torch.dtype) -> CheckResult:
    """Check whether products add a layer's weight gradient to its float32 sum without rounding it to ``dtype``."""
    name = "weight gradient"
    if dtype not in (torch.bfloat16, torch.float16) or not device.is_gpu:
        return CheckResult("providers", name, "added in the dtype of its sum")
    if widening_addmm(device.torch_device, dtype):
        return CheckResult("providers", name, "added to its float32 sum by the product, unrounded")
    short = str(dtype).removeprefix("torch.")
    return CheckResult(
        "providers", name, f"rounded to {short} for each micro-batch, then added in float32", "slow",
        "this build of torch has no addmm with out_dtype=torch.float32 here; on ROCm neither has "
        "torch.backends.cuda.preferred_blas_library('ck'): choose 'cublas' or 'cublaslt'",
    )


def own_kernels(config: RunConfig, device: DeviceInfo) -> Iterator[CheckResult]:
    """Check whether our kernels are built for the device."""
    built, problem = kernels.kernels_status(device.kind)
    if config.backend.own_kernels == "off":
        yield CheckResult("kernels", "own", f"not used (backend.own_kernels is off); {built or problem}")
    else:
        yield CheckResult("kernels", "own", built or problem, "slow" if problem else "ok",
                      kernels.BUILD_COMMAND if problem else "")


def _extension_problem(module_name: str, function: str) -> str:
    """Return why a compiled module cannot be used, or nothing. Call it under the guard: it may start a build."""
    module, problem = optional_import(module_name)
    if problem:
        return problem
    try:
        getattr(module, function)
    except Exception as error:  # whatever a stand-in raises
        return f"{module_name}.{function}: {error}"
    return ""


def extensions(device: DeviceInfo) -> Iterator[CheckResult]:
    """Check the installed packages whose compiled modules this GPU run could use."""
    if not device.is_gpu:
        return
    for package, modules in EXTENSIONS.items():
        installed = machine.version(package)
        if installed is None:
            continue
        undo = install_guard(False)
        try:
            problems = [problem for pair in modules.items() if (problem := _extension_problem(*pair))]
        finally:
            undo()
        yield CheckResult(
            "extensions", package, f"{installed}: " + ("; ".join(problems) or ", ".join(modules) + " load"),
            "slow" if problems else "ok",
            f"build it for this torch, as docker/{device.kind}.Dockerfile does, or pip uninstall {package}"
            if problems else "",
        )
