"""The stages, each by itself and resumable, and the command that runs them all: build, train, project, tune, verdict.

In go a user's files and a model; out comes a finished datastore and the verdict a customer wants before committing.
Each stage reads what the one before it left in the directory, writes its own files, and notes its options and what it
measured in the manifest; a stage already done on the same entries with the same options is passed over. The trade-off:
each stage force-decodes the few hundred held-out pairs again, some seconds, and so needs nothing from any other.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from heapq import merge
from itertools import compress
from operator import itemgetter
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from clknn import adapter as adapters
from clknn import datastore as stores
from clknn import familiarity as familiarities
from clknn import index as indices
from clknn import model as models
from clknn import projection as projections
from clknn.adapter import Adapter, AdapterSettings, Step, Trained
from clknn.corpus import (
    AS_IT_IS,
    LIKE_OTHERS,
    Cleaning,
    Pair,
    Pairs,
    Role,
    Skip,
    Tally,
    fold,
    read_pairs,
    write_pairs,
)
from clknn.datastore import Datastore, Manifest
from clknn.errors import DatastoreError, Error, InputError
from clknn.evaluation import Comparison, compare, refuse_unscorable, retrieval_accuracy, timed
from clknn.familiarity import Familiarity
from clknn.methods import ckmt, neighbourhood
from clknn.methods.adaptive import MetaKTuner
from clknn.methods.ckmt import CkmtSettings
from clknn.methods.gate import GateTuner
from clknn.methods.kster import KernelTuner
from clknn.methods.neighbourhood import RefineSettings
from clknn.mixing import Mixing, from_other_pairs
from clknn.model import Decoding, Model
from clknn.projection import Projection
from clknn.states import BATCH_TOKENS, Progress, batches, skip_too_long, tokens_with_log_p, too_long, write_states
from clknn.translator import Translation, Translator
from clknn.tuning import Grid, Retrieved, Tuner, joined, retrieved_of

VALIDATION_ENTRIES = 25_000
VALIDATION_QUERIES = 2_000
KS = (1, 2, 4, 8, 16, 32, 64)
CONTRASTIVE, CKMT = "contrastive", "ckmt"  # whose recipe trained an adapter, in the manifest
OUTSIDE = 1 << 40  # general pairs are numbered from here on: no datastore holds so many
OWN_PAIRS = 2_000  # of the datastore, drawn for a tuner that learns from these
ENOUGH = 30  # segments; the bootstrap of fewer resamples the same few, and calls chance significant
TRANSLATED = 150  # held-out pairs translated for each end penalty
FALLEN = 1.0  # BLEU below the best so far, behind which no larger penalty is tried
# What builds of earlier versions were asked for, without saying so.
_AS_IT_WAS: dict[str, Any] = {"cleaning": asdict(AS_IT_IS), "all_states": False}
SPARE = 64  # neighbours fetched for such a pair beside those asked for, to stand in for its own entries


class Report(Protocol):
    """Where progress goes; the command line draws it."""

    def __call__(self, stage: str, done: float, total: float, note: str = "") -> None: ...


def silent(stage: str, done: float, total: float, note: str = "") -> None:
    """No report."""


@dataclass(frozen=True)
class HeldOut:
    """Held-out pairs, force-decoded: what every stage is measured on."""

    states: Tensor  # [R, D] float32
    truth: Tensor  # [R] the right tokens


@dataclass(frozen=True)
class Verdict:
    """Base against datastore on segments with references."""

    comparison: Comparison
    slowdown: float  # time with the datastore over time without
    base: list[Translation]
    ours: list[Translation]
    references: list[str]
    file: str | None = None  # where the segments are from; None: they were held out
    known: int = 0  # segments whose source or target is stored
    untuned: bool = False  # k, temperature and weight are nobody's choice

    def sentence(self) -> str:
        base, ours = self.comparison.scores.values()
        n = self.comparison.segments
        segments = "segment" if n == 1 else "segments"
        named = f"held-out {segments}" if self.file is None else f"{segments} of {self.file}"
        p = " (p < 0.001)" if ours.p_bleu is not None and ours.p_bleu < 0.001 else f" (p = {ours.p_bleu:.3f})"
        text = f"on {n:,} {named}: BLEU {base.bleu:.1f} → {ours.bleu:.1f}{'' if n < ENOUGH else p}"
        text += f", {self.slowdown:.2f}× the time"
        if n < ENOUGH:
            text += f"; fewer than {ENOUGH} segments are too few to tell whether the datastore helps"
        elif ours.p_bleu is None or ours.p_bleu >= 0.05:
            text += "; no significant difference was shown"
        elif ours.bleu < base.bleu:
            text += "; the datastore makes it worse: do not use it"
        if self.known:
            text += (
                f"; the datastore holds the source or target of {self.known:,} of them, so this says little of new text"
            )
        if self.untuned:
            text += "; k, temperature and weight are untuned defaults"
        return text


def build(
    path: Path,
    files: Sequence[Path],
    model: Model,
    hold_out: int = 300,
    seed: int = 0,
    tally: Tally | None = None,
    report: Report = silent,
    tune_on: Sequence[Path] = (),
    cleaning: Cleaning = AS_IT_IS,
    all_states: bool = False,
) -> Manifest:
    """Reads pairs from `files`, holds some out, force-decodes the rest. Resumes where an earlier call was killed.

    `hold_out` pairs are kept for tuning and as many for the verdict; they are never in the datastore. Pairs for tuning
    can come from files of their own, `tune_on`, instead; those like a pair of `files` are left out.
    """
    tally = tally or Tally()
    asked = {"files": [_file_mark(file) for file in files], "hold_out": hold_out, "seed": seed}
    asked["tune_on"] = [_file_mark(file) for file in tune_on]
    asked["strict"], asked["precision"] = tally.strict, model.precision
    asked["cleaning"], asked["all_states"] = asdict(cleaning), all_states
    blank = Manifest(
        models.checkpoint_path(model.name), model.fingerprint, model.source_language, model.target_language,
        model.prefix, model.state_definition, model.width,
    )  # fmt: skip
    made = _make_folder(path)
    with stores.writing(path, begins=True):
        draft = stores.read_draft(path)
        if draft is None or "read" not in draft.measured:
            draft = replace(blank, options={"build": asked})
            stores.save_draft(path, draft)  # from here on the folder is known as ours
            try:
                _read_text(path, files, tune_on, model, hold_out, seed, tally, report, cleaning, all_states)
            except Error:
                for name in ("text.sqlite", "draft.json", "lock"):
                    (path / name).unlink(missing_ok=True)
                for folder in made:
                    with suppress(OSError):  # another has put something there since
                        folder.rmdir()
                raise
            draft = replace(draft, measured={"read": asdict(tally)})
            stores.save_draft(path, draft)
        stores.check_model(path, draft, model)
        begun = _AS_IT_WAS | draft.options["build"]
        if begun != asked:
            raise DatastoreError(
                f"{path}: begun with other files or options ({_differences(begun, asked)}); "
                "choose another --out, or delete it"
            )
        if "build" in draft.measured:
            return draft
        _take_up(tally, draft.measured["read"])
        return _force_decode(path, draft, model, tally, report)


def _make_folder(path: Path) -> list[Path]:
    """The folders it made, innermost first; refuses one with files in it that no build of ours begins with."""
    try:
        made = [folder for folder in (path, *path.parents) if not folder.exists()]
        path.mkdir(parents=True, exist_ok=True)
        strangers = [] if stores.read_draft(path) else [file.name for file in path.iterdir()]
    except OSError as error:
        raise DatastoreError(f"{path}: cannot be made a folder ({error.strerror}); choose another --out") from error
    if set(strangers) - {"lock", "draft.json.new"}:
        raise DatastoreError(f"{path}: the folder has other files in it; choose another --out")
    return made


def _read_text(
    path: Path,
    files: Sequence[Path],
    tune_on: Sequence[Path],
    model: Model,
    hold_out: int,
    seed: int,
    tally: Tally,
    report: Report,
    cleaning: Cleaning,
    all_states: bool,
) -> None:
    for left in ("text.sqlite", "text.sqlite-journal"):  # by a reading that was killed
        (path / left).unlink(missing_ok=True)
    with Pairs.create(path / "text.sqlite") as record:
        languages = model.source_language, model.target_language
        pairs = read_pairs(files, *languages, tally, cleaning, all_states)
        record.add(_counted(pairs, tally, report), tally)
        if not record.count():
            raise InputError(f"{files[0]}: no pair could be kept; {'; '.join(tally.lines()[1:])}")
        record.hold_out(0 if tune_on else hold_out, hold_out, seed)
        if tune_on:
            record.add(read_pairs(tune_on, *languages, tally, cleaning, all_states), tally, "tune")
            if not record.count("tune"):
                raise InputError(f"{tune_on[0]}: no pair to tune on is left; {'; '.join(tally.lines()[1:])}")


def _take_up(tally: Tally, before: dict[str, Any]) -> None:
    """Counts on from what was counted when the text was read, perhaps by a run that was killed since."""
    tally.read, tally.kept = before["read"], before["kept"]
    tally.skipped |= {reason: Skip(**skip) for reason, skip in before["skipped"].items()}
    tally.changed |= {what: Skip(**change) for what, change in before.get("changed", {}).items()}
    tally.remarks += before.get("remarks", [])


def _counted(stream: Any, tally: Tally, report: Report) -> Any:
    for pair in stream:
        if tally.read % 1000 == 0:
            report("read", tally.read, 0, "units")
        yield pair


def _force_decode(path: Path, draft: Manifest, model: Model, tally: Tally, report: Report) -> Manifest:
    started = time.perf_counter()
    with Pairs.open(path / "text.sqlite") as record:
        stored = record.count("stored")
        report("states", 0, stored, "pairs")

        def advance(progress: Progress) -> None:
            report("states", progress.pairs, stored, "pairs")

        progress = write_states(model, lambda after: record.each("stored", after), path, tally, advance)
        roles: tuple[Role, ...] = "tune", "test"
        held_out = {role: len(fitting(model, (pair for _, pair in record.each(role)), tally)) for role in roles}
    if not progress.entries:
        raise InputError(f"{path}: no pair fits the model; {'; '.join(tally.lines()[1:])}")
    seconds = time.perf_counter() - started
    measured: dict[str, Any] = {"seconds": round(seconds, 1), "held out": held_out, "tally": tally.lines()}
    if draft.options["build"]["tune_on"]:
        left_out = tally.skipped.get(LIKE_OTHERS)
        measured["tuning pairs left out"] = left_out.count if left_out else 0
    marks = {name: stores.mark_of(path / f"{name}.npy") for name in stores.ENTRY_FILES}
    marks["text"] = stores.mark_of(path / "text.sqlite")
    draft = draft.having(
        "build", draft.options["build"], measured, entries=progress.entries, stored=stored, files=marks
    )
    stores.save_draft(path, draft)
    return draft


def train(
    path: Path,
    settings: AdapterSettings | CkmtSettings,
    model: Model,
    states_of: Path | None = None,
    report: Report = silent,
    held_out: HeldOut | None = None,
) -> Trained | None:
    """Trains the adapter on this datastore's states, or on another's (the paper's out-of-domain setting).

    `held_out` are the pairs to tune on of whose states it trains, where someone has force-decoded them already.
    None: it was trained on these entries with these settings before.
    """
    recipe = CKMT if isinstance(settings, CkmtSettings) else CONTRASTIVE
    asked = {"recipe": recipe, **asdict(settings), "states of": None if states_of is None else str(states_of)}
    checkpoint = path / "training.safetensors"

    def advance(step: Step) -> None:
        note = f"steps, retrieval accuracy@8 {step.accuracy:.3f} (best {step.best:.3f}), loss {step.loss:.3f}"
        report("train", step.step, settings.steps, note)

    with stores.writing(path):
        manifest = _begun(path, model)
        teacher = manifest if states_of is None else _begun(states_of, model)
        asked["entries"] = _entries(teacher)
        if manifest.options.get("train") == asked and "adapter" in manifest.files:
            checkpoint.unlink(missing_ok=True)
            return None
        home = path if states_of is None else states_of
        states, values, pairs = (stores.array(home, teacher, name) for name in ("states", "values", "pairs"))
        held_out = held_out or force_held_out(home, teacher, model, "tune")
        measured: dict[str, Any] = {}
        report("train", 0, settings.steps, "steps")
        if isinstance(settings, CkmtSettings):
            started = time.perf_counter()
            clustered = ckmt.clusters(
                states, values, settings, np.random.default_rng(settings.seed),
                lambda done, total: report("cluster", done, total, "entries"),
            )  # fmt: skip
            measured |= {"clusters": len(clustered.counts), "eps": clustered.eps}
            measured["clustering seconds"] = round(time.perf_counter() - started, 1)
            validate = validator(states, values, pairs, held_out, settings.seed, lambda adapter, _: Projection(adapter))
            trained = ckmt.train(states, values, settings, validate, advance, clustered)
        else:
            validate = validator(states, values, pairs, held_out, settings.seed, _narrowed)
            trained = adapters.train(states, values, settings, validate, checkpoint, advance)
        file = stores.fresh(path, "adapter", "safetensors")
        projections.save(Projection(trained.adapter), file)
        best = max(trained.curve, key=lambda step: step.accuracy)
        measured |= {
            "steps taken": trained.curve[-1].step,
            "best step": best.step,
            "retrieval accuracy@8 before": round(trained.curve[0].accuracy, 4),
            "retrieval accuracy@8": round(best.accuracy, 4),
            "seconds": round(trained.curve[-1].seconds, 1),
            "share of sampling": round(trained.curve[-1].sampling, 3),
            "validated on": "held-out pairs" if held_out is not None else "its own entries",
        }
        stores.save_draft(
            path,
            manifest.having("train", asked, measured, files=manifest.files | {"adapter": stores.mark_of(file)}),
        )
        checkpoint.unlink(missing_ok=True)
    return trained


def _narrowed(adapter: Adapter, sample: Any) -> Projection:
    return projections.fit(sample, adapter, min(128, adapter.width))


def validator(
    states: Any,
    values: Any,
    pairs: Any,
    held_out: HeldOut | None,
    seed: int,
    projected: Callable[[Adapter, Any], Projection],
) -> Callable[[Adapter], float]:
    """Retrieval accuracy@8 of held-out states among a random 25,000 entries, by exact search on their keys.

    Where nothing is held out, 500 entries of one half of the pairs ask among those of the other.
    """
    rng = np.random.default_rng(seed)
    rows = rng.permutation(len(values))[:VALIDATION_ENTRIES]
    if held_out is None:
        drawn = rng.permutation(np.unique(pairs[rows]))
        asking = np.isin(pairs[rows], drawn[: len(drawn) // 2])
        asked, rows = rows[asking][:500], rows[~asking]
        if not len(asked):  # a single pair: there is nobody to ask
            return lambda _: 0.0
        queries, truth = torch.from_numpy(states[asked].astype(np.float32)), values[asked].astype(np.int64)
    else:
        some = torch.from_numpy(rng.permutation(len(held_out.truth))[:VALIDATION_QUERIES])
        queries, truth = held_out.states[some], held_out.truth[some].numpy()
    rows = np.sort(rows)
    sample, sample_values = states[rows], values[rows].astype(np.int64)
    k = min(8, len(sample))

    def accuracy(adapter: Adapter) -> float:
        projection = projected(adapter, sample)
        keys = np.concatenate(list(projection.keys(sample)))
        near = indices.exact_search(keys, projection(queries).numpy(), k, projection.normed)
        return retrieval_accuracy(sample_values[near.ids], near.found, truth, [k])[k]

    return accuracy


def project(
    path: Path,
    model: Model,
    vanilla: bool = False,
    size: int | None = None,
    centred: bool = True,
    report: Report = silent,
    refined: RefineSettings | None = None,
    held_out: HeldOut | None = None,
) -> Manifest:
    """Turns the states into keys and indexes them; from here on the directory is a datastore.

    `vanilla` is kNN-MT: the raw states, by squared L2. Otherwise the trained adapter, PCA to `size` and norm, which can
    be `refined` on what they retrieve; where no adapter was trained, PCA and norm alone. CKMT's adapter is narrow and
    stands alone. `held_out` are the pairs to tune on, where someone has force-decoded them already.
    """
    asked: dict[str, Any] = {"vanilla": vanilla, "size": size, "centred": centred}
    asked["refined"] = None if refined is None else asdict(refined)
    with stores.writing(path):
        manifest = _begun(path, model)
        asked["entries"] = _entries(manifest)
        asked["adapter"] = None if vanilla or "adapter" not in manifest.files else manifest.files["adapter"].blake2b
        done_before = manifest.options.get("project") == asked and "index" in manifest.files
        if done_before and not stores.damaged(path, manifest, ("keys", "projection", "index")):
            return manifest
        held_out = held_out or force_held_out(path, manifest, model, "tune")
        started = time.perf_counter()
        if vanilla and refined is not None:
            raise InputError("kNN-MT's raw states are searched as they are; refining needs --method clknn or gated")
        projection = Projection() if vanilla else _projection(path, manifest, size, centred, refined, report)
        files, index, measured = stores.from_states(
            path,
            manifest,
            projection,
            None if held_out is None else held_out.states,
            lambda done: report("project", done, manifest.entries, "entries"),
        )
        if held_out is not None:
            k = min(64, manifest.entries)
            near = index.search(projection(held_out.states[:VALIDATION_QUERIES]).numpy(), k)
            truth = held_out.truth[:VALIDATION_QUERIES].numpy()
            values = stores.array(path, manifest, "values")[near.ids].astype(np.int64)
            measured |= {
                f"retrieval accuracy@{k}": round(accuracy, 4)
                for k, accuracy in retrieval_accuracy(values, near.found, truth, KS).items()
            }
        measured["seconds"] = round(time.perf_counter() - started, 1)
        marks = manifest.files | {name: stores.mark_of(file) for name, file in files.items()}
        for name in stores.TUNED:  # with other keys
            marks.pop(name, None)
        untuned = _untuned(manifest, projection.normed)
        done = manifest.having("project", asked, measured, files=marks, mixing=untuned, end_penalty=0.0)
        for notes in (done.options, done.measured):
            notes.pop("tune", None)  # it was chosen for other keys
        stores.commit(path, done)
    return done


def _projection(
    path: Path, manifest: Manifest, size: int | None, centred: bool, refined: RefineSettings | None, report: Report
) -> Projection:
    adapter = None
    if "adapter" in manifest.files:
        adapter = projections.read(path / manifest.files["adapter"].name).adapter
        if manifest.options["train"]["recipe"] == CKMT:
            if size is not None or not centred or refined is not None:
                raise InputError("CKMT's keys are its adapter's own: size, centring and refining do not apply to them")
            return Projection(adapter)
    width = manifest.width if adapter is None else adapter.width
    chosen = size or min(128, width)
    if chosen > width:
        raise InputError(f"size {chosen} is more than the {width} dimensions there are; choose fewer")
    states = stores.array(path, manifest, "states")
    projection = projections.fit(states, adapter, chosen, centred)
    if refined is None:
        return projection
    values, pairs = (stores.array(path, manifest, name) for name in ("values", "pairs"))

    def advance(step: int, steps: int, loss: float) -> None:
        report("refine", step, steps, f"steps, loss {loss:.3f}")

    return neighbourhood.refine(projection, states, np.asarray(values), np.asarray(pairs), refined, advance)


def _untuned(manifest: Manifest, normed: bool) -> Mixing:
    """Cautious settings for a datastore with nothing held out to tune on."""
    k = min(8, manifest.entries)
    if not normed:
        return Mixing(k, 10.0 * manifest.width / 1024, 0.5, scaled=False)  # the papers' T 10 is for D 1024
    return Mixing(k, 0.05, 0.5, scaled=True)


def tune(
    path: Path,
    model: Model,
    tuner: Tuner | None = None,
    report: Report = silent,
    general: Sequence[Path] = (),
    ending: bool = False,
    decoding: Decoding = Decoding(),  # noqa: B008 (frozen)
) -> Manifest:
    """Chooses the combiner on held-out pairs, as `tuner` does; None is the grid, with w* where keys allow it.

    With `general` pairs, which nothing should be lost on, it also learns which sources are not of the memory's kind.
    With `ending`, how much harder it must be to end a sentence is chosen by translating held-out pairs with `decoding`.
    """
    with stores.writing(path), stores.open_datastore(path, model, tuned=False) as store:
        manifest = store.manifest
        tuner = tuner or Grid(scaled=store.projection.normed)
        everyday, left_out = _general(general, model, store)
        if ending and not store.pairs.count("tune"):
            raise InputError(f"{path}: no pairs are held out to translate for the end penalty; leave out --ending")
        familiarity = _familiarity(store, model, everyday)
        pairs = list(store.pairs.each("stored" if tuner.own_pairs else "tune"))
        if tuner.own_pairs:
            pairs = [pairs[i] for i in np.random.default_rng(0).permutation(len(pairs))[:OWN_PAIRS]]
        started = time.perf_counter()
        if tuner.general:
            beside = np.random.default_rng(0).permutation(len(everyday))[: len(pairs) // 2]
            pairs += [(OUTSIDE + n, everyday[i]) for n, i in enumerate(beside)]
        retrieved = retrieve(store, model, pairs, tuner, lambda done: report("retrieve", done, len(pairs), "pairs"))
        if retrieved is None:
            raise InputError(f"{path}: no pairs are held out for tuning; set --k, --temperature and --weight by hand")
        fetched = time.perf_counter()
        chosen = tuner.choose(
            retrieved, lambda p: report("tune", p.update, 0, f"updates, log-likelihood {p.log_likelihood:.3f}")
        )
        measured = dict(chosen.measured)
        seconds = {"retrieval": round(fetched - started, 1), "tuning": round(time.perf_counter() - fetched, 1)}
        done = stores.with_combiner(path, manifest, chosen.combiner)
        if familiarity is not None:
            measured["general pairs left out"] = left_out
            held_out = model.tokenise_sources([pair.source for _, pair in store.pairs.each("tune")])
            unlike = model.tokenise_sources([pair.source for pair in everyday])
            for name, sources in (("held-out", held_out), ("general", unlike)):
                measured[f"familiar share of {name} sources"] = round(float(np.mean(familiarity.of(sources))), 4)
        done = stores.with_familiarity(path, done, familiarity)
        if ending:
            began = time.perf_counter()
            translator = Translator(model, replace(store, familiarity=familiarity), chosen.combiner, decoding)
            curve = _endings(translator, [pair for _, pair in store.pairs.each("tune")], report)
            measured["BLEU by end penalty"] = {f"{penalty:g}": round(bleu, 2) for penalty, bleu in curve.items()}
            done = replace(done, end_penalty=max(curve, key=lambda penalty: curve[penalty]))
            seconds["end penalty"] = round(time.perf_counter() - began, 1)
        else:
            done = replace(done, end_penalty=0.0)
        settings: Any = tuner  # a Protocol cannot say that its sides are dataclasses
        asked = {"combiner": tuner.name, **asdict(settings), "ending": asdict(decoding) if ending else None}
        asked["general"] = [_file_mark(file) for file in general]
        done = done.having("tune", asked, measured | {"seconds": seconds})
        stores.save_draft(path, done)
        report("tune", 1, 1, "done")
    return done


def _general(files: Sequence[Path], model: Model, store: Datastore) -> tuple[list[Pair], int]:
    """Pairs of text that is not of the memory's kind, and how many were left out because they are the memory's own.

    What is stored would find itself, and what is held out must not be learned from.
    """
    if not files:
        return [], 0
    tally = Tally()
    pairs = fitting(model, read_pairs(files, model.source_language, model.target_language, tally), tally)
    roles: tuple[Role, ...] = "stored", "tune", "test"
    own = {fold(side) for role in roles for _, pair in store.pairs.each(role) for side in (pair.source, pair.target)}
    unlike = [pair for pair in pairs if own.isdisjoint((fold(pair.source), fold(pair.target)))]
    if not unlike:
        why = tally.lines()[1:] + [f"{len(pairs):,} stand in the translation memory"] * bool(pairs)
        raise InputError(f"{files[0]}: no general pair is left; {'; '.join(why)}")
    return unlike, len(pairs) - len(unlike)


def _familiarity(store: Datastore, model: Model, general: Sequence[Pair]) -> Familiarity | None:
    if not general:
        return None
    held_out = model.tokenise_sources([pair.source for _, pair in store.pairs.each("tune")])
    unlike = model.tokenise_sources([pair.source for pair in general])
    return familiarities.fit(stores.sources_of(model, store.pairs.each("stored")), held_out, unlike)


def _endings(translator: Translator, pairs: Sequence[Pair], report: Report) -> dict[float, float]:
    """BLEU of some held-out pairs by end penalty: whole nats until it falls, then half ones beside the best."""
    some = [pairs[i] for i in np.random.default_rng(0).permutation(len(pairs))[:TRANSLATED]]
    some = fitting(translator.model, some, Tally())
    sources, references = [pair.source for pair in some], [pair.target for pair in some]
    curve: dict[float, float] = {}

    def judge_at(penalty: float) -> None:
        report("endings", len(curve), 0, f"end penalty {penalty:g}")
        said = [t.text for t in replace(translator, end_penalty=penalty).translate(sources)]
        curve[penalty] = compare({"": said}, references, translator.model.target_language).scores[""].bleu

    for penalty in (0.0, 1.0, 2.0, 3.0, 4.0):
        judge_at(penalty)
        if curve[penalty] < max(curve.values()) - FALLEN:
            break
    best = max(curve, key=lambda penalty: curve[penalty])
    for penalty in (best - 0.5, best + 0.5):
        if penalty > 0:
            judge_at(penalty)
    return dict(sorted(curve.items()))


def retrieve(
    store: Datastore,
    model: Model,
    pairs: Sequence[tuple[int, Pair]],
    tuner: Tuner,
    advance: Callable[[int], None] = lambda _: None,
) -> Retrieved | None:
    """What a tuner learns from, for every token of these numbered pairs; None where no pair fits the model."""
    s = model.tokenise_sources([pair.source for _, pair in pairs])
    t = model.tokenise_targets([pair.target for _, pair in pairs])
    fits = [i for i in range(len(pairs)) if not too_long(model, s[i], t[i])]
    k = min(tuner.most + (SPARE if tuner.own_pairs else 0), store.entries)
    blocks, done = list[Retrieved](), 0
    for batch in batches(fits, s, t, tokens_with_log_p(model)):
        forced = model.force([s[i] for i in batch], [t[i] for i in batch], with_log_p=True)
        assert forced.log_p is not None
        pair = torch.tensor([pairs[i][0] for i in batch for _ in t[i]])
        near = store.neighbours(store.project(forced.states), k, tuner.wants_keys)
        if tuner.own_pairs:
            near = from_other_pairs(near, torch.from_numpy(store.pair_ids[near.ids.numpy()]), pair, tuner.most)
        truth = torch.tensor([token for i in batch for token in t[i]])
        blocks.append(retrieved_of(near, forced.log_p.cpu(), truth, pair))
        advance(done := done + len(batch))
    return joined(blocks) if blocks else None


def fitting(model: Model, pairs: Iterable[Pair], tally: Tally) -> list[Pair]:
    """Those of these pairs that the model can hold; the others are counted in `tally`."""
    kept = list(pairs)
    sources = model.tokenise_sources([pair.source for pair in kept])
    targets = model.tokenise_targets([pair.target for pair in kept])
    fits = [not too_long(model, s, t) for s, t in zip(sources, targets, strict=True)]
    for pair in compress(kept, [not fit for fit in fits]):
        skip_too_long(model, pair, tally)
    return list(compress(kept, fits))


def force_held_out(path: Path, manifest: Manifest, model: Model, role: Role) -> HeldOut | None:
    """The pairs of a held-out role, force-decoded; None where there are none."""
    with Pairs.open(path / manifest.files["text"].name) as record:
        pairs = [pair for _, pair in record.each(role)]
    return force_pairs(model, [p.source for p in pairs], [p.target for p in pairs])


def force_pairs(model: Model, sources: Sequence[str], targets: Sequence[str]) -> HeldOut | None:
    """States and right tokens of these segments; None where no segment fits the model."""
    s, t = model.tokenise_sources(sources), model.tokenise_targets(targets)
    fits = [i for i in range(len(s)) if not too_long(model, s[i], t[i])]
    states, truth = [], list[int]()
    for batch in batches(fits, s, t, BATCH_TOKENS):
        states.append(model.force([s[i] for i in batch], [t[i] for i in batch]).states.cpu())
        truth += [token for i in batch for token in t[i]]
    return HeldOut(torch.cat(states), torch.tensor(truth)) if fits else None


def verdict(path: Path, model: Model, decoding: Decoding = Decoding(), report: Report = silent) -> Verdict | None:  # noqa: B008 (frozen)
    """Base against datastore on the held-out test pairs; None where none are held out."""
    translator = Translator.open(path, model, decoding=decoding)
    assert translator.datastore is not None
    with translator.datastore as store:
        pairs = fitting(model, (pair for _, pair in store.pairs.each("test")), Tally())
        if not pairs:
            return None
        return judge(translator, [p.source for p in pairs], [p.target for p in pairs], report)


def judge(
    translator: Translator,
    sources: list[str],
    references: list[str],
    report: Report = silent,
    file: str | None = None,
) -> Verdict:
    """Base against datastore on any segments with references: those held out, or a `file`'s."""
    language = translator.model.target_language
    refuse_unscorable(language)
    report("evaluate", 0, 2, "systems")
    base, base_seconds = timed(translator.base, sources)
    report("evaluate", 1, 2, "systems")
    ours, our_seconds = timed(translator, sources)
    report("evaluate", 2, 2, "systems")
    systems = {"base": [t.text for t in base], "datastore": [t.text for t in ours]}
    store = translator.datastore
    known = 0 if store is None else store.pairs.known(zip(sources, references, strict=True))
    untuned = store is not None and store.manifest.untuned and translator.combiner == store.combiner
    comparison = compare(systems, references, language)
    return Verdict(comparison, our_seconds / base_seconds, base, ours, references, file, known, untuned)


def accuracy_of(translator: Translator, sources: list[str], references: list[str]) -> dict[int, float]:
    """Retrieval accuracy@k of the references' states in the translator's datastore."""
    assert translator.datastore is not None
    forced = force_pairs(translator.model, sources, references)
    if forced is None:
        raise InputError("no segment fits the model, so there is nothing to retrieve for")
    k = min(max(KS), translator.datastore.entries)
    near = translator.datastore.neighbours(translator.datastore.project(forced.states), k)
    return retrieval_accuracy(near.values.numpy(), near.found.numpy(), forced.truth.numpy(), KS)


@dataclass(frozen=True)
class Method:
    """A system: what makes its keys, what chooses its combiner, and whether sentences end less easily. The choices are
    independent."""

    adapter: AdapterSettings | CkmtSettings | None = AdapterSettings()  # noqa: RUF009 (frozen); None: raw states
    refined: RefineSettings | None = None
    tuner: Tuner = Grid(scaled=True)  # noqa: RUF009 (frozen)
    ending: bool = False  # whether an end penalty is tuned

    def __post_init__(self) -> None:
        """What cannot be combined is refused before hours of force decoding, not behind them."""
        if isinstance(self.adapter, AdapterSettings):
            return
        keys = "raw states" if self.adapter is None else "CKMT's keys"
        if self.refined is not None:
            raise InputError(f"refining moves the axes of PCA, and {keys} have none; choose --method clknn or gated")
        if isinstance(self.tuner, GateTuner) or (isinstance(self.tuner, Grid) and self.tuner.scaled):
            raise InputError(
                f"--combiner {self.tuner.name} needs similarities, and {keys} have distances; choose another combiner"
            )


KNN_MT = Method(None, tuner=Grid(scaled=False))
CLKNN = Method()
CKMT_ADAPTIVE = Method(CkmtSettings(), tuner=MetaKTuner())
ADAPTIVE = Method(None, tuner=MetaKTuner())
KSTER = Method(None, tuner=KernelTuner())
GATED = Method(refined=RefineSettings(), tuner=GateTuner(), ending=True)


def adapt(
    path: Path,
    files: Sequence[Path],
    model: Model,
    method: Method = CLKNN,
    hold_out: int = 300,
    seed: int = 0,
    tally: Tally | None = None,
    report: Report = silent,
    tune_on: Sequence[Path] = (),
    general: Sequence[Path] = (),
    cleaning: Cleaning = AS_IT_IS,
    all_states: bool = False,
) -> Verdict | None:
    """All stages, and the verdict on held-out segments; None where there are too few pairs to hold any out."""
    if hold_out:
        refuse_unscorable(model.target_language)
    for file in general:
        _file_mark(file)
    build(path, files, model, hold_out, seed, tally, report, tune_on, cleaning, all_states)
    manifest = _begun(path, model)
    held_out = manifest.measured["build"]["held out"]["tune"]
    if general and held_out < familiarities.FEWEST:
        raise InputError(
            f"{path}: {held_out} pairs to tune on are too few to tell general text by; "
            f"{familiarities.FEWEST} are needed: give --tune-on or a larger --hold-out, or leave out --general"
        )
    manifest = represent(path, model, method, report)
    if method.tuner.own_pairs or manifest.measured["build"]["held out"]["tune"]:
        tune(path, model, method.tuner, report, general, method.ending and held_out > 0)
    return verdict(path, model, report=report)


def represent(
    path: Path,
    model: Model,
    method: Method,
    report: Report = silent,
    states_of: Path | None = None,
    held_out: HeldOut | None = None,
) -> Manifest:
    """The keys of a method: its adapter trained, on these states or another datastore's, and the states projected.

    `held_out` are this datastore's pairs to tune on, where someone has force-decoded them already.
    """
    if method.adapter is not None:
        train(path, method.adapter, model, states_of, report, held_out if states_of is None else None)
    vanilla = method.adapter is None
    return project(path, model, vanilla, refined=method.refined, report=report, held_out=held_out)


def export(path: Path, out: Path, report: Report = silent) -> int:
    """Writes a datastore's translation memory to a file, held-out pairs included, in the order it was read in."""
    manifest = stores.read_manifest(path)
    roles: tuple[Role, ...] = ("stored", "tune", "test")
    if manifest.options["build"]["tune_on"]:  # these pairs came from elsewhere
        roles = "stored", "test"
    with Pairs.open(path / manifest.files["text"].name) as record:
        total = sum(record.count(role) for role in roles)

        def counted() -> Iterator[Pair]:
            for number, (_, pair) in enumerate(merge(*(record.each(role) for role in roles), key=itemgetter(0))):
                if number % 1000 == 0:
                    report("export", number, total, "pairs")
                yield pair

        return write_pairs(counted(), out, manifest.source_language, manifest.target_language)


def _begun(path: Path, model: Model) -> Manifest:
    manifest = stores.read_draft(path)
    if manifest is None or "build" not in manifest.measured:
        manifest = stores.read_manifest(path)  # says what is there and what is missing
    stores.check_model(path, manifest, model)
    return manifest


def _entries(manifest: Manifest) -> dict[str, str]:
    """Which entries a stage worked on: after they change, by `add` or `remove`, it is not done any more."""
    return {name: manifest.files[name].blake2b for name in ("states", "values")}


def _file_mark(file: Path) -> dict[str, Any]:
    if file.is_dir():
        within = sorted((p.relative_to(file).as_posix(), p) for p in file.rglob("*") if p.is_file())
        marks = "".join(f"{name} {_digest(path)}\n" for name, path in within)
        return {"name": file.name, "blake2b": hashlib.blake2b(marks.encode(), digest_size=16).hexdigest()}
    if not file.is_file():
        raise InputError(f"{file}: no such file; check the name, or name a file or folder that is there")
    return {"name": file.name, "blake2b": _digest(file)}


def _digest(file: Path) -> str:
    try:
        with file.open("rb") as opened:
            return hashlib.file_digest(opened, lambda: hashlib.blake2b(digest_size=16)).hexdigest()
    except OSError as error:
        raise InputError(f"{file}: cannot be read ({error.strerror}); make it readable") from error


def _differences(begun: dict[str, Any], asked: dict[str, Any]) -> str:
    both = ((name, begun.get(name, "unknown"), now) for name, now in asked.items())
    return ", ".join(f"{name} {_shown(then)} and now {_shown(now)}" for name, then, now in both if then != now)


def _shown(option: Any) -> str:
    if isinstance(option, list):
        return " ".join(f"{file['name']} ({file['blake2b'][:8]})" for file in option) or "none"
    return str(option)
