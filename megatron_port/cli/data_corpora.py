"""``data list | show | rm | verify``: the corpora that are there."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np

from megatron_port.cli.arguments import confirm, print_json, print_table
from megatron_port.cli.progress import ProgressBar
from megatron_port.core.data.format import bin_path, chat_path, idx_path, mask_path, meta_path, tokenizer_name
from megatron_port.core.data.indexed import IndexedDataset, unigram_entropy
from megatron_port.core.data.packing import build_indices
from megatron_port.core.errors import EXIT_OK, ConfigError, DataError
from megatron_port.core.io.numbers import quantity
from megatron_port.ext.corpora.tokenizer import get_tokenizer
from megatron_port.ext.corpora.verify import Report, verify
from megatron_port.ext.objectives.reference_losses import reference_path


def files_of(prefix: str | Path) -> list[Path]:
    """Return the files of a corpus that are there."""
    makers = (bin_path, idx_path, meta_path, mask_path, chat_path, reference_path)
    return [path for make in makers if (path := Path(make(prefix))).is_file()]


def list_all(args: argparse.Namespace) -> int:
    """Print the corpora below a folder. Raises DataError: no such folder."""
    if not args.directory.is_dir():
        raise DataError(f"{args.directory}: no such folder; give the one with your corpora")
    found = []
    for index in sorted(args.directory.rglob("*.idx")):
        prefix = index.with_suffix("")
        try:
            corpus = IndexedDataset(prefix)
        except DataError as error:
            found.append({"prefix": prefix, "fault": str(error)})
            continue
        found.append({
            "prefix": prefix, "documents": corpus.num_documents, "tokens": corpus.num_tokens,
            "tokenizer": corpus.meta.tokenizer if corpus.meta else None,
            "bytes": sum(path.stat().st_size for path in files_of(prefix)),
        })
    if args.json:
        print_json(found)
        return EXIT_OK
    rows = [("corpus", "documents", "tokens", "size", "tokenizer")]
    for one in found:
        if "fault" in one:
            rows.append((str(one["prefix"]), "", "", "", f"cannot be read: {one['fault']}"))
        else:
            rows.append((str(one["prefix"]), f"{one['documents']:,}", f"{one['tokens']:,}",
                         f"{quantity(one['bytes'])}B", one["tokenizer"] or "unknown"))
    print_table(rows, right=(1, 2, 3))
    return EXIT_OK


def remove(args: argparse.Namespace) -> int:
    """Remove corpora, the index first: without it nothing reads the rest. Raises DataError: there is none."""
    every = {prefix: files_of(prefix) for prefix in args.prefix}
    for prefix, files in every.items():
        if not files:
            raise DataError(f"{prefix}: no corpus of that name; `data list FOLDER` shows the corpora")
    names = ", ".join(str(path) for files in every.values() for path in files)
    if not confirm(f"remove {names}", yes=args.yes):
        return EXIT_OK
    for prefix, files in every.items():
        try:
            for path in sorted(files, key=lambda p: p.suffix != ".idx"):
                path.unlink()
        except OSError as error:
            raise DataError(f"{prefix}: cannot be removed ({error.strerror or error})") from error
        print(f"removed {prefix}")
    return EXIT_OK


def show(args: argparse.Namespace) -> int:
    """Print what is known about a corpus."""
    corpus = IndexedDataset(args.prefix)
    rows: dict[str, Any] = {"documents": corpus.num_documents, "tokens": corpus.num_tokens,
                            "token type": corpus.dtype.name}
    meta = corpus.meta
    if meta:
        rows.update({"tokenizer": meta.tokenizer, "tokenizer hash": meta.tokenizer_hash or "unknown",
                     "vocabulary": meta.vocab_size, "eod id": meta.eod_id, "text bytes": meta.source_bytes,
                     "source files": meta.source_files, "source xxh3": meta.source_xxh3})
        if meta.bos:
            rows["bos"] = meta.bos
        if meta.left_out or meta.repaired:
            rows["damaged"] = f"{meta.left_out} left out, {meta.repaired} repaired"
        if meta.mask_xxh3:
            rows |= {"assistant's tokens": meta.counted, "template hash": meta.chat}
        if meta.pairs:
            rows["pairs"] = meta.pairs
    rows.update(_documents(corpus, args.seq_length))
    entropy = unigram_entropy(corpus)
    rows["unigram entropy"] = f"{entropy:.4f} nats per token"
    if args.json:
        print_json({**{key.replace(" ", "_").replace("'s", ""): value for key, value in rows.items()},
                    "unigram_entropy": entropy})
        return EXIT_OK
    for key, value in rows.items():
        print(f"{key:16} {value}")
    if args.characters and meta and corpus.num_documents:
        try:
            tokenizer = get_tokenizer(tokenizer_name(args.prefix, meta))
        except DataError as error:
            print(f"{'begins':16} not shown: {error}")
            return EXIT_OK
        text = tokenizer.decode(corpus.document(0)[:4 * args.characters].tolist())
        print(f"{'begins':16} {text[:args.characters]!r}")
    return EXIT_OK


def _documents(corpus: IndexedDataset, seq_length: int) -> dict[str, str]:
    """Rows about the lengths of documents; ``seq_length`` 0: nothing about samples."""
    edges = corpus.document_edges()
    lengths = np.diff(edges)
    if not lengths.any():
        return {}
    rows = {"document tokens": f"{lengths.min()} to {lengths.max()}, median {np.median(lengths):g}, "
                               f"mean {lengths.mean():.1f}"}
    if seq_length < 0:
        raise ConfigError(f"--seq-length {seq_length}: tokens of a sample, at least 1")
    if seq_length:
        inside = np.unique(edges[:-1])
        inside = inside[inside % seq_length > 0]
        counts = 1 + np.bincount(inside // seq_length, minlength=-(-corpus.num_tokens // seq_length))
        rows["in a sample"] = f"{counts.mean():.1f} documents, at most {counts.max()}"
        rows["packed"] = build_indices(edges, seq_length).describe(seq_length)
    return rows


def check(args: argparse.Namespace) -> int:
    """Read corpora from end to end. Raises DataError, unless JSON was asked for: exit 4 then, with the faults in it."""
    every, found = Report(), []
    for prefix in args.prefix:
        with ProgressBar(f"verify {prefix}") as bar:
            report = verify(prefix, vocab_size=args.vocab_size, advance=bar)
        every.faults += report.faults
        found.append({"prefix": prefix, "checked": report.checked, "faults": [str(f) for f in report.faults]})
        for line in report.checked if not args.json else ():
            print(f"ok  {line}" if len(args.prefix) == 1 else f"ok  {prefix}: {line}")
    if args.json:
        print_json(found)
        return DataError.exit_code if every.faults else EXIT_OK
    every.raise_if_bad()
    return EXIT_OK
