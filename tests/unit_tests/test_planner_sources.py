"""Where the planner's model comes from: config.json, Megatron's flags, files of them."""

import json

import pytest

from megatron_muon.errors import ConfigurationError, UnsupportedError
from megatron_muon.planner.flag_words import parse_flags
from megatron_muon.planner.hugging_face import from_hugging_face
from megatron_muon.planner.megatron_flags import from_flags
from megatron_muon.planner.models import BUILT_IN
from megatron_muon.planner.sources import read_source

LLAMA = {
    "model_type": "llama", "num_hidden_layers": 32, "hidden_size": 4096,
    "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8,
    "vocab_size": 128256, "tie_word_embeddings": False,
}  # fmt: skip
DEEPSEEK = {
    "model_type": "deepseek_v3", "num_hidden_layers": 61, "hidden_size": 7168,
    "intermediate_size": 18432, "moe_intermediate_size": 2048, "num_attention_heads": 128,
    "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
    "v_head_dim": 128, "n_routed_experts": 256, "n_shared_experts": 1, "first_k_dense_replace": 3,
    "vocab_size": 129280, "num_nextn_predict_layers": 1,
}  # fmt: skip
GPT2 = {
    "model_type": "gpt2", "n_embd": 768, "n_head": 12, "n_layer": 12, "n_positions": 1024,
    "vocab_size": 50257, "n_inner": None,
}  # fmt: skip
QWEN = {
    "model_type": "qwen3", "num_hidden_layers": 64, "hidden_size": 5120,
    "intermediate_size": 25600, "num_attention_heads": 64, "num_key_value_heads": 8,
    "head_dim": 128, "vocab_size": 151936, "tie_word_embeddings": False,
}  # fmt: skip
LLAMA_FLAGS = (
    "--num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32 "
    "--group-query-attention --num-query-groups 8 --swiglu --normalization RMSNorm "
    "--position-embedding-type rope --untie-embeddings-and-output-weights --disable-bias-linear "
    "--vocab-size 128256 --bf16"
)


@pytest.mark.parametrize(
    ("fields", "name"),
    [(LLAMA, "llama3-8b"), (DEEPSEEK, "deepseek-v3"), (GPT2, "gpt2-124m"), (QWEN, "qwen3-32b")],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_hugging_face_config_is_the_built_in_model(tmp_path, fields, name):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(fields))
    model = read_source(str(tmp_path), []).model
    built_in = BUILT_IN[name]
    different = {
        field for field in built_in.__slots__ if getattr(model, field) != getattr(built_in, field)
    }
    assert different == {"name"}
    assert read_source(str(path), []).model.num_layers == model.num_layers


def test_experts_of_mixtral_and_qwen_are_read():
    mixtral = from_hugging_face(
        {**LLAMA, "model_type": "mixtral", "num_local_experts": 8, "vocab_size": 32000}, "x"
    )
    assert mixtral.num_parameters == pytest.approx(46.7e9, rel=2e-3)
    qwen = {
        **QWEN, "model_type": "qwen3_moe", "num_hidden_layers": 48, "hidden_size": 2048,
        "num_attention_heads": 32, "num_key_value_heads": 4, "num_experts": 128,
        "moe_intermediate_size": 768,
    }  # fmt: skip
    assert from_hugging_face(qwen, "x").num_parameters == pytest.approx(30.5e9, rel=2e-3)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"hidden_size": None}, "hidden_size is missing; expected an integer"),
        ({"vocab_size": "many"}, "vocab_size is 'many'"),
        ({"model_type": None}, "model_type is missing"),
    ],
)
def test_a_missing_field_is_named(changes, said):
    with pytest.raises(ConfigurationError, match=said):
        from_hugging_face({**LLAMA, **changes}, "config.json")


def test_a_type_that_is_not_known_is_refused():
    with pytest.raises(UnsupportedError, match="'mamba' are not known; those that are: gpt2,"):
        from_hugging_face({**LLAMA, "model_type": "mamba"}, "config.json")


def as_words(text):
    return text


def as_script(text):
    return (
        "#!/bin/bash\n# a comment with --num-layers 7\nNODES=4\nMODEL_ARGS=(\n    "
        + text.replace(" --", " \n    --")
        + "\n)\ntorchrun --nproc-per-node 8 pretrain_gpt.py ${MODEL_ARGS[@]} --lr 1e-3\n"
    )


def as_continued(text):
    return "torchrun pretrain_gpt.py " + text.replace(" --", " \\\n  --")


def as_yaml(text):
    flags = parse_flags(text.split())
    return "MODEL_ARGS:\n" + "".join(
        f"  --{flag}: {values[0] if values else 'true'}\n" for flag, values in flags.items()
    )


@pytest.mark.parametrize(
    ("form", "suffix"),
    [(as_words, ".txt"), (as_script, ".sh"), (as_continued, ".sh"), (as_yaml, ".yaml")],
)
def test_flags_are_read_in_every_form(tmp_path, form, suffix):
    path = tmp_path / f"args{suffix}"
    path.write_text(form(f"{LLAMA_FLAGS} --tensor-model-parallel-size 4 --lr 1e-4"))
    source = read_source(str(path), [])
    assert source.model.num_parameters == BUILT_IN["llama3-8b"].num_parameters
    assert source.sizes.tp == 4
    assert not source.settings.overlap


def test_flags_on_the_command_line_change_what_was_read(tmp_path):
    path = tmp_path / "args.txt"
    path.write_text(LLAMA_FLAGS)
    more = ["--num-layers", "2", "--muon-exclude", "*fc1*", "--muon-exclude=*fc2*",
            "--overlap-grad-reduce", "--muon-layout", "flat", "--muon-exchange-dtype", "bf16",
            "--muon-split-heads"]  # fmt: skip
    source = read_source(str(path), more)
    assert source.model.num_layers == 2
    assert source.settings.rules.exclude == ("*fc1*", "*fc2*")
    assert source.settings.overlap
    assert source.settings.splits.heads
    assert source.settings.exchange_nbytes == 2
    assert source.layout == "flat"
    assert read_source("llama3-8b", ["--num-layers", "2"]).model.num_layers == 2


def test_megatrons_defaults_are_used():
    words = "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --vocab-size 99 --swiglu"
    words += " --max-position-embeddings 32 --num-experts 4 --moe-layer-freq ([0]*1+[1]*1)"
    source = read_source(None, words.split())
    model = source.model
    assert (model.ffn_hidden_size, model.moe_ffn_hidden_size) == (128, 128)
    assert (model.num_query_groups, model.kv_channels) == (4, 16)
    assert model.add_bias_linear
    assert model.moe_layers == (False, True)
    assert source.settings.param_nbytes == 4


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--num-layers 2", "does not say --hidden-size, --num-attention-heads, --vocab-size"),
        (f"{LLAMA_FLAGS} --num-layers many", "--num-layers is 'many': expected an integer"),
        (f"{LLAMA_FLAGS} --num-layers", "--num-layers is nothing: expected one value"),
        (f"{LLAMA_FLAGS} --num-experts 4 --moe-layer-freq [0]*3", "is a pattern of 3; expected"),
        (f"{LLAMA_FLAGS} --moe-layer-freq f()", "expected an integer of 1 or more, or a pattern"),
        (f"{LLAMA_FLAGS} --transformer-impl other", "expected one of local, transformer_engine"),
        (f"{LLAMA_FLAGS} --muon-layout square", "expected one of owner, flat, auto"),
        (f"{LLAMA_FLAGS} --muon-gather-budget-mib x", "--muon-gather-budget-mib is 'x'"),
    ],
)
def test_what_is_wrong_with_flags_is_said(words, said):
    with pytest.raises(ConfigurationError) as caught:
        read_source(None, words.split())
    assert said in str(caught.value)


@pytest.mark.parametrize(
    "flag",
    ["--mtp-num-layers 2", "--fp8-param-gather", "--tensor-parallel-num-weight-shards 2",
     "--muon-tp-mode blockwise", "--pipeline-model-parallel-layout Et*3|t*29L"],
)  # fmt: skip
def test_what_is_not_planned_is_refused(flag):
    with pytest.raises(UnsupportedError, match=flag.split()[0]):
        read_source("llama3-8b", flag.split())


def test_files_that_are_no_model_are_refused(tmp_path):
    for name, text, said in (
        ("a.json", "[1]", "expected a JSON object"),
        ("b.json", "{", "not JSON"),
        ("c.txt", "nothing here", "has no flag of Megatron's"),
        ("d.yaml", "- 1", "expected flags and values"),
        ("e.sh", "--a 'unfinished", "not a list of flags"),
    ):
        (tmp_path / name).write_text(text)
        with pytest.raises(ConfigurationError, match=said):
            read_source(str(tmp_path / name), [])
    with pytest.raises(ConfigurationError, match="no such file, and no built-in model"):
        read_source("llama4", [])
    with pytest.raises(ConfigurationError, match="no model: give one of gpt2-124m"):
        read_source(None, [])


def test_a_misspelt_muon_flag_is_refused():
    with pytest.raises(ConfigurationError, match="Did you mean --muon-share-blocks"):
        read_source("llama3-8b", ["--muon-shareblocks"])


@pytest.mark.parametrize(
    ("flags", "nbytes"),
    [("--bf16", 4), ("--bf16 --grad-reduce-in-bf16", 2), ("--fp16", 2),
     ("--fp16 --accumulate-allreduce-grads-in-fp32", 4), ("--grad-reduce-in-bf16", 4)],
)  # fmt: skip
def test_gradients_are_as_wide_as_a_run_has_them(flags, nbytes):
    """In fp32 the flag has no effect: DDP's buffers are of the dtype of the parameters."""
    line = ["--num-layers", "2", "--hidden-size", "64", "--num-attention-heads", "4"]
    line += ["--vocab-size", "256", "--max-position-embeddings", "32", *flags.split()]
    assert from_flags(parse_flags(line), "test").settings.grad_nbytes == nbytes
