"""Through the one door that there is. See attempts.py."""

import http.client
import json
import os
import socket

from attempts import connected, tried


def asked(method, path, token=None, body=None, headers=()):
    """The status of a request to the gateway, as text."""
    host, port = os.environ["OPENAI_BASE_URL"].split("/")[2].split(":")
    connection = http.client.HTTPConnection(host, int(port), timeout=90)
    token = token or os.environ["OPENAI_API_KEY"]
    try:
        connection.request(
            method,
            path,
            json.dumps(body) if body is not None else None,
            {"authorization": f"Bearer {token}", "content-type": "application/json", **dict(headers)},
        )
        return str(connection.getresponse().status)
    finally:
        connection.close()


CHAT = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}


def the_gateway_as_a_proxy(task):
    host = f"{task['hosts'][0]}:{task['tcp']}"
    return [
        ("a whole URL", asked("GET", f"http://{host}/")),
        ("CONNECT", asked("CONNECT", host)),
        ("another host's name", asked("GET", "/", headers={"host": host, "x-forwarded-host": host})),
    ]


def the_control_api(task):
    paths = ("/api/status", "/api/rollouts", "/metrics", "/healthz", "/api/events", "/rollouts/../api/status")
    found = [(path, asked("GET", path)) for path in paths]
    for path in ("/api/stop", "/api/pause", f"/api/rollouts/{task['other']}/kill"):
        found.append((path, asked("POST", path, body={})))
    for host in ("127.0.0.1", *task["hosts"]):
        found.append((host, tried(connected, socket.AF_INET, (host, task["control"]))))
    return found


def a_reward_of_its_own_making(task):
    own = os.environ["AGLITE_ROLLOUT_ID"]
    paths = (f"/api/rollouts/{own}/finish", f"/rollouts/{own}/finish", f"/rollouts/{own}/v1/finish", "/v1/reward")
    body = {"reward": 1.0, "breakdown": {}}
    return [(f"{method} {path}", asked(method, path, body=body)) for path in paths for method in ("POST", "PUT")]


def tokens_of_others(task):
    own, other, chat = os.environ["AGLITE_ROLLOUT_ID"], task["other"], "/v1/chat/completions"
    mine = os.environ["OPENAI_API_KEY"]

    def chats(path, token):
        return asked("POST", path, token, CHAT)

    return [
        ("a dead one's", chats(chat, task["dead_token"])),
        ("a dead one's, where it lived", chats(f"/rollouts/{task['dead']}{chat}", task["dead_token"])),
        ("another's, here", chats(f"/rollouts/{own}{chat}", task["other_token"])),
        ("my own, there", chats(f"/rollouts/{other}{chat}", mine)),
        ("nobody's", chats(chat, "aglite-" + "a" * 32)),
        ("half of my own", chats(chat, mine[:20])),
    ]


ATTEMPTS = (
    the_gateway_as_a_proxy,
    the_control_api,
    a_reward_of_its_own_making,
    tokens_of_others,
)
