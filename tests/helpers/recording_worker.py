"""The real model worker, with every token it sends also written to the file named by AGLITE_EMITTED.

A test compares that file, which no other part of aglite has touched, with what was trained in the end.
"""

from __future__ import annotations

import json
import os
from typing import Any

from aglite.worker import main
from aglite.worker.io import Connection, unpack_floats, unpack_ids

send, generate = Connection.send, main.Worker._generate
file = open(os.environ["AGLITE_EMITTED"], "a", buffering=1)  # noqa: SIM115


def recording_send(self: Connection, frame: dict[str, Any]) -> None:
    if frame["op"] == "tokens":
        for number, ids, logprobs, version, finish in frame["items"]:
            row = {"id": number, "ids": list(unpack_ids(ids)), "logprobs": list(unpack_floats(logprobs))}
            file.write(json.dumps({**row, "version": version, "finish": finish}) + "\n")
    send(self, frame)


def recording_generate(self: main.Worker, frame: dict[str, Any]) -> None:
    file.write(json.dumps({"id": frame["id"], "prompt": list(unpack_ids(frame["prompt"]))}) + "\n")
    generate(self, frame)


Connection.send, main.Worker._generate = recording_send, recording_generate

if __name__ == "__main__":
    main.main()
