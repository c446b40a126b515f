"""The loop over time of a Lattice Recurrent Unit, with a gradient of its own.

Of the unit's equations only those of z2, r and p1 feed the next step's h2; all others can be
computed for all steps at once. What h1 adds to those three, for all steps, is an argument here. So
a step has two products left, of h2 and of r * h2.

Automatic differentiation would add up the gradient of both weights step by step, and keep whatever
it meets. The gradient written out here keeps h2, z2, r and p1 and goes back through the steps for
the pre-activations' gradients only; then each weight's gradient is one product over all steps.
"""

from keras import ops

from trellis_keras.kernels.scan import scan
from trellis_keras.layers.base import tanh
from trellis_keras.layers.lru_cell import product
from trellis_keras.layers.recurrent_cell import drop


def time_states(cell, to_gates, to_p, h2, valid=None, mask=None):
    """The states of one cell (`cells_per_node=1`) at all steps.

    Args:
        cell: The `LRUCell`, for its weights and conventions.
        to_gates, to_p: What h1 and the bias add to z2 and r, (time, batch, 2 * units), and to p1,
            (time, batch, units).
        h2: The first state, (batch, units).
        valid: 1 in steps that count and 0 in those that leave the state as it is,
            (time, batch, 1), or None.
        mask: Dropout mask of h2 in the products, (batch, units), or None.

    Returns:
        h2 before each step (time, batch, units), the last h2, and [z2, r] of each step
        (time, batch, 2 * units) if they have other parts to play, else None.
    """
    recurrent_kernel = cell.recurrent_kernels[0]
    loop = _Loop(cell, valid is not None, mask is not None)
    extras = [ops.cast(x, h2.dtype) for x in (valid, mask) if x is not None]
    outputs = loop(
        to_gates,
        to_p,
        h2,
        ops.cast(cell.columns(recurrent_kernel, *time_gates(cell)), h2.dtype),
        ops.cast(cell.columns(recurrent_kernel, "p1"), h2.dtype),
        *extras,
    )
    return outputs if loop.returns_gates else (*outputs, None)


def time_gates(cell):
    """Names of the gates z2 and r."""
    return ("z2" if "z2" in cell.gates else "z", "r")


class _Loop:
    """The loop as one function with a gradient of its own."""

    def __init__(self, cell, has_valid, has_mask):
        self.z_keeps, self.compute_dtype = cell.z_keeps, cell.compute_dtype
        self.has_valid, self.has_mask = has_valid, has_mask
        self.returns_gates = cell.variant != "ug"

    def __call__(self, *arguments):
        @ops.custom_gradient
        def loop(*arguments):
            before, last, gates, p = self._forward(*arguments)

            def gradient(*upstream, **_):
                # TensorFlow hands over the outputs' gradients one by one, JAX in a tuple.
                upstream = upstream[0] if len(upstream) == 1 else upstream
                return self._backward(upstream, before, gates, p, *arguments)

            return ((before, last, gates) if self.returns_gates else (before, last)), gradient

        return loop(*arguments)

    def _extras(self, extras):
        valid = extras[0] if self.has_valid else None
        return valid, extras[-1] if self.has_mask else None

    def _product(self, x, weight):
        return product(x, weight, self.compute_dtype)

    def _forward(self, to_gates, to_p, h2, gate_kernel, p_kernel, *extras):
        valid, mask = self._extras(extras)

        def step(h, now):
            s = drop(h, mask)
            gates = ops.sigmoid(now[0] + self._product(s, gate_kernel))
            z, r = ops.split(gates, 2, axis=-1)
            p = tanh(now[1] + self._product(r * s, p_kernel))
            following = z * h + (1 - z) * p if self.z_keeps else z * p + (1 - z) * h
            following = following if valid is None else ops.where(now[2] > 0, following, h)
            return following, [h, gates, p]

        inputs = [to_gates, to_p, *([] if valid is None else [valid])]
        last, (before, gates, p) = scan(step, h2, inputs)
        return before, last, gates, p

    def _backward(self, upstream, before, gates, p, to_gates, to_p, h2, *weights_and_extras):
        gate_kernel, p_kernel, *extras = weights_and_extras
        valid, mask = self._extras(extras)
        d_before, d_last, *d_gates = upstream
        gate_kernel, p_kernel = ops.transpose(gate_kernel), ops.transpose(p_kernel)
        sign = -1 if self.z_keeps else 1

        def step(dh, now):
            h, zr, p, dh_also, *others = now
            z, r = ops.split(zr, 2, axis=-1)
            s = drop(h, mask)
            dnew = dh if valid is None else dh * others[-1]
            dp = dnew * ((1 - z) if self.z_keeps else z) * (1 - p * p)
            drs = self._product(dp, p_kernel)
            dzr = ops.concatenate([sign * dnew * (p - h), drs * s], axis=-1)
            dzr = (dzr + others[0] if self.returns_gates else dzr) * zr * (1 - zr)
            ds = drs * r + self._product(dzr, gate_kernel)
            kept = dnew * (z if self.z_keeps else 1 - z)
            kept = kept if valid is None else kept + (dh - dnew)
            return kept + drop(ds, mask) + dh_also, [dzr, dp]

        inputs = [before, gates, p, d_before, *d_gates, *([] if valid is None else [valid])]
        dh, (dzr, dp) = scan(step, d_last, inputs, reverse=True)
        s = drop(before, mask)
        dgate_kernel = self._weight_gradient(s, dzr)
        dp_kernel = self._weight_gradient(gates[..., h2.shape[-1] :] * s, dp)
        return (dzr, dp, dh, dgate_kernel, dp_kernel, *map(ops.zeros_like, extras))

    def _weight_gradient(self, x, upstream):
        """The sum over all steps and rows of x^T upstream."""
        x, upstream = (ops.reshape(t, (-1, t.shape[-1])) for t in (x, upstream))
        return self._product(ops.transpose(x), upstream)
