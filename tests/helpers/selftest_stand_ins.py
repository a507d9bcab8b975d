"""Items of the self-test that end in every way an item can."""

import os
import time

from aglite.selftest.bench import Skip, expect


def passes(bench):
    """Finds what it looks for.

    And measures it.
    """
    return {"gap": 0.000123, "device": bench.device, "rows": len(bench.rows())}


def fails(bench):
    """Finds something else."""
    expect(False, "it is 2, 1 was expected")


def skips(bench):
    """Cannot be tried."""
    raise Skip("there is one GPU")


def breaks(bench):
    """Meets an error."""
    raise ValueError("no such layer")


def dies(bench):
    """Takes its process with it."""
    print("CUDA error: an illegal memory access was encountered", flush=True)
    os._exit(3)


def hangs(bench):
    """Never ends, and starts another process that does not."""
    child = os.fork()
    if child == 0:
        time.sleep(600)
        os._exit(0)
    (bench.scratch / "child.pid").write_text(str(child))
    time.sleep(600)
