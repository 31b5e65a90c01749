"""The house rules, read from the source: who may import whom, who prints, who opens files."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent / "ckptool"

# floor -> its rooms, a room being the modules (or packages) that may import each other
HOUSE: dict[int, list[set[str]]] = {
    0: [{"errors", "escapes"}, {"limits"}, {"spans", "plans"}, {"commands"}, {"crcs"}, {"interrupts"}],
    1: [{"places", "reads"}, {"pickles"}],
    2: [
        {"zips", "zipcentral", "ziplocal", "zipchain", "ziplayout", "zipcut", "zipnames", "zipplan"},
        {"writing", "sources", "sinks", "targets", "sums", "sent", "ranges", "taskbook", "inplace", "journals"},
        {"checkpoint", "records", "pieces"},
        {"rules", "keynames", "wrapping", "renaming", "globs", "layer_versions"},
    ],
    3: [{"formats"}, {"values"}, {"compare", "differences", "sides", "alignment", "causes"}],
    4: [
        {"models"},
        {"engines", "executors", "urls", "remote", "remote_urls", "remote_stores", "remote_errors", "remote_source", "remote_ahead",
         "remote_kept", "remote_noted", "remote_landing", "remote_folder", "remote_sink", "remote_fsspec", "remote_book", "remote_tasks", "remote_engine"},
    ],
    5: [{"verbs"}, {"render"}],
    6: [{"api", "api_verify", "api_compare", "api_load", "api_stats", "api_tensors", "api_into"}],
    7: [{"cli", "__main__"}],
}  # fmt: skip
FRONT = "ckptool"
"""`__init__`: its public names are lazy, and whoever asks it for the version gets no more."""
LONGEST_FILE, LONGEST_FUNCTION = 400, 60
ONE_LOOP = {("pickles.walk", "_run")}
"""The opcode loop: one function, because a call per opcode would double its time."""
MAY_PRINT = {"cli", "models.spec_prints"}  # prints of the user's own net: to stderr
MAY_OPEN = {
    "places",
    "writing",
    "targets",
    "ranges",
    "taskbook",
    "inplace",
    "journals",
    "verbs",
    "cli.main",
}  # cli.main: only os.devnull
MAY_READ_ENVIRONMENT = {"cli", "remote_urls", "remote_stores", "models.devices"}
PRINTS = {"print", "echo", "secho", "sys.stdout", "sys.stderr", "sys.exit", "os._exit", "exit"}
ENVIRONMENT = {"os.environ", "os.environb", "os.getenv", "os.getenvb"}
OPENS = {"open", "os.open", "io.open", "os.fdopen", "codecs.open", "io.FileIO"}


def modules() -> dict[str, ast.Module]:
    found = {}
    for path in sorted(ROOT.rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        parts = parts[:-1] if parts[-1] == "__init__" else parts
        name = ".".join(parts) or FRONT
        found[name] = ast.parse(path.read_text(encoding="utf-8"), str(path))
    return found


MODULES = modules()


def room_of(module: str) -> tuple[int, int]:
    head = module.split(".")[0]
    for floor, rooms in HOUSE.items():
        for number, names in enumerate(rooms):
            if head in names:
                return floor, number
    raise AssertionError(f"{module} stands on no floor: give it a place in HOUSE")


def imports_of(name: str) -> set[str]:
    """Modules of ckptool that `name` imports, inside functions and for types too."""
    found: set[str] = set()
    for node in ast.walk(MODULES[name]):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            subs = {f"{node.module}.{alias.name}" for alias in node.names}
            known = {sub for sub in subs if sub.removeprefix("ckptool.") in MODULES}
            found.update(known)
            if len(known) < len(subs):
                found.add(node.module)
    ours = {full for full in found if full.split(".")[0] == "ckptool"}
    return {full.removeprefix("ckptool.") for full in ours}


def dotted(node: ast.AST) -> str:
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


@pytest.mark.parametrize("name", [name for name in MODULES if name != FRONT])
def test_a_module_imports_only_from_floors_below_or_from_its_room(name: str):
    here = room_of(name)
    wrong = [
        other
        for other in sorted(imports_of(name) - {FRONT})
        if room_of(other) != here and room_of(other)[0] >= here[0]
    ]
    assert wrong == [], f"ckptool.{name} imports {wrong}"


def test_the_front_imports_nothing_until_it_is_asked():
    body = MODULES[FRONT].body
    heads = [node for node in body if isinstance(node, ast.Import | ast.ImportFrom)]
    names = {getattr(node, "module", None) or node.names[0].name for node in heads}
    assert names == {"__future__", "typing"}


def test_no_room_has_a_circle():
    edges = {name: imports_of(name) - {name, FRONT} for name in MODULES if name != FRONT}
    circles = []
    for start in edges:
        seen, stack = set(), [(other, [start]) for other in sorted(edges[start])]
        while stack:
            name, way = stack.pop()
            if name == start:
                circles.append(" -> ".join([*way, name]))
            elif name not in seen:
                seen.add(name)
                stack += [(other, [*way, name]) for other in sorted(edges.get(name, ()))]
    assert circles == []


def uses(name: str, words: set[str]) -> list[str]:
    found = []
    for node in ast.walk(MODULES[name]):
        if isinstance(node, ast.Call):
            word = dotted(node.func)
            if word in words or (words is PRINTS and word.startswith("click.")):
                found.append(f"{word} at line {node.lineno}")
        elif isinstance(node, ast.Attribute) and dotted(node) in words:
            found.append(f"{dotted(node)} at line {node.lineno}")
    return found


def allowed(name: str, rooms: set[str]) -> bool:
    return name in rooms or name.split(".")[0] in rooms


@pytest.mark.parametrize("name", MODULES)
def test_only_the_command_line_prints_or_exits(name: str):
    assert allowed(name, MAY_PRINT) or uses(name, PRINTS) == []


@pytest.mark.parametrize("name", MODULES)
def test_only_places_writing_and_verbs_open_files(name: str):
    assert allowed(name, MAY_OPEN) or uses(name, OPENS) == []


@pytest.mark.parametrize("name", MODULES)
def test_only_the_command_line_and_devices_read_the_environment(name: str):
    assert allowed(name, MAY_READ_ENVIRONMENT) or uses(name, ENVIRONMENT) == []


@pytest.mark.parametrize("name", MODULES)
def test_a_module_opens_with_what_it_knows(name: str):
    text = ast.get_docstring(MODULES[name])
    package = (ROOT / Path(*name.split("."))).is_dir() or name in (FRONT, "__main__")
    if not MODULES[name].body:
        return  # an empty __init__
    assert text, f"ckptool.{name} has no docstring"
    if not package:
        assert "Knows:" in text, f"ckptool.{name} does not say what it knows"
        assert "ust not know" in text, f"ckptool.{name} does not say what it must not know"


@pytest.mark.parametrize("path", sorted(ROOT.rglob("*.py")), ids=lambda p: str(p.relative_to(ROOT)))
def test_no_file_is_longer_than_400_lines(path: Path):
    assert len(path.read_text(encoding="utf-8").splitlines()) <= LONGEST_FILE


@pytest.mark.parametrize("name", MODULES)
def test_functions_are_short(name: str):
    """Counted from the docstring on: a long list of keywords is a table, not a function."""
    long = [
        f"{node.name}: {node.end_lineno - node.body[0].lineno + 1} lines"
        for node in ast.walk(MODULES[name])
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (node.end_lineno or 0) - node.body[0].lineno + 1 > LONGEST_FUNCTION
        and (name, node.name) not in ONE_LOOP
    ]
    assert long == []


def test_the_table_names_no_module_that_is_gone():
    heads = {name.split(".")[0] for name in MODULES}
    later = {"compare", "causes"}  # rooms that later issues open
    assert {n for rooms in HOUSE.values() for room in rooms for n in room} - heads <= later
