"""Runs of many cases in few launches."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from megatron_muon.testing.law.case import Case, Outcome
from megatron_muon.testing.law.job import run_cases
from megatron_muon.testing.law.reference import whole_masters
from megatron_muon.testing.ranks import run_ranks


class Runs:
    """Outcomes of labelled cases; all cases of one number of ranks share a launch, when needed."""

    def __init__(self, cases: Mapping[str, tuple[int, Case]], timeout_s: float = 60.0) -> None:
        """Name the cases.

        Args:
            cases: Number of ranks and case by label.
            timeout_s: Seconds that a launch may take.
        """
        self.cases, self._timeout_s = dict(cases), timeout_s
        self._outcomes: dict[int, dict[str, list[Outcome]] | BaseException] = {}
        self._masters: dict[str, dict[str, torch.Tensor]] = {}

    def case(self, label: str) -> Case:
        """Return the case of a label."""
        return self.cases[label][1]

    def outcomes(self, label: str) -> list[Outcome]:
        """Return what each rank of a case holds.

        Raises:
            RankFailedError: A rank failed, in this case or in another of as many ranks.
        """
        num_ranks = self.cases[label][0]
        if num_ranks not in self._outcomes:
            # Remembered too: the next test would only wait for the same failure.
            try:
                self._outcomes[num_ranks] = self._launch(num_ranks)
            except BaseException as error:
                self._outcomes[num_ranks] = error
        found = self._outcomes[num_ranks]
        if isinstance(found, BaseException):
            raise found
        return found[label]

    def masters(self, label: str) -> dict[str, torch.Tensor]:
        """Return the whole masters that a case ends with."""
        if label not in self._masters:
            self._masters[label] = whole_masters(self.case(label), self.outcomes(label))
        return self._masters[label]

    def differing(self, label: str, other: str) -> list[str]:
        """Return the parameters that two cases do not end with bit for bit alike."""
        mine, theirs = self.masters(label), self.masters(other)
        assert mine.keys() == theirs.keys()
        return [name for name, weight in mine.items() if not torch.equal(weight, theirs[name])]

    def _launch(self, num_ranks: int) -> dict[str, list[Outcome]]:
        labels = [label for label, (ranks, _) in self.cases.items() if ranks == num_ranks]
        cases = [self.case(label) for label in labels]
        with TemporaryDirectory() as logs:
            ranks = run_ranks(
                run_cases, num_ranks, cases, timeout_s=self._timeout_s, logs=Path(logs)
            )
        return dict(zip(labels, map(list, zip(*ranks, strict=True)), strict=True))
