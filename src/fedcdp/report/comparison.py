"""The page's sentences that compare methods: the headline, what privacy costs, and which networks the figures are about."""

from __future__ import annotations

from collections.abc import Sequence

from fedcdp.accounting.statement import VACUOUS
from fedcdp.config.default_recipe import on_fixed_features
from fedcdp.report.subjects import Subject
from fedcdp.report.wording import capital, epsilon, equation, listed, measured, network_name
from fedcdp.training.metrics import SHARES, metric_title


def headline(subjects: Sequence[Subject]) -> str:
    """The main result of the page, in one sentence."""
    attacked = [each for each in subjects if any(cell.verdict.kind != "unknown" for cell in each.cells)]
    leaky = [each for each in attacked if any(cell.verdict.kind == "leaks" for cell in each.cells)]
    resistant = [each for each in attacked if each not in leaky]
    if not attacked:
        return _results(subjects, " is") or "These runs have not been evaluated yet."
    if not leaky:
        sentence = f"The attacks on this page reconstruct no training example under {_names(resistant)}"
    else:
        sentence = f"The attacks on this page {_most(leaky)} under {_names(leaky)}"
        sentence += f" and none under {_names(resistant)}" if resistant else ""
    return f"{sentence}{_price(resistant, subjects)}."


def _names(subjects: Sequence[Subject]) -> str:
    return listed([each.name for each in subjects])


def _most(subjects: Sequence[Subject]) -> str:
    """What the most successful attack did."""
    cells = [cell.verdict for each in subjects for cell in each.cells if cell.verdict.kind == "leaks"]
    if rebuilt := [each for each in cells if each.got]:
        best = max(rebuilt, key=lambda each: (each.got / each.of, each.of))
        return f"reconstruct up to {best.got} of {best.of} training examples"
    if not any(each.identified for each in cells):
        return f"infer {next(each.inferred for each in cells if each.inferred)}"
    got, of, candidates = max((each.identified for each in cells if each.identified), key=lambda each: each[0] / each[1])
    return f"identify up to {got} of {of} training examples among {candidates:,} candidates"


def _price(resistant: Sequence[Subject], subjects: Sequence[Subject]) -> str:
    """Result and ε of the methods that withstood the attacks, next to that of training without privacy."""
    reached = [each.result for each in resistant if each.result is not None]
    if not reached or len(reached) < len(resistant) or len({name for name, _ in reached}) > 1:
        return ""
    metric = reached[0][0]
    values = listed(list(dict.fromkeys(measured(name, value) for name, value in reached)))
    verb = "reaches" if len(reached) == 1 else "reach"
    title = metric_title(metric)
    words = f", which {verb} {f'{values} {title}' if metric in SHARES else f'{title} {values}'}"
    held = {guarantee(each) for each in resistant}
    if len(held) == 1 and (only := held.pop()):
        words += f" at {only}"
    plain = [each.result for each in subjects if each.method == "nonprivate" and each.run is not None]
    if len(plain) == 1 and plain[0] is not None and all(each.method != "nonprivate" for each in resistant):
        words += f"; non-private training reaches {measured(*plain[0])}"
    return words


def _reached(subject: Subject, with_name: bool) -> str:
    assert subject.result is not None
    name, value = subject.result
    words = f"{metric_title(name)} {measured(name, value)}" if with_name else measured(name, value)
    words += f" under {subject.name}"
    return f"{words} ({held})" if (held := guarantee(subject)) else words


def _results(subjects: Sequence[Subject], verb: str) -> str:
    """The result of every run, with the ε that it was reached at. Empty where nothing was measured."""
    told = [each for each in subjects if each.result is not None]
    names = {each.result[0] for each in told if each.result}
    if len(names) == 1:
        return f"{capital(metric_title(names.pop()))}{verb} {listed([_reached(each, False) for each in told])}."
    return f"Results: {listed([_reached(each, True) for each in told])}." if told else ""


def guarantee(subject: Subject) -> str:
    """The strongest guarantee of a run: against the server for a record, otherwise for a client by the model alone."""
    against_server, of_client = subject.cells[-1].epsilon, subject.client_epsilon
    if against_server is not None and against_server < VACUOUS:
        return f"{equation('ε', epsilon(against_server))} for a record against the server"
    if of_client is not None and of_client < VACUOUS:
        return f"{equation('ε', epsilon(of_client))} for a client against anyone who sees only the model"
    return ""


def what_it_costs(subjects: Sequence[Subject]) -> str:
    """Accuracy, or the main metric of another task, with the ε that it was reached at."""
    return _results(subjects, ":")


def which_networks(subjects: Sequence[Subject]) -> tuple[str, str, str] | None:
    """What accuracy, attacks and ε refer to, if attacks are on another network than the one that was trained."""
    apart = [(each, each.run) for each in subjects if each.elsewhere and each.run is not None]
    if not apart:
        return None
    trained = dict.fromkeys(each.network or "" for each, _ in apart)
    attacked = dict.fromkeys(name for each, _ in apart for name in each.attacked_networks)
    leaks = [(leak, run.plan) for each, run in apart for leak in each.elsewhere]
    same = all(leak.has_mechanism_of(plan) for leak, plan in leaks)
    untrained = ", before its first round" if all(leak.summary.get("round") == 0 for leak, _ in leaks) else ""
    if not same:
        bounds = "ε is that of the trained network and need not hold for the attacked one."
    elif all(plan.clip_mode == "flat" for _, plan in leaks if plan.private):
        bounds = "A plan clips the whole gradient at once, so its ε is the same for both networks."
    else:
        bounds = "ε is that of the trained network. With another number of layers it is another one."
    if any(on_fixed_features(name) for name in trained) and not all(plan.method == "nonprivate" for _, plan in leaks):
        bounds += (
            " Against the trained layer itself, a type-2 adversary who adds up all rounds gets more: "
            "fedcdp attack --run RUN --leak type2 measures it."
        )
    return (
        f"Accuracy is that of {listed([network_name(name) for name in trained])}.",
        f"The attacks are on {listed([network_name(name) for name in attacked])}{untrained}"
        f"{', under the same plan' if same else ''}.",
        bounds,
    )
