"""The collectives that the planner predicts are those of the schedule that a run makes."""

import pytest

from megatron_muon.bookkeeping.costs import HARDWARE
from megatron_muon.bookkeeping.schedule import Position, Spread, make_schedule, overlaps
from megatron_muon.planner.job import PlanSettings, plan_job
from megatron_muon.planner.models import BUILT_IN
from megatron_muon.planner.report import make_report
from megatron_muon.planner.sizes import ParallelSizes

MIB = 2**20


@pytest.mark.parametrize("budget", [1, 8, 64, 512], ids="{} MiB".format)
@pytest.mark.parametrize("exchange", [2, 4], ids="{} bytes".format)
@pytest.mark.parametrize("layout", ["owner", "flat"])
@pytest.mark.parametrize("grid", [(1, 1), (4, 1), (1, 4), (2, 3)], ids="TP{0[0]}xDP{0[1]}".format)
def test_a_step_has_as_many_collectives_as_planned(grid, layout, exchange, budget):
    tp, dp = grid
    settings = PlanSettings(
        layout=layout, exchange_nbytes=exchange, budget_nbytes=budget * MIB, bucket_numel=10**7
    )
    job = plan_job(BUILT_IN["gpt2-124m"], ParallelSizes(tp=tp, dp=dp), settings)
    (stage,) = make_report(job, HARDWARE["h100"], with_fingerprint=False).stages
    matrices = stage.stage.first_plan.matrices
    entered = []
    for place in range(tp * dp):
        spread, budgets = (
            Spread(whole=True, everywhere=False),
            (budget * MIB // exchange, budget * MIB // 4),
        )
        groups = make_schedule(
            matrices, Position(dp=place // tp, tp=place % tp, dp_size=dp, tp_size=tp), spread,
            *budgets, overlapped=overlaps(matrices, tp, spread, *budgets),
        )  # fmt: skip
        hops = [hop for g in groups for hop in (g.to_row, g.to_home, g.from_home, g.from_row)]
        entered.append(sum(map(len, hops)))
    assert stage.work.collectives == max(entered)
    if tp > 1:
        # A budget of less than a matrix makes many of the two that one micro-group has.
        assert max(entered) > 20 if budget == 1 else max(entered) >= 2
