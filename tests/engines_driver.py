"""A driver on one of several hosts: python engines_driver.py SOURCE TARGET ENGINE"""

import sys

import engines_support as support

from ckptool import engines
from ckptool.cli.main import main

source, target, engine = sys.argv[1:]
engines.STEP = support.STEP
whole = engines.carry_out
engines.carry_out = lambda pool, work, tasks, got: whole(pool, support.signed, tasks, got)
sys.exit(main(["convert", source, "--to-cpu", "-o", target, "--engine", engine]))
