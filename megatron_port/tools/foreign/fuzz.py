"""Drawn layouts of a trainer, the smallest failing one of each, and a script that shows it."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_port.core.errors import ConfigError
from megatron_port.core.io.files import write_text
from megatron_port.tools.foreign.compare import Verdict
from megatron_port.tools.foreign.session import CaseFailed, Session

TRIES = 200
"""Draws for one legal case."""


@dataclass
class Drawn:
    """A case and how it ended."""

    seed: int
    ranks: int
    options: dict[str, Any]
    verdict: Verdict | None = None
    failure: str = ""
    """How the trainer itself ended or hung."""

    @property
    def ok(self) -> bool:
        """Is it equal?"""
        return self.verdict is not None and self.verdict.equal

    @property
    def lines(self) -> list[str]:
        """The words for what was found."""
        return list(self.verdict.lines()) if self.verdict is not None else [f"the trainer failed: {self.failure}"]


def draw(session: Session, sizes: Sequence[int], seed: int, fixed: Mapping[str, Any] | None = None) -> Drawn:
    """Return a legal case, with the options ``fixed``.

    Raises:
        ConfigError: none was found.
    """
    r, why = random.Random(seed), ""
    for _ in range(TRIES):
        size = r.choice(list(sizes))
        options = {name: r.choice(list(values)) for name, values in session.kind.space.items()}
        options |= fixed or {}
        try:
            session.options(options, size)
        except ConfigError as error:
            why = str(error)
            continue
        return Drawn(seed, size, options)
    raise ConfigError(f"{session.kind.__name__}.space has no legal layout among {TRIES} draws for ranks "
                      f"{', '.join(map(str, sizes))}; the last one: {why or 'space is empty'}")


def run(session: Session, case: Drawn, *, seconds: float, folder: Path | None = None) -> Drawn:
    """Run a case; return it with its end."""
    try:
        case.verdict = session.compare(case.options, case.ranks, seed=case.seed, folder=folder, seconds=seconds)
    except CaseFailed as error:
        case.failure = str(error)
    return case


def smaller(session: Session, case: Drawn, sizes: Sequence[int]) -> Iterator[Drawn]:
    """Yield cases that are plainer in one way: fewer ranks, two if they can be, or one option as by default."""
    plain = {**session.kind.model, **session.kind.layout}
    for size in sorted(s for s in {2, *sizes} if s < case.ranks):
        yield Drawn(case.seed, size, dict(case.options))
    for name, value in case.options.items():
        if value != plain[name]:
            yield Drawn(case.seed, case.ranks, {**case.options, name: plain[name]})


def minimised(session: Session, case: Drawn, sizes: Sequence[int], *, seconds: float) -> Drawn:
    """Return the plainest case that still fails, found one change at a time."""
    changed = True
    while changed:
        changed = False
        for plainer in smaller(session, case, sizes):
            try:
                session.options(plainer.options, plainer.ranks)
            except ConfigError:
                continue
            if not run(session, plainer, seconds=seconds).ok and (plainer.verdict is None) == (case.verdict is None):
                case, changed = plainer, True
                break
    return case


def reproduction(spec: str, case: Drawn) -> str:
    """Return a script that shows a case."""
    options = "".join(f", {name}={value!r}" for name, value in case.options.items())
    said = "\n".join(case.lines).replace("\\", "\\\\").replace('"""', "'''")
    where = str(Path(spec).resolve()) if spec.partition(":")[0].endswith(".py") else spec
    return (
        f'"""{said}\n"""\n\nimport sys\n\nfrom megatron_port.parity import compare\n\n'
        f"verdict = compare({where!r}, {case.ranks}, seed={case.seed}{options})\n"
        'print("\\n".join(verdict.lines()))\nsys.exit(0 if verdict.equal else 6)\n'
    )


def what_is_drawn(session: Session, sizes: Sequence[int], fixed: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a draw depends on beside its seed: adapter and text of its file, ranks, options that are fixed."""
    file = Path(session.spec.partition(":")[0])
    text = file.read_bytes() if file.is_file() else b""
    return {"adapter": session.spec, "text": hashlib.sha256(text).hexdigest()[:16], "sizes": sorted(sizes),
            "fixed": dict(fixed)}


def record(case: Drawn, of: Mapping[str, Any]) -> dict[str, Any]:
    """Return a case as JSON's types. ``of``: :func:`what_is_drawn`."""
    return {"seed": case.seed, "ranks": case.ranks, "options": case.options, "equal": case.ok, "said": case.lines,
            "of": dict(of)}


def recorded(file: Path, of: Mapping[str, Any]) -> dict[int, Mapping[str, Any]]:
    """Return the cases of a file by seed, of the same adapter, ranks and options; a last line that is not whole is left
    out."""
    found = {}
    for line in file.read_text().splitlines() if file.is_file() else ():
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if row.get("of") == dict(of):
            found[int(row["seed"])] = row
    return found


def write_reproduction(out: Path, spec: str, case: Drawn) -> Path:
    """Write the script; return its path."""
    path = out / f"reproduce-{case.seed}.py"
    write_text(path, reproduction(spec, case))
    return path
