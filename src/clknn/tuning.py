"""k, temperature and weight from cached retrievals: held-out states in, the likeliest `Mixing` out.

The held-out pairs are force-decoded once and their neighbours fetched once, at the largest k; each setting is then a
few array operations over (tokens x k), so that a grid of some thousand settings takes seconds. What is maximised is
the mean log p_mix of the reference tokens. The trade-off: likelihood is not BLEU, and where they disagree this
follows likelihood.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from clknn.mixing import Mixing, Neighbours, confidence, kernel

KS = (2, 4, 8, 16, 32, 64)
WEIGHTS = tuple(np.round(np.arange(0.05, 1.0001, 0.05), 2).tolist())
SIMILARITY_TEMPERATURES = (0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.07, 0.1, 0.15, 0.2)


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
            # A token that neither source can produce would be -inf; float32 decoding cannot tell it from 1e-30.
            likelihood = mixed.clamp(min=1e-30).log().mean(1)  # [W]
            i = int(likelihood.argmax())
            if likelihood[i] > best[0]:
                best = (float(likelihood[i]), Mixing(k, temperature, WEIGHTS[i], scaled))
    return Tuned(best[1], best[0], float(log_p_model.mean()), len(truth))


def temperatures(neighbours: Neighbours) -> tuple[float, ...]:
    """Similarities have a scale of their own; distances have the model's, read from the median distance."""
    if neighbours.distance is None:
        return SIMILARITY_TEMPERATURES
    far = neighbours.distance[neighbours.found & (neighbours.distance > 0)]  # a repetition at 0 says nothing of scale
    median = float(far.median()) if len(far) else 1.0
    return tuple(float(f"{median * share:.4g}") for share in (0.03, 0.05, 0.1, 0.15, 0.2, 0.3, 0.5, 0.7, 1.0, 1.5))
