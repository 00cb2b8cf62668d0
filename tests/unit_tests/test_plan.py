"""The plan: the same for every order of the matrices, and different for every other fact."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_muon.bookkeeping.matrix import LogicalMatrix, interleaved, whole
from megatron_muon.bookkeeping.plan import EVERY_OWNER, OwnedMatrix, make_plan
from megatron_muon.errors import PlanError


@st.composite
def owned_matrices(draw):
    shapes = draw(st.lists(st.tuples(st.integers(1, 8), st.integers(1, 40)), max_size=12))
    owned, sizes = [], draw(st.tuples(*[st.sampled_from([1, 2, 4])] * 2))
    for i, (rows, columns) in enumerate(shapes):
        expert = draw(st.booleans())
        size = sizes[expert]
        matrix = LogicalMatrix(
            f"layer{i}.weight", (rows * size, columns), whole(rows * size),
            tp_dim=draw(st.sampled_from([0, None])), tp_size=size, expert_tp=expert,
            expert_parallel=expert,
        )  # fmt: skip
        owned.append(OwnedMatrix(matrix=matrix, owner=draw(st.integers(EVERY_OWNER, 2))))
    return owned


@given(owned_matrices(), st.randoms())
def test_order_of_insertion_changes_nothing(owned, random):
    shuffled = list(owned)
    random.shuffle(shuffled)
    plan, other = make_plan(owned, 3, 5), make_plan(shuffled, 3, 5)
    assert plan == other
    assert plan.fingerprint == other.fingerprint
    names = [planned.matrix.name for planned in plan.matrices]
    assert names == sorted(item.matrix.name for item in owned)


@given(owned_matrices())
def test_homes_are_ranks_of_the_group_and_share_the_work(owned):
    """No rank could give its last matrix to another of its group and both be better off."""
    plan = make_plan(owned, 3, 5)
    work = {}
    for planned in plan.matrices:
        assert 0 <= planned.home < planned.matrix.tp_size
        key = planned.owned.owner, planned.matrix.expert_tp
        loads = work.setdefault(key, Counter())
        loads[planned.home] += planned.flops
    for planned in plan.matrices:
        loads = work[planned.owned.owner, planned.matrix.expert_tp]
        for rank in range(planned.matrix.tp_size):
            assert loads[rank] + planned.flops >= loads[planned.home] or rank == planned.home


BASE = OwnedMatrix(
    matrix=LogicalMatrix("w", (12, 8), whole(12), tp_dim=0, tp_size=2),
    owner=1,
    buffer_idx=0,
    bucket_idx=2,
    range=(64, 112),
)


@pytest.mark.parametrize(
    "other",
    [
        replace(BASE, owner=0),
        replace(BASE, buffer_idx=1),
        replace(BASE, bucket_idx=0),
        replace(BASE, range=(0, 48)),
        replace(BASE, range=None),
        *(
            replace(BASE, matrix=replace(BASE.matrix, **change))
            for change in (
                {"name": "v"},
                {"shape": (12, 9)},
                {"tp_dim": 1},
                {"tp_dim": None},
                {"tp_size": 3},
                {"tp_stride": 2},
                {"expert_tp": True},
                {"expert_parallel": True},
                {"blocks": interleaved({"q": 2, "k": 1, "v": 1}, 12, "w")},
                {"blocks": interleaved({"q": 1, "k": 2, "v": 1}, 12, "w")},
                {"blocks": interleaved({"q": 4, "k": 2}, 12, "w")},
            )
        ),
    ],
)
def test_fingerprint_and_row_tell_every_difference(other):
    plan, changed = make_plan([BASE], 2, 5), make_plan([other], 2, 5)
    assert plan.fingerprint != changed.fingerprint
    assert plan.rows() != changed.rows()
    assert changed.rows()[0].startswith(f"{other.matrix.name}: ")
    assert plan.fingerprint != make_plan([BASE], 2, 6).fingerprint


def test_two_matrices_of_one_name_are_refused():
    with pytest.raises(PlanError, match="Two matrices are named w"):
        make_plan([BASE, replace(BASE, owner=0)], 2, 5)


def test_buffer_without_a_layout_has_no_padding():
    assert make_plan([BASE], 2, 5).buffer_numel == BASE.matrix.local_numel == 48
    assert make_plan([BASE], 2, 5, buffer_numel=128).buffer_numel == 128
