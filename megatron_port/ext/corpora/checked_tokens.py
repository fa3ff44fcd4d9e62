"""The tokens of a local corpus, compared with the sidecar's hashes: some blocks at the start, each when first read.

Hashing a block costs little where it comes from the page cache, and a read of up to 64 MB where it does not. The time
for it is therefore limited: what does not fit is checked at a later read of the same block, and by ``data verify``.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import xxhash

from megatron_port.core.data.indexed import CHUNK, CorpusMeta, bin_path, idx_path, mask_path, meta_path
from megatron_port.core.errors import DataError

# Hashes of a corpus' files: of a whole file, and of the blocks of one while it is written or read.

LEAF_BYTES = 1 << 20
"""The smallest block of a .bin file that has a hash of its own."""
MOST_BLOCKS = 1024
"""Hashes that a sidecar holds; blocks double when there would be more."""


def file_blocks(path: Path, size: int = 8 * CHUNK) -> Iterator[bytes]:
    """Yield a file's bytes, ``size`` at a time."""
    with open(path, "rb") as stream:
        while block := stream.read(size):
            yield block


def file_xxh3(path: Path) -> str:
    """Return the xxh3-128 of a file's bytes, 32 hexadecimal digits."""
    digest = xxhash.xxh3_128()
    for block in file_blocks(path):
        digest.update(block)
    return digest.hexdigest()


class BlockHashes:
    """xxh3-64 of each block of a stream of unknown length, in at most ``MOST_BLOCKS`` values.

    Blocks begin as ``LEAF_BYTES``; whenever there would be too many, neighbours are joined (the hash of
    their two hashes) and the block doubles. So a damaged file of 10 GB is narrowed down to 16 MiB.
    """

    def __init__(self) -> None:
        self.leaves = 1
        """Leaves a block."""
        self.total = xxhash.xxh3_128()
        self._done: list[int] = []
        self._open: list[int] = []
        self._leaf = xxhash.xxh3_64()
        self._filled = 0

    @property
    def block_bytes(self) -> int:
        """Size in bytes of each block except the last."""
        return self.leaves * LEAF_BYTES

    def update(self, data: bytes | memoryview) -> None:
        """Hash the next bytes of the stream."""
        self.total.update(data)
        view = memoryview(data).cast("B")
        while len(view):
            take = min(len(view), LEAF_BYTES - self._filled)
            self._leaf.update(view[:take])
            self._filled += take
            view = view[take:]
            if self._filled == LEAF_BYTES:
                self._close_leaf()

    def hexdigest(self) -> str:
        """Return the blocks' hashes in order, 16 digits each; :meth:`update` may still be called."""
        # What has not filled a block counts as one: the open leaf, too.
        rest = [*self._open, *([self._leaf.intdigest()] if self._filled else [])]
        return "".join(f"{h:016x}" for h in [*self._done, *([_joined(rest)] if rest else [])])

    def _close_leaf(self) -> None:
        self._open.append(self._leaf.intdigest())
        self._leaf, self._filled = xxhash.xxh3_64(), 0
        if len(self._open) == self.leaves:
            self._done.append(_joined(self._open))
            self._open = []
            if len(self._done) == MOST_BLOCKS:
                self._done = [_pair(a, b) for a, b in zip(self._done[::2], self._done[1::2])]
                self.leaves *= 2


def block_hash(data: bytes | memoryview) -> str:
    """Return the hash that :class:`BlockHashes` has of a whole block, or of the last one; 16 hexadecimal digits."""
    leaves = (memoryview(data)[i:i + LEAF_BYTES] for i in range(0, len(data), LEAF_BYTES))
    return f"{_joined([xxhash.xxh3_64_intdigest(leaf) for leaf in leaves]):016x}"


def _pair(a: int, b: int) -> int:
    return int(xxhash.xxh3_64_intdigest(struct.pack("<QQ", a, b)))


def _joined(hashes: list[int]) -> int:
    """Neighbours joined until one is left; an odd one out passes on as it is."""
    while len(hashes) > 1:
        odd = hashes[-1:] if len(hashes) % 2 else []
        hashes = [_pair(a, b) for a, b in zip(hashes[::2], hashes[1::2])] + odd
    return hashes[0]


LARGEST = 64 << 20
"""Larger blocks (of corpora above 64 GB), indices and masks are left to ``data verify``."""
FREE_S = 0.5
"""Seconds that checks may take beyond ``SHARE``, and at the start; those of all corpora of a run together."""
SHARE = 0.01
"""Share of the time since the start that checks may take."""
AT_START = 8
"""Blocks of a corpus that are checked at the start."""


class TimeLimit:
    """Time that checks have taken since the start, and whether they may take more. All corpora of a run share one."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock, self.spent = clock, 0.0
        self._began = clock()

    def allows(self) -> bool:
        """Return whether another check may begin."""
        return self.spent <= FREE_S + SHARE * (self.clock() - self._began)


class CheckedTokens:
    """The tokens of a ``.bin`` file whose sidecar is ``meta``; a slice is checked when it is read.

    Raises:
        DataError: when read, bytes that are not those recorded when the corpus was made.
    """

    def __init__(
        self, prefix: Path, tokens: np.ndarray, meta: CorpusMeta | None, limit: TimeLimit | None = None
    ) -> None:
        self._prefix, self._tokens, self._limit = prefix, tokens, limit or TimeLimit()
        self._block, self._hashes = hashes_of(meta, LARGEST)
        if len(self._hashes) != -(-tokens.nbytes // max(self._block, 1)):
            self._hashes = []  # of a sidecar that is not this file's, which verify and the index' hash tell
        self._pending = np.ones(len(self._hashes), bool)

    def __getitem__(self, span: slice) -> np.ndarray:
        start, stop, _ = span.indices(len(self._tokens))
        width = self._tokens.itemsize
        if self._hashes and stop > start:
            blocks = range(start * width // self._block, (stop * width - 1) // self._block + 1)
            if self._pending[blocks.start:blocks.stop].any():
                for block in blocks:
                    if self._pending[block] and self._limit.allows():
                        self.check(block)
        return self._tokens[span]

    def check(self, block: int) -> None:
        """Compare a block with its hash. Raises DataError."""
        before = self._limit.clock()
        width = self._tokens.itemsize
        begin, end = block * self._block, min((block + 1) * self._block, self._tokens.nbytes)
        found = block_hash(self._tokens[begin // width:end // width].view(np.uint8).data)
        if found != self._hashes[block]:
            raise DataError(
                f"{bin_path(self._prefix)}: the bytes {begin} to {end} are not those that were recorded when it was "
                f"made (hash {found}, recorded {self._hashes[block]}); copy or prepare the corpus again, or, if "
                f"another program has written it since, remove {meta_path(self._prefix)}")
        self._pending[block] = False
        self._limit.spent += self._limit.clock() - before

    def spread(self, count: int = AT_START) -> list[int]:
        """Return blocks spread over the file, the first and the last among them."""
        return sorted({int(i) for i in np.linspace(0, len(self._hashes) - 1, count)}) if self._hashes else []


def hashes_of(meta: CorpusMeta | None, largest: int) -> tuple[int, list[str]]:
    """Return (bytes of a block, the sidecar's hash of each); no hashes where there are none, or of larger blocks."""
    if meta is None or not 0 < meta.bin_block_bytes <= largest:
        return 0, []
    return meta.bin_block_bytes, [meta.bin_blocks[i:i + 16] for i in range(0, len(meta.bin_blocks), 16)]


def check_at_start(
    corpora: Sequence[tuple[Path, CorpusMeta | None, CheckedTokens]], clock: Callable[[], float] = time.monotonic,
) -> int:
    """Compare indices, masks and some blocks of local corpora with their hashes, for at most ``FREE_S``; their number.

    Raises:
        DataError: one of them is not what was recorded when it was made.
    """
    began, done = clock(), 0
    for check in (c for checks in _in_turn([_checks(*corpus) for corpus in corpora]) for c in checks):
        if clock() - began > FREE_S:
            break
        check()
        done += 1
    return done


def _in_turn(checks: Sequence[list[Callable[[], None]]]) -> Iterator[list[Callable[[], None]]]:
    """One check of each corpus, then the next of each: none is left out because another is large."""
    for i in range(max(map(len, checks), default=0)):
        yield [own[i] for own in checks if i < len(own)]


def _checks(prefix: Path, meta: CorpusMeta | None, tokens: CheckedTokens) -> list[Callable[[], None]]:
    if meta is None:
        return []
    files = [(idx_path(prefix), meta.idx_xxh3), (mask_path(prefix), meta.mask_xxh3)]
    wholes = [_whole(path, expected) for path, expected in files if expected and path.stat().st_size <= LARGEST]
    return [*wholes, *(_block(tokens, block) for block in tokens.spread())]


def _block(tokens: CheckedTokens, block: int) -> Callable[[], None]:
    return lambda: tokens.check(block)


def _whole(path: Path, expected: str) -> Callable[[], None]:
    def check() -> None:
        found = file_xxh3(path)
        if found != expected:
            raise DataError(f"{path}: its bytes are not those that were recorded when it was made (xxh3 {found}, "
                            f"recorded {expected}); copy or prepare the corpus again")

    return check
