"""How the local training of some clients is carried out: step by step, by a compiled program, or by a kernel.

All trainers give what the methods' own code gives, but for rounding.
"""

from fedcdp.trainers.compiled import Compiled
from fedcdp.trainers.kernel import Kernel
from fedcdp.trainers.stepwise import Examples, Stepwise, Trainer

__all__ = ["Compiled", "Examples", "Kernel", "Stepwise", "Trainer"]
