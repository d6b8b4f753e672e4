"""The command line as tests run it: in this process, or as real processes that can be signalled.

A real process is forked from one that has imported everything (four seconds, once), so that each costs a tenth of one.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

from clknn import cli


@dataclass(frozen=True)
class Ran:
    code: int
    out: str
    err: str


def run(*words: object, stdin: bytes = b"") -> Ran:
    """`clknn WORDS` in this process. A bug raises; nobody may write to the real stdout or stderr."""
    out, err = (io.TextIOWrapper(io.BytesIO(), encoding="utf8", newline="") for _ in range(2))
    code = 0
    with tempfile.TemporaryFile() as given:
        given.write(stdin)
        given.seek(0)
        with (
            mock.patch.object(sys, "argv", ["clknn", *map(str, words)]),
            mock.patch.object(sys, "stdin", given),
            contextlib.redirect_stdout(out),
            contextlib.redirect_stderr(err),
        ):
            try:
                cli.main()
            except SystemExit as done:
                code = int(done.code or 0)
    texts = []
    for stream in (out, err):
        stream.flush()
        texts.append(stream.buffer.getvalue().decode())  # type: ignore[attr-defined]
    return Ran(code, *texts)


def refused(*words: object, stdin: bytes = b"") -> str:
    """The one line that refuses this command; stdout must be empty."""
    ran = run(*words, stdin=stdin)
    assert (ran.code, ran.out) == (2, ""), ran
    return the_error(ran)


def the_error(ran: Ran) -> str:
    """The error: one line, the last on stderr, behind lines of progress alone."""
    *before, line = ran.err.splitlines()
    assert all(said.startswith("[") for said in before), ran.err
    assert line.startswith("clknn: "), ran.err
    assert ran.err.endswith("\n")
    return line.removeprefix("clknn: ")


@dataclass
class Job:
    """A running `clknn`, whose stdout and stderr go to files."""

    parent: Parent
    pid: int
    folder: Path

    def send(self, signal_number: int) -> None:
        os.kill(self.pid, signal_number)

    def wait(self) -> Ran:
        """Its exit code, or minus the signal that ended it."""
        code = self.parent.ask({"wait": self.pid})
        return Ran(code, (self.folder / "out").read_text(encoding="utf8"), (self.folder / "err").read_text())


class Parent:
    """The process that others are forked from."""

    def __init__(self, folder: Path, model: Path) -> None:
        self._folder, self._jobs = folder, 0
        self._process = subprocess.Popen(
            [sys.executable, __file__, str(model)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            text=True,
        )

    def ask(self, request: dict[str, object]) -> int:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return int(self._process.stdout.readline())

    def start(self, *words: object, stdin: Path = Path(os.devnull), pause: str = "") -> Job:
        """`clknn WORDS`; `pause`, such as "clknn.adaptation:train:2", makes the second call of it write a file
        `paused` in the job's folder and sleep instead of working."""
        self._jobs += 1
        folder = self._folder / str(self._jobs)
        folder.mkdir()
        asked = {"words": [*map(str, words)], "stdin": str(stdin), "folder": str(folder), "pause": pause}
        return Job(self, self.ask(asked), folder)

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(timeout=10)
        assert self._process.stdout is not None
        self._process.stdout.close()


@contextlib.contextmanager
def parent(folder: Path, model: Path) -> Iterator[Parent]:
    forks = Parent(folder, model)
    try:
        yield forks
    finally:
        forks.close()


def paused(job: Job) -> None:
    """Waits until the job has come to where it should pause."""
    for _ in range(600):
        if (job.folder / "paused").exists():
            return
        time.sleep(0.05)
    raise TimeoutError((job.folder / "err").read_text())


def _main(model: str) -> None:
    import torch

    from clknn import adaptation  # noqa: F401 (imported for the forks)
    from clknn import model as models

    torch.set_num_threads(1)
    models.load(model, "de", "en")
    for line in sys.stdin:
        request = json.loads(line)
        if "wait" in request:
            answer = os.waitstatus_to_exitcode(os.waitpid(request["wait"], 0)[1])
        else:
            answer = os.fork()
            if answer == 0:
                _become(request)
        print(answer, flush=True)


def _become(request: dict[str, str]) -> None:
    """In the fork: the command, with the files as its streams."""
    folder = Path(request["folder"])
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for stream, path, flags in (
        (0, request["stdin"], os.O_RDONLY),
        (1, folder / "out", os.O_WRONLY | os.O_CREAT),
        (2, folder / "err", os.O_WRONLY | os.O_CREAT),
    ):
        os.dup2(os.open(path, flags, 0o600), stream)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    sys.argv = ["clknn", *request["words"]]
    code = 1
    try:
        if request["pause"]:
            _pause_at(*request["pause"].split(":"), folder / "paused")
        cli.main()
        code = 0
    except SystemExit as done:
        code = int(done.code or 0)
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _pause_at(module: str, name: str, call: str, mark: Path) -> None:
    import importlib

    home = importlib.import_module(module)
    *classes, name = name.split(".")
    for part in classes:
        home = getattr(home, part)
    original, calls = getattr(home, name), 0

    def pausing(*given: object, **named: object) -> object:
        nonlocal calls
        calls += 1
        if calls == int(call):
            mark.touch()
            time.sleep(60)
        return original(*given, **named)

    setattr(home, name, pausing)


if __name__ == "__main__":
    _main(sys.argv[1])
