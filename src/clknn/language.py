"""What a language tag says. In goes a tag as people, TMX files or models write it (de-AT, zh_CN, zho_Hans, en_XX, nb);
out comes a `Language` whose parts compare, or which of a file's tags are the two that were asked for. Hidden here: ISO
639's two and three letters, macrolanguages (arb is how ar is written), the scripts that a language or a territory
implies, and langcodes, which nothing else imports. The trade-off: what Unicode calls likely decides, so that Serbian
without a script is Cyrillic.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache

import langcodes

from clknn.errors import InputError

# Language, script, territory, and what else is said.
_TAG = re.compile(r"([a-z]{2,3})(?:-([a-z]{4}))?(?:-([a-z]{2}|[0-9]{3}))?(?:-(.+))?", re.ASCII | re.IGNORECASE)
_NOWHERE = frozenset(("XX", "ZZ"))  # mBART's en_XX: English of no territory
_ONE = {"nb": "no", "Hang": "Kore"}  # what is written no is Bokmål; Korean is in Hangul, with or without Han


@dataclass(frozen=True, slots=True)
class Language:
    """A language tag, read."""

    name: str  # the shortest code of its macrolanguage
    script: str | None  # as the tag says it, or as its territory implies it; None where it has neither
    written: str  # `script`, or the likely one
    home: str  # the territory, or the likely one
    subtags: tuple[str, ...]  # the territory, variants, and whatever else follows the script

    @property
    def essence(self) -> tuple[str, str, tuple[str, ...]]:
        """Equal for two ways to write the same language: de and deu_Latn."""
        return self.name, self.written, self.subtags


@lru_cache(maxsize=1024)
def read_language(tag: str) -> Language:
    """Reads any text; of one that is no language tag, the parts are taken as they stand."""
    tag = tag.strip().replace("_", "-")
    parts = _TAG.fullmatch(tag)
    if parts is None:
        name, *rest = tag.lower().split("-")
        return Language(name, None, "", "", tuple(rest))
    # No more than this is langcodes shown: it remembers all that it parsed, and a file may hold any number of tags.
    said = langcodes.Language.get("-".join(part for part in parts.group(1, 2, 3) if part))
    if said.territory in _NOWHERE:
        said = langcodes.Language.make(said.language, script=said.script)
    likely, name = said.maximize(), said.prefer_macrolanguage().language or "und"
    written = said.script or likely.script or ""
    written = _ONE.get(written, written)
    return Language(
        _ONE.get(name, name),
        written if said.script or said.territory else None,
        written,
        likely.territory or "",
        tuple(part for part in ((said.territory or "").lower(), *(parts[4] or "").lower().split("-")) if part),
    )


def is_language(tag: str) -> bool:
    """Whether a tag is one that a registry knows, in whatever way it is written."""
    return langcodes.tag_is_valid(tag.strip().replace("_", "-"))


def normal_tag(tag: str) -> str:
    return tag.strip().lower().replace("_", "-")


def two_languages(source: str, target: str) -> tuple[str, str]:
    """The two that are asked for, in one spelling; refuses one twice."""
    asked = normal_tag(source), normal_tag(target)
    if not all(asked):
        raise InputError("a language is empty; give one such as de or pt-BR")
    if read_language(asked[0]).essence == read_language(asked[1]).essence:
        raise InputError(f"source and target language are both {source!r}; name two languages")
    return asked


@lru_cache(maxsize=1024)
def places_of(asked: tuple[str, str], tags: tuple[str, ...]) -> tuple[int | None, int | None]:
    """The places of the two languages asked for among a file's tags, never the same place.

    A language takes its variants: de takes de-AT; de-CH takes de-CH, else de. However it is written: zho_Hans takes
    zh and zh-CN, but not zh-TW, which is in another script.
    """
    normal = [normal_tag(tag) for tag in tags]
    source, target = (_nearest(language, normal) for language in asked)
    if source is not None and source == target:  # de and de-CH are asked and the unit has one of them
        return (source, None) if normal[source] == asked[0] else (None, target)
    return source, target


def said_or_asked(said: tuple[str, str], asked: tuple[str, str]) -> tuple[str, str]:
    """A file's two languages; one that it does not say is the one asked for that the other is not."""
    if said[0] and said[1]:
        return said
    if not said[0] and not said[1]:
        return asked
    there = said[0] or said[1]
    first, second = places_of(asked, (there,))
    missing = asked[1] if first is not None else asked[0] if second is not None else there
    return (there, missing) if said[0] else (missing, there)


def _nearest(asked: str, tags: list[str]) -> int | None:
    ranked = [(rank, place) for place, tag in enumerate(tags) if (rank := _distance(asked, tag)) is not None]
    return min(ranked)[1] if ranked else None


@lru_cache(maxsize=1024)
def _distance(asked: str, tag: str) -> tuple[bool, int] | None:
    """How far a tag is from the one asked: the same, a variant of it, or it with subtags cut off.

    What is written with the same letters comes first: for de, de-AT before deu.
    """
    if tag == asked:
        return False, 0
    wanted, has = read_language(asked), read_language(tag)
    if wanted.name != has.name or (wanted.script and has.script and wanted.script != has.script):
        return None
    respelt, elsewise = asked.split("-")[0] != tag.split("-")[0], wanted.written != has.written
    if has.subtags[: len(wanted.subtags)] == wanted.subtags and (wanted.script is None or not elsewise):
        return respelt, 1 + (has.subtags != wanted.subtags) + 2 * elsewise
    if wanted.subtags[: len(has.subtags)] == has.subtags:
        return respelt, 5 + len(wanted.subtags) - len(has.subtags) + elsewise
    return None
