"""Signatures of the ops that have more than one provider, and torch's version of each.

Tensors are [..., features] unless said otherwise. Every function is differentiable in its floating-point tensors.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

if TYPE_CHECKING:
    from megatron_port.core.layers.attention import AttentionMask


class NormOp(Protocol):
    """(norm(x + residual) · weight + bias, x + residual); without residual the second is x. x [..., h], weight [h].

    The second is for what else uses the sum: a provider may then add the gradient of that in the norm's backward pass.
    """

    def __call__(
        self, x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor | None, eps: float
    ) -> tuple[Tensor, Tensor]: ...


class BiasGelu(Protocol):
    """gelu(x + bias); ``approximate``: the tanh form (Hendrycks & Gimpel, arXiv 1606.08415)."""

    def __call__(self, x: Tensor, bias: Tensor | None, *, approximate: bool) -> Tensor: ...


SwiGLU = Callable[[Tensor], Tensor]
"""[..., 2f] → [..., f]: silu of the first half times the second (Shazeer, arXiv 2002.05202)."""


class SplitRotary(Protocol):
    """Packed projection [s, b, g, r + 2, d] → queries [s, b, g·r, d], keys and values [s, b, g, d].

    Queries and keys are rotated by the angles of row ``offset + s`` of the float32 tables cos, sin [positions, d/2]
    (Su et al., arXiv 2104.09864; element i pairs with i + d/2); None: not rotated.
    """

    def __call__(
        self, qkv: Tensor, cos: Tensor | None, sin: Tensor | None, *, offset: int = 0
    ) -> tuple[Tensor, Tensor, Tensor]: ...


class SplitBias(Protocol):
    """The split of a projection that is not rotated, where ``bias`` [g·(r + 2)·d] was added without a gradient.

    The gradient of the bias comes from here: the kernel that packs the gradients of queries, keys and values sums them.
    """

    def __call__(self, qkv: Tensor, bias: Tensor) -> tuple[Tensor, Tensor, Tensor]: ...


class BiasDropoutAdd(Protocol):
    """residual + dropout(x + bias) for [seq, batch, h]; see ``layers.dropout`` for the mask and its arguments."""

    def __call__(
        self, x: Tensor, bias: Tensor | None, residual: Tensor, keys: Tensor, *, op_key: int, p: float,
        seq_offset: int, width: int, width_offset: int,
    ) -> Tensor: ...


class BiasDropoutAddNorm(Protocol):
    """(norm(sum) · weight + bias, sum) with sum = residual + dropout(x + x_bias) for [seq, batch, h] of whole rows."""

    def __call__(
        self, x: Tensor, x_bias: Tensor | None, residual: Tensor, keys: Tensor, weight: Tensor, bias: Tensor | None, *,
        op_key: int, p: float, seq_offset: int, eps: float, rms: bool,
    ) -> tuple[Tensor, Tensor]: ...


@dataclass(frozen=True)
class ProbabilityDropout:
    """Dropout of attention probabilities [b, heads, q, k] with the masks of ``layers.dropout``."""

    drop: Callable[[Tensor], Tensor]
    """The dropout itself, in torch ops."""
    keys: Tensor
    """int64 [b], one per sample: with the rest what a kernel needs to make the same mask."""
    op_key: int
    p: float
    head_offset: int
    """Place of the first head among all heads of the layer."""
    first_query: int | None
    """Position of the first of q neighbouring queries; None: they are no neighbours."""


class PackedAttention(Protocol):
    """Causal attention of a packed projection that is not rotated, [s, b, g, r + 2, d] → [s, b, g·r·d]."""

    def __call__(
        self, qkv: Tensor, *, dropout: ProbabilityDropout | None = None, mask: AttentionMask | None = None
    ) -> Tensor: ...


class CausalSoftmax(Protocol):
    """Softmax of scale · scores [b, heads, q, k] over the columns j ≤ row + k - q, with dropout; zero elsewhere."""

    def __call__(self, scores: Tensor, *, scale: float, dropout: ProbabilityDropout | None = None) -> Tensor: ...


def torch_layer_norm(
    x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor]:
    """Layer normalization in torch ops (:class:`NormOp`); statistics in fp32 or wider. On a GPU torch's kernel rounds
    the gradients of half-precision parameters."""
    total = x if residual is None else x + residual
    if total.is_cpu and total.dtype in _INSTRUCTIONS:
        return _CpuLayerNorm.apply(total, weight, bias, eps), total
    return F.layer_norm(total, weight.shape, weight, bias, eps), total


def torch_rms_norm(
    x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor]:
    """RMS normalization in torch ops (:class:`NormOp`): x / sqrt(mean(x²) + eps) · weight; there is no bias."""
    total = x if residual is None else x + residual
    if total.is_cpu and total.dtype in _INSTRUCTIONS:  # torch's own does the same, but for the weight's gradient
        return F.rms_norm(total.float(), weight.shape, upcast(weight), eps).to(total.dtype), total
    return F.rms_norm(total, weight.shape, weight, eps), total


def torch_bias_gelu(x: Tensor, bias: Tensor | None, *, approximate: bool) -> Tensor:
    """Bias and GeLU in torch ops (:class:`BiasGelu`)."""
    return F.gelu(add_bias(x, bias), approximate="tanh" if approximate else "none")


def torch_swiglu(x: Tensor) -> Tensor:
    """SwiGLU in torch ops (:data:`SwiGLU`)."""
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate) * up


def apply_rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate [seq, batch, heads, d] by tables [seq, d/2]; element i pairs with i + d/2 (Llama's convention).

    In the dtype of x, as transformers' Llama does, so that imported weights give its logits.
    """
    c, s = (torch.cat((t, t), dim=-1)[:, None, None, :].to(x.dtype) for t in (cos, sin))
    first, second = x.chunk(2, dim=-1)
    return x * c + torch.cat((-second, first), dim=-1) * s


def torch_split_rotary(
    qkv: Tensor, cos: Tensor | None, sin: Tensor | None, *, offset: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    """Split of the packed projection and rotation in torch ops (:class:`SplitRotary`)."""
    seq, batch, groups, rows, size = qkv.shape
    q, k, v = qkv.split((rows - 2, 1, 1), dim=3)
    q, k, v = q.reshape(seq, batch, groups * (rows - 2), size), k.squeeze(3), v.squeeze(3)
    if cos is None or sin is None:
        return q, k, v
    cos, sin = cos[offset : offset + seq], sin[offset : offset + seq]
    return apply_rotary(q, cos, sin), apply_rotary(k, cos, sin), v


def torch_causal_softmax(scores: Tensor, *, scale: float, dropout: ProbabilityDropout | None = None) -> Tensor:
    """Causal softmax in torch ops, in fp32 (fp64 for fp64); the result has the dtype of the scores."""
    rows, cols = scores.shape[-2:]
    later = torch.ones(rows, cols, dtype=torch.bool, device=scores.device).triu_(1 + cols - rows)
    wide = torch.float64 if scores.dtype == torch.float64 else torch.float32
    scores = scores if scale == 1.0 else scores * scale
    probs = torch.softmax(scores.masked_fill(later, float("-inf")), dim=-1, dtype=wide).to(scores.dtype)
    return probs if dropout is None else dropout.drop(probs)


def first_order(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Make a gradient of what this ``backward`` returns an error, as torch's ``once_differentiable`` does, without its
    3 µs where none can be asked for, because gradients are off while ``backward`` runs."""
    guarded = once_differentiable(backward)

    @functools.wraps(backward)
    def run(ctx: Any, *grads: Any) -> Any:
        return (guarded if torch.is_grad_enabled() else backward)(ctx, *grads)

    return run


class FirstOrderFunction(torch.autograd.Function):
    """Base of the package's functions, which no transform of functorch (vmap, jvp) takes. torch's own ``apply`` looks
    at each argument for what such a transform may have left behind: 3 of 11 µs."""

    @classmethod
    def apply(cls, *arguments: Any) -> Any:
        if torch._C._are_functorch_transforms_active():
            return super().apply(*arguments)  # type: ignore[no-untyped-call]  # which refuses, by name
        return super(torch.autograd.Function, cls).apply(*arguments)  # type: ignore[misc]


# Gradients of biases and gains are sums over rows, which an engine adds to its sums without rounding them first.

def gradient_dtype(parameter: Tensor) -> torch.dtype:
    """Return the dtype to give autograd a parameter's gradient in: float32 or wider if it takes any (``grad_dtype`` is
    None, as an engine with sums of gradients sets it), else its own, to which autograd would round. So it does through
    a view of a parameter: of packed biases, of those joined with what ranks share, of a gain of 1 + weight."""
    wide = parameter.is_leaf and getattr(parameter, "grad_dtype", parameter.dtype) is None
    return torch.promote_types(parameter.dtype, torch.float32) if wide else parameter.dtype


class _AddBias(FirstOrderFunction):
    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor) -> Tensor:
        ctx.dtype = gradient_dtype(bias)
        return x + bias

    @staticmethod
    @first_order
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        return grad, grad.flatten(0, -2).sum(0, dtype=ctx.dtype)


def add_bias(x: Tensor, bias: Tensor | None) -> Tensor:
    """Return x + bias for x [..., out] and bias [out]; the gradient of bias is not rounded where it need not be."""
    if bias is None:
        return x
    if not torch.is_grad_enabled() or gradient_dtype(bias) == bias.dtype:
        return x + bias
    y: Tensor = _AddBias.apply(x, bias)
    return y


class _Upcast(FirstOrderFunction):
    @staticmethod
    def forward(ctx: Any, parameter: Tensor) -> Tensor:
        return parameter.float()

    @staticmethod
    @first_order
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


def upcast(parameter: Tensor) -> Tensor:
    """Return a parameter in float32 or wider, whose gradient is rounded only if its ``grad_dtype`` is its own."""
    wide: Tensor = _Upcast.apply(parameter) if parameter.dtype in _INSTRUCTIONS else parameter
    return wide


class _CpuLayerNorm(FirstOrderFunction):
    """Layer normalization of half precision on a CPU, computed in float32 from what it keeps as it came. torch itself
    sums the gradients of weight and bias in their dtype, row by row: 2 % off after 300 rows of bf16."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
        ctx.save_for_backward(x, weight, bias)
        ctx.eps = eps
        shift = None if bias is None else bias.float()
        return F.layer_norm(x.float(), weight.shape, weight.float(), shift, eps).to(x.dtype)

    @staticmethod
    @first_order
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        wide = [None if t is None else t.detach().float().requires_grad_() for t in ctx.saved_tensors]
        x, weight, bias = wide
        assert x is not None and weight is not None
        with torch.enable_grad():
            y = F.layer_norm(x, weight.shape, weight, bias, ctx.eps)
        y.backward(grad.float())
        return (*(None if t is None else t.grad for t in wide), None)


# Half-precision matrix products on a CPU whose instructions have none: by float32, 10 to 20 times faster there.
#
# torch's own products of bf16 and fp16 matrices on such a processor (AVX2: most CI machines, a Frontier node's EPYC)
# convert element by element. Both ways sum in float32 and round the sum once, so they differ in the order of sums
# alone.

_INSTRUCTIONS = {
    torch.bfloat16: ("_is_avx512_bf16_supported", "_is_amx_tile_supported"),
    torch.float16: ("_is_avx512_fp16_supported", "_is_amx_fp16_supported"),
}
"""Queries of torch.cpu by dtype; a query that this torch lacks counts as no."""


@functools.cache
def _has_instructions(dtype: torch.dtype) -> bool:
    asked = (getattr(torch.cpu, name, None) for name in _INSTRUCTIONS[dtype])
    return any(ask is not None and bool(ask()) for ask in asked)


def widens(x: Tensor) -> bool:
    """Return whether products of ``x`` are faster in float32."""
    return x.is_cpu and x.dtype in _INSTRUCTIONS and not _has_instructions(x.dtype)


class _Product(FirstOrderFunction):
    """Keeps its operands for the backward pass as they came, not as float32."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
        ctx.save_for_backward(a, b)
        return (a.float() @ b.float()).to(a.dtype)

    @staticmethod
    @first_order
    def backward(ctx: Any, grad: Tensor) -> Any:
        a, b = ctx.saved_tensors
        wide = grad.float()
        da = (wide @ b.float().mT).to(a.dtype) if ctx.needs_input_grad[0] else None
        db = (a.float().mT @ wide).to(b.dtype) if ctx.needs_input_grad[1] else None
        return da, db


def product(a: Tensor, b: Tensor) -> Tensor:
    """Return a @ b in the dtype of both, summed in float32 or wider: [..., m, k], [..., k, n] → [..., m, n].

    The leading dimensions must be the same.
    """
    return _Product.apply(a, b) if a.is_cpu and widens(a) else a @ b


def linear(x: Tensor, matrix: Tensor, bias: Tensor | None = None) -> Tensor:
    """x Wᵀ + b likewise, rounded after the bias is added: [..., in], [out, in], [out] → [..., out].

    For a pass of its own without autograd, which would keep float32 copies where it widens.
    """
    if not (x.is_cpu and widens(x)):
        return F.linear(x, matrix, bias)
    return F.linear(x.float(), matrix.float(), None if bias is None else bias.float()).to(x.dtype)
