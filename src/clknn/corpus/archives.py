"""Where bytes come from and go to: a file, gzipped or not, a folder of them or a zip; and a file written whole.

Out come `File`s, each with a name for its pairs' origins, a kind, and bytes to read with every failure told as an
InputError. Hidden here: gzip, zip, what is refused in them (members that point outside, packed data that swells beyond
all measure), the temporary file behind each file that is written. The trade-off: nothing is ever unpacked to disk, and
so a zip's members are read in their order, one at a time.
"""

from __future__ import annotations

import gzip
import io
import os
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO, cast

from clknn.corpus.pair import Tally
from clknn.errors import InputError

LARGEST = 10_000_000  # bytes in one line of text or one translation unit
_SWELLS = 200  # times its packed size; text packs to a tenth, the same unit a million times to a hundredth
_HARMLESS = 100_000_000  # bytes that may come of anything, however it is packed
_MEMBERS = 100_000
_NAMED = 10  # files passed over that are named


@dataclass(frozen=True, slots=True)
class File:
    """A file that can be read: on disk, or in a zip."""

    path: Path
    label: str = ""  # its name within the folder or zip that was given
    archive: zipfile.ZipFile | None = None
    member: zipfile.ZipInfo | None = None

    def __str__(self) -> str:
        return f"{self.path}/{self.label}" if self.member else str(self.path)

    @property
    def name(self) -> str:
        """What origins call it."""
        return self.label or self.path.name

    @property
    def kind(self) -> str:
        """The suffix that says what is in it: .tmx, also of a.tmx.gz."""
        suffixes = [suffix.lower() for suffix in PurePosixPath(self.name).suffixes]
        if suffixes and suffixes[-1] == ".gz":
            suffixes.pop()
        return suffixes[-1] if suffixes else ""

    @contextmanager
    def opened(self) -> Iterator[IO[bytes]]:
        try:
            with self._raw() as raw:
                if not self.name.lower().endswith(".gz"):
                    yield raw
                    return
                with gzip.GzipFile(fileobj=raw) as unpacked:
                    yield cast(IO[bytes], io.BufferedReader(_Measured(unpacked, raw, self), 1 << 16))
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            packer = "gzip" if self.name.lower().endswith(".gz") else "zip"
            raise InputError(f"{self}: {packer} cannot unpack it ({error}); copy or pack it again") from error
        except (zipfile.BadZipFile, NotImplementedError) as error:  # zipfile's word for a packing it does not know
            raise InputError(f"{self}: zip cannot unpack it ({error}); copy or pack it again") from error
        except FileNotFoundError as error:
            raise InputError(f"{self}: no such file; check the name") from error
        except OSError as error:
            raise InputError(f"{self}: cannot be read ({error.strerror or error}); check the file") from error

    def _raw(self) -> IO[bytes]:
        if self.archive is None or self.member is None:
            return self.path.open("rb")
        return self.archive.open(self.member)

    def refuse_unreadable(self) -> None:
        if self.member is None:
            if self.path.is_dir():
                raise InputError(f"{self}: is a folder; name a file in it")
            if self.path.exists() and not self.path.is_file():
                raise InputError(f"{self}: is not a regular file; write its content to a file first")
        with self.opened() as file:
            if not file.read(1):
                raise InputError(f"{self}: the file is empty; export it again")


class _Measured(io.RawIOBase):
    """What was unpacked, as long as it is in proportion to what was packed."""

    def __init__(self, unpacked: gzip.GzipFile, packed: IO[bytes], file: File) -> None:
        self._unpacked, self._packed, self._file = unpacked, packed, file
        self._bytes = 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]  # typeshed's Buffer is wider
        size = self._unpacked.readinto(buffer)
        self._bytes += size
        if self._bytes > _HARMLESS and self._bytes > _SWELLS * self._packed.tell():
            raise _swollen(self._file)
        return size


def _swollen(file: object) -> InputError:
    return InputError(f"{file}: unpacks to more than {_SWELLS} times its size, as no text does; unpack it yourself")


def lines(file: File, advice: str = "save the file as UTF-8", encoding: str = "utf-8") -> Iterator[str]:
    """Its lines without their ends; only a line feed ends one."""
    with file.opened() as opened:
        number = 0
        while line := opened.readline(LARGEST):
            number += 1
            if len(line) == LARGEST and not line.endswith(b"\n"):
                raise InputError(f"{file}:{number}: a line of more than {LARGEST:,} bytes; is this text?")
            if number == 1 and encoding == "utf-8":
                line = line.removeprefix(b"\xef\xbb\xbf")
            try:
                yield line.rstrip(b"\r\n").decode(encoding)
            except UnicodeDecodeError as error:
                name = "UTF-8" if encoding == "utf-8" else encoding
                raise InputError(
                    f"{file}:{number}: not {name} at byte {error.start + 1} of the line"
                    f" (0x{error.object[error.start]:02x}); {advice}"
                ) from error


@contextmanager
def files_within(path: Path) -> Iterator[list[File]]:
    """The files in a folder or zip and in its folders, by name."""
    if path.is_dir():
        yield sorted((File(p, p.relative_to(path).as_posix()) for p in _below(path)), key=lambda file: file.name)
        return
    try:
        with zipfile.ZipFile(path) as archive:
            yield _members(archive, path)
    except (zipfile.BadZipFile, NotImplementedError, EOFError, zlib.error, ValueError) as error:
        raise InputError(f"{path}: zip cannot unpack it ({error}); copy or pack it again") from error
    except FileNotFoundError as error:
        raise InputError(f"{path}: no such file; check the name") from error
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror or error}); check the file") from error


def _below(folder: Path) -> Iterator[Path]:
    def refuse(error: OSError) -> None:
        raise InputError(f"{error.filename}: cannot be read ({error.strerror}); make it readable") from error

    for top, _, names in os.walk(folder, onerror=refuse):
        yield from (Path(top, name) for name in names)


def _members(archive: zipfile.ZipFile, path: Path) -> list[File]:
    members = [member for member in archive.infolist() if not member.is_dir()]
    if len(members) > _MEMBERS:
        raise InputError(f"{path}: more than {_MEMBERS:,} files in it; unpack it yourself")
    for member in members:
        parts = PurePosixPath(member.filename.replace("\\", "/"))
        if parts.is_absolute() or ".." in parts.parts or parts.parts[0].endswith(":") or "\0" in member.filename:
            raise InputError(f"{path}: has a file {member.filename!r}, which points outside; pack it again")
        if member.flag_bits & 1:
            raise InputError(f"{path}/{member.filename}: is encrypted; unpack it yourself")
    total = sum(member.file_size for member in members)
    if total > _HARMLESS and total > _SWELLS * path.stat().st_size:
        raise _swollen(path)
    return sorted((File(path, m.filename, archive, m) for m in members), key=lambda file: file.name)


def pass_over(strangers: Sequence[File], path: Path, tally: Tally) -> None:
    """Counts files that are not read, and names the first ones."""
    if not strangers:
        return
    named = ", ".join(file.name for file in strangers[:_NAMED])
    if len(strangers) > _NAMED:
        named += f" and {len(strangers) - _NAMED:,} more"
    reason = "files of another kind"
    tally.skip(reason, f"{path}: {named}" if tally.strict else named)
    tally.skipped[reason].count += len(strangers) - 1


@contextmanager
def written(path: Path) -> Iterator[IO[bytes]]:
    """A file to write, gzipped if its name ends in .gz; it is there whole, once all is well, or not at all."""
    if not path.parent.is_dir():
        raise InputError(f"{path}: the folder {path.parent} does not exist; create it first")
    if path.is_dir():
        raise InputError(f"{path}: is a folder; name a file in it")
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        with partial.open("wb") as raw:
            if path.suffix.lower() == ".gz":
                with gzip.GzipFile(filename="", mode="wb", fileobj=raw, mtime=0) as packed:
                    yield cast(IO[bytes], packed)
            else:
                yield raw
            raw.flush()
            os.fsync(raw.fileno())
        partial.replace(path)
    except OSError as error:
        if error.filename not in (None, str(partial)):
            raise
        raise InputError(f"{path}: cannot be written ({error.strerror}); choose another place") from error
    finally:
        partial.unlink(missing_ok=True)
