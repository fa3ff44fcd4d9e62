"""``python -m megatron_port``: the same as the ``megatron-port`` command."""

from __future__ import annotations

import os
import sys
import threading

from megatron_port.cli.main import main


def entry() -> None:
    """Run the command and end the process with its exit code.

    After a failed rendezvous a thread may still wait inside torch for a server that will never answer, and the
    C++ runtime would abort over it when Python leaves in the ordinary way: exit 134 in place of the code.
    """
    code = main()
    if code and threading.active_count() > 1:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


if __name__ == "__main__":
    entry()
