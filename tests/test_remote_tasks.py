"""Shards sent to a bucket by many hands: the same bytes, runs that fail, runs that are gone on with."""

from __future__ import annotations

import json
import pickle
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from engines_support import CONVERSIONS, digests, made_alone, make
from remote_support import serving
from verbs_support import cli

import ckptool
from ckptool import executors, remote_book, remote_engine, remote_sink, remote_stores, remote_tasks
from ckptool.errors import CkptError, EngineError, InputChanged, OutputError, UsageError

obstore = pytest.importorskip("obstore")
URL = "s3://b/x/out"
WORDS = {"max_shard_size": "700KB"}
INDEX = "model.safetensors.index.json"
BOOK = f"x/out/{remote_book.NAME}"


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return make(tmp_path_factory.mktemp("in") / "net.pth")


@pytest.fixture(scope="module")
def plain(source, tmp_path_factory):
    return made_alone(source, tmp_path_factory, ("shards", "cast shards"))


@pytest.fixture
def bucket(monkeypatch):
    """One bucket for all of s3://."""
    store, real = obstore.store.MemoryStore(), remote_stores._made
    monkeypatch.setattr(
        remote_stores,
        "_made",
        lambda place, reading: real(place, reading) if place.is_web else store,
    )
    return store


@pytest.fixture(params=[0, 1 << 30], ids=["parts", "at once"])
def sent(request, monkeypatch):
    """Outputs are sent in parts, or each with one request."""
    monkeypatch.setattr(remote_sink, "ONE_REQUEST", request.param)
    return request.param


def names(store):
    return sorted(row["path"] for rows in obstore.list(store) for row in rows)


def content(store, name):
    return bytes(obstore.get(store, name).bytes())


def sent_digests(store):
    import hashlib

    return {
        name.removeprefix("x/out/"): hashlib.sha256(content(store, name)).hexdigest()
        for name in names(store)
    }


def shard(number, plain):
    """Its key."""
    return f"x/out/{sorted(plain['shards'][0])[number]}"


@pytest.fixture
def after(monkeypatch):
    """Call something when so many tasks have answered."""

    def use(count, act):
        real = remote_engine._Run.received

        def received(self, task, stored):
            real(self, task, stored)
            if len(self._stored) == count:
                act()

        monkeypatch.setattr(remote_engine._Run, "received", received)

    return use


@pytest.fixture
def tasks(monkeypatch):
    """The numbers of the tasks that really send."""
    numbers, real = [], remote_tasks.write_whole

    def whole(output, outlet, *rest, **words):
        numbers.append(outlet.path.rpartition("/")[2])
        return real(output, outlet, *rest, **words)

    monkeypatch.setattr(remote_tasks, "write_whole", whole)
    return numbers


def failing(error):
    def act():
        raise error

    return act


def interrupted(source, monkeypatch, count=3, error=None, **words):
    """A run with --resume that ends after `count` shards."""
    with monkeypatch.context() as patch:
        real = remote_engine._Run.received

        def received(self, task, stored):
            real(self, task, stored)
            if len(self._stored) == count:
                raise error or KeyboardInterrupt

        patch.setattr(remote_engine._Run, "received", received)
        with pytest.raises(type(error) if error else KeyboardInterrupt) as caught:
            ckptool.convert(source, URL, **{**WORDS, "resume": True, **words})
    return caught.value


# -- the same bytes ----------------------------------------------------------------------------
@pytest.mark.parametrize("name", ["shards", "cast shards"])
@pytest.mark.parametrize("words", [{"jobs": 3}, {"resume": True}], ids=str)
def test_the_objects_are_what_the_files_would_be(name, words, source, plain, bucket, sent):
    done = ckptool.convert(source, URL, **CONVERSIONS[name][1], **words)

    assert sent_digests(bucket) == plain[name][0]
    assert [note.text for note in done.notes] == [note.text for note in plain[name][1].notes]
    assert [row[0].rpartition("/")[2] for row in done.outputs] == sorted(plain[name][0])


def test_the_command(source, plain, bucket, capsys):
    args = ("convert", source, "-o", URL + "/", "--max-shard-size", "700KB", "--jobs", "2")
    status, _, err = cli(capsys, *args)
    assert status == 0, err
    assert sent_digests(bucket) == plain["shards"][0]


def test_from_shards_in_a_bucket(source, plain, bucket):
    ckptool.convert(source, "s3://b/in/", max_shard_size="1500KB")
    ckptool.convert("s3://b/in/", URL, **WORDS, jobs=2)
    found = {name: value for name, value in sent_digests(bucket).items() if "/" not in name}
    assert found == plain["shards"][0]


def test_the_index_comes_last_and_nothing_is_seen_of_an_unfinished_shard(
    source, bucket, monkeypatch, plain
):
    monkeypatch.setattr(remote_sink, "ONE_REQUEST", 0)
    seen = []
    real = remote_sink.ObjectTarget.publish

    def publish(self):
        before = names(bucket)
        real(self)
        seen.append((self.path, before))

    monkeypatch.setattr(remote_sink.ObjectTarget, "publish", publish)
    ckptool.convert(source, URL, **WORDS, resume=True)
    assert all(path.removeprefix("s3://b/") not in before for path, before in seen)
    assert seen[-1][0].endswith(INDEX)
    assert len(seen) == len(plain["shards"][0])


def test_what_is_beside_goes_beside(source, bucket, tmp_path, plain):
    ckptool.convert(source, URL, **WORDS, jobs=2, extras=str(tmp_path / "e.json"))
    ckptool.convert(source, tmp_path / "o", **WORDS, extras=str(tmp_path / "f.json"))
    assert (tmp_path / "e.json").read_text() == (tmp_path / "f.json").read_text()
    assert "epoch" in (tmp_path / "e.json").read_text()
    assert sent_digests(bucket) == plain["shards"][0]


def test_a_single_shard_has_no_index(source, bucket, tmp_path):
    for folder in (URL, tmp_path / "out"):
        ckptool.convert(source, folder, max_shard_size="1GB", jobs=2)
    assert sent_digests(bucket) == digests(tmp_path / "out")
    assert names(bucket) == ["x/out/model.safetensors"]


@pytest.mark.parametrize(
    "words", [{"jobs": 2}, {"resume": True}, {"engine": "dask=tcp://127.0.0.1:1"}], ids=str
)
@pytest.mark.parametrize("output", ["s3://b/out.pth", "s3://b/out.safetensors"])
def test_one_object_is_not_shared_out(output, words, source, bucket):
    with pytest.raises(UsageError) as caught:
        ckptool.convert(source, output, **words)
    assert "--max-shard-size" in caught.value.hint
    assert names(bucket) == []


def test_a_folder_of_many_ranks_is_not_shared_out(source, bucket):
    with pytest.raises(UsageError):
        ckptool.convert(source, URL, to="dcp", jobs=2)


def test_progress_reaches_the_whole(source, bucket):
    told = []
    ckptool.convert(source, URL, **WORDS, jobs=2, progress=lambda *row: told.append(row))
    assert told == sorted(told)
    assert 0.99 < told[-1][0] / told[-1][1] <= 1


# -- what a task is ----------------------------------------------------------------------------
def test_a_task_is_picklable_and_holds_no_secret(source, bucket, monkeypatch):
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "hush-hush")
    real, taken = remote_engine.carry_out, []

    def carried(executor, work, tasks, *rest):
        taken.extend(tasks)
        real(executor, work, tasks, *rest)

    monkeypatch.setattr(remote_engine, "carry_out", carried)
    ckptool.convert(source, URL, **WORDS, jobs=2)
    data = pickle.dumps(taken)
    assert pickle.loads(data) == taken
    assert b"hush-hush" not in data


@pytest.mark.parametrize(
    "url", ["https://me:secret@h/net.pth", "https://h/n.pth?X-Amz-Signature=ab"]
)
def test_an_address_with_a_secret_goes_to_no_worker(url):
    with pytest.raises(UsageError) as caught:
        executors.refuse_secrets([url])
    assert "secret" not in str(caught.value).replace("a secret", "")
    assert "ab" not in caught.value.path.rpartition("?")[2]


@pytest.mark.parametrize("target", [URL, "here"])
def test_workers_get_no_login_threads_do(target, source, plain, bucket, tmp_path):
    where = target if target == URL else str(tmp_path / "here")
    with serving(files={"net.pth": source}) as site, ThreadPoolExecutor(1) as pool:
        url = site.url("net.pth", "me:secret@127.0.0.1")
        with pytest.raises(UsageError, match="holds a password"):
            ckptool.convert(url, where, **WORDS, engine=pool)
        assert names(bucket) == []
        assert not (tmp_path / "here").exists()
        ckptool.convert(url, where, **WORDS, jobs=2)
    found = sent_digests(bucket) if target == URL else digests(tmp_path / "here")
    assert found == plain["shards"][0]


def test_a_question_without_an_answer_is_asked_again(source, bucket, monkeypatch):
    task = task_of(source, bucket, monkeypatch)
    monkeypatch.setattr(remote_tasks, "_ASK", 0)
    asked, real = [], remote_book.ObjectBook.is_mine

    def sometimes(self):
        asked.append(1)
        if len(asked) == 2:
            raise CkptError("no answer in time", slug="remote-timeout")
        return real(self)

    monkeypatch.setattr(remote_book.ObjectBook, "is_mine", sometimes)
    assert remote_tasks.send_far(task).meta.size == task.size
    assert len(asked) > 2


def task_of(source, bucket, monkeypatch):
    """One task, and its run still under way."""
    taken = []

    def carried(executor, work, tasks, *rest):
        taken.extend(tasks)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(remote_engine, "carry_out", carried)
        with pytest.raises(KeyboardInterrupt):
            ckptool.convert(source, URL, **WORDS, resume=True)
    return taken[0]


def test_a_task_that_runs_again_finds_its_own_object(source, bucket, monkeypatch, sent, tasks):
    task = task_of(source, bucket, monkeypatch)
    first, second = remote_tasks.send_far(task), remote_tasks.send_far(task)
    assert (first.found, second.found) == (False, True)
    assert (first.meta, len(tasks)) == (second.meta, 1)


def test_another_s_object_is_not_taken_for_it(source, bucket, monkeypatch, sent):
    task = task_of(source, bucket, monkeypatch)
    key = task.url.removeprefix("s3://b/")
    obstore.put(bucket, key, b"\0" * task.size, attributes={"ckptool": task.mark[:-1] + "77"})
    with pytest.raises(OutputError) as caught:
        remote_tasks.send_far(task)
    assert caught.value.slug == "output-exists"
    assert content(bucket, key) == b"\0" * task.size


def test_two_workers_with_one_task(source, bucket, monkeypatch, sent):
    """The later one gives its upload up; what is there stays what it was."""
    task = task_of(source, bucket, monkeypatch)
    whole = remote_tasks.write_whole
    first = []

    def slow(*args, **words):
        done = whole(*args, **words)
        if not first:
            first.append(None)
            first[0] = remote_tasks.send_far(task)  # the other is faster
        return done

    monkeypatch.setattr(remote_tasks, "write_whole", slow)
    second = remote_tasks.send_far(task)
    assert second.meta == first[0].meta
    assert not second.found


def test_a_task_nobody_wants_any_more(source, bucket, monkeypatch, sent):
    task = task_of(source, bucket, monkeypatch)
    whole = remote_tasks.write_whole

    def slow(*args, **words):
        done = whole(*args, **words)
        obstore.delete(bucket, BOOK)
        return done

    monkeypatch.setattr(remote_tasks, "write_whole", slow)
    with pytest.raises(OutputError) as caught:
        remote_tasks.send_far(task)
    assert caught.value.slug == "output-busy"
    assert names(bucket) == []


def test_a_long_task_asks_from_time_to_time(source, bucket, monkeypatch):
    task = task_of(source, bucket, monkeypatch)
    monkeypatch.setattr(remote_tasks, "_ASK", 0)
    asked, real = [], remote_book.ObjectBook.check
    monkeypatch.setattr(remote_book.ObjectBook, "check", lambda self: (asked.append(1), real(self)))
    remote_tasks.send_far(task)
    assert len(asked) > 2


def test_a_worker_of_another_version(source, bucket, monkeypatch):
    task = task_of(source, bucket, monkeypatch)._replace(version="0.0.1")
    with pytest.raises(UsageError, match="a worker has ckptool"):
        remote_tasks.send_far(task)


# -- failures ----------------------------------------------------------------------------------
def test_an_interruption_leaves_nothing(source, bucket, after, sent, capsys):
    after(3, failing(KeyboardInterrupt()))
    args = ("convert", source, "-o", URL, "--max-shard-size", "700KB", "--jobs", "2")
    status, _, err = cli(capsys, *args)
    assert (status, names(bucket)) == (130, [])
    assert "nothing is left behind" in err
    assert not [t for t in threading.enumerate() if t.name.startswith("ckptool-")]


def test_an_interruption_with_resume_keeps_what_is_done(source, bucket, after, capsys):
    after(3, failing(KeyboardInterrupt()))
    args = ("convert", source, "-o", URL, "--max-shard-size", "700KB", "--resume")
    status, _, err = cli(capsys, *args)
    assert status == 130
    assert "--resume" in err
    assert len(names(bucket)) == 4
    assert BOOK in names(bucket)
    with pytest.raises(CkptError):  # nobody takes that for a checkpoint
        ckptool.inspect(URL + "/")


@pytest.mark.parametrize("resume", [False, True])
@pytest.mark.parametrize(
    "error", [RuntimeError("a bug"), CkptError("no", slug="remote-timeout")], ids=str
)
def test_a_worker_that_fails(source, bucket, monkeypatch, resume, error):
    real = remote_engine.send
    count = []

    def send(*args):
        count.append(1)
        if len(count) == 3:
            raise error
        return real(*args)

    monkeypatch.setattr(remote_engine, "send", send)
    with pytest.raises(CkptError) as caught:
        ckptool.convert(source, URL, **WORDS, jobs=1, resume=True) if resume else ckptool.convert(
            source, URL, **WORDS, jobs=2
        )
    if isinstance(error, RuntimeError):
        assert isinstance(caught.value, EngineError)
    assert ("--resume" in (caught.value.hint or "")) == (resume or isinstance(error, RuntimeError))
    assert bool(names(bucket)) == resume


def test_an_input_that_changes_between_tasks(source, bucket, tmp_path, after, tasks):
    import os

    moving = tmp_path / "moving.pth"
    moving.write_bytes(source.read_bytes())
    after(2, lambda: os.utime(moving, ns=(1, 1)))
    with pytest.raises(InputChanged):
        ckptool.convert(moving, URL, **WORDS, resume=True)
    assert names(bucket) == []  # nothing to go on from either


def test_an_input_that_changes_after_the_last_task(source, plain, bucket, tmp_path, after):
    import os

    moving = tmp_path / "moving.pth"
    moving.write_bytes(source.read_bytes())
    after(len(plain["shards"][0]) - 1, lambda: os.utime(moving, ns=(1, 1)))
    with pytest.raises(InputChanged):
        ckptool.convert(moving, URL, **WORDS, jobs=2)
    assert names(bucket) == []


def test_a_shard_removed_at_the_last_moment_costs_only_that_shard(
    source, plain, bucket, monkeypatch, tasks
):
    count = len(plain["shards"][0]) - 1
    real = remote_engine._Run.finish

    def finish(self, verify):
        obstore.delete(bucket, shard(1, plain))
        real(self, verify)

    with monkeypatch.context() as patch:
        patch.setattr(remote_engine._Run, "finish", finish)
        with pytest.raises(OutputError, match="removed after it had been sent") as caught:
            ckptool.convert(source, URL, **WORDS, resume=True)
    assert "--resume" in caught.value.hint
    ckptool.convert(source, URL, **WORDS, resume=True)
    assert sent_digests(bucket) == plain["shards"][0]
    assert len(tasks) == count + 1


@pytest.mark.parametrize("how", ["replaced", "removed", "wrong"])
def test_the_driver_looks_at_every_shard_before_the_index(source, plain, bucket, after, how):
    def meddle():
        key = shard(1, plain)
        if how == "removed":
            obstore.delete(bucket, key)
        else:
            data = content(bucket, key)
            mark = obstore.get(bucket, key).attributes["ckptool"]
            obstore.put(bucket, key, data, attributes={"ckptool": mark} if how == "wrong" else {})

    after(len(plain["shards"][0]) - 1, meddle)
    with pytest.raises(OutputError, match="after it had been sent"):
        ckptool.convert(source, URL, **WORDS, jobs=2)
    left = [shard(1, plain)] if how == "replaced" else []  # what another put there stays
    assert names(bucket) == left


def test_the_self_check_reads_what_the_store_has(source, bucket, monkeypatch):
    """Its header, in each shard."""
    real = remote_stores.Store.put

    def put(self, data, *, create):
        if b"module.l7.weight" in data[:4096] and "00002-of" in self.place.key:
            data = data.replace(b"module.l7.weight", b"module.l0.weight", 1)
        real(self, data, create=create)

    monkeypatch.setattr(remote_stores.Store, "put", put)
    shards = {t["key"]: t for t in ckptool.inspect(source).to_dict()["tables"][0]["tensors"]}
    assert "module.l7.weight" in shards
    with pytest.raises(OutputError, match="self-check failed"):
        ckptool.convert(source, URL, **WORDS, jobs=2)
    assert names(bucket) == []


def test_create_only(source, plain, bucket, tasks):
    obstore.put(bucket, shard(2, plain), b"another's")
    for words in ({"jobs": 2}, {"resume": True}):
        with pytest.raises(OutputError) as caught:
            ckptool.convert(source, URL, **WORDS, **words)
        assert caught.value.slug == "output-exists"
    assert names(bucket) == [shard(2, plain)]
    assert tasks == []


def test_an_object_that_comes_meanwhile_stays(source, plain, bucket, monkeypatch, sent):
    publish, key = remote_sink.ObjectTarget.publish, shard(2, plain)

    def late(self):
        if self.path.endswith(key):
            obstore.put(bucket, key, b"another's")
        publish(self)

    monkeypatch.setattr(remote_sink.ObjectTarget, "publish", late)
    with pytest.raises(OutputError) as caught:
        ckptool.convert(source, URL, **WORDS, jobs=2)
    assert caught.value.slug == "output-exists"
    assert names(bucket) == [key]
    assert content(bucket, key) == b"another's"


def test_f_replaces_and_no_old_index_names_new_shards(source, plain, bucket, monkeypatch, after):
    for name in plain["shards"][0]:
        obstore.put(bucket, f"x/out/{name}", b"old")
    seen = []
    after(1, lambda: seen.extend(names(bucket)))
    ckptool.convert(source, URL, **WORDS, jobs=2, force=True)
    assert f"x/out/{INDEX}" not in seen
    assert sent_digests(bucket) == plain["shards"][0]


def test_a_killed_f_is_gone_on_with_by_f(source, plain, bucket, monkeypatch, tasks):
    for name in plain["shards"][0]:
        obstore.put(bucket, f"x/out/{name}", b"old")
    interrupted(source, monkeypatch, force=True)
    with pytest.raises(OutputError) as caught:
        ckptool.convert(source, URL, **WORDS, resume=True)
    assert caught.value.slug == "output-exists"
    done = len(json.loads(content(bucket, BOOK))["done"])
    del tasks[:]
    ckptool.convert(source, URL, **WORDS, resume=True, force=True)
    assert sent_digests(bucket) == plain["shards"][0]
    assert len(tasks) == len(plain["shards"][0]) - 1 - done


def test_what_f_cost_is_told_when_it_fails(source, plain, bucket, after):
    for name in plain["shards"][0]:
        obstore.put(bucket, f"x/out/{name}", b"old")
    after(2, failing(InputChanged("no")))
    with pytest.raises(InputChanged) as caught:
        ckptool.convert(source, URL, **WORDS, force=True, resume=True)
    gone = len(plain["shards"][0]) - len(names(bucket))
    assert f"{gone} of the objects that -f replaces are gone" in caught.value.text
    assert gone >= 3
    assert {content(bucket, name) for name in names(bucket)} == {b"old"}


def test_old_shards_of_another_number_are_refused(source, bucket):
    obstore.put(bucket, "x/out/model-00001-of-00099.safetensors", b"old")
    with pytest.raises(OutputError) as caught:
        ckptool.convert(source, URL, **WORDS, jobs=2, force=True)
    assert caught.value.slug == "output-mixed"


def test_the_output_is_the_input(source, bucket):
    ckptool.convert(source, URL, **WORDS)
    before = sent_digests(bucket)
    with pytest.raises(OutputError) as caught:
        ckptool.convert(URL + "/", URL, **WORDS, jobs=2, force=True)
    assert caught.value.slug == "output-same"
    assert sent_digests(bucket) == before


def test_what_cannot_be_removed_is_told(source, bucket, monkeypatch, capsys):
    def no(self):
        raise CkptError("no permission to delete")

    monkeypatch.setattr(remote_engine, "carry_out", lambda *_: failing(KeyboardInterrupt())())
    monkeypatch.setattr(remote_stores.Store, "delete", no)
    args = ("convert", source, "-o", URL, "--max-shard-size", "700KB", "--jobs", "2")
    status, _, err = cli(capsys, *args)
    assert status == 130
    assert "could not be removed: no permission to delete" in err
    assert "nothing is left behind" not in err


# -- gone on with ------------------------------------------------------------------------------
def test_resume_sends_only_what_is_not_done(source, plain, bucket, monkeypatch, tasks, sent):
    interrupted(source, monkeypatch)
    first = sorted(json.loads(content(bucket, BOOK))["done"])
    del tasks[:]
    done = ckptool.convert(source, URL, **WORDS, resume=True)

    assert sent_digests(bucket) == plain["shards"][0]
    assert len(first) == 3
    assert sorted([*tasks, *first, INDEX]) == sorted(plain["shards"][0])
    told = [note.text for note in done.notes]
    count = len(plain["shards"][0]) - 1
    assert told[-1] == f"gone on from an interrupted run: 3 of {count} tasks were done"


def test_resume_keeps_what_a_cast_told(source, plain, bucket, monkeypatch):
    words = CONVERSIONS["cast shards"][1] | {"dtype": "float16"}
    ckptool.convert(source, "s3://b/y/", **words)
    wanted = [
        n.text
        for n in ckptool.convert(source, "s3://b/z/", **words).notes
        if "module.big" in n.text
    ]
    count = len(list(obstore.list(bucket, "y/").collect())) - 1
    interrupted(source, monkeypatch, count=count - 1, **words)
    kept = json.loads(content(bucket, BOOK))["done"]
    assert any(results for _, _, results in kept.values())
    done = ckptool.convert(source, URL, **words, resume=True)
    assert wanted
    assert [note.text for note in done.notes if "module.big" in note.text] == wanted


def test_resume_of_a_shard_nobody_wrote_down(source, plain, bucket, monkeypatch, tasks):
    """A worker finished it when the driver was dead."""
    interrupted(source, monkeypatch)
    book = json.loads(content(bucket, BOOK))
    lost = sorted(book["done"])[0]
    del book["done"][lost]
    obstore.put(bucket, BOOK, json.dumps(book).encode())
    ckptool.convert(source, URL, **WORDS, resume=True)
    assert sent_digests(bucket) == plain["shards"][0]
    assert tasks.count(lost) == 1


def test_the_book_is_not_put_at_every_turn(source, plain, bucket, monkeypatch):
    """Google's store refuses more than one write of an object a second."""
    puts, real = [], remote_stores.Store.put

    def put(self, data, *, create):
        puts.append(self.place.key)
        real(self, data, create=create)

    monkeypatch.setattr(remote_stores.Store, "put", put)
    interrupted(source, monkeypatch, count=5)
    assert puts.count(BOOK) == 2  # at the beginning and at the end, all of it within two seconds
    assert len(json.loads(content(bucket, BOOK))["done"]) == 5
    monkeypatch.setattr(remote_book, "_PAUSE", 0)
    obstore.delete(bucket, [f"x/out/{name}" for name in plain["shards"][0]])
    ckptool.convert(source, URL, **WORDS, jobs=2, force=True)
    assert puts.count(BOOK) == 3 + len(plain["shards"][0]) - 1


@pytest.mark.parametrize("how", ["removed", "replaced", "replaced with its mark"])
def test_a_shard_that_is_not_what_was_sent_is_noticed(
    how, source, plain, bucket, monkeypatch, tasks
):
    interrupted(source, monkeypatch)
    name = sorted(json.loads(content(bucket, BOOK))["done"])[1]
    key = f"x/out/{name}"
    mark = obstore.get(bucket, key).attributes["ckptool"]
    size = len(content(bucket, key))
    obstore.delete(bucket, key)
    if how != "removed":
        marked = {"ckptool": mark} if "mark" in how else {}
        obstore.put(bucket, key, b"\1" * size, attributes=marked)
    if how == "replaced":
        with pytest.raises(OutputError, match="not what the interrupted run sent") as caught:
            ckptool.convert(source, URL, **WORDS, resume=True)
        assert caught.value.slug == "output-exists"
        assert content(bucket, key) == b"\1" * size
        ckptool.convert(source, URL, **WORDS, resume=True, force=True)
    else:
        ckptool.convert(source, URL, **WORDS, resume=True)
    assert sent_digests(bucket) == plain["shards"][0]
    assert tasks.count(name) == 2


@pytest.mark.parametrize("what", ["input", "options", "sizes"])
def test_another_conversion_does_not_go_on(what, source, plain, bucket, tmp_path, monkeypatch):
    import os

    moving = tmp_path / "moving.pth"
    moving.write_bytes(source.read_bytes())
    interrupted(moving, monkeypatch)
    before = names(bucket)
    words = dict(WORDS)
    if what == "input":
        os.utime(moving, ns=(5, 5))
    elif what == "options":
        words["strip_module"] = True
    else:
        words["max_shard_size"] = "900KB"
    with pytest.raises(OutputError, match="is of another conversion") as caught:
        ckptool.convert(moving, URL, **words, resume=True)
    assert caught.value.slug == "output-exists"
    assert names(bucket) == before
    if what == "sizes":
        with pytest.raises(OutputError) as caught:  # shards of another count are nobody's to remove
            ckptool.convert(moving, URL, **words, force=True, jobs=2)
        assert caught.value.slug == "output-mixed"
        return
    ckptool.convert(moving, URL, **words, resume=True, force=True)
    if what == "input":
        assert sent_digests(bucket) == plain["shards"][0]
    assert ckptool.verify(URL + "/").exit_status == 0


def test_without_resume_a_book_is_respected(source, bucket, monkeypatch):
    interrupted(source, monkeypatch)
    before = names(bucket)
    with pytest.raises(OutputError) as caught:
        ckptool.convert(source, URL, **WORDS, jobs=2)
    assert caught.value.slug == "output-busy"
    assert "--resume" in caught.value.hint
    assert names(bucket) == before


def test_f_begins_anew(source, plain, bucket, monkeypatch, tasks):
    interrupted(source, monkeypatch)
    del tasks[:]
    ckptool.convert(source, URL, **WORDS, jobs=2, force=True)
    assert len(tasks) == len(plain["shards"][0]) - 1
    assert sent_digests(bucket) == plain["shards"][0]


def test_a_run_that_was_taken_over_removes_nothing(source, plain, bucket, monkeypatch):
    """The first driver only seemed dead: the second one has the run from then on."""
    real = remote_engine._Run.received
    others = []

    def received(self, task, stored):
        if not others:
            others.append(True)
            with monkeypatch.context() as patch:
                patch.setattr(remote_engine._Run, "received", real)
                ckptool.convert(source, URL, **WORDS, resume=True)
        real(self, task, stored)

    monkeypatch.setattr(remote_engine._Run, "received", received)
    with pytest.raises(OutputError) as caught:
        ckptool.convert(source, URL, **WORDS, jobs=2)
    assert caught.value.slug == "output-busy"
    assert sent_digests(bucket) == plain["shards"][0]


def test_two_drivers_that_begin_at_one_time(source, bucket, monkeypatch):
    real = remote_engine._Run._look_around

    def look(self, there, found):
        real(self, there, found)
        obstore.put(bucket, BOOK, b"{}")

    monkeypatch.setattr(remote_engine._Run, "_look_around", look)
    with pytest.raises(OutputError) as caught:
        ckptool.convert(source, URL, **WORDS, jobs=2)
    assert caught.value.slug == "output-busy"
    assert names(bucket) == [BOOK]


def test_an_interrupt_after_the_index_removes_nothing(source, plain, bucket, monkeypatch):
    real = remote_engine.write

    def written(*args, **words):
        real(*args, **words)
        raise KeyboardInterrupt

    monkeypatch.setattr(remote_engine, "write", written)
    with pytest.raises(KeyboardInterrupt):
        ckptool.convert(source, URL, **WORDS, jobs=2)
    assert sent_digests(bucket) == plain["shards"][0]


def test_a_run_killed_between_index_and_book_is_finished(source, plain, bucket, monkeypatch, tasks):
    with monkeypatch.context() as patch:
        patch.setattr(remote_book.ObjectBook, "remove", failing_method)
        with pytest.raises(CkptError):
            ckptool.convert(source, URL, **WORDS, resume=True)
    assert BOOK in names(bucket)
    del tasks[:]
    ckptool.convert(source, URL, **WORDS, resume=True)
    assert tasks == []
    assert sent_digests(bucket) == plain["shards"][0]


def failing_method(self):
    raise CkptError("killed here")


HOSTILE = [
    b'{"book":"ckptool-objects","version":1,"plan":"PLAN","run":"a\\r\\nx-evil: 1","done":{}}', b"", b"[" * 100_000, b"[]", b'{"book": 1}', b'{"book":"ckptool-objects","version":1}',
    b'{"book":"ckptool-objects","version":1,"plan":"PLAN","run":7,"done":{}}',
    b'{"book":"ckptool-objects","version":1,"plan":"PLAN","run":"0123456789abcdef","done":{"../x":[1,["a"],[]]}}',
    b'{"book":"ckptool-objects","version":1,"plan":"PLAN","run":"0123456789abcdef","done":{"model-00001-of-00006.safetensors":["1",["a"],[]]}}',
    b'{"book":"ckptool-objects","version":1,"plan":"PLAN","run":"0123456789abcdef","done":{"model-00001-of-00006.safetensors":[5,["a"],[["k",[1]]]]}}',
    b'{"book":"ckptool-objects","version":1,"plan":"PLAN","run":"0123456789abcdef","done":{"model-00001-of-00006.safetensors":[' + b"9" * 5000 + b',["a"],[]]}}',
]  # fmt: skip


@pytest.mark.parametrize("data", HOSTILE, ids=range(len(HOSTILE)))
def test_a_strange_book_is_not_obeyed(data, source, plain, bucket, monkeypatch):
    monkeypatch.setattr(remote_engine, "digest", lambda *_: "PLAN")
    obstore.put(bucket, BOOK, data)
    ckptool.convert(source, URL, **WORDS, resume=True, force=True)
    assert sent_digests(bucket) == plain["shards"][0]
