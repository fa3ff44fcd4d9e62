"""Text to a token corpus: on several cores, resumable, and either whole or absent.

The parent reads, cuts blocks and writes; workers parse and tokenize (``workers``). The unfinished files are in
``.PREFIX.prepare`` beside the corpus, with a journal that says, every ``SAVE_BYTES`` of input, how far they are good.
A later call with the same inputs and options reads the sources again, checks that they are the same bytes, and
tokenizes only what is missing.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import multiprocessing
import os
import shutil
import signal
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import xxhash

from megatron_port.core.data.indexed import BOS_BY_TEMPLATE, BOS_OMITTED, NO_BOS, CorpusMeta, chat_path
from megatron_port.core.dist.process import die_with_parent
from megatron_port.core.errors import DataError, EnvironmentFault, PortError
from megatron_port.core.io.files import write_bytes
from megatron_port.core.io.typed_json import Natural, read_optional
from megatron_port.ext.corpora import sources
from megatron_port.ext.corpora.chat_tokens import ChatRecipe
from megatron_port.ext.corpora.records import EXAMPLES, POLICIES, STOP, Encoded, Recipe, encode_block
from megatron_port.ext.corpora.source_files import Inventory, ReadOptions, find_sources
from megatron_port.ext.corpora.sources import Block, Reader
from megatron_port.ext.corpora.tokenizer import NOTHING_ADDED, Tokenizer, added_ids, identity_of
from megatron_port.ext.corpora.writer import IndexedWriter, Written, token_dtype

# Pool of forked processes that work on blocks. Results come in the order of the blocks; memory stays bounded.

Work = Callable[[Block], Encoded]


def ordered(blocks: Iterator[Block], work: Work, workers: int) -> Generator[tuple[Block, Encoded], None, None]:
    """Yield ``(block, its documents)`` in order; ``workers`` 1: here, without another process.

    The blocks that come back have no payload. Raises what ``work`` raises, for the first block in order that fails.

    Raises:
        EnvironmentFault: a worker was ended (out of memory, or a crash inside of a tokenizer).
    """
    if workers <= 1:
        for block in blocks:
            yield block, work(block)
        return
    pool = ProcessPoolExecutor(workers, multiprocessing.get_context("fork"), initializer=_begin, initargs=(work,))
    team: set[BaseProcess] = set()
    waiting: deque[tuple[Block, Future[Encoded]]] = deque()
    try:
        for block in blocks:
            waiting.append((replace(block, payload=b""), pool.submit(_work_on, block)))
            team.update(multiprocessing.active_children())
            if len(waiting) >= 4 * workers:  # a slow block may not let the others run ahead without end
                first, made = waiting.popleft()
                yield first, made.result()
        for first, made in waiting:
            yield first, made.result()
    except BrokenProcessPool:
        pool.shutdown()
        raise _lost(team) from None
    finally:
        pool.shutdown(cancel_futures=True)


def _begin(work: Work) -> None:
    """Prepare a worker: it keeps ``work``, which it got by the fork, and leaves Ctrl-C to its parent."""
    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    multiprocessing.current_process().work = work  # type: ignore[attr-defined]


def _work_on(block: Block) -> Encoded:
    made: Encoded = multiprocessing.current_process().work(block)  # type: ignore[attr-defined]
    return made


def _lost(team: Iterable[BaseProcess]) -> EnvironmentFault:
    """Return the error for a worker that ended by itself; the pool ends the others by SIGTERM."""
    codes = [p.exitcode for p in team if p.exitcode not in (None, 0, -signal.SIGTERM)] or [-signal.SIGTERM]
    code = codes[0] or 0
    how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
    return EnvironmentFault(f"a tokenizer process was ended ({how}); if memory is short, use fewer --workers. What was "
                            "done so far is kept where it was saved")


SAVE_BYTES = 256 << 20
"""Input between two entries of the journal."""
JOURNAL, LOCK = "journal.json", "lock"


@dataclass(frozen=True)
class Progress:
    """Progress of ``prepare``."""

    done: int
    """Bytes of the input files read."""
    total: int
    text: int
    """Bytes of (unpacked) records tokenized by this call."""
    tokens: int
    """Written so far, earlier calls included."""


@dataclass(frozen=True)
class PrepareResult:
    """Result of ``prepare``."""

    prefix: Path
    documents: int
    tokens: int
    source_bytes: int
    left_out: int = 0
    repaired: int = 0
    notes: tuple[str, ...] = ()
    """The first damaged records, in words."""
    resumed_documents: int = 0
    """Documents that an earlier, interrupted call had made."""
    counted: int = 0
    """Tokens that count as labels; all, where there is no mask."""
    blank: int = 0
    """Documents of white space only, which were dropped."""
    inputs: Inventory = field(default_factory=lambda: Inventory([], []))
    """The files that were read, and those that were not."""


@dataclass(frozen=True)
class _Journal:
    """How far the unfinished files are good."""

    recipe: str
    """Hash of all that the blocks and their tokens depend on, but the inputs' bytes."""
    blocks: Natural = 0
    payload_xxh3: str = ""
    """Over the records of those blocks."""
    written: Written = field(default_factory=lambda: Written(0, 0))
    left_out: Natural = 0
    repaired: Natural = 0
    blank: Natural = 0
    notes: tuple[str, ...] = ()

    @classmethod
    def read(cls, path: Path) -> _Journal | None:
        """None: there is none that can be used."""
        return read_optional(path, cls)[0]

    def after(self, digest: str, made: Encoded, written: Written) -> _Journal:
        """With one block more."""
        return replace(
            self, blocks=self.blocks + 1, payload_xxh3=digest, written=written, left_out=self.left_out + made.left_out,
            repaired=self.repaired + made.repaired, blank=self.blank + made.blank,
            notes=(*self.notes, *made.notes)[:EXAMPLES])


@contextmanager
def _work_folder(prefix: Path) -> Iterator[Path]:
    """The folder of the unfinished files, for this process alone. DataError: another one has it."""
    folder = prefix.parent / f".{prefix.name}.prepare"
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / LOCK, "ab") as lock:
        try:
            fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError) as error:
            raise DataError(f"{prefix}: another process is preparing this corpus; wait for it, or give another "
                            "name") from error
        except OSError:
            pass  # a file system without locks
        yield folder


def prepare(
    paths: Sequence[str | Path], prefix: str | Path, *, tokenizer: Tokenizer, options: ReadOptions | None = None,
    append_eod: bool = True, add_bos: bool = True, bad_input: str = STOP, workers: int = 1, fresh: bool = False,
    chat: ChatRecipe | None = None,
    progress: Callable[[Progress], None] | None = None, log: Callable[[str], None] = lambda line: None,
) -> PrepareResult:
    """Tokenize ``paths`` into ``<prefix>.bin/.idx/.meta.json``; nothing appears under these names unless all succeeds.

    A JSON line and a row of a table are documents. A plain file is one document, or, with ``blank_lines`` n > 0,
    one at each run of n or more blank lines; memory stays bounded for files of any size.
    White space alone makes no document. Each document begins with the ids that the tokenizer's post-processor adds
    (BOS, if any) unless ``add_bos`` is false, and ends with the eod id unless ``append_eod`` is false.
    The result does not depend on ``workers``, nor on interruptions.
    With ``chat``, JSON lines and rows are conversations, and ``<prefix>.mask`` says which tokens count as labels.

    Args:
        options: how inputs are read.
        bad_input: stop at a damaged record | skip (leave it out) | repair (U+FFFD for bytes that are not UTF-8, NUL
            removed; leave out what cannot be repaired).
        workers: processes that tokenize; 1: this one.
        fresh: do not resume an interrupted call.
        chat: how conversations become tokens; None: records are texts.
        progress: called after each block that was written.
        log: called with the table of the inputs, where a folder was read or a file left out, and with what else a user
            should know.

    Raises:
        DataError: unreadable or damaged input, or no text at all. What was made is kept for another call if it was
            in the journal already, and removed otherwise.
    """
    if bad_input not in POLICIES:
        raise DataError(f"bad_input is {bad_input!r}; choose one of {', '.join(POLICIES)}")
    options = replace(options or ReadOptions(), leave_out=bad_input != STOP, fields=chat.fields if chat else None)
    note = chat.end_note(append_eod=append_eod) if chat else ""
    if note:
        log(note)
    if options.blank_lines < 0:
        raise DataError(f"blank_lines is {options.blank_lines}; 0 keeps files whole, n > 0 splits at n blank lines")
    prefix = Path(prefix)
    inputs = find_sources(paths, options)
    if inputs.skipped or any(Path(path).is_dir() for path in paths):
        log(inputs.table())
    reader = Reader(inputs.sources, options)
    recipe = Recipe(tokenizer, token_dtype(tokenizer.vocab_size), options.key, append_eod, bad_input,
                    options.largest_record, chat, added_ids(tokenizer) if add_bos else NOTHING_ADDED)
    prefix.parent.mkdir(parents=True, exist_ok=True)
    with _work_folder(prefix) as folder:
        if fresh:
            _empty(folder)
        job = _Job(prefix, folder, reader, recipe, log)
        try:
            return replace(job.run(workers, progress), inputs=inputs)
        except _Changed:
            log(f"{prefix}: the inputs are not those that an interrupted call had read; starting afresh")
            _empty(folder)
            job = _Job(prefix, folder, Reader(reader.sources, options), recipe, log)
            return replace(job.run(workers, progress), inputs=inputs)


class _Changed(Exception):
    """The inputs are not those of the journal."""


class _Job:
    """One call of ``prepare``."""

    def __init__(self, prefix: Path, folder: Path, reader: Reader, recipe: Recipe, log: Callable[[str], None]) -> None:
        self.prefix, self.folder, self.reader, self.recipe, self.log = prefix, folder, reader, recipe, log
        key = _recipe_hash(reader, recipe)
        found = _Journal.read(folder / JOURNAL)
        self.journal = found if found and found.recipe == key else _Journal(key)
        self.payload = xxhash.xxh3_128()
        self.text = 0
        self.writer = IndexedWriter(prefix, vocab_size=recipe.tokenizer.vocab_size, masked=recipe.chat is not None,
                                    folder=folder)
        try:
            self.writer.restore(self.journal.written)
        except DataError as fault:  # a disk that lost writes or changed them
            log(f"{fault}; starting afresh")
            self.journal = _Journal(key)
            self.writer.restore(self.journal.written)
        self.resumed = self.journal.written.documents

    def run(self, workers: int, progress: Callable[[Progress], None] | None) -> PrepareResult:
        """All blocks, then the commit."""
        if self.resumed:
            self.log(f"{self.prefix}: resuming after {self.resumed} documents of an interrupted call")
        try:
            self._blocks(workers, progress)
            if not self.writer.documents:
                paths = ", ".join(str(s.path) for s in self.reader.sources[:5])
                raise DataError(f"no text in {paths}; {self.journal.left_out} damaged records were left out")
            self._describe()
            self.writer.commit()
        except _Changed:
            self.writer.close()
            raise
        except BaseException as error:
            self._leave(error)
            raise
        j = self.journal
        return PrepareResult(self.prefix, self.writer.documents, self.writer.tokens, self.reader.bytes_read, j.left_out,
                             j.repaired, j.notes, self.resumed,
                             self.writer.counted if self.recipe.chat else self.writer.tokens, j.blank)

    def _blocks(self, workers: int, progress: Callable[[Progress], None] | None) -> None:
        blocks = self.reader.blocks()
        for _ in range(self.journal.blocks):
            block = next(blocks, None)
            if block is None:
                raise _Changed
            self._hash(block)
        if self.journal.blocks and self.payload.hexdigest() != self.journal.payload_xxh3:
            raise _Changed
        since = 0
        hashes: deque[tuple[str, int]] = deque()

        def hashed() -> Iterator[Block]:
            # Read ahead of what is written: the journal gets the hash that belongs to its block.
            for block in blocks:
                self._hash(block)
                hashes.append((self.payload.hexdigest(), len(block.payload)))
                yield block

        with closing(ordered(hashed(), partial(encode_block, recipe=self.recipe), workers)) as results:
            for block, made in results:
                digest, size = hashes.popleft()
                self.writer.add_block(made.lengths, made.data, made.mask)
                # One assignment: whatever interrupts, journal and counts belong together.
                self.journal = self.journal.after(digest, made, self.writer.written)
                since, self.text = since + size, self.text + size
                if since >= SAVE_BYTES:
                    self._save()
                    since = 0
                if progress:
                    progress(Progress(block.position, self.reader.total, self.text, self.writer.tokens))

    def _hash(self, block: Block) -> None:
        self.payload.update(json.dumps([block.spans, block.sizes, block.dropped]).encode())
        self.payload.update(block.payload)

    def _save(self) -> None:
        self.writer.flush()
        write_bytes(self.folder / JOURNAL, json.dumps(asdict(self.journal)).encode())

    def _leave(self, error: BaseException) -> None:
        """Keep what the journal covers, if anything; otherwise leave nothing behind."""
        if isinstance(error, KeyboardInterrupt) and self.journal.blocks and self.text:
            self._save()
        saved = _Journal.read(self.folder / JOURNAL)
        if saved is None or not saved.blocks:
            self.writer.abort()
            return
        self.writer.close()
        if isinstance(error, (PortError, KeyboardInterrupt)):
            self.log(f"{self.prefix}: {saved.written.documents} documents are kept in {self.folder}; the same command "
                     "resumes there, and --fresh begins anew")

    def _describe(self) -> None:
        tokenizer, reader, chat = self.recipe.tokenizer, self.reader, self.recipe.chat
        if chat:
            write_bytes(chat_path(self.prefix), chat.description)
        else:
            chat_path(self.prefix).unlink(missing_ok=True)
        known = identity_of(tokenizer)
        self.writer.describe(CorpusMeta(
            tokenizer=_keep_tokenizer(tokenizer, self.prefix), vocab_size=tokenizer.vocab_size,
            eod_id=tokenizer.eod_id if self.recipe.append_eod else -1, tokenizer_hash=known["hash"],
            source_bytes=reader.bytes_read, source_files=len(reader.sources),
            source_xxh3=reader.source_hash.hexdigest(), left_out=self.journal.left_out, repaired=self.journal.repaired,
            blank=self.journal.blank, chat=chat.hash if chat else "", bos=_bos(self.recipe),
            pairs=self.writer.documents // 2 if chat and chat.fields.preference else 0))


def _bos(recipe: Recipe) -> str:
    """How documents begin, for the sidecar."""
    if recipe.chat is not None:
        return BOS_BY_TEMPLATE
    if recipe.added.before:
        return " ".join(map(str, recipe.added.before))
    return BOS_OMITTED if added_ids(recipe.tokenizer).before else NO_BOS


def _keep_tokenizer(tokenizer: Tokenizer, prefix: Path) -> str:
    """The name for the sidecar. A tokenizer that is a file is copied beside the corpus, which then stands alone."""
    path: Path | None = getattr(tokenizer, "path", None)
    if path is None:
        return tokenizer.name
    kind, _, rest = tokenizer.name.partition(":")
    copy = prefix.parent / f"{prefix.name}.tokenizer{path.suffix}"
    if copy.resolve() != path.resolve():
        write_bytes(copy, path.read_bytes())
    return f"{kind}:{copy.name}{rest[len(str(path)):]}"


def _recipe_hash(reader: Reader, recipe: Recipe) -> str:
    what: dict[str, Any] = {
        "format": 1, "tokenizer": identity_of(recipe.tokenizer), "eod": recipe.append_eod, "bad": recipe.bad_input,
        "options": asdict(reader.options), "blocks": [sources.BLOCK_BYTES, sources.MAX_DOCUMENT_BYTES],
        "files": [[str(s.path), s.kind, s.packed] for s in reader.sources],
        "chat": recipe.chat.hash if recipe.chat else "", "bos": _bos(recipe), "after": recipe.added.after,
    }
    return hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()


def _empty(folder: Path) -> None:
    """Remove what an interrupted call left; the lock stays."""
    for path in folder.iterdir():
        if path.name != LOCK:
            shutil.rmtree(path) if path.is_dir() else os.unlink(path)
