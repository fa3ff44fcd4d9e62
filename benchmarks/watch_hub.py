"""CPU share of the watch's hub at a number of ranks: fake ranks that beat once a second from one process.

    python benchmarks/watch_hub.py [RANKS] [SECONDS]

Prints the hub's CPU seconds a second (of one core), its memory, and how long after a lost rank every other one was
told to end.
"""

from __future__ import annotations

import json
import os
import resource
import select
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path

from megatron_port.core.config.schema import WatchConfig
from megatron_port.core.dist.process import FORWARD, STEP
from megatron_port.run.watch import wire


def start(folder: str, ranks: int) -> tuple[subprocess.Popen[bytes], int]:
    """The hub as rank 0 starts it: (process, port)."""
    receive, answer = os.pipe()
    setup = {"secret": "s", "folder": folder, "host": "other", "world": ranks, "address": "127.0.0.1",
             "answer": answer, "config": asdict(WatchConfig())}
    hub = subprocess.Popen(
        [sys.executable, "-m", "megatron_port.run.watch.hub"], stdin=subprocess.PIPE, pass_fds=(answer,)
    )
    assert hub.stdin is not None
    hub.stdin.write(json.dumps(setup).encode() + b"\n")
    hub.stdin.flush()
    return hub, int(os.read(receive, 32))


def cpu_seconds(pid: int) -> float:
    """User and system time of a process."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def main() -> None:
    """Measure."""
    ranks = int(sys.argv[1]) if len(sys.argv) > 1 else 3072
    seconds = int(sys.argv[2]) if len(sys.argv) > 2 else 20
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(limit[1], ranks + 1000), limit[1]))
    with tempfile.TemporaryDirectory() as folder:
        started = time.perf_counter()
        hub, port = start(folder, ranks)
        print(f"hub listens after {time.perf_counter() - started:.2f} s")
        socks = []
        for rank in range(ranks):
            sock = socket.create_connection(("127.0.0.1", port))
            stage = rank // 48
            sock.sendall(wire.pack(wire.HELLO, "s", rank, f"n{rank // 8}", 1, 0, f"pp {stage}, dp 0, tp 0", stage))
            socks.append(sock)
        print(f"{ranks} connected after {time.perf_counter() - started:.2f} s")
        time.sleep(1)
        before, began, sent = cpu_seconds(hub.pid), time.monotonic(), 0
        for beat in range(1, seconds + 1):
            message = wire.pack(wire.BEAT, beat * 40, STEP, FORWARD, "micro-batch", 12, 0.013, beat, beat, beat * 1.0,
                                [round(beat * x, 4) for x in (0.01, 0.3, 0.4, 0.1, 0.1, 0.05)])
            for i, sock in enumerate(socks):
                sock.sendall(message)
                sent += 1
                if i % 64 == 63:  # spread over the second, as real ranks are
                    time.sleep(max(0.0, began + beat - 1 + i / ranks - time.monotonic()))
        took = time.monotonic() - began
        used = cpu_seconds(hub.pid) - before
        memory = next(line for line in Path(f"/proc/{hub.pid}/status").read_text().splitlines() if "VmRSS" in line)
        share = 100 * used / took
        print(f"{sent / took:.0f} heartbeats/s of {len(message)} bytes: {share:.1f} % of one core, {memory}")
        lost = time.monotonic()
        socks.pop(ranks // 2).close()
        poll = select.poll()
        for sock in socks:
            poll.register(sock, select.POLLIN)
        told: set[int] = set()
        while len(told) < len(socks) and time.monotonic() - lost < 20:
            told |= {fd for fd, _ in poll.poll(100)}
        print(f"{len(told)} ranks told to end {time.monotonic() - lost:.2f} s after one was lost")
        for sock in socks:
            sock.close()
        hub.wait(20)


if __name__ == "__main__":
    main()
