"""MiniMax-M3 on one rank: loading, the step's forward pass, logits and media features.

Owns the parameters. Knows nothing of requests, sampling or scheduling; the cache memory is handed in.
"""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import linear

from server.kernels.attention_batch import AttentionBatch
from server.kernels.patchify import patch_grid
from server.kvcache.pools import CachePools
from server.model.config import M3Config
from server.model.loader import load_parameters
from server.model.progress import Progress, ProgressBar
from server.model.projector import Projector
from server.model.rope import text_cos_sin
from server.model.shard import Alone, Collective, Shard
from server.model.text import TextModel
from server.model.vision import VisionTower
from server.model.weights import parameters


class M3Model:
    """The whole model, or one rank's part of it.

    Attributes:
        config: as read from the checkpoint.
        device: where parameters live and inputs are expected.
        dtype: of parameters and activations.
    """

    def __init__(self, config: M3Config, weights: Mapping[str, Tensor], collective: Collective) -> None:
        """Assemble the model from loaded parameters; use `load`."""
        self._embed = weights["embed"]  # [vocab, hidden]
        self._lm_head = weights["lm_head"]  # [vocab, hidden], or this rank's rows of it
        self._collective = collective
        self.config = config
        self.device = self._embed.device
        self.dtype = self._embed.dtype
        self._text = TextModel(weights, config.text, text_cos_sin(config.text).to(self.device), collective)
        self._tower = VisionTower(weights, config.vision) if config.vision else None
        self._projector = Projector(weights, config.vision) if config.vision else None

    @classmethod
    def load(
        cls,
        model_dir: Path,
        config: M3Config,
        device: torch.device,
        dtype: torch.dtype,
        shard: Shard | None = None,
        progress: Progress | None = None,
        collective: Collective | None = None,
    ) -> "M3Model":
        """Load a checkpoint in the released layout.

        Args:
            model_dir: folder with the safetensors files.
            config: of the same folder.
            device: for parameters and computation.
            dtype: of parameters and activations, except the fp32 router and patch projection.
            shard: this rank's share; the whole model when None.
            progress: follows the load; a bar on stderr when None.
            collective: joins the ranks; required with more than one rank.

        Raises:
            CheckpointError: what is wrong with the files, see `load_parameters`.
            ValueError: the model cannot be cut for that many ranks.
        """
        shard = shard or Shard()
        if shard.world > 1 and collective is None:
            raise ValueError("a model on several ranks needs a collective")
        weights = load_parameters(model_dir, parameters(config, shard), device, dtype, progress or ProgressBar())
        return cls(config, weights, collective or Alone())

    @torch.inference_mode()
    def forward(
        self,
        token_ids: Tensor,
        batch: AttentionBatch,
        pools: CachePools,
        embeddings: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        """Run one step.

        Args:
            token_ids: [T] int64.
            batch: where the T tokens stand and where their keys go.
            pools: the cache; this step's tokens are written.
            embeddings: (rows [n] int64 of the T tokens, features [n, hidden]) that replace token embeddings.

        Returns:
            [T, hidden] after the final norm, in the model dtype.
        """
        embedded = self._embed[token_ids]
        if embeddings is not None:
            rows, features = embeddings
            embedded[rows] = features.to(embedded.dtype)
        return self._text(embedded, batch, pools)

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """[S, hidden] rows of `forward` to [S, vocab] in the model dtype; all ranks call it together."""
        logits = linear(hidden, self._lm_head)
        if logits.shape[1] < self.config.text.vocab_size:
            logits = self._collective.all_gather(logits)
        return logits

    @property
    def media_segment_len(self) -> int:
        """Temporal patches of a clip that see each other; clips may be encoded in pieces of so many."""
        return self.config.vision.segment_max_temporal_patches if self.config.vision else 1

    @torch.inference_mode()
    def encode_media(self, items: Sequence[Tensor]) -> list[Tensor]:
        """Features that replace the placeholder tokens of pictures and clips, or of whole segments of clips.

        Args:
            items: frames of each, [F, H, W, 3] uint8 RGB: one of a picture; an odd last frame of a clip counts twice.

        Returns:
            of each item [t * h * w / 4, hidden] in the model dtype, where t = ceil(F / 2), h = H / 14, w = W / 14.

        Raises:
            ValueError: the checkpoint has no vision tower, or sides are not multiples of 28.
        """
        if self._tower is None or self._projector is None:
            raise ValueError("this model has no vision tower")
        for frames in items:
            if frames.dim() != 4 or not frames.numel() or frames.shape[3] != 3 or frames.shape[1] % 28 or frames.shape[2] % 28:
                raise ValueError(f"frames of shape {list(frames.shape)} cannot be cut into patches")
        features = self._projector(self._tower([frames.to(self.device) for frames in items]))
        return list(torch.split(features, [math.prod(patch_grid(frames)) // 4 for frames in items]))
