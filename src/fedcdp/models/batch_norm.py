"""Batch normalisation: which layers mix examples, and their replacement.

In training mode a BatchNorm normalises each example by statistics of its whole batch, so one example's gradient depends on
the other examples: clipping it bounds nothing. The layer also moves its running statistics towards those of the raw
batch. They are part of the model, and whoever reads the model (server, clients, users) would read a mean of private
records without noise that no ledger entry covers.

In evaluation mode the statistics are constants. An example's output then depends on that example and on the weights
alone, and nothing is recorded. The gradient of the layer's weight and bias is well defined, so they may be trained.

| a BatchNorm in | with running statistics | mixes examples |
| --- | --- | --- |
| training mode | yes or no | yes |
| evaluation mode | yes | no |
| evaluation mode | no (`track_running_stats=False`) | yes |
"""

from __future__ import annotations

import copy

from torch import nn

from fedcdp.errors import ModelError

BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
_LAZY = (nn.LazyBatchNorm1d, nn.LazyBatchNorm2d, nn.LazyBatchNorm3d)
_INSTANCE_NORMS = (
    nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d,
    nn.LazyInstanceNorm1d, nn.LazyInstanceNorm2d, nn.LazyInstanceNorm3d,
)  # fmt: skip
_MOST_GROUPS = 32
_FEWEST_CHANNELS = 4  # in a group: fewer values of a vector would be normalised to little more than their signs


def mixing_layers(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """The layers in which an example's output depends on the other examples of its batch.

    Batch norms of all libraries have `track_running_stats`; so does torch's instance norm, which does not mix examples.
    """
    return [
        (name, layer)
        for name, layer in model.named_modules()
        if hasattr(layer, "track_running_stats")
        and not isinstance(layer, _INSTANCE_NORMS)
        and not has_fixed_statistics(layer)
    ]


def has_fixed_statistics(layer: nn.Module) -> bool:
    """Whether a batch norm is in evaluation mode and has the running statistics that this mode uses."""
    known = (getattr(layer, "running_mean", None), getattr(layer, "running_var", None))
    return not layer.training and all(each is not None for each in known)


def replace_batch_norm(model: nn.Module) -> nn.Module:
    """Replace each BatchNorm that mixes examples by a GroupNorm, which private methods can train.

    The GroupNorm has the same channels, ε, weight and bias. `BatchNorm1d` becomes one group over all channels. Other layers
    get the most groups, at most 32, that divide the channels and leave at least four channels in each. A BatchNorm in
    evaluation mode keeps its fixed statistics and is not replaced: it mixes nothing. GroupNorm computes other values than
    BatchNorm, so train the result; do not expect a pretrained network's accuracy from it.

    Args:
        model: Any network with `BatchNorm1d`, `BatchNorm2d`, `BatchNorm3d` or `SyncBatchNorm` layers.

    Returns:
        A copy of the network; the given one is not changed.

    Raises:
        ModelError: A batch norm has no replacement: a lazy one, one of another library, or one over a single feature.

    Examples:
        >>> import fedcdp
        >>> from torch import nn
        >>> network = nn.Sequential(nn.Conv2d(3, 64, 3), nn.BatchNorm2d(64), nn.ReLU())
        >>> fedcdp.replace_batch_norm(network)[1]
        GroupNorm(16, 64, eps=1e-05, affine=True, bias=True)
    """
    for name, layer in mixing_layers(model):
        _check_replaceable(name, layer)
    ready = copy.deepcopy(model)
    norms = {id(layer): _group_norm(layer) for _, layer in mixing_layers(ready)}
    for name, layer in list(ready.named_modules(remove_duplicate=False)):
        if name and id(layer) in norms:
            ready.set_submodule(name, norms[id(layer)])
    return norms.get(id(ready), ready)


def _check_replaceable(name: str, layer: nn.Module) -> None:
    """Raise unless a layer can be replaced by a GroupNorm."""
    place = f"layer {name or '(the network itself)'} is {type(layer).__name__}"
    if isinstance(layer, _LAZY):
        raise ModelError(f"{place}, whose channels are not known yet; run a made-up batch through the network first")
    if type(layer) not in BATCH_NORMS:
        raise ModelError(f"{place}, which has no known replacement; write GroupNorm or LayerNorm into the network yourself")
    if isinstance(layer, nn.BatchNorm1d) and layer.num_features == 1:
        raise ModelError(f"{place} over a single feature, which GroupNorm would set to zero; leave the layer out")


def _group_norm(layer: nn.Module) -> nn.GroupNorm:
    """The GroupNorm that replaces a layer."""
    assert isinstance(layer, BATCH_NORMS)
    channels = layer.num_features
    allowed = range(1, min(_MOST_GROUPS, channels // _FEWEST_CHANNELS) + 1)
    groups = 1 if isinstance(layer, nn.BatchNorm1d) else max((n for n in allowed if channels % n == 0), default=1)
    norm = nn.GroupNorm(groups, channels, eps=layer.eps, affine=layer.affine).train(layer.training)
    if layer.affine:
        norm.weight, norm.bias = layer.weight, layer.bias
    return norm
