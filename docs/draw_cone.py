"""Draws docs/cone.png: the positions that a TrellisLayer computes in two typical cases.

python docs/draw_cone.py
"""

import pathlib

from trellis_keras.layers.cone import Cone, draw_cone, offsets

HERE = pathlib.Path(__file__).parent

if __name__ == "__main__":
    draw_cone(
        Cone(32, [offsets(2, d) for d in (1, 1, 2, 4, 8)], kept=1),
        HERE / "cone.png",
        "Only the last output is wanted: levels of dilation 1, 1, 2, 4, 8",
    )
    draw_cone(
        Cone(24, [offsets(2, 1)] * 8, kept=12),
        HERE / "cone_chop.png",
        "The last 12 of 24 outputs enter the loss: eight levels of dilation 1",
    )
