"""`torchrun -m fedcdp train`: one run, one line for a failure, and no command that does its work several times."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from fedcdp.accounting.ledger import Ledger
from tests.support.rank_jobs import commands_on_ranks, free_port

SMALL = ["--dataset", "cancer", "--clients", "12", "--per-round", "6", "--local-steps", "2", "--rounds", "2", "--chunk", "2"]
TRAIN = ["train", *SMALL, "--json", "--out", "run"]
TORCHRUN = ["-m", "torch.distributed.run", "--nproc-per-node"]


def test_only_rank_0_prints_and_writes(cli: Callable[..., Any], workplace: Path) -> None:
    cli("train", *SMALL, "--json", "--out", "alone")
    first, *others = commands_on_ranks(TRAIN, TRAIN, TRAIN)
    assert [status for status, _, _ in (first, *others)] == [0, 0, 0]
    assert json.loads(first[1].splitlines()[-1])["rounds"] == 2
    assert [printed for _, *printed in others] == [["", ""]] * 2
    for name in ("ledger.jsonl", "model.safetensors", "config.toml"):
        assert (workplace / "run" / name).read_bytes() == (workplace / "alone" / name).read_bytes()


def test_a_target_is_calibrated_once_for_all_ranks(workplace: Path) -> None:
    wanted = ["train", *SMALL, "--target-epsilon", "2", "--secure-noise", "--quiet", "--out", "run"]
    assert [status for status, _, _ in commands_on_ranks(wanted, wanted)] == [0, 0]
    assert Ledger.open(workplace / "run" / "ledger.jsonl").rounds == (0, 1)


def test_a_rank_with_other_options_is_refused_with_one_line(workplace: Path) -> None:
    (status, out, err), (other, *said) = commands_on_ranks(TRAIN, ["train", *SMALL, "--clip", "3", "--out", "run"])
    assert (status, other, out, said) == (2, 2, "", ["", ""])
    assert err == "fedcdp: options: rank 1 does not have that of rank 0; all ranks need the same\n"
    assert not (workplace / "run").exists()


@pytest.mark.parametrize("wrong", [["--rounds", "0"], ["--no-such-option"], ["--model", "no.such:network"]])
def test_bad_input_of_all_ranks_gives_one_line(workplace: Path, wrong: list[str]) -> None:  # noqa: ARG001
    ended = commands_on_ranks([*TRAIN, *wrong], [*TRAIN, *wrong])
    assert [status for status, _, _ in ended] == [2, 2]
    assert [err.count("\n") for _, _, err in ended] == [1, 0]


def test_a_command_that_cannot_share_its_work_is_refused(workplace: Path) -> None:  # noqa: ARG001
    (status, _, err), (other, *said) = commands_on_ranks(["account"], ["account"])
    assert (status, other, said) == (2, 2, ["", ""])
    assert (
        err == "fedcdp: account: it does not use several ranks, and would do everything 2 times; run it without torchrun\n"
    )


def test_a_size_that_is_no_number_is_refused(cli: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "many")
    refused = cli("account")
    assert (refused.status, refused.stderr) == (
        2,
        "fedcdp: WORLD_SIZE: 'many' is not allowed; torchrun sets it to a whole number of at least 1\n",
    )


ATTACK = ["attack", *SMALL, "--method", "nonprivate", "--victims", "4", "--attack", "idlg", "--iterations", "2", "--json"]


def test_an_attack_on_ranks_is_that_of_one_process(cli: Callable[..., Any], workplace: Path) -> None:
    cli("train", *SMALL, "--quiet", "--out", "run")
    attacks = {
        "searches": [*ATTACK, "--chunk", "2"],
        "lira": ["attack", "--run", "run", "--attack", "lira", "--shadows", "10", "--victims", "50", "--json"],
    }
    for name, attack in attacks.items():
        alone = json.loads(cli(*attack, "--out", f"{name} alone").stdout)
        (status, out, err), (other, *said) = commands_on_ranks([*attack, "--out", name], [*attack, "--out", "elsewhere"])
        assert (status, other, said) == (0, 0, ["", ""]), err
        found = json.loads(out)
        assert found | {"seconds": 0} == alone | {"seconds": 0}
        assert (workplace / name / "summary.json").is_file()
        assert not (workplace / "elsewhere").exists()


def test_attacks_on_ranks_that_differ_or_cannot_begin_give_one_line(workplace: Path) -> None:
    (status, _, err), (other, *said) = commands_on_ranks(ATTACK, [*ATTACK, "--victims", "5"])
    assert (status, other, said) == (2, 2, ["", ""])
    assert err == "fedcdp: options: rank 1 does not have that of rank 0; all ranks need the same\n"
    (status, _, err), (other, *said) = commands_on_ranks(*[[*ATTACK, "--run", "missing"]] * 2)
    assert (status, other, said, err.count("\n")) == (2, 2, ["", ""], 1)
    assert not (workplace / "missing").exists()


TABLE = """
title = "Tiny"
layout = "accuracy"

[every]
data = { dataset = "cancer", clients = 8 }
plan = { per_round = 4, rounds = 2 }

[axes.method]
nonprivate = { plan.method = "nonprivate" }
fed-cdp = { plan.method = "fed-cdp" }

[axes.steps]
L1 = { plan.local_steps = 1 }
L2 = { plan.local_steps = 2 }
"""
REPRODUCE = ["reproduce", "tiny.toml", "--out", "out"]


@pytest.fixture
def tiny(workplace: Path) -> Path:
    """A table of four cells, whose result file is returned."""
    (workplace / "tiny.toml").write_text(TABLE)
    return workplace / "out" / "tiny.json"


def figures(path: Path) -> dict[str, Any]:
    """The accuracy of each cell in a result file."""
    return {name: row["accuracy"] for name, row in json.loads(path.read_text())["cells"].items()}


def test_a_table_of_ranks_that_differ_or_cannot_share_is_refused(tiny: Path) -> None:
    (status, _, err), (other, *said) = commands_on_ranks(REPRODUCE, [*REPRODUCE, "--cells", "fed-cdp"])
    assert (status, other, said) == (2, 2, ["", ""])
    assert err == "fedcdp: options: rank 1 does not have that of rank 0; all ranks need the same\n"
    for refused in (["reproduce", "--list"], [*REPRODUCE, "--table-only"], ["reproduce", "time", "--out", "out"]):
        (status, _, err), (other, *said) = commands_on_ranks(refused, refused)
        assert (status, other, said) == (2, 2, ["", ""])
        assert err.endswith("run it without torchrun\n")
        assert err.count("\n") == 1
    assert not tiny.exists()


# Real torchrun -------------------------------------------------------------------------------------------------------


@pytest.fixture
def hosts() -> Iterator[list[tuple[str, str]]]:
    """Two network namespaces that a virtual cable connects, each with the name of its interface: 10.77.0.1 and 10.77.0.2."""
    made = [(f"fedcdp-{os.getpid()}-{host}", f"cdp{os.getpid() % 10**8}{host}") for host in "ab"]
    (first, cable), (second, other_end) = made
    commands = [f"netns add {first}", f"netns add {second}"]
    commands += [f"link add {cable} netns {first} type veth peer name {other_end} netns {second}"]
    for number, (host, interface) in enumerate(made, 1):
        commands += [f"-n {host} addr add 10.77.0.{number}/24 dev {interface}"]
        commands += [f"-n {host} link set {each} up" for each in ("lo", interface)]
    try:
        for command in commands:
            subprocess.run(["ip", *command.split()], check=True, capture_output=True)
        yield made
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"network namespaces cannot be made here: {error}")
    finally:
        for host, _ in made:
            if Path(f"/run/netns/{host}").exists():
                subprocess.run(["ip", "netns", "del", host], check=True)


@pytest.mark.slow
def test_two_hosts_train_what_one_process_does(
    cli: Callable[..., Any], hosts: list[tuple[str, str]], workplace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cli("train", *SMALL, "--quiet", "--out", "alone")
    found = ["--nnodes", "2", "--master-addr", "10.77.0.1", "--master-port", "29511"]
    agents = []
    for number, (host, interface) in enumerate(hosts):
        monkeypatch.setenv("GLOO_SOCKET_IFNAME", interface)
        words = [*TORCHRUN, "2", *found, "--node-rank", str(number), "-m", "fedcdp", *TRAIN[:-1], f"run-{number}"]
        words = ["ip", "netns", "exec", host, sys.executable, *words]
        agents.append(subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
    try:
        said = [agent.communicate(timeout=300) for agent in agents]
    finally:
        for agent in agents:
            agent.kill()
    assert [agent.returncode for agent in agents] == [0, 0], said
    assert [json.loads(said[0][0].splitlines()[-1])["rounds"], said[1][0]] == [2, ""]
    for name in ("ledger.jsonl", "model.safetensors"):
        assert (workplace / "run-0" / name).read_bytes() == (workplace / "alone" / name).read_bytes()
    assert not (workplace / "run-1").exists()


@pytest.mark.slow
def test_two_machines_train_what_one_process_does(
    cli: Callable[..., Any], start: Callable[..., Any], workplace: Path
) -> None:
    """Two agents of torchrun stand for two machines. Rank 0 is on the first; the second has no run directory."""
    cli("train", *SMALL, "--quiet", "--out", "alone")
    found = ["--nnodes", "2", "--master-addr", "127.0.0.1", "--master-port", free_port()]
    agents = [
        start(*TORCHRUN, 2, *found, "--node-rank", node, "-m", "fedcdp", *TRAIN[:-1], f"run-{node}") for node in (0, 1)
    ]
    (out, err), (other, _) = [agent.communicate(timeout=120) for agent in agents]
    assert [agent.returncode for agent in agents] == [0, 0], err
    assert json.loads(out.splitlines()[-1])["rounds"] == 2
    assert other == ""
    assert (workplace / "run-0" / "model.safetensors").read_bytes() == (
        workplace / "alone" / "model.safetensors"
    ).read_bytes()
    assert not (workplace / "run-1").exists()


@pytest.mark.slow
def test_torchrun_attacks_as_one_process_does(cli: Callable[..., Any], start: Callable[..., Any], workplace: Path) -> None:  # noqa: ARG001
    alone = json.loads(cli(*ATTACK, "--chunk", "2").stdout)
    process = start(*TORCHRUN, 2, "-m", "fedcdp", *ATTACK, "--chunk", "2")
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    assert json.loads(out.splitlines()[-1]) | {"seconds": 0} == alone | {"seconds": 0}


@pytest.mark.slow
def test_cells_of_a_table_are_shared_and_rank_0_keeps_them(
    cli: Callable[..., Any], start: Callable[..., Any], tiny: Path, workplace: Path
) -> None:
    cli("reproduce", "tiny.toml", "--workers", "1", "--out", "alone")
    out, err = start(*TORCHRUN, 2, "-m", "fedcdp", *REPRODUCE).communicate(timeout=200)
    assert out.splitlines()[-1] == "out/tiny.md", err
    assert len([line for line in (out + err).splitlines() if "accuracy" in line]) == 4
    assert figures(tiny) == figures(workplace / "alone" / "tiny.json")


@pytest.mark.slow
def test_a_killed_rank_ends_a_table_which_is_completed_later(
    cli: Callable[..., Any], start: Callable[..., Any], tiny: Path, workplace: Path
) -> None:
    (workplace / "tiny.toml").write_text(TABLE.replace("rounds = 2", "rounds = 300"))
    process = start(*TORCHRUN, 2, "-m", "fedcdp", *REPRODUCE)
    while not (tiny.exists() and figures(tiny)):
        assert process.poll() is None, process.communicate()
        time.sleep(0.05)
    victim = max(int(pid) for pid in subprocess.check_output(["pgrep", "-P", str(process.pid)]).split())
    subprocess.run(["kill", f"-{signal.SIGKILL}", str(victim)], check=True)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 1
    (line,) = [line for line in err.splitlines() if line.startswith("fedcdp: ")]
    assert line.endswith("are in out/tiny.json; the same command resumes") or line.endswith("was lost, so this job ends")
    kept = figures(tiny)
    assert 1 <= len(kept) < 4
    assert cli(*REPRODUCE, "--workers", "1").status == 0
    assert {name: figures(tiny)[name] for name in kept} == kept
    assert len(figures(tiny)) == 4


@pytest.mark.slow
def test_a_killed_rank_ends_an_attack_with_one_line(start: Callable[..., Any], workplace: Path) -> None:  # noqa: ARG001
    lasting = [*SMALL, "--rounds", 400, "--attack", "lira", "--shadows", 512, "--victims", 50]
    process = start(*TORCHRUN, 2, "-m", "fedcdp", "attack", *lasting)
    for line in process.stderr:
        if "%" in line or "/" in line:  # the first line of progress, after ten seconds
            break
    victim = max(int(pid) for pid in subprocess.check_output(["pgrep", "-P", str(process.pid)]).split())
    subprocess.run(["kill", f"-{signal.SIGKILL}", str(victim)], check=True)
    killed = time.monotonic()
    _, err = process.communicate(timeout=60)
    assert time.monotonic() - killed < 30
    assert process.returncode == 1
    (line,) = [line for line in err.splitlines() if line.startswith("fedcdp: ")]
    assert line == "fedcdp: stopped" or line.endswith("was lost, so this job ends")


@pytest.mark.slow
def test_a_killed_rank_ends_the_job_with_one_line(
    start: Callable[..., Any], wait_for_rounds: Callable[[Path, int], None], workplace: Path
) -> None:
    process = start(*TORCHRUN, 2, "-m", "fedcdp", "train", *SMALL, "--rounds", 1000, "--quiet", "--out", "run")
    wait_for_rounds(workplace / "run", 3)
    victim = max(int(pid) for pid in subprocess.check_output(["pgrep", "-P", str(process.pid)]).split())
    subprocess.run(["kill", f"-{signal.SIGKILL}", str(victim)], check=True)
    killed = time.monotonic()
    _, err = process.communicate(timeout=60)
    assert time.monotonic() - killed < 30
    assert process.returncode == 1
    (line,) = [line for line in err.splitlines() if line.startswith("fedcdp: ")]
    assert line.endswith(
        "fedcdp train --resume --out run resumes after the last complete round, with any number of ranks"
    ) or (line == "fedcdp: stopped; fedcdp train --resume --out run resumes after the last complete round")
