"""What the tests of key rules share: names, and rules as short text."""

from __future__ import annotations

from ckptool.rules import Rule, apply

NET = ["conv.weight", "bn.weight", "bn.running_mean", "fc.bias"]


def rules_of(words):
    """Rules from 'name' or 'name ARGUMENT' or 'name ARGUMENT TO'."""
    return [word if isinstance(word, Rule) else Rule(*word.split()) for word in words]


def run(keys, *words):
    """The names after these rules, in key order; dropped keys are gone."""
    outcome = apply(rules_of(words), keys)
    return [outcome.renames.get(key, key) for key in keys if key not in outcome.drops]


def slugs(keys, *words):
    return [note.slug for note in apply(rules_of(words), keys).notes]


def pre(prefix, keys):
    return [prefix + key for key in keys]
