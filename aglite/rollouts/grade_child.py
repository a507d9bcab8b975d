"""The process of one grading. Run by path; standard library only, apart from what the grader itself imports.

    python -P grade_child.py REQUEST_FD RESULT_FD

Both are files in memory that only this process and the supervisor have: what the grader prints, or its own child
processes do, cannot get into the result. A request is a JSON object with `file`, `function`, `folder` and, unless it
only asks whether the grader can be loaded, `task`, `rollout` and `workdir`. The result is one JSON object:
`{"value": ...}`, `{"unloadable": text}` or `{"raised": text}`.
"""

import importlib.util
import json
import os
import sys
import traceback
from pathlib import Path


def main():
    request_fd, result_fd = int(sys.argv[1]), int(sys.argv[2])
    for fd in (request_fd, result_fd):
        os.set_inheritable(fd, False)
    with open(request_fd, "rb") as file:
        request = json.load(file)
    sys.argv = [request["file"]]
    result = run(request)
    text = json.dumps(result).encode()
    while text:
        text = text[os.write(result_fd, text) :]
    for stream in (sys.stdout, sys.stderr):
        try:  # noqa: SIM105 - contextlib is not imported: it would cost every grading a few milliseconds
            stream.flush()
        except (OSError, ValueError):
            pass  # the grader closed it
    os._exit(0)  # threads that the grader left do not matter any more


def run(request):
    try:
        function = load(request["folder"], request["file"], request["function"])
    except BaseException as error:
        traceback.print_exc()
        return {"unloadable": describe(error)}
    if "task" not in request:
        return {"value": None}
    try:
        value = function(request["task"], request["rollout"], Path(request["workdir"]))
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


def describe(error):
    """`Type: text (file:line)`, the place being the last one in the traceback that has a file."""
    last = traceback.extract_tb(error.__traceback__)[-1:]
    where = f" ({os.path.basename(last[0].filename)}:{last[0].lineno})" if last else ""
    if last and last[0].filename == __file__:
        where = ""
    return f"{type(error).__name__}: {error}{where}"


if __name__ == "__main__":
    main()
