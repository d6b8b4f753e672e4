"""Writes docs/cli.md from `clknn --help`; with --check, fails where it is stale."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

PAGE = Path(__file__).with_name("cli.md")
COMMANDS = ("adapt", "translate", "evaluate", "inspect", "build", "train", "project", "tune")


def page() -> str:
    """The whole page, as --help prints it at 100 columns without colour."""
    parts = ["# The command line\n", "Written by `make docs` from `--help`; a test fails where it is stale.\n"]
    for command in ("", *COMMANDS):
        title = f"clknn {command}".strip()
        parts.append(f"## {title}\n\n```\n{_help(command)}\n```\n")
    return "\n".join(parts)


def _help(command: str) -> str:
    words = [sys.executable, "-m", "clknn", *command.split(), "--help"]
    plain = {"COLUMNS": "100", "NO_COLOR": "1", "TERM": "dumb", "_TYPER_FORCE_DISABLE_TERMINAL": "1"}
    done = subprocess.run(words, capture_output=True, text=True, check=True, env=os.environ | plain)
    return "\n".join(line.rstrip() for line in done.stdout.strip("\n").splitlines())


if __name__ == "__main__":
    if "--check" in sys.argv:
        sys.exit(0 if PAGE.read_text(encoding="utf8") == page() else "docs/cli.md is stale; run `make docs`")
    PAGE.write_text(page(), encoding="utf8")
