"""One sample of a dataset: its tokens, where its documents start, and which of its labels count."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Sample:
    """``seq + 1`` tokens: positions 0 to seq - 1 are read, and the label of position i is token i + 1."""

    tokens: np.ndarray
    """int64 [seq + 1]"""
    starts: np.ndarray | None = None
    """int32 [seq]: where in the sample the document of each position starts; None: the sample is one document"""
    counted: np.ndarray | None = None
    """bool [seq]: whether the label of a position has a loss; None: all do"""
    reference: np.ndarray | None = None
    """float64 [2], of a pair: the reference's log-probability of the chosen and the rejected answer"""


def document_starts(edges: np.ndarray, seq_length: int) -> np.ndarray:
    """Return for each position of a sample where its document starts, int32 [seq_length].

    ``edges``: positions where documents start, in any order; those outside of the sample are left out. What comes
    before the first is one document.
    """
    starts = np.zeros(seq_length, dtype=np.int32)
    inside = edges[(edges > 0) & (edges < seq_length)]
    starts[inside] = inside
    found: np.ndarray = np.maximum.accumulate(starts)
    return found
