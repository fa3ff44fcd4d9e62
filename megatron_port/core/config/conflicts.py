"""Settings that contradict one another, as tables; one formatter writes every sentence.

A feature states what it does not go with as a :class:`Table` of rows, and registers it under the settings that ask for
the feature (``registry.CONFLICTS``); ``config.checks`` reads those of the settings that are not at their defaults.
Sentences are formatted only where a row applies. In ``asked``, ``why`` and ``use``, ``{c.model.num_layers}`` stands for
a value of the configuration.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megatron_port.core.config.schema import RunConfig

Test = Callable[["RunConfig"], Any]
"""A predicate over a configuration."""
_CLAUSES = ("which ", "whose ", "where ", "in which ", "by which ", "of which ")


def always(config: RunConfig) -> bool:
    """Return True, for rows that apply to every run."""
    return True


def value_of(config: RunConfig, name: str) -> Any:
    """Return the value of a setting, by its dotted name."""
    return reduce(getattr, name.split("."), config)


def shown(value: Any) -> str:
    """Return a value as a run file has it."""
    if isinstance(value, bool):
        return str(value).lower()
    return f'"{value}"' if isinstance(value, str) else str(list(value) if isinstance(value, tuple) else value)


def named(config: RunConfig, name: str) -> str:
    """Return ``engine "native"``: a setting with its value; a switch that is on is its name alone."""
    value = value_of(config, name)
    return name if value is True else f"{name} {shown(value)}"


def joined(sentence: str, why: str, use: str) -> str:
    """Return a sentence with its reason, a clause or a statement, and what to change."""
    sentence += f"{', ' if why.startswith(_CLAUSES) else ': '}{why}" if why else ""
    return f"{sentence}; {use}" if use else sentence


@dataclass(frozen=True)
class Conflict:
    """A setting whose value does not go with the table's feature: ``asked with engine "deepspeed", whose …; use …``."""

    setting: str
    """Dotted name."""
    why: str = ""
    use: str = ""
    """Advice: the change that ends the conflict."""
    allowed: tuple[Any, ...] = ()
    """The only values that go with the feature."""
    refused: tuple[Any, ...] = ()
    """Values that do not. Where neither is given, any value but an empty one or zero is refused."""
    when: Test | None = None
    """Additional condition; it decides alone where neither ``allowed`` nor ``refused`` is given."""
    needs: str = ""
    """Requirement of the feature, for ``asked needs …``."""

    def applies(self, config: RunConfig) -> bool:
        """Return whether the row is contradicted."""
        if self.when is not None and not self.when(config):
            return False
        value = value_of(config, self.setting)  # 0, false or empty: whatever the setting switches is off
        if self.allowed:
            return value not in self.allowed
        return value in self.refused if self.refused else self.when is not None or bool(value)

    def sentence(self, config: RunConfig, asked: str, link: str) -> str:
        """Return the message."""
        against = f"needs {self.needs}" if self.needs else f"{link} {named(config, self.setting)}"
        return joined(f"{asked} {against}", self.why.format(c=config), self.use.format(c=config))


@dataclass(frozen=True)
class Above:
    """A setting that another one bounds: ``model.moe.top_k 9 is above num_experts 8; use at most 8``."""

    setting: str
    limit: str
    use: str = "use at most {most}"

    def applies(self, config: RunConfig) -> bool:
        """Return whether the bound is exceeded."""
        return bool(value_of(config, self.setting) > value_of(config, self.limit))

    def sentence(self, config: RunConfig, asked: str, link: str) -> str:
        """Return the message."""
        (table, _, key), most = self.limit.rpartition("."), shown(value_of(config, self.limit))
        limit = key if table == self.setting.rpartition(".")[0] else self.limit
        sentence = f"{named(config, self.setting)} is above {limit} {most}"
        return joined(sentence, "", self.use.format(c=config, most=most))


@dataclass(frozen=True)
class Rule:
    """Any other contradiction: a predicate and the whole sentence (``{asked}`` is the table's)."""

    when: Test
    text: str

    def applies(self, config: RunConfig) -> bool:
        """Return whether the configuration has this contradiction."""
        return bool(self.when(config))

    def sentence(self, config: RunConfig, asked: str, link: str) -> str:
        """Return the message."""
        return self.text.format(c=config, asked=asked)


@dataclass(frozen=True)
class Table:
    """Settings that contradict a feature."""

    rows: tuple[Conflict | Above | Rule, ...] = ()
    asked: str | Callable[[RunConfig], str] = ""
    """The feature as a user asks for it: beginning of each row's sentence."""
    on: Test = always
    """Whether the feature is asked for."""
    link: str = "with"
    """Between the feature and a setting."""
    end: str = ""
    """End of each row's sentence."""
    sized: bool = False
    """Judged only while every size of the split is in range."""
    more: tuple[Callable[[RunConfig], list[str]], ...] = ()
    """Checks that compute something: each returns its sentences."""

    def problems(self, config: RunConfig) -> list[str]:
        """Return a sentence for each row that applies."""
        if not self.on(config):
            return []
        asked = self.asked.format(c=config) if isinstance(self.asked, str) else self.asked(config)
        found = [row.sentence(config, asked, self.link) + self.end for row in self.rows if row.applies(config)]
        return found + [text for check in self.more for text in check(config)]


NO_ENGINE = 'use engine = "native"'


def native_only(why: str = "", use: str = NO_ENGINE) -> Conflict:
    """Return the row of a feature that only the native engine has. ``why``: what the other one does."""
    return Conflict("engine", why, use, allowed=("native",))
