"""What came before a start of a run, and what should follow it.

A job script calls :func:`before` ahead of srun and :func:`after` when srun has ended; a start without an end (the batch
node died with its script) is completed by the next ``before``.
"""

from __future__ import annotations

import contextlib
import json
import re
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_port.core.config.schema import LaunchConfig
from megatron_port.core.errors import (
    EXIT_CHECKPOINT,
    EXIT_CONFIG,
    EXIT_DATA,
    EXIT_ENVIRONMENT,
    EXIT_NUMERICS,
    EXIT_OK,
    EXIT_REQUEUE,
    EnvironmentFault,
)
from megatron_port.core.io.logging import redact
from megatron_port.core.io.variables import variables
from megatron_port.run.launchers import Fate, Job
from megatron_port.run.run_files import (
    FAILED,
    FINISHED,
    GONE,
    HISTORY,
    SAVED,
    Attempt,
    AttemptOutcome,
    Failure,
    add_attempt,
    close_lost,
    failure_text,
    history_rows,
    outcome_faults,
    read_failure,
    read_history,
    read_outcome,
    steps_done,
)

# What srun itself said of a step: which task or node was lost first, or why no step was started.

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


FIRST_FAILURE = "first failure: "
FOLLOWS = "and resumes from the last checkpoint"
HOPELESS = (EXIT_CONFIG, EXIT_DATA, EXIT_CHECKPOINT, EXIT_NUMERICS)
"""Exit codes of faults that another attempt would meet again."""


@dataclass(frozen=True)
class NextAction:
    """Action of the job script, chosen at the end of an attempt."""

    action: str
    """done | requeue | chain | stop; stop also where SLURM has queued the job again by itself"""
    exit_code: int
    """Exit code of the job, if it ends here."""
    lines: tuple[str, ...]
    """For the end of the log; the first failure is in the last lines."""


def faults(run_folder: Path, attempt: str) -> list[str]:
    """Return what is not believed of a run's attempts and of this one's outcome, as lines for the log."""
    return [*filter(None, [history_rows(run_folder).note()]), *outcome_faults(run_folder, attempt)]


@contextlib.contextmanager
def _noting(run_folder: Path) -> Iterator[None]:
    """Turn the refusal of an entry into an EnvironmentFault: without entries failures could not be counted."""
    try:
        yield
    except OSError as error:
        raise EnvironmentFault(
            f"{run_folder / HISTORY} cannot be written: {error.strerror or error}; give this user write permission and "
            "space there, and submit the run again"
        ) from error


def _note(run_folder: Path, entry: Attempt) -> None:
    with _noting(run_folder):
        add_attempt(run_folder, entry)


def fruitless(history: Sequence[Attempt], series: str) -> list[Attempt]:
    """Return the attempts at the end of a series that brought the run no further.

    The first of them may have got somewhere before it failed; the others did not pass that step. A save that
    is no further than the one before counts too: a signal that always comes too early must not repeat for ever.
    """
    last: list[Attempt] = []
    furthest = -1
    for entry in (a for a in history if a.series == series):
        further = entry.step > furthest
        furthest = max(furthest, entry.step)
        if entry.status == FINISHED or (entry.status == SAVED and further):
            last = []
        elif entry.status in (FAILED, SAVED):
            last = [entry] if further else [*last, entry]
    return last


def before(
    run_folder: Path,
    job: Job,
    launch: LaunchConfig,
    *,
    nodes_down: Callable[[str], list[str]],
    record: str = "",
    log: str = "",
    now: float | None = None,
) -> list[str]:
    """Note that an attempt starts; return lines for the log on what went before.

    Args:
        nodes_down: SLURM node list → those of them that are down, described.
        record: number of the launch record.
        log: file of the job's output.

    Raises:
        EnvironmentFault: ``launch.max_attempts`` attempts of this series failed without getting any further.
    """
    now = time.time() if now is None else now
    lines: list[str] = []
    with _noting(run_folder):
        history = close_lost(run_folder, asking=job.attempt, nodes_down=nodes_down, now=now)
    if history:
        last = history[-1]
        lines.append(f"attempt {last.attempt} before this one {_told(last)}")
    failed = fruitless(history, job.series)
    if len(failed) >= launch.max_attempts:
        table = "\n".join(f"  attempt {a.attempt} on {a.nodes or '?'}: {a.cause}" for a in failed)
        raise EnvironmentFault(
            f"{len(failed)} attempts in a row failed without getting past step {failed[0].step}, "
            f"so the run stops here (launch.max_attempts {launch.max_attempts}):\n{table}\n"
            f"Fix the cause and submit it again: a new submission counts anew"
        )
    start = Attempt(job.attempt, job.series, job.node_list, time=now, began=now, record=record, log=log)
    _note(run_folder, start)
    lines.append(f"attempt {job.attempt} starts on {job.node_list or 'this host'}; {steps_done(run_folder)} steps done")
    return lines


def _told(entry: Attempt) -> str:
    if entry.status == FINISHED:
        return f"finished at step {entry.step}"
    if entry.status == SAVED:
        return f"saved step {entry.step} and stopped ({entry.cause})"
    return f"failed after step {entry.step}: {entry.cause}"


def after(
    run_folder: Path,
    job: Job,
    launch: LaunchConfig,
    *,
    code: int,
    srun_log: str,
    asked: str,
    fate: Fate,
    nodes_down: Callable[[str], list[str]],
    not_started: str = "",
    now: float | None = None,
) -> NextAction:
    """Note how this attempt ended; return what follows.

    Args:
        code: srun's exit code; only told, never trusted on its own.
        srun_log: srun's own lines ("srun: error: …").
        asked: signals that the job script received ("USR1", "TERM", "" …).
        fate: what SLURM does with the job; a cancelled one is never queued again, whatever came before.
        nodes_down: SLURM node list → those of them that are down, described.
        not_started: why the ranks were never started: ``nodes`` (preflight), ``setup`` (said above), ``signal``.
    """
    now = time.time() if now is None else now
    if not_started:
        return _under(fate, _without_ranks(run_folder, job, launch, not_started, code, now))
    outcome = read_outcome(run_folder)
    if outcome is not None and outcome.attempt == job.attempt:
        _note(run_folder, _ended(job, outcome.status, outcome.step, outcome.signal, now))
        if outcome.status == FINISHED:
            return NextAction("done", EXIT_OK, ())
        return _under(fate, _after_save(run_folder, job, launch, outcome, fate == "limit"))
    step = steps_done(run_folder)
    failure = read_failure(run_folder, job.attempt)
    found = _cause(run_folder, job, failure, code, srun_log, asked, nodes_down)
    _note(run_folder, _ended(job, FAILED, step, found.text, now))
    head = f"attempt {job.attempt} failed after step {step}; srun ended with {code}"
    action, why = _after_failure(run_folder, job, launch, found, step)
    return _under(fate, NextAction(action, found.exit_code, (head, why, FIRST_FAILURE + found.text)))


FATES: dict[Fate, str] = {
    "cancelled": "the job was cancelled: it is not queued again",
    "requeued": "SLURM has queued the job again by itself",
}


def _under(fate: Fate, verdict: NextAction) -> NextAction:
    """Adapt the action to a job that SLURM has already disposed of."""
    if fate not in FATES or verdict.action == "done":
        return verdict
    lines = [line for line in verdict.lines if FOLLOWS not in line and "launch.when_" not in line]
    last = len(lines) - 1 if lines and lines[-1].startswith(FIRST_FAILURE) else len(lines)
    code = EXIT_OK if verdict.exit_code == EXIT_REQUEUE else verdict.exit_code
    return NextAction("stop", code, (*lines[:last], FATES[fate], *lines[last:]))


NOT_STARTED = {
    "nodes": "preflight left too few good nodes",
    "setup": "the job could not be set up, see above",
    "ended": "a SIGTERM came before the ranks had started",
    "signal": "the signal that a time limit is near came before the ranks had started; give the job more time, or the "
              "signal less: sbatch --signal=B:USR1@SECONDS (launch.signal_seconds)",
}


def _without_ranks(run_folder: Path, job: Job, launch: LaunchConfig, why: str, code: int, now: float) -> NextAction:
    """Choose what follows a job that did not get as far as its ranks: only other nodes can help."""
    step = steps_done(run_folder)
    cause = NOT_STARTED[why]
    _note(run_folder, _ended(job, FAILED, step, cause, now))
    action, line = "stop", ""
    if why == "nodes":
        action, line = _after_failure(run_folder, job, launch, None, step)
    return NextAction(action, code or EXIT_ENVIRONMENT, (f"attempt {job.attempt} ended: {cause}", line))


def _after_save(
    run_folder: Path, job: Job, launch: LaunchConfig, outcome: AttemptOutcome, at_limit: bool
) -> NextAction:
    """Choose what follows a save: a cancelled job stops, one at its time limit is continued."""
    wanted = outcome.signal == "SIGUSR1" or at_limit  # a job cancelled after its SIGUSR1: ``_under``
    signal = outcome.signal or "a signal"
    line = f"saved at step {outcome.step} on {signal}" if outcome.step else f"stopped by {signal} before the first step"
    again = fruitless(read_history(run_folder), job.series)
    if wanted and len(again) >= launch.max_attempts:
        why = f"{len(again)} attempts in a row got no further than step {again[0].step}: the signal comes too early " \
              "for this time limit, see launch.signal_seconds and sbatch --signal"
        return NextAction("stop", EXIT_ENVIRONMENT, (line, why))
    action = launch.when_stopped if wanted else "stop"
    return NextAction(action, EXIT_REQUEUE if action == "stop" and wanted else EXIT_OK, (line, _next(action, wanted)))


def _ended(job: Job, status: str, step: int, cause: str, now: float) -> Attempt:
    return Attempt(job.attempt, job.series, job.node_list, status, step, cause, now)


def _next(action: str, wanted: bool) -> str:
    if action == "stop":
        return "" if not wanted else "launch.when_stopped is stop: submit the job again to resume"
    who = "the job is queued again" if action == "requeue" else "a new job is submitted"
    return f"{who} {FOLLOWS}"


@dataclass(frozen=True)
class Cause:
    """Cause of an attempt's end."""

    text: str
    """One line."""
    exit_code: int
    permanent: bool = False
    """Another attempt would meet it again."""


def _cause(
    run_folder: Path, job: Job, failure: Failure | None, code: int, srun_log: str, asked: str,
    nodes_down: Callable[[str], list[str]],
) -> Cause:
    """Return what ended the attempt, and the exit code for it."""
    if failure is not None:
        permanent = failure.permanent or failure.exit_code in HOPELESS
        return Cause(failure_text(failure), failure.exit_code, permanent)
    first = first_srun_failure(srun_log)
    noticed = read_failure(run_folder, job.attempt, lost_peer=True)
    down = nodes_down(job.node_list)
    lost = [f"nodes that cannot run jobs now: {', '.join(down)}"] if down else []
    if noticed is None and not first:
        refused = refused_by_srun(srun_log)
        if refused is not None:  # with a node lost the allocation is smaller than the step: another start may do
            return Cause("; ".join([refused.text, *lost]), EXIT_ENVIRONMENT, refused.permanent and not down)
    if noticed is not None and (not first or "Exited with exit code" in first):
        first = failure_text(noticed)  # the rank that exited is the one that noticed
    elif noticed is not None and GONE in noticed.message:
        first = f"{first}; {failure_text(noticed)}"  # srun knows why, the watch where
    parts = [*([first] if first else []), *lost]
    if not parts and asked:
        parts.append(f"{asked} came before there was anything to save")
    if not parts:
        parts.append(f"srun ended with {code} and no rank said why; the lines above are all there is")
    return Cause("; ".join(parts), EXIT_ENVIRONMENT)


def _after_failure(
    run_folder: Path, job: Job, launch: LaunchConfig, cause: Cause | None, step: int
) -> tuple[str, str]:
    """Return (action, why) after an attempt that failed."""
    if cause is not None and cause.permanent:
        return "stop", f"exit {cause.exit_code}: another attempt would meet the same fault"
    if launch.when_failed == "stop":
        return "stop", "launch.when_failed is stop"
    failed = fruitless(read_history(run_folder), job.series)
    if len(failed) >= launch.max_attempts:
        return "stop", (
            f"{len(failed)} attempts in a row failed without getting past step {failed[0].step}: the run stops here "
            f"(launch.max_attempts {launch.max_attempts})"
        )
    return launch.when_failed, f"{_next(launch.when_failed, True)} (failed attempt {len(failed)} of at most " \
                               f"{launch.max_attempts} without progress)"


# A line to a chat or a pager when a job starts, ends or is queued again: a webhook, beside SLURM's mail.
#
# The URL is in the environment variable MEGATRON_PORT_WEBHOOK, which sbatch hands to the job. It is a secret (who has
# it can post), so it is never written to a record, a log or a message.

VARIABLE = "MEGATRON_PORT_WEBHOOK"
TIMEOUT_S = 5.0


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """Refuses to be sent elsewhere."""

    def redirect_request(self, *_: object) -> None:
        """Return nothing: the answer becomes an HTTPError."""
        return None


def notify(event: str, text: str, **more: str) -> str:
    """Post ``{"text": …, "event": …}`` and what ``more`` names; return a line for the log if that failed.

    Slack, Mattermost and Teams show ``text``. Never raises: a job does not depend on it.
    """
    url = variables((VARIABLE,)).get(VARIABLE, "")
    if not url:
        return ""
    if not url.startswith(("https://", "http://")):
        return f"{VARIABLE} is no http(s) URL: nobody was told"
    body = json.dumps({"text": redact(text), "event": event, **more}).encode()
    try:
        request = urllib.request.Request(url, data=body, headers={"Content-Type": "application/json"})
        with contextlib.closing(urllib.request.build_opener(_NoRedirect).open(request, timeout=TIMEOUT_S)):
            return ""
    except urllib.error.HTTPError as error:
        return f"the webhook answered {error.code}: nobody was told"
    except Exception as error:  # a malformed URL raises anything, with the URL in its text
        return f"the webhook did not answer ({type(error).__name__}): nobody was told"
