from pathlib import Path

import pytest

from aglite.errors import RecipeError
from aglite.recipe_file import read_mapping


def read(folder: Path, data: bytes):
    file = folder / "recipe.yaml"
    file.write_bytes(data)
    return read_mapping(file)


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"name: a\nmodel: b\nname: c\n", "name stands here twice"),
        (b"trainer: {steps: 1, steps: 2}\n", "steps stands here twice"),
        (b"5: 6\n", "the key 5 is no text"),
        (b"? [1, 2]\n: 3\n", "the key [1, 2] is no text"),
        (b"name: \xff\xfe\n", "cannot be read"),
        (b"name: [\n", "not valid YAML"),
        (b"- name\n", "holds no mapping"),
        (b"", "holds no mapping"),
    ],
)
def test_what_yaml_lets_pass_is_refused(tmp_path, data, said):
    with pytest.raises(RecipeError, match=r"recipe\.yaml") as caught:
        read(tmp_path, data)
    assert said in caught.value.message and caught.value.mend


def test_a_merged_key_may_be_overridden(tmp_path):
    assert read(tmp_path, b"x: &x {q: 1}\ny: {<<: *x, q: 2}\n")["y"] == {"q": 2}
