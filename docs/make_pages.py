"""Writes what documents quote: docs/cli.md from `--help`, docs/results.md and the README's numbers from results/.

With --check it writes nothing, and fails where a page is stale. No number is ever typed into a page by hand.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
COMMANDS = ("adapt", "translate", "evaluate", "inspect", "import", "export", "build", "train", "project", "tune")
KS = ("1", "2", "4", "8", "16", "32", "64")


def pages() -> dict[Path, str]:
    """Every page that is wholly or partly written here, as it should be."""
    readme = ROOT / "README.md"
    return {
        ROOT / "docs" / "cli.md": _cli(),
        ROOT / "docs" / "results.md": _results(),
        readme: _filled(readme.read_text(encoding="utf8")),
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
        "Written by `make docs` from `results/*.json`; a test fails where it is stale. Each table is one run of one "
        "command: everything tuned or trained for decoding saw the dev pairs only, all else is equal between systems. "
        "p is sacrebleu's paired bootstrap. The base model is the small one of `examples/de-en-small`: gains on it are "
        "larger than on a strong model. The IT memory is made of Debian's catalogues, not the benchmark's own, so that "
        "nothing here compares with the published tables, whose model and memory were others.",
    ]
    for file in sorted((ROOT / "results").glob("*.json")):
        record = json.loads(file.read_text(encoding="utf8"))
        parts += _tables(record) if "sets" in record else _facts(file.stem, record)
    return "\n\n".join(parts) + "\n"


def _tables(record: dict[str, Any]) -> list[str]:
    """The main table, one for each set, what general text loses, retrieval accuracy."""
    sets, parts = record["sets"], [f"## {record['name']}"]
    for name, one in sets.items():
        repeated = sum(one["overlap"].values())
        parts += [
            f"### {name}",
            f"{one['pairs']:,} pairs, {one['entries']:,} entries, {one['classes']:,} classes; "
            f"{repeated} segments whose source stands in the memory.",
            _scores(one["systems"]),
            _accuracies(one["systems"]),
        ]
        [place, *_] = one["signatures"]
        parts.append("BLEU `{}`; chrF2 `{}`".format(*one["signatures"][place]))
    if any(place.startswith("general") for one in sets.values() for place in one["overlap"]):
        parts += [
            "### What general text loses",
            "BLEU less than the base model's, with the store attached.",
            _harm(sets),
        ]
    parts.append(_signature(record["signature"]))
    if len(sets) > 1:
        parts[1:1] = ["### BLEU on each set, and the average", _averages(sets)]
    return parts


def _rows(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _p(p: float | None) -> str:
    return "" if p is None else "< 0.001" if p < 0.001 else f"{p:.3f}"


def _averages(sets: dict[str, Any]) -> str:
    systems = next(iter(sets.values()))["systems"]
    rows = []
    for system in systems:
        scores = [one["systems"][system]["test"]["bleu"] for one in sets.values()]
        rows.append([system, *(f"{score:.2f}" for score in scores), f"{sum(scores) / len(scores):.2f}"])
    return _rows(["system", *sets, "average"], rows)


def _scores(systems: dict[str, Any]) -> str:
    head = ["system", "BLEU", "chrF2", "brevity", "p, kNN-MT", "p, best baseline", "k, temperature, weight"]
    rows = []
    for name, row in systems.items():
        test, mixing = row["test"], row.get("mixing")
        used = f"{mixing['k']}, {mixing['temperature']:g}, {mixing['weight']:g}" if mixing else ""
        rows.append(
            [
                name, f"{test['bleu']:.2f}", f"{test['chrf']:.2f}", f"{test['brevity_penalty']:.3f}",
                _p(test["p against kNN-MT"]), _p(test["p against the best baseline"]), used,
            ]
        )  # fmt: skip
    best = next(iter(systems.values()))["test"]["best baseline"]
    return _rows(head, rows) + f"\n\nBest baseline: {best}; {systems['kNN-MT']['test']['segments']:,} test segments."


def _harm(sets: dict[str, Any]) -> str:
    """BLEU of each system less the base model's, with each store attached."""
    places = [(name, place) for name, one in sets.items() for place in one["overlap"] if place.startswith("general")]
    rows = []
    for system in next(iter(sets.values()))["systems"]:
        row = [system]
        for name, place in places:
            systems = sets[name]["systems"]
            score, base = systems[system][place]["bleu"], systems["base"][place]["bleu"]
            row.append(f"{score:.2f}" if system == "base" else f"{score - base:+.2f}")
        rows.append(row)
    return _rows(["system", *(f"{name}: {place.removeprefix('general ')}" for name, place in places)], rows)


def _accuracies(systems: dict[str, Any]) -> str:
    rows = []
    for where in ("accuracy, memory", "accuracy, dev"):
        same: dict[tuple[str, ...], list[str]] = {}  # systems with the same keys retrieve the same
        for name, row in systems.items():
            if where in row:
                same.setdefault(tuple(f"{row[where][k]:.3f}" for k in KS), []).append(name)
        place = where.removeprefix("accuracy, ")
        rows += [[f"{' · '.join(names)}; {place} as datastore", *numbers] for numbers, names in same.items()]
    return _rows(["retrieval accuracy", *(f"@{k}" for k in KS)], rows)


def _facts(name: str, record: dict[str, Any]) -> list[str]:
    rows = ["| measured | value |", "|---|---|"]
    rows += [f"| {key} | {value} |" for key, value in record["measured"].items()]
    return [f"## {name.replace('_', ' ')}", "\n".join(rows), _signature(record["signature"])]


def _signature(signature: dict[str, Any]) -> str:
    return "Signature: " + "; ".join(
        f"{key}: `{value if isinstance(value, str) else json.dumps(value)}`" for key, value in signature.items()
    )


if __name__ == "__main__":
    stale = {page: text for page, text in pages().items() if not page.exists() or page.read_text("utf8") != text}
    if "--check" in sys.argv:
        sys.exit(", ".join(str(p.relative_to(ROOT)) for p in stale) + " stale; run `make docs`" if stale else 0)
    for page, text in stale.items():
        page.write_text(text, encoding="utf8")
