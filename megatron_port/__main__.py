"""``python -m megatron_port``: the same as the ``megatron-port`` command."""

from __future__ import annotations

import sys

from megatron_port.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
