"""Opening the file: new, older, newer, not ours, damaged."""

from __future__ import annotations

import os
import shutil
import sqlite3
import tempfile
from pathlib import Path

import pytest

from aglite.errors import StoreError
from aglite.store import Store, db
from aglite.store.old import readable


def make_migrations(folder: Path, *more: str) -> Path:
    """The real migrations and further ones after them."""
    shutil.copytree(db.MIGRATIONS, folder)
    for number, sql in enumerate(more, start=db.newest() + 1):
        (folder / f"{number:04d}_test.sql").write_text(sql)
    return folder


async def test_a_new_file_is_made_with_its_folder_and_reopened(tmp_path: Path) -> None:
    path = tmp_path / "runs" / "one" / "aglite.db"
    store = Store.open(path)
    await store.set_meta("manifest", {"seed": 3})
    store.close()
    store.close()
    again = Store.open(path)
    assert again.meta("manifest") == {"seed": 3}
    assert again.meta("nothing", "default") == "default"
    assert again.check() == []
    again.close()
    assert not list(path.parent.glob("*.bak")), "an up-to-date file needs no backup"


async def test_the_file_is_in_wal_mode_and_marked_as_ours(tmp_path: Path, store: Store) -> None:
    with sqlite3.connect(store.path) as other:
        assert other.execute("PRAGMA journal_mode").fetchone()[0] == "wal"
        assert other.execute("PRAGMA application_id").fetchone()[0] == db.APPLICATION_ID
        assert other.execute("PRAGMA user_version").fetchone()[0] == db.newest()


def test_a_newer_file_is_refused_for_writing_and_reading(tmp_path: Path) -> None:
    path = tmp_path / "aglite.db"
    Store.open(path).close()
    with sqlite3.connect(path) as other:
        other.execute(f"PRAGMA user_version = {db.newest() + 1}")
    before = path.read_bytes()
    for readonly in (False, True):
        with pytest.raises(StoreError, match="newer aglite") as refusal:
            Store.open(path, readonly=readonly)
        assert "upgrade" in refusal.value.mend
    assert path.read_bytes() == before


def test_an_older_file_is_migrated_after_a_backup_copy(tmp_path: Path) -> None:
    path = tmp_path / "aglite.db"
    store = Store.open(path)
    store.sync(store.add_event("info", "run", "kept", {"n": 1}))
    # Left in the write-ahead log on purpose: the copy must hold it too.
    old = db.newest()
    migrations = make_migrations(tmp_path / "more", "ALTER TABLE events ADD COLUMN host TEXT DEFAULT 'here';\n")
    writer = db.open_writer(path, migrations)
    assert writer.execute("PRAGMA user_version").fetchone()[0] == old + 1
    assert [tuple(row) for row in writer.execute("SELECT text, host FROM events")] == [("kept", "here")]
    writer.close()
    store.close()
    (copy,) = tmp_path.glob("aglite.db.v*.bak")
    assert copy.name.startswith(f"aglite.db.v{old}-")
    kept = db.open_reader(copy)
    assert [row["text"] for row in kept.execute("SELECT * FROM events")] == ["kept"]
    kept.close()


def test_a_failing_migration_leaves_the_file_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "aglite.db"
    Store.open(path).close()
    migrations = make_migrations(
        tmp_path / "more",
        "CREATE TABLE half (x);\nINSERT INTO half VALUES (';');\nINSERT INTO no_such_table VALUES (1);\n",
    )
    with pytest.raises(StoreError, match="no_such_table"):
        db.open_writer(path, migrations)
    store = Store.open(path)
    with sqlite3.connect(path) as other:
        assert not other.execute("SELECT 1 FROM sqlite_master WHERE name = 'half'").fetchone()
    store.close()


def test_a_reader_does_not_migrate_an_older_file(tmp_path: Path) -> None:
    path = tmp_path / "aglite.db"
    Store.open(path).close()
    with pytest.raises(StoreError, match="older"):
        db.open_reader(path, make_migrations(tmp_path / "more", "CREATE TABLE late (x);\n"))


def test_a_gap_between_migrations_is_refused(tmp_path: Path) -> None:
    migrations = make_migrations(tmp_path / "more")
    (migrations / f"{db.newest() + 2:04d}_gap.sql").write_text("CREATE TABLE gap (x);\n")
    with pytest.raises(StoreError, match="should be number"):
        db.open_writer(tmp_path / "aglite.db", migrations)


def test_reading_needs_a_file_and_does_not_make_one(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="no database"):
        Store.open(tmp_path / "aglite.db", readonly=True)
    assert not (tmp_path / "aglite.db").exists()


def test_another_programs_database_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "aglite.db"
    with sqlite3.connect(path) as other:
        other.execute("CREATE TABLE theirs (x)")
    other.close()
    before = path.read_bytes()
    with pytest.raises(StoreError, match="not a database of aglite"):
        Store.open(path)
    assert path.read_bytes() == before


def test_a_file_that_is_no_database_is_named(tmp_path: Path) -> None:
    path = tmp_path / "aglite.db"
    path.write_bytes(b"not a database at all" * 100)
    with pytest.raises(StoreError, match=r"aglite\.db is damaged or not a database"):
        Store.open(path)


def test_a_folder_that_cannot_be_opened_is_named(tmp_path: Path) -> None:
    (tmp_path / "aglite.db").mkdir()
    with pytest.raises(StoreError, match="cannot be opened"):
        Store.open(tmp_path / "aglite.db")


async def test_a_second_process_reads_while_the_first_writes(tmp_path: Path, store: Store) -> None:
    reader = Store.open(store.path, readonly=True)
    await store.add_event("info", "run", "seen")
    assert [event["text"] for event in reader.events()] == ["seen"]
    with pytest.raises(StoreError, match="reading only"):
        await reader.add_event("info", "run", "refused")
    reader.close()


async def test_a_closed_store_says_so(store: Store) -> None:
    store.close()
    with pytest.raises(StoreError, match="is closed"):
        await store.add_event("info", "run", "late")
    with pytest.raises(StoreError, match="is closed"):
        store.events()


def test_check_finds_a_damaged_file(tmp_path: Path) -> None:
    path = tmp_path / "aglite.db"
    store = Store.open(path)
    store.sync(store.add_tasks("train", [{"id": str(n), "public": {"text": "x" * 500}} for n in range(200)]))
    store.close()
    data = bytearray(path.read_bytes())
    for page in range(len(data) // 4096 - 5, len(data) // 4096):  # where the tasks are
        data[page * 4096 : page * 4096 + 64] = b"\xff" * 64
    path.write_bytes(data)
    damaged = Store.open(path, readonly=True)
    assert damaged.check()
    with pytest.raises(StoreError, match="damaged"):
        damaged.tasks("train")
    damaged.close()


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become somebody who may not write")
@pytest.mark.parametrize("scripts", [2, None])
def test_an_archive_that_nobody_can_write_to_is_read(tmp_path: Path, scripts: int | None) -> None:
    """Of this aglite and of an older one."""
    migrations = tmp_path / "migrations"
    migrations.mkdir()
    for script in sorted(db.MIGRATIONS.glob("*.sql"))[:scripts]:
        (migrations / script.name).write_text(script.read_text())
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:  # one that others may enter, all the way
        path = Path(folder) / "aglite.db"
        writer = db.open_writer(path, migrations)
        writer.execute("INSERT INTO meta VALUES ('manifest', '7')")
        writer.close()
        path.chmod(0o644)
        Path(folder).chmod(0o555)
        child = os.fork()
        if child == 0:
            try:
                os.setuid(65534)
                tempfile.tempdir = "/tmp"  # where they may write, as TMPDIR may not be
                with readable(path) as store:
                    found = store.meta("manifest")
                os._exit(found)  # with its copy deleted
            finally:
                os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        assert os.listdir(folder) == ["aglite.db"]


def test_an_empty_file_is_no_older_run(tmp_path: Path) -> None:
    path = tmp_path / "aglite.db"
    path.touch()
    with pytest.raises(StoreError, match="schema version 0"), readable(path):
        pass
