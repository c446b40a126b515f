"""What is printed while a model trains."""

from trellis_keras.zoo.progress_bar import BatchProgress, ProgressBar


def test_lines_within_a_long_epoch(capsys, monkeypatch):
    times = iter([0, 10, 65, 66, 80, 200, 201, 300, 301])
    monkeypatch.setattr("trellis_keras.zoo.progress_bar.monotonic", lambda: next(times))
    progress = BatchProgress(60)
    progress.set_params({"epochs": 3, "steps": 1200})
    progress.on_epoch_begin(1)
    for batch, loss in ((0, 3.0), (1, 2.0), (2, 1.5), (1199, 1.0)):
        progress.on_train_batch_end(batch, {"loss": loss})
    assert capsys.readouterr().out.splitlines() == [
        "Epoch 2/3: batch 2/1,200 - loss: 2.0000",
        "Epoch 2/3: batch 1,200/1,200 - loss: 1.0000",
    ]
    progress.set_params({"epochs": 3, "steps": None})  # data of unknown length
    progress.on_train_batch_end(7, {})
    assert capsys.readouterr().out == "Epoch 2/3: batch 8\n"


def test_the_line_of_an_epoch_names_no_single_layers(capsys):
    progress = ProgressBar()
    progress.set_params({"verbose": 2, "epochs": 3, "steps": 2})
    progress.on_epoch_begin(0)
    progress.on_epoch_end(0, {"loss": 3.0, "gradient_norm": 1.5, "gradient_norm/tcn": 0.5})
    line = capsys.readouterr().out.splitlines()[-1]
    assert "gradient_norm: 1.5" in line and "loss: 3" in line and "tcn" not in line
