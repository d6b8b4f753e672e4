"""Every format: what it gives, what it keeps, that it comes back, and that others read what we write."""

from __future__ import annotations

import gzip
import json
import struct
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import polib
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from translate.storage import tmx as their_tmx
from translate.storage import xliff as their_xliff

from clknn.corpus import AS_IT_IS, Cleaning, Details, Origin, Pair, Pairs, Tally, convert, read_pairs, write_pairs
from clknn.errors import InputError

Put = Callable[[str, str | bytes], Path]


@pytest.fixture
def put(tmp_path: Path) -> Put:
    def put_file(name: str, content: str | bytes) -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return path

    return put_file


def read(
    *paths: Path, source: str = "de", target: str = "en", cleaning: Cleaning = AS_IT_IS, all_states: bool = False
) -> tuple[list[Pair], Tally]:
    tally = Tally()
    return list(read_pairs(paths, source, target, tally, cleaning, all_states)), tally


def texts(pairs: list[Pair]) -> list[tuple[str, str]]:
    return [(pair.source, pair.target) for pair in pairs]


def skipped(tally: Tally) -> dict[str, tuple[int, str]]:
    return {reason: (skip.count, skip.first) for reason, skip in tally.skipped.items()}


def known(pair: Pair) -> tuple[object, ...]:
    """A pair without where it stood."""
    return pair.source, pair.target, pair.origin.unit, pair.origin.details


# -- TMX ---------------------------------------------------------------------------------------------------------------

TMX = """<?xml version="1.0" encoding="utf-8"?>
<tmx version="1.4"><header srclang="de"/><body>
<tu tuid="u1" creationdate="20200101T000000Z" creationid="anna">
  <prop type="x-domain" xml:lang="en">law &amp; order</prop><note>two words</note>
  <tuv xml:lang="de-AT" changedate="20210101T000000Z"><prop type="x">y</prop>
    <seg>Ein <bpt i="1" type="bold">&lt;b&gt;</bpt>kleines<ept i="1">&lt;/b&gt;</ept> Haus<ph><sub>alt</sub></ph></seg>
  </tuv>
  <tuv xml:lang="en"><note>ours</note><seg>A <hi type="b">small</hi> house</seg></tuv>
</tu></body></tmx>
"""


def test_tmx_keeps_codes_notes_properties_dates_and_names(put: Put, tmp_path: Path) -> None:
    ((pair,), _) = read(put("a.tmx", TMX))
    assert (pair.source, pair.target, pair.origin.unit) == ("Ein kleines Haus", "A small house", "u1")
    assert pair.origin.details == Details(
        "TMX",
        (
            ("creationdate", "20200101T000000Z"),
            ("creationid", "anna"),
            ("prop@en:x-domain", "law & order"),
            ("note", "two words"),
        ),
        (("xml:lang", "de-AT"), ("changedate", "20210101T000000Z"), ("prop:x", "y")),
        (("note", "ours"),),
        'Ein <bpt i="1" type="bold">&lt;b&gt;</bpt>kleines<ept i="1">&lt;/b&gt;</ept> Haus<ph><sub>alt</sub></ph>',
        'A <hi type="b">small</hi> house',
    )
    write_pairs([pair], tmp_path / "b.tmx", "de", "en")
    assert list(map(known, read(tmp_path / "b.tmx")[0])) == [known(pair)]


def test_a_changed_pair_loses_its_codes_and_nothing_else(put: Put, tmp_path: Path) -> None:
    ((pair,), _) = read(put("a.tmx", TMX))
    write_pairs([Pair("Ein Haus", pair.target, pair.origin)], tmp_path / "b.tmx", "de", "en")
    ((again,), _) = read(tmp_path / "b.tmx")
    assert again.source == "Ein Haus"
    assert again.origin.details is not None
    assert again.origin.details.source_as_written is None
    assert again.origin.details.target_as_written == 'A <hi type="b">small</hi> house'


def test_others_read_our_tmx(tmp_path: Path) -> None:
    said = Details("TMX", (("note", "two words"),), target_as_written="a <ph>{0}</ph>house")
    pairs = [Pair("Haus & Hof", "a house", Origin("x", "u1", details=said)), Pair("Baum", "tree", Origin("x"))]
    write_pairs(pairs, tmp_path / "a.tmx", "de", "en")
    with (tmp_path / "a.tmx").open("rb") as file:
        theirs = their_tmx.tmxfile(file, sourcelanguage="de", targetlanguage="en").units
    assert [(unit.source, unit.target) for unit in theirs] == [("Haus & Hof", "a {0}house"), ("Baum", "tree")]
    assert (theirs[0].getid(), theirs[0].getnotes()) == ("u1", "two words")


@pytest.mark.parametrize("markup", ["<b/>Haus", "Haus</seg>", "<x:ph xmlns:x='y'/>Haus", "<ph a='&e;'/>Haus", "Hau"])
def test_markup_that_is_not_ours_is_never_written(tmp_path: Path, markup: str) -> None:
    pair = Pair("Haus", "house", Origin("x", details=Details("TMX", source_as_written=markup)))
    write_pairs([pair], tmp_path / "a.tmx", "de", "en")
    assert "<seg>Haus</seg>" in (tmp_path / "a.tmx").read_text()


# -- XLIFF -------------------------------------------------------------------------------------------------------------

XLIFF_1 = """<?xml version="1.0"?>
<xliff version="1.2" xmlns="urn:oasis:names:tc:xliff:document:1.2">
<file original="a.html" source-language="de" target-language="en-GB" datatype="html"><body>
<trans-unit id="1"><source>eins</source><target>one</target><note from="dev">n</note></trans-unit>
<group id="g"><group id="h">
<trans-unit id="2"><source>zwei <g id="1">x</g></source><target state="final">two <g id="1">x</g></target></trans-unit>
</group>
<trans-unit id="3" approved="yes"><source>drei</source><target state="new">three</target>
  <alt-trans><source>alt</source><target>other</target></alt-trans></trans-unit></group>
<trans-unit id="4"><source>vier</source><target state="needs-translation">four</target></trans-unit>
<trans-unit id="5" approved="no"><source>fünf</source><target>five</target></trans-unit>
<trans-unit id="6"><source>sechs</source></trans-unit>
<trans-unit id="7"><source>sieben</source><target> </target></trans-unit>
</body></file>
<file original="b.html" source-language="de" target-language="fr"><body>
<trans-unit id="1"><source>acht</source><target>huit</target></trans-unit></body></file>
</xliff>
"""
XLIFF_2 = """<?xml version="1.0"?>
<xliff version="2.0" xmlns="urn:oasis:names:tc:xliff:document:2.0" srcLang="de" trgLang="en">
<file id="f" original="a.txt"><group id="g"><unit id="u" name="title">
<notes><note category="c">mind it</note></notes>
<originalData><data id="d">&lt;br/&gt;</data></originalData>
<segment id="s1" state="final"><source>eins<ph id="1" dataRef="d"/></source><target>one</target></segment>
<ignorable><source> </source><target> </target></ignorable>
<segment id="s2" state="reviewed" subState="x:y"><source>zwei <pc id="2">x</pc></source><target>two</target></segment>
<segment id="s3"><source>drei</source><target>three</target></segment>
</unit></group>
<unit id="v"><segment state="translated"><source>vier<cp hex="0007"/></source><target>four</target></segment></unit>
</file></xliff>
"""


def test_xliff_1_gives_what_is_translated(put: Put) -> None:
    pairs, tally = read(put("a.xlf", XLIFF_1))
    assert texts(pairs) == [("eins", "one"), ("zwei x", "two x"), ("drei", "three")]
    assert pairs[0].origin == Origin("a.xlf", "1", 4, Details("XLIFF 1", (("file", "a.html"), ("note:dev", "n"))))
    assert pairs[1].origin.details == Details(
        "XLIFF 1",
        (("file", "a.html"), ("group", "g"), ("group", "h")),
        target=(("state", "final"),),
        source_as_written='zwei <g id="1">x</g>',
        target_as_written='two <g id="1">x</g>',
    )
    assert tally.read == 8
    assert skipped(tally) == {
        "state needs-translation": (1, "a.xlf:10"),
        "state not approved": (1, "a.xlf:11"),
        "not translated": (2, "a.xlf:12"),
        "no en segment": (1, "a.xlf:16"),
    }
    assert len(read(put("a.xlf", XLIFF_1), all_states=True)[0]) == 5
    assert texts(read(put("a.xlf", XLIFF_1), source="en", target="de")[0])[0] == ("one", "eins")


def test_xliff_2_gives_what_is_translated(put: Put) -> None:
    pairs, tally = read(put("a.xliff", XLIFF_2))
    assert texts(pairs) == [("eins", "one"), ("zwei x", "two")]
    place = (("file", "a.txt"), ("group", "g"), ("name", "title"), ("note:c", "mind it"), ("data:d", "<br/>"))
    assert [p.origin.unit for p in pairs] == ["u/s1", "u/s2"]
    assert pairs[1].origin.details == Details(
        "XLIFF 2",
        place,
        target=(("state", "reviewed"), ("subState", "x:y")),
        source_as_written='zwei <pc id="2">x</pc>',
    )
    assert skipped(tally) == {"state initial": (1, "a.xliff:9"), "control characters": (1, "a.xliff:11")}
    assert len(read(put("a.xliff", XLIFF_2), all_states=True)[0]) == 3


@pytest.mark.parametrize(("name", "content"), [("a.xlf", XLIFF_1), ("a.xliff", XLIFF_2)])
def test_xliff_comes_back(put: Put, tmp_path: Path, name: str, content: str) -> None:
    pairs, _ = read(put(name, content))
    assert write_pairs(pairs, tmp_path / f"again-{name}", "de", "en") == len(pairs)
    again, tally = read(tmp_path / f"again-{name}")
    assert list(map(known, again)) == list(map(known, pairs))
    assert tally.skipped == {}


def test_others_read_our_xliff(put: Put, tmp_path: Path) -> None:
    pairs, _ = read(put("a.xlf", XLIFF_1))
    write_pairs(pairs, tmp_path / "b.xlf", "de", "en")
    theirs = [unit for unit in their_xliff.xlifffile.parsefile(str(tmp_path / "b.xlf")).units if unit.source]
    assert [str(unit.target) for unit in theirs][::2] == ["one", "three"]
    assert theirs[0].getnotes() == "n"


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.xlf", "<tmx/>", r"a\.xlf: begins with <tmx>; is this an XLIFF file"),
        ("a.xlf", '<xliff version="3.0"/>', r"a\.xlf: XLIFF of version '3\.0'; 1\.x and 2\.x are read"),
        ("a.xlf", '<xliff version="1.2"/>', r"a\.xlf: no unit with text in it"),
        ("a.xlf", XLIFF_1.replace('"en-GB"', '"fr"'), r"a\.xlf: no unit has both de and en; .*: de → fr"),
        ("a.xlf", XLIFF_1[:700], r"a\.xlf:\d+: not well-formed XML \(the file is cut short"),
        (
            "a.xlf",
            XLIFF_1.replace("<xliff", '<!DOCTYPE x [<!ENTITY a "b">]>\n<xliff', 1),
            "declares the XML entity 'a'",
        ),
        ("a.po", 'msgid "a"\nmsgstr "b', r"a\.po:2: expected a line of a PO file"),
        ("a.po", 'msgid "a"\nmsgid "c"\n', r"a\.po:2: msgid comes twice in one entry"),
        ("a.po", 'msgid "a" "b"\nmsgstr ""\n', r"a\.po:1: a quote that does not close"),
        ("a.po", "hello\n", r"a\.po:1: expected a line of a PO file, read 'hello'"),
        ("a.po", 'msgid ""\nmsgstr ""\n"Language: fr\\n"\n', r"a\.po: its header says fr; ask for that"),
        ("a.po", 'msgid ""\nmsgstr "charset=utf-7"\n', r"a\.po: its header says charset 'utf-7', which is not read"),
        ("a.po", "# nothing\n", r"a\.po: no entry in it"),
        ("a.po", 'msgid "a"\n', r"a\.po: the file is cut short: its last entry has no msgstr"),
        ("a.mo", b"MO" * 40, r"a\.mo: does not begin as a MO file does"),
        ("a.mo", struct.pack("<7I", 0x950412DE, 0, 10**9, 28, 28, 0, 0), r"a\.mo: its tables do not fit into it"),
        ("a.csv", "one\ntwo\n", r"a\.csv:1: expected two columns, read 1"),
        ("a.csv", 'a,"b\n', r"a\.csv:1: not a row of CSV"),
        ("a.jsonl", "{}\n" * 120, r"a\.jsonl:1: no text of de and en, or source and target; is this a file of JSON"),
        ("a.jsonl", "[" * 100_000 + "\n", r"a\.jsonl:1: not a JSON object"),
    ],
)
def test_a_file_that_is_not_what_its_name_says(put: Put, name: str, content: str | bytes, said: str) -> None:
    with pytest.raises(InputError, match=said):
        read(put(name, content))


# -- gettext -----------------------------------------------------------------------------------------------------------

PO = r"""# Who
msgid ""
msgstr ""
"Content-Type: text/plain; charset=iso-8859-1\n"
"Language: en\n"
"Plural-Forms: nplurals=3; plural=n;\n"

# by hand
#. from code
#: a.c:1 b.c:2
#, c-format
msgctxt "menu"
msgid "Datei \"%s\"\n"
"öffnen"
msgstr "Open\n"
"file \"%s\""

#, fuzzy, c-format
msgid "unklar"
msgstr "clear"

msgid "%d Datei"
msgid_plural "%d Dateien"
msgstr[0] "%d file"
msgstr[1] "%d files"
msgstr[2] "%d files"
msgid "leer"
msgstr ""

#~ msgid "alt"
#~ msgstr "old"
"""


def test_po(put: Put, tmp_path: Path) -> None:
    path = put("a.po", PO.encode("iso-8859-1"))
    pairs, tally = read(path)
    assert texts(pairs) == [
        ('Datei "%s" öffnen', 'Open file "%s"'),
        ("%d Datei", "%d file"),
        ("%d Dateien", "%d files"),
    ]
    assert pairs[0].origin == Origin(
        "a.po",
        "menu",
        13,
        Details(
            "gettext",
            (("note", "by hand"), ("extracted", "from code"), ("reference", "a.c:1 b.c:2"), ("flag", "c-format")),
            source_as_written='Datei "%s"\nöffnen',
            target_as_written='Open\nfile "%s"',
        ),
    )
    assert skipped(tally) == {"fuzzy": (1, "a.po:19"), "not translated": (1, "a.po:27"), "obsolete": (1, "a.po:30")}
    assert tally.read == 5
    assert texts(read(path, all_states=True)[0])[-1] == ("alt", "old")
    assert texts(read(path, source="en", target="de")[0])[0] == ('Open file "%s"', 'Datei "%s" öffnen')

    write_pairs(pairs, tmp_path / "b.po", "de", "en")
    assert list(map(known, read(tmp_path / "b.po")[0])) == list(map(known, pairs))
    theirs = polib.pofile(str(tmp_path / "b.po"))
    assert theirs.metadata["Plural-Forms"] == "nplurals=3; plural=n;"
    assert theirs[0].msgid == 'Datei "%s"\nöffnen'
    assert theirs[1].msgstr_plural == {0: "%d file", 1: "%d files", 2: "%d files"}


def test_mo_gives_what_its_po_gives(put: Put, tmp_path: Path) -> None:
    catalogue = polib.pofile(str(put("a.po", PO.encode("iso-8859-1"))))
    catalogue.save_as_mofile(str(tmp_path / "a.mo"))
    pairs, _ = read(tmp_path / "a.mo")
    assert set(texts(pairs)) == set(texts(read(tmp_path / "a.po")[0]))
    assert {pair.origin.unit for pair in pairs} == {"menu", None}


# -- tables ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("separator", [",", ";", "\t", "|"])
def test_csv_finds_its_separator_and_says_so(put: Put, separator: str) -> None:
    rows = [["id", "EN", "note", "de-DE"], ["7", 'say "one"', "", "eins, zwei; drei"], ["8", "two\nlines", "n", "zwei"]]
    content = "\n".join(separator.join('"' + cell.replace('"', '""') + '"' for cell in row) for row in rows)
    pairs, tally = read(put("a.csv", content + "\n"))
    assert pairs == [
        Pair("eins, zwei; drei", 'say "one"', Origin("a.csv", "7", 2)),
        Pair("zwei", "two lines", Origin("a.csv", "8", 3, Details("table", (("note", "n"),)))),
    ]
    assert len(tally.remarks) == 1
    assert tally.remarks[0].startswith("a.csv: ")
    assert skipped(tally) == {"header": (1, "a.csv:1")}


def test_csv_without_a_header(put: Put) -> None:
    pairs, tally = read(put("a.csv.gz", gzip.compress(b'eins,one\n"zwei, drei","two, three"\nx\n')))
    assert texts(pairs) == [("eins", "one"), ("zwei, drei", "two, three")]
    assert skipped(tally) == {"not two columns": (1, "a.csv.gz:3")}
    assert tally.remarks == ["a.csv.gz: commas separate its columns"]


def test_json_lines(put: Put, tmp_path: Path) -> None:
    lines = [
        '{"source": "eins", "target": "one", "unit": "u", "score": 0.5, "who": "anna"}',
        '{"EN": "two", "de-DE": "zwei"}',
        "",
        "nonsense",
        '{"de": 3, "en": "three"}',
        '{"source": "\\ud800", "target": "x"}',
    ]
    pairs, tally = read(put("a.jsonl", "\n".join(lines)))
    assert pairs == [
        Pair("eins", "one", Origin("a.jsonl", "u", 1, Details("JSON", (("json:score", "0.5"), ("who", "anna"))))),
        Pair("zwei", "two", Origin("a.jsonl", None, 2)),
    ]
    assert skipped(tally) == {
        "not a JSON object": (2, "a.jsonl:4"),
        "no text of de and en, or source and target": (1, "a.jsonl:5"),
    }
    write_pairs(pairs, tmp_path / "b.jsonl", "de", "en")
    assert json.loads((tmp_path / "b.jsonl").read_text().splitlines()[0]) == json.loads(lines[0])


# -- what comes back ---------------------------------------------------------------------------------------------------

plain = st.text(st.characters(exclude_categories=("Cs", "Cc", "Cn", "Zl", "Zp")), min_size=1, max_size=12)
word = plain.map(lambda text: " ".join(text.split())).filter(bool)
facts = st.lists(st.tuples(st.sampled_from(["note", "prop:x", "creationid", "note@fr"]), plain), max_size=3).map(tuple)
tmx_details = st.builds(Details, st.just("TMX"), facts, facts, facts).filter(
    lambda d: (
        any((d.unit, d.source, d.target))
        and all([name for name, _ in f].count("creationid") < 2 for f in (d.unit, d.source, d.target))
    )
)
json_details = st.builds(
    lambda said: Details("JSON", tuple(said.items())), st.dictionaries(plain, plain, min_size=1, max_size=3)
)
xliff_details = st.builds(
    lambda file, groups, note: Details(
        "XLIFF 1", (("file", file), *(("group", g) for g in groups), *((("note", note),) if note else ()))
    ),
    word,
    st.lists(word, max_size=2),
    word | st.just(""),
)


def pairs_of(details: st.SearchStrategy[Details], unit: st.SearchStrategy[str | None]) -> st.SearchStrategy[list[Pair]]:
    origins = st.builds(Origin, st.just("x"), unit, st.none(), details)
    return st.lists(st.builds(Pair, word, word, origins), min_size=1, max_size=6)


@pytest.mark.parametrize(
    ("suffix", "details", "unit"),
    [
        (".tmx", st.none() | tmx_details, st.none() | word),
        (".jsonl", st.none() | tmx_details | json_details | xliff_details, st.none() | word),
        (".xlf", xliff_details, word),
        (".po", st.none(), st.none() | word),
        (".tsv.gz", st.none(), st.none()),
    ],
)
def test_what_a_format_can_carry_comes_back(suffix: str, details: object, unit: object) -> None:
    @given(pairs_of(details, unit))  # type: ignore[arg-type]  # strategies, by the table above
    @settings(deadline=None, max_examples=60)
    def holds(pairs: list[Pair]) -> None:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / f"a{suffix}"
            with Pairs.create(Path(folder) / "p") as record:  # through the record, as an export goes
                record.add(pairs, Tally())
                stored = [pair for _, pair in record.each("stored")]
            assert write_pairs(stored, path, "de", "en") == len(stored)
            again, tally = read(path)
            assert list(map(ordered, again)) == list(map(ordered, stored))
            assert set(tally.skipped) <= {"header"}

    holds()


def ordered(pair: Pair) -> tuple[object, ...]:
    """What is known of it; a format may put attributes before notes."""
    details = pair.origin.details
    if details is None or details.format != "TMX":
        return known(pair)
    return *known(pair)[:3], *(sorted(f) for f in (details.unit, details.source, details.target))


@pytest.mark.parametrize("suffix", [".tmx", ".xlf", ".xliff", ".po", ".tsv", ".jsonl"])
def test_every_format_goes_into_every_other(put: Put, tmp_path: Path, suffix: str) -> None:
    out, tally = tmp_path / f"out{suffix}", Tally()
    files = [put("a.tmx", TMX), put("a.xlf", XLIFF_1), put("a.xliff", XLIFF_2), put("a.po", PO.encode("iso-8859-1"))]
    files += [put("a.csv", "de,en\nx,y\n"), put("a.jsonl", '{"de": "z", "en": "zz", "k": [1]}\n')]
    assert convert(files, out, "de", "en", tally) == tally.kept == 11
    assert sorted(texts(read(out)[0])) == sorted(texts(read(*files)[0]))


def test_a_record_of_the_first_version_is_read_and_becomes_one_of_the_second(tmp_path: Path) -> None:
    import sqlite3

    pair = Pair("Haus", "house", Origin("a", "u", 1))
    with Pairs.create(tmp_path / "p") as record:
        record.add([pair], Tally())
    with sqlite3.connect(tmp_path / "p") as connection:
        connection.executescript("ALTER TABLE pairs DROP COLUMN details; PRAGMA user_version = 1;")
    connection.close()
    with Pairs.open(tmp_path / "p") as record:
        assert record.get([0]) == {0: pair}
    more = Pair("Baum", "tree", Origin("b", details=Details("TMX", (("note", "n"),))))
    with Pairs.open(tmp_path / "p", write=True) as record:
        record.add([more], Tally())
    with Pairs.open(tmp_path / "p") as record:
        assert list(record.each("stored")) == [(0, pair), (1, more)]


# -- folders and zips --------------------------------------------------------------------------------------------------


def test_a_folder_and_a_zip_of_it_give_the_same(put: Put, tmp_path: Path) -> None:
    put("tm/b/a.tmx", TMX)
    put("tm/a.tsv.gz", gzip.compress(b"eins\tone\n"))
    put("tm/train.de", "zwei\n")
    put("tm/train.en", "two\n")
    put("tm/train.fr", "deux\n")
    put("tm/read.me", "hello")
    with zipfile.ZipFile(tmp_path / "tm.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        for path in sorted((tmp_path / "tm").rglob("*")):
            archive.write(path, path.relative_to(tmp_path / "tm"))
    for given_path in (tmp_path / "tm", tmp_path / "tm.zip"):
        pairs, tally = read(given_path)
        assert [(p.source, p.origin.file) for p in pairs] == [
            ("eins", "a.tsv.gz"), ("Ein kleines Haus", "b/a.tmx"), ("zwei", "train.de"),
        ]  # fmt: skip
        assert skipped(tally) == {"files of another kind": (2, "read.me, train.fr")}


@pytest.mark.parametrize("name", ["../a.tsv", "/a.tsv", "x/../../a.tsv", "C:/a.tsv", "..\\a.tsv"])
def test_a_zip_that_points_outside_is_refused(tmp_path: Path, name: str) -> None:
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        archive.writestr(name, "eins\tone\n")
    with pytest.raises(InputError, match=r"a\.zip: has a file .*, which points outside; pack it again"):
        read(tmp_path / "a.zip")


def test_what_swells_beyond_all_measure_is_refused(tmp_path: Path) -> None:
    packing = zipfile.ZipFile(tmp_path / "a.zip", "w", zipfile.ZIP_DEFLATED)
    with packing as archive, archive.open("a.tsv", "w") as member:
        for _ in range(110):
            member.write(b"a\tb\n" * 250_000)
    with pytest.raises(InputError, match=r"a\.zip: unpacks to more than 200 times its size"):
        read(tmp_path / "a.zip")
    with gzip.open(tmp_path / "a.tmx.gz", "wb") as packed:
        packed.write(b"<tmx>")
        for _ in range(110):
            packed.write(b"\n" * 1_000_000)
    with pytest.raises(InputError, match=r"a\.tmx\.gz: unpacks to more than 200 times its size"):
        read(tmp_path / "a.tmx.gz")


def test_a_damaged_or_locked_zip_is_refused(put: Put, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"a\.zip: zip cannot unpack it .*; copy or pack it again"):
        read(put("a.zip", b"PK nonsense"))
    with zipfile.ZipFile(tmp_path / "b.zip", "w") as archive:
        archive.writestr("a.tsv", "eins\tone\n" * 1000)
    whole = bytearray((tmp_path / "b.zip").read_bytes())
    whole[100] ^= 1
    with pytest.raises(InputError, match=r"c\.zip/a\.tsv: zip cannot unpack it"):
        read(put("c.zip", bytes(whole)))
    with zipfile.ZipFile(tmp_path / "d.zip", "w") as archive:
        archive.writestr("a.docx", "x")
    with pytest.raises(InputError, match=r"d\.zip: no file in it that holds pairs"):
        read(tmp_path / "d.zip")


# -- cleaning ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cleaning", "kept", "reason"),
    [
        (Cleaning(identical=True), "abcdeg", "identical source and target"),
        (Cleaning(letterless=True), "abcdfg", "no letters"),
        (Cleaning(length_ratio=3), "abcefg", "one side more than 3 times as long as the other"),
        (Cleaning(near_duplicates=True), "acdefg", "near-duplicate"),
    ],
)
def test_cleaning_that_skips(put: Put, cleaning: Cleaning, kept: str, reason: str) -> None:
    rows = {
        "a": "Seite 1\tPage 1", "b": "seite 2!\tPAGE 2", "c": "cafe\u0301\tcafé", "d": f"kurz\t{'long ' * 20}",
        "e": "12\t12 %", "f": "Same\tSame", "g": "Haus\thouse",
    }  # fmt: skip
    pairs, tally = read(put("a.tsv", "\n".join(rows.values())), cleaning=cleaning)
    assert [pair.source for pair in pairs] == [row.split("\t")[0] for key, row in rows.items() if key in kept]
    assert set(tally.skipped) == {reason}
    assert tally.skipped[reason].first == f"a.tsv:{next(i for i, key in enumerate(rows, 1) if key not in kept)}"
    assert len(read(put("a.tsv", "\n".join(rows.values())))[0]) == 7  # by default all are kept


def test_cleaning_that_changes_is_counted_too(put: Put) -> None:
    path = put("a.tsv", "cafe\u0301\tx\nNUL\0\ty\nplain\tz\n")
    pairs, tally = read(path, cleaning=Cleaning(nfc=True, strip_controls=True))
    assert texts(pairs) == [("café", "x"), ("NUL", "y"), ("plain", "z")]
    assert tally.lines()[1:] == [
        "changed 1: Unicode normalised (NFC) (first: a.tsv:1)",
        "changed 1: control characters taken out (first: a.tsv:2)",
    ]
    assert texts(read(path)[0]) == [("cafe\u0301", "x"), ("plain", "z")]


def test_other_languages_are_skipped_and_short_texts_are_not_judged(put: Put) -> None:
    rows = [
        "Der schnelle braune Fuchs springt über den faulen Hund.\tThe quick brown fox jumps over the lazy dog.",
        "The quick brown fox jumps over the lazy dog.\tThe quick brown fox jumps over the lazy dog.",
        "Das ist ein Satz, der nicht übersetzt worden ist.\tDas ist ein Satz, der nicht übersetzt worden ist.",
        "Windows XP\tWindows XP",
    ]
    pairs, tally = read(put("a.tsv", "\n".join(rows)), cleaning=Cleaning(other_languages=True))
    assert [pair.origin.line for pair in pairs] == [1, 4]
    assert skipped(tally) == {"source is not in de": (1, "a.tsv:2"), "target is not in en": (1, "a.tsv:3")}
    with pytest.raises(InputError, match="py3langid does not know the language 'tlh'"):
        read(put("b.tsv", "a\tb\n"), source="tlh", cleaning=Cleaning(other_languages=True))


def test_a_file_is_never_written_over_while_it_is_read(put: Put) -> None:
    path = put("a.tsv", "eins\tone\n")
    with pytest.raises(InputError, match="would be written over while it is read"):
        convert([path], path, "de", "en", Tally())
    with pytest.raises(InputError, match=r"a\.docx: not a kind of file that is written"):
        convert([path], path.with_suffix(".docx"), "de", "en", Tally())
