"""Force decoding against the bare forward pass of the same batches, in one run.

The bare pass has its tensors ready and does nothing but the network: once as other toolkits run it, logits included,
and once with the states alone. Force decoding tokenises, batches, converts and writes to disk as well.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

import torch

import signature
from clknn import Tally, load_model
from clknn import states as forced
from clknn.corpus import read_pairs
from clknn.model import TransformersModel

ROOT = Path(__file__).parent.parent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=4096)
    count = parser.parse_args().pairs
    model = load_model(str(ROOT / "examples/de-en-small"), "de", "en")
    assert isinstance(model, TransformersModel)
    memory = read_pairs([ROOT / "examples/libreoffice-help.de-en.tmx.gz"], "de", "en", Tally())
    pairs = [pair for pair, _ in zip(memory, range(count), strict=False)]
    batches, entries = [], 0  # of [B, S], [B, S], [B, T]
    for window in forced.windows(model, iter(enumerate(pairs))):
        sources, targets = [row.source for row in window], [row.target for row in window]
        entries += sum(len(row) for row in targets)
        for batch in forced.batches(range(len(window)), sources, targets, forced.BATCH_TOKENS):
            batches.append(_tensors(model, [sources[i] for i in batch], [targets[i] for i in batch]))
    for batch in batches[:3]:  # warm up
        _bare(model, [batch], logits=True)
    seconds = {
        "bare with logits": _bare(model, batches, logits=True),
        "bare, states alone": _bare(model, batches, logits=False),
        "force decoding": _whole(model, pairs),
    }
    rate = {name: entries / taken for name, taken in seconds.items()}
    measured = {f"target tokens per second, {name}": round(r) for name, r in rate.items()}
    for bare in ("bare with logits", "bare, states alone"):
        measured[f"force decoding / {bare}"] = round(rate["force decoding"] / rate[bare], 3)
    signature.save(
        "force_decoding", measured, f"the first {count} pairs of the example memory, {entries} target tokens"
    )


def _tensors(model: TransformersModel, sources: list[list[int]], targets: list[list[int]]) -> dict[str, torch.Tensor]:
    pad = model._pad

    def padded(rows: list[list[int]]) -> torch.Tensor:
        longest = max(map(len, rows))
        return torch.tensor([row + [pad] * (longest - len(row)) for row in rows])

    source = padded(sources)
    return {
        "input_ids": source,
        "attention_mask": (source != pad).long(),
        "decoder_input_ids": padded([[model._start, *row[:-1]] for row in targets]),
    }


@torch.inference_mode()
def _bare(model: TransformersModel, batches: list[dict[str, torch.Tensor]], logits: bool) -> float:
    started = time.perf_counter()
    with model._captured(logits):
        for batch in batches:
            model._network(**batch, use_cache=False)
    return time.perf_counter() - started


def _whole(model: TransformersModel, pairs: list) -> float:
    numbered = list(enumerate(pairs))
    with tempfile.TemporaryDirectory() as folder:
        started = time.perf_counter()
        forced.write_states(model, lambda _: iter(numbered), Path(folder), Tally())
        return time.perf_counter() - started


if __name__ == "__main__":
    main()
