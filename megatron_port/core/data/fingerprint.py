"""Fingerprint of a run's tokens, recorded in checkpoints, and its comparison with the data at hand."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from megatron_port.core.data.format import chat_path
from megatron_port.core.data.indexed import IndexedDataset

COMPARED = ("tokens", "documents", "tokenizer_hash", "bin_xxh3", "mask_xxh3", "chat", "reference", "bos")


def data_fingerprint(
    corpora: Sequence[IndexedDataset], more: Callable[[IndexedDataset], Mapping[str, Any]] = lambda corpus: {}
) -> list[dict[str, Any]]:
    """Return one entry per corpus, of JSON's types, with ``more`` of it. Hashes come from the sidecars; the tokens are
    not read."""
    out = []
    for corpus in corpora:
        meta = corpus.meta
        known = {} if meta is None else {
            "tokenizer": meta.tokenizer, "tokenizer_hash": meta.tokenizer_hash, "bin_xxh3": meta.bin_xxh3,
            "source_xxh3": meta.source_xxh3, **({"mask_xxh3": meta.mask_xxh3} if meta.mask_xxh3 else {}),
            **({"bos": meta.bos} if meta.bos else {}),
            **more(corpus),
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
