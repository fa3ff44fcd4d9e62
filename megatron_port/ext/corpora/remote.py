"""Corpora in a store: the index and the sidecar are copied whole, tokens are read by blocks as samples need them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import xxhash

from megatron_port.core.data.checked_tokens import hashes_of
from megatron_port.core.data.format import CorpusMeta, block_hash, file_xxh3, read_meta, tokenizer_name
from megatron_port.core.errors import DataError
from megatron_port.core.io.atomic import atomic_file
from megatron_port.ext.storage.blocks import Blocks
from megatron_port.ext.storage.store import Store

LARGEST_VERIFIED = 16 << 20
"""Blocks that the sidecar has a hash of, and that are no larger, are fetched whole and compared with it."""
PLAIN_BLOCK = 4 << 20
"""Bytes fetched at a time where there is no such hash."""
THREADS = 4
"""Number of threads of a rank that read ahead."""


@dataclass(frozen=True)
class RemoteCache:
    """Where remote corpora are kept, and how many bytes of each one's tokens (0: no limit)."""

    folder: str = ""
    """Empty: ``~/.cache/megatron_port``."""
    limit: int = 0

    @property
    def path(self) -> Path:
        """The folder."""
        return Path(self.folder) if self.folder else Path.home() / ".cache" / "megatron_port"


class RemoteTokens:
    """The tokens of a remote ``.bin`` file; a slice is read when it is asked for."""

    def __init__(self, blocks: Blocks, dtype: np.dtype) -> None:
        self._blocks, self._dtype = blocks, dtype

    def __getitem__(self, span: slice) -> np.ndarray:
        width = self._dtype.itemsize
        count = self._blocks.size // width
        start, stop, _ = span.indices(count)
        data = self._blocks.read(start * width, max(stop, start) * width) if stop > start else b""
        return np.frombuffer(data, self._dtype)


class RemoteCorpus:
    """A corpus at ``url`` (the prefix of its .bin, .idx and .meta.json), copied into ``cache`` but for its tokens.

    ``prefix`` is where index, sidecar and tokenizer then lie. The folder's name has the sizes and versions of the
    remote files, so that a corpus which was replaced is another corpus.

    Raises:
        DataError: a file is missing, the store cannot be reached, or the copy is not what the sidecar records.
    """

    def __init__(self, url: str, cache: RemoteCache) -> None:
        base, _, name = url.rstrip("/").rpartition("/")
        self.url, self.limit = url, cache.limit
        self._store, self._bin = Store(base, DataError), f"{name}.bin"
        try:
            infos = {end: self._store.info(name + end) for end in (".idx", ".bin")}
        except FileNotFoundError as error:
            raise DataError(
                f"{url}: {error.args[-1] if error.args else error} does not exist; give the prefix without .bin or .idx"
            ) from error
        self.bin_bytes = infos[".bin"].size
        identity = repr((url, sorted((end, i.size, i.version) for end, i in infos.items())))
        self._folder = cache.path / "remote" / xxhash.xxh3_64_hexdigest(identity.encode())
        self.prefix = self._folder / name
        try:
            self._copy(f"{name}.meta.json", optional=True)
            meta = read_meta(self.prefix)
            self._copy(f"{name}.idx", meta.idx_xxh3 if meta else "")
            kind, _, place = tokenizer_name(self.prefix, meta).partition(":") if meta else ("", "", "")
            if kind in ("hf", "sentencepiece"):
                self._copy(Path(place.partition("#")[0]).name, optional=True)
            if meta and meta.mask_xxh3:  # whole: conversations are few beside texts
                self._copy(f"{name}.mask", meta.mask_xxh3)
            if meta and meta.chat:
                self._copy(f"{name}.chat.json")
        except OSError as error:
            raise DataError(
                f"{self._folder}: the index of {url} cannot be kept ({error.strerror or error}); make room, or name "
                "another folder with data.remote_cache"
            ) from error
        self._meta = meta

    def _copy(self, name: str, expected: str = "", *, optional: bool = False) -> None:
        path = self._folder / name
        if path.is_file():
            return
        self._folder.mkdir(parents=True, exist_ok=True)
        try:
            with atomic_file(path) as stream:
                for piece in self._store.pieces(name):
                    stream.write(piece)
        except FileNotFoundError as error:
            if optional:
                return
            raise DataError(f"{self._store.place(name)}: no such object") from error
        if expected and file_xxh3(path) != expected:
            path.unlink()
            raise DataError(
                f"{self._store.place(name)}: its xxh3 is not the {expected} that the sidecar records; upload the "
                "corpus again"
            )

    def tokens(self, dtype: np.dtype) -> RemoteTokens:
        """Return the tokens as stored."""
        block, hashes = _blocks_of(self._meta)
        return RemoteTokens(Blocks(
            self._store, self._bin, self.bin_bytes, self._folder / self._bin, block_bytes=block, hashes=hashes,
            hash_of=block_hash, limit=self.limit,
        ), dtype)


def _blocks_of(meta: CorpusMeta | None) -> tuple[int, list[str]]:
    """Bytes of a block, and the sidecar's hash of each where there are such; of a corpus above 16 GB its blocks are
    too large to be fetched whole."""
    block, hashes = hashes_of(meta, LARGEST_VERIFIED)
    return block or PLAIN_BLOCK, hashes


class ReadAhead:
    """Reads samples in the background, so that their blocks are on disk when they are wanted.

    ``draw`` gives sample k. What fails here is left to whoever wants the sample.
    """

    def __init__(self, draw: Callable[[int], object]) -> None:
        self._draw = draw
        self._pool = ThreadPoolExecutor(THREADS, thread_name_prefix="read-ahead")
        self._pending: list[Future[object]] = []

    def read(self, samples: Iterable[int]) -> None:
        """Begin to read ``samples``; what is left of an earlier call is not read any more."""
        for task in self._pending:
            task.cancel()
        self._pending = [self._pool.submit(self._draw, k) for k in samples]
