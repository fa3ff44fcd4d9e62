"""Modes of the files of a run under several umasks."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron_port.cli.main import main
from megatron_port.core.checkpoint.shard import write_chunks
from megatron_port.core.io.files import tighten, write_bytes, write_output
from megatron_port.run.run_files import FINISHED, OUTCOME, AttemptOutcome, write_outcome


@pytest.fixture(autouse=True)
def umask_back() -> Iterator[None]:
    before = os.umask(0o022)
    os.umask(before)
    yield
    os.umask(before)


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.mark.parametrize(("given", "file", "script"), [(0o000, 0o664, 0o755), (0o022, 0o644, 0o755),
                                                       (0o027, 0o640, 0o750), (0o077, 0o600, 0o700)])
def test_files_follow_the_umask_and_everybody_never_writes(tmp_path: Path, given: int, file: int, script: int) -> None:
    os.umask(given)
    tighten()
    (tmp_path / "plain").write_text("x")
    write_bytes(tmp_path / "corpus", b"x")
    write_chunks(tmp_path / "shard", 1, [b"x"])
    write_outcome(tmp_path, AttemptOutcome("local", FINISHED, 1))
    write_output(tmp_path / "job.sh", "true\n", mode=0o755)
    assert [mode_of(tmp_path / n) for n in ("plain", "corpus", "shard", OUTCOME, "job.sh")] == [file] * 4 + [script]


def test_every_command_tightens_the_umask() -> None:
    os.umask(0)
    assert main(["--version"]) == 0
    assert os.umask(0o022) == 0o002
