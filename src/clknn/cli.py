"""The command line: flags in, one library call per command, text and an exit code out.

Errors that a user can put right are one line on stderr and exit code 2; a bug is a traceback and 1; Ctrl-C says how to
resume, where that is possible, and exits 130. Nothing here knows how anything is done, and torch is imported only when
a command runs.
"""

from __future__ import annotations

import errno
import json
import os
import re
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, fields, replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Column, Table

from clknn.errors import DatastoreError, Error, InputError, ModelError

if TYPE_CHECKING:
    from clknn.adaptation import Method, Verdict
    from clknn.corpus import Tally
    from clknn.datastore import Manifest
    from clknn.evaluation import Comparison
    from clknn.model import Decoding, Model
    from clknn.translator import Translation, Translator
    from clknn.tuning import Tuner

app = typer.Typer(
    help="Machine translation that learns a translation memory in minutes, without fine-tuning.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
_UNWRITTEN = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
_NO_MEMORY = re.compile("out of memory|not enough memory|can't allocate memory|bad_alloc", re.IGNORECASE)
out = Console(highlight=False, soft_wrap=True)
err = Console(stderr=True, highlight=False, soft_wrap=True)


class System(StrEnum):
    """What `--method` can name."""

    clknn = "clknn"
    knn_mt = "knn-mt"
    ckmt = "ckmt"
    adaptive = "adaptive"
    kster = "kster"
    gated = "gated"


class Combining(StrEnum):
    """What `--combiner` can name."""

    fixed = "fixed"
    scaled = "scaled"
    meta_k = "meta-k"
    kernel = "kernel"
    gate = "gate"


Files = Annotated[
    list[Path],
    typer.Argument(
        help="TMX, XLIFF, PO, MO, TSV, CSV or JSON-lines files, folders or zips of them, or two aligned text files, "
        "source first; .gz allowed."
    ),
]
Store = Annotated[Path, typer.Argument(help="The datastore's folder.")]
ModelName = Annotated[str, typer.Option("--model", help="Checkpoint folder or hub name.")]
OtherModel = Annotated[
    str | None, typer.Option("--model", help="Where the model is now, if not where the datastore remembers it.")
]
Source = Annotated[str, typer.Option(help="Source language, as in the file: de, de-AT.")]
Target = Annotated[str, typer.Option(help="Target language.")]
Out = Annotated[Path, typer.Option(help="The folder to make the datastore in.")]
HoldOut = Annotated[
    int,
    typer.Option(min=0, help="Pairs held out for tuning, and as many again for the verdict; at most a twentieth each."),
]
TuneOn = Annotated[
    list[Path] | None, typer.Option(help="Tune on these pairs instead of held-out ones; twice for two aligned files.")
]
General = Annotated[
    list[Path] | None,
    typer.Option(
        help="Pairs of other text than the translation memory's, which must not get worse: sources like these are "
        "left to the base model. Twice for two aligned files."
    ),
]
Ending = Annotated[
    bool | None,
    typer.Option(help="Tune how hard it is to end a sentence, by translating held-out pairs. By default gated does."),
]
Seed = Annotated[int, typer.Option(min=0, help="Decides what is held out and drawn.")]
Strict = Annotated[bool, typer.Option("--strict", help="Stop at the first unit that would be skipped.")]
AllStates = Annotated[
    bool,
    typer.Option("--all-states", help="Take XLIFF's unfinished units and gettext's fuzzy and obsolete entries too."),
]
SkipOtherLanguages = Annotated[
    bool, typer.Option("--skip-other-languages", help="Skip pairs with a side clearly in another language.")
]
SkipIdentical = Annotated[
    bool, typer.Option("--skip-identical", help="Skip pairs whose source and target are the same.")
]
SkipLetterless = Annotated[bool, typer.Option("--skip-letterless", help="Skip pairs with a side without any letter.")]
SkipNearDuplicates = Annotated[
    bool,
    typer.Option(
        "--skip-near-duplicates", help="Skip pairs unlike an earlier one only in case, spacing, punctuation or digits."
    ),
]
LengthRatio = Annotated[
    float | None,
    typer.Option(min=1, help="Skip pairs with one side longer than this many times the other; by default none."),
]
StripControls = Annotated[
    bool, typer.Option("--strip-controls", help="Take control characters out, instead of skipping pairs with them.")
]
Nfc = Annotated[bool, typer.Option("--nfc", help="Write composed characters (Unicode's NFC).")]
Device = Annotated[str, typer.Option(help="cpu, cuda, cuda:1 …")]
Dtype = Annotated[str, typer.Option(help="The model's precision: float32 or bfloat16.")]
Prefix = Annotated[str | None, typer.Option(help="Text before each source, for T5; by default the checkpoint's own.")]
MethodOption = Annotated[
    System,
    typer.Option(
        help="clknn: trained keys, weight scaled by confidence. gated: these keys refined on what they retrieve, and a "
        "learned gate. knn-mt, ckmt, adaptive, kster: the systems they are compared with."
    ),
]
CombinerOption = Annotated[
    Combining | None,
    typer.Option(
        help="fixed: k, temperature, weight. scaled: the weight times confidence. meta-k, kernel, gate: learned. "
        "By default the method's own."
    ),
]
K = Annotated[int | None, typer.Option(help="Neighbours asked for, instead of the tuned number.")]
Temperature = Annotated[float | None, typer.Option(help="Softness of p_knn, instead of the tuned one.")]
Weight = Annotated[float | None, typer.Option(help="Share of p_knn from 0 (base model) to 1.")]
Beam = Annotated[int, typer.Option(min=1, max=1000, help="Beam width; 1 is greedy.")]
LengthPenalty = Annotated[float, typer.Option(help="Exponent of the length that scores are divided by.")]
MaxNewTokens = Annotated[int, typer.Option(min=1, help="Longest translation, in tokens; --longest-ratio can say less.")]
LongestRatio = Annotated[
    float,
    typer.Option(min=0, help="Longest translation, in tokens for each of its source's, and 16 more; 0: no such limit."),
]
Reference = Annotated[bool, typer.Option("--reference", help="Decode by transformers' generate, which is slower.")]
Batch = Annotated[int, typer.Option(min=1, help="Sentences decoded together.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]


@app.callback(invoke_without_command=True)
def _root(version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    if version:
        from clknn import __version__

        typer.echo(f"clknn {__version__}")
        raise typer.Exit


@app.command()
def adapt(
    files: Files,
    model: ModelName,
    source: Source,
    target: Target,
    out: Out,
    method: MethodOption = System.clknn,
    combiner: CombinerOption = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Most training steps; it stops early when it can.")] = None,
    hold_out: HoldOut = 300,
    tune_on: TuneOn = None,
    general: General = None,
    ending: Ending = None,
    seed: Seed = 0,
    strict: Strict = False,
    all_states: AllStates = False,
    skip_other_languages: SkipOtherLanguages = False,
    skip_identical: SkipIdentical = False,
    skip_letterless: SkipLetterless = False,
    skip_near_duplicates: SkipNearDuplicates = False,
    length_ratio: LengthRatio = None,
    strip_controls: StripControls = False,
    nfc: Nfc = False,
    device: Device = "cpu",
    dtype: Dtype = "float32",
    prefix: Prefix = None,
) -> None:
    """Make a datastore of a translation memory: build, train, project and tune, then the verdict."""
    from clknn import adaptation
    from clknn.corpus import Cleaning, Tally

    cleaning = Cleaning(
        skip_other_languages, length_ratio, skip_identical, skip_letterless, skip_near_duplicates, strip_controls, nfc
    )
    tally = Tally(strict=strict)
    with _taken_up(out), Bars() as report:
        loaded = _load(model, source, target, device, dtype, prefix)
        chosen = _method(method, combiner, steps, seed)
        chosen = chosen if ending is None else replace(chosen, ending=ending)
        aside = tune_on or (), general or ()
        verdict = adaptation.adapt(
            out, files, loaded, chosen, hold_out, seed, tally, report, *aside, cleaning, all_states
        )
    _say_tally(tally)
    _say_verdict(out, verdict, hold_out)


@app.command()
def build(
    files: Files,
    model: ModelName,
    source: Source,
    target: Target,
    out: Out,
    hold_out: HoldOut = 300,
    tune_on: TuneOn = None,
    seed: Seed = 0,
    strict: Strict = False,
    all_states: AllStates = False,
    skip_other_languages: SkipOtherLanguages = False,
    skip_identical: SkipIdentical = False,
    skip_letterless: SkipLetterless = False,
    skip_near_duplicates: SkipNearDuplicates = False,
    length_ratio: LengthRatio = None,
    strip_controls: StripControls = False,
    nfc: Nfc = False,
    device: Device = "cpu",
    dtype: Dtype = "float32",
    prefix: Prefix = None,
) -> None:
    """Stage 1: read pairs, hold some out, force-decode the rest into entries."""
    from clknn import adaptation
    from clknn.corpus import Cleaning, Tally

    cleaning = Cleaning(
        skip_other_languages, length_ratio, skip_identical, skip_letterless, skip_near_duplicates, strip_controls, nfc
    )
    tally = Tally(strict=strict)
    with _taken_up(out), Bars() as report:
        loaded = _load(model, source, target, device, dtype, prefix)
        manifest = adaptation.build(
            out, files, loaded, hold_out, seed, tally, report, tune_on or (), cleaning, all_states
        )
    _say_tally(tally)
    typer.echo(f"{out}: {manifest.entries:,} entries of {manifest.stored:,} pairs; next: clknn train {out}")


@app.command()
def train(
    store: Store,
    model: OtherModel = None,
    method: Annotated[System, typer.Option(help="clknn or ckmt: whose recipe.")] = System.clknn,
    states_of: Annotated[Path | None, typer.Option(help="Train on another datastore's states.")] = None,
    paper: Annotated[bool, typer.Option("--paper", help="Start from the published settings.")] = False,
    steps: Annotated[int | None, typer.Option(min=1, help="Most training steps.")] = None,
    batch: Annotated[int | None, typer.Option(min=1, help="Anchors in a step.")] = None,
    positives: Annotated[int | None, typer.Option(min=1, help="M, positives of an anchor.")] = None,
    negatives: Annotated[int | None, typer.Option(min=1, help="N, hard negatives of an anchor.")] = None,
    nearest: Annotated[int | None, typer.Option(min=1, help="K, class centres that negatives come from.")] = None,
    temperature: Annotated[float | None, typer.Option(min=0.001, help="T' of the loss.")] = None,
    inner: Annotated[int | None, typer.Option(min=1, help="d_f, width of the hidden layer.")] = None,
    width: Annotated[int | None, typer.Option(min=1, help="d_o, width of the output.")] = None,
    residual: Annotated[bool | None, typer.Option(help="Start from the states themselves.")] = None,
    shared: Annotated[bool | None, typer.Option(help="Other anchors' candidates are negatives too.")] = None,
    anchor_power: Annotated[
        float | None, typer.Option(help="Classes are drawn by count to this power; 1: uniform over entries.")
    ] = None,
    refresh: Annotated[int | None, typer.Option(min=0, help="Steps between centre computations; 0: once.")] = None,
    centre_entries: Annotated[
        int | None, typer.Option(min=0, help="Entries of a class that make its centre; 0: all.")
    ] = None,
    learning_rate: Annotated[float | None, typer.Option(min=0, help="Largest learning rate.")] = None,
    validate_every: Annotated[int | None, typer.Option(min=1, help="Steps between validations.")] = None,
    patience: Annotated[
        int | None, typer.Option(min=1, help="Validations without a better one before it stops.")
    ] = None,
    eps: Annotated[float | None, typer.Option(min=0, help="CKMT's radius; by default from the distances.")] = None,
    seed: Seed = 0,
    device: Device = "cpu",
    dtype: Dtype = "float32",
) -> None:
    """Stage 2: train the adapter by supervised contrastive learning."""
    from clknn import adaptation
    from clknn.adapter import PAPER, AdapterSettings
    from clknn.methods.ckmt import CkmtSettings

    options: dict[str, Any] = {
        "steps": steps, "batch": batch, "positives": positives, "negatives": negatives, "nearest": nearest,
        "temperature": temperature, "inner": inner, "width": width, "residual": residual, "shared": shared,
        "anchor_power": anchor_power, "learning_rate": learning_rate, "validate_every": validate_every,
        "patience": patience, "refresh": refresh, "centre_entries": centre_entries, "eps": eps,
    }  # fmt: skip
    given = {name: value for name, value in options.items() if value is not None} | {"seed": seed}
    settings: AdapterSettings | CkmtSettings
    if method is System.ckmt:
        _refuse_strangers(given | ({"paper": True} if paper else {}), CkmtSettings, "ckmt")
        settings = CkmtSettings(**given)
    elif method is System.clknn:
        _refuse_strangers(given, AdapterSettings, "clknn")
        once: dict[str, Any] = {name: given[name] or None for name in ("refresh", "centre_entries") if name in given}
        settings = replace(PAPER if paper else AdapterSettings(), **given | once)
    else:
        raise InputError(f"--method {method.value} has no recipe of its own to train; choose clknn or ckmt")
    with _taken_up(store), Bars() as report:
        trained = adaptation.train(store, settings, _model_of(store, model, device, dtype), states_of, report)
    if trained is None:
        typer.echo(f"{store}: trained with these settings before; next: clknn project {store}")
        return
    best = max(trained.curve, key=lambda step: step.accuracy)
    typer.echo(
        f"{store}: retrieval accuracy@8 {trained.curve[0].accuracy:.3f} → {best.accuracy:.3f} at step {best.step}; "
        f"next: clknn project {store}"
    )


@app.command()
def project(
    store: Store,
    model: OtherModel = None,
    raw: Annotated[bool, typer.Option("--raw", help="Raw states, by squared L2: vanilla kNN-MT.")] = False,
    size: Annotated[int | None, typer.Option(min=1, help="Dimensions kept by PCA; by default 128 at most.")] = None,
    centred: Annotated[bool, typer.Option(help="Subtract the mean before PCA.")] = True,
    refine: Annotated[bool, typer.Option("--refine", help="Refine the keys on what they retrieve.")] = False,
    device: Device = "cpu",
    dtype: Dtype = "float32",
) -> None:
    """Stage 3: turn states into keys and index them."""
    from clknn import adaptation
    from clknn.methods.neighbourhood import RefineSettings

    if raw and (size is not None or not centred or refine):
        raise InputError(
            "--size, --no-centred and --refine do not apply to --raw, which searches the states as they are"
        )
    refined = RefineSettings() if refine else None
    with _taken_up(store), Bars() as report:
        loaded = _model_of(store, model, device, dtype)
        manifest = adaptation.project(store, loaded, raw, size, centred, report, refined)
    if not raw and "adapter" not in manifest.files:
        err.print(
            f"{store}: no adapter was trained, so these are raw states narrowed by PCA; `clknn train {store}` first"
        )
    measured = manifest.measured["project"]
    typer.echo(f"{store}: {measured['index']}; next: clknn tune {store}")


@app.command()
def tune(
    store: Store,
    model: OtherModel = None,
    combiner: CombinerOption = None,
    general: General = None,
    ending: Annotated[
        bool | None,
        typer.Option(
            help="Tune how hard it is to end a sentence, by translating held-out pairs; by default as before."
        ),
    ] = None,
    device: Device = "cpu",
    dtype: Dtype = "float32",
) -> None:
    """Stage 4: choose k, temperature and weight on the held-out pairs, or train what takes their place."""
    from clknn import adaptation, datastore

    with _taken_up(store), Bars() as report:
        tuner = None if combiner is None else _tuner(combiner)
        loaded, before = _model_of(store, model, device, dtype), datastore.read_manifest(store)
        again = bool(before.options.get("tune", {}).get("ending")) if ending is None else ending
        manifest = adaptation.tune(store, loaded, tuner, report, general or (), again)
    if "familiarity" in before.files and "familiarity" not in manifest.files:
        err.print(f"{store}: no source is left to the base model any more; give --general again to have that back")
    typer.echo(f"{store}: {_mixing_line(manifest)}")


@app.command()
def translate(
    store: Annotated[Path, typer.Option(help="The datastore's folder.")],
    model: OtherModel = None,
    k: K = None,
    temperature: Temperature = None,
    weight: Weight = None,
    beam: Beam = 5,
    length_penalty: LengthPenalty = 1.0,
    max_new_tokens: MaxNewTokens = 256,
    longest_ratio: LongestRatio = 3.0,
    reference: Reference = False,
    batch: Batch = 32,
    evidence: Annotated[bool, typer.Option("--evidence", help="Write JSON lines with each word's evidence.")] = False,
    guarded: Annotated[bool, typer.Option(help="Leave sources unlike the stored ones to the base model.")] = True,
    device: Device = "cpu",
    dtype: Dtype = "float32",
) -> None:
    """Translate standard input to standard output, one line to one line."""
    if sys.stdin is None or sys.stdout is None:  # where the shell has closed them
        name = "input" if sys.stdin is None else "output"
        raise InputError(
            f"standard {name} is closed; leave it open, or name a file with {'<' if name == 'input' else '>'}"
        )
    from clknn.model import Decoding
    from clknn.translator import TooLongError

    decoding = Decoding(beam, length_penalty, max_new_tokens, longest_ratio or None, reference=reference)
    translator = _translator(store, model, decoding, device, dtype).with_mixing(k, temperature, weight)
    translator = replace(translator, guarded=guarded)

    def say(translation: Translation) -> None:
        text = json.dumps(_evidence(translation), ensure_ascii=False) if evidence else translation.text
        sys.stdout.buffer.write(text.replace("\n", " ").encode() + b"\n")  # some models can produce line feeds

    read, refused = 0, 0
    for block in _lines_as_they_come(sys.stdin.fileno()):
        texts = list(block)
        while True:
            try:
                translations = translator.translate(texts, evidence, batch)
                break
            except TooLongError as error:  # its line is answered by an empty one, and no line is lost
                texts[error.place] = ""
                refused += 1
                err.print(f"standard input:{read + error.place + 1}: {error.reason}", markup=False)
        for source, translation in zip(block, translations, strict=True):
            say(replace(translation, source=source))
        sys.stdout.flush()
        read += len(block)
    if refused:
        lines = f"{refused:,} line{'s' if refused > 1 else ''} of standard input"
        raise InputError(f"{lines} too long to translate and answered by an empty line; split into sentences")


@app.command()
def evaluate(
    store: Annotated[Path, typer.Option(help="The datastore's folder.")],
    files: Annotated[list[Path] | None, typer.Argument(help="Pairs to test on; without any, those held out.")] = None,
    model: OtherModel = None,
    k: K = None,
    temperature: Temperature = None,
    weight: Weight = None,
    beam: Beam = 5,
    length_penalty: LengthPenalty = 1.0,
    max_new_tokens: MaxNewTokens = 256,
    longest_ratio: LongestRatio = 3.0,
    reference: Reference = False,
    device: Device = "cpu",
    dtype: Dtype = "float32",
    as_json: Json = False,
) -> None:
    """Base model against datastore: BLEU and chrF with significance, and retrieval accuracy."""
    from clknn import adaptation
    from clknn.corpus import Tally, read_pairs
    from clknn.model import Decoding

    decoding = Decoding(beam, length_penalty, max_new_tokens, longest_ratio or None, reference=reference)
    with Bars() as report:
        translator = _translator(store, model, decoding, device, dtype).with_mixing(k, temperature, weight)
        opened = translator.datastore
        assert opened is not None
        tally = Tally()
        manifest = opened.manifest
        if files:
            named = read_pairs(files, manifest.source_language, manifest.target_language, tally)
        else:
            named = (pair for _, pair in opened.pairs.each("test"))
        pairs = adaptation.fitting(translator.model, named, tally)
        if not pairs:
            raise InputError(f"{store}: no pairs to test on; name a file of them")
        tally.kept = len(pairs)
        sources, references = [p.source for p in pairs], [p.target for p in pairs]
        result = adaptation.judge(translator, sources, references, report, files[0].name if files else None)
        accuracy = adaptation.accuracy_of(translator, sources, references)
    _say_tally(tally)
    if as_json:
        scores = asdict(result.comparison) | {
            "slowdown": result.slowdown,
            "retrieval_accuracy": accuracy,
            "known": result.known,
        }
        typer.echo(json.dumps(scores, ensure_ascii=False))
        return
    _say_comparison(result.comparison)
    typer.echo("retrieval accuracy " + "  ".join(f"@{k} {a:.3f}" for k, a in accuracy.items()))
    typer.echo(result.sentence())


@app.command("import")
def import_(
    files: Files,
    source: Source,
    target: Target,
    out: Annotated[
        Path, typer.Option(help="The file to write: .tmx, .xlf (XLIFF 1.2), .xliff (2.0), .po, .tsv or .jsonl; or .gz.")
    ],
    strict: Strict = False,
    all_states: AllStates = False,
    skip_other_languages: SkipOtherLanguages = False,
    skip_identical: SkipIdentical = False,
    skip_letterless: SkipLetterless = False,
    skip_near_duplicates: SkipNearDuplicates = False,
    length_ratio: LengthRatio = None,
    strip_controls: StripControls = False,
    nfc: Nfc = False,
) -> None:
    """Read files, clean their pairs and write them as one file.

    Always skipped: pairs with an empty side, a side of more than 5,000 characters, or control characters. Inline codes,
    notes, properties, dates and ids come back in the format they came from.
    """
    from clknn import corpus

    cleaning = corpus.Cleaning(
        skip_other_languages, length_ratio, skip_identical, skip_letterless, skip_near_duplicates, strip_controls, nfc
    )
    tally, started = corpus.Tally(strict=strict), time.monotonic()
    with Bars() as report:

        def advance(tally: Tally) -> None:
            report("import", tally.read, 0, f"units, {tally.read / (time.monotonic() - started):,.0f} a second")

        count = corpus.convert(files, out, source, target, tally, cleaning, all_states, advance)
    _say_tally(tally)
    seconds = max(time.monotonic() - started, 1e-9)
    typer.echo(f"{out}: {count:,} pairs; {tally.read / seconds:,.0f} units a second")


@app.command()
def export(
    store: Store,
    out: Annotated[
        Path, typer.Option(help="The file to write: .tmx, .xlf (XLIFF 1.2), .xliff (2.0), .po, .tsv or .jsonl; or .gz.")
    ],
) -> None:
    """Write a datastore's translation memory to a file, held-out pairs included, with what was known of each pair."""
    from clknn import adaptation

    with Bars() as report:
        count = adaptation.export(store, out, report)
    typer.echo(f"{out}: {count:,} pairs")


@app.command()
def inspect(
    store: Store,
    verify: Annotated[bool, typer.Option("--verify", help="Also check every file against its checksum.")] = False,
    as_json: Json = False,
) -> None:
    """What is in a datastore, every option it was made with, and its health."""
    from clknn import datastore

    manifest = datastore.read_manifest(store)
    if as_json:
        typer.echo(json.dumps(asdict(manifest), ensure_ascii=False))
    else:
        _say_manifest(store, manifest)
    with datastore.open_datastore(store):
        pass
    wrong = datastore.verify(store) if verify else []
    if wrong:
        raise DatastoreError("; ".join(wrong))
    if not as_json:
        typer.echo("health: every checksum holds" if verify else "health: opens; --verify checks every byte")


@app.command()
def figures(
    store: Store,
    files: Annotated[list[Path] | None, typer.Argument(help="Pairs to ask with; without any, those held out.")] = None,
    out: Annotated[Path, typer.Option(help="The folder for PNG, SVG and figures.json.")] = Path("figures"),
    model: OtherModel = None,
    seed: Seed = 0,
    device: Device = "cpu",
    dtype: Dtype = "float32",
) -> None:
    """Draw a datastore: retrieval accuracy, a t-SNE of its values, what confidence is worth; with the numbers."""
    from clknn import adaptation, datastore
    from clknn import figures as drawing
    from clknn.corpus import Tally, read_pairs

    tally = Tally()
    with Bars() as report:
        loaded = _model_of(store, model, device, dtype)
        with datastore.open_datastore(store, loaded) as opened:
            manifest = opened.manifest
            if files:
                named = read_pairs(files, manifest.source_language, manifest.target_language, tally)
            else:
                named = (pair for _, pair in opened.pairs.each("test"))
            pairs = adaptation.fitting(loaded, named, tally)
            if not pairs:
                raise InputError(f"{store}: no pairs to ask with; name a file of them")
            drawn = drawing.of_datastore(opened, loaded, pairs, out, seed, report)
            known = opened.pairs.known((pair.source, pair.target) for pair in pairs)
    tally.kept = len(pairs)
    _say_tally(tally)
    aside = f", of which {known:,} have a side that is stored: these flatter it" if known else ""
    typer.echo(f"{out}: {', '.join(file.name for file in drawn)}; asked with {len(pairs):,} segments{aside}")


def main() -> None:
    """The entry point: exit codes and the one-line errors live here."""
    try:
        command = typer.main.get_command(app)
        # Not app(), which would answer wrong flags, Ctrl-C and a closed pipe in its own ways before we could.
        with command.make_context("clknn", sys.argv[1:] or ["--help"]) as context:
            command.invoke(context)
        if sys.stdout is not None:
            sys.stdout.flush()  # while there is still someone to tell that it failed
    except typer.Exit as done:
        sys.exit(done.exit_code)
    except typer.TyperException as error:
        _fail(f"{error.format_message()} (`clknn --help` and `clknn COMMAND --help` list what there is)")
    except Error as error:
        _fail(str(error))
    except KeyboardInterrupt as stop:
        err.print("clknn: interrupted" + "".join(f"; {advice}" for advice in stop.args), markup=False)
        sys.exit(130)
    except BrokenPipeError:
        _drop_output()
        sys.exit(141)
    except OSError as error:
        if error.filename is not None or error.errno not in _UNWRITTEN:
            raise
        _drop_output()
        _fail(f"standard output cannot be written to ({error.strerror}); make room, or send it elsewhere")
    except (MemoryError, RuntimeError) as error:  # PyTorch says it by a RuntimeError
        if not isinstance(error, MemoryError) and not _NO_MEMORY.search(str(error)):
            raise
        _fail("out of memory; lower --batch or --beam where the command has them, or free some")


def _drop_output() -> None:
    """What is left in the buffer would be written, and fail, once more when Python ends."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


@contextmanager
def _taken_up(store: Path) -> Iterator[None]:
    """Around what a second call takes up where the first was interrupted."""
    try:
        yield
    except KeyboardInterrupt as stop:
        raise KeyboardInterrupt(f"run the same command again: {store} keeps what was done") from stop


def _fail(reason: str) -> NoReturn:
    err.print("clknn: " + " ".join(reason.split()), markup=False)
    sys.exit(2)


# -- what commands share ----------------------------------------------------------------------------------------------


def _load(name: str, source: str, target: str, device: str, dtype: str, prefix: str | None) -> Model:
    from clknn import model

    return model.load(name, source, target, device, dtype, prefix)


def _model_of(store: Path, name: str | None, device: str = "cpu", dtype: str = "float32") -> Model:
    from clknn import datastore

    manifest = datastore.read_draft(store)
    if manifest is None:
        manifest = datastore.read_manifest(store)
    remembered = Path(manifest.model)
    if name is None and remembered.is_absolute() and not remembered.exists():
        raise ModelError(f"{store}: its model was in {remembered} and is not there now; say where it is with --model")
    languages = manifest.source_language, manifest.target_language
    return _load(name or manifest.model, *languages, device, dtype, manifest.prefix)


def _translator(store: Path, name: str | None, decoding: Decoding, device: str, dtype: str) -> Translator:
    from clknn import datastore
    from clknn.translator import Translator

    datastore.read_manifest(store)
    translator = Translator.open(store, _model_of(store, name, device, dtype), decoding=decoding)
    if translator.why_reference is not None and not decoding.reference:
        err.print(f"{store}: decodes by transformers' generate, which is slower: {translator.why_reference}")
    return translator


def _method(system: System, combiner: Combining | None, steps: int | None, seed: int) -> Method:
    from clknn import adaptation

    match system:
        case System.knn_mt:
            method = adaptation.KNN_MT
        case System.clknn:
            method = adaptation.CLKNN
        case System.ckmt:
            method = adaptation.CKMT_ADAPTIVE
        case System.adaptive:
            method = adaptation.ADAPTIVE
        case System.kster:
            method = adaptation.KSTER
        case System.gated:
            method = adaptation.GATED
    if combiner is not None:
        method = replace(method, tuner=_tuner(combiner))
    if method.adapter is None:
        if steps is not None:
            raise InputError(f"--steps does not apply to --method {system.value}, which trains no adapter")
        return method
    return replace(method, adapter=replace(method.adapter, steps=steps or method.adapter.steps, seed=seed))


def _tuner(combiner: Combining) -> Tuner:
    from clknn.methods.adaptive import MetaKTuner
    from clknn.methods.gate import GateTuner
    from clknn.methods.kster import KernelTuner
    from clknn.tuning import Grid

    match combiner:
        case Combining.fixed:
            return Grid(scaled=False)
        case Combining.scaled:
            return Grid(scaled=True)
        case Combining.meta_k:
            return MetaKTuner()
        case Combining.kernel:
            return KernelTuner()
        case Combining.gate:
            return GateTuner()


def _refuse_strangers(given: dict[str, Any], settings: type, method: str) -> None:
    """An option that a method does not have is named, never passed over."""
    strangers = [f"--{name.replace('_', '-')}" for name in given if name not in {f.name for f in fields(settings)}]
    if strangers:
        raise InputError(f"{', '.join(strangers)} does not apply to --method {method}; leave it out")


def _lines_as_they_come(descriptor: int) -> Iterator[list[str]]:
    """Blocks of the lines that have arrived, so that a person typing waits for one line and a file fills batches."""
    rest, number = b"", 0
    while chunk := _read(descriptor):
        *lines, rest = (rest + chunk).split(b"\n")
        for start in range(0, len(lines), 256):
            yield from _block(lines[start : start + 256], number + start)
        number += len(lines)
    if rest:
        yield from _block([rest], number)


def _read(descriptor: int) -> bytes:
    try:
        return os.read(descriptor, 1 << 16)
    except OSError as error:
        raise InputError(f"standard input cannot be read ({error.strerror}); name a text file with <") from error


def _block(lines: list[bytes], number: int) -> Iterator[list[str]]:
    """These lines as text, those before one that is not UTF-8 included."""
    texts: list[str] = []
    for line in lines:
        number += 1
        try:
            texts.append(line.decode("utf-8-sig" if number == 1 else "utf-8").rstrip("\r"))
        except UnicodeDecodeError as error:
            yield texts
            raise InputError(
                f"standard input:{number}: not UTF-8 at byte {error.start + 1} of the line"
                f" (0x{error.object[error.start]:02x}); convert it first (iconv -t utf-8)"
            ) from error
    yield texts


def _evidence(translation: Translation) -> dict[str, Any]:
    words = []
    for word in translation.words or []:
        support = [
            {
                "share": round(s.share, 4),
                "nearness": round(s.nearness, 4),
                "pair": s.pair_id,
                "position": s.position,
                "source": s.pair.source,
                "target": s.pair.target,
                "file": s.pair.origin.file,
                "unit": s.pair.origin.unit,
                "line": s.pair.origin.line,
            }
            for s in word.support
        ]
        words.append(
            {
                "word": word.text,
                "retrieved": round(word.retrieved, 4),
                "p_model": round(word.p_model, 4),
                "support": support,
            }
        )
    said = {"source": translation.source, "translation": translation.text, "familiar": translation.familiar}
    return {**said, "words": words}


def _say_tally(tally: Tally) -> None:
    for line in tally.lines() if tally.read else []:
        err.print(line, markup=False)


def _say_verdict(store: Path, verdict: Verdict | None, hold_out: int) -> None:
    if verdict is None:
        from clknn import datastore

        reason = "too few pairs to hold any out" if hold_out else "no pairs were to be held out"
        typer.echo(
            f"{store}: ready, with {_mixing_line(datastore.read_manifest(store))}; {reason}, so there is no verdict"
        )
        return
    _say_comparison(verdict.comparison)
    typer.echo(verdict.sentence())


def _say_comparison(comparison: Comparison) -> None:
    table = Table(box=None, pad_edge=False)
    for column in ("", "BLEU", "p", "chrF2", "p", "brevity"):
        table.add_column(column, justify="left" if not column else "right")
    for name, score in comparison.scores.items():
        p = ["" if p is None else f"{p:.3f}" for p in (score.p_bleu, score.p_chrf)]
        table.add_row(name, f"{score.bleu:.1f}", p[0], f"{score.chrf:.1f}", p[1], f"{score.brevity_penalty:.3f}")
    out.print(table)
    typer.echo(f"{comparison.segments:,} segments; BLEU {comparison.bleu_signature}; chrF2 {comparison.chrf_signature}")


def _mixing_line(manifest: Manifest) -> str:
    mixing = manifest.mixing
    ending = f", end penalty {manifest.end_penalty:g}" if manifest.end_penalty else ""
    if "combiner" in manifest.files:
        return f"{manifest.options['tune']['combiner']}, learned{ending}"
    if mixing is None:
        return "not tuned"
    kind = "w*, scaled by confidence" if mixing.scaled else "fixed"
    untuned = "; untuned defaults" if manifest.untuned else ""
    return f"k {mixing.k}, temperature {mixing.temperature:g}, weight {mixing.weight:g} ({kind}{untuned}){ending}"


def _say_manifest(store: Path, manifest: Manifest) -> None:
    say = typer.echo
    say(f"{store}: {manifest.entries:,} entries of {manifest.stored:,} pairs")
    say(f"languages: {manifest.source_language} → {manifest.target_language}")
    say(f"model: {manifest.model} (fingerprint {manifest.fingerprint}), width {manifest.width}")
    say(f"state: {manifest.state}")
    say(f"combiner: {_mixing_line(manifest)}")
    say(f"on disk: {sum(mark.bytes for mark in manifest.files.values()) / 1e6:,.1f} MB, format {manifest.format}")
    for stage in ("build", "train", "project", "tune"):
        if stage in manifest.options:
            say(f"{stage}:")
            for name, value in (*manifest.options[stage].items(), *manifest.measured[stage].items()):
                say(f"  {name}: {json.dumps(value, ensure_ascii=False)}")


class Bars:
    """A bar on a terminal; elsewhere a line at each stage's beginning and every tenth of it."""

    def __init__(self, console: Console = err) -> None:
        self._console = console
        self._bars = Progress(
            TextColumn("{task.description:>8}"),
            BarColumn(12),
            TimeElapsedColumn(),
            TextColumn("{task.fields[note]}", table_column=Column(no_wrap=True, overflow="ellipsis", ratio=1)),
            console=console,
            expand=True,  # so that the note is what is cut where all does not fit
            disable=not console.is_terminal,
        )
        self._tasks: dict[str, TaskID] = {}
        self._said: dict[str, float] = {}
        self._started = time.monotonic()

    def __enter__(self) -> Bars:
        self._bars.start()
        return self

    def __exit__(self, *raised: object) -> None:
        self._bars.stop()

    def __call__(self, stage: str, done: float, total: float, note: str = "") -> None:
        text = f"{done:,.0f}/{total:,.0f} {note}" if total else f"{done:,.0f} {note}"
        if self._console.is_terminal:
            if stage not in self._tasks:
                self._tasks[stage] = self._bars.add_task(stage, total=total or None, note=text)
            self._bars.update(self._tasks[stage], completed=done, note=text)
            return
        before = self._said.get(stage)
        if before is None or (total and done - before >= total / 10) or (total and done >= total > before):
            self._said[stage] = done
            seconds = time.monotonic() - self._started
            self._console.print(f"[{seconds:6.1f} s] {stage}: {text}", markup=False)
