"""What docs/ and the Chinese README show works: each command and block is run, in order, each
section in a folder of its own, and prints what stands below it.
"""

from __future__ import annotations

import contextlib
import importlib
import re
import shutil
import sys

import pytest
import torch
from readme_support import (
    ROOT,
    Reader,
    Step,
    ci_block,
    commands,
    is_shown,
    options_known,
    options_named,
    sections,
    steps,
)
from torch import distributed, nn

GUIDE, CHINESE = "docs/guide.md", "README.zh-CN.md"
TEXTS = {name: (ROOT / name).read_text(encoding="utf-8") for name in (GUIDE, CHINESE)}
README = (ROOT / "README.md").read_text(encoding="utf-8")
SECTIONS = [
    pytest.param(name, found, id=f"{name}, section {number}")
    for name, text in TEXTS.items()
    for number, (_, found) in enumerate(sections(text))
    if found
]


@contextlib.contextmanager
def reading(document, folder):
    """A reader who works in `folder` and imports its net.py."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.syspath_prepend(str(folder))
        patch.delitem(sys.modules, "net", raising=False)
        try:
            yield Reader(document, folder)
        finally:
            sys.modules.pop("net", None)


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    """The folder and the names after the guide's first section, where all others begin."""
    folder = tmp_path_factory.mktemp("start")
    title, found = sections(TEXTS[GUIDE])[1]
    assert title == "The net of the examples"
    with reading(GUIDE, folder) as reader:
        for step in found:
            if step.kind != "inline":
                reader.do(step)
    return folder, reader.names


@pytest.mark.parametrize(("document", "found"), SECTIONS)
def test_a_section_does_what_it_shows(document, found, start, tmp_path):
    before, names = start
    folder = tmp_path / "here"
    shutil.copytree(before, folder)
    shutil.copytree(ROOT / "tests" / "fixtures", folder / "tests" / "fixtures")
    with reading(document, folder) as reader:
        reader.names.update(names, Net=importlib.import_module("net").Net)
        for step, shown in with_screens(found):
            printed = reader.do(step, raises=shown is not None)

            if shown is not None:
                assert is_shown(shown.text, printed), f"{document}:{shown.line}\n{printed}"


def with_screens(found: list[Step]) -> list[tuple[Step, Step | None]]:
    """Each block that is run, and the text right after it."""
    after = [*found[1:], None]
    return [
        (step, then if then is not None and then.kind == "text" else None)
        for step, then in zip(found, after, strict=True)
        if step.kind != "text"
    ]


@pytest.mark.parametrize("document", TEXTS)
def test_every_screen_is_of_the_block_right_above_it(document):
    lines = TEXTS[document].splitlines()
    for step in steps(TEXTS[document]):
        assert step.kind in ("bash", "python", "inline", "text")
        if step.kind == "text":
            assert lines[step.line - 2] == "```", f"{document}:{step.line}"


def test_the_guide_shows_enough():
    kinds = [step.kind for step in steps(TEXTS[GUIDE])]

    assert len(commands(TEXTS[GUIDE])) > 20
    assert kinds.count("python") > 20
    assert kinds.count("text") > 25


def test_a_screen_that_differs_is_found():
    printed = (
        "a.pth -> b.pth   5.0 kB in 0.03 s\n  keys      7 renamed, much more\n\x1b[1mx\x1b[0m\n"
    )

    assert is_shown("a.pth -> b.pth   5.0 kB in 0.01 s\n  keys      7 renamed, …\nx\n", printed)
    assert is_shown("a.pth …\n…\n", printed)
    assert not is_shown("a.pth -> b.pth   5.0 kB in 0.01 s\n", printed)
    assert not is_shown("a.pth -> b.pth   5.0 kB in 0.01 s\n  keys      8 renamed, …\nx\n", printed)
    assert not is_shown("", printed)


def test_an_error_that_is_not_shown_stops_the_reader(tmp_path):
    with reading("x.md", tmp_path) as reader:
        with pytest.raises(ZeroDivisionError):
            reader.do(Step("python", "1 / 0\n", "", 1))
        with pytest.raises(AssertionError, match="no such file"):
            reader.do(Step("bash", "ckptool inspect absent.pth\n", "", 1))
        with pytest.raises(AssertionError, match="who runs"):
            reader.do(Step("bash", "rm net.pth\n", "", 1))

        assert reader.do(Step("python", "1 / 0\n", "", 1), raises=True).startswith("ZeroDivision")


@pytest.mark.parametrize("document", TEXTS)
def test_every_option_a_document_names_exists(document, tmp_path):
    named = options_named(TEXTS[document])

    assert "--to-cpu" in named
    assert named - options_known(tmp_path) == set()


@pytest.mark.parametrize("document", TEXTS)
def test_every_link_leads_somewhere(document):
    links = re.findall(r"\]\(([^)\s]+)\)", TEXTS[document])
    assert links
    for link in links:
        name, _, anchor = link.partition("#")
        target = (ROOT / document).parent / name if name else ROOT / document
        assert target.exists(), link
        if anchor:
            assert anchor in anchors(target.read_text(encoding="utf-8")), link


def anchors(text):
    """As GitHub makes them: lower case, punctuation gone, blanks to hyphens."""
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("name", ["try", "test"])
def test_the_newcomers_commands_are_those_of_the_readme(name):
    assert ci_block(TEXTS[CHINESE], name) == ci_block(README, name) is not None


# -- the table of wrappers -----------------------------------------------------------------------
@pytest.fixture(name="group")
def process_group(tmp_path):
    distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1
    )
    yield
    distributed.destroy_process_group()


def test_the_wrappers_write_the_names_that_the_guide_says(group, start):
    net = start[1]["Net"]
    ddp = nn.parallel.DistributedDataParallel
    made = {
        "`nn.DataParallel(net)`, `DistributedDataParallel(net)`": (nn.DataParallel, ddp),
        "`torch.compile(net)`": (torch.compile,),
        "`torch.compile(DistributedDataParallel(net))`": (lambda net: torch.compile(ddp(net)),),
        "`DistributedDataParallel(torch.compile(net))`": (lambda net: ddp(torch.compile(net)),),
    }
    for row, wrappers in made.items():
        shown = re.search(rf"^\| {re.escape(row)} \| `(.*)` \|$", TEXTS[GUIDE], re.MULTILINE)
        assert shown, row
        for wrap in wrappers:
            assert next(iter(wrap(net()).state_dict())) == shown[1]
