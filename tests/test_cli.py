"""The command line, as a user has it: what it prints, and its errors of one line."""

import functools
import json
import os
import shutil

import pytest

from tests.support.processes import ROOT, run_script
from tests.support.small_runs import TINY, options, write_text
from trellis_keras import __version__, zoo
from trellis_keras.data import Vocabulary
from trellis_keras.layers import TrellisLayer
from trellis_keras.models import LanguageModel
from trellis_keras.training import checkpoint_progress
from trellis_keras.zoo import environment, evaluation
from trellis_keras.zoo import run as runs

UNOBSERVED = ["--gradient-norms", "0", "--sample-length", "0"]
SMALL = [*map(str, options(TINY | {"epochs": 1, "jit_compile": "false"})), *UNOBSERVED]


@pytest.fixture
def chosen(monkeypatch):
    """The recipes that the command `train` would train."""
    recipes = []
    monkeypatch.setattr(zoo, "train", lambda recipe, *_, **__: recipes.append(recipe))
    return recipes


@pytest.fixture
def no_data(monkeypatch):
    """Fails the test where data are loaded."""

    def load(*arguments, **options):
        raise AssertionError("data were loaded")

    monkeypatch.setattr(zoo.datasets, "load", load)


# Before Keras is imported


def test_help_and_mistakes_do_not_wait_for_keras():
    script = """
import os
os.environ["_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION"] = "1"  # no shell runs this process
import trellis_keras_command
for words in sys.argv[1:]:
    sys.argv = ["trellis-keras", *words.split()]
    try:
        trellis_keras_command.main()
    except SystemExit as end:
        print("status", end.code or 0, flush=True)
assert not {"trellis_keras", "keras", "numpy"} & set(sys.modules)
"""
    answers = {
        "--help": "Continue texts with the best model of a run",
        "--version": f"trellis-keras {__version__}",
        "score --help": "--start TOKEN",
        "train --help": "train [OPTIONS] [MODEL [--depth 8 ...]]\n",
        "compare --help": "compare [OPTIONS] RUN ...\n",
        "--show-completion bash": "complete -o default -F _trellis_keras_completion",
        "trian tcn_jsb": "No such command 'trian'",
        "export --folder x": "No such option: --folder",
        "train tcn_jsb --epochs 3": "Missing option '--output'",
        "train --output no": "no holds no run: recipe.json is missing. Pass a model",
        "evaluate no": "no holds no run",
        "compare no": "no holds no run",
        "generate no": "no holds no run",
        "export no model": "no holds no run",
        "score no no.txt --output scores.csv": "no holds no run",
    }
    done = run_script(script, *answers, check=False)
    assert done.returncode == 0, done.stderr
    for said in answers.values():
        assert said in done.stdout + done.stderr
    assert "<str>" not in done.stdout
    assert done.stdout.count("status") == len(answers)


# list, recipe


def test_list(command, refused):
    status, out, _ = command("list")
    assert status == 0
    header, *rows = out.splitlines()
    names = ["model", "data", "parameters", "metric", "published", "ours", "weights"]
    assert header.split() == names
    assert {row.split()[0] for row in rows} == set(zoo.list_models())
    # A row for each zoo run; columns do not slip.
    (row,) = (row for row in rows if row.startswith("tcn_adding T=200 "))
    results = json.loads((ROOT / "zoo/tcn_adding/T=200/results.json").read_text())
    means = [seed["test_sets"]["mean"] for seed in [results, *results["other_seeds"]]]
    mean = f"{sum(means) / len(means):.4g}"
    assert row[header.index("metric") :].split() == ["mse", "-", mean, "yes"]
    ends = {row.index("  perplexity") for row in rows if "  perplexity" in row}
    assert ends == {header.index("  metric")}
    trained = command("list", "--pretrained")[1].splitlines()[1:]
    published = list((ROOT / "zoo").rglob("weights.weights.h5"))
    assert len(trained) == len(published) and all(row.endswith("yes") for row in trained)
    assert "No model matches 'tcn_jbs'. Did you mean 'tcn_jsb'?" in refused("list", "tcn_jbs")
    message = refused("list", "lstm_lambada", "--pretrained")
    assert message.startswith("No model with pretrained weights matches 'lstm_lambada'.")


@pytest.mark.parametrize(
    ("words", "field", "value"),
    [
        (["--l2", "1e-3"], "l2", 0.001),
        (["--clip_norm", "none"], "clip_norm", None),
        (["--clip-norm=None"], "clip_norm", None),
        (["--jit-compile=true"], "jit_compile", True),
        (["--schedule-epochs", "[5, 6]"], "schedule_epochs", [5, 6]),
        (["--data-dir=/a=b"], "data_dir", "/a=b"),
        (["--data-dir", "2024"], "data_dir", os.path.abspath("2024")),
        (["--depth", "4", "--depth", "5"], "depth", 5),
    ],
)
def test_option_values(command, words, field, value):
    for arguments in (["trellisnet_char", *words], [*words, "trellisnet_char"]):
        status, out, err = command("recipe", *arguments)
        assert status == 0, err
        recipe = zoo.registry.recipe_from_dict(json.loads(out))
        assert (recipe.options() | {"data_dir": recipe.data_dir}).get(field) == value


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["trellisnet_char", "trellisnet_ptb"], "Pass the name of a model."),
        (["trellisnet_char", "--deep", "8"], "no option 'deep'. Did you mean 'depth'"),
        (["trellisnet_char", "--depth"], "--depth needs a value"),
        (["trellisnet_char", "-d", "8"], "Expected an option such as --epochs 3. Received: '-d'"),
        (["trellisnet_char", "--epochs", "-8"], "--epochs must be a positive integer. Received: "),
        (["trellisnet_char", "--depth", "true"], "--depth must be an integer. Received"),
        (["trellisnet_char", "--clip-norm", "0"], "--clip-norm must be a number > 0"),
        (["trellisnet_char", "--schedule-factor", "2"], "--schedule-factor must be between"),
    ],
)
def test_wrong_settings(refused, words, message):
    assert message in refused("recipe", *words)


# train


def test_train_and_go_on(command, tmp_path):
    text = write_text(tmp_path / "text.txt")
    folder = tmp_path / "runs" / "first"
    words = ["trellisnet_char", *SMALL, "--text", text]
    status, out, err = command("train", *words, "--output", folder)
    assert status == 0, err
    assert "trellisnet_char: 835 parameters (depth=2, hidden_units=4, " in out
    assert "val_bpc" in out and "\b" not in out and "\r" not in out  # no progress bar in a file
    assert "\nBest epoch: 1 of 1, val_bpc " in out
    assert f"{folder} has its model, best.keras, and checkpoints, " in out
    commands = [f"trellis-keras {c} {folder}" for c in ("evaluate", "generate", "export")]
    assert all(command in out for command in commands)
    status, out, err = command("train", "--output", folder, "--epochs", "2", *UNOBSERVED)
    assert status == 0, err
    assert "Resuming after epoch 1" in out
    assert zoo.read_recipe(folder).training.epochs == 2
    assert zoo.read_recipe(folder).arguments["depth"] == 2
    assert "pass a larger `epochs` (--epochs)." in command("train", "--output", folder)[1]


def test_settings_of_a_zoo_run(command, refused, chosen, tmp_path):
    words = ["tcn_adding", "--repeat", "T=200", "--epochs", "1"]
    command("train", *words, "--output", tmp_path / "run")
    (recipe,) = chosen
    published = json.loads((ROOT / "zoo/tcn_adding/T=200/results.json").read_text())["recipe"]
    assert published["training"]["epochs"] == 10
    seed = published["arguments"]["seed"]
    assert (recipe.data_options["T"], recipe.seed, recipe.training.epochs) == (200, seed, 1)
    wrong = ["--repeat", "--output", tmp_path / "other"]
    assert "no zoo run of tcn_adding (T=1)" in refused("train", "tcn_adding", "T=1", *wrong)
    assert "Expected MODEL [VARIANT] with --repeat" in refused("train", *wrong)
    message = refused("train", "tcn_adding", "T=200", "--output", tmp_path / "other")
    assert "Expected one model at most. Received: tcn_adding, T=200" in message


@pytest.mark.parametrize("has_run", [True, False])
def test_an_interrupted_run_says_how_to_go_on(command, tmp_path, monkeypatch, has_run):
    def interrupt(*arguments, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr(zoo, "train", interrupt)
    monkeypatch.setattr(runs, "saved_state", lambda folder: {} if has_run else None)
    status, _, err = command("train", "trellisnet_char", "--output", tmp_path / "my run")
    assert status not in (0, 2)
    resume = f"To resume: trellis-keras train --output '{tmp_path / 'my run'}'\n"
    assert (resume in err) == has_run
    assert ("Nothing was saved yet." in err) != has_run


@pytest.mark.usefixtures("no_data")
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--epochs", "0"], "--epochs must be a positive integer"),
        (["--data-options", "2"], "--data-options must be"),
        (["--text", "a.txt", "--data", "pydoc"], "no --data"),
        (["--text", "a.txt", "--vocabulary-size", "9"], "Leave out --vocabulary-size"),
        (["--text", "a.txt", "--data-options", '{"path": "b.txt"}'], "is given twice"),
    ],
)
def test_wrong_options_are_refused_before_data_are_loaded(
    refused, tmp_path, monkeypatch, words, message
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.txt").touch()
    output = tmp_path / "run"
    assert message in refused("train", "trellisnet_char", *words, "--output", output)
    assert not output.exists()


@pytest.mark.parametrize(
    ("flags", "precision", "policy"),
    [
        ("fpu amx_bf16 sse", "auto", "mixed_bfloat16"),
        ("fpu sse", "auto", "float32"),
        ("fpu sse", "bfloat16", "mixed_bfloat16"),
    ],
)
def test_the_precision_of_a_run(command, chosen, tmp_path, monkeypatch, flags, precision, policy):
    monkeypatch.setattr(environment, "cpu_info", lambda field: flags)
    command("train", "tcn_jsb", "--precision", precision, "--output", tmp_path / "run")
    assert [recipe.dtype_policy for recipe in chosen] == [policy]


def test_a_text_that_is_too_short_starts_no_run(refused, tmp_path):
    path, output = tmp_path / "text.txt", tmp_path / "run"
    path.write_text("too short for rows of thirty-two" * 2)
    message = refused("train", "trellisnet_char", "--text", path, "--output", output)
    assert "--batch-size must be at most" in message
    assert not (output / "recipe.json").exists()


# evaluate, generate, export


def test_evaluate(command, finished_run):
    status, out, err = command(
        "evaluate", finished_run, "--split=valid", "--target-counting", "original"
    )
    assert status == 0, err
    asked = {"split": "valid", "target_counting": "original"}
    expected = evaluation.evaluate(zoo.read_recipe(finished_run), finished_run, **asked)
    assert json.loads(out) == {"run": str(finished_run), **asked, **expected}


def test_evaluation_at_test_time(command, finished_run, monkeypatch):
    def stub(recipe, model, loaded, split, show):
        show(f"tried on {len(loaded.valid)}")
        return {"bpc": 1.0, "split": split}

    monkeypatch.setattr(evaluation, "evaluate_cache", stub)
    monkeypatch.setattr(evaluation, "evaluate_dynamic", stub)
    status, out, err = command("evaluate", finished_run, "--cache", "--dynamic", "--split", "valid")
    assert status == 0 and err.count("tried on") == 2
    found = json.loads(out)
    assert found["cache"] == found["dynamic"] == {"bpc": 1.0, "split": "valid"}


def test_a_comparison_that_fails_draws_nothing(refused, finished_run, tmp_path):
    run = shutil.copytree(finished_run, tmp_path / "run")
    (run / "best.keras").unlink()
    assert "has no best.keras" in refused("compare", run, "--output", tmp_path / "runs.png")
    assert not (tmp_path / "runs.png").exists()


def test_wrong_evaluations(refused, finished_run):
    text = refused("evaluate", finished_run, "--cache", "--target-counting", "original")
    assert "--target-counting" in text
    for option, value in (("--split", "dev"), ("--target-counting", "paper")):
        assert f"{option} must be one of " in refused("evaluate", finished_run, option, value)


def test_generate(command, refused, finished_run):
    status, out, err = command("generate", finished_run, "--prompt", "ab", "--length", 20)
    assert status == 0, err
    assert out.startswith("ab") and len(out.removesuffix("\n")) == 22
    assert "symbols unknown to the vocabulary" in refused("generate", finished_run, "--prompt", "z")
    status, out, _ = command("generate", finished_run, "--length", 2)
    assert status == 0 and len(out) == 1 + 2 + 1  # its first token, which any vocabulary has


def test_generation_starts_with_half_a_character(generate, monkeypatch):
    backbone = TrellisLayer(units=3, depth=2, output_units=2)
    vocabulary = Vocabulary.from_text("\u3042\u3044" * 9, "byte")
    model = LanguageModel(len(vocabulary), 2, backbone, vocabulary=vocabulary)
    model.build((None, None))
    monkeypatch.setattr(runs, "load_best", lambda *_: model)
    status, out, err = generate("--length", 2)
    assert (status, err) == (0, "") and "\ufffd" in out


def test_a_model_of_sequences(command, refused, tmp_path):
    folder = tmp_path / "run"
    sizes = json.dumps({"train": 8, "valid": 4, "test": 6})
    status, out, err = command(
        "train", "tcn_adding", "--T", "8", "--depth", "1", "--filters", "2", "--epochs", "1",
        "--data-options", sizes, "--jit-compile", "false", *UNOBSERVED, "--output", folder,
    )  # fmt: skip
    assert status == 0, err
    assert "(kernel_size=8, depth=1, filters=2, dropout_kind=element" in out
    assert "adding: train 8, valid 4, test 6 sequences" in out
    results = json.loads(command("evaluate", folder)[1])
    assert results["sequences"] == 6 and results["mse"] == results["loss"]
    assert "must hold a LanguageModel" in refused("generate", folder)
    assert "is for text" in refused("evaluate", folder, "--target-counting", "original")
    assert "are for language models" in refused("evaluate", folder, "--cache")


def test_export(command, refused, finished_run, tmp_path):
    pytest.importorskip("tensorflow")
    finished_run = shutil.copytree(finished_run, tmp_path / "run")
    path = finished_run / "serving"
    status, out, err = command("export", finished_run, path)
    assert status == 0, err
    assert out == f"Written: {path / '1'}\n"
    assert (path / "1" / "saved_model.pb").is_file()
    assert "already exists" in refused("export", finished_run, path, "--version", "1")
    assert "looks like one version" in refused("export", finished_run, path / "1")
    assert "--format must be" in refused("export", finished_run, tmp_path / "a", "--format", "pb")
    int8 = "--quantization", "int8"
    assert "--quantization must be None" in refused("export", finished_run, path, *int8)
    assert [found.name for found in path.iterdir()] == ["1"]
    assert refused("export", finished_run, tmp_path / "a.b", "--format", "c").startswith("`path`")
    assert "is a file of the run" in refused("export", finished_run, finished_run / "checkpoints")


def test_export_takes_the_ranges_of_integers_from_the_training_data(
    command, refused, finished_run, tmp_path
):
    run = shutil.copytree(finished_run, tmp_path / "shared")
    (run / "paths.json").unlink()
    data = ["--data-dir", finished_run.parent]
    words = ["export", run, tmp_path / "model.c", "--quantization", "int8_rings", *data]
    assert "--quantization-tolerance" in refused(*words, "--quantization-tolerance", "1e-9")
    status, _, err = command(*words, "--quantization-tolerance", "0.5")
    assert status == 0, err
    assert "int8 rings" in (tmp_path / "model.h").read_text()


@pytest.mark.usefixtures("no_data")
def test_quantization_is_checked_before_data_are_read(refused, finished_run, tmp_path):
    words = ["export", finished_run, tmp_path / "model.c", "--quantization", "int4"]
    assert "--quantization must be one of" in refused(*words)


def test_score(command, refused, finished_run, tmp_path):
    path, table = tmp_path / "text.txt", tmp_path / "scores.csv"
    path.write_text("ab de\n\nabc\n")
    status, out, err = command("score", finished_run, path, "--output", table)
    assert status == 0, err
    totals = json.loads(out)
    expected = {"run": str(finished_run), "file": str(path), "output": str(table)}
    assert (expected | {"lines": 3, "num_tokens": 6}).items() <= totals.items()
    rows = [line.split(",") for line in table.read_text().splitlines()]
    assert rows[0] == ["line", "log_probability", "num_tokens", "bpc"]
    assert [row[2] for row in rows[1:]] == ["4", "0", "2"]
    assert "already exists" in refused("score", finished_run, path, "--output", table)


def test_no_command_replaces_its_input_or_a_file_of_a_run(refused, finished_run, tmp_path):
    own, model = tmp_path / "own.csv", finished_run / "best.keras"
    own.write_text("load\n1\n")
    (tmp_path / "link.onnx").symlink_to(model)
    before = own.read_bytes(), model.read_bytes()
    words = ["score", finished_run, own, "--output", own]
    assert "own.csv is an input file" in refused(*words, "--overwrite")
    words = ["compare", finished_run, "--output", model]
    assert "best.keras is a file of the run" in refused(*words, "--overwrite")
    words = ["export", finished_run, tmp_path / "link.onnx", "--format", "onnx"]
    assert "link.onnx is a file of the run" in refused(*words, "--overwrite")
    assert (own.read_bytes(), model.read_bytes()) == before


def test_a_run_does_not_replace_its_data(refused, tmp_path):
    path = write_text(tmp_path / "history.csv")
    before = path.read_text()
    words = ["train", "trellisnet_char", *SMALL, "--text", path, "--output", tmp_path]
    assert "would replace its data" in refused(*words)
    assert path.read_text() == before


def test_an_error_is_one_line_without_control_characters(refused, tmp_path):
    words = ["--text", tmp_path / "own\n\x1b[31m\x07\u202e.txt", "--output", tmp_path / "run"]
    assert r"own\n\x1b[31m\x07\u202e.txt" in refused("train", "trellisnet_char", *words)


def test_a_table_has_no_control_characters_of_a_file(command, finished_run, tmp_path):
    folder = shutil.copytree(finished_run, tmp_path / "run")
    history = folder / "history.csv"
    header, *rows = history.read_text().splitlines()
    rows = [f'{header},"val_\x1b]0;title\x07\u202e\u2028"', *(f"{row},1" for row in rows)]
    history.write_text("\n".join(rows) + "\n")
    status, out, err = command("compare", folder)
    assert (status, err) == (0, "")
    header, row = out.splitlines()
    assert r"val_\x1b]0;title\x07\u202e\u2028" in header and len(header) == len(row)


def test_a_traceback_has_no_control_characters(command, finished_run, monkeypatch):
    def fail(*arguments, **options):
        raise RuntimeError("the layer \x1b]0;title\x07 is at fault")

    monkeypatch.setattr(evaluation, "evaluate", fail)
    status, _, err = command("evaluate", finished_run)
    assert status == 1 and r"RuntimeError: the layer \x1b]0;title\x07 is at fault" in err


def test_a_time_limit(command, tmp_path):
    text, folder = write_text(tmp_path / "text.txt"), tmp_path / "run"
    words = [*SMALL, "--epochs", "2", "--text", text, "--max-minutes", "1e-9"]
    _, out, _ = command("train", "trellisnet_char", *words, "--output", folder)
    assert checkpoint_progress(folder / "checkpoints") == (0, 1)
    assert f"in epoch 1 of 2. To resume: trellis-keras train --output {folder}" in out


# generate: what a terminal shows, and when


class Speaker:
    """Stands for a run's model: notes what it is asked for, and says what it is told to."""

    vocabulary = Vocabulary.from_text("ab .", unit="character")
    vocabulary_size = 4

    def __init__(self):
        self.asked = []
        self.pieces = ["a", "b", "."]

    def generate_stream(self, prompt, max_length, sampler, **options):
        self.asked.append({"prompt": prompt, "max_length": max_length, **options})
        self.sampler = sampler
        return iter(self.pieces)


@pytest.fixture
def speaker(monkeypatch):
    speaker = Speaker()
    monkeypatch.setattr("trellis_keras.zoo.run.load_best", lambda run, kind: speaker)
    return speaker


@pytest.fixture
def generate(command, tmp_path):
    """`generate("--seed", 1)`: exit status, standard output and errors."""
    (tmp_path / "recipe.json").touch()
    return functools.partial(command, "generate", tmp_path)


def test_what_the_model_is_asked_for(generate, speaker):
    status, out, err = generate(
        "--prompt", "a", "--prompt", "bab", "--length", 5,
        "--stop-tokens", ".", "--stop-tokens", "a", "--seed", 3,
    )  # fmt: skip
    assert (status, out, err) == (0, "ab.\n\nab.\n", "")
    options = {"seed": 3, "stop_tokens": [".", "a"]}
    assert speaker.asked == [
        {"prompt": "a", "max_length": 6, **options},
        {"prompt": "bab", "max_length": 8, **options},
    ]


def test_a_terminal_executes_nothing(generate, speaker):
    """A foreign vocabulary may have control characters."""
    speaker.pieces = ["a\tb\n", "\x1b]0;title\x07", "\x9b2J\x7f\r", "\u202e\u00e9"]
    out = generate("--prompt", "a")[1]
    assert out == "a\tb\n\\x1b]0;title\\x07\\x9b2J\\x7f\\r\\u202e\u00e9\n"


def test_an_interruption_ends_the_line_and_nothing_else_is_said(generate, speaker):
    def pieces():
        yield "ab"
        raise KeyboardInterrupt

    speaker.pieces = pieces()
    assert generate("--prompt", "a") == (130, "ab\n", "")


@pytest.mark.parametrize(
    ("options", "kind", "settings"),
    [
        ([], "TopPSampler", {"p": 0.9, "temperature": 0.8}),
        (["--top-p", 0.5, "--temperature", 0], "TopPSampler", {"p": 0.5, "temperature": 0.0}),
        (["--sampler", "top_k", "--top-k", 3], "TopKSampler", {"k": 3, "temperature": 0.8}),
        (["--sampler", "random"], "RandomSampler", {"temperature": 0.8}),
        (["--sampler", "greedy"], "GreedySampler", {}),
        (["--sampler", "beam", "--beams", 2], "BeamSampler", {"num_beams": 2}),
        (["--sampler", "contrastive"], "ContrastiveSampler", {"k": 4}),
    ],
)
def test_samplers(generate, speaker, options, kind, settings):
    status, _, err = generate("--prompt", "a", *options)
    assert status == 0, err
    assert type(speaker.sampler).__name__ == kind
    config = speaker.sampler.get_config()
    assert {name: config[name] for name in settings} == settings
    whole = kind in ("BeamSampler", "ContrastiveSampler")
    assert ("appear at the end" in err) == whole
