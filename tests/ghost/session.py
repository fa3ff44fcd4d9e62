"""Rehearse ``scripts/gpu_session.sh`` on the ghost machine: both commands on both cards, and kills at random moments.

    python tests/ghost/session.py [--python ENV/bin/python] [--cards H200 H100] [--kills 10] [--record]

The session's own script runs as on a GPU, at tiny sizes and with numbers (answers.py): torch's operators and the own
kernels compute, so that its checks against fp64, the CPU and steps call by call mean what they say. Times mean nothing,
but each command must end within its seconds. Then command a is killed, with all that it started, at random moments:
every figure that was announced must be in its file, and every file must be whole. The environment needs pytest besides
what training needs. Exit 1: a part left no file, a check failed, a command took too long, or a figure was lost.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from environment import Torch
from options import HERE, ROOT, built_for, chosen_torch, commit, parser

RECORD = ROOT / "benchmarks" / "results" / "ghost-session.json"
SECONDS = {"a": 420.0, "b": 300.0}
KILLED_PARTS = ("recorded", "compare-tiny-bf16", "ops", "epilogues")
"""Those that leave figures one after another."""
WRITTEN = re.compile(r"^  (\S+): figure (\d+) is written$", re.M)


def environment(torch: Torch, scratch: Path, card: str) -> dict[str, str]:
    """Return the variables under which a program sees the ghost machine, numbers included."""
    built = built_for(torch)
    paths = [str(HERE / "autoload"), str(ROOT)]
    return {
        **os.environ, "LD_PRELOAD": str(built / "libghost.so"), "LD_LIBRARY_PATH": str(built),
        "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1", "GHOST_DEVICES": "1", "GHOST_COMPUTE": "1",
        "GHOST_CPU_DRAWS": "1", "GHOST_H100": str(int(card == "H100")), "PYTHON": str(torch.python),
        "GHOST_KERNELS": str(built / "kernels" / "libmp_cuda.so"), "GHOST_MEETING": str(scratch),
    }


def session(which: str, out: Path, *more: str) -> list[str]:
    """The command line of a session."""
    return [str(ROOT / "scripts" / "gpu_session.sh"), which, "--tiny", "--out", str(out), *more]


def peers_of(row: dict[str, Any]) -> dict[str, str]:
    """Size and peer → state, of a comparison's row."""
    sizes = (row["data"] or {}).get("sizes", [])
    return {f"{size['size']} {peer['peer']}": peer["state"] for size in sizes for peer in size["peers"]}


def rehearse(which: str, out: Path, variables: dict[str, str]) -> dict[str, Any]:
    """Run a command to its end; return what it left."""
    began, of = time.monotonic(), commit()
    code = subprocess.run(session(which, out), env=variables, check=False).returncode
    seconds = round(time.monotonic() - began)
    (path,) = out.glob(f"gpu-session-*-{which}.json")
    made = json.loads(path.read_text())
    parts = made["parts"]
    empty = [name for name, row in parts.items() if row["data"] is None]
    return {
        "commit": of, "seconds": seconds, "of": SECONDS[which], "exit": code, "without_a_file": empty,
        "card": made["card"],
        "layers": [row["command"].split("--layers ")[1].split()[0] for row in parts.values()
                   if "--layers " in row["command"]],
        "parts": {name: {key: row[key] for key in ("state", "seconds")} | ({"peers": found} if (found := peers_of(row))
                  else {}) for name, row in parts.items()},
        "ok": not code and not empty and seconds <= SECONDS[which],
    }


def lost(out: Path) -> list[str]:
    """Return what a killed session announced and has not kept, and files that are not whole."""
    found = []
    for path in out.glob("*.json"):
        try:
            json.loads(path.read_text())
        except ValueError as error:
            found.append(f"{path.name}: {error}")
    for text in out.glob("*.txt"):
        announced: dict[str, int] = {}
        for peer, number in WRITTEN.findall(text.read_text(errors="replace")):
            announced[peer] = max(announced.get(peer, 0), int(number))
        kept = figures(text.with_suffix(".json")) if announced else {}
        found += [f"{text.stem} {peer}: {kept.get(peer, 0)} of {count} figures"
                  for peer, count in announced.items() if kept.get(peer, 0) < count]
    ops = (out / "ops.txt").read_text(errors="replace") if (out / "ops.txt").exists() else ""
    printed, kept_ops = len(re.findall(r" fwd +\d", ops)), 0
    if printed:
        kept_ops = len(json.loads((out / "ops.json").read_text())["ops"])
    return found + ([f"ops: {kept_ops} of {printed}"] if kept_ops < printed else [])


def figures(path: Path) -> dict[str, int]:
    """Peer → figures that a comparison's file holds."""
    made = json.loads(path.read_text())
    if "sizes" not in made:
        return {peer: len(row.get("seconds", [])) for peer, row in made["peers"].items()}
    return {row["peer"]: len(row["seconds"]["all"]) for size in made["sizes"] for row in size["peers"]
            if "seconds" in row}


def kill(out: Path, variables: dict[str, str], after_s: float) -> dict[str, Any]:
    """Start command a's measuring parts, kill it and all that it started after some seconds, and look at its files."""
    import psutil

    process = subprocess.Popen(session("a", out, "--only", *KILLED_PARTS), env=variables, stdout=subprocess.DEVNULL,
                               stderr=subprocess.DEVNULL)
    began = time.monotonic()
    while time.monotonic() < began + after_s and process.poll() is None:
        time.sleep(0.05)
    ended = process.poll() is not None
    whole = [] if ended else [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
    for member in whole:
        try:
            member.kill()
        except psutil.NoSuchProcess:
            continue
    process.wait()
    texts = [WRITTEN.findall(path.read_text(errors="replace")) for path in out.glob("*.txt")]
    return {"commit": commit(), "after_s": round(after_s, 1), "ended_before": ended,
            "figures_announced": sum(map(len, texts)), "lost": lost(out)}


def main() -> int:
    """Rehearse; print what each part says and record it."""
    made = parser(__doc__)
    made.add_argument("--out", type=Path, default=ROOT / "runs" / "ghost-session")
    made.add_argument("--cards", nargs="*", choices=["H200", "H100"], default=["H200", "H100"])
    made.add_argument("--kills", type=int, default=10)
    made.add_argument("--within", type=float, default=90.0, metavar="SECONDS", help="the latest moment of a kill")
    made.add_argument("--seed", type=int, default=1)
    made.add_argument("--record", action="store_true", help=f"write {RECORD.name}")
    a = made.parse_args()
    torch, draw = chosen_torch(a.python), random.Random(a.seed)
    row: dict[str, Any] = {"torch": torch.version, "cards": {}, "kills": []}
    with tempfile.TemporaryDirectory() as scratch:
        for card in a.cards:
            out, variables = a.out / card, environment(torch, Path(scratch), card)
            row["cards"][card] = {which: rehearse(which, out, variables) for which in SECONDS}
            save(a, row)
        for number in range(a.kills):
            out = a.out / f"kill-{number}"
            variables = environment(torch, Path(scratch), a.cards[0] if a.cards else "H200")
            row["kills"].append(kill(out, variables, draw.uniform(5.0, a.within)))
            save(a, row)
    print(json.dumps(row, indent=1))
    ran = [found for card in row["cards"].values() for found in card.values()]
    return int(not all(found["ok"] for found in ran) or any(found["lost"] for found in row["kills"]))


def save(a: argparse.Namespace, row: dict[str, Any]) -> None:
    """Keep what is known so far."""
    if a.record:
        RECORD.write_text(json.dumps(row, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
