"""Decoding with a mix at each step: tokenised sources in, hypotheses with their evidence out.

At each step states become queries, their neighbours become p_knn, and p_mix takes the place of p_model. `search` is
the beam search, token for token that of transformers' `generate`, which does what it cannot (`why_reference`). The
neighbours seen in each cell, a step's row, are kept while decoding where evidence is wanted, and those of the winning
hypothesis are found again through its cells; what p_model gave its tokens is asked of the model once more: a
teacher-forced pass, where keeping it would take R x V numbers a step. The trade-off: sources join and leave while
others are in decoding, so that one long sentence does not hold up a batch, but evidence is had a batch at a time.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from clknn.datastore import Retriever
from clknn.mixing import Combiner, Neighbours, Shares, mix
from clknn.model import Cell, Decoding, Generated, Mix, Model, Tokens
from clknn.states import batches, tokens_with_log_p
from clknn.step import Rules, Steps

BATCH = 32
HANDS = 256  # that the vocabulary is dealt into
HOPELESS = -1e9  # a score below all others, as in transformers
JOIN = 4  # sources join when one in so many lanes is free

Continuation = tuple[float, int, int]  # score, the hypothesis that it continues, token


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
    batch: int = BATCH,
    end_penalty: float = 0.0,
) -> list[Hypothesis]:
    """The best hypothesis of each source, `batch` of them at a time; without a retriever and a combiner, the base
    model's. `end_penalty` nats are taken off log p_mix of the tokens that end a sentence,
    wherever neighbours have a share of it.
    """
    hypotheses: list[Hypothesis] = []
    own = why_reference(model, decoding) is None
    # The neighbours of all steps are kept until their hypotheses are known.
    together = max(1, len(sources)) if own and not evidence else batch
    for start in range(0, len(sources), together):
        some, steps = list(sources[start : start + together]), dict[int, _Step]()
        mixed = None
        if retriever is not None and combiner is not None:
            mixed = _mixer(retriever, combiner, steps if evidence else None, model.ends, end_penalty)
        generated = search(model, some, decoding, mixed, batch) if own else model.generate(some, decoding, mixed)
        if not evidence:
            hypotheses += [Hypothesis(g.tokens, None) for g in generated]
            continue
        for g, ps in zip(generated, _p_model(model, some, generated), strict=True):
            found = [None if cell is None or cell[0] not in steps else (steps[cell[0]], cell[1]) for cell in g.cells]
            shown = [_evidence(cell, t, p) for cell, t, p in zip(found, g.tokens, ps, strict=True)]
            hypotheses.append(Hypothesis(g.tokens, shown))
    return hypotheses


def why_reference(model: Model, decoding: Decoding) -> str | None:
    """Why hypotheses come from the model's own `generate`; None where the beam search here makes them."""
    if decoding.reference:
        return "it was asked for"
    if decoding.further:
        return f"{', '.join(sorted(decoding.further))}: only generate knows them"
    return model.steps if isinstance(model.steps, str) else None


@torch.inference_mode()
def search(
    model: Model, sources: Sequence[Tokens], decoding: Decoding, mix: Mix | None = None, batch: int = BATCH
) -> list[Generated]:
    """The best hypothesis of each source, as transformers' beam search (a beam of 1: its greedy search) defines it.

    At most `batch` sources are in decoding at a time, the shortest first; those that are done make room for others.
    Attention is computed for the longest of them: longest first, one outlier took half as long again (IT test set).
    """
    assert isinstance(model.steps, Steps)
    rules, lanes, beam = model.steps.rules, model.steps.lanes(decoding.beam), decoding.beam
    most, limits = decoding.limits(sources, model.longest - 1 - len(rules.forced))
    waiting = sorted(range(len(sources)), key=lambda i: len(sources[i]))
    found: dict[int, Generated] = {}
    live: list[_Sentence] = []
    tick = 0
    while live or waiting:
        if waiting and batch - len(live) >= max(1, min(len(waiting), batch // JOIN)):
            joining, waiting = waiting[: batch - len(live)], waiting[batch - len(live) :]
            lanes.join([sources[i] for i in joining])
            live += [_Sentence(i, limits[i], beam, rules.start) for i in joining]
        tokens, parents = torch.tensor([s.tokens[-1] for s in live]), torch.tensor([s.parents[-1] for s in live])
        states = lanes.advance(tokens, parents)  # [R, D]
        due = [_due(rules, s.step, most) for s in live]
        free = [lane for lane, token in enumerate(due) if token is None]
        if free:
            if len(free) < len(live):
                states = states.view(len(live), beam, -1)[free].flatten(0, 1)  # [R, D] of those alone
            log_p = torch.log_softmax(lanes.logits(states), -1)  # [R, V]
            if mix is not None:
                log_p = mix(tick, states.float(), log_p)
            if rules.banned:
                log_p[:, rules.banned] = -math.inf
            if rules.renormalised:
                log_p = torch.log_softmax(log_p, -1)
            scores = torch.tensor([live[lane].scores for lane in free], device=log_p.device)  # [L, W]
            best = _best(log_p, scores, (1 + len(rules.ends)) * beam)
            for place, (lane, continuations) in enumerate(zip(free, best, strict=True)):
                live[lane].take(continuations, (tick, place * beam), rules, decoding)
        for sentence, token in zip(live, due, strict=True):
            if token is not None:
                sentence.take([(score, w, token) for w, score in enumerate(sentence.scores)], None, rules, decoding)
        for lane in reversed(range(len(live))):
            if live[lane].done:
                found[live[lane].number] = live[lane].generated(len(rules.forced))
                lanes.leave(lane)
                live[lane] = live[-1]
                live.pop()
        tick += 1
    return [found[i] for i in range(len(sources))]


def _due(rules: Rules, step: int, most: int) -> int | None:
    """The token that must come now, if one must."""
    if step < len(rules.forced):
        return rules.forced[step]
    return rules.forced_end if step == most - 1 else None


def _best(log_p: Tensor, scores: Tensor, n: int) -> list[list[Continuation]]:
    """The n best continuations of each lane, best first: score, hypothesis and token.

    The vocabulary is dealt into C hands, of which only the n with the highest tokens can hold any of the n best: one
    pass for the hands' maxima, where topk over [L, W * V] took six times as long.
    """
    (lanes, beam), vocabulary = scores.shape, log_p.shape[1]
    hands = min(HANDS, vocabulary)
    rounds = vocabulary // hands
    rest = vocabulary - rounds * hands
    highest = log_p[:, : rounds * hands].reshape(-1, rounds, hands).amax(1)  # [R, C]
    if rest:
        highest[:, :rest] = torch.maximum(highest[:, :rest], log_p[:, rounds * hands :])
    scored = highest.view(lanes, beam, hands) + scores[:, :, None]  # [L, W, C]
    chosen = scored.flatten(1).topk(min(n, beam * hands)).indices  # [L, n]
    parent, hand = chosen // hands, chosen % hands
    token = hand[:, :, None] + torch.arange(rounds + 1, device=hand.device) * hands  # [L, n, V/C]
    row = torch.arange(lanes, device=hand.device)[:, None] * beam + parent  # [L, n]
    held = log_p[row[:, :, None], token.clamp(max=vocabulary - 1)] + scores.gather(1, parent)[:, :, None]
    best = held.masked_fill(token >= vocabulary, -math.inf).flatten(1).topk(n)  # [L, n]
    parents = parent.gather(1, best.indices // (rounds + 1)).tolist()
    tokens = token.flatten(1).gather(1, best.indices).tolist()
    columns = zip(best.values.tolist(), parents, tokens, strict=True)
    return [list(zip(*lane, strict=True)) for lane in columns]


class _Sentence:
    """A source in decoding: what its W hypotheses are made of, step by step, and how good the best that ended are."""

    def __init__(self, number: int, limit: int, beam: int, start: int) -> None:
        self.number, self.limit, self.beam = number, limit, beam
        # Of each step, W tokens and the hypotheses of the step before that they continue.
        self.tokens, self.parents = [[start] * beam], [list(range(beam))]
        self.cells: list[Cell | None] = []  # of each step, its tick and the first of its rows
        # All are the same at first, and so only one of them may be continued.
        self.scores = [0.0] + [HOPELESS] * (beam - 1)
        self.ended: list[float] = []  # the best scores of hypotheses that ended, at most W
        self.winner: tuple[int, int, int] | None = None  # of those the best: its step, parent and token
        self.done = False

    @property
    def step(self) -> int:
        return len(self.cells)

    def take(
        self,
        continuations: list[tuple[float, int, int]],
        cell: Cell | None,
        rules: Rules,
        decoding: Decoding,
    ) -> None:
        """Goes on with the W best continuations that do not end; those among the W best that end are finished."""
        step, length = self.step, self.step + 1
        divisor = length**decoding.length_penalty
        running: list[Continuation] = []
        for i, (score, parent, token) in enumerate(continuations):
            if token not in rules.ends and length < self.limit:
                running.append((score, parent, token))
            elif i < self.beam:
                if not self.ended or score / divisor > self.ended[0]:
                    self.winner = step, parent, token
                self.ended = sorted([*self.ended, score / divisor], reverse=True)[: self.beam]
        running = running[: self.beam]
        self.cells.append(cell)
        self.tokens.append([token for _, _, token in running])
        self.parents.append([parent for _, parent, _ in running])
        # Scores of one hypothesis alone are never compared, and sums would round what decides between tokens.
        self.scores = [score if self.beam > 1 else 0.0 for score, _, _ in running]
        full = len(self.ended) == self.beam
        worst = self.ended[-1] if full else HOPELESS
        hopeless = not running or not running[0][0] / divisor > worst
        self.done = hopeless or (full and rules.early_stopping)

    def generated(self, prompt: int) -> Generated:
        """The winner, without the prompt that was forced."""
        tokens, cells = list[int](), list[Cell | None]()
        step, parent, token = self.winner or (-1, 0, 0)
        while step >= prompt:
            tokens.append(token)
            cells.append(self._cell(step, parent))
            token, parent, step = self.tokens[step][parent], self.parents[step][parent], step - 1
        return Generated(tokens[::-1], cells[::-1])

    def _cell(self, step: int, parent: int) -> Cell | None:
        cell = self.cells[step]
        return None if cell is None else (cell[0], cell[1] + parent)


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
        if end_penalty:  # not where the model is on its own
            log_p_mix[:, ends] -= end_penalty * (shares.of_model < 1).float()[:, None]
        return log_p_mix

    return mixed


@dataclass(frozen=True)
class _Step:
    neighbours: Neighbours  # [R, K]
    shares: Shares  # [R], [R, K]


def _evidence(cell: tuple[_Step, int] | None, token: int, p_model: float) -> Evidence:
    if cell is None:  # a forced token, or a source for which nothing was retrieved
        return Evidence(token, 0.0, p_model, p_model, [])
    step, row = cell
    near = step.neighbours.similarity if step.neighbours.distance is None else step.neighbours.distance
    assert near is not None
    voted = (step.neighbours.values[row] == token) & step.neighbours.found[row]  # [K]
    votes = [
        Vote(int(step.neighbours.ids[row, i]), float(step.shares.of_neighbour[row, i]), float(near[row, i]))
        for i in torch.nonzero(voted).flatten().tolist()
    ]
    trust = float(step.shares.of_model[row])
    return Evidence(token, 1 - trust, p_model, trust * p_model + sum(v.share for v in votes), votes)
