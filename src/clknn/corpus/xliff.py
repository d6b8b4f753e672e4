"""XLIFF 1.2 and 2.x: their translated units come out as pairs, and pairs are written as units of either.

Taken are, unless all states are asked for: in 1.2, targets whose state is translated, signed-off or final, approved
units, and targets that say nothing at all; in 2.x, segments whose state is translated, reviewed or final, for one that
says nothing is by that standard initial. Hidden here: files in the file, groups, notes, alternatives that are no
translations. The trade-off: what only other tools' modules understand is passed over, and does not come back.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO
from xml.sax.saxutils import escape, quoteattr

from clknn.corpus.archives import LARGEST, File, written
from clknn.corpus.cleaning import AS_IT_IS, Cleaning, clean_pair
from clknn.corpus.markup import CHECKED, DEEPEST, RETURN, XLIFF_1, XLIFF_2, Content, Dialect, Xml, as_written, xml_of
from clknn.corpus.pair import Details, Facts, Origin, Pair, Tally
from clknn.errors import InputError
from clknn.language import places_of, said_or_asked, two_languages

ONE, TWO = "XLIFF 1", "XLIFF 2"
_DONE_1 = frozenset(("translated", "signed-off", "final"))
_DONE_2 = frozenset(("translated", "reviewed", "final"))
# Attributes that come back, of a trans-unit and its target, of a unit and its segment.
_UNIT_1, _TARGET_1 = ("approved", "translate", "resname", "restype", "datatype"), ("state", "state-qualifier")
_UNIT_2, _SEGMENT_2 = ("name", "type", "translate"), ("state", "subState")
_MOST = 10_000  # facts of a unit


@dataclass(slots=True)
class _Unit:
    line: int
    began: int
    id: str
    facts: list[tuple[str, str]]
    too_large: bool = False


@dataclass(slots=True)
class _Segment:
    """What becomes a pair: a trans-unit of 1.2, a segment of 2.x."""

    line: int
    id: str | None = None
    said: list[tuple[str, str]] = field(default_factory=list)  # its own attributes, and its target's
    texts: dict[str, tuple[str, str | None]] = field(default_factory=dict)  # "source" and "target"


@dataclass(frozen=True, slots=True)
class _Read:
    unit: _Unit
    segment: _Segment
    place: Facts  # the file and groups that it stands in
    languages: tuple[str, str]  # as the file says them, perhaps empty
    version: str


def read_xliff(
    file: File, source: str, target: str, tally: Tally, cleaning: Cleaning = AS_IT_IS, all_states: bool = False
) -> Iterator[Pair]:
    """The pairs of an XLIFF file, in either direction."""
    asked = two_languages(source, target)
    file.refuse_unreadable()
    return _pairs(file, (source, target), asked, tally, cleaning, all_states)


def _pairs(
    file: File,
    names: tuple[str, str],
    asked: tuple[str, str],
    tally: Tally,
    cleaning: Cleaning,
    all_states: bool,
) -> Iterator[Pair]:
    units, both = 0, False
    found: dict[tuple[str, str], None] = {}
    for read in _segments(file):
        units += 1
        tally.read += 1
        segment, unit = read.segment, read.unit
        number = unit.id if read.version == ONE or segment.id is None else f"{unit.id}/{segment.id}"
        where = Origin(file.name, number or None, segment.line)
        if unit.too_large:
            tally.skip(f"unit of more than {LARGEST:,} bytes", str(where))
            continue
        if len(found) < 20:
            found[read.languages] = None
        first, second = places_of(asked, said_or_asked(read.languages, asked))
        if first is None or second is None:
            tally.skip(f"no {names[0] if first is None else names[1]} segment", str(where))
            continue
        both = True
        state = _unfinished(read)
        if "target" not in segment.texts or not segment.texts["target"][0].strip():
            tally.skip("not translated", str(where))
        elif state and not all_states:
            tally.skip(f"state {state}", str(where))
        else:
            sides = segment.texts.get("source", ("", None)), segment.texts["target"]
            said: tuple[Facts, Facts] = (), tuple(segment.said)
            one, other = sides[first], sides[second]
            details = Details(read.version, (*read.place, *unit.facts), said[first], said[second], one[1], other[1])
            origin = Origin(file.name, number or None, segment.line, details)
            if pair := clean_pair(one[0], other[0], origin, tally, cleaning):
                yield pair
    if units == 0:
        raise InputError(f"{file}: no unit with text in it; is this an XLIFF file with content?")
    if not both:
        listed = ", ".join(f"{one or 'no language'} → {other or 'no language'}" for one, other in found) or "none"
        raise InputError(f"{file}: no unit has both {names[0]} and {names[1]}; ask for two of those found: {listed}")


def _unfinished(read: _Read) -> str:
    """The state that keeps a segment from being taken, or nothing."""
    state = dict(read.segment.said).get("state")
    if read.version == TWO:
        return "" if (state or "initial") in _DONE_2 else state or "initial"
    approved = dict(read.unit.facts).get("approved")
    if approved == "yes" or state in _DONE_1 or (state is None and approved != "no"):
        return ""
    return state or "not approved"


def _segments(file: File) -> Iterator[_Read]:
    reader = _Reader(file)
    for _ in reader.xml.fed():
        yield from reader.ready
        reader.ready.clear()
        reader.bound()


class _Reader:
    """The handlers of one file, and what they know between two calls."""

    def __init__(self, file: File) -> None:
        self.xml = Xml(file)
        self.ready: list[_Read] = []
        self._file = file
        self._path: list[str] = []  # of open elements
        self._version = ""
        self._languages = ("", "")
        self._place: list[tuple[str, str]] = []
        self._unit: _Unit | None = None
        self._segment: _Segment | None = None
        self._content: Content | None = None  # of the open source or target
        self._contents = {
            ONE: Content(self.xml.parser, XLIFF_1),
            TWO: Content(self.xml.parser, XLIFF_2),
        }
        self._fact, self._told = "", list[str]()
        self.xml.parser.StartElementHandler = self._start
        self.xml.parser.EndElementHandler = self._end

    def bound(self) -> None:
        unit, total = self._unit, self.xml.bytes
        if unit is None or total - unit.began <= CHECKED:
            return
        if self._content is not None:
            self._content.bound()
        if total - unit.began > LARGEST or len(unit.facts) > _MOST:
            unit.too_large = True
            unit.facts.clear()
            self._told.clear()
            for content in self._contents.values():
                content.words.clear()

    def _start(self, name: str, attributes: list[str]) -> None:
        if self._content is not None:
            if len(self._path) >= DEEPEST:
                self.xml.refuse_depth()
            self._path.append("")
            self._content.begins(name, attributes)
            return
        local = name.rpartition(":")[2]
        above = self._path[-1] if self._path else ""
        self._path.append(local)
        if len(self._path) > DEEPEST:
            self.xml.refuse_depth()
        said = dict(zip(attributes[::2], attributes[1::2], strict=True))
        if len(self._path) == 1:
            self._begin_document(local, said)
        elif local == "file":
            if self._version == ONE:
                self._languages = said.get("source-language", ""), said.get("target-language", "")
            self._place = [("file", said.get("original") or said.get("id", ""))]
        elif local == "group":
            self._place.append(("group", said.get("id") or said.get("resname") or said.get("name") or ""))
        elif self._unit is None:
            if (local == "trans-unit" and self._version == ONE) or (local == "unit" and self._version == TWO):
                self._begin_unit(said)
        elif above == "trans-unit" or above in ("segment", "notes", "originalData", "unit"):
            self._begin_part(local, above, said)

    def _begin_document(self, local: str, said: dict[str, str]) -> None:
        version = said.get("version", "")
        if local != "xliff":
            raise InputError(f"{self._file}: begins with <{local[:40]}>; is this an XLIFF file?")
        if version[:2] not in ("1.", "2."):
            raise InputError(f"{self._file}: XLIFF of version {version[:40]!r}; 1.x and 2.x are read")
        self._version = ONE if version.startswith("1.") else TWO
        if self._version == TWO:
            self._languages = said.get("srcLang", ""), said.get("trgLang", "")

    def _begin_unit(self, said: dict[str, str]) -> None:
        line, began = self.xml.line, int(self.xml.parser.CurrentByteIndex)
        kept = _UNIT_1 if self._version == ONE else _UNIT_2
        facts = [(name, said[name]) for name in kept if name in said]
        self._unit = _Unit(line, began, said.get("id", ""), facts)
        if self._version == ONE:
            self._segment = _Segment(line)

    def _begin_part(self, local: str, above: str, said: dict[str, str]) -> None:
        assert self._unit is not None
        if local in ("source", "target") and above in ("trans-unit", "segment") and self._segment is not None:
            if local == "target" and self._version == ONE:
                self._segment.said += [(name, said[name]) for name in _TARGET_1 if name in said]
            self._content = self._contents[self._version]
            self._content.begin()
        elif local == "segment" and above == "unit":
            self._segment = _Segment(self.xml.line, said.get("id"))
            self._segment.said += [(name, said[name]) for name in _SEGMENT_2 if name in said]
        elif local == "note" and above in ("trans-unit", "notes"):
            by = said.get("from") or said.get("category")
            self._tell(f"note:{by}" if by else "note")
        elif local == "data" and above == "originalData":
            self._tell(f"data:{said.get('id', '')}")

    def _tell(self, fact: str) -> None:
        self._fact, self._told = fact, []
        self.xml.parser.CharacterDataHandler = self._told.append

    def _end(self, _: str) -> None:
        local = self._path.pop()
        if self._content is not None:
            if self._content.inside:
                self._content.ends()
                return
            assert self._segment is not None
            self._segment.texts[local] = self._content.finish()
            self._content = None
        elif self._fact and local in ("note", "data"):
            assert self._unit is not None
            self.xml.parser.CharacterDataHandler = None
            self._unit.facts.append((self._fact, "".join(self._told)))
            self._fact = ""
        elif local == "group" and len(self._place) > 1:
            self._place.pop()
        elif self._unit is not None and self._segment is not None and local in ("trans-unit", "segment"):
            segment, self._segment = self._segment, None
            self.ready.append(_Read(self._unit, segment, tuple(self._place), self._languages, self._version))
            if self._version == ONE:
                self._unit = None
        elif local == "unit":
            self._unit = None


def write_xliff(pairs: Iterable[Pair], path: Path, source: str, target: str) -> int:
    """Write XLIFF, 2.0 if the name says .xliff and 1.2 otherwise, whole or not at all; the number of pairs written."""
    two_languages(source, target)
    with written(path) as file:
        if ".xliff" in (suffix.lower() for suffix in path.suffixes):
            return _write_2(file, pairs, source, target)
        return _write_1(file, pairs, source, target)


def _write_1(file: IO[bytes], pairs: Iterable[Pair], source: str, target: str) -> int:
    languages = f"source-language={quoteattr(source)} target-language={quoteattr(target)}"
    head = '<?xml version="1.0" encoding="utf-8"?>\n'
    file.write(f'{head}<xliff version="1.2" xmlns="urn:oasis:names:tc:xliff:document:1.2">\n'.encode())
    count, place = 0, list[str]()  # the file and groups that are open
    for pair in pairs:
        count += 1
        wanted = _place_of(pair)
        same = _alike(place, wanted)
        text = "</group>\n" * (len(place) - max(same, 1))
        if not same:
            text += ("</body></file>\n" if place else "") + (
                f'<file original={quoteattr(wanted[0])} {languages} datatype="plaintext"><body>\n'
            )
        text += "".join(f"<group id={quoteattr(group)}>\n" for group in wanted[max(same, 1) :])
        place = wanted
        file.write(xml_of(text + _trans_unit(pair, count), pair.origin).encode())
    end = "</group>\n" * (len(place) - 1) + "</body></file>\n"
    if not place:
        end = f'<file original="" {languages} datatype="plaintext"><body/></file>\n'
    file.write(f"{end}</xliff>\n".encode())
    return count


def _place_of(pair: Pair) -> list[str]:
    """The file it stands in, then the groups."""
    details = pair.origin.details
    if details is None or details.format not in (ONE, TWO):
        return [pair.origin.file]
    groups = [value for name, value in details.unit if name == "group"]
    return [next((value for name, value in details.unit if name == "file"), pair.origin.file), *groups]


def _alike(one: list[str], other: list[str]) -> int:
    """How many they begin with are the same."""
    same = 0
    while same < min(len(one), len(other)) and one[same] == other[same]:
        same += 1
    return same


def _trans_unit(pair: Pair, number: int) -> str:
    details = pair.origin.details or Details(ONE)
    ours = details.format == ONE
    said = dict(details.unit) if ours else {}
    state = dict((*details.source, *details.target)) if ours else {}
    attributes = _attributes(said, _UNIT_1)
    unit = str(number) if pair.origin.unit is None else pair.origin.unit
    texts = _texts(pair, details, XLIFF_1, ours)
    return (
        f"<trans-unit id={quoteattr(unit)}{attributes}>\n"
        f"  <source>{texts[0]}</source>\n"
        f"  <target{_attributes(state, _TARGET_1)}>{texts[1]}</target>\n"
        + "".join(f"  {note}\n" for note in _notes(details, "from"))
        + "</trans-unit>\n"
    )


def _texts(pair: Pair, details: Details, dialect: Dialect, ours: bool) -> tuple[str, str]:
    return (
        as_written(details.source_as_written if ours else None, pair.source, dialect),
        as_written(details.target_as_written if ours else None, pair.target, dialect),
    )


def _attributes(said: dict[str, str], names: tuple[str, ...]) -> str:
    return "".join(f" {name}={quoteattr(said[name])}" for name in names if name in said)


def _notes(details: Details, by: str) -> list[str]:
    """Notes, and what another format said beside its text, each named."""
    notes = []
    ours = details.format in (ONE, TWO)
    for name, value in (*details.unit, *(() if ours else (*details.source, *details.target))):
        kind, _, said = name.partition(":")
        if kind == "note" or not ours:
            said = said if kind == "note" else name
            named = f" {by}={quoteattr(said)}" if said else ""
            notes.append(f"<note{named}>{escape(value, RETURN)}</note>")
    return notes


def _write_2(file: IO[bytes], pairs: Iterable[Pair], source: str, target: str) -> int:
    head = '<?xml version="1.0" encoding="utf-8"?>\n<xliff version="2.0" xmlns="urn:oasis:names:tc:xliff:document:2.0"'
    file.write(f"{head} srcLang={quoteattr(source)} trgLang={quoteattr(target)}>\n".encode())
    count = files = 0
    place, unit = list[str](), ""  # the file and groups that are open, and the unit with its facts
    for pair in pairs:
        count += 1
        details = pair.origin.details or Details("")
        ours = details.format == TWO
        wanted = _place_of(pair)
        named, _, segment = (pair.origin.unit or str(count)).partition("/") if ours else (str(count), "", "")
        if not ours and pair.origin.unit is not None:
            named = pair.origin.unit
        opening = _unit_opening(named, details, ours)
        same = _alike(place, wanted)
        text = ""
        if unit != opening or place != wanted or not segment:
            text = ("</unit>\n" if unit else "") + "</group>\n" * (len(place) - max(same, 1))
            if not same:
                files += 1
                text += ("</file>\n" if place else "") + f'<file id="f{files}" original={quoteattr(wanted[0])}>\n'
            text += "".join(f"<group id={quoteattr(group)}>\n" for group in wanted[max(same, 1) :]) + opening
            place, unit = wanted, opening
        state = _attributes(dict((*details.source, *details.target)), _SEGMENT_2) if ours else ' state="translated"'
        texts = _texts(pair, details, XLIFF_2, ours)
        identity = f" id={quoteattr(segment)}" if segment else ""
        text += (
            f"  <segment{identity}{state}>\n    <source>{texts[0]}</source>\n    <target>{texts[1]}</target>\n"
            "  </segment>\n"
        )
        file.write(xml_of(text, pair.origin).encode())
    end = "</unit>\n" * bool(unit) + "</group>\n" * (len(place) - 1) + "</file>\n"
    file.write((end if place else '<file id="f1"/>\n').encode() + b"</xliff>\n")
    return count


def _unit_opening(unit: str, details: Details, ours: bool) -> str:
    said = dict(details.unit) if ours else {}
    notes = "".join(f"    {note}\n" for note in _notes(details, "category"))
    data = "".join(
        f"    <data id={quoteattr(name.partition(':')[2])}>{escape(value, RETURN)}</data>\n"
        for name, value in (details.unit if ours else ())
        if name.startswith("data:")
    )
    return (
        f"<unit id={quoteattr(unit)}{_attributes(said, _UNIT_2)}>\n"
        + (f"  <notes>\n{notes}  </notes>\n" if notes else "")
        + (f"  <originalData>\n{data}  </originalData>\n" if data else "")
    )
