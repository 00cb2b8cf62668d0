"""The quickstart's summary: how far a run is from the golden curve, and how far it may be."""

import re

import pytest

from megatron_muon.testing.golden import MetricSeries
from megatron_muon.tools import quickstart

LOSSES = {1: 5.5, 2: 5.25, 3: 5.0}


@pytest.mark.parametrize(("factor", "code"), [(1.005, 0), (1.02, 1)])
def test_the_summary_shows_the_distance_beside_its_limit(tmp_path, capsys, factor, code):
    log = tmp_path / "rank3.log"
    progress = quickstart._Progress(log, len(LOSSES), 1)
    log.write_text(
        "".join(
            f" [2026-08-31 10:00:00.123456] iteration {step:8d}/       3 |"
            f" elapsed time per iteration (ms): 250.0 | lm loss: {loss:.6E} |\n"
            for step, loss in LOSSES.items()
        )
    )
    progress.show()
    golden = MetricSeries.from_mapping(quickstart.METRIC, LOSSES, source="golden", decimals=4)
    ran = {step: loss * factor for step, loss in LOSSES.items()}
    curve = MetricSeries.from_mapping(quickstart.METRIC, ran, source="console")
    assert quickstart._summarize(curve, golden, progress, tmp_path) == code
    shown = re.search(
        r"golden distance (\S+) \(limit (\S+)\), (\S+) s/step", capsys.readouterr().out
    )
    distance, limit, seconds = map(float, shown.groups())
    assert distance == pytest.approx(factor - 1, rel=0.02)
    assert limit == 0.01
    assert seconds == 0.25
