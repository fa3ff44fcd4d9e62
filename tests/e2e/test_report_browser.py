"""The report in a real browser: light and dark, no request, nothing on the console, nothing wider than the window."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from megatron_port.cli.main import main

sys.path.insert(0, str(Path(__file__).resolve().parent))

from browser import Browser, chromium
from test_report import make

pytestmark = [pytest.mark.slow, pytest.mark.skipif(chromium() is None, reason="no Chromium on the PATH")]


def brightness(colour: str) -> float:
    """0 black to 1 white, of ``rgb(r, g, b)``."""
    return sum(map(int, re.findall(r"\d+", colour)[:3])) / 765


def test_the_report_in_chromium(tmp_path: Path) -> None:
    runs = [make(tmp_path / name, loss=loss, name=name) for name, loss in (("alpha", 3.0), ("beta", 4.0))]
    out = tmp_path / "report.html"
    assert main(["report", *map(str, runs), "--out", str(out)]) == 0
    program = chromium()
    assert program is not None
    with Browser(program) as browser:
        seen = {scheme: browser.look(out, scheme) for scheme in ("light", "dark")}
        narrow = browser.look(out, "light", width=380)
    for one in (*seen.values(), narrow):
        assert one.requests == [out.as_uri()] and one.console == []
        assert one.png.startswith(b"\x89PNG") and one.height > 1000
    assert brightness(seen["light"].background) > 0.8 > 0.3 > brightness(seen["dark"].background)
    assert seen["light"].width <= 1100 and narrow.width <= 380


def test_the_plan_on_a_telephone(tmp_path: Path) -> None:
    out = tmp_path / "plan.html"
    assert main(["plan", "runs/frontier-175b", "--no-search", "--report", str(out)]) == 0
    program = chromium()
    assert program is not None
    with Browser(program) as browser:
        seen = {scheme: browser.look(out, scheme, width=390) for scheme in ("light", "dark")}
        rest = browser.call("Runtime.evaluate", expression="document.body.scrollWidth - window.innerWidth")
    for one in seen.values():
        assert one.requests == [out.as_uri()] and one.console == [] and one.width <= 390 and one.height > 3000
    assert rest["result"]["value"] <= 0
    assert brightness(seen["light"].background) > 0.8 > 0.3 > brightness(seen["dark"].background)


def test_the_browser_sees_requests_and_messages(tmp_path: Path) -> None:
    """Otherwise their absence says nothing."""
    page = tmp_path / "bad.html"
    page.write_text('<img src="http://127.0.0.1:9/x.png"><script>console.log("hello"); throw 1</script>')
    program = chromium()
    assert program is not None
    with Browser(program) as browser:
        seen = browser.look(page, "dark")
    assert "http://127.0.0.1:9/x.png" in seen.requests
    assert any("hello" in line for line in seen.console) and len(seen.console) >= 2
