"""The control API: what the terminal, the command line and any other UI read and do. Loopback only, admin token.

`app`, `read` and `steer` have the routes, `shapes` what goes in and out, `stream` the server-sent events, `metrics`
Prometheus' text.
"""

from aglite.control.app import create_control_app

__all__ = ["create_control_app"]
