"""Where figures were measured, and the files that they are written to."""

import csv
import json

from keras_streams.files import atomic_write

ROUNDS = 5  # in which variants alternate


def machine():
    """Returns the measured environment: hardware, processor model, backend, versions, commit."""
    from trellis_keras.zoo import environment  # imports Keras, which some processes do without

    fields = {"family": "cpu family", "model": "model\t", "stepping": "stepping"}
    words = (f"{name} {environment.cpu_info(field)}" for name, field in fields.items())
    units = " ".join(environment.vector_units())
    return environment.environment() | {"processor model": ", ".join(words), "units": units}


def heading(title, machine):
    """Returns the text above a table: its title and where it was measured."""
    words = ", ".join(f"{key} {value}" for key, value in machine.items())
    return f"### {title}\n\n{words}\n\n"


def write(path, text):
    """Writes a file and the folder that it is in."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(path) as temporary:
        temporary.write_text(text)


def write_figures(path, figures):
    """Writes figures as JSON."""
    write(path, json.dumps(figures, indent=2) + "\n")


def read_rows(path):
    """Returns the rows of a CSV file as dicts, none without a file."""
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def append_rows(path, rows):
    """Appends rows, dicts with the same keys, to a CSV file."""
    is_new = not path.exists()
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        if is_new:
            writer.writeheader()
        writer.writerows(rows)
