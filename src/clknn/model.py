"""The translation model: text to tokens, teacher-forced states, and generation with a mix at each step.

In goes the path or name of a pretrained encoder-decoder checkpoint and a language pair; out comes a `Model`, which
is all that the rest of clknn knows of neural networks: token ids in, states and log-probabilities out. It hides the
families (Marian, FSMT, M2M100 and NLLB, mBART, T5), their language tokens and their padding, and the one capture
point of the **state**: whatever enters the module that projects onto the vocabulary, so that building a datastore
and decoding with it cannot disagree. Nothing else imports transformers. It generates in two ways: by transformers' own
`generate`, which keeps every option's meaning, and, for the networks whose structure is known, by the `Steps` that a
beam search takes. The trade-off: the decoder's matrices are there twice, once in each layout.
"""

from __future__ import annotations

import copy
import hashlib
import json
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Protocol

import torch
import transformers
from safetensors import SafetensorError
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    DynamicCache,
    EncoderDecoderCache,
    FSMTForConditionalGeneration,
    FSMTTokenizer,
    LogitsProcessor,
    LogitsProcessorList,
    M2M100ForConditionalGeneration,
    MarianMTModel,
    MBartForConditionalGeneration,
    MBartTokenizer,
    StoppingCriteria,
    StoppingCriteriaList,
    T5ForConditionalGeneration,
)
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES,
)

from clknn.errors import InputError, ModelError
from clknn.language import is_language, read_language
from clknn.step import Decoder, Layer, Linear, Map, Rules, Steps, TransformerLanes

Tokens = list[int]
Cell = tuple[int, int]  # where a distribution over the next token was: its step and its row

_HUB_NAME = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")
_UNLISTED = frozenset(("ns",))  # M2M100's own code for Northern Sotho, which no registry has

# (step, states [R, D], log p_model [R, V]) -> log p_mix [R, V]; step counts from the decoder start.
Mix = Callable[[int, Tensor, Tensor], Tensor]


# Options of `generate` that choose among p_mix and leave one hypothesis. The others give several or none, decode in
# another way (some then without the mix, or with it and without the option, silently), or belong to the model.
_FURTHER = frozenset(
    """
    bad_words_ids begin_suppress_tokens do_sample early_stopping encoder_no_repeat_ngram_size
    encoder_repetition_penalty epsilon_cutoff eta_cutoff exponential_decay_length_penalty forced_eos_token_id
    length_penalty logits_processor max_time min_length min_new_tokens min_p no_repeat_ngram_size
    prefix_allowed_tokens_fn remove_invalid_values renormalize_logits repetition_penalty sequence_bias suppress_tokens
    temperature top_k top_p typical_p
    """.split()
)


@dataclass(frozen=True)
class Decoding:
    """How to decode: what the papers hold equal across systems, and further options of `generate`.

    A translation has at most `max_new_tokens`, and at most `longest_ratio` tokens for each of its source's and 16 more,
    so that a weak model that repeats itself costs little; None leaves that out.
    """

    beam: int = 5
    length_penalty: float = 1.0
    max_new_tokens: int = 256
    longest_ratio: float | None = 3.0
    further: dict[str, Any] = field(default_factory=dict)
    reference: bool = False  # by transformers' own generate even where the beam search of clknn could do it

    def __post_init__(self) -> None:
        for name in sorted(self.further.keys() - _FURTHER):
            own = {"num_beams": "beam", "max_new_tokens": "max_new_tokens"}.get(name)
            advice = f"say {own}=" if own else f"leave it out, or choose from {', '.join(sorted(_FURTHER))}"
            raise InputError(f"further has {name!r}, an option under which hypotheses could not be read; {advice}")

    def limits(self, sources: Sequence[Tokens], room: int) -> tuple[int, list[int]]:
        """The most tokens that any hypothesis may have where the model has room for so many, and each source's most."""
        most, ratio = min(self.max_new_tokens, room), self.longest_ratio
        return most, [most if ratio is None else min(most, 16 + int(ratio * len(source))) for source in sources]


@dataclass(frozen=True)
class Generated:
    """The best hypothesis of one source: its tokens, and the cell that gave each.

    A token that was forced has none, or that of a step for which `mix` was not asked.
    """

    tokens: Tokens
    cells: Sequence[Cell | None]


@dataclass(frozen=True)
class Forced:
    """Teacher-forced targets, concatenated: n is the sum of their lengths."""

    states: Tensor  # [n, D] float32
    log_p: Tensor | None  # [n, V] float32, where it was asked for


class Model(Protocol):
    """What states and decoder need of a translation model; families other than transformers' can provide it."""

    name: str
    source_language: str
    target_language: str
    prefix: str
    width: int
    vocabulary: int
    longest: int
    precision: str  # "float32" or "bfloat16": what the states were computed in
    state_definition: str
    fingerprint: str
    ends: list[int]  # tokens that end a sentence, the usual one first

    @property
    def steps(self) -> Steps | str:
        """How it takes decoding steps of its own, or the reason why it only generates."""

    def tokenise_sources(self, texts: Sequence[str]) -> list[Tokens]: ...

    def tokenise_targets(self, texts: Sequence[str]) -> list[Tokens]: ...

    def detokenise(self, tokens: Tokens) -> str: ...

    def pieces(self, tokens: Tokens) -> list[str]: ...

    def force(self, sources: list[Tokens], targets: list[Tokens], with_log_p: bool = False) -> Forced: ...

    def generate(self, sources: list[Tokens], decoding: Decoding, mix: Mix | None = None) -> list[Generated]: ...


def load(
    name: str, source: str, target: str, device: str = "cpu", dtype: str = "float32", prefix: str | None = None
) -> Model:
    """Loads a checkpoint by path or name for one language pair, or says why it cannot serve.

    `prefix` is put before each source (T5's "translate German to English: "); None takes the checkpoint's own.
    """
    _refuse_languages(source, target)
    precisions = {"float32": torch.float32, "bfloat16": torch.bfloat16}
    if dtype not in precisions:
        raise InputError(f"dtype {dtype!r} is not served; choose float32 or bfloat16")
    _refuse_device(device)
    _refuse_path(name)
    _quiet()
    part = "configuration"
    try:
        config = AutoConfig.from_pretrained(name)
        _refuse_other_kinds(name, config)
        part = "weights"
        network = AutoModelForSeq2SeqLM.from_pretrained(name, dtype=precisions[dtype])
        part = "tokenizer"
        tokenizer = AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError, KeyError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ModelError(
            f"{name}: no translation model could be loaded from here ({reason}); "
            "give a folder or hub name that transformers' from_pretrained accepts"
        ) from error
    except (TypeError, AttributeError, RuntimeError, SafetensorError) as error:  # what missing halves of files cause
        raise ModelError(
            f"{name}: its {part} cannot be read, a file is missing or damaged ({error}); copy or download it again"
        ) from error
    return TransformersModel(name, network.to(device).eval(), tokenizer, source, target, prefix)


def _refuse_languages(source: str, target: str) -> None:
    for tag in (source, target):
        if tag not in _UNLISTED and not is_language(tag):
            raise InputError(f"{tag!r} is not a language tag; give one such as de, pt-BR or zh-Hant")
    if read_language(source).essence == read_language(target).essence:
        raise InputError(f"source and target language are both {source!r}; name two languages")


def _refuse_device(device: str) -> None:
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise InputError(f"device {device!r} was asked for, and this machine has no CUDA; use --device cpu")
    try:
        torch.zeros(1, device=device).item()
    except (RuntimeError, AssertionError) as error:  # by the kind of device
        reason = str(error).splitlines()[0]
        raise InputError(f"device {device!r} cannot be used here ({reason}); use --device cpu") from error


def _refuse_path(name: str) -> None:
    if Path(name).is_file():
        raise ModelError(f"{name}: is a file; give the folder of the checkpoint, or a hub name")
    if not Path(name).exists() and not _HUB_NAME.fullmatch(name):
        raise ModelError(
            f"{name}: no such folder; check the path, or give a hub name such as Helsinki-NLP/opus-mt-de-en"
        )


def _quiet() -> None:
    """transformers draws bars and prints advice of its own; what matters here is raised."""
    logging: Any = transformers.utils.logging
    logging.disable_progress_bar()
    logging.set_verbosity_error()


def _refuse_other_kinds(name: str, config: Any) -> None:
    architecture = (getattr(config, "architectures", None) or [type(config).__name__])[0]
    if config.model_type in MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES:
        raise ModelError(f"{name} is a speech model ({architecture}): its source is sound, and a memory has text")
    if not getattr(config, "is_encoder_decoder", False):
        kind = "decoder-only" if "CausalLM" in architecture or "LMHead" in architecture else "encoder-only"
        lacks = "encoder to read the source" if kind == "decoder-only" else "decoder to take states from"
        raise ModelError(
            f"{name} is {kind} ({architecture}): it has no {lacks}; clknn needs an encoder-decoder translation model"
        )
    if config.model_type not in MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES:
        raise ModelError(f"{name} ({architecture}) does not generate text from text; clknn needs a translation model")


class TransformersModel:
    """Any text-to-text model of transformers, seen as states and steps."""

    def __init__(
        self, name: str, network: Any, tokenizer: Any, source: str, target: str, prefix: str | None = None
    ) -> None:
        self.name = name
        self.source_language, self.target_language = source, target
        self._network, self._tokenizer = network, tokenizer
        self._projection, self.state_definition = _output_projection(name, network)
        self.width = int(self._projection.in_features)
        self.vocabulary = int(self._projection.out_features)
        self.longest = _longest(network.config, tokenizer)
        self.precision = str(network.dtype).removeprefix("torch.")
        self.prefix = prefix if prefix is not None else _task_prefix(network.config, source, target)
        self._target_tokenizer = _target_tokenizer(tokenizer)
        self._start, self._forced = _decoder_prompt(name, network, tokenizer, source, target)
        self._pad, self.ends = _special_tokens(name, network, tokenizer)
        self._control = _control_tokens(tokenizer) | {self._start, *self._forced, self._pad, *self.ends}
        self._around = _around_a_source(tokenizer, self.prefix, self._control)
        pieces = [str(tokenizer.convert_ids_to_tokens(token)) for token in range(self.vocabulary)]
        probe = _probe(pieces)
        probed = [self.tokenise_sources(probe), self.tokenise_targets(probe)]
        prompt = [self.prefix, self._start, self._forced]
        self.fingerprint = _fingerprint(network, tokenizer, prompt, probed, pieces)

    # -- text ---------------------------------------------------------------------------------------------------

    def tokenise_sources(self, texts: Sequence[str]) -> list[Tokens]:
        """Source ids as the encoder wants them, end-of-sentence and language tokens included.

        A text that names control tokens is text all the same; the prefix may hold one (Marian's ">>fra<< ").
        """
        if not texts:
            return []
        head, prefix, tail = self._around
        rows: list[Tokens] = self._tokenizer([self.prefix + text for text in texts])["input_ids"]
        for i, row in enumerate(rows):
            if not self._control.isdisjoint(row[len(head) : len(row) - len(tail)]):
                rows[i] = [*head, *_as_text(self._tokenizer, self._control, text=prefix + texts[i]), *tail]
        return rows

    def tokenise_targets(self, texts: Sequence[str]) -> list[Tokens]:
        """Target ids as the decoder must produce them: content and end-of-sentence, no start or language token."""
        if not texts:
            return []
        rows = self._target_tokenizer(text_target=list(texts), add_special_tokens=False)["input_ids"]
        for i, row in enumerate(rows):
            if not self._control.isdisjoint(row):
                rows[i] = _as_text(self._target_tokenizer, self._control, text_target=texts[i])
        return [[*row, self.ends[0]] for row in rows]

    def detokenise(self, tokens: Tokens) -> str:
        return str(self._tokenizer.decode(tokens, skip_special_tokens=True)).strip()

    def pieces(self, tokens: Tokens) -> list[str]:
        """Each token as text; a piece that opens a word begins with a space. End-of-sentence is "</s>"."""
        raw = [str(piece) for piece in self._tokenizer.convert_ids_to_tokens(tokens)]
        if isinstance(self._tokenizer, FSMTTokenizer):  # "</w>" closes a word there
            opens = [True] + [piece.endswith("</w>") for piece in raw[:-1]]
            return [" " * new + piece.removesuffix("</w>") for new, piece in zip(opens, raw, strict=True)]
        return [piece.replace("▁", " ") for piece in raw]

    # -- steps --------------------------------------------------------------------------------------------------

    @cached_property
    def steps(self) -> Steps | str:
        rules = _rules(self._network, self._start, self._forced, self.ends)
        if isinstance(rules, str):
            return rules
        decoder = _decoder(self._network, self._projection, self._encode, self.longest)
        return decoder if isinstance(decoder, str) else Steps(rules, partial(TransformerLanes, decoder))

    def _encode(self, sources: list[Tokens]) -> tuple[Tensor, Tensor]:
        """The encoder's states [B, S, D] and what of them is no padding [B, S]."""
        source, mask = _padded(sources, self._pad, self._network.device)
        states: Tensor = self._network.get_encoder()(input_ids=source, attention_mask=mask).last_hidden_state
        return states, mask

    # -- tensors ------------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def force(self, sources: list[Tokens], targets: list[Tokens], with_log_p: bool = False) -> Forced:
        """Teacher-forces the targets: the state (and log p_model) from which each of their tokens is predicted.

        The decoder reads the start, any forced language token, and the target shifted right by one; the states
        kept are those that predict the target's own tokens, in order, so their number is the targets' lengths'.
        """
        device = self._network.device
        source, mask = _padded(sources, self._pad, device)  # [B, S], [B, S]
        prompt = [self._start, *self._forced]
        inputs, _ = _padded([[*prompt, *row[:-1]] for row in targets], self._pad, device)  # [B, T]
        lengths = torch.tensor([len(row) for row in targets], device=device)[:, None]  # [B, 1]
        position = torch.arange(inputs.shape[1], device=device)[None] - (len(prompt) - 1)  # [1, T]
        kept = (position >= 0) & (position < lengths)  # [B, T]
        with self._captured(logits=with_log_p) as seen:
            # FSMT has no causal mask unless use_cache=False, and masks a start token that equals its padding.
            logits = self._network(
                input_ids=source,
                attention_mask=mask,
                decoder_input_ids=inputs,
                decoder_attention_mask=torch.ones_like(inputs),
                use_cache=False,
            ).logits  # [B, T, V], or [B, 0, V] where only states are wanted
        log_p = torch.log_softmax(logits[kept].float(), -1) if with_log_p else None
        return Forced(seen[0][kept].float(), log_p)

    @torch.inference_mode()
    def generate(self, sources: list[Tokens], decoding: Decoding, mix: Mix | None = None) -> list[Generated]:
        """The best hypothesis for each source; `mix` replaces p_model wherever the next token is not forced."""
        source, mask = _padded(sources, self._pad, self._network.device)
        most, limits = decoding.limits(sources, self.longest - 1 - len(self._forced))
        options: dict[str, Any] = {
            "num_beams": decoding.beam,
            "length_penalty": decoding.length_penalty,
            "max_new_tokens": most,
            "stopping_criteria": StoppingCriteriaList([_LengthLimit(limits)]),
            "do_sample": False,
            "num_return_sequences": 1,  # this and the next whatever the checkpoint's own configuration says
            "use_cache": True,
            "decoder_start_token_id": self._start,
            "forced_bos_token_id": self._forced[0] if self._forced else None,
            "past_key_values": _BeamCache(DynamicCache(), DynamicCache()),
            **decoding.further,
        }
        with self._captured(logits=True) as seen:
            if mix is not None:
                options["custom_generate"] = _mixing_first(mix, seen, bool(self._forced))
            out = self._network.generate(input_ids=source, attention_mask=mask, return_dict_in_generate=True, **options)
        rows = getattr(out, "beam_indices", None)  # [B, T], absent in greedy search
        produced = out.sequences[:, 1:].tolist()
        return [
            self._hypothesis(tokens[: limits[b]], None if rows is None else rows[b].tolist(), b)
            for b, tokens in enumerate(produced)
        ]

    def _hypothesis(self, tokens: Tokens, rows: list[int] | None, b: int) -> Generated:
        start = len(self._forced)
        stop = next((i + 1 for i in range(start, len(tokens)) if tokens[i] in self.ends), len(tokens))
        cells = [(step, b if rows is None else rows[step]) for step in range(start, stop)]
        return Generated(tokens[start:stop], cells)

    @contextmanager
    def _captured(self, logits: bool) -> Iterator[list[Tensor]]:
        """Inside, the list holds the newest input of the output projection: the state [R, T, D].

        Without `logits` the projection is handed an empty slice, so that V columns are never computed.
        """
        seen: list[Tensor] = []

        def hook(_: torch.nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor] | None:
            seen[:] = [inputs[0]]
            return None if logits else (inputs[0][:, :0],)

        handle = self._projection.register_forward_pre_hook(hook)
        try:
            yield seen
        finally:
            handle.remove()


class _BeamCache(EncoderDecoderCache):
    """Beams move within their sentence, where all have the same source: only what they produced needs reordering.

    Copying the encoder's part at each step took a third of the decoding time of a 10M-parameter model.
    """

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        self.self_attention_cache.reorder_cache(beam_idx)


class _LengthLimit(StoppingCriteria):
    """Ends the hypotheses of source b at limits[b] tokens, whatever stands beside it in the batch."""

    def __init__(self, limits: list[int]) -> None:
        self.limits = torch.tensor(limits)

    def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Tensor:  # noqa: ARG002 (transformers' signature)
        limits = self.limits.to(input_ids.device).repeat_interleave(len(input_ids) // len(self.limits))  # [R]
        return limits <= input_ids.shape[1] - 1


class _MixProcessor(LogitsProcessor):
    """generate's scores are logits in greedy search and log-probabilities in beam search: log_softmax either way.

    What is added to normalise them is taken off again behind the mix, because penalties depend on the scores' level.
    """

    def __init__(self, mix: Mix, seen: list[Tensor], language_forced: bool, last: int | None) -> None:
        self.mix, self.seen = mix, seen
        self.due = {0} if language_forced else set()
        if last is not None:
            self.due.add(last)

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        step = input_ids.shape[1] - 1  # the prompt is the decoder start alone
        if step in self.due:
            return scores
        level = torch.logsumexp(scores.float(), -1, keepdim=True)  # [R, 1]
        return self.mix(step, self.seen[0][:, -1].float(), scores.float() - level) + level


def _mixing_first(mix: Mix, seen: list[Tensor], language_forced: bool) -> Callable[..., Any]:
    """A decoding method for `generate` that mixes before its other processors.

    `generate` appends a caller's processors to its own; behind them, a mix would revive banned tokens and undo
    forced ones and penalties. In front of them every option acts on p_mix as it would on p_model.
    """

    def decode(network: Any, input_ids: Tensor, logits_processor: Any, generation_config: Any, **rest: Any) -> Any:
        last = generation_config.max_length - 2 if generation_config.forced_eos_token_id is not None else None
        ours = _MixProcessor(mix, seen, language_forced, last)
        search = network._beam_search if generation_config.num_beams > 1 else network._sample
        processors = LogitsProcessorList([ours, *logits_processor])
        return search(input_ids, logits_processor=processors, generation_config=generation_config, **rest)

    return decode


def _padded(rows: list[Tokens], pad: int, device: torch.device) -> tuple[Tensor, Tensor]:
    length = max(len(row) for row in rows)
    ids = torch.tensor([row + [pad] * (length - len(row)) for row in rows], device=device)
    mask = torch.tensor([[1] * len(row) + [0] * (length - len(row)) for row in rows], device=device)
    return ids, mask


def _output_projection(name: str, network: Any) -> tuple[torch.nn.Linear, str]:
    for path in ("lm_head", "model.decoder.output_projection"):
        try:
            module = network.get_submodule(path)
        except AttributeError:
            continue
        if isinstance(module, torch.nn.Linear):
            return module, f"input of {path}"
    raise ModelError(
        f"{name} ({type(network).__name__}) has no single linear output projection, whose input would be the state; "
        "Marian, FSMT, M2M100, NLLB, mBART and T5 models are known to work"
    )


# What a checkpoint may say of generating: what the beam search does too, or `Decoding` decides, or matters only where
# tokens are drawn or outputs asked for.
_SERVED = frozenset(
    """
    bad_words_ids bos_token_id decoder_start_token_id do_sample early_stopping eos_token_id forced_bos_token_id
    forced_eos_token_id length_penalty max_length max_new_tokens num_beams num_return_sequences output_attentions
    output_hidden_states output_logits output_scores pad_token_id renormalize_logits return_dict_in_generate
    suppress_tokens temperature top_k top_p transformers_version typical_p use_cache _from_model_config
    """.split()
)
# What means nothing where it has this value, or None.
_IDLE = {
    "repetition_penalty": 1.0, "no_repeat_ngram_size": 0, "encoder_no_repeat_ngram_size": 0, "min_length": 0,
    "encoder_repetition_penalty": 1.0, "remove_invalid_values": False, "num_beam_groups": 1, "diversity_penalty": 0.0,
    "epsilon_cutoff": 0.0, "eta_cutoff": 0.0, "low_memory": False,
}  # fmt: skip


def _rules(network: Any, start: int, forced: Tokens, ends: list[int]) -> Rules | str:
    """What the checkpoint's generation configuration asks for, or the option in it that only `generate` knows."""
    config = network.generation_config
    given = {name: value for name, value in config.to_diff_dict().items() if value is not None}
    for name, value in sorted(given.items()):
        if name not in _SERVED and value != _IDLE.get(name):
            return f"its generation configuration sets {name} to {value!r}"
    words, suppressed = config.bad_words_ids or [], set(config.suppress_tokens or [])
    end = config.forced_eos_token_id
    if any(len(word) > 1 for word in words):
        return "its generation configuration forbids words of several tokens"
    if isinstance(end, list) or suppressed & {*forced, end}:
        return "its generation configuration suppresses what it forces, or forces several ends"
    if config.early_stopping not in (None, False, True):
        return f"its generation configuration sets early_stopping to {config.early_stopping!r}"
    banned = sorted({word[0] for word in words if word[0] not in ends} | suppressed)
    return Rules(start, forced, ends, end, banned, bool(config.early_stopping), bool(config.renormalize_logits))


def _decoder(
    network: Any, projection: torch.nn.Linear, encode: Callable[..., tuple[Tensor, Tensor]], longest: int
) -> Decoder | str:
    """The network's decoder as plain tensors, or the reason why it is not known well enough."""
    bias = getattr(network, "final_logits_bias", None)
    output = Linear(projection.weight, projection.bias if bias is None else bias[0])
    decoder, config = network.get_decoder(), network.config
    if isinstance(network, T5ForConditionalGeneration):
        own = decoder.block[0].layer[0].SelfAttention
        # What the last query adds for each key, itself the last: turned around, by distance.
        distances = own.compute_bias(1, longest, past_seen_tokens=longest - 1)[0, :, 0].T.flip(0)  # [T, H]
        scale = config.d_model**-0.5 if config.scale_decoder_outputs else 1.0
        layers = [_t5_layer(block) for block in decoder.block]
        embedding = decoder.embed_tokens.weight
        return Decoder(
            encode=encode,
            embedded=lambda tokens, _: embedding[tokens],
            distances=distances,
            layers=layers,
            norm_first=True,
            state=lambda x: decoder.final_layer_norm(x) * scale,
            output=output,
            heads=own.n_heads,
            like=embedding,
        )
    kinds = MarianMTModel, FSMTForConditionalGeneration, M2M100ForConditionalGeneration, MBartForConditionalGeneration
    if not isinstance(network, kinds):
        return f"the structure of {type(network).__name__} is not known"
    return Decoder(
        encode=encode,
        embedded=_embedded(network, decoder),
        distances=None,
        layers=[_bart_layer(layer) for layer in decoder.layers],
        norm_first=isinstance(network, M2M100ForConditionalGeneration | MBartForConditionalGeneration),
        state=getattr(decoder, "layer_norm", lambda x: x),
        output=output,
        heads=config.decoder_attention_heads,
        like=decoder.embed_tokens.weight,
    )


def _embedded(network: Any, decoder: Any) -> Callable[[Tensor, Tensor], Tensor]:
    """Tokens and their positions, embedded. Each family counts positions in its own way."""
    embedding: Tensor = decoder.embed_tokens.weight
    pad: int = decoder.padding_idx
    scales = [getattr(module, "embed_scale", None) for module in (decoder, decoder.embed_tokens)]
    scale = next((float(scale) for scale in scales if scale is not None), 1.0)
    table = getattr(decoder.embed_positions, "weights", None)  # M2M100's, which is no parameter
    table = decoder.embed_positions.weight if table is None else table

    def place(tokens: Tensor, positions: Tensor) -> Tensor:
        if isinstance(network, MarianMTModel):
            return positions
        if isinstance(network, MBartForConditionalGeneration):
            return positions + int(decoder.embed_positions.offset)
        if isinstance(network, FSMTForConditionalGeneration):  # a padding token counts as none
            return positions + pad + (tokens != pad)
        return torch.where(tokens == pad, pad, positions + pad + 1)

    enter: Map = getattr(decoder, "layernorm_embedding", lambda x: x)
    return lambda tokens, positions: enter(embedding[tokens] * scale + table[place(tokens, positions)])


def _bart_layer(layer: Any) -> Layer:
    own, source = layer.self_attn, layer.encoder_attn
    return Layer(
        queries_keys_values=_fused([own.q_proj, own.k_proj, own.v_proj], own.scaling),
        attended=_linear(own.out_proj),
        attention_norm=layer.self_attn_layer_norm,
        source_queries=_fused([source.q_proj], source.scaling),
        source_keys_values=_fused([source.k_proj, source.v_proj]),
        source_attended=_linear(source.out_proj),
        source_norm=layer.encoder_attn_layer_norm,
        feed=_feed(layer.fc1, layer.activation_fn, layer.fc2),
        feed_norm=layer.final_layer_norm,
    )


def _t5_layer(block: Any) -> Layer:
    own, source, feed = block.layer[0].SelfAttention, block.layer[1].EncDecAttention, block.layer[2].DenseReluDense
    return Layer(
        queries_keys_values=_fused([own.q, own.k, own.v]),
        attended=_linear(own.o),
        attention_norm=block.layer[0].layer_norm,
        source_queries=_fused([source.q]),
        source_keys_values=_fused([source.k, source.v]),
        source_attended=_linear(source.o),
        source_norm=block.layer[1].layer_norm,
        feed=_gated(feed) if hasattr(feed, "wi_0") else _feed(feed.wi, feed.act, feed.wo),
        feed_norm=block.layer[2].layer_norm,
    )


def _linear(module: Any) -> Linear:
    return Linear(module.weight, module.bias)


def _fused(modules: list[Any], first_scale: float = 1.0) -> Linear:
    """One matrix of several, the first scaled."""
    scales = [first_scale] + [1.0] * (len(modules) - 1)
    pairs = list(zip(modules, scales, strict=True))
    weight = torch.cat([module.weight.detach() * scale for module, scale in pairs])
    lacks = modules[0].bias is None
    return Linear(weight, None if lacks else torch.cat([module.bias.detach() * scale for module, scale in pairs]))


def _feed(up: Any, activation: Map, down: Any) -> Map:
    first, second = _linear(up), _linear(down)
    return lambda x: second(activation(first(x)).to(down.weight.dtype))  # T5 keeps this one in float32


def _gated(feed: Any) -> Map:
    gate, up, down = _linear(feed.wi_0), _linear(feed.wi_1), _linear(feed.wo)
    return lambda x: down((feed.act(gate(x)) * up(x)).to(feed.wo.weight.dtype))


def _longest(config: Any, tokenizer: Any) -> int:
    """Positions that both sides can hold; models with relative positions are held to their tokenizer's limit."""
    limit = getattr(config, "max_position_embeddings", None) or tokenizer.model_max_length
    return int(limit) if limit < 100_000 else 1024


def _task_prefix(config: Any, source: str, target: str) -> str:
    tasks = getattr(config, "task_specific_params", None) or {}
    return str(tasks.get(f"translation_{source}_to_{target}", {}).get("prefix", ""))


def _target_tokenizer(tokenizer: Any) -> Any:
    """FSMT encodes with the source's vocabulary and rules whatever it is told; its copy here has the target's."""
    if not isinstance(tokenizer, FSMTTokenizer):
        return tokenizer
    other = copy.copy(tokenizer)
    other.encoder = {piece: token for token, piece in tokenizer.decoder.items()}
    other.src_lang, other.tgt_lang = tokenizer.tgt_lang, tokenizer.src_lang
    return other


def _decoder_prompt(name: str, network: Any, tokenizer: Any, source: str, target: str) -> tuple[int, Tokens]:
    """The start token and the forced language token; sets the languages of a multilingual tokenizer."""
    config = network.generation_config
    start = config.decoder_start_token_id
    if start is None:
        start = network.config.decoder_start_token_id
    codes = _language_codes(tokenizer)
    if codes:
        tokenizer.src_lang = _match_language(name, source, codes)
        tokenizer.tgt_lang = _match_language(name, target, codes)
        token = codes[tokenizer.tgt_lang]
        if isinstance(tokenizer, MBartTokenizer):  # the first mBART starts with the language itself
            return token, []
        if start is None:
            raise ModelError(f"{name}: its configuration names no decoder start token")
        return int(start), [token]
    if start is None:
        raise ModelError(f"{name}: its configuration names no decoder start token")
    forced = config.forced_bos_token_id
    return int(start), [] if forced is None else [int(forced)]


def _special_tokens(name: str, network: Any, tokenizer: Any) -> tuple[int, list[int]]:
    """Padding, and the tokens that end a sentence, the usual one first (FSMT's tokenizer does not say it)."""
    ends = network.generation_config.eos_token_id
    ends = network.config.eos_token_id if ends is None else ends
    if tokenizer.pad_token_id is None or ends is None:
        raise ModelError(f"{name}: it has no padding or no end-of-sentence token")
    return tokenizer.pad_token_id, list(ends) if isinstance(ends, list) else [ends]


def _language_codes(tokenizer: Any) -> dict[str, int]:
    """Language code -> token id, for tokenizers that have languages."""
    if hasattr(tokenizer, "lang_code_to_id"):  # M2M100 and both mBARTs
        return dict(tokenizer.lang_code_to_id)
    if type(tokenizer).__name__.startswith("Nllb"):
        special = tokenizer.get_vocab()
        return {code: special[code] for code in tokenizer.all_special_tokens if code[3:4] == "_" and len(code) == 8}
    return {}


def _match_language(name: str, wanted: str, codes: dict[str, int]) -> str:
    """The model's code for a language: the same macrolanguage in the same script, and where that is two, at home in
    the same territory (fa is pes_Arab, and prs_Arab is fa-AF). A language alone leaves the script to the model."""
    if wanted in codes:
        return wanted
    asked, known = read_language(wanted), {code: read_language(code) for code in codes}
    same = [code for code in codes if known[code].name == asked.name]
    near = same if asked.script is None and len(same) == 1 else [c for c in same if known[c].written == asked.written]
    if len(near) > 1:
        near = [code for code in near if known[code].home == asked.home] or near
    if len(near) != 1:
        script = f" in the script {asked.written}" if same and not near else ""
        choice = ", ".join(near or same or codes)
        raise InputError(f"{name} has {len(near)} languages for {wanted!r}{script}; name one of: {choice}")
    return near[0]


def _control_tokens(tokenizer: Any) -> frozenset[int]:
    """Tokens that steer the model and stand for no text. The unknown token is not one: it stands for text."""
    marian = tokenizer.convert_tokens_to_ids(getattr(tokenizer, "supported_language_codes", []))
    return frozenset(tokenizer.all_special_ids).union(_language_codes(tokenizer).values(), marian) - {
        tokenizer.unk_token_id
    }


def _around_a_source(tokenizer: Any, prefix: str, control: frozenset[int]) -> tuple[Tokens, str, Tokens]:
    """What precedes a source as tokens and as text to be tokenised with it, and the tokens that follow it.

    A prefix goes with the text, which may join its last piece, unless it holds control tokens: those are meant.
    """
    whole, bare = tokenizer("a")["input_ids"], tokenizer("a", add_special_tokens=False)["input_ids"]
    at = next(i for i in range(len(whole)) if whole[i : i + len(bare)] == bare)
    head, tail = whole[:at], whole[at + len(bare) :]
    said = tokenizer(prefix, add_special_tokens=False)["input_ids"]
    return (head, prefix, tail) if control.isdisjoint(said) else ([*head, *said], "", tail)


def _as_text(tokenizer: Any, control: frozenset[int], **text: str) -> Tokens:
    """The tokens of a text that names control tokens, none of them a control token.

    Left to itself a tokenizer takes "</s>" in a text for the token. Told to split special tokens it does so, except
    that mBART and T5 have them among their Unigram pieces and find them there: those are spelt by their characters.
    """
    ids = tokenizer(**text, add_special_tokens=False, split_special_tokens=True)["input_ids"]
    spelt: Tokens = []
    for token in ids:
        characters = list(tokenizer.convert_ids_to_tokens(token)) if token in control else []
        spelt += [c for c in tokenizer.convert_tokens_to_ids(characters) if c not in control] if characters else [token]
    return spelt


def _fingerprint(network: Any, tokenizer: Any, prompt: list[Any], probed: list[Any], pieces: list[str]) -> str:
    """Sixteen hex digits of weights, configuration, vocabularies, tokenised probe and prompt. Weights are hashed as
    bfloat16, in which a checkpoint reads the same whether it was loaded in bfloat16 or float32 (20 MB/10 ms per 10M
    parameters)."""
    digest = hashlib.blake2b(digest_size=8)
    for key, tensor in sorted(network.state_dict().items()):
        digest.update(f"{key} {tuple(tensor.shape)}".encode())
        digest.update(tensor.detach().to("cpu", torch.bfloat16).contiguous().view(torch.uint8).numpy().tobytes())
    texts = [sorted(tokenizer.get_vocab().items()), pieces, prompt, probed, _configuration(network.config)]
    digest.update(json.dumps(texts, sort_keys=True).encode())
    digest.update(type(network).__name__.encode())
    return digest.hexdigest()


def _configuration(config: Any) -> dict[str, Any]:
    """What a configuration says of its network beyond its family's defaults, to which later versions may add."""
    aside = {"_name_or_path", "architectures", "dtype", "torch_dtype", "transformers_version"}
    usual = type(config)().to_dict()
    return {k: v for k, v in config.to_dict().items() if k not in aside and (k not in usual or usual[k] != v)}


# Scripts, cases, digits, compounds, punctuation, spacing, markup, full width and composed forms: what the rules of
# tokenizers differ on.
_PROBE = (
    "That 2nd quick, brown fox (aged 3½) can't jump — “over” 1,234.56 lazy dogs; e.g. at 10:45 a.m., has it?!",
    "ÜBERGRÖSSE: Straßenverkehrsordnung, naïve façade, Ærøskøbing, Łódź, İstanbul, señor, ţară, ﬁne, e\u0301t\u00e9.",
    "Съешь же ещё этих мягких французских булок. Ξεσκεπάζω την ψυχοφθόρα βδελυγμία.",
    "שלום עולם. مرحبا بالعالم، ٣٤٥؟ नमस्ते दुनिया। สวัสดีชาวโลก",
    "我们将在明天上午的会议上讨论这个问题。日本語の文章、カタカナとひらがな。안녕하세요 세계 ＡＢＣ １２３ ｶﾀ",
    "  tabs\tand  spaces\u00a0here\u3000there\u200b ... 'quotes' \"more\" 50% $5 €6 😀 x_y",
    "<b>tag</b> &amp; {0} %s user@example.org https://example.org/a/b?c=d#e",
)


def _probe(pieces: list[str]) -> list[str]:
    """Texts that tell tokenizers apart: fixed ones, and a thousand of the vocabulary's pieces, in its own language."""
    own = pieces[:: max(1, len(pieces) // 1000)]
    words = [piece.replace("▁", "").replace("</w>", "") for piece in own]
    return [*_PROBE, *(" ".join(words[i : i + 20]) for i in range(0, len(words), 20))]


def checkpoint_path(name: str) -> str:
    """The name to remember in a datastore: a local folder by its absolute path, a hub name as it is."""
    return str(Path(name).resolve()) if Path(name).exists() else name
