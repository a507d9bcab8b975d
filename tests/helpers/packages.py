"""Packages that a machine seems to have."""

from collections.abc import Callable, Mapping
from importlib import metadata


def installed(versions: Mapping[str, str]) -> Callable[[str], str]:
    """`importlib.metadata.version` of a machine with these versions by name."""

    def version(name: str) -> str:
        if name not in versions:
            raise metadata.PackageNotFoundError(name)
        return versions[name]

    return version
