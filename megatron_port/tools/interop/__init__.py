"""Other systems' checkpoints: export to and import from torch's distributed checkpoint and DeepSpeed's."""
