"""m3-server: an asynchronous inference server for MiniMax-M3."""

__version__ = "0.1.0"
