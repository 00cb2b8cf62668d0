"""One rank's part: a real GPT, real DDP, real factory, gradients that are given or computed."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from megatron_muon.testing.law.backward import (
    forward,
    forward_and_backward,
    inject,
    this_replica,
)
from megatron_muon.testing.law.build import (
    build_model,
    build_optimizer,
    find_muons,
    masters,
    parallel_state,
    parameters,
    states,
    wrap,
)
from megatron_muon.testing.law.case import BufferFacts, Case, Outcome, Place
from megatron_muon.testing.law.counting import StepSpy
from megatron_muon.testing.law.mutants import GTP_MUTANTS, MUTANTS, SCALE_MUTANTS, SHARE_MUTANTS
from megatron_muon.testing.law.writes import WriteSpy


def run_cases(cases: Sequence[Case]) -> list[Outcome]:
    """Run several cases one after the other on this rank.

    A case that differs from an earlier one in nothing is run once.
    """
    from megatron_muon.integration.install import install

    install(device="cpu")
    outcomes: dict[Case, Outcome] = {}
    for grid in dict.fromkeys(case.grid for case in cases):
        with parallel_state(*grid):
            for case in dict.fromkeys(case for case in cases if case.grid == grid):
                with {**MUTANTS, **SCALE_MUTANTS, **GTP_MUTANTS, **SHARE_MUTANTS}[case.mutant]():
                    outcomes[case] = train(case)
    return [outcomes[case] for case in cases]


def refusals(cases: Sequence[Case]) -> list[str]:
    """Return how each case fails on this rank, empty if it does not; every rank has to fail."""
    from megatron_muon.integration.install import install

    install(device="cpu")
    return [_refusal(case) for case in cases]


def _refusal(case: Case) -> str:
    try:
        with parallel_state(*case.grid):
            train(case)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def train(case: Case) -> Outcome:
    """Train for the steps of a case."""
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

    chunks = wrap(case, build_model(case))
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        optimizer = build_optimizer(case, chunks)
    scheduler = OptimizerParamScheduler(
        optimizer, case.lr, case.lr, case.lr, 0, 100, "constant", case.weight_decay,
        case.weight_decay, 100, "constant",
    )  # fmt: skip
    run = _Run(case, optimizer)
    for step in range(case.steps):
        for chunk in chunks:
            chunk.zero_grad_buffer()
        optimizer.zero_grad()
        if case.loss_scales:
            optimizer.grad_scaler._scale.fill_(case.loss_scales[step])
        if case.backward:
            forward_and_backward(case, chunks[0], optimizer)
        else:
            if case.overlap_param and case.pp == 1:
                forward(chunks[0])
            inject(case, chunks, step)
        run.step(chunks)
        scheduler.step(increment=1)
    if case.overlap_param:
        _gather_params(chunks)
    return run.outcome(chunks, printed.getvalue())


class _Run:
    """Steps an optimizer and keeps what is to be known of it."""

    def __init__(self, case: Case, optimizer: Any) -> None:
        self.case, self.optimizer = case, optimizer
        self.muons = list(find_muons(optimizer))
        self.spy = StepSpy(case.counted)
        self.writes = WriteSpy(case.watched)
        self.norms: list[float] = []
        self.grads: list[dict[str, torch.Tensor]] = []
        self.snapshots: list[str] = []
        self.calls = self.flops = self.collectives = self.nbytes = 0

    def step(self, chunks: Sequence[Any]) -> None:
        """Step once; gradients are in DDP's buffers, reduced."""
        if self.case.backward and dist.get_world_size() == 1:
            self.grads.append(
                {name: param.main_grad.clone()  # type: ignore[attr-defined]
                 for name, param in parameters(chunks) if param.requires_grad}
            )  # fmt: skip
        with self.spy.watch(), self.writes.watch(chunks):
            success, norm, _ = self.optimizer.step()
        assert success == (norm <= self.case.skip_above)
        self.norms.append(float(norm))
        for muon in self.muons:
            self.calls += muon.account.newton_schulz_calls
            self.flops += muon.account.newton_schulz_flops
            self.collectives += muon.account.traffic.calls
            self.nbytes += muon.account.traffic.nbytes
        if self.case.report is not None and dist.get_rank() == 0:
            with open(self.case.report) as report:
                self.snapshots.append(report.read())

    def outcome(self, chunks: Sequence[Any], printed: str) -> Outcome:
        """Return what this rank holds now."""
        from megatron.core import parallel_state as state

        held, owned = masters(self.optimizer, chunks)
        replica = this_replica()
        return Outcome(
            tp_rank=state.get_tensor_model_parallel_rank(),
            expert_tp_rank=state.get_expert_tensor_parallel_rank(),
            dp_rank=replica.rank,
            expert_dp_rank=replica.expert_rank,
            pp_rank=state.get_pipeline_model_parallel_rank(),
            gtp_rank=state.get_gtp_weight_remat_rank(),
            expert_gtp_rank=state.get_expert_gtp_weight_remat_rank(),
            masters=held,
            weights={name: param.detach().clone() for name, param in parameters(chunks)},
            grad_norms=self.norms,
            grads=self.grads,
            newton_schulz_calls=self.calls,
            newton_schulz_flops=self.flops,
            matmul_flops=self.spy.matmul_flops,
            collectives=self.collectives,
            exchanged_nbytes=self.nbytes,
            spied=self.spy.steps,
            places=self._places(),
            owned=owned,
            buffers=[
                BufferFacts(buffer.numel, buffer.numel_unpadded, len(buffer.buckets))
                for chunk in chunks
                for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers)
            ],
            printed=printed,
            snapshots=self.snapshots,
            written=self.writes.writes,
            state=states(self.optimizer, chunks) if self.case.watched else {},
        )

    def _places(self) -> dict[str, Place]:
        return {
            planned.matrix.name: Place(
                home=(planned.home.dp, planned.home.tp),
                pieces=tuple((p.rank, p.range.numel) for p in planned.owned.pieces),
                numel=planned.matrix.numel,
                is_cut=planned.matrix.is_cut and planned.matrix.row_size > 1,
                homes=tuple((home.dp, home.tp) for home in planned.homes),
            )
            for muon in self.muons
            for engine in muon.engines
            for planned in engine.matrices
        }


def _gather_params(chunks: Sequence[Any]) -> None:
    for chunk in chunks:
        for group in (*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups):
            group.finish_param_sync(skip_next_bucket_dispatch=True)
