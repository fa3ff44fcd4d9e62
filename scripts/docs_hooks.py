"""Hooks of mkdocs: links from a page to files of the checkout become the file's path.

On a code host ``[README](../README.md)`` leads to the file. The site holds ``docs/`` alone, so there the words stay and
the path stands beside them; ``mkdocs build --strict`` then accepts every link, and refuses one that leads nowhere.
"""

from __future__ import annotations

import re
from typing import Any

OUTSIDE = re.compile(r"(?<!!)\[([^\]]+)\]\(\.\./([^)#\s]+)(#[^)\s]*)?\)")


def without_outside_links(markdown: str) -> str:
    """Return a page's text with every link that leaves ``docs/`` written as its words and the path."""

    def words(link: re.Match[str]) -> str:
        said, path = link[1], link[2]
        return f"`{path}`" if said.strip("`") in (path, path.rpartition("/")[2]) else f"{said} (`{path}`)"

    return OUTSIDE.sub(words, markdown)


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Called by mkdocs with each page before it is rendered."""
    return without_outside_links(markdown)
