"""One rank's fault becomes every rank's, so that all stop together and one speaks.

Without it the others would wait in the next collective for a rank that has left.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import TypeVar

import torch
import torch.distributed as dist

from megatron_port.core.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    EnvironmentFault,
    HangError,
    NumericsError,
    PortError,
)

T = TypeVar("T")
MOST_BYTES = 1 << 20
TEXT_CHARACTERS = 4096
"""A longer message is cut."""
NAME_BYTES = 128
"""A longer name is cut."""
CLASSES: dict[int, type[PortError]] = {
    cls.exit_code: cls for cls in (ConfigError, EnvironmentFault, DataError, CheckpointError, NumericsError, HangError)
}


def _describe(error: BaseException, where: str) -> str:
    """The message with rank, host and coordinates in front."""
    text = str(error) if isinstance(error, PortError) else f"{type(error).__name__}: {error}"
    place = f"rank {dist.get_rank()} on {socket.gethostname()}"
    return f"{place}{f' ({where})' if where else ''}: {text}"


def broadcast_text(
    text: str | None, *, source: int = 0, group: dist.ProcessGroup | None = None, device: torch.device | str = "cpu"
) -> str | None:
    """Collective: the text (or None) of rank ``source`` of the group on every rank.

    What the others bring is not looked at. As bytes in tensors: torch's object collectives would unpickle what a peer
    sent. Two small broadcasts; without a process group it is the caller's own text.

    Raises:
        EnvironmentFault: more than 1 MiB was announced.
    """
    if not dist.is_initialized() or dist.get_world_size(group) == 1:
        return text
    data = b"" if text is None else text.encode()
    size = torch.tensor([-1 if text is None else len(data)], dtype=torch.int64, device=device)
    dist.broadcast(size, group=group, group_src=source)
    count = int(size)
    if count > MOST_BYTES:
        raise EnvironmentFault(f"rank {source} announced a text of {count} bytes; at most {MOST_BYTES}")
    if count <= 0:
        return None if count < 0 else ""
    packet = torch.zeros(count, dtype=torch.uint8)
    if dist.get_rank(group) == source:
        packet = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    packet = packet.to(device)
    dist.broadcast(packet, group=group, group_src=source)
    return bytes(packet.tolist()).decode()


def gather_names(name: str, *, group: dist.ProcessGroup | None = None, device: torch.device | str = "cpu") -> list[str]:
    """Collective: the name that each rank of the group gives, in the order of the ranks."""
    data = name.encode()[:NAME_BYTES].ljust(NAME_BYTES, b"\0")
    own = torch.frombuffer(bytearray(data), dtype=torch.uint8).to(device)
    names = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
    dist.all_gather(names, own, group=group)
    return [bytes(packet.tolist()).rstrip(b"\0").decode(errors="ignore") for packet in names]


def agree(
    error: BaseException | None, *, group: dist.ProcessGroup | None = None, where: str = "",
    device: torch.device | str = "cpu",
) -> None:
    """Collective: meet the other ranks; if any brings an error, all raise that of the lowest such rank.

    Costs one all-reduce of an integer, and on failure two broadcasts. Without a process group it raises the error,
    if any.

    Args:
        error: what happened on this rank, or None.
        group: ranks that agree (None: all); it must take tensors of ``device``.
        where: this rank's coordinates, for the message.

    Raises:
        PortError: of the failing rank's class, with its rank, host and coordinates in front of the message.
        BaseException: on a rank whose own error is not a PortError, that error itself, with its traceback.
    """
    if not dist.is_initialized():
        if error is not None:
            raise error
        return
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    flag = torch.tensor([0 if error is None else size - rank], dtype=torch.int64, device=device)
    dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=group)
    worst = int(flag.item())
    if worst == 0:
        return
    first = size - worst
    own = None
    if error is not None:
        code = error.exit_code if isinstance(error, PortError) else 1
        own = f"{code} {_describe(error, where)[:TEXT_CHARACTERS]}"
    told = broadcast_text(own, source=first, group=group, device=device) or own or ""
    if error is not None and not isinstance(error, PortError):
        raise error
    code_text, _, message = told.partition(" ")
    raise CLASSES.get(int(code_text), PortError)(message) from error


def attempt(action: Callable[[], T]) -> tuple[T | None, PortError | None]:
    """Return what ``action`` returns, or the PortError that it raised, for the other ranks to hear of."""
    try:
        return action(), None
    except PortError as error:
        return None, error


def agreed(action: Callable[[], T], *, where: str = "") -> T:
    """Collective: run ``action`` and :func:`agree` on whether it went well everywhere; return its result on this rank.

    Raises:
        PortError: ``action`` raised one on some rank. Any other error passes at once.
    """
    result, failure = attempt(action)
    agree(failure, where=where)
    return result  # type: ignore[return-value]
