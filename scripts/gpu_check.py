"""What a machine with a GPU can show in one call of a few minutes; ``make gpu-check`` runs it.

1. builds the kernels for the GPUs of this machine (where the compiler is here);
2. runs the tests marked gpu: every op against fp64, attention, half precisions, layouts of several gloo ranks;
3. times every op against eager torch, torch.compile, apex and Liger, and attention by provider;
4. writes benchmarks/results/gpu-check-DEVICE.json.

Each part runs even if one before failed; exit 1 if any did.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def architectures() -> tuple[str, list[str]]:
    """(cuda or rocm, architectures of the visible GPUs)."""
    import torch

    if not torch.cuda.is_available():
        return "", []
    every = range(torch.cuda.device_count())
    if torch.version.hip:
        return "rocm", sorted({torch.cuda.get_device_properties(i).gcnArchName.split(":")[0] for i in every})
    pairs = {torch.cuda.get_device_capability(i) for i in every}
    return "cuda", [f"sm_{major}{minor}" for major, minor in sorted(pairs)]


def main() -> int:
    """See the module's docstring."""
    os.chdir(ROOT)
    kind, archs = architectures()
    if not kind:
        print("gpu-check: torch sees no GPU here", file=sys.stderr)
        return 3
    import torch

    device = re.sub(r"[^a-z0-9]+", "-", torch.cuda.get_device_name().lower()).strip("-")
    table = ROOT / "benchmarks" / "results" / f"gpu-check-{device}.json"
    python = sys.executable
    parts = {
        "build": [python, "kernels/build.py", "binding", "cpu", kind, "--archs", ",".join(archs)],
        "tests": [python, "scripts/run_tests.py", "--no-lint", "-m", "gpu"],
        "times": [python, "benchmarks/gpu_kernels.py", "--json", str(table)],
    }
    outcome: dict[str, dict[str, float | int]] = {}
    for name, command in parts.items():
        started = time.monotonic()
        print(f"== {name}: {' '.join(command[1:])}", flush=True)
        code = subprocess.run(command).returncode
        outcome[name] = {"exit": code, "seconds": round(time.monotonic() - started, 1)}
    print("gpu-check: " + ", ".join(f"{n} {'ok' if not o['exit'] else 'failed'} ({o['seconds']} s)"
                                    for n, o in outcome.items()))
    if table.exists():
        found = json.loads(table.read_text())
        found["gpu_check"] = outcome
        table.write_text(json.dumps(found, indent=1) + "\n")
        print(f"table: {table.relative_to(ROOT)}")
    return int(any(o["exit"] for o in outcome.values()))


if __name__ == "__main__":
    sys.exit(main())
