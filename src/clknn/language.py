"""What a language tag says. In goes a tag as people, TMX files or models write it (de-AT, zh_CN, zho_Hans, en_XX, nb);
out comes a `Language` whose parts compare. Hidden here: ISO 639's two and three letters, macrolanguages (arb is how ar
is written), the scripts that a language or a territory implies, and langcodes, which nothing else imports. The
trade-off: what Unicode calls likely decides, so that Serbian without a script is Cyrillic.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache

import langcodes

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
