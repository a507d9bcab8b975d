"""What of an agent's folder reaches a grader, whatever the agent put there."""

import os
import socket
import subprocess

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aglite.rollouts.collect import Rules, collect, fits, originals_of


@pytest.fixture
def work(tmp_path):
    folder = tmp_path / "work"
    folder.mkdir()
    return folder


def write(folder, **files):
    for name, text in files.items():
        path = folder / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def tree(folder):
    """Every path below with what is there: a file's text, `-> goal` of a link, `/` for a folder."""
    found = {}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        found[name] = f"-> {os.readlink(path)}" if path.is_symlink() else "/" if path.is_dir() else path.read_text()
    return found


def sink(folder, levels=3000):
    """Make a folder, and in it folders within folders."""
    folder.mkdir()
    here = os.open(folder, os.O_RDONLY)
    for _ in range(levels):
        os.mkdir("d", dir_fd=here)
        inner = os.open("d", os.O_RDONLY, dir_fd=here)
        os.close(here)
        here = inner
    os.close(here)


def taken(work, **rules):
    target = work.with_name("copy")
    return collect(work, target, Rules(**rules)), tree(target)


@pytest.mark.parametrize(
    ("pattern", "yes", "no"),
    [
        ("**", ["a", "a/b/c"], []),
        ("*.txt", ["a.txt", "a.txt/b"], ["a/b.txt", "a.txtx"]),
        ("**/*.txt", ["a.txt", "a/b/c.txt"], ["a.py"]),
        ("src", ["src", "src/a/b"], ["srca", "a/src"]),
        ("src/", ["src/a"], ["srcs/a"]),
        ("./a?", ["ab"], ["a", "abc", "a/"]),
        ("a[b]", ["a[b]"], ["ab"]),
    ],
)
def test_patterns(pattern, yes, no):
    assert [path for path in [*yes, *no] if fits(path, [pattern])] == yes


def test_a_plain_folder_is_copied_with_modes_and_empty_folders(work):
    write(work, a="1", b__c="2")
    (work / "empty").mkdir()
    (work / "b" / "c").chmod(0o4755)
    found, copy = taken(work)
    assert copy == {"a": "1", "b": "/", "b/c": "2", "empty": "/"}
    assert (found.files, found.bytes, found.flags, found.refused) == (4, 2, set(), [])
    assert (work.with_name("copy") / "b/c").stat().st_mode & 0o7777 == 0o755, "no set-user-id"


def test_only_what_may_be_changed_is_taken_the_rest_is_as_it_was_given(work, tmp_path):
    given_files = tmp_path / "recipe"
    write(given_files, lib__a="given", lib__b="given", main="given")
    write(work, lib__a="changed", lib__b="given", lib__new="new", src__x="mine", main="given")
    originals = originals_of([(given_files / "lib", "lib"), (given_files / "main", "main")])
    found, copy = taken(work, paths=["src"], originals=originals)
    assert copy == {"lib": "/", "lib/a": "given", "lib/b": "given", "main": "given", "src": "/", "src/x": "mine"}
    assert found.flags == {"outside_paths"}
    assert found.refused == ["outside_paths: lib/a", "outside_paths: lib/new"]


def test_what_an_agent_deletes_where_it_may_stays_deleted(work, tmp_path):
    write(tmp_path / "recipe", a="1", b="2")
    originals = originals_of([(tmp_path / "recipe", ".")])
    found, copy = taken(work, paths=["a"], originals=originals)
    assert copy == {"b": "2"} and found.flags == set()


def test_what_the_grader_owns_is_never_taken_and_changes_to_it_are_flagged(work, tmp_path):
    write(tmp_path / "recipe", tests__test_a="good", conftest="")
    originals = originals_of([(tmp_path / "recipe" / "tests", "tests")])
    rules = {"owned": ["tests"], "steering": frozenset({"conftest.py"}), "originals": originals}
    write(work, tests__test_a="good", x="1")
    assert taken(work, **rules)[0].flags == set()
    for change in (
        lambda: write(work, tests__test_a="evil"),
        lambda: (work / "tests/test_a").unlink(),
        lambda: write(work, tests__test_new=""),
        lambda: write(work, deep__conftest="") or (work / "deep/conftest").rename(work / "deep/conftest.py"),
        lambda: os.symlink("x", work / "conftest.py"),
    ):
        work.with_name("copy").rename(work.with_name(f"copy{os.urandom(4).hex()}"))
        write(work, tests__test_a="good")
        change()
        found, copy = taken(work, **rules)
        assert found.flags == {"touched_tests"}
        assert not any("test" in name for name in copy)
        for path in ("tests/test_new", "deep/conftest.py", "conftest.py"):
            (work / path).unlink(missing_ok=True)


def test_a_change_that_keeps_size_and_time_is_seen_also_after_an_agent_that_made_none(work, tmp_path):
    write(tmp_path / "recipe", tests__test_a="good")
    original = tmp_path / "recipe/tests/test_a"
    os.utime(original, ns=(10**18, 10**18))
    rules = {"owned": ["tests"], "originals": {"tests/test_a": original}}
    for text, flags in (("good", set()), ("evil", {"touched_tests"}), ("good", set())):
        write(work, tests__test_a=text)
        os.utime(work / "tests/test_a", ns=(10**18, 10**18))
        found, _ = taken(work, **rules)
        assert found.flags == flags, text
        work.with_name("copy").rename(work.with_name(f"copy{os.urandom(4).hex()}"))


def test_an_owned_folder_deeper_than_any_stack_is_a_change_to_it(work):
    sink(work / "tests")
    try:
        found, copy = taken(work, owned=["tests"])
    finally:  # pytest could not delete it
        subprocess.run(["rm", "-rf", work], check=True)
    assert found.flags == {"touched_tests"} and copy == {}


@pytest.mark.parametrize("make", [lambda path: path.symlink_to("elsewhere"), lambda path: path.write_text("")])
def test_nothing_is_left_in_place_of_a_folder_that_tests_are_put_in(work, make):
    (work / "elsewhere").mkdir()
    make(work / "a")
    found, copy = taken(work, owned=["a/tests"])
    assert "a" not in copy and found.flags == {"touched_tests"}


def test_links_that_lead_out_are_dropped_also_by_way_of_others(work, tmp_path):
    secret = tmp_path / "secret"
    secret.write_text("x")
    write(work, x__y__z__f="f", real="r")
    os.symlink("real", work / "good")
    os.symlink("x/y/z", work / "folder")
    os.symlink(secret, work / "absolute")
    os.symlink("../secret", work / "relative")
    os.symlink("../../..", work / "x/y/z/up")  # to the folder itself: harmless alone
    os.symlink("x/y/z/up/../secret", work / "joined")  # inside as it is written, outside as it is followed
    os.symlink("loop", work / "loop")
    found, copy = taken(work)
    assert {name for name, what in copy.items() if what.startswith("->")} == {"good", "folder", "x/y/z/up", "loop"}
    assert found.flags == {"symlinks"} and len(found.refused) == 3


def test_pipes_sockets_and_devices_are_dropped_and_block_nobody(work):
    os.mkfifo(work / "pipe")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(work / "s"))
        found, copy = taken(work)
    assert copy == {} and found.flags == {"special_files"}


def test_sparse_and_many_and_deep_files_stay_within_the_limits(work):
    with open(work / "sparse", "wb") as file:
        file.truncate(1 << 40)
    write(work, small="1")
    found, copy = taken(work, max_bytes=1000)
    assert copy == {"small": "1"} and found.flags == {"oversize"} and found.refused == ["oversize: sparse"]
    work.with_name("copy").rename(work.with_name("first"))
    for number in range(50):
        (work / f"n{number}").touch()
    found, copy = taken(work, max_files=10)
    assert len(copy) <= 10 and found.flags == {"oversize"}
    work.with_name("copy").rename(work.with_name("second"))
    deep = work / "d"
    for _ in range(100):
        deep.mkdir()
        deep = deep / "d"
    found, copy = taken(work)
    assert "oversize" in found.flags and len(copy) < 140


NAMES = st.sampled_from(["a", "b", "tests", "..", "c d", "é"])


@given(links=st.dictionaries(NAMES.filter(lambda n: n != ".."), st.lists(NAMES, min_size=1, max_size=5), max_size=5))
def test_no_link_of_a_copy_ever_leads_out(tmp_path_factory, links):
    base = tmp_path_factory.mktemp("links")
    work = base / "work"
    (work / "d" / "e").mkdir(parents=True)
    for name, goal in links.items():
        os.symlink("/".join(goal), work / "d" / name)
    collect(work, base / "copy", Rules())
    root = str((base / "copy").resolve())
    for path in (base / "copy").rglob("*"):
        if path.is_symlink():
            assert os.path.realpath(path).startswith(root)
