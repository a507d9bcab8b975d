"""The seccomp profile of our own, in real containers, and when it is used."""

import socket
import types

import pytest
from seen import what_is_seen

from aglite.rollouts.backends import container, docker
from aglite.rollouts.backends.seccomp import profile

pytestmark = pytest.mark.docker

CALLS = {
    "clone3": (435, 435, 0, 0),
    "clone into a user namespace": (56, 220, 0x10000000 | 17, 0, 0, 0, 0),
    "io_uring_setup": (425, 425, 0, 0),
    "process_vm_readv": (310, 270, 0, 0, 0, 0, 0, 0),
    "personality without random addresses": (135, 92, 0x40000),
    "move_mount": (429, 429, 0, 0, 0, 0, 0),
    "vsock": (41, 198, socket.AF_VSOCK, 1, 0),
    "vsock in a wide register": (41, 198, 2**32 + socket.AF_VSOCK, 1, 0),
    "packet": (41, 198, socket.AF_PACKET, 3, 0),
    "personality": (135, 92, 0xFFFFFFFF),
    "unix": (41, 198, socket.AF_UNIX, 1, 0),
}
"""Numbers on x86-64 and on ARM64, then arguments; the rest of what is refused is among the attempts of attempts.py."""

AGENT = """
    import ctypes, errno, multiprocessing, sqlite3, subprocess, threading

    calls = json.load(open(os.environ["AGLITE_TASK_FILE"]))["calls"]
    column = ("x86_64", "aarch64").index(os.uname().machine)
    libc = ctypes.CDLL(None, use_errno=True)
    seen = {"seccomp": line("Seccomp")}
    for name, (*numbers, arguments) in calls.items():
        got = libc.syscall(*map(ctypes.c_long, (numbers[column], *arguments)))
        seen[name] = errno.errorcode[ctypes.get_errno()] if got < 0 else "done"
    thread = threading.Thread(target=sqlite3.connect, args=("x.db",))
    thread.start()
    thread.join()
    with socket.create_server(("127.0.0.1", 0)) as server, multiprocessing.get_context("fork").Pool(2) as pool:
        seen["work"] = [
            connects(*server.getsockname()), sum(pool.map(abs, [-1, -2])), os.path.exists("x.db"),
            subprocess.run(["sh", "-c", "ls | wc -l"], capture_output=True).returncode, os.memfd_create("x") > 0,
            [name for _, name in socket.if_nameindex()],
        ]
    json.dump(seen, open("seen.json", "w"))
"""
WORK = ["connected", 3, True, 0, True, ["lo"]]


@pytest.fixture
def look(tmp_path, image, containers, monkeypatch):
    """Run the agent as if its sidecar had found this of vsock: (`SecurityOpt`, what it saw)."""

    async def look(vsock):
        given, real = [], container.container_config

        def config(launch, agent, image_id, sidecar):
            told = types.SimpleNamespace(container=sidecar.container, volume=sidecar.volume, vsock=vsock)
            given.append(real(launch, agent, image_id, told))
            return given[-1]

        monkeypatch.setattr(docker, "container_config", config)
        calls = {name: (*numbers[:2], numbers[2:]) for name, numbers in CALLS.items()}
        seen = await what_is_seen(tmp_path, AGENT, {"calls": calls}, image=image)
        return given[0]["HostConfig"]["SecurityOpt"], seen

    return look


async def test_where_the_engine_lets_vsock_through_the_profile_is_ours(look):
    options, seen = await look(True)
    assert options == ["no-new-privileges", f"seccomp={profile()}"]
    assert (seen.pop("seccomp"), seen.pop("work")) == ("2", WORK)
    assert (seen.pop("unix"), seen.pop("personality")) == ("done", "done")
    assert seen.pop("clone3") == "ENOSYS", "for which C libraries have another way, as they have not for EPERM"
    assert set(seen.values()) == {"EPERM"}, seen


async def test_elsewhere_it_is_the_engines_own(look):
    options, seen = await look(False)
    assert options == ["no-new-privileges"]
    assert (seen["seccomp"], seen["work"]) == ("2", WORK)
