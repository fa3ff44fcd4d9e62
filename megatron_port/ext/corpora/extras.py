"""Optional packages: what each is for, and one message when it is missing."""

from __future__ import annotations

import importlib
from typing import Any

from megatron_port.core.errors import DataError

EXTRAS = {
    "tokenizers": "tokenizer.json files of Hugging Face, and training a BPE",
    "tiktoken": "GPT-2's and OpenAI's byte-pair encodings",
    "sentencepiece": "SentencePiece .model files",
    "pyarrow": "Parquet files and `datasets` folders",
    "zstandard": ".zst files",
    "jinja2": "chat templates",
}
"""Module, which pip calls by the same name → what it is for."""


class MissingPackage(DataError):
    """An optional package that an input needs is not installed."""


def need(module: str, wanted_for: str) -> Any:
    """Import an optional module. Raises MissingPackage, with the command that installs it, where it is missing."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise MissingPackage(
            f"{wanted_for}: {module} is not installed ({EXTRAS[module]}); run: pip install {module} (or pip install "
            "'megatron_port[data]' for all kinds of input)"
        ) from error
