"""What all tests need."""

import signal
import sys

import pytest
from hypothesis import HealthCheck, settings

# A shell that runs the tests in the background, or nohup, has them ignore these, and what they start would inherit it.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)

# How long an example takes, or is in the making, says more of the machine than of the code.
settings.register_profile("aglite", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("aglite")


@pytest.fixture(autouse=True)
def no_run_goes_on():
    """A run that a test has left, as one that fails does, would slow the next ones down."""

    def started():
        return sys.modules["mini_run"].STARTED if "mini_run" in sys.modules else []

    before = len(started())
    yield
    for process in started()[before:]:
        if process.poll() is None:
            process.kill()
            process.communicate()
