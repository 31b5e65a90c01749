"""The first of several MPI processes converts, the others work:
mpiexec -n 3 python engines_ranks.py SOURCE FOLDER
"""

import sys

import engines_support as support
from mpi4py import MPI
from mpi4py.futures import MPICommExecutor

from ckptool import engines

engines.STEP = support.STEP
source, folder = sys.argv[1:]
with MPICommExecutor(MPI.COMM_WORLD, root=0) as executor:
    if executor is not None:
        assert MPI.COMM_WORLD.size == 3
        for name in support.CONVERSIONS:
            support.convert(source, f"{folder}/{name}", name, engine=executor)
