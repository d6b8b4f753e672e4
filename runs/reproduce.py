"""Every system on every set of a configuration, with one model, one way of decoding and one way of tuning: one table.

A configuration (runs/*.toml) names the model, the sets with their train, dev and test files, and general text on which
nothing should be lost. Each set is force-decoded once; each system then makes its keys, chooses its combiner on the dev
pairs alone, and translates. A cell, one system on one set, is a file in the work folder; a run that was interrupted
goes on from the cells it finds, and refuses those of another configuration. From all cells come the table with its
significance, results/NAME.json. `runs/reproduce.sh` runs it; docs/make_pages.py draws the tables.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import time
import tomllib
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer

from clknn import Decoding, Pair, Tally, Translator, adaptation, datastore, load_model
from clknn import index as indices
from clknn.adaptation import ADAPTIVE, CKMT_ADAPTIVE, CLKNN, GATED, KNN_MT, KSTER, Method
from clknn.adapter import AdapterSettings
from clknn.corpus import fold, read_pairs
from clknn.errors import InputError
from clknn.evaluation import compare, retrieval_accuracy
from clknn.methods.adaptive import MetaKTuner
from clknn.methods.ckmt import CkmtSettings
from clknn.model import Model
from clknn.tuning import Grid

ROOT = Path(__file__).parent.parent
REFERENCE = "kNN-MT"  # what every other system is compared with
BASELINES = "kNN-MT", "Adaptive kNN-MT", "KSTER", "CLKNN", "CLKNN+w*", "CKMT"  # as published, trained on the set itself


@dataclass(frozen=True)
class System:
    name: str
    method: Method
    elsewhere: bool = False  # the adapter is trained on the states of another set


def systems(config: dict[str, Any]) -> list[System]:
    """The rows of the table, so ordered that each representation is made once."""
    asked = config.get("adapter", {})
    asked |= {name: asked[name] or None for name in ("refresh", "centre_entries") if name in asked}  # TOML has no None
    contrast = replace(AdapterSettings(), **asked)
    ckmt = replace(CkmtSettings(), **config.get("ckmt", {}))
    fixed, clknn = Grid(scaled=False), replace(CLKNN, adapter=contrast)
    rows = [
        System(REFERENCE, KNN_MT),
        System("Adaptive kNN-MT", ADAPTIVE),
        System("KSTER", KSTER),
        System("CLKNN", replace(clknn, tuner=fixed)),
        System("CLKNN+w*", clknn),
        System("CLKNN, meta-k", replace(clknn, tuner=MetaKTuner())),
        System("CLKNN, gate", replace(clknn, tuner=GATED.tuner)),
        System("refined, fixed", replace(clknn, refined=GATED.refined, tuner=fixed)),
        System("gated", replace(GATED, adapter=contrast)),
        System("CKMT", replace(CKMT_ADAPTIVE, adapter=ckmt)),
        System("CLKNN+w*, other domain", clknn, elsewhere=True),
    ]
    wanted = config.get("systems")
    if wanted and (unknown := set(wanted) - {row.name for row in rows}):
        raise InputError(f"systems {sorted(unknown)} are not known; choose among {[row.name for row in rows]}")
    return [row for row in rows if not wanted or row.name in wanted]


def main(
    config: Annotated[Path, typer.Argument(help="A TOML file of runs/.")],
    data: Annotated[Path, typer.Option(help="What the configuration's paths are relative to.")] = Path(),
    work: Annotated[Path, typer.Option(help="Where datastores and cells go; kept, and resumed from.")] = Path("build"),
    only: Annotated[list[str] | None, typer.Option(help="These sets alone; other cells stay for another run.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Subsets: minutes, to see that it runs.")] = False,
    results: Annotated[Path, typer.Option(help="Where the table goes.")] = ROOT / "results",
) -> None:
    settings = tomllib.loads(config.read_text(encoding="utf8"))
    if quick:
        settings |= settings.pop("quick")
    settings.pop("quick", None)
    name = config.stem + ("-quick" if quick else "")
    sets = list(settings["sets"])
    if strangers := set(only or ()) - set(sets):
        raise InputError(f"{config}: has no sets {sorted(strangers)}; choose among {sets}")
    bench = Bench(settings, data, work / name)
    bench.refuse_another_configuration()
    for set_name in only or sets:
        bench.build(set_name)
        bench.base(set_name)
        for system in systems(settings):
            bench.cell(set_name, system)
    words = f"runs/reproduce.sh runs/{config.name}{' --data DATA' * (data != Path())}{' --quick' * quick}"
    record = {"name": name, **bench.table(only or sets, words + "".join(f" --only {each}" for each in only or ()))}
    results.mkdir(exist_ok=True)
    (results / f"{name}.json").write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n", encoding="utf8")


class Bench:
    """The sets of one configuration, their datastores and their cells."""

    def __init__(self, config: dict[str, Any], data: Path, work: Path) -> None:
        self.config, self.data, self.work = config, data, work
        self.model: Model = load_model(str(self._path(config["model"])), config["source"], config["target"])
        self.decoding = Decoding(beam=config.get("beam", 5), length_penalty=config.get("length_penalty", 1.0))
        # Which systems are in the table changes no cell.
        fixed = [{key: value for key, value in config.items() if key != "systems"}, self.model.fingerprint]
        digest = hashlib.blake2b(json.dumps(fixed, sort_keys=True).encode(), digest_size=8)
        self.signature = {
            "configuration": digest.hexdigest(),
            "model": self.model.fingerprint,
            "decoding": asdict(self.decoding),
            "versions": {p: version(p) for p in ("clknn", "torch", "transformers", "faiss-cpu", "sacrebleu")},
            "machine": f"{platform.machine()}, {os.cpu_count()} cores, {torch.get_num_threads()} threads",
        }

    def _path(self, name: str) -> Path | str:
        """A path of the configuration; a model's hub name stays what it is."""
        return self.data / name if (self.data / name).exists() else name

    def _files(self, names: list[str]) -> list[Path]:
        return [self.data / name for name in names]

    def pairs(self, names: list[str], most: int | None) -> list[Pair]:
        """Segments to translate, the first of each file."""
        read = read_pairs(self._files(names), self.config["source"], self.config["target"], Tally())
        return adaptation.fitting(
            self.model, [pair for pair, _ in zip(read, range(most or 10**9), strict=False)], Tally()
        )

    def refuse_another_configuration(self) -> None:
        """What one table is made of was made in one way."""
        self.work.mkdir(parents=True, exist_ok=True)
        mark, mine = self.work / "configuration.json", self.signature["configuration"]
        if mark.exists() and (before := json.loads(mark.read_text())) != mine:
            raise InputError(
                f"{self.work}: made with configuration {before}, and this is {mine}; choose another --work"
            )
        mark.write_text(json.dumps(mine))

    def store(self, set_name: str) -> Path:
        return self.work / f"{set_name}.store"

    def build(self, set_name: str) -> None:
        """The datastore's states, tuned on the dev pairs; pairs that are in both are counted and left out of dev."""
        files, tally = self.config["sets"][set_name], Tally()
        train = self._files(files["train"])
        if most := files.get("pairs"):
            train = [self._some(set_name, train, most)]
        adaptation.build(
            self.store(set_name),
            train,
            self.model,
            hold_out=0,
            tally=tally,
            report=say,
            tune_on=self._files(files["dev"]),
        )
        for line in tally.lines():
            typer.echo(f"{set_name}: {line}", err=True)

    def _some(self, set_name: str, files: list[Path], most: int) -> Path:
        """A random part of a large set, the same every time, as one TSV."""
        part = self.work / f"{set_name}.tsv"
        if not part.exists():
            read = list(read_pairs(files, self.config["source"], self.config["target"], Tally()))
            chosen = np.sort(np.random.default_rng(0).permutation(len(read))[:most])
            rows = "".join(f"{read[i].source}\t{read[i].target}\n" for i in chosen)
            part.with_suffix(".new").write_text(rows, encoding="utf8")
            part.with_suffix(".new").rename(part)
        return part

    # -- cells ------------------------------------------------------------------------------------------------------

    def cell(self, set_name: str, system: System) -> None:
        """One system on one set, unless it is there already."""
        file = self.work / f"{set_name}.{system.name}.json"
        if file.exists():
            return
        path, started = self.store(set_name), time.perf_counter()
        say(f"{set_name}: {system.name}", 1, 1)
        elsewhere = None
        if system.elsewhere:
            self.build(self._other(set_name))
            elsewhere = self.store(self._other(set_name))
        adaptation.represent(path, self.model, system.method, say, elsewhere)
        manifest = adaptation.tune(path, self.model, system.method.tuner, say)
        prepared = time.perf_counter() - started
        with datastore.open_datastore(path, self.model) as store:
            translator = Translator(self.model, store, store.combiner, self.decoding)
            record = self._translated(translator, set_name)
            record |= self._accuracies(translator, set_name)
        record |= {
            "seconds of preparation": round(prepared, 1),
            "mixing": None if manifest.mixing is None else asdict(manifest.mixing),
            "options": {stage: manifest.options.get(stage) for stage in ("train", "project", "tune")},
            "measured": {stage: manifest.measured.get(stage) for stage in ("train", "project", "tune")},
        }
        self._save(file, record)

    def base(self, set_name: str) -> None:
        file = self.work / f"{set_name}.base.json"
        if not file.exists():
            self._save(file, self._translated(Translator(self.model, decoding=self.decoding), set_name))

    def _other(self, set_name: str) -> str:
        names = list(self.config["sets"])
        return str(names[(names.index(set_name) + 1) % len(names)])

    def _translated(self, translator: Translator, set_name: str) -> dict[str, Any]:
        record: dict[str, Any] = {}
        for place, files, most in self._texts(set_name):
            pairs = self.pairs(files, most)
            started = time.perf_counter()
            texts = [t.text for t in translator.translate([p.source for p in pairs])]
            record[place] = {"seconds": round(time.perf_counter() - started, 1), "texts": texts}
            say(f"{set_name}: {place}", len(pairs), len(pairs), f"{record[place]['seconds']} s")
        return record

    def _texts(self, set_name: str) -> list[tuple[str, list[str], int | None]]:
        one = self.config["sets"][set_name]
        general = self.config.get("general", {})
        return [("test", one["test"], one.get("test_pairs"))] + [
            (f"general {name}", files["files"], files.get("pairs")) for name, files in general.items()
        ]

    def _accuracies(self, translator: Translator, set_name: str) -> dict[str, Any]:
        """Retrieval accuracy@k for the test pairs: from the memory, and from the dev pairs as the paper has it."""
        store = translator.datastore
        assert store is not None
        one = self.config["sets"][set_name]
        pairs = self.pairs(one["test"], one.get("test_pairs"))
        sources, references = [p.source for p in pairs], [p.target for p in pairs]
        dev = adaptation.force_held_out(store.path, store.manifest, self.model, "tune")
        test = adaptation.force_pairs(self.model, sources, references)
        assert dev is not None
        assert test is not None
        keys, asked = store.projection(dev.states).numpy().astype(np.float16), store.projection(test.states).numpy()
        near = indices.exact_search(keys, asked, max(adaptation.KS), store.projection.normed)
        truth = test.truth.numpy()
        return {
            "accuracy, memory": adaptation.accuracy_of(translator, sources, references),
            "accuracy, dev": retrieval_accuracy(dev.truth.numpy()[near.ids], near.found, truth, adaptation.KS),
        }

    def _save(self, file: Path, record: dict[str, Any]) -> None:
        new = file.with_suffix(".new")
        new.write_text(json.dumps(record | {"signature": self.signature}, ensure_ascii=False), encoding="utf8")
        new.rename(file)

    # -- the table --------------------------------------------------------------------------------------------------

    def table(self, set_names: list[str], command: str) -> dict[str, Any]:
        names = ["base", *(system.name for system in systems(self.config))]
        sets = {set_name: self._set(set_name, names) for set_name in set_names}
        return {"sets": sets, "signature": self.signature | {"command": command}}

    def _set(self, set_name: str, names: list[str]) -> dict[str, Any]:
        cells = {name: json.loads((self.work / f"{set_name}.{name}.json").read_text("utf8")) for name in names}
        rows: dict[str, dict[str, Any]] = {
            name: {
                key: value
                for key, value in cell.items()
                if key not in ("signature",) and "texts" not in str(value)[:200]
            }
            for name, cell in cells.items()
        }
        overlap, signatures = {}, {}
        for place, files, most in self._texts(set_name):
            pairs = self.pairs(files, most)
            references = [p.target for p in pairs]
            texts = {name: cell[place]["texts"] for name, cell in cells.items()}
            first = {REFERENCE: texts.pop(REFERENCE)} | texts if REFERENCE in texts else texts
            against_reference = compare(first, references, self.config["target"])
            best = max((n for n in names if n in BASELINES), key=lambda n: against_reference.scores[n].bleu)
            against_best = compare({best: first.pop(best)} | first, references, self.config["target"])
            signatures[place] = [against_best.bleu_signature, against_best.chrf_signature]
            overlap[place] = self._overlap(set_name, pairs)
            for name, row in rows.items():
                score = against_reference.scores[name]
                row[place] = {
                    "bleu": score.bleu,
                    "chrf": score.chrf,
                    "brevity_penalty": score.brevity_penalty,
                    f"p against {REFERENCE}": score.p_bleu,
                    "best baseline": best,
                    "p against the best baseline": against_best.scores[name].p_bleu,
                    "segments": len(pairs),
                    "seconds": cells[name][place]["seconds"],
                }
        manifest = datastore.read_manifest(self.store(set_name))
        values = datastore.array(self.store(set_name), manifest, "values")
        return {
            "pairs": manifest.stored,
            "entries": manifest.entries,
            "classes": len(np.unique(values)),
            "overlap": overlap,
            "signatures": signatures,
            "systems": rows,
        }

    def _overlap(self, set_name: str, pairs: list[Pair]) -> int:
        """Segments whose source stands in the memory but for case and spacing: none may, or the table flatters."""
        with datastore.open_datastore(self.store(set_name)) as store:
            stored = {fold(pair.source) for _, pair in store.pairs.each("stored")}
        return sum(fold(pair.source) in stored for pair in pairs)


def say(stage: str, done: float, total: float, note: str = "") -> None:
    if total and (done >= total or stage == "train"):
        typer.echo(f"{time.strftime('%H:%M:%S')} {stage} {done:,.0f}/{total:,.0f} {note}", err=True)


if __name__ == "__main__":
    typer.run(main)
