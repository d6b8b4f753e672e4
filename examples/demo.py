"""The main job on real data: adapts the small model to LibreOffice's help, and shows what changed.

The translation memory, the model and their licences are described in examples/README.md. `make demo` runs this.
"""

from __future__ import annotations

import argparse
import shutil
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from clknn import AdapterSettings, Pair, Tally, Translator, adaptation, load_model
from clknn.cli import Bars
from clknn.corpus import read_pairs, write_tmx

HERE = Path(__file__).parent
STORE = Path("demo.store")
MEMORY_PAIRS = 8_000  # as many of the 28,772 as let the demo end in six minutes on two cores
TEST_PAIRS = 300
console = Console(highlight=False, record=True, width=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=MEMORY_PAIRS, help="pairs of the memory to use")
    parser.add_argument("--test-pairs", type=int, default=TEST_PAIRS, help="held-out pairs to translate")
    parser.add_argument("--store", type=Path, default=STORE, help="where to make the datastore; it is replaced")
    parser.add_argument("--save", type=Path, help="write what is printed at the end to this file too")
    options = parser.parse_args()
    shutil.rmtree(options.store, ignore_errors=True)
    seconds: dict[str, float] = {}
    with Bars(console) as report:

        def stage(name: str, started: float) -> None:
            seconds[name] = time.perf_counter() - started

        started = time.perf_counter()
        model = load_model(str(HERE / "de-en-small"), "de", "en")
        memory = _part(HERE / "libreoffice-help.de-en.tmx.gz", options.pairs, options.store)
        stage("load the model, read the TMX", started)
        started = time.perf_counter()
        adaptation.build(options.store, [memory], model, report=report)
        stage("build: force-decode the memory", started)
        started = time.perf_counter()
        adaptation.train(options.store, AdapterSettings(), model, report=report)
        stage("train the adapter", started)
        started = time.perf_counter()
        adaptation.project(options.store, model, report=report)
        stage("project and index", started)
        started = time.perf_counter()
        adaptation.tune(options.store, model, report=report)
        stage("tune k, temperature, weight", started)
        started = time.perf_counter()
        translator = Translator.open(options.store, model)
        test = list(read_pairs([HERE / "libreoffice-test.de-en.tsv"], "de", "en", Tally()))[: options.test_pairs]
        result = adaptation.judge(translator, [p.source for p in test], [p.target for p in test], report)
        stage("translate the test pairs, twice", started)
    memory.unlink()
    console.export_text()  # the bars are not part of the record
    _scores(result)
    _side_by_side(result, test)
    _evidence(translator, test, result)
    _times(seconds)
    if options.save:
        options.save.write_text(console.export_text(), encoding="utf8")


def _part(whole: Path, pairs: int, store: Path) -> Path:
    """The first pairs of the memory, as a TMX beside the datastore."""
    part = store.with_suffix(".tmx")
    stream = read_pairs([whole], "de", "en", Tally())
    write_tmx((pair for pair, _ in zip(stream, range(pairs), strict=False)), part, "de", "en")
    return part


def _scores(result: adaptation.Verdict) -> None:
    table = Table("system", "BLEU", "chrF2", "brevity", "p (BLEU)", title="\nHeld-out test pairs", title_justify="left")
    for name, score in result.comparison.scores.items():
        p = "" if score.p_bleu is None else f"{score.p_bleu:.3f}"
        table.add_row(name, f"{score.bleu:.1f}", f"{score.chrf:.1f}", f"{score.brevity_penalty:.3f}", p)
    console.print(table)
    console.print(f"BLEU {result.comparison.bleu_signature}\nchrF {result.comparison.chrf_signature}")
    console.print("p: paired bootstrap against the base model")
    console.print(f"[bold]{result.sentence()}[/bold]")


def _side_by_side(result: adaptation.Verdict, test: list[Pair]) -> None:
    """Three sentences of middling length whose translation changed."""
    changed = [
        i
        for i, pair in enumerate(test)
        if 6 <= len(pair.source.split()) <= 14 and result.base[i].text != result.ours[i].text
    ]
    for i in changed[:3]:
        table = Table(show_header=False, title=f"\nTest pair {i + 1}", title_justify="left", width=100)
        table.add_row("source", Text(test[i].source))
        table.add_row("base", Text(result.base[i].text))
        table.add_row("with datastore", Text(result.ours[i].text))
        table.add_row("reference", Text(test[i].target))
        console.print(table)


def _evidence(translator: Translator, test: list[Pair], result: adaptation.Verdict) -> None:
    """For one of them, the stored pairs behind each word."""
    i = next(
        i
        for i, pair in enumerate(test)
        if 6 <= len(pair.source.split()) <= 14 and result.base[i].text != result.ours[i].text
    )
    (translation,) = translator.translate([test[i].source], evidence=True)
    console.print(Text(f"\nWhy: {translation.text}"))
    table = Table()
    for column, width in (("word", 12), ("from memory", 11), ("model p", 7), ("share", 5), ("stored pair (unit)", 56)):
        table.add_column(column, no_wrap=True, width=width, overflow="ellipsis")
    for word in translation.words or []:
        rows = [(f"{s.share:.2f}", f"{s.pair.target} = {s.pair.source} ({s.pair.origin.unit})") for s in word.support]
        for n, (share, pair) in enumerate(rows[:2] or [("", "none")]):
            shown = ("", "", "") if n else (word.text, f"{word.retrieved:.0%}", f"{word.p_model:.2f}")
            table.add_row(*shown, share, Text(pair))  # Text: what stands in a memory is never markup
    console.print(table)


def _times(seconds: dict[str, float]) -> None:
    table = Table("stage", "seconds", title="\nHow long it took", title_justify="left")
    for name, taken in seconds.items():
        table.add_row(name, f"{taken:.1f}")
    table.add_row("all", f"{sum(seconds.values()):.1f}")
    console.print(table)


if __name__ == "__main__":
    main()
