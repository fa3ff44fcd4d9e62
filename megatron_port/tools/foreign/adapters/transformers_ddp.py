"""A transformers model in its own ``Trainer``'s arithmetic on DDP: the loss of ``num_items_in_batch``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch.nn.parallel import DistributedDataParallel

from megatron_port.tools.foreign.adapter import Adapter, Batch, World
from megatron_port.tools.foreign.adapters._gpt import step_of_replicas

SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
KINDS: Mapping[str, Mapping[str, Any]] = {
    "llama": {**SIZES, "num_key_value_heads": 2},
    "qwen3": {**SIZES, "num_key_value_heads": 2, "head_dim": 8},
    "gpt_neox": SIZES,
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
    "mixtral": {**SIZES, "num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 2},
}


class Transformers(Adapter):
    """``model``: a model type of transformers; ``tied``: the head is the table of embeddings."""

    layout: ClassVar[Mapping[str, Any]] = {"micro_batches": 1}
    model: ClassVar[Mapping[str, Any]] = {"family": "llama", "tied": False, "attention": "eager"}
    space: ClassVar[Mapping[str, Any]] = {
        "micro_batches": (1, 2), "family": tuple(KINDS), "tied": (False, True), "attention": ("eager", "sdpa"),
    }
    ignored = -100

    def build(self, world: World) -> tuple[Any, torch.optim.Optimizer]:
        from transformers import AutoConfig, AutoModelForCausalLM

        config = AutoConfig.for_model(
            world["family"], vocab_size=self.vocabulary, tie_word_embeddings=world["tied"], pad_token_id=None,
            bos_token_id=None, eos_token_id=None, **KINDS[world["family"]],
        )
        model = AutoModelForCausalLM.from_config(config, attn_implementation=world["attention"])
        wrapped = DistributedDataParallel(model) if world.size > 1 else model
        return wrapped, torch.optim.AdamW(wrapped.parameters(), lr=1e-3, eps=1e-5)

    def step(self, state: Any, batch: Batch, world: World) -> float:
        model, items = state[0], int((batch.labels != self.ignored).sum())

        def sums(micro: Batch) -> Any:
            # Our labels are the tokens that follow, so they are not shifted again.
            return model(input_ids=micro.tokens, labels=micro.labels, shift_labels=micro.labels,
                         num_items_in_batch=items).loss

        def reduces(last: bool) -> None:
            model.require_backward_grad_sync = last

        return step_of_replicas(state, batch, world, sums, reduces)

    def update(self, state: Any) -> None:
        state[1].step()
