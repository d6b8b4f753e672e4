"""Adaptive kNN-MT (Zheng et al., 2021): a small network that chooses k for each token, and k = 0 is the model alone.

In go the K distances and how many values lie among the first i neighbours; out come the shares of p_model and of p_knn
with k = 1, 2, 4, ... K, at one fixed temperature. Distances of different models differ by orders of magnitude, so the
network sees them divided by a constant measured on the training data, which is kept with its weights. Squared distances
are used of similarities too: T 0.1 for 2 - 2 sim is T 0.05 for sim. The trade-off: it learns from held-out pairs only
(entries of pairs that are in the datastore find themselves), so it has some thousand tokens, and little to choose by.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from clknn.errors import InputError
from clknn.mixing import Neighbours, Shares, first_of_value, kernel
from clknn.tuning import Chosen, Learned, Learning, Progress, Retrieved, chosen, learn, tune, typical_distance

HIDDEN = 32
PAPER = Learning(learning_rate=3e-4, updates=5_000, batch=32, smoothing=1e-3)


class MetaK(torch.nn.Module):
    """softmax(W2 tanh(W1 [distances; counts] + b1) + b2): the model's share, then those of k = 1, 2, 4, ... K."""

    wants_keys: ClassVar[bool] = False
    scale: Tensor

    def __init__(self, k: int, temperature: float, scale: float = 1.0) -> None:
        super().__init__()
        if k < 1 or k & (k - 1):
            raise InputError(f"k is {k}; adaptive kNN-MT chooses among 1, 2, 4, ... k: make it a power of two")
        if not (temperature > 0 and math.isfinite(temperature)):
            raise InputError(f"temperature is {temperature}; it must be above 0")
        self.k, self.temperature = k, temperature
        self.register_buffer("scale", torch.tensor(scale))
        self.inner = torch.nn.Linear(2 * k, HIDDEN)
        self.outer = torch.nn.Linear(HIDDEN, 2 + int(math.log2(k)))

    def forward(self, neighbours: Neighbours) -> Shares:
        near = replace(neighbours, similarity=None, distance=neighbours.squared_distances())
        found, width = near.found, near.found.shape[1]
        assert width == self.k
        chosen = self.outer(torch.tanh(self.inner(self.features(near))))  # [R, 2 + log2 K]
        # A p_knn of nothing is no choice. The model always is one, and where nothing was found the only one: 1 exactly.
        sizes = [2**i for i in range(chosen.shape[1] - 1)]
        possible = torch.stack([torch.ones_like(found[:, 0]), *(found[:, :size].any(1) for size in sizes)], 1)
        weight = torch.softmax(chosen.masked_fill(~possible, -math.inf), 1)  # [R, 2 + log2 K]
        of_neighbour = torch.zeros_like(weight[:, :1]).expand(-1, width)  # [R, K]
        for i, size in enumerate(sizes, 1):
            p_knn = torch.nn.functional.pad(kernel(near.first(size), self.temperature), (0, width - size))  # [R, K]
            of_neighbour = of_neighbour + weight[:, i, None] * p_knn
        return Shares(weight[:, 0], of_neighbour)

    def features(self, near: Neighbours) -> Tensor:
        """[R, 2 K]: the distances, and for each i the number of distinct values among the first i neighbours.

        An absent neighbour is as far as the farthest found, and adds no value: the network has to be told something,
        and this needs no number from outside the row. In p_knn it has no share at all.
        """
        assert near.distance is not None
        farthest = near.distance.masked_fill(~near.found, 0.0).amax(1, keepdim=True)  # [R, 1]
        distances = torch.where(near.found, near.distance, farthest) / self.scale  # [R, K]
        return torch.cat([distances, first_of_value(near).cumsum(1) / self.k], 1)

    def shares(self, log_p_model: Tensor, neighbours: Neighbours) -> Shares:  # noqa: ARG002 (other combiners ask it)
        return self.forward(neighbours)

    def tensors(self) -> dict[str, Tensor]:
        mine = {**self.state_dict(), "temperature": torch.tensor(self.temperature, dtype=torch.float64)}
        return {f"adaptive.{name}": tensor.detach().contiguous() for name, tensor in mine.items()}

    @classmethod
    def of(cls, tensors: dict[str, Tensor]) -> MetaK | None:
        """The combiner that `tensors()` wrote, or None where there is none among them."""
        mine = {k.removeprefix("adaptive."): v for k, v in tensors.items() if k.startswith("adaptive.")}
        if not mine:
            return None
        meta = cls(mine["inner.weight"].shape[1] // 2, float(mine.pop("temperature")))
        meta.load_state_dict(mine)
        return meta.eval().requires_grad_(False)


def train(
    retrieved: Retrieved,
    k: int,
    temperature: float,
    settings: Learning = PAPER,
    advance: Callable[[Progress], None] = lambda _: None,
) -> Learned[MetaK]:
    """A network for the k nearest of what was retrieved for pairs that are not in the datastore."""
    nearest = retrieved.first(k)
    with torch.random.fork_rng():
        torch.manual_seed(settings.seed)
        meta = MetaK(k, temperature, typical_distance(nearest.neighbours))
    return learn(meta, lambda some: meta.forward(some.neighbours), nearest, settings, advance)


@dataclass(frozen=True)
class MetaKTuner:
    """The tuner of `MetaK`. The paper's T of 10 is in units of its model's states; None takes the grid's for k."""

    k: int = 16
    temperature: float | None = None
    learning: Learning = PAPER
    name: ClassVar[str] = "meta-k"
    wants_keys: ClassVar[bool] = False
    own_pairs: ClassVar[bool] = False
    general: ClassVar[bool] = False

    @property
    def most(self) -> int:
        return self.k

    def choose(self, retrieved: Retrieved, advance: Callable[[Progress], None]) -> Chosen:
        k = 2 ** int(math.log2(min(self.k, retrieved.neighbours.found.shape[1])))
        nearest, temperature = retrieved.first(k), self.temperature
        if temperature is None:
            best = tune(nearest.neighbours, nearest.log_p, nearest.truth, scaled=False, ks=(k,)).mixing
            # 2 - 2 sim at twice the temperature is sim.
            temperature = best.temperature * (1 if nearest.neighbours.similarity is None else 2)
        return chosen(train(nearest, k, temperature, self.learning, advance))
