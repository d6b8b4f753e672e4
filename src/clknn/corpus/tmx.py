"""TMX 1.4b: its units come out as pairs, and pairs are written as its units.

A unit's notes, properties, dates and names, of the whole unit and of each variant, are the origin's details; inline
codes are kept as written and the model is offered the words around them. Hidden here: variants (the one nearest to the
language asked for is taken), units of any size (one that is too large is passed over and counted), and that units of
two plain segments, as most are, never reach the XML parser: one regular expression that only well-formed ones match
reads them, twice as fast. The trade-off: a unit of more than two languages gives one pair and keeps nothing of the
others.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from xml.sax.saxutils import escape, quoteattr

from clknn.corpus.archives import LARGEST, File, written
from clknn.corpus.cleaning import AS_IT_IS, Cleaning, clean_pair
from clknn.corpus.markup import CHECKED, DEEPEST, RETURN, TMX, Content, Xml, as_written, xml_of
from clknn.corpus.pair import Details, Facts, Origin, Pair, Tally
from clknn.errors import InputError
from clknn.language import normal_tag, places_of, two_languages

FORMAT = "TMX"
_MOST_VARIANTS = 10_000  # of one unit
_MOST_TOLD = 1_000  # languages of a file that are counted for an error
_KEPT = frozenset(
    "o-encoding datatype usagecount lastusagedate creationtool creationtoolversion creationdate creationid changedate"
    " changeid segtype o-tmf srclang".split()
)

Attributes = tuple[str, ...]  # name, value, name, value …
Variant = tuple[Attributes, str, str | None, list[tuple[str, str]]]  # attributes, words, markup, facts
Unit = tuple[int, Attributes, list[tuple[str, str]], list[Variant] | None]  # line, attributes, facts, variants

# A unit of two segments without codes, notes or properties, and the white space before it, as XML has to have them.
_ATTRIBUTES = re.compile(rb'((?:[ \t\r\n]+[A-Za-z][\w:.-]*="[^"<&\x00-\x1f]*")*)[ \t\r\n]*')
_VARIANT = rb"<tuv([^<>]*)>\s*<seg>([^<>\x00-\x08\x0b\x0c\x0e-\x1f]*)</seg>\s*</tuv>\s*"
_PLAIN = re.compile((rb"(\s*)<tu([^<>]*)>\s*" + _VARIANT + _VARIANT + rb"</tu>").replace(rb"\s", rb"[ \t\r\n]"))
_ATTRIBUTE = re.compile(rb'([\w:.-]+)="([^"]*)"')
_REFERENCE = re.compile(r"&(amp|lt|gt|quot|apos);|&")
_MEANT = {"amp": "&", "lt": "<", "gt": ">", "quot": '"', "apos": "'"}
_END = b"</tu>"


def read_tmx(file: File, source: str, target: str, tally: Tally, cleaning: Cleaning = AS_IT_IS) -> Iterator[Pair]:
    """The pairs of a TMX file, in the variants nearest to the languages asked for."""
    asked = two_languages(source, target)
    file.refuse_unreadable()
    return _pairs(file, (source, target), asked, tally, cleaning)


def _pairs(
    file: File, names: tuple[str, str], asked: tuple[str, str], tally: Tally, cleaning: Cleaning
) -> Iterator[Pair]:
    found: Counter[str] = Counter()
    both = False  # whether any unit has the two languages
    name, units = file.name, 0
    choices: dict[tuple[Attributes, ...], _Choice] = {}
    for line, attributes, facts, variants in _units(file):
        units += 1
        unit = None
        if attributes:
            unit = attributes[1] if attributes[0] == "tuid" else _said(attributes).get("tuid")
        tally.read += 1
        if variants is None:
            tally.skip(f"unit of more than {LARGEST:,} bytes", str(Origin(name, unit, line)))
            continue
        given = tuple([variant[0] for variant in variants])
        choice = choices.get(given)
        if choice is None:
            choice = _choice(given, asked)
            if len(choices) < _MOST_TOLD:
                choices[given] = choice
        if not both:
            # Bounded, for a file may name any number of languages.
            found.update({tag for tag in map(normal_tag, choice.tags) if tag in found or len(found) < _MOST_TOLD})
        if choice.source is None or choice.target is None:
            missing = names[0] if choice.source is None else names[1]
            tally.skip(f"no {missing} segment", str(Origin(name, unit, line)))
            continue
        both = True
        one, other = variants[choice.source], variants[choice.target]
        details = choice.details
        if facts is not _NOTHING or len(attributes) > 2 or (attributes and unit is None):
            details = _details(attributes, facts, one, other, choice)
        if pair := clean_pair(one[1], other[1], Origin(name, unit or None, line, details), tally, cleaning):
            yield pair
    if units == 0:
        raise InputError(f"{file}: no translation unit (<tu>) in it; is this a TMX file with content?")
    if not both:
        listed = (
            ", ".join(f"{tag or 'no language'} ({count:,} units)" for tag, count in found.most_common(20)) or "none"
        )
        raise InputError(f"{file}: no unit has both {names[0]} and {names[1]}; ask for two of those found: {listed}")


def _units(file: File) -> Iterator[Unit]:
    """Each unit; without variants, one that is too large."""
    xml = Xml(file)
    parser, content = xml.parser, Content(xml.parser, TMX)
    ready: list[Unit] = []
    depth = line = began = 0
    ended = -1  # where the end tag of the last unit began
    unit: Attributes | None = None  # its attributes, while one is open
    attributes: Attributes = ()  # of the open variant
    facts: list[tuple[str, str]] = []
    facts_of_unit: list[tuple[str, str]] = []
    variants: list[Variant] | None = []
    words, markup = "", None
    in_segment = False
    fact, told = "", list[str]()  # the name of the open note or property, and its text

    def start(name: str, given: list[str]) -> None:
        nonlocal depth, line, began, unit, attributes, facts, facts_of_unit, variants, words, markup, in_segment
        nonlocal fact, told
        depth += 1
        if depth > DEEPEST:
            xml.refuse_depth()
        if in_segment:
            content.begins(name, given)
        elif name == "seg":
            in_segment = True
            content.begin()
        elif name == "tuv":
            attributes, facts, words, markup = tuple(given), [], "", None
        elif name == "tu":
            line, began, unit = xml.line, parser.CurrentByteIndex, tuple(given)
            facts = facts_of_unit = []
            variants = []
        elif (name == "prop" or name == "note") and unit is not None:
            fact, told = _fact(name, given), []
            parser.CharacterDataHandler = told.append
        elif ":" in name:
            depth -= 1
            start(name.rpartition(":")[2], given)

    def end(name: str) -> None:
        nonlocal depth, unit, facts, words, markup, in_segment, fact, ended
        depth -= 1
        if in_segment:
            if content.inside:
                content.ends()
            else:
                in_segment = False
                words, markup = content.finish()
        elif name == "tuv":
            if variants is not None:
                variants.append((attributes, words, markup, facts))
            facts = facts_of_unit
        elif name == "tu":
            if unit is not None:
                ready.append((line, unit, facts_of_unit, variants))
                unit, ended = None, parser.CurrentByteIndex
        elif fact:
            parser.CharacterDataHandler = None
            facts.append((fact, "".join(told)))
            fact = ""
        elif ":" in name:
            depth += 1
            end(name.rpartition(":")[2])

    parser.StartElementHandler, parser.EndElementHandler = start, end

    def fed(part: bytes, last: bool = False) -> Iterator[Unit]:
        nonlocal variants
        xml.feed(part, last=last)
        yield from ready
        ready.clear()
        xml.refuse()
        if unit is not None and xml.bytes - began > CHECKED:
            content.bound()
            if xml.bytes - began > LARGEST or len(variants or ()) > _MOST_VARIANTS:
                variants = None
                facts.clear()
                told.clear()
                content.words.clear()

    rest = b""
    between = False  # units: the parser has ended one, and all that it was fed with that
    for part in xml.parts():
        part, at, rest = rest + part, 0, b""
        while True:
            if between:
                before = parser.CurrentLineNumber
                while found := _plain_unit(part, at, before + xml.lines_passed):
                    yield found[1]
                    xml.lines_passed += part.count(b"\n", at, found[0])
                    at = found[0]
            end_of_unit = part.find(_END, at) + len(_END)
            if end_of_unit < len(_END):
                break
            yield from fed(part[at:end_of_unit])
            between, at = ended == xml.bytes - len(_END), end_of_unit
        rest = part[at:]
        if not between or len(rest) > CHECKED:
            yield from fed(rest)
            between, rest = False, b""
    yield from fed(rest)
    yield from fed(b"", last=True)


def _plain_unit(part: bytes, at: int, line: int) -> tuple[int, Unit] | None:
    """The plain unit that begins here, and where it ends; None for any other, and for what is no XML."""
    found = _PLAIN.match(part, at)
    if found is None:
        return None
    whole, before, unit, one, text, other, more = found.group(0, 1, 2, 3, 4, 5, 6)
    if b"\r" in whole and whole.count(b"\r") > whole.count(b"\r\n"):  # which alone ends a line too
        return None
    try:
        if unit[:7] == b' tuid="' and unit[7:-1].isalnum() and unit[-1:] == b'"':  # as most say no more
            attributes: Attributes = "tuid", unit[7:-1].decode()
        else:
            attributes = _attributes_of(unit)
        first, second = _attributes(one), _attributes(other)
        words, others = text.decode(), more.decode()
    except ValueError:  # not UTF-8, or no attributes
        return None
    if b"&" in text or b"&" in more:
        if any(not said[1] for said in _REFERENCE.finditer(words + others)):
            return None
        words, others = (_REFERENCE.sub(lambda said: _MEANT[said[1]], side) for side in (words, others))
    line += 1 if before == b"\n" else before.count(b"\n")
    return found.end(), (line, attributes, _NOTHING, [(first, words, None, _NOTHING), (second, others, None, _NOTHING)])


_NOTHING: list[tuple[str, str]] = []  # facts, of which nobody takes any away or adds any


@lru_cache(maxsize=1024)
def _attributes(said: bytes) -> Attributes:
    return _attributes_of(said)


def _attributes_of(said: bytes) -> Attributes:
    """As expat would report them; a ValueError for what is none of the plain kind."""
    if not _ATTRIBUTES.fullmatch(said):
        raise ValueError("not attributes")
    flat = [part.decode() for item in _ATTRIBUTE.findall(said) for part in item]
    if len(set(flat[::2])) < len(flat) // 2:
        raise ValueError("an attribute comes twice")
    return tuple(flat)


@dataclass(frozen=True, slots=True)
class _Choice:
    """Which of the variants with these attributes are taken, and what these attributes say beside."""

    tags: tuple[str, ...]
    source: int | None
    target: int | None
    source_facts: Facts = ()
    target_facts: Facts = ()
    details: Details | None = None  # of a unit that says no more


def _choice(given: tuple[Attributes, ...], asked: tuple[str, str]) -> _Choice:
    tags = tuple(_tag(attributes) for attributes in given)
    source, target = places_of(asked, tags)
    if source is None or target is None:
        return _Choice(tags, source, target)
    one, other = (
        ((("xml:lang", tags[place]),) if tags[place] != language else ()) + _kept(given[place])
        for place, language in ((source, asked[0]), (target, asked[1]))
    )
    return _Choice(tags, source, target, one, other, Details(FORMAT, (), one, other) if one or other else None)


def _said(attributes: Attributes) -> dict[str, str]:
    return dict(zip(attributes[::2], attributes[1::2], strict=True))


def _tag(attributes: Attributes) -> str:
    said = _said(attributes)
    return said.get("xml:lang") or said.get("lang") or ""


def _fact(name: str, attributes: list[str]) -> str:
    said = _said(tuple(attributes))
    language = said.get("xml:lang") or said.get("lang")
    return name + (f"@{language}" if language else "") + (f":{said.get('type', '')}" if name == "prop" else "")


def _details(
    unit: Attributes, facts: list[tuple[str, str]], one: Variant, other: Variant, choice: _Choice
) -> Details | None:
    whole = (*_kept(unit), *facts)
    sides = (*choice.source_facts, *one[3]), (*choice.target_facts, *other[3])
    if not (whole or any(sides) or one[2] or other[2]):
        return None
    return Details(FORMAT, whole, *sides, one[2], other[2])


def _kept(attributes: Attributes) -> Facts:
    if len(attributes) <= 2 and (not attributes or attributes[0] in ("xml:lang", "tuid")):
        return ()
    return tuple(item for item in zip(attributes[::2], attributes[1::2], strict=True) if item[0] in _KEPT)


def write_tmx(pairs: Iterable[Pair], path: Path, source: str, target: str, note: str = "") -> int:
    """Write TMX 1.4 (gzipped if the name ends in .gz), whole or not at all; the number of pairs written.

    The same pairs give the same bytes: there is no date in it that no pair brought.
    """
    two_languages(source, target)
    count = 0
    with written(path) as file:
        file.write(
            b"<?xml version='1.0' encoding='utf-8'?>\n"
            b'<tmx version="1.4">\n<header creationtool="clknn" creationtoolversion="1" segtype="sentence"'
            b' o-tmf="clknn" adminlang="en" '
            + f'srclang={quoteattr(source)} datatype="plaintext">'.encode()
            + (f"\n  <note>{xml_of(escape(note), 'note')}</note>\n".encode() if note else b"")
            + b"</header>\n<body>\n"
        )
        for pair in pairs:
            file.write(xml_of(_unit_of(pair, source, target), pair.origin).encode())
            count += 1
        file.write(b"</body>\n</tmx>\n")
    return count


def _unit_of(pair: Pair, source: str, target: str) -> str:
    origin, details = pair.origin, pair.origin.details
    tuid = "" if origin.unit is None else f" tuid={quoteattr(origin.unit)}"
    if details is None:
        sides = ((source, "", "", escape(pair.source, RETURN)), (target, "", "", escape(pair.target, RETURN)))
        said, facts = "", ""
    else:
        ours = details.format == FORMAT
        said, facts = _told(details.unit, "", details.format)
        sides = (
            _side(source, details.source, pair.source, details.source_as_written if ours else None, details.format),
            _side(target, details.target, pair.target, details.target_as_written if ours else None, details.format),
        )
    variants = "".join(
        f"  <tuv xml:lang={quoteattr(language)}{attributes}>\n{inside}    <seg>{text}</seg>\n  </tuv>\n"
        for language, attributes, inside, text in sides
    )
    return f"<tu{tuid}{said}>\n{facts}{variants}</tu>\n"


def _side(language: str, facts: Facts, text: str, markup: str | None, form: str) -> tuple[str, str, str, str]:
    called = dict(facts).get("xml:lang") if form == FORMAT else None
    said, inside = _told(facts, "  ", form)
    return called or language, said, inside, as_written(markup, text, TMX)


def _told(facts: Facts, indent: str, form: str) -> tuple[str, str]:
    """As attributes and as elements; what another format said becomes properties."""
    attributes, elements = "", ""
    for name, value in facts:
        kind, _, which = name.partition(":")
        kind, _, language = kind.partition("@")
        spoken = f" xml:lang={quoteattr(language)}" if language else ""
        if form == FORMAT and name in _KEPT:
            attributes += f" {name}={quoteattr(value)}"
        elif kind == "note":
            elements += f"{indent}  <note{spoken}>{escape(value, RETURN)}</note>\n"
        elif form == FORMAT and kind == "prop":
            elements += f"{indent}  <prop type={quoteattr(which)}{spoken}>{escape(value, RETURN)}</prop>\n"
        elif form != FORMAT:
            elements += f"{indent}  <prop type={quoteattr(f'x-{name}')}>{escape(value, RETURN)}</prop>\n"
    return attributes, elements
