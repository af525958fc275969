import numpy as np
import pytest

from server.errors import MediaError
from server.media.geometry import (
    FACTOR,
    IMAGE_AREA,
    IMAGE_LONG_SIDE,
    VIDEO_AREA,
    VIDEO_LONG_SIDE,
    LongSideRule,
    Size,
    grid_of,
    long_side_rule,
    num_tokens,
    target_size,
)

# width, height -> (width, height, grid, tokens) by area, then by long side
IMAGES = [
    ((1920, 1080), (896, 504, (1, 36, 64), 576), (1932, 1092, (1, 78, 138), 2691)),
    ((3840, 2160), (896, 504, (1, 36, 64), 576), (2016, 1120, (1, 80, 144), 2880)),
    ((4032, 3024), (756, 560, (1, 40, 54), 540), (2016, 1512, (1, 108, 144), 3888)),
    ((4284, 5712), (560, 756, (1, 54, 40), 540), (1512, 2016, (1, 144, 108), 3888)),
    ((2000, 1334), (812, 532, (1, 38, 58), 551), (1988, 1344, (1, 96, 142), 3408)),
    ((1024, 768), (756, 560, (1, 40, 54), 540), (1036, 756, (1, 54, 74), 999)),
    ((672, 672), (672, 672, (1, 48, 48), 576), (672, 672, (1, 48, 48), 576)),
    ((1654, 2339), (560, 784, (1, 56, 40), 560), (1428, 2016, (1, 144, 102), 3672)),
    ((3584, 3584), (672, 672, (1, 48, 48), 576), (2016, 2016, (1, 144, 144), 5184)),
    ((1, 1), (56, 56, (1, 4, 4), 4), (112, 112, (1, 8, 8), 16)),
    ((13, 13), (56, 56, (1, 4, 4), 4), (112, 112, (1, 8, 8), 16)),
    ((42, 42), (56, 56, (1, 4, 4), 4), (112, 112, (1, 8, 8), 16)),
    ((70, 70), (56, 56, (1, 4, 4), 4), (112, 112, (1, 8, 8), 16)),
    ((400, 40), (392, 28, (1, 2, 28), 14), (1120, 112, (1, 8, 80), 160)),
    ((20000, 100), (9492, 28, (1, 2, 678), 339), (2016, 28, (1, 2, 144), 72)),
]


@pytest.mark.parametrize(("source", "by_area", "by_long_side"), IMAGES)
def test_pictures_become_the_documented_sizes_under_both_rules(source, by_area, by_long_side):
    for rule, expected in ((IMAGE_AREA, by_area), (IMAGE_LONG_SIDE, by_long_side)):
        size = target_size(Size(*source), rule)
        grid = grid_of(size)
        assert (size.width, size.height, grid, num_tokens(grid)) == expected


# 1280x720 at 1 frame per second: rule, frames -> size, grid, tokens per pair of frames
CLIPS = [
    (VIDEO_AREA, 10, (1008, 560), (5, 40, 72), 720),
    (LongSideRule(756), 11, (756, 420), (6, 30, 54), 405),
    (VIDEO_LONG_SIDE, 10, (672, 392), (5, 28, 48), 336),
    (LongSideRule(504), 10, (504, 280), (5, 20, 36), 180),
    (LongSideRule(1008), 10, (1008, 560), (5, 40, 72), 720),
    (LongSideRule(2016), 10, (1288, 728), (5, 52, 92), 1196),
]


@pytest.mark.parametrize(("rule", "num_frames", "expected", "grid", "tokens_per_pair"), CLIPS)
def test_clips_become_the_documented_sizes(rule, num_frames, expected, grid, tokens_per_pair):
    size = target_size(Size(1280, 720), rule)
    assert (size.width, size.height) == expected
    assert grid_of(size, num_frames) == grid
    assert num_tokens(grid) == grid[0] * tokens_per_pair


@pytest.mark.parametrize(("cap", "tokens_per_pair"), [(504, 180), (1008, 720), (2016, 2880)])
def test_larger_caps_cost_more_tokens_for_a_4k_clip(cap, tokens_per_pair):
    assert num_tokens(grid_of(target_size(Size(3840, 2160), LongSideRule(cap)), 2)) == tokens_per_pair


@pytest.mark.parametrize(("source", "expected"), [((400, 2), (812, 28)), ((2000, 10), (812, 28)), ((2, 400), (28, 812))])
def test_slivers_grow_by_area_when_a_side_rounds_to_nothing(source, expected):
    assert target_size(Size(*source), IMAGE_AREA) == Size(*expected)


def test_the_cap_wins_over_the_shortest_short_side():
    assert target_size(Size(2000, 10), IMAGE_LONG_SIDE) == Size(2016, 28)
    assert target_size(Size(2000, 100), IMAGE_LONG_SIDE) == Size(2016, 112)


@pytest.mark.parametrize("source", [(201, 1), (1, 201), (1, 300), (20001, 100)])
@pytest.mark.parametrize("rule", [IMAGE_AREA, IMAGE_LONG_SIDE])
def test_more_than_200_to_1_is_refused(source, rule):
    with pytest.raises(MediaError, match="200 times"):
        target_size(Size(*source), rule)


@pytest.mark.parametrize("rule", [IMAGE_AREA, IMAGE_LONG_SIDE])
def test_exactly_200_to_1_is_accepted(rule):
    assert target_size(Size(200, 1), rule).height >= FACTOR


def test_no_pixels_is_refused():
    with pytest.raises(MediaError, match="no pixels"):
        target_size(Size(0, 5), IMAGE_AREA)


def test_sizes_keep_their_bounds_for_random_sides():
    rng = np.random.default_rng(5)
    for width, height in rng.integers(1, 6000, size=(2000, 2)).tolist():
        if max(width, height) > 200 * min(width, height):
            continue
        by_area = target_size(Size(width, height), IMAGE_AREA)
        by_side = target_size(Size(width, height), IMAGE_LONG_SIDE)
        for size in (by_area, by_side):
            assert size.width % FACTOR == size.height % FACTOR == 0
            assert min(size.width, size.height) >= FACTOR
        assert max(by_side.width, by_side.height) <= 2016
        # A side that is held up at 28 may leave the area above its bound, as it does in the released processor.
        assert min(by_area.width, by_area.height) == FACTOR or by_area.width * by_area.height <= IMAGE_AREA.max_pixels


@pytest.mark.parametrize(("cap", "expected"), [(112, 112), (150, 140), (775, 756), (2016, 2016), (3584, 3584)])
def test_a_clients_cap_counts_in_units_of_28(cap, expected):
    assert long_side_rule(cap) == LongSideRule(expected)


@pytest.mark.parametrize("cap", [-1, 0, 111, 3585, 10**9])
def test_a_cap_out_of_range_is_refused(cap):
    with pytest.raises(MediaError, match="between 112 and 3584"):
        long_side_rule(cap)
