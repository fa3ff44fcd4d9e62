"""Tokenizers of Hugging Face folders: read one, and write ours in their form."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron_port.checkpoint.disk import write_text
from megatron_port.checkpoint.reader import Checkpoint
from megatron_port.data.tokenizer import ByteTokenizer, GPT2Tokenizer, gpt2_directory
from megatron_port.errors import DataError
from megatron_port.interop.import_hf import TOKENIZER_FILES

FILE = "tokenizer.json"
_END = "<|endoftext|>"
_MAX_BYTES = 1 << 28


class HFTokenizer:
    """``tokenizer.json`` of a folder, through the ``tokenizers`` package. No special token is added to a text.

    Raises:
        DataError: the package or the file is missing, or the file cannot be read.
    """

    def __init__(self, folder: Path) -> None:
        self.name = str(folder)
        path = folder / FILE
        try:
            from tokenizers import Tokenizer
        except ImportError:
            raise DataError(f"{path}: reading it needs the package tokenizers; run: pip install tokenizers") from None
        if not path.is_file():
            raise DataError(
                f"{path} is not there; transformers writes it: python -c \"from transformers import AutoTokenizer as "
                f"A; A.from_pretrained('{folder}').save_pretrained('{folder}')\""
            )
        try:
            self._tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # its Rust raises plain Exception
            raise DataError(f"{path}: cannot be read: {str(error)[:300]}") from None
        self.vocab_size = int(self._tokenizer.get_vocab_size(with_added_tokens=True))
        end = eos_of_folder(folder, self._tokenizer.token_to_id)
        self.eod_id = -1 if end is None else end

    def encode(self, text: str) -> list[int]:
        """Ids of the text alone."""
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def decode(self, ids: Sequence[int]) -> str:
        """Special tokens are left out."""
        return str(self._tokenizer.decode([int(i) for i in ids], skip_special_tokens=True))


def eos_of_folder(folder: Path, token_to_id: Any = None) -> int | None:
    """The end-of-text id that a folder's settings name: generation_config, config, then the tokenizer's."""
    for name in ("generation_config.json", "config.json"):
        value = _json(folder / name).get("eos_token_id")
        if isinstance(value, list) and value:
            value = value[0]
        if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
            return value
    token = _json(folder / "tokenizer_config.json").get("eos_token")
    if isinstance(token, dict):
        token = token.get("content")
    if isinstance(token, str) and token_to_id is not None:
        found = token_to_id(token)
        return None if found is None else int(found)
    return None


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
    """Put a tokenizer's files into ``part``: those of ``folder``, or the form of the one trained with; what it is.

    Raises DataError: ``folder`` has none, or GPT-2's vocabulary is not installed.
    """
    name = checkpoint.extra.get("tokenizer")
    if folder is not None:
        found = [f for f in TOKENIZER_FILES if (folder / f).is_file()]
        for file in found:
            shutil.copyfile(folder / file, part / file)
        if found:
            return "as imported"
    if name == "byte":
        _write(part, _byte_json(), ByteTokenizer.vocab_size)
        return "bytes 0–255 and an end of text"
    if name == "gpt2":
        _write(part, _gpt2_json(), GPT2Tokenizer.vocab_size)
        return "GPT-2's byte-pair encoding"
    return "none in this folder"


def end_of_text(part: Path, kept: Path, checkpoint: Checkpoint) -> int | None:
    """The id that ends a text; None: unknown."""
    if kept.is_dir():
        found = eos_of_folder(kept)
        if found is not None:
            return found
    known = {"byte": ByteTokenizer.eod_id, "gpt2": GPT2Tokenizer.eod_id}
    name = checkpoint.extra.get("tokenizer")
    return known.get(name) if isinstance(name, str) else eos_of_folder(part)


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
