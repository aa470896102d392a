"""Schemes of weights that a GPU keeps in memory. Imports no Triton, so that estimates on other machines use it too."""

from kernels.weights import DENSE, GROUPS, Scheme

# Inputs of a tile in `kernels.gpu.quantised`. A group of FP8 weights consists of whole tiles.
TILE_INPUTS = 64


def serves(scheme: Scheme) -> bool:
    """Return whether the GPU multiplies by weights of this scheme. It serves FP8 weights with a scale for each output,
    and those in groups of whole tiles.
    """
    if scheme.kind == "fp8":
        return scheme.group % TILE_INPUTS == 0
    return scheme == DENSE or scheme.group in GROUPS
