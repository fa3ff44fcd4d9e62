"""What is known about corpora before a run: the entropy of their tokens, and the weights of a blend of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from megatron_port.core.config.dump import toml_value
from megatron_port.core.data.indexed import IndexedDataset
from megatron_port.core.errors import DataError


def unigram_entropy(data: IndexedDataset | str | Path) -> float:
    """Return the entropy of the token frequencies, nats per token. One pass; memory grows with the vocabulary only.

    It is the loss of the best model that ignores context.
    """
    corpus = data if isinstance(data, IndexedDataset) else IndexedDataset(data)
    counts = np.zeros(0, np.int64)
    for _, tokens in corpus.chunks():
        part = np.bincount(tokens.astype(np.int64), minlength=len(counts))
        part[:len(counts)] += counts
        counts = part
    if not corpus.num_tokens:
        raise DataError(f"{corpus.prefix}: the corpus holds no tokens")
    p = counts[counts > 0] / corpus.num_tokens
    return float(-(p * np.log(p)).sum())


# A blend of corpora: weights from sizes, and the number of epochs of each corpus.

RULES = ("tokens", "documents", "equal")


@dataclass(frozen=True)
class CorpusWeight:
    """One corpus of a blend."""

    prefix: str
    tokens: int
    documents: int
    weight: float
    """All add up to 1."""

    def epochs(self, drawn: int) -> float:
        """Return the epochs of this corpus when the blend gives ``drawn`` tokens in total."""
        return drawn * self.weight / max(self.tokens, 1)


def blend(corpora: Sequence[IndexedDataset], given: Mapping[str, float], *, by: str = "tokens",
          temperature: float = 1.0) -> list[CorpusWeight]:
    """Return the weights of a blend.

    Args:
        given: weights by prefix; all corpora or none.
        by: tokens | documents | equal: what weights are in proportion to, where none are given.
        temperature: sizes to the power of 1 / temperature; above 1 they are more even (mT5, arXiv 2010.11934).

    Raises:
        DataError: weights for some corpora only, a weight or temperature that is not above 0, an empty corpus,
            a corpus twice, tokenizers that differ.
    """
    names = [str(c.prefix) for c in corpora]
    if len(set(names)) < len(names):
        raise DataError(f"a corpus is named twice: {', '.join(sorted({n for n in names if names.count(n) > 1}))}")
    if by not in RULES or temperature <= 0:
        raise DataError(f"--by {by}, --temperature {temperature}: choose one of {', '.join(RULES)}, and a temperature "
                        "above 0")
    if given and set(given) != set(names):
        without = [n for n in names if n not in given]
        raise DataError(f"no weight for {', '.join(without)}; give PREFIX=WEIGHT for all corpora or for none")
    for corpus in corpora:
        if not corpus.num_tokens:
            raise DataError(f"{corpus.prefix}: the corpus holds no tokens")
    _same_tokenizer(corpora)
    sizes = {
        "tokens": [float(c.num_tokens) for c in corpora], "documents": [float(c.num_documents) for c in corpora],
        "equal": [1.0] * len(corpora),
    }[by]
    raw = [given[n] for n in names] if given else [size ** (1 / temperature) for size in sizes]
    if min(raw) <= 0:
        raise DataError(f"weights {raw}: each must be above 0; leave a corpus out instead")
    total = sum(raw)
    return [CorpusWeight(n, c.num_tokens, c.num_documents, w / total) for n, c, w in zip(names, corpora, raw)]


def _same_tokenizer(corpora: Sequence[IndexedDataset]) -> None:
    kinds: dict[str, str] = {}
    for corpus in corpora:
        if corpus.meta is not None:
            kinds.setdefault(corpus.meta.tokenizer_hash or corpus.meta.tokenizer, f"{corpus.prefix} "
                             f"({corpus.meta.tokenizer})")
    if len(kinds) > 1:
        raise DataError(f"corpora of different tokenizers cannot be blended: {', '.join(kinds.values())}")


def as_toml(shares: Sequence[CorpusWeight]) -> str:
    """Return the ``[data]`` section of a run file, which another file can extend."""
    return ("[data]\n" + f"train = {toml_value([s.prefix for s in shares])}\n"
            + f"weights = {toml_value([round(s.weight, 9) for s in shares])}\n")
