"""A pair as a file has it goes in; out comes the pair as it is kept, or nothing and a reason in the tally.

Always: spacing is made plain, and what is empty, longer than `LONGEST` or holds control characters is skipped. The
rest is a user's choice in `Cleaning`. Hidden here: py3langid, imported when languages are looked at, and the temporary
SQLite file that near-duplicates are found by. The trade-off: a text that is plain ASCII in one line, as most are,
passes by two scans in C instead of two regular expressions, a fifth of the time.
"""

from __future__ import annotations

import re
import sqlite3
import unicodedata
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b
from typing import Any

from clknn.corpus.pair import Origin, Pair, Tally, fold
from clknn.errors import InputError
from clknn.language import read_language

LONGEST = 5_000  # characters in either segment; a longer one is no sentence, and force-decoding it is wasted

# C0 controls and DEL, lone surrogates, two non-characters: all but DEL cannot be written as XML 1.0.
_CONTROL = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f\ud800-\udfff\ufffe\uffff]")
# No-break spaces are typography ("10 %", French colons) and stay; any other run of whitespace is one space.
_SPACE = re.compile("[^\\S\u00a0\u2007\u202f]{2,}|[^\\S \u00a0\u2007\u202f]")
_LETTERS = re.compile(r"[^\W\d_]+")
_TOLD = 20  # letters that a text must have for its language to be told
_SURE = 0.9  # probability from which another language is believed
_SHORT = 10  # characters added to both sides before their ratio is taken, so that short ones may differ


@dataclass(frozen=True, slots=True)
class Cleaning:
    """What is cleaned beyond what always is. The defaults keep every pair and change none."""

    other_languages: bool = False  # skip pairs with a side that is clearly in another language than was asked for
    length_ratio: float | None = None  # skip pairs with one side so many times as long as the other
    identical: bool = False  # skip pairs whose source and target are the same
    letterless: bool = False  # skip pairs with a side without any letter
    near_duplicates: bool = False  # skip pairs unlike an earlier one only in case, spacing, punctuation and digits
    strip_controls: bool = False  # take control characters out, instead of skipping pairs that have them
    nfc: bool = False  # write composed characters (NFC)

    def __post_init__(self) -> None:
        if self.length_ratio is not None and not self.length_ratio >= 1:
            raise InputError(f"length ratio is {self.length_ratio}; it must be at least 1")


AS_IT_IS = Cleaning()


def tidy(text: str) -> str:
    """The text with plain spacing."""
    if text.isprintable() and "  " not in text:  # of all whitespace only the space is printable
        return text.strip()
    return _SPACE.sub(" ", text).strip()


def clean_pair(source: str, target: str, origin: Origin, tally: Tally, cleaning: Cleaning = AS_IT_IS) -> Pair | None:
    """The pair as it is kept, or None and the reason counted. Near-duplicates and languages are not looked at here."""
    if (
        cleaning is AS_IT_IS
        and source.isprintable()
        and target.isprintable()
        and "  " not in source
        and "  " not in target
        and 0 < len(source) <= LONGEST
        and 0 < len(target) <= LONGEST
        and not (source[0] == " " or source[-1] == " " or target[0] == " " or target[-1] == " ")
    ):
        return Pair(source, target, origin)  # as most are
    if cleaning.strip_controls:
        whole = source, target
        source, target = _CONTROL.sub("", source), _CONTROL.sub("", target)
        if whole != (source, target):
            tally.change("control characters taken out", str(origin))
    clean_source, clean_target = tidy(source), tidy(target)
    if not clean_source:
        tally.skip("empty source", str(origin))
    elif not clean_target:
        tally.skip("empty target", str(origin))
    elif len(clean_source) > LONGEST or len(clean_target) > LONGEST:
        tally.skip(f"longer than {LONGEST} characters", str(origin))
    elif _CONTROL.search(source) or _CONTROL.search(target):
        tally.skip("control characters", str(origin))
    elif cleaning is AS_IT_IS:
        return Pair(clean_source, clean_target, origin)
    else:
        return _as_chosen(clean_source, clean_target, origin, tally, cleaning)
    return None


def _as_chosen(source: str, target: str, origin: Origin, tally: Tally, cleaning: Cleaning) -> Pair | None:
    if cleaning.nfc:
        composed = unicodedata.normalize("NFC", source), unicodedata.normalize("NFC", target)
        if composed != (source, target):
            source, target = composed
            tally.change("Unicode normalised (NFC)", str(origin))
    if cleaning.identical and source == target:
        tally.skip("identical source and target", str(origin))
    elif cleaning.letterless and not (_LETTERS.search(source) and _LETTERS.search(target)):
        tally.skip("no letters", str(origin))
    elif cleaning.length_ratio is not None and _ratio(source, target) > cleaning.length_ratio:
        tally.skip(f"one side more than {cleaning.length_ratio:g} times as long as the other", str(origin))
    else:
        return Pair(source, target, origin)
    return None


def _ratio(source: str, target: str) -> float:
    shorter, longer = sorted((len(source) + _SHORT, len(target) + _SHORT))
    return longer / shorter


def cleaned(pairs: Iterator[Pair], source: str, target: str, tally: Tally, cleaning: Cleaning) -> Iterator[Pair]:
    """These pairs without those that are in other languages, or near-duplicates, where that was asked for."""
    if cleaning.other_languages:
        pairs = _in_their_languages(pairs, source, target, tally)
    return _without_near_duplicates(pairs, tally) if cleaning.near_duplicates else pairs


def _in_their_languages(pairs: Iterator[Pair], source: str, target: str, tally: Tally) -> Iterator[Pair]:
    sides = [(tag, _identifier_for(tag)) for tag in (source, target)]
    return _told(pairs, sides, tally)


def _told(pairs: Iterator[Pair], sides: list[tuple[str, Callable[[str], str | None]]], tally: Tally) -> Iterator[Pair]:
    (source, source_is_not), (target, target_is_not) = sides
    for pair in pairs:
        if source_is_not(pair.source):
            tally.skip(f"source is not in {source}", str(pair.origin))
        elif target_is_not(pair.target):
            tally.skip(f"target is not in {target}", str(pair.origin))
        else:
            yield pair


def _identifier_for(tag: str) -> Callable[[str], str | None]:
    """Names the other language that a text is clearly in, or None."""
    identifier = _identifier()
    name = read_language(tag).name
    names = {label: read_language(label).name for label in identifier.labels}
    if name not in names.values():
        raise InputError(f"py3langid does not know the language {tag!r}; leave --skip-other-languages out")

    def another(text: str) -> str | None:
        if sum(map(len, _LETTERS.findall(text))) < _TOLD:
            return None
        found, probability = identifier.classify(text)
        return found if names[found] != name and probability >= _SURE else None

    return another


@lru_cache(maxsize=1)
def _identifier() -> Any:
    from py3langid.langid import MODEL_FILE, LanguageIdentifier

    return LanguageIdentifier.from_model_file(MODEL_FILE, norm_probs=True)


def _without_near_duplicates(pairs: Iterator[Pair], tally: Tally) -> Iterator[Pair]:
    # SQLite's unnamed database is a temporary file that it deletes: memory does not grow with the pairs.
    connection = sqlite3.connect("", isolation_level=None)
    try:
        connection.executescript("PRAGMA journal_mode = OFF; PRAGMA synchronous = OFF; PRAGMA cache_size = -16384;")
        connection.execute("CREATE TABLE seen (bare BLOB PRIMARY KEY) WITHOUT ROWID")
        for pair in pairs:
            bare = blake2b(f"{_bare(pair.source)}\n{_bare(pair.target)}".encode(), digest_size=16).digest()
            if connection.execute("INSERT OR IGNORE INTO seen VALUES (?)", (bare,)).rowcount:
                yield pair
            else:
                tally.skip("near-duplicate", str(pair.origin))
    finally:
        connection.close()


def _bare(text: str) -> str:
    """Its letters alone; for a text without any, the folded text."""
    folded = fold(text)
    return " ".join(_LETTERS.findall(folded)) or folded
