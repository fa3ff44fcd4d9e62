"""The documentation as a site: links to files of the checkout, and a strict build where mkdocs is installed."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))


def test_links_to_files_of_the_checkout_become_paths() -> None:
    import docs_hooks

    page = "See [README](../README.md), [fp8-loss.json](../benchmarks/results/fp8-loss.json#x), [parity](parity.md#a)."
    assert docs_hooks.on_page_markdown(page, page=None) == (
        "See README (`README.md`), `benchmarks/results/fp8-loss.json`, [parity](parity.md#a).")
    assert docs_hooks.without_outside_links("![picture](../a.png)") == "![picture](../a.png)"


@pytest.mark.skipif(importlib.util.find_spec("material") is None, reason="mkdocs-material is not installed (make docs)")
def test_the_site_builds_strictly_and_asks_no_other_host(tmp_path: Path) -> None:
    """Without a warning: every link and anchor leads somewhere, every page is in the navigation."""
    done = subprocess.run([sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path)],
                          cwd=ROOT, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    for page in tmp_path.glob("*.html"):
        text = page.read_text(encoding="utf-8")
        assert not [a for a in ('src="http', 'rel="stylesheet" href="http', 'rel="preconnect"') if a in text], page.name
    assert (tmp_path / "search" / "search_index.js").is_file()
