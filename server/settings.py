"""The server's settings, read once from the environment (prefix `M3_`) or from the command line's flags.

A setting that does not exist is an error that names the nearest one that does; nothing is ignored and nothing is written
back. Units are in the names (`_s`, `_bytes`); `None` means "derive it", and the field's text says from what.
"""

import difflib
import enum
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, SecretStr, ValidationError

PREFIX = "M3_"
PositiveInt = Annotated[int, Field(ge=1)]
PositiveFloat = Annotated[float, Field(gt=0)]
HostList = Annotated[tuple[str, ...], BeforeValidator(lambda value: split_hosts(value))]


def split_hosts(value: object) -> object:
    """`a.org, .b.org` -> ("a.org", ".b.org"), in lower case; anything that is not text stays as it is."""
    return tuple(filter(None, (host.strip().lower() for host in value.split(",")))) if isinstance(value, str) else value


class SettingsError(Exception):
    """The settings cannot be used; the message says which one and what would be valid."""


class Device(enum.StrEnum):
    """Where the model runs."""

    AUTO = "auto"
    CPU = "cpu"
    CUDA = "cuda"


class Dtype(enum.StrEnum):
    """Type of weights and activations."""

    AUTO = "auto"
    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"


class ThinkingMode(enum.StrEnum):
    """The template's `thinking_mode`."""

    ENABLED = "enabled"
    DISABLED = "disabled"
    ADAPTIVE = "adaptive"


class ResizePolicy(enum.StrEnum):
    """Which rule decides the size of pictures and frames when a request does not choose."""

    AREA = "area"
    LONG_SIDE = "long_side"


class LogLevel(enum.StrEnum):
    """Verbosity of the server's own log."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


class LogFormat(enum.StrEnum):
    """What a line of log is."""

    TEXT = "text"
    JSON = "json"


class Settings(BaseModel):
    """Everything an operator can set. The field's description is the flag's help text."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())

    model: Path = Field(description="directory of the checkpoint")
    served_model_name: str | None = Field(None, description="name in /v1/models; the directory's name if unset")
    device: Device = Field(Device.AUTO, description="auto takes CUDA when there is a GPU")
    dtype: Dtype = Field(Dtype.AUTO, description="auto is bfloat16 on a GPU and float32 on a CPU")
    tensor_parallel_size: PositiveInt = Field(
        1, description="GPUs of this host, or processes on a CPU, that each hold a part of the model"
    )
    max_model_len: PositiveInt | None = Field(
        None, description="longest sequence in tokens, which must fit; what fits, at most the window, if unset"
    )
    max_num_seqs: PositiveInt = Field(64, description="sequences that run at the same time")
    max_num_batched_tokens: PositiveInt | None = Field(
        None, description="token budget of one step; 8192 on a GPU and 512 on a CPU if unset"
    )
    cache_bytes: PositiveInt | None = Field(
        None, description="size of the paged cache; on a GPU what weights and steps leave, on a CPU 1 GiB if unset"
    )
    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1)] = Field(
        0.9, description="share of the GPU's memory that may be in use, by all processes together; the rest stays free"
    )
    enable_prefix_caching: bool = Field(True, description="reuse whole pages of equal prefixes")
    enable_cuda_graphs: bool = Field(True, description="launch decode steps on a GPU as CUDA graphs, captured at start")
    overlap_steps: bool | None = Field(
        None, description="plan and launch a step while the one before it runs; on with a GPU and off on a CPU if unset"
    )
    max_queued_requests: PositiveInt = Field(1024, description="requests that may wait; beyond it 429")
    max_queued_tokens: PositiveInt | None = Field(
        None, description="prompt tokens that may wait for their first step; beyond it 429; eight windows if unset"
    )
    thinking_mode: ThinkingMode = Field(ThinkingMode.ADAPTIVE, description="when a request does not choose")
    media_workers: PositiveInt | None = Field(None, description="decoder processes; the number of cores, at most 8, if unset")
    media_slab_bytes: PositiveInt = Field(1 << 30, description="shared memory for decoded pictures and frames")
    media_task_timeout_s: PositiveFloat = Field(20.0, description="a decoder that takes longer over one picture is killed")
    media_clip_timeout_s: PositiveFloat = Field(
        120.0, description="a decoder that takes longer over a part of a clip is killed"
    )
    media_policy: ResizePolicy = Field(
        ResizePolicy.AREA,
        description="size of pictures and frames when a request does not choose: area (576 tokens a picture, 768 a pair of"
        " frames) or long_side (2016 and 672 pixels)",
    )
    media_feature_cache_bytes: Annotated[int, Field(ge=0)] | None = Field(
        None, description="device memory for encoded media of earlier requests; 1 GiB on a GPU and 64 MiB on a CPU if unset"
    )
    media_fetch_timeout_s: PositiveFloat = Field(30.0, description="time for fetching one picture or clip, redirects included")
    media_allowed_hosts: HostList = Field(
        (),
        description="hosts that media may be fetched from, separated by commas; .example.com is all of its subdomains;"
        " every public host if empty",
    )
    media_allow_private_hosts: bool = Field(
        False, description="also fetch from loopback and private addresses; only for tests on one machine"
    )
    media_local_root: Path | None = Field(None, description="directory that file:// media may be read from; none if unset")
    max_images: PositiveInt = Field(200, description="pictures per request")
    max_image_bytes: PositiveInt = Field(30 << 20, description="encoded size of one picture")
    max_videos: PositiveInt = Field(20, description="clips per request")
    max_video_bytes: PositiveInt = Field(250 << 20, description="encoded size of one clip")
    max_video_seconds: PositiveFloat = Field(3600.0, description="duration of one clip")
    max_video_frames: PositiveInt = Field(2400, description="frames that are taken from one clip")
    max_video_pixels: PositiveInt = Field(301_056_000, description="pixels of all frames taken from one clip, after the resize")
    max_media_bytes: PositiveInt = Field(512 << 20, description="encoded size of all media of a request")
    max_fetched_bytes: PositiveInt = Field(
        1 << 30, description="encoded size of all media that were fetched and are not decoded yet; beyond it 429"
    )
    video_fps: Annotated[float, Field(ge=0.2, le=5)] = Field(1.0, description="frames per second when a request does not say")
    video_keep_last: bool = Field(False, description="always take a clip's last frame, too")
    max_body_bytes: PositiveInt = Field(64 << 20, description="size of an HTTP request body")
    max_bodies_bytes: PositiveInt = Field(
        1 << 30, description="size of all HTTP request bodies that are being read at the same time; beyond it 429"
    )
    prepare_workers: PositiveInt = Field(2, description="processes that prepare request bodies too large for the front itself")
    prepare_niceness: Annotated[int, Field(ge=0, le=19)] = Field(
        19, description="how far those processes give way to all others; lower where nothing ever leaves them a core"
    )
    body_timeout_s: PositiveFloat = Field(120.0, description="a request's body must be there by then")
    engine_start_timeout_s: PositiveFloat = Field(3600.0, description="the model must be loaded by then")
    stall_timeout_s: PositiveFloat = Field(
        120.0, description="an engine that ends no step for that long hangs: its stacks are logged and the server ends"
    )
    drain_timeout_s: Annotated[float, Field(ge=0)] = Field(
        600.0, description="after SIGTERM, time for requests that are already there; then they end with an error"
    )
    slow_client_timeout_s: PositiveFloat = Field(
        120.0, description="a stream is given up when its client reads nothing for that long"
    )
    api_keys: SecretStr | None = Field(
        None, description="keys that clients must send, separated by commas; better in the environment or in a file"
    )
    api_keys_file: Path | None = Field(None, description="file with one key per line; lines that begin with # are skipped")
    admin_port: Annotated[int, Field(ge=0, le=65535)] | None = Field(
        None, description="a port of its own for metrics and health; metrics are on the main port if unset"
    )
    admin_host: str = Field("127.0.0.1", description="address of the admin port")
    log_level: LogLevel = Field(LogLevel.INFO, description="verbosity of the log")
    log_format: LogFormat = Field(LogFormat.TEXT, description="text, or json with one object per line")
    log_content: bool = Field(False, description="let the log show what clients send")

    @property
    def model_name(self) -> str:
        """The name clients use."""
        return self.served_model_name or self.model.resolve().name


def nearest(name: str, valid: Iterable[str]) -> str:
    """A hint that names the valid spelling closest to `name`, or an empty string when nothing is close."""
    matches = difflib.get_close_matches(name, list(valid), n=1, cutoff=0.6)
    return f"; did you mean {matches[0]}?" if matches else ""


def load_settings(values: Mapping[str, Any] | None = None, environ: Mapping[str, str] | None = None) -> Settings:
    """Read the settings from `values` (flags) over the environment.

    Raises:
        SettingsError: an `M3_` variable that does not exist, a missing model, or a value that does not parse; all faults
            are in the one message.
    """
    environ = os.environ if environ is None else environ
    known = {PREFIX + name.upper(): name for name in Settings.model_fields}
    faults = [
        f"{name}: no such setting{nearest(name, known)}" for name in environ if name.startswith(PREFIX) and name not in known
    ]
    given: dict[str, Any] = {known[name]: value for name, value in environ.items() if name in known}
    for name, value in (values or {}).items():
        if name in Settings.model_fields:
            given[name] = value
        else:
            faults.append(f"{name}: no such setting{nearest(name, Settings.model_fields)}")
    try:
        settings = Settings.model_validate(given)
    except ValidationError as error:
        faults += [f"{PREFIX}{str(fault['loc'][0]).upper()}: {fault['msg']}" for fault in error.errors()]
        settings = None
    if faults or settings is None:
        raise SettingsError("; ".join(faults))
    return settings
