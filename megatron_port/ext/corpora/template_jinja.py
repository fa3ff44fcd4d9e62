"""Jinja's sandbox for chat templates, with what those on the hub expect to find in it."""

from __future__ import annotations

import json
from datetime import datetime
from typing import Any

from megatron_port.core.errors import DataError, shortened
from megatron_port.ext.corpora.extras import need

BEGIN, END = "\ufdd0", "\ufdd1"
"""Noncharacters that stand around the model's words until they are rendered. No text may have them."""


def compiled(text: str, now: str) -> Any:
    """Return Jinja's template. ``now``: result of ``strftime_now``, in ISO form. Raises DataError: it is none."""
    jinja2 = need("jinja2", "chat templates")
    environment = _environment(jinja2, datetime.fromisoformat(now) if now else None)
    try:
        return environment.from_string(text)
    except (jinja2.TemplateError, RecursionError) as error:
        raise DataError(shortened(str(error), 200)) from error


def _environment(jinja2: Any, now: datetime | None) -> Any:
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """``{% generation %}…{% endgeneration %}``: the model's own words, between two marks."""

        tags = {"generation"}  # noqa: RUF012 (Jinja reads the class)

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return jinja2.nodes.CallBlock(self.call_method("_marked"), [], [], body).set_lineno(line)

        def _marked(self, caller: Any) -> str:
            return f"{BEGIN}{caller()}{END}"

    def refuse(message: str) -> None:
        raise jinja2.TemplateError(message)

    def tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None,
               separators: tuple[str, str] | None = None, sort_keys: bool = False) -> str:
        # Jinja's own escapes <, > and & for HTML.
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols])
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = refuse
    environment.globals["strftime_now"] = lambda form: (now or datetime.now()).strftime(form)
    return environment
