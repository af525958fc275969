"""Reads typed values out of a JSON config and remembers everything that is wrong with it.

Knows nothing about models: `config.py` says which keys there are. A faulty value yields a stand-in, so that reading can go on
and the error names all faulty keys at once; `Problems.raise_if_any` must be called before a value is used.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import cast


class ConfigError(Exception):
    """The configuration cannot be served; the message names every key at fault."""


@dataclass
class Problems:
    """The collected faults of one file."""

    found: list[str] = field(default_factory=list)

    def add(self, key: str, what: str) -> None:
        """Record that `key` is at fault."""
        self.found.append(f"{key}: {what}")

    def raise_if_any(self, file_name: str) -> None:
        """Raise `ConfigError` with all faults."""
        if self.found:
            raise ConfigError(f"{file_name} cannot be served: " + "; ".join(self.found))


@dataclass(frozen=True)
class Section:
    """One JSON object of the file. Keys may have several spellings; the first one that is present and not null counts."""

    values: Mapping[str, object]
    problems: Problems
    path: str = ""

    def has(self, *names: str) -> bool:
        """Whether any spelling is present and not null."""
        return any(self.values.get(name) is not None for name in names)

    def section(self, name: str) -> "Section | None":
        """The object under `name`; None when absent or null."""
        value = self.values.get(name)
        if value is None:
            return None
        if not isinstance(value, dict):
            self.problems.add(self._key(name), "must be an object")
            return None
        return Section(value, self.problems, self._key(name))

    def integer(self, *names: str, default: int | None = None, minimum: int = 1) -> int:
        """A whole number of at least `minimum`."""
        name, value = self._find(names, default)
        if value is None:
            return minimum
        if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
            self.problems.add(name, f"{value!r} (must be a whole number >= {minimum})")
            return minimum
        return value

    def number(self, *names: str, default: float | None = None) -> float:
        """A positive number."""
        name, value = self._find(names, default)
        if value is None:
            return 1.0
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
            self.problems.add(name, f"{value!r} (must be a positive number)")
            return 1.0
        return float(value)

    def layers(self, name: str, num_layers: int, meanings: Mapping[object, bool]) -> tuple[bool, ...]:
        """A list with one entry per layer, each a key of `meanings`."""
        value = self.values[name]
        if not isinstance(value, list) or len(value) != num_layers:
            self.problems.add(self._key(name), f"must be a list of {num_layers} entries, one per layer")
            return (False,) * num_layers
        unknown = [entry for entry in value if not isinstance(entry, int | str) or entry not in meanings]
        if unknown:
            self.problems.add(self._key(name), f"{unknown[0]!r} is not one of {list(meanings)}")
            return (False,) * num_layers
        return tuple(meanings[cast("int | str", entry)] for entry in value)

    def supports(self, name: str, supported: Sequence[object]) -> None:
        """Refuse any value but the supported ones; an absent or null key is fine."""
        value = self.values.get(name)
        if value is not None and value not in supported:
            options = " or ".join(repr(option) for option in supported)
            self.problems.add(self._key(name), f"{value!r} is not supported (only {options})")

    def missing(self, name: str, why: str = "is missing") -> None:
        """Record that a required key is absent."""
        self.problems.add(self._key(name), why)

    def _find(self, names: Sequence[str], default: float | None) -> tuple[str, object]:
        for name in names:
            if self.values.get(name) is not None:
                return self._key(name), self.values[name]
        if default is None:
            self.missing(names[0])
        return self._key(names[0]), default

    def _key(self, name: str) -> str:
        return f"{self.path}.{name}" if self.path else name
