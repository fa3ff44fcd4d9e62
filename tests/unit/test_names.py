"""The names and sentences of the project are those of its field: what was renamed does not come back.

A reader who knows Megatron-LM, torchtitan or DeepSpeed guesses a name before opening the file. A refused name or phrase
stands here with the one to use instead; what it may still be used for is allowed explicitly.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))
from readability import PHRASES, Refused  # noqa: E402

PACKAGE = sorted((ROOT / "megatron_port").rglob("*.py"))
SOURCES = [*PACKAGE, *sorted((ROOT / "kernels").rglob("*.py"))]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


WORDS = PHRASES
"""Phrases, in sentences and in messages; scripts/readability.py refuses more in the pages alone."""

IDENTIFIERS = (
    Refused(r"\bclass (Finding|Place|Outcome|Verdict)\b", "the name of what the class holds", pages=False),
    Refused(r"\b(input_gradient|weight_gradient|add_weight_gradient)\b", "dgrad, wgrad, wgrad_accumulate"),
    Refused(r"\b(WeightGradients|WeightCopies|SharedProducts)\b", "WgradAccumulator, QuantizedWeightCache"),
    Refused(r"\bweight_gradients\b", "wgrad_accumulator"),
    Refused(r"\.(holding|kept\()", ".deferred, .active("),
    Refused(r"\b(OneStage|mind_memory|bad_gradients)\b", "SingleStagePipelineModule, check_memory, …"),
    Refused(r"\bclass (Piece|Slot|Fragment|Pulse|Places|Windows)\b", "Shard, BucketEntry, ShardRange, …", pages=False),
    Refused(r"\bscratch\.of\(|\bWholeScratch\b", "ScratchBuffer.get"),
    Refused(r"\bdef (gate|hold|speak|upload|pins)\b", "skip_step_when, block_signals, is_rank_zero, to_device_async"),
    Refused(r"\b(round_there|check_pins|speaker|take_window)\b", "emulate_rounding, check_data_fingerprint, …"),
    Refused(
        r"\bmegatron_port[./](train[./](parity|places|trace|reorder|rounding)|parallel[./](products|upload)"
        r"|runtime[./](pulse|speak)|optim[./](windows|countdown)|data[./]pins|checkpoint[./]boxes|engine[./]totals"
        r"|watch[./](words|report)|telemetry[./]report|preflight[./]report|backend[./](widened|jit_ways))\b",
        "the module's new name",
    ),
)
"""Names in code, and of code in sentences."""


def refused_lines(text: str, refused: Refused) -> list[int]:
    """Return the numbers of the lines with a refused name or phrase that is not allowed there."""
    return [
        number
        for number, line in enumerate(text.splitlines(), 1)
        if re.search(refused.pattern, line) and not (refused.allowed and re.search(refused.allowed, line))
    ]


@pytest.mark.parametrize("refused", [*WORDS, *IDENTIFIERS], ids=lambda r: r.pattern[:40])
def test_what_was_renamed_does_not_come_back(refused: Refused) -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line}"
        for path in [*SOURCES, *(PAGES if refused.pages else ())]
        for line in refused_lines(path.read_text(), refused)
    ]
    assert not found, f"use {refused.use}: {', '.join(found)}"


OLD = (
    "A run goes on.", "Errors a user can mend", "a circle of waiting", "Masters are fp32 for the halves.",
    "they stay in the dtype", "between rooms", "law 1", "nats a token", "1.5 TFLOP/s a device", "4 bytes a rank",
    "once a step", "a line says so", "the whole of it", "make soak ARGS='--part crossings'", "comparing boxes",
    "class Finding:",
    "def input_gradient(self)", "weight.weight_gradients = x", "gradients.holding = []", "class Piece:",
    "copies = WeightCopies()", "scratch.of((2, 2))", "def gate(inner):", "self.speaker",
    "import megatron_port.train.places",
    "class OneStage(PipelineModule):",
)


@pytest.mark.parametrize("line", OLD)
def test_each_old_name_is_refused(line: str) -> None:
    """The patterns find what they are there for."""
    assert any(refused_lines(line, refused) for refused in (*WORDS, *IDENTIFIERS))


def test_every_pattern_has_an_old_name() -> None:
    unseen = [r.pattern for r in (*WORDS, *IDENTIFIERS) if not any(refused_lines(line, r) for line in OLD)]
    assert not unseen


def public_docstrings(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """``(line, docstring)`` of every public function, method, class and field that has one."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)) and not node.name.startswith("_"):
            text = ast.get_docstring(node)
            if text:
                yield node.lineno, text
        if isinstance(node, ast.ClassDef):
            for field, after in zip(node.body, node.body[1:]):
                if not isinstance(field, ast.AnnAssign) or not isinstance(after, ast.Expr):
                    continue
                if isinstance(after.value, ast.Constant):
                    yield after.lineno, str(after.value.value)


def bad_opening(text: str) -> bool:
    """A docstring that only refers elsewhere, or that has no head noun: "See x", "Of the output's gradient: …"."""
    return re.match(r"(See|Of|What is made of)\b", text) is not None


def test_public_docstrings_start_with_a_verb_or_a_noun() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line}"
        for path in PACKAGE
        for line, text in public_docstrings(ast.parse(path.read_text()))
        if bad_opening(text)
    ]
    assert not found, found


def test_an_opening_without_a_verb_or_a_noun_is_found() -> None:
    source = 'class A:\n    """See ``B``."""\n    def f(self):\n        """Of the output: what it takes."""\n'
    assert [line for line, text in public_docstrings(ast.parse(source)) if bad_opening(text)] == [1, 3]
    source = 'class A:\n    x: int\n    """Of the run."""\n'
    assert [line for line, text in public_docstrings(ast.parse(source)) if bad_opening(text)] == [3]
    assert not bad_opening("Offset of the first row.") and not bad_opening("Return the loss.")
