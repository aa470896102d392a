"""Schemes of weights that a GPU keeps in memory. Imports no Triton, so that estimates on other machines use it too."""

from kernels.weights import DENSE, GROUPS, Scheme, is_int8_by_output

# Inputs of a tile in `kernels.gpu.quantised`. A group of FP8 weights consists of whole tiles.
TILE_INPUTS = 64


def serves(scheme: Scheme) -> bool:
    """Return whether the GPU multiplies by weights of this scheme. It serves FP8 and int8 weights with a scale for each
    output, and FP8 weights in groups of whole tiles.
    """
    if scheme.kind == "fp8":
        return scheme.group % TILE_INPUTS == 0
    return scheme == DENSE or is_int8_by_output(scheme) or scheme.group in GROUPS
