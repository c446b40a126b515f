import pathlib
import re
import sys

from setuptools import find_packages, setup

ROOT = pathlib.Path(__file__).resolve().parent
VERSION = re.search(r'__version__ = "(.+)"', (ROOT / "trellis_keras/__init__.py").read_text())[1]
# On CPUs jaxlib 0.10.2 computes wrong products of a matrix (3, 3) and 32,769 vectors, for instance
# (jax-ml/jax issue 39103), and may crash (40412). jax 0.10.2 works with jaxlib 0.10.1. From jaxlib
# 0.11.2 on, chains of bfloat16 products give NaN on CPUs (see docs/backends.md).
JAX = ["jax>=0.5.1", "jaxlib!=0.10.2,!=0.11.2,!=0.12.0,!=0.12.0.1"]
SERVING = ["tensorflow-serving-api>=2.18"]
# In a checkout, `pip install .` also installs the keras-streams of the checkout. What is published
# requires a version of it, because an index takes no paths.
STREAMS = ROOT / "packages" / "keras_streams"
in_checkout = STREAMS.is_dir() and "sdist" not in sys.argv
KERAS_STREAMS = f"keras-streams @ {STREAMS.as_uri()}" if in_checkout else "keras-streams>=0.1"
EDGE = ["ziglang>=0.12"]  # a C compiler for every target, WebAssembly included
TEST = ["pytest>=8", "pytest-xdist>=3.6", "hypothesis>=6.100", *JAX, *SERVING, *EDGE]

setup(
    name="trellis-keras",
    version=VERSION,
    description="TrellisNet, TCN and Lattice Recurrent Unit sequence models for Keras 3",
    long_description=(ROOT / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    author="The trellis_keras authors",
    keywords="keras sequence time-series forecasting tcn trellisnet lru streaming",
    project_urls={
        "Paper: TrellisNet": "https://arxiv.org/abs/1810.06682",
        "Paper: TCN": "https://arxiv.org/abs/1803.01271",
        "Paper: Lattice Recurrent Unit": "https://arxiv.org/abs/1710.02254",
    },
    license_expression="Apache-2.0",
    license_files=["LICENSE"],
    python_requires=">=3.11",
    packages=[
        *find_packages(include=["trellis_keras", "trellis_keras.*"]),
        "trellis_keras.zoo._assets",
    ],
    py_modules=["trellis_keras_command"],
    # Model cards, results and small weights live in zoo/ and travel inside the wheel.
    package_dir={"trellis_keras.zoo._assets": "zoo"},
    package_data={
        "trellis_keras": ["py.typed"],
        "trellis_keras.zoo": ["published.csv"],
        "trellis_keras.zoo._assets": ["*.md", "*.json", "*/*.*", "*/*/*.*"],
    },
    install_requires=[
        KERAS_STREAMS,
        "tensorflow>=2.18",
        "keras>=3.15",  # attention with a sliding window
        "tensorflow-datasets>=4.9.7",
        "importlib-resources",  # tensorflow-datasets needs it and does not say so
        "keras-nlp>=0.18",
        "tensorboard>=2.18",
        "numpy>=1.26",
        "scipy>=1.11",  # reads the .mat files of the music
        "pillow>=10",  # reads the PNG files of CIFAR-10
        "typer>=0.16",
        "matplotlib>=3.8",
        "filelock>=4.2",  # one process at a time stores a data set, and trains in a folder
        "h5py>=3.10",
        "tqdm>=4.66",
    ],
    extras_require={
        "test": TEST,
        "dev": [*TEST, "ruff>=0.6", "mypy>=1.13", "build>=1", "twine>=6"],
        "docs": ["mkdocs-material>=9.6", "mkdocstrings[python]>=0.30", "ruff>=0.6"],
        "gpu": ["tensorflow[and-cuda]>=2.18"],
        "jax": JAX,
        "hub": ["huggingface-hub>=0.24"],  # presets "hf://user/model"
        "serving": SERVING,
        "edge": EDGE,
        "batch": ["ray[data]>=2.51"],  # examples/batch
        "onnx": ["tf2onnx>=1.17", "onnx>=1.16", "onnxruntime>=1.18"],
    },
    entry_points={"console_scripts": ["trellis-keras = trellis_keras_command:main"]},
    classifiers=[
        "Development Status :: 4 - Beta",
        "Intended Audience :: Developers",
        "Intended Audience :: Science/Research",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3",
        "Programming Language :: Python :: 3 :: Only",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Programming Language :: Python :: 3.13",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Typing :: Typed",
    ],
)
