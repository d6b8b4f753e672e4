"""Tables of pairs: TSV, CSV and JSON lines, read and (but for CSV) written.

A header is known by its names: source and target, or the two languages asked for, in any order and among any other
columns; without one there are two columns, source first. Hidden here: what separates the columns of a CSV, chosen
among four and remarked on in the tally. The trade-off: in a TSV quotes mean nothing and a line is a row, so that every
text file of this kind is read as it stands; who needs quotes has CSV.
"""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any

from clknn.corpus.archives import File, lines, written
from clknn.corpus.cleaning import AS_IT_IS, Cleaning, clean_pair
from clknn.corpus.pair import Details, Origin, Pair, Skip, Tally
from clknn.errors import InputError
from clknn.language import normal_tag, places_of, two_languages

TABLE, JSON = "table", "JSON"
_UNSPLIT = 100  # rows without the right columns, behind which a file is taken for no table
_SEPARATORS = {",": "commas", ";": "semicolons", "\t": "tabs", "|": "bars"}
_UNITS = ("unit", "id", "tuid")  # what a column of unit ids is called
_OURS = {"source", "target", "unit", "details"}  # keys of a JSON line with a meaning here
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


@dataclass(frozen=True, slots=True)
class _Columns:
    """Which columns of a table are what."""

    count: int = 2
    source: int = 0
    target: int = 1
    unit: int | None = None
    others: tuple[tuple[int, str], ...] = ()


# -- TSV and CSV -------------------------------------------------------------------------------------------------------


def read_tsv(
    file: File, tally: Tally, languages: tuple[str, str] | None = None, cleaning: Cleaning = AS_IT_IS
) -> Iterator[Pair]:
    """The pairs of a UTF-8 file with `source<TAB>target` on each line. Quotes mean nothing here."""
    asked = None if languages is None else two_languages(*languages)
    file.refuse_unreadable()
    rows = ((number, line.split("\t")) for number, line in enumerate(lines(file), start=1))
    return _pairs(file, rows, asked, tally, cleaning, "source<TAB>target", "TSV")


def read_csv(
    file: File, tally: Tally, languages: tuple[str, str] | None = None, cleaning: Cleaning = AS_IT_IS
) -> Iterator[Pair]:
    """The pairs of a CSV file in UTF-8, whose columns commas, semicolons, tabs or bars separate."""
    asked = None if languages is None else two_languages(*languages)
    file.refuse_unreadable()
    return _pairs(file, _csv_rows(file, tally), asked, tally, cleaning, "two columns", "CSV")


def _csv_rows(file: File, tally: Tally) -> Iterator[tuple[int, list[str]]]:
    text = lines(file)
    first = list(islice(text, _UNSPLIT))
    separator = max(_SEPARATORS, key=lambda one: _regular(first, one))
    tally.remarks.append(f"{file.name}: {_SEPARATORS[separator]} separate its columns")
    number = 1
    rows = csv.reader((f"{line}\n" for line in chain(first, text)), delimiter=separator, strict=True)
    while True:
        try:
            row = next(rows)
        except StopIteration:
            return
        except csv.Error as error:
            raise InputError(
                f"{file}:{number}: not a row of CSV ({error}); write quotes in a text twice, and close them"
            ) from error
        if row:
            yield number, row
        number = rows.line_num + 1


def _regular(some: list[str], separator: str) -> tuple[int, int]:
    """How many of these lines have as many columns as the first, if that is more than one."""
    counts = []
    try:
        counts = [len(row) for row in csv.reader((f"{line}\n" for line in some), delimiter=separator) if row]
    except csv.Error:
        return 0, 0
    same = counts.count(counts[0]) if counts and counts[0] > 1 else 0
    return same, -list(_SEPARATORS).index(separator)


def _pairs(
    file: File,
    rows: Iterator[tuple[int, list[str]]],
    asked: tuple[str, str] | None,
    tally: Tally,
    cleaning: Cleaning,
    expected: str,
    kind: str,
) -> Iterator[Pair]:
    first: InputError | None = None  # of the first line without two columns, while no line has them
    columns: _Columns | None = None
    for read, (number, row) in enumerate(rows, start=1):
        tally.read += 1
        origin = Origin(file.name, line=number)
        if columns is None:
            columns = _header(row, asked)
            if columns is not None:
                tally.skipped["header"] = Skip(1, str(origin))  # also where strict: nothing is lost
                continue
            columns = _Columns() if len(row) == 2 else None
        if columns is None:
            first = first or InputError(
                f"{file}:{number}: expected {expected}, read {len(row)} column(s);"
                f" is this a {kind} file of two columns?"
            )
            if read >= _UNSPLIT:
                raise first
        if columns is None or len(row) != columns.count:
            count = "two" if columns is None or columns.count == 2 else f"{columns.count}"
            tally.skip(f"not {count} columns", str(origin))
            continue
        if columns.count > 2:
            unit = row[columns.unit].strip() or None if columns.unit is not None else None
            facts = tuple((name, row[place]) for place, name in columns.others if row[place])
            origin = Origin(file.name, unit, number, Details(TABLE, facts) if facts else None)
        if pair := clean_pair(row[columns.source], row[columns.target], origin, tally, cleaning):
            yield pair
    if first is not None and columns is None:
        raise first


def _header(row: list[str], asked: tuple[str, str] | None) -> _Columns | None:
    names = tuple(normal_tag(column.removeprefix("\ufeff")) for column in row)
    if not 2 <= len(names) <= 100:
        return None
    if "source" in names and "target" in names:
        source, target = names.index("source"), names.index("target")
    else:
        first, second = (None, None) if asked is None else places_of(asked, names)
        if first is None or second is None:
            return None
        source, target = first, second
    rest = [place for place in range(len(row)) if place not in (source, target)]
    unit = next((place for place in rest if names[place] in _UNITS), None)
    others = tuple((place, row[place].strip()) for place in rest if place != unit and row[place].strip())
    return _Columns(len(row), source, target, unit, others)


def write_tsv(pairs: Iterable[Pair], path: Path, source: str, target: str) -> int:
    """Write source<TAB>target lines under a header, whole or not at all; the number of pairs written."""
    two_languages(source, target)
    with written(path) as file:
        file.write(b"source\ttarget\n")
        count = 0
        for pair in pairs:
            if _BROKEN.search(pair.source) or _BROKEN.search(pair.target):
                raise InputError(f"{pair.origin}: a tab or line feed cannot stand in a TSV; take it out")
            file.write(f"{pair.source}\t{pair.target}\n".encode())
            count += 1
    return count


_BROKEN = re.compile(r"[\t\n\r]")


# -- JSON lines --------------------------------------------------------------------------------------------------------


def read_jsonl(file: File, source: str, target: str, tally: Tally, cleaning: Cleaning = AS_IT_IS) -> Iterator[Pair]:
    """The pairs of a file with {"source": …, "target": …}, or {"de": …, "en": …}, on each line."""
    asked = two_languages(source, target)
    file.refuse_unreadable()
    return _json_pairs(file, asked, tally, cleaning)


def _json_pairs(file: File, asked: tuple[str, str], tally: Tally, cleaning: Cleaning) -> Iterator[Pair]:
    first: InputError | None = None
    fitting = False
    for number, line in enumerate(lines(file), start=1):
        if not line.strip():
            continue
        tally.read += 1
        where = f"{file.name}:{number}"
        said = _object(line)
        keys = None if said is None else _keys(said, asked)
        if said is None or keys is None:
            wanted = f"no text of {asked[0]} and {asked[1]}, or source and target"
            reason = "not a JSON object" if said is None else wanted
            first = first or InputError(f"{file}:{number}: {reason}; is this a file of JSON lines?")
            if not fitting and tally.read >= _UNSPLIT:
                raise first
            tally.skip(reason, where)
            continue
        fitting = True
        source, target = said.pop(keys[0]), said.pop(keys[1])
        unit = said.pop("unit") if isinstance(said.get("unit"), str) and said["unit"] else None
        origin = Origin(file.name, unit, number, _details(said))
        if pair := clean_pair(source, target, origin, tally, cleaning):
            yield pair
    if first is not None and not fitting:
        raise first


def _object(line: str) -> dict[str, Any] | None:
    try:
        said = json.loads(line, parse_constant=_refuse_constant)
        if _SURROGATE.search(line):
            json.dumps(said, ensure_ascii=False).encode()  # a lone surrogate is no text
    except (ValueError, RecursionError):
        return None
    return said if isinstance(said, dict) else None


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _keys(said: dict[str, Any], asked: tuple[str, str]) -> tuple[str, str] | None:
    texts = [key for key, value in said.items() if isinstance(value, str)]
    if "source" in texts and "target" in texts:
        return "source", "target"
    if len(texts) > 100:
        return None
    first, second = places_of(asked, tuple(texts))
    return None if first is None or second is None else (texts[first], texts[second])


def _details(said: dict[str, Any]) -> Details | None:
    if not said:
        return None
    if list(said) == ["details"]:
        try:
            return Details.checked(said["details"])
        except ValueError:
            pass  # another program's key of that name
    return Details(JSON, tuple(_fact(key, value) for key, value in said.items()))


def _fact(key: str, value: Any) -> tuple[str, str]:
    if isinstance(value, str) and not key.startswith("json:"):
        return key, value
    return f"json:{key}", json.dumps(value, ensure_ascii=False)


def write_jsonl(pairs: Iterable[Pair], path: Path, source: str, target: str) -> int:
    """Write one JSON object a line, with unit and details, whole or not at all; the number of pairs written."""
    two_languages(source, target)
    with written(path) as file:
        count = 0
        for pair in pairs:
            said: dict[str, Any] = {"source": pair.source, "target": pair.target}
            if pair.origin.unit is not None:
                said["unit"] = pair.origin.unit
            if pair.origin.details is not None:
                said |= _told(pair.origin.details)
            file.write(json.dumps(said, ensure_ascii=False).encode() + b"\n")
            count += 1
    return count


def _told(details: Details) -> dict[str, Any]:
    whole = {"details": json.loads(details.as_json())}
    if details.format != JSON or details.source or details.target:
        return whole
    said: dict[str, Any] = {}
    for name, value in details.unit:
        key = name.removeprefix("json:")
        if key in _OURS or key in said:
            return whole
        try:
            said[key] = json.loads(value) if name != key else value
        except ValueError:
            return whole
    return said
