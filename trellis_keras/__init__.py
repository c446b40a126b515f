"""TrellisNet, TCN and Lattice Recurrent Unit models for Keras."""

__version__ = "0.1.0"
