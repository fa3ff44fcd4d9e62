"""Checks of ``training.loss = "dpo"`` against the other settings."""

from __future__ import annotations

from megatron_port.config.schema import RunConfig
from megatron_port.registry import SOURCES


def preference_problems(config: RunConfig) -> list[str]:
    """Return what in a configuration contradicts a loss of pairs of answers."""
    data, model = config.data, config.model
    if not config.training.on_pairs:
        return []
    found = {
        f'engine "{config.engine}", whose loss is a mean over tokens; use engine = "native"': config.engine != "native",
        "data.attention_documents 'across': the rejected answer would see the chosen one; use attention_documents = "
        "'within'": data.attention_documents == "across",
        "learned positions, of which the two answers would have others; set data.position_reset = true":
            model.position_embedding == "learned" and not data.position_reset,
        f"data.packing {data.packing!r}: a sample is one pair; leave packing out": data.packing != "none",
        f"data.order {data.order!r}, which cuts documents where a sample ends; use order 'stateless'":
            data.order != "stateless",
        "data.synthetic, which has no pairs; name corpora made by `data prepare --preference` in data.train":
            data.synthetic,
        f"data.source {data.source!r}, which brings its own samples; leave it out": data.source in SOURCES.added,
        "data.mask_eod_loss: which tokens count is in the corpus; leave it out": data.mask_eod_loss,
        f"layout.context_parallel_size {config.layout.context_parallel_size}, which divides a pair; use 1":
            config.layout.context_parallel_size > 1,
        f"model.mtp_layers {model.mtp_layers}: only the model's own predictions are answers; set 0":
            model.mtp_layers > 0,
    }
    return [f'training.loss "dpo" with {problem}' for problem, there in found.items() if there]
