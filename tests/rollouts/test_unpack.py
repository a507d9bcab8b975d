"""What an agent left is unpacked inside its folder, whatever the tar says."""

import io
import os
import tarfile

import pytest

from aglite.rollouts.backends.unpack import TooMuch, unpack


def tar_of(*members):
    """A tar of (name, data) files, (name, "type", linkname) links and (name, "type") others."""
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as tar:
        for name, what, *link in members:
            member = tarfile.TarInfo(name)
            if isinstance(what, bytes):
                member.size, member.mode = len(what), 0o6755
                tar.addfile(member, io.BytesIO(what))
            else:
                member.type = {"sym": tarfile.SYMTYPE, "hard": tarfile.LNKTYPE, "fifo": tarfile.FIFOTYPE}.get(
                    what, tarfile.CHRTYPE if what == "device" else tarfile.DIRTYPE
                )
                member.linkname = link[0] if link else ""
                tar.addfile(member)
    file.seek(0)
    return file


def unpacked(tmp_path, *members, most_bytes=1000, most_files=100):
    return unpack(tar_of(*members), tmp_path / "out", most_bytes=most_bytes, most_files=most_files)


def test_files_folders_and_links_come_out(tmp_path):
    left = unpacked(
        tmp_path,
        ("a", "dir"),
        ("a/b", b"text"),
        ("c/d/e", b"deep"),
        ("up", "sym", "a/b"),
        ("a/down", "sym", "../c/d/e"),
    )
    out = tmp_path / "out"
    assert left == (0, 0)
    assert (out / "up").read_text() == "text"
    assert (out / "a" / "down").read_text() == "deep"
    assert (out / "a" / "b").stat().st_mode & 0o7777 == 0o700, "no set-id bits, nothing for others"


@pytest.mark.parametrize(
    "members",
    [
        [("/etc/evil", b"x")],
        [("../evil", b"x")],
        [("a/../../evil", b"x")],
        [("link", "sym", "/etc/passwd")],
        [("link", "sym", "../evil")],
        [("a/link", "sym", "../../evil")],
        [("device", "device")],
        [("pipe", "fifo")],
        [("hard", "hard", "/etc/passwd")],
        [("hard", "hard", "../evil")],
    ],
)
def test_what_would_leave_the_folder_is_left_out(tmp_path, members):
    links = sum(member[1] == "sym" for member in members)
    assert unpacked(tmp_path, ("good", b"x"), *members) == (links, len(members) - links)
    assert [entry.name for entry in tmp_path.iterdir()] == ["out"]
    assert "good" in os.listdir(tmp_path / "out")
    for folder, _, files in os.walk(tmp_path / "out"):
        assert not any(os.path.islink(os.path.join(folder, name)) for name in files)


@pytest.mark.parametrize(
    "links",
    [
        # each harmless by its own text, together they climb
        [("a/b/c/up", "sym", "../../.."), ("out", "sym", "a/b/c/up/..")],
        [("a/b", "sym", ".."), ("a/b/c", "sym", "../..")],
        [("a/b/c", "sym", "../d"), ("a/b/c/e", "sym", "../../..")],
        [("a/self", "sym", "."), ("a/self/self/x", "sym", "../../..")],
    ],
)
def test_links_through_links_stay_inside(tmp_path, links):
    unpacked(tmp_path, ("a/keep", b"x"), *links)
    out = (tmp_path / "out").resolve()
    for folder, folders, files in os.walk(out):
        for name in [*folders, *files]:
            path = os.path.join(folder, name)
            assert os.path.realpath(path).startswith(str(out)), (path, os.readlink(path))


def test_a_file_is_not_written_through_a_link(tmp_path):
    target = tmp_path / "target"
    target.mkdir()
    unpacked(tmp_path, ("link", "sym", str(target)), ("link/evil", b"x"))
    assert os.listdir(target) == []


@pytest.mark.parametrize("members", [[("a", bytes(600)), ("b", bytes(600))], [(f"f{i}", b"") for i in range(101)]])
def test_more_than_agreed_is_refused(tmp_path, members):
    with pytest.raises(TooMuch):
        unpacked(tmp_path, *members)


def test_a_name_that_comes_twice_or_is_a_folder_is_an_error_not_an_overwrite(tmp_path):
    with pytest.raises(FileExistsError):
        unpacked(tmp_path, ("a", b"1"), ("a", b"2"))
