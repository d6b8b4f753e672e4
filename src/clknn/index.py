"""The nearest keys: faiss, chosen from the number of entries, with exact search beside it. Sole importer of faiss.

In go keys [N, P]; out come, for queries [R, P], the ids of the k nearest and how near they are: the inner product of
keys of length one, or the squared L2 distance of raw states. Below 100,000 entries the search is exact. Above, an
inverted file with 8-bit codes proposes 32 candidates more than were asked for, and these are ranked by their exact
float16 keys. How many lists are probed is decided by measuring recall@8 against exact search on real queries.
The trade-off: probing until recall is 0.95, not 1, is what makes a step cost milliseconds instead of a scan.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import faiss
import numpy as np
import numpy.typing as npt

from clknn.errors import DatastoreError

Floats = npt.NDArray[np.float32]
Halves = npt.NDArray[np.float16]
Ids = npt.NDArray[np.int64]

EXACT_BELOW = 100_000
SPARE = 32  # candidates beyond the k asked for; 8-bit codes misplace few of the k by more than that
GATHERED = 8_000_000  # numbers gathered for exact ranking at a time: 32 MB
RECALL = 0.95
RECALL_AT = 8


@dataclass(frozen=True)
class Nearest:
    """Ids and nearness, nearest first. Where `found` is False there is no neighbour, and the id means nothing."""

    ids: Ids  # [R, K], 0 where nothing was found
    nearness: Floats  # [R, K], inner product or squared L2 distance
    found: npt.NDArray[np.bool_]  # [R, K]


@dataclass(frozen=True)
class Index:
    """A faiss index over rows of `keys`, whose ids are the rows' numbers."""

    searcher: Any
    keys: Halves  # [N, P], memory-mapped; the exact values that candidates are ranked by
    inner: bool

    @property
    def exact(self) -> bool:
        return not isinstance(self.searcher, faiss.IndexIVF)

    @property
    def description(self) -> str:
        metric = "inner product" if self.inner else "squared L2"
        if self.exact:
            return f"exact, {metric}"
        lists, probes = self.searcher.nlist, self.searcher.nprobe
        return f"inverted file, {lists} lists, {probes} probed, exact ranking, {metric}"

    def search(self, queries: Floats, k: int) -> Nearest:
        """The k nearest entries of each query [R, P], k at most the number of entries."""
        if self.exact:
            nearness, ids = self.searcher.search(queries, k)
            return _nearest(ids, nearness)
        _, candidates = self.searcher.search(queries, min(k + SPARE, len(self.keys)))  # [R, C]
        rows = max(1, GATHERED // (candidates.shape[1] * queries.shape[1]))
        blocks = [
            _ranked(self.keys, queries[i : i + rows], candidates[i : i + rows], k, self.inner)
            for i in range(0, max(1, len(queries)), rows)
        ]
        return Nearest(*(np.concatenate(part) for part in zip(*map(_parts, blocks), strict=True)))


def build(keys: Halves, inner: bool, queries: Floats, seed: int = 0) -> Index:
    """An index fitted to these keys; `queries` decide how many lists it must probe."""
    n, width = keys.shape
    metric = faiss.METRIC_INNER_PRODUCT if inner else faiss.METRIC_L2
    if n < EXACT_BELOW:
        return _filled(Index(faiss.IndexFlat(width, metric), keys, inner), range(0, n, 65_536))
    lists = 2 ** round(np.log2(2 * np.sqrt(n)))
    rng = np.random.default_rng(seed)
    sample = np.sort(rng.permutation(n)[: 40 * lists])  # random: a prefix is sorted by pair, and biased
    # The metric goes to the inverted file too: with the quantizer's alone, lists are scanned by L2.
    searcher = faiss.IndexIVFScalarQuantizer(
        faiss.IndexFlat(width, metric), width, lists, faiss.ScalarQuantizer.QT_8bit, metric
    )
    searcher.cp.niter, searcher.cp.seed = 10, seed
    searcher.train(keys[sample].astype(np.float32))
    index = _filled(Index(searcher, keys, inner), range(0, n, 65_536))
    truth = exact_search(keys, queries, RECALL_AT, inner)
    for probes in (2**i for i in range(int(np.log2(lists)) + 1)):
        searcher.nprobe = probes
        if recall(index.search(queries, RECALL_AT), truth, inner) >= RECALL:
            break
    return index


def _filled(index: Index, starts: Iterable[int]) -> Index:
    for start in starts:
        index.searcher.add(index.keys[start : start + 65_536].astype(np.float32))
    return index


def refilled(index: Index, keys: Halves) -> Index:
    """The same index over other keys: what it learned of the space stays. The index given is used up."""
    index.searcher.reset()
    return _filled(Index(index.searcher, keys, index.inner), range(0, len(keys), 65_536))


def extended(index: Index, keys: Halves) -> Index:
    """The same index where `keys` holds the old entries and new ones behind them. The index given is used up."""
    return _filled(Index(index.searcher, keys, index.inner), range(index.searcher.ntotal, len(keys), 65_536))


def exact_search(keys: Halves, queries: Floats, k: int, inner: bool) -> Nearest:
    """Brute force over all keys, in blocks, whatever the index would do."""
    metric = faiss.METRIC_INNER_PRODUCT if inner else faiss.METRIC_L2
    best_ids = np.empty((len(queries), 0), np.int64)
    best = np.empty((len(queries), 0), np.float32)
    for start in range(0, len(keys), 262_144):
        block = keys[start : start + 262_144].astype(np.float32)
        nearness, ids = faiss.knn(queries, block, min(k, len(block)), metric=metric)
        best, best_ids = np.hstack([best, nearness]), np.hstack([best_ids, ids + start])
        order = np.argsort(-best if inner else best, axis=1, kind="stable")[:, :k]
        best, best_ids = np.take_along_axis(best, order, 1), np.take_along_axis(best_ids, order, 1)
    return _nearest(best_ids, best)


def recall(returned: Nearest, truth: Nearest, inner: bool) -> float:
    """recall@k: the share of the exact k neighbours that were returned.

    An entry exactly as near as the last of them is as good: memories repeat themselves, and equal keys are common.
    """
    last = truth.nearness[:, -1:]  # [R, 1]
    slack = 1e-4 * (1 + np.abs(last))  # two ways to the same number, in float32
    near = returned.nearness >= last - slack if inner else returned.nearness <= last + slack
    return float((near & returned.found).mean())


def _nearest(ids: Ids, nearness: Floats) -> Nearest:
    found = ids >= 0  # faiss says -1 where it has nothing; as an index that would be the last entry
    return Nearest(np.where(found, ids, 0), nearness, found)


def _parts(nearest: Nearest) -> tuple[Ids, Floats, npt.NDArray[np.bool_]]:
    return nearest.ids, nearest.nearness, nearest.found


def _ranked(keys: Halves, queries: Floats, candidates: Ids, k: int, inner: bool) -> Nearest:
    found = candidates >= 0  # [R, C]
    near = keys[np.where(found, candidates, 0)].astype(np.float32)  # [R, C, P]
    if inner:
        nearness = np.einsum("rcp,rp->rc", near, queries)  # [R, C]
        far = np.where(found, -nearness, np.inf)
    else:
        near -= queries[:, None]
        nearness = np.einsum("rcp,rcp->rc", near, near)
        far = np.where(found, nearness, np.inf)
    order = np.argsort(far, axis=1, kind="stable")[:, :k]  # [R, K]
    ids = np.take_along_axis(np.where(found, candidates, -1), order, 1)
    return _nearest(ids, np.take_along_axis(nearness, order, 1))


def save(index: Index, path: Path) -> None:
    faiss.write_index(index.searcher, str(path))


def read(path: Path, keys: Halves, inner: bool) -> Index:
    try:
        searcher = faiss.read_index(str(path))
    except RuntimeError as error:
        raise DatastoreError(f"{path}: not a faiss index; run `clknn project` again") from error
    metric = faiss.METRIC_INNER_PRODUCT if inner else faiss.METRIC_L2
    if searcher.metric_type != metric or searcher.ntotal != len(keys) or searcher.d != keys.shape[1]:
        raise DatastoreError(
            f"{path}: an index of {searcher.ntotal} x {searcher.d} beside {len(keys)} x {keys.shape[1]} keys; "
            "run `clknn project` again"
        )
    return Index(searcher, keys, inner)
