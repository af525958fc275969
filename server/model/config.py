"""What a MiniMax-M3 `config.json` says, in one vocabulary.

Reads the released file and the spellings that re-saved checkpoints use. A setting that the model code does not implement is
refused by name; so is a file that leaves out which layers are sparse, because a guess would silently serve another model.
"""

import json
from dataclasses import dataclass
from pathlib import Path

import torch

from server.kvcache.pools import CacheSpec
from server.model.config_reader import ConfigError, Problems, Section
from server.model.quantization import Quantization, read_quantization
from server.model.shard import Shard
from server.model.text_config import TextConfig, read_text_config
from server.model.vision_config import VisionConfig, read_vision_config

__all__ = ["RELEASED_DIR", "ConfigError", "M3Config", "TextConfig", "VisionConfig", "cache_spec"]

RELEASED_DIR = Path(__file__).parent / "released"  # config.json of MiniMaxAI/MiniMax-M3; its list of picture grids is shortened


@dataclass(frozen=True)
class M3Config:
    """Everything the model code needs to know; `vision` is None for a text-only checkpoint, `quantization` without one."""

    text: TextConfig
    vision: VisionConfig | None
    image_token_id: int
    video_token_id: int
    quantization: Quantization | None = None

    @classmethod
    def from_file(cls, model_dir: Path) -> "M3Config":
        """Read `config.json` of a checkpoint folder.

        Raises:
            ConfigError: the file is absent, not JSON, or lacks or sets something that cannot be served; names all such keys.
        """
        try:
            values = json.loads((model_dir / "config.json").read_text(encoding="utf-8"))
        except OSError as error:
            raise ConfigError(f"config.json cannot be read: {error.strerror}") from error
        except ValueError as error:
            raise ConfigError(f"config.json is not valid JSON: {error}") from error
        if not isinstance(values, dict):
            raise ConfigError("config.json must hold an object")
        return _read(Section(values, Problems()))


def cache_spec(config: M3Config, dtype: torch.dtype, shard: Shard | None = None) -> CacheSpec:
    """The shape of one rank's cache pages."""
    text = config.text
    kv_heads = (shard or Shard()).kv_heads(text.num_kv_heads)
    return CacheSpec(
        layer_is_sparse=text.layer_is_sparse,
        num_kv_heads=kv_heads.stop - kv_heads.start,
        head_dim=text.head_dim,
        index_dim=text.index_dim,
        page_size=text.block_size,
        dtype=dtype,
    )


def _read(root: Section) -> M3Config:
    problems = root.problems
    root.supports("model_type", ["minimax_m3_vl"])
    root.supports("tie_word_embeddings", [False])
    root.supports("num_reward_heads", [0])
    root.supports("projector_hidden_act", ["gelu"])
    root.supports("multimodal_projector_bias", [True])
    root.supports("vision_feature_layer", [-1])
    root.supports("vision_feature_select_strategy", ["full"])
    quantization = read_quantization(root)
    section = root.section("text_config")
    if section is None:
        root.missing("text_config")
    problems.raise_if_any("config.json")
    assert section is not None
    text = read_text_config(section)
    vision_section = root.section("vision_config")
    vision = read_vision_config(vision_section, root.integer("projector_hidden_size")) if vision_section else None
    config = M3Config(
        text=text,
        vision=vision,
        image_token_id=root.integer("image_token_id", "image_token_index"),
        video_token_id=root.integer("video_token_id", "video_token_index"),
        quantization=quantization,
    )
    for name, token_id in (("image_token_index", config.image_token_id), ("video_token_index", config.video_token_id)):
        if vision and token_id >= text.vocab_size:
            problems.add(name, f"{token_id} is outside the vocabulary of {text.vocab_size}")
    problems.raise_if_any("config.json")
    return config
