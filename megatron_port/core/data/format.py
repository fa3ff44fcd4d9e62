"""Megatron's ``.bin/.idx`` format, and the sidecar ``.meta.json`` that says what the tokens are.

``.bin`` is the flat stream of token ids. ``.idx`` is, little-endian: ``MMIDIDX\\0\\0``,
version 1 (u64), dtype code (u8), number of sequences N (u64), number of document
boundaries D (u64), lengths i32[N], byte offsets i64[N], documents i64[D] (the first
sequence of each document, then N): exactly 34 + 12 N + 8 D bytes. Our writer makes
one sequence of each document. ``.meta.json`` is ours; other readers ignore it. So is ``.mask``, of corpora of
conversations: a byte per token.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np

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
    """16 hexadecimal digits for each ``bin_block_bytes`` of the .bin file: ``corpora.hashes.BlockHashes``."""
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
