"""What reads like a memory and what does not: laws of the three numbers, and a memory that other text leaves alone."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import tiny
from clknn import adaptation, datastore, familiarity
from clknn.adaptation import CLKNN, GATED
from clknn.adapter import AdapterSettings
from clknn.corpus import Origin, Pair
from clknn.datastore import Datastore
from clknn.errors import DatastoreError, InputError
from clknn.familiarity import Familiarity, Tokens
from clknn.model import Decoding, Model
from clknn.translator import Translator
from clknn.tuning import Learning

V = 50


def sources(n: int, low: int, high: int, seed: int) -> list[Tokens]:
    rng = np.random.default_rng(seed)
    return [rng.integers(low, high, rng.integers(2, 12)).tolist() for _ in range(n)]


STORED = list(enumerate(sources(300, 0, 30, 1), 7))
OWN, OTHER = sources(60, 0, 30, 2), sources(60, 20, 50, 3)
MADE = familiarity.fit(STORED, OWN, OTHER)


def test_two_kinds_are_told_apart() -> None:
    assert np.mean(MADE.of(sources(200, 0, 30, 4))) > 0.9
    assert np.mean(MADE.of(sources(200, 20, 50, 5))) < 0.1


def test_the_log_odds_are_a_logistic_regressions() -> None:
    """Against scikit-learn's, on the same numbers, both kinds weighing the same."""
    from sklearn.linear_model import LogisticRegression

    rng = np.random.default_rng(0)
    x = np.concatenate([rng.normal(0, 1, (80, 3)), rng.normal([1, 0.3, -0.5], 2, (40, 3))])
    y = np.repeat([1.0, 0.0], [80, 40])
    weights = familiarity._separated(x, y).numpy()
    z = (x - x.mean(0)) / x.std(0)
    known = LogisticRegression(C=1 / (familiarity.RIDGE * len(x)), class_weight="balanced", tol=1e-10).fit(z, y)
    np.testing.assert_allclose(x @ weights[:3] + weights[3], known.decision_function(z), atol=1e-4)


def test_the_answer_does_not_depend_on_what_stands_beside_it() -> None:
    alone = torch.cat([MADE.log_odds([source]) for source in OWN])
    torch.testing.assert_close(MADE.log_odds(OWN), alone)
    assert MADE.log_odds([]).shape == (0,)


def test_a_source_is_more_familiar_once_it_is_stored_and_as_before_once_it_is_gone() -> None:
    source = OTHER[0]
    with_it = MADE.with_pairs([(1000, source)])
    assert with_it.log_odds([source]) > MADE.log_odds([source])
    again = with_it.without_pairs(np.array([1000]))
    for name, tensor in MADE.tensors().items():
        assert torch.equal(again.tensors()[name], tensor), name


def test_what_is_stored_is_familiar_whatever_it_reads_like() -> None:
    assert not any(MADE.of(OTHER[:5]))
    assert all(MADE.with_pairs(list(enumerate(OTHER[:5], 1000))).of(OTHER[:5]))


def test_a_token_never_seen_says_nothing_and_breaks_nothing() -> None:
    """The sources' vocabulary is not the targets', and what is translated may hold any token of it."""
    assert MADE.log_odds([[3, 90_000, 4], [90_000]]).isfinite().all()
    assert MADE.ratios[-1] == 0
    assert MADE.log_odds([[]]).isfinite().all()


def test_what_is_added_later_is_as_if_built_together() -> None:
    later = familiarity.fit(STORED[:200], OWN, OTHER).with_pairs(STORED[200:])
    for name in ("trigrams", "pairs", "sources", "numbers"):
        assert np.array_equal(getattr(later, name), getattr(MADE, name)), name


def test_trigrams_are_their_three_tokens_and_no_others() -> None:
    seen = familiarity._trigrams([3, 1, 4, 1, 5], 10)
    assert len(set(seen.tolist())) == 5
    assert (
        len({int(familiarity._trigrams([a, b, c], 5)[-1]) for a in range(5) for b in range(5) for c in range(5)}) == 125
    )
    assert familiarity._trigrams([3], 10)[0] != familiarity._trigrams([0, 0, 3], 10)[2]


@pytest.mark.parametrize(("own", "other", "named"), [(5, 60, "5 held-out"), (60, 5, "5 general")])
def test_too_few_of_either_kind_are_refused(own: int, other: int, named: str) -> None:
    with pytest.raises(InputError, match=named):
        familiarity.fit(STORED, OWN[:own], OTHER[:other])


# -- in a datastore ----------------------------------------------------------------------------------------------------


def everyday(n: int, seed: int = 3) -> list[Pair]:
    """Pairs in other words' order: the same letters, which the memory's words hardly put beside each other."""
    rows = tiny.pairs(n, seed)
    return [Pair(p.source[::-1], p.target[::-1], Origin("everyday.tsv", None, i)) for i, p in enumerate(rows, 1)]


MEMORY = tiny.pairs(600)
GENERAL = everyday(60)
UNSEEN = everyday(10, seed=11)


@pytest.fixture(scope="module")
def guarded(load: Callable[[str], Model], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Model]:
    root, model = tmp_path_factory.mktemp("guarded"), load("marian")
    file = tiny.write_tsv(root / "memory.tsv", MEMORY)
    general = tiny.write_tsv(root / "general.tsv", GENERAL)
    method = replace(CLKNN, adapter=AdapterSettings(steps=5, batch=32, validate_every=5))
    adaptation.adapt(root / "s", [file], model, method, hold_out=30, general=[general])
    return root / "s", model


def test_other_text_is_left_to_the_base_model_and_says_so(guarded: tuple[Path, Model]) -> None:
    path, model = guarded
    translator = Translator.open(path, model, decoding=Decoding(2, max_new_tokens=12))
    texts = [p.source for p in UNSEEN]
    said = translator.translate(texts, evidence=True)
    assert [t.text for t in said] == [t.text for t in translator.base.translate(texts)]
    assert not any(t.familiar for t in said)
    assert all(word.retrieved == 0 and not word.support for t in said for word in t.words or [])
    forced = replace(translator, guarded=False).translate(texts, evidence=True)
    assert any(word.support for t in forced for word in t.words or [])
    assert all(t.familiar for t in forced)


def test_what_is_stored_is_familiar_also_when_it_is_added(guarded: tuple[Path, Model], tmp_path: Path) -> None:
    path, model = guarded
    shutil.copytree(path, tmp_path / "s")

    def of(sources: list[str]) -> list[bool]:
        with datastore.open_datastore(tmp_path / "s", model) as store:
            return store.familiar(model.tokenise_sources(sources))

    def kept() -> dict[str, torch.Tensor]:
        with datastore.open_datastore(tmp_path / "s", model) as store:
            assert store.familiarity is not None
            return store.familiarity.tensors()

    unseen = [p.source for p in UNSEEN]
    assert not any(of(unseen))
    before = kept()
    ids = datastore.add(tmp_path / "s", UNSEEN, model)
    assert all(of(unseen))
    datastore.remove(tmp_path / "s", list(ids))
    assert all(torch.equal(kept()[name], tensor) for name, tensor in before.items())


def test_tuning_without_general_text_finds_nothing_unfamiliar(guarded: tuple[Path, Model], tmp_path: Path) -> None:
    path, model = guarded
    shutil.copytree(path, tmp_path / "s")
    manifest = adaptation.tune(tmp_path / "s", model)
    assert "familiarity" not in manifest.files
    with datastore.open_datastore(tmp_path / "s", model) as store:
        assert all(store.familiar(model.tokenise_sources([p.source for p in UNSEEN])))


def test_general_pairs_of_the_memory_itself_are_left_out_and_counted(
    guarded: tuple[Path, Model], tmp_path: Path
) -> None:
    path, model = guarded
    shutil.copytree(path, tmp_path / "s")
    mixed = tiny.write_tsv(tmp_path / "mixed.tsv", MEMORY[:40] + GENERAL)
    manifest = adaptation.tune(tmp_path / "s", model, general=[mixed])
    assert manifest.measured["tune"]["general pairs left out"] == 40
    with pytest.raises(InputError, match=r"no general pair is left.*40 stand in"):
        adaptation.tune(tmp_path / "s", model, general=[tiny.write_tsv(tmp_path / "own.tsv", MEMORY[:40])])


def test_what_cannot_be_done_is_refused_before_the_work(
    load: Callable[[str], Model], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, file = load("marian"), tiny.write_tsv(tmp_path / "memory.tsv", MEMORY)
    monkeypatch.setattr(adaptation, "represent", None)
    with pytest.raises(InputError, match=r"absent.tsv: no such file"):
        adaptation.adapt(tmp_path / "a", [file], model, general=[tmp_path / "absent.tsv"])
    general = tiny.write_tsv(tmp_path / "general.tsv", GENERAL)
    for hold_out in (0, 5):
        with pytest.raises(InputError, match=f"{hold_out} pairs to tune on are too few.*leave out --general"):
            adaptation.adapt(tmp_path / f"s{hold_out}", [file], model, hold_out=hold_out, general=[general])


def test_other_keys_have_neither_guard_nor_end_penalty(guarded: tuple[Path, Model], tmp_path: Path) -> None:
    path, model = guarded
    shutil.copytree(path, tmp_path / "s")
    manifest = datastore.read_manifest(tmp_path / "s")
    datastore.commit(tmp_path / "s", replace(manifest, end_penalty=2.0))
    changed = adaptation.project(tmp_path / "s", model, size=8)
    assert changed.end_penalty == 0
    assert not {"familiarity", "combiner"} & set(changed.files)


def test_a_damaged_one_is_named(guarded: tuple[Path, Model], tmp_path: Path) -> None:
    path, model = guarded
    shutil.copytree(path, tmp_path / "s")
    manifest = datastore.read_manifest(tmp_path / "s")
    mark = manifest.files["familiarity"]
    (tmp_path / "s" / mark.name).write_bytes(b"\0" * mark.bytes)
    with pytest.raises(DatastoreError, match=r"familiarity.*run `clknn tune` again"):
        datastore.open_datastore(tmp_path / "s", model)
    adaptation.tune(tmp_path / "s", model)
    datastore.open_datastore(tmp_path / "s", model).close()


def test_the_gate_learns_from_general_pairs_and_no_other_combiner_does(
    guarded: tuple[Path, Model], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, model = guarded
    shutil.copytree(path, tmp_path / "s")
    general = tiny.write_tsv(tmp_path / "general.tsv", GENERAL)
    gate = replace(GATED.tuner, learning=Learning(updates=2, smoothing=0.0))
    seen: dict[str, int] = {}
    for tuner in (CLKNN.tuner, gate):
        original = type(tuner).choose

        def choose(self, retrieved, advance, original=original):  # type: ignore[no-untyped-def]
            seen[self.name] = len(retrieved.pair.unique())
            return original(self, retrieved, advance)

        monkeypatch.setattr(type(tuner), "choose", choose)
        adaptation.tune(tmp_path / "s", model, tuner, general=[general])
    with datastore.open_datastore(tmp_path / "s") as store:
        held_out = store.pairs.count("tune")
    assert seen == {"scaled": held_out, "gate": held_out + held_out // 2}


# -- ending ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("beam", [1, 4])
def test_an_end_penalty_makes_translations_longer_and_leaves_the_base_model_alone(
    guarded: tuple[Path, Model], beam: int
) -> None:
    path, model = guarded
    translator = Translator.open(path, model, decoding=Decoding(beam, max_new_tokens=30))
    texts = [p.source for p in MEMORY[:20]]

    def tokens(penalty: float) -> int:
        said = replace(translator, end_penalty=penalty).translate(texts)
        return sum(len(t) for t in model.tokenise_targets([t.text for t in said]))

    assert tokens(0.0) <= tokens(3.0) <= tokens(30.0)
    assert tokens(0.0) < tokens(30.0)
    base = [t.text for t in translator.base.translate(texts)]
    penalised = replace(translator, end_penalty=9.0)
    assert [t.text for t in penalised.base.translate(texts)] == base
    nothing = penalised.with_mixing(weight=0.0)
    for evidence in (False, True):
        assert [t.text for t in nothing.translate(texts, evidence=evidence)] == base


def test_the_end_penalty_is_the_best_of_those_tried_and_is_kept(guarded: tuple[Path, Model], tmp_path: Path) -> None:
    path, model = guarded
    shutil.copytree(path, tmp_path / "s")
    manifest = adaptation.tune(tmp_path / "s", model, ending=True)
    tried = manifest.measured["tune"]["BLEU by end penalty"]
    assert len(tried) >= 3
    assert tried[f"{manifest.end_penalty:g}"] == max(tried.values())
    opened = Translator.open(tmp_path / "s", model)
    assert opened.end_penalty == datastore.read_manifest(tmp_path / "s").end_penalty == manifest.end_penalty
    assert isinstance(opened.datastore, Datastore)
    assert isinstance(opened.datastore.familiarity, Familiarity | None)
