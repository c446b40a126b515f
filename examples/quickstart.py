"""Train a small TrellisNet on Python's help pages, then evaluate, sample and export it.

    python examples/quickstart.py [folder]

The script prints bits per character on held-out text after every epoch, then evaluates the test
split, generates a sample and writes a SavedModel. Run it again with the same folder to resume
interrupted training.
"""

import pathlib
import sys

from trellis_keras import zoo  # hides what TensorFlow logs while it is imported

# isort: split
import keras
from keras_nlp.samplers import TopPSampler

from trellis_keras.export import export
from trellis_keras.zoo.evaluation import evaluate
from trellis_keras.zoo.run import load_best


def main(folder="runs/quickstart"):
    if keras.backend.backend() != "tensorflow":
        sys.exit("The export needs TensorFlow: set KERAS_BACKEND=tensorflow.")
    folder = pathlib.Path(folder)
    recipe = zoo.recipe("trellisnet_char")
    zoo.train(recipe, folder)

    results = evaluate(zoo.read_recipe(folder), folder, split="test")
    print(f"\nTest text: {results['bpc']:.3f} bits per character")

    model = load_best(folder)
    prompt = "The value of "
    sampler = TopPSampler(p=0.9, temperature=0.6)
    text = model.generate(prompt, max_length=len(prompt) + 300, sampler=sampler, seed=4)
    print(f"\nA sample:\n{text}")

    print(f"\nSavedModel: {export(model, folder / 'serving')} (see docs/serving.md)")
    print("Next, on a text of your own:")
    print("    trellis-keras train trellisnet_char --text FILE --output runs/own")


if __name__ == "__main__":
    main(*sys.argv[1:])
