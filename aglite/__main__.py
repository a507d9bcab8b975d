"""The `aglite` command."""

from __future__ import annotations

import os
import sys

from aglite.errors import AgliteError


def main() -> int:
    """Run the command line and return its exit code: 0 done, 1 failed, 2 bad usage or recipe, 130 interrupted."""
    try:
        if sys.argv[1:2] == ["status"]:
            from aglite.cli import status

            code = status.fast(sys.argv[2:])
            if code is not None:
                return code
        from aglite.cli.app import app

        return app(prog_name="aglite") or 0
    except AgliteError as error:
        if os.environ.get("AGLITE_DEBUG"):
            raise
        print(f"aglite: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # `aglite rollouts | head`
        return 0
    finally:
        try:
            sys.stdout.flush()
        except OSError:  # nobody reads it any more; Python would try again and end with status 120
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    sys.exit(main())
