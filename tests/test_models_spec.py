"""`--model SPEC`: what is found, how it is built, and the sentence where it cannot be."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from ckptool.errors import CkptError, ModelError, UsageError
from ckptool.models.spec import build, literal

pytestmark = pytest.mark.filterwarnings("ignore")

NET = """
import functools
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self, width=3, depth=1, **rest):
        super().__init__()
        if depth > 9:
            raise ValueError("too deep\\nfor this net")
        self.body = nn.Sequential(*[nn.Linear(width, width) for _ in range(depth)])
        self.rest = rest

    @classmethod
    def small(cls):
        return cls(1)

class Outer:
    Inner = Net

def drop_path(depths=(1, 2)):
    return Net(sum(1 for rate in torch.full((sum(depths),), 0.1) if rate.item() >= 0))

def needs(width, height):
    return Net(width)

def on_a_gpu():
    return Net().cuda()

def with_optimizer():
    net = Net()
    return net, torch.optim.SGD(net.parameters(), 0.1)

def imports_late():
    import not_there.at_all

def negative():
    return nn.Linear(-1, 2)

def leaves():
    raise SystemExit(3)

def wrapped():
    return nn.DataParallel(Net())

half = functools.partial(Net, width=2)
made = Net(5)
with torch.device("meta"):
    made_on_meta = Net(5)
NUMBER = 7
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A current folder with net.py in it."""
    (tmp_path / "net.py").write_text(NET)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def line_of(text):
    return next(n for n, line in enumerate(NET.splitlines(), 1) if text in line)


def widths(model):
    return [tuple(p.shape) for p in model.parameters()]


@pytest.mark.parametrize(
    ("spec", "arguments", "width", "name"),
    [
        ("net:Net", {}, 3, "net.Net()"),
        ("net.py:Net", {"width": "4"}, 4, "net.Net(width=4)"),
        ("./net.py:Net.small", {}, 1, "net.Net.small()"),
        ("net:Outer.Inner", {"width": "2", "tag": "x"}, 2, "net.Outer.Inner(width=2, tag='x')"),
        ("net:half", {}, 2, "net.half()"),
        ("net:wrapped", {}, 3, "net.wrapped()"),
    ],
)
def test_what_a_spec_can_name(folder, spec, arguments, width, name):
    built = build(spec, arguments)

    assert widths(built.model) == [(width, width), (width,)]
    assert (built.on_meta, built.notes, built.name) == (True, (), name)
    assert all(p.is_meta for p in built.model.parameters())


def test_an_installed_class():
    built = build("torch.nn:Linear", {"in_features": "2", "out_features": "3", "bias": "False"})
    assert widths(built.model) == [(3, 2)]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("10", 10), (" 3", 3), ("-1e-3", -0.001), ("[2, [2]]", [2, [2]]), ("{'a': (1,)}", {"a": (1,)}),
        ("True", True), ("None", None), ("'10'", "10"), ("relu", "relu"), ("", ""), ("a-b", "a-b"),
        ("__import__('os')", "__import__('os')"), ("(" * 500, "(" * 500), ("1 +", "1 +"),
    ],
)  # fmt: skip
def test_arguments_are_literals_or_texts(text, value):
    assert literal(text) == value
    assert type(literal(text)) is type(value)


def test_a_word_that_is_no_python_is_said(folder):
    built = build("net:Net", {"pretrained": "false", "width": "2", "mode": "none", "is": "'true'"})

    assert built.model.rest["pretrained"] == "false"
    assert [(note.slug, note.text) for note in built.notes] == [
        (
            "model-arg-text",
            "--model-arg pretrained=false gives the text 'false'; Python's word is False",
        ),
        ("model-arg-text", "--model-arg mode=none gives the text 'none'; Python's word is None"),
    ]


def test_a_model_that_needs_numbers_is_built_on_the_cpu(folder):
    torch.manual_seed(1)
    before = torch.get_rng_state()
    built = build("net:drop_path")

    assert widths(built.model) == [(3, 3), (3,)]
    assert not any(p.is_meta for p in built.model.parameters())
    assert built.on_meta is False
    (note,) = built.notes
    assert note.slug == "model-on-cpu"
    assert note.text.startswith("net.drop_path() was built on the CPU, since it needs numbers: ")
    assert note.text.endswith(f"(net.py, line {line_of('torch.full')})")
    assert torch.equal(torch.get_rng_state(), before)


def test_a_net_that_the_module_made(folder):
    built, meta = build("net:made"), build("net:made_on_meta")

    assert (built.on_meta, [note.slug for note in built.notes]) == (False, ["model-on-cpu"])
    assert (meta.on_meta, meta.notes) == (True, ())
    with pytest.raises(UsageError, match="ready-made net: --model-arg has nothing to go to"):
        build("net:made", {"width": "3"})


WRONG = [
    ("net:Nett", {}, UsageError, None, "net has no 'Nett'", "did you mean 'Net'? there is: Net, Outer, "),
    ("net:net", {}, UsageError, None, "net has no 'net'", "did you mean 'Net'?"),
    ("net:Net.smal", {}, UsageError, None, "net.Net has no 'smal'", "did you mean 'small'?"),
    ("net", {}, UsageError, None, "'net' names no class or function", "write net:NAME; there is: Net"),
    ("net.py:", {}, UsageError, None, "'net.py:' names no class or function", "write net.py:NAME"),
    ("nnet:Net", {}, UsageError, None, "there is no module 'nnet'", "did you mean 'net'? there is: net"),
    ("torch.nnn:Net", {}, UsageError, None, "torch has no module 'nnn'", "did you mean 'nn'?"),
    ("nett.py:Net", {}, UsageError, "nett.py", "no such file", "did you mean 'net.py'?"),
    ("a/b/net.py:Net", {}, UsageError, "a/b/net.py", "no such file", None),
    ("a b:Net", {}, UsageError, None, "'a b:Net' names no model", None),
    ("net:Net()", {}, UsageError, None, "'net:Net()' names no model", None),
    ("", {}, UsageError, None, "'' names no model", None),
    ("net:NUMBER", {}, UsageError, None, "net.NUMBER is an int, not a torch.nn.Module", None),
    ("net:with_optimizer", {}, UsageError, None, "gives a tuple (Net, SGD), not a torch.nn.Module", None),
    ("net:imports_late", {}, ModelError, "net.py", f"imports 'not_there', which is not installed for {sys.executable}", "install"),
    ("net:needs", {"width": "1"}, UsageError, None, "net.needs: missing a required argument: 'height'", "net.needs(width, height)"),
    ("net:needs", {"depth": "1"}, UsageError, None, "net.needs: ", "--model-arg NAME=VALUE"),
    ("net:Net", {"depth": "17"}, ModelError, "net.py", f"line {line_of('raise ValueError')}: net.Net(depth=17) raised ValueError: too deep", None),
    ("net:on_a_gpu", {}, ModelError, "net.py", f"line {line_of('.cuda()')}: net.on_a_gpu() raised AssertionError: Torch not", "the model asks for a GPU"),
    ("net:negative", {}, ModelError, "net.py", f"line {line_of('Linear(-1')}: net.negative() raised RuntimeError", None),
    ("net:leaves", {}, ModelError, "net.py", "net.leaves() ended the program", "__main__"),
]  # fmt: skip


@pytest.mark.parametrize(("spec", "arguments", "kind", "path", "text", "hint"), WRONG, ids=[f"{row[0]} {row[1]}" for row in WRONG])  # fmt: skip
def test_what_cannot_be_built_is_said(folder, spec, arguments, kind, path, text, hint):
    if "cuda" in text and torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(CkptError) as caught:
        build(spec, arguments)

    error = caught.value
    assert type(error) is kind
    assert text in error.text
    assert "\n" not in error.text
    assert (error.path, error.exit_status) == (path, 2)
    assert hint is None or hint in error.hint


MODULES = {
    "broken": ("x = 1\ndef (:\n", "line 2: importing broken raised SyntaxError: ", None),
    "wants": ("import os\nimport nowhere.inside\n", f"line 2: imports 'nowhere', which is not installed for {sys.executable}", "install what provides it there"),
    "older": ("from torch.nn import Conv9d\n", "line 1: importing older raised ImportError: cannot import name 'Conv9d'", None),
    "script": ("import argparse\nargparse.ArgumentParser().parse_args(['--x'])\n", "line 2: importing script ended the program", "if __name__ == '__main__'"),
}  # fmt: skip


@pytest.mark.parametrize("name", MODULES)
@pytest.mark.parametrize("form", ["{}:Net", "{}.py:Net"])
def test_what_cannot_be_imported_is_said(folder, name, form):
    source, text, hint = MODULES[name]
    (folder / f"{name}.py").write_text(source)

    with pytest.raises(ModelError) as caught:
        build(form.format(name))

    assert text in caught.value.text
    assert caught.value.path == f"{name}.py"
    assert hint is None or hint in caught.value.hint
    assert name not in sys.modules


def test_a_module_of_the_project_that_is_further_up_is_pointed_at(folder, monkeypatch):
    (folder / "lib").mkdir()
    (folder / "sub").mkdir()
    (folder / "sub" / "deep.py").write_text("import blocks\n")
    (folder / "blocks.py").write_text("")
    monkeypatch.chdir(folder / "lib")

    with pytest.raises(ModelError) as caught:
        build("../sub/deep.py:Net")

    assert caught.value.text == "line 1: imports 'blocks', which is not on the path"
    assert caught.value.hint == f"'blocks' is in {folder}: run ckptool in that folder"


SMALL = "from torch import nn\nimport {helper}\nclass Net(nn.Linear):\n    def __init__(self):\n        super().__init__({helper}.WIDTH, 1)\n"


def project(place, width):
    place.mkdir(parents=True)
    (place / "helper_of_net.py").write_text(f"WIDTH = {width}\n")
    (place / "same.py").write_text(SMALL.format(helper="helper_of_net"))


def test_a_file_has_its_neighbours_and_the_current_folder(folder):
    project(folder / "a", 4)
    project(folder / "b", 5)
    (folder / "a" / "far.py").write_text(SMALL.format(helper="top_of_net"))
    (folder / "top_of_net.py").write_text("WIDTH = 6\n")

    found = [
        widths(build(f"{spec}:Net").model)[0][1]
        for spec in ("a/same.py", "b/same.py", "a/same.py", "a/far.py")
    ]

    assert found == [4, 5, 4, 6]


def test_a_net_that_was_edited_is_read_again(folder):
    project(folder / "c", 4)
    build("c/same.py:Net")
    helper = folder / "c" / "helper_of_net.py"
    helper.write_text("WIDTH = 17\n")
    os.utime(helper, ns=(1, 1))

    assert widths(build("c/same.py:Net").model)[0] == (1, 17)


def test_a_file_that_imports_by_dots_is_a_member_of_its_package(folder):
    place = folder / "code" / "pack_of_nets" / "inner"
    place.mkdir(parents=True)
    (place / "__init__.py").write_text("")
    (place.parent / "__init__.py").write_text("WIDTH = 8\n")
    (place / "dots.py").write_text(
        SMALL.format(helper="os").replace("os.W", "W").replace("import os", "from .. import WIDTH")
    )

    built = build("code/pack_of_nets/inner/dots.py:Net")

    assert type(built.model).__module__ == "pack_of_nets.inner.dots"
    assert widths(built.model)[0] == (1, 8)


def test_a_name_of_another_module_is_not_taken(folder):
    (folder / "torch.py").write_text("from torch import nn\nNet = nn.Identity\n")

    assert type(build("torch.py:Net").model) is torch.nn.Identity
    assert sys.modules["torch"] is torch


def test_surroundings_are_as_before(folder):
    (folder / "moves.py").write_text(
        "import os, sys\nfrom torch import nn\nos.mkdir('x'); os.chdir('x')\nsys.path.append('y')\n"
        "ARGS = list(sys.argv)\nsys.argv.append('z')\nclass Net(nn.Identity):\n    args = ARGS\n"
    )
    path, argv = list(sys.path), list(sys.argv)

    built = build("moves.py:Net")

    assert built.model.args == [str(folder / "moves.py")]
    assert (sys.path, sys.argv, Path.cwd()) == (path, argv, folder)


LOUD = """
import os, sys
print("python")
os.system("echo child")
os.write(1, b"descriptor\\n")
from torch import nn
class Net(nn.Linear):
    def __init__(self):
        super().__init__(1, 1)
        print("made", file=sys.stdout)
"""


def test_prints_of_the_module_go_to_stderr(folder):
    (folder / "loud.py").write_text(LOUD)
    code = (
        "import sys; sys.stdout.write('data '); from ckptool.models.spec import build\n"
        "print(build('loud:Net').name)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert done.stdout == "data loud.Net()\n"
    assert done.stderr.split() == ["python", "child", "descriptor", "made"]


def test_without_torch_it_says_so(folder):
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "from ckptool.errors import CkptError\n"
        "for name in ('spec', 'expected'):\n"
        "    try: __import__(f'ckptool.models.{name}')\n"
        "    except CkptError as error: print(error.slug, error.text, '|', error.hint)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    said = (
        "torch-missing this needs torch, which is not installed here | pip install 'ckptool[torch]'"
    )
    assert done.stdout.splitlines() == [said, said]
