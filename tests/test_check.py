"""`m3-server check`: sound checkpoints pass, and every fault is found with its name, several at a time."""

import json
import shutil
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from server.check.report import check
from server.cli import main
from server.model.checkpoint import INDEX_FILE, SINGLE_FILE
from server.model.config import RELEASED_DIR, M3Config
from server.model.quantization import Quantization
from server.model.shard import Shard
from server.model.weights import parameters
from tests.model.quantised import RELEASED_IGNORED, quantise_checkpoint

TINY = RELEASED_DIR.parent / "tiny"
LFS_POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:0000\nsize 1066328\n"
ROUTER = "language_model.model.layers.1.block_sparse_moe.gate.weight"
STORED_BYTES = {"BF16": 2, "F32": 4, "F8_E4M3": 1, "U8": 1}


@pytest.fixture
def folder(tmp_path):
    """A copy of the bundled checkpoint to damage."""
    return shutil.copytree(TINY, tmp_path / "model")


def errors(folder):
    return {f"{finding.area.value}: {finding.text}" for finding in check(folder).findings if finding.level.value == "error"}


def warnings(folder):
    return {f"{finding.area.value}: {finding.text}" for finding in check(folder).findings if finding.level.value == "warning"}


def edit_json(path, change):
    values = json.loads(path.read_text())
    change(values)
    path.write_text(json.dumps(values))


def edit_tensors(folder, change):
    tensors = load_file(folder / SINGLE_FILE)
    change(tensors)
    save_file(tensors, folder / SINGLE_FILE)


def added_token(tokenizer, text):
    return next(token for token in tokenizer["added_tokens"] if token["content"] == text)


def write_released_layout(folder, config, types, num_files):
    """The headers of a checkpoint as large as the released one; the data are holes."""
    pieces = {piece.name: piece for parameter in parameters(config, Shard()) for piece in parameter.stored}
    weight_map, total_bytes = {}, 0
    for i in range(num_files):
        name, header, end = f"model-{i}.safetensors", {}, 0
        for piece in list(pieces.values())[i::num_files]:
            size = torch.Size(piece.shape).numel() * STORED_BYTES[types(piece)]
            header[piece.name] = {"dtype": types(piece), "shape": list(piece.shape), "data_offsets": [end, end + size]}
            weight_map[piece.name] = name
            end += size
        raw = json.dumps(header).encode()
        raw += b" " * (-len(raw) % 8)
        with (folder / name).open("wb") as file:
            file.write(len(raw).to_bytes(8, "little") + raw)
            file.truncate(8 + len(raw) + end)
        total_bytes += end
    (folder / INDEX_FILE).write_text(json.dumps({"metadata": {"total_size": total_bytes + 1}, "weight_map": weight_map}))


def released_type(piece):
    fp32 = ("gate.weight", "e_score_correction_bias", "patch_embedding.weight")
    if piece.types[0] in ("F8_E4M3", "U8"):
        return piece.types[0]
    return "F32" if piece.name.endswith(fp32) else "BF16"


def test_the_bundled_checkpoint_is_sound(capsys):
    assert main(["check", str(TINY)]) == 0
    said = capsys.readouterr().out
    assert "BF16, 180 tensors" in said
    assert said.endswith("the checkpoint can be served\n")


def test_machines_read_everything(folder, capsys):
    edit_tensors(folder, lambda tensors: [tensors.pop(name) for name in list(tensors) if ".experts." in name])
    assert main(["check", str(folder), "--json"]) == 1
    answer = json.loads(capsys.readouterr().out)
    assert answer["ok"] is False
    assert answer["summary"] is None
    num_missing = sum(finding["text"].startswith("missing tensors: ") for finding in answer["findings"])
    assert num_missing == 3 * 8 * 3
    assert main(["check", str(folder)]) == 1
    assert f"error: tensors: and {num_missing - 20} more" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("mxfp8", "num_tensors", "num_bytes"), [(False, 23_416, 854_172_958_720), (True, 45_838, 443_742_085_120)]
)
def test_the_released_layouts_are_sound_but_for_what_is_missing(tmp_path, mxfp8, num_tensors, num_bytes):
    config = M3Config.from_file(RELEASED_DIR)
    if mxfp8:
        config = replace(config, quantization=Quantization(ignored_layers=()))
    write_released_layout(tmp_path, config, released_type, num_files=4)
    settings = {"quant_method": "mxfp8", "weight_block_size": [1, 32], "ignored_layers": RELEASED_IGNORED}
    values = json.loads((RELEASED_DIR / "config.json").read_text()) | ({"quantization_config": settings} if mxfp8 else {})
    (tmp_path / "config.json").write_text(json.dumps(values))
    report = check(tmp_path)
    assert not [finding for finding in report.findings if finding.area.value in ("config", "tensors")]
    assert (report.summary.num_tensors, report.summary.num_bytes, report.summary.num_files) == (num_tensors, num_bytes, 4)
    assert report.summary.format == ("mxfp8" if mxfp8 else "BF16")
    assert report.summary.window == 1_048_576


def test_a_quantised_checkpoint_is_sound_and_its_faults_are_named(folder, tmp_path):
    mxfp8 = tmp_path / "mxfp8"
    quantise_checkpoint(folder, mxfp8, tmp_path / "restored")
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json", "chat_template.jinja"):
        shutil.copy(folder / name, mxfp8)
    assert check(mxfp8).summary.format == "mxfp8"
    assert errors(mxfp8) == set()
    scales = "language_model.model.layers.1.self_attn.q_proj.weight_scale_inv"
    edit_tensors(mxfp8, lambda tensors: tensors.pop(scales))
    assert errors(mxfp8) == {f"tensors: missing tensors: {scales}"}


@pytest.mark.parametrize(
    ("change", "finding"),
    [
        (lambda folder: (folder / SINGLE_FILE).unlink(), f"tensors: missing files: {SINGLE_FILE}"),
        (
            lambda folder: (folder / SINGLE_FILE).write_text(LFS_POINTER),
            f"tensors: Git-LFS pointers instead of files: {SINGLE_FILE}",
        ),
        (
            lambda folder: edit_tensors(
                folder, lambda tensors: tensors.update({ROUTER: torch.zeros(8, 128, dtype=torch.uint8)})
            ),
            f"tensors: tensors of an unsupported type: {ROUTER} U8",
        ),
        (
            lambda folder: edit_tensors(folder, lambda tensors: tensors.update({ROUTER: torch.zeros(8, 64)})),
            f"tensors: tensors of the wrong shape: {ROUTER} [8, 64] instead of [8, 128]",
        ),
        (
            lambda folder: (folder / "tokenizer.json").write_text(LFS_POINTER),
            "tokenizer: tokenizer.json is a Git-LFS pointer instead of the file",
        ),
        (
            lambda folder: edit_json(
                folder / "tokenizer.json", lambda values: values["added_tokens"].remove(added_token(values, "<mm:think>"))
            ),
            "tokenizer: no special token <mm:think>",
        ),
        (
            lambda folder: edit_json(folder / "config.json", lambda values: values.update(image_token_index=1327)),
            "tokenizer: ]<]image[>[ has the id 1325, in config.json 1327",
        ),
        (
            lambda folder: edit_json(folder / "config.json", lambda values: values["text_config"].update(vocab_size=1350)),
            "tokenizer: 1361 ids, but the config's vocabulary has 1350",
        ),
        (
            lambda folder: edit_json(folder / "generation_config.json", lambda values: values.update(eos_token_id=1319)),
            "generation config: eos_token_id [1319] lacks 1320, the id of [e~[",
        ),
        (
            lambda folder: (folder / "generation_config.json").unlink(),
            "generation config: generation_config.json names no eos_token_id",
        ),
        (
            lambda folder: edit_json(folder / "generation_config.json", lambda values: values.update(top_p=2)),
            "generation config: generation_config.json: temperature, top_p or top_k is out of range",
        ),
        (
            lambda folder: (folder / "chat_template.jinja").write_text("{% if %}"),
            "chat template: chat template, line 1: Expected an expression, got 'end of statement block'",
        ),
        (
            lambda folder: (folder / "preprocessor_config.json").write_text('{"patch_size": 16}'),
            "preprocessor config: preprocessor_config.json: patch_size is 16, the server uses 14",
        ),
    ],
)
def test_a_fault_is_named(folder, change, finding):
    change(folder)
    assert finding in errors(folder)
    assert main(["check", str(folder)]) == 1


def test_a_missing_shard(folder):
    tensors = load_file(folder / SINGLE_FILE)
    (folder / SINGLE_FILE).unlink()
    names = sorted(tensors)
    files = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, part in files.items():
        save_file({name: tensors[name] for name in part}, folder / file)
    weight_map = {name: file for file, part in files.items() for name in part}
    (folder / INDEX_FILE).write_text(json.dumps({"weight_map": weight_map}))
    assert errors(folder) == set()
    (folder / "b.safetensors").unlink()
    assert errors(folder) == {"tensors: missing files: b.safetensors"}


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"model": {"type": "BPE", "vocab": {"a": 0}}, "added_tokens": []}'])
def test_a_broken_tokenizer_is_one_finding_of_its_own(folder, content):
    (folder / "tokenizer.json").write_text(content)
    assert [text.split(":")[0] for text in errors(folder)] == ["tokenizer"]


def test_a_vocabulary_that_the_library_cannot_load(folder):
    edit_json(folder / "tokenizer.json", lambda values: values["model"].update(merges=["no such"]))
    assert [text.split(":")[0] for text in errors(folder)] == ["tokenizer"]


def test_a_template_that_is_missing(folder):
    (folder / "chat_template.jinja").unlink()
    assert {text.split(":")[0] for text in errors(folder)} == {"chat template"}


@pytest.mark.parametrize(
    ("source", "finding"),
    [
        ("{{ raise_exception('no tools here') }}", "refused the conversation: no tools here"),
        ("{{ messages.nothing.at_all }}", "could not be rendered"),
        ("{{ ''.__class__.__mro__ }}", "could not be rendered"),
        ("{{ messages[0].content }}", "does not place every picture"),
        ("]<]image[>[ and nothing else", "leaves 'How deep is this lake?' of a conversation out"),
    ],
)
def test_a_template_that_cannot_write_the_sample(folder, source, finding):
    (folder / "chat_template.jinja").write_text(source)
    found = errors(folder)
    assert len({text for text in found if finding in text}) == 3  # modes of thinking
    assert {text.split(":")[0] for text in found} == {"chat template"}


def test_the_released_vocabulary_has_the_released_ids(folder):
    edit_json(folder / "config.json", lambda values: values["text_config"].update(vocab_size=200_064))
    assert "tokenizer: ]~b] has the id 1319, in the released model 200019" in errors(folder)


def test_a_special_token_that_nothing_uses_may_be_missing(folder):
    unused = "]<]vision pad[>["
    edit_json(folder / "tokenizer.json", lambda values: values["added_tokens"].remove(added_token(values, unused)))
    assert errors(folder) == set()
    assert warnings(folder) == {f"tokenizer: no special token {unused}"}


def test_a_rounded_router_is_a_warning(folder):
    tensors = load_file(folder / SINGLE_FILE)
    edit_tensors(folder, lambda tensors: tensors.update({ROUTER: tensors[ROUTER].bfloat16()}))
    assert tensors[ROUTER].dtype == torch.float32
    assert errors(folder) == set()
    assert warnings(folder) == {
        f"tensors: stored with less precision than the model keeps it: {ROUTER} BF16 instead of F32",
    }
    assert main(["check", str(folder)]) == 0


def test_other_picture_sizes_are_a_warning(folder):
    released = {"min_pixels": 3136, "max_pixels": 451_584, "patch_size": 14, "image_mean": [0.48145466, 0.4578275, 0.40821073]}
    (folder / "preprocessor_config.json").write_text(json.dumps(released))
    assert warnings(folder) == set()
    (folder / "preprocessor_config.json").write_text(json.dumps(released | {"max_pixels": 1_000_000}))
    assert warnings(folder) == {"preprocessor config: preprocessor_config.json: max_pixels is 1000000, the server uses 451584"}


def test_faults_of_all_kinds_are_found_together(folder):
    (folder / SINGLE_FILE).unlink()
    (folder / "tokenizer.json").unlink()
    (folder / "generation_config.json").write_text("{")
    (folder / "chat_template.jinja").unlink()
    areas = {text.split(":")[0] for text in errors(folder)}
    assert areas == {"tensors", "tokenizer", "generation config", "chat template"}


def test_an_empty_folder(tmp_path):
    assert "config: config.json cannot be read: No such file or directory" in errors(tmp_path)
