"""The job files for clusters: their syntax, and that the commands in them exist."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
import typer

from fedcdp.cli.program import app
from fedcdp.config.presets import preset

FILES = sorted((Path(__file__).parents[2] / "examples" / "cluster").iterdir())


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_the_command_in_a_job_file_exists(path: Path) -> None:
    text = path.read_text()
    assert "torchrun" in text
    assert "-m fedcdp train" in text
    settings = " ".join(re.findall(r"SETTINGS=[(\"](.*?)[)\"]", text)) + text.partition("fedcdp train")[2].splitlines()[0]
    known = {name for each in typer.main.get_command(app).commands["train"].params for name in each.opts}  # type: ignore[attr-defined]
    used = set(re.findall(r"--[a-z-]+", settings))
    assert {"--preset", "--device", "--resume", "--out"} <= used <= known
    (name,) = set(re.findall(r"--preset ([\w-]+)", settings))
    assert preset(name)


def test_the_slurm_file_is_a_shell_script() -> None:
    (script,) = [path for path in FILES if path.suffix == ".sbatch"]
    subprocess.run(["bash", "-n", str(script)], check=True)


def test_the_kubernetes_file_has_a_job_whose_pods_find_each_other() -> None:
    yaml = pytest.importorskip("yaml")
    (file,) = [path for path in FILES if path.suffix == ".yaml"]
    service, policy, job = yaml.safe_load_all(file.read_text())
    pod = job["spec"]["template"]["spec"]
    assert pod["subdomain"] == service["metadata"]["name"]
    (command,) = pod["containers"][0]["args"]
    assert f"--master-addr {job['metadata']['name']}-0.{pod['subdomain']} " in command
    assert f"--nnodes {job['spec']['completions']} " in command
    selector = {"job-name": job["metadata"]["name"]}
    assert service["spec"]["selector"] == policy["spec"]["podSelector"]["matchLabels"] == selector
