"""dflash-train: train DFlash 2 drafters for speculative decoding of your own model."""

import os

__version__ = "0.1.0"

# libgomp reads this when torch is loaded. Idle threads spin briefly, then sleep: endless spinning (its default) made training and
# decoding several times slower wherever another job wants the same cores.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "3000")
