"""Torch's own operators on the ghost machine, computed.

Torch launches its kernels as on a GPU, and they do nothing. This mode lets each operator allocate and launch, then
computes the same operator with torch's CPU kernels on the same memory, by the same sizes and strides. What it leaves
alone is what the project must have right by itself: products (cuBLAS is given pointers, sizes, strides and types and
computes by those), copies, collectives, the own kernels (which run on their launch's arguments), streams and events. A
product that needs torch's kernels besides (a bias that is first copied into the result) is computed like other
operators, and the log has a mark "product computed by torch".

A launch outside of an operator that this mode has seen ends the process and names the kernel (compute.cpp).
"""

from __future__ import annotations

import ctypes
import os
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from fused import ANSWERS, NOT_LAUNCHED
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

GHOST = ctypes.PyDLL(None)
PRODUCTS = frozenset({"mm", "addmm", "addmm_", "bmm", "baddbmm", "baddbmm_"})
NO_NUMBERS = ("empty", "new_empty", "set_", "resize_", "record_stream", "is_pinned", "_pin_memory", "detach", "alias",
              "_local_scalar_dense", "_reshape_alias")
"""Operators without a kernel of their own, by their names' beginning."""
Operator = Callable[..., Any]
CPU_DRAWS = "GHOST_CPU_DRAWS"
"""Set to 1: the CPU's generator draws torch's random numbers, for programs that check no number of theirs."""


def at_host(value: Any) -> Any:
    """A tensor of the GPU as one of the CPU on the same memory; other values as they are, devices as the CPU."""
    if isinstance(value, torch.device) and value.type == "cuda":
        return torch.device("cpu")
    if not isinstance(value, torch.Tensor) or value.device.type != "cuda":
        return value
    storage = value.untyped_storage()
    out = torch.empty(0, dtype=value.dtype)
    if storage.nbytes() == 0:
        return out.new_empty(value.size())
    memory = (ctypes.c_char * storage.nbytes()).from_address(storage.data_ptr())
    whole = torch.frombuffer(memory, dtype=torch.uint8).untyped_storage()
    return out.set_(whole, value.storage_offset(), value.size(), value.stride())


def storages(values: Any) -> set[int]:
    """Addresses of the memory that tensors among these values have."""
    found: set[int] = set()

    def add(value: Any) -> None:
        if isinstance(value, torch.Tensor):
            found.add(value.untyped_storage().data_ptr())

    tree_map(add, values)
    return found


def own_memory(results: Any, known: set[int]) -> Any:
    """Results that have memory of their own, as tensors of the CPU on it; None in place of the others."""
    if isinstance(results, (list, tuple)):
        return [own_memory(result, known) for result in results]
    if isinstance(results, torch.Tensor) and results.device.type == "cuda":
        return None if results.untyped_storage().data_ptr() in known else at_host(results)
    return None


def write_back(memory: Any, computed: Any) -> None:
    """Copy what the CPU computed to the memory of the results."""
    if isinstance(memory, torch.Tensor):
        memory.copy_(computed)
    elif isinstance(memory, list):
        for one, value in zip(memory, computed):
            write_back(one, value)


REPLAYED: list[Callable[[], None]] = []
"""What recorded operators compute, by number. The tensors of these functions own no memory."""


@ctypes.CFUNCTYPE(None, ctypes.c_long)
def replay(number: int) -> None:
    """Compute a recorded operator; a failure ends the process, because a callback cannot raise."""
    try:
        with torch._C._DisableTorchDispatch(), torch.no_grad():
            REPLAYED[number]()
    except BaseException:
        traceback.print_exc()
        os._exit(86)


def now_or_in_replays(function: Callable[[], None]) -> None:
    """Compute what the current stream was given, or keep it for each replay of the graph that captures the stream."""
    if torch.cuda.is_current_stream_capturing():
        REPLAYED.append(function)
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        GHOST.ghost_answer_later(stream, replay, ctypes.c_long(len(REPLAYED) - 1))
    else:
        function()


def host_arguments(args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Arguments on the memory of the GPU's, whose values may be computed later."""
    args, kwargs = tree_map(at_host, args), tree_map(at_host, kwargs)
    kwargs.pop("pin_memory", None)
    return args, kwargs


def for_the_cpu(name: str, args: Any) -> Any:
    """Arguments as the CPU's kernel of an operator takes them, with their present values: a recorded operator asks at
    each replay."""
    if name.startswith("native_layer_norm"):  # half with statistics in float: the GPU's kernels alone can
        args = tree_map(lambda x: x.float() if isinstance(x, torch.Tensor) else x, args)
    if name in ("_softmax", "_log_softmax") and args[2]:  # half in, float out: the GPU's kernels alone can
        args = (args[0].float(), args[1], False)
    if name in ("_softmax_backward_data", "_log_softmax_backward_data"):  # and back: the copy to the result rounds
        args = (*args[:3], args[0].dtype)
    return args


def by_name(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return an operator's arguments by name, with its defaults."""
    found = {one.name: one.default_value for one in func._schema.arguments if one.has_default_value()}
    return found | dict(zip((one.name for one in func._schema.arguments), args)) | kwargs


def wait_for_sizes(name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    """Read from the GPU as torch's kernel of an operator does that must know values before it can make its result: once
    (how many there are), or for ``bincount`` the smallest and the largest one; not where the caller says how many. The
    runtime logs each copy and wait."""
    for _ in range(0 if kwargs.get("output_size") is not None else 2 if name == "bincount" else 1):
        if args[0].numel():
            torch.ops.aten._local_scalar_dense(args[0].flatten()[:1].view(torch.uint8)[:1])


def on_gpu(value: Any, device: torch.device) -> Any:
    """Return a tensor of the CPU as one of the GPU, written to its memory by no call of the runtime."""
    if not isinstance(value, torch.Tensor):
        return value
    out = torch.empty(value.shape, dtype=value.dtype, device=device)
    at_host(out).copy_(value)
    return out


def needs_values(func: Any, name: str, args: Sequence[Any]) -> bool:
    """Whether the shape of the result, or of something on the way to it, depends on numbers in the arguments."""
    if name.startswith(("index", "_index_put", "_unsafe_index")):
        indices = args[1] if len(args) > 1 and isinstance(args[1], (list, tuple)) else ()
        return any(isinstance(i, torch.Tensor) and i.dtype == torch.bool for i in indices)
    return torch.Tag.dynamic_output_shape in func.tags


class Answers(TorchDispatchMode):
    """Computes torch's operators of the GPU on the CPU, after they have launched."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        """Launch, then compute. Raises NotImplementedError for an operator that draws random numbers, without
        ``CPU_DRAWS``."""
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        if any(kind not in (torch.Tensor, torch.nn.Parameter) for kind in types):
            return NotImplemented  # a fake or wrapped tensor's own rules, below which this mode is asked again
        if func.namespace != "aten" or name.startswith(NO_NUMBERS) or func.is_view:
            return func(*args, **kwargs)
        if needs_values(func, name, args):  # no launch: torch would read a size that no kernel wrote
            wait_for_sizes(name, args, kwargs)
            host_args, host_kwargs = host_arguments(args, kwargs)
            computed = func(*for_the_cpu(name, host_args), **host_kwargs)
            return args[0] if name.endswith("_") else tree_map(lambda t: on_gpu(t, args[0].device), computed)
        known = storages((args, kwargs))
        GHOST.ghost_answer_begin()
        try:
            made = NOT_LAUNCHED.get(name)
            out = made(by_name(func, args, kwargs)) if made else func(*args, **kwargs)
        finally:
            launched = GHOST.ghost_answer_end()
        if not launched and not made:
            return out
        random = torch.Tag.nondeterministic_seeded in func.tags and name not in ANSWERS
        if random and os.environ.get(CPU_DRAWS) != "1":
            raise NotImplementedError(f"nobody computes {func}: its random numbers are the GPU's own")
        if name in PRODUCTS:
            GHOST.ghost_mark(b"product computed by torch")
        host_args, host_kwargs = host_arguments(args, kwargs)
        if random and "generator" in host_kwargs:  # of the GPU; some operators take none
            host_kwargs["generator"] = None
        answer = ANSWERS.get(name)

        def compute() -> Any:
            given = for_the_cpu(name, host_args)
            return answer(by_name(func, given, host_kwargs)) if answer else func(*given, **host_kwargs)

        if isinstance(out, (bool, int, float)):  # read by the operator itself, before anything was computed
            return compute()
        memory = own_memory(out, known)
        now_or_in_replays(lambda: write_back(memory, compute()))
        return out


def use_kernels(library: Path) -> None:
    """Have the package load the project's kernels for CUDA from this file."""
    from megatron_port.ext.kernels import kernels

    found = kernels.library_path
    kernels.library_path = lambda kind, *rest: (library, "") if kind == "cuda" else found(kind, *rest)
