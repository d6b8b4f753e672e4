"""The user's bilingual files (TMX, TSV, two aligned texts) go in; out come a stream of Pair(source, target,
origin) and `Pairs`, the one SQLite file that is a datastore's record of its text. Hidden here: inline codes,
language variants, encodings, the dangers of XML, de-duplication, the choice of held-out pairs. The trade-off:
TMX is parsed one line at a time, so that every origin's line is exact in a file of any length; that costs a
quarter of the speed (1,000,000 units of 8 lines, 316 MB: 37,000 units a second instead of 51,000, both in 24 MB
of memory; two-core x86-64, Python 3.11.7, lxml 6.1.3, libxml2 2.14.6).
"""

from __future__ import annotations

import gzip
import heapq
import os
import re
import sqlite3
import unicodedata
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from hashlib import blake2b
from itertools import islice, zip_longest
from pathlib import Path
from typing import IO, Any, Literal, cast

from lxml import etree

from clknn.errors import DatastoreError, InputError
from clknn.language import read_language

LONGEST = 5_000  # characters in either segment; a longer one is no sentence, and force-decoding it is wasted
LARGEST = 10_000_000  # bytes in one line of text or one translation unit; libxml2 bounds a text node alike

Role = Literal["stored", "tune", "test"]
LIKE_OTHERS = "tuning pair whose source or target is in the translation memory too"  # why `Pairs.add` skips one

# C0 controls and DEL, lone surrogates, two non-characters: all but DEL cannot be written as XML 1.0.
_CONTROL = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f\ud800-\udfff\ufffe\uffff]")
# No-break spaces are typography ("10 %", French colons) and stay; any other run of whitespace is one space.
_SPACE = re.compile("[^\\S\u00a0\u2007\u202f]{2,}|[^\\S \u00a0\u2007\u202f]")
_XML_LANG = "{http://www.w3.org/XML/1998/namespace}lang"
_CODES = frozenset(("bpt", "ept", "it", "ph", "ut"))  # TMX 1.4: their content is the original format's code
_BREAK_TYPES = frozenset(("lb", "br", "linebreak", "line-break", "newline"))
_BREAK_CODE = re.compile(r"\s*(<br\b[^>]*>|\\r|\\n)+\s*", re.IGNORECASE)
_ENCODING = re.compile(rb"encoding\s*=\s*[\"'](?!utf-?8[\"'])|^\xff\xfe|^\xfe\xff", re.IGNORECASE)  # another than UTF-8
_UNSPLIT = 100  # lines without two columns, behind which a file is taken for no TSV
_BATCH = 500


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a pair came from: the file's name (not its path), its unit id, its line."""

    file: str
    unit: str | None = None
    line: int | None = None

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
    """What was read, kept and skipped. Readers count `read` and skips; only `Pairs.add` counts `kept`."""

    read: int = 0
    kept: int = 0
    skipped: dict[str, Skip] = field(default_factory=dict)
    strict: bool = False  # refuse the first unit that would be skipped

    def skip(self, reason: str, where: str) -> None:
        if self.strict:
            raise InputError(f"{where}: {reason}; correct it, or read without strict to skip such units")
        seen = self.skipped.get(reason)
        if seen is None:
            self.skipped[reason] = Skip(1, where)
        else:
            seen.count += 1

    def lines(self) -> list[str]:
        """For people: the totals, then one line for each reason to skip."""
        reasons = (f"skipped {s.count:,}: {reason} (first: {s.first})" for reason, s in self.skipped.items())
        return [f"read {self.read:,} units, kept {self.kept:,}", *reasons]


def fold(text: str) -> str:
    """The text without its case, compatibility forms and spacing: equal folds are nearly the same text."""
    if not text.isascii():
        text = unicodedata.normalize("NFKC", text)
        # Case folding can undo the normal form, and the normal form can bring back case (Unicode 3.13, D147).
        text = unicodedata.normalize("NFKC", text.casefold())
    return " ".join(text.casefold().split())


def read_pairs(paths: Sequence[Path], source: str, target: str, tally: Tally) -> Iterator[Pair]:
    """One .tmx or .tsv file, or two line-aligned text files (source first); each may be gzipped (.gz)."""
    accepted = "give one .tmx or .tsv file, or two line-aligned texts, source first (each may end in .gz)"
    kinds = [_kind(path) for path in paths]
    if kinds == [".tmx"]:
        return read_tmx(paths[0], source, target, tally)
    if kinds == [".tsv"]:
        return read_tsv(paths[0], tally, (source, target))
    if len(paths) == 2:
        for path, kind in zip(paths, kinds, strict=True):
            if kind in (".tmx", ".tsv"):
                raise InputError(f"{path}: a {kind} file holds both languages and is read alone; {accepted}")
        return read_aligned(paths[0], paths[1], tally)
    if len(paths) == 1:
        raise InputError(f"{paths[0]}: not a kind of file that is read alone; {accepted}")
    raise InputError(f"{len(paths)} files given; {accepted}")


def read_tmx(path: Path, source: str, target: str, tally: Tally) -> Iterator[Pair]:
    """The pairs of a TMX file. A language takes its variants: de takes de-AT; de-CH takes de-CH, else de.

    However it is written: zho_Hans takes zh and zh-CN, but not zh-TW, which is in another script.
    """
    asked = _language(source), _language(target)
    if read_language(asked[0]).essence == read_language(asked[1]).essence:
        raise InputError(f"source and target language are both {source!r}; name two languages")
    _refuse_unreadable(path)
    return _tmx_pairs(path, (source, target), asked, tally)


def read_tsv(path: Path, tally: Tally, languages: tuple[str, str] | None = None) -> Iterator[Pair]:
    """The pairs of a UTF-8 file with `source<TAB>target` on each line. Quotes mean nothing here.

    Where the first two columns say just that, or name the two `languages`, they are a header and no pair.
    """
    _refuse_unreadable(path)
    headers = [["source", "target"]]
    if languages is not None:
        headers.append([_normal_tag(language) for language in languages])
    return _tsv_pairs(path, tally, headers)


def read_aligned(source_path: Path, target_path: Path, tally: Tally) -> Iterator[Pair]:
    """Line n of one UTF-8 file with line n of the other. Only a line feed ends a line."""
    _refuse_unreadable(source_path)
    _refuse_unreadable(target_path)
    return _aligned_pairs(source_path, target_path, tally)


def write_tmx(pairs: Iterable[Pair], path: Path, source: str, target: str, note: str = "") -> int:
    """Write TMX 1.4 (gzipped if the name ends in .gz), whole or not at all; the number of pairs written.

    The same pairs give the same bytes: there is no date in it.
    """
    for language in (source, target):
        _language(language)
    if not path.parent.is_dir():
        raise InputError(f"{path}: the folder {path.parent} does not exist; create it first")
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        with partial.open("wb") as raw:
            if path.suffix.lower() == ".gz":
                with gzip.GzipFile(filename="", mode="wb", fileobj=raw, mtime=0) as packed:
                    count = _write_units(cast(IO[bytes], packed), pairs, source, target, note)
            else:
                count = _write_units(raw, pairs, source, target, note)
            raw.flush()
            os.fsync(raw.fileno())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
    return count


class Pairs:
    """The pairs of one datastore with their origins and roles, in one SQLite file.

    The same source and target are stored once; the same source with two targets is two pairs. Ids count up
    from 0 and are never used again. A pair is 'stored' until `hold_out` makes it 'tune' or 'test'.
    """

    _APPLICATION = 0x636C6B6E  # "clkn", in the SQLite header, so that another program's file is refused
    _VERSION = 1
    _SCHEMA = """
        CREATE TABLE pairs (
            id INTEGER PRIMARY KEY,
            source TEXT NOT NULL,
            target TEXT NOT NULL,
            file TEXT NOT NULL,
            unit TEXT,
            line INTEGER,
            role TEXT NOT NULL DEFAULT 'stored' CHECK (role IN ('stored', 'tune', 'test')),
            source_fold BLOB NOT NULL,
            target_fold BLOB NOT NULL,
            digest BLOB NOT NULL UNIQUE
        );
        CREATE TABLE counter (next_id INTEGER NOT NULL);
        INSERT INTO counter VALUES (0);
    """

    def __init__(self, connection: sqlite3.Connection) -> None:
        """Use `create` or `open`."""
        self._connection = connection
        connection.execute("PRAGMA synchronous = FULL")
        connection.execute("PRAGMA cache_size = -65536")  # 64 MB: digests arrive in random order

    @classmethod
    def create(cls, path: Path) -> Pairs:
        if path.exists():
            raise DatastoreError(f"{path}: already exists; open it, or remove it to start again")
        if not path.parent.is_dir():
            raise DatastoreError(f"{path}: the folder {path.parent} does not exist; create it first")
        connection = sqlite3.connect(path, isolation_level=None)
        try:
            # One script and one transaction, so that a file killed here is empty and not half a schema.
            connection.executescript(
                f"BEGIN; {cls._SCHEMA} PRAGMA application_id = {cls._APPLICATION};"
                f" PRAGMA user_version = {cls._VERSION}; COMMIT;"
            )
            return cls(connection)
        except BaseException:
            connection.close()
            raise

    @classmethod
    def open(cls, path: Path, *, write: bool = False) -> Pairs:
        """Open what `create` made; only with `write` may it be changed."""
        if not path.is_file():
            raise DatastoreError(f"{path}: missing; the datastore is incomplete, build it again")
        uri = f"{path.resolve().as_uri()}?mode={'rw' if write else 'ro'}"
        try:
            connection = sqlite3.connect(uri, uri=True, isolation_level=None)
        except sqlite3.OperationalError as error:
            raise DatastoreError(f"{path}: cannot be opened ({error}); make it readable, or build again") from error
        try:
            (application,) = connection.execute("PRAGMA application_id").fetchone()
            (version,) = connection.execute("PRAGMA user_version").fetchone()
            if application != cls._APPLICATION:
                raise DatastoreError(f"{path}: not a file of pairs made by clknn; build the datastore again")
            if version != cls._VERSION:
                raise DatastoreError(
                    f"{path}: pairs of format version {version}, this clknn reads version {cls._VERSION};"
                    " build the datastore again"
                )
            connection.execute("SELECT next_id FROM counter").fetchone()
            return cls(connection)
        except sqlite3.DatabaseError as error:
            connection.close()
            raise DatastoreError(f"{path}: SQLite cannot read it ({error}); build the datastore again") from error
        except BaseException:
            connection.close()
            raise

    def close(self) -> None:
        self._connection.close()

    def __enter__(self) -> Pairs:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    @property
    def next_id(self) -> int:
        """The id that the next pair added will have; larger than every id ever given."""
        (next_id,) = self._connection.execute("SELECT next_id FROM counter").fetchone()
        return int(next_id)

    def add(
        self,
        pairs: Iterable[Pair],
        tally: Tally,
        role: Literal["stored", "tune"] = "stored",
        tuned_apart: bool = False,
    ) -> range:
        """Take in the pairs that are new and return their ids; all of them, or none if anything is raised.

        Nothing held out is like a stored pair, with the same folded source or the same folded target. A pair to tune on
        that is like a pair of another role is skipped. A held-out pair like a new stored one is stored as well, as if
        both had been there from the start; its new id is among those returned. But `tuned_apart` says that all pairs
        to tune on came from files of their own: these are then forgotten.
        """
        with self._transaction():
            first = next_id = self.next_id
            kept = 0
            held_out = self._held_out() if role == "stored" else {}
            for pair in self._unlike_others(pairs, tally) if role == "tune" else pairs:
                before, digest = next_id, _digest(pair.source, pair.target)
                folds = _digest(fold(pair.source)), _digest(fold(pair.target))
                for side in enumerate(folds):
                    for like in held_out.pop(side, ()):
                        next_id += self._release(like, next_id, tuned_apart)
                added = self._connection.execute(
                    "INSERT INTO pairs (id, source, target, file, unit, line, role, source_fold, target_fold,"
                    " digest) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT (digest) DO NOTHING",
                    (
                        next_id,
                        pair.source,
                        pair.target,
                        pair.origin.file,
                        pair.origin.unit,
                        pair.origin.line,
                        role,
                        *folds,
                        digest,
                    ),
                )
                next_id += added.rowcount
                if added.rowcount or self._id_of(digest) >= before:  # the latter was held out until now
                    kept += 1
                else:
                    tally.skip("duplicate", str(pair.origin))
            self._connection.execute("UPDATE counter SET next_id = ?", (next_id,))
        tally.kept += kept
        return range(first, next_id)

    def _held_out(self) -> dict[tuple[int, bytes], list[int]]:
        """The ids of held-out pairs by (0, folded source) and by (1, folded target)."""
        ids: dict[tuple[int, bytes], list[int]] = {}
        query = "SELECT id, source_fold, target_fold FROM pairs WHERE role != 'stored'"
        for number, *folds in self._connection.execute(query):
            for side in enumerate(folds):
                ids.setdefault(side, []).append(number)
        return ids

    def _release(self, number: int, new: int, tuned_apart: bool) -> int:
        """Stores a held-out pair under a new id, or forgets it; how many were stored. It may be done already."""
        if tuned_apart:
            self._connection.execute("DELETE FROM pairs WHERE id = ? AND role = 'tune'", (number,))
        stored = "UPDATE pairs SET id = ?, role = 'stored' WHERE id = ? AND role != 'stored'"
        return self._connection.execute(stored, (new, number)).rowcount

    def _id_of(self, digest: bytes) -> int:
        (number,) = self._connection.execute("SELECT id FROM pairs WHERE digest = ?", (digest,)).fetchone()
        return int(number)

    def _unlike_others(self, pairs: Iterable[Pair], tally: Tally) -> Iterator[Pair]:
        # Tuning pairs are few and fit in memory, and so the table is read once. For 1,000,000 pairs of 140 characters
        # that takes 0.5 s; indexes on both folds would take every build 1 s and 50 MB (two-core x86-64, one thread).
        arriving = [(pair, _digest(fold(pair.source)), _digest(fold(pair.target))) for pair in pairs]
        sources, targets = {source for _, source, _ in arriving}, {target for _, _, target in arriving}
        there = "SELECT source_fold, target_fold FROM pairs WHERE role != 'tune'"
        for source, target in self._connection.execute(there):
            sources.discard(source)
            targets.discard(target)
        for pair, source, target in arriving:
            if source in sources and target in targets:
                yield pair
            else:
                tally.skip(LIKE_OTHERS, str(pair.origin))

    def remove(self, ids: Iterable[int]) -> int:
        """Forget these pairs; how many there were. Their ids are not used again."""
        removed = 0
        with self._transaction():
            for batch in _batches(ids):
                marks = ",".join("?" * len(batch))
                removed += self._connection.execute(f"DELETE FROM pairs WHERE id IN ({marks})", batch).rowcount
        return removed

    def hold_out(self, tune: int, test: int, seed: int) -> None:
        """Give random pairs the roles 'tune' and 'test', and every other pair the role 'stored'.

        Only a pair whose folded source and folded target each occur once in the table is taken, so that
        nothing held out is also stored, nor differs from it by case or spacing alone. Each role gets at most
        a twentieth of all pairs (none of fewer than 20); with too few candidates both are cut in proportion.
        The choice depends on the seed and the pairs, not on their order.
        """
        if tune < 0 or test < 0:
            raise InputError(f"cannot hold out {tune} and {test} pairs; give numbers of at least 0")
        with self._transaction():
            self._connection.execute("UPDATE pairs SET role = 'stored' WHERE role != 'stored'")
            most = self.count() // 20
            tune, test = min(tune, most), min(test, most)
            once = "SELECT {0} FROM pairs GROUP BY {0} HAVING count(*) = 1"
            candidates = self._connection.execute(
                f"SELECT digest, id FROM pairs WHERE source_fold IN ({once.format('source_fold')})"
                f" AND target_fold IN ({once.format('target_fold')})"
            )
            # The smallest keyed hashes are a random sample in little memory, whatever the order of the rows.
            key = str(seed).encode()
            ranked = ((blake2b(digest, key=key, digest_size=16).digest(), pair) for digest, pair in candidates)
            chosen = [pair for _, pair in heapq.nsmallest(tune + test, ranked)]
            if len(chosen) < tune + test:
                test = len(chosen) * test // (tune + test)
            roles = [("test" if rank < test else "tune", pair) for rank, pair in enumerate(chosen)]
            self._connection.executemany("UPDATE pairs SET role = ? WHERE id = ?", roles)

    def count(self, role: Role | None = None) -> int:
        query = "SELECT count(*) FROM pairs" + (" WHERE role = ?" if role else "")
        (count,) = self._connection.execute(query, (role,) if role else ()).fetchone()
        return int(count)

    def known(self, texts: Iterable[tuple[str, str]]) -> int:
        """How many of these (source, target) have the folded source or the folded target of a stored pair."""
        folds = [(_digest(fold(source)), _digest(fold(target))) for source, target in texts]
        asked = tuple({fold[side] for fold in folds} for side in (0, 1))
        stored = self._connection.execute("SELECT source_fold, target_fold FROM pairs WHERE role = 'stored'")
        seen: tuple[set[bytes], set[bytes]] = set(), set()  # one pass, in the memory of what was asked
        for row in stored:
            for side in (0, 1):
                if row[side] in asked[side]:
                    seen[side].add(row[side])
        return sum(source in seen[0] or target in seen[1] for source, target in folds)

    def each(self, role: Role, after: int | None = None) -> Iterator[tuple[int, Pair]]:
        """The pairs of one role in the order of ids larger than `after`; no lock is held in between."""
        last = -1 if after is None else after
        while True:
            rows = self._connection.execute(
                "SELECT id, source, target, file, unit, line FROM pairs WHERE role = ? AND id > ? ORDER BY id LIMIT ?",
                (role, last, _BATCH),
            ).fetchall()
            for row in rows:
                yield row[0], _pair_of(row)
            if len(rows) < _BATCH:
                return
            last = rows[-1][0]

    def get(self, ids: Iterable[int]) -> dict[int, Pair]:
        """The pairs with these ids, whatever their role; an id that is not there is not in the answer."""
        found: dict[int, Pair] = {}
        for batch in _batches(ids):
            marks = ",".join("?" * len(batch))
            rows = self._connection.execute(
                f"SELECT id, source, target, file, unit, line FROM pairs WHERE id IN ({marks})", batch
            )
            found.update((row[0], _pair_of(row)) for row in rows)
        return found

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        self._connection.execute("BEGIN IMMEDIATE")
        try:
            yield
            self._connection.execute("COMMIT")
        except BaseException:
            if self._connection.in_transaction:  # a full disk may have made SQLite roll back already
                self._connection.execute("ROLLBACK")
            raise


def _pair_of(row: tuple[int, str, str, str, str | None, int | None]) -> Pair:
    _, source, target, file, unit, line = row
    return Pair(source, target, Origin(file, unit, line))


def _batches(ids: Iterable[int]) -> Iterator[list[int]]:
    # int(): SQLite does not know numpy's integers.
    numbers = (int(number) for number in ids)
    while batch := list(islice(numbers, _BATCH)):
        yield batch


def _digest(*texts: str) -> bytes:
    digest = blake2b(digest_size=16)
    for text in texts:
        data = text.encode()
        digest.update(len(data).to_bytes(8, "little"))  # so that ("ab", "c") is not ("a", "bc")
        digest.update(data)
    return digest.digest()


def _kind(path: Path) -> str:
    suffixes = [suffix.lower() for suffix in path.suffixes]
    if suffixes and suffixes[-1] == ".gz":
        suffixes.pop()
    return suffixes[-1] if suffixes else ""


def _refuse_unreadable(path: Path) -> None:
    if path.is_dir():
        raise InputError(f"{path}: is a folder; name a file in it")
    if path.exists() and not path.is_file():
        raise InputError(f"{path}: is not a regular file; write its content to a file first")
    with _reading(path) as file:
        if not file.read(1):
            raise InputError(f"{path}: the file is empty; export it again")


@contextmanager
def _reading(path: Path) -> Iterator[IO[bytes]]:
    try:
        packed = path.suffix.lower() == ".gz"
        with cast(IO[bytes], gzip.open(path, "rb")) if packed else path.open("rb") as file:
            yield file
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise InputError(f"{path}: gzip cannot unpack it ({error}); copy or pack it again") from error
    except FileNotFoundError as error:
        raise InputError(f"{path}: no such file; check the name") from error
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror or error}); check the file") from error


def _lines(path: Path, advice: str = "save the file as UTF-8") -> Iterator[str]:
    with _reading(path) as file:
        number = 0
        while line := file.readline(LARGEST):
            number += 1
            if len(line) == LARGEST and not line.endswith(b"\n"):
                raise InputError(f"{path}:{number}: a line of more than {LARGEST:,} bytes; is this text?")
            try:
                text = line.rstrip(b"\r\n").decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError as error:
                raise InputError(
                    f"{path}:{number}: not UTF-8 at byte {error.start + 1} of the line"
                    f" (0x{error.object[error.start]:02x}); {advice}"
                ) from error
            yield text


def _clean_pair(source: str, target: str, origin: Origin, tally: Tally) -> Pair | None:
    """The pair as it is stored, or None and the reason counted."""
    clean_source, clean_target = _SPACE.sub(" ", source).strip(), _SPACE.sub(" ", target).strip()
    if not clean_source:
        tally.skip("empty source", str(origin))
    elif not clean_target:
        tally.skip("empty target", str(origin))
    elif len(clean_source) > LONGEST or len(clean_target) > LONGEST:
        tally.skip(f"longer than {LONGEST} characters", str(origin))
    elif _CONTROL.search(source) or _CONTROL.search(target):
        tally.skip("control characters", str(origin))
    else:
        return Pair(clean_source, clean_target, origin)
    return None


def _tsv_pairs(path: Path, tally: Tally, headers: list[list[str]]) -> Iterator[Pair]:
    first: InputError | None = None  # of the first line without two columns, while no line has them
    split = False
    for number, line in enumerate(_lines(path), start=1):
        columns = line.split("\t")
        tally.read += 1
        origin = Origin(path.name, line=number)
        if len(columns) != 2:
            first = first or InputError(
                f"{path}:{number}: expected source<TAB>target, read {len(columns)} column(s);"
                " is this a TSV file of two columns?"
            )
            if not split and number >= _UNSPLIT:
                raise first
            tally.skip("not two columns", str(origin))
        elif not split and [_normal_tag(column) for column in columns] in headers:
            split = True
            tally.skipped["header"] = Skip(1, str(origin))  # also where strict: nothing is lost
        else:
            split = True
            if pair := _clean_pair(columns[0], columns[1], origin, tally):
                yield pair
    if first is not None and not split:
        raise first


def _aligned_pairs(source_path: Path, target_path: Path, tally: Tally) -> Iterator[Pair]:
    lines = zip_longest(_lines(source_path), _lines(target_path))
    for number, (source, target) in enumerate(lines, start=1):
        if source is None or target is None:
            longer = number + sum(1 for _ in lines)
            counts = (number - 1, longer) if source is None else (longer, number - 1)
            raise InputError(
                f"{source_path} has {counts[0]:,} lines and {target_path} has {counts[1]:,}; they must"
                " be aligned line by line"
            )
        tally.read += 1
        if pair := _clean_pair(source, target, Origin(source_path.name, line=number), tally):
            yield pair


class _OneLineAtATime:
    """What lxml reads from: each read is one line, so that `line` is right when an element is reported.

    libxml2 keeps an element's line in 16 bits, and lxml's sourceline is an estimate from line 65,535 on.
    UTF-16 is counted by the byte of its line feeds, so that letters such as U+0A05 may move the numbers.
    """

    def __init__(self, file: IO[bytes], path: Path) -> None:
        self._file = file
        self._path = path
        self._feeds = 0
        self._reference = False
        self.line = 1
        self.unit_bytes = 0  # since the last unit ended; what the parser may be holding
        self.events: Any = etree.iterparse(
            self,
            events=("start", "end"),
            tag=("{*}tmx", "{*}tu"),
            resolve_entities=False,
            no_network=True,
            load_dtd=False,
            huge_tree=False,
            remove_comments=True,
            remove_pis=True,
        )

    def read(self, size: int = -1) -> bytes:
        if self._reference:
            # After an undeclared entity lxml starts afresh with the next line, as if it were a new file, and
            # reports what it makes of that. What it said of the last line is the error.
            for said in self.events.error_log:
                raise _not_xml(self._path, said.line, said.message)
        chunk = self._file.readline(size)
        self.line = self._feeds + 1
        self._feeds += chunk.endswith(b"\n")
        self._reference = b"&" in chunk
        self.unit_bytes += len(chunk)
        if self.unit_bytes > LARGEST:
            raise InputError(
                f"{self._path}:{self.line}: more than {LARGEST:,} bytes with no end of a <tu>;"
                " remove this unit, if it is TMX"
            )
        return chunk


def _tmx_pairs(path: Path, names: tuple[str, str], asked: tuple[str, str], tally: Tally) -> Iterator[Pair]:
    found: Counter[str] = Counter()
    units = 0
    both = False  # whether any unit has the two languages
    line = 0
    with _reading(path) as file:
        lines = _OneLineAtATime(file, path)
        try:
            for event, element in lines.events:
                if event == "start":
                    if not line:
                        _refuse_entities(path, element)
                    line = lines.line
                elif _local_name(element) == "tu":
                    units += 1
                    tally.read += 1
                    variants = _variants(element)
                    if not both:
                        # Bounded, for a file may name any number of languages.
                        found.update({tag for tag, _ in variants if tag in found or len(found) < 1000})
                    origin = Origin(path.name, element.get("tuid") or None, line)
                    first, second = _choose_both(asked, [tag for tag, _ in variants])
                    if first is None or second is None:
                        tally.skip(f"no {names[0] if first is None else names[1]} segment", str(origin))
                    else:
                        both = True
                        source = _text_of(variants[first][1], path, line)
                        target = _text_of(variants[second][1], path, line)
                        if pair := _clean_pair(source, target, origin, tally):
                            yield pair
                    _forget(element)
                    lines.unit_bytes = 0
        except etree.XMLSyntaxError as error:
            if re.search("Invalid bytes|not proper UTF-8", str(error.msg)):
                _refuse_encoding(path)
            raise _not_xml(path, error.lineno or lines.line, str(error.msg)) from error
    if units == 0:
        raise InputError(f"{path}: no translation unit (<tu>) in it; is this a TMX file with content?")
    if not both:
        listed = (
            ", ".join(f"{tag or 'no language'} ({count:,} units)" for tag, count in found.most_common(20)) or "none"
        )
        raise InputError(f"{path}: no unit has both {names[0]} and {names[1]}; ask for two of those found: {listed}")


def _refuse_entities(path: Path, element: Any) -> None:
    dtd = element.getroottree().docinfo.internalDTD
    declared = [] if dtd is None else [str(entity.name) for entity in dtd.entities()]
    if declared:
        raise InputError(
            f"{path}: declares the XML entity {declared[0]!r}, which can hide a file or a huge text;"
            " remove the declarations from its DOCTYPE"
        )


def _refuse_encoding(path: Path) -> None:
    """Names the first byte that is not UTF-8, which the parser does not; it may say what other encoding it is in."""
    with _reading(path) as file:
        if _ENCODING.search(file.read(1000)):
            return
    for _ in _lines(path, 'save the file as UTF-8, or name its encoding in the first line (encoding="windows-1252")'):
        pass


def _not_xml(path: Path, line: int, said: str) -> InputError:
    said = re.sub(r",? line \d+, column \d+.*", "", said, flags=re.DOTALL).strip().rstrip(".")
    said = re.sub(r",? *(use|try) XML_PARSE_HUGE( option)?", " is more than is read", said)
    cut = "the file is cut short: " if said.startswith("Premature end") else ""
    return InputError(f"{path}:{line}: not well-formed XML ({cut}{said}); correct it or export the file again")


def _local_name(element: Any) -> str:
    return str(element.tag).rpartition("}")[2]


def _variants(unit: Any) -> list[tuple[str, Any]]:
    """The language tag and the <seg> (None without one) of every <tuv>, in the file's order."""
    return [
        (_normal_tag(tuv.get(_XML_LANG) or tuv.get("lang") or ""), tuv.find("{*}seg"))
        for tuv in unit.iterchildren("{*}tuv")
    ]


def _text_of(segment: Any, path: Path, line: int) -> str:
    """The words of a <seg>: native codes and what is in them dropped, every other wrapper's text kept.

    A code that breaks the line stands between words, and becomes a space.
    """
    if segment is None:
        return ""
    if len(segment) == 0:
        return segment.text or ""
    parts: list[str] = []
    walk = etree.iterwalk(segment, events=("start", "end"))
    for event, element in walk:
        if element.tag is etree.Entity:  # with a DOCTYPE its declaration could be in the DTD, which is not read
            raise _not_xml(path, line, f"Entity '{element.name}' not defined")
        if event == "end":
            if element is not segment:
                parts.append(element.tail or "")
        elif _local_name(element) in _CODES:
            walk.skip_subtree()
            if _breaks_line(element):
                parts.append(" ")
        else:
            parts.append(element.text or "")
    return "".join(parts)


def _breaks_line(code: Any) -> bool:
    kind = (code.get("type") or "").lower().removeprefix("x-")
    return kind in _BREAK_TYPES or _BREAK_CODE.fullmatch(code.text or "") is not None


def _forget(unit: Any) -> None:
    """Free the unit and what stands before it; the unit itself must stay, the parser is still behind it."""
    unit.clear()
    parent = unit.getparent()
    while parent is not None and unit.getprevious() is not None:
        del parent[0]


def _normal_tag(tag: str) -> str:
    return tag.strip().lower().replace("_", "-")


def _language(tag: str) -> str:
    normal = _normal_tag(tag)
    if not normal:
        raise InputError("a language is empty; give one such as de or pt-BR")
    return normal


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


def _choose_both(asked: tuple[str, str], tags: list[str]) -> tuple[int | None, int | None]:
    """The places of the two languages among a unit's tags, never the same place."""
    source, target = (_nearest(language, tags) for language in asked)
    if source is not None and source == target:  # de and de-CH are asked and the unit has one of them
        return (source, None) if tags[source] == asked[0] else (None, target)
    return source, target


def _nearest(asked: str, tags: list[str]) -> int | None:
    ranked = [(rank, place) for place, tag in enumerate(tags) if (rank := _distance(asked, tag)) is not None]
    return min(ranked)[1] if ranked else None


def _write_units(file: IO[bytes], pairs: Iterable[Pair], source: str, target: str, note: str) -> int:
    count = 0
    with etree.xmlfile(file, encoding="utf-8") as xml:
        xml.write_declaration()
        with xml.element("tmx", version="1.4"):
            xml.write("\n")
            header = etree.Element(
                "header",
                {
                    "creationtool": "clknn",
                    "creationtoolversion": "1",
                    "segtype": "sentence",
                    "o-tmf": "clknn",
                    "adminlang": "en",
                    "srclang": source,
                    "datatype": "plaintext",
                },
            )
            if note:
                etree.SubElement(header, "note").text = note
            xml.write(header, pretty_print=True)
            with xml.element("body"):
                xml.write("\n")
                for pair in pairs:
                    xml.write(_unit_of(pair, source, target), pretty_print=True)
                    count += 1
            xml.write("\n")
    return count


def _unit_of(pair: Pair, source: str, target: str) -> Any:
    unit = etree.Element("tu")
    try:
        if pair.origin.unit is not None:
            unit.set("tuid", pair.origin.unit)
        for language, text in ((source, pair.source), (target, pair.target)):
            variant = etree.SubElement(unit, "tuv", {_XML_LANG: language})
            etree.SubElement(variant, "seg").text = text
    except ValueError as error:
        raise InputError(f"{pair.origin}: a control character cannot stand in XML; remove it") from error
    return unit
