"""For a machine with one GPU and a time limit: README.md has the commands."""

import os

# Before Keras is imported for the first time. TensorFlow need not be installed.
os.environ.setdefault("KERAS_BACKEND", "jax")
