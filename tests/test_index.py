"""Exact search against brute force, what an inverted file promises, and what faiss must not get away with."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import faiss
import numpy as np
import numpy.typing as npt
import pytest
import torch

import tiny
from clknn import index as indices
from clknn.errors import DatastoreError
from clknn.index import Index, Nearest
from clknn.mixing import Mixing, Neighbours

Halves = npt.NDArray[np.float16]
Floats = npt.NDArray[np.float32]
Doubles = npt.NDArray[np.float64]


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    threads = faiss.omp_get_max_threads()
    faiss.omp_set_num_threads(1)
    yield
    faiss.omp_set_num_threads(threads)


@pytest.fixture
def small_is_large(monkeypatch: pytest.MonkeyPatch) -> None:
    """An inverted file already for 1,000 entries."""
    monkeypatch.setattr(indices, "EXACT_BELOW", 1000)


def normed(x: npt.NDArray[np.floating]) -> Floats:
    return np.ascontiguousarray(x / np.linalg.norm(x, axis=1, keepdims=True), dtype=np.float32)


def keys_of(n: int, width: int = 16, seed: int = 0, clusters: int = 200) -> Halves:
    """Clustered keys of length one; a query set is the same clusters with another seed behind the first."""
    centres = np.random.default_rng(99).normal(size=(clusters, width))
    rng = np.random.default_rng(seed)
    return normed(centres[rng.integers(0, clusters, n)] + 0.4 * rng.normal(size=(n, width))).astype(np.float16)


def raw_keys_of(n: int, width: int = 16, seed: int = 0) -> Halves:
    """Keys of lengths between 0.3 and 9: the inner product prefers the long, the distance the close."""
    rng = np.random.default_rng(seed)
    return (keys_of(n, width, seed) * rng.uniform(0.3, 9, (n, 1))).astype(np.float16)


def reference(keys: Halves, queries: Floats, inner: bool) -> Doubles:
    """[R, N] nearness of each key as it is stored."""
    x, q = keys.astype(np.float64), queries.astype(np.float64)
    return q @ x.T if inner else np.square(q[:, None] - x[None]).sum(-1)


def best_of(near: Doubles, k: int, inner: bool) -> npt.NDArray[np.int64]:
    far = -near if inner else near
    some = np.argpartition(far, k - 1, axis=1)[:, :k]
    return np.take_along_axis(some, np.argsort(np.take_along_axis(far, some, 1), axis=1), 1)


def overlap(ids: npt.NDArray[np.int64], expected: npt.NDArray[np.int64]) -> float:
    return float(np.mean([len(set(a) & set(b)) / len(b) for a, b in zip(ids.tolist(), expected.tolist(), strict=True)]))


def check_exact(nearest: Nearest, keys: Halves, queries: Floats, k: int, inner: bool) -> None:
    near = reference(keys, queries, inner)
    expected = best_of(near, k, inner)
    assert nearest.found.all()
    assert nearest.ids.shape == (len(queries), k)
    np.testing.assert_allclose(nearest.nearness, np.take_along_axis(near, expected, 1), atol=1e-4)
    np.testing.assert_allclose(np.take_along_axis(near, nearest.ids, 1), nearest.nearness, atol=1e-4)
    assert overlap(nearest.ids, expected) > 0.999  # two keys may be equally near


@pytest.mark.parametrize("inner", [True, False])
@pytest.mark.parametrize("rows", [1, 50])  # faiss computes few queries otherwise than many
def test_a_small_index_equals_brute_force(inner: bool, rows: int) -> None:
    keys, queries = raw_keys_of(700), raw_keys_of(rows, seed=1).astype(np.float32)
    index = indices.build(keys, inner, queries)
    assert index.exact
    check_exact(index.search(queries, 9), keys, queries, 9, inner)
    assert index.description == ("exact, inner product" if inner else "exact, squared L2")


@pytest.mark.parametrize("inner", [True, False])
def test_exact_search_equals_brute_force(inner: bool) -> None:
    keys, queries = raw_keys_of(700), raw_keys_of(30, seed=1).astype(np.float32)
    check_exact(indices.exact_search(keys, queries, 9, inner), keys, queries, 9, inner)


@pytest.mark.parametrize("inner", [True, False])
def test_exact_search_merges_blocks(inner: bool) -> None:
    """More keys than one block holds, the nearest of them on either side of the border."""
    keys = np.zeros((262_144 + 500, 2), np.float16)
    keys[:, 0] = 0.01 if inner else 9
    keys[[5, 262_143, 262_144, 262_600], 0] = (4, 3, 2, 1)
    queries = np.array([[10, 0] if inner else [0, 0]], np.float32)
    nearest = indices.exact_search(keys, queries, 4, inner)
    by_nearness = [5, 262_143, 262_144, 262_600]
    assert nearest.ids.tolist() == [by_nearness if inner else by_nearness[::-1]]
    np.testing.assert_allclose(nearest.nearness, [[40, 30, 20, 10] if inner else [1, 4, 9, 16]])


@pytest.mark.parametrize("inner", [True, False])
def test_a_stored_key_finds_itself_first(inner: bool) -> None:
    keys = keys_of(500)
    nearest = indices.build(keys, inner, keys[:10].astype(np.float32)).search(keys.astype(np.float32), 1)
    assert (nearest.ids[:, 0] == np.arange(500)).mean() > 0.99
    np.testing.assert_allclose(nearest.nearness, 1 if inner else 0, atol=2e-3)


@pytest.fixture(scope="module")
def large() -> tuple[Index, Halves]:
    keys = keys_of(100_000, clusters=1000)
    return indices.build(keys, True, keys_of(200, seed=7, clusters=1000).astype(np.float32)), keys


def test_a_large_index_reaches_the_recall_it_promises(large: tuple[Index, Halves]) -> None:
    index, keys = large
    assert not index.exact
    assert index.searcher.ntotal == 100_000
    asked = keys_of(200, seed=7, clusters=1000).astype(np.float32)  # those that decided how many lists are probed
    near = reference(keys, asked, inner=True)
    assert overlap(index.search(asked, 8).ids, best_of(near, 8, inner=True)) >= indices.RECALL - 1e-3
    others = keys_of(200, seed=8, clusters=1000).astype(np.float32)
    near = reference(keys, others, inner=True)
    assert overlap(index.search(others, 8).ids, best_of(near, 8, inner=True)) >= indices.RECALL - 0.02
    assert index.searcher.nprobe < index.searcher.nlist / 4
    lists, probes = index.searcher.nlist, index.searcher.nprobe
    assert index.description == f"inverted file, {lists} lists, {probes} probed, exact ranking, inner product"


def test_no_fewer_lists_than_the_recall_needs(large: tuple[Index, Halves]) -> None:
    index, keys = large
    asked = keys_of(200, seed=7, clusters=1000).astype(np.float32)
    truth = best_of(reference(keys, asked, inner=True), 8, inner=True)
    chosen = index.searcher.nprobe
    assert chosen > 1
    try:
        index.searcher.nprobe = chosen // 2
        assert overlap(index.search(asked, 8).ids, truth) < indices.RECALL
    finally:
        index.searcher.nprobe = chosen


def test_similarities_are_those_of_the_stored_keys_and_not_of_their_codes(large: tuple[Index, Halves]) -> None:
    index, keys = large
    queries = keys[::500].astype(np.float32)
    coded, _ = index.searcher.search(queries, 1)
    assert coded.max() > 1 + 1e-3  # what the 8-bit codes say
    nearest = index.search(queries, 16)
    exact = np.einsum("rkp,rp->rk", keys[nearest.ids].astype(np.float64), queries.astype(np.float64))
    np.testing.assert_allclose(nearest.nearness, exact, atol=1e-6)
    assert nearest.nearness.max() <= 1 + 1e-3
    assert (np.diff(nearest.nearness, axis=1) <= 0).all()
    assert all(len(set(row)) == 16 for row in nearest.ids.tolist())


@pytest.mark.usefixtures("small_is_large")
@pytest.mark.parametrize("inner", [True, False])
def test_an_inverted_file_ranks_by_its_own_metric(inner: bool) -> None:
    """On keys of very different lengths the two metrics have other neighbours; each index must find its own."""
    keys, queries = raw_keys_of(4000), raw_keys_of(60, seed=1).astype(np.float32)
    mine, other = reference(keys, queries, inner), reference(keys, queries, not inner)
    assert overlap(best_of(mine, 8, inner), best_of(other, 32, not inner)) < 0.5
    index = indices.build(keys, inner, queries)
    assert not index.exact
    assert index.searcher.metric_type == (faiss.METRIC_INNER_PRODUCT if inner else faiss.METRIC_L2)
    nearest = index.search(queries, 8)
    assert overlap(nearest.ids, best_of(mine, 8, inner)) >= indices.RECALL - 1e-3
    np.testing.assert_allclose(nearest.nearness, np.take_along_axis(mine, nearest.ids, 1), rtol=1e-4, atol=1e-4)
    # faiss alone, without our ranking, must see the same metric: the inverted file's, not only its quantizer's.
    assert overlap(index.searcher.search(queries, 8)[1], best_of(mine, 8, inner)) > 0.8


@pytest.mark.usefixtures("small_is_large")
@pytest.mark.parametrize("inner", [True, False])
def test_ranking_in_blocks_equals_ranking_at_once(inner: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    keys, queries = raw_keys_of(2000), raw_keys_of(50, seed=1).astype(np.float32)
    index = indices.build(keys, inner, queries)
    at_once = index.search(queries, 8)
    for gathered in (1, 7 * (8 + indices.SPARE) * 16):  # a query at a time; seven
        monkeypatch.setattr(indices, "GATHERED", gathered)
        in_blocks = index.search(queries, 8)
        assert (in_blocks.ids == at_once.ids).all()
        assert (in_blocks.found == at_once.found).all()
        np.testing.assert_allclose(in_blocks.nearness, at_once.nearness, rtol=1e-5, atol=1e-5)
    assert index.search(queries[:0], 8).ids.shape == (0, 8)


@pytest.mark.usefixtures("small_is_large")
@pytest.mark.parametrize("inner", [True, False])
def test_where_faiss_has_nothing_there_is_no_neighbour(inner: bool) -> None:
    keys, queries = keys_of(2000), keys_of(30, seed=1).astype(np.float32)
    index = indices.build(keys, inner, queries)
    index.searcher.nprobe = 1
    raw = index.searcher.search(queries, 400)[1]
    assert (raw == -1).any(1).all()  # no list has so many
    nearest = index.search(queries, 100)
    assert (~nearest.found).any()
    assert nearest.found.any(1).all()
    assert (nearest.ids[~nearest.found] == 0).all()
    for row, ids, found in zip(raw.tolist(), nearest.ids, nearest.found, strict=True):
        assert set(ids[found].tolist()) <= set(row) - {-1}
        assert found.sum() == min(100, len(set(row) - {-1}))
        assert (np.diff(found.astype(int)) <= 0).all()  # those found come first
    exact = np.take_along_axis(reference(keys, queries, inner), nearest.ids, 1)
    np.testing.assert_allclose(nearest.nearness[nearest.found], exact[nearest.found], atol=1e-5)


def test_more_neighbours_than_entries_are_absent_and_weigh_nothing() -> None:
    keys, queries = keys_of(3), keys_of(2, seed=1).astype(np.float32)
    nearest = indices.build(keys, True, queries).search(queries, 5)
    assert nearest.found.tolist() == [[True, True, True, False, False]] * 2
    assert (nearest.ids[:, 3:] == 0).all()
    values = np.array([4, 5, 6])[nearest.ids]
    neighbours = Neighbours(*map(torch.from_numpy, (nearest.ids, values, nearest.found, nearest.nearness)))
    alone = neighbours.first(3)
    assert torch.equal(tiny.p_knn(neighbours, 0.1, 8), tiny.p_knn(alone, 0.1, 8))
    log_p = torch.full((2, 8), 1 / 8).log()
    mixing = Mixing(5, 0.1, 0.5, scaled=True)
    assert torch.equal(tiny.mixed(log_p, neighbours, mixing), tiny.mixed(log_p, alone, mixing))


def test_recall_by_hand() -> None:
    def nearest(nearness: list[list[float]], found: list[list[bool]] | None = None) -> Nearest:
        array = np.array(nearness, np.float32)
        there = np.ones(array.shape, bool) if found is None else np.array(found)
        return Nearest(np.zeros(array.shape, np.int64), array, there)

    truth = nearest([[0.9, 0.8, 0.7, 0.6], [0.5, 0.4, 0.3, 0.3]])
    assert indices.recall(truth, truth, inner=True) == 1
    assert indices.recall(nearest([[0.9, 0.7, 0.5, 0.4], [0.5, 0.3, 0.3, 0.3]]), truth, inner=True) == 6 / 8
    missing = nearest([[0.9, 0.8, 0.7, 0.6], [0.5, 0.4, 0.3, 0.9]], [[True] * 4, [True] * 3 + [False]])
    assert indices.recall(missing, truth, inner=True) == 7 / 8  # what was not found is not near
    distances = nearest([[1, 2, 3, 4], [1, 1, 1, 1]])
    assert indices.recall(nearest([[1, 2, 4, 5], [1, 1, 1, 2]]), distances, inner=False) == 6 / 8


@pytest.mark.parametrize("inner", [True, False])
def test_extended_and_refilled_equal_a_fresh_build(inner: bool) -> None:
    keys, queries = raw_keys_of(900), raw_keys_of(40, seed=1).astype(np.float32)
    fresh = indices.build(keys, inner, queries).search(queries, 9)
    grown = indices.extended(indices.build(keys[:500], inner, queries), keys)
    other = indices.refilled(indices.build(raw_keys_of(600, seed=3), inner, queries), keys)
    for index in (grown, other):
        assert index.searcher.ntotal == 900
        nearest = index.search(queries, 9)
        assert (nearest.ids == fresh.ids).all()
        np.testing.assert_allclose(nearest.nearness, fresh.nearness, rtol=1e-6)


@pytest.mark.usefixtures("small_is_large")
@pytest.mark.parametrize("inner", [True, False])
def test_an_inverted_file_extended_or_refilled_answers_from_the_new_keys(inner: bool) -> None:
    keys, queries = keys_of(3000), keys_of(80, seed=1).astype(np.float32)
    truth = best_of(reference(keys, queries, inner), 8, inner)
    assert (truth >= 2000).any(1).mean() > 0.5
    grown = indices.extended(indices.build(keys[:2000], inner, queries), keys)
    other = indices.refilled(indices.build(keys[::-1][:2000].copy(), inner, queries), keys)
    for index in (grown, other):
        assert not index.exact
        assert index.searcher.ntotal == 3000
        nearest = index.search(queries, 8)
        assert overlap(nearest.ids, truth) > 0.93
        exact = np.take_along_axis(reference(keys, queries, inner), nearest.ids, 1)
        np.testing.assert_allclose(nearest.nearness, exact, atol=1e-5)


@pytest.mark.usefixtures("small_is_large")
@pytest.mark.parametrize("n", [300, 2000])
@pytest.mark.parametrize("inner", [True, False])
def test_an_index_read_back_answers_alike(n: int, inner: bool, tmp_path: Path) -> None:
    keys, queries = keys_of(n), keys_of(40, seed=1).astype(np.float32)
    index = indices.build(keys, inner, queries)
    indices.save(index, tmp_path / "index.faiss")
    again = indices.read(tmp_path / "index.faiss", keys, inner)
    assert again.exact == index.exact == (n < 1000)
    assert again.description == index.description  # the lists probed are part of the file
    before, after = index.search(queries, 9), again.search(queries, 9)
    assert (before.ids == after.ids).all()
    assert (before.nearness == after.nearness).all()


@pytest.mark.usefixtures("small_is_large")
def test_the_same_seed_builds_the_same_index() -> None:
    keys, queries = keys_of(2000), keys_of(40, seed=1).astype(np.float32)
    one, same = (faiss.serialize_index(indices.build(keys, True, queries, seed=4).searcher) for _ in range(2))
    assert (one == same).all()


@pytest.mark.usefixtures("small_is_large")
@pytest.mark.parametrize("n", [300, 2000])
@pytest.mark.parametrize("damage", ["missing", "empty", "text", "cut in the header", "cut in half", "a folder"])
def test_a_damaged_file_is_refused(damage: str, n: int, tmp_path: Path) -> None:
    file, keys = tmp_path / "index.faiss", keys_of(n)
    indices.save(indices.build(keys, True, keys[:20].astype(np.float32)), file)
    content = file.read_bytes()
    file.unlink()
    if damage == "a folder":
        file.mkdir()
    elif damage != "missing":
        cuts = {"empty": b"", "text": b"nothing that faiss wrote " * 9, "cut in the header": content[:20]}
        file.write_bytes(cuts.get(damage, content[: len(content) // 2]))
    with pytest.raises(DatastoreError, match=r"index\.faiss: not a faiss index; run `clknn project` again"):
        indices.read(file, keys, inner=True)


def test_an_index_of_other_keys_is_refused(tmp_path: Path) -> None:
    keys = keys_of(300)
    file = tmp_path / "index.faiss"
    indices.save(indices.build(keys, True, keys[:20].astype(np.float32)), file)
    with pytest.raises(DatastoreError, match="an index of 300 x 16 beside 299 x 16 keys"):
        indices.read(file, keys[:299], inner=True)
    with pytest.raises(DatastoreError, match="an index of 300 x 16 beside 300 x 8 keys"):
        indices.read(file, keys[:, :8], inner=True)
