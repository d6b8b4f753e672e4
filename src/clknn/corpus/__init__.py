"""The user's bilingual files go in; out come a stream of Pair(source, target, origin), and files of pairs.

Here is decided which reader or writer a file has; each format has a file of its own, as has what all share: where the
bytes are (`archives`), what stands in XML (`markup`), what is kept (`cleaning`), and `Pairs`, the one SQLite file that
is a datastore's record of its text (`record`). The trade-off: a file is known by its name alone, so that a folder can
be told what is in it without opening anything, and a wrong name is refused by the reader that it asks for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from pathlib import Path

from clknn.corpus.aligned import read_aligned as read_aligned
from clknn.corpus.archives import LARGEST as LARGEST
from clknn.corpus.archives import File as File
from clknn.corpus.archives import files_within, pass_over
from clknn.corpus.cleaning import AS_IT_IS as AS_IT_IS
from clknn.corpus.cleaning import LONGEST as LONGEST
from clknn.corpus.cleaning import Cleaning as Cleaning
from clknn.corpus.cleaning import cleaned
from clknn.corpus.gettext import read_gettext as read_gettext
from clknn.corpus.gettext import write_po as write_po
from clknn.corpus.pair import Details as Details
from clknn.corpus.pair import Origin as Origin
from clknn.corpus.pair import Pair as Pair
from clknn.corpus.pair import Skip as Skip
from clknn.corpus.pair import Tally as Tally
from clknn.corpus.pair import fold as fold
from clknn.corpus.record import LIKE_OTHERS as LIKE_OTHERS
from clknn.corpus.record import Pairs as Pairs
from clknn.corpus.record import Role as Role
from clknn.corpus.tables import read_csv as read_csv
from clknn.corpus.tables import read_jsonl as read_jsonl
from clknn.corpus.tables import read_tsv as read_tsv
from clknn.corpus.tables import write_jsonl as write_jsonl
from clknn.corpus.tables import write_tsv as write_tsv
from clknn.corpus.tmx import read_tmx as read_tmx
from clknn.corpus.tmx import write_tmx as write_tmx
from clknn.corpus.xliff import read_xliff as read_xliff
from clknn.corpus.xliff import write_xliff as write_xliff
from clknn.errors import InputError
from clknn.language import places_of, two_languages

_XLIFF = frozenset((".xlf", ".xliff", ".sdlxliff", ".mqxliff", ".mxliff"))
_GETTEXT = frozenset((".po", ".pot", ".mo"))
_BILINGUAL = _XLIFF | _GETTEXT | {".tmx", ".tsv", ".csv", ".jsonl"}  # both languages in one file
_ACCEPTED = (
    "give .tmx, .xlf, .xliff, .po, .mo, .tsv, .csv or .jsonl files, a folder or a .zip of them, or two line-aligned"
    " texts, source first (each may end in .gz)"
)


def read_pairs(
    paths: Sequence[Path],
    source: str,
    target: str,
    tally: Tally,
    cleaning: Cleaning = AS_IT_IS,
    all_states: bool = False,
) -> Iterator[Pair]:
    """The pairs of these files, folders and zips, one after the other; or of two line-aligned texts, source first.

    Whatever can be refused without reading on is refused at once. `all_states` takes XLIFF's unfinished units, and
    gettext's fuzzy and obsolete entries, too.
    """
    if not paths:
        raise InputError(f"0 files given; {_ACCEPTED}")

    def of(file: File) -> Iterator[Pair]:
        return _read(file, source, target, tally, cleaning, all_states)

    def within(path: Path) -> Iterator[Pair]:
        with files_within(path) as files:
            known = [file for file in files if file.kind in _BILINGUAL]
            rest = [file for file in files if file.kind not in _BILINGUAL]
            couples = _couples(rest, source, target)
            paired = {file.name for couple in couples for file in couple}
            pass_over([file for file in rest if file.name not in paired], path, tally)
            if not known and not couples:
                raise InputError(f"{path}: no file in it that holds pairs; {_ACCEPTED}")
            for file in known:
                yield from of(file)
            for one, other in couples:
                yield from read_aligned(one, other, tally, cleaning)

    files = [File(path) for path in paths]
    whole = [_is_whole(path) for path in paths]
    texts = [file for file, many in zip(files, whole, strict=True) if not many and file.kind not in _BILINGUAL]
    if len(files) == 2 and len(texts) == 2:
        pairs = read_aligned(files[0], files[1], tally, cleaning)
    elif texts:
        several = "is read with one other text" if len(files) > 1 else "not a kind of file that is read alone"
        raise InputError(f"{texts[0]}: {several}; {_ACCEPTED}")
    else:
        streams = [within(path) if many else of(file) for path, file, many in zip(paths, files, whole, strict=True)]
        pairs = chain.from_iterable(streams)
    return cleaned(pairs, source, target, tally, cleaning)


def _is_whole(path: Path) -> bool:
    """Whether there are files within it."""
    return path.is_dir() or path.suffix.lower() == ".zip"


def _read(file: File, source: str, target: str, tally: Tally, cleaning: Cleaning, all_states: bool) -> Iterator[Pair]:
    kind = file.kind
    if kind == ".tmx":
        return read_tmx(file, source, target, tally, cleaning)
    if kind == ".tsv":
        return read_tsv(file, tally, (source, target), cleaning)
    if kind == ".csv":
        return read_csv(file, tally, (source, target), cleaning)
    if kind == ".jsonl":
        return read_jsonl(file, source, target, tally, cleaning)
    if kind in _XLIFF:
        return read_xliff(file, source, target, tally, cleaning, all_states)
    assert kind in _GETTEXT
    return read_gettext(file, source, target, tally, cleaning, all_states)


def _couples(files: list[File], source: str, target: str) -> list[tuple[File, File]]:
    """Texts that differ in a last suffix that is their language: train.de and train.en."""
    stems: dict[str, dict[str, File]] = {}
    for file in files:
        name = file.name.removesuffix(".gz")
        if file.kind:
            stems.setdefault(name[: -len(file.kind)], {})[file.kind.removeprefix(".")] = file
    couples = []
    for tags in stems.values():
        first, second = places_of(two_languages(source, target), tuple(tags))
        if first is not None and second is not None:
            sides = list(tags.values())
            couples.append((sides[first], sides[second]))
    return couples


def write_pairs(pairs: Iterable[Pair], path: Path, source: str, target: str) -> int:
    """Write the kind of file that the name says, whole or not at all; the number of pairs written."""
    kind = File(path).kind
    if kind == ".tmx":
        return write_tmx(pairs, path, source, target)
    if kind == ".tsv":
        return write_tsv(pairs, path, source, target)
    if kind == ".jsonl":
        return write_jsonl(pairs, path, source, target)
    if kind in (".xlf", ".xliff"):
        return write_xliff(pairs, path, source, target)
    if kind == ".po":
        return write_po(pairs, path, source, target)
    raise InputError(f"{path}: not a kind of file that is written; name it .tmx, .xlf, .xliff, .po, .tsv or .jsonl")


def convert(
    paths: Sequence[Path],
    out: Path,
    source: str,
    target: str,
    tally: Tally,
    cleaning: Cleaning = AS_IT_IS,
    all_states: bool = False,
    advance: Callable[[Tally], None] = lambda _: None,
) -> int:
    """Files in, one file out, cleaned on the way; the number of pairs written."""
    if any(path.exists() and out.exists() and path.samefile(out) for path in paths):
        raise InputError(f"{out}: would be written over while it is read; give --out another name")

    def counted() -> Iterator[Pair]:
        for pair in read_pairs(paths, source, target, tally, cleaning, all_states):
            tally.kept += 1
            if tally.kept % 1000 == 0:
                advance(tally)
            yield pair

    return write_pairs(counted(), out, source, target)
