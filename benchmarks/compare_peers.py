"""Compare fedcdp with its peers in one command: create an environment for each peer, then measure all of them in turns.

        python benchmarks/compare_peers.py --out results/peers.json                  # all, about ten minutes
        python benchmarks/compare_peers.py opacus --out results/peers.json           # one of them, about three minutes
        python benchmarks/compare_peers.py jax --quick --out results/peers.json      # the dense network only

Each peer gets its own virtual environment under --environments, with the versions below, created once. A peer that cannot be
installed is left out, and the result says so. Then `fedcdp bench --section peers` measures: one process each, one at a time,
one thread, turn by turn.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import venv
from pathlib import Path

_TORCH = "torch==2.13.0"
PACKAGES = {
    "opacus": [_TORCH, "opacus==1.6.0"],
    "flower": [_TORCH, "opacus==1.6.0", "flwr[simulation]==1.41.0"],
    "jax": ["jax==0.10.2"],
    "fedjax": ["jax==0.10.2", "fedjax==0.0.17"],
    "pfl": [_TORCH, "pfl[pytorch]==0.6.0"],
}
_OF_FEDCDP = ["numpy==2.4.6"]  # all that fedcdp's networks need besides PyTorch


def environment(peer: str, under: Path) -> Path | None:
    """The interpreter of a peer's environment, created if needed; None if that fails."""
    python = under / peer / "bin" / "python"
    done = under / peer / "installed"
    if not done.exists():
        print(f"installing {', '.join(PACKAGES[peer])}", file=sys.stderr)
        venv.create(under / peer, clear=True, with_pip=True)
        command = [str(python), "-m", "pip", "install", "--quiet", *PACKAGES[peer], *_OF_FEDCDP]
        if subprocess.run(command, check=False).returncode:
            print(f"{peer} cannot be installed here", file=sys.stderr)
            return None
        done.write_text(" ".join(PACKAGES[peer]))
    return python


def main() -> None:
    """Parse, install, measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("peers", nargs="*", metavar="PEER", help=f"{', '.join(PACKAGES)}; all by default")
    parser.add_argument("--environments", type=Path, default=Path("runs/peers"))
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="compare the dense network only")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--plot", type=Path)
    given = parser.parse_args()
    for name in given.peers:
        if name not in PACKAGES:
            parser.error(f"{name!r} is not one of {', '.join(PACKAGES)}")
    # Absolute, but not resolved: an environment's interpreter is a symlink, and only the symlink selects the environment.
    found = {name: environment(name, given.environments.absolute()) for name in given.peers or PACKAGES}
    options = [f"--peer-python={name}={python}" for name, python in found.items() if python is not None]
    options += ["--quick"] if given.quick else []
    options += [] if given.plot is None else ["--plot", str(given.plot)]
    command = [sys.executable, "-m", "fedcdp", "bench", "--section", "peers", "--repeat", str(given.repeat)]
    sys.exit(subprocess.run([*command, "--out", str(given.out), *options], check=False).returncode)


if __name__ == "__main__":
    main()
