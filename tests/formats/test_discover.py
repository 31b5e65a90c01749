"""Where the weights are in the layouts of formats 7, and what is never taken for weights."""

import argparse
import collections
import random

import numpy as np
import pytest
import torch
from formats_support import (
    HOOKS,
    archive,
    call,
    dictionary,
    name,
    pickled,
    read_bytes,
    saved,
    saved_legacy,
    storage,
    tensor,
    text,
    tup,
)
from torch import nn

from ckptool.errors import CkptError
from ckptool.formats import dicts
from ckptool.limits import DEFAULT


def sd(prefix="", seed=0):
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    return collections.OrderedDict((prefix + k, v) for k, v in net.state_dict().items())


def adam():
    net = nn.Linear(2, 2)
    optimizer = torch.optim.Adam(net.parameters())
    net(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    return optimizer.state_dict()


ARGS = argparse.Namespace(lr=0.1, device="cuda:0", mean=torch.ones(3))
SCHEDULER = {"last_epoch": 3, "_last_lr": [0.1], "base_lrs": [0.1]}
RNG = {"torch": torch.get_rng_state(), "numpy": np.arange(3), "python": random.getstate()[1][:5]}
DEEP = {"language_model": {"embedding": {"word": sd()}, "encoder": sd("layers.")}}

# framework: (what it saves, the path of the weights, the other tables' paths)
LAYOUTS = {
    "tutorial": (
        {
            "epoch": 7,
            "arch": "r",
            "best_acc1": torch.tensor(1.0),
            "state_dict": sd("module."),
            "optimizer": adam(),
        },
        ("state_dict",),
        [],
    ),
    "net": ({"net": sd("module."), "acc": 93.1, "epoch": 3}, ("net",), []),
    "lightning": (
        {
            "epoch": 1,
            "global_step": 5,
            "pytorch-lightning_version": "2.0",
            "state_dict": sd("model."),
            "loops": {"fit_loop": {"state_dict": {}, "x": torch.ones(1)}},
            "callbacks": {"ModelCheckpoint": {"best": torch.ones(1)}},
            "optimizer_states": [adam()],
            "lr_schedulers": [SCHEDULER],
            "hparams_name": "kwargs",
            "hyper_parameters": {"w": torch.ones(2), "lr": 1},
        },
        ("state_dict",),
        [],
    ),
    "timm": (
        {
            "epoch": 1,
            "arch": "a",
            "state_dict": sd(),
            "state_dict_ema": sd(seed=1),
            "optimizer": adam(),
            "version": 2,
            "args": ARGS,
            "amp_scaler": {"scale": 1.0, "_growth_tracker": torch.ones(1)},
            "metric": 1.0,
        },
        ("state_dict",),
        [("state_dict_ema",)],
    ),
    "detectron2": (
        {"model": sd(), "optimizer": adam(), "scheduler": SCHEDULER, "iteration": 9},
        ("model",),
        [],
    ),
    "pycls": (
        {"epoch": 1, "model_state": sd(), "optimizer_state": adam(), "cfg": "A: 1"},
        ("model_state",),
        [],
    ),
    "mmengine": (
        {
            "meta": {"epoch": 1, "dataset_meta": {"mean": torch.ones(3)}},
            "state_dict": sd("backbone."),
            "optimizer": adam(),
            "message_hub": {"log_scalars": {}},
        },
        ("state_dict",),
        [],
    ),
    "fairseq": (
        {
            "args": ARGS,
            "cfg": None,
            "model": sd("encoder."),
            "criterion": {"weight": torch.ones(2)},
            "optimizer_history": [{"num_updates": 1}],
            "extra_state": {"epoch": 1},
            "last_optimizer_state": adam(),
            "task_state": {},
        },
        ("model",),
        [],
    ),
    "basicsr": ({"params_ema": sd(), "params": sd(seed=1)}, ("params_ema",), [("params",)]),
    "stable diffusion": (
        {"global_step": 1, "state_dict": sd("model.diffusion_model."), "callbacks": {}},
        ("state_dict",),
        [],
    ),
    "dino": (
        {
            "student": sd("module.backbone."),
            "teacher": sd("backbone."),
            "optimizer": adam(),
            "epoch": 1,
            "args": ARGS,
            "dino_loss": collections.OrderedDict(center=torch.zeros(1, 4)),
        },
        ("teacher",),
        [("student",)],
    ),
    "deepspeed": (
        {
            "module": sd(),
            "buffer_names": ["a"],
            "param_shapes": [{"w": torch.Size((2, 2))}],
            "ds_config": {"x": 1},
            "ds_version": "0.1",
        },
        ("module",),
        [],
    ),
    "megatron": (
        {
            "args": ARGS,
            "checkpoint_version": 3.0,
            "iteration": 5,
            "model": DEEP,
            "rng_state": [RNG],
            "optimizer": adam(),
        },
        ("model", "language_model", "encoder"),
        [("model", "language_model", "embedding", "word")],
    ),
    "megatron virtual": (
        {"model0": sd(), "model1": sd("b."), "iteration": 1},
        ("model0",),
        [("model1",)],
    ),
    "catalyst": (
        {
            "model_state_dict": sd(),
            "criterion_state_dict": {"weight": torch.ones(2)},
            "optimizer_state_dict": adam(),
            "scheduler_state_dict": SCHEDULER,
        },
        ("model_state_dict",),
        [],
    ),
    "gan": ({"netG": sd("module."), "netD": sd("module.")}, ("netG",), [("netD",)]),
    "gan, letters": ({"D": sd(), "G": sd(), "step": 1}, ("G",), [("D",)]),
    "cyclegan": (
        {"netG_A": sd(), "netG_B": sd(), "netD_A": sd()},
        ("netG_A",),
        [("netG_B",), ("netD_A",)],
    ),
    "styletts": (
        {
            "net": {"bert": sd("module."), "decoder": sd("module.")},
            "optimizer": {"bert": adam()},
            "iters": 1,
        },
        ("net", "bert"),
        [("net", "decoder")],
    ),
    "chgnet": (
        {"model": {"state_dict": sd(), "model_args": {"atom": 64}}, "trainer": "x"},
        ("model", "state_dict"),
        [],
    ),
    "wheels": ({"weights": sd(), "config": {"mean": torch.ones(3)}}, ("weights",), []),
    "unnamed": ({"whatever": sd(), "n": 1}, ("whatever",), []),
    "root": (sd(), (), []),
    "root, others beside": ({**sd(), "version": "1", "epoch": 3}, (), []),
    "ema beside root name": (
        {"model": sd(), "ema": sd(seed=1), "ema_decay": 0.9},
        ("model",),
        [("ema",)],
    ),
    "unknown ema last": ({"my_ema_copy": sd(), "my_net": sd()}, ("my_net",), [("my_ema_copy",)]),
    "nested list": ({"models": [sd(), sd("b.")]}, ("models", 0), [("models", 1)]),
    "tuple": ((sd(), 5), (0,), []),
}


@pytest.mark.parametrize("save", [saved, saved_legacy])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_weights_of_every_framework(layout, save):
    value, path, others = LAYOUTS[layout]
    checkpoint = read_bytes(save(value))
    chosen = checkpoint.tables[checkpoint.weights]
    assert chosen.path == path
    assert sorted(t.path for t in checkpoint.tables if t is not chosen) == sorted(others)
    inside = value
    for step in path:
        inside = inside[step]
    assert [t.key for t in chosen.tensors] == [k for k, v in inside.items() if torch.is_tensor(v)]


NEVER = (
    "optimizer",
    "optimizer_states",
    "lr_scheduler",
    "scheduler",
    "grad_scaler",
    "scaler",
    "rng_state",
    "rng",
    "cuda_rng",
    "loss",
    "dino_loss",
    "criterion",
    "callbacks",
    "loops",
    "args",
    "train_args",
    "cfg",
    "config",
    "hyper_parameters",
    "meta",
    "history",
    "amp",
)


@pytest.mark.parametrize("key", NEVER)
def test_tensors_beside_the_weights_are_no_weights(key):
    value = {
        "model": sd(),
        key: {"a": torch.ones(2), "b": torch.ones(2), "deeper": {"c": torch.ones(1)}},
    }
    checkpoint = read_bytes(saved(value))
    assert [t.path for t in checkpoint.tables] == [("model",)]
    assert sum(t.path[0] == key for t in checkpoint.tensors) == 3


@pytest.mark.parametrize("key", ["amplifier", "strong", "stamp", "ramp_net", "metadata_net"])
def test_names_that_only_look_like_them_are_weights(key):
    checkpoint = read_bytes(saved({key: sd()}))
    assert [t.path for t in checkpoint.tables] == [(key,)]


@pytest.mark.parametrize(
    "value",
    [adam(), {"o": adam()}, {"state": {}, "param_groups": [{"params": [], "x": torch.ones(1)}]}],
)
def test_an_optimizer_alone_has_no_weights_and_is_read(value):
    """optimizer.pt of the Hugging Face Trainer."""
    checkpoint = read_bytes(saved(value))
    assert checkpoint.weights is None
    assert [t for t in checkpoint.tables if t.kind == "state_dict"] == []


@pytest.mark.parametrize(
    "value",
    [
        {"state_dict": sd(), "best_acc1": torch.ones(1)},
        {
            "state_dict": {"w": torch.ones(1)},
            "a": torch.ones(1),
            "b": torch.ones(1),
            "c": torch.ones(1),
        },
        {"acc": torch.ones(1), "loss": torch.ones(1), "state_dict": sd()},
        {"mean": torch.ones(1), "std": torch.ones(1), "state_dict": sd(), "optimizer": adam()},
    ],
)
def test_a_few_tensors_beside_a_state_dict_are_not_the_weights(value):
    (table,) = read_bytes(saved(value)).tables
    assert table.path == ("state_dict",)


def test_a_module_with_tensors_beside_it():
    (table,) = read_bytes(
        saved({"net": nn.Linear(2, 2), "a": torch.ones(1), "b": torch.ones(1)})
    ).tables
    assert (table.path, table.kind) == (("net",), "module")


@pytest.mark.parametrize("key", ["lin._extra_state", "rng_state", "small"])
def test_a_few_tensors_below_do_not_unmake_a_table(key):
    value = {**sd(), key: {"amax": torch.ones(1)}}
    checkpoint = read_bytes(saved(value))
    assert checkpoint.tables[checkpoint.weights].path == ()


def test_a_list_of_tensors_is_one_table_of_them():
    checkpoint = read_bytes(saved([torch.ones(2), (torch.zeros(3), torch.ones(1))]))
    (table,) = checkpoint.tables
    assert (table.kind, [t.key for t in table.tensors]) == ("tensors", ["0", "1.0", "1.1"])
    assert [t.path for t in table.tensors] == [(0,), (1, 0), (1, 1)]


@pytest.mark.parametrize("save", [saved, saved_legacy])
def test_a_bare_tensor_is_a_table_of_one(save):
    checkpoint = read_bytes(save(torch.arange(3.0)))
    assert [(t.path, t.shape) for t in checkpoint.tensors] == [((), (3,))]
    assert len(checkpoint.tables) == 1


def test_a_bare_storage_is_no_weight_and_is_listed():
    checkpoint = read_bytes(saved({"s": torch.ones(3).untyped_storage(), "w": torch.ones(2)}))
    assert {t.key: t.kind for t in checkpoint.tensors} == {"s": "storage", "w": "tensor"}
    assert [t.key for t in checkpoint.tables[0].tensors] == ["w"]


def test_half_tensors_are_enough_and_fewer_are_not():
    mostly = {"a": torch.ones(1), "b": torch.ones(1), "x": [1], "y": {"k": 1}}
    few = {"a": torch.ones(1), "x": [1], "y": {"k": 1}, "z": [2]}
    assert read_bytes(saved(mostly)).tables[0].path == ()
    assert read_bytes(saved(few)).weights is None


def test_the_other_entries_of_a_table_are_told():
    (table,) = read_bytes(
        saved({**sd(), "n": 3, "name": "x", "hooks": [1], "nothing": None})
    ).tables
    assert table.others == (
        ("n", "int"),
        ("name", "str"),
        ("hooks", "list"),
        ("nothing", "NoneType"),
    )


def test_extra_state_is_no_tensor_of_the_table():
    class Extra(nn.Linear):
        def get_extra_state(self):
            return {"note": 1}

    (table,) = read_bytes(saved(Extra(2, 2).state_dict())).tables
    assert [t.key for t in table.tensors] == ["weight", "bias"]
    assert table.others == (("_extra_state", "dict"),)


# -- odd keys ----------------------------------------------------------------------------------
W = tensor()
W_AGAIN = tensor(storage())


def test_a_key_that_stands_twice_is_listed_twice_and_noted():
    checkpoint = read_bytes(archive(pickled(dictionary(("w", W), ("b", W), ("w", W)))))
    (table,) = checkpoint.tables
    assert [t.key for t in table.tensors] == ["w", "b", "w"]
    assert [t.path for t in checkpoint.tensors] == [("w",), ("b",), ("w",)]
    assert table.duplicate_keys == ("w",)
    assert [n.slug for n in checkpoint.notes] == ["key-duplicate"]


def test_two_tensors_under_one_key_are_two():
    small = tensor(size=(1,), stride=(1,))
    checkpoint = read_bytes(archive(pickled(dictionary(("w", W), ("w", small)))))
    for tensors in (checkpoint.tensors, checkpoint.tables[0].tensors):
        assert [t.shape for t in tensors] == [(2, 3), (1,)]


def test_a_duplicate_that_is_no_tensor_the_first_time():
    (table,) = read_bytes(archive(pickled(dictionary(("w", 1), ("w", W))))).tables
    assert table.duplicate_keys == ("w",)


@pytest.mark.parametrize(
    ("key", "shown"),
    [
        (5, "5"),
        (None, "None"),
        (True, "True"),
        (1.5, "1.5"),
        (("a", 1), "(a, 1)"),
        (b"ab", "b'ab'"),
        ("", ""),
        ((), "()"),
    ],
)
def test_keys_that_are_no_text(key, shown):
    value = {**sd(), key: torch.ones(1)}
    (table,) = read_bytes(saved(value)).tables
    assert table.tensors[-1].key == shown


def test_numbers_as_keys_make_no_table():
    checkpoint = read_bytes(saved({0: torch.ones(1), 1: torch.ones(1)}))
    assert checkpoint.weights is None or checkpoint.tables[checkpoint.weights].kind == "tensors"
    assert [t.path for t in checkpoint.tensors] == [(0,), (1,)]


@pytest.mark.parametrize(
    "key", ["\0", "a\nb", "\x1b[2J", "\u202e", "\udc80", "x" * (1 << 20), "__metadata__"]
)
def test_any_text_is_a_key(key):
    (table,) = read_bytes(archive(pickled(dictionary((key, W))))).tables
    assert table.tensors[0].key == key


def test_keys_that_look_alike_are_noted():
    checkpoint = read_bytes(
        archive(pickled(dictionary(("e\u0301", W), ("\u00e9", W), ("a\u200b", W), ("a", W))))
    )
    assert [n.slug for n in checkpoint.notes] == ["keys-look-alike"]
    assert checkpoint.notes[0].text.startswith("4 keys")


def test_a_container_as_a_key_is_not_hashed_and_its_tensors_are_found():
    checkpoint = read_bytes(
        archive(pickled(b"}(" + tup(W, b"]") + b"K\x01" + text("w") + W + b"u"))
    )
    assert len(checkpoint.tensors) == 2


# -- shape of the graph ------------------------------------------------------------------------
def test_a_dict_that_holds_itself():
    value = {"model": sd()}
    value["self"] = value
    value["model"]["again"] = value["model"]
    checkpoint = read_bytes(saved(value))
    assert checkpoint.tables[0].path == ("model",)
    assert len(checkpoint.tensors) == len(sd())


def test_a_module_that_holds_itself():
    module = nn.Linear(2, 2)
    module.__dict__["_modules"]["me"] = module
    table = read_bytes(saved(module)).tables[0]
    assert [t.key for t in table.tensors] == ["weight", "bias"]


def test_modules_that_multiply_are_refused():
    """Forty shared modules, two names each: 2**40 names."""
    module = nn.Sequential(nn.Linear(1, 1))
    for _ in range(40):
        module = nn.Sequential(module, module)
    with pytest.raises(CkptError) as caught:
        read_bytes(saved(module))
    assert caught.value.slug == "limit-nesting"


def test_one_dict_under_two_names_is_one_table():
    shared = sd()
    checkpoint = read_bytes(saved({"model": shared, "same": shared}))
    assert [t.path for t in checkpoint.tables] == [("model",)]


def nested(depth, kind):
    if kind == "dict":
        return b"".join(b"}" + text("a") for _ in range(depth)) + W + b"s" * depth
    if kind == "list":
        return b"]" * depth + W + b"a" * depth
    return W + b"\x85" * depth


@pytest.mark.parametrize("kind", ["dict", "list", "tuple"])
def test_nesting_is_bounded(kind):
    for depth in (600, 30_000):
        with pytest.raises(CkptError) as caught:
            read_bytes(archive(pickled(nested(depth, kind))))
        assert caught.value.slug == "limit-nesting"
    assert len(read_bytes(archive(pickled(nested(300, kind)))).tensors) == 1


def test_nested_calls_are_bounded():
    body = W
    for _ in range(600):
        body = name("torch._utils", "_rebuild_parameter") + b"(" + body + b"\x89" + HOOKS + b"tR"
    with pytest.raises(CkptError) as caught:
        read_bytes(archive(pickled(body)))
    assert caught.value.slug == "limit-nesting"


def test_laughs_are_walked_once():
    body = b"(" + W + b"tq\x00" + (b"0(" + b"h\x00" * 10 + b"tq\x00") * 60
    checkpoint = read_bytes(archive(pickled(dictionary(("w", W)), b"0", body)))
    assert len(checkpoint.tensors) <= 2


def test_a_deep_tuple_as_a_key_is_refused_and_crashes_nothing():
    with pytest.raises(CkptError) as caught:
        read_bytes(archive(pickled(b"}" + b")" + b"\x85" * 200_000 + b"Ns")))
    assert caught.value.slug == "limit-nesting"


def test_metadata_of_modules():
    value = sd()
    value._metadata = collections.OrderedDict([("", {"version": 1}), ("1", {"version": 2})])
    (table,) = read_bytes(saved(value)).tables
    assert table.metadata == {"": {"version": 1}, "1": {"version": 2}}


def test_tables_inside_a_module_are_part_of_it():
    module = nn.Linear(2, 2)
    module.saved = {"best": sd()}
    checkpoint = read_bytes(saved({"net": module}))
    assert [t.path for t in checkpoint.tables] == [("net",)]
    assert len(checkpoint.tensors) == 2 + len(sd())


def test_yolo_s_whole_module_in_a_dict():
    value = {
        "ema": nn.Linear(2, 2).half(),
        "model": None,
        "train_args": {"x": torch.ones(1)},
        "updates": 3,
    }
    checkpoint = read_bytes(saved(value))
    (table,) = checkpoint.tables
    assert (table.path, table.kind, table.class_name) == (
        ("ema",),
        "module",
        "torch.nn.modules.linear.Linear",
    )
    assert {t.dtype.name for t in table.tensors} == {"float16"}


@pytest.mark.parametrize(
    "body",
    [b"K\x05", b"N", b"]", tup(1, 2), text("x"), b"](K\x01K\x02e", b"}(K\x01K\x02u"],
    ids=repr,
)
def test_a_pickle_without_anything_of_a_checkpoint_is_refused(body):
    for data in (archive(pickled(body)), pickled(body)):
        with pytest.raises(CkptError) as caught:
            read_bytes(data)
        assert caught.value.slug == "not-a-checkpoint"


@pytest.mark.parametrize(
    "value", [{}, {"epoch": 3}, {"scheduler": SCHEDULER}, collections.OrderedDict()]
)
def test_a_dict_without_tensors_is_read(value):
    """scheduler.pt has no tensors and is an honest part of a training run."""
    checkpoint = read_bytes(saved(value))
    assert (checkpoint.tables, checkpoint.weights) == ((), None)


def test_call_helpers_agree_with_torch():
    assert read_bytes(archive(pickled(dictionary(("w", W))))).tensors[0].shape == (2, 3)
    assert call("a.b") == b"ca\nb\n(tR"


@pytest.mark.parametrize(("bits", "said"), [(4096, None), (4097, "a layer version of 4,097 bits")])
def test_a_layer_version_that_python_would_not_write_out_is_refused(bits, said):
    """Every report would fail on it: the limit is Python's own, on digits."""
    layers = collections.OrderedDict({"": {"version": (1 << bits) - 1}})
    net = sd()
    net._metadata = layers
    if said is None:
        assert read_bytes(saved(net)).tables[0].metadata == layers
        return
    with pytest.raises(CkptError, match=said):
        read_bytes(saved(net))


def layers(count, value):
    """A state_dict whose `count` layers have one dict of versions."""
    rows = [(f"m{at}", b"h\x09" if at else value + b"q\x09") for at in range(count)]
    state = dictionary(("_metadata", HOOKS + dictionary(*rows)[1:]))
    return archive(pickled(HOOKS + dictionary(("w", tensor()))[1:] + state + b"b"))


@pytest.mark.parametrize(("value", "each"), [
    (dictionary(("version", 2)), 24), (dictionary(("v", dictionary(("a", 1), ("b", 2)))), 3 * 24),
    (dictionary(("version", text("x" * 40))), 64),
])  # fmt: skip
def test_layer_versions_that_the_memo_repeats_are_read_once_up_to_a_limit(value, each, monkeypatch):
    texts = 40 if each == 64 else 0  # an honest file has none: the first counts too
    limit = DEFAULT._replace(repeated_value_bytes=9 * each + texts)
    monkeypatch.setattr(dicts, "DEFAULT", limit)
    found = read_bytes(layers(10, value)).tables[0].metadata
    assert list(found) == [f"m{at}" for at in range(10)]
    assert len({id(row) for row in found.values()}) == 1
    monkeypatch.setattr(dicts, "DEFAULT", limit._replace(repeated_value_bytes=9 * each + texts - 1))
    with pytest.raises(CkptError, match="layer versions of more than"):
        read_bytes(layers(10, value))
