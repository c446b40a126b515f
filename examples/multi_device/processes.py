"""Trains a zoo model on several machines, a process on each, with JAX.

On each machine, with its own number after --process, and the first machine's address:

    python examples/multi_device/processes.py trellisnet_ptb \\
        --address 10.0.0.1:1234 --processes 2 --process 0

Each process reads its own rows of a batch. See docs/multi_device.md.
"""

import json
import os
import pathlib

os.environ["KERAS_BACKEND"] = "jax"

import keras
import task


class ProcessRows(keras.utils.PyDataset):
    """The rows of every batch that one process reads; the others read the others.

    Args:
        stream: `PyDataset` of batches, the same in all processes.
        process: Which one, from 0.
        processes: How many there are.
    """

    def __init__(self, stream, process, processes):
        super().__init__()
        self.stream = stream
        rows = stream.batch_size // processes
        self.rows = slice(process * rows, (process + 1) * rows)

    def __len__(self):
        return len(self.stream)

    def __getitem__(self, index):
        return tuple(part[self.rows] for part in self.stream[index])


def main():
    parser = task.arguments("Trains a zoo model on several machines, a process on each.")
    parser.add_argument("--address", help="host:port of process 0, which all can reach")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--process", type=int, default=0)
    options = parser.parse_args()
    number, processes = options.process, options.processes
    if not 0 <= number < processes or processes > 1 and options.address is None:
        parser.error("--process must lie in 0 to --processes - 1, and these need an --address")
    if processes > 1:
        # Before anything is computed: JAX then counts the devices of all machines.
        keras.distribution.initialize(options.address, processes, number)
    # Of one process too, for it may have several GPUs. `ProcessRows` has shared out the data.
    distribution = keras.distribution.DataParallel(auto_shard_dataset=False)
    keras.distribution.set_distribution(distribution)

    recipe, loaded = task.load(options)
    batch, devices = recipe.training.batch_size, keras.distribution.get_device_count()
    if batch % devices:
        parser.error(f"batch_size={batch} cannot be shared by {devices} devices")
    model = task.build(recipe, loaded)
    losses = task.train(
        model,
        recipe,
        loaded,
        options,
        pathlib.Path(options.checkpoints) / f"process-{number}",
        rows=lambda stream: ProcessRows(stream, number, processes),
        verbose="auto" if number == 0 else 0,
    )
    if losses and number == 0:
        print(json.dumps(losses))


if __name__ == "__main__":
    main()
