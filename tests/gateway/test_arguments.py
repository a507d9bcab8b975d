"""Arguments of tool calls: what of them is passed on, what they are compared by."""

from __future__ import annotations

import json
import math

import jiter
import orjson
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from aglite.gateway.arguments import ObjectPrefix, canonical, read_arguments

JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
)
OBJECT = st.dictionaries(st.text(max_size=5), JSON, max_size=3)
WRITTEN = st.builds(
    lambda value, ascii, indent: json.dumps(value, ensure_ascii=ascii, indent=indent),
    OBJECT,
    st.booleans(),
    st.sampled_from([None, 1]),
)
ALMOST = st.text(alphabet='{}[]",:\\u d8c0123456789.-+eEtrufalsn\n', max_size=24).map(lambda text: '{"a":' + text)


def cut(text: str, cuts: list[int]) -> list[str]:
    pieces, at = [], 0
    for length in [*cuts, len(text) or 1]:
        pieces.append(text[at : at + length])
        at += length
    return pieces


def reads(text: str) -> bool:
    """Whether it is a JSON object, bare control characters in its strings forgiven."""
    try:
        value = json.loads(text, strict=False, parse_constant=finite, parse_float=finite)
        json.dumps(value, ensure_ascii=False).encode()
    except ValueError:
        return False
    return isinstance(value, dict)


def finite(text: str) -> float:
    if not math.isfinite(value := float(text)):
        raise ValueError(text)
    return value


@settings(max_examples=300)
@given(WRITTEN, st.lists(st.integers(1, 4), max_size=60))
@example('{"a": "\\ud83d\\ude00", "b": [1.5e3, -0, true]}', [1] * 60)
def test_json_passes_whole_and_every_beginning_of_it_can_be_read(text: str, cuts: list[int]) -> None:
    prefix, said = ObjectPrefix(), ""
    for piece in cut(text, cuts):
        said += prefix.feed(piece)
        assert text.startswith(said)
        if said:
            jiter.from_json(said.encode(), partial_mode=True)
    assert said == text and prefix.closed and not prefix.broken
    assert read_arguments(text) == orjson.loads(text)


@settings(max_examples=500)
@given(ALMOST | st.text(max_size=12), st.lists(st.integers(1, 3), max_size=20))
@example('{"a": 1e999}', [])
@example('{"a": "\\ud800"}', [1] * 20)
@example('{"a": "\n\t"}\n', [])
@example('{"a": [1, 2', [])
@example('{"a": Paris}', [7, 2])
@example('{"a":1} x', [])
def test_what_is_no_json_is_cut_where_it_stops_to_be(text: str, cuts: list[int]) -> None:
    prefix = ObjectPrefix()
    said = "".join(prefix.feed(piece) for piece in cut(text, cuts))
    assert prefix.closed == reads(text)
    if said:
        jiter.from_json(said.encode(), partial_mode=True)
    if reads(text):
        assert json.loads(said) == json.loads(text, strict=False)
        assert read_arguments(text) == orjson.loads(said)
    elif text.strip():
        assert read_arguments(text) is None


def test_nesting_that_clients_cannot_parse_is_cut() -> None:
    deep = '{"a":' * 150 + "1" + "}" * 150
    prefix = ObjectPrefix()
    said = prefix.feed(deep)
    assert said == '{"a":' * 100 and prefix.broken and prefix.feed("}") == ""
    assert read_arguments(deep) is None
    assert read_arguments(" ") == {}
    for depth in (300, 2000):
        assert canonical("[" * depth + "]" * depth) == "[" * depth + "]" * depth


@given(OBJECT)
def test_serialisations_of_one_object_are_equal(value: dict) -> None:
    assert canonical(json.dumps(value, indent=2)) == canonical(orjson.dumps(value).decode())


@pytest.mark.parametrize(
    ("sampled", "written"),
    [
        ('{"b": 5.0, "a": 1}', '{"a":1,"b":5}'),
        ('{"a": 1e3}', '{"a":1000}'),
        ('{"a": 9007199254740993}', '{"a":9007199254740992}'),
        ('{"a": 1E-7}', '{"a":1e-7}'),
        ('{"a": "\\u0041"}', '{"a":"A"}'),
        ("", "{}"),
        ('{"a": 1, "a": 2}', '{"a":2}'),
        ('{"a": "x\ny"}', '{"a":"x\\ny"}'),
    ],
)
def test_what_javascript_writes_back_is_equal(sampled: str, written: str) -> None:
    assert canonical(sampled) == canonical(written)


def test_what_differs_is_not_equal() -> None:
    texts = ['{"a":1}', '{"a":2}', '{"a":true}', '{"a":"1"}', '{"a":1.5}', '{"a":[1]}', "{a}", "{}"]
    assert len({canonical(text) for text in texts}) == len(texts)
