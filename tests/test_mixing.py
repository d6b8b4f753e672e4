"""The equations against a float64 reference of a few lines, and what must hold for any neighbours at all."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import tiny
from clknn.errors import InputError
from clknn.mixing import LEAST, Mixing, Neighbours, confidence, first_of_value, kernel, same_value, weights

Doubles = npt.NDArray[np.float64]
seeds = st.integers(0, 2**32 - 1)
temperatures = st.sampled_from([0.01, 0.05, 0.2, 1.0])
V = 11


def made(seed: int, distances: bool = False, rows: int = 5, k: int = 6, share_found: float = 0.7) -> Neighbours:
    """Neighbours with repeated values, some of them absent, the last row without any."""
    rng = np.random.default_rng(seed)
    near = rng.uniform(0, 40, (rows, k)) if distances else rng.uniform(-1, 1, (rows, k))
    found = rng.random((rows, k)) < share_found
    found[-1] = False
    near = torch.tensor(near, dtype=torch.float32)
    return Neighbours(
        torch.tensor(rng.integers(0, 99, (rows, k))),
        torch.tensor(rng.integers(0, V, (rows, k))),
        torch.tensor(found),
        similarity=None if distances else near,
        distance=near if distances else None,
    )


def model(seed: int, rows: int = 5) -> torch.Tensor:
    logits = np.random.default_rng(seed + 1).normal(size=(rows, V)) * 3
    return torch.log_softmax(torch.tensor(logits, dtype=torch.float32), -1)


def reference_kernel(neighbours: Neighbours, temperature: float) -> Doubles:
    near = neighbours.similarity if neighbours.distance is None else -neighbours.distance
    assert near is not None
    shares = np.zeros(near.shape)
    for r, found in enumerate(neighbours.found.numpy()):
        if found.any():
            logits = near[r].numpy().astype(np.float64)[found] / temperature
            shares[r, found] = np.exp(logits - logits.max()) / np.exp(logits - logits.max()).sum()
    return shares


def reference_p_knn(neighbours: Neighbours, temperature: float) -> Doubles:
    p = np.zeros((len(neighbours.found), V))
    for r, shares in enumerate(reference_kernel(neighbours, temperature)):
        for i, share in enumerate(shares):
            if neighbours.found[r, i]:
                p[r, int(neighbours.values[r, i])] += share
    return p


def reference_confidence(neighbours: Neighbours) -> Doubles:
    assert neighbours.similarity is not None
    rows = zip(neighbours.similarity.numpy().astype(np.float64), neighbours.found.numpy(), strict=True)
    return np.array([min(1.0, max(0.0, near[found].mean())) if found.any() else 0.0 for near, found in rows])


def reference_mix(log_p_model: torch.Tensor, neighbours: Neighbours, mixing: Mixing) -> Doubles:
    trust = reference_confidence(neighbours) if mixing.scaled else neighbours.found.any(1).numpy().astype(np.float64)
    w = (mixing.weight * trust)[:, None]
    p = (1 - w) * np.exp(log_p_model.double().numpy()) + w * reference_p_knn(neighbours, mixing.temperature)
    with np.errstate(divide="ignore"):
        return np.log(p)


@given(seeds, temperatures)
def test_kernel_and_p_knn_equal_the_equation_for_similarities(seed: int, temperature: float) -> None:
    neighbours = made(seed)
    expected = reference_kernel(neighbours, temperature)
    np.testing.assert_allclose(kernel(neighbours, temperature), expected, rtol=2e-5, atol=1e-30)
    expected = reference_p_knn(neighbours, temperature)
    np.testing.assert_allclose(tiny.p_knn(neighbours, temperature, V), expected, rtol=2e-5, atol=1e-30)


@given(seeds, st.sampled_from([1.0, 10.0, 100.0]))
def test_kernel_and_p_knn_equal_the_equation_for_distances(seed: int, temperature: float) -> None:
    neighbours = made(seed, distances=True)
    expected = reference_kernel(neighbours, temperature)
    np.testing.assert_allclose(kernel(neighbours, temperature), expected, rtol=2e-5, atol=1e-30)
    expected = reference_p_knn(neighbours, temperature)
    np.testing.assert_allclose(tiny.p_knn(neighbours, temperature, V), expected, rtol=2e-5, atol=1e-30)


def test_p_knn_by_hand() -> None:
    """exp(ln 3) : 1 : 1, of which the first and the last share a value."""
    near = torch.tensor([[math.log(3) * 0.1, 0.0, 0.0]])
    neighbours = Neighbours(torch.tensor([[5, 6, 7]]), torch.tensor([[2, 4, 2]]), near == near, similarity=near)
    np.testing.assert_allclose(tiny.p_knn(neighbours, 0.1, 6), [[0, 0, 0.8, 0, 0.2, 0]], rtol=1e-6)


def test_a_smaller_distance_weighs_more() -> None:
    far = torch.tensor([[1.0, 9.0]])
    neighbours = Neighbours(torch.tensor([[0, 1]]), torch.tensor([[3, 4]]), far == far, distance=far)
    p = tiny.p_knn(neighbours, 4.0, 6)[0]
    assert p[3] / p[4] == pytest.approx(math.exp(2))


@given(seeds, temperatures, st.booleans())
def test_p_knn_sums_to_one_or_is_all_zero_where_nothing_was_found(seed: int, t: float, distances: bool) -> None:
    neighbours = made(seed, distances, share_found=0.2)
    p = tiny.p_knn(neighbours, t, V)
    any_found = neighbours.found.any(1)
    assert not any_found.all()
    np.testing.assert_allclose(p.sum(1)[any_found], 1, rtol=1e-5)
    assert p[~any_found].eq(0).all()
    assert p.ge(0).all()


@given(seeds)
def test_confidence_is_the_mean_similarity_of_those_found_clipped(seed: int) -> None:
    neighbours = made(seed, share_found=0.5)
    np.testing.assert_allclose(confidence(neighbours), reference_confidence(neighbours), rtol=1e-5, atol=1e-7)


def test_confidence_by_hand() -> None:
    similarity = torch.tensor([[0.5, 0.3, 0.9], [-0.5, -0.1, 0.9], [1.2, 1.1, 0.0], [0.9, 0.9, 0.9]])
    found = torch.tensor([[True, True, False], [True, True, False], [True, True, False], [False, False, False]])
    zeros = torch.zeros_like(found, dtype=torch.long)
    got = confidence(Neighbours(zeros, zeros, found, similarity=similarity))
    np.testing.assert_allclose(got, [0.4, 0, 1, 0], rtol=1e-6)


def test_confidence_refuses_distances() -> None:
    with pytest.raises(InputError, match="needs similarities"):
        confidence(made(0, distances=True))
    with pytest.raises(InputError, match="needs similarities"):
        tiny.mixed(model(0), made(0, distances=True), Mixing(6, 10.0, 0.5, scaled=True))


def test_weights_by_hand() -> None:
    similarity = torch.tensor([[0.5, 0.3], [0.5, 0.3]])
    found = torch.tensor([[True, True], [False, False]])
    zeros = torch.zeros_like(found, dtype=torch.long)
    neighbours = Neighbours(zeros, zeros, found, similarity=similarity)
    np.testing.assert_allclose(weights(neighbours, Mixing(2, 0.1, 0.7, scaled=False)), [0.7, 0], rtol=1e-6)
    np.testing.assert_allclose(weights(neighbours, Mixing(2, 0.1, 0.7, scaled=True)), [0.28, 0], rtol=1e-6)


@given(seeds, temperatures, st.sampled_from([0.0, 0.05, 0.5, 0.95]), st.booleans())
def test_mix_equals_the_equation_for_similarities(seed: int, temperature: float, weight: float, scaled: bool) -> None:
    neighbours, mixing = made(seed), Mixing(6, temperature, weight, scaled)
    got = tiny.mixed(model(seed), neighbours, mixing)
    np.testing.assert_allclose(got, reference_mix(model(seed), neighbours, mixing), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(got.exp().sum(1), 1, rtol=1e-5)


@given(seeds, st.sampled_from([0.0, 0.5, 0.95]))
def test_mix_equals_the_equation_for_distances(seed: int, weight: float) -> None:
    neighbours, mixing = made(seed, distances=True), Mixing(6, 10.0, weight, scaled=False)
    expected = reference_mix(model(seed), neighbours, mixing)
    np.testing.assert_allclose(tiny.mixed(model(seed), neighbours, mixing), expected, rtol=1e-5, atol=1e-5)


@given(seeds, st.booleans(), st.booleans())
@settings(max_examples=30)
def test_the_order_of_neighbours_does_not_matter(seed: int, distances: bool, scaled: bool) -> None:
    neighbours = made(seed, distances)
    order = torch.tensor(np.random.default_rng(seed).permuted(np.tile(np.arange(6), (5, 1)), axis=1))
    shuffled = neighbours._each(lambda tensor: tensor.gather(1, order))
    mixing = Mixing(6, 10.0 if distances else 0.05, 0.6, scaled and not distances)
    left, right = (tiny.mixed(model(seed), n, mixing) for n in (neighbours, shuffled))
    np.testing.assert_allclose(left, right, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(tiny.p_knn(neighbours, 0.05, V), tiny.p_knn(shuffled, 0.05, V), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("distances", [False, True])
@pytest.mark.parametrize("nearness", [math.nan, math.inf, -math.inf, 3.4e38, -3.4e38])
@pytest.mark.parametrize("rubbish", [-1, 10**9])
def test_what_was_not_found_never_matters(distances: bool, nearness: float, rubbish: int) -> None:
    clean = made(3, distances, share_found=0.5)
    assert (~clean.found).any(1).sum() > 2
    ids, values = (x.masked_fill(~clean.found, rubbish) for x in (clean.ids, clean.values))
    near = clean.distance if distances else clean.similarity
    assert near is not None
    near = near.masked_fill(~clean.found, nearness)
    dirty = replace(clean, ids=ids, values=values, **{"distance" if distances else "similarity": near})
    mixing = Mixing(6, 0.05, 0.6, scaled=not distances)
    assert torch.equal(kernel(dirty, 0.05), kernel(clean, 0.05))
    assert torch.equal(tiny.p_knn(dirty, 0.05, V), tiny.p_knn(clean, 0.05, V))
    assert torch.equal(tiny.mixed(model(3), dirty, mixing), tiny.mixed(model(3), clean, mixing))
    assert tiny.mixed(model(3), dirty, mixing).isfinite().all()


@pytest.mark.parametrize("scaled", [False, True])
def test_weight_0_gives_the_model_bit_for_bit(scaled: bool) -> None:
    log_p = model(4)
    log_p[1, ::2] = -math.inf  # tokens that the model forbids
    assert torch.equal(tiny.mixed(log_p, made(4), Mixing(6, 0.01, 0.0, scaled)), log_p)


@pytest.mark.parametrize("scaled", [False, True])
def test_a_row_without_neighbours_gives_the_model_bit_for_bit(scaled: bool) -> None:
    log_p = model(5)
    mixed = tiny.mixed(log_p, made(5), Mixing(6, 0.01, 1.0, scaled))
    assert torch.equal(mixed[-1], log_p[-1])
    assert not torch.equal(mixed[:-1], log_p[:-1])


def test_weight_1_gives_log_p_knn() -> None:
    neighbours = made(6)
    mixed = tiny.mixed(model(6), neighbours, Mixing(6, 0.2, 1.0, scaled=False))[:-1]  # the last row has no neighbours
    with np.errstate(divide="ignore"):
        expected = np.log(reference_p_knn(neighbours, 0.2))[:-1]
    # What only the model knows stays possible, as the least there is: an option of `generate` may forbid all else.
    least = np.asarray(model(6), np.float64)[:-1] + np.log(LEAST)
    np.testing.assert_allclose(mixed, np.logaddexp(expected, least), rtol=1e-5, atol=1e-5)
    assert np.isneginf(expected).any()


def test_a_token_that_the_model_forbids_comes_from_its_neighbours() -> None:
    neighbours = made(7)
    log_p = torch.full((5, V), -math.inf)
    log_p[:, 0] = 0.0
    mixed = tiny.mixed(log_p, neighbours, Mixing(6, 0.2, 0.5, scaled=False))
    expected = reference_mix(log_p, neighbours, Mixing(6, 0.2, 0.5, scaled=False))
    np.testing.assert_allclose(mixed, expected, rtol=1e-5, atol=1e-5)


def test_a_small_temperature_does_not_overflow() -> None:
    """exp(1 / 0.001) is infinite even in float64."""
    similarity = torch.tensor([[1.0, 1.0, 0.999, 0.5]])
    neighbours = Neighbours(torch.arange(4)[None], torch.tensor([[1, 2, 1, 3]]), similarity > 0, similarity=similarity)
    first, second = 1 + math.exp(-1), 1.0
    expected = np.array([0, first, second, 0, 0]) / (first + second)
    np.testing.assert_allclose(tiny.p_knn(neighbours, 0.001, 5)[0], expected, rtol=1e-4)
    log_p = torch.full((1, 5), math.log(0.2))
    mixed = tiny.mixed(log_p, neighbours, Mixing(4, 0.001, 0.5, scaled=False))
    np.testing.assert_allclose(mixed.exp()[0], 0.1 + expected / 2, rtol=1e-4)


def test_first_keeps_the_nearest_columns() -> None:
    neighbours = made(8, distances=True)
    two = neighbours.first(2)
    assert torch.equal(two.values, neighbours.values[:, :2])
    assert torch.equal(two.ids, neighbours.ids[:, :2])
    assert torch.equal(two.found, neighbours.found[:, :2])
    assert two.distance is not None
    assert neighbours.distance is not None
    assert torch.equal(two.distance, neighbours.distance[:, :2])
    assert two.similarity is None


@given(seeds)
def test_only_keeps_those_wanted_in_their_order(seed: int) -> None:
    keys, queries = torch.arange(5 * 6 * 2).reshape(5, 6, 2), torch.arange(5)[:, None]
    neighbours = replace(made(seed), queries=queries, keys=keys)
    wanted = torch.tensor(np.random.default_rng(seed).random((5, 6)) < 0.5)
    kept = neighbours.only(wanted)
    assert torch.equal(kept.queries, queries)
    assert kept.keys is not None
    assert kept.similarity is not None
    assert neighbours.similarity is not None
    for r in range(5):
        columns = [i for i in range(6) if wanted[r, i] and neighbours.found[r, i]]
        n = len(columns)
        assert kept.found[r].tolist() == [True] * n + [False] * (6 - n)
        assert torch.equal(kept.values[r, :n], neighbours.values[r, columns])
        assert torch.equal(kept.similarity[r, :n], neighbours.similarity[r, columns])
        assert torch.equal(kept.keys[r, :n], keys[r, columns])


@given(seeds)
def test_each_value_found_is_counted_once(seed: int) -> None:
    neighbours = made(seed)
    first, same = first_of_value(neighbours), same_value(neighbours)
    for r in range(5):
        seen = set[int]()
        for i in range(6):
            value, found = int(neighbours.values[r, i]), bool(neighbours.found[r, i])
            assert bool(first[r, i]) == (found and value not in seen)
            seen |= {value} if found else set()
            alike = (neighbours.values[r] == value) & neighbours.found[r]
            assert torch.equal(same[r, i], alike if found else torch.zeros_like(alike))


@pytest.mark.parametrize(
    ("k", "temperature", "weight", "said"),
    [
        (0, 0.1, 0.5, "k is 0"),
        (-3, 0.1, 0.5, "k is -3"),
        (4, 0.0, 0.5, "temperature is 0.0"),
        (4, -1.0, 0.5, "temperature is -1.0"),
        (4, math.nan, 0.5, "temperature is nan"),
        (4, math.inf, 0.5, "temperature is inf"),
        (4, 0.1, -0.01, "weight is -0.01"),
        (4, 0.1, 1.01, "weight is 1.01"),
        (4, 0.1, math.nan, "weight is nan"),
    ],
)
def test_mixing_refuses_what_has_no_meaning(k: int, temperature: float, weight: float, said: str) -> None:
    with pytest.raises(InputError, match=said):
        Mixing(k, temperature, weight, scaled=False)


def test_mixing_accepts_the_ends() -> None:
    assert Mixing(1, 1e-3, 0.0, scaled=False).weight == 0
    assert Mixing(1, 1e3, 1.0, scaled=True).weight == 1
