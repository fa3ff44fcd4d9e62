"""A corpus of many GB through prepare, verify, index and training: anonymous memory of every process, and times.

    python tests/faults/big_corpus.py --gigabytes 10 --out FILE

Text is synthetic JSON lines, tokens are bytes. Each command runs twice: on a few MB, which gives what the program
itself takes (imports, buffers), and on all of it; the difference may not pass ``LIMIT``. Memory is ``RssAnon`` of the
command and its children, sampled every 20 ms; file-backed pages (the mapped corpus) do not count. Used by
``make soak``.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).resolve().parents[2]
LIMIT = 1 << 30
FIRST_BATCH_S = 2.0
FIRST_BATCH = """
import json, sys, time
from megatron_port.core.config.loader import load
from megatron_port.core.data.loader import build_loaders
run = load(sys.argv[1]).config
started = time.perf_counter()
loaders = build_loaders(run, dp_rank=0, dp_size=1, need_tokens=True, need_labels=True)
loaders.train.step(0, run.batch.global_batch_size)
seconds = time.perf_counter() - started
for k in range(1, 200):
    loaders.train.step(k * run.batch.global_batch_size, run.batch.global_batch_size)
print(json.dumps(seconds))
"""


def anonymous(pid: int) -> int:
    """RssAnon in bytes; 0 where the process has gone."""
    try:
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("RssAnon"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return 0


def watched(command: list[str]) -> tuple[int, float, str]:
    """(largest RssAnon of one process, seconds, output). Raises RuntimeError if it fails."""
    started, peak = time.perf_counter(), 0
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    with tempfile.TemporaryFile("w+") as out:
        child = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, env=environment, text=True)
        process = psutil.Process(child.pid)
        while child.poll() is None:
            try:
                members = [process, *process.children(recursive=True)]
            except psutil.Error:
                break
            peak = max(peak, *(anonymous(m.pid) for m in members))
            time.sleep(0.02)
        child.wait()
        out.seek(0)
        text = out.read()
    if child.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with {child.returncode}:\n{text[-2000:]}")
    return peak, time.perf_counter() - started, text


def write_text(path: Path, size: int) -> None:
    """``size`` bytes of JSON lines: documents of 200 to 8,000 bytes, no two alike."""
    words = [f"word{i * 2654435761 % 99991}" for i in range(4096)]
    number = written = 0
    with open(path, "w", buffering=1 << 20) as out:
        while written < size:
            length = 20 + number * 7919 % 800
            at = number * 31 % 3000
            line = json.dumps({"id": number, "text": f"{number} " + " ".join((words[at:] + words)[:length])}) + "\n"
            written += out.write(line)
            number += 1


def go(folder: Path, size: int) -> dict[str, dict[str, Any]]:
    """Every command on ``size`` bytes."""
    folder.mkdir(parents=True)
    write_text(folder / "in.jsonl", size)
    run = folder / "run.toml"
    run.write_text(
        f'engine = "native"\noutput_dir = "{folder}/runs"\n'
        "[model]\nvocab_size = 257\nseq_length = 1024\n"
        f'[data]\ntrain = ["{folder}/c"]\norder = "megatron"\n[layout]\nzero_stage = 0\n'
        "[batch]\nglobal_batch_size = 8\n"
        f"[training]\nsteps = {max(size // 8192, 10)}\n")
    port = [sys.executable, "-m", "megatron_port", "data"]
    done: dict[str, dict[str, Any]] = {}
    for name, command in {
        "prepare": [*port, "prepare", f"{folder}/c", "--input", f"{folder}/in.jsonl", "--workers", "2"],
        "verify": [*port, "verify", f"{folder}/c"],
        "index": [*port, "index", str(run)],
        "training": [sys.executable, "-c", FIRST_BATCH, str(run)],
    }.items():
        peak, seconds, text = watched(command)
        done[name] = {"anonymous": peak, "seconds": round(seconds, 2)}
        if name == "training":
            done[name]["first_batch_s"] = round(float(text.splitlines()[-1]), 3)
    return done


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=10.0)
    parser.add_argument("--out", type=Path, required=True, help="a line of JSON is added here")
    parser.add_argument("--folder", type=Path, help="where the corpus lies for the time (2.2 times its size)")
    args = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="big-corpus.", dir=args.folder))
    try:
        small = go(folder / "small", 4 << 20)
        large = go(folder / "large", int(args.gigabytes * 1e9))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    grown = {name: large[name]["anonymous"] - small[name]["anonymous"] for name in large}
    ok = max(grown.values()) < LIMIT and large["training"]["first_batch_s"] < FIRST_BATCH_S
    row = {"gigabytes": args.gigabytes, "small": small, "large": large, "grown": grown, "ok": ok}
    for name in large:
        print(f"{name:10} {small[name]['anonymous'] / 2**20:7.0f} MiB on 4 MiB, "
              f"{large[name]['anonymous'] / 2**20:7.0f} MiB on {args.gigabytes:g} GB, {large[name]['seconds']:8.1f} s")
    print(f"first batch with a prebuilt index: {large['training']['first_batch_s']} s")
    with open(args.out, "a") as stream:
        stream.write(json.dumps(row) + "\n")
    return 0 if ok else 1


if __name__ == "__main__":
    raise SystemExit(main())
