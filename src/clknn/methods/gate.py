"""A gate that reads how much to believe each neighbour beside the model: confidence, made wider and learned.

In go similarities and what p_model says: of itself (its entropy, its first choice) and of each neighbour's value; out
come shares. A neighbour's part of p_knn is exp(sim / T) p_model(value)^a: how soft (T), how much the model's opinion of
a neighbour counts (a), and the weight of it all are three outputs of one small network, which starts as the `Mixing`
that the grid chose and so can only move away from it where held-out pairs say so. The trade-off: the entropy of p_model
is one more pass over the vocabulary at each step (docs/log.md has what it costs and what it brings).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from clknn.errors import InputError
from clknn.mixing import Mixing, Neighbours, Shares, first_of_value, kernel, same_value
from clknn.tuning import Chosen, Grid, Learned, Learning, Progress, Retrieved, chosen, learn, tune

HIDDEN = 32
FAINTEST = -30.0  # log p_model that counts as none
BLOCK = 4_096  # tokens whose features are computed at a time
FEATURES = 12
SETTINGS = Learning(learning_rate=3e-3, updates=3_000, batch=32, smoothing=0.0)


class Gate(torch.nn.Module):
    """Three outputs of tanh features: what T is multiplied by, a, and the logit of the neighbours' share."""

    wants_keys: ClassVar[bool] = False
    temperature: Tensor
    logit: Tensor

    def __init__(self, k: int, temperature: float, weight: float) -> None:
        super().__init__()
        if k < 1:
            raise InputError(f"k is {k}; ask for at least one neighbour")
        self.k = k
        weight = min(max(weight, 0.01), 0.99)  # a logit of 0 or 1 could never be left again
        self.register_buffer("temperature", torch.tensor(temperature))
        self.register_buffer("logit", torch.tensor(math.log(weight / (1 - weight))))
        self.inner = torch.nn.Linear(FEATURES, HIDDEN)
        self.outer = torch.nn.Linear(HIDDEN, 3)
        torch.nn.init.zeros_(self.outer.weight)
        torch.nn.init.zeros_(self.outer.bias)

    def forward(self, neighbours: Neighbours, opinion: Tensor, features: Tensor) -> Shares:
        """`opinion` [R, K] is log p_model of the neighbours' values."""
        near, found = _similarity(neighbours), neighbours.found  # [R, K] twice
        said = self.outer(torch.tanh(self.inner(features)))  # [R, 3]
        logits = near / (self.temperature * said[:, :1].exp()) + said[:, 1:2] * opinion.clamp(min=FAINTEST)  # [R, K]
        p_knn = torch.softmax(logits.masked_fill(~found, -math.inf), 1).masked_fill(~found, 0.0)
        weight = torch.sigmoid(self.logit + said[:, 2]).masked_fill(~found.any(1), 0.0)  # [R]
        return Shares(1 - weight, weight[:, None] * p_knn)

    def features(self, neighbours: Neighbours, opinion: Tensor, log_p_top: Tensor, entropy: Tensor) -> Tensor:
        """[R, FEATURES], each of order one: of the similarities, of p_knn at the start's temperature, of p_model.

        `log_p_top` [R] is log p_model of its own first choice. Absent neighbours are as far as the farthest found.
        """
        near, found, opinion = _similarity(neighbours), neighbours.found, opinion.clamp(min=FAINTEST)
        near = torch.where(found, near, near.masked_fill(~found, 0.0).amin(1, keepdim=True))  # [R, K]
        p_knn = kernel(neighbours, self.temperature)  # [R, K]
        together = torch.einsum("rij,rj->ri", same_value(neighbours).to(p_knn), p_knn)  # [R, K] p_knn of each value
        spread = -(p_knn * together.clamp(min=1e-9).log()).sum(1)  # [R] entropy of p_knn
        best, at = together.max(1)  # [R] its first choice
        choice = opinion.gather(1, at[:, None])[:, 0]  # [R] what the model thinks of it
        first, few = first_of_value(neighbours), max(1, self.k // 8)  # [R, K]
        return torch.stack(
            [
                4 * near[:, 0], 4 * near.mean(1), 4 * near[:, -1], 8 * near.std(1, correction=0),
                best, spread / 2, first[:, :few].sum(1) / few, first.sum(1) / self.k,
                log_p_top / 2, entropy / 4, choice / 8, (p_knn * opinion.exp()).sum(1),
            ],
            1,
        )  # fmt: skip

    def shares(self, log_p_model: Tensor, neighbours: Neighbours) -> Shares:
        opinion = log_p_model.gather(1, neighbours.values.masked_fill(~neighbours.found, 0))  # [R, K]
        p_model = log_p_model.exp()
        # A token without any probability adds nothing; 0 x log 0 would add nan.
        entropy = -(p_model * log_p_model.clamp(min=-1e4)).sum(1)  # [R]
        return self.forward(neighbours, opinion, self.features(neighbours, opinion, log_p_model.amax(1), entropy))

    def tensors(self) -> dict[str, Tensor]:
        mine = {**self.state_dict(), "k": torch.tensor(self.k)}
        return {f"gate.{name}": tensor.detach().contiguous() for name, tensor in mine.items()}

    @classmethod
    def of(cls, tensors: dict[str, Tensor]) -> Gate | None:
        """The combiner that `tensors()` wrote, or None where there is none among them."""
        mine = {k.removeprefix("gate."): v for k, v in tensors.items() if k.startswith("gate.")}
        if not mine:
            return None
        gate = cls(int(mine.pop("k")), 1.0, 0.5)
        gate.load_state_dict(mine)
        return gate.eval().requires_grad_(False)


def train(
    retrieved: Retrieved,
    start: Mixing,
    settings: Learning = SETTINGS,
    advance: Callable[[Progress], None] = lambda _: None,
) -> Learned[Gate]:
    """A gate for what was retrieved for pairs that are not in the datastore, from what the grid chose for them."""
    if retrieved.neighbours.similarity is None:
        raise InputError("the gate reads similarities, and kNN-MT's raw states have distances; choose another combiner")
    nearest = retrieved.first(start.k)
    with torch.random.fork_rng():
        torch.manual_seed(settings.seed)
        gate = Gate(start.k, start.temperature, start.weight)
    blocks = [nearest.rows(rows) for rows in torch.split(torch.arange(len(nearest.truth)), BLOCK)]
    features = torch.cat([gate.features(b.neighbours, b.log_p_values, b.log_p_top, b.entropy) for b in blocks])

    def shares(some: Retrieved) -> Shares:
        assert some.features is not None
        return gate.forward(some.neighbours, some.log_p_values, some.features)

    return learn(gate, shares, replace(nearest, features=features), settings, advance)


def _similarity(neighbours: Neighbours) -> Tensor:
    """[R, K], less 1: 0 for a repetition."""
    return -neighbours.squared_distances() / 2


@dataclass(frozen=True)
class GateTuner:
    """The tuner of `Gate`: the grid's choice, then the training that starts from it."""

    learning: Learning = SETTINGS
    name: ClassVar[str] = "gate"
    wants_keys: ClassVar[bool] = False
    own_pairs: ClassVar[bool] = False
    general: ClassVar[bool] = True
    most: ClassVar[int] = Grid.most

    def choose(self, retrieved: Retrieved, advance: Callable[[Progress], None]) -> Chosen:
        start = tune(retrieved.neighbours, retrieved.log_p, retrieved.truth, scaled=False).mixing
        return chosen(train(retrieved, start, self.learning, advance))
