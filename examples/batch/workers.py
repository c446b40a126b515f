"""Runs a model in several Ray Data workers, from Parquet to Parquet."""

import argparse
import os
import shutil

import pyarrow.parquet as pq
import ray


def arguments(description, about="folder of a run of `trellis-keras train`"):
    """Returns the command line's arguments, of which the first, `about`, makes a worker."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("first", help=about)
    parser.add_argument("input", help="folder or file of Parquet")
    parser.add_argument("output", help="folder of Parquet to write")
    parser.add_argument("--workers", type=int, default=1, help="processes that hold the model")
    parser.add_argument("--rows", type=int, default=1024, help="rows that a worker takes at once")
    return parser.parse_args()


def run(worker, options):
    """Maps the rows of the input by a class that holds the model, in order.

    Args:
        worker: Class of `worker(first)`, called with a batch, a dict of arrays by column.
        options: The result of `arguments`.
    """
    if os.path.exists(options.output):
        raise SystemExit(f"{options.output} already exists. Choose another folder.")
    ray.init(ignore_reinit_error=True)
    cores = int(ray.cluster_resources()["CPU"])
    if options.workers >= cores:
        raise SystemExit(
            f"--workers must be less than the {cores} cores of Ray, some of which read and write. "
            f"Received: --workers {options.workers}"
        )
    context = ray.data.DataContext.get_current()
    context.execution_options.preserve_order = True
    rows = ray.data.read_parquet(options.input)
    rows = rows.map_batches(
        worker,
        fn_constructor_args=(options.first,),
        batch_size=options.rows,
        compute=ray.data.ActorPoolStrategy(size=options.workers),
    )
    # Written here, because Ray numbers its own files in the order in which the writers finish.
    partial = os.path.normpath(options.output) + ".partial"  # until all parts are written
    shutil.rmtree(partial, ignore_errors=True)
    os.makedirs(partial)
    parts = rows.iter_batches(batch_size=16 * options.rows, batch_format="pyarrow")
    for number, part in enumerate(parts):
        pq.write_table(part, os.path.join(partial, f"part-{number:06d}.parquet"))
    os.rename(partial, options.output)
