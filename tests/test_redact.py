"""Masking text: what is found, what is left, and that no pattern takes for ever."""

from __future__ import annotations

import json
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aglite.redact import MARK, NAMED, Redactor

EMAILS = Redactor([NAMED["emails"]])
KEYS = Redactor([NAMED["api_keys"]])


def test_named_patterns() -> None:
    assert EMAILS.text("ask jane.doe+x@mail.example.org, or bob@host") == f"ask {MARK}, or bob@host"
    for key in (
        "sk-ant-api03-" + "Ab3_" * 8,
        "sk-proj-" + "x" * 24,
        "ghp_" + "A1" * 18,
        "hf_" + "q" * 30,
        "AKIA" + "Z" * 16,
        "aglite-" + "t" * 32,
    ):
        assert KEYS.text(f"key={key}!") == f"key={MARK}!"
    assert KEYS.text("Authorization: Bearer abcdef0123456789abcdef") == f"Authorization: {MARK}"
    assert KEYS.text("the task-list of skills, and a bearer of news") == "the task-list of skills, and a bearer of news"


def test_all_patterns_see_the_text_as_it_was() -> None:
    # one after the other, the first would break what the second looks for
    assert Redactor(["b", "abc"]).text("xabcx b") == f"x{MARK}x {MARK}"
    assert Redactor(["^a"]).text("aa") == f"{MARK}a"
    assert Redactor(["x*"]).text("ab") == "ab"


def test_escapes_in_json_hide_nothing() -> None:
    arguments = json.dumps({"to": "J\u00fcrgen", "n": [1, "jane\u0040x.org"]})
    assert "\\u00fc" in arguments
    masked = Redactor(["Jürgen", NAMED["emails"]]).text(arguments)
    assert json.loads(masked) == {"to": MARK, "n": [1, MARK]}
    broken = '{"to": "J\\u00fcrgen"'
    assert Redactor(["Jürgen"]).text(broken) == broken  # no JSON: its text is what it is


def test_what_is_nested_deeper_than_any_stack_is_masked_whole() -> None:
    hidden = '"' + json.dumps("J\u00fcrgen")[1:]
    assert Redactor(["Jürgen"]).text("[" * 5000 + hidden + "]" * 5000) == MARK
    assert Redactor(["Jürgen"]).text("[" * 600 + hidden + "]" * 600) == MARK
    assert Redactor(["Jürgen"]).text("[" * 20 + hidden + "]" * 20) == "[" * 20 + f'"{MARK}"' + "]" * 20


def test_half_a_character_is_no_obstacle() -> None:
    assert EMAILS.text("\ud83d a@b.org \udc00") == f"\ud83d {MARK} \udc00"
    assert EMAILS.data(b"\xff\xfe a@b.org \xc3") == b"\xff\xfe " + MARK.encode() + b" \xc3"
    assert MARK in Redactor([r"\C"]).text("é")


def test_structure_stays_and_what_was_said_goes() -> None:
    message = {
        "role": "assistant",
        "content": "user",
        "tool_calls": [{"id": "user", "type": "function", "function": {"name": "user", "arguments": '{"user": 1}'}}],
    }
    masked = Redactor(["user", "assistant"]).message(message)
    assert masked["role"] == "assistant" and masked["content"] == MARK
    call = masked["tool_calls"][0]
    assert (call["id"], call["function"]["name"]) == ("user", MARK)
    assert call["function"]["arguments"] == f'{{"{MARK}": 1}}'
    assert Redactor(["user"]).value({"user": ["user", 3, None]}) == {MARK: [MARK, 3, None]}
    assert message["content"] == "user"


def test_without_patterns_nothing_is_copied() -> None:
    value = {"a": ["b"]}
    nothing = Redactor([])
    assert not nothing and nothing.value(value) is value and nothing.message(value) is value


@pytest.mark.parametrize("pattern", ["(a", r"(?<=a)b", "a{2000}", r"\p{Nonsense}"])
def test_what_re2_does_not_take_is_refused(pattern: str) -> None:
    with pytest.raises(ValueError, match="not a pattern of RE2: "):
        Redactor([pattern])


def test_bad_patterns_end_in_time() -> None:
    begun = time.monotonic()
    assert Redactor([r"(a+)+$"]).text("a" * 200_000 + "b") == "a" * 200_000 + "b"
    # every match looks ahead to the end: what is not looked at in time is masked, never left
    masked = Redactor([r"a.*b|a"]).text("ac" * 500_000)
    assert masked.endswith(MARK) and "a" not in masked.replace(MARK, "")
    assert time.monotonic() - begun < 60


@settings(max_examples=60)
@given(st.text(), st.lists(st.sampled_from(["a", r"\w+", ".", "^.", "[0-9]{2}", "é", "x*y"])))
def test_masking_twice_is_masking_once_in_length(text: str, patterns: list[str]) -> None:
    redactor = Redactor(patterns)
    once = redactor.text(text)
    again = redactor.text(once)
    assert again.count(MARK) <= once.count(MARK) + 1 and len(again) <= len(once) + len(MARK)
    if "." in patterns:
        assert not once.replace(MARK, "").strip("\n\x85\u2028\u2029")
