"""Force decoding: which entries, in which order, and what of them survives a kill."""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch

from clknn import states
from clknn.corpus import Origin, Pair, Tally
from clknn.errors import DatastoreError, InputError, ModelError
from clknn.model import Decoding, Forced, Generated, Mix, Tokens
from clknn.states import GrowingArray, Progress, force_decode, write_atomically, write_states

FILES = ("states", "values", "pairs", "positions")


class Letters:
    """A model whose tokens are letters: a state is (source letters, position, letter, 1), so that entries tell."""

    name, source_language, target_language, prefix = "letters", "de", "en", ""
    width, vocabulary, longest, precision, state_definition, fingerprint = 4, 128, 12, "float32", "told", "letters"

    def __init__(self, scale: float = 1.0) -> None:
        self.scale, self.batches = scale, list[tuple[list[Tokens], list[Tokens]]]()

    def tokenise_sources(self, texts: Sequence[str]) -> list[Tokens]:
        return [[ord(c) for c in text] for text in texts]

    def tokenise_targets(self, texts: Sequence[str]) -> list[Tokens]:
        return [[*(ord(c) for c in text), 0] for text in texts]

    def force(self, sources: list[Tokens], targets: list[Tokens], with_log_p: bool = False) -> Forced:
        assert not with_log_p
        self.batches.append((sources, targets))
        rows = [[len(s), i, token, 1] for s, t in zip(sources, targets, strict=True) for i, token in enumerate(t)]
        return Forced(torch.tensor(rows, dtype=torch.float32) * self.scale, None)

    def detokenise(self, tokens: Tokens) -> str:
        raise NotImplementedError

    def pieces(self, tokens: Tokens) -> list[str]:
        raise NotImplementedError

    def generate(self, sources: list[Tokens], decoding: Decoding, mix: Mix | None = None) -> list[Generated]:
        raise NotImplementedError


def numbered(*targets: str, first: int = 0) -> list[tuple[int, Pair]]:
    return [(i, Pair(f"s{t}", t, Origin("f.tsv", line=i + 1))) for i, t in enumerate(targets, first)]


TARGETS = ("xyz", "a", "abcdefg", "b", "pq", "ccc")


# -- entries -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch_tokens", [1, 16, 4096])
def test_entries_stand_in_the_order_of_pair_and_position(batch_tokens: int) -> None:
    block = force_decode(Letters(), numbered(*TARGETS, first=7), batch_tokens=batch_tokens)
    expected = [
        (7 + i, place, letter, len(target) + 1)
        for i, target in enumerate(TARGETS)
        for place, letter in enumerate([*map(ord, target), 0])
    ]
    told = zip(block.pairs, block.positions, block.values, block.states[:, 0], strict=True)
    assert [tuple(map(int, row)) for row in told] == expected
    np.testing.assert_array_equal(block.states[:, 1], block.positions)
    np.testing.assert_array_equal(block.states[:, 2], block.values)
    assert [array.dtype for array in (block.states, block.values, block.pairs, block.positions)] == [
        np.float16, np.int32, np.int32, np.int32,
    ]  # fmt: skip


def test_batches_hold_at_most_their_tokens_and_like_lengths() -> None:
    model = Letters()
    force_decode(model, numbered(*TARGETS), batch_tokens=16)
    assert sum(len(t) for _, t in model.batches) == len(TARGETS)
    for sources, targets in model.batches:
        longest = max(len(row) for row in (*sources, *targets))
        assert len(targets) == 1 or longest * len(targets) <= 16
    assert [len(t) for _, batch in model.batches for t in batch] == sorted(len(t) + 1 for t in TARGETS)


def test_a_pair_longer_than_the_model_gives_no_entries_and_is_counted() -> None:
    fits, tally = "a" * (Letters.longest - 2), Tally()
    block = force_decode(Letters(), numbered("a", fits, fits + "a", fits + "aa", "b"), tally)
    assert set(block.pairs.tolist()) == {0, 1, 4}
    (reason,) = tally.skipped
    assert reason == "longer than the model's 12 tokens"
    assert (tally.skipped[reason].count, tally.skipped[reason].first) == (2, "f.tsv:3")


def test_strict_stops_at_a_pair_longer_than_the_model() -> None:
    with pytest.raises(InputError, match=r"f\.tsv:2: longer than the model's 12 tokens"):
        force_decode(Letters(), numbered("a", "a" * 40), Tally(strict=True))


def test_nothing_in_gives_an_empty_block() -> None:
    block = force_decode(Letters(), [])
    assert block.states.shape == (0, 4)
    assert len(block.values) == len(block.pairs) == len(block.positions) == 0


@pytest.mark.parametrize("scale", [1e4, float("nan")])
def test_states_that_float16_cannot_hold_are_refused(scale: float) -> None:
    with pytest.raises(ModelError, match=r"letters: its states leave float16's range"):
        force_decode(Letters(scale), numbered("abc"))


# -- on disk -----------------------------------------------------------------------------------------------------------


def stream(targets: Sequence[str]) -> Callable[[int | None], Iterator[tuple[int, Pair]]]:
    return lambda after: (row for row in numbered(*targets) if after is None or row[0] > after)


def contents(folder: Path) -> dict[str, bytes]:
    return {name: (folder / f"{name}.npy").read_bytes() for name in FILES}


def test_the_number_of_entries_is_counted_in_every_file(tmp_path: Path) -> None:
    seen: list[Progress] = []
    progress = write_states(Letters(), stream(TARGETS), tmp_path, Tally(), seen.append, window=4)
    assert progress == Progress(5, sum(len(t) + 1 for t in TARGETS), len(TARGETS))
    assert [p.pairs for p in seen] == [4, 6]
    for name in FILES:
        assert len(np.load(tmp_path / f"{name}.npy")) == progress.entries


@pytest.mark.parametrize("stop", range(len(TARGETS)))
def test_a_run_stopped_anywhere_and_resumed_writes_the_same_bytes(tmp_path: Path, stop: int) -> None:
    (tmp_path / "whole").mkdir()
    (tmp_path / "parts").mkdir()
    whole = write_states(Letters(), stream(TARGETS), tmp_path / "whole", Tally(), window=2)

    def stopped(after: int | None) -> Iterator[tuple[int, Pair]]:
        for row in stream(TARGETS)(after):
            if row[0] == stop:
                raise KeyboardInterrupt
            yield row

    with pytest.raises(KeyboardInterrupt):
        write_states(Letters(), stopped, tmp_path / "parts", Tally(), window=2)
    resumed = Letters()
    assert write_states(resumed, stream(TARGETS), tmp_path / "parts", Tally(), window=2) == whole
    assert contents(tmp_path / "parts") == contents(tmp_path / "whole")
    assert sum(len(t) for _, t in resumed.batches) == len(TARGETS) - stop // 2 * 2  # what was done is not done again


def ends(progress: list[Progress]) -> list[int | None]:
    return [p.last_pair for p in progress]


@pytest.mark.parametrize("read_ahead", [1, 2, 256])
@pytest.mark.parametrize(
    ("window", "tokens", "expected"),
    [
        (4096, 4096, [5]), (4096, 6, [1, 2, 4, 5]), (4096, 7, [1, 2, 4, 5]), (4096, 1, [0, 1, 2, 3, 4, 5]),
        (2, 9, [1, 2, 4, 5]), (3, 15, [2, 5]), (3, 14, [2, 5]), (3, 13, [1, 4, 5]),
    ],
)  # fmt: skip
def test_a_window_ends_at_its_pairs_or_its_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, read_ahead: int, window: int, tokens: int, expected: list[int]
) -> None:
    """Tokens are 4, 2, 8, 2, 3 and 4 on either side; a pair with more than there may be stands alone."""
    monkeypatch.setattr(states, "READ_AHEAD", read_ahead)
    (tmp_path / "whole").mkdir()
    (tmp_path / "windows").mkdir()
    seen: list[Progress] = []
    write_states(Letters(), stream(TARGETS), tmp_path / "whole", Tally())
    write_states(Letters(), stream(TARGETS), tmp_path / "windows", Tally(), seen.append, window, tokens)
    assert ends(seen) == expected
    assert contents(tmp_path / "windows") == contents(tmp_path / "whole")


def test_a_window_ends_at_the_tokens_of_sources_too(tmp_path: Path) -> None:
    """What is read ahead of them is in memory as well."""
    seen: list[Progress] = []
    pairs = [(i, Pair("long" * 2, "t", Origin("f"))) for i in range(5)]
    write_states(Letters(), lambda _: iter(pairs), tmp_path, Tally(), seen.append, tokens=16)
    assert ends(seen) == [1, 3, 4]


@pytest.mark.parametrize("killed_at", [1, 2, 3])
def test_windows_end_in_the_same_places_after_a_resume(tmp_path: Path, killed_at: int) -> None:
    """What a state is can depend on its batch, in its last bits."""
    (tmp_path / "whole").mkdir()
    (tmp_path / "parts").mkdir()
    whole, parts = list[Progress](), list[Progress]()
    write_states(Letters(), stream(TARGETS), tmp_path / "whole", Tally(), whole.append, tokens=7)

    def advance(progress: Progress) -> None:
        parts.append(progress)
        if len(parts) == killed_at:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_states(Letters(), stream(TARGETS), tmp_path / "parts", Tally(), advance, tokens=7)
    write_states(Letters(), stream(TARGETS), tmp_path / "parts", Tally(), parts.append, tokens=7)
    assert parts == whole
    assert contents(tmp_path / "parts") == contents(tmp_path / "whole")


class Wide(Letters):
    """Many states at no cost."""

    width = 256

    def force(self, sources: list[Tokens], targets: list[Tokens], with_log_p: bool = False) -> Forced:  # noqa: ARG002
        return Forced(torch.zeros(sum(map(len, targets)), self.width), None)


def test_memory_holds_the_states_of_one_window_once(tmp_path: Path) -> None:
    """Neither a second copy for the file nor the window before."""
    tokens = 20_000
    tracemalloc.start()
    try:
        pair = Pair("s", "abcdefghi", Origin("f"))
        write_states(Wide(), lambda _: ((i, pair) for i in range(6_000)), tmp_path, Tally(), tokens=tokens)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 1.7 * tokens * Wide.width * 2


@pytest.mark.parametrize("file", FILES)
def test_rows_behind_the_progress_mark_are_cut_off(tmp_path: Path, file: str) -> None:
    """A kill can come between any two of the four files, or within a row."""
    write_states(Letters(), stream(TARGETS[:2]), tmp_path, Tally(), window=2)
    with (tmp_path / f"{file}.npy").open("ab") as half_written:
        half_written.write(b"\xff" * 13)
    write_states(Letters(), stream(TARGETS), tmp_path, Tally(), window=2)
    (tmp_path / "whole").mkdir()
    write_states(Letters(), stream(TARGETS), tmp_path / "whole", Tally(), window=2)
    assert contents(tmp_path) == contents(tmp_path / "whole")


@pytest.mark.parametrize("missing", [1, 100])
def test_a_file_shorter_than_its_mark_is_refused_and_not_filled_with_zeros(tmp_path: Path, missing: int) -> None:
    write_states(Letters(), stream(TARGETS), tmp_path, Tally())
    file = tmp_path / "values.npy"
    file.write_bytes(file.read_bytes()[:-missing])
    with pytest.raises(DatastoreError, match=r"values\.npy: shorter than its progress mark says"):
        write_states(Letters(), stream([*TARGETS, "more"]), tmp_path, Tally())


def test_what_was_skipped_before_a_stop_is_still_counted_after_it(tmp_path: Path) -> None:
    long, before, after = "a" * 40, Tally(), Tally()
    write_states(Letters(), stream([long, "b"]), tmp_path, before, window=2)
    progress = write_states(Letters(), stream([long, "b", long, "c"]), tmp_path, after, window=2)
    assert progress.pairs == 2
    assert after.lines()[1:] == ["skipped 2: longer than the model's 12 tokens (first: f.tsv:1)"]


@pytest.mark.parametrize("width", [None, 3])
@pytest.mark.parametrize("rows", [0, 1, 9, 10, 99_999])
def test_numpy_reads_a_growing_array_of_any_length(tmp_path: Path, width: int | None, rows: int) -> None:
    """The header is written again at the end, and must not move the rows by getting longer."""
    file = tmp_path / "a.npy"
    shape = (rows,) if width is None else (rows, width)
    content: npt.NDArray[np.float16] = np.random.default_rng(0).normal(size=shape).astype(np.float16)
    with GrowingArray(file, np.float16, width, 0) as array:
        for part in np.array_split(content, 3):
            array.append(part)
    np.testing.assert_array_equal(np.load(file), content)
    np.testing.assert_array_equal(np.load(file, mmap_mode="r"), content)


@pytest.mark.parametrize("rows", [10**6, 10**12])
def test_the_header_has_room_for_more_rows_than_a_disk(tmp_path: Path, rows: int) -> None:
    with GrowingArray(tmp_path / "a.npy", np.int32, None, 0) as array:
        array.append(np.zeros(1, np.int32))
        array.rows = rows
    with (tmp_path / "a.npy").open("rb") as file:
        assert np.lib.format.read_magic(file) == (1, 0)
        assert np.lib.format.read_array_header_1_0(file) == ((rows,), False, np.dtype(np.int32))
        assert np.frombuffer(file.read(), np.int32).tolist() == [0]


def test_an_error_leaves_a_growing_array_closed_and_resumable(tmp_path: Path) -> None:
    def killed() -> None:
        with GrowingArray(tmp_path / "a.npy", np.int32, None, 0) as array:
            array.append(np.arange(5, dtype=np.int32))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        killed()
    with GrowingArray(tmp_path / "a.npy", np.int32, None, 3) as array:
        array.append(np.array([7], np.int32))
    assert np.load(tmp_path / "a.npy").tolist() == [0, 1, 2, 7]


def test_text_is_written_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "mark.json"
    write_atomically(file, "old")

    def killed(_: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(states.os, "fsync", killed)
    with pytest.raises(KeyboardInterrupt):
        write_atomically(file, "new")
    assert file.read_text() == "old"
    monkeypatch.undo()
    write_atomically(file, json.dumps({"ü": 1}, ensure_ascii=False))
    assert file.read_text(encoding="utf8") == '{"ü": 1}'
