"""The datastore directory: manifest, pairs, entries, projection, index. Opened, asked for neighbours, changed, checked.

Every file that a manifest names is never written again: a change writes files under new names, then the manifest by
rename, which is the one moment at which the change happens; what no manifest names is swept away afterwards. No
manifest, no datastore: a build that was killed has only `draft.json`, and the same command takes it up again. The
trade-off: adding or removing pairs copies the entry arrays, one second for each GB, in exchange for having no state in
which a reader could see half of it.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import re
import shutil
import sqlite3
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from safetensors.torch import save as serialised
from torch import Tensor

from clknn import index as indices
from clknn import projection as projections
from clknn.corpus import Pair, Pairs, Role, Tally
from clknn.errors import DatastoreError, InputError, ModelError
from clknn.familiarity import Familiarity
from clknn.index import Index
from clknn.methods.adaptive import MetaK
from clknn.methods.gate import Gate
from clknn.methods.kster import Kernel
from clknn.mixing import Combiner, Mixing, Neighbours
from clknn.model import Model, Tokens
from clknn.projection import Projection
from clknn.states import GrowingArray, Progress, blocks, write_atomically

FORMAT = 2  # 1 had no end penalty
READ = 1, 2
TOKENISED = 4_096  # sources tokenised at a time
OPENINGS = 10  # times that a reader is overtaken by a writer before it gives up
ENTRY_FILES = ("states", "values", "pairs", "positions")  # one row an entry
TUNED = "combiner", "familiarity"
# What a killed or refused change can leave behind; SQLite would play a journal that is left into the next file of
# that name.
_OURS = re.compile(
    r"(states|values|pairs|positions|keys|adapter|projection|combiner|familiarity|index|text)(\.\d+)?"
    r"\.(npy|safetensors|faiss|sqlite)"
    r"(-journal)?|(manifest|draft|progress)\.json\.new|training\.safetensors\.new"
)
# As the system, faiss, safetensors and SQLite say it.
_FULL = re.compile("No space left|Disk quota exceeded|disk is full")
_FORBIDDEN = re.compile("Permission denied|Operation not permitted|Read-only file system|readonly database")


@dataclass(frozen=True)
class FileMark:
    name: str
    bytes: int
    blake2b: str


@dataclass(frozen=True)
class Manifest:
    """What a datastore is. `options` and `measured` hold, per stage, what was asked for and what came of it."""

    model: str
    fingerprint: str
    source_language: str
    target_language: str
    prefix: str
    state: str
    width: int
    entries: int = 0
    stored: int = 0
    options: dict[str, dict[str, Any]] = field(default_factory=dict)
    measured: dict[str, dict[str, Any]] = field(default_factory=dict)
    mixing: Mixing | None = None
    end_penalty: float = 0.0  # nats that end-of-sentence loses wherever something was retrieved
    files: dict[str, FileMark] = field(default_factory=dict)
    format: int = FORMAT

    @property
    def untuned(self) -> bool:
        """Its k, temperature and weight are the defaults: there was nothing to choose them on, or not yet."""
        return self.mixing is not None and "tune" not in self.options

    def having(self, stage: str, options: dict[str, Any], measured: dict[str, Any], **changes: Any) -> Manifest:
        """This manifest after a stage."""
        return replace(
            self,
            options=self.options | {stage: options},
            measured=self.measured | {stage: measured},
            **changes,
        )


class Retriever(Protocol):
    """Where neighbours come from: faiss in this process today, a cluster for those who outgrow one machine."""

    @property
    def entries(self) -> int: ...

    def project(self, states: Tensor) -> Tensor: ...

    def neighbours(self, queries: Tensor, k: int, with_keys: bool = False) -> Neighbours: ...


@dataclass(frozen=True)
class Datastore:
    """An open datastore. Arrays are memory-mapped: opening costs no more than reading the index."""

    path: Path
    manifest: Manifest
    projection: Projection
    index: Index
    values: npt.NDArray[np.int32]
    pair_ids: npt.NDArray[np.int32]
    positions: npt.NDArray[np.int32]
    pairs: Pairs
    combiner: Combiner | None  # what tuning chose for these keys
    familiarity: Familiarity | None = None  # where general text was there to learn it from

    @property
    def entries(self) -> int:
        return len(self.values)

    def familiar(self, sources: Sequence[Tokens]) -> list[bool]:
        """Which sources read like the memory; all of them, where it never saw other text."""
        return [True] * len(sources) if self.familiarity is None else self.familiarity.of(sources)

    def project(self, states: Tensor) -> Tensor:
        return self.projection(states.float().cpu())

    def neighbours(self, queries: Tensor, k: int, with_keys: bool = False) -> Neighbours:
        """The k nearest entries of each query [R, P]; `with_keys` for combiners that look at queries and keys."""
        if k > self.entries:
            raise InputError(f"k is {k} and {self.path} has {self.entries} entries; ask for fewer")
        near = self.index.search(queries.numpy(), k)
        nearness = torch.from_numpy(near.nearness)  # [R, K]
        return Neighbours(
            torch.from_numpy(near.ids),
            torch.from_numpy(self.values[near.ids].astype(np.int64)),
            torch.from_numpy(near.found),
            similarity=nearness if self.index.inner else None,
            distance=None if self.index.inner else nearness,
            queries=queries if with_keys else None,
            keys=torch.from_numpy(self.index.keys[near.ids].astype(np.float32)) if with_keys else None,  # [R, K, P]
        )

    def close(self) -> None:
        self.pairs.close()

    def __enter__(self) -> Datastore:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()


def read_manifest(path: Path) -> Manifest:
    """The manifest of a finished datastore, or the reason why there is none."""
    if not _exists(path):
        raise DatastoreError(f"{path}: no datastore is here; make one with `clknn adapt FILE --out {path}`")
    if not path.is_dir():
        raise DatastoreError(f"{path}: is a file, and a datastore is a folder; name one that `clknn adapt` has made")
    if not _exists(path / "manifest.json"):
        if _exists(path / "draft.json"):
            raise DatastoreError(f"{path}: half-built: {_how_far(path)}")
        raise DatastoreError(f"{path}: a folder without manifest.json is no datastore; make one with `clknn adapt`")
    return _parse(path / "manifest.json")


def read_draft(path: Path) -> Manifest | None:
    """The newest manifest, finished or not; None where nothing was begun."""
    for name in ("manifest.json", "draft.json"):
        if _exists(path / name):
            return _parse(path / name)
    return None


def _exists(file: Path) -> bool:
    try:
        return file.exists()
    except OSError as error:  # a folder that may not be entered; elsewhere the answer is no
        raise DatastoreError(f"{file}: cannot be read ({error.strerror}); make it readable") from error


def _parse(file: Path) -> Manifest:
    try:
        raw = json.loads(file.read_text(encoding="utf8"))
        if raw["format"] not in READ:
            raise DatastoreError(
                f"{file}: format version {raw['format']}, and this clknn reads versions {READ[0]} to {READ[-1]}; "
                "build it again or use the clknn that built it"
            )
        raw["format"] = FORMAT
        raw["files"] = {name: FileMark(**mark) for name, mark in raw["files"].items()}
        raw["mixing"] = None if raw["mixing"] is None else Mixing(**raw["mixing"])
        manifest = Manifest(**raw)
        if file.name == "manifest.json":
            _refuse_lacking(manifest)
        return manifest
    except OSError as error:
        raise DatastoreError(f"{file}: cannot be read ({error.strerror}); make it readable") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DatastoreError(f"{file}: damaged ({type(error).__name__}: {error}); build the datastore again") from error


def _refuse_lacking(manifest: Manifest) -> None:
    """A manifest can be JSON, and of this version, and yet not name what every finished datastore has."""
    if absent := sorted({*ENTRY_FILES, "text", "keys", "projection", "index"} - set(manifest.files)):
        raise ValueError(f"no {', '.join(absent)} among its files")
    stages = {"build", "project", *manifest.options}
    stages |= {stage for stage, file in (("train", "adapter"), ("tune", "combiner")) if file in manifest.files}
    for name, notes in (("options", manifest.options), ("measured", manifest.measured)):
        if absent := sorted(stages - set(notes)):
            raise ValueError(f"no {', '.join(absent)} in its {name}")
    if manifest.mixing is not None and manifest.mixing.k > manifest.entries:
        raise ValueError(f"k is {manifest.mixing.k} of {manifest.entries} entries")


def _how_far(path: Path) -> str:
    draft = _parse(path / "draft.json")
    if "build" in draft.measured:
        return f"{draft.entries:,} entries and no keys; run `clknn project {path}`, or the command that began it again"
    done = Progress.of(path / "progress.json").pairs
    return f"{done:,} pairs force-decoded; run the command that began it again"


def check_model(path: Path, manifest: Manifest, model: Model) -> None:
    """A datastore speaks only to the model, tokenizer and layer whose states it holds."""
    if (model.fingerprint, model.state_definition) != (manifest.fingerprint, manifest.state):
        raise DatastoreError(
            f"{path} was built with {manifest.model} (fingerprint {manifest.fingerprint}, state: {manifest.state}), "
            f"and this is {model.name} (fingerprint {model.fingerprint}, state: {model.state_definition}); "
            "use that model, or build again with this one"
        )


def open_datastore(path: Path, model: Model | None = None, tuned: bool = True) -> Datastore:
    """Opens a finished datastore for reading; with `model`, only if it was built with that model.

    Not `tuned`, what tuning chose stays unread: tuning again must be possible where that is damaged.
    """
    manifest, attempts = read_manifest(path), 0
    while True:
        if model is not None:
            check_model(path, manifest, model)
        try:
            return _opened(path, manifest, tuned)
        except DatastoreError:
            # A writer may have committed since the manifest was read, and swept what it names. What could be opened is
            # of one state: a name is not given twice.
            before, manifest, attempts = manifest, read_manifest(path), attempts + 1
            if manifest == before or attempts == OPENINGS:
                raise


def _opened(path: Path, manifest: Manifest, tuned: bool) -> Datastore:
    for name, mark in manifest.files.items():
        if name in TUNED and not tuned:
            continue
        file = path / mark.name
        try:
            size = file.stat().st_size
        except FileNotFoundError:
            size = None
        if size != mark.bytes:
            found = "nothing" if size is None else f"{size:,} bytes"
            raise DatastoreError(f"{file}: {found} where the manifest has {mark.bytes:,}; restore it, or build again")
    arrays = {name: array(path, manifest, name) for name in ("keys", "values", "pairs", "positions")}
    projection = projections.read(path / manifest.files["projection"].name)
    index = indices.read(path / manifest.files["index"].name, arrays["keys"], projection.normed)
    pairs = Pairs.open(path / manifest.files["text"].name)
    entries = arrays["values"], arrays["pairs"], arrays["positions"]
    chosen = (read_combiner(path, manifest), read_familiarity(path, manifest)) if tuned else (None, None)
    return Datastore(path, manifest, projection, index, *entries, pairs, *chosen)


def read_combiner(path: Path, manifest: Manifest) -> Combiner | None:
    """The combiner that learned, where there is one; else the manifest's k, temperature and weight."""
    if "combiner" not in manifest.files:
        return manifest.mixing
    file = path / manifest.files["combiner"].name
    try:
        tensors = load_file(file)
        for kind in (MetaK, Kernel, Gate):
            if combiner := kind.of(tensors):
                if combiner.k > manifest.entries:
                    raise KeyError(f"{combiner.k} neighbours of {manifest.entries} entries")
                return combiner
    except (OSError, SafetensorError, KeyError, RuntimeError) as error:
        raise DatastoreError(f"{file}: not a combiner ({error}); run `clknn tune` again") from error
    raise DatastoreError(f"{file}: a combiner that this clknn does not know; use the one that made it, or tune again")


def read_familiarity(path: Path, manifest: Manifest) -> Familiarity | None:
    if "familiarity" not in manifest.files:
        return None
    file = path / manifest.files["familiarity"].name
    try:
        return Familiarity.from_tensors(load_file(file))
    except (OSError, SafetensorError, KeyError) as error:
        raise DatastoreError(f"{file}: does not tell sources apart ({error}); run `clknn tune` again") from error


def with_familiarity(path: Path, manifest: Manifest, familiarity: Familiarity | None) -> Manifest:
    """The manifest that has this one and no other, which is written beside it; None: no source is unfamiliar."""
    files = {name: mark for name, mark in manifest.files.items() if name != "familiarity"}
    if familiarity is None:
        return replace(manifest, files=files)
    return replace(manifest, files=files | {"familiarity": mark_of(_written(path, familiarity))})


def _written(path: Path, familiarity: Familiarity) -> Path:
    file = fresh(path, "familiarity", "safetensors")
    file.write_bytes(serialised(familiarity.tensors()))  # save_file lets only its owner read it
    return file


def with_combiner(path: Path, manifest: Manifest, combiner: Combiner) -> Manifest:
    """The manifest that has this combiner and no other; what it learned is written beside it."""
    files = {name: mark for name, mark in manifest.files.items() if name != "combiner"}
    if isinstance(combiner, Mixing):
        return replace(manifest, mixing=combiner, files=files)
    assert isinstance(combiner, MetaK | Kernel | Gate)
    file = fresh(path, "combiner", "safetensors")
    file.write_bytes(serialised(combiner.tensors()))  # save_file lets only its owner read it
    return replace(manifest, mixing=None, files=files | {"combiner": mark_of(file)})


def array(path: Path, manifest: Manifest, name: str) -> npt.NDArray[Any]:
    """One of the entry arrays, memory-mapped."""
    file = path / manifest.files[name].name
    try:
        mapped: npt.NDArray[Any] = np.load(file, mmap_mode="r", allow_pickle=False)
    except (ValueError, OSError) as error:
        raise DatastoreError(f"{file}: not the array it should be ({error}); build the datastore again") from error
    if len(mapped) != manifest.entries:
        raise DatastoreError(f"{file}: {len(mapped):,} rows, and the manifest has {manifest.entries:,} entries")
    return mapped


def fresh(path: Path, name: str, suffix: str) -> Path:
    """A file name that no manifest has named yet: a reader of an earlier one must not find another's file under it."""
    known = re.compile(rf"{name}(?:\.(\d+))?\.{suffix}")
    revisions = [int(match[1] or 0) for file in path.iterdir() if (match := known.fullmatch(file.name))]
    revision = max(revisions, default=-1) + 1
    return path / (f"{name}.{revision}.{suffix}" if revision else f"{name}.{suffix}")


def mark_of(file: Path) -> FileMark:
    """What a manifest says of a file, which is safely on disk from here on."""
    with file.open("rb") as opened:
        os.fsync(opened.fileno())
        digest = hashlib.file_digest(opened, lambda: hashlib.blake2b(digest_size=16)).hexdigest()
    return FileMark(file.name, file.stat().st_size, digest)


def save_draft(path: Path, manifest: Manifest) -> None:
    """Notes a stage's outcome: in the manifest of a finished datastore, else in the draft."""
    name = "manifest.json" if (path / "manifest.json").exists() else "draft.json"
    write_atomically(path / name, _text(manifest))


def commit(path: Path, manifest: Manifest) -> None:
    """From here on the datastore is what `manifest` says; files that it does not name go."""
    write_atomically(path / "manifest.json", _text(manifest))
    _sweep(path, manifest)


def _sweep(path: Path, manifest: Manifest) -> None:
    """Removes what this manifest does not name; a build's growing files have no name before it is done."""
    named = {mark.name for mark in manifest.files.values()}
    finished = (path / "manifest.json").exists()
    for file in path.iterdir():
        leftover = named and _OURS.fullmatch(file.name) and file.name not in named
        if leftover or (finished and file.name in ("draft.json", "progress.json")):
            file.unlink()


def _text(manifest: Manifest) -> str:
    return json.dumps(asdict(manifest), indent=1, ensure_ascii=False) + "\n"


@contextmanager
def writing(path: Path, begins: bool = False) -> Iterator[None]:
    """One writer at a time; a full disk or a forbidden one is reported with what to do, and leaves what was committed.

    What a change that was killed left behind is swept away first: it takes the space that this one needs. Only where
    a datastore `begins` may there be none yet.
    """
    if not begins and read_draft(path) is None:
        read_manifest(path)  # says what is there instead
    with _locked(path):
        try:
            if newest := read_draft(path):
                _sweep(path, newest)
            yield
        except (OSError, sqlite3.OperationalError, RuntimeError, SafetensorError) as error:
            code, said = getattr(error, "errno", None), str(error)
            if forbidden := _FORBIDDEN.search(said):
                raise DatastoreError(f"{path}: cannot be written to ({forbidden[0]}); make it writable") from error
            if code not in (errno.ENOSPC, errno.EDQUOT) and not _FULL.search(said):
                raise
            free = shutil.disk_usage(path).free / 1e6
            raise DatastoreError(
                f"{path}: the disk is full ({free:,.1f} MB left); free {_still_needed(path)} there "
                "and run the same command again: what was done is kept"
            ) from error


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    try:
        lock = (path / "lock").open("a")
    except OSError as error:
        raise DatastoreError(f"{path}: cannot be written to ({error.strerror}); make it writable") from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise DatastoreError(f"{path}: another clknn is writing to it; wait until it is done") from None
        yield


def _still_needed(path: Path) -> str:
    """What is still to be written will take, going by the pairs force-decoded so far."""
    draft, done = read_draft(path), Progress.of(path / "progress.json")
    if (path / "manifest.json").exists() and draft is not None:  # a change writes its files beside the old ones
        return f"about {max(1, round(sum(mark.bytes for mark in draft.files.values()) / 1e6)):,} MB"
    if draft is None or not done.pairs:
        return "some space"
    with Pairs.open(path / "text.sqlite") as pairs:
        stored = pairs.count("stored")
    entries = done.entries * max(1.0, stored / done.pairs)
    states = (entries - done.entries) * (2 * draft.width + 12)
    keys = entries * min(128, draft.width) * (2 + (4 if entries < indices.EXACT_BELOW else 1))
    training = 0 if "adapter" in draft.files else 256 * draft.width**2  # two checkpoints of an adapter of 8 D^2 weights
    return f"about {max(1, round((states + keys + training) / 1e6)):,} MB"


# -- changing a finished datastore ------------------------------------------------------------------------------------


def add(path: Path, pairs: Iterable[Pair], model: Model, tally: Tally | None = None) -> range:
    """Adds pairs, projected as the others were; gives their ids. Pairs already stored are not stored again.

    What was held out is not once it is stored: such pairs, and those like an added one, get entries and ids as well.
    """
    tally = tally or Tally()
    with writing(path), open_datastore(path, model) as store:
        text = fresh(path, "text", "sqlite")
        shutil.copyfile(path / store.manifest.files["text"].name, text)
        with Pairs.open(text, write=True) as record, ExitStack() as open_files:
            ids = record.add(pairs, tally, tuned_apart=bool(store.manifest.options["build"]["tune_on"]))
            grown = {name: _copied(store, name, open_files) for name in (*ENTRY_FILES, "keys")}
            stream = islice(record.each("stored", after=ids.start - 1), len(ids))
            for _, block in blocks(model, stream, tally):
                for name in ENTRY_FILES:
                    grown[name][1].append(getattr(block, name))
                for keys in store.projection.keys(block.states):
                    grown["keys"][1].append(keys)
                del block  # before the next is made: otherwise there would be two in memory
            files = {name: file for name, (file, _) in grown.items()}
            if store.familiarity is not None:
                again = islice(record.each("stored", after=ids.start - 1), len(ids))
                known = store.familiarity.with_pairs(sources_of(model, again))
                files["familiarity"] = _written(path, known)
            counts = _counts(record)
        _finish(store, text, files, counts, indices.extended)
    return ids


def remove(path: Path, ids: Sequence[int]) -> int:
    """Forgets pairs and all their entries, as if they had never been there; gives how many pairs there were."""
    with writing(path), open_datastore(path) as store:
        text = fresh(path, "text", "sqlite")
        shutil.copyfile(path / store.manifest.files["text"].name, text)
        with Pairs.open(text, write=True) as record:
            removed = record.remove(ids)
            counts = _counts(record)
        kept = np.flatnonzero(~np.isin(store.pair_ids, np.fromiter(ids, np.int64)))
        if not len(kept):
            text.unlink()
            raise InputError(f"{path}: this would remove every entry; delete the folder instead")
        files = {}
        for name in (*ENTRY_FILES, "keys"):
            old = array(path, store.manifest, name)
            files[name] = fresh(path, name, "npy")
            with GrowingArray(files[name], old.dtype, old.shape[1] if old.ndim > 1 else None, 0) as new:
                for rows in np.array_split(kept, len(kept) // 100_000 + 1):
                    new.append(old[rows])
        if store.familiarity is not None:
            files["familiarity"] = _written(path, store.familiarity.without_pairs(np.fromiter(ids, np.int64)))
        _finish(store, text, files, counts, indices.refilled)
    return removed


def sources_of(model: Model, pairs: Iterator[tuple[int, Pair]]) -> list[tuple[int, Tokens]]:
    """Numbered pairs' sources, tokenised."""
    found = list[tuple[int, Tokens]]()
    while some := list(islice(pairs, TOKENISED)):
        numbers, texts = [number for number, _ in some], [pair.source for _, pair in some]
        found += zip(numbers, model.tokenise_sources(texts), strict=True)
    return found


def _copied(store: Datastore, name: str, open_files: ExitStack) -> tuple[Path, GrowingArray]:
    old = array(store.path, store.manifest, name)
    file = fresh(store.path, name, "npy")
    shutil.copyfile(store.path / store.manifest.files[name].name, file)
    grown = GrowingArray(file, old.dtype, old.shape[1] if old.ndim > 1 else None, len(old))
    return file, open_files.enter_context(grown)


def _counts(record: Pairs) -> dict[str, int]:
    roles: tuple[Role, ...] = "stored", "tune", "test"
    return {role: record.count(role) for role in roles}


def _finish(
    store: Datastore, text: Path, files: dict[str, Path], counts: dict[str, int], indexed: Callable[[Index, Any], Index]
) -> None:
    """Indexes the new keys and commits; the old files stay until the new manifest stands."""
    keys = np.load(files["keys"], mmap_mode="r")
    index = indexed(store.index, keys)
    files |= {"text": text, "index": fresh(store.path, "index", "faiss")}
    indices.save(index, files["index"])
    marks = store.manifest.files | {name: mark_of(file) for name, file in files.items()}
    mixing = store.manifest.mixing
    if mixing is not None:
        mixing = replace(mixing, k=min(mixing.k, len(keys)))  # fewer entries than that may be left
    elif store.combiner is not None and store.combiner.k > len(keys):
        raise InputError(
            f"{store.path}: its combiner asks for {store.combiner.k} neighbours and {len(keys)} entries would be left; "
            "run `clknn tune --combiner scaled` first"
        )
    built = store.manifest.measured["build"]
    held_out = {role: min(fitted, counts[role]) for role, fitted in built["held out"].items()}
    changed = replace(
        store.manifest,
        entries=len(keys),
        stored=counts["stored"],
        measured=store.manifest.measured | {"build": built | {"held out": held_out}},
        files=marks,
        mixing=mixing,
    )
    commit(store.path, changed)


def damaged(path: Path, manifest: Manifest, names: Iterable[str]) -> list[str]:
    """Those of these files that are gone, or are not what the manifest says."""
    marks = {name: manifest.files[name] for name in names if name in manifest.files}
    return [n for n, mark in marks.items() if not (path / mark.name).exists() or mark_of(path / mark.name) != mark]


def verify(path: Path) -> list[str]:
    """What is wrong with a datastore, a sentence each: checksums, counts, and values the model could not produce."""
    manifest = read_manifest(path)
    wrong = [
        f"{path / manifest.files[name].name}: its checksum is not the manifest's; restore it, or build again"
        for name in damaged(path, manifest, manifest.files)
    ]
    if wrong:
        return wrong
    with open_datastore(path) as store:
        entries_of, stored = set(np.unique(store.pair_ids).tolist()), store.pairs.count("stored")
        strangers = entries_of - {i for i, _ in store.pairs.each("stored")}
        if strangers:
            wrong.append(f"{path}: {len(strangers)} pairs have entries and no text; build again")
        if stored != manifest.stored:
            wrong.append(f"{path}: {stored} pairs stored, and the manifest has {manifest.stored}")
    return wrong


def from_states(
    path: Path, manifest: Manifest, projection: Projection, queries: Tensor | None, advance: Callable[[int], None]
) -> tuple[dict[str, Path], Index, dict[str, Any]]:
    """Keys and index of a datastore's states, written under fresh names: the files, the index, what it measures.

    `queries` are states the datastore does not hold; without any, stored states stand in for them.
    """
    states = array(path, manifest, "states")
    if not manifest.entries:
        raise DatastoreError(f"{path}: it has no entries; every pair was skipped, so there is nothing to retrieve")
    files = {"keys": fresh(path, "keys", "npy")}
    with GrowingArray(files["keys"], np.float16, projection.width(manifest.width), 0) as keys:
        for block in projection.keys(states):
            if not np.isfinite(block).all():
                raise ModelError("keys leave float16's range; this model's states cannot be searched as they are")
            keys.append(block)
            advance(keys.rows)
    stored_keys = np.load(files["keys"], mmap_mode="r")
    if queries is None:
        rows = np.random.default_rng(0).permutation(manifest.entries)[:500]
        asked = np.asarray(stored_keys[np.sort(rows)], np.float32)
    else:
        asked = projection(queries[:500]).numpy()
    started = time.perf_counter()
    index = indices.build(stored_keys, projection.normed, asked)
    seconds = round(time.perf_counter() - started, 1)
    files |= {"projection": fresh(path, "projection", "safetensors"), "index": fresh(path, "index", "faiss")}
    projections.save(projection, files["projection"])
    indices.save(index, files["index"])
    k = min(indices.RECALL_AT, manifest.entries)
    truth = indices.exact_search(stored_keys, asked, k, projection.normed)
    reached = indices.recall(index.search(asked, k), truth, projection.normed)
    return files, index, {f"recall@{k}": round(reached, 4), "index": index.description, "index seconds": seconds}
