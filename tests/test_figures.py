"""Figures: which values are drawn, the numbers beside them against sklearn and by hand, and files that repeat."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch
from sklearn.metrics import roc_auc_score, silhouette_score

import tiny
from clknn import adaptation, figures
from clknn.adapter import AdapterSettings, Classes
from clknn.errors import InputError
from clknn.mixing import Neighbours
from clknn.model import Model
from commands import refused, run

NAMES = "accuracy.png accuracy.svg confidence.png confidence.svg figures.json words.png words.svg".split()


def counted(counts: list[int]) -> Classes:
    """Value i, counts[i] times."""
    values = np.repeat(np.arange(len(counts)), counts)
    return Classes.of(np.random.default_rng(0).permutation(values).astype(np.int32))


def test_bands_are_the_first_percent_the_middle_fifth_and_the_last_percent() -> None:
    counts = [*range(3009, 9, -1), *[9] * 500]  # 3,000 values that count, and rarer ones that do not
    high, middle, low = figures.bands(counted(counts))
    assert high.classes.tolist() == list(range(30))
    assert middle.classes.tolist() == list(range(1200, 1800))
    assert low.classes.tolist() == list(range(2970, 3000))
    assert [band.number for band in (high, middle, low)] == [10] * 3


@pytest.mark.parametrize(("values", "number"), [(6, 2), (17, 5), (30, 10), (200, 10)])
def test_bands_of_few_values_have_what_a_draw_needs_and_none_in_common(values: int, number: int) -> None:
    found = figures.bands(counted(list(range(values + 9, 9, -1))))
    assert [band.number for band in found] == [number] * 3
    drawn = [set(band.classes.tolist()) for band in found]
    assert all(len(each) >= number for each in drawn)
    assert len(set.union(*drawn)) == sum(map(len, drawn))


def test_too_few_values_are_refused_with_their_number() -> None:
    with pytest.raises(InputError, match="5 values occur 10 times or more"):
        figures.bands(counted([10] * 5 + [9] * 50))


def test_a_draw_is_ten_different_entries_of_each_value() -> None:
    classes = counted(list(range(60, 20, -1)))
    chosen, entries = figures.draw(figures.bands(classes)[0], classes, np.random.default_rng(3))
    assert entries.shape == (10, 10)
    assert len(np.unique(entries)) == 100
    assert (classes.of_entry[torch.from_numpy(entries)].numpy() == chosen[:, None]).all()


def test_silhouette_is_sklearns_and_purity_is_counted() -> None:
    rng = np.random.default_rng(0)
    labels = np.repeat(np.arange(5), 10)
    vectors = (rng.normal(size=(5, 8))[labels] + 0.7 * rng.normal(size=(50, 8))).astype(np.float32)
    reached = figures.apart(vectors, labels)
    assert reached.silhouette == pytest.approx(float(silhouette_score(vectors, labels)), abs=1e-5)
    nearest = [
        min((j for j in range(50) if j != i), key=lambda j: ((vectors[i] - vectors[j]) ** 2).sum()) for i in range(50)
    ]
    assert reached.purity == pytest.approx(np.mean(labels[nearest] == labels))


def test_what_lies_apart_is_pure_and_what_does_not_is_chance() -> None:
    labels = np.repeat(np.arange(4), 10)
    rng = np.random.default_rng(0)
    near = (100 * np.eye(4)[labels] + rng.normal(size=(40, 4))).astype(np.float32)
    assert figures.apart(near, labels) == figures.Apart(pytest.approx(1, abs=0.05), 1.0)
    assert figures.apart(rng.normal(size=(40, 4)).astype(np.float32), labels).silhouette < 0.1


def neighbours(n: int, inner: bool) -> tuple[Neighbours, npt.NDArray[np.int64]]:
    """The nearer, the likelier right; the last row found nothing."""
    rng = np.random.default_rng(1)
    near = np.sort(rng.random((n, 4)), axis=1)[:, ::-1].copy()
    truth = rng.integers(0, 9, n)
    right = rng.random(n) < near.mean(1)
    values = np.where(right, truth, truth + 1)[:, None].repeat(4, 1)
    found = np.ones((n, 4), np.bool_)
    found[-1] = False
    nearness = torch.tensor(near if inner else 2 - 2 * near, dtype=torch.float32)
    parts = {"similarity": nearness} if inner else {"distance": nearness}
    return Neighbours(torch.zeros(n, 4).long(), torch.tensor(values), torch.tensor(found), **parts), truth


@pytest.mark.parametrize("inner", [True, False])
def test_confidence_is_judged_by_the_area_under_its_curve(inner: bool) -> None:
    near, truth = neighbours(500, inner)
    _, made = figures.trust(near, truth)
    right = (near.values[:, 0].numpy() == truth)[:-1]
    score = near.similarity if inner else -near.distance
    expected = roc_auc_score(right, score.mean(1).numpy()[:-1])
    assert made["chance that a right token is nearer than a wrong one"] == pytest.approx(expected, abs=1e-4)
    assert made["tokens"] == 499
    assert sum(tenth["tokens"] for tenth in made["tenths"]) == 499
    assert made["right"] == pytest.approx(right.mean())


def test_where_all_are_right_there_is_nothing_to_tell_apart() -> None:
    near, _ = neighbours(20, True)
    _, made = figures.trust(near, near.values[:, 0].numpy())
    assert made["chance that a right token is nearer than a wrong one"] is None
    assert made["median confidence, wrong"] is None


def test_tokens_that_mean_something_to_a_renderer_are_drawn_as_they_are(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    classes = counted([12] * 30)
    odd = ["$x$", "_", "__", "", "\u4f60\u597d", "<b>&amp;", "\\frac", "a very long token indeed", "%", "#"]
    vectors = {"raw states": rng.normal(size=(360, 6)).astype(np.float16)}
    drawn, made = figures.words(vectors, classes, lambda c: odd[c % 10])
    assert set(made) == {"high", "middle", "low"}
    png, svg = figures.save(drawn, tmp_path, "words")
    assert png.read_bytes().startswith(b"\x89PNG")
    text = svg.read_text(encoding="utf8")
    assert "$x$" in text
    assert "\u4f60\u597d" in text
    assert "a very long tok…" in text


def test_every_system_has_a_curve_and_a_name(tmp_path: Path) -> None:
    ks = (1, 2, 4, 8, 16, 32, 64)
    panels = {f"set {p}": {f"system {s}": {k: 1 / (s + k) for k in ks} for s in range(12)} for p in range(4)}
    drawn = figures.accuracy_figure(panels)
    assert [len(axes.get_lines()) for axes in drawn.axes] == [12] * 4
    _, svg = figures.save(drawn, tmp_path, "accuracy")
    assert all(f">system {s}<" in svg.read_text() for s in range(12))


# -- of a datastore ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def ready(load: Callable[[str], Model], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Trained, projected and tuned, with pairs held out; to be copied where it is changed."""
    folder = tmp_path_factory.mktemp("ready")
    tm, model = tiny.write_tsv(folder / "tm.tsv", tiny.pairs(300)), load("marian")
    adaptation.build(folder / "store", [tm], model)
    adaptation.train(folder / "store", AdapterSettings(steps=6, validate_every=3, batch=16), model)
    adaptation.project(folder / "store", model)
    adaptation.tune(folder / "store", model)
    return folder / "store"


def test_the_command_draws_and_a_second_time_draws_the_same(ready: Path, tmp_path: Path) -> None:
    said = [run("figures", ready, "--out", tmp_path / name) for name in ("one", "two/deep")]
    assert [ran.code for ran in said] == [0, 0]
    assert said[0].out.startswith(f"{tmp_path / 'one'}: accuracy.png")
    one, two = ({f.name: f.read_bytes() for f in (tmp_path / n).iterdir()} for n in ("one", "two/deep"))
    assert sorted(one) == NAMES
    assert one == two
    record = json.loads(one["figures.json"])
    assert set(record["accuracy"]) == {"raw states", "keys"}
    assert list(record["accuracy"]["keys"]) == ["1", "2", "4", "8", "16", "32", "64"]
    assert set(record["words"]["high"]) > {"raw states", "keys"}
    assert (record["signature"]["segments"], record["signature"]["known"]) == (15, 0)
    other = run("figures", ready, "--out", tmp_path / "three", "--seed", 1)
    assert other.code == 0
    assert json.loads((tmp_path / "three" / "figures.json").read_text())["words"] != record["words"]


def test_pairs_of_a_file_and_raw_states_alone(ready: Path, load: Callable[[str], Model], tmp_path: Path) -> None:
    store = shutil.copytree(ready, tmp_path / "store")
    adaptation.project(store, load("marian"), vanilla=True)
    test = tiny.write_tsv(tmp_path / "test.tsv", tiny.pairs(4, seed=5))
    assert run("figures", store, test, "--out", tmp_path / "drawn").code == 0
    record = json.loads((tmp_path / "drawn" / "figures.json").read_text())
    assert set(record["accuracy"]) == {"raw states"}
    assert "keys" not in record["words"]["low"]
    assert "median mean squared distance, right" in record["confidence"]


def test_what_cannot_be_drawn_is_one_line(ready: Path, load: Callable[[str], Model], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert "choose another --out" in refused("figures", ready, "--out", tmp_path / "file")
    assert "no datastore is here" in refused("figures", tmp_path / "nowhere")
    few = tiny.write_tsv(tmp_path / "few.tsv", tiny.pairs(3))
    adaptation.build(tmp_path / "store", [few], load("marian"))
    adaptation.project(tmp_path / "store", load("marian"))
    assert "no pairs to ask with" in refused("figures", tmp_path / "store", "--out", tmp_path / "drawn")
    said = refused("figures", tmp_path / "store", few, "--out", tmp_path / "drawn")
    assert "values occur 10 times or more" in said
