"""Run the linters and the tests, and end with what was skipped and why.

``make test`` calls it inside .venv. Arguments that are not its own go to pytest. The exit code is
pytest's, or 1 when only a linter complains. SLOW=1 in the environment adds the tests marked slow.
"""

from __future__ import annotations

import argparse
import collections
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent


def lint() -> int:
    """ruff, then mypy; prints what they say. Returns how many of them complained."""
    complaints = 0
    for command in (["ruff", "check", "--quiet", "."], ["mypy", "--no-error-summary"]):
        started = time.monotonic()
        code = subprocess.run([sys.executable, "-m", *command], cwd=ROOT).returncode
        print(f"{command[0]}: {'ok' if code == 0 else 'complains'} ({time.monotonic() - started:.0f} s)", flush=True)
        complaints += code != 0
    return complaints


def no_gpu() -> str:
    """Why the tests marked gpu cannot run, or nothing."""
    import torch

    return "" if torch.cuda.is_available() else "no GPU that torch can use"


def no_slurm() -> str:
    """Why the tests marked slurm cannot run, or nothing."""
    lacking = [name for name in ("sbatch", "slurmctld", "slurmd", "munged") if not shutil.which(name)]
    if lacking:
        return f"no {', '.join(lacking)} here (apt-get install slurm-wlm munge iproute2)"
    return "" if os.geteuid() == 0 else "starting a private SLURM needs root"


def not_slow() -> str:
    """Why the tests marked slow do not run, or nothing."""
    return "" if os.environ.get("SLOW") == "1" else "longer than a minute; SLOW=1 runs it"


class Report:
    """A pytest plugin: skips what the machine cannot do, and sums up times and reasons."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = collections.defaultdict(float)
        self.counts: dict[str, int] = collections.defaultdict(int)
        self.skipped: dict[str, int] = collections.defaultdict(int)

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        # Pure tests first: they say in seconds what a layout would say in minutes.
        order = ["unit", "kernels", "distributed", "slurm", "faults", "e2e"]
        items.sort(key=lambda item: order.index(folder(item.nodeid)) if folder(item.nodeid) in order else len(order))
        for marker, reason_of in (("gpu", no_gpu), ("slurm", no_slurm), ("slow", not_slow)):
            marked = [item for item in items if item.get_closest_marker(marker)]
            reason = reason_of() if marked else ""
            for item in marked if reason else []:
                item.add_marker(pytest.mark.skip(reason=reason))

    def pytest_runtest_logreport(self, report: Any) -> None:
        where = folder(report.nodeid)
        self.seconds[where] += report.duration
        if report.when == "call" and not report.skipped:
            self.counts[where] += 1
        if report.skipped and not hasattr(report, "wasxfail"):
            self._skip(report.longrepr)

    def pytest_collectreport(self, report: Any) -> None:
        if report.skipped:
            self._skip(report.longrepr)

    def _skip(self, where: Any) -> None:
        text = where[2] if isinstance(where, tuple) else str(where)
        self.skipped[text.removeprefix("Skipped: ")] += 1

    def print(self, seconds: float) -> None:
        """The closing lines of ``make test``."""
        for name, spent in self.seconds.items():
            print(f"  {name:<12} {self.counts[name]:>5} tests {spent:>7.1f} s")
        if self.skipped:
            print("skipped:")
            for reason, count in sorted(self.skipped.items(), key=lambda pair: -pair[1]):
                print(f"  {count} × {reason}")
        else:
            print("skipped: nothing")
        print(f"total {seconds / 60:.1f} min", flush=True)


def folder(nodeid: str) -> str:
    """``unit`` of ``tests/unit/test_x.py::test_y``."""
    parts = nodeid.split("/")
    return parts[1] if len(parts) > 2 else parts[0]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lint-only", action="store_true", help="no tests")
    parser.add_argument("--no-lint", action="store_true", help="no linters")
    own, rest = parser.parse_known_args()
    os.chdir(ROOT)
    started = time.monotonic()
    complaints = 0 if own.no_lint else lint()
    if own.lint_only:
        return 1 if complaints else 0
    # One thread a rank: eight ranks with a pool each would fight over the cores.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    report = Report()
    # The summary of skips by place is pytest's -rs; by reason it is ours. Paths given by the user replace tests/.
    paths = [] if any(Path(argument.split("::")[0]).exists() for argument in rest) else ["tests"]
    code = int(pytest.main(["-q", "-rs", *rest, *paths], plugins=[report]))
    report.print(time.monotonic() - started)
    if complaints:
        print("a linter complained, see above")
    return code or (1 if complaints else 0)


if __name__ == "__main__":
    raise SystemExit(main())
