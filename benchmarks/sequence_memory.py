"""Memory of a Fed-CDP step on transformers: the estimate by which batches are cut into parts, beside the real peak.

    python -m benchmarks.sequence_memory    # results/sequence_memory.json: about a minute

The peak is of all tensors that a step of `recorded` allocates on a CPU, beside weights and data. The network has the form of
GPT-2 with four layers of width 128. A row with parts computes its batch in parts, for a budget that holds two examples.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.clean_tree import clean_commit
from benchmarks.sequence_networks import Transformer, next_words
from fedcdp.engine import Batch, Engine
from fedcdp.engine.microbatches import MicrobatchEngine
from fedcdp.engine.recorded import RecordedEngine
from fedcdp.engine.runtime import estimated_bytes
from fedcdp.files.tree import Tree

_OUT = Path(__file__).parents[1] / "results" / "sequence_memory.json"
_WORDS = 500


def peak(engine: Engine, weights: Tree, batch: Batch) -> int:
    """The most bytes that a step holds at once."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        engine.clipped_sum(weights, batch, engine.layout.groups("flat"), 1.0)
    held = most = 0
    for event in recorded.profiler.kineto_results.events():
        if event.name() == "[memory]":
            held += event.nbytes()
            most = max(most, held)
    return most


def measured(tokens: int, everything: bool, examples: int, parts: int | None) -> dict[str, Any]:
    """One row: LoRA factors of rank 8 alone are trained, or all weights."""
    torch.manual_seed(0)
    network = Transformer(layers=4, width=128, heads=4, words=_WORDS, tokens=tokens, rank=8)
    if everything:
        network.requires_grad_(True)
    numbers = torch.randint(_WORDS, (1, examples, tokens))
    batch = Batch(numbers, numbers, torch.ones(1, examples, dtype=torch.bool))
    whole = RecordedEngine(network, next_words, numbers[0, :1])
    engine = MicrobatchEngine(whole, parts) if parts else whole
    weights = {name: p.detach()[None] for name, p in network.named_parameters() if p.requires_grad}
    estimate, real = estimated_bytes(network, numbers[0, 0], parts or examples), peak(engine, weights, batch)
    return {
        "tokens": tokens, "trained": "all weights" if everything else "LoRA rank 8", "examples": examples, "parts_of": parts,
        "estimate_mb": round(estimate / 1e6, 1), "peak_mb": round(real / 1e6, 1), "share": round(real / estimate, 3),
    }  # fmt: skip


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[64, 256, 1024])
    parser.add_argument("--commit", help="the commit that is measured, where this is a copy without its repository")
    parser.add_argument("--out", type=Path, default=_OUT)
    given = parser.parse_args()
    found: dict[str, Any] = {
        "command": "python -m benchmarks.sequence_memory", "commit": given.commit or clean_commit(),
        "torch": torch.__version__, "rows": [],
    }  # fmt: skip
    for tokens in given.tokens:
        for everything in (False, True):
            for examples, parts in ((1, None), (4, None), (8, 2)):
                found["rows"].append(measured(tokens, everything, examples, parts))
                print(found["rows"][-1], flush=True)
    given.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
