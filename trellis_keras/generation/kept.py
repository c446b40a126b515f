"""Compiled functions that are kept with a model."""

# Shapes, samplers' settings, stop tokens: a compiled function takes megabytes.
_KEPT = 16


def kept(model, key, make):
    """Returns what `make()` returned for this key and model, unless it was too long ago."""
    if "_generation_functions" not in vars(model):
        # A plain attribute: Keras' tracking would try to save it.
        object.__setattr__(model, "_generation_functions", {})
    functions = model._generation_functions
    functions[key] = functions.pop(key) if key in functions else make()
    if len(functions) > _KEPT:
        del functions[next(iter(functions))]
    return functions[key]
