"""The agent of the labs. It plays the person, and asks the model for words until it has understood them all.

Plain sockets and three modules of the standard library, so that starting it costs almost nothing: a lab starts
thousands. With `tries` in its task it asks for one thing, each time in a new conversation, until it has understood.
Otherwise it asks for one after the other in one conversation, with a wait after each that stands for a tool at work.
"""

import json
import os
import socket
import time

with open(os.environ["AGLITE_TASK_FILE"]) as file:
    task = json.load(file)
host, _, path = os.environ["OPENAI_BASE_URL"].removeprefix("http://").partition("/")
name, _, port = host.rpartition(":")


def ask(messages, max_tokens):
    """The model's reply to a conversation."""
    body = json.dumps({"model": "lab", "messages": messages, "max_tokens": max_tokens}).encode()
    head = (
        f"POST /{path}/chat/completions HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n"
        f"Authorization: Bearer {os.environ['OPENAI_API_KEY']}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    with socket.create_connection((name, int(port))) as connection:
        connection.sendall(head.encode() + body)
        answer = b"".join(iter(lambda: connection.recv(65536), b""))
    head, _, body = answer.partition(b"\r\n\r\n")
    if b" 200 " not in head.partition(b"\r\n")[0]:
        raise SystemExit(f"{head.decode()}\n{body.decode()}")
    return json.loads(body)["choices"][0]["message"]["content"] or ""


def own_number(most):
    """Which of the task's rollouts this is, so that each gets waits of its own, the same ones in every run: CLAIMS is a
    folder of the run in which every rollout takes the next free number."""
    folder = os.environ.get("CLAIMS")
    if not folder:
        return os.getpid() % most
    os.makedirs(folder, exist_ok=True)
    number = 0
    while True:
        try:
            os.close(os.open(f"{folder}/{task['key']}.{number}", os.O_CREAT | os.O_EXCL))
            return number % most
        except FileExistsError:
            number += 1


def user(text):
    return {"role": "user", "content": text}


replies = []
if "tries" in task:
    while len(replies) < task["tries"] and task["understands"][0] not in replies:
        replies.append(ask([user(task["questions"][0])], 12).strip())
else:
    waits = task["waits"][own_number(len(task["waits"]))]
    tool_s, messages = float(os.environ.get("TOOL", "0 s").split()[0]), []
    for question, wait in zip(task["questions"], waits, strict=True):
        if task.get("talk"):
            messages.append(user(f"talk to a {task['person']}"))
            messages.append({"role": "assistant", "content": ask(messages, 400)})
        messages.append(user(question))
        replies.append(ask(messages, 12))
        messages.append({"role": "assistant", "content": replies[-1]})
        time.sleep(tool_s * wait)
with open("replies.json", "w") as file:
    json.dump(replies, file)
