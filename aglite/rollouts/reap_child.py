"""The reaper process: ends what a dead supervisor left running. Run by path; standard library only, so it starts fast.

    python -I -S reap_child.py MARK LOG SUPERVISOR_PID

On stdin it is told process groups: `+PGID` to end with the supervisor, `-PGID` to forget; `@PATH`, the socket of a
Docker Engine that runs containers of the supervisor's; `&PATH`, a control group that is its agents'; `=PATH`, a file or
folder in memory to delete; `.` for a clean end. When stdin or the supervisor ends without the `.`, it ends those groups
and every process with MARK in its environment, deletes those files and every container with MARK's value as its label.
The functions that find and end processes are used by the supervisor too.
"""

import os
import select
import signal
import sys
import time

PATIENCE_S = 15.0  # what was killed is gone in a moment, but on a busy machine that may be some seconds
ENGINE_PATIENCE_S = 30.0

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


def end_cgroups(folders, dying_session=None, patience_s=PATIENCE_S):
    """SIGKILL what is in control groups and in groups inside them, until nothing is, and delete them all.

    `folders`: one group may be a folder in each of several trees. Returns (ids of the processes that were ended, those
    of `dying_session` aside; folders that are still there after `patience_s`).
    """
    deadline = time.monotonic() + patience_s
    ended = set()
    while True:
        groups = [path for folder in folders for path, _, _ in os.walk(folder, topdown=False)]
        pids = {pid for group in groups for pid in members_of(group)}
        if pids:
            for group in groups:
                write_if_there(group + "/pids.max", b"0")  # nothing is forked while it is ended
                write_if_there(group + "/cgroup.kill", b"1")
        for pid in pids:
            if dying_session is None or stat_of(pid, SESSION) != dying_session:
                ended.add(pid)
            _kill_member(pid, groups)
        left = [group for group in groups if not _remove_folder(group)]
        if not left or time.monotonic() > deadline:
            return sorted(ended), left
        time.sleep(0.002)


def members_of(group):
    """Ids of the processes in one control group."""
    try:
        with open(group + "/cgroup.procs", "rb") as file:
            return {int(line) for line in file}
    except OSError:
        return set()


def write_if_there(path, data):
    """Write to a file of the kernel's, if it has it."""
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    except OSError:
        return
    try:
        os.write(fd, data)
    except OSError:
        pass
    finally:
        os.close(fd)


def _kill_member(pid, groups):
    """Kill `pid` if it is in one of the groups: what was read there may have ended, and its id passed on."""
    try:
        fd = os.pidfd_open(pid)
    except OSError:
        return
    try:
        if any(pid in members_of(group) for group in groups):
            signal.pidfd_send_signal(fd, signal.SIGKILL)
    except OSError:
        pass
    finally:
        os.close(fd)


def _remove_folder(path):
    try:
        os.rmdir(path)
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return True


def delete(path):
    """Delete a file, or a folder with all that is in it; what cannot be deleted stays."""
    for parent, names, files in os.walk(path, topdown=False):
        for name in files:
            _try(os.unlink, os.path.join(parent, name))
        for name in names:
            _try(os.rmdir, os.path.join(parent, name))
    _try(os.rmdir if os.path.isdir(path) else os.unlink, path)


def _try(remove, path):
    try:  # noqa: SIM105
        remove(path)
    except OSError:
        pass


def end_containers(socket_path, supervisor):
    """Delete a supervisor's containers and volumes, until none is listed; how that went, in words."""
    # only when it is needed: these take longer to import than all the rest
    import http.client
    import json
    import socket
    import urllib.parse

    class Connection(http.client.HTTPConnection):
        def connect(self):
            self.sock = socket.socket(socket.AF_UNIX)
            self.sock.settimeout(60)
            self.sock.connect(socket_path)

    def ask(method, path):
        connection = Connection("localhost")
        try:
            connection.request(method, path)
            answer = connection.getresponse()
            return answer.status, answer.read()
        finally:
            connection.close()

    filters = urllib.parse.quote(json.dumps({"label": [f"aglite.supervisor={supervisor}"]}))
    gone = set()
    deadline = time.monotonic() + ENGINE_PATIENCE_S
    try:
        while time.monotonic() < deadline:
            found = {one["Id"] for one in json.loads(ask("GET", f"/containers/json?all=1&filters={filters}")[1])}
            volumes = json.loads(ask("GET", f"/volumes?filters={filters}")[1])["Volumes"] or []
            if not found and not volumes:
                return f"deleted {len(gone)}"
            for container in found:
                ask("DELETE", f"/containers/{container}?force=1&v=1")
            for volume in volumes:  # one that a container still uses stays, for the next time round
                ask("DELETE", f"/volumes/{volume['Name']}")
            gone |= found
            time.sleep(0.05)
    except (OSError, ValueError, http.client.HTTPException) as error:
        return f"deleted {len(gone)}, then {error}"
    return f"could not delete all of {len(gone)}"


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
    docker = None
    cgroups = []
    in_memory = []
    rest = b""
    while True:
        ready = [fd for fd, _ in poll.poll()]
        data = os.read(0, 65536) if 0 in ready else b""
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            if line == b".":
                return
            if line[:1] == b"@":
                docker = os.fsdecode(line[1:])
                continue
            if line[:1] == b"&":
                cgroups.append(os.fsdecode(line[1:]))
                continue
            if line[:1] == b"=":
                in_memory.append(os.fsdecode(line[1:]))
                continue
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
    hidden, groups_left = end_cgroups(cgroups)
    for path in in_memory:
        delete(path)
    containers = end_containers(docker, os.fsdecode(mark).partition("=")[2]) if docker else "none"
    try:
        with open(log, "a") as file:
            when = time.strftime("%Y-%m-%d %H:%M:%S")
            file.write(
                f"{when} supervisor {supervisor} died; ended groups {sorted(groups)}, "
                f"processes {ended + hidden}, could not end {surviving + groups_left}; containers: {containers}\n"
            )
    except OSError:
        pass  # the run directory is gone or full: the work itself is done


if __name__ == "__main__":
    main()
