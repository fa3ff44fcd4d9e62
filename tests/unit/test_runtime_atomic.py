"""Files that are whole or absent: what a write that fails at any of its calls leaves."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megatron_port.core.checkpoint.shard import write_chunks
from megatron_port.core.dist.rank import LeaseLost
from megatron_port.core.errors import CheckpointError, EnvironmentFault
from megatron_port.core.io.files import atomic_file, write_bytes, write_output, write_text
from megatron_port.run.run_files import write_new

NEW = b"new" * 5000  # more than a buffer: the write itself meets the full disk


def contents(folder: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in folder.iterdir()}


def full(*_: object, **__: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def full_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make every file that is opened by its descriptor refuse its data, as a full disk does."""
    real = os.fdopen

    def to_full_device(handle: int, *args: Any) -> Any:
        device = os.open("/dev/full", os.O_WRONLY)
        os.dup2(device, handle)
        os.close(device)
        return real(handle, *args)

    monkeypatch.setattr(os, "fdopen", to_full_device)


FAULTS: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "write": full_stream,
    "fsync": lambda patch: patch.setattr(os, "fsync", full),
    "rename": lambda patch: patch.setattr(os, "replace", full),
}


@pytest.mark.parametrize("call", FAULTS)
@pytest.mark.parametrize("before", [{}, {"file": b"old"}], ids=["absent", "old"])
def test_a_write_that_fails_leaves_the_old_file_and_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, before: dict[str, bytes]
) -> None:
    for name, data in before.items():
        (tmp_path / name).write_bytes(data)
    with monkeypatch.context() as patch, pytest.raises(OSError, match="No space left on device"):
        FAULTS[call](patch)
        write_bytes(tmp_path / "file", NEW)
    assert contents(tmp_path) == before
    write_bytes(tmp_path / "file", NEW)
    assert contents(tmp_path) == {"file": NEW}


@pytest.mark.parametrize("call", FAULTS)
def test_a_checkpoint_file_names_what_was_free_before_it_was_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    with monkeypatch.context() as patch, pytest.raises(CheckpointError, match=rf"needed {len(NEW)} bytes, free \d+"):
        FAULTS[call](patch)
        write_chunks(tmp_path / "shard", len(NEW), [memoryview(NEW)[:7000], NEW[7000:]])
    assert contents(tmp_path) == {}


def test_an_error_or_an_interrupt_of_the_block_ends_the_write(tmp_path: Path) -> None:
    write_text(tmp_path / "file", "old")
    for error in (ValueError, KeyboardInterrupt):
        with pytest.raises(error), atomic_file(tmp_path / "file") as stream:
            stream.write(NEW)
            raise error
    assert contents(tmp_path) == {"file": b"old"}


def test_a_guard_that_refuses_keeps_the_old_file(tmp_path: Path) -> None:
    """The data are on disk when the guard is asked, and nothing has taken the name yet."""
    write_text(tmp_path / "file", "old")

    def lost() -> None:
        assert sorted(len(data) for data in contents(tmp_path).values()) == [3, len(NEW)]
        raise LeaseLost("taken over")

    with pytest.raises(LeaseLost):
        write_bytes(tmp_path / "file", NEW, guard=lost)
    assert contents(tmp_path) == {"file": b"old"}


def test_file_and_directory_are_synced_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    fsync, replace = os.fsync, os.replace

    def synced(handle: int) -> None:
        calls.append("directory" if stat.S_ISDIR(os.fstat(handle).st_mode) else "file")
        fsync(handle)

    def renamed(*paths: Path) -> None:
        calls.append("rename")
        replace(*paths)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "replace", renamed)
    write_text(tmp_path / "file", "x")
    assert calls == ["file", "rename", "directory"]
    write_text(tmp_path / "file", "y", durable=False)
    assert calls[3:] == ["rename"] and contents(tmp_path) == {"file": b"y"}


def test_a_directory_that_cannot_be_synced_is_no_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fsync = os.fsync

    def no_such_call(handle: int) -> None:
        if stat.S_ISDIR(os.fstat(handle).st_mode):
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        fsync(handle)

    monkeypatch.setattr(os, "fsync", no_such_call)
    write_text(tmp_path / "file", "x")
    assert contents(tmp_path) == {"file": b"x"}


def test_output_for_a_user(tmp_path: Path) -> None:
    path = tmp_path / "a" / "job.sh"
    write_output(path, "#!/bin/bash\necho é\n", mode=0o755)
    assert path.read_text() == "#!/bin/bash\necho é\n" and path.stat().st_mode & 0o777 == 0o755
    (tmp_path / "file").write_text("")
    with pytest.raises(EnvironmentFault, match=r"job.sh cannot be written: .*; choose another name$"):
        write_output(tmp_path / "file" / "job.sh", "x", advice="choose another name")
    assert sorted(p.name for p in tmp_path.rglob("*")) == ["a", "file", "job.sh"]


def test_a_checkpoint_folder_that_was_removed_is_not_made_again(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="No such file"):
        write_chunks(tmp_path / "gone" / "shard", 1, [b"x"])
    assert contents(tmp_path) == {}


def test_the_first_writer_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert write_new(tmp_path / "file", b"first") and not write_new(tmp_path / "file", b"second")

    def no_links(*_: object) -> None:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(os, "link", no_links)
    assert not write_new(tmp_path / "file", b"third") and write_new(tmp_path / "other", b"first")
    assert contents(tmp_path) == {"file": b"first", "other": b"first"}
