"""A network with a frozen part, cut in two by tracing its `forward`.

`cut` finds the operations that depend on the inputs and on frozen tensors alone. Their last results are the *features*. The
front computes them; the remainder takes them in place of the inputs and computes the network's outputs.

Guarantees, each checked on made-up inputs before a cut is returned:

- An example's features depend on that example alone, and not on chance: the front is a `vmap` over single examples, and
  whatever draws random numbers fails there.
- The two parts compute what the network computes, for one example and for several.
- The remainder's trained tensors have the names and the order that they have in the network.

A network that cannot be traced (control flow that depends on values, variable arguments, hooks) is not cut.
"""

from __future__ import annotations

import copy
import inspect
from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, fx, nn

from fedcdp.engine.unfused import has_recurrent_layers, unfused
from fedcdp.files.tree import Inputs, each_tensor, tensors_in
from fedcdp.models.networks import outputs_of

_SINGLE = "features"
_FREE = (nn.Flatten, nn.Identity, nn.Dropout)  # cost next to nothing
_COUNTS = (1, 3)  # examples of the made-up batches: no axis but the batch's has both lengths


class TracedFront(nn.Module):
    """The features of examples: a tensor, or several by name."""

    def __init__(self, network: nn.Module, graph: fx.Graph, names: tuple[str, ...]) -> None:
        super().__init__()
        self.network, self.names = fx.GraphModule(network, graph), names
        self._recurrent = has_recurrent_layers(self.network)

    def forward(self, inputs: Inputs) -> Inputs:
        with unfused(self._recurrent):
            found = torch.func.vmap(self._of_one)(inputs)
        return found[0] if len(found) == 1 else dict(zip(self.names, found, strict=True))

    def _of_one(self, example: Inputs) -> tuple[Tensor, ...]:
        alone = each_tensor(example, lambda value: value[None])
        found = self.network(**alone) if isinstance(alone, dict) else self.network(alone)
        return tuple(each[0] for each in found)


class Remainder:
    """What is left of a network behind its features: the base of a class that is made for each cut."""

    sequence: tuple[str, ...] = ()
    """The names of its layers, if it is a sequence of layers, each used once."""


def cut(network: nn.Module, inputs: Inputs) -> tuple[TracedFront, nn.Module, Inputs] | None:
    """The front, the remainder, and the features of one made-up example; None if the network cannot be cut or need not be.

    `inputs` are some examples, of which only shape, type and device are read.
    """
    if not _partly_frozen(network):
        return None
    made_up = {count: _made_up(inputs, count) for count in _COUNTS}
    try:
        graph = _traced(network, inputs)
        values = {count: _values(network, graph, some) for count, some in made_up.items()}
        features = _boundary(network, graph, values)
        if not any(_costs(network, node) for node in _needed(features)):
            return None
        front, rest = _front(network, graph, features), _remainder(network, graph, features)
        for some in made_up.values():
            if not _same(outputs_of(network, some), outputs_of(rest, front(some))):
                return None
        return front, rest, front(made_up[1])
    except Exception:  # many networks cannot be traced, for as many reasons; they are trained uncut
        return None


def _partly_frozen(network: nn.Module) -> bool:
    """Whether some module with parameters trains none of them."""
    return any(
        parameters and not any(p.requires_grad for p in parameters)
        for parameters in (list(module.parameters()) for module in network.modules())
    )


def _made_up(inputs: Inputs, count: int) -> Inputs:
    """Inputs of the right shape and type that are nobody's: random numbers, or ones in place of whole numbers.

    A mask of ones keeps every position; one of zeros would leave attention without any.
    """
    generator = torch.Generator().manual_seed(0)

    def made(value: Tensor) -> Tensor:
        shape = (count, *value.shape[1:])
        if not value.is_floating_point():
            return torch.ones(shape, dtype=value.dtype, device=value.device)
        return torch.rand(shape, generator=generator).to(value)

    return each_tensor(inputs, made)


class _Tracer(fx.Tracer):
    """Does not look into modules that train nothing: they may do anything that `vmap` can transform."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return not _trains(m) or super().is_leaf_module(m, module_qualified_name)


def _trains(module: nn.Module) -> bool:
    return any(parameter.requires_grad for parameter in module.parameters())


def _traced(network: nn.Module, inputs: Inputs) -> fx.Graph:
    """The graph of `forward`, in which an argument that the inputs do not name has its default value."""
    signature = inspect.signature(network.forward).parameters
    given = set(inputs) if isinstance(inputs, dict) else set(list(signature)[:1])
    if any(each.kind in (each.VAR_POSITIONAL, each.VAR_KEYWORD) for each in signature.values()):
        raise ValueError("variable arguments")
    return _Tracer().trace(network, {name: each.default for name, each in signature.items() if name not in given})


def _values(network: nn.Module, graph: fx.Graph, inputs: Inputs) -> dict[fx.Node, Any]:
    """The value of each node."""
    values: dict[fx.Node, Any] = {}

    class Recorder(fx.Interpreter):
        def run_node(self, n: fx.Node) -> Any:
            values[n] = super().run_node(n)
            return values[n]

    named = inputs if isinstance(inputs, dict) else {str(_placeholders(graph)[0].target): inputs}
    with torch.no_grad():
        Recorder(network, garbage_collect_values=False, graph=graph).run(
            *(named.get(str(node.target)) for node in _placeholders(graph))
        )
    return values


def _placeholders(graph: fx.Graph) -> list[fx.Node]:
    return [node for node in graph.nodes if node.op == "placeholder"]


def _boundary(network: nn.Module, graph: fx.Graph, values: dict[int, dict[fx.Node, Any]]) -> list[fx.Node]:
    """The nodes whose values are kept, in the order of the graph: what the trained nodes take from frozen ones.

    A value that has no row for each example (a size, a sequence before its batch) is computed again in the remainder.
    """
    trained: set[fx.Node] = set()
    varies: set[fx.Node] = set()
    for node in graph.nodes:
        own = _owned(network, node)
        if any(parameter.requires_grad for parameter in own) or trained.intersection(node.all_input_nodes):
            trained.add(node)
        if node.op == "placeholder" or varies.intersection(node.all_input_nodes):
            varies.add(node)

    def rows(node: fx.Node) -> bool:
        return node in varies and all(
            isinstance(found[node], Tensor)
            and found[node].dtype in (torch.float32, torch.int64)  # what a `Dataset` may hold
            and found[node].dim() > 0
            and len(found[node]) == count
            for count, found in values.items()
        )

    behind = {node for node in trained if node.op != "placeholder"}
    waiting, kept = list(behind), set()
    while waiting:
        for before in waiting.pop().all_input_nodes:
            if before in behind:
                continue
            if before.op == "placeholder" or rows(before):
                kept.add(before)
            else:
                behind.add(before)
                waiting.append(before)
    return [node for node in graph.nodes if node in kept]


def _owned(network: nn.Module, node: fx.Node) -> list[nn.Parameter]:
    """The parameters that a node uses itself."""
    if node.op == "call_module":
        return list(network.get_submodule(str(node.target)).parameters())
    if node.op == "get_attr":
        path, _, name = str(node.target).rpartition(".")
        found = getattr(network.get_submodule(path), name)
        return [found] if isinstance(found, nn.Parameter) else []
    return []


def _needed(nodes: Iterable[fx.Node]) -> set[fx.Node]:
    """The nodes and all that they are computed from."""
    found: set[fx.Node] = set()
    waiting = list(nodes)
    while waiting:
        node = waiting.pop()
        if node not in found:
            found.add(node)
            waiting += node.all_input_nodes
    return found


def _costs(network: nn.Module, node: fx.Node) -> bool:
    """Whether it is worth keeping what a node computes."""
    return node.op == "call_module" and not isinstance(network.get_submodule(str(node.target)), _FREE)


def _front(network: nn.Module, graph: fx.Graph, features: list[fx.Node]) -> TracedFront:
    front, copies, needed = fx.Graph(), dict[fx.Node, fx.Node](), _needed(features)
    for node in graph.nodes:
        if node in needed:
            copies[node] = front.node_copy(node, lambda each: copies[each])
    front.output(tuple(copies[node] for node in features))
    return TracedFront(network, front, tuple(node.name for node in features))


def _remainder(network: nn.Module, graph: fx.Graph, features: list[fx.Node]) -> nn.Module:
    """A copy of the network, sharing its tensors, whose `forward` starts from the features; frozen modules not needed any
    more are gone from it."""
    rest, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in features:
        copies[node] = rest.placeholder(_SINGLE if len(features) == 1 else node.name)
    (output,) = (node for node in graph.nodes if node.op == "output")
    needed, waiting = set(features), [output]
    while waiting:
        node = waiting.pop()
        if node not in needed:
            needed.add(node)
            waiting += node.all_input_nodes
    kept = [node for node in graph.nodes if node in needed and node not in copies]
    for node in kept:
        copies[node] = rest.node_copy(node, lambda each: copies[each])
    remainder = copy.deepcopy(network, {id(each): each for each in (*network.parameters(), *network.buffers())})
    made = {"forward": type(fx.GraphModule(network, rest)).forward, "sequence": _sequence(kept)}
    remainder.__class__ = type("Remainder", (Remainder, type(network)), made)
    used = {str(node.target) for node in kept if node.op in ("call_module", "get_attr")}
    _prune(remainder, "", used)
    return remainder


def _prune(module: nn.Module, path: str, used: set[str]) -> None:
    """Replace the modules that train nothing and are not used, at any depth, by `nn.Identity`."""
    for name, child in list(module.named_children()):
        place = f"{path}{name}"
        if place in used:
            continue
        if _trains(child) or any(target.startswith(f"{place}.") for target in used):
            _prune(child, f"{place}.", used)
        else:
            setattr(module, name, nn.Identity())


def _sequence(nodes: list[fx.Node]) -> tuple[str, ...]:
    """The names of the layers, if each takes the result of the one before and none is used twice."""
    *layers, output = nodes
    alone = all(each.op == "call_module" and not each.kwargs and len(each.args) == 1 for each in layers)
    chained = all(after.args == (before,) for before, after in zip(layers, nodes[1:], strict=True))
    once = not layers or max(Counter(each.target for each in layers).values()) == 1
    return tuple(str(each.target) for each in layers) if alone and chained and once and output.op == "output" else ()


def _same(left: Tensor, right: Tensor) -> bool:
    return left.shape == right.shape and torch.allclose(left, right, rtol=1e-4, atol=1e-5)


def size_of_features(features: Inputs, count: int) -> int:
    """The bytes of the features of `count` examples, given those of a few."""
    return sum(value[:1].numel() * value.element_size() for value in tensors_in(features)) * count
