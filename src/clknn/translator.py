"""Text in, `Translation` out: what the command line, evaluation and services all call.

It opens a datastore together with the model that built it, tokenises, batches sentences of like length, decodes, and
turns the evidence of tokens into evidence of words: the stored pairs that voted for each, with how much. The
trade-off: a batch is padded to its longest sentence, so texts are sorted by length and none is ready before all are.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from clknn import model as models
from clknn.corpus import Pair
from clknn.datastore import Datastore, check_model, open_datastore, read_manifest
from clknn.decoder import BATCH, Evidence, Hypothesis, decode, why_reference
from clknn.errors import InputError
from clknn.mixing import Combiner, Mixing
from clknn.model import Decoding, Model


class TooLongError(InputError):
    """One of the texts, `place`, has more tokens than the model holds."""

    def __init__(self, place: int, reason: str) -> None:
        super().__init__(f"text {place + 1}: {reason}")
        self.place, self.reason = place, reason


@dataclass(frozen=True)
class Support:
    """A stored pair that voted for a word: the place in its target, and the share of the word that it decided."""

    pair: Pair
    pair_id: int
    position: int
    share: float
    nearness: float


@dataclass(frozen=True)
class Word:
    """A produced word, the share of it that retrieval decided, and the stored pairs behind that share."""

    text: str
    retrieved: float
    p_model: float
    support: list[Support]


@dataclass(frozen=True)
class Translation:
    source: str
    text: str
    words: list[Word] | None = None  # None where evidence was not asked for
    familiar: bool = True  # False: it reads like other text than the memory's, and is the base model's


@dataclass(frozen=True)
class Translator:
    """A model, and a datastore to mix in; without one it is the base model."""

    model: Model
    datastore: Datastore | None = None
    combiner: Combiner | None = None
    decoding: Decoding = field(default_factory=Decoding)
    end_penalty: float = 0.0  # nats that end-of-sentence loses wherever something is retrieved
    guarded: bool = True  # whether sources that do not read like the memory go to the base model

    @classmethod
    def open(
        cls,
        path: str | Path,
        model: Model | None = None,
        device: str = "cpu",
        dtype: str = "float32",
        decoding: Decoding = Decoding(),  # noqa: B008 (frozen)
    ) -> Translator:
        """Opens a datastore with the model named in its manifest, or with `model` if that is the same one."""
        manifest = read_manifest(Path(path))
        model = model or models.load(
            manifest.model,
            manifest.source_language,
            manifest.target_language,
            device=device,
            dtype=dtype,
            prefix=manifest.prefix,
        )
        check_model(Path(path), manifest, model)
        store = open_datastore(Path(path), model)
        return cls(model, store, store.combiner, decoding, manifest.end_penalty)

    @property
    def base(self) -> Translator:
        """The same without the datastore."""
        return Translator(self.model, decoding=self.decoding)

    @property
    def why_reference(self) -> str | None:
        """Why the model's own `generate` decodes, which is slower; None where the beam search of clknn does."""
        return why_reference(self.model, self.decoding)

    def with_mixing(
        self, k: int | None = None, temperature: float | None = None, weight: float | None = None
    ) -> Translator:
        """Other settings for this use; None keeps what tuning chose. Weight 0 is the base model."""
        if k is None and temperature is None and weight is None:
            return self
        if self.datastore is None:
            raise InputError("k, temperature and weight belong to a datastore, and none is open")
        if not isinstance(self.combiner, Mixing):
            if weight == 0 and k is None and temperature is None:
                return self.base
            raise InputError(
                f"{self.datastore.path}: its combiner learned what to believe, and has no k, temperature or weight to "
                "set; run `clknn tune --combiner scaled` for one that has (weight 0, the base model, can always be set)"
            )
        mixing = Mixing(
            self.combiner.k if k is None else k,
            self.combiner.temperature if temperature is None else temperature,
            self.combiner.weight if weight is None else weight,
            self.combiner.scaled,
        )
        if mixing.k > self.datastore.entries:
            raise InputError(
                f"k is {mixing.k} and {self.datastore.path} has {self.datastore.entries} entries; ask for fewer"
            )
        return replace(self, combiner=mixing)

    def translate(self, texts: Sequence[str], evidence: bool = False, batch: int = BATCH) -> list[Translation]:
        """Translates each text, in order; an empty one stays empty."""
        sources, longest = self.model.tokenise_sources(list(texts)), self.model.longest
        for i, (text, tokens) in enumerate(zip(texts, sources, strict=True)):
            if len(tokens) > longest:
                begins = repr(text[:40]) + ("…" if len(text) > 40 else "")
                raise TooLongError(
                    i, f"{begins} has {len(tokens):,} tokens and the model holds {longest:,}; split it into sentences"
                )
        order = sorted((i for i, text in enumerate(texts) if text.strip()), key=lambda i: len(sources[i]))
        done = {i: Translation(text, "", [] if evidence else None) for i, text in enumerate(texts)}
        # Weight 0 is the base model: nothing is searched, unless evidence wants to show what would have been found.
        idle = isinstance(self.combiner, Mixing) and self.combiner.weight == 0 and not evidence
        combiner = None if idle else self.combiner
        familiar = [True] * len(texts)
        if self.guarded and self.datastore is not None and combiner is not None:
            familiar = self.datastore.familiar(sources)
        for own in (True, False):
            mine = [i for i in order if familiar[i] is own]
            hypotheses = decode(
                self.model, [sources[i] for i in mine], self.decoding,
                self.datastore, combiner if own else None, evidence, batch, self.end_penalty,
            )  # fmt: skip
            for i, hypothesis in zip(mine, hypotheses, strict=True):
                done[i] = self._translation(texts[i], hypothesis, own)
        return [done[i] for i in range(len(texts))]

    def _translation(self, source: str, hypothesis: Hypothesis, familiar: bool) -> Translation:
        text = self.model.detokenise(hypothesis.tokens)
        if hypothesis.evidence is None:
            return Translation(source, text, familiar=familiar)
        pieces = self.model.pieces(hypothesis.tokens)
        words = [self._word(spelt, tokens) for spelt, tokens in _words(pieces, hypothesis.evidence)]
        return Translation(source, text, words, familiar)

    def _word(self, text: str, tokens: list[Evidence]) -> Word:
        """A word's shares are the means over its tokens."""
        n = len(tokens)
        entries = [vote.entry for evidence in tokens for vote in evidence.votes]
        if not entries:
            return Word(text, 0.0, sum(e.p_model for e in tokens) / n, [])
        assert self.datastore is not None
        shares: dict[int, Support] = {}
        pairs = self.datastore.pairs.get(sorted({int(self.datastore.pair_ids[e]) for e in entries}))
        for evidence in tokens:
            for vote in evidence.votes:
                pair_id = int(self.datastore.pair_ids[vote.entry])
                seen = shares.get(pair_id)
                share = vote.share / (evidence.p_mix or 1.0) / len(tokens) + (seen.share if seen else 0.0)
                position = seen.position if seen else int(self.datastore.positions[vote.entry])
                nearness = seen.nearness if seen else vote.nearness
                shares[pair_id] = Support(pairs[pair_id], pair_id, position, share, nearness)
        # What retrieval decided of a token: its neighbours' part of the probability the token was chosen by.
        decided = [1 - (1 - e.weight) * e.p_model / e.p_mix if e.p_mix else 0.0 for e in tokens]
        support = sorted(shares.values(), key=lambda s: -s.share)
        return Word(text, sum(decided) / n, sum(e.p_model for e in tokens) / n, support)


# Letters with which a piece can begin where no spaces stand between words: Han, kana; the consonants and leading vowels
# of Thai, Lao, Burmese and Khmer, whose other vowels belong to what stands before them.
_UNSPACED = re.compile(
    "[\u3007\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"
    "\u3041-\u3096\u30a1-\u30fa\u31f0-\u31ff\uff66-\uff6f\uff71-\uff9d"
    "\u0e01-\u0e2e\u0e40-\u0e44\u0e81-\u0eae\u0ec0-\u0ec4\u1000-\u102a\u1780-\u17b3]"
)


def _words(pieces: list[str], evidence: list[Evidence]) -> Iterator[tuple[str, list[Evidence]]]:
    """Pieces joined into words; a piece that begins with a space opens one, and so does end-of-sentence.

    In scripts without spaces each piece is a word of its own, or a sentence's evidence would be that of one word.
    """
    spelt, tokens = "", list[Evidence]()
    for piece, one in zip(pieces, evidence, strict=True):
        if tokens and (piece.startswith(" ") or piece == "</s>" or (spelt.strip() and _unspaced(spelt, piece))):
            yield spelt.strip(), tokens
            spelt, tokens = "", []
        spelt, tokens = spelt + piece, [*tokens, one]
    if tokens:
        yield spelt.strip(), tokens


def _unspaced(before: str, piece: str) -> bool:
    """Whether two words meet here although no space stands between them: such letters, or Latin ones behind them."""
    cased_or_digit = unicodedata.category(piece[0]) in ("Lu", "Ll", "Lt", "Nd") if piece else False
    return bool(_UNSPACED.match(piece) or (cased_or_digit and _UNSPACED.match(before[-1])))
