"""What all tests need."""

import signal

from hypothesis import HealthCheck, settings

# A shell that runs the tests in the background, or nohup, has them ignore these, and what they start would inherit it.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)

# How long an example takes, or is in the making, says more of the machine than of the code.
settings.register_profile("aglite", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("aglite")
