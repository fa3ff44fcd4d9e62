"""Reading what gloo, NCCL and the store raise when another rank has died, so that it can be told from a bug of ours.

The texts are those of torch 2.11 to 2.13. gloo's come from ``gloo/transport/tcp`` as plain RuntimeErrors, NCCL's as
DistBackendError, the store's as DistNetworkError and DistStoreError.
"""

from __future__ import annotations

import re
import socket
from types import TracebackType

import torch.distributed as dist

from megatron_port.core.dist.rank import ProcessInfo
from megatron_port.core.errors import PeerLost, PortError

CONSEQUENCE = "this is a consequence: the cause is with the rank that ended or fell silent first"
_ADDRESS = r"\[?(?P<peer>[^\s\]]+)\]?:\d+"


SIGNS: dict[type[BaseException], tuple[tuple[str, str], ...]] = {
    RuntimeError: (
        # gloo/transport/tcp: pair.cc, unbound_buffer.cc, socket.cc
        (rf"gloo/\S+\] Connection closed by peer {_ADDRESS}", "{peer} closed the connection"),
        (rf"gloo/\S+\] Read error {_ADDRESS}: (?P<why>[^.]+)", "{peer}: {why}"),
        (r"gloo/\S+\] (?:Write error|writev|write|send)\b[^:]*?(?:\[[^\]]+\]:\d+)?: (?P<why>[^.]+)", "{why}"),
        (r"gloo/\S+\] Timed out waiting (?P<wait>\d+)ms for (?P<why>send|recv) operation", "no answer for {wait}"),
        (r"gloo/\S+\] (?:Connect timeout|Socket Timeout|SO_ERROR|connect)\b(?P<why>[^.]*)", "cannot connect{why}"),
        (r"Gloo connectFullMesh failed with (?P<why>[^\n]+)", "cannot connect: {why}"),
        (r"Application timeout caused pair closure", "an earlier exchange with it timed out"),
    ),
    dist.DistBackendError: (  # ProcessGroupNCCL
        (r"Watchdog caught collective operation timeout.*?ran for (?P<wait>\d+) milliseconds", "no answer for {wait}"),
        (r"NCCL communicator was aborted", "the communicator was aborted"),
        (r"ncclRemoteError", "NCCL: a remote process ended, or the network failed"),
        (r"nccl(?:SystemError|InternalError).*?(?P<why>[Cc]onnection (?:closed by (?:remote )?peer|reset by peer|"
         r"refused|timed out)|[Bb]roken pipe|[Nn]o route to host|peer \S+ (?:closed|timed out))", "NCCL: {why}"),
    ),
    # TCPStore: it is rank 0 (or torchrun's agent) that is gone
    dist.DistNetworkError: (
        (r"Broken pipe|Connection (?:was likely closed|reset by peer|refused)|failed to recv|Socket Timeout",
         "the rendezvous store, on rank 0's host, is gone"),
    ),
    dist.DistStoreError: (
        (r"wait timeout after (?P<wait>\d+)ms, keys: (?P<why>\S+)",
         "no answer for {wait} while a group was being connected"),
    ),
}
"""Class of an error → texts that tell of a lost peer, and what each means (may name groups of its pattern)."""


def explain_peer_failure(error: BaseException, info: ProcessInfo | None = None) -> PeerLost | None:
    """Return what an error says of a lost or silent peer, in one line; None: it is about something else.

    Looks at the error and at those it was raised from. An error of ours (PortError) is never one, save a PeerLost.

    Args:
        info: this process; its rank and host open the message, and only the first rank of each node prints it
            (None: asked of torch and the system; the run's rank 0 prints it).
    """
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, PeerLost):
            return seen
        if isinstance(seen, PortError):
            return None
        meaning = _meaning(seen)
        if meaning is not None:
            break
        seen = seen.__cause__
    else:
        return None
    rank = info.rank if info else dist.get_rank() if dist.is_initialized() else 0
    host = info.hostname if info else socket.gethostname()
    where = _where(seen.__traceback__)
    lost = PeerLost(f"rank {rank} on {host} lost contact with a peer{where}: {meaning}; {CONSEQUENCE}")
    if info is not None:
        lost.is_reporter = info.rank == 0 or info.local_rank == 0
    return lost


def _meaning(error: BaseException) -> str | None:
    """A few words for a recognised error."""
    text = str(error)
    for pattern, meaning in (sign for cls, signs in SIGNS.items() if isinstance(error, cls) for sign in signs):
        found = re.search(pattern, text, re.DOTALL)
        if found:
            words = {name: value or "" for name, value in found.groupdict().items()}
            if "wait" in words:
                words["wait"] = f"{int(words['wait']) / 1000:g} s"
            return meaning.format(**words).strip()
    return None


def _where(trace: TracebackType | None) -> str:
    """`` in all_reduce (dist.collectives.all_reduce_sum)``: the call into torch.distributed, and ours behind it.

    Through torch's backward pass only the outermost call of ours is seen.
    """
    ours = theirs = ""
    while trace is not None:
        module = str(trace.tb_frame.f_globals.get("__name__", ""))
        name = trace.tb_frame.f_code.co_name
        if module.startswith("megatron_port."):
            ours, theirs = f"{module.removeprefix('megatron_port.')}.{name}", ""
        elif module.startswith("torch.distributed") and not theirs and name != "wrapper":
            theirs = name
        trace = trace.tb_next
    if ours and theirs:
        return f" in {theirs} ({ours})"
    return f" in {ours or theirs}" if ours or theirs else ""
