import textwrap

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aglite.errors import RecipeError
from aglite.tasks import load_tasks, tasks_hash


def write(folder, name, text):
    (folder / name).write_text(textwrap.dedent(text))


def refused(folder, source):
    with pytest.raises(RecipeError) as caught:
        load_tasks(source, folder, "train")
    return str(caught.value)


def test_rows_of_a_function(tmp_path):
    write(
        tmp_path,
        "tasks.py",
        """
        from helper import WORDS          # a neighbour of the file can be imported
        print("talk does no harm")
        def rows():
            for number, word in enumerate(WORDS):
                yield {"id": f"t{number}", "public": {"word": word}}
        """,
    )
    write(tmp_path, "helper.py", "WORDS = ['a', 'é']")
    assert load_tasks("tasks.py:rows", tmp_path, "train") == [
        {"id": "t0", "public": {"word": "a"}, "hidden": {}},
        {"id": "t1", "public": {"word": "é"}, "hidden": {}},
    ]


def test_sets_come_in_the_same_order_each_time(tmp_path):
    write(
        tmp_path,
        "tasks.py",
        """
        def rows():
            return [{"id": word, "public": {}} for word in set("the quick brown fox jumps over a lazy dog".split())]
        """,
    )
    assert load_tasks("tasks.py:rows", tmp_path, "train") == load_tasks("tasks.py:rows", tmp_path, "train")


def test_rows_of_a_jsonl_file(tmp_path):
    write(
        tmp_path,
        "rows.jsonl",
        '{"id": "a", "public": {"x": "\u2028"}, "hidden": {"y": 2}}\n\n{"id": "b", "public": {}}\n',
    )
    rows = load_tasks("rows.jsonl", tmp_path, "val")
    assert [row["id"] for row in rows] == ["a", "b"]
    assert rows[0]["hidden"] == {"y": 2} and rows[1]["hidden"] == {}


@pytest.mark.parametrize(
    "text, said",
    [
        ('{"id": "a", "public": {}}\n{"id": "a", "public": {}}', "line 2: id 'a' was used by line 1"),
        ('{"id": "a", "public": {}}\n{"id": ', "line 2: not valid JSON"),
        ('{"id": "a", "public": {"x": NaN}}', "NaN is no JSON number"),
        ('{"id": 3, "public": {}}', "line 1: `id` must be a non-empty string, it is 3"),
        (r'{"id": "\ud83d", "public": {}}', r"line 1: `id` '\ud83d' has half a character"),
        ('{"id": "a"}', "`public` is missing"),
        ('{"id": "a", "public": {}, "hidden": 1}', "`hidden` is no mapping"),
        ('{"id": "a", "public": {}, "answer": 1}', "unknown key 'answer'"),
        ("[1]", "a row must be a mapping"),
        ("", "has no rows"),
    ],
)
def test_bad_rows_are_refused_by_place(tmp_path, text, said):
    write(tmp_path, "rows.jsonl", text)
    message = refused(tmp_path, "rows.jsonl")
    assert said in message and "rows.jsonl" in message


@pytest.mark.parametrize(
    "source, said",
    [
        ("none.jsonl", "cannot be read"),
        ("none.py:rows", "no file none.py"),
        ("tasks.py", "neither a .jsonl file nor file.py:function"),
        ("tasks.py:none", "has no function none"),
        ("tasks.py:raises", "ValueError: out of words"),
        ("tasks.py:raises", 'tasks.py", line 3'),
        ("tasks.py:strange", "row 1 is no JSON"),
        ("tasks.py:twice", "row 2: id 'a' was used by row 1"),
        ("broken.py:rows", "SyntaxError"),
    ],
)
def test_bad_sources_are_refused(tmp_path, source, said):
    write(
        tmp_path,
        "tasks.py",
        """
        def raises():
            raise ValueError("out of words")
        def strange():
            yield {"id": "a", "public": {"x": float("inf")}}
        def twice():
            return [{"id": "a", "public": {}}] * 2
        """,
    )
    write(tmp_path, "broken.py", "def rows(:")
    assert said in refused(tmp_path, source)


rows = st.fixed_dictionaries({"id": st.text(min_size=1), "public": st.dictionaries(st.text(), st.integers())})


@given(st.lists(rows))
def test_the_checksum_ignores_key_order_and_sees_everything_else(rows):
    turned = [dict(reversed(row.items())) for row in rows]
    assert tasks_hash(rows) == tasks_hash(turned)
    assert tasks_hash(rows) != tasks_hash([*rows, {"id": "one more", "public": {}}])
