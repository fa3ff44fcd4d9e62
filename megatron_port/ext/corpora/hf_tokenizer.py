"""Tokenizers of exported folders: the file trained with, what was imported, or ours in Hugging Face's form."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megatron_port.core.checkpoint.reader import Checkpoint
from megatron_port.core.checkpoint.shard import write_text
from megatron_port.core.data.indexed import bos_ids
from megatron_port.core.errors import CheckpointError, DataError, shortened
from megatron_port.core.io.files import write_bytes
from megatron_port.ext.corpora.chat_template import outside_target, settings_of
from megatron_port.ext.corpora.pinned import (
    ADVICE,
    FILES,
    PROBES,
    SETTINGS_FILE,
    PinnedChat,
    Trained,
    chat_difference,
    check_same,
    end_ids,
    first_difference,
    pieces,
    pinned_file,
    read_json,
    tokenizer_in,
    trained_with,
)
from megatron_port.ext.corpora.tokenizer import (
    ByteTokenizer,
    GPT2Tokenizer,
    Tokenizer,
    added_ids,
    bos_of,
    byte_characters,
    get_tokenizer,
    gpt2_directory,
    load,
    piece_named,
    settings_beside,
)

# Small files that come with a model: tokenizer, chat template, generation settings.

KEPT = "huggingface"
"""Folder beside the imported checkpoint with the small files of the source."""
COMPANIONS = (
    "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json",
    "added_tokens.json", "vocab.json", "merges.txt", "tokenizer.model", "chat_template.jinja",
)
TOKENIZER_FILES = COMPANIONS[2:]
_MAX_COMPANION = 1 << 28


def copy_companions(source: Path, kept: Path) -> None:
    """Copy tokenizer, chat template, generation settings and ``config.json`` to ``kept``.

    Raises CheckpointError: one is too large, or a link out of the folder.
    """
    for path in (source / name for name in COMPANIONS):
        if not path.is_file():
            continue
        target = outside_target(path)
        if target is not None:
            raise CheckpointError(f"{path} is a link to {target}, outside of its folder, and would be copied with the "
                                  "model; put a copy in its place if it belongs there")
        kept.mkdir(parents=True, exist_ok=True)
        if path.stat().st_size > _MAX_COMPANION:
            raise CheckpointError(f"{path}: {path.stat().st_size} bytes; such a file has at most {_MAX_COMPANION}")
        write_bytes(kept / path.name, path.read_bytes())


FILE = "tokenizer.json"
_END = "<|endoftext|>"


def kept_files(checkpoint: Checkpoint) -> Path | None:
    """Return the folder with the small files of the model that these weights began as; None: there is none, or it is of
    another tokenizer than the one trained with."""
    kept = checkpoint.path.parent / KEPT
    trained = trained_with(checkpoint)
    if not kept.is_dir():
        return None
    try:
        if trained.name:
            check_same(kept, trained, _form(trained))
    except DataError:
        return None
    return kept


def write_tokenizer(
    part: Path, checkpoint: Checkpoint, *, asked: Path | None = None, kept: Path | None = None,
    note: Callable[[str], None] = print,
) -> str:
    """Put the files of the tokenizer trained with into ``part``; what they are, for the model card.

    Args:
        asked: a folder that the user named: its files, if they are that tokenizer's.
        kept: the files of the model that the weights began as (:func:`kept_files`).
        note: gets a line where there is no tokenizer to write, or nothing to compare it with.

    Raises:
        DataError: the tokenizer's file is gone or is another, ``asked`` is another, or GPT-2's vocabulary is not
            installed.
    """
    trained = trained_with(checkpoint)
    if asked is not None:
        how = "not compared: the checkpoint records no tokenizer"
        if trained.name:
            how = check_same(asked, trained, _form(trained))
        _copy(part, asked)
        if not trained.name:
            note(f"tokenizer of {asked}, {how}")
        elif trained.kind in FILES:
            how += _keep_beginning(part, trained, tokenizer_in(part))
        return f"files of {asked.name}: {how}"
    if not trained.name:
        if kept is not None and _copy(part, kept):
            return "Hugging Face files, as they were imported"
        note("no tokenizer in the folder: the checkpoint does not record one; --tokenizer DIR adds it")
        return "none in this folder"
    if kept is not None and trained.kind not in FILES and _copy(part, kept):
        return "Hugging Face files of the model that was trained further"
    if trained.kind == "byte":
        _write(part, _byte_json(), ByteTokenizer.vocab_size)
        return "bytes 0–255 and an end of text"
    if trained.kind == "gpt2":
        _write(part, _gpt2_json(), GPT2Tokenizer.vocab_size)
        return "GPT-2's byte-pair encoding"
    if trained.kind not in FILES:
        raise DataError(
            f"the checkpoint was trained with tokenizer {trained.name}, which has no file in Hugging Face's form: "
            f"{ADVICE}"
        )
    return _write_pinned(part, trained, kept)


def begin_of_text(part: Path, checkpoint: Checkpoint, kept: Path | None) -> int | None:
    """The id that begins a text, for ``config.json``: as documents of training began, or as the model that the weights
    began as has it, or by the tokenizer in ``part``; None: there is none."""
    trained = trained_with(checkpoint)
    try:
        before = bos_ids(trained.bos) if trained.bos else None
    except ValueError:
        before = None
    if before:
        return before[0]
    for name in ("generation_config.json", "config.json") if kept is not None else ():
        found = read_json(kept / name).get("bos_token_id") if kept is not None else None
        if isinstance(found, int) and not isinstance(found, bool) and found >= 0:
            return found
    try:
        found = bos_of(tokenizer_in(part))
    except DataError:
        return None
    return found if found >= 0 else None


def _form(trained: Trained) -> Callable[[], dict[str, Any]]:
    return _byte_json if trained.kind == "byte" else _gpt2_json


def _write_pinned(part: Path, trained: Trained, kept: Path | None) -> str:
    """The file trained with under the name that transformers looks for, and what ends a text; the other files are those
    of ``kept``, which has the same tokenizer."""
    path = pinned_file(trained)
    if kept is not None:
        _copy(part, kept)
    shutil.copyfile(path, part / FILES[trained.kind][0])
    ours = load(trained.kind, str(path), eod=trained.piece)
    if kept is None:
        _write_settings(part, _named_pieces(ours), **({} if trained.kind == "hf" else _class_of(ours)))
    changed = _keep_beginning(part, trained, ours)
    what = {"hf": "tokenizer.json", "sentencepiece": "SentencePiece model"}[trained.kind]
    if not trained.hash:
        return f"the {what} that the run names (its checkpoint records no hash){changed}"
    return f"the {what} that the corpus was made with (hash {trained.hash[:12]}){changed}"


def _named_pieces(tokenizer: Any) -> dict[str, str]:
    """The pieces that end and begin a text, by the names of tokenizer_config.json."""
    of_id = {i: piece for piece, i in tokenizer.special.items()}
    named = {"bos_token": of_id.get(bos_of(tokenizer)), "eos_token": of_id.get(tokenizer.eod_id)}
    return {name: piece for name, piece in named.items() if piece is not None}


def _class_of(tokenizer: Any) -> dict[str, str]:
    """The class by which transformers converts a SentencePiece model: Llama's puts a blank before a text."""
    return {"tokenizer_class": "LlamaTokenizer" if tokenizer.encode("a") == tokenizer.encode(" a") else
            "GemmaTokenizer"}


def _keep_beginning(part: Path, trained: Trained, ours: Tokenizer) -> str:
    """Make the written tokenizer begin a text as documents of training began; words for the model card."""
    wanted = trained.added(ours)
    if trained.kind == "sentencepiece":  # transformers reads these two, and the model itself adds nothing
        _update_settings(part, {"add_bos_token": bool(wanted.before), "add_eos_token": bool(wanted.after)})
    body = read_json(part / FILE)
    if not body or wanted.before or not added_ids(tokenizer_in(part)).before:
        return ""
    write_text(part / FILE, json.dumps({**body, "post_processor": None}, ensure_ascii=False) + "\n")
    return "; without its post-processor, because documents of training began without BOS"


def make_paddable(part: Path) -> int | None:
    """Give the written tokenizer a piece to fill up a batch with, on the left, where it names none: the end of text, as
    ``tokenizer(texts, padding=True)`` needs one, and ``generate`` takes the last position of each row. Return its id;
    None: there is no such piece."""
    try:
        tokenizer: Any = tokenizer_in(part)
    except DataError:
        return None
    settings = settings_beside(part / SETTINGS_FILE)
    named = piece_named(settings, "pad_token")
    table = {**pieces(read_json(part / FILE)), **tokenizer.special}
    piece = named or piece_named(settings, "eos_token") or _named_pieces(tokenizer).get("eos_token", "")
    if piece not in table:
        return None
    _update_settings(part, {**({} if named else {"pad_token": piece}),
                            **({} if "padding_side" in settings else {"padding_side": "left"})})
    return int(table[piece])


def _update_settings(part: Path, changes: dict[str, Any]) -> None:
    """Change some of tokenizer_config.json, where it differs."""
    settings = settings_of(part)
    if any(settings.get(name) != value for name, value in changes.items()):
        write_text(part / SETTINGS_FILE, json.dumps({**settings, **changes}, indent=2, ensure_ascii=False) + "\n")


def _copy(part: Path, folder: Path) -> bool:
    """The tokenizer files of ``folder``; whether it has any."""
    found = [file for file in TOKENIZER_FILES if (folder / file).is_file()]
    for file in found:
        target = outside_target(folder / file)
        if target is not None:
            raise DataError(f"{folder / file} is a link to {target}, outside of its folder; put a copy in its place if "
                            "it belongs there")
        shutil.copyfile(folder / file, part / file)
    return bool(found)


def check_written(part: Path, checkpoint: Checkpoint, chat: PinnedChat | None = None) -> str:
    """Load the written tokenizer as users will, by transformers' AutoTokenizer; a sentence for the model card.

    ``chat``: the template written, by which a conversation must have our ids too.

    Raises:
        DataError: its ids differ from those of the tokenizer trained with. A SentencePiece model, which transformers
            converts in its own way, is said to differ instead: its file is right.
    """
    trained = trained_with(checkpoint)
    if not trained.name or not any((part / name).is_file() for name, _ in FILES.values()):
        return ""
    from transformers import AutoTokenizer

    of_part = {"hf": FILE, "sentencepiece": FILES["sentencepiece"][0]}.get(trained.kind)
    ours = load(trained.kind, str(part / of_part), eod=trained.piece) if of_part else get_tokenizer(trained.name)
    try:
        theirs = AutoTokenizer.from_pretrained(str(part), local_files_only=True)
        fault = first_difference(ours, lambda text: theirs.encode(text, add_special_tokens=False), PROBES)
        wanted = trained.added(ours)
        if not fault and theirs("a")["input_ids"] != [*wanted.before, *ours.encode("a"), *wanted.after]:
            fault = f"'a' becomes {theirs('a')['input_ids']}, and documents began with {list(wanted.before)}"
        theirs(list(PROBES), padding=True)
        fault = fault or (chat_difference(chat, ours, theirs) if chat else "")
    except Exception as error:  # transformers raises anything
        fault = f"{type(error).__name__}: {shortened(str(error), 200)}"
    if not fault:
        conversation = " and, by its chat template, on a conversation" if chat else ""
        return f"`AutoTokenizer` gives the ids of training on {len(PROBES)} texts{conversation}."
    if trained.kind == "sentencepiece":
        return ("Read `tokenizer.model` with the `sentencepiece` library: transformers' `AutoTokenizer` converts it to "
                "something that gives other ids.")
    raise DataError(f"{part}: AutoTokenizer does not read it as the tokenizer trained with: {fault}")


def end_of_text(checkpoint: Checkpoint, kept: Path | None) -> int | None:
    """The id that ends a text, for ``config.json``; None: unknown."""
    found = end_ids(kept) if kept is not None else ()
    if found:
        return found[0]
    end = checkpoint.manifest.state.tokenizer.get("eod_id")
    if isinstance(end, int) and end >= 0:
        return end
    known = {"byte": ByteTokenizer.eod_id, "gpt2": GPT2Tokenizer.eod_id}
    return known.get(str(checkpoint.extra.get("tokenizer")))


def _write(part: Path, body: dict[str, Any], size: int) -> None:
    write_text(part / FILE, json.dumps(body, ensure_ascii=False) + "\n")
    named = ("bos_token", "eos_token", "unk_token", "pad_token")
    _write_settings(part, dict.fromkeys(named, _END), padding_side="left", vocab_size=size)
    write_text(part / "special_tokens_map.json", json.dumps(dict.fromkeys(("bos_token", "eos_token"), _END)) + "\n")


def _write_settings(part: Path, pieces: dict[str, str], **more: Any) -> None:
    """``tokenizer_config.json``: the file is taken as it is, with these special pieces."""
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast", **pieces, "clean_up_tokenization_spaces": False,
        "model_max_length": 1 << 30, **more,
    }
    write_text(part / SETTINGS_FILE, json.dumps(settings, indent=2, ensure_ascii=False) + "\n")


def _byte_json() -> dict[str, Any]:
    vocabulary = {char: byte for byte, char in enumerate(byte_characters())}
    return _byte_level(vocabulary, [], end=ByteTokenizer.eod_id, words=False)


def _gpt2_json() -> dict[str, Any]:
    folder = gpt2_directory()
    vocabulary = json.loads((folder / "encoder.json").read_text())
    merges = [line for line in (folder / "vocab.bpe").read_text(encoding="utf-8").split("\n")[1:] if line]
    return _byte_level(vocabulary, merges, end=GPT2Tokenizer.eod_id, words=True)


def _byte_level(vocabulary: dict[str, int], merges: list[str], *, end: int, words: bool) -> dict[str, Any]:
    """A ``tokenizer.json``; ``words``: split into GPT-2's words first."""
    step = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": words}
    return {
        "version": "1.0", "truncation": None, "padding": None,
        "added_tokens": [{
            "id": end, "content": _END, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False,
            "special": True,
        }],
        "normalizer": None, "pre_tokenizer": step, "post_processor": None, "decoder": step,
        "model": {
            "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
            "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "vocab": vocabulary,
            "merges": merges,
        },
    }
