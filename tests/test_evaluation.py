"""Scores against sacrebleu's own command line, and accuracies counted by hand."""

from __future__ import annotations

import json
import math
import random
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from sacrebleu.tokenizers import tokenizer_ja_mecab, tokenizer_ko_mecab

import tiny
from clknn.errors import InputError
from clknn.evaluation import Comparison, compare, refuse_unscorable, retrieval_accuracy


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


def sacrebleu(folder: Path, references: list[str], systems: list[list[str]], *flags: str) -> str:
    """What `python -m sacrebleu` says."""
    names = ["references", *(f"system{i}" for i in range(len(systems)))]
    for name, lines in zip(names, [references, *systems], strict=True):
        (folder / name).write_text("".join(f"{line}\n" for line in lines), encoding="utf8")
    command = [sys.executable, "-m", "sacrebleu", "references", "-i", *names[1:], "-m", "bleu", "chrf", *flags]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True).stdout


def test_the_comparison_equals_sacrebleus_command_line(
    ours: Comparison, systems: dict[str, list[str]], references: list[str], tmp_path: Path
) -> None:
    flags = ("--paired-bs", "--paired-bs-n", "1000", "--format", "text", "--width", "9")  # its JSON fails on numpy 2
    table = sacrebleu(tmp_path, references, list(systems.values()), *flags)
    scores = re.findall(r"system\d .* (\S+) \(\S+ ± .* (\S+) \(\S+ ±", table)
    p_values = re.findall(r"\(p = (\S+)\).*\(p = (\S+)\)", table)
    signatures = re.findall(r"- (?:BLEU|chrF2) +(\S+)", table)
    mine = list(ours.scores.values())
    np.testing.assert_allclose([(s.bleu, s.chrf) for s in mine], np.array(scores, float), atol=2e-9)
    # p is a multiple of 1/1001, and the command rounds to four places
    np.testing.assert_allclose([(s.p_bleu, s.p_chrf) for s in mine[1:]], np.array(p_values, float), atol=5.1e-5)
    assert [ours.bleu_signature, ours.chrf_signature] == signatures
    assert list(ours.scores) == list(systems)
    assert ours.segments == 60


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
    bleu, chrf = json.loads(sacrebleu(tmp_path, references, [system], "--format", "json", "--width", "9"))
    score = alone.scores["alone"]
    assert score.bleu == pytest.approx(bleu["score"], abs=2e-9)
    assert score.chrf == pytest.approx(chrf["score"], abs=2e-9)
    assert (score.p_bleu, score.p_chrf) == (None, None)
    fields = ("nrefs", "case", "eff", "tok", "smooth", "version")
    assert alone.bleu_signature == "|".join(f"{field}:{bleu[field]}" for field in fields)
    fields = ("nrefs", "case", "eff", "nc", "nw", "space", "version")
    assert alone.chrf_signature == "|".join(f"{field}:{chrf[field]}" for field in fields)


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
    """sacrebleu counts resamples above the difference, of which there are none: p = 0.001, significant."""
    system = spoilt(references, 0.3, seed=5)
    _, same = compare({"one": system, "same": list(system)}, references).scores.values()
    assert same.p_bleu == 1
    assert same.p_chrf == 1


CHINESE = ["我们将在明天上午的会议上讨论这个问题。", "请单击确定按钮保存您的设置。", "此功能仅适用于高级用户。"]
NEARLY = ["我们会在明天上午的会议上讨论这个问题。", "请点击确定按钮保存您的设置。", "该功能仅适用于高级用户。"]


@pytest.mark.parametrize("language", ["zh", "zh-TW", "zho_Hans", "zh_CN", "yue_Hant"])
def test_chinese_is_cut_by_character_and_the_signature_says_so(language: str, tmp_path: Path) -> None:
    scored = compare({"base": NEARLY, "same": CHINESE}, CHINESE, language)
    (bleu, _) = json.loads(sacrebleu(tmp_path, CHINESE, [NEARLY], "-tok", "zh", "--format", "json", "--width", "9"))
    assert scored.scores["base"].bleu == pytest.approx(bleu["score"], abs=2e-9)
    assert "|tok:zh|" in scored.bleu_signature
    assert scored.scores["same"].bleu == pytest.approx(100)
    assert compare({"base": NEARLY}, CHINESE).scores["base"].bleu == 0  # for 13a each sentence is one wrong word


@pytest.mark.parametrize("language", ["", "en", "de-AT", "eng_Latn", "vi", "th"])
def test_other_languages_are_cut_as_they_always_were(references: list[str], language: str) -> None:
    alone = compare({"base": spoilt(references, 0.2, seed=4)}, references, language)
    assert alone == compare({"base": spoilt(references, 0.2, seed=4)}, references)
    assert "|tok:13a|" in alone.bleu_signature


@pytest.mark.parametrize(
    ("language", "extra"),
    [("ja", "ja"), ("ja_XX", "ja"), ("jpn_Jpan", "ja"), ("ko", "ko"), ("ko-KR", "ko"), ("kor_Hang", "ko")],
)
def test_without_mecab_japanese_and_korean_are_refused_and_the_package_is_named(
    language: str, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (tokenizer_ja_mecab, tokenizer_ko_mecab):
        monkeypatch.setattr(module, "MeCab", None)
    with pytest.raises(InputError, match=rf"{language}.*pip install 'sacrebleu\[{extra}\]'"):
        compare({"base": NEARLY}, CHINESE, language)
    with pytest.raises(InputError, match=rf"pip install 'sacrebleu\[{extra}\]'"):
        refuse_unscorable(language)
    refuse_unscorable("zh")


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
