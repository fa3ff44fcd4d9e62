"""Tensor-parallel products that exchange rows with one other rank at a time, each message beside another product.

Under sequence parallelism a region's entry multiplies the gathered rows of all ranks, and its exit leaves each rank the
sum of its own rows. Both fall apart by ranks (Wang et al., ASPLOS 2023, https://doi.org/10.1145/3567955.3567959): the
entry multiplies its own rows while those of the next rank arrive; the exit computes the rows of each other rank, sends
them, and adds what it receives **in the order of the ranks**, in fp32 for bf16, with one rounding. So the sum does not
depend on the library's choice of an algorithm, and has the bits of a reduce-scatter where there are two ranks.

Two forms, by ``layout.tp_exchange``:

* ``pairs``: messages of the backend (:class:`PairedMessages`), on any device.
* ``symm_mem``: torch's fused operators over symmetric memory (:class:`SymmetricMemory`; PyTorch's "async tensor
  parallelism"), whose copy engines move rows over NVLink without a multiprocessor. bf16, CUDA, ranks in one NVLink
  domain. The bias is added after the product, rounded once more than in ``pairs``.

The backward pass of the entry is that of ``linear``, whose reduce-scatter runs beside the weight's product. That of the
exit multiplies the gathered gradient as the entry multiplies the gathered input.
"""

from __future__ import annotations

import importlib
from typing import Any, Protocol

import torch
import torch.distributed as dist

from megatron_port.core.dist.device_streams import COMPUTE, access, in_flight
from megatron_port.core.errors import EnvironmentFault
from megatron_port.core.layers import fused
from megatron_port.core.layers.fused import first_order
from megatron_port.core.layers.linear import ColumnParallelLinear, LinearKernels, RowParallelLinear, _Linear, _wgrad

Tensors = tuple[torch.Tensor, torch.Tensor]


class Exchange(Protocol):
    """The two products of a region's ends. ``matrix``: [out, in]; rows are the first dimension."""

    def gather(
        self, x: torch.Tensor, matrix: torch.Tensor, bias: torch.Tensor | None, group: dist.ProcessGroup
    ) -> Tensors:
        """Return all ranks' rows X [ranks · rows, batch, in] of ``x`` [rows, batch, in], and X Wᵀ + b."""

    def scatter(self, x: torch.Tensor, matrix: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        """Return this rank's rows of x Wᵀ summed over the ranks: [rows, batch, in] → [rows / ranks, batch, out]."""


class PairedMessages:
    """One message to another rank and one from another at a time, in the order of the ranks' distance."""

    def gather(
        self, x: torch.Tensor, matrix: torch.Tensor, bias: torch.Tensor | None, group: dist.ProcessGroup
    ) -> Tensors:
        """Gather and multiply (:class:`Exchange`); all messages are started before the first product."""
        members, me = dist.get_process_group_ranks(group), dist.get_rank(group)
        x, ranks = x.contiguous(), len(members)
        whole = x.new_empty(ranks, *x.shape)
        out = x.new_empty(ranks, *x.shape[:-1], matrix.shape[0])
        works = []
        for step in range(1, ranks):
            source, target = (me + step) % ranks, (me - step) % ranks
            works.append(_exchanged(x, members[target], whole[source], members[source], group))
        whole[me] = x
        for step in range(ranks):
            source = (me + step) % ranks
            for work in works[step - 1] if step else ():
                work.wait()
            access(COMPUTE, "the product of a rank's rows", reads=[whole[source]], writes=[out[source]])
            out[source] = fused.linear(whole[source], matrix, bias)
        return whole.flatten(0, 1), out.flatten(0, 1)

    def scatter(self, x: torch.Tensor, matrix: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        """Multiply and add (:class:`Exchange`); the rows of the others are sent first, its own computed last."""
        members, me = dist.get_process_group_ranks(group), dist.get_rank(group)
        ranks = len(members)
        parts = x.chunk(ranks)
        stacked = x.new_empty(ranks, *parts[0].shape[:-1], matrix.shape[0])
        works, sent = [], []
        for step in range(1, ranks):
            target, source = (me + step) % ranks, (me - step) % ranks
            product = fused.linear(parts[target], matrix)
            access(COMPUTE, "the product of another rank's rows", writes=[product])
            works += _exchanged(product, members[target], stacked[source], members[source], group)
            sent.append(product)  # alive until the message has left
        stacked[me] = fused.linear(parts[me], matrix)
        for work in works:
            work.wait()
        access(COMPUTE, "the ranks' products are added", reads=[stacked])
        return stacked.sum(dim=0)


def _exchanged(
    sent: torch.Tensor, target: int, received: torch.Tensor, source: int, group: dist.ProcessGroup
) -> list[Any]:
    """Start a message to ``target`` and one from ``source``; return what to wait for."""
    works = dist.batch_isend_irecv([
        dist.P2POp(dist.isend, sent, target, group), dist.P2POp(dist.irecv, received, source, group),
    ])
    return [in_flight(work, "rows of another rank", reads=[sent], writes=[received]) for work in works]


class SymmetricMemory:
    """torch's operators, which read and write the other ranks' memory."""

    def gather(
        self, x: torch.Tensor, matrix: torch.Tensor, bias: torch.Tensor | None, group: dist.ProcessGroup
    ) -> Tensors:
        """Gather and multiply (:class:`Exchange`)."""
        whole, (out,) = torch.ops.symm_mem.fused_all_gather_matmul(x.contiguous(), [matrix.t()], 0, group.group_name)
        return whole, out if bias is None else out.add_(bias)

    def scatter(self, x: torch.Tensor, matrix: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        """Multiply and add (:class:`Exchange`)."""
        added: torch.Tensor = torch.ops.symm_mem.fused_matmul_reduce_scatter(
            x.contiguous(), matrix.t(), "sum", 0, group.group_name
        )
        return added


def symmetric_problem(device: torch.device) -> str:
    """Return why torch's operators over symmetric memory cannot serve ranks on devices like this one; empty: they can.

    The devices that this process sees must reach each other over NVLink; where a launcher shows each rank its own
    alone, the first product finds out.
    """
    if torch.version.hip:
        return "torch has no fused products over symmetric memory for ROCm"
    if device.type != "cuda":
        return f"it needs an NVIDIA GPU, and this rank computes on {device}"
    try:
        importlib.import_module("torch.distributed._symmetric_memory")  # registers the operators
    except ImportError as error:
        return f"this torch ({torch.__version__}) has no symmetric memory: {error}"
    if not hasattr(torch.ops.symm_mem, "fused_all_gather_matmul"):
        return f"this torch ({torch.__version__}) has no symm_mem.fused_all_gather_matmul"
    return _unlinked()


def _unlinked() -> str:
    """Return which of the visible GPUs no NVLink joins; empty: none, or torch cannot tell."""
    detect = getattr(torch._C._distributed_c10d, "_detect_dma_connectivity", None)
    if detect is None or torch.cuda.device_count() < 2:
        return ""
    try:
        matrix = detect(torch._C._autograd.DeviceType.CUDA, "nvlink").matrix
    except RuntimeError:  # no NVML here
        return ""
    pairs = [(i, j) for i, row in enumerate(matrix) for j, links in enumerate(row) if i < j and not links]
    return f"no NVLink joins GPU {pairs[0][0]} and GPU {pairs[0][1]}" if pairs else ""


def exchange_of(name: str, device: torch.device) -> Exchange:
    """Return the form that ``layout.tp_exchange`` names.

    Raises:
        EnvironmentFault: it cannot serve this device.
    """
    if name == "pairs":
        return PairedMessages()
    problem = symmetric_problem(device)
    if problem:
        raise EnvironmentFault(
            f'layout.tp_exchange = "symm_mem" cannot serve: {problem}; set layout.tp_exchange = "pairs" or "collective"'
        )
    return SymmetricMemory()


def prepare_entry(
    ctx: Any, x: torch.Tensor, weight: torch.Tensor, group: dist.ProcessGroup, kernels: LinearKernels
) -> torch.Tensor:
    """Keep what the backward pass of ``layers.linear`` needs at the entry of a region under sequence parallelism.

    x [seq/tp, batch, in], weight [..., out/tp, in]. Returns the weight as a matrix.
    """
    ctx.save_for_backward(x, weight)
    ctx.weights, ctx.group, ctx.sequence, ctx.kernels = (weight,), group, True, kernels
    matrix = weight.flatten(0, -2)
    ctx.sizes, ctx.saved_input_scales = [matrix.shape[0]], [None]
    return matrix


class _Entering(_Linear):
    """Product of gathered rows. ``how``: group and exchange."""

    @staticmethod
    def forward(  # type: ignore[override]  # how in place of the entry's group
        ctx: Any, x: torch.Tensor, bias: torch.Tensor | None, how: tuple[dist.ProcessGroup, Exchange], sequence: bool,
        kernels: LinearKernels, weight: torch.Tensor,
    ) -> torch.Tensor:
        group, exchange = how
        matrix = prepare_entry(ctx, x, weight, group, kernels)
        ctx.bias = bias
        return exchange.gather(x, matrix, bias, group)[1]


class _Leaving(_Linear):
    """Product whose rows are summed over the ranks. ``how``: group and exchange."""

    @staticmethod
    def forward(  # type: ignore[override]  # how in place of the entry's group
        ctx: Any, x: torch.Tensor, bias: None, how: tuple[dist.ProcessGroup, Exchange], sequence: bool,
        kernels: LinearKernels, weight: torch.Tensor,
    ) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.how, ctx.weight, ctx.kernels = how, weight, kernels
        return how[1].scatter(x.contiguous(), weight, how[0])

    @staticmethod
    @first_order
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        x, weight = ctx.saved_tensors
        group, exchange = ctx.how
        whole, dx = exchange.gather(grad, weight.t(), None, group)
        dw = None
        if ctx.needs_input_grad[5]:
            rows = x.detach().flatten(0, -2)
            dw = _wgrad(ctx.kernels, ctx.weight, whole.flatten(0, -2), rows, None)
        return dx if ctx.needs_input_grad[0] else None, None, None, None, None, dw


class ExchangedColumnLinear(ColumnParallelLinear):
    """ColumnParallelLinear whose input arrives from one rank at a time. ``name``: ``layout.tp_exchange``."""

    def __init__(self, name: str, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.exchange = None if self.group is None else exchange_of(name, self.weight.device)

    def forward(self, x: torch.Tensor, *, detach_bias: bool = False) -> torch.Tensor:
        if self.exchange is None or not self.sequence_parallel or self.shared_weight is not None:
            return super().forward(x, detach_bias=detach_bias)
        bias = self.added_bias(detach_bias)
        out: torch.Tensor = _Entering.apply(x, bias, (self.group, self.exchange), True, self.kernels, self.weight)
        return out


class ExchangedRowLinear(RowParallelLinear):
    """RowParallelLinear whose output goes to one rank at a time. ``name``: ``layout.tp_exchange``."""

    def __init__(self, name: str, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.exchange = None if self.group is None else exchange_of(name, self.weight.device)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.exchange is None or not self.sequence_parallel:
            return super().forward(x)
        y: torch.Tensor = _Leaving.apply(x, None, (self.group, self.exchange), False, self.kernels, self.weight)
        return y if self.skip_bias else fused.add_bias(y, self.bias)
