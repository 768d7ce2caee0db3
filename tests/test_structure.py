"""The rooms of the house: what each may import, and what importing the package costs."""

import ast
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[1]
PACKAGE = ROOT / "synthesizer_jax"

# From the ground up: a room imports from rooms below it (or from itself).
FLOORS = (
    ("annotations", "axes"),
    ("activations",),
    ("scores",),
    ("ops",),
    ("mixers",),
    ("nn",),
    ("models",),
    ("sharding", "decoding"),
    ("data", "training.loss", "training.optimizer"),
    ("training", "prediction"),
    ("evaluation",),
    ("analysis", "preflight", "configuration", "catalogue"),
    ("caching",),
    ("launch",),
    ("__main__",),
)


def sources():
    return sorted(PACKAGE.rglob("*.py"))


def imports(path, inside_functions=False):
    """(module, line) of each import statement; relative ones don't occur here."""
    tree = ast.parse(path.read_text())
    nodes = (
        ast.walk(tree)
        if not inside_functions
        else (node for f in ast.walk(tree) if isinstance(f, ast.FunctionDef) for node in ast.walk(f))
    )
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from ((f"{node.module}.{alias.name}", node.lineno) for alias in node.names)


def room(module):
    """(floor, room) of a module of ours, by the longest room name that fits."""
    inside = module.removeprefix("synthesizer_jax").lstrip(".")
    found = [
        (len(name), floor, name)
        for floor, names in enumerate(FLOORS)
        for name in names
        if inside == name or inside.startswith(name + ".")
    ]
    return max(found)[1:] if found else None


@pytest.mark.parametrize("path", sources(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_point_down(path):
    module = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
    if module == "synthesizer_jax":
        return  # the contents page imports all public names
    assert room(module), f"{module} has no floor: add it to FLOORS"
    floor, own = room(module)
    for imported, line in imports(path):
        if not imported.startswith("synthesizer_jax.") or room(imported) is None:
            continue
        below, name = room(imported)
        assert below < floor or name == own, f"{module}, line {line}: imports {imported}, which is no room below"


@pytest.mark.parametrize("path", sources(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_no_import_of_our_own_inside_a_function(path):
    ours = [(name, line) for name, line in imports(path, inside_functions=True) if name.startswith("synthesizer_jax")]
    assert not ours


def test_gin_is_imported_by_the_launcher_alone():
    users = {path.name for path in sources() for name, _ in imports(path) if name.split(".")[0] == "gin"}
    assert users == {"launch.py"}


def test_tasks_never_import_synthesizer_jax():
    for path in (ROOT / "tasks").glob("*.py"):
        ours = [
            n for n, _ in imports(path) if n.startswith("synthesizer_jax") and not n.startswith("synthesizer_jax.tasks")
        ]
        assert not ours, path


def test_importing_the_package_is_light():
    code = "import sys, synthesizer_jax; print(*sorted({name.split('.')[0] for name in sys.modules}))"
    loaded = set(
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    )
    assert {"synthesizer_jax", "jax", "flax"} <= loaded
    assert not loaded & {"tensorflow", "seqio", "t5", "gin", "clu", "tensorflow_datasets", "matplotlib"}
