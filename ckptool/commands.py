"""Commands that a note or a hint tells people to run, written so that they can be pasted.

Knows: how a shell reads names. Must not know: files, flags.
"""

from __future__ import annotations


def convert_command(file: str, options: str) -> str:
    """`ckptool convert FILE options`; a name that looks like an option gets `./`."""
    from shlex import quote

    return f"ckptool convert {quote(f'./{file}' if file.startswith('-') else file)} {options}"
