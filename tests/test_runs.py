"""The table's wiring on tiny stand-ins: every system, resumed from its cells, and refused where it would be mixed."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import tomllib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import tiny
from clknn import adaptation
from clknn.adapter import PAPER
from clknn.datastore import read_manifest, verify
from clknn.errors import InputError
from clknn.model import Model
from clknn.translator import Translator

ROOT = Path(__file__).parent.parent


def load_program(name: str, file: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up, and one program imports the other
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def reproduce() -> ModuleType:
    return load_program("reproduce", ROOT / "runs" / "reproduce.py")


@pytest.fixture(scope="module")
def ablation(reproduce: ModuleType) -> ModuleType:  # noqa: ARG001 (it is imported)
    return load_program("ablation", ROOT / "runs" / "ablation.py")


@pytest.fixture
def desk(tmp_path: Path, checkpoints: Callable[[str], Path]) -> Path:
    """Two small sets, general text, and a configuration of everything at its smallest."""
    rows = tiny.pairs(160)
    for name, part in (("a", rows[:60]), ("b", rows[60:120]), ("dev", rows[120:145]), ("test", rows[145:])):
        tiny.write_tsv(tmp_path / f"{name}.tsv", part)
    tiny.write_tsv(tmp_path / "repeated.tsv", [*rows[120:145], rows[0]])
    (tmp_path / "model").symlink_to(checkpoints("marian"))
    one = 'dev = ["repeated.tsv"]\ntest = ["test.tsv"]\ntest_pairs = 4\n'
    (tmp_path / "small.toml").write_text(
        f'model = "model"\nsource = "de"\ntarget = "en"\nbeam = 2\n[adapter]\nsteps = 2\nbatch = 16\n'
        f"[ckmt]\nsteps = 2\nbatch = 8\n"
        f'[sets.a]\ntrain = ["a.tsv"]\n{one}[sets.b]\ntrain = ["b.tsv"]\npairs = 50\n{one}'
        f'[general.elsewhere]\nfiles = ["test.tsv"]\npairs = 3\n[everyday.else]\nfiles = ["else.tsv"]\n'
    )
    tiny.write_tsv(tmp_path / "else.tsv", tiny.pairs(60, seed=77))
    return tmp_path


def run(reproduce: ModuleType, desk: Path, **options: object) -> dict[str, object]:
    given = {"data": desk, "work": desk / "build", "results": desk / "results", "quick": False} | options
    reproduce.main(desk / "small.toml", **given)
    record: dict[str, object] = json.loads((desk / "results" / "small.json").read_text())
    return record


def test_one_table_of_every_system_that_a_rerun_repeats(
    reproduce: ModuleType, desk: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    record = run(reproduce, desk)
    sets = record["sets"]
    assert isinstance(sets, dict)
    assert set(sets) == {"a", "b"}
    assert (sets["a"]["pairs"], sets["b"]["pairs"]) == (60, 50)
    names = ["base", *(system.name for system in reproduce.systems({"everyday": {}}))]
    for one in sets.values():
        assert list(one["systems"]) == names
        for system, row in one["systems"].items():
            assert row["test"]["segments"] == 4
            assert row["general elsewhere"]["segments"] == 3
            assert (row["test"]["p against kNN-MT"] is None) == (system == "kNN-MT")
            assert system == "base" or set(row["accuracy, memory"]) == {"1", "2", "4", "8", "16", "32", "64"}
        assert one["overlap"] == {"test": 0, "general elsewhere": 0}
        assert one["systems"]["gated"]["options"]["tune"]["combiner"] == "gate"
        assert one["systems"]["kNN-MT"]["mixing"]["scaled"] is False
        assert one["systems"]["CLKNN+w*, other domain"]["options"]["train"]["states of"].endswith(".store")
        assert one["systems"]["CLKNN"]["centre seconds"] >= 0
        assert one["systems"]["CKMT"]["measured"]["train"]["clustering seconds"] >= 0
        assert one["systems"]["CLKNN"]["measured"]["tune"]["seconds"]["tuning"] >= 0
        assert one["systems"]["kNN-MT"]["measured"]["project"]["index seconds"] >= 0
        assert "signature" not in one["systems"]["CLKNN"]  # it is the set's own
    assert sets["a"]["dev"] == {"pairs": 25, "left out": 1}  # the dev pair that is stored too
    assert "tun" in capsys.readouterr().err  # the dev pair that is stored too was counted
    for name in ("gated", "CLKNN+w*, guarded"):
        assert sets["a"]["systems"][name]["options"]["tune"]["general"]
    assert not sets["a"]["systems"]["CLKNN+w*"]["options"]["tune"]["general"]
    assert sets["a"]["systems"]["gated"]["options"]["tune"]["ending"]["beam"] == 2  # as the table decodes
    monkeypatch.setattr(reproduce.adaptation, "tune", None)  # a rerun makes nothing anew
    assert run(reproduce, desk) == record


def test_a_cell_does_not_outlive_the_system_or_the_files_it_stands_for(
    reproduce: ModuleType, desk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    some: dict[str, Any] = {"only": ["a"], "system": ["kNN-MT"]}
    run(reproduce, desk, **some)
    with monkeypatch.context() as changed:
        changed.setattr(reproduce, "KNN_MT", replace(reproduce.KNN_MT, ending=True))
        with pytest.raises(InputError, match=r"a.kNN-MT.json: kNN-MT was another system .* delete it"):
            run(reproduce, desk, **some)
    tiny.write_tsv(desk / "test.tsv", tiny.pairs(12, seed=99))
    with pytest.raises(InputError, match="made with configuration"):
        run(reproduce, desk, **some)


def test_a_teacher_that_holds_what_is_tested_is_refused(reproduce: ModuleType, desk: Path) -> None:
    tiny.write_tsv(desk / "b.tsv", tiny.pairs(160)[60:160])  # with the dev and test pairs
    config = (desk / "small.toml").read_text().replace("pairs = 50\n", "")
    (desk / "small.toml").write_text(config)
    with pytest.raises(InputError, match=r"b holds .* dev and test pairs of a"):
        run(reproduce, desk, only=["a"], system=["CLKNN+w*, other domain"])


def test_separate_runs_share_one_table(reproduce: ModuleType, desk: Path) -> None:
    """System by system and set by set, out of order, the second set in a work folder of its own: one whole run."""
    whole = run(reproduce, desk, work=desk / "at once", only=["a", "b"], system=["CLKNN", "kNN-MT", "KSTER"])
    assert isinstance(whole["sets"], dict)
    (desk / "results" / "small.json").unlink()
    first = run(reproduce, desk, only=["a"], system=["KSTER"])
    assert isinstance(first["sets"], dict)
    assert list(first["sets"]["a"]["systems"]) == ["base", "KSTER"]
    assert first["sets"]["a"]["systems"]["KSTER"]["test"]["p against kNN-MT"] is None
    assert first["signature"]["command"].endswith("--only a")
    run(reproduce, desk, only=["a"], system=["CLKNN", "kNN-MT"])
    merged = run(reproduce, desk, work=desk / "elsewhere", only=["b"], system=["kNN-MT", "KSTER", "CLKNN"])
    assert isinstance(merged["sets"], dict)
    assert merged["signature"] == whole["signature"]
    for name, one in merged["sets"].items():
        assert list(one["systems"]) == ["base", "kNN-MT", "KSTER", "CLKNN"]
        for system, row in one["systems"].items():
            theirs = whole["sets"][name]["systems"][system]
            assert {**row["test"], "seconds": 0} == {**theirs["test"], "seconds": 0}
            assert row.get("accuracy, dev") == theirs.get("accuracy, dev")


def test_every_system_keeps_its_datastore_and_shares_the_states(
    reproduce: ModuleType, desk: Path, load: Callable[[str], Model]
) -> None:
    record = run(reproduce, desk, only=["a"], system=["kNN-MT", "Adaptive kNN-MT", "CLKNN", "refined, fixed"])
    assert isinstance(record["sets"], dict)
    work = desk / "build" / "small"
    assert json.loads((work / "a.store" / "draft.json").read_text())["options"].keys() == {"build"}
    pairs = tiny.pairs(4, seed=8)
    for system, row in record["sets"]["a"]["systems"].items():
        if system == "base":
            continue
        path = work / f"a.{system}.store"
        assert verify(path) == []
        assert path.joinpath("states.npy").samefile(work / "a.store" / "states.npy")
        translator = Translator.open(path, load("marian"))
        assert len(translator.translate([p.source for p in pairs])) == 4
        assert translator.datastore is not None
        assert translator.datastore.manifest.options["project"] == row["options"]["project"]
    adaptive, vanilla, refined, plain = (
        work / f"a.{name}.store" for name in ("Adaptive kNN-MT", "kNN-MT", "refined, fixed", "CLKNN")
    )
    assert (adaptive / "keys.npy").samefile(vanilla / "keys.npy")  # made once
    assert (refined / "adapter.safetensors").samefile(plain / "adapter.safetensors")
    assert read_manifest(refined).files["keys"] != read_manifest(plain).files["keys"]


def test_results_of_another_configuration_are_refused_before_any_work(reproduce: ModuleType, desk: Path) -> None:
    (desk / "results").mkdir()
    (desk / "results" / "small.json").write_text('{"sets": {}, "signature": {"configuration": "0123"}}')
    with pytest.raises(InputError, match=r"made with configuration 0123, .* choose other --results"):
        run(reproduce, desk)
    assert not list((desk / "build" / "small").glob("*.store"))


@pytest.mark.parametrize(
    ("said", "place"),
    [
        ("[adapter]\neps = 3", r"eps does not apply to \[adapter\]"),
        ("[ckmt]\nnegatives = 3", r"negatives does not apply to \[ckmt\]"),
        ("temperature = 3", r"temperature does not apply to a configuration"),
        ("[sets.a]\ntests = []", r"tests does not apply to \[sets.a\]"),
    ],
)
def test_options_that_do_not_apply_are_refused_by_name(reproduce: ModuleType, said: str, place: str) -> None:
    with pytest.raises(InputError, match=place):
        reproduce.refuse_strangers({"sets": {}} | tomllib.loads(said))


def test_sets_and_systems_that_there_are_not(reproduce: ModuleType, desk: Path) -> None:
    with pytest.raises(InputError, match=r"no sets \['c'\]"):
        run(reproduce, desk, only=["c"])
    with pytest.raises(InputError, match=r"no systems \['magic'\]"):
        run(reproduce, desk, system=["magic"])


def test_cells_of_another_configuration_are_refused(reproduce: ModuleType, desk: Path) -> None:
    (desk / "build" / "small").mkdir(parents=True)
    (desk / "build" / "small" / "configuration.json").write_text('"0123"')
    with pytest.raises(InputError, match="made with configuration 0123"):
        run(reproduce, desk)


def test_a_system_that_is_none_is_refused_by_name(reproduce: ModuleType) -> None:
    with pytest.raises(InputError, match=r"\['magic'\] are not known"):
        reproduce.systems({"systems": ["magic"]})


def test_the_papers_configuration_is_the_papers(reproduce: ModuleType) -> None:
    config = tomllib.loads((ROOT / "runs" / "paper.toml").read_text(encoding="utf8"))
    methods = {system.name: system.method for system in reproduce.systems(config)}
    assert methods["CLKNN+w*"].adapter == replace(PAPER, inner=4096, width=512)
    assert "CLKNN+w*, other domain" not in methods  # of one set there is no other
    assert (PAPER.inner, PAPER.width) == (None, None)  # derived from D, where they are the same


@pytest.mark.parametrize("name", ["bench", "demo"])
def test_every_configuration_names_systems_that_there_are(reproduce: ModuleType, name: str) -> None:
    config = tomllib.loads((ROOT / "runs" / f"{name}.toml").read_text(encoding="utf8"))
    assert reproduce.systems(config)[0].name == reproduce.REFERENCE


# -- what each choice is worth -----------------------------------------------------------------------------------------


@pytest.fixture
def varied(desk: Path) -> Path:
    """A configuration of one set, with a row in two tables."""
    (desk / "varied.toml").write_text(
        'model = "model"\nsource = "de"\ntarget = "en"\nbeam = 2\n[adapter]\nsteps = 2\nbatch = 16\n'
        '[sets.a]\ntrain = ["a.tsv"]\ndev = ["repeated.tsv"]\ntest = ["test.tsv"]\ntest_pairs = 4\n'
        '[[tables]]\nname = "M, N"\npaper = true\nbleu = true\nadapter = { steps = 2, warmup = 1 }\n'
        '[tables.rows]\n"1, 1" = { positives = 1, negatives = 1 }\n"2, 4" = { positives = 2, negatives = 4 }\n'
        '[[tables]]\nname = "size"\n[tables.rows]\n"8" = { size = 8 }\n"16" = { size = 16 }\n"raw" = { raw = true }\n'
        '[[tables]]\nname = "centring"\nbleu = true\n'
        '[tables.rows]\n"yes" = { size = 8 }\n"no" = { size = 8, centred = false }\n'
    )
    return desk


def vary(ablation: ModuleType, desk: Path, **options: object) -> dict[str, Any]:
    given = {"data": desk, "work": desk / "build", "results": desk / "results", "quick": False} | options
    ablation.main(desk / "varied.toml", **given)
    record: dict[str, Any] = json.loads((desk / "results" / "varied.json").read_text())
    return record


def test_every_variation_is_measured_once_and_a_rerun_repeats_it(
    ablation: ModuleType, varied: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained: list[object] = []
    train = adaptation.adapters.train
    monkeypatch.setattr(adaptation.adapters, "train", lambda *given: (trained.append(given[2]), train(*given))[1])
    part = vary(ablation, varied, only=["size"])
    assert list(part["tables"]) == ["size"]
    record = vary(ablation, varied)
    assert [(s.positives, s.negatives, s.residual) for s in trained] == [(1, 1, True), (1, 1, False), (2, 4, False)]
    assert {name: list(rows) for name, rows in record["tables"].items()} == {
        "M, N": ["1, 1", "2, 4"], "size": ["8", "16", "raw"], "centring": ["yes", "no"],
    }  # fmt: skip
    for table, rows in record["tables"].items():
        for name, row in rows.items():
            assert list(row["accuracy, memory"]) == ["1", "2", "4", "8", "16", "32", "64"]
            assert list(row["accuracy, dev"]) == ["1", "2", "4", "8", "16", "32", "64"]
            assert row["measured"]["tune"]["log-likelihood of a token"] < 0
            assert row["mixing"]["scaled"] == (name != "raw")
            assert (row["measured"]["train"] is None) == (name == "raw")
            assert ("test" in row) == (table != "size")
    [first, second] = record["tables"]["M, N"].values()
    assert first["test"]["p_bleu"] is None
    assert second["test"]["p_bleu"] > 0
    assert (record["set"], record["pairs"], record["test segments"]) == ("a", 60, 4)
    assert record["dev"] == {"pairs": 25, "left out": 1}
    assert not list((varied / "build" / "varied").glob("a.*.store"))  # only the adapters stay
    monkeypatch.setattr(adaptation, "tune", None)
    assert vary(ablation, varied) == record


def test_the_same_seed_gives_the_same_cell(ablation: ModuleType, varied: Path) -> None:
    one, two = (vary(ablation, varied, work=varied / name, only=["M, N"]) for name in ("one", "two"))
    for name, row in one["tables"]["M, N"].items():
        other = two["tables"]["M, N"][name]
        assert {**row["test"], "seconds": 0} == {**other["test"], "seconds": 0}
        assert row["accuracy, memory"] == other["accuracy, memory"]
        assert row["mixing"] == other["mixing"]


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"eps": 3}, "row 'x': eps does not apply"),
        ({"raw": True, "size": 3}, "size does not apply to raw states"),
        ({"raw": True, "steps": 3}, "steps does not apply to raw states"),
    ],
)
def test_a_variation_that_is_none_is_refused_by_name(ablation: ModuleType, row: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=said):
        ablation.tables({"tables": [{"name": "t", "rows": {"x": row}}]})


def test_the_ablation_has_the_papers_m_and_n_and_its_loss(ablation: ModuleType, reproduce: ModuleType) -> None:
    for quick in (False, True):
        config = reproduce.read_config(ROOT / "runs" / "ablation.toml", quick)
        first, *rest = ablation.tables(config)
        for name, variation in first.rows.items():
            m, n = map(int, name.split(", "))
            settings = variation.adapter
            assert (settings.positives, settings.negatives) == (m, n)
            free = {key: getattr(PAPER, key) for key in ("positives", "negatives", "steps", "warmup", "validate_every")}
            assert replace(settings, **free) == PAPER
        assert rest
    assert list(ablation.tables(reproduce.read_config(ROOT / "runs" / "ablation.toml", False))[0].rows) == [
        "1, 1", "1, 16", "1, 32", "1, 64", "2, 16", "2, 32", "2, 64", "4, 32",
    ]  # fmt: skip


# -- what is made of it ------------------------------------------------------------------------------------------------


def test_pages_are_made_of_whatever_a_run_leaves(
    reproduce: ModuleType, ablation: ModuleType, varied: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two sets that lack a system each, a timing of one, and an ablation."""
    run(reproduce, varied, only=["a"], system=["kNN-MT", "CLKNN", "CKMT"])
    record = run(reproduce, varied, only=["b"], system=["kNN-MT", "Adaptive kNN-MT", "CLKNN"])
    vary(ablation, varied)
    assert isinstance(record["sets"], dict)
    seconds = {"seconds": 2.0, "time / kNN-MT": 0.875, "least": 0.8, "most": 0.9, "index": "exact"}
    timed = {"entries": record["sets"]["a"]["entries"], "systems": {"CLKNN": seconds}}
    (varied / "results" / "systems_a.json").write_text(json.dumps({"measured": timed, "signature": {}}))
    pages = load_program("make_pages", ROOT / "docs" / "make_pages.py")
    monkeypatch.setattr(pages, "ROOT", varied)
    text = pages._results()
    lines = {line.split(" | ")[0].removeprefix("| "): line for line in text.splitlines() if line.startswith("| ")}
    assert "### Every set, and the average" in text
    assert all(f"| {score} | a | b | average |" in text for score in ("BLEU", "chrF2", "brevity penalty"))
    assert "| system | a: elsewhere | b: elsewhere | worst |" in text
    assert text.count("25 dev pairs, 1 more left out as they stand in the memory") == 2  # of set a, in both records
    assert "| M, N | @1 |" in text
    assert lines["raw"].count(" / ") == 7
    assert any("| 0.875 |" in line for line in text.splitlines() if line.startswith("| CLKNN |"))
    ckmt = next(line for line in text.splitlines() if line.startswith("| CKMT |") and "clusters" in line)
    assert ckmt.endswith("|  |")  # it was not timed
    drawn = pages._accuracy_figure(json.loads((varied / "results" / "small.json").read_text()))
    assert "a, memory as datastore" in drawn
    assert "kNN-MT · Adaptive kNN-MT" not in drawn  # in set a there is only one of them
    assert not pages._stale(ROOT / "docs" / "results.md", (ROOT / "docs" / "results.md").read_text("utf8"))


# -- speed -------------------------------------------------------------------------------------------------------------


def test_the_systems_of_a_run_are_timed_in_turns(reproduce: ModuleType, desk: Path) -> None:
    run(reproduce, desk, only=["a"], system=["kNN-MT", "CLKNN+w*", "Adaptive kNN-MT"])
    words = [sys.executable, str(ROOT / "bench" / "systems.py"), "--work", str(desk / "build" / "small")]
    options = ["--segments", "3", "--rounds", "2"]
    ran = subprocess.run([*words, "--set", "a", *options], cwd=desk, capture_output=True, text=True, check=True)
    record = json.loads(ran.stdout.splitlines()[-1])
    assert json.loads((desk / "results" / "systems_a.json").read_text()) == record
    timed = record["measured"]["systems"]
    assert set(timed) == {"base", "kNN-MT", "CLKNN+w*", "Adaptive kNN-MT"}
    assert timed["kNN-MT"]["time / kNN-MT"] == timed["kNN-MT"]["least"] == timed["kNN-MT"]["most"] == 1
    assert timed["CLKNN+w*"]["index"] == "exact, inner product, keys of 32"
    assert '"beam": 2' in record["signature"]["data"]
    refused = subprocess.run([*words, "--set", "b"], cwd=desk, capture_output=True, text=True, check=False)
    assert refused.returncode == 2
    assert "b has no finished kNN-MT" in refused.stderr


FEW = ["--pairs", "48"]


@pytest.mark.parametrize(
    ("program", "size"), [("force_decoding", FEW), ("training", FEW), ("importing", FEW), ("decode", ["--toy"])]
)
def test_a_benchmark_prints_one_record_last(program: str, size: list[str], tmp_path: Path) -> None:
    words = [sys.executable, str(ROOT / "bench" / f"{program}.py"), *size]
    ran = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=True)
    record = json.loads(ran.stdout.splitlines()[-1])
    assert set(record) == {"measured", "signature"}
    assert json.loads((tmp_path / "results" / f"{program}.json").read_text()) == record
