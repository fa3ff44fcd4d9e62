"""Corpora and checkpoints in a store, against a real S3 server (moto) in this process, and Python's web server."""

from __future__ import annotations

import functools
import http.server
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

moto_server = pytest.importorskip("moto.server")
s3fs = pytest.importorskip("s3fs")

from test_checkpoint_roundtrip import over_threads, state, whole  # noqa: E402
from test_data_loader import corpus, loaders, rows, run_config  # noqa: E402

from megatron_port.core.checkpoint.format import Parent  # noqa: E402
from megatron_port.core.checkpoint.reader import open_checkpoint  # noqa: E402
from megatron_port.core.checkpoint.writer import Committer, save_checkpoint  # noqa: E402
from megatron_port.core.config.checks import problems  # noqa: E402
from megatron_port.core.config.schema import CheckpointConfig, RunConfig  # noqa: E402
from megatron_port.core.data.indexed import IndexedDataset, RemoteCache  # noqa: E402
from megatron_port.core.errors import CheckpointError, DamagedCheckpoint, DataError  # noqa: E402
from megatron_port.ext.corpora.fetch import RemoteTokens  # noqa: E402
from megatron_port.ext.storage import mirror  # noqa: E402
from megatron_port.ext.storage import store as store_module  # noqa: E402
from megatron_port.ext.storage.mirror import Mirror, copy_name, pull, push, push_file  # noqa: E402
from megatron_port.ext.storage.store import (  # noqa: E402
    DIGEST,
    Blocks,
    Store,
)
from megatron_port.run.config_hash import config_hash  # noqa: E402

BUCKET = "tokens"


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    server = moto_server.ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


@pytest.fixture
def bucket(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """An empty bucket, found as a user's job finds it: by the environment."""
    for name, value in {
        "AWS_ENDPOINT_URL": endpoint, "AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "us-east-1",
    }.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(store_module, "FIRST_PAUSE", 0.01)
    s3fs.S3FileSystem.clear_instance_cache()
    files = s3fs.S3FileSystem(use_listings_cache=False)
    files.mkdir(BUCKET)
    yield files
    files.rm(BUCKET, recursive=True)


def uploaded(files: Any, prefix: str) -> str:
    """Copy a corpus into the bucket; its URL."""
    for path in Path(prefix).parent.glob(f"{Path(prefix).name}.*"):
        files.put_file(str(path), f"{BUCKET}/{path.name}")
    return f"s3://{BUCKET}/{Path(prefix).name}"


@pytest.mark.parametrize("order", ["stateless", "megatron"])
def test_samples_are_those_of_the_local_corpus(bucket, tmp_path, order):
    local = [corpus(tmp_path / "in" / "a"), corpus(tmp_path / "in" / "b", documents=20, seed=1)]
    urls = [uploaded(bucket, prefix) for prefix in local]
    there = run_config(*urls, order=order, remote_cache=str(tmp_path / "cache"))
    here = run_config(*local, order=order)
    here, there = (type(here)(**{**vars(r), "output_dir": str(tmp_path / "out")}) for r in (here, there))
    for first in (0, 8, 24):
        assert rows(loaders(there).train.step(first, 8)) == rows(loaders(here).train.step(first, 8))
    assert config_hash(here) == config_hash(there), "where a corpus lies does not make another run"
    assert {p["prefix"] for p in loaders(there).data_fingerprint} == set(urls)


def blocks_behind(data: IndexedDataset) -> Blocks:
    assert isinstance(data._tokens, RemoteTokens)
    return data._tokens._blocks


def blocks_of(folder: Path) -> list[Path]:
    return sorted(p for p in folder.rglob("*") if p.is_file() and p.name.isdigit())


def test_what_was_read_is_kept_and_a_damaged_block_is_fetched_again(bucket, tmp_path, monkeypatch):
    url = uploaded(bucket, corpus(tmp_path / "in" / "a"))
    cache = RemoteCache(str(tmp_path / "cache"))
    data = IndexedDataset(url, cache)
    expected = IndexedDataset(tmp_path / "in" / "a").read(0, 1000)
    assert np.array_equal(data.read(0, 1000), expected)
    reads: list[str] = []
    monkeypatch.setattr(Store, "read", lambda self, name, *span: reads.append(name) or self._fs.cat_file(
        self.place(name), start=span[0], end=span[1]))
    assert np.array_equal(IndexedDataset(url, cache).read(0, 1000), expected) and reads == []
    block, = blocks_of(tmp_path / "cache")
    block.write_bytes(b"\1" + block.read_bytes()[1:])
    assert np.array_equal(IndexedDataset(url, cache).read(0, 1000), expected) and reads == ["a.bin"]
    assert block.read_bytes()[:-DIGEST] == (tmp_path / "in" / "a.bin").read_bytes()


def test_other_bytes_than_the_sidecar_records_are_refused(bucket, tmp_path):
    url = uploaded(bucket, corpus(tmp_path / "in" / "a"))
    tokens = bytearray((tmp_path / "in" / "a.bin").read_bytes())
    tokens[70] ^= 1
    bucket.pipe_file(f"{BUCKET}/a.bin", bytes(tokens))
    with pytest.raises(DataError, match=r"s3://tokens/a\.bin: the bytes 0 to 2000 are not those that were recorded"):
        IndexedDataset(url, RemoteCache(str(tmp_path / "cache"))).read(900, 5)
    index = bytearray((tmp_path / "in" / "a.idx").read_bytes())
    index[-1] ^= 1
    bucket.pipe_file(f"{BUCKET}/a.idx", bytes(index))
    with pytest.raises(DataError, match=r"s3://tokens/a\.idx: its xxh3 is not"):
        IndexedDataset(url, RemoteCache(str(tmp_path / "cache")))


def test_large_blocks_are_verified_by_the_hash_of_their_hashes(bucket, tmp_path, monkeypatch):
    from megatron_port.core.data.indexed import read_meta
    from megatron_port.ext.corpora import checked_tokens as hashes

    monkeypatch.setattr(hashes, "LEAF_BYTES", 64)
    monkeypatch.setattr(hashes, "MOST_BLOCKS", 8)
    url = uploaded(bucket, corpus(tmp_path / "in" / "a"))
    meta = read_meta(tmp_path / "in" / "a")
    assert meta is not None and meta.bin_block_bytes > 64
    data = IndexedDataset(url, RemoteCache(str(tmp_path / "cache")))
    assert np.array_equal(data.read(3, 990), IndexedDataset(tmp_path / "in" / "a").read(3, 990))
    assert len(blocks_of(tmp_path / "cache")) == -(-2000 // meta.bin_block_bytes)


@pytest.mark.parametrize("start,stop", [(0, 1), (63, 65), (64, 128), (0, 1000), (999, 1000), (130, 900)])
def test_any_range_over_any_blocks(bucket, tmp_path, start, stop):
    content = os.urandom(1000)
    bucket.pipe_file(f"{BUCKET}/x", content)
    blocks = Blocks(Store(f"s3://{BUCKET}", DataError), "x", 1000, tmp_path / "x", block_bytes=64)
    assert blocks.read(start, stop) == content[start:stop] == blocks.read(start, stop)


def test_the_cache_keeps_to_its_limit(bucket, tmp_path, monkeypatch):
    monkeypatch.setattr("megatron_port.ext.storage.store.LOOK_EVERY", 2)
    monkeypatch.setattr("megatron_port.ext.storage.store.IN_MEMORY", 0)
    content = os.urandom(6400)
    bucket.pipe_file(f"{BUCKET}/x", content)
    blocks = Blocks(Store(f"s3://{BUCKET}", DataError), "x", 6400, tmp_path / "x", block_bytes=64, limit=800)
    for start in (0, 3200, 6000):
        assert blocks.read(start, 6400) == content[start:]
        assert sum(p.stat().st_size for p in blocks_of(tmp_path)) <= 800 + 2 * (64 + DIGEST)


def test_a_store_that_does_not_answer_is_one_clear_error(bucket, tmp_path, monkeypatch):
    url = uploaded(bucket, corpus(tmp_path / "in" / "a"))
    data = IndexedDataset(url, RemoteCache(str(tmp_path / "cache")))
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    s3fs.S3FileSystem.clear_instance_cache()
    monkeypatch.setattr(s3fs.S3FileSystem, "retries", 1)
    blocks_behind(data).store = Store(f"s3://{BUCKET}", DataError)
    with pytest.raises(DataError, match=r"s3://tokens/a\.bin: could not read it in 4 attempts .*AWS_ENDPOINT_URL"):
        data.read(0, 10)
    with pytest.raises(DataError, match=r"s3://tokens/a\.idx: could not describe it"):
        IndexedDataset(url, RemoteCache(str(tmp_path / "cache")))


def test_what_is_not_there_and_what_may_not_be_written(bucket, tmp_path):
    with pytest.raises(DataError, match="give the prefix without"):
        IndexedDataset(f"s3://{BUCKET}/none", RemoteCache(str(tmp_path / "cache")))
    url = uploaded(bucket, corpus(tmp_path / "in" / "a"))
    (tmp_path / "file").touch()
    with pytest.raises(DataError, match=r"data\.remote_cache"):
        IndexedDataset(url, RemoteCache(str(tmp_path / "file")))


class Ranges(http.server.SimpleHTTPRequestHandler):
    """Python's web server, with one range a request where ``serves`` says so."""

    serves = True

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        asked = self.headers.get("Range")
        if not self.serves or asked is None:
            return super().do_GET()
        content = Path(self.translate_path(self.path)).read_bytes()
        first, last = (int(part) for part in asked.removeprefix("bytes=").split("-"))
        part = content[first:last + 1]
        self.send_response(206)
        self.send_header("Content-Range", f"bytes {first}-{first + len(part) - 1}/{len(content)}")
        self.send_header("Content-Length", str(len(part)))
        self.end_headers()
        self.wfile.write(part)


@pytest.mark.parametrize("serves", [True, False])
def test_a_corpus_behind_http(tmp_path, serves):
    corpus(tmp_path / "in" / "a")
    handler = type("Handler", (Ranges,), {"serves": serves})
    with http.server.ThreadingHTTPServer(
        ("127.0.0.1", 0), functools.partial(handler, directory=str(tmp_path / "in"))
    ) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            data = IndexedDataset(f"http://127.0.0.1:{server.server_port}/a", RemoteCache(str(tmp_path / "cache")))
            if serves:
                assert np.array_equal(data.read(5, 600), IndexedDataset(tmp_path / "in" / "a").read(5, 600))
            else:
                blocks_behind(data).block_bytes, blocks_behind(data).hashes = 64, ()
                with pytest.raises(DataError, match="must serve ranges"):
                    data.read(5, 600)
        finally:
            server.shutdown()


def checkpoint(folder: Path, step: int = 3, world: int = 2, run: str = "", origin: str = "") -> Path:
    """A checkpoint whose ranks each saved one tensor. ``run``: its id; ``origin``: that of the run that it began at."""
    committers = [Committer(parent=Parent(run=origin) if origin else None) for _ in range(world)]
    for committer in committers:
        committer.fence.run = run
    tensors = [torch.arange(2000.0) + 10 * rank + step for rank in range(world)]
    over_threads(world, lambda peers: save_checkpoint(
        folder, state(step), [whole(f"w{peers.rank}", tensors[peers.rank])], peers=peers,
        committer=committers[peers.rank]))
    return folder / f"step-{step:08d}"


def test_a_pushed_checkpoint_comes_back_to_the_bit(bucket, tmp_path):
    url = f"s3://{BUCKET}/runs/one"
    for step in (3, 5):
        path = checkpoint(tmp_path / "here", step)
        assert push(path, url) == f"{url}/{copy_name(open_checkpoint(path).manifest)}"
    for place, step in ((url, 5), (f"{url}/{copy_name(open_checkpoint(tmp_path / 'here/step-00000003').manifest)}", 3)):
        there = pull(place, tmp_path / "there")
        assert there == tmp_path / "there" / f"step-{step:08d}"
        open_checkpoint(there).verify()
        for file in (tmp_path / "here" / there.name).iterdir():
            assert file.read_bytes() == (there / file.name).read_bytes()
    assert sorted(p.name for p in (tmp_path / "there").iterdir()) == ["step-00000003", "step-00000005"]


def test_a_damaged_or_unfinished_copy_is_never_taken(bucket, tmp_path):
    url = f"s3://{BUCKET}/one"
    first = push(checkpoint(tmp_path / "here", 3), url)
    second = push(checkpoint(tmp_path / "here", 5), url)
    bucket.rm(f"{second}/manifest.json")
    assert pull(url, tmp_path / "there").name == "step-00000003", "a copy without its manifest is not one"
    data = bytearray(bucket.cat_file(f"{first}/rank-00001.safetensors"))
    data[-5] ^= 4
    bucket.pipe_file(f"{first}/rank-00001.safetensors", bytes(data))
    with pytest.raises(DamagedCheckpoint, match=r"rank-00001\.safetensors: .* the manifest says"):
        pull(first, tmp_path / "elsewhere")
    assert list((tmp_path / "elsewhere").iterdir()) == []
    bucket.rm(f"{first}/rank-00000.safetensors")
    with pytest.raises(DamagedCheckpoint, match="not whole"):
        pull(first, tmp_path / "elsewhere")
    with pytest.raises(CheckpointError, match="no whole checkpoint there"):
        pull(f"s3://{BUCKET}/two", tmp_path / "elsewhere")


def test_large_files_go_in_parts(bucket, tmp_path):
    path = tmp_path / "large"
    path.write_bytes(os.urandom(11 << 20))
    Store(f"s3://{BUCKET}", CheckpointError).put(path, "large", part_bytes=5 << 20)
    assert bucket.info(f"{BUCKET}/large")["ETag"].strip('"').endswith("-3"), "three parts"
    assert bucket.cat_file(f"{BUCKET}/large") == path.read_bytes()


def test_a_file_that_arrives_changed_fails_its_push(bucket, tmp_path, monkeypatch):
    path = checkpoint(tmp_path / "here")
    entry = open_checkpoint(path).manifest.files["rank-00000.safetensors"]
    store, file = Store(f"s3://{BUCKET}", CheckpointError), path / "rank-00000.safetensors"
    damaged = tmp_path / "damaged"
    damaged.write_bytes(file.read_bytes()[:-1] + b"\x7f")
    send = Store.put
    monkeypatch.setattr(Store, "put", lambda self, path, name: send(self, damaged, name))
    with pytest.raises(CheckpointError, match="reads back with hash"):
        push_file(store, "x", file, entry, verify=True)


def test_ranks_mirror_their_files_and_rank_zero_seals(bucket, tmp_path, monkeypatch):
    monkeypatch.setattr(mirror, "PATIENCE", 1.0)
    lines: list[str] = []
    ranks = [Mirror(f"s3://{BUCKET}/m", rank, 2, verify=True, note=lines.append) for rank in range(2)]
    for step in (2, 4):
        path = checkpoint(tmp_path / "here", step)
        for rank in ranks if step == 2 else ranks[:1]:  # of step 4 rank 1's file never comes
            rank.add(path)
    for rank in ranks:
        rank.finish()
    assert lines[0].startswith("copied step-00000002 to s3://tokens/m/step-00000002.commit-")
    assert lines[1].startswith("step-00000004 was not copied") and "rank-00001.safetensors" in lines[1]
    assert pull(f"s3://{BUCKET}/m", tmp_path / "there").name == "step-00000002"


def test_a_later_start_copies_what_is_left_and_nothing_twice(bucket, tmp_path, monkeypatch):
    """By fewer ranks: they share out the files of those that have written. A start that is given up says nothing."""
    url, lines = f"s3://{BUCKET}/again", list[str]()
    path = checkpoint(tmp_path / "here", 6, 3)
    first = Mirror(url, 0, 3, verify=True, note=lines.append)  # of ranks 1 and 2 none comes
    first.add(path)
    while not bucket.exists(f"{url}/{copy_name(open_checkpoint(path).manifest)}/rank-00000.safetensors"):
        time.sleep(0.05)
    first.abandon()
    first._thread.join(20)
    assert not first._thread.is_alive() and not lines and not bucket.exists(f"{url}/latest")
    monkeypatch.setattr(mirror, "PATIENCE", 3.0)
    for expected in (["copied step-00000006"], []):
        ranks = [Mirror(url, rank, 2, verify=True, note=lines.append) for rank in range(2)]
        for rank in ranks:
            rank.add(path)
            rank.finish() if rank is ranks[1] else None
        ranks[0].finish()
        assert [line[:20] for line in lines] == expected
        there = pull(url, tmp_path / "there")
        assert (there / "rank-00002.safetensors").read_bytes() == (path / "rank-00002.safetensors").read_bytes()
        bucket.rm(f"{url}/latest")  # it was killed before it had written the name
        lines.clear()
    for rank in [Mirror(url, 0, 1, verify=True, note=lines.append)]:
        rank.add(path)
        rank.finish()
    assert bucket.cat_file(f"{url}/latest").decode() == copy_name(open_checkpoint(path).manifest)


def test_two_runs_of_one_name_do_not_take_each_others_place(bucket, tmp_path):
    """A copy has its run's id; another run is refused at its start, and later; one that began there is not."""
    url, lines = f"s3://{BUCKET}/same", list[str]()

    def mirror_of(run: str, origin: str = "") -> Mirror:
        return Mirror(url, 0, 1, verify=True, note=lines.append, run=run, origin=origin)

    first, late = mirror_of("aaaa"), mirror_of("bbbb")  # both before there was a copy
    paths = {run: checkpoint(tmp_path / run, 3, 1, run, origin) for run, origin in (
        ("aaaa", ""), ("bbbb", ""), ("cccc", "aaaa"))}
    first.add(paths["aaaa"])
    first.finish()
    late.add(paths["bbbb"])
    late.finish()
    assert lines[0].startswith(f"copied step-00000003 to {url}/step-00000003.commit-00000001.run-aaaa in ")
    assert "was not copied" in lines[1] and "copies of another run (id aaaa; this one is bbbb)" in lines[1]
    for refused in (lambda: mirror_of("bbbb"), lambda: push(paths["bbbb"], url)):
        with pytest.raises(CheckpointError, match="another run"):
            refused()
    there = pull(url, tmp_path / "there")
    assert open_checkpoint(there).manifest.lineage.run == "aaaa"
    mirror_of("aaaa").finish()
    assert push(paths["cccc"], url).endswith(".run-cccc")  # began at a checkpoint of aaaa
    assert open_checkpoint(pull(url, tmp_path / "later")).manifest.lineage.run == "cccc"
    with pytest.raises(CheckpointError, match="another run"):
        push(paths["aaaa"], url)
    bucket.rm(f"{url}/latest")
    with pytest.raises(CheckpointError, match="2 runs, and none"):
        pull(url, tmp_path / "nowhere")
    # Copies of versions that did not name the run.
    name = "step-00000003.commit-00000001"
    bucket.pipe_file(f"{url}-old/{name}/manifest.json", bucket.cat_file(f"{url}/{name}.run-aaaa/manifest.json"))
    bucket.pipe_file(f"{url}-old/latest", name.encode())
    with pytest.raises(CheckpointError, match=r"another run \(id aaaa"):
        push(paths["bbbb"], f"{url}-old")


@pytest.mark.parametrize("config,fault", [
    (run_config("s3://"), "names no bucket"), (run_config("ftp://host/a"), "must start with s3://"),
    (run_config("https://user:pw@host/a"), "credentials"),
    (RunConfig(checkpoint=CheckpointConfig(mirror="https://host/a")), "checkpoint.mirror"),
    (RunConfig(checkpoint=CheckpointConfig(mirror="/scratch/a")), "checkpoint.mirror"),
    (RunConfig(checkpoint=CheckpointConfig(resume="gs://bucket/a")), "checkpoint.resume"),
])
def test_urls_that_are_refused_with_the_configuration(config, fault):
    assert any(fault in problem for problem in problems(config))
