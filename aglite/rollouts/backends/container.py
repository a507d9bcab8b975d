"""What an agent's container may and may not: the whole of its isolation, as the Docker Engine is asked for it."""

from __future__ import annotations

from typing import Any

from aglite.config import Agent
from aglite.rollouts.backends import Launch, base_environment
from aglite.rollouts.backends.contained import FOLDER
from aglite.rollouts.backends.seccomp import profile
from aglite.rollouts.backends.sidecar import Sidecar

OPEN_FILES = 4096


def container_config(launch: Launch, agent: Agent, image_id: str, sidecar: Sidecar) -> dict[str, Any]:
    """The body of Docker's "create a container" for an attempt, in the sidecar's network and with its scratch files."""
    limits = launch.limits
    memory = limits.memory_mb << 20
    env = {**base_environment(f"{FOLDER}/home", "/tmp", f"{FOLDER}/task.json"), **launch.env}
    return {
        "Image": image_id,
        "Entrypoint": [launch.command[0]],
        "Cmd": list(launch.command[1:]),
        "Env": [f"{name}={value}" for name, value in env.items()],
        "WorkingDir": f"{FOLDER}/{launch.cwd}",
        "User": agent.user,
        "AttachStdin": True,
        "OpenStdin": True,
        "StdinOnce": True,
        "AttachStdout": True,
        "AttachStderr": True,
        "StopSignal": "SIGTERM",
        "Healthcheck": {"Test": ["NONE"]},
        "HostConfig": {
            "NetworkMode": f"container:{sidecar.container}",
            "Mounts": [
                {
                    "Type": "volume",
                    "Source": sidecar.volume,
                    "Target": FOLDER,
                    "VolumeOptions": {"NoCopy": True},
                }
            ],
            "Tmpfs": {"/tmp": f"size={limits.disk_mb}m,mode=1777,nosuid,nodev,exec"},
            "ReadonlyRootfs": True,
            "Init": True,
            "IpcMode": "private",
            "CapDrop": ["ALL"],
            "SecurityOpt": ["no-new-privileges", *([f"seccomp={profile()}"] if sidecar.vsock else [])],
            "Memory": memory,
            "MemorySwap": memory,
            "NanoCpus": round(limits.cpus * 1e9) if limits.cpus else 0,
            "PidsLimit": limits.pids,
            "OomScoreAdj": 500,
            "Ulimits": [
                {"Name": "nofile", "Soft": OPEN_FILES, "Hard": OPEN_FILES},
                {"Name": "core", "Soft": 0, "Hard": 0},
            ],
            "LogConfig": {"Type": "none"},
        },
    }
