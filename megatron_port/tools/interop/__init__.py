"""Other systems' checkpoints: Hugging Face, PEFT, torch's distributed checkpoint, DeepSpeed, Megatron."""
