"""The architectures of transformers, small, from configs alone, each with an input."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import transformers
from fit_nets import Case, fixed, words
from test_models_expected_transformers import MODELS

INPUTS: dict[str, Callable[[], dict[str, Any]]] = {
    "input_ids": lambda: {"input_ids": words(6, 32)},
    "pixel_values": lambda: {"pixel_values": fixed(1, 3, 8, 8)},
    "input_values": lambda: {"input_values": fixed(1, 64)},
    "input_features": lambda: {"input_features": fixed(1, 4, 16)},
}
BOTH = ("T5ForConditionalGeneration", "BartForConditionalGeneration", "WhisperModel")


def _make(name: str) -> Any:
    kind = getattr(transformers, name)
    return kind(kind.config_class(**MODELS[name]))


def _run(name: str, net: Any) -> Any:
    inputs = INPUTS[net.main_input_name]()
    if name in BOTH:
        inputs["decoder_input_ids"] = words(4, 32)
    found = net(**inputs)
    return [value for value in found.values() if isinstance(value, torch.Tensor)]


CASES = {name: Case(partial(_make, name), partial(_run, name)) for name in MODELS}
