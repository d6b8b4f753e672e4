"""Tiny random models of seven families, saved as real checkpoints, and a small language to translate.

Weights are random and a few hundred thousand in number: they know nothing, which is what the laws want. Anything
that holds for them holds because of the code.
"""

from __future__ import annotations

import json
import random
from pathlib import Path

import sentencepiece
import torch
import transformers
from torch import Tensor
from transformers.models.mbart.tokenization_mbart import FAIRSEQ_LANGUAGE_CODES

from clknn.corpus import Origin, Pair
from clknn.mixing import Combiner, Neighbours, by_value, kernel, mix

FAMILIES = ("marian", "fsmt", "m2m100", "nllb", "mbart", "mbart50", "t5")
SOURCE_WORDS = "haus baum katze hund tag nacht wasser brot feuer stein vogel fisch rot blau alt neu groß klein".split()
TARGET_WORDS = "house tree cat dog day night water bread fire stone bird fish red blue old new big small".split()


def pairs(n: int, seed: int = 0) -> list[Pair]:
    """Distinct pairs of 2 to 9 words, word-for-word translations of each other."""
    rng = random.Random(seed)
    made: dict[str, Pair] = {}
    while len(made) < n:
        words = [rng.randrange(len(SOURCE_WORDS)) for _ in range(rng.randint(2, 9))]
        source = " ".join(SOURCE_WORDS[w] for w in words)
        target = " ".join(TARGET_WORDS[w] for w in words)
        made.setdefault(source, Pair(source, target, Origin("tiny.tsv", None, len(made) + 1)))
    return list(made.values())


def write_tsv(path: Path, rows: list[Pair]) -> Path:
    path.write_text("".join(f"{pair.source}\t{pair.target}\n" for pair in rows), encoding="utf8")
    return path


def save_checkpoint(family: str, folder: Path, seed: int = 0) -> Path:
    """A checkpoint that `from_pretrained` loads, with a tokenizer trained on the small language."""
    torch.manual_seed(seed)
    folder.mkdir(parents=True)
    network, tokenizer = globals()[f"_{family}"](folder)
    for parameter in network.parameters():  # wide enough that different prefixes give different tokens
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.3)
    network.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def _sentencepiece(folder: Path, **options: object) -> Path:
    text = folder / "text.txt"
    text.write_text("".join(f"{p.source}\n{p.target}\n" for p in pairs(300, seed=9)), encoding="utf8")
    sentencepiece.SentencePieceTrainer.train(
        input=str(text),
        model_prefix=str(folder / "spm"),
        vocab_size=64,
        required_chars="</p>",  # so that text can name control tokens
        character_coverage=1.0,
        minloglevel=5,
        num_threads=1,
        **options,
    )
    return folder / "spm.model"


def _pieces(model: Path) -> list[tuple[str, float]]:
    processor = sentencepiece.SentencePieceProcessor(model_file=str(model))
    return [(processor.id_to_piece(i), processor.get_score(i)) for i in range(processor.get_piece_size())]


def _marian(folder: Path) -> tuple[object, object]:
    model = _sentencepiece(folder)
    words = [piece for piece, _ in _pieces(model) if piece not in ("<unk>", "<s>", "</s>")]
    vocab = {piece: i for i, piece in enumerate(["</s>", "<unk>", *words, ">>fra<<", "<pad>"])}
    (folder / "vocab.json").write_text(json.dumps(vocab))
    tokenizer = transformers.MarianTokenizer(
        source_spm=str(model), target_spm=str(model), vocab=str(folder / "vocab.json"), model_max_length=64
    )
    pad = vocab["<pad>"]
    config = transformers.MarianConfig(
        vocab_size=len(vocab), d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=64, decoder_ffn_dim=64, max_position_embeddings=64,
        pad_token_id=pad, eos_token_id=0, bos_token_id=0, decoder_start_token_id=pad, forced_eos_token_id=0,
        scale_embedding=True, dropout=0.0,
    )  # fmt: skip
    network = transformers.MarianMTModel(config)
    torch.nn.init.normal_(network.final_logits_bias)  # a bias added behind the projection (METHODS, trap 5)
    network.generation_config.bad_words_ids = [[pad]]
    return network, tokenizer


def _fsmt(folder: Path) -> tuple[object, object]:
    letters = sorted({c for word in SOURCE_WORDS + TARGET_WORDS for c in word} | set("&;/p"))  # Moses writes &lt; for <
    pieces = ["<s>", "<pad>", "</s>", "<unk>", *letters, *(f"{c}</w>" for c in letters)]
    source = {piece: i for i, piece in enumerate(pieces)}
    target = {piece: i for i, piece in enumerate(pieces[:4] + pieces[:3:-1])}  # another order: another vocabulary
    for name, table in (("vocab-src.json", source), ("vocab-tgt.json", target)):
        (folder / name).write_text(json.dumps(table))
    (folder / "merges.txt").write_text("#version: 0.2\nh a 1\n")
    tokenizer = transformers.FSMTTokenizer(
        langs=["de", "en"], src_vocab_file=str(folder / "vocab-src.json"),
        tgt_vocab_file=str(folder / "vocab-tgt.json"), merges_file=str(folder / "merges.txt"), model_max_length=64,
    )  # fmt: skip
    config = transformers.FSMTConfig(
        langs=["de", "en"], src_vocab_size=len(source), tgt_vocab_size=len(target), d_model=32, encoder_layers=2,
        decoder_layers=2, encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=64,
        decoder_ffn_dim=64, max_position_embeddings=64, decoder_start_token_id=2, dropout=0.0,
        tie_word_embeddings=False, forced_eos_token_id=2,
    )  # fmt: skip
    return transformers.FSMTForConditionalGeneration(config), tokenizer


def _m2m100(folder: Path) -> tuple[object, object]:
    model = _sentencepiece(folder)
    vocab = {"<s>": 0, "<pad>": 1, "</s>": 2, "<unk>": 3}
    for piece, _ in _pieces(model):
        vocab.setdefault(piece, len(vocab))
    (folder / "vocab.json").write_text(json.dumps(vocab))
    tokenizer = transformers.M2M100Tokenizer(
        str(folder / "vocab.json"), str(model), src_lang="en", tgt_lang="fr", model_max_length=64
    )
    config = transformers.M2M100Config(
        vocab_size=max(tokenizer.get_vocab().values()) + 101, d_model=32, encoder_layers=2, decoder_layers=2,
        encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=64, decoder_ffn_dim=64,
        max_position_embeddings=64, decoder_start_token_id=2, dropout=0.0, encoder_layerdrop=0.0,
        decoder_layerdrop=0.0,
    )  # fmt: skip
    return transformers.M2M100ForConditionalGeneration(config), tokenizer


def _nllb(folder: Path) -> tuple[object, object]:
    """M2M100's network with byte-pair encoding and language codes that name the script; only its tokenizer differs."""
    characters = sorted({c for piece, _ in _fairseq_pieces(folder)[4:] for c in piece})
    pieces = ["<s>", "<pad>", "</s>", "<unk>", *characters, "ha", "▁h"]
    tokenizer = transformers.NllbTokenizer(
        vocab={piece: i for i, piece in enumerate(pieces)}, merges=[("h", "a"), ("▁", "h")], src_lang="eng_Latn",
        tgt_lang="fra_Latn", model_max_length=64,
    )  # fmt: skip
    config = transformers.M2M100Config(
        vocab_size=len(tokenizer) + 2, d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=64, decoder_ffn_dim=64, max_position_embeddings=64,
        decoder_start_token_id=2, dropout=0.0, encoder_layerdrop=0.0, decoder_layerdrop=0.0,
    )  # fmt: skip
    return transformers.M2M100ForConditionalGeneration(config), tokenizer


def _mbart(folder: Path) -> tuple[object, object]:
    languages = [(code, 0.0) for code in (*FAIRSEQ_LANGUAGE_CODES, "<mask>")]
    tokenizer = transformers.MBartTokenizer(
        vocab=[*_fairseq_pieces(folder), *languages], src_lang="en_XX", tgt_lang="ro_RO", model_max_length=64
    )
    return _mbart_network(tokenizer), tokenizer


def _mbart50(folder: Path) -> tuple[object, object]:
    """mBART's network, started with end-of-sentence and a forced language instead of with the language."""
    tokenizer = transformers.MBart50Tokenizer(  # it gives SentencePiece's order fairseq's by itself
        vocab=_pieces(_sentencepiece(folder)), src_lang="en_XX", tgt_lang="ro_RO", model_max_length=64
    )
    network = _mbart_network(tokenizer, decoder_start_token_id=2)
    network.final_logits_bias[0, 2] = -5  # or every translation would be empty
    return network, tokenizer


def _fairseq_pieces(folder: Path) -> list[tuple[str, float]]:
    words = [row for row in _pieces(_sentencepiece(folder)) if row[0] not in ("<unk>", "<s>", "</s>")]
    return [("<s>", 0.0), ("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), *words]


def _mbart_network(tokenizer: object, **options: int) -> transformers.MBartForConditionalGeneration:
    config = transformers.MBartConfig(
        vocab_size=len(tokenizer), d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=64, decoder_ffn_dim=64, max_position_embeddings=64,
        dropout=0.0, forced_eos_token_id=2, **options,
    )  # fmt: skip
    return transformers.MBartForConditionalGeneration(config)


def _t5(folder: Path) -> tuple[object, object]:
    model = _sentencepiece(folder, pad_id=0, eos_id=1, unk_id=2, bos_id=-1)
    words = [row for row in _pieces(model) if row[0] not in ("<pad>", "</s>", "<unk>")]
    vocab = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), *words]
    tokenizer = transformers.T5Tokenizer(vocab=vocab, extra_ids=4, model_max_length=64)
    config = transformers.T5Config(
        vocab_size=len(tokenizer), d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, dropout_rate=0.0,
        decoder_start_token_id=0, pad_token_id=0, eos_token_id=1, tie_word_embeddings=True,
    )  # fmt: skip
    config.task_specific_params = {"translation_de_to_en": {"prefix": "haus: "}}
    return transformers.T5ForConditionalGeneration(config), tokenizer


def mixed(log_p_model: Tensor, neighbours: Neighbours, combiner: Combiner) -> Tensor:
    """log p_mix, as a step of decoding makes it."""
    return mix(log_p_model, neighbours, combiner.shares(log_p_model, neighbours))


def p_knn(neighbours: Neighbours, temperature: float, vocabulary: int) -> Tensor:
    """The kernel's shares, added up by value."""
    return by_value(kernel(neighbours, temperature), neighbours, vocabulary)
