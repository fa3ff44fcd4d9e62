"""Reading what SLURM puts into the environment. Pure text; see srun(1), OUTPUT ENVIRONMENT VARIABLES."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence

from megatron_port.core.errors import EnvironmentFault

FIRST_RESERVED_STEP = 0xFFFFFFF0
"""Batch, extern and interactive "steps" are numbered from here to 2^32: no srun started them."""


def _split_outside_brackets(text: str) -> list[str]:
    """Pieces between the commas that stand outside brackets."""
    parts, depth, start = [], 0, 0
    for i, c in enumerate(text):
        depth += (c == "[") - (c == "]")
        if depth not in (0, 1):
            raise EnvironmentFault(f"SLURM node list \"{text}\": brackets do not match at character {i + 1}")
        if c == "," and not depth:
            parts.append(text[start:i])
            start = i + 1
    if depth:
        raise EnvironmentFault(f"SLURM node list \"{text}\": a bracket is not closed")
    return [p for p in [*parts, text[start:]] if p]


def expand_hosts(text: str) -> list[str]:
    """Expand ``frontier[00001-00003,00010],login1`` into every host, in order. Several brackets in a name multiply.

    Raises:
        EnvironmentFault: the text is not a SLURM node list.
    """
    hosts: list[str] = []
    for part in _split_outside_brackets(text.strip()):
        found = re.search(r"\[([^\]]*)\]", part)
        if not found:
            hosts.append(part)
            continue
        tails = expand_hosts(part[found.end() :]) or [""]
        for piece in found.group(1).split(","):
            first, dash, last = piece.partition("-")
            if not first.isdigit() or (dash and not last.isdigit()) or (dash and int(last) < int(first)):
                raise EnvironmentFault(f"SLURM node list \"{text}\": \"{piece}\" is not a range of numbers")
            for number in range(int(first), int(last or first) + 1):
                hosts += [f"{part[: found.start()]}{number:0{len(first)}d}{tail}" for tail in tails]
    return hosts


def compress_hosts(hosts: Sequence[str]) -> str:
    """The inverse of :func:`expand_hosts`: ``frontier[00001-00003,00010],login1``, in the order given.

    Only neighbours in ``hosts`` that differ in their last number share a bracket, so expanding
    gives exactly ``hosts`` again. Names must not contain commas or brackets.
    """
    runs: list[tuple[str, str, str]] = []
    for host in hosts:
        stem, digits = re.fullmatch(r"(.*?)([0-9]*)", host, re.DOTALL).groups()  # type: ignore[union-attr]
        if runs and digits and runs[-1][0] == stem and runs[-1][1]:
            _, first, last = runs[-1]
            # expand_hosts and SLURM pad every number of a range to the first one's width.
            if digits == f"{int(last) + 1:0{len(first)}d}":
                runs[-1] = (stem, first, digits)
                continue
        runs.append((stem, digits, digits))
    pieces: list[str] = []
    i = 0
    while i < len(runs):
        stem, j = runs[i][0], i + 1
        while j < len(runs) and runs[i][1] and runs[j][0] == stem and runs[j][1]:
            j += 1
        numbers = [first if first == last else f"{first}-{last}" for _, first, last in runs[i:j]]
        pieces.append(stem + (numbers[0] if len(numbers) == 1 and "-" not in numbers[0] else f"[{','.join(numbers)}]"))
        i = j
    return ",".join(pieces)


def expand_tasks(text: str) -> list[int]:
    """Expand ``8(x3),4`` into [8, 8, 8, 4], the tasks on each node.

    Raises:
        EnvironmentFault: the text is of another form.
    """
    counts: list[int] = []
    for part in text.split(","):
        found = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part.strip())
        if not found:
            raise EnvironmentFault(f"SLURM_STEP_TASKS_PER_NODE=\"{text}\": \"{part}\" is not of the form 8(x3)")
        counts += [int(found.group(1))] * int(found.group(2) or 1)
    return counts


def in_step(env: Mapping[str, str]) -> bool:
    """True for a task of srun; false in a batch script, an interactive shell and outside of SLURM."""
    step = env.get("SLURM_STEP_ID", "")
    return step.isdigit() and int(step) < FIRST_RESERVED_STEP


def step_rank() -> int:
    """This task's number in its step; 0 outside of one."""
    text = os.environ.get("SLURM_PROCID", "")
    return int(text) if in_step(os.environ) and text.isdigit() else 0


def step_port(env: Mapping[str, str]) -> int:
    """A port below the ephemeral range (15000 to 31999) that neighbouring jobs, steps and restarts do not share."""
    job, step, restart = (
        int(env.get(name, "") or 0) if env.get(name, "0").isdigit() else 0
        for name in ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT")
    )
    return 15000 + (31 * job + 7 * step + restart) % 17000


def same_host(a: str, b: str) -> bool:
    """Two names of one host: equal, or one is the other's short form."""
    a, b = a.lower().rstrip("."), b.lower().rstrip(".")
    return a == b or (("." not in a or "." not in b) and a.split(".")[0] == b.split(".")[0])
