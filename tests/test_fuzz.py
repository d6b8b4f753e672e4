"""Five hundred mutated files; `make fuzz` tries 20,000."""

from __future__ import annotations

import fuzz


def test_no_file_crashes_hangs_or_fills_the_memory() -> None:
    ended = fuzz.run(range(500))
    assert sum(ended.values()) == 500
    assert min(ended["read"], ended["refused"]) > 50  # both sides of the gate are tried
