"""Many files in one run: which are taken, in which order, what is said of each and of all."""

import contextlib
import gc
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import weakref
from types import SimpleNamespace

import pytest
import torch
import zero_support as zero
from many_support import LAYOUTS, whole_folders
from safetensors.torch import save_file
from verbs_support import FIXTURES, ROOT

from ckptool.cli import many
from ckptool.cli.main import main
from ckptool.errors import CkptError, SpecialFile
from ckptool.places import Folder
from ckptool.verbs import ordered, walking
from ckptool.verbs.gathering import gather, names_in
from ckptool.verbs.ordered import in_order
from ckptool.verbs.walking import Skipped, files_below


@pytest.fixture
def tree(tmp_path, monkeypatch):
    """b.pth, sub/a.safetensors, an evil and a broken one, and much that is none."""
    folder = tmp_path / "runs"
    (folder / "sub" / "deep").mkdir(parents=True)
    (folder / ".hidden").mkdir()
    torch.save({"w": torch.zeros(3)}, folder / "b.PTH")
    save_file({"w": torch.zeros(2, 2)}, folder / "sub" / "a.safetensors")
    shutil.copy(FIXTURES / "evil.pth", folder / "evil.pth")
    (folder / "sub" / "deep" / "broken.pt").write_bytes(b"PK\3\4 nothing")
    torch.save({}, folder / ".hidden" / "x.pth")
    (folder / "._b.pth").write_bytes(b"apple")
    (folder / "notes.txt").write_text("no checkpoint")
    (folder / "tokenizer.model").write_bytes(b"\n\x0e\n\x05<unk>")
    monkeypatch.chdir(tmp_path)
    return folder


def below(place, skipped=None):
    found = files_below(Folder(place), skipped or Skipped())
    return [os.path.relpath(p.path, place) for p in found]


def run(capsys, *args):
    status = main(list(map(str, args)))
    out, err = capsys.readouterr()
    return SimpleNamespace(status=status, out=out, err=err, lines=out.splitlines())


# -- which files -------------------------------------------------------------------------------
def test_a_folder_is_walked_by_name_and_suffix(tree):
    skipped = Skipped()
    assert below(tree, skipped) == ["b.PTH", "evil.pth", "sub/a.safetensors", "sub/deep/broken.pt"]
    assert skipped.files == 3  # ._b.pth, notes.txt, tokenizer.model


def test_shards_are_taken_once_by_their_index(tmp_path):
    import ckptool

    torch.save({f"w{i}": torch.zeros(1000) for i in range(4)}, tmp_path / "net.pth")
    ckptool.convert(tmp_path / "net.pth", tmp_path / "hf", max_shard_size="5KB")
    save_file({"x": torch.zeros(1)}, tmp_path / "hf" / "other.safetensors")
    shards = len([n for n in os.listdir(tmp_path / "hf") if "-of-" in n])

    assert shards == 4
    assert below(tmp_path / "hf") == ["model.safetensors.index.json", "other.safetensors"]


def test_shards_of_an_index_that_cannot_be_read_are_taken_each(tmp_path):
    save_file({"x": torch.zeros(1)}, tmp_path / "model-00001-of-00002.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text("{")
    assert below(tmp_path) == ["model-00001-of-00002.safetensors", "model.safetensors.index.json"]


def test_a_distributed_checkpoint_is_one_thing(tmp_path):
    (tmp_path / "step_5").mkdir()
    for name in (".metadata", "__0_0.distcp", "__1_0.distcp"):
        (tmp_path / "step_5" / name).write_bytes(b"x")
    assert below(tmp_path) == ["step_5"]


def test_folders_that_are_one_checkpoint_are_one_thing(tmp_path, capsys):
    """Shards, DCP, DeepSpeed's and Lightning's folders, an unpacked archive: by name alone, and
    read as that when they are looked at.
    """
    whole_folders(tmp_path)
    skipped = Skipped()

    assert below(tmp_path, skipped) == [*LAYOUTS]
    assert (skipped.files, skipped.links) == (0, 0)
    rows = map(json.loads, run(capsys, "inspect", "-r", tmp_path, "--format", "jsonl").lines)
    assert [row["format"] for row in rows] == [*LAYOUTS.values()]
    assert run(capsys, "verify", "-r", tmp_path).err.startswith("7 files: 7 ok")


def test_what_is_beside_one_in_its_folder_is_taken_too(tmp_path):
    whole_folders(tmp_path)
    for name in ("dcp", "net", "zero", f"zero/{zero.TAG}", "epoch=1.ckpt/checkpoint"):
        torch.save({}, tmp_path / name / "beside.pth")
    (tmp_path / "dcp" / "config.yaml").write_text("")
    (tmp_path / "dcp" / "old").mkdir()
    torch.save({}, tmp_path / "dcp" / "old" / "x.pth")
    skipped = Skipped()

    assert [path for path in below(tmp_path, skipped) if path not in LAYOUTS] == [
        "dcp/beside.pth", "dcp/old/x.pth", "epoch=1.ckpt/checkpoint/beside.pth", "net/beside.pth",
        "zero/beside.pth", f"zero/{zero.TAG}/beside.pth",
    ]  # fmt: skip
    assert skipped.files == 1


def test_a_folder_of_the_trainer_is_its_model_and_deepspeeds_part(tmp_path):
    """transformers' Trainer: the folder itself is read as model.safetensors."""
    zero.write(tmp_path / "step", zero.net(), 2, 2)
    (tmp_path / "step" / "zero_to_fp32.py").write_text("")
    save_file({"x": torch.zeros(1)}, tmp_path / "step" / "model.safetensors")

    assert below(tmp_path) == ["step/model.safetensors", f"step/{zero.TAG}"]


def test_a_pointer_to_a_tag_that_is_gone_is_told_and_the_other_tags_are_read(tmp_path, capsys):
    zero.write(tmp_path / "run", zero.net(), 2, 2)
    (tmp_path / "run" / "latest").write_text("global_step9")
    assert below(tmp_path) == [f"run/{zero.TAG}"]  # `latest` may be anybody's
    (tmp_path / "run" / "zero_to_fp32.py").write_text("")
    assert below(tmp_path) == ["run", f"run/{zero.TAG}"]
    done = run(capsys, "inspect", "-r", tmp_path)
    assert (done.status, done.out.count("names 'global_step9', which is not there")) == (2, 1)


def test_files_that_nothing_joins_are_files(tmp_path):
    """Ranks of a parallel model without ZeRO, Megatron's, a pickle called data.pkl."""
    names = ["ds/mp_rank_00_model_states.pt", "ds/mp_rank_01_model_states.pt",
             "iter_0000005/mp_rank_00/distrib_optim.pt", "iter_0000005/mp_rank_00/model_optim_rng.pt",
             "odd/data.pkl", "odd/x.pth"]  # fmt: skip
    for name in (*names, "latest_checkpointed_iteration.txt", "odd/data/0"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(b"5")
    assert below(tmp_path) == names


def test_links_to_folders_are_not_followed(tree):
    os.symlink(tree, tree / "sub" / "loop")
    os.symlink("/", tree / "root")
    skipped = Skipped()
    assert len(below(tree, skipped)) == 4
    assert skipped.links == 2


def test_links_to_files_are_and_one_to_nothing_is_told(tree):
    os.symlink(tree / "b.PTH", tree / "c.pth")
    os.symlink(tree / "gone.pth", tree / "d.pth")
    os.mkfifo(tree / "e.pth")
    assert below(tree)[:4] == ["b.PTH", "c.pth", "d.pth", "evil.pth"]


@pytest.mark.skipif(os.name == "nt" or os.geteuid() == 0, reason="root reads everything")
def test_a_folder_that_cannot_be_read_is_told_and_the_others_are_read(tree):
    os.chmod(tree / "sub", 0)
    found = list(files_below(Folder(tree), Skipped()))
    os.chmod(tree / "sub", 0o700)
    assert [type(p.error) for p in found] == [type(None), type(None), SpecialFile]


def test_a_folder_that_vanishes_is_told(tree, monkeypatch):
    real = os.scandir

    def scandir(path):
        if path.endswith("deep"):
            raise PermissionError(13, "Permission denied")
        return real(path)

    monkeypatch.setattr(walking.os, "scandir", scandir)
    *_, last = files_below(Folder(tree), Skipped())
    assert str(last.error) == f"{tree}/sub/deep: the folder cannot be listed: Permission denied"


@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        ("runs/*.pth", ["evil.pth"]),
        ("runs/*/*.safetensors", ["sub/a.safetensors"]),
        ("runs/**/*.pt", ["sub/deep/broken.pt"]),
        ("runs/**/[ab].*", ["b.PTH", "sub/a.safetensors"]),
        ("r?ns/evil.pth", ["evil.pth"]),
        ("./runs/*.pth", ["evil.pth"]),
    ],
)
def test_patterns(tree, pattern, names):
    found = list(gather([pattern], False, Skipped()))
    assert [os.path.relpath(p.path, "runs") for p in found] == names
    assert all(p.error is None for p in found)


def test_a_pattern_for_nothing_is_an_error_of_its_own(tree):
    (first, second) = gather(["runs/*.zip", "runs/b.PTH"], False, Skipped())
    assert str(first.error) == "runs/*.zip: no file matches"
    assert second == ("runs/b.PTH", None)


def test_a_file_may_be_called_like_a_pattern(tree):
    torch.save({}, tree / "a[1].pth")
    assert list(gather([str(tree / "a[1].pth")], False, Skipped())) == [
        (str(tree / "a[1].pth"), None)
    ]


@pytest.mark.parametrize(
    ("data", "names"),
    [
        (b"", []),
        (b"a.pth\nb c.pth\n\n", ["a.pth", "b c.pth"]),
        (b"a\nb.pth\0c.pth\0", ["a\nb.pth", "c.pth"]),
        (b"last", ["last"]),
        (b"\xff.pth\n", [os.fsdecode(b"\xff.pth")]),
    ],
)
def test_lists_of_names(data, names):
    assert names_in(data) == names


# -- what is said ------------------------------------------------------------------------------
def test_one_row_a_file_and_a_count(tree, capsys):
    done = run(capsys, "inspect", "-r", "runs")

    assert done.status == 2
    assert [line.split()[0] for line in done.lines] == [
        "file", "runs/b.PTH", "runs/evil.pth", "runs/sub/a.safetensors", "runs/sub/deep/broken.pt",
    ]  # fmt: skip
    assert done.lines[1].endswith("ok")
    assert done.lines[2].endswith("could run code")
    assert "refused: " in done.lines[4]
    assert done.err == "4 files: 2 ok, 1 could run code, 1 refused; 3 other files skipped\n"


def test_json_lines_in_the_order_of_the_input(tree, capsys):
    done = run(capsys, "inspect", "-r", "runs", "--format", "jsonl")

    rows = [json.loads(line) for line in done.lines]
    assert [os.path.basename(row["file"]) for row in rows] == [
        "b.PTH", "evil.pth", "a.safetensors", "broken.pt",
    ]  # fmt: skip
    assert [row.get("tensor_count") for row in rows] == [1, 9, 1, None]
    assert rows[3]["error"]["slug"]
    assert all(row["schema"] == 1 for row in rows)


def test_json_is_an_array_also_of_one(tree, capsys):
    assert len(json.loads(run(capsys, "inspect", "-r", "runs", "--json").out)) == 4
    assert len(json.loads(run(capsys, "inspect", "runs/*.PTH", "--json").out)) == 1
    (tree / "empty").mkdir()
    assert json.loads(run(capsys, "inspect", "-r", "runs/empty", "--json").out) == []


@pytest.mark.parametrize("style", ["plain", "csv", "markdown"])
def test_other_tables_have_a_row_a_file(tree, capsys, style):
    done = run(capsys, "inspect", "-r", "runs", "--format", style, "-q")
    assert len(done.lines) == 4 + {"plain": 0, "csv": 1, "markdown": 2}[style]
    assert done.err == ""
    assert done.lines[-1].count("refused") == 1


def test_verify_counts_what_is_damaged(tree, capsys):
    data = bytearray((tree / "b.PTH").read_bytes())
    data[data.index(b"\0" * 12 + b"PK\x07\x08")] ^= 1
    (tree / "bad.pth").write_bytes(data)
    done = run(capsys, "verify", "-r", "runs")

    assert done.status == 2
    assert any(line.startswith("runs/bad.pth") and "damaged" in line for line in done.lines)
    assert done.err.startswith("5 files: 2 ok, 1 could run code, 2 damaged, 0 refused;")


@pytest.mark.parametrize(
    ("names", "status"), [(["b.PTH"], 0), (["b.PTH", "evil.pth"], 1), (["evil.pth", "none"], 2)]
)
@pytest.mark.parametrize("verb", ["inspect", "verify"])
def test_the_status_of_the_worst(tree, capsys, names, status, verb):
    (tree / "list").write_text("".join(f"runs/{name}\n" for name in names))
    assert run(capsys, verb, "--files-from", "runs/list").status == status


def test_names_from_stdin(tree, capsys, monkeypatch):
    stdin = SimpleNamespace(buffer=io.BytesIO(b"runs/b.PTH\0runs/sub/a.safetensors\0"))
    monkeypatch.setattr(sys, "stdin", stdin)
    done = run(capsys, "inspect", "--files-from", "-", "--format", "jsonl")
    assert [json.loads(line)["file"] for line in done.lines] == [
        "runs/b.PTH",
        "runs/sub/a.safetensors",
    ]


def test_a_list_may_name_folders(tree, capsys):
    (tree / "list").write_text("runs/sub\n")
    assert len(run(capsys, "inspect", "-r", "--files-from", "runs/list").lines) == 3


@pytest.mark.parametrize(
    "flags",
    [("--format", "tree"), ("--keys",), ("--stats",), ("--index",)],
    ids=" ".join,
)
def test_what_a_row_cannot_show_is_refused(tree, capsys, flags):
    done = run(capsys, "inspect", "-r", "runs", *flags)
    assert (done.status, done.out) == (2, "")


def test_no_file_at_all(capsys):
    assert run(capsys, "inspect").status == 2
    assert "no FILE" in run(capsys, "verify").err


def test_numbers_come_with_json_lines(tree, capsys):
    done = run(capsys, "inspect", "runs/sub/*.safetensors", "--hash", "--format", "jsonl")
    (row,) = map(json.loads, done.lines)
    assert len(row["tables"][0]["tensors"][0]["sha256"]) == 64


def test_a_model_is_asked_of_each(tree, capsys):
    save_file({"w": torch.zeros(3)}, tree / "fits.safetensors")
    done = run(
        capsys,
        "inspect",
        "runs/*.PTH",
        "runs/sub/*.safetensors",
        "--against",
        "runs/fits.safetensors",
    )
    assert done.status == 1
    assert [line.rsplit("  ", 1)[1] for line in done.lines[1:]] == ["ok", "does not fit"]


def test_a_bug_in_one_file_does_not_hide_the_others(tree, capsys, monkeypatch):
    from ckptool.cli import inspect

    real = inspect.summarise_place

    def broken(file, *args, **words):
        if file.endswith("evil.pth"):
            raise ZeroDivisionError("oh")
        return real(file, *args, **words)

    monkeypatch.setattr(inspect, "summarise_place", broken)
    done = run(capsys, "inspect", "-r", "runs")
    assert done.status == many.BUG
    assert "a bug in ckptool: ZeroDivisionError: oh" in done.out
    assert len(done.lines) == 5


class Link(list):
    """A list that a weak reference can watch."""


def named_one_by_one(seen):
    for number, _ in enumerate(seen):
        if number:
            many.tidy(number)
        yield


@pytest.mark.parametrize("way", [lambda seen: many._Tally(seen, False).reports(), named_one_by_one])
@pytest.mark.parametrize(("nodes", "alive"), [(60_000, 2), (10, 40)])
def test_what_holds_itself_is_thrown_away_before_much_has_gathered(nodes, alive, way):
    """The collector sleeps in a run of the command line; pickles that hold themselves wait for it."""
    left, most = [], 0

    def seen():
        for _ in range(40):
            link = Link([] for _ in range(nodes))
            link.append(link)
            left.append(weakref.ref(link))
            del link
            yield many.Seen(0, {"could_run_code": False}), None

    was_enabled = gc.isenabled()
    gc.disable()
    try:
        for _ in way(seen()):
            most = max(most, sum(one() is not None for one in left[1:]))
    finally:
        gc.unfreeze()
        if was_enabled:
            gc.enable()
    assert alive - 2 <= most <= alive


def test_hostile_names_do_not_reach_the_terminal(tree, capsys):
    os.rename(tree / "b.PTH", tree / "b\x1b[31m\n.pth")
    for style in ("table", "plain", "csv", "markdown", "jsonl"):
        out = run(capsys, "inspect", "-r", "runs", "--format", style).out
        assert "\x1b" not in out
        assert "[31m" in out


def test_a_name_that_could_run_code_is_found_behind_a_thousand_others(tree, capsys, monkeypatch):
    from ckptool.checkpoint import Global
    from ckptool.verbs import inspect

    real = inspect.opened

    @contextlib.contextmanager
    def many_names(place, limits, **more):
        with real(place, limits, **more) as found:
            names = [Global(f"a.b{i}", "known", i, "data.pkl", "") for i in range(1500)]
            rows = (*names, Global("os.system", "code", 9, "data.pkl", ""))
            yield found._replace(checkpoint=found.checkpoint._replace(globals=rows))

    monkeypatch.setattr(inspect, "opened", many_names)
    for style in ("table", "jsonl"):
        done = run(capsys, "inspect", "runs/*.PTH", "--format", style)
        assert (done.status, done.err) == (1, "1 file: 0 ok, 1 could run code, 0 refused\n")


# -- a real program ----------------------------------------------------------------------------
def program(*args, **words):
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(
        [sys.executable, "-m", "ckptool", *args], env=env, stderr=subprocess.PIPE, **words
    )


def test_a_reader_that_leaves_ends_it_quietly(tree):
    for number in range(400):
        shutil.copy(tree / "b.PTH", tree / f"n{number}.pth")
    with program("inspect", "-r", str(tree), "--format", "jsonl", stdout=subprocess.PIPE) as done:
        assert done.stdout.readline()
        done.stdout.close()
        assert done.stderr.read() == b""
    assert done.returncode == 141


def test_control_c_ends_it_soon(tree, tmp_path):
    names = tmp_path / "list"
    names.write_text(f"{tree}/b.PTH\n" * 200_000)
    out = tmp_path / "out"
    with (
        open(out, "wb") as file,
        program("inspect", "--files-from", str(names), "--format", "jsonl", stdout=file) as done,
    ):
        until = time.monotonic() + 20
        while not out.stat().st_size and time.monotonic() < until:
            time.sleep(0.02)
        done.send_signal(signal.SIGINT)
        said = done.stderr.read()
    assert done.returncode == 130
    assert b"Traceback" not in said


# -- order and threads -------------------------------------------------------------------------
def test_what_waits_is_done_by_threads_and_comes_in_order():
    names = set()

    def slow(number):
        names.add(threading.current_thread().name)
        time.sleep(0.02 if number % 7 else 0.06)
        return number

    started = time.monotonic()
    assert list(in_order(slow, range(100))) == list(range(100))
    assert time.monotonic() - started < 1.5  # one by one it takes 2.6 s
    assert len(names) > 4


@pytest.mark.skipif(ordered._sleeps() is None, reason="only Linux counts how a thread waits")
def test_what_computes_stays_in_one_thread_also_on_a_busy_machine(monkeypatch):
    """A thread that lost its processor seems to wait; the clock here says so all the time."""
    monkeypatch.setattr(ordered, "thread_time", lambda: 0.0)
    names = set()

    def busy(number):
        names.add(threading.current_thread().name)
        return sum(range(20_000))

    list(in_order(busy, range(200)))
    assert names == {"MainThread"}


def test_what_no_longer_waits_is_done_in_one_thread_again(monkeypatch):
    monkeypatch.setattr(ordered, "_STINT", 20)
    names = []

    def cold(number):
        names.append(threading.current_thread().name)
        time.sleep(0.02 if number < 10 else 0)
        return sum(range(20_000)) and number

    assert list(in_order(cold, range(400))) == list(range(400))
    assert len(set(names[:20])) > 2
    assert set(names[60:]) == {"MainThread"}


def test_large_files_are_shared_among_the_cores(monkeypatch):
    monkeypatch.setattr(ordered, "_TRIAL", 0)
    monkeypatch.setattr(ordered, "_LARGE", 0)
    monkeypatch.setattr(ordered, "thread_time", ordered.perf_counter)  # nothing waits
    names = set()

    def busy(number):
        names.add(threading.current_thread().name)
        return sum(range(200_000))

    list(in_order(busy, range(40), cores=2))
    assert 2 <= len(names) <= 3


def test_no_more_is_begun_than_is_needed():
    begun = []

    def slow(number):
        begun.append(number)
        time.sleep(0.02)
        return number

    results = in_order(slow, iter(range(100_000)), hands=4)
    for _ in range(30):
        next(results)
    results.close()
    time.sleep(0.2)
    assert len(begun) < 100


def test_what_the_function_raises_comes_out():
    def fails(number):
        time.sleep(0.02)
        if number == 20:
            raise CkptError("no")
        return number

    results = []
    with pytest.raises(CkptError):
        results.extend(in_order(fails, range(100), hands=4))


@pytest.mark.long
def test_five_thousand_files_in_two_seconds(tmp_path):
    torch.save({"weight": torch.zeros(4, 4), "bias": torch.zeros(4)}, tmp_path / "x.pth")
    (tmp_path / "all").mkdir()
    for number in range(5000):
        shutil.copy(tmp_path / "x.pth", tmp_path / "all" / f"{number:05}.pth")
    took = []
    for _ in range(3):
        started = time.monotonic()
        with program("inspect", "-r", str(tmp_path / "all"), stdout=subprocess.DEVNULL) as done:
            assert b"5,000 files: 5,000 ok" in done.stderr.read()
        took.append(time.monotonic() - started)
    assert min(took) < 2
