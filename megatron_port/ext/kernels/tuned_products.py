"""A table of hipBLASLt's and rocBLAS's algorithms by shape, found ahead of time and frozen while a run trains.

On ROCm torch takes the algorithm that the library's heuristic names first. TunableOp
(https://docs.pytorch.org/docs/stable/cuda.tunable.html) times all of them and writes the fastest into a CSV file.
Timing while a run trains would let each rank and each start choose for itself, and the bits of a product go with its
algorithm.
So a run reads a table (``backend.tuned_products``), tunes nothing, and takes the library's default for shapes that are
not in it. A table is of one library: its lines of validators name torch, ROCm, hipBLASLt and the architecture,
and torch takes no line of a table whose validators differ from the machine's.

A table is made by a short run of the same layout, on one rank::

    PYTORCH_TUNABLEOP_ENABLED=1 PYTORCH_TUNABLEOP_TUNING=1 PYTORCH_TUNABLEOP_FILENAME=gfx942.csv megatron-port train …
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from megatron_port.core.errors import EnvironmentFault

VARIABLE = "PYTORCH_TUNABLEOP_"
"""Prefix of the variables by which torch would tune while a run trains."""
VALIDATOR = "Validator"
"""First field of a table's lines that name the library."""


def read_validators(path: Path) -> dict[str, str]:
    """Return what a table names as its library and machine.

    Raises:
        EnvironmentFault: it cannot be read, or has no line of validators or of products.
    """
    try:
        rows = [line.split(",") for line in path.read_text().splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise EnvironmentFault(f"backend.tuned_products {path}: {error}") from None
    found = {row[1]: ",".join(row[2:]) for row in rows if row[0] == VALIDATOR and len(row) > 2}
    products = [row for row in rows if row[0] != VALIDATOR and len(row) >= 3]
    if not found or not products:
        raise EnvironmentFault(
            f"backend.tuned_products {path}: {len(found)} lines of validators and {len(products)} of products; a table "
            f"of TunableOp has both: make it again with {VARIABLE}TUNING=1"
        )
    return found


def freeze(path: Path, *, tunable: Any = None) -> str:
    """Let products take the algorithms of a table, and tune nothing. Returns what was read, in words.

    Args:
        tunable: torch.cuda.tunable (None: torch's).

    Raises:
        EnvironmentFault: torch is not built for ROCm, the table cannot be read, or is of another library or device; the
            message names what differs.
    """
    if tunable is None:
        if not torch.version.hip:
            raise EnvironmentFault(
                "backend.tuned_products is for AMD GPUs, and this torch is built for "
                f"{'CUDA' if torch.version.cuda else 'CPUs'}; leave it empty"
            )
        tunable = torch.cuda.tunable
    wanted = read_validators(path)
    here = dict(tunable.get_validators())
    differs = [f"{name} {value} there, {here[name]} here" for name, value in wanted.items()
               if name in here and here[name] != value]
    if differs:
        raise EnvironmentFault(
            f"backend.tuned_products {path} is of another library: {'; '.join(differs)}; make it again here, or leave "
            "it empty"
        )
    tunable.enable(True)
    tunable.tuning_enable(False)
    tunable.record_untuned_enable(False)
    if not tunable.read_file(str(path)):
        raise EnvironmentFault(f"backend.tuned_products {path}: torch refuses the table; make it again here")
    return f"products: {len(tunable.get_results())} shapes from {path.name}, others by the library's default; no tuning"
