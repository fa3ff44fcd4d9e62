"""Page-locked memory of an exact size, with a stand-in for the CUDA runtime."""

from __future__ import annotations

import gc
from types import SimpleNamespace

import pytest
import torch

from megatron_port.ext.memory.host_memory import host_bytes


def test_exactly_what_is_asked_for_is_locked_until_the_last_view_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    locked: dict[int, int] = {}
    answers = iter((0, 2))

    def register(at: int, nbytes: int, flags: int) -> int:
        code = next(answers)
        if not code:
            locked[at] = nbytes
        return code

    runtime = SimpleNamespace(cudaHostRegister=register, cudaHostUnregister=lambda at: locked.pop(at))
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    size = 5 * 4096 + 12  # torch's allocator would take 32,768
    data = host_bytes(size, pinned=True)
    assert locked == {data.data_ptr(): size} and data.data_ptr() % 4096 == 0 and not data.any()
    view = data[4:12].view(torch.float32).fill_(2.5)
    del data
    gc.collect()
    assert locked and view.tolist() == [2.5, 2.5]
    del view
    gc.collect()
    assert not locked
    with pytest.raises(RuntimeError, match="cudaHostRegister of 8 bytes failed with code 2"):
        host_bytes(8, pinned=True)
    assert host_bytes(8, pinned=False).tolist() == [0] * 8 and not locked and host_bytes(0, pinned=True).numel() == 0
