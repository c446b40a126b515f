"""What TensorBoard would find in a folder of logs."""

from tensorboard.backend.event_processing.event_accumulator import TENSORS, EventAccumulator


def read_events(directory):
    """Returns {tag: {step: tensor}} of a folder's event files, and whether there is a graph."""
    events = EventAccumulator(str(directory), size_guidance={TENSORS: 0}).Reload()
    tags = events.Tags()
    values = {tag: {e.step: e.tensor_proto for e in events.Tensors(tag)} for tag in tags["tensors"]}
    return values, tags["graph"]
