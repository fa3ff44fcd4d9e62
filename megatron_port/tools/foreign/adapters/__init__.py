"""Adapters of trainers that many use, each one file; each is also an example of an adapter."""
