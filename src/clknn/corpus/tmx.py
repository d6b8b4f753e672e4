"""TMX 1.4b: its units come out as pairs, and pairs are written as its units.

A unit's notes, properties, dates and names, of the whole unit and of each variant, are the origin's details; inline
codes are kept as written and the model is offered the words around them. Hidden here: variants (the one nearest to the
language asked for is taken), units of any size (one that is too large is passed over and counted). The trade-off: a
unit of more than two languages gives one pair and keeps nothing of the others.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
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

Variant = tuple[list[str], str, str | None, list[tuple[str, str]]]  # attributes, words, markup, facts


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
    plain: dict[tuple[str, str], Details | None] = {}  # of units that say no more than their languages
    for line, attributes, facts, variants in _units(file):
        units += 1
        tally.read += 1
        unit = attributes[attributes.index("tuid") + 1] if attributes and "tuid" in attributes[::2] else None
        if variants is None:
            tally.skip(f"unit of more than {LARGEST:,} bytes", str(Origin(name, unit, line)))
            continue
        tags = tuple([_tag(variant[0]) for variant in variants])
        if not both:
            # Bounded, for a file may name any number of languages.
            found.update({tag for tag in map(normal_tag, tags) if tag in found or len(found) < _MOST_TOLD})
        first, second = places_of(asked, tags)
        if first is None or second is None:
            missing = names[0] if first is None else names[1]
            tally.skip(f"no {missing} segment", str(Origin(name, unit, line)))
            continue
        both = True
        one, other = variants[first], variants[second]
        said = tags[first], tags[second]
        more = one[2] or other[2] or facts or one[3] or other[3] or len(one[0]) > 2 or len(other[0]) > 2
        if more or len(attributes) > 2 or (attributes and unit is None) or said not in plain:
            details = _details(attributes, facts, one, other, said, asked)
            if not more and len(attributes) <= 2 and unit is not None and len(plain) < _MOST_TOLD:
                plain[said] = details
        else:
            details = plain[said]
        if pair := clean_pair(one[1], other[1], Origin(name, unit or None, line, details), tally, cleaning):
            yield pair
    if units == 0:
        raise InputError(f"{file}: no translation unit (<tu>) in it; is this a TMX file with content?")
    if not both:
        listed = (
            ", ".join(f"{tag or 'no language'} ({count:,} units)" for tag, count in found.most_common(20)) or "none"
        )
        raise InputError(f"{file}: no unit has both {names[0]} and {names[1]}; ask for two of those found: {listed}")


def _units(file: File) -> Iterator[tuple[int, list[str], list[tuple[str, str]], list[Variant] | None]]:
    """Line, attributes, facts and variants of each unit; None for the variants of one that is too large."""
    xml = Xml(file)
    parser, content = xml.parser, Content(xml.parser, TMX)
    ready: list[tuple[int, list[str], list[tuple[str, str]], list[Variant] | None]] = []
    depth = line = began = 0
    unit: list[str] | None = None  # its attributes, while one is open
    attributes: list[str] = []  # of the open variant
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
            attributes, facts, words, markup = given, [], "", None
        elif name == "tu":
            line, began, unit = parser.CurrentLineNumber, parser.CurrentByteIndex, given
            facts = facts_of_unit = []
            variants = []
        elif (name == "prop" or name == "note") and unit is not None:
            fact, told = _fact(name, given), []
            parser.CharacterDataHandler = told.append
        elif ":" in name:
            depth -= 1
            start(name.rpartition(":")[2], given)

    def end(name: str) -> None:
        nonlocal depth, unit, facts, words, markup, in_segment, fact
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
                unit = None
        elif fact:
            parser.CharacterDataHandler = None
            facts.append((fact, "".join(told)))
            fact = ""
        elif ":" in name:
            depth += 1
            end(name.rpartition(":")[2])

    parser.StartElementHandler, parser.EndElementHandler = start, end
    for total in xml.fed():
        yield from ready
        ready.clear()
        if unit is not None and total - began > CHECKED:
            content.bound()
            if total - began > LARGEST or len(variants or ()) > _MOST_VARIANTS:
                variants = None
                facts.clear()
                told.clear()
                content.words.clear()


def _tag(attributes: list[str]) -> str:
    if len(attributes) == 2 and attributes[0] == "xml:lang":
        return attributes[1]
    said = dict(zip(attributes[::2], attributes[1::2], strict=True))
    return said.get("xml:lang") or said.get("lang") or ""


def _fact(name: str, attributes: list[str]) -> str:
    said = dict(zip(attributes[::2], attributes[1::2], strict=True))
    language = said.get("xml:lang") or said.get("lang")
    return name + (f"@{language}" if language else "") + (f":{said.get('type', '')}" if name == "prop" else "")


def _details(
    unit: list[str],
    facts: list[tuple[str, str]],
    one: Variant,
    other: Variant,
    tags: tuple[str, str],
    asked: tuple[str, str],
) -> Details | None:
    sides = []
    for (attributes, _, _, said), tag, language in zip((one, other), tags, asked, strict=True):
        called = () if tag == language else (("xml:lang", tag),)
        sides.append((*called, *_kept(attributes), *said))
    whole = (*_kept(unit), *facts)
    if not (whole or any(sides) or one[2] or other[2]):
        return None
    return Details(FORMAT, whole, sides[0], sides[1], one[2], other[2])


def _kept(attributes: list[str]) -> Facts:
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
