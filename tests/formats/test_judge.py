"""Every call in a pickle is known, foreign, or could run code: the rows of hostile.md 3.

No pickle here is ever loaded; the harmful ones would only run `true`.
"""

import argparse
import collections
import copyreg
import datetime
import decimal
import enum
import fractions
import functools
import pathlib
import pickle
import struct
import sys
import types
import uuid

import numpy as np
import pytest
import torch
from formats_support import (
    FIXTURES,
    HOOKS,
    MAGIC,
    archive,
    call,
    dictionary,
    legacy,
    name,
    number,
    pickled,
    read_bytes,
    read_path,
    saved,
    saved_legacy,
    storage,
    tar,
    tensor,
    text,
    tup,
    verdicts,
)
from torch import nn

from ckptool.errors import CkptError
from ckptool.formats.judge import Judge
from ckptool.formats.vetted import is_foreign
from ckptool.pickles.walk import walk


def judged(data):
    return {row.name: row.verdict for row in Judge(walk(data)).run()}


def worst(data):
    found = set(judged(data).values())
    return next((v for v in ("code", "foreign", "known") if v in found), "none")


SYSTEM = name("os", "system")
TRUE = text("true")
NEW = b")\x81"  # EMPTY_TUPLE NEWOBJ
A = name("acme.net", "Config")
D = b"}" + text("a") + b"K\x01s"
STACK = text("os") + text("system") + b"\x93"


OBJECT = name("__builtin__", "object")


def reconstructor(cls, base=OBJECT, state=None):
    return call("copy_reg._reconstructor", cls, base, state)


# -- could run code ----------------------------------------------------------------------------
CODE = {
    "os.system": (call("os.system", "true"), "os.system"),
    "posix.system": (call("posix.system", "true"), "posix.system"),
    "nt.system": (call("nt.system", "true"), "nt.system"),
    "subprocess.Popen": (call("subprocess.Popen", "true"), "subprocess.Popen"),
    "builtins.eval": (call("builtins.eval", "1"), "builtins.eval"),
    "builtins.exec": (call("builtins.exec", "1"), "builtins.exec"),
    "protocol 2 eval": (call("__builtin__.eval", "1"), "builtins.eval"),
    "protocol 2 execfile": (call("__builtin__.execfile", "x"), "builtins.execfile"),
    "protocol 2 commands": (call("commands.getoutput", "true"), "subprocess.getoutput"),
    "stack global": (text("os") + text("system") + b"\x93" + tup("true") + b"R", "os.system"),
    "stack global, memo": (
        text("os")
        + b"q\x00"
        + text("system")
        + b"q\x01"
        + b"00"
        + b"h\x00h\x01\x93"
        + tup("true")
        + b"R",
        "os.system",
    ),
    "pip.main": (call("pip.main", []), "pip.main"),
    "runpy": (call("runpy.run_path", "x.py"), "runpy.run_path"),
    "cProfile": (call("cProfile.run", "1"), "cProfile.run"),
    "timeit": (call("timeit.timeit", "1"), "timeit.timeit"),
    "pydoc": (call("pydoc.pipepager", "a", "true"), "pydoc.pipepager"),
    "pkgutil": (call("pkgutil.resolve_name", "os:system"), "pkgutil.resolve_name"),
    "numpy runstring": (
        call("numpy.testing._private.utils.runstring", "1", b"}"),
        "numpy.testing._private.utils.runstring",
    ),
    "_osx_support": (
        call("_osx_support._find_build_tool", "true"),
        "_osx_support._find_build_tool",
    ),
    "marshal": (call("marshal.loads", "x"), "marshal.loads"),
    "FunctionType": (call("types.FunctionType", None, b"}"), "types.FunctionType"),
    "spawnv_passfds": (
        call("multiprocessing.util.spawnv_passfds", "x", [], []),
        "multiprocessing.util.spawnv_passfds",
    ),
    "dotted pathlib": (call(name("pathlib", "os.system"), "true"), "pathlib.os.system"),
    "dotted torch.serialization": (
        call(name("torch.serialization", "os.system"), "true"),
        "torch.serialization.os.system",
    ),
    "dotted under an instance package": (
        name("torch.nn.modules.module", "Module.load") + NEW + D + b"b",
        "torch.nn.modules.module.Module.load",
    ),
    "dotted collections": (
        call(name("collections", "OrderedDict.fromkeys"), []),
        "collections.OrderedDict.fromkeys",
    ),
    "getattr": (call("__builtin__.getattr", SYSTEM, "x"), "builtins.getattr"),
    "getattr of a module's function": (
        call("__builtin__.getattr", name("pathlib", "Path"), "home"),
        "builtins.getattr",
    ),
    "getattr called": (
        call(call("__builtin__.getattr", name("os", "path"), "join"), "a"),
        "os.path.join",
    ),
    "INST": (b"(" + TRUE + b"ios\nsystem\n", "os.system"),
    "OBJ": (b"(" + SYSTEM + TRUE + b"o", "os.system"),
    "OBJ then POP": (b"(" + SYSTEM + TRUE + b"o0N", "os.system"),
    "REDUCE then POP": (call("os.system", "true") + b"0N", "os.system"),
    "POP_MARK": (b"(" + call("os.system", "true") + b"1N", "os.system"),
    "NEWOBJ": (SYSTEM + tup("true") + b"\x81", "os.system"),
    "NEWOBJ_EX": (SYSTEM + tup("true") + b"}\x92", "os.system"),
    "NEWOBJ_EX of a stranger": (A + b")" + D + b"\x92", "acme.net.Config"),
    "BUILD on a function": (SYSTEM + D + b"b", "os.system"),
    "BUILD on a torch function": (
        name("torch._utils", "_rebuild_tensor_v2") + D + b"b",
        "torch._utils._rebuild_tensor_v2",
    ),
    "partial": (call("functools.partial", SYSTEM, "true"), "functools.partial"),
    "partial by BUILD": (
        name("functools", "partial") + NEW + tup(SYSTEM, ("true",), b"}", None) + b"b",
        "functools.partial",
    ),
    "map": (call("__builtin__.map", SYSTEM, ["true"]), "builtins.map"),
    "deque over map": (
        call("collections.deque", call("__builtin__.map", SYSTEM, [])),
        "builtins.map",
    ),
    "torch.load": (call("torch.load", "x.pth"), "torch.load"),
    "_load_from_bytes": (
        call("torch.storage._load_from_bytes", call("_codecs.encode", "x", "latin1")),
        "torch.storage._load_from_bytes",
    ),
    "execWrapper": (
        call("torch.jit.unsupported_tensor_ops.execWrapper", "1", b"}", b"}"),
        "torch.jit.unsupported_tensor_ops.execWrapper",
    ),
    "torch.hub": (call("torch.hub.load", "a", "b"), "torch.hub.load"),
    "builder of a subclass": (
        call(
            "torch._tensor._rebuild_from_type_v2", SYSTEM, name("torch", "Tensor"), ("true",), b"}"
        ),
        "os.system",
    ),
    "class of a subclass": (
        call(
            "torch._tensor._rebuild_from_type_v2",
            name("torch._utils", "_rebuild_tensor_v2"),
            SYSTEM,
            (storage(), 0, (6,), (1,), False, HOOKS),
            b"}",
        ),
        "os.system",
    ),
    "getattr as a value": (
        tup(
            call("__builtin__.getattr", name("acme.net", "Outer"), "Inner") + NEW,
            name("__builtin__", "getattr"),
        ),
        "builtins.getattr",
    ),
    "known, keywords": (name("torch", "Size") + b")" + D + b"\x92", "torch.Size"),
    "backward hook": (tensor(hooks=call("collections.OrderedDict", [[1, SYSTEM]])), "os.system"),
    "hook as dict item": (tensor(hooks=HOOKS + b"(K\x01" + SYSTEM + b"u"), "os.system"),
    "callback as value": (dictionary(("on_end", SYSTEM)), "os.system"),
    "as dict key": (b"}(" + SYSTEM + b"K\x01u", "os.system"),
    "in a list": (b"](" + SYSTEM + b"e", "os.system"),
    "in a tuple": (tup(SYSTEM, 1), "os.system"),
    "in a set": (b"\x8f(" + SYSTEM + b"\x90", "os.system"),
    "in a state": (A + NEW + dictionary(("f", SYSTEM)) + b"b", "os.system"),
    "left on the stack": (SYSTEM + b"N", "os.system"),
    "defaultdict of system": (call("collections.defaultdict", SYSTEM), "collections.defaultdict"),
    "defaultdict of a stranger": (call("collections.defaultdict", A), "collections.defaultdict"),
    "enum": (call(A, 1), "acme.net.Config"),
    "enum, stdlib": (call("signal.Signals", 9), "signal.Signals"),
    "stranger reduced": (call(A), "acme.net.Config"),
    "namedtuple": (A + tup(1, 2) + b"\x81", "acme.net.Config"),
    "stranger with __setstate__": (A + NEW + tup(1, 2) + b"b", "acme.net.Config"),
    "stranger with text as state": (A + NEW + TRUE + b"b", "acme.net.Config"),
    "stranger by INST, arguments": (b"(K\x01iacme.net\nConfig\n", "acme.net.Config"),
    "stranger by INST, a function for all we know": (
        b"(iacme.net\nConfig\n" + D + b"b",
        "acme.net.Config",
    ),
    "stranger by OBJ": (b"(" + A + b"o" + D + b"b", "acme.net.Config"),
    "stranger by OBJ, arguments": (b"(" + A + b"K\x01o", "acme.net.Config"),
    "stranger also as a value": (tup(A + b"q\x00" + NEW, b"h\x00"), "acme.net.Config"),
    "stranger as a value": (A, "acme.net.Config"),
    "stranger rebuilt on another base": (
        reconstructor(A, name("__builtin__", "dict"), b"}"),
        "copyreg._reconstructor",
    ),
    "stranger rebuilt from a value": (reconstructor(A, state=text("x")), "copyreg._reconstructor"),
    "reconstructor of system": (reconstructor(SYSTEM), "os.system"),
    "reconstructor of a stdlib class": (
        reconstructor(name("subprocess", "Popen")),
        "subprocess.Popen",
    ),
    "stdlib instance": (name("subprocess", "Popen") + NEW + D + b"b", "subprocess.Popen"),
    "numpy instance": (
        name("numpy.lib.npyio", "NpzFile") + NEW + D + b"b",
        "numpy.lib.npyio.NpzFile",
    ),
    "torch instance outside nn": (
        name("torch.utils.data.dataloader", "DataLoader") + NEW + D + b"b",
        "torch.utils.data.dataloader.DataLoader",
    ),
    "a module by arguments": (
        call("torch.nn.modules.linear.Linear", 1, 1),
        "torch.nn.modules.linear.Linear",
    ),
    "a module with __setstate__": (
        name("torch.nn.modules.linear", "Linear") + NEW + tup(1) + b"b",
        "torch.nn.modules.linear.Linear",
    ),
    "numpy _reconstruct of another": (
        call("numpy.core.multiarray._reconstruct", SYSTEM, (0,), "b"),
        "numpy.core.multiarray._reconstruct",
    ),
    "gone from the stdlib": (name("distutils.spawn", "X") + NEW, "distutils.spawn.X"),
    "the result of a call": (call(call("torch.Size", (1,)), 1), "the result of torch.Size"),
    "a called string": (text("x") + tup() + b"R", "a value that is no class"),
    "arguments that are a list": (SYSTEM + b"](X\x01\x00\x00\x00xeR", "os.system"),
    "known, arguments a list": (name("torch", "Size") + b"]R", "torch.Size"),
    "OrderedDict of a name": (call("collections.OrderedDict", SYSTEM), "collections.OrderedDict"),
    "encode of a name": (call("_codecs.encode", SYSTEM), "_codecs.encode"),
    "a codec that is imported": (call("_codecs.encode", "x", "rot13"), "_codecs.encode"),
    "BUILD twice": (A + NEW + D + b"b" + D + b"b", "the result of acme.net.Config"),
    "items to a known call": (call("torch.Size", (1,)) + b"(K\x01e", "torch.Size"),
    "empty module": (call(name("", "x")), ".x"),
    "module with a dot first": (call(name(".os", "system")), ".os.system"),
}


@pytest.mark.parametrize("case", CODE)
def test_what_could_run_code_is_called_so(case):
    body, culprit = CODE[case]
    found = judged(pickled(body))
    assert found[culprit] == "code", found


@pytest.mark.parametrize("case", [case for case in CODE if case != "left on the stack"])
def test_what_could_run_code_is_called_so_inside_a_checkpoint(case):
    """Beside honest weights, in the container of torch.save; the weights are still listed."""
    body, _ = CODE[case]
    data = archive(pickled(dictionary(("w", tensor(storage())), ("x", body))))
    checkpoint = read_bytes(data)
    assert "code" in verdicts(checkpoint).values()
    assert checkpoint.tables[0].tensors[0].key == "w"


COMPUTED = {
    "joined": call(call("__builtin__.getattr", text("o"), "join"), ["s"])
    + text("system")
    + b"\x93",
    "a number": text("os") + b"K\x01\x93",
    "bytes": text("os") + b"C\x06system\x93",
    "a python 2 string": b"U\x02os" + text("system") + b"\x93",
    "a tuple": text("os") + tup("system") + b"\x93",
}


@pytest.mark.parametrize("case", COMPUTED)
def test_a_name_that_is_not_two_literal_texts_is_code(case):
    found = judged(pickled(COMPUTED[case] + tup("true") + b"R", protocol=4))
    assert found["a name that is computed"] == "code"
    assert judged(pickled(COMPUTED[case], protocol=4))["a name that is computed"] == "code"


def test_escapes_in_text_opcodes_hide_nothing():
    data = b"V\\u006f\\u0073\nV\\u0073ystem\n\x93(Vtrue\ntR."
    assert judged(data)["os.system"] == "code"


@pytest.mark.parametrize("ext", [b"\x82\x01", b"\x83\x01\x00", b"\x84\x01\x00\x00\x00"])
def test_extension_codes_are_refused(ext):
    with pytest.raises(CkptError) as caught:
        read_bytes(archive(pickled(ext + b"N\x85R")))
    assert caught.value.slug == "pickle-invalid"


def test_a_payload_before_the_damage_is_named():
    broken = pickled(call("os.system", "true"))[:-1] + b"\xff"
    with pytest.raises(CkptError) as caught:
        read_bytes(archive(broken))
    assert "os.system" in caught.value.text
    assert caught.value.slug == "pickle-invalid"


def test_the_byte_of_the_call_is_told():
    body = dictionary(("w", 1)) + b"0" + call("os.system", "true")
    (row,) = Judge(walk(pickled(body)), "data.pkl").run()
    assert pickled(body)[row.offset] == 0x52
    assert row.member == "data.pkl"
    assert row.detail


def test_the_worst_use_of_a_name_counts():
    body = tup(A + b"q\x00" + NEW, b"h\x00" + tup(1) + b"R")
    assert judged(pickled(body)) == {"acme.net.Config": "code"}


# -- every container ---------------------------------------------------------------------------
EVIL = pickled(dictionary(("w", 1), ("x", call("os.system", "true"))))


@pytest.mark.parametrize("at", range(5))
def test_all_five_pickles_of_a_legacy_stream_are_judged(at):
    evil = call("os.system", "true") + b"0"
    parts = [
        MAGIC,
        b"\x80\x02M\xe9\x03.",
        pickled(b"}"),
        pickled(dictionary(("w", tensor()))),
        pickled(["0"]),
    ]
    parts[at] = parts[at][:2] + evil + parts[at][2:]
    magic, version, system, main, keys = parts
    if at == 0:  # an unusual head is not even a legacy stream
        magic = MAGIC[:-1] + b"0" + evil + MAGIC[2:]
    data = legacy(main, keys, magic=magic, version=version, system=system)
    assert verdicts(read_bytes(data))["os.system"] == "code"


@pytest.mark.parametrize(
    "version", [pickled(call("os.system", "true")), pickled(True), pickled(1.0)]
)
def test_the_version_of_a_legacy_stream_is_a_plain_number(version):
    with pytest.raises(CkptError) as caught:
        read_bytes(legacy(pickled(dictionary(("w", tensor()))), version=version))
    assert caught.value.slug == "header-invalid"


def test_a_magic_number_that_is_computed_is_code():
    magic = pickled(call("__builtin__.int", str(0x1950A86A20F9469CFC6C)))
    found = read_bytes(legacy(pickled(dictionary(("w", tensor()))), magic=magic))
    assert (found.format, verdicts(found)) == ("pickle", {"builtins.int": "code"})


def embedded(module, attribute):
    """What a legacy file makes of a class: ('module', class, file, source)."""
    return tup("module", name(module, attribute), "net.py", "class Net: ...") + b"Q"


@pytest.mark.parametrize(
    ("body", "verdict"),
    [
        (embedded("acme.net", "Net") + NEW + D + b"b", "foreign"),
        (embedded("torch.nn.modules.linear", "Linear") + NEW + D + b"b", "known"),
        (embedded("os", "system") + tup("true") + b"R", "code"),
        (embedded("os", "system"), "code"),
        (dictionary(("hook", embedded("os", "system"))), "code"),
        (dictionary(("hook", embedded("acme.net", "Net"))), "code"),
        (embedded("acme.net", "Net") + tup(1) + b"R", "code"),
    ],
)
def test_a_class_with_its_source(body, verdict):
    data = legacy(pickled(dictionary(("w", tensor()), ("x", body))))
    assert worst(pickled(dictionary(("x", body)))) == verdict
    assert verdict in verdicts(read_bytes(data)).values()


@pytest.mark.parametrize("member", ["storages", "tensors", "pickle"])
def test_every_pickle_of_a_tar_is_judged(member):
    parts = {m: pickled(0) for m in ("sys_info", "storages", "tensors")}
    parts["pickle"] = pickled(dictionary(("w", 1)))
    first = parts[member]
    parts[member] = first[:2] + call("os.system", "true") + b"0" + first[2:]
    assert verdicts(read_bytes(tar(parts)))["os.system"] == "code"


def test_a_bare_pickle_and_a_stream_inside_one_are_judged():
    assert verdicts(read_bytes(EVIL, "x.pkl"))["os.system"] == "code"
    inner = legacy(MAGIC[:2] + call("os.system", "true") + b"0" + storage() + b".")
    raw = b"B" + struct.pack("<I", len(inner)) + inner
    outer = pickled(tensor(call("torch.storage._load_from_bytes", raw)))
    assert verdicts(read_bytes(outer, "x.pkl"))["os.system"] == "code"


def test_a_stream_inside_a_zip_is_code():
    """torch.save never writes one: nobody reads what is inside, so nobody vouches for it."""
    inner = saved_legacy(torch.ones(2))
    raw = b"B" + struct.pack("<I", len(inner)) + inner
    data = archive(
        pickled(dictionary(("w", tensor()), ("x", call("torch.storage._load_from_bytes", raw))))
    )
    assert verdicts(read_bytes(data))["torch.storage._load_from_bytes"] == "code"


@pytest.mark.parametrize("way", [pickle.dumps, saved, saved_legacy])
def test_a_stream_of_bytes_that_are_no_literal_is_code(way):
    body = tensor(call("torch.storage._load_from_bytes", call("__builtin__.bytes", [1, 2])))
    with pytest.raises(CkptError):
        read_bytes(pickled(body), "x.pkl")


# -- foreign -----------------------------------------------------------------------------------
FOREIGN = {
    "NEWOBJ": A + NEW,
    "NEWOBJ, dict": A + NEW + D + b"b",
    "NEWOBJ, empty dict": A + NEW + b"}b",
    "NEWOBJ, list items": A + NEW + b"(K\x01K\x02e",
    "NEWOBJ, one item": A + NEW + b"K\x01a",
    "NEWOBJ, dict items": A + NEW + b"(" + text("a") + b"K\x01u",
    "NEWOBJ, items and dict": A + NEW + b"(" + text("a") + b"K\x01u" + D + b"b",
    "copy_reg": reconstructor(A) + D + b"b",
    "copyreg": call("copyreg._reconstructor", A, name("builtins", "object"), None) + D + b"b",
    "dotted name": name("acme.net", "Outer.Inner") + NEW + D + b"b",
    "stack global": text("acme.net") + text("Config") + b"\x93" + NEW,
    "twice": tup(A + b"q\x00" + NEW, b"h\x00" + NEW + D + b"b"),
    "tensor subclass": call(
        "torch._tensor._rebuild_from_type_v2",
        name("torch._utils", "_rebuild_tensor_v2"),
        A,
        (storage(), 0, (6,), (1,), False, HOOKS),
        b"}",
    ),
}


@pytest.mark.parametrize("case", FOREIGN)
def test_an_instance_of_a_strange_class_is_foreign(case):
    found = judged(pickled(FOREIGN[case]))
    strangers = {key: verdict for key, verdict in found.items() if key.startswith("acme.")}
    assert set(strangers.values()) == {"foreign"}
    assert worst(pickled(FOREIGN[case])) == "foreign"


def test_a_nested_class_of_protocol_2_is_foreign():
    """copyreg spells Outer.Inner as getattr(Outer, 'Inner')."""
    body = call("__builtin__.getattr", name("acme.net", "Outer"), "Inner") + NEW + D + b"b"
    found = judged(pickled(body))
    assert found["acme.net.Outer.Inner"] == "foreign"
    assert worst(pickled(body)) == "foreign"


@pytest.mark.parametrize(
    ("module", "answer"),
    [
        ("acme", True),
        ("acme.net", True),
        ("__main__", True),
        ("os", False),
        ("os.path", False),
        ("torch", False),
        ("torch.nn", False),
        ("torchvision.models", True),
        ("numpy.lib", False),
        ("builtins", False),
        ("__builtin__", False),
        ("", False),
        (".os", False),
        ("distutils.x", False),
        ("posix", False),
        ("nt", False),
        ("_winapi", False),
        ("encodings.utf_8", False),
        ("ntpath", False),
    ],
)
def test_which_modules_are_foreign(module, answer):
    assert is_foreign(module) is answer


# -- known -------------------------------------------------------------------------------------
class Stateful(torch.Tensor):
    pass


KNOWN = {
    "namespace": argparse.Namespace(a=1, b=argparse.Namespace(c=[1])),
    "simple namespace": types.SimpleNamespace(a=1),
    "ordered dict": collections.OrderedDict(a=1),
    "defaultdict of lists": collections.defaultdict(list, a=[1]),
    "defaultdict of nothing": collections.defaultdict(None, a=1),
    "defaultdict of numbers": collections.defaultdict(int, a=1),
    "counter": collections.Counter("aab"),
    "deque": collections.deque([1, 2], maxlen=5),
    "set": {1, 2},
    "frozenset": frozenset((1, 2)),
    "bytes": b"\0\xff",
    "bytearray": bytearray(b"zz"),
    "complex": 1 + 2j,
    "range": range(3),
    "slice": slice(1, 2),
    "path": pathlib.PurePosixPath("/a/b"),
    "windows path": pathlib.PureWindowsPath("c:/a"),
    "here path": pathlib.Path("a"),
    "datetime": datetime.datetime(2020, 1, 2, 3, 4, 5),
    "zoned datetime": datetime.datetime(2020, 1, 2, tzinfo=datetime.timezone.utc),
    "date": datetime.date(2020, 1, 2),
    "time": datetime.time(1, 2),
    "timedelta": datetime.timedelta(seconds=3),
    "decimal": decimal.Decimal("1.5"),
    "fraction": fractions.Fraction(1, 2),
    "uuid": uuid.UUID(int=5),
    "numpy scalar": np.float64(0.5),
    "numpy int": np.int64(3),
    "numpy bool": np.bool_(True),
    "numpy array": np.arange(6.0).reshape(2, 3).T,
    "numpy texts": np.array(["a", "bc"]),
    "numpy dtype": np.dtype("<f4"),
    "numpy type": np.float32,
    "dtype": torch.float16,
    "size": torch.Size((1, 2)),
    "device": torch.device("cuda:1"),
    "module": nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.ReLU(), nn.Dropout()),
    "attention": nn.TransformerEncoderLayer(4, 2, 8),
    "lstm": nn.LSTM(2, 3),
    "optimizer": torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1, momentum=0.9),
    "scaler": torch.amp.GradScaler("cpu"),
    "adam": torch.optim.Adam([nn.Parameter(torch.ones(2))]),
    "parameter": nn.Parameter(torch.ones(2)),
    "sparse": torch.eye(2).to_sparse(),
    "meta": torch.empty(2, device="meta"),
    "type": int,
}


@pytest.mark.parametrize("protocol", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("case", KNOWN)
def test_honest_values_are_known(case, protocol):
    data = saved({"w": torch.ones(2), "x": KNOWN[case]}, pickle_protocol=protocol)
    found = verdicts(read_bytes(data))
    assert {key: verdict for key, verdict in found.items() if verdict != "known"} == {}


NUMPY_1 = {
    "scalar": call(
        "numpy.core.multiarray.scalar",
        call("numpy.dtype", "f8", 0, 1) + tup(3, "<", None, None, None, -1, -1, 0) + b"b",
        call("_codecs.encode", "\0" * 8, "latin1"),
    ),
    "array": call(
        "numpy.core.multiarray._reconstruct",
        name("numpy", "ndarray"),
        (0,),
        call("_codecs.encode", "b", "latin1"),
    )
    + tup(
        1, (2,), call("numpy.dtype", "f4", 0, 1), False, call("_codecs.encode", "\0" * 8, "latin1")
    )
    + b"b",
}


@pytest.mark.parametrize("case", NUMPY_1)
def test_numpy_1_spells_its_values_under_another_name(case):
    assert worst(pickled(NUMPY_1[case])) == "known"


PROTOCOL_2 = {
    "set": call("__builtin__.set", [1]),
    "long": name("__builtin__", "long"),
    "bytes": call("__builtin__.bytes"),
    "unicode": name("__builtin__", "unicode"),
    "bytearray": call("__builtin__.bytearray", "x", "latin-1"),
    "xrange": call("__builtin__.xrange", 3),
    "defaultdict": call("collections.defaultdict", name("__builtin__", "list")),
    "namespace": reconstructor(name("argparse", "Namespace")) + D + b"b",
    "getattr of a known nested class": call(
        "__builtin__.getattr",
        name("torch.distributed._shard.sharded_tensor.metadata", "MEM_FORMAT_ENCODING"),
        "x",
    )
    + b"0N",
}


@pytest.mark.parametrize("case", [c for c in PROTOCOL_2 if "getattr" not in c])
def test_protocol_2_spellings_are_known(case):
    assert worst(pickled(PROTOCOL_2[case])) == "known"


def test_builtin_names_of_protocol_2_are_mapped_only_below_protocol_3():
    """Under protocol 3 no loader maps `__builtin__`: the name is simply not ours."""
    assert worst(pickled(call("__builtin__.set", [1]), protocol=2)) == "known"
    assert worst(pickled(call("__builtin__.set", [1]), protocol=3)) == "code"


def test_omegaconf_is_known():
    found = verdicts(read_path(FIXTURES / "omegaconf_like.pth"))
    assert any(key.startswith("omegaconf.") for key in found)
    assert set(found.values()) == {"known"}


class Colour(enum.Enum):
    RED = 1


def test_pickles_that_python_writes_of_user_code(monkeypatch):
    """What the usual suspects come to, through Python's own pickler."""
    module = types.ModuleType("acme_user")
    pair = collections.namedtuple("Pair", "a b")
    plain = type("Plain", (), {})
    listed = type("Listed", (list,), {})
    mapped = type("Mapped", (dict,), {})
    for cls in (pair, plain, listed, mapped, Colour):
        monkeypatch.setattr(cls, "__module__", "acme_user")
        monkeypatch.setattr(module, cls.__name__, cls, raising=False)
    monkeypatch.setitem(sys.modules, "acme_user", module)
    one = plain()
    one.a = 1
    wanted = [
        (one, "foreign"),
        (listed([1]), "foreign"),
        (mapped(a=1), "foreign"),
        (Colour.RED, "code"),
        (pair(1, 2), "code"),
        (functools.partial(plain), "code"),
        (plain, "code"),
    ]
    for value, verdict in wanted:
        for protocol in (2, 3, 4, 5):
            assert worst(pickle.dumps(value, protocol)) == verdict, (value, protocol)
    assert worst(pickle.dumps(one, 0)) == "foreign"
    assert copyreg.__name__ == "copyreg"


def test_fifty_thousand_names_are_judged_in_no_time():
    body = b"](" + b"".join(name(f"acme{i}", "f") for i in range(50_000)) + b"e"
    assert len(judged(pickled(body))) == 50_000


def test_numbers_stay_numbers():
    assert judged(pickled([number(5), None, True, 1.5])) == {}
