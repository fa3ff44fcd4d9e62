"""One provider for each op, chosen once at start by capability and configuration, and shown with the reason.

Nothing falls back silently: ``auto`` writes down why it took what it took, and a
provider that was asked for by name and cannot serve is an error.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_port.core.config.model import MoEConfig
from megatron_port.core.config.schema import BackendConfig
from megatron_port.core.dist.rank import DeviceInfo
from megatron_port.core.dist.row_hashes import RowHashes
from megatron_port.core.errors import ConfigError, EnvironmentFault
from megatron_port.core.layers import fused
from megatron_port.core.layers.cross_entropy import torch_cross_entropy
from megatron_port.core.layers.providers import ProviderRow, Providers
from megatron_port.core.registry import OPTIMIZERS, OWN_UPDATES, PARTS, PROVIDERS
from megatron_port.ext.kernels import kernels
from megatron_port.ext.kernels.attention_choice import (
    AttentionNeeds,
    OwnAttention,
    choose_attention,
    own_gpu_limit,
    refuse,
    shape_here,
)
from megatron_port.ext.kernels.kernels import optional_import
from megatron_port.ext.kernels.ops.hashes import OwnRowHashes
from megatron_port.ext.kernels.settings import CAUSAL, MaskNeeds

PARTIALS = {
    "math": "partial attention, math", "own": "partial attention, own", "sdpa": "partial attention, fused",
}
"""Part for attention over parts of the keys (``Providers.partial_attention``), by the provider of attention."""


@dataclass(frozen=True)
class Candidate:
    """A provider of one op."""

    name: str
    problem: str
    """Why it cannot serve; empty: it can."""
    make: Callable[[], Any]
    note: str = ""


@dataclass(frozen=True)
class Chooser:
    """Chooser of a run's providers. ``load``: load the own kernels when one of them is chosen."""

    config: BackendConfig
    device: DeviceInfo
    dtype: torch.dtype
    engine: str
    attention: AttentionNeeds
    load: bool = True
    rule: str = "adamw"
    """optimizer.name"""

    @functools.cached_property
    def own_problem(self) -> str:
        """Return why own kernels cannot be used, or nothing."""
        if self.config.own_kernels == "off":
            return "own_kernels is off"
        if self.dtype not in (torch.float32, torch.float16, torch.bfloat16):
            return f"own kernels take fp32, fp16 and bf16, not {str(self.dtype).removeprefix('torch.')}"
        return kernels.kernels_status(self.device.kind)[1]

    @functools.cached_property
    def own_library(self) -> str:
        """Description of the loaded library; the first use loads it."""
        return kernels.load(self.device.kind) if self.load else kernels.kernels_status(self.device.kind)[0]

    def own(self, make: Callable[[], Any]) -> Candidate:
        """Return the candidate of the own kernels."""
        def loaded() -> Any:
            _ = self.own_library
            return make()

        return Candidate("own", self.own_problem, loaded)

    def pick(self, op: str, candidates: Sequence[Candidate]) -> tuple[Any, ProviderRow]:
        """Return the requested provider, or else the first that can be used, with its row of the table."""
        asked = getattr(self.config, op)
        if op in PROVIDERS and asked in PROVIDERS[op].added:
            candidates = [*candidates, self._added(op, asked)]
        names = [c.name for c in candidates]
        last = "torch" if "torch" in names else names[-1]
        if asked != "auto":
            found = next((c for c in candidates if c.name == asked), None)
            if found is None:
                raise refuse(op, asked, f"it is none of {', '.join(names)}", last)
            if found.problem:
                raise refuse(op, asked, found.problem, last)
            return found.make(), ProviderRow(op, asked, "; ".join(filter(None, ("asked for", self._about(found)))))
        skipped: list[str] = []
        for candidate in candidates:
            if not candidate.problem:
                why = "; ".join(filter(None, ("auto", *skipped, self._about(candidate))))
                return candidate.make(), ProviderRow(op, candidate.name, why)
            if candidate.name == "own" and self.config.own_kernels == "on":
                raise EnvironmentFault(f"backend.own_kernels = \"on\", but for {op}: {candidate.problem}; "
                                       "set backend.own_kernels = \"auto\" or \"off\"")
            skipped.append(candidate.problem)
        raise EnvironmentFault(f"no provider of {op} can serve: {'; '.join(skipped)}")

    def _added(self, op: str, name: str) -> Candidate:
        """The candidate of a plugin, which a configuration has asked for."""
        found = PROVIDERS[op].function(name)(self.device, self.dtype)
        if not isinstance(found, Candidate):
            raise ConfigError(
                f"provider {name!r} of {op} gave a {type(found).__name__}; it must give a Candidate "
                "(megatron_port.ext.kernels.choose)"
            )
        return dataclasses.replace(found, name=name)

    def _about(self, candidate: Candidate) -> str:
        return self.own_library if candidate.name == "own" else candidate.note

    # ---- the ops, each giving what it chose and its row

    def norm(self) -> tuple[tuple[fused.NormOp, fused.NormOp], ProviderRow]:
        """Choose LayerNorm and RMSNorm."""
        return self.pick("norm", [
            self.own(_own_norms), Candidate("apex", self._apex_norm_problem(), _apex_norms, "the residual add: torch"),
            Candidate("torch", "", lambda: (fused.torch_layer_norm, fused.torch_rms_norm)),
        ])

    def activation(self) -> tuple[tuple[fused.BiasGelu, fused.SwiGLU], ProviderRow]:
        """Choose bias + GeLU and SwiGLU."""
        return self.pick("activation", [
            self.own(_own_activation), Candidate("torch", "", lambda: (fused.torch_bias_gelu, fused.torch_swiglu)),
        ])

    def rotary(self) -> tuple[fused.SplitRotary, ProviderRow]:
        """Choose the split and rotation of the packed projection."""
        return self.pick("rotary", [self.own(_own_rotary), Candidate("torch", "", lambda: fused.torch_split_rotary)])

    def dropout(self) -> tuple[fused.BiasDropoutAdd | None, ProviderRow]:
        """Choose bias + dropout + residual."""
        return self.pick("dropout", [self.own(_own_dropout), Candidate("torch", "", lambda: None)])

    def softmax(self) -> tuple[fused.CausalSoftmax, ProviderRow]:
        """Return the causal softmax for math attention, and its row of the table."""
        return self.pick("softmax", [
            self.own(_own_softmax), Candidate("torch", "", lambda: fused.torch_causal_softmax)
        ])

    def cross_entropy(self) -> tuple[Any, ProviderRow]:
        """Choose the statistics and gradient of the vocabulary-parallel loss."""
        return self.pick("cross_entropy", [
            self.own(_own_cross_entropy), Candidate("torch", "", lambda: torch_cross_entropy)
        ])

    def optimizer(self) -> tuple[str, ProviderRow]:
        """Return the name of the provider of the rule's update; a plugin's rule has its own."""
        if self.rule in OWN_UPDATES and self.rule != "adamw":
            return self.pick("optimizer", [
                self.own(lambda: "own"), Candidate("torch", "", lambda: "torch")
            ])
        if self.rule != "adamw":
            whose = "is a plugin's" if self.rule in OPTIMIZERS.added else "has torch's ops alone"
            return "torch", ProviderRow("optimizer", "torch", f"the rule {self.rule} {whose}")
        own = self.own_problem or ("" if self.engine == "native" else "own AdamW is for engine native")
        # The libraries are checked, and DeepSpeed imported, only where their answer matters.
        asked = self.config.optimizer
        native = self.engine != "deepspeed"
        deepspeed = self._deepspeed_problem() if asked in ("auto", "deepspeed") else "not asked for"
        apex = self._apex_adam_problem() if asked == "apex" else "apex is used when asked for"
        adam = "FusedAdam" if self.device.is_gpu else "CPUAdam"
        order = [
            Candidate("own", own, lambda: self.own_library and "own"),
            Candidate("deepspeed", deepspeed, lambda: "deepspeed", f"{adam}, prebuilt"),
            Candidate("apex", apex, lambda: "apex", "FusedAdam"),
            Candidate("torch", "", lambda: "torch"),
        ]
        if asked == "auto":  # the engine decides which of the two can be meant
            order = [c for c in order if c.name in (("own", "torch") if native else ("deepspeed", "torch"))]
        return self.pick("optimizer", order)

    def attend(self, softmax: fused.CausalSoftmax) -> tuple[Any, ProviderRow]:
        """Choose the attention."""
        limit = own_gpu_limit(self.device, self.attention) if self.device.is_gpu else ""
        own = OwnAttention(self.own_problem or limit, lambda: self.own_library)
        return choose_attention(self.config, self.device, self.attention, softmax, own)

    def _apex_norm_problem(self) -> str:
        if self.config.norm not in ("auto", "apex"):
            return "not asked for"
        if not self.device.is_gpu:
            return "apex's kernels need a GPU"
        return optional_import("fused_layer_norm_cuda")[1] or optional_import("apex.normalization.fused_layer_norm")[1]

    def _apex_adam_problem(self) -> str:
        if not self.device.is_gpu:
            return "apex's kernels need a GPU"
        if self.engine != "deepspeed":
            return f"engine {self.engine} brings its own update"
        return optional_import("amp_C")[1] or optional_import("apex.optimizers")[1]

    def _deepspeed_problem(self) -> str:
        """Why DeepSpeed's Adam cannot be used, or nothing."""
        if self.dtype == torch.float64:
            return "fp64 needs torch's"
        if self.engine != "deepspeed":
            return f"engine {self.engine} brings its own update"
        from megatron_port.ext.kernels.jit_guard import prebuild_command, prebuilt_deepspeed_ops

        op = "fused_adam" if self.device.is_gpu else "cpu_adam"
        problem = optional_import("megatron_port.ext.deepspeed.deepspeed_import")[1]
        if problem:
            return problem
        if not prebuilt_deepspeed_ops().get(op, False):
            command = prebuild_command(op, "cuda" if self.device.is_gpu else "cpu")
            return f"{op} was not built ahead of time; build it: {command}"
        return optional_import(f"deepspeed.ops.adam.{op}_op")[1]


def _own_norms() -> tuple[fused.NormOp, fused.NormOp]:
    from megatron_port.ext.kernels.ops import norm

    def layer_norm(
        x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor | None, eps: float
    ) -> tuple[Tensor, Tensor]:
        if residual is None:
            return norm.fork(x, weight, bias, eps, rms=False)
        return norm.add_layer_norm(x, residual, weight, bias, eps)

    def rms_norm(
        x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor | None, eps: float
    ) -> tuple[Tensor, Tensor]:
        if residual is None:
            return norm.fork(x, weight, None, eps, rms=True)
        return norm.add_rms_norm(x, residual, weight, eps)

    return layer_norm, rms_norm


def _apex_norms() -> tuple[fused.NormOp, fused.NormOp]:
    """apex's fused norms; LayerNorm without bias and the residual add are torch's."""
    module, _ = optional_import("apex.normalization.fused_layer_norm")
    assert module is not None

    def layer_norm(
        x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor | None, eps: float
    ) -> tuple[Tensor, Tensor]:
        if bias is None:
            return fused.torch_layer_norm(x, residual, weight, bias, eps)
        total = x if residual is None else x + residual
        return module.fused_layer_norm_affine(total, weight, bias, weight.shape, eps), total

    def rms_norm(
        x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor | None, eps: float
    ) -> tuple[Tensor, Tensor]:
        total = x if residual is None else x + residual
        return module.fused_rms_norm_affine(total, weight, weight.shape, eps), total

    return layer_norm, rms_norm


def _own_activation() -> tuple[fused.BiasGelu, fused.SwiGLU]:
    from megatron_port.ext.kernels.ops import activation

    return activation.bias_gelu, activation.swiglu


def _own_rotary() -> fused.SplitRotary:
    from megatron_port.ext.kernels.ops import rotary

    def split_rotary(
        qkv: Tensor, cos: Tensor | None, sin: Tensor | None, *, offset: int = 0
    ) -> tuple[Tensor, Tensor, Tensor]:
        if cos is None or sin is None:  # nothing to compute: three views, which every attention takes, cost nothing
            return rotary.split(qkv)
        return rotary.split_rotary(qkv, cos, sin, offset=offset)

    return split_rotary


def _own_split_bias() -> fused.SplitBias:
    from megatron_port.ext.kernels.ops import rotary

    return rotary.split


def _packed_attention(
    provider: str, device: DeviceInfo, softmax: fused.CausalSoftmax, split: fused.SplitRotary
) -> fused.PackedAttention | None:
    """The attention of packed projections of a provider; None: it has none. On a CPU math is the reference."""
    if provider == "math" and device.is_gpu:
        from megatron_port.ext.kernels.packed_math import packed_math_attention

        return packed_math_attention(softmax, split)
    if provider != "own":
        return None
    from megatron_port.ext.kernels.ops.attention import packed_attention

    return packed_attention


def _own_dropout() -> fused.BiasDropoutAdd:
    from megatron_port.ext.kernels.ops import norm as dropout

    return dropout.bias_dropout_add


def _own_dropout_norm() -> fused.BiasDropoutAddNorm:
    from megatron_port.ext.kernels.ops import norm as residual_norm

    return residual_norm.bias_dropout_add_norm


def _own_softmax() -> fused.CausalSoftmax:
    from megatron_port.ext.kernels.ops import softmax

    return softmax.causal_softmax


def _own_cross_entropy() -> Any:
    from megatron_port.ext.kernels.ops.softmax import own_cross_entropy

    return own_cross_entropy


def choose_providers(
    config: BackendConfig,
    device: DeviceInfo,
    dtype: torch.dtype,
    *,
    engine: str = "native",
    attention_dropout: float = 0.0,
    heads: tuple[int, int, int] | None = None,
    fp8: str = "none",
    rule: str = "adamw",
    shape: tuple[int, int] | None = None,
    mask: MaskNeeds = CAUSAL,
    moe: MoEConfig | None = None,
) -> Providers:
    """Choose the provider of every op for this device, dtype, engine and configuration.

    Args:
        dtype: of parameters and activations.
        attention_dropout: probability; above 0 only ``own`` and ``math`` serve, with masks that are free of the layout.
        heads: (query heads, key heads, head size) on one rank: on a GPU the table then names the very kernel.
        fp8: precision.fp8.
        rule: optimizer.name.
        shape: (head size, sequence length): on a GPU attention is chosen by the times measured for them.
        mask: what attention does beyond the causal softmax; a provider serves all of it.
        moe: the model's experts; None, or none of them: nothing is chosen for them.

    Raises:
        EnvironmentFault: a provider that was asked for cannot serve; the message says why.
    """
    head_size = shape[0] if shape is not None else heads[2] if heads is not None else 0
    needs = AttentionNeeds(dtype, attention_dropout, head_size, heads, shape_here(device, dtype, shape), mask)
    chooser = Chooser(config, device, dtype, engine, needs, rule=rule)
    softmax, softmax_row = chooser.softmax()
    attention, attention_row = chooser.attend(softmax)
    (layer_norm, rms_norm), norm_row = chooser.norm()
    (bias_gelu, swiglu), activation_row = chooser.activation()
    split_rotary, rotary_row = chooser.rotary()
    bias_dropout_add, dropout_row = chooser.dropout()
    cross_entropy, loss_row = chooser.cross_entropy()
    optimizer, optimizer_row = chooser.optimizer()
    together = norm_row.provider == dropout_row.provider == "own"
    if together:
        dropout_row = dataclasses.replace(dropout_row, why=f"{dropout_row.why}; with the norm that follows")
    rows = [attention_row, norm_row, activation_row, rotary_row, dropout_row, loss_row, optimizer_row]
    if attention_row.provider == "math":
        rows.insert(1, softmax_row)
    experts = row_exchange = None
    if moe is not None and moe.enabled:
        experts, row_exchange, of_experts = PARTS.function("expert kernels")(chooser, moe)
        rows += of_experts
    products = None
    if fp8 != "none":
        products, of_products = PARTS.function("8-bit matmuls")(chooser, fp8)
        rows += of_products
    return Providers(
        attention=attention, layer_norm=layer_norm, rms_norm=rms_norm, bias_gelu=bias_gelu, swiglu=swiglu,
        split_rotary=split_rotary, bias_dropout_add=bias_dropout_add, cross_entropy=cross_entropy,
        optimizer=optimizer, table=tuple(rows), fp8=products,
        partial_attention=PARTIALS.get(attention_row.provider, ""),
        packed_attention=_packed_attention(attention_row.provider, device, softmax, split_rotary),
        split_bias=_own_split_bias() if rotary_row.provider == "own" else None,
        bias_dropout_add_norm=_own_dropout_norm() if together else None, experts=experts,
        row_exchange=row_exchange,
    )


def row_hashes_of(config: BackendConfig, device: torch.device) -> RowHashes:
    """Return the row hashes of a device by the own kernel or, where own kernels are off or not built, by torch."""
    kind = "cpu" if device.type == "cpu" else "rocm" if torch.version.hip else "cuda"
    if config.own_kernels == "off" or kernels.kernels_status(kind)[1]:
        return RowHashes(device)
    kernels.load(kind)
    return OwnRowHashes(device)
