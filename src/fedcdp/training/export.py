"""Write a trained model or the metrics of its rounds in formats of other programs."""

from __future__ import annotations

import copy
import csv
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from io import StringIO
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from fedcdp.config.plan import Plan
from fedcdp.errors import RunError
from fedcdp.files.disk import write_atomically
from fedcdp.files.installation import install_command
from fedcdp.files.tensors import save_tensors
from fedcdp.files.tree import Inputs, each_tensor
from fedcdp.files.untrusted import MOST_SETTINGS, parse_toml, read_bounded
from fedcdp.models.networks import outputs_of
from fedcdp.training.rundir import Row, RunDirectory

ExportFormat = Literal["safetensors", "torchscript", "onnx", "csv", "tensorboard"]
Settings = Mapping[str, Any]
"""Sections of settings, as in `config.toml`."""

SUFFIXES = {
    ".safetensors": "safetensors", ".pt": "torchscript", ".torchscript": "torchscript", ".onnx": "onnx", ".csv": "csv",
}  # fmt: skip
"""The format that a suffix asks for."""


def format_of(path: Path) -> str:
    """The format that a name asks for by its suffix; without a suffix, a directory for TensorBoard."""
    if not path.suffix:
        return "tensorboard"
    if path.suffix not in SUFFIXES:
        raise RunError(
            f"format: the suffix of {path.name} names none; use {', '.join(SUFFIXES)}, or give one of "
            f"{', '.join(get_args(ExportFormat))}"
        )
    return SUFFIXES[path.suffix]


def export_model(
    form: str, to: Path, *, model: nn.Module, inputs: Inputs, metrics: Sequence[Row], settings: Settings
) -> Path:
    """Write the model, or the metrics of its rounds; an existing file is never overwritten.

    Args:
        form: One of `ExportFormat`.
        to: The file, or for `tensorboard` the directory.
        model: The trained network, which is not changed.
        inputs: Any inputs of the right shape and type; their values are not used.
        metrics: A row for each round.
        settings: Settings to show with the metrics, without those that must stay secret.
    """
    if form not in get_args(ExportFormat):
        raise RunError(f"format: {str(form)[:100]!r} is not one of {', '.join(get_args(ExportFormat))}")
    writers: dict[str, Callable[[], None]] = {
        "safetensors": lambda: save_tensors(to, model.state_dict(), {"format": "model-1"}),
        "torchscript": lambda: _torchscript(model, inputs, to),
        "onnx": lambda: _onnx(model, inputs, to),
        "csv": lambda: _csv(metrics, to),
        "tensorboard": lambda: _tensorboard(metrics, settings, to),
    }
    try:
        if to.exists():
            raise RunError(f"{to} already exists; nothing was overwritten")
        if not to.parent.is_dir():
            raise RunError(f"{to} cannot be written: there is no directory {to.parent}")
        writers[form]()
    except ImportError as error:
        raise RunError(f"format: {form} needs {error.name}; install it with {install_command('report')}") from error
    except OSError as error:
        raise RunError(f"{to} cannot be written: {error.strerror}") from error
    return to


def without_secrets(settings: Settings, plan: Plan) -> dict[str, Any]:
    """The settings that may be shown: without the directories of files, and without the seed of a private run.

    With the seed, anyone can subtract the noise and knows which records were drawn.
    """
    shown = {
        section: {key: value for key, value in values.items() if not (key == "seed" and plan.private)}
        if isinstance(values, Mapping)
        else values
        for section, values in settings.items()
    }
    for section, name in (("data", "file"), ("data", "columns")):
        if isinstance(shown.get(section), dict) and name in shown[section]:
            shown[section][name] = str(shown[section][name]).replace("\\", "/").rpartition("/")[2]
    return shown


def settings_in(directory: RunDirectory) -> dict[str, Any]:
    """The settings in a run directory."""
    try:
        return parse_toml(read_bounded(directory.config, MOST_SETTINGS))
    except OSError as error:
        raise RunError(f"{directory.config} cannot be read: {error.strerror or error}") from error
    except ValueError as error:
        raise RunError(f"{directory.config} is not a TOML file: {error}") from None


def settings_text(settings: Settings) -> str:
    """Settings as TOML; those without a value are left out."""
    import tomli_w

    kept = {
        section: {key: value for key, value in values.items() if value is not None}
        if isinstance(values, Mapping)
        else values
        for section, values in settings.items()
    }
    return tomli_w.dumps(kept)


def board_writer(place: Path | str, settings: Settings) -> Any:
    """A TensorBoard writer of event files in a directory, with the settings as its first text."""
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(str(place))
    writer.add_text("config", f"```toml\n{settings_text(settings)}```")
    return writer


def add_scalars(writer: Any, row: Row) -> None:
    """Add the figures of a round to a TensorBoard writer; one that was not measured is left out."""
    for name, value in row.items():
        if name != "round" and value is not None:
            writer.add_scalar(name, value, row["round"])


def _no_records(inputs: Inputs, count: int) -> Inputs:
    """Inputs of the right shape and type for formats that trace a model: such a format may also keep the inputs."""
    return each_tensor(inputs, lambda value: torch.zeros_like(value[:1]).repeat(count, *(1 for _ in value.shape[1:])))


def _traceable(model: nn.Module, inputs: Inputs, count: int) -> tuple[nn.Module, dict[str, Tensor], bool]:
    """A copy of the model on the CPU as a function of tensors that returns a tensor, and inputs by name, in their order.

    The last value says whether the copy is the model itself, with no wrapper around it.
    """
    network = copy.deepcopy(model).cpu().eval()
    inputs = each_tensor(_no_records(inputs, count), lambda value: value.cpu())
    if isinstance(inputs, dict):
        return _Positional(network, tuple(inputs)), inputs, False
    with torch.no_grad():
        plain = isinstance(copy.deepcopy(network)(inputs), Tensor)
    return network if plain else _Positional(network, ()), {"inputs": inputs}, plain


@contextmanager
def _written_out_attention() -> Iterator[None]:
    """Trace PyTorch's attention as ordinary operations. Its fast path depends on whether gradients are recorded."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


def _torchscript(model: nn.Module, inputs: Inputs, to: Path) -> None:
    network, zeros, _ = _traceable(model, inputs, 1)
    with _written_out_attention():
        program = torch.jit.trace(network, tuple(zeros.values()))
    write_atomically(to, program.save_to_buffer())


def _onnx(model: nn.Module, inputs: Inputs, to: Path) -> None:
    import onnx  # noqa: F401  (named in the error if it is missing)
    import onnxscript  # noqa: F401

    network, zeros, plain = _traceable(model, inputs, 2)
    batch = torch.export.Dim("batch")
    axes = tuple({0: batch} for _ in zeros)
    with _written_out_attention():
        program = torch.onnx.export(
            network, tuple(zeros.values()), dynamo=True, verbose=False,
            dynamic_shapes=axes if plain else (axes,),
            input_names=list(zeros) if len(zeros) > 1 else None,
        )  # fmt: skip
    write_atomically(to, program.model_proto.SerializeToString())  # type: ignore[union-attr]


def _csv(metrics: Sequence[Row], to: Path) -> None:
    written = StringIO()
    columns = list(dict.fromkeys(name for row in metrics for name in row))
    writer = csv.DictWriter(written, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(metrics)
    write_atomically(to, written.getvalue().encode())


def _tensorboard(metrics: Sequence[Row], settings: Settings, to: Path) -> None:
    with board_writer(to, settings) as writer:
        for row in metrics:
            add_scalars(writer, row)


class _Positional(nn.Module):
    """A model as a function of tensors, one for each of its named inputs, that returns a tensor."""

    def __init__(self, model: nn.Module, names: tuple[str, ...]) -> None:
        super().__init__()
        self.model, self.names = model, names

    def forward(self, *inputs: Tensor) -> Tensor:
        return outputs_of(self.model, dict(zip(self.names, inputs, strict=True)) if self.names else inputs[0])
