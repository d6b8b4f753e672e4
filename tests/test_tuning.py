"""Tuning against a double loop over the same grid, and where it must end up when the answer is plain."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

import tiny
from clknn.mixing import Mixing, Neighbours
from clknn.tuning import KS, SIMILARITY_TEMPERATURES, WEIGHTS, Tuned, temperatures, tune

V = 9


def held_out(seed: int, rows: int = 24, k: int = 12, distances: bool = False) -> tuple[Neighbours, Tensor, Tensor]:
    """Neighbours that are right more often the nearer they are, log p_model [R, V], and the right tokens."""
    rng = np.random.default_rng(seed)
    truth = rng.integers(0, V, rows)
    near = -np.sort(-rng.uniform(0.2, 1, (rows, k)), axis=1)
    values = np.where(rng.random((rows, k)) < near**2, truth[:, None], rng.integers(0, V, (rows, k)))
    found = rng.random((rows, k)) < 0.9
    found[3] = False
    far = torch.tensor(40 * (1 - near), dtype=torch.float32)
    neighbours = Neighbours(
        torch.zeros(rows, k, dtype=torch.long),
        torch.tensor(values),
        torch.tensor(found),
        similarity=None if distances else torch.tensor(near, dtype=torch.float32),
        distance=far if distances else None,
    )
    logits = rng.normal(size=(rows, V))
    logits[np.arange(rows), truth] += rng.normal(1.0, 2.0, rows)
    return neighbours, torch.log_softmax(torch.tensor(logits, dtype=torch.float32), -1), torch.tensor(truth)


def run(neighbours: Neighbours, log_p: Tensor, truth: Tensor, scaled: bool, ks: tuple[int, ...] = KS) -> Tuned:
    return tune(neighbours, log_p.gather(1, truth[:, None])[:, 0], truth, scaled, ks)


def likelihood(neighbours: Neighbours, log_p: Tensor, truth: Tensor, mixing: Mixing) -> float:
    """The mean log p_mix of the right tokens, token by token in float64."""
    near = neighbours.similarity if neighbours.distance is None else -neighbours.distance
    assert near is not None
    total = 0.0
    for r, right in enumerate(truth.tolist()):
        found = [i for i in range(mixing.k) if neighbours.found[r, i]]
        logits = {i: float(near[r, i]) / mixing.temperature for i in found}
        top = max(logits.values(), default=0.0)
        mass = sum(math.exp(x - top) for x in logits.values())
        p_right = sum(math.exp(logits[i] - top) / mass for i in found if int(neighbours.values[r, i]) == right)
        trust = float(bool(found))
        if mixing.scaled and found:
            trust = min(1.0, max(0.0, sum(float(near[r, i]) for i in found) / len(found)))
        w = mixing.weight * trust
        total += math.log(max(1e-30, (1 - w) * math.exp(float(log_p[r, right])) + w * p_right))
    return total / len(truth)


@pytest.mark.parametrize(("scaled", "distances"), [(False, False), (True, False), (False, True)])
@pytest.mark.parametrize("seed", [0, 1])
def test_the_best_of_the_grid_is_the_one_a_double_loop_finds(scaled: bool, distances: bool, seed: int) -> None:
    neighbours, log_p, truth = held_out(seed, distances=distances)
    tuned = run(neighbours, log_p, truth, scaled, ks=(2, 4, 8))
    grid = [Mixing(k, t, w, scaled) for k in (2, 4, 8) for t in temperatures(neighbours) for w in WEIGHTS]
    found = {setting: likelihood(neighbours, log_p, truth, setting) for setting in grid}
    assert max(found.values()) == pytest.approx(tuned.log_likelihood, abs=1e-5)
    assert found[tuned.mixing] == max(found.values())
    assert tuned.base == pytest.approx(float(log_p.gather(1, truth[:, None]).double().mean()), abs=1e-6)
    assert tuned.tokens == len(truth)
    assert len(set(found.values())) > len(grid) // 2  # settings differ, so that the best is a choice


@pytest.mark.parametrize("scaled", [False, True])
def test_the_likelihood_is_that_of_the_mix_which_decoding_uses(scaled: bool) -> None:
    neighbours, log_p, truth = held_out(2)
    tuned = run(neighbours, log_p, truth, scaled)
    mixed = tiny.mixed(log_p, neighbours.first(tuned.mixing.k), tuned.mixing)
    assert tuned.log_likelihood == pytest.approx(float(mixed.gather(1, truth[:, None]).mean()), abs=1e-5)


def test_neighbours_that_are_always_right_get_the_largest_weight() -> None:
    neighbours, log_p, truth = held_out(3)
    everything = torch.ones_like(neighbours.found)
    right = Neighbours(neighbours.ids, truth[:, None].expand(-1, 12), everything, similarity=neighbours.similarity)
    tuned = run(right, log_p, truth, scaled=False)
    assert tuned.mixing.weight == 1.0
    assert tuned.log_likelihood == pytest.approx(0.0, abs=1e-6)


def test_neighbours_that_are_always_wrong_get_the_smallest_weight() -> None:
    neighbours, log_p, truth = held_out(4)
    values = (truth[:, None] + 1 + neighbours.values % (V - 1)) % V
    assert not (values == truth[:, None]).any()
    wrong = Neighbours(neighbours.ids, values, neighbours.found, similarity=neighbours.similarity)
    assert run(wrong, log_p, truth, scaled=False).mixing.weight == min(WEIGHTS)


def test_neighbours_that_were_not_found_are_never_right() -> None:
    neighbours, log_p, truth = held_out(5)
    absent = Neighbours(
        neighbours.ids,
        truth[:, None].expand(-1, 12),
        torch.zeros_like(neighbours.found),
        similarity=neighbours.similarity,
    )
    tuned = run(absent, log_p, truth, scaled=False)
    assert tuned.log_likelihood == pytest.approx(tuned.base, abs=1e-6)


def test_no_k_beyond_the_neighbours_at_hand() -> None:
    neighbours, log_p, truth = held_out(6)
    everything = torch.ones_like(neighbours.found)
    # Only the twelfth neighbour is right, so the largest k there is wins.
    values = (truth[:, None] + 1).expand(-1, 12).clone() % V
    values[:, 11] = truth
    last = Neighbours(neighbours.ids, values, everything, similarity=torch.full((24, 12), 0.9))
    flat = torch.full_like(log_p, -math.log(V) - 5)
    assert run(last, flat, truth, scaled=False, ks=(2, 12, 16)).mixing.k == 12
    assert run(last, flat, truth, scaled=False, ks=(2, 8, 16)).mixing.k in (2, 8)
    assert run(last.first(1), flat, truth, scaled=False).mixing.k == 1
    assert run(last.first(3), flat, truth, scaled=False, ks=(4, 8)).mixing.k == 3


def test_temperatures_of_similarities_are_fixed_and_those_of_distances_follow_the_median() -> None:
    neighbours, _, _ = held_out(7)
    assert temperatures(neighbours) == SIMILARITY_TEMPERATURES
    far = torch.tensor([[1.0, 2.0, 30.0], [3.0, 99.0, 99.0]])
    found = torch.tensor([[True, True, True], [True, False, False]])
    ids = torch.zeros(2, 3, dtype=torch.long)
    assert temperatures(Neighbours(ids, ids, found, distance=far))[-2] == 2.0  # the lower median of 1 2 3 30


@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e6])
def test_distances_are_tuned_whatever_their_unit(scale: float) -> None:
    """Squared distances of some models' states are tiny: no temperature may round to nothing."""
    neighbours, log_p, truth = held_out(8, distances=True)
    assert neighbours.distance is not None
    scaled = Neighbours(neighbours.ids, neighbours.values, neighbours.found, distance=neighbours.distance * scale)
    tuned, expected = run(scaled, log_p, truth, scaled=False), run(neighbours, log_p, truth, scaled=False)
    assert tuned.log_likelihood == pytest.approx(expected.log_likelihood, abs=1e-3)
    assert tuned.mixing.temperature == pytest.approx(expected.mixing.temperature * scale, rel=1e-3)


def test_neighbours_at_distance_nothing_do_not_stop_tuning() -> None:
    """In a memory full of repetitions most neighbours are the state itself; a temperature of 0 would be 0/0."""
    neighbours, log_p, truth = held_out(9, distances=True)
    assert neighbours.distance is not None
    far = neighbours.distance.clone()
    far[:18] = 0
    tuned = run(Neighbours(neighbours.ids, neighbours.values, neighbours.found, distance=far), log_p, truth, False)
    assert math.isfinite(tuned.log_likelihood)
    assert tuned.log_likelihood > tuned.base
    everywhere = Neighbours(neighbours.ids, neighbours.values, neighbours.found, distance=torch.zeros_like(far))
    assert math.isfinite(run(everywhere, log_p, truth, scaled=False).log_likelihood)
