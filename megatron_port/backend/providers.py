"""One provider for each op, chosen once at start by capability and configuration, and shown with the reason.

Nothing falls back silently: ``auto`` writes down why it took what it took, and a
provider that was asked for by name and cannot serve is an error.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from megatron_port.backend import attention as attn
from megatron_port.backend.device import DeviceInfo
from megatron_port.config.schema import BackendConfig
from megatron_port.errors import EnvironmentFault

LayerNorm = Callable[[torch.Tensor, torch.Tensor, "torch.Tensor | None", float], torch.Tensor]
"""(x [..., h], weight [h], bias [h] or None, eps) → [..., h]"""
RMSNorm = Callable[[torch.Tensor, torch.Tensor, float], torch.Tensor]
"""(x [..., h], weight [h], eps) → [..., h]"""


@dataclass(frozen=True)
class ProviderRow:
    """A line of the start-up table."""

    op: str
    provider: str
    why: str


@dataclass(frozen=True)
class Providers:
    """The chosen implementations."""

    attention: attn.Attention
    layer_norm: LayerNorm
    rms_norm: RMSNorm
    optimizer: str
    """torch | deepspeed (CPUAdam on a CPU, FusedAdam on a GPU) | apex"""
    table: tuple[ProviderRow, ...]

    def describe(self) -> str:
        """The table as text."""
        rows = [("op", "provider", "why"), *((r.op, r.provider, r.why) for r in self.table)]
        width = [max(len(row[i]) for row in rows) for i in (0, 1)]
        return "\n".join(f"{op:<{width[0]}}  {provider:<{width[1]}}  {why}" for op, provider, why in rows)


def optional_import(name: str) -> tuple[Any | None, str]:
    """(module, "") or (None, why not). A package built for another torch raises almost anything."""
    try:
        return importlib.import_module(name), ""
    except ModuleNotFoundError as error:
        return None, f"{error.name or name} is not installed"
    except Exception as error:
        return None, f"import {name} fails: {type(error).__name__}: {error}"


def torch_layer_norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float) -> torch.Tensor:
    """Over the last dimension of x [..., h]; statistics in fp32 or wider."""
    return F.layer_norm(x, weight.shape, weight, bias, eps)


def torch_rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x / sqrt(mean(x²) + eps) · weight over the last dimension of x [..., h]."""
    return F.rms_norm(x, weight.shape, weight, eps)


def _asked(op: str, provider: str, reason: str, auto: str) -> EnvironmentFault:
    remedy = f"set backend.{op} = \"{auto}\" or \"auto\""
    return EnvironmentFault(f"backend.{op} = \"{provider}\" cannot serve: {reason}; {remedy}")


def _flash_problem(device: DeviceInfo, dtype: torch.dtype) -> tuple[Any | None, str]:
    """(flash_attn module, "") or (None, why it cannot be used)."""
    if not device.is_gpu:
        return None, "flash-attn needs a GPU"
    if dtype not in (torch.float16, torch.bfloat16):
        return None, f"flash-attn takes fp16 and bf16, not {str(dtype).removeprefix('torch.')}"
    module, problem = optional_import("flash_attn")
    if module is not None and not hasattr(module, "flash_attn_func"):
        return None, "this flash_attn package has no flash_attn_func"
    return module, problem


def choose_attention(
    config: BackendConfig,
    device: DeviceInfo,
    dtype: torch.dtype,
    *,
    attention_dropout: float = 0.0,
    heads: tuple[int, int, int] | None = None,
) -> tuple[attn.Attention, ProviderRow]:
    """Attention and its row of the table; see :func:`choose_providers`."""
    asked = config.attention
    if asked not in ("auto", "math", "sdpa", "flash_attn"):
        raise _asked("attention", asked, "it is none of math, sdpa, flash_attn", "math")
    if asked == "math":
        return attn.math_attention, ProviderRow("attention", "math", "asked for")
    if attention_dropout > 0.0:
        if asked != "auto":
            drops = "only math drops the same elements in every layout"
            raise _asked("attention", asked, f"model.attention_dropout is {attention_dropout:g}, and {drops}", "math")
        return attn.math_attention, ProviderRow("attention", "math", f"auto: attention_dropout {attention_dropout:g}")
    flash, problem = _flash_problem(device, dtype)
    if asked == "flash_attn":
        if flash is None:
            raise _asked("attention", asked, problem, "sdpa")
        row = ProviderRow("attention", "flash_attn", f"asked for; flash-attn {getattr(flash, '__version__', '?')}")
        return attn.flash_attention(flash.flash_attn_func), row
    why = "asked for" if asked == "sdpa" else "auto"
    if not device.is_gpu:
        return attn.sdpa_attention(), ProviderRow("attention", "sdpa", f"{why}; torch's CPU kernels")
    kernels = attn.gpu_kernels(rocm=device.kind == "rocm", deterministic=config.deterministic)
    order = ", ".join(k.name.removesuffix("_ATTENTION").lower() for k in kernels)
    why += f"; first that fits of {order}"
    if heads is not None:
        serving = attn.serving_kernel(kernels, heads=heads, dtype=dtype, device=device.torch_device)
        why += f": here {serving.removesuffix('_attention')}"
    if asked == "auto" and flash is None:
        why += f"; {problem}" if "fails" in problem else ""
    return attn.sdpa_attention(kernels), ProviderRow("attention", "sdpa", why)


def _apex_norms(module: Any) -> tuple[LayerNorm, RMSNorm]:
    """apex's fused norms in our signatures; LayerNorm without bias is torch's (the table says so)."""

    def layer_norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float) -> torch.Tensor:
        if bias is None:
            return torch_layer_norm(x, weight, bias, eps)
        out: torch.Tensor = module.fused_layer_norm_affine(x, weight, bias, weight.shape, eps)
        return out

    def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        out: torch.Tensor = module.fused_rms_norm_affine(x, weight, weight.shape, eps)
        return out

    return layer_norm, rms_norm


def choose_norm(config: BackendConfig, device: DeviceInfo) -> tuple[LayerNorm, RMSNorm, ProviderRow]:
    """The norms and their row of the table."""
    if config.norm not in ("auto", "torch", "apex"):
        raise _asked("norm", config.norm, "it is neither torch nor apex", "torch")
    module: Any | None = None
    problem = "apex's kernels need a GPU"
    if config.norm != "torch" and device.is_gpu:
        _, problem = optional_import("fused_layer_norm_cuda")
        if not problem:
            module, problem = optional_import("apex.normalization.fused_layer_norm")
    if config.norm == "apex" and module is None:
        raise _asked("norm", "apex", problem, "torch")
    why = "asked for" if config.norm != "auto" else "auto"
    if module is None:
        why += f"; {problem}" if config.norm == "auto" else ""
        return torch_layer_norm, torch_rms_norm, ProviderRow("norm", "torch", why)
    layer_norm, rms_norm = _apex_norms(module)
    return layer_norm, rms_norm, ProviderRow("norm", "apex", f"{why}; LayerNorm without bias: torch")


def _deepspeed_problem(device: DeviceInfo, engine: str) -> str:
    """Why DeepSpeed's Adam cannot be used, or nothing."""
    if engine != "deepspeed":
        return f"engine {engine} brings its own update"
    op = "fused_adam" if device.is_gpu else "cpu_adam"
    from megatron_port.backend.jit_guard import prebuild_command, prebuilt_deepspeed_ops

    _, problem = optional_import("megatron_port.runtime.deepspeed_import")
    if problem:
        return problem
    if not prebuilt_deepspeed_ops().get(op, False):
        return f"{op} was not built ahead of time; build it: {prebuild_command(op, 'cuda' if device.is_gpu else 'cpu')}"
    module, problem = optional_import(f"deepspeed.ops.adam.{op}_op")
    return problem if module is None else ""


def choose_optimizer(config: BackendConfig, device: DeviceInfo, dtype: torch.dtype, engine: str) -> ProviderRow:
    """The optimizer's row of the table; its ``provider`` is the choice."""
    asked = config.optimizer
    if asked not in ("auto", "torch", "deepspeed", "apex"):
        raise _asked("optimizer", asked, "it is none of torch, deepspeed, apex", "torch")
    if asked == "torch":
        return ProviderRow("optimizer", "torch", "asked for")
    if asked == "apex":
        _, problem = optional_import("amp_C") if device.is_gpu else (None, "apex's kernels need a GPU")
        if not problem:
            _, problem = optional_import("apex.optimizers")
        if problem or engine != "deepspeed":
            raise _asked("optimizer", "apex", problem or f"engine {engine} brings its own update", "torch")
        return ProviderRow("optimizer", "apex", "asked for; FusedAdam")
    problem = "fp64 needs torch's" if dtype == torch.float64 else _deepspeed_problem(device, engine)
    if not problem:
        name = "FusedAdam" if device.is_gpu else "CPUAdam"
        return ProviderRow("optimizer", "deepspeed", f"{'asked for' if asked != 'auto' else 'auto'}; {name}, prebuilt")
    if asked == "deepspeed":
        raise _asked("optimizer", "deepspeed", problem, "torch")
    return ProviderRow("optimizer", "torch", f"auto; {problem}")


def choose_providers(
    config: BackendConfig,
    device: DeviceInfo,
    dtype: torch.dtype,
    *,
    engine: str = "deepspeed",
    attention_dropout: float = 0.0,
    heads: tuple[int, int, int] | None = None,
) -> Providers:
    """Choose the provider of every op for this device, dtype, engine and configuration.

    Args:
        dtype: of parameters and activations.
        attention_dropout: probability; above 0 only ``math`` serves, because its masks do not depend on the layout.
        heads: (query heads, key heads, head size) on one rank: on a GPU the table then names the very kernel.

    Raises:
        EnvironmentFault: a provider that was asked for cannot serve; the message says why.
    """
    attention, attention_row = choose_attention(
        config, device, dtype, attention_dropout=attention_dropout, heads=heads
    )
    layer_norm, rms_norm, norm_row = choose_norm(config, device)
    optimizer_row = choose_optimizer(config, device, dtype, engine)
    table = (attention_row, norm_row, optimizer_row)
    return Providers(attention, layer_norm, rms_norm, optimizer_row.provider, table)


def torch_providers() -> Providers:
    """Plain torch for everything, math attention: references and proofs."""
    names = (("attention", "math"), ("norm", "torch"), ("optimizer", "torch"))
    table = tuple(ProviderRow(op, name, "reference") for op, name in names)
    return Providers(attn.math_attention, torch_layer_norm, torch_rms_norm, "torch", table)
