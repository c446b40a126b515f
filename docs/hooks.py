"""What MkDocs reads, beside mkdocs.yml: the repository's pages, where GitHub shows them.

- README.md, docs/*.md and all that they link to, with links as they are on GitHub;
- a list of the measurements in benchmarks/results;
- the examples of examples/README.md as tutorials;
- the reference: everything that the packages' modules export.
"""

import ast
import itertools
import pathlib
import posixpath
import re
from collections.abc import Iterator

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = pathlib.Path(__file__).resolve().parent.parent
BENCHMARKS = "benchmarks/results"
TUTORIALS = ("quickstart", "forecasting", "sensor_classification", "streaming_forecast")

REFERENCE = {
    "layers": ("Layers", ["trellis_keras.layers", "trellis_keras.layers.stateful:StatefulLayer"]),
    "streams": ("Streams", ["keras_streams"]),
    "models": (
        "Models",
        [
            "trellis_keras.models",
            "trellis_keras.models.base:BackboneModel",
            "trellis_keras.models.generation:TextGenerator",
            "trellis_keras.models.sequence_model:SequenceModel",
        ],
    ),
    "data": ("Data", ["trellis_keras.data"]),
    "training": ("Training", ["trellis_keras.training"]),
    "series": ("Time series", ["trellis_series"]),
    "zoo": (
        "Zoo",
        [
            *(
                "trellis_keras.zoo",
                "trellis_keras.zoo.trellisnet",
                "trellis_keras.zoo.tcn",
                "trellis_keras.zoo.recurrent_baselines",
                "trellis_keras.zoo.lru",
            ),
            "trellis_keras.zoo.train_run:train",
            "trellis_keras.zoo.evaluation:evaluate,evaluate_dynamic,evaluate_cache",
            "trellis_keras.zoo.run:load_best",
            "trellis_keras.zoo.datasets",
        ],
    ),
    "tools": (
        "Tools",
        [
            "trellis_keras.export:export",
            "trellis_keras.scoring:score",
            "trellis_keras.interop",
            "trellis_keras.theorem1",
            "trellis_keras.torch_weights:load_torch_state_dict",
            "trellis_keras.kernels:enabled,disabled",
        ],
    ),
}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Replaces the files of docs/ by those that the site consists of, named from the root."""
    found = {}

    def add(file):
        file.dest_uri = file.dest_uri.removeprefix("docs/")
        found[file.src_uri] = file

    for name in TUTORIALS:
        add(File.generated(config, f"examples/{name}.md", content=tutorial(name)))
    for name, (title, modules) in REFERENCE.items():
        add(File.generated(config, f"docs/reference/{name}.md", content=reference(title, modules)))
    add(File.generated(config, "docs/reference/index.md", content=index()))
    add(File.generated(config, f"{BENCHMARKS}/README.md", content=benchmarks()))
    queue = [
        "README.md",
        *_names(f"{BENCHMARKS}/*.md"),
        *_names("docs/*.md"),
        *_names("docs/*.css"),
        "CHANGELOG.md",
    ]
    while queue:
        name = queue.pop()
        if name not in found:
            add(File(name, str(ROOT), config.site_dir, config.use_directory_urls))
            if name.endswith(".md"):
                queue += linked(name)
    themes = [file for file in files if file.src_dir != config.docs_dir]
    return Files([*themes, *found.values()])


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Leads from the list of examples to the tutorials, and from folders to their README."""
    if page.file.src_uri == "zoo/README.md":
        page.meta["hide"] = ["toc"]  # a wide table
    if page.file.src_uri == "examples/README.md":
        for name in TUTORIALS:
            markdown = markdown.replace(f"({name}.py)", f"({name}.md)")

    def to_page(link):
        text, target = link.groups()
        folder = _resolve(page.file.src_uri, target)
        if f"{folder}/README.md" in files.src_uris:
            return f"[{text}]({target}/README.md)"
        return text if (ROOT / folder).is_dir() else link[0]  # other folders are not pages

    return _LINK.sub(to_page, markdown)


def linked(page: str) -> list[str]:
    """Returns the files of the repository that a page links to."""
    text = re.sub(r"```.*?```", "", (ROOT / page).read_text(encoding="utf-8"), flags=re.DOTALL)
    names = [_resolve(page, target) for _, target in _LINK.findall(text)]
    names += [f"{name}/README.md" for name in names]  # of a folder
    return [name for name in names if (ROOT / name).is_file()]


_LINK = re.compile(r"\[([^][]*)\]\(([^)#\s]+)\)")


def _resolve(page, link):
    return posixpath.normpath(posixpath.join(posixpath.dirname(page), link))


def _names(pattern):
    return sorted(path.relative_to(ROOT).as_posix() for path in ROOT.glob(pattern))


def cells(source: str) -> Iterator[tuple[str, str]]:
    """Yields a script's docstring and paragraphs as ("markdown" or "code", text)."""
    title, text = ast.get_docstring(ast.parse(source)).split("\n", 1)
    yield "markdown", f"# {title}\n{text}"
    for paragraph in re.split(r"\n\n+", source.split('"""', 2)[2].strip()):
        lines = paragraph.split("\n")
        comment = [line[2:] for line in lines if line.startswith("# ")]
        if lines[: len(comment)] == [f"# {line}" for line in comment] and comment:
            yield "markdown", " ".join(comment)
            lines = lines[len(comment) :]
        if lines:
            yield "code", "\n".join(lines)


def tutorial(name: str) -> str:
    """Returns an example as a page: its docstring, its picture, and its code between comments."""
    source = (ROOT / "examples" / f"{name}.py").read_text(encoding="utf-8")
    (_, intro), *rest = cells(source)
    title, text = intro.split("\n", 1)
    parts = [title.removesuffix("."), text]
    if (ROOT / "examples" / "pictures" / f"{name}.png").is_file():
        parts.append(f"![The picture that the example draws](pictures/{name}.png)")
    for kind, paragraphs in itertools.groupby(rest, key=lambda cell: cell[0]):
        body = "\n\n".join(text for _, text in paragraphs)
        parts.append(f"```python\n{body}\n```" if kind == "code" else body)
    parts.append(f"The whole script: [`examples/{name}.py`]({name}.py)")
    return "\n\n".join(parts) + "\n"


def benchmarks() -> str:
    """Returns the list of measurements."""
    lines = ["# Benchmarks\n", "`python -m benchmarks run` repeats them.\n"]
    for name in _names(f"{BENCHMARKS}/*.md"):
        title = (ROOT / name).read_text(encoding="utf-8").split("\n", 1)[0].lstrip("# ")
        case, _, what = title.partition(": ")
        lines.append(f"- [{case}]({posixpath.basename(name)}): {what}")
    return "\n".join(lines) + "\n"


def index() -> str:
    """Returns the list of the reference's pages, with the names on each."""
    lines = ["# Reference", "", "| page | names |", "|---|---|"]
    for page, (title, modules) in REFERENCE.items():
        names = []
        for module in modules:
            module, _, named = module.partition(":")
            names += named.split(",") if named else sum(exported(module), [])
        lines.append(f"| [{title}]({page}.md) | {', '.join(f'`{name}`' for name in names)} |")
    return "\n".join(lines) + "\n"


def reference(title: str, modules: list[str]) -> str:
    """Returns a page with the docstrings of modules' names; `"module:a,b"` names them itself."""
    lines = [f"# {title}", ""]
    for module in modules:
        module, _, named = module.partition(":")
        names, made = (named.split(","), []) if named else exported(module)
        lines += [f"::: {module}.{name}\n" for name in names]
        if made:
            lines.append(f"Also, see `help(zoo.{made[0]})`: `{'`, `'.join(made)}`.\n")
    return "\n".join(lines)


def exported(module: str) -> tuple[list[str], list[str]]:
    """Returns the names of a module's `__all__`: those with a docstring, and assigned results.

    Names of other modules that it adds are left out.
    """
    name = module.replace(".", "/")
    found = (folder / name for folder in (ROOT, *ROOT.glob("packages/*")))
    path = next(path for path in found if path.is_dir() or path.with_suffix(".py").is_file())
    path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    body = ast.parse(path.read_text(encoding="utf-8")).body
    assigned = {
        name.id: node.value
        for node in body
        if isinstance(node, ast.Assign)
        for name in ast.walk(node.targets[0])
        if isinstance(name, ast.Name)
    }
    items = assigned["__all__"].elts
    names = [item.value for item in items if isinstance(item, ast.Constant)]
    made = [name for name in names if name in assigned]
    return [name for name in names if name not in made], made
