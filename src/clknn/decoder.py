"""Decoding with a mix at each step: tokenised sources in, hypotheses with their evidence out.

The model generates; at each step its states become queries, their neighbours become p_knn, and p_mix takes the place
of p_model. The neighbours seen at each (step, row) are kept while decoding where evidence is wanted, and those of the
winning hypothesis are found again through its cells; what p_model gave its tokens is asked of the model once more: a
teacher-forced pass, where keeping it would take R x V numbers a step. The trade-off: retrieval answers for every
row of the beam, finished ones included, because `generate` keeps them; evidence costs K numbers for each of these.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from clknn.datastore import Retriever
from clknn.mixing import Combiner, Neighbours, Shares, mix
from clknn.model import Decoding, Generated, Mix, Model, Tokens
from clknn.states import batches, tokens_with_log_p


@dataclass(frozen=True)
class Vote:
    """A neighbour whose value is the token produced, and the share of p_mix that it gave."""

    entry: int
    share: float
    nearness: float  # similarity, or squared L2 distance where the datastore has distances


@dataclass(frozen=True)
class Evidence:
    """Why one token was produced: p_mix of it = (1 - weight) p_model + the votes' shares."""

    token: int
    weight: float
    p_model: float
    p_mix: float
    votes: list[Vote]


@dataclass(frozen=True)
class Hypothesis:
    tokens: Tokens
    evidence: list[Evidence] | None  # one for each token; None where it was not asked for


def decode(
    model: Model,
    sources: Sequence[Tokens],
    decoding: Decoding,
    retriever: Retriever | None = None,
    combiner: Combiner | None = None,
    evidence: bool = False,
    end_penalty: float = 0.0,
) -> list[Hypothesis]:
    """The best hypothesis of each source; without a retriever and a combiner, the base model's.

    `end_penalty` nats are taken off log p_mix of the tokens that end a sentence.
    """
    steps: dict[int, _Step] = {}
    mixed: Mix | None = None
    if retriever is not None and combiner is not None:
        mixed = _mixer(retriever, combiner, steps if evidence else None, model.ends, end_penalty)
    generated = model.generate(list(sources), decoding, mixed)
    if not evidence:
        return [Hypothesis(g.tokens, None) for g in generated]
    return [
        Hypothesis(
            g.tokens, [_evidence(steps.get(s), r, t, p) for (s, r), t, p in zip(g.cells, g.tokens, ps, strict=True)]
        )
        for g, ps in zip(generated, _p_model(model, sources, generated), strict=True)
    ]


def _p_model(model: Model, sources: Sequence[Tokens], generated: list[Generated]) -> list[list[float]]:
    """p_model of each hypothesis' tokens."""
    targets, found = [g.tokens for g in generated], [list[float]() for _ in generated]
    filled = [i for i, target in enumerate(targets) if target]
    for batch in batches(filled, list(sources), targets, tokens_with_log_p(model)):
        log_p = model.force([sources[i] for i in batch], [targets[i] for i in batch], with_log_p=True).log_p
        assert log_p is not None
        tokens = torch.tensor([token for i in batch for token in targets[i]], device=log_p.device)
        p = iter(log_p.gather(1, tokens[:, None])[:, 0].exp().tolist())
        for i in batch:
            found[i] = [next(p) for _ in targets[i]]
    return found


def _mixer(
    retriever: Retriever, combiner: Combiner, steps: dict[int, _Step] | None, ends: list[int], end_penalty: float
) -> Mix:
    def mixed(step: int, states: Tensor, log_p_model: Tensor) -> Tensor:
        found = retriever.neighbours(retriever.project(states), combiner.k, combiner.wants_keys)
        neighbours = found.to(log_p_model.device)
        if isinstance(combiner, torch.nn.Module):
            combiner.to(log_p_model.device)
        shares = combiner.shares(log_p_model, neighbours)
        if steps is not None:
            steps[step] = _Step(neighbours, shares)
        log_p_mix = mix(log_p_model, neighbours, shares)  # [R, V]
        if end_penalty:
            log_p_mix[:, ends] -= end_penalty
        return log_p_mix

    return mixed


@dataclass(frozen=True)
class _Step:
    neighbours: Neighbours  # [R, K]
    shares: Shares  # [R], [R, K]


def _evidence(step: _Step | None, row: int, token: int, p_model: float) -> Evidence:
    if step is None:  # a forced token, or a source for which nothing was retrieved
        return Evidence(token, 0.0, p_model, p_model, [])
    near = step.neighbours.similarity if step.neighbours.distance is None else step.neighbours.distance
    assert near is not None
    voted = (step.neighbours.values[row] == token) & step.neighbours.found[row]  # [K]
    votes = [
        Vote(int(step.neighbours.ids[row, i]), float(step.shares.of_neighbour[row, i]), float(near[row, i]))
        for i in torch.nonzero(voted).flatten().tolist()
    ]
    trust = float(step.shares.of_model[row])
    return Evidence(token, 1 - trust, p_model, trust * p_model + sum(v.share for v in votes), votes)
