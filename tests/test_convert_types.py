"""convert --dtype and --keep-dtype: what torch's own .to() gives, bit for bit, and nothing else."""

from __future__ import annotations

from collections import OrderedDict

import pytest
import torch
from fixtures.make_fixtures import Net, element_bytes, save
from formats_support import HOOKS, archive, call, dictionary, name, pickled, storage, tensor
from parts_support import convert, loaded_every_way, moved, stored_bytes
from torch import nn
from verbs_support import (
    FIXTURES,
    LEGACY,
    assert_same,
    cli,
    left_alone,
    load,
    members,
    notes,
    save_resume,
)

import ckptool
from ckptool.errors import RuleMatchesNothing, Unsupported, UsageError

FLOATS = (
    "float64", "float32", "float16", "bfloat16",
    "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz",
)  # fmt: skip
BOTH = pytest.mark.parametrize("options", [{}, LEGACY], ids=["zip", "legacy"])


@pytest.fixture
def net(tmp_path):
    return tmp_path / "net.pth"


@pytest.fixture
def out(tmp_path):
    return tmp_path / "out.pth"


def dtype_of(name):
    return getattr(torch, name)


def numbers(dtype):
    """Every pattern of a narrow type; of a wide one all that is odd, and a run of others."""
    if dtype.itemsize == 1:
        return torch.arange(256, dtype=torch.uint8).view(dtype)
    if dtype.itemsize == 2:
        return torch.arange(-32768, 32768).to(torch.int16).view(dtype)
    single = torch.arange(-(2**31), 2**31, 65_537, dtype=torch.int64).to(torch.int32)
    odd = [0.0, -0.0, 1e-45, 3.4028235e38, 3.39e38, 448.0, 464.0, 480.0, 57344.0, 61440.0, 65504.0,
           65519.996, 65520.0, 1e300, -1e300, 1e-320, float("inf"), float("-inf"), float("nan")]  # fmt: skip
    made = torch.cat([single.view(torch.float32).double(), torch.tensor(odd).double()])
    return torch.cat([made, torch.tensor(odd[:-4], dtype=torch.float64)]).to(dtype)


# -- the numbers -------------------------------------------------------------------------------
@pytest.mark.parametrize("source", FLOATS)
def test_every_pair_is_what_torch_makes_of_it(source, net, tmp_path):
    before = OrderedDict(all=numbers(dtype_of(source)))
    before["view"] = before["all"][3:7]
    save(before, net)
    for target in FLOATS:
        pth, st = tmp_path / f"{target}.pth", tmp_path / f"{target}.safetensors"
        done = convert(net, pth, dtype=target)
        convert(net, st, dtype=target)
        made = load(pth, weights_only=True)
        with_st = safe(st)
        for key in before:
            wanted = before[key].to(dtype_of(target))
            for found in (made[key], with_st[key]):
                assert found.dtype is dtype_of(target), (target, key)
                assert patterns(found) == patterns(wanted), (target, key)
        assert made["view"].untyped_storage().data_ptr() == made["all"].untyped_storage().data_ptr()
        assert done.dtypes == ({} if target == source else {target: 2})


def patterns(one):
    """The bits; torch's NaN of bfloat16 depends on how many numbers it converts at once."""
    bits = one.contiguous().view(torch.uint8).numpy().tobytes()
    if one.dtype is torch.bfloat16:
        bits = bits.replace(b"\xc0\x7f", b"\xff\xff")
    return bits


def safe(path):
    from safetensors.torch import load_file

    return load_file(path)


@pytest.mark.parametrize("target", ["float16", "bfloat16", "float8_e4m3fn"])
def test_strided_tensors_are_cast_in_place(target, net, out):
    base = torch.arange(24.0)
    sd = OrderedDict(
        base=base, transposed=base.view(4, 6).t(), stepped=base[::2], slice=base[3:9].view(2, 3),
        last=torch.arange(16.0).view(1, 2, 2, 4).contiguous(memory_format=torch.channels_last),
        expanded=torch.tensor([3.0]).expand(2, 3), scalar=torch.tensor(5.0), empty=torch.zeros(0, 3),
        again=base,
    )  # fmt: skip
    save(sd, net)
    convert(net, out, dtype=target)

    made = loaded_every_way(out)
    assert moved(sd, made, dtype=lambda *_: dtype_of(target)) == 9
    for key, one in sd.items():
        assert (one.stride(), one.storage_offset()) == (
            made[key].stride(),
            made[key].storage_offset(),
        )
    assert made["again"] is made["base"]
    assert stored_bytes(made) == stored_bytes(sd) // 4 * dtype_of(target).itemsize


# -- what is never cast ------------------------------------------------------------------------
def everything_else():
    names = ("int64", "int32", "int16", "int8", "uint8", "bool", "complex64", "complex128",
             "uint16", "uint32", "uint64")  # fmt: skip
    sd = OrderedDict((n, torch.ones(16, dtype=torch.uint8).view(dtype_of(n))) for n in names)
    quantized = load(FIXTURES / "quantized.pth")
    sd["quantized"], sd["channels"] = quantized["per_tensor"], quantized["per_channel"]
    sd["w"] = torch.ones(3)
    return sd


@pytest.mark.parametrize("target", ["float16", "float64", "float8_e5m2"])
def test_integers_bools_complex_and_quantized_stay(target, net, out):
    sd = everything_else()
    save(sd, net)
    done = convert(net, out, dtype=target)

    made = load(out)
    assert made.pop("w").dtype is dtype_of(target)
    del sd["w"]
    for key, one in sd.items():
        assert made[key].dtype is one.dtype, key
        if one.is_quantized:
            assert torch.equal(one.int_repr(), made[key].int_repr())
            assert torch.equal(one.dequantize(), made[key].dequantize())
        else:
            assert torch.equal(one, made[key]), key
    assert done.dtypes == {target: 1}


def test_counters_of_batch_norm_stay(net, out):
    save(Net().state_dict(), net)
    convert(net, out, dtype="float16")
    made = load(out)

    assert made["bn.num_batches_tracked"].dtype is torch.int64
    plain = Net().half()
    plain.load_state_dict(made, strict=True)
    for key, one in Net().half().state_dict().items():
        assert torch.equal(one, made[key]), key
    assert made._metadata == Net().state_dict()._metadata


@BOTH
@pytest.mark.parametrize("target", ["bfloat16", "float64"])
def test_everything_beside_the_state_dict_stays(target, options, net, out):
    path = save_resume(net, **options)
    convert(path, out, dtype=target)

    before, after = load(path), load(out)
    assert {t.dtype for t in after["state_dict"].values()} == {dtype_of(target), torch.int64}
    assert moved(
        before["state_dict"], after["state_dict"],
        dtype=lambda _, one: dtype_of(target) if one.is_floating_point() else one.dtype,
    ) == len(before["state_dict"])  # fmt: skip
    del before["state_dict"], after["state_dict"]
    assert_same(before, after)
    assert after["optimizer"]["state"][0]["exp_avg"].dtype is torch.float32


def test_every_state_dict_is_cast_or_those_named(out):
    convert(FIXTURES / "gan.pth", out, dtype="float16")
    made = load(out)
    assert made["netG"]["module.fc.weight"].dtype is torch.float16
    assert made["netD"]["module.fc.weight"].dtype is torch.float16
    convert(FIXTURES / "gan.pth", out, dtype="float16", at="netD", force=True)
    made = load(out)
    assert made["netG"]["module.fc.weight"].dtype is torch.float32
    assert made["netD"]["module.fc.weight"].dtype is torch.float16


ODD = {
    "sparse": lambda: torch.eye(3).to_sparse(),
    "meta": lambda: torch.empty(3, device="meta"),
    "nested": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
    "conj": lambda: torch.ones(2, dtype=torch.complex64).conj(),
    "neg": lambda: torch.complex(torch.ones(2), torch.ones(2)).conj().imag,
    "packed": lambda: torch.arange(4, dtype=torch.uint8).view(torch.float4_e2m1fn_x2),
}


@pytest.mark.parametrize("kind", ODD)
def test_odd_kinds_are_left_and_named(kind, net, out):
    save({"odd": ODD[kind](), "w": torch.ones(2)}, net)
    done = convert(net, out, dtype="float16")

    made = load(out)
    assert made["w"].dtype is torch.float16
    assert made["odd"].dtype is ODD[kind]().dtype
    assert done.dtypes == {"float16": 1}
    if made["odd"].is_floating_point():
        (note,) = (note for note in done.notes if note.slug == "not-cast")
        assert "odd" in note.text


def test_scales_are_no_weights(net, out):
    save({"w": torch.ones(2), "scale": torch.full((3,), 2.0).to(torch.float8_e8m0fnu)}, net)
    convert(net, out, dtype="float32")

    assert load(out)["scale"].dtype in (torch.float32, torch.float8_e8m0fnu)
    assert load(out)["scale"].float().tolist() == [2, 2, 2]


# -- --keep-dtype ------------------------------------------------------------------------------
def layers():
    names = ("module.norm1.weight", "module.blocks.0.layernorm.bias", "module.fc.weight", "module.fc2.weight")  # fmt: skip
    return OrderedDict((n, torch.full((2,), 1.5)) for n in names) | {"steps": torch.tensor(3)}


KEEP = [
    (["*norm*"], {"module.norm1.weight", "module.blocks.0.layernorm.bias"}),
    (["fc"], {"module.fc.weight"}),
    (["module.fc.*", "norm1"], {"module.fc.weight", "module.norm1.weight"}),
    (["**.weight"], {"module.norm1.weight", "module.fc.weight", "module.fc2.weight"}),
    (["**"], set(list(layers())[:4])),
]


@pytest.mark.parametrize(("globs", "kept"), KEEP, ids=str)
def test_keep_dtype(globs, kept, net, out):
    save(layers(), net)
    done = convert(net, out, dtype="bf16", keep_dtype=globs)

    made = load(out)
    assert {k for k, t in made.items() if t.dtype is torch.float32} == kept
    assert made["steps"].dtype is torch.int64
    assert done.dtypes == ({"bfloat16": 4 - len(kept)} if len(kept) < 4 else {})
    assert ("nothing-to-cast" in notes(done)) == (len(kept) == 4)


def test_keep_dtype_sees_the_names_that_come_out(net, out):
    save(layers(), net)
    convert(net, out, dtype="bf16", strip_prefix="module", keep_dtype="fc.weight")
    assert load(out)["fc.weight"].dtype is torch.float32
    with pytest.raises(RuleMatchesNothing, match="--keep-dtype"):
        convert(net, out, dtype="bf16", strip_prefix="module", keep_dtype="module.fc.*", force=True)


@pytest.mark.parametrize("glob", ["steps", "nothing", "norm", "fc.bias"])
def test_a_glob_to_keep_that_matches_nothing_says_no(glob, net, capsys, tmp_path):
    save(layers(), net)
    flags = ["--dtype", "bf16", "--keep-dtype", "fc", "--keep-dtype", glob]
    status, _, err = cli(capsys, "convert", net, *flags, "-o", tmp_path / "out.pth")

    assert status == 1
    assert f"--keep-dtype {glob} matches no floating-point tensor" in err
    left_alone(tmp_path, net.name)


def test_a_glob_to_keep_what_is_dropped_says_no(net, out):
    save(layers(), net)
    with pytest.raises(RuleMatchesNothing):
        convert(net, out, dtype="bf16", drop="fc", keep_dtype="fc")


# -- shared memory -----------------------------------------------------------------------------
@BOTH
def test_some_views_of_one_storage_get_storages_of_their_own(options, net, out):
    flat = torch.arange(600.0)
    sd = OrderedDict(a=flat[:100], norm=flat[100:200], b=flat[200:500], c=flat[250:300])
    save({"model": sd, "moment": flat[500:]}, net, **options)
    convert(net, out, dtype="float16", keep_dtype="norm")

    obj = {"model": sd, "moment": flat[500:]}
    made = loaded_every_way(out)
    half = lambda path, _: torch.float32 if path[-1] in ("norm", "moment") else torch.float16  # noqa: E731
    assert moved(obj, made, dtype=half) == 5
    assert stored_bytes(made) == 600 * 4 + 100 * 2 + 300 * 2
    assert made["model"]["b"].untyped_storage().nbytes() == 600


@BOTH
@pytest.mark.parametrize("kept", ["head", "emb"])
def test_tied_tensors_that_would_part_are_refused(kept, options, net, out):
    w = torch.arange(8.0)
    save({"model": OrderedDict(emb=w, head=w.view(2, 4), one=torch.ones(1))}, net, **options)
    with pytest.raises(Unsupported, match=f"'{kept}', which is not cast") as caught:
        convert(net, out, dtype="float16", keep_dtype=kept)

    assert caught.value.key == ({"head", "emb"} - {kept}).pop()
    assert "--keep-dtype" in caught.value.hint
    convert(net, out, dtype="float16")
    made = load(out)["model"]
    assert made["emb"].data_ptr() == made["head"].data_ptr()


@pytest.mark.parametrize("where", ["optimizer", "list", "ema"])
@pytest.mark.parametrize("same", ["object", "memory", "part"])
def test_what_others_hold_too_is_not_cast_under_them(same, where, net, out):
    w = torch.arange(8.0)
    other = {"object": w, "memory": w.view(2, 4), "part": w[7:]}[same]
    beside = {
        "optimizer": {"state": {0: {"exp_avg": other}}, "param_groups": []},
        "list": [other],
        "ema": {"w": other, "b": torch.ones(1)},
    }[where]
    save({"model": {"w": w, "b": torch.ones(2)}, where: beside}, net)
    with pytest.raises(Unsupported, match=r"not cast|another dtype") as caught:
        convert(net, out, dtype="float16", at="model")
    assert caught.value.key == "w"
    assert not out.exists()
    convert(net, out, dtype="float16", at="model", keep_dtype="w")
    assert load(out)["model"]["b"].dtype is torch.float16
    convert(net, out, dtype="float16", drop_entry=where, force=True)
    assert load(out)["model"]["w"].dtype is torch.float16


def test_columns_that_interleave_and_those_that_touch(net, out):
    grid = torch.arange(40.0).view(8, 5)
    obj = {"model": {"odd": grid[:, 1], "norm": grid[:, 2], "two": grid[:, 3:5]}}
    save(obj, net)
    convert(net, out, dtype="float16", keep_dtype="norm")
    wanted = lambda path, _: torch.float32 if path[-1] == "norm" else torch.float16  # noqa: E731
    assert moved(obj, loaded_every_way(out), dtype=wanted) == 3
    obj["model"]["norm"] = grid[:, 2:4]
    save(obj, net)
    with pytest.raises(Unsupported, match=r"'norm', which is not cast") as caught:
        convert(net, out, dtype="float16", keep_dtype="norm", force=True)
    assert caught.value.key == "two"


def test_a_storage_that_is_used_bare(net, out):
    flat = torch.arange(8, dtype=torch.uint8).view(torch.float8_e5m2)
    save({"model": {"w": flat}, "bare": flat.untyped_storage()}, net)
    with pytest.raises(Unsupported, match="as a whole") as caught:
        convert(net, out, dtype="float16")
    assert caught.value.key == "w"


# -- how tensors are rebuilt -------------------------------------------------------------------
@BOTH
@pytest.mark.parametrize("target", ["float16", "float8_e4m3fn"])
def test_parameters_and_leaves(target, options, net, out):
    sd = OrderedDict(
        weight=nn.Parameter(torch.arange(6.0).view(2, 3)),
        frozen=nn.Parameter(torch.ones(2), requires_grad=False),
        leaf=torch.ones(2, requires_grad=True),
        plain=torch.ones(2),
        tied=None,
    )
    sd["tied"] = sd["weight"]
    save(sd, net, **options)
    convert(net, out, dtype=target)

    made = loaded_every_way(out)
    for key, one in sd.items():
        assert type(made[key]) is type(one), key
        assert torch.equal(made[key].detach().float(), one.detach()), key
    assert [t.requires_grad for t in made.values()] == [
        True,
        False,
        target == "float16",
        False,
        True,
    ]
    assert made["tied"] is made["weight"]


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
@pytest.mark.parametrize(
    ("source", "target"),
    [("float32", "float8_e4m3fn"), ("float8_e4m3fn", "float32"), ("float8_e4m3fn", "float8_e5m2"),
     ("float16", "float64")],
)  # fmt: skip
def test_calls_of_v2_and_v3(source, target, protocol, net, out):
    sd = Net().state_dict()
    for key, one in sd.items():
        sd[key] = one.to(dtype_of(source)) if one.is_floating_point() else one
    sd["tied"] = sd["fc.weight"]
    sd["parameter"] = nn.Parameter(sd["fc.bias"].clone(), requires_grad=False)
    save({"before": [sd["bn.bias"]][:0], "model": sd, "n": 3}, net, pickle_protocol=protocol)
    done = convert(net, out, dtype=target)

    made = loaded_every_way(out)
    assert done.dtypes == {target: 10}
    assert moved(
        {"before": [], "model": sd, "n": 3}, made,
        dtype=lambda _, one: dtype_of(target) if one.is_floating_point() else one.dtype,
    ) == 11  # fmt: skip
    data = members(out)["data.pkl"]
    assert (b"torch float8" in data or b"torch\nfloat8" in data) == ("float8" in target)
    assert (b"_rebuild_tensor_v2" in data) is True


def test_a_tensor_with_attributes(net, out):
    one = torch.arange(3.0)
    one.note = {"lr_scale": 2}
    parameter = nn.Parameter(torch.ones(2))
    parameter.tensor_model_parallel = True
    save({"model": {"a": one, "b": parameter, "c": torch.ones(1)}}, net)
    for target in ("float16", "float8_e5m2"):
        convert(net, out, dtype=target, force=True)
        made = load(out)["model"]
        assert made["a"].note == {"lr_scale": 2}
        assert made["b"].tensor_model_parallel is True
        assert {t.dtype for t in made.values()} == {dtype_of(target)}
        assert made["a"].float().tolist() == [0, 1, 2]


@pytest.mark.parametrize("target", ["float16", "float8_e4m3fn", "float64"])
def test_the_call_of_torch_0_3(target, net, out):
    old = call("torch._utils._rebuild_tensor", storage(), 1, (2, 2), (3, 1))
    net.write_bytes(archive(pickled(dictionary(("a", old), ("b", tensor())))))
    before = load(net)
    convert(net, out, dtype=target)

    assert moved(before, loaded_every_way(out), dtype=lambda *_: dtype_of(target)) == 2


@pytest.mark.parametrize("target", ["float16", "float8_e4m3fn"])
def test_metadata_at_the_end_of_the_call(target, net, out):
    marked = tensor(storage(), 0, (2, 3), (3, 1), False, HOOKS, dictionary())
    net.write_bytes(archive(pickled(dictionary(("a", marked), ("b", tensor(storage(), 1, (2,), (1,)))))))  # fmt: skip
    before = load(net)
    convert(net, out, dtype=target)

    assert moved(before, load(out), dtype=lambda *_: dtype_of(target)) == 2


def test_v3_by_hand_with_a_typed_dtype(net, out):
    """Torch reads float32 over an untyped storage, though it does not write it."""
    untyped = storage("0", 24, name("torch.storage", "UntypedStorage"))
    one = call("torch._utils._rebuild_tensor_v3", untyped, 1, (2,), (2,), False, HOOKS, name("torch", "float32"))  # fmt: skip
    two = call("torch._utils._rebuild_tensor_v3", untyped, 8, (2,), (1,), False, HOOKS, name("torch", "int16"))  # fmt: skip
    net.write_bytes(archive(pickled(dictionary(("a", one), ("b", two)))))
    before = load(net)
    assert before["a"].tolist() == [1, 3]
    for target in ("float16", "float8_e5m2"):
        convert(net, out, dtype=target, force=True)
        assert moved(
            before, load(out),
            dtype=lambda path, _: dtype_of(target) if path == ("a",) else torch.int16,  # noqa: B023
        ) == 2  # fmt: skip


# -- containers --------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("target", "options", "container"),
    [("float16", {}, "torch-legacy"), ("float64", {}, "torch-legacy"),
     ("float8_e4m3fn", {}, "torch-zip"), ("float16", {"to": "zip"}, "torch-zip"),
     ("bfloat16", {"compact": True}, "torch-zip")],
)  # fmt: skip
def test_legacy_stays_legacy_where_it_can(target, options, container, net, out):
    save({"model": Net().state_dict(), "epoch": 3}, net, **LEGACY)
    convert(net, out, dtype=target, **options)

    assert ckptool.inspect(out).checkpoint.format == container
    assert load(out)["model"]["fc.weight"].dtype is dtype_of(target)
    assert torch.equal(load(out)["model"]["fc.weight"], Net().fc.weight.to(dtype_of(target)))


def test_legacy_cannot_hold_float8(net, out, tmp_path):
    save(Net().state_dict(), net, **LEGACY)
    with pytest.raises(Unsupported, match="legacy"):
        convert(net, out, dtype="float8_e4m3fn", to="legacy")
    left_alone(tmp_path, net.name)


def test_from_and_to_safetensors(tmp_path):
    from safetensors.torch import save_file

    sd = {"a": torch.randn(5, 3), "b": torch.arange(4), "norm": torch.randn(2)}
    save_file(sd, tmp_path / "in.safetensors")
    for target in FLOATS:
        for name_ in ("out.pth", "out.safetensors"):
            out = tmp_path / name_
            convert(tmp_path / "in.safetensors", out, dtype=target, keep_dtype="norm", force=True)
            made = safe(out) if out.suffix == ".safetensors" else load(out, weights_only=True)
            assert element_bytes(made["a"]) == element_bytes(sd["a"].to(dtype_of(target)))
            assert torch.equal(made["b"], sd["b"])
            assert torch.equal(made["norm"], sd["norm"])


def test_a_big_endian_file(out):
    before = load(FIXTURES / "big_endian.pth")
    convert(FIXTURES / "big_endian.pth", out, dtype="float16")
    wanted = lambda _, one: torch.float16 if one.is_floating_point() else one.dtype  # noqa: E731
    assert moved(before, loaded_every_way(out, weights_only=False), dtype=wanted) > 0


def test_a_deflated_file(out):
    before = load(FIXTURES / "deflated.pth")
    convert(FIXTURES / "deflated.pth", out, dtype="bfloat16")
    made = loaded_every_way(out, weights_only=False)
    sd = ckptool.inspect(FIXTURES / "deflated.pth").checkpoint.tables[0].path
    for step in sd:
        before, made = before[step], made[step]
    wanted = lambda _, one: torch.bfloat16 if one.is_floating_point() else one.dtype  # noqa: E731
    assert moved(before, made, dtype=wanted) > 0


# -- what is said ------------------------------------------------------------------------------
def test_overflow_and_nan_are_counted_by_tensor(net, out):
    sd = {"fine": torch.ones(3), "big": torch.tensor([65519.0, 65520.0, -1e9, float("inf")]),
          "nan": torch.tensor([float("nan"), 1.0, float("nan")])}  # fmt: skip
    save(sd, net)
    said = {note.slug: note.text for note in convert(net, out, dtype="float16").notes}

    assert said["cast-overflow"] == "2 numbers are beyond the range of float16: big (2)"
    assert said["cast-nan"] == "2 numbers were NaN before: nan (2)"
    done = convert(net, out, dtype="bfloat16", force=True)
    assert "cast-overflow" not in notes(done)
    said = {n.slug: n.text for n in convert(net, out, dtype="float8_e4m3fn", force=True).notes}
    assert "big (4)" in said["cast-overflow"]
    text = str(convert(net, tmp := out.with_suffix(".safetensors"), dtype="float16"))
    assert "2 numbers are beyond the range of float16: big (2)" in text
    assert "3 tensors cast to float16" in text
    assert tmp.exists()


def test_many_overflows_are_summed(net, out):
    save({f"w{i}": torch.full((2,), 1e30) for i in range(9)}, net)
    (note,) = (n for n in convert(net, out, dtype="half").notes if n.slug == "cast-overflow")

    assert note.text.startswith("18 numbers are beyond the range of float16: w0 (2), w1 (2)")
    assert note.text.endswith("and 5 more")


def test_nothing_to_cast_is_said(net, out):
    save({"w": torch.ones(2)}, net)
    assert "nothing-to-cast" in notes(convert(net, out, dtype="float32"))
    assert_same(load(net), load(out))
    save({"n": torch.arange(2), "m": torch.ones(1, dtype=torch.bool)}, net)
    assert "nothing-to-cast" in notes(convert(net, out, dtype="float16", force=True))


ALIASES = {
    "bf16": "bfloat16", "bfloat16": "bfloat16", "torch.bfloat16": "bfloat16", "BFloat16": "bfloat16",
    "half": "float16", "fp16": "float16", "f16": "float16", "torch.half": "float16",
    "float": "float32", "fp32": "float32", "torch.float": "float32", "double": "float64",
    "fp64": "float64", "fp8": "float8_e4m3fn", "float8_e5m2": "float8_e5m2",
    torch.float16: "float16", torch.bfloat16: "bfloat16", torch.double: "float64",
    torch.float8_e4m3fnuz: "float8_e4m3fnuz",
}  # fmt: skip


@pytest.mark.parametrize("word", ALIASES, ids=str)
def test_names_of_types(word, net, out):
    save({"w": torch.ones(2, dtype=torch.float64)}, net)
    convert(net, out, dtype=word)
    assert load(out)["w"].dtype is dtype_of(ALIASES[word])


NO_TYPES = ["int8", "long", "bool", "complex64", "qint8", "float8", "float4_e2m1fn_x2", "float8_e8m0fnu",
            "bf17", "torch", "torch.float16.x", "float16 ", "untyped", torch.int64, 16]  # fmt: skip


@pytest.mark.parametrize("word", NO_TYPES, ids=repr)
def test_what_is_no_type_to_cast_to(word, net, out):
    save({"w": torch.ones(2)}, net)
    with pytest.raises(UsageError, match="no dtype to cast to") as caught:
        convert(net, out, dtype=word)
    assert "bfloat16" in caught.value.hint
    assert "e8m0" not in caught.value.hint
    assert not out.exists()


def test_a_type_that_is_no_type_on_the_command_line(net, capsys, tmp_path):
    save({"w": torch.ones(2)}, net)
    status, out, err = cli(capsys, "convert", net, "--dtype", "int8", "-o", tmp_path / "o.pth")
    assert (status, out) == (2, "")
    assert "'int8' is no dtype to cast to" in err
    left_alone(tmp_path, net.name)
