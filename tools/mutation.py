"""Mutation testing: changes the code in one place at a time, and counts the changes tests detect.

    python -m tools.mutation --mutants 200 --output runs/mutation.csv

A mutant is one small change to one module: another operator, comparison, constant or boolean, a
negated condition, or a removed argument or statement. Each runs its module's tests until one fails
(killed) or all pass (survived). Docstrings, error messages and annotations are not mutated. Mutants
are sampled from a seed, uniformly over the modules' mutable places; an interrupted run resumes from
the CSV file.
"""

import argparse
import ast
import copy
import csv
import os
import pathlib
import random
import signal
import sys
import time

ROOT = pathlib.Path(__file__).parent.parent

# {module: its tests}
TARGETS = {
    "trellis_keras/kernels/blockwise.py": ["tests/kernels/test_blockwise.py"],
    "trellis_keras/kernels/clusters.py": ["tests/kernels/test_clusters.py"],
    "trellis_keras/kernels/cone.py": ["tests/kernels/test_cone.py"],
    "trellis_keras/kernels/convolution.py": ["tests/kernels/test_convolution.py"],
    "trellis_keras/kernels/depth_loop.py": ["tests/kernels/test_depth_loop.py"],
    "trellis_keras/kernels/depth_loop_tf.py": ["tests/kernels/test_depth_loop.py"],
    "trellis_keras/kernels/level_buffers.py": ["tests/kernels/test_level_buffers.py"],
    "trellis_keras/kernels/mixed_group.py": ["tests/kernels/test_mixed_group.py"],
    "trellis_keras/kernels/lattice_loop.py": ["tests/kernels/test_lattice_loop.py"],
    "trellis_keras/kernels/scan.py": ["tests/kernels/test_scan.py"],
    "trellis_keras/kernels/scan_tf.py": ["tests/kernels/test_scan.py"],
    "trellis_keras/layers/trellisnet.py": ["tests/layers/test_trellisnet.py"],
    "trellis_keras/layers/tcn.py": ["tests/layers/test_tcn.py"],
    "trellis_keras/layers/lru.py": [
        "tests/layers/test_lru.py",
        "tests/layers/test_initial_weights.py",
    ],
    "trellis_keras/models/language_model.py": ["tests/models/test_language_model.py"],
    "trellis_keras/training/checkpoint.py": ["tests/training/test_checkpoint.py"],
}
PATIENCE = 900  # seconds after which a hanging mutant counts as killed

_SWAPS = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult, ast.Mod: ast.Mult, ast.Pow: ast.Mult,
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq, ast.NotEq: ast.Eq, ast.Is: ast.IsNot, ast.IsNot: ast.Is,
    ast.In: ast.NotIn, ast.NotIn: ast.In, ast.And: ast.Or, ast.Or: ast.And,
}  # fmt: skip


class _Sites(ast.NodeVisitor):
    """Collects (line, name of the change, function that applies it to a copy of the tree)."""

    def __init__(self):
        self.found = []
        self.path = []

    def add(self, node, name, change):
        path = tuple(self.path)

        def apply(tree):
            for field, index in path:
                tree = getattr(tree, field)
                tree = tree if index is None else tree[index]
            change(tree)

        self.found.append((node.lineno, f"{name} (column {node.col_offset})", apply))

    def descend(self, node, field, child, index=None):
        self.path.append((field, index))
        self.visit(child)
        self.path.pop()

    def generic_visit(self, node):
        for field, value in ast.iter_fields(node):
            if field in ("annotation", "returns", "decorator_list"):
                continue
            if isinstance(value, ast.AST):
                self.descend(node, field, value)
            elif isinstance(value, list):
                for index, child in enumerate(value):
                    if isinstance(child, ast.AST):
                        self.descend(node, field, child, index)

    def visit_Raise(self, node):
        """Skips error messages. (`visit_If` mutates the conditions of errors.)"""

    def visit_JoinedStr(self, node):
        """Nor are texts."""

    def visit_Expr(self, node):
        if isinstance(node.value, ast.Constant):
            return  # a docstring
        self.add(node, "statement removed", lambda n: setattr(n, "value", ast.Constant(None)))
        self.generic_visit(node)

    def visit_BinOp(self, node):
        swap = _SWAPS.get(type(node.op))
        if swap is not None and not isinstance(node.left, (ast.JoinedStr, ast.List)):
            name = f"{type(node.op).__name__} to {swap.__name__}"
            self.add(node, name, lambda n: setattr(n, "op", swap()))
        self.generic_visit(node)

    def visit_BoolOp(self, node):
        swap = _SWAPS[type(node.op)]
        name = f"{type(node.op).__name__} to {swap.__name__}"
        self.add(node, name, lambda n: setattr(n, "op", swap()))
        self.generic_visit(node)

    def visit_Compare(self, node):
        swap = _SWAPS[type(node.ops[0])]
        name = f"{type(node.ops[0]).__name__} to {swap.__name__}"
        self.add(node, name, lambda n: n.ops.__setitem__(0, swap()))
        self.generic_visit(node)

    def visit_UnaryOp(self, node):
        if isinstance(node.op, ast.USub):
            self.add(node, "sign dropped", lambda n: setattr(n, "op", ast.UAdd()))
        self.generic_visit(node)

    def visit_If(self, node):
        def negate(n):
            n.test = ast.UnaryOp(ast.Not(), n.test)

        self.add(node, "condition negated", negate)
        self.generic_visit(node)

    visit_IfExp = visit_If

    def visit_Call(self, node):
        for index in range(len(node.keywords)):
            if node.keywords[index].arg not in (None, "name", "strict"):
                name = f"argument {node.keywords[index].arg} dropped"
                self.add(node, name, lambda n, i=index: n.keywords.pop(i))
        self.generic_visit(node)

    def visit_keyword(self, node):
        if node.arg != "strict":  # an assertion of `zip`, which affects no result
            self.generic_visit(node)

    def visit_Constant(self, node):
        value = node.value
        if isinstance(value, bool):
            self.add(node, f"{value} to {not value}", lambda n: setattr(n, "value", not value))
        elif isinstance(value, (int, float)):
            self.add(node, f"{value} to {value + 1}", lambda n: setattr(n, "value", value + 1))


def mutants(path):
    """Returns [(line, change, mutated source)] of a module."""
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    sites = _Sites()
    sites.visit(tree)
    found = []
    for line, name, apply in sites.found:
        mutated = copy.deepcopy(tree)
        apply(mutated)
        found.append((line, name, ast.unparse(ast.fix_missing_locations(mutated))))
    return found


def draw(number, seed):
    """Returns a sample [(module, line, change, source)], uniform over all mutants."""
    everything = [(path, *mutant) for path in TARGETS for mutant in mutants(path)]
    return random.Random(seed).sample(everything, min(number, len(everything)))


def run(path, source, tests):
    """Returns whether the tests fail with `source` in `path`, which is then restored."""
    file = ROOT / path
    whole = file.read_bytes()
    file.write_text(source, encoding="utf-8")
    try:
        child = os.fork()
        if child == 0:
            _test(tests)
        return _wait(child) != 0
    finally:
        file.write_bytes(whole)


def _test(tests):
    """Runs tests and exits this process with their status."""
    os.setsid()
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.dup2(null, 2)
    import pytest

    sys.dont_write_bytecode = True
    # `conftest` has imported the unchanged package.
    for name in [n for n in sys.modules if n.split(".")[0] in ("trellis_keras", "tests")]:
        del sys.modules[name]
    options = ["-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "--no-header"]
    os._exit(int(pytest.main([*options, *tests])))


def _wait(child):
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.2)
    os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return -signal.SIGKILL


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--mutants", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=pathlib.Path, required=True, help="CSV file of results")
    parser.add_argument("--only", help="part of the modules' paths")
    arguments = parser.parse_args()
    os.chdir(ROOT)
    # Before forking, as this takes seconds. `conftest` sets options that Keras reads at import.
    import tests.conftest  # noqa: F401

    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    done = {}
    if arguments.output.exists():
        with open(arguments.output, newline="") as file:
            done = {(r["module"], r["line"], r["change"]): r for r in csv.DictReader(file)}
    chosen = [m for m in draw(arguments.mutants, arguments.seed) if (arguments.only or "") in m[0]]
    for path in sorted({path for path, *_ in chosen}):
        if not any(key[0] == path for key in done) and run(
            path, (ROOT / path).read_text(encoding="utf-8"), TARGETS[path]
        ):
            sys.exit(f"The tests of {path} fail without mutants: {' '.join(TARGETS[path])}")
    with open(arguments.output, "a", newline="") as file:
        writer = csv.writer(file)
        if not done:
            writer.writerow(["module", "line", "change", "killed", "seconds"])
        for path, line, change, source in chosen:
            if (path, str(line), change) in done:
                continue
            start = time.monotonic()
            killed = run(path, source, TARGETS[path])
            writer.writerow([path, line, change, int(killed), round(time.monotonic() - start, 1)])
            file.flush()
            print(f"{'killed  ' if killed else 'SURVIVED'} {path}:{line} {change}", flush=True)
    with open(arguments.output, newline="") as file:
        rows = list(csv.DictReader(file))
    killed = sum(int(row["killed"]) for row in rows)
    print(f"{killed} of {len(rows)} mutants killed ({killed / len(rows):.1%})")


if __name__ == "__main__":
    main()
