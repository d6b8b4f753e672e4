"""The rooms: a file imports only from files above it, and some packages have one importer each."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import clknn

SOURCE = Path(clknn.__file__).parent
# The order in which data flows; ARCHITECTURE.md describes it line by line.
ORDER = (
    "errors language corpus.pair corpus.archives corpus.cleaning corpus.markup corpus.tmx corpus.xliff corpus.gettext "
    "corpus.tables corpus.aligned corpus.record corpus step model states adapter projection index familiarity mixing "
    "tuning methods.ckmt methods.neighbourhood methods.adaptive methods.kster methods.gate datastore decoder "
    "translator evaluation adaptation figures cli __main__"
).split()
# Their own __init__ is not a file of the order: it holds a docstring, or resolves names on first use.
PACKAGES = "clknn", "clknn.methods"
# What stands in the order by its __init__, below the files within it.
ROOMS = ("corpus",)


def imports(module: str) -> set[str]:
    """Every module that a file imports, at its top or inside a function."""
    path = SOURCE / (f"{module}/__init__.py" if module in ROOMS else f"{module.replace('.', '/')}.py")
    return imported(path.read_text(encoding="utf8"))


def imported(code: str) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module in PACKAGES:
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
    return found


def test_every_file_has_its_place() -> None:
    files = {".".join(path.relative_to(SOURCE).with_suffix("").parts) for path in SOURCE.rglob("*.py")}
    inits = {f"{package}.__init__".removeprefix("clknn.") for package in (*PACKAGES, *ROOMS)}
    assert files == {*ORDER, *inits} - set(ROOMS)


def test_a_package_below_only_says_what_it_is() -> None:
    tree = ast.parse((SOURCE / "methods" / "__init__.py").read_text(encoding="utf8"))
    assert ast.get_docstring(tree)
    assert len(tree.body) == 1


def test_an_import_is_seen_however_it_is_written() -> None:
    for code in (
        "from clknn.methods import ckmt",
        "from clknn.methods.ckmt import train",
        "import clknn.methods.ckmt",
        "def f():\n    from clknn.methods import ckmt as c",
    ):
        assert imported(code) == {"clknn.methods.ckmt"}
    assert imported("from clknn import adapter, methods") == {"clknn.adapter", "clknn.methods"}


def test_a_file_imports_only_from_files_above_it() -> None:
    for place, module in enumerate(ORDER):
        ours = {name.removeprefix("clknn.") for name in imports(module) if name.startswith("clknn.")}
        assert "methods" not in ours, f"{module}.py imports all methods; name the one that is meant"
        below = {name for name in ours if name in ORDER and ORDER.index(name) >= place}
        assert not below, f"{module}.py imports from below: {below}"


def test_some_packages_have_one_importer_each() -> None:
    homes = {
        "transformers": "model", "faiss": "index", "langcodes": "language", "matplotlib": "figures",
        "sklearn": "figures", "polib": "corpus.gettext", "py3langid": "corpus.cleaning",
        "sqlite3": None, "pickle": None,
    }  # fmt: skip
    for package, home in homes.items():
        users = {m for m in ORDER if any(name.split(".")[0] == package for name in imports(m))}
        if package == "sqlite3":  # near-duplicates, the pairs, and the one place that knows a full disk by its error
            assert users == {"corpus.cleaning", "corpus.record", "datastore"}
        else:
            assert users == ({home} if home else set())


def test_importing_clknn_and_its_help_never_wait_for_torch() -> None:
    code = "import sys, clknn, clknn.cli; sys.exit(any(m in sys.modules for m in ('torch', 'faiss', 'transformers')))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_every_promised_name_resolves() -> None:
    for name in clknn.__all__:
        assert getattr(clknn, name) is not None


def test_reading_pairs_never_waits_for_the_language_identifier() -> None:
    code = "import sys, clknn.corpus; sys.exit(any(m in sys.modules for m in ('py3langid', 'numpy', 'torch')))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
