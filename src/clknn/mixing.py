"""Neighbours -> p_knn -> p_mix: the equations and nothing else, in float32 and log space.

In go the neighbours of R queries and log p_model [R, V]; out comes log p_mix [R, V]. Who gets how much of it is said by
a `Combiner`, as `Shares`: one for p_model and one for each neighbour. `Mixing` is the papers' (k, temperature, weight);
those that are learned stand in methods/. exp(1/0.01) overflows float32, so kernels are normalised by log-softmax before
anything is exponentiated. The trade-off: p_knn is made dense, R x V floats written by one scatter_add, never R x K x V.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from clknn.errors import InputError

LEAST = 1e-30  # as a probability; float32 has room below it


@dataclass(frozen=True)
class Neighbours:
    """K neighbours of each of R queries; just one of `similarity` and `distance` is there.

    Where `found` is False there is no neighbour: its id and value mean nothing and carry no weight.
    """

    ids: Tensor  # [R, K] int64
    values: Tensor  # [R, K] int64
    found: Tensor  # [R, K] bool
    similarity: Tensor | None = None  # [R, K] inner product, larger is nearer
    distance: Tensor | None = None  # [R, K] squared L2, smaller is nearer
    queries: Tensor | None = None  # [R, P] what was asked with, where the combiner wants it
    keys: Tensor | None = None  # [R, K, P] what was found, where the combiner wants it

    def first(self, k: int) -> Neighbours:
        return replace(self._each(lambda tensor: tensor[:, :k]), queries=self.queries)

    def to(self, device: torch.device) -> Neighbours:
        return self._each(lambda tensor: tensor.to(device))

    def rows(self, chosen: Tensor) -> Neighbours:
        """Only the chosen rows, as a mask or as numbers."""
        return self._each(lambda tensor: tensor[chosen])

    def only(self, wanted: Tensor) -> Neighbours:
        """Those wanted [R, K], in the order they had, and after them nothing found."""
        wanted = wanted & self.found
        order = (~wanted).long().argsort(dim=1, stable=True)  # [R, K]
        row = torch.arange(len(order), device=order.device)[:, None]  # [R, 1]
        moved = replace(self, found=wanted, queries=None)._each(lambda tensor: tensor[row, order])
        return replace(moved, queries=self.queries)

    def squared_distances(self) -> Tensor:
        """[R, K], also of similarities: |a - b|^2 = 2 - 2 a.b where both have length one."""
        if self.distance is not None:
            return self.distance
        assert self.similarity is not None
        return 2 - 2 * self.similarity

    def _each(self, change: Callable[[Tensor], Tensor]) -> Neighbours:
        def maybe(tensor: Tensor | None) -> Tensor | None:
            return None if tensor is None else change(tensor)

        return Neighbours(
            change(self.ids), change(self.values), change(self.found),
            maybe(self.similarity), maybe(self.distance), maybe(self.queries), maybe(self.keys),
        )  # fmt: skip


@dataclass(frozen=True)
class Shares:
    """What p_mix is made of: the share of p_model, and that of each neighbour's value; 1 together, in each row."""

    of_model: Tensor  # [R]; 1 where nothing was found
    of_neighbour: Tensor  # [R, K]; 0 where there is none


class Combiner(Protocol):
    """How much each of `k` neighbours is believed beside the model."""

    @property
    def k(self) -> int: ...

    @property
    def wants_keys(self) -> bool:
        """Whether neighbours must come with queries and keys."""

    def shares(self, log_p_model: Tensor, neighbours: Neighbours) -> Shares: ...


@dataclass(frozen=True)
class Mixing:
    """k, temperature and weight; `scaled` makes the weight w* = weight x confidence."""

    k: int
    temperature: float
    weight: float
    scaled: bool
    wants_keys: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if self.k < 1:
            raise InputError(f"k is {self.k}; ask for at least one neighbour")
        if not (self.temperature > 0 and math.isfinite(self.temperature)):
            raise InputError(f"temperature is {self.temperature}; it must be above 0")
        if not 0 <= self.weight <= 1:
            raise InputError(f"weight is {self.weight}; it must lie between 0 (the model alone) and 1")

    def shares(self, log_p_model: Tensor, neighbours: Neighbours) -> Shares:  # noqa: ARG002 (other combiners ask it)
        """1 - w for the model, and w times its part of p_knn for each neighbour."""
        w = weights(neighbours, self)  # [R]
        return Shares(1 - w, w[:, None] * kernel(neighbours, self.temperature))


def from_other_pairs(neighbours: Neighbours, found_in: Tensor, pair: Tensor, k: int) -> Neighbours:
    """The k nearest that are not of the query's own pair: `found_in` [R, K] are their pairs, `pair` [R] the query's.

    What asks with the datastore's own entries must not find them. The pair's other entries go too: they know the same
    sentence, and no sentence to translate will have such neighbours. So retrieve more than k; a long pair that is still
    short of k has some absent. What goes with the neighbours, such as log p_model of their values, is gathered after.
    """
    # Not views: those would keep what was left out in memory.
    return neighbours.only(found_in != pair[:, None]).first(k)._each(Tensor.contiguous)


def kernel(neighbours: Neighbours, temperature: float | Tensor) -> Tensor:
    """Each neighbour's share of p_knn [R, K]: exp(sim/T) or exp(-d/T), normalised over those found; T also [R, 1]."""
    near = neighbours.similarity if neighbours.distance is None else -neighbours.distance
    assert near is not None
    logits = (near.float() / temperature).masked_fill(~neighbours.found, -math.inf)  # [R, K]
    # A row without neighbours has softmax 0/0; its shares are nothing.
    return torch.softmax(logits, -1).masked_fill(~neighbours.found, 0.0)


def by_value(of_neighbour: Tensor, neighbours: Neighbours, vocabulary: int) -> Tensor:
    """[R, V] from [R, K]: what the neighbours have, added up by value. Of the kernel's shares this is p_knn."""
    values = neighbours.values.masked_fill(~neighbours.found, 0)
    return of_neighbour.new_zeros(len(values), vocabulary).scatter_add_(1, values, of_neighbour)


def same_value(neighbours: Neighbours) -> Tensor:
    """[R, K, K]: which neighbours share a value, of those found."""
    values, found = neighbours.values, neighbours.found
    return (values[:, :, None] == values[:, None]) & found[:, :, None] & found[:, None]


def first_of_value(neighbours: Neighbours) -> Tensor:
    """[R, K]: the neighbours whose value none before them has, of those found: each value is counted once."""
    return neighbours.found & ~same_value(neighbours).tril(-1).any(2)


def confidence(neighbours: Neighbours) -> Tensor:
    """[R]: the mean similarity of the neighbours found, clipped to [0, 1]; 0 where nothing was found."""
    if neighbours.similarity is None:
        raise InputError("confidence needs similarities; kNN-MT's raw states have distances: use a fixed weight")
    found = neighbours.found
    total = neighbours.similarity.float().masked_fill(~found, 0.0).sum(-1)
    return (total / found.sum(-1).clamp(min=1)).clamp(0, 1)


def weights(neighbours: Neighbours, mixing: Mixing) -> Tensor:
    """[R]: the share of p_mix that p_knn gets in each row; 0 where nothing was found."""
    fixed = neighbours.found.any(-1).float() * mixing.weight
    return fixed * confidence(neighbours) if mixing.scaled else fixed


def mix(log_p_model: Tensor, neighbours: Neighbours, shares: Shares) -> Tensor:
    """log p_mix = log(share of the model x p_model + the shares of the neighbours, added up by value), [R, V].

    The second term is 0 but for the K values, so only these pay for a logarithm of their own.
    """
    values = neighbours.values.masked_fill(~neighbours.found, 0)  # [R, K]
    added = by_value(shares.of_neighbour, neighbours, log_p_model.shape[1]).gather(1, values)  # [R, K]
    # Floored: a token that only the model knows stays possible where what all neighbours want is forbidden.
    mixed = log_p_model + torch.log(shares.of_model.clamp(min=LEAST))[:, None]  # [R, V]
    return mixed.scatter(1, values, torch.logaddexp(mixed.gather(1, values), torch.log(added)))
