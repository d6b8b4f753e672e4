"""What suits the held-out pairs best: cached retrievals in, the likeliest `Mixing` or the weights of a combiner out.

The held-out pairs are force-decoded once and their neighbours fetched once, at the largest k; each setting is then a
few array operations over (tokens x k), so that a grid of some thousand settings takes seconds. What is maximised is
the mean log p_mix of the reference tokens: by `tune` over the grid, by `learn` along the gradient, with every
combiner's shares. The trade-off: likelihood is not BLEU, and where they disagree this follows likelihood.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, Generic, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from clknn.errors import InputError
from clknn.mixing import Combiner, Mixing, Neighbours, Shares, confidence, first_of_value, kernel, same_value

KS = (2, 4, 8, 16, 32, 64)
WEIGHTS = tuple(np.round(np.arange(0.0, 1.0001, 0.05), 2).tolist())  # 0: a datastore can be of no use at all
SIMILARITY_TEMPERATURES = (0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.07, 0.1, 0.15, 0.2)
NEVER = 1e-30  # a token that no source can produce would be -inf; float32 decoding cannot tell it from this
BLOCK = 4_096  # tokens judged at a time

M = TypeVar("M", bound=torch.nn.Module)


@dataclass(frozen=True)
class Retrieved:
    """Held-out tokens, and what was retrieved for them: all that tuning and learned combiners look at."""

    neighbours: Neighbours  # [R, K]
    truth: Tensor  # [R] the right tokens
    log_p: Tensor  # [R] log p_model of the right tokens
    log_p_values: Tensor  # [R, K] log p_model of each neighbour's value
    log_p_top: Tensor  # [R] log p_model of the model's own first choice
    log_p_sum: Tensor  # [R] the sum of log p_model over the vocabulary: what label smoothing needs
    entropy: Tensor  # [R] of p_model, in nats
    pair: Tensor  # [R] which held-out pair each token belongs to
    vocabulary: int
    features: Tensor | None = None  # [R, F] what a combiner that learns reads of each token, where computed beforehand

    def rows(self, chosen: Tensor) -> Retrieved:
        """Only the chosen tokens, as a mask or as numbers."""
        return Retrieved(
            self.neighbours.rows(chosen), self.truth[chosen], self.log_p[chosen], self.log_p_values[chosen],
            self.log_p_top[chosen], self.log_p_sum[chosen], self.entropy[chosen], self.pair[chosen], self.vocabulary,
            None if self.features is None else self.features[chosen],
        )  # fmt: skip

    def first(self, k: int) -> Retrieved:
        """Only the k nearest neighbours of each token."""
        most = self.neighbours.found.shape[1]
        if most < k:
            raise InputError(f"k is {k}, and {most} neighbours were retrieved for each token; retrieve {k}")
        return replace(self, neighbours=self.neighbours.first(k), log_p_values=self.log_p_values[:, :k])


def retrieved_of(neighbours: Neighbours, log_p_model: Tensor, truth: Tensor, pair: Tensor) -> Retrieved:
    """What is kept of log p_model [R, V] where neighbours were fetched for tokens `truth` [R] of pairs [R]."""
    values = neighbours.values.masked_fill(~neighbours.found, 0)
    return Retrieved(
        neighbours,
        truth,
        log_p_model.gather(1, truth[:, None])[:, 0],
        log_p_model.gather(1, values),
        log_p_model.amax(1),
        log_p_model.sum(1),
        # A token without any probability adds nothing; 0 x log 0 would add nan.
        -(log_p_model.exp() * log_p_model.clamp(min=-1e4)).sum(1),
        pair,
        log_p_model.shape[1],
    )


def joined(blocks: Sequence[Retrieved]) -> Retrieved:
    """All tokens of these blocks."""

    def together(parts: Sequence[Any]) -> dict[str, Any]:
        named = {field.name: [getattr(part, field.name) for part in parts] for field in fields(parts[0])}
        return {name: torch.cat(each) for name, each in named.items() if isinstance(each[0], Tensor)}

    neighbours = Neighbours(**together([block.neighbours for block in blocks]))
    return Retrieved(neighbours, **together(blocks), vocabulary=blocks[0].vocabulary)


@dataclass(frozen=True)
class Chosen:
    """What a tuner chose, and what it measured: mean log-likelihood of a reference token, with it and without."""

    combiner: Combiner
    measured: dict[str, Any]


class Tuner(Protocol):
    """How a combiner is chosen on retrieved tokens: a grid, or the training of one that learns."""

    wants_keys: ClassVar[bool]  # whether neighbours must come with queries and keys
    own_pairs: ClassVar[bool]  # whether it learns from the datastore's own pairs, each without what it finds of itself
    general: ClassVar[bool]  # whether it learns from general pairs too, where these are given

    @property
    def name(self) -> str: ...

    @property
    def most(self) -> int:
        """How many neighbours to retrieve for each token."""

    def choose(self, retrieved: Retrieved, advance: Callable[[Progress], None]) -> Chosen: ...


@dataclass(frozen=True)
class Tuned:
    mixing: Mixing
    log_likelihood: float  # mean log p_mix of a reference token
    base: float  # mean log p_model of a reference token
    tokens: int


def tune(neighbours: Neighbours, log_p_model: Tensor, truth: Tensor, scaled: bool, ks: tuple[int, ...] = KS) -> Tuned:
    """The best of the grid for `neighbours` [R, K] of states whose right tokens are `truth` [R].

    `log_p_model` [R] is the model's own log-probability of those tokens.
    """
    p_model, most = log_p_model.double().exp(), neighbours.found.shape[1]
    w = torch.tensor(WEIGHTS, dtype=torch.float64)[:, None]  # [W, 1]
    best = (-math.inf, Mixing(1, 1.0, 0.0, scaled))
    for k in [k for k in ks if k <= most] or [most]:
        near = neighbours.first(k)
        right = near.values == truth[:, None]  # [R, k]
        trust = (confidence(near) if scaled else near.found.any(1).float()).double()  # [R]
        for temperature in temperatures(neighbours):
            p_right = (kernel(near, temperature) * right).sum(1).double()  # [R]
            mixed = (1 - w * trust) * p_model + w * trust * p_right  # [W, R]
            likelihood = mixed.clamp(min=NEVER).log().mean(1)  # [W]
            i = int(likelihood.argmax())
            if likelihood[i] > best[0]:
                best = (float(likelihood[i]), Mixing(k, temperature, WEIGHTS[i], scaled))
    return Tuned(best[1], best[0], float(log_p_model.mean()), len(truth))


@dataclass(frozen=True)
class Grid:
    """The papers' k, temperature and weight, by `tune`; `scaled` makes the weight w*."""

    scaled: bool
    wants_keys: ClassVar[bool] = False
    own_pairs: ClassVar[bool] = False
    general: ClassVar[bool] = False
    most: ClassVar[int] = max(KS)

    @property
    def name(self) -> str:
        return "scaled" if self.scaled else "fixed"

    def choose(self, retrieved: Retrieved, advance: Callable[[Progress], None]) -> Chosen:  # noqa: ARG002 (no training)
        if self.scaled and retrieved.neighbours.similarity is None:
            raise InputError("w* needs similarities, and these keys have distances; choose another combiner")
        tuned = tune(retrieved.neighbours, retrieved.log_p, retrieved.truth, self.scaled)
        return Chosen(tuned.mixing, likelihoods(tuned.base, tuned.log_likelihood, tuned.tokens))


def likelihoods(base: float, reached: float, tokens: int) -> dict[str, Any]:
    """For the manifest."""
    return {
        "log-likelihood of a token, base": round(base, 4),
        "log-likelihood of a token": round(reached, 4),
        "tokens": tokens,
    }


def temperatures(neighbours: Neighbours) -> tuple[float, ...]:
    """Similarities have a scale of their own; distances have the model's, read from the median distance."""
    if neighbours.distance is None:
        return SIMILARITY_TEMPERATURES
    median = typical_distance(neighbours)
    return tuple(float(f"{median * share:.4g}") for share in (0.03, 0.05, 0.1, 0.15, 0.2, 0.3, 0.5, 0.7, 1.0, 1.5))


def typical_distance(neighbours: Neighbours) -> float:
    """The median squared distance of the neighbours found; a repetition at 0 says nothing of scale."""
    distances = neighbours.squared_distances()
    far = distances[neighbours.found & (distances > 0)]
    return float(far.median()) if len(far) else 1.0


@dataclass(frozen=True)
class Learning:
    """How a combiner learns. `PAPER` of each has the published values."""

    learning_rate: float = 3e-4
    updates: int = 5_000  # at most
    batch: int = 32  # pairs
    smoothing: float = 1e-3  # the share of the loss that goes to all tokens alike
    aside: float = 0.1  # the share of the pairs that is not trained on, but says when to stop
    validate_every: int = 100
    patience: int = 10  # validations without a better one before training stops
    seed: int = 0


@dataclass(frozen=True)
class Progress:
    """What training reports at each validation."""

    update: int
    loss: float  # mean since the last validation
    log_likelihood: float  # mean log p_mix of a token of the pairs set aside


@dataclass(frozen=True)
class Learned(Generic[M]):
    """A combiner that learned, with the weights of its best validation; the numbers are of the pairs set aside."""

    combiner: M
    curve: list[Progress]
    log_likelihood: float  # mean log p_mix of a token
    before: float  # the same before the first update
    base: float  # mean log p_model of a token
    tokens: int


def chosen(learned: Learned[M]) -> Chosen:
    """A combiner that learned, as a tuner's choice; its numbers are of the pairs set aside."""
    combiner: Any = learned.combiner
    return Chosen(
        combiner,
        likelihoods(learned.base, learned.log_likelihood, learned.tokens)
        | {
            "log-likelihood of a token, before training": round(learned.before, 4),
            "updates": learned.curve[-1].update,
            "best update": _best(learned.curve).update,
        },
    )


def _best(curve: list[Progress]) -> Progress:
    return max(curve, key=lambda progress: progress.log_likelihood)


def log_p_mix(retrieved: Retrieved, shares: Shares) -> Tensor:
    """[R] of the right tokens."""
    right = retrieved.neighbours.values == retrieved.truth[:, None]  # [R, K]; what is absent has no share
    from_neighbours = (shares.of_neighbour * right).sum(1).clamp(min=NEVER).log()  # [R]
    return torch.logaddexp(_log_of_model(shares) + retrieved.log_p, from_neighbours)


def smoothed_loss(retrieved: Retrieved, shares: Shares, smoothing: float) -> Tensor:
    """[R]: (1 - e) (-log p_mix of the right token) + e (the mean of -log p_mix over the vocabulary), for smoothing e.

    The mean is exact without p_mix of V tokens: all are the model's share x p_model, whose logarithms are summed
    already, but for the values found. Such a one has log(1 + what its neighbours have / what the model gives it) more.
    """
    loss = -log_p_mix(retrieved, shares)  # [R]
    if not smoothing:
        return loss
    near, log_of_model = retrieved.neighbours, _log_of_model(shares)
    added = torch.einsum("rij,rj->ri", same_value(near).to(shares.of_neighbour), shares.of_neighbour)  # [R, K]
    more = added.clamp(min=NEVER).log() - log_of_model[:, None] - retrieved.log_p_values  # [R, K]
    more = torch.nn.functional.softplus(more.masked_fill(~first_of_value(near), -math.inf)).sum(1)  # [R]
    return (1 - smoothing) * loss - smoothing * (log_of_model + (retrieved.log_p_sum + more) / retrieved.vocabulary)


def _log_of_model(shares: Shares) -> Tensor:
    return shares.of_model.clamp(min=NEVER).log()  # [R]


def learn(
    combiner: M,
    shares: Callable[[Retrieved], Shares],
    retrieved: Retrieved,
    settings: Learning,
    advance: Callable[[Progress], None] = lambda _: None,
) -> Learned[M]:
    """Trains `combiner`, whose weights `shares` uses, on these tokens, and keeps the likeliest on pairs set aside."""
    if settings.smoothing and not retrieved.log_p_sum.isfinite().all():
        raise InputError("the model gives a token no probability at all, which smoothing cannot bear; set it to 0")
    rng = torch.Generator().manual_seed(settings.seed)
    pairs = _by_pair(retrieved.pair)
    if len(pairs) < 2:
        raise InputError(
            f"a combiner learns from some pairs and is judged by others, and here is {len(pairs)}; retrieve for more"
        )
    shuffled = torch.randperm(len(pairs), generator=rng).tolist()
    kept = max(1, round(settings.aside * len(pairs)))
    aside = [retrieved.rows(rows) for rows in torch.split(torch.cat([pairs[i] for i in shuffled[:kept]]), BLOCK)]
    learned_from = [pairs[i] for i in shuffled[kept:]]
    optimiser = torch.optim.Adam(combiner.parameters(), lr=settings.learning_rate, betas=(0.9, 0.98))

    curve = [Progress(0, math.nan, _judged(aside, shares))]
    best, best_at, losses, queue = _weights(combiner), 0, list[float](), list[int]()
    for update in range(1, settings.updates + 1):
        if not queue:
            queue = torch.randperm(len(learned_from), generator=rng).tolist()
        batch, queue = queue[: settings.batch], queue[settings.batch :]
        some = retrieved.rows(torch.cat([learned_from[i] for i in batch]))
        loss = smoothed_loss(some, shares(some), settings.smoothing).mean()
        optimiser.zero_grad()
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(combiner.parameters(), 1.0)
        optimiser.step()
        losses.append(loss.item())
        if update % settings.validate_every == 0 or update == settings.updates:
            curve.append(Progress(update, float(np.mean(losses)), _judged(aside, shares)))
            losses.clear()
            advance(curve[-1])
            if curve[-1].log_likelihood > curve[best_at].log_likelihood:
                best, best_at = _weights(combiner), len(curve) - 1
            elif len(curve) - 1 - best_at >= settings.patience:
                break
    combiner.load_state_dict(best)
    combiner.eval().requires_grad_(False)
    base = torch.cat([block.log_p for block in aside]).double()
    likelihood, before = curve[best_at].log_likelihood, curve[0].log_likelihood
    return Learned(combiner, curve, likelihood, before, float(base.mean()), len(base))


def _by_pair(pair: Tensor) -> list[Tensor]:
    """The tokens of each pair."""
    counts = torch.unique(pair, return_counts=True)[1]
    return list(torch.split(pair.argsort(stable=True), counts.tolist()))


@torch.no_grad()
def _judged(aside: list[Retrieved], shares: Callable[[Retrieved], Shares]) -> float:
    return float(torch.cat([log_p_mix(block, shares(block)) for block in aside]).double().mean())


def _weights(combiner: torch.nn.Module) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in combiner.state_dict().items()}
