"""Translation time of every finished system of a run, measured in turns in one process, relative to kNN-MT's.

A run of runs/reproduce.py leaves each system's datastore in its work folder. All are opened at once, and the same
segments, the first dev pairs, are translated by each in turn, A B C, B C A, C A B …: whatever else the machine does
falls on all alike. A ratio is the median over the rounds of a system's time over kNN-MT's in the same round.
"""

from __future__ import annotations

import argparse
import json
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any

import torch

import signature
from clknn import Decoding, Translator
from clknn.datastore import read_manifest
from clknn.evaluation import timed

REFERENCE = "kNN-MT"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, required=True, help="the work folder of a run, such as build/bench")
    parser.add_argument("--set", required=True, dest="name", help="one of its sets")
    parser.add_argument("--segments", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    stores, decoding = finished(options.work, options.name)
    if REFERENCE not in stores:
        parser.error(f"{options.work}: {options.name} has no finished {REFERENCE}; run runs/reproduce.sh first")
    translators = opened(stores, decoding)
    reference = translators[REFERENCE].datastore
    assert reference is not None
    sources = [pair.source for _, pair in islice(reference.pairs.each("tune"), options.segments)]
    seconds = in_turns(translators, sources, options.rounds)
    measured = {
        "segments": len(sources),
        "rounds": options.rounds,
        "entries": reference.entries,
        "systems": {name: compared(seconds, name) | {"index": index_of(translators[name])} for name in translators},
    }
    data = f"{options.work.name}, {options.name}: the first {len(sources)} dev pairs; decoding {json.dumps(decoding)}"
    signature.save(f"systems_{options.name}", measured, data)


def finished(work: Path, name: str) -> tuple[dict[str, Path], dict[str, Any]]:
    """The datastores of the systems whose cells are done, and how all of them decoded."""
    stores, decoding = {}, dict[str, Any]()
    for store in sorted(work.glob(f"{name}.*.store")):
        cell = store.with_suffix(".json")
        if cell.exists():
            stores[store.stem.removeprefix(f"{name}.")] = store
            decoding = json.loads(cell.read_text("utf8"))["signature"]["decoding"]
    return stores, decoding


def opened(stores: dict[str, Path], decoding: dict[str, Any]) -> dict[str, Translator]:
    """The base model and every system, all with one model in memory."""
    settings = Decoding(**decoding)
    first = Translator.open(stores[REFERENCE], decoding=settings)
    translators = {"base": first.base, REFERENCE: first}
    for name, store in stores.items():
        if name != REFERENCE:
            translators[name] = Translator.open(store, first.model, decoding=settings)
    return translators


def in_turns(translators: dict[str, Translator], sources: list[str], rounds: int) -> dict[str, list[float]]:
    names, seconds = list(translators), {name: list[float]() for name in translators}
    for name in names:  # warm up: caches, and pages of the index that nothing has touched yet
        timed(translators[name], sources[:8])
    for turn in range(rounds):
        begin = turn % len(names)
        for name in names[begin:] + names[:begin]:
            seconds[name].append(timed(translators[name], sources)[1])
    return seconds


def compared(seconds: dict[str, list[float]], name: str) -> dict[str, float]:
    ratios = [ours / theirs for ours, theirs in zip(seconds[name], seconds[REFERENCE], strict=True)]
    return {
        "seconds": round(median(seconds[name]), 3),
        f"time / {REFERENCE}": round(median(ratios), 3),
        "least": round(min(ratios), 3),
        "most": round(max(ratios), 3),
    }


def index_of(translator: Translator) -> str:
    if translator.datastore is None:
        return ""
    description = read_manifest(translator.datastore.path).measured["project"]["index"]
    return f"{description}, keys of {translator.datastore.index.keys.shape[1]}"


if __name__ == "__main__":
    torch.manual_seed(0)
    main()
