"""The laws of corpus.py first, then each format, each bad input, and the table of pairs."""

import gzip
import os
import re
import sqlite3
import subprocess
import sys
import tempfile
import tracemalloc
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from clknn.corpus import (
    LARGEST,
    LONGEST,
    Details,
    File,
    Origin,
    Pair,
    Pairs,
    Tally,
    fold,
    read_aligned,
    read_pairs,
    read_tmx,
    read_tsv,
    write_tmx,
)
from clknn.errors import DatastoreError, InputError

# What XML 1.0 can hold, tab, feeds and C1 controls included; DEL is legal there but not in a pair.
xml_text = st.text(
    st.characters(
        exclude_categories=("Cs",),
        exclude_characters=[*map(chr, (*range(9), 11, 12, *range(14, 32), 127, 0xFFFE, 0xFFFF))],
    ),
    max_size=40,
)
DOCTYPE = '<!DOCTYPE tmx SYSTEM "tmx14.dtd">\n'
# A small alphabet, so that duplicates, case variants and spacing variants are common.
near_text = st.text("aAbB ", min_size=1, max_size=3).filter(str.strip)


def normal(text: str) -> str:
    """Whitespace as the readers leave it, written without their regular expression."""
    kept = "\u00a0\u2007\u202f"
    return " ".join("".join(" " if c.isspace() and c not in kept else c for c in text).split(" ")).strip()


def squeeze(text: str) -> str:
    while "  " in text:
        text = text.replace("  ", " ")
    return text


def pair(source: str, target: str, line: int | None = None) -> Pair:
    return Pair(source, target, Origin("a.tsv", line=line))


def tmx(*units: str, head: str = "") -> bytes:
    body = "\n".join(units)
    return f'{head}<tmx version="1.4"><header/><body>\n{body}\n</body></tmx>'.encode()


def unit(source: str, target: str, source_tag: str = "de", target_tag: str = "en") -> str:
    return (
        f'<tu><tuv xml:lang="{source_tag}"><seg>{source}</seg></tuv>'
        f'<tuv xml:lang="{target_tag}"><seg>{target}</seg></tuv></tu>'
    )


def read(path: Path, source: str = "de", target: str = "en") -> tuple[list[Pair], Tally]:
    tally = Tally()
    return list(read_pairs([path], source, target, tally)), tally


def texts(pairs: list[Pair]) -> list[tuple[str, str]]:
    return [(p.source, p.target) for p in pairs]


@pytest.fixture
def put(tmp_path: Path) -> Callable[[str, bytes], Path]:
    def put_file(name: str, content: bytes) -> Path:
        path = tmp_path / name
        path.write_bytes(content)
        return path

    return put_file


@pytest.fixture
def table(tmp_path: Path) -> Iterator[Pairs]:
    with Pairs.create(tmp_path / "pairs.sqlite") as pairs:
        yield pairs


# ---------------------------------------------------------------------------------------------- laws


@given(st.lists(st.tuples(xml_text, xml_text)), st.sampled_from([".tmx", ".tmx.gz"]))
@settings(deadline=None)
def test_what_is_written_as_tmx_is_read_back(written: list[tuple[str, str]], suffix: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"a{suffix}"
        # One pair more, so that the file is never without content.
        pairs = [Pair(s, t, Origin("x", str(i))) for i, (s, t) in enumerate([*written, ("ein", "one")])]
        assert write_tmx(pairs, path, "de", "en") == len(pairs)
        found, tally = read(path)
        expected = [
            (squeeze(normal(p.source)), squeeze(normal(p.target)), p.origin.unit)
            for p in pairs
            if normal(p.source) and normal(p.target)
        ]
        assert [(p.source, p.target, p.origin.unit) for p in found] == expected
        assert tally.read == len(pairs)
        assert sum(skip.count for skip in tally.skipped.values()) == len(pairs) - len(expected)


@given(st.lists(st.tuples(near_text, near_text)), st.integers(0, 20))
@settings(deadline=None)
def test_a_pair_is_stored_once_and_two_targets_are_two_pairs(texts_in: list[tuple[str, str]], cut: int) -> None:
    pairs = [pair(s, t, line) for line, (s, t) in enumerate(texts_in)]
    with tempfile.TemporaryDirectory() as folder, Pairs.create(Path(folder) / "p") as table:
        tally = Tally()
        first, second = table.add(pairs[:cut], tally), table.add(pairs[cut:], tally)
        distinct = list(dict.fromkeys(texts_in))
        stored = list(table.each("stored"))
        assert [(p.source, p.target) for _, p in stored] == distinct
        assert [number for number, _ in stored] == list(range(len(distinct))) == [*first, *second]
        assert tally.kept == len(distinct)
        duplicates = tally.skipped["duplicate"].count if "duplicate" in tally.skipped else 0
        assert duplicates == len(texts_in) - len(distinct)


@given(
    st.lists(st.tuples(near_text, near_text), min_size=20, max_size=120),
    st.integers(0, 5),
    st.integers(0, 5),
    st.integers(0, 3),
)
@settings(deadline=None, max_examples=50)
def test_nothing_held_out_is_folded_like_anything_else(
    near: list[tuple[str, str]], tune: int, test: int, seed: int
) -> None:
    alone = [(f"s{i}", f"t{i}") for i in range(40)]
    with tempfile.TemporaryDirectory() as folder, Pairs.create(Path(folder) / "p") as table:
        table.add([pair(s, t) for s, t in near + alone], Tally())
        table.hold_out(tune, test, seed)
        everything = [p for role in ("stored", "tune", "test") for _, p in table.each(role)]
        assert len(everything) == table.count()
        held = [p for role in ("tune", "test") for _, p in table.each(role)]
        most = table.count() // 20
        assert table.count("tune") == min(tune, most)  # the 40 that stand alone are enough for both
        assert table.count("test") == min(test, most)
        for p in held:
            assert sum(fold(q.source) == fold(p.source) for q in everything) == 1
            assert sum(fold(q.target) == fold(p.target) for q in everything) == 1


@given(st.text())
@example("\u03d4\u0301")  # its case hides behind its compatibility form
def test_fold_is_idempotent_and_blind_to_spacing(text: str) -> None:
    assert fold(fold(text)) == fold(text)
    assert fold(f" \n{text}\u00a0\t") == fold(text)


@pytest.mark.parametrize(
    ("one", "other"),
    [("Straße", "STRASSE"), ("ﬁle  Ａ", "FILE A"), ("a\u00a0b", "A\n b"), ("é", "E\u0301"), ("ß\u0301", "SŚ")],
)
def test_fold_joins_case_compatibility_and_spacing(one: str, other: str) -> None:
    assert fold(one) == fold(other)


def test_fold_keeps_words_apart() -> None:
    assert len({fold(text) for text in ("ab", "a b", "a.b", "ba", "äb")}) == 5


# ---------------------------------------------------------------------------------------------- TMX


@pytest.mark.parametrize(
    ("segment", "text"),
    [
        ("plain", "plain"),
        ("  two\n\t lines  ", "two lines"),
        ("10\u00a0%", "10\u00a0%"),
        ('a <bpt i="1">&lt;b&gt;</bpt>bold<ept i="1">&lt;/b&gt;</ept> c', "a bold c"),
        ("a<ph>{0}<sub>alt text</sub></ph>b", "ab"),
        ('<it pos="begin">x</it>kept<ut>y</ut>', "kept"),
        ("a <hi>b <hi>c</hi> d</hi> e", "a b c d e"),
        ("a <unknown>b<ph>drop</ph>c</unknown> d", "a bc d"),
        ("a<!-- comment -->b<?pi x?>c", "abc"),
        ('Zeile<ph type="lb"/>Umbruch', "Zeile Umbruch"),
        ('Zeile <it pos="end" type="x-BR">x</it> Umbruch', "Zeile Umbruch"),
        ("Zeile<ph>&lt;br /&gt;</ph>Umbruch<ph>\\n</ph>hier", "Zeile Umbruch hier"),
        ("Wort<ph>&lt;b&gt;</ph>teil", "Wortteil"),
        ("<![CDATA[x < y]]> &amp; &#228;", "x < y & ä"),
    ],
)
def test_inline_codes_go_and_words_stay(put: Callable[[str, bytes], Path], segment: str, text: str) -> None:
    found, _ = read(put("a.tmx", tmx(unit(segment, "x"), unit("y", segment))))
    assert texts(found) == [(text, "x"), ("y", text)]


def test_origin_is_the_files_name_the_unit_and_its_line(put: Callable[[str, bytes], Path]) -> None:
    two = unit("zwei", "two").replace("<tu>", '<tu tuid="u7" changedate="x"\n>')
    found, _ = read(put("a.tmx", tmx(unit("eins", "one") + unit("null", "zero"), two)))
    assert [p.origin for p in found] == [
        Origin("a.tmx", None, 2),
        Origin("a.tmx", None, 2),
        Origin("a.tmx", "u7", 3, Details("TMX", (("changedate", "x"),))),  # the line where the start tag begins
    ]


def test_lines_are_exact_beyond_sixteen_bits(put: Callable[[str, bytes], Path]) -> None:
    filler, long_line = "\n" * 70_000, " " * 100_000
    later = unit("zwei", "two") + long_line + unit("drei", "three") + unit("vier", "four").replace("<tu>", "<tu>\n")
    found, _ = read(put("a.tmx", tmx(unit("eins", "one"), filler, later, unit("fünf", "five"))))
    assert [p.origin.line for p in found] == [2, 70_004, 70_004, 70_004, 70_006]


def test_a_file_may_be_larger_than_a_unit(put: Callable[[str, bytes], Path]) -> None:
    third = " " * (LARGEST // 3)
    found, _ = read(put("a.tmx", tmx(*[unit(f"{i}", f"{i}{third}") for i in range(4)])))
    assert [p.source for p in found] == ["0", "1", "2", "3"]


@pytest.mark.parametrize(
    ("asked", "tags", "taken"),
    [
        ("de", ["de-AT"], "de-AT"),
        ("de", ["de-AT", "de"], "de"),
        ("DE", ["de_CH"], "de_CH"),
        ("de_ch", ["de", "de-CH"], "de-CH"),
        ("de-CH", ["de-AT", "de"], "de"),
        ("zh-Hant-TW", ["zh", "zh-Hant"], "zh-Hant"),
        ("de", ["deu", "de-DE"], "de-DE"),
        ("de", ["de-AT", "de-DE"], "de-AT"),
        ("deu_Latn", ["de-AT", "de"], "de"),
        ("de", ["deu"], "deu"),
        ("zho_Hans", ["zh-TW", "zh-CN"], "zh-CN"),
        ("zho_Hans", ["zh-Hant", "zh"], "zh"),
        ("zho_Hant", ["zh-CN", "zh", "zh-HK"], "zh-HK"),
        ("zho_Hant", ["zh"], "zh"),
        ("zh_CN", ["zh-TW", "zh-Hans"], "zh-Hans"),
        ("zh", ["zh-TW", "zh-SG"], "zh-SG"),
        ("zh", ["zh-TW"], "zh-TW"),
        ("ja_XX", ["jpn"], "jpn"),
        ("ja_XX", ["ja-JP"], "ja-JP"),
        ("arb_Arab", ["ar-SA"], "ar-SA"),
        ("nob_Latn", ["nn-NO", "nb-NO"], "nb-NO"),
        ("pes_Arab", ["fa-IR"], "fa-IR"),
        ("sr-Latn", ["sr-RS", "sr"], "sr"),
        ("de", ["de_DE.UTF-8"], "de_DE.UTF-8"),
        ("english", ["English-UK"], "English-UK"),
    ],
)
def test_language_variants(put: Callable[[str, bytes], Path], asked: str, tags: list[str], taken: str) -> None:
    variants = "".join(f'<tuv xml:lang="{tag}"><seg>{tag}</seg></tuv>' for tag in tags)
    path = put("a.tmx", tmx(f'<tu>{variants}<tuv lang="EN-us"><seg>x</seg></tuv></tu>'))
    assert texts(read(path, source=asked)[0]) == [(taken, "x")]
    assert texts(read(path, source="en", target=asked)[0]) == [("x", taken)]
    assert texts(read(path, source=asked, target="eng_Latn")[0]) == [(taken, "x")]


def test_another_region_is_another_language(put: Callable[[str, bytes], Path]) -> None:
    path = put("a.tmx", tmx(unit("a", "b", "pt-PT"), unit("c", "d", "pt-PT")))
    with pytest.raises(InputError, match=r"a\.tmx: no unit has both pt-BR and en; .*pt-pt \(2 units\)"):
        read(path, source="pt-BR")


def test_another_script_is_another_language(put: Callable[[str, bytes], Path]) -> None:
    path = put("a.tmx", tmx(unit("a", "b", "zh-TW"), unit("c", "d", "zh-Hant")))
    with pytest.raises(InputError, match=r"a\.tmx: no unit has both zho_Hans and en_XX; .*zh-tw \(1 units\)"):
        read(path, source="zho_Hans", target="en_XX")


def test_one_segment_is_never_both_languages(put: Callable[[str, bytes], Path]) -> None:
    both = unit("Strasse", "Straße", "de-CH", "de")
    found, tally = read(put("a.tmx", tmx(both, unit("a", "b", "de-CH"), unit("a", "b", "de"))), "de", "de-CH")
    assert texts(found) == [("Straße", "Strasse")]
    assert {reason: skip.first for reason, skip in tally.skipped.items()} == {
        "no de segment": "a.tmx:3",
        "no de-CH segment": "a.tmx:4",
    }


def test_units_that_are_skipped_are_counted_by_reason(put: Callable[[str, bytes], Path]) -> None:
    units = [
        unit("gut", "good"),
        unit(" \n ", "x"),
        unit("", "x"),
        unit("x", "<ph>code</ph>"),
        unit("x", "y", "fr"),
        unit("x", "y", "de", "fr"),
        "<tu/>",
        '<tu><tuv xml:lang="de"/><tuv xml:lang="en"><seg>x</seg></tuv></tu>',
        unit("ä" * (LONGEST + 1), "x"),
        unit("ä" * LONGEST, "x"),
        unit("x", "\x7f"),
    ]
    found, tally = read(put("a.tmx", tmx(*units, head=DOCTYPE)))
    assert texts(found) == [("gut", "good"), ("ä" * LONGEST, "x")]
    assert tally.read == 11
    assert tally.kept == 0  # only the table counts what is kept
    assert {reason: (skip.count, skip.first) for reason, skip in tally.skipped.items()} == {
        "empty source": (3, "a.tmx:4"),
        "empty target": (1, "a.tmx:7"),
        "no de segment": (2, "a.tmx:8"),
        "no en segment": (1, "a.tmx:9"),
        "longer than 5000 characters": (1, "a.tmx:12"),
        "control characters": (1, "a.tmx:14"),
    }


def test_a_segment_of_a_million_characters_is_skipped(put: Callable[[str, bytes], Path]) -> None:
    found, tally = read(put("a.tmx", tmx(unit("a" * 1_000_000, "x"), unit("eins", "one"))))
    assert texts(found) == [("eins", "one")]
    assert tally.skipped["longer than 5000 characters"].first == "a.tmx:2"


@pytest.mark.parametrize("feeds", ["", "\n"])
def test_a_unit_that_is_too_large_is_skipped_and_named(put: Callable[[str, bytes], Path], feeds: str) -> None:
    large = unit("<ph/>" + f"{' ' * 99}{feeds}" * (LARGEST // 90), "x").replace("<tu>", '<tu tuid="u7">')
    found, tally = read(put("a.tmx", tmx(unit("eins", "one"), large, unit("zwei", "two"))))
    assert texts(found) == [("eins", "one"), ("zwei", "two")]
    assert tally.skipped["unit of more than 10,000,000 bytes"].first == "a.tmx:3"


@pytest.mark.parametrize(
    ("part", "reason"),
    [
        ("<ph/>", "longer than 5000 characters"),
        ("word ", "longer than 5000 characters"),
        ("</seg></tuv><tuv><seg>", "unit of more than 10,000,000 bytes"),
        ("</seg><prop>x</prop><seg>", "unit of more than 10,000,000 bytes"),
    ],
)
def test_a_unit_of_many_parts_is_skipped_in_little_memory(
    put: Callable[[str, bytes], Path], part: str, reason: str
) -> None:
    size = 9_000_000 if "longer" in reason else 12_000_000
    path = put("a.tmx", tmx(unit(part * (size // len(part)), "x"), unit("eins", "one")))
    tally = Tally()
    tracemalloc.start()
    found = list(read_pairs([path], "de", "en", tally))
    assert tracemalloc.get_traced_memory()[1] < 100_000_000
    tracemalloc.stop()
    assert texts(found) == [("eins", "one")]
    assert reason in tally.skipped


@pytest.mark.parametrize("tag", ['<tu x="@">', "<!--@-->", "<@/>"])
def test_a_tag_without_end_is_refused(put: Callable[[str, bytes], Path], tag: str) -> None:
    path = put("a.tmx", tmx(unit("eins", "one"), tag.replace("@", "x" * 3_000_000)))
    with pytest.raises(InputError, match=r"a\.tmx:3: a tag or comment of more than 1,000,000 bytes"):
        read(path)


def test_utf16_and_a_namespace_are_read(put: Callable[[str, bytes], Path]) -> None:
    text = '<?xml version="1.0" encoding="UTF-16"?>\n<tmx xmlns="http://www.lisa.org/tmx14"><body>\n%s</body></tmx>'
    path = put("a.TMX", (text % unit("Äpfel 你好", "apples")).encode("utf-16"))
    assert read(path)[0] == [Pair("Äpfel 你好", "apples", Origin("a.TMX", None, 3))]


def test_a_doctype_is_accepted_and_its_dtd_is_not_read(put: Callable[[str, bytes], Path]) -> None:
    put("tmx14.dtd", b'<!ENTITY nbsp "LOADED">')
    path = put("a.tmx", tmx(unit("eins", "one"), head=DOCTYPE))
    assert texts(read(path)[0]) == [("eins", "one")]


def bomb() -> str:
    levels = "".join(f'<!ENTITY l{i} "{f"&l{i - 1};" * 10}">' for i in range(1, 12))
    return f'<!DOCTYPE tmx [<!ENTITY l0 "boom">{levels}]>\n'


@pytest.mark.parametrize("units", [[unit("&l11;", "x")], [unit("eins", "one", "&l11;")], [unit("eins", "one")]])
def test_an_entity_bomb_is_refused(put: Callable[[str, bytes], Path], units: list[str]) -> None:
    tracemalloc.start()
    with pytest.raises(InputError, match=r"a\.tmx: declares the XML entity 'l0'.*remove"):
        read(put("a.tmx", tmx(*units, head=bomb())))
    assert tracemalloc.get_traced_memory()[1] < 1_000_000
    tracemalloc.stop()


@pytest.mark.parametrize(
    "declaration", ['<!ENTITY leak SYSTEM "{}">', '<!ENTITY % leak SYSTEM "{}"> %leak;', '<!ENTITY leak "x">']
)
def test_an_external_entity_is_refused_and_its_file_not_read(
    put: Callable[[str, bytes], Path], declaration: str
) -> None:
    # Were it read, it would be text of a pair, or, being broken as a DTD, another error than this one.
    secret = put("secret.txt", b"<!ENTITY % the password")
    head = f"<!DOCTYPE tmx [{declaration.format(secret.as_uri())}]>\n"
    with pytest.raises(InputError, match=r"a\.tmx: declares the XML entity 'leak'") as refused:
        read(put("a.tmx", tmx(unit("&leak;", "one"), unit("eins", "one"), head=head)))
    assert "password" not in str(refused.value)


UNDECLARED = r"a\.tmx:[23]: not well-formed XML \(Entity 'nbsp' not defined\); correct it"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (tmx(unit("eins", "one"))[:-20], r"a\.tmx:\d+: not well-formed XML .*export the file again"),
        (tmx(unit("eins", "one"))[:-6], r"a\.tmx:3: not well-formed XML \(the file is cut short: "),
        (b"eins\tone\n", r"a\.tmx:1: not well-formed XML \(.*\)"),
        (b"<tmx>\n<body>\n</tmx>", r"a\.tmx:3: not well-formed XML \(mismatched tag"),
        (tmx(unit("a\x01b", "x")), r"a\.tmx:2: not well-formed XML"),
        (
            tmx(unit("x", "y"), unit("Käse", "@")).replace(b"@", b"\xe4"),
            r"a\.tmx:3: not UTF-8 at byte 70 of the line \(0xe4\); save the file as UTF-8, or name its encoding",
        ),
        (
            tmx(unit("x", "@"), head='<?xml version="1.0" encoding="us-ascii"?>\n').replace(b"@", b"\xe4"),
            r"a\.tmx: not ascii, as it says it is, near line \d \(0xe4\); name its real encoding in the first line",
        ),
        (tmx(unit("<hi>" * 300 + "</hi>" * 300, "x")), r"a\.tmx:2: more than 256 elements inside each other"),
        (tmx("<tu><tuv><seg>a</seg></tuv></tu>"), r"no unit has both de and en; .*: no language \(1 units\)"),
        (tmx(unit("x&nbsp;y", "y")), UNDECLARED),
        (tmx(unit("x&nbsp;y", "y"), head=DOCTYPE), UNDECLARED),
        (tmx(unit("x&amp;\n&nbsp;\ny", "y"), head=DOCTYPE.strip()), r"a\.tmx:3: .*'nbsp' not defined"),
        (tmx(unit("x", "y", "&nbsp;")), UNDECLARED),
        (tmx(unit("x", "y")).replace(b"\n</body>", b"&nbsp;</body>"), UNDECLARED),
        (b"<xliff><file/></xliff>", r"a\.tmx: no translation unit \(<tu>\)"),
        (tmx(), r"a\.tmx: no translation unit \(<tu>\)"),
        (tmx("<tu/>"), r"a\.tmx: no unit has both de and en; .*: none"),
        (
            tmx(unit("a", "b", "fr", "en"), unit("a", "b", "de-AT", "fr"), unit("a", "b", "en", "fr")),
            r"no unit has both de and en; .* found: fr \(3 units\), en \(2 units\), de-at \(1 ",
        ),
    ],
)
def test_bad_tmx_is_refused(put: Callable[[str, bytes], Path], content: bytes, message: str) -> None:
    with pytest.raises(InputError, match=message):
        read(put("a.tmx", content))


def test_no_pair_has_lost_an_entity_before_the_file_is_refused(put: Callable[[str, bytes], Path]) -> None:
    path = put("a.tmx", tmx(unit("eins", "one"), unit("x&nbsp;y", "y"), head=DOCTYPE))
    found = []
    with pytest.raises(InputError, match="'nbsp' not defined"):
        found.extend(texts([p]) for p in read_tmx(File(path), "de", "en", Tally()))
    assert found == [[("eins", "one")]]


@pytest.mark.parametrize(("source", "target"), [("de", "DE"), ("", "en"), ("de", " "), ("de", "deu_Latn")])
def test_bad_languages_are_refused(put: Callable[[str, bytes], Path], source: str, target: str) -> None:
    path = put("a.tmx", tmx(unit("eins", "one")))
    with pytest.raises(InputError, match="language"):
        read_tmx(File(path), source, target, Tally())


MEASURE = """
import sys
from pathlib import Path
from clknn.corpus import File, Origin, Pair, Tally, read_tmx, write_tmx

path, units = Path(sys.argv[1]), int(sys.argv[2])
write_tmx((Pair(f"Satz {i}", f"Sentence {i}", Origin("x", str(i))) for i in range(units)), path, "de", "en")
tally = Tally()
for pair in read_tmx(File(path), "de", "en", tally):
    pass
status = Path("/proc/self/status")
if status.exists():  # the high-water mark of this process alone; ru_maxrss has that of its parent in it
    peak = int(status.read_text().split("VmHWM:")[1].split()[0]) * 1024
else:
    import resource
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
print(tally.read, pair.source, pair.origin.line, peak)
"""


def test_memory_does_not_grow_with_the_file(tmp_path: Path) -> None:
    def peak(units: int) -> int:
        # Another process, because the tree is libxml2's memory, which tracemalloc does not see.
        said = subprocess.run(
            [sys.executable, "-c", MEASURE, str(tmp_path / "a.tmx"), str(units)],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
            capture_output=True,
            text=True,
            check=True,
        ).stdout.split()
        assert said[:4] == [str(units), "Satz", str(units - 1), str(8 * units - 3)]
        return int(said[4])

    assert peak(40_000) < peak(100) + 8_000_000  # not freeing the units takes 60 MB more


def test_writing_is_whole_reproducible_and_plain_xml(tmp_path: Path) -> None:
    pairs = [Pair("a < b & c\r", 'say "x"', Origin("x", "1&2")), pair("zwei", "two")]
    for name in ("a.tmx", "b.tmx", "a.tmx.gz", "b.tmx.gz"):
        assert write_tmx(iter(pairs), tmp_path / name, "de", "en-GB", note="Licence: <MPL-2.0>") == 2
    assert (tmp_path / "a.tmx").read_bytes() == (tmp_path / "b.tmx").read_bytes()
    assert (tmp_path / "a.tmx.gz").read_bytes()[:8] == b"\x1f\x8b\x08" + bytes(5)  # no name, no date
    assert (tmp_path / "a.tmx.gz").read_bytes() == (tmp_path / "b.tmx.gz").read_bytes()
    text = gzip.decompress((tmp_path / "a.tmx.gz").read_bytes()).decode()
    assert text == (tmp_path / "a.tmx").read_bytes().decode()
    assert "<note>Licence: &lt;MPL-2.0&gt;</note>" in text
    assert '<tu tuid="1&amp;2">' in text
    assert '<tuv xml:lang="en-GB">' in text
    assert text.count("tuid") == 1
    assert not re.search(r"date|20\d\d", text)


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "a.tmx"
    path.write_text("old")
    with pytest.raises(InputError, match=r"a\.tsv:4: a control character"):
        write_tmx([pair("eins", "one"), pair("zwei\x00", "two", 4)], path, "de", "en")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]
    with pytest.raises(InputError, match=r"no/a\.tmx: the folder .*no does not exist"):
        write_tmx([], tmp_path / "no" / "a.tmx", "de", "en")


# ----------------------------------------------------------------------------- TSV and aligned text


@pytest.mark.parametrize("pack", [bytes, gzip.compress])
def test_tsv(put: Callable[[str, bytes], Path], pack: Callable[[bytes], bytes]) -> None:
    lines = [
        "\ufeffeins\tone",
        '"zwei"\t"two\u2028x"',
        "three columns\tare\tskipped",
        "\tno source",
        "kein Ziel\t ",
        "",
        f"{'x' * (LONGEST + 1)}\tx",
        "NUL\0\tx",
        "drei\x85\t three\r",
        "vier\tfour",
    ]
    name = "a.tsv" if pack is bytes else "a.tsv.gz"
    found, tally = read(put(name, pack("\n".join(lines).encode())))
    assert found == [
        Pair("eins", "one", Origin(name, None, 1)),
        Pair('"zwei"', '"two x"', Origin(name, None, 2)),
        Pair("drei", "three", Origin(name, None, 9)),
        Pair("vier", "four", Origin(name, None, 10)),
    ]
    assert tally.read == 10
    assert {reason: (skip.count, skip.first) for reason, skip in tally.skipped.items()} == {
        "not two columns": (2, f"{name}:3"),
        "empty source": (1, f"{name}:4"),
        "empty target": (1, f"{name}:5"),
        "longer than 5000 characters": (1, f"{name}:7"),
        "control characters": (1, f"{name}:8"),
    }


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"eins one\nzwei two\n", r"a\.tsv:1: expected source<TAB>target, read 1 column.*is this a TSV"),
        (b"a\tb\tc\n", r"a\.tsv:1: expected source<TAB>target, read 3 column"),
        (b"\n" + b"x\n" * 98 + b"x\n" + b"a\tb\n", r"a\.tsv:1: expected source<TAB>target, read 1 column"),
        (b"a\tb\nc\xfcd\tx\n", r"a\.tsv:2: not UTF-8 at byte 2 of the line \(0xfc\); save the file as UTF-8"),
        ("a\tb".encode("utf-16"), r"a\.tsv:1: not UTF-8 at byte 1 of the line \(0xff\)"),
        (b"a\tb\n" + b"x" * (LARGEST + 1), r"a\.tsv:2: a line of more than 10,000,000 bytes"),
    ],
)
def test_bad_tsv_is_refused(put: Callable[[str, bytes], Path], content: bytes, message: str) -> None:
    with pytest.raises(InputError, match=message):
        read(put("a.tsv", content))


@pytest.mark.parametrize(
    ("content", "kept", "skipped"),
    [
        (b"\neins\tone\n", 1, {"not two columns": (1, "a.tsv:1")}),
        (b"\n" * 99 + b"eins\tone\n", 1, {"not two columns": (99, "a.tsv:1")}),
        (b"Source\tTARGET \neins\tone\n", 1, {"header": (1, "a.tsv:1")}),
        (b"\nDE\ten\neins\tone\n", 1, {"not two columns": (1, "a.tsv:1"), "header": (1, "a.tsv:2")}),
        (b"eins\tone\nsource\ttarget\n", 2, {}),
        (b"en\tde\none\teins\n", 1, {"header": (1, "a.tsv:1")}),
    ],
)
def test_tsv_may_begin_with_blank_lines_and_a_header(
    put: Callable[[str, bytes], Path], content: bytes, kept: int, skipped: dict[str, tuple[int, str]]
) -> None:
    found, tally = read(put("a.tsv", content))
    assert len(found) == kept
    assert {reason: (skip.count, skip.first) for reason, skip in tally.skipped.items()} == skipped


def test_a_header_is_no_unit_to_be_strict_about(put: Callable[[str, bytes], Path]) -> None:
    assert len(list(read_tsv(File(put("a.tsv", b"source\ttarget\neins\tone\n")), Tally(strict=True)))) == 1


def test_aligned_text_is_split_at_line_feeds_only(put: Callable[[str, bytes], Path]) -> None:
    source = put("train.de", "\ufeffeins\u2028\r\nzwei\x85b\n\nvier".encode())
    target = put("train.en.gz", gzip.compress(b"one\ntwo\nthree\nfour\n"))
    tally = Tally()
    found = list(read_pairs([source, target], "de", "en", tally))
    assert found == [
        Pair("eins", "one", Origin("train.de", None, 1)),
        Pair("zwei b", "two", Origin("train.de", None, 2)),
        Pair("vier", "four", Origin("train.de", None, 4)),
    ]
    assert (tally.read, tally.skipped["empty source"].first) == (4, "train.de:3")


@pytest.mark.parametrize(("one", "other"), [(3, 5), (5, 3), (1, 2)])
def test_aligned_text_of_unequal_length_is_refused(put: Callable[[str, bytes], Path], one: int, other: int) -> None:
    source, target = put("a.de", b"x\n" * one), put("a.en", b"y\n" * other)
    with pytest.raises(InputError, match=rf"a\.de has {one} lines and .*a\.en has {other}; .*aligned"):
        list(read_aligned(File(source), File(target), Tally()))


def test_bad_utf8_in_aligned_text_names_its_own_file(put: Callable[[str, bytes], Path]) -> None:
    source, target = put("a.de", b"x\nx\n"), put("a.en", b"y\nab\xe4\n")
    with pytest.raises(InputError, match=r"a\.en:2: not UTF-8 at byte 3"):
        list(read_aligned(File(source), File(target), Tally()))


# ------------------------------------------------------------------------------ files and arguments


@pytest.mark.parametrize("name", ["a.tmx", "a.tsv", "a.tmx.gz", "a.tsv.gz"])
def test_missing_empty_and_folder_are_refused_before_iteration(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    with pytest.raises(InputError, match=rf"{re.escape(str(path))}: no such file; check the name"):
        read_pairs([path], "de", "en", Tally())
    path.write_bytes(gzip.compress(b"") if path.suffix == ".gz" else b"")
    with pytest.raises(InputError, match=rf"{re.escape(str(path))}: the file is empty; export it again"):
        read_pairs([path], "de", "en", Tally())
    path.unlink()
    path.mkdir()
    with pytest.raises(InputError, match=rf"{re.escape(str(path))}: no file in it that holds pairs; give"):
        list(read_pairs([path], "de", "en", Tally()))


@pytest.mark.parametrize("missing", [0, 1])
def test_a_missing_side_of_aligned_text_is_refused_before_iteration(
    put: Callable[[str, bytes], Path], tmp_path: Path, missing: int
) -> None:
    paths = [put("a.de", b"x\n"), put("a.en", b"y\n")]
    paths[missing] = tmp_path / "gone"
    with pytest.raises(InputError, match="gone: no such file"):
        read_pairs(paths, "de", "en", Tally())


def test_bad_gzip_is_refused(put: Callable[[str, bytes], Path]) -> None:
    with pytest.raises(InputError, match=r"a\.tsv\.gz: gzip cannot unpack it .*again"):
        read(put("a.tsv.gz", b"eins\tone\n"))
    whole = gzip.compress(tmx(*[unit(f"Satz {i}", f"Sentence {i * i}") for i in range(9_000)]))
    with pytest.raises(InputError, match=r"b\.tmx\.gz: gzip cannot unpack it"):
        read(put("b.tmx.gz", whole[: len(whole) // 2]))
    with pytest.raises(InputError, match=r"c\.tmx\.gz: gzip cannot unpack it"):  # the checksum at the end
        read(put("c.tmx.gz", whole[:-8] + bytes(4) + whole[-4:]))
    with pytest.raises(InputError, match=r"d\.tmx\.gz: gzip cannot unpack it"):  # no such kind of block
        read(put("d.tmx.gz", whole[:10] + b"\x07" + whole[11:]))


@pytest.mark.parametrize(
    ("names", "blamed"),
    [
        (["a.txt"], "a.txt: "),
        (["a.docx.gz"], "a.docx.gz: "),
        (["a"], "a: "),
        (["a.de", "b.tsv.gz"], "a.de: is read with one other text"),
        ([], "0 files given"),
        (["a.de", "a.en", "a.fr"], "a.de: is read with one other text"),
    ],
)
def test_other_files_are_refused_with_what_is_accepted(names: list[str], blamed: str) -> None:
    with pytest.raises(InputError, match=rf"^{blamed}.*give \.tmx, .* or two line-aligned texts"):
        read_pairs([Path(name) for name in names], "de", "en", Tally())


def test_strict_refuses_what_would_be_skipped(put: Callable[[str, bytes], Path]) -> None:
    path = put("a.tsv", b"eins\tone\nzwei\t\n")
    with pytest.raises(InputError, match=r"a\.tsv:2: empty target; correct it"):
        list(read_tsv(File(path), Tally(strict=True)))


def test_a_tally_says_what_happened() -> None:
    tally = Tally(read=1000, kept=998)
    tally.skip("empty source", "a.tmx:12")
    tally.skip("empty source", "a.tmx:99")
    tally.skip("duplicate", "a.tmx:14")
    assert tally.lines() == [
        "read 1,000 units, kept 998",
        "skipped 2: empty source (first: a.tmx:12)",
        "skipped 1: duplicate (first: a.tmx:14)",
    ]


@pytest.mark.parametrize(
    ("origin", "text"),
    [(Origin("a", "u", 3), "a:3"), (Origin("a", "u"), "a, unit u"), (Origin("a"), "a")],
)
def test_an_origin_reads_like_a_place(origin: Origin, text: str) -> None:
    assert str(origin) == text


# ------------------------------------------------------------------------------------ the table


def test_pairs_come_back_whole(table: Pairs, tmp_path: Path) -> None:
    pairs = [
        Pair(f"Satz {i}", f"x\u00a0{i}", Origin("a.tmx", f"u{i}" if i % 2 else None, i or None)) for i in range(1201)
    ]
    assert table.add(iter(pairs), Tally()) == range(1201)
    assert list(table.each("stored")) == list(enumerate(pairs))
    assert list(table.each("stored", after=1198)) == [(1199, pairs[1199]), (1200, pairs[1200])]
    assert list(table.each("stored", after=1200)) == list(table.each("test")) == []
    assert table.get(range(1100, 5000)) == {i: pairs[i] for i in range(1100, 1201)}
    assert table.get([7, 3, 7]) == {3: pairs[3], 7: pairs[7]}
    assert (table.count(), table.count("stored"), table.count("tune"), table.next_id) == (1201, 1201, 0, 1201)
    table.close()
    with Pairs.open(tmp_path / "pairs.sqlite") as again:
        assert list(again.each("stored")) == list(enumerate(pairs))


def test_a_duplicate_is_counted_with_its_place(table: Pairs) -> None:
    tally = Tally()
    table.add([pair("a", "b", 1), pair("a", "b", 2), pair("a", "c", 3), pair("A", "b", 4)], tally)
    assert table.add([pair("a", "b", 5)], tally) == range(3, 3)
    assert (tally.kept, tally.skipped["duplicate"].count, tally.skipped["duplicate"].first) == (
        3,
        2,
        "a.tsv:2",
    )
    # Where one text ends and the next begins is part of what is compared.
    assert table.add([pair("ab", "c"), pair("a", "bc")], tally) == range(3, 5)


def test_adding_is_all_or_nothing(table: Pairs, put: Callable[[str, bytes], Path]) -> None:
    table.add([pair("a", "b")], Tally())
    tally = Tally()
    with pytest.raises(InputError, match="aligned"):
        table.add(read_aligned(File(put("a.de", b"x\ny\n")), File(put("a.en", b"x\n")), tally), tally)
    assert (table.count(), table.next_id, tally.kept) == (1, 1, 0)
    with pytest.raises(InputError, match="duplicate"):
        table.add([pair("c", "d"), pair("a", "b")], Tally(strict=True))
    assert (table.count(), table.next_id) == (1, 1)
    assert table.add([pair("c", "d")], Tally()) == range(1, 2)


def test_an_id_is_never_used_again(table: Pairs) -> None:
    table.add([pair(f"s{i}", "t") for i in range(1500)], Tally())
    assert table.remove(range(1, 1600)) == 1499
    assert [number for number, _ in table.each("stored")] == [0]
    assert table.add([pair("s1499", "t"), pair("new", "t")], Tally()) == range(1500, 1502)
    assert table.remove([]) == 0
    assert table.next_id == 1502


def test_holding_out_depends_on_seed_and_pairs_only(tmp_path: Path) -> None:
    pairs = [pair(f"Satz {i}", f"sentence {i}") for i in range(400)]

    def held(name: str, seed: int, order: list[Pair]) -> dict[str, set[str]]:
        with Pairs.create(tmp_path / name) as table:
            table.add(order, Tally())
            table.hold_out(15, 10, seed + 1)
            table.hold_out(15, 10, seed)  # the second choice replaces the first
            assert (table.count("stored"), table.count("tune"), table.count("test")) == (375, 15, 10)
            return {role: {p.source for _, p in table.each(role)} for role in ("tune", "test")}

    one = held("one", 1, pairs)
    assert held("two", 1, [replace(p, origin=Origin("b")) for p in reversed(pairs)]) == one
    assert held("three", 2, pairs) != one
    # Random in place: not the first ones, and from both halves.
    assert {int(s.split()[1]) < 200 for s in one["tune"]} == {True, False}


@pytest.mark.parametrize(("pairs", "each"), [(0, 0), (19, 0), (20, 1), (39, 1), (100, 5)])
def test_small_tables_stay_whole(table: Pairs, pairs: int, each: int) -> None:
    table.add([pair(f"s{i}", f"t{i}") for i in range(pairs)], Tally())
    table.hold_out(1000, 1000, 0)
    assert (table.count("tune"), table.count("test")) == (each, each)


def test_too_few_candidates_are_shared(table: Pairs) -> None:
    table.add([pair(f"s{i}", "the same target") for i in range(196)], Tally())
    table.add([pair(f"u{i}", f"t{i}") for i in range(4)], Tally())
    table.hold_out(10, 10, 0)
    assert (table.count("tune"), table.count("test")) == (2, 2)
    assert {p.source[0] for role in ("tune", "test") for _, p in table.each(role)} == {"u"}
    table.hold_out(0, 3, 0)
    assert (table.count("tune"), table.count("test")) == (0, 3)
    with pytest.raises(InputError, match="at least 0"):
        table.hold_out(-1, 3, 0)


def test_a_tuning_pair_whose_source_or_target_is_among_the_others_is_left_out_and_counted(table: Pairs) -> None:
    table.add([pair(f"s{i}", f"t{i}") for i in range(40)], Tally())
    table.hold_out(0, 1, 0)
    ((_, tested),) = table.each("test")
    new, tally = pair("neu", "new", 1), Tally()
    alike = [
        pair("s0", "t0", 2), pair(" S1", "other", 3), pair("andere", "T2 ", 4), pair("s3", "t4", 5),
        pair(tested.source, "other", 6),
    ]  # fmt: skip
    sides = pair("t5", "s5", 7)  # a source is not compared with targets
    assert table.add([new, *alike, sides, new], tally, "tune") == range(40, 42)
    assert [p for _, p in table.each("tune")] == [new, sides]
    assert (table.count("stored"), table.count("test")) == (39, 1)
    assert {reason: (skip.count, skip.first) for reason, skip in tally.skipped.items()} == {
        "tuning pair whose source or target is in the translation memory too": (5, "a.tsv:2"),
        "duplicate": (1, "a.tsv:1"),
    }
    assert tally.kept == 2
    with pytest.raises(InputError, match=r"a\.tsv:3: tuning pair whose source or target is in the translation"):
        table.add([pair("x", "y", 1), alike[1]], Tally(strict=True), "tune")
    assert table.count("tune") == 2


def hold_out_two(table: Pairs) -> tuple[tuple[int, Pair], tuple[int, Pair]]:
    """The tuning pair and the test pair of forty."""
    table.add([pair(f"s{i}", f"t{i}", i + 1) for i in range(40)], Tally())
    table.hold_out(1, 1, 0)
    (tune,), (test,) = table.each("tune"), table.each("test")
    return tune, test


def test_a_held_out_pair_that_is_added_is_stored_from_then_on(table: Pairs) -> None:
    (tune, first), (test, second) = hold_out_two(table)
    tally = Tally()
    asked = [replace(p, origin=Origin("new.tsv")) for p in (second, first)]
    assert table.add([*asked, pair("s", "t"), *asked], tally) == range(40, 43)
    assert list(table.each("stored", after=39)) == [(40, second), (41, first), (42, pair("s", "t"))]
    assert (table.count("tune"), table.count("test"), table.count()) == (0, 0, 41)
    assert table.get([tune, test]) == {}  # an id is of one set of entries, and these had none
    assert (tally.kept, tally.skipped["duplicate"].count) == (3, 2)


def test_a_held_out_pair_like_one_that_is_added_is_stored_too(table: Pairs) -> None:
    (_, first), (_, second) = hold_out_two(table)
    tally, new = Tally(), [pair(f" {first.source.upper()} ", "other"), pair("a", "b"), pair("andere", second.target)]
    assert table.add(new, tally) == range(40, 45)
    assert [p for _, p in table.each("stored", after=39)] == [first, *new[:2], second, new[2]]
    assert (table.count("tune"), table.count("test"), table.count()) == (0, 0, 43)
    assert (tally.kept, tally.skipped) == (3, {})


def test_a_tuning_pair_from_elsewhere_like_one_that_is_added_is_forgotten(table: Pairs) -> None:
    """It was never in the memory, and is not to be."""
    table.add([pair(f"s{i}", f"t{i}") for i in range(40)], Tally())
    table.hold_out(0, 1, 0)
    ((_, tested),) = table.each("test")
    table.add([pair(f"u{i}", f"v{i}", i) for i in range(4)], Tally(), "tune")
    new = [pair("u0", "v0"), pair("U1", "other"), pair("andere", "V2"), pair("S", tested.target)]
    assert table.add(new, Tally(), tuned_apart=True) == range(44, 49)
    assert [p for _, p in table.each("stored", after=43)] == [*new[:3], tested, new[3]]
    assert [p for _, p in table.each("tune")] == [pair("u3", "v3", 3)]
    assert table.count("test") == 0


@given(
    st.lists(st.tuples(near_text, near_text), max_size=60),
    st.lists(st.tuples(near_text, near_text), max_size=60),
    st.integers(0, 3),
)
@settings(deadline=None, max_examples=50)
def test_nothing_held_out_is_like_a_stored_pair_whatever_is_added(
    before: list[tuple[str, str]], after: list[tuple[str, str]], seed: int
) -> None:
    alone = [(f"s{i}", f"t{i}") for i in range(20)]
    after = [*after, *alone[:2]]
    with tempfile.TemporaryDirectory() as folder, Pairs.create(Path(folder) / "p") as table:
        table.add([pair(s, t) for s, t in before + alone], Tally())
        table.hold_out(5, 5, seed)
        ids = table.add([pair(s, t) for s, t in after], Tally())
        by_role = {role: [p for _, p in table.each(role)] for role in ("stored", "tune", "test")}
        everything = [p for pairs in by_role.values() for p in pairs]
        assert len(everything) == table.count()
        assert sorted(texts(everything)) == sorted({*before, *alone, *after})  # each once, as if added at once
        assert {number for number, _ in table.each("stored") if number in ids} == set(ids)
        for p in by_role["tune"] + by_role["test"]:
            assert not {fold(q.source) for q in by_role["stored"]} & {fold(p.source)}
            assert not {fold(q.target) for q in by_role["stored"]} & {fold(p.target)}


def test_what_is_known_has_a_stored_source_or_target(table: Pairs) -> None:
    table.add([pair("Haus", "house"), pair("Baum", "tree")], Tally())
    table.add([pair("Hund", "dog")], Tally(), "test")
    assert table.known([("HAUS", "x"), ("x", " tree"), ("Hund", "dog"), ("x", "y"), ("haus", "tree")]) == 3
    assert table.known([]) == 0


def test_rows_may_change_while_they_are_read(table: Pairs) -> None:
    table.add([pair(f"s{i}", "t") for i in range(1200)], Tally())
    seen = []
    for number, _ in table.each("stored"):
        seen.append(number)
        table.remove([number])
    assert seen == list(range(1200))
    assert table.count() == 0


def test_open_refuses_what_is_not_a_table(tmp_path: Path) -> None:
    path = tmp_path / "p #1?.sqlite"
    with pytest.raises(DatastoreError, match=r"p #1\?\.sqlite: missing; .*build it again"):
        Pairs.open(path)
    assert not path.exists()
    path.write_text("not a database, and long enough to be looked at as one" * 10)
    with pytest.raises(DatastoreError, match=r"p #1\?\.sqlite: SQLite .*not a database.*build"):
        Pairs.open(path)
    path.write_bytes(b"")
    with pytest.raises(DatastoreError, match="not a file of pairs made by clknn"):
        Pairs.open(path)
    with pytest.raises(DatastoreError, match="already exists"):
        Pairs.create(path)
    path.unlink()
    Pairs.create(path).close()
    with sqlite3.connect(path) as connection:
        connection.execute("PRAGMA user_version = 3")
    connection.close()
    with pytest.raises(DatastoreError, match="format version 3, this clknn reads version 2"):
        Pairs.open(path)
    with pytest.raises(DatastoreError, match=r"the folder .* does not exist"):
        Pairs.create(tmp_path / "no" / "p")


def test_a_table_that_goes_while_it_is_opened_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "is_file", lambda _: True)
    with pytest.raises(DatastoreError, match=r"gone: cannot be opened \(unable to open database file\)"):
        Pairs.open(tmp_path / "gone")


def test_open_is_for_reading_unless_asked(tmp_path: Path) -> None:
    path = tmp_path / "p"
    Pairs.create(path).close()
    with Pairs.open(path) as table, pytest.raises(sqlite3.OperationalError, match="readonly"):
        table.add([pair("a", "b")], Tally())
    with Pairs.open(path, write=True) as table:
        assert table.add([pair("a", "b")], Tally()) == range(1)
    with Pairs.open(path) as table:
        assert table.count() == 1
