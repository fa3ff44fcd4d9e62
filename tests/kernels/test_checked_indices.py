"""Token ids and row indices that are out of range, where only the device sees them: a debug build says which."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

CALL = """
import ctypes, sys
import torch
library = ctypes.CDLL(sys.argv[1])
named, index = int(sys.argv[3]), int(sys.argv[4])
x, out = torch.ones(named, 8), torch.zeros(named, 8)
order = torch.arange(3)
indices = torch.tensor([0, 1, index])
weight, space = torch.ones(3), torch.zeros(64)
tensors = {
    "mp_add_rows": (3, 8, x, order, indices, out, space), "mp_gather_rows": (3, 8, x, indices, out),
    "mp_sum_rows": (3, 8, 1, x, indices, weight, out),
    "mp_sum_rows_backward": (3, 8, 1, x, x, indices, weight, out, space),
}[sys.argv[2]]
given = [ctypes.c_void_p(t.data_ptr()) if isinstance(t, torch.Tensor) else ctypes.c_int64(t) for t in tensors]
sys.exit(getattr(library, sys.argv[2])(ctypes.c_void_p(None), ctypes.c_int32(0), *given, ctypes.c_int64(named)))
"""


def _called(library: Path, name: str, named: int, index: int) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", CALL, str(library), name, str(named), str(index)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize("name, what, least", [
    ("mp_add_rows", "token id (the data has another vocabulary than model.vocab_size)", 0),
    ("mp_gather_rows", "row of a token", 0), ("mp_sum_rows", "place of a token", -1),
    ("mp_sum_rows_backward", "place of a token", -1),
])
def test_an_index_that_is_out_of_range_is_named(built: Path, name: str, what: str, least: int) -> None:
    library = built / "libmp_emulated32.so"
    assert _called(library, name, 5, 4).returncode == 0
    for index in (5, 50_300, least - 1):
        done = _called(library, name, 5, index)
        assert done.returncode != 0 and f"{what} {index} is not from {least} to 4" in done.stderr, done
