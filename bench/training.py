"""Training the adapter: steps per second, share of sampling, and the time of all class centres, for two recipes.

The entries are real: the states of the example memory, force-decoded once into a temporary datastore.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import torch

import signature
from clknn import PAPER, AdapterSettings, Tally, adaptation, datastore, load_model
from clknn import adapter as adapters
from clknn.corpus import read_pairs, write_tmx

ROOT = Path(__file__).parent.parent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=4096)
    parser.add_argument("--store", type=Path, help="use the states of this datastore instead")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        store = options.store or _store(Path(folder), options.pairs)
        manifest = datastore.read_draft(store)
        assert manifest is not None
        states, values = (datastore.array(store, manifest, name) for name in ("states", "values"))
        measured = {"entries": len(values)}
        for name, settings, steps in (("default", AdapterSettings(), 100), ("paper", PAPER, 400)):
            some = replace(settings, steps=steps, validate_every=steps, warmup=10)
            trained = adapters.train(states, values, some, lambda _: 0.0)
            last = trained.curve[-1]
            measured[f"{name}: steps per second"] = round(last.step / last.seconds, 1)
            measured[f"{name}: anchors per second"] = round(last.step * settings.batch / last.seconds)
            measured[f"{name}: share of sampling"] = round(last.sampling, 3)
        classes = adapters.Classes.of(values)
        started = time.perf_counter()
        adapters.class_centres(trained.adapter, states, classes)
        measured["seconds for the centres of all entries"] = round(time.perf_counter() - started, 2)
        measured["classes"] = len(classes.counts)
    signature.save("training", measured, "states of the example memory" if options.store is None else "a datastore")


def _store(folder: Path, pairs: int) -> Path:
    model = load_model(str(ROOT / "examples/de-en-small"), "de", "en")
    memory = read_pairs([ROOT / "examples/libreoffice-help.de-en.tmx.gz"], "de", "en", Tally())
    some = (pair for pair, _ in zip(memory, range(pairs), strict=False))
    write_tmx(some, folder / "part.tmx", "de", "en")
    adaptation.build(folder / "store", [folder / "part.tmx"], model, hold_out=0)
    return folder / "store"


if __name__ == "__main__":
    torch.manual_seed(0)
    main()
