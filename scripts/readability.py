"""Hold the prose of the project to a few plain rules: short sentences, the field's words, orderly headings.

``make lint`` and ``make test`` call it. It reads README, docs/, CONTRIBUTING and the other pages for people, needs
nothing beyond Python, and takes less than a second. Code blocks, inline code and addresses are not prose; a table's
cells are. (vale does this elsewhere, but its package on PyPI downloads a program from GitHub at its first call.)

Rules:

- a sentence has at most 36 words, and a page's sentences 18 on average;
- at most half of a page's sentences are in the passive voice;
- no phrase of ``PHRASES``: private words, and word order that is not English; each names what to write instead;
- one heading of the first level, at the top; none skips a level, ends in a full stop or colon, occurs twice in its
  section, or is longer than ten words.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGES = ("README.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md", "CODE_OF_CONDUCT.md", "docs/**/*.md",
         "benchmarks/evidence/*.md",
         "examples/**/*.md", "tests/**/*.md", ".github/**/*.md")
LONGEST_SENTENCE = 36
MEAN_SENTENCE = 18.0
MOST_PASSIVE = 0.5
LONGEST_HEADING = 10


@dataclass(frozen=True)
class Refused:
    """A pattern that is refused; ``use``: what takes its place."""

    pattern: str
    use: str
    allowed: str = ""
    """A line that matches this may have it."""
    pages: bool = True
    """Refused in the pages too; else in Python only."""


PHRASES = (
    Refused(r"\bmend(s|ed|ing)?\b", "fix, repair"),
    Refused(r"\b(goes|go|went|going) on\b", "resume, continue"),
    Refused(r"\bsays? so\b", "say what is printed or recorded"),
    Refused(r"\bthe whole of\b", "all, the"),
    Refused(r"\bcircles? of (waiting|references)|\bin a circle\b|\bof circles\b", "deadlock, reference cycle"),
    Refused(r"\bthe halves\b", "half precision, bf16 and fp16", r"split backward|schedule"),
    Refused(r"\b(in|to) the dtype\b(?! (of|that))", "in the compute dtype"),
    Refused(r"\b(rooms|this room|only room|a room of)\b", "packages, modules"),
    Refused(r"\blaws?\b", "invariant"),
    Refused(r"\b(nats|bits) a (token|byte)\b", "nats per token, bits per byte"),
    Refused(r"\b(TFLOP/s|FLOPs) a \w", "TFLOP/s per device"),
    Refused(r"\b([Ss]econds|[Bb]ytes|[Tt]okens|[GM]B) a (step|rank|device|token|replica|layer)\b", "per step"),
    Refused(r"\b(once|twice) a (step|rank|device|replica|layer|micro-batch)\b", "once per step"),
    Refused(r"\bcrossings\b", "resharding round trips"),
    Refused(r"\b[Bb]oxes\b", "slices"),
)
"""Refused in the pages, and in the package's sentences and messages (tests/unit/test_names.py)."""

PROSE = (
    Refused(r"(^|[.;:] )Of which\b|, of which a\b", "name the thing: 'each token uses 2 of them'"),
    Refused(r"\b(what|all that|whatever) (the|this|a) (machine|host|node|device) has\b", "name it: 'the hardware'"),
    Refused(r"\bare there (for|where|as)\b", "'exist', or leave it out"),
    Refused(r"\bthere already is\b|\bis there already\b", "already exists"),
    Refused(r"\bas (it|they) (lies?|stands?)\b", "'as is', 'in place'"),
    Refused(r"\bby (itself|themselves|name) alone\b", "'alone'"),
    Refused(r"\bbrings? (along|back|with it)\b", "includes, restores"),
    Refused(r"\b(was|is|were|are) (not )?to be had\b", "was not available"),
    Refused(r"\bat hand\b", "available"),
    Refused(r"\b(comes?|came) of it\b", "the result"),
    Refused(r"\bmakes? nothing of\b|\bmake of\b", "name the effect"),
    Refused(r"\bwhat (came|comes) of\b", "the result of"),
    Refused(r"\bone's\b", "your, its"),
    Refused(r"\bneed (not )?be said\b", "is needed"),
    Refused(r"\bis only said\b|\bare only said\b", "is a warning"),
    Refused(r"\bto the bit\b", "bit for bit, bitwise"),
    Refused(r"\bthe way (back|there)\b", "the reverse mapping"),
    Refused(r"\bin the place of\b", "instead of"),
    Refused(r"\btakes? off\b|\btaken off\b", "remove, subtract"),
    Refused(r"\ba (micro-batch|GPU|device|rank|token|step|replica|node|second|core) each\b", "one … each"),
    Refused(r"\bhalves\b", "half precision; the two halves", r"split|two halves|schedule"),
    Refused(r"\bthe worse\b|\bthe less a\b", "rephrase"),
    Refused(r"\b(hereof|thereof|therein|wherein|whereof|hereby|whereby|thereby)\b", "of it, in it, by which"),
    Refused(r"\b(utilize[sd]?|utilizing|leverag(e[sd]?|ing)|in order to|prior to)\b", "use, to, before"),
    Refused(r"\b(simply|obviously|of course|very|just)\b", "leave it out"),
    Refused(r"\bcf\.|\bviz\.|\bresp\.", "see, namely, or"),
    Refused(r"\bbesides\b", "'as well', 'too'"),
    Refused(r"\b[Oo]ther ones?\b", "others"),
    Refused(r"\bstands? (there|here|in the|below|above|behind|beside)\b|\bstood\b", "is"),
    Refused(r"; else (?!if\b)|, else (the|a|an|its?|by|what|one|at|when|as|in|of|all|each|this|that)\b", "otherwise"),
    Refused(r"\b(lie|lies|lay) (in|at|beside|outside|within|inside|before|behind|where|there|here)\b", "is, are"),
    Refused(
        r"\b(rows?|values?|lines?|kernels?|instructions|bytes|tensors|launch|launches|pieces|elements|collectives?"
        r"|objects?|words?|numbers?|threads?|file) an? (rank|layer|line|row|element|thread|multiprocessor|slot|sample"
        r"|step|tensor|position|parameter|device|node|stage|expert|token|micro-batch|replica)\b(?! (of|that|is|has))",
        "bytes per row, a line per step",
    ),
    Refused(r"\bby the wall\b(?![ -]clock)", "by the wall clock"),
    Refused(r"\bdearer\b", "more expensive, slower"),
    Refused(r"\b(own|foreign|old|new) ones\b", "name them: 'the own kernels'"),
    Refused(r"\bto be (looked at|measured|had|seen) (again|first|later)\b", "'measure first', 'needs another look'"),
    Refused(r"\bso many times\b", "the number of times"),
    Refused(r"\beach way\b", "in each direction"),
    Refused(r"\bwhat came with\b", "from"),
    Refused(r"\b[Hh]eld to (the|a|an|its|their|bf16|fp32|[0-9])", "must be within, is compared with", r"hash"),
    Refused(r"\b(is|are|was|were) (apart\b|taken apart\b)", "are separate, were analysed"),
    Refused(r"\bmade of (it|that|them|these)\b", "the result"),
    Refused(r"\bof (today|before)\b", "current, previous"),
    Refused(r"\bnobody's\b|\bnone's\b", "'is not a label'"),
    Refused(r"\bare on the way\b|\bon (its|their) way\b", "in transit"),
    Refused(r"\bthere and back\b", "in both directions"),
    Refused(r"\bdoes? so\b(?! (by|with|in))", "repeat the verb"),
)
"""Refused in the pages alone."""

PASSIVE = re.compile(
    r"\b(is|are|was|were|be|been|being)\s+(?:(?:not|never|also|only|then|all|once|first|always|still|already)\s+)?"
    r"(\w+(?:ed|en)|made|built|sent|held|kept|run|read|done|put|found|said|paid|lost|cut|set|split|left|bound|met|"
    r"counted|given|taken|written|drawn|known|shown|seen|told|begun|gone|torn)\b"
)


@dataclass(frozen=True)
class Remark:
    """One complaint about a page."""

    page: str
    line: int
    text: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}: {self.text}" if self.line else f"{self.page}: {self.text}"


def blocks(text: str) -> Iterator[tuple[int, str, str]]:
    """``(line, kind, text)`` of each paragraph, list item, table cell and heading, without code."""
    fenced, start, lines = "", 0, [""]
    kind = "prose"
    for number, line in enumerate(text.splitlines(), 1):
        fence = re.match(r"\s*(```+|~~~+)", line)
        if fence and (not fenced or line.strip().startswith(fenced)):
            fenced = "" if fenced else fence.group(1)
        heading = re.match(r"(#{1,6}) +(.*)", line) if not fenced else None
        row = line.lstrip().startswith("|") and not fenced
        item = re.match(r"\s*([-*+]|\d+\.) +", line)
        if fenced or fence or heading or row or item or not line.strip():
            if "".join(lines).strip():
                yield start, kind, " ".join(lines)
            lines, kind = [], "prose"
        if heading:
            yield number, f"h{len(heading.group(1))}", heading.group(2)
        elif row and not re.fullmatch(r"[\s|:-]+", line):
            for cell in re.split(r"(?<!\\)\|", line.strip().strip("|")):
                yield number, "cell", cell.strip()
        elif not fenced and not fence and not row and line.strip():
            if not lines:
                start = number
            lines.append(line[item.end():] if item else line.strip())
    if "".join(lines).strip():
        yield start, kind, " ".join(lines)


def plain(text: str) -> str:
    """The text as it is read: links as their words, code and formulas as one word, no emphasis."""
    text = re.sub(r"<!--.*?-->|<[^>]+>", " ", text)
    text = re.sub(r"!\[[^\]]*\]\([^)]*\)", " ", text)
    text = re.sub(r"\[([^\]]*)\](\([^)]*\)|\[[^\]]*\])", r"\1", text)
    text = re.sub(r"(`+)(.+?)\1", "Code", text)
    text = re.sub(r"\S+://\S+|\bwww\.\S+", "Address", text)
    return re.sub(r"\s+", " ", text.replace("**", "").replace("*", "").replace("\\|", "|")).strip()


def sentences(text: str) -> list[str]:
    """Split at full stops, question marks, semicolons and colons that a space follows."""
    text = re.sub(r"\b(e\.g|i\.e|etc|vs|al|Fig|Sec|No|approx)\.", r"\1", text)
    return [s for s in re.split(r"(?<=[.!?;:])[)\"’”]*\s+", text) if re.search(r"\w", s)]


def words(sentence: str) -> int:
    """Words of a sentence; numbers and signs are none."""
    return len(re.findall(r"[A-Za-z][\w'’-]*", sentence))


def check_headings(page: str, found: list[tuple[int, int, str]]) -> Iterator[Remark]:
    """``found``: (line, level, text)."""
    if [level for _, level, _ in found].count(1) != 1 or found[0][1] != 1:
        yield Remark(page, 0, "wants one heading of the first level, at the top")
    depth, above, seen = 0, [""] * 7, set()
    for line, level, text in found:
        if level > depth + 1:
            yield Remark(page, line, f"heading skips a level: {text}")
        depth, above[level] = level, text
        key = (*above[2:level], level, text)
        if key in seen:
            yield Remark(page, line, f"heading occurs twice: {text}")
        seen.add(key)
        if text.endswith((".", ":", ";", ",")):
            yield Remark(page, line, f"heading ends in {text[-1]!r}")
        if words(text) > LONGEST_HEADING:
            yield Remark(page, line, f"heading of {words(text)} words: {text}")


def check(page: str, text: str) -> Iterator[Remark]:
    """Every remark about one page."""
    lengths, passive, headings = [], 0, []
    for line, kind, raw in blocks(text):
        said = plain(raw)
        if kind.startswith("h"):
            headings.append((line, int(kind[1]), raw.replace("`", "")))
        for refused in (*PHRASES, *PROSE):
            hit = re.search(refused.pattern, said)
            if hit and not (refused.allowed and re.search(refused.allowed, said)):
                yield Remark(page, line, f"{hit.group(0)!r}: {refused.use}")
        for sentence in sentences(said):
            count = words(sentence)
            if count > LONGEST_SENTENCE:
                yield Remark(page, line, f"a sentence of {count} words: {sentence[:60]}…")
            if kind == "prose" and count > 3:
                lengths.append(count)
                passive += PASSIVE.search(sentence) is not None
    yield from check_headings(page, headings)
    if lengths and sum(lengths) / len(lengths) > MEAN_SENTENCE:
        yield Remark(page, 0, f"{sum(lengths) / len(lengths):.1f} words in a sentence on average")
    if len(lengths) > 9 and passive > MOST_PASSIVE * len(lengths):
        yield Remark(page, 0, f"{passive} of {len(lengths)} sentences are in the passive voice")


def pages(root: Path = ROOT) -> list[Path]:
    """The files that are read."""
    return sorted({path for pattern in PAGES for path in root.glob(pattern) if ".venv" not in path.parts})


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", type=Path, help="these pages only")
    asked = parser.parse_args().files or pages()
    remarks = [r for path in asked
               for r in check(str(path.resolve().relative_to(ROOT)), path.read_text(encoding="utf-8"))]
    print("\n".join(map(str, remarks)), end="\n" if remarks else "")
    return 1 if remarks else 0


if __name__ == "__main__":
    sys.exit(main())
