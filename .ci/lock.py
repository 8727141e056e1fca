"""Write requirements-ci.txt: every package that CI installs, at one version, with the hash of every file of that version.

    .venv/bin/python .ci/lock.py

Versions are those that pip resolves for pyproject.toml under constraints.txt. Hashes are those that the package index lists
for all files of a version, for every platform. Of a local version (PyTorch's build for CPUs, 2.13.0+cpu) it is that of the
file alone which pip would install here: the index has, under the same public version, another build with other dependencies.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import unquote

ROOT = Path(__file__).parent.parent
TARGET = ROOT / "requirements-ci.txt"
EXTRAS = "dev,report,flower,docs"
BUILD = ("setuptools", "wheel")  # what builds this package; it is installed without isolation
INDEX = "https://pypi.org/simple"
HEAD = """# What CI installs, by hash; written by .ci/lock.py from pyproject.toml and constraints.txt. Do not edit.
# pip install --no-deps --require-hashes -r requirements-ci.txt
"""
_FILE = re.compile(r'href="[^"]*/([^"/#]+)#sha256=([0-9a-f]{64})"')


def main() -> None:
    """Resolve, look the hashes up, write."""
    packages = resolved()
    with ThreadPoolExecutor(8) as pool:
        hashes = dict(zip(packages, pool.map(lambda name: known(name, *packages[name]), packages), strict=True))
    lines = [HEAD]
    for name, (version, _) in sorted(packages.items()):
        written = [f"{name}=={version.partition('+')[0]}", *(f"    --hash=sha256:{each}" for each in sorted(hashes[name]))]
        lines.append(" \\\n".join(written) + "\n")
    TARGET.write_text("".join(lines))
    print(f"{TARGET.name}: {len(packages)} packages, {sum(map(len, hashes.values()))} files")


def resolved() -> dict[str, tuple[str, set[str]]]:
    """Version and own hash of every package that pip would install, by name."""
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--dry-run", "--ignore-installed", "--report", "-",
               "--constraint", str(ROOT / "constraints.txt"), "torch", *BUILD, f"{ROOT}[{EXTRAS}]"]  # fmt: skip
    report = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    found = {}
    for each in report["install"]:
        name, version = each["metadata"]["name"], each["metadata"]["version"]
        if name != "fedcdp":
            archive = each["download_info"].get("archive_info", {}).get("hashes", {})
            found[_normal(name)] = (version, {archive["sha256"]} if "sha256" in archive else set())
    return found


def known(name: str, version: str, own: set[str]) -> set[str]:
    """The hashes of all files of a version that the index has; of a local version, its own."""
    if "+" in version:
        return own
    with urllib.request.urlopen(f"{INDEX}/{name}/", timeout=60) as page:  # noqa: S310  # nosec B310 (a fixed https address)
        files = _FILE.findall(page.read().decode())
    return own | {digest for file, digest in files if _version_of(unquote(file), name) == version}


def _version_of(file: str, name: str) -> str | None:
    """The version in the name of a wheel or a source archive."""
    stem = re.sub(r"\.(whl|tar\.gz|zip|tar\.bz2)$", "", file)
    normal, parts = _normal(stem), stem.split("-")
    if file.endswith(".whl"):
        return parts[1] if len(parts) >= 5 else None
    return stem[len(name) + 1 :] if normal.startswith(f"{name}-") else None


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


if __name__ == "__main__":
    main()
