"""Shims with which trainers written for GPUs run on a CPU. Each shim is a function that says what it replaces.

A shim changes the process that calls it, which serves one case and ends: call it in ``Adapter.start``. None changes
what is computed, but for rounding: ``fp64_stays`` computes more precisely than the trainer asks for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack

SUM = torch.distributed.ReduceOp.SUM


class _OnCpu(TorchFunctionMode):
    """Makes on the CPU what is asked for on "cuda"."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = "cpu"
        kwargs.pop("pin_memory", None)
        if func is Tensor.cuda:
            return args[0]
        if func is Tensor.to and len(args) > 1 and isinstance(args[1], (str, torch.device)):
            args = (args[0], "cpu", *args[2:])
        if func is Tensor.type and len(args) == 1 and not kwargs:
            return func(*args).replace("torch.", "torch.cuda.").replace("Double", "Float")
        return func(*args, **kwargs)


class _Fp64Stays(TorchFunctionMode):
    """Keeps fp64 where a trainer asks for fp32."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        double = bool(args) and isinstance(args[0], Tensor) and args[0].dtype == torch.float64
        if double and func is Tensor.float:
            return args[0]
        if double and func is Tensor.to and torch.float32 in args:
            args = tuple(torch.float64 if a is torch.float32 else a for a in args)
        made = func in _FACTORIES and str(kwargs.get("device", "cpu")).startswith(("cpu", "cuda"))
        if kwargs.get("dtype") is torch.float32 and (double or made):
            kwargs["dtype"] = torch.float64
        return func(*args, **kwargs)


_FACTORIES = {torch.zeros, torch.ones, torch.empty, torch.full, torch.tensor}


class _Stream:
    """A stand-in for a CUDA stream: on a CPU all work is in one order."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __enter__(self) -> _Stream:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Stream)

    def __hash__(self) -> int:
        return 0

    def wait_stream(self, *_: Any) -> None:
        """Do nothing."""

    wait_event = synchronize = wait = record = wait_stream

    def record_event(self, *_: Any) -> _Stream:
        """Return an event that has happened."""
        return self


def cuda_on_cpu() -> None:
    """Replace the device "cuda" by "cpu": as an argument, in ``.cuda()``, as the current device, in names of tensor
    types (fp64 is called ``torch.cuda.FloatTensor``, as optimizers refuse it otherwise); pinned memory by plain."""
    torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment,return-value]
    _OnCpu().__enter__()  # type: ignore[no-untyped-call]


def fp64_stays() -> None:
    """Replace fp32 by fp64 where a trainer in fp64 asks for it by name (softmax, losses, norms), so that no more than
    fp64's rounding is left between two layouts."""
    _Fp64Stays().__enter__()  # type: ignore[no-untyped-call]


def hold_in_recompute(kind: Any) -> None:
    """Wrap ``backward`` of an autograd function that runs a forward pass again: torch leaves modes out of the backward
    pass, so what the shims above redirect would not be redirected there."""
    again, modes = kind.backward, [type(mode) for mode in _get_current_function_mode_stack()]

    def backward(ctx: Any, *gradients: Any) -> Any:
        with ExitStack() as stack:
            for mode in modes:
                stack.enter_context(mode())
            return again(ctx, *gradients)

    kind.backward = staticmethod(backward)


def no_streams() -> None:
    """Replace CUDA's streams and events by ones that do nothing, and waiting for the device by nothing."""
    for name in ("Stream", "Event", "stream"):
        setattr(torch.cuda, name, _Stream)
    for name in ("current_stream", "default_stream"):
        setattr(torch.cuda, name, _Stream)
    for name in ("synchronize", "empty_cache"):
        setattr(torch.cuda, name, lambda *_: None)


def no_device_random() -> None:
    """Replace the state of CUDA's random numbers by an empty one. Nothing may be dropped then: dropout is 0."""
    torch.cuda.get_rng_state = torch.cuda.random.get_rng_state = lambda *_, **__: torch.zeros(1, dtype=torch.uint8)
    torch.cuda.manual_seed = lambda *_: None


@contextmanager
def no_compiler() -> Iterator[None]:
    """Replace ``torch.compile`` by the function itself, for what is imported within."""
    compile_ = torch.compile

    def as_it_is(function: Callable[..., Any] | None = None, **_: Any) -> Any:
        return function if function is not None else lambda f: f

    torch.compile = as_it_is  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.compile = compile_


class TorchNorm:
    """torch's norms where Megatron-core builds its own, which need Transformer Engine or apex under sequence
    parallelism. What Megatron's reduction asks of a parameter, ``sequence_parallel``, is set as theirs set it."""

    def __new__(cls, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> Any:
        kind = torch.nn.RMSNorm if config.normalization == "RMSNorm" else torch.nn.LayerNorm
        made = kind(hidden_size, eps=eps, dtype=config.params_dtype)
        for parameter in made.parameters():
            parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        return made


def megatron_norms() -> None:
    """Replace the norms of Megatron-core's local layers by :class:`TorchNorm`."""
    from megatron.core.models import backends
    from megatron.core.models.gpt import gpt_layer_specs

    backends.LocalSpecProvider.layer_norm = lambda self, rms_norm=False, for_qk=False: TorchNorm
    gpt_layer_specs.LNImpl = TorchNorm


def megatron_names() -> None:
    """Give Megatron-core two names that it has from Transformer Engine alone: the router's product (0.16.1 fails with
    NameError: te_general_gemm), for which it takes the plain one, and a class that multi-latent attention asks for."""
    from megatron.core.transformer import multi_latent_attention
    from megatron.core.transformer.moe import moe_utils

    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None
    if not isinstance(multi_latent_attention.TELinear, type):
        multi_latent_attention.TELinear = type("TELinear", (), {})


def megatron_dispatcher() -> None:
    """Give Megatron-core's all-to-all of tokens the sizes as numpy arrays, as it has them after a copy from a GPU; on a
    CPU it leaves them tensors, which no collective takes."""
    from megatron.core.transformer.moe import token_dispatcher

    def to_cpu(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        return tensor.numpy() if as_numpy and isinstance(tensor, Tensor) else tensor

    token_dispatcher.maybe_move_tensor_to_cpu = to_cpu


def titan_on_cpu() -> None:
    """Replace the device of torchtitan's meshes, "cuda" where no accelerator is found, by "cpu"; give its table of
    types fp64, which its settings do not offer."""
    from torchtitan import config
    from torchtitan.distributed import parallel_dims

    parallel_dims.device_type = "cpu"
    config.TORCH_DTYPE_MAP["float64"] = torch.float64


def gloo_unequal() -> None:
    """Replace all-gather and reduce-scatter of parts of unequal sizes, which nccl has and gloo has not, by gathers and
    sums that are padded to the largest."""
    gather, scatter = torch.distributed.all_gather, torch.distributed.reduce_scatter

    def all_gather(parts: Any, part: Tensor, group: Any = None, async_op: bool = False) -> Any:
        most = max(len(p) for p in parts)
        if all(len(p) == most for p in parts):
            return gather(parts, part, group=group, async_op=async_op)
        padded = [p.new_zeros(most, *p.shape[1:]) for p in parts]
        gather(padded, torch.cat([part, part.new_zeros(most - len(part), *part.shape[1:])]), group=group)
        for own, found in zip(parts, padded, strict=True):
            own.copy_(found[: len(own)])
        return None

    def reduce_scatter(out: Tensor, parts: Any, op: Any = SUM, group: Any = None, async_op: bool = False) -> Any:
        if len({len(p) for p in parts}) == 1:
            return scatter(out, parts, op, group, async_op)
        total = torch.cat(list(parts))
        torch.distributed.all_reduce(total, group=group)
        return out.copy_(total.split([len(p) for p in parts])[group.rank()])

    changed: Any = torch.distributed
    changed.all_gather, changed.reduce_scatter = all_gather, reduce_scatter


def gloo_flat() -> None:
    """Flatten what is reduced and scattered: gloo wants a first dimension that ranks divide, nccl counts elements."""
    scatter = torch.distributed.reduce_scatter_tensor

    def reduce_scatter_tensor(output: Tensor, input: Tensor, *rest: Any, **more: Any) -> Any:
        return scatter(output.view(-1), input.reshape(-1), *rest, **more)

    changed: Any = torch.distributed
    changed.reduce_scatter_tensor = reduce_scatter_tensor


class _Gathered(torch.autograd.Function):
    """Sequences of all ranks of a group, one after the other: [s, …] → [ranks x s, …]."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, group: Any) -> Tensor:
        ctx.group, ctx.length = group, len(part)
        parts = [torch.empty_like(part) for _ in range(group.size())]
        torch.distributed.all_gather(parts, part.contiguous(), group=group)
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        gradient = gradients[0].clone()
        torch.distributed.all_reduce(gradient, group=ctx.group)
        return gradient[ctx.group.rank() * ctx.length :][: ctx.length], None


def zigzag(length: int, rank: int, count: int) -> Tensor:
    """Return the positions that a rank of context parallelism has in Megatron: part ``rank``, and the same one from
    the end."""
    return torch.cat([torch.arange(length).chunk(2 * count)[part] for part in (rank, 2 * count - 1 - rank)])


class GatheredAttention(torch.nn.Module):
    """Causal attention where Megatron-core has Transformer Engine's alone, under context parallelism and in latent
    attention: keys and values of all ranks are gathered. What is around it, positions, loss, reductions, is theirs."""

    def __init__(self, config: Any, *_: Any, pg_collection: Any, softmax_scale: float | None = None, **__: Any) -> None:
        super().__init__()
        self.group, self.scale = pg_collection.cp, softmax_scale

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> Tensor:
        """[s, b, heads, width] → [s, b, heads x width]"""
        count = self.group.size()
        own = zigzag(count * len(query), self.group.rank(), count)
        other = torch.cat([zigzag(count * len(query), rank, count) for rank in range(count)])
        gathered: Any = _Gathered.apply
        q, k, v = (x.permute(1, 2, 0, 3) for x in (query, gathered(key, self.group), gathered(value, self.group)))
        out = torch.nn.functional.scaled_dot_product_attention(
            q, k, v, attn_mask=own[:, None] >= other[None], scale=self.scale, enable_gqa=True
        )
        return out.permute(2, 0, 1, 3).flatten(2)


BY_NAME: dict[str, Callable[[], None]] = {
    "cuda-on-cpu": cuda_on_cpu, "fp64-stays": fp64_stays, "no-streams": no_streams,
    "no-device-random": no_device_random, "gloo-unequal": gloo_unequal,
}
"""Those that any trainer can ask for."""
