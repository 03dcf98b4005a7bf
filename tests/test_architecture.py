"""What DESIGN section 2 fixes about the packages, read off the source and checked in clean interpreters.

Imports point down only and form no cycle; light packages stay light; nothing unsafe is called; files explain
themselves and stay small.
"""

from __future__ import annotations

import ast
import importlib.util
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

MAY_IMPORT = {
    "cli": {"tools", "simulate", "controller", "cluster"},
    "tools": {"simulate", "controller", "cluster"},
    "simulate": {
        *("router", "controller", "worker", "prefill_worker", "decode_worker", "kv_transfer", "engine", "cluster")
    },
    "router": {"cluster"},
    "controller": {"cluster"},
    "worker": {"prefill_worker", "decode_worker", "kv_transfer", "engine", "cluster"},
    "prefill_worker": {"kv_transfer", "engine", "cluster"},
    "decode_worker": {"kv_transfer", "engine", "cluster"},
    "kv_transfer": {"cluster"},
    "engine": {"cluster"},
    "cluster": set[str](),
}
WITHOUT_TORCH = ("cli", "tools", "simulate", "router", "controller", "cluster")
DECIDES = (
    "prefill_worker",
    "decode_worker",
    "engine/sequence.py",
    "engine/step_budget.py",
    "engine/step_input.py",
    "engine/kv/block_manager.py",
    "engine/sampling/constraint.py",
    "engine/sampling/params.py",
    "engine/token_hash.py",
    "worker/core.py",
    "worker/step_pipeline.py",
)
"""What chooses what runs next; decisions are tested without torch."""
RAY_ONLY_IN = (
    "controller/ray_actors.py",
    "controller/ray_namespace.py",
    "controller/reconciler.py",
    "controller/detached.py",
    "controller/launchers.py",
    "controller/local_ray.py",
    "cli/serve.py",
)
MAX_LINES = 400
ROUTER_LEVELS = 8
GROUND = {"cluster.config.reference"}
"""Modules of the ground floor though no other floor uses them: a page's printer."""
BANNED_MODULES = {"pickle", "cloudpickle", "marshal", "shelve", "dill", "_pickle"}
BANNED_CALLS = {"eval", "exec", "torch.load", "yaml.unsafe_load", "yaml.full_load", "yaml.load_all", "os.system"}
SAFE_LOADERS = {"SafeLoader", "CSafeLoader"}


def sources(package: str) -> list[Path]:
    return sorted(p for p in (ROOT / package).rglob("*.py") if "pb" not in p.relative_to(ROOT).parts)


ALL_SOURCES = [path for package in MAY_IMPORT for path in sources(package)]


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports_of(path: Path, nodes: Iterator[ast.AST] | None = None) -> Iterator[tuple[int, str]]:
    """Each (line, absolute module name) that is imported anywhere in the file, or by `nodes`."""
    package = module_name(path).split(".")
    if path.name != "__init__.py":
        package.pop()
    for node in nodes or ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            target = ".".join([*base, *([node.module] if node.module else [])])
            yield node.lineno, target
            yield from ((node.lineno, f"{target}.{alias.name}") for alias in node.names)


def where(path: Path, line: int) -> str:
    return f"{path.relative_to(ROOT)}:{line}"


def run_python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=100)


@pytest.mark.parametrize("package", MAY_IMPORT)
def test_a_package_exists_and_is_importable_by_its_folder_name(package: str) -> None:
    assert (ROOT / package / "__init__.py").is_file(), f"{package}/ has no __init__.py"


@pytest.mark.parametrize("package", MAY_IMPORT)
def test_a_package_imports_only_those_below_it(package: str) -> None:
    allowed = MAY_IMPORT[package] | {package}
    wrong = {
        f"{where(path, line)} imports {name}"
        for path in sources(package)
        for line, name in imports_of(path)
        if (top := name.split(".")[0]) in MAY_IMPORT and top not in allowed
    }
    assert not wrong, "imports point down only:\n" + "\n".join(sorted(wrong))


@cache
def import_graph() -> dict[str, set[str]]:
    """Each module with the modules that it imports anywhere: under TYPE_CHECKING and inside functions, too."""
    known = {module_name(path): path for path in ALL_SOURCES}
    return {
        name: {
            target
            for _, target in imports_of(path)
            if target in known and target != name and not is_own_package(name, target, path)
        }
        for name, path in known.items()
    }


def is_own_package(name: str, target: str, path: Path) -> bool:
    """`from router.queue import admission` names the package on the way; only an import of what it holds counts."""
    return name.startswith(f"{target}.") and (path.parent / "__init__.py").is_file() and not package_imports(target)


def package_imports(package: str) -> bool:
    """Whether a package's own __init__.py imports anything of Baton."""
    init = ROOT.joinpath(*package.split("."), "__init__.py")
    return any(name.split(".")[0] in MAY_IMPORT for _, name in imports_of(init))


def test_modules_form_no_import_cycle_wherever_the_import_stands() -> None:
    edges = import_graph()
    done: set[str] = set()

    def visit(name: str, trail: list[str]) -> None:
        assert name not in trail, "import cycle: " + " -> ".join([*trail[trail.index(name) :], name])
        if name not in done:
            for target in sorted(edges[name]):
                visit(target, [*trail, name])
            done.add(name)

    for name in sorted(edges):
        visit(name, [])


def test_the_router_is_at_most_eight_imports_deep() -> None:
    edges = {n: {t for t in targets if t.startswith("router.")} for n, targets in import_graph().items()}
    depth: dict[str, int] = {}

    def measure(name: str) -> int:
        if name not in depth:
            depth[name] = 1 + max((measure(target) for target in edges[name]), default=0)
        return depth[name]

    deepest = max((n for n in edges if n.startswith("router.")), key=measure)
    assert depth[deepest] <= ROUTER_LEVELS, f"{deepest} stands on {depth[deepest]} levels of router modules"


def test_no_public_class_name_stands_for_two_things() -> None:
    places: dict[str, list[str]] = {}
    for path in ALL_SOURCES:
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places.setdefault(node.name, []).append(where(path, node.lineno))
    doubled = {name: found for name, found in places.items() if len(found) > 1}
    assert not doubled, f"public class names that stand twice: {doubled}"


FLOORS = {
    "router": "router",
    "controller": "controller",
    "cli": "people",
    "tools": "people",
    "simulate": "people",
    **dict.fromkeys(("worker", "prefill_worker", "decode_worker", "kv_transfer", "engine"), "worker"),
}


def test_cluster_holds_only_what_two_floors_use() -> None:
    edges = import_graph()
    users: dict[str, set[str]] = {}

    def reach(name: str, floor: str) -> None:
        if floor not in users.setdefault(name, set()):
            users[name].add(floor)
            for target in edges[name]:
                reach(target, floor)

    for name in edges:
        if (package := name.split(".")[0]) in FLOORS:
            for target in edges[name]:
                if target.startswith("cluster."):
                    reach(target, FLOORS[package])
    modules = (n for n in edges if n.startswith("cluster.") and n not in GROUND and users.get(n))
    alone = {name: users[name] for name in modules if len(users[name]) < 2}
    assert not alone, f"belongs to the one floor that uses it: {alone}"


@pytest.mark.parametrize("package", WITHOUT_TORCH)
def test_a_light_package_names_torch_nowhere(package: str) -> None:
    wrong = [where(p, line) for p in sources(package) for line, name in imports_of(p) if name.split(".")[0] == "torch"]
    assert not wrong, f"{package} imports torch at {wrong}"


@pytest.mark.parametrize("package", WITHOUT_TORCH)
def test_importing_every_module_of_a_light_package_does_not_load_torch(package: str) -> None:
    names = [module_name(path) for path in sources(package) if path.name != "__main__.py"]
    code = (
        f"import importlib, sys\nfor n in {names!r}: importlib.import_module(n)\nassert 'torch' not in sys.modules, n"
    )
    result = run_python(code)
    assert result.returncode == 0, result.stderr


def test_what_decides_does_not_load_torch() -> None:
    paths = [path for place in DECIDES for path in (sources(place) or [ROOT / place])]
    code = "".join(f"import {module_name(path)}\n" for path in paths) + "import sys\nassert 'torch' not in sys.modules"
    result = run_python(code)
    assert result.returncode == 0, result.stderr


def test_workers_and_routers_run_where_neither_ray_nor_triton_is_installed() -> None:
    """Ray starts them, and need not be where they run; triton is named by `engine.triton` alone, and imported by who
    launches a kernel."""
    packages = ("kv_transfer", "engine", "prefill_worker", "decode_worker", "worker", "router")
    paths = [path for package in packages for path in sources(package) if path.name != "__main__.py"]
    names = [module_name(path) for path in paths if path.parent != ROOT / "engine" / "triton"]
    code = (
        "import importlib, sys\n"
        "sys.modules['ray'] = sys.modules['triton'] = None\n"
        f"for n in {[*names, 'engine.triton.target']!r}: importlib.import_module(n)"
    )
    result = run_python(code)
    assert result.returncode == 0, result.stderr


def test_only_the_hosting_files_name_ray() -> None:
    wrong = sorted(
        where(path, line)
        for path in ALL_SOURCES
        for line, name in imports_of(path)
        if name.split(".")[0] == "ray" and str(path.relative_to(ROOT)) not in RAY_ONLY_IN
    )
    assert not wrong, f"Ray is imported outside {RAY_ONLY_IN}: {wrong}"


def test_proto_holds_nothing_importable() -> None:
    wrong = [p for p in (ROOT / "proto").rglob("*") if p.is_file() and p.suffix != ".proto"]
    assert not wrong, f"proto/ holds more than .proto files: {wrong}"
    spec = importlib.util.find_spec("proto")
    if spec is not None and spec.origin is not None:
        assert not Path(spec.origin).is_relative_to(ROOT / "proto"), "our proto/ hides the library proto-plus"


def dotted(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def banned_call(node: ast.Call) -> str | None:
    name = dotted(node.func)
    if name in BANNED_CALLS:
        return name
    if name == "yaml.load":
        loaders = [dotted(a) for a in [*node.args[1:2], *(k.value for k in node.keywords if k.arg == "Loader")]]
        if not loaders or loaders[0].split(".")[-1] not in SAFE_LOADERS:
            return "yaml.load without a safe loader"
    if any(k.arg == "shell" and getattr(k.value, "value", None) is True for k in node.keywords):
        return f"{name}(shell=True)"
    return None


def test_nothing_unsafe_is_imported_or_called() -> None:
    imported = {
        f"{where(path, line)}: {name}"
        for path in ALL_SOURCES
        for line, name in imports_of(path)
        if name.split(".")[0] in BANNED_MODULES
    }
    called = {
        f"{where(path, node.lineno)}: {bad}"
        for path in ALL_SOURCES
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.Call) and (bad := banned_call(node))
    }
    assert not imported | called, "\n".join(sorted(imported | called))


def test_no_exception_is_swallowed() -> None:
    wrong = [
        where(path, node.lineno)
        for path in ALL_SOURCES
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.ExceptHandler)
        and (node.type is None or dotted(node.type) in {"Exception", "BaseException"})
        and all(isinstance(s, ast.Pass) for s in node.body)
    ]
    assert not wrong, f"an exception is swallowed at {wrong}"


def test_every_module_says_what_it_owns() -> None:
    wrong = [str(p.relative_to(ROOT)) for p in ALL_SOURCES if not (ast.get_docstring(tree_of(p)) or "").strip()]
    assert not wrong, f"no module docstring: {wrong}"


def test_files_stay_small() -> None:
    paths = [*ALL_SOURCES, *(ROOT / "tests").rglob("*.py"), *(ROOT / "benchmarks").rglob("*.py")]
    sizes = {str(p.relative_to(ROOT)): len(p.read_text(encoding="utf-8").splitlines()) for p in paths}
    too_long = {name: size for name, size in sizes.items() if size > MAX_LINES}
    assert not too_long, f"longer than {MAX_LINES} lines: {too_long}"


def undocumented_fields(path: Path) -> Iterator[str]:
    for node in tree_of(path).body:
        if not isinstance(node, ast.ClassDef) or not node.name.endswith(("Section", "Config")):
            continue
        for field, after in zip(node.body, [*node.body[1:], None], strict=True):
            if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
                documented = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
                if not documented and not field.target.id.startswith("_"):
                    yield f"{where(path, field.lineno)}: {node.name}.{field.target.id}"


def config_schema_files() -> list[Path]:
    """Where the sections of `metadata.serving` are declared, wherever in cluster/config that is."""
    return [p for p in (ROOT / "cluster" / "config").rglob("*.py") if "class ServingConfig" in p.read_text("utf-8")]


def test_every_field_of_the_configuration_is_documented() -> None:
    files = config_schema_files()
    assert files, "cluster/config declares no ServingConfig"
    wrong = [text for path in files for text in undocumented_fields(path)]
    assert not wrong, "a docstring below each field:\n" + "\n".join(wrong)
