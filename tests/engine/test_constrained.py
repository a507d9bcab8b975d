"""Constrained decoding on a random model: what comes out obeys its grammar, whatever the weights would rather say, and
the recorded log-probabilities are those of the model itself."""

from __future__ import annotations

import functools
import json
import time
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch
from engine_driver import Result, collect, make_engine
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tiny import tiny_model
from transformers import LlamaConfig, LlamaForCausalLM

from aglite.engine.base import Chunk, SamplingParams
from aglite.engine.embedded.engine import EmbeddedEngine
from aglite.errors import GrammarError
from aglite.gateway import grammar
from aglite.gateway.tokenizer import TextTokenizer

END = 2  # <|im_end|>
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "ü", "\n"]}, "maxItems": 2},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tiny_model(tmp_path_factory.mktemp("constrained") / "m", markers=["<think>", "</think>"])
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig.from_pretrained(path))
    for name, parameter in model.named_parameters():
        torch.nn.init.normal_(parameter, mean=float("norm" in name), std=0.2)
    model.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> TextTokenizer:
    return TextTokenizer(folder)


@pytest.fixture(scope="module")
def engine(folder: Path) -> EmbeddedEngine:
    return make_engine(folder, context_length=600, kv_tokens=8192)


def tag(form: dict) -> str:
    return json.dumps({"type": "structural_tag", "format": form})


def json_tag(schema: dict) -> str:
    return tag(grammar.json_text(schema, lenient=False))


def params(**changes: Any) -> SamplingParams:
    settings: dict[str, Any] = {"max_tokens": 400, "temperature": 1.0, "seed": 1, "stop_token_ids": (END,)}
    return SamplingParams(**{**settings, **changes})


def run(engine: EmbeddedEngine, requests: list[SamplingParams], prompt: tuple[int, ...] = (5, 6, 7)) -> list[Result]:
    for number, asked in enumerate(requests):
        engine.submit(number, list(prompt), asked)
    results = collect(engine, {})
    return [results[number] for number in range(len(requests))]


def text_of(tokenizer: TextTokenizer, result: Result) -> str:
    assert result.reason == "stop" and result.tokens[-1] == END
    return tokenizer.decode(result.tokens[:-1])


def recomputed(engine: EmbeddedEngine, result: Result, temperature: float) -> list[float]:
    return engine.logprobs([[5, 6, 7, *result.tokens]], temperature)[0][2:]


@pytest.mark.parametrize(
    "how", [{}, {"temperature": 0.0}, {"temperature": 0.3}, {"top_p": 0.9}, {"top_k": 5}, {"min_p": 0.2}], ids=str
)
def test_replies_obey_and_log_probabilities_are_the_models_own(engine, tokenizer, how) -> None:
    results = run(engine, [params(grammar=json_tag(PERSON), seed=seed, **how) for seed in range(6)])
    for result in results:
        jsonschema.validate(json.loads(text_of(tokenizer, result)), PERSON)
        expected = recomputed(engine, result, how.get("temperature", 1.0))
        assert result.logprobs == pytest.approx(expected, abs=2e-4)
        assert min(result.logprobs) < -5, "a random model says no JSON of its own accord"
    texts = {tuple(result.tokens) for result in results}
    assert len(texts) == 1 if how.get("temperature") == 0.0 else len(texts) > 1
    again = run(engine, [params(grammar=json_tag(PERSON), seed=3, **how)])
    assert again[0].tokens == results[3].tokens, "a seed decides, whatever else is in the batch"


def test_free_requests_in_the_same_batch_are_left_alone(engine, tokenizer) -> None:
    free = [params(seed=seed, max_tokens=30, temperature=t) for seed, t in ((1, 1.0), (2, 0.7), (3, 0.0))]
    alone = run(engine, free)
    mixed = run(engine, [free[0], params(grammar=json_tag(PERSON)), free[1], free[2], params(grammar=json_tag({}))])
    for one, other in zip(alone, [mixed[0], mixed[2], mixed[3]], strict=True):
        assert one.tokens == other.tokens and one.logprobs == pytest.approx(other.logprobs, abs=1e-4)
    jsonschema.validate(json.loads(text_of(tokenizer, mixed[1])), PERSON)


def test_tool_calls(engine, tokenizer) -> None:
    nothing = {"type": "object", "maxProperties": 0}
    functions = [
        (name, grammar.json_text(schema, lenient=True)) for name, schema in (("say", PERSON), ("end", nothing))
    ]
    for one_call in (True, False):
        asked = tag(grammar.hermes_calls(tokenizer, functions, one_call))
        for result in run(engine, [params(grammar=asked, seed=seed) for seed in range(4)]):
            blocks = tokenizer.decode([token for token in result.tokens if token != END]).split("</tool_call>")
            whole = [block.split("<tool_call>\n")[1] for block in blocks if block.endswith("}\n")]
            assert len(whole) == 1 if one_call else whole
            for block in whole:
                call = json.loads(block)
                assert call["name"] in ("say", "end")
                if call["name"] == "say":
                    jsonschema.validate(call["arguments"], PERSON)


def test_reasoning_before_the_answer(engine, tokenizer) -> None:
    think, unthink = tokenizer.token_id("<think>"), tokenizer.token_id("</think>")
    answer = grammar.json_text({"enum": [1, 2]}, lenient=False)
    for opened in (False, True):
        form = grammar.after_reasoning(tokenizer, answer, opened=opened, stop_ids=[END])
        seen = set()
        for result in run(engine, [params(grammar=tag(form), seed=seed, max_tokens=500) for seed in range(6)]):
            if result.reason == "length":
                continue
            said = text_of(tokenizer, result)
            seen.add(unthink in result.tokens)
            assert (result.tokens[0] == think) == (unthink in result.tokens and not opened)
            assert said.split("</think>")[-1].strip() in ("1", "2")
        assert seen == {True} if opened else False in seen


def test_an_update_in_the_middle(engine, tokenizer, folder) -> None:
    """Preempted, pool dropped, other weights: the reply goes on where it was and is still whole."""
    asked = params(grammar=json_tag(PERSON), seed=5)
    for number in (0, 1):
        engine.submit(number, [5, 6, 7], asked)
    results: dict[int, Result] = {}
    while len(results.get(0, Result()).tokens) < 6:
        collect(engine, results, steps=1)
    engine.preempt()
    assert not engine.has_work
    model = LlamaForCausalLM.from_pretrained(folder)
    original = {name: value.clone() for name, value in model.state_dict().items()}
    changed = {name: value + 0.02 * torch.randn_like(value) for name, value in original.items()}
    engine.load_weights((name, value) for name, value in changed.items() if "lm_head" in name or "model" in name)
    engine.resume(1)
    collect(engine, results)
    newer = [recomputed(engine, result, 1.0) for result in results.values()]
    engine.load_weights(original.items())
    older = [recomputed(engine, result, 1.0) for result in results.values()]
    engine.resume(0)
    for result, old, new in zip(results.values(), older, newer, strict=True):
        jsonschema.validate(json.loads(text_of(tokenizer, result)), PERSON)
        assert set(result.versions) == {0, 1}
        expected = [new[at] if version else old[at] for at, version in enumerate(result.versions)]
        assert result.logprobs == pytest.approx(expected, abs=2e-4)


def test_a_request_that_gives_up_its_place_goes_on_where_it_was(folder, tokenizer) -> None:
    """A pool too small for all: sequences are put back and computed anew, with their matchers."""
    wide, tight = (make_engine(folder, context_length=128, kv_tokens=size) for size in (4096, 256))
    requests = [params(grammar=json_tag(PERSON), seed=seed, max_tokens=80) for seed in range(6)]
    prompt = tuple(range(10, 50))
    for one, other in zip(run(wide, requests, prompt), run(tight, requests, prompt), strict=True):
        assert one.tokens == other.tokens
    assert tight.stats().prefill_tokens > wide.stats().prefill_tokens


def test_the_end(engine, tokenizer) -> None:
    """A response ends with a stop token if it has one, by itself if it has none, and is cut like any other."""
    asked = json_tag({"const": "x"})
    with_stop, without, cut = run(
        engine, [params(grammar=asked), params(grammar=asked, stop_token_ids=()), params(grammar=asked, max_tokens=2)]
    )
    assert text_of(tokenizer, with_stop) == '"x"'
    assert without.reason == "stop" and tokenizer.decode(without.tokens) == '"x"'
    assert cut.reason == "length" and len(cut.tokens) == 2


def failure(engine: EmbeddedEngine, asked: str) -> str:
    engine.submit(99, [5, 6], params(grammar=asked))
    for _ in range(1000):
        for number, item in engine.step():
            assert number == 99 and isinstance(item, GrammarError), item
            assert not engine.has_work
            return item.message
    raise AssertionError("no failure")


UNENFORCEABLE = {
    "keyword": ({"not": {"type": "string"}}, "not"),
    "unique": ({"type": "array", "uniqueItems": True}, "uniqueItems"),
    "type": ({"type": "strin"}, "strin"),
    "pattern": ({"type": "string", "pattern": "^(?=a)$"}, "look-around"),
    "contradiction": ({"allOf": [{"type": "string"}, {"type": "integer"}]}, "nsatisfiable"),
    "loop": ({"$ref": "#"}, "nothing can satisfy"),
    "remote": ({"$ref": "http://127.0.0.1:1/schema"}, "127.0.0.1"),
    "explosion": (functools.reduce(lambda inner, _: {"anyOf": [inner] * 4}, range(8), {"type": "null"}), "too large"),
}


@pytest.mark.parametrize("name", UNENFORCEABLE)
def test_schemas_that_cannot_be_enforced(engine, name) -> None:
    schema, said = UNENFORCEABLE[name]
    message = failure(engine, json_tag(schema))
    assert said in message and "\n" not in message and len(message) < 400


NO_TAGS = ["", "{}", "[1]", '{"format": {"type": "regex"}}', '{"format": {"type": "token", "token": "<no>"}}']


@pytest.mark.parametrize("text", NO_TAGS)
def test_what_is_no_structural_tag(engine, text) -> None:
    assert failure(engine, text)


HOSTILE = {
    "enum": {"enum": [f"value {at}" for at in range(5000)]},
    "properties": {"type": "object", "properties": {f"p{at}": {"type": "integer"} for at in range(1500)}},
    "items": {"type": "array", "items": {"type": "integer"}, "minItems": 10**9},
    "length": {"type": "string", "minLength": 10**9},
    "pattern": {"type": "string", "pattern": "^((a{1,100}){1,100}){1,100}$"},
    "states": {"type": "string", "pattern": "^(a|b)*a(a|b){25}$"},
    "deep": functools.reduce(lambda inner, _: {"properties": {"a": inner}, "required": ["a"]}, range(49), {}),
    "guidance": {"type": "object", "x-guidance": {"whitespace_pattern": "(a{1,999}){1,999}", "coerce_one_of": 5}},
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_schemas_neither_stop_the_engine_nor_those_beside(engine, name) -> None:
    """They are served until max_tokens or refused, soon, and a free request beside them ends as ever."""
    began = time.process_time()
    engine.submit(1, [5, 6, 7], params(grammar=json_tag(HOSTILE[name]), max_tokens=40))
    engine.submit(2, [5, 6, 7], params(max_tokens=20))
    ended: dict[int, Any] = {}
    while engine.has_work:
        for number, item in engine.step():
            if isinstance(item, GrammarError) or item.finish_reason:
                ended[number] = item
    assert isinstance(ended[2], Chunk) and ended.keys() == {1, 2}
    assert time.process_time() - began < 30


def test_cancelled_while_compiling(engine) -> None:
    engine.submit(1, [5, 6], params(grammar=json_tag({"enum": list(range(3000))})))
    engine.cancel(1)
    assert not engine.has_work and engine.step() == []
    assert len(run(engine, [params(max_tokens=3)])) == 1


def test_a_folder_without_a_tokenizer_cannot(llama) -> None:
    engine = make_engine(llama[1])
    assert not engine.info.constrains
    with pytest.raises(GrammarError, match=r"tokenizer\.json"):
        engine.submit(1, [1], params(grammar=json_tag({})))


def test_most_probable_tokens(engine) -> None:
    engine.submit(1, [5, 6, 7], params(max_tokens=8, top_logprobs=4, temperature=0.5))
    engine.submit(2, [5, 6, 7], params(max_tokens=8))
    engine.submit(3, [5, 6, 7], params(grammar=json_tag(PERSON), max_tokens=8, top_logprobs=20))
    chunks: dict[int, list[Chunk]] = {}
    while engine.has_work:
        for number, chunk in engine.step():
            chunks.setdefault(number, []).append(chunk)
    assert all(chunk.top is None for chunk in chunks[2])
    for number, count in ((1, 4), (3, 20)):
        row = [5, 6, 7]
        for chunk in chunks[number]:
            (place,) = chunk.top
            assert len(place) == count and [value for _, value in place] == sorted((v for _, v in place), reverse=True)
            every = [engine.logprobs([[*row, token]], 0.5 if number == 1 else 1.0)[0][-1] for token, _ in place[:2]]
            assert [value for _, value in place[:2]] == pytest.approx(every, abs=2e-4)
            assert chunk.logprobs[0] <= place[0][1] + 1e-6
            row += chunk.token_ids


def test_a_sampled_token_has_one_log_probability(engine) -> None:
    """To the last bit: a client finds its token among the most probable ones with the value that the token has."""
    for number, temperature in ((1, 0.0), (2, 0.7), (3, 1.0)):
        asked = params(max_tokens=100, top_logprobs=20, temperature=temperature, seed=number, stop_token_ids=())
        engine.submit(number, [5, 6, 7], asked)
    found = 0
    while engine.has_work:
        for _, chunk in engine.step():
            ((token,), (logprob,), (place,)) = chunk.token_ids, chunk.logprobs, chunk.top
            found += token in dict(place)
            assert dict(place).get(token, logprob) == logprob and place == sorted(place, key=lambda pair: -pair[1])
            assert logprob <= place[0][1]
    assert found > 150


def _range(low: int, more: int) -> dict:
    return {"type": "integer", "minimum": low, "maximum": low + more}


VALUES = st.text(max_size=4) | st.integers(-99, 99) | st.booleans() | st.none()
LEAVES = st.one_of(
    st.just({"type": "boolean"}),
    st.just({"type": "null"}),
    st.builds(_range, st.integers(-999, 999), st.integers(0, 999)),
    st.builds(lambda most: {"type": "string", "maxLength": most}, st.integers(0, 6)),
    st.lists(VALUES, min_size=1, max_size=4).map(lambda values: {"enum": values}),
)
NAMES = st.text(min_size=1, max_size=4)


def _object(properties: dict, count: int) -> dict:
    required = list(properties)[:count]
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


SCHEMAS = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.builds(lambda items, most: {"type": "array", "items": items, "maxItems": most}, inner, st.integers(0, 3)),
        st.builds(_object, st.dictionaries(NAMES, inner, max_size=3), st.integers(0, 3)),
        st.lists(inner, min_size=1, max_size=2).map(lambda options: {"anyOf": options}),
    ),
    max_leaves=5,
)


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(SCHEMAS, st.integers(0, 2**32))
def test_any_schema(engine, tokenizer, schema, seed) -> None:
    (result,) = run(engine, [params(grammar=json_tag(schema), seed=seed, max_tokens=500)])
    if result.reason == "stop":
        jsonschema.validate(json.loads(text_of(tokenizer, result)), schema)
    else:
        assert len(result.tokens) == 500, "white space between many parts"
