"""Reading a TMX file to clean pairs against lxml's bare iterparse over the same file, in one run, by processor time.

The bare pass builds each unit's tree and frees it, and looks at nothing. Reading finds the languages, the words among
the codes, and the line, keeps what the file says beside, cleans, and counts; `clknn import` also writes. The file is
the example memory, over and over, with other ids; memory is what a process that only reads needs at its highest.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import chain, count, islice
from pathlib import Path

from lxml import etree

import signature
from clknn.corpus import File, Tally, convert, read_pairs, read_tmx, write_tmx

ROOT = Path(__file__).parent.parent
MEMORY = ROOT / "examples/libreoffice-help.de-en.tmx.gz"
PEAK = """
import sys
from pathlib import Path
from clknn.corpus import Tally, read_pairs
for _ in read_pairs([Path(sys.argv[1])], "de", "en", Tally()): pass
# Of this process alone; ru_maxrss has that of its parent in it.
print(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0])
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=500_000)
    pairs = parser.parse_args().pairs
    with tempfile.TemporaryDirectory() as folder:
        path, small = Path(folder) / "big.tmx", Path(folder) / "small.tmx"
        _write(path, pairs)
        _write(small, max(pairs // 10, 1))
        bare = _best(lambda: _bare(path))
        reading = _best(lambda: sum(1 for _ in read_tmx(File(path), "de", "en", Tally())))
        whole = _best(lambda: convert([path], Path(folder) / "out.tsv", "de", "en", Tally()))
        measured = {
            "units per second, bare iterparse": round(pairs / bare),
            "units per second, read to pairs": round(pairs / reading),
            "units per second, clknn import to TSV": round(pairs / whole),
            "read to pairs / bare iterparse": round(bare / reading, 3),
            "MiB at most, all units": _peak(path),
            "MiB at most, a tenth of them": _peak(small),
            "megabytes": round(path.stat().st_size / 1e6, 1),
        }
    signature.save("importing", measured, f"{pairs} units, the example memory over and over")


def _write(path: Path, pairs: int) -> None:
    once = list(read_pairs([MEMORY], "de", "en", Tally()))
    endless = chain.from_iterable(once for _ in count())
    numbered = (replace(pair, origin=replace(pair.origin, unit=str(n))) for n, pair in enumerate(endless))
    write_tmx(islice(numbered, pairs), path, "de", "en")


def _best(run: Callable[[], object]) -> float:
    """Seconds of processor time, the best of three: other jobs' load moves the clock on the wall."""
    times = []
    for _ in range(3):
        started = time.process_time()
        run()
        times.append(time.process_time() - started)
    return min(times)


def _bare(path: Path) -> None:
    for _, unit in etree.iterparse(str(path), events=("end",), tag="tu"):
        unit.clear()
        while unit.getprevious() is not None:
            del unit.getparent()[0]


def _peak(path: Path) -> int:
    said = subprocess.run([sys.executable, "-c", PEAK, str(path)], capture_output=True, text=True, check=True).stdout
    return round(int(said) / 1024)


if __name__ == "__main__":
    main()
