"""Two texts with as many lines go in, and line n of one with line n of the other comes out as a pair."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import zip_longest

from clknn.corpus.archives import File, lines
from clknn.corpus.cleaning import AS_IT_IS, Cleaning, clean_pair
from clknn.corpus.pair import Origin, Pair, Tally
from clknn.errors import InputError


def read_aligned(source: File, target: File, tally: Tally, cleaning: Cleaning = AS_IT_IS) -> Iterator[Pair]:
    """Line n of one UTF-8 file with line n of the other. Only a line feed ends a line."""
    source.refuse_unreadable()
    target.refuse_unreadable()
    return _pairs(source, target, tally, cleaning)


def _pairs(source_file: File, target_file: File, tally: Tally, cleaning: Cleaning) -> Iterator[Pair]:
    both = zip_longest(lines(source_file), lines(target_file))
    for number, (source, target) in enumerate(both, start=1):
        if source is None or target is None:
            longer = number + sum(1 for _ in both)
            counts = (number - 1, longer) if source is None else (longer, number - 1)
            raise InputError(
                f"{source_file} has {counts[0]:,} lines and {target_file} has {counts[1]:,}; they must"
                " be aligned line by line"
            )
        tally.read += 1
        if pair := clean_pair(source, target, Origin(source_file.name, line=number), tally, cleaning):
            yield pair
