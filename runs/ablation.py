"""What each choice of the contrastive adapter is worth: one set's states, trained and projected in many ways.

A configuration (runs/ablation.toml) names one set and tables; a row of a table changes settings of the adapter, of the
PCA behind it, or asks for raw states. For each row: retrieval accuracy@k of test tokens, from the memory and from the
dev pairs; the log-likelihood that tuning reached on dev; training seconds; and where asked BLEU, each compared with the
first of its table. A cell is a file named after the settings, not after the row, so that the default, which stands in
most tables, is made once, and a table can be changed without making the others again. `runs/reproduce.sh
runs/ablation.toml` runs it; from all cells come results/ablation.json.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Annotated, Any

import typer

from clknn import PAPER, Translator, adaptation, datastore
from clknn.adapter import AdapterSettings
from clknn.errors import InputError
from clknn.evaluation import compare
from clknn.tuning import Grid
from reproduce import (
    ROOT,
    Bench,
    contrastive,
    link,
    read_config,
    refuse_others,
    refuse_strangers,
    say,
    write_results,
)

OF_TABLE = "name paper bleu adapter rows".split()
OF_KEYS = "raw size centred".split()


@dataclass(frozen=True)
class Variation:
    """One way from states to keys; without an adapter they are the raw states."""

    adapter: AdapterSettings | None
    size: int | None = None
    centred: bool = True

    @property
    def digest(self) -> str:
        return _digest(asdict(self))


@dataclass(frozen=True)
class Table:
    name: str
    rows: dict[str, Variation]
    bleu: bool


def tables(config: dict[str, Any]) -> list[Table]:
    """The tables of a configuration; [adapter] is what they all begin with, unless they begin with the paper's."""
    found = []
    for table in config["tables"]:
        _refuse(table, OF_TABLE, f"table {table.get('name')!r}")
        start = PAPER if table.get("paper", False) else contrastive(AdapterSettings(), config.get("adapter", {}))
        shared = _settings(start, table.get("adapter", {}), f"table {table['name']!r}")
        rows = {name: _variation(shared, row, f"row {name!r}") for name, row in table["rows"].items()}
        found.append(Table(table["name"], rows, table.get("bleu", False)))
    return found


def _variation(shared: AdapterSettings, row: dict[str, Any], where: str) -> Variation:
    of_keys = {name: row[name] for name in OF_KEYS if name in row}
    of_adapter = {name: said for name, said in row.items() if name not in OF_KEYS}
    if of_keys.pop("raw", False):
        if strangers := [*of_keys, *of_adapter]:
            raise InputError(f"{where}: {', '.join(strangers)} does not apply to raw states; leave it out")
        return Variation(None)
    return Variation(_settings(shared, of_adapter, where), **of_keys)


def _settings(start: AdapterSettings, asked: dict[str, Any], where: str) -> AdapterSettings:
    _refuse(asked, [*(f.name for f in fields(AdapterSettings)), *OF_KEYS], where)
    return contrastive(start, asked)


def _refuse(said: dict[str, Any], may: list[str], where: str) -> None:
    if strangers := sorted(set(said) - set(may)):
        raise InputError(f"{where}: {', '.join(strangers)} does not apply; choose among {', '.join(may)}")


def main(
    config: Annotated[Path, typer.Argument(help="A TOML file of runs/ that has tables.")],
    data: Annotated[Path, typer.Option(help="What the configuration's paths are relative to.")] = Path(),
    work: Annotated[Path, typer.Option(help="Where states and cells go; kept, and resumed from.")] = Path("build"),
    only: Annotated[list[str] | None, typer.Option(help="These tables alone; the others stay as they are.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Subsets: minutes, to see that it runs.")] = False,
    results: Annotated[Path, typer.Option(help="Where the tables go.")] = ROOT / "results",
) -> None:
    settings = read_config(config, quick)
    asked = tables(settings)
    # Cells are named after what tables ask for, so that these change no other cell.
    settings = {name: said for name, said in settings.items() if name not in ("tables", "adapter")}
    refuse_strangers(settings)
    refuse_others(config, "tables", only, [table.name for table in asked])
    [set_name] = settings["sets"]
    name = config.stem + ("-quick" if quick else "")
    bench = Bench(settings, data, work / name)
    bench.refuse_another_configuration()
    bench.earlier(results / f"{name}.json")
    bench.build(set_name)
    for table in asked:
        if not only or table.name in only:
            for row, variation in table.rows.items():
                say(f"{table.name}: {row}", 1, 1)
                cell(bench, set_name, variation, table.bleu)
    command = f"runs/reproduce.sh runs/{config.name}{' --data DATA' * (data != Path())}{' --quick' * quick}"
    record = {"name": name, "set": set_name, **bench.statistics(set_name)}
    record["test segments"] = len(bench.pairs(*bench.texts(set_name)[0][1:]))
    record["tables"] = {table.name: made for table in asked if (made := drawn(bench, set_name, table))}
    write_results(results / f"{name}.json", record | {"signature": bench.signature | {"command": command}})


def cell(bench: Bench, set_name: str, variation: Variation, bleu: bool) -> None:
    """One variation, unless it is there already with all that is asked of it."""
    file = _file(bench, set_name, variation)
    if _made(file, bleu):
        return
    dev = bench.forced(set_name).dev
    trained = _trained(bench, set_name, variation)
    path = file.with_suffix(".store")
    shutil.rmtree(path, ignore_errors=True)  # of a run that was killed
    link(trained, path)
    raw = variation.adapter is None
    adaptation.project(path, bench.model, raw, variation.size, variation.centred, say, held_out=dev)
    manifest = adaptation.tune(path, bench.model, Grid(scaled=not raw), say)
    with datastore.open_datastore(path, bench.model) as store:
        translator = Translator(bench.model, store, store.combiner, bench.decoding)
        record = bench.accuracies(translator, set_name)
        if bleu:
            record |= bench.translated(translator, bench.texts(set_name)[:1])
    assert manifest.mixing is not None
    record |= {"settings": asdict(variation), "mixing": asdict(manifest.mixing)}
    record |= {"measured": {stage: manifest.measured.get(stage) for stage in ("train", "project", "tune")}}
    bench.save(file, record)
    shutil.rmtree(path)


def _trained(bench: Bench, set_name: str, variation: Variation) -> Path:
    """The set's datastore with this adapter, which variations of the PCA share."""
    if variation.adapter is None:
        return bench.store(set_name)
    path = bench.work / f"{set_name}.{_digest(asdict(variation.adapter))}.trained"
    link(bench.store(set_name), path)
    adaptation.train(path, variation.adapter, bench.model, report=say, held_out=bench.forced(set_name).dev)
    return path


def _file(bench: Bench, set_name: str, variation: Variation) -> Path:
    return bench.work / f"{set_name}.{variation.digest}.json"


def _made(file: Path, bleu: bool) -> dict[str, Any] | None:
    """The cell, if it has all that is asked of it."""
    made: dict[str, Any] | None = json.loads(file.read_text("utf8")) if file.exists() else None
    return None if made is not None and bleu and "test" not in made else made


def _digest(settings: dict[str, Any]) -> str:
    return hashlib.blake2b(json.dumps(settings, sort_keys=True).encode(), digest_size=8).hexdigest()


def drawn(bench: Bench, set_name: str, table: Table) -> dict[str, Any]:
    """The rows that have a cell; BLEU with its p against the first of them that has it."""
    files = {name: _file(bench, set_name, variation) for name, variation in table.rows.items()}
    cells = {name: made for name, file in files.items() if (made := _made(file, table.bleu))}
    rows = {}
    for name, made in cells.items():
        differing = {key: said for key, said in made["signature"].items() if said != bench.signature[key]}
        rows[name] = {key: made[key] for key in made if key not in ("test", "signature")}
        rows[name] |= {"signature": differing} if differing else {}
    texts = {name: made["test"]["texts"] for name, made in cells.items() if "test" in made} if table.bleu else {}
    if texts:
        references = [pair.target for pair in bench.pairs(*bench.texts(set_name)[0][1:])]
        comparison = compare(texts, references, bench.config["target"])
        for name, score in comparison.scores.items():
            rows[name]["test"] = asdict(score) | {"seconds": cells[name]["test"]["seconds"]}
            rows[name]["test"]["signature"] = comparison.bleu_signature
    return rows


if __name__ == "__main__":
    typer.run(main)
