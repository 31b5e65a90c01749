"""A driver that is killed after some tasks: python engine_killed.py SOURCE TARGET COUNT [FLAG…]"""

import os
import signal
import sys

from engines_support import STEP

from ckptool import engines, remote_book, taskbook
from ckptool.cli.main import main

source, target, count, *flags = sys.argv[1:]
engines.STEP = STEP
left = [int(count)]


def counted(add):
    def counting(self, *row):
        add(self, *row)
        left[0] -= 1
        if not left[0]:
            os.kill(os.getpid(), signal.SIGKILL)

    return counting


for book in (taskbook.Book, remote_book.ObjectBook):
    book.add = counted(book.add)
sys.exit(main(["convert", source, "-o", target, *flags]))
