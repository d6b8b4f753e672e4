"""Whether a source reads like the translation memory or like other text; what does not is translated without it.

In go tokenised sources; out comes, for each, the log-odds that it is of the memory's kind, positive where it is. A
datastore has an answer for every query, also for a sentence that its memory has nothing to say of, and such answers
halve the quality of general text. Three numbers of a source tell its kind: how much likelier its tokens are in the
memory than in general text, how many of its trigrams stand in the memory, and its length; how much each counts is
fitted to held-out sources of the memory against general ones. The trade-off: general text has to be given, and a source
that is wrongly taken for unfamiliar is translated by the base model (docs/log.md has how many these are).
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from clknn.errors import InputError

Tokens = list[int]
Ids = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

FEWEST = 20  # sources of either kind that it takes to tell them apart
MIXED = 0.5  # share of the memory's own frequencies in what they are compared with, so that no ratio is without bound
RIDGE = 0.01  # of the squared weights, per source


@dataclass(frozen=True)
class Familiarity:
    """Trigrams and sources come with the pair that they are of, so that what is removed leaves nothing behind."""

    ratios: Tensor  # [V] float64: log of how much likelier a token is in the memory; the last is any other token's
    trigrams: Ids  # [M] ascending, one for each place in a stored source
    pairs: Ids  # [M] the pair of each
    sources: Ids  # [P] ascending, a digest of each stored source
    numbers: Ids  # [P] the pair of each
    weights: Tensor  # [4] float64: what ratio, share of trigrams and length count for, and a constant

    def log_odds(self, sources: Sequence[Tokens]) -> Tensor:
        """[B]: positive where a source is of the memory's kind."""
        features = _features(sources, self.ratios.numpy(), self.trigrams)  # [B, 3]
        return torch.from_numpy(features) @ self.weights[:3] + self.weights[3]

    def of(self, sources: Sequence[Tokens]) -> list[bool]:
        """Which are familiar. One that is stored is, whatever it reads like: somebody wants it translated so."""
        stored = np.isin(_digests(sources), self.sources)
        return [bool(odds > 0 or known) for odds, known in zip(self.log_odds(sources), stored, strict=True)]

    def with_pairs(self, numbered: Sequence[tuple[int, Tokens]]) -> Familiarity:
        """Also these stored pairs' sources are known."""
        more = _known(numbered, len(self.ratios))
        mine = self.trigrams, self.pairs, self.sources, self.numbers
        return _in_order(self, *(np.concatenate(both) for both in zip(mine, more, strict=True)))

    def without_pairs(self, ids: Ids) -> Familiarity:
        kept, left = ~np.isin(self.pairs, ids), ~np.isin(self.numbers, ids)
        trigrams, pairs = self.trigrams[kept], self.pairs[kept]
        return replace(self, trigrams=trigrams, pairs=pairs, sources=self.sources[left], numbers=self.numbers[left])

    def tensors(self) -> dict[str, Tensor]:
        arrays = {name: torch.from_numpy(getattr(self, name)) for name in _ARRAYS}
        return {"ratios": self.ratios, "weights": self.weights, **arrays}

    @classmethod
    def from_tensors(cls, tensors: dict[str, Tensor]) -> Familiarity:
        """What `tensors()` gave; KeyError where something else did."""
        arrays = {name: tensors[name].numpy() for name in _ARRAYS}
        return cls(ratios=tensors["ratios"], weights=tensors["weights"], **arrays)


_ARRAYS = "trigrams", "pairs", "sources", "numbers"


def fit(stored: Sequence[tuple[int, Tokens]], held_out: Sequence[Tokens], general: Sequence[Tokens]) -> Familiarity:
    """Learns to tell sources like the `stored` pairs' from general ones; `held_out` are of the memory and not stored.

    Each half of the general sources is judged by the frequencies of the other: a source looks more like text that it is
    part of.
    """
    for name, kind in (("held-out", held_out), ("general", general)):
        if len(kind) < FEWEST:
            raise InputError(f"{len(kind)} {name} pairs are too few to tell general text by; give at least {FEWEST}")
    seen = max(max(source) for source in (*(source for _, source in stored), *held_out, *general))
    vocabulary = seen + 2  # of sources, which is not that of targets; the last stands for tokens never seen
    assert (vocabulary + 1) ** 3 < 2**63, "trigrams are numbered in 63 bits"
    memory = _frequencies([source for _, source in stored], vocabulary, pseudo=0.5)  # [V]
    arrays = _known(stored, vocabulary)
    known = np.sort(arrays[0])
    halves = general[::2], general[1::2]
    ratios = [_ratios(memory, half, vocabulary) for half in reversed(halves)]  # [V] twice
    features = [_features(held_out, _ratios(memory, general, vocabulary), known)]  # [H, 3]
    features += [_features(half, ratio, known) for half, ratio in zip(halves, ratios, strict=True)]
    x = np.concatenate(features)  # [H + G, 3]
    y = np.repeat([1.0, 0.0], [len(held_out), len(general)])  # [H + G]
    blank = Familiarity(torch.from_numpy(_ratios(memory, general, vocabulary)), *arrays, _separated(x, y))
    return _in_order(blank, *arrays)


def _separated(x: Floats, y: Floats) -> Tensor:
    """[4]: logistic regression on features [n, 3] by Newton's method, both kinds weighing the same."""
    centre, spread = x.mean(0), x.std(0) + 1e-9  # [3] twice
    z = torch.from_numpy(np.column_stack([(x - centre) / spread, np.ones(len(x))]))  # [n, 4]
    kind = torch.from_numpy(y)
    share = torch.where(kind > 0, 0.5 / kind.mean(), 0.5 / (1 - kind.mean()))  # [n]
    ridge = RIDGE * len(x) * torch.diag(torch.tensor([1.0, 1.0, 1.0, 0.0], dtype=torch.float64))  # [4, 4]
    weights = torch.zeros(4, dtype=torch.float64)
    for _ in range(30):
        p = torch.sigmoid(z @ weights)  # [n]
        gradient = z.T @ (share * (p - kind)) + ridge @ weights  # [4]
        curvature = (z * (share * p * (1 - p))[:, None]).T @ z + ridge  # [4, 4]
        weights = weights - torch.linalg.solve(curvature + 1e-9 * torch.eye(4, dtype=torch.float64), gradient)
    scaled = weights[:3] / torch.from_numpy(spread)
    return torch.cat([scaled, weights[3:] - (scaled * torch.from_numpy(centre)).sum()])


def _features(sources: Sequence[Tokens], ratios: Floats, trigrams: Ids) -> Floats:
    """[B, 3]: the mean ratio of a source's tokens, the share of its trigrams that are known, the log of its length."""
    found = np.zeros((len(sources), 3))
    for i, source in enumerate(sources):
        if not source:
            continue
        seen = np.minimum(source, len(ratios) - 1)  # [S]
        mine = _trigrams(seen, len(ratios))
        at = np.searchsorted(trigrams, mine).clip(max=max(0, len(trigrams) - 1))
        known = trigrams[at] == mine if len(trigrams) else np.zeros(len(mine), np.bool_)
        found[i] = ratios[seen].mean(), known.mean(), np.log(len(source))
    return found


def _ratios(memory: Floats, general: Sequence[Tokens], vocabulary: int) -> Floats:
    ratios = np.log(memory) - np.log(MIXED * memory + (1 - MIXED) * _frequencies(general, vocabulary, pseudo=0.0))
    ratios[-1] = 0.0
    return ratios


def _frequencies(sources: Sequence[Tokens], vocabulary: int, pseudo: float) -> Floats:
    tokens = np.concatenate([np.asarray(source, np.int64) for source in sources])
    counts: Floats = np.bincount(tokens, minlength=vocabulary).astype(np.float64) + pseudo
    shares: Floats = counts / np.float64(counts.sum())
    return shares


def _trigrams(source: Tokens | Ids, vocabulary: int) -> Ids:
    """A number for each place in the source: its token and the two before it, of which the first has none."""
    padded = np.array([vocabulary, vocabulary, *source], np.int64)
    return (padded[:-2] * (vocabulary + 1) + padded[1:-1]) * (vocabulary + 1) + padded[2:]


def _digests(sources: Sequence[Tokens]) -> Ids:
    """[B]: eight bytes that no other source is likely to have."""
    each = [hashlib.blake2b(np.asarray(source, np.int64).tobytes(), digest_size=8).digest() for source in sources]
    return np.frombuffer(b"".join(each), np.int64)


def _known(numbered: Sequence[tuple[int, Tokens]], vocabulary: int) -> tuple[Ids, Ids, Ids, Ids]:
    """Trigrams and the pair of each; digests of sources and the pair of each."""
    sources = [source for _, source in numbered]
    trigrams = [_trigrams(np.minimum(source, vocabulary - 1), vocabulary) for source in sources]
    pairs = np.array([number for number, _ in numbered], np.int64)
    of_trigram = np.repeat(pairs, [len(source) for source in sources])
    return np.concatenate([np.empty(0, np.int64), *trigrams]), of_trigram, _digests(sources), pairs


def _in_order(familiarity: Familiarity, trigrams: Ids, pairs: Ids, sources: Ids, numbers: Ids) -> Familiarity:
    first, second = np.lexsort((pairs, trigrams)), np.lexsort((numbers, sources))
    return replace(
        familiarity, trigrams=trigrams[first], pairs=pairs[first], sources=sources[second], numbers=numbers[second]
    )
