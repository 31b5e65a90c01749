"""Numbers in chunks, and the recipes that a Plan names.

Knows: bytes of tensors. Must not know: formats, verbs. numpy only inside functions.
`RECIPES` maps a name to `recipe(reader, made)`, a generator of the bytes of a Made part;
`reader(source_id, offset, size)` gives the bytes of a source. What the generator returns, if
anything, is what the recipe has to tell (`CastCounts`). `CASTABLE` names the dtypes of `cast`.
"""

from ckptool.values.cast import CastCounts, cast
from ckptool.values.floats import CASTABLE
from ckptool.values.gather import gather
from ckptool.values.inflate import inflate
from ckptool.values.storages import decode

__all__ = ["CASTABLE", "RECIPES", "CastCounts"]

RECIPES = {"inflate": inflate, "decode": decode, "gather": gather, "cast": cast}
