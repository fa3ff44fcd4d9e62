"""One rank's fault becomes every rank's, so that all stop together and one speaks.

Without it the others would wait in the next collective for a rank that has left.
"""

from __future__ import annotations

import socket

import torch
import torch.distributed as dist

from megatron_port.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    EnvironmentFault,
    HangError,
    NumericsError,
    PortError,
)

MOST_BYTES = 1 << 20
TEXT_BYTES = 8192
"""A longer message is cut."""
CLASSES: dict[int, type[PortError]] = {
    cls.exit_code: cls for cls in (ConfigError, EnvironmentFault, DataError, CheckpointError, NumericsError, HangError)
}


def _describe(error: BaseException, where: str) -> str:
    """The message with rank, host and coordinates in front."""
    text = str(error) if isinstance(error, PortError) else f"{type(error).__name__}: {error}"
    place = f"rank {dist.get_rank()} on {socket.gethostname()}"
    return f"{place}{f' ({where})' if where else ''}: {text}"


def text_of_rank_zero(text: str | None) -> str | None:
    """Collective: rank 0's text (or None) on every rank; what the others bring is not looked at.

    As bytes in tensors: torch's object collectives would unpickle what a peer sent. Two small broadcasts; without a
    process group it is the caller's own text.

    Raises:
        EnvironmentFault: more than 1 MiB was announced.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return text
    data = b"" if text is None else text.encode()
    size = torch.tensor([-1 if text is None else len(data)], dtype=torch.int64)
    dist.broadcast(size, src=0)
    count = int(size)
    if count > MOST_BYTES:
        raise EnvironmentFault(f"rank 0 announced a text of {count} bytes; at most {MOST_BYTES}")
    if count <= 0:
        return None if count < 0 else ""
    packet = torch.zeros(count, dtype=torch.uint8)
    if dist.get_rank() == 0:
        packet = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    dist.broadcast(packet, src=0)
    return bytes(packet.tolist()).decode()


def agree(
    error: BaseException | None,
    *,
    group: dist.ProcessGroup | None = None,
    where: str = "",
    device: torch.device | str = "cpu",
) -> None:
    """Collective: meet the other ranks; if any brings an error, all raise that of the lowest such rank.

    Costs one all-reduce of an integer, and on failure one broadcast of 8 KiB. Without a
    process group it raises the error, if any.

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
    packet = torch.zeros(1 + TEXT_BYTES, dtype=torch.uint8)
    if error is not None and first == rank:
        packet[0] = error.exit_code if isinstance(error, PortError) else 1
        data = _describe(error, where).encode()[:TEXT_BYTES]
        packet[1 : 1 + len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    packet = packet.to(device)
    dist.broadcast(packet, group=group, group_src=first)
    values = bytes(packet.tolist())
    if error is not None and not isinstance(error, PortError):
        raise error
    raise CLASSES.get(values[0], PortError)(values[1:].rstrip(b"\0").decode(errors="ignore")) from error
