"""The cells of the attack matrix: methods, attacks and trust models, and the command of each."""

from __future__ import annotations

from dataclasses import dataclass

EACH, SUM = "each update", "the sum"
TRUST = (EACH, SUM)

METHODS = {
    "non-private": "--method nonprivate",
    "DSSGD": "--method dssgd",
    "Fed-SDP, noise at server": "--method fed-sdp --noise-at server",
    "Fed-SDP, noise at client": "--method fed-sdp --noise-at client",
    "Fed-CDP σ = 6": "--method fed-cdp --noise-multiplier 6",
    "Fed-CDP ε = 1": "",
}
PRESET = "Fed-CDP ε = 1"
_FLAT = " --clip 4 --clip-mode flat"
_DIGITS = "--dataset mnist5k --local-steps 1 --partition iid --record-sampling partition"
_HUNDRED, _FOUR = "--clients 100 --per-round 100", "--clients 4 --per-round 4 --secure-aggregation"
# The noise of a sum is σC whatever the number of clients and records, and so is ε: fewer records are easier to tell apart.
_PRESETS = {
    EACH: "--preset mnist-eps1 --clip-mode flat",
    SUM: "--preset mnist-sum-eps1 --clip-mode flat --clients 8 --per-round 8 --records 8 --batch-size 8",
}


@dataclass(frozen=True)
class Column:
    """One attack: its options for clients whose updates are read one by one, and for a sum; "" where there is none."""

    name: str
    threat: str
    """Who attacks."""
    kind: str
    """By what means."""
    figure: str
    """The key of the figure that the matrix shows."""
    each: str
    summed: str
    preset: str
    """Options on top of a preset."""
    preset_each: str = ""
    """More of them where the server reads each update."""
    weight: int = 1
    """Roughly how long it takes: longer ones start first."""
    also: str = ""
    """The key of a second figure: a reconstruction that is not exact may still show who or what it is."""


_CLIENT = "eavesdropper on the client"
_CURIOUS = "honest-but-curious server"
_MALICIOUS_MODEL = "malicious server, architecture modification"
_MALICIOUS_WEIGHTS = "malicious server, parameter manipulation"
_RELEASE = "model release"
_SEARCH, _CLOSED = "optimisation- or analytics-based reconstruction", "analytics-based reconstruction"
_SEEN = "recognisable_rate"
_SMALL = f"{_DIGITS} {_HUNDRED} --records 40"
_COLUMNS = (
    Column("type-2", _CLIENT, _SEARCH, "success_rate", f"--leak type2 {_SMALL} --victims 100",
           f"--leak type2 {_DIGITS} {_HUNDRED} --secure-aggregation --records 40 --victims 100", "--leak type2", weight=8,
           also=_SEEN),
    Column("type-1", _CLIENT, _SEARCH, "success_rate", f"--leak type1 {_SMALL} --batch-size 3 --victims 100",
           f"--leak type1 {_DIGITS} {_HUNDRED} --secure-aggregation --records 40 --batch-size 3 --victims 100",
           "--leak type1", weight=10, also=_SEEN),
    Column("type-0", _CURIOUS, _SEARCH, "success_rate", "",
           f"--leak type0 {_DIGITS} {_FOUR} --records 2 --batch-size 2", "--leak type0", weight=10,
           also=_SEEN),
    Column("labels", _CURIOUS, "label inference", "label_accuracy",
           f"--leak type0 --attack labels {_SMALL} --batch-size 5 --victims 100",
           f"--leak type0 --attack labels {_DIGITS} {_FOUR} --records 5 --batch-size 5", "--leak type0 --attack labels",
           "--victims 5", weight=2),
    Column("presence", _CURIOUS, "presence inference", "auc",
           f"--leak type0 --attack presence {_SMALL} --batch-size 5 --victims 100",
           f"--leak type0 --attack presence {_DIGITS} {_FOUR} --records 5 --batch-size 5 --victims 4",
           "--leak type0 --attack presence", weight=2),
    Column("imprint", _MALICIOUS_MODEL, _CLOSED, "success_rate",
           f"--leak type0 --attack imprint {_DIGITS} --clients 62 --per-round 62 --records 64 --batch-size 64 --victims 62",
           f"--leak type0 --attack imprint {_DIGITS} {_FOUR} --records 16 --batch-size 16",
           "--leak type0 --attack imprint", "--network mlp --victims 5", weight=3),
    Column("trap-weights", _MALICIOUS_WEIGHTS, _CLOSED, "success_rate",
           f"--leak type0 --attack trap-weights --network mlp {_DIGITS} {_HUNDRED} --records 8 --batch-size 8 --victims 100",
           f"--leak type0 --attack trap-weights --network mlp {_DIGITS} {_FOUR} --records 4 --batch-size 4",
           "--leak type0 --attack trap-weights --network mlp", "--victims 5", weight=3),
    Column("fishing", _MALICIOUS_WEIGHTS, _CLOSED, "success_rate",
           f"--leak type0 --attack fishing --network mlp {_DIGITS} --clients 10 --per-round 10 --records 400 "
           "--batch-size 400 --victims 10",
           f"--leak type0 --attack fishing --network mlp {_DIGITS} {_FOUR} --records 100 --batch-size 100",
           "--leak type0 --attack fishing", "--victims 5", weight=5),
    Column("frozen-weights", _MALICIOUS_WEIGHTS, "analytics- and prior-based reconstruction", "recognisable_rate",
           f"--leak type0 --attack frozen-weights --network oriented-gradients {_DIGITS} {_HUNDRED} --records 8 "
           "--batch-size 8 --rounds 10 --victims 100",
           f"--leak type0 --attack frozen-weights --network oriented-gradients {_DIGITS} {_FOUR} --records 8 --batch-size 8 "
           "--rounds 10", "--leak type0 --attack frozen-weights", "--victims 2", weight=6),
    Column("inconsistent-models", _MALICIOUS_WEIGHTS, _CLOSED, "success_rate", "",
           f"--leak type0 --attack inconsistent-models --network mlp {_DIGITS} {_FOUR} --records 8 --batch-size 8",
           "--leak type0 --attack inconsistent-models --network mlp", weight=2),
    Column("tableak", _CURIOUS, "analytics-based reconstruction of tables", "cells_right",
           "--leak type0 --attack tableak --dataset adult --clients 100 --per-round 100 --batch-size 32 --local-steps 1 "
           "--record-sampling partition --victims 20",
           f"--leak type0 --attack tableak --dataset adult {_FOUR} --records 4 --batch-size 4 --local-steps 1 "
           "--record-sampling partition", "--leak type0 --attack tableak", "--victims 2", weight=9),
    Column("tokens", _CURIOUS, "analytics-based reconstruction of text", "token_recall", "--leak type0", "--leak type0", "",
           weight=1),
)  # fmt: skip
COLUMNS = {column.name: column for column in _COLUMNS}
_TEXT = "python -m benchmarks.text_attack"
LIRA_CELLS = {
    ("non-private", EACH): "embedded digits, non-private",
    ("Fed-CDP σ = 6", EACH): "embedded digits, Fed-CDP",
    (PRESET, EACH): "mnist-eps1",
}
LIRA_COLUMN = Column("lira", _RELEASE, "membership inference", "auc", "", "", "")


@dataclass(frozen=True)
class Cell:
    """One attack on one method under one trust model."""

    column: str
    trust: str
    method: str

    @property
    def name(self) -> str:
        return f"{self.column}/{self.trust}/{self.method}"

    @property
    def command(self) -> str:
        """What to run; "" where the attack does not exist under this trust model."""
        column, method, sums = COLUMNS[self.column], METHODS[self.method], self.trust == SUM
        if self.method == PRESET:
            return self._on_preset(column, sums)
        setting = column.summed if sums else column.each
        if not setting or self.repeats:
            return ""
        cdp = self.method.startswith("Fed-CDP")
        noise = " --noise sum" if sums and cdp else ""
        if self.column == "tokens":
            return f"{_TEXT} {setting} {method}{noise}{' --secure-aggregation' if sums else ''}"
        return f"fedcdp attack {setting} {method}{_FLAT if cdp else ''}{noise}"

    @property
    def repeats(self) -> str:
        """Which other cell of its row or column shows the same observation; "" for none.

        An adversary on the client sees under a secure sum what it saw without, if the noise is the same. A server that reads
        each update reads what a type-1 adversary reads.
        """
        on_client = COLUMNS[self.column].threat == _CLIENT if self.column in COLUMNS else False
        if self.trust == SUM and on_client and not self.method.startswith("Fed-CDP"):
            return "as above"
        return "as type-1" if self.trust == EACH and self.column == "type-0" else ""

    def _on_preset(self, column: Column, sums: bool) -> str:
        if not column.preset or (not sums and not column.each):
            return ""
        preset = _PRESETS[self.trust]
        if column.name == "tableak":  # a preset of the same ε, for a table
            preset = "--preset adult-sum-eps1 --clients 4 --per-round 4 --records 8" if sums else "--preset adult-eps1"
        more = "" if sums else f" {column.preset_each}".rstrip()
        if sums and "--network" not in column.preset and column.name != "tableak":
            more = " --network oriented-gradients"  # the gradient is clipped at once: ε is that of the preset's own features
        return f"fedcdp attack {preset} {column.preset}{more}"

    @property
    def weight(self) -> int:
        """Roughly how long it takes: a preset is read in all its rounds, and that of the sum has hundreds."""
        many = 20 if self.trust == SUM and self.method == PRESET else 5 if self.method == PRESET else 0
        return COLUMNS[self.column].weight + many


def cells() -> list[Cell]:
    """Every cell that has a command."""
    every = [Cell(column, trust, method) for column in COLUMNS for trust in TRUST for method in METHODS]
    return [cell for cell in every if cell.command]
