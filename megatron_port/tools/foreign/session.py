"""Cases of one adapter, run and compared."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_port.core.errors import ConfigError, EnvironmentFault
from megatron_port.tools.foreign.adapter import Adapter, World
from megatron_port.tools.foreign.compare import Comparison, Verdict
from megatron_port.tools.foreign.ranks import LAYOUT, POSITIONS, REFERENCE, SAMPLES, Ranks, find_adapter

SECONDS = 120.0
"""For one case."""


RESERVED = {"spec", "ranks", "seed", "seconds", "folder"}


class CaseFailed(EnvironmentFault):
    """The trainer itself ended or hung."""


class Session:
    """Cases of one adapter. ``ranks``: the process that starts them.

    Raises:
        ConfigError: the adapter cannot be found or read.
    """

    def __init__(self, spec: str, ranks: Ranks) -> None:
        self.spec, self.ranks = spec, ranks
        self.kind: type[Adapter] = find_adapter(spec)
        if missing := sorted(self.kind.__abstractmethods__):
            raise ConfigError(f"{self.kind.__name__} has no method {', '.join(missing)}, which an adapter needs")
        if taken := sorted(RESERVED & {*self.kind.layout, *self.kind.model}):
            raise ConfigError(f"{self.kind.__name__} has an option {', '.join(taken)}, which is an argument of "
                              "compare(); name it differently")

    def options(self, given: Mapping[str, Any], size: int) -> dict[str, Any]:
        """Return all options of a layout.

        Raises:
            ConfigError: an option that the adapter does not have, or a layout that is not legal.
        """
        known = {**self.kind.model, **self.kind.layout}
        if unknown := sorted(given.keys() - known.keys()):
            raise ConfigError(f"{self.kind.__name__} has no option {', '.join(unknown)}; it has "
                              f"{', '.join(sorted(known)) or 'none'}")
        options = {**known, **given}
        for name, value in options.items():
            try:
                plain = json.loads(json.dumps(value)) == value
            except TypeError:
                plain = False
            if not plain:
                raise ConfigError(f"{self.kind.__name__}'s option {name} is {value!r}; options are numbers, strings, "
                                  "booleans, None and lists of them")
        if why := self.kind().legal(options, size):
            raise ConfigError(f"{size} ranks cannot have {', '.join(f'{k}={v}' for k, v in options.items())}: {why}")
        return options

    def compare(
        self, given: Mapping[str, Any], size: int, *, seed: int = 0, folder: Path | None = None,
        seconds: float = SECONDS,
    ) -> Verdict:
        """Run the reference and ``size`` ranks with these options, and compare.

        Args:
            seed: of weights and batches.
            folder: keeps logs and records; None: a temporary one, which stays where the trainer failed.

        Raises:
            ConfigError: the layout is not legal; CaseFailed: a process ended early or hung.
        """
        options = self.options(given, size)
        out = folder or Path(tempfile.mkdtemp(prefix="parity-"))
        wrong = self.ranks.run(self.spec, out, options, size, seed=seed, seconds=seconds)
        for part in (REFERENCE, LAYOUT):
            if wrong.get(part):
                raise CaseFailed(f"{part}: {wrong[part]}")  # its folder stays, for the logs
        adapter = self.kind()
        numbers = {name: float(value) for name, value in options.items()
                   if isinstance(value, int) and not isinstance(value, bool) and value > 1}
        axes = adapter.axes(World(0, size, options))
        verdict = Comparison(out, size, axes, numbers, adapter.tolerance).run()
        if folder is None:
            shutil.rmtree(out, ignore_errors=True)
        for part in (SAMPLES, POSITIONS):
            if wrong.get(part):
                verdict.notes.append(f"no evidence by {part.removesuffix('s')}: {wrong[part]}")
        return verdict


def compare(
    spec: str, ranks: int, *, seed: int = 0, seconds: float = SECONDS, folder: Path | None = None, **options: Any
) -> Verdict:
    """Compare a trainer on ``ranks`` processes with itself on one.

    Args:
        spec: the adapter: FILE.py, FILE.py:CLASS, or the name of a shipped one.
        options: of the adapter's layout and model.

    Raises:
        ConfigError: no such adapter or option, or an illegal layout; CaseFailed: a process ended early or hung.
    """
    with Ranks() as running:
        return Session(spec, running).compare(options, ranks, seed=seed, folder=folder, seconds=seconds)
