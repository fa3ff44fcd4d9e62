"""What a machine with a GPU can show in one call of a few minutes; ``make gpu-check`` runs it.

1. builds the kernels for the GPUs of this machine (where the compiler is here);
2. runs the tests marked gpu: every op against fp64, attention, half precisions, layouts of several gloo ranks;
3. times every op against eager torch, torch.compile, apex and Liger, and attention by provider;
4. writes benchmarks/results/gpu-check-DEVICE.json.

Each part runs even if one before failed; exit 1 if any did. What a part prints is shown when it has ended, and kept in
runs/gpu-check. A quarter of an hour without anything to install or compile: scripts/gpu_session.sh.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

from gpu_session import device_name  # noqa: E402
from part_runner import Part, run_all  # noqa: E402


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


def parts(kind: str, archs: Sequence[str], table: Path) -> list[Part]:
    """Build, tests, times."""
    python = sys.executable
    return [
        Part("build", [python, "kernels/build.py", "binding", "cpu", kind, "--archs", ",".join(archs)], 1800.0,
             "kernels for the GPUs of this machine", least_s=60.0),
        Part("tests", [python, "scripts/run_tests.py", "--no-lint", "-m", "gpu"], 1800.0, "the tests marked gpu",
             least_s=120.0),
        Part("times", [python, "benchmarks/gpu_kernels.py", "--json", str(table)], 1800.0,
             "times and rates of every op", least_s=60.0),
    ]


def main(argv: list[str] | None = None) -> int:
    """Run the parts; see the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=0.0, help="of it all; default: as long as it takes")
    args = parser.parse_args(argv)
    os.chdir(ROOT)
    kind, archs = architectures()
    if not kind:
        print("gpu-check: torch sees no GPU here", file=sys.stderr)
        return 3
    table = ROOT / "benchmarks" / "results" / f"gpu-check-{device_name('cuda')}.json"
    folder = ROOT / "runs" / "gpu-check"
    folder.mkdir(parents=True, exist_ok=True)
    ends = time.monotonic() + 60 * args.minutes if args.minutes > 0 else None
    outcomes = run_all(parts(kind, archs, table), folder, ends, after=lambda o: show(folder / f"{o.name}.txt"))
    if table.exists():
        found = json.loads(table.read_text())
        found["gpu_check"] = {o.name: {"exit": o.exit, "seconds": o.seconds} for o in outcomes}
        table.write_text(json.dumps(found, indent=1) + "\n")
        print(f"table: {table.relative_to(ROOT)}")
    return int(any(o.exit for o in outcomes))


def show(output: Path) -> None:
    """Print what a part said; a part that never began said nothing."""
    if output.exists():
        print(output.read_text(errors="replace"), flush=True)


if __name__ == "__main__":
    sys.exit(main())
