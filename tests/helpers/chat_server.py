"""A small Chat Completions server with prepared replies, for tests of agent programs."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType


class ChatServer:
    """Gives each reply once, in order; a reply is a text, (text, finish reason), or tool calls {"name", "arguments"}.
    Keeps the requests."""

    def __init__(self, *replies: str | tuple[str, str] | list[dict[str, str]]) -> None:
        self.requests: list[dict] = []
        self.keys: list[str] = []
        pending = list(replies)
        chat = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                chat.requests.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
                chat.keys.append(self.headers["Authorization"])
                reply = pending.pop(0)
                message: dict = {"role": "assistant", "content": None}
                if isinstance(reply, list):
                    reason, calls = "tool_calls", enumerate(reply)
                    message["tool_calls"] = [{"id": f"c-{n}", "type": "function", "function": one} for n, one in calls]
                else:
                    message["content"], reason = (reply, "stop") if isinstance(reply, str) else reply
                choice = {"index": 0, "message": message, "finish_reason": reason}
                answer = {"id": "x", "object": "chat.completion", "created": 0, "model": "m", "choices": [choice]}
                data = json.dumps(answer).encode()
                self.send_response(200)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, format: str, *args: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}/rollouts/r-1/v1"

    def __enter__(self) -> ChatServer:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._server.shutdown()
        self._server.server_close()
