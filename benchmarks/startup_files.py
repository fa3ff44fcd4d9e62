"""What the ranks of a node open while they start, from a checkout and after staging; and how long they take to step 1.

``python benchmarks/startup_files.py --image env.tar [--ranks 8] [--rounds 3] [--out FILE]`` (the image:
``megatron-port launch image -o env.tar``; needs strace and fincore) unpacks the image as a job does (launch/stage.sh),
and starts a tiny run of N ranks:

- ``checkout``: the interpreter of this environment, the code of a launch record, its config.toml read by each rank;
- ``staged``: what ``STAGE=env.tar`` gives the ranks;
- ``staged, cold``: the same, after the node's page cache has forgotten what was unpacked (seconds only).

All ranks run under ``strace -f`` for the counts: opens and path calls (open, stat, readlink, access, …) of files below
the environment, the record and the working directory, which a shared file system would have to answer, until they end
after one step. The system's own folders (/etc, /usr, /lib, /proc, /sys, /dev) are each node's. The ranks run without
strace for the seconds, the kinds in turn, so that all meet the same load of the machine.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import re
import resource
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SYSTEM = ("/etc/", "/usr/", "/lib/", "/lib64/", "/proc/", "/sys/", "/dev/", "/run/", "/bin/", "/sbin/", "/var/lib/")
SETTINGS = {
    "engine": '"native"', "backend.device": '"cpu"', "layout.tensor_parallel_size": 1, "layout.data_parallel_size": 0,
    "layout.pipeline_parallel_size": 1, "layout.zero_stage": 0, "data.synthetic": "true", "training.steps": 1,
    "training.eval_interval": 0, "checkpoint.save_interval": 0, "checkpoint.save_final": "false", "model.num_layers": 1,
    "batch.micro_batch_size": 1, "batch.global_batch_size": 8, "optimizer.warmup_steps": 0, "model.seq_length": 16,
}


def prepare(folder: Path, image: Path) -> None:
    """Make a launch record's code and configuration, and unpack the image as a node does."""
    from megatron_port.core.config.dump import to_toml
    from megatron_port.core.config.loader import load
    from megatron_port.run import sources as snapshot

    record, staged, results = folder / "record", folder / "node" / "staged", folder / "results"
    for made in (record, staged, results, folder / "work"):
        made.mkdir(parents=True)
    snapshot.keep_code(record)
    changes = [f"{k}={v}" for k, v in SETTINGS.items()] + [f'output_dir="{folder}/runs"', 'name="x"']
    (record / "config.toml").write_text(to_toml(load("runs/quickstart", changes).config))
    subprocess.run(["cp", str(image), staged / "env.tar"], check=True)
    subprocess.run(["tar", "-C", record, "-cf", staged / "code.tar", "code", "config.toml"], check=True)
    script = (f'source {ROOT}/launch/stage.sh; SLURMD_NODENAME=n1 bash -c "$stage_unpack" stage {staged} {results} '
              f"{staged}/env.tar")
    subprocess.run(["bash", "-c", script], check=True)
    bad = list(results.glob("bad-*"))
    assert not bad, bad[0].read_text()


def command_of(kind: str, folder: Path) -> tuple[list[str], dict[str, str]]:
    """Return the command and the environment of a rank."""
    env = {"PATH": os.defpath, "HOME": "/root", "OMP_NUM_THREADS": "1", "LANG": "C.UTF-8"}
    if kind == "checkout":
        python, code, config = sys.executable, folder / "record" / "code", folder / "record" / "config.toml"
    else:
        staged = folder / "node" / "staged"
        python, code, config = str(staged / "env/bin/python"), staged / "code", staged / "config.toml"
        env |= {"PYTHONSAFEPATH": "1", "PYTHONNOUSERSITE": "1", "LD_LIBRARY_PATH": str(staged / "env/lib"),
                "MEGATRON_PORT_CONFIG": config.read_text(), "MEGATRON_PORT_CONFIG_FILE": str(config)}
    return [python, "-m", "megatron_port", "train", str(config)], {**env, "PYTHONPATH": str(code)}


def shared(path: str, folder: Path) -> bool:
    """The path would be on a shared file system: not the system's, not the node's, not the run's."""
    inside = (str(folder / "node"), str(folder / "runs"))
    above = f"{folder}/node/".startswith(path.rstrip("/") + "/")  # looked at on the way to the node's own files
    return path.startswith("/") and not path.startswith((*SYSTEM, *inside)) and not above and path != "/tmp"


def start(
    kind: str, folder: Path, ranks: int, before: Callable[[int], list[str | Path]]
) -> list[subprocess.Popen[str]]:
    """Start the ranks; ``before``: rank → words ahead of its command."""
    command, env = command_of(kind, folder)
    subprocess.run(["rm", "-rf", folder / "runs"], check=True)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    return [
        subprocess.Popen([*before(r), *command], cwd=folder / "work", stdout=subprocess.DEVNULL, text=True, env={
            **env, "RANK": str(r), "WORLD_SIZE": str(ranks), "LOCAL_RANK": str(r), "LOCAL_WORLD_SIZE": str(ranks),
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}) for r in range(ranks)
    ]


def trace(kind: str, folder: Path, ranks: int) -> dict[str, object]:
    """Count what each rank, and the node, ask of the shared file system before the end of the first step."""
    def strace(rank: int) -> list[str | Path]:
        return ["strace", "-f", "-qq", "-y", "-e", "trace=%file", "-e", "signal=none", "-o",
                folder / f"{kind}.{rank}.strace"]

    codes = [process.wait() for process in start(kind, folder, ranks, strace)]
    assert not any(codes), codes
    opens, calls = [0] * ranks, [0] * ranks
    where: collections.Counter[str] = collections.Counter()
    asked: collections.Counter[str] = collections.Counter()
    sizes: dict[str, int] = {}
    for rank in range(ranks):
        for name, whole, failed in paths(folder / f"{kind}.{rank}.strace", folder / "work"):
            if not shared(whole, folder):
                continue
            calls[rank] += 1
            asked[place_of(whole, folder)] += 1
            if name.startswith("open") and not failed:
                opens[rank] += 1
                where[place_of(whole, folder)] += 1
                sizes[whole] = os.path.getsize(whole) if os.path.isfile(whole) else 0
    return {"ranks": ranks, "opens": max(opens), "path_calls": max(calls), "bytes": sum(sizes.values()),
            "node_opens": sum(opens), "node_path_calls": sum(calls), "opened": where.most_common(3),
            "asked": asked.most_common(5)}


def place_of(path: str, folder: Path) -> str:
    """Return whose a path is: the environment's, the record's, the working directory's."""
    places = {folder / "record": "record", folder / "work": "working directory", Path(sys.base_prefix): "interpreter",
              Path(sys.prefix): "environment", Path(sys.prefix).resolve(): "environment"}
    return next((name for place, name in places.items() if Path(path).is_relative_to(place)), "folders above, /tmp")


def paths(log: Path, cwd: Path) -> Iterator[tuple[str, str, bool]]:
    """Yield the calls that strace logged: name, absolute path, whether it failed."""
    for line in log.read_text(errors="replace").splitlines():
        found = re.match(r'\d+ +(\w+)\((?:[^"]*?<([^>]*)>, )?"([^"]*)"', line)
        if found:
            name, place, path = found[1], found[2], found[3]
            whole = path if path.startswith("/") else os.path.normpath(f"{place or cwd}/{path}")
            yield name, whole, " = -1 " in line


def resident(folder: Path) -> dict[str, int]:
    """Return how many bytes of the unpacked environment there are, and how many are in the page cache."""
    done = subprocess.run(["find", folder / "node" / "staged" / "env", "-type", "f", "-size", "+0", "-exec", "fincore",
                           "--noheadings", "--bytes", "--output", "res,size", "{}", "+"],
                          capture_output=True, text=True, check=True)
    rows = [line.split() for line in done.stdout.splitlines()]
    return {"bytes": sum(int(r[1]) for r in rows), "resident": sum(min(int(r[0]), int(r[1])) for r in rows)}


def forget(folder: Path) -> None:
    """Have the page cache drop the staged files."""
    staged = folder / "node" / "staged"
    subprocess.run(["sync", "-f", staged], check=True)
    for path in staged.rglob("*"):
        if path.is_file():
            with open(path, "rb") as stream:
                os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def seconds(kind: str, folder: Path, ranks: int) -> dict[str, object]:
    """Return the wall seconds from the start of the ranks until step 1 is in metrics.jsonl, and what they read."""
    if kind.endswith("cold"):
        forget(folder)
    load, read = os.getloadavg()[0], resource.getrusage(resource.RUSAGE_CHILDREN).ru_inblock
    begun = time.monotonic()
    processes = start(kind, folder, ranks, lambda rank: [])
    metrics, took = folder / "runs" / "x" / "metrics.jsonl", 0.0
    while not took:
        time.sleep(0.02)
        assert not any(p.poll() for p in processes), [p.poll() for p in processes]
        if metrics.exists() and '"loss"' in metrics.read_text():
            took = time.monotonic() - begun
    assert not any(p.wait() for p in processes)
    read = resource.getrusage(resource.RUSAGE_CHILDREN).ru_inblock - read
    return {"seconds": round(took, 1), "read_from_disk": 512 * read, "load": round(load, 1)}


def main() -> int:
    """Measure, print, and write a record."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--image", type=Path, required=True)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3, help="times that each kind is timed; 0: counts only")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    lines: list[dict[str, object]] = []

    def note(kind: str, found: dict[str, object]) -> None:
        lines.append({"kind": kind, "cores": os.cpu_count(), **found})
        print(json.dumps(lines[-1]), flush=True)

    with tempfile.TemporaryDirectory(dir="/var/tmp") as name:
        folder = Path(name)
        prepare(folder, args.image)
        note("page cache after unpacking", {**resident(folder)})
        for kind in ("checkout", "staged"):
            note(kind, trace(kind, folder, args.ranks))
        for turn in range(args.rounds):
            for kind in ("checkout", "staged", "staged, cold"):
                note(kind, {"round": turn, "ranks": args.ranks, **seconds(kind, folder, args.ranks)})
    if args.out:
        args.out.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
