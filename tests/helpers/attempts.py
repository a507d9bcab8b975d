"""Attempts of an agent to get out of its container, and what each came to. For agents of the tests, inside:

    attempts.make([module, ...])     each function of those modules that is an attempt

An attempt is made in a process of its own and gives pairs of what was tried and how that ended: the name of an error, a
status, or `done` with what was got. They are printed as one JSON object. The targets, in AGLITE_TASK_FILE, are all the
test's own. Standard library only.
"""

import ctypes
import errno
import json
import os
import socket

LIBC = ctypes.CDLL(None, use_errno=True)
MARK = "ATTEMPTS "


def tried(work, *arguments):
    """How a call ended."""
    try:
        got = work(*arguments)
    except OSError as error:
        return errno.errorcode.get(error.errno, type(error).__name__)
    except ValueError as error:
        return type(error).__name__
    return f"done {got!r:.80}"


def c(name, *arguments):
    """A function of the C library that gives -1 and errno when it fails."""
    LIBC[name].restype = ctypes.c_long
    if (got := LIBC[name](*arguments)) == -1:
        raise OSError(ctypes.get_errno(), name)
    return got


def connected(family, address):
    with socket.socket(family, socket.SOCK_STREAM) as sock:
        sock.settimeout(20)
        sock.connect(address)


def written(path, data="1"):
    with open(path, "w") as file:
        file.write(data)


def read(path, size=4096):
    with open(path, "rb") as file:
        return file.read(size)


def make(modules):
    with open(os.environ["AGLITE_TASK_FILE"]) as file:
        task = json.load(file)
    results = {}
    for function in [function for module in modules for function in module.ATTEMPTS]:
        reading, writing = os.pipe()
        if os.fork() == 0:
            try:
                found = function(task)
            except BaseException as error:
                found = [("the attempt itself", f"broke: {error!r}")]
            os.write(writing, json.dumps(found).encode())
            os._exit(0)
        os.close(writing)
        with open(reading, "rb") as pipe:
            results[function.__name__] = json.loads(pipe.read() or b"[]")
        os.wait()
    print(MARK + json.dumps(results))
