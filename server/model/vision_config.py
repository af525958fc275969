"""The vision tower's part of `config.json`."""

from dataclasses import dataclass

from server.model.config_reader import Section


@dataclass(frozen=True)
class VisionConfig:
    """The vision tower and its projector.

    Attributes:
        temporal_patch_size: frames per patch.
        spatial_merge_size: side of the square of patches that becomes one token.
        segment_max_temporal_patches: temporal patches of a clip that attend to each other.
        projector_hidden_size: inner width of both projector MLPs.
    """

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_channels: int
    patch_size: int
    temporal_patch_size: int
    spatial_merge_size: int
    layer_norm_eps: float
    rope_theta: float
    segment_max_temporal_patches: int
    projector_hidden_size: int

    @property
    def head_dim(self) -> int:
        """Width of one attention head."""
        return self.hidden_size // self.num_heads


def read_vision_config(section: Section, projector_hidden_size: int) -> VisionConfig:
    """Read `vision_config`; faults go to the section's problems."""
    merging = section.section("img_token_compression_config") or Section({}, section.problems, section.path)
    merging.supports("image_token_compression_method", ["patch_merge"])
    section.supports("model_type", ["clip_vision_model", "minimax_m3_vl_vision"])
    section.supports("hidden_act", ["gelu"])
    section.supports("position_embedding_type", ["rope"])
    section.supports("rope_mode", ["3d"])
    section.supports("patch_size", [14])
    section.supports("num_channels", [3])
    for holder in (section, merging):
        holder.supports("spatial_merge_size", [2])
        holder.supports("temporal_patch_size", [2])
    rope = section.section("rope_parameters")
    if rope:
        rope.supports("rope_type", ["axial", "default"])
    vision = VisionConfig(
        hidden_size=section.integer("hidden_size"),
        intermediate_size=section.integer("intermediate_size"),
        num_layers=section.integer("num_hidden_layers"),
        num_heads=section.integer("num_attention_heads"),
        num_channels=section.integer("num_channels"),
        patch_size=section.integer("patch_size"),
        temporal_patch_size=2,
        spatial_merge_size=2,
        layer_norm_eps=section.number("layer_norm_eps"),
        rope_theta=(rope or section).number("rope_theta"),
        segment_max_temporal_patches=section.integer("vision_segment_max_frames", default=4),
        projector_hidden_size=projector_hidden_size,
    )
    if not section.problems.found and vision.hidden_size % vision.num_heads:
        section.missing("hidden_size", "must be a multiple of num_attention_heads")
    return vision
