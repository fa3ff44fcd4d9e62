"""Whoever can read the rendezvous store, as every local user can, does not get the hub's secret."""

from __future__ import annotations

import json
import os
import socket
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from megatron_port.core.dist.rank import ProcessInfo
from megatron_port.run.rendezvous import connect
from megatron_port.run.watch import wire as secret
from megatron_port.run.watch.wire import look_up, publish

WHERE: dict[str, Any] = {"address": "127.0.0.1", "port": 4321, "secret": "0123456789abcdef0123456789abcdef"}
SHARED = "f00dfacef00dfacef00dfacef00dface"


def rank(number: int, shared: str, world: int = 3, port: int = 1) -> ProcessInfo:
    return ProcessInfo(number, world, number, world, 0, 1, "127.0.0.1", port, "local", "h", secret=shared)


@pytest.mark.parametrize("shared", [SHARED, ""])
def test_the_ranks_learn_what_a_reader_of_the_store_does_not(tmp_path: Path, shared: str) -> None:
    """On a real TCPStore, with everything in it read by a client that knows nothing."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    store = connect(rank(0, shared, 1, port), 10.0)
    publish(store, WHERE, rank(0, shared), tmp_path)
    stranger = dist.TCPStore("127.0.0.1", port, None, False, wait_for_workers=False)
    seen = "\n".join(f"{key} {stranger.get(key)!r}" for key in stranger.list_keys())
    assert "watch" in seen, seen
    for text in (WHERE["secret"], SHARED):
        assert text not in seen and text.encode().hex() not in seen, seen
    for number in (1, 2):
        assert look_up(store, rank(number, shared), tmp_path) == WHERE
    assert list(tmp_path.iterdir()) == [], "the last reader removes the file"


def test_only_the_owner_can_read_the_file(tmp_path: Path) -> None:
    store = dist.HashStore()
    before = os.umask(0)
    try:
        publish(store, WHERE, rank(0, ""), tmp_path / "run")
    finally:
        os.umask(before)
    (path,) = (tmp_path / "run").iterdir()
    assert path.stat().st_mode & 0o777 == 0o600 and path.stat().st_uid == os.geteuid()


def forged(kind: str, store: dist.Store, folder: Path) -> None:
    """What another user could put in the way, with all of the store at hand."""
    (path,) = folder.iterdir()
    if kind == "readable":
        path.chmod(0o640)
    elif kind == "link":
        (folder / "other").write_text(json.dumps(WHERE))
        (folder / "other").chmod(0o600)
        path.unlink()
        path.symlink_to(folder / "other")
    elif kind == "owner":
        os.chown(path, 12345, 12345)
    elif kind == "name":
        store.set("watch", json.dumps({"file": "../run/" + path.name}))
    else:
        store.set("watch", json.dumps(WHERE))


@pytest.mark.parametrize("kind", ["readable", "link", "name", "plain", pytest.param(
    "owner", marks=pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away"))])
def test_a_file_that_others_could_have_written_is_refused(tmp_path: Path, kind: str) -> None:
    store, folder = dist.HashStore(), tmp_path / "run"
    publish(store, WHERE, rank(0, ""), folder)
    forged(kind, store, folder)
    with pytest.raises(OSError, match="another user's|not from this run|symbolic links"):
        look_up(store, rank(1, ""), folder)


@pytest.mark.parametrize("field", ["body", "mac", "nonce", "plain", "other"])
def test_a_record_that_was_changed_is_refused(tmp_path: Path, field: str) -> None:
    store = dist.HashStore()
    publish(store, WHERE, rank(0, SHARED), tmp_path)
    record = json.loads(store.get("watch"))
    if field == "plain":
        record = dict(WHERE)
    elif field == "other":  # an earlier attempt's, sealed with another secret
        publish(store, WHERE, rank(0, SHARED[::-1]), tmp_path)
        record = json.loads(store.get("watch"))
    else:
        record[field] = f"{int(record[field], 16) ^ 1:0{len(record[field])}x}"
    store.set("watch", json.dumps(record))
    with pytest.raises(PermissionError, match="not from this run"):
        look_up(store, rank(1, SHARED), tmp_path)


def test_no_hub_is_told_and_a_missing_file_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(secret, "APPEARS_S", 0.1)
    for shared in (SHARED, ""):
        store = dist.HashStore()
        publish(store, {}, rank(0, shared), tmp_path)
        assert look_up(store, rank(1, shared), tmp_path) == {}
    publish(store, WHERE, rank(0, ""), tmp_path)
    with pytest.raises(FileNotFoundError, match="same on all nodes.*MEGATRON_PORT_SECRET"):
        look_up(store, replace(rank(1, "")), tmp_path / "elsewhere")
    (tmp_path / "file").write_text("")
    store = dist.HashStore()
    with pytest.raises(OSError):
        publish(store, WHERE, rank(0, ""), tmp_path / "file")
    assert look_up(store, rank(1, ""), tmp_path) == {}, "the others do not wait"
