import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.utils import logging

from benchmarks.slice_checkpoint import write_checkpoint
from benchmarks.slices import Layers, slice_values
from benchmarks.transformers_folder import write_text_folder
from server.kvcache.pools import CachePools
from server.model.config import M3Config, cache_spec
from server.model.m3 import M3Model
from server.model.progress import NoProgress
from tests.paged import paged_case

CPU = torch.device("cpu")


@pytest.mark.parametrize("quantized", [False, True], ids=["plain", "mxfp8"])
def test_the_converted_folder_is_the_same_model(tmp_path, request, quantized):
    logging.set_verbosity_error()
    values = slice_values(request.config.rootpath / "server/model/tiny/config.json", Layers(1, 2), quantized=quantized)
    write_checkpoint(tmp_path / "ours", values, CPU, torch.bfloat16)
    write_text_folder(tmp_path / "ours", tmp_path / "theirs")
    theirs, report = AutoModelForCausalLM.from_pretrained(tmp_path / "theirs", dtype=torch.float32, output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    config = M3Config.from_file(tmp_path / "ours")
    ours = M3Model.load(tmp_path / "ours", config, CPU, torch.float32, progress=NoProgress())
    token_ids = torch.arange(40) * 7 % 1000
    case = paged_case([40], [40], config.text.block_size)
    pools = CachePools(cache_spec(config, torch.float32), case.num_pages, CPU)
    logits = ours.logits(ours.forward(token_ids, case.batch, pools))
    with torch.inference_mode():
        expected = theirs(token_ids[None]).logits[0]
    assert (logits.argmax(-1) == expected.argmax(-1)).float().mean() > 0.9
