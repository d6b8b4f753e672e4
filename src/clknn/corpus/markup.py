"""XML as it streams by, and what stands inside a segment: words for the model, and its inline codes, kept as written.

In goes a File and a reader's handlers; out come calls of them, with lines that are exact. Hidden here: encodings, the
dangers of XML (no entity may be declared, nothing outside is read, depth and the size of a tag are bounded) and what a
broken file is told. It is expat and not lxml: a unit need never be whole in memory, so that one of any size is passed
over and counted, which libxml2's tree cannot; and reading to pairs is twice as fast as with a tree.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import IO, Any
from xml.parsers import expat
from xml.sax.saxutils import escape, quoteattr

from clknn.corpus.archives import LARGEST, File, lines
from clknn.corpus.cleaning import LONGEST, tidy
from clknn.errors import InputError

DEEPEST = 256  # elements inside each other
_LONGEST_TAG = 1_000_000  # bytes in one tag or comment
_MOST_PIECES = 100_000  # of text and codes in one segment
_CHUNK = 1 << 16
CHECKED = 1 << 17  # bytes of a unit from which it is looked at whether it will end
OVERLONG = "…" * (LONGEST + 1)  # stands for a segment that was not kept whole; its length says why it is skipped

_DECLARATION = re.compile(r"\s*<\?xml\s[^>]*?\?>")
_SAID_ENCODING = re.compile(rb"^\s*<\?xml[^>]*?encoding\s*=\s*[\"']([A-Za-z0-9._-]+)[\"']")
# Only these: Python has codecs that unpack, or that run together, which no file may ask for.
_ENCODINGS = re.compile(
    r"utf[-_]?(16|32)([-_]?[lb]e)?|iso8859-\d+|cp\d+|koi8-\w+|mac-\w+|euc_\w+|gb\w+|big5\w*|shift_jis\w*|ascii",
    re.ASCII,
)
_BREAK_TYPES = frozenset(("lb", "br", "linebreak", "line-break", "newline"))
_BREAK_CODE = re.compile(r"\s*(<br\b[^>]*>|\\r|\\n)+\s*", re.IGNORECASE)
_ILLEGAL = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\ud800-\udfff\ufffe\uffff]")
RETURN = {"\r": "&#13;"}  # which a parser would take for a line feed
_ENTITY = re.compile(rb"&(?!amp;|lt;|gt;|quot;|apos;|#)([^;\s<&]{1,40})")
_CUT_SHORT = frozenset(
    expat.errors.codes[said]
    for said in (
        expat.errors.XML_ERROR_NO_ELEMENTS,
        expat.errors.XML_ERROR_UNCLOSED_TOKEN,
        expat.errors.XML_ERROR_PARTIAL_CHAR,
        expat.errors.XML_ERROR_UNCLOSED_CDATA_SECTION,
    )
)
_NAMELESS = expat.errors.codes[expat.errors.XML_ERROR_UNDEFINED_ENTITY]
_INVALID = expat.errors.codes[expat.errors.XML_ERROR_INVALID_TOKEN]


class Xml:
    """One file being parsed. A reader sets its handlers on `parser`, counts the depth, and goes through `fed`."""

    def __init__(self, file: File) -> None:
        self.file = file
        self.bytes = 0  # that were fed to the parser
        self.lines_passed = 0  # that were not
        self._wrong: InputError | None = None
        self.parser = expat.ParserCreate("utf-8")
        self.parser.buffer_text = True
        self.parser.ordered_attributes = True
        self.parser.EntityDeclHandler = self._refuse_entity

    @property
    def line(self) -> int:
        """Where the tag being reported begins."""
        return int(self.parser.CurrentLineNumber) + self.lines_passed

    def refuse_depth(self) -> None:
        raise InputError(f"{self.file}:{self.line}: more than {DEEPEST} elements inside each other; is this a TM?")

    def fed(self) -> Iterator[None]:
        """Now and then, while the handlers see the file; `bytes` says how much of it they saw."""
        for part in self.parts():
            self.feed(part)
            yield
            self.refuse()
        self.feed(b"", last=True)
        yield
        self.refuse()

    def parts(self) -> Iterator[bytes]:
        """The file in UTF-8, for a reader that feeds them itself."""
        with self.file.opened() as file:
            yield from _utf8(file, self.file)

    def feed(self, part: bytes, *, last: bool = False) -> None:
        """Calls the handlers; what is wrong is kept for `refuse`, for what stands before it is good."""
        try:
            self.parser.Parse(part, last)
        except expat.ExpatError as error:
            self._wrong = self._told(error, part)
        self.bytes += len(part)
        if self._wrong is None and self.bytes - self.parser.CurrentByteIndex > _LONGEST_TAG + _CHUNK:
            self._wrong = InputError(
                f"{self.file}:{self.line}: a tag or comment of more than {_LONGEST_TAG:,} bytes;"
                " correct it or export the file again"
            )

    def refuse(self) -> None:
        if self._wrong is not None:
            raise self._wrong

    def _refuse_entity(self, name: str, *_: object) -> None:
        raise InputError(
            f"{self.file}: declares the XML entity {name!r}, which can hide a file or a huge text;"
            " remove the declarations from its DOCTYPE"
        )

    def _told(self, error: expat.ExpatError, part: bytes) -> InputError:
        said = expat.ErrorString(error.code)
        if error.code == _INVALID:
            _refuse_encoding(self.file)
        if error.code == _NAMELESS:
            found = _ENTITY.search(part, max(self.parser.ErrorByteIndex - self.bytes, 0))
            if found:
                said = f"Entity '{found[1].decode(errors='replace')}' not defined"
        # Whatever comes at the very end of the file is the want of more.
        cut = "the file is cut short: " if error.code in _CUT_SHORT else ""
        where = f"{self.file}:{error.lineno + self.lines_passed}"
        return InputError(f"{where}: not well-formed XML ({cut}{said}); correct it or export the file again")


def _utf8(file: IO[bytes], name: File) -> Iterator[bytes]:
    """The document in UTF-8, and with a declaration that forbids entities from elsewhere."""
    head = file.read(_CHUNK)
    encoding = _encoding(head, name)
    if encoding is None:
        start = len(codecs.BOM_UTF8) if head.startswith(codecs.BOM_UTF8) else 0
        declaration = re.match(rb"\s*<\?xml\s[^>]*?\?>", head[start:])
        feeds = declaration[0].count(b"\n") if declaration else 0
        yield _declared(feeds)
        yield head[start + (declaration.end() if declaration else 0) :]
        while chunk := file.read(_CHUNK):
            yield chunk
        return
    decoder = codecs.getincrementaldecoder(encoding)()
    number = 1
    try:
        text = decoder.decode(head).removeprefix("\ufeff")
        found = _DECLARATION.match(text)
        yield _declared(found[0].count("\n") if found else 0)
        text = text[found.end() if found else 0 :]
        while True:
            yield text.encode("utf-8", "surrogatepass")
            number += text.count("\n")
            if not (chunk := file.read(_CHUNK)):
                break
            text = decoder.decode(chunk)
        decoder.decode(b"", True)
    except UnicodeDecodeError as error:
        raise InputError(
            f"{name}: not {encoding}, as it says it is, near line {number:,}"
            f" (0x{error.object[error.start]:02x}); name its real encoding in the first line"
        ) from error


def _declared(feeds: int) -> bytes:
    feeds_kept = b"\n" * feeds
    return b'<?xml version="1.0" encoding="utf-8" standalone="yes"' + feeds_kept + b"?>"


def encoding_called(said: str) -> str | None:
    """Python's name for an encoding that a file may be in; None for others."""
    try:
        name = codecs.lookup(said).name
    except LookupError:
        return None
    return name if name == "utf-8" or _ENCODINGS.fullmatch(name) else None


def _encoding(head: bytes, file: File) -> str | None:
    """Another than UTF-8, by the file's first bytes or by what it says of itself."""
    for mark, name in (
        (codecs.BOM_UTF32_LE, "utf-32"),
        (codecs.BOM_UTF16_LE, "utf-16"),
        (codecs.BOM_UTF16_BE, "utf-16"),
    ):
        if head.startswith(mark):
            return name
    if head[:2] in (b"<\0", b"\0<"):
        return "utf-16-le" if head[0] else "utf-16-be"
    said = _SAID_ENCODING.match(head)
    if said is None or head.startswith(codecs.BOM_UTF8):
        return None
    asked = said[1].decode()
    called = encoding_called(asked)
    if called is None:
        raise InputError(f"{file}:1: says it is in {asked!r}, which is not read; save it as UTF-8")
    return None if called.startswith("utf") else called  # it has no mark of UTF-16, and so is not that


def _refuse_encoding(file: File) -> None:
    """Names the first byte that is not UTF-8, which the parser does not; it may say what other encoding it is in."""
    with file.opened() as opened:
        if _encoding(opened.read(1000), file) is not None:
            return
    for _ in lines(file, 'save the file as UTF-8, or name its encoding in the first line (encoding="windows-1252")'):
        pass


@dataclass(frozen=True, slots=True)
class Dialect:
    """Which inline elements a format has: the codes, whose content is no text, and those around text."""

    codes: frozenset[str]
    around: frozenset[str]


TMX = Dialect(frozenset(("bpt", "ept", "it", "ph", "ut")), frozenset(("hi", "sub")))
XLIFF_1 = Dialect(frozenset(("bpt", "ept", "it", "ph", "x", "bx", "ex")), frozenset(("g", "mrk", "sub")))
XLIFF_2 = Dialect(frozenset(("ph", "sc", "ec", "sm", "em", "cp")), frozenset(("pc", "mrk")))


class Content:
    """What stands in one segment, as it streams by: words, and with codes in it also the markup.

    While there are no codes, expat appends the text to `words` without any call to Python.
    """

    def __init__(self, parser: Any, dialect: Dialect) -> None:
        self._parser, self._dialect = parser, dialect
        self.words: list[str] = []
        self._markup: list[str] = []
        self._open: list[tuple[str, bool]] = []  # name (empty: left out of the markup), whether a code begins here
        self._codes = 0  # how many of the open ones are codes
        self._code_text: list[str] = []
        self._breaks = False
        self._rich = False

    def begin(self) -> None:
        self.words = []
        self._parser.CharacterDataHandler = self.words.append

    def begins(self, name: str, attributes: list[str]) -> None:
        """An element within the segment."""
        if not self._rich:
            self._rich = True
            self._markup = [escape("".join(self.words), RETURN)]
            self._parser.CharacterDataHandler = self._text
        local = name.rpartition(":")[2]
        code = local in self._dialect.codes
        known = code or local in self._dialect.around
        if known:
            said = "".join(
                f" {key}={quoteattr(value)}"
                for key, value in zip(attributes[::2], attributes[1::2], strict=True)
                if ":" not in key or key == "xml:space"
            )
            self._markup.append(f"<{local}{said}>")
        if code and not self._codes:
            self._code_text = []
            self._breaks = _breaks_line(attributes)
            if local == "cp":
                self.words.append(_character(attributes))
        self._codes += code
        self._open.append((local if known else "", code))

    def ends(self) -> None:
        name, code = self._open.pop()
        if name:
            self._markup.append(f"</{name}>")
        self._codes -= code
        if code and not self._codes and (self._breaks or _BREAK_CODE.fullmatch("".join(self._code_text))):
            self.words.append(" ")

    @property
    def inside(self) -> bool:
        """Whether an element within the segment is open."""
        return bool(self._open)

    def _text(self, text: str) -> None:
        self._markup.append(escape(text, RETURN))
        if not self._codes:
            self.words.append(text)
        else:
            self._code_text.append(text)

    def bound(self) -> None:
        """Keeps a segment without end from filling the memory; to be called now and then."""
        if len(self.words) > _MOST_PIECES or len(self._markup) > _MOST_PIECES or sum(map(len, self.words)) > LARGEST:
            self.words[:], self._markup = [OVERLONG], []

    def finish(self) -> tuple[str, str | None]:
        """Its words, and its markup if it has any."""
        self._parser.CharacterDataHandler = None
        words = self.words[0] if len(self.words) == 1 else "".join(self.words)
        if not self._rich:
            return words, None
        markup = "".join(self._markup)
        self._rich, self._markup, self._open, self._codes = False, [], [], 0
        return words, markup if len(markup) <= 4 * LONGEST else None


def _breaks_line(attributes: list[str]) -> bool:
    said = dict(zip(attributes[::2], attributes[1::2], strict=True))
    kinds = (said.get(name, "").lower().removeprefix("x-") for name in ("type", "ctype", "subType"))
    return any(kind.removeprefix("xlf:") in _BREAK_TYPES for kind in kinds)


def _character(attributes: list[str]) -> str:
    """The character that a <cp hex="001A"/> stands for: one that XML cannot hold."""
    said = dict(zip(attributes[::2], attributes[1::2], strict=True)).get("hex", "")
    try:
        return chr(int(said, 16))
    except (ValueError, OverflowError):
        return "\ufffd"


def as_written(markup: str | None, text: str, dialect: Dialect) -> str:
    """XML to write for this text: its markup, if the text is still what the markup says; else the text alone.

    What comes from elsewhere is believed only as far as it parses, in elements that the dialect has.
    """
    if markup is not None and _words_of(markup, dialect) == text:
        return markup
    return escape(text, RETURN)


def _words_of(markup: str, dialect: Dialect) -> str | None:
    parser = expat.ParserCreate("utf-8")
    parser.buffer_text = True
    parser.ordered_attributes = True
    content = Content(parser, dialect)
    foreign = False

    def start(name: str, attributes: list[str]) -> None:
        nonlocal foreign
        names = [name, *attributes[::2]]
        foreign = foreign or any(":" in n and n != "xml:space" for n in names)
        foreign = foreign or (name not in dialect.codes and name not in dialect.around)
        content.begins(name, attributes)

    def first(_: str, __: list[str]) -> None:
        content.begin()
        parser.StartElementHandler = start

    def end(_: str) -> None:
        if content.inside:
            content.ends()

    parser.StartElementHandler, parser.EndElementHandler = first, end
    try:
        parser.Parse(f"<s>{markup}</s>".encode(), True)
    except (expat.ExpatError, UnicodeEncodeError):
        return None
    return None if foreign else tidy(content.finish()[0])


def xml_of(text: str, origin: object) -> str:
    """A piece of XML made of these, unless it holds what XML cannot."""
    if _ILLEGAL.search(text):
        raise InputError(f"{origin}: a control character cannot stand in XML; remove it")
    return text
