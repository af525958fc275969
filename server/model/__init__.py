"""MiniMax-M3 in PyTorch: configuration, checkpoint, text model, vision tower, and the runner that executes step plans."""
