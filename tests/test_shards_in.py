"""Checkpoints in several files: what torch and safetensors saved comes out whole, and an index
that does not say what the shards hold is refused by name.
"""

import json
import os
import subprocess
import sys
import textwrap

import pytest
import torch
from formats_support import archive, dictionary, name, op, pickled, saved, tensor, tensor_bytes
from safetensors.torch import save, save_file

import ckptool
from ckptool.errors import CkptError, LimitExceeded, PathEscape, SpecialFile
from ckptool.formats import read as read_file
from ckptool.formats.folders import look
from ckptool.formats.hf_shards import read
from ckptool.limits import DEFAULT
from ckptool.places import Folder, is_folder, open_source, reopen
from ckptool.plans import Copy, Output, Plan
from ckptool.spans import Span
from ckptool.writing import FileSink, write

INDEX = {"safetensors": "model.safetensors.index.json", "bin": "pytorch_model.bin.index.json"}
STEM = {"safetensors": "model", "bin": "pytorch_model"}


def net():
    torch.manual_seed(3)
    return {
        "embed.weight": torch.randn(7, 5),
        "layers.0.weight": torch.randn(5, 5, dtype=torch.float16),
        "layers.0.bias": torch.arange(5, dtype=torch.int64),
        "layers.1.weight": torch.randn(5, 5).to(torch.bfloat16),
        "layers.1.scale": torch.tensor(2.5),
        "layers.1.mask": torch.tensor([True, False]),
        "head.empty": torch.empty(0, 3),
        "head.weight": torch.randn(2, 5, dtype=torch.float64),
    }


def size_of(tensors):
    return sum(t.numel() * t.element_size() for t in tensors.values())


def shard(number, count, kind="safetensors"):
    return f"{STEM[kind]}-{number:05}-of-{count:05}.{kind}"


def write_index(folder, weight_map, kind="safetensors", total=None, **more):
    metadata = {} if total is None else {"total_size": total}
    text = json.dumps({"metadata": metadata, "weight_map": weight_map, **more}, indent=2)
    (folder / INDEX[kind]).write_text(text + "\n")


def save_shards(folder, tensors, kind="safetensors", count=3, **index):
    """As transformers lays them out; the keys dealt round, so that order matters."""
    folder.mkdir(exist_ok=True)
    keys = list(tensors)
    parts = [{k: tensors[k] for k in keys[i::count]} for i in range(count)]
    files = {}
    for i, part in enumerate(parts, 1):
        path = folder / shard(i, count, kind)
        if kind == "safetensors":
            save_file(part, path, metadata={"format": "pt"})
        else:
            torch.save(part, path)
        files.update(dict.fromkeys(part, path.name))
    write_index(folder, {k: files[k] for k in keys}, kind, **{"total": size_of(tensors), **index})
    return folder


def read_folder(path, **options):
    return read(Folder(path), **options)


def refusal(path, kind=CkptError, **options):
    with pytest.raises(kind) as caught:
        read_folder(path, **options)
    error = caught.value
    assert error.exit_status == 2
    assert str(error).startswith(str(path))
    assert "\n" not in error.text
    return error


def bytes_of(found, one):
    """A tensor's elements, through the addresses of the checkpoint alone."""
    (number,) = {piece.source_id for piece in one.storage.pieces} or {0}
    with reopen(found.sources[number]) as source:
        return tensor_bytes(one, source.read(0, source.size))


def assert_holds(found, tensors):
    (table,) = found.tables
    assert table.path == ()
    assert [t.key for t in table.tensors] == list(tensors)
    for one, truth in zip(table.tensors, tensors.values(), strict=True):
        assert one.shape == tuple(truth.shape)
        assert f"torch.{one.dtype.name}" == str(truth.dtype)
        plain = truth.contiguous().reshape(-1).view(torch.uint8)
        assert bytes_of(found, one) == plain.numpy().tobytes(), one.key


def slugs(found):
    return [note.slug for note in found.notes]


@pytest.fixture
def folder(tmp_path):
    path = tmp_path / "net"
    path.mkdir()
    return path


# --- honest ones -----------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 2, 3, 8])
@pytest.mark.parametrize("kind", ["safetensors", "bin"])
def test_every_number_comes_out(folder, kind, count):
    save_shards(folder, net(), kind, count)
    found = read_folder(folder)
    assert_holds(found, net())
    assert found.format == "hf-shards"
    assert found.file == str(folder)
    assert found.weights == 0
    assert found.notes == () or kind == "safetensors"
    names = [shard(n + 1, count, kind) for n in range(count)]
    assert [os.path.basename(a.uri) for a in found.sources] == names
    assert found.size_bytes == sum((folder / n).stat().st_size for n in [*names, INDEX[kind]])
    assert {t.key: t for t in found.tensors} == {t.key: t for t in found.tables[0].tensors}


@pytest.mark.parametrize("kind", ["safetensors", "bin"])
def test_storages_say_which_shard_is_theirs(folder, kind):
    save_shards(folder, net(), kind, 3)
    found = read_folder(folder)
    keys = [storage.key for storage in found.storages]
    assert len(set(keys)) == len(keys) == 8
    numbers = {"embed.weight": 0, "layers.0.weight": 1, "layers.0.bias": 2, "layers.1.weight": 0}
    for one in found.tables[0].tensors[:4]:
        assert one.storage.key.startswith(f"{numbers[one.key]}/")
        assert [piece.source_id for piece in one.storage.pieces] == [numbers[one.key]]
        assert any(one.storage is storage for storage in found.storages)


def test_legacy_shards_and_a_mix_of_kinds(folder):
    a, b = {"a": torch.ones(3)}, {"b": torch.zeros(2, 2)}
    torch.save(a, folder / "one.bin", _use_new_zipfile_serialization=False)
    save_file(b, folder / "two.safetensors")
    write_index(folder, {"b": "two.safetensors", "a": "one.bin"}, "bin")
    found = read_folder(folder)
    assert_holds(found, {**b, **a})
    assert [os.path.basename(a.uri) for a in found.sources] == ["two.safetensors", "one.bin"]


def test_ties_in_a_shard_stay(folder):
    base = torch.arange(12.0)
    torch.save({"a": base, "b": base, "v": base[2:6].view(2, 2)}, folder / shard(1, 2, "bin"))
    torch.save({"c": base, "t": base.view(3, 4).t()}, folder / shard(2, 2, "bin"))
    files = {k: shard(1, 2, "bin") for k in "abv"} | {k: shard(2, 2, "bin") for k in "ct"}
    write_index(folder, files, "bin", 48 + 48)
    found = read_folder(folder)
    a, b, v, c, t = found.tables[0].tensors
    assert a.storage is b.storage is v.storage
    assert c.storage is t.storage is not a.storage
    assert (v.offset, t.stride) == (2, (1, 4))
    truths = {"a": base, "b": base, "v": base[2:6].view(2, 2), "c": base, "t": base.view(3, 4).t()}
    assert_holds(found, truths)
    assert found.notes == ()


@pytest.mark.parametrize("total", [48, 96, 112, 192 + 16])
def test_total_size_counts_ties_once_or_each_time(folder, total):
    base = torch.arange(12.0)
    torch.save({"a": base, "b": base, "v": base[2:6]}, folder / "x.bin")
    write_index(folder, dict.fromkeys("abv", "x.bin"), "bin", total)
    assert slugs(read_folder(folder)) == (["index-total-size"] if total in (96, 208) else [])


@pytest.mark.parametrize("total", ["48", 1.5, True, -1])
def test_a_total_size_that_is_no_number_is_mentioned(folder, total):
    save_shards(folder, net(), total=total)
    assert slugs(read_folder(folder)) == ["index-total-size"]


def test_metadata_of_the_headers_is_one(folder):
    for number, more in enumerate(({}, {"step": "5"}, {"step": "6", "by": "me"}), 1):
        save_file(
            {f"w{number}": torch.ones(1)}, folder / shard(number, 3), {"format": "pt", **more}
        )
    write_index(folder, {f"w{n}": shard(n, 3) for n in (1, 2, 3)})
    found = read_folder(folder)
    (extra,) = found.extras
    assert extra.path == ("__metadata__",)
    assert extra.value == {"format": "pt", "step": "5", "by": "me"}
    assert [note for note in found.notes if note.slug == "shards-differ"]
    assert shard(3, 3) in found.notes[0].text
    assert "'step'" in found.notes[0].text


def test_layer_versions_of_state_dicts_are_one(folder):
    model = torch.nn.Sequential(torch.nn.BatchNorm1d(2), torch.nn.Linear(2, 2))
    state = model.state_dict()
    for number, prefix in enumerate("01", 1):
        part = type(state)((k, v) for k, v in state.items() if k.startswith(prefix))
        part._metadata = type(state)(
            (k, v) for k, v in state._metadata.items() if k in ("", prefix)
        )
        torch.save(part, folder / shard(number, 2, "bin"))
    write_index(folder, {k: shard(int(k[0]) + 1, 2, "bin") for k in state}, "bin")
    found = read_folder(folder)
    assert found.tables[0].metadata == {k: dict(v) for k, v in state._metadata.items()}
    assert_holds(found, dict(state))


def test_entries_that_are_no_tensors_are_kept(folder):
    parts = [
        {"a": torch.ones(2), "b": torch.ones(1), "n": 5},
        {"c": torch.ones(1), "d": torch.ones(1)},
    ]
    for number, part in enumerate(parts, 1):
        torch.save(part, folder / shard(number, 2, "bin"))
    write_index(folder, {k: shard(1 if k in "ab" else 2, 2, "bin") for k in "abcd"}, "bin")
    found = read_folder(folder)
    assert found.tables[0].others == (("n", "int"),)
    assert [(extra.path, extra.value) for extra in found.extras] == [(("n",), 5)]


def test_a_write_through_the_addresses(folder, tmp_path, monkeypatch):
    """As a conversion will: spans of all shards into one file, from another place than the read."""
    save_shards(folder, net(), count=4)
    monkeypatch.chdir(folder.parent)
    found = read_folder("net")
    parts = tuple(
        Copy(piece.source_id, piece.span)
        for t in found.tables[0].tensors
        for piece in t.storage.pieces
    )
    plan = Plan(found.sources, (Output("x", parts, sum(part.size for part in parts)),))
    write(plan, FileSink(tmp_path / "x"), {})
    truth = b"".join(t.reshape(-1).view(torch.uint8).numpy().tobytes() for t in net().values())
    assert (tmp_path / "x").read_bytes() == truth


def test_one_shard_is_open_at_a_time(tmp_path):
    """Two hundred shards of each kind under a limit of 40 open files."""
    for kind in ("safetensors", "bin"):
        tensors = {f"w{n}": torch.full((2,), float(n)) for n in range(200)}
        save_shards(tmp_path / kind, tensors, kind, 200)
    code = """
        import resource, sys
        from ckptool.formats.hf_shards import read
        from ckptool.places import Folder
        resource.setrlimit(resource.RLIMIT_NOFILE, (40, 40))
        for path in sys.argv[1:]:
            assert len(read(Folder(path)).tensors) == 200
    """
    root = os.path.dirname(os.path.dirname(ckptool.__file__))
    subprocess.run(
        [
            sys.executable,
            "-c",
            textwrap.dedent(code),
            str(tmp_path / "safetensors"),
            str(tmp_path / "bin"),
        ],
        env={**os.environ, "PYTHONPATH": root},
        check=True,
    )


def test_links_inside_the_folder_and_a_link_to_it(folder, tmp_path):
    save_shards(folder, net(), count=2)
    (folder / shard(1, 2)).rename(folder / "real")
    (folder / shard(1, 2)).symlink_to("real")
    (tmp_path / "alias").symlink_to("net")
    assert_holds(read_folder(folder), net())
    assert_holds(read_folder(tmp_path / "alias"), net())


def test_the_cache_of_hugging_face(tmp_path):
    """There every file is a link to ../../blobs/HASH; nothing else may lead out."""
    model = tmp_path / "models--acme--net"
    blobs = model / "blobs"
    snapshot = model / "snapshots" / "abc123"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    save_shards(blobs, net(), count=2)
    for file in blobs.iterdir():
        (snapshot / file.name).symlink_to(f"../../blobs/{file.name}")
    assert_holds(read_folder(snapshot), net())
    secret = tmp_path / "secret"
    secret.write_bytes(b"x")
    (blobs / shard(1, 2)).unlink()
    (blobs / shard(1, 2)).symlink_to(secret)
    refusal(snapshot, PathEscape)
    (snapshot / shard(1, 2)).unlink()
    (snapshot / shard(1, 2)).symlink_to(secret)
    refusal(snapshot, PathEscape)


def test_no_other_folder_may_link_to_blobs(tmp_path):
    blobs, snapshot = tmp_path / "net" / "blobs", tmp_path / "net" / "snapshots" / "abc123"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    save_shards(blobs, net(), count=2)
    for file in blobs.iterdir():
        (snapshot / file.name).symlink_to(f"../../blobs/{file.name}")
    refusal(snapshot, PathEscape)


# --- index and shards that disagree ----------------------------------------------------------


def weight_map(folder, kind="safetensors"):
    return json.loads((folder / INDEX[kind]).read_text())["weight_map"]


@pytest.mark.parametrize("kind", ["safetensors", "bin"])
def test_a_missing_shard_is_named_with_its_keys(folder, kind):
    save_shards(folder, net(), kind, 3)
    (folder / shard(2, 3, kind)).unlink()
    error = refusal(folder, SpecialFile)
    assert f"a shard is missing: '{shard(2, 3, kind)}' (3 of 8 keys)" in error.text
    (folder / shard(3, 3, kind)).unlink()
    error = refusal(folder, SpecialFile)
    assert "2 of 3 shards are missing" in error.text
    assert error.findings == (
        f"'{shard(2, 3, kind)}' (3 of 8 keys)",
        f"'{shard(3, 3, kind)}' (2 of 8 keys)",
    )


@pytest.mark.parametrize("kind", ["safetensors", "bin"])
def test_a_key_that_its_shard_does_not_hold(folder, kind):
    save_shards(folder, net(), kind)
    files = {**weight_map(folder, kind), "ghost.weight": shard(2, 3, kind)}
    write_index(folder, files, kind)
    error = refusal(folder)
    assert f"'ghost.weight' is not in {shard(2, 3, kind)}, where the index has it" in error.text
    assert error.path == str(folder / INDEX[kind])
    assert error.hint


@pytest.mark.parametrize("kind", ["safetensors", "bin"])
def test_a_key_that_the_index_does_not_know(folder, kind):
    save_shards(folder, net(), kind)
    files = weight_map(folder, kind)
    del files["layers.0.weight"]
    write_index(folder, files, kind)
    assert (
        f"'layers.0.weight' is in {shard(2, 3, kind)}, the index does not" in refusal(folder).text
    )


def test_a_key_in_another_shard_than_the_index_says(folder):
    save_shards(folder, net())
    files = {**weight_map(folder), "embed.weight": shard(2, 3)}
    write_index(folder, files)
    assert (
        f"'embed.weight' is in {shard(1, 3)}, the index says {shard(2, 3)}" in refusal(folder).text
    )


@pytest.mark.parametrize("first", [1, 2])
def test_a_key_in_two_shards(folder, first):
    save_file({"a": torch.ones(1), "b": torch.ones(1)}, folder / shard(1, 2))
    save_file({"a": torch.zeros(1), "c": torch.ones(1)}, folder / shard(2, 2))
    write_index(folder, {"a": shard(first, 2), "b": shard(1, 2), "c": shard(2, 2)})
    error = refusal(folder)
    assert any(f"'a' is in two shards: {shard(first, 2)} and" in text for text in error.findings)


def test_one_shard_under_two_names(folder):
    save_file({"a": torch.ones(1), "b": torch.ones(1)}, folder / "x.safetensors")
    (folder / "y.safetensors").symlink_to("x.safetensors")
    write_index(folder, {"a": "x.safetensors", "b": "y.safetensors"})
    assert "'a' is in two shards" in " ".join(refusal(folder).findings)


def test_all_disagreements_are_counted_and_fifty_listed(folder):
    save_file({"a": torch.ones(1)}, folder / "x.safetensors")
    write_index(folder, {"a": "x.safetensors", **{f"k{n}": "x.safetensors" for n in range(300)}})
    error = refusal(folder)
    assert "and 299 more such" in error.text
    assert len(error.findings) == 51
    assert error.findings[-1] == "and 250 more"


def test_a_second_name_of_a_listed_tensor_need_not_be_in_the_index(folder):
    base = torch.arange(4.0)
    torch.save({"a": base, "tied": base}, folder / "x.bin")
    write_index(folder, {"a": "x.bin"}, "bin")
    found = read_folder(folder)
    assert_holds(found, {"a": base, "tied": base})
    assert found.tables[0].tensors[0].storage is found.tables[0].tensors[1].storage
    torch.save({"a": base, "view": base[1:]}, folder / "x.bin")  # other numbers: not the same
    assert "'view' is in x.bin, the index does not" in refusal(folder).text


def aliased(folder, **more):
    """Two shards; the first notes that 'tied' is another name of its 'a'."""
    texts = {"format": "pt", "tied": "a", **more}
    save_file({"a": torch.arange(4.0), "b": torch.ones(1)}, folder / shard(1, 2), texts)
    save_file({"c": torch.ones(2)}, folder / shard(2, 2), {"format": "pt"})
    return {"a": shard(1, 2), "b": shard(1, 2), "c": shard(2, 2)}


@pytest.mark.parametrize("listed", [False, True])
def test_an_alias_that_a_header_notes(folder, listed):
    files = aliased(folder)
    write_index(folder, {"tied": shard(1, 2), **files} if listed else files, total=28)
    found = read_folder(folder)
    keys = [t.key for t in found.tables[0].tensors]
    assert keys == (["tied", "a", "b", "c"] if listed else ["a", "b", "c", "tied"])
    rows = {t.key: t for t in found.tables[0].tensors}
    assert rows["tied"].storage is rows["a"].storage
    assert slugs(found) == []
    assert "tied=a" in found.extras[0].text


@pytest.mark.parametrize(
    ("places", "at"),
    [('{"tied": 2}', 2), ('{"tied": 0}', 0), ('{"tied": 3}', 3)]
    + [
        (text, 3)
        for text in ('{"tied": 4}', '{"tied": -1}', '{"tied": true}', "[]", "{", "[" * 99999)
    ],
    ids=range(9),
)
def test_an_alias_stands_where_our_writer_noted(folder, places, at):
    write_index(folder, aliased(folder, **{"ckptool.alias_places": places}))
    found = read_folder(folder)
    keys = ["a", "b", "c"]
    keys.insert(at, "tied")
    assert [t.key for t in found.tables[0].tensors] == keys
    assert "ckptool" not in found.extras[0].text


def test_an_alias_with_the_name_of_a_tensor_in_another_shard(folder):
    files = aliased(folder)
    save_file({"c": torch.ones(2), "tied": torch.ones(3)}, folder / shard(2, 2))
    for home in (1, 2):
        write_index(folder, {**files, "tied": shard(home, 2)})
        assert any("'tied' is in two shards" in text for text in refusal(folder).findings)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (
            {"state_dict": {"a": torch.ones(1), "b": torch.ones(2)}, "epoch": 3},
            "nested, at 'state_dict'",
        ),
        ([torch.ones(1)], "it holds no state_dict"),
        ({"deep": [torch.ones(1)], "x": 1, "y": "z"}, "it holds no state_dict"),
    ],
)
def test_a_shard_that_is_no_plain_state_dict(folder, value, text):
    torch.save(value, folder / "x.bin")
    write_index(folder, {"a": "x.bin"}, "bin")
    error = refusal(folder)
    assert text in error.text
    assert error.path == str(folder / "x.bin")


def test_a_shard_with_one_key_twice(folder):
    body = b"}(" + op("a") + tensor() + op("a") + tensor() + b"u"
    (folder / "x.bin").write_bytes(archive(pickled(body)))
    write_index(folder, {"a": "x.bin"}, "bin")
    assert refusal(folder).slug == "key-duplicate"


def test_a_broken_shard_is_named(folder):
    save_shards(folder, net())
    path = folder / shard(2, 3)
    path.write_bytes(path.read_bytes()[:-1])
    assert refusal(folder).path == str(path)
    path.write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:1\nsize 5\n")
    error = refusal(folder)
    assert (error.path, error.slug) == (str(path), "not-a-checkpoint")
    assert "git lfs pull" in error.hint


# --- pickles in shards -----------------------------------------------------------------------

EVIL = name("os", "system") + b"(" + op("touch pwned") + b"tR"


def test_a_shard_that_could_run_code_keeps_its_verdict(folder):
    body = dictionary(("a", tensor()), ("b", tensor()), ("c", EVIL))
    (folder / shard(1, 2, "bin")).write_bytes(archive(pickled(body)))
    torch.save({"d": torch.ones(2)}, folder / shard(2, 2, "bin"))
    write_index(folder, {k: shard(1 if k in "ab" else 2, 2, "bin") for k in "abd"}, "bin")
    rows = {(row.name, row.verdict): row for row in read_folder(folder).globals}
    assert [name for name, verdict in rows if verdict == "code"] in (
        ["os.system"],
        ["posix.system"],
    )
    (evil,) = [row for row in rows.values() if row.verdict == "code"]
    assert evil.member == f"{shard(1, 2, 'bin')}:data.pkl"


def test_code_is_named_when_the_shard_holds_nothing_else(folder):
    (folder / "x.bin").write_bytes(archive(pickled(EVIL), records={}))
    write_index(folder, {"a": "x.bin"}, "bin")
    error = refusal(folder)
    assert "'a' is not in x.bin" in error.text
    assert "x.bin:data.pkl could run code: " in error.text


def test_a_pickle_under_the_name_of_a_safetensors_file(folder):
    body = dictionary(("a", tensor()), ("b", EVIL))
    (folder / "x.safetensors").write_bytes(archive(pickled(body)))
    write_index(folder, {"a": "x.safetensors"})
    found = read_folder(folder)
    assert "code" in {row.verdict for row in found.globals}
    assert "suffix-mismatch" in slugs(found)


def test_known_names_are_listed_once_and_a_note_of_many_shards_is_one(folder):
    for number in (1, 2, 3):
        data = torch.ones(2)
        torch.save({f"w{number}": data, f"n{number}": data}, folder / shard(number, 3, "bin"))
    files = {f"{letter}{n}": shard(n, 3, "bin") for n in (1, 2, 3) for letter in "wn"}
    write_index(folder, files, "bin")
    found = read_folder(folder)
    names = [row.name for row in found.globals]
    assert len(names) == len(set(names)) >= 2
    assert {row.verdict for row in found.globals} == {"known"}


# --- the index as an attack ------------------------------------------------------------------


@pytest.fixture
def whole(folder):
    """A folder with one good shard, whose index a test spoils."""
    save_file({"a": torch.ones(1)}, folder / "x.safetensors")
    return folder


def spoil(folder, text):
    path = folder / INDEX["safetensors"]
    path.write_bytes(text if isinstance(text, bytes) else text.encode())


@pytest.mark.parametrize(
    "where",
    [
        "../x.safetensors",
        "/etc/passwd",
        "sub/x.safetensors",
        "sub\\x",
        "x\0.safetensors",
        "",
        ".",
        "..",
    ],
)
def test_names_that_leave_the_folder(whole, where):
    save_file({"a": torch.ones(1)}, whole.parent / "x.safetensors")
    write_index(whole, {"a": where})
    error = refusal(whole, PathEscape)
    assert error.member == where
    assert error.path == str(whole / INDEX["safetensors"])


def test_shards_that_are_no_files(whole):
    os.mkfifo(whole / "fifo")
    (whole / "sub").mkdir()
    (whole / "out").symlink_to("/etc/passwd")
    (whole / "device").symlink_to("/dev/zero")
    (whole / "dangling").symlink_to("nowhere")
    (whole / "loop").symlink_to("loop")
    for target, slug in (
        ("fifo", "special-file"),
        ("sub", "special-file"),
        ("out", "path-escape"),
        ("device", "path-escape"),
        ("dangling", "special-file"),
        ("loop", "special-file"),
    ):
        write_index(whole, {"a": target})
        assert refusal(whole).slug == slug, target


def test_an_index_that_is_no_file(folder):
    os.mkfifo(folder / "fifo.safetensors.index.json")
    assert refusal(folder, index_name="fifo.safetensors.index.json").slug == "special-file"
    (folder / "out.safetensors.index.json").symlink_to("/etc/passwd")
    assert refusal(folder).slug == "path-escape"
    assert refusal(folder, index_name="../x").slug == "path-escape"
    assert refusal(folder, index_name="missing").slug == "special-file"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "x",
        "[]",
        '"a"',
        "null",
        "{}",
        '{"weight_map": {}}',
        '{"weight_map": []}',
        '{"weight_map": null}',
        '{"weight_map": {"a": 1}}',
        '{"weight_map": {"a": null}}',
        '{"weight_map": {"a": ["x.safetensors"]}}',
        '{"weight_map": {"a": {"file": "x.safetensors"}}}',
        '{"weight_map": {"a": "x.safetensors"}, "metadata": 5}',
        '{"weight_map": {"a": "x.safetensors", "a": "y.safetensors"}}',
        '{"weight_map": {"a": "x.safetensors"}, "weight_map": {"a": "x.safetensors"}}',
        '{"weight_map": {"a": "x.safetensors"}, "metadata": {"b": 1, "b": 2}}',
        '{"weight_map": {"a": "x.safetensors"}} trailing',
        '{"weight_map": {"a": "x.safetensors"}, "metadata": {"total_size": NaN}}',
        '{"weight_map": {"a": "x.safetensors"}, "metadata": {"total_size": 1' + "0" * 5000 + "}}",
        '{"weight_map": {"\\ud800": "x.safetensors"}}',
        '{"weight_map": {"a": "model.safetensors.index.json"}}',
        '\ufeff{"weight_map": {"a": "x.safetensors"}}',
        b'{"weight_map": {"\xff": "x.safetensors"}}',
        '{"weight_map": {"a": "x.safetensors"}, "z": ' + "[" * 200_000 + "]" * 200_000 + "}",
        '{"weight_map": {"a": "x.safetensors"}, "z": ' + '{"y":' * 100_000 + "1" + "}" * 100_001,
        "[" * 500_000,
    ],
    ids=range(27),
)
def test_texts_that_are_no_index(whole, text):
    spoil(whole, text)
    error = refusal(whole)
    assert error.slug == "header-invalid"
    assert error.path == str(whole / INDEX["safetensors"])
    assert len(error.text) < 200


def test_half_a_surrogate_as_a_key_is_not_looked_for(whole):
    spoil(whole, '{"weight_map": {"a": "x.safetensors", "\\ud83d": "x.safetensors"}}')
    assert "half a surrogate pair" in refusal(whole).text
    key = "\U0001f600"
    save_file({key: torch.ones(1)}, whole / "x.safetensors")
    spoil(whole, '{"weight_map": {"\\ud83d\\ude00": "x.safetensors"}}')
    assert_holds(read_folder(whole), {key: torch.ones(1)})


def test_half_a_surrogate_as_a_file_name(whole):
    spoil(whole, '{"weight_map": {"a": "\\ud800"}}')
    refusal(whole)


def test_an_unknown_field_is_mentioned(whole):
    write_index(whole, {"a": "x.safetensors"}, more=1)
    assert slugs(read_folder(whole)) == ["index-extra-field"]


def test_limits(whole):
    save_file({"b": torch.ones(1)}, whole / "y.safetensors")
    write_index(whole, {"a": "x.safetensors", "b": "y.safetensors"})
    size = (whole / INDEX["safetensors"]).stat().st_size
    exact = DEFAULT._replace(header_bytes=size, entry_count=2, shard_count=2)
    assert len(read_folder(whole, limits=exact).tensors) == 2
    for field, value, slug in (
        ("header_bytes", size - 1, "limit-header-bytes"),
        ("entry_count", 1, "limit-entry-count"),
        ("shard_count", 1, "limit-shard-count"),
    ):
        error = refusal(whole, LimitExceeded, limits=exact._replace(**{field: value}))
        assert error.slug == slug


def test_ten_thousand_and_one_shards(whole):
    write_index(whole, {f"k{n}": f"s{n}.safetensors" for n in range(10_001)})
    assert refusal(whole).slug == "limit-shard-count"


def test_a_million_keys_that_are_not_there(whole):
    """Refused in seconds, with a short message."""
    import time

    row = '"k{}": "x.safetensors"'
    spoil(whole, '{"weight_map": {' + ", ".join(row.format(n) for n in range(1_000_000)) + "}}")
    started = time.process_time()
    error = refusal(whole)
    assert time.process_time() - started < 10
    assert len(str(error)) < 400
    assert len(error.findings) == 51


def test_a_huge_index_is_not_read(whole):
    with open(whole / INDEX["safetensors"], "wb") as file:
        file.truncate(10 << 30)
    assert refusal(whole).slug == "limit-header-bytes"


# --- which file stands for the folder --------------------------------------------------------


def test_one_file_is_read_as_itself(folder):
    for file, data in (
        ("any name.safetensors", save({"a": torch.ones(2)})),
        ("model.safetensors", save({"b": torch.ones(2)})),
        ("pytorch_model.bin", saved({"c": torch.ones(2)})),
    ):
        if file == "pytorch_model.bin":
            (folder / "model.safetensors").unlink()
        (folder / file).write_bytes(data)
        found = read_folder(folder)
        assert found.file == str(folder / file)
        assert found.format == ("torch-zip" if file.endswith("bin") else "safetensors")
        with open_source(folder / file) as source:
            assert found.sources == (source.address,)


def test_the_choice_among_several(folder):
    (folder / "pytorch_model.bin").write_bytes(saved({"c": torch.ones(2)}))
    (folder / "model.safetensors").write_bytes(save({"b": torch.ones(2)}))
    assert look(Folder(folder))[:2] == ("model.safetensors", "")
    found = read_folder(folder)
    assert slugs(found) == ["folder-choice"]
    assert "pytorch_model.bin" in found.notes[0].text
    save_shards(folder, net(), "bin")
    assert look(Folder(folder))[:2] == (INDEX["bin"], "hf-shards")
    save_shards(folder, net())
    found = read_folder(folder)
    assert [os.path.basename(a.uri) for a in found.sources] == [shard(n, 3) for n in (1, 2, 3)]
    assert slugs(found) == ["folder-choice", "index-extra-files"]
    assert "'model.safetensors'" in found.notes[1].text
    found = read_folder(folder, index_name=INDEX["bin"])
    assert [os.path.basename(a.uri) for a in found.sources] == [
        shard(n, 3, "bin") for n in (1, 2, 3)
    ]
    assert_holds(found, net())


def test_two_indexes_of_one_kind(folder):
    save_shards(folder, net())
    (folder / "other.safetensors.index.json").write_bytes(
        (folder / INDEX["safetensors"]).read_bytes()
    )
    error = refusal(folder)
    assert error.slug == "usage"
    assert "'model.safetensors.index.json', 'other.safetensors.index.json'" in error.text
    assert_holds(read_folder(folder, index_name="other.safetensors.index.json"), net())


@pytest.mark.parametrize("subfolder", [False, True])
def test_a_folder_with_links_that_lead_nowhere(folder, subfolder):
    save_shards(folder, net())
    for link in ("loop", "gone"):
        (folder / link).symlink_to("loop")
    if subfolder:
        (folder / "sub").mkdir()
        (folder / "sub" / "loop").symlink_to("loop")
    assert Folder(folder).list() == sorted(
        [INDEX["safetensors"], *(shard(n, 3) for n in (1, 2, 3))]
    )
    assert_holds(read_folder(folder), net())


def test_files_of_other_kinds_are_no_news(folder):
    save_shards(folder, net())
    for other in ("config.json", "tokenizer.model", "README.md", "optimizer.bin", "x.pth"):
        (folder / other).write_bytes(b"x")
    assert slugs(read_folder(folder)) == []


@pytest.mark.parametrize(
    ("files", "slug", "words"),
    [
        (["__0_0.distcp"], "header-invalid", "a DCP folder without its .metadata"),
        (["__1.metadata", "__0_0.distcp"], "header-invalid", "'__0.metadata' is missing"),
        (["bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt"], "special-file", "no model_states files"),
        (["zero_pp_rank_0_mp_rank_00_model_states.pt"], "special-file", "no optim_states files"),
        (["latest_checkpointed_iteration.txt", "iter_0000001/mp_rank_00/other.pt"], "special-file", "names 'x'"),
        (["a.ckpt", "b.ckpt"], "usage", "2 Lightning checkpoints"),
        ([shard(1, 2), shard(2, 2)], "not-a-checkpoint", "no 'model.safetensors.index.json'"),
        ([shard(1, 2)], "not-a-checkpoint", "no 'model.safetensors.index.json'"),
        ([shard(1, 2, "bin")], "not-a-checkpoint", "no 'pytorch_model.bin.index.json'"),
        (["a.safetensors", "b.safetensors"], "not-a-checkpoint", "'a.safetensors', 'b.safetensors'"),
        (["a.pth", "README.md"], "not-a-checkpoint", "it holds 'a.pth'"),
        (["latest", "notes.txt"], "not-a-checkpoint", "no checkpoint in it"),
        (["sub/x.txt"], "not-a-checkpoint", "no checkpoint in it"),
        (["sub/x.pth"], "not-a-checkpoint", "it holds 'sub/'"),
        (["step-10/.metadata", "s.bin", "step-9/x.bin.index.json", "z/a"], "not-a-checkpoint", "it holds 's.bin', 'step-10/', 'step-9/'"),
        ([], "not-a-checkpoint", "an empty folder"),
    ],
    ids=range(16),
)  # fmt: skip
def test_folders_of_other_kinds(folder, files, slug, words):
    for file in files:
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        (folder / file).write_bytes(b"x")
    error = refusal(folder)
    assert error.slug == slug
    assert words in error.text
    assert error.hint
    assert error.path == str(folder)


def test_the_only_shard_of_one_needs_no_index(folder):
    save_file({"a": torch.ones(1)}, folder / shard(1, 1))
    assert_holds(read_folder(folder), {"a": torch.ones(1)})


def test_an_unpacked_zip_and_what_packs_it_by_hand(folder):
    """zip -0 -r -D, by Python's own: torch and ckptool both read what comes out."""
    import zipfile

    torch.save(net(), folder / "net.pth")
    with zipfile.ZipFile(folder / "net.pth") as packed:
        packed.extractall(folder)
    (folder / "net.pth").unlink()
    assert_holds(read_folder(folder), net())
    with zipfile.ZipFile(folder / "again.pth", "w", zipfile.ZIP_STORED) as out:
        for path in sorted((folder / "net").rglob("*")):
            if path.is_file():
                out.write(path, path.relative_to(folder))
    loaded = torch.load(folder / "again.pth")
    assert all(torch.equal(loaded[key], value) for key, value in net().items())
    with open_source(folder / "again.pth") as source:
        assert_holds(read_file(source), net())


def test_is_folder(folder, tmp_path):
    (tmp_path / "file").write_bytes(b"x")
    (tmp_path / "link").symlink_to("net")
    with open(tmp_path / "file", "rb") as stream:
        places = [folder, str(folder), os.fsencode(folder), tmp_path / "link"]
        others = [tmp_path / "file", tmp_path / "missing", "nul\0", "", stream]
        assert [is_folder(place) for place in places + others] == [True] * 4 + [False] * 5


def test_a_shard_replaced_after_the_read_is_noticed(folder, tmp_path):
    save_shards(folder, net())
    found = read_folder(folder)
    save_shards(
        folder,
        {key: value + 1 for key, value in net().items() if value.dtype != torch.bool}
        | {"layers.1.mask": torch.tensor([False, False])},
    )
    plan = Plan(found.sources, (Output("x", (Copy(2, Span(0, 9)),), 9),))
    with pytest.raises(CkptError) as caught:
        write(plan, FileSink(tmp_path / "x"), {})
    assert caught.value.slug == "input-changed"


# -- what .bin shards may hold beside tensors ----------------------------------------------------
def test_a_shard_with_a_key_that_is_no_text_is_refused(tmp_path):
    """Joined, the number 1 came out as the text '1'."""
    torch.save({"a": torch.ones(2), 1: torch.ones(3)}, tmp_path / "x.bin")
    write_index(tmp_path, {"a": "x.bin", "1": "x.bin"}, "bin")
    with pytest.raises(CkptError, match="a key in it is no text: 1"):
        ckptool.inspect(tmp_path)


@pytest.mark.parametrize("output", ["o.safetensors", "o.pth"])
def test_what_shards_hold_beside_tensors_is_told_as_left_behind(output, tmp_path):
    """It was said to be kept, and was in neither."""
    torch.save({"a": torch.ones(2), "epoch": 3}, tmp_path / "x.bin")
    write_index(tmp_path, {"a": "x.bin"}, "bin")
    done = ckptool.convert(tmp_path, tmp_path / output)
    assert (done.entries_left, done.kept) == (("epoch",), ())
