"""The tokens of a rollout's samples, each with its mask, log-probability or policy version as colour. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from rich.cells import cell_len
from textual.content import Content, Span

Colours = Literal["mask", "logprob", "version"]
MODES: tuple[Colours, ...] = ("mask", "logprob", "version")

PROBABLE = ((-0.05, "$success", "p > 0.95"), (-0.7, "$primary", "> 0.5"), (-2.3, "$warning", "> 0.1"))
UNLIKELY = ("bold $error", "less")
"""Colours of log-probabilities: each holds down to its bound."""
VERSIONS = ("$primary", "$accent", "$success", "$secondary", "$warning")
WITHOUT = "$faint"


class Tokens:
    """Lays samples out as text, token after token, with a tint that changes from each to the next."""

    def __init__(self, samples: Sequence[Mapping[str, Any]], numbers: Mapping[int, int], mode: Colours) -> None:
        """`numbers`: those that calls are shown with."""
        self._samples = samples
        self._numbers = numbers
        self._mode = mode

    def layout(self, width: int) -> list[Content]:
        if not self._samples:
            return [Content.styled(" no call of this rollout carries loss, so there is no sample", "$faint")]
        lines = [self._legend(), Content("")]
        for number, sample in enumerate(self._samples, 1):
            lines += [self._head(number, sample), *self._text(sample, max(width, 4)), Content("")]
        return [line.truncate(width, ellipsis=True) if line.cell_length > width else line for line in lines]

    def _legend(self) -> Content:
        if self._mode == "mask":
            items = [("loss", "bold $success"), ("no loss", WITHOUT)]
        elif self._mode == "logprob":
            items = [(text, style) for _, style, text in PROBABLE]
            items += [(UNLIKELY[1], UNLIKELY[0]), ("not sampled", WITHOUT)]
        else:
            known = sorted({version for sample in self._samples for version in sample["versions"] if version >= 0})
            items = [(f"v{version}", self._of_version(version)) for version in known]
            items.append(("not sampled", WITHOUT))
        parts: list[Any] = [(f" coloured by {self._mode} (v changes it): ", "$faint")]
        for text, style in items:
            parts += [("■ ", style), f"{text}  "]
        return Content.assemble(*parts)

    def _head(self, number: int, sample: Mapping[str, Any]) -> Content:
        calls = ", ".join(
            f"{self._numbers.get(call, call)}{'' if trained else ' (no loss)'}" for call, trained in sample["calls"]
        )
        trained, total = sum(sample["mask"]), len(sample["ids"])
        held = sum(sample["constrained"])
        grammar = f", {held} under a grammar" if held else ""
        return Content.assemble(
            ("━━ ", "$line"),
            (f"sample {number} ", "bold $primary"),
            (f"· calls {calls} · {trained} of {total} tokens carry loss{grammar}{self._confidence(sample)}", "$faint"),
        )

    def _confidence(self, sample: Mapping[str, Any]) -> str:
        sampled = [value for value, mask in zip(sample["logprobs"], sample["mask"], strict=True) if mask]
        return f" · mean logprob {sum(sampled) / len(sampled):.2f}" if sampled else ""

    def _text(self, sample: Mapping[str, Any], width: int) -> list[Content]:
        """The tokens, wrapped at `width`; where a token ends in a line break, so does the line."""
        texts = sample["texts"] or [f"{id} " for id in sample["ids"]]
        lines: list[Content] = []
        text, spans, column = "", [], 0
        for index, token in enumerate(texts):
            style = f"{self._style(sample, index)} on ${'tint' if index % 2 else 'background'}"
            for piece, ends in _pieces(token):
                if column + cell_len(piece) > width and column:
                    lines.append(Content(text, spans))
                    text, spans, column = "", [], 0
                while cell_len(piece) > width:  # longer than a line by itself
                    lines.append(Content.styled(piece[: width // 2], style))
                    piece = piece[width // 2 :]
                spans.append(Span(len(text), len(text) + len(piece), style))
                text += piece
                column += cell_len(piece)
                if ends:
                    lines.append(Content(text, spans))
                    text, spans, column = "", [], 0
        if text:
            lines.append(Content(text, spans))
        return lines

    def _style(self, sample: Mapping[str, Any], index: int) -> str:
        if not sample["mask"][index]:
            return WITHOUT
        if self._mode == "mask":
            return "bold $success"
        if self._mode == "version":
            return self._of_version(sample["versions"][index])
        value = sample["logprobs"][index]
        return next((style for bound, style, _ in PROBABLE if value >= bound), UNLIKELY[0])

    def _of_version(self, version: int) -> str:
        return VERSIONS[version % len(VERSIONS)]


def _pieces(token: str) -> list[tuple[str, bool]]:
    """A token as it is shown: line breaks as a sign and a break, what a terminal would obey as a sign."""
    token = "".join(c if c.isprintable() or c == "\n" else "⇥" if c == "\t" else "·" for c in token)
    first, *rest = token.split("\n")
    pieces = [(first, False)]
    for more in rest:
        pieces[-1] = (pieces[-1][0] + "⏎", True)
        pieces.append((more, False))
    return [piece for piece in pieces if piece[0]]
