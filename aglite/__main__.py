"""The `aglite` command."""

from __future__ import annotations

import errno
import os
import sys
import traceback

from aglite import __version__
from aglite.errors import AgliteError
from aglite.streams import lenient


def main() -> int:
    """Run the command line and return its exit code: 0 done, 1 failed, 2 bad usage or recipe, 130 interrupted."""
    lenient(sys.stdout, sys.stderr)
    try:
        if sys.argv[1:2] == ["status"]:
            from aglite.cli import status

            code = status.fast(sys.argv[2:])
            if code is not None:
                return code
        from aglite.cli.app import command

        return command()(prog_name="aglite") or 0
    except AgliteError as error:
        if os.environ.get("AGLITE_DEBUG"):
            raise
        error.mend = error.mend or error.otherwise
        print(f"aglite: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # `aglite rollouts | head`
        return 0
    except OSError as error:
        if os.environ.get("AGLITE_DEBUG"):
            raise
        print(f"aglite: {error}\n  -> {_refused(error)}", file=sys.stderr)
        return 1
    except Exception:
        traceback.print_exc()
        mend = f"please report it with the lines above and what you did (aglite {__version__})"
        print(f"aglite: this is a mistake of aglite's own\n  -> {mend}", file=sys.stderr)
        return 1
    finally:
        try:
            sys.stdout.flush()
        except OSError:  # nobody reads it any more; Python would try again and end with status 120
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _refused(error: OSError) -> str:
    """What to do about what the file system or the network refused."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return "free some disk and try again"
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return "choose a place that you may write to (--dir, --out, AGLITE_CACHE), or change its permissions"
    return "see that the file or address it names can be used; AGLITE_DEBUG=1 shows where it happened"


if __name__ == "__main__":
    sys.exit(main())
