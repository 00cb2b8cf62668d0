"""Pretraining of a GPT with Megatron, in Megatron's own idiom and on its ModelBuilder path.

    torchrun --nproc-per-node 4 -m megatron_muon run --device cpu scripts/pretrain_gpt.py ...

takes Megatron's flags. The data is `--mock-data`, or `--data-path PREFIX` of indexed datasets, such
as the ones that `megatron_muon.tools.prepare_text` makes of text. Where the command line names no
tokenizer, tokens are bytes, as they are in those.

Ours are `--init-by-name` and `--init-by-name-seed`: the same initial model at every tensor,
pipeline and expert parallel size (see `megatron_muon.testing.init_by_name`). The optimizer is
Megatron's affair, so this file knows nothing about Muon.
"""

import argparse
import functools
import os
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from megatron.core import mpu
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.blended_megatron_dataset_config import (
    convert_split_vector_to_split_matrix,
    parse_and_normalize_split,
)
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig, MockGPTDataset
from megatron.core.datasets.indexed_dataset import IndexedDataset, get_bin_path, get_idx_path
from megatron.core.datasets.object_storage_utils import is_object_storage_path
from megatron.core.enums import ModelType
from megatron.core.rerun_state_machine import get_rerun_state_machine
from megatron.core.transformer.multi_token_prediction import mtp_on_this_rank
from megatron.core.utils import (
    get_attr_wrapped_model,
    get_batch_on_this_cp_rank,
    get_batch_on_this_tp_rank,
    get_model_config,
)
from megatron.training import get_args, get_timers, pretrain, print_rank_0
from megatron.training.argument_utils import gpt_config_from_args, pretrain_cfg_container_from_args
from megatron.training.arguments import parse_and_validate_args
from megatron.training.global_vars import get_tokenizer
from megatron.training.utils import (
    get_blend_and_blend_per_split,
    is_first_or_last_pipeline_stage,
)

from megatron_muon.errors import ConfigurationError, UnsupportedError
from megatron_muon.testing.init_by_name import initialize_by_name
from megatron_muon.tools.prepare_text import END_OF_DOCUMENT, VOCABULARY_SIZE

_BATCH_KEYS = ("tokens", "labels", "loss_mask", "attention_mask", "position_ids")
_SPLITS = ("training", "validation", "test")
_TOKENIZER_FLAGS = ("--tokenizer-type", "--vocab-size", "--padded-vocab-size")
_BYTE_TOKENIZER = {
    "tokenizer_type": "NullTokenizer",
    "vocab_size": VOCABULARY_SIZE,
    "padded_vocab_size": VOCABULARY_SIZE,
    "null_tokenizer_eod_id": END_OF_DOCUMENT,
}
_UNSUPPORTED = {
    "sft": "--sft",
    "fim_data": "--fim-data",
    "dataloader_inter_document_masking": "--dataloader-inter-document-masking",
    "hybrid_context_parallel": "--hybrid-context-parallel",
    "hybrid_layer_pattern": "--hybrid-layer-pattern",
}
"""Features of Megatron's data or models that this program does not serve."""


def add_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add the flags of this program to Megatron's."""
    group = parser.add_argument_group("initial weights")
    group.add_argument(
        "--init-by-name",
        action="store_true",
        help="Seed each weight by its name and logical shape and cut it for the rank, so that a "
        "run starts from the same model at every tensor, pipeline and expert parallel size.",
    )
    group.add_argument(
        "--init-by-name-seed",
        type=int,
        default=None,
        help="Seed of --init-by-name; --seed if not given.",
    )
    return parser


def defaults_for(argv: Sequence[str]) -> dict[str, Any]:
    """Return the settings that the command line `argv` leaves to this program.

    Where it names no tokenizer, tokens are bytes: Megatron's NullTokenizer carries the size of the
    vocabulary and the end-of-document token, which is all that training on prepared data needs. The
    padded size is given too: Megatron would round it up to a multiple of 128 times the
    tensor-parallel size, and the model would depend on that. Megatron fails without an evaluation
    interval, also where nothing is evaluated.
    """
    given = {word.split("=")[0] for word in argv}
    defaults: dict[str, Any] = {}
    if given.isdisjoint(_TOKENIZER_FLAGS):
        defaults |= _BYTE_TOKENIZER
    if "--eval-interval" not in given:
        defaults["eval_interval"] = 1000
    return defaults


def check_arguments(args: argparse.Namespace) -> None:
    """Refuse, before anything is built, what this program cannot run.

    Raises:
        ConfigurationError: There is no data, or a dataset's file does not exist.
        UnsupportedError: A flag asks for a feature that this program does not serve.
    """
    for name, flag in _UNSUPPORTED.items():
        if getattr(args, name, None):
            raise UnsupportedError(f"{flag} is not supported by this pretraining program: drop it")
    if args.init_by_name_seed is not None and not args.init_by_name:
        raise ConfigurationError("--init-by-name-seed has no effect without --init-by-name")
    prefixes = data_prefixes(args)
    if not prefixes and not args.mock_data:
        raise ConfigurationError(
            "no data to train on: pass --data-path PREFIX of an indexed dataset, or --mock-data"
        )
    for prefix in prefixes:
        for path in (get_bin_path(prefix), get_idx_path(prefix)):
            if not is_object_storage_path(path) and not os.path.isfile(path):
                raise ConfigurationError(
                    f"--data-path {prefix}: there is no file {path}. A data path is the common "
                    "part of a .bin and an .idx file; python -m megatron_muon.tools.prepare_text "
                    "makes them from a folder of text"
                )


def data_prefixes(args: argparse.Namespace) -> list[str]:
    """Return the prefix of every indexed dataset that the flags name."""
    blend, blend_per_split = get_blend_and_blend_per_split(args)
    return [prefix for entry in [blend, *(blend_per_split or [])] if entry for prefix in entry[0]]


def check_splits(
    num_documents: Sequence[int], prefixes: Sequence[str], split: str, sizes: Sequence[int | None]
) -> None:
    """Refuse a split that would leave a dataset, from which samples are drawn, without documents.

    Megatron repeats a dataset until it has enough samples, which never ends for an empty one.

    Args:
        num_documents: Number of documents of each dataset.
        prefixes: The datasets' prefixes, for the message.
        split: Megatron's `--split`.
        sizes: Number of samples that training, validation and test need.

    Raises:
        ConfigurationError: A split with samples to draw would be empty.
    """
    matrix = convert_split_vector_to_split_matrix(parse_and_normalize_split(split))
    for total, prefix in zip(num_documents, prefixes, strict=True):
        for name, bounds, size in zip(_SPLITS, matrix, sizes, strict=True):
            if bounds is None or size == 0:
                continue
            if round(bounds[0] * float(total)) == round(bounds[1] * float(total)):
                raise ConfigurationError(
                    f"--split {split} gives the {name} data none of the {total} documents of "
                    f"{prefix}: give it a larger share, or none, as in --split 100,0,0 with "
                    "--eval-iters 0"
                )


def dataset_config(args: argparse.Namespace) -> Any:
    """Return Megatron's dataset configuration for the flags."""
    blend, blend_per_split = get_blend_and_blend_per_split(args)
    return GPTDatasetConfig(
        random_seed=args.seed,
        sequence_length=args.seq_length,
        blend=blend,
        blend_per_split=blend_per_split,
        split=args.split,
        multiple_validation_sets=args.multiple_validation_sets,
        full_validation=args.full_validation,
        num_dataset_builder_threads=args.num_dataset_builder_threads,
        path_to_cache=args.data_cache_path,
        mmap_bin_files=args.mmap_bin_files,
        tokenizer=get_tokenizer(),
        reset_position_ids=args.reset_position_ids,
        reset_attention_mask=args.reset_attention_mask,
        eod_mask_loss=args.eod_mask_loss,
        create_attention_mask=args.create_attention_mask_in_dataloader,
        object_storage_cache_path=args.object_storage_cache_path,
        mid_level_dataset_surplus=args.mid_level_dataset_surplus,
        allow_ambiguous_pad_tokens=args.allow_ambiguous_pad_tokens,
        fast_cache_load=args.dataloader_fast_cache_load,
        defer_npy_index_mmap=args.dataloader_defer_npy_index_mmap,
        context_parallel_size=args.context_parallel_size,
        data_parallel_size=args.data_parallel_size,
    )


def datasets_provider(sizes: Sequence[int | None], vp_stage: int | None = None) -> Any:
    """Return the training, validation and test datasets; called by Megatron on every rank.

    Args:
        sizes: Number of samples that each of the three needs.
        vp_stage: Virtual pipeline stage whose iterators are being built.
    """
    args = get_args()
    config = dataset_config(args)
    prefixes = data_prefixes(args)
    if (
        config.split is not None
        and not config.mock
        and not any(map(is_object_storage_path, prefixes))
    ):
        counts = [len(IndexedDataset(prefix, mmap=args.mmap_bin_files)) for prefix in prefixes]
        check_splits(counts, prefixes, config.split, sizes)
    print_rank_0("> building the GPT datasets ...")
    return BlendedMegatronDatasetBuilder(
        MockGPTDataset if config.mock else GPTDataset,
        sizes,
        functools.partial(reads_data, vp_stage),
        config,
    ).build()


datasets_provider.is_distributed = True  # type: ignore[attr-defined]  # Megatron asks for it


def reads_data(vp_stage: int | None) -> bool:
    """Return whether this rank reads samples: it feeds its tensor-parallel group and needs them."""
    if mpu.get_tensor_model_parallel_rank() != 0:
        return False
    return bool(is_first_or_last_pipeline_stage(vp_stage) or _has_mtp(vp_stage))


def _has_mtp(vp_stage: int | None, config: Any = None) -> bool:
    """Return whether this rank holds multi-token-prediction layers."""
    source = config if config is not None else get_args()
    return bool(
        mtp_on_this_rank(
            layout=source.pipeline_model_parallel_layout,
            mtp_num_layers=source.mtp_num_layers,
            ignore_virtual=False,
            vp_stage=vp_stage,
        )
    )


def next_batch(
    data_iterator: Iterator[dict[str, torch.Tensor]] | None, model: torch.nn.Module
) -> dict[str, torch.Tensor | None]:
    """Return this rank's part of the next micro-batch, with None for what its stage does not need.

    The first rank of each tensor-parallel group reads it and broadcasts it in the group; a
    context-parallel rank keeps its part of each sequence.
    """
    args = get_args()
    vp_stage = get_attr_wrapped_model(model, "vp_stage")
    is_first = mpu.is_pipeline_first_stage(ignore_virtual=False, vp_stage=vp_stage)
    is_last = mpu.is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp_stage)
    has_mtp = _has_mtp(vp_stage, get_model_config(model))
    if not (is_first or is_last or has_mtp):
        return dict.fromkeys(_BATCH_KEYS)
    tp_rank = mpu.get_tensor_model_parallel_rank()
    batch: dict[str, torch.Tensor | None] = dict.fromkeys(_BATCH_KEYS)
    if tp_rank == 0:
        assert data_iterator is not None
        sample = next(data_iterator)
        batch |= {key: tensor.cuda(non_blocking=True) for key, tensor in sample.items()}
    batch = get_batch_on_this_tp_rank(
        batch,
        has_cu_seqlens=False,
        is_hybrid_cp=False,
        create_attention_mask_in_dataloader=args.create_attention_mask_in_dataloader,
        broadcast_src_rank=mpu.get_tensor_model_parallel_src_rank(),
        broadcast_group=mpu.get_tensor_model_parallel_group(),
        cp_size=args.context_parallel_size,
        tp_rank=tp_rank,
        micro_batch_size=args.micro_batch_size if model.training else args.eval_micro_batch_size,
        seq_length=args.seq_length,
        mtp_on_this_rank=has_mtp,
        pipeline_model_parallel_size=args.pipeline_model_parallel_size,
        is_pipeline_first_stage=is_first,
        is_pipeline_last_stage=is_last,
    )
    batch = get_batch_on_this_cp_rank(
        batch, is_hybrid_cp=False, cp_group=mpu.get_context_parallel_group()
    )
    return {key: batch[key] for key in _BATCH_KEYS}


def loss_func(
    loss_mask: Any, output_tensor: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """Return the summed loss of a micro-batch, its number of tokens, and both for the log."""
    mask = loss_mask.view(-1).float()
    loss = torch.sum(output_tensor.view(-1).float() * mask)
    num_tokens = mask.sum().detach().to(torch.int)
    if get_args().check_for_nan_in_loss_and_grad:
        for rejected, what in ((torch.isnan, "NaN"), (torch.isinf, "infinite")):
            get_rerun_state_machine().validate_result(
                result=loss,
                rejection_func=rejected,
                message=f"the loss of a micro-batch is {what}",
                tolerance=0.0,
                fatal=True,
            )
    report = torch.stack([loss.detach(), num_tokens.to(loss.dtype)])
    return loss, num_tokens, {"lm loss": report}


def forward_step(
    data_iterator: Iterator[dict[str, torch.Tensor]] | None, model: torch.nn.Module
) -> tuple[torch.Tensor, Any]:
    """Run one micro-batch through this rank's model chunk; return the output and its loss."""
    timers = get_timers()
    timers("batch-generator", log_level=2).start()
    batch = next_batch(data_iterator, model)
    timers("batch-generator").stop()
    output = model(
        batch["tokens"],
        batch["position_ids"],
        batch["attention_mask"],
        labels=batch["labels"],
        loss_mask=batch["loss_mask"],
    )
    return output, functools.partial(loss_func, batch["loss_mask"])


def main() -> None:
    """Parse Megatron's command line and train."""
    args = parse_and_validate_args(
        extra_args_provider=add_arguments, args_defaults=defaults_for(sys.argv[1:])
    )
    check_arguments(args)
    model_config = gpt_config_from_args(args)
    if args.init_by_name:
        seed = args.seed if args.init_by_name_seed is None else args.init_by_name_seed
        model_config.pre_wrap_hooks.append(functools.partial(initialize_by_name, seed=seed))
    pretrain(
        pretrain_cfg_container_from_args(args, model_config),
        datasets_provider,
        ModelType.encoder_or_decoder,
        forward_step,
    )


if __name__ == "__main__":
    main()
