"""What the tests of parts and types share: torch's word on what lies where in memory."""

from __future__ import annotations

import zipfile
from functools import partial

import torch
from fixtures.make_fixtures import element_bytes
from verbs_support import assert_same, calculated_offsets, devices, load

import ckptool

__all__ = ["Memory", "convert", "loaded_every_way", "moved", "stored_bytes"]

convert = partial(ckptool.convert, fsync=False)


def stored_bytes(obj):
    """Bytes of all storages under `obj`, each once."""
    seen = {}
    for tensor in tensors_of(obj):
        storage = tensor.untyped_storage()
        seen[storage.data_ptr() or id(storage)] = storage.nbytes()
    return sum(seen.values())


def tensors_of(obj):
    if isinstance(obj, torch.Tensor):
        yield obj
    elif isinstance(obj, dict):
        for value in obj.values():
            yield from tensors_of(value)
    elif isinstance(obj, list | tuple):
        for value in obj:
            yield from tensors_of(value)


def loaded_every_way(path, weights_only=True):
    """What torch reads, in every way it has to: by mmap, by the offsets that `.format_version`
    promises, on meta. A zip's storages are numbered in the order of first use.
    """
    plain = load(path, weights_only=weights_only)
    if not zipfile.is_zipfile(path):
        return plain
    with calculated_offsets():
        assert_same(plain, load(path, mmap=True))
        assert_same(plain, load(path, map_location="meta"), meta=True)
    assert_same(plain, load(path, mmap=True))
    with zipfile.ZipFile(path) as z:
        assert z.testzip() is None
        names = [info.filename.split("/", 1)[1] for info in z.infolist()]
    stored = [name for name in names if name.startswith("data/")]
    assert stored == [f"data/{i}" for i in range(len(stored))]
    assert [f"data/{key}" for key in devices(path)] == stored
    return plain


class Memory:
    """Two objects side by side: keys, types, values, and that elements which were one byte of
    memory in the first are one in the second, and no others; where things lie is not compared.

    `dtype(path, tensor)` says what a tensor of the first is in the second; `names(path, key)`
    gives the new name of a key.
    """

    def __init__(self, dtype=None, names=None):
        self.dtype = dtype or (lambda path, tensor: tensor.dtype)
        self.names = names or (lambda path, key: key)
        self.there, self.back = {}, {}
        self.tensors = 0

    def same(self, one, two, path=()):
        if isinstance(one, torch.Tensor):
            self._tensor(one, two, path)
            return
        assert type(one).__name__ == type(two).__name__, path
        if isinstance(one, dict):
            assert [self.names(path, key) for key in one] == list(two), path
            for (key, left), right in zip(one.items(), two.values(), strict=True):
                self.same(left, right, (*path, key))
        elif isinstance(one, list | tuple):
            assert len(one) == len(two), path
            for at, (left, right) in enumerate(zip(one, two, strict=True)):
                self.same(left, right, (*path, at))
        else:
            assert one == two or vars(one) == vars(two), path

    def _tensor(self, one, two, path):
        self.tensors += 1
        wanted = self.dtype(path, one)
        assert (type(one), one.shape, wanted) == (type(two), two.shape, two.dtype), path
        assert one.requires_grad == two.requires_grad, path
        made, found = (
            one.detach().to(wanted).clone(),
            two.detach().clone(),
        )  # without their storages
        assert element_bytes(made) == element_bytes(found), path
        left = addresses(one).tolist()
        right = addresses(two).tolist()
        for old, new in zip(left, right, strict=True):
            assert self.there.setdefault(old, new) == new, path
            assert self.back.setdefault(new, old) == old, path


def addresses(tensor):
    """Where each element is in memory, in row-major order."""
    if not tensor.numel():
        return torch.zeros(0, dtype=torch.int64)
    reach = tensor.untyped_storage().nbytes() // tensor.element_size()
    numbers = torch.arange(reach) * tensor.element_size() + tensor.untyped_storage().data_ptr()
    return numbers.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset()).reshape(-1)


def moved(one, two, **options):
    """`Memory.same`; the number of tensors."""
    memory = Memory(**options)
    memory.same(one, two)
    return memory.tensors
