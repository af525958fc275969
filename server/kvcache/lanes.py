"""The three lanes of a page. One page id names the same tokens in every lane; a lane may live elsewhere than the others."""

import enum


class Lane(enum.IntFlag):
    """Which part of a page's contents: a set of lanes is their union."""

    DENSE = 1  # keys and values of the layers that read everything
    INDEX = 2  # index keys of the sparse layers, scanned in full
    SPARSE = 4  # keys and values of the sparse layers, read where selected


ALL_LANES = Lane.DENSE | Lane.INDEX | Lane.SPARSE
