"""How the ranks of a host send each other large gradients inside a kernel: see kernels/peers.cuh. Pure."""

from __future__ import annotations

PAIR, EVERYBODY, SCATTER = "PAIR", "EVERYBODY", "SCATTER"
SCATTER_SAVES = 1 << 20  # bytes on a GPU's links that are worth one way more between GPUs: reckoned, 2 to 3 µs


def peer_form(ranks: int, gradient_bytes: int) -> str:
    """PAIR or EVERYBODY: all of it to every other rank. SCATTER: a part to each, which adds it up for all.

    Of two ranks both move the same bytes, and the first has one way less.
    """
    if ranks <= 2:
        return PAIR
    saved = sent_bytes(EVERYBODY, ranks, gradient_bytes) - sent_bytes(SCATTER, ranks, gradient_bytes)
    return SCATTER if saved >= SCATTER_SAVES else EVERYBODY


def sent_bytes(form: str, ranks: int, gradient_bytes: int) -> float:
    """What a rank sends in a step."""
    if form == SCATTER:
        return 2 * gradient_bytes * (ranks - 1) / ranks
    return gradient_bytes * (ranks - 1)
