"""The Python API: the words of the command line, typed, frozen, silent, lazy."""

from __future__ import annotations

import dataclasses
import inspect as introspection
import io
import os

import pytest
from verbs_support import FIXTURES, TRUTHS, assert_same, cli, left_alone, load

import ckptool
from ckptool.errors import CkptError, LimitExceeded, UsageError

DP_CUDA = FIXTURES / "dp_cuda.pth"
WEIGHTS = TRUTHS["dp_cuda.pth"]["tables"][0]["tensors"]


# -- names -------------------------------------------------------------------------------------
def test_the_public_names():
    assert dir(ckptool) == sorted(ckptool.__all__)
    for name in ckptool.__all__:
        assert getattr(ckptool, name) is not None
    assert issubclass(ckptool.CkptError, Exception)
    with pytest.raises(AttributeError, match="no attribute 'loads'"):
        _ = ckptool.loads


def test_every_option_is_keyword_only_and_documented():
    for function, positional in ((ckptool.open, 1), (ckptool.inspect, 1), (ckptool.convert, 2)):
        kinds = [p.kind for p in introspection.signature(function).parameters.values()]
        assert kinds[:positional] == [introspection.Parameter.POSITIONAL_OR_KEYWORD] * positional
        assert set(kinds[positional:]) == {introspection.Parameter.KEYWORD_ONLY}
        assert function.__doc__


# -- open --------------------------------------------------------------------------------------
def test_open_is_a_context_manager_over_a_lazy_mapping():
    with ckptool.open(DP_CUDA) as checkpoint:
        assert checkpoint.format == "torch-zip"
        assert list(checkpoint.weights) == [row["key"] for row in WEIGHTS]
        assert len(checkpoint.weights) == 9
        one = checkpoint.weights["module.fc.weight"]
        assert (one.key, one.shape, one.dtype, one.device) == (
            "module.fc.weight", (3, 8), "float32", "cuda:0",
        )  # fmt: skip
        assert (one.stride, one.size_bytes, one.requires_grad) == ((8, 1), 96, False)
        assert one.storage.count == 24
        assert repr(one) == "<float32 [3, 8] on cuda:0, 96 bytes>"
        assert repr(checkpoint.weights) == "<9 tensors>"
        assert "module.nothing" not in checkpoint.weights
        assert [extra.path[0] for extra in checkpoint.extras] == [
            "epoch", "best_acc1", "args", "optimizer",
        ]  # fmt: skip
        assert repr(checkpoint) == f"<torch-zip {str(DP_CUDA)!r}, 27 tensors>"
        with pytest.raises(KeyError):
            _ = checkpoint.weights["nothing"]


def test_open_at():
    with ckptool.open(FIXTURES / "gan.pth") as checkpoint:
        assert len(checkpoint.tables) == 2
        assert list(checkpoint.at("netD")) == [
            row["key"] for row in TRUTHS["gan.pth"]["tables"][1]["tensors"]
        ]
        with pytest.raises(UsageError, match="netX"):
            checkpoint.at("netX")


@pytest.mark.parametrize("kind", ["str", "path", "bytes", "file", "memory"])
def test_every_kind_of_place(kind):
    def places():
        if kind == "file":
            with open(DP_CUDA, "rb") as stream:
                yield stream
        else:
            yield {
                "str": str(DP_CUDA),
                "path": DP_CUDA,
                "bytes": os.fsencode(DP_CUDA),
                "memory": io.BytesIO(DP_CUDA.read_bytes()),
            }[kind]

    for place in places():
        with ckptool.open(place) as checkpoint:
            assert len(checkpoint.weights) == 9
        assert len(ckptool.inspect(place).rows) == 9
        if hasattr(place, "read"):
            assert not place.closed


def test_a_file_is_closed_also_after_an_error():
    if not os.path.isdir("/proc/self/fd"):
        pytest.skip("counts descriptors in /proc")
    before = len(os.listdir("/proc/self/fd"))
    for name in ("html.pth", "truncated.pth", "empty.pth"):
        with pytest.raises(CkptError):
            ckptool.open(FIXTURES / name)
        with pytest.raises(CkptError):
            ckptool.inspect(FIXTURES / name)
    ckptool.inspect(DP_CUDA)
    ckptool.open(DP_CUDA).close()
    assert len(os.listdir("/proc/self/fd")) == before


# -- results -----------------------------------------------------------------------------------
def test_an_inspection_is_what_the_command_prints(capsys):
    found = ckptool.inspect(DP_CUDA)

    assert f"{found}\n" == cli(capsys, "inspect", DP_CUDA)[1]
    assert isinstance(found, ckptool.Inspection)
    assert "<table" in found._repr_html_()
    assert found.to_dict()["schema"] == 1
    assert not found.could_run_code
    assert ckptool.inspect(FIXTURES / "evil.pth").could_run_code
    with pytest.raises(dataclasses.FrozenInstanceError):
        found.rows = ()


def test_inspect_of_an_open_file_is_the_same():
    with ckptool.open(DP_CUDA) as checkpoint:
        found = checkpoint.inspect(only=["fc"], sort="name")
    wanted = ckptool.inspect(DP_CUDA, only=["fc"], sort="name")

    assert isinstance(found, ckptool.Inspection)
    assert found.to_dict() == wanted.to_dict()
    assert str(found) == str(wanted)


def test_a_conversion_is_what_the_command_prints(copy, capsys):
    path = copy("dp_cuda.pth")
    done = ckptool.convert(path, to_cpu=True, dry_run=True)

    assert f"{done}\n" == cli(capsys, "convert", path, "--to-cpu", "-n")[1]
    assert isinstance(done, ckptool.Conversion)
    assert done._repr_html_().startswith("<pre>")
    assert "-&gt;" in done._repr_html_()
    assert done.to_dict()["schema"] == 1
    assert done.kept == ("epoch", "best_acc1", "args", "optimizer")
    with pytest.raises(dataclasses.FrozenInstanceError):
        done.output = "x"


def test_nothing_prints(copy, capfd):
    path = copy("dp_cuda.pth")
    ckptool.inspect(path, index=True)
    ckptool.convert(path, to_cpu=True)
    with pytest.raises(CkptError):
        ckptool.convert(path, to_cpu=True)

    assert capfd.readouterr() == ("", "")


# -- convert -----------------------------------------------------------------------------------
def test_convert_takes_and_gives_paths(copy, tmp_path):
    path = copy("net_cuda3.pth")
    done = ckptool.convert(str(path), to_gpu=1)
    assert (done.input, done.output) == (str(path), str(tmp_path / "net_cuda3.cuda1.pth"))
    done = ckptool.convert(path, tmp_path / "out.pth", map_location={"cuda:3": "cuda:0"})
    assert done.devices == {"cuda:3": "cuda:0"}
    assert_same(load(path), load(done.output))


CONTRADICTIONS = [
    ({}, "nothing to do"),
    ({"to_cpu": True, "to_gpu": 0}, "only one of"),
    ({"to_cpu": True, "map_location": {"cuda:0": "cpu"}}, "only one of"),
    ({"to_gpu": 1, "map_location": {"cuda:0": "cpu"}}, "only one of"),
    ({"to_gpu": -1}, "no GPU -1"),
    ({"strip_module": True, "add_module": True}, "contradicts"),
    ({"to_cpu": True, "keep_module": True, "strip_module": True}, "contradicts"),
    ({"to_cpu": True, "keep_module": True, "add_module": True}, "contradicts"),
    ({"strip_module": True}, "no output is named"),
]


@pytest.mark.parametrize(("options", "text"), CONTRADICTIONS)
def test_options_that_contradict(options, text, copy, tmp_path):
    path = copy("dp_cuda.pth")
    with pytest.raises(UsageError, match=text):
        ckptool.convert(path, **options)
    left_alone(tmp_path, path.name)


def test_a_rule_needs_its_path(copy, tmp_path):
    with pytest.raises(UsageError, match="--unwrap-at needs the path"):
        ckptool.convert(copy("dp_cuda.pth"), tmp_path / "out.pth", unwrap_at=[""])


def test_errors_carry_where_and_what_to_do():
    with pytest.raises(CkptError) as caught:
        ckptool.inspect(FIXTURES / "html.pth")

    error = caught.value
    assert (error.slug, error.path) == ("not-a-checkpoint", str(FIXTURES / "html.pth"))
    assert "web page" in error.hint
    assert str(error).startswith(f"{FIXTURES / 'html.pth'}: not a checkpoint")


def test_limits_can_be_given(copy):
    tight = ckptool.Limits(nesting=1)
    for call in (
        lambda: ckptool.inspect(DP_CUDA, limits=tight),
        lambda: ckptool.open(DP_CUDA, limits=tight),
        lambda: ckptool.convert(copy("dp_cuda.pth"), to_cpu=True, limits=tight),
    ):
        with pytest.raises(LimitExceeded) as caught:
            call()
        assert caught.value.slug == "limit-nesting"
