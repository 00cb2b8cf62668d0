"""Odd input to ``megatron-muon plan``: one line that says what was wrong, and exit status 2."""

from __future__ import annotations

import json

import pytest

from megatron_muon.tools import cli

LLAMA = {
    "model_type": "llama", "num_hidden_layers": 4, "hidden_size": 256, "intermediate_size": 512,
    "num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 1000,
}  # fmt: skip
FLAGS = (
    "-- --num-layers 4 --hidden-size 256 --num-attention-heads 8 --vocab-size 1000 "
    "--position-embedding-type rope"
)


def refused(words, capsys):
    """Plan, and return the one line that was said."""
    assert cli.main(["plan", *words]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith("megatron-muon: error: ")
    assert shown.err.count("\n") == 1
    assert len(shown.err) < 500
    return shown.err


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"num_attention_heads": 0}, "num_attention_heads is 0; expected an integer from 1"),
        ({"hidden_size": -4}, "hidden_size is -4; expected an integer from 1"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0; expected an integer from 1 to 10000"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000; expected"),
        ({"hidden_size": 10**18}, "hidden_size is 1000000000000000000; expected"),
        ({"hidden_size": 256.0}, "hidden_size is 256.0; expected an integer"),
        ({"vocab_size": "1000"}, "vocab_size is '1000'; expected an integer"),
        ({"intermediate_size": True}, "intermediate_size is True; expected an integer"),
        ({"intermediate_size": None}, "intermediate_size is missing"),
        ({"num_key_value_heads": 3}, "8 attention heads cannot share 3 query groups"),
        ({"num_key_value_heads": 0}, "num_key_value_heads is 0; expected"),
        ({"head_dim": 0}, "head_dim is 0; expected"),
        ({"head_dim": 3.5}, "head_dim is 3.5; expected"),
        ({"num_attention_heads": 7}, "a hidden size of 256 is no multiple of 7 attention heads"),
        ({"tie_word_embeddings": "no"}, "tie_word_embeddings is 'no'; expected true or false"),
        ({"model_type": "mamba"}, "models of type 'mamba' are not known"),
        ({"model_type": ["llama"]}, "models of type ['llama'] are not known"),
        ({"model_type": "ll\u00e4m\u00e4"}, "models of type 'll\u00e4m\u00e4' are not known"),
    ],
    ids=str,
)
def test_fields_of_a_config_that_cannot_be(capsys, tmp_path, changes, said):
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**LLAMA, **changes}, ensure_ascii=False), encoding="utf-8")
    assert f"{path}: {said}" in refused([str(path)], capsys)


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.json", b"", "not JSON"),
        ("a.json", b"{}", "model_type is missing; expected one of gpt2, llama"),
        ("a.json", b"[1, 2]", "expected a JSON object"),
        ("a.json", b"null", "expected a JSON object"),
        ("a.json", b"[" * 100_000, "not JSON"),
        ("a.json", b'{"model_type": "llama", "hidden_size": ' + b"9" * 5000 + b"}", "not JSON"),
        ("a.json", b"\x00\xff\xfe", "cannot be read (it is no text)"),
        ("a.sh", b"\xff\xfe\x80", "cannot be read (it is no text)"),
        ("a.sh", b"", "has no flag of Megatron's"),
        ("a.yaml", b"", "expected flags and values"),
        ("a.yaml", b"a: [", "not YAML"),
        ("a.yaml", b"MODEL_ARGS: 5", "expected flags and values"),
        ("a.yaml", b"--num-layers: {a: 1}", "does not say --hidden-size"),
    ],
    ids=str,
)
def test_files_that_are_no_model(capsys, tmp_path, name, content, said):
    path = tmp_path / name
    path.write_bytes(content)
    assert said in refused([str(path)], capsys)


def test_folders_and_names_that_are_no_model(capsys, tmp_path):
    folder = refused([str(tmp_path)], capsys)
    assert f"{tmp_path}: a folder without config.json or model_config.yaml" in folder
    assert "no such file, and no built-in model" in refused([str(tmp_path / "absent")], capsys)
    assert "no model: give one of" in refused([""], capsys)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("--tp 0", "--tp is 0: expected an integer of 1 or more"),
        ("--dp -1", "--dp is -1: expected"),
        ("--pp 0", "--pp is 0: expected"),
        ("--pp 33", "it has 32 layers, and each stage needs one. Give a --pp of at most 32"),
        ("--pp 2 --last-stage-layers 0", "--last-stage-layers is 0: expected 1 to 32"),
        ("--pp 4 --vpp 3", "a stage of 8 layers cannot be cut into 3 chunks. Give one of 1, 2, 4"),
        ("--cp 99999999", "is a pipeline stage of 99999999 ranks; expected 131072 at most"),
        ("--ep 2", "--ep 2 without effect: llama3-8b has no experts"),
        ("--stage -1", "--stage is -1: expected 0"),
        ("--pp 4 --stage 4", "--stage is 4: expected 0 to 3"),
        ("--rows -1", "--rows is -1: expected"),
        *(
            (f"--{option} {value}", f"--{option} is {float(value)}: expected a number from")
            for option in ("flops", "link", "node-link", "memory")
            for value in ("1e-320", "0", "-1", "nan", "inf", "1e300")
        ),
        ("-- --num-attention-heads 0", "--num-attention-heads is 0: expected an integer from 1"),
        ("-- --num-attention-heads 4", "4 attention heads cannot share 8 query groups"),
        ("-- --hidden-size 0", "--hidden-size is 0"),
        ("-- --ffn-hidden-size 0", "--ffn-hidden-size is 0"),
        ("-- --kv-channels -1", "--kv-channels is -1"),
        ("-- --vocab-size -5", "--vocab-size is -5"),
        ("-- --num-layers 1.5", "--num-layers is '1.5': expected an integer"),
        ("-- --num-layers " + "9" * 5000, "...: expected an integer from 1 to 10000"),
        ("-- --num-layers", "--num-layers is nothing: expected one value"),
        ("-- --num-layers 1 2", "--num-layers is 1 2: expected one value"),
        ("-- --make-vocab-size-divisible-by 0", "--make-vocab-size-divisible-by is 0"),
        ("-- --num-experts -8", "--num-experts is -8"),
        ("-- --num-experts 9999", "32 layers of 9999 experts are more than the 200000"),
        ("-- --position-embedding-type x", "expected one of learned_absolute, rope"),
        ("-- --position-embedding-type learned_absolute", "needs --max-position-embeddings"),
        ("-- --tensor-model-parallel-size 0", "--tensor-model-parallel-size is 0: expected"),
        ("--tp 8 -- --padded-vocab-size 100", "padded vocabulary of 100 cannot be cut into 8"),
        ("-- --moe-layer-freq 0", "--moe-layer-freq is '0': expected an integer of 1 or more"),
        ("-- --moe-layer-freq [0]*1000000000000", "expected an integer of 1 or more, or a pattern"),
        ("-- --moe-layer-freq [[1]]*32", "expected an integer of 1 or more, or a pattern"),
        ("-- num-layers 2", "'num-layers' behind `--` is no flag of Megatron's"),
        ("-- --ddp-bucket-size 0", "--ddp-bucket-size is 0"),
    ],
)
def test_sizes_and_flags_that_cannot_be(capsys, line, said):
    assert said in refused(["llama3-8b", *line.split()], capsys)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ("--num-attention-heads 0", "--num-attention-heads is 0"),
        ("--swiglu --hidden-size 16", "makes Megatron's --ffn-hidden-size 0: give --ffn-hidden"),
        ("--hidden-size 255", "is no multiple of --num-attention-heads 8: give --kv-channels"),
    ],
)
def test_a_model_of_flags_that_cannot_be(capsys, more, said):
    assert said in refused(f"{FLAGS} {more}".split(), capsys)


@pytest.mark.parametrize(
    ("machine", "said"),
    [
        ('{"flops_per_s": 1e-320}', "flops_per_s is 1e-320; expected a number from 1e+06"),
        ('{"latency_s": 1e308}', "latency_s is too large; expected"),
        ('{"flops_per_s": ' + "9" * 400 + "}", "flops_per_s is too large; expected"),
        ("[" * 100_000, "not JSON (nested too deeply)"),
    ],
    ids=["small", "slow", "large", "deep"],
)
def test_a_machine_that_cannot_be(capsys, tmp_path, machine, said):
    path = tmp_path / "machine.json"
    path.write_text(machine)
    for words in (["--hardware", str(path)], ["--", "--muon-hardware", str(path)]):
        assert f"{path}: {said}" in refused(["llama3-8b", *words], capsys)
