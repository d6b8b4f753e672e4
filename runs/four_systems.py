"""Base, kNN-MT, CLKNN and CLKNN+w* on one data set, with the same model and decoding: one row each, one result file.

The memory is force-decoded once; each system projects and tunes by itself, on the dev pairs only, and translates the
test pairs. p-values are against the base model and against kNN-MT. Retrieval accuracy is measured for the test pairs,
with the memory as the datastore and with the dev pairs as the datastore (as the paper does).

    python runs/four_systems.py --name koran --train D/train.de.gz --train D/train.en.gz --dev … --test … \\
        --model M --source de --target en --out /tmp/koran.store
"""

from __future__ import annotations

import json
import os
import platform
import sys
import time
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer

from clknn import AdapterSettings, Tally, Translator, adaptation, datastore, load_model
from clknn import index as indices
from clknn.corpus import read_pairs
from clknn.evaluation import compare, refuse_unscorable, retrieval_accuracy
from clknn.projection import Projection

Files = Annotated[list[Path], typer.Option(help="One file, or the option twice for two aligned ones.")]


def main(
    name: Annotated[str, typer.Option(help="Of the result file.")],
    train: Files,
    dev: Files,
    test: Files,
    model: Annotated[str, typer.Option()],
    source: Annotated[str, typer.Option()],
    target: Annotated[str, typer.Option()],
    out: Annotated[Path, typer.Option(help="Where the datastore goes; kept, and resumed from.")],
    result: Annotated[Path | None, typer.Option(help="By default results/NAME.json.")] = None,
    test_pairs: Annotated[int | None, typer.Option(help="Only the first of the test pairs.")] = None,
    steps: Annotated[int | None, typer.Option(help="Training steps, instead of the default.")] = None,
) -> None:
    refuse_unscorable(target)
    loaded = load_model(model, source, target)
    pairs = list(read_pairs(test, source, target, Tally()))[:test_pairs]
    sources, references = [p.source for p in pairs], [p.target for p in pairs]
    settings = AdapterSettings() if steps is None else AdapterSettings(steps=steps)
    built = adaptation.build(out, train, loaded, hold_out=0, report=_say, tune_on=dev)
    forced_dev = adaptation.force_held_out(out, built, loaded, "tune")
    forced_test = adaptation.force_pairs(loaded, sources, references)
    assert forced_dev is not None
    assert forced_test is not None

    systems: dict[str, list[str]] = {}
    facts: dict[str, dict[str, Any]] = {}

    def translate(system: str, translator: Translator) -> None:
        started = time.perf_counter()
        systems[system] = [t.text for t in translator.translate(sources)]
        facts[system] = {"seconds": round(time.perf_counter() - started, 1)}
        _say(system, len(sources), len(sources), f"{facts[system]['seconds']} s")

    def retrieve(system: str, projection: Projection) -> None:
        keys = projection(forced_dev.states).numpy().astype(np.float16)
        queries = projection(forced_test.states).numpy()
        near = indices.exact_search(keys, queries, max(adaptation.KS), projection.normed)
        values = forced_dev.truth.numpy()[near.ids]
        facts[system] |= {
            "accuracy, memory as datastore": adaptation.accuracy_of(translators[system], sources, references),
            "accuracy, dev as datastore": retrieval_accuracy(
                values, near.found, forced_test.truth.numpy(), adaptation.KS
            ),
        }

    translate("base", Translator(loaded))
    translators: dict[str, Translator] = {}
    for system, vanilla, scaled in (("kNN-MT", True, False), ("CLKNN", False, False), ("CLKNN+w*", False, True)):
        if not vanilla:
            adaptation.train(out, settings, loaded, report=_say)
        adaptation.project(out, loaded, vanilla=vanilla, report=_say)
        manifest = adaptation.tune(out, loaded, scaled, report=_say)
        translators[system] = translator = Translator.open(out, loaded)
        translate(system, translator)
        facts[system] |= {"mixing": asdict(manifest.mixing), "measured": manifest.measured}
        if not scaled:
            assert translator.datastore is not None
            retrieve(system, translator.datastore.projection)

    against_base = compare(systems, references, target)
    against_knn = compare({k: v for k, v in systems.items() if k != "base"}, references, target)
    for system, score in against_base.scores.items():
        facts[system] |= asdict(score)
        if system in against_knn.scores:
            facts[system]["p_bleu_against_knn"] = against_knn.scores[system].p_bleu
    record = {
        "name": name,
        "systems": facts,
        "segments": len(pairs),
        "entries": built.entries,
        "pairs": built.stored,
        "settings": asdict(settings),
        "signature": {
            "bleu": against_base.bleu_signature,
            "chrf": against_base.chrf_signature,
            "decoding": asdict(Translator(loaded).decoding),
            "model": loaded.fingerprint,
            "versions": {p: version(p) for p in ("clknn", "torch", "transformers", "faiss-cpu", "sacrebleu")},
            "machine": f"{platform.machine()}, {os.cpu_count()} cores, {torch.get_num_threads()} threads",
            "command": "python " + " ".join([sys.argv[0], *(Path(a).name if "/" in a else a for a in sys.argv[1:])]),
        },
    }
    result = result or Path("results") / f"{name}.json"
    result.parent.mkdir(exist_ok=True)
    result.write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n", encoding="utf8")
    for system, row in facts.items():
        typer.echo(f"{system:10} BLEU {row['bleu']:.2f} chrF {row['chrf']:.2f} BP {row['brevity_penalty']:.3f}")
    assert datastore.verify(out) == []


def _say(stage: str, done: float, total: float, note: str = "") -> None:
    if done < total and stage != "train":
        return
    typer.echo(f"{time.strftime('%H:%M:%S')} {stage} {done:,.0f}/{total:,.0f} {note}", err=True)


if __name__ == "__main__":
    typer.run(main)
