"""The model beyond the laws: what is refused, languages, precisions, and one number checked against transformers."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import sentencepiece
import torch
import transformers

import tiny
from clknn import adaptation, datastore
from clknn import model as models
from clknn.errors import DatastoreError, InputError, ModelError
from clknn.model import Decoding, Model, TransformersModel

Load = Callable[[str], Model]


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_log_p_of_a_target_is_transformers_own_loss(load: Load, family: str) -> None:
    model, pair = load(family), tiny.pairs(1)[0]
    assert isinstance(model, TransformersModel)
    source, target = model.tokenise_sources([pair.source]), model.tokenise_targets([pair.target])
    forced = model.force(source, target, with_log_p=True)
    assert forced.log_p is not None
    ours = forced.log_p[range(len(target[0])), target[0]].mean()
    prompt = [model._start, *model._forced]
    labels = torch.tensor([[-100] * len(model._forced) + target[0]])
    with torch.inference_mode():
        loss = model._network(
            input_ids=torch.tensor(source),
            decoder_input_ids=torch.tensor([[*prompt, *target[0][:-1]]]),
            labels=labels,
        ).loss
    torch.testing.assert_close(ours, -loss, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_a_target_survives_tokens_and_back(load: Load, family: str) -> None:
    model, texts = load(family), [p.target for p in tiny.pairs(20)]
    tokens = model.tokenise_targets(texts)
    assert [model.detokenise(row) for row in tokens] == texts
    for text, row in zip(texts, tokens, strict=True):
        pieces = model.pieces(row)
        assert "".join(pieces).replace("</s>", "").split() == text.split()
        assert sum(piece.startswith(" ") for piece in pieces if piece.strip() != "</s>") == len(text.split())


def test_states_alone_and_states_with_log_p_are_the_same(load: Load) -> None:
    model, rows = load("marian"), tiny.pairs(5)
    source = model.tokenise_sources([p.source for p in rows])
    target = model.tokenise_targets([p.target for p in rows])
    assert torch.equal(model.force(source, target).states, model.force(source, target, with_log_p=True).states)


def test_the_language_token_is_forced_and_belongs_to_the_target_language(checkpoints: Callable[[str], Path]) -> None:
    folder = str(checkpoints("m2m100"))
    for target, code in (("en", "en"), ("fr", "fr"), ("pt-BR", "pt")):
        model = models.load(folder, "de", target)
        assert isinstance(model, TransformersModel)
        assert model._forced == [model._tokenizer.get_lang_id(code)]
    mbart = models.load(str(checkpoints("mbart")), "de", "en")
    assert isinstance(mbart, TransformersModel)
    assert mbart._start == mbart._tokenizer.convert_tokens_to_ids("en_XX")


def test_another_target_language_is_another_fingerprint(checkpoints: Callable[[str], Path], load: Load) -> None:
    assert models.load(str(checkpoints("m2m100")), "de", "fr").fingerprint != load("m2m100").fingerprint


def altered(checkpoint: Path, folder: Path, **config: object) -> Path:
    """A copy of a checkpoint with another configuration of its network."""
    shutil.copytree(checkpoint, folder)
    known = json.loads((folder / "config.json").read_text())
    assert set(config) <= set(known)
    (folder / "config.json").write_text(json.dumps(known | config))
    return folder


def spm(folder: Path, kind: str) -> Path:
    options = {"model_type": kind, "vocab_size": 40, "minloglevel": 5, "num_threads": 1}
    sentencepiece.SentencePieceTrainer.train(
        input=str(folder / "text.txt"), model_prefix=str(folder / kind), hard_vocab_limit=False, **options
    )
    return folder / f"{kind}.model"


@pytest.mark.parametrize("file", ["source.spm", "target.spm"])
def test_other_pieces_on_either_side_are_another_fingerprint(
    load: Load, checkpoints: Callable[[str], Path], file: str, tmp_path: Path
) -> None:
    folder = altered(checkpoints("marian"), tmp_path / "m")
    spm(folder, "char").replace(folder / file)
    assert models.load(str(folder), "de", "en").fingerprint != load("marian").fingerprint


@pytest.mark.parametrize("change", ["merges", "case"])
def test_other_rules_of_fsmts_tokenizer_are_another_fingerprint(
    load: Load, checkpoints: Callable[[str], Path], change: str, tmp_path: Path
) -> None:
    folder = altered(checkpoints("fsmt"), tmp_path / "m")
    if change == "merges":
        (folder / "merges.txt").write_text("#version: 0.2\n")
    else:
        known = json.loads((folder / "tokenizer_config.json").read_text())
        (folder / "tokenizer_config.json").write_text(json.dumps(known | {"do_lower_case": True}))
    assert models.load(str(folder), "de", "en").fingerprint != load("fsmt").fingerprint


@pytest.mark.parametrize(
    ("family", "config"),
    [
        ("marian", {"decoder_attention_heads": 2}),
        ("marian", {"scale_embedding": False}),
        ("fsmt", {"activation_function": "gelu"}),
        ("t5", {"relative_attention_max_distance": 64}),
    ],
)
def test_another_configuration_of_the_same_weights_is_another_fingerprint(
    load: Load, checkpoints: Callable[[str], Path], family: str, config: dict[str, object], tmp_path: Path
) -> None:
    folder = altered(checkpoints(family), tmp_path / "m", **config)
    assert models.load(str(folder), "de", "en").fingerprint != load(family).fingerprint


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_a_copy_elsewhere_saved_by_another_version_has_the_same_fingerprint(
    load: Load, checkpoints: Callable[[str], Path], family: str, tmp_path: Path
) -> None:
    folder = altered(checkpoints(family), tmp_path / "m", transformers_version="5.0.0", architectures=None)
    known = json.loads((folder / "config.json").read_text())
    del known["dtype"], known["use_cache"]  # a default that older versions did not write
    (folder / "config.json").write_text(json.dumps(known | {"_name_or_path": "elsewhere"}))
    assert models.load(str(folder), "de", "en").fingerprint == load(family).fingerprint


def test_a_datastore_is_refused_with_the_same_weights_and_other_heads(
    load: Load, checkpoints: Callable[[str], Path], tmp_path: Path
) -> None:
    tm = tiny.write_tsv(tmp_path / "tm.tsv", tiny.pairs(20))
    adaptation.build(tmp_path / "s", [tm], load("marian"), hold_out=0)
    adaptation.project(tmp_path / "s", load("marian"), vanilla=True)
    other = models.load(str(altered(checkpoints("marian"), tmp_path / "m", decoder_attention_heads=2)), "de", "en")
    with pytest.raises(DatastoreError, match=rf"{load('marian').fingerprint}.*{other.fingerprint}"):
        datastore.open_datastore(tmp_path / "s", other)


def test_a_language_the_model_does_not_have_is_refused_with_those_it_has(checkpoints: Callable[[str], Path]) -> None:
    with pytest.raises(InputError, match=r"0 languages for 'tlh'.*de_DE"):
        models.load(str(checkpoints("mbart")), "de", "tlh")


def codes_of(checkpoints: Callable[[str], Path], family: str, source: str, target: str) -> tuple[str, str]:
    model = models.load(str(checkpoints(family)), source, target)
    assert isinstance(model, TransformersModel)
    return model._tokenizer.src_lang, model._tokenizer.tgt_lang


@pytest.mark.parametrize(
    ("family", "asked", "code"),
    [
        ("nllb", "ar", "arb_Arab"),
        ("nllb", "ar-MA", "arb_Arab"),
        ("nllb", "no", "nob_Latn"),
        ("nllb", "nn", "nno_Latn"),
        ("nllb", "lv", "lvs_Latn"),
        ("nllb", "sq", "als_Latn"),
        ("nllb", "ms", "zsm_Latn"),
        ("nllb", "mn", "khk_Cyrl"),
        ("nllb", "az", "azj_Latn"),
        ("nllb", "azb", "azb_Arab"),
        ("nllb", "ku", "kmr_Latn"),
        ("nllb", "pa", "pan_Guru"),
        ("nllb", "fa", "pes_Arab"),
        ("nllb", "fa-AF", "prs_Arab"),
        ("nllb", "ks", "kas_Arab"),
        ("nllb", "ks-Deva", "kas_Deva"),
        ("nllb", "sat", "sat_Beng"),
        ("nllb", "ko", "kor_Hang"),
        ("nllb", "zh", "zho_Hans"),
        ("nllb", "zh-CN", "zho_Hans"),
        ("nllb", "zh-TW", "zho_Hant"),
        ("nllb", "zh_CN", "zho_Hans"),
        ("nllb", "pt-BR", "por_Latn"),
        ("nllb", "sr", "srp_Cyrl"),
        ("mbart50", "zh", "zh_CN"),
        ("mbart50", "zho_Hans", "zh_CN"),
        ("mbart50", "de-AT", "de_DE"),
        ("mbart50", "ar-EG", "ar_AR"),
        ("mbart50", "fa", "fa_IR"),
        ("mbart50", "eng_Latn", "en_XX"),
        ("m2m100", "nb", "no"),
        ("m2m100", "fil", "tl"),
    ],
)
def test_a_language_is_found_among_the_models_codes(
    checkpoints: Callable[[str], Path], family: str, asked: str, code: str
) -> None:
    assert codes_of(checkpoints, family, asked, "fr")[0] == code
    assert codes_of(checkpoints, family, "fr", asked)[1] == code


@pytest.mark.parametrize(
    ("family", "asked", "message"),
    [
        ("mbart50", "zh-TW", r"0 languages for 'zh-TW' in the script Hant; name one of: zh_CN$"),
        ("mbart50", "sq", r"0 languages for 'sq'; name one of: ar_AR, "),
        ("nllb", "sr-Latn", r"0 languages for 'sr-Latn' in the script Latn; name one of: srp_Cyrl$"),
        ("nllb", "fa-DE", r"2 languages for 'fa-DE'; name one of: pes_Arab, prs_Arab$"),
        ("nllb", "ak", r"2 languages for 'ak'; name one of: aka_Latn, twi_Latn$"),
        ("nllb", "German", r"'German' is not a language tag; give one such as de"),
    ],
)
def test_a_language_that_is_not_one_of_the_models_is_refused(
    checkpoints: Callable[[str], Path], family: str, asked: str, message: str
) -> None:
    with pytest.raises(InputError, match=message):
        models.load(str(checkpoints(family)), asked, "fr")
    with pytest.raises(InputError, match=message):
        models.load(str(checkpoints(family)), "fr", asked)


@pytest.mark.parametrize(
    ("family", "file"),
    [("mbart", "sentencepiece.bpe.model"), ("mbart50", "sentencepiece.bpe.model"), ("t5", "spiece.model")],
)
def test_a_checkpoint_with_a_sentencepiece_model_alone_is_loaded(
    load: Load, checkpoints: Callable[[str], Path], family: str, file: str, tmp_path: Path
) -> None:
    """transformers reads it by way of protobuf, which it does not require."""
    folder = shutil.copytree(checkpoints(family), tmp_path / family)
    (folder / "tokenizer.json").unlink()
    (folder / "spm.model").rename(folder / file)
    bare, texts = models.load(str(folder), "de", "en"), [p.source for p in tiny.pairs(9)]
    assert bare.tokenise_sources(texts) == load(family).tokenise_sources(texts)
    assert bare.tokenise_targets(texts) == load(family).tokenise_targets(texts)


def test_the_task_prefix_of_t5_is_part_of_the_source(load: Load, checkpoints: Callable[[str], Path]) -> None:
    assert load("t5").prefix == "haus: "
    bare = models.load(str(checkpoints("t5")), "de", "en", prefix="")
    with_prefix, without = load("t5").tokenise_sources(["baum"])[0], bare.tokenise_sources(["haus: baum"])[0]
    assert with_prefix == without
    assert bare.fingerprint != load("t5").fingerprint


def test_bfloat16_translates_and_its_states_are_near(checkpoints: Callable[[str], Path], load: Load) -> None:
    half = models.load(str(checkpoints("marian")), "de", "en", dtype="bfloat16")
    source = half.tokenise_sources(["haus baum", "katze"])
    target = half.tokenise_targets(["house tree", "cat"])
    near, exact = half.force(source, target).states, load("marian").force(source, target).states
    assert near.dtype == torch.float32
    assert torch.nn.functional.cosine_similarity(near, exact).min() > 0.99
    assert len(half.generate(source, Decoding(2, max_new_tokens=4))) == 2


def test_the_length_limit_is_each_sources_own(load: Load) -> None:
    model = load("marian")
    sources = model.tokenise_sources(["haus", " ".join(tiny.SOURCE_WORDS[:8])])
    for beam in (1, 3):
        short, long = model.generate(sources, Decoding(beam, max_new_tokens=50, longest_ratio=0.5))
        assert len(short.tokens) <= 16 + len(sources[0]) // 2
        assert len(short.cells) == len(short.tokens)
        assert len(long.tokens) <= 16 + len(sources[1]) // 2


@pytest.mark.parametrize(
    ("name", "value", "advice"),
    [
        ("num_return_sequences", 2, "choose from"),
        ("return_dict_in_generate", False, "choose from"),
        ("num_beam_groups", 2, "choose from"),
        ("penalty_alpha", 0.6, "choose from"),
        ("prompt_lookup_num_tokens", 2, "choose from"),
        ("use_cache", False, "choose from"),
        ("eos_token_id", 5, "choose from"),
        ("decoder_start_token_id", 5, "choose from"),
        ("guidance_scale", 1.5, "choose from"),
        ("no_such_option", 1, "choose from"),
        ("num_beams", 3, "say beam="),
        ("max_new_tokens", 3, "say max_new_tokens="),
    ],
)
def test_options_of_generate_that_change_what_it_gives_back_are_refused(name: str, value: object, advice: str) -> None:
    with pytest.raises(InputError, match=f"further has {name!r}.*{advice}"):
        Decoding(further={"no_repeat_ngram_size": 2, name: value})


def test_options_of_the_checkpoint_itself_do_not_change_what_generate_gives_back(
    load: Load, checkpoints: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = altered(checkpoints("marian"), tmp_path / "m")
    known = json.loads((folder / "generation_config.json").read_text())
    known |= {"num_return_sequences": 2, "num_beams": 4, "use_cache": False}
    (folder / "generation_config.json").write_text(json.dumps(known))
    sources = load("marian").tokenise_sources([p.source for p in tiny.pairs(5)])
    for beam in (1, 4):
        decoding = Decoding(beam, max_new_tokens=9)
        told = models.load(str(folder), "de", "en").generate(sources, decoding, lambda _, __, log_p: log_p)
        assert told == load("marian").generate(sources, decoding)


@pytest.mark.parametrize("beam", [1, 4])
@pytest.mark.parametrize("further", [{"top_k": 5}, {"top_p": 0.8, "temperature": 0.5}, {"typical_p": 0.5}])
def test_sampled_tokens_have_their_cells(load: Load, beam: int, further: dict[str, float]) -> None:
    model, seen = load("m2m100"), dict[int, torch.Tensor]()
    sources = model.tokenise_sources([p.source for p in tiny.pairs(5)])

    def watch(step: int, states: torch.Tensor, log_p: torch.Tensor) -> torch.Tensor:
        seen[step] = states
        return log_p

    torch.manual_seed(0)
    generated = model.generate(sources, Decoding(beam, max_new_tokens=9, further={"do_sample": True, **further}), watch)
    for source, hypothesis in zip(sources, generated, strict=True):
        states = model.force([source], [hypothesis.tokens]).states
        for i, (step, row) in enumerate(hypothesis.cells):
            torch.testing.assert_close(seen[step][row], states[i], atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize(
    ("config", "architecture", "reason"),
    [
        (transformers.BertConfig(), "BertForMaskedLM", "encoder-only"),
        (transformers.GPT2Config(), "GPT2LMHeadModel", "decoder-only"),
        (transformers.WhisperConfig(), "WhisperForConditionalGeneration", "speech"),
    ],
)
def test_other_kinds_of_model_are_refused(
    config: transformers.PretrainedConfig, architecture: str, reason: str, tmp_path: Path
) -> None:
    config.architectures = [architecture]
    config.save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=reason):
        models.load(str(tmp_path), "de", "en")


def test_a_folder_without_a_checkpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no translation model could be loaded"):
        models.load(str(tmp_path), "de", "en")


def test_a_damaged_configuration_is_refused(tmp_path: Path, checkpoints: Callable[[str], Path]) -> None:
    for file in checkpoints("marian").iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "no-such-model"}))
    with pytest.raises(ModelError, match="no translation model could be loaded"):
        models.load(str(tmp_path), "de", "en")


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has CUDA")
def test_cuda_is_refused_where_there_is_none(checkpoints: Callable[[str], Path]) -> None:
    with pytest.raises(InputError, match="no CUDA"):
        models.load(str(checkpoints("marian")), "de", "en", device="cuda")
