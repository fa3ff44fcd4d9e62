"""Tokenizers of exported folders: the files that were imported, or ours in Hugging Face's form."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from megatron_port.checkpoint.disk import write_text
from megatron_port.checkpoint.reader import Checkpoint
from megatron_port.data.tokenizer import ByteTokenizer, GPT2Tokenizer, gpt2_directory
from megatron_port.interop.import_hf import TOKENIZER_FILES

FILE = "tokenizer.json"
_END = "<|endoftext|>"
_MAX_BYTES = 1 << 28


def end_ids(folder: Path) -> tuple[int, ...]:
    """The ids that end a text, as generation_config.json or else config.json says; empty: neither does."""
    for name in ("generation_config.json", "config.json"):
        value = _json(folder / name).get("eos_token_id")
        ids = value if isinstance(value, list) else [value]
        found = tuple(i for i in ids if isinstance(i, int) and not isinstance(i, bool) and i >= 0)
        if found:
            return found
    return ()


def _json(path: Path) -> dict[str, Any]:
    """The object in a file; empty where there is none."""
    try:
        if path.stat().st_size > _MAX_BYTES:
            return {}
        body = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return body if isinstance(body, dict) else {}


def write_tokenizer(part: Path, checkpoint: Checkpoint, folder: Path | None) -> str:
    """Put a tokenizer's files into ``part``: those of ``folder``, or of the one trained with; what it is.

    Raises DataError: GPT-2's vocabulary is not installed.
    """
    name = str(checkpoint.extra.get("tokenizer") or "")
    if folder is None and name.startswith("hf:"):
        folder = Path(name[3:].partition("#")[0])
        folder = folder if folder.is_dir() else folder.parent
    found = [file for file in TOKENIZER_FILES if folder is not None and (folder / file).is_file()]
    for file in found:
        assert folder is not None
        shutil.copyfile(folder / file, part / file)
    if found:
        return "Hugging Face files, as they were"
    if name == "byte":
        _write(part, _byte_json(), ByteTokenizer.vocab_size)
        return "bytes 0–255 and an end of text"
    if name == "gpt2":
        _write(part, _gpt2_json(), GPT2Tokenizer.vocab_size)
        return "GPT-2's byte-pair encoding"
    return f"{name}, not in this folder" if name else "none in this folder"


def end_of_text(checkpoint: Checkpoint, kept: Path) -> int | None:
    """The id that ends a text, for ``config.json``; None: unknown."""
    found = end_ids(kept)
    if found:
        return found[0]
    end = checkpoint.manifest.state.tokenizer.get("eod_id")
    if isinstance(end, int) and end >= 0:
        return end
    known = {"byte": ByteTokenizer.eod_id, "gpt2": GPT2Tokenizer.eod_id}
    return known.get(str(checkpoint.extra.get("tokenizer")))


def _write(part: Path, body: dict[str, Any], size: int) -> None:
    write_text(part / FILE, json.dumps(body, ensure_ascii=False) + "\n")
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast", "bos_token": _END, "eos_token": _END, "unk_token": _END,
        "clean_up_tokenization_spaces": False, "model_max_length": 1 << 30, "vocab_size": size,
    }
    write_text(part / "tokenizer_config.json", json.dumps(settings, indent=2) + "\n")
    write_text(part / "special_tokens_map.json", json.dumps(dict.fromkeys(("bos_token", "eos_token"), _END)) + "\n")


def _byte_characters() -> list[str]:
    """The character that byte-level vocabularies write for each byte: itself where printable, else from U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    out, other = [], 0
    for byte in range(256):
        out.append(chr(byte) if byte in printable else chr(256 + other))
        other += byte not in printable
    return out


def _byte_json() -> dict[str, Any]:
    vocabulary = {char: byte for byte, char in enumerate(_byte_characters())}
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
