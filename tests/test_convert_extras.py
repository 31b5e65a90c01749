"""--extras keeps all that .safetensors cannot, and the counts that are shown are those of the file."""

import json
from argparse import Namespace

import pytest
import torch
import torch.distributed.checkpoint as dcp

from ckptool import convert, inspect
from ckptool.errors import LimitExceeded

NAMES = [f"class {number}" for number in range(1000)]
LONG = {
    "names": NAMES,
    "index": {name: at for at, name in enumerate(NAMES)},
    "numbered": dict(enumerate(NAMES)),
    "pairs": tuple(NAMES),
    "seen": set(NAMES),
    "args": Namespace(**{f"flag_{at}": at for at in range(300)}),
    "rows": [[at] * 3 for at in range(500)],
    "deep": {"a": {"b": {"c": {"d": {"e": {"f": NAMES}}}}}},
}
PLAIN = LONG | {
    "numbered": {str(at): name for at, name in enumerate(NAMES)},
    "pairs": NAMES, "args": vars(LONG["args"]),
}  # fmt: skip


def kept(tmp_path, source, **more):
    """{path: value} of the file that --extras writes."""
    convert(source, tmp_path / "o.safetensors", extras=tmp_path / "e.json", force=True, **more)
    rows = json.loads((tmp_path / "e.json").read_text())["extras"]
    return {tuple(row["path"]): row["value"] for row in rows}


@pytest.mark.parametrize("protocol", [2, 4])
@pytest.mark.parametrize("container", ["zip", "legacy", "dcp"])
def test_long_and_deep_values_are_kept_whole(tmp_path, container, protocol):
    saved = LONG | {"model": {"w": torch.ones(2), "b": torch.ones(1)}}
    if container == "dcp":
        dcp.save(saved, checkpoint_id=tmp_path / "net", no_dist=True)
    else:
        torch.save(saved, tmp_path / "net", pickle_protocol=protocol,
                   _use_new_zipfile_serialization=container == "zip")  # fmt: skip

    found = kept(tmp_path, tmp_path / "net")
    assert sorted(found.pop(("seen",))) == sorted(NAMES)
    assert found == {(name,): value for name, value in PLAIN.items() if name != "seen"}


def test_what_stands_among_the_tensors_is_kept(tmp_path):
    model = {"w": torch.ones(2), "b": torch.ones(1), "names": NAMES, "pair": [torch.ones(1), "x"]}
    torch.save({"model": model, "epoch": 3, "more": [torch.ones(1)]}, tmp_path / "net")
    assert kept(tmp_path, tmp_path / "net") == {
        ("epoch",): 3, ("model", "names"): NAMES, ("more",): ["<tensor [1]>"],
        ("model", "pair"): ["<tensor [1]>", "x"],
    }  # fmt: skip


def test_what_stands_beside_the_tensors_that_come_out_of_entries_is_kept_and_said(tmp_path):
    """No state_dict: tensors of several entries come out, by dotted names."""
    torch.save({"a": {"w": torch.ones(2), "names": NAMES, "n": 3}, "pure": [torch.ones(2)]},
               tmp_path / "net")  # fmt: skip
    found = kept(tmp_path, tmp_path / "net")
    assert found == {("a",): {"w": "<tensor [2]>", "names": NAMES, "n": 3}}
    done = convert(tmp_path / "net", tmp_path / "again.safetensors")
    assert [n.text.partition("; ")[2] for n in done.notes if n.slug == "nested-tensors"] == [
        "what else is in them is left behind"
    ]


def test_a_value_that_is_too_much_is_refused_before_writing(tmp_path):
    """Shared lists of lists stand for 2**40 numbers."""
    bomb = [1]
    for _ in range(40):
        bomb = [bomb, bomb]
    deep = [1]
    for _ in range(150):
        deep = [deep]
    for value in (bomb, deep):
        torch.save({"w": torch.ones(2), "value": value}, tmp_path / "net")
        with pytest.raises(LimitExceeded, match="1,000,000 parts or 100 levels") as caught:
            kept(tmp_path, tmp_path / "net")
        assert caught.value.slug == "limit-extras"
        assert [path.name for path in tmp_path.iterdir()] == ["net"]
        convert(tmp_path / "net", tmp_path / "o.safetensors")
        (tmp_path / "o.safetensors").unlink()


def test_what_is_shown_counts_all_and_says_where_it_ends(tmp_path):
    torch.save(LONG | {"model": {"w": torch.ones(2), "b": torch.ones(1)}}, tmp_path / "net")
    rows = {extra.path[0]: extra for extra in inspect(tmp_path / "net").checkpoint.extras}
    assert {name: row.text.partition(":")[0] for name, row in rows.items() if name != "args"} == {
        "names": "list of 1000", "index": "dict of 1000", "numbered": "dict of 1000",
        "pairs": "tuple of 1000", "seen": "set of 1000", "rows": "list of 500", "deep": "dict of 1",
    }  # fmt: skip
    for name in ("names", "pairs"):
        assert rows[name].value == [*NAMES[:64], "…"]
    assert rows["index"].value == {name: at for at, name in enumerate(NAMES[:64])} | {
        "…": "936 more"
    }
    assert len(rows["seen"].value) == 65
    assert rows["seen"].value[-1] == "…"


# -- DeepSpeed's shared_params -----------------------------------------------------------------
def ranked(tmp_path, shared, keys=("embed.weight", "ln.weight"), **more):
    """A rank's file, whose module has `keys`."""
    module = {key: torch.full((2, 3), float(at)) for at, key in enumerate(keys)}
    saved = {"module": module, "shared_params": shared, "ds_version": "0.9.5"} | more
    torch.save(
        {name: value for name, value in saved.items() if value is not None}, tmp_path / "m.pt"
    )
    return tmp_path / "m.pt"


def tensors(path):
    from safetensors.torch import load_file

    return {key: tensor.tolist() for key, tensor in load_file(path).items()}


@pytest.mark.parametrize("shards", [None, "1GB"])
def test_names_that_deepspeed_left_to_others_come_out(tmp_path, shards):
    """R67: also second names of second names, in the order of zero_to_fp32.py."""
    shared = {"lm_head.weight": "embed.weight", "again.weight": "lm_head.weight", "x": "gone"}
    out = tmp_path / ("o" if shards else "o.safetensors")
    done = convert(ranked(tmp_path, shared), out, tied="duplicate", max_shard_size=shards)

    ones, zeros = [[1.0] * 3] * 2, [[0.0] * 3] * 2
    assert tensors(out / "model.safetensors" if shards else out) == {
        "embed.weight": zeros, "lm_head.weight": zeros, "again.weight": zeros, "ln.weight": ones,
    }  # fmt: skip
    notes = {note.slug: note.text for note in done.notes}
    assert "'lm_head.weight', 'again.weight'" in notes["shared-params"]
    assert notes["shared-params-lost"].endswith("'x = gone'")


def test_they_are_ties_when_converted_back(tmp_path):
    convert(ranked(tmp_path, {"lm_head.weight": "embed.weight"}), tmp_path / "o.safetensors")
    convert(tmp_path / "o.safetensors", tmp_path / "back.pth")
    back = torch.load(tmp_path / "back.pth", weights_only=True)
    assert list(back) == ["embed.weight", "ln.weight", "lm_head.weight"]
    assert back["lm_head.weight"].data_ptr() == back["embed.weight"].data_ptr()


def test_what_else_is_in_the_file_is_not_spelled_out_for_it(tmp_path):
    bomb = [1]
    for _ in range(40):
        bomb = [bomb, bomb]
    source = ranked(tmp_path, {"lm_head.weight": "embed.weight"}, bomb=bomb)
    convert(source, tmp_path / "o.safetensors", tied="duplicate")
    assert tensors(tmp_path / "o.safetensors").keys() == {
        "embed.weight", "ln.weight", "lm_head.weight",
    }  # fmt: skip


def test_hundreds_of_them(tmp_path):
    shared = {f"layers.{at}.weight": "embed.weight" for at in range(300)}
    convert(ranked(tmp_path, shared), tmp_path / "o.safetensors", tied="duplicate")
    assert tensors(tmp_path / "o.safetensors").keys() == {"embed.weight", "ln.weight", *shared}


@pytest.mark.parametrize(
    ("shared", "more"),
    [
        ({"embed.weight": "ln.weight"}, {}),  # it is there: its own numbers stay
        ({"lm_head.weight": "embed.weight"}, {"ds_version": None}),  # not DeepSpeed's
        ({"lm_head.weight": 3}, {}),
        (["lm_head.weight"], {}),
    ],
    ids=range(4),
)
def test_nothing_is_added_where_nothing_is_lacking(tmp_path, shared, more):
    done = convert(ranked(tmp_path, shared, **more), tmp_path / "o.safetensors")
    assert tensors(tmp_path / "o.safetensors") == {
        "embed.weight": [[0.0] * 3] * 2, "ln.weight": [[1.0] * 3] * 2,
    }  # fmt: skip
    assert not [note for note in done.notes if note.slug.startswith("shared-params")]


def test_a_pth_keeps_the_keys_it_has(tmp_path):
    convert(ranked(tmp_path, {"lm_head.weight": "embed.weight"}), tmp_path / "o.pth")
    after = torch.load(tmp_path / "o.pth", weights_only=True)
    assert list(after["module"]) == ["embed.weight", "ln.weight"]
    assert after["shared_params"] == {"lm_head.weight": "embed.weight"}
