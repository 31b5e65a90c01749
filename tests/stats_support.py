"""What the tests of statistics share: torch, in double precision, as the oracle."""

from __future__ import annotations

from hashlib import sha256

import pytest
import torch
from values_support import bytes_of


def wide(tensor):
    """The numbers in double precision, in order."""
    if tensor.is_quantized:
        tensor = tensor.int_repr()
    tensor = tensor.detach().resolve_conj().resolve_neg()
    return tensor.to(torch.complex128 if tensor.is_complex() else torch.float64).flatten()


def agrees(found, tensor, rel=1e-12):
    """The statistics are torch's of the finite elements."""
    x = wide(tensor)
    kept = x[torch.isfinite(x)]
    assert found.element_count == tensor.numel()
    assert found.zero_count == int((x == 0).sum())
    assert found.nan_count == int(x.isnan().sum())
    assert found.inf_count == int(x.isinf().sum())
    if not len(kept):
        assert (found.mean, found.std, found.min, found.max) == (None,) * 4
        assert found.norm == (None if len(x) else 0.0)
        return
    most = float(kept.abs().max())
    assert found.mean == pytest.approx(kept.mean().item(), rel=rel, abs=most * 1e-14)
    assert found.norm == pytest.approx(torch.linalg.vector_norm(kept).item(), rel=rel)
    if len(kept) > 1:
        assert found.std == pytest.approx(kept.std().item(), rel=rel, abs=most * 1e-14)
    else:
        assert found.std is None
    if tensor.is_complex():
        assert found.min is found.max is None
    else:
        assert (found.min, found.max) == (kept.min().item(), kept.max().item())


def digest(tensor):
    """SHA-256 of `tensor.contiguous()`'s bytes."""
    if tensor.is_quantized:
        tensor = tensor.int_repr()
    plain = tensor.detach().resolve_conj().resolve_neg()
    return sha256(bytes_of(plain.clone(memory_format=torch.contiguous_format))).hexdigest()
