"""The tokenizer of a run: what the sidecars of its corpora agree on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from megatron_port.core.config.schema import RunConfig
from megatron_port.core.data.indexed import (
    BOS_BY_TEMPLATE,
    BOS_UNKNOWN,
    OWN_TOKENIZERS,
    CorpusMeta,
    IndexedDataset,
    bos_ids,
    meta_path,
    tokenizer_name,
)
from megatron_port.core.errors import DataError
from megatron_port.ext.corpora.tokenizer import get_tokenizer, identity_of


def tokenizer_of(run: RunConfig, corpora: Sequence[IndexedDataset]) -> tuple[str | None, int, dict[str, Any]]:
    """Return (name, eod id, identity) that the sidecars agree on.

    Raises:
        DataError: they do not, or the model's vocabulary is too small.
    """
    metas: list[tuple[IndexedDataset, CorpusMeta]] = [(c, c.meta) for c in corpora if c.meta is not None]
    for corpus, meta in metas:
        if meta.vocab_size > run.model.vocab_size:
            raise DataError(f"{meta_path(corpus.prefix)}: tokenizer {meta.tokenizer} has {meta.vocab_size} ids, the "
                            f"model {run.model.vocab_size}; set model.vocab_size = {meta.vocab_size}")
    # By hash where all have one: the same tokenizer lies beside each corpus that it made, under another name.
    hashed = all(meta.tokenizer_hash for _, meta in metas)
    if len({(meta.tokenizer_hash if hashed else meta.tokenizer, meta.eod_id) for _, meta in metas}) > 1:
        raise DataError("data.train: corpora of different tokenizers cannot be blended: "
                        + ", ".join(f"{c.prefix} ({m.tokenizer}, hash {m.tokenizer_hash[:12] or 'unknown'}, eod "
                                    f"{m.eod_id})" for c, m in metas))
    _check_bos(metas)
    asked = run.data.tokenizer
    if metas:
        corpus, meta = metas[0]
        if asked not in ("auto", meta.tokenizer):
            _check_asked(asked, corpus, meta)
        found = {"name": meta.tokenizer, "vocab_size": meta.vocab_size, "eod_id": meta.eod_id}
        bos = next((m.bos for _, m in metas if m.bos != BOS_BY_TEMPLATE), BOS_BY_TEMPLATE)
        return tokenizer_name(corpus.prefix, meta), meta.eod_id, {
            **found, "hash": meta.tokenizer_hash, **({"bos": bos} if bos else {})}
    if asked != "auto":
        tokenizer = get_tokenizer(asked)
        return asked, tokenizer.eod_id, {**identity_of(tokenizer), "bos": BOS_UNKNOWN}
    if run.data.mask_eod_loss:
        raise DataError(f"data.mask_eod_loss: {corpora[0].prefix} has no sidecar that names its end-of-document id; "
                        "set data.tokenizer")
    return None, -1, {}


def _check_bos(metas: Sequence[tuple[IndexedDataset, CorpusMeta]]) -> None:
    """Raise DataError where documents of some corpora begin with BOS and those of others do not; conversations begin
    as their template does."""
    begins = {c.prefix: bos_ids(m.bos) for c, m in metas}
    if len({ids for ids in begins.values() if ids is not None}) > 1:
        raise DataError("data.train: documents of these corpora do not begin alike: "
                        + ", ".join(f"{prefix} (with {' '.join(map(str, ids)) or 'no BOS'})"
                                    for prefix, ids in begins.items() if ids is not None)
                        + "; prepare them again alike, all with --no-bos or all without it")


def _check_asked(asked: str, corpus: IndexedDataset, meta: CorpusMeta) -> None:
    """``data.tokenizer`` is not the sidecar's name; only a hash can say that it is the same. Raises DataError."""
    own = asked in OWN_TOKENIZERS or meta.tokenizer in OWN_TOKENIZERS
    if own or identity_of(get_tokenizer(asked))["hash"] != meta.tokenizer_hash:
        raise DataError(f"data.tokenizer is {asked}, but {corpus.prefix} was made with {meta.tokenizer}; "
                        "set data.tokenizer = \"auto\" or prepare the corpus again")
