"""Scripts for a GPU machine with a time limit; see README.md."""

import os

# Before the first import of Keras. TensorFlow need not be installed.
os.environ.setdefault("KERAS_BACKEND", "jax")
