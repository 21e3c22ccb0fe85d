"""FP8 (e4m3): casts with scales per tensor, head or block of keys, and the rotation that spreads outliers first.

`attention(…, precision="fp8")` calls all of this itself; it is here for those who keep tensors in FP8.
"""

from relampago.quant.cast import BLOCK, E4M3, LARGEST, Quantised, dequantise, quantise
from relampago.quant.rotation import rotate

__all__ = ["BLOCK", "E4M3", "LARGEST", "Quantised", "dequantise", "quantise", "rotate"]
