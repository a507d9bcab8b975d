"""Constrained decoding: which tokens may come next, by llguidance.

A request says what its response must look like as a structural tag of xgrammar (`SamplingParams.grammar`); here it
becomes a Lark grammar of llguidance. That library needs nothing but itself, computes a mask in well under a
millisecond without any preparation, refuses what it cannot enforce instead of passing over it, and bounds its work,
so that no schema of an agent stops the engine.
"""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import orjson
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

from aglite.errors import GrammarError
from aglite.gateway.tokenizer import TextTokenizer

_KEPT = 32  # compiled grammars
_NOTHING_FITS = ("NoExtension", "NoExtensionBias")  # reasons to stop before the first token
_LIMITS = LLParserLimits(verbose_errors=False)


class Matcher:
    """How far one response has got in its grammar."""

    def __init__(self, inner: LLMatcher, vocab: int, ends: Sequence[int]) -> None:
        self._inner = inner
        self._vocab = vocab
        self._ends = ends

    @property
    def complete(self) -> bool:
        """Whether nothing but the end of the response may follow."""
        return self._inner.is_stopped()

    def allowed(self, stop: frozenset[int]) -> np.ndarray:
        """bool [vocab]: the tokens that may come next; those of `stop` where the response may end. Raises GrammarError
        if that takes more work than is allowed."""
        bits = np.unpackbits(np.frombuffer(self._inner.compute_bitmask(), np.uint8), bitorder="little")
        if self._inner.is_error():
            raise GrammarError(_reason(self._inner.get_error()))
        mask = np.zeros(self._vocab, bool)
        known = min(self._vocab, len(bits))
        mask[:known] = bits[:known]
        for token in self._ends:
            mask[token] = False
        if self._inner.is_accepting():
            mask[[token for token in stop if token < self._vocab]] = True
        if not mask.any():
            raise GrammarError("no token of the model's vocabulary can go on from here")
        return mask

    def take(self, token: int) -> None:
        """Go on with a token that was allowed. Raises GrammarError as `allowed`."""
        if not self._inner.consume_token(token):
            raise GrammarError(_reason(self._inner.get_error()))


class Grammars:
    """Compiles grammars for one model's tokenizer, in a thread of its own, and keeps the latest."""

    def __init__(self, model_dir: Path, vocab: int) -> None:
        """vocab: width of the model's logits, which may exceed the tokenizer's."""
        self._model_dir = model_dir
        self._vocab = vocab
        self._compiled: OrderedDict[str, LLMatcher] = OrderedDict()
        self._thread = ThreadPoolExecutor(1, "grammar")

    def start(self, text: str) -> Future[Matcher]:
        """Begin to compile a structural tag; the future fails with GrammarError for what cannot be enforced."""
        return self._thread.submit(self._matcher, text)

    def _matcher(self, text: str) -> Matcher:
        compiled = self._compiled.pop(text, None) or self._compile(text)
        self._compiled[text] = compiled
        if len(self._compiled) > _KEPT:
            self._compiled.popitem(last=False)
        return Matcher(compiled.deep_copy(), self._vocab, self._tokenizer.eos_tokens)

    def _compile(self, text: str) -> LLMatcher:
        lark = lark_of(text, self._text.token_id)
        matcher = LLMatcher(self._tokenizer, LLMatcher.grammar_from_lark(lark), log_level=0, limits=_LIMITS)
        if not matcher.is_error():
            matcher.compute_bitmask()  # some grammars turn out to be empty only now
        if matcher.is_error():
            raise GrammarError(_reason(matcher.get_error()))
        return matcher

    @functools.cached_property
    def _text(self) -> TextTokenizer:
        return TextTokenizer(self._model_dir)

    @functools.cached_property
    def _tokenizer(self) -> LLTokenizer:
        return LLTokenizer(TokenizerWrapper(_Vocabulary(self._text, self._vocab)), slices=LLTokenizer.json_slices())


class _Vocabulary:
    """The bytes of every token, exactly as the gateway turns tokens into text.

    Tokens outside the learned vocabulary are never part of a text: a grammar has to name them.
    """

    def __init__(self, tokenizer: TextTokenizer, vocab: int) -> None:
        self._tokenizer = tokenizer
        size = min(vocab, tokenizer.vocab_size)
        self.tokens = [tokenizer.token_bytes(token) for token in range(size)]
        self.special_token_ids = sorted(token for token in tokenizer.added if token < size)
        self.bos_token_id = None
        eos = tokenizer.eos_token_id
        self.eos_token_id = eos if eos is not None and eos < size else size - 1

    def __call__(self, text: str | bytes) -> list[int]:
        return self._tokenizer.encode_plain(text if isinstance(text, str) else text.decode(errors="replace"))


# structural tag to Lark


def lark_of(text: str, token_id: Any) -> str:
    """The Lark grammar of a structural tag. `token_id(name)` gives the id of a token, None if there is none. Raises
    GrammarError for a format that is not one of those that the gateway writes."""
    try:
        tag = orjson.loads(text)
        return f"start: {_expression(tag['format'], token_id)}\n"
    except (orjson.JSONDecodeError, KeyError, TypeError, AttributeError) as error:
        raise GrammarError(f"the grammar is no structural tag: {type(error).__name__}: {error}") from None


def _expression(form: dict[str, Any], token_id: Any) -> str:
    kind = form["type"]
    if kind == "const_string":
        return orjson.dumps(form["value"]).decode()
    if kind == "json_schema":
        return _json(form)
    if kind == "token":
        return f"<[{_token(form['token'], token_id)}]>"
    if kind == "any_tokens":
        excluded = ",".join(str(_token(one, token_id)) for one in form["exclude_tokens"])
        return f"(<[^{excluded}]>)*" if excluded else "(<[*]>)*"
    if kind == "sequence":
        return "(" + " ".join(_expression(one, token_id) for one in form["elements"]) + ")"
    if kind == "or":
        return "(" + " | ".join(_expression(one, token_id) for one in form["elements"]) + ")"
    if kind in ("optional", "star"):
        return f"({_expression(form['content'], token_id)})" + ("?" if kind == "optional" else "*")
    raise GrammarError(f"the embedded engine does not know the format {kind!r} of structural tags")


def _json(form: dict[str, Any]) -> str:
    schema = form["json_schema"]
    options = dict(schema.get("x-guidance") or {})
    most = form.get("max_whitespace_cnt")
    if most is not None:
        options["whitespace_pattern"] = rf"[\x20\x0A\x0D\x09]{{1,{int(most)}}}"
    return "%json " + orjson.dumps({**schema, "x-guidance": options}).decode()


def _token(token: int | str, token_id: Any) -> int:
    number = token if isinstance(token, int) else token_id(token)
    if number is None:
        raise GrammarError(f"the model has no token {token!r}")
    return number


def _reason(error: str) -> str:
    """What llguidance says, without the lines of the grammar that it quotes."""
    lines = [line.strip() for line in error.splitlines()]
    if lines[0] in _NOTHING_FITS:
        return "nothing can satisfy the schema"
    _, found, said = lines[0].partition("failed to compile JSON schema: ")
    if said.endswith("error:"):  # a pattern: the line that says what is wrong with it comes later
        said += next((line.removeprefix("error:") for line in lines if line.startswith("error:")), "")
    return f"the schema cannot be enforced: {said}" if found else lines[0]
