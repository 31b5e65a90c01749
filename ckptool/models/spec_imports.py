"""From a SPEC's words to the object it names: the user's module, imported.

Knows: import paths, modules that an earlier SPEC brought in. Must not know: torch.

SPEC is the user's own code and is run on purpose; nothing here reads a checkpoint.
"""

from __future__ import annotations

import ast
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from pkgutil import iter_modules
from types import ModuleType
from typing import Any, NamedTuple

from ckptool.errors import CkptError, UsageError
from ckptool.models.spec_words import failed, instead, is_own, shown_path


class Words(NamedTuple):
    """A SPEC taken apart. `file` is set where it named one (absolute), `module` is the dotted
    name otherwise; `attributes` lead from the module to the callable.
    """

    text: str
    module: str
    file: str | None
    attributes: tuple[str, ...]

    @property
    def shown(self) -> str:
        """`net.Net`: module and callable, as in `net.Net(num_classes=10)`."""
        return ".".join([self.module, *self.attributes])


class _Brought(NamedTuple):
    file: str
    stamp: tuple[int, int]
    folders: list[str]


_NOTHING = object()
_BROUGHT: dict[str, _Brought] = {}
"""Modules of the user's folders that SPECs of this process imported, by name."""


def parse(text: str) -> Words:
    """Take `package.module:callable` or `path/net.py:Net` apart. Raises UsageError."""
    place, colon, name = text.rpartition(":")
    if not colon or "/" in name or os.sep in name or name.endswith(".py"):
        place, name = text, ""
    place, file = os.path.expanduser(place), None
    if "/" in place or os.sep in place or place.endswith(".py"):
        file, place = os.path.abspath(place), _stem(place)
    attributes = tuple(name.split(".")) if name else ()
    bad = [word for word in attributes if not word.isidentifier()]
    if bad or not place or (file is None and not all(map(str.isidentifier, place.split(".")))):
        raise UsageError(f"'{text}' names no model: write package.module:Net or path/net.py:Net")
    return Words(text, place, file, attributes)


def _stem(path: str) -> str:
    stem = os.path.basename(os.path.normpath(path)).removesuffix(".py")
    return "".join(c if c.isalnum() or c == "_" else "_" for c in stem)


def find(words: Words) -> Any:
    """Import the module and follow the attributes. Raises UsageError and ModelError."""
    module = _import(words)
    if not words.attributes:
        hint = f"write {words.text.rstrip(':')}:NAME; {instead('', _offers(module))}"
        raise UsageError(f"'{words.text}' names no class or function", hint=hint)
    found: Any = module
    for depth, name in enumerate(words.attributes):
        inner = getattr(found, name, _NOTHING)
        if inner is _NOTHING:
            owner = ".".join([words.module, *words.attributes[:depth]])
            near = instead(name, _offers(found), dir(found)) or None
            raise UsageError(f"{owner} has no '{name}'", hint=near)
        found = inner
    return found


def _offers(owner: Any) -> list[str]:
    """Callables that a module defines itself, else all it has; or what a class has."""
    things = getattr(owner, "__dict__", {})
    named = [name for name, it in things.items() if name[0] != "_" and callable(it)]
    if not isinstance(owner, ModuleType):
        return named
    own = [n for n in named if getattr(things[n], "__module__", None) in (owner.__name__, None)]
    return own or named


@contextmanager
def surroundings(words: Words) -> Iterator[None]:
    """The path, the arguments and the current folder, all of them as before afterwards.

    First on the path is the file's own folder (its package's, where it imports by dots), then
    the current one; a script that reads its command line finds no words of ours there.
    """
    path, argv, here = list(sys.path), list(sys.argv), os.getcwd()
    own = [folder for folder in (_package_folder(words), _own_folder(words)) if folder]
    sys.path[:0] = [*own, here]
    sys.argv[:] = [words.file or words.module]
    try:
        yield
    finally:
        sys.path[:], sys.argv[:] = path, argv
        if os.getcwd() != here:
            os.chdir(here)


def _own_folder(words: Words) -> str | None:
    return os.path.dirname(words.file) if words.file else None


def _import(words: Words) -> ModuleType:
    folders = [os.getcwd(), *filter(None, [_own_folder(words)])]
    _forget_earlier(folders)
    before = set(sys.modules)
    try:
        return _import_file(words) if words.file else _import_dotted(words)
    except CkptError:
        raise
    except (Exception, SystemExit) as error:
        raise failed(f"importing {words.module}", error) from error
    finally:
        _remember(before, folders)


def _import_dotted(words: Words) -> ModuleType:
    try:
        return import_module(words.module)
    except ModuleNotFoundError as error:
        missing = error.name or ""
        if words.module != missing and not words.module.startswith(f"{missing}."):
            raise
        above, _, last = missing.rpartition(".")
        known = getattr(sys.modules.get(above), "__path__", None) if above else [os.getcwd()]
        there = [row.name for row in iter_modules(known or [])]
        owner = f"{above} has" if above else "there is"
        near = instead(last, there) or "a file is named by its path: path/net.py:Net"
        raise UsageError(f"{owner} no module '{last}'", hint=near) from error


def _import_file(words: Words) -> ModuleType:
    file = words.file or ""
    if os.path.isdir(file):
        file = os.path.join(file, "__init__.py")
    if not os.path.isfile(file):
        folder = os.path.dirname(file)
        there = [name for name in _listed(folder) if name.endswith(".py")]
        hint = instead(os.path.basename(file), there) or None
        raise UsageError("no such file", path=shown_path(file), hint=hint)
    package = _package_folder(words)
    if package:
        return _import_member(package, file)
    return _import_alone(words.module, file)


def _listed(folder: str) -> list[str]:
    return os.listdir(folder) if os.path.isdir(folder) else []


def _import_alone(name: str, file: str) -> ModuleType:
    """A file as a module of its own. Its name is taken from nobody: torch.py stays a neighbour."""
    if name in _BROUGHT and _BROUGHT[name].file == file and name in sys.modules:
        return sys.modules[name]
    if name in sys.modules:
        name = f"_ckptool_spec_{name}"
    spec = spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise UsageError("not a Python file (.py)", path=shown_path(file))
    module = module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        sys.modules.pop(name, None)
        raise
    return module


def _import_member(folder: str, file: str) -> ModuleType:
    """A file that imports by dots, as the member of its package that it is."""
    inside = os.path.relpath(file, folder).removesuffix(".py").replace(os.sep, ".")
    name = inside.removesuffix(".__init__")
    module = import_module(name)
    if os.path.realpath(getattr(module, "__file__", None) or "") != os.path.realpath(file):
        raise UsageError(
            f"another module named '{name}' is imported already: {module.__file__}",
            path=shown_path(file),
        )
    return module


def _package_folder(words: Words) -> str | None:
    """The folder above the package of a file that imports by dots (`from .blocks import …`);
    None where it stands alone.
    """
    file = words.file or ""
    if os.path.isdir(file):
        file = os.path.join(file, "__init__.py")
    if not os.path.isfile(file) or not (
        os.path.basename(file) == "__init__.py" or _imports_by_dots(file)
    ):
        return None
    folder = os.path.dirname(os.path.dirname(file))
    while os.path.isfile(os.path.join(folder, "__init__.py")):
        folder = os.path.dirname(folder)
    return folder


def _imports_by_dots(file: str) -> bool:
    from importlib.machinery import SourceFileLoader

    try:
        source = SourceFileLoader("spec", file).get_source("spec") or ""
        tree = ast.parse(source)
    except (SyntaxError, ImportError, ValueError):
        return False  # importing it will say so, with the line
    return any(isinstance(node, ast.ImportFrom) and node.level for node in ast.walk(tree))


def _forget_earlier(folders: list[str]) -> None:
    """Modules that an earlier SPEC brought in go when one of them has changed on disk, or this
    one looks elsewhere: two nets may each have their own `utils`, a net is edited between two looks.
    """
    rows = _BROUGHT.values()
    if all(row.folders == folders and row.stamp == _stamp(row.file) for row in rows):
        return
    for name, row in _BROUGHT.items():
        if getattr(sys.modules.get(name), "__file__", None) == row.file:
            del sys.modules[name]
    _BROUGHT.clear()


def _remember(before: set[str], folders: list[str]) -> None:
    for name in set(sys.modules) - before:
        file = getattr(sys.modules[name], "__file__", None)
        if (
            isinstance(file, str)
            and file.endswith(".py")
            and is_own(file)
            and _below(file, folders)
        ):
            _BROUGHT[name] = _Brought(file, _stamp(file), folders)


def _below(file: str, folders: list[str]) -> bool:
    return any(os.path.abspath(file).startswith(os.path.join(folder, "")) for folder in folders)


def _stamp(file: str) -> tuple[int, int]:
    try:
        found = os.stat(file)
    except OSError:
        return 0, 0
    return found.st_mtime_ns, found.st_size
