"""What the documents say is run: the README's Python, every command they show, and docs/cli.md against --help."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import tiny
from clknn import cli

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf8")


@pytest.fixture
def desk(tmp_path: Path, checkpoints: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the files that the README's examples name, and a tiny model where they name a real one."""
    tiny.write_tsv(tmp_path / "legal.tsv", tiny.pairs(120))
    tiny.write_tsv(tmp_path / "test.tsv", tiny.pairs(5, seed=3))
    (tmp_path / "in.txt").write_text("haus baum\nkatze\n", encoding="utf8")
    (tmp_path / "model").symlink_to(checkpoints("marian"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


def on_the_desk(text: str) -> str:
    """The README's words for a user's own files, in the words of this test."""
    return text.replace("Helsinki-NLP/opus-mt-de-en", "model").replace("legal.tmx", "legal.tsv")


def test_the_readmes_python_runs(desk: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (code,) = blocks("python")
    assert len(code.strip().splitlines()) <= 14
    exec(compile(on_the_desk(code), "README.md", "exec"), {})
    assert (desk / "legal.store" / "manifest.json").exists()
    assert capsys.readouterr().out.strip()


def test_the_readmes_commands_run(desk: Path) -> None:
    lines = [line.split("  #")[0] for block in blocks("sh") for line in block.replace("\\\n", " ").splitlines()]
    commands = [on_the_desk(line).strip() for line in lines if line.strip().startswith("clknn ")]
    assert {shlex.split(c)[1] for c in commands} >= {"adapt", "translate", "evaluate", "inspect", "build", "train"}
    bin_folder = Path(sys.executable).parent
    for command in commands:
        done = subprocess.run(
            f"{bin_folder}/{command}", shell=True, cwd=desk, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, f"{command}\n{done.stderr}"
    assert len((desk / "out.txt").read_text(encoding="utf8").splitlines()) == 2


def test_the_command_line_page_is_what_help_prints() -> None:
    done = subprocess.run(
        [sys.executable, ROOT / "docs" / "make_pages.py", "--check"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_the_command_line_page_has_every_command() -> None:
    pages = set(re.findall(r"^## clknn (\w+)$", (ROOT / "docs" / "cli.md").read_text(encoding="utf8"), re.MULTILINE))
    assert pages == {c.name or c.callback.__name__ for c in cli.app.registered_commands if c.callback}


def test_documents_name_only_files_that_exist() -> None:
    for page in [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), *(ROOT / "examples").glob("*.md")]:
        for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text(encoding="utf8")):
            assert (page.parent / target).exists(), f"{page.name} links to {target}, which is not there"


def test_the_tree_in_the_readme_is_the_tree() -> None:
    named = re.findall(r"^\s+(\w+)\.py\s", README, re.MULTILINE)
    there = [path.stem for path in (ROOT / "src" / "clknn").rglob("*.py") if path.stem != "__main__"]
    assert sorted([*named, "__init__"]) == sorted(there)  # methods/__init__.py holds a docstring
