"""What all tests need."""

import signal

# A shell that runs the tests in the background, or nohup, has them ignore these, and what they start would inherit it.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)
