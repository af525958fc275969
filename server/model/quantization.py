"""Which weights of a checkpoint are in MXFP8: what `quantization_config` says, and how the model finds them once loaded.

Only the decoder's projections can be quantised: those of attention and indexer, MLPs and experts. Embeddings, head, norms,
routers and the vision side are never.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from server.kernels.mxfp8 import GROUP_SIZE, Mxfp8Weight
from server.model.config_reader import Section

SCALES = "scales"  # a quantised parameter's scales are a parameter of their own, `<name>.scales`

_KNOWN_KEYS = {"quant_method", "activation_scheme", "weight_block_size", "ignored_layers", "fmt"}


@dataclass(frozen=True)
class Quantization:
    """MXFP8 for all projections but some.

    Attributes:
        ignored_layers: modules that are not quantised, each with everything below it: by full name, by a name without
            `language_model.`, or by the first parts of either.
    """

    ignored_layers: tuple[str, ...]

    def covers(self, tensor_name: str) -> bool:
        """Whether the weight of a projection, by its released name, is quantised."""
        spellings = (tensor_name, tensor_name.removeprefix("language_model."))
        return not any(name.startswith(f"{ignored}.") for name in spellings for ignored in self.ignored_layers)


def read_quantization(root: Section) -> Quantization | None:
    """Read `quantization_config`, which some files have inside `text_config`; None for a checkpoint without."""
    text = root.section("text_config")
    sections = [found for holder in (root, text) if holder and (found := holder.section("quantization_config"))]
    if not sections:
        return None
    for section in sections:
        _refuse_unsupported(section)
    if any(section.values != sections[0].values for section in sections):
        root.problems.add(sections[1].path, f"contradicts {sections[0].path}")
    ignored = sections[0].values.get("ignored_layers") or []
    if not isinstance(ignored, list) or not all(isinstance(name, str) and name for name in ignored):
        sections[0].missing("ignored_layers", "must be a list of names")
        return None
    return Quantization(tuple(ignored))


def _refuse_unsupported(section: Section) -> None:
    if not section.has("quant_method"):
        section.missing("quant_method")
    section.supports("quant_method", ["mxfp8"])
    section.supports("activation_scheme", ["dynamic"])
    section.supports("weight_block_size", [[1, GROUP_SIZE]])
    section.supports("fmt", ["e4m3"])
    for key in section.values.keys() - _KNOWN_KEYS:
        section.missing(key, "is not supported")


def projection(weights: Mapping[str, Tensor], name: str) -> Tensor | Mxfp8Weight:
    """The weight of a projection in the format that it was loaded in."""
    scales = weights.get(f"{name}.{SCALES}")
    return weights[name] if scales is None else Mxfp8Weight(weights[name], scales)
