"""Numbers with signatures: BLEU and chrF by sacrebleu with paired significance, retrieval accuracy@k, speed.

In go hypotheses and references, or neighbours and the right values; out come frozen results that say how they were
measured. sacrebleu does the scoring and the paired bootstrap; nothing here re-implements it. The trade-off: 1,000
resamples bound p from below at 0.001, and cost about two seconds for 500 segments.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np
import numpy.typing as npt
from sacrebleu.metrics.bleu import BLEU
from sacrebleu.metrics.chrf import CHRF
from sacrebleu.significance import PairedTest, Result

from clknn.decoder import BATCH
from clknn.errors import InputError
from clknn.language import read_language
from clknn.translator import Translation, Translator

RESAMPLES = 1000


@dataclass(frozen=True)
class Score:
    """A system's corpus scores."""

    bleu: float
    chrf: float
    brevity_penalty: float
    p_bleu: float | None  # against the first system; None for the first itself
    p_chrf: float | None


@dataclass(frozen=True)
class Comparison:
    """Systems on the same segments, each compared with the first by paired bootstrap."""

    scores: dict[str, Score]
    bleu_signature: str
    chrf_signature: str
    segments: int


def compare(systems: Mapping[str, Sequence[str]], references: Sequence[str], language: str = "") -> Comparison:
    """Scores the systems' hypotheses in this language; p-values are of each against the first."""
    lengths = {len(references), *(len(h) for h in systems.values())}
    if len(lengths) != 1:
        raise InputError(f"hypotheses and references differ in number: {sorted(lengths)}; they must be aligned")
    if not references:
        raise InputError("no segments to score; give at least one pair")
    bleu, chrf = _bleu(language, [references]), CHRF(references=[references])
    plain = [(bleu.corpus_score(list(h), None), chrf.corpus_score(list(h), None)) for h in systems.values()]
    signatures = {"BLEU": bleu.get_signature(), "chrF2": chrf.get_signature()}
    p: dict[str, list[float | None]] = {name: [None] for name in signatures}
    if len(systems) > 1:
        named: list[tuple[str, Sequence[str]]] = [(name, list(h)) for name, h in systems.items()]
        metrics = {"BLEU": bleu, "chrF2": chrf}
        signatures, tested = PairedTest(named, metrics, None, test_type="bs", n_samples=RESAMPLES)()
        p = {name: [_p_value(cast(Result, r), cast(Result, tested[name][0])) for r in tested[name]] for name in metrics}
    scores = {
        system: Score(b.score, c.score, b.bp, p_bleu, p_chrf)
        for system, (b, c), p_bleu, p_chrf in zip(systems, plain, p["BLEU"], p["chrF2"], strict=True)
    }
    return Comparison(scores, str(signatures["BLEU"]), str(signatures["chrF2"]), len(references))


def refuse_unscorable(language: str) -> None:
    """Refuses a language whose BLEU needs a package that is not there: to be asked before the work, not behind it."""
    _bleu(language)


def _bleu(language: str, references: Sequence[Sequence[str]] | None = None) -> BLEU:
    """BLEU with the words that sacrebleu finds in this language: spaces show 13a none in Chinese or Japanese."""
    tag = read_language(language)
    name = "zh" if tag.written in ("Hans", "Hant") else tag.name
    try:
        return BLEU(trg_lang=name, references=references)
    except RuntimeError as error:
        raise InputError(
            f"BLEU of the language {language!r} needs MeCab to find its words; pip install 'sacrebleu[{name}]'"
        ) from error


def _p_value(result: Result, first: Result) -> float | None:
    """sacrebleu's, but 1 where the scores are equal: of a system against itself it says 1 / 1001, significant."""
    return 1.0 if result.p_value is not None and result.score == first.score else result.p_value


def timed(translator: Translator, sources: Sequence[str], batch: int = BATCH) -> tuple[list[Translation], float]:
    """Translations and the seconds they took."""
    started = time.perf_counter()
    translations = translator.translate(sources, batch=batch)
    return translations, time.perf_counter() - started


def retrieval_accuracy(
    values: npt.NDArray[np.int64], found: npt.NDArray[np.bool_], truth: npt.NDArray[np.int64], ks: Sequence[int]
) -> dict[int, float]:
    """For each k, the share of the k nearest neighbours [R, K] whose value is the right token [R]."""
    right = (values == truth[:, None]) & found
    return {k: float(right[:, :k].mean()) for k in ks if k <= values.shape[1]}
