"""What a session on a GPU runs on: the card with its power limit and clocks, ``nvidia-smi -q``, findings of ``doctor``.

    python scripts/gpu_env.py --device cuda --out env.json
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT)]

from benchmarks.compare.child import ends_at  # noqa: E402
from benchmarks.compare.results import hardware, write  # noqa: E402

RUN = '[model]\nnum_layers = 2\nhidden_size = 256\nnum_attention_heads = 4\n[data]\nsynthetic = true\n'


def said_by(command: list[str], timeout_s: float) -> str:
    """Return what a program prints; why it did not run, in place of it."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, cwd=ROOT, check=False)
    except (OSError, subprocess.SubprocessError) as error:
        return f"{type(error).__name__}: {error}"
    return done.stdout or done.stderr


def first_object(text: str) -> dict[str, Any] | None:
    """Return the first JSON object in a text, whatever stands around it."""
    try:
        found: dict[str, Any] = json.JSONDecoder().raw_decode(text, text.index("{"))[0]
        return found
    except ValueError:
        return None


def main(argv: list[str] | None = None) -> int:
    """Ask and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help="cuda is also ROCm's name")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args(argv)
    made: dict[str, Any] = {"command": " ".join(["scripts/gpu_env.py", *(sys.argv[1:] if argv is None else argv)]),
                            "hardware": hardware(args.device, 1)}
    write(args.out, made)
    made["nvidia_smi"] = said_by(["nvidia-smi", "-q", "-d", "POWER,CLOCK,ECC,PERFORMANCE,MEMORY"], 10.0)
    write(args.out, made)
    run = args.out.with_name("doctor.toml")
    run.write_text(RUN)
    left = (ends_at(0.0) or time.monotonic() + 60.0) - time.monotonic()
    text = said_by([sys.executable, "-m", "megatron_port", "doctor", str(run), "--json"], max(1.0, left))
    made["doctor"] = first_object(text) or {"failed": text[-2000:]}
    write(args.out, made)
    print(json.dumps(made["hardware"]))
    return int("failed" in made["doctor"])


if __name__ == "__main__":
    sys.exit(main())
