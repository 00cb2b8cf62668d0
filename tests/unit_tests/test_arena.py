"""Scratch that is lent and kept: what is kept and how long, and that a lent one is no other's."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_muon.collectives.arena import Arena, Loans

CPU = torch.device("cpu")


def take(arena, numel, dtype=torch.float32):
    return arena.take(numel, dtype, CPU)


def kept(arena):
    """Sizes of what is kept, in bytes."""
    return sorted(t.nbytes for entries in arena._cached.values() for _, t in entries)


def test_a_hit_is_the_newest_of_its_size_and_dtype():
    arena = Arena()
    arena.give_back(take(arena, 100))
    first, second = take(arena, 8), take(arena, 8)
    arena.give_back(first)
    arena.give_back(second)
    assert take(arena, 8) is second
    assert take(arena, 8) is first
    assert take(arena, 8) is not first
    arena.give_back(first)
    assert take(arena, 8, torch.int32) is not first
    assert take(arena, 7) is not first
    assert take(arena, 8) is first


def test_the_oldest_are_given_up_first_whatever_their_size():
    arena = Arena(cache_nbytes=4 * 12)
    old, small, young = take(arena, 5), take(arena, 2), take(arena, 5)
    for tensor in (old, small, young):
        arena.give_back(tensor)
    assert kept(arena) == [8, 20, 20]
    arena.give_back(take(arena, 6))  # the older one of five goes, then the one of two
    assert kept(arena) == [20, 24]
    assert take(arena, 5) is young
    arena.give_back(young)  # a hit makes it the newest
    arena.give_back(take(arena, 3))
    assert kept(arena) == [12, 20]
    arena.give_back(take(arena, 12))
    assert kept(arena) == [48]


def test_what_is_above_the_cap_is_lent_and_never_kept():
    arena = Arena(cache_nbytes=40)
    small = take(arena, 10)
    arena.give_back(small)
    large = take(arena, 11)
    assert large.numel() == 11
    assert kept(arena) == []
    arena.give_back(large)
    assert kept(arena) == []
    nothing = Arena(cache_nbytes=0)
    nothing.give_back(take(nothing, 1))
    assert kept(nothing) == []


@given(
    st.integers(0, 60),
    st.lists(
        st.one_of(st.tuples(st.sampled_from([0, 1, 3, 4, 9]), st.booleans()), st.integers(0, 5)),
        max_size=40,
    ),
)
def test_counts_are_exact_and_a_live_result_is_never_written_over(cap, script):
    """A tuple borrows so many elements of a dtype, a number gives back the tensor of that place."""
    arena, live, peak = Arena(cache_nbytes=cap), [], 0
    for number, action in enumerate(script):
        if isinstance(action, tuple):
            numel, is_wide = action
            tensor = take(arena, numel, torch.float64 if is_wide else torch.float32).fill_(number)
            live.append((number, tensor))
        elif action < len(live):
            arena.give_back(live.pop(action)[1])
        assert all(bool((tensor == n).all()) for n, tensor in live)
        lent = sum(tensor.nbytes for _, tensor in live)
        peak = max(peak, lent)
        assert (arena.lent_nbytes, arena.peak_lent_nbytes) == (lent, peak)
        assert arena.cached_nbytes == sum(kept(arena)) <= cap
        assert lent + arena.cached_nbytes <= peak
    arena.restart_peak()
    assert arena.peak_lent_nbytes == arena.lent_nbytes


def test_borrowing_ends_with_the_block_and_with_an_error():
    arena = Arena()
    with arena.borrow(4, torch.float32, CPU) as first, arena.borrow(4, torch.float32, CPU) as other:
        assert first is not other
        assert arena.lent_nbytes == 32
    with pytest.raises(RuntimeError), arena.borrow(4, torch.float32, CPU):
        raise RuntimeError
    assert (arena.lent_nbytes, arena.cached_nbytes) == (0, 32)


def test_closing_frees_what_is_kept_and_may_be_repeated():
    arena = Arena()
    kept_one, lent = take(arena, 4), take(arena, 5)
    arena.give_back(kept_one)
    dead = weakref.ref(kept_one)
    del kept_one
    assert dead() is not None
    for _ in range(2):
        arena.close()
        gc.collect()
        assert (arena.cached_nbytes, kept(arena), dead()) == (0, [], None)
    assert arena.lent_nbytes == 20
    arena.give_back(lent)
    assert take(arena, 5) is lent


def test_what_is_given_up_is_no_longer_counted_and_never_lent_again():
    arena = Arena()
    lost = take(arena, 4)
    arena.give_up(lost)
    assert (arena.lent_nbytes, arena.cached_nbytes) == (0, 0)
    assert take(arena, 4) is not lost


def test_loans_go_back_when_dropped_and_with_whoever_holds_them():
    arena = Arena()
    own = torch.zeros(4)
    with Loans(arena, CPU) as first, Loans(arena, CPU) as second:
        first[0] = own
        lent = first.borrow(1, 6)
        first.borrow(2, 3)
        assert arena.lent_nbytes == 36
        first.pass_on(0, second, (2, 2))
        first.pass_on(1, second, (2, 3))
        assert (list(first), {key: x.shape for key, x in second.items()}) == (
            [2], {0: (2, 2), 1: (2, 3)},
        )  # fmt: skip
        first.drop_all()
        assert (dict(first), arena.lent_nbytes) == ({}, 24)
        assert take(arena, 6) is not lent
        second.drop(1)
        assert take(arena, 6) is lent
        second.drop(0)
        second.borrow(5, 2)
    assert arena.lent_nbytes == 2 * 24
    with pytest.raises(KeyError):
        first.drop(0)


def test_loans_go_back_with_an_error():
    arena = Arena()
    loans = Loans(arena, CPU)
    with pytest.raises(RuntimeError), loans:
        raise RuntimeError(loans.borrow(0, 4))
    assert (arena.lent_nbytes, arena.cached_nbytes) == (0, 16)
