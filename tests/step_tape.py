"""Recording and replay of a step on a CPU, with a CUDA graph's meaning: what is not read from memory does not change.

Every operation below autograd is written down with its tensors. A replay calls them again on the same memory and copies
results to where they were; the program does not run. So a number, a mask or a micro-batch that the program hands over
by value stays that of the recorded step, as on a GPU. What a graph cannot hold, a number read by the host, is an error.
Collectives are waited for at once, so transfers between stages, whose ends may each wait for the other, are not for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatron_port.ext.kernels.step_graphs import CapturedGraph

Result = TypeVar("Result")


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    yield from (leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor))


class Tape(TorchDispatchMode):
    """The operations of a program, and the memory that they changed as it was before."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, tuple[Any, ...], dict[str, Any], Any]] = []
        self.paused = False
        self._before: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten._local_scalar_dense.default:
            raise AssertionError("the host reads a number of the device while its work is recorded")
        named = dict(zip((a.name for a in func._schema.arguments), args)) | kwargs
        for argument in func._schema.arguments:
            if argument.alias_info is not None and argument.alias_info.is_write:
                for tensor in _tensors(named.get(argument.name)):
                    storage = tensor.untyped_storage()
                    self._before.setdefault(storage.data_ptr(), (storage, storage.clone()))
        out = func(*args, **kwargs)
        if self.paused:
            return out
        self.calls.append((func, args, kwargs, out))
        return out

    def restore(self) -> None:
        """Undo what the recorded operations changed: to record is not to do."""
        for storage, before in self._before.values():
            storage.copy_(before)

    @torch.no_grad()
    def replay(self) -> None:
        """Do the operations on the memory of the recorded ones."""
        with torch._C._AutoDispatchBelowAutograd():
            for func, args, kwargs, out in self.calls:
                returns = func._schema.returns
                writes = any(a.alias_info is not None and a.alias_info.is_write for a in func._schema.arguments)
                if returns and all(r.alias_info is not None for r in returns) and not writes:
                    continue  # a view
                again = func(*args, **kwargs)
                for leaf in tree_leaves(again):
                    if not isinstance(leaf, torch.Tensor) and hasattr(leaf, "wait"):
                        leaf.wait()
                for mine, new in zip(_tensors(out), _tensors(again)):
                    if mine.numel() and mine.data_ptr() != new.data_ptr():
                        mine.copy_(new)


@contextmanager
def _collectives_apart(tape: Tape) -> Iterator[None]:
    """Do not record what gloo does with buffers of its own while a collective is waited for."""
    wait = dist.Work.wait

    def unseen(work: dist.Work, *arguments: Any) -> Any:
        tape.paused = True
        try:
            return wait(work, *arguments)
        finally:
            tape.paused = False

    dist.Work.wait = unseen  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        dist.Work.wait = wait  # type: ignore[method-assign]


class TapeCapturer:
    """``kernels.step_graphs.GraphCapturer`` by a :class:`Tape`. ``captured``: functions so far; ``nodes``: the
    operations of each."""

    def __init__(self) -> None:
        self.captured = 0
        self.nodes: list[int] = []

    def run(self, function: Callable[[], Result]) -> Result:
        return function()

    def capture(self, function: Callable[[], Result]) -> CapturedGraph[Result]:
        self.captured += 1
        with _collectives_apart(tape := Tape()), tape:
            result = function()
        tape.restore()
        self.nodes.append(len(tape.calls))
        return CapturedGraph(result, tape.replay)
