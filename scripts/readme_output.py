"""Put the end of a run of ``make test`` into README.

    make test | tee LOG; python scripts/readme_output.py LOG

The lines are the run's own: pytest's sum, the tests of each folder, the most frequent reasons for skipping, the time
and the linters. Exit 1: the log is not that of a whole run.
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

README = Path(__file__).resolve().parent.parent / "README.md"
BLOCK = re.compile(r"(<!-- make test: begin -->\n```text\n).*?(```\n<!-- make test: end -->)", re.S)
REASONS = 2


def excerpt(log: str) -> str:
    """Return the lines of a log that README shows. Raises ValueError where one kind is missing."""
    if re.search(r"^=* ?\d+ failed, ", log, re.M):
        raise ValueError("tests failed in this run")
    passed = re.findall(r"^=* ?(\d+ passed.*?) ?=*$", log, re.M)
    folders = re.findall(r"^  \w+ +[1-9]\d* tests +[\d.]+ s$", log, re.M)
    skipped = re.findall(r"^  \d+ × .+$", log, re.M)[:REASONS]
    ends = re.findall(r"^total [\d.]+ min$|^(?:ruff|mypy|readability): ok \(\d+ s\)$", log, re.M)
    if not passed or not folders or len(ends) != 4:
        raise ValueError("the log has no sum, no folders, or no total and three linters that agree")
    return "\n".join([passed[0], *folders, *(["skipped:", *skipped, "  …"] if skipped else []), *ends]) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description="put the end of a run of make test into README")
    parser.add_argument("log", type=Path)
    try:
        lines = excerpt(parser.parse_args().log.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    text, count = BLOCK.subn(lambda found: found[1] + lines + found[2], README.read_text(encoding="utf-8"))
    assert count == 1, "README has no block of make test"
    README.write_text(text, encoding="utf-8")
    print(lines, end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
