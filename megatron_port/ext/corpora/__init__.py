"""Corpora from files: sources, tokenizers, conversations, preparing, fetching, verifying."""
