"""Writes cards, tables and pages from the zoo's results.json files.

    python -m tools.pages

writes the card of each zoo run, docs/results.md, and what is between the markers in README.md
and zoo/README.md.
"""

import itertools
import pathlib
import textwrap

import typer

from keras_streams.files import atomic_write
from tools import cards
from tools.description import VERDICTS, best, counts, described, key, number, remark
from tools.markdown import table
from trellis_keras import zoo
from trellis_keras.zoo.results import assets_folder, published, read_costs

START, END = "<!-- results -->\n", "<!-- end of the results -->\n"
PAPERS = {
    "TrellisNet": "Bai, Kolter, Koltun 2019, [Trellis Networks for Sequence "
    "Modeling](https://arxiv.org/abs/1810.06682)",
    "TCN": "Bai, Kolter, Koltun 2018, [An Empirical Evaluation of Generic Convolutional and "
    "Recurrent Networks for Sequence Modeling](https://arxiv.org/abs/1803.01271)",
    "LRU": "Ahuja, Morency 2018, [Lattice Recurrent Unit: Improving Convergence and Statistical "
    "Efficiency for Sequence Modeling](https://arxiv.org/abs/1710.02254)",
}
_TEXTS = ("ptb", "char_ptb", "wt103", "text8", "enwik8", "lambada", "war_and_peace")

_PAGE = pathlib.Path(__file__).with_name("results.md")
_COLUMNS = "model metric published parameters ours parameters difference verdict training".split()
_CHOSEN = {
    "dynamic": ("rule", "learning_rate", "decay", "segment_length"),
    "cache": ("size", "theta", "mix"),
}


def main():
    """Write cards, docs/results.md, and the tables of README.md and zoo/README.md."""
    found, folder = described(), assets_folder()
    for one in found:
        _write(one.run.folder / cards.CARD, cards.card(one))
    _write(folder.parent / "docs" / "results.md", results_page(found))
    for page, content in (
        (folder / "README.md", runs_table(found)),
        (folder.parent / "README.md", front(found)),
    ):
        _write(page, replace(page.read_text(encoding="utf-8"), content))


def replace(text, new):
    """Returns a page with new content between its two markers."""
    before, start, rest = text.partition(START)
    _, end, after = rest.partition(END)
    if not (start and end):
        raise ValueError(f"The page must contain the lines {START!r} and {END!r}.")
    return before + start + new + end + after


def _write(path, text):
    with atomic_write(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def summary(found):
    """Returns how the results compare with the papers', in one paragraph."""
    trained = best(found)
    of = {name: [one for one in trained.values() if one.verdict == name] for name in VERDICTS}
    better, within = of["better"], of["within 5 %"]
    fast = sum(one.recipe.setting == "fast" for one in better)
    baselines = sum(one.is_baseline for one in better)
    alone = sum(len(one.run.seeds) == 1 for one in better)
    level = f"{len(of['level'])} {'is' if len(of['level']) == 1 else 'are'}"
    text = (
        f"The zoo has models for {len(published())} published values. {len(trained)} of them were "
        "trained here, by the paper's recipe or a fast one. "
        f"{len(better)} results are better by a margin of 2 % or two standard errors, {fast} of "
        "them with the techniques of the fast recipes (AdamW, warm-up and cosine decay, "
        "augmentation, chrono initialization). "
        f"Of these {len(better)}, {baselines} are recurrent baselines rather than the papers' own "
        f"models, and {alone} {'rests' if alone == 1 else 'rest'} on a single seed. "
        f"{level} level{f', {len(within)} within 5 %' if within else ''}. "
        f"{len(of['larger net'])} come from a larger network, {len(of['other text'])} from a "
        f"different text, and {len(of['at the floor'])}, like the paper's, hardly beat a constant "
        f"prediction (at the floor): none of these counts as better. {len(of['behind'])} are "
        f"behind: {', '.join(map(_behind, of['behind']))}."
    )
    return textwrap.fill(text, 100, break_on_hyphens=False)


def _behind(one):
    """Returns the name of a value, with the sizes if ours is smaller."""
    ours, theirs = one.results["parameters"], number(one.value.parameters)
    size = f" ({_short(ours)} of {one.value.parameters} parameters)" if ours < 0.9 * theirs else ""
    return f"`{_name(one.value)}`{size}"


def _name(value):
    words = [f"{name}={given}" for name, given in value.options.items()]
    return f"{value.model} ({','.join(words)})" if words else value.model


def _short(size):
    return f"{size / 1e6:.1f}M" if size >= 1e6 else f"{size / 1e3:.0f}K"


def front(found):
    """Returns the section of README.md: the summary, and a table of families."""
    families = {
        "`trellisnet_*`, text": lambda v, data: v.model.startswith("trellisnet") and data in _TEXTS,
        "`trellisnet_*`, pixels": lambda v, data: v.model.startswith("trellisnet"),
        "`tcn_*`, adding, copy memory, pixels, music": lambda v, data: (
            v.model.startswith("tcn_") and data not in _TEXTS
        ),
        "`tcn_*`, text": lambda v, data: v.model.startswith("tcn_"),
        "`lstm_*`, `gru_*`, `rnn_*` of the TCN paper": lambda v, data: v.source.startswith("TCN"),
        "`lru_*` and baselines of the LRU paper": lambda v, data: True,
    }
    trained, rest = best(found), list(published())
    rows = []
    for name, belongs in families.items():
        own = [value for value in rest if belongs(value, zoo.recipe(value.model).data)]
        rest = [value for value in rest if value not in own]
        ours = counts(trained[key(value)] for value in own if key(value) in trained)
        rows.append([name, str(len(own)), ours or "-"])
    return f"{summary(found)}\n\n" + table(["models", "values", "trained here"], rows)


def runs_table(found):
    """Returns the table of zoo/README.md: a row per zoo run."""
    header = "run data metric published ours verdict parameters training weights".split()
    rows = [
        [
            f"[{one.run.title}]({one.link})",
            one.recipe.data,
            one.recipe.metric,
            "-" if one.value is None else f"{one.value.value:.4g}",
            one.ours,
            "-" if one.value is None else one.verdict,
            f"{one.results['parameters']:,}",
            _took(one),
            one.results.get("weights_dtype", "-"),
        ]
        for one in found
    ]
    return table(header, rows)


def _took(one):
    seconds = one.results["wall_time_s"]
    return f"{_epochs(one)}{'' if seconds is None else f', {seconds / 60:.0f} min'}"


def _epochs(one):
    """Returns a run's epochs, with the recipe's if there are more, and its other own settings."""
    training = zoo.recipe(one.recipe.name, setting=one.recipe.setting).training
    is_shorter = one.results["epochs"] < training.epochs and training.stopping is None
    known = {*training.options(), *one.recipe.training.stream, "schedule"} - {"epochs"}
    own = [k for k in one.recipe.changes() if k in known or k.endswith("dropout")]
    of = f" of {training.epochs}" if is_shorter else ""
    changed = f"; changed: {', '.join(sorted(own))}" if own else ""
    return f"{one.results['epochs']}{of} epochs{changed}"


def results_page(found):
    """Returns docs/results.md."""
    runs = {}
    for one in found:
        if one.value is not None:
            runs.setdefault(key(one.value), []).append(one)

    def place(value):
        paper, _, number = value.source.split()
        return list(PAPERS).index(paper), int(number)

    sections = []
    values = sorted(published(), key=place)
    for paper, of_paper in itertools.groupby(values, lambda value: value.source.split()[0]):
        sections.append(f"## {paper}\n\n{PAPERS[paper]}.\n")
        for source, group in itertools.groupby(of_paper, lambda value: value.source):
            group = list(group)
            remarks = [f"{text}\n\n" for text in dict.fromkeys(map(remark, group)) if text]
            rows = [_row(value, one) for value in group for one in _runs_of(value, runs)]
            sections.append(
                f"### {source}\n\n{''.join(remarks)}{table([*_COLUMNS, 'test runs'], rows)}"
            )
    rest = [value for value in published() if key(value) not in runs]
    return _PAGE.read_text(encoding="utf-8").format(
        summary=summary(found),
        verdicts="\n".join(f"| {name} | {meaning} |" for name, meaning in VERDICTS.items()),
        replaced=sum(bool(one.results.get("replaced")) for one in found),
        papers="\n".join(sections),
        test_time=_test_time(found),
        count=len(rest),
        long=sum((_core_seconds(value) or 0) > 10 * 86_400 for value in rest),
    )


def _runs_of(value, runs):
    """Returns the runs of a value, preceded by `None` unless one has the paper's recipe."""
    found = runs.get(key(value), [])
    return found if any(one.recipe.setting is None for one in found) else [None, *found]


def _row(value, one):
    theirs = [value.metric, f"{value.value:.4g}", value.parameters]
    if one is None:
        return [_name(value), *theirs, "-", "-", "-", "-", _expected(value), "-"]
    name = f"[{one.run.title}](../zoo/{one.link})"
    size = f"{one.results['parameters']:,}"
    ours = [one.ours, size, one.difference, one.verdict, _epochs(one), one.test_runs]
    return [name, *theirs, *ours]


def _test_time(found):
    rows = []
    for one in found:
        if (adapted := one.results.get("test_time")) is None:
            continue
        settings = "; ".join(
            ", ".join(f"{name}={_rounded(adapted[kind][name])}" for name in names)
            for kind, names in _CHOSEN.items()
        )
        metric = one.recipe.metric
        values = [one.results["test"], *(adapted[kind][metric] for kind in _CHOSEN)]
        rows.append([one.run.title, metric, *(f"{value:.4g}" for value in values), settings])
    header = ["model", "metric", "unadapted", "dynamic evaluation", "neural cache"]
    return table([*header, "chosen hyper-parameters"], rows)


def _rounded(value):
    return f"{value:.2g}" if isinstance(value, float) else value


# Costs


def _expected(value):
    """Returns what training the network of a published value would cost, as text."""
    seconds = _core_seconds(value)
    return "not trained" if seconds is None else f"not trained ({_readable_time(seconds)})"


def _core_seconds(value):
    """Returns the time of the paper's recipe in seconds of one core, or `None` if not measured."""
    cost = read_costs()["models"].get(value.model)
    if cost is None or value.source.startswith("LRU") and value.parameters == "24M":
        return None
    return zoo.recipe(value.model).training.epochs * cost["steps_per_epoch"] * cost["step_core_s"]


def _readable_time(seconds):
    """Returns a time as text in a suitable unit."""
    for unit, length in (("days", 86_400), ("hours", 3_600), ("minutes", 60), ("seconds", 1)):
        if seconds >= 2 * length or unit == "seconds":
            value = seconds / length
            return f"{value:,.0f} {unit}" if value >= 10 else f"{value:.2g} {unit}"


if __name__ == "__main__":
    typer.run(main)
