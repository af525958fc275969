"""The reference implementation: tiny random MiniMax-M3 checkpoints that transformers builds, saves and runs.

The weights are drawn wide enough that scores, routing and logits are decisive: with the library's own initialisation the
index scores nearly tie, and a test could not tell a right selection from a wrong one.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import MiniMaxM3SparseForConditionalGeneration
from transformers.models.minimax_m3_vl import MiniMaxM3VLConfig
from transformers.utils import logging

from server.model.config import M3Config
from server.model.m3 import M3Model
from server.model.progress import NoProgress
from tests.paged_runner import PagedRunner

IMAGE_TOKEN, VIDEO_TOKEN = 250, 251

# With this seed no index score or router score of the tests comes closer than 5e-5 to its rival for the last place, some twenty
# times the rounding noise, so that both implementations must select the same blocks and experts on any CPU.
SEED = 2


def tiny_config(
    *, block_size: int = 128, topk_blocks: int = 16, num_local_blocks: int = 1, **text: object
) -> MiniMaxM3VLConfig:
    """One dense layer and two sparse ones, two KV heads, four experts, a two-layer vision tower."""
    text_config = {
        "hidden_size": 64,
        "intermediate_size": 32,
        "dense_intermediate_size": 96,
        "shared_intermediate_size": 32,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "rotary_dim": 8,
        "vocab_size": 256,
        "max_position_embeddings": 8192,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "index_n_heads": 2,
        "index_head_dim": 16,
        "index_block_size": block_size,
        "index_topk_blocks": topk_blocks,
        "index_local_blocks": num_local_blocks,
        "layer_types": ["full_attention", "minimax_m3_sparse", "minimax_m3_sparse"],
        "mlp_layer_types": ["dense", "sparse", "sparse"],
        "rope_parameters": {"rope_type": "default", "rope_theta": 5e6, "partial_rotary_factor": 0.5},
        "bos_token_id": 1,
        "eos_token_id": 2,
        **text,
    }
    vision_config = {"hidden_size": 40, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    return MiniMaxM3VLConfig(
        text_config=text_config,
        vision_config=vision_config,
        projector_hidden_size=48,
        image_token_index=IMAGE_TOKEN,
        video_token_index=VIDEO_TOKEN,
    )


def save_checkpoint(config: MiniMaxM3VLConfig, folder: Path, *, seed: int = 0, **save: object) -> None:
    """Draw weights from `seed` and save them in the released layout."""
    logging.disable_progress_bar()
    model = MiniMaxM3SparseForConditionalGeneration(config)
    generator = torch.Generator().manual_seed(seed)
    for name, tensor in model.state_dict().items():
        if name.endswith(("norm.weight", "norm1.weight", "norm2.weight")) or tensor.dim() == 1:
            std = 0.2
        elif "embed_tokens" in name:
            std = 1.0
        else:
            std = 1.5 / tensor[0].numel() ** 0.5
        noise = torch.randn(tensor.shape, generator=generator) * std
        # Plain LayerNorm weights of the tower centre on one; the decoder's Gemma norms on zero.
        centred_on_one = "layer_norm" in name or "layrnorm" in name
        tensor.copy_(noise + 1.0 if centred_on_one and name.endswith("weight") else noise)
    model.save_pretrained(folder, **save)


@dataclass
class Oracle:
    """A checkpoint, the reference that runs it, and ours."""

    folder: Path
    reference: MiniMaxM3SparseForConditionalGeneration
    config: M3Config
    model: M3Model

    @classmethod
    def create(cls, config: MiniMaxM3VLConfig, folder: Path, *, seed: int = 0) -> "Oracle":
        save_checkpoint(config, folder, seed=seed)
        reference = MiniMaxM3SparseForConditionalGeneration.from_pretrained(folder, dtype=torch.float32).eval()
        parsed = M3Config.from_file(folder)
        model = M3Model.load(folder, parsed, torch.device("cpu"), torch.float32, progress=NoProgress())
        return cls(folder, reference, parsed, model)

    @torch.inference_mode()
    def reference_logits(self, token_ids: Sequence[int], **media: Tensor) -> Tensor:
        """The reference's logits at every position of one sequence: [T, vocab]."""
        input_ids = torch.tensor([list(token_ids)], device=self.reference.device)
        return self.reference(input_ids=input_ids, use_cache=False, **media).logits[0].cpu()

    def runner(self, num_pages: int = 64) -> PagedRunner:
        return PagedRunner(self.model, num_pages)
