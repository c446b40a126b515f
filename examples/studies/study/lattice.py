"""Training of the LRU paper's nets (Ahuja & Morency 2018): the cells of its studies.

A cell is a recipe of the zoo, trained with the test loss looked at after every epoch. Its rows are
those epochs.
"""

import dataclasses
import functools
import itertools
import math
import time

import keras

from study.table import Study
from trellis_keras import zoo
from trellis_keras.zoo import run
from trellis_keras.zoo.registry import published_value


@dataclasses.dataclass(frozen=True)
class Net:
    """A row of the paper's Table 1: its name, the first part of the zoo's names, their options."""

    label: str
    prefix: str
    options: dict = dataclasses.field(default_factory=dict)


NETS = {
    "gru": Net("GRU", "gru"),
    "ps_lru": Net("PS-LRU", "lru", {"variant": "ps"}),
    "rg_lru": Net("RG-LRU", "lru", {"variant": "rg"}),
    "lru": Net("LRU", "lru"),
    "lstm": Net("LSTM", "lstm"),
    "grid_lstm": Net("Grid-LSTM", "grid_lstm"),
    "rhn": Net("RHN", "rhn"),
    "ps_lru_authors": Net("PS-LRU (program)", "lru", {"variant": "ps", "convention": "authors"}),
    "rg_lru_authors": Net("RG-LRU (program)", "lru", {"variant": "rg", "convention": "authors"}),
}
# The paper's; the others are two of these as its program has them.
PUBLISHED = [name for name, net in NETS.items() if "convention" not in net.options]
CORPORA = {
    "char_ptb": "PTB",
    "war_and_peace": "War and Peace",
    "enwik8": "enwik8",
    "text8": "text8",
    "pydoc": "Python's help texts",
}
PAPERS_CORPORA = list(CORPORA)[:4]  # the last one is on every machine, for --quick
PAPERS_SIZES = ["10m", "24m"]
SIZES = {"250k": 250_000, "1m": 1_000_000, "10m": 10_000_000, "24m": 24_000_000}
# a and b of each kind: layers of H units have a H^2 + b H parameters, of all but the last two kinds
# for each layer. Embedding and output layer are as wide and share no weights.
PARAMETERS = {
    "ug": (12, 6), "rg": (10, 5), "ps": (8, 4), "lstm": (8, 4), "gru": (6, 6),
    "grid_lstm": (16, 8), "rhn": (12, 10),
}  # fmt: skip
PERCENTS = [20, 40, 60, 80, 100]
COLUMNS = [
    "corpus", "net", "size", "train_percent", "seed", "parameters", "epoch", "seconds", "compiles",
    "train_loss", "valid", "test",
]  # fmt: skip
# None is the recipe's value, of `characters` the whole corpus.
FULL = {"characters": None, "epochs": None, "batch_size": None, "layers": None, "units": None}
QUICK = {"characters": 30_000, "epochs": 3, "batch_size": 10, "layers": 2, "units": 24}
QUICK_NETS = ["gru", "lru"]


def sweep(name, folder, settings, cells, seeds, report, data_dir=None):
    """Trains every cell with every seed: all cells with the first seed first.

    Args:
        name, folder: As `Study` takes them.
        settings: As `FULL`, and `quick`.
        cells: List of dicts of corpus, net, size and train_percent, such as `product` makes.
        seeds: List of integers.
        report: Function that writes tables and figures of the `Study`. It is called whenever a
            cell has ended, so that a study that takes days shows what it has.
        data_dir: Folder of local copies of the data.

    Returns:
        The `Study`.

    Raises:
        ValueError: Unknown names, or settings that the recipes do not have.
        FileNotFoundError: A corpus is missing.
    """
    firsts = {}
    for cell in cells:
        made = recipe(settings, **cell, seed=0, data_dir=data_dir)
        firsts.setdefault((cell["corpus"], cell["train_percent"]), made)
    for first in firsts.values():  # fails now instead of after days of training
        first.load_data()
    study = Study(name, folder, settings, COLUMNS)
    reported = False
    for seed, cell in itertools.product(seeds, cells):
        measure = functools.partial(train, settings, data_dir=data_dir, **cell, seed=seed)
        if study.run({**cell, "seed": seed}, measure):
            report(study)
            reported = True
    if not reported:
        report(study)
    return study


def product(corpora, nets, sizes=("10m",), percents=(100,)):
    """All cells of these corpora, nets, sizes and percentages of the training part."""
    names = ("corpus", "size", "train_percent", "net")
    chosen = [dict(zip(names, cell, strict=True))
              for cell in itertools.product(corpora, sizes, percents, nets)]  # fmt: skip
    return [{key: cell[key] for key in COLUMNS[:4]} for cell in chosen]


def recipe(settings, corpus, net, size, train_percent, seed, data_dir=None):
    """The zoo's recipe of a cell.

    Raises:
        ValueError: Unknown names, or settings that the recipe does not have.
    """
    check_name("net", net, NETS)
    check_name("corpus", corpus, CORPORA)
    check_name("size", size, SIZES)
    made = _zoo_recipe(net, corpus, seed=seed, data_dir=data_dir)
    if corpus == "pydoc":
        made = made.replace(data="pydoc")
    options = dict(made.data_options)
    if settings["characters"] is not None:
        options["first"] = settings["characters"]
    if train_percent != 100:
        options["train_fraction"] = train_percent / 100
    given = {name: settings[name] for name in ("epochs", "batch_size", "layers")}
    given["dtype_policy"] = settings.get("dtype_policy")
    given |= {"hidden_units": settings["units"], **NETS[net].options}
    if net == "rhn":
        del given["layers"]  # always one
    given = {name: value for name, value in given.items() if value is not None}
    made = made.replace(data_options=options, **given)
    return made if settings["units"] else made.replace(hidden_units=units(net, size, made))


def units(net, size, recipe):
    """Returns the number of units with the number of parameters closest to a size."""
    arguments = recipe.arguments
    a, b = PARAMETERS[arguments.get("variant", net)]
    if net not in ("grid_lstm", "rhn"):
        a, b = a * arguments["layers"], b * arguments["layers"]
    vocabulary, wanted = arguments["vocabulary_size"], SIZES[size]
    half = (b + 2 * vocabulary) / (2 * a)
    root = math.sqrt(half**2 + (wanted - vocabulary) / a) - half

    def error(h):
        return abs(a * h**2 + b * h + 2 * vocabulary * h + vocabulary - wanted)

    return min(math.floor(root), math.ceil(root), key=error)


def _zoo_recipe(net, corpus, **options):
    """The zoo's recipe of a net on a corpus, in this paper's setting."""
    name = f"{NETS[net].prefix}_{'char_ptb' if corpus == 'pydoc' else corpus}"
    if f"{name}_lru_paper" in zoo.list_models():
        name = f"{name}_lru_paper"
    return zoo.recipe(name, **options)


def published(net, corpus, size):
    """(epochs to the best, its test loss) by the paper's Table 1; its 10M for a size of our own."""
    if corpus not in PAPERS_CORPORA:
        return None, None
    size = size if size in PAPERS_SIZES else "10m"
    made = _zoo_recipe(net, corpus, **NETS[net].options)
    value = published_value(made.replace(hidden_units=units(net, size, made)))
    return value.epochs, value.value


def check_name(kind, name, known):
    """Raises an error for an unknown name."""
    if name not in known:
        raise ValueError(f"Unknown {kind} {name!r}. Known: {', '.join(known)}.")


def train(settings, work, data_dir=None, **cell):
    """Trains a cell, or resumes its interrupted training; returns its rows."""
    made = recipe(settings, data_dir=data_dir, **cell)
    label = "{corpus}, {net}, {size}, {train_percent} %, seed {seed}".format(**cell)
    keras.utils.clear_session()  # frees the previous cell
    curve = Curve.of(made, label)
    model = run.train(made, work, verbose=0, callbacks=[curve])
    return [{"parameters": model.count_params(), **record} for record in curve.records]


class Curve(keras.callbacks.Callback):
    """Evaluates the test split after every epoch and collects what a cell's rows need.

    Args:
        test: Batches of the test split.
        epochs: The most there can be.
        label: What the lines of progress begin with.

    Attributes:
        records: A dict per epoch, also of those before an interruption. `seconds` are those of
            training and validation; where `compiles` is 1 they include compilation.
    """

    def __init__(self, test, epochs, label):
        super().__init__()
        self.test = test
        self.epochs = epochs
        self.label = label
        self.records = []

    @classmethod
    def of(cls, recipe, label):
        """The callback for a recipe."""
        return cls(recipe.stream(recipe.load_data().test), recipe.training.epochs, label)

    def get_state(self):
        return {"records": self.records}

    def set_state(self, state):
        self.records = state["records"]

    def on_train_begin(self, logs=None):
        self._compiles = 1

    def on_epoch_begin(self, epoch, logs=None):
        self._started = time.perf_counter()

    def on_epoch_end(self, epoch, logs=None):
        seconds = time.perf_counter() - self._started
        test = self.model.evaluate(self.test, verbose=0, return_dict=True)["loss"]
        record = {
            "epoch": epoch + 1,
            "seconds": round(seconds, 3),
            "compiles": self._compiles,
            "train_loss": float(logs["loss"]),
            "valid": float(logs["val_loss"]),
            "test": float(test),
        }
        self._compiles = 0
        self.records = [*self.records, record]
        print(
            f"{self.label}: epoch {epoch + 1} of {self.epochs}, {seconds:.1f} s, "
            f"train {record['train_loss']:.4f}, valid {record['valid']:.4f}, "
            f"test {record['test']:.4f} nats a character",
            flush=True,
        )
