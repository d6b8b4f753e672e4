"""The command line: each command's work and words, lines in and lines out, signals and exit codes."""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from rich.console import Console

import commands
import tiny
from clknn import cli
from clknn.corpus import Pairs, Tally, read_pairs
from clknn.datastore import read_manifest, verify
from clknn.errors import InputError
from clknn.model import Decoding, Model
from clknn.translator import Translation, Translator
from commands import Parent, paused, refused, run, the_error

CLKNN = Path(sys.executable).with_name("clknn")


@pytest.fixture(scope="module")
def checkpoint(checkpoints: Callable[[str], Path]) -> Path:
    return checkpoints("marian")


@pytest.fixture(scope="module")
def adapted(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, commands.Ran]:
    """A datastore, and what was said when it was made; to be copied, not changed."""
    folder = tmp_path_factory.mktemp("adapted")
    ran = run("adapt", tiny.write_tsv(folder / "tm.tsv", tiny.pairs(80)), *asked(checkpoint), "--out", folder / "store")
    return folder / "store", ran


def asked(checkpoint: Path) -> tuple[object, ...]:
    return ("--model", checkpoint, "--source", "de", "--target", "en", "--steps", 3)


@pytest.fixture(scope="module")
def ready(adapted: tuple[Path, commands.Ran]) -> Path:
    return adapted[0]


def test_import_cleans_converts_and_counts(tmp_path: Path) -> None:
    tm = tmp_path / "tm.tsv"
    tm.write_text("haus\thouse\nsame\tsame\nbaum\t\n12\t12 %\n", encoding="utf8")
    ran = run("import", tm, "--source", "de", "--target", "en", "--out", tmp_path / "a.xlf", "--skip-identical")
    assert ran.code == 0, ran.err
    assert re.fullmatch(rf"{tmp_path}/a\.xlf: 2 pairs; [\d,]+ units a second\n", ran.out)
    assert ran.err.splitlines() == [
        "read 4 units, kept 2",
        "skipped 1: identical source and target (first: tm.tsv:2)",
        "skipped 1: empty target (first: tm.tsv:3)",
    ]
    assert refused("import", tm, "--source", "de", "--target", "en", "--out", tmp_path / "a.doc").endswith(".jsonl")
    strict = ("--out", tmp_path / "b.xlf", "--strict")
    assert "tm.tsv:3: empty target; correct it" in refused("import", tm, "--source", "de", "--target", "en", *strict)
    assert not (tmp_path / "b.xlf").exists()


def test_export_gives_back_what_was_adapted_to(checkpoint: Path, tmp_path: Path) -> None:
    units = "".join(
        f'<tu tuid="u{n}" creationid="anna"><note>{n}</note><tuv xml:lang="de"><seg>{p.source}<ph>x</ph></seg></tuv>'
        f'<tuv xml:lang="en"><seg>{p.target}</seg></tuv></tu>\n'
        for n, p in enumerate(tiny.pairs(60))
    )
    tm, store = tmp_path / "tm.tmx", tmp_path / "store"
    tm.write_text(f'<tmx version="1.4"><header/><body>{units}</body></tmx>', encoding="utf8")
    ran = run("build", tm, "--model", checkpoint, "--source", "de", "--target", "en", "--out", store, "--nfc")
    assert ran.code == 0, ran.err
    again = refused("build", tm, "--model", checkpoint, "--source", "de", "--target", "en", "--out", store)
    assert "begun with other files or options (cleaning {" in again
    assert run("project", store).code == 0
    assert run("tune", store).code == 0
    ran = run("export", store, "--out", tmp_path / "again.tmx")
    assert ran.out == f"{tmp_path / 'again.tmx'}: 60 pairs\n"
    ours, theirs = ([*read_pairs([path], "de", "en", Tally())] for path in (tm, tmp_path / "again.tmx"))
    assert [(p.source, p.target, p.origin.unit, p.origin.details) for p in ours] == [
        (p.source, p.target, p.origin.unit, p.origin.details) for p in theirs
    ]


@pytest.fixture
def store(ready: Path, tmp_path: Path) -> Path:
    return shutil.copytree(ready, tmp_path / "store")


@pytest.fixture(scope="module")
def forks(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Parent]:
    with commands.parent(tmp_path_factory.mktemp("jobs"), checkpoint) as parent:
        yield parent


# -- the commands ------------------------------------------------------------------------------------------------------


def test_adapt_ends_with_the_verdict(adapted: tuple[Path, commands.Ran]) -> None:
    path, ran = adapted
    assert ran.code == 0
    *table, signature, verdict = ran.out.splitlines()
    assert [row.split()[0] for row in table[-2:]] == ["base", "datastore"]
    assert "BLEU nrefs:1|" in signature
    assert "chrF2 nrefs:1|" in signature
    assert verdict.startswith("on 4 held-out segments: BLEU ")
    assert "× the time" in verdict
    said = [line.split("] ")[1].split(":")[0] for line in ran.err.splitlines() if line.startswith("[")]
    assert list(dict.fromkeys(said)) == ["states", "train", "project", "retrieve", "tune", "evaluate"]
    assert "read 80 units, kept 80" in ran.err
    assert verify(path) == []


def test_the_four_commands_give_what_adapt_gives(ready: Path, checkpoint: Path, tmp_path: Path) -> None:
    tm, path = ready.parent / "tm.tsv", tmp_path / "s"
    built = run("build", tm, *asked(checkpoint)[:-2], "--out", path)
    assert built.out == f"{path}: {read_manifest(ready).entries} entries of 72 pairs; next: clknn train {path}\n"
    trained = run("train", path, "--steps", 3)
    assert f"next: clknn project {path}" in trained.out
    assert run("train", path, "--steps", 3).out.startswith(f"{path}: trained with these settings before; next")
    assert run("project", path).out == f"{path}: exact, inner product; next: clknn tune {path}\n"
    tuned = run("tune", path)
    ours, theirs = read_manifest(path), read_manifest(ready)
    assert (ours.files, ours.mixing, ours.options) == (theirs.files, theirs.mixing, theirs.options)
    assert ours.mixing is not None
    assert tuned.out.startswith(f"{path}: k {ours.mixing.k}, temperature {ours.mixing.temperature:g}, weight ")


def test_training_options_arrive(store: Path) -> None:
    run(
        "train", store, "--paper", "--steps", 2, "--batch", 8, "--positives", 3, "--negatives", 4, "--nearest", 5,
        "--temperature", 0.3, "--inner", 16, "--width", 12, "--anchor-power", 0.2, "--refresh", 0,
        "--centre-entries", 7, "--learning-rate", 0.01, "--validate-every", 1, "--patience", 2, "--seed", 9,
    )  # fmt: skip
    options = read_manifest(store).options["train"]
    given = {
        "steps": 2, "batch": 8, "positives": 3, "negatives": 4, "nearest": 5, "temperature": 0.3, "inner": 16,
        "width": 12, "anchor_power": 0.2, "refresh": None, "centre_entries": 7, "learning_rate": 0.01,
        "validate_every": 1, "patience": 2, "seed": 9, "residual": False, "shared": False, "states of": None,
    }  # fmt: skip
    assert {name: options[name] for name in given} == given


def test_inspect_shows_what_is_in_it(ready: Path) -> None:
    manifest = read_manifest(ready)
    text = run("inspect", ready).out
    assert text.startswith(f"{ready}: {manifest.entries} entries of 72 pairs\nlanguages: de → en\n")
    assert manifest.fingerprint in text
    assert text.endswith("health: opens; --verify checks every byte\n")
    for stage in ("build", "train", "project", "tune"):
        for notes in (manifest.options, manifest.measured):
            for name, value in notes[stage].items():
                assert f"  {name}: {json.dumps(value, ensure_ascii=False)}\n" in text
    assert json.loads(run("inspect", ready, "--json").out)["files"]["keys"]["name"] == "keys.npy"
    assert run("inspect", ready, "--verify").out.endswith("health: every checksum holds\n")


@pytest.mark.parametrize("part", ["states", "keys", "values", "pairs", "positions", "index", "projection", "text"])
def test_inspect_verify_finds_a_flipped_bit(store: Path, part: str) -> None:
    file = store / read_manifest(store).files[part].name
    content = bytearray(file.read_bytes())
    content[len(content) * 2 // 3] ^= 4
    file.write_bytes(content)
    ran = run("inspect", store, "--verify")
    assert ran.code == 2
    assert the_error(ran) == f"{file}: its checksum is not the manifest's; restore it, or build again"


def test_evaluate_on_what_is_held_out_and_on_a_file(ready: Path, tmp_path: Path) -> None:
    held_out = run("evaluate", "--store", ready)
    assert held_out.code == 0
    assert "retrieval accuracy @1 " in held_out.out
    assert held_out.out.splitlines()[-1].startswith("on 4 held-out segments: BLEU")
    rows = [*tiny.pairs(5, seed=4), tiny.Pair("haus " * 70, "house", tiny.Origin("x"))]
    ran = run("evaluate", "--store", ready, tiny.write_tsv(tmp_path / "test.tsv", rows), "--json", "--beam", 1)
    scores = json.loads(ran.out)
    assert scores["segments"] == 5
    assert set(scores["scores"]) == {"base", "datastore"}
    assert scores["scores"]["base"]["p_bleu"] is None
    assert list(scores["retrieval_accuracy"]) == ["1", "2", "4", "8", "16", "32", "64"]
    assert scores["slowdown"] > 0
    assert scores["known"] == 0
    assert "read 6 units, kept 5\nskipped 1: longer than the model's 64 tokens (first: test.tsv:6)" in ran.err


def test_evaluate_says_how_much_of_a_file_the_datastore_holds(ready: Path, tmp_path: Path) -> None:
    with Pairs.open(ready / "text.sqlite") as record:
        known = [pair for _, pair in record.each("stored")][:2]
    rows = [tiny.Pair(known[0].source.upper(), "house", tiny.Origin("x")), known[1], *tiny.pairs(3, seed=4)]
    ran = run("evaluate", "--store", ready, tiny.write_tsv(tmp_path / "x.tsv", rows), "--beam", 1)
    said = ran.out.splitlines()[-1]
    assert said.startswith("on 5 segments of x.tsv: BLEU")
    assert "; the datastore holds the source or target of 2 of them" in said


def test_untuned_settings_are_called_so(checkpoint: Path, tmp_path: Path) -> None:
    path, tm = tmp_path / "s", tiny.write_tsv(tmp_path / "tm.tsv", tiny.pairs(12))
    ran = run("adapt", tm, *asked(checkpoint)[:-2], "--out", path, "--method", "knn-mt", "--hold-out", 0)
    untuned = "k 8, temperature 0.3125, weight 0.5 (fixed; untuned defaults)"
    assert ran.out == f"{path}: ready, with {untuned}; no pairs were to be held out, so there is no verdict\n"
    assert f"\ncombiner: {untuned}\n" in run("inspect", path).out
    defaults = "; k, temperature and weight are untuned defaults"
    assert defaults in run("evaluate", "--store", path, tm, "--beam", 1).out
    assert defaults not in run("evaluate", "--store", path, tm, "--beam", 1, "--weight", 0.2).out


def test_help_and_version_never_import_torch() -> None:
    for words in (
        ["--help"],
        ["--version"],
        ["adapt", "--help"],
        ["translate", "--help"],
        ["inspect", "--help"],
        ["figures", "--help"],
        [],
    ):
        code = (
            "import sys; from clknn import cli; sys.argv = ['clknn', *sys.argv[1:]]\n"
            "try: cli.main()\n"
            "except SystemExit as done: assert not done.code, done.code\n"
            "slow = {'torch', 'transformers', 'numpy', 'faiss'} & set(sys.modules)\n"
            "assert not slow, slow"
        )
        done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        assert done.stderr == ""
        assert "clknn" in done.stdout


# -- translate: lines in, lines out ------------------------------------------------------------------------------------


def base_lines(load: Callable[[str], Model], lines: list[str]) -> list[str]:
    return [t.text for t in Translator(load("marian"), decoding=Decoding(max_new_tokens=12)).translate(lines)]


def translated(store: Path, text: bytes, *words: object) -> list[str]:
    ran = run("translate", "--store", store, "--max-new-tokens", 12, *words, stdin=text)
    assert (ran.code, ran.err) == (0, "")
    assert ran.out == "" or ran.out.endswith("\n")
    return ran.out.split("\n")[:-1]


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        (b"", []),
        (b"\n", [""]),
        (b"haus", ["haus"]),
        (b"haus\n", ["haus"]),
        (b"haus\nbaum", ["haus", "baum"]),
        (b"haus\r\nbaum\r\n", ["haus", "baum"]),
        (b"\n\nhaus\n \n\t\nbaum\n\n", ["", "", "haus", " ", "\t", "baum", ""]),
        (b"\xef\xbb\xbfhaus\n", ["haus"]),
        ("haus\u2028baum\x0bkatze\x85\n".encode(), ["haus\u2028baum\x0bkatze\x85"]),
        (b"haus\tbaum\n", ["haus\tbaum"]),
        (b"haus\rbaum\n", ["haus\rbaum"]),
    ],
)
def test_one_line_in_one_line_out(ready: Path, load: Callable[[str], Model], text: bytes, lines: list[str]) -> None:
    assert translated(ready, text, "--weight", 0) == base_lines(load, lines)
    assert len(translated(ready, text)) == len(lines)


def test_very_many_lines_keep_their_order(ready: Path, load: Callable[[str], Model]) -> None:
    """More than a block, more than a pipe holds; the translations of the same text are the same."""
    words = [p.source for p in tiny.pairs(7, seed=6)]
    lines = [words[(i * i) % 7] if i % 3 == 0 else "" for i in range(700)]
    expected = dict(zip(words, base_lines(load, words), strict=True)) | {"": ""}
    out = translated(ready, "\n".join(lines).encode(), "--weight", 0, "--batch", 64)
    assert out == [expected[line] for line in lines]


def test_a_translation_with_a_line_feed_is_still_one_line(ready: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Models of bytes can produce one."""
    from clknn.model import TransformersModel

    monkeypatch.setattr(TransformersModel, "detokenise", lambda *_: "two\nlines")
    assert translated(ready, b"haus\nbaum\n") == ["two lines", "two lines"]


def test_a_translation_is_as_long_as_its_source_allows(ready: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Decoding] = []

    def translate(self: Translator, texts: list[str], *_: object) -> list[Translation]:
        seen.append(self.decoding)
        return [Translation(text, text) for text in texts]

    monkeypatch.setattr(Translator, "translate", translate)
    for ratio in ([], ["--longest-ratio", 0.5], ["--longest-ratio", 0]):
        assert translated(ready, b"haus\n", *ratio) == ["haus"]
    assert [decoding.longest_ratio for decoding in seen] == [3.0, 0.5, None]


def test_progress_fits_a_terminal_of_80_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    said = io.StringIO()
    monkeypatch.setenv("TERM", "xterm")
    with cli.Bars(Console(file=said, force_terminal=True, width=80)) as report:
        report("train", 1_500, 30_000, "steps, retrieval accuracy@8 0.512 (best 0.523), loss 3.123")
    shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", said.getvalue()).replace("\r", "\n").split("\n")
    line = next(line for line in shown if "1,500" in line)
    assert "0:00:00" in line
    assert "1,500/30,000 steps, retrieval accuracy@8 0.512" in line
    assert len(line) <= 80


def test_weight_0_is_the_base_model_and_1_is_not(ready: Path, load: Callable[[str], Model]) -> None:
    lines = [p.source for p in tiny.pairs(6, seed=3)]
    text = "\n".join(lines).encode()
    assert translated(ready, text, "--weight", 0) == base_lines(load, lines)
    assert translated(ready, text, "--weight", 1, "--k", 1) != base_lines(load, lines)


def test_evidence_is_a_json_line_for_each_line(ready: Path) -> None:
    lines = [tiny.pairs(80)[3].source, "", "haus"]
    said = [json.loads(line) for line in translated(ready, "\n".join(lines).encode(), "--evidence")]
    assert [one["source"] for one in said] == lines
    assert [one["translation"] for one in said] == translated(ready, "\n".join(lines).encode())
    assert said[1]["words"] == []
    tm = (ready.parent / "tm.tsv").read_text(encoding="utf8").splitlines()
    supports = 0
    for one in said:
        for word in one["words"]:
            assert word["retrieved"] == pytest.approx(sum(s["share"] for s in word["support"]), abs=2e-3)
            for support in word["support"]:
                supports += 1
                assert tm[support["line"] - 1] == f"{support['source']}\t{support['target']}"
                assert support["file"] == "tm.tsv"
    assert supports > 0


@pytest.mark.parametrize(
    ("text", "answered", "said"),
    [
        (b"haus\nbaum\nk\xe4se\nhund\n", 2, "standard input:3: not UTF-8 at byte 2 of the line (0xe4); convert it"),
        (b"\xff\n", 0, "standard input:1: not UTF-8 at byte 1 of the line (0xff)"),
        (b"haus\nbaum \xc3", 1, "standard input:2: not UTF-8 at byte 6 of the line (0xc3)"),
        (b"haus\n" * 300 + b"\xff\n", 300, "standard input:301: not UTF-8 at byte 1"),
    ],
)
def test_a_line_that_is_no_text_is_named_behind_the_answers_to_those_before(
    ready: Path, text: bytes, answered: int, said: str
) -> None:
    ran = run("translate", "--store", ready, "--weight", 0, "--max-new-tokens", 3, "--beam", 1, stdin=text)
    assert ran.code == 2
    assert the_error(ran).startswith(said)
    assert ran.out.count("\n") == answered


@pytest.mark.parametrize("evidence", [[], ["--evidence"]])
def test_a_line_that_is_too_long_is_answered_by_an_empty_one(ready: Path, evidence: list[str]) -> None:
    lines = ["haus"] * 299 + ["h" * 100_000, "baum", "haus " * 90, "katze"]
    words = ("translate", "--store", ready, "--max-new-tokens", 3, "--beam", 1, *evidence)
    ran = run(*words, stdin="\n".join(lines).encode())
    assert ran.code == 2
    first, second, last = ran.err.splitlines()
    assert first.startswith("standard input:300: 'hhhhhhhhhhhhhhhhhhhhhhhhhhhhhhhhhhhhhhhh'… has ")
    assert second.startswith("standard input:302: 'haus haus haus haus haus haus haus haus '… has 91 tokens and")
    assert last.startswith("clknn: 2 lines of standard input too long to translate and answered by an empty line; ")
    answers = ran.out.split("\n")[:-1]
    if evidence:
        said = [json.loads(answer) for answer in answers]
        assert [one["source"] for one in said] == lines
        answers = [one["translation"] for one in said]
    lines[299] = lines[301] = ""
    assert answers == run(*words[:7], stdin="\n".join(lines).encode()).out.split("\n")[:-1]


def test_standard_input_that_cannot_be_read(tmp_path: Path) -> None:
    folder = os.open(tmp_path, os.O_RDONLY)
    with pytest.raises(InputError, match=r"standard input cannot be read \(Is a directory\); name a text file"):
        list(cli._lines_as_they_come(folder))
    os.close(folder)


def test_a_real_process_streams_and_goes_quietly(ready: Path, load: Callable[[str], Model]) -> None:
    """Each line is answered while standard input stays open, in any locale; whoever stops reading hears no more."""
    process = subprocess.Popen(
        [CLKNN, "translate", "--store", ready, "--weight", "0", "--max-new-tokens", "12"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONIOENCODING": "ascii:strict"},
    )  # fmt: skip
    alarm = threading.Timer(60, process.kill)
    alarm.start()
    assert process.stdin is not None
    assert process.stdout is not None
    for line in ("haus groß", "baum"):
        process.stdin.write(f"{line}\n".encode())
        process.stdin.flush()
        assert process.stdout.readline().decode() == base_lines(load, [line])[0] + "\n"
    process.stdout.close()
    process.stdin.write(b"katze\n")
    process.stdin.close()
    assert process.stderr is not None
    assert process.stderr.read() == b""
    process.stderr.close()
    assert process.wait() == 141
    alarm.cancel()


# -- signals -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("stage", "kill"),
    [
        ("clknn.corpus:Pairs.hold_out:1", signal.SIGKILL),
        ("clknn.states:write_atomically:1", signal.SIGKILL),
        ("clknn.adapter:_Run.save:1", signal.SIGINT),
        ("clknn.datastore:commit:1", signal.SIGKILL),
        ("clknn.tuning:tune:1", signal.SIGINT),
    ],
)
def test_a_stopped_adapt_resumes_and_ends_as_if_it_had_not_been(
    forks: Parent, ready: Path, checkpoint: Path, tmp_path: Path, stage: str, kill: signal.Signals
) -> None:
    path = tmp_path / "s"
    words = ("adapt", ready.parent / "tm.tsv", *asked(checkpoint), "--out", path)
    job = forks.start(*words, pause=stage)
    paused(job)
    assert refused(*words) == f"{path}: another clknn is writing to it; wait until it is done"
    job.send(kill)
    ran = job.wait()
    if kill == signal.SIGINT:
        assert ran.code == 130
        said = f"clknn: interrupted; run the same command again: {path} keeps what was done"
        assert ran.err.splitlines()[-1] == said
        assert "Traceback" not in ran.err
    else:
        assert ran.code == -signal.SIGKILL
    if "tuning" not in stage:
        assert refused("translate", "--store", path, stdin=b"haus\n").startswith(f"{path}: half-built")
    again = run(*words)
    assert again.code == 0
    ours, theirs = read_manifest(path), read_manifest(ready)
    without_text = {name: mark for name, mark in theirs.files.items() if name != "text"}
    assert {name: mark for name, mark in ours.files.items() if name != "text"} == without_text
    assert (ours.mixing, ours.options) == (theirs.mixing, theirs.options)
    with Pairs.open(path / "text.sqlite") as mine, Pairs.open(ready / "text.sqlite") as other:
        for role in ("stored", "tune", "test"):
            assert list(mine.each(role)) == list(other.each(role))  # type: ignore[arg-type]
    assert verify(path) == []


def test_ctrl_c_while_translating(forks: Parent, ready: Path, tmp_path: Path) -> None:
    text = tmp_path / "in.txt"
    text.write_text("haus\nbaum\n")
    job = forks.start("translate", "--store", ready, stdin=text, pause="clknn.translator:decode:1")
    paused(job)
    job.send(signal.SIGINT)
    ran = job.wait()
    assert (ran.code, ran.out, ran.err) == (130, "", "clknn: interrupted\n")


def test_ctrl_c_before_everything_is_imported() -> None:
    code = (
        "import builtins; real = builtins.__import__\n"
        "def stopped(name, *rest, **named):\n"
        "    if name == 'typer': raise KeyboardInterrupt\n"
        "    return real(name, *rest, **named)\n"
        "builtins.__import__ = stopped\n"
        "from clknn.__main__ import main; main()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "clknn: interrupted\n")


# -- exit codes --------------------------------------------------------------------------------------------------------


def test_a_bug_is_not_taken_for_the_users_mistake(ready: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def bug(*_: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(cli, "_say_manifest", bug)
    with pytest.raises(ZeroDivisionError):
        run("inspect", ready)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["translate"], "Missing option '--store'."),
        (["frobnicate"], "No such command 'frobnicate'."),
        (["inspect", "s", "--frob"], "No such option: --frob"),
        (["translate", "--store", "s", "--beam", "0"], "Invalid value for '--beam'"),
        (["translate", "--store", "s", "--beam", "1001"], "Invalid value for '--beam'"),
        (["translate", "--store", "s", "--beam", "x"], "Invalid value for '--beam'"),
        (["translate", "--store", "s", "--batch", "0"], "Invalid value for '--batch'"),
        (["translate", "--store", "s", "--max-new-tokens", "0"], "Invalid value for '--max-new-tokens'"),
        (["train", "s", "--batch", "0"], "Invalid value for '--batch'"),
        (["train", "s", "--seed", "-1"], "Invalid value for '--seed'"),
        (["train", "s", "--temperature", "0"], "Invalid value for '--temperature'"),
        (["project", "s", "--size", "0"], "Invalid value for '--size'"),
        (["train", "s", "--method", "magic"], "Invalid value for '--method'"),
        (["build", *"f --model m --source de --target en --out o --hold-out -1".split()], "Invalid value for '--hold-"),
    ],
)
def test_wrong_words_are_one_line(words: list[str], said: str) -> None:
    assert refused(*words).startswith(said)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--version > /dev/full", "standard output cannot be written to (No space left on device); make room"),
        ("translate --store s <&-", "standard input is closed; leave it open, or name a file with <"),
        ("translate --store s >&-", "standard output is closed; leave it open, or name a file with >"),
    ],
)
def test_streams_that_are_full_or_closed(words: str, said: str) -> None:
    command = f"{sys.executable} -m clknn {words}"
    done = subprocess.run(command, shell=True, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"clknn: {said}")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    "error", [MemoryError(), RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 1 bytes.")]
)
def test_too_little_memory_is_not_a_bug(ready: Path, monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(Translator, "translate", fail)
    said = "out of memory; lower --batch or --beam where the command has them, or free some"
    assert refused("translate", "--store", ready, stdin=b"haus\n") == said


def test_nothing_to_do_shows_the_help() -> None:
    ran = run()
    assert (ran.code, ran.err) == (0, "")
    assert "translate" in ran.out
