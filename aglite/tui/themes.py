"""The two looks. Blue and orange carry meaning, so red-green blindness loses nothing."""

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
        "faint": "#6b7394",
        "footer-key-foreground": "#7aa2f7",
        "footer-background": "#16161e",
    },
)

LIGHT = Theme(
    name="aglite-light",
    dark=False,
    primary="#2e5cc5",
    secondary="#7847bd",
    accent="#b65c00",
    success="#00786f",
    warning="#8f5e15",
    error="#c0304d",
    foreground="#2a2f45",
    background="#f4f5f9",
    surface="#ffffff",
    panel="#e4e7f1",
    variables={
        "line": "#b4bad0",
        "faint": "#6a7088",
        "footer-key-foreground": "#2e5cc5",
        "footer-background": "#f4f5f9",
    },
)


def preferred() -> str:
    """Light where the terminal says that its background is (`COLORFGBG`, as set by rxvt, Konsole and others)."""
    background = os.environ.get("COLORFGBG", "").rpartition(";")[2]
    return LIGHT.name if background in ("7", "15") else DARK.name
