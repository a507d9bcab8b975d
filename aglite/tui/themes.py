"""The looks. Blue and orange carry meaning, and every mark has a shape, so that red-green blindness loses nothing."""

from __future__ import annotations

import os

from textual.theme import Theme

DARK = Theme(
    name="aglite-dark",
    dark=True,
    primary="#7aa2f7",
    secondary="#bb9af7",
    accent="#ff9e64",
    success="#73daca",
    warning="#e0af68",
    error="#f7768e",
    foreground="#c8d0e8",
    background="#16161e",
    surface="#1a1b26",
    panel="#24283b",
    variables={
        "line": "#3b4261",
        "faint": "#7d86a8",
        "cursor": "#2c3554",
        "cursor-text": "#e4e9f7",
        "tint": "#232638",
    },
)

LIGHT = Theme(
    name="aglite-light",
    dark=False,
    primary="#2e5cc5",
    secondary="#7847bd",
    accent="#a85200",
    success="#00706a",
    warning="#85560f",
    error="#c0304d",
    foreground="#2a2f45",
    background="#f4f5f9",
    surface="#ffffff",
    panel="#e4e7f1",
    variables={
        "line": "#b4bad0",
        "faint": "#636984",
        "cursor": "#cfdaf4",
        "cursor-text": "#171b2c",
        "tint": "#e6e9f3",
    },
)

# Terminals with 16 colours: each is one of theirs, so that none is turned into its neighbour.
PLAIN = Theme(
    name="aglite-16",
    dark=True,
    primary="#5555ff",
    secondary="#ff55ff",
    accent="#ffff55",
    success="#55ffff",
    warning="#ffff55",
    error="#ff5555",
    foreground="#ffffff",
    background="#000000",
    surface="#000000",
    panel="#000000",
    variables={
        "line": "#555555",
        "faint": "#aaaaaa",
        "cursor": "#0000aa",
        "cursor-text": "#ffffff",
        "tint": "#000000",
    },
)


def dark(color_system: str | None) -> str:
    """The dark one for a terminal, plain where it has 16 colours."""
    return PLAIN.name if color_system == "standard" else DARK.name


def preferred(color_system: str | None) -> str:
    """The dark one, or light where the terminal says that its background is (`COLORFGBG`, as set by rxvt, Konsole and
    others) and it has more than 16 colours."""
    background = os.environ.get("COLORFGBG", "").rpartition(";")[2]
    light = background in ("7", "15") and color_system != "standard"
    return LIGHT.name if light else dark(color_system)
