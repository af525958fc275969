import math

import torch

from server.model.config import TextConfig, VisionConfig
from server.model.rope import patch_positions, rotate, text_cos_sin, vision_cos_sin


def test_text_table_turns_by_position_times_theta_power(real_blocks):
    text: TextConfig = real_blocks.config.text
    table = text_cos_sin(text)
    assert table.shape == (text.max_position_embeddings, text.rotary_dim)
    assert table.dtype == torch.float32
    for position, j in ((0, 0), (1, 3), (777, 1), (8191, 0)):
        angle = position * text.rope_theta ** (-2 * j / text.rotary_dim)
        assert abs(table[position, j].item() - math.cos(angle)) < 1e-3
        assert abs(table[position, text.rotary_dim // 2 + j].item() - math.sin(angle)) < 1e-3


def test_patches_come_in_merge_blocks_and_time_restarts_in_every_segment():
    positions = patch_positions((3, 2, 4), merge=2, segment_len=2).tolist()
    frame = [[0, 0], [0, 1], [1, 0], [1, 1], [0, 2], [0, 3], [1, 2], [1, 3]]
    assert positions == [[time, *place] for time in (0, 1, 0) for place in frame]


def test_vision_axes_share_the_head_and_leave_the_rest(real_blocks):
    vision: VisionConfig = real_blocks.config.vision
    axis = 2 * (vision.head_dim // 3 // 2)  # 6 of 20 dimensions
    cos, sin = vision_cos_sin(vision, torch.tensor([[1, 2, 3]]))
    assert cos.shape == sin.shape == (1, 3 * axis // 2)
    for i, position in enumerate((1, 2, 3)):
        for j in range(axis // 2):
            angle = position * 10000.0 ** (-2 * j / axis)
            assert abs(cos[0, i * axis // 2 + j].item() - math.cos(angle)) < 1e-6
            assert abs(sin[0, i * axis // 2 + j].item() - math.sin(angle)) < 1e-6
    x = torch.randn((1, 2, vision.head_dim), generator=torch.Generator().manual_seed(0))
    turned = rotate(x, cos, sin)
    assert torch.equal(turned[..., 3 * axis :], x[..., 3 * axis :])
    torch.testing.assert_close(turned.norm(dim=-1), x.norm(dim=-1))
