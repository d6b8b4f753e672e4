"""What every benchmark says beside its numbers: versions, machine, command."""

from __future__ import annotations

import json
import os
import platform
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch


def save(name: str, measured: dict[str, Any], data: str) -> None:
    """Prints the record last, as one JSON object, and writes results/NAME.json."""
    record = {
        "measured": measured,
        "signature": {
            "data": data,
            "versions": {p: version(p) for p in ("clknn", "torch", "transformers", "faiss-cpu")},
            "machine": f"{platform.machine()}, {os.cpu_count()} cores, {torch.get_num_threads()} threads",
            "command": "python " + " ".join([sys.argv[0], *sys.argv[1:]]),
        },
    }
    Path("results").mkdir(exist_ok=True)
    Path(f"results/{name}.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf8")
    print(json.dumps(record))
