"""Optional packages: what each is for, and one message when it is missing."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

from megatron_port.errors import DataError

EXTRAS: Mapping[str, tuple[str, str]] = {
    "tokenizers": ("tokenizers", "tokenizer.json files of Hugging Face, and training a BPE"),
    "tiktoken": ("tiktoken", "GPT-2's and OpenAI's byte-pair encodings"),
    "sentencepiece": ("sentencepiece", "SentencePiece .model files"),
    "pyarrow": ("pyarrow", "Parquet files and `datasets` folders"),
    "zstandard": ("zstandard", ".zst files"),
}
"""Module → (what pip calls it, what it is for)."""


def need(module: str, wanted_for: str) -> Any:
    """Import an optional module. Raises DataError, with the command that installs it, where it is missing."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package, use = EXTRAS[module]
        raise DataError(
            f"{wanted_for}: {package} is not installed ({use}); run: pip install {package} (or pip install "
            "'megatron_port[data]' for all kinds of input)"
        ) from error
