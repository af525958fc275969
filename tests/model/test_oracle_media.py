"""Pictures and clips against the reference implementation: features, and the logits of prompts that contain them."""

import pytest
import torch

from tests.oracle import IMAGE_TOKEN, VIDEO_TOKEN

TOLERANCE = 1e-4
SEGMENT_LEN = 4  # temporal patches


def random_frames(grid_thw, num_frames=None, seed=0):
    """Frames of an item, [F, H, W, 3] uint8."""
    t, h, w = grid_thw
    shape = (2 * t if num_frames is None else num_frames, 14 * h, 14 * w, 3)
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def reference_pixels(frames):
    """What the reference's processor hands over: CLIP-normalised floats in merge-block order, an odd last frame repeated."""
    if frames.shape[0] % 2:
        frames = torch.cat((frames, frames[-1:]))
    mean = torch.tensor([0.48145466, 0.4578275, 0.40821073])
    std = torch.tensor([0.26862954, 0.26130258, 0.27577711])
    pixels = ((frames / 255.0 - mean) / std).permute(0, 3, 1, 2)  # [F, 3, H, W]
    t, h, w = pixels.shape[0] // 2, pixels.shape[2] // 14, pixels.shape[3] // 14
    blocks = pixels.reshape(t, 2, 3, h // 2, 2, 14, w // 2, 2, 14)
    return blocks.permute(0, 3, 6, 4, 7, 2, 1, 5, 8).reshape(t * h * w, -1)


def cut_into_segments(grid_thw):
    """The reference wants a clip's segments as clips of their own."""
    t, h, w = grid_thw
    return torch.tensor([[min(SEGMENT_LEN, t - begin), h, w] for begin in range(0, t, SEGMENT_LEN)])


def prompt_with(placeholder, counts, seed=3):
    """Text around runs of placeholders."""
    generator = torch.Generator().manual_seed(seed)
    ids = []
    for count in counts:
        ids += torch.randint(0, 250, (37,), generator=generator).tolist() + [placeholder] * count
    return ids + torch.randint(0, 250, (90,), generator=generator).tolist()


def placeholder_rows(ids, placeholder):
    return torch.tensor([i for i, token_id in enumerate(ids) if token_id == placeholder])


def test_an_image_changes_the_logits_as_in_the_reference(small_blocks, selections):
    grids = [(1, 6, 8), (1, 4, 2)]
    pixels = [random_frames(grid, 1, seed) for seed, grid in enumerate(grids)]
    ids = prompt_with(IMAGE_TOKEN, [12, 2])
    features = torch.cat(small_blocks.model.encode_media(pixels))
    (ours,) = small_blocks.runner().step([(0, ids)], (placeholder_rows(ids, IMAGE_TOKEN), features))
    reference = small_blocks.reference_logits(
        ids, pixel_values=torch.cat([reference_pixels(p) for p in pixels]), image_grid_thw=torch.tensor(grids)
    )
    assert (ours - reference).abs().max().item() < TOLERANCE
    assert torch.equal(ours.argmax(-1), reference.argmax(-1))
    assert (ours - small_blocks.runner().step([(0, ids)])[0]).abs().max().item() > 0.1, "the picture matters"
    selections.assert_blocks_were_dropped(topk=4)


def test_a_clip_of_several_segments_changes_the_logits_as_in_the_reference(small_blocks, selections):
    grid = (6, 4, 4)  # segments of 4 and 2 temporal patches
    pixels = random_frames(grid)
    ids = prompt_with(VIDEO_TOKEN, [4] * 6)  # one run of placeholders per temporal patch
    features = small_blocks.model.encode_media([pixels])[0]
    (ours,) = small_blocks.runner().step([(0, ids)], (placeholder_rows(ids, VIDEO_TOKEN), features))
    reference = small_blocks.reference_logits(
        ids, pixel_values_videos=reference_pixels(pixels), video_grid_thw=cut_into_segments(grid)
    )
    assert (ours - reference).abs().max().item() < TOLERANCE
    assert torch.equal(ours.argmax(-1), reference.argmax(-1))
    selections.assert_blocks_were_dropped(topk=4)


@pytest.mark.parametrize(
    ("grid", "num_frames"), [((1, 2, 2), 2), ((1, 2, 10), 1), ((4, 4, 2), 7), ((5, 2, 4), 10), ((9, 2, 2), 17)]
)
def test_features_of_any_grid(small_blocks, grid, num_frames):
    pixels = random_frames(grid, num_frames)
    ours = small_blocks.model.encode_media([pixels])[0]
    with torch.inference_mode():
        output = small_blocks.reference.get_video_features(reference_pixels(pixels), cut_into_segments(grid))
    assert (ours - torch.cat(output.pooler_output)).abs().max().item() < TOLERANCE


def test_a_patch_sees_its_own_segment_only(small_blocks):
    grid = (6, 2, 2)
    pixels = random_frames(grid)
    before = small_blocks.model.encode_media([pixels])[0]
    pixels[-1, -1, -1] = 255 - pixels[-1, -1, -1]
    after = small_blocks.model.encode_media([pixels])[0]
    changed = (before - after).abs().amax(-1) > 1e-6  # one token per temporal patch
    assert changed.tolist() == [False] * 4 + [True] * 2


def test_a_batch_gives_every_item_the_features_that_it_has_alone(small_blocks):
    items = [random_frames((1, 4, 2), 1, seed=1), random_frames((5, 2, 4), 9, seed=2), random_frames((1, 2, 2), 2, seed=3)]
    together = small_blocks.model.encode_media(items)
    for item, features in zip(items, together, strict=True):
        torch.testing.assert_close(features, small_blocks.model.encode_media([item])[0], atol=TOLERANCE, rtol=0)


def test_a_clip_may_be_encoded_segment_by_segment(small_blocks):
    clip = random_frames((6, 2, 4), 11)
    num_frames = 2 * small_blocks.model.media_segment_len
    pieces = small_blocks.model.encode_media([clip[:num_frames], clip[num_frames:]])
    torch.testing.assert_close(torch.cat(pieces), small_blocks.model.encode_media([clip])[0], atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("shape", [(4, 3, 14, 14), (1, 14, 28, 3), (1, 28, 42, 3), (0, 28, 28, 3), (28, 28, 3)])
def test_frames_that_cannot_be_cut_into_patches_are_refused(small_blocks, shape):
    with pytest.raises(ValueError, match="cannot be cut"):
        small_blocks.model.encode_media([torch.zeros(shape, dtype=torch.uint8)])
