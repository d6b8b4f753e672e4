"""Languages: what tags say, whoever writes them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clknn.language import read_language


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("de", "deu_Latn"),
        ("de", "DE"),
        ("en", "en_XX"),
        ("zh", "zho_Hans"),
        ("zh-Hant-TW", "zh_tw"),
        ("zh", "cmn"),
        ("ar", "arb_Arab"),
        ("no", "nob_Latn"),
        ("lv", "lvs_Latn"),
        ("sq", "als_Latn"),
        ("ms", "zsm_Latn"),
        ("mn", "khk_Cyrl"),
        ("az", "azj_Latn"),
        ("ku", "kmr_Latn"),
        ("pa", "pan_Guru"),
        ("fa", "pes_Arab"),
        ("fa-AF", "prs"),
        ("ko", "kor_Hang"),
        ("he", "iw"),
    ],
)
def test_one_language_in_two_ways_to_write_it(one: str, other: str) -> None:
    assert read_language(one).essence == read_language(other).essence


@pytest.mark.parametrize(
    ("one", "other"),
    [("de", "de-AT"), ("zh", "zh-Hant"), ("no", "nn"), ("fa", "prs"), ("sr", "sr-Latn"), ("az", "azb"), ("pt", "es")],
)
def test_two_languages(one: str, other: str) -> None:
    assert read_language(one).essence != read_language(other).essence


def test_a_script_is_said_by_itself_or_by_the_territory_or_not_at_all() -> None:
    assert [read_language(tag).script for tag in ("zh-Hant", "zh-TW", "zh", "en_XX")] == ["Hant", "Hant", None, None]
    assert [read_language(tag).written for tag in ("zh-Hant", "zh-TW", "zh", "en_XX")] == [
        "Hant",
        "Hant",
        "Hans",
        "Latn",
    ]


@given(st.text() | st.text("abdezhxu0129-_ ", max_size=20))
def test_any_text_is_read(tag: str) -> None:
    assert read_language(tag).essence == read_language(tag).essence


def test_what_is_no_tag_keeps_its_parts() -> None:
    assert [read_language(tag).name for tag in ("de_DE.UTF-8", "English")] == ["de", "english"]
    assert read_language("x-none").subtags == ("none",)
