"""Nothing learns from what it is tested on, nor asks a datastore for what it put there: every method, watched.

Spies stand where a method gets to see data: at the tokeniser, before each training and before each tuner. Those that
follow break a method on purpose, since a spy that never speaks proves nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tiny
from clknn import adaptation
from clknn import adapter as adapters
from clknn.adaptation import CLKNN, Method
from clknn.corpus import fold
from clknn.datastore import array, read_draft
from clknn.methods import ckmt, neighbourhood
from clknn.methods.adaptive import MetaKTuner
from clknn.methods.gate import GateTuner
from clknn.methods.kster import KernelTuner
from clknn.mixing import Neighbours
from clknn.model import Model
from clknn.projection import Projection
from clknn.tuning import Grid, Retrieved

PRODUCT = {name: made for name, made in vars(adaptation).items() if isinstance(made, Method)}
TUNERS = Grid(scaled=False), Grid(scaled=True), MetaKTuner(), KernelTuner(), GateTuner()


def small(method: Method) -> Method:
    """The same, in a second."""
    adapter = method.adapter and replace(method.adapter, steps=4, batch=16, validate_every=2)
    refined = method.refined and replace(method.refined, anchors=300, rounds=2, epochs=1)
    tuner: Any = method.tuner
    if hasattr(tuner, "learning"):
        tuner = replace(tuner, learning=replace(tuner.learning, updates=4, validate_every=2))
    return replace(method, adapter=adapter, refined=refined, tuner=tuner)


@pytest.fixture
def store(load: Callable[[str], Model], tmp_path: Path) -> Path:
    """Built, with pairs held out."""
    tm = tiny.write_tsv(tmp_path / "tm.tsv", tiny.pairs(440))
    adaptation.build(tmp_path / "store", [tm], load("marian"))
    return tmp_path / "store"


class Watch:
    """What a method was given to see, and whether it may see that."""

    def __init__(self, store: Path, model: Model, patched: pytest.MonkeyPatch) -> None:
        self.seen: set[str] = set()
        manifest = read_draft(store)
        assert manifest is not None
        self.pair_ids = np.asarray(array(store, manifest, "pairs"))
        self.states, self.values = (np.asarray(array(store, manifest, name)) for name in ("states", "values"))
        with adaptation.Pairs.open(store / "text.sqlite") as record:
            self.ids = {role: {number for number, _ in record.each(role)} for role in ("stored", "tune", "test")}
            self.secret = {fold(side) for _, pair in record.each("test") for side in (pair.source, pair.target)}
        assert all(self.ids.values())
        assert set(self.pair_ids) == self.ids["stored"]
        self._before(patched, model, "tokenise_targets", self.read)
        self._before(patched, model, "tokenise_sources", self.read)
        self._before(patched, adapters, "train", self.trained)
        self._before(patched, ckmt, "clusters", self.trained)
        self._before(patched, ckmt, "train", self.trained)
        self._before(patched, neighbourhood, "loss", self.refined)
        for kind in {type(tuner) for tuner in TUNERS}:
            self._before(patched, kind, "choose", self.tuned)

    @staticmethod
    def _before(patched: pytest.MonkeyPatch, home: Any, name: str, spy: Callable[..., None]) -> None:
        original = getattr(home, name)

        def spied(*given: Any, **named: Any) -> Any:
            spy(*given)
            return original(*given, **named)

        patched.setattr(home, name, spied)

    def read(self, texts: list[str], *_: Any) -> None:
        assert not self.secret & {fold(text) for text in texts}, "a test pair was read"

    def trained(self, states: Any, values: Any, *_: Any) -> None:
        self.seen.add("adapter")
        assert np.array_equal(states, self.states), "an adapter saw states that are not the datastore's"
        assert np.array_equal(values, self.values)

    def refined(self, *given: Any) -> None:
        self.seen.add("refined")
        *_, anchors, near, rows = given
        own = self.pair_ids[near.entries[rows]] == self.pair_ids[anchors][:, None]
        assert not (own & near.found[rows]).any(), "an anchor met entries of its own pair"

    def tuned(self, tuner: Any, retrieved: Retrieved, *_: Any) -> None:
        self.seen.add("tuner")
        pairs = {pair for pair in retrieved.pair.tolist() if pair < adaptation.OUTSIDE or not tuner.general}
        assert not pairs & self.ids["test"], "a tuner saw test pairs"
        assert pairs <= self.ids["stored" if tuner.own_pairs else "tune"]
        found_in = self.pair_ids[retrieved.neighbours.ids.numpy()]
        own = (found_in == retrieved.pair.numpy()[:, None]) & retrieved.neighbours.found.numpy()
        assert not own.any(), "a token was answered by its own pair"


def watched(store: Path, model: Model, method: Method) -> set[str]:
    """Which of the spies saw something while the method did all it does before decoding."""
    with pytest.MonkeyPatch.context() as patched:
        watch = Watch(store, model, patched)
        adaptation.represent(store, model, method)
        general = tiny.write_tsv(store.with_name("general.tsv"), tiny.pairs(60, seed=31))
        adaptation.tune(store, model, method.tuner, general=[general], ending=method.ending)
    return watch.seen


@pytest.mark.parametrize("name", sorted(PRODUCT))
def test_no_method_learns_from_what_it_is_tested_on(name: str, store: Path, load: Callable[[str], Model]) -> None:
    method = PRODUCT[name]
    expected = {"tuner"} | ({"adapter"} if method.adapter else set()) | ({"refined"} if method.refined else set())
    assert watched(store, load("marian"), small(method)) == expected


@pytest.mark.parametrize("tuner", TUNERS, ids=lambda tuner: tuner.name)
def test_no_combiner_on_clknns_keys_does(tuner: Any, store: Path, load: Callable[[str], Model]) -> None:
    assert watched(store, load("marian"), small(replace(CLKNN, tuner=tuner))) == {"adapter", "tuner"}


def test_every_tuner_of_the_product_is_watched() -> None:
    assert {type(method.tuner) for method in PRODUCT.values()} <= {type(tuner) for tuner in TUNERS}


def test_nothing_held_out_and_still_no_pair_judges_itself() -> None:
    """Each pair repeats one value of its own: only an entry of the same pair can be a right neighbour."""
    pairs = np.repeat(np.arange(40), 5).astype(np.int32)
    states = np.random.default_rng(0).normal(size=(40, 8))[pairs].astype(np.float16)
    validate = adaptation.validator(states, pairs, pairs, None, 0, lambda adapter, _: Projection(adapter))
    assert validate(adapters.Adapter(8, 16, 8, residual=True)) == 0
    alone = adaptation.validator(
        states[:5], pairs[:5], pairs[:5], None, 0, lambda adapter, _: Projection(adapter)
    )  # fmt: skip
    assert alone(adapters.Adapter(8, 16, 8, residual=True)) == 0


# -- and the spies speak -----------------------------------------------------------------------------------------------


def test_a_kernel_that_finds_itself_is_caught(
    store: Path, load: Callable[[str], Model], monkeypatch: pytest.MonkeyPatch
) -> None:
    def itself(neighbours: Neighbours, _: Any, __: Any, k: int) -> Neighbours:
        return neighbours.first(k)

    monkeypatch.setattr(adaptation, "from_other_pairs", itself)
    with pytest.raises(AssertionError, match="its own pair"):
        watched(store, load("marian"), small(adaptation.KSTER))


def test_tuning_on_test_pairs_is_caught(
    store: Path, load: Callable[[str], Model], monkeypatch: pytest.MonkeyPatch
) -> None:
    each = adaptation.Pairs.each
    with pytest.MonkeyPatch.context() as patched:
        watch = Watch(store, load("marian"), patched)
        monkeypatch.setattr(adaptation.Pairs, "each", lambda self, role: each(self, "test" if role == "tune" else role))
        with pytest.raises(AssertionError, match="a test pair was read"):
            adaptation.represent(store, load("marian"), adaptation.KNN_MT)
        watch.secret = set()  # the next spy, where this one is asleep
        adaptation.represent(store, load("marian"), adaptation.KNN_MT)
        with pytest.raises(AssertionError, match="a tuner saw test pairs"):
            adaptation.tune(store, load("marian"), adaptation.KNN_MT.tuner)


def test_an_end_penalty_or_a_guard_made_on_test_pairs_is_caught(
    store: Path, load: Callable[[str], Model], monkeypatch: pytest.MonkeyPatch
) -> None:
    endings, guard = adaptation._endings, adaptation._familiarity

    def translated(translator: Any, pairs: Any, report: Any) -> Any:  # noqa: ARG001 (takes others in its place)
        return endings(translator, [pair for _, pair in translator.datastore.pairs.each("test")], report)

    def fitted(opened: Any, model: Any, general: Any) -> Any:
        return guard(opened, model, [*general, *(pair for _, pair in opened.pairs.each("test"))])

    for name, leaking in (("_endings", translated), ("_familiarity", fitted)):
        with monkeypatch.context() as patched:
            patched.setattr(adaptation, name, leaking)
            with pytest.raises(AssertionError, match="a test pair was read"):
                watched(store, load("marian"), small(adaptation.GATED))


def test_refining_on_ones_own_pair_is_caught(
    store: Path, load: Callable[[str], Model], monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = neighbourhood.neighbourhoods

    def blind(projection: Any, states: Any, values: Any, pairs: Any, *rest: Any) -> Any:
        return honest(projection, states, values, np.full_like(pairs, -1) + np.arange(len(pairs)), *rest)

    monkeypatch.setattr(neighbourhood, "neighbourhoods", blind)
    with pytest.raises(AssertionError, match="its own pair"):
        watched(store, load("marian"), small(adaptation.GATED))
