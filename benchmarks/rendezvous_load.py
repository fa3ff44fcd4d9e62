"""How much work rank 0 has with the rendezvous of many ranks: one process is rank 0, others play the rest.

``python benchmarks/rendezvous_load.py [--ranks 3072] [--players 4] [--out FILE]`` starts rank 0 as a process of its
own, with the store that it serves, and PLAYERS processes that hold the connections of all other ranks and do what each
of them does (``run.rendezvous.meet``), rank by rank in threads. It prints rank 0's CPU seconds from its connection
to its release, which is what one core of its node has to do. Everything runs on this machine, so the wall time is that
of all ranks' work on its cores.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

RANK_0 = """
import json, resource, sys, time
from megatron_port.run import rendezvous
from megatron_port.run.discovery import ProcessInfo
from megatron_port.run.rendezvous import Fingerprint
ranks, port = int(sys.argv[1]), int(sys.argv[2])
info = ProcessInfo(0, ranks, 0, 8, 0, ranks // 8, "127.0.0.1", port, "slurm", "node0", secret=sys.argv[3])
def cpu():
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime
begun, wall = cpu(), time.monotonic()
store = rendezvous.connect(info, 300.0)
print("serving", flush=True)
rendezvous.meet(info, store, timeout_s=300.0, fingerprint=Fingerprint.of(ranks))
used = {"cpu_seconds": round(cpu() - begun, 3), "wall_seconds": round(time.monotonic() - wall, 3)}
print(json.dumps(used), flush=True)
rendezvous.leave(info, store, 60.0)
"""


def play(first: int, last: int, ranks: int, port: int, secret: str) -> None:
    """Be ranks ``first`` to ``last - 1``."""
    from megatron_port.core.dist.rank import ProcessInfo
    from megatron_port.run import rendezvous
    from megatron_port.run.rendezvous import Fingerprint

    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    threading.stack_size(256 << 10)
    print_of = Fingerprint.of(ranks)

    def one(rank: int) -> None:
        info = ProcessInfo(rank, ranks, rank % 8, 8, rank // 8, ranks // 8, "127.0.0.1", port, "slurm",
                           f"node{rank // 8}", secret=secret)
        store = rendezvous.connect(info, 300.0)
        rendezvous.meet(info, store, timeout_s=300.0, fingerprint=print_of)
        rendezvous.leave(info, store, 60.0)

    threads = [threading.Thread(target=one, args=(rank,)) for rank in range(first, last)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def measure(ranks: int, players: int) -> dict[str, float]:
    """Return rank 0's CPU seconds and the wall seconds of everybody."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    secret = os.urandom(16).hex()
    os.environ["TORCH_CPP_LOG_LEVEL"] = "ERROR"
    root = Path(__file__).resolve().parent.parent
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(root), "TORCH_CPP_LOG_LEVEL": "ERROR"}
    command = ["sh", "-c", 'ulimit -n "$(ulimit -Hn)"; exec "$@"', "sh", sys.executable, "-c", RANK_0, str(ranks),
               str(port), secret]
    first = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env)
    assert first.stdout is not None and first.stdout.readline() == "serving\n"
    bounds = [1 + (ranks - 1) * i // players for i in range(players + 1)]
    children = []
    for low, high in zip(bounds, bounds[1:]):
        pid = os.fork()
        if pid == 0:
            try:
                play(low, high, ranks, port, secret)
            except BaseException as error:
                print(f"ranks {low}-{high}: {type(error).__name__}: {error}", file=sys.stderr)
                os._exit(1)
            os._exit(0)
        children.append(pid)
    line = first.stdout.readline()
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children]
    assert first.wait() == 0 and not any(codes), codes
    return {"ranks": ranks, **json.loads(line)}


def main() -> int:
    """Measure, print, and append to a record."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ranks", type=int, default=3072)
    parser.add_argument("--players", type=int, default=4)
    parser.add_argument("--out", type=Path, help="append the line to this file")
    args = parser.parse_args()
    found = measure(args.ranks, args.players)
    line = json.dumps({"time": time.strftime("%Y-%m-%d", time.gmtime()), "cores": os.cpu_count(), **found})
    print(line)
    if args.out:
        with open(args.out, "a") as stream:
            stream.write(line + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
