"""Every system on every set of a configuration, with one model, one way of decoding and one way of tuning: one table.

A configuration (runs/*.toml) names the model, the sets with their train, dev and test files, and general text on which
nothing should be lost. Each set is force-decoded once; each system then makes its keys, chooses its combiner on the dev
pairs alone, and translates. A cell, one system on one set, is a file in the work folder, and beside it the datastore
that system ended with, which shares the states' files with all others; a run that was interrupted goes on from the
cells it finds, several can share the work, and none takes cells of another configuration. From all cells come the table
with its significance, results/NAME.json. `runs/reproduce.sh` runs it; docs/make_pages.py draws the tables.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import shutil
import time
import tomllib
from dataclasses import asdict, dataclass, fields, replace
from importlib.metadata import version
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
import torch
import typer

from clknn import Decoding, Pair, Tally, Translator, adaptation, datastore, load_model
from clknn import index as indices
from clknn import projection as projections
from clknn.adaptation import ADAPTIVE, CKMT_ADAPTIVE, CLKNN, GATED, KNN_MT, KSTER, HeldOut, Method
from clknn.adapter import AdapterSettings, Classes, class_centres
from clknn.corpus import Pairs, fold, read_pairs
from clknn.errors import InputError
from clknn.evaluation import Comparison, compare, retrieval_accuracy
from clknn.methods.adaptive import MetaKTuner
from clknn.methods.ckmt import CkmtSettings
from clknn.model import Model
from clknn.tuning import Grid

ROOT = Path(__file__).parent.parent
REFERENCE = "kNN-MT"  # what every other system is compared with
OTHER_DOMAIN = "CLKNN+w*, other domain"
PUBLISHED = REFERENCE, "Adaptive kNN-MT", "KSTER", "CKMT", "CLKNN", "CLKNN+w*", OTHER_DOMAIN
# The same with what ours has of decoding, so that it can be told what keys and combiner are worth by themselves.
PENALISED = tuple(f"{name}, end penalty" for name in (REFERENCE, "CLKNN", "CLKNN+w*"))
RIVALS = {"published": PUBLISHED, "with an end penalty": PENALISED}
LIKE_ENOUGH = 0.05  # share of held-out pairs with a side in another set's memory, which "Yes." and "OK" may be

# What a configuration can say, table by table.
KNOWN = "model source target beam length_penalty systems adapter ckmt sets general everyday".split()
KNOWN_OF_SET = "train dev test pairs test_pairs".split()
KNOWN_OF_GENERAL = "files skip pairs".split()


@dataclass(frozen=True)
class System:
    name: str
    method: Method
    elsewhere: bool = False  # the adapter is trained on the states of another set
    guarded: bool = False  # the configuration's everyday text teaches it which sources to leave to the base model

    @property
    def digest(self) -> str:
        """What it is, all options included: a name alone would let a cell outlive what it stands for."""
        said = json.dumps([asdict(self.method), self.elsewhere, self.guarded], sort_keys=True)
        return hashlib.blake2b(said.encode(), digest_size=8).hexdigest()

    def in_common(self, other: System) -> int:
        """How much of `other`'s way to its keys is this one's too: nothing, the adapter, or all of it."""
        mine, theirs = self.method, other.method
        if (mine.adapter, self.elsewhere) != (theirs.adapter, other.elsewhere):
            return 0
        return 1 + (mine.refined == theirs.refined)


def systems(config: dict[str, Any]) -> list[System]:
    """The rows of the table, so ordered that each representation is made once."""
    contrast = contrastive(AdapterSettings(), config.get("adapter", {}))
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
        System("CLKNN+w*, guarded", clknn, guarded=True),
        System(PENALISED[0], replace(KNN_MT, ending=True)),
        System(PENALISED[1], replace(clknn, tuner=fixed, ending=True)),
        System(PENALISED[2], replace(clknn, ending=True)),
        System("refined, fixed", replace(clknn, refined=GATED.refined, tuner=fixed)),
        System("refined, gate", replace(GATED, adapter=contrast, ending=False)),
        System("gated", replace(GATED, adapter=contrast), guarded="everyday" in config),
        System("CKMT", replace(CKMT_ADAPTIVE, adapter=ckmt)),
        System(OTHER_DOMAIN, clknn, elsewhere=True),
    ]
    if "everyday" not in config:  # there is nothing to guard by
        rows = [row for row in rows if not row.guarded]
    if len(config.get("sets", ())) == 1:  # there is no other set to train on
        rows = [row for row in rows if not row.elsewhere]
    wanted = config.get("systems")
    if wanted and (unknown := set(wanted) - {row.name for row in rows}):
        raise InputError(f"systems {sorted(unknown)} are not known; choose among {[row.name for row in rows]}")
    return [row for row in rows if not wanted or row.name in wanted]


def contrastive(start: AdapterSettings, asked: dict[str, Any]) -> AdapterSettings:
    """The settings that a configuration asks for; TOML has no None, and says 0."""
    return replace(start, **asked | {n: asked[n] or None for n in ("refresh", "centre_entries") if n in asked})


def refuse_strangers(config: dict[str, Any]) -> None:
    """What no system reads is named, never passed over."""
    options = {"adapter": AdapterSettings, "ckmt": CkmtSettings}
    known = {"": (config, KNOWN)}
    known |= {name: (config.get(name, {}), [f.name for f in fields(of)]) for name, of in options.items()}
    known |= {f"sets.{name}": (one, KNOWN_OF_SET) for name, one in config["sets"].items()}
    for table in ("general", "everyday"):
        known |= {f"{table}.{name}": (one, KNOWN_OF_GENERAL) for name, one in config.get(table, {}).items()}
    for place, (said, may) in known.items():
        if strangers := sorted(set(said) - set(may)):
            where = f"[{place}]" if place else "a configuration"
            raise InputError(f"{', '.join(strangers)} does not apply to {where}; choose among {', '.join(may)}")


def read_config(file: Path, quick: bool) -> dict[str, Any]:
    config = tomllib.loads(file.read_text(encoding="utf8"))
    subsets = config.pop("quick", {})
    return config | subsets if quick else config


def main(
    config: Annotated[Path, typer.Argument(help="A TOML file of runs/.")],
    data: Annotated[Path, typer.Option(help="What the configuration's paths are relative to.")] = Path(),
    work: Annotated[Path, typer.Option(help="Where datastores and cells go; kept, and resumed from.")] = Path("build"),
    only: Annotated[list[str] | None, typer.Option(help="These sets alone; other cells stay for another run.")] = None,
    system: Annotated[list[str] | None, typer.Option(help="These systems alone, likewise.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Subsets: minutes, to see that it runs.")] = False,
    results: Annotated[
        Path, typer.Option(help="Where the table goes; sets that are in it and not in the work folder stay.")
    ] = ROOT / "results",
) -> None:
    settings = read_config(config, quick)
    refuse_strangers(settings)
    name, sets = config.stem + ("-quick" if quick else ""), list(settings["sets"])
    refuse_others(config, "sets", only, sets)
    refuse_others(config, "systems", system, [row.name for row in systems(settings)])
    bench = Bench(settings, data, work / name)
    bench.refuse_another_configuration()
    bench.earlier(results / f"{name}.json")  # refused before the work, not behind it
    for set_name in only or sets:
        bench.build(set_name)
        bench.base(set_name)
        for row in systems(settings):
            if not system or row.name in system:
                bench.cell(set_name, row)
    command = f"runs/reproduce.sh runs/{config.name}{' --data DATA' * (data != Path())}{' --quick' * quick}"
    write_results(results / f"{name}.json", {"name": name, **bench.table(results / f"{name}.json", command)})


def refuse_others(config: Path, what: str, asked: list[str] | None, there: list[str]) -> None:
    if strangers := set(asked or ()) - set(there):
        raise InputError(f"{config}: has no {what} {sorted(strangers)}; choose among {there}")


def write_results(file: Path, record: dict[str, Any]) -> None:
    file.parent.mkdir(exist_ok=True)
    new = file.with_suffix(".new")
    new.write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n", encoding="utf8")
    new.rename(file)


def write_tsv(file: Path, pairs: list[Pair]) -> None:
    rows = "".join(f"{pair.source}\t{pair.target}\n" for pair in pairs)
    file.with_suffix(".new").write_text(rows, encoding="utf8")
    file.with_suffix(".new").rename(file)


def _digest_of(file: Path) -> str | None:
    """None: it is not there, which reading it will say better."""
    if not file.is_file():
        return None
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, lambda: hashlib.blake2b(digest_size=8)).hexdigest()


def link(store: Path, copy: Path) -> None:
    """Makes a datastore that begins as `store` is and goes its own way, in no space: the files are shared.

    No file that a manifest names is ever written again, so that neither can change what the other has.
    """
    if copy.exists():
        return
    manifest = datastore.read_draft(store)
    assert manifest is not None
    new = copy.with_name(copy.name + ".new")
    shutil.rmtree(new, ignore_errors=True)  # left by a run that was killed
    new.mkdir()
    for mark in manifest.files.values():
        os.link(store / mark.name, new / mark.name)
    for name in ("manifest.json", "draft.json"):
        if (store / name).exists():
            shutil.copyfile(store / name, new / name)
    new.rename(copy)


class Text(NamedTuple):
    """Segments to translate: what results call them, their files, and how many of them at most."""

    place: str
    files: list[str]
    skip: int
    most: int | None


class HeldOutTexts(NamedTuple):
    dev: HeldOut
    test: HeldOut


class Bench:
    """The sets of one configuration, their datastores and their cells."""

    def __init__(self, config: dict[str, Any], data: Path, work: Path) -> None:
        self.config, self.data, self.work = config, data, work
        self._forced = dict[str, HeldOutTexts]()
        self.model: Model = load_model(str(self._path(config["model"])), config["source"], config["target"])
        self.decoding = Decoding(beam=config.get("beam", 5), length_penalty=config.get("length_penalty", 1.0))
        texts = [each for table in ("general", "everyday") for each in config.get(table, {}).values()]
        named = [name for one in config["sets"].values() for role in ("train", "dev", "test") for name in one[role]]
        named += [name for each in texts for name in each["files"]]
        contents = {name: _digest_of(data / name) for name in sorted(set(named))}
        # Which systems are in the table changes no cell.
        fixed = [{key: value for key, value in config.items() if key != "systems"}, self.model.fingerprint, contents]
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

    def pairs(self, names: list[str], skip: int, most: int | None) -> list[Pair]:
        """Segments to translate, the first of each file behind those to skip."""
        read = read_pairs(self._files(names), self.config["source"], self.config["target"], Tally())
        some = list(islice(read, skip, None if most is None else skip + most))
        return adaptation.fitting(self.model, some, Tally())

    def refuse_another_configuration(self) -> None:
        """What one table is made of was made in one way."""
        self.work.mkdir(parents=True, exist_ok=True)
        mark, mine = self.work / "configuration.json", self.signature["configuration"]
        if mark.exists() and (before := json.loads(mark.read_text())) != mine:
            raise InputError(
                f"{self.work}: made with configuration {before}, and this is {mine}; choose another --work"
            )
        mark.write_text(json.dumps(mine))

    def earlier(self, file: Path) -> dict[str, Any]:
        """The sets of results that are there already; they must be of this configuration."""
        if not file.exists():
            return {}
        record: dict[str, Any] = json.loads(file.read_text(encoding="utf8"))
        before, mine = record["signature"]["configuration"], self.signature["configuration"]
        if before != mine:
            raise InputError(
                f"{file}: made with configuration {before}, and this is {mine}; move it away, or choose other --results"
            )
        sets: dict[str, Any] = record.get("sets", {})
        return sets

    def store(self, set_name: str) -> Path:
        """The set's entries, before any system makes keys of them."""
        return self.work / f"{set_name}.store"

    def store_of(self, set_name: str, system: System) -> Path:
        return self.work / f"{set_name}.{system.name}.store"

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
            write_tsv(part, [read[i] for i in chosen])
        return part

    # -- cells ------------------------------------------------------------------------------------------------------

    def cell(self, set_name: str, system: System) -> None:
        """One system on one set, unless it is there already."""
        file = self._file(set_name, system.name)
        if file.exists():
            if json.loads(file.read_text("utf8"))["system"] != system.digest:
                raise InputError(
                    f"{file}: {system.name} was another system when this was made; delete it, and run again"
                )
            return
        path = self._begun(set_name, system)
        say(f"{set_name}: {system.name}", 1, 1)
        elsewhere = None
        if system.elsewhere:
            elsewhere = self._teacher(set_name)
        adaptation.represent(path, self.model, system.method, say, elsewhere, self.forced(set_name).dev)
        everyday = [self.everyday()] if system.guarded and self.config.get("everyday") else []
        ending = system.method.ending, self.decoding
        manifest = adaptation.tune(path, self.model, system.method.tuner, say, everyday, *ending)
        with datastore.open_datastore(path, self.model) as store:
            translator = Translator(self.model, store, store.combiner, self.decoding, manifest.end_penalty)
            record = self.translated(translator, self.texts(set_name))
            record |= self.accuracies(translator, set_name)
        if isinstance(system.method.adapter, AdapterSettings):
            record["centre seconds"] = self._centre_seconds(path)
        record |= {
            "system": system.digest,
            "mixing": None if manifest.mixing is None else asdict(manifest.mixing),
            "end penalty": manifest.end_penalty,
            "options": {stage: manifest.options.get(stage) for stage in ("train", "project", "tune")},
            "measured": {stage: manifest.measured.get(stage) for stage in ("train", "project", "tune")},
        }
        self.save(file, record)

    def _file(self, set_name: str, name: str) -> Path:
        return self.work / f"{set_name}.{name}.json"

    def _begun(self, set_name: str, system: System) -> Path:
        """The system's own datastore, begun from a finished one that went the same way where there is one."""
        path = self.store_of(set_name, system)
        finished = [other for other in systems(self.config) if self._file(set_name, other.name).exists()]
        there = [other for other in finished if system.in_common(other) and self.store_of(set_name, other).exists()]
        nearest = max(there, key=system.in_common, default=None)
        link(self.store_of(set_name, nearest) if nearest else self.store(set_name), path)
        return path

    def _centre_seconds(self, path: Path) -> float:
        """What the centres of all classes cost, over all entries: the paper compares that with CKMT's clustering."""
        manifest = datastore.read_manifest(path)
        states, values = (datastore.array(path, manifest, name) for name in ("states", "values"))
        adapter = projections.read(path / manifest.files["adapter"].name).adapter
        assert adapter is not None
        started = time.perf_counter()
        class_centres(adapter, states, Classes.of(values))
        return round(time.perf_counter() - started, 2)

    def base(self, set_name: str) -> None:
        file = self._file(set_name, "base")
        if not file.exists():
            self.save(file, self.translated(Translator(self.model, decoding=self.decoding), self.texts(set_name)))

    def _teacher(self, set_name: str) -> Path:
        """Another set's states, whose memory holds nothing that this set's systems are tuned or tested on."""
        names = list(self.config["sets"])
        other = names[names.index(set_name) - 1]
        self.build(other)
        manifest = datastore.read_draft(self.store(other))
        assert manifest is not None
        one = self.config["sets"][set_name]
        held_out = self.pairs(one["dev"], 0, None) + self.pairs(*self.texts(set_name)[0][1:])
        with Pairs.open(self.store(other) / manifest.files["text"].name) as record:
            known = record.known((pair.source, pair.target) for pair in held_out)
        say(f"{set_name}: {known} of its {len(held_out)} dev and test pairs are like a pair of {other}", 1, 1)
        if known > LIKE_ENOUGH * len(held_out):
            raise InputError(f"{other} holds {known} dev and test pairs of {set_name}; order the sets otherwise")
        return self.store(other)

    def translated(self, translator: Translator, texts: list[Text]) -> dict[str, Any]:
        record: dict[str, Any] = {}
        for place, *which in texts:
            pairs = self.pairs(*which)
            started = time.perf_counter()
            texts = [t.text for t in translator.translate([p.source for p in pairs])]
            record[place] = {"seconds": round(time.perf_counter() - started, 1), "texts": texts}
            say(place, len(pairs), len(pairs), f"{record[place]['seconds']} s")
        return record

    def texts(self, set_name: str) -> list[Text]:
        """What a set's systems translate: its test pairs, and all general text."""
        one = self.config["sets"][set_name]
        general = self.config.get("general", {})
        return [Text("test", one["test"], 0, one.get("test_pairs"))] + [
            Text(f"general {name}", each["files"], each.get("skip", 0), each.get("pairs"))
            for name, each in general.items()
        ]

    def everyday(self) -> Path:
        """The text that guarded systems learn other text from, none of it translated for the table; as one TSV."""
        part = self.work / "learned from.everyday.tsv"
        if not part.exists():
            asked = self.config["everyday"].values()
            pairs = [p for each in asked for p in self.pairs(each["files"], each.get("skip", 0), each.get("pairs"))]
            write_tsv(part, pairs)
        return part

    def accuracies(self, translator: Translator, set_name: str) -> dict[str, Any]:
        """Retrieval accuracy@k for the test pairs: from the memory, and from the dev pairs as the paper has it."""
        store, (dev, test) = translator.datastore, self.forced(set_name)
        assert store is not None
        asked, truth = store.project(test.states), test.truth.numpy()  # [R, P], [R]
        memory = store.neighbours(asked, min(max(adaptation.KS), store.entries))
        keys = store.project(dev.states).numpy().astype(np.float16)
        near = indices.exact_search(keys, asked.numpy(), max(adaptation.KS), store.projection.normed)
        return {
            "accuracy, memory": retrieval_accuracy(memory.values.numpy(), memory.found.numpy(), truth, adaptation.KS),
            "accuracy, dev": retrieval_accuracy(dev.truth.numpy()[near.ids], near.found, truth, adaptation.KS),
        }

    def forced(self, set_name: str) -> HeldOutTexts:
        """Dev and test pairs of a set, force-decoded once for all its systems."""
        if set_name not in self._forced:
            manifest = datastore.read_draft(self.store(set_name))
            assert manifest is not None
            dev = adaptation.force_held_out(self.store(set_name), manifest, self.model, "tune")
            pairs = self.pairs(*self.texts(set_name)[0][1:])
            test = adaptation.force_pairs(self.model, [p.source for p in pairs], [p.target for p in pairs])
            if dev is None or test is None:
                raise InputError(f"{set_name}: no pair of its dev or test files fits the model; name others")
            self._forced[set_name] = HeldOutTexts(dev, test)
        return self._forced[set_name]

    def save(self, file: Path, record: dict[str, Any]) -> None:
        new = file.with_suffix(".new")
        new.write_text(json.dumps(record | {"signature": self.signature}, ensure_ascii=False), encoding="utf8")
        new.rename(file)

    # -- the table --------------------------------------------------------------------------------------------------

    def table(self, file: Path, command: str) -> dict[str, Any]:
        """All sets that have cells here; those of the earlier results in `file` that have none stay as they are."""
        before, sets = self.earlier(file), {}
        for set_name in self.config["sets"]:
            cells = self._cells(set_name)
            if len(cells) > 1:
                sets[set_name] = self._set(set_name, cells)
            elif set_name in before:
                sets[set_name] = before[set_name]
        if len(sets) < len(self.config["sets"]):
            command += "".join(f" --only {set_name}" for set_name in sets)
        return {"sets": sets, "signature": self.signature | {"command": command}}

    def _cells(self, set_name: str) -> dict[str, dict[str, Any]]:
        """The cells that there are of a set, in the order of the systems."""
        files = {name: self._file(set_name, name) for name in ("base", *(row.name for row in systems(self.config)))}
        return {name: json.loads(file.read_text("utf8")) for name, file in files.items() if file.exists()}

    def _set(self, set_name: str, cells: dict[str, dict[str, Any]]) -> dict[str, Any]:
        texts, signature = self.texts(set_name), cells["base"]["signature"]
        left_out = {"signature", *(text.place for text in texts)}
        rows = {name: {key: cell[key] for key in cell if key not in left_out} for name, cell in cells.items()}
        for name, cell in cells.items():
            if differing := {key: said for key, said in cell["signature"].items() if said != signature[key]}:
                rows[name]["signature"] = differing
        overlap, signatures = {}, {}
        for place, *which in texts:
            pairs = self.pairs(*which)
            references = [p.target for p in pairs]
            said = {name: cell[place]["texts"] for name, cell in cells.items()}
            against_reference = self._against(REFERENCE, said, references)
            scores = against_reference.scores
            best = {
                kind: max((n for n in cells if n in names), key=lambda n: scores[n].bleu, default=None)
                for kind, names in RIVALS.items()
            }
            against = {kind: self._against(rival, said, references).scores for kind, rival in best.items()}
            signatures[place] = [against_reference.bleu_signature, against_reference.chrf_signature]
            overlap[place] = self._overlap(set_name, pairs)
            for name, row in rows.items():
                row[place] = {
                    "bleu": scores[name].bleu,
                    "chrf": scores[name].chrf,
                    "brevity_penalty": scores[name].brevity_penalty,
                    f"p against {REFERENCE}": scores[name].p_bleu if REFERENCE in cells else None,
                    "best": best,
                    "p against the best": {
                        kind: against[kind][name].p_bleu if rival else None for kind, rival in best.items()
                    },
                    "segments": len(pairs),
                    "seconds": cells[name][place]["seconds"],
                }
        return self.statistics(set_name) | {
            "overlap": overlap,
            "signatures": signatures,
            "signature": signature,
            "systems": rows,
        }

    def _against(self, first: str | None, said: dict[str, list[str]], references: list[str]) -> Comparison:
        """All systems, each compared with `first`; with any, where that is not among them."""
        leading = {first: said[first]} if first in said else {}
        return compare(leading | said, references, self.config["target"])

    def statistics(self, set_name: str) -> dict[str, Any]:
        manifest = datastore.read_draft(self.store(set_name))
        assert manifest is not None
        values, build = datastore.array(self.store(set_name), manifest, "values"), manifest.measured["build"]
        return {
            "pairs": manifest.stored,
            "entries": manifest.entries,
            "classes": len(np.unique(values)),
            "dev": {"pairs": build["held out"]["tune"], "left out": build["tuning pairs left out"]},
            "seconds of force decoding": build["seconds"],
        }

    def _overlap(self, set_name: str, pairs: list[Pair]) -> int:
        """Segments whose source stands in the memory but for case and spacing: none may, or the table flatters."""
        manifest = datastore.read_draft(self.store(set_name))
        assert manifest is not None
        with Pairs.open(self.store(set_name) / manifest.files["text"].name) as record:
            stored = {fold(pair.source) for _, pair in record.each("stored")}
        return sum(fold(pair.source) in stored for pair in pairs)


def say(stage: str, done: float, total: float, note: str = "") -> None:
    if total and (done >= total or stage == "train"):
        typer.echo(f"{time.strftime('%H:%M:%S')} {stage} {done:,.0f}/{total:,.0f} {note}", err=True)


if __name__ == "__main__":
    typer.run(main)
