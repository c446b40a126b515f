"""Writes endpoints.h for run.c: the tensors of a SavedModel that its endpoints read and return.

    python examples/serving/c/endpoints.py MODEL/VERSION > endpoints.h

Needs TensorFlow, or the Python package of its protocol buffers. See README.md beside this file.
"""

import pathlib
import sys

from tensorflow.core.protobuf import saved_model_pb2

ENDPOINTS = ("serving_default", "initial_cache", "step", "score_text")


def main(folder):
    path = pathlib.Path(folder) / "saved_model.pb"
    if not path.is_file():
        sys.exit(f"There is no file {path}. Name a version of the model, such as {folder}/1.")
    content = path.read_bytes()
    graph = saved_model_pb2.SavedModel.FromString(content).meta_graphs[0]
    missing = [name for name in ENDPOINTS if name not in graph.signature_def]
    if missing:
        sys.exit(f"run.c asks a language model; {folder} has no endpoint {', '.join(missing)}.")
    for name in ENDPOINTS:
        signature = graph.signature_def[name]
        inputs, outputs = places(signature.inputs), places(signature.outputs)
        counts = f"{len(signature.inputs)}, {len(signature.outputs)}"
        print(f"static const Endpoint {name} = {{{counts}, {inputs}, {outputs}}};")


def places(tensors):
    """Returns the places of tensors as C, those of the cache last and in a fixed order."""
    names = sorted(tensors, key=lambda name: (name.startswith("cache_"), name))
    pairs = (tensors[name].name.split(":") for name in names)
    return "{" + ", ".join(f'{{"{operation}", {index}}}' for operation, index in pairs) + "}"


if __name__ == "__main__":
    main(sys.argv[1])
