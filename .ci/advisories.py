"""What PyPI's project pages list as vulnerabilities of the packages that CI installs.

    python .ci/advisories.py --out results/reliability/advisories.json

pip-audit (`make audit-dependencies`) asks for each version and is the real check. Where only the pages of projects can be
reached, they still tell about the newest version of each, and whether a version was withdrawn. Ends with 1 if anything is
listed; a version that is not the newest is reported as not known, never as clean.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from datetime import date
from pathlib import Path
from typing import Any

PINS = Path(__file__).parent.parent / "requirements-ci.txt"
PAGE = "https://pypi.org/pypi/{}/json"


def ask(name: str, version: str) -> dict[str, Any]:
    """What the project's page says of one version; None where it says nothing."""
    with urllib.request.urlopen(PAGE.format(name), timeout=60) as answer:  # noqa: S310  # nosec B310 (a fixed https address)
        page = json.load(answer)
    newest = page["info"]["version"]
    files = page["releases"].get(version, [])
    return {
        "version": version,
        "newest": newest,
        "vulnerabilities": [each["id"] for each in page["vulnerabilities"]] if version == newest else None,
        "withdrawn": all(file["yanked"] for file in files) if files else None,
    }


def main() -> int:
    """Ask for all of them, tell, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=None, help="Where the result goes, as JSON.")
    given = parser.parse_args()
    pins = dict(re.findall(r"^([A-Za-z0-9_.-]+)==([^\s\\;]+)", PINS.read_text(), re.MULTILINE))
    with ThreadPoolExecutor(4) as pool:
        found = dict(zip(pins, pool.map(ask, pins, pins.values()), strict=True))
    known = {name: each["vulnerabilities"] for name, each in found.items() if each["vulnerabilities"] is not None}
    result = {
        "command": "python .ci/advisories.py",
        "asked_on": date.today().isoformat(),
        "packages": len(found),
        "newest, so known": len(known),
        "vulnerable": {name: listed for name, listed in known.items() if listed},
        "withdrawn": [name for name, each in found.items() if each["withdrawn"]],
        "not the newest, so not known": {
            name: f"{each['version']} of {each['newest']}" for name, each in found.items() if name not in known
        },
    }
    print(json.dumps(result, indent=1))
    if given.out:
        given.out.write_text(json.dumps(result, indent=1) + "\n")
    return 1 if result["vulnerable"] or result["withdrawn"] else 0


if __name__ == "__main__":
    sys.exit(main())
