"""Who can reach the gateway and the control API, over which wire, and how much they may send."""

from __future__ import annotations

import asyncio
import json
import socket
import ssl
import subprocess
from pathlib import Path
from types import SimpleNamespace

import httpx
import openai
import pytest
from mini_run import INTERRUPT, MiniRun, held
from staging import Stage, running
from tiny import tiny_model

from aglite.config import Limits, Recipe
from aglite.errors import RecipeError
from aglite.gateway import app
from aglite.gateway.renderers import load_renderer
from aglite.net import Certificate, address

RECIPE = {
    "name": "tiny",
    "model": "m",
    "tasks": {"train": "t", "val": "v"},
    "agent": {"backend": "external"},
}


def recipe(**gateway) -> Recipe:
    return Recipe.model_validate({**RECIPE, "gateway": gateway})


def test_only_loopback_goes_without_saying() -> None:
    for host in ("127.0.0.1", "127.9.9.9", "::1", "localhost"):
        assert recipe(host=host).gateway.host == host
    for host in ("10.0.0.7", "fd00::1", "gpu.example.org"):
        with pytest.raises(ValueError, match=f"gateway.host: {host} can be reached from other machines.*allow_plain"):
            recipe(host=host)
        assert recipe(host=host, allow_plain=True).gateway.allow_plain
        assert recipe(host=host, tls={"cert": "c", "key": "k"}).gateway.tls
    with pytest.raises(ValueError, match=r"gateway.public_url: missing; 0\.0\.0\.0 is no address"):
        recipe(host="0.0.0.0", allow_plain=True)
    assert recipe(host="::", allow_plain=True, public_url="http://gpu:8080/").gateway.public_url == "http://gpu:8080"
    for url in ("gpu:8080", "ftp://gpu", "https://user:pass@gpu", "https://gpu?x=1", "https://"):
        with pytest.raises(ValueError, match="write it like https://host:port"):
            recipe(public_url=url)
    with pytest.raises(ValueError, match="control_host"):
        recipe(control_host="0.0.0.0")


def test_agents_here_reach_a_gateway_on_all_addresses_over_loopback() -> None:
    for host, url in (
        ("0.0.0.0", "http://127.0.0.1:80"),
        ("::", "http://[::1]:80"),
        ("10.0.0.7", "http://10.0.0.7:80"),
    ):
        assert address(SimpleNamespace(getsockname=lambda host=host: (host, 80))) == url


@pytest.fixture(scope="session")
def certificate(tmp_path_factory) -> Certificate:
    folder = tmp_path_factory.mktemp("tls")
    files = Certificate(folder / "cert.pem", folder / "key.pem")
    name = ["-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1,DNS:localhost"]
    make = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", *name]
    subprocess.run([*make, "-days", "2", "-keyout", files.key, "-out", files.cert], check=True, capture_output=True)
    return files


def test_a_certificate_that_cannot_be_used_is_named(certificate: Certificate, tmp_path: Path) -> None:
    certificate.check("gateway.tls")
    with pytest.raises(RecipeError, match=r"gateway\.tls\.key: there is no file .*nowhere"):
        Certificate(certificate.cert, tmp_path / "nowhere").check("gateway.tls")
    with pytest.raises(RecipeError, match=r"gateway\.tls: .* cannot be used") as refusal:
        Certificate(certificate.key, certificate.key).check("gateway.tls")
    assert "PEM" in refusal.value.mend
    locked = tmp_path / "locked.pem"
    lock = ["openssl", "ec", "-aes128", "-passout", "pass:word", "-in", certificate.key, "-out", locked]
    subprocess.run(lock, check=True, capture_output=True)
    with pytest.raises(RecipeError, match="the key is encrypted"):
        Certificate(certificate.cert, locked).check("gateway.tls")


def test_https_for_agents_elsewhere(certificate: Certificate, tmp_path: Path) -> None:
    tls = {"cert": str(certificate.cert), "key": str(certificate.key)}
    run = MiniRun(tmp_path, agent={"backend": "external"}, trainer={"steps": 1}, gateway={"tls": tls})
    run.start()
    run.until(lambda store: store.phases() and store.phases()[-1]["phase"] == "rollout")
    opened = run.client.post("rollouts", {"task": {"question": "hi"}})
    base = opened["base_url"]
    assert base.startswith("https://127.0.0.1:")
    trusting = ssl.create_default_context(cafile=certificate.cert)
    client = openai.OpenAI(
        base_url=f"{base}/v1", api_key=opened["token"], http_client=httpx.Client(verify=trusting), max_retries=0
    )
    messages = [{"role": "user", "content": "hi"}]
    assert client.chat.completions.create(model="m", messages=messages, max_tokens=5).usage.completion_tokens > 0
    stream = client.chat.completions.create(model="m", messages=messages, max_tokens=5, stream=True)
    assert [chunk.choices[0].finish_reason for chunk in stream][-1] is not None
    with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
        httpx.get(f"{base}/v1/models", timeout=60)
    with pytest.raises(httpx.TransportError):  # nobody speaks plain HTTP there
        httpx.get(f"{base.replace('https', 'http')}/v1/models", timeout=60)
    control = json.loads(run.run_dir.control.read_text())
    assert control["url"].startswith("http://127.0.0.1:")
    assert run.run_dir.control.stat().st_mode & 0o777 == 0o600
    run.client.post(f"rollouts/{opened['rollout_id']}/finish", {"reward": 1.0})
    run.signal(INTERRUPT)
    assert run.wait()[0] in (0, 130)


def test_agents_here_need_no_certificate_and_others_get_the_public_address(
    certificate: Certificate, tmp_path: Path
) -> None:
    tls = {"cert": str(certificate.cert), "key": str(certificate.key)}
    public = "https://gpu.example.org:8443/aglite"
    run = MiniRun(
        tmp_path,
        program='import os\nprint(os.environ["OPENAI_BASE_URL"])\n' + held(tmp_path / "go"),
        trainer={"steps": 1},
        evaluation={"tasks": 1, "before": False},
        gateway={"tls": tls, "public_url": public},
    )
    run.start()
    run.until(lambda store: store.phases() and store.phases()[-1]["phase"] == "rollout")
    opened = run.client.post("rollouts", {"task": {"question": "hi"}})
    assert opened["base_url"] == f"{public}/rollouts/{opened['rollout_id']}"
    run.go()
    code, output = run.wait()
    assert code == 0, output
    store = run.store()
    agents = [row for row in store.rollouts() if row["backend"] == "local"]
    assert agents and all(row["state"] == "done" and row["calls"] == 2 for row in agents)
    store.close()
    urls = {run.run_dir.rollout_log(row["id"], 1).read_text().strip() for row in agents}
    assert all(url.startswith("http://127.0.0.1:") for url in urls)


@pytest.fixture
async def stage(tmp_path: Path, model: Path):
    async with running(tmp_path, load_renderer(model)) as made:
        yield made


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("models") / "tiny")


async def send(stage: Stage, *parts: bytes | float) -> bytes:
    """Bytes on a socket with pauses in between; what comes back until the server closes."""
    port = int(stage.url.rpartition(":")[2])
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        for part in parts:
            if isinstance(part, bytes):
                writer.write(part)
                await writer.drain()
            else:
                await asyncio.sleep(part)
        return await asyncio.wait_for(reader.read(), 60)
    finally:
        writer.close()


def head(session, **headers: str) -> bytes:
    lines = [f"POST {session.path}/v1/chat/completions HTTP/1.1", "host: x", f"authorization: Bearer {session.token}"]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    return ("\r\n".join(lines) + "\r\n\r\n").encode()


async def test_a_body_that_does_not_come_is_not_waited_for(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app, "BODY_TIMEOUT_S", 0.5)
    session = await stage.session()
    answer = await send(stage, head(session, content_length="100"), b'{"messages"')
    assert answer.startswith(b"HTTP/1.1 408 ") and b"did not arrive within 0.5 s" in answer
    assert b"connection: close" in answer and stage.calls(session) == []


async def test_a_body_in_chunks_is_counted(stage: Stage) -> None:
    session = await stage.session(limits=Limits(request_bytes=1000))
    whole = b'{"model":"m","messages":[{"role":"user","content":"hi"}],"max_tokens":2}'
    begin = head(session, transfer_encoding="chunked", connection="close")

    def chunk(data: bytes) -> bytes:
        return f"{len(data):x}\r\n".encode() + data + b"\r\n"

    answer = await send(stage, begin, chunk(whole[:30]), 0.05, chunk(whole[30:]), chunk(b""))
    assert answer.startswith(b"HTTP/1.1 200 ")
    answer = await send(stage, begin, *[chunk(b" " * 400)] * 3, chunk(b""))
    assert answer.startswith(b"HTTP/1.1 413 ") and b"longer than 1000 bytes" in answer


async def test_compressed_bodies_are_refused(stage: Stage) -> None:
    session = await stage.session()
    answer = await send(stage, head(session, content_length="4", content_encoding="gzip"), b"\x1f\x8b\x08\x00")
    assert answer.startswith(b"HTTP/1.1 415 ") and b"compressed (gzip)" in answer


def test_the_control_api_limits_bodies_before_it_reads_them(tmp_path: Path) -> None:
    run = MiniRun(tmp_path, agent={"backend": "external"}, trainer={"steps": 1})
    run.start()
    run.until(lambda store: run.run_dir.control.exists() and store.phases())
    control = json.loads(run.run_dir.control.read_text())
    for token, status in (("wrong", 413), (control["token"], 413)):
        answer = httpx.post(
            f"{control['url']}/api/rollouts",
            content=(b" " * 2**20 for _ in range(17)),
            headers={"authorization": f"Bearer {token}", "content-type": "application/json"},
            timeout=120,
        )
        assert answer.status_code == status and "longer than" in answer.json()["detail"]
    host, port = control["url"].removeprefix("http://").split(":")
    assert host == "127.0.0.1"
    with socket.socket() as probe:  # another address of loopback is not listened on either
        assert probe.connect_ex(("127.0.0.2", int(port))) != 0
    unknown = httpx.get(f"{control['url']}/api/status", headers={"authorization": "Bearer é".encode()}, timeout=60)
    assert unknown.status_code == 401
    run.signal(INTERRUPT)
    run.wait()
