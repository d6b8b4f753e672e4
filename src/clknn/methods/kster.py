"""KSTER (Jiang et al., 2021): a kernel whose bandwidth, and whose share of p_mix, are read from query and keys.

In go queries, keys and distances; out come shares. The bandwidth starts from the median distance of the training data,
as exp of a bias, since a kernel that is all one neighbour or all neighbours alike hardly learns; queries and keys are
divided by their size in the training data, which is kept with the weights, so that the unit of a model's states means
nothing. It learns from the datastore's own pairs: `from_other_pairs` takes out what a query finds of itself. The
trade-off: training holds all keys found in memory, K x P floats for each token (8 KB at k 16 and P 128).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from clknn.errors import InputError
from clknn.mixing import Neighbours, Shares, kernel
from clknn.tuning import Chosen, Learned, Learning, Progress, Retrieved, chosen, learn, typical_distance

K = 16
PAPER = Learning(learning_rate=2e-4, updates=30_000)
SETTINGS = Learning(learning_rate=2e-4, updates=5_000)
START = 0.2  # of the median squared distance: in the middle of the temperatures that `tune` tries


class Kernel(torch.nn.Module):
    """Gaussian exp(-d2 / sigma) or Laplacian exp(-sqrt(d2) / sigma), of learned bandwidth sigma and learned weight."""

    wants_keys: ClassVar[bool] = True
    scale: Tensor

    def __init__(self, k: int, width: int, laplacian: bool, bandwidth: float = 1.0, scale: float = 1.0) -> None:
        super().__init__()
        if k < 1:
            raise InputError(f"k is {k}; ask for at least one neighbour")
        self.k, self.laplacian = k, laplacian
        self.register_buffer("scale", torch.tensor(scale))
        self.bandwidth = torch.nn.Linear(2 * width, 1)
        torch.nn.init.zeros_(self.bandwidth.weight)  # at first the same for every query
        torch.nn.init.constant_(self.bandwidth.bias, math.log(bandwidth))
        self.inner = torch.nn.Linear(2 * width, width)
        self.outer = torch.nn.Linear(width, 1)

    def forward(self, neighbours: Neighbours) -> Shares:
        assert neighbours.queries is not None
        assert neighbours.keys is not None
        found = neighbours.found
        queries = neighbours.queries / self.scale  # [R, P]
        keys = neighbours.keys.masked_fill(~found[:, :, None], 0.0) / self.scale  # [R, K, P]
        mean = keys.sum(1) / found.sum(1, keepdim=True).clamp(min=1)  # [R, P]
        # No distances are of another size than this, and float32 has room for them and for their gradient.
        sigma = self.bandwidth(torch.cat([queries, mean], 1)).clamp(-30, 30).exp()  # [R, 1]
        # Rounding makes small distances negative. What is absent may be no number, which even no gradient multiplies.
        far = neighbours.squared_distances().masked_fill(~found, 0.0).clamp(min=0)  # [R, K]
        measured = replace(neighbours, similarity=None, distance=far.sqrt() if self.laplacian else far)
        p_knn = kernel(measured, sigma)  # [R, K]
        smoothed = torch.einsum("rk,rkp->rp", p_knn, keys)  # [R, P]
        logit = self.outer(torch.relu(self.inner(torch.cat([queries, smoothed], 1))))[:, 0]  # [R]
        # 1 - sigmoid(x), but exact near 0.
        of_model = torch.sigmoid(-logit).masked_fill(~found.any(1), 1.0)  # [R]
        return Shares(of_model, torch.sigmoid(logit)[:, None] * p_knn)

    def shares(self, log_p_model: Tensor, neighbours: Neighbours) -> Shares:  # noqa: ARG002 (other combiners ask it)
        return self.forward(neighbours)

    def tensors(self) -> dict[str, Tensor]:
        mine = {**self.state_dict(), "k": torch.tensor(self.k), "laplacian": torch.tensor(self.laplacian)}
        return {f"kster.{name}": tensor.detach().contiguous() for name, tensor in mine.items()}

    @classmethod
    def of(cls, tensors: dict[str, Tensor]) -> Kernel | None:
        """The combiner that `tensors()` wrote, or None where there is none among them."""
        mine = {k.removeprefix("kster."): v for k, v in tensors.items() if k.startswith("kster.")}
        if not mine:
            return None
        learned = cls(int(mine.pop("k")), len(mine["inner.bias"]), bool(mine.pop("laplacian")))
        learned.load_state_dict(mine)
        return learned.eval().requires_grad_(False)


def train(
    retrieved: Retrieved,
    k: int = K,
    laplacian: bool = False,
    settings: Learning = SETTINGS,
    advance: Callable[[Progress], None] = lambda _: None,
) -> Learned[Kernel]:
    """A kernel for the k nearest of what was retrieved, with keys, for the datastore's pairs `from_other_pairs`."""
    nearest = retrieved.first(k)
    queries = nearest.neighbours.queries
    if queries is None or nearest.neighbours.keys is None:
        raise InputError(
            "KSTER learns from queries and keys, and these neighbours came without; retrieve them with keys"
        )
    typical = typical_distance(nearest.neighbours)
    # The Laplacian starts as sharp as the Gaussian at that distance: d sqrt(x) / dx = 1 / (2 sqrt(x)).
    bandwidth = START * math.sqrt(typical) / 2 if laplacian else START * typical
    scale = float(queries.float().square().mean().sqrt()) or 1.0
    with torch.random.fork_rng():
        torch.manual_seed(settings.seed)
        learned = Kernel(k, queries.shape[1], laplacian, bandwidth, scale)
    return learn(learned, lambda some: learned.forward(some.neighbours), nearest, settings, advance)


@dataclass(frozen=True)
class KernelTuner:
    """The tuner of `Kernel`."""

    k: int = K
    laplacian: bool = False
    learning: Learning = SETTINGS
    name: ClassVar[str] = "kernel"
    wants_keys: ClassVar[bool] = True
    own_pairs: ClassVar[bool] = True
    general: ClassVar[bool] = False

    @property
    def most(self) -> int:
        return self.k

    def choose(self, retrieved: Retrieved, advance: Callable[[Progress], None]) -> Chosen:
        k = min(self.k, retrieved.neighbours.found.shape[1])
        return chosen(train(retrieved, k, self.laplacian, self.learning, advance))
