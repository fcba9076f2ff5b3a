"""The reader of YAML: words of YAML 1.2, places, and what is refused."""

from pathlib import Path

import pytest
import yaml
from hypothesis import example, given
from hypothesis import strategies as st

from opencda_marl.config_yaml import Document, dump_scalar, parse, parse_value, read
from opencda_marl.core.errors import ConfigError

FILE = Path("/somewhere/p.yaml")


def test_words_of_yaml_1_2() -> None:
    text = """
a: yes
b: 1e-3
c: 010
d: true
e:
f: 0x1F
g: on
h: 1_000
i: 12:30:45
j: 2020-01-01
k: ~
l: 5.
m: +3
n: "5"
o: 0o17
p: -.5
"""
    assert parse(text, FILE).values == {
        "a": "yes",
        "b": 0.001,
        "c": 10,
        "d": True,
        "e": None,
        "f": 31,
        "g": "on",
        "h": "1_000",
        "i": "12:30:45",
        "j": "2020-01-01",
        "k": None,
        "l": 5.0,
        "m": 3,
        "n": "5",
        "o": 15,
        "p": -0.5,
    }


def test_infinity_and_nan_are_numbers_for_the_bounds_to_refuse() -> None:
    values = parse("a: .inf\nb: -.INF\nc: .nan", FILE).values
    assert values["a"] == float("inf")
    assert values["b"] == float("-inf")
    assert values["c"] != values["c"]


def test_every_key_has_its_line() -> None:
    found = parse("# first\na:\n  b: 1\n\n  c: {d: 2,\n      e: 3}\n", FILE)
    lines = {".".join(keys): source.line for keys, source in found.sources.items()}
    assert lines == {"a": 2, "a.b": 3, "a.c": 5, "a.c.d": 5, "a.c.e": 6}
    assert str(found.sources[("a", "b")]) == "/somewhere/p.yaml:3"


def test_merge_keys_take_values_and_places_of_the_anchor() -> None:
    text = "x: &common\n  a: 1\n  b: 2\ny:\n  b: 3\n  <<: *common\n"
    found = parse(text, FILE)
    assert found.values["y"] == {"a": 1, "b": 3}
    assert found.sources[("y", "a")].line == 2
    assert found.sources[("y", "b")].line == 5


def test_the_first_of_several_merged_blocks_wins() -> None:
    found = parse("p: &p {a: 1}\nq: &q {a: 2, b: 2}\nr:\n  <<: [*p, *q]\n", FILE)
    assert found.values["r"] == {"a": 1, "b": 2}


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        ("a: 1\nb: 2\na: 3", 3, "'a' stands twice (first in line 1)"),
        ("a:\n  b: 1\n  b: 1", 3, "'b' stands twice"),
        ("a: 1\n\tb: 2", 2, "not valid YAML"),
        ("a: 1\nb: [1, 2\nc: 3", 3, "not valid YAML"),
        ('a: "x', 1, "not valid YAML"),
        ("a: 1\n---\nb: 2", 2, "not valid YAML"),
        ("a: !!python/object/apply:os.system [x]", 1, "tag"),
        ("a: !env HOME", 1, "tag"),
        ("a: 1\nb: ${HOME}/x", 2, "${HOME}/x"),
        ("${a}: 1", 1, "not filled in"),
        ("a: 1\n5: 2", 2, "the key '5' is not text"),
        ("a: 1\ntrue: 2", 2, "the key 'true' is not text"),
        ("? [a]\n: 1", 1, "is not text"),
        ("a: &a [*a]", 1, "contains itself"),
        ("a: &a {b: *a}", 1, "contains itself"),
        ("a: 1\nb: *nowhere", 2, "not valid YAML"),
        ("a: {<<: 5}", 1, "'<<'"),
        ("- 1\n- 2", 1, "a list, not a block of settings"),
        ("just text", 1, "not a block of settings"),
        ("", 1, "empty"),
        ("# a comment\n", 1, "empty"),
        ("~", 1, "empty"),
        ("a: 1\nb: x\0y", 2, "not text"),
        ("a: " + "9" * 5000, 1, "is not a number"),
    ],
)
def test_refused_with_file_and_line(text: str, line: int, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(text, FILE)
    assert caught.value.message.startswith(f"/somewhere/p.yaml:{line}: ")
    assert words in caught.value.message
    assert caught.value.fix


def test_tabs_are_named() -> None:
    with pytest.raises(ConfigError) as caught:
        parse("a:\n\tb: 1", FILE)
    assert caught.value.fix == "indent with spaces, not with tabs"


@pytest.mark.parametrize(
    "text",
    [
        "a: " + "[" * 5000,
        "a: [" + "1," * 25_000 + "]",
        # aliases of aliases: 9^11 values from 300 bytes
        "a0: &a0 [x]\n" + "".join(f"a{i}: &a{i} [{','.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 12)),
        "a: " + "{b: " * 30 + "1" + "}" * 30,
    ],
    ids=["deep", "long", "exponential", "blocks"],
)
def test_what_would_explode_is_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        parse(text, FILE)


def test_unreadable_files(tmp_path: Path) -> None:
    cases: dict[str, bytes] = {
        "latin": b"a: 1\nb: caf\xe9\n",
        "huge": b"# x\n" * 100_000,
        "utf16": "a: 1".encode("utf-16"),
    }
    for name, raw in cases.items():
        file = tmp_path / f"{name}.yaml"
        file.write_bytes(raw)
        with pytest.raises(ConfigError) as caught:
            read(file)
        assert str(file) in caught.value.message
    with pytest.raises(ConfigError, match=r"latin\.yaml:2: not UTF-8"):
        read(tmp_path / "latin.yaml")
    with pytest.raises(ConfigError, match="is not a file"):
        read(tmp_path)
    with pytest.raises(ConfigError, match="is not a file"):
        read(tmp_path / "missing.yaml")


def test_byte_order_mark_and_windows_lines(tmp_path: Path) -> None:
    file = tmp_path / "p.yaml"
    file.write_bytes("a: é\r\nb:\r\n  c: 1\r\n".encode("utf-8-sig"))
    found = read(file)
    assert found.values == {"a": "é", "b": {"c": 1}}
    assert found.sources[("b", "c")].line == 3


def test_arguments_are_scalars_or_lists() -> None:
    assert parse_value("[1, 2.5]", "k=[1, 2.5]") == [1, 2.5]
    assert parse_value("1e-3", "k=1e-3") == 0.001
    assert parse_value("null", "k=null") is None
    assert parse_value("'5'", "k='5'") == "5"
    for text in ("", "  ", "{a: 1}", "a: 1", "[1", "${x}", "!!int 5 5"):
        with pytest.raises(ConfigError, match="argument 'k="):
            parse_value(text, f"k={text}")


_values = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(-(10**30), 10**30),
        st.floats(allow_nan=False, allow_infinity=False),
        st.text(st.characters(codec="utf-8", exclude_categories=["Cs"])).filter(
            lambda text: "${" not in text and "\0" not in text
        ),
        st.sampled_from(["yes", "true", "null", "~", "1e5", "0o7", "<<", "", " x", "a: b", "# x", "-", "[", "'", "\\"]),
    ),
    lambda inner: st.lists(inner, max_size=4),
    max_leaves=8,
)


@given(_values)
def test_what_is_written_reads_back(value: object) -> None:
    text = dump_scalar(value)
    assert "\n" not in text
    again = parse_value(text, "k=")
    assert again == value
    assert type(again) is type(value)


@given(_values)
def test_what_is_written_reads_back_inside_a_file(value: object) -> None:
    assert parse(f"k: {dump_scalar(value)}\n", FILE).values == {"k": value}


def test_document_is_plain_data() -> None:
    assert Document({"a": 1}).sources == {}


@given(value=st.floats(allow_nan=False, allow_infinity=False))
@example(value=3e-5)
@example(value=1e22)
def test_numbers_are_numbers_to_readers_of_older_yaml(value: float) -> None:
    found = yaml.safe_load(dump_scalar(value))
    assert isinstance(found, float)
    assert found == value
