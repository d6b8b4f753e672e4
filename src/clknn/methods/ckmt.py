"""CKMT's representation: clusters within each value, and a narrow adapter trained to tell clusters apart.

In go states and their values; out comes an `Adapter` of 64 dimensions whose keys are searched by squared L2, without
PCA and without norm. It hides DBSCAN, the rule that chooses its eps from the distances seen, and the sampler. Clusters
are found in the raw states, once, before anything is trained. The trade-off: DBSCAN here is exact and compares every
entry of a value with every other, so that a value at the cap of 100,000 entries needs 1.25 GB, one bit for each pair,
where storing neighbourhoods would need up to 80 GB; time, too, grows with the square of `cap`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from clknn.adapter import CHUNK, Adapter, Classes, Halves, Step, Trained, Training, Values, one_of_each
from clknn.errors import InputError

Floats = npt.NDArray[np.float32]
Ids = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]

ASKED = 2_000  # entries whose distances choose eps
CORE = 0.5  # share of them that is to be core
COMPARED = 8_000_000  # pairs of entries compared at a time: 32 MB


@dataclass(frozen=True)
class CkmtSettings:
    """What the paper says, but for eps: its 10 is in units of another model's states."""

    inner: int = 256
    width: int = 64
    eps: float | None = None  # radius of DBSCAN; None: chosen from the distances seen
    min_samples: int = 4  # as many entries of a value, or fewer, are one cluster; for more, DBSCAN's
    cap: int = 100_000  # entries of one value that are clustered; of more, as many at random
    centroid_counts: bool = True  # as one of the 2 members, and as a positive; not so in the code published
    batch: int = 1024
    smoothing: float = 2e-3
    steps: int = 30_000  # 30,000 for the smallest of the paper's data sets, 200,000 for the largest
    learning_rate: float = 3e-4
    least_rate: float = 3e-5
    shrink: float = 0.5  # the rate is multiplied by it at a plateau
    plateau: int = 5  # validations without a better one that are no plateau yet
    validate_every: int = 1_000
    patience: int = 10  # validations without a better one before training stops
    seed: int = 0

    def __post_init__(self) -> None:
        if self.eps is not None and not self.eps > 0:
            raise InputError(f"eps is {self.eps}; it must be above 0, or left out to be chosen from the distances")


@dataclass(frozen=True)
class Clusters:
    """Cluster c holds members[starts[c] : starts[c] + counts[c]], of which the last is its centroid.

    A member is the id of an entry, or, from N on, N + c: the centroid of cluster c.
    """

    members: Tensor  # [M] cluster by cluster
    starts: Tensor  # [C]
    counts: Tensor  # [C] the centroid included
    centroids: Halves  # [C, D]
    entries: int  # N
    eps: float  # as given or chosen

    def states_of(self, members: Tensor, states: Halves) -> Tensor:
        """[B, D] of members [B], where `states` [N, D] are those that were clustered."""
        ids, found = members.numpy(), np.empty((len(members), states.shape[1]), np.float32)
        made = ids >= self.entries  # [B]
        found[~made] = states[ids[~made]]
        found[made] = self.centroids[ids[made] - self.entries]
        return torch.from_numpy(found)


# ---- clusters


def clusters(
    states: Halves,
    values: Values,
    settings: CkmtSettings,
    rng: np.random.Generator,
    advance: Callable[[int, int], None] = lambda *_: None,
) -> Clusters:
    """Clusters the entries of each value; `advance` hears how many entries are done, of how many."""
    classes = Classes.of(values)
    eps = choose_eps(states, classes, settings, rng) if settings.eps is None else settings.eps
    sizes, starts, order = (part.numpy() for part in (classes.counts, classes.starts, classes.order))
    small = sizes <= settings.min_samples  # [values]
    number = np.cumsum(small) - 1  # [values] of the cluster that a small one is
    of_entry = classes.of_entry.numpy()
    entries, labels = [np.flatnonzero(small[of_entry])], [number[of_entry[small[of_entry]]]]
    total, done = int(small.sum()), int(sizes[small].sum())
    for c in np.flatnonzero(~small):
        mine = _drawn(order[starts[c] : starts[c] + sizes[c]], settings.cap, rng)  # [n]
        found, label = dbscan(states[mine].astype(np.float32), eps, settings.min_samples)
        entries.append(mine[found])
        labels.append(total + label[found])
        total += int(label[found].max(initial=-1)) + 1
        done += int(sizes[c])
        advance(done, len(values))
    kept, cluster = np.concatenate(entries), np.concatenate(labels)  # [M - C] twice
    centroids = _centroids(states, kept, cluster, total)
    # A stable sort by cluster puts what stands last, the centroid, last in its cluster.
    members = torch.from_numpy(np.concatenate([kept, len(values) + np.arange(total)]))  # [M]
    grouped = Classes.of(np.concatenate([cluster, np.arange(total)]).astype(np.int32))
    return Clusters(members[grouped.order], grouped.starts, grouped.counts, centroids, len(values), eps)


def choose_eps(states: Halves, classes: Classes, settings: CkmtSettings, rng: np.random.Generator) -> float:
    """The radius at which half of the entries that DBSCAN will see are core.

    An entry is core from the distance of its `min_samples`-th nearest of the same value on, itself counted: eps is the
    median of that distance over 2,000 random entries. Repetitions at distance 0 say nothing of scale and are left out.
    """
    sizes, starts, order = (part.numpy() for part in (classes.counts, classes.starts, classes.order))
    of_entry = classes.of_entry.numpy()
    eligible = np.flatnonzero(sizes[of_entry] > settings.min_samples)
    asked = rng.permutation(eligible)[:ASKED]
    reach = [np.empty(0, np.float32)]
    for c in np.unique(of_entry[asked]):
        members = order[starts[c] : starts[c] + sizes[c]]
        queries = np.sort(asked[of_entry[asked] == c])
        # Compared with a draw where DBSCAN will see one: density grows with the number. A query counts itself.
        mine = np.union1d(_drawn(members, settings.cap, rng), queries)
        q, x = (torch.from_numpy(states[ids].astype(np.float32)) for ids in (queries, mine))
        distance = torch.cdist(q, x, compute_mode="donot_use_mm_for_euclid_dist")  # [Q, n], 0 between equals
        reach.append(distance.kthvalue(settings.min_samples, dim=1).values.numpy())
    apart = np.concatenate(reach)
    apart = apart[apart > 0]
    return float(np.quantile(apart, CORE)) if len(apart) else 1.0  # where all are repeated, any radius joins them


def dbscan(states: Floats, eps: float, min_samples: int) -> tuple[Mask, Ids]:
    """Whether each of n states is in a cluster, and in which; noise has a number that means nothing.

    The labels are those of scikit-learn's DBSCAN, which holds every neighbourhood in memory as 8-byte numbers. Here
    they are bits, and clusters grow by whole frontiers of them.
    """
    n = len(states)
    x = torch.from_numpy(states - states.mean(0))  # centred: less is lost where lengths nearly cancel
    half = x.square().sum(1) / 2  # [n]
    near = np.empty((n, (n + 7) // 8), np.uint8)  # [n, n / 8] bits
    core = np.empty(n, np.bool_)
    rows = max(1, COMPARED // max(1, n))
    for start in range(0, n, rows):
        block = slice(start, start + rows)
        # |a - b|^2 <= eps^2, with a.b - |b|^2 / 2 from one product
        within = torch.addmm(half[None], x[block], x.T, beta=-1) >= (half[block] - eps * eps / 2)[:, None]  # [R, n]
        core[block] = within.sum(1) >= min_samples
        near[block] = np.packbits(within.numpy(), axis=1)
    found, label, count = np.zeros(n, np.bool_), np.zeros(n, np.int64), 0
    for seed in np.flatnonzero(core):
        if found[seed]:
            continue
        found[seed], label[seed] = True, count
        frontier = np.array([seed])
        while len(frontier):
            reached = _near_any(near, frontier, rows, n) & ~found  # [n]
            found |= reached
            label[reached] = count
            frontier = np.flatnonzero(reached & core)  # what is not core belongs to the cluster, but ends it
        count += 1
    return found, label


def _near_any(near: npt.NDArray[np.uint8], frontier: Ids, rows: int, n: int) -> Mask:
    bits = np.zeros(near.shape[1], np.uint8)
    for start in range(0, len(frontier), 8 * rows):
        bits |= np.bitwise_or.reduce(near[frontier[start : start + 8 * rows]], axis=0)
    return np.unpackbits(bits, count=n).astype(np.bool_)


def _drawn(entries: Ids, cap: int, rng: np.random.Generator) -> Ids:
    return entries if len(entries) <= cap else np.sort(rng.permutation(entries)[:cap])


def _centroids(states: Halves, entries: Ids, cluster: Ids, total: int) -> Halves:
    """[C, D]: the mean state of each cluster."""
    sums = torch.zeros(total, states.shape[1])
    for start in range(0, len(entries), CHUNK):
        chunk = slice(start, start + CHUNK)
        sums.index_add_(0, torch.from_numpy(cluster[chunk]), torch.from_numpy(states[entries[chunk]]).float())
    counts = torch.from_numpy(np.bincount(cluster, minlength=total))
    means: Halves = (sums / counts[:, None]).numpy().astype(np.float16)
    return means


# ---- batches and their loss


def pivotal(clustered: Clusters, settings: CkmtSettings) -> Tensor:
    """The clusters that may be pivots: those of at least 2 members."""
    return torch.nonzero(_choices(clustered, settings) >= 2).flatten()


def draw_pivots(pivotal: Tensor, n: int, rng: torch.Generator) -> Tensor:
    """[B] distinct clusters: n of them, or all where there are fewer."""
    return pivotal[torch.randperm(len(pivotal), generator=rng)[:n]]


def draw_positives(clustered: Clusters, pivots: Tensor, settings: CkmtSettings, rng: torch.Generator) -> Tensor:
    """[B] members, a uniform one of each pivot's cluster."""
    return one_of_each(clustered.members, clustered.starts[pivots], _choices(clustered, settings)[pivots], rng)


def draw_negatives(clustered: Clusters, pivots: Tensor, rng: torch.Generator) -> Tensor:
    """[B] members, a uniform one of another random cluster each, which may be of the same value."""
    other = torch.randint(len(clustered.counts) - 1, pivots.shape, generator=rng)  # [B]
    other = other + (other >= pivots)  # step over the pivot's own
    return one_of_each(clustered.members, clustered.starts[other], clustered.counts[other], rng)


def loss(pivots: Tensor, positives: Tensor, negatives: Tensor, smoothing: float) -> Tensor:
    """Cross-entropy of row i's 2 B logits with target i, from z of B pivots, positives and negatives [B, E].

    The logits are plain dot products: of positive i with every pivot, then of negative i with every pivot.
    """
    logits = torch.cat([positives @ pivots.T, negatives @ pivots.T], 1).float()  # [B, 2 B]
    return torch.nn.functional.cross_entropy(logits, torch.arange(len(pivots)), label_smoothing=smoothing)


def _choices(clustered: Clusters, settings: CkmtSettings) -> Tensor:
    """[C]: how many members of each cluster can be a positive."""
    return clustered.counts if settings.centroid_counts else clustered.counts - 1


# ---- training


def train(
    states: Halves,
    values: Values,
    settings: CkmtSettings,
    validate: Callable[[Adapter], float],
    advance: Callable[[Step], None] = lambda _: None,
    clustered: Clusters | None = None,
) -> Trained:
    """Trains on entries (states [N, D], values [N]) and keeps the step that `validate` liked best.

    `clustered` are their clusters, where they were made before: `clusters` takes longer than most trainings.
    """
    if clustered is None:
        clustered = clusters(states, values, settings, np.random.default_rng(settings.seed))
    may = pivotal(clustered, settings)
    if len(may) < 2:
        raise InputError(
            f"CKMT cannot train: DBSCAN with eps {clustered.eps:.4g} leaves fewer than two clusters to tell apart; "
            "give more pairs or another eps, or use --method knn-mt, which needs no training"
        )
    with torch.random.fork_rng():
        torch.manual_seed(settings.seed)
        training = Training(
            Adapter(states.shape[1], settings.inner, settings.width, residual=False, tanh=True), settings
        )
    rate = torch.optim.lr_scheduler.ReduceLROnPlateau(
        training.optimiser, "max", settings.shrink, settings.plateau, threshold=0.0, min_lr=settings.least_rate
    )

    def learn(_: int, rng: torch.Generator) -> float:
        started = time.perf_counter()
        pivots = draw_pivots(may, settings.batch, rng)  # [B]
        positives = draw_positives(clustered, pivots, settings, rng)  # [B]
        negatives = draw_negatives(clustered, pivots, rng)  # [B]
        members = torch.cat([clustered.entries + pivots, positives, negatives])  # [3 B]
        training.sampling += time.perf_counter() - started
        pivot, positive, negative = training.adapter(clustered.states_of(members, states)).chunk(3)  # [B, E] each
        reached = training.descend(loss(pivot, positive, negative, settings.smoothing))
        training.spent += time.perf_counter() - started
        return reached

    def judged(step: Step) -> None:
        rate.step(step.accuracy)
        advance(step)

    return training.go(learn, validate, judged)
