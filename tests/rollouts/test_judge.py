"""Graders that ask a judge model, through a real endpoint that wants a key."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from bench import Bench

from aglite.errors import RecipeError

KEY = "sk-the-endpoints-own-key"

GRADE = """
    import os
    from openai import OpenAI
    def grade(task, rollout, workdir):
        assert not any("the-endpoints-own" in value for value in os.environ.values())
        client = OpenAI(base_url=os.environ["JUDGE_BASE_URL"], api_key=os.environ["JUDGE_API_KEY"], max_retries=0)
        text = (workdir / "poem").read_text()
        reply = client.chat.completions.create(
            model=os.environ["JUDGE_MODEL"], messages=[{"role": "user", "content": f"Rate: {text}"}]
        )
        return float(reply.choices[0].message.content)
"""


@pytest.fixture
def endpoint():
    """A Chat Completions endpoint that says 0.75 to whoever has the key."""
    seen = []

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *args):
            pass

        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            seen.append((self.path, body))
            status, reply = 200, {"choices": [{"index": 0, "message": {"role": "assistant", "content": "0.75"}}]}
            if self.headers.get("authorization") != f"Bearer {KEY}":
                status, reply = 401, {"error": {"message": "wrong key"}}
            data = json.dumps({"id": "x", "object": "chat.completion", "created": 1, "model": "j", **reply}).encode()
            self.send_response(status)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    server.seen = seen
    server.url = f"http://127.0.0.1:{server.server_address[1]}"
    yield server
    server.shutdown()
    server.server_close()


def judged(tmp_path, url, grade=GRADE, **settings):
    judge = {"url": url, "model": "judge-1", "key_env": "TEST_JUDGE_KEY", **settings}
    return Bench(tmp_path, "open('poem', 'w').write('roses')", grade=grade, reward={"judge": judge})


async def test_a_grader_asks_with_a_key_it_never_has_and_all_is_recorded(tmp_path, endpoint, monkeypatch):
    monkeypatch.setenv("TEST_JUDGE_KEY", KEY)
    async with judged(tmp_path, f"{endpoint.url}/v1") as bench:
        outcome = await bench.run()
        assert (outcome.state, outcome.reward) == ("done", 0.75), bench.log()
        ((path, body),) = endpoint.seen
        assert path == "/v1/chat/completions" and body["model"] == "judge-1"
        (call,) = bench.store.judge_calls(bench.last)
        assert (call["attempt"], call["status"], call["model"]) == (1, 200, "judge-1")
        assert call["request"]["messages"] == [{"role": "user", "content": "Rate: roses"}]
        assert call["reply"]["choices"][0]["message"]["content"] == "0.75"
        assert KEY.encode() not in bench.run_dir.db.read_bytes()


async def test_the_address_is_dead_after_the_grading_and_counts_calls(tmp_path, endpoint, monkeypatch):
    monkeypatch.setenv("TEST_JUDGE_KEY", KEY)
    grade = """
        import json, os, pathlib, urllib.error, urllib.request
        SEEN = pathlib.Path(__file__).with_name("seen")
        def ask(url, key, **body):
            request = urllib.request.Request(
                url + "/chat/completions", json.dumps({"messages": [], **body}).encode(),
                {"Authorization": "Bearer " + key, "Content-Type": "application/json"})
            try: return urllib.request.urlopen(request).status
            except urllib.error.HTTPError as error: return error.code
        def grade(task, rollout, workdir):
            now = os.environ["JUDGE_BASE_URL"], os.environ["JUDGE_API_KEY"]
            if SEEN.exists():
                assert ask(*SEEN.read_text().split()) == 401
            SEEN.write_text(" ".join(now))
            assert ask(now[0], "x") == 401 and ask(*now, stream=True) == 400
            assert [ask(*now) for _ in range(3)] == [200, 200, 403]
            return 1
    """
    async with judged(tmp_path, endpoint.url, grade, calls=3) as bench:
        for _ in range(2):
            outcome = await bench.run()
            assert outcome.reward == 1.0, (outcome, bench.log())


@pytest.mark.parametrize("chunked", [False, True], ids=["declared", "chunked"])
async def test_a_request_without_end_is_not_held_in_memory(tmp_path, endpoint, monkeypatch, chunked):
    """What an agent made may run where its grader has the judge's address."""
    monkeypatch.setenv("TEST_JUDGE_KEY", KEY)
    grade = f"""
        import http.client, os, urllib.parse
        PART = b" " * (1 << 20)
        def grade(task, rollout, workdir):
            url = urllib.parse.urlsplit(os.environ["JUDGE_BASE_URL"])
            connection = http.client.HTTPConnection(url.hostname, url.port)
            headers = {{"Authorization": "Bearer " + os.environ["JUDGE_API_KEY"]}}
            body = (PART for _ in range(9)) if {chunked} else PART * 9
            connection.request("POST", url.path + "/chat/completions", body, headers, encode_chunked={chunked})
            return connection.getresponse().status
    """
    async with judged(tmp_path, endpoint.url, grade) as bench:
        assert (await bench.run()).reward == 413, bench.log()
        assert bench.store.judge_calls(bench.last) == []


async def test_an_endpoint_that_is_away_is_the_infrastructures_fault_and_said(tmp_path, monkeypatch):
    monkeypatch.setenv("TEST_JUDGE_KEY", KEY)
    async with judged(tmp_path, "http://127.0.0.1:9") as bench:
        outcome = await bench.run()
        assert outcome.state == "error" and "cannot be reached" in outcome.cause
        assert [call["status"] for call in bench.store.judge_calls(bench.last)] == [0, 0], "it was tried twice"


async def test_a_missing_key_is_said_at_the_start(tmp_path, monkeypatch):
    monkeypatch.delenv("TEST_JUDGE_KEY", raising=False)
    bench = judged(tmp_path, "http://127.0.0.1:9")
    with pytest.raises(RecipeError, match="the environment has no TEST_JUDGE_KEY"):
        await bench.launcher.start()
    await bench.launcher.stop()
    bench.store.close()


async def test_what_was_asked_is_masked_pruned_and_left_out_like_all_text(tmp_path, endpoint, monkeypatch):
    monkeypatch.setenv("TEST_JUDGE_KEY", KEY)
    async with judged(tmp_path, endpoint.url) as bench:
        await bench.run()
        from aglite.redact import Redactor

        changed = await bench.store.mask(Redactor(["ros.s"]))
        assert changed["judge_calls"] == 1
        (call,) = bench.store.judge_calls(bench.last)
        assert "roses" not in json.dumps(call) and call["request"]["messages"][0]["role"] == "user"
        bench.store.keep_messages = False
        await bench.run()
        (call,) = bench.store.judge_calls(bench.last)
        assert "messages" not in call["request"] and call["status"] == 200
