"""A training script as many are: a small GPT, DDP, micro-batches; ``torchrun --nproc_per_node 2 train.py``."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel


class Model(nn.Module):
    """Two layers of torch's own transformer, causal."""

    def __init__(self, vocabulary: int = 64, width: int = 32, length: int = 16) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        layer = nn.TransformerEncoderLayer(width, 4, 64, dropout=0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """[batch, sequence] → [batch, sequence, vocabulary]"""
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1]))
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1])
        return self.head(self.layers(x, mask=mask, is_causal=True))


def train_step(model: nn.Module, micro_batches: list[tuple[torch.Tensor, torch.Tensor]]) -> float:
    """Forward and backward pass of this rank's micro-batches; return their mean loss."""
    total = 0.0
    for tokens, labels in micro_batches:
        loss = cross_entropy(model(tokens).flatten(0, 1), labels.flatten()) / len(micro_batches)
        loss.backward()
        total += loss.item()
    return total


def main() -> None:
    """Train on random tokens."""
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DistributedDataParallel(Model())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(10):
        ids = torch.randint(0, 64, (4, 17))
        optimizer.zero_grad()
        loss = train_step(model, [(ids[:2, :-1], ids[:2, 1:]), (ids[2:, :-1], ids[2:, 1:])])
        optimizer.step()
        if os.environ["RANK"] == "0":
            print(step, loss)


if __name__ == "__main__":
    main()
