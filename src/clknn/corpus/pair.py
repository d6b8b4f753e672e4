"""What every reader makes and every writer takes: a `Pair`, its `Origin`, and the `Tally` of what was read.

An origin says where a pair stood, and holds in its `Details` what else the file said of it (notes, properties, dates,
inline codes), so that an export can give it back. The trade-off: details are text in the words of the format they came
from, so that a format gets back what it gave, byte for byte, and another format gets the plain words and the notes.
"""

from __future__ import annotations

import json
import unicodedata
from dataclasses import dataclass, field
from typing import Any

from clknn.errors import InputError

Facts = tuple[tuple[str, str], ...]  # names and values, in the file's order; a name can come twice


@dataclass(frozen=True, slots=True)
class Details:
    """What a file says of a pair beyond its text."""

    format: str  # in whose words: "TMX", "XLIFF 1", "XLIFF 2", "gettext", "table", "JSON"
    unit: Facts = ()
    source: Facts = ()
    target: Facts = ()
    source_as_written: str | None = None  # where that is more than the pair's words: inline codes, line feeds
    target_as_written: str | None = None

    def as_json(self) -> str:
        """Without what is absent."""
        there = {name: value for name in _PARTS if (value := getattr(self, name))}
        return json.dumps({"format": self.format, **there}, ensure_ascii=False, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> Details:
        """What `as_json` made; a ValueError for anything else."""
        return cls.checked(json.loads(text))

    @classmethod
    def checked(cls, said: Any) -> Details:
        if not isinstance(said, dict) or not isinstance(said.get("format"), str) or set(said) - {"format", *_PARTS}:
            raise ValueError("not the details of a pair")
        facts: dict[str, Facts] = {}
        for name in _PARTS[:3]:
            rows = said.get(name, [])
            if not isinstance(rows, list) or not all(
                isinstance(row, list) and len(row) == 2 and all(isinstance(part, str) for part in row) for row in rows
            ):
                raise ValueError(f"{name!r} is no list of names and values")
            facts[name] = tuple((row[0], row[1]) for row in rows)
        written = {name: said.get(name) for name in _PARTS[3:]}
        if not all(value is None or isinstance(value, str) for value in written.values()):
            raise ValueError("a segment as it was written is text")
        return cls(
            said["format"], facts["unit"], facts["source"], facts["target"],
            written["source_as_written"], written["target_as_written"],
        )  # fmt: skip


_PARTS = "unit", "source", "target", "source_as_written", "target_as_written"


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a pair came from: the file's name (not its path), its unit id, its line."""

    file: str
    unit: str | None = None
    line: int | None = None
    details: Details | None = None

    def __str__(self) -> str:
        if self.line is not None:
            return f"{self.file}:{self.line}"
        return self.file if self.unit is None else f"{self.file}, unit {self.unit}"


@dataclass(frozen=True, slots=True)
class Pair:
    source: str
    target: str
    origin: Origin


@dataclass(slots=True)
class Skip:
    count: int
    first: str


@dataclass(slots=True)
class Tally:
    """What was read, kept and skipped. Readers count `read` and skips; who takes in the pairs counts `kept`."""

    read: int = 0
    kept: int = 0
    skipped: dict[str, Skip] = field(default_factory=dict)
    strict: bool = False  # refuse the first unit that would be skipped
    changed: dict[str, Skip] = field(default_factory=dict)  # pairs kept with another text than the file's
    remarks: list[str] = field(default_factory=list)  # what a reader had to find out, such as a delimiter

    def skip(self, reason: str, where: str) -> None:
        if self.strict:
            raise InputError(f"{where}: {reason}; correct it, or read without strict to skip such units")
        _count(self.skipped, reason, where)

    def change(self, what: str, where: str) -> None:
        _count(self.changed, what, where)

    def lines(self) -> list[str]:
        """For people: the totals, then one line for each reason to skip or change, and for each remark."""
        return [
            f"read {self.read:,} units, kept {self.kept:,}",
            *(f"skipped {s.count:,}: {reason} (first: {s.first})" for reason, s in self.skipped.items()),
            *(f"changed {s.count:,}: {what} (first: {s.first})" for what, s in self.changed.items()),
            *self.remarks,
        ]


def _count(counts: dict[str, Skip], reason: str, where: str) -> None:
    seen = counts.get(reason)
    if seen is None:
        counts[reason] = Skip(1, where)
    else:
        seen.count += 1


def fold(text: str) -> str:
    """The text without its case, compatibility forms and spacing: equal folds are nearly the same text."""
    if not text.isascii():
        text = unicodedata.normalize("NFKC", text)
        # Case folding can undo the normal form, and the normal form can bring back case (Unicode 3.13, D147).
        text = unicodedata.normalize("NFKC", text.casefold())
    return " ".join(text.casefold().split())
