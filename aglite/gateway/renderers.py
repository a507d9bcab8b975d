"""Which renderer a model folder needs, and `renderers` (the package) behind our own small interface."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, Protocol

from aglite.errors import AgliteError
from aglite.gateway.chatml import ChatMLRenderer
from aglite.gateway.grammar import Format, after_reasoning, hermes_calls, json_call
from aglite.gateway.parsers import ReplyParser, StopStrings
from aglite.gateway.replies import (
    Piece,
    Reasoning,
    Reply,
    Text,
    ToolArguments,
    ToolStart,
    new_call_id,
)
from aglite.gateway.system_messages import fitted, takes_many
from aglite.gateway.tokenizer import TextTokenizer, read_json

Message = dict[str, Any]


class ChatRenderer(Protocol):
    """Conversation to tokens and back, for one family of models. Messages are in the gateway's normal form."""

    tokenizer: TextTokenizer
    stop_ids: tuple[int, ...]
    """Tokens that end a response."""
    family: str
    keeps_call_ids: bool
    """Whether ids of tool calls reach the prompt."""

    def render(self, messages: Sequence[Message], tools: Sequence[Message]) -> list[int]:
        """The whole prompt with the generation prompt at its end."""
        ...

    def bridge(
        self, prompt: Sequence[int], response: Sequence[int], new: Sequence[Message], tools: Sequence[Message]
    ) -> list[int] | None:
        """The tokens that follow `prompt + response` up to the next response; None if only rendering anew will do."""
        ...

    def parser(self, prompt: Sequence[int], *, tools: Sequence[Message], stops: Sequence[str]) -> ReplyParser: ...

    def calls_format(self, functions: Sequence[tuple[str, Format]], one_call: bool) -> Format | None:
        """How calls of these tools look, given as (name, format of the arguments): one call, or one and more. None if
        it is not known of this family."""
        ...

    def framed(self, prompt: Sequence[int], answer: Format) -> Format | None:
        """How a response to `prompt` looks whose answer, after any reasoning, is `answer`. None if it is not known."""
        ...


# Families by the `model_type` of config.json, for folders whose origin is not written down. A family is taken only if
# its rendering equals the folder's own chat template.
_BY_TYPE = {
    "qwen3": ("qwen3",),
    "qwen3_moe": ("qwen3",),
    "qwen3_5": ("qwen3.5", "qwen3.6", "qwen3.8"),
    "qwen3_5_moe": ("qwen3.5", "qwen3.6", "qwen3.8"),
    "llama": ("llama-3",),
    "gpt_oss": ("gpt-oss",),
    "glm4_moe": ("glm-4.5", "glm-5"),
    "minimax_m2": ("minimax-m2",),
    "deepseek_v3": ("deepseek-v3", "kimi-k2"),
    "nemotron_h": ("nemotron-3", "nemotron-3.5"),
}


def load_renderer(model_dir: Path, continuation: Literal["exact", "rerender"] = "exact") -> ChatRenderer:
    """The renderer of the model in `model_dir`: a family of the `renderers` package that its name or its type points
    to, else our own ChatML where its chat template is ChatML. Raises AgliteError for any other template.

    Under `exact`, renderers keep all reasoning of earlier turns, so that every turn can be continued; under `rerender`
    they do what the model's template does.
    """
    model_dir = Path(model_dir)
    config = read_json(model_dir / "config.json")
    tokenizer = TextTokenizer(model_dir)
    template = chat_template(model_dir, tokenizer)
    if template is not None:
        system = _chatml_system(template, tokenizer)
        if system is not _NOT_CHATML and config.get("model_type") not in ("qwen3", "qwen3_moe"):
            return ChatMLRenderer(tokenizer, system)
    family = _family(config, tokenizer, template)
    if family is not None:
        return PackageRenderer(tokenizer, family, "all" if continuation == "exact" else None)
    raise AgliteError(
        f"no renderer for the model in {model_dir}: its type {config.get('model_type')!r} is not one that the "
        "`renderers` package knows, and its chat template is not plain ChatML",
        "use a model of a known family (Qwen3, Llama 3, GLM, gpt-oss, ...) or one with a ChatML template",
    )


_HERMES = ("qwen3", "prime-qwen3")
"""Families of the package whose tool calls are JSON between `<tool_call>` tokens."""

_CHANNELS = ("gpt-oss", "gemma4", "inkling")
"""Families whose answers stand in channels of their own, not just after `</think>`."""


class PackageRenderer:
    """A family of the `renderers` package."""

    def __init__(self, tokenizer: TextTokenizer, family: str, retention: Literal["all"] | None) -> None:
        self._inner = _build(tokenizer, family, retention)
        self.tokenizer = tokenizer
        self.family = family
        self.stop_ids = tuple(self._inner.get_stop_token_ids())
        self.keeps_call_ids = family.startswith("kimi")
        self._one_system = not takes_many(lambda messages, tools: tokenizer.decode(self._ids(messages, tools)))

    def _ids(self, messages: list[Message], tools: list[Message] | None) -> list[int]:
        return self._inner.render_ids(messages, tools=tools, add_generation_prompt=True)

    def render(self, messages: Sequence[Message], tools: Sequence[Message]) -> list[int]:
        messages = fitted(messages, from_start=True) if self._one_system else list(messages)
        return self._ids(messages, list(tools) or None)

    def bridge(
        self, prompt: Sequence[int], response: Sequence[int], new: Sequence[Message], tools: Sequence[Message]
    ) -> list[int] | None:
        before, sampled = list(prompt), list(response)
        added = fitted(new, from_start=False) if self._one_system else list(new)
        bridged = self._inner.bridge_to_next_turn(before, sampled, added, tools=list(tools) or None)
        if bridged is None or bridged.token_ids[: len(before) + len(sampled)] != before + sampled:
            return None
        return bridged.token_ids[len(before) + len(sampled) :]

    def parser(self, prompt: Sequence[int], *, tools: Sequence[Message], stops: Sequence[str]) -> ReplyParser:
        return PackageParser(self._inner, self.tokenizer, self.stop_ids, list(prompt), list(tools), stops, self.family)

    def calls_format(self, functions: Sequence[tuple[str, Format]], one_call: bool) -> Format | None:
        if self.family in _HERMES:
            return hermes_calls(self.tokenizer, functions, one_call)
        return json_call(functions) if self.family == "llama-3" else None

    def framed(self, prompt: Sequence[int], answer: Format) -> Format | None:
        if self.family in _CHANNELS:
            return None
        opened = _ends_in_reasoning(self.tokenizer, list(prompt), self.stop_ids)
        return after_reasoning(self.tokenizer, answer, opened=opened, stop_ids=self.stop_ids)


class PackageParser:
    """Streams text and reasoning up to the first marker token of the family, then waits for the end and lets the
    package read the whole: its parsers are not incremental."""

    _TEXT_CALLS = ("llama-3",)
    """Families whose tool calls begin without a marker token."""

    def __init__(
        self,
        inner: Any,
        tokenizer: TextTokenizer,
        stop_ids: tuple[int, ...],
        prompt: list[int],
        tools: list[Message],
        stops: Sequence[str],
        family: str,
    ) -> None:
        self.stopped = ""
        self._inner, self._tokenizer, self._prompt, self._tools = inner, tokenizer, prompt, tools
        self._stop_ids = frozenset(stop_ids)
        self._think, self._unthink = tokenizer.token_id("<think>"), tokenizer.token_id("</think>")
        self._detokenizer = tokenizer.detokenizer()
        self._stops = StopStrings(stops)
        self._ids: list[int] = []
        self._waiting = bool(tools) and family in self._TEXT_CALLS
        self._thinking = _ends_in_reasoning(tokenizer, prompt, stop_ids)
        self._said = Reply()
        self._space = ""

    def feed(self, token_ids: Sequence[int]) -> list[Piece]:
        pieces: list[Piece] = []
        for token_id in token_ids:
            self._ids.append(token_id)
            if token_id in self._stop_ids:
                continue
            if self._waiting:
                self._watch(self._detokenizer.feed([token_id]))
            elif token_id in (self._think, self._unthink):
                self._space = ""
                self._thinking = token_id == self._think
            elif token_id in self._tokenizer.added:
                self._waiting = True
            else:
                self._say(self._detokenizer.feed([token_id]), pieces)
        self._said.add(pieces)
        return pieces

    def _watch(self, text: str) -> None:
        self._stops.feed(text)
        self.stopped = self._stops.hit

    def _say(self, text: str, pieces: list[Piece]) -> None:
        """White space at either end of a block is kept back: the family's template puts its own there."""
        text = self._space + self._stops.feed(text)
        self.stopped = self._stops.hit
        body = text.rstrip()
        self._space = text[len(body) :]
        already = self._said.reasoning if self._thinking else self._said.text
        if not already and not pieces:
            body = body.lstrip("\n")
        if body:
            pieces.append(Reasoning(body) if self._thinking else Text(body))

    def finish(self) -> list[Piece]:
        pieces: list[Piece] = []
        if self.stopped and not self._waiting:
            return pieces
        if not self._waiting:
            self._say(self._detokenizer.finish() + self._stops.finish(), pieces)
            return pieces
        parsed = self._inner.parse_response(self._ids, tools=self._tools or None, prompt_ids=self._prompt)
        for kind, whole, said in (
            (Reasoning, parsed.reasoning_content or "", self._said.reasoning),
            (Text, parsed.content or "", self._said.text),
        ):
            whole = whole.strip() if said else whole.strip("\n")
            if whole.startswith(said) and whole != said:
                pieces.append(kind(whole[len(said) :]))
        number = 0
        for call in parsed.tool_calls:
            if call.name and call.status == "ok":
                arguments = call.arguments if call.arguments is not None else {}
                text = arguments if isinstance(arguments, str) else _dumps(arguments)
                pieces += [ToolStart(number, call.id or new_call_id(), call.name), ToolArguments(number, text)]
                number += 1
            else:
                pieces.append(Text(call.raw))
        return pieces


def _ends_in_reasoning(tokenizer: TextTokenizer, prompt: list[int], stop_ids: Sequence[int]) -> bool:
    """Whether the response begins in the middle of reasoning."""
    from renderers.reasoning import prompt_ends_in_reasoning

    return bool(prompt_ends_in_reasoning(tokenizer, prompt, stop_ids=set(stop_ids)))


def chat_template(model_dir: Path, tokenizer: TextTokenizer) -> str | None:
    """The folder's Jinja chat template."""
    file = model_dir / "chat_template.jinja"
    if file.is_file():
        return file.read_text()
    value = tokenizer.config.get("chat_template")
    if isinstance(value, list):
        value = next((one["template"] for one in value if one.get("name") == "default"), None)
    return value


def apply_template(template: str, messages: list[Message], *, tokenizer: TextTokenizer, **extra: Any) -> str:
    """What the model's own template makes of a conversation, as `apply_chat_template` would render it."""
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _dumps
    environment.globals["raise_exception"] = _raise
    names = {key: _token_text(tokenizer.config.get(key)) for key in ("bos_token", "eos_token", "unk_token")}
    return environment.from_string(template).render(messages=messages, **names, **extra)


_NOT_CHATML = object()

_PROBES: tuple[list[Message], ...] = (
    [{"role": "system", "content": "S"}, {"role": "user", "content": "U"}],
    [
        {"role": "system", "content": "S"},
        {"role": "user", "content": "U\nV"},
        {"role": "assistant", "content": "A"},
        {"role": "user", "content": "W"},
    ],
)


def _chatml_system(template: str, tokenizer: TextTokenizer) -> Any:
    """The default system message of a ChatML template (None: it has none), or _NOT_CHATML."""
    if "<|im_start|>" not in template or None in map(tokenizer.token_id, ("<|im_start|>", "<|im_end|>")):
        return _NOT_CHATML
    try:
        for probe in _PROBES:
            expected = "".join(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in probe)
            text = apply_template(template, probe, tokenizer=tokenizer, add_generation_prompt=True)
            if text != expected + "<|im_start|>assistant\n":
                return _NOT_CHATML
        bare = apply_template(template, [{"role": "user", "content": "U"}], tokenizer=tokenizer)
    except Exception:  # a template may raise whatever it likes at a conversation that it does not take
        return _NOT_CHATML
    found = re.fullmatch(
        r"(?:<\|im_start\|>system\n(.*)<\|im_end\|>\n)?<\|im_start\|>user\nU<\|im_end\|>\n", bare, re.DOTALL
    )
    return found[1] if found else _NOT_CHATML


def _family(config: dict[str, Any], tokenizer: TextTokenizer, template: str | None) -> str | None:
    from renderers.base import MODEL_RENDERER_MAP

    for name in (config.get("_name_or_path"), tokenizer.config.get("name_or_path")):
        if name in MODEL_RENDERER_MAP:
            return MODEL_RENDERER_MAP[name]
    if template is None:
        return None
    for family in _BY_TYPE.get(config.get("model_type", ""), ()):
        if _agrees(family, tokenizer, template):
            return family
    return None


def _agrees(family: str, tokenizer: TextTokenizer, template: str) -> bool:
    try:
        renderer = _build(tokenizer, family, None)
        for probe in _PROBES:
            text = apply_template(template, probe, tokenizer=tokenizer, add_generation_prompt=True)
            if renderer.render_ids(list(probe), add_generation_prompt=True) != tokenizer.encode(text):
                return False
    except Exception:  # a family that cannot even be built on this tokenizer is not the model's
        return False
    return True


def _build(tokenizer: TextTokenizer, family: str, retention: Literal["all"] | None) -> Any:
    from renderers import create_renderer
    from renderers.configs import config_from_name

    config = config_from_name(family)
    assert config is not None
    if retention is not None:
        config = type(config)(thinking_retention=retention)
    return create_renderer(tokenizer, config)


def _token_text(value: Any) -> str:
    return value.get("content", "") if isinstance(value, dict) else value or ""


def _dumps(value: Any, **_: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _raise(message: str) -> None:
    raise ValueError(message)
