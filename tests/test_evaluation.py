"""Scores against sacrebleu's own command line, and accuracies counted by hand."""

from __future__ import annotations

import json
import math
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tiny
from clknn.errors import InputError
from clknn.evaluation import Comparison, compare, retrieval_accuracy


def segments(n: int = 60, seed: int = 0) -> list[str]:
    rng = random.Random(seed)
    return [" ".join(rng.choices(tiny.TARGET_WORDS, k=rng.randint(5, 14))) for _ in range(n)]


def spoilt(references: list[str], share: float, seed: int, drop: float = 0.0) -> list[str]:
    """A system that gets this share of the words wrong and leaves out another."""
    rng = random.Random(seed)

    def word(right: str) -> str:
        return rng.choice(tiny.TARGET_WORDS) if rng.random() < share else right

    return [" ".join(word(w) for w in text.split() if rng.random() >= drop) or "house" for text in references]


@pytest.fixture(scope="module")
def references() -> list[str]:
    return segments()


@pytest.fixture(scope="module")
def systems(references: list[str]) -> dict[str, list[str]]:
    return {
        "base": spoilt(references, 0.35, seed=1),
        "a little better": spoilt(references, 0.32, seed=2),
        "far better": spoilt(references, 0.1, seed=3, drop=0.05),
    }


@pytest.fixture(scope="module")
def ours(systems: dict[str, list[str]], references: list[str]) -> Comparison:
    return compare(systems, references)


def sacrebleu(folder: Path, references: list[str], systems: list[list[str]], *flags: str) -> Any:
    """What `python -m sacrebleu` says in JSON."""
    names = ["references", *(f"system{i}" for i in range(len(systems)))]
    for name, lines in zip(names, [references, *systems], strict=True):
        (folder / name).write_text("".join(f"{line}\n" for line in lines), encoding="utf8")
    command = [sys.executable, "-m", "sacrebleu", "references", "-i", *names[1:], "-m", "bleu", "chrf", *flags]
    done = subprocess.run(
        [*command, "--format", "json", "--width", "10"], cwd=folder, capture_output=True, text=True, check=True
    )
    return json.loads(done.stdout)


def test_the_comparison_equals_sacrebleus_command_line(
    ours: Comparison, systems: dict[str, list[str]], references: list[str], tmp_path: Path
) -> None:
    said = sacrebleu(tmp_path, references, list(systems.values()), "--paired-bs", "--paired-bs-n", "1000")
    assert list(ours.scores) == list(systems)
    assert ours.segments == 60
    for mine, theirs in zip(ours.scores.values(), said, strict=True):
        assert mine.bleu == pytest.approx(theirs["BLEU"]["score"], abs=1e-9)
        assert mine.chrf == pytest.approx(theirs["chrF2"]["score"], abs=1e-9)
        assert mine.p_bleu == pytest.approx(theirs["BLEU"]["p_value"], abs=1e-9)
        assert mine.p_chrf == pytest.approx(theirs["chrF2"]["p_value"], abs=1e-9)
        assert ours.bleu_signature == theirs["BLEU"]["signature"]
        assert ours.chrf_signature == theirs["chrF2"]["signature"]


def test_the_first_system_is_what_the_others_are_compared_with(ours: Comparison) -> None:
    base, close, far = ours.scores.values()
    assert base.p_bleu is None
    assert base.p_chrf is None
    assert close.p_bleu is not None
    assert far.p_bleu is not None
    assert close.p_bleu > 0.05 > far.p_bleu
    assert far.bleu > base.bleu
    assert "bs:1000" in ours.bleu_signature
    assert "bs:1000" in ours.chrf_signature


def test_one_system_alone_equals_sacrebleus_command_line(references: list[str], tmp_path: Path) -> None:
    system = spoilt(references, 0.2, seed=4)
    alone = compare({"alone": system}, references)
    bleu, chrf = sacrebleu(tmp_path, references, [system])
    score = alone.scores["alone"]
    assert score.bleu == pytest.approx(bleu["score"], abs=0.051)  # the command rounds
    assert score.chrf == pytest.approx(chrf["score"], abs=0.051)
    assert (score.p_bleu, score.p_chrf) == (None, None)
    assert alone.bleu_signature.split("|") == bleu["signature"].split("|")
    assert alone.chrf_signature.split("|") == chrf["signature"].split("|")


def test_the_brevity_penalty_is_exp_of_one_minus_the_ratio() -> None:
    references = ["a b c d e f g h i j"] * 3
    scores = compare({"whole": references, "short": ["a b c d e f g h"] * 3, "long": ["a b c d e f g h i j k"] * 3},
                     references).scores  # fmt: skip
    assert scores["whole"].brevity_penalty == 1
    assert scores["whole"].bleu == pytest.approx(100)
    assert scores["long"].brevity_penalty == 1
    assert scores["short"].brevity_penalty == pytest.approx(math.exp(1 - 10 / 8))
    assert scores["short"].bleu == pytest.approx(100 * math.exp(1 - 10 / 8))  # all its n-grams are right


def test_a_system_against_itself_is_no_gain(references: list[str]) -> None:
    system = spoilt(references, 0.3, seed=5)
    _, same = compare({"one": system, "same": list(system)}, references).scores.values()
    assert same.p_bleu == 1
    assert same.p_chrf == 1


def test_what_is_not_aligned_is_refused(references: list[str]) -> None:
    with pytest.raises(InputError, match=r"differ in number: \[59, 60\]"):
        compare({"base": references[:-1]}, references)
    with pytest.raises(InputError, match=r"differ in number: \[59, 60\]"):
        compare({"base": references, "ours": references[:-1]}, references)
    with pytest.raises(InputError, match=r"no segments to score"):
        compare({"base": []}, [])


def test_retrieval_accuracy_by_hand() -> None:
    values = np.array([[5, 5, 1, 5], [2, 7, 7, 2], [3, 3, 3, 3]])
    found = np.array([[True, True, True, True], [True, True, True, True], [True, True, False, False]])
    truth = np.array([5, 7, 3])
    accuracies = retrieval_accuracy(values, found, truth, (1, 2, 4, 8))
    assert accuracies == {1: pytest.approx(2 / 3), 2: pytest.approx(5 / 6), 4: pytest.approx(7 / 12)}


def test_an_absent_neighbour_is_not_right_whatever_its_value() -> None:
    values, truth = np.array([[0, 0]]), np.array([0])
    assert retrieval_accuracy(values, np.array([[False, False]]), truth, (1, 2)) == {1: 0.0, 2: 0.0}
    assert retrieval_accuracy(values, np.array([[True, False]]), truth, (1, 2)) == {1: 1.0, 2: 0.5}
