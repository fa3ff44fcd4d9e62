"""Several workers of ``make test``: none shares a file with another, whatever the releases of pytest and xdist."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
TEST = """
import os, pathlib, time, pytest
@pytest.mark.parametrize("i", range(4))
def test_where(i):
    time.sleep(0.05)  # so that the other worker could take the next one
    with open(pathlib.Path(__file__).with_suffix(".txt"), "a") as out:
        out.write(os.environ["PYTEST_XDIST_WORKER"] + "\\n")
"""


def run_tests() -> Any:
    """scripts/run_tests.py as a module."""
    spec = importlib.util.spec_from_file_location("run_tests", ROOT / "scripts" / "run_tests.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def arguments(workers: int) -> list[str]:
    """What scripts/run_tests.py adds for the whole suite, for so many workers."""
    spread: list[str] = run_tests().spread()
    if not spread:
        pytest.skip("one core: one worker")
    return ["-n", str(workers), *spread[2:]]


def ran(tmp_path: Path, workers: int, *files: Path) -> list[set[str]]:
    """The workers that ran each of these files of four tests."""
    pytest.importorskip("xdist", reason="pytest-xdist is not installed")
    for file in files:
        file.parent.mkdir(exist_ok=True)
        file.write_text(TEST)
    shutil.copy(ROOT / "tests" / "conftest.py", tmp_path)
    env = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments(workers)], cwd=tmp_path, env=env,
        capture_output=True, text=True, timeout=200, check=False,
    )
    assert done.returncode == 0 and f"{4 * len(files)} passed" in done.stdout, done.stdout + done.stderr
    return [set(file.with_suffix(".txt").read_text().split()) for file in files]


def test_a_file_stays_with_one_worker(tmp_path: Path) -> None:
    names = (("unit", "a"), ("unit", "b"), ("kernels", "c"), ("kernels", "d"))
    workers = ran(tmp_path, 2, *(tmp_path / folder / f"test_{name}.py" for folder, name in names))
    assert [len(w) for w in workers] == [1, 1, 1, 1] and workers[2] == workers[3], workers
    assert len(set.union(*workers)) == 2, "one worker did everything"


def test_a_worker_more_than_cores_runs_what_waits_first(tmp_path: Path) -> None:
    cores = len(os.sched_getaffinity(0))
    if cores > 4:
        pytest.skip("many workers for one question")
    names = [("slurm", "a"), ("faults", "z"), *(("unit", name) for name in "bcdefgh"[:2 * cores])]
    files = [tmp_path / folder / f"test_{name}.py" for folder, name in names]
    waiting, after, *others = ran(tmp_path, cores + 1, *files)
    assert len(waiting) == 1 and waiting == after, (waiting, after)
    used = {worker for ran_by in others for worker in ran_by}
    assert used - waiting and len(used - waiting) == cores, others


def test_a_few_failures_run_again_alone_and_faults_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("PYTEST_")]:
        monkeypatch.delenv(name)
    file = tmp_path / "test_x.py"
    file.write_text("import pathlib\n"
                    "def test_race(): pathlib.Path(__file__).with_suffix('.ran').touch()\n"
                    "def test_fault(): assert False\n")
    again = run_tests().pass_alone
    assert again([f"{file}::test_race"]) and file.with_suffix(".ran").exists()
    assert not again([f"{file}::test_race", f"{file}::test_fault"])
    file.with_suffix(".ran").unlink()
    assert not again([f"{file}::test_race"] * 4) and not file.with_suffix(".ran").exists()  # too many: not tried
    assert not again([])
