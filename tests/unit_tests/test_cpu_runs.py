"""The real Megatron trains on the CPU stand-in, with the options that ordinary runs use."""

import math

import pytest

from megatron_muon.testing.training import train

pytestmark = [pytest.mark.full, pytest.mark.distributed, pytest.mark.timeout(180)]

MODEL = (
    "--mock-data --num-layers 2 --hidden-size 64 --ffn-hidden-size 128 --num-attention-heads 4 "
    "--seq-length 32 --max-position-embeddings 32 --position-embedding-type rope "
    "--normalization RMSNorm --disable-bias-linear --micro-batch-size 1 --global-batch-size 4 "
    "--train-iters 3 --lr 1e-3 --log-interval 1 --eval-iters 0 --tensorboard-log-interval 1"
).split()
MOE = "--bf16 --num-experts 4 --moe-router-topk 2 --expert-model-parallel-size 2"
LOGS = (
    "--timing-log-level 2 --log-timers-to-tensorboard --log-memory-to-tensorboard "
    "--log-params-norm --log-num-zeros-in-grad --log-validation-ppl-to-tensorboard "
    "--log-throughput --log-device-memory-used --log-straggler --log-memory-interval 1"
)

RUNS = {
    "fp32": (1, ""),
    "fp16 with a dynamic scale": (1, "--fp16 --initial-loss-scale 65536"),
    "fp16 with a static scale": (2, "--fp16 --loss-scale 128 --use-distributed-optimizer"),
    "tied embeddings on two stages": (2, "--bf16 --pipeline-model-parallel-size 2"),
    "interleaved stages": (
        2,
        "--bf16 --pipeline-model-parallel-size 2 --num-layers 4 "
        "--num-layers-per-virtual-pipeline-stage 1",
    ),
    "experts by allgather": (2, f"{MOE} --moe-token-dispatcher-type allgather"),
    "experts by alltoall": (2, f"{MOE} --moe-token-dispatcher-type alltoall"),
    "evaluation, timers and logs": (1, f"--bf16 --eval-iters 2 --eval-interval 2 {LOGS}"),
    "torch_dist checkpoint": (
        2,
        "--bf16 --use-distributed-optimizer --save {folder} --save-interval 3 "
        "--ckpt-format torch_dist",
    ),
    "torch checkpoint": (1, "--bf16 --save {folder} --save-interval 3 --ckpt-format torch"),
    "recomputed activations": (
        1,
        "--bf16 --recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
    ),
    "overlap": (
        2,
        "--bf16 --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather",
    ),
    "tensor-parallel Muon": (
        2,
        "--bf16 --optimizer muon --use-distributed-optimizer --tensor-model-parallel-size 2",
    ),
    **{
        f"Muon in {name}, timers, logs and a checkpoint": (
            2,
            f"{flags} --optimizer muon --use-distributed-optimizer {LOGS} --save {{folder}} "
            "--save-interval 3 --ckpt-format torch_dist",
        )
        for name, flags in (
            ("fp32", ""),
            ("fp32 without a layout", "--no-use-layer-wise-param-layout"),
            ("fp16", "--fp16 --initial-loss-scale 65536"),
            ("bf16", "--bf16"),
        )
    },
    "profile": (
        1,
        "--bf16 --profile --use-pytorch-profiler --nvtx-ranges --profile-step-start 1 "
        "--profile-step-end 2",
    ),
}


def losses(name, folder):
    num_ranks, flags = RUNS[name]
    words = flags.format(folder=folder / "checkpoint").split()
    optimizer = [] if "--optimizer" in words else ["--optimizer", "adam"]
    return train([*MODEL, *optimizer, *words], num_ranks, folder, timeout_s=150)


@pytest.mark.parametrize("name", RUNS)
def test_the_loss_falls(name, tmp_path):
    values = list(losses(name, tmp_path).values)
    assert len(values) == 3
    assert all(map(math.isfinite, values))
    assert values == sorted(values, reverse=True)


def test_both_dispatchers_of_tokens_give_one_loss(tmp_path):
    gathered, exchanged = (
        losses(f"experts by {how}", tmp_path / how).values for how in ("allgather", "alltoall")
    )
    assert gathered == exchanged
