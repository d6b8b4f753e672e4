"""Decoding: transformers' generate, clknn without and with a datastore, and CTranslate2 where it is installed.

The same model and sentences, beam 5, in batches of 1, 8 and 32. The systems take turns, sentence block by sentence
block, so that whatever else the machine does falls on all of them; a ratio is of the sums over all blocks.
"""

from __future__ import annotations

import argparse
import importlib.util
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import signature
from clknn import Tally, adaptation, datastore, load_model
from clknn.corpus import read_pairs, write_tmx
from clknn.decoder import decode
from clknn.mixing import Mixing
from clknn.model import Decoding, TransformersModel

ROOT = Path(__file__).parent.parent
EXAMPLES = ROOT / "examples"
MIXING = Mixing(16, 0.1, 0.4, scaled=True)

# Sources, and how many at a time -> their hypotheses' tokens.
System = Callable[[list[list[int]], int], list[list[int]]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=EXAMPLES / "de-en-small")
    parser.add_argument("--pairs", type=int, default=4096, help="stored pairs")
    parser.add_argument("--sentences", type=int, default=192)
    parser.add_argument("--longest", type=int, default=100, help="tokens of a translation, at most")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--toy", action="store_true", help="the smallest size that runs everything")
    options = parser.parse_args()
    if options.toy:
        options.pairs, options.sentences, options.longest, options.batch = 48, 6, 8, [3]
    torch.set_num_threads(options.threads)
    model = load_model(str(options.model), "de", "en")
    assert isinstance(model, TransformersModel)
    lines = (EXAMPLES / "libreoffice-test.de-en.tsv").read_text(encoding="utf8").splitlines()[: options.sentences]
    sources = sorted(model.tokenise_sources([line.split("\t")[0] for line in lines]), key=len)
    decoding = Decoding(5, max_new_tokens=options.longest)
    with tempfile.TemporaryDirectory() as folder:
        systems = _systems(model, decoding, Path(folder), options.pairs)
        systems |= _ctranslate2(model, options.model, decoding, Path(folder), options.threads)
        measured: dict[str, Any] = {}
        for batch in options.batch:
            measured[f"batch {batch}"] = _measured(systems, sources, batch)
    data = f"{len(sources)} sentences of the example test set, {options.pairs} stored pairs, {options.model.name}"
    signature.save("decode", measured, data)


def _systems(model: TransformersModel, decoding: Decoding, folder: Path, pairs: int) -> dict[str, System]:
    memory = read_pairs([EXAMPLES / "libreoffice-help.de-en.tmx.gz"], "de", "en", Tally())
    write_tmx((pair for pair, _ in zip(memory, range(pairs), strict=False)), folder / "part.tmx", "de", "en")
    adaptation.build(folder / "store", [folder / "part.tmx"], model, hold_out=0)
    adaptation.project(folder / "store", model)
    store = datastore.open_datastore(folder / "store", model)

    def generate(sources: list[list[int]], batch: int) -> list[list[int]]:
        parts = [sources[i : i + batch] for i in range(0, len(sources), batch)]
        return [generated.tokens for part in parts for generated in model.generate(part, decoding)]

    def clknn(sources: list[list[int]], batch: int) -> list[list[int]]:
        return [h.tokens for h in decode(model, sources, decoding, batch=batch)]

    def clknn_with_datastore(sources: list[list[int]], batch: int) -> list[list[int]]:
        return [h.tokens for h in decode(model, sources, decoding, store, MIXING, batch=batch)]

    return {"generate": generate, "clknn": clknn, "clknn with a datastore": clknn_with_datastore}


def _ctranslate2(
    model: TransformersModel, checkpoint: Path, decoding: Decoding, folder: Path, threads: int
) -> dict[str, System]:
    """CTranslate2 on the same checkpoint; nothing where it is not installed."""
    if importlib.util.find_spec("ctranslate2") is None:
        return {}
    import ctranslate2

    name = str(folder / "converted")
    ctranslate2.converters.TransformersConverter(str(checkpoint)).convert(name)
    systems: dict[str, System] = {}
    for precision in ("float32", "int8"):
        translator = ctranslate2.Translator(name, compute_type=precision, intra_threads=threads)

        def translate(sources: list[list[int]], batch: int, translator: Any = translator) -> list[list[int]]:
            pieces = [model._tokenizer.convert_ids_to_tokens(source) for source in sources]
            results = translator.translate_batch(
                pieces, beam_size=decoding.beam, max_batch_size=batch, max_decoding_length=decoding.max_new_tokens
            )
            return [model._tokenizer.convert_tokens_to_ids(result.hypotheses[0]) for result in results]

        systems[f"CTranslate2 {precision}"] = translate
    return systems


def _measured(systems: dict[str, System], sources: list[list[int]], batch: int) -> dict[str, Any]:
    seconds, produced = dict.fromkeys(systems, 0.0), {name: list[list[int]]() for name in systems}
    for system in systems.values():  # warm up
        system(sources[:batch], batch)
    block = max(2 * batch, 16)
    for start in range(0, len(sources), block):
        for name, system in systems.items():
            began = time.perf_counter()
            produced[name] += system(sources[start : start + block], batch)
            seconds[name] += time.perf_counter() - began
    tokens = {name: sum(map(len, rows)) for name, rows in produced.items()}
    same = sum(a == b for a, b in zip(produced["generate"], produced["clknn"], strict=True))
    return {
        "target tokens per second": {name: round(tokens[name] / taken) for name, taken in seconds.items()},
        "sentences per second": {name: round(len(sources) / taken, 2) for name, taken in seconds.items()},
        "times as fast as generate": {name: round(seconds["generate"] / taken, 2) for name, taken in seconds.items()},
        "clknn's translations that are generate's": f"{same} of {len(sources)}",
    }


if __name__ == "__main__":
    main()
