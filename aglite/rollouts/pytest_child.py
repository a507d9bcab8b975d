"""The process that runs tests on what an agent left. Run by path, isolated (`-I`), by any interpreter with pytest.

    python -I pytest_child.py PLAN REPORT

Both are open files by their numbers or, in a container, files by their names. The plan is JSON: `root` (the copy, also
the working directory), `ini` (a file of ours), `files` (to collect tests from, relative), `fail_to_pass` and
`pass_to_pass` (ids; none: all tests count), `pythonpath`, `plugins` and `token`. Lines of JSON are written to the
report, each with the token: `{"started"}`, for each test `{"id", "passed"}`, and at the end `{"finished"}`.

Nothing of the agent's steers this: no PYTHON* variables, no sitecustomize, no conftest.py, no ini file, no plugin. But
the code under test runs in this process; one that goes about it can patch the test runner from inside.
"""

import json
import os
import sys


def main():
    plan_name, report_name = sys.argv[1:]
    if plan_name.isdigit():
        plan_fd, report_fd = int(plan_name), int(report_name)
        for fd in (plan_fd, report_fd):
            os.set_inheritable(fd, False)
    else:
        plan_fd, report_fd = plan_name, os.open(report_name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with open(plan_fd, "rb") as file:
        plan = json.load(file)
    plan["root"] = os.path.realpath(plan["root"])
    plan["ini"] = os.path.realpath(plan["ini"])
    if not plan_name.isdigit():
        os.unlink(plan_name)  # it has the token

    import pytest  # before anything of the agent's can be found

    # after the standard library, so that the agent's json.py is not everybody's, before what is installed
    first = next((i for i, path in enumerate(sys.path) if path.endswith("-packages")), len(sys.path))
    sys.path[first:first] = [os.path.normpath(os.path.join(plan["root"], path)) for path in plan["pythonpath"]]
    arguments = ["-c", plan["ini"], "--rootdir", plan["root"], "--confcutdir", plan["root"]]
    arguments += ["-p", "no:cacheprovider", "-q", "--no-header", "--continue-on-collection-errors"]
    for plugin in plan["plugins"]:
        arguments += ["-p", plugin]
    sys.argv = ["pytest"]
    report = reporter(plan, report_fd)
    report.say(started=True)
    pytest.main([*arguments, *plan["files"]], plugins=[report])
    report.say(finished=True)
    sys.stdout.flush()
    os._exit(0)


def reporter(plan, fd):
    """A plugin that leaves out tests that do not count and reports the others."""
    token = plan.pop("token")
    wanted = [*plan["fail_to_pass"], *plan["pass_to_pass"]]

    class Report:
        def say(self, **entry):
            line = json.dumps({**entry, "token": token}).encode() + b"\n"
            while line:
                line = line[os.write(fd, line) :]

        def pytest_collection_modifyitems(self, items):
            if wanted:
                items[:] = [item for item in items if item.nodeid in wanted or item.nodeid.partition("[")[0] in wanted]

        def pytest_runtest_logreport(self, report):
            expected_failure = hasattr(report, "wasxfail")
            if report.when == "call" and report.passed and not expected_failure:
                self.say(id=report.nodeid, passed=True)
            elif not report.passed or expected_failure:
                self.say(id=report.nodeid, passed=False)

        def pytest_collectreport(self, report):
            if report.failed:
                self.say(id=report.nodeid, passed=False)

    return Report()


if __name__ == "__main__":
    main()
