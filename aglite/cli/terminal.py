"""This terminal as that of a program elsewhere: raw keys one way, output the other, and its size."""

from __future__ import annotations

import os
import select
import signal
import sys
import termios
import tty
from collections.abc import Callable, Iterator
from contextlib import contextmanager

READ_BYTES = 1 << 16


def attach(channel: int, resize: Callable[[int, int], None], ended: int | None = None) -> None:
    """Pass on what is typed to the descriptor `channel`, and what comes from there to the screen, until there is
    nothing more. `resize(rows, columns)` is called at the beginning and when the window changes; `ended` is a
    descriptor that can be read from when it is time to leave. Standard input must be a terminal.
    """
    keys, screen = sys.stdin.fileno(), sys.stdout.fileno()

    def on_resize(*_: object) -> None:
        size = os.get_terminal_size(keys)
        resize(size.lines, size.columns)

    with _raw(keys), _on_signal(signal.SIGWINCH, on_resize):
        on_resize()
        watched = [keys, channel, *([] if ended is None else [ended])]
        while True:
            ready, _, _ = select.select(watched, [], [])
            if channel in ready:
                output = _read(channel)
                if not output:
                    return
                _write(screen, output)
            elif ended in ready:
                return
            if keys in ready:
                typed = _read(keys)
                if not typed:  # the window was closed
                    return
                _write(channel, typed)


@contextmanager
def _raw(terminal: int) -> Iterator[None]:
    before = termios.tcgetattr(terminal)
    try:
        tty.setraw(terminal, termios.TCSADRAIN)  # what was typed already is kept
        yield
    finally:
        termios.tcsetattr(terminal, termios.TCSADRAIN, before)


@contextmanager
def _on_signal(number: int, handler: Callable[..., None]) -> Iterator[None]:
    before = signal.signal(number, handler)
    try:
        yield
    finally:
        signal.signal(number, before)


def _read(descriptor: int) -> bytes:
    try:
        return os.read(descriptor, READ_BYTES)
    except OSError:  # how a terminal ends whose programs have all ended
        return b""


def _write(descriptor: int, data: bytes) -> None:
    while data:
        data = data[os.write(descriptor, data) :]
