"""Log-probabilities of the lines of a text file, which may be larger than memory.

`reader` turns the file into token ids, `scorer` the ids into log-probabilities, `output` writes
them so that an interrupted job goes on, and `job` is the loop that joins the three.
"""

from trellis_keras.scoring.job import score

__all__ = ["score"]
