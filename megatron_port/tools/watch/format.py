"""How ranks, stacks and waits are put into words."""

from __future__ import annotations

from collections.abc import Sequence

Frame = tuple[str, int, str]
"""File, line, function."""
Stack = tuple[str, list[Frame]]
"""A thread: its name, and its frames, outermost first."""

FOREIGN = "not Python's"
"""Name of a thread that Python did not start, autograd's for one."""


def stack_text(stacks: Sequence[Stack]) -> str:
    """Return all threads of a process, innermost frame last, as a traceback shows them."""
    out = []
    for name, frames in stacks:
        out.append(f"Thread {name}:")
        out += [f'  File "{file}", line {line}, in {function}' for file, line, function in frames]
    return "\n".join(out)


def _short(file: str) -> str:
    """Return ``dist.collectives`` for ``megatron_port/core/dist/collectives.py``."""
    return file.rpartition("megatron_port/")[2].removesuffix(".py").replace("/", ".")


def _is_ours(file: str) -> bool:
    return "megatron_port/" in file and "/watch/" not in file


def waits_in(stacks: Sequence[Stack]) -> str:
    """Return ``all_reduce (dist.collectives.all_reduce_sum)`` if training is inside torch.distributed; else empty.

    The main thread is looked at, and threads of torch: with GPUs a backward pass runs our functions in autograd's. What
    a thread of ours waits for (a save in the background) holds up nobody.
    """
    for name, frames in stacks:
        if name not in ("MainThread", FOREIGN):
            continue
        call = ours = ""
        for file, _line, function in frames:
            if "torch/distributed/" in file or "deepspeed/comm/" in file:
                call = call or ("" if function in ("wrapper", "log_wrapper") else function)
            elif _is_ours(file):
                ours, call = f"{_short(file)}.{function}", ""
        if call and frames and not _is_ours(frames[-1][0]):
            return f"{call} ({ours})" if ours else call
    return ""


def innermost(stacks: Sequence[Stack]) -> str:
    """Return where the main thread is: ``loader.py:71 in step``."""
    for _, frames in stacks[:1]:
        if frames:
            file, line, function = frames[-1]
            return f"{file.rpartition('/')[2]}:{line} in {function}"
    return ""
