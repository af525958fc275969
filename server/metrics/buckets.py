"""Buckets of the histograms: tokens every millisecond to a hundred, prompts of a million tokens, requests of hours."""

from typing import Final

FIRST_TOKEN_S: Final = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160, 320, 640, 1280, 2560)
STAGE_S: Final = (0.001, 0.0025, 0.005, *FIRST_TOKEN_S)
INTER_TOKEN_S: Final = (
    *(0.001, 0.002, 0.003, 0.004, 0.005, 0.006, 0.008, 0.01, 0.0125, 0.015, 0.02, 0.025, 0.03, 0.04, 0.05, 0.06, 0.075, 0.1),
    *(0.15, 0.2, 0.3, 0.5, 1, 2, 5, 10),
)
REQUEST_S: Final = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160, 320, 640, 1280, 2560, 5120, 10240)
TOKENS: Final = (
    *(1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000),
    *(100_000, 200_000, 500_000, 1_048_576),
)
CHOICES: Final = (1, 2, 4, 8, 16, 32, 64, 128)
