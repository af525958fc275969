"""What a check finds. Imports nothing of ours."""

import enum
from dataclasses import dataclass


class Level(enum.StrEnum):
    """How bad a finding is: an error keeps the checkpoint from being served, or makes another model of it."""

    ERROR = "error"
    WARNING = "warning"


class Area(enum.StrEnum):
    """What a finding is about."""

    CONFIG = "config"
    TENSORS = "tensors"
    TOKENIZER = "tokenizer"
    TEMPLATE = "chat template"
    GENERATION = "generation config"
    PREPROCESSOR = "preprocessor config"


@dataclass(frozen=True)
class Finding:
    """Something that is wrong with the checkpoint."""

    level: Level
    area: Area
    text: str
