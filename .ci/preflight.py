"""Check the interpreter and announce a large download, before `make` installs anything.

    python3 .ci/preflight.py TORCH_INDEX

It runs under whatever `python3` is, so it uses nothing that Python 3.6 lacks.
"""

import platform
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MEASURED = "2.13.0"  # the version of torch whose sizes these are, on Linux x86-64
DOWNLOAD, INSTALLED = "2.8 GB", "5.2 GB"
DOWNLOAD_CPU, INSTALLED_CPU = "0.3 GB", "1.2 GB"
CPU = "https://download.pytorch.org/whl/cpu"
CHOICES = "https://pytorch.org/get-started/locally/"


def unsupported(version, pyproject):
    """The reason why a (major, minor) version cannot be used, or an empty text."""
    low, high = re.search(r'^requires-python = ">=3\.(\d+),<3\.(\d+)"$', pyproject, re.MULTILINE).groups()
    if version[0] == 3 and int(low) <= version[1] < int(high):
        return ""
    newest = int(high) - 1
    return (
        f"PYTHON: Python {version[0]}.{version[1]} is not supported, 3.{low} to 3.{newest} are; "
        f"name another one, for example: make demo PYTHON=python3.{newest}"
    )


def announcement(index, system, installed):
    """How large the download is going to be; an empty text where it is not large or not known."""
    if index or installed or system != "Linux":
        return ""
    return (
        f"This downloads torch with its CUDA libraries: about {DOWNLOAD}, and {INSTALLED} on disk once installed.\n"
        f"Without a GPU, stop here and take a CPU build, which downloads {DOWNLOAD_CPU}: make demo TORCH_INDEX={CPU}\n"
        f"Other builds: {CHOICES}"
    )


def main():
    """Print what there is to say; end with 2 under an interpreter that is not supported."""
    reason = unsupported(sys.version_info[:2], (ROOT / "pyproject.toml").read_text())
    if reason:
        print(reason, file=sys.stderr)
        return 2
    installed = any((ROOT / ".venv").glob("lib/python3.*/site-packages/torch/__init__.py"))
    line = announcement("".join(sys.argv[1:]), platform.system(), installed)
    if line:
        print(line, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
