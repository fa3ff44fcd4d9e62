"""Published configurations: every field that the hub's config.json has, and sizes that a test can run.

The fields and their values are the hub's, as of the versions that they name. ``cut`` makes the sizes small.
"""

from __future__ import annotations

from typing import Any

_LLAMA3 = {
    "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
}
_SMOL = {
    "architectures": ["LlamaForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 0,
    "eos_token_id": 0, "hidden_act": "silu", "hidden_size": 576, "initializer_range": 0.041666666666666664,
    "intermediate_size": 1536, "is_llama_config": True, "max_position_embeddings": 8192, "mlp_bias": False,
    "model_type": "llama", "num_attention_heads": 9, "num_hidden_layers": 30, "num_key_value_heads": 3,
    "pretraining_tp": 1, "rms_norm_eps": 1e-05, "rope_interleaved": False, "rope_scaling": None, "rope_theta": 100000,
    "tie_word_embeddings": True, "torch_dtype": "bfloat16", "transformers_version": "4.40.1", "use_cache": True,
    "vocab_size": 49152,
}
_LLAMA = {
    "architectures": ["LlamaForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 128000,
    "eos_token_id": 128001, "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02,
    "intermediate_size": 14336, "max_position_embeddings": 131072, "mlp_bias": False, "model_type": "llama",
    "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8, "pretraining_tp": 1,
    "rms_norm_eps": 1e-05, "rope_scaling": _LLAMA3, "rope_theta": 500000.0, "tie_word_embeddings": False,
    "torch_dtype": "bfloat16", "transformers_version": "4.43.0.dev0", "use_cache": True, "vocab_size": 128256,
}
_QWEN2 = {
    "architectures": ["Qwen2ForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 151643, "eos_token_id": 151643,
    "hidden_act": "silu", "hidden_size": 896, "initializer_range": 0.02, "intermediate_size": 4864,
    "max_position_embeddings": 32768, "max_window_layers": 24, "model_type": "qwen2", "num_attention_heads": 14,
    "num_hidden_layers": 24, "num_key_value_heads": 2, "rms_norm_eps": 1e-06, "rope_theta": 1000000.0,
    "sliding_window": 32768, "tie_word_embeddings": True, "torch_dtype": "bfloat16", "transformers_version": "4.40.1",
    "use_cache": True, "use_mrope": False, "use_sliding_window": False, "vocab_size": 151936,
}
_QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 151643,
    "eos_token_id": 151645, "head_dim": 128, "hidden_act": "silu", "hidden_size": 1024, "initializer_range": 0.02,
    "intermediate_size": 3072, "max_position_embeddings": 40960, "max_window_layers": 28, "model_type": "qwen3",
    "num_attention_heads": 16, "num_hidden_layers": 28, "num_key_value_heads": 8, "rms_norm_eps": 1e-06,
    "rope_scaling": None, "rope_theta": 1000000, "sliding_window": None, "tie_word_embeddings": True,
    "torch_dtype": "bfloat16", "transformers_version": "4.51.0", "use_cache": True, "use_sliding_window": False,
    "vocab_size": 151936,
}
_PHI3 = {
    "_name_or_path": "Phi-3-mini-4k-instruct", "architectures": ["Phi3ForCausalLM"], "attention_bias": False,
    "attention_dropout": 0.0,
    "auto_map": {
        "AutoConfig": "configuration_phi3.Phi3Config", "AutoModelForCausalLM": "modeling_phi3.Phi3ForCausalLM",
    },
    "bos_token_id": 1, "embd_pdrop": 0.0, "eos_token_id": 32000, "hidden_act": "silu", "hidden_size": 3072,
    "initializer_range": 0.02, "intermediate_size": 8192, "max_position_embeddings": 4096, "model_type": "phi3",
    "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 32,
    "original_max_position_embeddings": 4096, "pad_token_id": 32000, "resid_pdrop": 0.0, "rms_norm_eps": 1e-05,
    "rope_scaling": None, "rope_theta": 10000.0, "sliding_window": 2047, "tie_word_embeddings": False,
    "torch_dtype": "bfloat16", "transformers_version": "4.40.2", "use_cache": True, "vocab_size": 32064,
}
_GPT2 = {
    "activation_function": "gelu_new", "architectures": ["GPT2LMHeadModel"], "attn_pdrop": 0.1, "bos_token_id": 50256,
    "embd_pdrop": 0.1, "eos_token_id": 50256, "initializer_range": 0.02, "layer_norm_epsilon": 1e-05,
    "model_type": "gpt2", "n_ctx": 1024, "n_embd": 768, "n_head": 12, "n_layer": 12, "n_positions": 1024,
    "resid_pdrop": 0.1, "summary_activation": None, "summary_first_dropout": 0.1, "summary_proj_to_labels": True,
    "summary_type": "cls_index", "summary_use_proj": True,
    "task_specific_params": {"text-generation": {"do_sample": True, "max_length": 50}}, "vocab_size": 50257,
}
_PYTHIA = {
    "architectures": ["GPTNeoXForCausalLM"], "bos_token_id": 0, "eos_token_id": 0, "hidden_act": "gelu",
    "hidden_size": 512, "initializer_range": 0.02, "intermediate_size": 2048, "layer_norm_eps": 1e-05,
    "max_position_embeddings": 2048, "model_type": "gpt_neox", "num_attention_heads": 8, "num_hidden_layers": 6,
    "rotary_emb_base": 10000, "rotary_pct": 0.25, "tie_word_embeddings": False, "torch_dtype": "float16",
    "transformers_version": "4.24.0", "use_cache": True, "use_parallel_residual": True, "vocab_size": 50304,
}
_MISTRAL = {
    "architectures": ["MistralForCausalLM"], "bos_token_id": 1, "eos_token_id": 2, "hidden_act": "silu",
    "hidden_size": 4096, "initializer_range": 0.02, "intermediate_size": 14336, "max_position_embeddings": 32768,
    "model_type": "mistral", "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05, "rope_theta": 10000.0, "sliding_window": 4096, "tie_word_embeddings": False,
    "torch_dtype": "bfloat16", "transformers_version": "4.34.0.dev0", "use_cache": True, "vocab_size": 32000,
}
_GEMMA2 = {
    "architectures": ["Gemma2ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
    "attn_logit_softcapping": 50.0, "bos_token_id": 2, "cache_implementation": "hybrid", "eos_token_id": 1,
    "final_logit_softcapping": 30.0, "head_dim": 256, "hidden_act": "gelu_pytorch_tanh",
    "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 3584, "initializer_range": 0.02,
    "intermediate_size": 14336, "max_position_embeddings": 8192, "model_type": "gemma2", "num_attention_heads": 16,
    "num_hidden_layers": 42, "num_key_value_heads": 8, "pad_token_id": 0, "query_pre_attn_scalar": 256,
    "rms_norm_eps": 1e-06, "rope_theta": 10000.0, "sliding_window": 4096, "sliding_window_size": 4096,
    "torch_dtype": "float32", "transformers_version": "4.42.0.dev0", "use_cache": True, "vocab_size": 256000,
}
_QWEN3_MOE = {
    "architectures": ["Qwen3MoeForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
    "decoder_sparse_step": 1, "eos_token_id": 151645, "head_dim": 128, "hidden_act": "silu", "hidden_size": 2048,
    "initializer_range": 0.02, "intermediate_size": 5472, "max_position_embeddings": 262144, "max_window_layers": 28,
    "mlp_only_layers": [], "model_type": "qwen3_moe", "moe_intermediate_size": 768, "norm_topk_prob": True,
    "num_attention_heads": 32, "num_experts": 128, "num_experts_per_tok": 8, "num_hidden_layers": 48,
    "num_key_value_heads": 4, "output_router_logits": False, "qkv_bias": False, "rms_norm_eps": 1e-06,
    "rope_scaling": None, "rope_theta": 10000000, "router_aux_loss_coef": 0.0, "shared_expert_intermediate_size": 0,
    "sliding_window": None, "tie_word_embeddings": False, "torch_dtype": "bfloat16", "transformers_version": "4.52.3",
    "use_cache": True, "use_qk_norm": True, "use_sliding_window": False, "vocab_size": 151936,
}
PUBLISHED: dict[str, dict[str, Any]] = {
    "SmolLM2-135M": _SMOL,
    "SmolLM2-1.7B-Instruct": {
        **_SMOL, "hidden_size": 2048, "intermediate_size": 8192, "num_attention_heads": 32, "num_key_value_heads": 32,
        "num_hidden_layers": 24, "rope_theta": 130000, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2,
        "initializer_range": 0.02, "transformers_version": "4.42.3",
        "transformers.js_config": {"dtype": "q4", "kv_cache_dtype": {"q4f16": "float16", "fp16": "float16"}},
    },
    "SmolLM3-3B": {
        "architectures": ["SmolLM3ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
        "bos_token_id": None, "eos_token_id": 128012, "hidden_act": "silu", "hidden_size": 2048,
        "initializer_range": 0.02, "intermediate_size": 11008, "layer_types": ["full_attention"] * 36,
        "max_position_embeddings": 65536, "max_window_layers": 28, "mlp_bias": False, "model_type": "smollm3",
        "no_rope_layer_interval": 4, "no_rope_layers": [1, 1, 1, 0] * 9, "num_attention_heads": 16,
        "num_hidden_layers": 36, "num_key_value_heads": 4, "pad_token_id": 128004, "pretraining_tp": 2,
        "rms_norm_eps": 1e-06, "rope_scaling": None, "rope_theta": 5000000.0, "sliding_window": None,
        "torch_dtype": "bfloat16", "transformers_version": "4.54.0.dev0", "use_cache": False,
        "use_sliding_window": False, "vocab_size": 128256,
    },
    "Llama-3.1-8B": _LLAMA,
    "Llama-3.2-1B": {
        **_LLAMA, "head_dim": 64, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
        "rope_scaling": {**_LLAMA3, "factor": 32.0}, "tie_word_embeddings": True,
        "transformers_version": "4.45.0.dev0",
    },
    "Llama-2-13b": {
        **{k: v for k, v in _LLAMA.items() if k not in ("attention_dropout", "mlp_bias")},
        "_name_or_path": "meta-llama/Llama-2-13b-hf", "max_position_embeddings": 4096, "pretraining_tp": 2,
        "num_attention_heads": 40, "num_key_value_heads": 40, "rope_scaling": None, "vocab_size": 32000,
        "transformers_version": "4.32.0.dev0",
    },
    "DeepSeek-R1-Distill-Llama-8B": {**_LLAMA, "transformers_version": "4.43.0.dev0"},
    "DeepSeek-R1-Distill-Qwen-1.5B": {
        **_QWEN2, "bos_token_id": 151646, "hidden_size": 1536, "max_position_embeddings": 131072,
        "max_window_layers": 21, "rope_theta": 10000, "sliding_window": 4096, "tie_word_embeddings": False,
        "num_attention_heads": 12, "transformers_version": "4.44.0",
    },
    "Falcon3-1B-Base": {
        "activation": "swiglu", "architectures": ["LlamaForCausalLM"], "attention_bias": False,
        "attention_dropout": 0.0, "eos_token_id": 11, "head_dim": 256, "hidden_act": "silu", "hidden_size": 2048,
        "initializer_range": 0.02, "intermediate_size": 8192, "max_position_embeddings": 4096, "mlp_bias": False,
        "model_type": "llama", "num_attention_heads": 8, "num_hidden_layers": 18, "num_key_value_heads": 4,
        "pretraining_tp": 1, "rms_norm_eps": 1e-06, "rope_scaling": None, "rope_theta": 1000042,
        "tie_word_embeddings": False, "torch_dtype": "bfloat16", "transformers_version": "4.46.1", "use_cache": True,
        "vocab_size": 131072,
    },
    "Qwen2.5-0.5B": _QWEN2,
    "Qwen2.5-7B-Instruct-YaRN": {  # as its card says for long texts
        **_QWEN2, "eos_token_id": 151645, "max_window_layers": 28, "sliding_window": 131072,
        "tie_word_embeddings": False, "transformers_version": "4.43.1",
        "rope_scaling": {"factor": 4.0, "original_max_position_embeddings": 32768, "type": "yarn"},
    },
    "Qwen2.5-0.5B saved by 5": {
        **{k: v for k, v in _QWEN2.items() if k not in ("rope_theta", "torch_dtype")}, "dtype": "bfloat16",
        "layer_types": ["full_attention"] * 24, "rope_parameters": {"rope_theta": 1000000.0, "rope_type": "default"},
        "pad_token_id": None, "sliding_window": None, "transformers_version": "5.17.0",
    },
    "Qwen3-0.6B": _QWEN3,
    "Qwen3-Coder-30B-A3B-Instruct": _QWEN3_MOE,
    "Qwen3-30B-A3B": {
        **{k: v for k, v in _QWEN3_MOE.items() if k not in ("qkv_bias", "use_qk_norm",
                                                            "shared_expert_intermediate_size")},
        "bos_token_id": 151643, "intermediate_size": 6144, "max_position_embeddings": 40960, "max_window_layers": 48,
        "rope_theta": 1000000.0, "router_aux_loss_coef": 0.001, "transformers_version": "4.51.0",
    },
    "Phi-3-mini-4k-instruct": _PHI3,
    "phi-4": {
        **{k: v for k, v in _PHI3.items() if k != "auto_map"}, "_name_or_path": "Phi-4-instruct-full-bf16-0",
        "bos_token_id": 100257, "eos_token_id": 100265, "hidden_size": 5120, "intermediate_size": 17920,
        "max_position_embeddings": 16384, "num_attention_heads": 40, "num_key_value_heads": 10,
        "original_max_position_embeddings": 16384, "pad_token_id": 100349, "rope_theta": 250000,
        "sliding_window": None, "transformers_version": "4.47.0", "vocab_size": 100352,
    },
    "gpt2": _GPT2,
    "gpt2-medium": {**_GPT2, "n_embd": 1024, "n_head": 16, "n_layer": 24, "n_special": 0,
                    "predict_special_tokens": True},
    "distilgpt2": {
        **_GPT2, "_num_labels": 1, "id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}, "n_layer": 6,
    },
    "gpt2-large": {**_GPT2, "n_embd": 1280, "n_head": 20, "n_layer": 36, "output_past": True, "pruned_heads": {}},
    "gpt-neox-20b": {
        **{k: v for k, v in _PYTHIA.items() if k != "use_parallel_residual"}, "attention_probs_dropout_prob": 0,
        "hidden_act": "gelu_fast", "hidden_dropout_prob": 0, "hidden_size": 6144, "intermediate_size": 24576,
        "num_attention_heads": 64, "num_hidden_layers": 44, "transformers_version": "4.19.0.dev0", "vocab_size": 50432,
    },
    "pythia-70m": _PYTHIA,
    "Mistral-7B-v0.1": _MISTRAL,
    "Mistral-7B-Instruct-v0.3": {
        **_MISTRAL, "attention_dropout": 0.0, "rope_theta": 1000000.0, "sliding_window": None,
        "transformers_version": "4.42.0.dev0", "vocab_size": 32768,
    },
    "Mixtral-8x7B-v0.1": {
        **_MISTRAL, "architectures": ["MixtralForCausalLM"], "attention_dropout": 0.0, "model_type": "mixtral",
        "num_experts_per_tok": 2, "num_local_experts": 8, "output_router_logits": False, "rope_theta": 1000000.0,
        "router_aux_loss_coef": 0.02, "sliding_window": None, "transformers_version": "4.36.0.dev0",
    },
    "gemma-2-9b": _GEMMA2,
    "gemma-2-2b": {
        **{k: v for k, v in _GEMMA2.items() if k != "sliding_window_size"}, "hidden_size": 2304,
        "intermediate_size": 9216, "num_attention_heads": 8, "num_hidden_layers": 26, "num_key_value_heads": 4,
        "transformers_version": "4.42.4",
    },
    "gemma-3-1b-pt": {
        "architectures": ["Gemma3ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
        "attn_logit_softcapping": None, "bos_token_id": 2, "cache_implementation": "hybrid", "eos_token_id": 1,
        "final_logit_softcapping": None, "head_dim": 256, "hidden_activation": "gelu_pytorch_tanh",
        "hidden_size": 1152, "initializer_range": 0.02, "intermediate_size": 6912, "max_position_embeddings": 32768,
        "model_type": "gemma3_text", "num_attention_heads": 4, "num_hidden_layers": 26, "num_key_value_heads": 1,
        "pad_token_id": 0, "query_pre_attn_scalar": 256, "rms_norm_eps": 1e-06, "rope_local_base_freq": 10000,
        "rope_scaling": None, "rope_theta": 1000000, "sliding_window": 512, "sliding_window_pattern": 6,
        "torch_dtype": "bfloat16", "transformers_version": "4.50.0.dev0", "use_cache": True, "vocab_size": 262144,
    },
    "OLMo-2-1124-7B": {
        "architectures": ["Olmo2ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
        "eos_token_id": 100257, "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02,
        "intermediate_size": 11008, "max_position_embeddings": 4096, "model_type": "olmo2",
        "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 32, "pad_token_id": 100277,
        "rms_norm_eps": 1e-06, "rope_scaling": None, "rope_theta": 500000, "tie_word_embeddings": False,
        "torch_dtype": "float32", "transformers_version": "4.47.0.dev0", "use_cache": True, "vocab_size": 100352,
    },
    "granite-3.1-2b-base": {
        "architectures": ["GraniteForCausalLM"], "attention_bias": False, "attention_dropout": 0.1,
        "attention_multiplier": 0.015625, "bos_token_id": 0, "embedding_multiplier": 12.0, "eos_token_id": 0,
        "hidden_act": "silu", "hidden_size": 2048, "initializer_range": 0.02, "intermediate_size": 8192,
        "logits_scaling": 8.0, "max_position_embeddings": 131072, "mlp_bias": False, "model_type": "granite",
        "num_attention_heads": 32, "num_hidden_layers": 40, "num_key_value_heads": 8, "pad_token_id": 0,
        "residual_multiplier": 0.22, "rms_norm_eps": 1e-05, "rope_scaling": None, "rope_theta": 5000000.0,
        "tie_word_embeddings": True, "torch_dtype": "bfloat16", "transformers_version": "4.47.0.dev0",
        "use_cache": True, "vocab_size": 49152,
    },
    "falcon-7b": {
        "alibi": False, "apply_residual_connection_post_layernorm": False, "architectures": ["FalconForCausalLM"],
        "attention_dropout": 0.0,
        "auto_map": {"AutoConfig": "configuration_falcon.FalconConfig",
                     "AutoModelForCausalLM": "modeling_falcon.FalconForCausalLM"},
        "bias": False, "bos_token_id": 11, "eos_token_id": 11, "hidden_dropout": 0.0, "hidden_size": 4544,
        "initializer_range": 0.02, "layer_norm_epsilon": 1e-05, "model_type": "falcon", "multi_query": True,
        "new_decoder_architecture": False, "num_attention_heads": 71, "num_hidden_layers": 32, "parallel_attn": True,
        "torch_dtype": "bfloat16", "transformers_version": "4.27.4", "use_cache": True, "vocab_size": 65024,
    },
    "starcoder2-3b": {
        "architectures": ["Starcoder2ForCausalLM"], "attention_dropout": 0.1, "residual_dropout": 0.1,
        "embedding_dropout": 0.1, "bos_token_id": 0, "eos_token_id": 0, "hidden_act": "gelu_pytorch_tanh",
        "hidden_size": 3072, "initializer_range": 0.018042, "intermediate_size": 12288,
        "max_position_embeddings": 16384, "mlp_type": "default", "model_type": "starcoder2", "norm_epsilon": 1e-05,
        "norm_type": "layer_norm", "num_attention_heads": 24, "num_hidden_layers": 30, "num_key_value_heads": 2,
        "rope_theta": 999999.4420358813, "sliding_window": 4096, "transformers_version": "4.37.0.dev0",
        "use_bias": True, "use_cache": True, "vocab_size": 49152,
    },
    "OLMoE-1B-7B-0924": {
        "architectures": ["OlmoeForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "clip_qkv": None,
        "eos_token_id": 50279, "hidden_act": "silu", "hidden_size": 2048, "initializer_range": 0.02,
        "intermediate_size": 1024, "max_position_embeddings": 4096, "model_type": "olmoe", "norm_topk_prob": False,
        "num_attention_heads": 16, "num_experts": 64, "num_experts_per_tok": 8, "num_hidden_layers": 16,
        "num_key_value_heads": 16, "output_router_logits": False, "pad_token_id": 1, "rms_norm_eps": 1e-05,
        "rope_scaling": None, "rope_theta": 10000.0, "router_aux_loss_coef": 0.01, "tie_word_embeddings": False,
        "torch_dtype": "bfloat16", "transformers_version": "4.43.0.dev0", "use_cache": True, "vocab_size": 50304,
    },
    "DeepSeek-V2-Lite": {
        "architectures": ["DeepseekV2ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
        "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV2Config",
                     "AutoModel": "modeling_deepseek.DeepseekV2Model",
                     "AutoModelForCausalLM": "modeling_deepseek.DeepseekV2ForCausalLM"},
        "aux_loss_alpha": 0.001, "bos_token_id": 100000, "eos_token_id": 100001, "first_k_dense_replace": 1,
        "hidden_act": "silu", "hidden_size": 2048, "initializer_range": 0.02, "intermediate_size": 10944,
        "kv_lora_rank": 512, "max_position_embeddings": 163840, "model_type": "deepseek_v2",
        "moe_intermediate_size": 1408, "moe_layer_freq": 1, "n_group": 1, "n_routed_experts": 64,
        "n_shared_experts": 2, "norm_topk_prob": False, "num_attention_heads": 16, "num_experts_per_tok": 6,
        "num_hidden_layers": 27, "num_key_value_heads": 16, "pretraining_tp": 1, "q_lora_rank": None,
        "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "rms_norm_eps": 1e-06,
        "rope_scaling": {"beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 0.707, "mscale_all_dim": 0.707,
                         "original_max_position_embeddings": 4096, "type": "yarn"},
        "rope_theta": 10000, "routed_scaling_factor": 1.0, "scoring_func": "softmax", "seq_aux": True,
        "tie_word_embeddings": False, "topk_group": 1, "topk_method": "greedy", "torch_dtype": "bfloat16",
        "transformers_version": "4.33.1", "use_cache": True, "v_head_dim": 128, "vocab_size": 102400,
    },
}
"""By the model's name on the hub. The last one's long rope table is a part of what DeepSeek publishes."""

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "Phi-3-mini-128k-instruct": (
        {**_PHI3, "max_position_embeddings": 131072, "sliding_window": 262144,
         "rope_scaling": {"long_factor": [1.08] * 48, "short_factor": [1.0] * 48, "type": "longrope"}},
        "rope_type 'longrope'.* texts longer than original_max_position_embeddings.*Phi-3-mini-4k",
    ),
    "Phi-4-mini-instruct": (
        {**_PHI3, "full_attn_mod": 1, "interpolate_factor": 1, "lm_head_bias": False, "mlp_bias": False,
         "partial_rotary_factor": 0.75, "tie_word_embeddings": True, "num_key_value_heads": 8,
         "max_position_embeddings": 131072, "sliding_window": 262144,
         "rope_scaling": {"long_factor": [1.08] * 48, "short_factor": [1.0] * 48, "type": "longrope"}},
        "rope_type 'longrope'",
    ),
    "Llama-3-8B with dynamic NTK": ({**_LLAMA, "rope_scaling": {"type": "dynamic", "factor": 2.0}},
                                    "rope_type 'dynamic'.*up to max_position_embeddings tokens: .* remove it"),
}
"""Published, and not computed here: the message says what to do."""


def cut(config: dict[str, Any]) -> dict[str, Any]:
    """Return a configuration whose sizes a test can run; no field is added or left out."""
    layers = {"smollm3": 4, "gemma3_text": 6}.get(config["model_type"], 2)  # of each kind one
    heads, groups = 4, config.get("num_key_value_heads")
    whole = config.get("num_attention_heads", config.get("n_head", 0))
    small = {
        "hidden_size": 64, "n_embd": 64, "intermediate_size": 96, "num_hidden_layers": layers, "n_layer": layers,
        "num_attention_heads": heads, "n_head": heads, "vocab_size": 131, "head_dim": 24,
        "num_key_value_heads": groups if groups == 1 else heads if groups == whole else 2,
        "num_experts": 6, "num_local_experts": 5, "n_routed_experts": 6, "num_experts_per_tok": 3,
        "moe_intermediate_size": 40, "kv_lora_rank": 32, "qk_rope_head_dim": 8, "qk_nope_head_dim": 12,
        "v_head_dim": 16, "max_window_layers": 2,
    }
    out = {key: small.get(key, value) for key, value in config.items()}
    for name in ("max_position_embeddings", "n_positions", "n_ctx"):
        if name in out:
            out[name] = 128
    for name in ("sliding_window", "sliding_window_size"):  # as long against the context as it was, but not the same
        if out.get(name):
            out[name] = 11 if out[name] < config["max_position_embeddings"] else 128
    for name in ("layer_types", "no_rope_layers"):
        if name in out:
            out[name] = out[name][:layers]
    if out.get("rope_scaling"):
        out["rope_scaling"] = {**out["rope_scaling"], "original_max_position_embeddings": 32}
    if "query_pre_attn_scalar" in out:
        out["query_pre_attn_scalar"] = 24
    return {key: (0 if key.endswith("_token_id") and value is not None else value) for key, value in out.items()}
