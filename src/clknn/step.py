"""One step of a decoder for many sentences at once: the tokens chosen last in, states and logits out.

`Lanes` is what the beam search sees: sentences join, advance by a token in each of their W hypotheses, and leave.
`TransformerLanes` does it for the transformers of translation (self-attention, attention to the source, feed-forward)
on plain tensors that the model hands over as a `Decoder`. It hides the cache: what W hypotheses of a sentence have
produced stays in the slots where it was written, and each attends through a mask to those of its own ancestry, so that
choosing among hypotheses moves bits and no keys or values; slots in nobody's ancestry are squeezed out now and then.
The trade-off: attention is computed for the other hypotheses' slots too. They soon share all but their last tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional

Map = Callable[[Tensor], Tensor]
TYPICAL_ROWS = 64  # that matrices are laid out for
SQUEEZE = 8  # steps after which slots are squeezed out


class Lanes(Protocol):
    """Sentences in decoding, one lane each, with W hypotheses in each lane; row l * W + w is hypothesis w of lane l."""

    def join(self, sources: list[list[int]]) -> None:
        """Puts new sentences behind the last lane. All their hypotheses are empty."""

    def leave(self, lane: int) -> None:
        """Frees a lane; the last one takes its place."""

    def advance(self, tokens: Tensor, parents: Tensor) -> Tensor:
        """Appends tokens [L, W] to the hypotheses numbered parents [L, W] of the same lane; the states after it [R, D].

        The first token of a sentence is the decoder's start.
        """

    def logits(self, states: Tensor) -> Tensor:
        """[R, V] float32."""


@dataclass(frozen=True)
class Rules:
    """What the checkpoint says of generating, whatever the options."""

    start: int
    forced: list[int]  # what each hypothesis begins with: a language, or nothing
    ends: list[int]
    forced_end: int | None  # what a hypothesis of the greatest length ends with
    banned: list[int]
    early_stopping: bool  # whether W finished hypotheses are enough, whatever the others promise
    renormalised: bool  # whether what is left after the bans sums to one


@dataclass(frozen=True)
class Steps:
    """How a model takes steps of its own: `lanes` makes empty lanes of so many hypotheses each."""

    rules: Rules
    lanes: Callable[[int], Lanes]


class Linear:
    """A matrix laid out for oneDNN where it can be, which multiplies it 2 to 4 times as fast as MKL does on an AMD CPU.

    Of 8,001 x 256 with 5, 40 and 160 rows, one thread of a Zen 5: 0.15, 0.74, 3.0 ms where MKL took 0.69, 1.9, 7.2.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.outputs = len(weight)
        self._bias = bias  # [out]
        self._weight = weight  # [out, in]
        backend: Any = torch.backends.mkldnn
        self._packed = weight.device.type == "cpu" and backend.is_available()
        if self._packed:
            self._weight = torch.ops.mkldnn._reorder_linear_weight(weight.detach().contiguous(), TYPICAL_ROWS)

    def __call__(self, x: Tensor) -> Tensor:
        if not self._packed:
            return functional.linear(x, self._weight, self._bias)
        made: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._weight, self._bias, "none", [], "")
        return made


@dataclass(frozen=True)
class Layer:
    """One decoder layer; H heads of E each."""

    queries_keys_values: Linear  # D -> 3HE, queries already scaled
    attended: Linear  # HE -> D
    attention_norm: Map
    source_queries: Linear  # D -> HE, already scaled
    source_keys_values: Linear  # D of the encoder -> 2HE
    source_attended: Linear  # HE -> D
    source_norm: Map
    feed: Map
    feed_norm: Map


@dataclass(frozen=True)
class Decoder:
    """A transformer's decoder, and its encoder as a function."""

    encode: Callable[[list[list[int]]], tuple[Tensor, Tensor]]  # sources -> states [B, S, D], mask [B, S]
    embedded: Callable[[Tensor, Tensor], Tensor]  # tokens [R], their positions [R] -> [R, D]
    distances: Tensor | None  # [T, H] added to attention by how far back it looks; absent where positions are embedded
    layers: list[Layer]
    norm_first: bool  # x + f(norm(x)), else norm(x + f(x))
    state: Map  # what is left to do before the output projection
    output: Linear  # D -> V
    heads: int
    like: Tensor  # any tensor of the type and on the device that all is computed in


class TransformerLanes:
    """The lanes of a transformer. Tensors have room for more lanes, tokens and source positions than are in use."""

    def __init__(self, decoder: Decoder, beam: int) -> None:
        self._decoder, self._beam = decoder, beam
        self._ages: list[int] = []  # tokens produced in each lane
        self._used: list[int] = []  # slots in use in each lane, C at most
        self._until_squeeze = SQUEEZE
        self._lengths: list[int] = []  # source tokens of each lane
        like, e = decoder.like, decoder.layers[0].source_queries.outputs // decoder.heads
        of_layers = len(decoder.layers), 2
        self._cache = like.new_zeros(*of_layers, 0, decoder.heads, 0, e)  # [layers, 2, L, H, C, E] keys, values
        self._source = like.new_zeros(*of_layers, 0, decoder.heads, 0, e)  # [layers, 2, L, H, S, E]
        self._source_mask = like.new_zeros(0, 1, 1, 0)  # [L, 1, 1, S] 0, or minus infinity on padding
        self._ancestry = like.new_zeros(0, beam, 0, dtype=torch.bool)  # [L, W, C] which slots a hypothesis is made of
        self._written = like.new_zeros(0, 0, dtype=torch.long)  # [L, C] the age at which a slot was written

    def join(self, sources: list[list[int]]) -> None:
        decoder, old = self._decoder, len(self._ages)
        states, mask = decoder.encode(sources)  # [B, S, D], [B, S]
        self._ages += [0] * len(sources)
        self._used += [0] * len(sources)
        self._lengths += [len(source) for source in sources]
        n, s = len(self._ages), mask.shape[1]
        self._cache = _with_room(self._cache, {2: n})
        self._ancestry = _with_room(self._ancestry, {0: n})
        self._written = _with_room(self._written, {0: n})
        self._source = _with_room(self._source, {2: n, 4: s})
        self._source_mask = _with_room(self._source_mask, {0: n, 3: s}, -math.inf)
        self._ancestry[old:n] = False
        self._source_mask[old:n] = -math.inf
        self._source_mask[old:n, 0, 0, :s].masked_fill_(mask.bool(), 0.0)
        for layer, source in zip(decoder.layers, self._source, strict=True):
            made = layer.source_keys_values(states).view(*mask.shape, 2, decoder.heads, -1)  # [B, S, 2, H, E]
            source[:, old:n, :, :s] = made.permute(2, 0, 3, 1, 4)

    def leave(self, lane: int) -> None:
        last = len(self._ages) - 1
        if lane != last:
            used = self._used[last]
            self._cache[:, :, lane, :, :used] = self._cache[:, :, last, :, :used]
            self._source[:, :, lane] = self._source[:, :, last]
            self._source_mask[lane] = self._source_mask[last]
            self._ancestry[lane] = self._ancestry[last]
            self._written[lane] = self._written[last]
        for of_lanes in (self._ages, self._used, self._lengths):
            of_lanes[lane] = of_lanes[last]
            of_lanes.pop()

    def advance(self, tokens: Tensor, parents: Tensor) -> Tensor:
        decoder, (n, w) = self._decoder, tokens.shape
        tokens, parents = tokens.to(self._cache.device), parents.to(self._cache.device)
        lane = torch.arange(n, device=tokens.device)[:, None]  # [L, 1]
        self._ancestry[:n] = self._ancestry[lane, parents]
        self._until_squeeze -= 1
        if not self._until_squeeze:
            self._squeeze(lane)
        used = max(self._used) + w
        self._cache = _with_room(self._cache, {4: used})
        self._ancestry = _with_room(self._ancestry, {2: used})
        self._written = _with_room(self._written, {1: used})
        age = torch.tensor(self._ages, device=tokens.device)[:, None]  # [L, 1]
        place = torch.arange(w, device=tokens.device)  # [W]
        slots = torch.tensor(self._used, device=tokens.device)[:, None] + place  # [L, W] where this step is written
        self._ancestry[lane, place, slots] = True
        self._written[lane, slots] = age
        mask = self._mask(self._ancestry[:n, :, :used], age - self._written[:n, :used])  # [L, 1 or H, W, C]
        lengths = max(self._lengths)
        source_mask = self._source_mask[:n, ..., :lengths]  # [L, 1, 1, S]
        x = decoder.embedded(tokens.flatten(), age.expand(n, w).flatten())  # [R, D]

        for layer, cache, source in zip(decoder.layers, self._cache, self._source, strict=True):
            y = self._before(layer.attention_norm, x)
            made = layer.queries_keys_values(y).view(n, w, 3, decoder.heads, -1)  # [L, W, 3, H, E]
            cache[:, lane, :, slots] = made[:, :, 1:]
            keys, values = cache[:, :n, :, :used]  # [L, H, C, E]
            x = self._after(layer.attention_norm, x + layer.attended(_attention(made[:, :, 0], keys, values, mask)))
            y = self._before(layer.source_norm, x)
            queries = layer.source_queries(y).view(n, w, decoder.heads, -1)  # [L, W, H, E]
            keys, values = source[:, :n, :, :lengths]  # [L, H, S, E]
            attended = _attention(queries, keys, values, source_mask)
            x = self._after(layer.source_norm, x + layer.source_attended(attended))
            x = self._after(layer.feed_norm, x + layer.feed(self._before(layer.feed_norm, x)))

        self._ages = [one + 1 for one in self._ages]
        self._used = [one + w for one in self._used]
        return decoder.state(x)

    def logits(self, states: Tensor) -> Tensor:
        return self._decoder.output(states).float()

    def _before(self, norm: Map, x: Tensor) -> Tensor:
        return norm(x) if self._decoder.norm_first else x

    def _after(self, norm: Map, x: Tensor) -> Tensor:
        return x if self._decoder.norm_first else norm(x)

    def _squeeze(self, lane: Tensor) -> None:
        """Moves the slots of each lane [L, 1] that are in some ancestry to its front, in their order."""
        n, used, self._until_squeeze = len(lane), max(self._used), SQUEEZE
        alive = self._ancestry[:n, :, :used].any(1)  # [L, C]
        self._used = alive.sum(1).tolist()
        order = (~alive).byte().argsort(dim=1, stable=True)[:, : max(self._used)]  # [L, C']
        kept = order.shape[1]
        self._written[:n, :kept] = self._written[lane, order]
        self._ancestry[:n, :, :kept] = self._ancestry[:n].gather(2, order[:, None].expand(-1, self._beam, -1))
        self._ancestry[:n, :, kept:] = False
        for cache in self._cache.flatten(0, 1):  # [L, H, C, E]
            cache[:n, :, :kept] = cache[lane, :, order].transpose(1, 2)

    def _mask(self, ancestry: Tensor, back: Tensor) -> Tensor:
        """What is added to attention: minus infinity on others' slots, else nothing, or what going so far back says."""
        if self._decoder.distances is None:
            return torch.zeros_like(ancestry, dtype=self._cache.dtype).masked_fill_(~ancestry, -math.inf)[:, None]
        added = self._decoder.distances[back.clamp(min=0)].transpose(1, 2)  # [L, H, C]
        return added[:, :, None].masked_fill(~ancestry[:, None], -math.inf)


def _attention(queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
    """Of queries [L, W, H, E] to keys and values [L, H, n, E]: [R, HE]."""
    near = queries.transpose(1, 2) @ keys.transpose(2, 3)  # [L, H, W, n]
    share = torch.softmax(near.add_(mask), -1)
    return (share @ values).transpose(1, 2).flatten(2).flatten(0, 1)


def _with_room(tensor: Tensor, wanted: dict[int, int], empty: float = 0.0) -> Tensor:
    """The tensor, or one with room for so many in these dimensions: twice as many, where it has to be copied."""
    if all(tensor.shape[dimension] >= least for dimension, least in wanted.items()):
        return tensor
    shape = list(tensor.shape)
    for dimension, least in wanted.items():
        if shape[dimension] < least:
            shape[dimension] = max(least, 2 * shape[dimension])
    larger = tensor.new_full(shape, empty)  # keys and values: what is masked is multiplied by 0 and must be finite
    larger[tuple(slice(n) for n in tensor.shape)] = tensor
    return larger
