"""A DataParallel file of Python 2: `_metadata` is a list of pairs, one of which must go."""

import io
import pickle
import struct

import pytest
import torch

import ckptool


def text(value):
    raw = value.encode()
    return b"U" + bytes([len(raw)]) + raw


def name(module, attribute):
    return f"c{module}\n{attribute}\n".encode()


def ordered(*rows):
    listed = b"".join(b"](" + key + value + b"e" for key, value in rows)
    return name("collections", "OrderedDict") + b"](" + listed + b"e\x85R"


def tensor(key, count):
    pid = b"(" + text("storage") + name("torch", "FloatStorage") + text(key) + text("cuda:0")
    view = (
        pid + b"K" + bytes([count]) + b"NtQ" + b"K\0" + b"K" + bytes([count]) + b"\x85K\1\x85\x89"
    )
    return name("torch._utils", "_rebuild_tensor_v2") + b"(" + view + ordered() + b"tR"


def version(path):
    return text(path), b"}" + text("version") + b"K\1s"


def stream(single):
    """`single`: each item added by its own APPEND, as short lists are."""
    metadata = ordered(version(""), version("module"), version("module.fc"))
    if single:
        rows = [version(""), version("module"), version("module.fc")]
        listed = b"".join(b"](" + key + value + b"ea" for key, value in rows)
        metadata = name("collections", "OrderedDict") + b"]" + listed + b"\x85R"
    weights = ordered((text("module.fc.weight"), tensor("7", 3)))
    main = b"\x80\x02" + weights + b"}" + text("_metadata") + metadata + b"sb."
    head = pickle.dumps(0x1950A86A20F9469CFC6C, 2) + pickle.dumps(1001, 2)
    head += pickle.dumps({"protocol_version": 1001, "little_endian": True, "type_sizes": {}}, 2)
    keys = b"\x80\x02]" + text("7") + b"a."
    return head + main + keys + struct.pack("<q3f", 3, 1.0, 2.0, 3.0)


@pytest.mark.parametrize("single", [False, True])
def test_the_wrappers_own_entry_goes_with_its_whole_pair(tmp_path, single):
    source, target = tmp_path / "old.pth", tmp_path / "new.pth"
    source.write_bytes(stream(single))

    ckptool.convert(source, target, to_cpu=True)

    loaded = torch.load(io.BytesIO(target.read_bytes()), weights_only=True, encoding="utf-8")
    assert {key: value.tolist() for key, value in loaded.items()} == {"fc.weight": [1.0, 2.0, 3.0]}
    assert loaded._metadata == {"": {"version": 1}, "fc": {"version": 1}}
    assert b"cuda" not in target.read_bytes()
