"""What a model would say of a file's keys, without its numbers; torch's real load is the oracle."""

from __future__ import annotations

import pytest
import torch
from expected_nets import NETS, ON_CPU, PACKED
from expected_support import (
    FEW,
    SPOILS,
    WRAPS,
    Raises,
    fingerprint,
    quietly,
    shapes_of,
    torch_says,
    trained,
    versions_of,
)

from ckptool.models.expected import expect

pytestmark = pytest.mark.filterwarnings("ignore")


def on_meta(make):
    with torch.device("meta"):
        return quietly(make)


def assert_equal_to_torch(make, expected, state, label):
    """False where torch itself raises something else than its list of errors."""
    says = torch_says(make, state)
    found = expected.compare(shapes_of(state), versions_of(state))
    if isinstance(says, Raises):
        return False
    match, slugs = found.match, {note.slug for note in found.notes}
    assert "hooks-not-run" not in slugs, (label, found.notes)
    assert list(match.missing_keys) == says.missing, label
    assert list(match.unexpected_keys) == says.unexpected, label
    assert [row.key for row in match.mismatched] == [row[0] for row in says.mismatched], label
    for row, (_, file, model) in zip(match.mismatched, says.mismatched, strict=True):
        assert row.file_shape == file, label
        assert model is None or row.model_shape == model, label
    plain = [row.key for row in expected.wanted if row.kind in ("parameter", "buffer")]
    plain = [key for key in plain if key not in says.unseen]
    out = {*says.missing, *(row[0] for row in says.mismatched)}  # the other name of a tie may come
    changed = {*says.loaded} - out
    assert [key for key in match.loaded if key in plain] == [k for k in plain if k in changed], (
        label
    )
    return True


@pytest.mark.parametrize("name", NETS)
@pytest.mark.parametrize("wrap", WRAPS)
def test_sets_are_those_of_torch(name, wrap):
    if (name, wrap) == ("scripted", "compiled"):
        pytest.skip("torch refuses to compile what is scripted")
    make = lambda: WRAPS[wrap](NETS[name]())  # noqa: E731
    real = quietly(make)
    expected, state = expect(real), quietly(trained, real)
    rows = SPOILS if wrap == "plain" else FEW

    compared = [
        s.__name__ for s in rows if assert_equal_to_torch(make, expected, s(state), s.__name__)
    ]

    assert set(compared) >= ({"same"} if name in PACKED else {"same", "dropped", "prefixed"}), (
        compared
    )


@pytest.mark.parametrize("name", [name for name in NETS if name not in ON_CPU])
def test_a_model_on_meta_expects_the_same(name):
    state = quietly(trained, quietly(NETS[name]))
    real, meta = expect(quietly(NETS[name])), expect(on_meta(NETS[name]))

    assert real.wanted == meta.wanted
    for spoil in SPOILS:
        have, versions = shapes_of(spoil(state)), versions_of(spoil(state))
        assert real.match(None, have, versions) == meta.match(None, have, versions), spoil.__name__


@pytest.mark.parametrize("wrap", WRAPS)
@pytest.mark.parametrize("name", NETS)
def test_the_model_is_left_alone(name, wrap):
    if (name, wrap) == ("scripted", "compiled"):
        pytest.skip("torch refuses to compile what is scripted")
    model = quietly(lambda: WRAPS[wrap](NETS[name]()))
    state = quietly(trained, model)
    before = fingerprint(model)
    numbers = {
        k: v.clone() for k, v in model.named_parameters() if not torch.nn.parameter.is_lazy(v)
    }

    expected = expect(model)
    for spoil in (*FEW, SPOILS[2], SPOILS[-3]):
        expected.match(None, shapes_of(spoil(state)), versions_of(spoil(state)))

    assert fingerprint(model) == before
    assert all(torch.equal(numbers[k], v) for k, v in model.named_parameters() if k in numbers)
