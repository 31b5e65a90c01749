"""Other schemes (ftp, sftp, hdfs, memory …) through fsspec, where that is installed; read only.

Knows: fsspec's calls. Must not know: formats, obstore.
"""

from __future__ import annotations

from typing import Any

from ckptool.errors import CkptError, SpecialFile
from ckptool.reads import Source
from ckptool.spans import Address
from ckptool.urls import mask_within, masked

_TAGS = ("ETag", "etag", "mtime", "modified", "LastModified", "created")


def open_other(url: str) -> Source:
    """Raises CkptError `remote-missing` without fsspec or the package the scheme needs."""
    scheme = url.partition("://")[0]
    try:
        from fsspec.core import url_to_fs
    except ImportError:
        raise CkptError(
            f"{scheme}:// needs the package fsspec, which is not installed", path=masked(url),
            hint="pip install fsspec, or download the file first", slug="remote-missing",
        ) from None  # fmt: skip
    try:
        files, path = url_to_fs(url)
        info = files.info(path)
    except FileNotFoundError:
        raise SpecialFile("no such file there", path=masked(url), hint="check the URL") from None
    except (ImportError, ValueError) as error:
        said = mask_within(str(error)).partition("\n")[0]
        raise CkptError(
            f"fsspec cannot open {scheme}://: {said}", path=masked(url),
            hint="install the package it names, or download the file first", slug="remote-missing",
        ) from None  # fmt: skip
    except Exception as error:
        raise _failed(url, error) from None
    if info.get("type") == "directory" or not isinstance(info.get("size"), int):
        raise SpecialFile("not a file", path=masked(url), hint="give the URL of a file")
    return _Other(url, files, path, info)


def _failed(url: str, error: Exception) -> CkptError:
    said = mask_within(str(error) or type(error).__name__).partition("\n")[0][:300]
    return CkptError(
        f"the request failed: {said}", path=masked(url), hint="download the file first",
        slug="remote-error",
    )  # fmt: skip


class _Other(Source):
    """One file of an fsspec file system; `identity` is its tag or time, where it tells one."""

    def __init__(self, url: str, files: Any, path: str, info: dict[str, Any]) -> None:
        size = info["size"]
        super().__init__(masked(url), size, Address(url, size, _identity(info)))
        self._files = files
        self._path = path

    def _fetch(self, offset: int, size: int) -> bytes:
        try:
            return bytes(self._files.cat_file(self._path, start=offset, end=offset + size))
        except Exception as error:
            raise _failed(self.address.uri, error) from None

    def unchanged(self) -> bool:
        try:
            info = self._files.info(self._path)
        except Exception as error:
            raise _failed(self.address.uri, error) from None
        return (info.get("size"), _identity(info)) == (self.size, self.address.identity)


def _identity(info: dict[str, Any]) -> tuple[str, ...]:
    return tuple(str(info[tag]) for tag in _TAGS if info.get(tag) is not None)[:1]
