"""Refining: whose neighbours are looked at, the loss against numpy, and states in which only it can find the way."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from clknn.index import exact_search
from clknn.methods.neighbourhood import Neighbourhoods, RefineSettings, loss, neighbourhoods, refine
from clknn.projection import Projection, fit

QUICK = RefineSettings(k=8, spare=4, anchors=600, rounds=4, epochs=4, batch=64, learning_rate=0.02, warmup=5)
D = 12


def entries(seed: int, n: int = 600) -> tuple[npt.NDArray[np.float16], npt.NDArray[np.int32], npt.NDArray[np.int32]]:
    """States whose value shows in 3 quiet dimensions, under 9 loud ones that say nothing; 3 entries a pair."""
    rng = np.random.default_rng(seed)
    values = rng.integers(0, 6, n).astype(np.int32)
    places = np.random.default_rng(99).normal(size=(6, 3))
    quiet = places[values] + 0.1 * rng.normal(size=(n, 3))
    states = np.hstack([quiet, 2 * rng.normal(size=(n, D - 3))]).astype(np.float16)
    return states, values, np.repeat(np.arange(n // 3), 3).astype(np.int32)


def accuracy(projection: Projection) -> float:
    """Of the nearest entry of one set for the states of another."""
    states, values, _ = entries(0)
    asked, truth, _ = entries(1)
    keys = np.concatenate(list(projection.keys(states)))
    near = exact_search(keys, projection(torch.from_numpy(asked.astype(np.float32))).numpy(), 1, inner=True)
    return float((values[near.ids[:, 0]] == truth).mean())


def test_it_finds_what_variance_hides() -> None:
    states, values, pairs = entries(0)
    before = fit(states, None, 6)
    after = refine(before, states, values, pairs, QUICK)
    assert accuracy(after) > accuracy(before) + 0.3
    assert after.normed
    assert after.axes is not None
    assert after.axes.shape == (D, 6)


def test_the_same_seed_gives_the_same_projection_and_the_given_one_is_left_alone() -> None:
    states, values, pairs = entries(0)
    before = fit(states, None, 6)
    assert before.axes is not None
    axes = before.axes.clone()
    one, two = (refine(before, states, values, pairs, QUICK).axes for _ in range(2))
    assert one is not None
    assert two is not None
    assert torch.equal(one, two)
    assert torch.equal(before.axes, axes)


def test_no_anchor_meets_an_entry_of_its_own_pair() -> None:
    """The leak that flatters most: an entry finds itself, and all is well."""
    states, values, pairs = entries(0)
    projection, anchors = fit(states, None, 6), np.arange(0, 600, 7)
    near = neighbourhoods(projection, states, values, pairs, anchors, 8, 4)
    assert near.entries.shape == (len(anchors), 8)
    assert near.found.all()
    assert (pairs[near.entries] != pairs[anchors][:, None]).all()
    assert (near.right == (values[near.entries] == values[anchors][:, None])).all()
    keys = np.concatenate(list(projection.keys(states))).astype(np.float32)
    for row, anchor in enumerate(anchors):
        nearness = np.where(pairs == pairs[anchor], -np.inf, keys @ keys[anchor])
        assert nearness[near.entries[row]].min() >= np.sort(nearness)[-8] - 1e-4


def test_one_pair_as_the_whole_memory_leaves_the_projection() -> None:
    states, values, _ = entries(0, 30)
    projection = fit(states, None, 4)
    refined = refine(projection, states, values, np.zeros(30, np.int32), QUICK)
    assert projection.axes is not None
    assert refined.axes is not None
    assert torch.equal(refined.axes, projection.axes)


def test_the_loss_is_the_right_neighbours_share_of_p_knn() -> None:
    states, _, _ = entries(2, 30)
    projection = fit(states, None, 4)
    rng = np.random.default_rng(0)
    near_to = rng.integers(0, 30, (5, 6))
    found = np.ones((5, 6), np.bool_)
    found[:, 5] = False
    right = rng.random((5, 6)) < 0.5
    right[:, 0], right[:, 1], right[:, 5] = True, False, False
    assert projection.mean is not None
    assert projection.axes is not None
    weights, heat = [projection.mean, projection.axes], torch.tensor(np.log(0.1))
    anchors = np.arange(5)
    reached = loss(projection, weights, heat, states, anchors, Neighbourhoods(near_to, found, right), np.arange(5))
    keys = projection(torch.from_numpy(states.astype(np.float32))).numpy().astype(np.float64)
    share = np.exp(np.einsum("bkp,bp->bk", keys[near_to], keys[anchors]) / 0.1) * found
    np.testing.assert_allclose(reached.item(), -np.log((share * right).sum(1) / share.sum(1)).mean(), rtol=1e-4)
