"""Print the size of the source and check its structure (`make lines`).

Sizes are information. Six rules of structure fail the command: imports run one way only, there are
no import cycles, the core never imports Prefect, no module with the steps of a flow does either,
`virnuc --help` imports nothing heavy, and no test imports from another test's module.
With `--predict` a small prediction runs, and the modules of ours that its processes import are
counted.
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
# Layers of the core. A module may import from its own layer and from the layers above it in this list.
LAYERS = (
    (
        "allowed_paths",
        "answer",
        "checked_files",
        "command_handover",
        "command_time",
        "confidential",
        "config",
        "errors",
        "encoder_names",
        "first_use",
        "gpu_order",
        "gpus",
        "input_names",
        "lease",
        "machine_name",
        "markdown",
        "private_socket",
        "process_facts",
        "profiles",
        "proportions",
        "proxies",
        "rundir",
        "runfiles",
        "safe_files",
        "sample_familiarity",
        "system_errors",
        "spreadsheets",
    ),
    ("reads", "encoders", "telemetry"),
    ("engine", "consensus", "run_costs"),
    (
        "baseline",
        "deliveries",
        "finished_run",
        "inbox",
        "inspection",
        "pipeline",
        "results",
        "tools",
        "training",
        "validation",
    ),
    ("report",),
)
LEVELS = {f"virnuc_core.{name}": level for level, names in enumerate(LAYERS) for name in names}
LEVELS |= {"virnuc_core": 0, "virnuc.tasks": 5, "virnuc.flows": 6, "virnuc.deployments": 7}
HEAVY_AT_START = (
    "torch",
    "prefect",
    "pandas",
    "h5py",
    "matplotlib",
    "scipy",
    "sklearn",
    "distributed",
)
# An import finder that finds nothing. It writes down which modules of ours each process asks for.
IMPORT_RECORDER = """
import os, sys
class Recorder:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("virnuc", "virnuc_core"):
            with open(os.environ["VIRNUC_MODULES_LOG"], "a") as log:
                log.write(name + "\\n")
sys.meta_path.insert(0, Recorder())
"""


def module_name(path: Path) -> str:
    """Return the name by which a source file, relative to the root, is imported."""
    name = ".".join(path.with_suffix("").parts).removesuffix(".__init__")
    if name.startswith("virnuc_core"):
        return name
    return f"virnuc.{name}"


def level_of(module: str) -> int:
    """Return the layer of a module. A core module that no layer names stands beside the pipeline."""
    prefix = ".".join(module.split(".")[:2])
    return LEVELS.get(prefix, LEVELS["virnuc_core.pipeline"])


def imported_modules(tree: ast.Module, modules: set[str]) -> Iterator[tuple[int, str]]:
    """Yield line and name of each import of ours or of Prefect, also of those inside functions."""
    for node in ast.walk(tree):
        yield from imports_of(node, modules)


def imports_of(node: ast.AST, modules: set[str]) -> Iterator[tuple[int, str]]:
    """Yield line and name of each module of ours, or of Prefect, that one statement imports.

    Args:
        node: A statement. One that imports nothing, or any other part of the source, has none.
        modules: The names of our modules.
    """
    names = []
    if isinstance(node, ast.Import):
        names = [alias.name for alias in node.names]
    elif isinstance(node, ast.ImportFrom):
        for alias in node.names:
            full_name = f"{node.module}.{alias.name}"
            names.append(full_name if full_name in modules else str(node.module))
    for name in dict.fromkeys(names):
        if name in modules or name.split(".")[0] == "prefect":
            yield node.lineno, name


def statements_at_load(tree: ast.AST) -> Iterator[ast.AST]:
    """Yield the parts of a module that Python runs when the module is loaded.

    These are all but the bodies of functions, and what stands under `if TYPE_CHECKING`.
    """
    for node in ast.iter_child_nodes(tree):
        is_function = isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
        is_for_types = isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        if not is_function and not is_for_types:
            yield node
            yield from statements_at_load(node)


def chain_to_prefect(start: str, imports_at_load: dict[str, set[str]]) -> list[str]:
    """Return the modules by which loading a module imports Prefect, or an empty list.

    Args:
        start: The module that is loaded. It is the first of the list, and Prefect is the last.
        imports_at_load: The modules that each module of ours imports when it is loaded.
    """
    chains = [[start]]
    seen = {start}
    for chain in chains:  # grows while we look: the shortest chains come first
        for target in sorted(imports_at_load.get(chain[-1], ())):
            if target.split(".")[0] == "prefect":
                return [*chain, target]
            if target not in seen:
                seen.add(target)
                chains.append([*chain, target])
    return []


def prefect_in_steps(trees: dict[str, ast.Module]) -> list[str]:
    """Return the modules with the steps of a flow that import Prefect, themselves or through others.

    `virnuc predict --no-prefect` must work where Prefect cannot be imported. In such a module
    Prefect may not be imported in a function either. Other modules may do that for what they do
    only where there is a server.

    Args:
        trees: The source of each module of ours.
    """
    imports_at_load: dict[str, set[str]] = {}
    for name, tree in trees.items():
        parents = {name.rpartition(".")[0]} & set(
            trees
        )  # Python loads a package before its modules
        targets = set()
        for node in statements_at_load(tree):
            targets |= {target for _, target in imports_of(node, set(trees))}
        imports_at_load[name] = targets | parents

    places = []
    for name in sorted(trees):
        if not is_module_of_steps(name, trees):
            continue
        for line, target in imported_modules(trees[name], set(trees)):
            if target.split(".")[0] == "prefect":
                places.append(f"{name}:{line}: {target}")
        chain = chain_to_prefect(name, imports_at_load)
        if chain:
            places.append(" → ".join(chain))
    return places


def is_module_of_steps(name: str, trees: dict[str, ast.Module]) -> bool:
    """Return whether a module has the steps of a flow: a Prefect flow of the same name exists.

    `predict_samples` has the steps of `predict` for several samples.
    """
    package, _, module = name.rpartition(".")
    if name == "virnuc.flows.predict_samples":
        return True
    return package == "virnuc.flows" and f"{package}.prefect_flows.{module}" in trees


def import_cycles(graph: dict[str, set[str]]) -> list[str]:
    """Return the groups of modules that import each other, directly or through others."""
    reachable = {name: set(targets) for name, targets in graph.items()}
    for middle, start in itertools.product(graph, graph):  # Warshall's algorithm
        if middle in reachable[start]:
            reachable[start] |= reachable[middle]
    cycles = set()
    for name in graph:
        if name in reachable[name]:
            members = [target for target in reachable[name] if name in reachable[target]]
            cycles.add(" ↔ ".join(sorted(members)))
    return sorted(cycles)


def check_structure(paths: dict[str, Path]) -> dict[str, list[str]]:
    """Return the violations of each rule that can be read from the source alone."""
    graph: dict[str, set[str]] = {name: set() for name in paths}
    violations: dict[str, list[str]] = defaultdict(list)
    trees = {name: ast.parse((ROOT / path).read_text()) for name, path in paths.items()}
    for name, path in paths.items():
        for line, target in imported_modules(trees[name], set(paths)):
            if target not in graph:
                if name.startswith("virnuc_core"):
                    violations["the core imports Prefect"].append(f"{path}:{line}")
                continue
            graph[name].add(target)
            if level_of(target) > level_of(name):
                violations["imports against the layers"].append(f"{path}:{line}: {target}")
    violations["import cycles"] = import_cycles(graph)
    violations["the steps of a flow import Prefect"] = prefect_in_steps(trees)
    return violations


def imports_of_test_modules() -> list[str]:
    """Return the places where a test imports from another test's module.

    What several tests share lives in `conftest.py` or in a helper module that has no tests.
    """
    places = []
    for path in sorted((ROOT / "tests").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module is not None:
                is_ours = node.level > 0 or node.module.startswith("tests.")
                if is_ours and node.module.split(".")[-1].startswith("test_"):
                    places.append(f"{path.relative_to(ROOT)}:{node.lineno}: {node.module}")
    return places


def heavy_imports() -> list[str]:
    """Return the heavy packages that `virnuc --help` imports."""
    program = (
        "import sys\n"
        "from virnuc.flows.cli import main\n"
        "main(['--help'])\n"
        f"print('|', *[name for name in {HEAVY_AT_START} if name in sys.modules], file=sys.stderr)\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    run = subprocess.run(
        [sys.executable, "-c", program], check=True, capture_output=True, text=True, env=environment
    )
    return run.stderr.rpartition("|")[2].split()


def modules_of_predict() -> set[str]:
    """Return the modules of ours that a small `virnuc predict` imports, over all its processes."""
    with tempfile.TemporaryDirectory() as folder:
        reads = f"{folder}/reads.fastq.gz"
        models = f"{folder}/models"
        log = Path(folder, "modules")
        Path(folder, "sitecustomize.py").write_text(IMPORT_RECORDER)
        environment = {
            **os.environ,
            "PYTHONPATH": f"{folder}:{ROOT / 'src'}",
            "VIRNUC_MODULES_LOG": str(log),
            "PREFECT_HOME": f"{folder}/prefect",
        }
        predict = f"predict {reads} -o {folder}/out --models {models} --devices cpu:1"
        for command in (f"simulate {reads} --reads 300", f"models init-random {models}", predict):
            log.unlink(missing_ok=True)
            subprocess.run(
                [sys.executable, "-m", "virnuc.flows.cli", *command.split()],
                check=True,
                capture_output=True,
                env=environment,
            )
        return set(log.read_text().split())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--predict", action="store_true", help="run a prediction and count what it imports"
    )
    options = parser.parse_args()
    paths = {}
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*.py")):
            relative = path.relative_to(ROOT)
            paths[module_name(relative)] = relative
    lines = {name: len((ROOT / path).read_text().splitlines()) for name, path in paths.items()}

    core_lines = sum(count for name, count in lines.items() if name.startswith("virnuc_core"))
    print(f"{sum(lines.values()):,} lines in {len(lines)} modules; {core_lines:,} in virnuc_core")
    if options.predict:
        used = modules_of_predict() & set(lines)
        print(
            f"a prediction imports {len(used)} modules, {sum(lines[name] for name in used):,} lines"
        )

    violations = check_structure(paths)
    violations["heavy imports of virnuc --help"] = heavy_imports()
    violations["imports of a test's module"] = imports_of_test_modules()
    for rule, places in sorted(violations.items()):
        print(f"{'BROKEN' if places else 'ok':6}  {rule}")
        for place in places:
            print(f"          {place}")
    return int(any(violations.values()))


if __name__ == "__main__":
    sys.exit(main())
