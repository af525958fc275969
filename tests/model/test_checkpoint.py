import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from server.model.checkpoint import INDEX_FILE, SINGLE_FILE, CheckpointError, verify
from server.model.config import M3Config
from server.model.loader import load_parameters
from server.model.progress import NoProgress
from server.model.shard import Shard
from server.model.weights import parameters
from tests.oracle import save_checkpoint, tiny_config

CPU = torch.device("cpu")
NORM = "language_model.model.norm.weight"
ROUTER = "language_model.model.layers.1.block_sparse_moe.gate.weight"
LFS_POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:0000\nsize 1066328\n"


@pytest.fixture(scope="session")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoint")
    save_checkpoint(tiny_config(), folder)
    return folder


@pytest.fixture
def folder(saved, tmp_path):
    """A copy to damage."""
    return shutil.copytree(saved, tmp_path / "model")


@pytest.fixture
def sharded(tmp_path):
    """The same checkpoint in several files with an index."""
    save_checkpoint(tiny_config(), tmp_path / "sharded", max_shard_size="200KB")
    assert not (tmp_path / "sharded" / SINGLE_FILE).exists()
    return tmp_path / "sharded"


def wanted(folder, shard=None):
    return parameters(M3Config.from_file(folder), shard or Shard())


def load(folder, shard=None, dtype=torch.float32, progress=None):
    return load_parameters(folder, wanted(folder, shard), CPU, dtype, progress or NoProgress())


def rewrite(folder, change):
    tensors = load_file(folder / SINGLE_FILE)
    change(tensors)
    save_file(tensors, folder / SINGLE_FILE)


def failure(folder):
    with pytest.raises(CheckpointError) as raised:
        verify(folder, wanted(folder))
    return str(raised.value)


def test_parameters_are_filled_with_the_released_tensors(saved):
    released, ours = load_file(saved / SINGLE_FILE), load(saved)
    prefix = "language_model.model.layers.1"
    attention = [f"{prefix}.self_attn.{name}_proj.weight" for name in ("q", "k", "v", "index_q", "index_k")]
    assert torch.equal(ours["layers.1.qkv"], torch.cat([released[name] for name in attention]))
    expert = f"{prefix}.block_sparse_moe.experts.3"
    assert torch.equal(ours["layers.1.w13"][3], torch.cat([released[f"{expert}.w1.weight"], released[f"{expert}.w3.weight"]]))
    assert torch.equal(ours["layers.1.w2"][3], released[f"{expert}.w2.weight"])
    assert sum(tensor.numel() for tensor in ours.values()) == sum(tensor.numel() for tensor in released.values())


def test_an_indexed_checkpoint_loads_like_a_single_file(saved, sharded):
    whole, parts = load(saved), load(sharded)
    assert whole.keys() == parts.keys()
    assert all(torch.equal(whole[name], parts[name]) for name in whole)


def test_router_and_patch_projection_stay_fp32(saved):
    ours = load(saved, dtype=torch.bfloat16)
    fp32 = {name for name, tensor in ours.items() if tensor.dtype == torch.float32}
    assert fp32 == {"vision.patch"} | {f"layers.{i}.{name}" for i in (1, 2) for name in ("router", "correction_bias")}
    assert torch.equal(ours["layers.1.router"], load_file(saved / SINGLE_FILE)[ROUTER])


def test_the_total_of_the_index_is_not_believed(saved, sharded):
    index = json.loads((sharded / INDEX_FILE).read_text())
    index["metadata"]["total_size"] += 14_984_738_304
    (sharded / INDEX_FILE).write_text(json.dumps(index))
    assert load(sharded).keys() == load(saved).keys()


def test_progress_sees_every_byte_once(saved):
    class Counter(NoProgress):
        total = read = 0

        def start(self, total_bytes):
            self.total = total_bytes

        def advance(self, num_bytes):
            self.read += num_bytes

    counter = Counter()
    load(saved, progress=counter)
    assert counter.read == counter.total == sum(t.numel() * 4 for t in load_file(saved / SINGLE_FILE).values())


def test_draft_modules_are_left_alone(folder):
    rewrite(folder, lambda tensors: tensors.update({"language_model.model.mtp.layers.0.enorm.weight": torch.zeros(4)}))
    assert load(folder)


def test_missing_unexpected_misshapen_and_untyped_tensors_are_reported_together(folder):
    def damage(tensors):
        del tensors[NORM]
        tensors["language_model.model.layers.1.self_attn.index_v_proj.weight"] = torch.zeros(2)
        tensors["language_model.lm_head.weight"] = torch.zeros(256, 32)
        tensors[ROUTER] = torch.zeros(4, 64, dtype=torch.uint8)

    rewrite(folder, damage)
    message = failure(folder)
    assert f"1 missing tensors: {NORM}" in message
    assert "1 unexpected tensors: language_model.model.layers.1.self_attn.index_v_proj.weight" in message
    assert "1 tensors of the wrong shape: language_model.lm_head.weight [256, 32] instead of [256, 64]" in message
    assert f"1 tensors of an unsupported type: {ROUTER} U8" in message


def test_a_long_list_is_cut(folder):
    def damage(tensors):
        for name in [name for name in tensors if ".experts." in name]:
            del tensors[name]

    rewrite(folder, damage)
    message = failure(folder)
    assert "24 missing tensors" in message
    assert "and 19 more" in message
    assert len(message) < 800


def test_a_truncated_file(folder):
    path = folder / SINGLE_FILE
    path.write_bytes(path.read_bytes()[:-1])
    size = path.stat().st_size
    assert failure(folder).endswith(f"1 truncated files: {SINGLE_FILE} ({size} of {size + 1} bytes)")


@pytest.mark.parametrize("num_bytes", [0, 3, 8, 500])
def test_a_file_cut_inside_its_header(folder, num_bytes):
    path = folder / SINGLE_FILE
    path.write_bytes(path.read_bytes()[:num_bytes])
    assert f"{SINGLE_FILE}" in failure(folder)


def test_a_git_lfs_pointer(folder):
    (folder / SINGLE_FILE).write_text(LFS_POINTER)
    assert failure(folder).endswith(f"1 Git-LFS pointers instead of files: {SINGLE_FILE}")


@pytest.mark.parametrize("content", [b"PK\x03\x04" + b"\x00" * 100, b"\x02" + b"\x00" * 7 + b"[]", b"\xff" * 64])
def test_a_file_of_another_kind(folder, content):
    (folder / SINGLE_FILE).write_bytes(content)
    assert SINGLE_FILE in failure(folder)


def test_bytes_behind_the_last_tensor(folder):
    with (folder / SINGLE_FILE).open("ab") as file:
        file.write(b"\x00")
    assert failure(folder).endswith(f"1 files that are not safetensors: {SINGLE_FILE}")


def test_no_files_at_all(folder):
    (folder / SINGLE_FILE).unlink()
    assert failure(folder).endswith(f"1 missing files: {SINGLE_FILE}")


def test_several_bad_files_of_an_index_are_reported_together_and_without_their_tensors(sharded):
    first, second, third = sorted(path.name for path in sharded.glob("*.safetensors"))[:3]
    (sharded / first).unlink()
    (sharded / second).write_text(LFS_POINTER)
    (sharded / third).write_bytes((sharded / third).read_bytes()[:-10])
    message = failure(sharded)
    assert f"1 missing files: {first}" in message
    assert f"1 Git-LFS pointers instead of files: {second}" in message
    assert f"1 truncated files: {third}" in message
    assert "missing tensors" not in message


def test_a_tensor_that_the_index_places_in_a_file_without_it(sharded):
    index = json.loads((sharded / INDEX_FILE).read_text())
    other = next(name for name in index["weight_map"].values() if name != index["weight_map"][NORM])
    index["weight_map"][NORM] = other
    (sharded / INDEX_FILE).write_text(json.dumps(index))
    assert failure(sharded).endswith(f"1 missing tensors: {NORM}")


def test_of_a_tensor_in_two_files_the_index_decides_which_counts(sharded):
    index = json.loads((sharded / INDEX_FILE).read_text())["weight_map"]
    others = sorted(set(index.values()) - {index[NORM]})
    for other in others:
        tensors = load_file(sharded / other)
        save_file(tensors | {NORM: torch.full((64,), 9.0)}, sharded / other)
    assert len(others) > 1
    assert not (load(sharded)["norm"] == 9.0).any()


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (LFS_POINTER, "Git-LFS pointers"),
        ("{", "unreadable files"),
        ('{"weight_map": []}', "unreadable files"),
        ('{"weight_map": {"a": "../secret.safetensors"}}', "files outside the folder"),
    ],
)
def test_a_bad_index(sharded, content, complaint):
    (sharded / INDEX_FILE).write_text(content)
    assert complaint in failure(sharded)


def test_nothing_is_allocated_for_a_bad_checkpoint(folder, monkeypatch):
    (folder / SINGLE_FILE).write_text(LFS_POINTER)

    def refuse(*args, **kwargs):
        raise AssertionError("allocated")

    monkeypatch.setattr(torch, "empty", refuse)
    with pytest.raises(CheckpointError):
        load(folder)
