"""`Pairs`, the one SQLite file that is a datastore's record of its text: pairs with their origins and roles.

Hidden here: de-duplication, what is like what is held out, the choice of held-out pairs, and the details of an origin,
which are kept as one column of JSON so that the table does not know any format. The trade-off: a file of version 1,
which has no such column, is read as it is, and gets the column when it is first written to.
"""

from __future__ import annotations

import heapq
import sqlite3
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from hashlib import blake2b
from itertools import islice
from pathlib import Path
from typing import Literal

from clknn.corpus.pair import Details, Origin, Pair, Tally, fold
from clknn.errors import DatastoreError, InputError

Role = Literal["stored", "tune", "test"]
LIKE_OTHERS = "tuning pair whose source or target is in the translation memory too"  # why `Pairs.add` skips one

_BATCH = 500


class Pairs:
    """The pairs of one datastore with their origins and roles, in one SQLite file.

    The same source and target are stored once; the same source with two targets is two pairs. Ids count up
    from 0 and are never used again. A pair is 'stored' until `hold_out` makes it 'tune' or 'test'.
    """

    _APPLICATION = 0x636C6B6E  # "clkn", in the SQLite header, so that another program's file is refused
    _VERSION = 2
    _SCHEMA = """
        CREATE TABLE pairs (
            id INTEGER PRIMARY KEY,
            source TEXT NOT NULL,
            target TEXT NOT NULL,
            file TEXT NOT NULL,
            unit TEXT,
            line INTEGER,
            details TEXT,
            role TEXT NOT NULL DEFAULT 'stored' CHECK (role IN ('stored', 'tune', 'test')),
            source_fold BLOB NOT NULL,
            target_fold BLOB NOT NULL,
            digest BLOB NOT NULL UNIQUE
        );
        CREATE TABLE counter (next_id INTEGER NOT NULL);
        INSERT INTO counter VALUES (0);
    """

    def __init__(self, connection: sqlite3.Connection, *, with_details: bool = True) -> None:
        """Use `create` or `open`."""
        self._connection = connection
        self._columns = f"id, source, target, file, unit, line, {'details' if with_details else 'NULL'}"
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
            if version not in (1, cls._VERSION):
                raise DatastoreError(
                    f"{path}: pairs of format version {version}, this clknn reads version {cls._VERSION};"
                    " build the datastore again"
                )
            connection.execute("SELECT next_id FROM counter").fetchone()
            if write and version == 1:
                connection.executescript(
                    f"BEGIN; ALTER TABLE pairs ADD COLUMN details TEXT; PRAGMA user_version = {cls._VERSION}; COMMIT;"
                )
            return cls(connection, with_details=write or version > 1)
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
                    "INSERT INTO pairs (id, source, target, file, unit, line, details, role, source_fold, target_fold,"
                    " digest) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT (digest) DO NOTHING",
                    (
                        next_id,
                        pair.source,
                        pair.target,
                        pair.origin.file,
                        pair.origin.unit,
                        pair.origin.line,
                        None if pair.origin.details is None else pair.origin.details.as_json(),
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
                f"SELECT {self._columns} FROM pairs WHERE role = ? AND id > ? ORDER BY id LIMIT ?",
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
            rows = self._connection.execute(f"SELECT {self._columns} FROM pairs WHERE id IN ({marks})", batch)
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


def _pair_of(row: tuple[int, str, str, str, str | None, int | None, str | None]) -> Pair:
    _, source, target, file, unit, line, details = row
    return Pair(source, target, Origin(file, unit, line, None if details is None else Details.from_json(details)))


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
