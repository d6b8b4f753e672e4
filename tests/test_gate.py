"""The gate's shares: what they start as, what they must be, and a training in which the model's opinion decides."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

import tiny
from clknn.errors import InputError
from clknn.methods.gate import FEATURES, Gate, GateTuner, train
from clknn.mixing import Mixing, Neighbours
from clknn.tuning import Learning, Retrieved, log_p_mix, retrieved_of, tune

V = 9
seeds = st.integers(0, 2**32 - 1)


def made(seed: int, rows: int = 6, k: int = 5) -> tuple[Neighbours, torch.Tensor]:
    """Neighbours, some absent, all absent in the last row; and log p_model [R, V]."""
    rng = np.random.default_rng(seed)
    found = rng.random((rows, k)) < 0.7
    found[0], found[-1] = True, False
    similarity = -np.sort(-rng.uniform(-0.2, 1, (rows, k)), axis=1)
    near = Neighbours(
        torch.tensor(rng.integers(0, 99, (rows, k))),
        torch.tensor(rng.integers(0, V, (rows, k))),
        torch.tensor(found),
        similarity=torch.tensor(similarity, dtype=torch.float32),
    )
    return near, torch.log_softmax(torch.tensor(rng.normal(size=(rows, V)), dtype=torch.float32), -1)


def wild(seed: int) -> Gate:
    """A gate that says something else of each row."""
    with torch.random.fork_rng():
        torch.manual_seed(seed % 2**31)
        gate = Gate(5, 0.1, 0.6)
        torch.nn.init.normal_(gate.outer.weight)
    return gate


@given(seeds)
@settings(max_examples=20, deadline=None)
def test_it_starts_as_what_the_grid_chose(seed: int) -> None:
    near, log_p = made(seed)
    chosen = Mixing(5, 0.07, 0.45, scaled=False)
    ours, theirs = Gate(5, 0.07, 0.45).shares(log_p, near), chosen.shares(log_p, near)
    torch.testing.assert_close(ours.of_model, theirs.of_model)
    torch.testing.assert_close(ours.of_neighbour, theirs.of_neighbour)


@given(seeds)
@settings(max_examples=20, deadline=None)
def test_shares_are_one_together_and_the_absent_have_none(seed: int) -> None:
    near, log_p = made(seed)
    shares = wild(seed).shares(log_p, near)
    torch.testing.assert_close(shares.of_model + shares.of_neighbour.sum(1), torch.ones(6))
    assert (shares.of_neighbour[~near.found] == 0).all()
    assert (shares.of_neighbour >= 0).all()
    assert shares.of_model[-1] == 1
    torch.testing.assert_close(tiny.mixed(log_p, near, wild(seed)).exp().sum(1), torch.ones(6))


@given(seeds)
@settings(max_examples=20, deadline=None)
def test_what_an_absent_neighbour_holds_does_not_matter(seed: int) -> None:
    near, log_p = made(seed)
    assert near.similarity is not None
    rubbish = Neighbours(
        near.ids, torch.where(near.found, near.values, 3), near.found,
        similarity=torch.where(near.found, near.similarity, float("nan")),
    )  # fmt: skip
    gate = wild(seed)
    torch.testing.assert_close(gate.shares(log_p, near).of_neighbour, gate.shares(log_p, rubbish).of_neighbour)


def test_a_row_does_not_depend_on_the_rows_beside_it() -> None:
    near, log_p = made(4)
    whole = wild(4).shares(log_p, near)
    alone = wild(4).shares(log_p[1:2], near.rows(torch.tensor([1])))
    torch.testing.assert_close(whole.of_neighbour[1:2], alone.of_neighbour)


def test_a_token_the_model_rules_out_adds_no_nan() -> None:
    near, log_p = made(5)
    shares = wild(5).shares(log_p.masked_fill(torch.arange(V) == 2, -torch.inf), near)
    assert shares.of_neighbour.isfinite().all()


def ambiguous(pairs: int, seed: int = 0) -> Retrieved:
    """Equally near neighbours of which the model tells the right one: no k, temperature and weight can use that."""
    rng = np.random.default_rng(seed)
    n = 10 * pairs
    truth = torch.tensor(rng.integers(0, V, n))
    wrong = (truth + torch.tensor(rng.integers(1, V, n))) % V
    values = torch.where(
        torch.tensor(rng.random((n, 1)) < 0.5), torch.stack([truth, wrong], 1), torch.stack([wrong, truth], 1)
    )
    logits = torch.tensor(rng.normal(size=(n, V)), dtype=torch.float32)
    logits.scatter_add_(1, truth[:, None], torch.full((n, 1), 1.5))
    near = Neighbours(
        torch.zeros(n, 2, dtype=torch.long), values, torch.ones(n, 2, dtype=torch.bool), torch.full((n, 2), 0.8)
    )
    return retrieved_of(near, torch.log_softmax(logits, -1), truth, torch.arange(pairs).repeat_interleave(10))


def test_training_learns_to_ask_the_model() -> None:
    retrieved = ambiguous(80)
    grid = tune(retrieved.neighbours, retrieved.log_p, retrieved.truth, scaled=False)
    learned = train(retrieved, grid.mixing, Learning(learning_rate=3e-3, updates=400, smoothing=0.0))
    assert learned.log_likelihood > learned.before + 0.1
    unseen = ambiguous(40, seed=1)
    gate = learned.combiner
    features = gate.features(unseen.neighbours, unseen.log_p_values, unseen.log_p_top, unseen.entropy)
    assert features.shape == (400, FEATURES)
    ours = log_p_mix(unseen, gate.forward(unseen.neighbours, unseen.log_p_values, features)).mean()
    theirs = log_p_mix(unseen, grid.mixing.shares(unseen.log_p[:, None], unseen.neighbours)).mean()
    assert ours > theirs + 0.1


def test_decoding_computes_what_training_saw() -> None:
    """features of `Retrieved` are those of log p_model itself."""
    near, log_p = made(8)
    retrieved = retrieved_of(near, log_p, torch.zeros(6, dtype=torch.long), torch.arange(6))
    gate = wild(8)
    features = gate.features(retrieved.neighbours, retrieved.log_p_values, retrieved.log_p_top, retrieved.entropy)
    seen = gate.forward(retrieved.neighbours, retrieved.log_p_values, features)
    decoded = gate.shares(log_p, near)
    torch.testing.assert_close(seen.of_neighbour, decoded.of_neighbour)
    torch.testing.assert_close(seen.of_model, decoded.of_model)


def test_a_gate_is_what_was_saved(tmp_path: Path) -> None:
    gate = wild(3)
    save_file(gate.tensors(), tmp_path / "g.safetensors")
    again = Gate.of(load_file(tmp_path / "g.safetensors"))
    assert again is not None
    near, log_p = made(3)
    assert torch.equal(again.shares(log_p, near).of_neighbour, gate.shares(log_p, near).of_neighbour)
    assert again.k == gate.k
    assert Gate.of({}) is None


def test_distances_are_refused_by_name() -> None:
    retrieved = ambiguous(4)
    near = Neighbours(
        retrieved.neighbours.ids, retrieved.neighbours.values, retrieved.neighbours.found, distance=torch.ones(40, 2)
    )
    other = retrieved_of(near, torch.zeros(40, V).log_softmax(1), retrieved.truth, retrieved.pair)
    with pytest.raises(InputError, match="distances"):
        GateTuner().choose(other, lambda _: None)
