"""A projection refined on what it really retrieves: neighbours of the right value against the neighbours of others.

In go a projection and the entries it was fitted to; out comes the same with other PCA axes and mean, found by gradient.
The paper's hard negatives are entries of the classes whose centres are nearest, and its positives any entries of the
right class. Here both are the entries that a search returns for the anchor, those of its own pair left out, as no
sentence to translate will find itself: what is learned is to rank a neighbourhood, not to gather a whole class. The
loss is the contrastive one, -log of the right neighbours' share of p_knn, which is what decoding wants of them. The
trade-off: neighbourhoods are fetched twice, some seconds each, and go stale in between (docs/log.md).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from clknn import index as indices
from clknn.adapter import Halves, Values
from clknn.projection import Projection

Ids = npt.NDArray[np.int64]
Pairs = npt.NDArray[np.int32]


@dataclass(frozen=True)
class RefineSettings:
    k: int = 64  # neighbours that an anchor is judged by
    spare: int = 64  # fetched beside them, to stand in for those of the anchor's own pair
    anchors: int = 40_000  # uniform over entries, as the queries of decoding are
    rounds: int = 2  # how often neighbourhoods are fetched
    epochs: int = 2  # passes over the anchors in each round
    batch: int = 256
    learning_rate: float = 1e-3
    warmup: int = 50
    temperature: float = 0.04  # at the start; it is learned too
    seed: int = 0


@dataclass(frozen=True)
class Neighbourhoods:
    """What a search returned for each anchor, those of its own pair left out."""

    entries: Ids  # [A, K]
    found: npt.NDArray[np.bool_]  # [A, K]
    right: npt.NDArray[np.bool_]  # [A, K]: found, and of the anchor's value


def refine(
    projection: Projection,
    states: Halves,
    values: Values,
    pairs: Pairs,
    settings: RefineSettings,
    advance: Callable[[int, int, float], None] = lambda *_: None,
) -> Projection:
    """Moves mean and axes of a normed projection; `advance` hears of steps done, of how many, and the loss."""
    assert projection.axes is not None
    s, rng = settings, np.random.default_rng(settings.seed)
    mean = projection.mean if projection.mean is not None else torch.zeros(len(projection.axes))
    weights = [mean.clone().requires_grad_(), projection.axes.clone().requires_grad_()]  # [E], [E, P]
    heat = torch.tensor(math.log(s.temperature), requires_grad=True)
    optimiser = torch.optim.Adam([*weights, heat], lr=s.learning_rate, betas=(0.9, 0.98))
    anchors = np.sort(rng.permutation(len(values))[: s.anchors])
    steps = math.ceil(len(anchors) / s.batch)
    total, step = s.rounds * s.epochs * steps, 0
    refined = projection
    for _ in range(s.rounds):
        near = neighbourhoods(refined, states, values, pairs, anchors, s.k, s.spare)
        useful = np.flatnonzero(near.right.any(1) & (near.found & ~near.right).any(1))
        for _ in range(s.epochs):
            for batch in np.array_split(rng.permutation(useful), steps):
                step += 1
                for group in optimiser.param_groups:
                    group["lr"] = s.learning_rate * _schedule(step, total, s.warmup)
                if len(batch):
                    reached = loss(projection, weights, heat, states, anchors[batch], near, batch)
                    optimiser.zero_grad()
                    torch.autograd.backward(reached)
                    torch.nn.utils.clip_grad_norm_([*weights, heat], 1.0)
                    optimiser.step()
                    advance(step, total, reached.item())
        refined = replace(projection, mean=weights[0].detach().clone(), axes=weights[1].detach().clone())
    return refined


def loss(
    projection: Projection,
    weights: list[Tensor],
    heat: Tensor,
    states: Halves,
    anchors: Ids,
    near: Neighbourhoods,
    rows: Ids,
) -> Tensor:
    """Mean of -log(sum over the right neighbours of exp s / sum over all found), s = cosine / temperature."""
    entries = near.entries[rows]  # [B, K]
    found, right = torch.from_numpy(near.found[rows]), torch.from_numpy(near.right[rows])
    queries = _keys(projection, weights, states, anchors)  # [B, P]
    keys = _keys(projection, weights, states, entries.ravel()).view(*entries.shape, -1)  # [B, K, P]
    s = torch.einsum("bp,bkp->bk", queries, keys) / heat.exp()
    over_right = torch.logsumexp(s.masked_fill(~right, -math.inf), 1)  # [B]
    return (torch.logsumexp(s.masked_fill(~found, -math.inf), 1) - over_right).mean()


def neighbourhoods(
    projection: Projection, states: Halves, values: Values, pairs: Pairs, anchors: Ids, k: int, spare: int
) -> Neighbourhoods:
    """The k nearest of each anchor among the entries of other pairs."""
    keys = np.concatenate(list(projection.keys(states)))  # [N, P]
    queries = keys[anchors].astype(np.float32)  # [A, P]
    index = indices.build(keys, True, queries[np.linspace(0, len(queries) - 1, min(500, len(queries))).astype(int)])
    near = index.search(queries, min(k + spare, len(keys)))
    found = near.found & (pairs[near.ids] != pairs[anchors][:, None])  # [A, K + spare]
    order = np.argsort(~found, axis=1, kind="stable")[:, :k]  # [A, K]
    entries, found = np.take_along_axis(near.ids, order, 1), np.take_along_axis(found, order, 1)
    return Neighbourhoods(entries, found, found & (values[entries] == values[anchors][:, None]))


def _keys(projection: Projection, weights: list[Tensor], states: Halves, entries: Ids) -> Tensor:
    """[B, P], with a gradient for mean and axes and none for the adapter in front of them."""
    mean, axes = weights
    h = torch.from_numpy(states[entries].astype(np.float32))  # [B, D]
    z = h if projection.adapter is None else projection.adapter(h)  # [B, E]
    return torch.nn.functional.normalize((z - mean) @ axes, dim=-1)


def _schedule(step: int, total: int, warmup: int) -> float:
    """Linear warm-up, then half a cosine down to a fiftieth."""
    return min(1.0, step / warmup) * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * step / total)))
