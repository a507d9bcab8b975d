"""The sidecars' image, made from the Python that runs aglite: a few megabytes, no registry, no build step.

It holds the interpreter, the modules that `sidecar_child.py` imports and the shared libraries that all these need,
found by asking a fresh process which files it has open.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import subprocess
import sys
import tarfile
from pathlib import Path

from aglite.rollouts.backends import sidecar_child

PROGRAM = "/sidecar.py"
REPOSITORY = "aglite-sidecar"

_ASK = """
import sys
sys.path[:0] = [sys.argv[1]]
import encodings.utf_8, encodings.ascii, encodings.latin_1, encodings.idna
import sidecar_child, json
files = {getattr(module, "__file__", None) for module in list(sys.modules.values())} - {None}
files |= {line.split(None, 5)[5].strip() for line in open("/proc/self/maps") if len(line.split(None, 5)) == 6}
print(json.dumps(sorted(file for file in files if file.startswith("/"))))
"""


def sidecar_image() -> tuple[str, bytes, dict[str, object]]:
    """(tag by content, root file system as a tar, configuration) of the image. Takes a fraction of a second."""
    child = Path(sidecar_child.__file__)
    # not -I: the interpreter is to find its library in the image by PYTHONHOME, as it does here
    asked = subprocess.run(
        [sys.executable, "-S", "-E", "-c", _ASK, str(child.parent)], capture_output=True, text=True, check=True
    )
    interpreter = os.path.realpath(sys.executable)
    files = {name for name in json.loads(asked.stdout) if Path(name).is_file() and Path(name) != child}
    files |= {interpreter, os.__file__}
    archive = io.BytesIO()
    digest = hashlib.sha256()
    with tarfile.open(fileobj=archive, mode="w") as tar:
        for place, source in sorted([*((name, name) for name in files), (PROGRAM, str(child))]):
            data = Path(source).read_bytes()
            _add(tar, place, data, digest)
        for link, target in sorted(_links(files).items()):
            digest.update(f"{link}\0{target}\0".encode())
            member = tarfile.TarInfo(link.lstrip("/"))
            member.type, member.linkname = tarfile.SYMTYPE, target
            tar.addfile(member)
        _add(tar, "/etc/passwd", b"root:x:0:0::/:/bin/false\n", digest)
    tag = f"{REPOSITORY}:{digest.hexdigest()[:12]}"
    env = [f"PYTHONHOME={sys.base_prefix}", "PYTHONDONTWRITEBYTECODE=1", f"LD_LIBRARY_PATH={_folders(files)}"]
    return tag, archive.getvalue(), {"Entrypoint": [interpreter, "-S", PROGRAM], "Env": env}


def _add(tar: tarfile.TarFile, place: str, data: bytes, digest: hashlib._Hash) -> None:
    member = tarfile.TarInfo(place.lstrip("/"))
    member.size, member.mode = len(data), 0o755
    tar.addfile(member, io.BytesIO(data))
    digest.update(f"{place}\0{len(data)}\0".encode() + data)


def _folders(files: set[str]) -> str:
    return ":".join(sorted({os.path.dirname(file) for file in files if _is_library(file)}))


def _is_library(file: str) -> bool:
    return ".so" in os.path.basename(file)


def _links(files: set[str]) -> dict[str, str]:
    """Links by which the libraries are looked up: the kernel shows the file behind `libz.so.1`, not that name."""
    libraries = {file for file in files if _is_library(file)}
    # The loader itself is asked for by a full path, which no search path leads to.
    names = {name for name in LOADERS if os.path.exists(name)}
    for folder in {os.path.dirname(file) for file in libraries}:
        names |= {entry.path for entry in os.scandir(folder) if entry.is_symlink()}
    targets = {name: os.path.realpath(name) for name in names}
    return {name: target for name, target in targets.items() if target in libraries and name not in files}


LOADERS = ("/lib64/ld-linux-x86-64.so.2", "/lib/ld-linux-aarch64.so.1", "/lib/ld-musl-x86_64.so.1")
