"""Write requirements-ci.txt: every package that CI installs, at one version, with the hash of every file of that version;
and .ci/metadata.json: what the package index states about every package that constraints.txt pins.

    .venv/bin/python .ci/lock.py

Versions are those that pip resolves for pyproject.toml under constraints.txt. Hashes are those that the package index lists
for all files of a version, for every platform. Of a local version (PyTorch's build for CPUs, 2.13.0+cpu) it is that of the
file alone which pip would install here: the index has, under the same public version, another build with other dependencies.
The metadata is that of the index's build. tests/test_pins.py compares the pins with it, whatever build is installed.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from packaging.utils import canonicalize_name
from registry import files_of, metadata_of

ROOT = Path(__file__).parent.parent
TARGET = ROOT / "requirements-ci.txt"
METADATA = ROOT / ".ci" / "metadata.json"
EXTRAS = "dev,report,flower,docs"
BUILD = ("setuptools", "wheel")  # what builds this package; it is installed without isolation
HEAD = """# What CI installs, by hash; written by .ci/lock.py from pyproject.toml and constraints.txt. Do not edit.
# pip install --no-deps --require-hashes -r requirements-ci.txt
"""


def main() -> None:
    """Resolve, look hashes and metadata up, write."""
    packages = resolved()
    with ThreadPoolExecutor(8) as pool:
        hashes = dict(zip(packages, pool.map(lambda name: known(name, *packages[name]), packages), strict=True))
    lines = [HEAD]
    for name, (version, _) in sorted(packages.items()):
        written = [f"{name}=={version.partition('+')[0]}", *(f"    --hash=sha256:{each}" for each in sorted(hashes[name]))]
        lines.append(" \\\n".join(written) + "\n")
    TARGET.write_text("".join(lines))
    print(f"{TARGET.name}: {len(packages)} packages, {sum(map(len, hashes.values()))} files")
    pins = dict(re.findall(r"^([\w.-]+)==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE))
    with ThreadPoolExecutor(8) as pool:
        stated = dict(zip(pins, pool.map(metadata_of, pins, pins.values()), strict=True))
    METADATA.write_text(json.dumps(stated, indent=1, sort_keys=True) + "\n")
    print(f"{METADATA.name}: what the index states about {len(stated)} packages")


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
            found[canonicalize_name(name)] = (version, {archive["sha256"]} if "sha256" in archive else set())
    return found


def known(name: str, version: str, own: set[str]) -> set[str]:
    """The hashes of all files of a version that the index has; of a local version, its own."""
    if "+" in version:
        return own
    return own | {file.sha256 for file in files_of(name, version)}


if __name__ == "__main__":
    main()
