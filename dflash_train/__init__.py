"""dflash-train: train DFlash 2 drafters for speculative decoding of your own model."""

__version__ = "0.1.0"
