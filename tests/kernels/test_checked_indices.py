"""Token ids and row indices that are out of range, where only the device sees them: a debug build says which."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

CALLS = """
import ctypes, json, os, sys
import torch
library = ctypes.CDLL(sys.argv[1])

def call(name, named, index):
    x, out = torch.ones(named, 8), torch.zeros(named, 8)
    order = torch.arange(3)
    indices = torch.tensor([0, 1, index])
    weight, space = torch.ones(3), torch.zeros(64)
    tensors = {
        "mp_add_rows": (3, 8, x, order, indices, out, space), "mp_gather_rows": (3, 8, x, indices, out),
        "mp_sum_rows": (3, 8, 1, x, indices, weight, out),
        "mp_sum_rows_backward": (3, 8, 1, x, x, indices, weight, out, space),
    }[name]
    given = [ctypes.c_void_p(t.data_ptr()) if isinstance(t, torch.Tensor) else ctypes.c_int64(t) for t in tensors]
    return getattr(library, name)(ctypes.c_void_p(None), ctypes.c_int32(0), *given, ctypes.c_int64(named))

found = []
for case in json.loads(sys.argv[2]):  # each in a fork: a wrong index ends it
    reading, writing = os.pipe()
    if not (child := os.fork()):
        os.dup2(writing, 2)
        os._exit(call(*case))
    os.close(writing)
    said = os.fdopen(reading, errors="replace").read()
    found.append((os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), said))
print(json.dumps(found))
"""
PLACES = {
    "mp_add_rows": ("token id (the data has another vocabulary than model.vocab_size)", 0),
    "mp_gather_rows": ("row of a token", 0), "mp_sum_rows": ("place of a token", -1),
    "mp_sum_rows_backward": ("place of a token", -1),
}
"""Function → what its indices are, and the least of them."""


def test_an_index_that_is_out_of_range_is_named(built: Path) -> None:
    cases = [(name, 5, index) for name, (_, least) in PLACES.items() for index in (4, 5, 50_300, least - 1)]
    command = [sys.executable, "-c", CALLS, str(built / "libmp_emulated32.so"), json.dumps(cases)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    for (name, _, index), (code, said) in zip(cases, json.loads(done.stdout), strict=True):
        what, least = PLACES[name]
        if index == 4:
            assert code == 0, said
        else:
            assert code != 0 and f"{what} {index} is not from {least} to 4" in said, (name, code, said)
