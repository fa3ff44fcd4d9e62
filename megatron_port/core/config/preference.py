"""Settings that contradict ``training.loss = "dpo"``, a loss of pairs of answers."""

from __future__ import annotations

from megatron_port.core.config.conflicts import Conflict, Rule, Table, native_only
from megatron_port.core.registry import SOURCES

CONFLICTS = (Table(asked='training.loss "dpo"', on=lambda c: c.training.on_pairs, rows=(
    native_only("whose loss is a mean over tokens"),
    Conflict("data.attention_documents", "the rejected answer would see the chosen one",
             "use attention_documents = 'within'", refused=("across",)),
    Rule(lambda c: c.model.position_embedding == "learned" and not c.data.position_reset,
         "{asked} with learned positions, which would differ between the two answers; set data.position_reset = true"),
    Conflict("data.packing", "a sample is one pair", "leave packing out", allowed=("none",)),
    Conflict("data.order", "which cuts documents where a sample ends", "use order 'stateless'",
             allowed=("stateless",)),
    Conflict("data.synthetic", "which has no pairs",
             "name corpora made by `data prepare --preference` in data.train"),
    Conflict("data.source", "which brings its own samples", "leave it out",
             when=lambda c: c.data.source in SOURCES.added),
    Conflict("data.mask_eod_loss", "the corpus says which tokens count", "leave it out"),
    Conflict("layout.context_parallel_size", "which divides a pair", "use 1",
             when=lambda c: c.layout.context_parallel_size > 1),
    Conflict("model.mtp_layers", "only the model's own predictions are answers", "set 0",
             when=lambda c: c.model.mtp_layers > 0),
)),)
