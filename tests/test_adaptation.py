"""The stages: each by itself, all together, in any order, stopped anywhere and taken up again."""

from __future__ import annotations

import errno
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sacrebleu.tokenizers import tokenizer_ja_mecab

import tiny
from clknn import adaptation, adapter, corpus, datastore, index, projection, states, tuning
from clknn import model as models
from clknn.adapter import AdapterSettings
from clknn.corpus import Origin, Pair, Pairs, Tally, fold
from clknn.datastore import open_datastore, read_draft, read_manifest, verify
from clknn.errors import DatastoreError, InputError
from clknn.evaluation import Comparison, Score
from clknn.methods.gate import GateTuner
from clknn.methods.neighbourhood import RefineSettings
from clknn.model import Model
from clknn.tuning import Grid

QUICK = AdapterSettings(steps=6, validate_every=2, batch=16, warmup=2)


@pytest.fixture(scope="module")
def model(load: Callable[[str], Model]) -> Model:
    return load("marian")


@pytest.fixture(scope="module")
def tm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write_tsv(tmp_path_factory.mktemp("tm") / "tm.tsv", tiny.pairs(60))


@pytest.fixture(scope="module", autouse=True)
def small_windows() -> Iterator[None]:
    """Several progress marks even for a small memory."""
    write = states.write_states
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(adaptation, "write_states", lambda *given: write(*given, window=20))
        yield


def run(path: Path, tm: Path, model: Model, vanilla: bool = False) -> None:
    """All stages but the verdict."""
    adaptation.build(path, [tm], model)
    if not vanilla:
        adaptation.train(path, QUICK, model)
    adaptation.project(path, model, vanilla)
    adaptation.tune(path, model)


@pytest.fixture(scope="module")
def whole(
    small_windows: None,  # noqa: ARG001 (pairs are batched by window, and rounding by batch)
    tm: Path,
    model: Model,
    tmp_path_factory: pytest.TempPathFactory,
) -> Path:
    """What an uninterrupted run makes; to be copied, not changed."""
    path = tmp_path_factory.mktemp("whole") / "store"
    run(path, tm, model)
    return path


@pytest.fixture
def store(whole: Path, tmp_path: Path) -> Path:
    return shutil.copytree(whole, tmp_path / "store")


def outcome(path: Path) -> dict[str, object]:
    """Everything that a datastore answers with: each file's bytes, the text's rows, the settings."""
    manifest = read_manifest(path)
    assert verify(path) == []
    with Pairs.open(path / manifest.files["text"].name) as record:
        rows = [list(record.each(role)) for role in ("stored", "tune", "test")]
    files = {name: mark.blake2b for name, mark in manifest.files.items() if name != "text"}
    return {"rows": rows, "files": files, "mixing": manifest.mixing, "options": manifest.options} | {
        "tally": manifest.measured["build"]["tally"]
    }


def strangers(path: Path) -> set[str]:
    named = {mark.name for mark in read_manifest(path).files.values()}
    return {file.name for file in path.iterdir()} - named - {"manifest.json", "lock"}


# -- stopped and taken up again ----------------------------------------------------------------------------------------

# (where, its name, at which call): every function that writes, and the long ones between
POINTS = [
    (corpus.Pairs, "create", 1), (corpus.Pairs, "add", 1), (corpus.Pairs, "hold_out", 1),
    (datastore, "write_atomically", 1), (datastore, "write_atomically", 2), (datastore, "write_atomically", 3),
    (states.GrowingArray, "append", 1), (states.GrowingArray, "append", 3), (states.GrowingArray, "append", 6),
    (states, "write_atomically", 1), (states, "write_atomically", 2), (states.GrowingArray, "_write_header", 8),
    (datastore, "mark_of", 1), (datastore, "mark_of", 5),
    (adapter._Run, "learn", 1), (adapter._Run, "learn", 4), (adapter._Run, "save", 1), (adapter._Run, "save", 2),
    (projection, "save", 1), (datastore, "write_atomically", 4),
    (states.GrowingArray, "append", 13), (index, "save", 1), (projection, "save", 2),
    (datastore, "write_atomically", 5), (datastore, "_sweep", 1), (datastore, "_sweep", 2),
    (tuning, "tune", 1), (datastore, "write_atomically", 6),
]  # fmt: skip


@contextmanager
def failing(home: Any, name: str, call: int, error: BaseException, afterwards: bool) -> Iterator[list[int]]:
    """Inside, one call of a function raises, before or after it has done its work."""
    original, calls = getattr(home, name), [0]

    def counted(*given: Any, **named: Any) -> Any:
        calls[0] += 1
        if calls[0] == call and not afterwards:
            raise error
        answer = original(*given, **named)
        if calls[0] == call:
            raise error
        return answer

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(home, name, counted)
        yield calls


@pytest.mark.parametrize(("home", "name", "call"), POINTS)
def test_ctrl_c_anywhere_and_the_same_again_end_like_a_run_that_was_left_alone(
    whole: Path, tm: Path, model: Model, tmp_path: Path, home: Any, name: str, call: int
) -> None:
    path, afterwards = tmp_path / "store", call % 2 == 0
    with failing(home, name, call, KeyboardInterrupt(), afterwards), pytest.raises(KeyboardInterrupt):
        run(path, tm, model)
    if not (path / "manifest.json").exists():
        with pytest.raises(DatastoreError):
            open_datastore(path)
    run(path, tm, model)
    assert outcome(path) == outcome(whole)
    assert not strangers(path)


FULL = OSError(errno.ENOSPC, "No space left on device")
WRITES = [point for point in POINTS if point[1] not in ("learn", "tune", "hold_out", "_sweep")]


@pytest.mark.parametrize(("home", "name", "call"), WRITES)
def test_a_disk_that_is_full_anywhere_is_said_and_the_same_again_ends_well(
    whole: Path, tm: Path, model: Model, tmp_path: Path, home: Any, name: str, call: int
) -> None:
    path = tmp_path / "store"
    with failing(home, name, call, FULL, afterwards=False), pytest.raises(DatastoreError) as caught:
        run(path, tm, model)
    said = str(caught.value)
    assert said.startswith(f"{path}: the disk is full (")
    assert " MB left); free " in said
    assert said.endswith("and run the same command again: what was done is kept")
    if (path / "draft.json").exists() and "build" in read_draft(path).measured:  # type: ignore[union-attr]
        assert "free about 1 MB there" in said
    if not (path / "manifest.json").exists():
        with pytest.raises(DatastoreError):
            open_datastore(path)
    run(path, tm, model)
    assert outcome(path) == outcome(whole)


@pytest.fixture
def little_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 600 kB, where mounting is permitted."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=600k", "none", str(disk)], capture_output=True, text=True, check=False
    )
    if mounted.returncode:
        pytest.skip(f"no disk of our own: {mounted.stderr.strip()}")
    yield disk
    subprocess.run(["umount", "-l", str(disk)], check=True)


@pytest.mark.parametrize(
    ("vanilla", "kilobytes"),  # text, states, states behind a mark, two checkpoints; keys, index
    [(False, 4), (False, 40), (False, 52), (False, 100), (False, 220), (True, 72), (True, 100)],
)
def test_a_disk_that_is_really_full(
    tm: Path, model: Model, little_disk: Path, tmp_path: Path, vanilla: bool, kilobytes: int
) -> None:
    path, ballast = little_disk / "store", little_disk / "ballast"
    with ballast.open("wb") as file:
        file.write(b"\0" * (600 - kilobytes) * 1000)
    with pytest.raises(DatastoreError, match=r"the disk is full \([\d.]+ MB left\); free (about \d+ MB|some space)"):
        run(path, tm, model, vanilla)
    with pytest.raises(DatastoreError):
        open_datastore(path)
    ballast.unlink()
    run(path, tm, model, vanilla)
    run(tmp_path / "whole", tm, model, vanilla)
    assert outcome(path) == outcome(tmp_path / "whole")
    assert not strangers(path)


def test_what_a_reading_that_was_killed_had_begun_does_not_bind_the_next(
    tm: Path, model: Model, tmp_path: Path
) -> None:
    with failing(Pairs, "add", 1, KeyboardInterrupt(), True), pytest.raises(KeyboardInterrupt):
        adaptation.build(tmp_path / "s", [tm], model, hold_out=0)
    manifest = adaptation.build(tmp_path / "s", [tm], model, hold_out=1, seed=3)
    assert manifest.options["build"]["seed"] == 3


def test_what_was_skipped_is_reported_by_the_run_that_takes_up_a_killed_one(model: Model, tmp_path: Path) -> None:
    rows = [*tiny.pairs(30), tiny.pairs(1)[0], Pair("haus " * 80, "house", Origin("x")), *tiny.pairs(60)[30:]]
    file, tallies = tiny.write_tsv(tmp_path / "tm.tsv", rows), [Tally(), Tally()]
    with failing(states, "write_atomically", 2, KeyboardInterrupt(), True), pytest.raises(KeyboardInterrupt):
        adaptation.build(tmp_path / "s", [file], model, hold_out=0, tally=tallies[0])
    manifest = adaptation.build(tmp_path / "s", [file], model, hold_out=0, tally=tallies[1])
    assert tallies[1].lines() == manifest.measured["build"]["tally"] == [
        "read 62 units, kept 61",
        "skipped 1: duplicate (first: tm.tsv:31)",
        "skipped 1: longer than the model's 64 tokens (first: tm.tsv:32)",
    ]  # fmt: skip


def test_a_build_that_another_process_finished_in_the_meantime_is_left_alone(
    whole: Path, tm: Path, model: Model, tmp_path: Path
) -> None:
    path, make_folder = tmp_path / "s", adaptation._make_folder

    def overtaken(folder: Path) -> bool:
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(adaptation, "_make_folder", make_folder)
            run(folder, tm, model)
        return False

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(adaptation, "_make_folder", overtaken)
        adaptation.build(path, [tm], model)
    assert outcome(path) == outcome(whole)


# -- the stages --------------------------------------------------------------------------------------------------------


def test_the_stages_by_themselves_give_what_adapt_gives(whole: Path, tm: Path, model: Model, tmp_path: Path) -> None:
    verdict = adaptation.adapt(tmp_path / "s", [tm], model, adaptation.Method(QUICK))
    assert outcome(tmp_path / "s") == outcome(whole)
    assert verdict is not None
    assert len(verdict.base) == len(verdict.ours) == len(verdict.references) == verdict.comparison.segments == 3


def test_stages_that_are_done_are_passed_over(store: Path, tm: Path, model: Model) -> None:
    before = {file.name: (file.stat().st_mtime_ns, file.stat().st_ino) for file in store.iterdir()}
    manifest = read_manifest(store)
    assert adaptation.build(store, [tm], model) == manifest
    assert adaptation.train(store, QUICK, model) is None
    assert adaptation.project(store, model) == manifest
    after = {file.name: (file.stat().st_mtime_ns, file.stat().st_ino) for file in store.iterdir()}
    assert {k: v for k, v in after.items() if k != "lock"} == {k: v for k, v in before.items() if k != "lock"}
    assert adaptation.tune(store, model).mixing == manifest.mixing
    assert verify(store) == []


def test_a_stage_out_of_order_says_what_comes_first(tm: Path, model: Model, tmp_path: Path) -> None:
    path = tmp_path / "s"
    stages: dict[str, Callable[[], object]] = {
        "train": lambda: adaptation.train(path, QUICK, model),
        "project": lambda: adaptation.project(path, model),
        "tune": lambda: adaptation.tune(path, model),
        "verdict": lambda: adaptation.verdict(path, model),
    }
    for stage in stages.values():
        with pytest.raises(DatastoreError, match="no datastore is here; make one with `clknn adapt"):
            stage()
    with failing(states, "write_atomically", 2, KeyboardInterrupt(), True), pytest.raises(KeyboardInterrupt):
        adaptation.build(path, [tm], model)
    for stage in stages.values():
        with pytest.raises(DatastoreError, match="half-built: 40 pairs force-decoded; run the command that began it"):
            stage()
    manifest = adaptation.build(path, [tm], model)
    for name in ("tune", "verdict"):
        with pytest.raises(DatastoreError, match=f"half-built: {manifest.entries} entries and no keys; run `clknn pro"):
            stages[name]()
    for name in ("project", "train", "tune", "verdict"):  # without an adapter: PCA and norm alone
        stages[name]()
    assert read_manifest(path).files["projection"] != read_manifest(path).files["adapter"]


def test_knn_mt_on_a_trained_datastore_and_back(store: Path, whole: Path, model: Model) -> None:
    manifest = adaptation.project(store, model, vanilla=True)
    assert "tune" not in manifest.options
    assert manifest.mixing is not None
    assert not manifest.mixing.scaled
    with open_datastore(store, model) as opened:
        assert not opened.projection.normed
        states_of = datastore.array(store, opened.manifest, "states")
        np.testing.assert_array_equal(datastore.array(store, opened.manifest, "keys"), states_of)
    with pytest.raises(InputError, match="w\\* needs similarities"):
        adaptation.tune(store, model, Grid(scaled=True))
    assert adaptation.tune(store, model).mixing.temperature > 0  # type: ignore[union-attr]
    adaptation.project(store, model)
    adaptation.tune(store, model)
    ours, theirs = outcome(store), outcome(whole)
    assert ours == theirs
    assert not strangers(store)


@pytest.mark.parametrize("kind", ["add", "remove"])
def test_entries_that_changed_are_trained_on_and_projected_again(store: Path, model: Model, kind: str) -> None:
    if kind == "add":
        datastore.add(store, tiny.pairs(80, seed=3)[60:], model)
    else:
        datastore.remove(store, range(10))
    changed = read_manifest(store)
    assert adaptation.train(store, QUICK, model) is not None
    trained = read_manifest(store)
    assert trained.files["adapter"].blake2b != changed.files["adapter"].blake2b
    projected = adaptation.project(store, model)
    assert projected.files["keys"].blake2b != changed.files["keys"].blake2b
    assert "tune" not in projected.options
    assert verify(store) == []
    assert adaptation.train(store, QUICK, model) is None
    assert adaptation.project(store, model) == projected
    with open_datastore(store) as opened:
        assert len(opened.index.keys) == opened.entries == changed.entries


def test_keys_are_made_again_for_entries_that_changed_though_no_adapter_was_trained(
    store: Path, model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And with them the index, which stays what it was while pairs are added: exact, however many there are."""
    adaptation.project(store, model, vanilla=True)
    monkeypatch.setattr(index, "EXACT_BELOW", read_manifest(store).entries + 1)
    datastore.add(store, tiny.pairs(80, seed=3)[60:], model)
    with open_datastore(store) as opened:
        assert opened.index.exact
        assert opened.entries > index.EXACT_BELOW
    done = adaptation.project(store, model, vanilla=True)
    with open_datastore(store) as opened:
        assert not opened.index.exact
    assert done.measured["project"]["index"].startswith("inverted file")
    assert adaptation.project(store, model, vanilla=True) == done


def test_another_datastores_states_that_changed_are_trained_on_again(store: Path, model: Model, tmp_path: Path) -> None:
    shutil.copytree(store, tmp_path / "other")
    assert adaptation.train(store, QUICK, model, states_of=tmp_path / "other") is not None
    assert adaptation.train(store, QUICK, model, states_of=tmp_path / "other") is None
    datastore.remove(store, range(10))
    assert adaptation.train(store, QUICK, model, states_of=tmp_path / "other") is None
    datastore.remove(tmp_path / "other", range(10))
    assert adaptation.train(store, QUICK, model, states_of=tmp_path / "other") is not None


def test_train_on_another_datastores_states(store: Path, model: Model, tmp_path: Path) -> None:
    other = tiny.write_tsv(tmp_path / "other.tsv", tiny.pairs(50, seed=5))
    adaptation.build(tmp_path / "other", [other], model, hold_out=0)
    trained = adaptation.train(tmp_path / "other", QUICK, model)
    borrowed = adaptation.train(store, QUICK, model, states_of=tmp_path / "other")
    assert trained is not None
    assert borrowed is not None
    for ours, theirs in zip(borrowed.adapter.parameters(), trained.adapter.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    before = read_manifest(store)
    after = adaptation.project(store, model)
    assert before.options["train"]["states of"] == str(tmp_path / "other")
    assert after.files["keys"].blake2b != before.files["keys"].blake2b
    assert verify(store) == []


def test_train_on_the_states_of_what_is_not_there_or_another_models(
    store: Path, tm: Path, model: Model, load: Callable[[str], Model], tmp_path: Path
) -> None:
    before = read_manifest(store)
    with pytest.raises(DatastoreError, match="no datastore is here"):
        adaptation.train(store, QUICK, model, states_of=tmp_path / "nowhere")
    adaptation.build(tmp_path / "other", [tm], load("t5"), hold_out=0)
    with pytest.raises(DatastoreError, match=rf"{load('t5').fingerprint}.*{model.fingerprint}"):
        adaptation.train(store, QUICK, model, states_of=tmp_path / "other")
    assert read_manifest(store) == before


def test_training_with_other_settings_while_one_is_half_finished_is_refused(
    tm: Path, model: Model, tmp_path: Path
) -> None:
    adaptation.build(tmp_path / "s", [tm], model)
    with failing(adapter._Run, "save", 1, KeyboardInterrupt(), True), pytest.raises(KeyboardInterrupt):
        adaptation.train(tmp_path / "s", QUICK, model)
    with pytest.raises(InputError, match=r"training\.safetensors: .*other settings is half-finished"):
        adaptation.train(tmp_path / "s", replace(QUICK, temperature=0.5), model)
    assert adaptation.train(tmp_path / "s", QUICK, model) is not None
    assert adaptation.train(tmp_path / "s", replace(QUICK, temperature=0.5), model) is not None


def test_more_dimensions_than_there_are(store: Path, model: Model) -> None:
    before = read_manifest(store)
    with pytest.raises(InputError, match="size 33 is more than the 32 dimensions there are; choose fewer"):
        adaptation.project(store, model, size=33)
    assert read_manifest(store) == before
    assert adaptation.project(store, model, size=5).options["project"]["size"] == 5
    assert datastore.array(store, read_manifest(store), "keys").shape[1] == 5


# -- what may be built where -------------------------------------------------------------------------------------------


def test_other_files_or_options_are_refused_and_named(store: Path, tm: Path, model: Model, tmp_path: Path) -> None:
    before = outcome(store)
    with pytest.raises(DatastoreError, match=r"hold_out 300 and now 7, seed 0 and now 1\); choose another --out"):
        adaptation.build(store, [tm], model, hold_out=7, seed=1)
    other = tiny.write_tsv(tmp_path / "other.tsv", tiny.pairs(3))
    with pytest.raises(DatastoreError, match=r"files tm\.tsv \(\w{8}\) and now other\.tsv \(\w{8}\)\)"):
        adaptation.build(store, [other], model)
    with pytest.raises(DatastoreError, match=r"tune_on none and now other\.tsv"):
        adaptation.build(store, [tm], model, tune_on=[other])
    assert outcome(store) == before


def test_a_build_is_not_taken_up_in_another_precision(
    tm: Path, model: Model, checkpoints: Callable[[str], Path], tmp_path: Path
) -> None:
    """The fingerprint is the same, and the states would not be."""
    path, half = tmp_path / "s", models.load(str(checkpoints("marian")), "de", "en", dtype="bfloat16")
    assert half.fingerprint == model.fingerprint
    with failing(states, "write_atomically", 2, KeyboardInterrupt(), True), pytest.raises(KeyboardInterrupt):
        adaptation.build(path, [tm], model)
    for _ in range(2):  # half-finished, and finished
        with pytest.raises(DatastoreError, match=r"\(precision float32 and now bfloat16\); choose another --out"):
            adaptation.build(path, [tm], half)
        assert adaptation.build(path, [tm], model).options["build"]["precision"] == "float32"
    draft = read_draft(path)
    assert draft is not None
    del draft.options["build"]["precision"]  # as it was not noted once
    datastore.save_draft(path, draft)
    with pytest.raises(DatastoreError, match=r"\(precision unknown and now float32\); choose another --out"):
        adaptation.build(path, [tm], model)
    assert adaptation.build(tmp_path / "half", [tm], half).options["build"]["precision"] == "bfloat16"


def test_a_folder_with_other_files_is_refused_and_left_as_it_was(tm: Path, model: Model, tmp_path: Path) -> None:
    mine = tmp_path / "thesis"
    mine.mkdir()
    for name in ("text.sqlite", "lock"):
        (mine / name).write_text("mine")
    with pytest.raises(DatastoreError, match="the folder has other files in it; choose another --out"):
        adaptation.build(mine, [tm], model)
    assert {file.name: file.read_text() for file in mine.iterdir()} == {"text.sqlite": "mine", "lock": "mine"}
    with pytest.raises(DatastoreError, match=r"cannot be made a folder \(File exists\); choose another --out"):
        adaptation.build(tm, [tm], model)
    with pytest.raises(DatastoreError, match=r"cannot be made a folder \(Not a directory\)"):
        adaptation.build(tm / "store", [tm], model)


def test_a_file_that_gives_nothing_leaves_nothing(model: Model, tmp_path: Path) -> None:
    bad = tmp_path / "bad.tsv"
    bad.write_text("\t\n\t\n")
    with pytest.raises(InputError, match=r"bad\.tsv: no pair could be kept; skipped 2: empty source"):
        adaptation.build(tmp_path / "s", [bad], model)
    assert not (tmp_path / "s").exists()
    (tmp_path / "s").mkdir()
    with pytest.raises(InputError):
        adaptation.build(tmp_path / "s", [bad], model)
    assert list((tmp_path / "s").iterdir()) == []  # it was there before


def test_strict_stops_at_the_first_skip_and_leaves_nothing(model: Model, tmp_path: Path) -> None:
    file = tiny.write_tsv(tmp_path / "tm.tsv", [*tiny.pairs(5), tiny.pairs(1)[0]])
    with pytest.raises(InputError, match=r"tm\.tsv:6: duplicate; correct it"):
        adaptation.build(tmp_path / "s", [file], model, tally=Tally(strict=True))
    assert not (tmp_path / "s").exists()


# -- what is held out --------------------------------------------------------------------------------------------------


def roles(path: Path) -> dict[str, list[Pair]]:
    with Pairs.open(path / "text.sqlite") as record:
        return {role: [pair for _, pair in record.each(role)] for role in ("stored", "tune", "test")}


def test_nothing_held_out_also_stands_among_the_stored(model: Model, tmp_path: Path) -> None:
    """Also not with another case, nor with one side the same."""
    rows = tiny.pairs(80)
    shouted = [Pair(p.source.upper(), p.target.title(), p.origin) for p in rows[:40]]
    again = [Pair(p.source, f"{p.target} cat cat", p.origin) for p in rows[40:60]]
    file = tiny.write_tsv(tmp_path / "tm.tsv", [*rows, *shouted, *again])
    manifest = adaptation.build(tmp_path / "s", [file], model, hold_out=100)
    by_role = roles(tmp_path / "s")
    assert manifest.measured["build"]["held out"] == {"tune": 7, "test": 7}
    assert [len(by_role[role]) for role in ("stored", "tune", "test")] == [126, 7, 7]
    for side in ("source", "target"):
        stored, tune, test = ({fold(getattr(p, side)) for p in by_role[r]} for r in ("stored", "tune", "test"))
        assert not (tune | test) & stored
        assert not tune & test
    held_out = {p.source for role in ("tune", "test") for p in by_role[role]}
    ids = np.load(tmp_path / "s" / "pairs.npy")
    with Pairs.open(tmp_path / "s" / "text.sqlite") as record:
        assert not {pair.source for pair in record.get(set(ids.tolist())).values()} & held_out


def test_tuning_on_pairs_from_a_file_of_their_own(tm: Path, model: Model, tmp_path: Path) -> None:
    own = tiny.write_tsv(tmp_path / "dev.tsv", [*tiny.pairs(12, seed=8), tiny.pairs(1)[0]])
    tally = Tally()
    verdict = adaptation.adapt(tmp_path / "s", [tm], model, adaptation.KNN_MT, tally=tally, tune_on=[own])
    by_role = roles(tmp_path / "s")
    assert [p.source for p in by_role["tune"]] == [p.source for p in tiny.pairs(12, seed=8)]
    assert {p.origin.file for p in by_role["tune"]} == {"dev.tsv"}
    assert len(by_role["test"]) == 3
    assert {p.origin.file for p in by_role["test"]} == {"tm.tsv"}
    assert tally.skipped[corpus.LIKE_OTHERS].first == "dev.tsv:13"  # it is stored already, or held out
    assert "tune" in read_manifest(tmp_path / "s").options
    assert verdict is not None


def test_a_tuning_pair_like_one_of_the_memory_is_left_out_and_its_number_said(
    tm: Path, model: Model, tmp_path: Path
) -> None:
    """Also where the source is the same and the target is another."""
    rows, clean = tiny.pairs(60), tiny.pairs(12, seed=8)
    alike = [rows[0], Pair(rows[1].source.upper(), "cat cat cat", Origin("")), Pair("hund", rows[2].target, Origin(""))]
    own = tiny.write_tsv(tmp_path / "dev.tsv", [*alike, *clean])
    manifest = adaptation.build(tmp_path / "s", [tm], model, tune_on=[own])
    by_role = roles(tmp_path / "s")
    assert [p.source for p in by_role["tune"]] == [p.source for p in clean]
    for side in ("source", "target"):
        stored, tune, test = ({fold(getattr(p, side)) for p in by_role[r]} for r in ("stored", "tune", "test"))
        assert not tune & (stored | test)
    assert manifest.measured["build"]["tuning pairs left out"] == 3
    assert f"skipped 3: {corpus.LIKE_OTHERS} (first: dev.tsv:1)" in manifest.measured["build"]["tally"]
    with pytest.raises(InputError, match=r"dev\.tsv: no pair to tune on is left; skipped 3: tuning pair"):
        adaptation.build(tmp_path / "t", [tm], model, tune_on=[tiny.write_tsv(tmp_path / "dev.tsv", alike)])
    assert not (tmp_path / "t").exists()


def test_a_held_out_pair_that_the_model_cannot_hold_is_counted_and_does_not_stop_the_verdict(
    model: Model, tmp_path: Path
) -> None:
    rows = [Pair(p.source + " haus" * 70, p.target, p.origin) for p in tiny.pairs(30)]
    file, tally = tiny.write_tsv(tmp_path / "tm.tsv", [*tiny.pairs(50, seed=4), *rows]), Tally()
    verdict = adaptation.adapt(tmp_path / "s", [file], model, adaptation.KNN_MT, tally=tally)
    by_role = roles(tmp_path / "s")
    too_long = {role: sum(len(p.source) > 200 for p in by_role[role]) for role in by_role}
    assert 0 < too_long["test"] < 4, "the seed must hold out one that is too long and one that is not"
    assert verdict is not None
    assert len(verdict.references) == 4 - too_long["test"]
    assert tally.skipped["longer than the model's 64 tokens"].count == 30
    assert read_manifest(tmp_path / "s").measured["build"]["held out"]["test"] == 4 - too_long["test"]


# -- little to learn from ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("vanilla", [False, True])
@pytest.mark.parametrize("rows", [1, 2, 5, 19, 20])
def test_a_small_memory_gives_a_datastore_or_says_why_not(
    model: Model, tmp_path: Path, rows: int, vanilla: bool
) -> None:
    file = tiny.write_tsv(tmp_path / "tm.tsv", tiny.pairs(rows, seed=2))
    verdict = adaptation.adapt(
        tmp_path / "s", [file], model, adaptation.KNN_MT if vanilla else adaptation.Method(QUICK)
    )
    assert (verdict is None) == (rows < 20)
    with open_datastore(tmp_path / "s", model) as opened:
        assert opened.manifest.stored == rows - (2 if rows == 20 else 0)
        assert opened.manifest.mixing is not None
        assert opened.manifest.mixing.k <= opened.entries
    assert verify(tmp_path / "s") == []
    with adaptation.Translator.open(tmp_path / "s", model).datastore as opened:  # type: ignore[union-attr]
        translator = adaptation.Translator(model, opened, opened.manifest.mixing)
        assert len(translator.translate(["haus", tiny.pairs(1, seed=2)[0].source], evidence=True)) == 2


def test_a_memory_where_no_two_entries_share_a_value_cannot_train_and_is_offered_knn_mt(
    model: Model, tmp_path: Path
) -> None:
    (tokens,) = model.tokenise_targets(["house"])
    assert len(set(tokens)) == len(tokens)
    file = tiny.write_tsv(tmp_path / "tm.tsv", [Pair("haus", "house", Origin("x"))])
    with pytest.raises(InputError, match=r"the adapter cannot train: no two entries share a value.*--method knn-mt"):
        adaptation.adapt(tmp_path / "s", [file], model, adaptation.Method(QUICK))
    assert adaptation.adapt(tmp_path / "s", [file], model, adaptation.KNN_MT) is None  # what it offers works
    with open_datastore(tmp_path / "s", model) as opened:
        assert opened.values.tolist() == tokens


# -- the verdict -------------------------------------------------------------------------------------------------------


def test_the_verdict_counts_the_words_of_the_target_language(
    checkpoints: Callable[[str], Path], tm: Path, tmp_path: Path
) -> None:
    chinese = models.load(str(checkpoints("marian")), "de", "zh-CN")
    verdict = adaptation.adapt(tmp_path / "s", [tm], chinese, adaptation.KNN_MT)
    assert verdict is not None
    assert "|tok:zh|" in verdict.comparison.bleu_signature


def test_a_target_language_that_cannot_be_scored_is_refused_before_anything_is_built(
    checkpoints: Callable[[str], Path], tm: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenizer_ja_mecab, "MeCab", None)
    japanese = models.load(str(checkpoints("marian")), "de", "ja")
    with pytest.raises(InputError, match=r"pip install 'sacrebleu\[ja\]'"):
        adaptation.adapt(tmp_path / "s", [tm], japanese, adaptation.KNN_MT)
    assert not (tmp_path / "s").exists()
    assert adaptation.adapt(tmp_path / "s", [tm], japanese, adaptation.KNN_MT, hold_out=0) is None


@pytest.mark.parametrize(
    ("segments", "base", "ours", "p", "sentence"),
    [
        (300, 21.34, 34.78, 0.00099, "on 300 held-out segments: BLEU 21.3 → 34.8 (p < 0.001), 1.04× the time"),
        (300, 21.34, 23.0, 0.012, "on 300 held-out segments: BLEU 21.3 → 23.0 (p = 0.012), 1.04× the time"),
        (300, 30.0, 30.5, 0.21, "; no significant difference was shown"),
        (300, 30.0, 25.0, 0.001, "; the datastore makes it worse: do not use it"),
        (300, 30.0, 29.0, 0.3, "; no significant difference was shown"),
        (30, 30.0, 30.0, 0.05, "; no significant difference was shown"),
        (29, 30.0, 25.0, 0.001, "; fewer than 30 segments are too few to tell whether the datastore helps"),
    ],
)
def test_the_verdict_says_whether_it_helps(segments: int, base: float, ours: float, p: float, sentence: str) -> None:
    scores = {"base": Score(base, 50.0, 1.0, None, None), "datastore": Score(ours, 51.0, 1.0, p, p)}
    said = adaptation.Verdict(Comparison(scores, "b", "c", segments), 1.04, [], [], []).sentence()
    assert said.endswith(sentence)
    assert (";" in said) == (";" in sentence)


def test_the_verdict_names_the_file_and_what_the_datastore_knew() -> None:
    scores = {"base": Score(1.0, 1.0, 1.0, None, None), "datastore": Score(2.0, 2.0, 1.0, 0.001, 0.001)}
    said = adaptation.Verdict(Comparison(scores, "b", "c", 1), 1.0, [], [], [], "x.tsv", 1).sentence()
    assert said.startswith("on 1 segment of x.tsv: BLEU 1.0 → 2.0, 1.00× the time; ")
    assert said.endswith("; the datastore holds the source or target of 1 of them, so this says little of new text")


def test_accuracy_needs_a_segment_that_fits(store: Path, model: Model) -> None:
    translator = adaptation.Translator.open(store, model)
    assert translator.datastore is not None
    with translator.datastore:
        with pytest.raises(InputError, match="no segment fits the model"):
            adaptation.accuracy_of(translator, ["haus " * 90], ["house"])
        accuracy = adaptation.accuracy_of(translator, ["haus baum"], ["house tree"])
    assert list(accuracy) == [1, 2, 4, 8, 16, 32, 64]
    assert all(0 <= share <= 1 for share in accuracy.values())


@pytest.mark.parametrize("name", ["index", "projection", "keys"])
def test_what_project_made_and_was_damaged_is_made_again(store: Path, model: Model, name: str) -> None:
    """It is what the error advises."""
    file = store / read_manifest(store).files[name].name
    file.write_bytes(bytes(len(file.read_bytes())))
    with pytest.raises(DatastoreError):
        open_datastore(store, model)
    adaptation.project(store, model)
    with open_datastore(store, model):
        assert verify(store) == []


@pytest.mark.parametrize("keys", [None, adaptation.CKMT_ADAPTIVE.adapter])
@pytest.mark.parametrize(
    "options", [{"tuner": Grid(scaled=True)}, {"tuner": GateTuner()}, {"refined": RefineSettings()}]
)
def test_what_does_not_apply_to_keys_with_distances_is_refused_by_name(keys: Any, options: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=r"scaled|gate|refining"):
        adaptation.Method(keys, **{"tuner": Grid(scaled=False)} | options)
