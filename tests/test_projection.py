"""PCA against numpy's SVD, what a projection must leave alone, and its file."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch
from safetensors.torch import save_file

from clknn import projection as projections
from clknn.adapter import Adapter
from clknn.errors import DatastoreError
from clknn.projection import Projection

Halves = npt.NDArray[np.float16]
Doubles = npt.NDArray[np.float64]


def states_of(n: int, width: int, seed: int = 0) -> Halves:
    """Correlated, off centre, and with a gap between all variances."""
    rng = np.random.default_rng(seed)
    mixed = rng.normal(size=(n, width)) * np.geomspace(3, 0.3, width) @ np.linalg.qr(rng.normal(size=(width, width)))[0]
    return (mixed + rng.normal(size=width)).astype(np.float16)


def some_adapter(width: int, out: int, residual: bool = False, tanh: bool = False) -> Adapter:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return Adapter(width, 3 * width, out, residual, tanh).eval().requires_grad_(False)


def adapted(states: Halves, adapter: Adapter | None) -> Doubles:
    if adapter is None:
        return states.astype(np.float64)
    w1, b1 = adapter.inner.weight.double().numpy(), adapter.inner.bias.double().numpy()
    w2, b2 = adapter.outer.weight.double().numpy(), adapter.outer.bias.double().numpy()
    h = states.astype(np.float64)
    inner = h @ w1.T + b1
    z = (np.tanh(inner) if adapter.tanh else np.maximum(inner, 0)) @ w2.T + b2
    return z + h if adapter.residual else z


def reference(fitted_on: Doubles, asked: Doubles, size: int, centred: bool) -> Doubles:
    mean = fitted_on.mean(0) if centred else np.zeros(fitted_on.shape[1])
    axes = np.linalg.svd(fitted_on - mean, full_matrices=False)[2][:size].T
    keys = (asked - mean) @ axes
    return keys / np.linalg.norm(keys, axis=1, keepdims=True)


def up_to_sign(keys: Doubles, expected: Doubles) -> Doubles:
    """An axis has no sign of its own: turns each column the way `expected` has it."""
    return keys * np.sign((keys * expected).sum(0))


@pytest.mark.parametrize("centred", [True, False])
@pytest.mark.parametrize("which", ["none", "plain", "residual"])
def test_keys_are_those_of_numpys_svd(centred: bool, which: str) -> None:
    adapter = {"none": None, "plain": some_adapter(12, 10), "residual": some_adapter(12, 12, True)}[which]
    states, asked = states_of(2000, 12), states_of(50, 12, seed=5)
    projection = projections.fit(states, adapter, 5, centred)
    got = projection(torch.from_numpy(asked.astype(np.float32))).double().numpy()
    expected = reference(adapted(states, adapter), adapted(asked, adapter), 5, centred)
    np.testing.assert_allclose(up_to_sign(got, expected), expected, atol=2e-4)
    np.testing.assert_allclose(np.linalg.norm(got, axis=1), 1, atol=1e-6)


def test_centring_spreads_what_an_offset_made_alike() -> None:
    states = (states_of(2000, 12).astype(np.float32) + 30).astype(np.float16)

    def mean_similarity(centred: bool) -> float:
        keys = np.concatenate(list(projections.fit(states, None, 12, centred).keys(states)))[:200].astype(np.float64)
        return float((keys @ keys.T).mean())

    assert mean_similarity(centred=False) > 0.98
    assert abs(mean_similarity(centred=True)) < 0.1


def test_full_rank_uncentred_pca_leaves_cosine_neighbours_unchanged() -> None:
    states = states_of(400, 12)
    z = states.astype(np.float64)
    cosine = (z / np.linalg.norm(z, axis=1, keepdims=True)) @ (z / np.linalg.norm(z, axis=1, keepdims=True)).T
    identity = Adapter(12, 1, 12, residual=True).requires_grad_(False)
    identity.start_from(torch.zeros(12))
    keys = projections.fit(states, identity, 12, centred=False)(torch.from_numpy(states.astype(np.float32))).numpy()
    np.testing.assert_allclose(keys @ keys.T, cosine, atol=1e-5)
    gaps = -np.diff(-np.sort(-cosine, axis=1)[:, :9], axis=1).min(1)
    clear = gaps > 1e-4  # elsewhere two neighbours are equally near
    assert clear.mean() > 0.5
    nearest, expected = (np.argsort(-s, axis=1)[:, :8] for s in (keys @ keys.T, cosine))
    assert (nearest[clear] == expected[clear]).all()


def test_the_vanilla_projection_is_the_identity() -> None:
    states = states_of(40, 12)
    assert (np.concatenate(list(Projection().keys(states))) == states).all()
    assert Projection().width(12) == 12


def test_without_pca_and_norm_the_keys_are_what_the_adapter_gives(tmp_path: Path) -> None:
    """CKMT's projection: a narrow tanh adapter, searched by squared L2."""
    states, adapter = states_of(300, 12), some_adapter(12, 4, tanh=True)
    projections.save(Projection(adapter), tmp_path / "projection.safetensors")
    projection = projections.read(tmp_path / "projection.safetensors")
    assert (projection.normed, projection.width(12)) == (False, 4)
    keys, expected = np.concatenate(list(projection.keys(states))), adapted(states, adapter)
    np.testing.assert_allclose(keys, expected, atol=2e-3)
    assert np.ptp(np.linalg.norm(expected, axis=1)) > 0.1  # a norm would show


def test_keys_come_in_chunks_and_are_what_a_query_gets(monkeypatch: pytest.MonkeyPatch) -> None:
    states = states_of(100, 12)
    projection = projections.fit(states, some_adapter(12, 10), 5)
    whole = np.concatenate(list(projection.keys(states)))
    monkeypatch.setattr(projections, "CHUNK", 30)
    chunks = list(projection.keys(states))
    assert [len(chunk) for chunk in chunks] == [30, 30, 30, 10]
    assert all(chunk.dtype == np.float16 for chunk in chunks)
    np.testing.assert_allclose(np.concatenate(chunks), whole, atol=1e-3)
    queries = projection(torch.from_numpy(states.astype(np.float32))).numpy()
    np.testing.assert_allclose(whole, queries, atol=5e-4)
    assert queries.dtype == np.float32
    assert projection.width(12) == 5 == whole.shape[1]


def test_fitting_in_chunks_equals_fitting_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    states = states_of(1000, 12)
    at_once = projections.fit(states, None, 4)
    monkeypatch.setattr(projections, "CHUNK", 77)
    in_chunks = projections.fit(states, None, 4)
    assert at_once.axes is not None
    assert in_chunks.axes is not None
    np.testing.assert_allclose(in_chunks.axes, at_once.axes, atol=1e-5)  # the same sign, too


def test_a_sample_is_drawn_at_random_when_there_are_many_entries(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sorted states: a prefix would have another mean."""
    states = np.sort(states_of(4000, 6), axis=0)
    monkeypatch.setattr(projections, "FITTED_ON", 1000)
    one, same, other = (projections.fit(states, None, 3, seed=s).mean for s in (0, 0, 1))
    assert one is not None
    assert same is not None
    assert other is not None
    assert torch.equal(one, same)
    assert not torch.equal(one, other)
    true, spread = states.astype(np.float64).mean(0), states.astype(np.float64).std(0)
    assert (np.abs(one.numpy() - true) < 4 * spread / np.sqrt(1000)).all()


@pytest.mark.parametrize("which", ["vanilla", "adapter only", "tanh", "pca", "uncentred", "all"])
def test_a_projection_read_back_gives_identical_keys(which: str, tmp_path: Path) -> None:
    states = states_of(300, 12)
    adapter = some_adapter(12, 12, residual=True)
    projection = {
        "vanilla": Projection(),
        "adapter only": Projection(adapter, normed=True),
        "tanh": Projection(some_adapter(12, 4, tanh=True)),
        "pca": projections.fit(states, None, 5),
        "uncentred": projections.fit(states, adapter, 5, centred=False),
        "all": projections.fit(states, adapter, 5),
    }[which]
    file = tmp_path / "projection.safetensors"
    projections.save(projection, file)
    again = projections.read(file)
    left, right = (np.concatenate(list(p.keys(states))) for p in (projection, again))
    assert (left == right).all()
    assert again.normed == projection.normed
    assert again.width(12) == projection.width(12)
    assert (again.mean is None, again.axes is None) == (projection.mean is None, projection.axes is None)


@pytest.mark.parametrize(
    "damage", ["missing", "empty", "text", "cut", "a folder", "no note", "note of another kind", "adapter in part"]
)
def test_a_damaged_file_is_refused(damage: str, tmp_path: Path) -> None:
    file = tmp_path / "projection.safetensors"
    projections.save(projections.fit(states_of(300, 12), some_adapter(12, 10), 5), file)
    note = {"projection": json.dumps({"normed": True})}
    if damage == "missing":
        file.unlink()
    elif damage == "empty":
        file.write_bytes(b"")
    elif damage == "text":
        file.write_text("not a projection, but long enough to have a header's length")
    elif damage == "cut":
        file.write_bytes(file.read_bytes()[:-100])
    elif damage == "a folder":
        file.unlink()
        file.mkdir()
    elif damage == "no note":
        save_file({"pca.axes": torch.eye(3)}, file)
    elif damage == "note of another kind":
        save_file({"pca.axes": torch.eye(3)}, file, {"projection": "{}"})
    else:
        save_file({"adapter.inner.weight": torch.eye(3)}, file, note)
    with pytest.raises(DatastoreError, match=r"projection\.safetensors: not a projection .*clknn project"):
        projections.read(file)
