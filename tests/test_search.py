"""The beam search of clknn against transformers' generate, token for token, and the lanes it runs in."""

from __future__ import annotations

import gzip
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

import tiny
from clknn import model as models
from clknn.decoder import decode, search, why_reference
from clknn.model import Decoding, Model

Load = Callable[[str], Model]
ROOT = Path(__file__).parent.parent
SHARED = Path(__file__).parents[2] / "shared"
SOURCES = [p.source for p in tiny.pairs(24, seed=5)]
DECODINGS = (
    Decoding(max_new_tokens=14, longest_ratio=None),
    Decoding(max_new_tokens=1),
    Decoding(max_new_tokens=2),
    Decoding(max_new_tokens=40, longest_ratio=0.5),
    Decoding(max_new_tokens=50, length_penalty=0.2),
    Decoding(max_new_tokens=30, length_penalty=-1.0),
    Decoding(max_new_tokens=30, length_penalty=2.0),
)


def same(model: Model, sources: list[list[int]], decoding: Decoding, batches: tuple[int, ...]) -> None:
    expected = [g.tokens for g in model.generate(sources, decoding)]
    for batch in batches:
        assert [g.tokens for g in search(model, sources, decoding, batch=batch)] == expected


@pytest.mark.parametrize("family", tiny.FAMILIES)
@pytest.mark.parametrize("beam", [1, 2, 5])
@pytest.mark.parametrize("decoding", DECODINGS, ids=range(len(DECODINGS)))
def test_it_finds_what_generate_finds_however_sources_join_and_leave(
    load: Load, family: str, beam: int, decoding: Decoding
) -> None:
    model = load(family)
    assert why_reference(model, decoding) is None
    options = decoding.length_penalty, decoding.max_new_tokens, decoding.longest_ratio
    same(model, model.tokenise_sources(SOURCES), Decoding(beam, *options), (32, 7, 1))


def configured(folder: Path, checkpoint: Path, **options: object) -> Model:
    """A copy of the checkpoint whose generation configuration says more."""
    shutil.copytree(checkpoint, folder)
    file = folder / "generation_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | options))
    return models.load(str(folder), "de", "en")


@pytest.mark.parametrize("family", ["marian", "m2m100"])
@pytest.mark.parametrize(
    "options",
    [
        {"renormalize_logits": True},
        {"early_stopping": True},
        {"suppress_tokens": [7, 8, 9, 10, 11, 12], "bad_words_ids": [[20], [21]]},
        {"eos_token_id": [0, 2, 7]},
        {"repetition_penalty": 1.0, "no_repeat_ngram_size": 0, "num_beams": 3, "max_length": 5, "top_k": 7},
    ],
    ids=lambda o: "-".join(o),
)
def test_what_the_checkpoint_says_of_generating_holds(
    checkpoints: Callable[[str], Path], tmp_path: Path, family: str, options: dict[str, object]
) -> None:
    model = configured(tmp_path / "m", checkpoints(family), **options)
    for beam in (1, 4):
        decoding = Decoding(beam, max_new_tokens=20)
        assert why_reference(model, decoding) is None
        same(model, model.tokenise_sources(SOURCES), decoding, (5,))


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"no_repeat_ngram_size": 3}, "no_repeat_ngram_size to 3"),
        ({"bad_words_ids": [[7, 8]]}, "several tokens"),
        ({"early_stopping": "never"}, "'never'"),
        ({"forced_eos_token_id": [0, 2]}, "forces several ends"),
    ],
    ids=lambda o: "-".join(o) if isinstance(o, dict) else "",
)
def test_what_only_generate_knows_is_left_to_it_and_said(
    checkpoints: Callable[[str], Path], tmp_path: Path, options: dict[str, object], reason: str
) -> None:
    model = configured(tmp_path / "m", checkpoints("marian"), **options)
    decoding, sources = Decoding(3, max_new_tokens=12), model.tokenise_sources(SOURCES)
    why = why_reference(model, decoding)
    assert why is not None
    assert reason in why
    expected = [g.tokens for start in (0, 10, 20) for g in model.generate(sources[start : start + 10], decoding)]
    assert [h.tokens for h in decode(model, sources, decoding, batch=10)] == expected


def test_asking_for_generate_or_for_its_options_is_a_reason(load: Load) -> None:
    assert why_reference(load("marian"), Decoding(reference=True)) == "it was asked for"
    assert "no_repeat_ngram_size" in (why_reference(load("t5"), Decoding(further={"no_repeat_ngram_size": 2})) or "")


def test_no_sources_give_no_hypotheses(load: Load) -> None:
    assert decode(load("marian"), [], Decoding()) == []


def real(name: Path, lines: list[str]) -> tuple[Model, list[list[int]]]:
    model = models.load(str(name), "de", "en")
    return model, model.tokenise_sources(lines)


@pytest.mark.parametrize("beam", [1, 5])
def test_it_finds_what_generate_finds_for_real_sentences(beam: int) -> None:
    rows = (ROOT / "examples/libreoffice-test.de-en.tsv").read_text(encoding="utf8").splitlines()
    model, sources = real(ROOT / "examples/de-en-small", [row.split("\t")[0] for row in rows])
    some = sorted(sources, key=len)[10:210:2]
    same(model, some, Decoding(beam, max_new_tokens=40), (32,))


@pytest.mark.skipif(not SHARED.exists(), reason="the benchmark's data is not here")
@pytest.mark.parametrize("part", ["it/test", "general/newstest2019"])
def test_it_finds_what_generate_finds_for_the_benchmarks_sentences(part: str) -> None:
    with gzip.open(SHARED / "data" / f"{part}.de.gz", "rt", encoding="utf8") as file:
        lines = [line.rstrip("\n") for line, _ in zip(file, range(60), strict=False)]
    model, sources = real(SHARED / "model", lines)
    same(model, sorted(sources, key=len), Decoding(5, max_new_tokens=60), (16,))
