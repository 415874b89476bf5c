"""What a checkpoint holds: trees of arrays and plain values, without pickle.

`write` and `read` save and restore a tree; `plan(tree).start(directory)` is the half of `write` that training awaits.
Structure and plain values are in `tree.json`; arrays of NumPy and PyTorch in safetensors files, those of JAX in what
Orbax writes. No array library is imported here.
"""

from trainmaster.jobs.trees.buffers import Buffers
from trainmaster.jobs.trees.reader import read
from trainmaster.jobs.trees.structure import ANYTHING, TreeError
from trainmaster.jobs.trees.writer import TreePlan, Writing, holds, plan, write

__all__ = ["ANYTHING", "Buffers", "TreeError", "TreePlan", "Writing", "holds", "plan", "read", "write"]
