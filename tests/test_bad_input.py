"""Bad input: one line that says what, where and what to do; exit code 2; and nothing lost."""

from __future__ import annotations

import gzip
import json
import os
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import transformers

import tiny
from clknn import adaptation, datastore
from clknn.adapter import AdapterSettings
from clknn.datastore import open_datastore, read_manifest
from clknn.errors import DatastoreError, InputError
from clknn.model import Model
from commands import refused, run

Refuse = Callable[..., str]


@pytest.fixture(scope="module")
def ready(checkpoints: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A datastore; to be copied, not changed."""
    folder = tmp_path_factory.mktemp("ready")
    tm = tiny.write_tsv(folder / "tm.tsv", tiny.pairs(60))
    ran = run("adapt", tm, *words(checkpoints("marian")), "--out", folder / "store", "--method", "knn-mt")
    assert ran.code == 0, ran.err
    return folder / "store"


def words(model: Path, source: str = "de", target: str = "en") -> tuple[object, ...]:
    return ("--model", model, "--source", source, "--target", target)


@pytest.fixture
def store(ready: Path, tmp_path: Path) -> Path:
    return shutil.copytree(ready, tmp_path / "store")


def contents(folder: Path) -> dict[str, bytes]:
    return {str(f.relative_to(folder)): f.read_bytes() for f in folder.rglob("*") if f.is_file()}


@pytest.fixture
def adapting(checkpoints: Callable[[str], Path], tmp_path: Path) -> Refuse:
    """`clknn adapt` these files: refused, no datastore is left, and no file has changed."""

    def refuse(*files: Path, source: str = "de", target: str = "en", further: tuple[object, ...] = ()) -> str:
        before, out = contents(tmp_path), tmp_path / "new.store"
        said = refused("adapt", *files, *words(checkpoints("marian"), source, target), "--out", out, *further)
        assert not out.exists()
        assert contents(tmp_path) == before
        return said

    return refuse


# -- files -------------------------------------------------------------------------------------------------------------

UNIT = '<tu><tuv xml:lang="de"><seg>haus</seg></tuv><tuv xml:lang="en"><seg>house</seg></tuv></tu>\n'
TMX = f'<?xml version="1.0"?>\n<tmx version="1.4"><header/><body>\n{UNIT * 3}</body></tmx>\n'
BOMB = '<!DOCTYPE tmx [<!ENTITY a "ha"><!ENTITY b "&a;&a;&a;&a;&a;&a;&a;&a;">]>\n'
OUTSIDE = '<!DOCTYPE tmx [<!ENTITY b SYSTEM "file:///etc/passwd">]>\n'


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("tm.tmx", b"", r"tm\.tmx: the file is empty; export it again"),
        ("tm.tsv", b"", r"tm\.tsv: the file is empty; export it again"),
        ("tm.tmx", b"haus\thouse\n", r"tm\.tmx:1: not well-formed XML \(.*\); correct it or export"),
        (
            "tm.tmx",
            TMX[: TMX.rindex("house")].encode(),
            r"tm\.tmx:\d: not well-formed XML \(the file is cut short: .*\); correct it",
        ),
        ("tm.tmx", TMX.replace("<tmx", BOMB + "<tmx").encode(), r"tm\.tmx: declares the XML entity 'a', which can"),
        ("tm.tmx", TMX.replace("<tmx", OUTSIDE + "<tmx").encode(), r"tm\.tmx: declares the XML entity 'b', which can"),
        ("tm.tmx", TMX.replace("haus", "&b;").encode(), r"tm\.tmx:3: not well-formed XML \(Entity 'b' not defined\)"),
        ("tm.tmx", b"<html><body/></html>", r"tm\.tmx: no translation unit \(<tu>\) in it"),
        ("tm.tsv", b"haus\nbaum\n", r"tm\.tsv:1: expected source<TAB>target, read 1 column"),
        ("tm.tsv", b"haus\thouse\nk\xe4se\tcheese\n", r"tm\.tsv:2: not UTF-8 at byte 2 of the line \(0xe4\); save the"),
        ("tm.tsv", b"haus\t\n\thouse\n", r"no pair could be kept; skipped 1: empty target .*; skipped 1: empty sou"),
        ("tm.tsv", b"x" * 1_000_000 + b"\thouse\n", r"no pair could be kept; skipped 1: longer than 5000 characters"),
        ("tm.tsv.gz", b"haus\thouse\n", r"tm\.tsv\.gz: gzip cannot unpack it"),
        ("tm.tsv.gz", gzip.compress(b"haus\thouse\n" * 99)[:-9], r"tm\.tsv\.gz: gzip cannot unpack it"),
        ("tm.docx", b"haus\thouse\n", r"tm\.docx: not a kind of file that is read alone; give \.tmx"),
    ],
)
def test_a_file_that_is_no_translation_memory(
    adapting: Refuse, tmp_path: Path, name: str, content: bytes, said: str
) -> None:
    (tmp_path / name).write_bytes(content)
    assert re.search(said, adapting(tmp_path / name))


def test_files_that_are_missing_or_too_many(adapting: Refuse, tmp_path: Path) -> None:
    good = tiny.write_tsv(tmp_path / "tm.tsv", tiny.pairs(3))
    missing = tmp_path / "nowhere.tsv"
    assert adapting(missing) == f"{missing}: no such file; check the name, or name a file or folder that is there"
    (tmp_path / "folder").mkdir()
    assert "no file in it that holds pairs; give .tmx" in adapting(tmp_path / "folder")
    assert f"{missing}: no such file" in adapting(good, further=("--tune-on", missing))
    texts = [tmp_path / "a.de", tmp_path / "a.en"]
    texts[0].write_text("haus\nbaum\n")
    texts[1].write_text("house\n")
    assert "has 2 lines and" in adapting(*texts)
    assert "a.de: is read with one other text; give" in adapting(*texts, good)


def test_a_language_pair_that_the_file_does_not_have(adapting: Refuse, tmp_path: Path) -> None:
    (tmp_path / "tm.tmx").write_text(TMX)
    said = adapting(tmp_path / "tm.tmx", source="fr")
    assert "no unit has both fr and en; ask for two of those found: " in said
    assert "de (3 units)" in said
    assert "en (3 units)" in said


@pytest.mark.parametrize(
    ("source", "target", "said"),
    [
        ("de", "de", "source and target language are both 'de'; name two languages"),
        ("de_AT", "deu-at", "source and target language are both 'de_AT'; name two languages"),
        ("german", "en", "'german' is not a language tag; give one such as de, pt-BR or zh-Hant"),
        ("de", "jp", "'jp' is not a language tag; give one such as"),
        ("", "en", "'' is not a language tag; give one such as"),
    ],
)
def test_languages_that_are_none(adapting: Refuse, tmp_path: Path, source: str, target: str, said: str) -> None:
    tm = tiny.write_tsv(tmp_path / "tm.tsv", tiny.pairs(3))
    assert adapting(tm, source=source, target=target).startswith(said)


def test_bad_pairs_for_tuning_leave_nothing(adapting: Refuse, tmp_path: Path) -> None:
    good = tiny.write_tsv(tmp_path / "tm.tsv", tiny.pairs(30))
    (tmp_path / "dev.tsv").write_bytes(b"haus\thouse\nk\xe4se\tcheese\n")
    assert "dev.tsv:2: not UTF-8" in adapting(good, further=("--tune-on", tmp_path / "dev.tsv"))


def test_strict_stops_at_the_first_skip(adapting: Refuse, tmp_path: Path) -> None:
    tm = tiny.write_tsv(tmp_path / "tm.tsv", [*tiny.pairs(4), tiny.pairs(1)[0]])
    assert "tm.tsv:5: duplicate; correct it, or read without strict" in adapting(tm, further=("--strict",))


@pytest.mark.parametrize("kind", ["tsv", "tmx"])
def test_a_segment_of_a_million_characters_is_skipped_counted_and_reported(
    checkpoints: Callable[[str], Path], tmp_path: Path, kind: str
) -> None:
    tm, million = tmp_path / f"tm.{kind}", "x" * 1_000_000
    rows = tiny.pairs(8)
    if kind == "tsv":
        tm.write_text("".join(f"{p.source}\t{p.target}\n" for p in rows) + f"haus\t{million}\n", encoding="utf8")
    else:
        units = "".join(UNIT.replace("haus", p.source).replace("house", p.target) for p in rows)
        tm.write_text(TMX.replace(UNIT * 3, units + UNIT.replace("house", million)), encoding="utf8")
    ran = run("adapt", tm, *words(checkpoints("marian")), "--out", tmp_path / "s", "--method", "knn-mt")
    assert ran.code == 0
    assert ran.out == (
        f"{tmp_path / 's'}: ready, with k 8, temperature 0.3125, weight 0.5 (fixed; untuned defaults); "
        "too few pairs to hold any out, so there is no verdict\n"
    )
    assert "read 9 units, kept 8\nskipped 1: longer than 5000 characters (first: tm." in ran.err
    assert read_manifest(tmp_path / "s").stored == 8


def test_a_memory_of_pairs_that_are_all_too_long_for_the_model(
    checkpoints: Callable[[str], Path], tmp_path: Path
) -> None:
    (tmp_path / "tm.tsv").write_text("haus " * 90 + "\thouse\n")
    said = refused("adapt", tmp_path / "tm.tsv", *words(checkpoints("marian")), "--out", tmp_path / "s")
    assert "no pair fits the model; skipped 1: longer than the model's 64 tokens (first: tm.tsv:1)" in said
    assert refused("inspect", tmp_path / "s").startswith(f"{tmp_path / 's'}: half-built")


def test_a_single_pair_as_the_whole_memory(checkpoints: Callable[[str], Path], tmp_path: Path) -> None:
    tm = tiny.write_tsv(tmp_path / "tm.tsv", tiny.pairs(1))
    ran = run("adapt", tm, *words(checkpoints("marian")), "--out", tmp_path / "s", "--steps", 2)
    assert (ran.code, ran.out.count("\n")) == (0, 1)
    source, target = tm.read_text(encoding="utf8").strip().split("\t")
    translated = ("translate", "--store", tmp_path / "s", "--weight", 1, "--k", 1)
    assert run(*translated, stdin=source.encode()).out == f"{target}\n"
    assert "no pairs to test on; name a file of them" in refused("evaluate", "--store", tmp_path / "s")
    assert "no pairs are held out for tuning; set --k, --temperature" in refused("tune", tmp_path / "s")


def test_a_memory_that_the_adapter_cannot_learn_from(checkpoints: Callable[[str], Path], tmp_path: Path) -> None:
    (tmp_path / "tm.tsv").write_text("haus\thouse\n")
    adapt = ("adapt", tmp_path / "tm.tsv", *words(checkpoints("marian")), "--out", tmp_path / "s")
    said = refused(*adapt)
    assert said.startswith("the adapter cannot train: no two entries share a value")
    assert said.endswith("use --method knn-mt, which needs no training")
    assert run(*adapt, "--method", "knn-mt").code == 0
    assert run("translate", "--store", tmp_path / "s", stdin=b"haus\n").code == 0


# -- folders -----------------------------------------------------------------------------------------------------------


def test_a_refused_build_leaves_no_folder_above_its_own(checkpoints: Callable[[str], Path], tmp_path: Path) -> None:
    (tmp_path / "tm.tsv").write_text("haus\n")
    (tmp_path / "a").mkdir()
    said = refused(
        "build", tmp_path / "tm.tsv", *words(checkpoints("marian")), "--out", tmp_path / "a" / "b" / "c" / "s"
    )
    assert "expected source<TAB>target" in said
    assert list((tmp_path / "a").iterdir()) == []


def test_an_out_that_is_something_else(checkpoints: Callable[[str], Path], tmp_path: Path) -> None:
    tm, model = tiny.write_tsv(tmp_path / "tm.tsv", tiny.pairs(3)), words(checkpoints("marian"))
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "letter.txt").write_text("dear")
    before = contents(tmp_path)
    assert "the folder has other files in it; choose another --out" in refused("adapt", tm, *model, "--out", tmp_path)
    assert "the folder has other files in it" in refused("adapt", tm, *model, "--out", tmp_path / "mine")
    assert "cannot be made a folder (File exists)" in refused("adapt", tm, *model, "--out", tm)
    assert "cannot be made a folder (Not a directory)" in refused("adapt", tm, *model, "--out", tm / "s")
    assert contents(tmp_path) == before


@contextmanager
def read_only(folder: Path) -> Iterator[None]:
    """Inside, this process may read the folder and not write to it; root becomes nobody for that long."""
    user = os.geteuid()
    for path in (*folder.iterdir(), folder):
        path.chmod(0o555)
    try:
        os.seteuid(65534 if user == 0 else user)
        yield
    finally:
        os.seteuid(user)
        folder.chmod(0o755)


def test_an_unwritable_folder(ready: Path, load: Callable[[str], Model], monkeypatch: pytest.MonkeyPatch) -> None:
    model = load("marian")
    monkeypatch.setattr(adaptation.models, "checkpoint_path", str)  # nobody may not look for it either
    with tempfile.TemporaryDirectory() as name:  # not in tmp_path, which only its owner may enter
        top = Path(name)
        top.chmod(0o755)
        (top / "empty").mkdir()
        store = shutil.copytree(ready, top / "store")
        tm = tiny.write_tsv(top / "tm.tsv", tiny.pairs(3))
        before = contents(store)
        with read_only(top / "empty"):
            with pytest.raises(DatastoreError, match=r"cannot be made a folder \(Permission denied\); choose another"):
                adaptation.build(top / "empty" / "s", [tm], model)
            with pytest.raises(DatastoreError, match=r"cannot be written to \(Permission denied\); make it writable"):
                adaptation.build(top / "empty", [tm], model)
        assert list((top / "empty").iterdir()) == []
        with read_only(store):
            for change in (
                lambda: datastore.remove(store, [0]),
                lambda: adaptation.train(store, AdapterSettings(), model),
                lambda: adaptation.tune(store, model),
            ):
                with pytest.raises(DatastoreError, match=r"store: cannot be written to \(Permission denied\)"):
                    change()
            with open_datastore(store) as opened:  # reading needs no more than that
                assert opened.entries > 0
        assert contents(store) == before


def test_a_folder_that_may_be_locked_and_not_written(ready: Path, load: Callable[[str], Model]) -> None:
    model = load("marian")
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o755)
        store = shutil.copytree(ready, Path(name) / "store")
        with read_only(store):
            user = os.geteuid()
            os.seteuid(os.getuid())
            (store / "lock").chmod(0o666)
            os.seteuid(user)
            for change in (
                lambda: adaptation.train(store, AdapterSettings(steps=1), model),
                lambda: adaptation.project(store, model, size=8),
                lambda: adaptation.tune(store, model),
            ):
                with pytest.raises(DatastoreError, match=r"store: cannot be written to \(Permission denied\); make it"):
                    change()
            os.seteuid(os.getuid())
            (store / "manifest.json").chmod(0)
            (store / "text.sqlite").chmod(0)
            os.seteuid(user)
            with pytest.raises(InputError, match=r"text\.sqlite: cannot be read \(Permission denied\); make it"):
                adaptation.build(Path(name) / "other", [store / "text.sqlite"], model)
            with pytest.raises(DatastoreError, match=r"manifest\.json: cannot be read \(Permission denied\); make it"):
                read_manifest(store)


def test_who_may_read_some_of_a_datastore_may_read_it_all(store: Path) -> None:
    run("train", store, "--steps", 1)
    run("project", store)
    run("tune", store, "--combiner", "kernel")
    marks = read_manifest(store).files
    assert {"adapter", "projection", "combiner"} <= set(marks)
    assert len({(store / mark.name).stat().st_mode for mark in marks.values()}) == 1


# -- datastores --------------------------------------------------------------------------------------------------------

READING = (("translate", "--store"), ("evaluate", "--store"), ("inspect",))
WRITING = (("train",), ("project",), ("tune",))


@pytest.mark.parametrize("command", [*READING, *WRITING])
def test_what_is_no_datastore(tmp_path: Path, command: tuple[str, ...]) -> None:
    assert refused(*command, tmp_path / "nowhere").startswith(f"{tmp_path / 'nowhere'}: no datastore is here; make one")
    (tmp_path / "file").write_text("x")
    assert "file: is a file, and a datastore is a folder; name one" in refused(*command, tmp_path / "file")
    assert "a folder without manifest.json is no datastore" in refused(*command, tmp_path)
    assert [f.name for f in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize("command", [*READING, *WRITING])
def test_a_datastore_of_another_version_or_with_a_damaged_manifest(store: Path, command: tuple[str, ...]) -> None:
    text = (store / "manifest.json").read_text()
    (store / "manifest.json").write_text(json.dumps(json.loads(text) | {"format": 3}))
    assert "manifest.json: format version 3, and this clknn reads versions 1 to 2" in refused(*command, store)
    (store / "manifest.json").write_text(text[:500])
    assert "manifest.json: damaged (" in refused(*command, store)


@pytest.mark.parametrize("command", [*READING, *WRITING])
@pytest.mark.parametrize(
    ("lacking", "said"),
    [
        (("files", "text"), "no text among its files"),
        (("measured", "project"), "no project in its measured"),
        (("options", "build"), "no build in its options"),
        (("mixing", "temperature"), "missing 1 required positional argument"),
        (("entries",), "k is 1 of 0 entries"),
    ],
)
def test_a_manifest_that_lacks_a_part(
    store: Path, command: tuple[str, ...], lacking: tuple[str, ...], said: str
) -> None:
    manifest = json.loads((store / "manifest.json").read_text())
    manifest["mixing"]["k"] = 1
    *way, last = lacking
    part = manifest
    for name in way:
        part = part[name]
    del part[last]
    (store / "manifest.json").write_text(json.dumps(manifest))
    refusal = refused(*command, store)
    assert refusal.startswith(f"{store / 'manifest.json'}: damaged (")
    assert said in refusal


@pytest.mark.parametrize("command", [*READING, *WRITING])
def test_a_half_built_datastore(
    checkpoints: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: tuple[str, ...]
) -> None:
    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    tm, out = tiny.write_tsv(tmp_path / "tm.tsv", tiny.pairs(30)), tmp_path / "s"
    monkeypatch.setattr(adaptation, "write_states", stop)
    assert run("build", tm, *words(checkpoints("marian")), "--out", out).code == 130
    monkeypatch.undo()
    assert refused(*command, out) == f"{out}: half-built: 0 pairs force-decoded; run the command that began it again"
    assert run("build", tm, *words(checkpoints("marian")), "--out", out).code == 0
    if command in READING or command == ("tune",):
        said = refused(*command, out)
        assert said.startswith(f"{out}: half-built: ")
        assert f"entries and no keys; run `clknn project {out}`, or the command that began it again" in said


@pytest.mark.parametrize("command", [*READING[:2], *WRITING])
def test_a_datastore_built_with_another_model(
    store: Path, checkpoints: Callable[[str], Path], tmp_path: Path, command: tuple[str, ...]
) -> None:
    manifest, before = read_manifest(store), contents(store)
    other = tiny.save_checkpoint("marian", tmp_path / "other", seed=1)
    said = refused(*command, store, "--model", other)
    assert said.startswith(f"{store} was built with {checkpoints('marian')} (fingerprint {manifest.fingerprint}, ")
    assert f"and this is {other} (fingerprint " in said
    assert said.count("fingerprint") == 2
    assert contents(store) == before


def test_a_model_that_has_moved(store: Path, checkpoints: Callable[[str], Path], tmp_path: Path) -> None:
    text = (store / "manifest.json").read_text()
    (store / "manifest.json").write_text(text.replace(str(checkpoints("marian")), str(tmp_path / "gone")))
    said = refused("translate", "--store", store, stdin=b"haus\n")
    assert said == f"{store}: its model was in {tmp_path / 'gone'} and is not there now; say where it is with --model"
    assert run("translate", "--store", store, "--model", checkpoints("marian"), stdin=b"haus\n").code == 0


@pytest.mark.parametrize("part", ["values", "keys", "index", "text", "states"])
@pytest.mark.parametrize("command", [READING[0], READING[2]])
def test_a_datastore_with_a_missing_or_truncated_file(store: Path, part: str, command: tuple[str, ...]) -> None:
    file = store / read_manifest(store).files[part].name
    file.write_bytes(file.read_bytes()[:-1])
    expected = f"{file}: {file.stat().st_size:,} bytes where the manifest has {file.stat().st_size + 1:,}; restore it"
    assert expected in the_line(command, store)
    file.unlink()
    assert f"{file}: nothing where the manifest has" in the_line(command, store)


def the_line(command: tuple[str, ...], store: Path) -> str:
    ran = run(*command, store)
    assert ran.code == 2
    (line,) = ran.err.splitlines()
    return line


# -- options -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", ["translate", "evaluate"])
@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--k", "100000"], "k is 100000 and {store} has {entries} entries; ask for fewer"),
        (["--k", "0"], "k is 0; ask for at least one neighbour"),
        (["--weight", "1.1"], "weight is 1.1; it must lie between 0 (the model alone) and 1"),
        (["--weight", "-0.1"], "weight is -0.1; it must lie between"),
        (["--weight", "nan"], "weight is nan; it must lie between"),
        (["--temperature", "0"], "temperature is 0.0; it must be above 0"),
        (["--temperature", "inf"], "temperature is inf; it must be above 0"),
        (["--beam", "0"], "Invalid value for '--beam'"),
        (["--dtype", "float8"], "dtype 'float8' is not served; choose float32 or bfloat16"),
        (["--device", "foo"], "device 'foo' cannot be used here ("),
        (["--device", "meta"], "device 'meta' cannot be used here ("),
        (["--device", "cuda"], "device 'cuda' was asked for, and this machine has no CUDA; use --device cpu"),
    ],
)
def test_bad_settings(ready: Path, command: str, options: list[str], said: str) -> None:
    if "cuda" in options and torch.cuda.is_available():
        pytest.skip("this machine has CUDA")
    entries = read_manifest(ready).entries
    assert said.format(store=ready, entries=entries) in refused(command, "--store", ready, *options, stdin=b"haus\n")


def test_a_test_file_with_nothing_that_fits(ready: Path, tmp_path: Path) -> None:
    (tmp_path / "test.tsv").write_text("haus " * 90 + "\thouse\n")
    assert "no pairs to test on; name a file of them" in refused("evaluate", "--store", ready, tmp_path / "test.tsv")


# -- models ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (
            transformers.BertConfig(architectures=["BertForMaskedLM"]),
            "is encoder-only (BertForMaskedLM): it has no dec",
        ),
        (
            transformers.GPT2Config(architectures=["GPT2LMHeadModel"]),
            "is decoder-only (GPT2LMHeadModel): it has no enc",
        ),
        (
            transformers.WhisperConfig(architectures=["WhisperForConditionalGeneration"]),
            "is a speech model (WhisperForConditionalGeneration): its source is sound, and a memory has text",
        ),
    ],
)
def test_a_model_of_another_kind(tmp_path: Path, config: transformers.PreTrainedConfig, said: str) -> None:
    config.save_pretrained(tmp_path / "model")
    tm = tiny.write_tsv(tmp_path / "tm.tsv", tiny.pairs(3))
    refusal = refused("adapt", tm, *words(tmp_path / "model"), "--out", tmp_path / "s")
    assert refusal.startswith(f"{tmp_path / 'model'} {said}")
    assert not (tmp_path / "s").exists()


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("/no/such/folder", "no such folder; check the path, or give a hub name"),
        ("./no/such/folder", "no such folder; check the path, or give a hub name"),
        ("empty", "no translation model could be loaded from here ("),
        ("file", "is a file; give the folder of the checkpoint"),
    ],
)
def test_a_model_that_is_not_there_is_not_waited_for(
    tmp_path: Path, name: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("x")
    tm, started = tiny.write_tsv(tmp_path / "tm.tsv", tiny.pairs(3)), time.monotonic()
    refusal = refused("adapt", tm, *words(Path(name)), "--out", tmp_path / "s")
    assert refusal.startswith(f"{Path(name)}: {said}")
    assert time.monotonic() - started < 5
    assert not (tmp_path / "s").exists()


@pytest.mark.parametrize(
    ("file", "kept", "part"),
    [
        ("model.safetensors", 0.5, "weights"),
        ("source.spm", None, "tokenizer"),
        ("target.spm", 0.5, "tokenizer"),
        ("vocab.json", None, "tokenizer"),
    ],
)
def test_a_checkpoint_with_a_damaged_or_missing_file(
    checkpoints: Callable[[str], Path], tmp_path: Path, file: str, kept: float | None, part: str
) -> None:
    folder = shutil.copytree(checkpoints("marian"), tmp_path / "model")
    content = (folder / file).read_bytes()
    (folder / file).unlink()
    if kept is not None:
        (folder / file).write_bytes(content[: int(len(content) * kept)])
    tm = tiny.write_tsv(tmp_path / "tm.tsv", tiny.pairs(3))
    refusal = refused("adapt", tm, *words(folder), "--out", tmp_path / "s")
    assert refusal.startswith(f"{folder}: its {part} cannot be read, a file is missing or damaged (")
    assert refusal.endswith("; copy or download it again")
