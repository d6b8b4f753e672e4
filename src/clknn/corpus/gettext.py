"""gettext's catalogues: entries of a PO or MO file come out as pairs, and pairs are written as a PO file.

Fuzzy and obsolete entries are left out unless all states are asked for, untranslated ones always; a plural entry gives
one pair for each of its forms. The context is the origin's unit; comments, references and flags are its details, and
texts are kept with their line feeds. polib writes the entries. Reading is our own: polib holds a catalogue whole, and
trusts what a MO file says of its size. The trade-off: what precedes a fuzzy entry (#|) does not come back.
"""

from __future__ import annotations

import re
import shutil
import struct
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import polib

from clknn.corpus.archives import LARGEST, File, lines, written
from clknn.corpus.cleaning import AS_IT_IS, Cleaning, clean_pair, tidy
from clknn.corpus.markup import encoding_called
from clknn.corpus.pair import Details, Origin, Pair, Tally
from clknn.errors import InputError
from clknn.language import places_of, said_or_asked, two_languages

FORMAT = "gettext"
_LARGEST_MO = 64_000_000  # bytes; it is read whole
_CHARSET = re.compile(rb"charset=([A-Za-z0-9._:-]+)")
_KEYWORD = re.compile(r'(msgctxt|msgid_plural|msgid|msgstr|domain)(?:\[(\d{1,2})\])?\s*(".*")')
_STRING = re.compile(r'"((?:[^"\\]|\\.)*)"')
_ESCAPE = re.compile(r"\\([0-7]{1,3}|x[0-9A-Fa-f]{1,2}|.)")
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "a": "\a", "b": "\b", "f": "\f", "v": "\v"}
_COMMENTS = {"#.": "extracted", "#:": "reference", "#,": "flag"}


@dataclass(slots=True)
class _Entry:
    line: int | None
    texts: dict[str, str] = field(default_factory=dict)  # msgctxt, msgid, msgid_plural, msgstr, msgstr 0, msgstr 1 …
    facts: dict[str, str] = field(default_factory=dict)
    obsolete: bool = False


def read_gettext(
    file: File, source: str, target: str, tally: Tally, cleaning: Cleaning = AS_IT_IS, all_states: bool = False
) -> Iterator[Pair]:
    """The pairs of a PO or MO file; its header may say which language its translations are in."""
    asked = two_languages(source, target)
    file.refuse_unreadable()
    entries = _mo_entries(file) if file.kind == ".mo" else _po_entries(file)
    return _pairs(file, entries, asked, tally, cleaning, all_states)


def _pairs(
    file: File, entries: Iterator[_Entry], asked: tuple[str, str], tally: Tally, cleaning: Cleaning, all_states: bool
) -> Iterator[Pair]:
    flipped, plural_rule, count = False, "", 0
    for number, entry in enumerate(entries):
        if not entry.texts.get("msgid") and "msgctxt" not in entry.texts:
            if number == 0:
                header = _header(entry.texts.get("msgstr", ""))
                flipped = _is_flipped(file, header, asked)
                plural_rule = header.get("plural-forms", "")
            continue
        count += 1
        tally.read += 1
        reason = _left_out(entry, all_states)
        context = entry.texts.get("msgctxt")
        where = Origin(file.name, context or (str(number) if entry.line is None else None), entry.line)
        if reason:
            tally.skip(reason, str(where))
            continue
        for source, translation, facts in _forms(entry, plural_rule):
            unit = (*entry.facts.items(), *(() if flipped else facts))
            raw = [text if tidy(text) != text else None for text in (source, translation)]
            texts = (translation, source) if flipped else (source, translation)
            details = None
            if unit or any(raw):
                details = Details(FORMAT, unit, (), (), *(reversed(raw) if flipped else raw))
            origin = Origin(file.name, context, entry.line, details)
            if pair := clean_pair(*texts, origin, tally, cleaning):
                yield pair
    if not count:
        raise InputError(f"{file}: no entry in it; is this a catalogue with content?")


def _left_out(entry: _Entry, all_states: bool) -> str:
    if not any(text for name, text in entry.texts.items() if name.startswith("msgstr")):
        return "not translated"
    if entry.obsolete and not all_states:
        return "obsolete"
    if "fuzzy" in re.split(r"[,\s]+", entry.facts.get("flag", "")) and not all_states:
        return "fuzzy"
    return ""


def _forms(entry: _Entry, plural_rule: str) -> Iterator[tuple[str, str, tuple[tuple[str, str], ...]]]:
    """Source, translation and what tells the forms of one entry from each other; forms alike are one."""
    singular, plural = entry.texts.get("msgid", ""), entry.texts.get("msgid_plural")
    if plural is None:
        yield singular, entry.texts.get("msgstr") or entry.texts.get("msgstr 0", ""), ()
        return
    alike: dict[tuple[str, str], list[str]] = {}
    for name, text in entry.texts.items():
        if name.startswith("msgstr "):
            form = name.removeprefix("msgstr ")
            alike.setdefault((singular if form == "0" else plural, text), []).append(form)
    rule = (("Plural-Forms", plural_rule),) if plural_rule else ()
    for (source, text), forms in alike.items():
        if text:
            yield source, text, (("msgid", singular), ("msgid_plural", plural), ("forms", " ".join(forms)), *rule)


def _header(text: str) -> dict[str, str]:
    rows = (line.partition(":") for line in text.splitlines())
    return {name.strip().lower(): value.strip() for name, colon, value in rows if colon}


def _is_flipped(file: File, header: dict[str, str], asked: tuple[str, str]) -> bool:
    """Whether its translations are in the source language asked for."""
    said = header.get("x-source-language", ""), header.get("language", "")
    first, second = places_of(asked, said_or_asked(said, asked))
    if first is None or second is None:
        languages = " → ".join(language for language in said if language)
        raise InputError(f"{file}: its header says {languages}; ask for that, or correct the header")
    return first == 1


# -- PO ----------------------------------------------------------------------------------------------------------------


def _po_entries(file: File) -> Iterator[_Entry]:
    entry, field_open, size = _Entry(1), "", 0
    for number, line in enumerate(lines(file, encoding=_charset(file)), start=1):
        text = line.strip()
        obsolete = text.startswith("#~")
        if obsolete:
            text = text[2:].strip()
            if text.startswith("|"):
                continue
        if text.startswith("#") or not text:
            if _translated(entry):
                yield entry
                entry, size = _Entry(number), 0
            field_open = ""
            if text and not text.startswith("#|"):
                size += len(text)
                _comment(entry, text)
        elif keyword := _KEYWORD.fullmatch(text):
            name, form, string = keyword.groups()
            if name in ("msgctxt", "msgid") and _translated(entry):
                yield entry
                entry, size = _Entry(number), 0
            field_open = name if form is None else f"{name} {int(form)}"
            if field_open in entry.texts:
                raise InputError(f"{file}:{number}: {name} comes twice in one entry; correct it")
            if name == "msgid":
                entry.line = number
            entry.obsolete = entry.obsolete or obsolete
            entry.texts[field_open] = _unescaped(string, file, number)
            size += len(string)
        elif text.startswith('"') and field_open:
            entry.texts[field_open] += _unescaped(text, file, number)
            size += len(text)
        else:
            raise InputError(f"{file}:{number}: expected a line of a PO file, read {text[:40]!r}; correct it")
        if size > LARGEST:
            raise InputError(f"{file}:{number}: an entry of more than {LARGEST:,} bytes; is this a PO file?")
    if _translated(entry):
        yield entry
    elif entry.texts:
        raise InputError(f"{file}: the file is cut short: its last entry has no msgstr; export the file again")


def _translated(entry: _Entry) -> bool:
    return "msgid" in entry.texts and ("msgstr" in entry.texts or "msgstr 0" in entry.texts)


def _comment(entry: _Entry, text: str) -> None:
    kind = _COMMENTS.get(text[:2], "note")
    said = text[2:].strip() if kind != "note" else text[1:].strip()
    if said:
        entry.facts[kind] = f"{entry.facts[kind]}\n{said}" if kind in entry.facts else said


def _unescaped(string: str, file: File, number: int) -> str:
    inner = _STRING.fullmatch(string)
    if inner is None:
        raise InputError(f'{file}:{number}: a quote that does not close, or stands alone; write it as \\"')
    return _ESCAPE.sub(_meant, inner[1]) if "\\" in string else inner[1]


def _meant(escape: re.Match[str]) -> str:
    said = escape[1]
    if said[0] in "01234567":
        return chr(int(said, 8) & 0xFF)
    if said[0] == "x" and len(said) > 1:
        return chr(int(said[1:], 16))
    return _ESCAPES.get(said, said)


def _charset(file: File) -> str:
    with file.opened() as opened:
        said = _CHARSET.search(opened.read(1 << 16))
    name = "utf-8" if said is None else said[1].decode()
    if name == "CHARSET":  # as templates have it
        return "utf-8"
    encoding = encoding_called(name)
    if encoding is None or encoding.startswith(("utf-16", "utf-32")):
        raise InputError(f"{file}: its header says charset {name!r}, which is not read; save it as UTF-8")
    return encoding


# -- MO ----------------------------------------------------------------------------------------------------------------


def _mo_entries(file: File) -> Iterator[_Entry]:
    with file.opened() as opened:
        data = opened.read(_LARGEST_MO + 1)
    if len(data) > _LARGEST_MO:
        raise InputError(f"{file}: more than {_LARGEST_MO:,} bytes in one catalogue; give its PO file")
    order = {b"\xde\x12\x04\x95": "<", b"\x95\x04\x12\xde": ">"}.get(data[:4])
    if order is None or len(data) < 28:
        raise InputError(f"{file}: does not begin as a MO file does; check the file")
    version, count, sources, targets = struct.unpack(f"{order}4I", data[4:20])
    if version >> 16 > 1 or max(sources, targets) + 8 * count > len(data):
        raise InputError(f"{file}: its tables do not fit into it; the file is cut short, compile it again")
    encoding, taken = "utf-8", 0
    for number in range(count):
        texts = []
        for table in (sources, targets):
            length, start = struct.unpack_from(f"{order}2I", data, table + 8 * number)
            taken += length
            if start + length > len(data) or taken > 4 * len(data):
                raise InputError(f"{file}: entry {number} is not whole; the file is cut short, compile it again")
            texts.append(data[start : start + length])
        if number == 0 and not texts[0] and (said := _CHARSET.search(texts[1])):
            encoding = encoding_called(said[1].decode()) or "utf-8"
        yield _mo_entry(file, number, texts[0], texts[1], encoding)


def _mo_entry(file: File, number: int, source: bytes, target: bytes, encoding: str) -> _Entry:
    try:
        key, text = source.decode(encoding), target.decode(encoding)
    except UnicodeDecodeError as error:
        raise InputError(f"{file}: entry {number} is not {encoding}; compile it again from its PO file") from error
    context, divided, key = key.rpartition("\x04")
    entry = _Entry(None, {"msgctxt": context} if divided else {})
    singular, plural, more = key.partition("\0")
    entry.texts["msgid"] = singular
    if plural:
        entry.texts["msgid_plural"] = more
        entry.texts |= {f"msgstr {form}": said for form, said in enumerate(text.split("\0", 99))}
    else:
        entry.texts["msgstr"] = text
    return entry


# -- writing -----------------------------------------------------------------------------------------------------------


def write_po(pairs: Iterable[Pair], path: Path, source: str, target: str) -> int:
    """Write a PO file in UTF-8, whole or not at all; the number of pairs written."""
    two_languages(source, target)
    count, rule = 0, ""
    # The header says how many plural forms there are, and that is known when the last pair is.
    with written(path) as file, tempfile.TemporaryFile() as body:
        for group in _groups(pairs):
            count += len(group)
            rule = rule or _rule_of(group[0])
            body.write(_entry_of(group).encode("utf-8"))
        header = f"Content-Type: text/plain; charset=UTF-8\nContent-Transfer-Encoding: 8bit\nLanguage: {target}\n"
        header += f"X-Source-Language: {source}\n" + (f"Plural-Forms: {rule}\n" if rule else "")
        file.write(f"{polib.POEntry(msgid='', msgstr=header)}\n".encode())
        body.seek(0)
        shutil.copyfileobj(body, file)
    return count


def _facts(pair: Pair) -> dict[str, str]:
    details = pair.origin.details
    return dict(details.unit) if details is not None and details.format == FORMAT else {}


def _rule_of(pair: Pair) -> str:
    return _facts(pair).get("Plural-Forms", "").replace("\n", " ")


def _groups(pairs: Iterable[Pair]) -> Iterator[list[Pair]]:
    """The forms of one plural entry together; any other pair alone."""
    group: list[Pair] = []
    for pair in pairs:
        if group and not _same_entry(group[0], pair):
            yield group
            group = []
        group.append(pair)
        if "msgid_plural" not in _facts(pair) or len(group) > 99:
            yield group
            group = []
    if group:
        yield group


def _same_entry(one: Pair, other: Pair) -> bool:
    keys = ("msgid", "msgid_plural")
    ours, theirs = _facts(one), _facts(other)
    return one.origin.unit == other.origin.unit and [ours.get(key) for key in keys] == [theirs.get(key) for key in keys]


def _entry_of(group: list[Pair]) -> str:
    first, facts = group[0], _facts(group[0])
    entry = polib.POEntry(
        msgctxt=first.origin.unit,
        tcomment=_plain(facts.get("note", "")),
        comment=_plain(facts.get("extracted", "")),
        occurrences=[(_plain(place), "") for place in facts.get("reference", "").split()],
        flags=[flag for flag in re.split(r"[,\s]+", _plain(facts.get("flag", ""))) if flag],
    )
    if not facts and first.origin.details is not None and first.origin.details.format != FORMAT:
        details = first.origin.details
        said = (*details.unit, *details.source, *details.target)
        entry.tcomment = "\n".join(_plain(value) for name, value in said if name == "note" or name.startswith("note:"))
        entry.comment = "\n".join(
            f"{_plain(name)}: {_plain(value)}" for name, value in said if not name.startswith("note")
        )
    if "msgid_plural" in facts:
        entry.msgid, entry.msgid_plural = facts.get("msgid", ""), facts["msgid_plural"]
        forms = {form: _written(pair)[1] for pair in group for form in _numbers(_facts(pair).get("forms", ""))}
        # A form that is not there was left out when the pairs were cleaned; an empty one says so.
        entry.msgstr_plural = {form: forms.get(form, "") for form in range(max(forms, default=0) + 1)}
    else:
        entry.msgid, entry.msgstr = _written(first)
    return f"{entry}\n"


def _numbers(forms: str) -> list[int]:
    return [int(form) for form in forms.split() if re.fullmatch("[0-9]{1,2}", form)]


def _written(pair: Pair) -> tuple[str, str]:
    """Both texts with their line feeds, where the pair still says the same."""
    details = pair.origin.details
    if details is None or details.format != FORMAT:
        return pair.source, pair.target
    return _whole(details.source_as_written, pair.source), _whole(details.target_as_written, pair.target)


def _whole(as_written: str | None, text: str) -> str:
    return as_written if as_written is not None and tidy(as_written) == text else text


def _plain(text: str) -> str:
    return text.replace("\r", " ")
