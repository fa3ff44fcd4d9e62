"""Chat templates of others, rendered in a process of their own that has a limit of time and memory.

Jinja's sandbox keeps a template from files and modules, not from a loop without end or a text of gigabytes. A request
and its answer are a line of JSON each; one process serves all templates of a process, and keeps what it compiled.
"""

from __future__ import annotations

import json
import os
import resource
import select
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache
from typing import Any

from megatron_port.core import package
from megatron_port.core.errors import DataError
from megatron_port.ext.corpora.template_jinja import compiled

SECONDS = 10.0
"""Limit for one conversation, which takes about a millisecond."""
MEMORY = 1 << 30
"""Address space of the process in bytes, the interpreter's 0.1 GB included."""
LARGEST_TEXT = 1 << 20
"""Characters of a rendered conversation, in addition to 16 times as many as it and its template have."""
START_SECONDS = 120.0
"""Limit for the start of the process, on a loaded machine or a slow disk."""
_START = (
    "import sys; sys.path.insert(0, {root!r}); from megatron_port.ext.corpora.template_process import serve; serve()"
)


class TemplateProcess:
    """The process that renders, started when it is first needed."""

    def __init__(self) -> None:
        self._child: subprocess.Popen[bytes] | None = None
        self._held = b""

    def ask(self, request: Mapping[str, Any], source: str) -> dict[str, Any]:
        """Return ``text`` (the rendered conversation), ``refused`` (why not) or ``unreadable`` (no template).

        Raises:
            DataError: the template takes too much time or memory. ``source`` names it.
        """
        child = self._started()
        try:
            assert child.stdin is not None and child.stdout is not None
            child.stdin.write(json.dumps(request).encode() + b"\n")
            child.stdin.flush()
            answer = self._line(child.stdout.fileno(), time.monotonic() + SECONDS)
        except (BrokenPipeError, EOFError):
            self._end()
            raise DataError(f"{source}: the process that renders it ended; it takes more than {MEMORY >> 20} MiB, or "
                            "is damaged. Use another template") from None
        except TimeoutError:
            self._end()
            raise DataError(f"{source}: it takes more than {SECONDS:.0f} s for one conversation; use another "
                            "template") from None
        except BaseException:  # Ctrl-C in a program that continues: the answer must not be taken for the next one
            self._end()
            raise
        found: dict[str, Any] = json.loads(answer)
        if "exhausted" in found:
            self._end()  # its memory is in pieces
            raise DataError(f"{source}: it takes {found['exhausted']} for one conversation; use another template")
        return found

    def _started(self) -> subprocess.Popen[bytes]:
        if self._child is None:
            root = str(package.ROOT)
            self._held = b""
            self._child = subprocess.Popen(
                [sys.executable, "-c", _START.format(root=root)], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL, start_new_session=True)  # Ctrl-C is for the parent
            assert self._child.stdout is not None
            try:
                self._line(self._child.stdout.fileno(), time.monotonic() + START_SECONDS)
            except BaseException as error:
                self._end()
                if not isinstance(error, (EOFError, TimeoutError)):
                    raise
                raise DataError("the process that renders chat templates does not start: "
                                + ("it ended" if isinstance(error, EOFError) else f"no answer in {START_SECONDS:.0f} s")
                                ) from None
        return self._child

    def _line(self, file: int, deadline: float) -> bytes:
        """Return the next line. Raises EOFError and TimeoutError."""
        parts = [self._held]
        while b"\n" not in parts[-1]:
            if not select.select([file], [], [], max(0.0, deadline - time.monotonic()))[0]:
                raise TimeoutError
            part = os.read(file, 1 << 20)
            if not part:
                raise EOFError
            parts.append(part)
        line, _, self._held = b"".join(parts).partition(b"\n")
        return line

    def _end(self) -> None:
        child, self._child = self._child, None
        if child is not None:
            child.kill()
            child.communicate()


@cache
def _of_process(pid: int) -> TemplateProcess:
    return TemplateProcess()


def template_process() -> TemplateProcess:
    """Return this process's own: a forked worker shares no pipe with its parent."""
    return _of_process(os.getpid())


def serve() -> None:
    """Answer requests until there are no more: the process itself."""
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    most = MEMORY if hard == resource.RLIM_INFINITY else min(MEMORY, hard)
    with suppress(ValueError, OSError):  # a system without this limit still has that of time
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
    made: dict[tuple[str, str], Any] = {}
    sys.stdout.write("{}\n")  # ready
    sys.stdout.flush()
    for line in sys.stdin.buffer:
        request = json.loads(line)
        # A loop without end ends even where the parent is gone.
        spent = resource.getrusage(resource.RUSAGE_SELF)
        cpu = int(spent.ru_utime + spent.ru_stime + 2 * SECONDS)
        resource.setrlimit(resource.RLIMIT_CPU, (cpu, resource.getrlimit(resource.RLIMIT_CPU)[1]))
        answer = json.dumps(_answer(request, made, LARGEST_TEXT + 16 * len(line)))
        sys.stdout.write(answer + "\n")
        sys.stdout.flush()


def _answer(
    request: Mapping[str, Any], made: dict[tuple[str, str], Any], largest: int
) -> dict[str, str]:
    key = (request["template"], request["now"])
    try:
        if key not in made:
            made.clear()  # a process needs one or two
            try:
                made[key] = compiled(*key)
            except DataError as error:
                return {"unreadable": str(error)}
        text = made[key].render(**variables(request["messages"], request["prompt"], request["pieces"]))
        return {"text": text} if len(text) <= largest else {"exhausted": f"{len(text)} characters"}
    except MemoryError:
        return {"exhausted": f"more than {MEMORY >> 20} MiB"}
    except Exception as error:  # a template can raise anything
        return {"refused": str(error)[:1000]}


def variables(messages: Sequence[Mapping[str, str]], prompt: bool, pieces: Mapping[str, str]) -> dict[str, Any]:
    """Return what a template can name."""
    return {**pieces, "messages": [dict(m) for m in messages], "tools": None, "documents": None,
            "add_generation_prompt": prompt}
