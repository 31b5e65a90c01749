"""`ckptool inspect` of a URL on loopback beside the same file on disk.

python benchmarks/remote.py [--dir FOLDER] [--rounds 5] [--small] [--results FILE]
"""

import os
import sys

# This folder must not stay on the path: inspect.py would hide the standard library's inspect.
HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.dirname(HERE)
sys.path[:] = [
    ROOT,
    os.path.join(ROOT, "tests"),
    *(p for p in sys.path if os.path.abspath(p) != HERE),
]

from pathlib import Path  # noqa: E402

from remote_support import serving  # noqa: E402

from benchmarks import common  # noqa: E402

OURS = "ckptool inspect URL"


def main() -> None:
    given = common.parser(__doc__.splitlines()[0]).parse_args()
    with common.work_folder(given.dir) as folder, serving() as site:
        sections = {}
        for name, path in common.make_files(folder, given.small).items():
            file = os.path.basename(path)
            site.files[file] = Path(path)
            rows = common.compete(
                [
                    common.Contender(OURS, (*common.CKPTOOL, "inspect", site.url(file))),
                    common.Contender("ckptool inspect FILE", (*common.CKPTOOL, "inspect", path)),
                ],
                given.rounds,
            )
            size = os.path.getsize(path) / 1e6
            sections[f"{name}: {file}, {size:.0f} MB"] = common.table(rows, OURS)
        common.report("remote", sections, given, folder)


if __name__ == "__main__":
    main()
