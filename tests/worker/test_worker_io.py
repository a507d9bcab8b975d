import socket
import subprocess
import sys

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aglite.errors import EngineError
from aglite.worker.io import FrameReader, encode, pack_floats, pack_ids, unpack_floats, unpack_ids

values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
frames = st.builds(lambda op, rest: {**rest, "op": op}, st.text(min_size=1), st.dictionaries(st.text(), values))


@given(st.lists(frames, max_size=6), st.lists(st.integers(1, 40), min_size=1))
def test_frames_survive_any_fragmentation(sent, sizes):
    stream = b"".join(encode(frame) for frame in sent)
    reader, received, at, turn = FrameReader(), [], 0, 0
    while at < len(stream):
        size = sizes[turn % len(sizes)]
        received += reader.feed(stream[at : at + size])
        at, turn = at + size, turn + 1
    assert received == sent


@given(st.lists(st.integers(0, 2**31 - 1)), st.lists(st.floats(width=32, allow_nan=False)))
def test_packed_tokens_are_little_endian_words(ids, logprobs):
    assert unpack_ids(pack_ids(ids)) == ids
    assert pack_ids(ids) == b"".join(number.to_bytes(4, "little") for number in ids)
    assert unpack_floats(pack_floats(logprobs)) == logprobs


@pytest.mark.parametrize(
    "garbage", [b"\xff\xff\xff\xff", b"\x00\x00\x00\x01\xc1", b"\x00\x00\x00\x01\x05", b"GET / HTTP/1.1\r\n\r\n"]
)
def test_bytes_that_are_no_frame_are_refused(garbage):
    with pytest.raises(EngineError):
        FrameReader().feed(garbage)


def test_a_worker_that_leaves_takes_its_own_children_along(tmp_path, monkeypatch):
    script = """
import subprocess, sys, time
from aglite.worker.io import Connection
connection = Connection(sys.argv[1])
connection.start()
print(subprocess.Popen(["sleep", "60"], start_new_session=True).pid, flush=True)
time.sleep(60)
"""
    monkeypatch.chdir(tmp_path)  # of a socket the path has at most 107 bytes
    path = "socket"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen()
        worker = subprocess.Popen([sys.executable, "-c", script, path], stdout=subprocess.PIPE, text=True)
        supervisor, _ = listener.accept()
        child = psutil.Process(int(worker.stdout.readline()))
        assert child.is_running()
        supervisor.close()
    assert worker.wait(30) == 0
    _, left = psutil.wait_procs([child], timeout=30)
    assert not left or left[0].status() == psutil.STATUS_ZOMBIE
    worker.stdout.close()
