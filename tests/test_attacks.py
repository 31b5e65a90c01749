"""Files that torch.load(weights_only=False) runs code from, each a trick that once hid it from us.

Every trick was tried with torch: the payload ran. Here torch loads nothing.
"""

from __future__ import annotations

import io
import struct
import tarfile
import time

import pytest
from formats_support import (
    FLOAT,
    HOOKS,
    MAGIC,
    SIX,
    archive,
    call,
    dictionary,
    legacy,
    name,
    op,
    pickled,
    read_bytes,
    read_path,
    refusal,
    safetensors,
    storage,
    tensor,
    text,
    tup,
    verdicts,
)

import ckptool
from ckptool.formats.judge import Judge
from ckptool.pickles.nodes import pairs
from ckptool.pickles.walk import walk

NEW = b")\x81"


def dtype(kind, *, fields=None, names=None, inner=None, size=-1, flags=0, copied=True):
    """numpy.dtype with the state that BUILD gives it."""
    state = tup(3, "|", inner, names, fields, size, size, flags)
    return call("numpy.dtype", kind, False, copied) + state + b"b"


OBJECT = dtype("O8", flags=63)
MODULE = name("torch.nn.modules.module", "Module")
ACME = name("acme.net", "Config")
PUT, GET = b"q\x05", b"h\x05"


def dotted(module, attribute):
    """A name with dots in it, as protocol 4 looks it up."""
    return text(module) + text(attribute) + b"\x93"


def holding(value, method="append", cls=MODULE):
    """An instance whose attribute stands in for a method that the pickle machine calls."""
    return cls + NEW + dictionary((method, value)) + b"b"


def judged(body):
    return {row.name: row.verdict for row in Judge(walk(pickled(body, protocol=4))).run()}


def from_type(maker, cls, args=None):
    args = (storage(), 0, (2, 3), (3, 1), False, HOOKS) if args is None else args
    return call("torch._tensor._rebuild_from_type_v2", maker, cls, args, b"}")


V2 = name("torch._utils", "_rebuild_tensor_v2")
AGAIN = name("torch._tensor", "_rebuild_from_type_v2")
TENSOR = name("torch", "Tensor")
OUTER = call("builtins.getattr", name("acme.net", "Outer"), "run")
SYSTEM = dotted("torch.serialization", "os.system")
STATS = name("torch.distributed._shard.checkpoint.utils", "Stats")

CODE = {
    "a name with dots as the class of a tensor, called as append": tup(
        SYSTEM + PUT, from_type(V2, GET), holding(GET) + op("true") + b"a"
    ),
    "a class of torch as the class of a tensor, held as a value": tup(
        name("torch.fx.graph_module", "GraphModule") + PUT, from_type(V2, GET), holding(GET)
    ),
    "the class of a wrapper, held as a value": tup(
        name("torch.fx.graph_module", "GraphModule") + PUT,
        call("torch._utils._rebuild_wrapper_subclass", GET),
        holding(GET),
    ),
    "a maker that calls what its arguments name": from_type(
        AGAIN, TENSOR, tup(name("torch.nn.modules.linear", "Linear"), TENSOR, (1, 1), b"}")
    ),
    "an attribute of a strange class, called as append": holding(OUTER) + op("true") + b"a",
    "an attribute of a strange class, as a value": dictionary(("f", OUTER)),
    "an attribute of a strange class, popped": holding(OUTER) + b"0N",
    "what a strange module imports, by getattr": (
        call("builtins.getattr", name("acme.net", "os"), "system") + NEW
    ),
    "what a strange module imports, by a dotted name": dotted("acme.net", "os.system") + NEW,
    "what a strange class inherits": dotted("acme.net", "Outer.__init__.__globals__") + NEW,
    "a strange class held by what is popped": tup(
        ACME + PUT + NEW, holding(GET, cls=name("argparse", "Namespace")) + b"0N"
    ),
    "append after the state": holding(1) + op("x") + b"a",
    "extend after the state": holding(1, "extend") + b"(" + op("x") + b"e",
    "add after the state": holding(1, "add") + b"(" + op("x") + b"\x90",
    "items of a ModuleDict after the state": (
        holding(1, "add_module", name("torch.nn.modules.container", "ModuleDict"))
        + op("k") + op("v") + b"s"
    ),
    "items of a stranger after the state": holding(1, "add", ACME) + op("k") + op("v") + b"s",
    "items of a known class after the state": (
        name("collections", "OrderedDict") + b")R" + dictionary(("append", 1)) + b"b"
        + op("x") + b"a"
    ),
    "list items of a module": MODULE + NEW + op("x") + b"a",
    "a function that torch.distributed imports, as NEWOBJ": (
        name("torch.distributed.tensor.experimental._attention", "partial") + b")\x81"
    ),
    "an alias of a whole package": STATS + NEW,
    "an alias of a whole package, as a value": dictionary(("f", STATS)),
    "what torch.distributed imports": name("torch.distributed._tensor", "import_module"),
    "what torch.nn imports": name("torch.nn.utils.parametrize", "deepcopy"),
    "what torch.optim imports": name("torch.optim._multi_tensor", "partialmethod"),
    "what omegaconf imports": name("omegaconf.base", "field"),
    "what torch.nn.functional imports": name("torch.nn.functional", "handle_torch_function"),
    "the builtins of a module": name("torch.nn.functional", "__builtins__"),
    "the attributes of a module": name("torch._C._nn", "__getattribute__"),
    "the loader of a module": name("torch.nn.init", "__loader__"),
    "a rebuild function as a value": AGAIN,
    "a function of torch.nn by INST": b"(itorch.nn.modules.utils\nrepeat\n",
    "a function of torch.nn by OBJ": b"(" + name("torch.nn.utils.fusion", "copy") + b"o",
    "a class of torch.nn by INST": b"(itorch.nn.modules.linear\nLinear\n",
    "a stranger's function by INST, which is called": b"(iacme.net\nmain\n",
    "a stranger's function by OBJ": b"(" + name("acme.net", "main") + b"o",
    **{
        f"an object of {module}, which is wherever torch is": name(module, "Thing") + NEW
        for module in ("sympy.matrices.dense", "networkx", "jinja2.environment", "fsspec.mapping",
                       "pip._internal", "setuptools", "triton.runtime")
    },
    "an item of a sympy matrix, which is evaluated": (
        name("sympy.matrices.dense", "MutableDenseMatrix") + NEW
        + tup(call("builtins.slice", 0, 1), call("builtins.slice", 0, 1)) + op(["exit()"]) + b"s"
    ),
    **{
        f"an object of {module}, a standard module of some Python": name(module, "Thing") + NEW
        for module in ("test.support", "_testcapi", "annotationlib", "compression.zstd", "binhex")
    },
    "a dtype of objects with the flags of numbers, so that bytes become pointers": dtype("O8"),
    "a record of objects with the flags of numbers": dtype(
        "V8", names=("a",), fields=dictionary(("a", tup(OBJECT, 0))), size=8, flags=16
    ),
    "a dtype of arrays of objects": dtype("V8", inner=tup(OBJECT, (1,)), size=8),
    "a field behind the end of its record": dtype(
        "V8", names=("a",), fields=dictionary(("a", tup(dtype("f8"), 1))), size=8
    ),
    "a record of another size than its name says": dtype(
        "V8", names=("a",), fields=dictionary(("a", tup(dtype("f8"), 8))), size=16
    ),
    "numbers with the flags of objects": dtype("f8", flags=1),
    "a state for numpy's own float32": dtype("f4", copied=False),
    "a dtype of a whole specification": call("numpy.dtype", "f4,O"),
    "what functorch imports": name("functorch.compile", "Thing") + NEW,
}  # fmt: skip


@pytest.mark.parametrize("case", CODE)
def test_no_detour_to_a_call_is_overlooked(case):
    assert "code" in judged(CODE[case]).values(), judged(CODE[case])


KNOWN = {
    "a dtype of objects": OBJECT,
    "a dtype of records": dtype(
        "V20",
        names=("a", "b"),
        fields=dictionary(("a", tup(dtype("f8"), 0)), ("b", tup(dtype("U3", size=12), 8))),
        size=20,
        flags=16,
    ),
    "an activation": name("torch.nn.functional", "relu"),
    "an activation in place": name("torch.nn.functional", "relu_"),
    "a builtin activation": name("torch._C._nn", "gelu"),
    "an initializer": name("torch.nn.init", "xavier_uniform_"),
    "a module's class": name("torch.nn.modules.activation", "GELU"),
    "an optimizer's class": name("torch.optim.adam", "Adam"),
    "a record": name("torch.distributed.tensor.placement_types", "Shard") + tup(0) + b"\x81",
    "a remote device": name("torch.distributed.remote_device", "_remote_device") + NEW,
    "a subclass of torch's": from_type(V2, name("torch._subclasses.fake_tensor", "FakeTensor")),
    "an OrderedDict with its metadata": (
        name("collections", "OrderedDict") + b")R(" + op("k") + op(1) + b"u"
        + dictionary(("_metadata", b"}")) + b"b"
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", KNOWN)
def test_what_honest_files_hold_stays_known(case):
    assert set(judged(KNOWN[case]).values()) <= {"known"}


def test_a_nested_class_of_a_stranger_stays_foreign():
    body = dotted("acme.net", "Outer.inner") + NEW + dictionary(("a", 1)) + b"b"
    assert judged(body) == {"acme.net.Outer.inner": "foreign"}


# -- zips that are two things ------------------------------------------------------------------
EVIL = pickled(dictionary(("w", tensor()), ("x", call("os.system", "true"))))
HONEST = pickled(dictionary(("w", tensor())))


@pytest.mark.parametrize(
    "records",
    [
        {"archive_format": b"pt2", "data/weights/model_weights_config.json": b'{"config":{}}'},
        {".data/extern_modules": b"", "os.py": b"", ".data/0.storage": SIX},
        {"Constants.pkl": HONEST, "code/x.py": b""},
    ],
    ids=["torch.export", "torch.package", "TorchScript in capitals"],
)
def test_a_data_pkl_counts_whatever_lies_beside_it(records):
    checkpoint = read_bytes(archive(EVIL, **records))
    assert checkpoint.format == "torch-zip"
    assert verdicts(checkpoint)["os.system"] == "code"


def test_an_encoding_other_than_latin_1_makes_no_literal():
    """What is read as bytes here would be other bytes there."""
    stream = b"x".decode("latin-1")
    for encoding in ("utf-8", "cp037", "utf-16-le"):
        loaded = call("torch.storage._load_from_bytes", call("_codecs.encode", stream, encoding))
        found = judged(loaded)
        assert found["torch.storage._load_from_bytes"] == "code"


# -- tar -----------------------------------------------------------------------------------------
STORAGES = pickled(1) + pickled(tup(7, "cpu", FLOAT)) + struct.pack("<q", 6) + SIX + pickled(b"]")
TENSORS = (
    pickled(1)
    + pickled(tup(9, 7, name("torch", "FloatTensor")))
    + struct.pack("<ii5q", 2, 0, 2, 3, 3, 1, 0)
)
NINE = op("9") + b"Q"
TAR_HONEST = pickled(dictionary(("w", NINE)))
TAR_EVIL = pickled(dictionary(("w", NINE), ("x", call("os.system", "true"))))


def header(member, size=0, kind=b"0", magic=b"ustar\x0000"):
    info = tarfile.TarInfo(member)
    info.size, info.type = size, kind
    block = bytearray(info.tobuf(tarfile.USTAR_FORMAT))
    block[257:265] = magic.ljust(8, b"\0")
    return summed(block)


def summed(block):
    block[148:156] = b" " * 8
    block[148:156] = b"%06o\0 " % sum(block)
    return bytes(block)


def member(label, data, kind=b"0", **more):
    return header(label, len(data), kind, **more) + data + b"\0" * (-len(data) % 512)


FRONT = member("storages", STORAGES) + member("tensors", TENSORS)
END = b"\0" * 1024
GOOD = FRONT + member("pickle", TAR_HONEST)


def members_of(data):
    with tarfile.open(fileobj=io.BytesIO(data), mode="r:") as opened:
        return opened.getnames()


def test_a_tar_made_here_is_read():
    times = member("h", b"20 mtime=1480000.25\n", b"x")
    assert read_bytes(FRONT + times + member("pickle", TAR_HONEST) + END).format == "torch-tar"


RENAMED = {
    "pax": member("h", b"15 path=pickle\n", b"x"),
    "pax for all": member("h", b"15 path=pickle\n", b"g"),
    "pax, after a line of times": member("h", b"11 mtime=1\n15 path=pickle\n", b"x"),
    "GNU long name": member("././@LongLink", b"pickle\0", b"L", magic=b"ustar  "),
}


@pytest.mark.parametrize("case", RENAMED)
def test_a_member_that_another_renames_is_refused(case):
    data = GOOD + RENAMED[case] + member("other", TAR_EVIL) + END
    assert members_of(data).count("pickle") == 2
    assert refusal(data).slug == "header-invalid"


@pytest.mark.parametrize("kind", [b"5", b"2", b"6", b"\0"])
def test_a_folder_that_hides_members_is_refused(kind):
    hidden = member("pickle", TAR_EVIL)
    data = FRONT + header("folder/", len(hidden), kind) + hidden + member("zz", b"") + END
    assert "pickle" in members_of(data)
    assert refusal(data)
    assert refusal(GOOD + header("folder/", 1024, kind) + END + END).slug == "header-invalid"


@pytest.mark.parametrize(
    "size", [b"-0000001000\0", b"\xff" * 12, b"0_000001000\0", b"0o00001000 \0"]
)
def test_a_size_that_is_no_plain_number_is_refused_at_once(size):
    block = bytearray(header("d", 0, b"5"))
    block[124:136] = size
    assert refusal(summed(block) + GOOD + END).slug == "header-invalid"


def test_a_header_with_a_wrong_checksum_is_refused():
    block = bytearray(header("zz"))
    block[148:156] = b"000001\0 "
    assert refusal(GOOD + bytes(block) + END).slug == "header-invalid"


def test_a_name_in_a_persistent_id_of_a_tar_is_judged():
    system = text("os") + text("system") + b"\x93"
    hidden = tup("x", system + PUT, "") + b"Q"
    main = pickled(dictionary(("w", NINE), ("p", hidden), ("m", holding(GET))), protocol=4)
    found = verdicts(read_bytes(FRONT + member("pickle", main) + END))
    assert found["os.system"] == "code"


def old_header(start, size=0, end=b""):
    """A header of 1979, without magic, around other bytes that stand at its start and end."""
    block = bytearray(start.ljust(100, b" ") + header("", size, magic=b"")[100:])
    block[512 - len(end) :] = end
    return summed(block)


def test_a_legacy_stream_that_is_a_tar_too_is_read_as_torch_reads_it():
    """torch tries tar first, magic or not."""
    inner = FRONT + member("pickle", TAR_EVIL) + END
    start = MAGIC + b"\x80\x02M\xe9\x03.\x80\x02}X\x01\x00\x00\x00xB"
    start += struct.pack("<I", 512 + len(inner) - len(start) - 4)
    stored = tensor(storage("0", 6, FLOAT, "cpu", None))
    rest = legacy(pickled(dictionary(("w", stored))), magic=b"", version=b"", system=b"s.")
    data = old_header(start) + inner + rest
    assert "pickle" in members_of(data)
    assert verdicts(read_bytes(data))["os.system"] == "code"


def test_a_legacy_stream_that_looks_like_a_tar_is_read_as_torch_reads_it():
    """The word ustar alone makes no tar: the checksum is wrong."""
    start = MAGIC + b"\x80\x02M\xe9\x03.\x80\x02}X\x01\x00\x00\x00xB" + struct.pack("<I", 600)
    blob = bytearray(600)
    blob[257 - len(start) : 262 - len(start)] = b"ustar"
    evil = pickled(dictionary(("x", call("os.system", "true"))))
    data = start + bytes(blob) + b"s." + evil + pickled([])
    checkpoint = read_bytes(data)
    assert checkpoint.format == "torch-legacy"
    assert verdicts(checkpoint)["os.system"] == "code"


def test_safetensors_that_are_a_tar_too_are_read_as_torch_reads_them():
    inner = FRONT + member("pickle", TAR_EVIL) + END
    rows = b'"},"w":{"dtype":"U8","shape":[%d],"data_offsets":[0,%d]}}' % (len(inner), len(inner))
    start = struct.pack("<Q", 504) + b'{"__metadata__":{"a":"'
    data = old_header(start, end=rows) + inner
    assert "pickle" in members_of(data)
    assert verdicts(read_bytes(data))["os.system"] == "code"


def test_safetensors_that_are_a_pickle_too_are_refused():
    """The length spells opcodes: BINUNICODE of 40 characters, then what stands in a string."""
    module, function = b"m" * 32, b"f" * 32
    calls = b"U " + module + b"U " + function + b"q\xc2\x93"
    start = b'{"__metadata__":{"a":"'
    body = start + b"p" * (0x28 - 3 - len(start)) + calls + b'"}}'
    size = 0x2858
    data = struct.pack("<Q", size) + body.ljust(size, b" ")
    assert refusal(data, "net.safetensors").slug == "header-invalid"
    honest = {"__metadata__": {"a": "p" * (size - 40)}}
    assert read_bytes(safetensors(honest), "net.safetensors").format == "safetensors"


# -- names ---------------------------------------------------------------------------------------
@pytest.mark.parametrize("key", [op(0), op(None), b"C\x01k", tup(1)])
def test_a_key_that_is_no_text_is_not_renamed_beside_an_empty_one(key, tmp_path):
    path, out = tmp_path / "net.pth", tmp_path / "out.pth"
    path.write_bytes(archive(pickled(dictionary(("", tensor()), (key, tensor())), protocol=3)))
    ckptool.convert(path, out, add_module=True)
    keys = [row[0] for row in pairs(read_path(out).handle.walked.root)]
    assert keys[0] == "module."
    assert type(keys[1]) is not str


# -- time ----------------------------------------------------------------------------------------
def test_thousands_of_wrapped_tables_take_seconds(tmp_path):
    """4,000 in 130 kB; a minute and more while each table asked all others."""
    path = tmp_path / "net.pth"
    weight = b"}" + op("module.w") + b"j\0\1\0\0s"
    rows = b"".join(op(f"t{i}") + weight for i in range(4_000))
    path.write_bytes(archive(pickled(b"}(" + op("z") + tensor() + b"r\0\1\0\0" + rows + b"u")))
    started = time.process_time()
    assert len(ckptool.inspect(path).to_dict()["tables"]) == 4_000
    ckptool.convert(path, tmp_path / "out.pth", unwrap=True)
    assert time.process_time() - started < 10


def test_a_large_value_under_thousands_of_names_is_described_once(tmp_path):
    path = tmp_path / "net.pth"
    big = dictionary(*[(f"k{i}", i) for i in range(20_000)]) + b"r\0\1\0\0"
    rows = b"".join(op(f"o{i}") + b"j\0\1\0\0" for i in range(3_000))
    path.write_bytes(archive(pickled(b"}(" + op("w") + tensor() + op("o") + big + rows + b"u")))
    started = time.process_time()
    assert len(ckptool.inspect(path).to_dict()["extras"]) == 3_001
    assert time.process_time() - started < 5
