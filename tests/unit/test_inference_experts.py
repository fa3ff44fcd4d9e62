"""Replicas that generate or score work on different prompts, so experts may not be divided among them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from megatron_port.errors import ConfigError
from megatron_port.inference.model import InferenceModel
from megatron_port.parallel.topology import Topology


@pytest.mark.parametrize(("topology", "refused"), [
    (Topology(dp=2, cp=2, ep=4), True), (Topology(dp=2, ep=2), True), (Topology(dp=2, tp=2, ep=2), False),
    (Topology(cp=2, ep=2), False), (Topology(dp=2), False),
])
def test_experts_among_replicas_are_refused(topology: Topology, refused: bool) -> None:
    model: Any = SimpleNamespace(ctx=SimpleNamespace(topology=topology))
    if refused:
        with pytest.raises(ConfigError, match="set layout.expert_parallel_size to"):
            InferenceModel.require_independent_replicas(model)
    else:
        InferenceModel.require_independent_replicas(model)
