"""LanguageModel against the authors' programs: one pass, one loss, whole trainings."""

import keras
import numpy as np
import pytest
from keras import ops

from tests.support.golden import (
    check_gradients,
    family,
    floats,
    language_model,
    log_softmax,
    matched_variables,
    variables_and_references,
)
from tests.support.gradients import value_and_gradients
from tests.support.parameters import SLOW_ON_JAX, slow_but
from trellis_keras.torch_weights import parameters
from trellis_keras.training.optimizers import SGD, Adam

pytestmark = pytest.mark.both_backends
exact = pytest.mark.float64

CASES = ["softmax", "softmax_wnorm", "noaux", "last_row", "mos"]


def log_probabilities(arrays, name):
    """What the authors' program decodes: logits, but of a mixture of softmaxes log(p + 1e-8)."""
    decoded = arrays[name]
    return decoded if "n_experts" in arrays["meta"]["config"] else log_softmax(decoded)


@exact
@pytest.mark.both_backends(slow=True)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("history", [False, True])
def test_outputs(case, history, golden, assert_close):
    arrays = golden(f"trellis_lm_{case}")
    model = language_model(arrays)
    suffix = "_hist_f64" if history else "_f64"
    states = [floats(arrays[f"in.{name}"][:, :, 0]) for name in ("h0", "c0")]
    backbone = model.backbone
    outputs = backbone(
        model.embedding(arrays["in.tokens"]), initial_state=states if history else None
    )
    raw, aux = outputs if backbone.return_aux else (outputs, None)
    assert_close(raw, arrays["out.raw_output" + suffix], "lm_output", "raw")
    decoded = log_probabilities(arrays, "out.decoded" + suffix)
    assert_close(model.head(raw), decoded, "lm_output", "decoded")
    if not history:
        assert_close(model(arrays["in.tokens"]), decoded, "lm_output", "call")
    if aux is not None:
        decoded = log_probabilities(arrays, "out.aux_decoded" + suffix)
        assert_close(model.head(aux), decoded, "lm_output", "aux")


def put_masks(model, masks):
    """Puts the stored draws in place of the random ones."""
    backbone = model.backbone

    def fixed(layer, mask):
        mask = floats(mask) / (1 - layer.rate)
        layer.draw = lambda shape: ops.convert_to_tensor(mask)

    def kernel_mask(layer, mask):
        (convert,) = (p.convert for p in parameters(backbone) if p.variable is layer.kernel)
        return convert(mask)

    fixed(model.embedding_dropout, masks["emb"])
    fixed(model.input_dropout, masks["input"])
    for layer, name in ((backbone.kernel, "weight1"), (backbone.recurrent_kernel, "weight2")):
        fixed(layer.drop_connect, kernel_mask(layer, masks[name]))
    fixed(backbone.hidden_dropout, masks["hidden"].transpose(0, 2, 1))
    fixed(model.output_dropout, masks["output"])
    fixed(model.aux_dropout, masks["aux_output"])
    if "mos_latent" in masks:
        put_latent_masks(model.head.latent_dropout, masks)


def put_latent_masks(layer, masks):
    """One for the output, one for the auxiliary outputs, which have an axis more."""
    scaled = [floats(masks[name]) / (1 - layer.rate) for name in ("mos_latent", "aux_mos_latent")]
    by_rank = {mask.ndim: mask for mask in scaled}
    layer.draw = lambda shape: ops.convert_to_tensor(by_rank[len(shape)])


# Of a mixture of softmaxes: once with all logits, and once with those of one step at a time.
LOSSES = [(case, 10**9) for case in (*CASES, "dropout", "dropout_mos_wnorm")]
LOSSES += [("mos", 1), ("dropout_mos_wnorm", 1)]


@exact
@pytest.mark.parametrize(
    ("case", "logits_at_once"),
    [LOSSES[0], *(pytest.param(*loss, marks=SLOW_ON_JAX) for loss in LOSSES[1:])],
)
def test_training_loss_and_gradients(case, logits_at_once, golden, assert_close, monkeypatch):
    monkeypatch.setattr("trellis_keras.layers.heads.LOGITS_AT_ONCE", logits_at_once)
    arrays = golden(f"trellis_lm_{case}")
    config = arrays["meta"]["config"]
    model = language_model(arrays)
    if case.startswith("dropout"):
        put_masks(model, family(arrays, "mask"))
    stream = arrays["in.stream"].T
    rows = min(config["seq_len"], stream.shape[1] - 1)
    x, y = stream[:, :rows], stream[:, config["horizon"] + 1 : rows + 1]

    def scored():
        """What `fit` computes for a batch: the loss, from the last y.shape[1] positions."""
        y_pred = model((x, y), training=True)
        return model.compute_loss(x, y, y_pred, training=True), y_pred

    (loss, _), gradients, _ = value_and_gradients(scored, matched_variables(model))
    assert_close(loss, arrays["out.loss_f64"], "lm_output", "loss")
    reference = family(arrays, "grad") | family(arrays, "gradfull")
    check_gradients(model, gradients, reference, assert_close, "lm_gradient")


TRAJECTORIES = ["word_sgd", "word_sgd_bigger_init", "char_adam_repack_wnorm"]
QUICK = ["word_sgd_bigger_init", "char_adam_repack_wnorm"]


def segments(stream, length, valid, history):
    """The authors' segmentation: [(x, y), ...] with targets for the counted steps only."""
    stream, batches, start = stream.T, [], 0
    while start + history < stream.shape[1] - 1:
        stop = min(start + length, stream.shape[1] - 1)
        y = stream[:, start + 1 + history : stop + 1]
        batches.append((stream[:, start:stop], y))
        start += valid
    return batches


def evaluate(model, batches):
    """Mean cross-entropy over counted steps of segments of different lengths."""
    if model.backbone.stateful:
        model.backbone.reset_state(len(batches[0][0]), training=False)
    losses = []
    for x, y in batches:
        model.reset_metrics()
        losses.append(model.test_on_batch(x, y, return_dict=True)["loss"])
    return np.average(losses, weights=[y.shape[1] for _, y in batches])


@pytest.mark.both_backends(slow=True)
@pytest.mark.parametrize("case", slow_but(TRAJECTORIES, *QUICK))
@pytest.mark.parametrize("floatx", slow_but(["float32", "float64"], "float64"), indirect=True)
def test_training_trajectory(case, golden, assert_close, tolerance, floatx):
    arrays = golden(f"trajectory_{case}")
    meta = arrays["meta"]
    config, valid, history = meta["config"], meta["valid_len"], meta["eff_history"]
    length = valid + history
    model = language_model(arrays, parameters="param0")
    optimizer = {"SGD": SGD, "Adam": Adam}[config["optim"]]
    model.compile(
        optimizer(config["lr"], l2=config["wdecay"], clip_norm=config["clip"]),
        jit_compile=keras.backend.backend() == "jax",
    )
    evaluation = segments(arrays["in.eval_stream"], length, valid, history)
    before = evaluate(model, evaluation)
    allowed = tolerance("trajectory_loss")
    assert before == pytest.approx(arrays["out.eval_loss_before_f64"], rel=allowed)

    batches = segments(arrays["in.stream"], length, valid, history)
    assert len(batches) == config["steps"]
    if model.backbone.stateful:
        model.backbone.reset_state(len(batches[0][0]), training=True)
    losses = []
    for step, (x, y) in enumerate(batches):
        model.reset_metrics()
        losses.append(model.train_on_batch(x, y, return_dict=True)["loss"])
        if step in (0, len(batches) - 1):
            reference = family(arrays, "param1" if step == 0 else "paramN")
            for name, variable, wanted in variables_and_references(model, reference):
                assert_close(ops.convert_to_numpy(variable), wanted, "trajectory_weight", name)
    assert_close(floats(losses), arrays["out.loss_f64"], "trajectory_loss", "loss")
    after = evaluate(model, evaluation)
    assert after == pytest.approx(arrays["out.eval_loss_after_f64"], rel=allowed)
