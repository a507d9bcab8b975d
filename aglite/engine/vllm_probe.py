"""Whether a vLLM server's token ids and log-probabilities are what a trainer needs: found out before any agent runs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import orjson

from aglite.engine.base import SamplingParams
from aglite.errors import EngineError
from aglite.gateway.tokenizer import TextTokenizer

if TYPE_CHECKING:
    from aglite.engine.vllm import VllmEngine

TEXT = "The three primary colours are red, yellow and"
TOKENS = 6
TOP = 5
TEMPERATURE = 0.5
NEWER = "use vLLM 0.10.2 or newer"
PROCESSED = "start it with --logprobs-mode processed_logprobs"


async def probe(engine: VllmEngine, tokenizer: TextTokenizer) -> None:
    """Sample a few tokens at two temperatures and compare. Raises EngineError that says what to change.

    At temperature T, log p_T(a) - log p_T(b) = (log p_1(a) - log p_1(b)) / T for any two tokens: by that it is told
    whether the log-probabilities are those of the distribution that was sampled from.
    """
    prompt = tokenizer.encode(TEXT)
    warm = _read(await _sample(engine, prompt, 1.0), prompt, tokenizer)
    cold = _read(await _sample(engine, prompt, TEMPERATURE), prompt, tokenizer)
    common = sorted(warm.keys() & cold.keys(), key=lambda token: warm[token])
    gap = warm[common[-1]] - warm[common[0]] if common else 0.0
    if len(common) < 2:
        raise EngineError("vLLM named other most probable tokens at each temperature", PROCESSED)
    stretched = cold[common[-1]] - cold[common[0]]
    # Halfway between unscaled and scaled: kernels in half precision do not give the same number twice.
    if gap > 1e-3 and stretched < gap * (1 + 1 / TEMPERATURE) / 2:
        raise EngineError(
            "vLLM's log-probabilities are not those of the distribution that it samples from: at temperature "
            f"{TEMPERATURE:g} two tokens are {stretched:.3f} apart, at 1 they are {gap:.3f}",
            PROCESSED,
        )


async def _sample(engine: VllmEngine, prompt: list[int], temperature: float) -> list[dict[str, Any]]:
    params = SamplingParams(TOKENS, temperature, seed=0, top_logprobs=TOP)
    choices: list[dict[str, Any]] = []
    async with engine.ask(prompt, params) as events:
        async for batch in events:
            for data in batch:
                event = orjson.loads(data) if data != b"[DONE]" else {}
                if "error" in event:
                    raise EngineError(f"vLLM cannot sample: {event['error']}", "see its log")
                choices += event.get("choices", ())
    if not choices:
        raise EngineError("vLLM ended the probe's response without a token", "see its log")
    return choices


def _read(choices: list[dict[str, Any]], prompt: list[int], tokenizer: TextTokenizer) -> dict[int, float]:
    """Check one response; the most probable first tokens with their log-probabilities."""
    if any(choice.get("token_ids") is None for choice in choices):
        raise EngineError("vLLM sent no token ids (return_token_ids)", NEWER)
    if choices[0].get("prompt_token_ids") != prompt:
        raise EngineError("vLLM did not take the probe's token ids as they are", NEWER)
    ids = [token for choice in choices for token in choice["token_ids"]]
    if any(not choice.get("logprobs") for choice in choices if choice["token_ids"]):
        raise EngineError(
            "vLLM sent no log-probabilities", f"{NEWER}, and do not start it with --max-logprobs below {TOP}"
        )
    named = [name for choice in choices for name in (choice.get("logprobs") or {}).get("tokens", ())]
    values = [value for choice in choices for value in (choice.get("logprobs") or {}).get("token_logprobs", ())]
    tops = [top for choice in choices for top in (choice.get("logprobs") or {}).get("top_logprobs", ())]
    if not 1 <= len(ids) <= TOKENS or len(values) != len(ids) or named != [f"token_id:{token}" for token in ids]:
        raise EngineError(f"vLLM's token ids {ids} and log-probabilities of {named} do not belong together", NEWER)
    for token, value, top in zip(named, values, tops, strict=False):
        if value is None or not math.isfinite(value) or value > 1e-3 or abs(top.get(token, value) - value) > 1e-3:
            raise EngineError(f"vLLM's log-probability {value} of {token} cannot be right: {top}", NEWER)
    _check_text("".join(choice.get("text") or "" for choice in choices), ids, tokenizer)
    return {int(name.removeprefix("token_id:")): value for name, value in tops[0].items()} if tops else {}


def _check_text(text: str, ids: Sequence[int], tokenizer: TextTokenizer) -> None:
    """A last character may be incomplete, and some tokenizers drop a first space."""
    ours = tokenizer.decode(ids)
    if ours.strip().rstrip("\ufffd") != text.strip().rstrip("\ufffd"):
        raise EngineError(
            f"vLLM reads the tokens {list(ids)} as {text!r}, the recipe's model as {ours!r}: it serves another model",
            "let `model` name the model that the server runs (its folder or hub id)",
        )
