"""How large the images of a deployment are, compressed (as a registry sends them) and unpacked.

    python -m tools.image_size --base ROOTFS --base-name NAME --out results/image_size.json
    python -m tools.image_size --base ROOTFS --base-name NAME --built DIR --wheels FOLDER --out results/image_size.json

An image is its base and the packages of `deploy/site/templates/requirements-*.txt`. The package index tells the compressed
size of each wheel; its table of contents, which is at its end, tells the unpacked size. `--wheels` names folders with
wheels that the index lacks (PyTorch's builds for CPUs). ROOTFS is the root directory of the base, which is archived and
compressed here. `--built` names an image that was built from the Dockerfile and pushed to a directory
(`buildah push IMAGE dir:DIR`): its manifest has the compressed sizes of its layers.
"""

from __future__ import annotations

import argparse
import gzip
import io
import json
import re
import runpy
import tarfile
import urllib.request
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.clean_tree import clean_commit
from fedcdp.deploy.site.service_files import image_requirements

ROOT = Path(__file__).parents[1]
PACKAGE = re.compile(r"^([\w.-]+)==(\S+) \\\n +--hash=sha256:([0-9a-f]{64})$", re.MULTILINE)
_files_of = runpy.run_path(str(ROOT / ".ci" / "registry.py"))["files_of"]


class RemoteFile(io.RawIOBase):
    """A file on the package index, of which parts are read."""

    def __init__(self, address: str) -> None:
        self._address = address
        with urllib.request.urlopen(urllib.request.Request(address, method="HEAD"), timeout=60) as answer:
            self.size = int(answer.headers["Content-Length"])
        self._at = 0

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self.size}[whence]
        return self._at

    def tell(self) -> int:
        return self._at

    def read(self, count: int = -1) -> bytes:
        end = self.size if count < 0 else min(self.size, self._at + count)
        if end <= self._at:
            return b""
        request = urllib.request.Request(self._address, headers={"Range": f"bytes={self._at}-{end - 1}"})
        with urllib.request.urlopen(request, timeout=60) as answer:
            content: bytes = answer.read()
        self._at += len(content)
        return content


def wheel_sizes(package: str, version: str, digest: str, folders: list[Path]) -> tuple[int, int]:
    """The compressed and the unpacked size of a package's wheel."""
    local = [path for folder in folders for path in folder.glob(f"{package.replace('-', '_')}-{version}-*.whl")]
    if local:
        return local[0].stat().st_size, _unpacked(local[0])
    [file] = [each for each in _files_of(package, version) if each.sha256 == digest]
    remote = RemoteFile(file.address)
    return remote.size, _unpacked(remote)


def _unpacked(wheel: Any) -> int:
    with zipfile.ZipFile(wheel) as archive:
        return sum(each.file_size for each in archive.infolist())


def base_sizes(rootfs: Path) -> tuple[int, int]:
    """The compressed and the unpacked size of a root directory."""

    class Counter(io.RawIOBase):
        size = 0

        def writable(self) -> bool:
            return True

        def write(self, content: Any) -> int:
            self.size += len(content)
            return len(content)

    packed = Counter()
    with gzip.GzipFile(fileobj=packed, mode="wb", mtime=0) as zipped, tarfile.open(fileobj=zipped, mode="w|") as archive:
        archive.add(rootfs, arcname=".")
    plain = sum(path.lstat().st_size for path in rootfs.rglob("*") if path.is_file() and not path.is_symlink())
    return packed.size, plain


def main() -> None:
    """Ask the index, compress the base, write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", type=Path, required=True, metavar="ROOTFS", help="root directory of the base")
    parser.add_argument("--base-name", required=True, help="what the base is")
    parser.add_argument("--wheels", type=Path, nargs="*", default=[], help="folders with wheels that the index lacks")
    parser.add_argument("--variants", nargs="*", default=["cpu", "gpu"], help="cpu, gpu")
    parser.add_argument("--built", type=Path, metavar="DIR", help="the CPU image, pushed to a directory")
    parser.add_argument("--out", type=Path, required=True, help="result file")
    given = parser.parse_args()
    written: dict[str, Any] = {"command": "python -m tools.image_size", "commit": clean_commit(), "unit": "bytes"}
    compressed, unpacked = base_sizes(given.base)
    written["base"] = {"name": given.base_name, "compressed": compressed, "unpacked": unpacked}
    for variant in given.variants:
        packages = PACKAGE.findall(image_requirements(variant))
        with ThreadPoolExecutor(8) as pool:
            sizes = list(pool.map(lambda each: wheel_sizes(*each, given.wheels), packages))
        wheels = {"compressed": sum(each[0] for each in sizes), "unpacked": sum(each[1] for each in sizes)}
        total = {name: wheels[name] + written["base"][name] for name in wheels}
        written[variant] = {"packages": len(packages), "wheels": wheels, "image": total}
    if given.built is not None:
        layers = json.loads((given.built / "manifest.json").read_text())["layers"]
        written["built"] = {"variant": "cpu", "compressed": sum(layer["size"] for layer in layers)}
    given.out.write_text(json.dumps(written, indent=1) + "\n")
    print(json.dumps(written, indent=1))


if __name__ == "__main__":
    main()
