"""Mutated files of every format: each is read, or refused by an InputError, quickly and in little memory.

`python tests/fuzz.py --inputs 20000` is the long form; the tests call `run` with a few hundred. Each input is made from
a number alone, so that a failure can be made again: `--only NUMBER`.
"""

from __future__ import annotations

import argparse
import gzip
import io
import random
import resource
import struct
import tempfile
import time
import zipfile
from collections import Counter
from pathlib import Path

from clknn.corpus import Cleaning, Tally, read_pairs
from clknn.errors import InputError

SECONDS, MEBIBYTES = 2.0, 256
UNIT = (
    '<tu tuid="1" changedate="x"><note>n</note><prop type="p">v</prop><tuv xml:lang="de"><seg>Ein <bpt i="1">&lt;b&gt;'
    '</bpt>Haus<ph/></seg></tuv><tuv xml:lang="en-GB"><seg>A house &amp; &#228;</seg></tuv></tu>\n'
)
SEEDS: dict[str, str] = {
    "a.tmx": '<?xml version="1.0" encoding="utf-8"?>\n<!DOCTYPE tmx SYSTEM "tmx14.dtd">\n'
    f'<tmx version="1.4"><header srclang="de"/><body>\n{UNIT * 6}</body></tmx>',
    "a.xlf": '<?xml version="1.0"?>\n<xliff version="1.2">'
    '<file original="a" source-language="de" target-language="en"><body>'
    + '<group id="g"><trans-unit id="1" approved="yes"><source>Ein <g id="1">Haus</g></source>'
    '<target state="final">A house</target><note>n</note><alt-trans><target>x</target></alt-trans>'
    "</trans-unit></group>\n" * 5 + "</body></file></xliff>",
    "b.xliff": '<xliff version="2.0" srcLang="de" trgLang="en"><file id="f">'
    + '<unit id="u"><notes><note>n</note></notes><originalData><data id="d">x</data></originalData>'
    '<segment id="s" state="final"><source>Haus<ph id="1"/><cp hex="0001"/></source>'
    '<target>house <pc id="2">x</pc></target></segment><ignorable><source> </source></ignorable></unit>\n'
    * 5
    + "</file></xliff>",
    "a.po": 'msgid ""\nmsgstr ""\n"Content-Type: text/plain; charset=UTF-8\\n"\n"Language: en\\n"\n\n'
    + '# note\n#, fuzzy\n#: a.c:1\nmsgctxt "c"\nmsgid "Ein\\n"\n"Haus"\nmsgid_plural "H\\"\\x41"\n'
    'msgstr[0] "a"\nmsgstr[1] "b"\n#~ msgid "x"\n#~ msgstr "y"\n\n' * 5,
    "a.csv": 'id;de;en\n1;"Ein ""Haus""";"A\nhouse"\n2;zwei;two\n' * 5,
    "a.tsv": "source\ttarget\nHaus\thouse\n" * 5,
    "a.jsonl": '{"source": "Haus", "target": "house", "unit": "u", "k": [1, {"a": null}]}\n'
    '{"de": "\\u00e4", "en": "x"}\n' * 5,
}
HOSTILE = (
    b"\0", b"\xff", b"\xed\xa0\x80", b"\xef\xbf\xbe", "\u202e".encode(), b"\r", b"<!--", b"-->", b"<![CDATA[", b"]]>",
    b"&x;", b'<!ENTITY a "b">', b'<!DOCTYPE x [<!ENTITY % p SYSTEM "file:///etc/passwd"> %p;]>', b"<tu>" * 300,
    b"</tu>", b"<seg>" * 50, b'"' * 30, b"\\" * 31, b"[" * 5000, b"9" * 5000, b'encoding="utf-7"',
    b'encoding="utf-16"', b"charset=zlib", b"\t" * 99, b" " * 70_000, b"a" * 70_000, b" x='y'" * 3000, b"\xfe\xff",
    b"\xff\xfe", b"\\ud800", b"&#0;", b"&#xFFFF;", b"<ph/>" * 2000,
)  # fmt: skip


def mutated(content: bytes, rng: random.Random) -> bytes:
    data = bytearray(content)
    for _ in range(rng.choice((1, 1, 2, 4, 16))):
        at = rng.randrange(len(data) + 1)
        to = min(len(data), at + rng.choice((1, 1, 3, 20, 200)))
        match rng.randrange(6):
            case 0:
                data[at:to] = b""
            case 1:
                data[at:at] = rng.choice(HOSTILE)
            case 2:
                data[at:at] = data[at:to] * rng.choice((2, 10, 100))
            case 3:
                data[at:to] = bytes(rng.randrange(256) for _ in range(to - at))
            case 4:
                del data[at:]
            case _:
                other = rng.randrange(len(data) + 1)
                data[at:at] = data[other : other + 100]
    return bytes(data)


def made(number: int, folder: Path) -> Path:
    """Input `number`, written: a mutated file, at times packed, the packed bytes at times mutated as well."""
    rng = random.Random(number)
    name = rng.choice((*SEEDS, "a.mo", "a.zip"))
    if name == "a.mo":
        texts = [b"", b"c\4Haus\0H", b"Baum"]
        head = struct.pack("<7I", 0x950412DE, 0, 3, 28, 52, 0, 76)
        body, tables = b"", []
        for text in (*texts, b"Language: en\n", b"house\0houses", b"tree"):
            tables.append(struct.pack("<2I", len(text), 76 + len(body)))
            body += text + b"\0"
        content = mutated(head + b"".join(tables) + body, rng)
    elif name == "a.zip":
        packed = io.BytesIO()
        with zipfile.ZipFile(packed, "w", rng.choice((zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED))) as archive:
            for inner in rng.sample(sorted(SEEDS), 3):
                prefix = rng.choice(("", "", "sub/", "../", "/"))
                archive.writestr(prefix + inner, mutated(SEEDS[inner].encode(), rng))
        content = packed.getvalue() if rng.random() < 0.5 else mutated(packed.getvalue(), rng)
    else:
        encoding = rng.choice(("utf-8", "utf-8", "utf-8", "utf-16", "latin-1"))
        content = mutated(SEEDS[name].encode(encoding, "replace"), rng)
    if name != "a.zip" and rng.random() < 0.2:
        name, content = f"{name}.gz", gzip.compress(content, 1)
        if rng.random() < 0.3:
            content = mutated(content, rng)
    path = folder / name
    path.write_bytes(content)
    return path


def tried(number: int, folder: Path) -> str:
    """How reading input `number` ended; raises where it should not have ended so."""
    path = made(number, folder)
    rng = random.Random(-number)
    cleaning = Cleaning(near_duplicates=rng.random() < 0.2, nfc=rng.random() < 0.5, strip_controls=rng.random() < 0.5)
    started = time.process_time()  # other jobs move the clock on the wall
    try:
        kept = sum(1 for _ in read_pairs([path], "de", "en", Tally(), cleaning, all_states=rng.random() < 0.5))
        ended = "read" if kept else "read, nothing kept"
    except InputError:
        ended = "refused"
    finally:
        path.unlink(missing_ok=True)
    seconds = time.process_time() - started
    assert seconds < SECONDS, f"input {number}: {seconds:.1f} s"
    return ended


def run(numbers: range) -> Counter[str]:
    """How many ended how. Memory is measured as what this process grew by."""
    before = _peak()
    ended: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as folder:
        for number in numbers:
            try:
                ended[tried(number, Path(folder))] += 1
            except Exception as error:  # whatever it is, it is a finding: only refusals are expected
                raise AssertionError(f"input {number} (python tests/fuzz.py --only {number})") from error
    grown = _peak() - before
    assert grown < MEBIBYTES, f"{grown:.0f} MiB more"
    return ended


def _peak() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--inputs", type=int, default=20_000)
    parser.add_argument("--only", type=int)
    options = parser.parse_args()
    begun = time.perf_counter()
    result = run(range(options.inputs) if options.only is None else range(options.only, options.only + 1))
    seconds = time.perf_counter() - begun
    print(f"{sum(result.values()):,} inputs in {seconds:.0f} s, peak {_peak():.0f} MiB: {dict(result)}")
