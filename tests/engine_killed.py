"""A driver that is killed after some tasks: python engine_killed.py SOURCE TARGET COUNT [FLAG…]"""

import os
import signal
import sys

from engines_support import STEP

from ckptool import engines, taskbook
from ckptool.cli.main import main

source, target, count, *flags = sys.argv[1:]
engines.STEP = STEP
left = [int(count)]
add = taskbook.Book.add


def counted(self, number, entry):
    add(self, number, entry)
    left[0] -= 1
    if not left[0]:
        os.kill(os.getpid(), signal.SIGKILL)


taskbook.Book.add = counted
sys.exit(main(["convert", source, "-o", target, *flags]))
