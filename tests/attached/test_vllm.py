"""A vLLM server that somebody else runs, stood in for by a small one that speaks its protocol."""

import asyncio
import contextlib
from dataclasses import replace

import pytest
from aiohttp import web
from bench import until
from staging import running
from upstreams import VllmServer

from aglite.engine.base import EngineBusy, RequestRefused, SamplingParams
from aglite.engine.vllm import VllmEngine
from aglite.errors import AgliteError, EngineError

PROMPT = [260, 261, 262]


async def collect(stream):
    return [chunk async for chunk in stream]


async def test_tokens_and_logprobs_are_those_that_the_server_sent(server, engine):
    chunks = await collect(engine.generate(PROMPT, SamplingParams(5, 0.7, seed=3, stop_token_ids=(2,))))
    ids = [token for chunk in chunks for token in chunk.token_ids]
    logprobs = [value for chunk in chunks for value in chunk.logprobs]
    assert len(ids) == len(logprobs) == 5
    assert logprobs == [server.distribution(at, 0.7)[token] for at, token in enumerate(ids)]
    assert [chunk.finish_reason for chunk in chunks][-1] == "length"
    assert all(chunk.finish_reason is None for chunk in chunks[:-1])


async def test_a_response_that_nobody_reads_along_comes_in_one_piece(server, engine):
    params = SamplingParams(9, 0.7, seed=3, top_logprobs=2)
    streamed = await collect(engine.generate(PROMPT, params))
    (whole,) = await collect(engine.generate(PROMPT, replace(params, whole=True)))
    assert [sent["stream"] for sent in server.requests] == [True, False]
    assert whole.token_ids == [token for chunk in streamed for token in chunk.token_ids]
    assert whole.logprobs == [value for chunk in streamed for value in chunk.logprobs]
    assert whole.top == [top for chunk in streamed for top in chunk.top]
    assert whole.finish_reason == "length"
    server.pause = asyncio.Event()
    task = asyncio.create_task(collect(engine.generate(PROMPT, replace(params, whole=True))))
    await until(lambda: server.running == 1)
    task.cancel()
    await until(lambda: server.running == 0)
    assert server.aborted == 1


async def test_every_setting_is_said_so_that_none_comes_from_the_models_folder(server, engine):
    params = SamplingParams(4, 0.7, 0.9, 40, 0.05, 7, (2, 5), grammar='{"type": "structural_tag"}')
    await collect(engine.generate(PROMPT, params))
    (sent,) = server.requests
    expected = {
        "model": "tiny", "prompt": PROMPT, "stream": True, "return_token_ids": True, "logprobs": 0, "max_tokens": 4,
        "temperature": 0.7, "top_p": 0.9, "top_k": 40, "min_p": 0.05, "seed": 7, "stop_token_ids": [2, 5],
        "repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0,
        "structured_outputs": {"structural_tag": '{"type": "structural_tag"}'}, "skip_special_tokens": False,
    }  # fmt: skip
    assert sent == expected


async def test_most_probable_tokens_come_best_first(server, engine):
    chunks = await collect(engine.generate(PROMPT, SamplingParams(3, 1.0, seed=1, top_logprobs=2)))
    tops = [top for chunk in chunks for top in chunk.top]
    assert len(tops) == 3
    for at, top in enumerate(tops):
        ranked = sorted(server.distribution(at, 1.0).items(), key=lambda pair: -pair[1])
        assert top == ranked[:2]


async def test_context_length_and_model_come_from_the_server(engine):
    assert (engine.info.kind, engine.info.model, engine.info.context_length) == ("vllm", "tiny", 2048)
    assert engine.info.constrains


async def test_closing_the_stream_ends_the_servers_work(server, engine):
    server.pause = asyncio.Event()
    stream = engine.generate(PROMPT, SamplingParams(50))
    await anext(stream)
    assert server.running == 1
    await stream.aclose()
    await until(lambda: server.running == 0)
    assert server.aborted == 1
    assert (await engine.stats()).running == 0


async def test_more_than_a_hundred_at_once(server, engine):
    server.pause = asyncio.Event()
    tasks = [asyncio.create_task(collect(engine.generate(PROMPT, SamplingParams(2)))) for _ in range(150)]
    await until(lambda: server.running == 150)
    assert (await engine.stats()).running == 150
    server.pause.set()
    assert all(sum(len(chunk.token_ids) for chunk in chunks) == 2 for chunks in await asyncio.gather(*tasks))


async def test_connections_are_used_again(server, engine):
    for _ in range(5):
        await collect(engine.generate(PROMPT, SamplingParams(2)))
    assert len(server._runner.server.connections) == 1


async def test_preempt_gives_nothing_out_until_resume(server, engine):
    server.pause = asyncio.Event()
    got = []

    async def read():
        async for chunk in engine.generate(PROMPT, SamplingParams(6)):
            got.append(chunk)

    reading = asyncio.create_task(read())
    await until(lambda: got)
    await engine.preempt()
    server.pause.set()
    await asyncio.sleep(0.1)
    assert sum(len(chunk.token_ids) for chunk in got) == 1
    await engine.resume(4)
    await reading
    assert sum(len(chunk.token_ids) for chunk in got) == 6 and got[0].version == 0
    assert [chunk.version async for chunk in engine.generate(PROMPT, SamplingParams(1))] == [4]


@pytest.mark.parametrize(
    ("answer", "kind", "words"),
    [
        ((400, {"error": {"message": "top_k must be -1", "param": "top_k"}}, {}), RequestRefused, "top_k must be -1"),
        ((429, {"error": {"message": "too many"}}, {"retry-after": "17"}), EngineBusy, "too many"),
        ((503, {"error": {"message": "engine is dead"}}, {}), EngineBusy, "engine is dead"),
        ((401, {"error": "Unauthorized"}, {}), EngineError, "engine.key_env is not set"),
        ((404, {"error": {"message": "The model `x` does not exist."}}, {}), EngineError, "`x` does not exist"),
    ],
)
async def test_refusals_are_told_in_the_servers_words(server, engine, answer, kind, words):
    server.refuse = answer
    with pytest.raises(kind, match=words) as caught:
        await collect(engine.generate(PROMPT, SamplingParams(2)))
    if kind is EngineBusy:
        assert caught.value.retry_after_s == int(answer[2].get("retry-after", 5))


async def test_a_connection_that_breaks_off_is_an_error(server, engine):
    server.drop_after = 2
    with pytest.raises(EngineError, match="broke off"):
        await collect(engine.generate(PROMPT, SamplingParams(4)))


@pytest.mark.parametrize("whole", [False, True])
async def test_what_a_proxy_says_in_its_place_is_quoted(server, engine, monkeypatch, whole):
    async def answer(request):
        if whole:
            return web.Response(text="<html>moved</html>", content_type="text/html")
        response = await server.stream(request)
        await response.write(b"data: <html>moved</html>\n\n")
        return response

    monkeypatch.setattr(server, "answer", answer)
    with pytest.raises(EngineError, match=r"vLLM at http://\S+ sent what is no JSON: b'<html>moved"):
        await collect(engine.generate(PROMPT, SamplingParams(4, whole=whole)))


async def test_a_server_that_went_away_and_came_back_is_tried_out_again(server, engine):
    await server.stop(comes_back=True)
    with pytest.raises(EngineError, match=r"vLLM at http://127.0.0.1:\d+ cannot be reached"):
        await collect(engine.generate(PROMPT, SamplingParams(2)))
    await server.start()
    assert await collect(engine.generate(PROMPT, SamplingParams(2)))
    assert len(server.requests) == 3  # two of the probe
    await server.stop(comes_back=True)
    with pytest.raises(EngineError, match="cannot be reached"):
        await collect(engine.generate(PROMPT, SamplingParams(2)))
    server.fault = "raw"
    await server.start()
    for _ in range(2):
        with pytest.raises(EngineError, match="not those of the distribution"):
            await collect(engine.generate(PROMPT, SamplingParams(2)))


@pytest.mark.parametrize(
    ("fault", "words", "mend"),
    [
        ("raw", "not those of the distribution that it samples from", "--logprobs-mode processed_logprobs"),
        ("no_ids", "no token ids", "0.10.2"),
        ("no_logprobs", "no log-probabilities", "--max-logprobs"),
        ("other_prompt", "did not take the probe's token ids", "0.10.2"),
        ("other_text", "it serves another model", "`model`"),
        ("mixed_up", "cannot be right", "0.10.2"),
    ],
)
async def test_the_probe_says_what_is_wrong_and_what_to_change(renderer, fault, words, mend):
    server = VllmServer(renderer.tokenizer, fault=fault)
    await server.start()
    engine = VllmEngine(server.url + "/v1/", renderer.tokenizer)
    try:
        with pytest.raises(EngineError, match=words) as caught:
            await engine.start()
        assert mend in caught.value.mend
    finally:
        await engine.stop()
        await server.stop()


async def test_a_model_that_is_not_served_is_named(server, renderer):
    engine = VllmEngine(server.url, renderer.tokenizer, model="other")
    with pytest.raises(EngineError, match="serves tiny, not 'other'"):
        await engine.start()
    await engine.stop()


async def test_the_key_comes_from_the_environment(server, renderer, monkeypatch):
    monkeypatch.delenv("VLLM_KEY", raising=False)
    with pytest.raises(AgliteError, match="the environment has no VLLM_KEY"):
        VllmEngine(server.url, renderer.tokenizer, key_env="VLLM_KEY")
    monkeypatch.setenv("VLLM_KEY", "secret")
    engine = VllmEngine(server.url, renderer.tokenizer, key_env="VLLM_KEY")
    await engine.start()
    assert server.headers[0]["Authorization"] == "Bearer secret"
    await engine.stop()


# through the gateway


@contextlib.asynccontextmanager
async def gateway(tmp_path, renderer, engine):
    async with running(tmp_path, renderer, engine=engine, context_length=engine.info.context_length) as stage:
        yield stage


async def test_a_conversation_through_the_gateway_is_recorded_exactly(tmp_path, renderer, server, engine):
    async with gateway(tmp_path, renderer, engine) as stage:
        session = await stage.session()
        client = stage.client(session)
        messages = [{"role": "user", "content": "hello"}]
        for stream in (False, True):
            if stream:
                parts = await client.chat.completions.create(model="m", messages=messages, max_tokens=6, stream=True)
                text = "".join([part.choices[0].delta.content or "" async for part in parts if part.choices])
            else:
                reply = await client.chat.completions.create(model="m", messages=messages, max_tokens=6)
                text = reply.choices[0].message.content
            messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "again"}]
        first, second = stage.calls(session)
        assert first.prompt_ids.tolist() == server.requests[0]["prompt"]
        assert second.prompt_ids.tolist() == server.requests[1]["prompt"]
        assert second.parent_id == first.id
        recorded = (first.prompt_ids + first.response_ids).tolist()
        assert second.prompt_ids.tolist()[: len(recorded)] == recorded
        wanted = [server.distribution(at, 0.7)[token] for at, token in enumerate(first.response_ids)]
        assert first.logprobs.tolist() == pytest.approx(wanted)


async def test_agents_hear_why_there_is_no_reply(tmp_path, renderer, server, engine):
    import openai

    async with gateway(tmp_path, renderer, engine) as stage:
        client = stage.client(await stage.session())
        ask = dict(model="m", messages=[{"role": "user", "content": "hello"}])
        server.refuse = (429, {"error": {"message": "queue is full"}}, {"retry-after": "9"})
        with pytest.raises(openai.InternalServerError, match="queue is full") as caught:
            await client.chat.completions.create(**ask)
        assert caught.value.status_code == 503 and caught.value.response.headers["retry-after"] == "9"
        server.refuse = (400, {"error": {"message": "grammar is broken"}}, {})
        with pytest.raises(openai.BadRequestError, match="grammar is broken"):
            await client.chat.completions.create(**ask)
        server.refuse = None
        assert (await client.chat.completions.create(**ask)).choices[0].message.content


async def test_a_client_that_leaves_ends_the_servers_work(tmp_path, renderer, server, engine):
    async with gateway(tmp_path, renderer, engine) as stage:
        session = await stage.session()
        client = stage.client(session)
        server.pause = asyncio.Event()
        messages = [{"role": "user", "content": "hello"}]
        stream = await client.chat.completions.create(model="m", messages=messages, stream=True)
        await anext(stream)
        await stream.close()
        await until(lambda: server.running == 0)
        await until(lambda: stage.calls(session))
        (call,) = stage.calls(session)
        assert call.status == "cancelled" and len(call.response_ids) == 1
