"""DeepSpeed ZeRO folders: the fp32 weights of all ranks, put together without DeepSpeed."""

import importlib.util
import os
import sys

import pytest
import torch
import zero_support as zero
from container_support import same_weights, ties
from safetensors.torch import load_file
from verbs_support import cli

import ckptool
from ckptool.errors import (
    CkptError,
    CrcMismatch,
    HeaderInvalid,
    PathEscape,
    SpecialFile,
    UnsafePickle,
    Unsupported,
    UsageError,
)
from ckptool.formats.folders import look, read_folder
from ckptool.limits import DEFAULT
from ckptool.places import Folder

STAGES = (1, 2, 3)
WORLDS = (1, 2, 4)


def read(folder):
    place = Folder(folder)
    return read_folder(place, DEFAULT, look(place))


def convert(source, output, **options):
    return ckptool.convert(source, output, fsync=False, **options)


def refusal(folder, kind=CkptError):
    with pytest.raises(kind) as caught:
        read(folder)
    return caught.value


def edit(path, change):
    """Unpickle a file of the fixture, change it, save it again."""
    with zero.deepspeed_classes():
        found = torch.load(path, weights_only=False)
        change(found)
        torch.save(found, path)


# -- put together ------------------------------------------------------------------------------
@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("stage", STAGES)
def test_every_weight_comes_out_as_it_went_in(tmp_path, stage, world):
    made = zero.net(stage)
    folder = zero.write(tmp_path / "run", made, stage, world)
    convert(folder, tmp_path / "out.pth")
    convert(folder, tmp_path / "out.safetensors", tied="duplicate")
    out = torch.load(tmp_path / "out.pth", weights_only=True)
    assert same_weights(out, made.expected, tied=False) == 13
    assert ties(out) == [["embed.weight", "head.weight", "head.again"]]
    exported = load_file(tmp_path / "out.safetensors")
    assert same_weights({key: exported[key] for key in out}, made.expected, tied=False) == 13


@pytest.mark.parametrize("stage", STAGES)
def test_it_loads_without_a_file_between(tmp_path, stage):
    made = zero.net()
    folder = zero.write(tmp_path / "run", made, stage, 4)
    assert same_weights(ckptool.load(folder), made.expected, tied=False) == 13
    with ckptool.open(folder) as found:
        assert torch.equal(found.weights["scale"].torch(), made.groups[0]["scale"])
        assert (
            found.weights["embed.weight"].numpy() == made.groups[0]["embed.weight"].numpy()
        ).all()


def test_it_goes_into_a_model_as_a_file_does(tmp_path):
    model = torch.nn.Sequential(torch.nn.Linear(5, 3), torch.nn.BatchNorm1d(3))
    torch.nn.init.normal_(model[1].weight)
    params = {key: p.detach().clone() for key, p in model.named_parameters()}
    made = zero.Net([params], {key: b.clone() for key, b in model.named_buffers()}, {}, {})
    folder = zero.write(tmp_path / "run", made, 2, 2)
    fresh = torch.nn.Sequential(torch.nn.Linear(5, 3), torch.nn.BatchNorm1d(3))
    done = ckptool.load_into(fresh, folder)
    assert len(done.loaded) == 7
    assert same_weights(fresh.state_dict(), model.state_dict()) == 7


def test_partitions_may_keep_their_padding_or_have_some_behind_each_parameter(tmp_path):
    made = zero.net()
    paddings = [[3, 0, 1], [2, 0, 5]]
    one = zero.write(tmp_path / "full", made, 2, 4, lean=False)
    two = zero.write(tmp_path / "gaps", made, 1, 4, paddings=paddings)
    for folder in (one, two):
        assert same_weights(ckptool.load(folder), made.expected, tied=False) == 13


def test_a_partition_of_stage_3_may_lie_across_flat_tensors(tmp_path):
    made = zero.net()
    folder = zero.write(tmp_path / "run", made, 3, 2, sizes=[1, 4, 0, 19])
    checkpoint = read(folder)
    embed = next(t for t in checkpoint.tensors if t.key == "embed.weight")
    assert len(embed.storage.pieces) == 6  # 1 + 4 + 13 of 18 elements, in each of two files
    assert same_weights(ckptool.load(folder), made.expected, tied=False) == 13


def test_nothing_is_copied_to_put_a_weight_together(tmp_path):
    checkpoint = read(zero.write(tmp_path / "run", zero.net(), 2, 4))
    embed = next(t for t in checkpoint.tensors if t.key == "embed.weight")
    assert [p.source_id for p in embed.storage.pieces] == [1, 2, 3]
    assert sum(p.span.size for p in embed.storage.pieces) == 4 * 35
    assert len(checkpoint.sources) == 5


def test_the_names_of_bf16_files_and_a_stage_that_is_a_number_are_known(tmp_path):
    made = zero.net()
    folder = zero.write(tmp_path / "run", made, 1, 2, prefix="bf16_")
    name = folder / zero.TAG / zero.optim_file(0, "bf16_")
    edit(name, lambda found: found["optimizer_state_dict"].update(zero_stage=1, partition_count=2))
    assert same_weights(ckptool.load(folder), made.expected, tied=False) == 13


def test_buffers_keep_their_dtype_and_float32_widens_them(tmp_path):
    made = zero.net()
    made.buffers["norm.half"] = torch.tensor([0.1, 2.0], dtype=torch.float16)
    folder = zero.write(tmp_path / "run", made, 2, 2)
    convert(folder, tmp_path / "out.pth")
    found = torch.load(tmp_path / "out.pth", weights_only=True)
    assert found["norm.half"].dtype is torch.float16
    assert [n.slug for n in read(folder).notes] == ["half-buffers", "zero-folder"]
    convert(folder, tmp_path / "wide.pth", dtype="float32")
    found = torch.load(tmp_path / "wide.pth", weights_only=True)
    assert torch.equal(found["norm.half"], made.buffers["norm.half"].float())
    assert found["frozen.weight"].dtype is torch.float32
    assert found["norm.count"].dtype is torch.int64


@pytest.mark.parametrize("name", ["run", "epoch=3.ckpt"])
def test_the_note_of_a_folder_is_what_zero_to_fp32_does(tmp_path, capsys, name):
    made = zero.net()
    folder = zero.write(tmp_path / name, made, 3, 2)
    (note,) = [note for note in read(folder).notes if note.slug == "zero-folder"]
    out = f"{tmp_path / name}".removesuffix(".ckpt") + ".safetensors"
    assert note.command == f"ckptool convert {folder} -o {out}"
    assert cli(capsys, *note.command.split()[1:], "--tied", "duplicate")[0] == 0
    found = load_file(out)
    assert {k: v.tolist() for k, v in found.items()} == {
        k: v.tolist() for k, v in made.expected.items()
    }


def test_shards_and_a_diff_with_them(tmp_path, capsys):
    folder = zero.write(tmp_path / "run", zero.net(), 3, 4)
    convert(folder, tmp_path / "sh", max_shard_size=200)
    assert len(list((tmp_path / "sh").glob("*.safetensors"))) == 3
    assert cli(capsys, "diff", folder, tmp_path / "sh")[0] == 0
    other = zero.write(tmp_path / "other", zero.net(1), 3, 4)
    status, out, _ = cli(capsys, "diff", folder, other)
    assert status == 1
    assert "embed.weight" in out


@pytest.mark.skipif(
    not importlib.util.find_spec("deepspeed"), reason="DeepSpeed's own script is not installed"
)
@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("stage", STAGES)
def test_deepspeeds_own_script_says_the_same(tmp_path, stage, world):
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    made = zero.net(stage)
    made.buffers["norm.half"] = torch.tensor([0.1, 2.0], dtype=torch.float16)
    sizes = {"sizes": [-(-35 // world)]} if stage == 3 else {"lean": world != 2}
    folder = zero.write(tmp_path / "run", made, stage, world, **sizes)
    with zero.deepspeed_classes():
        theirs = get_fp32_state_dict_from_zero_checkpoint(str(folder))
    mine = ckptool.load(folder)
    mine["norm.half"] = mine["norm.half"].float()  # the one difference, which a note names
    assert same_weights(mine, theirs, tied=False) == 14


# -- which folder ------------------------------------------------------------------------------
def test_inspect_says_what_it_is_and_what_lies_beside(tmp_path, capsys):
    folder = zero.write(tmp_path / "run", zero.net(), 2, 4)
    status, out, _ = cli(capsys, "inspect", folder)
    assert status == 0
    assert "DeepSpeed ZeRO-2, 4 ranks, global_step5" in out
    assert "exp_avg in 4 rank files" in out
    assert "'0.19.8'" in out
    assert "could run code" not in out


def test_latest_names_the_tag_and_the_tag_itself_may_be_given(tmp_path):
    old, new = zero.net(1), zero.net(2)
    folder = zero.write(tmp_path / "run", old, 2, 2, tag="global_step1")
    zero.write(tmp_path / "run2", new, 2, 2, tag="global_step2")
    os.rename(tmp_path / "run2" / "global_step2", folder / "global_step2")
    (folder / "latest").write_text("global_step2\n")
    assert same_weights(ckptool.load(folder), new.expected, tied=False) == 13
    assert same_weights(ckptool.load(folder / "global_step1"), old.expected, tied=False) == 13
    (folder / "latest").unlink()
    assert "2 DeepSpeed checkpoints" in refusal(folder, UsageError).text


def test_the_folder_of_a_lightning_strategy(tmp_path):
    made = zero.net()
    folder = zero.write(tmp_path / "epoch=1-step=5.ckpt", made, 3, 2, tag="checkpoint")
    (folder / "zero_to_fp32.py").write_text("raise SystemExit")
    assert read(folder).handle.title == "DeepSpeed ZeRO-3, 2 ranks, checkpoint"
    assert same_weights(ckptool.load(folder), made.expected, tied=False) == 13


def test_without_zero_the_one_file_of_weights_is_read(tmp_path):
    made = zero.net()
    folder = zero.write(tmp_path / "run", made, 2, 2)
    for rank in range(2):
        (folder / zero.TAG / zero.optim_file(rank)).unlink()
    found = ckptool.load(folder)
    assert found["module"]["embed.weight"].dtype is torch.float16
    assert "zero-without-optimizer" in [
        n["slug"] for n in ckptool.inspect(folder).to_dict()["notes"]
    ]


def test_one_file_of_a_checkpoint_points_at_the_folder(tmp_path, capsys):
    folder = zero.write(tmp_path / "run", zero.net(), 2, 2) / zero.TAG
    for name in (zero.model_file(2), zero.optim_file(1)):
        (note,) = [n for n in ckptool.inspect(folder / name).notes if n.slug == "zero-rank-file"]
        assert note.command == f"ckptool inspect {folder}"
    for rank in range(2):
        (folder / zero.optim_file(rank)).unlink()
    assert "zero-rank-file" not in [
        n.slug for n in ckptool.inspect(folder / zero.model_file(2)).notes
    ]


# -- broken ------------------------------------------------------------------------------------
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("rank", [0, 1, 3])
def test_a_missing_rank_file_is_named(tmp_path, stage, rank):
    folder = zero.write(tmp_path / "run", zero.net(), stage, 4)
    (folder / zero.TAG / zero.optim_file(rank)).unlink()
    text = refusal(folder, SpecialFile).text
    last = "4 ranks saved it, the optim_states files of 3 are there"
    assert text == (last if rank == 3 else f"the optim_states file of rank {rank} is missing")


def test_frozen_fragments_need_every_models_file(tmp_path):
    folder = zero.write(tmp_path / "run", zero.net(), 3, 4)
    (folder / zero.TAG / zero.model_file(3, 3)).unlink()
    assert "model_states files of 3" in refusal(folder, SpecialFile).text


def test_latest_names_a_tag_that_is_not_there(tmp_path):
    folder = zero.write(tmp_path / "run", zero.net(), 2, 2)
    (folder / "latest").write_text("global_step9")
    error = refusal(folder, SpecialFile)
    assert "'global_step9', which is not there" in error.text
    assert "'global_step5'" in error.hint


@pytest.mark.parametrize("tag", ["../run2", "/etc", "..", "a/b"])
def test_latest_may_not_lead_out(tmp_path, tag):
    folder = zero.write(tmp_path / "run", zero.net(), 2, 2)
    zero.write(tmp_path / "run2", zero.net(), 2, 2)
    (folder / "latest").write_text(tag)
    refusal(folder, PathEscape)


def test_a_tag_that_is_a_link_out_is_refused(tmp_path):
    folder = zero.write(tmp_path / "run", zero.net(), 2, 2)
    os.rename(folder / zero.TAG, tmp_path / "elsewhere")
    os.symlink(tmp_path / "elsewhere", folder / zero.TAG)
    refusal(folder, PathEscape)


def test_mixed_stages_and_mixed_worlds_are_refused(tmp_path):
    folder = zero.write(tmp_path / "run", zero.net(), 2, 2)
    name = folder / zero.TAG / zero.optim_file(1)
    edit(name, lambda found: found["optimizer_state_dict"].update(zero_stage=1))
    assert "stages 1, 2" in refusal(folder, HeaderInvalid).text
    edit(name, lambda found: found["optimizer_state_dict"].update(zero_stage=2, partition_count=4))
    assert "2, 4 partitions" in refusal(folder, Unsupported).text


@pytest.mark.parametrize("stage", STAGES)
def test_sizes_that_do_not_sum_up_are_refused(tmp_path, stage):
    name = "fp32_flat_groups" if stage == 3 else "single_partition_of_fp32_groups"
    for extra in (-9, 9):

        def resize(found, extra=extra):
            rows = found["optimizer_state_dict"][name]
            rows[0] = torch.zeros(rows[0].numel() + extra)

        folder = zero.write(tmp_path / f"run{extra}", zero.net(), stage, 2)
        for rank in range(2):
            edit(folder / zero.TAG / zero.optim_file(rank), resize)
        assert "elements" in str(refusal(folder, HeaderInvalid)) or extra
        assert "flat tensors" in refusal(folder, HeaderInvalid).text


def test_ranks_of_different_sizes_are_refused_in_stage_3(tmp_path):
    folder = zero.write(tmp_path / "run", zero.net(), 3, 2)
    name = folder / zero.TAG / zero.optim_file(1)

    def cut(found):
        rows = found["optimizer_state_dict"]["fp32_flat_groups"]
        rows[0] = rows[0][:-1]

    edit(name, cut)
    assert "different sizes" in refusal(folder, HeaderInvalid).text


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("zero_pp_rank_0_mp_rank_01_optim_states.pt", "model-parallel"),
        ("expp_rank_0_mp_rank_00_optim_states.pt", "experts"),
        ("layer_0_expert_1_mp_rank_00_model_states.pt", "experts"),
    ],
)
def test_other_parallelism_is_refused_by_name(tmp_path, name, what):
    folder = zero.write(tmp_path / "run", zero.net(), 2, 2)
    (folder / zero.TAG / name).write_bytes(b"")
    assert what in refusal(folder, Unsupported).text


def test_a_flipped_bit_is_found_and_the_weights_over_it_are_named(tmp_path, capsys):
    folder = zero.write(tmp_path / "run", zero.net(), 2, 2)
    checkpoint = read(folder)
    scale = next(t for t in checkpoint.tensors if t.key == "scale")
    piece = scale.storage.pieces[0]
    path = folder / zero.TAG / zero.optim_file(piece.source_id - 1)
    data = bytearray(path.read_bytes())
    data[piece.span.offset] ^= 1
    path.write_bytes(data)
    found = ckptool.verify(folder)
    assert (found.whole, found.exit_status, len(found.findings)) == (False, 1, 1)
    assert set(found.findings[0].keys) == {"embed.weight", "layers.0.weight", "scale"} - (
        {"embed.weight"}
        if piece.source_id == 2 and not _over(checkpoint, "embed.weight", 2)
        else set()
    )
    assert found.findings[0].member.startswith(f"{path.name}:data/")
    for use in (
        lambda **o: convert(folder, tmp_path / "out.pth", **o),
        lambda **o: ckptool.load(folder, **o),
    ):
        with pytest.raises(CrcMismatch) as caught:
            use()
        assert caught.value.path == str(path)
        use(check=False)
    with pytest.raises(CrcMismatch):
        ckptool.load_into(torch.nn.ParameterDict(), folder, strict=False)


def _over(checkpoint, key, source_id):
    tensor = next(t for t in checkpoint.tensors if t.key == key)
    return any(p.source_id == source_id for p in tensor.storage.pieces)


class _Evil:
    def __reduce__(self):
        return (os.system, ("touch /tmp/zero-was-here",))


def test_code_in_a_rank_file_is_told_and_only_tensors_come_out(tmp_path, capsys):
    made = zero.net()
    folder = zero.write(tmp_path / "run", made, 2, 2)
    name = folder / zero.TAG / zero.optim_file(1)
    edit(name, lambda found: found.update(extra=_Evil()))
    status, out, _ = cli(capsys, "inspect", folder)
    assert status == 1
    assert "could run code: posix.system at byte" in out
    assert f"of {name.name}:data.pkl" in out
    assert f"-o {folder}.clean.safetensors" in out
    assert cli(capsys, "verify", folder)[0] == 1
    convert(folder, tmp_path / "out.safetensors", tied="duplicate")
    exported = load_file(tmp_path / "out.safetensors")
    assert same_weights({k: exported[k] for k in made.expected}, made.expected, tied=False) == 13
    with pytest.raises(UnsafePickle, match=r"posix\.system"):
        convert(folder, tmp_path / "out.pth")
    convert(folder, tmp_path / "out.pth", keep_unknown=True)  # made afresh: nothing to keep
    assert same_weights(
        torch.load(tmp_path / "out.pth", weights_only=True), made.expected, tied=False
    )


class _Odd(dict):
    def __reduce__(self):
        return (os.getenv, ("HOME",), None, None, iter(self.items()))


def test_containers_that_a_call_makes_are_not_believed(tmp_path):
    folder = zero.write(tmp_path / "run", zero.net(), 2, 1)
    name = folder / zero.TAG / zero.optim_file(0)
    edit(name, lambda found: found.update(optimizer_state_dict=_Odd(found["optimizer_state_dict"])))
    assert "is not a dict" in refusal(folder, HeaderInvalid).text


@pytest.mark.parametrize(
    "change",
    [
        lambda o: o.pop("single_partition_of_fp32_groups"),
        lambda o: o.update(single_partition_of_fp32_groups=[1, 2]),
        lambda o: o.update(zero_stage=7),
        lambda o: o.update(zero_stage="2"),
        lambda o: o.update(partition_count=-1),
        lambda o: o.update(param_alignment_paddings=[[0]]),
        lambda o: o.update(
            single_partition_of_fp32_groups=o["single_partition_of_fp32_groups"][:1]
        ),
    ],
)
def test_entries_that_are_something_else_are_refused(tmp_path, change):
    folder = zero.write(tmp_path / "run", zero.net(), 2, 1)
    edit(
        folder / zero.TAG / zero.optim_file(0), lambda found: change(found["optimizer_state_dict"])
    )
    assert refusal(folder, HeaderInvalid).hint


@pytest.mark.parametrize("shape", [(-1, 5), (7, True), "75", 35, (7.0, 5), [[7], 5], (1 << 70, 5)])
def test_a_shape_that_is_none_is_refused(tmp_path, shape):
    folder = zero.write(tmp_path / "run", zero.net(), 2, 1)

    def change(found):
        found["param_shapes"][0]["embed.weight"] = shape

    edit(folder / zero.TAG / zero.model_file(2), change)
    assert refusal(folder, HeaderInvalid).key == "embed.weight"


def test_nothing_that_the_pickles_name_is_imported(tmp_path, monkeypatch):
    folder = zero.write(tmp_path / "run", zero.net(), 3, 2)
    for name in ("deepspeed", "deepspeed.runtime", "deepspeed.runtime.zero.config"):
        monkeypatch.setitem(sys.modules, name, None)  # an import of it raises
    verdicts = {row.name: row.verdict for row in read(folder).globals}
    assert verdicts["deepspeed.runtime.zero.config.ZeroStageEnum"] == "known"
    assert verdicts["deepspeed.runtime.fp16.loss_scaler.LossScaler"] == "foreign"
    assert len(ckptool.load(folder)) == 13


def test_a_file_named_like_a_rank_makes_no_checkpoint_of_a_folder(tmp_path):
    for name in ("deepspeed_mp_rank_00_model_states.pt", "other.pth"):
        torch.save({"w": torch.ones(1)}, tmp_path / name)
    assert "without an index" in refusal_of_look(tmp_path)


def refusal_of_look(folder):
    with pytest.raises(CkptError) as caught:
        look(Folder(folder))
    return caught.value.text
