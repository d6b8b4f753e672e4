"""Tuning against a double loop over the same grid, learning against dense sums; both where the answer is plain."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

import tiny
from clknn.errors import InputError
from clknn.mixing import Mixing, Neighbours, Shares, mix
from clknn.tuning import (
    KS,
    SIMILARITY_TEMPERATURES,
    WEIGHTS,
    Learned,
    Learning,
    Progress,
    Retrieved,
    Tuned,
    learn,
    log_p_mix,
    retrieved_of,
    smoothed_loss,
    temperatures,
    tune,
)

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


# ---- learning


def some_shares(seed: int, neighbours: Neighbours) -> Shares:
    """Any shares that are 1 together, some of them 0."""
    rng = np.random.default_rng(seed)
    rows, k = neighbours.found.shape
    parts = torch.tensor(rng.gamma(0.3, size=(rows, k + 1)))
    parts[:, 1:] *= neighbours.found & torch.tensor(rng.random((rows, k)) < 0.8)
    parts = (parts / parts.sum(1, keepdim=True)).float()
    return Shares(parts[:, 0], parts[:, 1:])


def dense(log_p: Tensor, neighbours: Neighbours, shares: Shares) -> np.ndarray:
    """log p_mix [R, V], number by number in float64."""
    p = shares.of_model.double().numpy()[:, None] * np.exp(log_p.double().numpy())
    for r, i in zip(*np.nonzero(neighbours.found.numpy()), strict=True):
        p[r, int(neighbours.values[r, i])] += float(shares.of_neighbour[r, i])
    return np.log(p)


@pytest.mark.parametrize("smoothing", [0.0, 1e-3, 0.3])
@pytest.mark.parametrize("seed", range(4))
def test_the_smoothed_loss_is_that_of_a_sum_over_the_whole_vocabulary(seed: int, smoothing: float) -> None:
    neighbours, log_p, truth = held_out(seed)  # 12 neighbours of 9 values: all rows repeat some
    retrieved, shares = retrieved_of(neighbours, log_p, truth, truth), some_shares(seed, neighbours)
    mixed = dense(log_p, neighbours, shares)
    right = mixed[np.arange(len(truth)), truth]
    expected = -(1 - smoothing) * right - smoothing * mixed.mean(1)
    np.testing.assert_allclose(smoothed_loss(retrieved, shares, smoothing), expected, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(log_p_mix(retrieved, shares), right, rtol=1e-4, atol=1e-5)


def test_what_is_learned_from_is_the_mix_which_decoding_uses() -> None:
    neighbours, log_p, truth = held_out(10)
    shares = some_shares(10, neighbours)
    mixed = mix(log_p, neighbours, shares).gather(1, truth[:, None])[:, 0]
    retrieved = retrieved_of(neighbours, log_p, truth, truth)
    np.testing.assert_allclose(log_p_mix(retrieved, shares), mixed, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("rubbish", [math.nan, math.inf, -math.inf])
def test_loss_and_gradient_are_numbers_where_shares_are_nothing(rubbish: float) -> None:
    neighbours, log_p, truth = held_out(11)
    retrieved = retrieved_of(neighbours, log_p, truth, truth)
    values = neighbours.values.masked_fill(~neighbours.found, -1)
    retrieved = replace(
        retrieved,
        neighbours=replace(neighbours, values=values),
        log_p_values=retrieved.log_p_values.masked_fill(~neighbours.found, rubbish),
    )
    of_model, of_neighbour = torch.ones(24), torch.zeros(24, 12)
    of_model[4:9] = 0
    of_neighbour[4:9, 0] = 1
    of_model.requires_grad_(), of_neighbour.requires_grad_()
    loss = smoothed_loss(retrieved, Shares(of_model, of_neighbour), 1e-3)
    loss.sum().backward()
    for tensor in (loss, of_model.grad, of_neighbour.grad):
        assert tensor is not None
        assert tensor.isfinite().all()


def test_a_token_that_the_model_forbids_cannot_be_smoothed() -> None:
    neighbours, log_p, truth = held_out(12)
    log_p[:, 3] = -math.inf
    with pytest.raises(InputError, match="set it to 0"):
        learn_one(retrieved_of(neighbours, log_p, truth, torch.arange(24) // 2), Learning(updates=1))
    learned, _, _ = learn_one(
        retrieved_of(neighbours, log_p, truth, torch.arange(24) // 2), Learning(updates=1, smoothing=0.0)
    )
    assert math.isfinite(learned.curve[-1].loss)


class OneWeight(torch.nn.Module):
    """The least that can be learned: the nearest neighbour's share."""

    def __init__(self) -> None:
        super().__init__()
        self.logit = torch.nn.Parameter(torch.zeros(()))

    def forward(self, neighbours: Neighbours) -> Shares:
        w = torch.sigmoid(self.logit) * neighbours.found[:, 0]
        rest = torch.zeros_like(neighbours.found[:, 1:], dtype=torch.float32)
        return Shares(1 - w, torch.cat([w[:, None], rest], 1))


def learn_one(
    retrieved: Retrieved, settings: Learning, scripted: list[float] | None = None
) -> tuple[Learned[OneWeight], list[tuple[bool, set[int]]], list[Progress]]:
    """What was learned, whether each call was a training's and of which pairs, and what was reported.

    `scripted` weights are what the combiner has at each validation, whatever it learned.
    """
    combiner, calls, reported = OneWeight(), list[tuple[bool, set[int]]](), list[Progress]()

    def shares(some: Retrieved) -> Shares:
        calls.append((torch.is_grad_enabled(), set(some.pair.tolist())))
        if scripted is not None and not torch.is_grad_enabled():
            torch.nn.init.constant_(combiner.logit, scripted[sum(not training for training, _ in calls) - 1])
        return combiner(some.neighbours)

    return learn(combiner, shares, retrieved, settings, reported.append), calls, reported


def right_in_three_of_four(pairs: int = 40) -> Retrieved:
    """Where the nearest neighbour is wrong the model is all but sure, and else it knows nothing: best is w = 3/4."""
    rows = pairs * 4
    truth = torch.arange(rows) % V
    right = torch.arange(rows) >= pairs
    values = torch.where(right, truth, (truth + 1) % V)[:, None].expand(-1, 3)
    logits = torch.zeros(rows, V)
    logits[torch.arange(rows), torch.where(right, (truth + 2) % V, truth)] = 20.0
    found = torch.ones(rows, 3, dtype=torch.bool)
    neighbours = Neighbours(values, values, found, distance=torch.ones(rows, 3))
    pair = torch.randperm(pairs, generator=torch.Generator().manual_seed(0)).repeat(4) * 3  # tokens apart, numbers too
    return retrieved_of(neighbours, torch.log_softmax(logits, 1), truth, pair)


def test_a_weight_is_learned_where_the_answer_is_plain() -> None:
    settings = Learning(learning_rate=0.05, updates=300, smoothing=0.0, validate_every=10, patience=30)
    learned, _, _ = learn_one(right_in_three_of_four(), settings)
    assert torch.sigmoid(learned.combiner.logit).item() == pytest.approx(0.75, abs=0.02)
    assert learned.log_likelihood == pytest.approx(0.75 * math.log(0.75) + 0.25 * math.log(0.25), abs=0.01)
    assert learned.before == pytest.approx(math.log(0.5), abs=1e-3)
    assert learned.base == pytest.approx(0.75 * -20, rel=1e-2)
    assert not learned.combiner.logit.requires_grad


def test_pairs_set_aside_are_whole_and_never_trained_on() -> None:
    some = right_in_three_of_four()
    settings = Learning(updates=30, batch=8, validate_every=7)
    learned, calls, reported = learn_one(some, settings)
    judged = set.union(*(pairs for training, pairs in calls if not training))
    batches = [pairs for training, pairs in calls if training]
    assert len(judged) == 4
    assert learned.tokens == 16
    assert set.union(*batches) == set(some.pair.tolist()) - judged
    assert [len(pairs) for pairs in batches[:5]] == [8, 8, 8, 8, 4]
    assert sum(map(len, batches[:5])) == 36  # each once before any comes again
    assert [p.update for p in learned.curve] == [0, 7, 14, 21, 28, 30]
    assert reported == learned.curve[1:]


@pytest.mark.parametrize("best", [0, 1, 3])
def test_the_best_weights_are_kept(best: int) -> None:
    script = [-2.0, -3.0, -1.5, -4.0]
    script[best] = 0.7
    settings = Learning(updates=30, validate_every=10)
    learned, _, _ = learn_one(right_in_three_of_four(), settings, scripted=script)
    assert learned.combiner.logit.item() == pytest.approx(0.7)
    assert learned.log_likelihood == learned.curve[best].log_likelihood == max(p.log_likelihood for p in learned.curve)
    assert learned.before == learned.curve[0].log_likelihood


@pytest.mark.parametrize("patience", [1, 3])
def test_learning_stops_when_patience_ends(patience: int) -> None:
    script = [-3.0, -1.0, 0.5, *[0.5] * 20]  # as good is not better
    settings = Learning(updates=200, validate_every=5, patience=patience)
    learned, _, _ = learn_one(right_in_three_of_four(), settings, scripted=script)
    assert learned.curve[-1].update == 5 * (2 + patience)


def test_one_pair_cannot_both_teach_and_judge() -> None:
    some = right_in_three_of_four()
    one = some.rows(some.pair == 0)
    assert len(one.truth) == 4
    with pytest.raises(InputError, match="here is 1"):
        learn_one(one, Learning(updates=1))
    learned, _, _ = learn_one(some.rows(some.pair <= 3), Learning(updates=1))
    assert learned.tokens == 4
