"""Five hundred mutated files; `make fuzz` tries 20,000."""

from __future__ import annotations

import random
import re
from pathlib import Path

import pytest

import fuzz
from clknn.corpus import Pair, Tally, read_pairs, tmx
from clknn.errors import InputError

PLAIN = (
    '<tu tuid="{}">\n <tuv xml:lang="de"><seg>Haus &amp; {}</seg></tuv>\n<tuv xml:lang="en"><seg>a</seg></tuv></tu>\n'
)


def test_no_file_crashes_hangs_or_fills_the_memory() -> None:
    ended = fuzz.run(range(500))
    assert sum(ended.values()) == 500
    assert min(ended["read"], ended["refused"]) > 50  # both sides of the gate are tried


def outcome(path: Path) -> tuple[list[Pair], Tally, str]:
    """What a file gives, what was counted, and the error that ended it."""
    pairs, tally = list[Pair](), Tally()
    try:
        pairs.extend(read_pairs([path], "de", "en", tally))
    except InputError as error:
        return pairs, tally, str(error)
    return pairs, tally, ""


def test_plain_units_are_read_as_the_parser_reads_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    never = re.compile(rb"(?!)")
    path, several = tmp_path / "a.tmx", 0
    for number in range(400):
        rng = random.Random(number)
        units = [PLAIN.format(i, i) if rng.random() < 0.7 else fuzz.UNIT for i in range(rng.randrange(12))]
        units.insert(rng.randrange(len(units) + 1), rng.choice(
            ("", "<!-- </tu>\n" + PLAIN.format("c", "c") + "-->", "<note><![CDATA[</tu>" + PLAIN + "]]></note>", "\n\n")
        ))  # fmt: skip
        content = f'<tmx version="1.4"><header/><body>\n{"".join(units)}</body></tmx>'.encode()
        path.write_bytes(fuzz.mutated(content, rng) if rng.random() < 0.6 else content)
        ours = outcome(path)
        with monkeypatch.context() as patch:
            patch.setattr(tmx, "_PLAIN", never)
            parsed = outcome(path)
        assert ours == parsed, number
        several += len(ours[0]) > 3
    assert several > 100
