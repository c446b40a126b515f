"""Training in pieces, each of which leaves a record and a checkpoint."""

import math
import pathlib
import threading
import time

import keras

from trellis_keras.training import BestModel, Checkpoint
from trellis_keras.training.checkpoint import has_memory


def train(model, task, splits, folder, *, seed, epochs, records=100, stop=None, label=""):
    """Trains a model; called again with the same folder it resumes an interrupted training.

    Args:
        model: A model of `nets.build`.
        task: Its `tasks.Task`.
        splits: What `task.load()` returned.
        folder: For checkpoints and the best model, `best.keras`.
        seed: Of the data's order and of dropout.
        epochs: Number of passes over the training data; may be a fraction.
        records: Number of records that are wanted, evenly spread. (There is one an epoch where
            the task's learning rate depends on that.)
        stop: A function of a record that says whether to stop there.
        label: What the lines of progress begin with.

    Returns:
        A list of records: `step`, `seconds` (training, validation and compilation),
        `train_loss` (mean since the record before), `valid_loss`, `valid` (the task's metric)
        and the other values of the validation as `valid_<name>`.
    """
    folder = pathlib.Path(folder)
    stream = task.stream(splits, "train", seed)
    steps = math.ceil(epochs * len(stream))
    decay = task.decay()
    pieces = Pieces(stream, math.ceil(steps / records) if decay is None else len(stream))
    curve = Curve(task, pieces, steps, stop, label)
    best = BestModel(folder / "best.keras")
    callbacks = [PieceOrder(pieces), *([decay] if decay else []), curve, best]
    memories = [callback for callback in callbacks if has_memory(callback)]
    folder.mkdir(parents=True, exist_ok=True)
    model.fit(
        pieces,
        validation_data=task.stream(splits, "valid", seed),
        epochs=math.ceil(steps / len(pieces)),
        shuffle=False,
        verbose=0,
        callbacks=[
            *callbacks,
            Checkpoint(folder / "checkpoints", seed=seed, callbacks=memories),
        ],
    )
    return curve.records


def test_value(model, task, splits, folder):
    """The task's metric on the test split, of the model with the best validation loss."""
    model.load_weights(pathlib.Path(folder) / "best.keras")
    return task.value(model.evaluate(task.stream(splits, "test", 0), verbose=0, return_dict=True))


def rows(records, task, **columns):
    """Records as rows of a table of curves."""
    names = ("step", "seconds", "train_loss")
    return [
        {
            **columns,
            **{name: record[name] for name in names},
            "metric": task.metric,
            "valid": record["valid"],
        }
        for record in records
    ]


class Pieces(keras.utils.PyDataset):
    """A stream cut into pieces of equally many steps, whatever its own epochs are.

    To Keras each piece is an epoch, so that there can be records and checkpoints within a long
    epoch, or over several short ones. The order stays a function of seed and step.
    """

    def __init__(self, stream, steps):
        super().__init__()
        self.stream = stream
        self.steps = steps
        self.piece = 0
        # Keras looks at the data before it trains; the thread that fetches ahead for this may
        # still run when the one of the first epoch starts.
        self._lock = threading.Lock()

    def __len__(self):
        return self.steps

    def __getitem__(self, index):
        epoch, batch = divmod(self.piece * self.steps + index, len(self.stream))
        with self._lock:
            if hasattr(self.stream, "epoch"):  # text has one order
                self.stream.epoch = epoch
            return self.stream[batch]


class PieceOrder(keras.callbacks.Callback):
    """Tells `Pieces` which piece is trained on."""

    def __init__(self, pieces):
        super().__init__()
        self.pieces = pieces

    def on_epoch_begin(self, epoch, logs=None):
        self.pieces.piece = epoch


class Curve(keras.callbacks.Callback):
    """Collects the records of `train`, also through interruptions."""

    def __init__(self, task, pieces, steps, stop, label):
        super().__init__()
        self.task = task
        self.pieces = pieces
        self.steps = math.ceil(steps / len(pieces)) * len(pieces)
        self.stop = stop
        self.label = label
        self.records = []
        self.seconds_before = 0.0

    def get_state(self):
        return {"records": self.records}

    def set_state(self, state):
        self.records = state["records"]
        self.seconds_before = self.records[-1]["seconds"] if self.records else 0.0

    def on_train_begin(self, logs=None):
        self.started = time.perf_counter()

    def on_epoch_end(self, epoch, logs=None):
        valid = {k.removeprefix("val_"): float(v) for k, v in logs.items() if k.startswith("val_")}
        record = {
            "step": (epoch + 1) * len(self.pieces),
            "seconds": round(self.seconds_before + time.perf_counter() - self.started, 2),
            "train_loss": float(logs["loss"]),
            **{f"valid_{name}": value for name, value in valid.items()},
            "valid": self.task.value(valid),
        }
        self.records = [*self.records, record]
        print(
            f"{self.label}: step {record['step']} of {self.steps}, {record['seconds']:.0f} s, "
            f"loss {record['train_loss']:.3g}, {self.task.metric} {record['valid']:.4g}",
            flush=True,
        )
        if self.stop and self.stop(record):
            self.model.stop_training = True
