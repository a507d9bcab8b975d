"""The process of one grading. Run by path; standard library only, apart from what the grader itself imports.

    python -P grade_child.py REQUEST_FD RESULT_FD

Both are files in memory that only this process and the supervisor have: what the grader prints, or its own child
processes do, cannot get into the result, which is sealed. A request is a JSON object with `kind` and what that kind
needs (see the function of its name); if it only asks whether the grader can be loaded, it has no `task`. The result is
one JSON object: `{"value": ..., "flags": [...]}`, `{"unloadable": text}` or `{"raised": text}`.
"""

import fcntl
import importlib.util
import json
import os
import sys
import traceback
from pathlib import Path

SEALS = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE
"""What the supervisor wants to see on a result: nobody can have changed it since."""

PR_SET_DUMPABLE = 4

LAST_BYTES = 1 << 16
"""Of a command's output, what its last line is sought in."""
LONGEST_REPORT = 64 << 20
PIPE_BYTES = 1 << 20
"""What a pipe holds at most, unless root makes it larger."""
READ_BYTES = 1 << 16


def main():
    request_fd, result_fd = int(sys.argv[1]), int(sys.argv[2])
    for fd in (request_fd, result_fd):
        os.set_inheritable(fd, False)
    with open(request_fd, "rb") as file:
        request = json.load(file)
    if request["kind"] != "function":
        import ctypes

        ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 0)  # what the agent made runs below and is not to look in here
    result = {"function": function, "command": command, "pytest": tests}[request["kind"]](request)
    text = json.dumps(result).encode()
    os.ftruncate(result_fd, 0)  # a child process may have found it in /proc
    while text:
        text = text[os.write(result_fd, text) :]
    fcntl.fcntl(result_fd, fcntl.F_ADD_SEALS, SEALS)
    for stream in (sys.stdout, sys.stderr):
        try:  # noqa: SIM105 - contextlib is not imported: it would cost every grading a few milliseconds
            stream.flush()
        except (OSError, ValueError):
            pass  # the grader closed it
    os._exit(0)  # threads that the grader left do not matter any more


def function(request):
    """Call `function` of `file` in `folder`, with `task`, `rollout` and `workdir`."""
    sys.argv = [request["file"]]
    try:
        grade = load(request["folder"], request["file"], request["function"])
    except BaseException as error:
        traceback.print_exc()
        return {"unloadable": describe(error)}
    if "task" not in request:
        return {"value": None}
    try:
        value = grade(request["task"], request["rollout"], Path(request["workdir"]))
        json.dumps(value, default=float)
    except BaseException as error:
        traceback.print_exc()
        return {"raised": describe(error)}
    return {"value": json.loads(json.dumps(value, default=float))}


def load(folder, file, name):
    """The function `name` of a file in `folder`, whose other modules it may import."""
    path = os.path.join(folder, file)
    if not os.path.isfile(path):
        raise FileNotFoundError(f"there is no {file} in {folder}")
    sys.path.insert(0, folder)
    if os.path.dirname(file):
        sys.path.insert(0, os.path.dirname(path))
    module_name = os.path.splitext(os.path.basename(file))[0]
    spec = importlib.util.spec_from_file_location(module_name, path)
    if spec is None:
        raise ImportError(f"{file} is no Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module
    spec.loader.exec_module(module)
    function = getattr(module, name, None)
    if not callable(function):
        raise AttributeError(f"{file} has no function {name!r}")
    return function


def command(request):
    """Run `argv` in `folder` with `env`, and with the task and the rollout as files in memory; `result` says what of it
    is the reward. A command that does not end within `timeout_s` graded with 0."""
    env = dict(request["env"])
    fds = []
    for name in ("task", "rollout"):
        fd = os.memfd_create(name)
        os.write(fd, json.dumps(request[name]).encode())
        fds.append(fd)
        env[f"AGLITE_{name.upper()}_FILE"] = f"/dev/fd/{fd}"
    try:
        code, output = run(request["argv"], request["folder"], env, fds, request["timeout_s"])
    except OSError as error:
        return {"unloadable": f"{request['argv'][0]} cannot be started: {error}"}
    return command_result(request["result"], code, output)


def command_result(kind, code, output):
    """What a command's end means: its exit code (None: its time was up) and the end of its output; by `reward.result`,
    which is `kind`."""
    if code is None:
        return {"value": 0.0, "flags": ["grader_timeout"]}
    if kind == "exit_code":
        return {"value": float(code == 0)}
    if code != 0:
        return {"raised": f"exit code {code}"}
    lines = output.decode("utf-8", "replace").split("\n")
    last = next((line for line in reversed(lines) if line.strip()), "")
    try:
        return {"value": json.loads(last)}
    except (ValueError, RecursionError):  # nested deeper than any stack, it is no reward either
        return {"raised": f"the last line of its output is not JSON: {last[:200]!r}"}


def tests(request):
    """Run `argv`, which is pytest_child.py, and make a reward of what it reports: 1 if all of `fail_to_pass` and
    `pass_to_pass` passed (all tests, if there is neither), with the shares as breakdown."""
    reading, writing = os.pipe()
    token = os.urandom(16).hex()
    plan = os.memfd_create("plan")
    os.write(plan, json.dumps({**request["plan"], "token": token}).encode())
    os.lseek(plan, 0, os.SEEK_SET)
    report = bytearray()
    finish = read_in_background(reading, lambda data: report.extend(data[: LONGEST_REPORT - len(report)]))
    argv = [*request["argv"], str(plan), str(writing)]
    try:
        code, _ = run(argv, request["plan"]["root"], request["env"], [plan, writing], request["timeout_s"])
    except OSError as error:
        return {"unloadable": f"{argv[0]} cannot be started: {error}"}
    finally:
        os.close(writing)
        finish()
    passed, failed, _ = outcomes(bytes(report), token)
    return verdict(request["plan"], passed, failed, code is None)


def verdict(plan, passed, failed, late):
    """The result of tests that passed and failed."""
    parts = {name: plan[name] for name in ("fail_to_pass", "pass_to_pass") if plan[name]}
    if parts:
        shares = {name: share(ids, passed, failed) for name, ids in parts.items()}
    else:
        shares = {"passed": len(passed - failed) / len(passed | failed) if passed else 0.0}
    reward = float(all(value == 1.0 for value in shares.values()) and not late)
    return {"value": {"reward": reward, "breakdown": shares}, "flags": ["grader_timeout"] if late else []}


def outcomes(report, token):
    """(ids of tests that passed, ids that failed, whether it began) in what pytest_child.py wrote. A run that did not
    come to its end, as when the code under test ended the process, passed nothing."""
    passed, failed, started, finished = set(), set(), False, False
    for line in report.split(b"\n"):
        try:
            entry = json.loads(line)
        except (ValueError, RecursionError):  # what the code under test wrote there
            continue
        if not isinstance(entry, dict) or entry.get("token") != token:
            continue
        started |= entry.get("started", False)
        finished |= entry.get("finished", False)
        if "id" in entry:
            (passed if entry["passed"] else failed).add(entry["id"])
    return (passed, failed, started) if finished else (set(), failed | passed, started)


def share(ids, passed, failed):
    """The share of `ids` that passed; an id without parameters stands for the test with each of its parameters."""

    def good(test):
        mine = {one for one in passed | failed if one == test or one.startswith(f"{test}[")}
        return bool(mine) and mine <= passed and not mine & failed

    return sum(map(good, ids)) / len(ids)


def run(argv, folder, env, fds, timeout_s):
    """(exit code, end of standard output) of a program in a session of its own; None for the code when it was ended
    because its time was up. Its output goes to ours as well."""
    import subprocess

    process = subprocess.Popen(
        argv,
        cwd=folder,
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        pass_fds=fds,
        start_new_session=True,
    )
    output = []

    def pass_on(data):
        os.write(1, data)
        output.append(data)
        if len(output) > 64:
            output[:] = [b"".join(output)[-LAST_BYTES:]]

    finish = read_in_background(process.stdout.fileno(), pass_on)
    try:
        code = process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        code = None
    try:  # noqa: SIM105
        os.killpg(process.pid, 9)
    except ProcessLookupError:
        pass
    process.wait()
    finish()
    return code, b"".join(output)[-LAST_BYTES:]


def read_in_background(pipe, take):
    """Give `take` what comes from a pipe. To be called when whoever matters has ended: a function that returns when all
    it wrote was taken, however long that takes; a process that it left may hold the pipe open and write on."""
    import select
    import threading

    over, tell = os.pipe()
    os.set_blocking(pipe, False)
    poll = select.poll()
    for fd in (pipe, over):
        poll.register(fd, select.POLLIN)

    def read():
        left = 1 + PIPE_BYTES // READ_BYTES  # reads of what the pipe held at the end, at most
        while left:
            is_over = over in dict(poll.poll())
            left -= is_over
            try:
                data = os.read(pipe, READ_BYTES)
            except BlockingIOError:
                if is_over:
                    return
                continue
            if not data:
                return
            take(data)

    thread = threading.Thread(target=read, daemon=True)
    thread.start()

    def finish():
        os.close(tell)
        thread.join()
        os.close(over)

    return finish


def describe(error):
    """`Type: text (file:line)`, the place being the last one in the traceback that has a file."""
    last = traceback.extract_tb(error.__traceback__)[-1:]
    where = f" ({os.path.basename(last[0].filename)}:{last[0].lineno})" if last else ""
    if last and last[0].filename == __file__:
        where = ""
    return f"{type(error).__name__}: {error}{where}"


if __name__ == "__main__":
    main()
