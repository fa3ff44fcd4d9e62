"""The module of no feed-forward block."""

from __future__ import annotations

from megatron_port.core.model.build import BuildContext
from megatron_port.core.model.mlp import FeedForwardBlock
from megatron_port.ext.mixers.no_block_spec import NoFeedForward


class NoBlock(FeedForwardBlock):
    """A block that is never called."""

    bias = None

    def __init__(self, name: str, index: int, spec: NoFeedForward, build: BuildContext) -> None:
        super().__init__()
