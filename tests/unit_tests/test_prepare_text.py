"""Text becomes the indexed dataset that Megatron reads back, whole or not at all."""

import json
import os
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from megatron.core.datasets.gpt_dataset import GPTDatasetConfig
from megatron.core.datasets.indexed_dataset import IndexedDataset

import megatron_muon.tools.prepare_text as tool
from megatron_muon.errors import ConfigurationError
from megatron_muon.tools.prepare_text import (
    END_OF_DOCUMENT,
    VOCABULARY_SIZE,
    main,
    prepare_text,
)
from megatron_muon.tools.pretrain_gpt import check_splits, defaults_for

TEXTS = {
    "b.txt": "To be, or not to be.\n",
    "a.md": "# Caf\u00e9\n\n\u2014 \u201cna\u00efve\u201d \U0001f40d\n",
    "deep/er/c.TXT": "the third\n" * 50,
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    root = tmp_path / "text"
    for name, text in TEXTS.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    (root / "image.png").write_bytes(b"\x00\xff")
    (root / "empty.txt").touch()
    return root


@pytest.fixture
def prefix(tmp_path: Path) -> Path:
    return tmp_path / "data" / "plays.v1"


def documents(prefix: Path) -> list[str]:
    dataset = IndexedDataset(str(prefix))
    tokens = [dataset.get(i) for i in range(len(dataset))]
    assert all(document[-1] == END_OF_DOCUMENT for document in tokens)
    assert dataset.document_indices.tolist() == list(range(len(tokens) + 1))
    return [document[:-1].astype(np.uint8).tobytes().decode("utf-8") for document in tokens]


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()} if folder.is_dir() else set()


def test_the_dataset_reads_back_as_the_text(folder: Path, prefix: Path) -> None:
    prepared = prepare_text(folder, prefix)
    assert documents(prefix) == [TEXTS[name] for name in sorted(TEXTS)]
    assert prepared.written
    assert prepared.num_documents == 3
    assert prepared.num_tokens == sum(len(t.encode()) + 1 for t in TEXTS.values())
    assert names(prefix.parent) == {"plays.v1.bin", "plays.v1.idx", "plays.v1.json"}


def test_tokens_have_the_type_that_megatron_reads_them_with(folder: Path, prefix: Path) -> None:
    from megatron.core.datasets.indexed_dataset import DType
    from megatron.core.tokenizers.text.libraries.null_tokenizer import NullTokenizer

    prepare_text(folder, prefix)
    config = GPTDatasetConfig(
        random_seed=1,
        sequence_length=8,
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        tokenizer=NullTokenizer(VOCABULARY_SIZE, eod_id=END_OF_DOCUMENT),
    )
    dataset = IndexedDataset(str(prefix))
    assert DType.code_from_dtype(dataset.index.dtype) == config.token_dtype_code


def test_second_run_changes_nothing(folder: Path, prefix: Path) -> None:
    first = prepare_text(folder, prefix)
    before = {path: path.stat().st_mtime_ns for path in prefix.parent.iterdir()}
    second = prepare_text(folder, prefix)
    assert not second.written
    assert (second.num_documents, second.num_tokens) == (first.num_documents, first.num_tokens)
    assert {path: path.stat().st_mtime_ns for path in prefix.parent.iterdir()} == before


@pytest.mark.parametrize("change", ["edit", "same_size_edit", "add", "remove", "rename"])
def test_any_change_of_the_text_is_seen(folder: Path, prefix: Path, change: str) -> None:
    prepare_text(folder, prefix)
    path = folder / "b.txt"
    if change == "edit":
        path.write_text("more than before, and longer\n")
    elif change == "same_size_edit":
        path.write_text(TEXTS["b.txt"].replace("be", "eb"))
    elif change == "add":
        (folder / "new.md").write_text("new")
    elif change == "remove":
        path.unlink()
    else:
        path.rename(folder / "z.txt")
    assert prepare_text(folder, prefix).written
    expected = [
        p.read_text() for p in sorted(folder.rglob("*")) if p.suffix in (".md", ".txt", ".TXT")
    ]
    assert sorted(documents(prefix)) == sorted(text for text in expected if text)


@pytest.mark.parametrize("ending", [".bin", ".idx", ".json"])
@pytest.mark.parametrize("damage", ["missing", "truncated"])
def test_a_damaged_dataset_is_made_again(
    folder: Path, prefix: Path, ending: str, damage: str
) -> None:
    prepare_text(folder, prefix)
    path = prefix.with_name(prefix.name + ending)
    content = path.read_bytes()
    if damage == "missing":
        path.unlink()
    else:
        path.write_bytes(content[: len(content) // 2])
    assert prepare_text(folder, prefix).written
    assert path.read_bytes() == content


def test_new_data_drops_the_sample_indices_of_the_old(folder: Path, prefix: Path) -> None:
    prepare_text(folder, prefix)
    stale = prefix / "cache" / "GPTDataset_indices" / "x-description.txt"
    stale.parent.mkdir(parents=True)
    stale.write_text("of the old data")
    assert not prepare_text(folder, prefix).written
    assert stale.exists()
    (folder / "b.txt").write_text("other text")
    prepare_text(folder, prefix)
    assert not stale.exists()


def test_a_cache_inside_the_input_folder_is_not_text(folder: Path) -> None:
    inside = folder / "plays"
    prepare_text(folder, inside)
    description = inside / "cache" / "GPTDataset_indices" / "x-description.txt"
    description.parent.mkdir(parents=True)
    description.write_text("written by Megatron")
    assert not prepare_text(folder, inside).written


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"caf\xe9", r"bad\.txt is not UTF-8 text \(byte 3"),
        (b"nul \x00 inside", r"bad\.txt holds a NUL at byte 4"),
    ],
)
def test_a_bad_file_is_named_and_nothing_is_written(
    folder: Path, prefix: Path, content: bytes, message: str
) -> None:
    (folder / "bad.txt").write_bytes(content)
    with pytest.raises(ConfigurationError, match=message):
        prepare_text(folder, prefix)
    assert names(prefix.parent) == set()


def test_a_bad_file_leaves_the_old_dataset_whole(folder: Path, prefix: Path) -> None:
    prepare_text(folder, prefix)
    (folder / "bad.txt").write_bytes(b"\xff")
    with pytest.raises(ConfigurationError, match=r"bad\.txt"):
        prepare_text(folder, prefix)
    (folder / "bad.txt").unlink()
    assert not prepare_text(folder, prefix).written


def test_a_folder_without_text_is_an_error(
    tmp_path: Path, folder: Path, prefix: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.rmtree(folder / "deep")
    for path in folder.glob("[ab].*"):
        path.unlink()
    for given, message in [
        (tmp_path / "nowhere", "does not exist"),
        (folder / "image.png", "is not a folder"),
        (folder, "holds no text"),
    ]:
        arguments = ["--input", str(given), "--output-prefix", str(prefix)]
        assert main(arguments) == 2
        assert message in capsys.readouterr().err


@contextmanager
def small_file_limit() -> Iterator[None]:
    """Files cannot grow beyond 4 KiB: what a full disk does, without filling one.

    No fixture, whose end comes after pytest has written its progress, to a file perhaps.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    previous = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, previous)


def test_a_full_disk_leaves_no_half_file(folder: Path, prefix: Path) -> None:
    (folder / "long.txt").write_text("x" * 20_000)
    expected = r"--output-prefix .* could not be written"
    with pytest.raises(ConfigurationError, match=expected), small_file_limit():
        prepare_text(folder, prefix)
    assert names(prefix.parent) == set()


def test_an_interruption_between_two_files_is_repaired(
    folder: Path, prefix: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare_text(folder, prefix)
    old = (folder / "b.txt").read_text()
    (folder / "b.txt").write_text(old.replace("be", "eb"))
    replace = Path.replace

    def interrupted(self: Path, target: Path) -> Path:
        if target.suffix == ".idx":
            raise KeyboardInterrupt
        return replace(self, target)

    monkeypatch.setattr(Path, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        prepare_text(folder, prefix)
    monkeypatch.undo()
    assert not [name for name in names(prefix.parent) if "tmp" in name]
    # Back to the old text: the old stamp would fit it, and the new .bin has the old one's size.
    (folder / "b.txt").write_text(old)
    assert prepare_text(folder, prefix).written
    assert documents(prefix) == [TEXTS[name] for name in sorted(TEXTS)]


def test_termination_leaves_no_half_file(
    folder: Path, prefix: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build = tool._build

    def terminated(files: Sequence[tool.TextFile], bin_path: Path, idx_path: Path) -> int:
        num_tokens = build(files, bin_path, idx_path)
        assert len(names(prefix.parent)) == 2
        os.kill(os.getpid(), signal.SIGTERM)
        return num_tokens

    monkeypatch.setattr(tool, "_build", terminated)
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit) as leaving:
        main(["--input", str(folder), "--output-prefix", str(prefix)])
    assert leaving.value.code == 128 + signal.SIGTERM
    assert signal.getsignal(signal.SIGTERM) is before
    assert names(prefix.parent) == set()


def test_an_up_to_date_dataset_needs_neither_torch_nor_megatron(folder: Path, prefix: Path) -> None:
    prepare_text(folder, prefix)
    program = (
        "import sys; from megatron_muon.tools.prepare_text import main; "
        f"code = main(['--input', {str(folder)!r}, '--output-prefix', {str(prefix)!r}]); "
        "sys.exit(code or 3 * bool({'torch', 'megatron', 'numpy'} & set(sys.modules)))"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert "up to date: 3 documents" in result.stdout


def test_the_stamp_is_plain_json(folder: Path, prefix: Path) -> None:
    prepare_text(folder, prefix)
    stamp = json.loads(prefix.with_name(prefix.name + ".json").read_text())
    assert stamp["about"]["vocabulary_size"] == 256
    assert list(stamp["about"]["inputs"]) == sorted(TEXTS)


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_training_defaults_to_the_same_vocabulary_at_every_tp_size(tp: int) -> None:
    defaults = defaults_for(["--tensor-model-parallel-size", str(tp)])
    assert defaults["tokenizer_type"] == "NullTokenizer"
    assert defaults["vocab_size"] == defaults["padded_vocab_size"] == VOCABULARY_SIZE
    assert defaults["null_tokenizer_eod_id"] == END_OF_DOCUMENT
    assert VOCABULARY_SIZE % tp == 0


@pytest.mark.parametrize("flag", ["--tokenizer-type", "--vocab-size=300", "--padded-vocab-size"])
def test_a_tokenizer_of_the_user_is_left_alone(flag: str) -> None:
    assert defaults_for([flag]) == {"eval_interval": 1000}
    assert defaults_for([flag, "--eval-interval", "5"]) == {}


def test_a_split_without_documents_is_an_error_and_not_an_endless_loop() -> None:
    check_splits([38], ["plays"], "100,0,0", (600, 0, 0))
    check_splits([38], ["plays"], "969,30,1", (600, 12, 0))
    with pytest.raises(ConfigurationError, match=r"969,30,1 gives the test data none of the 38"):
        check_splits([38], ["plays"], "969,30,1", (600, 12, 12))
    with pytest.raises(ConfigurationError, match="training data none of the 1 documents of one"):
        check_splits([38, 1], ["plays", "one"], "40,60,0", (600, 12, 0))
