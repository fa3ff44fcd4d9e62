"""How long a save holds up training, and how fast a checkpoint loads, each beside the floor measured in the same run.

    python benchmarks/checkpoint.py --ranks 8 --megabytes 128 --out benchmarks/results/checkpoint.json

Every rank is a process of a gloo group and holds ``--megabytes`` of fp32 weights and moments. All ranks do the same
thing at the same time, between two barriers; a time is that of the slowest rank. Repeats alternate, medians are
compared:

- ``memcpy``: the C library's memmove of the same bytes between two buffers of the same rank, both touched before.
- ``stall_async``: what ``BackgroundSave.start`` takes of a step (copy, agreement, temporary directory).
- ``save_sync``: a synchronous save to its commit, fsync and read-back included; ``save_async``: the same in background.
- ``load``: every rank opens the checkpoint and reads its pieces, verified, into its tensors.
- ``cat``: one ``cat`` of the same files to /dev/null. Warm: from the page cache. Cold: after dropping it (root only).
"""

from __future__ import annotations

import argparse
import ctypes
import json
import multiprocessing
import os
import platform
import shlex
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_port.core.checkpoint.format import SavedState
from megatron_port.core.checkpoint.reader import open_checkpoint
from megatron_port.core.checkpoint.writer import GroupPeers
from megatron_port.core.checkpoint.writer import save_checkpoint as save_among
from megatron_port.core.dist.record import StatePiece
from megatron_port.ext.storage.background import BackgroundSave

MATRICES = 8


def make_pieces(rank: int, world: int, nbytes: int) -> list[StatePiece]:
    """This rank's rows of a few matrices and vectors, three kinds of each."""
    columns = 1024
    rows = nbytes // (3 * 4 * columns * MATRICES)
    out = []
    for kind in ("weight", "exp_avg", "exp_avg_sq"):
        for i in range(MATRICES):
            shape = (rows * world, columns)
            out.append(StatePiece(
                f"layers.{i}.weight", kind, shape, (rank * rows, 0), (rows, columns), 0, torch.randn(rows * columns)
            ))
            out.append(StatePiece(
                f"layers.{i}.bias", kind, (columns * world,), (rank * columns,), (columns,), 0, torch.randn(columns)
            ))
    return out


def timed(action: Callable[[], object]) -> float:
    """Seconds of the slowest rank, from a common start."""
    dist.barrier()
    began = time.perf_counter()
    action()
    seconds = torch.tensor([time.perf_counter() - began], dtype=torch.float64)
    dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
    return float(seconds)


class Memcpy:
    """memmove of each piece to a second buffer."""

    def __init__(self, pieces: list[StatePiece]) -> None:
        self._pairs = [(p.tensor, torch.zeros_like(p.tensor)) for p in pieces]

    def __call__(self) -> None:
        for a, b in self._pairs:
            ctypes.memmove(b.data_ptr(), a.data_ptr(), a.numel() * a.element_size())


def drop_caches() -> bool:
    """Forget the page cache; False where that is not allowed."""
    try:
        os.sync()
        Path("/proc/sys/vm/drop_caches").write_text("3")
        return True
    except OSError:
        return False


def cat(folder: Path) -> float:
    began = time.perf_counter()
    with open(os.devnull, "wb") as sink:
        subprocess.run(["cat", *sorted(map(str, folder.glob("*.safetensors")))], stdout=sink, check=True)
    return time.perf_counter() - began


def on_rank(rank: int, world: int, nbytes: int, repeats: int, folder: Path, out: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world, timeout=timedelta(seconds=300)
    )
    pieces = make_pieces(rank, world, nbytes)
    size = sum(p.tensor.numel() * 4 for p in pieces)
    copy, peers = Memcpy(pieces), GroupPeers(dist.group.WORLD)  # type: ignore[arg-type]
    saver = BackgroundSave(peers, folder / "async", keep=1)
    times: dict[str, list[float]] = {}

    def note(name: str, seconds: float) -> None:
        times.setdefault(name, []).append(seconds)

    def state(step: int) -> SavedState:
        return SavedState(step=step, samples=0, tokens=0, layout={}, config={}, scalars={}, extra={})

    copy()
    for step in range(repeats + 1):
        if step:
            note("memcpy", timed(copy))
        began = time.perf_counter()
        stall = timed(lambda step=step: saver.start(state(step), pieces))  # type: ignore[misc]
        note("stall_async" if step else "stall_async_first", stall)
        done = saver.finish()
        assert done is not None and done.failure is None, done
        if step:
            note("save_async", time.perf_counter() - began)
            note("save_sync", timed(lambda step=step: save_among(peers, folder / "sync", state(step), pieces, keep=1)))
    at = folder / "sync" / f"step-{repeats:08d}"

    def load() -> None:
        checkpoint = open_checkpoint(at)
        for p in pieces:
            place = p.tensor.view(p.shape)  # as an engine loads what a rank has all of
            found = checkpoint.read(p.name, p.kind, p.offset, p.shape, out=place)
            assert found is place
        checkpoint.close()

    before = [p.tensor.clone() for p in pieces[:2]]
    for warm in (True, False):
        suffix = "" if warm else "_cold"
        for _ in range(repeats):
            for name, action in (("cat", lambda: cat(at) if rank == 0 else None), ("load", load)):
                allowed = torch.tensor([1])
                if not warm and rank == 0:
                    allowed[0] = int(drop_caches())
                dist.broadcast(allowed, src=0)
                if int(allowed):
                    note(name + suffix, timed(action))
    assert all(torch.equal(a, p.tensor) for a, p in zip(before, pieces))
    if rank == 0:
        out.write_text(json.dumps({"bytes_a_rank": size, "times": times}))
    dist.barrier()
    dist.destroy_process_group()


def machine() -> str:
    """The processor's name."""
    info = Path("/proc/cpuinfo")
    for line in info.read_text().splitlines() if info.exists() else ():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def report(raw: dict[str, Any], world: int) -> dict[str, Any]:
    times, total = raw["times"], raw["bytes_a_rank"] * world
    median = {name: statistics.median(values) for name, values in times.items()}
    rates = {f"{name}_gb_s": total / median[name] / 1e9 for name in ("cat", "load", "cat_cold", "load_cold")
             if name in median}
    ratios = {
        "stall_async_to_memcpy": median["stall_async"] / median["memcpy"],
        "stall_async_to_save_sync": median["stall_async"] / median["save_sync"],
        "load_to_cat": median["cat"] / median["load"],
    }
    if "load_cold" in median:
        ratios["load_to_cat_cold"] = median["cat_cold"] / median["load_cold"]
    return {
        "command": shlex.join(["python", *sys.argv]), "machine": machine(),
        "ranks": world, "bytes": total, "cores": os.cpu_count(), "python": platform.python_version(),
        "torch": torch.__version__, "when": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "load_average": os.getloadavg()[0], "median_seconds": {k: round(v, 4) for k, v in median.items()},
        "rates": {k: round(v, 3) for k, v in rates.items()}, "ratios": {k: round(v, 3) for k, v in ratios.items()},
        "asked": {"stall_async_to_memcpy": "at most 1.3", "load_to_cat": "at least 0.7"},
        "seconds": {k: [round(x, 4) for x in v] for k, v in times.items()},
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--megabytes", type=int, default=128, help="state of each rank, 10^6 bytes")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--dir", type=Path, default=None, help="where to save; default: the system's temporary folder")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="checkpoint-", dir=args.dir))
    context = multiprocessing.get_context("fork")
    try:
        raw = folder / "raw.json"
        ranks = [
            context.Process(
                target=on_rank, args=(r, args.ranks, args.megabytes * 10**6, args.repeats, folder, raw), daemon=True
            )
            for r in range(args.ranks)
        ]
        for p in ranks:
            p.start()
        for p in ranks:
            p.join()
        if any(p.exitcode for p in ranks):
            print(f"a rank failed: exit codes {[p.exitcode for p in ranks]}")
            return 1
        found = report(json.loads(raw.read_text()), args.ranks)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps({k: v for k, v in found.items() if k != "seconds"}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
