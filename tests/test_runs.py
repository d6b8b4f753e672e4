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

import pytest

import tiny
from clknn.adapter import PAPER
from clknn.errors import InputError

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def reproduce() -> ModuleType:
    spec = importlib.util.spec_from_file_location("reproduce", ROOT / "runs" / "reproduce.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["reproduce"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def desk(tmp_path: Path, checkpoints: Callable[[str], Path]) -> Path:
    """Two small sets, general text, and a configuration of everything at its smallest."""
    rows = tiny.pairs(150)
    for name, part in (("a", rows[:60]), ("b", rows[60:120]), ("dev", rows[120:135]), ("test", rows[135:])):
        tiny.write_tsv(tmp_path / f"{name}.tsv", part)
    tiny.write_tsv(tmp_path / "repeated.tsv", [*rows[120:135], rows[0]])
    (tmp_path / "model").symlink_to(checkpoints("marian"))
    one = 'dev = ["repeated.tsv"]\ntest = ["test.tsv"]\ntest_pairs = 4\n'
    (tmp_path / "small.toml").write_text(
        f'model = "model"\nsource = "de"\ntarget = "en"\nbeam = 2\n[adapter]\nsteps = 2\nbatch = 16\n'
        f"[ckmt]\nsteps = 2\nbatch = 8\n"
        f'[sets.a]\ntrain = ["a.tsv"]\n{one}[sets.b]\ntrain = ["b.tsv"]\npairs = 50\n{one}'
        f'[general.elsewhere]\nfiles = ["test.tsv"]\npairs = 3\n'
    )
    return tmp_path


def run(reproduce: ModuleType, desk: Path, **options: object) -> dict[str, object]:
    reproduce.main(desk / "small.toml", desk, desk / "build", results=desk / "results", **{"quick": False, **options})
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
    names = ["base", *(system.name for system in reproduce.systems({}))]
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
    assert "tun" in capsys.readouterr().err  # the dev pair that is stored too was counted
    monkeypatch.setattr(reproduce.adaptation, "tune", None)  # a rerun makes nothing anew
    assert run(reproduce, desk) == record


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
    assert (PAPER.inner, PAPER.width) == (None, None)  # derived from D, where they are the same


@pytest.mark.parametrize("name", ["bench", "demo"])
def test_every_configuration_names_systems_that_there_are(reproduce: ModuleType, name: str) -> None:
    config = tomllib.loads((ROOT / "runs" / f"{name}.toml").read_text(encoding="utf8"))
    assert reproduce.systems(config)[0].name == reproduce.REFERENCE


@pytest.mark.parametrize("program", ["force_decoding", "training", "importing"])
def test_a_benchmark_prints_one_record_last(program: str, tmp_path: Path) -> None:
    words = [sys.executable, str(ROOT / "bench" / f"{program}.py"), "--pairs", "48"]
    ran = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=True)
    record = json.loads(ran.stdout.splitlines()[-1])
    assert set(record) == {"measured", "signature"}
    assert json.loads((tmp_path / "results" / f"{program}.json").read_text()) == record
