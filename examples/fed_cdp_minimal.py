"""Fed-CDP in one file of plain PyTorch: Algorithm 2 of W. Wei, L. Liu, Y. Wu, G. Su, A. Iyengar, "Gradient-Leakage
Resilient Federated Learning", ICDCS 2021. Line numbers in comments are the paper's.

Privacy: it protects single records, not whole clients. A local step has S slots, some of them empty. The gradient in each
slot is clipped to norm C in each of the M layers and gets its own noise N(0, (σC)²) on every coordinate, as in the paper.
Zeroing a record moves the sum of a step by at most C·√M; the sum has noise of deviation σC·√S: a ratio of σ·√(S/M). For an
adversary on the client who reads single noised gradients, the ratio is σ/√M. An accountant turns ratios and sampling rates
into ε, and must also cover slots that overflow. It relies on three conditions:
- Noise does not show how many records a step drew: a step always has S draws, and all divisors are planned numbers.
- Nobody learns which records a step drew. The number of records at a client, N_i, is public.
- Noise is unpredictable. **A torch.Generator is not; it is for simulation only.** Anyone who has its seed or recovers its
  state can subtract the noise. For real data, draw noise and records from the operating system's entropy.

Deliberately simpler than fedcdp: one client at a time, exactly K_t clients a round, constant C and η, seeded noise, no ε.
A test checks that `fedcdp.simulate` computes the same weights from the same draws.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn
from torch.func import functional_call, grad, vmap

Weights = dict[str, Tensor]
Records = tuple[Tensor, Tensor]  # one client's inputs [N_i, ...] and labels [N_i]


def choose_clients(K: int, K_t: int, rng: Generator) -> list[int]:
    """K_t of the K clients, without replacement."""
    return torch.randperm(K, generator=rng)[:K_t].tolist()


def choose_records(N_i: int, B: int, S: int, rng: Generator) -> Tensor:
    """Poisson sampling: each record joins with probability min(1, B/N_i); beyond S, records are dropped at random."""
    joins = torch.rand(N_i, generator=rng, dtype=torch.float64) < B / N_i
    return torch.randperm(N_i, generator=rng)[joins][:S]


def gaussian(shape: torch.Size, rng: Generator) -> Tensor:
    """Standard normal noise. Replace this function before you train on real data."""
    return torch.randn(shape, generator=rng)


def clip(g: Weights, present: Tensor, C: float) -> Weights:
    """Clip per-example gradients [S, ...] layer by layer; empty slots and gradients that are not finite become zero."""
    layers: dict[str, list[str]] = {}  # the weight and the bias of one module are one layer
    for name in g:
        layers.setdefault(name.rpartition(".")[0], []).append(name)
    norm = {  # line 9
        layer: torch.stack([g[name].reshape(len(present), -1).square().sum(1) for name in names]).sum(0).sqrt()
        for layer, names in layers.items()
    }
    usable = present & torch.stack(list(norm.values())).isfinite().all(0)
    clipped = {}
    for layer, names in layers.items():
        factor = 1 / (norm[layer] / C).clamp(min=1)  # line 10
        for name in names:
            clipped[name] = torch.einsum("s...,s->s...", g[name], factor)
            clipped[name][~usable] = 0.0  # not a product: 0 · NaN is NaN
    return clipped


def train_client(
    model: nn.Module, W: Weights, D_i: Records, rng: Generator, *, L: int, B: int, S: int, C: float, sigma: float, eta: float
) -> Weights:
    """The update ΔW_i of a client after L local steps of B expected records in S slots, with learning rate η."""
    (x, y), N_i = D_i, len(D_i[0])

    def loss(W: Weights, x_j: Tensor, y_j: Tensor) -> Tensor:
        return F.cross_entropy(functional_call(model, W, (x_j[None],)), y_j[None])

    per_example_gradients = vmap(grad(loss), in_dims=(None, 0, 0))
    W_i = W  # line 4
    for _ in range(L):
        drawn = choose_records(N_i, B, S, rng)
        slots = F.pad(drawn, (0, S - len(drawn)))  # an empty slot computes on record 0; clip() zeroes it
        present = torch.arange(S) < len(drawn)
        g = clip(per_example_gradients(W_i, x[slots], y[slots]), present, C)  # lines 6-13
        g = {name: g[name] + sigma * C * gaussian(g[name].shape, rng) for name in g}  # line 14: on all S slots
        mean = {name: g[name].sum(0) / min(B, N_i) for name in g}  # planned; the paper: B; never len(drawn)
        W_i = {name: W_i[name] - eta * mean[name] for name in W}  # line 15
    return {name: W_i[name] - W[name] for name in W}  # line 17


def fed_cdp(
    model: nn.Module, clients: list[Records], rng: Generator, *, T: int, K_t: int, **local: Any
) -> Iterator[Weights]:
    """Yield the global weights after each of T rounds with K_t clients; `local` holds the settings of train_client."""
    W = {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}
    for _ in range(T):
        chosen = choose_clients(len(clients), K_t, rng)
        updates = [train_client(model, W, clients[i], rng, **local) for i in chosen]
        W = {name: W[name] + sum(update[name] for update in updates) / K_t for name in W}  # line 20, equal weights
        yield W


def main(T: int = 15) -> None:
    """Ten clients with about 140 handwritten digits each; accuracy on 360 digits that nobody trains on."""
    from sklearn.datasets import load_digits

    pixels, digits = load_digits(return_X_y=True)
    x, y = torch.tensor(pixels / 16, dtype=torch.float32), torch.tensor(digits)
    rng = torch.Generator().manual_seed(0)  # simulation only
    order = torch.randperm(len(x), generator=rng)
    held_out, training = order[:360], order[360:]
    clients = [(x[part], y[part]) for part in training.chunk(10)]
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 10))
    rounds = fed_cdp(model, clients, rng, T=T, K_t=5, L=20, B=20, S=60, C=1.0, sigma=0.5, eta=0.3)
    for t, W in enumerate(rounds, start=1):
        predicted = functional_call(model, W, (x[held_out],)).argmax(1)
        print(f"round {t:2}: accuracy {(predicted == y[held_out]).float().mean():.3f}")
    print("The seed makes the noise predictable, so this run protects nobody. For ε, attacks and a ledger, use fedcdp.")


if __name__ == "__main__":
    main()
