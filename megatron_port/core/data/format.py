"""Megatron's ``.bin/.idx`` format, and the sidecar ``.meta.json`` that says what the tokens are.

``.bin`` is the flat stream of token ids. ``.idx`` is, little-endian: ``MMIDIDX\\0\\0``,
version 1 (u64), dtype code (u8), number of sequences N (u64), number of document
boundaries D (u64), lengths i32[N], byte offsets i64[N], documents i64[D] (the first
sequence of each document, then N): exactly 34 + 12 N + 8 D bytes. Our writer makes
one sequence of each document. ``.meta.json`` is ours; other readers ignore it. So is ``.mask``, of corpora of
conversations: a byte per token.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np
import xxhash

from megatron_port.core.errors import DataError
from megatron_port.core.io.files import read_regular, too_many_open
from megatron_port.core.io.typed_json import parse_json

MAGIC = b"MMIDIDX\x00\x00"
HEADER_BYTES = 34
DTYPES = {1: "<u1", 2: "<i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
CHUNK = 1 << 20
"""Elements handled at once by anything that goes through a whole file."""
META_BYTES = 1 << 16
"""More than any sidecar has; nothing larger is read."""
NAME_CHARACTERS = 1024
"""Limit on a tokenizer's name or hash: more than a path component has."""
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


def mapped(path: Path, dtype: str | np.dtype, offset: int, count: int) -> np.ndarray:
    """Return ``count`` elements of a file as a memory map; an empty one cannot be made, and needs none.

    Raises:
        DataError: too many files are open; a map keeps its own open.
    """
    try:
        return np.memmap(path, dtype, "r", offset, (count,)) if count else np.zeros(0, dtype)
    except OSError as error:
        if advice := too_many_open(error):
            raise DataError(f"{path}: {advice}") from error
        raise


def token_dtype(vocab_size: int) -> np.dtype:
    """u16 below 65500 ids, otherwise i32 (Megatron's rule)."""
    return np.dtype("<u2") if vocab_size < 65500 else np.dtype("<i4")


def bin_path(prefix: str | Path) -> Path:
    """Return ``<prefix>.bin``."""
    return Path(f"{prefix}.bin")


def idx_path(prefix: str | Path) -> Path:
    """Return ``<prefix>.idx``."""
    return Path(f"{prefix}.idx")


def meta_path(prefix: str | Path) -> Path:
    """Return ``<prefix>.meta.json``."""
    return Path(f"{prefix}.meta.json")


def mask_path(prefix: str | Path) -> Path:
    """Return ``<prefix>.mask``."""
    return Path(f"{prefix}.mask")


def reference_path(prefix: str | Path) -> Path:
    """Return ``<prefix>.reference``."""
    return Path(f"{prefix}.reference")


def chat_path(prefix: str | Path) -> Path:
    """Return ``<prefix>.chat.json``."""
    return Path(f"{prefix}.chat.json")


@dataclass(frozen=True, kw_only=True)
class CorpusMeta:
    """Contents of the sidecar ``<prefix>.meta.json``."""

    tokenizer: str
    """Name for ``data.tokenizer.get_tokenizer``; ``hf:`` and ``sentencepiece:`` name a file beside the sidecar."""
    vocab_size: int
    eod_id: int
    """-1: documents carry no end token."""
    tokenizer_hash: str = ""
    """``data.tokenizer.identity``'s: of all that maps text to ids. Empty: made before hashes were kept."""
    documents: int = 0
    tokens: int = 0
    source_bytes: int = 0
    """Bytes of the input files."""
    source_files: int = 0
    source_xxh3: str = ""
    """xxh3-128 over the input files' bytes, in order."""
    left_out: int = 0
    """Records that were damaged and left out."""
    repaired: int = 0
    """Records that were damaged and repaired."""
    blank: int = 0
    """Documents of white space only, which were dropped."""
    bin_xxh3: str = ""
    """xxh3-128 of the .bin file."""
    bin_blocks: str = ""
    """16 hexadecimal digits for each ``bin_block_bytes`` of the .bin file: see :class:`BlockHashes`."""
    bin_block_bytes: int = 0
    idx_xxh3: str = ""
    """xxh3-128 of the .idx file."""
    mask_xxh3: str = ""
    """xxh3-128 of the .mask file: a byte for each token, 1 where it counts as a label. Empty: there is none, and all
    count."""
    counted: int = 0
    """Tokens that count as labels, by the .mask file."""
    chat: str = ""
    """sha256 of ``<prefix>.chat.json``, which has the template of these conversations. Empty: no conversations."""
    bos: str = ""
    """Ids that each document begins with, by spaces (BOS, as the tokenizer's post-processor adds it). ``none``: the
    tokenizer adds none. ``omitted``: ``--no-bos``. ``template``: conversations, which begin as their template does.
    Empty: made before this was kept, when no document had any."""
    pairs: int = 0
    """Preferences: documents 2 k and 2 k + 1 are the chosen and the rejected conversation of pair k. 0: no pairs."""
    format: int = 1


OWN_TOKENIZERS = ("byte", "gpt2")
"""Names of the tokenizers that read no file of the user's."""
NO_BOS, BOS_OMITTED, BOS_BY_TEMPLATE, BOS_UNKNOWN = "none", "omitted", "template", "unknown"


def bos_ids(bos: str) -> tuple[int, ...] | None:
    """Return the ids that ``CorpusMeta.bos`` says documents begin with; None: their template decides, or another
    program made them.

    Raises ValueError: it says nothing of the kind.
    """
    if bos in (BOS_BY_TEMPLATE, BOS_UNKNOWN):
        return None
    return () if bos in ("", NO_BOS, BOS_OMITTED) else tuple(int(i) for i in bos.split())


def read_meta(prefix: str | Path) -> CorpusMeta | None:
    """Return the sidecar, or None (a corpus of another program). Raises DataError where it is damaged."""
    path = meta_path(prefix)
    try:
        size = path.stat().st_size
        if size > META_BYTES:
            raise DataError(f"{path}: {size} bytes; a sidecar has at most {META_BYTES}. Prepare the corpus again")
        raw = parse_json(read_regular(path, META_BYTES))
        known = {f.name: raw[f.name] for f in fields(CorpusMeta) if f.name in raw}
        for name, value in known.items():
            number = CorpusMeta.__annotations__[name] == "int"
            if (type(value) is not int or not -1 <= value < 1 << 63) if number else type(value) is not str:
                raise ValueError(f"{name} is {value!r:.60}")
            if name.startswith("tokenizer") and len(value) > NAME_CHARACTERS:  # messages quote it
                raise ValueError(f"{name} has {len(value)} characters, more than {NAME_CHARACTERS}")
        bos_ids(known.get("bos", ""))
        return CorpusMeta(**known)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError) as error:
        raise DataError(f"{path}: not a readable sidecar ({error}); prepare the corpus again") from error


def tokenizer_name(prefix: str | Path, meta: CorpusMeta) -> str:
    """The sidecar's tokenizer as ``get_tokenizer`` takes it from any folder: a file's name becomes a path.

    Raises:
        DataError: it names a file that is not beside the sidecar. Corpora come from elsewhere, and are not trusted.
    """
    kind, found, rest = meta.tokenizer.partition(":")
    if not found or kind == "tiktoken":
        return meta.tokenizer
    file = rest.rpartition("#")[0] or rest
    if not file or Path(file).name != file or file == ".." or "\0" in file:
        raise DataError(f"{meta_path(prefix)}: tokenizer {meta.tokenizer!r:.200} names a file that is not beside the "
                        "corpus; prepare the corpus again")
    return f"{kind}:{(meta_path(prefix).parent / rest).absolute()}"


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
