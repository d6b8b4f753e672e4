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
COMMANDS = ("adapt", "translate", "evaluate", "inspect", "build", "train", "project", "tune")
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
        "command: k, temperature and weight were tuned on the dev pairs, everything else is equal between systems. "
        "p is sacrebleu's paired bootstrap. The base model is the small one of `examples/de-en-small`: gains on it are "
        "larger than on a strong model, and none of this compares with the published tables, whose model and memory "
        "were others.",
    ]
    for file in sorted((ROOT / "results").glob("*.json")):
        record = json.loads(file.read_text(encoding="utf8"))
        parts += _table(record) if "systems" in record else _facts(file.stem, record)
    return "\n\n".join(parts) + "\n"


def _table(record: dict[str, Any]) -> list[str]:
    head = "| system | BLEU | chrF2 | brevity | p, base | p, kNN-MT | k, temperature, weight | seconds |"
    rows = [head, "|---|---|---|---|---|---|---|---|"]
    for name, row in record["systems"].items():
        p = ["" if row.get(key) is None else f"{row[key]:.3f}" for key in ("p_bleu", "p_bleu_against_knn")]
        mixing = row.get("mixing")
        used = f"{mixing['k']}, {mixing['temperature']:g}, {mixing['weight']:g}" if mixing else ""
        rows.append(
            f"| {name} | {row['bleu']:.2f} | {row['chrf']:.2f} | {row['brevity_penalty']:.3f} | {p[0]} | {p[1]} "
            f"| {used} | {row['seconds']:.0f} |"
        )
    accuracy = ["| retrieval accuracy | " + " | ".join(f"@{k}" for k in KS) + " |", "|---" * (len(KS) + 1) + "|"]
    for where in ("accuracy, memory as datastore", "accuracy, dev as datastore"):
        for name, row in record["systems"].items():
            if where in row:
                numbers = " | ".join(f"{row[where][k]:.3f}" for k in KS)
                accuracy.append(f"| {name}, {where.removeprefix('accuracy, ')} | {numbers} |")
    return [
        f"## {record['name']}",
        f"{record['pairs']:,} pairs, {record['entries']:,} entries, {record['segments']:,} test segments.",
        "\n".join(rows),
        "\n".join(accuracy),
        _signature(record["signature"]),
    ]


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
