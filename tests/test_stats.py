"""Statistics and hashes of the tensors of files, whatever holds them: torch is the oracle."""

from __future__ import annotations

import hashlib
import io
import math
import os
import pickle
import subprocess
import sys
import threading
import zipfile
from collections import OrderedDict

import numpy as np
import pytest
import torch
from container_support import big_endian, python2_legacy, records_of, rezipped
from diff_support import WRITERS, strided, tuned_pair
from stats_support import agrees, digest
from verbs_support import FIXTURES, ROOT, TRUTHS, load

import ckptool
from ckptool.errors import CkptError, CrcMismatch, InputChanged
from ckptool.limits import DEFAULT
from ckptool.verbs import stats as stats_verb
from ckptool.verbs import stats_plan

pytestmark = pytest.mark.filterwarnings(
    "ignore:torch.quantize", "ignore:Sparse", "ignore:The PyTorch API of nested",
    "ignore:TypedStorage is deprecated", "ignore:ComplexHalf",
)  # fmt: skip
OPENS = sorted(name for name, truth in TRUTHS.items() if not truth.get("error"))
NO_NUMBERS = {"sparse", "nested", "meta", "foreign", "uninitialized"}


def saved(path, sd, **options):
    torch.save(sd, path, **options)
    return path


def matches(found, sd):
    """Every row is what torch makes of the tensor of that name."""
    assert list(found) == list(sd)
    for key, tensor in sd.items():
        agrees(found[key], tensor)
        assert found[key].sha256 == digest(tensor), key
        assert found[key].reason == ""


# -- every file --------------------------------------------------------------------------------
@pytest.mark.parametrize("name", OPENS)
def test_every_fixture_has_the_bytes_it_should(name):
    """`sha256` in a fixture's truth is of the bytes as torch has them."""
    hashed = 0
    for table in TRUTHS[name]["tables"]:
        at = ".".join(map(str, table["path"])) or "."
        found = ckptool.stats(FIXTURES / name, at=at, hash=True)
        for row in table["tensors"]:
            mine = found[row["key"]]
            if row.get("sha256"):
                assert mine.sha256 == row["sha256"], row["key"]
                hashed += 1
            assert bool(mine.reason) == (mine.sha256 is None or mine.mean is mine.norm is None)
    assert hashed or not any(
        row.get("sha256") for table in TRUTHS[name]["tables"] for row in table["tensors"]
    )


@pytest.mark.parametrize(
    "name", ["views.pth", "tied.pth", "legacy_shared.pth", "deflated.pth", "dp_cuda.pth",
             "legacy_cuda1.pth", "cpu_tag_shared.pth", "quantized.pth", "proto5.pth"],
)  # fmt: skip
def test_fixtures_have_torchs_numbers(name):
    loaded = load(FIXTURES / name)
    for table in TRUTHS[name]["tables"]:
        sd = loaded
        for step in table["path"]:
            sd = sd[step]
        at = ".".join(map(str, table["path"])) or "."
        tensors = {key: t for key, t in sd.items() if isinstance(t, torch.Tensor)}
        matches(ckptool.stats(FIXTURES / name, at=at, hash=True), tensors)


@pytest.mark.parametrize("writer", WRITERS)
@pytest.mark.parametrize("layout", [OrderedDict, strided])
def test_containers_and_strides_tell_the_same(writer, layout, tmp_path):
    _, sd = tuned_pair()
    path = WRITERS[writer](tmp_path / "a", layout(sd))
    found = ckptool.stats(path, hash=True)
    matches(found, {key: sd[key] for key in found})
    assert found["layer3.0.bias"].nan_count == 1


def everything():
    """Views of all sorts: transposed, sliced, with gaps, repeated, flipped, of no axis."""
    torch.manual_seed(8)
    base = torch.randn(40, 50)
    z = torch.randn(30, dtype=torch.complex64)
    return {
        "empty.first": torch.empty(0),
        "plain": base,
        "transposed": torch.randn(40, 50).t(),
        "permuted": torch.randn(4, 5, 6).permute(2, 0, 1),
        "slice": base[3:9, 5:],
        "gaps": torch.randn(99)[::3],
        "transposed.gaps": torch.randn(20, 30)[::2, ::3].t(),
        "repeated": torch.randn(5, 1).expand(5, 7),
        "unfolded": torch.randn(30).unfold(0, 5, 2),
        "scalar": torch.tensor(2.5),
        "one": torch.tensor([[3]]),
        "empty": torch.empty(3, 0),
        "conj": z.conj(),
        "conj.transposed": torch.randn(3, 4, dtype=torch.complex128).t().conj(),
        "neg": torch.randn(30, dtype=torch.complex64).conj().imag,
        "half.conj": torch.randn(9, dtype=torch.complex64).to(torch.complex32).conj(),
        "odd": torch.tensor([math.nan, math.inf, -math.inf, 0.0, -0.0, 1.0]).bfloat16(),
    }


@pytest.mark.parametrize("legacy", [False, True])
def test_views(legacy, tmp_path):
    sd = everything()
    kwargs = {"_use_new_zipfile_serialization": False} if legacy else {}
    path = saved(tmp_path / "a.pth", sd, **kwargs)
    found = ckptool.stats(path, hash=True)
    matches(found, sd)
    for key, row in ckptool.stats(path).items():  # read in another order
        assert row.sha256 is None
        assert row.reason == ""
        agrees(row, sd[key])


def test_deflated_and_swapped(tmp_path):
    sd = {key: t for key, t in everything().items() if not t.is_conj() and not t.is_neg()}
    path = rezipped(tmp_path / "d.pth", records_of(sd), zipfile.ZIP_DEFLATED)
    matches(ckptool.stats(path, hash=True), sd)
    typed = {"a": torch.randn(50), "b": torch.arange(9), "c": torch.randn(8).to(torch.complex64),
             "d": torch.randn(9).half(), "t": torch.randn(4, 6).t(), "u": torch.arange(4).char()}  # fmt: skip
    matches(ckptool.stats(big_endian(tmp_path / "b.pth", typed), hash=True), typed)


def test_files_of_python_2_and_numpy_arrays(tmp_path):
    sd = {"a": torch.randn(7), "b": torch.arange(5)}
    matches(ckptool.stats(python2_legacy(tmp_path / "two.pth", sd), hash=True), sd)
    arrays = {"f": np.arange(12.0).reshape(3, 4).T, "big": np.arange(5, dtype=">i4"),
              "h": np.linspace(0, 1, 6, dtype="f2")}  # fmt: skip
    for protocol in (2, 4):
        (tmp_path / "n.pkl").write_bytes(pickle.dumps({"model": arrays}, protocol))
        native = {k: v.astype(v.dtype.newbyteorder("=")) for k, v in arrays.items()}
        truth = {k: torch.from_numpy(np.ascontiguousarray(v)) for k, v in native.items()}
        matches(ckptool.stats(tmp_path / "n.pkl", hash=True), truth)


def test_numbers_spelled_as_text_in_a_bare_pickle(tmp_path):
    """Protocol 2 of a plain pickle: the storage is a legacy stream inside of the pickle."""
    sd = {"a": torch.randn(70), "b": torch.arange(6.0).view(2, 3).t()}
    sd["c"] = sd["a"][3:9]
    for protocol in (2, 4):
        (tmp_path / "p.pkl").write_bytes(pickle.dumps(sd, protocol))
        matches(ckptool.stats(tmp_path / "p.pkl", hash=True), sd)


def test_a_file_object():
    stream = io.BytesIO()
    sd = {"w": torch.randn(5)}
    torch.save(sd, stream)
    matches(ckptool.stats(stream, hash=True), sd)


# -- what has no numbers -----------------------------------------------------------------------
def test_what_cannot_be_told_is_said(tmp_path):
    q = torch.quantize_per_channel(
        torch.randn(3, 4), torch.tensor([0.1, 0.2, 0.3]), torch.tensor([0, 1, 2]), 0, torch.qint8
    )
    sd = {
        "w": torch.ones(2),
        "sparse": torch.eye(3).to_sparse(),
        "csr": torch.eye(3).to_sparse_csr(),
        "nested": torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
        "meta": torch.empty(3, device="meta"),
        "q": q,
        "bits": torch.zeros(3, dtype=torch.uint8).view(torch.bits8),
    }
    found = ckptool.stats(saved(tmp_path / "a.pth", sd), hash=True)
    for key in ("sparse", "csr", "nested", "meta"):
        row = found[key]
        assert (row.element_count, row.mean, row.sha256) == (None, None, None)
        assert key[:3] in row.reason or "sparse" in row.reason
    agrees(found["q"], q)
    assert found["q"].sha256 == digest(q)
    assert (found["bits"].mean, found["bits"].element_count) == (None, None)
    assert found["bits"].reason == "torch has no numbers for bits8"
    assert found["bits"].sha256 == hashlib.sha256(bytes(3)).hexdigest()
    notes = {note.slug: note.text for note in found.inspection.notes}
    assert notes["raw-codes"] == (
        "1 quantized tensor by raw codes, before scale and zero point: 'q'"
    )
    assert notes["not-measured"].startswith("5 tensors not measured: 'sparse' (")
    assert notes["not-measured"].endswith(" and 2 more")


def test_arrays_of_types_that_torch_does_not_have(tmp_path):
    arrays = {"o": np.array(["a", "b"]), "f": np.arange(3.0), "l": np.ones(2, "f16")}
    (tmp_path / "n.pkl").write_bytes(pickle.dumps({"model": arrays}))
    found = ckptool.stats(tmp_path / "n.pkl", hash=True)
    agrees(found["f"], torch.arange(3.0, dtype=torch.float64))
    assert found["o"].reason == found["l"].reason == "an array of a type that torch does not have"
    assert found["o"].sha256 is found["l"].mean is None


def test_what_is_not_initialized_and_a_subclass(tmp_path):
    sd = torch.nn.LazyLinear(3).state_dict()
    sd["sub"] = torch.ones(3).as_subclass(Sub)
    found = ckptool.stats(saved(tmp_path / "a.pth", sd), hash=True)
    assert found["weight"].reason == "not initialized yet"
    agrees(found["sub"], torch.ones(3))
    assert ckptool.stats(saved(tmp_path / "b.pth", {"epoch": 3})).rows == ()
    assert ckptool.stats(saved(tmp_path / "c.pth", {"w": torch.ones(2)}), limit=0).rows == ()


class Sub(torch.Tensor):
    pass


def test_nan_is_said_first(tmp_path):
    path = saved(tmp_path / "a.pth", {"a": torch.ones(2), "b": torch.tensor([math.nan, math.inf])})
    note = ckptool.stats(path).inspection.notes[0]
    assert (note.slug, note.text) == (
        "nonfinite",
        "NaN or infinities in 1 of 2 tensors: 'b' (1 NaN, 1 infinite); "
        "the other figures are of the finite numbers",
    )


def test_views_that_repeat_without_end(tmp_path):
    """Sixteen bytes that stand for an exabyte: counted at once where only the axis repeats,
    refused where every element would have to be read.
    """
    one = torch.tensor([2.0, 4.0])
    sd = {
        "repeated": one[:1].expand(1 << 29, 1 << 29),
        "overlapping": one.as_strided((2, 1 << 20, 1 << 20), (1, 0, 0)),
        "windows": torch.ones(1 << 16).as_strided((1 << 15, 1 << 15), (1, 1)),
    }
    path = saved(tmp_path / "a.pth", sd)
    found = ckptool.stats(path, hash=True, limits=DEFAULT._replace(repeated_bytes=1 << 20))
    assert (found["repeated"].mean, found["repeated"].std) == (2, 0)
    assert found["repeated"].element_count == 1 << 58
    assert found["repeated"].norm == 2 * 2.0**29
    row = found["overlapping"]
    assert (row.min, row.max, row.mean, row.element_count) == (2, 4, 3, 1 << 41)
    assert row.std == pytest.approx(1)
    assert found["windows"].mean is None
    assert found["windows"].reason == (f"a view of {4 << 30:,} bytes of a storage of {4 << 16:,}")
    assert all(row.sha256 is None and row.reason for row in found.values())
    assert ckptool.stats(path, only=["repeated"])["repeated"].reason == ""


def test_a_large_deflated_view_out_of_order_is_a_reason(tmp_path, monkeypatch):
    sd = {"w": torch.ones(3, 4).t(), "v": torch.ones(5)}
    path = rezipped(tmp_path / "d.pth", records_of(sd), zipfile.ZIP_DEFLATED)
    monkeypatch.setattr("ckptool.values.storages.HELD_BYTES", 40)
    found = ckptool.stats(path, hash=True)
    assert found["w"].reason == "48 bytes of a deflated storage that a strided tensor needs at hand, at most 40 are held"  # fmt: skip
    assert found["w"].mean is found["w"].sha256 is None
    agrees(found["v"], sd["v"])


# -- how it is read ----------------------------------------------------------------------------
@pytest.fixture
def busy(monkeypatch):
    """Small lots, three threads."""
    monkeypatch.setattr(stats_plan, "LOT", 5000)
    monkeypatch.setattr(stats_verb, "LOT", 5000)
    monkeypatch.setattr(stats_verb, "_WORTH", 0)
    monkeypatch.setattr(stats_verb, "hand_count", lambda: 3)


def many(count=40):
    torch.manual_seed(6)
    sd = {f"w{i}": torch.randn(1000) * 3**i for i in range(count)}
    return {**sd, **everything(), "large": torch.randn(30_000), "codes": torch.randn(9000).char()}


@pytest.mark.parametrize("hashed", [False, True])
def test_threads_tell_what_one_thread_tells(hashed, busy, monkeypatch, tmp_path):
    sd = many()
    path = saved(tmp_path / "a.pth", sd)
    folder = tmp_path / "shards"
    plain = {key: t for key, t in sd.items() if not t.is_conj() and not t.is_neg()}
    ckptool.convert(saved(tmp_path / "b.pth", plain), folder, to="shards", max_shard_size=60_000,
                    fsync=False)  # fmt: skip
    assert len(list(folder.glob("*.safetensors"))) > 4
    several = [ckptool.stats(place, hash=hashed) for place in (path, folder)]
    monkeypatch.setattr(stats_verb, "hand_count", lambda: 1)
    alone = [ckptool.stats(place, hash=hashed) for place in (path, folder)]
    assert [s.rows for s in several] == [s.rows for s in alone]  # to the last bit
    if hashed:
        matches(several[0], sd)
    else:
        for key, row in several[1].items():
            agrees(row, sd[key])


@pytest.mark.parametrize("threads", [1, 3])
def test_progress_is_told_here_and_to_the_end(threads, busy, monkeypatch, tmp_path):
    monkeypatch.setattr(stats_verb, "hand_count", lambda: threads)
    sd = many()
    sd["tied"] = sd["w0"]  # read once
    seen, here = [], threading.get_ident()

    def progress(done, total):
        assert threading.get_ident() == here
        seen.append((done, total))

    ckptool.stats(saved(tmp_path / "a.pth", sd), hash=True, progress=progress)
    total = sum(t.numel() * t.element_size() for key, t in sd.items() if key != "tied")
    assert {row[1] for row in seen} == {total}
    assert [row[0] for row in seen] == sorted({row[0] for row in seen} | {total})
    assert len(seen) > 10


def damaged(tmp_path):
    """Deflated bytes that do not inflate, in the middle of many tensors."""
    records = records_of({f"w{i}": torch.arange(3000.0) + i for i in range(30)})
    path = rezipped(tmp_path / "d.pth", records, zipfile.ZIP_DEFLATED)
    with zipfile.ZipFile(path) as z:
        info = z.getinfo("net/data/17")
    data = bytearray(path.read_bytes())
    at = info.header_offset + 30 + len(info.filename) + info.compress_size // 2
    data[at : at + 40] = bytes(40)
    path.write_bytes(data)
    return path


@pytest.mark.parametrize("threads", [1, 3])
def test_damage_is_raised_and_every_thread_goes_home(threads, busy, monkeypatch, tmp_path):
    monkeypatch.setattr(stats_verb, "hand_count", lambda: threads)
    before = threading.active_count()
    with pytest.raises(CkptError) as caught:
        ckptool.stats(damaged(tmp_path), hash=True)
    assert isinstance(caught.value, CrcMismatch) or caught.value.slug in (
        "truncated",
        "storage-size",
    )
    assert "w17" in str(caught.value)
    assert threading.active_count() == before


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_who_stops_waiting_stops_the_threads(error, busy, tmp_path):
    def progress(done, total):
        raise error

    before = threading.active_count()
    with pytest.raises(error):
        ckptool.stats(saved(tmp_path / "a.pth", many()), progress=progress)
    assert threading.active_count() == before


def test_a_file_that_changes_meanwhile(busy, tmp_path):
    path = saved(tmp_path / "a.pth", many())
    with pytest.raises(InputChanged):
        ckptool.stats(path, progress=lambda done, total: os.utime(path, ns=(1, done)))


def test_one_view_under_two_names_is_read_once(tmp_path):
    w = torch.nn.Parameter(torch.randn(500))
    path = saved(tmp_path / "a.pth", {"a": w, "b": w, "c": w.data[:100]})
    seen = []
    found = ckptool.stats(path, progress=lambda done, total: seen.append(total))
    assert seen[-1] == 2000 + 400
    assert found["a"][1:] == found["b"][1:]
    agrees(found["c"], w.data[:100])


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_memory_and_imports_stay_small(tmp_path):
    """200 MB in one tensor, read in order, out of order and hashed by a process without torch."""
    w = torch.zeros(25_000, 2000)
    w[::7] = 1.5
    path = saved(tmp_path / "a.pth", {"w": w, "t": w.t()})
    code = (
        "import sys, ckptool\n"
        f"a = ckptool.stats({str(path)!r}, hash=bool(int(sys.argv[1])))\n"
        "assert 'torch' not in sys.modules\n"
        "status = open('/proc/self/status').read()\n"
        "print(status.split('VmHWM:')[1].split()[0], a['w'].mean, a['t'].norm)"
    )
    for hashed in "01":
        done = subprocess.run(
            [sys.executable, "-c", code, hashed], capture_output=True, text=True, check=True,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )  # fmt: skip
        peak, mean, norm = map(float, done.stdout.split())
        assert peak < 150_000  # kB
        rows = len(range(0, 25_000, 7))
        assert mean == pytest.approx(1.5 * rows / 25_000, rel=1e-12)
        assert norm == pytest.approx(1.5 * math.sqrt(rows * 2000), rel=1e-12)
