"""KSTER's shares against the equations in float64, and trainings in which bandwidth and weight must both be read."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

import tiny
from clknn.errors import InputError
from clknn.methods.adaptive import MetaK
from clknn.methods.kster import PAPER, SETTINGS, START, Kernel, train
from clknn.mixing import Neighbours, Shares, from_other_pairs
from clknn.tuning import Retrieved, log_p_mix, retrieved_of, tune

Doubles = npt.NDArray[np.float64]
seeds = st.integers(0, 2**32 - 1)
V, P = 7, 6


def made(seed: int, k: int = 5, rows: int = 6, normed: bool = False) -> Neighbours:
    """Neighbours with their keys, some absent, all absent in the last row; of length one they have similarities."""
    rng = np.random.default_rng(seed)
    queries, keys = rng.normal(size=(rows, P)), rng.normal(size=(rows, k, P))
    if normed:
        queries, keys = (x / np.linalg.norm(x, axis=-1, keepdims=True) for x in (queries, keys))
    found = rng.random((rows, k)) < 0.7
    found[0], found[-1] = True, False
    near = np.einsum("rkp,rp->rk", keys, queries) if normed else ((keys - queries[:, None]) ** 2).sum(-1)
    nearness = torch.tensor(near, dtype=torch.float32)
    return Neighbours(
        torch.tensor(rng.integers(0, 99, (rows, k))),
        torch.tensor(rng.integers(0, V, (rows, k))),
        torch.tensor(found),
        similarity=nearness if normed else None,
        distance=None if normed else nearness,
        queries=torch.tensor(queries, dtype=torch.float32),
        keys=torch.tensor(keys, dtype=torch.float32),
    )


def fresh(laplacian: bool, seed: int = 0, scale: float = 1.3) -> Kernel:
    """A kernel whose bandwidth and weight differ much from row to row."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        kernel = Kernel(5, P, laplacian, bandwidth=1.7, scale=scale)
        torch.nn.init.normal_(kernel.bandwidth.weight, std=0.3)
        torch.nn.init.normal_(kernel.outer.weight)
    return kernel


def reference(kernel: Kernel, neighbours: Neighbours) -> tuple[Doubles, Doubles]:
    """The shares, row by row in float64, with distances from the keys themselves."""
    assert neighbours.queries is not None
    assert neighbours.keys is not None
    wb, bb, w1, b1, w2, b2 = (p.detach().double().numpy() for p in kernel.parameters())
    rows, k = neighbours.found.shape
    of_model, of_neighbour = np.ones(rows), np.zeros((rows, k))
    for r in range(rows):
        found = neighbours.found[r].numpy()
        if not found.any():
            continue
        q, keys = neighbours.queries[r].double().numpy(), neighbours.keys[r].double().numpy()[found]
        d2 = ((keys - q) ** 2).sum(1)
        sigma = np.exp(wb @ np.concatenate([q, keys.mean(0)]) / float(kernel.scale) + bb)
        e = np.exp(-(np.sqrt(d2) if kernel.laplacian else d2) / sigma)
        smoothed = (e[:, None] * keys).sum(0) / e.sum()
        hidden = np.maximum(w1 @ np.concatenate([q, smoothed]) / float(kernel.scale) + b1, 0)
        weight = 1 / (1 + np.exp(-(w2 @ hidden + b2)))[0]
        of_model[r], of_neighbour[r, found] = 1 - weight, weight * e / e.sum()
    return of_model, of_neighbour


@given(seeds, st.booleans(), st.booleans())
@settings(max_examples=40, deadline=None)
def test_the_shares_equal_the_equations(seed: int, laplacian: bool, normed: bool) -> None:
    neighbours, kernel = made(seed, normed=normed), fresh(laplacian, seed)
    shares = kernel.shares(torch.zeros(6, V), neighbours)
    of_model, of_neighbour = reference(kernel, neighbours)
    np.testing.assert_allclose(shares.of_model.detach(), of_model, rtol=2e-3, atol=1e-5)
    np.testing.assert_allclose(shares.of_neighbour.detach(), of_neighbour, rtol=2e-3, atol=1e-5)


@pytest.mark.parametrize(("laplacian", "ratio"), [(False, math.exp(8 / 4)), (True, math.exp(2 / 4))])
def test_the_shares_by_hand(laplacian: bool, ratio: float) -> None:
    """Squared distances 1 and 9, sigma 4; the weight is sigmoid(ln 3)."""
    kernel = Kernel(2, 1, laplacian, bandwidth=4.0)
    torch.nn.init.zeros_(kernel.outer.weight)
    torch.nn.init.constant_(kernel.outer.bias, math.log(3))
    ids = torch.tensor([[0, 1]])
    keys = torch.tensor([[[1.0], [-3.0]]])
    far = torch.tensor([[1.0, 9.0]])
    shares = kernel.forward(Neighbours(ids, ids, ids >= 0, distance=far, queries=torch.zeros(1, 1), keys=keys))
    assert shares.of_model.item() == pytest.approx(0.25)
    expected = [0.75 * ratio / (1 + ratio), 0.75 / (1 + ratio)]
    np.testing.assert_allclose(shares.of_neighbour.detach()[0], expected, rtol=1e-5)


@given(seeds, st.booleans())
@settings(max_examples=30, deadline=None)
def test_shares_are_one_together_and_the_models_alone_where_nothing_was_found(seed: int, laplacian: bool) -> None:
    neighbours, kernel = made(seed), fresh(laplacian, seed)
    shares = kernel.forward(neighbours)
    np.testing.assert_allclose((shares.of_model + shares.of_neighbour.sum(1)).detach(), 1, rtol=1e-5)
    assert shares.of_neighbour[~neighbours.found].eq(0).all()
    empty = ~neighbours.found.any(1)
    assert shares.of_model[empty].eq(1).all()
    assert shares.of_neighbour[~empty].sum(1).gt(0).all()
    log_p = torch.log_softmax(torch.randn(6, V, generator=torch.Generator().manual_seed(0)), 1)
    assert torch.equal(tiny.mixed(log_p, neighbours, kernel)[empty], log_p[empty])


@given(seeds, st.booleans())
@settings(max_examples=30, deadline=None)
def test_the_order_of_neighbours_does_not_matter(seed: int, laplacian: bool) -> None:
    neighbours, kernel = made(seed), fresh(laplacian, seed)
    order = torch.randperm(5, generator=torch.Generator().manual_seed(seed % 1000))
    moved = replace(neighbours, queries=None)._each(lambda tensor: tensor[:, order])
    one, other = kernel.forward(neighbours), kernel.forward(replace(moved, queries=neighbours.queries))
    np.testing.assert_allclose(other.of_model.detach(), one.of_model.detach(), rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(other.of_neighbour.detach(), one.of_neighbour.detach()[:, order], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("laplacian", [False, True])
@pytest.mark.parametrize("rubbish", [math.nan, math.inf, -math.inf, 3.4e38])
def test_what_was_not_found_never_matters(laplacian: bool, rubbish: float) -> None:
    clean, kernel = made(1), fresh(laplacian)
    assert clean.distance is not None
    assert clean.keys is not None
    dirty = replace(
        clean,
        values=clean.values.masked_fill(~clean.found, -1),
        distance=clean.distance.masked_fill(~clean.found, rubbish),
        keys=clean.keys.masked_fill(~clean.found[:, :, None], rubbish),
    )
    gradients = []
    for neighbours in (clean, dirty):
        shares = kernel.forward(neighbours)
        kernel.zero_grad()
        (shares.of_model.sum() + shares.of_neighbour[:, 0].sum()).backward()
        gradients.append([p.grad.clone() for p in kernel.parameters() if p.grad is not None])
    assert same(kernel.forward(clean), kernel.forward(dirty))
    assert all(torch.equal(one, other) and one.isfinite().all() for one, other in zip(*gradients, strict=True))


@pytest.mark.parametrize("laplacian", [False, True])
def test_every_weight_has_a_gradient(laplacian: bool) -> None:
    kernel = Kernel(5, P, laplacian, bandwidth=2.0)  # as it is when training starts
    shares = kernel.forward(made(2, rows=60))
    (shares.of_neighbour * torch.rand(60, 5, generator=torch.Generator().manual_seed(3))).sum().backward()
    for p in kernel.parameters():
        assert p.grad is not None
        assert p.grad.ne(0).all()


@pytest.mark.parametrize("laplacian", [False, True])
@pytest.mark.parametrize("bias", [-1e4, 1e4])
def test_a_bandwidth_out_of_all_bounds_is_still_a_number(laplacian: bool, bias: float) -> None:
    """Also where a neighbour is the query itself, and rounding has made its distance negative."""
    kernel, neighbours = fresh(laplacian), made(3)
    assert neighbours.distance is not None
    torch.nn.init.constant_(kernel.bandwidth.bias, bias)
    far = neighbours.distance * 1e4
    far[0, 0], far[1, :2] = -1e-6, 0.0
    shares = kernel.forward(replace(neighbours, distance=far))
    (shares.of_model.sum() + shares.of_neighbour[:, 0].sum()).backward()
    assert shares.of_neighbour.isfinite().all()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in kernel.parameters())
    of_first = shares.of_neighbour[0, 0] / shares.of_neighbour[0].sum()
    assert of_first.item() == pytest.approx(1.0 if bias < 0 else 0.2, rel=1e-4)


# ---- retrieval dropout


def test_neighbours_of_the_querys_own_pair_are_taken_out() -> None:
    neighbours = made(4, rows=3)
    found = torch.tensor([[True] * 5, [True, True, True, True, False], [True] * 5])
    assert neighbours.keys is not None
    assert neighbours.distance is not None
    found_in = torch.tensor([[7, 1, 7, 2, 3], [7, 8, 9, 8, 9], [7, 7, 7, 7, 7]])
    others = from_other_pairs(replace(neighbours, found=found), found_in, torch.tensor([7, 8, 7]), 3)
    assert others.found.tolist() == [[True, True, True], [True, True, False], [False, False, False]]
    assert torch.equal(others.queries, neighbours.queries)
    for row, columns in ((0, [1, 3, 4]), (1, [0, 2])):  # those that stay, nearest first
        n = len(columns)
        for name in ("ids", "values", "distance", "keys"):
            assert torch.equal(getattr(others, name)[row, :n], getattr(neighbours, name)[row, columns])
    assert others.keys is not None
    assert others.keys.shape == (3, 3, P)


# ---- saving


@pytest.mark.parametrize("laplacian", [False, True])
def test_a_saved_kernel_has_the_same_shares_bit_for_bit(laplacian: bool, tmp_path: Path) -> None:
    kernel, neighbours = fresh(laplacian, scale=1 / 3), made(4)
    save_file({**kernel.tensors(), **MetaK(4, 1.0).tensors()}, tmp_path / "combiner.safetensors")
    again = Kernel.of(load_file(tmp_path / "combiner.safetensors"))
    assert again is not None
    assert (again.k, again.laplacian, again.wants_keys) == (5, laplacian, True)
    assert same(kernel.forward(neighbours), again.forward(neighbours))
    assert not any(p.requires_grad for p in again.parameters())
    assert Kernel.of(MetaK(4, 1.0).tensors()) is None


def same(one: Shares, other: Shares) -> bool:
    return torch.equal(one.of_model, other.of_model) and torch.equal(one.of_neighbour, other.of_neighbour)


# ---- training


def telling(seed: int, pairs: int = 250, by_bandwidth: bool = False, unit: float = 1.0) -> Retrieved:
    """The first number of a query tells whom to believe.

    Above 0 the neighbours are right, and below all are wrong; or, by bandwidth, above 0 the nearest alone is right,
    and below the others are, which agree. The model knows little.
    """
    rng = np.random.default_rng(seed)
    rows, k, vocabulary = pairs * 8, 6, 30
    truth = rng.integers(0, vocabulary, rows)
    queries = rng.normal(size=(rows, P))
    apart = rng.normal(size=(rows, k, P))
    apart *= np.linspace(0.3, 1.5, k)[:, None] / np.linalg.norm(apart, axis=-1, keepdims=True)
    wrong = (truth[:, None] + rng.integers(1, vocabulary, (rows, 1))) % vocabulary
    above, first = queries[:, :1] > 0, np.arange(k) == 0
    values = np.where(above == first if by_bandwidth else above, truth[:, None], wrong)
    logits = rng.normal(size=(rows, vocabulary))
    logits[np.arange(rows), truth] += rng.normal(2.0, 1.5, rows)
    neighbours = Neighbours(
        torch.zeros(rows, k, dtype=torch.long),
        torch.tensor(values),
        torch.tensor(rng.random((rows, 1)) < 0.95).expand(rows, k),
        distance=torch.tensor((apart**2).sum(-1) * unit**2, dtype=torch.float32),
        queries=torch.tensor(queries * unit, dtype=torch.float32),
        keys=torch.tensor((queries[:, None] + apart) * unit, dtype=torch.float32),
    )
    log_p = torch.log_softmax(torch.tensor(logits, dtype=torch.float32), 1)
    return retrieved_of(neighbours, log_p, torch.tensor(truth), torch.arange(pairs).repeat_interleave(8))


QUICK = replace(SETTINGS, learning_rate=1e-2, updates=400)


@pytest.mark.parametrize("laplacian", [False, True])
@pytest.mark.parametrize("by_bandwidth", [False, True])
def test_it_beats_every_fixed_setting_on_other_pairs(laplacian: bool, by_bandwidth: bool) -> None:
    learned = train(telling(0, by_bandwidth=by_bandwidth), 6, laplacian, QUICK)
    other = telling(1, by_bandwidth=by_bandwidth)
    shares = learned.combiner.shares(torch.zeros(1), other.neighbours)
    # The grid is searched on the very pairs that it is judged by, and still has to treat all tokens alike.
    tuned = tune(other.neighbours, other.log_p, other.truth, scaled=False)
    assert tuned.log_likelihood > tuned.base
    assert float(log_p_mix(other, shares).mean()) > tuned.log_likelihood + 0.2
    queries = other.neighbours.queries
    assert queries is not None
    found = other.neighbours.found.any(1)
    high, low = found & (queries[:, 0] > 0.5), found & (queries[:, 0] < -0.5)
    believed = shares.of_neighbour[:, 0] if by_bandwidth else 1 - shares.of_model
    assert believed[high].mean() > 0.8 > 0.2 > believed[low].mean()


@pytest.mark.parametrize("laplacian", [False, True])
def test_training_starts_from_a_usable_kernel_whatever_the_unit(laplacian: bool) -> None:
    few = replace(QUICK, updates=40)
    start = train(telling(0, 60), 6, laplacian, replace(QUICK, updates=0)).combiner
    some = telling(0, 60)
    assert some.neighbours.distance is not None
    median = float(some.neighbours.distance[some.neighbours.found].median())  # the lower of two
    sigma = START * median if not laplacian else START * math.sqrt(median) / 2
    assert start.bandwidth.bias.exp().item() == pytest.approx(sigma, rel=1e-5)
    assert start.bandwidth.weight.eq(0).all()
    curves = [train(telling(0, 60, unit=unit), 6, laplacian, few).curve for unit in (1e-3, 1.0, 1e3)]
    for curve in curves[1:]:
        np.testing.assert_allclose([p.log_likelihood for p in curve], [p.log_likelihood for p in curves[0]], rtol=1e-3)


def test_a_seed_decides_everything_and_the_global_one_nothing() -> None:
    some, few = telling(0, 60), replace(QUICK, updates=30)
    torch.manual_seed(1)
    one = train(some, 4, False, few)
    torch.manual_seed(2)
    again = train(some, 4, False, few)
    other = train(some, 4, False, replace(few, seed=1))
    near = some.neighbours.first(4)
    shares = [learned.combiner.forward(near) for learned in (one, again, other)]
    assert one.combiner.k == 4
    assert same(shares[0], shares[1])
    assert not same(shares[0], shares[2])


def test_neighbours_without_keys_are_refused() -> None:
    some = telling(0, 10)
    with pytest.raises(InputError, match="retrieve them with keys"):
        train(replace(some, neighbours=replace(some.neighbours, keys=None)), 6)
    with pytest.raises(InputError, match="k is 0"):
        Kernel(0, P, laplacian=False)


def test_the_papers_settings() -> None:
    assert (PAPER.learning_rate, PAPER.updates, SETTINGS.learning_rate) == (2e-4, 30_000, 2e-4)
    assert [tuple(p.shape) for p in Kernel(16, P, False).parameters()] == [
        (1, 2 * P), (1,), (P, 2 * P), (P,), (1, P), (1,)
    ]  # fmt: skip
