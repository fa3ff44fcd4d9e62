"""Reading token files in Megatron's ``.bin/.idx`` format (:class:`CorpusMeta` is what stands beside them)."""

from __future__ import annotations

import struct
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from megatron_port.core.config.ranges import is_remote
from megatron_port.core.errors import DataError
from megatron_port.core.io.files import allow_open_files, read_regular, too_many_open
from megatron_port.core.io.typed_json import parse_json
from megatron_port.core.registry import PARTS

# Megatron's ``.bin/.idx`` format, and the sidecar ``.meta.json`` that says what the tokens are.
#
# ``.bin`` is the flat stream of token ids. ``.idx`` is, little-endian: ``MMIDIDX\0\0``,
# version 1 (u64), dtype code (u8), number of sequences N (u64), number of document
# boundaries D (u64), lengths i32[N], byte offsets i64[N], documents i64[D] (the first
# sequence of each document, then N): exactly 34 + 12 N + 8 D bytes. Our writer makes
# one sequence of each document. ``.meta.json`` is ours; other readers ignore it. So is ``.mask``, of corpora of
# conversations: a byte per token.

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
    """Name for ``corpora.tokenizer.get_tokenizer``; ``hf:`` and ``sentencepiece:`` name a file beside the sidecar."""
    vocab_size: int
    eod_id: int
    """-1: documents carry no end token."""
    tokenizer_hash: str = ""
    """``corpora.tokenizer.identity``'s: of all that maps text to ids. Empty: made before hashes were kept."""
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
    """16 hexadecimal digits for each ``bin_block_bytes`` of the .bin file: ``corpora.checked_tokens.BlockHashes``."""
    bin_block_bytes: int = 0
    idx_xxh3: str = ""
    """xxh3-128 of the .idx file."""
    mask_xxh3: str = ""
    """xxh3-128 of the .mask file: a byte for each token, 1 where it counts as a label. Empty: none; all count."""
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


class Tokens(Protocol):
    """The tokens of a corpus as they are stored, read by slices."""

    def __getitem__(self, span: slice, /) -> np.ndarray:
        """Return a slice. DataError: it is not what was written."""


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


class IndexedDataset:
    """A memory-mapped corpus; opening it checks every size, reading copies only what is asked for.

    Blocks of tokens are compared with the sidecar's hashes as they are first read (``corpora.checked_tokens``);
    ``corpora.verify.verify(prefix)`` reads and checks all of it.

    A corpus in a store (``prefix`` is a URL) is read by blocks, which ``cache`` keeps; see ``corpora.fetch``.
    ``checks``: time that comparisons may take (``corpora.checked_tokens.TimeLimit``), shared with other corpora.

    Raises:
        DataError: a file is missing, of another format, truncated or longer than its index says.
    """

    def __init__(
        self, prefix: str | Path, cache: RemoteCache | None = None, checks: Any = None
    ) -> None:
        self.remote: Any = None
        if is_remote(prefix):
            self.remote = PARTS.function("remote corpus")(str(prefix), cache or RemoteCache())
        self.prefix = self.remote.prefix if self.remote else Path(prefix)
        self.name = self.remote.url if self.remote else str(self.prefix)
        """The prefix as the run file has it."""
        path = idx_path(self.prefix)
        for needed in (path, *(() if self.remote else (bin_path(prefix),))):
            if not needed.is_file():
                raise DataError(f"{needed}: no such file; make the corpus with `data prepare`, "
                                "and give the prefix without .bin or .idx")
        try:
            with open(path, "rb") as stream:
                header = stream.read(HEADER_BYTES)
        except OSError as error:
            raise DataError(f"{path}: {too_many_open(error) or error.strerror}") from error
        if header[:9] != MAGIC or len(header) < HEADER_BYTES:
            raise DataError(f"{path}: does not start with the {HEADER_BYTES}-byte header of a Megatron index")
        version, code, self.num_sequences, boundaries = struct.unpack("<QBQQ", header[9:])
        if version != 1 or code not in DTYPES:
            raise DataError(f"{path}: version {version}, dtype code {code}; "
                            f"expected version 1 and an integer code of {sorted(DTYPES)}")
        self.dtype = np.dtype(DTYPES[code])
        expected, found = HEADER_BYTES + 12 * self.num_sequences + 8 * boundaries, path.stat().st_size
        if expected != found:
            raise DataError(f"{path}: expected {expected} bytes for {self.num_sequences} sequences and {boundaries} "
                            f"document boundaries, found {found}; copy or prepare the corpus again")
        self._map_index(path, boundaries)
        size = self.num_tokens * self.dtype.itemsize
        found = self.remote.bin_bytes if self.remote else bin_path(self.prefix).stat().st_size
        if size != found:
            raise DataError(f"{self.name}.bin: expected {size} bytes for {self.num_tokens} tokens, found {found}; "
                            "copy or prepare the corpus again")
        self.meta = read_meta(self.prefix)
        self._tokens: Tokens = self.remote.tokens(self.dtype) if self.remote else self._map_tokens(checks)
        self.masked = bool(self.meta and self.meta.mask_xxh3)
        """Not every token counts as a label."""
        self._mask = self._map_mask() if self.masked else np.zeros(0, np.uint8)

    def _map_index(self, path: Path, boundaries: int) -> None:
        count = self.num_sequences
        arrays = mapped(path, "u1", HEADER_BYTES, 12 * count + 8 * boundaries)  # one open file for the three
        self.lengths, self.pointers, self.documents = (
            part.view(kind) for part, kind in zip(np.split(arrays, [4 * count, 12 * count]), ("<i4", "<i8", "<i8")))
        if count and int(self.lengths.min()) < 0:
            raise DataError(f"{path}: a sequence has a negative length; the file is damaged")
        self.num_tokens = int(self.lengths.sum(dtype=np.int64))
        last = int(self.pointers[-1]) // self.dtype.itemsize + int(self.lengths[-1]) if count else 0
        first = int(self.pointers[0]) if count else 0
        if first != 0 or last != self.num_tokens:
            raise DataError(f"{path}: byte offsets run from {first} to token {last}, lengths add up to "
                            f"{self.num_tokens} tokens; the file is damaged")
        if boundaries and (int(self.documents[0]) != 0 or int(self.documents[-1]) != count):
            raise DataError(f"{path}: documents run from sequence {int(self.documents[0])} to "
                            f"{int(self.documents[-1])}, expected 0 to {count}; the file is damaged")

    def _map_tokens(self, checks: Any) -> Tokens:
        found = mapped(bin_path(self.prefix), self.dtype, 0, self.num_tokens)
        if self.meta is None:
            return found  # there are no hashes to compare it with
        tokens: Tokens = PARTS.function("token hash checks")(self.prefix, found, self.meta, checks)
        return tokens

    def _map_mask(self) -> np.ndarray:
        path = mask_path(self.prefix)
        found = path.stat().st_size if path.is_file() else -1
        if found != self.num_tokens:
            raise DataError(f"{path}: expected {self.num_tokens} bytes, one per token, found "
                            f"{found if found >= 0 else 'no file'}; copy or prepare the corpus again")
        return mapped(path, "u1", 0, self.num_tokens)

    @property
    def num_documents(self) -> int:
        """Documents in the corpus."""
        return max(len(self.documents) - 1, 0)

    def sequence_start(self, index: int) -> int:
        """Position in the flat stream of sequence ``index``; ``num_sequences`` gives the end."""
        if index >= self.num_sequences:
            return self.num_tokens
        start = int(self.pointers[index]) // self.dtype.itemsize if index >= 0 else -1
        if not 0 <= start <= self.num_tokens:  # only the ends were checked when the corpus was opened
            raise DataError(f"{idx_path(self.prefix)}: sequence {index} starts at token {start} of {self.num_tokens}; "
                            "the file is damaged: `data verify` tells where")
        return start

    def document_start(self, index: int) -> int:
        """Position in the flat stream of document ``index``; ``num_documents`` gives the end."""
        return self.sequence_start(int(self.documents[index])) if self.num_documents else 0

    def document_edges(self, first: int = 0, end: int | None = None) -> np.ndarray:
        """Return where documents [first, end) start, and where the last ends, int64 [end - first + 1]; None: all.

        Raises:
            DataError: the index is damaged.
        """
        bounds = np.asarray(self.documents[first:(self.num_documents if end is None else end) + 1])
        edges = np.full(len(bounds), self.num_tokens, dtype=np.int64)
        inside = bounds < self.num_sequences
        edges[inside] = np.asarray(self.pointers)[bounds[inside]] // self.dtype.itemsize
        if len(edges) and (int(np.diff(edges, prepend=0).min()) < 0 or int(edges[-1]) > self.num_tokens):
            raise DataError(f"{self.prefix}: document boundaries go backwards; `data verify` tells where")
        return edges

    def nearest_document(self, position: int) -> int:
        """Return the document boundary closest to ``position``, as a position."""
        after = bisect_left(range(self.num_documents + 1), position, key=self.document_start)
        near = [self.document_start(i) for i in (after - 1, after) if 0 <= i <= self.num_documents]
        return min(near, key=lambda start: abs(start - position)) if near else 0

    def documents_in(self, position: int, count: int) -> np.ndarray:
        """Return where documents start in the ``count`` tokens of the flat stream from ``position`` on: int64 offsets
        from ``position``, ascending. Reads the index alone; an empty document is there too, where the next one starts.
        """
        numbers = range(self.num_documents)
        first = bisect_left(numbers, position, key=self.document_start)
        last = bisect_left(numbers, position + count, lo=first, key=self.document_start)
        sequences = np.asarray(self.documents[first:last])
        offsets: np.ndarray = self.pointers[sequences] // self.dtype.itemsize - position
        return offsets

    def read(self, position: int, count: int) -> np.ndarray:
        """Return ``count`` tokens of the flat stream from ``position`` on, int64 [count]; a copy."""
        if position < 0 or count < 0 or position + count > self.num_tokens:
            raise ValueError(f"{self.prefix}: tokens {position} to {position + count} of {self.num_tokens}")
        return self._tokens[position:position + count].astype(np.int64)

    def read_mask(self, position: int, count: int) -> np.ndarray | None:
        """Return which of ``count`` tokens from ``position`` on count as labels, bool [count]; None: all do."""
        if position < 0 or count < 0 or position + count > self.num_tokens:
            raise ValueError(f"{self.prefix}: tokens {position} to {position + count} of {self.num_tokens}")
        return self._mask[position:position + count] != 0 if self.masked else None

    def document(self, index: int) -> np.ndarray:
        """Return the tokens of document ``index``, int64; a copy."""
        if not 0 <= index < self.num_documents:
            raise ValueError(f"{self.prefix}: document {index} of {self.num_documents}")
        start, end = self.document_start(index), self.document_start(index + 1)
        if end < start:
            raise DataError(f"{idx_path(self.prefix)}: document {index} runs from token {start} to {end}; "
                            "the file is damaged: `data verify` tells where")
        return self.read(start, end - start)

    def chunks(self, size: int = CHUNK) -> Iterator[tuple[int, np.ndarray]]:
        """Yield (position, tokens as stored) over the whole stream."""
        for position in range(0, self.num_tokens, size):
            yield position, self._tokens[position:position + size]


def open_all(prefixes: Sequence[str | Path], cache: RemoteCache | None = None, *, further: int = 0
             ) -> list[IndexedDataset]:
    """Open corpora, and allow for the files that stay open: an index, tokens and a mask of each, and ``further``.

    Raises:
        DataError: one of them is missing or damaged, or too many files are open.
    """
    allow_open_files((3 + further) * len(prefixes))
    checks = PARTS.function("time limit of corpus checks")()
    return [IndexedDataset(prefix, cache, checks) for prefix in prefixes]


def check_local(corpora: Sequence[IndexedDataset]) -> None:
    """Compare corpora on this machine with their hashes where that is quick. Raises DataError: they differ."""
    local = [(c.prefix, c.meta, c._tokens) for c in corpora if c.remote is None and c.meta is not None]
    if local:
        PARTS.function("corpus checks at start")(local)


def bad_token(prefix: Path, position: int, token: int, vocab_size: int) -> DataError:
    """Return the error for a token that is outside the model's vocabulary."""
    return DataError(
        f"{bin_path(prefix)}: position {position}: token id {token} is outside the vocabulary of {vocab_size}; "
        "the corpus was made with another tokenizer: set model.vocab_size or prepare it again"
    )


# Fingerprint of a run's tokens, recorded in checkpoints, and its comparison with the data at hand.

COMPARED = ("tokens", "documents", "tokenizer_hash", "bin_xxh3", "mask_xxh3", "chat", "reference", "bos")


def data_fingerprint(
    corpora: Sequence[IndexedDataset], more: Callable[[IndexedDataset], Mapping[str, Any]] = lambda corpus: {}
) -> list[dict[str, Any]]:
    """Return one entry per corpus, of JSON's types, with ``more`` of it. Hashes come from the sidecars; the tokens are
    not read."""
    out = []
    for corpus in corpora:
        meta = corpus.meta
        known = {} if meta is None else {
            "tokenizer": meta.tokenizer, "tokenizer_hash": meta.tokenizer_hash, "bin_xxh3": meta.bin_xxh3,
            "source_xxh3": meta.source_xxh3, **({"mask_xxh3": meta.mask_xxh3} if meta.mask_xxh3 else {}),
            **({"bos": meta.bos} if meta.bos else {}),
            **more(corpus),
            **({"chat": meta.chat, "chat_file": str(chat_path(corpus.prefix).absolute())} if meta.chat else {})}
        counts = {"tokens": corpus.num_tokens, "documents": corpus.num_documents}
        out.append({"prefix": corpus.name, **counts, **known})
    return out


def changes(saved: Sequence[Mapping[str, Any]], mine: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return a line for each corpus that both lists name and that differs. Others are not compared."""
    before = {str(p.get("prefix")): p for p in saved if isinstance(p, Mapping)}
    out = []
    for corpus in mine:
        old = before.get(str(corpus["prefix"]), {})
        different = [f"{key} was {old[key]}, is {corpus[key]}" for key in corpus
                     if key in COMPARED and old.get(key) not in (None, "")
                     and corpus[key] not in ("", old[key])]
        if different:
            out.append(f"{corpus['prefix']}: " + ", ".join(different))
    return out
