"""verify of a folder: the index against its shards, and each shard by itself.

Knows: what an index promises. Must not know: printing, how one file is checked.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field

from ckptool.checkpoint import Note
from ckptool.errors import CkptError
from ckptool.formats import TITLES, hf_shards
from ckptool.formats.folders import look
from ckptool.formats.hf_index import Index, read_index
from ckptool.limits import Limits
from ckptool.places import Folder
from ckptool.verbs.naming import part_name
from ckptool.verbs.opening import open_folder, open_place
from ckptool.verbs.verify_file import verify_source
from ckptool.verbs.verify_findings import salvage_note
from ckptool.verbs.verify_report import Coverage, Finding, Numbers, Verification
from ckptool.verbs.verify_sums import Progress
from ckptool.verbs.verify_torch import Loading

NAME = "hf-shards"


def verify_folder(
    path: str, finite: bool, limits: Limits, progress: Progress | None
) -> Verification:
    """Check a folder, or the index at `path`, with all its shards. Raises CkptError for a folder
    that holds no checkpoint.
    """
    notes: tuple[Note, ...] = ()
    if path.endswith(".index.json") and not os.path.isdir(path):
        folder = open_folder(os.path.dirname(path) or ".", strict=True)
        name = os.path.basename(path)
    else:
        folder = open_folder(path, strict=True)
        held = look(folder)
        if held.layout not in ("", NAME):
            from ckptool.verbs.verify_joined import verify_joined

            return verify_joined(folder, held, finite, limits, progress)
        name, notes = held.name, held.notes
        if not held.is_index:
            source, said = open_place(os.path.join(path, name), strict=True)
            with source:
                return verify_source(source, finite, limits, progress, (*notes, *said))
    try:
        index = read_index(folder, name, limits)
    except CkptError as error:
        if error.slug == "special-file" and not folder.size_of(name):
            raise
        main = _of_error(error, 2)
        return Verification(path, NAME, TITLES[NAME], 0, (main,), safe=None, notes=notes)
    return _Folder(folder, index, finite, limits, progress).verified(path, notes)


def _of_error(error: CkptError, status: int, name: str = "", keys: tuple[str, ...] = ()) -> Finding:
    member = ":".join(part for part in (name, error.member or "") if part) or None
    named = (error.key,) if error.key else keys
    return Finding(error.slug, error.text, status, keys=named, member=member, offset=error.offset)


@dataclass(slots=True)
class _Folder:
    """The shards, checked one after another."""

    folder: Folder
    index: Index
    finite: bool
    limits: Limits
    progress: Progress | None
    findings: list[Finding] = field(default_factory=list)
    lost: list[tuple[str, str]] = field(default_factory=list)
    shards: list[Verification] = field(default_factory=list)

    def verified(self, path: str, notes: tuple[Note, ...]) -> Verification:
        """Everything about all of them."""
        index = self.index
        done, total = 0, sum(self.folder.size_of(name) for name in index.shards)
        for name in index.shards:
            self._shard(name, done, total)
            done += self.folder.size_of(name)
        if not any(finding.status == 2 for finding in self.findings):
            notes += self._against_index()
        if self.lost and len(self.lost) < len(index.files):
            notes += (salvage_note(path, part_name(self.folder.path, True, ".safetensors")),)
        safes = {shard.safe for shard in self.shards}
        return Verification(
            path, NAME, TITLES[NAME], index.size_bytes + total, tuple(self.findings),
            safe=False if False in safes else None if None in safes else True,
            tensor_count=len(index.files), lost=tuple(self.lost), coverage=self._coverage(),
            loading=self._loading(), numbers=self._numbers(), notes=(*notes, *index.notes),
        )  # fmt: skip

    def _keys(self, name: str) -> tuple[str, ...]:
        return tuple(key for key, file in self.index.files.items() if file == name)

    def _shard(self, name: str, done: int, total: int) -> None:
        keys = self._keys(name)
        if not self.folder.holds(name):
            text = f"a shard is missing: {len(keys):,} of {len(self.index.files):,} keys are in it"
            self._gone(Finding("special-file", text, 2, keys=keys, member=name), "in no file")
            return
        try:
            with self.folder.child(name) as source:
                found = verify_source(source, self.finite, self.limits, self._told(done, total))
        except CkptError as error:
            self._gone(_of_error(error, 2, name, keys), error.text)
            return
        self.shards.append(found)
        self.findings += [_inside(finding, name) for finding in found.findings]
        if found.tensor_count is None:
            why = found.findings[0].text if found.findings else "unknown"
            self.lost += [(key, why) for key in keys]
        self.lost += found.lost

    def _gone(self, finding: Finding, why: str) -> None:
        self.findings.append(finding)
        self.lost += [(key, why) for key in finding.keys]

    def _told(self, done: int, total: int) -> Progress | None:
        """The progress of one shard as that of all."""
        progress = self.progress
        if progress is None:
            return None
        return lambda now, _: progress(min(done + now, total), total)

    def _against_index(self) -> tuple[Note, ...]:
        """Keys that are elsewhere than the index says, twice, or nowhere."""
        try:
            found = hf_shards.read(self.folder, self.limits, self.index.name)
        except CkptError as error:
            texts: Sequence[str] = error.findings or (error.text,)
            self.findings += [
                Finding(error.slug, text, 2, member=self.index.name) for text in texts
            ]
            return ()
        said = {note.slug for note in self.index.notes}
        return tuple(note for note in found.notes if note.slug not in (*said, "no-checksums"))

    def _coverage(self) -> Coverage:
        rows = [shard.coverage for shard in self.shards]
        texts = dict.fromkeys(row.text for row in rows if row.text)
        return Coverage(
            sum(row.record_count for row in rows), sum(row.checked_count for row in rows),
            sum(row.checked_bytes for row in rows), "; ".join(texts),
        )  # fmt: skip

    def _loading(self) -> Loading | None:
        """The worst of what torch.load would say, every blocker with its shard."""
        rows = [(shard, shard.loading) for shard in self.shards if shard.loading is not None]
        if not rows:
            return None
        blockers = tuple(
            blocker._replace(member=f"{os.path.basename(shard.file)}:{blocker.member}")
            for shard, said in rows
            for blocker in said.blockers
        )
        worst = min((said for _, said in rows), key=lambda said: said.weights_only is not False)
        return worst._replace(blockers=blockers)

    def _numbers(self) -> Numbers | None:
        rows = [shard.numbers for shard in self.shards if shard.numbers is not None]
        if not self.finite:
            return None
        found = tuple(row for numbers in rows for row in numbers.found)
        return Numbers(sum(numbers.tensor_count for numbers in rows), found)


def _inside(finding: Finding, name: str) -> Finding:
    member = f"{name}:{finding.member}" if finding.member else name
    return finding._replace(member=member)
