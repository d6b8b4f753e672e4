"""Text in, translations out: order, batches, settings, and evidence that can be checked against the memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import tiny
from clknn import adaptation
from clknn.adapter import AdapterSettings
from clknn.corpus import Pair
from clknn.decoder import Evidence
from clknn.errors import DatastoreError, InputError
from clknn.mixing import Mixing
from clknn.model import Decoding, Model
from clknn.translator import TooLongError, Translator, Word, _words

FAMILIES = ("marian", "fsmt", "t5")
STORED = tiny.pairs(40)
Open = Callable[..., Translator]


@pytest.fixture(scope="module")
def opened(load: Callable[[str], Model], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Open]:
    """A family's translator over the same pairs; `vanilla` has distances instead of similarities."""
    made: dict[tuple[str, bool], Translator] = {}
    root = tmp_path_factory.mktemp("translators")
    tm = tiny.write_tsv(root / "tm.tsv", STORED)

    def open_(family: str = "marian", vanilla: bool = False) -> Translator:
        key = family, vanilla
        if key not in made:
            path, settings = root / f"{family}-{vanilla}", AdapterSettings(steps=2, batch=32)
            adaptation.adapt(
                path, [tm], load(family), adaptation.KNN_MT if vanilla else adaptation.Method(settings), hold_out=0
            )
            made[key] = Translator.open(path, load(family), decoding=Decoding(beam=3, max_new_tokens=24))
        return made[key]

    yield open_
    for translator in made.values():
        assert translator.datastore is not None
        translator.datastore.close()


# -- texts -------------------------------------------------------------------------------------------------------------


def test_translations_come_in_the_order_of_the_texts_whatever_their_lengths(opened: Open) -> None:
    texts = ["haus baum katze hund tag", "haus", "", "baum feuer", "   ", "haus"]
    together = opened().translate(texts, batch=2)
    assert [t.source for t in together] == texts
    assert [t.text for t in together] == [opened().translate([text])[0].text for text in texts]
    assert [t.text for t in together if not t.source.strip()] == ["", ""]
    assert together[0].text
    assert {t.words is None for t in together} == {True}


def test_no_texts_give_no_translations(opened: Open) -> None:
    assert opened().translate([]) == []


def test_a_text_of_just_the_models_length_is_translated_and_one_token_more_is_not(opened: Open) -> None:
    model = opened().model
    words = next(n for n in range(1, 99) if len(model.tokenise_sources(["haus " * n])[0]) > model.longest)
    fits, too_long = "haus " * (words - 1), "haus " * words
    assert opened().translate([fits])[0].source == fits
    with pytest.raises(TooLongError) as caught:
        opened().translate(["haus", too_long, too_long])
    tokens = len(model.tokenise_sources([too_long])[0])
    assert caught.value.place == 1
    assert caught.value.reason == (
        f"'haus haus haus haus haus haus haus haus '… has {tokens} tokens and the model holds 64; "
        "split it into sentences"
    )
    assert str(caught.value) == f"text 2: {caught.value.reason}"
    assert isinstance(caught.value, InputError)


# -- settings ----------------------------------------------------------------------------------------------------------


def test_weight_0_and_base_are_the_model_without_a_datastore(opened: Open) -> None:
    texts = [p.source for p in tiny.pairs(6, seed=5)]
    plain = [t.text for t in Translator(opened().model, decoding=opened().decoding).translate(texts)]
    assert [t.text for t in opened().base.translate(texts)] == plain
    assert [t.text for t in opened().with_mixing(weight=0).translate(texts)] == plain
    assert [t.text for t in opened().with_mixing(weight=0).translate(texts, evidence=True)] == plain
    assert [t.text for t in opened().with_mixing(weight=1).translate(texts)] != plain


def test_settings_that_are_not_given_stay_what_they_were(opened: Open) -> None:
    before = opened().combiner
    assert before is not None
    assert opened().with_mixing().combiner == before
    assert opened().with_mixing(k=3).combiner == Mixing(3, before.temperature, before.weight, before.scaled)
    assert opened().with_mixing(temperature=2.5).combiner == Mixing(before.k, 2.5, before.weight, before.scaled)
    assert opened().with_mixing(weight=0).combiner == Mixing(before.k, before.temperature, 0, before.scaled)
    assert opened().combiner == before


def test_settings_that_cannot_be(opened: Open) -> None:
    translator = opened()
    assert translator.datastore is not None
    entries = translator.datastore.entries
    most = translator.with_mixing(k=entries).combiner
    assert most is not None
    assert most.k == entries
    with pytest.raises(InputError, match=rf"k is {entries + 1} and .* has {entries} entries; ask for fewer"):
        translator.with_mixing(k=entries + 1)
    assert translator.base.with_mixing() == translator.base
    with pytest.raises(InputError, match="belong to a datastore, and none is open"):
        translator.base.with_mixing(k=3)


def test_a_datastore_opens_with_the_model_it_remembers(opened: Open, checkpoints: Callable[[str], Path]) -> None:
    first = opened()
    assert first.datastore is not None
    again = Translator.open(first.datastore.path, decoding=first.decoding)
    assert again.datastore is not None
    with again.datastore:
        assert again.model.name == str(checkpoints("marian"))
        assert again.model is not first.model
        assert again.combiner == first.combiner
        assert again.translate(["haus baum"]) == first.translate(["haus baum"])


def test_a_datastore_does_not_open_with_another_model(opened: Open, load: Callable[[str], Model]) -> None:
    first = opened()
    assert first.datastore is not None
    with pytest.raises(DatastoreError, match=rf"{first.model.fingerprint}.*{load('t5').fingerprint}"):
        Translator.open(first.datastore.path, load("t5"))


# -- evidence ----------------------------------------------------------------------------------------------------------


def words(translator: Translator, *texts: str) -> list[Word]:
    return [word for t in translator.translate(texts, evidence=True) for word in t.words or []]


@pytest.mark.parametrize("vanilla", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_shares_of_a_words_pairs_are_what_retrieval_decided_of_it(opened: Open, family: str, vanilla: bool) -> None:
    seen = words(opened(family, vanilla).with_mixing(weight=0.6), *(p.source for p in STORED[:3]), "haus baum")
    assert any(word.support for word in seen)
    for word in seen:
        assert sum(s.share for s in word.support) == pytest.approx(word.retrieved, abs=1e-5)
        assert -1e-6 <= word.retrieved <= 1 + 1e-6
        assert 0 <= word.p_model <= 1 + 1e-6
        assert [s.share for s in word.support] == sorted((s.share for s in word.support), reverse=True)
        assert len({s.pair_id for s in word.support}) == len(word.support)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_words_pairs_stand_in_the_memory_and_have_its_tokens_there(opened: Open, family: str) -> None:
    translator = opened(family).with_mixing(weight=0.9)
    assert translator.datastore is not None
    model, stored = translator.model, dict(enumerate(STORED))
    checked = 0
    for translation in translator.translate([p.source for p in STORED[:4]], evidence=True):
        assert translation.words is not None
        for word in translation.words:
            for support in word.support:
                pair = stored[support.pair_id]
                assert (support.pair.source, support.pair.target) == (pair.source, pair.target)
                assert (support.pair.origin.file, support.pair.origin.line) == ("tm.tsv", support.pair_id + 1)
                (tokens,) = model.tokenise_targets([pair.target])
                piece = model.pieces([tokens[support.position]])[0]
                assert piece.strip() in (word.text or piece.strip())
                checked += 1
    assert checked > 0


@pytest.mark.parametrize("family", FAMILIES)
def test_the_words_spell_the_translation(opened: Open, family: str) -> None:
    for translation in opened(family).translate([p.source for p in STORED[:5]], evidence=True):
        assert translation.words is not None
        spelt = [word.text for word in translation.words if word.text != "</s>"]
        assert "".join(spelt).replace(" ", "") == translation.text.replace(" ", "")
        assert translation.text in {t.text for t in opened(family).translate([translation.source])}


def test_a_stored_pair_is_the_evidence_for_its_own_translation(opened: Open) -> None:
    pair = STORED[7]
    seen = words(opened().with_mixing(k=1, weight=1), pair.source)
    assert " ".join(word.text for word in seen) == f"{pair.target} </s>"
    for word in seen:
        assert word.retrieved == pytest.approx(1, abs=1e-4)
        assert sum(s.share for s in word.support if s.pair.target == pair.target) > 0.99


def test_weight_0_shows_what_would_have_been_found_and_gives_it_nothing(opened: Open) -> None:
    seen = words(opened().with_mixing(weight=0), "haus baum katze")
    assert seen
    for word in seen:
        assert word.retrieved == 0
        assert [s.share for s in word.support] == [0.0] * len(word.support)


@pytest.mark.parametrize(
    ("pieces", "words"),
    [
        ([" The", " hou", "se", ".", "</s>"], ["The", "house.", "</s>"]),
        ([" 请", "单击", "确定", "按钮", "。", "</s>"], ["请", "单击", "确定", "按钮。", "</s>"]),
        ([" ", "我们", "将在", "</s>"], ["我们", "将在", "</s>"]),
        ([" 使用", "Wor", "d", "2003", "文档", ",", " 保存"], ["使用", "Word2003", "文档,", "保存"]),
        (["第", "3", "章", "(", "二", ")"], ["第", "3", "章(", "二)"]),
        ([" コンピュ", "ーター", "で", "す", "。"], ["コンピューター", "で", "す。"]),
        ([" สวัส", "ดี", "ชาว", "โลก", "ะ", "</s>"], ["สวัส", "ดี", "ชาว", "โลกะ", "</s>"]),
        ([" 안녕", "하세요", " 세계"], ["안녕하세요", "세계"]),
        ([" 𠀀", "𠀁"], ["𠀀", "𠀁"]),
    ],
)
def test_a_word_begins_at_a_space_or_where_the_script_has_none(pieces: list[str], words: list[str]) -> None:
    evidence = [Evidence(i, 0.0, 1.0, 1.0, []) for i in range(len(pieces))]
    found = list(_words(pieces, evidence))
    assert [text for text, _ in found] == words
    assert [one for _, tokens in found for one in tokens] == evidence


def test_an_empty_text_has_no_words(opened: Open) -> None:
    (translation,) = opened().translate([""], evidence=True)
    assert translation.words == []


def test_evidence_of_a_pair_that_was_added_is_there_and_of_one_removed_is_not(
    load: Callable[[str], Model], tmp_path: Path
) -> None:
    """A correction counts in the next sentence."""
    from clknn import datastore

    model, tm = load("marian"), tiny.write_tsv(tmp_path / "tm.tsv", STORED)
    adaptation.adapt(tmp_path / "s", [tm], model, adaptation.KNN_MT, hold_out=0)
    source, fixed = "vogel feuer", "small cat"
    (new,) = datastore.add(tmp_path / "s", [Pair(source, fixed, STORED[0].origin)], model)

    def answer() -> tuple[str, set[int]]:
        translator = Translator.open(tmp_path / "s", model).with_mixing(k=1, weight=1)
        assert translator.datastore is not None
        with translator.datastore:
            (translation,) = translator.translate([source], evidence=True)
        return translation.text, {s.pair_id for word in translation.words or [] for s in word.support}

    assert answer() == (fixed, {new})
    datastore.remove(tmp_path / "s", [new])
    text, voted = answer()
    assert text != fixed
    assert new not in voted
