"""Blocking work that a stop need not wait for."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import psutil

P = ParamSpec("P")
Result = TypeVar("Result")


async def abandonable(function: Callable[P, Result], *args: P.args, **kwargs: P.kwargs) -> Result:
    """Run `function` in a thread, as asyncio.to_thread does, but when this is cancelled nobody waits for its end.

    A download or a recipe's own task function may take minutes. The child processes that it has started by then are
    killed; the thread itself dies with the process. So it must leave nothing behind that a restart cannot mend.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Result] = loop.create_future()
    before = {child.pid for child in psutil.Process().children()}

    def settle(result: Any, error: BaseException | None) -> None:
        if future.done():
            return
        if error is None:
            future.set_result(result)
        else:
            future.set_exception(error)

    def work() -> None:
        result, error = None, None
        try:
            result = function(*args, **kwargs)
        except BaseException as caught:  # the one who awaits hears of it
            error = caught
        if not loop.is_closed():
            loop.call_soon_threadsafe(settle, result, error)

    threading.Thread(target=work, name=f"abandonable {function.__name__}", daemon=True).start()
    try:
        return await future
    except asyncio.CancelledError:
        for child in psutil.Process().children(recursive=True):
            if child.pid not in before:
                child.kill()
        raise
