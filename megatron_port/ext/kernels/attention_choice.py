"""Which attention serves a run: math, torch's SDPA with its kernels in order or its varlen attention, the flash-attn
package, FA3, FA4."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.nn.attention import SDPBackend

from megatron_port.core.config.schema import BackendConfig
from megatron_port.core.dist.rank import DeviceInfo
from megatron_port.core.errors import ConfigError, EnvironmentFault
from megatron_port.core.io.typed_json import WrongContent, parse_json, typed
from megatron_port.core.layers.attention import Attention, AttentionMask, check_shapes, math_attention_with
from megatron_port.core.layers.fused import CausalSoftmax, ProbabilityDropout
from megatron_port.core.layers.providers import ProviderRow
from megatron_port.core.package import shipped_folder
from megatron_port.ext.kernels.kernels import optional_import
from megatron_port.ext.kernels.settings import (
    CAUSAL,
    LARGEST_FLASH_HEAD,
    MaskNeeds,
    fused_parts_problem,
    own_gpu_problem,
)
from megatron_port.ext.kernels.torch_attention import (
    flash_attention,
    gpu_kernels,
    kernels_under_masks,
    sdpa_attention,
    serving_kernel,
    varlen_attention,
)

# Measured times of attention's providers on GPUs: ``configs/kernels/attention.json``.
#
# ``benchmarks/attention_providers.py`` writes it from a measurement. A row serves the sequences from its own length
# up to the next row's of the same GPU, dtype, head size, mask and dropout. Where no row serves, the chosen order is
# that of ``backend.attention``, and the table of providers names what was missing.

PROVIDERS = ("cudnn", "flash", "efficient", "flash_attn", "fa3")
"""cudnn, flash and efficient are kernels of torch's SDPA; flash_attn and fa3 packages of their own."""


@dataclass(frozen=True)
class AttentionShape:
    """Key of a row: the case that it was measured for."""

    arch: str
    """sm_90, gfx90a"""
    dtype: str
    """bf16 | fp16 | fp32"""
    head_dim: int
    seq: int
    causal: bool = True
    dropout: bool = False

    def __str__(self) -> str:
        parts = [self.arch, self.dtype, f"head size {self.head_dim}", f"{self.seq} tokens"]
        return ", ".join([*parts, *(["causal"] * self.causal), *(["dropout"] * self.dropout)])


@dataclass(frozen=True)
class _Table:
    rows: tuple[dict[str, Any], ...]


@dataclass(frozen=True)
class _Times:
    milliseconds: dict[str, float]
    source: str


@dataclass(frozen=True)
class AttentionTimes:
    """One measured row."""

    shape: AttentionShape
    milliseconds: dict[str, float]
    """Provider → forward and backward passes of one call."""
    source: str
    """The file of the measurement."""

    @property
    def order(self) -> list[str]:
        """Providers, fastest first."""
        return sorted(self.milliseconds, key=self.milliseconds.__getitem__)


def arch_of(device: torch.device) -> str:
    """Return the architecture of a GPU that torch can use: sm_90, gfx90a."""
    properties = torch.cuda.get_device_properties(device)
    if torch.version.hip:
        return str(properties.gcnArchName).partition(":")[0]
    return f"sm_{properties.major}{properties.minor}"


def parse(text: str, name: str) -> list[AttentionTimes]:
    """Return the rows of a table's text.

    Raises:
        ConfigError: a row lacks a field, has an unknown one, or names no provider of :data:`PROVIDERS`.
    """
    rows = []
    known = {*AttentionShape.__dataclass_fields__, "milliseconds", "source"}
    try:
        table = typed(_Table, parse_json(text)).rows
    except WrongContent as error:
        raise ConfigError(f"{name}: {error}") from None
    for number, row in enumerate(table):
        where = f"{name}: row {number}"
        try:
            times = typed(_Times, row)
            shape = typed(AttentionShape, row)
        except WrongContent as error:
            raise ConfigError(f"{where}: {error}; it takes AttentionShape's fields, milliseconds, source") from None
        more = sorted(row.keys() - known)
        if more:
            raise ConfigError(f"{where}: unknown {more[0]!r}; it takes AttentionShape's fields, milliseconds, source")
        unknown = sorted(set(times.milliseconds) - set(PROVIDERS))
        if unknown or not times.milliseconds:
            said = ", ".join(unknown) or "nothing"
            raise ConfigError(f"{where}: milliseconds of {said}; it takes {', '.join(PROVIDERS)}")
        rows.append(AttentionTimes(shape, dict(times.milliseconds), times.source))
    return rows


def shipped_table() -> list[AttentionTimes]:
    """Return the rows of the shipped table."""
    path = shipped_folder("configs") / "kernels" / "attention.json"
    return parse(path.read_text(), str(path.name))


def lookup(rows: list[AttentionTimes], wanted: AttentionShape) -> AttentionTimes | None:
    """Return the row that serves a shape: of its kind, the longest sequence that is not longer."""
    kind = [r for r in rows if _kind(r.shape) == _kind(wanted) and r.shape.seq <= wanted.seq]
    return max(kind, key=lambda r: r.shape.seq, default=None)


def _kind(shape: AttentionShape) -> tuple[object, ...]:
    return shape.arch, shape.dtype, shape.head_dim, shape.causal, shape.dropout


_CHOICES = ("auto", "own", "math", "sdpa", "flash_attn", "varlen", "fa3", "fa4", "ck", "aiter")
_MATRIX_ARCHS = ("gfx90a", "gfx94", "gfx95")
_PACKAGES = {"fa3": "flash_attn_interface", "fa4": "flash_attn.cute"}
_NOT_AITER = ("gfx90a",)
"""Architectures that AITER's attention is not built for (ROCm/aiter issues 179 and 900)."""
_VARLEN = "torch.nn.attention.varlen"


@dataclass(frozen=True)
class AttentionNeeds:
    """Requirements of a run on its attention."""

    dtype: torch.dtype
    dropout: float = 0.0
    """Dropout of probabilities; above 0 only ``own`` and ``math`` serve, whose masks do not depend on the layout."""
    head_size: int = 0
    """0: not known."""
    heads: tuple[int, int, int] | None = None
    """(query heads, key heads, head size) on one rank: on a GPU the table then names the very kernel."""
    shape: AttentionShape | None = None
    """On a GPU: what is looked up among the measured times."""
    mask: MaskNeeds = CAUSAL
    """Needs of attention beyond the causal softmax."""


@dataclass(frozen=True)
class OwnAttention:
    """Availability of the project's own attention."""

    problem: str
    """Why it cannot serve; empty: it can."""
    load: Callable[[], str]
    """Load the kernels; what was loaded, in words."""


def shape_here(device: DeviceInfo, dtype: torch.dtype, shape: tuple[int, int] | None) -> AttentionShape | None:
    """Return what to look up for (head size, sequence length); None on a CPU, or a GPU that torch does not see."""
    if shape is None or not device.is_gpu or not device.memory_bytes:
        return None
    name = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}.get(dtype)
    return None if name is None else AttentionShape(arch_of(device.torch_device), name, *shape)


def own_gpu_limit(device: DeviceInfo, needs: AttentionNeeds) -> str:
    """Return why the own attention kernel cannot serve a run on this GPU, or nothing."""
    name = {torch.bfloat16: "bf16", torch.float16: "fp16"}.get(needs.dtype, str(needs.dtype).removeprefix("torch."))
    if (problem := own_gpu_problem(name, needs.head_size, needs.mask)) or not device.memory_bytes:
        return problem
    arch = arch_of(device.torch_device)
    number = re.fullmatch(r"sm_(\d+)", arch)
    if int(number[1]) >= 80 if number else arch.startswith(_MATRIX_ARCHS):
        return ""
    return f"own attention on a GPU needs matrix instructions as sm_80 and gfx90a have them, not {arch}"


def refuse(op: str, provider: str, reason: str, other: str) -> EnvironmentFault:
    """Return the error for a provider that was requested by name and cannot be used."""
    return EnvironmentFault(
        f"backend.{op} = \"{provider}\" cannot serve: {reason}; set backend.{op} = \"{other}\" or \"auto\""
    )


def _halves_on_gpu(name: str, device: DeviceInfo, dtype: torch.dtype) -> str:
    if not device.is_gpu:
        return f"{name} needs a GPU"
    if dtype not in (torch.float16, torch.bfloat16):
        return f"{name} takes fp16 and bf16, not {str(dtype).removeprefix('torch.')}"
    return ""


def _flash_problem(device: DeviceInfo, needs: AttentionNeeds) -> tuple[Any | None, str]:
    """(flash_attn module, "") or (None, why it cannot be used)."""
    problem = _halves_on_gpu("flash-attn", device, needs.dtype)
    problem = problem or needs.mask.problem("flash_attn")
    if problem:
        return None, problem
    if needs.heads is not None and needs.heads[2] > LARGEST_FLASH_HEAD:
        return None, f"flash-attn takes heads of up to {LARGEST_FLASH_HEAD}, not {needs.heads[2]}"
    module, problem = optional_import("flash_attn")
    wanted = ["flash_attn_func"] + (["flash_attn_varlen_func"] if needs.mask.documents else [])
    for name in wanted if module is not None else []:
        if not hasattr(module, name):
            return None, f"this flash_attn package has no {name}"
        if needs.mask.softcap and "softcap" not in inspect.signature(getattr(module, name)).parameters:
            return None, "this flash_attn package knows no softcap"
    return module, problem


def _varlen(device: DeviceInfo, needs: AttentionNeeds) -> tuple[Callable[..., Any] | None, str]:
    """Return (torch's varlen_attn, "") or (None, why it cannot be used)."""
    problem = _halves_on_gpu("torch's varlen attention", device, needs.dtype) or needs.mask.problem("varlen")
    if not problem and device.kind != "cuda":
        problem = f"torch's varlen attention is for NVIDIA GPUs, not {device.kind}"
    size = needs.head_size or (needs.heads[2] if needs.heads is not None else 8)
    if not problem and (size > LARGEST_FLASH_HEAD or size % 8):
        problem = f"torch's varlen attention takes heads of up to {LARGEST_FLASH_HEAD}, a multiple of 8, not {size}"
    if not problem and needs.shape is not None and int(needs.shape.arch.removeprefix("sm_")) < 80:
        problem = f"torch's varlen attention needs sm_80 or later, not {needs.shape.arch}"
    module, problem = (None, problem) if problem else optional_import(_VARLEN)
    function = getattr(module, "varlen_attn", None)
    known = {} if function is None else inspect.signature(function).parameters
    missing = [name for name in ("window_size", "enable_gqa") if name not in known]
    if not problem and missing:
        problem = f"torch {torch.__version__} has no varlen_attn with {' and '.join(missing)}"
    return (None, problem) if problem else (function, "")


def _parts_of_a_ring(
    config: BackendConfig, device: DeviceInfo, needs: AttentionNeeds, softmax: CausalSoftmax
) -> tuple[Attention, ProviderRow]:
    """Return torch's attention where its flash attention can serve the parts, on a CPU if it is asked for; else math.

    Raises EnvironmentFault: it was asked for and cannot serve.
    """
    asked = config.attention == "sdpa"
    problem = _parts_problem(device, needs)
    if asked and problem:
        raise refuse("attention", config.attention, problem, "math")
    if problem or not (asked or device.is_gpu):
        why = "; ".join(filter(None, ("auto", problem)))
        return math_attention_with(softmax), ProviderRow("attention", "math", why)
    kernels = gpu_kernels(rocm=device.kind == "rocm", deterministic=config.deterministic) if device.is_gpu else ()
    how = "asked for" if asked else "auto"
    row = ProviderRow("attention", "sdpa", f"{how}; a ring's parts by torch's flash attention")
    return sdpa_attention(kernels), row


def _parts_problem(device: DeviceInfo, needs: AttentionNeeds) -> str:
    """Return why torch's flash attention cannot serve the parts of a ring, or nothing."""
    if not device.is_gpu:
        return needs.mask.problem("sdpa")
    size = needs.head_size or (needs.heads[2] if needs.heads is not None else 8)
    if problem := fused_parts_problem(size, needs.mask):
        return problem
    if problem := _halves_on_gpu("torch's flash attention", device, needs.dtype):
        return problem
    if needs.heads is None or not device.memory_bytes:  # not a GPU that torch can use
        return ""
    kernel = [SDPBackend.FLASH_ATTENTION]
    serves = serving_kernel(kernel, heads=needs.heads, dtype=needs.dtype, device=device.torch_device) != "none"
    return "" if serves else "torch's flash attention does not serve this GPU"


def _newer_flash_problem(which: str, device: DeviceInfo, needs: AttentionNeeds) -> str:
    """Return why torch's flash attention cannot be replaced by FA3 or FA4, or nothing."""
    problem = _halves_on_gpu(which, device, needs.dtype)
    if problem:
        return problem
    if device.kind != "cuda":
        return f"{which} is for NVIDIA GPUs"
    if not hasattr(torch.nn.attention, "activate_flash_attention_impl"):
        return f"torch {torch.__version__} cannot replace its flash attention"
    return optional_import(_PACKAGES[which])[1]


def choose_attention(
    config: BackendConfig, device: DeviceInfo, needs: AttentionNeeds, softmax: CausalSoftmax, own: OwnAttention
) -> tuple[Attention, ProviderRow]:
    """Return the attention and its row of the table. ``softmax``: what ``math`` uses.

    Raises:
        EnvironmentFault: the attention that was asked for cannot serve; the message says why.
    """
    asked = config.attention
    if asked not in _CHOICES:
        raise refuse("attention", asked, f"it is none of {', '.join(_CHOICES[1:])}", "math")
    if asked == "math":
        return math_attention_with(softmax), ProviderRow("attention", "math", "asked for")
    if needs.dropout > 0.0 and asked not in ("auto", "own"):
        drops = "only own and math drop the same elements in every layout"
        raise refuse("attention", asked, f"model.attention_dropout is {needs.dropout:g}, and {drops}", "math")
    if asked != "auto" and (lacking := needs.mask.problem(asked)):
        raise refuse("attention", asked, lacking, "math")
    if needs.dropout > 0.0 and needs.mask.partials:
        own = replace(own, problem=own.problem or "own attention drops no probabilities of parts of the keys")
    if needs.dropout > 0.0 and asked == "auto" and own.problem:
        why = f"auto: attention_dropout {needs.dropout:g}; {own.problem}"
        return math_attention_with(softmax), ProviderRow("attention", "math", why)
    if asked == "own" and own.problem:
        other = "math" if needs.dropout > 0.0 or needs.mask.problem("sdpa") else "sdpa"
        raise refuse("attention", asked, own.problem, other)
    # On a GPU others have faster kernels, but for dropout.
    if asked == "own" or (asked == "auto" and not own.problem and (needs.dropout > 0.0 or not device.is_gpu)):
        how = "asked for" if asked != "auto" else "auto"
        if needs.dropout > 0.0 and device.is_gpu:
            how += f"; attention_dropout {needs.dropout:g}, inside of the kernel"
        return _own_attention(), ProviderRow("attention", "own", f"{how}; {own.load()}")
    if needs.mask.partials and asked in ("auto", "sdpa"):
        return _parts_of_a_ring(config, device, needs, softmax)
    flash, problem = _flash_problem(device, needs)
    without_row = ""
    if asked == "varlen" or (asked == "auto" and needs.mask.any):
        chosen, without_row = _masked(asked, flash, problem, device, needs, softmax)
        if chosen is not None:
            return chosen
    if asked == "auto" and needs.shape is not None and not needs.mask.any:
        times = lookup(shipped_table(), needs.shape)
        if times is not None and (measured := _fastest(times, config, device, needs, flash, problem)):
            return measured
        without_row = f"no measured time that serves {needs.shape}"
    # On AMD, flash-attn's Composable Kernel build goes before what torch brings; on NVIDIA torch has the same kernel.
    if asked == "flash_attn" or (asked == "auto" and flash is not None and device.kind == "rocm"):
        if flash is None:
            raise refuse("attention", asked, problem, "sdpa")
        how = "asked for" if asked != "auto" else "; ".join(filter(None, ("auto: first on ROCm", without_row)))
        return _flash(flash, how)
    if asked in _PACKAGES:
        problem = _newer_flash_problem(asked, device, needs)
        if problem:
            raise refuse("attention", asked, problem, "sdpa")
        if asked == "fa4" and not config.allow_jit:
            raise refuse("attention", asked, "FA4 compiles its kernels at run time, which backend.allow_jit permits",
                         "sdpa")
        return _newer_flash(asked, config), ProviderRow("attention", asked, "asked for; in torch's place for flash")
    if asked in ("ck", "aiter"):
        return _of_rocm(asked, device, needs)
    return _sdpa(config, device, needs, problem, own.problem, without_row)


def _of_rocm(which: str, device: DeviceInfo, needs: AttentionNeeds) -> tuple[Attention, ProviderRow]:
    """Return torch's flash attention from Composable Kernel instead of AOTriton, or that of the AITER package.

    Raises EnvironmentFault where it cannot serve: nothing falls back.
    """
    problem = _halves_on_gpu(which, device, needs.dtype)
    if not problem and device.kind != "rocm":
        problem = f"{which} is for AMD GPUs, not {device.kind}"
    if problem:
        raise refuse("attention", which, problem, "sdpa")
    if which == "ck":
        prefer: Callable[..., Any] | None = getattr(torch.backends.cuda, "preferred_rocm_fa_library", None)
        if prefer is None or str(prefer("ck")).rpartition(".")[2].lower() != "ck":
            raise refuse("attention", which, f"torch {torch.__version__} was built without Composable Kernel", "sdpa")
        row = ProviderRow("attention", which, "asked for; torch's flash attention from Composable Kernel alone")
        return sdpa_attention([torch.nn.attention.SDPBackend.FLASH_ATTENTION]), row
    if needs.shape is not None and needs.shape.arch.startswith(_NOT_AITER):
        raise refuse("attention", which, f"AITER has no kernels for {needs.shape.arch}", "flash_attn")
    module, problem = optional_import("aiter")
    if not problem and not hasattr(module, "flash_attn_func"):
        problem = "this aiter package has no flash_attn_func"
    if module is None or problem:
        raise refuse("attention", which, problem, "flash_attn")
    row = ProviderRow("attention", which, f"asked for; AITER {getattr(module, '__version__', '?')}")
    return flash_attention(module.flash_attn_func, name=which), row


def _flash(module: Any, how: str) -> tuple[Attention, ProviderRow]:
    row = ProviderRow("attention", "flash_attn", f"{how}; flash-attn {getattr(module, '__version__', '?')}")
    return flash_attention(module.flash_attn_func, getattr(module, "flash_attn_varlen_func", None)), row


def _masked(
    asked: str, flash: Any | None, flash_problem: str, device: DeviceInfo, needs: AttentionNeeds, softmax: CausalSoftmax
) -> tuple[tuple[Attention, ProviderRow] | None, str]:
    """Return what serves a mask with the work that the mask leaves: flash-attn, then torch's varlen attention; else
    math, where torch's attention cannot serve. None: that can, and why nothing before it does.

    Raises EnvironmentFault: varlen was asked for and cannot serve.
    """
    why = "torch's attention would compute all scores under a mask"
    if flash is not None and asked == "auto":
        return _flash(flash, f"auto: {why}"), ""
    function, problem = _varlen(device, needs)
    if asked == "varlen" and function is None:
        raise refuse("attention", asked, problem, "sdpa")
    hides = needs.mask.window or needs.mask.documents or needs.mask.chunk
    if function is not None and (hides or asked == "varlen"):
        how = "asked for" if asked == "varlen" else f"auto: {why}; {flash_problem}"
        return (varlen_attention(function), ProviderRow("attention", "varlen", f"{how}; torch {torch.__version__}")), ""
    if lacking := needs.mask.problem("sdpa"):
        row = ProviderRow("attention", "math", f"auto; {lacking}; {flash_problem}")
        return (math_attention_with(softmax), row), ""
    return None, problem if hides and device.is_gpu else ""


def _newer_flash(which: str, config: BackendConfig) -> Attention:
    torch.nn.attention.activate_flash_attention_impl(which.upper())
    kernels = gpu_kernels(rocm=False, deterministic=config.deterministic)
    return sdpa_attention([k for k in kernels if k.name != "CUDNN_ATTENTION"])


def _fastest(
    times: AttentionTimes, config: BackendConfig, device: DeviceInfo, needs: AttentionNeeds, flash: Any | None,
    flash_problem: str,
) -> tuple[Attention, ProviderRow] | None:
    """The provider of the least measured time among those that can serve here, and its row; None: none can."""
    kernels = {k.name.removesuffix("_ATTENTION").lower(): k
               for k in gpu_kernels(rocm=device.kind == "rocm", deterministic=config.deterministic)}
    skipped: list[str] = []
    for name in times.order:
        why = "; ".join([f"auto: {times.milliseconds[name]:.3g} ms measured for {times.shape}", *skipped, times.source])
        if name in kernels:
            order = [kernels[name], *(k for k in kernels.values() if k != kernels[name])]
            return sdpa_attention(order), ProviderRow("attention", "sdpa", f"{name} first; {why}")
        if name in ("cudnn", "flash", "efficient") or config.deterministic:
            skipped.append(f"{name} is faster, and not deterministic" if config.deterministic
                           else f"{name} is not for {device.kind}")
        elif name == "flash_attn" and flash is not None:
            return flash_attention(flash.flash_attn_func), ProviderRow("attention", name, why)
        else:
            problem = flash_problem if name == "flash_attn" else _newer_flash_problem(name, device, needs)
            if not problem:
                return _newer_flash(name, config), ProviderRow("attention", name, why)
            skipped.append(f"{name} is faster, but {problem}")
    return None


def _own_attention() -> Attention:
    from megatron_port.ext.kernels.ops.attention import attention as op

    def attention(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool = True,
        dropout: ProbabilityDropout | None = None, mask: AttentionMask | None = None,
    ) -> torch.Tensor:
        check_shapes(q, k, v, causal, mask)
        return op(q, k, v, causal=causal, dropout=dropout, mask=mask)

    return attention


def _sdpa(
    config: BackendConfig, device: DeviceInfo, needs: AttentionNeeds, flash_problem: str, without_own: str,
    without_row: str = "",
) -> tuple[Attention, ProviderRow]:
    why = "asked for" if config.attention == "sdpa" else "auto"
    if not device.is_gpu:
        skipped = without_own if config.attention == "auto" else ""
        why = "; ".join(filter(None, (why, skipped, "torch's CPU kernels", _all_scores(needs))))
        return sdpa_attention(), ProviderRow("attention", "sdpa", why)
    kernels = gpu_kernels(rocm=device.kind == "rocm", deterministic=config.deterministic)
    shown = kernels_under_masks(kernels) if needs.mask.any else kernels
    order = ", ".join(k.name.removesuffix("_ATTENTION").lower() for k in shown)
    why += f"; first that fits of {order}"
    if needs.mask.any:
        why += f"; {_all_scores(needs)}"
    elif needs.heads is not None and device.memory_bytes > 0:
        serving = serving_kernel(kernels, heads=needs.heads, dtype=needs.dtype, device=device.torch_device)
        why += f": here {serving.removesuffix('_attention')}"
    why += f"; {without_row}" if without_row else ""
    if config.attention == "auto" and "fails" in flash_problem:
        why += f"; {flash_problem}"
    return sdpa_attention(kernels), ProviderRow("attention", "sdpa", why)


def _all_scores(needs: AttentionNeeds) -> str:
    """Cost of a mask in torch's attention, in words."""
    hides = needs.mask.window or needs.mask.documents or needs.mask.chunk
    return "computes all scores, whatever the mask leaves" if hides else ""
