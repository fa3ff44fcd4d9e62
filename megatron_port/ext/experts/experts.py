"""Experts divided over ranks: rows of tokens exchanged between them, and products with many matrices.

The experts of a layer are one parameter [E, ...] that the ranks of ``ep`` divide along its first dimension. A rank
sorts the copies of its tokens by expert, so that what goes to another rank is one run of rows; ranks first tell each
other how many rows of which expert come (one wait of the host in each layer, none in a recomputed pass), then exchange
the rows, multiply them by their experts' matrices, and send the results back the same way (Lepikhin et al., arXiv
2006.16668; without a capacity Gale et al., arXiv 2211.15841).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from megatron_port.core.dist.collectives import Group, to_device_async
from megatron_port.core.dist.device_streams import in_flight
from megatron_port.core.layers.fused import FirstOrderFunction, first_order
from megatron_port.core.layers.linear import WgradAccumulator, add_product
from megatron_port.ext.experts import torch_ops as expert_rows
from megatron_port.ext.experts import torch_ops as router
from megatron_port.ext.experts.torch_ops import Routed, Routing

# -- what moves rows between ranks: torch, or a library (backend.experts_exchange) ---------------------------------

LARGEST_KEY = 2**24
"""Integers up to this one are exact in float32."""


@dataclass(frozen=True)
class Manifest:
    """Rows that this rank sends to each rank of the group and receives from it in a forward pass of a layer.

    ``counts`` int64 [E], on the device: rows for each expert of the layer; the rows are sorted by expert. ``most``:
    rows that any rank can send, alike on all.
    """

    group: Any
    rank: int
    sent: tuple[int, ...]
    received: tuple[int, ...]
    counts: torch.Tensor
    most: int

    def expert_of_row(self) -> torch.Tensor:
        """Return the expert of each row that is sent, int64 [rows, 1]."""
        experts = torch.arange(len(self.counts), device=self.counts.device)
        return torch.repeat_interleave(experts, self.counts, output_size=sum(self.sent)).unsqueeze(1)

    def keys(self) -> torch.Tensor:
        """Return numbers float32 [rows, 1] that are larger for rows of later ranks, and of a rank for later rows: a
        library carries them with the rows, as weights, and what arrives is put in order by them.

        Raises:
            ValueError: there are more rows than float32 can number.
        """
        if len(self.sent) * self.most > LARGEST_KEY:
            raise ValueError(
                f"{len(self.sent)} ranks of {self.most} rows are more than {LARGEST_KEY}, which "
                'backend.experts_exchange deepep and mori can keep apart; lower batch.micro_batch_size, or use "torch"'
            )
        rows = torch.arange(sum(self.sent), device=self.counts.device)
        return (rows + self.rank * self.most).to(torch.float32).unsqueeze(1)


@dataclass(frozen=True)
class Arriving:
    """Rows on their way: the memory for them, undefined until ``wait`` returns them."""

    memory: torch.Tensor
    wait: Callable[[], torch.Tensor]


class RowTransport(Protocol):
    """Moves the rows of one forward pass of a layer, and their gradients; one exchange at a time."""

    def start(self, rows: torch.Tensor, *, to_experts: bool) -> Arriving:
        """Start to exchange contiguous rows [sent, h] to the ranks of their experts; or [received, h] back."""

    def arranged(self) -> torch.Tensor | None:
        """Return where in what has arrived first the rows are in the order of an all-to-all, by rank and place, int64
        [received]: all further exchanges keep that order. None: they come in the order of an all-to-all."""


RowExchange = Callable[[Manifest], RowTransport]
"""Provider of ``backend.experts_exchange``."""


# -- the exchange ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Exchange:
    """Rows that this rank sends to each rank of the group and receives from it, and the experts that they are for.

    ``counts``: rows of each of this rank's experts after the exchange, on the host. ``order`` int64 [received]: where
    in what is received the rows of the first expert are, then those of the second, …; ``back`` the inverse. None: they
    come in this order. ``meanwhile`` is called while rows are on their way and nothing else is left to do.
    """

    group: Group
    sent: tuple[int, ...]
    received: tuple[int, ...]
    counts: tuple[int, ...]
    order: torch.Tensor | None = None
    back: torch.Tensor | None = None
    transport: RowTransport | None = None
    meanwhile: Callable[[], None] = lambda: None

    def filled_by(self, weight: torch.Tensor) -> Exchange:
        """Return the exchange during which the weight's accumulator computes products that wait for one."""
        accumulator: WgradAccumulator | None = getattr(weight, "wgrad_accumulator", None)
        return self if accumulator is None else replace(self, meanwhile=accumulator.during_exchange)

    def arranged(self) -> Exchange:
        """Return the exchange for rows in the order in which its transport has brought them."""
        places = None if self.transport is None else self.transport.arranged()
        if places is None or self.order is None:
            return self
        order = places[self.order]
        back = torch.empty_like(order)
        back[order] = torch.arange(len(order), device=order.device)
        return replace(self, order=order, back=back)


def announced_rows(counts: torch.Tensor, group: Group) -> torch.Tensor:
    """Return how many rows of each expert come to this rank from each of the group, and go there: int64
    [2, ranks, E / ranks] on the host, from ``counts`` int64 [E] of what it has. Collective; the host waits for it."""
    if group is None:
        mine = counts.cpu().unsqueeze(0)
        return torch.stack((mine, mine))
    incoming = torch.empty_like(counts)
    dist.all_to_all_single(incoming, counts, group=group)
    return torch.stack((incoming, counts)).view(2, dist.get_world_size(group), -1).cpu()


def plan_exchange(
    rows: torch.Tensor, counts: torch.Tensor, group: Group, provider: RowExchange | None = None, most: int = 0
) -> Exchange:
    """Return the exchange of rows sorted by expert: ``rows`` of :func:`announced_rows`, ``counts`` int64 [E] of each
    expert on the device.

    ``provider`` makes what moves the rows, of which no rank sends more than ``most``; None: torch's all-to-all.
    """
    theirs, ours = rows.tolist()
    if group is None:
        (mine,) = theirs
        return Exchange(None, (sum(mine),), (sum(mine),), tuple(mine))
    incoming = to_device_async(rows[0].flatten(), counts.device)
    here = [sum(rank[expert] for rank in theirs) for expert in range(len(theirs[0]))]
    labels = torch.arange(len(here), device=counts.device).repeat(len(theirs))
    expert = torch.repeat_interleave(labels, incoming, output_size=sum(here))
    order = expert.argsort(stable=True)
    back = torch.empty_like(order)
    back[order] = torch.arange(len(order), device=order.device)
    exchange = Exchange(
        group, tuple(map(sum, ours)), tuple(map(sum, theirs)), tuple(here), order, back
    )
    sent, received = exchange.sent, exchange.received
    if provider is None:
        return replace(exchange, transport=_AllToAll(group, sent, received))
    manifest = Manifest(group, dist.get_rank(group), sent, received, counts, most)
    return replace(exchange, transport=provider(manifest))


class _AllToAll:
    """Rows moved by torch.distributed, in the order of their ranks and as they were sent (``RowTransport``)."""

    def __init__(self, group: Group, sent: tuple[int, ...], received: tuple[int, ...]) -> None:
        self.group, self.sent, self.received = group, sent, received

    def start(self, rows: torch.Tensor, *, to_experts: bool) -> Arriving:
        out, into = (self.sent, self.received) if to_experts else (self.received, self.sent)
        target = rows.new_empty((sum(into), rows.shape[1]))
        work = dist.all_to_all_single(target, rows, list(into), list(out), group=self.group, async_op=True)
        moving = in_flight(work, "exchange of rows", reads=[rows], writes=[target], queue="experts")

        def wait() -> torch.Tensor:
            moving.wait()
            return target

        return Arriving(target, wait)

    def arranged(self) -> torch.Tensor | None:
        return None


class _Transfer:
    """One exchange of rows under way: from this rank's tokens to experts, or with ``home`` back."""

    def __init__(self, exchange: Exchange, *, home: bool = False) -> None:
        self.exchange, self.home = exchange, home
        self._arriving: Arriving | None = None
        self._rows = torch.empty(0)

    def start(self, rows: torch.Tensor, *, forward: bool) -> torch.Tensor:
        """Start to exchange ``rows``; return the memory for those that come, undefined until :meth:`wait`."""
        assert self.exchange.transport is not None
        self._rows = rows.contiguous()  # lives until it has been read
        self._arriving = self.exchange.transport.start(self._rows, to_experts=forward != self.home)
        return self._arriving.memory

    def wait(self) -> torch.Tensor:
        """Wait for the rows (on a GPU the stream does) and return them."""
        assert self._arriving is not None
        self.exchange.meanwhile()
        out = self._arriving.wait()
        self._arriving, self._rows = None, torch.empty(0)
        return out


class _Sending(FirstOrderFunction):
    """Starts the exchange of rows, which :class:`_Arrived` ends. What is computed in between overlaps with it, and its
    backward pass with the way back: the gradient that ``_Arrived`` returns is on its way until this backward pass."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, transfer: _Transfer) -> torch.Tensor:
        ctx.transfer = transfer
        transfer.start(rows, forward=True)
        return rows.view_as(rows)

    @staticmethod
    @first_order
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return ctx.transfer.wait(), None


class _Arrived(FirstOrderFunction):
    @staticmethod
    def forward(ctx: Any, sent: torch.Tensor, transfer: _Transfer) -> torch.Tensor:
        ctx.transfer = transfer
        return transfer.wait()

    @staticmethod
    @first_order
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return ctx.transfer.start(grad, forward=False), None


class Dispatched:
    """Rows on their way to the ranks of their experts."""

    def __init__(self, rows: torch.Tensor, exchange: Exchange) -> None:
        self.exchange, self._transfer, self._rows = exchange, None, rows
        if exchange.group is not None:
            self._transfer = _Transfer(exchange)
            self._rows = _Sending.apply(rows, self._transfer)

    def arrive(self) -> tuple[torch.Tensor, Exchange]:
        """Return the rows that this rank's experts compute with, sorted by expert, and the exchange of the results."""
        if self._transfer is None:
            return self._rows, self.exchange
        rows = _Arrived.apply(self._rows, self._transfer)
        exchange = self.exchange.arranged()
        assert exchange.order is not None and exchange.back is not None
        return _reordered(rows, exchange.order, exchange.back), exchange


def send_home(rows: torch.Tensor, exchange: Exchange) -> torch.Tensor:
    """Return the results of the experts, sorted by expert as they were computed, to the ranks of their tokens."""
    if exchange.group is None:
        return rows
    assert exchange.order is not None and exchange.back is not None
    transfer = _Transfer(exchange, home=True)
    out: torch.Tensor = _Arrived.apply(
        _Sending.apply(_reordered(rows, exchange.back, exchange.order), transfer), transfer
    )
    return out


class _Reordered(FirstOrderFunction):
    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, order: torch.Tensor, back: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(back)
        return rows.index_select(0, order)

    @staticmethod
    @first_order
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        (back,) = ctx.saved_tensors
        return grad.index_select(0, back), None, None


def _reordered(rows: torch.Tensor, order: torch.Tensor, back: torch.Tensor) -> torch.Tensor:
    out: torch.Tensor = _Reordered.apply(rows, order, back)
    return out


# -- products with many matrices ---------------------------------------------------------------------------------------


def _runs(rows: torch.Tensor, counts: Sequence[int]) -> tuple[torch.Tensor, ...]:
    out: tuple[torch.Tensor, ...] = rows.split(list(counts))
    return out


def _ends(counts: Sequence[int], device: torch.device) -> torch.Tensor:
    """int32 [E]: where each expert's rows end."""
    return to_device_async(torch.tensor(counts, dtype=torch.int32).cumsum(0, dtype=torch.int32), device)


def _grouped(rows: torch.Tensor, matrices: torch.Tensor, counts: Sequence[int], ends: torch.Tensor) -> torch.Tensor:
    """Return the rows [n, k] of each expert times its matrix of [E, k, m]: [n, m]."""
    if _in_one_launch(rows, matrices):
        grouped: torch.Tensor = F.grouped_mm(rows, matrices, offs=ends)
        return grouped
    out = rows.new_empty(rows.shape[0], matrices.shape[2])
    for part, matrix, result, count in zip(_runs(rows, counts), matrices, _runs(out, counts), counts):
        if count:
            torch.mm(part, matrix, out=result)
    return out


def _in_one_launch(rows: torch.Tensor, matrices: torch.Tensor) -> bool:
    """Return whether torch's ``grouped_mm`` is one kernel for these. Where it is not (GPUs but sm_90 and sm_100,
    fp16 and fp32), it multiplies expert by expert as well, and makes the host wait for the numbers of rows."""
    aligned = rows.shape[1] * rows.itemsize % 16 == 0 and matrices.shape[2] * rows.itemsize % 16 == 0
    if rows.dtype == torch.float64 or not aligned:  # which it does not take
        return False
    if not rows.is_cuda:
        return True
    kernel = not torch.version.hip and torch.cuda.get_device_capability(rows.device)[0] in (9, 10)
    return bool(kernel) and rows.dtype == torch.bfloat16


def _add_grouped(
    main_grad: torch.Tensor, grad: torch.Tensor, rows: torch.Tensor, counts: Sequence[int], experts: int, *,
    first: bool = False,
) -> None:
    """Add each expert's gradient, gradᵀ rows of its rows, to its part of ``main_grad`` [E * out, in]; ``first``: write
    them over it."""
    sums = main_grad.view(experts, -1, main_grad.shape[1])
    for total, g, x, count in zip(sums, _runs(grad, counts), _runs(rows, counts), counts):
        if count:
            add_product(total, g, x, first=first)
        elif first:
            total.zero_()


def _add_rows(main_grad: torch.Tensor, grad: torch.Tensor, counts: Sequence[int], experts: int) -> None:
    """Add the sum of each expert's rows to its part of ``main_grad``, a bias's, without rounding it first."""
    for total, part, count in zip(main_grad.view(experts, -1), _runs(grad, counts), counts):
        if count:
            total.add_(part.sum(0, dtype=total.dtype))


def _gradient(
    parameter: torch.Tensor, add_to: Callable[..., None], *operands: Any, overwrites: bool = False
) -> torch.Tensor | None:
    """Let ``add_to`` add a gradient to the parameter's sum; return it where it has none."""
    accumulator: WgradAccumulator | None = getattr(parameter, "wgrad_accumulator", None)
    if accumulator is None:
        out = torch.zeros_like(parameter)
        add_to(out.flatten(0, -2), *operands)
        return out
    accumulator.add(parameter, add_to, *operands, overwrites=overwrites)
    return None


class _GroupedLinear(FirstOrderFunction):
    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, counts: tuple[int, ...]
    ) -> torch.Tensor:
        ends = _ends(counts, rows.device)
        ctx.save_for_backward(rows if ctx.needs_input_grad[1] else None, weight, ends)
        ctx.weight, ctx.bias, ctx.counts = weight, bias, counts
        out = _grouped(rows, weight.flatten(1, -2).transpose(1, 2), counts, ends)
        if bias is None:
            return out
        of_row = torch.repeat_interleave(to_device_async(torch.tensor(counts), rows.device), output_size=len(rows))
        return out.add_(bias.flatten(1).index_select(0, of_row))

    @staticmethod
    @first_order
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        rows, weight, ends = ctx.saved_tensors
        grad, counts, needs = grad.contiguous(), ctx.counts, ctx.needs_input_grad
        dx = _grouped(grad, weight.flatten(1, -2), counts, ends) if needs[0] else None
        experts = weight.shape[0]
        dw = None if rows is None else _gradient(
            ctx.weight, _add_grouped, grad, rows.detach(), counts, experts, overwrites=True
        )
        db = _gradient(ctx.bias, _add_rows, grad, counts, experts) if needs[2] else None
        return dx, dw, db, None


def grouped_linear(
    rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, counts: tuple[int, ...]
) -> torch.Tensor:
    """Return x Wᵀ + b with each row's expert's matrix: rows [n, in] sorted by expert, weight [E, ..., in] whose middle
    dimensions are the outputs, bias [E, ...] → [n, out].

    ``counts``: rows of each expert, on the host. Gradients go to the parameters' ``wgrad_accumulator`` where they have
    one (``layers.linear``), each expert's in the dtype of the sum: rows of all ranks' tokens come together here.
    """
    out: torch.Tensor = _GroupedLinear.apply(rows, weight, bias, counts)
    return out


# Providers of a layer of experts: the router and the moving of rows, in torch ops or own kernels.
#
# None of them has a gradient; the layer's autograd functions put them together (``experts.experts``).

class ExpertOps(Protocol):
    """Rows x, y [.., h] of any dtype; indices int64; logits, scores and weights float32, float64 with float64 rows.

    ``experts.torch_ops`` says what is computed. Rows have the same bits from every
    provider.
    """

    def gather_rows(self, x: Tensor, source: Tensor) -> Tensor:
        """Return [rows, h] with row r = x[source[r]]. Its gradient is ``sum_rows`` without weights."""

    def sum_rows(self, y: Tensor, place: Tensor, weight: Tensor | None) -> Tensor:
        """Return [tokens, h], of each token the sum of weight[t, j] · y[place[t, j]]; -1 is left out."""

    def sum_rows_backward(self, grad: Tensor, y: Tensor, place: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        """Return (dy [rows, h], dweight [tokens, k]); ``place`` names each row once."""

    def route(self, logits: Tensor, bias: Tensor | None, routing: Routing, given: Tensor | None = None) -> Routed:
        """Return where tokens go: to the best experts by score + bias, or to ``given`` ones int64 [tokens, k]."""

    def route_backward(
        self, scores: Tensor, experts: Tensor, dweights: Tensor | None, dscores: Tensor | None, routing: Routing
    ) -> Tensor:
        """Return the logits' gradient from those of the weights and of the scores."""


class TorchExperts:
    """Router and rows in torch ops."""

    gather_rows = staticmethod(expert_rows.gather_rows)
    sum_rows = staticmethod(expert_rows.sum_rows)
    sum_rows_backward = staticmethod(expert_rows.sum_rows_backward)
    route = staticmethod(router.route)
    route_backward = staticmethod(router.route_backward)


torch_experts: ExpertOps = TorchExperts()


# Copies of tokens in the order of their experts, and the sums of what comes back, with their gradients.
#
# ``source`` int64 [rows] says which token each row is a copy of, ``place`` int64 [tokens, k] where each token's copies
# are (-1: left out, because an expert was full). ``experts.torch_ops`` says what is computed.

class _Copies(FirstOrderFunction):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, source: torch.Tensor, place: torch.Tensor, ops: ExpertOps) -> torch.Tensor:
        ctx.save_for_backward(place)
        ctx.ops = ops
        return ops.gather_rows(x, source)

    @staticmethod
    @first_order
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        (place,) = ctx.saved_tensors
        return ctx.ops.sum_rows(grad.contiguous(), place, None), None, None, None


class _Combined(FirstOrderFunction):
    @staticmethod
    def forward(ctx: Any, y: torch.Tensor, place: torch.Tensor, weight: torch.Tensor, ops: ExpertOps) -> torch.Tensor:
        ctx.save_for_backward(y, place, weight)
        ctx.ops = ops
        return ops.sum_rows(y, place, weight)

    @staticmethod
    @first_order
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        y, place, weight = ctx.saved_tensors
        dy, dweight = ctx.ops.sum_rows_backward(grad.contiguous(), y, place, weight)
        return dy, None, dweight, None


def copies(x: torch.Tensor, source: torch.Tensor, place: torch.Tensor, ops: ExpertOps) -> torch.Tensor:
    """Return the rows [rows, h] of tokens ``x`` [tokens, h]; the gradient sums over each token's ``place``."""
    out: torch.Tensor = _Copies.apply(x, source, place, ops)
    return out


def combined(y: torch.Tensor, place: torch.Tensor, weight: torch.Tensor, ops: ExpertOps) -> torch.Tensor:
    """Return of each token [tokens, h] the sum of its rows of ``y`` [rows, h] times ``weight`` [tokens, k], added in
    the order of k in float32 or wider."""
    out: torch.Tensor = _Combined.apply(y, place, weight, ops)
    return out
