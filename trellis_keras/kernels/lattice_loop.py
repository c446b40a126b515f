"""All steps of a Lattice Recurrent Unit, with two matrix products per step of the time loop.

`lattice_loop` equals a loop over `LRUCell.advance`; the equations are in `layers/lru.py`. The next
step's h2 depends only on z2, r2 and p1. Therefore

1. the contribution of h1 to these three is computed for all steps at once;
2. `_time_loop` computes h2 of all steps: each step multiplies h2 and r2 * h2 by a matrix;
3. z1, r1, p2 and the output h1' are computed for all steps at once.

The time loop has a custom gradient. Automatic differentiation would add up the gradients of both
matrices step by step and store every intermediate value. Here the backward loop computes only the
gradients of the pre-activations; one product over all steps then gives each matrix's gradient.
"""

import functools
from collections.abc import Sequence

from keras import ops

from trellis_keras.kernels.activations import drop, tanh
from trellis_keras.kernels.gradients import custom_gradient
from trellis_keras.kernels.products import flatten_rows, matmul, multiply_rows
from trellis_keras.kernels.scan import scan
from trellis_keras.types import Tensor


def lattice_loop(
    h1: Tensor,
    h2: Tensor,
    kernel: Tensor,
    recurrent_kernel: Tensor,
    bias: Tensor,
    *,
    gates: Sequence[str],
    update_gate_keeps: bool,
    compute_dtype: str,
    valid: Tensor | None = None,
    masks: tuple[Tensor | None, Tensor | None] = (None, None),
    last_only: bool = False,
) -> tuple[Tensor, Tensor]:
    """Computes the outputs of a lattice cell at all steps.

    Args:
        h1: Tensor (time, batch, units), the inputs from the cell below.
        h2: Tensor (batch, units), the initial state.
        kernel, recurrent_kernel: Tensors (units, blocks * units) that multiply h1 and h2.
        bias: Tensor (blocks * units,).
        gates: Names of the gates in the order of their column blocks, which precede those of p1 and
            p2. Without z1 the cell uses z2 instead, without r1 it uses r2.
        update_gate_keeps: Boolean, whether update gates weight the old state (Eqs. 9 and 10) or the
            new one (Eqs. 17 and 18).
        compute_dtype: Dtype of the products' operands. Results have the dtype of h1.
        valid: Boolean (time, batch, 1). Other steps leave h2 unchanged. Defaults to `None`, all
            steps are valid.
        masks: Dropout masks (batch, units) of h1 and of h2 in the products, each `None` for none.
        last_only: Boolean, whether to compute h1' only at the last step. Defaults to `False`.

    Returns:
        h1' (time, batch, units), or (1, batch, units) with `last_only`, and the last h2.
    """
    names = (*gates, "p1", "p2")
    W, U, b = (
        dict(zip(names, ops.split(weight, len(names), axis=-1), strict=True))
        for weight in (kernel, recurrent_kernel, bias)
    )
    if update_gate_keeps:
        # sigmoid(-a) is 1 - sigmoid(a): with the sign changed, Eqs. 17 and 18 hold.
        W, U, b = ({k: -w if k[0] == "z" else w for k, w in part.items()} for part in (W, U, b))

    product = functools.partial(matmul, compute_dtype=compute_dtype, dtype=h1.dtype)

    def from_h1(x, *names):
        return multiply_rows(product, x, _join(W, names)) + _join(b, names)

    def from_h2(s, *names):
        return multiply_rows(product, s, _join(U, names))

    x = drop(h1, masks[0])
    gate_inputs = from_h1(x, "z2", "r2")
    if valid is not None:
        gate_inputs = ops.where(valid, gate_inputs, -1e9)  # z2 = 0 keeps h2.
    before, last, *time_gates = _time_loop(
        gate_inputs,
        from_h1(x, "p1"),
        h2,
        _join(U, ("z2", "r2")),
        U["p1"],
        mask=masks[1],
        compute_dtype=compute_dtype,
        return_gates="z1" not in W or "r1" not in W,
    )
    if last_only:
        h1, x, before, *time_gates = (a[-1:] for a in (h1, x, before, *time_gates))
    s = drop(before, masks[1])
    shared = ops.split(time_gates[0], 2, axis=-1) if time_gates else (None, None)
    z1, r1 = (
        ops.sigmoid(from_h1(x, gate) + from_h2(s, gate)) if gate in W else other
        for gate, other in zip(("z1", "r1"), shared, strict=True)
    )
    p2 = tanh(from_h1(r1 * x, "p2") + from_h2(s, "p2"))
    return z1 * p2 + (1 - z1) * h1, last


def _time_loop(
    gate_inputs, p_inputs, h2, gate_kernel, p_kernel, *, mask, compute_dtype, return_gates
):
    """Computes the state h2 (time, batch, units) before each step, and the last h2.

    Args:
        gate_inputs: Contribution of h1 and the bias to z2 and r2, (time, batch, 2 * units).
        p_inputs: Their contribution to p1, (time, batch, units).
        h2: The initial state, (batch, units).
        gate_kernel, p_kernel: The kernels of h2 in z2 and r2, and of r2 * h2 in p1.
        mask, compute_dtype: See `lattice_loop`.
        return_gates: Boolean, whether to also return z2 and r2 of all steps, side by side.
    """
    product = functools.partial(matmul, compute_dtype=compute_dtype, dtype=h2.dtype)

    @custom_gradient
    def loop(gate_inputs, p_inputs, h2, gate_kernel, p_kernel, *masks):
        mask = masks[0] if masks else None
        # Once, not in each step.
        gate_operand, p_operand = (ops.cast(k, compute_dtype) for k in (gate_kernel, p_kernel))

        def step(h, inputs):
            gate_input, p_input = inputs
            s = drop(h, mask)
            gates = ops.sigmoid(gate_input + product(s, gate_operand))
            z, r = ops.split(gates, 2, axis=-1)
            p = tanh(p_input + product(r * s, p_operand))
            return z * p + (1 - z) * h, [h, gates, p]

        last, (before, gates, p) = scan(step, h2, [gate_inputs, p_inputs])

        def gradient(d_before, d_last, *d_gates):
            gate_kernel_t, p_kernel_t = ops.transpose(gate_operand), ops.transpose(p_operand)

            def step_back(dh, inputs):
                h, gates, p, dh_of_step, *dgates_of_step = inputs  # the last only if returned
                z, r = ops.split(gates, 2, axis=-1)
                s = drop(h, mask)
                dp = dh * z * (1 - p * p)
                drs = product(dp, p_kernel_t)
                dgates = ops.concatenate([dh * (p - h), drs * s], axis=-1)
                if dgates_of_step:
                    dgates = dgates + dgates_of_step[0]
                dgates = dgates * gates * (1 - gates)
                ds = drs * r + product(dgates, gate_kernel_t)
                return dh * (1 - z) + drop(ds, mask) + dh_of_step, [dgates, dp]

            inputs = [before, gates, p, d_before, *d_gates]
            dh, (dgates, dp) = scan(step_back, d_last, inputs, reverse=True)
            s = drop(before, mask)
            r = gates[..., h2.shape[-1] :]
            dgate_kernel = product(ops.transpose(flatten_rows(s)), flatten_rows(dgates))
            dp_kernel = product(ops.transpose(flatten_rows(r * s)), flatten_rows(dp))
            return dgates, dp, dh, dgate_kernel, dp_kernel, *map(ops.zeros_like, masks)

        return ((before, last, gates) if return_gates else (before, last)), gradient

    # Not a closure over the mask: JAX differentiates functions of their arguments.
    masks = [] if mask is None else [ops.cast(mask, h2.dtype)]
    return loop(gate_inputs, p_inputs, h2, gate_kernel, p_kernel, *masks)


def _join(blocks, names):
    """The concatenated blocks with these names."""
    parts = [blocks[name] for name in names]
    return parts[0] if len(parts) == 1 else ops.concatenate(parts, axis=-1)
