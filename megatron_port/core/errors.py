"""Errors that a user can fix, and the exit code of each.

Every exception here carries one message that says what is wrong, the numbers,
and what to change. The command line prints it once, on rank 0, without a
traceback (unless ``--debug``), and exits with ``exit_code``. Anything else that
escapes is a bug of ours: one line, exit code 1, and its traceback in a file
(``io.logging``).

| code | meaning |
|---|---|
| 0 | done |
| 1 | a fault that nobody foresaw; the message says where its traceback is |
| 2 | configuration |
| 3 | environment: launcher, network, devices, versions |
| 4 | data |
| 5 | checkpoint |
| 6 | numerics |
| 7 | hang |
| 85 | state saved; the job asks to be queued again |
| 130 | interrupted |
"""

from __future__ import annotations

EXIT_OK = 0
EXIT_CONFIG = 2
EXIT_ENVIRONMENT = 3
EXIT_DATA = 4
EXIT_CHECKPOINT = 5
EXIT_NUMERICS = 6
EXIT_HANG = 7
EXIT_REQUEUE = 85
EXIT_INTERRUPTED = 130


def shortened(text: str, characters: int) -> str:
    """Return ``text``, its middle left out where it is longer: what a file brought must not flood the log."""
    if len(text) <= characters:
        return text
    return f"{text[:characters * 2 // 3]} … {text[-(characters // 3):]}"


class PortError(Exception):
    """Base of every error whose message is written for the user."""

    exit_code = 1
    is_reporter: bool | None = None
    """Whether this process prints it; None: rank 0 does (``dist.agree``). For errors that rank 0 may not survive."""
    permanent = False
    """Whether another attempt of the same job would fail alike on any nodes; so it is for exit codes 2, 4, 5 and 6."""


class ConfigError(PortError):
    """One or more faults in the configuration; all of them are reported at once (a message shows the first hundred)."""

    exit_code = EXIT_CONFIG

    def __init__(self, problems: str | list[str]) -> None:
        self.problems = [problems] if isinstance(problems, str) else list(problems)
        if len(self.problems) == 1:
            text = shortened(self.problems[0], 4000)
        else:
            shown = [f"  {i}. {shortened(p, 1000)}" for i, p in enumerate(self.problems[:100], 1)]
            more = len(self.problems) - len(shown)
            head, tail = f"{len(self.problems)} problems in the configuration:", [f"  and {more} more"] if more else []
            text = "\n".join([head, *shown, *tail])
        super().__init__(text)


class EnvironmentFault(PortError):
    """The machine, the launcher, the network or a package version is not usable."""

    exit_code = EXIT_ENVIRONMENT


class LauncherFault(EnvironmentFault):
    """The launcher gives too little, or contradicts itself; starting the job again changes nothing."""

    permanent = True


class PeerLost(EnvironmentFault):
    """Another rank ended or stopped answering. A consequence: the cause is in the log of the rank that ended first."""


class DataError(PortError):
    """A corpus, an index or a tokenizer is missing, damaged or does not fit the model."""

    exit_code = EXIT_DATA


class CheckpointError(PortError):
    """A checkpoint is missing, incomplete, damaged or of another model."""

    exit_code = EXIT_CHECKPOINT


class DamagedCheckpoint(CheckpointError):
    """The files of a checkpoint are not what was saved, or cannot be read; an earlier one may be whole."""


class NumericsError(PortError):
    """Training produced numbers that cannot be trusted; the step was not applied."""

    exit_code = EXIT_NUMERICS


class StateDamaged(NumericsError):
    """Something other than an update changed a rank's state."""


class HangError(PortError):
    """A rank stopped making progress."""

    exit_code = EXIT_HANG
