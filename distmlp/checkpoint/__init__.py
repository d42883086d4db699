"""Checkpoints: what is in them, how they reach the disk whole, which are kept, and what a resumed run may change."""

from distmlp.checkpoint.contents import Checkpoint, network_of
from distmlp.checkpoint.saving import load, save

__all__ = ["Checkpoint", "load", "network_of", "save"]
