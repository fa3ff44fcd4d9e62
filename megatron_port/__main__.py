"""``python -m megatron_port``: the same as the ``megatron-port`` command."""

from __future__ import annotations

import contextlib
import os
import sys

from megatron_port.core.dist.process import block_signals


def _is_a_rank(arguments: list[str]) -> bool:
    """Whether this process will be one rank of a run; with --nproc it starts ranks, and passes signals on."""
    if arguments and arguments[0].startswith(("--local_rank=", "--local-rank=")):  # of a launcher
        arguments = arguments[1:]
    return arguments[:1] == ["train"] and not any(a.startswith(("--nproc", "--dry-run")) for a in arguments)


def entry() -> None:
    """Run the command and end the process with its exit code.

    A failure leaves without Python's farewell. After a failed rendezvous a thread may still wait inside torch for a
    server that will never answer, and the C++ runtime would abort over it: exit 134 in place of the code. And taking
    torch down costs a second of CPU time, while everybody waits for the launcher to see that the run has ended.
    """
    if _is_a_rank(sys.argv[1:]):  # before the imports: on a busy node they take seconds, and a signal would kill it
        block_signals()
    from megatron_port.cli.main import main

    code = main()
    if code:
        with contextlib.suppress(OSError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


if __name__ == "__main__":
    entry()
