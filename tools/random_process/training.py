"""Contrastive training of the encoder on pictures of random processes."""

from __future__ import annotations

import json
import math
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor

from tools.random_process import pictures
from tools.random_process.network import Encoder, Projected
from tools.random_process.pictures import Draws
from tools.random_process.views import view

TEMPERATURE = 0.2
BATCH = 1024
FRESH = 2048
EVERY = 32
"""So many pictures of the pool are replaced every few steps: drawing many at once costs less."""
POOL = 128 * BATCH
RATE = 2e-3
WARM_UP = 0.03
DECAY = 5e-2
SETTLING = 200
"""Batches that set the statistics of BatchNorm after training."""


def contrastive_loss(first: Tensor, second: Tensor) -> Tensor:
    """NT-Xent (Chen et al., 2020): each view must find the other view of its picture among all views of the batch."""
    both = F.normalize(torch.cat([first, second]).float())
    scores = both @ both.T / TEMPERATURE
    scores.fill_diagonal_(-math.inf)
    count = len(first)
    partners = torch.arange(2 * count, device=both.device).roll(count)
    return F.cross_entropy(scores, partners)


class Pool:
    """Many pictures on the device; a few of them are replaced all the time."""

    def __init__(self, size: int, draws: Draws) -> None:
        self._draws, self._next = draws, 0
        self._pictures = torch.empty(size, 3, pictures.SIDE, pictures.SIDE, dtype=torch.uint8, device=draws.device)
        for _ in range(0, size, FRESH):
            self.refresh(min(FRESH, size))

    def refresh(self, count: int) -> None:
        """Replace the oldest pictures."""
        new = (255 * pictures.pictures(count, self._draws)).round().byte()
        self._pictures[self._next : self._next + count] = new
        self._next = (self._next + count) % len(self._pictures)

    def some(self, count: int) -> Tensor:
        """Random pictures."""
        return self._pictures[self._draws.below(len(self._pictures), count)].float() / 255


def train(out: Path, *, steps: int, width: int, seed: int, device: str, batch: int = BATCH, pool: int = POOL) -> None:
    """Train an encoder, and write its tensors and a record of the training to `out`."""
    torch.manual_seed(seed)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = torch.backends.cudnn.benchmark = True
    started, draws = time.perf_counter(), Draws(seed, device)
    if device.startswith("cuda"):
        pictures.paint = torch.compile(pictures.paint)
    held = Pool(pool, draws)
    model = Projected(Encoder(width)).to(device, memory_format=torch.channels_last)  # type: ignore[call-overload]
    program = torch.compile(model) if device.startswith("cuda") else model
    optimiser = torch.optim.AdamW(model.parameters(), RATE, weight_decay=DECAY, fused=device.startswith("cuda"))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimiser, lambda step: _rate(step / steps))
    kind = device.partition(":")[0]
    log = []
    for step in range(steps):
        if step % EVERY == 0:
            held.refresh(min(FRESH, pool))
        chosen = held.some(batch)
        images = torch.cat([view(chosen, draws), view(chosen, draws)])
        with torch.autocast(kind, torch.bfloat16):
            first, second = program(images.contiguous(memory_format=torch.channels_last)).chunk(2)
        loss = contrastive_loss(first, second)
        optimiser.zero_grad(set_to_none=True)
        loss.backward()
        optimiser.step()
        schedule.step()
        if step % 100 == 0 or step == steps - 1:
            log.append({"step": step, "loss": round(loss.item(), 4), "seconds": round(time.perf_counter() - started, 1)})
            print(log[-1], flush=True)
        if step and step % 4000 == 0:
            _store(out / "unfinished", model.encoder, {})
    settle(model.encoder, held, draws, batch)
    told = {
        "steps": steps, "width": width, "seed": seed, "batch": batch, "pool": pool, "torch": torch.__version__,
        "hardware": torch.cuda.get_device_name() if kind == "cuda" else "CPU", "log": log,
    }  # fmt: skip
    _store(out, model.encoder, told)


@torch.no_grad()
def settle(encoder: Encoder, held: Pool, draws: Draws, batch: int) -> None:
    """Set the statistics of BatchNorm to plain means over fresh views, in float32: the frozen encoder uses them."""
    for layer in encoder.modules():
        if isinstance(layer, torch.nn.BatchNorm2d):
            layer.reset_running_stats()
            layer.momentum = None  # a plain mean over all batches
    encoder.train()
    for _ in range(SETTLING):
        encoder(view(held.some(batch), draws).contiguous(memory_format=torch.channels_last))
    encoder.eval()


def _rate(share: float) -> float:
    """A linear warm-up, and half a cosine to zero."""
    return min(share / WARM_UP, 0.5 + 0.5 * math.cos(math.pi * share)) if share < 1 else 0.0


def _store(out: Path, encoder: Encoder, told: dict[str, object]) -> None:
    out.mkdir(parents=True, exist_ok=True)
    tensors = {name: value.detach().float().contiguous().cpu() for name, value in encoder.state_dict().items()}
    save_file(tensors, out / "encoder.safetensors")
    (out / "training.json").write_text(json.dumps(told, indent=1) + "\n")
