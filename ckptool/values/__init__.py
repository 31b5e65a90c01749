"""Numbers in chunks, and the recipes that a Plan names.

Knows: bytes of tensors. Must not know: formats, verbs. numpy only inside functions.
`RECIPES` maps a name to `recipe(reader, made)`, which yields the bytes of a Made part;
`reader(source_id, offset, size)` gives the bytes of a source.
"""

from ckptool.values.inflate import inflate

RECIPES = {"inflate": inflate}
