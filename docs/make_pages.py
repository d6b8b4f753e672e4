"""Writes what documents quote: docs/cli.md from `--help`, docs/results.md, its figures and the README's from results/.

With --check it writes nothing, and fails where a page is stale. No number is ever typed into a page by hand.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from clknn import figures

ROOT = Path(__file__).parent.parent
COMMANDS = (
    "adapt", "translate", "evaluate", "inspect", "import", "export", "build", "train", "project", "tune", "figures",
)  # fmt: skip
PLACES = ("accuracy, memory", "accuracy, dev")
KS = ("1", "2", "4", "8", "16", "32", "64")


def pages() -> dict[Path, str]:
    """Every page that is wholly or partly written here, as it should be."""
    readme = ROOT / "README.md"
    return {
        ROOT / "docs" / "cli.md": _cli(),
        ROOT / "docs" / "results.md": _results(),
        readme: _filled(readme.read_text(encoding="utf8")),
    } | {
        ROOT / "docs" / "figures" / f"{name}_accuracy.svg": _accuracy_figure(record)
        for name, record in _records().items()
        if "sets" in record and _panels(record)
    }


def _cli() -> str:
    parts = ["# The command line\n", "Written by `make docs` from `--help`; a test fails where it is stale.\n"]
    for command in ("", *COMMANDS):
        title = f"clknn {command}".strip()
        parts.append(f"## {title}\n\n```\n{_help(command)}\n```\n")
    return "\n".join(parts)


def _help(command: str) -> str:
    words = [sys.executable, "-m", "clknn", *command.split(), "--help"]
    plain = {"COLUMNS": "100", "NO_COLOR": "1", "TERM": "dumb"}
    done = subprocess.run(words, capture_output=True, text=True, check=True, env=os.environ | plain)
    return "\n".join(line.rstrip() for line in done.stdout.strip("\n").splitlines())


def _filled(readme: str) -> str:
    """The README with the block between its two marks replaced by the demo's recorded output."""
    demo = (ROOT / "results" / "demo.txt").read_text(encoding="utf8").strip("\n")
    demo = "\n".join(line.rstrip() for line in demo.splitlines())
    block = f"<!-- demo: from results/demo.txt -->\n```text\n{demo}\n```\n<!-- end -->"
    return re.sub(r"<!-- demo.*?<!-- end -->", lambda _: block, readme, flags=re.DOTALL)


def _results() -> str:
    parts = [
        "# Results",
        "Written by `make docs` from `results/*.json`; a test fails where it is stale. Each table is of one "
        "configuration; its cells can be made by several invocations, at several commits (log.md says where). "
        "What is tuned or trained for decoding saw the dev pairs alone and, for guarded systems, general text "
        "that no table translates. Decoding is the same for all (beam, length penalty) but for the end penalty, "
        "which ours has and no published system: rows named after it give it to these too, tuned in the same way. "
        "p is sacrebleu's paired bootstrap. The base model is the small one of `examples/de-en-small`: gains on it are "
        "larger than on a strong model. The IT memory is made of Debian's catalogues, not the benchmark's own, so that "
        "nothing here compares with the published tables, whose model and memory were others. "
        "[reproduce.md](reproduce.md) says how to make these tables of other data and models.",
    ]
    for name, record in _records().items():
        if "sets" in record:
            parts += _tables(record)
        elif "tables" in record:
            parts += _ablation(record)
        else:
            parts += _facts(name, record)
    return "\n\n".join(parts) + "\n"


def _records() -> dict[str, dict[str, Any]]:
    files = sorted((ROOT / "results").glob("*.json"))
    return {file.stem: json.loads(file.read_text(encoding="utf8")) for file in files}


def _tables(record: dict[str, Any]) -> list[str]:
    """Every set and the average, what general text loses, then each set by itself."""
    sets, parts = record["sets"], [f"## {record['name']}"]
    if len(sets) > 1:
        parts += ["### Every set, and the average"]
        for title, key, decimals in (
            ("BLEU", "bleu", 2),
            ("chrF2", "chrf", 2),
            ("brevity penalty", "brevity_penalty", 3),
        ):
            parts.append(_averages(sets, title, key, decimals))
    if any(place.startswith("general") for one in sets.values() for place in one["overlap"]):
        parts += [
            "### What general text loses",
            "BLEU less than the base model's, with the store attached.",
            _harm(sets),
        ]
    if _panels(record):
        parts += ["### Retrieval accuracy", f"![Retrieval accuracy@k](figures/{record['name']}_accuracy.svg)"]
    for name, one in sets.items():
        parts += [f"### {name}", _statistics(one), _scores(one["systems"]), _accuracies(one["systems"])]
        [place, *_] = one["signatures"]
        parts.append("BLEU `{}`; chrF2 `{}`".format(*one["signatures"][place]))
        parts += ["What it costs, in seconds:", _costs(name, one)]
        parts += _other_signatures(record["signature"], one)
    parts.append(_signature(record["signature"]))
    return parts


def _statistics(one: dict[str, Any]) -> str:
    repeated = sum(one.get("overlap", {}).values())
    said = f"{one['pairs']:,} pairs, {one['entries']:,} entries, {one['classes']:,} classes"
    if "dev" in one:
        said += (
            f"; {one['dev']['pairs']:,} dev pairs, {one['dev']['left out']:,} more left out as they stand in the memory"
        )
    if "overlap" in one:
        said += f"; {repeated} segments whose source stands in the memory"
    if "seconds of force decoding" in one:
        said += f"; force-decoded in {one['seconds of force decoding']:,} s"
    return said + "."


def _other_signatures(signature: dict[str, Any], one: dict[str, Any]) -> list[str]:
    """Where a set, or one of its cells, was made in another way than the table says."""
    own = {key: said for key, said in one.get("signature", {}).items() if signature.get(key) != said}
    parts = ["This set's own " + _signature(own)] if own else []
    for name, row in one["systems"].items():
        if "signature" in row:
            parts.append(f"{name}'s own " + _signature(row["signature"]))
    return parts


def _rows(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _p(p: float | None) -> str:
    return "" if p is None else "< 0.001" if p < 0.001 else f"{p:.3f}"


def _all_systems(sets: dict[str, Any]) -> list[str]:
    return list(dict.fromkeys(system for one in sets.values() for system in one["systems"]))


def _averages(sets: dict[str, Any], title: str, key: str, decimals: int) -> str:
    rows = []
    for system in _all_systems(sets):
        scores = [one["systems"][system]["test"][key] if system in one["systems"] else None for one in sets.values()]
        known = [score for score in scores if score is not None]
        mean = sum(known) / len(known) if len(known) == len(scores) else None
        rows.append([system, *("" if score is None else f"{score:.{decimals}f}" for score in [*scores, mean])])
    return _rows([title, *sets, "average"], rows)


def _scores(systems: dict[str, Any]) -> str:
    best = next(iter(systems.values()))["test"]["best"]
    kinds = [kind for kind, rival in best.items() if rival]
    head = ["system", "BLEU", "chrF2", "brevity", "p, kNN-MT", *(f"p, best {kind}" for kind in kinds)]
    head += ["k, temperature, weight", "end penalty"]
    rows = []
    for name, row in systems.items():
        test, mixing = row["test"], row.get("mixing")
        used = f"{mixing['k']}, {mixing['temperature']:g}, {mixing['weight']:g}" if mixing else ""
        rows.append(
            [
                name, f"{test['bleu']:.2f}", f"{test['chrf']:.2f}", f"{test['brevity_penalty']:.3f}",
                _p(test["p against kNN-MT"]), *(_p(test["p against the best"][kind]) for kind in kinds),
                used, f"{row['end penalty']:g}" if row.get("end penalty") else "",
            ]
        )  # fmt: skip
    named = "; ".join(f"the best {kind}: {best[kind]}" for kind in kinds)
    segments = next(iter(systems.values()))["test"]["segments"]
    return _rows(head, rows) + f"\n\n{segments:,} test segments; {named}."


def _harm(sets: dict[str, Any]) -> str:
    """BLEU of each system less the base model's, with each store attached."""
    places = [(name, place) for name, one in sets.items() for place in one["overlap"] if place.startswith("general")]
    rows = []
    for system in _all_systems(sets):
        row, lost = [system], []
        for name, place in places:
            systems = sets[name]["systems"]
            if system not in systems:
                row.append("")
                continue
            score, base = systems[system][place]["bleu"], systems["base"][place]["bleu"]
            lost.append(score - base)
            row.append(f"{score:.2f}" if system == "base" else f"{score - base:+.2f}")
        rows.append([*row, "" if system == "base" else f"{min(lost):+.2f}"])
    head = [f"{name}: {place.removeprefix('general ')}" for name, place in places]
    return _rows(["system", *head, "worst"], rows)


def _accuracies(systems: dict[str, Any]) -> str:
    rows = []
    for where in PLACES:
        same: dict[tuple[str, ...], list[str]] = {}  # systems with the same keys retrieve the same
        for name, row in systems.items():
            if where in row:
                same.setdefault(tuple(f"{row[where][k]:.3f}" for k in KS), []).append(name)
        place = where.removeprefix("accuracy, ")
        rows += [[f"{' · '.join(names)}; {place} as datastore", *numbers] for numbers, names in same.items()]
    return _rows(["retrieval accuracy", *(f"@{k}" for k in KS)], rows)


def _panels(record: dict[str, Any]) -> dict[str, dict[str, dict[int, float]]]:
    """A panel for each set and datastore; in it a curve for all systems that retrieve the same everywhere."""
    sets = record["sets"]
    same: dict[str, list[str]] = {}
    for system in _all_systems(sets):
        curves = [one["systems"].get(system, {}).get(where) for one in sets.values() for where in PLACES]
        if any(curves):
            same.setdefault(json.dumps(curves), []).append(system)
    panels: dict[str, dict[str, dict[int, float]]] = {}
    for where in PLACES:
        for name, one in sets.items():
            panel = panels.setdefault(f"{name}, {where.removeprefix('accuracy, ')} as datastore", {})
            for systems in same.values():
                if curve := one["systems"].get(systems[0], {}).get(where):
                    panel[" · ".join(systems)] = {int(k): accuracy for k, accuracy in curve.items()}
    return {title: panel for title, panel in panels.items() if panel}


def _accuracy_figure(record: dict[str, Any]) -> str:
    """The figure as SVG, which says which numbers it was drawn of."""
    panels = _panels(record)
    digest = hashlib.blake2b(json.dumps(panels, sort_keys=True).encode(), digest_size=8).hexdigest()
    metadata = {"Date": None, "Description": f"numbers {digest}"}
    drawn = figures.rendered(figures.accuracy_figure(panels, max(2, len(record["sets"]))), "svg", metadata).decode()
    return "\n".join(line.rstrip() for line in drawn.splitlines()) + "\n"


def _costs(name: str, one: dict[str, Any]) -> str:
    """What each system took to prepare, as its cell has it, and its time to translate relative to kNN-MT's."""
    timed = _records().get(f"systems_{name}", {}).get("measured", {})
    in_turns = timed["systems"] if timed.get("entries") == one["entries"] else {}  # or it is another run's
    rows = []
    for system, row in one["systems"].items():
        train, project, tune = (row.get("measured", {}).get(stage) or {} for stage in ("train", "project", "tune"))
        grouping = [train["clustering seconds"], "clusters"] if "clustering seconds" in train else []
        grouping = [row["centre seconds"], "centres"] if "centre seconds" in row else grouping
        relative = in_turns.get(system, {}).get("time / kNN-MT")
        rows.append(
            [
                system, " ".join(map(str, grouping)), _number(train.get("seconds")), _number(project.get("seconds")),
                _number(project.get("index seconds")), _number(tune.get("seconds", {}).get("retrieval")),
                _number(tune.get("seconds", {}).get("tuning")), _number(tune.get("seconds", {}).get("end penalty")),
                _number(row["test"]["seconds"]), _number(relative),
            ]
        )  # fmt: skip
    head = "centres or clusters|training|keys and index|index alone|retrieval for tuning|tuning|end penalty|test"
    note = (
        "Cells are made while other jobs run, and can be stopped for a while; the last column is measured in turns in "
        "one process (`bench/systems.py`)."
    )
    return _rows(["system", *head.split("|"), "time / kNN-MT"], rows) + f"\n\n{note}"


def _number(number: float | None) -> str:
    return "" if number is None else f"{number:,}"


def _ablation(record: dict[str, Any]) -> list[str]:
    """A table for each question; accuracy from the memory, and behind the stroke from the dev pairs."""
    parts = [f"## {record['name']}", f"{record['set']}: {_statistics(record)}"]
    parts.append(
        f"Retrieval accuracy@k of the tokens of {record['test segments']:,} test segments, with the memory / the dev "
        "pairs as datastore; mean log-likelihood of a dev token with the tuned w* (raw states: a fixed weight); "
        "p against the first row."
    )
    for name, rows in record["tables"].items():
        scored = any("test" in row for row in rows.values())
        head = [name, *(f"@{k}" for k in KS), "log-likelihood", "training, s", *(["BLEU", "brevity", "p"] * scored)]
        lines = []
        for title, row in rows.items():
            line = [title, *(" / ".join(f"{row[where][k]:.3f}" for where in PLACES) for k in KS)]
            train, test = row["measured"]["train"] or {}, row.get("test")
            line += [f"{row['measured']['tune']['log-likelihood of a token']:.3f}", _number(train.get("seconds"))]
            if scored:
                line += [f"{test['bleu']:.2f}", f"{test['brevity_penalty']:.3f}", _p(test["p_bleu"])]
            lines.append(line)
        parts.append(_rows(head, lines))
        parts += [
            f"{title}: its own {_signature(row['signature'])}" for title, row in rows.items() if "signature" in row
        ]
    return [*parts, _signature(record["signature"])]


def _facts(name: str, record: dict[str, Any]) -> list[str]:
    measured = dict(record["measured"])
    systems = measured.pop("systems", {})
    parts = [f"## {name.replace('_', ' ')}"]
    if plain := [[key, str(value)] for key, value in measured.items() if not isinstance(value, dict)]:
        parts.append(_rows(["measured", "value"], plain))
    for title, each in measured.items():
        if isinstance(each, dict):
            parts.append(_compared(title, each))
    if systems:
        head = list(next(iter(systems.values())))
        parts.append(_rows(["system", *head], [[s, *(str(row[h]) for h in head)] for s, row in systems.items()]))
    return [*parts, _signature(record["signature"])]


def _compared(title: str, measured: dict[str, Any]) -> str:
    """A row for what was measured of several, a column for each of these; what is of none stands below."""
    of_each = {what: row for what, row in measured.items() if isinstance(row, dict)}
    columns = list(dict.fromkeys(column for row in of_each.values() for column in row))
    rows = [[what, *(str(row.get(column, "")) for column in columns)] for what, row in of_each.items()]
    aside = [f"{what}: {value}" for what, value in measured.items() if what not in of_each]
    return "\n\n".join([_rows([title, *columns], rows), *aside])


def _signature(signature: dict[str, Any]) -> str:
    return "Signature: " + "; ".join(
        f"{key}: `{value if isinstance(value, str) else json.dumps(value)}`" for key, value in signature.items()
    )


def _stale(page: Path, text: str) -> bool:
    """A figure is stale where its numbers are: how it is written depends on matplotlib's version, too."""
    if not page.exists():
        return True
    there = page.read_text("utf8")
    if page.suffix == ".svg":
        return re.findall(r"numbers \w{16}", there) != re.findall(r"numbers \w{16}", text)
    return there != text


if __name__ == "__main__":
    stale = {page: text for page, text in pages().items() if _stale(page, text)}
    if "--check" in sys.argv:
        sys.exit(", ".join(str(p.relative_to(ROOT)) for p in stale) + " stale; run `make docs`" if stale else 0)
    for page, text in stale.items():
        page.parent.mkdir(exist_ok=True)
        page.write_text(text, encoding="utf8")
