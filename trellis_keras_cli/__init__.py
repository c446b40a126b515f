"""The command line, `trellis-keras`.

It is a package of its own because importing `trellis_keras` imports Keras and TensorFlow, which
takes seconds. Help, `list`, `recipe` and mistyped words need neither: see `index`.
"""
