"""Every committed file is read as its truth says: structure, tags, bytes, verdicts, refusals."""

import hashlib

import pytest
from formats_support import FIXTURES, read_path, tensor_bytes, truths, verdicts

from ckptool.errors import CkptError
from ckptool.formats import identify
from ckptool.places import open_source

TRUTHS = truths()
VALID = [name for name, truth in TRUTHS.items() if "error" not in truth]
INVALID = [name for name, truth in TRUTHS.items() if "error" in truth]


def in_file_order(truth, rows):
    """safetensors sorts by its own rule; its truth keeps the state_dict's order."""
    if truth["format"] != "safetensors":
        return rows
    from safetensors import safe_open

    with safe_open(FIXTURES / truth["file"], "np") as package:
        order = package.offset_keys()
    return sorted(rows, key=lambda row: order.index(row["key"]))


def rows_of(name):
    checkpoint = read_path(FIXTURES / name)
    assert len(checkpoint.tables) == len(TRUTHS[name]["tables"])
    for truth, table in zip(TRUTHS[name]["tables"], checkpoint.tables, strict=True):
        assert list(table.path) == truth["path"]
        yield from zip(in_file_order(TRUTHS[name], truth["tensors"]), table.tensors, strict=True)


@pytest.mark.parametrize("name", VALID)
def test_the_tables_hold_these_keys_in_this_order(name):
    checkpoint = read_path(FIXTURES / name)
    assert checkpoint.format == TRUTHS[name]["format"]
    assert checkpoint.size_bytes == (FIXTURES / name).stat().st_size
    assert checkpoint.weights == 0
    found = [(list(t.path), [one.key for one in t.tensors]) for t in checkpoint.tables]
    truth = TRUTHS[name]
    wanted = [
        (t["path"], [r["key"] for r in in_file_order(truth, t["tensors"])]) for t in truth["tables"]
    ]
    assert found == wanted
    assert all(table.duplicate_keys == () for table in checkpoint.tables)


def check_structure(row, one):
    dtype = one.dtype.name if one.dtype else None
    found = {"shape": list(one.shape), "dtype": dtype, "device": one.device}
    assert found == {field: row[field] for field in found}
    assert one.requires_grad == row["requires_grad"]
    if one.kind != "sparse":
        assert (list(one.stride), one.offset) == (row["stride"], row["offset"])


@pytest.mark.parametrize("name", VALID)
def test_each_tensor_has_its_shape_stride_offset_dtype_device_and_gradient_flag(name):
    for row, one in rows_of(name):
        assert one.key == row["key"]
        check_structure(row, one)


@pytest.mark.parametrize("name", VALID)
def test_the_spans_lead_to_the_bytes_torch_saved(name):
    data = (FIXTURES / name).read_bytes()
    for row, one in rows_of(name):
        if row["sha256"] is None or one.storage is None:
            assert one.kind in ("sparse", "meta", "quantized")
            continue
        assert hashlib.sha256(tensor_bytes(one, data)).hexdigest() == row["sha256"], one.key


@pytest.mark.parametrize("name", [name for name in VALID if "globals" in TRUTHS[name]])
def test_names_get_their_verdict(name):
    found = verdicts(read_path(FIXTURES / name))
    assert {key: found[key] for key in TRUTHS[name]["globals"]} == TRUTHS[name]["globals"]


@pytest.mark.parametrize("name", [name for name in VALID if "globals" not in TRUTHS[name]])
def test_nothing_in_an_honest_file_could_run_code(name):
    foreign = {"acme_models.UserNet": "foreign"} if TRUTHS[name].get("module") else {}
    found = verdicts(read_path(FIXTURES / name))
    assert {key: value for key, value in found.items() if value != "known"} == foreign


@pytest.mark.parametrize("name", [name for name in VALID if "extras" in TRUTHS[name]])
def test_what_stands_beside_the_weights_is_told(name):
    extras = {extra.path[0]: extra.value for extra in read_path(FIXTURES / name).extras}
    for key, value in TRUTHS[name]["extras"].items():
        if type(value) is int and value >= 1 << 64:
            value = f"<{value.bit_length()}-bit int>"
        assert extras[key] == value


def test_the_moments_of_an_optimizer_are_tensors_of_the_file():
    checkpoint = read_path(FIXTURES / "dp_cuda.pth")
    truth = TRUTHS["dp_cuda.pth"]["optimizer"]
    found = {
        ".".join(map(str, t.path[2:])): t for t in checkpoint.tensors if t.path[0] == "optimizer"
    }
    assert list(found) == [row["key"] for row in truth]
    data = (FIXTURES / "dp_cuda.pth").read_bytes()
    for row in truth:
        check_structure(row, found[row["key"]])
        assert hashlib.sha256(tensor_bytes(found[row["key"]], data)).hexdigest() == row["sha256"]


def test_tensors_inside_strangers_are_found():
    checkpoint = read_path(FIXTURES / "namespace_foreign.pth")
    found = {".".join(map(str, t.path)): t for t in checkpoint.tensors}
    (row,) = TRUTHS["namespace_foreign.pth"]["other_tensors"]
    check_structure(row, found[row["key"]])


def test_tied_names_share_a_storage():
    by_key = {t.key: t.storage for t in read_path(FIXTURES / "tied.pth").tables[0].tensors}
    for first, second in TRUTHS["tied.pth"]["tied"]:
        assert by_key[first] is by_key[second]
    assert by_key["module.ln.weight"] is not by_key["module.emb.weight"]


def test_parameters_are_told_from_tensors():
    kinds = {t.key: t.kind for t in read_path(FIXTURES / "params.pth").tables[0].tensors}
    names = TRUTHS["params.pth"]["parameters"]
    assert [key for key, kind in kinds.items() if kind == "parameter"] == names


@pytest.mark.parametrize(
    ("name", "kind"), [("whole_model.pth", "module"), ("net_plain.pth", "state_dict")]
)
def test_a_table_says_whether_it_was_walked_from_a_module(name, kind):
    assert read_path(FIXTURES / name).tables[0].kind == kind


@pytest.mark.parametrize("name", INVALID)
def test_what_is_no_checkpoint_is_refused(name):
    with pytest.raises(CkptError) as caught:
        read_path(FIXTURES / name)
    error = caught.value
    assert error.slug == TRUTHS[name]["error"]
    assert error.exit_status == 2
    assert error.path.endswith(name)
    assert error.hint
    assert "\n" not in str(error)


def test_the_name_of_a_file_decides_nothing_and_is_mentioned():
    checkpoint = read_path(FIXTURES / "named_pth_is_safetensors.pth")
    assert [note.slug for note in checkpoint.notes] == ["suffix-mismatch"]
    assert not any(n.slug == "suffix-mismatch" for n in read_path(FIXTURES / "legacy.pth").notes)


@pytest.mark.parametrize("name", VALID)
def test_identify_names_the_container(name):
    inside = {"torchscript": "torch-zip", "torch-package": "torch-zip", "torch-export": "torch-zip"}
    with open_source(FIXTURES / name) as source:
        wanted = TRUTHS[name]["format"]
        assert identify(source).name == inside.get(wanted, wanted)
