"""Run the linters and the tests, and end with what was skipped and why.

``make test`` calls it inside .venv: a worker a core. Which tests share a worker and what comes first,
tests/conftest.py says. Arguments that are not its own go to pytest, which then runs in one process. The exit code is
pytest's, or 1 when only a linter complains. SLOW=1 in the environment adds the tests marked slow.

Up to three tests that failed in the whole suite run again, alone. Hundreds of processes share its cores, and a wait
that was too short there says nothing of the code. A test that passes alone is named at the end, with how it failed
before: it has a race, and so may what it tests.
"""

from __future__ import annotations

import argparse
import collections
import compileall
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
MOST_WORKERS = 8
AGAIN = 3
"""More failures than this are no accident of timing."""


def lint() -> int:
    """Run ruff, mypy and the readability check; print what they say, return how many complained."""
    complaints = 0
    linters = {"ruff": ["-m", "ruff", "check", "--quiet", "."], "mypy": ["-m", "mypy", "--no-error-summary"],
               "readability": ["scripts/readability.py"]}
    for name, command in linters.items():
        started = time.monotonic()
        code = subprocess.run([sys.executable, *command], cwd=ROOT).returncode
        print(f"{name}: {'ok' if code == 0 else 'complains'} ({time.monotonic() - started:.0f} s)", flush=True)
        complaints += code != 0
    return complaints


class Report:
    """A pytest plugin: sums up times, and reasons of skipping."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = collections.defaultdict(float)
        self.counts: dict[str, int] = collections.defaultdict(int)
        self.skipped: dict[str, int] = collections.defaultdict(int)
        self.failed: dict[str, str] = {}

    def pytest_runtest_logreport(self, report: Any) -> None:
        where = folder(report.nodeid)
        self.seconds[where] += report.duration
        if report.when == "call" and not report.skipped:
            self.counts[where] += 1
        if report.failed:
            crash = getattr(report.longrepr, "reprcrash", None)
            said = crash.message if crash else str(report.longrepr)
            self.failed.setdefault(report.nodeid, said.splitlines()[0] if said else "")
        if report.skipped and not hasattr(report, "wasxfail"):
            self._skip(report.longrepr)

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed:
            self.failed.setdefault(report.nodeid, "was not collected")
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


def spread() -> list[str]:
    """pytest's arguments for the whole suite: a worker a core, and one more for SLURM's tests, which wait for jobs
    (tests/conftest.py)."""
    waits = os.geteuid() == 0 and shutil.which("slurmctld") is not None
    workers = min(len(os.sched_getaffinity(0)), MOST_WORKERS) + waits
    return ["-n", str(workers), "--dist", "loadscope", "--no-loadscope-reorder"] if workers > 1 else []


def pass_alone(names: list[str]) -> bool:
    """Run these tests once more, in a process of their own; do they all pass?"""
    if not 0 < len(names) <= AGAIN:
        return False
    print(f"again, alone: {', '.join(names)}", flush=True)
    return subprocess.run([sys.executable, "-m", "pytest", "-q", *names], cwd=ROOT).returncode == 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lint-only", action="store_true", help="no tests")
    parser.add_argument("--no-lint", action="store_true", help="no linters")
    own, rest = parser.parse_known_args()
    os.chdir(ROOT)
    started = time.monotonic()
    if own.lint_only:
        return 1 if lint() else 0
    # Hundreds of processes import the package and the tests' helpers; where Python may not write bytecode each would
    # compile them, 0.3 s, and every worker would rewrite all assertions, 7 s.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    sys.dont_write_bytecode = False
    compileall.compile_dir(ROOT / "megatron_port", quiet=2)
    # Beside the tests, whose workers wait now and then; mypy without its cache takes a minute.
    linters = None if own.no_lint else subprocess.Popen(
        [sys.executable, __file__, "--lint-only"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    # One thread per rank: eight ranks with a pool each would fight over the cores.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    report = Report()
    # The summary of skips by place is pytest's -rs; by reason it is ours.
    code = int(pytest.main(["-q", "-rs", *(rest or spread())], plugins=[report]))
    passed_alone = not rest and code == pytest.ExitCode.TESTS_FAILED and pass_alone(list(report.failed))
    said = linters.communicate()[0] if linters else ""
    report.print(time.monotonic() - started)
    print(said, end="")
    if passed_alone:
        code = 0
        print("passed only when run again, alone; look for a race in each:")
        for name, message in report.failed.items():
            print(f"  {name}\n    failed before: {message}")
    complaints = linters is not None and linters.returncode != 0
    if complaints:
        print("a linter complained, see above")
    return code or (1 if complaints else 0)


if __name__ == "__main__":
    raise SystemExit(main())
