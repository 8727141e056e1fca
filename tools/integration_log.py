"""Run every Flower scenario and store its output, without local paths: `make integration`.

python -m tools.integration_log results/integration.log.txt
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def main() -> int:
    """Run the scenarios, and write the log."""
    target = Path(sys.argv[1])
    tests = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "tests" / "integration").glob("test_flower*.py"))
    with tempfile.TemporaryDirectory() as place:
        command = [sys.executable, "-m", "pytest", "-m", "", "-v", "-rP", "--durations=0", "-p", "no:cacheprovider",
                   "-W", "ignore::DeprecationWarning", f"--basetemp={place}/tests", *tests]  # fmt: skip
        process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        assert process.stdout is not None
        lines = []
        for line in process.stdout:
            sys.stdout.write(line)
            sys.stdout.flush()
            lines.append(_without_places(line, place))
        status = process.wait()
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in ("flwr", "torch", "cryptography"))
    head = f"make integration: Python {platform.python_version()}, {versions}, {os.cpu_count()} processors\n\n"
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(head + "".join(lines), encoding="utf-8")
    return status


def _without_places(line: str, temporary: str) -> str:
    """The line as it would read on any machine."""
    named = {temporary: "TMP", str(ROOT): ".", sys.prefix: "VENV", str(Path.home()): "HOME", tempfile.gettempdir(): "TMP"}
    for place, name in sorted(named.items(), key=lambda each: -len(each[0])):
        line = line.replace(place, name)
    return re.sub(r"(?<![\w.])/(?:[\w.@+-]+/)+[\w.@+-]+", lambda found: "…/" + found[0].rpartition("/")[2], line)


if __name__ == "__main__":
    sys.exit(main())
