"""Write requirements-ci.txt: every package that CI installs, at one version, with the hash of every file of that version;
.ci/metadata.json: what the package index states about every package that constraints.txt pins; and the two lists of what
container images install, with the hash of the one file that is installed.

    .venv/bin/python .ci/lock.py
    .venv/bin/python .ci/lock.py --images  # only the lists for images

Versions are those that pip resolves for pyproject.toml under constraints.txt. Hashes are those that the package index lists
for all files of a version, for every platform. Of a local version (PyTorch's build for CPUs, 2.13.0+cpu) it is that of the
file alone which pip would install here: the index has, under the same public version, another build with other dependencies.
The metadata is that of the index's build. tests/test_pins.py compares the pins with it, whatever build is installed.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from packaging.utils import canonicalize_name
from registry import INDEX, files_of, metadata_of

ROOT = Path(__file__).parent.parent
TARGET = ROOT / "requirements-ci.txt"
METADATA = ROOT / ".ci" / "metadata.json"
EXTRAS = "dev,report,flower,docs"
BUILD = ("setuptools", "wheel")  # what builds this package; it is installed without isolation
HEAD = """# What CI installs, by hash; written by .ci/lock.py from pyproject.toml and constraints.txt. Do not edit.
# pip install --no-deps --require-hashes -r requirements-ci.txt
"""
IMAGES = ROOT / "src" / "fedcdp" / "deploy" / "site" / "templates"
IMAGE_EXTRAS = "flower,metrics,tables"
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
IMAGE_HEAD = """# What an image installs with Python 3.11 on Linux x86-64, by hash; written by .ci/lock.py. Do not edit.
"""


def main() -> None:
    """Resolve, look hashes and metadata up, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", action="store_true", help="write only the lists for images")
    if not parser.parse_args().images:
        lock_ci()
    # A GPU's torch comes from the index itself, whatever other places the settings of pip name.
    lock_image("cpu", resolved(IMAGE_EXTRAS), f"--extra-index-url {CPU_INDEX}\n")
    lock_image("gpu", resolved(IMAGE_EXTRAS, "--isolated", "--index-url", INDEX), "")


def lock_image(variant: str, packages: dict[str, tuple[str, set[str]]], options: str) -> None:
    """Write the list of one variant of the image."""
    target = IMAGES / f"requirements-{variant}.txt"
    lines = []
    for name, (version, hashes) in sorted(packages.items()):
        if len(hashes) != 1:
            raise LookupError(f"{name} {version}: pip names no hash of the file that it would install")
        lines.append(f"{name}=={version} \\\n    --hash=sha256:{hashes.pop()}\n")
    target.write_text(IMAGE_HEAD + options + "".join(lines))
    print(f"{target.name}: {len(packages)} packages")


def lock_ci() -> None:
    """Write what CI installs, and what the index states about what is pinned."""
    packages = resolved(EXTRAS, build=True)
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


def resolved(extras: str, *options: str, build: bool = False) -> dict[str, tuple[str, set[str]]]:
    """Version and own hash of every package that pip would install, by name."""
    wanted = ["torch", *(BUILD if build else ()), f"{ROOT}[{extras}]"]
    command = [sys.executable, "-m", "pip", "install", *options, "--quiet", "--dry-run", "--ignore-installed",
               "--report", "-", "--constraint", str(ROOT / "constraints.txt"), *wanted]  # fmt: skip
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
