"""What a rank opens while it starts, from a checkout and after staging; and how long N ranks take to their first step.

``python benchmarks/startup_files.py --image env.tar [--ranks 8] [--out FILE]`` (the image: ``megatron-port launch
image -o env.tar``; needs strace) unpacks the image as a job does (launch/stage.sh), and starts a tiny run twice:

- ``checkout``: the interpreter of this environment, the code of a launch record, its config.toml read by each rank;
- ``staged``: what ``STAGE=env.tar`` gives the ranks.

One rank runs under ``strace -f`` for the counts: opens and path calls (open, stat, readlink, access, …) of files below
the environment, the record and the working directory, which a shared file system would have to answer. The system's
own folders (/etc, /usr, /lib, /proc, /sys, /dev) are each node's. N ranks run without it for the seconds.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import re
import subprocess
import sys
import tempfile
import time
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
    from megatron_port.config.dump import to_toml
    from megatron_port.config.loader import load
    from megatron_port.launch import snapshot

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


def trace(kind: str, folder: Path) -> dict[str, object]:
    """Count what one rank asks of the shared file system before its first step."""
    command, env = command_of(kind, folder)
    log = folder / f"{kind}.strace"
    subprocess.run(["rm", "-rf", folder / "runs"], check=True)
    done = subprocess.run(["strace", "-f", "-qq", "-y", "-e", "trace=%file", "-e", "signal=none", "-o", log, *command],
                          cwd=folder / "work", env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    opens, calls, size = 0, 0, 0
    where: collections.Counter[str] = collections.Counter()
    asked: collections.Counter[str] = collections.Counter()
    seen = set()
    for line in log.read_text(errors="replace").splitlines():
        found = re.match(r'\d+ +(\w+)\((?:[^"]*?<([^>]*)>, )?"([^"]*)"', line)
        if not found:
            continue
        name, place, path = found[1], found[2], found[3]
        whole = path if path.startswith("/") else os.path.normpath(f"{place or folder / 'work'}/{path}")
        if not shared(whole, folder):
            continue
        calls += 1
        asked["/".join(whole.split("/")[:5])] += 1
        if name.startswith("open") and " = -1 " not in line:
            opens += 1
            where[str(Path(whole).parent)] += 1
            if whole not in seen and os.path.isfile(whole):
                seen.add(whole)
                size += os.path.getsize(whole)
    return {"opens": opens, "path_calls": calls, "bytes": size, "opened": where.most_common(3),
            "asked": asked.most_common(5)}


def seconds(kind: str, folder: Path, ranks: int) -> float:
    """Wall seconds until all of ``ranks`` processes have done a step and ended."""
    command, env = command_of(kind, folder)
    subprocess.run(["rm", "-rf", folder / "runs"], check=True)
    begun = time.monotonic()
    port = str(20000 + os.getpid() % 10000)
    processes = [
        subprocess.Popen(command, cwd=folder / "work", stdout=subprocess.DEVNULL, env={
            **env, "RANK": str(r), "WORLD_SIZE": str(ranks), "LOCAL_RANK": str(r), "LOCAL_WORLD_SIZE": str(ranks),
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}) for r in range(ranks)
    ]
    codes = [p.wait() for p in processes]
    assert not any(codes), codes
    return round(time.monotonic() - begun, 1)


def main() -> int:
    """Measure both, print, and append to a record."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--image", type=Path, required=True)
    parser.add_argument("--ranks", type=int, default=8, help="0: no timing")
    parser.add_argument("--kinds", nargs="*", default=["checkout", "staged"])
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir="/var/tmp") as name:
        folder = Path(name)
        prepare(folder, args.image)
        for kind in args.kinds:
            found = {"kind": kind, "cores": os.cpu_count(), **trace(kind, folder)}
            if args.ranks:
                found |= {"ranks": args.ranks, "seconds": seconds(kind, folder, args.ranks)}
            line = json.dumps(found)
            print(line, flush=True)
            if args.out:
                with open(args.out, "a") as stream:
                    stream.write(line + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
