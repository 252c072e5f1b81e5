"""The import ladder, and the limits on size, checked on the source text: nothing is imported."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections.abc import Iterator
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

# A module may import from its own rung and from the rungs before it.
LADDER = (
    {"types", "params", "errors", "config"},
    {"sampling"},
    {"cache"},
    {"runner"},
    {"drafting"},
    {"worker"},
    {"orchestrator"},
    {"api"},
    {"observe"},
    {"train"},
    {"engine"},
    {"cli", "__main__"},
    {"__init__"},  # the public face
)
RUNGS = {name: rung for rung, names in enumerate(LADDER) for name in names}

# Top-level modules that only some parts may import.
RESERVED = {
    "ray": ("deployments",),
    "fastapi": ("specdec.api", "deployments"),
    "starlette": ("specdec.api", "deployments"),
    "transformers": ("specdec.runner", "specdec.train"),
    "deployments": ("deployments",),
}

MAX_FUNCTION_LINES = 60
MAX_FILE_LINES = 320


def source_files(root: Path) -> list[Path]:
    return sorted(path for package in ("specdec", "deployments") for path in (root / package).rglob("*.py"))


def module_name(root: Path, path: Path) -> str:
    """Dotted name; a package's own module keeps its ``__init__``."""
    return ".".join(path.relative_to(root).with_suffix("").parts)


def imports(tree: ast.Module, module: str) -> Iterator[tuple[int, str]]:
    """Line and full dotted name of everything imported anywhere in a module; relative names are resolved."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parents = module.split(".")[: -node.level] if node.level else []
            base = ".".join([*parents, *([node.module] if node.module else [])])
            yield from ((node.lineno, f"{base}.{alias.name}") for alias in node.names)


def rung_of(name: str) -> tuple[str, int | None]:
    """The part of ``specdec`` a dotted name belongs to, and its rung; None for a part without a place."""
    parts = name.split(".")
    part = parts[1] if len(parts) > 1 else "__init__"
    if part not in RUNGS and len(parts) == 2 and name[len("specdec.")].isupper():
        part = "__init__"  # `from specdec import Engine`
    return part, RUNGS.get(part)


def import_faults(module: str, imported: str) -> Iterator[str]:
    top = imported.split(".")[0]
    homes = RESERVED.get(top)
    if homes and not any(module == home or module.startswith(f"{home}.") for home in homes):
        yield f"imports {top}, which only {' and '.join(homes)} may"
    if top == "specdec" and module.startswith("specdec."):
        part, rung = rung_of(imported)
        own_part, own_rung = rung_of(module)
        if rung is None:
            yield f"imports {imported}, which has no place in the ladder"
        elif own_rung is not None and rung > own_rung:
            yield f"imports {part}, which is above {own_part}"


def faults(root: Path) -> list[str]:
    """Every breach of the rules under ``root``, as ``file:line: what``."""
    found = []
    for path in source_files(root):
        module, text = module_name(root, path), path.read_text(encoding="utf-8")
        tree, where = ast.parse(text), path.relative_to(root)
        if module.startswith("specdec.") and rung_of(module)[1] is None:
            found.append(f"{where}:1: has no place in the ladder")
        if (num_lines := len(text.splitlines())) > MAX_FILE_LINES:
            found.append(f"{where}:1: has {num_lines} lines, more than {MAX_FILE_LINES}")
        for line, imported in imports(tree, module):
            found += [f"{where}:{line}: {fault}" for fault in import_faults(module, imported)]
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.end_lineno is not None:
                num_lines = node.end_lineno - node.lineno + 1
                if num_lines > MAX_FUNCTION_LINES:
                    found.append(f"{where}:{node.lineno}: {node.name} has {num_lines} lines")
    return found


def undeclared_imports(root: Path) -> set[str]:
    """Distributions that are imported but not among the dependencies of ``pyproject.toml``."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    requirements = project["dependencies"] + project["optional-dependencies"]["gguf"]
    declared = {normalized(re.split(r"[\[<>=~! ]", requirement)[0]) for requirement in requirements}
    distributions = packages_distributions()
    undeclared = set()
    for path in source_files(root):
        module = module_name(root, path)
        for _, imported in imports(ast.parse(path.read_text(encoding="utf-8")), module):
            top = imported.split(".")[0]
            if top in sys.stdlib_module_names or top in ("specdec", "deployments"):
                continue
            if not declared & {normalized(name) for name in distributions.get(top, [top])}:
                undeclared.add(top)
    return undeclared


def normalized(distribution: str) -> str:
    return re.sub(r"[-_.]+", "-", distribution).lower()


def test_the_sources_obey() -> None:
    assert len(source_files(ROOT)) > 10
    assert faults(ROOT) == []


def test_what_is_imported_is_declared() -> None:
    assert undeclared_imports(ROOT) == set()


def write(root: Path, name: str, text: str) -> None:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


@pytest.mark.parametrize(
    ("name", "text", "fault"),
    [
        ("specdec/types.py", "import specdec.sampling.noise", "1: imports sampling, which is above types"),
        ("specdec/cache/pool.py", "from specdec.runner import load", "1: imports runner, which is above cache"),
        ("specdec/cache/pool.py", "from specdec import worker", "1: imports worker, which is above cache"),
        ("specdec/cache/pool.py", "from ..worker.loop import step", "1: imports worker, which is above cache"),
        ("specdec/cache/__init__.py", "from .. import worker", "1: imports worker, which is above cache"),
        ("specdec/worker/loop.py", "def f():\n    import specdec.cli", "2: imports cli, which is above worker"),
        ("specdec/worker/loop.py", "from specdec import Engine", "1: imports __init__, which is above worker"),
        ("specdec/worker/loop.py", "import specdec", "1: imports __init__, which is above worker"),
        ("specdec/worker/loop.py", "import specdec.misc", "1: imports specdec.misc, which has no place in the ladder"),
        ("specdec/engine.py", "from specdec.cli import main", "1: imports cli, which is above engine"),
        ("specdec/misc/tools.py", "", "1: has no place in the ladder"),
        ("specdec/worker/loop.py", "import ray.util", "1: imports ray, which only deployments may"),
        ("specdec/orchestrator/a.py", "from fastapi import FastAPI", "1: imports fastapi, which only specdec.api and"),
        ("specdec/worker/loop.py", "import starlette", "1: imports starlette, which only specdec.api and deployments"),
        ("specdec/apiary.py", "import starlette", "1: imports starlette, which only specdec.api and deployments"),
        ("specdec/worker/loop.py", "import transformers", "1: imports transformers, which only specdec.runner and"),
        ("deployments/target.py", "import transformers", "1: imports transformers, which only specdec.runner and"),
        ("specdec/cli.py", "import deployments.app", "1: imports deployments, which only deployments may"),
        ("specdec/cli.py", "\ndef f():\n" + "    x = 1\n" * MAX_FUNCTION_LINES, "2: f has 61 lines"),
        ("deployments/app.py", "x = 1\n" * (MAX_FILE_LINES + 1), "1: has 321 lines, more than 320"),
    ],
)
def test_a_breach_is_reported(tmp_path: Path, name: str, text: str, fault: str) -> None:
    write(tmp_path, name, text)
    assert any(found.startswith(f"{name}:{fault}") for found in faults(tmp_path)), faults(tmp_path)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("specdec/errors.py", "from specdec.types import X"),  # one rung
        ("specdec/worker/loop.py", "from specdec.runner import load\nfrom .queue import q\nimport torch"),
        ("specdec/worker/loop.py", "import raytracer, rayleigh.scatter"),
        ("specdec/runner/load.py", "import transformers"),
        ("specdec/api/routes.py", "from starlette.responses import Response\nfrom fastapi import APIRouter"),
        ("specdec/__init__.py", "from specdec.engine import Engine\nfrom .errors import SpecdecError"),
        ("deployments/app.py", "import ray, fastapi, deployments.target\nfrom specdec import Engine"),
        ("specdec/cli.py", "def f():\n" + "    x = 1\n" * (MAX_FUNCTION_LINES - 1)),
    ],
)
def test_what_is_allowed_is_not_reported(tmp_path: Path, name: str, text: str) -> None:
    write(tmp_path, name, text)
    assert faults(tmp_path) == []


def test_an_undeclared_import_is_reported(tmp_path: Path) -> None:
    write(tmp_path, "specdec/cli.py", "import yaml, iniconfig, json\nfrom huggingface_hub import constants")
    assert undeclared_imports(tmp_path) == {"iniconfig"}
