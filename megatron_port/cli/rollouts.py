"""``data rollouts``: what a folder of rollouts holds, and what other engines sampled added to it."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from megatron_port.cli.arguments import add_action, add_json, print_json, print_table
from megatron_port.core.config.ranges import local_path
from megatron_port.core.errors import EXIT_OK, DataError
from megatron_port.core.io.files import open_regular
from megatron_port.ext.objectives.rollout_files import Rollout, RolloutFile, append, files_of, from_json


def rollouts(args: argparse.Namespace) -> int:
    """Add files of JSON lines to a folder, where there are any, and print what the folder holds.

    Raises:
        DataError: a file or a line is not to be read; nothing is added.
    """
    for lines in [_lines(path) for path in args.add or ()]:
        append(args.folder, lines)
    found = [_facts(RolloutFile.open(path)) for path in files_of(args.folder)]
    if args.json:
        print_json(found)
        return EXIT_OK
    head = ("file", "rollouts", "groups", "sampled tokens", "mean reward", "sampled at step", "further")
    rows = [[f"{value:.3g}" if isinstance(value, float) else str(value) for value in fact.values()] for fact in found]
    print_table([head, *rows], right=range(1, 5))
    return EXIT_OK


def _lines(path: Path) -> list[Rollout]:
    found = []
    try:
        with open(open_regular(path, follow=True), "rb") as stream:
            for number, line in enumerate(stream, 1):
                if not line.strip():
                    continue
                try:
                    one = from_json(line.decode())
                    problem = one.problem()
                except (DataError, ValueError, TypeError, OverflowError, RecursionError) as error:
                    problem = str(error)
                if problem:
                    raise DataError(f"{path}:{number}: {problem}")
                found.append(one)
    except OSError as error:
        raise DataError(f"{path}: {error.strerror or error}") from error
    return found


def _facts(file: RolloutFile) -> dict[str, Any]:
    versions = file.tensors["versions"]
    first, last = int(versions.min()), int(versions.max())
    return {
        "file": file.path.name, "rollouts": len(file), "groups": len(set(file.tensors["groups"].tolist())),
        "sampled_tokens": int(file.tensors["sampled"].sum()), "mean_reward": float(file.tensors["rewards"].mean()),
        "version": str(first) if first == last else f"{first} to {last}",
        "further": ", ".join(name for name in ("old_logprobs", "ref_logprobs", "advantages") if name in file.tensors),
    }


def add_to(actions: Any) -> None:
    """Add the action to the ``data`` command."""
    action = add_action(
        actions, "rollouts", rollouts, help="a folder of sampled answers and their rewards; add others' to it",
        description="A line of JSON for each rollout: prompt_token_ids, token_ids, logprobs (of the answer, as vLLM "
        "and SGLang return them), reward, group (a number of the prompt), perhaps version, old_logprobs, ref_logprobs, "
        "advantage.")
    action.add_argument("folder", type=local_path, help="the folder; made where it is missing and lines are added")
    action.add_argument("--add", nargs="+", type=local_path, metavar="FILE.jsonl", help="files of such lines, each of "
                        "which becomes a file of the folder; all answers to a prompt are in one")
    add_json(action)
