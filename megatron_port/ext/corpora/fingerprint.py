"""Fingerprint of a run's tokens, recorded in checkpoints, and its comparison with the data at hand."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_port.core.data.format import chat_path, meta_path, tokenizer_name
from megatron_port.core.data.indexed import IndexedDataset
from megatron_port.core.errors import DataError
from megatron_port.ext.corpora.tokenizer import NAMES, identity
from megatron_port.ext.corpora.tokenizer_files import content_hash, read_file
from megatron_port.ext.objectives.reference_losses import read_header

COMPARED = ("tokens", "documents", "tokenizer_hash", "bin_xxh3", "mask_xxh3", "chat", "reference", "bos")


def data_fingerprint(corpora: Sequence[IndexedDataset]) -> list[dict[str, Any]]:
    """Return one entry per corpus, of JSON's types. Hashes come from the sidecars; the tokens are not read."""
    out = []
    for corpus in corpora:
        meta = corpus.meta
        reference = read_header(corpus.prefix) if meta is not None and meta.pairs else None
        known = {} if meta is None else {
            "tokenizer": meta.tokenizer, "tokenizer_hash": meta.tokenizer_hash, "bin_xxh3": meta.bin_xxh3,
            "source_xxh3": meta.source_xxh3, **({"mask_xxh3": meta.mask_xxh3} if meta.mask_xxh3 else {}),
            **({"bos": meta.bos} if meta.bos else {}),
            **({"reference": reference.xxh3} if reference else {}),
            **({"chat": meta.chat, "chat_file": str(chat_path(corpus.prefix).absolute())} if meta.chat else {})}
        counts = {"tokens": corpus.num_tokens, "documents": corpus.num_documents}
        out.append({"prefix": corpus.name, **counts, **known})
    return out


def changes(saved: Sequence[Mapping[str, Any]], mine: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return a line for each corpus that both lists name and that differs. Others are not compared."""
    before = {str(p.get("prefix")): p for p in saved if isinstance(p, Mapping)}
    out = []
    for corpus in mine:
        old = before.get(str(corpus["prefix"]), {})
        different = [f"{key} was {old[key]}, is {corpus[key]}" for key in corpus
                     if key in COMPARED and old.get(key) not in (None, "")
                     and corpus[key] not in ("", old[key])]
        if different:
            out.append(f"{corpus['prefix']}: " + ", ".join(different))
    return out


def _check_chat(path: Path, wanted: str) -> None:
    """Raise DataError here rather than in the export of what was trained."""
    found = hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else "no file"
    if found != wanted:
        raise DataError(f"{path}: the chat template of these conversations has sha256 {wanted}, found {found}; put the "
                        "old file back, or prepare the corpus again")


def check_tokenizers(corpora: Sequence[IndexedDataset]) -> None:
    """Check that the tokenizers named in the sidecars are those that made the corpora, and so are the chat templates.

    Raises:
        DataError: a tokenizer's files, or a template, were exchanged since.
    """
    for corpus in corpora:
        meta = corpus.meta
        if meta is not None and meta.chat:
            _check_chat(chat_path(corpus.prefix), meta.chat)
        if meta is None or not meta.tokenizer_hash:
            continue
        name = tokenizer_name(corpus.prefix, meta)
        if name in NAMES:
            found = identity(name)["hash"]
        else:
            path = Path(name.partition(":")[2].rpartition("#")[0] or name.partition(":")[2])
            if name.startswith("tiktoken:") or not path.is_file():
                continue  # a network may be needed; training itself needs no tokenizer
            # End-of-document ids that no document carries are not in the sidecar.
            found = content_hash(read_file(path)[1], meta.eod_id) if meta.eod_id >= 0 else meta.tokenizer_hash
        if found != meta.tokenizer_hash:
            raise DataError(f"{meta_path(corpus.prefix)}: the corpus was made with tokenizer {meta.tokenizer} of hash "
                            f"{meta.tokenizer_hash}, the one that is there now has {found}: its ids mean other text. "
                            "Put the old file back, or prepare the corpus again")
