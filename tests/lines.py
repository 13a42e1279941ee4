"""Prints the budgets of the source and what is measured; exits 1 when one is broken (`make lines`).

With `--predict` a small prediction runs, and the project's own modules that its processes import are counted.
"""

from __future__ import annotations

import argparse
import ast
import itertools
import os
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("flows", "tasks", "virnuc_core", "deployments")
LAYERS = (  # a module imports from its own layer and from those before it
    ("config", "errors", "lease", "rundir", "runfiles", "profiles"),
    ("reads", "encoders", "telemetry"),
    ("engine",),
    ("baseline", "measure", "pipeline", "results", "validation"),
    ("report",),
)
LEVEL = {f"virnuc_core.{part}": level for level, parts in enumerate(LAYERS) for part in parts}
LEVEL |= {"virnuc_core": 0, "tasks": 5, "flows": 6, "deployments": 7}
# An import finder that finds nothing: it writes down which modules of the project are asked for, in every process.
WATCH = f"""
import os, sys
class Watch:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {FOLDERS}:
            with open(os.environ["VIRNUC_MODULES_LOG"], "a") as log:
                log.write(name + "\\n")
sys.meta_path.insert(0, Watch())
"""


def level(module: str) -> int:
    """Layer of a module; one of the core that no layer names stands where the pipeline stands."""
    parts = module.split(".")
    return LEVEL.get(".".join(parts[:2]), LEVEL[parts[0]] or LEVEL["virnuc_core.pipeline"])


def imports(tree: ast.Module, modules: dict[str, int]) -> Iterator[tuple[int, str]]:
    """Line and name of every import of one of `modules` or of prefect, those inside functions too."""
    for node in ast.walk(tree):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom):
            full = [f"{node.module}.{alias.name}" for alias in node.names]
            names = [name if name in modules else str(node.module) for name in full]
        for name in dict.fromkeys(names):
            if name in modules or name.split(".")[0] == "prefect":
                yield node.lineno, name


def circles(graph: dict[str, set[str]]) -> list[str]:
    """Groups of modules that import each other, directly or by way of others."""
    reach = {name: set(found) for name, found in graph.items()}
    for middle, start in itertools.product(graph, graph):  # Warshall: paths that may pass through `middle`
        if middle in reach[start]:
            reach[start] |= reach[middle]
    return sorted({" ↔ ".join(sorted(b for b in reach[a] if a in reach[b])) for a in graph if a in reach[a]})


def large_functions(tree: ast.Module, where: str) -> Iterator[str]:
    """A line for each function that is too long or takes too much; Triton kernels are left out."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and not any(
            "jit" in ast.unparse(one) for one in node.decorator_list
        ):
            given = [one.arg for one in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
            taken, lines = len({*given} - {"self", "cls"}), (node.end_lineno or node.lineno) - node.lineno + 1
            if lines > 60 or taken > 8:
                yield f"{where}:{node.lineno}: {node.name} has {lines} lines and {taken} parameters"


def modules_of_predict() -> set[str]:
    """Names of the own modules that a finished `virnuc predict` imports, over all of its processes."""
    with tempfile.TemporaryDirectory() as name:
        reads, models, log = f"{name}/r.fastq.gz", f"{name}/models", Path(name) / "modules"
        Path(name, "sitecustomize.py").write_text(WATCH)
        watched = {**os.environ, "PYTHONPATH": name, "VIRNUC_MODULES_LOG": str(log), "PREFECT_HOME": f"{name}/prefect"}
        predict = ["predict", reads, "-o", f"{name}/out", "--models", models, "--devices", "cpu:1"]
        for words in (["simulate", reads, "--reads", "300"], ["models", "init-random", models], predict):
            log.unlink(missing_ok=True)
            subprocess.run([sys.executable, "-m", "flows.cli", *words], check=True, capture_output=True, env=watched)
        return set(log.read_text().split())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--predict", action="store_true", help="run a prediction and count what it imports")
    given = parser.parse_args()
    paths = [path.relative_to(ROOT) for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]
    named = {".".join(path.with_suffix("").parts).removesuffix(".__init__"): path for path in paths}
    lines = {name: len((ROOT / path).read_text().splitlines()) for name, path in named.items()}
    graph: dict[str, set[str]] = {name: set() for name in named}
    broken: dict[str, list[str]] = defaultdict(list)
    for name, path in named.items():
        tree = ast.parse((ROOT / path).read_text())
        if lines[name] > 400 or (lines[name] < 40 and path.name != "__init__.py"):
            broken["modules under 40 or over 400 lines"].append(f"{path}: {lines[name]}")
        broken["functions over 60 lines or 8 parameters"].extend(large_functions(tree, str(path)))
        for line, other in imports(tree, lines):
            if other in graph:
                graph[name].add(other)
                broken["imports that climb"].extend([f"{path}:{line}: {other}"] * (level(other) > level(name)))
            else:
                broken["virnuc_core imports prefect"].extend([f"{path}:{line}"] * name.startswith("virnuc_core"))
    broken["import circles"] = circles(graph)
    core = sum(count for name, count in lines.items() if name.startswith("virnuc_core"))
    rows = [
        ("lines", sum(lines.values()), 20_000),
        ("modules", len(lines), 95),
        ("lines of virnuc_core", core, 16_500),
    ]
    if given.predict:
        used = modules_of_predict() & set(lines)
        broken["lines of predict"] = sorted(f"{lines[name]:4} {name}" for name in used)
        rows += [("modules of predict", len(used), 47), ("lines of predict", sum(lines[name] for name in used), 9_800)]
    rows += [(kind, len(found), 0) for kind, found in sorted(broken.items()) if kind != "lines of predict"]
    for kind, count, most in rows:
        print(f"{'ok    ' if count <= most else 'BROKEN'}  {kind:40} {count:7,}   at most {most:,}")
        print("".join(f"          {one}\n" for one in broken[kind] if count > most), end="")
    return int(any(count > most for _, count, most in rows))


if __name__ == "__main__":
    sys.exit(main())
