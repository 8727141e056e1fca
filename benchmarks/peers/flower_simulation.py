"""Flower (Beutel et al., 2020): its simulation on Ray, with clients that train as in `opacus_client`.

One client at a time on one CPU. A client's network and optimiser are created once in Ray's process and kept: Flower's best
case.
"""

from __future__ import annotations

import os
import time
import traceback
from functools import cache
from pathlib import Path

import flwr
import torch
from flwr.app import ArrayRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.simulation import run_simulation
from opacus_client import fastest_client
from torch_client import Client, network_of
from turns import NotPossibleError, Task, Turns, clients_a_turn

_FEWEST, _MOST = 4, 50  # clients per round

os.environ |= {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1", "RAY_DISABLE_IMPORT_WARNING": "1"}
# Ray's processes must find the files next to this one, and fedcdp.
os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), str(Path(__file__).resolve().parents[2] / "src")])


@cache
def client_of(written: str) -> Client:
    """The client of a process, for its task; Ray's processes import this module and call this function."""
    torch.set_num_threads(1)
    return fastest_client(Task.read(written))[0]


def _client_app(task: Task) -> ClientApp:
    app = ClientApp()
    written = task.written()

    @app.train()
    def train(message: Message, _: Context) -> Message:
        import flower_simulation  # not this function's own module: Ray would send a copy of it with every message

        client = flower_simulation.client_of(written)
        torch._foreach_copy_(client.global_weights, list(message.content["arrays"].to_torch_state_dict().values()))
        client.train()
        update = torch._foreach_sub(client.weights, client.global_weights)
        sent = ArrayRecord({str(number): each for number, each in enumerate(update)})
        return Message(content=RecordDict({"arrays": sent}), reply_to=message)

    return app


def _server_app(task: Task, turns: Turns, clients: int) -> ServerApp:
    app = ServerApp()

    @app.main()
    def main(grid: Grid, _: Context) -> None:
        weights = {str(n): each.detach() for n, each in enumerate(network_of(task).parameters())}

        def round_() -> int:
            nodes = list(grid.get_node_ids())
            content = RecordDict({"arrays": ArrayRecord(weights)})
            messages = [Message(content=content, message_type="train", dst_node_id=node) for node in nodes]
            replies = [each.content["arrays"].to_torch_state_dict() for each in grid.send_and_receive(messages)]
            if len(replies) != clients:
                raise NotPossibleError(f"{len(replies)} of {clients} clients answered")
            for name, value in weights.items():
                weights[name] = value + torch.stack([reply[name] for reply in replies]).mean(0)
            return clients * task.local_steps

        try:
            while len(list(grid.get_node_ids())) < clients:
                time.sleep(0.1)
            round_()
            turns.ready(f"{flwr.__version__}", f"{clients} clients per round, one after the other, on Ray")
            turns.serve(round_, elsewhere=True)
        except Exception as error:
            traceback.print_exc()
            turns.missing(f"{type(error).__name__}: {error}")

    return app


def serve(task: Task, turns: Turns) -> None:
    """Rounds of a few clients."""
    if task.device != "cpu":
        raise NotPossibleError("only the CPU is compared")
    torch.set_num_threads(1)
    config = {"init_args": {"num_cpus": 1, "include_dashboard": False}, "client_resources": {"num_cpus": 1, "num_gpus": 0.0}}
    # A round takes twice as long as a turn of the others: its server polls for answers ten times a second.
    clients = max(_FEWEST, min(_MOST, 2 * clients_a_turn(task, fastest_client(task)[0].seconds_a_step())))
    run_simulation(_server_app(task, turns, clients), _client_app(task), num_supernodes=clients, backend_config=config)
