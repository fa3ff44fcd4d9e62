"""Formats of inputs, and the suffixes that announce them."""

from __future__ import annotations

NAMES = {
    ".jsonl": "jsonl", ".ndjson": "jsonl", ".jl": "jsonl", ".json": "jsonl", ".csv": "csv", ".tsv": "tsv",
    ".parquet": "parquet", ".pq": "parquet", ".arrow": "arrow", ".feather": "arrow",
}
"""Suffix of a name, before that of a compression → format."""
WORDS = {
    "jsonl": "JSON lines", "json": "JSON over several lines", "csv": "CSV", "tsv": "TSV", "parquet": "Parquet",
    "arrow": "Arrow", "text": "plain text",
}
"""Format → how tables and messages call it."""
FORMATS = ("auto", *WORDS)
