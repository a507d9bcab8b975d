"""Posting a message to a webhook, without a word of its address in what goes wrong."""

from __future__ import annotations

from typing import Any

import aiohttp

from aglite.errors import Undelivered

ANSWER_S = 10.0
"""Longest time that a webhook may take."""


async def post(url: str, message: dict[str, Any]) -> None:
    """Send it once, as JSON. Raises Undelivered; whether trying again makes sense is in it."""
    try:
        async with (
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(ANSWER_S), trust_env=True) as session,
            session.post(url, json=message, allow_redirects=False) as answer,
        ):
            status = answer.status
    except TimeoutError:
        raise Undelivered(f"no answer within {ANSWER_S:.0f} s") from None
    except aiohttp.ClientConnectorError as error:
        raise Undelivered(f"no connection ({error.os_error.strerror or type(error.os_error).__name__})") from None
    except (aiohttp.ClientError, ValueError) as error:
        raise Undelivered(type(error).__name__) from None  # its text may have the address in it
    if not 200 <= status < 300:
        raise Undelivered(f"HTTP status {status}", lasting=status < 500 and status not in (408, 429))
