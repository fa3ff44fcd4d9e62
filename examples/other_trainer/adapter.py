"""What parity has to know of ``train.py``.

``megatron-port parity foreign examples/other_trainer/adapter.py --ranks 2 --set micro_batches=2`` compares.
"""

from typing import ClassVar

import torch
from torch.nn.parallel import DistributedDataParallel
from train import Model, train_step

from megatron_port.parity import Adapter


class Script(Adapter):
    """The script on some ranks, and on one process for comparison."""

    layout: ClassVar = {"micro_batches": 1}
    space: ClassVar = {"micro_batches": (1, 2, 4)}

    def build(self, world):
        """Model and optimizer, as the script makes them."""
        model = Model(self.vocabulary, length=self.sequence)
        if world.size > 1:
            model = DistributedDataParallel(model)
        return model, torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-5)

    def step(self, state, batch, world):
        """This rank's share of the batch, in micro-batches."""
        model, optimizer = state
        optimizer.zero_grad()
        mine, count = batch.share(world.rank, world.size), world["micro_batches"]
        parts = [mine.share(i, count) for i in range(count)]
        return train_step(model, [(part.tokens, part.labels) for part in parts])

    def update(self, state):
        """One step of the optimizer."""
        state[1].step()
