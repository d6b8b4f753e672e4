"""The loss, the samplers' distributions, the centres, and a training that learns, stops, resumes and repeats itself."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import cache
from itertools import combinations
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from clknn import adapter as adapters
from clknn.adapter import PAPER, Adapter, AdapterSettings, Classes, Step, Trained, contrastive_loss, train, trainable
from clknn.errors import InputError

Halves = npt.NDArray[np.float16]
Values = npt.NDArray[np.int32]
Doubles = npt.NDArray[np.float64]


def rng(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def fits(observed: npt.ArrayLike, expected: npt.ArrayLike) -> bool:
    """Whether a chi-square statistic is within five standard deviations of its mean."""
    o, e = np.asarray(observed, np.float64).ravel(), np.asarray(expected, np.float64).ravel()
    assert e.min() >= 5
    assert o.sum() == pytest.approx(e.sum())
    freedom = len(o) - 1
    return float(((o - e) ** 2 / e).sum()) < freedom + 5 * math.sqrt(2 * freedom)


# ---- the loss


def reference_loss(anchors: Doubles, candidates: Doubles, pos: Doubles, neg: Doubles, temperature: float) -> float:
    a = anchors / np.linalg.norm(anchors, axis=1, keepdims=True)
    c = candidates / np.linalg.norm(candidates, axis=1, keepdims=True)
    e = np.exp((a @ c.T - 1) / temperature)  # the common factor exp(1 / T') cancels
    return float(np.mean(-np.log((e * pos).sum(1) / (e * (pos + neg)).sum(1))))


def some_batch(seed: int, near: float = 0.0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Four anchors, ten candidates, of which some are nothing to some anchors; `near` draws all together."""
    draw = np.random.default_rng(seed)
    role = draw.integers(0, 3, (4, 10))
    role[:, 0], role[:, 1] = 1, 2  # at least one positive and one negative
    shared = near * draw.normal(size=6)
    z = [torch.tensor(3 * draw.normal(size=(n, 6)) + shared, dtype=torch.float32) for n in (4, 10)]
    return z[0], z[1], torch.tensor(role == 1), torch.tensor(role == 2)


@pytest.mark.parametrize("temperature", [0.01, 0.05, 1.0])
@pytest.mark.parametrize("seed", range(5))
def test_the_loss_is_the_papers_with_the_sum_inside_the_logarithm(seed: int, temperature: float) -> None:
    batch = some_batch(seed, near=2.0 * (seed % 2))
    expected = reference_loss(*(x.double().numpy() for x in batch), temperature)
    assert contrastive_loss(*batch, temperature).item() == pytest.approx(expected, rel=2e-4, abs=1e-5)


def test_the_loss_by_hand() -> None:
    """Positives at cosine 1 and 0, negatives at 0 and -1, T' = 1; the form outside the logarithm would differ."""
    anchor = torch.tensor([[2.0, 0.0]])
    candidates = torch.tensor([[5.0, 0.0], [0.0, 3.0], [0.0, -1.0], [-7.0, 0.0], [1.0, 0.0]])
    positive = torch.tensor([[True, True, False, False, False]])
    negative = torch.tensor([[False, False, True, True, False]])  # the fifth is neither
    e = math.e
    expected = -math.log((e + 1) / (e + 1 + 1 + 1 / e))
    assert contrastive_loss(anchor, candidates, positive, negative, 1.0).item() == pytest.approx(expected, rel=1e-5)


def test_the_loss_and_its_gradient_survive_temperature_001() -> None:
    """exp(1 / 0.01) is infinite in float32, and finite in the float64 of the reference."""
    anchors, candidates, positive, negative = some_batch(1, near=8.0)
    a, c = anchors.clone().requires_grad_(), candidates.clone().requires_grad_()
    cosines = torch.nn.functional.cosine_similarity(a[:, None], c[None], dim=-1)
    assert cosines.max() > 0.9
    assert torch.exp(cosines / 0.01).isinf().any()
    loss = contrastive_loss(a, c, positive, negative, 0.01)
    loss.backward()
    a64, c64 = anchors.double().requires_grad_(), candidates.double().requires_grad_()
    exps = torch.exp(torch.nn.functional.cosine_similarity(a64[:, None], c64[None], dim=-1) / 0.01)
    plain = -torch.log((exps * positive).sum(1) / (exps * (positive | negative)).sum(1)).mean()
    plain.backward()
    assert loss.item() == pytest.approx(plain.item(), rel=1e-4)
    for mine, expected in ((a.grad, a64.grad), (c.grad, c64.grad)):
        assert mine is not None
        assert expected is not None
        assert mine.isfinite().all()
        np.testing.assert_allclose(mine, expected, rtol=1e-2, atol=1e-3 * expected.abs().max().item())


def test_the_loss_at_a_temperature_where_even_float64_overflows() -> None:
    z = torch.tensor([[1.0, 0.0]], requires_grad=True)
    candidates = torch.tensor([[1.0, 0.001], [1.0, 0.0]])
    loss = contrastive_loss(z, candidates, torch.tensor([[True, False]]), torch.tensor([[False, True]]), 1e-4)
    loss.backward()
    assert loss.item() == pytest.approx(math.log(1 + math.exp(0.5e-6 / 1e-4)), rel=1e-2)
    assert z.grad is not None
    assert z.grad.isfinite().all()


# ---- the samplers

COUNTS = {900: 1, 7: 2, 31: 3, 5: 5, 40_000: 9, 12: 1, 77: 20}  # entries of each value


@pytest.fixture(scope="module")
def values() -> Values:
    return np.random.default_rng(3).permutation(np.repeat(list(COUNTS), list(COUNTS.values()))).astype(np.int32)


@pytest.fixture(scope="module")
def classes(values: Values) -> Classes:
    return Classes.of(values)


def members(values: Values, entry: int) -> set[int]:
    return set(np.flatnonzero(values == values[entry]).tolist())


def test_classes_group_the_entries_by_value(classes: Classes, values: Values) -> None:
    assert classes.counts.tolist() == [COUNTS[v] for v in sorted(COUNTS)]
    for c, value in enumerate(sorted(COUNTS)):
        start, count = int(classes.starts[c]), int(classes.counts[c])
        assert classes.order[start : start + count].tolist() == np.flatnonzero(values == value).tolist()
    assert [sorted(COUNTS)[c] for c in classes.of_entry.tolist()] == values.tolist()
    assert (classes.order[classes.starts[classes.of_entry] + classes.rank] == torch.arange(len(values))).all()


@pytest.mark.parametrize("power", [0.0, 0.5, 1.0])
def test_anchors_are_drawn_by_class_frequency_and_uniformly_within(
    classes: Classes, values: Values, power: float
) -> None:
    n = 40_000
    drawn = np.bincount(adapters.draw_anchors(classes, n, power, rng()).numpy(), minlength=len(values))
    share = np.array([COUNTS[v] ** power if COUNTS[v] > 1 else 0.0 for v in COUNTS])
    share = dict(zip(COUNTS, share / share.sum(), strict=True))
    expected = np.array([n * share[v] / COUNTS[v] for v in values.tolist()])  # of each entry
    assert (drawn[expected == 0] == 0).all()  # a class of one gives no anchors
    assert fits(drawn[expected > 0], expected[expected > 0])


@pytest.mark.parametrize("m", [1, 2, 4])
def test_positives_are_other_entries_of_the_class_distinct_where_there_are_enough(
    classes: Classes, values: Values, m: int
) -> None:
    anchors = np.repeat([i for i, v in enumerate(values.tolist()) if COUNTS[v] > 1], 400)
    drawn = adapters.draw_positives(classes, torch.from_numpy(anchors), m, rng()).numpy()
    assert drawn.shape == (len(anchors), m)
    assert (values[drawn] == values[anchors][:, None]).all()
    assert (drawn != anchors[:, None]).all()
    repeats = dict.fromkeys(COUNTS, 0)
    for anchor, row in zip(anchors.tolist(), drawn.tolist(), strict=True):
        repeats[int(values[anchor])] += len(set(row)) < m
    for value, count in COUNTS.items():
        if count > 1:
            assert (repeats[value] > 0) == (count < m + 1)  # with replacement only where it must be


@pytest.mark.parametrize(("value", "m"), [(77, 1), (77, 4), (40_000, 4), (5, 4), (5, 2), (31, 4)])
def test_positives_are_uniform(classes: Classes, values: Values, value: int, m: int) -> None:
    entries = np.flatnonzero(values == value)
    for anchor in entries[[0, 1, -1]].tolist():
        others = sorted(members(values, anchor) - {anchor})
        drawn = adapters.draw_positives(classes, torch.full((4000,), anchor), m, rng(anchor)).numpy()
        counts = np.bincount(drawn.ravel(), minlength=len(values))[others]
        assert fits(counts, np.full(len(others), 4000 * m / len(others)))


def test_every_set_of_positives_is_equally_likely(classes: Classes, values: Values) -> None:
    anchor = int(np.flatnonzero(values == 5)[2])
    drawn = adapters.draw_positives(classes, torch.full((6000,), anchor), 2, rng(8)).tolist()
    sets = Counter(frozenset(row) for row in drawn)
    possible = [frozenset(pair) for pair in combinations(sorted(members(values, anchor) - {anchor}), 2)]
    assert fits([sets[s] for s in possible], [1000] * 6)


def negatives(
    classes: Classes, values: Values, nearest: int, n: int
) -> tuple[npt.NDArray[np.int64], Doubles, npt.NDArray[np.int64]]:
    """5,000 draws for each of three anchors: the anchors, their similarity to the centres, the entries drawn."""
    three = [int(np.flatnonzero(values == v)[0]) for v in (77, 31, 900)]
    similarity = np.random.default_rng(6).uniform(-1, 0.5, (3, len(COUNTS)))
    for row, anchor in enumerate(three):
        similarity[row, sorted(COUNTS).index(int(values[anchor]))] = 1.0  # its own class is nearest of all
    anchors, repeated = np.repeat(three, 5000), np.repeat(similarity, 5000, axis=0)
    drawn = adapters.draw_negatives(
        classes, torch.from_numpy(anchors), torch.from_numpy(repeated).float(), nearest, n, rng(2)
    )
    return anchors, repeated, drawn.numpy()


@pytest.mark.parametrize(("nearest", "n"), [(4, 1), (4, 2), (4, 4), (6, 3), (128, 3), (3, 5), (1, 2)])
def test_negatives_come_uniformly_from_the_nearest_other_classes(
    classes: Classes, values: Values, nearest: int, n: int
) -> None:
    tokens = np.array(sorted(COUNTS))
    anchors, similarity, drawn = negatives(classes, values, nearest, n)
    assert drawn.shape == (15_000, n)
    assert (values[drawn] != values[anchors][:, None]).all()
    distinct = np.array([len(set(row)) == n for row in values[drawn].tolist()])
    among = min(nearest, len(COUNTS) - 1)
    assert distinct.all() if n <= among else not distinct.any()
    for anchor in set(anchors.tolist()):
        mine = anchors == anchor
        ranking = tokens[np.argsort(-similarity[mine][0])]
        near = [v for v in ranking.tolist() if v != values[anchor]][:among]
        counts = Counter(values[drawn[mine]].ravel().tolist())
        assert set(counts) == set(near)  # those of a single entry too
        assert among == 1 or fits([counts[v] for v in near], np.full(among, 5000 * n / among))
        if n == 2 and among == 4:
            sets = Counter(frozenset(row) for row in values[drawn[mine]].tolist())
            assert fits([sets[frozenset(pair)] for pair in combinations(near, 2)], np.full(6, 5000 / 6))


def test_the_entries_of_a_negatives_class_are_drawn_uniformly(classes: Classes, values: Values) -> None:
    _, _, drawn = negatives(classes, values, 128, 3)
    counts = np.bincount(drawn.ravel(), minlength=len(values))
    for value, count in COUNTS.items():
        if count > 1:
            mine = counts[values == value]
            assert fits(mine, np.full(count, mine.sum() / count))


@pytest.mark.parametrize("shared", [False, True])
def test_an_entry_of_the_anchors_class_is_never_its_negative(classes: Classes, values: Values, shared: bool) -> None:
    settings = AdapterSettings(positives=2, negatives=3, shared=shared)
    anchors = adapters.draw_anchors(classes, 12, 1.0, rng(1))
    similarity = torch.rand(12, len(COUNTS), generator=rng(2))
    positives = adapters.draw_positives(classes, anchors, 2, rng(3))
    drawn = adapters.draw_negatives(classes, anchors, similarity, 4, 3, rng(4))
    candidates = torch.cat([positives.flatten(), drawn.flatten()])
    positive, negative = adapters._roles(classes, anchors, candidates, positives.numel(), settings)
    drawn_for = [i // 2 for i in range(24)] + [i // 3 for i in range(36)]
    for b, anchor in enumerate(anchors.tolist()):
        for j, candidate in enumerate(candidates.tolist()):
            is_positive = j < 24 and drawn_for[j] == b
            other = values[candidate] != values[anchor]
            is_negative = other if shared else j >= 24 and drawn_for[j] == b
            assert bool(positive[b, j]) == is_positive
            assert bool(negative[b, j]) == is_negative
            assert other or not is_negative


# ---- the centres


def identity(width: int) -> Adapter:
    """z = h."""
    adapter = Adapter(width, 1, width, residual=True)
    adapter.start_from(torch.zeros(width))
    return adapter


def forward(adapter: Adapter, states: Halves) -> Doubles:
    """The adapter in numpy."""
    w1, b1, w2, b2 = (
        p.detach().double().numpy()
        for p in (adapter.inner.weight, adapter.inner.bias, adapter.outer.weight, adapter.outer.bias)
    )
    h = states.astype(np.float64)
    inner = h @ w1.T + b1
    bent = np.tanh(inner) if adapter.tanh else np.maximum(inner, 0)
    return bent @ w2.T + b2 + (h if adapter.residual else 0)


def unit(x: Doubles) -> Doubles:
    return x / np.linalg.norm(x, axis=-1, keepdims=True)


@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("chunk", [7, 10_000])
def test_centres_are_the_means_of_z(
    classes: Classes, values: Values, residual: bool, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adapters, "CHUNK", chunk)
    states = np.random.default_rng(1).normal(size=(len(values), 6)).astype(np.float16)
    with torch.random.fork_rng():
        torch.manual_seed(2)
        adapter = Adapter(6, 20, 6 if residual else 4, residual)
    z = forward(adapter, states)
    expected = unit(np.stack([z[values == v].mean(0) for v in sorted(COUNTS)]))
    np.testing.assert_allclose(adapters.class_centres(adapter, states, classes), expected, atol=1e-5)
    everything = adapters.class_centres(adapter, states, classes, per_class=20, rng=rng())
    np.testing.assert_allclose(everything, expected, atol=1e-5)


def test_centres_of_a_few_entries_use_members_only(classes: Classes, values: Values) -> None:
    """Every entry has a direction of its own, so that a centre shows which entries made it."""
    states = np.eye(len(values), dtype=np.float16)
    used = Counter[int]()
    for seed in range(60):
        centres = adapters.class_centres(identity(len(values)), states, classes, per_class=3, rng=rng(seed)).numpy()
        for centre, value in zip(centres, sorted(COUNTS), strict=True):
            mine = set(np.flatnonzero(centre).tolist())
            assert mine <= set(np.flatnonzero(values == value).tolist())
            assert len(mine) == COUNTS[value] if COUNTS[value] <= 3 else 1 <= len(mine) <= 3
            assert np.linalg.norm(centre) == pytest.approx(1, abs=1e-6)
            if COUNTS[value] <= 3:
                np.testing.assert_allclose(centre[list(mine)], COUNTS[value] ** -0.5, rtol=1e-5)
            used.update(mine)
    # Where there are more, another draw has others: all twenty of value 77 turn up, about equally often.
    counts = [used[i] for i in np.flatnonzero(values == 77).tolist()]
    assert fits(counts, np.full(20, sum(counts) / 20))


# ---- the module


@pytest.mark.parametrize("tanh", [False, True])
@pytest.mark.parametrize("residual", [False, True])
def test_the_adapter_is_two_layers_and_survives_its_tensors(residual: bool, tanh: bool) -> None:
    states = np.random.default_rng(1).normal(size=(20, 6)).astype(np.float16)
    adapter = Adapter(6, 13, 6 if residual else 3, residual, tanh)
    h = torch.from_numpy(states.astype(np.float32))
    np.testing.assert_allclose(adapter(h).detach(), forward(adapter, states), atol=1e-5)
    again = Adapter.of({"pca.mean": torch.zeros(3), **adapter.tensors()})
    assert again is not None
    assert torch.equal(again(h), adapter(h))
    assert (again.residual, again.tanh, again.width) == (residual, tanh, adapter.width)
    assert not any(p.requires_grad for p in again.parameters())
    assert Adapter.of({"pca.mean": torch.zeros(3)}) is None


# ---- training


@cache
def confusable(seed: int, per: int = 20, kinds: int = 12, loud: float = 2.0) -> tuple[Halves, Values]:
    """Twelve values told apart by 4 of 16 numbers; the other 12 are louder, and noise."""
    means = np.random.default_rng(50).normal(size=(kinds, 4)) * 2.0
    draw = np.random.default_rng(seed)
    values = draw.permutation(np.repeat(np.arange(kinds), per)).astype(np.int32)
    signal = means[values] + 0.3 * draw.normal(size=(len(values), 4))
    noise = loud * draw.normal(size=(len(values), 12))
    turn = np.linalg.qr(np.random.default_rng(51).normal(size=(16, 16)))[0]
    return (np.hstack([signal, noise]) @ turn + 3).astype(np.float16), values


def accuracy_of(adapter: Adapter) -> float:
    """Retrieval accuracy@1 of other entries than those trained on."""
    (stored, values), (asked, truth) = confusable(0), confusable(1)
    keys, queries = unit(forward(adapter, stored)), unit(forward(adapter, asked))
    return float((values[np.argmax(queries @ keys.T, axis=1)] == truth).mean())


SMALL = AdapterSettings(batch=64, steps=80, warmup=5, validate_every=20, centre_entries=8, nearest=6)
SMALL_PAPER = replace(
    PAPER, batch=64, steps=160, warmup=10, validate_every=40, negatives=8, nearest=10, learning_rate=3e-3
)


@pytest.mark.parametrize("settings", [SMALL, replace(SMALL, refresh=15), SMALL_PAPER], ids=["ours", "fresh", "paper"])
def test_training_raises_retrieval_accuracy(settings: AdapterSettings) -> None:
    trained = train(*confusable(0), settings, accuracy_of)
    start = trained.curve[0].accuracy
    assert start < 0.7
    assert accuracy_of(trained.adapter) > start + 0.15
    assert accuracy_of(trained.adapter) == max(step.accuracy for step in trained.curve)
    assert trained.adapter.residual == settings.residual
    assert trained.adapter.width == (16 if settings.residual else 8)
    assert trained.adapter.inner.out_features == 64


def test_the_curve_says_what_happened() -> None:
    reported: list[Step] = []
    trained = train(*confusable(0), SMALL, accuracy_of, advance=reported.append)
    assert [step.step for step in trained.curve] == [0, 20, 40, 60, 80]
    assert reported == trained.curve[1:]
    assert math.isnan(trained.curve[0].loss)
    assert reported[-1].loss < reported[0].loss
    assert [step.best for step in trained.curve] == np.maximum.accumulate([s.accuracy for s in trained.curve]).tolist()
    assert all(0 < step.sampling < 1 and step.seconds > 0 for step in reported)
    assert [s.seconds for s in reported] == sorted(s.seconds for s in reported)


@pytest.mark.parametrize("weight", [0.0, 1.0, 0.5])
def test_the_loss_of_a_step_is_that_of_both_terms(weight: float) -> None:
    """One-hot states less their mean are a simplex: every cosine is 1 or -1/3, whatever is drawn."""
    values = np.repeat(np.arange(4), 6).astype(np.int32)
    states = np.eye(4, dtype=np.float16)[values]
    settings = replace(
        SMALL, steps=1, validate_every=1, shared=False, positives=2, negatives=3, centre_term=weight, temperature=0.5
    )
    right, wrong = math.exp(1 / 0.5), math.exp(-1 / 3 / 0.5)
    contrast = -math.log(2 * right / (2 * right + 3 * wrong))
    over_centres = -math.log(right / (right + 3 * wrong))
    loss = train(states, values, settings, lambda _: 0.0).curve[1].loss
    assert loss == pytest.approx(contrast + weight * over_centres, rel=1e-3)


def test_a_residual_adapter_starts_as_the_state_less_its_mean() -> None:
    states, values = confusable(0)
    adapter = train(states, values, replace(SMALL, steps=0), accuracy_of).adapter
    h = torch.from_numpy(states.astype(np.float32))
    expected = states.astype(np.float64) - states.astype(np.float64).mean(0)
    np.testing.assert_allclose(adapter(h), expected, atol=1e-4)
    assert adapter.inner.weight.std() > 0  # a dead start could not learn


def test_the_schedule_warms_up_and_then_falls_to_a_hundredth() -> None:
    settings = AdapterSettings(warmup=4, steps=104)
    rates = [adapters._schedule(step, settings) for step in (0, 1, 3, 4, 54, 104)]
    np.testing.assert_allclose(rates, [0.25, 0.5, 1, 1, 0.01 + 0.99 / 2, 0.01])


def same(one: Adapter, other: Adapter) -> bool:
    left, right = one.tensors(), other.tensors()
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def test_a_seed_decides_everything_and_the_global_one_nothing() -> None:
    settings = replace(SMALL, steps=20)
    torch.manual_seed(1)
    one = train(*confusable(0), settings, accuracy_of)
    torch.manual_seed(2)
    again = train(*confusable(0), settings, accuracy_of)
    other = train(*confusable(0), replace(settings, seed=1), accuracy_of)
    assert one.curve[-1].loss == again.curve[-1].loss != other.curve[-1].loss
    assert same(one.adapter, again.adapter)
    assert not same(one.adapter, other.adapter)


def test_every_stretch_between_validations_draws_batches_of_its_own() -> None:
    """With weights that do not move, a stretch's loss tells only what was drawn."""
    trained = train(*confusable(0), replace(SMALL, steps=20, validate_every=5, learning_rate=0.0), lambda _: 0.0)
    assert len({step.loss for step in trained.curve[1:]}) == 4


def scripted(accuracies: list[float]) -> tuple[Callable[[Adapter], float], list[Adapter]]:
    """A validation that says these numbers in turn, and the adapters as it saw them."""
    seen: list[Adapter] = []

    def validate(adapter: Adapter) -> float:
        snapshot = Adapter.of({name: tensor.clone() for name, tensor in adapter.tensors().items()})
        assert snapshot is not None
        seen.append(snapshot)
        return accuracies[len(seen) - 1]

    return validate, seen


@pytest.mark.parametrize("best", [0, 1, 2, 4])
def test_the_best_step_is_kept(best: int) -> None:
    accuracies = [0.3, 0.2, 0.3, 0.1, 0.25]
    accuracies[best] = 0.4
    validate, seen = scripted(accuracies)
    trained = train(*confusable(0), replace(SMALL, steps=40, validate_every=10), validate)
    assert len(seen) == 5
    assert [same(trained.adapter, adapter) for adapter in seen] == [i == best for i in range(5)]


@pytest.mark.parametrize("patience", [1, 3])
def test_training_stops_when_patience_ends(patience: int) -> None:
    validate, seen = scripted([0.1, 0.2, 0.5, *[0.5] * 20])  # as good is not better
    trained = train(*confusable(0), replace(SMALL, steps=150, validate_every=5, patience=patience), validate)
    assert len(seen) == 3 + patience
    assert trained.curve[-1].step == 5 * (2 + patience)
    assert same(trained.adapter, seen[2])


@pytest.mark.parametrize(
    ("values", "expected"),
    [([1, 2, 3], False), ([4, 4, 4], False), ([], False), ([7], False), ([1, 1, 2], True)],
)
def test_contrast_needs_two_of_one_value_and_one_of_another(values: list[int], expected: bool) -> None:
    array = np.array(values, np.int32)
    assert trainable(array) == expected
    states = np.random.default_rng(0).normal(size=(len(values), 8)).astype(np.float16)
    settings = replace(SMALL, steps=2, validate_every=1)
    if expected:
        trained = train(states, array, settings, lambda _: 0.0)
        assert all(math.isfinite(step.loss) for step in trained.curve[1:])
    else:
        with pytest.raises(InputError, match="--method knn-mt"):
            train(states, array, settings, lambda _: 0.0)


def test_a_residual_adapter_of_another_width_is_refused() -> None:
    with pytest.raises(InputError, match=r"--width 8 needs --no-residual"):
        train(*confusable(0), replace(SMALL, width=8), accuracy_of)
    assert train(*confusable(0), replace(SMALL_PAPER, width=5, inner=9, steps=0), accuracy_of).adapter.width == 5


# ---- checkpoints


def load_notes(file: Path) -> dict[str, str]:
    with safe_open(file, "pt") as opened:
        return opened.metadata()


def interrupt_at(step: int) -> Callable[[Step], None]:
    def advance(reached: Step) -> None:
        if reached.step == step:
            raise KeyboardInterrupt

    return advance


SHORT = replace(SMALL, steps=40, validate_every=10)


@pytest.fixture(scope="module", params=[None, 7, 10])
def uninterrupted(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Trained, Path]:
    """A training by each of three settings of `refresh`, and its last checkpoint."""
    checkpoint = tmp_path_factory.mktemp("training") / "whole"
    return train(*confusable(0), replace(SHORT, refresh=request.param), accuracy_of, checkpoint), checkpoint


@pytest.mark.parametrize("interrupted", [10, 20, 40])
def test_a_training_interrupted_and_resumed_ends_as_one_that_was_not(
    uninterrupted: tuple[Trained, Path], interrupted: int, tmp_path: Path
) -> None:
    whole, checkpoint = uninterrupted
    settings = AdapterSettings(**json.loads(load_notes(checkpoint)["run"])["settings"])
    with pytest.raises(KeyboardInterrupt):
        train(*confusable(0), settings, accuracy_of, tmp_path / "parts", interrupt_at(interrupted))
    reported: list[Step] = []
    parts = train(*confusable(0), settings, accuracy_of, tmp_path / "parts", reported.append)
    assert reported[0].step == interrupted  # what came before is not done again
    assert same(parts.adapter, whole.adapter)
    assert [(s.step, s.accuracy, s.best) for s in parts.curve] == [(s.step, s.accuracy, s.best) for s in whole.curve]
    assert [s.loss for s in parts.curve[1:]] == [s.loss for s in whole.curve[1:]]
    # The best step may be an early one: the last weights, the optimiser and the centres are in the checkpoints.
    left, right = load_file(tmp_path / "parts"), load_file(checkpoint)
    assert left.keys() == right.keys()
    assert {"centres", "now.adapter.inner.weight", "best.adapter.inner.weight", "adam.0.exp_avg"} <= left.keys()
    assert all(torch.equal(left[name], right[name]) for name in left)
    assert [f.name for f in tmp_path.iterdir()] == ["parts"]


def test_a_refresh_moves_the_centres(tmp_path: Path) -> None:
    """Otherwise the test above would hold of a setting that does nothing."""
    train(*confusable(0), SHORT, accuracy_of, tmp_path / "once")
    train(*confusable(0), replace(SHORT, refresh=7), accuracy_of, tmp_path / "often")
    once, often = load_file(tmp_path / "once")["centres"], load_file(tmp_path / "often")["centres"]
    assert (once * often).sum(1).min() < 0.99


def test_a_finished_training_is_not_done_again(tmp_path: Path) -> None:
    whole = train(*confusable(0), SHORT, accuracy_of, tmp_path / "run")

    def never(_: Adapter) -> float:
        raise AssertionError("validated again")

    again = train(*confusable(0), SHORT, never, tmp_path / "run")
    assert same(again.adapter, whole.adapter)
    assert again.curve[1:] == whole.curve[1:]


@pytest.mark.parametrize(
    "change",
    [{"seed": 1}, {"learning_rate": 2e-3}, {"refresh": 7}, {"inner": 20}, {"centre_term": 0.0}, {"steps": 60}],
)
def test_resuming_with_other_settings_is_refused(change: dict[str, float], tmp_path: Path) -> None:
    """Also with other steps, on which the learning rate of each depends."""
    settings = replace(SHORT, steps=10)
    train(*confusable(0), settings, accuracy_of, tmp_path / "run")
    with pytest.raises(InputError, match=r"run: a training with other settings is half-finished here; delete it"):
        train(*confusable(0), replace(settings, **change), accuracy_of, tmp_path / "run")


def test_resuming_on_other_entries_is_refused(tmp_path: Path) -> None:
    """The datastore grew, or the states are another's: the centres are of other classes."""
    states, values = confusable(0)
    train(states, values, replace(SMALL, steps=20), accuracy_of, tmp_path / "run")
    for other in (confusable(3), (states[:-1], values[:-1])):
        with pytest.raises(InputError, match=r"run: a training with other entries is half-finished here; delete it"):
            train(*other, replace(SMALL, steps=20), accuracy_of, tmp_path / "run")


def test_centres_that_a_checkpoint_has_are_not_computed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(KeyboardInterrupt):
        train(*confusable(0), SHORT, accuracy_of, tmp_path / "run", interrupt_at(20))
    monkeypatch.setattr(adapters, "class_centres", None)
    assert train(*confusable(0), SHORT, accuracy_of, tmp_path / "run").curve[-1].step == 40


def test_settings_are_noted_in_full() -> None:
    assert AdapterSettings(**json.loads(json.dumps(asdict(PAPER)))) == PAPER
    assert (PAPER.positives, PAPER.negatives, PAPER.nearest, PAPER.temperature) == (2, 32, 128, 0.01)
    assert (PAPER.batch, PAPER.steps, PAPER.residual, PAPER.shared) == (32, 500_000, False, False)
    assert (PAPER.centre_term, PAPER.anchor_power, PAPER.inner, PAPER.width) == (0.0, 1.0, None, None)
