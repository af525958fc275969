"""Pictures and clips against the reference implementation: features, and the logits of prompts that contain them."""

import numpy as np
import pytest
import torch

from server.messages import MediaKind
from tests.oracle import IMAGE_TOKEN, VIDEO_TOKEN

TOLERANCE = 1e-4
SEGMENT_LEN = 4  # temporal patches


def random_pixels(grid_thw, kind, seed=0):
    num_patches = int(np.prod(grid_thw))
    shape = (num_patches, 3, 14, 14) if kind is MediaKind.IMAGE else (num_patches, 3, 2, 14, 14)
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def reference_pixels(pixels):
    """What the reference's processor hands over: CLIP-normalised floats, stills repeated in time, flat."""
    if pixels.dim() == 4:
        pixels = torch.stack((pixels, pixels), dim=2)
    mean = torch.tensor([0.48145466, 0.4578275, 0.40821073]).view(3, 1, 1, 1)
    std = torch.tensor([0.26862954, 0.26130258, 0.27577711]).view(3, 1, 1, 1)
    return ((pixels / 255.0 - mean) / std).flatten(1)


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
    pixels = [random_pixels(grid, MediaKind.IMAGE, seed) for seed, grid in enumerate(grids)]
    ids = prompt_with(IMAGE_TOKEN, [12, 2])
    features = torch.cat(
        [small_blocks.model.encode_media(p, MediaKind.IMAGE, grid) for p, grid in zip(pixels, grids, strict=True)]
    )
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
    pixels = random_pixels(grid, MediaKind.VIDEO)
    ids = prompt_with(VIDEO_TOKEN, [4] * 6)  # one run of placeholders per temporal patch
    features = small_blocks.model.encode_media(pixels, MediaKind.VIDEO, grid)
    (ours,) = small_blocks.runner().step([(0, ids)], (placeholder_rows(ids, VIDEO_TOKEN), features))
    reference = small_blocks.reference_logits(
        ids, pixel_values_videos=reference_pixels(pixels), video_grid_thw=cut_into_segments(grid)
    )
    assert (ours - reference).abs().max().item() < TOLERANCE
    assert torch.equal(ours.argmax(-1), reference.argmax(-1))
    selections.assert_blocks_were_dropped(topk=4)


@pytest.mark.parametrize("grid", [(1, 2, 2), (1, 2, 10), (4, 4, 2), (5, 2, 4), (9, 2, 2)])
def test_features_of_any_grid(small_blocks, grid):
    pixels = random_pixels(grid, MediaKind.VIDEO)
    ours = small_blocks.model.encode_media(pixels, MediaKind.VIDEO, grid)
    with torch.inference_mode():
        output = small_blocks.reference.get_video_features(reference_pixels(pixels), cut_into_segments(grid))
    assert (ours - torch.cat(output.pooler_output)).abs().max().item() < TOLERANCE


def test_a_patch_sees_its_own_segment_only(small_blocks):
    grid = (6, 2, 2)
    pixels = random_pixels(grid, MediaKind.VIDEO)
    before = small_blocks.model.encode_media(pixels, MediaKind.VIDEO, grid)
    pixels[-1] = 255 - pixels[-1]
    after = small_blocks.model.encode_media(pixels, MediaKind.VIDEO, grid)
    changed = (before - after).abs().amax(-1) > 1e-6  # one token per temporal patch
    assert changed.tolist() == [False] * 4 + [True] * 2


@pytest.mark.parametrize(
    ("shape", "kind", "grid"),
    [
        ((4, 3, 14, 14), MediaKind.IMAGE, (1, 2, 4)),
        ((4, 3, 14, 14), MediaKind.VIDEO, (1, 2, 2)),
        ((3, 3, 14, 14), MediaKind.IMAGE, (1, 1, 3)),
    ],
)
def test_pixels_that_do_not_fit_their_grid_are_refused(small_blocks, shape, kind, grid):
    with pytest.raises(ValueError, match="do not fit"):
        small_blocks.model.encode_media(torch.zeros(shape, dtype=torch.uint8), kind, grid)
