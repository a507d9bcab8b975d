"""The program of a sidecar: it makes the one door of a sealed network, and keeps the scratch files of its slot.

    python -S sidecar.py DOOR FOLDER PORT NAME

It listens on 127.0.0.1:PORT of its network namespace and passes the listening socket to the supervisor, over the Unix
socket DOOR: what an agent in this namespace sends there is accepted by the gateway itself, and nothing else can be
reached from here. Then it takes commands over the same connection, one a line, until the supervisor is gone:

    fill BYTES\\n<tar>     delete what is in FOLDER, then unpack the tar there      -> ok\\n or error TEXT\\n
    wipe\\n                delete what is in FOLDER                                 -> ok\\n or error TEXT\\n
    take BYTES FILES\\n    pack FOLDER/work, at most this much                      -> chunks, then left N M U\\n

A chunk is its length in four bytes and its bytes; one of length 0 is the last. N counts what was not packed because it
is too deep or beyond the limits, M special files and what cannot be read, U how often since the `fill` something in
this network was sent where it has no way to. Standard library only; runs without any privilege.
"""

import ctypes
import os
import shutil
import socket
import stat
import sys
import tarfile

DEEPEST = 64
"""Folders within folders; hostile trees are deeper than any stack."""

SOCKET_CALL = {"x86_64": 41, "aarch64": 198}
"""The number of the system call `socket`."""


def main():
    door_path, folder, port, name = sys.argv[1:]
    listening = socket.create_server(("127.0.0.1", int(port)), backlog=1024)
    door = socket.socket(socket.AF_UNIX)
    door.connect(door_path)
    hello = f"{name} {'vsock' if may_use_vsock() else ''}"
    socket.send_fds(door, [hello.encode()], [listening.fileno()])
    listening.close()
    before = unroutable()
    stream = door.makefile("rwb")
    for line in stream:
        command, *numbers = line.split()
        try:
            if command == b"take":
                too_much, special = take(folder, stream, *map(int, numbers))
                answer = f"left {too_much} {special} {unroutable() - before}"
            else:
                wipe(folder)
                if command == b"fill":
                    fill(folder, stream, int(numbers[0]))
                    before = unroutable()
                answer = "ok"
        except OSError as error:
            answer = f"error {error}"
        stream.write(answer.encode("utf-8", "replace") + b"\n")
        stream.flush()


def may_use_vsock():
    """Whether containers of this engine can have sockets to the hypervisor: no network namespace holds these.

    The kernel does not look at the upper half of the register that the family comes in. A seccomp profile may, and let
    through what it takes for another family: so both are tried.
    """
    number = SOCKET_CALL.get(os.uname().machine)
    if number is None:
        return False  # the profile that would refuse them is not for this machine
    libc = ctypes.CDLL(None)
    for family in (socket.AF_VSOCK, socket.AF_VSOCK + 2**32):
        made = libc.syscall(*map(ctypes.c_long, (number, family, socket.SOCK_STREAM, 0)))
        if made >= 0:
            os.close(made)
            return True
    return False


def unroutable():
    """How many connections and datagrams the kernel found no route for, in this network namespace and ever."""
    with open("/proc/net/snmp") as file:
        names, values = [line.split() for line in file if line.startswith("Ip:")]
    count = int(values[names.index("OutNoRoutes")])
    try:
        with open("/proc/net/snmp6") as file:
            count += sum(int(line.split()[1]) for line in file if line.startswith("Ip6OutNoRoutes"))
    except FileNotFoundError:
        pass  # a kernel without IPv6
    return count


def wipe(folder):
    """Delete everything in `folder`, and what could have been done to the folder itself."""
    os.chmod(folder, 0o700)
    for name in os.listxattr(folder):
        os.removexattr(folder, name)

    def open_up(function, path, _):
        os.chmod(os.path.dirname(path), 0o700)
        if not os.path.islink(path) and os.path.isdir(path):
            os.chmod(path, 0o700)
            shutil.rmtree(path)
        else:
            function(path)

    for entry in os.scandir(folder):
        if entry.is_dir(follow_symlinks=False):
            try:
                shutil.rmtree(entry.path, onerror=open_up)
            except RecursionError:
                raise OSError(f"{entry.name!r} is too deep to be deleted") from None
        else:
            os.unlink(entry.path)


def fill(folder, stream, size):
    rest = Rest(stream, size)
    try:
        with tarfile.open(fileobj=rest, mode="r|", bufsize=1 << 18) as tar:
            tar.extractall(folder)
    except tarfile.TarError as error:
        raise OSError(str(error)) from None
    finally:
        while rest.read(1 << 18):
            pass


class Rest:
    """The next `size` bytes of a stream."""

    def __init__(self, stream, size):
        self.stream, self.size = stream, size

    def read(self, count):
        data = self.stream.read(min(count, self.size))
        self.size -= len(data)
        return data


class Chunks:
    """Writes what it is given as chunks."""

    def __init__(self, stream):
        self.stream = stream

    def write(self, data):
        self.stream.write(len(data).to_bytes(4, "big") + data)
        return len(data)


def take(folder, stream, bytes_left, files_left):
    too_much = special = 0
    chunks = Chunks(stream)
    with tarfile.open(fileobj=chunks, mode="w|", bufsize=1 << 18, format=tarfile.PAX_FORMAT) as tar:
        top = os.path.join(folder, "work")
        if os.path.isdir(top) and not os.path.islink(top):
            waiting = [(top, "", 0)]
        else:
            waiting = []
            special += 1
        while waiting:
            path, place, depth = waiting.pop()
            try:
                entries = list_folder(path, files_left)
            except OSError:
                special += 1
                continue
            if entries is None:
                too_much += 1
                continue
            for name in entries:
                inner, inner_place = os.path.join(path, name), os.path.join(place, name)
                try:
                    # Each name of a file with several is packed as a file of its own.
                    tar.inodes = {}
                    status = os.lstat(inner)
                    kind = stat.S_IFMT(status.st_mode)
                    size = status.st_size if kind == stat.S_IFREG else 0
                    if kind not in (stat.S_IFDIR, stat.S_IFLNK, stat.S_IFREG):
                        special += 1
                        continue
                    if files_left == 0 or size > bytes_left or (kind == stat.S_IFDIR and depth == DEEPEST):
                        too_much += 1
                        continue
                    if kind == stat.S_IFREG:
                        os.chmod(inner, stat.S_IMODE(status.st_mode) | 0o600)
                        with open(inner, "rb") as file:
                            tar.addfile(tar.gettarinfo(inner, inner_place), file)
                    else:
                        if kind == stat.S_IFDIR:
                            os.chmod(inner, stat.S_IMODE(status.st_mode) | 0o700)
                            waiting.append((inner, inner_place, depth + 1))
                        tar.addfile(tar.gettarinfo(inner, inner_place))
                    files_left -= 1
                    bytes_left -= size
                except OSError:
                    special += 1
    chunks.write(b"")
    return too_much, special


def list_folder(path, most):
    """The names in a folder, sorted; None if there are more than `most`."""
    os.chmod(path, 0o700)
    names = []
    with os.scandir(path) as entries:
        for entry in entries:
            names.append(entry.name)
            if len(names) > most:
                return None
    return sorted(names)


if __name__ == "__main__":
    main()
