"""The directory: what opens, what is refused and why, and changes that happen wholly or not at all."""

from __future__ import annotations

import json
import shutil
import sqlite3
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tiny
from clknn import adaptation, datastore
from clknn.adapter import AdapterSettings
from clknn.corpus import Pair, Pairs, Tally
from clknn.datastore import Datastore, open_datastore, read_manifest, verify
from clknn.errors import DatastoreError, InputError
from clknn.model import Model
from clknn.translator import Translator

ROWS = tiny.pairs(40)
UNSEEN = tiny.pairs(8, seed=5)
QUICK = AdapterSettings(steps=4, validate_every=2, batch=32)
Made = Callable[..., Path]


@pytest.fixture(scope="module")
def model(load: Callable[[str], Model]) -> Model:
    return load("marian")


@pytest.fixture
def made(model: Model, tmp_path: Path) -> Made:
    """Makes a datastore of some rows, with nothing held out."""

    def make(rows: Sequence[Pair], name: str = "s", vanilla: bool = True) -> Path:
        file = tiny.write_tsv(tmp_path / f"{name}.tsv", list(rows))
        adaptation.adapt(
            tmp_path / name, [file], model, adaptation.KNN_MT if vanilla else adaptation.Method(QUICK), hold_out=0
        )
        return tmp_path / name

    return make


@pytest.fixture(scope="module")
def finished(model: Model, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A CLKNN datastore with pairs held out; to be copied, not changed."""
    folder = tmp_path_factory.mktemp("finished")
    file = tiny.write_tsv(folder / "tm.tsv", tiny.pairs(100))
    adaptation.adapt(folder / "store", [file], model, adaptation.Method(QUICK))
    return folder / "store"


@pytest.fixture
def store(finished: Path, tmp_path: Path) -> Path:
    return shutil.copytree(finished, tmp_path / "store")


def entries(path: Path) -> list[tuple[str, str, int, int]]:
    """Every entry by what it means, whatever the ids of the pairs."""
    with open_datastore(path) as opened:
        text = opened.pairs.get(set(opened.pair_ids.tolist()))
        told = zip(opened.pair_ids.tolist(), opened.positions.tolist(), opened.values.tolist(), strict=True)
        return [(text[i].source, text[i].target, place, value) for i, place, value in told]


def keys(path: Path) -> np.ndarray:
    with open_datastore(path) as opened:
        return np.array(datastore.array(path, opened.manifest, "keys"))


def neighbours(opened: Datastore, model: Model, texts: Sequence[Pair], k: int = 4) -> list[list[tuple[object, ...]]]:
    """The neighbours of these pairs' states, by what they mean."""
    forced = adaptation.force_pairs(model, [p.source for p in texts], [p.target for p in texts])
    assert forced is not None
    near = opened.neighbours(opened.project(forced.states), k)
    text = opened.pairs.get(set(opened.pair_ids.tolist()))
    return [
        sorted((text[int(opened.pair_ids[e])].source, int(opened.positions[e]), int(opened.values[e])) for e in row)
        for row in near.ids.tolist()
    ]


def files(path: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in path.iterdir()}


def a_file(path: Path, name: str) -> Path:
    return path / read_manifest(path).files[name].name


# -- opening -----------------------------------------------------------------------------------------------------------


def test_what_is_not_there_is_said_with_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(DatastoreError, match="no datastore is here; make one with `clknn adapt"):
        open_datastore(tmp_path / "nowhere")
    with pytest.raises(DatastoreError, match=r"a folder without manifest\.json is no datastore"):
        open_datastore(tmp_path)
    (tmp_path / "file").write_text("x")
    with pytest.raises(DatastoreError, match="is a file, and a datastore is a folder"):
        open_datastore(tmp_path / "file")


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "{}", '"x"', "null", '{"format": 1}', '{"format": 1, "files": {}, "mixing": null}', "\xff"],
)
def test_a_damaged_manifest_is_refused(store: Path, text: str) -> None:
    (store / "manifest.json").write_bytes(text.encode("latin1"))
    with pytest.raises(DatastoreError, match=r"manifest\.json: damaged .*; build the datastore again"):
        open_datastore(store)


def test_another_format_version_is_refused_with_both_versions(store: Path) -> None:
    raw = json.loads((store / "manifest.json").read_text())
    (store / "manifest.json").write_text(json.dumps({"format": 3, "entries": raw["entries"]}))
    with pytest.raises(DatastoreError, match="format version 3, and this clknn reads versions 1 to 2"):
        open_datastore(store)


def test_a_datastore_of_the_first_format_opens_as_what_it_is(store: Path) -> None:
    """It had no end penalty."""
    raw = json.loads((store / "manifest.json").read_text())
    del raw["end_penalty"]
    (store / "manifest.json").write_text(json.dumps(raw | {"format": 1}))
    with open_datastore(store) as opened:
        assert opened.manifest.end_penalty == 0


PARTS = ("states", "values", "pairs", "positions", "keys", "adapter", "projection", "index", "text")


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("damage", ["missing", "truncated", "longer", "empty"])
def test_a_file_of_another_size_is_named_and_refused(store: Path, part: str, damage: str) -> None:
    file = a_file(store, part)
    if damage == "missing":
        file.unlink()
    else:
        whole = file.read_bytes()
        file.write_bytes({"truncated": whole[:-1], "longer": whole + b"\0", "empty": b""}[damage])
    with pytest.raises(DatastoreError, match=rf"{file.name}: .* where the manifest has [\d,]+; restore it"):
        open_datastore(store)
    assert any(file.name in wrong for wrong in verify(store))


@pytest.mark.parametrize("part", ["values", "pairs", "positions", "keys", "projection", "index", "text"])
def test_a_file_of_the_right_size_that_is_something_else_is_refused(store: Path, part: str) -> None:
    file = a_file(store, part)
    file.write_bytes(b"no such thing " * (file.stat().st_size // 14) + b"x" * (file.stat().st_size % 14))
    with pytest.raises(DatastoreError, match=file.name):
        open_datastore(store)


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("where", [0.0, 0.5, 1.0])
def test_verify_finds_one_flipped_bit_in_any_file(store: Path, part: str, where: float) -> None:
    assert verify(store) == []
    file = a_file(store, part)
    content = bytearray(file.read_bytes())
    content[int(where * (len(content) - 1))] ^= 1
    file.write_bytes(content)
    (wrong,) = verify(store)
    assert wrong.startswith(f"{file}: its checksum is not the manifest's")


def test_verify_counts_pairs_that_text_and_entries_disagree_about(store: Path) -> None:
    text = a_file(store, "text")
    with Pairs.open(text, write=True) as record:
        record.remove([next(i for i, _ in record.each("stored"))])
    manifest = read_manifest(store)
    (store / "manifest.json").write_text(
        datastore._text(replace(manifest, files=manifest.files | {"text": datastore.mark_of(text)}))
    )
    stored = manifest.stored
    assert [w.removeprefix(f"{store}: ") for w in verify(store)] == [
        "1 pairs have entries and no text; build again",
        f"{stored - 1} pairs stored, and the manifest has {stored}",
    ]


def test_more_neighbours_than_entries_are_not_given(store: Path, model: Model) -> None:
    with open_datastore(store, model) as opened:
        states = datastore.array(store, opened.manifest, "states")[:1].astype(np.float32)
        query = opened.project(adaptation.torch.from_numpy(states))
        assert opened.neighbours(query, opened.entries).found.all()
        with pytest.raises(InputError, match=rf"k is {opened.entries + 1} and .* has {opened.entries} entries"):
            opened.neighbours(query, opened.entries + 1)


# -- changing ----------------------------------------------------------------------------------------------------------


def test_build_then_add_equals_building_both(made: Made, model: Model) -> None:
    path, whole = made(ROWS[:25]), made(ROWS, "whole")
    datastore.add(path, ROWS[25:32], model)
    ids = datastore.add(path, ROWS[32:], model)
    assert ids == range(32, 40)
    assert entries(path) == entries(whole)
    np.testing.assert_allclose(keys(path).astype(float), keys(whole).astype(float), rtol=2e-3, atol=2e-3)
    assert verify(path) == []
    with open_datastore(path) as ours, open_datastore(whole) as theirs:
        assert neighbours(ours, model, ROWS) == neighbours(theirs, model, ROWS)
        assert ours.manifest.stored == theirs.manifest.stored == 40


def test_added_keys_are_what_the_datastores_own_projection_makes(store: Path, model: Model) -> None:
    before = keys(store)
    datastore.add(store, [Pair("haus feuer haus", "house fire house", ROWS[0].origin)], model)
    np.testing.assert_array_equal(keys(store)[: len(before)], before)
    with open_datastore(store) as opened:
        states = datastore.array(store, opened.manifest, "states")[len(before) :].astype(np.float32)
        own = opened.project(adaptation.torch.from_numpy(states)).numpy()
    assert len(own) > 0
    np.testing.assert_allclose(keys(store)[len(before) :], own, atol=1e-3)


def test_a_pair_that_is_there_already_is_not_added_again(made: Made, model: Model) -> None:
    path, tally = made(ROWS), Tally()
    before = entries(path)
    assert len(datastore.add(path, ROWS[:3], model, tally)) == 0
    assert tally.skipped["duplicate"].count == 3
    assert entries(path) == before
    assert verify(path) == []


def held_out(path: Path) -> dict[str, list[Pair]]:
    with open_datastore(path) as opened:
        return {role: [pair for _, pair in opened.pairs.each(role)] for role in ("tune", "test")}


@pytest.mark.parametrize("role", ["tune", "test"])
def test_a_held_out_pair_that_is_added_gets_its_entries(store: Path, model: Model, role: str) -> None:
    before, held, tally = entries(store), held_out(store), Tally()
    manifest = read_manifest(store)
    added = held[role][1]
    (number,) = datastore.add(store, [added], model, tally)
    (tokens,) = model.tokenise_targets([added.target])
    new = [(added.source, added.target, place, token) for place, token in enumerate(tokens)]
    assert entries(store) == before + new
    assert (tally.kept, tally.skipped) == (1, {})
    assert held_out(store) == held | {role: [pair for pair in held[role] if pair != added]}
    after = read_manifest(store)
    assert (after.stored, after.entries) == (manifest.stored + 1, manifest.entries + len(new))
    counts = manifest.measured["build"]["held out"]
    assert after.measured["build"]["held out"] == counts | {role: counts[role] - 1}
    assert verify(store) == []
    with open_datastore(store) as opened:
        assert opened.pair_ids[-1] == number
    datastore.remove(store, [number])
    assert entries(store) == before


def test_a_held_out_pair_like_an_added_one_is_stored_with_it(store: Path, model: Model) -> None:
    held, before = held_out(store), entries(store)
    like = Pair(held["tune"][0].source.upper(), "cat cat", ROWS[0].origin)
    assert len(datastore.add(store, [like], model)) == 2
    assert {row[0] for row in entries(store)} - {row[0] for row in before} == {like.source, held["tune"][0].source}
    assert held_out(store) == held | {"tune": held["tune"][1:]}
    assert verify(store) == []


def test_a_tuning_pair_of_a_file_of_its_own_is_not_stored_with_one_like_it(model: Model, tmp_path: Path) -> None:
    files = [tiny.write_tsv(tmp_path / f"{name}.tsv", rows) for name, rows in (("tm", ROWS), ("dev", UNSEEN))]
    adaptation.adapt(tmp_path / "s", [files[0]], model, adaptation.KNN_MT, 0, tune_on=[files[1]])
    like = Pair(UNSEEN[3].source.upper(), "cat cat", ROWS[0].origin)
    assert len(datastore.add(tmp_path / "s", [like, UNSEEN[5]], model)) == 2
    assert {row[0] for row in entries(tmp_path / "s")} == {p.source for p in (*ROWS, like, UNSEEN[5])}
    kept = [p.source for i, p in enumerate(UNSEEN) if i not in (3, 5)]
    assert [p.source for p in held_out(tmp_path / "s")["tune"]] == kept
    assert read_manifest(tmp_path / "s").measured["build"]["held out"]["tune"] == len(kept)


def test_held_out_pairs_can_be_removed_and_are_not_counted_any_more(store: Path) -> None:
    with open_datastore(store) as opened:
        ids = [number for role in ("tune", "test") for number, _ in opened.pairs.each(role)]
    before = entries(store)
    assert datastore.remove(store, ids) == len(ids)
    assert entries(store) == before
    assert read_manifest(store).measured["build"]["held out"] == {"tune": 0, "test": 0}


@pytest.mark.parametrize("gone", [[0], [39], [3, 4, 30], list(range(39))])
def test_remove_equals_never_having_had(made: Made, model: Model, gone: list[int]) -> None:
    path, never = made(ROWS), made([row for i, row in enumerate(ROWS) if i not in gone], "never")
    assert datastore.remove(path, gone) == len(gone)
    assert entries(path) == entries(never)
    np.testing.assert_allclose(keys(path).astype(float), keys(never).astype(float), rtol=2e-3, atol=2e-3)
    assert verify(path) == []
    with open_datastore(path) as ours, open_datastore(never) as theirs:
        k = min(4, theirs.entries)
        assert neighbours(ours, model, ROWS, k) == neighbours(theirs, model, ROWS, k)


def test_ids_are_never_used_again(made: Made, model: Model) -> None:
    path = made(ROWS[:10])
    datastore.remove(path, [9])
    assert datastore.add(path, [ROWS[9]], model) == range(10, 11)
    datastore.remove(path, [10])
    assert datastore.add(path, [ROWS[9]], model) == range(11, 12)


def test_ids_that_are_not_there_remove_nothing(made: Made) -> None:
    path = made(ROWS[:5])
    before = entries(path)
    assert datastore.remove(path, [77]) == 0
    assert entries(path) == before


def test_removing_everything_is_refused_and_removes_nothing(made: Made) -> None:
    path = made(ROWS[:3])
    before = files(path)
    with pytest.raises(InputError, match="would remove every entry; delete the folder instead"):
        datastore.remove(path, [0, 1, 2])
    assert files(path) == before


def test_what_is_left_after_removal_can_still_be_asked(made: Made, model: Model) -> None:
    """k was chosen for more entries than there are now."""
    path = made([Pair("haus", "house", ROWS[0].origin), *ROWS[:8]])
    with open_datastore(path) as opened:
        asked = opened.manifest.mixing
    assert asked is not None
    datastore.remove(path, range(1, 9))
    translator = Translator.open(path, model)
    assert translator.datastore is not None
    assert translator.combiner is not None
    with translator.datastore:
        assert translator.combiner.k == translator.datastore.entries < asked.k
        assert len(translator.translate(["haus"])) == 1


def change(path: Path, model: Model, kind: str) -> None:
    if kind == "add":
        datastore.add(path, [Pair("feuer feuer", "fire fire", ROWS[0].origin)], model)
    else:
        datastore.remove(path, [next(iter(open_ids(path)))])


def killed(*_: object, **__: object) -> None:
    raise KeyboardInterrupt


def strangers(path: Path) -> set[str]:
    """Files that the manifest does not name."""
    named = {mark.name for mark in read_manifest(path).files.values()}
    return {file.name for file in path.iterdir()} - named - {"manifest.json", "lock"}


def open_ids(path: Path) -> list[int]:
    with open_datastore(path) as opened:
        return sorted(set(opened.pair_ids.tolist()))


@pytest.mark.parametrize("kind", ["add", "remove"])
def test_a_change_killed_before_it_is_committed_never_happened(
    store: Path, model: Model, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, answers = files(store), entries(store)

    monkeypatch.setattr(datastore, "write_atomically", killed)
    with pytest.raises(KeyboardInterrupt):
        change(store, model, kind)
    monkeypatch.undo()
    after = files(store)
    assert {name: after[name] for name in before} == before
    assert strangers(store)
    assert entries(store) == answers
    assert verify(store) == []
    change(store, model, kind)
    assert not strangers(store)
    assert entries(store) != answers


@pytest.mark.parametrize(
    ("kind", "killed_in"),
    [("add", "add"), ("add", "blocks"), ("add", "mark_of"), ("remove", "remove"), ("remove", "mark_of")],
)
def test_what_a_killed_change_left_is_swept_away_by_the_next(
    store: Path, model: Model, kind: str, killed_in: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = entries(store)
    monkeypatch.setattr(Pairs if killed_in == kind else datastore, killed_in, killed)
    with pytest.raises(KeyboardInterrupt):
        change(store, model, kind)
    monkeypatch.undo()
    assert entries(store) == before
    assert strangers(store)
    change(store, model, kind)
    assert entries(store) != before
    assert verify(store) == []
    assert not strangers(store)


@pytest.mark.parametrize("kind", ["add", "remove"])
def test_a_change_killed_behind_its_commit_has_happened(
    store: Path, model: Model, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, commit = entries(store), datastore.commit

    def killed_while_sweeping(path: Path, manifest: datastore.Manifest) -> None:
        with monkeypatch.context() as patched:
            patched.setattr(datastore, "_sweep", killed)
            commit(path, manifest)

    monkeypatch.setattr(datastore, "commit", killed_while_sweeping)
    with pytest.raises(KeyboardInterrupt):
        change(store, model, kind)
    monkeypatch.undo()
    assert entries(store) != before
    assert verify(store) == []
    assert strangers(store)
    with datastore.writing(store):
        assert not strangers(store)


def test_the_journal_of_a_killed_change_is_not_played_into_a_later_one(store: Path, model: Model) -> None:
    """SQLite would: it takes the journal beside a file for that file's, and rolls it back."""
    text = store / "text.1.sqlite"  # where the next change writes
    shutil.copyfile(a_file(store, "text"), text)
    other = sqlite3.connect(text, isolation_level=None)
    other.execute("PRAGMA cache_size = 1")
    other.execute("UPDATE pairs SET target = 'other'")
    other.execute("BEGIN IMMEDIATE")
    other.execute("UPDATE pairs SET source = source || hex(randomblob(2000))")
    journal = (store / "text.1.sqlite-journal").read_bytes()
    other.execute("ROLLBACK")
    other.close()
    text.unlink()
    (store / "text.1.sqlite-journal").write_bytes(journal)
    assert journal.strip(b"\0")
    datastore.add(store, [Pair("feuer feuer", "fire fire", ROWS[0].origin)], model)
    assert [pair for pair in entries(store) if pair[1] == "other"] == []
    assert {file.name for file in store.iterdir() if "text" in file.name} == {"text.1.sqlite"}


def test_a_reader_keeps_what_it_opened_while_others_change_it(made: Made, model: Model) -> None:
    path = made(ROWS)
    with open_datastore(path) as opened:
        before = neighbours(opened, model, ROWS)
        datastore.remove(path, list(range(20)))
        datastore.add(path, tiny.pairs(50)[45:], model)
        assert neighbours(opened, model, ROWS) == before


@pytest.mark.parametrize(
    ("home", "name"),
    [
        (datastore, "_parse"), (datastore, "array"), (datastore.projections, "read"), (datastore.indices, "read"),
        (Pairs, "open"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("changes", [1, 2])
def test_a_reader_that_comes_while_others_change_it_opens_one_state_of_it(
    made: Made, model: Model, home: Any, name: str, changes: int
) -> None:
    """The writer commits, and sweeps what the reader was about to open."""
    path, original = made(ROWS), getattr(home, name)
    named: set[str] = set()
    with pytest.MonkeyPatch.context() as patched:

        def overtaken(*given: Any) -> Any:
            patched.undo()
            answer = original(*given) if name == "_parse" else None
            for i in range(changes):  # the same number of entries again, under other names
                named.update(mark.name for mark in read_manifest(path).files.values())
                datastore.add(path, [ROWS[0]], model) if i else datastore.remove(path, [0])
            return answer or original(*given)

        patched.setattr(home, name, overtaken)
        opened = open_datastore(path, model)
    with opened:
        assert opened.manifest == read_manifest(path)
        assert opened.entries == opened.manifest.entries
        assert not named & {opened.manifest.files[part].name for part in ("states", "keys", "index", "text")}
        with open_datastore(path) as afterwards:
            assert neighbours(opened, model, ROWS) == neighbours(afterwards, model, ROWS)


def test_a_reader_that_is_always_overtaken_gives_up(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[datastore.Manifest] = []

    def another(path: Path) -> datastore.Manifest:
        manifest = replace(datastore._parse(path / "manifest.json"), stored=len(seen))
        seen.append(manifest)
        return manifest

    a_file(store, "index").unlink()
    monkeypatch.setattr(datastore, "read_manifest", another)
    with pytest.raises(DatastoreError, match=r"index\.faiss: nothing where the manifest has"):
        open_datastore(store)
    assert len(seen) == datastore.OPENINGS + 1


def test_one_writer_at_a_time(store: Path, model: Model) -> None:
    before = files(store)
    with datastore.writing(store):
        for attempt in (
            lambda: change(store, model, "add"),
            lambda: change(store, model, "remove"),
            lambda: adaptation.train(store, QUICK, model),
            lambda: adaptation.project(store, model, vanilla=True),
            lambda: adaptation.tune(store, model),
        ):
            with pytest.raises(DatastoreError, match="another clknn is writing to it; wait until it is done"):
                attempt()
    assert files(store) == before


@pytest.mark.parametrize("change_it", [lambda p, m: datastore.add(p, [], m), lambda p, _: datastore.remove(p, [0])])
def test_changing_what_is_no_datastore_leaves_no_trace(
    tmp_path: Path, model: Model, change_it: Callable[[Path, Model], object]
) -> None:
    (tmp_path / "letter.txt").write_text("mine")
    with pytest.raises(DatastoreError, match="is no datastore"):
        change_it(tmp_path, model)
    assert [file.name for file in tmp_path.iterdir()] == ["letter.txt"]
