"""A checkpoint folder is read without running what is in it; what is torn is said."""

from __future__ import annotations

import json
import os
import pickle
import shutil
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.metadata import MetadataIndex

from megatron_muon.checkpoint import files
from megatron_muon.checkpoint.files import (
    check_files,
    checkpoint_format,
    holds_checkpoint,
    iteration_folder,
    iterations,
    rank_folders,
    read_common,
    read_index,
    read_object,
    read_tensor,
)
from megatron_muon.errors import CheckpointError
from megatron_muon.testing.ranks import run_ranks
from tests.unit_tests import inspect_job
from tests.unit_tests.inspect_job import MOMENTUM, NORM, NORM_MEAN, WEIGHT


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Give a folder that Megatron saved on two ranks."""
    folder = tmp_path_factory.mktemp("saved") / "iter_0000007"
    run_ranks(inspect_job.save, 2, inspect_job.Saved(folder=str(folder)))
    return folder


@pytest.fixture
def copy(saved, tmp_path):
    """Give a copy to break."""
    return shutil.copytree(saved, tmp_path / saved.name)


def edit_index(folder, change):
    """Change the index of a checkpoint."""
    path = folder / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    change(metadata)
    path.write_bytes(pickle.dumps(metadata))


def file_of(folder, key):
    """Return the first file in which a key lies, by torch's own reading of the index."""
    storage = pickle.loads((folder / ".metadata").read_bytes()).storage_data
    return next(folder / info.relative_path for piece, info in storage.items() if piece.fqn == key)


class TestAWholeCheckpoint:
    def test_the_index_says_what_was_saved(self, saved):
        index = read_index(saved)
        assert index.tensors.keys() == inspect_job.tensors().keys()
        for key, value in inspect_job.tensors().items():
            stored = index.tensors[key]
            assert (stored.key, stored.shape, stored.dtype) == (
                key,
                tuple(value.shape),
                value.dtype,
            )
            assert stored.nbytes == value.numel() * value.element_size()
        assert index.tensors[WEIGHT].files == ("__0_0.distcp", "__1_0.distcp")
        assert len(index.tensors[NORM].files) == 1
        assert {key.partition("/")[0] for key in index.objects} == {"rng_state", "common_state"}
        check_files(index)

    def test_every_tensor_is_read_to_the_last_bit(self, saved):
        index = read_index(saved)
        for key, value in inspect_job.tensors().items():
            read = read_tensor(index, key)
            assert read.dtype == value.dtype
            assert torch.equal(read, value)

    def test_objects_and_the_common_state_are_read(self, saved):
        index = read_index(saved)
        for rank in range(2):
            (content,) = read_object(index, f"rng_state/shard_0.{rank}_1.2")
            assert content["seed"].tolist() == [3, rank]
        common, expected = read_common(index), inspect_job.common()
        assert common["args"] == expected["args"]
        assert common["optimizer"][0] == expected["optimizer"][0]
        assert not torch.distributed.is_initialized()

    def test_the_common_state_of_older_versions_is_a_file(self, copy):
        index = read_index(copy)
        common = read_common(index)
        torch.save(common | {"iteration": 6}, copy / "common.pt")
        edit_index(copy, forget("common_state"))
        older = read_index(copy)
        check_files(older)
        assert read_common(older)["iteration"] == 6

    def test_what_older_versions_put_in_an_index_is_read(self, copy):
        from megatron.core.dist_checkpointing.strategies.torch import MCoreMetadata
        from torch.distributed._shard.sharded_tensor.metadata import TensorProperties

        def change(metadata):
            metadata.mcore_data = {WEIGHT: MCoreMetadata()}
            metadata.planner_data = {WEIGHT: (WEIGHT,)}
            metadata.storage_meta.checkpoint_id = copy
            metadata.state_dict_metadata[WEIGHT].properties = TensorProperties(torch.bfloat16)

        edit_index(copy, change)
        index = read_index(copy)
        check_files(index)
        assert torch.equal(read_tensor(index, WEIGHT), inspect_job.tensors()[WEIGHT])

    def test_what_is_not_there_is_said(self, saved):
        index = read_index(saved)
        with pytest.raises(CheckpointError, match="no tensor 'absent'"):
            read_tensor(index, "absent")
        with pytest.raises(CheckpointError, match="no object 'absent'"):
            read_object(index, "absent")


def forget(key):
    """Make a change that takes a key out of an index."""

    def change(metadata):
        for name in [n for n in metadata.state_dict_metadata if n.partition("/")[0] == key]:
            del metadata.state_dict_metadata[name]
        for piece in [p for p in metadata.storage_data if p.fqn.partition("/")[0] == key]:
            del metadata.storage_data[piece]

    return change


def lose_piece(metadata):
    """Forget where a piece lies."""
    metadata.storage_data.pop(next(p for p in metadata.storage_data if p.fqn == MOMENTUM))


def lose_chunk(metadata):
    """Forget a piece altogether: what is left does not make up the tensor."""
    chunk = metadata.state_dict_metadata[MOMENTUM].chunks.pop()
    del metadata.storage_data[MetadataIndex(MOMENTUM, chunk.offsets)]


def lose_object(metadata):
    """Forget where an object lies."""
    del metadata.storage_data[MetadataIndex("rng_state/shard_0.1_1.2")]


class TestATornCheckpoint:
    @pytest.mark.parametrize("change", [lose_piece, lose_chunk, lose_object])
    def test_a_piece_without_a_place_is_named(self, copy, change):
        edit_index(copy, change)
        key = "rng_state" if change is lose_object else MOMENTUM
        with pytest.raises(CheckpointError, match=rf"where all pieces lie of {key}"):
            check_files(read_index(copy))

    def test_a_missing_file_is_named_with_its_keys(self, copy):
        path = file_of(copy, NORM_MEAN)
        path.unlink()
        with pytest.raises(CheckpointError) as caught:
            check_files(read_index(copy))
        assert (
            f"1 of 2 files are not as .metadata says: {path.name} is missing (" in f"{caught.value}"
        )

    def test_a_file_that_lacks_its_last_byte_is_named_with_the_key_there(self, copy):
        storage = pickle.loads((copy / ".metadata").read_bytes()).storage_data
        last, info = max(
            ((p, i) for p, i in storage.items() if i.relative_path == "__1_0.distcp"),
            key=lambda item: item[1].offset,
        )
        end = info.offset + info.length
        os.truncate(copy / "__1_0.distcp", end - 1)
        with pytest.raises(CheckpointError) as caught:
            check_files(read_index(copy))
        said = f"__1_0.distcp has {end - 1:,} bytes, expected {end:,} ({last.fqn})"
        assert said in f"{caught.value}"

    def test_a_file_as_long_as_the_index_says_is_enough(self, copy):
        storage = pickle.loads((copy / ".metadata").read_bytes()).storage_data.values()
        for path in copy.glob("*.distcp"):
            ends = [i.offset + i.length for i in storage if i.relative_path == path.name]
            assert path.stat().st_size == max(ends)

    @pytest.mark.parametrize("share", [0.0, 0.3, 0.99])
    def test_an_index_cut_off_is_said(self, copy, share):
        path = copy / ".metadata"
        os.truncate(path, int(path.stat().st_size * share))
        with pytest.raises(CheckpointError, match=r"\.metadata: .* torn or foreign.*earlier"):
            read_index(copy)

    def test_a_missing_index_is_said(self, copy):
        (copy / ".metadata").unlink()
        with pytest.raises(CheckpointError, match=r"\.metadata: .*missing.* __0_0\.distcp"):
            read_index(copy)

    @pytest.mark.parametrize(
        ("content", "said"),
        [
            (None, "it is missing, and a save writes it last"),
            ("", "it is torn"),
            ('{"sharded_backend": "torch_d', "it is torn"),
            ("[]", "it is torn"),
            ('{"sharded_backend": "zarr"}', "'zarr', expected 'torch_dist'"),
        ],
    )
    def test_the_last_file_of_a_save_is_asked_for(self, copy, content, said):
        (copy / "metadata.json").unlink()
        if content is not None:
            (copy / "metadata.json").write_text(content)
        with pytest.raises(CheckpointError, match=f"metadata.json: .*{said}"):
            check_files(read_index(copy))

    def test_a_missing_common_state_is_said(self, copy):
        edit_index(copy, forget("common_state"))
        with pytest.raises(CheckpointError, match="no common state"):
            check_files(read_index(copy))

    def test_bytes_that_are_no_tensor_are_said_where_they_are_read(self, copy):
        index = read_index(copy)
        path = file_of(copy, NORM)
        path.write_bytes(bytes(path.stat().st_size))
        check_files(index)
        with pytest.raises(CheckpointError, match=f"{path.name}: '{NORM}' cannot be read"):
            read_tensor(index, NORM)

    def test_a_piece_of_another_shape_is_said(self, copy):
        def change(metadata):
            places = [p for p in metadata.storage_data if p.fqn in (NORM, NORM_MEAN, WEIGHT)]
            wrong = next(p for p in places if p.fqn == WEIGHT)
            metadata.storage_data[MetadataIndex(NORM, torch.Size((0,)))] = metadata.storage_data[
                wrong
            ]

        edit_index(copy, change)
        with pytest.raises(CheckpointError, match=f"piece of '{NORM}'.*not the tensor of shape"):
            read_tensor(read_index(copy), NORM)

    def test_an_encoding_that_is_not_known_is_said(self, copy):
        def change(metadata):
            for info in metadata.storage_data.values():
                info.transform_descriptors = ("zstd",)

        edit_index(copy, change)
        with pytest.raises(CheckpointError, match="encoded with zstd"):
            read_tensor(read_index(copy), NORM)


class Runs:
    """A pickle that makes a folder when it is loaded."""

    def __init__(self, path, call=os.mkdir):
        self.path, self.call = path, call

    def __reduce__(self):
        return self.call, (self.path,)


class TestAForeignCheckpoint:
    def test_an_index_that_runs_code_does_not_run_it(self, copy, tmp_path):
        mark = tmp_path / "ran"

        def change(metadata):
            metadata.planner_data = Runs(str(mark))

        edit_index(copy, change)
        with pytest.raises(
            CheckpointError, match=r"it names (posix|nt)\.mkdir, which no index needs"
        ):
            read_index(copy)
        assert not mark.exists()
        pickle.loads((copy / ".metadata").read_bytes())
        assert mark.exists()

    @pytest.mark.parametrize(
        ("module", "name"),
        [
            ("builtins", "eval"),
            ("builtins", "getattr"),
            ("os", "system"),
            ("torch", "load"),
            ("torch", "os.system"),
            ("torch", "float32.__class__"),
            ("torch.serialization", "load"),
            ("torch.distributed.checkpoint.metadata", "os.system"),
            ("torch.distributed.checkpoint.filesystem", "FileSystem"),
            ("collections", "OrderedDict.fromkeys"),
            ("megatron.core.dist_checkpointing.strategies.torch", "os"),
            ("pathlib", "os"),
        ],
    )
    def test_no_other_name_can_be_reached(self, copy, module, name):
        words = b"".join(b"\x8c" + len(word).to_bytes(1) + word.encode() for word in (module, name))
        (copy / ".metadata").write_bytes(b"\x80\x04" + words + b"\x93.")
        with pytest.raises(CheckpointError, match="which no index needs"):
            read_index(copy)

    def test_data_that_runs_code_does_not_run_it(self, copy, tmp_path):
        mark = tmp_path / "ran"
        torch.save({"iteration": Runs(str(mark))}, copy / "common.pt")
        edit_index(copy, forget("common_state"))
        with pytest.raises(CheckpointError, match=r"common\.pt: it cannot be read"):
            read_common(read_index(copy))
        assert not mark.exists()
        torch.load(copy / "common.pt", weights_only=False)
        assert mark.exists()

    def test_an_object_that_runs_code_does_not_run_it(self, copy, tmp_path):
        mark = tmp_path / "ran"
        torch.save([Runs(str(mark))], copy / "__9_0.distcp")

        def change(metadata):
            info = metadata.storage_data[MetadataIndex("rng_state/shard_0.0_1.2")]
            info.relative_path, info.offset = "__9_0.distcp", 0
            info.length = (copy / "__9_0.distcp").stat().st_size

        edit_index(copy, change)
        with pytest.raises(CheckpointError, match=r"'rng_state/shard_0\.0_1\.2' cannot be read"):
            read_object(read_index(copy), "rng_state/shard_0.0_1.2")
        assert not mark.exists()

    @pytest.mark.parametrize("name", ["../secret", "/etc/passwd", "a/b", ".."])
    def test_an_index_names_files_of_its_own_folder_alone(self, copy, name):
        def change(metadata):
            for info in metadata.storage_data.values():
                info.relative_path = name

        edit_index(copy, change)
        index = read_index(copy)
        with pytest.raises(CheckpointError, match="outside its folder"):
            check_files(index)
        with pytest.raises(CheckpointError, match="outside its folder"):
            read_tensor(index, NORM)

    @pytest.mark.parametrize("content", [None, [], {"state_dict_metadata": {}}, "text"])
    def test_another_pickle_is_no_index(self, copy, content):
        (copy / ".metadata").write_bytes(pickle.dumps(content))
        with pytest.raises(CheckpointError, match="torn or foreign: it is no index"):
            read_index(copy)


class TestTheFolder:
    @pytest.fixture
    def folder(self, tmp_path):
        for name in ("iter_0000005", "iter_0000010", "release"):
            (tmp_path / name).mkdir()
        (tmp_path / files.TRACKER).write_text("5")
        return tmp_path

    @pytest.mark.parametrize(
        ("text", "name"),
        [("5", "iter_0000005"), (" 10\n", "iter_0000010"), ("release", "release")],
    )
    def test_the_tracker_names_the_iteration(self, folder, text, name):
        (folder / files.TRACKER).write_text(text)
        assert iteration_folder(folder) == folder / name

    @pytest.mark.parametrize("name", ["iter_0000010", "release"])
    def test_an_iteration_can_be_named_itself(self, folder, name):
        assert iteration_folder(folder / name) == folder / name

    def test_a_checkpoint_can_have_any_name(self, saved, tmp_path):
        assert iteration_folder(shutil.copytree(saved, tmp_path / "best")) == tmp_path / "best"
        (tmp_path / "ranks" / "mp_rank_00").mkdir(parents=True)
        assert iteration_folder(tmp_path / "ranks") == tmp_path / "ranks"

    @pytest.mark.parametrize("text", ["", "1x", "-5", "5.0", "iter_0000005", "5\n6", "²"])
    def test_a_torn_tracker_is_said(self, folder, text):
        (folder / files.TRACKER).write_text(text)
        with pytest.raises(CheckpointError, match=r"expected an iteration's number.*iter_0000010"):
            iteration_folder(folder)

    def test_a_missing_tracker_is_said(self, folder):
        (folder / files.TRACKER).unlink()
        with pytest.raises(
            CheckpointError, match=f"no {files.TRACKER}.*iter_0000005, iter_0000010"
        ):
            iteration_folder(folder)
        assert not holds_checkpoint(folder)  # which are empty

    def test_what_is_whole_is_a_checkpoint_without_a_tracker_too(self, saved, tmp_path):
        whole = Path(shutil.copytree(saved, tmp_path / "iter_0000007"))
        (tmp_path / "iter_0000003").mkdir()
        assert iterations(tmp_path) == ["iter_0000003", "iter_0000007"]
        assert holds_checkpoint(tmp_path)
        for last in (files.CONFIG, files.INDEX):
            (whole / last).rename(tmp_path / last)
            assert not holds_checkpoint(tmp_path)
            (tmp_path / last).rename(whole / last)
        (tmp_path / files.TRACKER).write_text("3")
        (whole / files.CONFIG).unlink()
        assert holds_checkpoint(tmp_path)

    def test_files_of_ranks_are_whole_if_all_have_their_end(self, tmp_path):
        rank_files = []
        for rank in range(2):
            folder = tmp_path / "iter_0000003" / f"mp_rank_{rank:02d}"
            folder.mkdir(parents=True)
            rank_files.append(folder / files.RANK_FILE)
            assert not holds_checkpoint(tmp_path)
            torch.save({"rank": torch.ones(rank + 1)}, rank_files[-1])
            assert holds_checkpoint(tmp_path)
        os.truncate(rank_files[1], rank_files[1].stat().st_size // 2)
        assert not holds_checkpoint(tmp_path)

    def test_an_iteration_that_is_not_there_is_said(self, folder):
        (folder / files.TRACKER).write_text("15")
        with pytest.raises(CheckpointError, match=r"names iter_0000015, which is not there.*iter_"):
            iteration_folder(folder)

    def test_an_empty_or_absent_folder_is_said(self, tmp_path):
        with pytest.raises(CheckpointError, match="holds no iter_XXXXXXX folder"):
            iteration_folder(tmp_path)
        with pytest.raises(CheckpointError, match="no such folder"):
            iteration_folder(tmp_path / "absent")
        assert not holds_checkpoint(tmp_path)
        assert not holds_checkpoint(tmp_path / "absent")

    def test_the_format_is_told_apart(self, saved, tmp_path):
        assert checkpoint_format(saved) == "torch_dist"
        with pytest.raises(CheckpointError, match=r"no checkpoint of --ckpt-format.*holds nothing"):
            checkpoint_format(tmp_path)
        for name in ("mp_rank_00_001", "mp_rank_01_000", "mp_rank_00_000", "other"):
            (tmp_path / name).mkdir()
            for file in ("layer_wise_optimizer_0.pt", "model_optim_rng.pt"):
                (tmp_path / name / file).touch()
        assert checkpoint_format(tmp_path) == "torch"
        found = rank_folders(tmp_path)
        assert [rank.path.name for rank in found] == [
            "mp_rank_00_000",
            "mp_rank_00_001",
            "mp_rank_01_000",
        ]
        assert [rank.tensor_rank for rank in found] == [0, 0, 1]
        assert found[0].files == ("model_optim_rng.pt", "layer_wise_optimizer_0.pt")
        with pytest.raises(CheckpointError, match="is of --ckpt-format torch and has no index"):
            read_index(tmp_path)

    def test_what_a_save_writes_last_is_what_is_asked_for(self, saved):
        assert json.loads((saved / files.CONFIG).read_text())["sharded_backend"] == "torch_dist"
