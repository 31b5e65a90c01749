"""Ties on the way to .safetensors and back; what the format cannot hold is refused by name."""

from __future__ import annotations

import argparse
from collections import OrderedDict

import pytest
import safetensors.torch
import torch
from container_support import (
    Tied,
    convert,
    header,
    metadata,
    promise_kept,
    same_weights,
    st_loaded,
    ties,
)
from formats_support import archive, dictionary, pickled, tensor, tup
from verbs_support import cli, left_alone, load, notes

from ckptool.errors import KeyCollision, Unsupported


@pytest.fixture
def tied(tmp_path):
    """The file of a tied module."""
    torch.manual_seed(0)
    net = Tied()
    torch.save({"model": net.state_dict(), "epoch": 1}, tmp_path / "net.pth")
    return net, tmp_path / "net.pth", tmp_path / "net.safetensors"


# -- ties --------------------------------------------------------------------------------------
def test_an_alias_file_loads_with_load_model(tied, capsys):
    net, path, out = tied
    status, _, err = cli(capsys, "convert", path, "-o", out)

    assert status == 0
    assert "head.weight = emb.weight written once: load with safetensors.torch.load_model, or --tied duplicate" in err  # fmt: skip
    assert set(st_loaded(out)) == {"emb.weight", "norm.weight", "norm.bias"}
    assert metadata(out)["head.weight"] == "emb.weight"
    other = Tied()
    assert safetensors.torch.load_model(other, out) == (set(), [])
    same_weights(net.state_dict(), other.state_dict())
    assert other.head.weight is other.emb.weight


def test_an_alias_comes_back_as_one_storage_where_it_stood(tied, tmp_path):
    net, path, out = tied
    convert(path, out)
    convert(out, tmp_path / "back.pth")
    convert(tmp_path / "back.pth", tmp_path / "again.safetensors")

    after = promise_kept(tmp_path / "back.pth")
    same_weights(net.state_dict(), after)
    assert ties(after) == [["emb.weight", "head.weight"]]
    assert out.read_bytes() == (tmp_path / "again.safetensors").read_bytes()


def test_a_tie_that_save_model_wrote_comes_back(tied, tmp_path):
    net, _, out = tied
    safetensors.torch.save_model(net, out)
    convert(out, tmp_path / "back.pth")

    after = promise_kept(tmp_path / "back.pth")
    assert sorted(ties(after)[0]) == ["emb.weight", "head.weight"]
    Tied().load_state_dict(after, strict=True)


def test_duplicate_writes_every_name(tied, tmp_path):
    net, path, out = tied
    done = convert(path, out, tied="duplicate")
    convert(out, tmp_path / "back.pth")

    same_weights(net.state_dict(), promise_kept(tmp_path / "back.pth"), tied=False)
    assert list(st_loaded(out)) == list(net.state_dict())
    assert "head.weight" not in metadata(out)
    assert any(note.slug == "tied" and "head.weight" in note.text for note in done.notes)
    assert ties(load(tmp_path / "back.pth")) == []


def test_error_names_the_two(tied, tmp_path):
    _, path, out = tied
    with pytest.raises(Unsupported, match=r"'emb\.weight' and 'head\.weight'"):
        convert(path, out, tied="error")

    left_alone(tmp_path, "net.pth")
    convert(path, out, tied="error", drop="head.*")
    assert "head.weight" not in st_loaded(out)


def test_ties_of_three_and_their_places(tmp_path):
    w, v = torch.arange(6.0).view(2, 3), torch.arange(4.0)
    sd = OrderedDict(a=w, one=v, b=w.view(2, 3), x=torch.ones(1), c=w.view(2, 3), two=v[:], t=w.t())
    torch.save(sd, tmp_path / "net.pth")
    convert(tmp_path / "net.pth", tmp_path / "o.safetensors")
    convert(tmp_path / "o.safetensors", tmp_path / "back.pth")

    said = metadata(tmp_path / "o.safetensors")
    assert {k: v for k, v in said.items() if k in sd} == {"b": "a", "c": "a", "two": "one"}
    assert list(st_loaded(tmp_path / "o.safetensors")) == ["a", "one", "x", "t"]
    after = promise_kept(tmp_path / "back.pth")
    same_weights(sd, after)
    assert ties(after) == [["a", "b", "c"], ["one", "two"]]


def test_ties_under_new_names(tied, tmp_path):
    net, path, out = tied
    convert(path, out, rename=[("^head", "lm"), ("^emb", "wte")])
    convert(out, tmp_path / "a.pth")
    convert(out, tmp_path / "b.safetensors", rename={"^lm": "out"})
    convert(out, tmp_path / "c.safetensors", drop="wte.*")

    assert metadata(out)["lm.weight"] == "wte.weight"
    assert ties(promise_kept(tmp_path / "a.pth")) == [["wte.weight", "lm.weight"]]
    assert metadata(tmp_path / "b.safetensors")["out.weight"] == "wte.weight"
    assert "lm.weight" not in metadata(tmp_path / "b.safetensors")
    alone = st_loaded(tmp_path / "c.safetensors")
    assert torch.equal(alone["lm.weight"], net.emb.weight)
    assert "lm.weight" not in metadata(tmp_path / "c.safetensors")


def test_partial_overlaps_are_written_twice(tmp_path):
    """R72: slices of one buffer are no ties; nor are overlaps, the same numbers in another shape."""
    base = torch.arange(12.0)
    sd = OrderedDict(
        flat=base, a=base[:5], b=base[3:9], grid=base.view(3, 4), t=base.view(3, 4).t()
    )
    torch.save(sd, tmp_path / "net.pth")
    done = convert(tmp_path / "net.pth", tmp_path / "o.safetensors", tied="error")
    convert(tmp_path / "o.safetensors", tmp_path / "back.pth")

    same_weights(sd, st_loaded(tmp_path / "o.safetensors"), tied=False)
    same_weights(sd, promise_kept(tmp_path / "back.pth"))
    assert "tied" not in notes(done)


def test_empty_tensors_and_equal_values_are_no_ties(tmp_path):
    nothing = torch.empty(0, 3)
    sd = OrderedDict(a=nothing, b=nothing, c=torch.ones(2), d=torch.ones(2))
    torch.save(sd, tmp_path / "net.pth")
    convert(tmp_path / "net.pth", tmp_path / "o.safetensors", tied="error")

    same_weights(sd, st_loaded(tmp_path / "o.safetensors"))


def test_a_tie_named_format_is_written_twice(tmp_path):
    """`__metadata__` says `format: pt`: it cannot also say what the tensor 'format' is."""
    w = torch.arange(3.0)
    torch.save(OrderedDict(w=w, format=w), tmp_path / "net.pth")
    convert(tmp_path / "net.pth", tmp_path / "o.safetensors")

    assert metadata(tmp_path / "o.safetensors")["format"] == "pt"
    assert torch.equal(st_loaded(tmp_path / "o.safetensors")["format"], w)


# -- what the format cannot hold ---------------------------------------------------------------
def quantized():
    return torch.quantize_per_tensor(torch.arange(4.0), 0.5, 0, torch.qint8)


def conjugate():
    return (torch.ones(2) * 1j).conj()


def nested():
    return torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])


ODD = {
    "quantized": (quantized, "quantized"),
    "sparse": (lambda: torch.eye(3).to_sparse(), "sparse"),
    "csr": (lambda: torch.eye(3).to_sparse_csr(), "sparse"),
    "nested": (nested, "nested"),
    "conjugate": (conjugate, "conj"),
    "negative": (lambda: conjugate().imag, "neg"),
    "complex128": (lambda: torch.ones(2, dtype=torch.complex128), "complex128"),
    "complex32": (lambda: torch.ones(2, dtype=torch.complex32), "complex32"),
    "meta": (lambda: torch.empty(2, 3, device="meta"), "meta"),
    "stride bomb": (lambda: torch.ones(1).expand(1 << 20, 1 << 20), "1,099,511,627,776 elements over 4 bytes"),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore::UserWarning")  # torch on its own quantized and sparse tensors
@pytest.mark.parametrize("kind", ODD)
def test_what_cannot_be_held_is_refused_by_name_and_left_out_when_asked(kind, tmp_path):
    make, word = ODD[kind]
    sd = OrderedDict([("good.w", torch.ones(2)), ("odd.w", make()), ("good.b", torch.zeros(1))])
    torch.save(sd, tmp_path / "net.pth")
    with pytest.raises(Unsupported, match=word) as caught:
        convert(tmp_path / "net.pth", tmp_path / "o.safetensors")

    assert "odd.w" in str(caught.value)
    assert "--drop" in caught.value.hint
    left_alone(tmp_path, "net.pth")
    done = convert(tmp_path / "net.pth", tmp_path / "o.safetensors", only="good.*")
    assert done.dropped == ("odd.w",)
    del sd["odd.w"]
    same_weights(sd, st_loaded(tmp_path / "o.safetensors"))
    convert(tmp_path / "net.pth", tmp_path / "p.safetensors", drop="odd")
    same_weights(sd, st_loaded(tmp_path / "p.safetensors"))


ODD_KEYS = {3: "'3'", ("a", 1): "'(a, 1)'", True: "'True'", None: "'None'", 1.5: "'1.5'"}


@pytest.mark.parametrize("key", ODD_KEYS, ids=repr)
def test_keys_that_are_no_text_are_refused(key, tmp_path):
    """A number would come back as text."""
    torch.save({"w": torch.ones(2), key: torch.zeros(3), "v": torch.ones(1)}, tmp_path / "net.pth")
    with pytest.raises(Unsupported, match="no text") as caught:
        convert(tmp_path / "net.pth", tmp_path / "o.safetensors")

    assert f"(key {ODD_KEYS[key]})" in str(caught.value)
    left_alone(tmp_path, "net.pth")
    convert(tmp_path / "net.pth", tmp_path / "o.safetensors", only=["w", "v"])
    assert set(st_loaded(tmp_path / "o.safetensors")) == {"w", "v"}


@pytest.mark.parametrize("key", ODD_KEYS, ids=repr)
def test_keys_that_are_no_text_in_a_pth(key, tmp_path):
    """Dropped where a rule says so; no new name is made up for them."""
    torch.save({"w": torch.ones(2), key: torch.zeros(3), "v": torch.ones(1)}, tmp_path / "net.pth")
    done = convert(tmp_path / "net.pth", tmp_path / "o.pth", only=["w", "v"])
    assert (len(done.dropped), list(load(tmp_path / "o.pth"))) == (1, ["w", "v"])

    convert(tmp_path / "net.pth", tmp_path / "p.pth", rename={"^w$": "x"})
    assert list(load(tmp_path / "p.pth")) == ["x", key, "v"]
    done = convert(tmp_path / "net.pth", tmp_path / "q.pth", add_prefix="net.")
    assert list(load(tmp_path / "q.pth")) == ["net.w", key, "net.v"]
    if type(key) is int:
        assert done.renames == {"w": "net.w", "v": "net.v"}
        assert "odd-keys" in notes(done)


@pytest.mark.parametrize("key", ["__metadata__", "a\ud800b", "ckptool.alias_places"])
def test_names_that_the_format_cannot_have(key, tmp_path, capsys):
    torch.save({"w": torch.ones(2), key: torch.zeros(3)}, tmp_path / "net.pth")
    with pytest.raises(Unsupported) as caught:
        convert(tmp_path / "net.pth", tmp_path / "o.safetensors")

    assert caught.value.key == key
    status, out, err = cli(
        capsys, "convert", tmp_path / "net.pth", "-o", tmp_path / "o.safetensors"
    )
    assert (status, out) == (2, "")
    assert key.replace("\ud800", "\\ud800") in err
    left_alone(tmp_path, "net.pth")
    convert(tmp_path / "net.pth", tmp_path / "o.safetensors", only="w")
    assert set(st_loaded(tmp_path / "o.safetensors")) == {"w"}
    convert(tmp_path / "net.pth", tmp_path / "p.safetensors", rename_keys={key: "fine"})
    assert set(st_loaded(tmp_path / "p.safetensors")) == {"w", "fine"}


def test_a_storage_of_two_types_is_refused_by_name(tmp_path):
    """Torch saves no such file; another hand may."""
    long = tup("storage", b"ctorch\nLongStorage\n", "0", "cpu", 3) + b"Q"
    two = dictionary(("f", tensor()), ("i", tensor(long, 0, (3,), (1,))), ("w", tensor()))
    (tmp_path / "net.pth").write_bytes(archive(pickled(two)))
    with pytest.raises(Unsupported, match="another dtype"):
        convert(tmp_path / "net.pth", tmp_path / "o.safetensors")
    left_alone(tmp_path, "net.pth")


def test_a_nested_name_that_is_taken_is_refused(tmp_path):
    sd = {"aux.0": torch.ones(1), "aux": [torch.zeros(2)], "w": torch.ones(2)}
    torch.save(sd, tmp_path / "net.pth")
    with pytest.raises(KeyCollision, match=r"aux\.0"):
        convert(tmp_path / "net.pth", tmp_path / "o.safetensors")
    left_alone(tmp_path, "net.pth")


def test_a_file_without_weights_is_refused(tmp_path):
    torch.save({"epoch": 3, "args": argparse.Namespace(lr=1.0)}, tmp_path / "net.pth")
    with pytest.raises(Unsupported, match="nothing to write"):
        convert(tmp_path / "net.pth", tmp_path / "o.safetensors")
    left_alone(tmp_path, "net.pth")


def test_several_state_dicts_come_out_one_by_one(tmp_path):
    obj = {"params": {"w": torch.ones(2)}, "params_ema": {"w": torch.zeros(2)}, "step": 3}
    torch.save(obj, tmp_path / "net.pth")
    done = convert(tmp_path / "net.pth", tmp_path / "o.safetensors", at="params_ema")
    assert sorted(done.entries_left) == ["params", "step"]
    assert torch.equal(st_loaded(tmp_path / "o.safetensors")["w"], torch.zeros(2))

    done = convert(tmp_path / "net.pth", tmp_path / "p.safetensors", select="params")
    assert sorted(done.entries_left) == ["params_ema", "step"]
    assert header(tmp_path / "p.safetensors")[0]["w"]["shape"] == [2]
    assert torch.equal(st_loaded(tmp_path / "p.safetensors")["w"], torch.ones(2))
