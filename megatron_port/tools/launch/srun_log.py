"""What srun itself said of a step: which task or node was lost first, or why no step was started."""

from __future__ import annotations

import re
from dataclasses import dataclass

TASK = r"srun: error: (?P<where>[^:\s]+): tasks? (?P<task>[\d,\-]+): (?P<what>.+)"
NODE = r"srun: error: (?P<what>Node failure on (?P<where>\S+))"
SAID = re.compile(r"srun: (?:(?:error|fatal): (?P<error>.+)|(?P<option>.*\boption\b.*))")
"""Errors, and what getopt says of an option."""
PERMANENT = re.compile(
    r"\binvalid|unrecognized option|requires an argument|more processors requested|is more than the job's|"
    r"only allocated \d+ nodes|node configuration is not available|memory required by task|permission denied|"
    r"cannot find \w+ plugin",
    re.IGNORECASE,
)
"""srun's words for a request that it would refuse again: in options, resources or plug-ins."""
PASSING = re.compile(
    r"task launch for|credential|job id|authenticat|protocol|connect|timed out|contact|busy|complet", re.IGNORECASE
)
"""Failures of the controller, a daemon or the network: another start may succeed."""


@dataclass(frozen=True)
class Refusal:
    """Refusal of srun to start a step, and its cause."""

    text: str
    permanent: bool
    """srun would refuse this request again on the same nodes."""


def first_srun_failure(text: str) -> str:
    """Return srun's first line about a lost task or node; empty if there is none.

    srun reports in the order in which it learns; what it says of tasks it ended itself comes later.
    """
    for line in text.splitlines():
        for pattern in (TASK, NODE):
            found = re.match(pattern, line.strip())
            if found:
                task = found.groupdict().get("task")
                return f"{found['where']}: {'task ' + task + ': ' if task else ''}{found['what']}"
    return ""


def refused_by_srun(text: str) -> Refusal | None:
    """Return srun's reason for not starting a step; None: it gave none.

    srun ends with the consequence ("Unable to create step …: REASON"); the line before it, if there is one, has the
    numbers.
    """
    found = [SAID.match(line.strip()) for line in text.splitlines()]
    said = [m["error"] or m["option"] for m in found if m]
    if not said:
        return None
    permanent = any(PERMANENT.search(words) for words in said) and not any(PASSING.search(words) for words in said)
    return Refusal(f"srun did not start the ranks: {' / '.join(said[-2:])}", permanent)
