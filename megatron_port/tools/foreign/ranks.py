"""The ranks of cases, forked from one process that has imported the trainer: ``python -m …foreign.ranks``.

A case is a line of JSON on standard input: adapter, folder, options, ranks, seed, seconds. Its reference, the
reference sample by sample (under cp by positions, too), and its ranks are forked, each with a log in the folder; a line
of JSON on standard output says how they ended.
"""

from __future__ import annotations

import faulthandler
import importlib
import importlib.util
import inspect
import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from megatron_port.core.errors import ConfigError, EnvironmentFault, PortError
from megatron_port.core.io.variables import variables
from megatron_port.tools.foreign.adapter import Adapter, World
from megatron_port.tools.foreign.positions import AXIS, blocks_of
from megatron_port.tools.foreign.process import Process

REFERENCE, SAMPLES, POSITIONS, LAYOUT = "reference", "samples", "positions", "layout"
"""Folders of a case."""
PRELOADED = ("torch", "torch._dynamo", "torch.distributed.tensor")
"""Modules that every process would import by itself, for seconds: optimizers import torch's compiler."""
ENDS_S = 3.0
"""For the others to end, after a rank has failed."""
STACKS_S = 1.0
MOST_WORDS = 600
"""Characters of a trainer's error."""


def find_adapter(spec: str) -> type[Adapter]:
    """Return the adapter of a file, ``FILE.py`` or ``FILE.py:CLASS``, or a shipped one by its name.

    Raises:
        ConfigError: there is none, or several without one being named.
    """
    path, _, wanted = spec.partition(":")
    if path.endswith(".py"):
        if not Path(path).is_file():
            raise ConfigError(f"there is no file {path}")
        sys.path.insert(0, str(Path(path).resolve().parent))
        made = importlib.util.spec_from_file_location(Path(path).stem, path)
        assert made is not None and made.loader is not None
        module = importlib.util.module_from_spec(made)
        sys.modules[made.name] = module
        _imported(path, lambda: made.loader.exec_module(module))  # type: ignore[union-attr]
    else:
        shipped = shipped_adapters()
        if path not in shipped:
            raise ConfigError(f"no adapter {path!r}; give a file FILE.py, or one of {', '.join(shipped)}")
        module = importlib.import_module(f"{__package__}.adapters.{shipped[path]}")  # it names what is not installed
    found = {name: kind for name, kind in vars(module).items()
             if inspect.isclass(kind) and issubclass(kind, Adapter) and kind.__module__ == module.__name__
             and (name == wanted if wanted else not name.startswith("_"))}
    if len(found) != 1:
        named = ", ".join(found) or "none"
        raise ConfigError(f"{path}: one subclass of Adapter is needed, there is {named}; name it as {path}:CLASS")
    return next(iter(found.values()))


def _imported(path: str, load: Callable[[], None]) -> None:
    """Run an adapter's file. Raises ConfigError with its own error and line."""
    try:
        load()
    except PortError:
        raise
    except Exception as error:
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == path]
        where = f"line {lines[-1]}: " if lines else ""
        raise ConfigError(f"{path} cannot be imported: {where}{type(error).__name__}: {error}") from error


def shipped_adapters() -> dict[str, str]:
    """Return names of the adapters in ``foreign.adapters`` and their modules."""
    folder = Path(__file__).parent / "adapters"
    return {p.stem.replace("_", "-"): p.stem for p in sorted(folder.glob("*.py")) if not p.stem.startswith("_")}


def free_port() -> int:
    """Return a port that nobody listens at."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def _reference(adapter: Adapter, options: Mapping[str, Any], case: Path, seed: int) -> None:
    process = Process(adapter, World(0, 1, {**options, **adapter.layout}), case, seed=seed, reference=True)
    process.run().write(case / REFERENCE)


def _samples(adapter: Adapter, options: Mapping[str, Any], case: Path, seed: int) -> None:
    process = Process(adapter, World(0, 1, {**options, **adapter.layout}), case, seed=seed)
    record, counts = process.by_sample()
    record.write(case / SAMPLES)
    (case / SAMPLES / "counts.json").write_text(json.dumps(counts))


def _positions(adapter: Adapter, options: Mapping[str, Any], case: Path, seed: int, blocks: int) -> None:
    process = Process(adapter, World(0, 1, {**options, **adapter.layout}), case, seed=seed)
    record, cells = process.by_cell(blocks)
    record.write(case / POSITIONS)
    told = {"cells": [asdict(cell) for cell in cells], "sequence": adapter.sequence}
    (case / POSITIONS / "cells.json").write_text(json.dumps(told))


class Case:
    """One layout's processes."""

    def __init__(self, kind: type[Adapter], case: Mapping[str, Any]) -> None:
        self._kind, self._folder = kind, Path(case["folder"])
        self._seed = case["seed"]
        self._options, self._size, self._until = case["options"], case["ranks"], time.monotonic() + case["seconds"]
        for name in (REFERENCE, SAMPLES, POSITIONS, LAYOUT):
            (self._folder / name).mkdir(parents=True, exist_ok=True)
            for old in (self._folder / name).glob("*.*"):
                old.unlink(missing_ok=True)  # of an earlier case: a record that is not written again must not be read

    def _fork(self, folder: str, rank: int, size: int, port: int, work: Callable[[Adapter], None]) -> int:
        """Start a process; return its id."""
        log = self._folder / folder / f"rank-{rank:05d}.log"
        if pid := os.fork():
            return pid
        code = 1
        try:
            place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
            for name, value in {**place, "MASTER_PORT": port}.items():
                os.environ[name] = str(value)
            os.environ["MASTER_ADDR"] = "127.0.0.1"
            out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
            os.dup2(out, 1)
            os.dup2(out, 2)
            faulthandler.register(signal.SIGUSR1, file=2, all_threads=True)
            import torch

            torch.set_num_threads(1)
            work(self._kind())
            code = 0
        except PortError as error:
            print(f"error: {error}", file=sys.stderr)
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)

    def _wait(self, running: dict[int, str]) -> str:
        """Wait for processes, of which ``running`` has the logs; return what went wrong, empty: nothing."""
        until, failed, signalled, logs = self._until, "", 0, dict(running)
        while running and time.monotonic() < until:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if not pid:
                time.sleep(0.005)
                continue
            log = running.pop(pid, "")
            if status and not failed:
                signalled = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
                failed, until = log, min(until, time.monotonic() + ENDS_S)
        hung = list(running)
        for pid in hung:
            if not failed:
                os.kill(pid, signal.SIGUSR1)
        if hung and not failed:
            time.sleep(STACKS_S)
        for pid in hung:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        if failed:
            ended = f"{signal.Signals(signalled).name} killed it; " if signalled else ""
            return f"{failed}: {ended}{_last_words(Path(failed))}"
        if hung:
            named = ", ".join(Path(logs[pid]).stem for pid in hung)
            return f"{named} did not end in time; their stacks are in {Path(logs[hung[0]]).parent}"
        return ""

    def run(self) -> dict[str, str]:
        """Return what went wrong, by folder."""
        options, case, seed = self._options, self._folder, self._seed
        log = str(case / REFERENCE / "rank-00000.log")
        pid = self._fork(REFERENCE, 0, 1, free_port(), lambda adapter: _reference(adapter, options, case, seed))
        if wrong := self._wait({pid: log}):
            return {REFERENCE: wrong}

        def rank_of(rank: int) -> Callable[[Adapter], None]:
            world = World(rank, self._size, options)
            return lambda adapter: Process(adapter, world, case, seed=seed).run().write(case / LAYOUT)

        port = free_port()
        running = {self._fork(LAYOUT, rank, self._size, port, rank_of(rank)):
                   str(case / LAYOUT / f"rank-{rank:05d}.log") for rank in range(self._size)}
        found = {LAYOUT: self._wait(running)}
        log = str(case / SAMPLES / "rank-00000.log")
        pid = self._fork(SAMPLES, 0, 1, free_port(), lambda adapter: _samples(adapter, options, case, seed))
        found[SAMPLES] = self._wait({pid: log})
        if blocks := self._blocks():
            log = str(case / POSITIONS / "rank-00000.log")
            pid = self._fork(POSITIONS, 0, 1, free_port(), lambda a: _positions(a, options, case, seed, blocks))
            found[POSITIONS] = self._wait({pid: log})
        return found

    def _blocks(self) -> int:
        """Return into how many blocks a sample's positions fall whose labels are to be told apart; 0: none."""
        adapter = self._kind()
        ranks = adapter.axes(World(0, self._size, self._options)).get(AXIS, 1)
        return blocks_of(ranks, adapter.sequence) if adapter.ignored is not None else 0


def _last_words(log: Path) -> str:
    """Return the error that ended a process, from its first line on."""
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    said = [line for line in lines if line.startswith("error: ")]
    if said:
        return said[-1].removeprefix("error: ")
    starts = [i for i, line in enumerate(lines) if line.startswith("Traceback")]
    after = lines[starts[-1] + 1 :] if starts else lines[-1:]
    words = " ".join(line.strip() for line in itertools.dropwhile(lambda line: line.startswith(" "), after))
    return words[:MOST_WORDS] or "it ended without a word"


class Ranks:
    """The handle of the process that forks. A context manager.

    Raises:
        EnvironmentFault: the process did not start.
    """

    def __init__(self) -> None:
        given, here = variables(prefixes=("",)), str(Path(__file__).resolve().parents[3])
        env = {**given, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "",
               "PYTHONPATH": os.pathsep.join(filter(None, [here, given.get("PYTHONPATH")]))}
        self._process = subprocess.Popen([sys.executable, "-m", __name__], stdin=subprocess.PIPE,
                                         stdout=subprocess.PIPE, env=env, text=True)

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _answer(self) -> dict[str, str]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise EnvironmentFault("the process that starts the ranks has ended; its message is above")
        found: dict[str, str] = json.loads(line)
        return found

    def run(
        self, spec: str, folder: Path, options: Mapping[str, Any], ranks: int, *, seed: int, seconds: float
    ) -> dict[str, str]:
        """Run one case; return what went wrong, by folder.

        Raises:
            ConfigError: the adapter cannot be imported there.
        """
        assert self._process.stdin is not None
        case = {"adapter": spec, "folder": str(folder), "options": dict(options), "ranks": ranks, "seed": seed,
                "seconds": seconds}
        self._process.stdin.write(json.dumps(case) + "\n")
        self._process.stdin.flush()
        answer = self._answer()
        if "error" in answer:
            raise ConfigError(answer["error"])
        return answer

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def main() -> None:
    """Serve cases until standard input ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a trainer prints at import is no answer
    for name in PRELOADED:
        importlib.import_module(name)
    kinds: dict[str, type[Adapter]] = {}
    for line in sys.stdin:
        case, answer = json.loads(line), dict[str, str]()
        try:
            if case["adapter"] not in kinds:
                kinds[case["adapter"]] = find_adapter(case["adapter"])
            answer = Case(kinds[case["adapter"]], case).run()
        except PortError as error:
            answer = {"error": str(error)}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    from megatron_port.tools.foreign import ranks

    ranks.main()  # the module by its name, so that its classes are those that adapters import
