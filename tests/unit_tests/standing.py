"""The CPU stand-in's table, put in force for a while; shared by its tests."""

import contextlib
import functools

import torch
from torch.utils.data import Dataset

from megatron_muon.integration import cpu
from megatron_muon.integration.patching import Patch, PatchSet

CPU = torch.device("cpu")


@functools.cache
def table():
    return cpu.table()


def patches():
    return [row for row in table() if isinstance(row, Patch)]


@contextlib.contextmanager
def standing_in(rows=None):
    stand_in = PatchSet(table() if rows is None else rows)
    stand_in.apply()
    try:
        yield
    finally:
        stand_in.revert()


class Squares(Dataset):
    """A dataset that makes its samples with a factory that the table wraps."""

    def __len__(self):
        return 6

    def __getitem__(self, index):
        return torch.full((2,), float(index)).square()
