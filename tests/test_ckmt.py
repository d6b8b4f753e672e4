"""Clusters against scikit-learn's labels, batches against what may be drawn, the loss against numpy, and a training."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache

import numpy as np
import numpy.typing as npt
import pytest
import torch
from sklearn.cluster import DBSCAN

import test_adapter
from clknn.adapter import Adapter, Classes, Step
from clknn.errors import InputError
from clknn.methods import ckmt
from clknn.methods.ckmt import CkmtSettings, Clusters, choose_eps, clusters, dbscan, train
from test_adapter import fits, rng, same, scripted

Halves = npt.NDArray[np.float16]
Values = npt.NDArray[np.int32]
Doubles = npt.NDArray[np.float64]

EPS = 1.5


def clustered(states: Halves, values: Values, settings: CkmtSettings, seed: int = 0) -> Clusters:
    return clusters(states, values, settings, np.random.default_rng(seed))


@cache
def blobs(seed: int = 0) -> tuple[Halves, Values]:
    """Values of 1 to 120 entries; the larger ones are some blobs and stragglers, all of it far from the origin."""
    draw = np.random.default_rng(seed)
    states, values = [], []
    for value, count in {900: 1, 7: 4, 31: 5, 5: 12, 40_000: 60, 12: 2, 77: 120, 3: 30, 8: 4}.items():
        middles = draw.normal(size=(1 + count // 20, 6)) * 4 + 20
        spread = draw.choice([0.2, 0.45, 2.0], size=(count, 1), p=[0.5, 0.3, 0.2])
        states.append(middles[draw.integers(0, len(middles), count)] + spread * draw.normal(size=(count, 6)))
        values += [value] * count
    order = draw.permutation(len(values))
    return np.concatenate(states)[order].astype(np.float16), np.array(values, np.int32)[order]


def groups(found: Clusters) -> list[list[int]]:
    """The entries of each cluster; its last member is its centroid."""
    listed = []
    for c, (start, count) in enumerate(zip(found.starts.tolist(), found.counts.tolist(), strict=True)):
        *entries, centroid = found.members[start : start + count].tolist()
        assert centroid == found.entries + c
        listed.append(entries)
    assert sum(map(len, listed)) + len(listed) == len(found.members)
    return listed


# ---- clusters


def reference_groups(states: Halves, values: Values, eps: float, min_samples: int) -> set[tuple[int, ...]]:
    listed = set()
    for value in set(values.tolist()):
        mine = np.flatnonzero(values == value)
        labels = np.zeros(len(mine), int)
        if len(mine) > min_samples:
            labels = DBSCAN(eps=eps, min_samples=min_samples).fit_predict(states[mine].astype(np.float64))
        listed |= {tuple(mine[labels == label].tolist()) for label in set(labels.tolist()) - {-1}}
    return listed


@pytest.mark.parametrize("min_samples", [4, 2])
@pytest.mark.parametrize("eps", [0.3, 0.8, EPS, 4.0, 100.0])
def test_clusters_are_those_of_sklearn_within_each_value(eps: float, min_samples: int) -> None:
    states, values = blobs()
    found = clustered(states, values, CkmtSettings(eps=eps, min_samples=min_samples))
    expected = reference_groups(states, values, eps, min_samples)
    assert {tuple(sorted(entries)) for entries in groups(found)} == expected
    assert len(groups(found)) == len(expected)
    assert found.eps == eps


def test_the_blobs_have_noise_and_several_clusters_of_a_value() -> None:
    """Otherwise the test above would say little."""
    states, values = blobs()
    listed = groups(clustered(states, values, CkmtSettings(eps=EPS)))
    of = [values[entries[0]] for entries in listed]
    assert of.count(77) > 1
    assert of.count(40_000) > 1
    kept = sum(map(len, listed))
    assert 0.6 * len(values) < kept < 0.97 * len(values)


@pytest.mark.parametrize("compared", [1, 200, 8_000_000])
@pytest.mark.parametrize("seed", range(4))
def test_dbscan_gives_the_very_labels_of_sklearn(seed: int, compared: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a lattice too, where entries repeat and many lie between two clusters: who comes first has them."""
    monkeypatch.setattr(ckmt, "COMPARED", compared)
    draw = np.random.default_rng(seed)
    lattice = draw.integers(0, 14, (150, 2)).astype(np.float32)
    loose = draw.normal(size=(150, 8)).astype(np.float32) + 5
    borders = 0
    for states, radii in ((lattice, (0.5, 1.1, 1.5, 2.1)), (loose, (1.2, 1.8, 2.4))):
        for eps in radii:
            found, label = dbscan(states, eps, 4)
            reference = DBSCAN(eps=eps, min_samples=4).fit(states.astype(np.float64))
            assert np.where(found, label, -1).tolist() == reference.labels_.tolist()
            borders += int(found.sum()) - len(reference.core_sample_indices_)
    assert borders > 20


def test_a_centroid_is_the_mean_of_its_entries_and_their_last_companion(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ckmt, "CHUNK", 7)
    states, values = blobs()
    found = clustered(states, values, CkmtSettings(eps=EPS))
    for c, entries in enumerate(groups(found)):
        expected = states[entries].astype(np.float64).mean(0)
        np.testing.assert_allclose(found.centroids[c], expected, rtol=1e-3)
        start, count = int(found.starts[c]), int(found.counts[c])
        of_members = found.states_of(found.members[start : start + count], states).numpy()
        np.testing.assert_array_equal(of_members[:-1], states[entries].astype(np.float32))
        np.testing.assert_array_equal(of_members[-1], found.centroids[c].astype(np.float32))


def test_of_many_entries_as_many_as_the_cap_are_drawn_at_random() -> None:
    states, values = blobs()
    settings = CkmtSettings(eps=1000.0, cap=50)  # every value one cluster
    used = np.zeros(len(values))
    for seed in range(60):
        listed = groups(clustered(states, values, settings, seed))
        for entries in listed:
            count = int((values == values[entries[0]]).sum())
            assert len(set(entries)) == len(entries) == min(count, 50)
            used[entries] += 1
    for value, count in ((77, 120), (40_000, 60)):
        assert fits(used[values == value], np.full(count, 60 * 50 / count))
    one, same, other = (clustered(states, values, settings, seed).members.tolist() for seed in (0, 0, 1))
    assert one == same != other


def test_progress_counts_entries_up_to_all_of_them() -> None:
    states, values = blobs()
    heard: list[tuple[int, int]] = []
    settings = CkmtSettings(cap=50)
    clusters(states, values, settings, np.random.default_rng(0), lambda done, total: heard.append((done, total)))
    assert [done for done, _ in heard] == sorted({done for done, _ in heard})
    assert heard[-1] == (len(values), len(values))
    assert len(heard) == 5  # values of more than four entries


def test_eps_is_the_radius_that_makes_half_of_the_entries_core(monkeypatch: pytest.MonkeyPatch) -> None:
    states, values = blobs()
    settings = CkmtSettings()
    eps = choose_eps(states, Classes.of(values), settings, np.random.default_rng(0))
    cores, total = 0, 0
    for value in set(values.tolist()):
        mine = states[values == value].astype(np.float64)
        if len(mine) > 4:
            cores += len(DBSCAN(eps=eps, min_samples=4).fit(mine).core_sample_indices_)
            total += len(mine)
    assert cores / total == pytest.approx(0.5, abs=0.01)
    assert clustered(states, values, settings).eps == eps
    monkeypatch.setattr(ckmt, "ASKED", 60)
    few = [choose_eps(states, Classes.of(values), settings, np.random.default_rng(seed)) for seed in (0, 0, 1)]
    assert few[0] == few[1] != few[2]
    np.testing.assert_allclose(few, eps, rtol=0.3)


def test_eps_has_the_units_of_the_states_and_repetitions_do_not_move_it() -> None:
    states, values = blobs()
    settings = CkmtSettings()

    def chosen(states: Halves, values: Values) -> float:
        return choose_eps(states, Classes.of(values), settings, np.random.default_rng(0))

    assert chosen(states * np.float16(4), values) == pytest.approx(4 * chosen(states, values), rel=1e-5)
    repeated = np.full((400, 6), 30, np.float16)
    more = np.concatenate([states, repeated]), np.concatenate([values, np.full(400, 1, np.int32)])
    assert chosen(*more) == pytest.approx(chosen(states, values), rel=1e-6)
    assert chosen(repeated, np.ones(400, np.int32)) > 0  # any radius joins them
    assert chosen(states[:0], values[:0]) > 0


# ---- batches


@pytest.fixture(scope="module")
def found() -> Clusters:
    return clustered(*blobs(), CkmtSettings(eps=EPS))


PAPER, CODE = CkmtSettings(), CkmtSettings(centroid_counts=False)


def cluster_of(found: Clusters, members: torch.Tensor) -> npt.NDArray[np.int64]:
    homes = {m: c for c, entries in enumerate(groups(found)) for m in [*entries, found.entries + c]}
    return np.array([homes[m] for m in members.tolist()])


def test_pivots_have_two_members_with_or_without_the_centroid(found: Clusters) -> None:
    sizes = np.array([len(entries) for entries in groups(found)])
    assert 1 in sizes
    assert ckmt.pivotal(found, PAPER).tolist() == list(range(len(sizes)))
    assert ckmt.pivotal(found, CODE).tolist() == np.flatnonzero(sizes >= 2).tolist()


def test_the_pivots_of_a_batch_are_distinct_and_all_alike_likely() -> None:
    may = torch.tensor([2, 3, 5, 7, 11, 13, 17])
    draw, used = rng(), np.zeros(18)
    for _ in range(2000):
        pivots = ckmt.draw_pivots(may, 3, draw).tolist()
        assert len(set(pivots)) == 3
        used[pivots] += 1
    assert fits(used[may.numpy()], np.full(7, 6000 / 7))
    assert used.sum() == used[may.numpy()].sum()
    assert sorted(ckmt.draw_pivots(may, 1024, draw).tolist()) == may.tolist()  # all, where there are fewer


@pytest.mark.parametrize("settings", [PAPER, CODE], ids=["paper", "code"])
def test_a_positive_is_a_uniform_member_of_the_pivots_cluster(found: Clusters, settings: CkmtSettings) -> None:
    for c in ckmt.pivotal(found, settings).tolist():
        entries = groups(found)[c]
        possible = [*entries, found.entries + c] if settings.centroid_counts else entries
        drawn = ckmt.draw_positives(found, torch.full((60 * len(possible),), c), settings, rng(c)).tolist()
        assert set(drawn) == set(possible)
        assert fits([drawn.count(m) for m in possible], np.full(len(possible), 60))


def test_a_negative_is_a_uniform_member_of_a_uniform_other_cluster(found: Clusters) -> None:
    _, values = blobs()
    listed, n = groups(found), 30_000
    others = len(listed) - 1
    same_value = 0
    for pivot in (0, 3, others):
        drawn = ckmt.draw_negatives(found, torch.full((n,), pivot), rng(pivot))
        homes = cluster_of(found, drawn)
        times = np.bincount(homes, minlength=len(listed))
        assert times[pivot] == 0
        assert fits(np.delete(times, pivot), np.full(others, n / others))
        for c, entries in enumerate(listed):
            if c != pivot:
                members = [*entries, found.entries + c]
                counts = [int((drawn == m).sum()) for m in members]
                assert fits(counts, np.full(len(members), times[c] / len(members)))
                same_value += times[c] * int(values[entries[0]] == values[listed[pivot][0]])
    assert same_value > 0  # other clusters of the pivot's own value are not spared


def test_no_negative_of_a_mixed_batch_is_of_its_pivots_cluster(found: Clusters) -> None:
    pivots = ckmt.draw_pivots(ckmt.pivotal(found, PAPER), 1024, rng()).repeat(200)
    assert (cluster_of(found, ckmt.draw_negatives(found, pivots, rng(1))) != pivots.numpy()).all()
    assert (cluster_of(found, ckmt.draw_positives(found, pivots, PAPER, rng(2))) == pivots.numpy()).all()


# ---- the loss


def reference_loss(pivots: Doubles, positives: Doubles, negatives: Doubles, smoothing: float) -> float:
    """Row by row; the target is 1 - smoothing of one column, and smoothing is spread over all."""
    rows = []
    for i in range(len(pivots)):
        logits = [positives[i] @ p for p in pivots] + [negatives[i] @ p for p in pivots]
        log_p = np.array(logits) - max(logits) - np.log(np.exp(np.array(logits) - max(logits)).sum())
        rows.append(-(1 - smoothing) * log_p[i] - smoothing * log_p.mean())
    return float(np.mean(rows))


@pytest.mark.parametrize("smoothing", [0.0, 2e-3, 0.3])
@pytest.mark.parametrize(("seed", "scale"), [(0, 0.3), (1, 1.0), (2, 12.0)])
def test_the_loss_is_the_papers(seed: int, scale: float, smoothing: float) -> None:
    draw = np.random.default_rng(seed)
    batch = [scale * draw.normal(size=(7, 5)) for _ in range(3)]
    z = [torch.tensor(part, dtype=torch.float32) for part in batch]
    assert ckmt.loss(*z, smoothing).item() == pytest.approx(reference_loss(*batch, smoothing), rel=1e-4)


def test_the_loss_by_hand() -> None:
    """Two clusters at right angles; the negative of the first is the second's pivot, that of the second is nothing."""
    pivots = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
    positives = torch.tensor([[2.0, 0.0], [0.0, 1.0]])
    negatives = torch.tensor([[0.0, 1.0], [0.0, 0.0]])
    e = math.e
    first, second = -math.log(e**2 / (e**2 + 1 + 1 + e)), -math.log(e / (1 + e + 1 + 1))
    assert ckmt.loss(pivots, positives, negatives, 0.0).item() == pytest.approx((first + second) / 2, rel=1e-5)


# ---- training


@cache
def confusable(seed: int, kinds: int = 12) -> tuple[Halves, Values]:
    """As the contrastive adapter's, but for less noise: clusters are found in the raw states."""
    return test_adapter.confusable(seed, kinds=kinds, loud=1.0)


def accuracy_of(adapter: Adapter) -> float:
    """Retrieval accuracy@1 by L2, of other entries than those trained on."""
    (stored, values), (asked, truth) = confusable(0), confusable(1)
    with torch.no_grad():
        keys, queries = (adapter(torch.from_numpy(states.astype(np.float32))) for states in (stored, asked))
    return float((values[torch.cdist(queries, keys).argmin(1).numpy()] == truth).mean())


SMALL = CkmtSettings(inner=32, width=8, batch=64, steps=400, validate_every=100, learning_rate=3e-3, eps=6.0)


@pytest.mark.parametrize("counts", [True, False])
def test_training_raises_retrieval_accuracy_and_keeps_the_best_step(counts: bool) -> None:
    reported: list[Step] = []
    trained = train(*confusable(0), replace(SMALL, centroid_counts=counts), accuracy_of, reported.append)
    start = trained.curve[0].accuracy
    assert start < 0.75
    assert accuracy_of(trained.adapter) == max(step.accuracy for step in trained.curve) > start + 0.15
    assert [step.step for step in trained.curve] == [0, 100, 200, 300, 400]
    assert reported == trained.curve[1:]
    assert reported[-1].loss < reported[0].loss
    assert all(0 < step.sampling < 1 and step.seconds > 0 for step in reported)


def test_the_network_is_the_papers() -> None:
    trained = train(*confusable(0), CkmtSettings(steps=1, eps=6.0), accuracy_of)
    adapter = trained.adapter
    assert (adapter.inner.out_features, adapter.width, adapter.tanh, adapter.residual) == (256, 64, True, False)
    paper = CkmtSettings()
    assert (paper.batch, paper.smoothing, paper.min_samples, paper.cap) == (1024, 2e-3, 4, 100_000)
    assert (paper.learning_rate, paper.least_rate) == (3e-4, 3e-5)


def test_the_loss_of_a_step_is_that_of_what_was_drawn() -> None:
    """Two values, each one state repeated: whatever is drawn, positives are pivots and negatives the other's."""
    states = np.random.default_rng(0).normal(size=(2, 6)).astype(np.float16)
    values = np.repeat(np.arange(2), 6).astype(np.int32)
    seen: list[Adapter] = []

    def validate(adapter: Adapter) -> float:
        seen.append(adapter)
        return 0.0

    settings = replace(SMALL, steps=1, validate_every=1, learning_rate=1e-12, least_rate=0.0)
    reached = train(states[values], values, settings, validate).curve[1].loss
    z = seen[0](torch.from_numpy(states.astype(np.float32))).detach().double().numpy()
    assert reached == pytest.approx(reference_loss(z, z, z[::-1], SMALL.smoothing), rel=1e-4)


def test_a_seed_decides_everything_and_the_global_one_nothing() -> None:
    settings = replace(SMALL, steps=20, validate_every=10, eps=None, cap=15, batch=8)
    torch.manual_seed(1)
    one = train(*confusable(0), settings, accuracy_of)
    torch.manual_seed(2)
    again = train(*confusable(0), settings, accuracy_of)
    other = train(*confusable(0), replace(settings, seed=1), accuracy_of)
    assert one.curve[-1].loss == again.curve[-1].loss != other.curve[-1].loss
    assert same(one.adapter, again.adapter)
    assert not same(one.adapter, other.adapter)


def test_clusters_made_before_are_used() -> None:
    settings = replace(SMALL, steps=10, validate_every=10)
    made = clustered(*confusable(0), settings)
    one, given = (train(*confusable(0), settings, accuracy_of, clustered=c).curve[-1].loss for c in (None, made))
    assert one == given
    coarse = clustered(*confusable(0), replace(settings, eps=0.01, min_samples=100))
    assert train(*confusable(0), settings, accuracy_of, clustered=coarse).curve[-1].loss != one


def test_the_rate_falls_at_a_plateau_down_to_the_least(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen from outside: a rate of 0 moves nothing."""
    rates = []
    step = torch.optim.AdamW.step

    def noted(optimiser: torch.optim.AdamW) -> None:
        rates.append(optimiser.param_groups[0]["lr"])
        step(optimiser)

    monkeypatch.setattr(torch.optim.AdamW, "step", noted)
    settings = replace(SMALL, steps=9, validate_every=1, learning_rate=0.8, least_rate=0.3, plateau=1, patience=20)
    validate, _ = scripted([0.0, 0.1, 0.2, 0.2, 0.2, 0.3, 0.3, 0.3, 0.3, 0.3])  # as good is not better
    train(*confusable(0), settings, validate)
    assert rates == pytest.approx([0.8, 0.8, 0.8, 0.8, 0.4, 0.4, 0.4, 0.3, 0.3])


def test_training_stops_when_patience_ends_and_gives_the_best() -> None:
    validate, seen = scripted([0.1, 0.2, 0.5, *[0.5] * 20])
    trained = train(*confusable(0), replace(SMALL, steps=60, validate_every=2, patience=3), validate)
    assert len(seen) == 3 + 3
    assert same(trained.adapter, seen[2])
    assert not same(trained.adapter, seen[-1])


@pytest.mark.parametrize("entries", [0, 1, 9])
def test_without_two_clusters_there_is_a_way_out(entries: int) -> None:
    states = np.random.default_rng(0).normal(size=(entries, 6)).astype(np.float16)
    with pytest.raises(InputError, match=r"fewer than two clusters .* --method knn-mt"):
        train(states, np.zeros(entries, np.int32), replace(SMALL, eps=100.0), lambda _: 0.0)


def test_two_clusters_are_enough_and_noise_is_none() -> None:
    states, values = confusable(0, kinds=2)
    for eps, enough in ((100.0, True), (0.01, False)):
        settings = replace(SMALL, eps=eps, steps=2, validate_every=1)
        if enough:
            assert all(math.isfinite(s.loss) for s in train(states, values, settings, lambda _: 0.0).curve[1:])
        else:
            with pytest.raises(InputError, match=r"eps 0\.01 leaves"):
                train(states, values, settings, lambda _: 0.0)


@pytest.mark.parametrize("eps", [0.0, -1.0, math.nan])
def test_an_eps_that_is_no_radius_is_refused(eps: float) -> None:
    with pytest.raises(InputError, match="must be above 0"):
        CkmtSettings(eps=eps)
