"""One rank's part of the tests of skipped steps: scripts of clean and bad batches.

A bad batch is a clean one with an inf or a NaN put, after DDP's reduction, into one element of what
one rank steps. After each step, all that a step may change is hashed.
"""

from __future__ import annotations

import contextlib
import faulthandler
import hashlib
import io
import logging
import pickle
import random
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_muon.testing.law.backward import forward, inject
from megatron_muon.testing.law.build import (
    build_model,
    leaves,
    masters,
    optimizer_config,
    parallel_state,
    parameters,
    wrap,
)
from megatron_muon.testing.law.case import Case
from megatron_muon.testing.law.mutants import SKIP_MUTANTS
from megatron_muon.testing.ranks import run_ranks

STEP_TIMEOUT_S = 20
"""A step that takes longer hangs: the rank shows where, and ends."""

KINDS: Mapping[str, str] = {
    "matrix": r"^decoder(?!.*\.experts\.).*linear_\w+\.weight",
    "scalar": r"embedding|output_layer|^(?!.*\.experts\.).*linear_(qkv|fc1)\.bias",
    "copy": r"norm|router|^(?!.*\.experts\.).*linear_(proj|fc2)\.bias",
    "expert matrix": r"\.experts\..*weight",
    "expert scalar": r"\.experts\..*bias",
}
"""Names of the parameters of each kind. Tensor-parallel ranks have copies of a ``copy``."""


@dataclass(frozen=True, slots=True)
class Bad:
    """One element that is not finite.

    Attributes:
        rank: Global rank in whose gradient buffer it is.
        kind: One of :data:`KINDS`, or the name of a parameter.
        value: What it is.
    """

    rank: int
    kind: str
    value: float = float("inf")


Batch = tuple[Bad, ...]
"""What is bad in one step's gradients; nothing in a clean one."""

CLEAN: Batch = ()


@dataclass(frozen=True, kw_only=True)
class Script:
    """One run.

    Attributes:
        case: The model, the grid and the optimizer.
        batches: The steps. A bad batch is that of the next clean one.
        config: Fields of the optimizer's config with their values.
        mutant: How it is broken on purpose.
        saves_after: Steps after which the optimizer's state goes into one built anew.
    """

    case: Case
    batches: tuple[Batch, ...]
    config: tuple[tuple[str, Any], ...] = ()
    mutant: str | None = None
    saves_after: int | None = None


@dataclass(frozen=True, kw_only=True)
class Record:
    """One step on one rank.

    Attributes:
        result: What ``step()`` returned, ``None`` if it raised.
        error: What it raised.
        bad: Parameters of this rank that were made bad.
        changed: What of the state has changed since the last step, the overlapped gather apart.
        state: Hash of each part of the state after it, the scaler's left out.
        is_finite: Whether masters and momentum are finite after it.
        scale: The loss scale after it, and that of each child.
        stock_scale: What a scaler of Megatron's has that is told of the same batches.
        num_updates: Updates of scalers in it.
        trackers: Growth and hysteresis trackers after it, of a dynamic scaler.
        num_skipped: As the chain counts.
        logged: What the chain logged.
        collectives: All of its collectives and their bytes, as torch's dispatcher sees them.
        report: The report after it, on the first rank.
        saved: State of the scaler in the optimizer's, of a script that saves.
    """

    result: tuple[bool, float | None, int | None] | None
    error: str
    bad: tuple[str, ...]
    changed: tuple[str, ...]
    state: dict[str, str]
    is_finite: bool
    scale: tuple[float, ...]
    stock_scale: float
    num_updates: int
    trackers: tuple[int, int] | None
    num_skipped: int
    logged: tuple[str, ...]
    collectives: tuple[tuple[str, int], ...]
    report: str
    saved: str | None


def run_scripts(scripts: Sequence[Script]) -> list[list[Record]]:
    """Run several scripts one after the other on this rank."""
    from megatron_muon.integration.install import install

    install(device="cpu")
    records: dict[Script, list[Record]] = {}
    logging.getLogger("megatron_muon.optimizer.chain").propagate = False
    for grid in dict.fromkeys(script.case.grid for script in scripts):
        with parallel_state(*grid):
            for script in dict.fromkeys(s for s in scripts if s.case.grid == grid):
                with CHANGES[script.mutant](), tempfile.TemporaryDirectory() as folder:
                    records[script] = _Run(script, Path(folder)).records()
    return [records[script] for script in scripts]


class _Run:
    """Steps an optimizer through a script."""

    def __init__(self, script: Script, folder: Path) -> None:
        self.script, self.case = script, script.case
        self.report = folder / "report.json"
        _seed()
        self._build()
        self.stock = self._stock_scaler()
        self.before: dict[str, str] = {}

    def records(self) -> list[Record]:
        """Run the script."""
        made: list[Record] = []
        for index, batch in enumerate(self.script.batches):
            if index == self.script.saves_after:
                self._reload()
            made.append(self._step(batch, sum(not b for b in self.script.batches[:index])))
        return made

    def _build(self) -> None:
        """Build the wrapped model, its optimizer and the scheduler."""
        from megatron.core.optimizer import get_megatron_optimizer
        from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

        from megatron_muon.optimizer.masters import masters_of

        config = optimizer_config(self.case)
        for name, value in self.script.config:
            setattr(config, name, value)
        if self.case.report is not None:
            config.muon_report = str(self.report)
        self.chunks = wrap(self.case, build_model(self.case))
        with contextlib.redirect_stdout(io.StringIO()):
            self.optimizer: Any = get_megatron_optimizer(config, self.chunks)
        self.params: dict[str, Any] = dict(parameters(self.chunks))
        names = {param: name for name, param in self.params.items()}
        self.names = {id(master): names[param] for leaf in self._leaves()
                      for param, master in masters_of(leaf).items()}  # fmt: skip
        self.scheduler = OptimizerParamScheduler(
            self.optimizer, self.case.lr, self.case.lr, 0.0, 2, 100, "linear",
            self.case.weight_decay, self.case.weight_decay, 100, "constant",
        )  # fmt: skip

    def _stock_scaler(self) -> Any:
        """Return a scaler as Megatron makes it for AdamW, ``None`` where it makes none."""
        from megatron.core.optimizer.grad_scaler import ConstantGradScaler, DynamicGradScaler

        config = self.optimizer.config
        if config.loss_scale:
            return ConstantGradScaler(config.loss_scale)
        if not config.fp16:
            return ConstantGradScaler(1.0)
        return DynamicGradScaler(
            initial_scale=config.initial_loss_scale,
            min_scale=config.min_loss_scale,
            growth_factor=2.0,
            backoff_factor=0.5,
            growth_interval=config.loss_scale_window,
            hysteresis=config.hysteresis,
        )

    def _reload(self) -> None:
        """Save, and go on with an optimizer that has loaded it."""
        saved = pickle.loads(pickle.dumps(self.optimizer.state_dict()))
        self._build()
        self.optimizer.load_state_dict(saved)
        self.before = {}

    def _step(self, batch: Batch, number: int) -> Record:
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        if self.case.overlap_param and self.case.pp == 1:
            forward(self.chunks[0])
            self.before = {}
        before = self.before or self._state()
        scale = float(self.optimizer.get_loss_scale())
        inject(replace(self.case, loss_scales=(number + 1) * (scale,)), self.chunks, number)
        bad = tuple(self._make_bad(item) for item in batch if item.rank == dist.get_rank())
        self.stock.update(bool(batch))
        result, error = None, ""
        faulthandler.dump_traceback_later(STEP_TIMEOUT_S, exit=True)
        with _logged() as logged, _updates() as updates, self._spied() as collectives:
            try:
                result = self.optimizer.step()
            except Exception as raised:
                error = f"{type(raised).__name__}: {raised}"
        faulthandler.cancel_dump_traceback_later()
        if result is not None and result[0]:
            self.scheduler.step(increment=1)
        after = self.before = self._state()
        return Record(
            result=result,
            error=error,
            bad=bad,
            changed=tuple(
                key for key in sorted(before.keys() | after.keys())
                if before.get(key) != after.get(key)
            ),
            state=after,
            is_finite=self._is_finite(),
            scale=self._scales(),
            stock_scale=float(self.stock.scale),
            num_updates=len(updates),
            trackers=self._trackers(),
            num_skipped=getattr(self.optimizer, "num_skipped", 0),
            logged=tuple(logged),
            collectives=tuple(collectives),
            report=self.report.read_text() if self.report.exists() else "",
            saved=None if self.script.saves_after is None else self._saved(),
        )  # fmt: skip

    def _make_bad(self, item: Bad) -> str:
        """Put the element into this rank's part of the gradient buffer."""
        held, _ = masters(self.optimizer, self.chunks)
        pattern = KINDS.get(item.kind, f"^{re.escape(item.kind)}$")
        # A rank may step none of a kind.
        name = next((name for name in held if re.search(pattern, name)), min(held))
        start, piece = held[name][0]
        self.params[name].main_grad.view(-1)[start + piece.numel() - 1] = item.value
        return name

    @contextlib.contextmanager
    def _spied(self) -> Iterator[list[tuple[str, int]]]:
        spy = _CollectiveSpy()
        with spy if self.case.counted else contextlib.nullcontext():
            yield spy.seen

    def _leaves(self) -> list[Any]:
        return [leaf for leaf in leaves(self.optimizer) if not leaf.is_stub_optimizer]

    def _scalers(self) -> list[Any]:
        """Return the scaler of the outermost optimizer and those of its children."""
        found = [getattr(o, "grad_scaler", None) for o in (self.optimizer, *self._leaves())]
        return [scaler for scaler in found if scaler is not None]

    def _scales(self) -> tuple[float, ...]:
        scales = [float(scaler.scale) for scaler in self._scalers()]
        return (float(self.optimizer.get_loss_scale()), *scales)

    def _trackers(self) -> tuple[int, int] | None:
        states: list[dict[str, int]] = [scaler.state_dict() for scaler in self._scalers()]
        state = states[0] if states else {}
        return (state["growth_tracker"], state["hysteresis_tracker"]) if state else None

    def _saved(self) -> str:
        return str(self.optimizer.state_dict()["grad_scaler"])

    def _state(self) -> dict[str, str]:
        """Hash everything that a step may change, part by part."""
        from megatron.core.tensor_parallel import get_cuda_rng_tracker

        state: dict[str, Any] = {f"weight {name}": param for name, param in self.params.items()}
        for i, leaf in enumerate(self._leaves()):
            for j, group in enumerate(leaf.optimizer.param_groups):
                state[f"group {i} {j}"] = {k: v for k, v in group.items() if k != "params"}
                for param in group["params"]:
                    name = self.names[id(param)]
                    state[f"master {name}"] = param
                    for key, value in leaf.optimizer.state.get(param, {}).items():
                        state[f"{key} {name}"] = value
        state["scheduler"] = self.scheduler.state_dict()
        state["rng"] = (torch.get_rng_state(), get_cuda_rng_tracker().get_states())
        _, words, *position = np.random.get_state()
        state["other rng"] = (str(random.getstate()), words.tobytes(), str(position))
        return {key: _hash(value) for key, value in state.items()}

    def _is_finite(self) -> bool:
        tensors = [piece for leaf in self._leaves() for group in leaf.optimizer.param_groups
                   for param in group["params"]
                   for piece in (param, *leaf.optimizer.state.get(param, {}).values())
                   if isinstance(piece, torch.Tensor)]  # fmt: skip
        tensors += self.params.values()
        return all(bool(tensor.isfinite().all()) for tensor in tensors)


def _seed() -> None:
    """Start all random numbers anew, so that runs can be compared."""
    from megatron.core import tensor_parallel

    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)
    tensor_parallel.model_parallel_cuda_manual_seed(1)


def _hash(value: Any) -> str:
    return hashlib.sha256(pickle.dumps(_plain(value))).hexdigest()[:16]


def _plain(value: Any) -> Any:
    """Return a value in which equal bits are equal bytes."""
    if isinstance(value, torch.Tensor):
        flat = value.detach().contiguous().view(-1)
        return str(value.dtype), tuple(value.shape), flat.view(torch.uint8).numpy().tobytes()
    if isinstance(value, dict):
        return [(key, _plain(item)) for key, item in sorted(value.items())]
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value if isinstance(value, bytes) else repr(value)


class _CollectiveSpy(TorchDispatchMode):
    """Sees every collective, whatever function it came through."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            tensors = [t for arg in args for t in (arg if isinstance(arg, list) else [arg])
                       if isinstance(t, torch.Tensor)]  # fmt: skip
            self.seen.append((func.overloadpacket.__name__, sum(t.nbytes for t in tensors)))
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def _updates() -> Iterator[list[bool]]:
    """Collect what scalers that hold a scale are updated with."""
    from megatron.core.optimizer.grad_scaler import ConstantGradScaler, DynamicGradScaler

    seen: list[bool] = []

    def spied(update: Any) -> Any:
        def counted(scaler: Any, found_inf: bool) -> None:
            seen.append(bool(found_inf))
            update(scaler, found_inf)

        return counted

    with contextlib.ExitStack() as stack:
        for scaler in (ConstantGradScaler, DynamicGradScaler):
            stack.enter_context(mock.patch.object(scaler, "update", spied(scaler.update)))
        yield seen


@contextlib.contextmanager
def _logged() -> Iterator[list[str]]:
    """Collect what the chain logs."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("megatron_muon.optimizer.chain")
    logger.addHandler(handler)
    try:
        yield lines
    finally:
        logger.removeHandler(handler)


@contextlib.contextmanager
def _without_scaler_code() -> Iterator[None]:
    """A chain that knows of no loss scale."""
    from megatron_muon.integration import factory
    from megatron_muon.optimizer import chain as module

    def prepare_grads(chain: Any) -> bool:
        for leaf in chain.leaves:
            leaf._copy_model_grads_to_main_grads()
        chain._statistics = chain._measure(False)
        return False

    with contextlib.ExitStack() as stack:
        for holder, name in ((factory, "make_grad_scaler"), (factory, "shared"),
                             (module, "can_fall")):  # fmt: skip
            stack.enter_context(mock.patch.object(holder, name, return_value=None))
        stack.enter_context(mock.patch.object(module.MuonChain, "prepare_grads", prepare_grads))
        yield


def _in_two_stages() -> contextlib.AbstractContextManager[Any]:
    """Decide as with groups made by hand, of which none spans all ranks."""
    from megatron_muon.optimizer import chain as module

    return mock.patch.object(module, "spanning_groups", lambda groups: [groups.mp, groups.dp_cp])


def _scaler_not_loaded() -> contextlib.AbstractContextManager[Any]:
    from megatron.core.optimizer.grad_scaler import DynamicGradScaler

    return mock.patch.object(DynamicGradScaler, "load_state_dict")


CHANGES: Mapping[str | None, Callable[[], contextlib.AbstractContextManager[Any]]] = {
    **SKIP_MUTANTS,
    "without scaler code": _without_scaler_code,
    "reduction in two stages": _in_two_stages,
    "scaler not loaded": _scaler_not_loaded,
}
"""What is changed in the code of a run."""


class Launches:
    """Records of labelled scripts; all scripts of one number of ranks share a launch."""

    def __init__(self, scripts: Mapping[str, tuple[int, Script]], timeout_s: float) -> None:
        self.scripts, self._timeout_s = dict(scripts), timeout_s
        self._records: dict[int, dict[str, list[list[Record]]] | BaseException] = {}

    def script(self, label: str) -> Script:
        """Return the script of a label."""
        return self.scripts[label][1]

    def steps(self, label: str) -> list[list[Record]]:
        """Return for each step the records of all ranks."""
        num_ranks = self.scripts[label][0]
        if num_ranks not in self._records:
            # Remembered too: the next test would only wait for the same failure.
            try:
                self._records[num_ranks] = self._launch(num_ranks)
            except BaseException as error:
                self._records[num_ranks] = error
        found = self._records[num_ranks]
        if isinstance(found, BaseException):
            raise found
        return found[label]

    def _launch(self, num_ranks: int) -> dict[str, list[list[Record]]]:
        labels = [label for label, (ranks, _) in self.scripts.items() if ranks == num_ranks]
        scripts = [self.script(label) for label in labels]
        with tempfile.TemporaryDirectory() as logs:
            ranks = run_ranks(
                run_scripts, num_ranks, scripts, timeout_s=self._timeout_s, logs=Path(logs)
            )
        return {
            label: [list(step) for step in zip(*(rank[i] for rank in ranks), strict=True)]
            for i, label in enumerate(labels)
        }
