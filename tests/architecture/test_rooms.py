"""The package's rooms: which there are, and that imports go one way, from the top to the bottom."""

from __future__ import annotations

from graphlib import TopologicalSorter

from tests.architecture.test_doors import PACKAGE, imports_of, module_name, sources

# From the bottom to the top: a room may import those before it.
ROOMS = (
    "errors",
    "types",
    "intervals",
    "functional",
    "config",
    "user_code",
    "files",
    "system",
    "networks",
    "environments",
    "prompts",
    "rewards",
    "tracking",
    "runs",
    "rollouts",
    "advantages",
    "evaluation",
    "diagnostics",
    "training",
    "sweep",
    "tasks",
    "studies",
    "commands",
    "api",
    "cli",
    "__main__",
)
# They use the core, and it none of them.
USERS = ("tasks", "studies", "commands", "api", "cli", "__main__")
MAX_ARROWS = 106


def file_imports() -> dict[str, set[str]]:
    """Module -> the modules and packages of `vapo` that it imports."""
    modules = {module_name(path): path for path in sources()}
    del modules["vapo"]
    return {
        name: {t for t in imports_of(path) if t in modules and t != name}
        for name, path in modules.items()
    }


def room_of(module: str) -> str:
    return module.split(".")[1]


def test_the_top_level_is_the_architecture() -> None:
    entries = {p.stem for p in PACKAGE.iterdir() if p.name not in ("__pycache__", ".agents")}
    assert entries == {*ROOMS, "__init__"}


def test_no_room_imports_the_package_s_own_names() -> None:
    """They are for users: whoever imports them stands above every room."""
    assert not [path for path in sources() if "vapo" in imports_of(path)]


def test_no_room_imports_a_shipped_task() -> None:
    """A config names it, and it is loaded as a user's own."""
    users = {m for m, targets in file_imports().items() for t in targets if room_of(t) == "tasks"}
    assert {room_of(module) for module in users} == {"tasks"}
    assert [p.name for p in sources() if "vapo.tasks." in p.read_text()] == ["generators.py"]


def test_imports_between_rooms_go_down() -> None:
    upward = [
        f"{module} imports {target}"
        for module, targets in file_imports().items()
        for target in targets
        if ROOMS.index(room_of(target)) > ROOMS.index(room_of(module))
    ]
    assert not upward, "\n".join(upward)


def test_only_commands_and_the_python_interface_use_the_studies() -> None:
    users = {
        room_of(module)
        for module, targets in file_imports().items()
        for target in targets
        if room_of(target) == "studies"
    }
    assert users - {"studies"} <= {"commands", "api"}


def test_the_core_s_rooms_are_joined_by_few_arrows() -> None:
    arrows = {
        (room_of(module), room_of(target))
        for module, targets in file_imports().items()
        for target in targets
        if room_of(module) not in (room_of(target), *USERS)
    }
    assert len(arrows) <= MAX_ARROWS, sorted(arrows)


def test_no_circle_of_files() -> None:
    TopologicalSorter(file_imports()).prepare()  # raises CycleError, which names the circle
