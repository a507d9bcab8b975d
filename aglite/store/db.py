"""The database file: opening, migrating, backing up and checking it. What is in it is the business of `store.py`."""

from __future__ import annotations

import contextlib
import os
import re
import sqlite3
import time
from collections.abc import Iterator
from pathlib import Path

from aglite.errors import OlderStoreError, StoreError

MIGRATIONS = Path(__file__).parent / "migrations"
APPLICATION_ID = 0x61676C74  # "aglt" in the file's header, so that `file` and we know whose it is
BUSY_TIMEOUT_S = 10


def open_writer(path: Path, migrations: Path = MIGRATIONS) -> sqlite3.Connection:
    """Open (or create) the file for writing and bring its schema up to date, after a backup copy of an older one.

    Raises StoreError for a file that is not aglite's, is damaged, comes from a newer aglite or lies where SQLite
    cannot work.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    _make_private(path)
    connection = _connect(path)
    with _kept_if_well(connection, path):
        version = _version(connection, path, migrations)
        mode = connection.execute("PRAGMA journal_mode = WAL").fetchone()[0]
        if mode != "wal":
            raise StoreError(
                f"{path}: this file system does not take SQLite's write-ahead log (it offers {mode!r})",
                "put the run directory on a local disk",
            )
        connection.execute("PRAGMA synchronous = NORMAL")
        connection.execute(f"PRAGMA journal_size_limit = {64 * 1024 * 1024}")
        if 0 < version < newest(migrations):
            backup(connection, path.with_name(f"{path.name}.v{version}-{time.strftime('%Y%m%d-%H%M%S')}.bak"))
        _migrate(connection, migrations)
        connection.execute("PRAGMA foreign_keys = ON")
        connection.execute("PRAGMA secure_delete = ON")  # what is removed is overwritten, not only forgotten
    return connection


def open_reader(path: Path, migrations: Path = MIGRATIONS) -> sqlite3.Connection:
    """Open an existing, up-to-date file for reading only. Raises StoreError, OlderStoreError for an older file."""
    if not path.is_file():
        raise StoreError(f"there is no database at {path}", "give the directory of a run, such as runs/instruct")
    connection = _connect_reader(path)
    with _kept_if_well(connection, path):
        version = _version(connection, path, migrations)
        if version < newest(migrations):
            kind = OlderStoreError if version else StoreError  # an empty file is nobody's
            raise kind(
                f"{path} is of schema version {version}, older than this aglite's {newest(migrations)}",
                "`aglite up` on its run directory migrates it, after a backup copy",
            )
    return connection


@contextlib.contextmanager
def _kept_if_well(connection: sqlite3.Connection, path: Path) -> Iterator[None]:
    """Close the connection where what is done with it fails. SQLite's errors become StoreErrors."""
    try:
        yield
    except BaseException as error:
        connection.close()
        if isinstance(error, sqlite3.Error):
            raise explain(error, path) from error
        raise


def copy(path: Path, target: Path) -> None:
    """A private copy of a database, what is in its write-ahead log included. Raises StoreError."""
    connection = _connect_reader(path)
    try:
        backup(connection, target)
    except sqlite3.Error as error:
        raise explain(error, path) from error
    finally:
        connection.close()


def _connect_reader(path: Path) -> sqlite3.Connection:
    # SQLite reads a write-ahead log by way of a file that it makes beside it. Where it may make none, as in an archive
    # that nobody can write to, and there is no log to read, nothing changes and none is needed.
    still = not path.with_name(path.name + "-wal").exists() and not os.access(path.parent, os.W_OK)
    return _connect(path, "?mode=ro&immutable=1" if still else "?mode=ro")


def newest(migrations: Path = MIGRATIONS) -> int:
    """The schema version that this aglite writes."""
    return len(_scripts(migrations))


def backup(connection: sqlite3.Connection, target: Path) -> None:
    """Copy the whole database, what is still in its write-ahead log included, to `target`."""
    _make_private(target)
    copy = sqlite3.connect(target)
    try:
        connection.backup(copy)
    finally:
        copy.close()


def flush_log(path: Path) -> bool:
    """Move all of the write-ahead log into the file and empty it, so that removed text is not in it any more. False if
    somebody was reading meanwhile: then later commits do it."""
    connection = _connect(path)
    try:
        return connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()[0] == 0
    except sqlite3.Error as error:
        raise explain(error, path) from error
    finally:
        connection.close()


def vacuum(path: Path) -> None:
    """Write the whole file anew without what was removed, and empty its write-ahead log. Raises StoreError while
    another process uses the file."""
    connection = _connect(path)
    try:
        connection.execute("VACUUM")
    except sqlite3.Error as error:
        raise explain(error, path) from error
    finally:
        connection.close()
    if not flush_log(path):
        raise StoreError(f"{path} is being read by another process", "end it, then `aglite db vacuum`")


def backups(path: Path) -> list[Path]:
    """The copies that migrations left beside a database, with what was in it then."""
    return sorted(path.parent.glob(f"{path.name}.v*.bak"))


def check(connection: sqlite3.Connection) -> list[str]:
    """What is wrong with the file: damaged pages, broken indexes, rows that refer to nothing. Empty: it is whole."""
    found: list[str] = []
    try:
        found.extend(row[0] for row in connection.execute("PRAGMA integrity_check(20)"))
    except sqlite3.DatabaseError as error:  # so damaged that SQLite gives up on the way
        return [*found, str(error)]
    if found != ["ok"]:
        return found
    orphans = connection.execute("PRAGMA foreign_key_check")
    return [f"row {rowid} of {table} refers to a missing row of {parent}" for table, rowid, parent, _ in orphans]


def explain(error: sqlite3.Error, path: Path) -> StoreError:
    """The StoreError for an SQLite error: what happened to which file, and the mend."""
    name = getattr(error, "sqlite_errorname", None) or type(error).__name__
    if name == "SQLITE_FULL":
        return StoreError(
            f"{path} could not be written: the disk is full", "free some disk space, then start again: the run goes on"
        )
    if name.startswith("SQLITE_IOERR"):
        return StoreError(
            f"{path} could not be read or written ({name}: {error})", "check free space and health of its disk"
        )
    if name in ("SQLITE_READONLY", "SQLITE_CANTOPEN", "SQLITE_PERM", "SQLITE_AUTH"):
        return StoreError(
            f"{path} cannot be opened or written ({error})", "check that the directory exists and is yours"
        )
    if name.startswith("SQLITE_BUSY"):
        return StoreError(
            f"{path} stayed locked by another process for {BUSY_TIMEOUT_S} s", "end the other process that writes to it"
        )
    if name == "SQLITE_NOTADB" or name.startswith("SQLITE_CORRUPT"):
        return StoreError(
            f"{path} is damaged or not a database ({error})",
            "restore a .bak copy beside it, or start over with `aglite up --fresh`",
        )
    return StoreError(f"{path}: {error} ({name})")


def _make_private(path: Path) -> None:
    """Only the owner may read the file; SQLite gives its log the same mode. Raises StoreError."""
    try:
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
        if path.stat().st_uid == os.geteuid():
            path.chmod(0o600)
    except OSError as error:
        raise StoreError(
            f"{path} cannot be opened or written ({error.strerror})", "check that the directory exists and is yours"
        ) from None


def _connect(path: Path, mode: str = "") -> sqlite3.Connection:
    try:
        connection = sqlite3.connect(
            f"{path.resolve().as_uri()}{mode}",
            uri=True,
            timeout=BUSY_TIMEOUT_S,
            isolation_level=None,  # transactions are begun and ended by hand
            check_same_thread=False,
        )
    except sqlite3.Error as error:
        raise explain(error, path) from error
    connection.row_factory = sqlite3.Row
    return connection


def _version(connection: sqlite3.Connection, path: Path, migrations: Path) -> int:
    """The file's schema version, 0 when it is empty."""
    version: int = connection.execute("PRAGMA user_version").fetchone()[0]
    owner: int = connection.execute("PRAGMA application_id").fetchone()[0]
    tables: int = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]
    if tables and owner != APPLICATION_ID:
        raise StoreError(f"{path} is not a database of aglite", "choose another run directory with --dir")
    if version > newest(migrations):
        raise StoreError(
            f"{path} was written by a newer aglite (schema version {version}; this one knows {newest(migrations)})",
            "upgrade aglite, or choose another run directory with --dir",
        )
    return version


def _migrate(connection: sqlite3.Connection, migrations: Path) -> None:
    for number, script in enumerate(_scripts(migrations), start=1):
        connection.execute("BEGIN IMMEDIATE")
        try:
            # Read under the lock: another process may have migrated the file meanwhile.
            if connection.execute("PRAGMA user_version").fetchone()[0] < number:
                for statement in _statements(script.read_text()):
                    connection.execute(statement)
                connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
                connection.execute(f"PRAGMA user_version = {number}")
            connection.execute("COMMIT")
        except BaseException:
            if connection.in_transaction:
                connection.execute("ROLLBACK")
            raise


def _scripts(migrations: Path) -> list[Path]:
    scripts = sorted(migrations.glob("*.sql"))
    for number, script in enumerate(scripts, start=1):
        if not re.match(rf"{number:04d}_", script.name):
            raise StoreError(f"migration {script.name} should be number {number:04d}", "reinstall aglite")
    return scripts


def _statements(script: str) -> Iterator[str]:
    """Split a script, because `executescript` would end the transaction that a migration runs in."""
    statement = ""
    for line in script.splitlines(keepends=True):
        statement += line
        if sqlite3.complete_statement(statement):
            yield statement
            statement = ""
