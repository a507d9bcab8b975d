"""The reaper process: ends what a dead supervisor left running. Run by path; standard library only, so it starts fast.

    python -I -S reap_child.py MARK LOG SUPERVISOR_PID

On stdin it is told process groups: `+PGID` to end with the supervisor, `-PGID` to forget, `.` for a clean end. When
stdin or the supervisor ends without the `.`, it ends those groups and every process with MARK in its environment.
The functions that search /proc are used by the supervisor too.
"""

import os
import select
import signal
import sys
import time

PATIENCE_S = 4.0

# fields of /proc/PID/stat, counted from the one after the name
SESSION = 3
STARTED = 19  # in clock ticks since boot: tells a process from a later one with its id


def environ_of(pid):
    """The environment a process was started with, as NUL-terminated bytes; empty if it is gone or not ours."""
    try:
        fd = os.open(f"/proc/{pid}/environ", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return b""
    try:
        parts = []
        while part := os.read(fd, 1 << 17):
            parts.append(part)
        return b"".join(parts)
    except OSError:
        return b""
    finally:
        os.close(fd)


def has(environ, *entries):
    """Whether every `NAME=value` of `entries` (bytes) is in an environment."""
    block = b"\0" + environ
    return all(b"\0" + entry + b"\0" in block for entry in entries)


def find(match):
    """Ids of the processes whose environment `match` accepts; never this process."""
    own = os.getpid()
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit() and int(name) != own:
            environ = environ_of(name)
            if environ and match(environ):
                found.append(int(name))
    return found


def end(match, patience_s=PATIENCE_S, dying_session=None):
    """SIGKILL every process whose environment `match` accepts, until a search finds none.

    Returns (ended, surviving) process ids; the second is empty unless something outlasts `patience_s`. Those of
    `dying_session` are not counted among the ended: they were killed before and only take a moment to go.
    """
    deadline = time.monotonic() + patience_s
    ended = set()
    while True:
        found = find(match)
        if not found or time.monotonic() > deadline:
            return sorted(ended - set(found)), found
        for pid in found:
            counts = dying_session is None or stat_of(pid, SESSION) != dying_session
            if _kill_if(pid, match) and counts:
                ended.add(pid)
        # What was just killed lets go of its memory (and so of its environment) in a moment; new ones are sought anew.
        time.sleep(0.002)


def _kill_if(pid, match):
    """Kill `pid` if it is still the process that matched: the id may have passed to another one."""
    try:
        fd = os.pidfd_open(pid)
    except OSError:
        return False
    try:
        if not match(environ_of(pid)):
            return False
        signal.pidfd_send_signal(fd, signal.SIGKILL)
        return True
    except OSError:
        return False
    finally:
        os.close(fd)


def stat_of(pid, field):
    """One of the fields below of /proc/PID/stat; None if the process is gone."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return int(file.read().rpartition(b")")[2].split()[field])
    except (OSError, IndexError):
        return None


def end_group(pgid, leader_started):
    """SIGKILL a process group, unless its number has passed to another process since it was registered."""
    now = stat_of(pgid, STARTED)
    if now is not None and leader_started is not None and now != leader_started:
        return
    try:  # noqa: SIM105 - contextlib would double the start time
        os.killpg(pgid, signal.SIGKILL)
    except OSError:
        pass


def main():
    mark, log, supervisor = os.fsencode(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    poll = select.poll()
    poll.register(0, select.POLLIN)
    try:  # noqa: SIM105
        poll.register(os.pidfd_open(supervisor), select.POLLIN)
    except OSError:
        pass  # dead already: stdin is at its end, too
    groups = {}
    rest = b""
    while True:
        ready = [fd for fd, _ in poll.poll()]
        data = os.read(0, 65536) if 0 in ready else b""
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            if line == b".":
                return
            pgid = int(line[1:])
            if line[:1] == b"+":
                groups[pgid] = stat_of(pgid, STARTED)
            else:
                groups.pop(pgid, None)
        if not data:
            break
    for pgid, leader_started in groups.items():
        end_group(pgid, leader_started)
    ended, surviving = end(lambda environ: has(environ, mark))
    try:
        with open(log, "a") as file:
            when = time.strftime("%Y-%m-%d %H:%M:%S")
            file.write(
                f"{when} supervisor {supervisor} died; ended groups {sorted(groups)}, "
                f"processes {ended}, could not end {surviving}\n"
            )
    except OSError:
        pass  # the run directory is gone or full: the work itself is done


if __name__ == "__main__":
    main()
