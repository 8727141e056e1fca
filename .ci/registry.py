"""Ask the package index for the files of a version, their hashes, and the requirements that their metadata states."""

from __future__ import annotations

import io
import re
import urllib.error
import urllib.request
import zipfile
from dataclasses import dataclass
from email.parser import HeaderParser
from html import unescape
from typing import Any
from urllib.parse import unquote

from packaging.requirements import Requirement
from packaging.tags import compatible_tags, cpython_tags
from packaging.utils import canonicalize_name, parse_wheel_filename

INDEX = "https://pypi.org/simple"
PYTHONS = ("3.11", "3.12", "3.13")
_PLATFORMS = [f"manylinux_2_{minor}_x86_64" for minor in range(28, 4, -1)]
_PLATFORMS += ["manylinux2014_x86_64", "manylinux2010_x86_64", "manylinux1_x86_64", "linux_x86_64"]
_LINK = re.compile(r'href="([^"]*/([^"/#]+))#sha256=([0-9a-f]{64})"')


@dataclass(frozen=True)
class IndexFile:
    """One file of a version on the index."""

    address: str
    name: str
    sha256: str


def files_of(package: str, version: str) -> list[IndexFile]:
    """Every file of a version, for every platform."""
    page = _read(f"{INDEX}/{package}/").decode()
    links = (IndexFile(unescape(address), unquote(name), digest) for address, name, digest in _LINK.findall(page))
    return [each for each in links if _version_of(each.name, package) == version]


def metadata_of(package: str, version: str) -> dict[str, Any]:
    """What the wheels for Linux x86-64 state: the Pythons that they run on, and the requirements outside of extras.

    Raises:
        LookupError: A supported Python has no wheel, or the wheels for two of them state different things.
    """
    files = files_of(package, version)
    stated = {}
    for python in PYTHONS:
        wheel = _wheel(files, python)
        if wheel is None:
            raise LookupError(f"{package} {version}: the index has no wheel for Python {python} on Linux x86-64")
        if wheel not in stated:
            stated[wheel] = _requirements(_metadata(wheel))
    first, *others = stated.values()
    if any(each != first for each in others):
        raise LookupError(f"{package} {version}: its wheels state different requirements")
    return {"version": version, **first}


def _wheel(files: list[IndexFile], python: str) -> IndexFile | None:
    """The wheel that pip would prefer under one Python."""
    number, interpreter = tuple(map(int, python.split("."))), f"cp{python.replace('.', '')}"
    tags = [*cpython_tags(number, platforms=_PLATFORMS), *compatible_tags(number, interpreter, _PLATFORMS)]
    ranked = {tag: rank for rank, tag in reversed(list(enumerate(tags)))}
    fitting = {}
    for file in files:
        if file.name.endswith(".whl"):
            ranks = [ranked[tag] for tag in parse_wheel_filename(file.name)[3] if tag in ranked]
            if ranks:
                fitting[file] = min(ranks)
    return min(fitting, key=lambda file: fitting[file], default=None)


def _metadata(wheel: IndexFile) -> str:
    """The metadata file, which lies beside the wheel; where it does not, it is taken out of the wheel."""
    try:
        return _read(f"{wheel.address}.metadata").decode()
    except urllib.error.HTTPError as error:
        if error.code != 404:
            raise
    with zipfile.ZipFile(io.BytesIO(_read(wheel.address))) as archive:
        name = next(each for each in archive.namelist() if re.fullmatch(r"[^/]+\.dist-info/METADATA", each))
        return archive.read(name).decode()


def _requirements(metadata: str) -> dict[str, Any]:
    headers = HeaderParser().parsestr(metadata)
    requirements = [str(Requirement(each)) for each in headers.get_all("Requires-Dist", [])]
    return {
        "requires_python": headers.get("Requires-Python", ""),
        "requires": sorted(each for each in requirements if not re.search(r"\bextra\b\s*==", each.partition(";")[2])),
    }


def _version_of(file: str, package: str) -> str | None:
    """The version in the name of a wheel or a source archive."""
    stem = re.sub(r"\.(whl|tar\.gz|zip|tar\.bz2)$", "", file)
    if file.endswith(".whl"):
        parts = stem.split("-")
        return parts[1] if len(parts) >= 5 else None
    return stem[len(package) + 1 :] if canonicalize_name(stem).startswith(f"{package}-") else None


def _read(address: str) -> bytes:
    with urllib.request.urlopen(address, timeout=60) as answer:  # noqa: S310  # nosec B310 (an https address of the index)
        content: bytes = answer.read()
    return content
