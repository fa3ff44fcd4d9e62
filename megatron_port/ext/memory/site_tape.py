"""Recompute, swap and partition of single activations: after a forward pass autograd holds, in place of a tensor that
is dropped, the operation that makes it again, or the place from which it comes back.

A layer runs its operations through :meth:`SiteTape.run`, each under the name of its site
(``memory.sites``). What autograd saves is told apart by its memory: the result of an earlier operation
belongs to that one's site, anything else but a parameter to the operation itself. When the backward pass asks for
something of a dropped site, its operation runs once more, on arguments that are kept or are made again in the same way;
all that it saved is then there until it has been asked for. So each dropped site costs one forward pass of its
operation, whatever else is dropped.

What is swapped or partitioned (``memory.site_tape``) is parked when the layer's forward pass ends, the memory of
each result and of all else that the operation saved, and comes back when the first of it is asked for.

``torch.utils.checkpoint`` (``memory.recompute``) keeps the arguments of what it runs again, and its last results are
saved by whatever follows; here both may be dropped.
"""

from __future__ import annotations

import math
import statistics
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from megatron_port.core.dist.collectives import all_gather_single
from megatron_port.core.engine.native_passes import PassWatch
from megatron_port.core.layers.step import StepSlot
from megatron_port.core.model.ops import Site
from megatron_port.core.model.rotary import is_of_all_layers
from megatron_port.core.pipeline.schedules import Action, Kind
from megatron_port.ext.memory.sites import Decision, LayerActivations
from megatron_port.ext.memory.swap import SwappedLayer, SwapSpace

# Seconds and bytes of sites and passes, measured while a run trains.
#
# On a GPU the times are those of events, which are read when a step has ended; nothing waits for the device meanwhile.

class SiteClock(PassWatch):
    """Times and sizes on one rank. ``device``: where the operations run."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu, self._pending = device.type == "cuda", list[tuple[str, Any, Any]]()
        self._seconds: dict[str, list[float]] = {}
        self.sizes: dict[str, float] = {}
        """Site → most bytes that one layer saved of it in a micro-batch."""

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Time what runs in the context under a name."""
        if self._on_gpu:
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            yield
            end.record()
            self._pending.append((name, start, end))
        else:
            started = time.perf_counter()
            yield
            self._seconds.setdefault(name, []).append(time.perf_counter() - started)

    def forward(self, action: Action, stage: int) -> AbstractContextManager[None]:
        """Time a chunk's forward pass."""
        return self.timed(f"forward {action.chunk}")

    def backward_pass(self, action: Action) -> AbstractContextManager[None]:
        """Time a chunk's backward pass; where it is made in two parts, each by itself."""
        kind = "weights" if action.kind is Kind.WEIGHT else "backward"
        return self.timed(f"{kind} {action.chunk}")

    def saw(self, sizes: Mapping[str, float]) -> None:
        """Note the bytes that one layer saved of each site in one forward pass."""
        for site, size in sizes.items():
            self.sizes[site] = max(self.sizes.get(site, 0.0), size)

    def end_step(self) -> None:
        """Read the events of a step that has ended."""
        for name, start, end in self._pending:
            end.synchronize()
            self._seconds.setdefault(name, []).append(start.elapsed_time(end) / 1e3)
        self._pending.clear()

    def seconds(self, name: str) -> float:
        """Return the median of what a name took; 0 where it never ran."""
        return statistics.median(self._seconds.get(name, [0.0]))


# Where activations wait that are neither kept nor computed again: in host memory, or a part on each of several ranks.
#
# What is moved is memory, not tensors: several views of the same are moved once, and come back together when the
# first of them is asked for.

SMALL = 256
"""Bytes of memory that is not worth moving."""


class Parked(Protocol):
    """Flat bytes that are elsewhere."""

    def take(self) -> torch.Tensor:
        """Bring them back, once."""


class _Swapped:
    """One tensor of what a layer swapped."""

    def __init__(self, layer: SwappedLayer, number: int) -> None:
        self._layer, self._number = layer, number

    def take(self) -> torch.Tensor:
        return self._layer.take(self._number)


class _Memory:
    """Parked memory, and the views of it that have not been asked for."""

    def __init__(self, parked: Parked) -> None:
        self._parked, self.users = parked, 0
        self._flat: torch.Tensor | None = None

    def take(self) -> torch.UntypedStorage:
        if self._flat is None:
            self._flat = self._parked.take()
        storage = self._flat.untyped_storage()
        self.users -= 1
        if self.users == 0:
            self._flat = None
        return storage


class ParkedTensor:
    """A tensor in parked memory."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._dtype, self._view = tensor.dtype, (tensor.storage_offset(), tensor.shape, tensor.stride())
        self._memory: _Memory | None = None

    def lies_in(self, memory: _Memory) -> None:
        """Note where it is."""
        self._memory = memory
        memory.users += 1

    def take(self) -> torch.Tensor:
        """Return it, once."""
        assert self._memory is not None
        storage, self._memory = self._memory.take(), None
        return torch.empty(0, dtype=self._dtype, device=storage.device).set_(storage, *self._view)


class Lot:
    """Tensors that are to be parked together."""

    def __init__(self) -> None:
        self._found: dict[int, tuple[torch.Tensor, list[ParkedTensor]]] = {}

    def add(self, tensor: torch.Tensor) -> ParkedTensor | None:
        """Note a tensor; None: it is too small to be moved."""
        storage = tensor.untyped_storage()
        if storage.nbytes() < SMALL:
            return None
        flat = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
        parked = ParkedTensor(tensor)
        self._found.setdefault(storage.data_ptr(), (flat, []))[1].append(parked)
        return parked

    def park(self, places: ParkingPlaces, decision: Decision, layer: int) -> None:
        """Offload all tensors; the caller must drop its references."""
        if self._found:
            parked = places.park(decision, layer, [flat for flat, _ in self._found.values()])
            for place, (_, tensors) in zip(parked, self._found.values()):
                memory = _Memory(place)
                for tensor in tensors:
                    tensor.lies_in(memory)
        self._found.clear()


class ParkingPlaces:
    """Where a rank's activations may wait, and who measures them.

    Args:
        swap: None: nothing is swapped.
        group: ranks that hold alike what is partitioned; None: this one is alone, or nothing is alike, and it is kept.
    """

    def __init__(self, swap: SwapSpace | None = None, group: dist.ProcessGroup | None = None) -> None:
        self.swap, self.group = swap, group
        self.clock: SiteClock | None = None
        """Measures the sites of all layers that park here, as long as it is set."""

    def has(self, decision: Decision) -> bool:
        """Return whether there is a place for what is so decided."""
        return (self.swap if decision == "swap" else self.group if decision == "partition" else None) is not None

    def tape(self, activations: LayerActivations, step: StepSlot, source: torch.Tensor) -> SiteTape:
        """Return the tape of one forward pass of a layer that parks here."""
        return SiteTape(activations, step, source, self)

    def park(self, decision: Decision, layer: int, flats: Sequence[torch.Tensor]) -> list[Parked]:
        """Park flat bytes of a layer, given by its number in the model."""
        if decision == "swap":
            assert self.swap is not None
            swapped = self.swap.swap(layer, flats)
            return [_Swapped(swapped, number) for number in range(len(flats))]
        assert self.group is not None
        return [PartitionedBytes(flat, self.group) for flat in flats]


def parking_places(device: torch.device, group: dist.ProcessGroup | None) -> ParkingPlaces:
    """Return the places of a rank on ``device``; ``group``: as :class:`ParkingPlaces` takes it."""
    return ParkingPlaces(SwapSpace(device), group)


Function = Callable[..., torch.Tensor | tuple[torch.Tensor, ...]]
Tensors = tuple[torch.Tensor, ...]
Made = tuple[Site, Function, Tensors]
"""Site of a result, and the function and arguments that make it by itself."""


class _Result:
    """A result of a dropped operation that autograd saved, as the same view of its memory."""

    def __init__(self, operation: _Operation, index: int, tensor: torch.Tensor) -> None:
        self.operation, self.index = operation, index
        self.view = tensor.shape, tensor.stride(), tensor.storage_offset()
        operation.waiting[index] += 1

    def take(self) -> torch.Tensor:
        """Return the tensor; its memory is given up when everything that saved it has asked."""
        operation, whole = self.operation, self.operation.result(self.index)
        operation.waiting[self.index] -= 1
        if operation.waiting[self.index] == 0 and self.index not in operation.wanted:
            operation.results.pop(self.index, None)
        return whole.as_strided(*self.view)


class _Saved:
    """A tensor that an operation saved beside its arguments; ``number``: in the order of saving."""

    def __init__(self, tensor: torch.Tensor, number: int) -> None:
        self.tensor: torch.Tensor | None = tensor
        self.number = number
        self.made_by: _Result | _Operation | None = None

    def take(self) -> torch.Tensor:
        """Return the tensor, made again where it was dropped."""
        if self.tensor is not None:
            return self.tensor
        assert self.made_by is not None
        return self.made_by.take() if isinstance(self.made_by, _Result) else self.made_by.saved_again(self.number)


class _Operation:
    """One operation of a forward pass: how to run it again, and what of it is there."""

    def __init__(
        self, function: Function, arguments: tuple[tuple[_Operation, int], ...], needs_grad: tuple[bool, ...],
        step: StepSlot, decision: Decision, site: Site, clock: SiteClock | None,
    ) -> None:
        self.site, self.clock = site, clock
        self.function, self.arguments, self.needs_grad = function, arguments, needs_grad
        self.step, self.state = step, step.state()
        self.decision, self.dropped = decision, decision != "keep"
        self.results: dict[int, torch.Tensor] = {}
        """Results that are here, detached: those that are kept, and dropped ones that the backward pass waits for."""
        self.waiting: list[int] = []
        """How often each result is saved and has not been asked for."""
        self.internal: set[int] = set()
        """Numbers, in the order of saving, of the tensors that only this operation has; ``again``: those made again."""
        self.again: dict[int, torch.Tensor] = {}
        self.wanted: set[int] = set()
        """Results of a parked operation that others take when they run again."""
        self.parked: dict[tuple[str, int], ParkedTensor] = {}
        """Results ("result", index) and what the operation saved beside ("saved", number)."""

    @property
    def drops_inside(self) -> bool:
        """Whether what it saves beside results goes too. A row-parallel product may save a copy of its input (8 bits,
        another order in memory), which tensor-parallel ranks do not hold alike: that is not partitioned."""
        return self.dropped and (self.decision != "partition" or self.site in ("norm1", "norm2"))

    def result(self, index: int) -> torch.Tensor:
        """Return a result, made again or brought back if need be."""
        found = self.results.get(index)
        if found is None and self.decision != "recompute":
            found = self.results[index] = self.parked.pop(("result", index)).take()
        return self._run_again()[index] if found is None else found

    def saved_again(self, number: int) -> torch.Tensor:
        """Return a tensor that the operation saved, made again or brought back; it is given out once."""
        if number not in self.again:
            if self.decision != "recompute":
                return self.parked.pop(("saved", number)).take()
            self._run_again()
        return self.again.pop(number)

    def park(self, lot: Lot) -> None:
        """Hand over what the backward pass will ask for, and let go of everything."""
        for index, tensor in list(self.results.items()):
            asked_for = bool(self.waiting[index]) or index in self.wanted
            parked = lot.add(tensor) if asked_for else None
            if parked is not None:
                self.parked["result", index] = parked
            if parked is not None or not asked_for:
                del self.results[index]
        for number, tensor in list(self.again.items()):
            parked = lot.add(tensor)
            if parked is not None:
                self.parked["saved", number] = parked
                del self.again[number]

    def _run_again(self) -> tuple[torch.Tensor, ...]:
        """Run the operation on the micro-batch of its forward pass; note what the backward pass still waits for."""
        arguments = [
            operation.result(index).detach().requires_grad_(needs)
            for (operation, index), needs in zip(self.arguments, self.needs_grad)
        ]
        count = 0

        def collect(tensor: torch.Tensor) -> None:
            nonlocal count
            if count in self.internal:
                self.again[count] = tensor.detach()
            count += 1

        with self.step.use(self.state.again()), torch.set_grad_enabled(bool(self.internal)), \
                saved_tensors_hooks(collect, _never), \
                nullcontext() if self.clock is None else self.clock.timed(self.site):
            results = tuple(tensor.detach() for tensor in _as_tuple(self.function(*arguments)))
        self.results |= {i: tensor for i, tensor in enumerate(results) if self.waiting[i]}
        return results


class SiteTape:
    """The operations of one forward pass of a layer.

    Args:
        activations: decisions for the layer's sites.
        step: the model's slot; an operation that runs again sees the micro-batch of its forward pass.
        source: the layer's input.
        places: where activations are parked; what has no place is kept.
    """

    def __init__(
        self, activations: LayerActivations, step: StepSlot, source: torch.Tensor,
        places: ParkingPlaces | None = None,
    ) -> None:
        self._step, self._places = step, places or ParkingPlaces()
        self._decisions = {
            site: decision for site, decision in activations.decisions.items()
            if decision == "recompute" or self._places.has(decision)
        }
        if source.is_leaf:  # it came from another stage, and whoever received it holds it for its gradient
            self._decisions.pop("input", None)
        self._to_park: dict[Decision, list[_Operation]] = {"swap": [], "partition": []}
        self._sizes: dict[tuple[Site, int], int] = {}
        self._owners: dict[StorageWeakRef, tuple[_Operation, int]] = {}
        self._made: list[tuple[weakref.ref[torch.Tensor], _Operation, int]] = []
        self._adopt(self._operation("input", _never, ()), (source,))

    def run(self, site: Site, function: Function, *inputs: torch.Tensor) -> Any:
        """Return ``function(*inputs)``; keep or drop what autograd saves of it, as is decided for the site.

        ``inputs``: results of earlier operations, or the layer's input.
        """
        operation = self._operation(site, function, inputs)
        out, saved = self._record(function, inputs)
        self._adopt(operation, _as_tuple(out))
        self._settle(saved, operation)
        return out

    def run_fused(self, function: Function, inputs: Tensors, made_by: Callable[..., Sequence[Made | None]]) -> Tensors:
        """Return ``function(*inputs)``, whose results belong to several sites and are the same bits one by one.

        ``made_by(*results)``: how each result is made by itself, of earlier ones; None: it is the memory of an earlier
        result. What the function saves beside results is kept.
        """
        out, saved = self._record(function, inputs)
        results = _as_tuple(out)
        # A result is noted before the arguments of the next are looked up, which may be it.
        for number, tensor in enumerate(results):
            made = made_by(*results)[number]
            if made is None:
                self._made.append((weakref.ref(tensor), *self._owners[StorageWeakRef(tensor.untyped_storage())]))
                continue
            site, again, arguments = made
            self._adopt(self._operation(site, again, arguments), (tensor,))
        self._settle(saved, None)
        return results

    def park(self, layer: int) -> None:
        """Park what is swapped and partitioned, at the end of the forward pass of a layer, by its number."""
        for decision, operations in self._to_park.items():
            lot = Lot()
            for operation in operations:
                operation.park(lot)
            lot.park(self._places, decision, layer)
        if self._places.clock is not None:
            sizes: dict[str, float] = {}
            for (site, _), size in self._sizes.items():
                sizes[site] = sizes.get(site, 0.0) + size
            self._places.clock.saw(sizes)

    def close(self) -> None:
        """Forget the results at the end of the forward pass: autograd holds the hooks, and so this tape, for longer."""
        self._owners.clear()
        self._made.clear()
        self._to_park.clear()

    def _operation(self, site: Site, function: Function, inputs: Tensors) -> _Operation:
        decision = self._decisions.get(site, "keep")
        if decision != "recompute":  # never runs again, so it does not hold its arguments
            operation = _Operation(_never, (), (), self._step, decision, site, self._places.clock)
            if operation.dropped:
                self._to_park[decision].append(operation)
            return operation
        arguments = tuple(self._find(tensor) for tensor in inputs)
        for (argument, index), tensor in zip(arguments, inputs):
            if argument.decision != "recompute":
                argument.wanted.add(index)
                argument.results[index] = tensor.detach()
        needs_grad = tuple(tensor.requires_grad for tensor in inputs)
        return _Operation(
            function, arguments, needs_grad, self._step, decision, site, self._places.clock
        )

    def _record(self, function: Function, inputs: Tensors) -> tuple[Any, list[_Saved]]:
        """Run a function; return its result, and what it saved that no earlier operation has."""
        saved: list[_Saved] = []
        count = 0

        def pack(tensor: torch.Tensor) -> Any:
            nonlocal count
            count += 1
            if isinstance(tensor, nn.Parameter) or isinstance(tensor._base, nn.Parameter):
                return tensor
            operation, index = self._owner(tensor)
            if operation is not None:
                self._saw(operation, tensor)
                return _Result(operation, index, tensor) if operation.dropped else tensor
            saved.append(_Saved(tensor, count - 1))
            return saved[-1]

        with saved_tensors_hooks(pack, _take):
            return function(*inputs), saved

    def _adopt(self, operation: _Operation, results: Tensors) -> None:
        """Note the results of an operation and whose memory they are."""
        operation.waiting = [0] * len(results)
        for index, tensor in enumerate(results):
            self._made.append((weakref.ref(tensor), operation, index))
            self._owners.setdefault(StorageWeakRef(tensor.untyped_storage()), (operation, index))
            if operation.decision in ("swap", "partition"):
                operation.results[index] = tensor.detach()

    def _settle(self, saved: list[_Saved], operation: _Operation | None) -> None:
        """Drop what was saved before it was known whose memory it is; ``operation``: of what is no result."""
        for one in saved:
            assert one.tensor is not None
            owner, index = self._owner(one.tensor)
            self._saw(owner or operation, one.tensor)
            if owner is not None and owner.dropped:
                one.made_by, one.tensor = _Result(owner, index, one.tensor), None
            elif owner is None and operation is not None and operation.drops_inside \
                    and not is_of_all_layers(one.tensor):
                operation.internal.add(one.number)
                if operation.decision != "recompute":
                    operation.again[one.number] = one.tensor.detach()
                one.made_by, one.tensor = operation, None
        saved.clear()  # autograd's hooks hold the list until the last of them has been asked for

    def _saw(self, operation: _Operation | None, tensor: torch.Tensor) -> None:
        """Note the bytes that autograd saved of an operation's site, where someone measures."""
        if self._places.clock is not None and operation is not None and not is_of_all_layers(tensor):
            storage = tensor.untyped_storage()
            self._sizes[operation.site, storage.data_ptr()] = storage.nbytes()

    def _find(self, tensor: torch.Tensor) -> tuple[_Operation, int]:
        """Return the operation that made a tensor, and which of its results that is."""
        for made, operation, index in self._made:
            if made() is tensor:
                return operation, index
        raise ValueError("an operation of a layer has an argument that no operation before it returned")

    def _owner(self, tensor: torch.Tensor) -> tuple[_Operation | None, int]:
        """Return the operation, and the index of its result, whose memory a tensor is in."""
        return self._owners.get(StorageWeakRef(tensor.untyped_storage()), (None, 0))


def _as_tuple(out: torch.Tensor | tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    return (out,) if isinstance(out, torch.Tensor) else out


def _take(saved: Any) -> torch.Tensor:
    """Return what autograd asks for: a tensor that was kept, or one that is made again."""
    tensor: torch.Tensor = saved if isinstance(saved, torch.Tensor) else saved.take()
    return tensor


def _never(*arguments: Any) -> Any:
    raise RuntimeError("the layer's input is not computed, and a pass that runs again has no backward pass of its own")


# Tensors that all ranks of a group hold alike, of which each keeps its part for a while (ZeRO-R's P_a).
#
# Rajbhandari et al., arXiv 1910.02054, section 6.1.

class PartitionedBytes:
    """This rank's part of ``whole``, flat bytes that are the same on every rank of the group."""

    def __init__(self, whole: torch.Tensor, group: dist.ProcessGroup) -> None:
        self._group, self._numel, ranks = group, whole.numel(), dist.get_world_size(group)
        each = -(-whole.numel() // ranks)
        start = dist.get_rank(group) * each
        self._part: torch.Tensor | None = whole.new_zeros(each)
        mine = whole[start : start + each]
        self._part[: mine.numel()] = mine

    def take(self) -> torch.Tensor:
        """Return the whole, once. Collective over the group, whose ranks ask in the same order."""
        part, self._part = self._part, None
        assert part is not None
        whole = part.new_empty(part.numel() * dist.get_world_size(self._group))
        all_gather_single(whole, part, group=self._group)
        return whole[: self._numel]


def measured_gather(device: torch.device, nbytes: int, group: dist.ProcessGroup, times: int = 3) -> float:
    """Return the seconds per byte of what the ranks of a group gather, at its fastest. Collective."""
    best = math.inf
    for _ in range(times):
        share = PartitionedBytes(torch.zeros(nbytes, dtype=torch.uint8, device=device), group)
        started = time.perf_counter()
        share.take()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        best = min(best, time.perf_counter() - started)
    return best / nbytes
