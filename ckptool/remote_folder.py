"""A prefix in a bucket, or what lies beside a file on the web, as a Folder.

Knows: names under a prefix, which stores can list. Must not know: formats, how objects are read.
"""

from __future__ import annotations

from urllib.parse import quote

from ckptool.errors import PathEscape, SpecialFile
from ckptool.places import Folder, check_folder_name, is_plain_name
from ckptool.reads import Source
from ckptool.remote_source import open_object
from ckptool.remote_stores import Store
from ckptool.remote_urls import Located, locate
from ckptool.urls import masked


class RemoteFolder(Folder):
    """`path` is the URL without the last slash. A web server lists nothing: there every name may
    be there until it is opened.
    """

    def __init__(self, place: Located, *, strict: bool = False) -> None:
        self.path = place.url.rstrip("/")
        self._strict = strict
        self._place = place
        self._files: dict[str, int] | None = None
        self._folders: tuple[str, ...] = ()

    def list(self) -> list[str]:
        """Names of the objects right under the prefix, sorted; none on the web."""
        return sorted(self._listed())

    def folders(self) -> tuple[str, ...]:
        """Names of the prefixes right under it, sorted."""
        self._listed()
        return self._folders

    def holds(self, name: str) -> bool:
        """Whether such an object is there; on the web, whether it may be."""
        return self._place.is_web or name in self._listed()

    def size_of(self, name: str) -> int:
        """Bytes of an object; 0 where there is none."""
        if not self._place.is_web:
            return self._listed().get(name, 0)
        try:
            with self.child(name) as source:
                return source.size
        except SpecialFile:
            return 0

    def below(self, name: str) -> RemoteFolder:
        """The prefix of this name. Raises PathEscape for no plain name."""
        check_folder_name(name, masked(self.path))
        return RemoteFolder(_located(f"{self.path}/{name}"), strict=self._strict)

    def names_below(self, name: str) -> tuple[str, ...]:
        """Names of the objects under the prefix of this name."""
        return tuple(self.below(name).list())

    def child(self, name: str) -> Source:
        """Open one of its objects. Raises PathEscape, and what `open_object` raises."""
        if not is_plain_name(name):
            raise PathEscape(
                "a file name that is not a plain name in the folder", path=masked(self.path),
                member=name, hint="edit the name, or do not use this file",
            )  # fmt: skip
        plain = name if not self._place.is_web or self.path.startswith("hf:") else quote(name)
        source = open_object(_located(f"{self.path}/{plain}"))
        source.far = not self._strict
        return source

    def exists(self) -> bool:
        """Whether anything lies under the prefix."""
        return bool(self._listed() or self._folders)

    def _listed(self) -> dict[str, int]:
        if self._files is None:
            found: tuple[dict[str, int], list[str]] = ({}, [])
            if not self._place.is_web:
                found = Store(self._place).listed(self._place.key)
            self._files, self._folders = found[0], tuple(sorted(found[1]))
        return self._files


def _located(url: str) -> Located:
    place = locate(url)
    assert place is not None  # its scheme is that of the folder
    return place
