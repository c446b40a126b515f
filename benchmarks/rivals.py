"""Compares causal networks of the same size on the same task, each in its own process.

    pip install --no-deps keras-tcn && pip install torch pytorch-tcn mambapy
    python -m benchmarks run rivals

The task is the adding problem (Bai et al. 2018): training with 2 channels, 600 steps, batch size 32
and one output at the last step; then one new step at a time, batch 1, as a user calls it. All nets
have about 70,000 parameters. The programs run in alternation, and a figure is the median of the
turns. continual-inference 1.2.4 is not included, because it does not support dilated convolutions.
"""

import importlib.metadata
import importlib.util
import statistics
import sys
import time

import numpy as np

from benchmarks.results import ROUNDS, heading
from benchmarks.worker import Worker, serve
from tools.markdown import table

# Frameworks and the package are imported by the functions: each program has its own process.

BATCH, TIME, CHANNELS = 32, 600, 2
TAPS, DEPTH, FILTERS = 8, 8, 24
STEPS = 1000  # to compare with the full pass


# A program has `train()`, a training step; `full(x)`, the outputs (steps,) of inputs (steps,
# channels) in one pass; `reset()`, which starts a stream and sets `state_bytes`; and `step(x)`,
# which reads a step (channels,) and returns the output.


def _batch():
    generator = np.random.default_rng(0)
    x = generator.normal(size=(BATCH, TIME, CHANNELS)).astype("float32")
    return x, x[:, :, :1].sum(axis=1)


class _Keras:
    """A backbone with a Dense(1) on its last output, trained in graph mode or with XLA."""

    def __init__(self, backbone, per_step):
        import keras

        self.batch = _batch()
        self.trained = keras.Sequential([keras.Input((TIME, CHANNELS)), backbone])
        self.trained.add(keras.layers.Dense(1))
        self._compile_faster()
        self.parameters = self.trained.count_params()
        self.model = keras.Sequential([keras.Input((None, CHANNELS)), per_step])
        self.model.add(keras.layers.Dense(1))
        self.model.set_weights(self.trained.get_weights())

    def _compile_faster(self):
        """Compiles the model in graph mode or with XLA, whichever is faster here."""
        import keras

        seconds = {}
        for jit_compile in (True, False, True, False):
            self.trained.compile(keras.optimizers.Adam(2e-3), "mse", jit_compile=jit_compile)
            self.train()
            seconds.setdefault(jit_compile, []).append(_seconds(self.train, 3))
        fastest = min(seconds, key=lambda jit_compile: min(seconds[jit_compile]))
        self.trained.compile(keras.optimizers.Adam(2e-3), "mse", jit_compile=fastest)
        self.compiler = "XLA" if fastest else "graph"

    def train(self):
        self.trained.train_on_batch(*self.batch)

    def full(self, x):
        return np.asarray(self.model(x[None]))[0, :, 0]


class OursTensorFlow(_Keras):
    """trellis_keras' TCN, stepped by `compiled_step(frozen=True)`."""

    formats = "SavedModel, LiteRT, ONNX, C, WebAssembly"
    package = "trellis_keras"

    def __init__(self):
        from trellis_keras.layers import TCN

        super().__init__(
            TCN(FILTERS, TAPS, DEPTH, return_sequences=False), TCN(FILTERS, TAPS, DEPTH)
        )

    def reset(self):
        import keras

        from keras_streams import compiled_step, to_stream

        stream = to_stream(self.model)
        self.compiled, self.cache = compiled_step(stream, frozen=True), stream.initial_cache(1)
        leaves = keras.tree.flatten(self.cache)
        self.state_bytes = sum(4 * int(np.prod(leaf.shape)) for leaf in leaves)

    def step(self, x):
        y, self.cache = self.compiled(x[None], self.cache)
        return float(y[0, 0])


class OursInC(OursTensorFlow):
    """trellis_keras' TCN, stepped by `export.native`."""

    def reset(self):
        from keras_streams.c_export import proven_source
        from trellis_keras.export import native

        self.stream = native(self.model)
        self.state_bytes = proven_source(self.model, "model")[0].state_bytes

    def step(self, x):
        return float(self.stream.step(x)[0])


class KerasTCN(_Keras):
    """keras-tcn, which recomputes its receptive field for each new step, with XLA."""

    formats = "SavedModel, LiteRT, ONNX (of a window)"
    package = "keras-tcn"

    def __init__(self):
        from benchmarks import cases
        from trellis_keras.layers import TCN

        size = FILTERS, TAPS, DEPTH
        self.steps = TCN(*size).receptive_field
        super().__init__(cases.keras_tcn(*size)(), cases.keras_tcn(*size, True)())

    def reset(self):
        import tensorflow as tf

        self.window = np.zeros((1, self.steps, CHANNELS), "float32")
        self.state_bytes = self.window.nbytes
        self.compiled = tf.function(lambda x: self.model(x)[:, -1], jit_compile=True)

    def step(self, x):
        self.window[:, :-1] = self.window[:, 1:]
        self.window[:, -1] = x
        return float(self.compiled(self.window)[0, 0])


class _KerasRNN(_Keras):
    """A recurrent layer of Keras, stepped by a compiled call of its cell."""

    formats = "SavedModel, LiteRT, ONNX, C, WebAssembly (by trellis_keras)"
    package = "keras"
    layer, units = "LSTM", 130

    def __init__(self):
        import keras

        layer = getattr(keras.layers, self.layer)
        super().__init__(layer(self.units), layer(self.units, return_sequences=True))

    def reset(self):
        import tensorflow as tf

        cell, head = self.model.layers[0].cell, self.model.layers[1]

        def step(x, states):
            y, states = cell(x, states)
            return head(y), states

        self.compiled = tf.function(step, jit_compile=True, autograph=False)
        self.states = [tf.zeros((1, self.units)) for _ in cell.get_initial_state(1)]
        self.state_bytes = 4 * self.units * len(self.states)

    def step(self, x):
        y, self.states = self.compiled(x[None], self.states)
        return float(y[0, 0])


class KerasLSTM(_KerasRNN):
    pass


class KerasGRU(_KerasRNN):
    layer, units = "GRU", 150


class _Torch:
    """A module from (batch, time, channels) to (batch, time, 1), trained in eager mode."""

    formats = "PyTorch, ONNX"
    compiler = "none"

    def __init__(self, module):
        import torch

        self.torch, self.module = torch, module
        self.parameters = sum(p.numel() for p in module.parameters())
        self.batch = [torch.from_numpy(a) for a in _batch()]
        self.optimizer = torch.optim.Adam(module.parameters(), 2e-3)

    def train(self):
        x, y = self.batch
        self.module.train()
        self.optimizer.zero_grad()
        self.torch.nn.functional.mse_loss(self.module(x)[:, -1], y).backward()
        self.optimizer.step()
        self.module.eval()

    def full(self, x):
        self.module.eval()
        with self.torch.no_grad():
            return self.module(self.torch.from_numpy(x)[None])[0, :, 0].numpy()


class PytorchTCN(_Torch):
    """pytorch-tcn, whose `inference` keeps buffers."""

    package = "pytorch-tcn"

    def __init__(self):
        import pytorch_tcn

        super().__init__(
            pytorch_tcn.TCN(
                CHANNELS,
                [FILTERS] * DEPTH,
                kernel_size=TAPS,
                dropout=0.0,
                input_shape="NLC",
                output_projection=1,
            )
        )

    def reset(self):
        self.module.reset_buffers()
        self.state_bytes = sum(4 * b.numel() for b in self.module.get_buffers() if b is not None)

    def step(self, x):
        with self.torch.no_grad():
            y = self.module.inference(self.torch.from_numpy(x)[None, None])
        return float(y[0, 0, 0])


class MambaPy(_Torch):
    """mambapy's Mamba with 2 layers of 67 channels, whose `step` keeps states."""

    formats = "PyTorch"
    package = "mambapy"
    width, layers = 67, 2

    def __init__(self):
        import torch
        from mambapy.mamba import Mamba, MambaConfig

        self.net = Mamba(MambaConfig(d_model=self.width, n_layers=self.layers))
        self.first, self.last = (
            torch.nn.Linear(CHANNELS, self.width),
            torch.nn.Linear(self.width, 1),
        )
        super().__init__(torch.nn.Sequential(self.first, self.net, self.last))

    def reset(self):
        config = self.net.config
        h = self.torch.zeros(1, config.d_inner, config.d_state)
        inputs = self.torch.zeros(1, config.d_inner, config.d_conv - 1)
        self.caches = [(h, inputs) for _ in range(self.layers)]
        self.state_bytes = 4 * self.layers * (h.numel() + inputs.numel())

    def step(self, x):
        with self.torch.no_grad():
            z = self.first(self.torch.from_numpy(x)[None])
            z, self.caches = self.net.step(z, self.caches)
            return float(self.last(z)[0, 0])


VARIANTS = {
    "`trellis_keras`, `export.native`": OursInC,
    "`trellis_keras`, TensorFlow": OursTensorFlow,
    "keras-tcn": KerasTCN,
    "`keras.layers.LSTM`": KerasLSTM,
    "`keras.layers.GRU`": KerasGRU,
    "pytorch-tcn": PytorchTCN,
    "mambapy": MambaPy,
}
_MODULES = {"keras-tcn": "tcn", "pytorch-tcn": "pytorch_tcn"}


def measure():
    """Returns {"programs": {program: its properties and the medians of its turns}}."""
    import keras

    if keras.backend.backend() != "tensorflow":
        raise SystemExit("rivals calls TensorFlow, too: set KERAS_BACKEND=tensorflow.")
    workers = {}
    for name, program in VARIANTS.items():
        if importlib.util.find_spec(_MODULES.get(program.package, program.package)) is not None:
            workers[name] = Worker("benchmarks.rivals", name)
    try:
        figures = {name: worker.ask("facts") for name, worker in workers.items()}
        measured = [{n: worker.ask("turn") for n, worker in workers.items()} for _ in range(ROUNDS)]
    finally:
        for worker in workers.values():
            worker.kill()
    for name, found in figures.items():
        found["turns"] = [turn[name] for turn in measured]
        for key in ("train_ms", "step_us"):
            found[key] = statistics.median(turn[key] for turn in found["turns"])
    return {"programs": figures}


def work(name):
    """Answers with a program's properties, and with the figures of each turn."""
    program = None
    x = np.random.default_rng(0).normal(size=(STEPS, CHANNELS)).astype("float32")

    def facts():
        nonlocal program
        program = VARIANTS[name]()
        program.reset()
        found = np.array([program.step(row) for row in x[: 20 if name == "keras-tcn" else None]])
        expected = program.full(x)[: len(found)]
        program.train()
        return {
            "parameters": int(program.parameters),
            "state_bytes": program.state_bytes,
            "difference": float(np.abs(found - expected).max() / np.abs(expected).max()),
            "formats": program.formats,
            "compiler": program.compiler,
            "version": importlib.metadata.version(program.package),
        }

    def turn():
        train_ms = 1e3 * _seconds(program.train, 5)
        program.step(x[0])
        count = 5 if name == "keras-tcn" else 200
        return {"train_ms": train_ms, "step_us": 1e6 * _seconds(lambda: program.step(x[1]), count)}

    serve(facts=facts, turn=turn)


def _seconds(function, count):
    started = time.perf_counter()
    for _ in range(count):
        function()
    return (time.perf_counter() - started) / count


def markdown(results):
    """Returns the results as Markdown."""
    title = "rivals: about 70,000 parameters, 600 steps of 2 channels"
    header = ["program", "parameters", "training step, batch 32, ms (compiler)"]
    header += ["one new step, batch 1, us", "largest difference from its full pass"]
    header += ["bytes of state", "formats"]
    rows = []
    for name, f in results["programs"].items():
        version = "" if "keras.layers" in name else f" {f['version']}"
        step = f"{f['step_us']:,.0f}" if f["step_us"] >= 100 else f"{f['step_us']:.1f}"
        train = f"{f['train_ms']:.0f} ({f['compiler']})"
        sizes = f"{f['difference']:.0e}", f"{f['state_bytes']:,}"
        rows.append([name + version, f"{f['parameters']:,}", train, step, *sizes, f["formats"]])
    missing = [name for name in VARIANTS if name not in results["programs"]]
    note = f"\nNot installed: {', '.join(missing)}.\n" if missing else ""
    return heading(title, results["machine"]) + table(header, rows) + note


if __name__ == "__main__":
    work(sys.argv[1])
